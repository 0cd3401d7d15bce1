//! Rules as lines: an op with its operands, and what is equal to it, both typed as Rust types them.
//!
//! `(Scale { by: a } (Scale { by: b } x)) => (Scale { by: times(a, b)? } x)`: an op stands before its
//! operands, `x` is any value. On the left attributes are patterns, on the right expressions; where one has
//! no value (`?`) the line does not hold.

use super::graph::{EGraph, Term};
use shardc_ir::attr::{Broadcast, RuleAttr, Sizes};
use shardc_ir::func::{Func, Uses};
use shardc_ir::maps::HashSet;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::rule::Letter;
use std::mem::{Discriminant, discriminant};
use std::ops::Range;

/// A value that rules know: a class of the e-graph, or an operand of an example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id(pub u32);

/// What a side of a rule stands for.
#[derive(Clone, Debug)]
pub enum Expr {
    Value(Id),
    Op(Op, Vec<Expr>),
}

/// Takes what a term is equal to.
pub(crate) type Taker<'a> = &'a mut dyn FnMut(Expr);

/// One rule, with examples of operands on which it holds: tests run both sides on them.
#[derive(Clone, Copy)]
pub struct Line {
    pub name: &'static str,
    /// Finds all ways in which a term of a class is the left side.
    pub(crate) find: fn(&EGraph, Id, &Term, Taker),
    pub examples: fn(&Mesh) -> Vec<Example>,
}

/// Both sides of a rule on the mesh `[x=2, y=3]`.
#[derive(Clone, Debug)]
pub struct Example {
    pub left: Expr,
    pub right: Expr,
    /// Names and types of the operands: the n-th is value n. `fill` is the type of all that are filled, `out`
    /// that of the whole where it has a choice.
    pub values: Vec<[&'static str; 2]>,
}

/// With which ops left sides of examples begin: a line is looked for where they stand. The kind of the op, and
/// of one that makes an operand, if one does; true if it is to make all operands.
pub(crate) struct Starts(HashSet<(Kind, Option<Kind>, bool)>);

type Kind = Discriminant<Op>;

impl Starts {
    pub(crate) fn of(lines: &[&Line]) -> Starts {
        let mesh = Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh");
        let start = |e: Example| {
            let Expr::Op(op, ins) = e.left else { return None };
            let kind = |e: &Expr| match e {
                Expr::Op(op, _) => Some(discriminant(op)),
                Expr::Value(_) => None,
            };
            let first = ins.iter().find_map(kind);
            Some((
                discriminant(&op),
                first,
                first.is_some() && ins.iter().all(|e| kind(e) == first),
            ))
        };
        Starts(lines.iter().flat_map(|l| (l.examples)(&mesh)).filter_map(start).collect())
    }

    /// True if some node of a run may be the left side of a line.
    pub(crate) fn are_in(&self, f: &Func, uses: &Uses, run: &Range<usize>) -> bool {
        f.nodes[run.clone()].iter().any(|n| {
            let kind = discriminant(&n.op);
            let maker = |&v| uses.maker(v).filter(|m| run.contains(m));
            let below = |v| maker(v).map(|m| discriminant(&f.nodes[m].op));
            let first = n.ins.first().and_then(below);
            self.0.contains(&(kind, None, false))
                || n.ins.iter().any(|v| self.0.contains(&(kind, below(v), false)))
                || self.0.contains(&(kind, first, true)) && n.ins.iter().all(|v| below(v) == first)
        })
    }
}

/// Axes of examples.
pub(crate) const X: AtomSet = AtomSet(1);
pub(crate) const Y: AtomSet = AtomSet(2);

/// The letter rule of an example.
pub(crate) fn rule(text: &str) -> RuleAttr {
    let left = text.split("->").next().unwrap_or_default();
    RuleAttr::new(text, &left.split(',').map(str::len).collect::<Vec<_>>())
}

/// The same, of an element-wise op.
pub(crate) fn spread(text: &str) -> Broadcast {
    Broadcast(Some(rule(text).0))
}

/// The size of a letter of an example.
pub(crate) fn size(letter: u8, of: usize) -> Sizes {
    Sizes(smallvec::smallvec![(Letter(letter - b'a'), of)])
}

/// A side of a rule, with its variables as they are bound.
macro_rules! expr {
    (($op:ident $attrs:tt $($in:tt)*)) => {
        $crate::rewrite::line::Expr::Op(Op::$op($op $attrs), vec![$(expr!($in)),*])
    };
    ($value:ident) => {
        $crate::rewrite::line::Expr::Value($value)
    };
}

/// Does something for each way in which operands, a slice each, are as patterns say.
macro_rules! each {
    ($g:ident [] $then:expr) => {
        $then
    };
    ($g:ident [($ins:ident) $($more:tt)*] $then:expr) => {
        if $ins.is_empty() {
            each!($g [$($more)*] $then)
        }
    };
    ($g:ident [($ins:ident $operand:tt $($next:tt)*) $($more:tt)*] $then:expr) => {
        if let [first, rest @ ..] = $ins {
            each!($g value first: $operand [(rest $($next)*) $($more)*] $then)
        }
    };
    ($g:ident value $id:ident: ($op:ident $attrs:tt $($in:tt)*) $more:tt $then:expr) => {
        for term in $g.terms(*$id) {
            each!($g term term: $op $attrs ($($in)*) $more $then)
        }
    };
    ($g:ident value $id:ident: $value:ident $more:tt $then:expr) => {{
        let $value = *$id;
        each!($g $more $then)
    }};
    ($g:ident term $term:ident: $op:ident $attrs:tt ($($in:tt)*) [$($more:tt)*] $then:expr) => {
        if let Some(Op::$op(op)) = $g.op($term)
            && let $op $attrs = op.clone()
        {
            let ins = &$term.ins[..];
            each!($g [(ins $($in)*) $($more)*] $then)
        }
    };
}

/// Both sides on operands of given types and attributes.
macro_rules! example {
    ($left:tt => $right:tt; $($value:ident: $ty:literal),*; $($attr:ident = $is:expr),*) => {{
        let mut values = vec![];
        $(
            let $value = $crate::rewrite::line::Id(values.len() as u32);
            values.push([stringify!($value), $ty]);
        )*
        let left = || { $(let $attr = $is;)* Some(expr!($left)) };
        let right = || { $(let $attr = $is;)* Some(expr!($right)) };
        let [left, right] = [left(), right()].map(|side| side.expect("it is an example"));
        $crate::rewrite::line::Example { left, right, values }
    }};
}

/// A table of rules, by name: `LEFT => RIGHT if CONDITION; [EXAMPLE]`, or `by FUNCTION;` with the sides of
/// examples behind it. The first word is what attributes call the mesh.
macro_rules! rules {
    ($mesh:ident; $($name:literal {$($line:tt)*})*) => {
        &[$(rules!($mesh: $name $($line)*)),*]
    };
    ($mesh:ident: $name:literal by $find:expr; $($left:tt => $right:tt; [$($example:tt)*])*) => {
        $crate::rewrite::Line {
            name: $name,
            find: $find,
            examples: |$mesh| vec![$(example!($left => $right; $($example)*)),*],
        }
    };
    ($mesh:ident: $name:literal ($op:ident $attrs:tt $($in:tt)*) => $right:tt $(if $when:expr)?; [$($example:tt)*]) => {
        $crate::rewrite::Line {
            name: $name,
            find: |g, _, t, found| {
                let $mesh = &g.mesh;
                each!(g term t: $op $attrs ($($in)*) [] {
                    let right = || {
                        $(if !$when { return None; })?
                        Some(expr!($right))
                    };
                    right().into_iter().for_each(&mut *found);
                })
            },
            examples: |$mesh| vec![example!(($op $attrs $($in)*) => $right; $($example)*)],
        }
    };
}
