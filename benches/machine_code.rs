//! Machine code of the kernels that multiply on tensor cores, as a Markdown table: instructions of a step of the main
//! loop, registers, shared memory and occupancy, by kernel and architecture. Nothing runs, so no device is needed.
//!
//! ```text
//! NVDISASM=/usr/local/cuda/bin/nvdisasm cargo bench --bench machine_code            # sm_80 and sm_90a
//! NVDISASM=/usr/local/cuda/bin/nvdisasm cargo bench --bench machine_code -- sm_89
//! ```
//!
//! Needs NVRTC, found as by `compile --device cuda`, and `nvdisasm` of the toolkit, which PyPI has too
//! (`nvidia-cuda-nvdisasm`); without `NVDISASM` it is looked for in `PATH`. Main loops are those that hold tensor-core
//! instructions and are in no other such loop; instructions are counted as they stand, on all paths.

use serde_json::{Value, json};
use shardc_codegen::cuda::{self, limits::Limits};
use shardc_codegen::nvrtc::{self, Usage};
use shardc_ir::func::{Func, Module};
use shardc_ir::group::launches;
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::ops::Kind;
use shardc_ir::text::node_text;
use shardc_ir::types::DType;
use shardc_passes::options::Options;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::process::Command;

/// Registers and threads of a multiprocessor, threads of a warp, and shared memory that the system takes of each block.
const REGISTERS: u32 = 65536;
const THREADS: u32 = 2048;
const WARP: u32 = 32;
const OF_SYSTEM: u32 = 1 << 10;

/// Layers as those of published models: heads of 128 and of 64, and experts.
fn models() -> Vec<Value> {
    let llama = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "initializer_range": 0.02, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    });
    let mut narrow = llama.clone();
    (narrow["hidden_size"], narrow["intermediate_size"]) = (2048.into(), 8192.into());
    let mut experts = llama.clone();
    experts["model_type"] = "mixtral".into();
    experts["architectures"] = json!(["MixtralForCausalLM"]);
    (experts["num_local_experts"], experts["num_experts_per_tok"]) = (8.into(), 2.into());
    experts["router_aux_loss_coef"] = 0.0.into();
    experts["output_router_logits"] = false.into();
    vec![llama, narrow, experts]
}

/// A kernel in the table, and the architecture.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    what: String,
    arch: String,
}

/// What launches do with tensor cores, by the rule of the op and the sizes that choose the code.
fn named(m: &Module, f: &Func, nodes: Range<usize>, entry: &str) -> Option<String> {
    let heavy = f.nodes[nodes.clone()].iter().find(|n| n.op.is_heavy())?;
    let width = |v| f.ty(v).dims.last().map_or(0, |d| d.size);
    let rest = nodes.len() - 1;
    let of = match heavy.op.is_matrix_product() {
        // `dot[bsf,hf->bsh]` of `%y = dot[bsf,hf->bsh] %x, %w : …`
        true => node_text(&m.mesh, f, heavy).text.split(' ').nth(2)?.to_string(),
        false if heavy.op.facts().kind == Kind::Attention => {
            format!("{entry}, heads of {}", width(heavy.ins[0]))
        }
        false => entry.to_string(),
    };
    Some(if rest == 0 { of } else { format!("{of} and {rest} more") })
}

/// Instructions of a function in the order of its code, and the place of each label.
#[derive(Default)]
struct Code {
    instructions: Vec<String>,
    labels: BTreeMap<String, usize>,
}

/// The functions of a listing of nvdisasm.
fn listed(text: &str) -> BTreeMap<String, Code> {
    let mut all: BTreeMap<String, Code> = BTreeMap::new();
    let mut name = String::new();
    for line in text.lines() {
        let label = line.strip_suffix(':');
        if let Some(section) = label.and_then(|l| l.strip_prefix(".text.")) {
            name = section.to_string();
        }
        let code = all.entry(name.clone()).or_default();
        if let Some(label) = label.filter(|l| l.starts_with(".L_")) {
            code.labels.insert(label.to_string(), code.instructions.len());
        }
        if let Some((_, instruction)) =
            line.trim_start().strip_prefix("/*").and_then(|l| l.split_once("*/"))
        {
            code.instructions.push(instruction.trim().to_string());
        }
    }
    all
}

impl Code {
    /// Instructions of tensor cores in a range.
    fn tensor(&self, range: &Range<usize>) -> usize {
        let names = ["HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA"];
        let is = |i: &&String| i.split([' ', '.']).any(|word| names.contains(&word));
        self.instructions[range.clone()].iter().filter(is).count()
    }

    /// Loops with instructions of tensor cores that are in no other such loop: their instructions, and those among
    /// them of tensor cores.
    fn main_loops(&self) -> BTreeSet<(usize, usize)> {
        let back = |(i, text): (usize, &String)| {
            let to = text.contains("BRA").then(|| text.split(['(', ')']).nth(1))??;
            let start = *self.labels.get(to)?;
            (start <= i).then_some(start..i + 1)
        };
        let all: Vec<_> = self.instructions.iter().enumerate().filter_map(back).collect();
        let with: Vec<_> = all.into_iter().filter(|r| self.tensor(r) > 0).collect();
        let inside =
            |a: &Range<usize>| with.iter().any(|b| a != b && b.start <= a.start && a.end <= b.end);
        let outer = with.iter().filter(|r| !inside(r));
        outer.map(|r| (r.len(), self.tensor(r))).collect()
    }
}

/// Warps of a multiprocessor that are there at once.
fn warps(l: &DeviceLaunch, u: &Usage, limits: &Limits) -> u32 {
    let own = l.threads.next_multiple_of(WARP);
    let registers = REGISTERS / (u.registers.next_multiple_of(8) * own).max(1);
    let shared = (limits.shared + OF_SYSTEM) / (u.shared + l.shared + OF_SYSTEM);
    registers.min(shared).min(THREADS / own) * own / WARP
}

/// A row of numbers, if the kernel has a main loop.
fn row(l: &DeviceLaunch, arch: &str, limits: &Limits) -> Option<String> {
    let made = nvrtc::compile(&l.source, arch).unwrap_or_else(|e| panic!("{e}"));
    let u = made.usage.iter().find(|u| u.entry == l.entry)?;
    let file = std::env::temp_dir().join(format!("shardc-{}.cubin", std::process::id()));
    std::fs::write(&file, &made.cubin).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let tool = std::env::var("NVDISASM").unwrap_or_else(|_| "nvdisasm".into());
    let out = Command::new(&tool).arg("-c").arg(&file).output();
    let out = out.unwrap_or_else(|e| panic!("{tool}: {e}"));
    std::fs::remove_file(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    assert!(out.status.success(), "{tool}: {}", String::from_utf8_lossy(&out.stderr));
    let all = listed(&String::from_utf8_lossy(&out.stdout));
    let loops = all.get(&*l.entry)?.main_loops();
    let each = |of: &dyn Fn(&(usize, usize)) -> String| {
        loops.iter().map(of).collect::<Vec<_>>().join(", ")
    };
    (!loops.is_empty()).then(|| {
        format!(
            "{} | {} | {} | {} | {} | {:.1} | {}",
            each(&|x| x.0.to_string()),
            each(&|x| x.1.to_string()),
            each(&|x| format!("{:.1}", x.0 as f64 / x.1 as f64)),
            u.registers,
            u.spilled,
            f64::from(u.shared + l.shared) / 1024.0,
            warps(l, u, limits)
        )
    })
}

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|a| a.starts_with("sm_")).collect();
    let archs = if given.is_empty() { vec!["sm_80".into(), "sm_90a".into()] } else { given };
    let mut rows: BTreeMap<Row, String> = BTreeMap::new();
    for config in models() {
        let o = Options {
            seq: 2048,
            global_batch: 1,
            microbatch: 1,
            dtype: DType::BF16,
            ..Options::default()
        };
        let plan =
            shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}")).stored.plan;
        let program = shardc_codegen::program(&plan, 0).unwrap_or_else(|e| panic!("{e}"));
        for arch in &archs {
            let limits = Limits::of(arch);
            let made = cuda::program(&program, &limits);
            for (f, own) in plan.module.funcs.iter().zip(&made) {
                for (x, kernels) in launches(f).iter().zip(own) {
                    for l in kernels {
                        let Some(what) = named(&plan.module, f, x.nodes.clone(), &l.entry) else {
                            continue;
                        };
                        let key = Row { what, arch: arch.clone() };
                        if !rows.contains_key(&key)
                            && let Some(numbers) = row(l, arch, &limits)
                        {
                            rows.insert(key, numbers);
                        }
                    }
                }
            }
        }
    }
    println!("compiled by {}", nvrtc::identity().unwrap_or_else(|e| panic!("{e}")));
    println!();
    println!(
        "| kernel | for | instructions | of tensor cores | ratio | registers | spilled | shared, KiB | warps |"
    );
    println!("|-|-|-:|-:|-:|-:|-:|-:|-:|");
    for (k, numbers) in &rows {
        println!("| `{}` | {} | {numbers} |", k.what, k.arch);
    }
}
