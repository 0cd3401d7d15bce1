//! Kernels for CUDA devices, tested without one: their numbers on the CPU (`numbers`, `programs`; on a device if there is one), their
//! registers and memory by the real compiler (`resources`), and that devices can launch them (`limits`).

mod cases;
mod device;
mod emulator;
mod exchanges;
mod limits;
mod numbers;
mod programs;
mod resources;
