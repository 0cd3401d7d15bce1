//! How much larger arenas are than what lives in them: `cargo bench --bench arenas` compiles many plans,
//! every model with every mesh, ZeRO stage, recomputation and number of microbatches, and prints, worst
//! first, by how many percent the arena of a rank exceeds the most bytes that are alive at once.
//! `cargo bench --bench arenas -- WORD…` takes those whose line has all the words.

use serde_json::{Value, json};
use shardc::flags::Flags;
use std::path::Path;

fn stored(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).expect("a config")).expect("JSON")
}

fn models() -> Vec<(&'static str, Value)> {
    let mixtral = json!({
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let gpt2 = json!({
        "model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257,
        "n_positions": 4096, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    });
    vec![("8b", stored("llama-3.1-8b.json")), ("gpt2-xl", gpt2), ("mixtral", mixtral)]
}

/// Axes, and whether with `--sp`.
const MESHES: [(&str, bool); 6] = [
    ("dp=8", false),
    ("dp=2,cp=4", false),
    ("cp=4", false),
    ("dp=4,tp=4", true),
    ("pp=4,dp=2", false),
    ("pp=2,dp=2,cp=2,tp=2", true),
];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut found: Vec<(f64, String)> = vec![];
    for (name, config) in models() {
        for (mesh, sp) in MESHES {
            for zero in 0..=3 {
                for recompute in ["none", "selective", "full"] {
                    for dtype in ["f32", "bf16"] {
                        for m in [1, 4, 16] {
                            let what = format!(
                                "{name} {mesh} zero={zero} recompute={recompute} {dtype} m={m}"
                            );
                            let asked = words.iter().all(|w| what.contains(w));
                            // A pipeline of one microbatch is idle most of the time.
                            if !asked || (m == 1 && mesh.starts_with("pp")) {
                                continue;
                            }
                            let excess = excess(&config, mesh, sp, zero, recompute, dtype, m);
                            match excess {
                                Ok(percent) => found.push((percent, what)),
                                Err(said) => println!("{what}: {said}"),
                            }
                        }
                    }
                }
            }
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (percent, what) in &found {
        println!("{percent:6.2} %  {what}");
    }
    let above = found.iter().filter(|f| f.0 > 5.0).count();
    println!("{above} of {} arenas are more than 5 % above what lives", found.len());
}

/// Percent by which the worst arena of a plan is larger than what lives in it at once.
fn excess(
    config: &Value,
    mesh: &str,
    sp: bool,
    zero: u8,
    recompute: &str,
    dtype: &str,
    m: usize,
) -> Result<f64, String> {
    let size = |axis: &str| {
        let found = mesh.split(',').find_map(|a| a.strip_prefix(axis)?.strip_prefix('='));
        found.map_or(1, |n| n.parse::<usize>().expect("a size"))
    };
    let flags = Flags::default()
        .with("mesh", mesh)
        .with("zero", zero)
        .maybe("sp", sp.then_some(""))
        .with("recompute", recompute)
        .with("dtype", dtype)
        .with("global-batch", m * size("dp"))
        .with("microbatch", 1)
        .with("seq", 4096);
    let o = flags.options().map_err(|e| e.message)?;
    let done = shardc::compile_config(config, &o).map_err(|e| e.message)?;
    let memory = done.stored.plan.classes.iter().map(|c| &c.memory);
    let above = memory.map(|m| (m.peak_bytes as f64 / m.live_bytes as f64 - 1.0) * 100.0);
    Ok(above.fold(0.0, f64::max))
}
