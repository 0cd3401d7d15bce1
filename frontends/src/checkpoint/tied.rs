//! Whether an output projection that is stored is the embedding, as `tie_word_embeddings` says.

use super::Checkpoint;
use crate::family::{FAMILIES, Family};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::weights::Weight;
use std::collections::BTreeSet;

/// Most elements of each tensor that are compared at a time.
const PART: usize = 1 << 20;

impl Checkpoint {
    /// Whether two tensors have the same shape and numbers.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_ranges`].
    pub fn equal(&self, a: &str, b: &str) -> Result<bool> {
        let (Some(one), Some(other)) = (self.get(a), self.get(b)) else { return Ok(false) };
        let shape = one.shape.clone();
        if shape != other.shape || one.readable().is_none() || other.readable().is_none() {
            return Ok(false);
        }
        let rows = shape.first().copied().unwrap_or(1);
        let row: usize = shape.iter().skip(1).product();
        let (step, mut from) = ((PART / row.max(1)).max(1), 0);
        let (mut x, mut y) = (vec![], vec![]);
        while from < rows {
            let until = rows.min(from.saturating_add(step));
            let mut ranges: Vec<_> = shape.iter().map(|&n| 0..n).collect();
            ranges.iter_mut().take(1).for_each(|r| *r = from..until);
            for (name, out) in [(a, &mut x), (b, &mut y)] {
                out.resize(ranges.iter().map(|r| r.len()).product(), 0.0f32);
                self.read_ranges(name, &ranges, out)?;
            }
            if x != y {
                return Ok(false);
            }
            from = until;
        }
        Ok(true)
    }

    /// A warning if a model that ties its output projection to the embedding has both of different numbers: as in
    /// transformers it is then not tied. `prefix` stands before the embedding's name.
    pub(crate) fn untied(&self, f: &Family, prefix: &str) -> Result<Option<Diag>> {
        let [embedding, head] = f.tables(prefix);
        self.differ(&embedding, &head).map(|d| {
            let why = "`tie_word_embeddings` is true, but both are stored, of different numbers";
            d.map(|d| {
                d.why(why).help(format!(
                    "set tie_word_embeddings to false to say so; or take `{head}` out of the file"
                ))
            })
        })
    }

    /// Refuses a copy of a table, of a layer that predicts tokens behind the next, that is none; one that is not there
    /// is none's.
    ///
    /// # Errors
    /// `untied-head`, and those of reading both.
    pub(crate) fn check_copy(&self, copy: &str, of: &str) -> Result<()> {
        match self.differ(of, copy)? {
            None => Ok(()),
            Some(d) => Err(d
                .rule("layers that predict tokens behind the next share both tables of the model")
                .help("leave --mtp out: such layers are not compiled")),
        }
    }

    /// Refuses weights whose output projection is not the embedding for a plan's weights that tie them.
    ///
    /// # Errors
    /// `untied-head`, and those of reading both tables.
    pub fn check_tied(&self, weights: &[Weight]) -> Result<()> {
        for [own, other] in tied(weights) {
            if let Some(d) = self.differ(&own, &other)? {
                return Err(d
                    .why("the plan was compiled with `tie_word_embeddings`: it has 1 of them")
                    .help("compile the folder that has these weights, and run that plan"));
            }
        }
        Ok(())
    }

    /// The same tensors, and where a plan's weights tie the output projection to the embedding and only the other
    /// of both is stored, that one by the name that the plan has.
    #[must_use]
    pub fn called_as(mut self, weights: &[Weight]) -> Checkpoint {
        for [own, other] in tied(weights) {
            let stored = self.tensors.get(&other).filter(|_| self.get(&own).is_none()).cloned();
            self.tensors.extend(stored.map(|e| (own, e)));
        }
        self
    }

    fn differ(&self, embedding: &str, head: &str) -> Result<Option<Diag>> {
        let both = self.get(embedding).is_some() && self.get(head).is_some();
        if !both || self.equal(embedding, head)? {
            return Ok(None);
        }
        let what = format!("`{head}` and `{embedding}` differ: they are not tied");
        Ok(Some(Diag::new("untied-head", what).at(self.place())))
    }
}

/// Of an embedding and an output projection that are tied, as weights have one of both alone: the name of that, and
/// of the other, for each family that may be meant.
fn tied(weights: &[Weight]) -> Vec<[String; 2]> {
    let has = |tensor: &String| weights.iter().any(|w| w.tensor == *tensor);
    let tables = |f: &Family| [f.tables(&f.prefix(|_| false)), f.tables("")];
    // Families share names: each pair is read once.
    let all: BTreeSet<[String; 2]> = FAMILIES.iter().flat_map(|f| tables(f)).collect();
    match [0, 1].map(|i| all.iter().any(|pair| has(&pair[i]))) {
        [true, false] => all.into_iter().filter(|[embedding, _]| has(embedding)).collect(),
        [false, true] => {
            let heads = all.into_iter().filter(|[_, head]| has(head));
            heads.map(|[embedding, head]| [head, embedding]).collect()
        }
        _none_or_both => vec![],
    }
}
