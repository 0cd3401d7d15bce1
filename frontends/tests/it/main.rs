//! The integration tests of checkpoints and configs, in one program.

mod fixtures;
mod hostile;
mod save;
