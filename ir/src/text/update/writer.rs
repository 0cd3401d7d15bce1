//! The lines of a rule as nodes of a function.

use super::instance::number_of;
use super::number::evaluate;
use super::parse::wrong;
use super::*;
use crate::attr::AttrCx;
use crate::builder::Builder;
use crate::func::{Name, Value};
use crate::maps::HashMap;
use crate::ops::{Add, Cast, Op, Scale, Sub};
use crate::text::cursor::{Fail, Res};
use crate::text::near::nearest;
use crate::types::Type;

/// Most ops that a rule is written out to: each parameter has them.
const MOST_OPS: usize = 1000;

/// A value, and whether it has the stack's dim.
#[derive(Clone, Copy)]
pub(super) struct Made {
    pub value: Value,
    pub stacked: bool,
}

pub(super) struct Writer<'a> {
    pub u: &'a Update,
    pub b: Builder<'a>,
    pub known: HashMap<String, Made>,
    /// Dims of the parameter that the rule sees.
    pub rank: usize,
    /// The number of the iteration.
    pub i: Option<f64>,
    /// Names that stand for others in the first iteration.
    pub begins: Vec<(String, String)>,
    pub lines: usize,
    /// Ops that were written.
    pub ops: usize,
}

impl Writer<'_> {
    fn number(&self, text: &str, at: usize) -> Res<f64> {
        let known = |name: &str, k: Option<f64>| match (name, self.i) {
            ("i", Some(i)) => Ok(i),
            _other => number_of(&self.u.attrs, name, k),
        };
        evaluate(text, &known).map_err(|m| wrong(at, 1, m).help("write a number here"))
    }

    /// A name with numbers for what stands in its braces.
    fn name(&self, name: &str, at: usize) -> Res<String> {
        let mut out = String::new();
        let mut rest = name;
        while let Some((before, after)) = rest.split_once('{') {
            let (inner, after) = after.split_once('}').unwrap_or((after, ""));
            out += before;
            out += &format!("{}", self.number(inner, at)?);
            rest = after;
        }
        Ok(out + rest)
    }

    pub fn lines_of(&mut self, lines: &[BodyLine]) -> Res<()> {
        for line in lines {
            self.lines += 1;
            match line {
                BodyLine::Define { at, name, expr } => {
                    let name = self.name(name, *at)?;
                    let made = self.expr(expr)?;
                    if self.known.insert(name.clone(), made).is_some() {
                        let m = format!("`%{name}` is defined a second time");
                        return Err(Fail::new("redefined", *at, name.len() + 1, m)
                            .help(format!("call it `%{name}_{}`", self.lines)));
                    }
                    if matches!(expr, Expr::Op { .. }) {
                        self.b.f.rename(made.value, Name::parse(&name));
                    }
                }
                BodyLine::Repeat { at, first, end, begins, body } => {
                    let [first, end] = [first, end].map(|t| self.number(t, *at));
                    let (first, end) = (first?, end?);
                    let count = end - first;
                    let whole = first.fract() == 0.0 && first >= 0.0 && count.fract() == 0.0;
                    if !whole || !(0.0..=MOST_OPS as f64).contains(&count) {
                        let m = format!("a repeat from {first} to {end} does not end in time");
                        return Err(wrong(*at, 6, m)
                            .rule(format!("a rule is written out to at most {MOST_OPS} ops"))
                            .help("repeat a few times, for example `i in 0..5`"));
                    }
                    for (name, is) in begins {
                        self.i = Some(first);
                        let name = self.name(name, *at)?;
                        self.i = None;
                        self.begins.push((name, is.clone()));
                    }
                    for k in 0..count as usize {
                        self.i = Some(first + k as f64);
                        self.lines_of(body)?;
                    }
                    self.i = None;
                }
            }
        }
        Ok(())
    }

    fn find(&self, name: &str, at: usize) -> Res<Made> {
        let begun = self.begins.iter().find(|b| b.0 == name && !self.known.contains_key(name));
        let name = begun.map_or(name, |b| &b.1);
        self.known.get(name).copied().ok_or_else(|| {
            let mut all: Vec<&str> = self.known.keys().map(|k| &**k).collect();
            all.sort_unstable();
            let near: Vec<_> = nearest(name, all).iter().map(|n| format!("`%{n}`")).collect();
            let m = format!("`%{name}` is not defined above this line");
            let f = Fail::new("undefined-value", at, name.len() + 1, m);
            f.help(match near.is_empty() {
                false => format!("did you mean {}?", near.join(" or ")),
                true => format!("define it first: `%{name} = …`, or make it an argument"),
            })
        })
    }

    pub fn expr(&mut self, e: &Expr) -> Res<Made> {
        match e {
            Expr::Value { at, name } => self.find(&self.name(name, *at)?, *at),
            Expr::Op { at, op, attrs, ins } => {
                let ins = ins.iter().map(|x| self.expr(x)).collect::<Res<Vec<Made>>>()?;
                self.op(*at, op, attrs.as_deref(), &ins)
            }
        }
    }

    fn op(&mut self, at: usize, op: &str, attrs: Option<&str>, ins: &[Made]) -> Res<Made> {
        let stacked = ins.iter().any(|x| x.stacked);
        let attrs = attrs.map(|a| self.u.numbers(a, self.i)).transpose();
        let attrs = attrs.map_err(|m| wrong(at, op.len(), m).help("see the `with` lines"))?;
        // Element-wise work on what each matrix of a stack has of its own, and on what all have together.
        let attrs = attrs.or_else(|| {
            let mixed = stacked && op != "lerp" && ins.iter().any(|x| !x.stacked);
            let rank = |x: &Made| self.b.ty(x.value).rank() - usize::from(x.stacked);
            let l: String = ('a'..='z').take(ins.first().map_or(0, rank)).collect();
            let alike = ins.iter().all(|x| rank(x) == l.len());
            (mixed && alike).then(|| format!("{}->{l}", vec![&*l; ins.len()].join(",")))
        });
        let attrs = attrs.map(|a| spread(&a, self.rank, ins, stacked));
        if op == "lerp" {
            let weight: f64 = match attrs.as_deref().map(str::parse) {
                Some(Ok(w)) => w,
                _other => {
                    let m = "lerp has a weight";
                    return Err(wrong(at, 4, m).help("for example `lerp[0.1] %x, %y`"));
                }
            };
            return self.lerp(at, weight, ins[0], ins[1]);
        }
        let ranks: Vec<usize> = ins.iter().map(|x| self.b.ty(x.value).rank()).collect();
        let cx = AttrCx { mesh: self.b.mesh, ranks: &ranks };
        let op = Op::read(op, attrs.as_deref(), cx).map_err(|e| {
            Fail::new("attribute", at, op.len(), format!("`{op}`: {}", e.message))
                .help("see docs/ops.md for its attributes")
        })?;
        let same = |x: &&Made| op == Op::from(Cast { to: self.b.ty(x.value).dtype });
        if let Some(x) = ins.first().filter(same) {
            return Ok(*x);
        }
        Ok(Made { value: self.push(at, op, ins)?, stacked })
    }

    fn push(&mut self, at: usize, op: Op, ins: &[Made]) -> Res<Value> {
        self.ops += 1;
        if self.ops > MOST_OPS {
            let m = format!("the rule has more than {MOST_OPS} ops up to here");
            return Err(wrong(at, 1, m).help("repeat less: each parameter has all of them"));
        }
        let values: Vec<Value> = ins.iter().map(|x| x.value).collect();
        let types: Vec<&Type> = values.iter().map(|&v| self.b.ty(v)).collect();
        let name = op.mnemonic();
        let checked = op.check(self.b.mesh, &types, &[None]);
        let checked = checked.and_then(|_| self.b.try_push(op, &values, &[], &[]));
        match checked {
            Ok(outs) => Ok(outs[0]),
            Err(e) => {
                Err(Fail::new(e.code, at, name.len(), format!("`{name}`: {}", e.message))
                    .help(e.help))
            }
        }
    }

    /// x + w (y - x); of a weight of a half or more y - (y - x) (1 - w), as torch rounds it.
    fn lerp(&mut self, at: usize, weight: f64, x: Made, y: Made) -> Res<Made> {
        let stacked = x.stacked || y.stacked;
        let made = |value| Made { value, stacked };
        let apart = self.push(at, Sub::same().into(), &[y, x])?;
        if weight < 0.5 {
            let by = self.push(at, Scale { by: weight }.into(), &[made(apart)])?;
            return Ok(made(self.push(at, Add::same().into(), &[x, made(by)])?));
        }
        let by = self.push(at, Scale { by: 1.0 - weight }.into(), &[made(apart)])?;
        Ok(made(self.push(at, Sub::same().into(), &[y, made(by)])?))
    }
}

/// A letter rule for a stack and for any shape: `*` becomes letters, and operands of a stack get
/// one more.
fn spread(attrs: &str, rank: usize, ins: &[Made], stacked: bool) -> String {
    let Some((left, right)) = attrs.split_once("->") else { return attrs.into() };
    let (right, rest) = right.split_at(right.find(';').unwrap_or(right.len()));
    let used = |c: &char| !attrs.contains(*c);
    let mut free = ('a'..='z').filter(used);
    let any: String = match attrs.contains('*') {
        true => free.by_ref().take(rank).collect(),
        false => String::new(),
    };
    let batch = free.next().unwrap_or('Z').to_string();
    let one = |dims: &str, stacked: bool| {
        let dims = dims.trim().replace('*', &any);
        if stacked { batch.clone() + &dims } else { dims }
    };
    let left: Vec<String> = left
        .split(',')
        .enumerate()
        .map(|(k, d)| one(d, ins.get(k).is_some_and(|x| x.stacked)))
        .collect();
    format!("{}->{}{rest}", left.join(","), one(right, stacked))
}
