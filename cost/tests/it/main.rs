//! Tests of prices against published step times.

mod tables;
