//! What the inputs of an archive mean: the one place that knows the names of inputs.

use super::Sizes;
use super::apart::tokens_stay_apart;
use super::graph::{Arg, Elem, Graph, Id, Input, Size, Source};
use super::labels;
use super::lower::Lower;
use super::room;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, Input as Own, Reads, Role, RoleKind, Value};
use shardc_ir::types::{DType, Type};

/// Tokens i32 [rows, seq].
const TOKENS: &str = "input_ids";
/// What each position is scored against, i32 [rows, seq]; negative where it is not.
const TARGETS: &str = "targets";
/// The number of each token in its row, i32 [seq].
pub(super) const POSITIONS: &str = "positions";
/// The seed and the step, i32 [3], and the number of each token in the global batch, i32 [rows, seq]: what numbers
/// at random are drawn from.
pub(super) const RUN: &str = "run";
pub(super) const PLACES: &str = "places";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    Tokens,
    Labels,
    Positions,
    /// Which tokens are not padding.
    Padding,
    /// A column of the user's data.
    Column,
}

const LABELS: [&str; 3] = ["labels", "targets", "target"];
const OF_POSITIONS: [&str; 3] = ["position_ids", "positions", "pos"];

/// What an input is: floats are columns; whole numbers are labels if a cross-entropy scores against them, positions
/// and masks by their name, and else the first ones [rows, tokens] are tokens, others columns. `seen` are those before
/// it.
///
/// # Errors
/// `import-input` for what no step can fill; `import-dims` for other sizes than those that were asked for.
pub(super) fn meaning(
    g: &Graph,
    i: &Input,
    shape: &[usize],
    sizes: Sizes,
    seen: &[Meaning],
) -> Result<Meaning> {
    let name = &*g.names[i.id];
    let scored = scored(g);
    let refuse = |what: String| {
        Err(Diag::new("import-input", format!("input `{name}`: {what}"))
            .rule("inputs are floats, or integers: tokens, labels, positions, masks, columns")
            .help("export with other inputs"))
    };
    let is = |list: &[&str]| list.contains(&name);
    let of_tokens = shape == [sizes.rows, sizes.seq];
    let m = match i.elem {
        Elem::Double => return refuse("its elements are f64".into()),
        Elem::Int if scored == Some(Some(i.id)) => Meaning::Labels,
        Elem::Int | Elem::Bool if name.contains("mask") => match of_tokens {
            true => Meaning::Padding,
            false => {
                return refuse("a mask is [rows, tokens], of tokens that are not padding".into());
            }
        },
        Elem::Bool => return refuse("its elements are not numbers".into()),
        Elem::Float => Meaning::Column,
        // What is done to them on the way is not known, and refused there.
        Elem::Int if is(&LABELS) && scored == Some(None) => Meaning::Labels,
        Elem::Int if is(&OF_POSITIONS) && counts(shape, sizes) => Meaning::Positions,
        Elem::Int if !seen.contains(&Meaning::Tokens) && shape.len() == 2 => {
            // A model may take kinds of tokens before its tokens.
            let named = |i: &Input| i.source == Source::Input && &*g.names[i.id] == TOKENS;
            match name == TOKENS || !g.inputs.iter().any(named) {
                true => Meaning::Tokens,
                false => Meaning::Column,
            }
        }
        Elem::Int => Meaning::Column,
    };
    if m != Meaning::Column && seen.contains(&m) {
        return refuse("another input is the same".into());
    }
    let fits = match m {
        Meaning::Tokens => of_tokens,
        Meaning::Labels | Meaning::Column => shape.first() == Some(&sizes.rows),
        Meaning::Positions | Meaning::Padding => true,
    };
    if !fits {
        let what = format!(
            "input `{name}` is {shape:?}, asked for are {} rows of {} tokens",
            sizes.rows, sizes.seq
        );
        return Err(Diag::new("import-dims", what)
            .rule("dim 0 of every input is the rows, and sizes that are fixed in an archive are those of the program")
            .help(match (m, shape) {
                (Meaning::Tokens, [rows, seq]) => format!("leave --seq and --microbatch out, or use --seq {seq}, and --microbatch so that all ranks of dp have {rows} rows"),
                _ => "export with inputs whose dim 0 is as large, [rows, ...]".to_string(),
            }));
    }
    Ok(m)
}

/// Whether positions of tokens may be of this shape.
fn counts(shape: &[usize], sizes: Sizes) -> bool {
    matches!(shape, [seq] | [_, seq] if *seq == sizes.seq)
        && shape.len().checked_sub(2).is_none_or(|d| [1, sizes.rows].contains(&shape[d]))
}

/// The input that a cross-entropy scores against, but for what moves numbers; within `Some` nothing if it is none, or
/// also what an embedding looks up. Without a cross-entropy `None`.
fn scored(g: &Graph) -> Option<Option<Id>> {
    let operand = |n: &super::graph::Node, name: &str| match n.arg(name) {
        Arg::Value(id) => Some(*id),
        _other => None,
    };
    // Nodes stand in the order in which they run.
    let origin = |mut id: Id| {
        for n in g.nodes.iter().rev().filter(|n| labels::moves(&n.op)) {
            if let (true, Some((_, Arg::Value(from)))) = (n.outs.contains(&id), n.args.first()) {
                id = *from;
            }
        }
        id
    };
    let loss = g.nodes.iter().find(|n| &*n.op == "cross_entropy_loss.default")?;
    let from = operand(loss, "target").map(origin);
    let looked = |id: &Id| {
        let all = g.nodes.iter().filter(|n| &*n.op == "embedding.default");
        all.filter_map(|n| operand(n, "indices")).any(|at| origin(at) == *id)
    };
    let input = |id: &Id| g.inputs.iter().any(|i| i.source == Source::Input && i.id == *id);
    Some(from.filter(|id| input(id) && !looked(id)))
}

impl Lower<'_> {
    /// The sizes of an input; symbols have theirs.
    pub(super) fn shape(&self, name: &str, sizes: &[Size]) -> Result<Vec<usize>> {
        let one = |s: &Size| match s {
            Size::Fixed(n) => Ok(*n),
            Size::Symbol(s) => match self.sizes.symbol(self.g, s) {
                Some(n) => Ok(n),
                None => {
                    Err(self.dims(name, format!("symbol {s} is neither its rows nor its tokens")))
                }
            },
            Size::Other(e) => Err(self.dims(name, format!("{e} is not a plain size"))),
        };
        let shape = sizes.iter().map(one).collect::<Result<Vec<usize>>>()?;
        match room::elements(&shape) {
            Some(_) => Ok(shape),
            None => {
                let what = format!("{shape:?} has more elements than a value may have: 2^48");
                Err(self.dims(name, what))
            }
        }
    }

    pub(super) fn dims(&self, name: &str, what: String) -> Diag {
        Diag::new("import-input", format!("input `{name}`: {what}"))
            .at(self.archive.path().display().to_string())
            .rule("dims of inputs are numbers, or a symbol for rows and one for tokens")
            .help("export with dynamic_shapes of Dim(\"batch\") and Dim(\"seq\"), or without any")
    }

    /// Two names of one tensor, of which one has requires_grad=False.
    pub(super) fn half_frozen(&self, one: &str, other: &str) -> Diag {
        Diag::new(
            "import-input",
            format!("`{one}` and `{other}` are one tensor, and only one is trained"),
        )
        .at(self.archive.path().display().to_string())
        .rule("requires_grad is the same for all names of a tensor")
        .help("give them one parameter, and detach it where its gradient is to stop")
    }

    /// The argument of a column of the user's data.
    pub(super) fn column(&mut self, name: &str, i: &Input, shape: &[usize]) -> Value {
        let ty = Type::new(if i.elem == Elem::Float { DType::F32 } else { DType::I32 }, shape);
        // What is of tokens is cut with them: whole numbers by their sizes, floats if a symbol says so.
        let seq = self.g.batch().and_then(|b| b.1);
        let of_tokens = match i.elem {
            Elem::Int => seq.is_some() && shape == [self.sizes.rows, self.sizes.seq],
            _floats => {
                matches!((seq, i.sizes.get(1)), (Some(Size::Symbol(a)), Some(Size::Symbol(b))) if a == b)
            }
        };
        let own = Own {
            fill: Fill::Column,
            batch: true,
            seq: of_tokens.then_some(1),
            reads: Reads::Usual,
        };
        self.input_arg(Role::new(RoleKind::Input(own), name), ty)
    }

    /// The argument of the mask of padding, 1 of tokens.
    pub(super) fn mask_input(&mut self, name: &str) -> Value {
        let own = Own { fill: Fill::Mask, batch: true, seq: Some(1), reads: Reads::Usual };
        let ty = Type::new(DType::I32, &[self.sizes.rows, self.sizes.seq]);
        self.input_arg(Role::new(RoleKind::Input(own), name), ty)
    }

    /// The argument of tokens: the column of their name.
    pub(super) fn tokens(&mut self, name: &str) -> Value {
        let role = match name {
            TOKENS => Role::input(TOKENS),
            _own => {
                let own = Own { reads: Reads::Own, ..Own::named(TOKENS) };
                Role::new(RoleKind::Input(own), name)
            }
        };
        let ty = Type::new(DType::I32, &[self.sizes.rows, self.sizes.seq]);
        self.input_arg(role, ty)
    }

    /// The argument of the labels of `logits`: those that the model moves by one stand at their own tokens in the data.
    pub(super) fn targets(&mut self, moves: bool, logits: Value) -> Value {
        let (name, shape) = self.labels.clone();
        let causal = !self.rules.is_empty()
            && self.rules.iter().all(|r| r.mask.right == Some(0))
            && tokens_stay_apart(&self.draft, logits);
        let of = |reads| Own { reads, ..Own::named(TARGETS) };
        let of_tokens = shape == [self.sizes.rows, self.sizes.seq];
        let role = match (moves, causal) {
            // As models of Hugging Face have them.
            (true, _) if *name == *LABELS[0] => Role::input(TARGETS),
            (true, _) => Role::new(RoleKind::Input(of(Reads::Next)), &*name),
            _ if !of_tokens => {
                let own = Own { seq: None, ..of(Reads::Usual) };
                Role::new(RoleKind::Input(own), &*name)
            }
            (false, true) => Role::new(RoleKind::Input(of(Reads::Causal)), &*name),
            (false, false) => Role::new(RoleKind::Input(of(Reads::Own)), &*name),
        };
        self.input_arg(role, Type::new(DType::I32, &shape))
    }

    /// The argument of an input, made where it is first used.
    pub fn of_input(&mut self, name: &'static str) -> Value {
        let all = [self.sizes.rows, self.sizes.seq];
        let sizes = match name {
            POSITIONS => &all[1..],
            RUN => &[3][..],
            _places => &all[..],
        };
        self.input_arg(Role::input(name), Type::new(DType::I32, sizes))
    }

    /// The argument of an input, made if it is new.
    pub(super) fn input_arg(&mut self, role: Role, ty: Type) -> Value {
        if let Some((_, v)) = self.inputs.iter().find(|i| i.0 == role) {
            return *v;
        }
        let v = self.arg(ty, role.clone());
        self.inputs.push((role, v));
        v
    }
}
