//! Every schedule trains the fixtures to the numbers of transformers, on ranks of a pipeline, alone
//! and with other axes.

mod fixture;
use fixture::*;
use shardc_passes::options::{Options, Order};

/// Options for a pipeline of these axes with `m` microbatches.
fn pipeline(mesh: &[(&str, usize)], schedule: &str, m: usize) -> Options {
    let dp: usize = mesh.iter().filter(|a| a.0.starts_with("dp")).map(|a| a.1).product();
    let mut o = options(mesh, false, ROWS / dp / m);
    o.schedule = Order::Named(schedule.into());
    o
}

#[test]
fn two_stages() {
    for m in [1, 2, 4] {
        for schedule in ["gpipe", "1f1b"] {
            train_and_compare("llama_gqa", &pipeline(&[("pp", 2)], schedule, m));
        }
    }
}
