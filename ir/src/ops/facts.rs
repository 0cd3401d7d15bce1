//! What passes ask of an op beside its mathematics. There are no defaults: a new op answers all of it.

use super::{Op, Route};
use crate::attr::Broadcast;
use crate::rule::{Dims, Rule};

/// What an op says of itself, in the item `facts` of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    pub kind: Kind,
    /// What it does to the rows of a kernel over rows; `None` if it is a kernel of its own.
    pub fusion: Option<FusionClass>,
    pub precision: Wants,
    pub gradient: Gradient,
}

/// What sort of work an op is. Where an op is many times dearer than reading its operands, what is moved
/// and what is made again depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Numbers that the program has: there are no operands.
    Constant,
    /// Elements of the result from elements of the operands.
    Elementwise,
    /// The same, of the group `activations` of `--recompute`.
    Activation,
    /// The same numbers in another element type.
    Conversion,
    /// A fold over letters.
    Reduction,
    /// Dims in another order, joined, cut or repeated.
    Movement,
    /// A sum of products over letters.
    Product,
    /// Rows of a table that indices name.
    Lookup,
    /// Sums at places that indices name.
    Scatter,
    Attention,
    /// A state that is walked along tokens.
    Recurrence,
    /// Which of several, as the experts of a token.
    Choice,
    /// Copies of tokens in the buffers of experts: their places, there and back.
    Copies,
    /// Products of the rows of experts.
    GroupedProduct,
    /// A step of an optimizer.
    Update,
    /// Of ranks: what each holds of a value changes, not the value ([`super::LayoutChange`]).
    Layout,
}

impl Facts {
    /// True for a product whose operands both bring letters of their own to the result.
    pub fn is_matrix_product(&self) -> bool {
        self.kind == Kind::Product && self.fusion.is_none()
    }
}

impl Kind {
    /// True for what belongs to a mixture of experts.
    pub fn of_experts(self) -> bool {
        matches!(self, Kind::Choice | Kind::Copies | Kind::GroupedProduct)
    }
    /// True for what takes a weight whole: a product, or rows of a table.
    pub fn takes_weights(self) -> bool {
        matches!(self, Kind::Product | Kind::GroupedProduct | Kind::Lookup)
    }
}

/// What a node does to the rows of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FusionClass {
    /// Every element of the results from elements of the operands.
    Each,
    /// A fold over the letters missing on the right.
    Fold,
    /// The element of a row that an index names.
    Take,
    /// An element at the place of a row that an index names, among zeros.
    IndexAdd,
}

/// What an op wants of its float operands where parameters are bf16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wants {
    /// bf16.
    Half,
    /// Rows that are bf16, and gates, the last operand of floats, that are f32.
    Gated,
    /// The first operand bf16, the others as they are.
    HalfFirst,
    /// f32: digits would be lost, near a pole or in a long sum.
    Wide,
    /// f32, and what the operand is made of decides a choice.
    Decides,
    /// One type for all of them: f32 if one is f32.
    Same,
    /// The same, but bf16 if the result is only moved on its way to products.
    Moved,
    /// Nothing: its operands' types are its own matter.
    AsTheyAre,
}

/// Whether a cotangent of the results becomes one of float operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gradient {
    Flows,
    /// It is 0 wherever it exists, or is left out by definition: nothing behind the op is trained
    /// through it.
    Stops,
    /// Nobody asks: it has no float operand, or stands only in programs that are differentiated already.
    Unasked,
}

/// What an op does in a mixture of experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Mixing<'a> {
    /// Gives each copy of a token its row in a buffer.
    Route(&'a Route),
    /// Copies tokens to their rows.
    Dispatch,
    /// Multiplies rows by the weights of their experts.
    Product,
    /// Sums the rows of a token.
    Unpermute,
}

impl Op {
    /// What it does in a mixture of experts, in forward.
    pub fn mixing(&self) -> Option<Mixing<'_>> {
        match self {
            Op::Route(route) => Some(Mixing::Route(route)),
            Op::Dispatch(_) => Some(Mixing::Dispatch),
            Op::GroupedDot(_) | Op::GroupedDotT(_) => Some(Mixing::Product),
            Op::Unpermute(_) => Some(Mixing::Unpermute),
            _elsewhere => None,
        }
    }
    /// Its `route`, if it is one.
    pub fn as_route(&self) -> Option<&Route> {
        match self.mixing() {
            Some(Mixing::Route(route)) => Some(route),
            _other => None,
        }
    }
    /// True for a product whose operands both bring letters of their own to the result.
    pub fn is_matrix_product(&self) -> bool {
        self.facts().is_matrix_product()
    }
    /// True for a sum that is written over its first operand.
    pub fn accumulates(&self) -> bool {
        matches!(self, Op::Accumulate(_))
    }
    /// True for a sum, in place or not.
    pub fn is_sum(&self) -> bool {
        self.accumulates() || matches!(self, Op::Add(_))
    }
    /// True for a sum of operands of the same dims.
    pub fn is_plain_sum(&self) -> bool {
        matches!(self, Op::Add(add) if add.rule == Broadcast::SAME)
    }
    /// True for what adds rows to each other by index, as the gradient of looking them up does.
    pub fn adds_to_rows(&self) -> bool {
        matches!(self, Op::IndexAdd(put) if put.adds())
    }
    /// True for products, attention and recurrences, beside which all other work of a rank is small.
    pub fn is_heavy(&self) -> bool {
        self.is_matrix_product()
            || matches!(
                self.facts().kind,
                Kind::GroupedProduct | Kind::Attention | Kind::Recurrence
            )
    }
}

/// The class of a fold; over no letter it is element-wise.
pub(super) fn folded(rule: &Rule) -> FusionClass {
    let kept = rule.ins.iter().flatten().all(|g| rule.outs[0].contains(g));
    if kept { FusionClass::Each } else { FusionClass::Fold }
}

/// True if a product is not a matrix product: one operand brings no letter of its own to the result.
pub(super) fn folds(rule: &Rule) -> bool {
    let letters = |d: &Dims| {
        let mut all = 0u64;
        for g in d {
            g.letters().iter().for_each(|l| all |= 1 << l.0);
        }
        all
    };
    let (a, b, kept) = (letters(&rule.ins[0]), letters(&rule.ins[1]), letters(&rule.outs[0]));
    let own = |x: u64, y: u64| x & kept & !y != 0;
    !(own(a, b) && own(b, a))
}
