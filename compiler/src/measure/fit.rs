//! Constants of a machine from its launches.

use super::products::products;
use super::samples::{Sample, quantile};
use super::today;
use shardc_cost::collective::Group;
use shardc_cost::device::{Constant, Device, Precision, Provenance};
use shardc_cost::kernel::{ATTENTION_BACKWARD, Attention};
use shardc_cost::plan::launch::Work;
use shardc_ir::ops::Sends;

/// FLOPs of weighing a score that are tried.
const WEIGHING: [f64; 15] = [
    0.0, 16.0, 32.0, 64.0, 96.0, 128.0, 160.0, 192.0, 224.0, 256.0, 320.0, 384.0, 512.0, 768.0,
    1024.0,
];

/// Largest launch over rows that says what a launch costs, in bytes.
const SMALL: f64 = 8192.0;

/// Fewest launches by which a constant is known.
pub(super) const ENOUGH: usize = 8;

/// What is fitted.
pub(super) struct FitOptions {
    pub ranks: usize,
    /// Element types of products that were measured; those of the first say how short dims count for all, and are
    /// those of attention.
    pub types: Vec<Precision>,
    /// Tiles that products may have: those that explain their times best are taken.
    pub tiles: Vec<Vec<[f64; 3]>>,
    /// Products with an epilogue are kernels of their own, and all others a library's or not.
    pub epilogues: Option<bool>,
}

/// Fits what the samples identify. What the device says already of its peak and of its memory is taken for what it
/// could at most, and is raised by what was faster.
pub(super) fn fit(d: &mut Device, all: &[Sample], how: &FitOptions) {
    launch(d, all);
    rows(d, all);
    products(d, all, how);
    attention(d, all, how.types[0]);
    if how.ranks > 1 {
        exchanges(d, all);
        sends(d, all);
    }
}

/// How a constant is taken from its values.
const MEDIAN: &str = "the median";
const LOWER: &str = "the lower quartile";
const BY_TIME: &str = "the middle by time";
pub(super) const OF_SUMS: &str = "all bytes over all time";
pub(super) const FITTED: &str = "the least squares";

/// What was measured, with where from: `how` says what of the values it is.
pub(super) fn measured(
    d: &mut Device,
    name: &str,
    values: &[f64],
    (value, how): (f64, &str),
    unit: &str,
) -> Constant {
    let of = |part| quantile(values.to_vec(), part);
    let (low, high) = (of(0.25), of(0.75));
    let text = format!(
        "measured {}: {value:.3e} {unit}, {how} of {} launches, half between {low:.3e} and {high:.3e}",
        today(),
        values.len()
    );
    d.source.insert(name.into(), text);
    Constant { value, from: Provenance::Measured, range: [low, high] }
}

/// Says that there was too little to see.
pub(super) fn unknown(d: &mut Device, name: &str) {
    d.source.insert(name.into(), "a prior: nothing that ran identifies it".into());
}

/// Of values with weights the middle one by weight: as much is above as below.
pub(super) fn middle(mut all: Vec<(f64, f64)>) -> f64 {
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half: f64 = all.iter().map(|x| x.1).sum::<f64>() / 2.0;
    let mut sum = 0.0;
    for (value, weight) in all {
        sum += weight;
        if sum >= half {
            return value;
        }
    }
    0.0
}

fn launch(d: &mut Device, all: &[Sample]) {
    let small = |s: &Sample| match s.work {
        Some(Work::Rows { bytes }) if bytes <= SMALL => Some(s.seconds),
        _other => None,
    };
    let times: Vec<f64> = all.iter().filter_map(small).collect();
    if times.len() < ENOUGH {
        return unknown(d, "kernel");
    }
    let value = quantile(times.clone(), 0.25);
    d.fit.kernel = measured(d, "kernel", &times, (value, LOWER), "s");
}

fn rows(d: &mut Device, all: &[Sample]) {
    let kernel = d.fit.kernel.value;
    let of = |s: &Sample| match s.work {
        Some(Work::Rows { bytes }) if bytes > SMALL => {
            // No launch is all beginning.
            let moving = (s.seconds - kernel).max(0.2 * s.seconds);
            Some((bytes / moving, moving * s.calls as f64, bytes * s.calls as f64))
        }
        _other => None,
    };
    let rates: Vec<(f64, f64, f64)> = all.iter().filter_map(of).collect();
    if rates.len() < ENOUGH {
        return unknown(d, "fit.hbm");
    }
    // All bytes in all their time: sums of many launches come out.
    let (time, bytes) = rates.iter().fold((0.0, 0.0), |(t, b), r| (t + r.1, b + r.2));
    let speed = bytes / time;
    if speed > d.hbm {
        d.hbm = speed;
        d.source.insert("hbm".into(), format!("kernels over rows, {}", today()));
    }
    let shares: Vec<f64> = rates.iter().map(|r| r.0 / d.hbm).collect();
    d.fit.hbm = measured(d, "fit.hbm", &shares, (speed / d.hbm, OF_SUMS), "of hbm");
}

/// Attention: what weighing a score takes beside its products, by which shares of the peak agree best, that share
/// forward, and what backward reaches of it.
fn attention(d: &mut Device, all: &[Sample], p: Precision) {
    let kernel = d.fit.kernel.value;
    let of = |s: &Sample| match s.work {
        Some(Work::Attention { sizes, precision, backward }) if precision == p => {
            let took = (s.seconds - kernel).max(0.2 * s.seconds);
            Some((sizes, backward, took, took * s.calls as f64))
        }
        _other => None,
    };
    let own: Vec<(Attention, bool, f64, f64)> = all.iter().filter_map(of).collect();
    if own.len() < ENOUGH / 2 {
        return unknown(d, "attention");
    }
    let mut best: Option<(f64, f64, [f64; 2], Vec<f64>)> = None;
    for weighing in WEIGHING {
        let device = Device { weighing: Some(weighing), backward: None, ..d.clone() };
        // At a share of 1 the price is the kernel's at the peak.
        let share = |&(sizes, backward, took, weight): &(Attention, bool, f64, f64)| {
            let (f, b) = sizes.seconds(&device, 1.0, p).ok()?;
            Some((backward, (if backward { b } else { f } - kernel) / took, weight))
        };
        let shares: Vec<(bool, f64, f64)> = own.iter().filter_map(share).collect();
        let of = |back: bool| {
            middle(shares.iter().filter(|s| s.0 == back).map(|s| (s.1, s.2)).collect())
        };
        let [forward, backward] = [of(false), of(true)];
        let off =
            |s: &(bool, f64, f64)| s.2 * (s.1 / if s.0 { backward } else { forward }).ln().abs();
        let off: f64 = shares.iter().map(off).sum();
        let fits = forward > 0.0 && forward <= 1.0 && backward > 0.0;
        if fits && best.as_ref().is_none_or(|b| off < b.0) {
            let ahead = shares.iter().filter(|s| !s.0).map(|s| s.1).collect();
            best = Some((off, weighing, [forward, backward / forward], ahead));
        }
    }
    let Some((_, weighing, [share, back], shares)) = best else { return unknown(d, "attention") };
    d.weighing = Some(weighing);
    d.backward = Some(ATTENTION_BACKWARD * back);
    for name in ["weighing", "backward"] {
        d.source.insert(name.into(), format!("fitted with attention, {}", today()));
    }
    measured(d, "attention", &shares, (share, BY_TIME), "of the peak");
    d.attention = [("flash2".to_string(), share)].into_iter().collect();
}

/// Bytes that a collective moves by its formula, and ranks that it goes past, of one domain.
fn moves(sends: Sends, group: Group, bytes: f64) -> Option<(f64, f64)> {
    let n = group.size;
    let part = (n - 1.0) / n;
    let moved = match sends {
        Sends::SumToAll => 2.0 * part * bytes,
        Sends::Share | Sends::ShareOfResult | Sends::MeanShare => part * bytes,
        Sends::Pieces | Sends::Rows { .. } | Sends::Boxes { .. } => part * bytes,
        Sends::Nothing | Sends::Whole => return None,
    };
    Some((moved, n - 1.0))
}

/// The line through the times of collectives: seconds of a rank, and of a byte.
fn exchanges(d: &mut Device, all: &[Sample]) {
    let of = |s: &Sample| match s.work {
        Some(Work::Exchange { sends, group, bytes, .. }) => {
            moves(sends, group, bytes).map(|(b, n)| (b, n, s.seconds))
        }
        _other => None,
    };
    let own: Vec<(f64, f64, f64)> = all.iter().filter_map(of).collect();
    if own.len() < ENOUGH {
        unknown(d, "fit.step");
        return unknown(d, "link");
    }
    // Small ones say what a step costs, large ones what a byte does beside it.
    let small: Vec<f64> = own.iter().filter(|x| x.0 <= SMALL).map(|x| x.2 / x.1).collect();
    if small.len() < ENOUGH / 2 {
        unknown(d, "fit.step");
    } else {
        let value = quantile(small.clone(), 0.5);
        d.fit.step = measured(d, "fit.step", &small, (value, MEDIAN), "s");
    }
    let step = d.fit.step.value;
    let large: Vec<(f64, f64, f64)> = own.into_iter().filter(|x| x.0 > 8.0 * SMALL).collect();
    let rate = |&(b, n, t): &(f64, f64, f64)| b / (t - step * n).max(0.2 * t);
    let rates: Vec<f64> = large.iter().map(rate).collect();
    if rates.len() < ENOUGH / 2 {
        return unknown(d, "link");
    }
    let weighted = large.iter().zip(&rates).map(|(x, r)| (*r, x.2)).collect();
    let speed = middle(weighted);
    d.link = rates.iter().copied().fold(speed, f64::max);
    let shares: Vec<f64> = rates.iter().map(|r| r / d.link).collect();
    d.source.insert("link".into(), format!("the fastest exchange, {}", today()));
    d.fit.link = measured(d, "fit.link", &shares, (speed / d.link, BY_TIME), "of link");
}

/// Transfers between stages: what is left when nobody is waited for.
fn sends(d: &mut Device, all: &[Sample]) {
    let times: Vec<f64> = all.iter().filter(|s| s.work.is_none()).map(|s| s.seconds).collect();
    if times.len() < ENOUGH / 2 {
        return unknown(d, "fit.hop");
    }
    let value = quantile(times.clone(), 0.25);
    d.fit.hop = measured(d, "fit.hop", &times, (value, LOWER), "s");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{blank, on_cpu};
    use shardc_cost::kernel::Gemm;
    use shardc_cost::plan::launch::Pricer;
    use shardc_ir::mesh::{AtomSet, Mesh};
    use shardc_ir::plan::TokenOrder;

    /// A machine with constants that are not those before the fit.
    fn truth() -> Device {
        let mut d = blank(2, 1);
        (d.hbm, d.link, d.short) = (1e10, 4e9, Some([24.0, 9.0, 16.0]));
        d.peak.insert(Precision::F32, 5e10);
        d.attention.insert("flash2".into(), 0.15);
        d.fit.gemm.value = 0.8;
        d.weighing = Some(64.0);
        (d.fit.hbm.value, d.fit.link.value) = (0.7, 0.5);
        (d.fit.kernel.value, d.fit.step.value) = (3e-6, 2e-5);
        d
    }

    fn works() -> Vec<Work> {
        let mut out = vec![];
        for (m, n, k) in [
            (1.0, 64.0, 64.0),
            (12.0, 100.0, 64.0),
            (64.0, 64.0, 16.0),
            (128.0, 352.0, 128.0),
            (256.0, 256.0, 688.0),
            (512.0, 1000.0, 256.0),
            (1024.0, 512.0, 512.0),
            (2048.0, 1376.0, 512.0),
            (30.0, 2000.0, 33.0),
            (512.0, 33.0, 512.0),
        ] {
            let gemm = Gemm::new(m, n, k);
            let precision = Precision::F32;
            out.push(Work::Product { gemm, precision, beside: 0.0, epilogue: None });
        }
        let sizes = [64.0, 256.0, 1e3, 2e3, 1e5, 3e5, 1e6, 4e6];
        out.extend(
            sizes
                .into_iter()
                .chain([128.0, 512.0, 2e5, 5e5])
                .cycle()
                .take(24)
                .map(|bytes| Work::Rows { bytes }),
        );
        for (queries, width) in [(64.0, 16.0), (128.0, 32.0), (256.0, 64.0), (512.0, 16.0)] {
            let sizes = Attention {
                rows: 4.0,
                heads: 8.0,
                queries,
                keys: queries,
                width,
                values: width,
                seen: 0.5,
                computed: 0.5 + 48.0 / queries,
            };
            for backward in [false, true] {
                out.push(Work::Attention { sizes, precision: Precision::F32, backward });
            }
        }
        let group = Group { size: 2.0, per_domain: 2.0 };
        for bytes in [64.0, 256.0, 512.0, 1024.0, 1e5, 4e5, 1e6, 2e6, 4e6] {
            for (op, sends) in [("all_reduce", Sends::SumToAll), ("reduce_scatter", Sends::Share)] {
                out.push(Work::Exchange { op, sends, group, stride: 1, bytes, atoms: AtomSet(1) });
            }
        }
        out
    }

    fn seconds(d: &Device, w: &Work) -> f64 {
        Pricer::new(&Mesh::default(), d, TokenOrder::Contiguous).seconds(w).expect("f32")
    }

    /// Times by a machine's formulas give a machine that prices the same.
    #[test]
    fn constants_are_found_again() {
        let truth = truth();
        let sample = |w: &Work| Sample::of(*w, seconds(&truth, w), 1);
        let all: Vec<Sample> = works().iter().map(sample).collect();
        let mut d = Device { hbm: truth.hbm, ..blank(2, 1) };
        fit(&mut d, &all, &on_cpu(2));
        for s in &all {
            let w = s.work.expect("a launch");
            let off = seconds(&d, &w) / s.seconds - 1.0;
            assert!(off.abs() < 0.2, "{w:?}: {off}");
        }
        let (said, took) = all.iter().fold((0.0, 0.0), |(a, b), s| {
            (a + seconds(&d, &s.work.expect("a launch")), b + s.seconds)
        });
        assert!((said / took - 1.0).abs() < 0.05, "{said} {took}");
        for (found, real) in d.short.iter().flatten().zip(truth.short.iter().flatten()) {
            assert!((found / real - 1.0).abs() < 0.2, "{:?}", d.short);
        }
        assert_eq!(d.weighing, truth.weighing);
        let measured = [d.fit.gemm, d.fit.hbm, d.fit.link, d.fit.kernel, d.fit.step];
        assert!(measured.iter().all(|c| c.from == Provenance::Measured));
        // Nothing was sent between stages, and nothing over a network.
        assert!([d.fit.hop, d.fit.nic].iter().all(|c| c.from == Provenance::Prior));
        let text = toml::to_string(&d).expect("plain data");
        assert_eq!(Device::parse(&text).as_ref(), Ok(&d));
    }

    #[test]
    fn what_nothing_identifies_stays_a_prior() {
        let mut d = blank(2, 1);
        fit(&mut d, &[], &on_cpu(2));
        let f = d.fit;
        let all = [f.gemm, f.hbm, f.link, f.nic, f.hop, f.kernel, f.step];
        assert!(all.iter().all(|c| c.from == Provenance::Prior));
        assert!(d.source["fit.hop"].contains("prior") && d.source["kernel"].contains("prior"));
        assert!(d.peak.is_empty());
        for name in ["peak", "peak.bf16", "peak.f16"] {
            assert!(d.source[name].contains("no price"), "{name}");
        }
    }

    /// The source of a constant says its own value, and what of the launches' values that is.
    #[test]
    fn sources_say_what_was_taken() {
        let work = Work::Rows { bytes: 64.0 };
        let sample = |i: usize| Sample::of(work, (1 + i) as f64 * 1e-6, 1);
        let all: Vec<Sample> = (0..9).map(sample).collect();
        let mut d = blank(1, 1);
        fit(&mut d, &all, &on_cpu(1));
        let said = &d.source["kernel"];
        let text = format!("{:.3e} s, the lower quartile of 9 launches", d.fit.kernel.value);
        assert!(said.contains(&text) && !said.contains("median"), "{said}");
    }
}
