//! Families that are others with fields of their descriptors changed: each against transformers, on the layouts where such
//! a field could be cut wrongly. Those with parts of their own are in every other sweep.

use crate::fixture::*;
use crate::lab::{FIXTURES, Lab};
use shardc_passes::options::Options;
use shardc_testing::taken;

/// Folders of dense families.
pub const DENSE: &[&str] = &[
    "gemma",
    "granite",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "ernie4_5",
    "olmo3",
    "smollm3",
    "exaone4",
    "seed_oss",
    "starcoder2",
    "arcee",
    "nemotron",
    "hunyuan",
    "ministral3",
    "helium",
    "ministral",
    "stablelm",
    "phi",
    "olmo",
    "falcon",
    "gpt_bigcode",
    "gptj",
];
/// Of those with experts; the first [`WITH_AUX`] have the auxiliary loss, and equal the reference
/// with one microbatch.
pub const SPARSE: &[&str] = &[
    "qwen2_moe",
    "gpt_oss",
    "granitemoe",
    "olmoe",
    "minimax_m2",
    "deepseek_v2",
    "ernie4_5_moe",
    "llama4",
];

pub const WITH_AUX: usize = 3;

/// Mesh, `--sp`, stage of ZeRO, and microbatch.
type Row = (&'static [(&'static str, usize)], bool, u8, usize);

#[rustfmt::skip]
const MESHES: &[Row] = &[
    (&[], false, 0, 8),
    (&[("tp", 2)], false, 0, 8),
    (&[("dp_shard", 2)], false, 3, 4),
    (&[("dp_shard", 2), ("tp", 2)], true, 0, 4),
    (&[("cp", 2)], false, 0, 8),
    (&[("pp", 2)], false, 0, 2),
];

#[test]
fn dense() {
    for (f, name) in DENSE.iter().enumerate() {
        for (m, &(mesh, sp, zero, microbatch)) in MESHES.iter().enumerate() {
            if taken(f + m, MESHES.len()) {
                eprintln!("{name} {mesh:?} zero={zero} sp={sp} microbatch={microbatch}");
                train_and_compare(name, &Options { zero, ..options(mesh, sp, microbatch) });
            }
        }
    }
}

/// A family that is another one under its own name, of which transformers has no class.
#[test]
fn under_another_name() {
    let lab = Lab::new("another_name");
    let dir = format!("{FIXTURES}/deepseek_v3");
    for file in ["batch.safetensors", "expected.safetensors", "model.safetensors"] {
        std::os::unix::fs::symlink(format!("{dir}/{file}"), lab.path(file)).expect("a link");
    }
    let config = std::fs::read_to_string(format!("{dir}/config.json")).expect("a config");
    lab.write("config.json", config.replace("\"deepseek_v3\"", "\"kimi_k2\""));
    let whole = lab.path("").display().to_string();
    let (model, _) = train_and_compare(&whole, &options(&[("tp", 2)], true, 4));
    assert_eq!(model.family, "kimi_k2");
}

#[test]
fn with_experts() {
    for (f, name) in SPARSE.iter().enumerate() {
        for (m, &(mesh, sp, zero, microbatch)) in MESHES.iter().enumerate() {
            let ep = if mesh.iter().any(|a| a.0 == "dp_shard") { 2 } else { 1 };
            let microbatch = if f < WITH_AUX { 8 / ep } else { microbatch };
            if taken(f + m, MESHES.len()) {
                eprintln!("{name} {mesh:?} ep={ep} zero={zero} sp={sp} microbatch={microbatch}");
                train_and_compare(name, &Options { zero, ep, ..options(mesh, sp, microbatch) });
            }
        }
    }
}
