//! What a run tells, and takes, where people mean something else than the letter: an evaluation alone, an inference
//! without labels, batches that teach nothing, scales that are still to be found, optimizers that are new.

use crate::lab::{FIXTURES, Lab};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value as Json;

/// A batch of 8 rows of 16 tokens, with labels that a function makes.
fn batch(lab: &Lab, file: &str, label: Option<fn(usize) -> i64>) {
    let bytes = |of: &dyn Fn(usize) -> i64| -> Vec<u8> {
        (0..128).flat_map(|i| of(i).to_le_bytes()).collect()
    };
    let (ids, labels) = (bytes(&|i| (i % 50) as i64), label.map(|of| bytes(&of)));
    let view = |data| TensorView::new(Dtype::I64, vec![8, 16], data).expect("a tensor");
    let both = [("input_ids", Some(&ids)), ("labels", labels.as_ref())];
    let all = both.into_iter().filter_map(|(name, data)| Some((name, view(data?))));
    lab.write(file, safetensors::serialize(all, None).expect("a batch"));
}

fn plan(lab: &Lab, model: &str, name: &str, flags: &[&str]) {
    let path = format!("{FIXTURES}/{model}");
    let base = ["compile", &path, "--seq", "16", "--prove", "no", "-o", name];
    lab.ok(&[&base[..], flags].concat());
}

/// What a run prints, and what it says.
fn run(lab: &Lab, args: &[&str]) -> [String; 2] {
    let out = lab.ok(&[&["run"], args, &["--kernels", "interpreted", "--threads", "1"]].concat());
    [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned())
}

#[test]
fn an_inference_needs_no_labels() {
    let lab = Lab::new("told-infer");
    batch(&lab, "ids.safetensors", None);
    plan(&lab, "llama_mha", "infer", &["--mode", "infer"]);
    plan(&lab, "llama_mha", "train", &[]);
    let [out, _] = run(&lab, &["infer", "--batch", "ids.safetensors", "--dump", "d.safetensors"]);
    assert!(out.contains("step     1  forward"), "{out}");
    let train = ["run", "train", "--batch", "ids.safetensors"];
    assert!(lab.refuses(&train, 2, "data").contains("labels"));
}

#[test]
fn an_evaluation_alone_is_one() {
    let lab = Lab::new("told-evaluation");
    batch(&lab, "rows.safetensors", Some(|i| (i % 50) as i64));
    let data = ["--eval-data", "rows.safetensors"];
    for (i, flags) in [&[][..], &["--mesh", "dp=2", "--zero", "3"]].into_iter().enumerate() {
        let name = format!("p{i}");
        plan(&lab, "llama_mha", &name, flags);
        let loss = |out: &str| -> f64 {
            let line = out.lines().find_map(|l| l.strip_prefix("{\"step\":"));
            let line: Json = serde_json::from_str(&format!("{{\"step\":{}", line.expect("a line")))
                .expect("JSON");
            line["eval_loss"].as_f64().expect("a loss")
        };
        let alone = [&[&*name, "--steps", "0", "--format", "json"], &data[..]].concat();
        let [out, said] = run(&lab, &alone);
        assert_eq!(out.lines().count(), 1, "{out}");
        assert!(!said.contains("nothing to") && !said.contains("random tokens"), "{said}");
        assert!((3.0..6.0).contains(&loss(&out)), "{out}");
        // After steps that are all done, too; and it is that of the last step.
        let save = ["--steps", "2", "--save", "c", "--save-every", "2", "--eval-every", "2"];
        let [out, _] = run(&lab, &[&[&*name, "--format", "json"], &save[..], &data].concat());
        let last = out.lines().last().expect("an evaluation").to_string();
        let on = [&*name, "--steps", "2", "--resume", "c", "--format", "json"];
        let [out, _] = run(&lab, &[&on[..], &data].concat());
        assert_eq!(out.trim(), last);
        std::fs::remove_dir_all(lab.path("c")).expect("checkpoints");
    }
    let [out, said] = run(&lab, &["p0", "--steps", "0"]);
    assert!(out.is_empty() && said.contains("nothing to do"), "{out} {said}");
}

#[test]
fn a_batch_without_labels_is_told_once() {
    let lab = Lab::new("told-labels");
    batch(&lab, "none.safetensors", Some(|_| -100));
    batch(&lab, "some.safetensors", Some(|i| if i % 16 < 8 { -1 } else { (i % 50) as i64 }));
    plan(&lab, "llama_mha", "p", &[]);
    let [out, said] = run(&lab, &["p", "--batch", "none.safetensors", "--steps", "3"]);
    assert_eq!(said.matches("warning[no-labels]").count(), 1, "{said}");
    assert!(said.contains("3 of 3 steps had no label"), "{said}");
    assert_eq!(out.matches("loss 0.0000").count(), 3, "{out}");
    // Routers have losses of their own; and an evaluation is looked at, too.
    plan(&lab, "qwen3_moe", "m", &["--moe-aux", "0.1"]);
    let [_, said] = run(&lab, &["m", "--batch", "none.safetensors", "--steps", "1"]);
    assert!(said.contains("only the other losses teach") && !said.contains("nothing to"), "{said}");
    let eval = ["--eval-data", "none.safetensors", "--eval-every", "1"];
    for steps in ["0", "2"] {
        let [_, said] = run(&lab, &[&["p", "--steps", steps][..], &eval].concat());
        assert_eq!(said.matches("no token of the evaluation has a label").count(), 1, "{said}");
    }
    // A negative label is none, whichever it is; and columns of data mean the same.
    let of = |how: &str| {
        let [out, said] = run(&lab, &["p", how, "some.safetensors", "--steps", "1"]);
        assert!(!said.contains("no-labels"), "{said}");
        out
    };
    assert!(of("--batch").contains("loss ") && of("--data").contains("loss "));
}

#[test]
fn the_first_steps_of_f16_are_explained() {
    let lab = Lab::new("told-f16");
    let what = "the first steps of f16 are skipped until the scale of the loss fits";
    for (scale, told) in [("4294967296", 1), ("1", 0)] {
        let flags = ["--dtype", "f16", "--initial-loss-scale", scale, "--min-loss-scale", "1"];
        plan(&lab, "llama_mha", "p", &flags);
        let [_, said] = run(&lab, &["p", "--steps", "2"]);
        assert_eq!(said.matches(what).count(), told, "{said}");
    }
}

/// What a checkpoint cannot go on with has a way out that works.
#[test]
fn another_optimizer_begins_with_the_weights() {
    let lab = Lab::new("told-optimizer");
    let save = ["--steps", "1", "--save", "c", "--save-every", "1"];
    for (before, after) in
        [(&["--freeze", "*.q_proj.weight"][..], &[][..]), (&["--optimizer", "sgd"], &[])]
    {
        plan(&lab, "llama_mha", "p", before);
        plan(&lab, "llama_mha", "q", after);
        run(&lab, &[&["p"], &save[..]].concat());
        let said = lab.refuses(&["run", "q", "--resume", "c"], 2, "resume");
        assert!(said.contains("the checkpoint has no exp_avg of "), "{said}");
        assert!(said.contains("--optim-resume init"), "{said}");
        let at = "c/step-00000001";
        let way = format!("shardc reshard {at} --to hf -o DIR, then shardc run PLAN --weights DIR");
        assert!(said.contains(&way), "{said}");
        lab.ok(&["reshard", at, "--to", "hf", "-o", "model"]);
        run(&lab, &["q", "--weights", "model", "--steps", "1"]);
        for dir in ["c", "model"] {
            std::fs::remove_dir_all(lab.path(dir)).expect("a folder");
        }
    }
    // A checkpoint of adapters has none but theirs.
    let base = format!("{FIXTURES}/llama_mha");
    plan(&lab, "llama_mha", "p", &["--lora", "r=1"]);
    plan(&lab, "llama_mha", "q", &["--lora", "r=1", "--optimizer", "sgd"]);
    run(&lab, &[&["p", "--weights", &base], &save[..]].concat());
    let said = lab.refuses(&["run", "q", "--weights", &base, "--resume", "c"], 2, "resume");
    assert!(
        said.contains(
            "--to peft -o adapter, then shardc run PLAN --weights BASE --adapter adapter"
        ),
        "{said}"
    );
    lab.ok(&["reshard", "c", "--to", "peft", "-o", "adapter"]);
    run(&lab, &["q", "--weights", &base, "--adapter", "adapter", "--steps", "1"]);
}

/// With `--optim-resume init` states that a checkpoint and a plan both have go on, others begin or are left behind, each
/// of them told. Where all begin the run is one that begins with the weights; and it goes on from its own checkpoints.
#[test]
fn states_of_another_optimizer_begin() {
    let lab = Lab::new("told-states");
    batch(&lab, "b.safetensors", Some(|i| (i * 7 % 50) as i64));
    let rules: [(&str, &[&str]); 4] = [
        ("adamw", &[]),
        ("muon", &["--optimizer", "muon"]),
        ("lion", &["--optimizer", "lion"]),
        ("sgd", &["--optimizer", "sgd"]),
    ];
    let steps = |args: &[&str]| {
        let [out, said] = run(&lab, &[args, &["--batch", "b.safetensors"]].concat());
        let loss = |l: &str| Some(l.split_once("loss ")?.1.split_whitespace().next()?.to_string());
        (out.lines().filter_map(loss).collect::<Vec<String>>(), said)
    };
    for (name, flags) in rules {
        plan(&lab, "llama_mha", name, &[&["--mesh", "dp_shard=2", "--zero", "1"], flags].concat());
        steps(&[name, "--steps", "2", "--save", &format!("c-{name}"), "--save-every", "2"]);
    }
    for (from, to, said, all_begin) in [
        ("adamw", "muon", &["no momentum_buffer of ", "the plan has no exp_avg of "][..], false),
        (
            "muon",
            "adamw",
            &["no exp_avg of ", "begins anew with them", "plan has no momentum_"],
            true,
        ),
        ("adamw", "lion", &["the plan has no exp_avg_sq of "], false),
        ("sgd", "adamw", &["checkpoint has no exp_avg of ", "no exp_avg_sq of "], true),
        ("lion", "sgd", &["the plan has no exp_avg of "], true),
    ] {
        let at = format!("c-{from}/step-00000002");
        let on = [to, "--resume", &at, "--optim-resume", "init"];
        let (losses, told) = steps(&[&on[..], &["--steps", "4"]].concat());
        assert!(said.iter().all(|said| told.contains(said)), "{from} to {to}: {told}");
        assert_eq!(losses.len(), 2, "{from} to {to}");
        let refused = lab.refuses(&["run", to, "--steps", "4", "--resume", &at], 2, "resume");
        assert!(refused.contains(said[0]), "{refused}");
        // Stopped on the way, it goes on without a word.
        let part = ["--steps", "3", "--save", "half", "--save-every", "1"];
        let (first, _) = steps(&[&on[..], &part].concat());
        let (second, told) = steps(&[to, "--resume", "half", "--steps", "4"]);
        assert_eq!([first, second].concat(), losses, "{from} to {to}");
        assert!(!told.contains("[resume]"), "{told}");
        if all_begin {
            lab.ok(&["reshard", &at, "--to", "hf", "-o", "model"]);
            assert_eq!(
                steps(&[to, "--weights", "model", "--steps", "2"]).0,
                losses,
                "{from} to {to}"
            );
            std::fs::remove_dir_all(lab.path("model")).expect("a folder");
        }
        std::fs::remove_dir_all(lab.path("half")).expect("a folder");
    }
}

/// A tied tensor by its other name: the message names the one that it is.
#[test]
fn a_tied_tensor_has_one_name() {
    let lab = Lab::new("told-tied");
    let gemma = format!("{FIXTURES}/gemma2");
    let archive = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imports/gemma2.pt2");
    for (model, flags) in [
        (&*gemma, &["--freeze", "lm_head.weight"][..]),
        (&*gemma, &["--mesh", "tp=2", "--shard", "lm_head.*=tp,-"]),
        (archive, &["--freeze", "lm_head.weight"]),
    ] {
        let args = [&["compile", model, "--seq", "16"], flags].concat();
        let said = lab.refuses(&args, 2, "unknown-tensor");
        let why = "`lm_head.weight` is tied to `model.embed_tokens.weight`: they are one parameter";
        assert!(said.contains(why), "{flags:?}: {said}");
        assert!(said.contains("name it so: model.embed_tokens.weight"), "{said}");
    }
    // No tied head is meant here.
    let other = ["compile", &gemma, "--seq", "16", "--freeze", "lm_heed.weight"];
    assert!(!lab.refuses(&other, 2, "unknown-tensor").contains("is tied"));
}
