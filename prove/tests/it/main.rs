//! The integration tests of the prover that need no plan.

mod declared;
mod experts;
mod sources;
