//! Kernels for any processor of the target (`SHARDC_CPU=portable`), by tests that know the numbers.

use std::process::Command;

/// A variable of a process, so the tests run in another one.
#[test]
fn kernels_of_any_processor_have_the_numbers() {
    let tests = ["ranks::llama_gqa", "ranks::gpt2", "compiled::plans_train_to_the_same_bits"];
    let mut c = Command::new(std::env::current_exe().expect("this program"));
    let out = c.arg("--exact").args(tests).env("SHARDC_CPU", "portable").output();
    let out = out.expect("it starts");
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("3 passed"), "{said}");
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    let out = c.arg("doctor").env("SHARDC_CPU", "portable").output().expect("it starts");
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(said.contains("any processor of the target"), "{said}");
}
