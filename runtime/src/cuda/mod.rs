//! Ranks on a CUDA device: memory, code and streams through the driver, which is loaded when it is
//! first asked for.
//!
//! Ranks are threads of this process with a stream each; several may share a device. Their
//! collectives read each other's memory where it lies ([`Device`] is shared, all
//! else is a rank's own). Elements of collectives are folded in the order that
//! [`crate::transport::Transport`] states.

mod arena;
mod device;
mod engine;
mod exec;
mod graphs;
mod modules;
mod movement;
mod nccl;
mod products;
mod timing;

pub use arena::DeviceArena;
pub use device::{Device, Stream, queues};
pub use engine::Devices;
pub use exec::DeviceExecutor;
pub use modules::{Code, Modules, Ready};
pub use movement::OnDevice;
pub use nccl::{Id, Nccl, id, version};
pub use products::Products;
pub use timing::{Timed, Timer};
