//! Gated linear recurrences: what a rank computes for `scan` and its gradients, a chunk of tokens at a time.

use super::View;
use super::reach::See;
use crate::ops::scan::CHUNK;

/// Heads of rows that are treated at the same time at most: each has its part of the workspace.
const SLOTS: usize = 16;

/// Sizes and operands of a gated linear recurrence, all f32. Views of q, k and v walk `[b, token, head]`, the width
/// being adjacent, those of g and β the same; of segments `[b, token]`, of states `[b, head, k]`, v being adjacent.
#[derive(Clone, PartialEq, Debug)]
pub struct Recurrent {
    pub delta: bool,
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    /// Width of queries and keys.
    pub width: usize,
    pub value_width: usize,
    pub q: View,
    pub k: View,
    pub g: View,
    pub v: View,
    pub beta: Option<View>,
    /// i32.
    pub segments: Option<View>,
    pub start: Option<View>,
    /// [`Recurrent::words`] of as many heads as are treated at once.
    pub scratch: View,
}

/// Outputs and the last state.
#[derive(Clone, PartialEq, Debug)]
pub struct Recurrence {
    pub of: Recurrent,
    pub out: View,
    pub end: View,
}

/// Gradients of [`Recurrence`].
#[derive(Clone, PartialEq, Debug)]
pub struct RecurrenceGrad {
    pub of: Recurrent,
    pub d_out: View,
    pub d_end: View,
    pub d_q: View,
    pub d_k: View,
    pub d_g: View,
    pub d_v: View,
    pub d_beta: Option<View>,
    pub d_start: Option<View>,
}

impl Recurrent {
    /// Tokens of a chunk, the last of which may be shorter.
    pub fn chunk(tokens: usize) -> usize {
        tokens.clamp(1, CHUNK)
    }
    /// Heads that are treated at once, of so many of all rows.
    pub fn slots(heads: usize) -> usize {
        heads.clamp(1, SLOTS)
    }
    /// f32 of the workspace of one head with these tokens and widths: forward three matrices of a chunk's pairs, values,
    /// keys and the state; backward a matrix and two of values more, and the state before every chunk.
    pub fn words(backward: bool, [tokens, k, v]: [usize; 3]) -> usize {
        let c = Recurrent::chunk(tokens);
        let product = |a: usize, b: usize| a.saturating_mul(b);
        let (states, pairs, values) = match backward {
            false => (1, 3, 1),
            true => (tokens.div_ceil(c) + 1, 4, 3),
        };
        let parts =
            [product(states, product(k, v)), pairs * c * c, product(values * c, v), product(c, k)];
        parts.into_iter().fold(0, usize::saturating_add)
    }
    /// Bytes of the workspace for so many heads of all rows; more than any memory has where sizes are no sizes of one.
    pub(crate) fn room(backward: bool, [heads, tokens, k, v]: [usize; 4]) -> usize {
        const MOST: usize = 1 << 56;
        let words = Recurrent::words(backward, [tokens, k, v]);
        words.saturating_mul(4 * Recurrent::slots(heads)).min(MOST)
    }
    fn by_token(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.heads]
    }
    fn reach(&self, backward: bool, see: See) {
        let by_token = self.by_token();
        [&self.q, &self.k]
            .into_iter()
            .for_each(|v| see(&v.adjacent(), &[&by_token, &[self.width]]));
        see(&self.v.adjacent(), &[&by_token, &[self.value_width]]);
        self.beta.iter().chain([&self.g]).for_each(|v| see(v, &[&by_token]));
        self.segments.iter().for_each(|v| see(v, &[&by_token[..2]]));
        self.start.iter().for_each(|v| self.state(v, see));
        let words = Recurrent::words(backward, [self.tokens, self.width, self.value_width]);
        see(&self.scratch, &[&[Recurrent::slots(self.batch * self.heads) * words]]);
    }
    fn state(&self, v: &View, see: See) {
        see(&v.adjacent(), &[&[self.batch, self.heads, self.width, self.value_width]]);
    }
}

impl Recurrence {
    pub(super) fn reach(&self, see: See) {
        self.of.reach(false, see);
        see(&self.out.adjacent(), &[&self.of.by_token(), &[self.of.value_width]]);
        self.of.state(&self.end, see);
    }
}

impl RecurrenceGrad {
    pub(super) fn reach(&self, see: See) {
        let (of, by_token) = (&self.of, self.of.by_token());
        of.reach(true, see);
        [&self.d_q, &self.d_k].iter().for_each(|v| see(&v.adjacent(), &[&by_token, &[of.width]]));
        let values = [&self.d_out, &self.d_v];
        values.iter().for_each(|v| see(&v.adjacent(), &[&by_token, &[of.value_width]]));
        self.d_beta.iter().chain([&self.d_g]).for_each(|v| see(v, &[&by_token]));
        self.d_start.iter().chain([&self.d_end]).for_each(|v| of.state(v, see));
    }
}
