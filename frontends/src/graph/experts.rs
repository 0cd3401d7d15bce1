//! A mixture of experts in the place of an MLP: router, choice, dispatch, products, combination.
//!
//! Written for one device: one shard has all tokens, and one buffer the rows of all experts. The pass `experts`
//! lays it out for a mesh.
//!
//! Letters: z shards of tokens, t tokens of a shard, k choices, e experts, n groups that the router chooses first.

use super::block::{Cx, MlpParams, activate, mlp};
use super::parts::{self, LinearParams, letter_sizes, rule, spread};
use crate::family::WeightOrder;
use crate::sizes::{Divisor, Routing};
use shardc_ir::attr::{Broadcast, Padding};
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::*;

/// The parameters of a mixture of experts.
pub(super) struct MoeParams {
    pub scope: String,
    pub router_scope: String,
    /// Scope of the list of experts.
    pub list_scope: String,
    /// [e, h].
    pub router: Value,
    /// Of its logits; [e].
    pub router_bias: Option<Value>,
    /// Added to the scores for the choice only; [e], or [1, e].
    pub bias: Option<Value>,
    pub order: WeightOrder,
    /// To the vectors that experts take, and back.
    pub narrowed: Option<[LinearParams; 2]>,
    pub gate: Option<Product>,
    pub up: Product,
    pub down: Product,
    pub shared: Option<SharedParams>,
}

/// A product of all experts.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// [e, out, in], or in the other order.
    pub weight: Value,
    /// [e, out].
    pub bias: Option<Value>,
}

/// What every token passes.
pub(super) struct SharedParams {
    pub mlp: MlpParams,
    /// [1, h] and scope, of a product whose sigmoid it is multiplied by.
    pub gate: Option<(Value, String)>,
}

/// What the experts of a layer, or of several, had to do: [e] each, over all tokens.
#[derive(Clone, Copy)]
pub(super) struct Load {
    /// Copies of tokens that chose each expert.
    pub chosen: Value,
    /// Sums of the scores of each expert.
    pub score: Value,
}

/// What the router of a layer tells of a microbatch, of what training asks for.
#[derive(Clone, Copy, Default)]
pub(super) struct RouterStats {
    /// For the auxiliary loss.
    pub load: Option<Load>,
    /// For the z-loss: the sum over tokens.
    pub z: Option<Value>,
    /// The correcting bias and the copies that chose each expert.
    pub chosen: Option<(Value, Value)>,
}

/// The mixture of a normed hidden state [b, s, h]; and what the router tells.
pub(super) fn experts(b: &mut Builder, cx: &Cx, p: &MoeParams, h: Value) -> (Value, RouterStats) {
    let facts = cx.arch.facts.experts.expect("a family with experts");
    let routing = &cx.arch.routing;
    b.enter(&p.scope);
    let x = to_tokens(b, h);
    b.enter(&p.router_scope);
    let logits = b.push("router_logits", Dot::by("zth,eh->zte", &[3, 2]), &[x, p.router]);
    let logits = p.router_bias.map_or(logits, |bias| {
        b.push("router_logits", Add { rule: spread("zte,e->zte", &[3, 1]) }, &[logits, bias])
    });
    let (scores, e) = match routing.sigmoid {
        false => {
            let e = exponentials(b, logits);
            (b.push("scores", Div { rule: by_token() }, &[e.all, e.sum]), Some(e))
        }
        true => (b.push("scores", Logistic {}, &[logits]), None),
    };
    let choice = match p.bias {
        None if routing.groups.is_none() => scores,
        bias => {
            let own = b.push("scores", StopGradient {}, &[scores]);
            let biased = bias.map_or(own, |bias| {
                let bias = row(b, bias);
                b.push("biased", Add { rule: spread("zte,e->zte", &[3, 1]) }, &[own, bias])
            });
            in_groups(b, biased, facts.experts, routing)
        }
    };
    let k = letter_sizes(&[('k', facts.top_k)]);
    let index = b.push("expert", TopK { rule: rule("zte->ztk", &[3]), sizes: k }, &[choice]);
    let gates = b.push("gates", Take::by("zte,ztk->ztk", &[3, 3]), &[scores, index]);
    let real = cx.padding.map(|segments| Real::of(b, segments));
    let index = real.as_ref().map_or(index, |r| r.chosen(b, index));
    let gates = weighed(b, routing, gates);
    let mut told = tell(b, routing, p.bias, scores, index, real.as_ref());
    told.z = routing.z.map(|_| {
        let e = e.unwrap_or_else(|| exponentials(b, logits));
        let log = b.push("lse", Log {}, &[e.sum]);
        let lse = b.push("lse", Add::same(), &[log, e.max]);
        let own = real.as_ref().map_or(lse, |r| b.push("lse", Mul::same(), &[lse, r.is]));
        b.push("z_sum", Dot::by("zt,zt->", &[2, 2]), &[own, lse])
    });
    b.enter(&p.scope);
    // All experts share a buffer that never lacks a row: a mesh may ask for less.
    let rows = b.ty(index).dims[1].size * facts.top_k.min(facts.experts);
    let route = Route::new(1, facts.experts, rows, None);
    let routed = b.push_n(&["slot", "counts"], route, &[index]);
    let (slot, counts) = (routed[0], routed[1]);
    // Copies that were dropped count for nothing.
    let kept = b.push("kept", AtLeast { bound: 0.0 }, &[slot]);
    let dispatch = Dispatch::new(1, rows);
    // Gates, and 1 of copies that were not dropped: one stands before the products, one behind.
    let (into, out_of) = match routing.before {
        true => (b.push("gates", Mul::same(), &[gates, kept]), kept),
        false => (kept, gates),
    };
    let x = p.narrowed.as_ref().map_or(x, |[into, _]| {
        let narrow = parts::linear(b, "narrow", into, h, 'h', 'l');
        b.enter(&p.scope);
        to_tokens(b, narrow)
    });
    let rows = b.push("rows", dispatch.clone(), &[x, slot, into]);
    let one = p.up.bias.map(|_| {
        let one = b.push("one", Narrow::new(0, 1), &[index]);
        let one = b.push("one", AtLeast { bound: f64::NEG_INFINITY }, &[one]);
        let one = b.push("one", dispatch, &[one, slot, kept]);
        b.note("goes with each copy, for the bias of its expert");
        one
    });
    let out = of_rows(b, cx, p, [rows, counts], one);
    b.enter(&p.scope);
    let y = b.push("mlp_out", Unpermute {}, &[out, slot, out_of]);
    let y = p.down.bias.map_or(y, |bias| {
        let bias = of_tokens(b, [out_of, kept, index], bias);
        b.push("mlp_out", Add::same(), &[y, bias])
    });
    let y = from_tokens(b, y, h);
    let y = p
        .narrowed
        .as_ref()
        .map_or(y, |[_, out_of]| parts::linear(b, "mlp_out", out_of, y, 'l', 'h'));
    let y = match &p.shared {
        None => y,
        Some(s) => {
            let beside = mlp(b, cx, &s.mlp, h);
            let beside = s.gate.as_ref().map_or(beside, |(weight, scope)| {
                b.enter(scope);
                let gate = b.push("gate", Dot::by("bsh,oh->bso", &[3, 2]), &[h, *weight]);
                let gate = b.push("gate", ReduceSum { rule: rule("bso->bs", &[3]) }, &[gate]);
                let gate = b.push("gate", Logistic {}, &[gate]);
                b.push("mlp_out", Mul { rule: spread("bsh,bs->bsh", &[3, 2]) }, &[beside, gate])
            });
            b.enter(&p.scope);
            b.push("mlp_out", Add::same(), &[y, beside])
        }
    };
    (y, told)
}

/// Gates, over their sum and times their factor, as routing says.
fn weighed(b: &mut Builder, routing: &Routing, gates: Value) -> Value {
    let gates = match routing.normed {
        None => gates,
        Some(divisor) => {
            let sum = b.push("sum", ReduceSum { rule: rule("ztk->zt", &[3]) }, &[gates]);
            let sum = match divisor {
                Divisor::Plus(0.0) => sum,
                Divisor::Plus(by) => b.push("sum", Shift { by }, &[sum]),
                Divisor::AtLeast(lo) => b.push("sum", Clamp { lo, hi: f64::INFINITY }, &[sum]),
            };
            b.push("gates", Div { rule: spread("ztk,zt->ztk", &[3, 2]) }, &[gates, sum])
        }
    };
    match routing.scale {
        1.0 => gates,
        by => b.push("gates", Scale { by }, &[gates]),
    }
}

/// What experts make of rows [g, z, c, h]; `one` stands for a row where they have biases.
fn of_rows(
    b: &mut Builder,
    cx: &Cx,
    p: &MoeParams,
    [rows, counts]: [Value; 2],
    one: Option<Value>,
) -> Value {
    b.enter(&p.list_scope);
    let times = |b: &mut Builder, hint, x, weight| match p.order {
        WeightOrder::OutIn => b.push(hint, GroupedDot {}, &[x, counts, weight]),
        WeightOrder::InOut => b.push(hint, GroupedDotT {}, &[x, counts, weight]),
    };
    let made = |b: &mut Builder, hint, product: Product| {
        let y = times(b, hint, rows, product.weight);
        product.bias.zip(one).map_or(y, |(bias, one)| {
            let column = rule("e(oi)->eoi", &[2]);
            let column = Reshape { rule: column, sizes: letter_sizes(&[('i', 1)]) };
            let column = b.push("bias", column, &[bias]);
            let bias = b.push("bias", GroupedDot {}, &[one, counts, column]);
            b.push(hint, Add::same(), &[y, bias])
        })
    };
    let gate = p.gate.map(|gate| made(b, "gate", gate));
    let up = made(b, "up", p.up);
    let inner = match (gate, cx.arch.routing.clamped) {
        (None, _) => activate(b, cx.arch.activation, up),
        (Some(gate), None) => {
            let inner = activate(b, cx.arch.activation, gate);
            b.push("mlp", Mul::same(), &[inner, up])
        }
        (Some(gate), Some([alpha, limit])) => {
            let gate = b.push("gate", Clamp { lo: f64::NEG_INFINITY, hi: limit }, &[gate]);
            let up = b.push("up", Clamp { lo: -limit, hi: limit }, &[up]);
            let up = b.push("up", Shift { by: 1.0 }, &[up]);
            let inner = b.push("act", Silu { beta: Some(alpha) }, &[gate]);
            b.push("mlp", Mul::same(), &[inner, up])
        }
    };
    times(b, "expert_out", inner, p.down.weight)
}

/// Of tokens the biases [e, h] of their experts times gates, without copies that were dropped: [z,
/// t, h]. Behind what experts make, where it is added once however their width is split.
fn of_tokens(b: &mut Builder, [gates, kept, index]: [Value; 3], bias: Value) -> Value {
    let experts = b.ty(bias).dims[0].size;
    let own = b.push("gates", Mul::same(), &[gates, kept]);
    let put = IndexAdd {
        rule: rule("ztk,ztk->zte", &[3, 3]),
        sizes: letter_sizes(&[('e', experts)]),
        padding: Padding::None,
    };
    let each = b.push("gates", put, &[own, index]);
    b.push("bias", Dot::by("zte,eh->zth", &[3, 2]), &[each, bias])
}

/// Which tokens are not padding: that chooses no expert, and the router tells nothing of it.
struct Real {
    /// [z, t]: 1 of a token, 0 of padding.
    is: Value,
    /// [z, t]: negative of padding.
    segments: Value,
}

impl Real {
    /// By segments [b, s].
    fn of(b: &mut Builder, segments: Value) -> Real {
        let rule = rule("(ib)s->i(bs)", &[2]);
        let own = Reshape { rule, sizes: letter_sizes(&[('i', 1)]) };
        let segments = b.push("segment", own, &[segments]);
        Real { is: b.push("real", AtLeast { bound: 0.0 }, &[segments]), segments }
    }

    /// Experts of tokens, and of padding a number that is none's.
    fn chosen(&self, b: &mut Builder, index: Value) -> Value {
        let rule = spread("zt,ztk,zt->ztk", &[2, 3, 2]);
        let index = b.push("expert", Select { rule }, &[self.is, index, self.segments]);
        b.note("padding chooses none: its segment is -1");
        index
    }
}

/// A bias that is stored as a row [1, e], as [e].
fn row(b: &mut Builder, bias: Value) -> Value {
    if b.ty(bias).rank() == 1 {
        return bias;
    }
    let rule = rule("ie->(ie)", &[2]);
    b.push("bias", Reshape { rule, sizes: letter_sizes(&[]) }, &[bias])
}

fn by_token() -> Broadcast {
    spread("zte,zt->zte", &[3, 2])
}

/// Exponentials of logits minus the largest of their token.
struct Exponentials {
    max: Value,
    all: Value,
    sum: Value,
}

fn exponentials(b: &mut Builder, logits: Value) -> Exponentials {
    let max = b.push("max", ReduceMax { rule: rule("zte->zt", &[3]) }, &[logits]);
    let max = b.push("max", StopGradient {}, &[max]);
    let z = b.push("z", Sub { rule: by_token() }, &[logits, max]);
    let all = b.push("exp", Exp {}, &[z]);
    let sum = b.push("sum", ReduceSum { rule: rule("zte->zt", &[3]) }, &[all]);
    Exponentials { max, all, sum }
}

/// Scores with -inf for experts of groups that are not chosen: those whose best scores, so many,
/// have the largest sums are (DeepSeek-V2, 2.2.2; DeepSeek-V3, 2.1.2).
fn in_groups(b: &mut Builder, x: Value, experts: usize, routing: &Routing) -> Value {
    let Some((groups, kept)) = routing.groups else { return x };
    let split = Reshape { rule: rule("zt(ne)->ztne", &[3]), sizes: letter_sizes(&[('n', groups)]) };
    let each = b.push("by_group", split, &[x]);
    let two = TopK { rule: rule("ztne->ztnk", &[4]), sizes: letter_sizes(&[('k', routing.best)]) };
    let two = b.push("best", two, &[each]);
    let best = b.push("best", Take::by("ztne,ztnk->ztnk", &[4, 4]), &[each, two]);
    let sum = b.push("best", ReduceSum { rule: rule("ztnk->ztn", &[4]) }, &[best]);
    let top = TopK { rule: rule("ztn->ztk", &[3]), sizes: letter_sizes(&[('k', kept)]) };
    let top = b.push("group", top, &[sum]);
    let one = b.push("one", AtLeast { bound: 0.0 }, &[top]);
    let put = IndexAdd {
        rule: rule("ztk,ztk->ztn", &[3, 3]),
        sizes: letter_sizes(&[('n', groups)]),
        padding: Padding::None,
    };
    let mask = b.push("mask", put, &[one, top]);
    let mask = b.push("mask", Log {}, &[mask]);
    b.note("0 for a group that is chosen, -inf for the others");
    let all = b.push("by_group", Add { rule: spread("ztne,ztn->ztne", &[4, 3]) }, &[each, mask]);
    let join = Reshape {
        rule: rule("ztne->zt(ne)", &[4]),
        sizes: letter_sizes(&[('e', experts / groups)]),
    };
    b.push("biased", join, &[all])
}

/// What training asks of a router's scores and choices.
fn tell(
    b: &mut Builder,
    asks: &Routing,
    bias: Option<Value>,
    scores: Value,
    index: Value,
    real: Option<&Real>,
) -> RouterStats {
    let corrected = bias.filter(|_| asks.load);
    let mut told = RouterStats::default();
    if asks.aux.is_some() || corrected.is_some() {
        let experts = b.ty(scores).dims[2].size;
        let one = b.push("one", AtLeast { bound: 0.0 }, &[index]);
        let put = IndexAdd {
            rule: rule("ztk,ztk->e", &[3, 3]),
            sizes: letter_sizes(&[('e', experts)]),
            padding: Padding::None,
        };
        let chosen = b.push("chosen", put, &[one, index]);
        told.chosen = corrected.map(|bias| match b.ty(bias).rank() {
            1 => (bias, chosen),
            _row => {
                let rule = rule("(ie)->ie", &[1]);
                let sizes = letter_sizes(&[('i', 1)]);
                (bias, b.push("chosen", Reshape { rule, sizes }, &[chosen]))
            }
        });
        told.load = asks.aux.map(|_| {
            let scores = if asks.sigmoid { shares(b, scores) } else { scores };
            let own = |r: &Real| b.push("scores", Mul { rule: by_token() }, &[scores, r.is]);
            let scores = real.map_or(scores, own);
            let sum = ReduceSum { rule: rule("zte->e", &[3]) };
            Load { chosen, score: b.push("score", sum, &[scores]) }
        });
    }
    told
}

/// Scores over their sum by token (DeepSeek-V3, 2.1.2, the balance loss).
fn shares(b: &mut Builder, scores: Value) -> Value {
    let sum = b.push("sum", ReduceSum { rule: rule("zte->zt", &[3]) }, &[scores]);
    let sum = b.push("sum", Shift { by: 1e-20 }, &[sum]);
    b.push("shares", Div { rule: by_token() }, &[scores, sum])
}

/// What the routers of all layers so far tell together, for the losses.
pub(super) fn both(b: &mut Builder, x: RouterStats, y: RouterStats) -> RouterStats {
    let mut sum = |name: &'static str, x: Option<Value>, y: Option<Value>| match (x, y) {
        (Some(x), Some(y)) => Some(b.push(name, Add::same(), &[x, y])),
        (x, y) => x.or(y),
    };
    let chosen = sum("chosen", x.load.map(|l| l.chosen), y.load.map(|l| l.chosen));
    let score = sum("score", x.load.map(|l| l.score), y.load.map(|l| l.score));
    let z = sum("z_sum", x.z, y.z);
    let load = chosen.zip(score).map(|(chosen, score)| Load { chosen, score });
    RouterStats { load, z, chosen: None }
}

/// The tokens of a microbatch that losses of routers are means over.
#[derive(Clone, Copy)]
pub(super) struct Tokens {
    /// In each layer that has experts, of which there are so many.
    pub each: Each,
    pub layers: usize,
    /// Of layers behind these, together [].
    pub more: Option<Value>,
}

#[derive(Clone, Copy)]
pub(super) enum Each {
    All(usize),
    /// Those of a segment that is not negative [b, s]; and how many a microbatch has in the mean [].
    Real {
        segments: Value,
        mean: Value,
    },
}

/// A number that is known when a program is built, or a value.
#[derive(Clone, Copy)]
enum Count {
    Known(f64),
    Made(Value),
}

impl Count {
    fn divides(self, b: &mut Builder, hint: &'static str, x: Value) -> Value {
        match self {
            Count::Known(n) => b.push(hint, Scale { by: 1.0 / n }, &[x]),
            Count::Made(n) => b.push(hint, Div::same(), &[x, n]),
        }
    }
}

impl Tokens {
    /// How many they are over all layers, and with padding the share of the microbatch in the tokens of the step.
    fn count(self, b: &mut Builder) -> (Count, Option<Value>) {
        let layers = self.layers as f64;
        match (self.each, self.more) {
            (Each::All(n), None) => (Count::Known(n as f64 * layers), None),
            (Each::All(n), Some(more)) => {
                let by = n as f64 * layers;
                let all = b.push("tokens", Shift { by }, &[more]);
                (Count::Made(one_at_least(b, all)), None)
            }
            (Each::Real { segments, mean }, more) => {
                let real = b.push("real", AtLeast { bound: 0.0 }, &[segments]);
                let n = b.push("tokens", ReduceSum { rule: rule("bs->", &[2]) }, &[real]);
                let share = b.push("share", Div::same(), &[n, mean]);
                let all = b.push("tokens", Scale { by: layers }, &[n]);
                let all = more.map_or(all, |more| b.push("tokens", Add::same(), &[all, more]));
                (Count::Made(one_at_least(b, all)), Some(share))
            }
        }
    }
}

/// A microbatch of padding has loss 0, not NaN.
fn one_at_least(b: &mut Builder, n: Value) -> Value {
    b.push("tokens", Clamp { lo: 1.0, hi: f64::INFINITY }, &[n])
}

/// The auxiliary loss of a microbatch, times its coefficient: experts · sum over experts of the
/// fraction of choices times the mean score, both over all layers and tokens (Fedus et al., 2022,
/// *Switch Transformers*, (4); over layers as transformers does). With padding, times the share of the
/// microbatch in the tokens of the step.
pub(super) fn aux_loss(b: &mut Builder, all: Load, of: Tokens, by: f64) -> Value {
    b.enter("loss");
    let experts = b.ty(all.chosen).dims[0].size as f64;
    let product = b.push("aux", Dot::by("e,e->", &[1, 1]), &[all.chosen, all.score]);
    let (n, share) = of.count(b);
    if let Count::Known(n) = n {
        return b.push("aux", Scale { by: by * experts / (n * n) }, &[product]);
    }
    let once = n.divides(b, "aux", product);
    let twice = n.divides(b, "aux", once);
    let twice = share.map_or(twice, |share| b.push("aux", Mul::same(), &[twice, share]));
    b.push("aux", Scale { by: by * experts }, &[twice])
}

/// The z-loss of a microbatch, times its coefficient: the mean over tokens and layers of the square of
/// the logarithm of the sum of the exponentials of a router's logits (Zoph et al., 2022, *ST-MoE*, (5)).
/// With padding, times the share of the microbatch in the tokens of the step.
pub(super) fn z_loss(b: &mut Builder, sum: Value, of: Tokens, by: f64) -> Value {
    b.enter("loss");
    let (n, share) = of.count(b);
    if let Count::Known(n) = n {
        return b.push("z_loss", Scale { by: by / n }, &[sum]);
    }
    let mean = n.divides(b, "z", sum);
    let mean = share.map_or(mean, |share| b.push("z", Mul::same(), &[mean, share]));
    b.push("z_loss", Scale { by }, &[mean])
}

/// [b, s, h] as one shard of tokens, [1, t, h].
fn to_tokens(b: &mut Builder, x: Value) -> Value {
    let rule = rule("(ib)sh->i(bs)h", &[3]);
    b.push("tokens", Reshape { rule, sizes: letter_sizes(&[('i', 1)]) }, &[x])
}

/// The mirror of [`to_tokens`]; `like` is [b, s, h].
fn from_tokens(b: &mut Builder, x: Value, like: Value) -> Value {
    let sizes = letter_sizes(&[('i', 1), ('b', b.ty(like).dims[0].size)]);
    b.push("mlp_out", Reshape { rule: rule("i(bs)h->(ib)sh", &[3]), sizes }, &[x])
}
