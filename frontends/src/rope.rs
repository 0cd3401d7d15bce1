//! Rotary position embeddings (Su et al., 2021): the inverse frequencies, as transformers computes
//! them.
//!
//! A kind of scaling is one function and one line of `TYPES`. All formulas are evaluated in f64
//! and rounded once, to the f32 of the program's `literal`.

use crate::config::Config;
use crate::family::Turning;
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
struct Base<'a> {
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
    /// `theta^(-2i/dim)`.
    inv_freq: Vec<f64>,
}

/// Frequencies, attention factor and head factor of one kind of scaling.
type Scaling = fn(&Base) -> Result<(Vec<f64>, f64, f64)>;

/// The known values of `rope_type`.
const TYPES: [(&str, Scaling); 5] = [
    ("default", default),
    ("linear", linear),
    ("llama3", llama3),
    ("yarn", yarn),
    ("longrope", longrope),
];

/// Reads either dialect: `rope_scaling` beside `rope_theta`, or `rope_parameters`; `theta` is the base
/// where neither gives one. `seq` and `max_positions` are the tokens of a row and the most there may be.
/// With `local`, of layers with a window; `None` if they turn as the others.
///
/// Errors: `rope-type` for an unknown kind, `config` for numbers that make no frequencies.
pub fn read(
    config: &Config,
    head_dim: usize,
    [seq, max_positions]: [usize; 2],
    theta: f64,
    (turning, local): (Turning, bool),
) -> Result<Option<Rope>> {
    let (kind, theta_key, theta) = match (local, turning.local) {
        (true, None) => return Ok(None),
        (true, Some((key, theta))) => (KINDS[1], key, theta),
        (false, _) => (KINDS[0], turning.theta, theta),
    };
    let own = match config.child("rope_scaling")? {
        Some(c) => Some(("rope_scaling", c)),
        None => config.child("rope_parameters")?.map(|c| ("rope_parameters", c)),
    };
    let own = match own {
        Some((key, c)) if KINDS.iter().any(|k| c.has(k)) => match turning.local {
            Some(_) => c.child(kind)?.map(|c| (key, c)),
            None => {
                return Err(differs(config, key, KINDS.iter().find(|k| c.has(k)).unwrap_or(&kind)));
            }
        },
        // Numbers for all layers, where transformers has none but by kinds.
        Some((key, c)) if key == "rope_parameters" && turning.local.is_some() => {
            let what = format!("`{key}` is not by kinds of layers");
            let help = format!("put what it holds under `{}`", KINDS[0]);
            let key = c.keys().next().map_or(key.to_string(), |own| format!("{key}/{own}"));
            return Err(config.unsupported("unsupported-config", &key, what, help));
        }
        // A scaling that is not by kinds is not that of layers with a window.
        own => own.filter(|_| !local),
    };
    let word = match &own {
        None => None,
        Some((_, c)) => match c.word_if("rope_type")? {
            Some(w) => Some(("rope_type", w)),
            None => c.word_if("type")?.map(|w| ("type", w)),
        },
    };
    let (word_key, word) = word.unwrap_or(("rope_type", "default"));
    let given = match &own {
        Some((_, c)) => c.positive_if("rope_theta")?,
        None => None,
    };
    let theta = given.or(config.positive_if(theta_key)?).unwrap_or(theta);
    let own = own.map_or_else(|| config.clone(), |own| own.1);
    let dim = turning_part(config, &own, head_dim, turning)?;
    let from = |c: &Config| c.positive_if("original_max_position_embeddings");
    // As transformers: what such a family has in the config itself comes before its object's.
    let original = match turning.stretched {
        Some(absent) => from(config)?.unwrap_or(absent as f64),
        None => from(&own)?.or(from(config)?).unwrap_or(max_positions as f64),
    };
    let power = |i: usize| theta.powf(-((2 * i) as f64) / dim as f64);
    // What Phi-3 calls `su` and, at first, `yarn`.
    let stretched = turning.stretched.is_some();
    let word = if stretched && matches!(word, "su" | "yarn") { "longrope" } else { word };
    let compiled = |t: &&(&str, Scaling)| !stretched || matches!(t.0, "default" | "longrope");
    let Some((_, scaling)) = TYPES.iter().filter(compiled).find(|t| t.0 == word) else {
        let known: Vec<_> = TYPES.iter().filter(compiled).map(|t| t.0).collect();
        let what = format!("rotary scaling of type `{word}` is not known");
        let help = format!("the {} known types are {}", known.len(), known.join(", "));
        return Err(own.unsupported("rope-type", word_key, what, help));
    };
    let inv_freq = (0..dim / 2).map(power).collect();
    let base = Base {
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

/// What parameters may be by, where they differ between layers: those that see all, those with a window.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn differs(config: &Config, key: &str, nested: &str) -> Diag {
    let what = format!("`{key}` differs between kinds of layers (`{nested}`)");
    let help = "give one set of numbers for all layers, such as {\"rope_theta\": 10000.0}";
    config.unsupported("unsupported-config", key, what, help.into())
}

/// Elements of a head that turn.
fn turning_part(config: &Config, own: &Config, head_dim: usize, t: Turning) -> Result<usize> {
    const KEY: &str = "partial_rotary_factor";
    let dim = match t.part {
        None => {
            for c in [config, own] {
                if c.number_if(KEY)?.is_some_and(|x| x != 1.0) {
                    let what = "only a part of each head would turn, which this family does not do";
                    let help = format!("remove `{KEY}`, or set it to 1.0");
                    return Err(c.unsupported("unsupported-config", KEY, what.into(), help));
                }
            }
            head_dim
        }
        Some((key, absent)) => {
            // Where there is no object, `own` is the config itself, which has another key.
            let is_object = own.place(KEY) != config.place(KEY);
            let nested = if is_object { own.number_if(KEY)? } else { None };
            let part = nested.or(config.number_if(key)?).unwrap_or(absent);
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
            None => format!("use head_dim {} or {}", dim + 1, dim.max(3) - 1),
            Some((key, _)) => format!("choose head_dim and {key} so that their product is even"),
        };
        return Err(config.error("head_dim", what, help));
    }
    Ok(dim)
}

fn default(b: &Base) -> Result<(Vec<f64>, f64, f64)> {
    Ok((b.inv_freq.clone(), 1.0, 1.0))
}

fn linear(b: &Base) -> Result<(Vec<f64>, f64, f64)> {
    let factor = b.config.positive("factor")?;
    Ok((b.inv_freq.iter().map(|x| x / factor).collect(), 1.0, 1.0))
}

/// Llama 3.1: long waves are stretched, short ones kept, those between interpolated.
fn llama3(b: &Base) -> Result<(Vec<f64>, f64, f64)> {
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
fn yarn(b: &Base) -> Result<(Vec<f64>, f64, f64)> {
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
    if c.flag("truncate", true)? {
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
fn longrope(b: &Base) -> Result<(Vec<f64>, f64, f64)> {
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
mod tests {
    use super::*;
    use serde_json::json;

    fn rope(config: serde_json::Value, head_dim: usize) -> Result<Rope> {
        let config = Config::new(&config, "config.json")?;
        Ok(read(&config, head_dim, [16, 32], 1e4, (Turning::PLAIN, false))?.expect("a rope"))
    }

    fn near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((f64::from(*g) - w).abs() <= 1e-7 * w.abs(), "{got:?}, not {want:?}");
        }
    }

    /// The numbers of transformers for tests/fixtures/llama_gqa: all three branches.
    #[test]
    fn llama3_frequencies() {
        let r = rope(
            json!({"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 0.25, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8}}),
            8,
        );
        near(&r.unwrap().inv_freq, &[1.0, 0.095_839_985_88, 0.0125, 0.003_952_847]);
    }

    /// The numbers of transformers for tests/fixtures/llama_yarn, in both dialects.
    #[test]
    fn yarn_frequencies() {
        let old = json!({"rope_theta": 100.0, "rope_scaling": {"type": "yarn", "factor": 4.0,
            "beta_fast": 32.0, "beta_slow": 0.1, "original_max_position_embeddings": 8}});
        let new = json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100,
            "beta_fast": 32.0, "beta_slow": 0.1, "original_max_position_embeddings": 8}});
        let [old, new] = [rope(old, 8).unwrap(), rope(new, 8).unwrap()];
        near(&old.inv_freq, &[1.0, 0.237_170_824_5, 0.05, 0.007_905_694_2]);
        assert!((old.attention_factor - 1.138_629_436_1).abs() < 1e-10);
        assert_eq!(old, new);
    }

    #[test]
    fn yarn_attention_factor_variants() {
        let with = |more: serde_json::Value| {
            let mut own = json!({"rope_type": "yarn", "factor": 4.0});
            own.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            rope(json!({"rope_parameters": own}), 8).unwrap().attention_factor
        };
        let m = |s: f64| 0.1 * s * 4f64.ln() + 1.0;
        assert_eq!(with(json!({"mscale": 2.0, "mscale_all_dim": 0.5})), m(2.0) / m(0.5));
        assert_eq!(with(json!({"mscale": 2.0, "mscale_all_dim": 0})), m(1.0));
        assert_eq!(with(json!({"attention_factor": 1.25, "mscale": 2.0})), 1.25);
        let own =
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5}});
        assert_eq!(rope(own, 8).unwrap().head_factor, m(0.5));
    }

    /// The numbers of transformers 5.23, `Phi3RotaryEmbedding(Phi3Config(hidden_size=32,
    /// num_attention_heads=4, max_position_embeddings=32, ..))` called with 16 positions: of both keys the
    /// config's own is taken, 4096 where it is absent, and never the object's.
    #[test]
    fn longrope_takes_the_positions_of_the_config() {
        let turning = Turning { stretched: Some(4096), ..Turning::PLAIN };
        let rope = |own: Option<usize>, nested: usize, word: &str| -> Result<Rope> {
            let c = json!({"original_max_position_embeddings": own, "rope_scaling": {
                "rope_type": word, "original_max_position_embeddings": nested,
                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.5, 4.0]}});
            let c = Config::new(&c, "config.json")?;
            Ok(read(&c, 8, [16, 32], 1e4, (turning, false))?.expect("a rope"))
        };
        let long = [1.0, 0.066_666_67, 0.004, 0.000_25];
        let short = [1.0, 0.090_909_094, 0.008_333_333_3, 0.000_769_230_77];
        let cases = [
            (Some(8), 24, "longrope", long, 1.290_994_448_735_805_6),
            (Some(8), 24, "su", long, 1.290_994_448_735_805_6),
            (Some(24), 8, "yarn", short, 1.044_280_355_042_484_6),
            (None, 8, "longrope", short, 1.0),
        ];
        for (own, nested, word, frequencies, factor) in cases {
            let r = rope(own, nested, word).unwrap();
            near(&r.inv_freq, &frequencies);
            assert!((r.attention_factor - factor).abs() < 1e-12, "{own:?}, {nested}");
        }
        for word in ["linear", "llama3"] {
            assert_eq!(rope(None, 8, word).unwrap_err().code, "rope-type", "{word}");
        }
    }

    #[test]
    fn parameters_of_two_kinds_are_by_kinds() {
        let turning = Turning { local: Some(("rope_local_base_freq", 1e4)), ..Turning::PLAIN };
        let read = |c: serde_json::Value| -> Result<bool> {
            let c = Config::new(&c, "config.json")?;
            super::read(&c, 4, [16, 32], 1e6, (turning, false)).map(|r| r.is_some())
        };
        let flat = json!({"rope_type": "default", "rope_theta": 100.0});
        let d = read(json!({"rope_parameters": flat})).unwrap_err();
        assert_eq!(d.code, "unsupported-config", "{d}");
        assert!(read(json!({"rope_parameters": {"full_attention": flat}})).unwrap());
    }

    /// The key of the config that a family reads is its own.
    #[test]
    fn a_part_is_not_read_by_another_key() {
        let turning = Turning { part: Some(("rotary_pct", 0.25)), ..Turning::PLAIN };
        let pairs = |c: serde_json::Value| {
            let c = Config::new(&c, "config.json").unwrap();
            read(&c, 16, [16, 32], 1e4, (turning, false)).unwrap().unwrap().inv_freq.len()
        };
        assert_eq!(pairs(json!({"partial_rotary_factor": 1.0, "rotary_pct": 0.5})), 4);
        assert_eq!(pairs(json!({"partial_rotary_factor": 1.0})), 2);
        let own = json!({"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}});
        assert_eq!(pairs(own), 8);
    }

    #[test]
    fn default_and_linear() {
        let d = rope(json!({"rope_theta": 10000.0, "rope_scaling": null}), 4).unwrap();
        near(&d.inv_freq, &[1.0, 0.01]);
        let l =
            rope(json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}), 4).unwrap();
        near(&l.inv_freq, &[0.5, 0.005]);
        assert_eq!(rope(json!({}), 4).unwrap(), d);
    }

    #[test]
    fn mistakes_are_named() {
        let code = |c, dim| {
            let d = rope(c, dim).unwrap_err();
            (d.code, d.place.unwrap(), d.help.join(" "))
        };
        let (c, place, help) = code(json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), 4);
        assert_eq!((c, &*place), ("rope-type", "config.json: /rope_scaling/type"));
        assert!(help.contains("default, linear, llama3, yarn, longrope"), "{help}");
        let (c, place, _) = code(json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}), 4);
        assert_eq!((c, &*place), ("config", "config.json: /rope_scaling/factor"));
        assert_eq!(code(json!({"rope_theta": "x"}), 4).0, "config");
        assert_eq!(code(json!({"rope_scaling": {"rope_type": "linear"}}), 4).0, "config");
        assert_eq!(code(json!({}), 5).1, "config.json: /head_dim");
        assert_eq!(code(json!({"partial_rotary_factor": 0.5}), 4).0, "unsupported-config");
        assert_eq!(code(json!({"rope_theta": 1e-300}), 64).0, "config");
        assert_eq!(code(json!({"rope_scaling": [1]}), 4).0, "config");
    }
}
