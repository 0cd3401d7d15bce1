//! Logits of one position: of a model that gives those of all, the same model with an input that says which.

use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Node, Role, RoleKind, Value};
use shardc_ir::ops::{Kind, Take};
use shardc_ir::rule::Rule;
use shardc_ir::source::Source;
use shardc_ir::types::{DType, Type};
use std::borrow::Cow;

/// The input that says which position.
pub const AT: &str = "logits_at";

/// Gives logits [b, 1, v] in place of [b, s, v], of the positions in an input i32 [b, 1]. What is read of the last
/// hidden state is taken before the product with the output projection, so that this is made of one position alone.
///
/// # Errors
/// `source` for a model that shows no logits.
pub fn at_one_position(source: &mut Source) -> Result<()> {
    let mesh = source.module.mesh.clone();
    let f = &mut source.module.funcs[0];
    let shown = |f: &shardc_ir::func::Func, v: Value| {
        let ty = f.ty(v);
        ty.rank() == 3 && ty.dtype.is_float()
    };
    let is_logits = |r: &Role| r.kind == RoleKind::Output && &*r.name == "logits";
    let place = f.results.iter().position(|r| r.role.as_ref().is_some_and(is_logits));
    let Some(place) = place.filter(|&i| shown(f, f.results[i].value)) else {
        return Err(Diag::new("source", "the model shows no logits")
            .rule("generate reads an output \"logits\" [rows, tokens, vocabulary]")
            .help("export or write a model that returns its logits"));
    };
    let logits = f.results[place].value;
    let rows = f.ty(logits).dims[0].size;
    let name = Builder::new(&mesh, f).named(AT);
    let at = f.arg(Type::new(DType::I32, &[rows, 1]), name, Some(Role::input(AT)));
    let mut b = Builder::new(&mesh, f);
    b.f.results[place].value = taken(&mut b, logits, at, false);
    Ok(())
}

/// A value of one position. Work on single elements up to a product, and the product, are made of that alone; behind
/// the product (`crossed`) the position is taken.
fn taken(b: &mut Builder, v: Value, at: Value, crossed: bool) -> Value {
    let maker = b.f.makers()[v].map(|i| b.f.nodes[i as usize].clone());
    if let Some(n) = maker.filter(|_| !crossed)
        && let Some(moved) = moves(b, &n)
    {
        let crosses = n.op.is_matrix_product();
        let of = |b: &mut Builder, (&v, moves): (&Value, bool)| match moves {
            true => taken(b, v, at, crosses),
            false => v,
        };
        let ins: Vec<Value> = n.ins.iter().zip(moved).map(|x| of(b, x)).collect();
        b.scope = n.scope;
        return b.push("last", n.op.clone(), &ins);
    }
    let rest: String =
        ('c'..='z').filter(|c| !matches!(c, 's' | 't')).take(b.ty(v).rank() - 2).collect();
    let take = Take::by(&format!("bs{rest},bt->bt{rest}"), &[b.ty(v).rank(), 2]);
    b.push("last", take, &[v, at])
}

/// Which operands of a node have tokens, [b, s, …] as its result; nothing if it must be made of all of them.
fn moves(b: &Builder, n: &Node) -> Option<Vec<bool>> {
    let kind = n.op.facts().kind;
    let alone = matches!(kind, Kind::Elementwise | Kind::Activation | Kind::Conversion);
    if n.outs.len() != 1 || !(alone || n.op.is_matrix_product()) {
        return None;
    }
    let ranks: Vec<usize> = n.ins.iter().map(|&v| b.ty(v).rank()).collect();
    let def = n.op.def();
    let rule: Cow<Rule> = def.rule(&ranks);
    let [rows, tokens, ..] = rule.outs.first()?[..] else { return None };
    let one = |dims: &shardc_ir::rule::Dims| match dims.contains(&tokens) {
        false => Some(false),
        true => (dims.len() > 1 && dims[0] == rows && dims[1] == tokens).then_some(true),
    };
    rule.ins.iter().map(one).collect()
}
