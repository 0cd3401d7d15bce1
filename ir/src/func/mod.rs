//! Modules, functions, nodes and values: a flat SSA list per function, unrolled over layers.

mod input;
mod kind;
mod name;
mod params;
mod patch;
mod role;
mod state;
mod sums;
mod uses;

pub use input::{Fill, Input, InputRow, Reads, inputs};
pub use kind::FuncKind;
use name::Taken;
pub use name::{Hint, Name};
pub use params::{LayoutStep, ParamLayout};
pub use patch::Patch;
pub use role::{FURTHER, OF_ROUTERS, Port, Role, RoleKind, RoleName, sent, trains_alone};
pub use state::{StateDecl, StateInit, StateName, StateOwner};
pub use sums::GradTotal;
pub use uses::{Use, Uses};

use crate::alike::Alike;
use crate::ids::{Id, IndexVec};
use crate::maps::HashMap;
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::phase::Phase;
use crate::types::{AtomList, Type};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A value of a function: index into [`Func::values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Value(pub u32);

/// A scope path: index into [`Func::scopes`]. 0 is the empty path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Scope(pub u32);

impl Id for Value {
    fn from_index(index: usize) -> Value {
        Value(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

impl Id for Scope {
    fn from_index(index: usize) -> Scope {
        Scope(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of each value of a function.
pub type ValueMap<T> = IndexVec<Value, T>;

/// A place in the model, such as `model.layers.7.mlp.up_proj`, the number of its layer, and its stage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScopeInfo {
    pub path: Arc<str>,
    pub layer: Option<u32>,
    /// The stage of the pipeline that has it; 0 until stages are chosen, and for what belongs to none.
    pub stage: usize,
}

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
    /// A collective that somebody wrote, and that no pass rewrites or joins with another.
    pub kept: bool,
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
    pub fn new(op: impl Into<Op>, ins: &[Value], outs: &[Value], scope: Scope) -> Node {
        Node {
            op: op.into(),
            ins: SmallVec::from_slice(ins),
            outs: SmallVec::from_slice(outs),
            scope,
            note: None,
            fused: FusedWithNext::No,
            part: Part::Forward,
            kept: false,
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
    pub values: ValueMap<ValueInfo>,
    pub scopes: IndexVec<Scope, ScopeInfo>,
    pub annotations: BTreeMap<Value, Annotation>,
    /// What ops made of operands, on one mesh: those of most layers make the same.
    pub(crate) typed: Alike<Typed>,
    /// Per name without its `.N`: the numbers in use.
    taken: HashMap<(bool, Option<u32>, Hint), Taken>,
    scope_ids: HashMap<Arc<str>, Scope>,
}

/// What an op makes of operands of some types.
#[derive(Clone, Debug)]
pub(crate) struct Typed {
    pub op: Op,
    pub ins: SmallVec<[Type; 4]>,
    pub outs: SmallVec<[Type; 2]>,
}

/// Functions over one mesh.
#[derive(Clone, Debug, Default)]
pub struct Module {
    pub mesh: Mesh,
    pub phase: Phase,
    /// What it keeps from step to step beside parameters: each kind of state once for each of its element types.
    pub states: Vec<StateDecl>,
    /// How parameters are stored and made ready, from the phase [`Phase::Ranked`] on, until the step is put
    /// around the microbatches.
    pub params: Vec<ParamLayout>,
    pub funcs: Vec<Func>,
}

impl Module {
    pub fn func(&self, name: &str) -> Option<&Func> {
        self.funcs.iter().find(|f| f.name == name)
    }

    /// The declaration of a state: of several, which differ in the element type alone, the first.
    pub fn state(&self, name: StateName) -> Option<&StateDecl> {
        self.states.iter().find(|s| s.name == name)
    }

    /// The functions of a kind, in their order.
    pub fn of_kind(&self, kind: FuncKind) -> impl Iterator<Item = &Func> {
        self.funcs.iter().filter(move |f| f.kind == kind)
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
        &self.values[v].ty
    }
    pub fn name(&self, v: Value) -> &Name {
        &self.values[v].name
    }

    /// The scope with this path, made if new.
    pub fn scope(&mut self, path: &str) -> Scope {
        if let Some(&s) = self.scope_ids.get(path) {
            return s;
        }
        let info = ScopeInfo::new(path);
        let path = info.path.clone();
        let s = self.scopes.push(info);
        self.scope_ids.insert(path, s);
        s
    }
    pub fn scope_info(&self, s: Scope) -> &ScopeInfo {
        &self.scopes[s]
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
        self.values.push(ValueInfo { ty, name })
    }

    /// Gives a value another name; if that is taken, the next `.N` of it.
    pub fn rename(&mut self, v: Value, name: Name) {
        self.values[v].name = self.free(name);
    }

    /// Makes room for so many more nodes, of one result each.
    pub fn reserve(&mut self, nodes: usize) {
        self.nodes.reserve(nodes);
        self.values.reserve(nodes);
        self.taken.reserve(nodes);
    }

    /// A name that no value has, and whose text reads back as itself: what hints are put together
    /// of may come from any user.
    fn free(&mut self, name: Name) -> Name {
        let mut name = name.readable();
        loop {
            let key = (name.grad, name.layer, name.hint);
            name.dup = self.taken.entry(key).or_default().take(name.dup);
            if name.is_readable() {
                return name;
            }
            name = name.readable();
        }
    }

    /// An entry for each value, all of them this one.
    pub fn per_value<T: Clone>(&self, entry: T) -> ValueMap<T> {
        IndexVec::filled(entry, self.values.len())
    }

    /// For each value itself.
    pub fn identity(&self) -> ValueMap<Value> {
        self.values.ids().collect()
    }

    /// A new argument.
    pub fn arg(&mut self, ty: Type, name: Name, role: Option<Role>) -> Value {
        let value = self.value(ty, name);
        self.args.push(Port { value, role });
        value
    }

    /// Forgets of which types ops make what: on another mesh they make others.
    pub fn forget_types(&mut self) {
        self.typed = Alike::default();
    }

    /// Removes nodes whose results nobody uses; says of each that was there whether it stays.
    pub fn drop_dead(&mut self) -> Vec<bool> {
        let mut live = self.per_value(false);
        for r in &self.results {
            live[r.value] = true;
        }
        let mut keep = vec![false; self.nodes.len()];
        for (i, n) in self.nodes.iter().enumerate().rev() {
            if n.outs.iter().any(|o| live[o]) {
                keep[i] = true;
                for v in &n.ins {
                    live[v] = true;
                }
            }
        }
        let mut k = keep.iter();
        self.nodes.retain(|_| *k.next().expect("one per node"));
        keep
    }
}
