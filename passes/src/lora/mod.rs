//! Puts low-rank adapters beside products with weights (Hu et al., 2021, *LoRA*), named as PEFT names them.
//!
//! Before:  `%q = dot[bsh,oh->bso] %x, %q_proj`
//! After:   the same, and `%low = dot[bsh,rh->bsr] %x, %lora_A`, `%branch = dot[bsr,or->bso] %low, %lora_B`,
//!          `%branch.1 = scale[2] %branch`, `%q.1 = add %q, %branch.1`, which all users of `%q` read
//! Assumes: phase Source, before any pass.  Leaves: phase Source.
//!
//! It acts on a model before it becomes a plan, whose `model.ir` has the adapters: of such a model it changes nothing.
//! The branch is added before a bias and right behind its product, so that what is summed over ranks there is summed
//! with it. Slices of one tensor that read the same value share A and the product with it, as they are one layer in
//! PEFT; B is cut as they are.

mod linears;
mod options;

use linears::{Linear, linears};
pub use options::Lora;
use shardc_ir::attr::{RuleAttr, Sizes};
use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, Func, Name, Node, Port, Role, RoleKind, Scope, Value};
use shardc_ir::ops::draw::StreamName;
use shardc_ir::ops::{Add, Dot, Draw, GroupedDot, Mul, Op, Scale};
use shardc_ir::rng::Distribution;
use shardc_ir::rule::{Dims, Group, Letter, Rule, has_letter};
use shardc_ir::source::Source;
use shardc_ir::types::{DType, Type};
use shardc_ir::weights::{Init, TensorSlice, Weight};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A parameter of an adapter that is not in the model yet.
struct New {
    value: Value,
    weight: Weight,
}

struct Adapt<'a> {
    l: &'a Lora,
    /// Parameters of adapters by name; by the name of A and what it reads the product with it.
    made: BTreeMap<String, Value>,
    low: BTreeMap<(String, Value), Value>,
    /// By base weight: what follows it among the parameters.
    new: BTreeMap<Value, Vec<New>>,
    /// What draws depend on: the run, and the places of tokens.
    drawn: Option<[Value; 2]>,
}

/// Puts adapters beside all products that are asked for.
///
/// # Errors
/// `lora-target` if a target names no product, or one that has another adapter already; `lora-tied` if a weight is
/// also looked up in; `lora-rank`; `not-built` for dropout of what are not rows of tokens.
pub fn adapt(source: &mut Source, l: &Lora) -> Result<()> {
    let all = linears(&source.module.funcs[0], &source.weights);
    let chosen = l.chosen(&all)?;
    for x in &chosen {
        let (r, weight) = (l.rank(&x.module), &source.weights[x.weight]);
        let most = x.sides(weight).into_iter().min().unwrap_or(0);
        if r > most {
            let [out, input] = x.sides(weight);
            let what = format!("r={r} exceeds min({out}, {input}) of {}", x.module);
            return Err(Diag::new("lora-rank", what)
                .at("--lora")
                .rule("a product of two matrices has at most the rank of the one they change")
                .help(format!("use r={most} or less, or leave it out of the targets")));
        }
    }
    let mesh = source.module.mesh.clone();
    let (f, weights) = (&mut source.module.funcs[0], &source.weights);
    let drawn = if l.dropout > 0.0 { Some(drawn(f)?) } else { None };
    let mut a =
        Adapt { l, made: BTreeMap::new(), low: BTreeMap::new(), new: BTreeMap::new(), drawn };
    let mut now: BTreeMap<Value, Value> = BTreeMap::new();
    let nodes = std::mem::take(&mut f.nodes);
    let made = there(&nodes, f, weights);
    let mut next = chosen.iter().peekable();
    for (i, mut n) in nodes.into_iter().enumerate() {
        n.ins.iter_mut().for_each(|v| *v = now.get(v).copied().unwrap_or(*v));
        f.nodes.push(n);
        let Some(x) = next.next_if(|x| x.node == i) else { continue };
        let w = &weights[x.weight];
        let scale = l.scale(&x.module);
        if let Some(known) = made.get(&x.names(w).1) {
            known.agrees(l.rank(&x.module), scale, &x.module)?;
            continue;
        }
        let n = f.nodes.last().expect("it was pushed").clone();
        let y = n.outs[0];
        let mut b = Builder::new(&mesh, f);
        b.scope = n.scope;
        let branch = a.branch(&mut b, x, w, &n.op, &n.ins)?;
        let branch = match scale {
            1.0 => branch,
            by => b.push("branch", Scale { by }, &[branch]),
        };
        let whole = b.push("adapted", Add::same(), &[y, branch]);
        let hint = f.name(y).hint;
        f.rename(whole, Name { hint, dup: 0, ..f.name(y).clone() });
        now.insert(y, whole);
    }
    let of = |v: &mut Value| *v = now.get(v).copied().unwrap_or(*v);
    f.results.iter_mut().for_each(|r| of(&mut r.value));
    source.sequence.iter_mut().for_each(|x| of(&mut x.0));
    for (old, new) in &now {
        if let Some(asked) = f.annotations.remove(old) {
            f.annotations.insert(*new, asked);
        }
    }
    a.declare(source);
    Ok(())
}

/// A product of a model, and its adapter.
#[derive(Clone, PartialEq, Debug)]
pub struct AdapterPlace {
    /// The path of the module that has the weight, as PEFT calls it.
    pub module: String,
    /// The weight's parameter.
    pub param: String,
    /// The weight is stored `[in, out]`.
    pub turned: bool,
    /// By what the branch is multiplied, and the parameters A and B; none if it has no adapter.
    pub adapter: Option<(f64, [String; 2])>,
    /// The module of the embedding that has the same weight, if one has.
    pub tied: Option<String>,
}

/// All products of a model with their adapters, which are those that were asked for.
pub fn places(source: &Source, l: &Lora) -> Vec<AdapterPlace> {
    let (f, weights) = (&source.module.funcs[0], &source.weights);
    let made = there(&f.nodes, f, weights);
    let one = |x: Linear| {
        let w = &weights[x.weight];
        let (first, second) = x.names(w);
        let slice = w.param.strip_prefix(&*w.tensor).filter(|_| w.part.is_some()).unwrap_or("");
        let param = |tensor: &str, slice: &str| {
            let mut of = weights.iter().filter(|a| a.tensor == tensor);
            of.find(|a| a.part.is_none() || a.param.ends_with(slice)).map(|a| a.param.clone())
        };
        let adapter = made
            .get(&second)
            .and_then(|_| Some((l.scale(&x.module), [param(&first, "")?, param(&second, slice)?])));
        let (param, turned) = (w.param.clone(), x.out > x.input);
        AdapterPlace { module: x.module, param, turned, adapter, tied: x.tied }
    };
    linears(f, weights).into_iter().map(one).collect()
}

/// Values of adapters, by which tokens they are of where `--sp` cuts tokens.
#[derive(Default)]
pub(crate) struct AdapterTokens {
    /// Those that a product reads whose results are split over `tp`: all. What the product with A makes.
    pub all: Vec<Value>,
    /// Those of a product that is not split: a rank's own. What all three products make.
    pub own: Vec<Value>,
}

/// The tokens of adapters; `behind` is what products take for a parameter.
pub(crate) fn tokens(
    f: &Func,
    weights: &BTreeMap<&str, &Weight>,
    behind: impl Fn(Value) -> Value,
) -> AdapterTokens {
    let makers = f.makers();
    // A factor may have been moved behind a product.
    let back = |v: Value, out: &mut Vec<Value>| {
        let mut next = Some(v);
        while let Some(v) = next {
            out.push(v);
            let own = makers[v].map(|m| &f.nodes[m as usize].ins[..]);
            next = own.filter(|ins| ins.len() == 1).map(|ins| ins[0]);
        }
    };
    let second = f.args.iter().filter(|a| is_param(a)).filter_map(|a| {
        let w = *weights.get(&*a.role.as_ref()?.name)?;
        let is = w.experts.is_none() && w.tensor.ends_with(".lora_B.weight");
        is.then_some((behind(a.value), w))
    });
    let second: BTreeMap<Value, &Weight> = second.collect();
    let mut out = AdapterTokens::default();
    for n in &f.nodes {
        let Some(w) = n.ins.last().and_then(|v| second.get(v)) else { continue };
        let first = w.tensor.replace(".lora_B.", ".lora_A.");
        match (w.tp_dim, weights.get(&*first).and_then(|a| a.tp_dim)) {
            (Some(0), _) => back(n.ins[0], &mut out.all),
            (None, None) => {
                let sum = f.nodes.iter().find(|s| {
                    s.op.is_plain_sum() && s.ins.len() == 2 && {
                        let mut of = vec![];
                        back(s.ins[1], &mut of);
                        of.contains(&n.outs[0])
                    }
                });
                back(n.ins[0], &mut out.own);
                sum.iter().for_each(|s| {
                    back(s.ins[1], &mut out.own);
                    out.own.push(s.ins[0]);
                });
            }
            _by_rows => {}
        }
    }
    let rows = |v: &Value| f.ty(*v).rank() == 3;
    out.all.retain(rows);
    out.own.retain(rows);
    out
}

/// An adapter that a model has already.
struct KnownAdapter {
    rank: usize,
    /// What reads its branch: the factor, or the sum.
    next: Op,
}

impl KnownAdapter {
    fn agrees(&self, rank: usize, scale: f64, module: &str) -> Result<()> {
        let next = match scale {
            1.0 => Op::from(Add::same()),
            by => Op::from(Scale { by }),
        };
        if self.rank == rank && self.next == next {
            return Ok(());
        }
        let what = format!("{module} has an adapter of r={} already", self.rank);
        Err(Diag::new("lora-target", what)
            .at("--lora")
            .why(format!("here r={rank}, and its branch is times {scale}"))
            .help("give the values that the model was written with, or compile the base model"))
    }
}

/// The adapters of a model, by the tensor of B.
fn there(nodes: &[Node], f: &Func, weights: &[Weight]) -> BTreeMap<String, KnownAdapter> {
    let params = f.args.iter().filter(|a| is_param(a)).map(|a| a.value);
    let all = params.zip(weights).filter(|(_, w)| w.is_adapter() && w.init == Init::Zeros);
    let known = all.filter_map(|(v, w)| {
        let branch = nodes.iter().find(|n| n.ins.last() == Some(&v))?.outs[0];
        let next = nodes.iter().find(|n| n.ins.contains(&branch))?.op.clone();
        Some((w.tensor.clone(), KnownAdapter { rank: *w.shape.last()?, next }))
    });
    known.collect()
}

fn is_param(a: &Port) -> bool {
    a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param)
}

/// The inputs that draws depend on, which are added where the model has none.
fn drawn(f: &mut Func) -> Result<[Value; 2]> {
    let find = |f: &Func, fill| f.args.iter().find(|a| a.fills(fill)).map(|a| a.value);
    let rows = f.args.iter().find(|a| {
        a.input().is_some_and(|i| i.batch && i.seq == Some(1)) && f.ty(a.value).rank() == 2
    });
    let Some(sizes) = rows.map(|a| f.ty(a.value).sizes()) else {
        return Err(Diag::new("not-built", "dropout of adapters needs rows of tokens")
            .at("--lora")
            .rule("masks are drawn by the place of a token in its batch")
            .help("leave dropout= out"));
    };
    let mut input = |fill, name: &'static str, sizes: &[usize]| {
        find(f, fill).unwrap_or_else(|| {
            let name_of = Builder::new(&Default::default(), f).named(name);
            f.arg(Type::new(DType::I32, sizes), name_of, Some(Role::input(name)))
        })
    };
    Ok([input(Fill::Run, "run", &[3]), input(Fill::Places, "places", &sizes)])
}

impl Adapt<'_> {
    /// B A x, of the product of x and a weight.
    fn branch(
        &mut self,
        b: &mut Builder,
        x: &Linear,
        w: &Weight,
        op: &Op,
        ins: &[Value],
    ) -> Result<Value> {
        let r = self.l.rank(&x.module);
        let (first, second) = x.names(w);
        let (from, base) = (ins[x.operand], ins[x.of]);
        let [out, input] = x.sides(w);
        let stack: Vec<usize> = w.experts.into_iter().collect();
        let of = |dims: &[usize]| [&stack[..], dims].concat();
        let a = match self.made.get(&first) {
            Some(&a) => a,
            None => {
                let mut weight = adapter(w, first.clone(), of(&[r, input]));
                weight.init = Init::Uniform(1.0 / (input as f64).sqrt());
                weight.tp_dim = w.tp_dim.filter(|&d| d == x.input).map(|_| stack.len() + 1);
                let a = self.param(b, "lora_A", base, weight);
                self.made.insert(first.clone(), a);
                a
            }
        };
        let mut weight = adapter(w, second.clone(), of(&[out, r]));
        weight.tp_dim = w.tp_dim.filter(|&d| d == x.out).map(|_| stack.len());
        if let Some(p) = w.part {
            // A cut of all dims but that of results would cut A.
            weight.part = Some(TensorSlice { dim: stack.len(), ..p });
            weight.tensor_shape[stack.len()] = w.tensor_shape[p.dim];
            let slice = w.param.strip_prefix(&*w.tensor).unwrap_or(".part");
            weight.param = format!("{second}{slice}");
        }
        // A weight that two products take has one adapter.
        let second = match self.made.get(&weight.param) {
            Some(&known) => known,
            None => {
                let name = weight.param.clone();
                let made = self.param(b, "lora_B", base, weight);
                self.made.insert(name, made);
                made
            }
        };
        let [down, up] = products(op, x, b, ins);
        let low = match self.low.get(&(first.clone(), from)) {
            Some(&low) => low,
            None => {
                let kept = self.dropped(b, x, from)?;
                let with = |v: Value, by: Value| {
                    let mut all: Vec<Value> = ins.to_vec();
                    (all[x.operand], all[x.of]) = (v, by);
                    all
                };
                let low = b.push("low", down, &ordered(x, with(kept, a)));
                self.low.insert((first, from), low);
                low
            }
        };
        let mut all = ins.to_vec();
        (all[x.operand], all[x.of]) = (low, second);
        Ok(b.push("branch", up, &ordered(x, all)))
    }

    /// What a branch reads, with elements set to 0 at random.
    fn dropped(&self, b: &mut Builder, x: &Linear, v: Value) -> Result<Value> {
        let Some([run, places]) = self.drawn else { return Ok(v) };
        let (rows, own) = (b.ty(places).sizes(), b.ty(v).sizes());
        if own.len() != 3 || own[..2] != rows[..] {
            return Err(Diag::new("not-built", format!("dropout of what {} reads", x.module))
                .at("--lora")
                .rule("dropout of adapters acts on values of rows, tokens and one more dim")
                .help("leave dropout= out, or choose other targets"));
        }
        let draw = Draw {
            rule: RuleAttr::new("k,bs->bsh", &[1, 2]),
            from: Distribution::Keep(1.0 - self.l.dropout),
            stream: StreamName::of(&format!("{}.lora_dropout", x.module)),
            sizes: Sizes([(Letter(b'h' - b'a'), own[2])].into_iter().collect()),
        };
        let kept = b.push("kept", draw, &[run, places]);
        Ok(b.push("dropped", Mul::same(), &[v, kept]))
    }

    /// A new parameter, which stands behind the one that it belongs to.
    fn param(&mut self, b: &mut Builder, what: &str, base: Value, weight: Weight) -> Value {
        let of = b.f.name(base).clone();
        let name = Name { hint: format!("{}_{what}", of.hint).into(), dup: 0, ..of };
        let dtype = b.ty(base).dtype;
        let value = b.f.value(Type::new(dtype, &weight.shape), name);
        self.new.entry(base).or_default().push(New { value, weight });
        value
    }

    /// Puts the new parameters among the others.
    fn declare(mut self, source: &mut Source) {
        let f = &mut source.module.funcs[0];
        let mut weights = std::mem::take(&mut source.weights).into_iter();
        for a in std::mem::take(&mut f.args) {
            let value = a.value;
            if is_param(&a) {
                source.weights.extend(weights.next());
            }
            f.args.push(a);
            for New { value, weight } in self.new.remove(&value).unwrap_or_default() {
                let role = Some(Role::new(RoleKind::Param, weight.param.as_str()));
                f.args.push(Port { value, role });
                source.weights.push(weight);
            }
        }
    }
}

/// A tensor of an adapter: whole, and in parts only as its base is.
fn adapter(base: &Weight, tensor: String, shape: Vec<usize>) -> Weight {
    let mut w = Weight::plain(&tensor, &shape);
    w.init = Init::Zeros;
    w.experts = base.experts;
    if base.is_stacked() {
        w.param = tensor.replacen(".{}", "", 1);
        w.tensor_shape.remove(0);
    }
    w
}

/// The products with A and with B, in place of that with a weight.
fn products(op: &Op, x: &Linear, b: &Builder, ins: &[Value]) -> [Op; 2] {
    if x.experts {
        return [GroupedDot {}.into(), GroupedDot {}.into()];
    }
    let ranks: Vec<usize> = ins.iter().map(|&v| b.ty(v).rank()).collect();
    let def = op.def();
    let rule = def.rule(&ranks);
    let (from, weight, out) = (&rule.ins[x.operand], &rule.ins[x.of], &rule.outs[0]);
    let letters = rule.letters();
    let free = (0..52).map(Letter).filter(|l| !letters.contains(l));
    let r = Group::one(free.clone().find(|l| l.name() == 'r').or(free.clone().next()).expect("52"));
    let [output, input] = [x.out, x.input].map(|d| weight[d]);
    let low: Dims = from.iter().map(|g| if *g == input { r } else { *g }).collect();
    let (a, b): (Dims, Dims) = (Dims::from_slice(&[r, input]), Dims::from_slice(&[output, r]));
    let dot = |x: &Dims, w: &Dims, y: &Dims| {
        Op::from(Dot { rule: RuleAttr(Arc::new(Rule::of(&[x, w], &[y]))) })
    };
    debug_assert!(!has_letter(out, r.letters()[0]));
    [dot(from, &a, &low), dot(&low, &b, out)]
}

/// Operands of a new product: x first, whatever the order of the one that it stands beside.
fn ordered(x: &Linear, all: Vec<Value>) -> Vec<Value> {
    match x.experts {
        true => all,
        false => vec![all[x.operand], all[x.of]],
    }
}

/// Scopes and paths: what PEFT calls the module of a product. Checkpoints may lack the root of a model, or have another
/// name for it.
fn module_of(scope: &str, tensor: &str) -> String {
    let own = tensor.strip_suffix(".weight").unwrap_or(tensor);
    let is_end = scope.strip_suffix(own).is_some_and(|s| s.is_empty() || s.ends_with('.'));
    let below = |path: &str| path.split_once('.').map(|p| p.1.to_string());
    let is_root = below(scope).is_some() && below(scope) == below(own);
    if is_end || is_root { scope.into() } else { own.into() }
}

/// The scope of a node, as text.
fn path(f: &Func, s: Scope) -> &str {
    &f.scope_info(s).path
}

#[cfg(test)]
mod tests {
    use super::module_of;

    /// A checkpoint may lack the root that modules have, or call it otherwise; that of a model which holds another one has
    /// the names of its own modules.
    #[test]
    fn modules_are_those_of_the_class() {
        for (scope, tensor, module) in [
            ("transformer.h.0.c_attn", "h.0.c_attn", "transformer.h.0.c_attn"),
            ("model.layers.0.q_proj", "backbone.layers.0.q_proj", "model.layers.0.q_proj"),
            (
                "model.layers.0.q_proj",
                "model.language_model.layers.0.q_proj",
                "model.language_model.layers.0.q_proj",
            ),
            ("lm_head", "language_model.lm_head", "language_model.lm_head"),
        ] {
            assert_eq!(module_of(scope, &format!("{tensor}.weight")), module, "{tensor}");
        }
    }
}
