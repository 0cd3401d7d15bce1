//! Adapters: what PEFT trains (`tests/fixtures/lora.py`), on all meshes; what they exchange; their files.

use crate::lab::{FIXTURES, Lab};
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};
use shardc_testing::{skip, taken};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A fixture, and the folder of its base model.
type Case = (&'static str, &'static str);

const CASES: [Case; 8] = [
    ("llama", "llama_mha"),
    ("llama_qv", "llama_gqa"),
    ("qwen3_tied", "lora/qwen3_tied/base"),
    ("patterns", "llama_mha"),
    ("phi3", "phi3"),
    ("gpt2", "gpt2"),
    ("gpt_neox", "gpt_neox"),
    ("deepseek_v3", "deepseek_v3"),
];

/// What the reference trains with.
const TRAINING: &[&str] =
    &["--seq", "16", "--global-batch", "8", "--eps", "1e-5", "--clip", "0.5", "--prove", "no"];

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let numbers = |t: &safetensors::tensor::TensorView| match t.dtype() {
        safetensors::Dtype::F32 => {
            t.data().chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
        }
        safetensors::Dtype::BF16 => {
            t.data().chunks(2).map(|c| half::bf16::from_le_bytes(c.try_into().unwrap()).to_f32()).collect()
        }
        _whole => vec![],
    };
    all.tensors().iter().map(|(n, t)| (n.clone(), (t.shape().to_vec(), numbers(t)))).collect()
}

/// The weights of a folder, whatever its files are called.
fn weights(dir: &Path) -> Tensors {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() {
        return tensors(&dir.join("model.safetensors"));
    }
    let index: Json = serde_json::from_slice(&std::fs::read(index).expect("an index")).expect("JSON");
    let map = index["weight_map"].as_object().expect("a map");
    let files: std::collections::BTreeSet<&str> = map.values().filter_map(Json::as_str).collect();
    files.into_iter().flat_map(|f| tensors(&dir.join(f))).collect()
}

fn folder(name: &str) -> String {
    format!("{FIXTURES}/lora/{name}")
}

/// Losses of the steps of a run, as its metrics have them.
fn losses(lab: &Lab, file: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(lab.path(file)).expect("metrics");
    let of = |l: &str| serde_json::from_str::<Json>(l).expect("JSON")["loss"].as_f64().expect("a loss");
    text.lines().map(of).collect()
}

fn norm(it: impl Iterator<Item = f64>) -> f64 {
    it.map(|x| x * x).sum::<f64>().sqrt()
}

/// Trains a fixture for three steps on a layout: losses to 1e-5, gradients of the first step to 1e-5 of each tensor's
/// norm, A and B after the last to 1e-4; the base model does not change by a bit.
fn trains_as_peft(lab: &Lab, (name, base): Case, flags: &[&str]) {
    let (base, adapter) = (format!("{FIXTURES}/{base}"), folder(name));
    let what = format!("{name} {flags:?}");
    for old in ["out", "m.jsonl", "dump.safetensors"] {
        let _ = std::fs::remove_dir_all(lab.path(old));
        let _ = std::fs::remove_file(lab.path(old));
    }
    lab.ok(&[&["compile", &base, "--lora-from", &adapter, "-o", "out"], TRAINING, flags].concat());
    let batch = format!("{adapter}/batch.safetensors");
    let run = ["run", "out", "--weights", &base, "--adapter", &adapter, "--batch", &batch, "--steps", "3"];
    let out = ["--dump", "dump.safetensors", "--metrics", "m.jsonl", "--kernels", "interpreted"];
    lab.ok(&[&run[..], &out].concat());
    let want = tensors(&Path::new(&adapter).join("expected.safetensors"));
    let got = tensors(&lab.path("dump.safetensors"));
    let (now, then) = (losses(lab, "m.jsonl"), &want["losses"].1);
    assert_eq!(now.len(), then.len(), "{what}");
    for (a, b) in now.iter().zip(then) {
        let b = f64::from(*b);
        assert!((a - b).abs() <= 1e-5 * b, "{what}: loss {a}, reference {b}");
    }
    for (key, (shape, want)) in want.iter().filter(|x| x.0.starts_with("grad.") || x.0.starts_with("param.")) {
        let (own, got) = got.get(key).unwrap_or_else(|| panic!("{what}: no {key}"));
        assert_eq!(own, shape, "{what}: {key}");
        let apart = || got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let (off, bound) = match key.starts_with("grad.") {
            true => (norm(apart()), 1e-5 * norm(want.iter().map(|x| f64::from(*x)))),
            false => (apart().fold(0.0, |m: f64, x| if x.abs() <= m { m } else { x.abs() }), 1e-4),
        };
        assert!(off <= bound, "{what}: {key} is off by {off:.2e}, {bound:.2e} is allowed");
    }
    let grads = got.keys().filter(|k| k.starts_with("grad."));
    let more: Vec<&String> = grads.filter(|k| !want.contains_key(*k)).collect();
    assert!(more.is_empty(), "{what}: gradients of {more:?}");
    let mut same = 0;
    for (key, (_, before)) in weights(Path::new(&base)) {
        // A tied head has no tensor of its own.
        if let Some((_, after)) = got.get(&format!("param.{key}")) {
            assert_eq!(*after, before, "{what}: {key} is frozen");
            same += 1;
        }
    }
    assert!(same > 10, "{what}: {same} tensors of the base model");
}

#[test]
fn one_rank_trains_as_peft_does() {
    let lab = Lab::new("lora-one");
    for case in CASES {
        trains_as_peft(&lab, case, &[]);
    }
}

/// Layouts, and what else must change nothing.
const LAYOUTS: [&[&str]; 15] = [
    &["--mesh", "tp=2"],
    &["--mesh", "tp=2", "--sp"],
    &["--mesh", "dp=2", "--zero", "3"],
    &["--mesh", "pp=2"],
    &["--microbatch", "2"],
    &["--mesh", "cp=2"],
    &["--mesh", "dp=2,tp=2", "--sp", "--zero", "1", "--microbatch", "1"],
    &["--mesh", "dp=2", "--zero", "2", "--microbatch", "2"],
    &["--mesh", "pp=2,tp=2", "--schedule", "zb-h1", "--microbatch", "2"],
    &["--recompute", "full"],
    &["--recompute", "none"],
    &["--loss-chunks", "4"],
    &["--mesh", "tp=2", "--fuse", "no"],
    &["--mesh", "tp=2", "--shard", "auto"],
    &["--mesh", "tp=4", "--sp"],
];

/// The first four in every run, the others in turn; all families on tp and sp in the long run.
#[test]
fn all_meshes_train_as_peft_does() {
    let lab = Lab::new("lora-meshes");
    for (i, flags) in LAYOUTS.into_iter().enumerate() {
        for (j, case) in CASES.into_iter().enumerate() {
            let always = i < 4 && [0, 2].contains(&j);
            // Two layers: four stages, or four ranks of two key-value heads, are not for all.
            if always || taken(i + 3 * j, 23) {
                trains_as_peft(&lab, case, flags);
            }
        }
    }
}

/// The lines of a function in the text of a plan.
fn function<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let begin = text.find(&format!("func @{name}(")).unwrap_or_else(|| panic!("no @{name}"));
    text[begin..].lines().take_while(|l| *l != "}")
}

/// Collectives of a function, by op and result type, with how often they stand there; of repeated layers once.
fn collectives(lab: &Lab, plan: &str, name: &str) -> BTreeMap<String, usize> {
    const OPS: [&str; 4] = ["all_reduce[", "all_gather[", "reduce_scatter[", "all_to_all["];
    let text = std::fs::read_to_string(lab.path(plan).join("programs/all.ir")).expect("programs");
    let mut out = BTreeMap::new();
    for l in function(&text, name) {
        let Some((made, rest)) = l.split_once(" = ") else { continue };
        if OPS.iter().any(|op| rest.starts_with(op)) {
            let (op, ty) = (rest.split(' ').next().expect("an op"), rest.split_once(" : ").expect("a type").1);
            let ty = ty.split([' ', ',']).next_back().unwrap_or(ty);
            *out.entry(format!("{op} {ty} of {}", made.matches('%').count())).or_default() += 1;
        }
    }
    out
}

/// Forward sends what the base model's does, and no more; backward no more than that of the base model, trained whole; a
/// step sums A beside columns and B beside rows once, whose sizes do not depend on tokens.
#[test]
fn forward_sends_what_the_base_model_sends() {
    let lab = Lab::new("lora-sent");
    let base = format!("{FIXTURES}/llama_mha");
    for flags in [&["--mesh", "tp=2"][..], &["--mesh", "tp=2", "--sp"], &["--mesh", "dp=2,tp=2"], &["--mesh", "cp=2"]] {
        let plan = |out: &str, more: &[&str]| {
            lab.ok(&[&["compile", &base, "-o", out, "--seq", "16", "--prove", "no"], flags, more].concat());
        };
        plan("plain", &[]);
        plan("lora", &["--lora", "r=4"]);
        let [without, with] = ["plain", "lora"].map(|p| collectives(&lab, p, "forward"));
        assert_eq!(with, without, "{flags:?}");
        assert!(flags[1] == "cp=2" || with.values().sum::<usize>() > 3, "{flags:?}: {with:?}");
        let [without, with] = ["plain", "lora"].map(|p| collectives(&lab, p, "backward"));
        for (what, n) in &with {
            assert!(without.get(what) >= Some(n), "{flags:?}: {what}: {with:?}, without {without:?}");
        }
    }
}

/// Plans with adapters compute their model: on tp, sp, zero, pp, and with experts.
#[test]
fn plans_with_adapters_are_proved() {
    let lab = Lab::new("lora-proved");
    let dense = format!("{FIXTURES}/llama_gqa");
    let experts = format!("{FIXTURES}/qwen3_moe");
    let layouts: [(&str, &[&str]); 7] = [
        (&dense, &["--mesh", "tp=2"]),
        (&dense, &["--mesh", "tp=2", "--sp", "--recompute", "full"]),
        (&dense, &["--mesh", "dp=2", "--zero", "3"]),
        (&dense, &["--mesh", "pp=2", "--microbatch", "2"]),
        (&dense, &["--mesh", "dp=2,tp=2", "--dtype", "bf16", "--microbatch", "1"]),
        (&dense, &["--mesh", "tp=2", "--optimizer", "muon"]),
        (&experts, &["--mesh", "dp=2,ep=2", "--lora", "r=2,targets=linear+experts"]),
    ];
    for (i, (base, flags)) in layouts.into_iter().enumerate() {
        let l: &[&str] = if flags.contains(&"--lora") { &[] } else { &["--lora", "r=2,dropout=0.25,rslora"] };
        let out = format!("p{i}");
        lab.ok(&[&["compile", base, "-o", &out, "--seq", "16", "--prove", "yes"], flags, l].concat());
    }
}

/// Training goes on bit for bit from a checkpoint of adapters, on another mesh too, with its base model and no other; the
/// adapter that it becomes is read again, and the model that it is merged into computes the same.
#[test]
fn adapters_are_saved_resumed_and_merged() {
    let lab = Lab::new("lora-files");
    for (name, base) in [CASES[0], CASES[4], CASES[5]] {
        let (base, adapter) = (format!("{FIXTURES}/{base}"), folder(name));
        for old in std::fs::read_dir(&lab.0).expect("a folder").flatten() {
            let _ = std::fs::remove_dir_all(old.path());
        }
        let batch = format!("{adapter}/batch.safetensors");
        lab.ok(&[&["compile", &base, "--lora-from", &adapter, "-o", "plan"], TRAINING].concat());
        let run = |more: &[&str]| {
            lab.ok(&[&["run", "plan", "--batch", &batch, "--kernels", "interpreted"], more].concat())
        };
        let from = ["--weights", &base, "--adapter", &adapter];
        run(&[&from[..], &["--steps", "3", "--save", "whole"]].concat());
        run(&[&from[..], &["--steps", "2", "--save", "ckpt", "--save-every", "2"]].concat());
        run(&["--resume", "ckpt", "--weights", &base, "--steps", "3", "--save", "ckpt", "--save-every", "3"]);
        // It has what is trained alone.
        let index = std::fs::read_to_string(lab.path("ckpt/step-00000003/index.json")).expect("an index");
        let index: Json = serde_json::from_str(&index).expect("JSON");
        let all = index["tensors"].as_array().expect("tensors");
        assert!(all.iter().all(|t| t["name"].as_str().is_some_and(|n| n.contains(".lora_"))), "{name}");
        assert!(index["base"]["files"]["blake3"].is_string(), "{name}: {}", index["base"]);
        lab.ok(&["reshard", "ckpt", "--to", "peft", "-o", "again"]);
        let [whole, again] = ["whole", "again"].map(|d| lab.path(d).join("adapter_model.safetensors"));
        assert_eq!(tensors(&whole), tensors(&again), "{name}: resumed at step 2");
        let config = |dir: &Path| -> Json {
            let text = std::fs::read_to_string(dir.join("adapter_config.json")).expect("a config");
            serde_json::from_str(&text).expect("JSON")
        };
        let (own, peft) = (config(&lab.path("again")), config(Path::new(&adapter)));
        for key in own.as_object().expect("an object").keys().filter(|k| *k != "base_model_name_or_path") {
            assert_eq!(own[key], peft[key], "{name}: {key}");
        }
        // Read again it is the same model, and so is the one that it was merged into.
        lab.ok(&["reshard", "ckpt", "--to", "hf", "--merge", "-o", "merged"]);
        run(&["--weights", &base, "--adapter", "again", "--steps", "1", "--dump", "beside.safetensors"]);
        lab.ok(&[&["compile", "merged", "-o", "one"], TRAINING].concat());
        let one = ["run", "one", "--weights", "merged", "--steps", "1", "--dump", "one.safetensors"];
        lab.ok(&[&one[..], &["--batch", &batch, "--kernels", "interpreted"]].concat());
        let [beside, one] = ["beside.safetensors", "one.safetensors"].map(|f| tensors(&lab.path(f)));
        let (a, b) = (&beside["logits"].1, &one["logits"].1);
        let most = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let off = a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= 1e-5 * most, "{name}: merged, logits are off by {off:e} of {most}");
        read_by_peft(&lab, &base, &batch);
        // Another base is not the one that it was trained on.
        let other = lab.path("other");
        std::fs::create_dir_all(&other).expect("a folder");
        std::fs::copy(format!("{base}/config.json"), other.join("config.json")).expect("a config");
        let mut bytes = std::fs::read(format!("{base}/model.safetensors")).expect("weights");
        *bytes.last_mut().expect("bytes") ^= 1;
        std::fs::write(other.join("model.safetensors"), bytes).expect("weights");
        let run = ["run", "plan", "--batch", &batch, "--resume", "ckpt", "--steps", "4"];
        let said = lab.refuses(&[&run[..], &["--weights", "other"]].concat(), 2, "lora-base");
        assert!(said.contains("trained on another base"), "{said}");
        let said = lab.refuses(&run, 2, "lora-base");
        assert!(said.contains("--weights"), "{said}");
        lab.refuses(&["reshard", "ckpt", "--to", "hf", "--merge", "--base", "other", "-o", "no"], 2, "lora-base");
        lab.refuses(&["reshard", "ckpt", "--to", "hf", "-o", "no"], 2, "flag");
    }
}

/// PEFT reads the adapter, and transformers the merged model: with the same logits.
fn read_by_peft(lab: &Lab, base: &str, batch: &str) {
    let python = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let find = "import importlib.util as u; assert all(map(u.find_spec, ['torch', 'transformers', 'peft']))";
    if !Command::new(&python).args(["-c", find]).output().is_ok_and(|o| o.status.success()) {
        return skip(shardc_testing::Tool::Peft, "adapters and merged models, read by others");
    }
    let script = format!("{FIXTURES}/lora_check.py");
    let mut c = Command::new(python);
    c.current_dir(&lab.0).args(["-B", &script, base, "again", "merged", batch, "beside.safetensors"]);
    let out = c.output().expect("Python starts");
    let said = [out.stdout, out.stderr].map(|x| String::from_utf8_lossy(&x).into_owned());
    assert!(out.status.success(), "{}", said.join("\n"));
}

/// Adapters of experts, which one rank has, on ranks that split them: the same numbers.
#[test]
fn experts_on_ranks_equal_one_rank() {
    let lab = Lab::new("lora-experts");
    let base = format!("{FIXTURES}/qwen3_moe");
    let batch = format!("{base}/batch.safetensors");
    let mut all = vec![];
    for (i, mesh) in ["", "dp=2,ep=2", "tp=2"].into_iter().enumerate() {
        let out = format!("plan{i}");
        let mesh: &[&str] = if mesh.is_empty() { &[] } else { &["--mesh", mesh] };
        let lora = ["--lora", "r=2,targets=experts+linear"];
        lab.ok(&[&["compile", &base, "-o", &out], TRAINING, &lora, mesh, &["--moe-aux", "0"]].concat());
        let dump = format!("{i}.safetensors");
        let run = ["run", &out, "--weights", &base, "--batch", &batch, "--steps", "3", "--dump", &dump];
        lab.ok(&[&run[..], &["--kernels", "interpreted"]].concat());
        all.push(tensors(&lab.path(&dump)));
    }
    let [one, others @ ..] = &all[..] else { panic!("three layouts") };
    let experts = one.keys().filter(|k| k.starts_with("param.") && k.contains(".experts.") && k.contains("lora_"));
    assert!(experts.count() >= 8 * 3 * 2, "each expert has its own");
    for other in others {
        for (key, (_, want)) in one.iter().filter(|x| x.0.contains("lora_")) {
            let got = &other[key].1;
            let off = norm(got.iter().zip(want).map(|(a, b)| f64::from(a - b)));
            let of = norm(want.iter().map(|x| f64::from(*x)));
            // B is 0 at first: A has no gradient.
            assert!(off <= 1e-4 * of + 1e-6, "{key}: off by {off:.2e} of {of:.2e}");
        }
    }
}

/// Dropout of adapters draws by place: the same on every mesh; an evaluation drops nothing.
#[test]
fn dropout_is_the_same_on_every_mesh() {
    let lab = Lab::new("lora-dropout");
    let (base, adapter) = (format!("{FIXTURES}/llama_mha"), folder("llama"));
    let batch = format!("{adapter}/batch.safetensors");
    let mut all = vec![];
    let layouts: [(&str, &[&str]); 4] =
        [("0.5", &[]), ("0.5", &["--mesh", "dp=2,tp=2", "--sp"]), ("0.5", &["--microbatch", "2"]), ("0", &[])];
    for (rate, flags) in layouts {
        let lora = format!("r=4,alpha=8,dropout={rate}");
        for old in ["out", "m.jsonl"] {
            let _ = std::fs::remove_dir_all(lab.path(old));
            let _ = std::fs::remove_file(lab.path(old));
        }
        lab.ok(&[&["compile", &base, "--lora", &lora, "-o", "out"], TRAINING, flags].concat());
        let run = ["run", "out", "--weights", &base, "--adapter", &adapter, "--batch", &batch, "--steps", "3"];
        lab.ok(&[&run[..], &["--metrics", "m.jsonl", "--kernels", "interpreted"]].concat());
        all.push(losses(&lab, "m.jsonl"));
    }
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * b);
    assert!(near(&all[0], &all[1]) && near(&all[0], &all[2]), "{all:?}");
    assert!(!near(&all[0], &all[3]), "dropout changes nothing: {all:?}");
}

/// A new adapter changes nothing at first: the base model's loss. B is trained at once, and A from the second step on.
#[test]
fn a_new_adapter_is_zero() {
    let lab = Lab::new("lora-new");
    let base = format!("{FIXTURES}/llama_mha");
    let batch = format!("{base}/batch.safetensors");
    for (out, more) in [("plain", &[][..]), ("lora", &["--lora", "r=1,targets=linear+lm_head+q_proj+*.mlp.*"])] {
        lab.ok(&[&["compile", &base, "-o", out], TRAINING, more].concat());
        let dump = format!("{out}.safetensors");
        let run = ["run", out, "--weights", &base, "--batch", &batch, "--steps", "1", "--dump", &dump];
        lab.ok(&[&run[..], &["--kernels", "interpreted"]].concat());
    }
    let [plain, lora] = ["plain", "lora"].map(|d| tensors(&lab.path(&format!("{d}.safetensors"))));
    assert_eq!(plain["logits"].1, lora["logits"].1);
    let zero = |x: &[f32]| x.iter().all(|x| *x == 0.0);
    let grads: Vec<_> = lora.iter().filter(|x| x.0.starts_with("grad.")).collect();
    // Seven products of two layers, and the head: once, however many targets name them.
    assert_eq!(grads.len(), 2 * (2 * 7 + 1));
    for (key, (_, x)) in grads {
        assert_eq!(zero(x), key.contains("lora_A"), "{key}");
    }
    let bound = 1.0 / f32::sqrt(32.0);
    let a = &lora["param.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].1;
    let (most, mean) = a.iter().fold((0.0f32, 0.0), |(m, s), x| (m.max(x.abs()), s + x * x));
    // Uniform as PEFT's: within the bound, and of its deviation.
    assert!(most <= bound && (mean / a.len() as f32).sqrt() > 0.4 * bound, "{most} {mean}");
}

/// What is wrong with adapters is said by name.
#[test]
fn what_is_wrong_is_said() {
    let lab = Lab::new("lora-wrong");
    let base = format!("{FIXTURES}/llama_mha");
    let tied = format!("{FIXTURES}/lora/qwen3_tied/base");
    let compile = |model: &str, more: &[&str], status: i32, code: &str, want: &str| {
        let said = lab.refuses(&[&["compile", model, "-o", "no", "--seq", "16"], more].concat(), status, code);
        assert!(said.contains(want), "{more:?}: no `{want}` in {said}");
    };
    compile(&base, &["--lora", "r=64"], 2, "lora-rank", "r=64 exceeds min(32, 32) of model.layers.0.self_attn.q_proj");
    compile(&base, &["--lora", "r=0"], 2, "lora-rank", "at least one row");
    compile(&base, &["--lora", "alpha=3"], 2, "flag", "no rank is given");
    compile(&base, &["--lora", "r=2,r=3"], 2, "flag", "`r` is given twice");
    compile(&base, &["--lora", "r=2,dropout=1"], 2, "flag", "dropout=1 is not in 0..1");
    compile(&base, &["--lora", "r=2,dora"], 2, "flag", "`dora`");
    compile(&base, &["--lora", "r=2,targets=*.wq"], 2, "lora-target", "`*.wq` matches no linear");
    compile(&base, &["--lora", "r=2,targets=q_prj"], 2, "lora-target", "did you mean `q_proj`?");
    compile(&base, &["--lora", "r=2,targets=experts"], 2, "lora-target", "no experts");
    compile(&tied, &["--lora", "r=2,targets=lm_head"], 2, "lora-tied", "also the embedding");
    compile(&base, &["--lora", "r=2", "--freeze", "*norm*"], 2, "flag", "--train GLOB");
    compile(&base, &["--train", "*norm*"], 2, "flag", "--lora r=16");
    compile(&base, &["--lora", "r=2", "--train", "*nothing*"], 2, "unknown-tensor", "--train '*nothing*'");
    compile(&base, &["--lora", "r=2", "--mesh", "tp=4", "--tp-mode", "2d"], 4, "not-built", "--tp-mode 1d");
    let adapter = Path::new(&folder("llama")).join("adapter_config.json");
    let known: Json = serde_json::from_slice(&std::fs::read(adapter).expect("a config")).expect("JSON");
    let changes = [
        ("use_dora", json!(true), "`use_dora` is true"),
        ("lora_bias", json!(true), "`lora_bias` is true"),
        ("bias", json!("all"), "`bias` is \"all\""),
        ("layer_replication", json!([[0, 1]]), "`layer_replication`"),
        ("trainable_token_indices", json!([3]), "`trainable_token_indices`"),
        ("peft_type", json!("IA3"), "peft_type is IA3"),
        ("modules_to_save", json!(["lm_head"]), "--train GLOB"),
        ("target_modules", json!(".*q_proj"), "regular expression"),
        ("something_new", json!(3), "`something_new` is 3"),
    ];
    for (key, value, want) in changes {
        let mut c = known.clone();
        c[key] = value;
        lab.write("a/adapter_config.json", c.to_string());
        compile(&base, &["--lora-from", "a"], 4, "not-built", want);
    }
    for (text, want) in [("{", "not JSON"), ("[]", "not an object"), ("", "not JSON")] {
        lab.write("a/adapter_config.json", text);
        compile(&base, &["--lora-from", "a"], 2, "adapter", want);
    }
    compile(&base, &["--lora-from", "nowhere"], 2, "adapter", "no adapter_config.json");
    compile(&base, &["--lora-from", &folder("llama"), "--lora", "r=2"], 2, "flag", "leave one of them out");
    // Tensors of an adapter that the plan has not, or of another rank.
    lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--lora", "r=4,targets=q_proj", "--prove", "no"]);
    let run = |more: &[&str], code: &str, want: &str| {
        let said = lab.refuses(&[&["run", "plan", "--steps", "1"], more].concat(), 2, code);
        assert!(said.contains(want), "{more:?}: no `{want}` in {said}");
    };
    run(&["--weights", &base, "--adapter", &folder("llama")], "adapter", "the plan has no adapter");
    run(&["--weights", &base, "--adapter", "nowhere"], "adapter", "no adapter_model.safetensors");
    lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--lora", "r=2", "--prove", "no"]);
    run(&["--weights", &base, "--adapter", &folder("llama")], "tensor-shape", "--lora-from");
    lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--prove", "no"]);
    run(&["--weights", &base, "--adapter", &folder("llama")], "flag", "the plan has no adapters");
}

/// A plan's text has its adapters: compiled again, with the same flag, it is the same program.
#[test]
fn a_text_with_adapters_gets_no_more() {
    let lab = Lab::new("lora-again");
    let base = format!("{FIXTURES}/phi3");
    let lora = ["--lora", "r=2,alpha=6", "--seq", "16", "--prove", "no"];
    lab.ok(&[&["compile", &base, "-o", "first"], &lora[..]].concat());
    lab.ok(&[&["compile", "first/model.ir", "-o", "again"], &lora[..]].concat());
    let read = |plan: &str, file: &str| std::fs::read_to_string(lab.path(plan).join(file)).expect("a file");
    for file in ["model.ir", "programs/all.ir", "weights.json"] {
        assert_eq!(read("first", file), read("again", file), "{file}");
    }
    let other = ["compile", "first/model.ir", "-o", "no", "--lora", "r=2,alpha=7", "--seq", "16"];
    let said = lab.refuses(&other, 2, "lora-target");
    assert!(said.contains("has an adapter of r=2 already"), "{said}");
    lab.ok(&["verify", "first"]);
}
