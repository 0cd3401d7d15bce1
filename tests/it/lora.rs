//! Adapters: what PEFT trains (`tests/fixtures/lora.py`), on all meshes, and what they exchange.

mod files;

use crate::lab::{FIXTURES, Lab};
use safetensors::SafeTensors;
use serde_json::Value as Json;
use shardc_testing::{Tool, skip, taken};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A fixture, and the folder of its base model.
type Case = (&'static str, &'static str);

const CASES: [Case; 9] = [
    ("llama", "llama_mha"),
    ("llama_qv", "llama_gqa"),
    ("qwen3_tied", "lora/qwen3_tied/base"),
    ("patterns", "llama_mha"),
    ("phi3", "phi3"),
    ("gpt2", "gpt2"),
    ("gpt_neox", "gpt_neox"),
    ("deepseek_v3", "deepseek_v3"),
    // With modules that are trained whole.
    ("whole", "llama_mha"),
];

/// What the reference trains with.
const TRAINING: &[&str] = &[
    "--seq",
    "16",
    "--global-batch",
    "8",
    "--eps",
    "1e-5",
    "--clip",
    "0.5",
    "--decay",
    "all",
    "--prove",
    "no",
];

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let numbers = |t: &safetensors::tensor::TensorView| match t.dtype() {
        safetensors::Dtype::F32 => {
            t.data().chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
        }
        safetensors::Dtype::BF16 => t
            .data()
            .chunks(2)
            .map(|c| half::bf16::from_le_bytes(c.try_into().unwrap()).to_f32())
            .collect(),
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
    let index: Json =
        serde_json::from_slice(&std::fs::read(index).expect("an index")).expect("JSON");
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
    let of =
        |l: &str| serde_json::from_str::<Json>(l).expect("JSON")["loss"].as_f64().expect("a loss");
    text.lines().map(of).collect()
}

fn norm(it: impl IntoIterator<Item = f64>) -> f64 {
    it.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Trains a fixture for three steps on a layout: losses to 1e-5, gradients of the first step to 1e-5 of each tensor's
/// norm, what is trained after the last to 1e-4, and to 3e-4 of what it moved by; the rest does not change by a bit.
fn trains_as_peft(lab: &Lab, (name, base): Case, flags: &[&str]) {
    trains_as(lab, (format!("{FIXTURES}/{base}"), folder(name)), "expected", flags);
}

/// The same of the folders of a base model and of what PEFT made of it, and of a file that says what of it becomes.
fn trains_as(lab: &Lab, (base, adapter): (String, String), file: &str, flags: &[&str]) {
    let what = format!("{adapter} {file} {flags:?}");
    for old in ["out", "m.jsonl", "dump.safetensors"] {
        let _ = std::fs::remove_dir_all(lab.path(old));
        let _ = std::fs::remove_file(lab.path(old));
    }
    lab.ok(&[&["compile", &base, "--lora-from", &adapter, "-o", "out"], TRAINING, flags].concat());
    let batch = format!("{adapter}/batch.safetensors");
    let run = [
        "run",
        "out",
        "--weights",
        &base,
        "--adapter",
        &adapter,
        "--batch",
        &batch,
        "--steps",
        "3",
        // Plans for others, too: their order of work is theirs.
        "--transport",
        "threads",
    ];
    let out = ["--dump", "dump.safetensors", "--metrics", "m.jsonl", "--kernels", "interpreted"];
    lab.ok(&[&run[..], &out].concat());
    let want = tensors(&Path::new(&adapter).join(format!("{file}.safetensors")));
    let got = tensors(&lab.path("dump.safetensors"));
    let (now, then) = (losses(lab, "m.jsonl"), &want["losses"].1);
    assert_eq!(now.len(), then.len(), "{what}");
    for (a, b) in now.iter().zip(then) {
        let b = f64::from(*b);
        assert!((a - b).abs() <= 1e-5 * b, "{what}: loss {a}, reference {b}");
    }
    let base = weights(Path::new(&base));
    let begun = tensors(&Path::new(&adapter).join("adapter_model.safetensors"));
    let apart = |a: &[f32], b: &[f32]| -> Vec<f64> {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect()
    };
    for (key, (shape, want)) in
        want.iter().filter(|x| x.0.starts_with("grad.") || x.0.starts_with("param."))
    {
        let (own, got) = got.get(key).unwrap_or_else(|| panic!("{what}: no {key}"));
        assert_eq!(own, shape, "{what}: {key}");
        let off = apart(got, want);
        let (off, bound) = match key.strip_prefix("param.") {
            None => (norm(off), 1e-5 * norm(want.iter().map(|x| f64::from(*x)))),
            Some(name) => {
                let most = off.iter().fold(0.0, |m: f64, x| if x.abs() <= m { m } else { x.abs() });
                assert!(most <= 1e-4, "{what}: {key} is off by {most:.2e}");
                let (_, before) = begun.get(name).unwrap_or_else(|| &base[name]);
                (norm(off), 3e-4 * norm(apart(want, before)))
            }
        };
        assert!(off <= bound, "{what}: {key} is off by {off:.2e}, {bound:.2e} is allowed");
    }
    let trained = |key: &str| want.contains_key(&format!("param.{key}"));
    let grads = got.keys().filter_map(|k| k.strip_prefix("grad."));
    let more: Vec<&str> = grads.filter(|k| !trained(k)).collect();
    assert!(more.is_empty(), "{what}: gradients of {more:?}");
    let mut same = 0;
    for (key, (_, before)) in base.iter().filter(|t| !trained(t.0)) {
        // A tied head has no tensor of its own.
        if let Some((_, after)) = got.get(&format!("param.{key}")) {
            assert_eq!(after, before, "{what}: {key} is frozen");
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

/// Families beside those of the fixtures with weights that are fused, transposed, latent or tied, or with experts beside
/// which linears are.
const FAMILIES: [&str; 16] = [
    "falcon",
    "gpt_bigcode",
    "deepseek_v2",
    "glm4",
    "gemma3",
    "llama4",
    "cohere",
    "gptj",
    "glm",
    "gemma",
    "phi",
    "starcoder2",
    "stablelm",
    "minimax_m2",
    "ernie4_5",
    "olmo",
];

/// What PEFT makes of them when the test runs; a part of them in each.
#[test]
fn families_train_as_peft_does() {
    let lab = Lab::new("lora-families");
    let python = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let find = "import importlib.util as u; assert all(map(u.find_spec, ['torch', 'transformers', 'peft']))";
    if !Command::new(&python).args(["-c", find]).output().is_ok_and(|o| o.status.success()) {
        return skip(Tool::Peft, "adapters of further families, trained by others");
    }
    let some: Vec<&str> =
        (0..FAMILIES.len()).filter(|&i| taken(i, 5)).map(|i| FAMILIES[i]).collect();
    let mut c = Command::new(python);
    c.current_dir(FIXTURES).args(["-B", "lora.py", "--into"]).arg(&lab.0).args(&some);
    let out = c.output().expect("Python starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    for name in some {
        let folders = (format!("{FIXTURES}/{name}"), lab.path(name).display().to_string());
        trains_as(&lab, folders, "expected", &[]);
    }
}

/// Other rules, by what torch's optimizers make of PEFT's model (`tests/fixtures/lora.py`): Muon, of each A and of each B
/// as its weight is cut; and another rate for B (Hayou et al., 2024, LoRA+).
#[test]
fn other_rules_train_adapters_as_torch_does() {
    let lab = Lab::new("lora-rules");
    let rules: [(Case, &str, &[&str]); 3] = [
        (CASES[0], "muon", &["--optimizer", "muon", "--muon-dtype", "f32"]),
        (CASES[0], "lora_plus", &["--optim", "*.lora_B.*=adamw,lr*=4"]),
        (CASES[4], "muon", &["--optim", "hidden=muon,dtype=f32"]),
    ];
    for ((name, base), file, flags) in rules {
        for layout in [&[][..], &["--mesh", "tp=2"], &["--mesh", "dp=2", "--zero", "3"]] {
            let folders = (format!("{FIXTURES}/{base}"), folder(name));
            trains_as(&lab, folders, file, &[flags, layout].concat());
        }
    }
}

/// Layouts, and what else must change nothing.
const LAYOUTS: [&[&str]; 18] = [
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
    &["--recompute", "fit", "--memory", "64MiB"],
    // Early sums of gradients, and work that overlaps with them.
    &["--mesh", "dp=2", "--transport", "mpi", "--microbatch", "2"],
    &["--mesh", "dp=2,tp=2", "--zero", "3", "--transport", "mpi", "--microbatch", "1"],
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
            let (op, ty) =
                (rest.split(' ').next().expect("an op"), rest.split_once(" : ").expect("a type").1);
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
    for flags in [
        &["--mesh", "tp=2"][..],
        &["--mesh", "tp=2", "--sp"],
        &["--mesh", "dp=2,tp=2"],
        &["--mesh", "cp=2"],
    ] {
        let plan = |out: &str, more: &[&str]| {
            lab.ok(&[&["compile", &base, "-o", out, "--seq", "16", "--prove", "no"], flags, more]
                .concat());
        };
        plan("plain", &[]);
        plan("lora", &["--lora", "r=4"]);
        let [without, with] = ["plain", "lora"].map(|p| collectives(&lab, p, "forward"));
        assert_eq!(with, without, "{flags:?}");
        assert!(flags[1] == "cp=2" || with.values().sum::<usize>() > 3, "{flags:?}: {with:?}");
        let [without, with] = ["plain", "lora"].map(|p| collectives(&lab, p, "backward"));
        for (what, n) in &with {
            assert!(
                without.get(what) >= Some(n),
                "{flags:?}: {what}: {with:?}, without {without:?}"
            );
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
        let l: &[&str] =
            if flags.contains(&"--lora") { &[] } else { &["--lora", "r=2,dropout=0.25,rslora"] };
        let out = format!("p{i}");
        lab.ok(
            &[&["compile", base, "-o", &out, "--seq", "16", "--prove", "yes"], flags, l].concat()
        );
    }
    // Archives name modules as they like; a weight that two products take has one adapter. Of one two losses are made.
    for archive in ["classes", "bert", "gpt2_whole", "losses/twice"] {
        let file = format!("{FIXTURES}/../imports/{archive}.pt2");
        lab.ok(&["compile", &file, "-o", archive, "--lora", "r=1", "--prove", "yes"]);
    }
}

/// A table that the program looks up in by itself, as of biases by distance, is no linear: PEFT has none for it.
#[test]
fn tables_of_biases_have_no_adapter() {
    let lab = Lab::new("lora-tables");
    let file = format!("{FIXTURES}/../imports/two_biases.pt2");
    lab.ok(&["compile", &file, "-o", "p", "--lora", "r=1", "--prove", "no"]);
    let text = std::fs::read_to_string(lab.path("p/model.ir")).expect("a text");
    let adapters: Vec<&str> = text.lines().filter(|l| l.contains(".lora_A.weight")).collect();
    assert!(adapters.len() == 1 && adapters[0].contains(".head.lora_A."), "{adapters:?}");
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
        lab.ok(
            &[&["compile", &base, "-o", &out], TRAINING, &lora, mesh, &["--moe-aux", "0"]].concat()
        );
        let dump = format!("{i}.safetensors");
        let run =
            ["run", &out, "--weights", &base, "--batch", &batch, "--steps", "3", "--dump", &dump];
        lab.ok(&[&run[..], &["--kernels", "interpreted"]].concat());
        all.push(tensors(&lab.path(&dump)));
    }
    let [one, others @ ..] = &all[..] else { panic!("three layouts") };
    let experts = one
        .keys()
        .filter(|k| k.starts_with("param.") && k.contains(".experts.") && k.contains("lora_"));
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
    let layouts: [(&str, &[&str]); 4] = [
        ("0.5", &[]),
        ("0.5", &["--mesh", "dp=2,tp=2", "--sp"]),
        ("0.5", &["--microbatch", "2"]),
        ("0", &[]),
    ];
    for (rate, flags) in layouts {
        let lora = format!("r=4,alpha=8,dropout={rate}");
        for old in ["out", "m.jsonl"] {
            let _ = std::fs::remove_dir_all(lab.path(old));
            let _ = std::fs::remove_file(lab.path(old));
        }
        lab.ok(&[&["compile", &base, "--lora", &lora, "-o", "out"], TRAINING, flags].concat());
        let run = [
            "run",
            "out",
            "--weights",
            &base,
            "--adapter",
            &adapter,
            "--batch",
            &batch,
            "--steps",
            "3",
        ];
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
    for (out, more) in
        [("plain", &[][..]), ("lora", &["--lora", "r=1,targets=linear+lm_head+q_proj+*.mlp.*"])]
    {
        lab.ok(&[&["compile", &base, "-o", out], TRAINING, more].concat());
        let dump = format!("{out}.safetensors");
        let run =
            ["run", out, "--weights", &base, "--batch", &batch, "--steps", "1", "--dump", &dump];
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
