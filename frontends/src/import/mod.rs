//! Imports models that are not a family: an archive of `torch.export` becomes a program, as a folder of a
//! family does.
//!
//! `archive` reads the file, `schema` its program into the neutral `graph`; `lower` runs over that
//! once: what is known is computed (`fold`), what only moves dims is a `view`, the rest is an op of the
//! `table`, or of a matcher (`raise`, `attend`, `labels`). `emit` makes the program of it.

mod apart;
mod archive;
mod attend;
mod choices;
mod compare;
mod compose;
mod conv;
mod draft;
mod drop;
mod einsum;
mod emit;
mod filled;
mod fold;
mod folded;
mod graph;
mod inplace;
mod inputs;
mod labels;
mod lookup;
mod losses;
mod lower;
mod mask;
mod math;
mod microbatches;
mod names;
mod norms;
mod offsets;
mod operands;
mod outputs;
mod padding;
mod parts;
mod picks;
mod places;
mod pools;
mod products;
mod raise;
mod recur;
mod reductions;
mod regions;
mod reshape;
mod room;
mod schema;
mod scored;
mod shapes;
mod stats;
mod table;
mod ties;
mod unread;
mod view;
mod within;
mod writes;
mod written;
mod zip;

use crate::checkpoint::Checkpoint;
use crate::stored::{file_type, weights};
use archive::Archive;
use graph::{Elem, Graph, Size};
use lower::Lower;
use microbatches::Parts;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::source::Source;
use shardc_ir::verify::verify;
use std::collections::BTreeSet;
use std::path::Path;

/// Rows of a microbatch over all ranks, and tokens of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    pub rows: usize,
    pub seq: usize,
}

/// Which groups of ops become one op, or one shape of ops, that passes know. The numbers are the same
/// without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Raise {
    pub norms: bool,
    pub rope: bool,
    pub activations: bool,
    /// Fused weights are cut into those that they are made of.
    pub parts: bool,
}

impl Default for Raise {
    fn default() -> Raise {
        Raise { norms: true, rope: true, activations: true, parts: true }
    }
}

/// Sizes where neither a user nor the archive says any.
pub const DEFAULT: Sizes = Sizes { rows: 8, seq: 512 };

/// Splits weights over `tp` by a plan of Hugging Face's (`base_model_tp_plan`): globs of modules, and `colwise` or
/// `rowwise` for each.
pub fn split_as(source: &mut Source, plan: &[(String, String)]) {
    let Source { module, weights, .. } = source;
    names::split_as(&module.funcs[0], weights, plan);
}

/// An archive that was opened.
pub struct Opened {
    archive: Archive,
    graph: Graph,
    dropout: Dropout,
}

/// A model that was imported.
pub struct Imported {
    pub source: Source,
    /// Tensors that the archive does not train, to be frozen.
    pub frozen: Vec<String>,
    /// Other names of tensors that have several, because parameters are tied, each with its tensor.
    pub tied: Vec<[String; 2]>,
    /// Why the loss is right with one microbatch only, if it is.
    pub one_microbatch: Option<&'static str>,
    /// What the user should know although the model is imported.
    pub warnings: Vec<Diag>,
}

impl Opened {
    /// Reads an archive, without the numbers of its parameters.
    ///
    /// # Errors
    /// `file`, `archive`, `archive-version`.
    pub fn read(path: &Path) -> Result<Opened> {
        let archive = Archive::open(path)?;
        let mut graph = archive.graph()?;
        inplace::undo(&mut graph);
        writes::replace(&mut graph);
        Ok(Opened { archive, graph, dropout: Dropout::Nothing })
    }

    /// The same with dropout, as the archive says or at another rate, where it is trained.
    pub fn drops(self, dropout: Dropout) -> Opened {
        Opened { dropout, ..self }
    }

    /// Rows and tokens, where the archive fixes them, or has less of them than `most`. A row without tokens
    /// counts as one.
    pub fn fixed(&self, most: Sizes) -> [Option<usize>; 2] {
        let of = |s: &Size, most: usize| match s {
            Size::Fixed(n) => Some(*n),
            Size::Symbol(s) => Some(self.graph.range(s).1).filter(|&n| n < most),
            Size::Other(_) => None,
        };
        let sizes = self.graph.batch();
        sizes.map_or([None; 2], |(rows, seq)| {
            [of(rows, most.rows), seq.map_or(Some(1), |s| of(s, most.seq))]
        })
    }

    /// Where the numbers of parameters lie; nothing if the archive was made without.
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        let all = self.archive.weights.iter();
        let entries = all.filter_map(|(name, t)| {
            let dtype = weights(|f| f.safetensors == t.stored.dtype.name)?;
            Some((
                name.to_string(),
                file_type(dtype),
                t.stored.shape.clone(),
                t.stored.bytes.clone()?,
            ))
        });
        Checkpoint::of_archive(self.archive.path(), entries)
    }

    /// The program for these sizes.
    ///
    /// # Errors
    /// `import-op`, `import-input`, `import-dims`, `import-loss`, `mask-rule`, `merged-parameters`.
    pub fn import(&self, sizes: Sizes, mode: Mode, raise: Raise) -> Result<Imported> {
        self.check(sizes)?;
        room::begin();
        let mut l = Lower::new(&self.graph, &self.archive, sizes, raise);
        if mode == Mode::Train {
            l.dropout = self.dropout;
        }
        l.run()?;
        if l.dropout != Dropout::Nothing && l.streams.is_empty() {
            let what = "--dropout has no effect: the archive has no dropout";
            let help = "leave it out, or export in training, with rates above 0";
            l.warnings.push(Diag::new("no-effect", what).help(help));
        }
        self.again(&l, sizes)?;
        ties::tie(&mut l, &self.archive);
        let one_microbatch = self.one_microbatch(&l, sizes);
        let source = emit::source(&mut l, mode)?;
        verify(&source.module, Phase::Source).map_err(|mut all| all.swap_remove(0))?;
        let frozen = if mode == Mode::Train { frozen(&l, &source) } else { vec![] };
        l.warnings.extend(told(&frozen));
        let names = |p: &lower::Param| -> Vec<[String; 2]> {
            p.names.iter().skip(1).map(|n| [n.to_string(), p.names[0].to_string()]).collect()
        };
        let tied = l.params.iter().filter(|p| p.part.is_none()).flat_map(names).collect();
        Ok(Imported { source, frozen, tied, one_microbatch, warnings: l.warnings })
    }

    /// Why a loss of several microbatches is not the mean of those of each, if it is so.
    fn one_microbatch(&self, l: &Lower, sizes: Sizes) -> Option<&'static str> {
        let parts = |l: &Lower| -> std::result::Result<Vec<Parts>, &'static str> {
            [l.loss, l.added].into_iter().flatten().map(|loss| l.parts_of(loss)).collect()
        };
        let own = match parts(l) {
            Ok(own) => own,
            Err(why) => return Some(why),
        };
        if own.iter().all(Parts::is_plain) {
            return None;
        }
        // What depends on the rows of a microbatch shows with others.
        let other = self.other_rows(sizes).and_then(|other| {
            let mut l = Lower::new(&self.graph, &self.archive, other, l.raise);
            l.run().ok()?;
            Some((other.rows, parts(&l).ok()?))
        });
        let Some((rows, other)) = other else {
            return own.iter().find_map(Parts::of_fixed_rows);
        };
        let mut pairs = own.iter().zip(&other);
        pairs.find_map(|(own, other)| own.of_rows(sizes.rows, (rows, other)))
    }

    /// The same sizes with other rows, if the archive has such.
    fn other_rows(&self, sizes: Sizes) -> Option<Sizes> {
        let Some((Size::Symbol(s), _)) = self.graph.batch() else { return None };
        let (low, high) = self.graph.range(s);
        let all = [sizes.rows + 1, sizes.rows.saturating_sub(1)];
        let rows = all.into_iter().find(|&rows| rows >= low && rows <= high)?;
        Some(Sizes { rows, ..sizes })
    }

    /// Refuses sizes that the archive does not have.
    fn check(&self, sizes: Sizes) -> Result<()> {
        let Some((rows, seq)) = self.graph.batch() else {
            return Err(Diag::new("import-input", "the archive has no input of rows")
                .at(self.archive.path().display().to_string())
                .rule("an input is [rows, ...]: tokens are integers [rows, tokens]")
                .help("export with input_ids and labels, or with inputs whose dim 0 is the rows"));
        };
        let own = std::iter::once((rows, sizes.rows, "rows"));
        for (size, n, what) in own.chain(seq.map(|s| (s, sizes.seq, "tokens"))) {
            let (low, high) = match size {
                Size::Fixed(fixed) => (*fixed, *fixed),
                Size::Symbol(s) => self.graph.range(s),
                Size::Other(_) => (0, usize::MAX),
            };
            if n < low || n > high {
                let (flag, way) = match what {
                    "rows" => ("--microbatch", "times dp"),
                    _ => ("--seq", "there"),
                };
                let range = if low == high { format!("{low}") } else { format!("{low} to {high}") };
                return Err(Diag::new(
                    "import-dims",
                    format!("the archive is for {range} {what}, not for {n}"),
                )
                .at(self.archive.path().display().to_string())
                .rule("sizes that are fixed in an archive are those of the program")
                .help(format!(
                    "leave {flag} out, or make it {range} {way}, or export with a symbol for it"
                )));
            }
        }
        Ok(())
    }

    /// Masks of another length must have the same rules, or what one length shows is none.
    fn again(&self, l: &Lower, sizes: Sizes) -> Result<()> {
        let Some((_, Some(Size::Symbol(s)))) = self.graph.batch() else { return Ok(()) };
        let (low, high) = self.graph.range(s);
        let longer = (2 * sizes.seq + 1).min(high);
        let seq = if longer > sizes.seq && longer <= LONGEST {
            longer
        } else {
            sizes.seq.min(LONGEST) / 2 + 1
        };
        // Rows whose padding was alike must differ now.
        let alike = l.padding.is_some() && padding::alike(sizes.rows, sizes.seq);
        let seq = if alike { seq.min(padding::longest(sizes.rows)) } else { seq };
        if alike && (seq < low.max(2) || seq > high) {
            let what =
                format!("a mask of padding of {} rows is too large to be looked at", sizes.rows);
            return Err(Diag::new("mask-rule", what)
                .at(self.archive.path().display().to_string())
                .help("import with fewer rows: a smaller --microbatch"));
        }
        if seq == sizes.seq || seq < low || seq > high || l.rules.is_empty() {
            return Ok(());
        }
        let mut other = Lower::new(&self.graph, &self.archive, Sizes { seq, ..sizes }, l.raise);
        other.run()?;
        let (few, many) = if seq < sizes.seq { (&other, l) } else { (l, &other) };
        let pairs = few.rules.iter().zip(&many.rules);
        let odd = pairs.clone().position(|(a, b)| !a.agrees(few.sizes.seq, b));
        match odd {
            None if few.rules.len() == many.rules.len() => Ok(()),
            odd => {
                let at = odd.unwrap_or(0);
                Err(Diag::new(
                    "mask-rule",
                    format!("attention {at} has another mask with {seq} tokens"),
                )
                .at(self.archive.path().display().to_string())
                .rule("a mask follows one rule, however many tokens there are")
                .help("use an architecture whose masks are full, causal, a window or chunks"))
            }
        }
    }
}

/// The tensors of a program that its archive does not train.
fn frozen(l: &Lower, source: &Source) -> Vec<String> {
    let all: BTreeSet<&str> = l.params.iter().filter(|p| p.frozen).map(|p| &*p.names[0]).collect();
    let own = source.weights.iter().map(|w| &w.tensor).filter(|t| all.contains(&***t));
    let mut own: Vec<String> = own.cloned().collect();
    own.dedup();
    own
}

/// A warning about tensors that are not trained.
fn told(frozen: &[String]) -> Option<Diag> {
    let (first, more) = (frozen.first()?, frozen.len() - 1);
    let others = match more {
        0 => String::new(),
        n => format!(", and {}", count(n, "other parameter", "other parameters")),
    };
    let what = format!("`{first}`{others}: the archive has requires_grad=False, so not trained");
    let all: Vec<String> = frozen.iter().take(LISTED).map(|t| format!("--freeze '{t}'")).collect();
    let dots = if frozen.len() > LISTED { " …" } else { "" };
    Some(
        Diag::new("frozen", what)
            .rule("plans of an archive freeze such parameters; a text does not say what is frozen")
            .help(format!("compile a text of it with {}{dots}", all.join(" ")))
            .help("to train them, export after requires_grad_(True), or compile the text without"),
    )
}

/// Most parameters that a warning lists.
const LISTED: usize = 8;

/// Most tokens with which masks are looked at a second time.
const LONGEST: usize = 1025;

impl Graph {
    /// Rows and tokens of the first input of tokens; without tokens the rows of the first input.
    fn batch(&self) -> Option<(&Size, Option<&Size>)> {
        let inputs = || self.inputs.iter().filter(|i| i.source == graph::Source::Input);
        let tokens = inputs().find_map(|i| match &i.sizes[..] {
            [rows, seq] if i.elem == Elem::Int => Some((rows, Some(seq))),
            _other => None,
        });
        tokens.or_else(|| Some((inputs().find_map(|i| i.sizes.first())?, None)))
    }

    /// Smallest and largest value of a symbol.
    fn range(&self, symbol: &str) -> (usize, usize) {
        let own = self.ranges.iter().find(|r| &*r.0 == symbol);
        own.map_or((1, usize::MAX), |r| (r.1.max(1), r.2))
    }
}

impl Sizes {
    /// The value of a symbol: rows and tokens have one each.
    fn symbol(self, g: &Graph, s: &str) -> Option<usize> {
        let (rows, seq) = g.batch()?;
        let is = |size: &Size| matches!(size, Size::Symbol(x) if **x == *s);
        match () {
            () if is(rows) => Some(self.rows),
            () if seq.is_some_and(is) => Some(self.seq),
            () => None,
        }
    }
}
