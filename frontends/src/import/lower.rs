//! From a neutral graph to ops of ours: one node after the other, known numbers folded, the rest by
//! the [table](super::table).

use super::archive::Archive;
use super::fold;
use super::folded::Folded;
use super::graph::{Arg, Elem, Graph, Id, Input, Node, Source};
use super::inputs::{self, Meaning};
use super::labels::Labels;
use super::losses::Mean;
use super::mask::Rule as MaskRule;
use super::padding::Cells;
use super::table::{self, How};
use super::view::{Dim, View};
use super::{Raise, Sizes};
use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Role, RoleKind, Value, ValueMap};
use shardc_ir::ids::{Id as _, IndexVec};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Dropout;
use shardc_ir::types::{DType, Type};
use shardc_ir::weights::TensorSlice;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Most dims of a value.
pub(super) const MAX_RANK: usize = 20;

/// What a value of the graph became.
#[derive(Clone, Debug)]
pub(super) enum Val {
    /// Nothing yet.
    Unmade,
    /// A value of the program.
    Data(View),
    /// Known numbers; a size is a scalar.
    Folded(Folded),
    /// Numbers that follow from a mask of padding.
    Padded(Cells),
    /// Labels on their way to the loss.
    Labels(Labels),
    /// A mean over labels, of which a step has the count.
    Mean(Mean),
    /// All rows of logits but the last, on their way to the loss.
    Head(View),
    /// Scores with a mask that the softmax behind them takes.
    Masked(View, Cells),
    /// The softmax of such scores, and its rate of dropout.
    Probs(View, Cells, f64),
    /// What cannot be had, why, and the way out.
    Missing(Missing),
}

/// Why a value cannot be had, and the way out.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    pub why: Arc<str>,
    pub help: &'static [&'static str],
}

impl Val {
    /// The shape that the archive's value has, if it is one.
    pub fn shape(&self) -> Option<&[usize]> {
        match self {
            Val::Data(v) | Val::Head(v) | Val::Masked(v, _) | Val::Probs(v, ..) => Some(&v.shape),
            Val::Folded(f) => Some(&f.shape),
            Val::Padded(c) => Some(&c.plain.shape),
            Val::Labels(l) => Some(&l.shape),
            Val::Mean(_) => Some(&[]),
            Val::Unmade | Val::Missing(_) => None,
        }
    }
}

/// A parameter as an argument of the draft.
pub(super) struct Param {
    /// Its names: more than one if it is tied.
    pub names: Vec<Arc<str>>,
    pub value: Value,
    /// Modules that use it, in order.
    pub scopes: Vec<Arc<str>>,
    /// It is this part of the tensor, and its number.
    pub part: Option<(usize, TensorSlice)>,
    /// It is not trained, under any of its names.
    pub frozen: bool,
}

/// The state of an import.
pub(super) struct Lower<'a> {
    pub g: &'a Graph,
    pub archive: &'a Archive,
    pub sizes: Sizes,
    pub raise: Raise,
    pub mesh: Mesh,
    /// The program as it grows, with nodes that nobody uses.
    pub draft: Func,
    pub env: IndexVec<Id, Val>,
    /// The node that makes each value of the archive.
    pub makers_of: BTreeMap<Id, usize>,
    /// What was on its way to attention or a loss, as data.
    pub again: BTreeMap<Id, Val>,
    /// Nothing is kept for attention or a loss.
    pub plainly: bool,
    pub params: Vec<Param>,
    /// Input arguments, in the order in which they were made.
    pub inputs: Vec<(Role, Value)>,
    /// What the archive calls the labels, and their sizes, if there are any.
    pub labels: (Arc<str>, Vec<usize>),
    /// The node that makes each value of the draft.
    pub makers: ValueMap<Option<u32>>,
    /// Which values of the draft have gradients that flow to parameters, of so many arguments and nodes.
    pub trained: ValueMap<bool>,
    pub looked: (usize, usize),
    /// The rule of every attention, in order, and of each mask.
    pub rules: Vec<MaskRule>,
    pub masks: BTreeMap<Id, MaskRule>,
    /// The last mask that chose between scores and what is far below, by what it was made of; and the rule of the last one
    /// beside a bias: layers may have one each that are alike.
    pub chosen: Option<((Id, bool, u64), Cells)>,
    pub ruled: Option<(Cells, MaskRule)>,
    /// What was made by an op of operands in a layer.
    pub made: HashMap<(String, Vec<Value>, Option<u32>), Vec<Value>>,
    /// Operands of products of matrices, the second turned: queries and keys of scores.
    pub products: BTreeMap<Value, (View, View)>,
    /// Numbers of pairs of queries and keys that were looked up by their offset: those of all offsets, and of which dims the
    /// pairs are.
    pub offsets: BTreeMap<Value, (View, Vec<Dim>)>,
    pub loss: Option<Value>,
    /// What is added to a loss that is a mean over labels.
    pub added: Option<Value>,
    /// Whether the loss is a sum over labels, of which a step has the count.
    pub counted: bool,
    /// What the archive calls the first cross-entropy.
    pub scored: Option<Id>,
    /// Sums over labels, of which a step divides the total by all labels.
    pub of_labels: BTreeSet<Value>,
    /// What ops of means have made.
    pub means: BTreeSet<Value>,
    pub logits: Option<Value>,
    /// The name of what a program shows: logits of tokens, or an output.
    pub shown: &'static str,
    /// What values that are plain were before they were reshaped.
    pub before: BTreeMap<Value, View>,
    /// Known halves of values whose last dim is twice the same.
    pub halves: BTreeMap<Value, Value>,
    /// Values whose last dim has each element of another one's twice.
    pub pairs: BTreeMap<Value, Value>,
    /// Literals by their numbers.
    pub literals: BTreeMap<Vec<u32>, Value>,
    pub position: Option<Value>,
    pub warnings: Vec<Diag>,
    /// What is asked for in place of rates of dropout.
    pub dropout: Dropout,
    /// Streams of numbers at random, and how many nodes of the name there are.
    pub streams: BTreeMap<String, usize>,
    /// What the archive calls its mask of padding, and that of the trial.
    pub padding: Option<(Arc<str>, Folded)>,
    /// Which numbers folding takes of what follows from that: without padding, or those of the trial.
    pub trial: Option<bool>,
}

impl<'a> Lower<'a> {
    pub fn new(g: &'a Graph, archive: &'a Archive, sizes: Sizes, raise: Raise) -> Lower<'a> {
        Lower {
            g,
            archive,
            sizes,
            raise,
            mesh: Mesh::default(),
            draft: Func::new("model"),
            env: IndexVec::filled(Val::Unmade, g.names.len()),
            makers_of: g.makers(),
            again: BTreeMap::new(),
            plainly: false,
            params: vec![],
            inputs: vec![],
            labels: ("".into(), vec![]),
            makers: ValueMap::default(),
            trained: ValueMap::default(),
            looked: (0, 0),
            rules: vec![],
            masks: BTreeMap::new(),
            chosen: None,
            ruled: None,
            made: HashMap::default(),
            products: BTreeMap::new(),
            offsets: BTreeMap::new(),
            loss: None,
            added: None,
            counted: false,
            scored: None,
            of_labels: BTreeSet::new(),
            means: BTreeSet::new(),
            logits: None,
            shown: "logits",
            before: BTreeMap::new(),
            halves: BTreeMap::new(),
            pairs: BTreeMap::new(),
            literals: BTreeMap::new(),
            position: None,
            warnings: vec![],
            dropout: Dropout::Nothing,
            streams: BTreeMap::new(),
            padding: None,
            trial: None,
        }
    }

    /// Lowers the whole graph.
    ///
    /// # Errors
    /// `import-op`, `import-dims`, `import-input`, `mask-rule`.
    pub fn run(&mut self) -> Result<()> {
        let g = self.g;
        let mut seen = vec![];
        for i in &g.inputs {
            self.input(i, &mut seen)?;
        }
        let last = g.last_uses();
        for (at, n) in g.nodes.iter().enumerate() {
            self.note_uses(n);
            self.draft.scope(&clean(&n.scope));
            self.node(n)?;
            // Known numbers that nothing asks for any more make room for others.
            for id in n.ids().into_iter().filter(|id| last.get(id) == Some(&at)) {
                self.forget(id);
            }
        }
        self.outputs()
    }

    pub(super) fn input(&mut self, i: &Input, seen: &mut Vec<Meaning>) -> Result<()> {
        let name = self.g.names[i.id].clone();
        if i.sizes.len() > MAX_RANK {
            return Err(self.dims(&name, format!("it has more than {MAX_RANK} dims")));
        }
        let val = match &i.source {
            Source::Param(p) => {
                let shape = self.shape(&name, &i.sizes)?;
                let ty = Type::new(DType::F32, &shape);
                if i.elem != Elem::Float {
                    return Err(self.dims(&name, "its elements are not f32, bf16 or f16".into()));
                }
                let (tied, frozen) = (self.tied_with(p), i.frozen);
                let value = match tied {
                    Some(i) => {
                        if self.params[i].frozen != frozen {
                            return Err(self.half_frozen(p, &self.params[i].names[0]));
                        }
                        self.params[i].names.push(p.clone());
                        self.params[i].value
                    }
                    None => {
                        let value = self.arg(ty, Role::new(RoleKind::Param, &**p));
                        let names = vec![p.clone()];
                        let own = Param { names, value, scopes: vec![], part: None, frozen };
                        self.params.push(own);
                        value
                    }
                };
                if self.draft.ty(value).sizes()[..] != shape {
                    return Err(
                        self.dims(&name, "it is tied to a parameter of another shape".into())
                    );
                }
                Val::Data(View::plain(value, &shape))
            }
            Source::Constant(c) => match self.archive.numbers(c)? {
                Some((numbers, stored)) => {
                    let known = Folded::new(Elem::of(stored.dtype), &stored.shape, numbers);
                    let large = || self.dims(&name, "it has more numbers than are kept".into());
                    Val::Folded(known.ok_or_else(large)?)
                }
                None => Val::Missing(Missing {
                    why: format!("the archive has no numbers of `{c}`").into(),
                    help: &["keep buffers on the CPU when parameters are on `meta`"],
                }),
            },
            Source::Input => {
                let shape = self.shape(&name, &i.sizes)?;
                let meaning = inputs::meaning(self.g, i, &shape, self.sizes, seen)?;
                seen.push(meaning);
                match meaning {
                    Meaning::Tokens => Val::Data(View::plain(self.tokens(&name), &shape)),
                    Meaning::Labels => {
                        self.labels = (name.clone(), shape.clone());
                        Val::Labels(Labels::new(shape))
                    }
                    Meaning::Column => {
                        Val::Data(View::plain(self.column(&name, i, &shape), &shape))
                    }
                    Meaning::Padding => self.padding_of(&name, i.elem)?,
                    Meaning::Positions => {
                        let line = Folded::iota(self.sizes.seq);
                        let line = line.and_then(|l| l.expand(&shape)).ok_or_else(|| {
                            self.dims(&name, "positions are [seq] or [rows, seq]".into())
                        })?;
                        Val::Folded(line)
                    }
                }
            }
        };
        self.set(i.id, val);
        Ok(())
    }

    /// The parameter of which this one is another name: both are the same bytes of the archive.
    fn tied_with(&self, name: &str) -> Option<usize> {
        let own = self.archive.weights.get(name)?;
        own.stored.bytes.as_ref()?;
        self.params.iter().position(|p| {
            let first = p.names.first().and_then(|n| self.archive.weights.get(n));
            first.is_some_and(|f| f.member == own.member && f.stored == own.stored)
        })
    }

    pub fn arg(&mut self, ty: Type, role: Role) -> Value {
        let name = Builder::new(&self.mesh, &mut self.draft).named("arg");
        let v = self.draft.arg(ty, name, Some(role));
        self.makers.push(None);
        v
    }

    /// Remembers under which modules parameters are used.
    fn note_uses(&mut self, n: &Node) {
        for (_, a) in &n.args {
            let Arg::Value(id) = a else { continue };
            let Val::Data(v) = &self.env[id] else { continue };
            let Some(p) = self.params.iter_mut().find(|p| p.value == v.value) else { continue };
            if !p.scopes.contains(&n.scope) {
                p.scopes.push(n.scope.clone());
            }
        }
    }

    pub(super) fn node(&mut self, n: &Node) -> Result<()> {
        if checks(n) || self.counts_batches(n) {
            return Ok(());
        }
        let row = table::row(&n.op);
        let first = n.args.first().and_then(|a| match a.1 {
            Arg::Value(id) => Some(self.val(id).clone()),
            _ => None,
        });
        if let Some(first @ (Val::Labels(_) | Val::Head(_))) = &first
            && !self.plainly
            && !matches!(&*n.op, "sym_size.int" | "cross_entropy_loss.default" | "detach.default")
            && let Some(v) = self.labelled(n, first)?
        {
            return self.set_all(n, vec![v]);
        }
        if let Some(m) = self.arithmetic_of_mean(n)? {
            return self.set_all(n, vec![Val::Mean(m)]);
        }
        // Other ops take means as numbers.
        let means = self.numbers_of_means(n)?;
        let made = self.lowered(n, row, first);
        means.into_iter().for_each(|(id, m)| self.set(id, Val::Mean(m)));
        made
    }

    fn lowered(&mut self, n: &Node, row: Option<How>, first: Option<Val>) -> Result<()> {
        let same = matches!(row, Some(How::Same));
        if let Some(v @ (Val::Probs(..) | Val::Masked(..))) = &first
            && let Some(v) = if same { Some(v.clone()) } else { self.regrouped(n, v)? }
        {
            return self.set_all(n, vec![v]);
        }
        if let Some(all) = self.fold_padded(n)?.filter(|_| !self.plainly) {
            return self.set_all(n, all);
        }
        if self.is_known(n) || fold::of_shape(&n.op) {
            let line = self.position_of(n)?;
            if let Some(v) = line {
                return self.set_all(n, vec![Val::Data(v)]);
            }
            if let Some(all) = self.fold(n)? {
                return self.set_all(n, all.into_iter().map(Val::Folded).collect());
            }
        }
        let made = match &row {
            None => return Err(self.unknown(n)),
            Some(How::Same) => self.same(n).map(|v| vec![v]),
            Some(How::Unary(hint, op)) => self.unary(n, hint, op()).map(|v| vec![Val::Data(v)]),
            Some(How::Binary(b)) => self.arithmetic(n, *b).map(|v| vec![v]),
            Some(How::Text(text)) => self.composed(n, text),
            Some(How::Call(f)) => f(self, n),
        }?;
        self.set_all(n, made)
    }

    /// True if no operand is data.
    pub(super) fn is_known(&self, n: &Node) -> bool {
        n.ids().into_iter().all(|id| matches!(self.val(id), Val::Folded(_)))
    }

    pub fn val(&self, id: Id) -> &Val {
        self.env.find(id).unwrap_or(&Val::Unmade)
    }

    pub(super) fn set(&mut self, id: Id, v: Val) {
        if let Some(e) = self.env.get_mut(id.index()) {
            *e = v;
        }
    }

    /// Frees the numbers of a value that no other node takes.
    fn forget(&mut self, id: Id) {
        if matches!(self.val(id), Val::Folded(_) | Val::Padded(_)) {
            self.set(id, Val::Unmade);
        }
    }

    /// What a node made, each of as many elements as a value may have.
    fn set_all(&mut self, n: &Node, all: Vec<Val>) -> Result<()> {
        for (&id, v) in n.outs.iter().zip(all) {
            if let Some(shape) = v.shape() {
                self.allowed(n, shape.to_vec())?;
            }
            self.set(id, v);
        }
        Ok(())
    }

    /// A diagnostic about a node that cannot be imported as it is.
    pub fn refuse(&self, n: &Node, what: &str) -> Diag {
        let name = n.outs.first().and_then(|id| self.g.names.find(*id)).map(|n| &**n);
        let made = name.map_or(String::new(), |name| format!(", which makes `{name}`"));
        let scope = if n.scope.is_empty() { "the model itself" } else { &n.scope };
        Diag::new("import-op", format!("`{}`{made}: {what}", n.op))
            .at(format!("{}: {scope}", self.archive.path().display()))
    }

    /// The same of a node that asks for what cannot be had.
    pub fn lacks(&self, n: &Node, missing: &Missing) -> Diag {
        missing.help.iter().fold(self.refuse(n, &missing.why), |d, help| d.help(*help))
    }
}

/// An op that only says what must hold.
pub(super) fn checks(n: &Node) -> bool {
    n.op.starts_with("_assert") || n.op.contains("sym_constrain") || n.outs.is_empty()
}

/// A module path as scopes have it.
pub(super) fn clean(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    path.chars().map(|c| if plain(c) { c } else { '_' }).collect()
}
