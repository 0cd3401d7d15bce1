//! Attributes that rules make of others; `None` where they do not fit.

use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::mesh::AtomSet;
use shardc_ir::rule::{Dims, Group, Rule};
use std::sync::Arc;

/// The product, where an f64 is exactly that: plans are proved over the reals.
pub(crate) fn times(a: f64, b: f64) -> Option<f64> {
    let x = a * b;
    let exact = a.mul_add(b, -x) == 0.0 && (x.is_normal() || a == 0.0 || b == 0.0);
    (exact && x.is_finite()).then_some(x)
}

/// The sum, where an f64 is exactly that.
pub(crate) fn plus(a: f64, b: f64) -> Option<f64> {
    // What rounding leaves over (Knuth, TAOCP 2, 4.2.2, theorem C).
    let x = a + b;
    let of_b = x - a;
    let rest = (a - (x - of_b)) + (b - of_b);
    (rest == 0.0 && x.is_finite()).then_some(x)
}

/// Both sets of axes, if they do not meet.
pub(crate) fn union(a: AtomSet, b: AtomSet) -> Option<AtomSet> {
    (!a.meets(b)).then(|| a.union(b))
}

/// The rule of an op and then one of one operand.
pub(crate) fn compose(outer: &RuleAttr, inner: &RuleAttr) -> Option<RuleAttr> {
    let (o, i) = (&outer.0, &inner.0);
    let to = rename(&o.outs[0], &o.ins[0], &i.outs[0])?;
    Some(rule_of(&i.ins.iter().collect::<Vec<_>>(), &to))
}

/// The rule of an op whose operand `i` first goes through one that only reorders its dims.
pub(crate) fn through(outer: &RuleAttr, inner: &RuleAttr, i: usize) -> Option<RuleAttr> {
    let (o, t) = (&outer.0, &inner.0);
    let reorders = t.ins[0].len() == t.outs[0].len();
    let own = rename(&t.ins[0], &t.outs[0], &o.ins[i]).filter(|_| reorders)?;
    let mut ins: Vec<&Dims> = o.ins.iter().collect();
    ins[i] = &own;
    Some(rule_of(&ins, &o.outs[0]))
}

/// The rule of a `dot` of two operands, from that of the sum of their product.
pub(crate) fn contract(sum: &RuleAttr) -> RuleAttr {
    rule_of(&[&sum.0.ins[0]; 2], &sum.0.outs[0])
}

/// A rule that changes nothing.
pub(crate) fn identity(r: &RuleAttr) -> bool {
    r.0.ins[0] == r.0.outs[0]
}

/// The result has the dims of operand `i`.
pub(crate) fn keeps(b: &Broadcast, i: usize) -> bool {
    b.0.as_ref().is_none_or(|r| r.ins[i] == r.outs[0])
}

pub(crate) fn rule_of(ins: &[&Dims], to: &Dims) -> RuleAttr {
    RuleAttr(Arc::new(Rule::of(ins, &[to])))
}

/// `dims` with the dims of `from` renamed to those of `to`, one by one.
fn rename(dims: &Dims, from: &Dims, to: &Dims) -> Option<Dims> {
    let plain = |d: &Dims| d.iter().all(|g| g.single().is_some());
    if from.len() != to.len() || !plain(dims) || !plain(from) || !plain(to) {
        return None;
    }
    let one = |g: &Group| from.iter().position(|f| f == g).map(|p| to[p]);
    dims.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::line::{X, Y, rule, spread};
    use super::*;

    #[test]
    fn attributes_are_computed() {
        assert_eq!(times(2.0, -0.5), Some(-1.0));
        assert_eq!(times(1e300, 1e300), None);
        // Another number than the two scales make.
        assert_eq!(times(0.3, 0.7), None);
        assert_eq!(times(1e-200, 1e-200), None);
        assert_eq!(times(0.0, 0.7), Some(0.0));
        assert_eq!(plus(0.25, 3.0), Some(3.25));
        assert_eq!(plus(0.1, 0.2), None);
        assert_eq!(union(Y, X), Some(X.union(Y)));
        assert_eq!(union(X, X), None);
        let turned = rule("ab->ba");
        let product = rule("mk,kn->mn");
        assert_eq!(compose(&turned, &rule("xyz->zy")), Some(rule("xyz->yz")));
        assert_eq!(compose(&turned, &product), Some(rule("mk,kn->nm")));
        assert_eq!(through(&product, &turned, 0), Some(rule("km,kn->mn")));
        assert_eq!(through(&product, &turned, 1), Some(rule("mk,nk->mn")));
        assert_eq!(contract(&rule("bs->b")), rule("bs,bs->b"));
        let joined = RuleAttr::new("(ab)->ab", &[1]);
        assert_eq!(compose(&joined, &rule("c->c")), None);
        assert!(identity(&rule("ab->ab")) && !identity(&turned));
        let b = spread("ab,b->ab");
        assert!(keeps(&b, 0) && !keeps(&b, 1) && keeps(&Broadcast::SAME, 1));
    }
}
