//! The integration tests of lowering and of kernels for CUDA, in one program.

mod cuda;
mod products;
