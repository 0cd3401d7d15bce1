//! Constants from measured step times: which of them some runs determine, and what they are then.

use crate::device::{Constant, Device, Fit, Provenance};
use crate::table::Run;
use shardc_ir::diag::Result;

/// Runs that there must be for each constant that is fitted.
pub const RUNS: usize = 4;

/// Values of a constant that are tried between its ends.
const GRID: usize = 16;

/// How often all constants are looked at again, in halved steps.
const ROUNDS: i32 = 7;

/// Loss up to which other values explain the runs nearly as well, relative and absolute: 1 % of a step is noise.
const NEAR: (f64, f64) = (1.25, 0.01);

/// A constant that determines prices, and where it is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    pub start: f64,
    pub range: [f64; 2],
}

/// The values of all terms with the least loss that coordinate descent finds from their starts.
pub fn least(terms: &[Term], loss: &dyn Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut at: Vec<f64> = terms.iter().map(|t| t.start).collect();
    let mut best = loss(&at);
    for round in 0..ROUNDS {
        let step = 0.5f64.powi(round + 1);
        for (i, term) in terms.iter().enumerate() {
            let [low, high] = term.range;
            for by in [-1.0, -0.5, -0.25, 0.25, 0.5, 1.0] {
                let mut next = at.clone();
                next[i] = (at[i] + by * step * (high - low)).clamp(low, high);
                let is = loss(&next);
                if is < best {
                    (best, at) = (is, next);
                }
            }
        }
    }
    at
}

/// The values of one term with which the loss is nearly the least, whatever the others are then.
pub fn near(terms: &[Term], at: &[f64], which: usize, loss: &dyn Fn(&[f64]) -> f64) -> [f64; 2] {
    let most = (loss(at) * NEAR.0).max(loss(at) + NEAR.1);
    let [low, high] = terms[which].range;
    let mut found = [at[which]; 2];
    for i in 0..=GRID {
        let x = low + (high - low) * i as f64 / GRID as f64;
        let held = |(k, t): (usize, &Term)| match k == which {
            true => Term { start: x, range: [x, x] },
            false => Term { start: at[k], range: t.range },
        };
        let others: Vec<Term> = terms.iter().enumerate().map(held).collect();
        let best = least(&others, loss);
        if loss(&best) <= most {
            // As far as to the next value that was looked at.
            let step = (high - low) / GRID as f64;
            found = [found[0].min((x - step).max(low)), found[1].max((x + step).min(high))];
        }
    }
    found
}

/// Mean of the absolute logarithms of price on a machine over measurement.
///
/// # Errors
/// Those of [`Run::price_on`].
pub fn error(runs: &[(Run, f64)], device: &Device) -> Result<f64> {
    let mut sum = 0.0;
    for (run, measured) in runs {
        sum += (run.price_on(device)?.total / measured).ln().abs();
    }
    Ok(sum / runs.len().max(1) as f64)
}

/// Names of the constants of [`Fit`], in the order in which runs are asked for them: those on which most of a step
/// depends come first.
pub const NAMES: [&str; 7] = ["gemm", "nic", "link", "hbm", "kernel", "hop", "step"];

/// A constant by its name of [`NAMES`].
pub fn constant<'a>(fit: &'a mut Fit, name: &str) -> &'a mut Constant {
    match name {
        "gemm" => &mut fit.gemm,
        "nic" => &mut fit.nic,
        "link" => &mut fit.link,
        "hbm" => &mut fit.hbm,
        "kernel" => &mut fit.kernel,
        "hop" => &mut fit.hop,
        _ => &mut fit.step,
    }
}

/// The loss of runs with these constants of a machine.
fn loss(runs: &[(Run, f64)], device: &Device, names: &[&str], values: &[f64]) -> f64 {
    let mut device = device.clone();
    let set = |(n, v): (&&str, &f64)| constant(&mut device.fit, n).value = *v;
    names.iter().zip(values).for_each(set);
    error(runs, &device).unwrap_or(f64::INFINITY)
}

/// The machine of runs with the constants that they determine, at most one for each [`RUNS`] of them: those whose values of
/// nearly the least loss span at most half of what their prior leaves open. The others stay what they were.
pub fn machine(device: &Device, runs: &[(Run, f64)]) -> Device {
    let range = |name: &str| constant(&mut Fit::default(), name).range;
    let matters = |name: &&str| {
        let [low, high] = range(name).map(|x| loss(runs, device, &[name], &[x]));
        (low - high).abs() > NEAR.1
    };
    let mut names: Vec<&str> = NAMES.into_iter().filter(matters).take(runs.len() / RUNS).collect();
    let mut out = device.clone();
    loop {
        let term = |name: &&str| {
            let range = range(name);
            let start = constant(&mut out.fit, name).value.clamp(range[0], range[1]);
            Term { start, range }
        };
        let terms: Vec<Term> = names.iter().map(term).collect();
        let of = |values: &[f64]| loss(runs, device, &names, values);
        let best = least(&terms, &of);
        let near: Vec<[f64; 2]> = (0..terms.len()).map(|i| near(&terms, &best, i, &of)).collect();
        let width = |r: &[f64; 2]| r[1] - r[0];
        let open = |i: usize| width(&near[i]) / width(&terms[i].range);
        let widest = (0..terms.len()).max_by(|a, b| open(*a).total_cmp(&open(*b)));
        match widest.filter(|i| open(*i) > 0.5) {
            // Those that are left are looked for again.
            Some(i) => drop(names.remove(i)),
            None => {
                for ((name, value), range) in names.iter().zip(best).zip(near) {
                    let from = Provenance::Measured;
                    *constant(&mut out.fit, name) = Constant { value, from, range };
                }
                return out;
            }
        }
    }
}
