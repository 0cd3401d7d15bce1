//! Reverse mode on the model of one device, from a textbook: one rule per op, in its file in `ops`,
//! written of terms alone.
//!
//! It shares nothing with the gradients of the compiler. For y = f(x) and a cotangent d of y it
//! gives that of x, the transposed Jacobian applied to d. Constants are the f64 numbers nearest to
//! what is meant.

use crate::meaning::{letters, rule};
use crate::number::Coef;
use crate::ops::{Both, Each, Law, law};
use crate::product::Letter;
use crate::term::{Store, Term};
use shardc_ir::func::{Func, RoleKind, Value};
use shardc_ir::ops::Op;
use shardc_ir::rule::Rule;
use shardc_ir::types::Type;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Cotangents of operands; `None` where there is none.
pub(crate) type Back = Vec<Option<Term>>;

/// A node at work: operands and results with their types, and the results' cotangents.
pub(crate) struct At<'a> {
    pub s: &'a mut Store,
    pub op: &'a Op,
    pub types: Vec<&'a Type>,
    pub x: Vec<Term>,
    pub y: Vec<Term>,
    pub d: Vec<Option<Term>>,
}

/// What reverse mode stops at.
#[derive(Debug)]
pub struct Stop {
    /// Index of the node.
    pub node: usize,
    pub why: String,
}

/// By parameter, the cotangent that the seeds on values give; `values` are the terms of all values.
pub fn gradients(
    s: &mut Store,
    f: &Func,
    values: &[Option<Term>],
    seeds: &[(Value, Term)],
) -> Result<BTreeMap<Arc<str>, Term>, Stop> {
    let wants = wants(f);
    let mut cotangents: Vec<Vec<Term>> = vec![vec![]; f.values.len()];
    for &(v, t) in seeds {
        cotangents[v.0 as usize].push(t);
    }
    for (i, n) in f.nodes.iter().enumerate().rev() {
        let total = |s: &mut Store, v: &Value| {
            let parts = &cotangents[v.0 as usize];
            (wants[v.0 as usize] && !parts.is_empty()).then(|| s.add(parts))
        };
        let d: Vec<Option<Term>> = n.outs.iter().map(|v| total(s, v)).collect();
        if d.iter().all(Option::is_none) {
            continue;
        }
        let stop = |why: String| Stop { node: i, why };
        let made =
            |v: &Value| values[v.0 as usize].ok_or_else(|| stop("a value is missing".into()));
        let x = n.ins.iter().map(made).collect::<Result<_, _>>()?;
        let y = n.outs.iter().map(made).collect::<Result<_, _>>()?;
        let types = n.ins.iter().map(|&v| f.ty(v)).collect();
        let at = &mut At { s: &mut *s, op: &n.op, types, x, y, d };
        let back = law(&n.op).back(at).map_err(stop)?;
        for (v, g) in n.ins.iter().zip(back) {
            if let (true, Some(g)) = (wants[v.0 as usize], g) {
                cotangents[v.0 as usize].push(g);
            }
        }
    }
    let params = f.args.iter().filter_map(|a| Some((a.value, a.role.as_ref()?)));
    let params = params.filter(|(_, r)| r.kind == RoleKind::Param);
    let mut out = BTreeMap::new();
    for (v, r) in params {
        let parts = &cotangents[v.0 as usize];
        if !parts.is_empty() {
            out.insert(r.name.text().clone(), s.add(parts));
        }
    }
    Ok(out)
}

/// Values on a way from a parameter that a derivative follows.
fn wants(f: &Func) -> Vec<bool> {
    let mut wants = vec![false; f.values.len()];
    for a in &f.args {
        wants[a.value.0 as usize] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    }
    for n in &f.nodes {
        let through = !law(&n.op).is_constant() && n.ins.iter().any(|v| wants[v.0 as usize]);
        for (k, o) in n.outs.iter().enumerate() {
            wants[o.0 as usize] = through && f.ty(n.outs[k]).dtype.is_float();
        }
    }
    wants
}

impl At<'_> {
    /// The cotangent of the first result.
    pub fn d(&self) -> Result<Term, String> {
        self.d[0].ok_or_else(|| format!("no cotangent of what `{}` makes", self.op.mnemonic()))
    }

    pub fn shape(&self, i: usize) -> Vec<usize> {
        self.s.shape(self.x[i]).to_vec()
    }

    /// The product, element by element.
    pub fn times(&mut self, all: &[Term]) -> Term {
        let shape = self.s.shape(all[0]).to_vec();
        let own: Vec<Letter> = (0..shape.len() as Letter).collect();
        let factors: Vec<(Term, Vec<Letter>)> = all.iter().map(|&t| (t, own.clone())).collect();
        self.s.product(&factors, &own, &shape).expect("factors of one shape")
    }

    /// c·t, and a number.
    pub fn affine(&mut self, c: f64, t: Term, plus: f64) -> Term {
        let shape = self.s.shape(t).to_vec();
        let [c, plus] = [c, plus].map(|x| Coef::of(x).expect("a finite constant"));
        let one = self.s.fill(plus, &shape);
        self.s.sum(&[(c, t), (Coef::ONE, one)], &shape)
    }

    pub fn each(&mut self, name: &'static str, t: Term) -> Term {
        let shape = self.s.shape(t).to_vec();
        self.s.apply(Each(name, None), &[t], 0, &shape)
    }

    /// Of a sum of operands that are spread, reduced, turned: the transposed map.
    pub fn transposed(&mut self, law: &dyn Law) -> Result<Back, String> {
        let (d, r) = (self.d()?, self.rule(law)?);
        let o = letters(&r.outs[0])?;
        let mut back = vec![];
        for i in 0..self.x.len() {
            let shape = self.shape(i);
            let own = letters(&r.ins[i])?;
            back.push(Some(self.s.product(&[(d, o.clone())], &own, &shape)?));
        }
        Ok(back)
    }

    /// The letters of its operands.
    pub fn rule<'k>(&self, law: &'k dyn Law) -> Result<Cow<'k, Rule>, String> {
        rule(law, &self.types)
    }

    /// A function of two numbers, element by element.
    pub fn both(&mut self, name: &'static str, x: [Term; 2]) -> Term {
        let shape = self.s.shape(x[0]).to_vec();
        self.s.apply(Both(name), &x, 0, &shape)
    }
}
