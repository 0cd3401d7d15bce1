//! `--loss-chunks auto`: the fewest chunks with which the plan fits or, without a limit, with which it needs
//! about as little as with more.
//!
//! More chunks are more launches, so there are as few as memory asks for. What a plan needs is known when it is
//! compiled, so it is with every number: it need not fall with more chunks, since the gradient of the output
//! projection is alive earlier than without. What else is searched for is found for each number by itself.

use super::{Found, Prices, all, resolve, searches, searches_schedule, trial};
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_ir::plan::Mode;
use shardc_passes::autodiff::chunks::{LossChunks, MOST_CHUNKS};
use shardc_passes::options::Options;
use shardc_plans::input::Input;

/// The numbers that are tried.
const NUMBERS: [usize; 6] = [1, 2, 4, 8, 16, MOST_CHUNKS];

/// Without a limit there are more chunks where they save more than one of so many parts of what is needed.
const PARTS: usize = 100;

/// A number of chunks, with what its plan needs and costs.
struct ChunksTrial {
    chunks: usize,
    found: Found,
    peak: usize,
    cost: f64,
}

/// The options with a number of chunks, and with all else that they ask to search for.
///
/// # Errors
/// What a compilation without chunks says, or what refuses chunks for another reason than the loss itself.
pub(super) fn resolve_with(input: &Input, o: &Options) -> Result<Found> {
    let with = |n: usize| Options { loss_chunks: LossChunks::Of(n), ..o.clone() };
    // That the flag has no effect then is told of with all others.
    if o.mode == Mode::Infer {
        return resolve(input, &with(1));
    }
    let prices = Prices::of(o)?;
    let by_time = prices.machine().is_some() || searches_schedule(o);
    let one = |&chunks: &usize| -> Result<ChunksTrial> {
        let found = resolve(input, &with(chunks))?;
        let plan = trial(input, o, &crate::within_memory(&input.source, &found.options)?)?;
        let price = prices.price(&plan, &o.speeds)?;
        let cost = if by_time { price.step } else { price.work };
        Ok(ChunksTrial { chunks, found, peak: plan.peak_bytes(), cost })
    };
    let whole = one(&NUMBERS[0])?;
    let more: Result<Vec<ChunksTrial>> = all(&NUMBERS[1..], one).into_iter().collect();
    let more = match more {
        Ok(more) => more,
        // Without chunks it compiles: the loss is not made of them.
        Err(d) if d.code == "not-built" => return Ok(without(whole.found, d)),
        Err(d) => return Err(d),
    };
    let first = whole.peak;
    let tried: Vec<ChunksTrial> = std::iter::once(whole).chain(more).collect();
    let at = choose(&tried, o.memory, searches(&with(1)));
    let text = said(&tried, at, o.memory, first);
    let mut found = tried.into_iter().nth(at).expect("it is one of them").found;
    found.notes.insert(0, text);
    Ok(found)
}

/// One chunk, and why there are no more.
fn without(mut found: Found, d: Diag) -> Found {
    let what = format!("--loss-chunks auto has no effect: {}", d.message);
    let warning = Diag { rule: d.rule, ..Diag::new("no-effect", what).help("leave it out") };
    found.warnings.push(warning);
    found
}

/// Which of the numbers, in rising order, is taken; `others` are searched for besides.
fn choose(tried: &[ChunksTrial], limit: Option<usize>, others: bool) -> usize {
    let all = 0..tried.len();
    let Some(limit) = limit else {
        let saves = |i: usize, j: usize| tried[j].peak * PARTS < tried[i].peak * (PARTS - 1);
        let mut least = all.clone().filter(|&i| !(i + 1..tried.len()).any(|j| saves(i, j)));
        return least.next().expect("nothing is behind the last one");
    };
    let mut fit = all.clone().filter(|&i| tried[i].peak <= limit);
    let best = match others {
        true => fit.min_by(|&i, &j| tried[i].cost.total_cmp(&tried[j].cost)),
        false => fit.next(),
    };
    best.or_else(|| all.min_by_key(|&i| tried[i].peak)).expect("some were tried")
}

/// What there is to say of it; `first` is what is needed without chunks.
fn said(tried: &[ChunksTrial], at: usize, limit: Option<usize>, first: usize) -> String {
    let ChunksTrial { chunks, peak, .. } = &tried[at];
    let (n, needs) = (chunks, bytes(*peak));
    let without = match n {
        1 => String::new(),
        _more => format!(" ({} without chunks)", bytes(first)),
    };
    match limit {
        Some(limit) if *peak > limit => format!("loss chunks: {n} needs least, and does not fit"),
        Some(limit) => {
            format!("loss chunks: {n}: a rank needs {needs} of {}{without}", bytes(limit))
        }
        None => format!(
            "loss chunks: {n}: a rank needs {needs}{without}; up to {MOST_CHUNKS} would not save {} % more",
            100 / PARTS
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(all: &[(usize, f64)]) -> Vec<ChunksTrial> {
        let one = |(&(peak, cost), &chunks): (&(usize, f64), &usize)| ChunksTrial {
            chunks,
            found: Found::of(&Options::default()),
            peak,
            cost,
        };
        all.iter().zip(&NUMBERS).map(one).collect()
    }

    #[test]
    fn the_fewest_are_taken_that_memory_asks_for() {
        let of = |peaks: &[usize], limit| {
            let all: Vec<(usize, f64)> = peaks.iter().map(|&p| (p, 0.0)).collect();
            choose(&tried(&all), limit, false)
        };
        // Exactly one part in a hundred is not more than it.
        assert_eq!(of(&[10_000, 9_900, 9_900], None), 0);
        assert_eq!(of(&[10_000, 9_900, 9_899], None), 1);
        assert_eq!(of(&[10_000, 9_950, 9_851], None), 1);
        assert_eq!(of(&[10_000, 9_950, 9_850], None), 2);
        // Needs may rise before they fall.
        assert_eq!(of(&[10_000, 11_000, 9_000], None), 2);
        assert_eq!(of(&[10_000, 11_000, 12_000], None), 0);
        assert_eq!(of(&[100, 90, 80], Some(100)), 0);
        assert_eq!(of(&[100, 90, 80], Some(99)), 1);
        assert_eq!(of(&[100, 110, 80], Some(85)), 2);
        // None fits: what needs least, and of several the fewest.
        assert_eq!(of(&[100, 80, 80], Some(79)), 1);
    }

    #[test]
    fn beside_another_search_the_cheapest_that_fits_is_taken() {
        let all = tried(&[(90, 3.0), (80, 2.0), (85, 2.0), (120, 1.0)]);
        assert_eq!(choose(&all, Some(100), true), 1);
        assert_eq!(choose(&all, Some(120), true), 3);
        assert_eq!(choose(&all, Some(79), true), 1);
        assert_eq!(choose(&all, Some(100), false), 0);
    }
}
