//! What the search looks at: modes of context parallelism, families of layouts, what is trained.

use super::{command, lab, planned};
use crate::lab::Lab;
use serde_json::{Value as Json, json};
use shardc_testing::{nightly, samples, taken};

fn model(name: &str) -> String {
    format!("{}/benches/configs/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

fn found(lab: &Lab, job: &[&str]) -> Json {
    let out = lab.ok(&[&["plan"], job, &["--machine", "h100-sxm", "--format", "json"]].concat());
    serde_json::from_slice(&out.stdout).expect("JSON")
}

/// The formula of every mode and split of cp is near what its plan takes, in a domain and over several. Of a contiguous ring it
/// errs most, whose ranks have more to do in each step than in the one before: no causal model is dealt so by itself.
#[test]
fn modes_of_context_parallelism_are_known_in_closed_form() {
    let lab = Lab::new("modes-of-cp");
    let model = model("llama-3.1-8b");
    let modes = ["all-gather", "ring", "ulysses"];
    let all = ["cp=4", "cp=16"].into_iter().flat_map(|cp| {
        let splits = ["zigzag", "contiguous"].into_iter();
        splits.flat_map(move |s| modes.into_iter().map(move |m| (cp, m, s)))
    });
    for (_, (cp, mode, split)) in all.enumerate().filter(|(i, _)| taken(*i, 6)) {
        let fix = format!("tp=1,pp=1,zero=3,{cp}");
        let job = ["--gpus", "16", "--global-batch", "16", "--seq", "32768", "--budget", "1"];
        let of = ["--fix", &fix, "--cp-mode", mode, "--cp-split", split, "--top", "1"];
        let found = found(&lab, &[&[&*model], &job[..], &of].concat());
        let line = &found["plans"][0];
        let [own, closed] = ["step_s", "closed_form_s"].map(|n| line[n].as_f64().expect("seconds"));
        let off = closed / own - 1.0;
        println!("{cp} {mode} {split}: {own:.3} s, by formula {:+.1} %", 100.0 * off);
        let most = if (mode, split) == ("ring", "contiguous") { 0.15 } else { 0.05 };
        assert!(off.abs() <= most, "{cp} {mode} {split}: {own} {closed}");
        let said = line["options"].clone();
        assert_eq!(said["cp-split"], split, "{said}");
        assert_eq!(said.get("cp-mode").map_or("all-gather", |m| m.as_str().expect("a word")), mode);
    }
}

/// The formula of layers that walk a state, and of windows of attention, is near what their plans take.
#[test]
fn recurrences_and_windows_are_known_in_closed_form() {
    let lab = Lab::new("recurrences-in-closed-form");
    let text = |c: &Json| c.to_string();
    // Sizes that are not said are those of the classes: of Mamba-2, Bamba 9B, Nemotron-H 8B.
    let mamba = json!({"model_type": "mamba2", "num_hidden_layers": 4});
    let bamba = json!({
        "model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2],
    });
    let nemotron = json!({
        "model_type": "nemotron_h", "hidden_size": 4096, "hybrid_override_pattern": "M-M-M*-M-",
        "num_hidden_layers": 9,
    });
    let qwen = json!({
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "moe_intermediate_size": 512, "num_experts": 32, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "decoder_sparse_step": 1,
    });
    // Three of four layers see 4,096 tokens.
    let olmo = json!({
        "model_type": "olmo3", "hidden_size": 4096, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
        "vocab_size": 100352, "max_position_embeddings": 65536, "sliding_window": 4096,
    });
    let models = [
        ("mamba2", mamba),
        ("bamba", bamba),
        ("nemotron", nemotron),
        ("qwen", qwen),
        ("olmo3", olmo),
    ];
    let fixes = ["tp=1,pp=1,cp=1,zero=3", "tp=2,pp=1,cp=1,zero=1", "cp=2,tp=1,pp=1,zero=1"];
    let all = models.iter().flat_map(|m| fixes.iter().map(move |f| (m, f)));
    for (_, ((name, config), fix)) in all.enumerate().filter(|(i, _)| taken(*i, 3)) {
        lab.write(&format!("{name}.json"), text(config));
        let path = lab.path(&format!("{name}.json"));
        let path = path.to_str().expect("a path");
        let seq = if *name == "olmo3" { "32768" } else { "4096" };
        let job = ["--gpus", "8", "--global-batch", "32", "--seq", seq, "--dtype", "bf16"];
        let of = ["--fix", fix, "--top", "1", "--budget", "1", "--moe-bound", "2"];
        let found = found(&lab, &[&[path], &job[..], &of].concat());
        let line = &found["plans"][0];
        let [own, closed] = ["step_s", "closed_form_s"].map(|n| line[n].as_f64().expect("seconds"));
        let off = closed / own - 1.0;
        println!("{name} {fix}: {own:.3} s, by formula {:+.1} %", 100.0 * off);
        assert!(off.abs() <= 0.1, "{name} {fix}: {own} {closed}");
    }
}

/// All modes are looked at, and the command of a line says its own.
#[test]
fn modes_of_context_parallelism_are_searched() {
    let lab = lab("plan-modes-of-cp", "llama_mha");
    let job = ["--gpus", "2", "--global-batch", "2", "--seq", "16", "--fix", "cp=2,zero=0"];
    let all = planned(&lab, &[&job[..], &["--top", "12"]].concat());
    let lines = all["plans"].as_array().expect("plans");
    let words: Vec<&str> = lines.iter().map(|p| p["layout"].as_str().expect("words")).collect();
    for word in ["cp2 ring", "cp2 ulysses", "cp2 mb"] {
        let line = words.iter().position(|w| w.starts_with(word));
        let line = &lines[line.unwrap_or_else(|| panic!("{word}: {words:?}"))];
        let flags = command(line, "p");
        lab.ok(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        let made = shardc::plan_dir::read(&lab.path("p")).expect("a plan").plan;
        assert_eq!(line["peak_bytes"].as_u64(), Some(made.peak_bytes() as u64), "{flags:?}");
    }
    let one = planned(&lab, &[&job[..], &["--top", "12", "--cp-mode", "ring"]].concat());
    assert_eq!(3 * one["legal"].as_u64().expect("a number"), all["legal"].as_u64().expect("one"));
    // 6 tokens are not four equal chunks.
    let odd = ["--gpus", "2", "--global-batch", "2", "--seq", "6", "--fix", "cp=2,zero=0"];
    let odd = planned(&lab, &[&odd[..], &["--top", "1", "--cp-mode", "all-gather"]].concat());
    assert_eq!(odd["plans"][0]["options"]["cp-split"], "contiguous", "{odd}");
}

/// What is trained, and by which rule, is planned: memory and time are those of the command of a line, and gradients that
/// nobody computes are no model FLOPs.
#[test]
fn what_is_trained_is_planned() {
    let lab = lab("plan-trained", "llama_deep");
    let job = ["--gpus", "2", "--global-batch", "4", "--seq", "16", "--fix", "dp=2,zero=1,mb=1"];
    let of = |more: &[&str]| {
        let all = planned(&lab, &[&job[..], &["--top", "1"], more].concat());
        all["plans"][0].clone()
    };
    let whole = of(&[]);
    let number = |p: &Json, n: &str| p[n].as_f64().expect("a number");
    let flops = |p: &Json| number(p, "mfu") * number(p, "step_s");
    for more in [
        &["--optimizer", "muon"][..],
        &["--optimizer", "sgd"],
        &["--freeze", "model.layers.*"],
        &["--freeze", "model.embed_tokens*", "--freeze", "model.layers.0.*"],
        &["--lora", "r=2"],
    ] {
        let line = of(more);
        // A command has a flag for each of several values.
        let mut flags: Vec<String> = vec![];
        for (flag, v) in line["options"].as_object().expect("flags") {
            for v in v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]) {
                flags.push(format!("--{flag}"));
                flags.extend((v != true).then(|| v.as_str().map_or(v.to_string(), String::from)));
            }
        }
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        lab.ok(&[&["compile", "m", "-o", "p"], &flags[..]].concat());
        let made = shardc::plan_dir::read(&lab.path("p")).expect("a plan").plan;
        assert_eq!(line["peak_bytes"].as_u64(), Some(made.peak_bytes() as u64), "{more:?}");
        let said = lab.ok(&["price", "p", "--machine", "h100-sxm", "--format", "json"]).stdout;
        let price: Json = serde_json::from_slice(&said).expect("JSON");
        let off = number(&price, "mfu") / number(&line, "mfu") - 1.0;
        assert!(off.abs() < 1e-6, "{more:?}: {off}");
        let share = flops(&line) / flops(&whole);
        println!("{more:?}: {share:.3} of all model FLOPs");
        let wanted = match more {
            ["--optimizer", _] => 0.9999..=1.0001,
            // Of frozen products inputs alone have gradients, but those of the first layer; adapters of so small a model are
            // a part of it.
            ["--lora", _] => 0.66..=0.8,
            // The embedding is trained: all is gone through backward.
            ["--freeze", "model.layers.*"] => 0.66..=0.8,
            _ => 0.85..=0.99,
        };
        assert!(wanted.contains(&share), "{more:?}: {share}");
    }
}

/// What no plan has is priced only for a target that has it (products in fp8), or where layers are computed again for want of
/// room (activations on the host): beside the lines of plans, of one of them, marked, and never among them unless it is asked for.
#[test]
fn what_no_plan_has_is_marked_and_beside_the_lines() {
    let lab = Lab::new("plan-beyond");
    let small = model("llama-3.1-8b");
    let of = |seq: &str, more: &[&str]| {
        let job = ["--gpus", "16", "--global-batch", "64", "--seq", seq, "--budget", "4"];
        found(&lab, &[&[&*small], &job[..], &["--top", "1"], more].concat())
    };
    let extras = |found: &Json| -> Vec<String> {
        let lines = found["plans"].as_array().expect("plans");
        let is = |p: &Json| p["executable"].as_bool().expect("a word");
        assert!(!lines.is_empty() && lines.iter().all(is), "{found}");
        let own = |n: &str| lines[0][n].as_f64().expect("a number");
        let all = found["by_formula"].as_array().expect("lines");
        for b in all {
            assert!(b["executable"] == false && b["line"] == 1, "{b}");
            assert!(b["step_s"].as_f64().is_some_and(|s| s > 0.0 && s < own("step_s")), "{b}");
            assert_eq!(b["host_bytes"].as_u64() > Some(0), b["extra"] == "offload", "{b}");
        }
        all.iter().map(|b| b["extra"].as_str().expect("a word").to_string()).collect()
    };
    let none: [&str; 0] = [];
    assert_eq!(extras(&of("8192", &[])), none);
    for to in ["megatron", "torchtitan"] {
        assert_eq!(extras(&of("8192", &["--for", to])), ["fp8"], "{to}");
    }
    assert_eq!(extras(&of("8192", &["--for", "deepspeed"])), none);
    // Whole layers are computed again in the only layouts that fit.
    let full = of("32768", &["--fix", "tp=1,pp=1,cp=1,zero=3"]);
    assert_eq!(extras(&full), ["offload"]);
    assert_eq!(full["plans"][0]["layout"], "dp16 zero3 mb1 full", "{full}");
    // Asked for, lines are of it, and say so.
    let asked = of("8192", &["--what-if", "offload=50"]);
    assert_eq!(asked["not_executable"], json!(["offload=50"]), "{asked}");
    let lines = asked["plans"].as_array().expect("plans");
    assert!(lines.iter().all(|p| p["executable"] == false), "{asked}");
}

/// Modules of layers are computed again where that is fastest of what fits; and some layers of all, of the microbatch that
/// is fastest so, which is another than that of the fastest plan with all layers.
#[test]
fn modules_and_some_layers_are_computed_again() {
    let lab = Lab::new("plan-again");
    let job = |name: &str, [gpus, batch, seq, top]: [&str; 4], fix: &str, more: &[&str]| {
        let path = model(name);
        let job = ["--gpus", gpus, "--global-batch", batch, "--seq", seq, "--dtype", "bf16"];
        let how = ["--top", top, "--budget", "6", "--fix", fix];
        found(&lab, &[&[&*path], &job[..], &how, more].concat())["plans"].clone()
    };
    let bound = ["--moe-bound", "2"];
    let fix = "tp=1,pp=1,cp=1,ep=1,zero=3,mb=4";
    let all = job("qwen3-30b-a3b", ["16", "1024", "4096", "2"], fix, &bound);
    assert_eq!(all[0]["layout"], "dp16 zero3 mb4 moe", "{all}");
    let size = ["64", "256", "8192", "3"];
    let seconds = |p: &Json| p["step_s"].as_f64().expect("seconds");
    let all = job("llama-3.1-70b", size, "tp=1,pp=1,cp=1,zero=3", &[]);
    let words: Vec<&str> = (0..3).map(|i| all[i]["layout"].as_str().expect("words")).collect();
    assert!(words[0].starts_with("dp64 zero3 mb1 full in "), "{words:?}");
    assert_eq!(words[1..], ["dp64 zero3 mb4 full", "dp64 zero3 mb2 full"]);
    assert_eq!(all[0]["options"]["recompute"], "mix:50*full+elementwise", "{all}");
    // Never with another microbatch than is asked for.
    let fixed = job("llama-3.1-70b", size, "tp=1,pp=1,cp=1,zero=3,mb=2", &[]);
    let lines = fixed.as_array().expect("lines").iter();
    lines.for_each(|l| assert!(l["layout"].as_str().is_some_and(|l| l.contains(" mb2 ")), "{l}"));
    // What is found with that microbatch alone is not faster.
    let alone = job("llama-3.1-70b", size, "tp=1,pp=1,cp=1,zero=3,mb=1", &[]);
    assert!(seconds(&all[0]) <= 1.01 * seconds(&alone[0]), "{all} {alone}");
}

/// Jobs that people run: model, GPUs, machine, sequences of a step, tokens of each.
const JOBS: [[&str; 5]; 12] = [
    ["llama-3.1-8b", "8", "h100-sxm", "32", "8192"],
    ["llama-3.1-8b", "16", "h100-sxm", "16", "65536"],
    ["llama-3.1-8b", "64", "h100-sxm", "128", "8192"],
    ["llama-3.1-8b", "256", "h100-sxm", "256", "4096"],
    ["llama-3.1-70b", "32", "h100-sxm", "64", "4096"],
    ["llama-3.1-70b", "64", "h100-sxm", "256", "8192"],
    ["llama-3.1-70b", "256", "h100-sxm", "256", "16384"],
    ["llama-3.1-70b", "512", "h100-sxm", "1024", "8192"],
    ["llama-3.1-405b", "512", "h100-sxm", "256", "8192"],
    ["llama-3.1-405b", "1024", "h100-sxm", "1536", "8192"],
    ["qwen3-30b-a3b", "16", "h100-sxm", "256", "4096"],
    ["qwen3-235b-a22b", "256", "h100-sxm", "2048", "4096"],
];

/// Those of `.ci/jobs` that are not among them.
const MORE: [[&str; 5]; 6] = [
    ["llama-3.1-405b", "256", "gb200-nvl72", "1536", "8192"],
    ["llama-3.1-405b", "16384", "h100-sxm", "16384", "8192"],
    ["llama-3.1-8b", "16", "h100-sxm", "16", "131072"],
    ["deepseek-v3", "256", "gb200-nvl72", "4096", "4096"],
    ["deepseek-v3", "1024", "h100-sxm", "8192", "4096"],
    ["qwen3-30b-a3b", "16", "h100-sxm", "1024", "4096"],
];

/// Seconds of the first line of a job; none if no layout fits, as of a family that is asked for.
fn first_line(
    lab: &Lab,
    [name, gpus, machine, batch, seq]: [&str; 5],
    more: &[&str],
) -> Option<f64> {
    let path = model(name);
    let bound = ["--moe-bound", "2"];
    let experts = name.starts_with("qwen") || name.starts_with("deepseek");
    let bound = if experts { &bound[..] } else { &[] };
    let job = ["--gpus", gpus, "--global-batch", batch, "--seq", seq, "--dtype", "bf16"];
    let rest = ["--machine", machine, "--format", "json"];
    let out = lab.shardc(&[&["plan", &path], &job[..], &rest, bound, more].concat());
    let found = out.status.success().then(|| serde_json::from_slice::<Json>(&out.stdout));
    found?.expect("JSON")["plans"][0]["step_s"].as_f64()
}

/// For 12 jobs on 3 networks no family that is fixed is faster by more than 3 % than line 1; two of them in every run.
#[test]
fn no_family_of_any_job_is_faster_than_the_first_line() {
    let lab = Lab::new("families-of-jobs");
    let networks = ["nic=6", "nic=25", "nic=50"];
    let families =
        ["tp=1,pp=1,cp=1", "tp=1,cp=1", "pp=1,cp=1", "pp=1", "pp=2", "pp=4,tp=4", "cp=2"];
    let all = networks.into_iter().flat_map(|n| JOBS.into_iter().map(move |j| (n, j)));
    let some: Vec<_> = if nightly() { all.collect() } else { all.take(2).collect() };
    let mut slower: Vec<String> = vec![];
    for (nic, job) in some {
        let best = |more: &[&str]| {
            first_line(&lab, job, &[&["--what-if", nic, "--top", "1"], more].concat())
        };
        let name = format!("{} on {}, {nic}", job[0], job[1]);
        let budget = samples(10, 40).to_string();
        let first = best(&["--budget", &budget]).unwrap_or_else(|| panic!("{name}"));
        for fix in families.iter().take(samples(2, 7) as usize) {
            let fixed = best(&["--fix", fix, "--budget", &samples(4, 12).to_string()]);
            let fixed = fixed.unwrap_or(f64::INFINITY);
            let said = format!("{name}: {first:.3} s, {fix}: {:.3}", fixed / first);
            println!("{said}");
            slower.extend((first > 1.03 * fixed).then_some(said));
        }
    }
    assert!(slower.is_empty(), "{}", slower.join("\n"));
}

/// Line 1 is within 1 % of the fastest that is found with ten times the budget: of a small model in every run, of all jobs
/// each night.
#[test]
fn ten_times_the_budget_finds_nothing_faster() {
    let small = lab("plan-ten-times", "llama_deep");
    let jobs = [["8", "16"], ["6", "24"], ["16", "64"]];
    for (_, [gpus, batch]) in jobs.into_iter().enumerate().filter(|(i, _)| taken(*i, 3)) {
        let best = |budget: &str| {
            let job = ["--gpus", gpus, "--global-batch", batch, "--seq", "32", "--budget", budget];
            planned(&small, &job)["plans"][0]["step_s"].as_f64().expect("seconds")
        };
        let [first, more] = ["40", "400"].map(best);
        println!("llama_deep on {gpus}: {first} s, {:.4} of it with 400", more / first);
        assert!(first <= 1.01 * more, "{gpus}: {first} {more}");
    }
    let lab = Lab::new("ten-times");
    let mut slower: Vec<String> = vec![];
    for job in JOBS.into_iter().chain(MORE).filter(|_| nightly()) {
        let best = |budget: &str| first_line(&lab, job, &["--budget", budget]).expect("it fits");
        let [first, more] = ["40", "400"].map(best);
        let said =
            format!("{} on {} {}: {first} s, {:.4} with 400", job[0], job[1], job[2], more / first);
        println!("{said}");
        slower.extend((first > 1.01 * more).then_some(said));
    }
    assert!(slower.is_empty(), "{}", slower.join("\n"));
}
