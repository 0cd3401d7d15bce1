//! The integration test of the sources of the prover.

mod experts;
mod sources;
