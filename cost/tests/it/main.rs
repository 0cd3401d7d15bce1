//! Tests of prices against published step times.

mod closed;
mod tables;
