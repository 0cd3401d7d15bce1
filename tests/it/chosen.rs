//! Exports write layout and facts of the model, and of the settings of training those that somebody chose.

use crate::lab::Lab;
use serde_json::{Value as Json, json};
use shardc::{plan_dir, recompile};

fn text(out: &[u8]) -> String {
    String::from_utf8_lossy(out).into_owned()
}

/// What `export` prints of a plan that is compiled so.
fn exported(lab: &Lab, model: &str, flags: &[&str], to: &[&str]) -> String {
    lab.ok(&[&["compile", model, "--seq", "16", "--prove", "no", "-o", "p"], flags].concat());
    text(&lab.ok(&[&["export", "p", "--to"], to].concat()).stdout)
}

/// The lines that are no comments.
fn said(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|l| !l.starts_with('#')).collect()
}

#[test]
fn megatron_is_told_what_was_chosen() {
    let lab = Lab::new("chosen-megatron");
    let model = lab.model("llama_mha");
    let of = |flags: &[&str], to: &[&str]| exported(&lab, &model, flags, to);
    let training = [
        "--clip-grad",
        "--lr ",
        "--lr-decay-style",
        "--adam-beta1",
        "--adam-beta2",
        "--adam-eps",
        "--weight-decay",
        "--optimizer",
        "--seed",
    ];
    let plain = of(&[], &["megatron"]);
    for flag in training {
        assert!(!said(&plain).iter().any(|l| l.starts_with(flag)), "{flag}: {plain}");
    }
    for line in [
        "# plan: no clipping; Megatron-LM's default: --clip-grad 1.0",
        "# plan: learning rate 0.001; Megatron-LM's default: none: --lr is yours to give",
        "# plan: weight decay 0.01 of matrices; Megatron-LM's default: --weight-decay 0.01, of matrices",
    ] {
        assert!(plain.lines().any(|l| l == line), "{line}: {plain}");
    }
    assert!(said(&plain).contains(&"--tensor-model-parallel-size 1"), "{plain}");
    // What is given is written, a default too.
    let given = ["--clip", "0.5", "--lr", "1e-3", "--betas", "0.9,0.999", "--weight-decay", "0"];
    let given = of(&given, &["megatron"]);
    for line in ["--clip-grad 0.5", "--lr 0.001", "--adam-beta2 0.999", "--weight-decay 0"] {
        assert!(said(&given).contains(&line), "{line}: {given}");
    }
    assert!(!said(&given).iter().any(|l| l.starts_with("--adam-eps")), "{given}");
    let exact = of(&["--decay", "matrices"], &["megatron", "--exact"]);
    for line in
        ["--clip-grad 0", "--lr 0.001", "--adam-eps 0.00000001", "--lr-decay-style constant"]
    {
        assert!(said(&exact).contains(&line), "{line}: {exact}");
    }
    // What it exempts from decay matters if somebody chose to decay, or all is written.
    lab.ok(&["compile", &model, "--seq", "16", "--decay", "all", "--prove", "no", "-o", "p"]);
    lab.refuses(&["export", "p", "--to", "megatron", "--exact"], 4, "export");
}

#[test]
fn others_are_told_what_was_chosen() {
    let lab = Lab::new("chosen-others");
    let model = lab.model("llama_mha");
    let of = |flags: &[&str], to: &[&str]| exported(&lab, &model, flags, to);
    let clip = "config.training.max_norm";
    let module = of(&[], &["torchtitan"]);
    assert!(!module.contains(clip), "{module}");
    assert!(
        module.contains("    # plan: no clipping; torchtitan's default: max_norm 1.0\n"),
        "{module}"
    );
    let module = of(&["--clip", "1", "--lr", "0.1"], &["torchtitan"]);
    assert!(module.contains(&format!("{clip} = 1\n")), "{module}");
    // What its own config has to say is there with the plan's values: what was given, and the rest.
    assert!(module.contains("# plan (given, and not written): --lr 0.1; here the"), "{module}");
    let rest = module.lines().find(|l| l.contains("# plan (not given): ")).expect("the rest");
    for flag in ["--optimizer adamw", "--betas 0.9,0.999", "--weight-decay 0.01", "--seed 0"] {
        assert!(rest.contains(flag) && !rest.contains("--lr 0"), "{rest}");
    }
    assert!(of(&[], &["torchtitan", "--exact"]).contains(&format!("{clip} = float(\"inf\")\n")));
    let config = |text: String| serde_json::from_str::<Json>(&text).expect("JSON");
    let own = config(of(&[], &["deepspeed"]));
    assert!(own.get("optimizer").is_none() && own.get("gradient_clipping").is_none(), "{own}");
    let told = text(&lab.ok(&["export", "p", "--to", "deepspeed"]).stderr);
    assert!(told.contains("plan: no clipping; DeepSpeed's default:"), "{told}");
    let given = config(of(&["--lr", "0.1", "--clip", "2"], &["deepspeed"]));
    assert_eq!(given["optimizer"], json!({ "type": "AdamW", "params": { "lr": 0.1 } }));
    assert_eq!(given["gradient_clipping"], 2.0);
    let exact = config(of(&["--decay", "all"], &["deepspeed", "--exact"]));
    assert_eq!(exact["gradient_clipping"], 0.0);
    assert_eq!(exact["optimizer"]["params"]["betas"], json!([0.9, 0.999]));
    // It has no defaults: all is written, and what nobody chose is named.
    let yaml = of(&["--lr", "0.1"], &["nanotron"]);
    assert!(yaml.contains("# plan: no clipping, which nobody chose; nanotron"), "{yaml}");
    assert!(!yaml.contains("# plan: learning_rate") && yaml.contains("clip_grad: null"), "{yaml}");
    assert!(!said(&yaml).join("\n").contains("seed"), "{yaml}");
}

/// A recompilation keeps what was given; a plan that does not say it has chosen what is no default.
#[test]
fn what_was_given_stays_given() {
    let lab = Lab::new("chosen-kept");
    let model = lab.model("llama_mha");
    let toml = format!("model = \"{model}\"\nlr = 1e-3\n");
    lab.write("shardc.toml", toml);
    lab.ok(&["compile", "shardc.toml", "--seq", "16", "--clip", "2", "-o", "p"]);
    let stored = plan_dir::read(&lab.path("p")).expect("a plan");
    assert_eq!(stored.options.given, ["clip", "lr", "seq"]);
    let again = recompile(&stored, &stored.options).expect("compiles").stored;
    assert_eq!(again.options.given, stored.options.given);
    // It is nothing that ranks run by.
    lab.ok(&["compile", &model, "--seq", "16", "--clip", "2", "-o", "q"]);
    let other = plan_dir::read(&lab.path("q")).expect("a plan");
    assert_eq!((other.options.given.len(), other.hash()), (2, stored.hash()));
    let diff = text(&lab.ok(&["diff", "p", "q"]).stdout);
    assert!(!diff.contains("given"), "{diff}");
    let mut old = stored;
    old.options.given.clear();
    plan_dir::write(&lab.path("old"), &old).expect("written");
    let options = std::fs::read_to_string(lab.path("old/options.toml")).expect("options");
    assert!(!options.contains("given"), "{options}");
    let flags = text(&lab.ok(&["export", "old", "--to", "megatron"]).stdout);
    assert!(said(&flags).contains(&"--clip-grad 2"), "{flags}");
    assert!(!said(&flags).iter().any(|l| l.starts_with("--lr ")), "{flags}");
}

/// Layouts and words that the targets themselves understand.
#[test]
fn words_are_those_of_the_targets() {
    let lab = Lab::new("chosen-words");
    let model = lab.model("qwen3");
    let cp = ["--mesh", "cp=2", "--cp-split", "zigzag", "--decay", "matrices"];
    let flags = exported(&lab, &model, &cp, &["megatron"]);
    assert!(said(&flags).contains(&"--cp-comm-type all_gather"), "{flags}");
    let experts = lab.model("mixtral");
    let graphs = |mesh: &str| {
        let flags = ["--mesh", mesh, "--zero", "3"];
        exported(&lab, &experts, &flags, &["torchtitan"]).contains("disable_cuda_graphs = True")
    };
    assert!(graphs("dp=2,ep=2"));
    assert!(!graphs("dp=2"));
}
