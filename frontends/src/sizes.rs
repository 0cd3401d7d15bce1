//! The numbers of one model, read from its config by its family's descriptor and checked.

use crate::config::{Config, MAX_COUNT};
use crate::family::{Family, Positions, Window};
use crate::rope::{self, Rope};
use crate::{Facts, Shape};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::Mode;

/// Most layers: a program has some 40 lines per layer.
const MAX_LAYERS: usize = 1 << 14;
/// Largest head: its rotary frequencies are written into the program.
const MAX_HEAD_DIM: usize = 1 << 16;
/// Most elements of one tensor: bytes and offsets stay far below 2^63.
const MAX_ELEMENTS: usize = 1 << 48;

/// All numbers of a model that its program needs.
pub(crate) struct Arch {
    pub facts: Facts,
    /// Added to the mean square in norms.
    pub eps: f64,
    /// Standard deviation of initial weights.
    pub std: f64,
    /// `None` for learned positions.
    pub rope: Option<Rope>,
    /// Attention window of every layer.
    pub windows: Vec<Option<usize>>,
}

impl Arch {
    pub fn read(f: &Family, c: &Config, shape: Shape, warnings: &mut Vec<Diag>) -> Result<Arch> {
        refuse(f, c)?;
        let facts = facts(f, c)?;
        check_shape(f, c, &facts, shape, warnings)?;
        check_products(c, &facts, shape)?;
        if shape.mode == Mode::Train {
            dropout(f, c, warnings)?;
        }
        let std = c.number_if("initializer_range")?.unwrap_or(0.02);
        if std < 0.0 {
            let what = format!("`initializer_range` is {std}");
            return Err(c.error("initializer_range", what, "write 0.02"));
        }
        Ok(Arch {
            eps: c.positive_if(f.keys.eps)?.unwrap_or(f.absent.eps),
            std,
            rope: match f.positions {
                Positions::Rotary => Some(rope::read(c, facts.head_dim, facts.max_positions)?),
                Positions::Learned(_) => None,
            },
            windows: windows(f, c, facts.layers)?,
            facts,
        })
    }
}

/// Refuses what would change the mathematics.
fn refuse(f: &Family, c: &Config) -> Result<()> {
    let known = f.mlp.activation.words();
    let word = c.word_if(f.keys.activation)?.unwrap_or(known[0]);
    if !known.contains(&word) {
        let what = format!("activation `{word}` is not compiled for {}", f.model_type);
        let help = format!("the known ones are {}", known.join(", "));
        return Err(c.unsupported("activation", f.keys.activation, what, help));
    }
    for &(key, only) in f.fixed {
        if c.flag(key, only)? != only {
            let what = format!("`{key}`: {} is not compiled", !only);
            let help = format!("set it to {only}, if the weights were trained so");
            return Err(c.unsupported("unsupported-config", key, what, help));
        }
    }
    if c.get("quantization_config").is_some() {
        let what = "quantized weights are not read".into();
        let help = "use the unquantized model: F32, BF16 and F16 tensors are read".into();
        return Err(c.unsupported("unsupported-config", "quantization_config", what, help));
    }
    Ok(())
}

fn facts(f: &Family, c: &Config) -> Result<Facts> {
    let k = &f.keys;
    let (hidden, heads) = (c.count(k.hidden)?, c.count(k.heads)?);
    let layers = c.count(k.layers)?;
    if layers > MAX_LAYERS {
        let what = format!("{layers} layers are more than the {MAX_LAYERS} compiled at most");
        return Err(c.error(k.layers, what, format!("use at most {MAX_LAYERS}")));
    }
    let kv_heads = match k.kv_heads {
        None => heads,
        Some(key) if c.has(key) => c.count_if(key)?.unwrap_or(heads),
        Some(_) => f.absent.kv_heads.unwrap_or(heads),
    };
    if heads % kv_heads != 0 {
        let key = k.kv_heads.unwrap_or(k.heads);
        // Bounded: the counts may be hostile.
        let down = (1..=kv_heads.min(heads).min(1 << 16)).rev().find(|n| heads % n == 0);
        let what = format!("{heads} query heads cannot share {kv_heads} key-value heads evenly");
        return Err(c
            .error(key, what, format!("use {} key-value heads", down.unwrap_or(1)))
            .rule("heads % kv_heads == 0"));
    }
    let head_dim = match c.count_if("head_dim")?.or(f.absent.head_dim) {
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
    let ffn = match (c.count_if(k.ffn)?, f.absent.ffn_ratio) {
        (Some(n), _) => n,
        (None, Some(ratio)) => hidden.saturating_mul(ratio),
        (None, None) => c.count(k.ffn)?,
    };
    Ok(Facts {
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab: c.count("vocab_size")?,
        max_positions: c.count_if(k.max_positions)?.unwrap_or(f.absent.max_positions),
        tied: c.flag("tie_word_embeddings", f.absent.tied)?,
    })
}

fn check_shape(
    f: &Family,
    c: &Config,
    facts: &Facts,
    shape: Shape,
    warnings: &mut Vec<Diag>,
) -> Result<()> {
    for (what, n) in [("batch", shape.batch), ("sequence length", shape.seq)] {
        if n == 0 || n as u64 > MAX_COUNT {
            return Err(Diag::new("shape", format!("the {what} is {n}"))
                .help(format!("use 1 to {MAX_COUNT}, such as {}", 8)));
        }
    }
    if shape.seq > facts.max_positions {
        let most = facts.max_positions;
        let what = format!("sequences of {} tokens are longer than the model's {most}", shape.seq);
        let d = Diag::new("sequence-length", what).at(c.place(f.keys.max_positions));
        match f.positions {
            Positions::Learned(_) => {
                let why = "learned positions beyond the last do not exist";
                return Err(d.why(why).help(format!("use --seq {most} or less")));
            }
            Positions::Rotary => warnings.push(d.help(format!("it was made for --seq {most}"))),
        }
    }
    Ok(())
}

/// Refuses tensors whose sizes would overflow.
fn check_products(c: &Config, f: &Facts, shape: Shape) -> Result<()> {
    let tokens = shape.batch.checked_mul(shape.seq);
    let joined = f.heads.checked_mul(f.head_dim);
    let product = |a: Option<usize>, b: usize| a.and_then(|a| a.checked_mul(b));
    let tensors = [
        ("logits", product(tokens, f.vocab)),
        ("the residual stream", product(tokens, f.hidden)),
        ("all heads", joined.and_then(|j| product(tokens, j))),
        ("the MLP", product(tokens, f.ffn)),
        ("the embedding", f.vocab.checked_mul(f.hidden)),
        ("the positions", f.max_positions.checked_mul(f.hidden)),
        ("an attention weight", product(joined, f.hidden).and_then(|n| n.checked_mul(3))),
        ("an MLP weight", f.ffn.checked_mul(f.hidden)),
    ];
    match tensors.iter().find(|t| t.1.is_none_or(|n| n > MAX_ELEMENTS)) {
        None => Ok(()),
        Some((name, _)) => {
            let what = format!("{name} would have more than 2^48 elements");
            Err(c.error("", what, "check the sizes: 2^48 elements are 1 PiB in f32"))
        }
    }
}

fn dropout(f: &Family, c: &Config, warnings: &mut Vec<Diag>) -> Result<()> {
    for key in f.keys.dropout {
        if let Some(p) = c.number_if(key)?.filter(|&p| p != 0.0) {
            let d = Diag::new("dropout-ignored", format!("dropout {p} of `{key}` is not applied"));
            let help = format!("set `{key}` to 0.0 to train without it and without this warning");
            warnings.push(d.at(c.place(key)).help(help));
        }
    }
    Ok(())
}

/// The attention window of every layer.
fn windows(f: &Family, c: &Config, layers: usize) -> Result<Vec<Option<usize>>> {
    let width = |absent| {
        if c.has("sliding_window") { c.count_if("sliding_window") } else { Ok(Some(absent)) }
    };
    let (absent, first) = match f.attention.window {
        Window::Never => return Ok(vec![None; layers]),
        Window::All { absent } => return Ok(vec![width(absent)?; layers]),
        Window::Switched { absent, first } => (absent, first),
    };
    let on = c.flag("use_sliding_window", false)?;
    let window = if on { width(absent)? } else { None };
    let Some(types) = c.words_if("layer_types")? else {
        // 0 is a value here: all layers have the window.
        let first = match c.get("max_window_layers").map(serde_json::Value::as_u64) {
            Some(Some(0)) => 0,
            _ => c.count_if("max_window_layers")?.unwrap_or(first),
        };
        return Ok((0..layers).map(|i| window.filter(|_| i >= first)).collect());
    };
    if types.len() != layers {
        let what = format!("`layer_types` has {} entries for {layers} layers", types.len());
        return Err(c.error("layer_types", what, format!("give {layers} entries, or none")));
    }
    let one = |(i, &word): (usize, &&str)| match (word, window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(w)) => Ok(Some(w)),
        ("sliding_attention", None) => {
            let key = format!("layer_types/{i}");
            let what = "the layer has a window, but no window is set";
            let help = "set use_sliding_window to true and sliding_window to 4096, for example";
            Err(c.error(&key, what, help))
        }
        _ => {
            let key = format!("layer_types/{i}");
            let what = format!("layers of type `{word}` are not compiled");
            let help = "the 2 known types are full_attention, sliding_attention".to_string();
            Err(c.unsupported("unsupported-config", &key, what, help))
        }
    };
    types.iter().enumerate().map(one).collect()
}
