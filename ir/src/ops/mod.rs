//! The ops. One file per op says everything about it: name, operands, attributes, letter rule,
//! gradient, reference evaluation, what passes ask of it, samples. The table below is the only list of
//! them.

mod facts;

pub use facts::{Facts, FusionClass, Gradient, Kind, Mixing, Wants};
pub use kept::AttentionDropout;
pub use layout::{LayoutChange, Sends};
pub use mask::Mask;

use crate::attr::{AttrCx, AttrError, AttrReader, AttrWriter};
use crate::builder::Builder;
use crate::func::{StateName, Value};
use crate::infer::{self, Linear, Query, TypeError};
use crate::kernel::{Binary, Body, Results, Scalar, Unary};
use crate::mesh::{AtomSet, Mesh};
use crate::rule::{Letter, Rule};
use crate::tensor::{Shape, Tensor};
use crate::types::{AtomList, DType, Dim, Extent, Reduction, Type};
use FusionClass::Each;
use facts::{folded, folds};
use smallvec::SmallVec;
use std::borrow::Cow;

/// Gradients of an op's operands; `None` where there is none.
pub type Grads = SmallVec<[Option<Value>; 4]>;

/// Declares an op: its doc, name, operands and attributes, its [`Facts`], and uses of it that tests try.
/// Printing and parsing are derived. Facts that depend on attributes name the op, and what several of them need:
/// `facts |o| let long = o.count > 9; { … }`.
macro_rules! op {
    ($(#[doc = $doc:literal])* $op:ident = $name:literal ($($operand:ident),*) {$($field:ident : $ty:ty),*}
     facts $(|$this:ident| $(let $known:ident = $value:expr;)?)? { kind: $kind:ident, fusion: $fusion:expr, precision: $precision:expr, gradient: $gradient:ident, linear: $linear:expr }
     samples [$($sample:literal),* $(,)?] $(positive [$($positive:literal),*])?) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $op { $(pub $field: $ty),* }
        impl $crate::ops::Declaration for $op {
            fn written_rule(&self, _ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                let all: [Option<Cow<'_, Rule>>; _] = [$($crate::attr::Attr::rule(&self.$field, _ranks)),*];
                all.into_iter().flatten().next()
            }
            fn sizes(&self) -> &[(Letter, usize)] {
                let all: [Option<&$crate::attr::Sizes>; _] = [$($crate::attr::Attr::sizes(&self.$field)),*];
                all.into_iter().flatten().next().map_or(&[], |s| &s.0)
            }
            fn linear(&self) -> Linear {
                $linear
            }
        }
        impl $crate::ops::OpText for $op {
            const NAME: &'static str = $name;
            const OPERANDS: &'static [&'static str] = &[$(stringify!($operand)),*];
            const SAMPLES: &'static [&'static str] = &[$($sample),*];
            const POSITIVE: &'static [&'static str] = &[$($($positive),*)?];
            const DOC: &'static str = concat!($($doc, "\n"),*);
            fn facts(&self) -> $crate::ops::Facts {
                $(let $this = self; $(let $known = $value;)?)?
                Facts { kind: Kind::$kind, fusion: $fusion, precision: $precision, gradient: Gradient::$gradient }
            }
            fn broadcast(&mut self) -> Option<&mut $crate::attr::Broadcast> {
                let all: [Option<&mut $crate::attr::Broadcast>; _] = [$($crate::attr::Attr::broadcast(&mut self.$field)),*];
                all.into_iter().flatten().next()
            }
            fn sizes_mut(&mut self) -> Option<&mut $crate::attr::Sizes> {
                let all: [Option<&mut $crate::attr::Sizes>; _] = [$($crate::attr::Attr::sizes_mut(&mut self.$field)),*];
                all.into_iter().flatten().next()
            }
            fn write_attrs(&self, _w: &mut $crate::attr::AttrWriter) { $(_w.attr(stringify!($field), &self.$field);)* }
            fn read_attrs(_r: &mut $crate::attr::AttrReader) -> Result<Self, $crate::attr::AttrError> {
                Ok($op { $($field: _r.attr(stringify!($field))?),* })
            }
        }
    };
}

/// The derived text of an op.
pub trait OpText: Sized {
    const NAME: &'static str;
    const OPERANDS: &'static [&'static str];
    const SAMPLES: &'static [&'static str];
    /// Operands that samples must draw positive.
    const POSITIVE: &'static [&'static str];
    const DOC: &'static str;
    fn facts(&self) -> Facts;
    /// The attribute that says how smaller operands are spread, if there is one.
    fn broadcast(&mut self) -> Option<&mut crate::attr::Broadcast>;
    /// The attribute that gives letters their sizes, if there is one.
    fn sizes_mut(&mut self) -> Option<&mut crate::attr::Sizes>;
    fn write_attrs(&self, w: &mut AttrWriter);
    fn read_attrs(r: &mut AttrReader) -> Result<Self, AttrError>;
}

/// What the declaration of an op says to whoever has any op.
pub trait Declaration {
    /// The rule among the attributes, if there is one, for operands of these ranks.
    fn written_rule(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>>;
    /// Sizes of letters that no operand fixes: those among the attributes.
    fn sizes(&self) -> &[(Letter, usize)];
    /// In which operands the op is linear.
    fn linear(&self) -> Linear;
}

/// Where an op runs: the mesh, the rank's coordinates, and the operand and result types.
pub struct EvalCx<'a> {
    pub mesh: &'a Mesh,
    pub coords: &'a [usize],
    pub ins: &'a [&'a Type],
    pub outs: &'a [&'a Type],
}

impl EvalCx<'_> {
    /// The true shape of this rank's piece of a result.
    pub fn out_shape(&self, o: usize) -> Shape {
        self.outs[o].lens(self.mesh, self.coords)
    }
    pub fn in_extent(&self, i: usize, dim: usize) -> Extent {
        self.ins[i].extent(self.mesh, dim, self.coords)
    }
    pub fn out_extent(&self, o: usize, dim: usize) -> Extent {
        self.outs[o].extent(self.mesh, dim, self.coords)
    }
}

/// What an op means. Every op has a rule (collectives: only for their shape), a gradient and an
/// evaluation; the rest has defaults.
pub trait OpDef: Declaration {
    /// The letter rule for operands of these ranks. Never panics for operands that
    /// [`OpDef::accepts`] allows.
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        self.written_rule(ranks).expect("an op has a rule among its attributes or makes one")
    }
    /// How indices of a dim are shifted, if that is all that the op does, with 0 where there is none. Ranks that
    /// split the dim exchange what crosses from piece to piece; one that has it whole runs the op.
    fn halo(&self) -> Option<crate::boxes::Halo> {
        None
    }
    /// How letters missing on the right are reduced.
    fn reduction(&self) -> Reduction {
        Reduction::Sum
    }
    /// Element types of the results; by default that of the first operand.
    fn dtypes(&self, ins: &[&Type], outs: usize) -> SmallVec<[DType; 2]> {
        let d = ins.first().map_or(DType::F32, |t| t.dtype);
        std::iter::repeat_n(d, outs).collect()
    }
    /// Says what is wrong with operand count, ranks or element types, before the rule is asked.
    fn accepts(&self, _ins: &[&Type]) -> Result<(), String> {
        Ok(())
    }
    /// Result types; by default from the rule.
    fn types(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let ranks: SmallVec<[usize; 4]> = ins.iter().map(|t| t.rank()).collect();
        let rule = self.rule(&ranks);
        let dtypes = self.dtypes(ins, rule.outs.len());
        infer::infer(&Query {
            mesh,
            rule: &rule,
            ins,
            sizes: self.sizes(),
            declared,
            dtypes: &dtypes,
            linear: self.linear(),
            reduction: self.reduction(),
        })
    }
    /// Appends the gradient computation; `outs` are the op's results, `d` their cotangents.
    /// Operands for which `b.wants(v)` is false need none.
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads;
    /// Float operands that get no gradient, by bit: nothing that is trained may come in by them.
    fn untrained(&self) -> u32 {
        0
    }
    /// Evaluates the op on one rank's pieces: slow, obvious, the definition of the op.
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor>;
    /// Appends to a row's program what the op does to elements `x` of its operands: every op of
    /// [`FusionClass::Each`], and of [`FusionClass::Fold`] what is folded.
    fn element(&self, _b: &mut Body, _x: &[usize]) -> Option<Results> {
        None
    }
    /// Set for ops of [`Kind::Layout`], by their table.
    fn layout(&self) -> Option<&dyn LayoutChange> {
        None
    }
    /// Floating-point operations for loops of these sizes (letter, iterations).
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        loops.iter().map(|l| l.1).product()
    }
    /// The result is the operand's memory, seen differently.
    fn is_view(&self) -> bool {
        false
    }
    /// The operand over which a result may be written, if they have the same size and nobody reads
    /// the operand later. Element-wise ops read an element before they write it.
    fn in_place(&self, _result: usize) -> Option<usize> {
        None
    }
    /// What an optimizer keeps of a parameter from step to step, in f32 and 0 at first: operands and results of the
    /// parameter's shape, in this order behind the gradient and the new parameter.
    fn states(&self) -> &'static [StateName] {
        &[]
    }
    /// Makes random operands of a sample fit each other, where some follow from others.
    fn settle(&self, _types: &[Type], _drawn: &mut [Tensor]) {}
    /// Scratch memory of one rank, in bytes, beyond operands and results.
    fn workspace(&self, _mesh: &Mesh, _ins: &[&Type], _outs: &[&Type]) -> usize {
        0
    }
}

pub mod accumulate;
pub mod adamw;
pub mod add;
pub mod at_least;
pub mod attention;
pub mod attention_grad;
pub mod cast;
pub mod combine_gates_grad;
pub mod concat;
pub mod cumsum;
pub mod dispatch;
pub mod div;
pub mod dot;
pub mod draw;
pub mod expand;
pub mod fill;
pub mod grouped_dot;
pub mod index_add;
mod kept;
pub mod layout;
pub mod literal;
mod mask;
pub mod merge_attention;
pub mod mul;
pub mod narrow;
pub mod pad;
pub mod pairs;
pub mod reduction;
pub mod reshape;
pub mod rope;
pub mod route;
pub mod scan;
pub mod scan_grad;
pub mod select;
pub mod sgd;
pub mod stop_gradient;
pub mod sub;
pub mod take;
pub mod top_k;
pub mod transpose;
pub mod unary;
pub mod unpermute;

macro_rules! ops {
    ($($module:ident :: $op:ident),* $(,)?) => {
        $(pub use $module::$op;)*
        /// Any op.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op { $($op($module::$op)),* }
        $(impl From<$module::$op> for Op { fn from(o: $module::$op) -> Op { Op::$op(o) } })*
        impl Op {
            /// Meaning of the op.
            pub fn def(&self) -> &dyn OpDef { match self { $(Op::$op(o) => o),* } }
            /// Name in the text.
            pub fn mnemonic(&self) -> &'static str { match self { $(Op::$op(_) => $module::$op::NAME),* } }
            /// Names of the operands, for messages.
            pub fn operands(&self) -> &'static [&'static str] { match self { $(Op::$op(_) => $module::$op::OPERANDS),* } }
            /// What passes ask of the op.
            pub fn facts(&self) -> Facts { match self { $(Op::$op(o) => o.facts()),* } }
            /// How the op spreads smaller operands, if it is one that does.
            pub fn broadcast(&mut self) -> Option<&mut crate::attr::Broadcast> { match self { $(Op::$op(o) => o.broadcast()),* } }
            /// The sizes of letters that no operand fixes, if the op has such an attribute.
            pub fn sizes_mut(&mut self) -> Option<&mut crate::attr::Sizes> { match self { $(Op::$op(o) => o.sizes_mut()),* } }
            /// Operands that must be positive.
            pub fn positive(&self) -> &'static [&'static str] { match self { $(Op::$op(_) => $module::$op::POSITIVE),* } }
            /// Writes name and attributes.
            pub fn write(&self, mesh: &Mesh, out: &mut String) {
                out.push_str(self.mnemonic());
                let mut w = AttrWriter { mesh, out, count: 0 };
                match self { $(Op::$op(o) => o.write_attrs(&mut w)),* }
                if w.count > 0 { out.push(']'); }
            }
            /// Reads the attributes of the op called `name`; `attrs` is the text between brackets.
            pub fn read(name: &str, attrs: Option<&str>, cx: AttrCx) -> Result<Op, AttrError> {
                let mut r = AttrReader { cx, rest: attrs, first: true };
                let op = match name {
                    $($module::$op::NAME => Op::$op(OpText::read_attrs(&mut r)?),)*
                    _ => return Err(format!("no op is called `{name}`; the ops are {}", NAMES.join(", ")).into()),
                };
                if r.rest.is_some_and(|t| !t.trim().is_empty()) {
                    return Err(format!("`{name}` has no attribute `{}`", r.rest.unwrap_or("").trim()).into());
                }
                Ok(op)
            }
        }
        /// All op names, in table order.
        pub const NAMES: &[&str] = &[$($module::$op::NAME),*];
        /// All samples: `name[attrs] operand types`.
        pub const SAMPLES: &[(&str, &[&str])] = &[$(($module::$op::NAME, $module::$op::SAMPLES)),*];
        /// What each op does, one paragraph each.
        pub const DOCS: &[(&str, &str)] = &[$(($module::$op::NAME, $module::$op::DOC)),*];
    };
}

/// Hands all ops, as `module::Op`, to the macro of this name: what must be said of each is asked for so.
#[macro_export]
macro_rules! for_each_op { ($then:ident) => { $then! {
    add::Add, accumulate::Accumulate, sub::Sub, mul::Mul, div::Div, unary::Scale, unary::Shift,
    unary::Exp, unary::Log, unary::Sqrt, unary::Rsqrt, unary::Tanh, unary::Logistic, unary::Silu,
    unary::Gelu, unary::Sin, unary::Cos, unary::Abs, unary::Sign, unary::Clamp,
    unary::Erf, unary::Pow, unary::Softplus, unary::Log1p, unary::Round, pairs::Max, pairs::Min, pairs::Less, pairs::Equal,
    select::Select,
    at_least::AtLeast, cast::Cast, stop_gradient::StopGradient, literal::Literal, fill::Fill, draw::Draw,
    reshape::Reshape, transpose::Transpose, expand::Expand,
    reduction::ReduceSum, reduction::ReduceMax, reduction::ReduceMin, cumsum::Cumsum, dot::Dot, take::Take, index_add::IndexAdd,
    concat::Concat, narrow::Narrow, pad::Pad,
    rope::Rope, attention::Attention, attention_grad::AttentionGrad, merge_attention::MergeAttention,
    scan::Scan, scan_grad::ScanGrad,
    top_k::TopK, route::Route, dispatch::Dispatch, unpermute::Unpermute, combine_gates_grad::CombineGatesGrad,
    grouped_dot::GroupedDot, grouped_dot::GroupedDotT, grouped_dot::GroupedOuter,
    adamw::AdamW, sgd::Sgd,
    layout::FanOut, layout::AllReduce, layout::AllGather, layout::ReduceScatter,
    layout::Broadcast, layout::Reduce, layout::Slice, layout::PadToPartial, layout::AllToAll,
    layout::Exchange, layout::AllToAllV, layout::Permute, layout::ToPartial, layout::ToVarying, layout::FromVarying,
    layout::RingShard,
} } }
for_each_op!(ops);

impl Op {
    /// Result types after all checks: operand count, ranks, element types, rule.
    pub fn check(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        self.def()
            .accepts(ins)
            .or_else(|m| infer::err("operands", m, "give the op the operands its doc names"))?;
        let outs = self.def().types(mesh, ins, declared)?;
        match outs.iter().find_map(|t| t.clash()) {
            None => Ok(outs),
            Some(a) => infer::err(
                "mixed",
                format!("the result has two states over {}", mesh.names(AtomSet::one(a), "*")),
                "give it one",
            ),
        }
    }

    /// The collective behind this op, if ranks exchange data in it.
    pub fn collective(&self) -> Option<&dyn LayoutChange> {
        self.layout().filter(|c| c.sends() != Sends::Nothing)
    }

    /// What the table of ops of ranks says of this one, if it is in there.
    pub fn layout(&self) -> Option<&dyn LayoutChange> {
        self.def().layout()
    }

    /// True if the result is the pieces of more ranks: what is saved for backward is the operand.
    pub fn gathers(&self) -> bool {
        self.layout().is_some_and(|c| c.sends() == Sends::ShareOfResult)
    }
}

/// `n` operands, all float.
pub(crate) fn floats(ins: &[&Type], n: usize) -> Result<(), String> {
    if ins.len() != n {
        let needed = if n == 1 { "1 operand is".into() } else { format!("{n} operands are") };
        return Err(format!("{needed} needed, not {}", ins.len()));
    }
    match ins.iter().find(|t| !t.dtype.is_float()) {
        Some(t) => Err(format!("a float is needed, not {}", t.dtype.name())),
        None => Ok(()),
    }
}

/// Gradients of an op with one operand and one result.
pub(crate) fn grads_of(d: &[Option<Value>], f: impl FnOnce(Value) -> Value) -> Grads {
    smallvec::smallvec![d[0].map(f)]
}
