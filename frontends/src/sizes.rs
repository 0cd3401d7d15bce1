//! The numbers of one model, read from its config by its family's descriptor and checked.

mod experts;
mod layers;
mod limits;
mod recurrent;

pub(crate) use experts::{Divisor, Routing};
use experts::{expert_facts, idle_balance, routing, sparse, there};
use layers::{Kind, contradicted, halves, kinds, turns, walks, windows};
use limits::{check_products, check_shape};
use recurrent::{recurrent, split_heads, steps};

use crate::config::{Config, MAX_COUNT, TIED};
use crate::family::{
    Activation, Adjacent, Beside, Eps, Experts, Factor, Factors, Family, Growth, Halves, Heads,
    KvHeads, LatentSizes, Positions, QkScale, RecurrentSizes, Softcap, Still, Window,
};
use crate::rope::{self, Rope};
use crate::{Facts, Shape};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::ops::rope::Pairs;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::types::MAX_ELEMENTS;

/// Most layers. A program has some 40 lines per layer, and this many take 4 s and 350 MiB to compile, within what a
/// config.json may cost; published models have below 200.
const MAX_LAYERS: usize = 1 << 10;
/// Most layers that predict tokens behind the next.
pub(crate) const MAX_MTP: usize = 8;
/// Largest head: its rotary frequencies are written into the program.
const MAX_HEAD_DIM: usize = 1 << 16;

/// All numbers of a model that its program needs.
pub(crate) struct Arch {
    pub facts: Facts,
    /// Token whose row of the embedding has no gradient of its look-up.
    pub padding: Option<usize>,
    /// Added to the mean square in norms.
    pub eps: f64,
    /// Rates of dropout of embeddings, of what blocks add to the residual stream, and of probabilities of
    /// attention.
    pub dropout: [f64; 3],
    /// Standard deviation of initial weights.
    pub std: f64,
    /// `None` for learned positions.
    pub rope: Option<Rope>,
    /// Of layers with a window, if they have their own.
    pub local_rope: Option<Rope>,
    /// Attention and MLP of a block stand side by side.
    pub beside: bool,
    pub activation: Activation,
    /// Attention window of every layer.
    pub windows: Vec<Option<usize>>,
    /// Windows are chunks of positions.
    pub chunked: bool,
    /// How queries grow, if they do.
    pub growth: Option<Grown>,
    /// Which elements of a head turn together.
    pub pairs: Pairs,
    /// Sizes of multi-head latent attention.
    pub latent: Option<LatentSizes>,
    /// Sizes of layers that walk a state.
    pub recurrent: Option<RecurrentSizes>,
    /// Least and most step size of Mamba-2, where there are such.
    pub steps: Option<[f64; 2]>,
    /// Whether each layer walks a state, and has no attention.
    pub walks: Vec<bool>,
    /// Whether queries and keys turn, of every layer.
    pub turns: Vec<bool>,
    /// Bound of queries, keys and values.
    pub clip: Option<f64>,
    /// Factor of the scores of attention.
    pub scale: f64,
    /// Factors of embeddings, of what blocks add to the residual stream, and of logits.
    pub factors: [f64; 3],
    /// Of the scores of attention, and of the logits.
    pub softcap: Option<f64>,
    pub final_softcap: Option<f64>,
    /// Whether each layer has a first half, and a second.
    pub halves: Vec<[bool; 2]>,
    /// Whether each layer has experts.
    pub sparse: Vec<bool>,
    pub routing: Routing,
    /// Layers behind the last that predict tokens behind the next, and the weight of the loss of each.
    pub mtp: (usize, f64),
}

/// Queries times 1 + `by` log(1 + ⌊(p + `from`) / `every`⌋) at position p.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Grown {
    pub by: f64,
    pub every: usize,
    pub from: usize,
    /// Of layers that do not turn, or else of all.
    pub still: bool,
}

impl Arch {
    pub fn read(f: &Family, c: &Config, shape: &Shape, warnings: &mut Vec<Diag>) -> Result<Arch> {
        let activation = activation(f, c)?;
        f.refuse(c)?;
        warnings.extend(f.unread(c));
        warnings.extend(f.assumed(c));
        let facts = facts(f, c)?;
        warnings.extend(contradicted(f, c, facts.layers)?);
        check_shape(f, c, &facts, shape, warnings)?;
        let latent = latent(f, c)?;
        check_products(c, &facts, latent, shape)?;
        let dropout = match shape.mode {
            Mode::Train => dropout(f, c, shape.dropout, warnings)?,
            Mode::Infer => [0.0; 3],
        };
        let std = c.number_if("initializer_range")?.unwrap_or(0.02);
        if std < 0.0 {
            let what = format!("`initializer_range` is {std}");
            return Err(c.error("initializer_range", what, "write 0.02"));
        }
        let turning =
            latent.map_or(("head_dim", facts.head_dim), |l| ("qk_rope_head_dim", l.turning));
        let rope = |local| match f.positions {
            Positions::Learned(_) | Positions::None => Ok(None),
            Positions::Rotary(t) => {
                rope::read(c, turning, [shape.seq, facts.max_positions], (t, local))
            }
        };
        let (rope, local_rope) = (rope(false)?, rope(true)?);
        let sharper = latent.and(rope.as_ref()).map_or(1.0, |r| r.head_factor * r.head_factor);
        let mtp = mtp(f, c, shape)?;
        let (sparse, routing) = match &f.experts {
            None => (vec![false; facts.layers + mtp.0], Routing::default()),
            Some(e) => (
                sparse((f, e), c, facts.layers + mtp.0)?,
                routing(e, c, facts.experts.as_ref(), shape)?,
            ),
        };
        let facts = Facts { experts: facts.experts.filter(|_| sparse.contains(&true)), ..facts };
        warnings.extend(idle_balance(f, shape, facts.experts.is_some()));
        let scale = match f.attention.scores {
            QkScale::OverRootOfHead => 1.0 / (facts.head_dim as f64).sqrt(),
            QkScale::OverRootOf(key, absent) => 1.0 / c.positive_if(key)?.unwrap_or(absent).sqrt(),
            QkScale::Times(key, absent) => c.positive_if(key)?.unwrap_or(absent),
        };
        let factor = |of: Factor| match of {
            Factor::One => Ok(1.0),
            Factor::RootOfHidden => Ok((facts.hidden as f64).sqrt()),
            Factor::Key(key, absent) => Ok(c.positive_if(key)?.unwrap_or(absent)),
            Factor::Over(key, absent) => Ok(1.0 / c.positive_if(key)?.unwrap_or(absent)),
        };
        let own_head = |of: Factor| if c.has_own_head() { of } else { Factor::One };
        let Factors { embedding, residual, logits } = f.factors;
        let [embedding, residual, logits] = [embedding, residual, own_head(logits)].map(factor);
        let windows = and_more(windows(f, c, facts.layers)?, mtp.0, None);
        let softcap = |s: Option<Softcap>| match s {
            None => Ok(None),
            Some(s) if c.has(s.key) => c.positive_if(s.key),
            Some(s) => Ok(s.absent),
        };
        let growth = growth(f, c)?;
        let recurrent = recurrent(f, c, facts.hidden, shape)?;
        let walks = and_more(walks(f, c, facts.layers)?, mtp.0, false);
        let halves = and_more(halves(f, c, facts.layers)?, mtp.0, [true; 2]);
        let turns = turns(f, c, &windows)?;
        let any_turns = turns.iter().zip(&walks).any(|(turns, walks)| *turns && !walks);
        Ok(Arch {
            // Positions begin at 0.
            growth: growth.filter(|g| g.by != 0.0 && g.every < shape.seq + g.from),
            chunked: matches!(f.attention.window, Window::Chunks(..)),
            scale: sharper * scale,
            factors: [embedding?, residual?, logits?],
            clip: f.attention.clip.map_or(Ok(None), |key| c.positive_if(key))?,
            turns,
            softcap: softcap(f.attention.softcap)?,
            final_softcap: softcap(f.softcap.filter(|_| c.has_own_head()))?,
            pairs: pairs(f, c)?,
            latent,
            recurrent,
            steps: steps(f, c)?,
            walks,
            halves,
            padding: padding(f, c, facts.vocab)?,
            sparse,
            routing,
            mtp,
            dropout,
            eps: match f.keys.eps {
                Eps::Key(key) => c.positive(key)?,
                Eps::Is(eps) => eps,
            },
            std,
            rope: rope.filter(|_| any_turns),
            local_rope: local_rope.filter(|_| any_turns),
            beside: match f.beside {
                Beside::Never => false,
                Beside::Unless(key) => c.flag(key, true)?,
                Beside::OneNorm => true,
            },
            activation,
            windows,
            facts,
        })
    }
}

/// What layers have, and layers behind them that predict tokens.
fn and_more<T: Clone>(mut all: Vec<T>, more: usize, of_them: T) -> Vec<T> {
    all.resize(all.len() + more, of_them);
    all
}

/// How queries grow with their position.
fn growth(f: &Family, c: &Config) -> Result<Option<Grown>> {
    Ok(match (f.attention.growth, f.positions) {
        (Growth::Still, _) if c.flag("attn_temperature_tuning", true)? => {
            let by = c.number_if("attn_scale")?.unwrap_or(0.1);
            let every = c.count_if("floor_scale")?.unwrap_or(8192);
            Some(Grown { by, every, from: 1, still: true })
        }
        (Growth::Rotary, Positions::Rotary(t)) => {
            let scaled = rope::scaled(c, t)?;
            scaled.map(|(by, every)| Grown { by, every, from: 0, still: false })
        }
        _none => None,
    })
}

/// How many layers predict tokens behind the next, and the weight of the loss of each.
fn mtp(f: &Family, c: &Config, shape: &Shape) -> Result<(usize, f64)> {
    const FLAG: &str = "--mtp";
    let none = |key: &&str| c.get(key).and_then(serde_json::Value::as_u64) == Some(0);
    let key = f.mtp.filter(|key| !none(key));
    let layers = key.map_or(Ok(None), |key| c.count_if(key))?.unwrap_or(0);
    if shape.mode == Mode::Infer {
        return Ok((0, 0.0));
    }
    match (layers, shape.mtp) {
        (0, 0.0) => Ok((0, 0.0)),
        (0, _) => {
            let what = "the model has no layers that predict tokens behind the next";
            let d = Diag::new("no-mtp-layers", what).at(FLAG);
            Err(match f.mtp {
                Some(key) => {
                    d.help(format!("set `{key}` to 1 in config.json, or leave {FLAG} out"))
                }
                None => d.help(format!("leave it out: a `{}` has none", f.model_type)),
            })
        }
        (n, _) if n > MAX_MTP => {
            let key = f.mtp.unwrap_or_default();
            let what =
                format!("{n} layers that predict tokens are more than the {MAX_MTP} compiled");
            Err(c.error(key, what, format!("use at most {MAX_MTP}")))
        }
        (n, _) if n >= shape.seq => {
            let what =
                format!("rows of {} tokens have none that {n} layers could predict", shape.seq);
            Err(Diag::new("shape", what).at(FLAG).help(format!("use a --seq above {n}")))
        }
        (_, 0.0) => Ok((0, 0.0)),
        (n, weight) => Ok((n, weight / n as f64)),
    }
}

/// The activation of the MLPs.
fn activation(f: &Family, c: &Config) -> Result<Activation> {
    let all = f.mlp.activations;
    let Some(&first) = all.first() else { return Ok(Activation::Silu) };
    let Some(word) = c.word_if(f.keys.activation)? else { return Ok(first) };
    let word = f.known.words.iter().find(|w| w.0 == word).map_or(word, |w| w.1);
    all.iter().copied().find(|a| a.words().contains(&word)).ok_or_else(|| {
        let known: Vec<&str> = all.iter().flat_map(|a| a.words()).copied().collect();
        let what = format!("activation `{word}` is not compiled for {}", f.model_type);
        let help = format!("the known ones are {}", known.join(", "));
        c.unsupported("activation", f.keys.activation, what, help)
    })
}

fn facts(f: &Family, c: &Config) -> Result<Facts> {
    let k = &f.keys;
    let (hidden, heads) = (c.count(k.hidden)?, c.count(k.heads)?);
    let kinds = kinds(f, c)?;
    let layers = match &kinds {
        Some(all) => all.len(),
        None => c.count(k.layers)?,
    };
    if layers > MAX_LAYERS {
        let what = format!("{layers} layers are more than the {MAX_LAYERS} that a model may have");
        return Err(c.error(k.layers, what, format!("use at most {MAX_LAYERS}")));
    }
    let kv_heads = match k.kv_heads {
        KvHeads::Key(key) => c.count_if(key)?.unwrap_or(heads),
        KvHeads::All => heads,
        KvHeads::One => 1,
    };
    if heads % kv_heads != 0 {
        let key = if let KvHeads::Key(key) = k.kv_heads { key } else { k.heads };
        // Bounded: the counts may be hostile.
        let down = (1..=kv_heads.min(heads).min(1 << 16)).rev().find(|n| heads % n == 0);
        let what = format!("{heads} query heads cannot share {kv_heads} key-value heads evenly");
        return Err(c
            .error(key, what, format!("use {} key-value heads", down.unwrap_or(1)))
            .rule("heads % kv_heads == 0"));
    }
    let latent = latent(f, c)?;
    let given = k.head_dim.map_or(Ok(None), |key| c.count_if(key))?;
    other_heads(f, c, given, (hidden, heads))?;
    // What a config with latent attention calls `head_dim` is only the part that turns.
    let given = latent.map(|l| l.still.saturating_add(l.turning)).or(given);
    let head_dim = match given {
        Some(n) => n,
        None if hidden % heads == 0 => hidden / heads,
        None => {
            let what = format!("hidden size {hidden} is not a multiple of {heads} heads");
            let fit = hidden.div_ceil(heads) * heads;
            return Err(c.error(k.hidden, what, format!("use {fit}, or give `head_dim`")));
        }
    };
    if head_dim > MAX_HEAD_DIM {
        let what = format!("heads of {head_dim} elements are larger than {MAX_HEAD_DIM}");
        return Err(c.error("head_dim", what, "use more heads, such as heads of 128"));
    }
    let ffn = match (c.count_if(k.ffn)?, f.mlp.ratio) {
        _none if f.halves == Halves::First => 0,
        (Some(n), _) => n,
        (None, Some(ratio)) => hidden.saturating_mul(ratio),
        (None, None) => c.count(k.ffn)?,
    };
    let some = kinds.is_none_or(|all| all.contains(&Kind::Experts));
    let experts = f.experts.as_ref().filter(|e| some && there(e, c));
    Ok(Facts {
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab: c.count("vocab_size")?,
        max_positions: k.max_positions.map_or(Ok(MAX_COUNT as usize), |key| c.count(key))?,
        tied: c.flag(TIED, false)?,
        recurrent: split_heads(f, c)?,
        experts: experts.map(|e| expert_facts(e, c)).transpose()?,
    })
}

/// Refuses heads of another size where it says only how they turn.
fn other_heads(f: &Family, c: &Config, given: Option<usize>, of: (usize, usize)) -> Result<()> {
    let ((hidden, heads), Heads::Joined(_)) = (of, f.attention.heads) else { return Ok(()) };
    match given.filter(|n| n.checked_mul(heads) != Some(hidden)) {
        None => Ok(()),
        Some(n) => {
            let what = format!("heads of {n} elements are not compiled for {}", f.model_type);
            let help = format!("leave `head_dim` out, or set it to {}", hidden / heads);
            Err(c.unsupported("unsupported-config", "head_dim", what, help))
        }
    }
}

/// The padding token; a negative number counts from the end of the vocabulary, as in
/// torch.nn.Embedding.
fn padding(f: &Family, c: &Config, vocab: usize) -> Result<Option<usize>> {
    const KEY: &str = "pad_token_id";
    let id = if f.padding { c.whole_if(KEY)? } else { None };
    let Some(id) = id else { return Ok(None) };
    let from_start = if id < 0 { id.checked_add_unsigned(vocab as u64) } else { Some(id) };
    match from_start.and_then(|i| usize::try_from(i).ok()).filter(|&i| i < vocab) {
        Some(i) => Ok(Some(i)),
        None => {
            let absent = if c.assumed(&[KEY]).is_empty() { "" } else { ", where it is absent" };
            let what = format!("`{KEY}` is {id}{absent}, which is not a token of {vocab}");
            let help = format!("write 0 to {}, or null if there is no padding token", vocab - 1);
            Err(c.error(KEY, what, help).rule("-vocab_size <= pad_token_id < vocab_size"))
        }
    }
}

/// Sizes of multi-head latent attention, if the family has it.
fn latent(f: &Family, c: &Config) -> Result<Option<LatentSizes>> {
    let Heads::Latent(l) = &f.attention.heads else { return Ok(None) };
    let or = |key: &str, absent: usize| Ok(c.count_if(key)?.unwrap_or(absent));
    // null is a value here: queries without a latent vector.
    let q_rank = if c.has("q_lora_rank") { c.count_if("q_lora_rank")? } else { l.absent.q_rank };
    Ok(Some(LatentSizes {
        q_rank,
        kv_rank: or("kv_lora_rank", l.absent.kv_rank)?,
        still: or("qk_nope_head_dim", l.absent.still)?,
        turning: or("qk_rope_head_dim", l.absent.turning)?,
        value: or("v_head_dim", l.absent.value)?,
    }))
}

/// Rates of dropout of embeddings, of what blocks add to the residual stream, and of attention.
fn dropout(f: &Family, c: &Config, asked: Dropout, warnings: &mut Vec<Diag>) -> Result<[f64; 3]> {
    let keys = f.keys.dropout;
    let rate = |key: Option<&str>| -> Result<f64> {
        let Some(key) = key else { return Ok(0.0) };
        match c.number_if(key)?.unwrap_or(0.0) {
            p if (0.0..1.0).contains(&p) => Ok(p),
            p => Err(c.error(key, format!("`{key}` is {p}"), "write a rate from 0 to below 1")),
        }
    };
    match asked {
        Dropout::Rate(p) => Ok([p; 3]),
        Dropout::Config => Ok([rate(keys.embedding)?, rate(keys.residual)?, rate(keys.attention)?]),
        Dropout::Nothing => {
            for key in keys.all() {
                let Some(p) = c.number_if(key)?.filter(|&p| p != 0.0) else { continue };
                let absent =
                    if c.assumed(&[key]).is_empty() { "" } else { ", where it is absent," };
                let what = format!("dropout {p} of `{key}`{absent} is not applied");
                let help = format!("use --dropout config, or set `{key}` to 0.0");
                warnings.push(Diag::new("dropout-ignored", what).at(c.place(key)).help(help));
            }
            Ok([0.0; 3])
        }
    }
}

/// Which elements of a head turn together.
fn pairs(f: &Family, c: &Config) -> Result<Pairs> {
    let adjacent = match f.positions {
        Positions::Learned(_) | Positions::None => false,
        Positions::Rotary(t) => match t.adjacent {
            Adjacent::Never => false,
            Adjacent::Always => true,
            Adjacent::Unless(key) => c.flag(key, true)?,
        },
    };
    Ok(if adjacent { Pairs::Adjacent } else { Pairs::Halves })
}
