//! Functions and predicates on attributes that rules may use, on the text that programs have.

use shardc_ir::attr::{Attr, AttrCx, read_atoms};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::rule::{Dims, Group, Rule, dims_text};

/// The attribute that a function makes of others; `None` if it is not defined on them.
///
/// | function | of | result |
/// |---|---|---|
/// | `times`, `plus` | two numbers | their product, sum, where an f64 is exactly that |
/// | `union` | axes that do not meet | all of them |
/// | `compose` | rules of one operand, outer first | the rule of both |
/// | `compose_left`, `compose_right` | a rule of two operands, one of the first (second) | both |
/// | `compose_out` | a rule of one operand, the rule of two operands it is applied to | both |
/// | `spread_left`, `spread_right` | the rule of an `expand` | of an op with it as that operand |
/// | `contract` | the rule of a sum | of a `dot` of two such operands |
/// | `from`, `to` | `dim=1` | `from=1`, `to=1` |
/// | `turns` | axes, two shifts | one shift |
pub(crate) fn compute(mesh: &Mesh, function: &str, args: &[&str]) -> Option<String> {
    match (function, args) {
        ("times", [a, b]) => {
            let (a, b): (f64, f64) = (a.parse().ok()?, b.parse().ok()?);
            let x = a * b;
            let exact = a.mul_add(b, -x) == 0.0 && (x.is_normal() || a == 0.0 || b == 0.0);
            number(x).filter(|_| exact)
        }
        ("plus", [a, b]) => {
            let (a, b): (f64, f64) = (a.parse().ok()?, b.parse().ok()?);
            // What rounding leaves over (Knuth, TAOCP 2, 4.2.2, theorem C).
            let x = a + b;
            let of_b = x - a;
            let rest = (a - (x - of_b)) + (b - of_b);
            number(x).filter(|_| rest == 0.0)
        }
        ("union", [a, b]) => union(mesh, a, b),
        ("compose", [outer, inner]) => {
            let (o, i) = (unary(outer)?, unary(inner)?);
            let to = rename(&o.outs[0], &o.ins[0], &i.outs[0])?;
            Some(format!("{}->{}", dims_text(&i.ins[0]), dims_text(&to)))
        }
        ("compose_left", [outer, inner]) => compose_operand(outer, inner, 0),
        ("compose_right", [outer, inner]) => compose_operand(outer, inner, 1),
        ("compose_out", [outer, inner]) => {
            let (o, i) = (unary(outer)?, binary(inner)?);
            let to = rename(&o.outs[0], &o.ins[0], &i.outs[0])?;
            let (a, b) = (dims_text(&i.ins[0]), dims_text(&i.ins[1]));
            Some(format!("{a},{b}->{}", dims_text(&to)))
        }
        ("spread_left", [expand]) => {
            let (small, whole) = expand.split_once("->")?;
            Some(format!("{small},{whole}->{whole}"))
        }
        ("spread_right", [expand]) => {
            let (small, whole) = expand.split_once("->")?;
            Some(format!("{whole},{small}->{whole}"))
        }
        ("contract", [sum]) => {
            let (from, to) = sum.split_once("->")?;
            Some(format!("{from},{from}->{to}"))
        }
        ("from", [dim]) => Some(format!("from={}", dim.strip_prefix("dim=")?)),
        ("to", [dim]) => Some(format!("to={}", dim.strip_prefix("dim=")?)),
        ("turns", [axes, a, b]) => {
            let ways = mesh.ways(read_atoms(axes, mesh).ok()?.set());
            let shift = |s: &str| s.strip_prefix("shift=")?.parse::<usize>().ok();
            Some(format!("shift={}", (shift(a)? % ways + shift(b)? % ways) % ways))
        }
        _unknown => None,
    }
}

/// True if a predicate holds.
///
/// | predicate | of | meaning |
/// |---|---|---|
/// | `identity` | a rule of one operand | it changes nothing |
/// | `keeps_left`, `keeps_right` | a rule of two operands | the result has that operand's dims |
pub(crate) fn holds(predicate: &str, args: &[&str]) -> bool {
    let binary = |rule: &str| {
        let (ins, out) = rule.split_once("->")?;
        let (a, b) = ins.split_once(',')?;
        Some((a == out, b == out))
    };
    match (predicate, args) {
        ("identity", [r]) => r.split_once("->").is_some_and(|(a, b)| a == b),
        ("keeps_left", [r]) => binary(r).is_some_and(|k| k.0),
        ("keeps_right", [r]) => binary(r).is_some_and(|k| k.1),
        _unknown => false,
    }
}

fn number(x: f64) -> Option<String> {
    x.is_finite().then(|| format!("{x:?}"))
}

fn union(mesh: &Mesh, a: &str, b: &str) -> Option<String> {
    let cx = AttrCx { mesh, ranks: &[] };
    let (a, b) = (AtomSet::read(a, &cx).ok()?, AtomSet::read(b, &cx).ok()?);
    if a.meets(b) { None } else { Some(mesh.names(a.union(b), "*")) }
}

/// A rule parsed without knowing its operands' ranks.
fn parse(rule: &str) -> Option<Rule> {
    let ins = rule.split_once("->")?.0;
    let rank = |t: &str| Rule::parse(&format!("->{t}"), &[]).ok().map(|r| r.outs[0].len());
    let ranks: Vec<usize> = ins.split(',').map(rank).collect::<Option<_>>()?;
    Rule::parse(rule, &ranks).ok()
}

fn unary(rule: &str) -> Option<Rule> {
    parse(rule).filter(|r| r.ins.len() == 1 && r.outs.len() == 1)
}

fn binary(rule: &str) -> Option<Rule> {
    parse(rule).filter(|r| r.ins.len() == 2 && r.outs.len() == 1)
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

/// The rule of two operands whose operand `i` first goes through a rule of one operand that only
/// reorders its dims.
fn compose_operand(outer: &str, inner: &str, i: usize) -> Option<String> {
    let (o, t) = (binary(outer)?, unary(inner)?);
    if t.ins[0].len() != t.outs[0].len() {
        return None;
    }
    let through = rename(&t.ins[0], &t.outs[0], &o.ins[i])?;
    let mut ins = [dims_text(&o.ins[0]), dims_text(&o.ins[1])];
    ins[i] = dims_text(&through);
    Some(format!("{},{}->{}", ins[0], ins[1], dims_text(&o.outs[0])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(function: &str, args: &[&str]) -> Option<String> {
        compute(&Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh"), function, args)
    }

    #[test]
    fn attributes_are_computed() {
        assert_eq!(of("times", &["2.0", "-0.5"]).as_deref(), Some("-1.0"));
        assert_eq!(of("times", &["1e300", "1e300"]), None);
        // Another number than the two scales make: plans are proved over the reals.
        assert_eq!(of("times", &["0.3", "0.7"]), None);
        assert_eq!(of("times", &["1e-200", "1e-200"]), None);
        assert_eq!(of("times", &["0.0", "0.7"]).as_deref(), Some("0.0"));
        assert_eq!(of("plus", &["0.25", "3.0"]).as_deref(), Some("3.25"));
        assert_eq!(of("plus", &["0.1", "0.2"]), None);
        assert_eq!(of("union", &["y", "x"]).as_deref(), Some("x*y"));
        assert_eq!(of("union", &["x", "x"]), None);
        assert_eq!(of("compose", &["ab->ba", "xyz->zy"]).as_deref(), Some("xyz->yz"));
        assert_eq!(of("compose_left", &["mk,kn->mn", "ab->ba"]).as_deref(), Some("km,kn->mn"));
        assert_eq!(of("compose_right", &["mk,kn->mn", "ab->ba"]).as_deref(), Some("mk,nk->mn"));
        assert_eq!(of("compose_out", &["ab->ba", "mk,kn->mn"]).as_deref(), Some("mk,kn->nm"));
        assert_eq!(of("spread_right", &["s->bs"]).as_deref(), Some("bs,s->bs"));
        assert_eq!(of("contract", &["bs->b"]).as_deref(), Some("bs,bs->b"));
        assert_eq!(of("turns", &["y", "shift=2", "shift=2"]).as_deref(), Some("shift=1"));
        assert_eq!(of("compose", &["(ab)->ab", "c->c"]), None);
    }

    #[test]
    fn predicates_hold() {
        assert!(holds("identity", &["ab->ab"]) && !holds("identity", &["ab->ba"]));
        assert!(holds("keeps_left", &["ab,b->ab"]) && !holds("keeps_right", &["ab,b->ab"]));
        assert!(!holds("unheard of", &["ab->ab"]));
    }
}
