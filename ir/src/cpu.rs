//! The processor that kernels are for: the one at hand, or any of the target.

use std::sync::OnceLock;

/// The variable that says `portable`: then kernels use nothing but what every processor of the target has, as they
/// do where there is no more. For tests of that code, and of a processor that computes wrongly.
pub const CPU: &str = "SHARDC_CPU";

/// Whether kernels are those for any processor.
pub fn portable() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| std::env::var_os(CPU).is_some_and(|word| word == "portable"))
}
