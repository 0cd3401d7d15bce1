//! Windowed forms: what is gathered and then used at once is used piece by piece, as the pieces come.

pub mod ragged;
pub mod ring;
pub mod summa;
