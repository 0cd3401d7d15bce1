//! The largest sequence or microbatch with which a layout fits, by bisection over compiled plans.

use super::{Asked, Compiled};
use crate::search::trial;
use clap::ValueEnum;
use shardc_passes::options::Options;
use shardc_plans::input::Input;
use shardc_plans::rules;

/// What is made larger.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Of {
    /// Tokens per sequence
    Seq,
    /// Sequences of a microbatch of a rank
    Microbatch,
}

/// Tokens by which sequences grow, if the layout's own is a multiple.
const TOKENS: usize = 64;

/// Most tokens that are tried.
const MOST: usize = 1 << 24;

/// The largest that fits.
pub struct Largest {
    pub value: usize,
    /// Bytes that a rank needs with it.
    pub peak: usize,
    /// The next one, and why it does not fit; `None`: there is none.
    pub next: Option<(usize, Limit)>,
}

/// Why something does not fit.
#[derive(Clone, PartialEq, Debug)]
pub enum Limit {
    /// So many bytes are more than there are.
    Memory(usize),
    /// What the compiler refuses.
    Refused(String),
}

/// The largest of a layout that fits as it is.
pub fn largest(of: Of, asked: &Asked, input: &Input, of_layout: &Compiled) -> Largest {
    let read = &Options { memory: None, ..asked.options.clone() };
    let own = &of_layout.options;
    let with = |value: usize| match of {
        Of::Seq => Options { seq: value, ..own.clone() },
        Of::Microbatch => Options { microbatch: value, ..own.clone() },
    };
    let broken = |value: usize| {
        let of = |f| rules::violations(f, &with(value)).into_iter().next();
        input.facts.as_ref().and_then(of)
    };
    let dp = of_layout.guess.candidate.layout.dp;
    let values = values(of, own, dp, &|microbatch| broken(microbatch).is_none());
    let tried = |value: usize| {
        if let Some(v) = broken(value) {
            return Err(Limit::Refused(v.diag().message));
        }
        let o = with(value);
        match trial(input, read, &o).map(|plan| asked.ifs.peak(&plan)) {
            Ok(peak) if peak <= asked.room(of_layout.beside) => Ok(peak),
            Ok(peak) => Err(Limit::Memory(peak)),
            Err(d) => Err(Limit::Refused(d.message)),
        }
    };
    let (i, peak, next) = last(of_layout.peak, &values, tried);
    let at = |i: usize| values(i).expect("it was tried");
    Largest { value: at(i), peak, next: next.map(|why| (at(i + 1), why)) }
}

/// Values by number: the layout's own, and larger ones in order. Schedules ask for some numbers of microbatches:
/// microbatches that leave others are passed over.
fn values(
    of: Of,
    o: &Options,
    dp: usize,
    legal: &dyn Fn(usize) -> bool,
) -> Box<dyn Fn(usize) -> Option<usize>> {
    match of {
        Of::Seq => {
            let from = o.seq;
            // Every rank of cp and tp has as many tokens, and of cp twice.
            let parts = 2 * o.axis("cp") * o.axis("tp");
            let step = parts * TOKENS.div_ceil(parts);
            let step = if from.is_multiple_of(step) { step } else { from.max(1) };
            let at = move |i: usize| i.checked_mul(step)?.checked_add(from);
            Box::new(move |i| at(i).filter(|n| *n <= MOST))
        }
        Of::Microbatch => {
            let rows = o.global_batch / dp.max(1);
            let own = o.microbatch;
            let all = (own..=rows).filter(|n| rows.is_multiple_of(*n));
            let all: Vec<usize> = all.filter(|n| *n == own || legal(*n)).collect();
            Box::new(move |i| all.get(i).copied())
        }
    }
}

/// Of values of which the first fits, with what it needs, and no one after one that does not: the number of the last
/// that fits, what that needs, and why the next one does not fit.
fn last<N, W>(
    first: N,
    values: &dyn Fn(usize) -> Option<usize>,
    tried: impl Fn(usize) -> std::result::Result<N, W>,
) -> (usize, N, Option<W>) {
    let (mut fits, mut needs) = (0, first);
    let mut fails: Option<(usize, W)> = None;
    loop {
        // Twice as far until one does not fit, and then in the middle.
        let at = match &fails {
            Some((end, _)) if *end == fits + 1 => break,
            Some((end, _)) => fits.midpoint(*end),
            None => match (fits + 1..=2 * fits + 1).rev().find(|i| values(*i).is_some()) {
                Some(at) => at,
                None => break,
            },
        };
        let Some(value) = values(at) else { break };
        match tried(value) {
            Ok(n) => (fits, needs) = (at, n),
            Err(why) => fails = Some((at, why)),
        }
    }
    (fits, needs, fails.map(|f| f.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_that_fits_is_found_in_few_tries() {
        for most in [0, 1, 2, 5, 700, 999] {
            let tries = std::cell::Cell::new(0);
            let tried = |v: usize| {
                tries.set(tries.get() + 1);
                if v <= 10 * most { Ok(v + 1) } else { Err(v) }
            };
            let (at, needs, why) = last(1, &|i| (i < 1000).then_some(10 * i), tried);
            let next = (most < 999).then_some(10 * most + 10);
            assert_eq!((at, needs, why), (most, 10 * most + 1, next), "{most}");
            assert!(tries.get() <= 22, "{most}: {}", tries.get());
        }
        let only = last(7, &|i| (i == 0).then_some(3), |_| Err::<i32, ()>(()));
        assert_eq!(only, (0, 7, None));
    }

    #[test]
    fn sequences_stay_whole_on_every_rank() {
        let on = |mesh: &[(&str, usize)], seq| {
            let mesh = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
            values(Of::Seq, &Options { mesh, seq, ..Options::default() }, 1, &|_| true)
        };
        assert_eq!(on(&[("tp", 8)], 512)(1), Some(576));
        assert_eq!(on(&[("tp", 3)], 36)(1), Some(72));
        assert_eq!(on(&[("cp", 16), ("tp", 8)], 512)(2), Some(1024));
        assert_eq!(on(&[], 512)(MOST), None);
        let o = Options { global_batch: 24, microbatch: 2, ..Options::default() };
        let of = values(Of::Microbatch, &o, 2, &|n| n != 4);
        assert_eq!((0..5).map(of).collect::<Vec<_>>(), [Some(2), Some(3), Some(6), Some(12), None]);
    }
}
