//! What is given at `run` in place of what the plan says: the learning rate, and the order of data.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};
use shardc::checkpoint::Saved;
use shardc::data::{Data, Order, Picks};
use shardc_ir::plan::LrSchedule;
use std::collections::BTreeSet;

const SIZES: [&str; 6] = ["--seq", "16", "--global-batch", "8", "--eps", "1e-5"];

/// Steps as they are printed, but for their times.
fn steps(lab: &Lab, args: &[&str]) -> Vec<String> {
    let run = ["run", "--threads", "1", "--kernels", "interpreted", "--format", "json"];
    let out = lab.ok(&[&run[..], args].concat()).stdout;
    let lines = String::from_utf8_lossy(&out).into_owned();
    lines.lines().map(|l| l.split(",\"ms\"").next().unwrap_or_default().to_string()).collect()
}

fn bytes(lab: &Lab, file: &str) -> Vec<u8> {
    std::fs::read(lab.path(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// The weights that a run saved at its end.
fn weights(lab: &Lab, dir: &str) -> Vec<u8> {
    bytes(lab, &format!("{dir}/model.safetensors"))
}

#[test]
fn a_learning_rate_given_at_run_is_as_if_it_were_compiled() {
    type Words<'a> = &'a [&'a str];
    let cosine: Words =
        &["--lr", "2e-2", "--lr-schedule", "warmup-cosine", "--warmup", "2", "--total-steps", "5"];
    let floor: &[&str] = &["--min-lr", "1e-3", "--lr", "5e-3", "--warmup", "1"];
    // By model: its layout, what both plans have, and what is given to one at compile, to the other at run.
    let cases: [(&str, Words, Words, Words); 6] = [
        ("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp"], &[], &["--lr", "1e-2"]),
        ("gpt2", &["--mesh", "dp=2", "--zero", "1"], &["--optimizer", "sgd"], &["--lr", "0.3"]),
        ("llama_mha", &["--mesh", "dp=2", "--zero", "3", "--dtype", "bfloat16"], &[], cosine),
        ("llama_deep", &["--mesh", "pp=2", "--microbatch", "2"], &cosine[..6], floor),
        ("mixtral", &["--mesh", "dp_shard=2,ep=2", "--clip", "0.5"], &[], cosine),
        (
            "qwen3",
            &["--mesh", "cp=2", "--cp-mode", "ring"],
            &cosine[..6],
            &["--lr-schedule", "constant"],
        ),
    ];
    for (model, layout, both, given) in cases {
        let lab = Lab::new(&format!("rate-{model}"));
        let path = format!("{FIXTURES}/{model}");
        let plan = |name, more: &[&str]| {
            lab.ok(&[&["compile", &path, "-o", name], &SIZES[..], layout, more].concat())
        };
        // What is given later stands: the flags of `both` that `given` has again are left out.
        let kept: Vec<&str> =
            both.chunks(2).filter(|c| !given.contains(&c[0])).flatten().copied().collect();
        plan("compiled", &[&kept[..], given].concat());
        plan("other", both);
        let before = bytes(&lab, "other/plan.json");
        let want = steps(&lab, &["compiled", "--steps", "6", "--save", "a"]);
        let whole = steps(&lab, &[&["other", "--steps", "6", "--save", "b"], given].concat());
        assert_eq!(whole, want, "{model}");
        assert!(weights(&lab, "a") == weights(&lab, "b"), "{model}");
        // Without, it is another.
        assert_ne!(steps(&lab, &["other", "--steps", "6"]), want, "{model}");
        // In two parts.
        let save = ["--save", "ckpt", "--save-every", "3"];
        let first = steps(&lab, &[&["other", "--steps", "3"], &save[..], given].concat());
        let on = ["other", "--steps", "6", "--resume", "ckpt", "--save", "c"];
        let rest = steps(&lab, &[&on[..], given].concat());
        assert_eq!([first, rest].concat(), want, "{model}");
        assert!(weights(&lab, "a") == weights(&lab, "c"), "{model}");
        assert!(bytes(&lab, "other/plan.json") == before, "{model}: the plan is as it was");
    }
}

fn said(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn checkpoints_and_logs_say_what_was_given() {
    let lab = Lab::new("rate-told");
    let model = format!("{FIXTURES}/gpt2");
    lab.ok(&[&["compile", &model, "-o", "p"], &SIZES[..]].concat());
    let run =
        |more: &[&str]| said(&lab.ok(&[&["run", "p", "--kernels", "interpreted"], more].concat()));
    let save = ["--save", "ckpt", "--save-every", "2", "--metrics", "m.jsonl"];
    let text = run(&[&["--steps", "2", "--lr", "0.25", "--data-seed", "7"], &save[..]].concat());
    for line in ["learning rate 0.25 (0.001 in the plan)", "seed of data 7 (0 in the plan)"] {
        assert!(text.contains(line), "no `{line}` in {text}");
    }
    let first: Json =
        serde_json::from_slice(bytes(&lab, "m.jsonl").split(|&b| b == b'\n').next().unwrap())
            .expect("JSON");
    assert_eq!(first["lr"], json!(0.25));
    let dir = lab.path("ckpt/step-00000002");
    let index: Json =
        serde_json::from_slice(&bytes(&lab, "ckpt/step-00000002/index.json")).expect("JSON");
    let want = json!({
        "lr": { "kind": "constant", "lr": 0.25 }, "order": "random", "seed": 7, "rows": 16,
        "data": index["run"]["data"],
    });
    assert_eq!(index["run"], want);
    assert!(index["run"]["data"].as_str().is_some_and(|d| d.contains("random tokens")), "{want}");
    // It goes on as it was; what is given otherwise is told.
    let on = |more: &[&str]| run(&[&["--steps", "3", "--resume", "ckpt"], more].concat());
    let text = on(&["--save", "more", "--save-every", "1"]);
    let plan = "in the plan; a run goes on as its checkpoint or its flags say";
    for line in ["learning rate 0.25 (0.001 ", "seed of data 7 (0 "] {
        assert!(text.contains(&format!("{line}{plan})")), "no `{line}` in {text}");
    }
    assert!(!text.contains("when the checkpoint"), "{text}");
    let saved = Saved::open(&lab.path("more")).expect("a checkpoint").run.expect("its state");
    assert_eq!((saved.lr, saved.seed), (LrSchedule::Constant { lr: 0.25 }, 7));
    let text = on(&["--lr", "0.001", "--data-seed", "0"]);
    let lines = [
        "learning rate 0.001 (0.25 when the checkpoint was written)",
        "seed of data 0 (7 when the checkpoint was written)",
    ];
    lines.iter().for_each(|l| assert!(text.contains(l), "no `{l}` in {text}"));
    // As the plan says, at the same place of the data.
    let save = ["--save", "fresh", "--save-every", "1"];
    let fresh = on(&[&["--resume-fresh"], &save[..]].concat());
    lines.iter().for_each(|l| assert!(fresh.contains(l), "no `{l}` in {fresh}"));
    let saved = Saved::open(&lab.path("fresh")).expect("a checkpoint").run.expect("its state");
    assert_eq!((saved.lr, saved.seed, saved.rows), (LrSchedule::Constant { lr: 0.001 }, 0, 24));
    let alone = lab.shardc(&["run", "p", "--resume-fresh"]);
    assert!(alone.status.code() == Some(2) && said(&alone).contains("--resume <DIR>"), "{alone:?}");
    // Another mesh keeps it; a checkpoint of before goes on, too.
    lab.ok(&["reshard", "ckpt", "--to", "dp_shard=2", "--zero", "3", "-o", "two"]);
    assert_eq!(
        Saved::open(&lab.path("two")).expect("a checkpoint").run.map(|r| r.lr),
        Some(LrSchedule::Constant { lr: 0.25 })
    );
    let mut old = index;
    (old["format"], old["hash"]) = (2.into(), "".into());
    old.as_object_mut().expect("an object").remove("run");
    let old = serde_json::to_string_pretty(&old).expect("JSON");
    std::fs::write(dir.join("index.json"), shardc::seal::seal(&old)).expect("a write");
    assert!(!on(&[]).contains("when the checkpoint"));
}

/// What a run that goes on has otherwise than the one that saved is told, each once, and the plan's is taken.
#[test]
fn what_is_another_on_resume_is_told() {
    let lab = Lab::new("resume-told");
    let model = format!("{FIXTURES}/gpt2");
    let tokens = |last: u16| -> Vec<u8> {
        (0..300u16)
            .map(|i| if i == 299 { last } else { i % 7 })
            .flat_map(u16::to_le_bytes)
            .collect()
    };
    lab.write("a.bin", tokens(1));
    lab.write("b.bin", tokens(2));
    let other =
        ["--weight-decay", "0.5", "--betas", "0.8,0.9", "--global-batch", "4", "--dtype", "bf16"];
    lab.ok(&[&["compile", &model, "-o", "p"], &SIZES[..]].concat());
    lab.ok(&[&["compile", &model, "-o", "q", "--seq", "8"], &other[..]].concat());
    let run = |plan: &str, data: &str, more: &[&str]| {
        let base = ["run", plan, "--data", data, "--kernels", "interpreted", "--steps"];
        said(&lab.ok(&[&base[..], more].concat()))
    };
    run("p", "a.bin", &["2", "--save", "ckpt", "--save-every", "2"]);
    let same = run("p", "a.bin", &["3", "--resume", "ckpt"]);
    assert!(!same.contains("when the checkpoint"), "{same}");
    let text = run("q", "b.bin", &["3", "--resume", "ckpt"]);
    for line in [
        "weight decay 0.5, the plan's (0.01 when the checkpoint was written)",
        "global batch 4, the plan's (8 when the checkpoint was written)",
        "seq 8, the plan's (16 when the checkpoint was written)",
        "dtype bf16, the plan's (f32 when the checkpoint was written)",
        "beta1 = 0.8",
        "data of 300 tokens, hash ",
    ] {
        assert_eq!(text.matches(line).count(), 1, "`{line}` in {text}");
    }
    // One token of the data is enough.
    let text = run("p", "b.bin", &["3", "--resume", "ckpt"]);
    assert_eq!(text.matches("when the checkpoint was written").count(), 1, "{text}");
    assert!(text.contains("data of 300 tokens, hash "), "{text}");
}

#[test]
fn what_no_run_can_take_is_refused() {
    let lab = Lab::new("rate-refused");
    let model = format!("{FIXTURES}/gpt2");
    lab.ok(&["compile", &model, "-o", "p", "--seq", "16"]);
    lab.ok(&["compile", &model, "-o", "infer", "--seq", "16", "--mode", "infer"]);
    let refused = |plan: &str, flags: &[&str], words: &[&str]| {
        let text = lab.refuses(&[&["run", plan], flags].concat(), 2, "flag");
        words.iter().for_each(|w| assert!(text.contains(w), "{flags:?}: no `{w}` in {text}"));
    };
    for lr in ["-1", "0", "nan", "inf", "1e-50", "1e39"] {
        refused("p", &["--lr", lr], &["--lr"]);
    }
    let cosine = ["--lr-schedule", "warmup-cosine"];
    let words = lab.misuses(&["run", "p", "--lr-schedule", "linear"], "--lr-schedule");
    assert!(words.contains("[possible values: constant, warmup-cosine, warmup-linear]"), "{words}");
    refused("p", &["--warmup", "3"], &["the learning rate is constant", "add --lr-schedule"]);
    refused("p", &["--decay-steps", "3"], &["the learning rate is constant"]);
    let flags = ["--warmup", "3", "--total-steps", "9", "--decay-steps", "7", cosine[0], cosine[1]];
    refused("p", &flags, &["6 steps follow the warmup", "for example --decay-steps 2"]);
    refused("p", &["--min-lr", "-0.1", cosine[0], cosine[1]], &["--min-lr"]);
    refused("p", &["--min-lr", "0.1", cosine[0], cosine[1]], &["is above --lr 0.001"]);
    refused("p", &["--warmup", "1000", cosine[0], cosine[1]], &["is not below --total-steps"]);
    refused("infer", &["--lr", "0.1"], &["the plan does not train", "--mode infer"]);
    for flags in [&["--data-order", "shuffled"][..], &["--data-seed", "1", "--batch", "b"]] {
        let out = lab.shardc(&[&["run", "p"], flags].concat());
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    }
}

/// A file of whole numbers from 0 on, one row of i4.
fn numbers(lab: &Lab, name: &str, n: i32) -> String {
    let header = format!("{{'descr': '<i4', 'fortran_order': False, 'shape': ({n},), }}");
    let pad = 128 - 10 - 1 - header.len();
    let mut out = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    out.extend(format!("{header}{}\n", " ".repeat(pad)).bytes());
    (0..n).for_each(|i| out.extend(i.to_le_bytes()));
    lab.write(name, out).display().to_string()
}

/// Every order of a file is that of the definition: where rows begin, by step.
#[test]
fn an_epoch_reads_every_piece_once() {
    let lab = Lab::new("orders");
    let file = numbers(&lab, "t.npy", 101);
    let data = Data::open("--data", &file, None, 1 << 20).expect("data");
    let table = shardc_ir::func::inputs(&plan(&lab, &[]).plan.module);
    let rows = |order, step, rows| -> Vec<i32> {
        let picks = Picks { order, seed: 3, done: (0, 0) };
        let all = data.batch(&table, &picks, step, rows).expect("a batch");
        let ids = all.values().find_map(|v| match v {
            shardc_runtime::Numbers::I32(x) => Some(x.clone()),
            shardc_runtime::Numbers::F32(_) => None,
        });
        ids.expect("tokens").chunks(16).map(|r| r[0]).collect()
    };
    // 100 pieces of tokens and a last label: 6 of 16, and 4 tokens that are not read.
    assert_eq!(data.epoch(&table, &Picks::random(0)).expect("an epoch"), Some(6));
    assert_eq!(rows(Order::Sequential, 1, 4), [0, 16, 32, 48]);
    assert_eq!(rows(Order::Sequential, 2, 4), [64, 80, 0, 16]);
    let epochs: Vec<Vec<i32>> = (1..=3).map(|s| rows(Order::Shuffled, s, 6)).collect();
    for e in &epochs {
        let all: BTreeSet<i32> = e.iter().copied().collect();
        assert_eq!(all, (0..6).map(|i| i * 16).collect(), "{e:?}");
    }
    assert!(epochs[0] != epochs[1] || epochs[1] != epochs[2]);
}

fn plan(lab: &Lab, more: &[&str]) -> shardc::stored::Stored {
    let config = lab.config("gpt2", json!({ "vocab_size": 256 }));
    lab.ok(&[&["compile", &config, "-o", "p", "--seq", "16", "--lr", "3e-3"], more].concat());
    shardc::plan_dir::read(&lab.path("p")).expect("a plan")
}

/// On every mesh the same rows; behind a pause the next ones, also where a step takes another number of them.
#[test]
fn orders_go_on_behind_a_pause_and_on_other_meshes() {
    let lab = Lab::new("orders-on");
    let file = numbers(&lab, "t.npy", 161);
    let (order, save) =
        (["--data", &file, "--data-order", "shuffled"], ["--save", "c", "--save-every", "2"]);
    plan(&lab, &["--global-batch", "8"]);
    let whole = steps(&lab, &[&["p", "--steps", "4", "--data-seed", "5"], &order[..]].concat());
    let seeded = steps(&lab, &[&["p", "--steps", "4"], &order[..]].concat());
    assert_ne!(whole, seeded);
    let first = [&["p", "--steps", "2", "--data-seed", "5"], &order[..], &save].concat();
    let rest = ["p", "--steps", "4", "--data-seed", "5", "--resume", "c"];
    let parts = [steps(&lab, &first), steps(&lab, &[&rest[..], &order].concat())].concat();
    assert_eq!(parts, whole);
    // Twice as many rows a step from the third on: rows 16 to 31 of training.
    lab.ok(&[
        "compile",
        "config.json",
        "-o",
        "wide",
        "--seq",
        "16",
        "--global-batch",
        "16",
        "--lr",
        "3e-3",
    ]);
    let on = [
        "wide",
        "--steps",
        "3",
        "--data-seed",
        "5",
        "--resume",
        "c",
        "--save",
        "d",
        "--save-every",
        "1",
    ];
    steps(&lab, &[&on[..], &order].concat());
    let run = Saved::open(&lab.path("d")).expect("a checkpoint").run.expect("what it trained with");
    assert_eq!((run.rows, run.order, run.seed), (32, Order::Shuffled, 5));
    let ranks = [
        "compile",
        "config.json",
        "-o",
        "four",
        "--seq",
        "16",
        "--global-batch",
        "8",
        "--lr",
        "3e-3",
    ];
    lab.ok(&[&ranks[..], &["--mesh", "dp=2,tp=2"]].concat());
    let loss = |line: &String| {
        let json: Json = serde_json::from_str(&format!("{line}}}")).expect("JSON");
        json["loss"].as_f64().expect("a loss")
    };
    let four = steps(&lab, &[&["four", "--steps", "4", "--data-seed", "5"], &order[..]].concat());
    for (a, b) in four.iter().zip(&whole) {
        assert!((loss(a) - loss(b)).abs() < 1e-5, "{a} {b}");
    }
}
