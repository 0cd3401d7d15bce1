//! The inputs of a model as a table: what fills each, and which of its dims are rows and tokens.

use super::{Func, Module, Port, Role, RoleKind, RoleName};
use crate::source::tables;
use crate::types::DType;
use std::collections::BTreeSet;

/// Where the numbers of an input come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Fill {
    /// Tokens of the data.
    Tokens,
    /// The token behind each one, or what a column of the data says; negative where nothing is scored. Of a
    /// model with labels `sum "loss"` is summed over them, and becomes their mean.
    Labels,
    /// The number of each token in its row.
    Positions,
    /// The number of each token in its document: it restarts with each ([`crate::documents`]).
    Offsets,
    /// The number of each token's document in its row; -1 of padding.
    Segments,
    /// How many tokens of a microbatch are not padding, f32: those of the step over its microbatches, so that
    /// what is divided by it becomes a mean over all of them. One token at least is counted in a step.
    Count,
    /// How many labels of a microbatch are scored that have so many tokens before them in their document, or
    /// else their row: 1, 2 and so on of them, f32; those of the step over its microbatches, one at least in a
    /// step.
    Scored,
    /// Of each token those that stand 1, 2 and so on of them behind it in its document, or else its row; -1 where there is
    /// none. i32, the last dim says how many.
    Ahead,
    /// Of each token the labels that stand 1, 2 and so on of them behind its own, which predict from as many tokens
    /// before them in their document, or else their row; negative where nothing is scored. As [`Fill::Ahead`].
    LabelsAhead,
    /// How many labels of a microbatch are each class, f32: those of the step over its microbatches.
    Histogram,
    /// The number of each token in the batch.
    Places,
    /// The seed in two halves, and the step: what draws depend on.
    Run,
    /// 1 of a token, 0 of padding: the column of the input's name, and 1 everywhere if the data have none.
    Mask,
    /// A column of the data that has the input's name.
    Column,
    /// Normal numbers, which follow from the seed and the step: f32.
    Random,
}

impl Fill {
    pub const ALL: [Fill; 15] = [
        Fill::Tokens,
        Fill::Labels,
        Fill::Positions,
        Fill::Offsets,
        Fill::Segments,
        Fill::Count,
        Fill::Scored,
        Fill::Ahead,
        Fill::LabelsAhead,
        Fill::Histogram,
        Fill::Places,
        Fill::Run,
        Fill::Mask,
        Fill::Column,
        Fill::Random,
    ];

    /// As the text has it.
    pub fn name(self) -> &'static str {
        match self {
            Fill::Tokens => "tokens",
            Fill::Labels => "labels",
            Fill::Positions => "positions",
            Fill::Offsets => "offsets",
            Fill::Segments => "segments",
            Fill::Count => "count",
            Fill::Scored => "scored",
            Fill::Ahead => "ahead",
            Fill::LabelsAhead => "labels_ahead",
            Fill::Histogram => "histogram",
            Fill::Places => "places",
            Fill::Run => "run",
            Fill::Mask => "mask",
            Fill::Column => "column",
            Fill::Random => "random",
        }
    }

    /// True for what is made of tokens, as documents lie in them.
    pub fn is_of_documents(self) -> bool {
        matches!(self, Fill::Offsets | Fill::Segments | Fill::Count)
    }

    /// True for what is counted of labels.
    pub fn is_of_labels(self) -> bool {
        matches!(self, Fill::Scored | Fill::Histogram)
    }

    /// True for tokens and labels further on.
    pub fn is_ahead(self) -> bool {
        matches!(self, Fill::Ahead | Fill::LabelsAhead)
    }

    /// True for what the data of a step say: the others follow from the step.
    pub fn is_data(self) -> bool {
        matches!(self, Fill::Tokens | Fill::Labels | Fill::Mask | Fill::Column | Fill::Random)
    }
}

/// Which column of the data fills tokens and labels, and how its labels lie to the tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, PartialOrd, Ord)]
pub enum Reads {
    /// The one of the input's name as it lies; if there is none, `input_ids` for tokens, and for labels `labels`,
    /// which stand at their own tokens: position i is scored against label i + 1.
    #[default]
    Usual,
    /// The one of the input's name as it lies, and no other.
    Own,
    /// The same for labels of a model whose tokens see none behind them: where the data are tokens alone, label i
    /// is token i + 1.
    Causal,
    /// The one of the input's name, and no other, whose labels stand at their own tokens.
    Next,
}

impl Reads {
    pub const ALL: [Reads; 4] = [Reads::Usual, Reads::Own, Reads::Causal, Reads::Next];

    /// As the text has it; nothing for what is usual.
    pub fn name(self) -> &'static str {
        match self {
            Reads::Usual => "",
            Reads::Own => "own",
            Reads::Causal => "causal",
            Reads::Next => "next",
        }
    }
}

/// An input: what fills it, and which of its dims are the rows of the batch and the tokens of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Input {
    pub fill: Fill,
    /// Dim 0 is the rows of the batch: of a microbatch in what runs for each. Else all rows share it.
    pub batch: bool,
    /// The dim of tokens, which context parallelism cuts.
    pub seq: Option<u8>,
    /// Of tokens and their labels the column; else usual.
    pub reads: Reads,
}

impl Input {
    /// The names that mean something by themselves.
    pub const KNOWN: [&str; 7] =
        ["input_ids", "targets", "positions", "offsets", "segments", "places", "run"];

    /// What a name means of which nothing else is said: that of the inputs of language models, or a
    /// column of the data with a row for each of the batch.
    pub fn named(name: &str) -> Input {
        // All of them are in `KNOWN`.
        let (fill, batch, seq) = match name {
            "input_ids" => (Fill::Tokens, true, Some(1)),
            "targets" => (Fill::Labels, true, Some(1)),
            "positions" => (Fill::Positions, false, Some(0)),
            "offsets" => (Fill::Offsets, true, Some(1)),
            "segments" => (Fill::Segments, true, Some(1)),
            "places" => (Fill::Places, true, Some(1)),
            "run" => (Fill::Run, false, None),
            _column => (Fill::Column, true, None),
        };
        Input { fill, batch, seq, reads: Reads::Usual }
    }

    /// Whether a column is read so: tokens by their name alone, labels of tokens in every way.
    pub fn may_read(self, reads: Reads) -> bool {
        let of_tokens = self.batch && self.seq == Some(1);
        match (self.fill, reads) {
            (_, Reads::Usual) => true,
            (Fill::Tokens, Reads::Own) | (Fill::Labels, _) => of_tokens,
            _other => false,
        }
    }

    /// The dim of tokens.
    pub fn tokens(self) -> Option<usize> {
        self.seq.map(usize::from)
    }
}

/// As the text has it in brackets: `labels, batch, seq=1, own`.
impl std::fmt::Display for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.fill.name())?;
        if self.batch {
            f.write_str(", batch")?;
        }
        self.seq.map_or(Ok(()), |d| write!(f, ", seq={d}"))?;
        match self.reads {
            Reads::Usual => Ok(()),
            reads => write!(f, ", {}", reads.name()),
        }
    }
}

/// A row of the table of inputs of a module.
#[derive(Clone, PartialEq, Debug)]
pub struct InputRow {
    pub name: RoleName,
    pub input: Input,
    pub dtype: DType,
    /// The sizes of one row of the batch; of what has no rows all of them.
    pub sizes: Vec<usize>,
    /// Whole numbers are below this: the size of the smallest table that they index, or that of all of i32;
    /// `None` if that is not known.
    pub below: Option<usize>,
}

impl InputRow {
    /// Elements of one row of the batch; of what has no rows all of them.
    pub fn elements(&self) -> usize {
        self.sizes.iter().fold(1, |n, &s| n.saturating_mul(s))
    }

    /// What whole numbers are below in a model of so many tokens; a mask has 0 and 1.
    pub fn bound(&self, vocab: usize) -> usize {
        if self.input.fill == Fill::Mask {
            return 2;
        }
        let own = self.below.unwrap_or(vocab);
        // What is scored may be other things than tokens, and more.
        let tokens = self.of_tokens() && self.input.fill == Fill::Tokens;
        if tokens { own.min(vocab) } else { own }
    }

    /// False for whole numbers that are known to be no index of anything: they may be any.
    pub fn indexes(&self) -> bool {
        let told = self.of_tokens() || self.input.fill == Fill::Mask;
        told || self.below != Some(i32::MAX as usize)
    }

    /// True for tokens, or labels, of a sequence: one number for each of its tokens.
    pub fn of_tokens(&self) -> bool {
        let line = self.input.batch && self.input.seq == Some(1) && self.sizes.len() == 1;
        line && matches!(self.input.fill, Fill::Tokens | Fill::Labels)
    }
}

/// The table of inputs of a module: each once, in the order of its arguments.
pub fn inputs(m: &Module) -> Vec<InputRow> {
    let mut all: Vec<InputRow> = vec![];
    for (f, a) in m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a))) {
        let Some((role, input)) = a.role.as_ref().and_then(|r| Some((r, r.kind.input()?))) else {
            continue;
        };
        if all.iter().all(|row| row.name != role.name) {
            let (ty, own) = (f.ty(a.value), usize::from(input.batch));
            let sizes = ty.sizes().get(own..).unwrap_or_default().to_vec();
            let below = Some(i32::MAX as usize).filter(|_| !ty.dtype.is_float());
            all.push(InputRow { name: role.name.clone(), input, dtype: ty.dtype, sizes, below });
        }
        if let Some(row) = all.iter_mut().find(|row| row.name == role.name) {
            let (sizes, followed) = indexed(m, f, a);
            let least = sizes.into_iter().chain(row.below).min();
            row.below = row.below.and(least).filter(|_| followed);
        }
    }
    all
}

/// The sizes of the dims that an argument of whole numbers indexes, in its function and in those that it goes on to
/// from there; and whether nothing is done to the numbers on the way, so that these are all.
fn indexed(m: &Module, f: &Func, a: &Port) -> (Vec<usize>, bool) {
    let (mut sizes, mut followed) = (vec![], true);
    let mut todo = vec![(f, a.value)];
    let mut gone_on: BTreeSet<&Role> = BTreeSet::new();
    while let Some((f, v)) = todo.pop() {
        let t = tables(f, v);
        sizes.extend(t.sizes);
        followed &= t.followed;
        for role in t.results.into_iter().map(|r| f.results[r].role.as_ref()) {
            let passed =
                |r: &&Role| matches!(r.kind, RoleKind::Stash | RoleKind::Edge | RoleKind::Step);
            let Some(role) = role.filter(passed) else {
                followed = false;
                continue;
            };
            if gone_on.insert(role) {
                let args = m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a)));
                let same = args.filter(|(_, a)| a.role.as_ref() == Some(role));
                todo.extend(same.map(|(f, a)| (f, a.value)));
            }
        }
    }
    (sizes, followed)
}
