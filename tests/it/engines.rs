//! Runs on PyTorch's ranks: `run --engine torch`, `verify --engine torch`, and checkpoints of steps in Python. Each engine
//! goes on from where the other has stopped.

use crate::lab::{FIXTURES, Lab};
use crate::torch::{has_torch, python};
use safetensors::SafeTensors;
use serde_json::Value as Json;
use shardc_testing::{Tool, skip, taken};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(lab: &Lab, args: &[&str]) -> Command {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    c.current_dir(lab.path("")).env("PYTHONPATH", package).env("SHARDC_PYTHON", python());
    c.args(args);
    c
}

fn ran(lab: &Lab, args: &[&str]) -> String {
    let out = command(lab, args).output().expect("shardc starts");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Losses of steps, of evaluations, and gradient norms, as a run prints them.
fn numbers(out: &str) -> Vec<(u64, f64)> {
    let lines = out.lines().map(|l| serde_json::from_str::<Json>(l).expect("JSON"));
    let all = lines.flat_map(|l| {
        let step = l["step"].as_u64().expect("a step");
        ["loss", "grad_norm", "eval_loss"].map(|key| Some((step, l[key].as_f64()?)))
    });
    all.flatten().collect()
}

fn close(what: &str, got: &[(u64, f64)], want: &[(u64, f64)], by: f64) {
    assert_eq!(got.len(), want.len(), "{what}: {got:?}, not {want:?}");
    for ((step, x), (of, y)) in got.iter().zip(want) {
        assert!(step == of && (x - y).abs() <= by * y.abs(), "{what}: {got:?}, not {want:?}");
    }
}

/// A plan: fixture, flags, and by how much losses and norms of six steps may be apart.
type Row = (&'static str, &'static [&'static str], f64);

/// In f32 both engines round sums alone in other ways, which training makes larger. Where activations have 8 or 11 bits,
/// a loss is a mean of those of 128 tokens, and a norm a sum over all parameters.
const ROWS: &[Row] = &[
    ("llama_gqa", &["--mesh", "tp=2", "--sp"], 2e-5),
    ("llama_gqa", &["--mesh", "dp_shard=2", "--zero", "3", "--dtype", "bf16"], 3e-2),
    ("gpt2", &["--mesh", "pp=2", "--microbatch", "1", "--dropout", "0.1"], 2e-5),
    ("qwen3_moe", &["--mesh", "dp=2,ep=2"], 2e-4),
    ("qwen3", &["--mesh", "cp=2", "--dtype", "f16", "--initial-loss-scale", "65536"], 1e-2),
    ("gemma3", &["--mesh", "tp=2", "--lora", "r=4,alpha=8"], 2e-5),
    ("llama_gqa", &["--mesh", "dp=2", "--zero", "1", "--optimizer", "lion"], 2e-5),
    ("llama_gqa", &["--mesh", "tp=2", "--optimizer", "muon", "--muon-dtype", "f32"], 2e-5),
    ("gpt2", &["--mesh", "dp_shard=2", "--zero", "3", "--optimizer", "adafactor"], 2e-5),
    ("phi3", &["--mesh", "pp=2", "--microbatch", "1", "--optimizer", "sgd"], 2e-5),
];

/// Six steps: all by shardc, or two, two by PyTorch from the checkpoint of these, and two more from PyTorch's.
#[test]
fn each_goes_on_from_the_other() {
    if !has_torch() {
        return skip(Tool::Torch, "runs that change the engine");
    }
    for (i, (name, flags, by)) in ROWS.iter().enumerate().filter(|(i, _)| taken(*i, 10)) {
        let lab = Lab::new(&format!("engines-{i}"));
        let model = format!("{FIXTURES}/{name}");
        lab.write("data.txt", include_str!("engines.rs"));
        let base = ["compile", &model, "--seq", "16", "--global-batch", "8", "--lr", "1e-3"];
        lab.ok(&[&base[..], flags, &["-o", "p"]].concat());
        // A file of bytes has tokens up to 255, the model fewer.
        let run = ["run", "p", "--threads", "1", "--format", "json"];
        let with = ["--weights", &model];
        let first = [&run[..], &with].concat();
        let adapters = flags.contains(&"--lora");
        let on = |from| {
            let weights: &[&str] = if adapters { &with } else { &[] };
            [&run[..], &["--resume", from, "--save-every", "2"], weights].concat()
        };
        let all = numbers(&ran(&lab, &[&first[..], &["--steps", "6"]].concat()));
        let saves = ["--save", "a", "--save-every", "2", "--steps", "2"];
        let mut parts = numbers(&ran(&lab, &[&first[..], &saves].concat()));
        let torch = [&on("a")[..], &["--save", "b", "--steps", "4", "--engine", "torch"]].concat();
        parts.extend(numbers(&ran(&lab, &torch)));
        parts.extend(numbers(&ran(
            &lab,
            &[&on("b")[..], &["--save", "c", "--steps", "6"]].concat(),
        )));
        close(&format!("{name} {flags:?}"), &parts, &all, *by);
    }
}

/// Evaluation, metrics, a dump and a saved model are those of a run of shardc's own.
#[test]
fn what_a_run_writes() {
    if !has_torch() {
        return skip(Tool::Torch, "what a run on PyTorch writes");
    }
    let lab = Lab::new("engines-writes");
    let model = format!("{FIXTURES}/llama_gqa");
    let batch = format!("{model}/batch.safetensors");
    lab.ok(&["compile", &model, "--mesh", "tp=2", "--seq", "16", "--global-batch", "8", "-o", "p"]);
    let mut found = vec![];
    for engine in ["shardc", "torch"] {
        let [dump, save, metrics] = ["dump", "save", "metrics"].map(|x| format!("{engine}.{x}"));
        let out = ran(
            &lab,
            &[
                "run",
                "p",
                "--engine",
                engine,
                "--weights",
                &model,
                "--batch",
                &batch,
                "--steps",
                "2",
                "--dump",
                &dump,
                "--save",
                &save,
                "--metrics",
                &metrics,
                "--format",
                "json",
            ],
        );
        let tensors = |file: PathBuf| {
            let bytes = std::fs::read(file).expect("a file");
            let all = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
            let f32s = |raw: &[u8]| -> Vec<f32> {
                raw.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
            };
            let mut all: Vec<(String, Vec<f32>)> =
                all.iter().map(|(n, t)| (n.to_string(), f32s(t.data()))).collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            all
        };
        let lines = std::fs::read_to_string(lab.path(&metrics)).expect("metrics").lines().count();
        let saved = tensors(lab.path(&save).join("model.safetensors"));
        found.push((numbers(&out), tensors(lab.path(&dump)), saved, lines));
    }
    let [own, torch] = &found[..] else { panic!("two runs") };
    close("losses", &torch.0, &own.0, 1e-6);
    assert!(own.3 == 2 && torch.3 == 2, "lines of metrics");
    for (what, own, torch) in [("dump", &own.1, &torch.1), ("model", &own.2, &torch.2)] {
        let names = |all: &[(String, Vec<f32>)]| -> Vec<String> {
            all.iter().map(|x| x.0.clone()).collect()
        };
        assert_eq!(names(own), names(torch), "{what}");
        for ((name, x), (_, y)) in own.iter().zip(torch) {
            let most = x.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
            let off = x.iter().zip(y).fold(0.0f32, |m, (x, y)| m.max((x - y).abs()));
            assert!(x.len() == y.len() && off <= 1e-4 * most, "{what} {name}: {off} of {most}");
        }
    }
}

#[test]
fn steps_in_python_save_and_load() {
    if !has_torch() {
        return skip(Tool::Torch, "checkpoints of steps in Python");
    }
    let (lab, root) = (Lab::new("engines-python"), Path::new(env!("CARGO_MANIFEST_DIR")));
    let model = format!("{FIXTURES}/llama_gqa");
    let batch = format!("{model}/batch.safetensors");
    let flags = ["--mesh", "dp_shard=2", "--zero", "3", "--seq", "16", "--global-batch", "8"];
    // A rate that rises, stays and falls: Python has its own reading of it.
    let rate = ["--lr", "1e-3", "--lr-schedule", "warmup-linear", "--warmup", "2"];
    let fall = ["--total-steps", "8", "--decay-steps", "5", "--min-lr", "1e-4"];
    lab.ok(&[&["compile", &model, "-o", "p"][..], &rate, &fall, &flags].concat());
    let run = ["run", "p", "--batch", &batch, "--format", "json"];
    let own = ["--weights", &model, "--save", "own", "--save-every", "2", "--steps", "2"];
    ran(&lab, &[&run[..], &own].concat());
    let further = numbers(&ran(&lab, &[&run[..], &["--resume", "own", "--steps", "5"]].concat()));
    let mut c = Command::new(python());
    c.arg("-B").arg(root.join("tests/torch/checkpoints.py"));
    c.args([lab.path("p"), PathBuf::from(&model), lab.path("own"), lab.path("")]);
    c.env("SHARDC_BINARY", env!("CARGO_BIN_EXE_shardc")).env("PYTHONPATH", root.join("python"));
    let out: Output = c.output().expect("Python starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let losses = std::fs::read_to_string(lab.path("losses.json")).expect("losses");
    let losses: Vec<f64> = serde_json::from_str(&losses).expect("JSON");
    // Losses and norms in turns.
    let want: Vec<f64> = further.iter().step_by(2).map(|x| x.1).collect();
    for (x, y) in losses.iter().zip(&want[..2]) {
        assert!((x - y).abs() <= 1e-5 * y, "{losses:?}, not {want:?}");
    }
    // What Python has saved, shardc goes on from, and the model is that of the checkpoint.
    let again = numbers(&ran(&lab, &[&run[..], &["--resume", "saved", "--steps", "5"]].concat()));
    close("from Python's checkpoint", &again, &further[4..], 2e-5);
    let hf = numbers(&ran(&lab, &[&run[..], &["--weights", "hf", "--steps", "1"]].concat()));
    close("from Python's model", &[(5, hf[0].1)], &further[4..5], 2e-5);
}

/// Parameters that nothing updates are of the model that is saved, and of what is dumped: the bias of a router.
#[test]
fn what_is_not_trained_is_saved() {
    if !has_torch() {
        return skip(Tool::Torch, "models with parameters that are not trained");
    }
    let lab = Lab::new("engines-untrained");
    let model = format!("{FIXTURES}/nemotron_h");
    let batch = format!("{model}/batch.safetensors");
    lab.ok(&["compile", &model, "--seq", "16", "--global-batch", "8", "-o", "p"]);
    let run = ["run", "p", "--batch", &batch, "--weights", &model, "--steps", "2"];
    ran(&lab, &[&run[..], &["--save", "own"]].concat());
    let torch = ["--engine", "torch", "--save", "torch", "--dump", "d.safetensors"];
    ran(&lab, &[&run[..], &torch].concat());
    let saved =
        |dir: &str| std::fs::read(lab.path(dir).join("model.safetensors")).expect("a model");
    let (own, other) = (saved("own"), saved("torch"));
    let files = [&own, &other].map(|b| SafeTensors::deserialize(b).expect("tensors"));
    let name = "backbone.layers.1.mixer.gate.e_score_correction_bias";
    assert!(files.iter().all(|f| f.names().contains(&name)), "no {name}");
    for (name, x) in files[0].tensors() {
        let y = files[1].tensor(&name).expect("the same names");
        let pairs = x.data().as_chunks::<4>().0.iter().zip(y.data().as_chunks::<4>().0);
        for (a, b) in pairs.map(|(a, b)| (f32::from_le_bytes(*a), f32::from_le_bytes(*b))) {
            assert!((a - b).abs() <= 2e-5, "{name}: {a} and {b}");
        }
    }
}

/// An optimizer of torch's own on the gradients of a step trains as the plan's.
#[test]
fn optimizers_of_ones_own() {
    if !has_torch() {
        return skip(Tool::Torch, "optimizers of one's own");
    }
    let rows: [(&[&str], &[&str]); 5] = [
        (&["--mesh", "dp_shard=2", "--zero", "3"], &[]),
        (&["--mesh", "pp=2", "--microbatch", "1"], &[]),
        (&["--mesh", "dp_replicate=2"], &[]),
        (&["--mesh", "dp_shard=2", "--zero", "1", "--dtype", "bf16"], &[]),
        // The first stage has no gradient, and knows their norm from the other.
        (
            &["--mesh", "pp=2", "--microbatch", "1"],
            &["model.embed_tokens.", "model.layers.0.", "model.layers.1."],
        ),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = format!("{FIXTURES}/llama_gqa");
    for (i, (flags, frozen)) in rows.iter().enumerate().filter(|(i, _)| taken(*i, 5)) {
        let lab = Lab::new(&format!("engines-own-{i}"));
        let freeze: Vec<String> = frozen.iter().map(|f| format!("--freeze={f}*")).collect();
        let freeze: Vec<&str> = freeze.iter().map(String::as_str).collect();
        let size = ["compile", &model, "--seq", "16", "--global-batch", "8"];
        let adamw = ["--lr", "1e-3", "--eps", "1e-5", "--weight-decay", "0.01", "--decay", "all"];
        lab.ok(&[&size[..], &adamw, flags, &freeze, &["--clip", "0.5", "-o", "p"]].concat());
        lab.ok(&[&size[..], &["--mesh", "tp=2", "--optimizer", "muon", "-o", "muon"]].concat());
        let mut c = Command::new(python());
        c.arg("-B").arg(root.join("tests/torch/own.py"));
        c.args([lab.path("p"), lab.path("muon"), PathBuf::from(&model), lab.path("")])
            .args(*frozen);
        c.env("SHARDC_BINARY", env!("CARGO_BIN_EXE_shardc")).env("PYTHONPATH", root.join("python"));
        let out: Output = c.output().expect("Python starts");
        assert!(out.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

/// A process on each of two hosts, both of which are this machine: the first prints and saves, the other has half of
/// the ranks.
#[test]
fn ranks_on_two_hosts() {
    let lab = Lab::new("engines-hosts");
    let model = format!("{FIXTURES}/llama_gqa");
    lab.ok(&["compile", &model, "--mesh", "tp=2", "--seq", "16", "--global-batch", "8", "-o", "p"]);
    let args = ["run", "p", "--engine", "torch", "--weights", &model, "--steps", "2"];
    let args = [&args[..], &["--save", "m", "--format", "json", "--timeout", "120"]].concat();
    let host = |rank: &str, port: &str| {
        let mut c = command(&lab, &args);
        c.env("SLURM_STEP_ID", "0").env("SLURM_PROCID", rank).env("SLURM_NTASKS", "2");
        c.env("SLURM_LOCALID", "0").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    };
    // Who they are the launcher says; where the first is, and what they know each other by, has to be said, too.
    let said = |c: &mut Command| {
        let out = c.output().expect("shardc starts");
        assert_eq!(out.status.code(), Some(5));
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(said(&mut host("0", "29500")).contains("SHARDC_SECRET"));
    assert!(said(host("1", "29500").env_remove("MASTER_ADDR")).contains("MASTER_ADDR is not set"));
    assert!(said(&mut host("1", "x")).contains("MASTER_PORT"));
    if !has_torch() {
        return skip(Tool::Torch, "ranks of PyTorch on two hosts");
    }
    // Two ports that are free now.
    let port = (20_000..60_000u16).step_by(7).find(|p| {
        [*p, p + 1].iter().all(|p| std::net::TcpListener::bind(("127.0.0.1", *p)).is_ok())
    });
    let port = port.expect("two ports").to_string();
    let start = |rank| {
        let mut c = host(rank, &port);
        c.env("SHARDC_SECRET", "0123456789abcdef0123456789abcdef").spawn().expect("shardc starts")
    };
    let (second, first) = (start("1"), start("0"));
    let first = first.wait_with_output().expect("it ends");
    let second = second.wait_with_output().expect("it ends");
    for (who, out) in [("first", &first), ("second", &second)] {
        assert!(out.status.success(), "{who}: {}", String::from_utf8_lossy(&out.stderr));
    }
    assert!(second.stdout.is_empty() && lab.path("m/model.safetensors").is_file());
    let alone =
        numbers(&ran(&lab, &["run", "p", "--weights", &model, "--steps", "2", "--format", "json"]));
    close("two hosts", &numbers(&String::from_utf8_lossy(&first.stdout)), &alone, 1e-6);
}

/// Gradients that are 0 but for rounding (gpt2's biases of keys), a scale of f16 that begins too high, and experts that
/// roundings choose are no differences.
#[test]
fn both_engines_are_compared() {
    if !has_torch() {
        return skip(Tool::Torch, "verify on both engines");
    }
    let rows: [(&str, &[&str]); 5] = [
        ("gpt2", &["--mesh", "tp=2"]),
        ("llama_gqa", &["--mesh", "tp=2", "--dtype", "f16"]),
        ("qwen3_moe", &["--mesh", "dp=2", "--dtype", "bf16"]),
        ("qwen3_next", &["--mesh", "dp=2", "--zero", "3"]),
        ("llama_gqa", &["--mesh", "dp=2", "--optimizer", "muon"]),
    ];
    for (i, (name, flags)) in rows.iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let lab = Lab::new(&format!("engines-verify-{i}"));
        let model = format!("{FIXTURES}/{name}");
        let base = ["compile", &model, "--seq", "16", "--global-batch", "8", "-o", "p"];
        lab.ok(&[&base[..], flags].concat());
        let out = ran(&lab, &["verify", "p", "--engine", "torch"]);
        let single = !flags.contains(&"--dtype");
        // It iterates in bf16: what is behind its updates has bounds of its own.
        let muon = single && flags.contains(&"muon");
        for (check, is_there) in [
            ("torch-loss", true),
            ("torch-gradient-norm", true),
            ("torch-gradients", single),
            ("torch-updated-loss", muon),
            ("torch-updated-gradient-norm", muon),
        ] {
            let line = out.lines().find(|l| l.split_whitespace().next() == Some(check));
            assert_eq!(line.is_some(), is_there, "{name}: {out}");
            assert!(line.is_none_or(|l| l.contains(" ok ")), "{name}: {out}");
        }
    }
}

/// What is missing or ends is said once, and every process is gone then.
#[test]
fn what_goes_wrong_is_said() {
    let lab = Lab::new("engines-wrong");
    let model = format!("{FIXTURES}/llama_gqa");
    lab.ok(&["compile", &model, "--mesh", "tp=2", "--seq", "16", "--global-batch", "8", "-o", "p"]);
    for flags in [["--device", "cuda"], ["--kernels", "interpreted"], ["--trace", "t"]] {
        let args = [&["run", "p", "--engine", "torch"][..], &flags].concat();
        let said = lab.refuses(&args, 2, "flag");
        assert!(said.contains(flags[0]), "{said}");
    }
    let without = |python: &str| {
        let mut c = command(&lab, &["run", "p", "--engine", "torch", "--steps", "1"]);
        let out = c.env("SHARDC_PYTHON", python).output().expect("shardc starts");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let is = out.status.code() == Some(5) && said.contains("error[torch]: ");
        assert!(is && said.contains("SHARDC_PYTHON"), "{said}");
        said
    };
    assert!(without("no-such-python").contains("no-such-python"));
    let said = without("false");
    assert!(said.contains("did not start"), "{said}");
    if !has_torch() {
        return skip(Tool::Torch, "ranks of PyTorch that end");
    }
    let mut c = command(&lab, &["run", "p", "--engine", "torch", "--steps", "100000"]);
    c.stdout(Stdio::piped()).stderr(Stdio::piped()).args(["--timeout", "60"]);
    let child = c.spawn().expect("shardc starts");
    let mine = |pid: &str| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("shardc.torch.serve") && line.contains("shardc-torch") && {
            // The launcher's arguments name the module, too; ranks have a number.
            let env = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let env = String::from_utf8_lossy(&env).into_owned();
            env.contains("\0LOCAL_RANK=1\0") && belongs(pid, child.id())
        }
    };
    let ranks = || -> Vec<String> {
        let all = std::fs::read_dir("/proc").expect("Linux").flatten();
        let all = all.map(|e| e.file_name().to_string_lossy().into_owned());
        all.filter(|n| n.bytes().all(|b| b.is_ascii_digit()) && mine(n)).collect()
    };
    let since = Instant::now();
    let rank = loop {
        if let Some(rank) = ranks().pop() {
            break rank;
        }
        assert!(since.elapsed() < Duration::from_secs(120), "no rank has started");
        std::thread::sleep(Duration::from_millis(50));
    };
    let killed = Command::new("kill").args(["-KILL", &rank]).status().expect("kill");
    assert!(killed.success());
    let out = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let code = out.status.code();
    assert!(matches!(code, Some(5 | 6)) && out.status.signal().is_none(), "{code:?}: {said}");
    assert!(said.contains("error[rank-failed]") || said.contains("error[torch]"), "{said}");
    assert!(since.elapsed() < Duration::from_secs(200), "it took {:?}", since.elapsed());
}

/// Whether a process descends from another.
fn belongs(pid: &str, ancestor: u32) -> bool {
    let mut at = pid.to_string();
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{at}/stat")).unwrap_or_default();
        let Some((_, rest)) = stat.rsplit_once(')') else { return false };
        let Some(parent) = rest.split_whitespace().nth(1) else { return false };
        if parent == ancestor.to_string() {
            return true;
        }
        if parent == "0" || parent == "1" {
            return false;
        }
        at = parent.to_string();
    }
}
