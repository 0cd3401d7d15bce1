//! The integration tests of checkpoints and configs, in one program.

mod fixtures;
mod foreign;
mod hostile;
mod keys;
mod mxfp4;
mod save;
mod sizes;
mod wrappers;
