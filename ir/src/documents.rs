//! Documents that are packed in rows of tokens: which token is of which, and where it stands in it.

use serde::{Deserialize, Serialize};

/// How documents lie in rows of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Documents {
    /// Tokens part them.
    Ends(Ends),
    /// Who makes the rows says it.
    Given(Given),
}

/// That the data say which token is of which document.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Given {
    /// By a number for each token: neighbours of one document have the same, padding one below 0.
    Rows,
}

/// The tokens that part documents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ends {
    /// The token that ends a document, and is of it.
    pub end: i32,
    /// The token that fills rows up, and is of no document. It may be the one that ends documents: then the first of
    /// several ends a document, unless they begin the row, and the others are padding.
    #[serde(default)]
    pub padding: Option<i32>,
}

/// The segment of padding.
pub const PADDING: i32 = -1;

/// Where each token of some rows is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Places {
    /// The number of its document in its row; [`PADDING`] of padding.
    pub segments: Vec<i32>,
    /// Its number in its document.
    pub offsets: Vec<i32>,
}

impl Documents {
    /// The data say it.
    pub const ROWS: Documents = Documents::Given(Given::Rows);

    /// Each ends with a token, and another one may be padding.
    pub const fn ends(end: i32, padding: Option<i32>) -> Documents {
        Documents::Ends(Ends { end, padding })
    }

    /// Whether rows may have padding that is known.
    pub fn pads(self) -> bool {
        match self {
            Documents::Ends(d) => d.padding.is_some(),
            Documents::Given(_) => true,
        }
    }

    /// The tokens that it asks for.
    pub fn tokens(self) -> impl Iterator<Item = i32> {
        let all = match self {
            Documents::Ends(d) => [Some(d.end), d.padding],
            Documents::Given(_) => [None, None],
        };
        all.into_iter().flatten()
    }

    /// Where tokens of rows of `seq` are, by themselves or by the numbers that the data give them (without such a row
    /// is one document); of their labels those that are not scored are made negative.
    pub fn places(
        self,
        tokens: &[i32],
        given: Option<&[i32]>,
        labels: Option<&mut [i32]>,
        seq: usize,
    ) -> Places {
        match self {
            Documents::Ends(d) => {
                labels.into_iter().for_each(|labels| d.ignore(tokens, labels));
                let [segments, offsets] = d.places(tokens, seq);
                Places { segments, offsets }
            }
            Documents::Given(_) => {
                let given = given.filter(|g| g.len() == tokens.len());
                let p = Places::of(given.unwrap_or(&vec![0; tokens.len()]), seq);
                labels.into_iter().for_each(|labels| p.ignore(labels, seq));
                p
            }
        }
    }

    /// How many tokens of these segments are not padding, and one at least, over so many microbatches.
    pub fn count(segments: &[i32], microbatches: usize) -> f64 {
        let tokens = segments.iter().filter(|&&s| s != PADDING).count();
        tokens.max(1) as f64 / microbatches.max(1) as f64
    }

    /// How many labels are scored of each depth of [`ahead`], and one at least, over so many microbatches.
    pub fn scored(ahead: &[i32], depths: usize, microbatches: usize) -> Vec<f64> {
        let of = |d: usize| ahead.iter().skip(d).step_by(depths).filter(|&&x| x >= 0).count();
        (0..depths).map(|d| of(d).max(1) as f64 / microbatches.max(1) as f64).collect()
    }
}

/// Of each number of rows of `seq` those that stand 1, 2, … `depths` behind it and have as many tokens before them in
/// their document, or else their row; -1 where there is none.
pub fn ahead(numbers: &[i32], places: Option<&Places>, depths: usize, seq: usize) -> Vec<i32> {
    let before = |i: usize| places.map_or(Some(i % seq.max(1)), |p| p.before(i));
    let one = |i: usize, d: usize| {
        let there = (i % seq.max(1)) + d < seq && before(i + d).is_some_and(|n| n >= d);
        numbers.get(i + d).copied().filter(|_| there).unwrap_or(PADDING)
    };
    (0..numbers.len()).flat_map(|i| (1..=depths).map(move |d| one(i, d))).collect()
}

impl Places {
    /// How many tokens of its document stand before one; none of padding.
    fn before(&self, at: usize) -> Option<usize> {
        let own = self.segments.get(at).filter(|&&s| s != PADDING).and(self.offsets.get(at));
        usize::try_from(*own?).ok()
    }

    /// Of rows whose neighbours of one document have the same number.
    fn of(given: &[i32], seq: usize) -> Places {
        let [mut segments, mut offsets] = [(); 2].map(|()| Vec::with_capacity(given.len()));
        for row in given.chunks(seq.max(1)) {
            let (mut next, mut offset) = (-1, 0);
            for (i, &g) in row.iter().enumerate() {
                let (pads, first) = (g < 0, i == 0);
                let begins = first || row[i - 1].max(-1) != g.max(-1);
                offset = if begins { 0 } else { offset + 1 };
                next += i32::from(begins && !pads);
                segments.push(if pads { PADDING } else { next });
                offsets.push(offset);
            }
        }
        Places { segments, offsets }
    }

    /// Makes labels negative that are of padding, or of another document than the token they are scored at.
    fn ignore(&self, labels: &mut [i32], seq: usize) {
        let rows = self.segments.chunks(seq.max(1)).zip(labels.chunks_mut(seq.max(1)));
        for (segments, labels) in rows {
            for (i, label) in labels.iter_mut().enumerate() {
                let own = segments[i];
                if own == PADDING || segments.get(i + 1).is_some_and(|next| *next != own) {
                    *label = -100;
                }
            }
        }
    }
}

impl Ends {
    /// The segment of every token, and its number in its document, of rows of so many tokens. A row begins with
    /// a document; behind its end, and behind padding, the next begins. Padding is a segment of its own,
    /// [`PADDING`], in which tokens are numbered as in a document.
    pub fn places(&self, tokens: &[i32], seq: usize) -> [Vec<i32>; 2] {
        let [mut segments, mut offsets] = [(); 2].map(|()| Vec::with_capacity(tokens.len()));
        for row in tokens.chunks(seq.max(1)) {
            let (mut next, mut offset) = (-1, 0);
            let mut before: Option<(i32, bool)> = None;
            for (i, &token) in row.iter().enumerate() {
                let beside = if i > 0 { row.get(i - 1) } else { row.get(1) };
                let pads =
                    self.padding == Some(token) && (token != self.end || beside == Some(&self.end));
                let begins =
                    before.is_none_or(|(b, padded)| padded != pads || b == self.end && !padded);
                offset = if begins { 0 } else { offset + 1 };
                next += i32::from(begins && !pads);
                segments.push(if pads { PADDING } else { next });
                offsets.push(offset);
                before = Some((token, pads));
            }
        }
        [segments, offsets]
    }

    /// Whether a token's label is scored: not behind the end of a document, not of padding, and not if it is
    /// padding.
    pub fn scores(&self, token: i32, label: i32) -> bool {
        // Where one token does both, a label behind another token is the end of its document.
        let padding = self.padding.filter(|&p| p != self.end);
        token != self.end && padding.is_none_or(|p| token != p && label != p)
    }

    /// Labels, of which those that are not scored are made negative.
    pub fn ignore(&self, tokens: &[i32], labels: &mut [i32]) {
        for (&token, label) in tokens.iter().zip(labels) {
            if !self.scores(token, *label) {
                *label = -100;
            }
        }
    }
}

/// How many labels are each of so many classes, over so many microbatches.
pub fn histogram(labels: &[i32], classes: usize, microbatches: usize) -> Vec<f64> {
    let mut all = vec![0.0; classes];
    for label in labels {
        if let Some(x) = usize::try_from(*label).ok().and_then(|c| all.get_mut(c)) {
            *x += 1.0 / microbatches.max(1) as f64;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_restart_behind_their_ends() {
        let d = Ends { end: 2, padding: Some(0) };
        let tokens =
            [5, 6, 2, 7, 2, 2, 8, 0, 0, 9, /* the next row */ 0, 0, 7, 8, 2, 9, 9, 9, 2, 0];
        let [segments, offsets] = d.places(&tokens, 10);
        assert_eq!(segments[..10], [0, 0, 0, 1, 1, 2, 3, -1, -1, 4]);
        assert_eq!(offsets[..10], [0, 1, 2, 0, 1, 0, 0, 0, 1, 0]);
        assert_eq!(segments[10..], [-1, -1, 0, 0, 0, 1, 1, 1, 1, -1]);
        assert_eq!(offsets[10..], [0, 1, 0, 1, 2, 0, 1, 2, 3, 0]);
        assert_eq!(Documents::count(&segments, 4), 15.0 / 4.0);
        assert_eq!(Documents::count(&[PADDING; 3], 2), 0.5);
        let mut labels = tokens[1..10].to_vec();
        d.ignore(&tokens[..9], &mut labels);
        assert_eq!(labels, [6, 2, -100, 2, -100, -100, -100, -100, -100]);
        // One token that ends and pads: behind, before and in place of all tokens of a row.
        let d = Ends { end: 2, padding: Some(2) };
        let tokens = [
            5, 2, 6, 7, 2, 2, 2, 2, /* */ 2, 2, 5, 6, 2, 7, 8, 9, /* */ 2, 5, 6, 2, 2, 7,
            2, 2,
        ];
        let [segments, offsets] = d.places(&tokens, 8);
        assert_eq!(segments[..8], [0, 0, 1, 1, 1, -1, -1, -1]);
        assert_eq!(offsets[..8], [0, 1, 0, 1, 2, 0, 1, 2]);
        assert_eq!(segments[8..16], [-1, -1, 0, 0, 0, 1, 1, 1]);
        assert_eq!(segments[16..], [0, 1, 1, 1, -1, 2, 2, -1]);
        assert_eq!(d.places(&[2; 4], 4), [vec![-1; 4], vec![0, 1, 2, 3]]);
        let mut labels = tokens[1..8].to_vec();
        d.ignore(&tokens[..7], &mut labels);
        assert_eq!(labels, [2, -100, 7, 2, -100, -100, -100]);
        // Without padding its token is one of the others.
        let d = Ends { end: 0, padding: None };
        assert_eq!(d.places(&[0, 0, 4, 0, 5], 5), [vec![0, 1, 2, 2, 3], vec![0, 0, 0, 1, 0]]);
    }

    #[test]
    fn rows_say_where_documents_are() {
        let p = |given: &[i32], labels: &mut [i32]| {
            let tokens = vec![9; given.len()];
            let p = Documents::ROWS.places(&tokens, Some(given), Some(labels), 6);
            (p.segments, p.offsets)
        };
        let mut labels = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6];
        let got = p(&[7, 7, 7, 3, 7, 7, /* the next row */ 7, 0, 0, -1, -5, 0], &mut labels);
        assert_eq!(got.0, [0, 0, 0, 1, 2, 2, 0, 1, 1, -1, -1, 2]);
        assert_eq!(got.1, [0, 1, 2, 0, 0, 1, 0, 0, 1, 0, 1, 0]);
        assert_eq!(labels, [1, 2, -100, -100, 5, 6, -100, 2, -100, -100, -100, 6]);
        // Nobody says it: a row is a document, and its last label is what follows it.
        let mut labels = [1; 6];
        let p = Documents::ROWS.places(&[9; 6], None, Some(&mut labels), 3);
        assert_eq!((p.segments, p.offsets, labels), (vec![0; 6], vec![0, 1, 2, 0, 1, 2], [1; 6]));
    }
}
