//! Kernels for CUDA devices, tested without one: their numbers on the CPU (`numbers`), their
//! registers and memory by the real compiler (`resources`).

mod cases;
mod emulator;
mod numbers;
mod resources;
