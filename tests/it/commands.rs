//! Small things of the command line: what is refused, what is meant, what a machine has.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;

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
        let out = lab.ok(&["compile", &model, "--seq", "16", "--mesh", &format!("{axis}=2")]);
        let said = text(&out.stderr);
        assert!(said.contains(&format!("did you mean --mesh {own}?")), "{axis}: {said}");
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
    assert_eq!(names, ["C compiler", "CUDA driver", "NVRTC", "NCCL", "MPI", "tokenizers"]);
    assert!(all.iter().all(|f| f["found"].is_string() != f["missing"].is_string()), "{json}");
    let of = |name: &str| all.iter().find(|f| f["name"] == name).expect("it is listed");
    assert_eq!(of("tokenizers")["found"].is_string(), cfg!(feature = "tokenizers"));
    let said = text(&lab.ok(&["doctor"]).stdout);
    assert!(names.iter().all(|n| said.contains(n)), "{said}");
    // A compiler that is not there is not here, and what to do is told.
    let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
    let out = c.arg("doctor").env("CC", "no-such-compiler").output().expect("shardc starts");
    let said = text(&out.stdout);
    assert!(said.contains("`no-such-compiler` does not start; install"), "{said}");
}

/// Names of folded layers are taken as `inspect` prints them; memory is that of a machine, too.
#[test]
fn names_are_taken_as_they_are_printed() {
    let lab = Lab::new("as-printed");
    lab.model("llama_mha");
    let compile = ["compile", "llama_mha", "--seq", "16", "--mesh", "dp=2", "-o", "plan"];
    lab.ok(&[&compile[..], &["--memory", "H100-SXM"]].concat());
    let of = |name: &str| text(&lab.ok(&["explain", "plan", name]).stdout);
    assert_eq!(of("%l{i}.q_proj"), of("%l0.q_proj"));
    assert_eq!(of("@forward %l{i-1}.q_proj"), of("@forward %l0.q_proj"));
    for (args, code) in [
        (&["explain", "plan", "%l{i}.no_such"][..], "unknown-value"),
        (&["explain", "plan", "%l{i9223372036854775807}.q_proj"], "unknown-value"),
        (&["explain", "plan", "%l{i"], "unknown-value"),
        (&["compile", "llama_mha", "--memory", "h100-smx"], "device"),
    ] {
        lab.refuses(args, 2, code);
    }
}
