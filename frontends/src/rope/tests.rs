//! Frequencies against the numbers of transformers, and mistakes.

use super::*;
use serde_json::json;

fn rope(config: serde_json::Value, head_dim: usize) -> Result<Rope> {
    let config = Config::new(&config, "config.json")?;
    Ok(read(&config, ("head_dim", head_dim), [16, 32], (Turning::PLAIN, false))?.expect("a rope"))
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
        Ok(read(&c, ("head_dim", 8), [16, 32], (turning, false))?.expect("a rope"))
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
    let turning = Turning { local: Some((Some("rope_local_base_freq"), 1e4)), ..Turning::PLAIN };
    let read = |c: serde_json::Value| -> Result<bool> {
        let c = Config::new(&c, "config.json")?;
        super::read(&c, ("head_dim", 4), [16, 32], (turning, false)).map(|r| r.is_some())
    };
    let flat = json!({"rope_type": "default", "rope_theta": 100.0});
    let both = json!({"rope_parameters": {"full_attention": flat}, "rope_scaling": flat});
    let d = read(both).unwrap_err();
    assert_eq!(d.code, "unsupported-config", "{d}");
    assert!(read(json!({"rope_parameters": {"full_attention": flat}})).unwrap());
}

/// The key of the config that a family reads is its own.
#[test]
fn a_part_is_not_read_by_another_key() {
    let turning = Turning { part: Some(("rotary_pct", 0.25)), ..Turning::PLAIN };
    let pairs = |c: serde_json::Value| {
        let c = Config::new(&c, "config.json").unwrap();
        read(&c, ("head_dim", 16), [16, 32], (turning, false)).unwrap().unwrap().inv_freq.len()
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
    let l = rope(json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}), 4).unwrap();
    near(&l.inv_freq, &[0.5, 0.005]);
    assert_eq!(rope(json!({}), 4).unwrap(), d);
}

#[test]
fn mistakes_are_named() {
    let code = |c, dim| {
        let d = rope(c, dim).unwrap_err();
        (d.code, d.place.unwrap(), d.help.join(" "))
    };
    let dynamic = json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}});
    let d = rope(dynamic.clone(), 4).unwrap_err();
    assert!(d.message.ends_with("`dynamic` depends on the length of each row"), "{d}");
    let (c, place, help) = code(dynamic, 4);
    assert_eq!((c, &*place), ("rope-type", "config.json: /rope_scaling/type"));
    assert!(help.contains("default, linear, llama3, yarn, longrope"), "{help}");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors/rope-type.md");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains(&format!("= help: {help}\n")), "{page}");
    let (c, place, _) = code(json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}), 4);
    assert_eq!((c, &*place), ("config", "config.json: /rope_scaling/factor"));
    assert_eq!(code(json!({"rope_theta": "x"}), 4).0, "config");
    assert_eq!(code(json!({"rope_scaling": {"rope_type": "linear"}}), 4).0, "config");
    assert_eq!(code(json!({}), 5).1, "config.json: /head_dim");
    let part = json!({"partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}});
    assert_eq!(code(part, 4).0, "unsupported-config");
    assert_eq!(code(json!({"rope_theta": 1e-300}), 64).0, "config");
    assert_eq!(code(json!({"rope_scaling": [1]}), 4).0, "config");
}
