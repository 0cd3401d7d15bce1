//! Modules, functions, nodes and values: a flat SSA list per function, unrolled over layers.

use crate::mesh::Mesh;
use crate::ops::Op;
use crate::types::{AtomList, Type};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A value of a function: index into [`Func::values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Value(pub u32);

/// A scope path: index into [`Func::scopes`]. 0 is the empty path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Scope(pub u32);

/// A place in the model, such as `model.layers.7.mlp.up_proj`, the number of its layer, and its stage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScopeInfo {
    pub path: Arc<str>,
    pub layer: Option<u32>,
    /// The stage of the pipeline that has it; 0 until stages are chosen, and for what belongs to none.
    pub stage: usize,
}

/// Name of a value: `%d_l3.q.1` is a gradient (`d_`), of layer 3, hinted `q`, the second of that name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Name {
    pub grad: bool,
    pub layer: Option<u32>,
    pub hint: Cow<'static, str>,
    pub dup: u32,
}

/// Layers and `.N` of names are below.
const MAX_NUMBER: u32 = 1 << 24;

/// What is known of a value.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueInfo {
    pub ty: Type,
    pub name: Name,
}

/// One op applied to values.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub ins: SmallVec<[Value; 4]>,
    pub outs: SmallVec<[Value; 2]>,
    pub scope: Scope,
    /// Why this line exists; printed after `//`.
    pub note: Option<Cow<'static, str>>,
    pub fused: FusedWithNext,
    pub part: Part,
}

/// Which part of a differentiated program a node belongs to, until stages are cut out of it: then its
/// function says so, and all of them are as by default.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Part {
    #[default]
    Forward,
    /// It makes a gradient of something that is computed from data.
    Backward,
    /// It makes gradients of parameters, or what they or others need on the way.
    Weight,
}

impl Part {
    pub const ALL: [Part; 3] = [Part::Forward, Part::Backward, Part::Weight];

    /// As the text has it, behind a scope.
    pub fn name(self) -> &'static str {
        match self {
            Part::Forward => "forward",
            Part::Backward => "backward",
            Part::Weight => "weight",
        }
    }
}

impl Node {
    /// A node that belongs to forward, and has nothing in common with the next one.
    pub fn new(
        op: impl Into<Op>,
        ins: impl IntoIterator<Item = Value>,
        outs: impl IntoIterator<Item = Value>,
        scope: Scope,
    ) -> Node {
        Node {
            op: op.into(),
            ins: ins.into_iter().collect(),
            outs: outs.into_iter().collect(),
            scope,
            note: None,
            fused: FusedWithNext::No,
            part: Part::Forward,
        }
    }
}

/// What a node has in common with the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FusedWithNext {
    /// Nothing: the next one begins a launch.
    #[default]
    No,
    /// The kernel; `&` in the text.
    Kernel,
    /// The launch, in which the next one begins another kernel; `&&` in the text.
    Launch,
}

/// What an argument or result of a function is to the world outside. A result with a role feeds
/// every later argument with the same role and name.
///
/// All that a role means is here: its name is one thing, and is never taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum RoleKind {
    /// A stored parameter; its name is the parameter's.
    Param,
    /// A parameter as forward and backward use it: fanned out or gathered.
    Ready,
    /// The gradient of a parameter, accumulated over microbatches.
    Grad,
    /// A parameter's gradient that this rank of the pipeline has made for the parameter's owner.
    GradFrom(u32),
    /// What the optimizer keeps of a parameter.
    State(Slot),
    /// Data of a step: `input_ids`, `targets`, `positions`.
    Input,
    /// Saved by forward for backward.
    Stash,
    /// Made in one stage of the pipeline and used in another.
    Edge,
    /// A run-time scalar: `lr`, `step`.
    Scalar,
    /// A sum over microbatches that is a loss, or a part of one: `loss`.
    Sum,
    /// How often a router chose each expert, summed over microbatches; its name is that of the
    /// parameter by which the router chooses. No loss.
    Load,
    /// The cotangent of a sum, of the same name: what one of its terms counts in the loss.
    Scale,
    /// Computed once per step and used by later functions: `inv_tokens`.
    Step,
    /// Shown to the user by the model: `logits`.
    Output,
    /// Shown to the user of a step: `loss`, all in all, and `grad_norm`.
    Metric,
    /// Shown to the user of a step: the mean of a sum over microbatches, of the same name.
    Mean,
    /// Shown to the user of a step: the gradient of a parameter, of all microbatches and ranks.
    GradShown,
}

/// What optimizers keep of every parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// The decaying mean of gradients.
    ExpAvg,
    /// The decaying mean of their squares.
    ExpAvgSq,
}

impl Slot {
    pub const ALL: [Slot; 2] = [Slot::ExpAvg, Slot::ExpAvgSq];

    /// As PyTorch calls it.
    pub fn name(self) -> &'static str {
        match self {
            Slot::ExpAvg => "exp_avg",
            Slot::ExpAvgSq => "exp_avg_sq",
        }
    }
}

impl RoleKind {
    /// All kinds; of those with a number that with 0.
    pub const ALL: [RoleKind; 18] = [
        RoleKind::Param,
        RoleKind::Ready,
        RoleKind::Grad,
        RoleKind::GradFrom(0),
        RoleKind::State(Slot::ExpAvg),
        RoleKind::State(Slot::ExpAvgSq),
        RoleKind::Input,
        RoleKind::Stash,
        RoleKind::Edge,
        RoleKind::Scalar,
        RoleKind::Sum,
        RoleKind::Load,
        RoleKind::Scale,
        RoleKind::Step,
        RoleKind::Output,
        RoleKind::Metric,
        RoleKind::Mean,
        RoleKind::GradShown,
    ];

    /// The kind without what stands in `[…]`.
    pub fn name(self) -> &'static str {
        match self {
            RoleKind::Param => "param",
            RoleKind::Ready => "ready",
            RoleKind::Grad => "grad",
            RoleKind::GradFrom(_) => "grad_from",
            RoleKind::State(_) => "state",
            RoleKind::Input => "input",
            RoleKind::Stash => "stash",
            RoleKind::Edge => "edge",
            RoleKind::Scalar => "scalar",
            RoleKind::Sum => "sum",
            RoleKind::Load => "load",
            RoleKind::Scale => "scale",
            RoleKind::Step => "step",
            RoleKind::Output => "output",
            RoleKind::Metric => "metric",
            RoleKind::Mean => "mean",
            RoleKind::GradShown => "grad_shown",
        }
    }

    /// True for what microbatches add to.
    pub fn is_summed(self) -> bool {
        matches!(self, RoleKind::Sum | RoleKind::Load | RoleKind::Grad)
    }

    /// True for what a step shows to the user.
    pub fn is_shown(self) -> bool {
        matches!(self, RoleKind::Output | RoleKind::Metric | RoleKind::Mean | RoleKind::GradShown)
    }
}

/// The role by which a value of these ports goes from one stage to another: shown to the user, it stays.
pub fn sent(ports: &[Port], v: Value) -> Option<&Role> {
    let roles = ports.iter().filter(|p| p.value == v).filter_map(|p| p.role.as_ref());
    roles.filter(|r| !r.kind.is_shown()).min_by_key(|r| r.kind != RoleKind::Edge)
}

/// As the text has it: `param`, `state[exp_avg]`, `grad_from[1]`.
impl std::fmt::Display for RoleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())?;
        match self {
            RoleKind::GradFrom(rank) => write!(f, "[{rank}]"),
            RoleKind::State(slot) => write!(f, "[{}]", slot.name()),
            _plain => Ok(()),
        }
    }
}

/// A role with the name it is known by.
#[derive(Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Role {
    pub kind: RoleKind,
    pub name: Arc<str>,
}

impl Role {
    pub fn new(kind: RoleKind, name: impl Into<Arc<str>>) -> Role {
        Role { kind, name: name.into() }
    }

    /// True if it is of this kind and has this name.
    pub fn is(&self, kind: RoleKind, name: &str) -> bool {
        self.kind == kind && *self.name == *name
    }
}

/// As the text has it: `state[exp_avg] "w"`.
impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, crate::text::quoted(&self.name))
    }
}

/// An argument or result.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub value: Value,
    pub role: Option<Role>,
}

impl Port {
    /// True if its role is of this kind and has this name.
    pub fn is(&self, kind: RoleKind, name: &str) -> bool {
        self.role.as_ref().is_some_and(|r| r.is(kind, name))
    }
}

/// A sharding somebody asked for: per dim its atoms, and whether propagation may add more.
#[derive(Clone, Debug, PartialEq)]
pub struct Annotation {
    pub dims: SmallVec<[AnnotatedDim; 4]>,
    /// 0 is propagated first.
    pub priority: u8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnnotatedDim {
    pub atoms: AtomList,
    pub open: bool,
}

/// What a function is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum FuncKind {
    /// Nothing in a plan: a model, before it is cut into stages.
    #[default]
    Model,
    /// Once per step and rank of the pipeline, before the microbatches.
    Enter,
    /// Of a stage, for each microbatch: F.
    Forward,
    /// B; the gradient of the stage's input alone (I) if there is a [`FuncKind::Weight`].
    Backward,
    /// W: the gradients of the stage's parameters.
    Weight,
    /// Once per step and rank of the pipeline, after the microbatches: the optimizer.
    Finish,
    /// The loss of an evaluation, after the forwards.
    Evaluate,
}

impl FuncKind {
    /// The kinds of a plan's functions.
    pub const OF_PLAN: [FuncKind; 6] = [
        FuncKind::Enter,
        FuncKind::Forward,
        FuncKind::Backward,
        FuncKind::Weight,
        FuncKind::Finish,
        FuncKind::Evaluate,
    ];

    /// As the text has it, without a number.
    pub fn name(self) -> &'static str {
        match self {
            FuncKind::Model => "model",
            FuncKind::Enter => "enter",
            FuncKind::Forward => "forward",
            FuncKind::Backward => "backward",
            FuncKind::Weight => "weight",
            FuncKind::Finish => "finish",
            FuncKind::Evaluate => "evaluate",
        }
    }

    /// The name of the function of this kind that is number `at` of `count`: `forward`, `forward.3`.
    pub fn numbered(self, at: usize, count: usize) -> String {
        if count == 1 { self.name().into() } else { format!("{}.{at}", self.name()) }
    }

    /// True for what runs once per microbatch.
    pub fn is_looped(self) -> bool {
        matches!(self, FuncKind::Forward | FuncKind::Backward | FuncKind::Weight)
    }

    /// Reads the text after `@`: kind and number. The one place that does.
    fn read(name: &str) -> (FuncKind, usize) {
        let (word, at) = match name.split_once('.') {
            Some((word, n)) => (word, n.parse().ok().filter(|at: &usize| at.to_string() == n)),
            None => (name, Some(0)),
        };
        let kind = FuncKind::OF_PLAN.into_iter().find(|k| k.name() == word);
        kind.zip(at).unwrap_or_default()
    }
}

/// A function: arguments, a flat list of nodes in program order, results.
#[derive(Clone, Debug, Default)]
pub struct Func {
    /// As the text and messages have it. What follows from it is in `kind` and `stage`.
    pub name: String,
    pub kind: FuncKind,
    /// Number of the stage; of what runs once per step, that of the rank of the pipeline.
    pub stage: usize,
    pub args: Vec<Port>,
    pub results: Vec<Port>,
    pub nodes: Vec<Node>,
    pub values: Vec<ValueInfo>,
    pub scopes: Vec<ScopeInfo>,
    pub annotations: BTreeMap<Value, Annotation>,
    /// Per name without its `.N`: the numbers in use.
    taken: HashMap<(bool, Option<u32>, Cow<'static, str>), Taken>,
    scope_ids: HashMap<Arc<str>, Scope>,
}

/// Numbers in use of a name: all below `next`, and those of `others`.
#[derive(Clone, Debug, Default)]
struct Taken {
    next: u32,
    others: Vec<u32>,
}

impl Taken {
    /// The wanted number if it is free, else the first free one.
    fn take(&mut self, wanted: u32) -> u32 {
        let free = |t: &Taken, n: u32| n >= t.next && !t.others.contains(&n);
        if wanted > self.next && free(self, wanted) {
            self.others.push(wanted);
            return wanted;
        }
        let n = self.next;
        self.next += 1;
        while let Some(i) = self.others.iter().position(|&o| o == self.next) {
            self.others.swap_remove(i);
            self.next += 1;
        }
        n
    }
}

/// Functions over one mesh.
#[derive(Clone, Debug, Default)]
pub struct Module {
    pub mesh: Mesh,
    pub funcs: Vec<Func>,
}

impl Module {
    pub fn func(&self, name: &str) -> Option<&Func> {
        self.funcs.iter().find(|f| f.name == name)
    }

    /// The functions of a kind, in their order.
    pub fn of_kind(&self, kind: FuncKind) -> impl Iterator<Item = &Func> {
        self.funcs.iter().filter(move |f| f.kind == kind)
    }
}

impl Name {
    /// Reads the text after `%`.
    pub fn parse(text: &str) -> Name {
        let (grad, mut t) = match text.strip_prefix("d_") {
            Some(t) => (true, t),
            None => (false, text),
        };
        let number =
            |s: &str| s.parse::<u32>().ok().filter(|n| *n < MAX_NUMBER && n.to_string() == s);
        let mut layer = None;
        if let Some((head, rest)) = t.split_once('.')
            && let Some(n) = head.strip_prefix('l').and_then(number)
        {
            (layer, t) = (Some(n), rest);
        }
        let mut dup = 0;
        if let Some((head, n)) = t.rsplit_once('.')
            && let Some(n) = number(n).filter(|&n| n > 0 && !head.is_empty())
        {
            (t, dup) = (head, n);
        }
        Name { grad, layer, hint: Cow::Owned(t.to_string()), dup }
    }

    /// True if its text reads back as this name.
    pub fn is_readable(&self) -> bool {
        let word = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.');
        let numbers = self.layer.unwrap_or(0).max(self.dup) < MAX_NUMBER;
        if !numbers || !self.hint.bytes().all(word) {
            return false;
        }
        // Only a hint with a dot, or that begins like a prefix, can be read in two ways.
        let prefix = self.layer.is_none() && self.hint.starts_with(['d', 'l']);
        if !self.hint.is_empty() && !prefix && !self.hint.contains('.') {
            return true;
        }
        let text = self.to_string();
        text.len() > 1 && Name::parse(&text[1..]) == *self
    }

    /// The name that its text is read as, whatever it is made of: of hint `d_x` the gradient of `x`.
    fn readable(self) -> Name {
        if self.is_readable() {
            return self;
        }
        let word =
            |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '_' };
        let text: String = self.to_string().chars().skip(1).map(word).collect();
        Name::parse(if text.is_empty() { "v" } else { &text })
    }

    pub fn write(&self, out: &mut String) {
        use std::fmt::Write as _;
        out.push('%');
        if self.grad {
            out.push_str("d_");
        }
        if let Some(l) = self.layer {
            let _ = write!(out, "l{l}.");
        }
        out.push_str(&self.hint);
        if self.dup > 0 {
            let _ = write!(out, ".{}", self.dup);
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let mut s = String::new();
        self.write(&mut s);
        f.write_str(&s)
    }
}

impl ScopeInfo {
    fn new(path: &str) -> ScopeInfo {
        let layer = path.split('.').find_map(|p| p.parse().ok());
        ScopeInfo { path: path.into(), layer, stage: 0 }
    }
}

impl Func {
    /// An empty function of this name, and of the kind and stage that a plan's function of this name has.
    pub fn new(name: &str) -> Func {
        let (kind, stage) = FuncKind::read(name);
        let mut f = Func { name: name.into(), kind, stage, ..Func::default() };
        f.scope("");
        f
    }

    /// An empty function of a plan: number `at` of `count` of its kind.
    pub fn of(kind: FuncKind, at: usize, count: usize) -> Func {
        let mut f = Func { name: kind.numbered(at, count), kind, stage: at, ..Func::default() };
        f.scope("");
        f
    }

    /// The same function as another one of a plan: of its scopes, without nodes.
    pub fn like(&self, kind: FuncKind, at: usize, count: usize) -> Func {
        Func {
            name: kind.numbered(at, count),
            kind,
            stage: at,
            scopes: self.scopes.clone(),
            scope_ids: self.scope_ids.clone(),
            ..Func::default()
        }
    }

    pub fn ty(&self, v: Value) -> &Type {
        &self.values[v.0 as usize].ty
    }
    pub fn name(&self, v: Value) -> &Name {
        &self.values[v.0 as usize].name
    }

    /// The scope with this path, made if new.
    pub fn scope(&mut self, path: &str) -> Scope {
        if let Some(&s) = self.scope_ids.get(path) {
            return s;
        }
        let s = Scope(self.scopes.len() as u32);
        let info = ScopeInfo::new(path);
        self.scope_ids.insert(info.path.clone(), s);
        self.scopes.push(info);
        s
    }
    pub fn scope_info(&self, s: Scope) -> &ScopeInfo {
        &self.scopes[s.0 as usize]
    }

    /// The stage of the pipeline that a node belongs to.
    pub fn stage_of(&self, n: &Node) -> usize {
        self.scope_info(n.scope).stage
    }

    /// The number of nodes of forward, behind which those of backward are: all, if there are none.
    pub fn forward_nodes(&self) -> usize {
        self.nodes.partition_point(|n| n.part == Part::Forward)
    }

    /// A new value; if its name is taken, it gets the first free `.N`.
    pub fn value(&mut self, ty: Type, name: Name) -> Value {
        let name = self.free(name);
        self.values.push(ValueInfo { ty, name });
        Value(self.values.len() as u32 - 1)
    }

    /// Gives a value another name; if that is taken, the next `.N` of it.
    pub fn rename(&mut self, v: Value, name: Name) {
        self.values[v.0 as usize].name = self.free(name);
    }

    /// A name that no value has, and whose text reads back as itself: what hints are put together
    /// of may come from any user.
    fn free(&mut self, name: Name) -> Name {
        let mut name = name.readable();
        loop {
            let key = (name.grad, name.layer, name.hint.clone());
            name.dup = self.taken.entry(key).or_default().take(name.dup);
            if name.is_readable() {
                return name;
            }
            name = name.readable();
        }
    }

    /// A new argument.
    pub fn arg(&mut self, ty: Type, name: Name, role: Option<Role>) -> Value {
        let value = self.value(ty, name);
        self.args.push(Port { value, role });
        value
    }

    /// By value: the one whose memory it is; of a view that of its operand.
    pub fn roots(&self) -> Vec<Value> {
        let mut roots: Vec<Value> = (0..self.values.len() as u32).map(Value).collect();
        for n in self.nodes.iter().filter(|n| n.op.def().is_view()) {
            roots[n.outs[0].0 as usize] = roots[n.ins[0].0 as usize];
        }
        roots
    }

    /// The node that makes each value; `None` for arguments.
    pub fn makers(&self) -> Vec<Option<u32>> {
        let mut m = vec![None; self.values.len()];
        for (i, n) in self.nodes.iter().enumerate() {
            for o in &n.outs {
                m[o.0 as usize] = Some(i as u32);
            }
        }
        m
    }

    /// Removes nodes whose results nobody uses; says of each that was there whether it stays.
    pub fn drop_dead(&mut self) -> Vec<bool> {
        let mut live = vec![false; self.values.len()];
        for r in &self.results {
            live[r.value.0 as usize] = true;
        }
        let mut keep = vec![false; self.nodes.len()];
        for (i, n) in self.nodes.iter().enumerate().rev() {
            if n.outs.iter().any(|o| live[o.0 as usize]) {
                keep[i] = true;
                for v in &n.ins {
                    live[v.0 as usize] = true;
                }
            }
        }
        let mut k = keep.iter();
        self.nodes.retain(|_| *k.next().expect("one per node"));
        keep
    }
}
