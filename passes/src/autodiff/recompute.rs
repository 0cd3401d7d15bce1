//! Which values backward computes again instead of taking them from forward.
//!
//! Views and gathers are always made again: they cost nothing, or what they cost is stated as
//! "re-gathers" (Korthikanti et al., 2022, §4.2.2). So are numbers at random, which are drawn again, and what element-wise ops make in f32 of 16-bit
//! values. Beyond them a policy chooses among the nodes of
//! decoder layers. What another layer uses is always saved, so recomputation never reaches back
//! beyond the layer it serves; under [`Recompute::Sqrt`] a run of layers takes the place of the
//! layer. Same inputs, same ops, same order: the same bits.

use super::mincut::{Forward, redone};
use super::named::NamedNodes;
use serde::{Deserialize, Serialize};
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Kind, NAMES};
use shardc_ir::types::DType;
use std::collections::{BTreeMap, BTreeSet};

/// What is recomputed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Views and gathers only.
    None,
    /// Also what is cheap: activations, norms and rotations, but no product with a weight, no
    /// attention and no collective.
    Selective,
    /// Everything inside a layer: only what enters it is saved.
    Full,
    /// Everything inside a run of layers: only what enters a run is saved (Chen et al., 2016).
    Sqrt,
    /// Element-wise work, where that saves bytes: a minimum cut.
    #[default]
    Elementwise,
    /// Everything inside every n-th layer of a stage, as torchtitan's selective checkpointing by a number.
    Every(usize),
    /// Everything inside the first n layers of each stage, as Megatron's `--recompute-method block`.
    Layers(usize),
    /// Also ops of these names, and [`GROUPS`].
    Ops(Vec<String>),
    /// So many layers of each stage by one policy, the next ones by another, and all others by the last; each is
    /// one that says of a layer by itself what it keeps.
    Mix(Vec<(usize, Recompute)>, Box<Recompute>),
    /// The cheapest of the others that fits in memory. It is chosen before the passes run.
    Fit,
}

/// Words for several ops at once, beside the names of ops.
///
/// - `norms`: of the scopes in which an `rsqrt` stands, everything that is cheap.
/// - `activations`: `gelu`, `silu`, `tanh` and `logistic`, and a `mul` that gates with one.
/// - `selective`, `elementwise`: as alone; `elementwise` cuts around what else is named.
/// - `mla_up_proj`: what makes queries, keys and values of latent vectors (as Megatron-LM names it).
/// - `moe_act`: the activations of experts.
/// - `experts`: their products, too; no exchange.
/// - `moe`: everything of a layer's experts, with router, exchanges and what all tokens pass.
pub const GROUPS: [&str; 8] = [
    "norms",
    "activations",
    "selective",
    "elementwise",
    "mla_up_proj",
    "moe_act",
    "experts",
    "moe",
];

impl Recompute {
    /// True if what is element-wise is saved by a minimum cut.
    pub fn cuts(&self) -> bool {
        match self {
            Recompute::Mix(_, rest) => rest.cuts(),
            Recompute::Ops(names) => names.iter().any(|n| n == "elementwise"),
            policy => *policy == Recompute::Elementwise,
        }
    }

    /// Reads `none`, `elementwise`, `selective`, `full`, `sqrt`, `fit`, `every:N`, `layers:N`, `mix:N*…+…`, or
    /// `ops:` with names of ops and groups joined by commas; the error names the first that is none of these.
    pub fn parse(text: &str) -> Result<Recompute, String> {
        let number = |n: &str| n.parse().ok().filter(|&n: &usize| n > 0).ok_or(text.to_string());
        match text.split_once(':').unwrap_or((text, "")) {
            ("none", "") => Ok(Recompute::None),
            ("elementwise", "") => Ok(Recompute::Elementwise),
            ("selective", "") => Ok(Recompute::Selective),
            ("full", "") => Ok(Recompute::Full),
            ("sqrt", "") => Ok(Recompute::Sqrt),
            ("fit", "") => Ok(Recompute::Fit),
            ("every", n) => number(n).map(Recompute::Every),
            ("layers", n) => number(n).map(Recompute::Layers),
            ("mix", parts) => mix(parts).ok_or(text.to_string()),
            ("ops", names) => {
                let names: Vec<String> = names.split(',').map(|n| n.trim().to_string()).collect();
                let known = |n: &str| NAMES.contains(&n) || GROUPS.contains(&n);
                match names.iter().find(|n| !known(n)) {
                    Some(n) => Err(n.clone()),
                    None => Ok(Recompute::Ops(names)),
                }
            }
            _other => Err(text.to_string()),
        }
    }
}

/// As the flag has it.
impl std::fmt::Display for Recompute {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Elementwise => "elementwise",
            Recompute::Every(n) => return write!(f, "every:{n}"),
            Recompute::Layers(n) => return write!(f, "layers:{n}"),
            Recompute::Selective => "selective",
            Recompute::Full => "full",
            Recompute::Sqrt => "sqrt",
            Recompute::Fit => "fit",
            Recompute::Ops(names) => return write!(f, "ops:{}", names.join(",")),
            Recompute::Mix(first, rest) => {
                f.write_str("mix:")?;
                for (n, policy) in first {
                    write!(f, "{n}*{policy}+")?;
                }
                return write!(f, "{rest}");
            }
        })
    }
}

/// Most policies of a mix but the last.
const MOST_PARTS: usize = 16;

/// Reads `3*full+2*selective+elementwise`.
fn mix(parts: &str) -> Option<Recompute> {
    let by_layer = |text: &str| {
        use Recompute::{Elementwise, Full, None, Ops, Selective};
        let is = |p: &Recompute| matches!(p, None | Elementwise | Selective | Full | Ops(_));
        Recompute::parse(text).ok().filter(is)
    };
    let (first, rest) = parts.rsplit_once('+')?;
    let counted = |part: &str| {
        let (n, policy) = part.split_once('*')?;
        Some((n.parse().ok().filter(|&n: &usize| n > 0)?, by_layer(policy)?))
    };
    let first = first.split('+').take(MOST_PARTS + 1).map(counted).collect::<Option<Vec<_>>>()?;
    if first.len() > MOST_PARTS {
        return None;
    }
    Some(Recompute::Mix(first, Box::new(by_layer(rest)?)))
}

/// A joint program, and what is known of how it will run.
pub(super) struct Program<'a> {
    pub mesh: &'a Mesh,
    pub func: &'a Func,
    /// By stage: most microbatches that are between their forward and the end of their backward.
    pub in_flight: &'a [usize],
}

/// Per node of the forward part, whether backward makes its results again.
pub(super) fn recomputed(p: &Program, policy: &Recompute) -> Vec<bool> {
    if let Recompute::Mix(first, rest) = policy {
        return mixed(p, first, rest);
    }
    let (j, forward) = (p.func, p.func.forward_nodes());
    let layer = |n: usize| j.scope_info(j.nodes[n].scope).layer;
    let runs = if *policy == Recompute::Sqrt { runs(p) } else { BTreeMap::new() };
    // What belongs to no layer is a run of its own; so is a layer, unless runs are longer.
    let run = |n: usize| layer(n).map(|l| runs.get(&l).copied().unwrap_or(l));
    let makers = j.makers();
    let maker = |v: Value| makers[v].map(|m| m as usize).filter(|&m| m < forward);
    let mut leaves = vec![false; forward];
    for n in 0..forward {
        for m in j.nodes[n].ins.iter().filter_map(|&v| maker(v)).filter(|&m| run(m) != run(n)) {
            leaves[m] = true;
        }
    }
    for m in j.results.iter().filter_map(|r| maker(r.value)) {
        leaves[m] = true;
    }
    // What leaves its layer is kept as it is: else all that went into it would leave in its place.
    let mut wide = widened(j, forward);
    wide.iter_mut().zip(&leaves).for_each(|(w, leaves)| *w &= !leaves);
    let again = |n: usize| {
        let op = &j.nodes[n].op;
        let drawn = op.facts().kind == Kind::Constant && !j.nodes[n].ins.is_empty();
        op.def().is_view() || op.gathers() || drawn || wide[n]
    };
    // What costs nothing and leaves is made again elsewhere: then what it shows leaves.
    for n in (0..forward).rev().filter(|&n| again(n)) {
        if leaves[n] {
            j.nodes[n].ins.iter().filter_map(|&v| maker(v)).for_each(|m| leaves[m] = true);
        }
    }
    let named = NamedNodes::of(j, forward);
    let places = places(j, forward);
    let place = |n: usize| places[&(j.stage_of(&j.nodes[n]), layer(n).expect("asked of layers"))];
    let chosen = |n: usize| {
        if again(n) {
            return true;
        }
        if leaves[n] || layer(n).is_none() {
            return false;
        }
        match policy {
            Recompute::None | Recompute::Elementwise => false,
            Recompute::Full | Recompute::Sqrt => true,
            Recompute::Selective => named.has(n, "selective"),
            Recompute::Every(every) => (place(n) + 1) % every == 0,
            Recompute::Layers(first) => place(n) < *first,
            Recompute::Ops(names) => names.iter().any(|name| named.has(n, name)),
            Recompute::Mix(..) => unreachable!("of other policies"),
            Recompute::Fit => unreachable!("the pipeline refuses what is not chosen yet"),
        }
    };
    let always: Vec<bool> = (0..forward).map(chosen).collect();
    if !policy.cuts() {
        return always;
    }
    let runs: Vec<Option<u32>> = (0..forward).map(run).collect();
    let all = Forward { mesh: p.mesh, func: j, runs: &runs, always: &always, leaves: &leaves };
    redone(&all).iter().zip(&always).map(|(redone, always)| redone | always).collect()
}

/// Each layer by its policy: what a policy does in one does not depend on the others.
fn mixed(p: &Program, first: &[(usize, Recompute)], rest: &Recompute) -> Vec<bool> {
    let (j, forward) = (p.func, p.func.forward_nodes());
    let places = places(j, forward);
    let mut out = recomputed(p, rest);
    let mut from = 0usize;
    for (count, policy) in first {
        let by = recomputed(p, policy);
        for (n, node) in j.nodes[..forward].iter().enumerate() {
            let layer = j.scope_info(node.scope).layer;
            let place = layer.map(|l| places[&(j.stage_of(node), l)]);
            if place.is_some_and(|at| (from..from.saturating_add(*count)).contains(&at)) {
                out[n] = by[n];
            }
        }
        from = from.saturating_add(*count);
    }
    out
}

/// By stage and layer, which of the layers of its stage it is.
fn places(j: &Func, forward: usize) -> BTreeMap<(usize, u32), usize> {
    let layer = |n: &Node| Some((j.stage_of(n), j.scope_info(n.scope).layer?));
    let all: BTreeSet<(usize, u32)> = j.nodes[..forward].iter().filter_map(layer).collect();
    let first = |stage: usize| all.range(..(stage, 0)).count();
    all.iter().enumerate().map(|(i, &at)| (at, i - first(at.0))).collect()
}

/// Per node of the forward part, whether its result is f32 that element-wise ops make of 16-bit
/// values: those are saved, in half the bytes, and what is made of them is made again.
pub(super) fn widened(j: &Func, forward: usize) -> Vec<bool> {
    let mut wide = j.per_value(false);
    let one = |n: &Node| {
        let largest = n.ins.iter().map(|&v| j.ty(v).elements()).max().unwrap_or(0);
        let is = n.op.collective().is_none()
            && n.outs.iter().all(|&o| j.ty(o).dtype == DType::F32 && j.ty(o).elements() >= largest)
            && n.ins.iter().any(|&v| {
                let half = j.ty(v).dtype.is_half();
                wide[v] || half && n.op.facts().kind == Kind::Conversion
            });
        n.outs.iter().for_each(|o| wide[o] = is);
        is
    };
    j.nodes[..forward].iter().map(one).collect()
}

/// The first layer of the run of each layer, stage by stage.
///
/// Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.2, cut n equal
/// operations into √n runs: what is saved (the inputs of the runs) and what is made at once (the
/// inside of one run) then need the same. Here a layer keeps `a` bytes for every microbatch in
/// flight and makes `b` bytes anew, so k layers in a run are chosen where `in_flight a n / k + b k`
/// is least, which is at `k = √(in_flight a n / b)`. Of short stages each layer is a run.
fn runs(p: &Program) -> BTreeMap<u32, u32> {
    let j = p.func;
    let layer = |n: usize| j.scope_info(j.nodes[n].scope).layer;
    let (makers, forward) = (j.makers(), j.forward_nodes());
    // What a view shows.
    let mut shown = j.identity();
    // By stage and layer: values that other layers use, and values that backward uses.
    let mut found: BTreeMap<(usize, u32), [BTreeSet<Value>; 2]> = BTreeMap::new();
    for (n, node) in j.nodes.iter().enumerate() {
        if let Some(l) = layer(n).filter(|_| n < forward) {
            found.entry((j.stage_of(node), l)).or_default();
        }
        if node.op.def().is_view() {
            node.outs.iter().for_each(|o| shown[o] = shown[node.ins[0]]);
            continue;
        }
        for v in node.ins.iter().map(|v| shown[v]) {
            let maker = makers[v].map(|m| m as usize);
            let Some(m) = maker.filter(|&m| m < forward) else { continue };
            let Some(l) = layer(m) else { continue };
            let [leave, inside] = found.entry((j.stage_of(&j.nodes[m]), l)).or_default();
            if n >= forward {
                inside.insert(v);
            } else if layer(n) != Some(l) {
                leave.insert(v);
            }
        }
    }
    let bytes =
        |all: &BTreeSet<Value>| -> usize { all.iter().map(|&v| j.ty(v).local_bytes(p.mesh)).sum() };
    let mut out = BTreeMap::new();
    for stage in 0..p.in_flight.len() {
        let own = found.range((stage, 0)..=(stage, u32::MAX));
        let (layers, sizes): (Vec<u32>, Vec<_>) =
            own.map(|((_, l), [leave, inside])| (*l, (bytes(leave), bytes(inside)))).unzip();
        let n = layers.len();
        let kept = sizes.iter().map(|s| s.0).max().unwrap_or(0);
        let inside = sizes.iter().map(|s| s.1).max().unwrap_or(0);
        let flight = p.in_flight.get(stage).copied().unwrap_or(1).max(1);
        let needs = |count: usize| {
            let saved = kept.saturating_mul(count).saturating_mul(flight);
            saved.saturating_add(inside.saturating_mul(n.div_ceil(count)))
        };
        let Some(count) = (1..=n).rev().min_by_key(|&c| needs(c)) else { continue };
        for (i, &l) in layers.iter().enumerate() {
            // Runs of equal length, as far as they can be.
            let begin = (i * count / n * n).div_ceil(count);
            out.insert(l, layers[begin]);
        }
    }
    out
}
