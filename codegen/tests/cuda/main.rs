//! Kernels for CUDA devices, tested without one: their numbers on the CPU (`numbers`, `programs`), their
//! registers and memory by the real compiler (`resources`).

mod cases;
mod emulator;
mod numbers;
mod programs;
mod resources;
