//! Plans that compute some of their layers again, and not all: layouts that are looked at compute all of them again or
//! none.

use super::super::Compiled;
use super::super::Progress;
use super::super::guess::{Guess, Guesses};
use super::super::space::{Candidate, FAMILIES};
use super::{FOR_LAYERS, Search};
use shardc_cost::layout::{Layout, Recompute};

/// How much longer than the fastest a plan may take of which others are made.
const NEARLY: f64 = 1.1;

impl Search<'_> {
    /// Compiles the fastest plans with fewer of the layers that they compute again, as long as that fits and may be
    /// faster.
    pub(super) fn fewer_layers(&mut self, guesses: &mut Guesses, say: &mut dyn FnMut(Progress)) {
        for _ in 0..FOR_LAYERS {
            let next = self.fewer(guesses);
            let Some(g) = next.filter(|_| self.goes_on()) else { return };
            self.compile_all(vec![g], say);
        }
    }

    /// Of the fastest plan of each family that is nearly as fast as the fastest of all: with fewer layers that are computed
    /// again, or with fewer sequences in a microbatch and only as many of these layers as those need. What may be fastest
    /// of it, if that may be faster than what was found.
    fn fewer(&self, guesses: &mut Guesses) -> Option<Guess> {
        let best = self.best()?;
        let mut near: Vec<&Compiled> =
            self.fitting().filter(|c| c.seconds <= NEARLY * best).collect();
        near.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut families = vec![];
        let mut found: Vec<(f64, Guess)> = vec![];
        for c in near {
            let family = FAMILIES.iter().position(|of| of(&c.guess.candidate));
            if families.contains(&family) {
                continue;
            }
            families.push(family);
            let all = self.fewer_of(c, guesses).into_iter().chain(self.smaller(c, guesses));
            found.extend(all.map(|g| (c.seconds * g.seconds / c.guess.seconds, g)));
        }
        found.retain(|(seconds, g)| *seconds < best && self.fits_in_target(g));
        found.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).map(|f| f.1)
    }

    /// The layout of a plan with fewer sequences in a microbatch and the fewest layers that fit: by those of its plans that
    /// did not fit, or as much of the formula as the plan itself needs.
    fn smaller(&self, c: &Compiled, guesses: &mut Guesses) -> Vec<Guess> {
        let own = c.guess.candidate;
        let layers = own.layers_of_stage(self.form.sizes.layers);
        if own.layout.recompute.layers(layers).is_none_or(|n| n == 0) {
            return vec![];
        }
        let room = self.asked.room(c.beside) as f64;
        let rows = own.layout.microbatch * own.layout.microbatches;
        let halves = std::iter::successors(Some(own.layout.microbatch), |n| Some(n / 2));
        let halves = halves.skip(1).take_while(|n| *n > 0);
        halves
            .filter_map(|microbatch| {
                let microbatches = rows / microbatch;
                let layout = Layout { microbatch, microbatches, ..own.layout };
                let with = |recompute| Candidate { layout: Layout { recompute, ..layout }, ..own };
                if !guesses.have(&with(own.layout.recompute)) {
                    return None;
                }
                let mut likely = |r| guesses.another(with(r)).map_or(f64::NAN, |g| g.likely);
                let again = |c: &Candidate| c.layout.recompute;
                let failed = self.failed.iter().filter(|f| with(again(&f.0)) == f.0);
                let failed = failed.filter(|f| again(&f.0).layers(layers).is_some());
                let ratio = failed
                    .map(|f| f.1 as f64 / likely(again(&f.0)))
                    .fold(c.peak as f64 / c.guess.likely, f64::max);
                let [most, least] = [Recompute::None, Recompute::Full].map(|r| ratio * likely(r));
                let n = ((most - room) / (most - least) * layers as f64).ceil();
                // Where all or none are computed again, the layout is one that is looked at anyway.
                let some = n >= 1.0 && n < layers as f64;
                let fewer = with(Recompute::some(n as usize, layers).filter(|_| some)?);
                guesses.another(fewer).ok().filter(|_| !self.is_known(&fewer))
            })
            .collect()
    }

    /// True if a layout was compiled.
    fn is_known(&self, c: &Candidate) -> bool {
        self.fits.iter().any(|f| f.guess.candidate == *c) || self.failed.iter().any(|f| f.0 == *c)
    }

    /// The layout of a plan with the fewest layers that fit by what is known of it; none if no layer less does.
    fn fewer_of(&self, best: &Compiled, guesses: &mut Guesses) -> Option<Guess> {
        let c = best.guess.candidate;
        let layers = c.layers_of_stage(self.form.sizes.layers);
        let with = |recompute| Candidate { layout: Layout { recompute, ..c.layout }, ..c };
        let again = |r: Recompute| r.layers(layers);
        let now = again(c.layout.recompute).filter(|n| *n > 0)?;
        // The most layers with which such a plan did not fit, and what it needs.
        let failed = self.failed.iter().filter(|f| with(f.0.layout.recompute) == f.0);
        let failed = failed.filter_map(|f| Some((again(f.0.layout.recompute)?, f.1)));
        let over = failed.filter(|f| f.0 < now).max();
        let room = self.asked.room(best.beside).saturating_sub(best.peak) as f64;
        let each = match over {
            Some((n, bytes)) => bytes.saturating_sub(best.peak) as f64 / (now - n) as f64,
            None => {
                let mut likely = |r| guesses.another(with(r)).map_or(f64::NAN, |g| g.likely);
                (likely(Recompute::None) - likely(Recompute::Full)) / layers as f64
            }
        };
        let least = over.map_or(1, |f| f.0 + 1);
        let n = now.saturating_sub((room / each) as usize).max(least);
        if n >= now || each.is_nan() || each <= 0.0 {
            return None;
        }
        let fewer = with(Recompute::some(n, layers)?);
        // What takes longer with fewer of them was compiled before.
        guesses.another(fewer).ok().filter(|_| !self.is_known(&fewer))
    }
}
