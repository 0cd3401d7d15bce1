//! Programs for PyTorch: what they say, as snapshots; and what they compute on gloo ranks, against transformers.

mod calls;
mod peaks;
mod sweep;

use crate::families::{DENSE, SPARSE, WITH_AUX};
use crate::fixture::*;
use crate::lab::Lab;
use crate::precision::{Trained, apart, close, train};
use safetensors::SafeTensors;
use shardc::export::torch::{Program, program};
use shardc_frontends::Model;
use shardc_ir::documents::Documents;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::plan::{Dropout, Plan};
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options, Order, TpMode};
use shardc_testing::{Tool, skip, taken};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A layout: what it is called, and what it sets.
type Layout = (&'static str, fn(&mut Options));

fn mesh(o: &mut Options, axes: &[(&str, usize)]) {
    o.mesh = axes.iter().map(|(n, s)| (n.to_string(), *s)).collect();
}

fn staged(o: &mut Options, axes: &[(&str, usize)], schedule: &str) {
    mesh(o, axes);
    (o.microbatch, o.schedule) = (1, Order::Named(schedule.into()));
}

const TWO: &[Layout] = &[
    ("tp=2 sp", |o| {
        mesh(o, &[("tp", 2)]);
        o.sp = true;
    }),
    ("dp=2 zero=3", |o| {
        mesh(o, &[("dp_shard", 2)]);
        (o.zero, o.microbatch) = (3, 2);
    }),
    ("pp=2 1f1b", |o| staged(o, &[("pp", 2)], "1f1b")),
    ("cp=2 ring", |o| {
        mesh(o, &[("cp", 2)]);
        o.cp_mode = CpMode::Ring;
    }),
];

const FOUR: &[Layout] = &[
    ("dp=2,tp=2 sp zero=1", |o| {
        mesh(o, &[("dp_shard", 2), ("tp", 2)]);
        (o.zero, o.sp, o.microbatch) = (1, true, 4);
    }),
    ("pp=2,tp=2 zb-h1 sp", |o| {
        staged(o, &[("pp", 2), ("tp", 2)], "zb-h1");
        o.sp = true;
    }),
    ("cp=2,tp=2 ulysses", |o| {
        mesh(o, &[("cp", 2), ("tp", 2)]);
        o.cp_mode = CpMode::Ulysses;
    }),
];

/// What no layout above has, on one of them: a fixture, and what is set.
type Feature = (&'static str, Layout);

const TWO_MORE: &[Feature] = &[
    (
        "llama_gqa",
        ("bf16 tp=2 sp", |o| {
            mesh(o, &[("tp", 2)]);
            (o.sp, o.dtype) = (true, DType::BF16);
        }),
    ),
    (
        "gpt2",
        ("dropout cp=2 ring", |o| {
            mesh(o, &[("cp", 2)]);
            (o.cp_mode, o.dropout) = (CpMode::Ring, Dropout::Rate(0.3));
        }),
    ),
    (
        "llama_packed",
        ("documents cp=2 all-gather", |o| {
            mesh(o, &[("cp", 2)]);
            o.cp_mode = CpMode::AllGather;
            o.documents = Some(Documents::ends(2, Some(0)));
        }),
    ),
    (
        "qwen3_moe",
        ("ep=2", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.ep, o.microbatch) = (2, 4);
        }),
    ),
    ("llama_deep", ("interleaved", |o| staged(o, &[("pp", 2)], "interleaved"))),
    (
        "qwen3",
        ("f16 zero=3", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch, o.dtype) = (3, 2, DType::F16);
            o.loss_scaling = LossScaling::Constant { scale: 1024.0 };
        }),
    ),
    (
        "llama_deep",
        ("zb-v recomputed", |o| {
            staged(o, &[("pp", 2)], "zb-v");
            o.recompute = Recompute::Full;
        }),
    ),
    (
        "gemma2",
        ("zero=2 chunks", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch, o.loss_chunks) = (2, 1, LossChunks::Of(2));
        }),
    ),
    ("llama_bias_tied", ("pp=2 tied", |o| staged(o, &[("pp", 2)], "1f1b"))),
    (
        "gpt2",
        ("dropout tp=2 sp", |o| {
            mesh(o, &[("tp", 2)]);
            (o.sp, o.dropout) = (true, Dropout::Rate(0.1));
        }),
    ),
    (
        "qwen3_moe",
        ("bf16 ep=2", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.ep, o.microbatch, o.dtype) = (2, 4, DType::BF16);
        }),
    ),
];

/// Rules of updates that are programs, of pieces of matrices and of whole ones.
const RULES: &[Feature] = &[
    (
        "llama_gqa",
        ("lion zero=1", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch, o.optim) = (1, 4, vec!["*=lion".into()]);
        }),
    ),
    (
        "gpt2",
        ("muon tp=2", |o| {
            mesh(o, &[("tp", 2)]);
            o.optim = vec!["hidden=muon,dtype=f32".into()];
        }),
    ),
    (
        "qwen3_moe",
        ("adafactor zero=3", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch, o.optim) = (3, 4, vec!["*=adafactor".into()]);
        }),
    ),
    (
        "phi3",
        ("sgd pp=2", |o| {
            staged(o, &[("pp", 2)], "1f1b");
            o.optim = vec!["*=sgd".into()];
        }),
    ),
];

/// Layers that predict tokens behind the next.
const FURTHER: &[Feature] = &[
    (
        "deepseek_v3_mtp",
        ("mtp cp=2 zigzag", |o| {
            mesh(o, &[("cp", 2)]);
            (o.mtp, o.cp_split) = (0.3, Some(CpSplit::Zigzag));
        }),
    ),
    (
        "deepseek_v3_mtp_packed",
        ("mtp documents ep=2 zero=3", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.mtp, o.ep, o.zero, o.microbatch) = (0.3, 2, 3, 2);
            o.documents = Some(Documents::ends(2, None));
        }),
    ),
    (
        "glm4_moe_mtp",
        ("mtp pp=2 tied", |o| {
            staged(o, &[("pp", 2)], "1f1b");
            o.mtp = 0.3;
        }),
    ),
];

const FOUR_MORE: &[Feature] = &[
    (
        "qwen3_moe",
        ("ep=2 beside tp=2 sp", |o| {
            mesh(o, &[("dp_shard", 2), ("tp", 2)]);
            (o.ep, o.sp, o.microbatch) = (2, true, 4);
        }),
    ),
    (
        "llama_gqa",
        ("tp=4 2d", |o| {
            mesh(o, &[("tp", 4)]);
            o.tp_mode = TpMode::TwoD;
        }),
    ),
    ("llama_deep", ("pp=4", |o| staged(o, &[("pp", 4)], "1f1b"))),
    (
        "llama_packed",
        ("documents cp=4 ring", |o| {
            mesh(o, &[("cp", 4)]);
            o.cp_mode = CpMode::Ring;
            o.documents = Some(Documents::ends(2, Some(0)));
        }),
    ),
    ("llama_gqa", ("tp=4, uneven vocabulary", |o| mesh(o, &[("tp", 4)]))),
    (
        "qwen3_moe",
        ("ep=4", |o| {
            mesh(o, &[("dp_shard", 4)]);
            (o.ep, o.microbatch) = (4, 2);
        }),
    ),
];

fn made(plan: &Plan, called: &str) -> Program {
    let p = program(plan, called, "0".repeat(64).as_str());
    assert!(p.refused.is_empty(), "{called}: {:?}", p.refused);
    p
}

fn with(layout: &Layout) -> Options {
    let mut o = options(&[], false, 8);
    layout.1(&mut o);
    o
}

pub fn python() -> String {
    std::env::var("SHARDC_PYTHON").unwrap_or("python3".into())
}

pub fn has_torch() -> bool {
    // To import it takes seconds.
    let find = "import importlib.util as u; assert all(map(u.find_spec, ['torch', 'safetensors']))";
    Command::new(python()).args(["-c", find]).output().is_ok_and(|o| o.status.success())
}

/// A case in a folder: its program, and the file of what it computes.
fn written(dir: &Path, number: usize, fixture: &Fixture, p: &Program) -> serde_json::Value {
    let to = dir.join(number.to_string());
    std::fs::create_dir_all(&to).expect("a folder");
    for f in &p.files {
        std::fs::write(to.join(&f.name), &f.bytes).expect("a file");
    }
    serde_json::json!({
        "program": to, "weights": fixture.dir, "batch": fixture.dir.join("batch.safetensors"),
        "dump": dir.join(format!("{number}.safetensors")), "steps": 3,
    })
}

/// A program that is run, and what its numbers are compared with.
struct Case {
    what: String,
    fx: Fixture,
    model: Model,
    /// As `tests/torch/walk.py` takes it.
    json: serde_json::Value,
    /// What the runtime computes by the same plan; else it is transformers.
    runtime: Option<Trained>,
}

/// Three steps of fixtures on layouts of so many ranks, in one launch. Of the tables a run takes one in some.
fn agrees(ranks: usize, layouts: &[Layout], features: &[Feature], sample: [usize; 2]) {
    if !has_torch() {
        return skip(Tool::Torch, &format!("programs of torch on {ranks} ranks"));
    }
    let lab = Lab::new(&format!("torch{ranks}-{}-{}", layouts.len(), features.len()));
    let dir: PathBuf = lab.path("");
    let names: Vec<&str> = [ALL, EXPERTS, DENSE, SPARSE].concat();
    let mut all: Vec<Case> = vec![];
    for (f, name) in names.iter().enumerate() {
        // Always one whose experts are in turns in one tensor, as no other's.
        let is = |l: usize| taken(f + 5 * l, sample[0]) || (*name == "gpt_oss" && l == 0);
        for (_, layout) in layouts.iter().enumerate().filter(|(l, _)| is(*l)) {
            let (fx, o) = (Fixture::open(name), with(layout));
            // Their auxiliary loss is a mean over microbatches.
            let means = EXPERTS[..2].contains(name) || SPARSE[..WITH_AUX].contains(name);
            if means && o.microbatch < ROWS {
                continue;
            }
            let model = fx.model(&o);
            let Ok(compiled) = try_compile(&model, &o) else { continue };
            let json = written(&dir, all.len(), &fx, &made(&compiled.plan, name));
            let what = format!("{name} {}", layout.0);
            all.push(Case { what, fx, model, json, runtime: None });
        }
    }
    for (_, (name, layout)) in features.iter().enumerate().filter(|(f, _)| taken(*f, sample[1])) {
        let (fx, o) = (Fixture::open(name), with(layout));
        let (model, compiled, runtime) = if o.mtp == 0.0 {
            let (model, compiled, got) = train(name, &o);
            (model, compiled, Some(got))
        } else {
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            (model, compiled, None)
        };
        let json = written(&dir, all.len(), &fx, &made(&compiled.plan, name));
        let what = format!("{name} {}", layout.0);
        all.push(Case { what, fx, model, json, runtime });
    }
    walk(ranks, &dir, &all);
    all.iter().for_each(Case::compare);
}

impl Case {
    /// What it has computed, with transformers' numbers or the runtime's.
    fn compare(&self) {
        eprintln!("{}", self.what);
        let (fx, model) = (&self.fx, &self.model);
        let got = fx.dumped(self.json["dump"].as_str().expect("a path"));
        let Some(want) = &self.runtime else {
            fx.compare_loss(got.reference("loss")[0]);
            fx.compare_grads(model, |p| got.grad(weight(model, p)));
            return fx.compare_params(model, |p| got.param(weight(model, p)));
        };
        let half = self.what.contains("f16");
        let [loss, grads] = if half { [HALF / 2.0, 10.0 * HALF] } else { [1e-6, 1e-4] };
        let losses: Vec<f64> = (1..=3).map(|n| got.reference(&format!("loss.{n}"))[0]).collect();
        close(&self.what, &losses, &want.losses, loss);
        let all: Vec<Vec<f64>> = model.weights.iter().map(|w| got.grad(w)).collect();
        let off = apart(&all, &want.grads);
        assert!(off <= grads, "{}: gradients are off by {off:.1e}", self.what);
    }
}

/// The unit of rounding of bf16, the coarser one.
const HALF: f64 = 1.0 / 256.0;

/// Runs programs on so many processes, in one launch.
fn walk(ranks: usize, dir: &Path, all: &[Case]) {
    walk_over(ranks, dir, all.iter().map(|c| c.json.clone()).collect());
}

fn walk_over(ranks: usize, dir: &Path, cases: Vec<serde_json::Value>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = dir.join("list.json");
    std::fs::write(&list, serde_json::to_string(&cases).expect("plain data")).expect("a file");
    let mut c = Command::new(python());
    c.arg("-B").arg(root.join("tests/torch/walk.py")).arg(ranks.to_string()).arg(&list);
    let out = c.env("PYTHONPATH", root.join("python")).output().expect("Python starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
}

fn weight<'a>(model: &'a Model, param: &str) -> &'a shardc_ir::weights::Weight {
    model.weights.iter().find(|w| w.param == param).expect("a weight")
}

#[test]
fn two_ranks_as_transformers() {
    agrees(2, TWO, TWO_MORE, [8, 6]);
}

#[test]
fn updates_by_other_rules() {
    agrees(2, &[], RULES, [1, 2]);
}

#[test]
fn layers_that_predict_further_tokens() {
    agrees(2, &[], FURTHER, [1, 1]);
}

/// Losses of archives that weigh classes, or have a number for each: as our own runtime's, split over ranks and in
/// microbatches.
#[test]
fn losses_of_archives() {
    if !has_torch() {
        return skip(Tool::Torch, "losses of archives as programs of torch");
    }
    let (lab, imports) = (Lab::new("torch-losses"), Path::new(env!("CARGO_MANIFEST_DIR")));
    let imports = imports.join("tests/imports");
    let all = std::fs::read(imports.join("losses.safetensors")).expect("numbers");
    let all = SafeTensors::deserialize(&all).expect("safetensors");
    let flags = ["--mesh", "tp=2", "--global-batch", "24", "--microbatch", "8"];
    let mut cases = vec![];
    for (name, labels) in [
        ("weights", "targets"),
        ("weights_smooth", "targets"),
        ("soft", "y"),
        ("soft_weights", "y"),
    ] {
        let archive = imports.join(format!("losses/{name}.pt2")).display().to_string();
        let [plan, program, saved, batch, dump] =
            ["plan", "program", "saved", "batch", "dump"].map(|end| format!("{name}-{end}"));
        let [idx, y] = ["idx", labels].map(|n| all.tensor(n).expect(n));
        let bytes = safetensors::serialize([("idx", idx), ("targets", y)], None);
        lab.write(&batch, bytes.expect("safetensors"));
        lab.ok(&[&["compile", &archive, "-o", &plan][..], &flags].concat());
        lab.ok(&["export", &plan, "--to", "torch", "-o", &program]);
        let run = ["run", &plan, "--weights", &archive, "--batch", &batch];
        lab.ok(&[&run[..], &["--steps", "1", "--lr", "1e-30", "--save", &saved]].concat());
        let out = lab.ok(&[&run[..], &["--steps", "3", "--format", "json"]].concat());
        let lines = String::from_utf8_lossy(&out.stdout).into_owned();
        let losses = lines
            .lines()
            .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok()?["loss"].as_f64());
        cases.push((name, losses.take(3).collect::<Vec<f64>>(), dump.clone()));
        let path = |name: &str| lab.path(name).display().to_string();
        let json = serde_json::json!({
            "program": path(&program), "weights": path(&saved), "batch": path(&batch),
            "dump": path(&dump), "steps": 3,
        });
        lab.write(&format!("{name}.json"), json.to_string());
    }
    let json = |c: &(&str, Vec<f64>, String)| {
        let text = std::fs::read(lab.path(&format!("{}.json", c.0))).expect("a file");
        serde_json::from_slice::<serde_json::Value>(&text).expect("JSON")
    };
    walk_over(2, &lab.path(""), cases.iter().map(json).collect());
    for (name, own, dump) in &cases {
        let bytes = std::fs::read(lab.path(dump)).expect("a dump");
        let dump = SafeTensors::deserialize(&bytes).expect("safetensors");
        for (step, want) in own.iter().enumerate() {
            let got = dump.tensor(&format!("loss.{}", step + 1)).expect("a loss");
            let got = got.data().as_chunks::<4>().0.first().expect("a number");
            let got = f64::from(f32::from_le_bytes(*got));
            assert!((got - want).abs() <= 1e-5 * want, "{name}: step {step}: {got}, not {want}");
        }
        assert!(own[2] < own[0], "{name}: {own:?}");
    }
}

#[test]
fn four_ranks_as_transformers() {
    agrees(4, FOUR, FOUR_MORE, [7, 4]);
}

/// Plans for other ranks, other batches and files of two plans are refused by one message.
#[test]
fn what_a_program_refuses() {
    if !has_torch() {
        return skip(Tool::Torch, "what programs of torch refuse");
    }
    let (lab, fx) = (Lab::new("torch-refused"), Fixture::open("llama_gqa"));
    for (number, o) in [options(&[], false, 8), with(&TWO[0])].into_iter().enumerate() {
        let p = made(&compile(&fx.model(&o), &o).plan, "llama");
        written(&lab.path(""), number, &fx, &p);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut c = Command::new(python());
    c.arg("-B").arg(root.join("tests/torch/refused.py"));
    c.args([lab.path("0"), lab.path("1"), fx.dir]);
    c.env("SHARDC_BINARY", env!("CARGO_BIN_EXE_shardc"));
    let out = c.env("PYTHONPATH", root.join("python")).output().expect("Python starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && out.stdout == b"OK\n", "{said}");
}

/// What people read: llama under tensor parallelism, in a pipeline, and with sharded weights.
#[test]
fn programs_of_llama() {
    let layouts: [Layout; 3] = [
        ("program_tp2", |o| mesh(o, &[("tp", 2)])),
        ("program_pp2", |o| staged(o, &[("pp", 2)], "1f1b")),
        ("program_zero3", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch) = (3, 2);
        }),
    ];
    for layout in &layouts {
        let o = Options { observe: false, ..with(layout) };
        let compiled = compile(&Fixture::open("llama_deep").model(&o), &o);
        let p = made(&compiled.plan, "llama");
        let text = String::from_utf8(p.files[0].bytes.clone()).expect("text");
        let long = text.lines().find(|l| l.len() > 100 && !l.trim_start().starts_with('#'));
        assert_eq!(long, None);
        insta::assert_snapshot!(layout.0, text);
    }
}

/// Whatever people call models, tensors and modules: it is in strings and comments, and code is the same.
#[test]
fn names_are_strings_and_comments() {
    let o = with(&TWO[0]);
    let compiled = compile(&Fixture::open("llama_gqa").model(&o), &o);
    let plain = made(&compiled.plan, "llama");
    let code = |p: &Program| {
        let text = String::from_utf8(p.files[0].bytes.clone()).expect("text");
        let lines = text.lines().filter(|l| !l.trim_start().starts_with('#'));
        lines.map(String::from).collect::<Vec<_>>()
    };
    for bad in ["\"\"\"", "'", "a\nimport os", "\r\nimport os", "\u{2028}x", "\u{c}x", "{i}", "\\"]
    {
        let mut other = compiled.plan.clone();
        for f in &mut other.module.funcs {
            for s in f.scopes.iter_mut().filter(|s| !s.path.is_empty()) {
                s.path = format!("{bad}{}", s.path).into();
            }
            for port in f.args.iter_mut().chain(&mut f.results) {
                if let Some(r) = &mut port.role {
                    r.name = format!("{}{bad}", &*r.name).into();
                }
            }
        }
        let p = made(&other, bad);
        assert_eq!(code(&p), code(&plain), "{bad:?}");
        let facts: serde_json::Value = serde_json::from_slice(&p.files[1].bytes).expect("JSON");
        assert!(facts["functions"].to_string().contains(&serde_json::json!(bad).to_string()[1..]));
    }
}
