//! What commands print with `--format json` is as `docs/schemas` has it; each schema is one of a command that runs here.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;
use shardc_testing::schema::misfit;
use shardc_testing::taken;
use std::collections::{BTreeMap, BTreeSet};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/schemas");

fn schemas() -> BTreeMap<String, Json> {
    let all = std::fs::read_dir(FOLDER).expect("docs/schemas").map(|e| e.expect("a file").path());
    let read = |p: std::path::PathBuf| {
        let text = std::fs::read_to_string(&p).expect("a schema");
        let name = p.file_stem().expect("a name").to_string_lossy().into_owned();
        let schema: Json =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
        // Of a key that is there twice the first value would be passed over.
        let marks = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
        assert_eq!(marks(&schema.to_string()), marks(&text), "{name}");
        (name, schema)
    };
    all.map(read).collect()
}

/// Runs commands, and compares each line that they write with a schema.
struct Checked {
    lab: Lab,
    schemas: BTreeMap<String, Json>,
    seen: BTreeSet<String>,
}

impl Checked {
    fn text(&mut self, name: &str, text: &[u8]) {
        let text = String::from_utf8_lossy(text).into_owned();
        let schema = self.schemas.get(name).unwrap_or_else(|| panic!("no schema {name}"));
        for line in text.lines() {
            let json = serde_json::from_str(line).unwrap_or_else(|e| panic!("{name}: {e}: {line}"));
            assert_eq!(misfit(schema, &json), None, "{name}: {line}");
            self.seen.insert(name.into());
        }
    }

    /// What a command prints that ends well, and what it says.
    fn run(&mut self, name: &str, args: &[&str]) {
        let printed = self.ends(name, args, 0);
        assert!(printed, "{args:?} prints nothing");
    }

    /// The same of a command that ends with a status; whether it prints something.
    fn ends(&mut self, name: &str, args: &[&str], status: i32) -> bool {
        let out = self.lab.shardc(&[args, &["--format", "json", "-v"]].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(status), "{args:?}: {said}");
        self.text(name, &out.stdout);
        self.text("message", &out.stderr);
        !out.stdout.is_empty()
    }
}

const LAYOUTS: [(&str, &[&str]); 4] = [
    (
        "llama_gqa",
        &["--mesh", "dp=2,tp=2", "--zero", "2", "--microbatch", "2", "--zero-accumulate", "both"],
    ),
    ("llama_deep", &["--mesh", "pp=2,tp=2", "--sp", "--schedule", "zb-h1", "--microbatch", "1"]),
    ("mixtral", &["--mesh", "dp=4,ep=2", "--dtype", "bf16", "--transport", "nccl"]),
    ("gemma2", &["--mesh", "tp=2", "--mode", "infer"]),
];

#[test]
fn what_is_printed_is_as_the_schemas_have_it() {
    let schemas = schemas();
    for (name, s) in &schemas {
        // A change of what a field means is a new number.
        let number = if name == "inspect-ranks" { 2 } else { 1 };
        assert_eq!(s["$id"], format!("shardc/{name}/{number}"));
        assert!(s["title"].is_string(), "{name}");
    }
    let mut c = Checked { lab: Lab::new("schemas"), schemas, seen: BTreeSet::new() };
    for (i, (fixture, flags)) in LAYOUTS.into_iter().enumerate() {
        let (model, plan) = (format!("{FIXTURES}/{fixture}"), format!("{i}.plan"));
        let sized = [flags, &["--seq", "16"]].concat();
        c.run("compile", &[&["compile", &model, "-o", &plan][..], &sized].concat());
        c.run("check", &[&["check", &model][..], &sized].concat());
        // Every run takes each question of two layouts.
        let asked = |k: &usize| taken(i + k, 2);
        let ways = [
            ("inspect", &[][..]),
            ("inspect", &["--rank", "1"]),
            ("inspect-summary", &["--summary"]),
            ("inspect-ranks", &["--ranks"]),
            ("inspect-timeline", &["--timeline"]),
            ("inspect-collectives", &["--collectives", "--node", "2"]),
            ("inspect-instructions", &["--rank", "0", "--instructions"]),
            ("inspect-kernels", &["--phase", "kernels"]),
        ];
        for (_, (name, how)) in ways.into_iter().enumerate().filter(|(k, _)| asked(k)) {
            c.run(name, &[&["inspect", &plan][..], how].concat());
        }
        let whats = ["collective:1", "rule:mesh", "price", "memory", "schedule"];
        for (_, what) in whats.into_iter().enumerate().filter(|(k, _)| asked(k)) {
            c.run("explain", &["explain", &plan, what]);
        }
        c.run("verify", &["verify", &plan]);
        c.run("prove", &["prove", &plan]);
        c.run("price", &["price", &plan, "--machine", "h100-sxm", "--launches"]);
        let run =
            ["run", &plan, "--steps", "1", "--kernels", "interpreted", "--metrics", "m.jsonl"];
        let run = [&run[..], &["--trace", "t.json"]].concat();
        if flags.contains(&"nccl") {
            c.ends("run", &run, 2);
            continue;
        }
        c.run("run", &run);
        c.run("price", &["price", &plan, "--machine", "h100-sxm", "--trace", "t.json"]);
        let metrics = std::fs::read(c.lab.path("m.jsonl")).expect("metrics");
        c.text("metrics", &metrics);
    }
    let recipes = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit/megatron");
    let recipe = format!("{recipes}/gpt_oss_20b.args");
    assert!(c.ends("audit", &["audit", "megatron", &recipe, "--machine", "h100-sxm"], 1));
    let model = format!("{FIXTURES}/llama_gqa");
    c.ends("check", &["check", &model, "--seq", "16", "--mesh", "tp=3"], 1);
    c.ends("compile", &["compile", &model, "--seq", "16", "--mesh", "tp=3"], 2);
    c.run("explain", &["explain", "rule:mesh"]);
    for what in ["transfers", "%hidden", "%l0.q", "tensor:model.norm.weight"] {
        c.run("explain", &["explain", "1.plan", what]);
    }
    c.run("doctor", &["doctor"]);
    let texts = c.lab.write("t.jsonl", "{\"text\": \"Two words.\"}\n").display().to_string();
    let tokenizer = format!("{FIXTURES}/data/tokenizer");
    c.run("data", &["data", &texts, "--tokenizer", &tokenizer, "--seq", "16"]);
    let wide = c.lab.config(
        "llama_mha",
        serde_json::json!({ "vocab_size": 512, "max_position_embeddings": 64 }),
    );
    c.lab.ok(&["compile", &wide, "--seq", "16", "--global-batch", "1", "-o", "wide.plan"]);
    c.lab.ok(&["run", "wide.plan", "--steps", "1", "--save", "wide", "--kernels", "interpreted"]);
    let generate = ["generate", "wide", "--tokenizer", &tokenizer, "--kernels", "interpreted"];
    c.run("generate", &[&generate[..], &["--prompt", "Two", "--max-new", "3"]].concat());
    for launcher in ["slurm", "k8s", "mpirun", "torchrun"] {
        c.run("launch-script", &["launch-script", "0.plan", "--for", launcher]);
    }
    let save = ["--save", "ckpt", "--save-every", "1", "--kernels", "interpreted"];
    c.run("run", &[&["run", "0.plan", "--steps", "1"][..], &save].concat());
    for to in ["hf", "dp_shard=2"] {
        c.run("reshard", &["reshard", "ckpt", "--to", to, "-o", &format!("to-{to}")]);
    }
    c.run("diff", &["diff", "0.plan", "1.plan"]);
    for file in
        [&["man", "run"][..], &["completions", "bash"], &["export", "0.plan", "--to", "dtensor"]]
    {
        c.run("text", file);
    }
    c.run("written", &["report", "0.plan", "-o", "0.html"]);
    let table = include_str!("../../cost/tests/data/fresh_2025_2026.csv").lines().enumerate();
    let own = table.filter(|(i, l)| *i == 0 || l.contains(",h100-sxm,")).map(|(_, l)| l).take(5);
    c.lab.write("runs.csv", own.collect::<Vec<_>>().join("\n") + "\n");
    c.run("text", &["price", "--rows", "runs.csv"]);
    c.run("machine", &["fit", "runs.csv", "-o", "mine.toml"]);
    let sized = ["--seq", "16", "--dump-all", "dump", "--dump-after", "partition"];
    c.run("compile", &[&["compile", &model][..], &sized].concat());
    c.run("opt", &["opt", "dump/08-partition.ir", "--pass", "differentiate"]);
    let case = concat!(env!("CARGO_MANIFEST_DIR"), "/passes/tests/cases/split/attention.ir");
    c.run("opt-check", &["opt", case, "--check"]);
    let small = ["--gpus", "2", "--machine", "h100-sxm", "--seq", "16", "--global-batch", "8"];
    c.run("plan", &[&["plan", &model][..], &small].concat());
    let most = ["--top", "1", "--max", "microbatch"];
    c.run("plan", &[&["plan", &model][..], &small, &most].concat());
    // That of the page is tested beside it.
    let all: BTreeSet<String> = c.schemas.keys().filter(|k| *k != "report").cloned().collect();
    assert_eq!(c.seen, all);
}

/// Every schema is in the table of the documentation.
#[test]
fn schemas_are_listed() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/plan-format.md");
    let page = std::fs::read_to_string(page).expect("a page");
    for name in schemas().keys() {
        assert!(page.contains(&format!("(schemas/{name}.json)")), "{name}");
    }
}
