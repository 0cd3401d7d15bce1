//! A program as readers of archives hand it over: nodes in the order in which they run, each with the
//! name of what it does, its operands and attributes by name, and the module that it stands in.
//!
//! The names are those of PyTorch's core operators ("add.Tensor", "linear.default"), of which a
//! reader of another format uses what it needs.

use crate::stored::StoredType;
use shardc_ir::ids::{self, IndexVec};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A value of the program: an index into [`Graph::names`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Id(pub u32);

impl ids::Id for Id {
    fn from_index(index: usize) -> Id {
        Id(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Element types as folding tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Elem {
    /// Rounded to f32 after every op, which is what f32 and narrower ones become.
    Float,
    /// f64 stays as it is.
    Double,
    Int,
    Bool,
}

impl Elem {
    pub fn of(stored: &StoredType) -> Elem {
        match stored.name {
            "F64" => Elem::Double,
            "BOOL" => Elem::Bool,
            _ if stored.is_float() => Elem::Float,
            _ => Elem::Int,
        }
    }
}

/// The size of a dim of an input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Size {
    Fixed(usize),
    /// Chosen when the program is imported, by name.
    Symbol(Arc<str>),
    /// What is not a symbol alone, as it begins.
    Other(Arc<str>),
}

/// An operand or attribute.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Arg {
    None,
    Value(Id),
    /// Tensors or sizes; `None` stands for one that is left out.
    Values(Vec<Option<Id>>),
    Int(i64),
    /// Some of them are values of sizes.
    Ints(Vec<IntArg>),
    Float(f64),
    Floats(Vec<f64>),
    Bool(bool),
    Text(Arc<str>),
    Elem(Elem),
    /// What no handler asks for, by its kind.
    Other(Arc<str>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IntArg {
    Is(i64),
    Of(Id),
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Node {
    pub op: Arc<str>,
    pub args: Vec<(Arc<str>, Arg)>,
    pub outs: Vec<Id>,
    /// Path of the module, such as `model.layers.0.mlp`.
    pub scope: Arc<str>,
}

impl Node {
    /// An operand or attribute; absent ones are [`Arg::None`].
    pub fn arg(&self, name: &str) -> &Arg {
        self.args.iter().find(|a| &*a.0 == name).map_or(&Arg::None, |a| &a.1)
    }

    /// All values that it takes.
    pub fn ids(&self) -> Vec<Id> {
        let of = |i: &IntArg| if let IntArg::Of(id) = i { Some(*id) } else { None };
        let each = self.args.iter().flat_map(|(_, a)| match a {
            Arg::Value(id) => vec![*id],
            Arg::Values(all) => all.iter().flatten().copied().collect(),
            Arg::Ints(all) => all.iter().filter_map(of).collect(),
            _ => vec![],
        });
        each.collect()
    }
}

/// What an argument of the program is.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Source {
    /// A parameter of this name.
    Param(Arc<str>),
    /// Numbers that the archive has under this name.
    Constant(Arc<str>),
    /// An input of this name.
    Input,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Input {
    pub id: Id,
    pub source: Source,
    pub elem: Elem,
    pub sizes: Vec<Size>,
    /// A parameter that is not trained.
    pub frozen: bool,
}

/// Numbers in the archive.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct StoredNumbers {
    /// The bytes of the file, little-endian and row-major; none if the archive was made without.
    pub bytes: Option<Range<u64>>,
    pub dtype: &'static StoredType,
    pub shape: Vec<usize>,
}

/// A whole program.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Graph {
    /// What the archive calls each value, for messages.
    pub names: IndexVec<Id, Arc<str>>,
    pub inputs: Vec<Input>,
    pub nodes: Vec<Node>,
    pub outputs: Vec<Id>,
    /// Values of truth: torch adds them as or.
    pub truths: HashSet<Id>,
    /// What a write without gradients made of a value that may have one: numbers of the one, and the gradient of
    /// the other.
    pub halved: HashSet<Id>,
    /// Smallest and largest value of a symbol.
    pub ranges: Vec<(Arc<str>, usize, usize)>,
}

impl Graph {
    /// Of each value the node that makes it.
    pub fn makers(&self) -> BTreeMap<Id, usize> {
        let nodes = self.nodes.iter().enumerate();
        nodes.flat_map(|(at, n)| n.outs.iter().map(move |&id| (id, at))).collect()
    }

    /// Of each value the last node that takes it.
    pub fn last_uses(&self) -> HashMap<Id, usize> {
        let nodes = self.nodes.iter().enumerate();
        nodes.flat_map(|(at, n)| n.ids().into_iter().map(move |id| (id, at))).collect()
    }
}
