//! The integration tests of ranks on a CUDA device: a program of their own, because they load
//! stand-ins for NVIDIA's libraries into it and set its environment.

mod cuda;
#[allow(dead_code)]
mod lab;
