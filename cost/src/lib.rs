//! What a training step costs on a machine, as `docs/cost.md` says.
//!
//! Constants belong to machines ([`device`]), are few, and say where they were measured. Kernels
//! ([`kernel`]) and exchanges ([`collective`]) are pure functions; [`step`] puts them together in closed
//! form, for layouts that are not compiled yet and for published runs of other software ([`table`]).

pub mod band;
pub mod beside;
pub mod collective;
pub mod device;
pub mod fit;
pub mod held;
pub mod kernel;
pub mod layer;
pub mod layout;
pub mod model;
pub mod parts;
pub mod plan;
pub mod step;
pub mod table;
