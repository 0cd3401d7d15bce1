//! Machines by name or from files, and models as prices see them.

use serde_json::Value;
use shardc_cost::device::{Device, Precision};
use shardc_cost::model::{Experts, Latent, Scans, Sizes};
use shardc_frontends::{Facts, Shape, gating};
use shardc_ir::diag::Result;
use shardc_ir::files;
use shardc_ir::plan::Mode;
use shardc_passes::depends::backward;
use shardc_passes::globs;
use shardc_passes::options::Options;
use shardc_passes::pipeline::Source;
use std::path::Path;

/// Largest file of a machine that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The machine of a name, or of a file that ends in `.toml`.
///
/// # Errors
/// `device` if there is none, or it has numbers that cannot be; `file`.
pub fn device(word: &str) -> Result<Device> {
    if !word.ends_with(".toml") {
        return Device::named(word);
    }
    let text = files::read_text(Path::new(word), MAX_FILE)?;
    Device::parse(&text).map_err(|d| d.at(word.to_string()))
}

/// The machine that a word means which may also name a file of speeds; none if it does that.
///
/// # Errors
/// `device` if it is neither a name nor a file, or the file is a machine's and has what cannot be; `file`.
pub fn in_place_of_speeds(word: &str) -> Result<Option<Device>> {
    let path = Path::new(word);
    if !word.contains(['.', '/']) && !path.exists() {
        return Device::named(word).map(Some);
    }
    let text = files::read_text(path, MAX_FILE)?;
    let of_machine = toml::from_str::<toml::Table>(&text).is_ok_and(|t| t.contains_key("sms"));
    of_machine.then(|| device(word)).transpose()
}

/// A machine whose domain is no larger than a node of these options.
///
/// # Errors
/// `device` if no domain is so small.
pub fn in_nodes(device: Device, o: &Options) -> Result<Device> {
    match o.node.filter(|&n| n < device.domain as usize) {
        Some(node) => device.with("domain", node as f64),
        None => Ok(device),
    }
}

/// The element type of products with these options.
pub fn precision(o: &Options) -> Precision {
    Precision::of(o.dtype).unwrap_or(Precision::F32)
}

/// A model's sizes, from its facts and its config.json.
pub fn sizes(f: &Facts, config: &Value) -> Sizes {
    // A program of one's own has no config of a family.
    let own = gating(config, "config.json", &Shape::new(1, 1, Mode::Infer)).ok();
    let latent = own.and_then(|g| g.latent).map(|l| Latent {
        query_rank: l.q_rank,
        kv_rank: l.kv_rank,
        plain: l.still,
        rotary: l.turning,
        value: l.value,
    });
    let experts = f.experts.map(|x| Experts {
        experts: x.experts,
        top_k: x.top_k,
        // Of narrower vectors it is as if experts were narrower: the same weights and products.
        ffn: x.narrow.map_or(x.ffn, |n| x.ffn.saturating_mul(n) / f.hidden.max(1)),
        shared: x.shared,
        dense_layers: own.map_or(0, |g| g.dense),
        domains: own.and_then(|g| g.groups).map(|(_, used)| used),
    });
    Sizes {
        layers: f.layers,
        hidden: f.hidden,
        heads: f.heads,
        kv_heads: f.kv_heads,
        head_dim: f.head_dim,
        // Where not all layers without experts have an MLP, its width in the mean of them.
        ffn: own
            .filter(|g| g.fed < g.dense)
            .map_or(f.ffn, |g| f.ffn.saturating_mul(g.fed) / g.dense),
        vocab: f.vocab,
        glu: own.is_none_or(|g| g.glu),
        experts,
        latent,
        scans: own.and_then(|g| g.scans).map(|(x, layers, delta)| Scans {
            layers,
            attention: own.map_or(0, |g| g.attends),
            heads: x.value_heads(),
            key_heads: x.key_heads,
            key_width: x.key_width,
            value_width: x.value_width,
            delta,
        }),
    }
}

/// Shares of weights, of what they multiply, and of attention for which a step of a model computes gradients.
///
/// # Errors
/// Those of the globs of its options.
pub fn gradients(source: &Source, o: &Options, sizes: &Sizes) -> Result<[f64; 3]> {
    if o.mode == Mode::Infer {
        return Ok([0.0; 3]);
    }
    let frozen = globs::frozen(&source.weights, o)?;
    let used = sizes.experts.map_or(1.0, |x| x.top_k as f64 / x.experts as f64);
    let f = &source.module.funcs[0];
    let b = backward(f, &source.weights, &|name| frozen.contains(name), used);
    Ok([b.weights, b.inputs, b.attention])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(fixture: &str, change: impl Fn(&mut Value)) -> Sizes {
        let file =
            format!("{}/../tests/fixtures/{fixture}/config.json", env!("CARGO_MANIFEST_DIR"));
        let facts = shardc_frontends::facts(Path::new(&file)).expect("a model");
        let text = std::fs::read_to_string(file).expect("a config");
        let mut config = serde_json::from_str(&text).expect("JSON");
        change(&mut config);
        sizes(&facts, &config)
    }

    /// A default that is written out changes nothing, and with one group of experts a token goes anywhere.
    #[test]
    fn sizes_are_what_the_family_makes_of_its_config() {
        let written = of("glm4_moe", |c| {
            c["n_group"] = 1.into();
            c["topk_group"] = 1.into();
            c["first_k_dense_replace"] = 1.into();
        });
        let absent = of("glm4_moe", |c| {
            let keys = ["n_group", "topk_group", "first_k_dense_replace"];
            keys.iter().for_each(|k| drop(c.as_object_mut().expect("keys").remove(*k)));
        });
        for s in [&written, &absent] {
            let e = s.experts.as_ref().expect("experts");
            assert_eq!((e.domains, e.dense_layers), (None, 1));
        }
        let groups = of("deepseek_v3", |_| ());
        assert!(groups.experts.expect("experts").domains.is_some());
        // As are widths of latent attention, which no other family has.
        let latent =
            |change: &dyn Fn(&mut Value)| of("deepseek_v3", change).latent.expect("latent");
        let direct = latent(&|c| c["q_lora_rank"] = Value::Null);
        assert_eq!((direct.query_rank, direct.kv_rank, direct.value), (None, 8, 8));
        let keys =
            ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];
        let without = |c: &mut Value| {
            keys.iter().for_each(|k| drop(c.as_object_mut().expect("keys").remove(*k)))
        };
        assert_eq!(latent(&without), Latent::V3);
        assert_eq!(of("llama_gqa", |c| c["kv_lora_rank"] = 8.into()).latent, None);
        for (fixture, glu) in [("gpt_neox", false), ("gpt2", false), ("llama_gqa", true)] {
            assert_eq!(of(fixture, |_| ()).glu, glu, "{fixture}");
        }
    }
}
