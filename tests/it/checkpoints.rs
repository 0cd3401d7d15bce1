//! Checkpoints: going on is as if nothing had happened, on any mesh; what was changed is refused.

use clap::Parser;
use shardc::checkpoint::Saved;
use shardc::commands::verify::{Verify, checks};
use shardc::commands::{Cli, run};
use shardc::plan_dir::{read, reseal};
use shardc::stored::Stored;
use shardc_ir::diag::Diag;
use shardc_runtime::holdings::{Holding, holdings};
use shardc_testing::nightly;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A folder of a test's own, empty.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoints").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn shardc(dir: &Path, args: &[&str]) -> Output {
    Command::new(SHARDC).args(args).current_dir(dir).output().expect("shardc runs")
}

fn good(dir: &Path, args: &[&str]) -> String {
    let o = shardc(dir, args);
    assert!(o.status.success(), "{args:?}: {}", text(&o.stderr));
    text(&o.stdout)
}

fn compile(dir: &Path, model: &str, flags: &[&str], plan: &str) {
    compile_for(dir, model, ("16", "8"), flags, plan);
}

fn compile_for(dir: &Path, model: &str, (seq, batch): (&str, &str), flags: &[&str], plan: &str) {
    let model = fixture(model);
    let base = ["compile", model.to_str().expect("a path"), "--seq", seq, "--global-batch", batch];
    good(dir, &[&base[..], &["--clip", "0.5", "--lr", "3e-3"], flags, &["-o", plan]].concat());
}

/// Trains on random tokens; by step, the loss and the norm as they are printed.
fn train(dir: &Path, plan: &str, flags: &[&str]) -> Vec<(u64, f64, f64)> {
    let base = ["run", plan, "--threads", "1", "--format", "json"];
    let out = good(dir, &[&base[..], flags].concat());
    let number = |line: &serde_json::Value, key: &str| line[key].as_f64().expect("a number");
    let lines = out.lines().map(|l| serde_json::from_str(l).expect("JSON"));
    lines
        .map(|l: serde_json::Value| {
            (l["step"].as_u64().expect("a step"), number(&l, "loss"), number(&l, "grad_norm"))
        })
        .collect()
}

/// All files of a folder, by their path in it.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut out = vec![];
    let mut todo = vec![dir.to_path_buf()];
    while let Some(d) = todo.pop() {
        for e in std::fs::read_dir(&d).expect("a folder").flatten() {
            match e.path().is_dir() {
                true => todo.push(e.path()),
                false => {
                    let name = e.path().strip_prefix(dir).expect("inside").to_path_buf();
                    out.push((name, std::fs::read(e.path()).expect("a file")));
                }
            }
        }
    }
    out.sort();
    out
}

#[test]
fn going_on_is_as_if_nothing_had_happened() {
    for (model, flags) in [
        ("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp", "--microbatch", "2"][..]),
        ("gpt2", &["--mesh", "dp=2", "--zero", "3", "--dtype", "bf16"]),
        ("llama_deep", &["--mesh", "pp=2,tp=2", "--microbatch", "4"]),
        ("deepseek_v3", &["--mesh", "dp_shard=2,ep=2", "--moe-bias-rate", "0.01"]),
    ] {
        let dir = folder(&format!("on-{model}"));
        compile(&dir, model, flags, "plan");
        let whole = train(&dir, "plan", &["--steps", "6", "--save", "whole"]);
        let saves = ["--save", "ckpt", "--save-every", "2", "--keep", "1"];
        let first = train(&dir, "plan", &[&["--steps", "3"], &saves[..]].concat());
        assert!(dir.join("ckpt/step-00000003").is_dir());
        assert!(!dir.join("ckpt/step-00000002").exists(), "1 is kept");
        let rest = train(&dir, "plan", &["--steps", "6", "--resume", "ckpt", "--save", "parts"]);
        assert_eq!([first, rest].concat(), whole, "{model}");
        assert!(
            files(&dir.join("whole")) == files(&dir.join("parts")),
            "{model}: parameters differ"
        );
    }
}

#[test]
fn any_mesh_goes_on() {
    let dir = folder("any");
    // With the eps of the other comparisons: 1e-8 makes a whole step of a gradient that is rounding.
    let compile = |dir: &Path, model: &str, flags: &[&str], plan: &str| {
        compile(dir, model, &[&["--eps", "1e-5"], flags].concat(), plan);
    };
    let sizes = ["--microbatch", "2"];
    compile(&dir, "llama_deep", &[&["--mesh", "pp=2,tp=2"], &sizes[..]].concat(), "first");
    train(&dir, "first", &["--steps", "4", "--save", "ckpt", "--save-every", "4"]);
    let whole = train(&dir, "first", &["--steps", "24", "--resume", "ckpt"]);
    assert_eq!(whole.len(), 20);
    let meshes: [(&str, &[&str], f64); 5] = [
        ("one", &[], 1e-6),
        ("zero3", &["--mesh", "dp=4", "--zero", "3", "--microbatch", "1"], 1e-6),
        ("ring", &["--mesh", "cp=2,tp=2", "--cp-mode", "ring"], 1e-6),
        ("zb", &["--mesh", "pp=4", "--schedule", "zb-h1", "--microbatch", "1"], 1e-6),
        // Another precision: 8 bits of a number.
        ("bf16", &["--mesh", "dp=2", "--zero", "1", "--dtype", "bf16"], 4e-3),
    ];
    for (name, flags, first) in meshes {
        compile(&dir, "llama_deep", flags, name);
        let rest = train(&dir, name, &["--steps", "24", "--resume", "ckpt"]);
        let off = |i: usize| (rest[i].1 / whole[i].1 - 1.0).abs();
        assert_eq!(rest.len(), 20);
        assert!(off(0) < first, "{name}: the first loss is off by {}", off(0));
        let worst = (0..20).map(off).fold(0.0, f64::max);
        assert!(worst < 100.0 * first, "{name}: a loss is off by {worst}");
    }
    // Back: what bf16 has saved are its f32 masters.
    train(
        &dir,
        "bf16",
        &["--steps", "6", "--resume", "ckpt", "--save", "half", "--save-every", "6"],
    );
    let back = train(&dir, "one", &["--steps", "7", "--resume", "half"]);
    assert!((back[0].1 / whole[2].1 - 1.0).abs() < 0.05, "{back:?} after {whole:?}");
}

#[test]
fn resharding_there_and_back_is_the_identity() {
    let dir = folder("reshard");
    compile(&dir, "llama_deep", &["--mesh", "pp=2,tp=4"], "plan");
    train(&dir, "plan", &["--steps", "2", "--save", "a", "--save-every", "2"]);
    let args = |from: &'static str, to: &'static str, out: &'static str, zero: &'static str| {
        ["reshard", from, "--to", to, "-o", out, "--zero", zero]
    };
    good(&dir, &args("a", "dp_shard=8", "b", "3"));
    good(&dir, &args("b", "pp=2,tp=4", "c", "0"));
    let (a, b, c) = (files(&dir.join("a")), files(&dir.join("b")), files(&dir.join("c")));
    assert!(a != b, "dp_shard=8 has other pieces");
    assert!(a == c, "back again they are the same bytes");
    // One rank's file of b holds an eighth: 4 B of weight and 8 B of state per parameter.
    let size = |all: &[(PathBuf, Vec<u8>)], rank: &str| {
        all.iter().find(|f| f.0.ends_with(rank)).map_or(0, |f| f.1.len())
    };
    assert!(size(&b, "rank-00007.safetensors") * 7 < size(&b, "rank-00000.safetensors") * 8);
    // Either goes on alike.
    let rest = ["--steps", "4", "--resume"];
    let one = train(&dir, "plan", &[&rest[..], &["a"]].concat());
    assert_eq!(one, train(&dir, "plan", &[&rest[..], &["b"]].concat()));
    // Meshes that compile refuses are no meshes here.
    refused(&dir, &["reshard", "b", "--to", "tp=3", "-o", "c"], 2, &["heads-not-divisible"]);
    refused(&dir, &["reshard", "b", "--to", "fsdp=2", "-o", "c"], 2, &["did you mean", "dp_shard"]);
    // As a model it is what --save writes at the end.
    good(&dir, &["reshard", "b", "--to", "hf", "-o", "model"]);
    train(&dir, "plan", &["--steps", "2", "--save", "saved"]);
    assert!(files(&dir.join("model")) == files(&dir.join("saved")));
}

/// Checkpoints of builds before, of plans of schema 8: they go on, and give what a run of this build gives that was never
/// interrupted: bit for bit on a processor with AVX-512, as that which made them; others sum in other orders, which is one
/// part in 10^7 of a loss. Their plans are refused, with the command that makes them anew.
#[test]
fn checkpoints_of_builds_before_go_on() {
    let all: [(&str, &str, &[&str]); 3] = [
        ("adamw", "gpt2", &["--mesh", "dp=2", "--zero", "1"]),
        ("f16", "gpt2", &["--mesh", "dp=2", "--dtype", "f16", "--initial-loss-scale", "65536"]),
        ("moe", "glm4_moe", &["--mesh", "dp_shard=2,ep=2", "--moe-bias-rate", "0.01"]),
    ];
    for (saved, model, flags) in all {
        let dir = folder(&format!("before-{saved}"));
        // As was the default then.
        let decay = ["--decay", "all"];
        let window = if saved == "f16" { &["--loss-scale-window", "3"][..] } else { &[] };
        let model = format!("checkpoints/{model}");
        compile_for(&dir, &model, ("8", "4"), &[flags, window, &decay].concat(), "plan");
        let saved = fixture(&format!("checkpoints/{saved}"));
        let saved = saved.to_str().expect("a path");
        let whole = train(&dir, "plan", &["--steps", "5"]);
        let rest = train(&dir, "plan", &["--steps", "5", "--resume", saved, "--save", "on"]);
        assert_eq!(rest.len(), whole.len() - 2, "{saved}");
        // A plan of today says that it goes on otherwise.
        compile_for(&dir, &model, ("8", "4"), &[flags, window].concat(), "now");
        let on = shardc(&dir, &["run", "now", "--steps", "3", "--resume", saved]);
        let word = "decay matrices, the plan's (all when the checkpoint was written)";
        assert!(on.status.success() && text(&on.stderr).contains(word), "{}", text(&on.stderr));
        if sums_as_then() {
            assert_eq!(rest, whole[2..], "{saved}");
        }
        for (a, b) in rest.iter().zip(&whole[2..]) {
            let near = |a: f64, b: f64| (a / b - 1.0).abs() <= 2e-6;
            assert!(a.0 == b.0 && near(a.1, b.1) && near(a.2, b.2), "{saved}: {a:?} {b:?}");
        }
        let old = format!("{saved}/step-00000002/plan");
        let words = ["schema 8, this shardc reads", "shardc compile", "--mesh", "--global-batch"];
        refused(&dir, &["inspect", &old], 2, &words);
        let words = ["its plan has schema 8", "--resume"];
        refused(&dir, &["reshard", saved, "--to", "hf", "-o", "model"], 5, &words);
    }
}

/// True if this processor sums in the order of the one on which the fixtures were trained.
fn sums_as_then() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// A run that must be refused: exit status and words.
fn refused(dir: &Path, args: &[&str], status: i32, words: &[&str]) {
    let o = shardc(dir, args);
    let err = text(&o.stderr);
    assert_eq!(o.status.code(), Some(status), "{args:?}: {err}");
    for w in words {
        assert!(err.contains(w), "no `{w}` in {err}");
    }
}

/// The plan that wrote a checkpoint is part of it, for those who go on and those who reshard.
#[test]
fn the_plan_of_a_checkpoint_is_part_of_it() {
    let dir = folder("plan-of");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    train(&dir, "plan", &["--steps", "4", "--save", "good", "--save-every", "2"]);
    let head = dir.join("good/step-00000004/plan/plan.json");
    let whole = std::fs::read(&head).expect("a plan");
    std::fs::write(&head, &whole[..100]).expect("a write");
    let words = ["error[checkpoint]", "plan.json", "step-00000002: mv good/step-00000004"];
    let on = ["run", "plan", "--steps", "5", "--resume", "good"];
    refused(&dir, &on, 5, &words);
    let words = ["error[checkpoint]", "plan", "step-00000002: mv good/step-00000004"];
    refused(&dir, &["reshard", "good", "--to", "hf", "-o", "hf"], 5, &words);
    std::fs::write(&head, &whole).expect("a write");
    assert_eq!(train(&dir, "plan", &on[2..]).len(), 1);
    // A folder that is something else holds no checkpoints.
    let save = ["run", "plan", "--steps", "1", "--save-every", "1", "--save", "plan"];
    refused(&dir, &save, 2, &["error[save-target]", "is a plan"]);
}

#[test]
fn what_is_no_whole_checkpoint_is_refused() {
    let dir = folder("broken");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    compile(&dir, "llama_mha", &[], "other");
    compile(&dir, "llama_gqa", &["--optimizer", "sgd"], "sgd");
    train(&dir, "plan", &["--steps", "4", "--save", "good", "--save-every", "2"]);
    train(&dir, "sgd", &["--steps", "1", "--save", "stateless", "--save-every", "1"]);
    let again = ["run", "plan", "--steps", "5", "--resume"];
    let with = |name: &'static str| [&again[..], &[name]].concat();
    refused(&dir, &with("none"), 2, &["error[file]", "none", "check the path"]);
    refused(&dir, &with("plan"), 2, &["no checkpoint is here", "--save-every"]);
    refused(&dir, &["run", "other", "--steps", "5", "--resume", "good"], 2, &["tensor-shape"]);
    refused(&dir, &with("stateless"), 2, &["error[resume]", "exp_avg"]);
    // What was left in the middle of a save is not seen.
    std::fs::create_dir_all(dir.join("good/.step-00000006.unfinished")).expect("a folder");
    std::fs::create_dir_all(dir.join("good/step-00000008")).expect("a folder");
    let steps = train(&dir, "plan", &["--steps", "5", "--resume", "good"]);
    assert_eq!(steps.iter().map(|s| s.0).collect::<Vec<_>>(), [5]);

    let step = dir.join("good/step-00000004");
    let file = step.join("rank-00001.safetensors");
    let old = std::fs::read(&file).expect("a file");
    let mut bad = old.clone();
    let last = bad.len() - 3;
    bad[last] ^= 0x40;
    std::fs::write(&file, &bad).expect("a write");
    let words = ["error[checkpoint]", "rank-00001.safetensors", "the data is not what was written"];
    refused(&dir, &with("good"), 5, &words);
    // The one before is good.
    let older = train(&dir, "plan", &["--steps", "3", "--resume", "good/step-00000002"]);
    assert_eq!(older.len(), 1);
    // Two names in the header changed for each other, of the same shape.
    let header = text(&old[8..old.len().min(1 << 14)]);
    let names: Vec<&str> = header
        .split('"')
        .filter(|n| n.starts_with("param ") && n.contains("k_proj.weight"))
        .collect();
    let (a, b) = (names[0], names[1]);
    assert_eq!(a.len(), b.len(), "{names:?}");
    let at = |name: &str| 8 + header.find(name).expect("a name");
    let mut swapped = old.clone();
    swapped[at(a)..at(a) + a.len()].copy_from_slice(b.as_bytes());
    swapped[at(b)..at(b) + b.len()].copy_from_slice(a.as_bytes());
    std::fs::write(&file, &swapped).expect("a write");
    refused(&dir, &with("good"), 5, &words);
    std::fs::write(&file, &old[..old.len() - 1]).expect("a write");
    refused(&dir, &with("good"), 5, &["rank-00001.safetensors", "the file has fewer"]);
    std::fs::remove_file(&file).expect("a removal");
    let away = ["rank-00001.safetensors", "step-00000002: mv good/step-00000004 good/damaged"];
    refused(&dir, &with("good"), 5, &away);
    std::fs::write(&file, &old).expect("a write");

    // An index from a stranger.
    let index = step.join("index.json");
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&index).expect("a file")).expect("JSON");
    let lie = |change: &dyn Fn(&mut serde_json::Value), words: &[&str]| {
        let mut new = json.clone();
        change(&mut new);
        // With its hash made right again.
        new["hash"] = "".into();
        let new = serde_json::to_string_pretty(&new).expect("JSON");
        std::fs::write(&index, shardc::seal::seal(&new)).expect("a write");
        let o = shardc(&dir, &with("good"));
        let err = text(&o.stderr);
        assert!(matches!(o.status.code(), Some(2 | 5)), "{err}");
        words.iter().for_each(|w| assert!(err.contains(w), "no `{w}` in {err}"));
    };
    lie(&|j| j["format"] = 7.into(), &["format 7"]);
    lie(&|j| j["tensors"][0]["pieces"][0]["offset"][0] = u64::MAX.into(), &["not inside it"]);
    lie(&|j| j["tensors"][0]["pieces"] = serde_json::json!([]), &["pieces hold 0 of"]);
    let of_two = |t: &serde_json::Value| {
        let pieces = t["pieces"].as_array();
        pieces.is_some_and(|p| p.len() == 2 && p[0]["shape"] == p[1]["shape"])
    };
    let halves = json["tensors"].as_array().expect("tensors").iter().position(of_two);
    let halves = halves.expect("a tensor in two pieces");
    lie(
        &|j| {
            let all = &mut j["tensors"][halves]["pieces"];
            all[1] = all[0].clone();
        },
        &["two pieces of", "hold the same elements"],
    );
    lie(&|j| j["step"] = u64::MAX.into(), &["index.json: step"]);
    lie(&|j| j["tensors"][1] = j["tensors"][0].clone(), &["there twice"]);
    lie(
        &|j| {
            let hash = j["files"]["rank-00000.safetensors"].clone();
            j["files"]["../../plan/plan.json"] = hash;
        },
        &["is not a file of this folder"],
    );
    let changed = json.to_string().replace("\"step\":4", "\"step\":3");
    std::fs::write(&index, changed).expect("a write");
    refused(&dir, &with("good"), 5, &["index.json", "hash"]);
    std::fs::write(&index, "[").expect("a write");
    refused(&dir, &with("good"), 5, &["index.json"]);
    // Another whole plan in place of the one that wrote it.
    let older = dir.join("good/step-00000002");
    std::fs::remove_dir_all(older.join("plan")).expect("a removal");
    std::fs::rename(dir.join("sgd"), older.join("plan")).expect("a move");
    let reshard = ["reshard", "good/step-00000002", "--to", "hf", "-o", "hf"];
    refused(&dir, &reshard, 5, &["plan", "not the plan that wrote it"]);
}

#[test]
fn a_save_that_fails_leaves_the_old_ones() {
    let dir = folder("full");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    train(&dir, "plan", &["--steps", "2", "--save", "ckpt", "--save-every", "2"]);
    // Steps of another run are not mixed with these, nor replaced.
    let again = ["run", "plan", "--steps", "4", "--save", "ckpt", "--save-every", "1"];
    refused(&dir, &again, 2, &["error[save-target]", "a checkpoint of step 2", "after step 0"]);
    // A file where the next folder would be made.
    std::fs::write(dir.join("ckpt/.step-00000003.unfinished"), "in the way").expect("a write");
    let args = ["run", "plan", "--steps", "4", "--resume", "ckpt", "--save", "ckpt"];
    refused(&dir, &[&args[..], &["--save-every", "3"]].concat(), 6, &["error[save]"]);
    assert_eq!(train(&dir, "plan", &["--steps", "3", "--resume", "ckpt"]).len(), 1);
}

/// A command, in this process.
fn command(args: &[&str]) -> Result<i32, Diag> {
    let line = std::iter::once("shardc").chain(args.iter().copied());
    run(Cli::try_parse_from(line).unwrap_or_else(|e| panic!("{e}")))
}

/// All that resuming takes of a checkpoint.
fn resumed(dir: &Path, plan: &Stored) -> Result<(usize, Vec<Vec<f32>>), Diag> {
    let saved = Saved::open(dir)?;
    saved.verify(0, 1)?;
    let one = |h: &Holding| {
        let mut out = vec![0.0; h.shape.iter().product()];
        let ranges: Vec<_> = h.shape.iter().map(|&n| 0..n).collect();
        saved.read(&h.role, &h.shape, &ranges, &mut out)?;
        Ok(out)
    };
    let all = holdings(&plan.plan)?.into_iter().flatten();
    Ok((saved.step, all.map(|h| one(&h)).collect::<Result<_, Diag>>()?))
}

/// Flips one bit of every 37th byte of every file of a folder, one at a time, in every run of every 74th: `judge`
/// is called with how many were before. Which bit, `SHARDC_FUZZ_SEED` says.
fn flip_bits(dir: &Path, judge: &dyn Fn(usize)) {
    let seed = std::env::var("SHARDC_FUZZ_SEED").ok().and_then(|s| s.parse::<usize>().ok());
    let seed = seed.unwrap_or(1);
    let step = if nightly() { 37 } else { 2 * 37 };
    let mut done = 0;
    for (name, bytes) in files(dir) {
        for at in (0..bytes.len()).step_by(step) {
            let mut other = bytes.clone();
            other[at] ^= 1 << ((at / 37 + seed) % 8);
            std::fs::write(dir.join(&name), other).expect("written");
            let ended = std::panic::catch_unwind(AssertUnwindSafe(|| judge(done)));
            assert!(ended.is_ok(), "bit of byte {at} of {}", name.display());
            done += 1;
        }
        std::fs::write(dir.join(&name), bytes).expect("written");
    }
    assert!(done > 100, "only {done}");
}

#[test]
fn every_flipped_bit_is_refused_or_changes_nothing() {
    let dir = folder("bits");
    let config = std::fs::read(fixture("llama_mha").join("config.json")).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    for (key, n) in [
        ("hidden_size", 8),
        ("intermediate_size", 8),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("num_hidden_layers", 1),
        ("vocab_size", 16),
    ] {
        config[key] = n.into();
    }
    config.as_object_mut().expect("an object").remove("head_dim");
    std::fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let sizes = ["--seq", "8", "--global-batch", "4", "--mesh", "tp=2"];
    good(&dir, &[&["compile", "config.json"], &sizes[..], &["-o", "plan"]].concat());
    train(&dir, "plan", &["--steps", "3", "--save", "ckpt", "--save-every", "3"]);
    let (plan, ckpt) = (dir.join("plan"), dir.join("ckpt/step-00000003"));
    // Code for devices is a part of the plan once it was taken into its hash.
    std::fs::create_dir_all(plan.join("kernels")).expect("a folder");
    std::fs::write(plan.join("kernels/rows-sm_90-0.cubin"), [7; 500]).expect("written");
    let d = read(&plan).map(|_| ()).expect_err("a stranger's code");
    assert!(d.place.is_some_and(|p| p.ends_with("kernels/rows-sm_90-0.cubin")));
    reseal(&plan).unwrap_or_else(|e| panic!("{e}"));
    let (path, stored) = (plan.to_str().expect("a path"), read(&plan).expect("a plan"));
    flip_bits(&plan, &|i| {
        // All begin by reading the folder.
        assert_eq!(read(&plan).map(|_| ()).expect_err("a changed plan").code, "plan");
        if i % 40 > 0 {
            return;
        }
        for args in [
            &["run", path, "--steps", "1"][..],
            &["inspect", path, "--summary"],
            &["explain", path, "collective:0"],
            &["launch-script", path, "--for", "torchrun"],
        ] {
            assert_eq!(command(args).expect_err("a changed plan").code, "plan", "{args:?}");
        }
        let all = checks(&plan, Verify::default()).expect("checks");
        assert!(all.iter().any(|c| !c.ok), "{all:?}");
    });
    let (from, to) = (ckpt.to_str().expect("a path"), dir.join("hf"));
    let export = || {
        let done = command(&["reshard", from, "--to", "hf", "-o", to.to_str().expect("a path")]);
        let out = done.map(|_| files(&to));
        let _ = std::fs::remove_dir_all(&to);
        out
    };
    let want = (resumed(&ckpt, &stored).expect("it is whole"), export().expect("it is whole"));
    flip_bits(&ckpt, &|_| {
        // What was refused says so; what was not is the same, bit by bit.
        assert!(resumed(&ckpt, &stored).map_or_else(|d| !d.help.is_empty(), |x| x == want.0));
        assert!(export().map_or_else(|d| !d.help.is_empty(), |x| x == want.1));
    });
    assert_eq!((resumed(&ckpt, &stored).ok(), export().ok()), (Some(want.0), Some(want.1)));
}

/// A run in the background, whose steps are read as they are printed.
struct Going {
    child: std::process::Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
}

impl Going {
    fn start(dir: &Path, args: &[&str]) -> Going {
        use std::io::BufRead;
        use std::process::Stdio;
        let mut c = Command::new(SHARDC);
        c.args(["run", "plan", "--threads", "1", "--format", "json"]).args(args).current_dir(dir);
        let piped = c.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("shardc starts");
        let out = child.stdout.take().expect("piped");
        Going { child, lines: std::io::BufReader::new(out).lines() }
    }

    /// Waits until some steps are done.
    fn steps(&mut self, n: usize) {
        for _ in 0..n {
            self.lines.next().expect("a step").expect("a line");
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().expect("kill").success());
    }

    /// Status and message at the end.
    fn end(mut self) -> (Option<i32>, String) {
        self.lines.by_ref().for_each(drop);
        let out = self.child.wait_with_output().expect("it ends");
        (out.status.code(), text(&out.stderr))
    }
}

/// The number after a word of a message.
fn number(said: &str, word: &str) -> u64 {
    let rest = said.split_once(word).unwrap_or_else(|| panic!("no `{word}` in {said}")).1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number after `{word}` in {said}"))
}

#[test]
fn signals_save_first() {
    let dir = folder("signals");
    compile(&dir, "llama_gqa", &["--mesh", "dp=2,tp=2", "--microbatch", "2"], "plan");
    // Tests that nohup started ignore SIGHUP, and so does what they start.
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).expect("signals");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a mask");
    let all = [("INT", 130), ("TERM", 143), ("HUP", 129)];
    let heard = if ignored & 1 == 0 { &all[..] } else { &all[..2] };
    for &(signal, status) in heard {
        let ckpt = format!("ckpt-{signal}");
        let saves = ["--save", &ckpt, "--save-every", "1000000"];
        let mut run = Going::start(&dir, &[&["--steps", "1000000"], &saves[..]].concat());
        run.steps(2);
        run.signal(signal);
        let (code, said) = run.end();
        assert_eq!(code, Some(status), "{said}");
        let step = number(&said, "after step ");
        assert!(step >= 2 && said.contains(&format!("SIG{signal}")), "{said}");
        assert!(said.contains(&format!("--resume {ckpt}")), "{said}");
        assert!(!dir.join(format!(".{ckpt}.shardc.lock")).exists(), "the lock is left");
        let to = (step + 2).to_string();
        let rest = train(&dir, "plan", &["--steps", &to, "--resume", &ckpt]);
        let whole = train(&dir, "plan", &["--steps", &to]);
        assert_eq!(rest, whole[step as usize..], "as if nothing had happened");
    }
    // Without --save-every it is the model.
    let mut run = Going::start(&dir, &["--steps", "1000000", "--save", "model"]);
    run.steps(1);
    run.signal("TERM");
    let (code, said) = run.end();
    assert_eq!(code, Some(143), "{said}");
    let step = number(&said, "after step ").to_string();
    train(&dir, "plan", &["--steps", &step, "--save", "whole"]);
    assert!(files(&dir.join("model")) == files(&dir.join("whole")), "not that of step {step}");
    // Nobody saves: the signal is the end, and what is lost is said.
    let mut run = Going::start(&dir, &["--steps", "1000000"]);
    run.steps(2);
    run.signal("TERM");
    let (code, said) = run.end();
    assert_eq!(code, Some(143), "{said}");
    assert!(number(&said, "SIGTERM: nothing is saved, ") >= 1, "{said}");
    // What nohup ignores stays ignored.
    let args = ["-c", "trap '' HUP; exec \"$@\"", "sh", SHARDC, "run", "plan", "--steps", "300"];
    let mut child = Command::new("sh")
        .args(args)
        .args(["--save", "nohup"])
        .current_dir(&dir)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("sh");
    let lock = dir.join(".nohup.shardc.lock");
    while !lock.exists() {
        assert!(child.try_wait().expect("a process").is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "HUP", &pid]).status().expect("kill").success());
    assert!(child.wait().expect("a process").success() && dir.join("nohup").is_dir());
}

#[test]
fn a_second_signal_ends_at_once() {
    let dir = folder("twice");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    let saves = ["--steps", "1000000", "--save", "ckpt", "--save-every", "1000000"];
    let mut run = Going::start(&dir, &saves);
    run.steps(1);
    // Stopped, it gets both before it goes on.
    run.signal("STOP");
    run.signal("INT");
    run.signal("TERM");
    run.signal("CONT");
    let (code, said) = run.end();
    assert!(matches!(code, Some(130 | 143)) && !said.contains("which is saved"), "{said}");
    let saved = std::fs::read_dir(dir.join("ckpt")).expect("a folder").flatten();
    let whole = saved.filter(|e| e.file_name().to_string_lossy().starts_with("step-")).count();
    // What it left does not disturb the next one, which says so.
    let o = shardc(&dir, &["run", "plan", "--steps", "1", "--save", "ckpt2", "--save-every", "1"]);
    assert!(o.status.success() && whole <= 1);
    std::fs::create_dir_all(dir.join("ckpt3/.step-00000007.unfinished")).expect("a folder");
    std::fs::create_dir_all(dir.join("ckpt3/.step-mine.unfinished")).expect("a folder");
    train(&dir, "plan", &["--steps", "1", "--save", "ckpt3", "--save-every", "1"]);
    assert!(!dir.join("ckpt3/.step-00000007.unfinished").exists(), "an unfinished save is left");
    assert!(dir.join("ckpt3/.step-mine.unfinished").exists(), "a user's folder is gone");
}

#[test]
fn one_job_saves_to_a_folder() {
    let dir = folder("lock");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    for (flags, lock) in [
        (&["--save", "to"][..], ".to.shardc.lock"),
        (&["--save", "steps", "--save-every", "1000000"], ".steps.shardc.lock"),
    ] {
        let mut run = Going::start(&dir, &[&["--steps", "1000000"], flags].concat());
        run.steps(1);
        let pid = format!("process {} of host", run.child.id());
        let plan = dir.join("plan").canonicalize().expect("a plan");
        let again = [&["run", "plan", "--steps", "1"], flags].concat();
        let words = ["error[save-locked]", &pid, "since 20", plan.to_str().expect("a path")];
        refused(&dir, &again, 5, &words);
        // Killed, it leaves its lock, which is taken over.
        run.child.kill().expect("killed");
        run.child.wait().expect("it ends");
        assert!(dir.join(lock).exists());
        let o = shardc(&dir, &again);
        let said = text(&o.stderr);
        assert!(o.status.success(), "{said}");
        assert!(said.contains("took over the lock") && said.contains(&pid[..12]), "{said}");
        assert!(!dir.join(lock).exists(), "the lock is left");
        // One of another host is believed; for ever if it is of a job that never touches it.
        let dumb =
            r#"{"pid":7,"host":"elsewhere","since":"2026-01-31T12:00:00Z","plan":"/far/plan"}"#;
        std::fs::write(dir.join(lock), dumb).expect("a write");
        let touch = ["-d", "11 minutes ago", lock];
        let touched = Command::new("touch").args(touch).current_dir(&dir).status();
        assert!(touched.expect("touch").success());
        refused(&dir, &again, 5, &["process 7 of host elsewhere"]);
        let other = &*dumb.replace('}', r#","beats":true}"#);
        std::fs::write(dir.join(lock), other).expect("a write");
        let rm = format!("rm {lock}");
        let words = ["process 7 of host elsewhere", "/far/plan", &rm, "or start again in "];
        refused(&dir, &again, 5, &words);
        assert_eq!(std::fs::read(dir.join(lock)).expect("still there"), other.as_bytes());
        // Unless it has not been touched for long, or is of this job before it was put back into the queue.
        let touched = Command::new("touch").args(touch).current_dir(&dir).status();
        assert!(touched.expect("touch").success());
        // What the one before has saved is in the way.
        let begin = || drop(std::fs::remove_dir_all(dir.join("steps")));
        begin();
        let o = shardc(&dir, &again);
        let said = text(&o.stderr);
        let silent = "from process 7 of host elsewhere, which has said nothing for 11 minutes";
        assert!(o.status.success() && said.contains(silent), "{said}");
        let job = other.replace("}", r#","job":{"id":"12","restarts":0}}"#);
        std::fs::write(dir.join(lock), job).expect("a write");
        refused(&dir, &again, 5, &["error[save-locked]"]);
        begin();
        let mut requeued = Command::new(SHARDC);
        requeued.env("SLURM_JOB_ID", "12").env("SLURM_RESTART_COUNT", "1");
        let o = requeued.args(&again).current_dir(&dir).output().expect("shardc starts");
        let said = text(&o.stderr);
        assert!(o.status.success() && said.contains("before it was requeued"), "{said}");
        assert!(!dir.join(lock).exists(), "the lock is left");
    }
    // Both kinds of job, and all spellings, have one lock.
    std::fs::create_dir(dir.join("real")).expect("a folder");
    std::os::unix::fs::symlink("real", dir.join("lnk")).expect("a link");
    let here = dir.join("real").display().to_string();
    let every = ["--save-every", "1000000"];
    for (first, second) in [(&[][..], &every[..]), (&every[..], &[][..])] {
        let saves = [&["--steps", "1000000", "--save", "real"], first].concat();
        let mut run = Going::start(&dir, &saves);
        run.steps(1);
        for to in ["real", "lnk", "lnk/", "./real/", "lnk/../real", &here] {
            for kind in [first, second] {
                let args = [&["run", "plan", "--steps", "1", "--save", to], kind].concat();
                refused(&dir, &args, 5, &["error[save-locked]"]);
            }
        }
        let reshard = ["reshard", "steps", "-o", "lnk/", "--to"];
        for kind in ["hf", "dp=2"] {
            refused(&dir, &[&reshard[..], &[kind]].concat(), 5, &["error[save-locked]"]);
        }
        run.child.kill().expect("killed");
        run.child.wait().expect("it ends");
        let _ = std::fs::remove_dir_all(dir.join("real"));
        std::fs::create_dir(dir.join("real")).expect("a folder");
    }
    // What a save of a model that was killed left goes at the next start.
    let mut child = Command::new("true").spawn().expect("a process");
    child.wait().expect("it ends");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let host: String =
        host.trim().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let left = dir.join(format!(".real.unfinished-{host}-{}-00000001", child.id()));
    std::fs::create_dir(&left).expect("a folder");
    let mut run = Going::start(&dir, &["--steps", "1000000", "--save", "real"]);
    run.steps(1);
    assert!(!left.exists(), "it is left until the end");
    run.child.kill().expect("killed");
    run.child.wait().expect("it ends");
    let hf = ["reshard", "steps", "--to", "hf", "-o", "hf"];
    std::fs::write(dir.join(".hf.shardc.lock"), "somebody's notes").expect("a write");
    refused(&dir, &hf, 5, &["error[save-locked]", "does not say who"]);
}

/// What is in the way of a run that goes on before it, and a folder under another's name.
#[test]
fn what_is_in_the_way_is_named() {
    let dir = folder("in-the-way");
    compile(&dir, "llama_gqa", &["--mesh", "tp=2"], "plan");
    train(&dir, "plan", &["--steps", "4", "--save", "good", "--save-every", "2"]);
    std::fs::create_dir_all(dir.join("good/step-00000008")).expect("a folder");
    let step = dir.join("good/step-00000004");
    let on = ["run", "plan", "--steps", "5", "--save", "good", "--save-every", "1", "--resume"];
    let on = |from: &'static str| [&on[..], &[from]].concat();
    refused(&dir, &on("good"), 2, &["error[save-target]", "good/step-00000008 has no index.json"]);
    std::fs::remove_dir(dir.join("good/step-00000008")).expect("it is empty");
    let words = ["error[save-target]", "of step 4", "move good/step-00000004"];
    refused(&dir, &on("good/step-00000002"), 2, &words);
    // The first of those that are later, and the last that one can go on from.
    let more = ["--steps", "6", "--resume", "good", "--save", "good", "--save-every", "2"];
    train(&dir, "plan", &[&more[..], &["--keep", "9"]].concat());
    let words = ["error[save-target]", "resume from step 6", "move good/step-00000004 and"];
    refused(&dir, &on("good/step-00000002"), 2, &words);
    std::fs::remove_dir_all(dir.join("good/step-00000006")).expect("removed");
    // A folder under another's name.
    std::fs::rename(&step, dir.join("good/step-00000009")).expect("renamed");
    refused(
        &dir,
        &["run", "plan", "--steps", "5", "--resume", "good"],
        5,
        &["index.json is of step 4, the folder is not"],
    );
    std::fs::rename(dir.join("good/step-00000009"), &step).expect("renamed");
}
