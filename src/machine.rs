//! Machines by name or from files, and models as prices see them.

use serde_json::Value;
use shardc_cost::device::{Device, Precision};
use shardc_cost::model::{Experts, Latent, Sizes};
use shardc_frontends::Facts;
use shardc_ir::diag::Result;
use shardc_ir::files;
use shardc_passes::options::Options;
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

/// The element type of products with these options.
pub fn precision(o: &Options) -> Precision {
    Precision::of(o.dtype).unwrap_or(Precision::F32)
}

/// A model's sizes, from its facts and its config.json.
pub fn sizes(family: &str, f: &Facts, config: &Value) -> Sizes {
    let n = |key: &str| config.get(key).and_then(Value::as_u64).map(|n| n as usize);
    let latent = n("kv_lora_rank").map(|kv_rank| Latent {
        query_rank: n("q_lora_rank").unwrap_or(f.hidden),
        kv_rank,
        plain: n("qk_nope_head_dim").unwrap_or(f.head_dim),
        rotary: n("qk_rope_head_dim").unwrap_or(0),
        value: n("v_head_dim").unwrap_or(f.head_dim),
    });
    let experts = f.experts.map(|x| Experts {
        experts: x.experts,
        top_k: x.top_k,
        ffn: x.ffn,
        shared: x.shared,
        dense_layers: n("first_k_dense_replace").unwrap_or(0).min(f.layers),
        domains: n("topk_group"),
    });
    Sizes {
        layers: f.layers,
        hidden: f.hidden,
        heads: f.heads,
        kv_heads: f.kv_heads,
        head_dim: f.head_dim,
        ffn: f.ffn,
        vocab: f.vocab,
        glu: family != "gpt2",
        experts,
        latent,
    }
}
