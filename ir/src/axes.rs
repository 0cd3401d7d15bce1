//! The axes of layouts that flags name: what each splits. A mesh may have others, which split what it is told.

use crate::mesh::{AtomSet, Mesh, PIPELINE};

/// What the ranks along an axis have parts of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Splits {
    /// Layers, in stages.
    Layers,
    /// Rows of the batch.
    Rows,
    /// Tokens of a row.
    Tokens,
    /// The width of layers: heads, columns and rows of weights.
    Width,
}

/// What is known of an axis by its name.
#[derive(Debug)]
pub struct AxisRole {
    pub name: &'static str,
    pub splits: Splits,
    /// Its ranks may have parts of what they would else have copies of: parameters by ZeRO, experts.
    pub shares: bool,
    /// What other programs call it.
    pub elsewhere: &'static [&'static str],
}

impl AxisRole {
    /// True if ZeRO splits parameters over it.
    pub fn of_zero(&self) -> bool {
        self.shares && self.splits != Splits::Width
    }
    /// True if its ranks have rows of their own.
    pub fn of_rows(&self) -> bool {
        self.splits == Splits::Rows
    }
}

/// All of them, outer to inner. Both that split rows are `dp` for short.
pub static ROLES: [AxisRole; 5] = {
    const fn role(
        name: &'static str,
        splits: Splits,
        shares: bool,
        elsewhere: &'static [&'static str],
    ) -> AxisRole {
        AxisRole { name, splits, shares, elsewhere }
    }
    [
        role(PIPELINE, Splits::Layers, false, &["pipe", "pipeline"]),
        role("dp_replicate", Splits::Rows, false, &["hsdp", "replicate"]),
        role("dp_shard", Splits::Rows, true, &["fsdp", "shard"]),
        role("cp", Splits::Tokens, true, &["context", "sequence"]),
        role("tp", Splits::Width, true, &["mp", "model", "tensor"]),
    ]
};

/// The names of those of which this is true, outer to inner.
pub fn names(is: impl Fn(&AxisRole) -> bool) -> impl Iterator<Item = &'static str> {
    ROLES.iter().filter(move |r| is(r)).map(|r| r.name)
}

/// What is known of an axis.
pub fn role(name: &str) -> Option<&'static AxisRole> {
    ROLES.iter().find(|r| r.name == name)
}

impl Mesh {
    /// The atoms of all axes of which this is true.
    pub fn axes_that(&self, is: impl Fn(&AxisRole) -> bool) -> AtomSet {
        names(is).filter_map(|a| self.axis(a)).fold(AtomSet::EMPTY, AtomSet::union)
    }
}
