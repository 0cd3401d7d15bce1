//! The integration tests of kernels, collectives and sessions, in one program.

mod collectives;
mod exchange;
mod experts;
mod kernels;
mod lab;
mod products;
mod progress;
mod scan;
mod session;
