//! Rotary position embeddings (Su et al., 2021): the inverse frequencies, as transformers computes
//! them.
//!
//! A kind of scaling is one function and one line of `TYPES`. All formulas are evaluated in f64
//! and rounded once, to the f32 of the program's `literal`.

use crate::config::Config;
use crate::positions::{Still, Turning};
use serde_json::{Map, Value};
use shardc_ir::diag::{Diag, Result};
use std::f64::consts::PI;
use std::sync::Arc;

/// What the rotary table of a model is made of.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// One per pair of a head's elements: head_dim / 2.
    pub inv_freq: Arc<[f32]>,
    /// Factor of cosine and sine.
    pub attention_factor: f64,
    /// Factor of q and of k, with which multi-head latent attention sharpens all of a head and not
    /// only what turns: that of `mscale_all_dim`.
    pub head_factor: f64,
}

/// What a scaling starts from.
struct ScalingBase<'a> {
    /// The object that holds the scaling's own keys.
    config: Config<'a>,
    theta: f64,
    /// Elements of a head that turn.
    dim: usize,
    /// Tokens of a row.
    seq: usize,
    /// Positions before scaling, by `original_max_position_embeddings`.
    original: f64,
    max_positions: f64,
    /// The ramp of yarn begins and ends at whole pairs.
    truncated: bool,
    /// `theta^(-2i/dim)`.
    inv_freq: Vec<f64>,
}

/// Frequencies, attention factor and head factor of one kind of scaling.
type Scaling = fn(&ScalingBase) -> Result<(Vec<f64>, f64, f64)>;

/// The known values of `rope_type`.
const TYPES: [(&str, Scaling); 7] = [
    ("default", default),
    (OF_PICTURES, default),
    ("linear", linear),
    (BY_ALPHA, by_alpha),
    ("llama3", llama3),
    ("yarn", yarn),
    ("longrope", longrope),
];

/// Tokens of pictures turn by three numbers each, those of text as always (Wang et al., 2024, *Qwen2-VL*, 2.1).
const OF_PICTURES: &str = "mrope";

/// A scaling of its base by `alpha`; without it, it follows the length of each row, which is not
/// compiled.
const BY_ALPHA: &str = "dynamic";
/// Its key.
const ALPHA: &str = "alpha";
/// Key of the positions before scaling.
pub const ORIGINAL: &str = "original_max_position_embeddings";
/// Key of how much larger queries are behind the positions before scaling (`Growth::Rotary`).
const SCALED: &str = "llama_4_scaling_beta";
/// Key of the part of a head that turns, in an object of numbers.
pub const PART: &str = "partial_rotary_factor";
/// Keys of an object of numbers.
pub const KEYS: &[&str] = &[
    ALPHA,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    SCALED,
    "long_factor",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    ORIGINAL,
    PART,
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];
/// What parameters may be by, where they differ between layers: those that see all, those with a window.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
/// Keys of the object of numbers, in both dialects; the first counts.
const DIALECTS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// The base of frequencies, where neither a config nor its class has one (Su et al., 2021, 3.3).
const THETA: f64 = 1e4;

/// Reads either dialect: `rope_scaling` beside `rope_theta`, or `rope_parameters`. `head` is the size of a head, or of the part
/// that turns, and the key that has it; `seq` and `max_positions` are the tokens of a row and the most there may be.
/// With `local`, of layers with a window; `None` if they turn as the others.
///
/// Errors: `rope-type` for an unknown kind, `config` for numbers that make no frequencies,
/// `unsupported-config`.
pub fn read(
    config: &Config,
    head: (&str, usize),
    [seq, max_positions]: [usize; 2],
    (turning, local): (Turning, bool),
) -> Result<Option<Rope>> {
    let (theta_key, theta) = match (local, turning.local) {
        (true, None) => return Ok(None),
        (true, Some(own)) => own,
        (false, _) => (turning.theta, THETA),
    };
    let (own, words) = match turning.theta {
        Some(_) => object(config, turning, local)?,
        None => (None, Words::Both),
    };
    let word = match &own {
        None => None,
        Some(c) => match c.word_if("rope_type")? {
            None if words == Words::Both => c.word_if("type")?.map(|w| ("type", w)),
            word => word.map(|w| ("rope_type", w)),
        },
    };
    let (word_key, word) = word.unwrap_or(("rope_type", "default"));
    let given = match &own {
        Some(c) => c.positive_if("rope_theta")?,
        None => None,
    };
    let of_config = theta_key.map_or(Ok(None), |key| config.positive_if(key))?;
    let theta = given.or(of_config).unwrap_or(theta);
    let own = own.unwrap_or_else(|| config.clone());
    let dim = turning_part(config, &own, head, (turning, word))?;
    let from = |c: &Config| c.positive_if(ORIGINAL);
    // As transformers: what stands in the config itself comes before its object's, unless these are by kinds.
    let original = match (turning.stretched, turning.local) {
        _fixed if turning.theta.is_none() => max_positions as f64,
        (Some(absent), _) => from(config)?.unwrap_or(absent as f64),
        (None, None) => from(config)?.or(from(&own)?).unwrap_or(max_positions as f64),
        (None, Some(_)) => from(&own)?.unwrap_or(max_positions as f64),
    };
    let power = |i: usize| theta.powf(-((2 * i) as f64) / dim as f64);
    // What Phi-3 calls `su` and, at first, `yarn`.
    let stretched = turning.stretched.is_some();
    let word = if stretched && matches!(word, "su" | "yarn") { "longrope" } else { word };
    let compiled = |t: &&(&str, Scaling)| match t.0 {
        OF_PICTURES => config.is_held(),
        BY_ALPHA => turning.alpha && own.number_if(ALPHA).is_ok_and(|a| a.is_some_and(|a| a > 0.0)),
        kind => !stretched || matches!(kind, "default" | "longrope"),
    };
    let Some((_, scaling)) = TYPES.iter().filter(compiled).find(|t| t.0 == word) else {
        let known: Vec<_> = TYPES.iter().filter(compiled).map(|t| t.0).collect();
        let why =
            if word == BY_ALPHA { "depends on the length of each row" } else { "is not known" };
        let what = format!("rotary scaling of type `{word}` {why}");
        let help = format!("the {} known types are {}", known.len(), known.join(", "));
        return Err(own.unsupported("rope-type", word_key, what, help));
    };
    let inv_freq = (0..dim / 2).map(power).collect();
    let base = ScalingBase {
        truncated: truncated(config, &own, turning)?,
        config: own,
        theta,
        dim,
        seq,
        original,
        max_positions: max_positions as f64,
        inv_freq,
    };
    let (inv_freq, attention_factor, head_factor) = scaling(&base)?;
    let inv_freq: Arc<[f32]> = inv_freq.iter().map(|&x| x as f32).collect();
    let finite = attention_factor.is_finite() && head_factor.is_finite();
    if !finite || inv_freq.iter().any(|x| !x.is_finite()) {
        let what = format!("the rotary frequencies of type `{word}` are not finite");
        return Err(base.config.error(
            word_key,
            what,
            "use numbers near rope_theta 10000, factor 8",
        ));
    }
    Ok(Some(Rope { inv_freq, attention_factor, head_factor }))
}

/// By how much queries grow with their position, and after how many positions: `llama_4_scaling_beta`, and the positions
/// before scaling.
///
/// # Errors
/// `config` for positions that are no whole number.
pub fn scaled(config: &Config, turning: Turning) -> Result<Option<(f64, usize)>> {
    let own = object(config, turning, false)?.0.unwrap_or_else(|| config.clone());
    let Some(by) = own.number_if(SCALED)?.filter(|by| *by != 0.0) else { return Ok(None) };
    let holder = if config.has(ORIGINAL) { config } else { &own };
    Ok(Some((by, holder.count(ORIGINAL)?)))
}

/// By which keys an object says its kind of scaling.
#[derive(Clone, Copy, PartialEq)]
enum Words {
    /// `rope_type`, or else `type`.
    Both,
    /// `rope_type`: transformers puts "default" there before it looks at `type`.
    New,
}

/// The object of numbers of layers that see all, or of those with a window, if there is one.
fn object<'a>(
    config: &Config<'a>,
    turning: Turning,
    local: bool,
) -> Result<(Option<Config<'a>>, Words)> {
    let [scaling, parameters] = [config.child(DIALECTS[0])?, config.child(DIALECTS[1])?];
    if turning.local.is_none() {
        let own = scaling.map(|c| (DIALECTS[0], c)).or(parameters.map(|c| (DIALECTS[1], c)));
        let Some((key, own)) = own else { return Ok((None, Words::Both)) };
        return match KINDS.iter().find(|k| own.has(k)).filter(|_| turning.kinds) {
            Some(kind) => Err(differs(config, key, kind)),
            None => Ok((Some(own), Words::Both)),
        };
    }
    // By kinds: `rope_scaling` is of layers that see all, and `rope_parameters` has an object for each kind.
    match (scaling, parameters) {
        (Some(_), Some(_)) => {
            let what = format!("both `{}` and `{}` are given", DIALECTS[0], DIALECTS[1]);
            let help = format!("leave `{}` out", DIALECTS[0]);
            Err(config.unsupported("unsupported-config", DIALECTS[0], what, help))
        }
        (Some(own), None) => Ok((Some(own).filter(|_| !local), Words::New)),
        (None, Some(all)) => Ok((all.child(KINDS[usize::from(local)])?, Words::Both)),
        (None, None) => Ok((None, Words::Both)),
    }
}

/// Whether the ramp of yarn begins and ends at whole pairs.
fn truncated(config: &Config, own: &Config, turning: Turning) -> Result<bool> {
    const KEY: &str = "truncate";
    match turning.local {
        None => own.flag(KEY, true),
        // As transformers, which looks for it beside the kinds.
        Some(_) => config.child(DIALECTS[1])?.map_or(Ok(true), |all| all.flag(KEY, true)),
    }
}

fn differs(config: &Config, key: &str, nested: &str) -> Diag {
    let what = format!("`{key}` differs between kinds of layers (`{nested}`)");
    let help = "give one set of numbers for all layers, such as {\"rope_theta\": 10000.0}";
    config.unsupported("unsupported-config", key, what, help.into())
}

/// Keys of rotary embeddings that change nothing, as in transformers, by their path.
pub(crate) fn unread(config: &Config, turning: Turning, scaled: bool) -> Vec<String> {
    // Those that the config has of its own: nobody asked for what the class has.
    let own = |key: &str| config.entries().find(|(k, _)| *k == key).map(|(_, v)| v);
    let object = |key: &str| own(key).and_then(Value::as_object).filter(|m| !m.is_empty());
    let whole = |v: &Value| turning.part.is_none() && v.as_f64().is_some_and(|x| x != 1.0);
    // The keys of an object of numbers that nothing reads, and those that are not read there.
    let odd = |path: &str, object: &Map<String, Value>, not: &[&str]| -> Vec<String> {
        let of_others = |k: &str| (k == SCALED && !scaled) || (k == ALPHA && !turning.alpha);
        let read = |k: &str| KEYS.contains(&k) && !not.contains(&k) && !of_others(k);
        let there = object.iter().filter(|(_, v)| !v.is_null());
        let odd = there.filter(|(k, v)| !read(k) || (*k == PART && whole(v)));
        odd.map(|(k, _)| format!("{path}/{k}")).collect()
    };
    let mut out: Vec<String> =
        config.get(PART).filter(|v| whole(v)).map(|_| PART.into()).into_iter().collect();
    let by_kinds = turning.local.is_some();
    if let Some(own) = object(DIALECTS[0]) {
        let not: &[&str] = match by_kinds {
            true if !own.contains_key("rope_type") => &["type", "truncate"],
            true => &["truncate"],
            false => &[],
        };
        out.extend(odd(DIALECTS[0], own, not));
    }
    let Some(own) = object(DIALECTS[1]) else { return out };
    if !by_kinds {
        match object(DIALECTS[0]) {
            Some(_) => out.push(DIALECTS[1].into()),
            None => out.extend(odd(DIALECTS[1], own, &[])),
        }
        return out;
    }
    for (key, v) in own.iter().filter(|(k, v)| !v.is_null() && *k != "truncate") {
        let path = format!("{}/{key}", DIALECTS[1]);
        match v.as_object().filter(|_| KINDS.contains(&key.as_str())) {
            Some(own) => out.extend(odd(&path, own, &["truncate"])),
            None => out.push(path),
        }
    }
    out
}

/// Elements of a head that turn.
fn turning_part(
    config: &Config,
    own: &Config,
    (head, head_dim): (&str, usize),
    (t, word): (Turning, &str),
) -> Result<usize> {
    let width = match t.width {
        None => None,
        Some((key, absent)) => config.count_if(key)?.or(absent),
    };
    let dim = match t.part {
        None if width.is_some_and(|n| n > head_dim) => {
            let what = format!("{} elements of heads of {head_dim} would turn", width.unwrap_or(0));
            let key = t.width.map_or(head, |w| w.0);
            return Err(config.error(key, what, format!("write at most {head_dim}")));
        }
        None if width.is_some() => width.unwrap_or(head_dim),
        // Where nothing turns, no part does.
        None if matches!(t.still, Still::Unless(key, word) if config.word_if(key)? != Some(word)) => {
            head_dim
        }
        None => {
            for c in [config, own] {
                // Plain frequencies are of whole heads, as in transformers.
                if word != "default" && c.number_if(PART)?.is_some_and(|x| x != 1.0) {
                    let what = "only a part of each head would turn, which this family does not do";
                    let help = format!("remove `{PART}`, or set it to 1.0");
                    return Err(c.unsupported("unsupported-config", PART, what.into(), help));
                }
            }
            head_dim
        }
        Some((key, absent)) => {
            // Where there is no object, `own` is the config itself, which has another key.
            let is_object = own.place(PART) != config.place(PART);
            let nested = if is_object { own.number_if(PART)? } else { None };
            let width = width.map(|n| n as f64 / head_dim as f64);
            let part = nested.or(config.number_if(key)?).or(width).unwrap_or(absent);
            if !(part > 0.0 && part <= 1.0) {
                let what = format!("{part} of each head would turn");
                return Err(config.error(key, what, "write a number above 0, up to 1"));
            }
            // Rounded down, as transformers does.
            (head_dim as f64 * part) as usize
        }
    };
    if dim == 0 || !dim.is_multiple_of(2) {
        let what = format!("rotary embeddings need pairs, but {dim} elements of a head turn");
        let help = match t.part {
            None => format!("use {head} {} or {}", dim + 1, dim.max(3) - 1),
            Some((key, _)) => format!("choose {head} and {key} so that their product is even"),
        };
        return Err(config.error(head, what, help));
    }
    Ok(dim)
}

fn default(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    Ok((b.inv_freq.clone(), 1.0, 1.0))
}

/// NTK-aware scaling (bloc97, 2023) by a fixed number.
fn by_alpha(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    let alpha = b.config.positive(ALPHA)?;
    let dim = b.dim as f64;
    let theta = b.theta * alpha.powf(dim / (dim - 2.0));
    let power = |i: usize| theta.powf(-((2 * i) as f64) / dim);
    Ok(((0..b.dim / 2).map(power).collect(), 1.0, 1.0))
}

fn linear(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    let factor = b.config.positive("factor")?;
    Ok((b.inv_freq.iter().map(|x| x / factor).collect(), 1.0, 1.0))
}

/// Llama 3.1: long waves are stretched, short ones kept, those between interpolated.
fn llama3(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    let factor = b.config.positive("factor")?;
    let low = b.config.positive("low_freq_factor")?;
    let high = b.config.positive("high_freq_factor")?;
    if high <= low {
        let what =
            format!("`high_freq_factor` {high} must be greater than `low_freq_factor` {low}");
        return Err(b.config.error("high_freq_factor", what, format!("use {}", 4.0 * low)));
    }
    let one = |&x: &f64| {
        let wave = 2.0 * PI / x;
        if wave < b.original / high {
            x
        } else if wave > b.original / low {
            x / factor
        } else {
            let smooth = (b.original / wave - low) / (high - low);
            (1.0 - smooth) * x / factor + smooth * x
        }
    };
    Ok((b.inv_freq.iter().map(one).collect(), 1.0, 1.0))
}

/// YaRN (Peng et al., 2023): a ramp over the pairs between kept and stretched frequencies, and a
/// factor that sharpens attention.
fn yarn(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    let c = &b.config;
    let factor = c.positive_if("factor")?.unwrap_or(b.max_positions / b.original);
    // As in transformers, 0 stands for the default.
    let or = |key: &str, absent: f64| -> Result<f64> {
        Ok(c.number_if(key)?.filter(|&x| x != 0.0).unwrap_or(absent))
    };
    let m = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let (part, all) = (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?);
    let attention_factor = match c.positive_if("attention_factor")? {
        Some(x) => x,
        None if part != 0.0 && all != 0.0 => m(part) / m(all),
        None => m(1.0),
    };
    let head_factor = if all == 0.0 { 1.0 } else { m(all) };
    if b.theta <= 1.0 {
        let what = format!("`rope_theta` is {}; yarn needs more than 1", b.theta);
        return Err(c.error("rope_theta", what, "use 10000"));
    }
    let (fast, slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
    for (key, x) in [("beta_fast", fast), ("beta_slow", slow)] {
        if x < 0.0 {
            return Err(c.error(key, format!("`{key}` is {x}"), "use beta_fast 32, beta_slow 1"));
        }
    }
    // The pair that makes this many rotations over the original positions.
    let dim = b.dim as f64;
    let pair = |turns: f64| dim * (b.original / (turns * 2.0 * PI)).ln() / (2.0 * b.theta.ln());
    let (mut low, mut high) = (pair(fast), pair(slow));
    if b.truncated {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let one = |(i, x): (usize, &f64)| {
        let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        x / factor * stretched + x * (1.0 - stretched)
    };
    Ok((b.inv_freq.iter().enumerate().map(one).collect(), attention_factor, head_factor))
}

/// LongRoPE (Ding et al., 2024): a factor for every pair, one set of them for rows that are no longer than
/// the positions before scaling and another for longer ones; and a factor that sharpens attention.
fn longrope(b: &ScalingBase) -> Result<(Vec<f64>, f64, f64)> {
    let c = &b.config;
    let sets = [c.positives("short_factor")?, c.positives("long_factor")?];
    for (key, set) in ["short_factor", "long_factor"].iter().zip(&sets) {
        if set.len() != b.inv_freq.len() {
            let (n, want) = (set.len(), b.inv_freq.len());
            let what = format!("`{key}` has {n} numbers for {want} pairs");
            return Err(c.error(key, what, format!("give {want} numbers")));
        }
    }
    let factor = c.positive_if("factor")?.unwrap_or(b.max_positions / b.original);
    let attention_factor = match c.positive_if("attention_factor")? {
        Some(x) => x,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / b.original.ln()).sqrt(),
    };
    let [short, long] = &sets;
    let set = if b.seq as f64 > b.original { long } else { short };
    let inv_freq = b.inv_freq.iter().zip(set).map(|(x, by)| x / by).collect();
    Ok((inv_freq, attention_factor, 1.0))
}

#[cfg(test)]
mod tests;
