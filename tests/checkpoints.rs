//! Checkpoints: going on is as if nothing had happened, on any mesh; what was changed is refused.

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
    let model = fixture(model);
    let base = ["compile", model.to_str().expect("a path"), "--seq", "16", "--global-batch", "8"];
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
    // As a model it is what --save writes at the end.
    good(&dir, &["reshard", "b", "--to", "hf", "-o", "model"]);
    train(&dir, "plan", &["--steps", "2", "--save", "saved"]);
    assert!(files(&dir.join("model")) == files(&dir.join("saved")));
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
    refused(&dir, &with("none"), 5, &["error[checkpoint]", "none"]);
    refused(&dir, &with("plan"), 2, &["there is no checkpoint here", "--save-every"]);
    refused(&dir, &["run", "other", "--steps", "5", "--resume", "good"], 4, &["tensor-shape"]);
    refused(&dir, &with("stateless"), 4, &["missing-tensor", "exp_avg"]);
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
    let words = ["error[checkpoint]", "rank-00001.safetensors", "not those that were written"];
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
    refused(&dir, &with("good"), 2, &["truncated"]);
    std::fs::remove_file(&file).expect("a removal");
    refused(&dir, &with("good"), 2, &["rank-00001.safetensors"]);
    std::fs::write(&file, &old).expect("a write");

    // An index from a stranger.
    let index = step.join("index.json");
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&index).expect("a file")).expect("JSON");
    let lie = |change: &dyn Fn(&mut serde_json::Value), words: &[&str]| {
        let mut new = json.clone();
        change(&mut new);
        std::fs::write(&index, new.to_string()).expect("a write");
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
        &["no file of this folder"],
    );
    std::fs::write(&index, "[").expect("a write");
    refused(&dir, &with("good"), 5, &["index.json"]);
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
