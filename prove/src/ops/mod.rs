//! What the prover believes of each op, one file per op or family as in `ir/src/ops`: its letters,
//! in which operands it is linear, which of them choose, its meaning as a term and over the field,
//! its derivative, and how a use of it is made small.
//!
//! It is written from what ops are said to compute. Of the declarations of `ir` it reads the names
//! of ops and of their attributes, the sizes that attributes give to letters, and text; a test
//! looks for more. So a declaration that is wrong there has another one here, and the plan that
//! follows is refused. The list of ops is that of `ir`: one without a `Law` does not compile.

mod accumulate;
mod attention;
mod attention_grad;
mod constants;
mod cumsum;
mod each;
mod experts;
mod indexed;
mod layout;
mod optimizers;
mod pairs;
mod parts;
mod products;
mod reduction;
mod reshape;
mod rope;
mod scan;
pub mod states;
mod sums;
mod top_k;
mod typing;
mod unary;

pub use attention::{Attention, Merge, Scores};
pub use attention_grad::AttentionGrad;
pub use constants::{Draw, Literal};
pub use cumsum::Cumsum;
pub use each::{AtLeast, Clamp, Each, Number, Reciprocal};
pub use experts::{
    CombineGatesGrad, Defined, Dispatch, GroupedDot, GroupedDotT, GroupedOuter, Route, Unpermute,
};
pub use indexed::{IndexAdd, Take};
pub(crate) use layout::{Between, Counts};
pub use optimizers::{AdamW, Sgd};
pub use pairs::{Both, Select};
pub use parts::{Concat, Narrow, Pad, Shifted};
pub use reduction::{Max, Min};
pub use reshape::Reshape;
pub use rope::Rope;
pub use scan::{Scan, ScanGrad};
pub use top_k::TopK;
pub(crate) use typing::{Linear, Typing};

use crate::field::functions::{Begins, Field, mix, number, oracle, seed};
use crate::field::tensor::{Tensor, each, times};
use crate::fun::{Cut, Function, Pattern, Places, Real, Signature};
use crate::local::inputs::Operands;
use crate::local::shrink::Small;
use crate::local::{Block, Fault, Held, wrong};
use crate::meaning::{Terms, letters};
use crate::number::{Coef, P, add, inverse, neg};
use crate::product::Letter;
use crate::reverse::{At, Back};
use crate::term::{Node, Store, Term};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{self, Op};
use shardc_ir::rule::{Dims, Letter as Name, Rule};
use shardc_ir::types::{Reduction, Type};
use std::borrow::Cow;
use std::sync::Arc;
use typing::{MOVER, NONLINEAR, SUM};

/// What is believed of an op.
pub(crate) trait Law {
    /// Its letters for operands of these ranks; `None` if it takes no such operands.
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>>;

    /// What types follow from, letter by letter; `None` of an op whose types follow otherwise.
    fn typing(&self) -> Option<Typing>;

    /// Of such an op: which blocks the results are.
    fn held(&self, _: &Mesh, _: &[&Held], _: &[&Type]) -> Result<Vec<Vec<Block>>, Fault> {
        Err(Fault::Unknown("a rule of types for it".into()))
    }

    /// What it does between ranks, if it does something there.
    fn between(&self) -> Option<&dyn Between> {
        None
    }

    /// The dim of an operand or result with so many dims that [`Law::tied`] is told of.
    fn along(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(1)
    }

    /// True if sizes of dims that letters do not tie fit each other: of operands, then of results.
    fn tied(&self, _own: &[usize]) -> bool {
        true
    }

    /// Makes attributes and letters small that depend on sizes of other letters.
    fn shrink(&mut self, _small: &mut Small) {}

    /// True if the dim of [`Law::along`] keeps its size in a plan made smaller, as its elements are counted.
    fn stays(&self) -> bool {
        false
    }

    /// Sizes of a whole plan that letters do not tie.
    ///
    /// # Errors
    /// Says what cannot be made smaller.
    fn multiples(&self, _ins: &[&Type]) -> Result<Vec<Multiple>, String> {
        Ok(vec![])
    }

    /// Draws operands of which the op makes something, where numbers at random are none.
    fn operands(&self, _x: &mut Operands) {}

    /// The function that terms apply for operands of these types; `None` if they take the op apart,
    /// in [`Law::terms`] and [`Law::results`]. All attributes are named there: one that is new must
    /// be understood.
    ///
    /// # Errors
    /// Says what is not understood.
    fn function(&self, _ins: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(None)
    }

    /// Its results as terms.
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let f = self.function(t.types)?.ok_or(NO_FUNCTION)?;
        Ok(t.call(&f, t.ins))
    }

    /// Its results over the field, of a rank's pieces.
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        self.function(e.types)?.ok_or(NO_FUNCTION)?.results(e.x, e.shape, e.at)
    }

    /// True of an op that is constant almost everywhere, or says that it is to be held constant.
    fn is_constant(&self) -> bool {
        false
    }

    /// Cotangents of its operands.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        Err(format!("the textbook has no derivative of `{}`", at.op.mnemonic()))
    }
}

/// A dim, by operand and number, that is so many times another one.
pub(crate) type Multiple = ([usize; 2], usize, [usize; 2]);

const NO_FUNCTION: &str = "an op that is not a function and is not taken apart";

macro_rules! laws {
    ($($module:ident :: $op:ident),* $(,)?) => {
        /// What is believed of an op.
        pub(crate) fn law(op: &Op) -> &dyn Law {
            match op { $(Op::$op(k) => k),* }
        }
        /// The same, for one that is made small.
        pub(crate) fn law_mut(op: &mut Op) -> &mut dyn Law {
            match op { $(Op::$op(k) => k),* }
        }
    };
}
shardc_ir::for_each_op!(laws);

macro_rules! functions {
    ($($(#[doc = $doc:literal])* $name:ident($of:ty)),* $(,)?) => {
        /// A function of tensors. Several results are told apart by a number beside it.
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub enum Fun { $($(#[doc = $doc])* $name($of)),* }
        $(impl From<$of> for Fun { fn from(f: $of) -> Fun { Fun::$name(f) } })*
        impl std::ops::Deref for Fun {
            type Target = dyn Function;
            fn deref(&self) -> &(dyn Function + 'static) { match self { $(Fun::$name(f) => f),* } }
        }
    };
}
functions! {
    Each(Each), Reciprocal(Reciprocal), Clamp(Clamp), Both(Both), Select(Select), AtLeast(AtLeast),
    Number(Number), Literal(Literal), Draw(Draw), Reshape(Reshape), Max(Max), Min(Min),
    Cumsum(Cumsum), Take(Take), IndexAdd(IndexAdd), Narrow(Narrow), Chunk(crate::fun::Chunk), Pad(Pad), Shifted(Shifted),
    Concat(Concat), Rope(Rope), Attention(Attention), AttentionGrad(AttentionGrad), Merge(Merge),
    Scan(Scan), ScanGrad(ScanGrad),
    TopK(TopK), Route(Route), Dispatch(Dispatch), Unpermute(Unpermute), CombineGatesGrad(CombineGatesGrad),
    GroupedDot(GroupedDot), GroupedDotT(GroupedDotT), GroupedOuter(GroupedOuter), Defined(Defined),
    AdamW(AdamW), Sgd(Sgd), Microbatches(crate::fun::Microbatches), Block(crate::fun::Block),
    Join(crate::fun::Join), Piece(crate::fun::Piece), Place(crate::fun::Place),
}

/// Letters of operands and results that all have the same dims.
fn alike(operands: usize, results: usize, ranks: &[usize]) -> Option<Cow<'static, Rule>> {
    let same = ranks.len() == operands && ranks.windows(2).all(|w| w[0] == w[1]);
    same.then(|| Rule::same(operands, results, ranks.first().copied().unwrap_or(0)))
}

/// The rule of an attribute, which says the dims of its operands; there are so many.
fn given<'a>(rule: &'a Rule, operands: usize, ranks: &[usize]) -> Option<Cow<'a, Rule>> {
    let dims = |(d, n): (&Dims, &usize)| d.len() == *n;
    let fits = ranks.len() == operands && rule.ins.len() == operands;
    (fits && rule.ins.iter().zip(ranks).all(dims)).then_some(Cow::Borrowed(rule))
}

/// Letters of operands that a rule spreads, or that are alike; of any number of them but none if it
/// is not said.
fn broadcast<'a>(
    rule: &'a Option<Arc<Rule>>,
    operands: Option<usize>,
    ranks: &[usize],
) -> Option<Cow<'a, Rule>> {
    match rule {
        Some(rule) => given(rule, operands.unwrap_or(ranks.len()), ranks),
        None if ranks.is_empty() => None,
        None => alike(operands.unwrap_or(ranks.len()), 1, ranks),
    }
}

/// Letters that are written here, for operands of these ranks alone.
fn known(text: &str, takes: &[usize], ranks: &[usize]) -> Option<Cow<'static, Rule>> {
    (ranks == takes).then(|| Cow::Owned(Rule::new(text, ranks)))
}

/// The letters of an attribute as a pattern.
fn pattern(rule: &Rule) -> Result<Pattern, String> {
    Pattern::of(rule).ok_or_else(|| "a dim is made of several letters".into())
}

fn coef(x: f64) -> Result<Coef, String> {
    Coef::of(x).ok_or_else(|| format!("{x} is not a number of the reals"))
}

/// Sizes that the attributes of an op give to letters.
pub(crate) fn sizes(op: &Op) -> Vec<(Name, usize)> {
    op.clone().sizes_mut().map_or(vec![], |s| s.0.to_vec())
}
