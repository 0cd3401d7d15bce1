//! Speeds of products from their times: of long dims, the lengths of short ones, and tiles.

use super::fit::{ENOUGH, FITTED, FitOptions, measured, middle, unknown};
use super::samples::Sample;
use super::today;
use shardc_cost::device::Epilogue;
use shardc_cost::device::{Device, Precision};
use shardc_cost::kernel::Gemm;
use shardc_cost::plan::launch::Work;

/// A product, its seconds without what is beside it, and how often a step has it.
type Timed = (Gemm, f64, f64);

/// What explains the times of some products best.
#[derive(Clone)]
struct FittedProducts {
    /// FLOP/s of those whose dims are all long.
    speed: f64,
    short: [f64; 3],
    tiles: Vec<[f64; 3]>,
}

impl FittedProducts {
    /// FLOP/s that a product would have if its dims were long.
    fn rate(&self, sms: f64, &(g, t, _): &Timed) -> f64 {
        g.flops() / t / g.fullness(sms, &self.tiles, self.short)
    }

    /// The middle of these rates by time.
    fn middle(&self, sms: f64, own: &[Timed]) -> f64 {
        middle(own.iter().map(|x| (self.rate(sms, x), x.1 * x.2)).collect())
    }
}

/// Products of a type that are taken.
fn timed(d: &Device, all: &[Sample], p: Precision, taken: impl Fn(&Sample) -> bool) -> Vec<Timed> {
    let kernel = d.fit.kernel.value;
    let of = |s: &Sample| match s.work {
        Some(Work::Product { gemm, precision, beside, epilogue }) if precision == p => {
            let rest = kernel + (beside + epilogue.unwrap_or(0.0)) / d.memory_speed();
            Some((gemm, (s.seconds - rest).max(0.2 * s.seconds), s.calls as f64))
        }
        _other => None,
    };
    let own = all.iter().filter(|s| taken(s)).filter_map(of);
    own.filter(|x| x.0.flops() > 0.0).collect()
}

/// Bytes that work on a product's result moves in the same launch.
fn worked(s: &Sample) -> f64 {
    match s.work {
        Some(Work::Product { epilogue: Some(bytes), .. }) => bytes,
        _other => 0.0,
    }
}

/// The name of a type's peak among sources.
fn name(p: Precision) -> &'static str {
    match p {
        Precision::F32 => "peak",
        Precision::Bf16 => "peak.bf16",
        Precision::F16 => "peak.f16",
        Precision::Fp8 => "peak.fp8",
    }
}

/// Products of all types: the lengths of short dims and the speed that explain their times best.
pub(super) fn products(d: &mut Device, all: &[Sample], how: &FitOptions) {
    let sms = f64::from(d.sms);
    let taken = |s: &Sample| match how.epilogues {
        None => true,
        Some(library) => s.library == library && worked(s) == 0.0,
    };
    let mut first: Option<FittedProducts> = None;
    for (i, &p) in how.types.iter().enumerate() {
        let own = timed(d, all, p, taken);
        if own.len() < ENOUGH {
            d.peak.remove(&p);
            let text = "not known: too few products of this type ran, so its plans have no price";
            d.source.insert(name(p).into(), text.into());
            continue;
        }
        // One table of lengths for all types: that of the first.
        if i == 0 {
            let Some(found) = lengths(&own, sms, &how.tiles) else { return unknown(d, name(p)) };
            base(d, p, &own, &found);
            first = Some(found);
        } else {
            // The share of the peak is one for all types, so the peak is what that makes of the speed.
            let by = first.clone().unwrap_or_else(|| plain(how));
            d.peak.insert(p, by.middle(sms, &own) / d.fit.gemm.value);
            d.source
                .insert(name(p).into(), format!("the speed of products over gemm, {}", today()));
        }
    }
    if how.epilogues.is_some() {
        epilogues(d, all, how);
    }
}

/// No lengths.
fn plain(how: &FitOptions) -> FittedProducts {
    FittedProducts { speed: 0.0, short: [0.0; 3], tiles: how.tiles[0].clone() }
}

/// The constants of the first type.
fn base(d: &mut Device, p: Precision, own: &[Timed], found: &FittedProducts) {
    let sms = f64::from(d.sms);
    let fastest = own.iter().map(|(g, t, _)| g.flops() / t).fold(found.speed, f64::max);
    let peak = d.peak.entry(p).or_insert(0.0);
    if fastest > *peak {
        *peak = fastest;
        d.source.insert(name(p).into(), format!("the fastest product, {}", today()));
    }
    let peak = *peak;
    let shares: Vec<f64> = own.iter().map(|x| found.rate(sms, x) / peak).collect();
    d.fit.gemm = measured(d, "fit.gemm", &shares, (found.speed / peak, FITTED), "of the peak");
    d.short = Some(found.short);
    d.tiles = Some(found.tiles.clone());
    for name in ["short", "tiles"] {
        d.source.entry(name.into()).or_insert_with(|| format!("fitted with gemm, {}", today()));
    }
}

/// Products of our own kernels, and what work on their results moves.
fn epilogues(d: &mut Device, all: &[Sample], how: &FitOptions) {
    let (sms, kernel) = (f64::from(d.sms), d.fit.kernel.value);
    let plain = |p| timed(d, all, p, |s| !s.library && worked(s) == 0.0);
    let own = plain(how.types[0]);
    let Some(found) = lengths(&own, sms, &how.tiles).filter(|_| own.len() >= ENOUGH) else {
        return unknown(d, "epilogue");
    };
    let share = |&p: &Precision| {
        let (own, peak) = (plain(p), *d.peak.get(&p)?);
        let speed = if p == how.types[0] { found.speed } else { found.middle(sms, &own) };
        (own.len() >= ENOUGH).then_some((p, (speed / peak).min(1.0)))
    };
    let gemm = how.types.iter().filter_map(share).collect();
    let (mut bytes, mut seconds) = (0.0, 0.0);
    for s in all.iter().filter(|s| !s.library && worked(s) > 0.0) {
        let Some(Work::Product { gemm: g, precision, .. }) = s.work else { continue };
        if precision == how.types[0] {
            let product = g.flops() / (found.speed * g.fullness(sms, &found.tiles, found.short));
            let least = worked(s) / d.memory_speed();
            bytes += worked(s) * s.calls as f64;
            seconds += (s.seconds - kernel - product).max(least) * s.calls as f64;
        }
    }
    let speed = if seconds > 0.0 { bytes / seconds } else { d.memory_speed() };
    d.epilogue = Some(Epilogue { speed, short: found.short, tiles: found.tiles, gemm });
    d.source.insert("epilogue".into(), format!("fitted to our own kernels, {}", today()));
}

/// The speed, the lengths of rows, columns and the inner dim of which a product spends as much beside its arithmetic,
/// and the tiles: the least squares of relative errors, weighted by time, none below 0. Of four numbers each may be the
/// 0 that it would be below: all sets of those that are not are solved, and the best is taken. `None` without a product
/// that says the speed.
fn lengths(own: &[Timed], sms: f64, tiles: &[Vec<[f64; 3]>]) -> Option<FittedProducts> {
    let of = |tiles: &Vec<[f64; 3]>| {
        let (error, speed, short) = with_tiles(own, sms, tiles)?;
        Some((error, FittedProducts { speed, short, tiles: tiles.clone() }))
    };
    let best = tiles.iter().filter_map(of).min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|b| b.1)
}

/// The same with given tiles, and the error but for what it is for all tiles.
fn with_tiles(own: &[Timed], sms: f64, tiles: &[[f64; 3]]) -> Option<(f64, f64, [f64; 3])> {
    let (mut a, mut b) = ([[0.0; 4]; 4], [0.0; 4]);
    for &(g, t, n) in own {
        let work = g.flops() / g.fullness(sms, tiles, [0.0; 3]);
        // As parts of the time that was measured.
        let x = [1.0, 1.0 / g.m, 1.0 / g.n, 1.0 / g.k].map(|part| part * work / t);
        for i in 0..4 {
            (0..4).for_each(|j| a[i][j] += t * n * x[i] * x[j]);
            b[i] += t * n * x[i];
        }
    }
    let error = |x: &[f64; 4]| {
        let of = |i: usize| x[i] * ((0..4).map(|j| a[i][j] * x[j]).sum::<f64>() - 2.0 * b[i]);
        (0..4).map(of).sum::<f64>()
    };
    let sets = (0..8).map(|more| {
        let used: Vec<usize> = (0..4).filter(|&i| i == 0 || more >> (i - 1) & 1 == 1).collect();
        solved(&a, &b, &used)
    });
    let legal = sets.flatten().filter(|x| x[0] > 0.0 && x.iter().all(|&v| v >= 0.0));
    let best = legal.min_by(|x, y| error(x).total_cmp(&error(y)))?;
    let [one, m, n, k] = best;
    Some((error(&best), 1.0 / one, [m / one, n / one, k / one]))
}

/// The solution of normal equations in some of four unknowns, the others 0, by elimination; `None` if there are many.
fn solved(a: &[[f64; 4]; 4], b: &[f64; 4], used: &[usize]) -> Option<[f64; 4]> {
    let row = |&i: &usize| used.iter().map(|&j| a[i][j]).chain([b[i]]).collect();
    let mut rows: Vec<Vec<f64>> = used.iter().map(row).collect();
    let n = rows.len();
    for at in 0..n {
        // The matrix is one of squares: what is left of its diagonal says how well a number is known.
        if rows[at][at] <= 1e-9 * a[used[at]][used[at]] {
            return None;
        }
        let by = rows[at].clone();
        for (_, other) in rows.iter_mut().enumerate().filter(|x| x.0 != at) {
            let part = other[at] / by[at];
            other.iter_mut().zip(&by).for_each(|(x, y)| *x -= part * y);
        }
    }
    let mut out = [0.0; 4];
    used.iter().enumerate().for_each(|(at, &i)| out[i] = rows[at][n] / rows[at][at]);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::device::how;
    use crate::measure::fit::fit;
    use shardc_cost::plan::launch::Pricer;
    use shardc_ir::mesh::Mesh;
    use shardc_ir::plan::TokenOrder;

    const TYPES: [Precision; 2] = [Precision::Bf16, Precision::F32];

    /// A GPU whose own products are unlike the library's.
    fn truth() -> Device {
        let mut d = Device::named("h100-sxm").expect("known");
        d.fit.gemm.value = 0.9;
        d.fit.kernel.value = 2e-6;
        (d.tiles, d.short) = (Some(vec![[128.0, 256.0, 1.0]]), Some([0.0, 40.0, 200.0]));
        d.peak.insert(Precision::F32, 6e13);
        let gemm = TYPES.map(|p| (p, if p == Precision::F32 { 0.3 } else { 0.6 })).into();
        let (short, tiles) = ([0.0, 60.0, 800.0], vec![[128.0, 128.0, 1.0]]);
        d.epilogue = Some(Epilogue { speed: 6e11, short, tiles, gemm });
        d
    }

    /// Products of a step as they are priced there, by the library and by our kernels, and kernels over rows.
    fn samples(truth: &Device, library: bool) -> Vec<Sample> {
        let seconds = |d: &Device, w: &Work| {
            Pricer::new(&Mesh::default(), d, TokenOrder::Contiguous).seconds(w).expect("a price")
        };
        let mut out = vec![];
        for p in TYPES {
            for [m, n, k] in [
                [8192.0, 2048.0, 2048.0],
                [8192.0, 8192.0, 2048.0],
                [8192.0, 2048.0, 8192.0],
                [4096.0, 512.0, 2048.0],
                [2048.0, 8192.0, 4096.0],
                [1024.0, 1024.0, 16384.0],
                [16384.0, 4096.0, 512.0],
                [512.0, 2048.0, 16384.0],
                [16384.0, 32000.0, 1024.0],
                // What tells tiles apart.
                [32768.0, 384.0, 4096.0],
                [384.0, 32768.0, 4096.0],
            ] {
                let gemm = Gemm::new(m, n, k);
                let of = |epilogue| Work::Product { gemm, precision: p, beside: 0.0, epilogue };
                let own = of(Some(0.0));
                out.push(Sample::of(of(None), seconds(truth, &own), 1));
                if library {
                    let by = seconds(truth, &of(None));
                    out.push(Sample { library: true, ..Sample::of(of(None), by, 1) });
                }
                let then = of(Some(8.0 * m * n));
                out.push(Sample::of(then, seconds(truth, &then), 1));
            }
        }
        let rows = [64.0, 1e9].into_iter().cycle().take(32).map(|bytes| Work::Rows { bytes });
        out.extend(rows.map(|w| Sample::of(w, seconds(truth, &w), 1)));
        out
    }

    /// The products of a GPU, by the library and by our kernels, are found again, each with its tiles.
    #[test]
    fn products_of_a_gpu_are_found_again() {
        let truth = truth();
        for library in [false, true] {
            let mut d = Device::named("h100-sxm").expect("known");
            fit(&mut d, &samples(&truth, library), &how(library));
            let near = |found: f64, real: f64| assert!((found / real - 1.0).abs() < 0.03, "{d:?}");
            let (own, real) = (d.epilogue.clone().expect("fitted"), truth.epilogue.clone());
            let real = real.expect("given");
            assert_eq!(own.tiles, real.tiles);
            near(own.speed, real.speed);
            near(own.short[2], real.short[2]);
            near(own.short[1], real.short[1]);
            let speed = |d: &Device, share: f64, p: Precision| share * d.peak[&p];
            for p in TYPES {
                near(speed(&d, own.gemm[&p], p), speed(&truth, real.gemm[&p], p));
                let share = if library { truth.fit.gemm.value } else { real.gemm[&p] };
                near(speed(&d, d.fit.gemm.value, p), speed(&truth, share, p));
            }
            let (tiles, short) = match library {
                true => (truth.tiles.clone().expect("given"), truth.short.expect("given")),
                false => (real.tiles, real.short),
            };
            assert_eq!(d.tiles.as_ref(), Some(&tiles));
            near(d.short.expect("fitted")[2], short[2]);
            // The peak is the datasheet's, and what is written can be read.
            assert_eq!(d.peak[&Precision::Bf16], truth.peak[&Precision::Bf16]);
            let text = toml::to_string(&d).expect("plain data");
            assert_eq!(Device::parse(&text).as_ref(), Ok(&d));
        }
    }

    #[test]
    fn too_few_products_leave_their_peak_unknown() {
        let truth = truth();
        let few: Vec<Sample> = samples(&truth, false).into_iter().take(4).collect();
        let mut d = Device::named("h100-sxm").expect("known");
        fit(&mut d, &few, &how(false));
        assert!(!d.peak.contains_key(&Precision::Bf16) && d.epilogue.is_none());
        assert!(d.source["peak.bf16"].contains("no price"), "{:?}", d.source);
    }
}
