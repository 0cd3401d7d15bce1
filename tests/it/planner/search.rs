//! What a search finds, with which budget, and how it ends.

use super::{lab, planned};
use crate::lab::Lab;
use serde_json::Value as Json;
use shardc_testing::samples;

/// What a number that is fixed finds, is found without it: no line that is shown leaves out a faster one of another
/// stage of ZeRO, whatever formulas say of their order.
#[test]
fn fixed_numbers_find_nothing_faster() {
    let lab = Lab::new("fixed-zero");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let best = |more: &[&str]| {
        let all =
            ["plan", model, "--gpus", "16", "--machine", "h100-sxm", "--seq", "8192", "--format"];
        let job = ["json", "--global-batch", "64", "--memory", "72GiB"];
        let out = lab.ok(&[&all[..], &job, more].concat());
        let found: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        found["plans"][0]["step_s"].as_f64().unwrap_or_else(|| panic!("{found}"))
    };
    let [one, three] = [best(&["--top", "1"]), best(&["--top", "3"])];
    assert!(three <= 1.01 * one);
    // Every run takes the last.
    for zero in ["zero=3", "zero=2", "zero=1"].into_iter().take(samples(1, 3) as usize) {
        let fixed = best(&["--top", "3", "--fix", zero]);
        assert!(three <= 1.01 * fixed, "{zero}: {fixed} s, without it {three} s");
    }
}

/// A family of layouts that is faster than its formula is found, on slow networks, where formulas say otherwise; and so is
/// the split of tokens over cp that balances causal attention.
#[test]
fn no_family_is_faster_than_the_first_line() {
    let lab = Lab::new("families-of-layouts");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let best = |job: &[&str], more: &[&str]| {
        let all = ["plan", model, "--machine", "h100-sxm", "--format", "json", "--top", "1"];
        let out = lab.ok(&[&all[..], job, more].concat());
        let found: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        found["plans"][0]["step_s"].as_f64().unwrap_or_else(|| panic!("{found}"))
    };
    let of = |nic: &'static str| {
        ["--gpus", "64", "--global-batch", "128", "--seq", "8192", "--what-if", nic]
    };
    let long = ["--gpus", "16", "--global-batch", "16", "--seq", "131072"];
    let jobs: [(&[&str], &[&str]); 3] = [
        (&of("nic=6"), &["tp=1,pp=1,cp=1", "tp=1,cp=1", "pp=1,cp=1"]),
        (&of("nic=12"), &["tp=1,pp=1,cp=1", "tp=1,cp=1", "pp=1,cp=1"]),
        (&long, &["cp=8", "cp=16", "pp=2"]),
    ];
    for (job, families) in jobs.into_iter().take(samples(1, 3) as usize) {
        let first = best(job, &["--budget", "12"]);
        for fix in families.iter().take(samples(1, 3) as usize) {
            let fixed = best(job, &["--fix", fix, "--budget", "12"]);
            assert!(first <= 1.03 * fixed, "{job:?} {fix}: {fixed} s, without it {first} s");
        }
    }
    // Zigzag is what is compiled of gathered attention, unless the other split is asked for.
    let gathered = ["--fix", "cp=8", "--budget", "8", "--cp-mode", "all-gather"];
    let split = best(&long, &[&gathered[..], &["--cp-split", "contiguous"]].concat());
    let zigzag = best(&long, &gathered);
    assert!(zigzag < 0.95 * split, "{zigzag} {split}");
}

/// Equal questions have equal tables, a budget is the number of layouts that are compiled, and a search that has no time
/// says behind which one it ended.
#[test]
fn a_search_has_a_budget() {
    let lab = lab("plan-budget", "llama_deep");
    let job = ["--gpus", "4", "--global-batch", "64", "--seq", "16", "--top", "20"];
    let few = planned(&lab, &[&job[..], &["--budget", "7"]].concat());
    let tried =
        few["compiled"].as_u64().expect("a count") + few["refused"].as_u64().expect("a count");
    assert!((7..=8).contains(&tried), "{few}");
    assert_eq!(few, planned(&lab, &[&job[..], &["--budget", "7"]].concat()));
    lab.refuses(
        &[&["plan", "m", "--machine", "h100-sxm", "--budget", "0"], &job[..]].concat(),
        2,
        "flag",
    );
    let first = |found: &Json| found["plans"][0]["step_s"].as_f64().expect("seconds");
    let many = planned(&lab, &[&job[..], &["--budget", "70"]].concat());
    assert!(first(&many) <= 1.01 * first(&few));
    let said = lab.ok(&[
        &["plan", "m", "--machine", "h100-sxm"],
        &job[..],
        &["--for-seconds", "1"],
        &["--budget", "5000"],
    ]
    .concat());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("--for-seconds ended the search behind layout "), "{said}");
    // Nothing is compiled where what no layout can do without is more than there is.
    let tight = [&job[..], &["--memory", "1KiB"]].concat();
    let said = lab.refuses(
        &[&["plan", "m", "--machine", "h100-sxm"], &tight[..]].concat(),
        3,
        "no-layout",
    );
    assert!(said.contains("alone need more in every layout"), "{said}");
}

/// Without a batch and a sequence, those of a job that somebody has.
#[test]
fn a_job_is_planned_by_default() {
    let lab = Lab::new("plan-defaults");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    for (gpus, job) in
        [("8", "128 sequences of 8192 tokens"), ("96", "96 sequences of 8192 tokens")]
    {
        let args = [
            "plan",
            model,
            "--gpus",
            gpus,
            "--machine",
            "H100-80GB",
            "--top",
            "1",
            "--budget",
            "6",
        ];
        let said = lab.ok(&args).stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        let first = format!("a step: {job}, in bf16 (default --global-batch, --seq)\n\n ");
        assert!(said.starts_with(&first) && said.matches("a step: ").count() == 1, "{said}");
    }
    let few = ["plan", model, "--gpus", "8", "--machine", "h100", "--top", "1", "--budget", "6"];
    let of = |more: &[&str]| {
        String::from_utf8_lossy(&lab.ok(&[&few[..], more].concat()).stdout).into_owned()
    };
    let some = of(&["--seq", "4096"]);
    let first = "a step: 256 sequences of 4096 tokens, in bf16 (default --global-batch)\n\n ";
    assert!(some.starts_with(first), "{some}");
    // What was asked for is below.
    let all = of(&["--seq", "4096", "--global-batch", "64"]);
    let last = all.find("\na step: 64 sequences of 4096 tokens, in bf16\n");
    assert!(last.is_some_and(|at| at > all.find(" 1*").expect("a line")), "{all}");
    let more =
        ["--gpus", "64", "--machine", "h100", "--what-if", "ib=12,nvlink=300", "--budget", "6"];
    let said = lab.ok(&[&["plan", model], &more[..]].concat()).stdout;
    let said = String::from_utf8_lossy(&said).replace("\n  ", " ");
    assert!(said.contains("ib=12 GB/s, nvlink=300 GB/s"), "{said}");
}

/// What is not trained has no gradients and no optimizer's state, which formulas know, too: an adapter of 8B fits where the
/// whole model does not.
#[test]
fn what_is_frozen_needs_no_state() {
    let lab = Lab::new("plan-frozen");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let args =
        ["plan", model, "--gpus", "1", "--machine", "h100", "--global-batch", "4", "--seq", "4096"];
    let few = ["--top", "1", "--budget", "6"];
    lab.refuses(&[&args[..], &few].concat(), 3, "no-layout");
    let found = lab.ok(&[&args[..], &few, &["--lora", "r=16", "--format", "json"]].concat()).stdout;
    let found: Json = serde_json::from_slice(&found).expect("JSON");
    assert!(found["plans"][0]["peak_bytes"].as_u64() < Some(79 << 30), "{found}");
}

/// The first signal ends a search with what was found by then, be it that of narrower gradients, its last part.
#[test]
fn a_signal_ends_a_search_with_its_table() {
    let long = ["--gpus", "64", "--machine", "h100", "--budget", "4000", "--top", "100"];
    ended(&long, "best so far");
    let tight = ["--gpus", "8", "--machine", "rtx-4090", "--seq", "4096", "--global-batch", "64"];
    ended(&[&tight[..], &["--top", "3"]].concat(), "looking at --grad-dtype bf16");
}

/// Ends a search of 8B by SIGTERM when it has said these words.
fn ended(args: &[&str], when: &str) {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Command, Stdio};
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let mut search = Command::new(env!("CARGO_BIN_EXE_shardc"))
        .args(["plan", model])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut said = BufReader::new(search.stderr.take().expect("a pipe")).lines();
    let best = said.find(|l| l.as_ref().is_ok_and(|l| l.contains(when)));
    assert!(best.is_some(), "{when}: not said");
    let sent = Command::new("kill").args(["-TERM", &search.id().to_string()]).status();
    assert!(sent.expect("kill runs").success());
    std::thread::spawn(move || said.for_each(drop));
    let mut table = String::new();
    search.stdout.take().expect("a pipe").read_to_string(&mut table).expect("text");
    assert_eq!(search.wait().expect("it ends").code(), Some(143), "{table}");
    assert!(table.contains("SIGTERM ended the search behind layout "), "{table}");
}

/// Of plans whose ranks hold as much, one that did not fit tells of the others: they are not compiled, and the budget is for
/// layouts that may fit. (By recomputation and stage of ZeRO alone, seven of these sixteen fit.)
#[test]
fn what_needs_as_much_as_what_did_not_fit_is_not_compiled() {
    let lab = Lab::new("plan-alike");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let args = ["plan", model, "--gpus", "64", "--machine", "h100", "--memory", "16GiB"];
    let job = ["--global-batch", "64", "--seq", "8192", "--budget", "16", "--format", "json"];
    let found = lab.ok(&[&args[..], &job].concat()).stdout;
    let found: Json = serde_json::from_slice(&found).expect("JSON");
    assert_eq!(found["plans"].as_array().map(Vec::len), Some(10), "{found}");
}

/// Half of the budget without a faster plan ends a search in which more may be as fast.
#[test]
fn a_search_that_finds_nothing_faster_ends() {
    let lab = Lab::new("plan-settled");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let args = ["plan", model, "--gpus", "64", "--machine", "h100-sxm", "--seq", "8192"];
    let job = ["--global-batch", "128", "--top", "3", "--budget", "16", "--format", "json"];
    let found: Json =
        serde_json::from_slice(&lab.ok(&[&args[..], &job].concat()).stdout).expect("JSON");
    let number = |name: &str| found[name].as_u64().unwrap_or_else(|| panic!("{found}"));
    let spent = number("compiled") + number("refused");
    // Two are compiled at once.
    assert!((8..=9).contains(&number("since_best")) && spent < 16, "{spent}: {found}");
    assert!(number("put_off") > 0, "{found}");
}

/// Where a machine says how fast our products with an epilogue are, plans are those of `--hardware` of it: the printed
/// command has it, and makes a plan of the same price.
#[test]
fn plans_have_the_hardware_of_their_machine() {
    let lab = Lab::new("plan-machine-hardware");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let json =
        |args: &[&str]| -> Json { serde_json::from_slice(&lab.ok(args).stdout).expect("JSON") };
    let step = |machine: &str| {
        let args = ["plan", model, "--gpus", "16", "--machine", machine, "--fix", "tp=1,pp=1,cp=1"];
        let found =
            json(&[&args[..], &["--budget", "2", "--top", "1", "--format", "json"]].concat());
        (
            found["plans"][0]["step_s"].as_f64().expect("seconds"),
            found["plans"][0]["options"].clone(),
        )
    };
    let (h100, options) = step("h100-sxm");
    assert!(options["hardware"].is_null(), "{options}");
    let (b200, options) = step("b200");
    assert_eq!(options["hardware"], "b200");
    assert!(b200 < 0.9 * h100, "{b200} s, and {h100} s of h100-sxm");
    let mut compile: Vec<String> = ["compile", model, "-o", "b.plan"].map(String::from).to_vec();
    for (name, value) in options.as_object().expect("options") {
        let value = value.as_str().map_or_else(|| value.to_string(), String::from);
        compile.extend([format!("--{name}"), value].into_iter().filter(|w| w != "true"));
    }
    lab.ok(&compile.iter().map(String::as_str).collect::<Vec<_>>());
    let price = json(&["price", "b.plan", "--machine", "b200", "--format", "json"]);
    let own = price["step_s"].as_f64().unwrap_or_else(|| panic!("{price}"));
    assert!((own / b200 - 1.0).abs() < 1e-9, "{own} s, {b200} s");
    // Changed numbers price plans, and the printed command makes the plan that was priced.
    let args = ["plan", model, "--gpus", "16", "--machine", "b200", "--fix", "tp=1,pp=1,cp=1"];
    let if_so = ["--what-if", "hbm=100", "--budget", "2", "--top", "1", "-o", "w.plan"];
    lab.ok(&[&args[..], &if_so].concat());
    let made = |plan: &str| std::fs::read(lab.path(plan).join("programs/all.ir")).expect("read");
    assert!(made("w.plan") == made("b.plan"), "another plan than the command's");
}

/// Where most layouts do not fit, a plan of a tp and pp tells of the others of these: the budget reaches the pipelines that
/// do. (By recomputation, stage of ZeRO and schedule alone, 2 of 40 fitted, and the first line was 31 % slower.)
#[test]
fn a_tight_job_finds_its_pipelines() {
    let lab = Lab::new("plan-tight");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let best = |more: &[&str]| {
        let args = ["plan", model, "--gpus", "8", "--machine", "rtx-4090", "--seq", "4096"];
        let job = ["--global-batch", "64", "--top", "3", "--format", "json"];
        let found = lab.ok(&[&args[..], &job, more].concat()).stdout;
        let found: Json = serde_json::from_slice(&found).expect("JSON");
        let first = found["plans"][0]["step_s"].as_f64();
        (first.unwrap_or_else(|| panic!("{found}")), found["with_narrow_gradients"].clone())
    };
    let (first, narrow) = best(&[]);
    let (fixed, _) = best(&["--fix", "pp=2,tp=4", "--budget", "12"]);
    assert!(first <= 1.01 * fixed, "{first} s, and {fixed} s of a pipeline");
    // With gradients in 16 bits FSDP alone fits, and that is said; of those who ask for them nothing more is.
    assert_eq!(narrow["grad_dtype"], "bf16", "{narrow}");
    let (own, more) = best(&["--grad-dtype", "bf16"]);
    assert!(more.is_null(), "{more}");
    let said = narrow["step_s"].as_f64().expect("seconds");
    assert!(said < 0.75 * first && said <= 1.01 * own, "{said} s, {own} s of its own, {first} s");
}

/// What gradients in 16 bits would save is said of layouts of a target that takes them, and of no other target's.
#[test]
fn narrower_gradients_are_those_that_a_target_takes() {
    let lab = Lab::new("plan-narrower-for");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let found = |to: &str| -> Json {
        let args = ["plan", model, "--gpus", "32", "--machine", "h100-sxm", "--memory", "12GiB"];
        let job = ["--seq", "4096", "--global-batch", "64", "--top", "1", "--budget", "8"];
        let out = lab.ok(&[&args[..], &job, &["--for", to, "--format", "json"]].concat());
        serde_json::from_slice(&out.stdout).expect("JSON")
    };
    let all = found("deepspeed");
    let narrow = &all["with_narrow_gradients"];
    assert_eq!(narrow["grad_dtype"], "bf16", "{all}");
    let seconds = |line: &Json| line["step_s"].as_f64().unwrap_or_else(|| panic!("{all}"));
    assert!(seconds(narrow) < 0.75 * seconds(&all["plans"][0]), "{all}");
    assert!(found("torchtitan")["with_narrow_gradients"].is_null());
}
