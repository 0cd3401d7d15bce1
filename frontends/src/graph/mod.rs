//! Writes the program of a model: the mathematics on one device, scopes named as HF names modules.
//!
//! Letters of dims: b rows, s tokens, h hidden, n heads, g key-value heads, d elements of a head,
//! o joined heads, f MLP, v vocabulary, p positions, r rotary pairs. Those of experts: see `experts`.

mod block;
mod experts;
mod further;
pub(crate) mod loss;
mod mamba2;
mod parts;
mod recurrent;
mod weights;

use crate::Shape;
use crate::config::Config;
use crate::family::Family;
use crate::rope::Rope;
use crate::sizes::{Arch, Grown};
use block::Rotary;
use experts::{Each, RouterStats, Tokens};
use further::Depths;
use shardc_ir::attr::Padding;
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{Fill, Func, Input, Module, OF_ROUTERS, Port, Reads, Role, RoleKind, Value};
use shardc_ir::ops::unary::Rounding;
use shardc_ir::ops::{
    Add, Cast, Cos, Dot, Literal, Log, Mask, Mul, Round, Scale, Shift, Sin, Take,
};
use shardc_ir::plan::Mode;
use shardc_ir::types::{DType, Type};
use shardc_ir::weights::Weight;

/// A model's program and what belongs to it; see [`crate::Model`].
pub(crate) struct ModelGraph {
    pub module: Module,
    pub weights: Vec<Weight>,
    pub sequence: Vec<(Value, usize)>,
}

/// How a checkpoint calls its tensors.
pub(crate) struct TensorNames {
    /// Stands before every name but that of the output projection.
    pub prefix: String,
    /// The tensor of the embedding: the output projection's, if only that is stored of two that are tied.
    pub embedding: String,
}

impl TensorNames {
    /// The checkpoint's name of a part of a layer.
    pub fn of_layer(&self, f: &Family, i: usize, part: &str) -> String {
        format!("{}{}.{i}.{part}", self.prefix, f.layers)
    }
}

/// Builds the program. All sizes are checked before,
/// so the only errors are the config's.
pub(crate) fn build(
    f: &Family,
    c: &Config,
    arch: &Arch,
    shape: &Shape,
    names: &TensorNames,
) -> Result<ModelGraph> {
    let mut module = Module { funcs: vec![Func::new("model")], ..Module::default() };
    let b = &mut Builder::new(&module.mesh, &mut module.funcs[0]);
    // A layer has some 40 lines; there are at most `MAX_LAYERS`.
    b.f.reserve(arch.facts.layers * 40);
    let (params, weights) = weights::declare(b, f, c, arch, names)?;
    let mut input = |name: &'static str, sizes: &[usize]| {
        b.enter("");
        let named = b.named(name);
        b.f.arg(Type::new(DType::I32, sizes), named, Some(Role::input(name)))
    };
    let rows = [shape.batch, shape.seq];
    let ids = input("input_ids", &rows);
    let targets = (shape.mode == Mode::Train).then(|| input("targets", &rows));
    let positions = input("positions", &[shape.seq]);
    // Of documents attention sees by segments: within one, positions are as far apart as offsets are.
    let segments = shape.packed.then(|| input("segments", &rows));
    let turned = if shape.packed { input("offsets", &rows) } else { positions };

    let drawn = (arch.dropout != [0.0; 3])
        .then(|| parts::Drawn { run: input("run", &[3]), places: input("places", &rows) });
    let padding = segments.filter(|_| shape.padded && arch.facts.experts.is_some());
    let tells = arch.routing.aux.is_some() || arch.routing.z.is_some();
    let count = padding.filter(|_| targets.is_some() && tells);
    let count = count.map(|_| counted(b, "tokens", Fill::Count, &[]));
    let further = targets.filter(|_| arch.mtp.0 > 0);
    let depths = further.map(|_| depths(b, [shape.batch, shape.seq, arch.mtp.0]));

    let mut x = embedded(b, f, arch, &params, [ids, turned]);
    let [of_embedding, of_residual, of_attention] = arch
        .dropout
        .map(|rate| drawn.filter(|_| rate > 0.0).map(|d| parts::Dropout { drawn: d, rate }));
    x = parts::dropped(b, of_embedding, f.root, x, arch.facts.hidden);
    let rotary_of = |b: &mut Builder, name: &str, rope: &Option<Rope>| {
        let scope = format!("{}.{name}", f.root);
        rope.as_ref().map(|r| rotary(b, &scope, r, turned))
    };
    let everywhere = rotary_of(b, "rotary", &arch.rope);
    let local = rotary_of(b, "rotary_local", &arch.local_rope);
    let growth = arch.growth.filter(|g| !g.still || arch.turns.contains(&false));
    // Where they turn, by the positions that turn them.
    let growth = growth.map(|by| grown(b, f.root, by, if by.still { positions } else { turned }));
    let neighbours = recurrent::neighbours(b, segments, arch);
    let (mut told, mut counts, mut sequence) = (RouterStats::default(), vec![], vec![(x, 1)]);
    let of_layer = |i: usize| {
        let window = arch.windows[i];
        let mask = match window.filter(|_| arch.chunked) {
            None => Mask::causal(window),
            chunk => Mask { chunk, ..Mask::CAUSAL },
        };
        block::Cx {
            arch,
            rotary: local.filter(|_| window.is_some()).or(everywhere).filter(|_| arch.turns[i]),
            growth: growth.filter(|_| !(arch.turns[i] && arch.growth.is_some_and(|g| g.still))),
            positions,
            mask,
            segments,
            neighbours: &neighbours,
            padding,
            dropout: of_residual,
            attention_dropout: of_attention,
        }
    };
    for (i, block) in params.blocks.iter().enumerate() {
        let cx = of_layer(i);
        let own;
        if arch.beside {
            (x, own) = block::beside(b, &cx, block, x);
        } else {
            (x, own) = block::in_turn(b, &cx, block, x, |between| sequence.push((between, 1)));
        }
        sequence.push((x, 1));
        counts.extend(own.chosen);
        told = experts::both(b, told, own);
    }
    let x = parts::norm(b, &params.final_norm, arch.eps, x, "bsh");
    let logits = projected(b, f, arch, &params, x);
    let mut results = vec![];
    if let Some(t) = targets {
        let value = loss::sum_of_losses(b, logits, t);
        results.push(Port { value, role: Some(Role::new(RoleKind::Sum, "loss")) });
        let real = padding.zip(count).map(|(segments, mean)| Each::Real { segments, mean });
        let each = real.unwrap_or(Each::All(shape.batch * shape.seq));
        let layers = arch.sparse[..arch.facts.layers].iter().filter(|s| **s).count();
        let more = depths.map(|d| further::losses(b, f, arch, &params, (x, d), &of_layer));
        if let Some(more) = &more {
            told = experts::both(b, told, more.told);
        }
        let more_tokens = more.as_ref().and_then(|m| m.tokens);
        results.extend(balance(b, arch, told, Tokens { each, layers, more: more_tokens }));
        if let Some(more) = more {
            results.extend(more.ports);
            counts.extend(more.counts);
        }
        for (bias, value) in counts {
            let param = b.f.args.iter().find(|a| a.value == bias).and_then(|a| a.role.as_ref());
            let name = param.expect("a bias is a parameter").name.clone();
            results.push(Port { value, role: Some(Role::new(RoleKind::TokensPerExpert, name)) });
        }
    }
    results.push(Port { value: logits, role: Some(Role::new(RoleKind::Output, "logits")) });
    b.f.results = results;
    Ok(ModelGraph { module, weights, sequence })
}

/// An input of numbers that a step counts before it runs.
fn counted(b: &mut Builder, name: &'static str, fill: Fill, sizes: &[usize]) -> Value {
    b.enter("");
    let own = Input { fill, batch: false, seq: None, reads: Reads::Usual };
    let named = b.named(name);
    b.f.arg(Type::f32(sizes), named, Some(Role::new(RoleKind::Input(own), name)))
}

/// What layers that predict tokens behind the next read.
fn depths(b: &mut Builder, sizes: [usize; 3]) -> Depths {
    Depths {
        ids: ahead(b, "ahead", Fill::Ahead, sizes),
        targets: ahead(b, "targets_ahead", Fill::LabelsAhead, sizes),
        scored: counted(b, "scored", Fill::Scored, &sizes[2..]),
    }
}

/// An input of tokens or labels further on.
fn ahead(b: &mut Builder, name: &'static str, fill: Fill, sizes: [usize; 3]) -> Value {
    b.enter("");
    let own = Input { fill, batch: true, seq: Some(1), reads: Reads::Usual };
    let named = b.named(name);
    let role = Role::new(RoleKind::Input(own), name);
    b.f.arg(Type::new(DType::I32, &sizes), named, Some(role))
}

/// The losses that keep experts in balance, of what the routers of all layers told.
fn balance(b: &mut Builder, arch: &Arch, told: RouterStats, tokens: Tokens) -> Vec<Port> {
    let aux = told.load.zip(arch.routing.aux);
    let aux = aux.map(|(load, by)| experts::aux_loss(b, load, tokens, by));
    let z = told.z.zip(arch.routing.z);
    let z = z.map(|(sum, by)| experts::z_loss(b, sum, tokens, by));
    let port = |(value, name): (Option<Value>, &'static str)| {
        value.map(|value| Port { value, role: Some(Role::new(RoleKind::Sum, name)) })
    };
    [aux, z].into_iter().zip(OF_ROUTERS).filter_map(port).collect()
}

/// The logits of a normed hidden state.
fn projected(
    b: &mut Builder,
    f: &Family,
    arch: &Arch,
    params: &weights::Params,
    x: Value,
) -> Value {
    b.enter(f.head);
    let head = params.head.unwrap_or(params.embedding.0);
    let logits = b.push("logits", Dot::by("bsh,vh->bsv", &[3, 2]), &[x, head]);
    let logits = params.head_bias.map_or(logits, |bias| {
        let rule = parts::spread("bsv,v->bsv", &[3, 1]);
        b.push("logits", Add { rule }, &[logits, bias])
    });
    let logits = parts::scaled(b, "logits", arch.factors[2], logits);
    parts::capped(b, "logits", arch.final_softcap, logits)
}

/// The embeddings of tokens, with those of positions, if the model has them.
fn embedded(
    b: &mut Builder,
    f: &Family,
    arch: &Arch,
    params: &weights::Params,
    [ids, positions]: [Value; 2],
) -> Value {
    b.enter(&params.embedding.1);
    let mut x = looked_up(b, arch, params, ids);
    if let Some((table, scope)) = &params.positions {
        b.enter(scope);
        let of = letters(b, positions);
        let take = Take::by(&format!("ph,{of}->{of}h"), &[2, of.len()]);
        let p = b.push("position", take, &[*table, positions]);
        b.enter(f.root);
        let rule = parts::spread(&format!("bsh,{of}h->bsh"), &[3, of.len() + 1]);
        x = b.push("hidden", Add { rule }, &[x, p]);
    }
    x
}

/// The factor of queries at every position of rows [s], or of documents in them [b, s].
fn grown(b: &mut Builder, root: &str, of: Grown, positions: Value) -> Value {
    b.enter(root);
    let at = b.push("position", Cast { to: DType::F32 }, &[positions]);
    // In the middle between whole numbers, so that no rounding of the quotient crosses one.
    let at = b.push("position", Shift { by: of.from as f64 + 0.5 }, &[at]);
    let times = b.push("reached", Scale { by: 1.0 / of.every as f64 }, &[at]);
    let times = b.push("reached", Round { to: Rounding::Floor }, &[times]);
    let all = b.push("growth", Shift { by: 1.0 }, &[times]);
    let log = b.push("growth", Log {}, &[all]);
    let log = b.push("growth", Scale { by: of.by }, &[log]);
    b.push("growth", Shift { by: 1.0 }, &[log])
}

/// The rows of the embedding.
fn looked_up(b: &mut Builder, arch: &Arch, params: &weights::Params, ids: Value) -> Value {
    let padding = arch.padding.map_or(Padding::None, Padding::Constant);
    let take = Take { padding, ..Take::by("vh,bs->bsh", &[2, 2]) };
    let x = b.push("hidden", take, &[params.embedding.0, ids]);
    parts::scaled(b, "hidden", arch.factors[0], x)
}

/// The letters of positions: [s], or [b, s].
pub(super) fn letters(b: &Builder, positions: Value) -> &'static str {
    if b.ty(positions).rank() == 2 { "bs" } else { "s" }
}

/// Cosine and sine of every position and pair, once per model and kind of layer.
fn rotary(b: &mut Builder, scope: &str, rope: &Rope, positions: Value) -> Rotary {
    b.enter(scope);
    let at = b.push("position", Cast { to: DType::F32 }, &[positions]);
    let freq = b.push("inv_freq", Literal { values: rope.inv_freq.clone() }, &[]);
    let of = letters(b, positions);
    let by = format!("{of},r->{of}r");
    let angle = b.push("angle", Mul::by(&by, &[of.len(), 1]), &[at, freq]);
    let cos = b.push("cos", Cos {}, &[angle]);
    let sin = b.push("sin", Sin {}, &[angle]);
    let by = rope.attention_factor;
    if by == 1.0 {
        return Rotary { cos, sin };
    }
    let cos = b.push("cos", Scale { by }, &[cos]);
    let sin = b.push("sin", Scale { by }, &[sin]);
    b.note("the attention factor sharpens q and k alike");
    Rotary { cos, sin }
}
