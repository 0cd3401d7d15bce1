//! Tests of prices against published step times.

mod closed;
mod held;
mod tables;
