//! Windowed forms: what is gathered and then used is used block by block, as the blocks come.

pub mod ring;
