//! Small things of the command line: what is refused, what is meant, what a machine has.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};
use std::os::unix::fs::PermissionsExt;

fn text(out: &[u8]) -> String {
    String::from_utf8_lossy(out).into_owned()
}

#[test]
fn a_plan_is_no_model() {
    let lab = Lab::new("commands-plan");
    let model = format!("{FIXTURES}/gpt2");
    lab.ok(&["compile", &model, "--seq", "16", "-o", "some.plan"]);
    for args in [&["compile", "some.plan", "--seq", "16"][..], &["check", "some.plan"]] {
        let said = lab.refuses(args, 2, "plan");
        assert!(
            said.contains("some.plan/model.ir") && said.contains("inspect some.plan"),
            "{said}"
        );
    }
    // Its text is one.
    lab.ok(&["compile", "some.plan/model.ir", "-o", "again.plan"]);
}

#[test]
fn axes_of_other_programs_are_told() {
    let lab = Lab::new("commands-axes");
    let model = format!("{FIXTURES}/gpt2");
    for (axis, own) in [("fsdp", "dp_shard=2 --zero 3"), ("ddp", "dp=2"), ("dp_shrd", "dp_shard=2")]
    {
        let mesh = ["--seq", "16", "--mesh", &format!("{axis}=2")];
        for command in ["compile", "check"] {
            let said = lab.refuses(&[&[command, &model][..], &mesh].concat(), 2, "mesh");
            assert!(said.contains(&format!("did you mean --mesh {own}?")), "{axis}: {said}");
        }
        // Whoever says what it splits may call it so.
        let shard = format!("*.mlp.c_fc.weight=-,{axis}");
        lab.ok(&[&["compile", &model, "--shard", &shard][..], &mesh].concat());
    }
    let out = lab.ok(&["compile", &model, "--seq", "16", "--mesh", "zebra=2"]);
    assert!(!text(&out.stderr).contains("did you mean"), "{}", text(&out.stderr));
}

#[test]
fn all_ranks_that_are_asked_for_are_shown() {
    let lab = Lab::new("commands-ranks");
    let model = format!("{FIXTURES}/llama_deep");
    let size = ["--seq", "16", "--global-batch", "100", "--microbatch", "1"];
    lab.ok(&[&["compile", &model, "--mesh", "dp=100", "-o", "plan"][..], &size].concat());
    let rows = |asked: &str| {
        let out = lab.ok(&["inspect", "plan", asked, "--format", "json"]);
        let json: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        let ranks = json["shown"].as_array().expect("ranks").iter();
        ranks.filter_map(|r| r["rank"].as_u64()).collect::<Vec<_>>()
    };
    // Groups are said once: of all 100 ranks one over dp, and not one for each rank.
    let all = lab.ok(&["inspect", "plan", "--ranks=all", "--format", "json"]).stdout;
    let all: Json = serde_json::from_slice(&all).expect("JSON");
    assert_eq!(all["groups"]["dp_replicate"], json!([(0..100).collect::<Vec<_>>()]));
    assert_eq!(all["shown"][99]["groups"]["dp_replicate"], 0);
    assert_eq!(rows("--ranks"), (0..64).collect::<Vec<_>>());
    assert_eq!(rows("--ranks=all"), (0..100).collect::<Vec<_>>());
    assert_eq!(rows("--ranks=62-99"), (62..100).collect::<Vec<_>>());
    assert_eq!(rows("--ranks=7"), [7]);
    let shown = text(&lab.ok(&["inspect", "plan", "--ranks"]).stdout);
    assert!(shown.contains("… 36 more: --ranks=all"), "{shown}");
    for bad in ["--ranks=100", "--ranks=5-2", "--ranks=0-100", "--ranks=-", "--ranks=x"] {
        let said = lab.refuses(&["inspect", "plan", bad], 2, "unknown-rank");
        assert!(said.contains("0 to 99"), "{said}");
    }
}

#[test]
fn the_version_and_what_the_machine_has() {
    let lab = Lab::new("commands-doctor");
    let version = text(&lab.ok(&["--version"]).stdout);
    assert!(version.starts_with("shardc 0.") && version.contains("features"), "{version}");
    let short = text(&lab.ok(&["-V"]).stdout);
    assert!(version.starts_with(short.trim()) && short.len() < version.len(), "{short}");
    let json: Json =
        serde_json::from_slice(&lab.ok(&["doctor", "--format", "json"]).stdout).expect("JSON");
    let all = json["found"].as_array().expect("a list");
    let names: Vec<&str> = all.iter().filter_map(|f| f["name"].as_str()).collect();
    let launchers = ["srun", "mpirun", "torchrun"];
    let want = ["processor", "C compiler", "CUDA driver", "NVRTC", "NCCL", "MPI"];
    let rest = ["kernel cache", "model cache", "tokenizers"];
    assert_eq!(names, [&want[..], &launchers, &rest].concat());
    // A cache says what it holds.
    lab.write("cache/kernels.so", [0; 2048]);
    let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
    let c = c
        .arg("doctor")
        .env("SHARDC_CACHE", lab.path("cache"))
        .env("HF_HUB_CACHE", lab.path("none"));
    let said = text(&c.output().expect("shardc starts").stdout);
    assert!(said.contains("/cache: 1 entry, 2.00 KiB"), "{said}");
    assert!(said.contains("/none does not exist"), "{said}");
    assert!(all.iter().all(|f| f["found"].is_string() != f["missing"].is_string()), "{json}");
    let of = |name: &str| all.iter().find(|f| f["name"] == name).expect("it is listed");
    assert_eq!(of("tokenizers")["found"].is_string(), cfg!(feature = "tokenizers"));
    let said = text(&lab.ok(&["doctor"]).stdout);
    assert!(names.iter().all(|n| said.contains(n)), "{said}");
    // A compiler that is not there is not here, and what to do is told.
    let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
    let out = c.arg("doctor").env("CC", "no-such-compiler").output().expect("shardc starts");
    let said = text(&out.stdout);
    // MPI says whose it is; a launcher is the first on the path that can be started.
    let mpi = of("MPI")["found"].as_str().unwrap_or_default();
    assert_eq!(
        mpi.contains("MPI") && mpi.contains(|c: char| c.is_ascii_digit()),
        cfg!(feature = "mpi"),
        "{mpi}"
    );
    for (mode, found) in [(0o644, false), (0o755, true)] {
        lab.write("bin/torchrun", "");
        let file = lab.path("bin/torchrun");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).expect("a mode");
        let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
        let c = c.args(["doctor", "--format", "json"]).env("PATH", lab.path("bin"));
        let json: Json = serde_json::from_slice(&c.output().expect("starts").stdout).expect("JSON");
        let all = json["found"].as_array().expect("a list");
        let one = all.iter().find(|f| f["name"] == "torchrun").expect("it is listed");
        assert_eq!(one["found"].as_str(), found.then(|| file.to_str().expect("a path")));
        assert!(all.iter().any(|f| f["name"] == "srun" && f["found"].is_null()));
    }
    assert!(said.contains("`no-such-compiler` does not start; install"), "{said}");
}

/// Without --seq a sequence is no longer than the model's; one that is asked for may be refused.
#[test]
fn the_default_sequence_is_one_that_the_model_has() {
    let lab = Lab::new("commands-seq");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny-moe");
    let said = text(&lab.ok(&["compile", model]).stdout);
    assert!(said.contains("8 sequences of 128 tokens in 1 microbatch"), "{said}");
    assert!(text(&lab.ok(&["check", model]).stdout).contains("ok: "));
    let out = lab.shardc(&["check", model, "--seq", "129"]);
    let said = text(&out.stdout);
    assert!(out.status.code() == Some(1) && said.contains("sequence-too-long"), "{said}");
    let one = ["compile", model, "--seq", "1", "--global-batch", "1"];
    let said = text(&lab.ok(&one).stdout);
    assert!(said.contains("1 sequence of 1 token in 1 microbatch"), "{said}");
}

/// A plan that replaces another one says so, and one that replaces itself does not; scales have all their digits.
#[test]
fn what_a_plan_replaces_is_told() {
    let lab = Lab::new("commands-replaced");
    lab.model("llama_mha");
    let compile = ["compile", "llama_mha", "--seq", "16", "--dtype", "f16", "-o", "plan"];
    let said = |more: &[&str]| text(&lab.ok(&[&compile[..], more].concat()).stderr);
    for (more, replaces) in [(&[][..], false), (&[][..], false), (&["--mesh", "tp=2"][..], true)] {
        let said = said(more);
        let told =
            said.contains("replaced the plan of ") && said.contains("llama_mha that was in plan");
        assert_eq!(told, replaces, "{said}");
    }
    for file in ["plan/options.toml", "plan/plan.json"] {
        let text = std::fs::read_to_string(lab.path(file)).expect("a file");
        assert!(text.contains("4294967296.0") && !text.contains("42949673"), "{file}: {text}");
    }
    // As they were written before.
    let mut old = shardc::plan_dir::options(&lab.path("plan")).expect("options");
    let text = toml::to_string(&old).expect("text").replace("4294967296.0", "4294967300.0");
    old.seed = 7;
    let read: shardc_passes::options::Options = toml::from_str(&text).expect("options");
    assert_eq!(read.loss_scaling, old.loss_scaling);
}

/// Names of folded layers are taken as `inspect` prints them; memory is that of a machine, too.
#[test]
fn names_are_taken_as_they_are_printed() {
    let lab = Lab::new("as-printed");
    lab.model("llama_mha");
    let compile = ["compile", "llama_mha", "--seq", "16", "--mesh", "dp=2", "-o", "plan"];
    lab.ok(&[&compile[..], &["--memory", "H100-SXM"]].concat());
    let of = |name: &str| text(&lab.ok(&["explain", "plan", name]).stdout);
    // A name of all layers says of which the answer is.
    let folded = |name: &str| of(name).replace(" (layer 0 of 2, the same in all)", "");
    assert!(of("%l{i}.q_proj").contains("(layer 0 of 2, the same in all)"));
    assert_eq!(folded("%l{i}.q_proj"), of("%l0.q_proj"));
    assert_eq!(folded("@forward %l{i-1}.q_proj"), of("@forward %l0.q_proj"));
    for (args, code) in [
        (&["explain", "plan", "%l{i}.no_such"][..], "unknown-value"),
        (&["explain", "plan", "%l{i9223372036854775807}.q_proj"], "unknown-value"),
        (&["explain", "plan", "%l{i"], "unknown-value"),
        (&["compile", "llama_mha", "--memory", "h100-smx"], "device"),
    ] {
        lab.refuses(args, 2, code);
    }
}

/// What a job needs stands in its script: data, weights until there is a checkpoint, steps, cores, time; and a shell reads it.
#[test]
fn scripts_carry_what_a_job_needs() {
    let lab = Lab::new("scripts");
    let model = format!("{FIXTURES}/llama_mha");
    let compile = ["compile", &model, "--seq", "16", "--mesh", "tp=2", "-o"];
    lab.ok(&[&compile[..], &["p"]].concat());
    lab.ok(&[&compile[..], &["m", "--transport", "mpi"]].concat());
    let asked = [
        "--data",
        "bytes:it's/*.md",
        "--weights",
        "my model",
        "--steps",
        "7",
        "--cpus-per-task",
        "2",
    ];
    let script = |plan: &str, launcher: &str, more: &[&str]| {
        let print = ["launch-script", plan, "--for", launcher];
        String::from_utf8(lab.ok(&[&print[..], &asked, more].concat()).stdout).expect("text")
    };
    for (launcher, more, words) in [
        (
            "slurm",
            &["--time", "1-02:30"][..],
            &[
                "#SBATCH --cpus-per-task=2\n",
                "#SBATCH --time=1-02:30\n",
                "srun --kill-on-bad-exit=1 --mpi=pmix --cpus-per-task=2 ",
            ][..],
        ),
        (
            "slurm",
            &["--engine", "torch"],
            &[
                "#SBATCH --ntasks-per-node=1\n",
                "SLURM_JOB_ID % 6000 * 2",
                "'p' --engine torch --data",
            ],
        ),
        ("mpirun", &[], &["--map-by slot:PE=2 "]),
        ("torchrun", &[], &["--threads 2 "]),
        ("k8s", &[], &["cpu: 4}"]),
    ] {
        let text = script("p", launcher, more);
        for w in [&["DATA=${DATA:-'bytes:it'\\''s/*.md'} STEPS=${STEPS:-7} WEIGHTS=${WEIGHTS:-'my model'}", "--data \"$DATA\" --steps \"$STEPS\"", "--weights \"$WEIGHTS\""][..], words]
            .concat()
        {
            assert!(text.contains(w), "{launcher}: no `{w}` in {text}");
        }
        if launcher != "k8s" {
            std::fs::write(lab.path("job"), &text).expect("written");
            let read =
                std::process::Command::new("bash").args(["-n", "job"]).current_dir(&lab.0).status();
            assert!(read.expect("bash").success(), "{launcher}: {text}");
        }
    }
    let alone =
        String::from_utf8(lab.ok(&["launch-script", "p", "--for", "slurm"]).stdout).expect("text");
    assert!(
        !alone.contains("--time=")
            && !alone.contains("--cpus-per-task")
            && !alone.contains("--weights")
    );
    lab.refuses(&["launch-script", "p", "--for", "mpirun", "--time", "30"], 2, "flag");
    lab.refuses(&["launch-script", "m", "--for", "torchrun"], 2, "flag");
    lab.refuses(&["launch-script", "p", "--for", "mpirun", "--engine", "torch"], 2, "flag");
    // As many processes on each node, by all launchers.
    let model = format!("{FIXTURES}/gpt2");
    let six = ["--seq", "16", "--mesh", "dp=6", "--global-batch", "6", "--node", "4", "-o", "six"];
    lab.ok(&[&["compile", &model][..], &six].concat());
    for launcher in ["slurm", "mpirun", "torchrun", "k8s"] {
        let said = lab.refuses(&["launch-script", "six", "--for", launcher], 2, "flag");
        assert!(said.contains("--node 3"), "{launcher}: {said}");
    }
    for time in ["", "1:2:3:4", "-1", "1 h", "1-"] {
        let refused =
            lab.shardc(&["launch-script", "p", "--for", "slurm", &format!("--time={time}")]);
        assert_eq!(refused.status.code(), Some(2), "{time}");
    }
}

/// A slash at the end of a path, a picture without its text, and a plan that is called as a flag.
#[test]
fn paths_and_flags_are_taken_as_they_are_meant() {
    let lab = Lab::new("meant");
    let model = lab.model("llama_mha");
    let said = lab.refuses(&["verify", &format!("{model}/")], 2, "plan");
    assert!(said.contains("shardc compile llama_mha -o llama_mha.plan\n"), "{said}");
    let build = ["compile", &model, "--seq", "16", "--mesh", "pp=2", "--prove", "no", "-o"];
    lab.ok(&[&build[..], &["p"]].concat());
    let said = lab.refuses(&["compile", "p/"], 2, "plan");
    assert!(said.contains(": p/model.ir"), "{said}");
    let drawn = text(&lab.ok(&["inspect", "p", "--timeline", "--svg", "a.svg"]).stdout);
    assert_eq!(text(&lab.ok(&["inspect", "p", "--svg", "b.svg"]).stdout), drawn);
    let [a, b] = ["a.svg", "b.svg"].map(|f| std::fs::read(lab.path(f)).expect("a picture"));
    assert!(a == b && a.starts_with(b"<svg"));
    // Where a script names it, it is a path.
    std::fs::rename(lab.path("p"), lab.path("--force")).expect("renamed");
    for launcher in ["slurm", "mpirun", "torchrun", "k8s"] {
        let script = ["launch-script", "--for", launcher, "--weights=--w", "--", "--force"];
        let script = text(&lab.ok(&script).stdout);
        assert!(script.contains("shardc run './--force' "), "{launcher}: {script}");
        assert!(script.contains("{WEIGHTS:-'./--w'}"), "{launcher}: {script}");
    }
}
