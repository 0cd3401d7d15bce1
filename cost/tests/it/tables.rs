//! Published step times: `tests/data/normalised_shared.csv`, 131 runs of five sources.

use shardc_cost::device::Device;
use shardc_cost::table::{self, Row};
use std::collections::BTreeMap;

const TABLE: &str = include_str!("../data/normalised_shared.csv");

/// A run, what was measured and its chip.
struct Run {
    row: Row,
    source: String,
    /// Layouts of one model, number of ranks and batch.
    alike: String,
    chip: String,
    measured: f64,
}

fn runs() -> Vec<Run> {
    let devices = Device::known();
    let one = |row: Row| {
        let of = |c: &str| row.text(c).to_string();
        let chip = devices.iter().find(|d| d.name == of("hw")).expect("known").chip.clone();
        let alike = [of("source"), of("model"), of("gpus"), of("gbs"), of("seq"), of("hw")].join("|");
        let measured = of("step_s").parse().expect("measured");
        Run { source: of("source"), alike, chip, measured, row }
    };
    table::read(TABLE).expect("a table").into_iter().map(one).collect()
}

/// Machines with this share of the peak for the products of a chip.
fn with(gemm: &BTreeMap<String, f64>) -> Vec<Device> {
    let mut all = Device::known();
    for d in &mut all {
        d.fit.gemm.value = gemm.get(&d.chip).copied().unwrap_or(0.80);
    }
    all
}

fn errors(runs: &[&Run], devices: &[Device]) -> Vec<f64> {
    let one = |r: &&Run| r.row.price(devices).expect("a price").total / r.measured - 1.0;
    runs.iter().map(one).collect()
}

/// The share with which the runs of a chip are priced best, by the mean of absolute logarithms.
fn fit(runs: &[&Run], chip: &str) -> Option<f64> {
    let own: Vec<&Run> = runs.iter().filter(|r| r.chip == chip).copied().collect();
    let loss = |gemm: f64| -> f64 {
        let devices = with(&BTreeMap::from([(chip.to_string(), gemm)]));
        errors(&own, &devices).iter().map(|e| (1.0 + e).ln().abs()).sum()
    };
    let grid = (0..=100).map(|i| 0.45 + 0.005 * f64::from(i));
    let best = grid.map(|g| (loss(g), g)).min_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|_| !own.is_empty()).map(|b| b.1)
}

fn fitted(runs: &[&Run]) -> BTreeMap<String, f64> {
    let chips: std::collections::BTreeSet<String> = runs.iter().map(|r| r.chip.clone()).collect();
    chips.into_iter().filter_map(|c| Some((c.clone(), fit(runs, &c)?))).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let n = all.len();
    if n % 2 == 1 { all[n / 2] } else { (all[n / 2 - 1] + all[n / 2]) / 2.0 }
}

/// Kendall's tau over pairs of alike runs; equal measurements are no pair.
fn tau(runs: &[&Run], priced: &[f64]) -> (f64, usize) {
    let (mut agree, mut pairs) = (0i64, 0usize);
    for i in 0..runs.len() {
        for j in 0..i {
            let by = runs[i].measured - runs[j].measured;
            if runs[i].alike != runs[j].alike || by == 0.0 {
                continue;
            }
            pairs += 1;
            let said = priced[i] - priced[j];
            agree += if said * by > 0.0 { 1 } else { -1 };
        }
    }
    (agree as f64 / pairs.max(1) as f64, pairs)
}

#[test]
fn leave_one_source_out() {
    let runs = runs();
    let all: Vec<&Run> = runs.iter().collect();
    let sources: std::collections::BTreeSet<&str> = runs.iter().map(|r| &*r.source).collect();
    let gemm = fitted(&all);
    println!("in sample: {gemm:?}");
    let e = errors(&all, &with(&gemm));
    for (r, e) in all.iter().zip(&e) {
        println!("{:18} {:9.3} {:+.3}", r.row.text("id"), r.measured, e);
    }
    let abs: Vec<f64> = e.iter().map(|e| e.abs()).collect();
    println!("in sample median {:.3}", median(abs));
    let mut pooled = vec![];
    for s in sources {
        let rest: Vec<&Run> = runs.iter().filter(|r| r.source != s).collect();
        let held: Vec<&Run> = runs.iter().filter(|r| r.source == s).collect();
        let devices = with(&fitted(&rest));
        let e = errors(&held, &devices);
        let abs: Vec<f64> = e.iter().map(|e| e.abs()).collect();
        let priced: Vec<f64> = held.iter().zip(&e).map(|(r, e)| r.measured * (1.0 + e)).collect();
        let mean = e.iter().sum::<f64>() / e.len() as f64;
        println!("{s}: median {:.3} bias {mean:+.3} tau {:?} {:?}", median(abs.clone()), tau(&held, &priced), fitted(&rest));
        pooled.extend(abs);
    }
    println!("pooled {:.3}", median(pooled));
}
