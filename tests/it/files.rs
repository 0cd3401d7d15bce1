//! Users' files: what is read is a plain file of a bounded size, whatever command reads it; what is
//! written appears whole, and replaces nothing but what shardc wrote.

use crate::lab::*;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Ends by itself, or has waited for what never comes.
fn ended(mut c: Command) -> Output {
    let mut child = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let start = Instant::now();
    while child.try_wait().expect("a process").is_none() {
        if start.elapsed() > Duration::from_secs(120) {
            child.kill().expect("killed");
            panic!("{c:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("a process")
}

/// All that a command said.
fn text(o: &Output) -> String {
    [&o.stdout[..], &o.stderr].map(String::from_utf8_lossy).concat()
}

fn command(lab: &Lab, args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    c.current_dir(&lab.0).args(args);
    c
}

/// Every file that a command reads, and the command.
const READERS: [(&str, &[&str]); 36] = [
    ("m.ir", &["compile", "m.ir", "-o", "out", "--seq", "16"]),
    ("m.ir", &["check", "m.ir", "--mesh", "tp=2"]),
    ("shardc.toml", &["compile", "shardc.toml", "-o", "out"]),
    ("m/config.json", &["compile", "m", "-o", "out", "--seq", "16"]),
    ("m/config.json", &["check", "m", "--mesh", "tp=2"]),
    ("m/model.safetensors", &["compile", "m", "-o", "out", "--seq", "16"]),
    ("i/model.safetensors.index.json", &["compile", "i", "-o", "out", "--seq", "16"]),
    ("i/part.safetensors", &["compile", "i", "-o", "out", "--seq", "16"]),
    ("s.csv", &["compile", "m", "--mesh", "pp=2", "--schedule", "s.csv", "--seq", "16"]),
    ("plan/plan.json", &["inspect", "plan", "--summary"]),
    ("plan/model.ir", &["inspect", "plan", "--summary"]),
    ("plan/options.toml", &["run", "plan", "--steps", "1"]),
    ("plan/config.json", &["verify", "plan"]),
    ("plan/programs/all.ir", &["explain", "plan", "schedule"]),
    ("plan/schedule.csv", &["launch-script", "plan", "--for", "torchrun"]),
    ("plan/weights.json", &["run", "plan", "--steps", "1"]),
    ("plan/plan.json", &["run", "plan"]),
    ("plan/plan.json", &["verify", "plan"]),
    ("plan/plan.json", &["explain", "plan", "schedule"]),
    ("plan/plan.json", &["launch-script", "plan", "--for", "torchrun"]),
    ("trace.json", &["inspect", "plan", "--timeline", "--times", "trace.json"]),
    ("d.npy", &["run", "plan", "--data", "d.npy"]),
    ("d.idx", &["run", "plan", "--data", "d.bin"]),
    ("d.npy", &["run", "plan", "--eval-data", "d.npy"]),
    ("b.txt", &["run", "large", "--data", "bytes:b.txt"]),
    ("batch.safetensors", &["run", "plan", "--batch", "batch.safetensors"]),
    ("m/model.safetensors", &["run", "plan", "--weights", "m"]),
    ("i/part.safetensors", &["run", "plan", "--weights", "i"]),
    ("ck/step-00000001/index.json", &["run", "plan", "--resume", "ck"]),
    ("ck/step-00000001/rank-00000.safetensors", &["run", "plan", "--resume", "ck"]),
    ("ck/step-00000001/index.json", &["reshard", "ck", "--to", "hf", "-o", "out"]),
    ("ck/step-00000001/rank-00000.safetensors", &["reshard", "ck", "--to", "hf", "-o", "out"]),
    ("ck/step-00000001/plan/plan.json", &["reshard", "ck", "--to", "hf", "-o", "out"]),
    ("new.svg", &["inspect", "plan", "--timeline", "--svg", "new.svg"]),
    ("new.json", &["run", "plan", "--steps", "1", "--trace", "new.json"]),
    ("new.safetensors", &["run", "plan", "--batch", "b8.safetensors", "--dump", "new.safetensors"]),
];

/// A folder in which all commands of [`READERS`] work.
fn readers(name: &str) -> Lab {
    let lab = Lab::new(name);
    lab.model("llama_mha");
    std::fs::rename(lab.path("llama_mha"), lab.path("m")).expect("renamed");
    let copy = |from: &str, to: &str| {
        lab.write(to, std::fs::read(lab.path(from)).expect("a file"));
    };
    copy("m/config.json", "i/config.json");
    copy("m/model.safetensors", "i/part.safetensors");
    let file = std::fs::read(lab.path("m/model.safetensors")).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&file).expect("weights");
    let map: serde_json::Map<_, _> =
        file.names().iter().map(|n| (n.to_string(), "part.safetensors".into())).collect();
    let index = serde_json::json!({ "weight_map": map }).to_string();
    lab.write("i/model.safetensors.index.json", index);
    lab.write("shardc.toml", "model = \"m\"\nseq = 16\n");
    lab.write("s.csv", "0F0,0B0\n1F0,1B0\n");
    lab.write("m.ir", "func @f(%x: f32[4]) -> f32[4] {\n  return %x\n}\n");
    lab.write("b.txt", "some bytes of text, enough for a sequence");
    copy("m/batch.safetensors", "b8.safetensors");
    copy("m/batch.safetensors", "batch.safetensors");
    let data = Path::new(FIXTURES).join("data");
    for (from, to) in [("row.npy", "d.npy"), ("mega.bin", "d.bin"), ("mega.idx", "d.idx")] {
        lab.write(to, std::fs::read(data.join(from)).expect("a fixture"));
    }
    lab.ok(&["compile", "m", "--seq", "16", "--global-batch", "8", "-o", "plan"]);
    let large = lab.config("llama_mha", serde_json::json!({ "vocab_size": 256 }));
    lab.ok(&["compile", &large, "--seq", "16", "-o", "large"]);
    lab.ok(&["run", "plan", "--steps", "1", "--save", "ck", "--save-every", "1"]);
    lab.ok(&["run", "plan", "--steps", "1", "--trace", "trace.json"]);
    lab
}

#[test]
fn every_reader_refuses_what_is_no_plain_file() {
    let lab = readers("readers-kinds");
    for (file, args) in READERS {
        let path = lab.path(file);
        let kept = lab.path("kept");
        if path.exists() {
            std::fs::rename(&path, &kept).expect("set aside");
        }
        for what in ["a FIFO", "a socket", "a device", "a folder"] {
            let mut socket = None;
            match what {
                "a FIFO" => {
                    let made = Command::new("mkfifo").arg(&path).status().expect("mkfifo");
                    assert!(made.success());
                }
                "a socket" => socket = Some(bind(&path)),
                "a device" => std::os::unix::fs::symlink("/dev/zero", &path).expect("a link"),
                _ => std::fs::create_dir(&path).expect("a folder"),
            }
            let out = ended(command(&lab, args));
            // verify prints what it finds, as a result.
            let said = text(&out);
            let (status, code) = refusal(file, args);
            assert_eq!(out.status.code(), Some(status), "{args:?}, {what}: {said}");
            let name = Path::new(file).file_name().expect("a name").to_string_lossy();
            let code = said.contains(code);
            let words = code && said.contains(&*name);
            assert!(words && said.contains(what), "{args:?}, {file} is {what}: {said}");
            drop(socket);
            let removed = match what {
                "a folder" => std::fs::remove_dir(&path),
                _ => std::fs::remove_file(&path),
            };
            removed.expect("still what it was");
        }
        if kept.exists() {
            std::fs::rename(&kept, &path).expect("back");
        }
    }
    assert!(!lab.path("out").exists());
}

/// Exit status and words where a file cannot be read: `verify` prints what it finds, as a result, and a checkpoint
/// is damaged.
fn refusal(file: &str, args: &[&str]) -> (i32, &'static str) {
    match args[0] {
        "verify" => (1, ""),
        _ if file.starts_with("ck/step-") => (5, "error[checkpoint]: "),
        _ => (2, "error[file]: "),
    }
}

/// A socket; its path may be longer than an address can be.
fn bind(path: &Path) -> UnixListener {
    let name = path.with_file_name("s");
    let short = std::env::temp_dir().join(format!("shardc-{}", std::process::id()));
    let listener = UnixListener::bind(&short).expect("a socket");
    std::fs::rename(&short, &name).or_else(|_| UnixListener::bind(&name).map(drop)).expect("moved");
    std::fs::rename(&name, path).expect("moved");
    listener
}

#[test]
fn every_reader_has_a_bound() {
    let lab = readers("readers-bound");
    // Tokens are read from where they are needed: a file of them may be as large as it likes. Nothing is
    // read of what is replaced.
    let unbounded = ["d.npy", "d.idx", "new.svg", "new.json", "new.safetensors"];
    for (file, args) in READERS.iter().filter(|r| !unbounded.contains(&r.0)) {
        let (path, kept) = (lab.path(file), lab.path("kept"));
        std::fs::rename(&path, &kept).expect("set aside");
        let sparse = std::fs::File::create(&path).expect("a file");
        sparse.set_len(1 << 42).expect("a sparse file");
        let out = ended(command(&lab, args));
        let said = text(&out);
        let status = refusal(file, args).0;
        assert_eq!(out.status.code(), Some(status), "{args:?}: {said}");
        let name = Path::new(file).file_name().expect("a name").to_string_lossy();
        assert!(said.contains(&*name), "{args:?}: {said}");
        // A file with a header is read as far as that goes.
        let bounded = said.contains("4398046511104") || said.contains("hold more than");
        assert!(bounded || file.ends_with(".safetensors"), "{args:?}: {said}");
        std::fs::rename(&kept, &path).expect("back");
    }
}

/// Runs with a limit on how large a file may get, as a full disk; blocks are of 512 or 1024 bytes.
fn on_a_full_disk(lab: &Lab, args: &[&str]) -> Output {
    let mut c = Command::new("sh");
    c.args(["-c", "ulimit -f 4; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_shardc")]);
    c.current_dir(&lab.0).args(args);
    ended(c)
}

#[test]
fn outputs_replace_what_shardc_wrote_and_nothing_else() {
    let lab = readers("outputs");
    let outputs: [(&str, &[&str]); 3] = [
        ("o.svg", &["inspect", "plan", "--timeline", "--svg", "o.svg"]),
        ("o.json", &["run", "plan", "--steps", "1", "--trace", "o.json"]),
        ("o.st", &["run", "plan", "--steps", "1", "--batch", "b8.safetensors", "--dump", "o.st"]),
    ];
    for (file, args) in outputs {
        // Also an empty file, as mktemp makes one.
        lab.write(file, "");
        lab.ok(args);
        lab.ok(args);
        let whole = std::fs::read(lab.path(file)).expect("written");
        let names = lab.names();
        let out = on_a_full_disk(&lab, args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains(file), "{args:?}: {said}");
        assert!(said.contains("File too large"), "{args:?}: {said}");
        assert_eq!(std::fs::read(lab.path(file)).expect("still there"), whole, "{args:?}");
        assert_eq!(lab.names(), names, "{args:?} left something behind");
        // A link is followed.
        let aside = lab.path("aside");
        std::fs::rename(lab.path(file), &aside).expect("renamed");
        std::os::unix::fs::symlink("aside", lab.path(file)).expect("a link");
        lab.ok(args);
        assert!(lab.path(file).is_symlink() && !aside.is_symlink());
        std::fs::remove_file(lab.path(file)).expect("removed");
        // Weights, notes, another's picture.
        for mine in ["m/model.safetensors", "m/config.json"] {
            std::fs::copy(lab.path(mine), lab.path(file)).expect("copied");
            let said = lab.refuses(args, 2, "output");
            assert!(said.contains(file) && !said.contains("starting from"), "{said}");
            let same = std::fs::read(lab.path(mine)).expect("a file");
            assert_eq!(std::fs::read(lab.path(file)).expect("still there"), same);
        }
    }
}

#[test]
fn a_plan_replaces_a_plan_and_no_file_of_a_user() {
    let lab = readers("replaced");
    let again = ["compile", "m", "--seq", "32", "--global-batch", "8", "-o", "plan"];
    let old = |name: &str| std::fs::read(lab.path("plan").join(name)).expect("a file");
    let before = old("plan.json");
    for mine in ["programs/notes.txt", "kernels/notes.txt", "notes.txt", "more/notes.txt"] {
        lab.write(&format!("plan/{mine}"), "mine");
        let said = lab.refuses(&again, 2, "output");
        assert!(said.contains(mine.split('/').next().expect("a name")), "{said}");
        assert_eq!(old("plan.json"), before);
        std::fs::remove_file(lab.path("plan").join(mine)).expect("still there");
        let folder = lab.path("plan").join(mine);
        let folder = folder.parent().expect("a folder");
        if folder.ends_with("kernels") || folder.ends_with("more") {
            std::fs::remove_dir(folder).expect("removed");
        }
    }
    // Code of kernels is the plan's own.
    lab.write("plan/kernels/gemm-sm_90a-0123456789abcdef01234567.cubin", "code");
    let names = lab.names();
    let out = on_a_full_disk(&lab, &again);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(said.contains("error[io]: ") && said.contains("--> plan"), "{said}");
    assert_eq!((old("plan.json"), lab.names()), (before.clone(), names));
    lab.ok(&again);
    assert!(old("plan.json") != before && !lab.path("plan/kernels").exists());
    // A user's folder that has files of such names.
    lab.write("web/plan.json", "{\"tasks\": [\"write\"]}");
    lab.write("web/config.json", "{}");
    lab.refuses(&["compile", "m", "--seq", "16", "-o", "web"], 2, "output");
}

#[test]
fn the_base_model_is_not_replaced() {
    let lab = readers("base");
    let before = std::fs::read(lab.path("m/model.safetensors")).expect("weights");
    std::os::unix::fs::symlink(lab.path("m"), lab.path("link")).expect("a link");
    let path = lab.path("m");
    let whole = path.to_str().expect("a path");
    let run = ["run", "plan", "--steps", "1"];
    let with = |weights: &'static str, to: &[&str]| {
        let args = [&run[..], &["--weights", weights, "--save"], to].concat();
        lab.refuses(&args, 2, "save-base")
    };
    for to in ["m", "./m", whole, "link", "link/", "m/new", "link/new/deep", "plan/../m"] {
        let said = with("m", &[to]);
        assert!(said.contains("--force") && said.contains("base model is in m"), "{said}");
    }
    with("link", &["m"]);
    with("m", &["m", "--save-every", "1"]);
    with("m", &["m/new", "--save-every", "1"]);
    // The plan knows what it was compiled from, also without --weights.
    lab.refuses(&[&run[..], &["--save", "m"]].concat(), 2, "save-base");
    lab.refuses(&["reshard", "ck", "--to", "hf", "-o", "m"], 2, "save-base");
    assert_eq!(std::fs::read(lab.path("m/model.safetensors")).expect("weights"), before);
    // What is not the model's stays a reason to refuse.
    let force = [&run[..], &["--weights", "m", "--save", "m", "--force"]].concat();
    lab.refuses(&force, 2, "save-target");
    std::fs::remove_file(lab.path("m/batch.safetensors")).expect("removed");
    std::fs::remove_file(lab.path("m/expected.safetensors")).expect("removed");
    lab.ok(&force);
    assert!(std::fs::read(lab.path("m/model.safetensors")).expect("weights") != before);
}

/// Files of a folder and what is in them.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut out = vec![];
    for e in std::fs::read_dir(dir).expect("a folder").flatten() {
        let name = e.file_name().to_string_lossy().into_owned();
        match e.path().is_dir() {
            true => {
                out.extend(contents(&e.path()).into_iter().map(|(n, b)| (format!("{name}/{n}"), b)))
            }
            false => out.push((name, std::fs::read(e.path()).expect("a file"))),
        }
    }
    out.sort();
    out
}

/// Tensors of a saved model by name: element type and bytes.
fn tensors(dir: &Path) -> std::collections::BTreeMap<String, (safetensors::Dtype, Vec<u8>)> {
    let mut out = std::collections::BTreeMap::new();
    for (name, bytes) in contents(dir).into_iter().filter(|f| f.0.ends_with(".safetensors")) {
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("weights");
        for (tensor, view) in file.tensors() {
            let old = out.insert(tensor, (view.dtype(), view.data().to_vec()));
            assert!(old.is_none(), "{name}");
        }
    }
    out
}

#[test]
fn a_saved_model_keeps_what_belongs_to_it() {
    use safetensors::Dtype;
    let lab = Lab::new("belongs");
    lab.model("llama_mha");
    std::fs::rename(lab.path("llama_mha"), lab.path("m")).expect("renamed");
    let kept = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "LICENSE",
    ];
    kept.iter().for_each(|n| drop(lab.write(&format!("m/{n}"), format!("this is {n}"))));
    for other in ["README.md", "optimizer.pt", "pytorch_model.bin"] {
        lab.write(&format!("m/{other}"), "not of the saved model");
    }
    lab.ok(&["compile", "m", "--seq", "16", "--global-batch", "8", "--mesh", "tp=2", "-o", "plan"]);
    let run = ["run", "plan", "--steps", "1"];
    let all = |dir: &str| {
        let found = contents(&lab.path(dir));
        for name in kept {
            let text = found.iter().find(|f| f.0 == name);
            let text = text.unwrap_or_else(|| panic!("{dir} has no {name}"));
            assert_eq!(text.1, format!("this is {name}").as_bytes());
        }
        let rest: Vec<_> = found.iter().map(|f| &*f.0).filter(|n| !kept.contains(n)).collect();
        assert_eq!(rest, ["config.json", "model.safetensors"], "{dir}");
        found
    };
    lab.ok(&[&run[..], &["--weights", "m", "--save", "a"]].concat());
    let a = all("a");
    // From the plan's model; through a checkpoint; in place of an earlier one.
    lab.ok(&[&run[..], &["--save", "b"]].concat());
    all("b");
    lab.ok(&[&run[..], &["--weights", "m", "--save", "ck", "--save-every", "1"]].concat());
    lab.ok(&["reshard", "ck", "--to", "hf", "-o", "c"]);
    assert!(all("c") == a);
    lab.ok(&[&run[..], &["--weights", "m", "--save", "a"]].concat());
    assert!(all("a") == a);

    // Element types and files.
    let f32s = tensors(&lab.path("a"));
    assert!(f32s.values().all(|t| t.0 == Dtype::F32));
    let save = |to: &'static str, more: &[&str]| {
        lab.ok(&[&["reshard", "ck", "--to", "hf", "-o", to], more].concat());
        let config: serde_json::Value = serde_json::from_slice(
            &std::fs::read(lab.path(to).join("config.json")).expect("a config"),
        )
        .expect("JSON");
        (tensors(&lab.path(to)), config["dtype"].as_str().expect("a word").to_string())
    };
    let (halves, word) = save("bf16", &["--save-dtype", "bf16"]);
    assert_eq!(word, "bfloat16");
    for (name, (dtype, bytes)) in &halves {
        let want: Vec<u8> = f32s[name].1.chunks_exact(4).flat_map(rounded).collect();
        assert!(*dtype == Dtype::BF16 && *bytes == want, "{name}");
    }
    assert_eq!(save("f16", &["--save-dtype", "f16"]).1, "float16");
    let (many, word) = save("many", &["--max-shard-size", "20kB"]);
    assert!(many == f32s && word == "float32");
    let names: Vec<String> = contents(&lab.path("many")).into_iter().map(|f| f.0).collect();
    let count = names.iter().filter(|n| n.ends_with(".safetensors")).count();
    assert!(count > 2 && names.contains(&format!("model-00001-of-{count:05}.safetensors")));
    let index = std::fs::read(lab.path("many/model.safetensors.index.json")).expect("an index");
    let index: serde_json::Value = serde_json::from_slice(&index).expect("JSON");
    let size: usize = f32s.values().map(|t| t.1.len()).sum();
    assert_eq!(index["metadata"]["total_size"], size);
    assert_eq!(index["weight_map"].as_object().expect("a map").len(), f32s.len());
    for (name, bytes) in contents(&lab.path("many")).iter().filter(|f| f.0.starts_with("model-")) {
        let file = safetensors::SafeTensors::deserialize(bytes).expect("weights");
        let data: usize = file.tensors().iter().map(|t| t.1.data().len()).sum();
        assert!(data <= 20_000 || file.len() == 1, "{name} has {data} B");
        assert!(file.names().iter().all(|t| index["weight_map"][t] == name.as_str()));
    }
    // A base of bf16, in several files: what is trained from it is bf16 again, and loads.
    lab.ok(&["reshard", "ck", "--to", "hf", "-o", "base", "--save-dtype", "bf16"]);
    lab.ok(&["compile", "base", "--seq", "16", "--global-batch", "8", "-o", "plan2"]);
    lab.ok(&["run", "plan2", "--steps", "1", "--weights", "base", "--save", "half"]);
    assert!(tensors(&lab.path("half")).values().all(|t| t.0 == Dtype::BF16));
    lab.ok(&["run", "plan2", "--steps", "1", "--weights", "many"]);
    lab.refuses(&["run", "plan2", "--save", "x", "--max-shard-size", "big"], 2, "flag");
    // A base that is gone is told.
    std::fs::remove_dir_all(lab.path("base")).expect("removed");
    let out = lab.ok(&["run", "plan2", "--steps", "1", "--save", "alone"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("no tokenizer") && said.contains("base is not there"), "{said}");
}

/// An f32 as bf16, to the nearest, ties to even.
fn rounded(bytes: &[u8]) -> [u8; 2] {
    let bits = u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    let up = 0x7fff + (bits >> 16 & 1);
    (((bits + up) >> 16) as u16).to_le_bytes()
}

/// A path is what it was when it was checked: what does not exist is not made on the way to elsewhere.
#[test]
fn a_path_through_what_does_not_exist_is_refused() {
    let lab = readers("nowhere");
    lab.ok(&["compile", "m", "--seq", "16", "--global-batch", "8", "-o", "other"]);
    lab.ok(&["run", "plan", "--steps", "1", "--save", "M2"]);
    lab.write("precious/thesis.tex", "ten years");
    lab.write("empty/in/x", "");
    let whole = |lab: &Lab| {
        let all = ["precious", "other", "M2", "empty"].map(|d| contents(&lab.path(d)));
        (all, lab.names())
    };
    let before = whole(&lab);
    let compile = ["compile", "m", "--seq", "32", "--global-batch", "8", "-o"];
    let run = ["run", "plan", "--steps", "1", "--save"];
    let more = ["--save-every", "1"];
    let reshard = ["reshard", "ck", "--to", "hf", "-o"];
    let to_mesh = ["reshard", "ck", "--to", "dp=2", "-o"];
    for to in ["nope/../precious", "nope/../other", "nope/../M2", "empty/in/no/../../x/../../M2"] {
        lab.refuses(&[&compile[..], &[to]].concat(), 2, "output");
        lab.refuses(&[&run[..], &[to]].concat(), 2, "save-target");
        lab.refuses(&[&run[..], &[to], &more].concat(), 2, "save-target");
        lab.refuses(&[&reshard[..], &[to]].concat(), 2, "save-target");
        lab.refuses(&[&to_mesh[..], &[to]].concat(), 2, "save-target");
        assert!(whole(&lab) == before, "{to}");
    }
    std::os::unix::fs::symlink("gone", lab.path("nothing")).expect("a link");
    lab.refuses(&[&compile[..], &["nothing"]].concat(), 2, "output");
    lab.refuses(&[&run[..], &["nothing/x"]].concat(), 2, "save-target");
    // New folders on the way are made; a link is followed.
    lab.ok(&[&run[..], &["new/deep/M3"]].concat());
    std::os::unix::fs::symlink("new/deep", lab.path("link")).expect("a link");
    lab.ok(&[&run[..], &["link/M3/"]].concat());
    lab.ok(&[&compile[..], &["link/plan"]].concat());
    assert!(lab.path("new/deep/plan/plan.json").exists() && lab.path("link").is_symlink());
}

#[test]
fn a_model_that_shardc_did_not_write_is_not_replaced() {
    let lab = readers("others");
    for file in ["batch", "expected"] {
        std::fs::remove_file(lab.path(&format!("m/{file}.safetensors"))).expect("removed");
    }
    let copy = |to: &str| {
        for (name, bytes) in contents(&lab.path("m")) {
            lab.write(&format!("{to}/{name}"), bytes);
        }
    };
    copy("theirs");
    let run = ["run", "plan", "--steps", "1", "--save", "theirs"];
    let said = lab.refuses(&run, 2, "save-target");
    assert!(said.contains("--force") && said.contains("not written by shardc"), "{said}");
    lab.refuses(&["reshard", "ck", "--to", "hf", "-o", "theirs"], 2, "save-target");
    assert!(contents(&lab.path("theirs")) == contents(&lab.path("m")));
    lab.ok(&[&run[..], &["--force"]].concat());
    // By now it is ours.
    lab.ok(&run);
    // Weights that are links into another folder, as in a cache: that folder is the base.
    lab.ok(&["run", "plan", "--steps", "1", "--save", "blobs"]);
    std::fs::create_dir(lab.path("snapshot")).expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        let to = lab.path("snapshot").join(name);
        std::os::unix::fs::symlink(format!("../blobs/{name}"), to).expect("a link");
    }
    let cached = ["run", "plan", "--steps", "1", "--weights", "snapshot", "--save"];
    lab.refuses(&[&cached[..], &["blobs"]].concat(), 2, "save-base");
    lab.ok(&[&cached[..], &["elsewhere"]].concat());
    // What is not the plan's model gives no tokenizer.
    let own = std::fs::read_to_string(lab.path("m/config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&own).expect("JSON");
    config["rms_norm_eps"] = 0.125.into();
    lab.write("snapshot2/config.json", config.to_string());
    lab.write("snapshot2/tokenizer.json", "{}");
    lab.write("snapshot2/model.safetensors", &contents(&lab.path("blobs"))[1].1);
    let other = ["run", "plan", "--steps", "1", "--weights", "snapshot2", "--save", "mixed"];
    let said = text(&lab.ok(&other));
    assert!(said.contains("not that of the plan") && !lab.path("mixed/tokenizer.json").exists());
    // Folders, pipes and links to nothing that are named as files of a model are left out.
    lab.write("m/LICENSES/MIT", "text");
    lab.write("m/tokenizer/vocab", "text");
    std::os::unix::fs::symlink("gone", lab.path("m/NOTICE")).expect("a link");
    lab.write("m/tokenizer.json", "{}");
    let run = ["run", "plan", "--steps", "1", "--weights", "m", "--save", "kept"];
    let said = text(&lab.ok(&run));
    assert!(
        said.contains("m/LICENSES is not a regular file")
            && said.contains("m/NOTICE is a link to nothing"),
        "{said}"
    );
    assert!(lab.path("kept/tokenizer.json").exists() && !lab.path("kept/LICENSES").exists());
}

#[test]
fn flags_that_would_change_nothing_are_refused() {
    let lab = readers("idle");
    let run = ["run", "plan", "--steps", "1"];
    let saved = ["--save", "new", "--save-every", "1"];
    for flags in [&["--save-dtype", "bf16"][..], &["--max-shard-size", "1GB"], &["--force"]] {
        let said = lab.refuses(&[&run[..], flags].concat(), 2, "flag");
        assert!(said.contains(flags[0]), "{said}");
        if flags != ["--force"] {
            lab.refuses(&[&run[..], &saved, flags].concat(), 2, "flag");
        }
        lab.refuses(&[&["reshard", "ck", "--to", "dp=2", "-o", "x"], flags].concat(), 2, "flag");
    }
    for flags in [&["--keep", "3"][..], &["--save", "new", "--keep", "3"]] {
        let out = lab.shardc(&[&run[..], flags].concat());
        assert!(out.status.code() == Some(2) && text(&out).contains("--save-every"));
    }
    let hf = ["reshard", "ck", "--to", "hf", "-o", "x"];
    lab.refuses(&[&hf[..], &["--zero", "3"]].concat(), 2, "flag");
    lab.refuses(&["reshard", "ck", "--to", "dp=2", "-o", "x", "--base", "m"], 2, "flag");
    assert!(Command::new("mkfifo").arg(lab.path("fifo")).status().expect("mkfifo").success());
    for base in ["/nonexistent", "fifo", "/dev/zero", "ck", "b.txt"] {
        let said = lab.refuses(&[&hf[..], &["--base", base]].concat(), 2, "flag");
        assert!(said.contains("--base") && said.contains(base), "{said}");
    }
    for (to, word) in [("HF", "neither hf nor a mesh"), ("dp=x", "--to dp=x")] {
        let args = ["reshard", "ck", "--to", to, "-o", "x"];
        let said = text(&lab.shardc(&args));
        assert!(said.contains(word) && !said.contains("--mesh HF"), "{said}");
    }
    // A pipe among the files of a glob is not data, and a file is not a checkpoint.
    lab.write("data/a.txt", "some bytes");
    std::fs::rename(lab.path("fifo"), lab.path("data/b.txt")).expect("renamed");
    let said = lab.refuses(&["run", "large", "--data", "bytes:data/*.txt"], 2, "file");
    assert!(said.contains("data/b.txt") && said.contains("a FIFO"), "{said}");
    std::fs::remove_file(lab.path("data/b.txt")).expect("removed");
    let large = std::fs::File::create(lab.path("data/b.txt")).expect("a file");
    large.set_len(1 << 29).expect("a sparse file");
    let said = lab.refuses(&["run", "large", "--data", "bytes:data/*.txt"], 2, "data");
    assert!(said.contains("data/*.txt names hold more than"), "{said}");
    let file = "ck/step-00000001/index.json";
    for args in
        [&["run", "plan", "--resume", file][..], &["reshard", file, "--to", "hf", "-o", "x"]]
    {
        let said = lab.refuses(args, 2, "file");
        assert!(said.contains("is a file, a checkpoint is a folder"), "{said}");
    }
}

#[test]
fn a_model_is_saved_beside_what_came_into_its_way() {
    let lab = readers("way");
    lab.ok(&["run", "plan", "--steps", "1", "--save", "to"]);
    let mut run = command(&lab, &["run", "plan", "--steps", "1000000", "--save", "to"]);
    let mut child =
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("shardc starts");
    let mut line = String::new();
    let out = child.stdout.as_mut().expect("a pipe");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a step");
    lab.write("to/notes.txt", "mine");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().expect("kill").success());
    let done = child.wait_with_output().expect("it ends");
    let said = text(&done);
    assert_eq!(done.status.code(), Some(143), "{said}");
    assert!(said.contains("warning[save-target]") && said.contains("saved to-1"), "{said}");
    assert!(said.contains("the model is in to-1"), "{said}");
    assert_eq!(std::fs::read(lab.path("to/notes.txt")).expect("still there"), b"mine");
    assert!(!tensors(&lab.path("to-1")).is_empty());
}

/// A lock that cannot be written is not a lock, and is not left.
#[test]
fn a_full_disk_leaves_no_lock() {
    let lab = readers("no-room");
    let names = lab.names();
    for args in [
        &["run", "plan", "--steps", "1", "--save", "to"][..],
        &["run", "plan", "--steps", "1", "--save", "to", "--save-every", "1"],
        &["reshard", "ck", "--to", "hf", "-o", "to"],
    ] {
        let mut c = Command::new("sh");
        c.args(["-c", "ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_shardc")]);
        c.current_dir(&lab.0).args(args);
        let out = ended(c);
        let said = text(&out);
        assert_eq!(out.status.code(), Some(5), "{args:?}: {said}");
        assert!(said.contains("error[io]: cannot lock"), "{args:?}: {said}");
        assert_eq!(lab.names(), names, "{args:?} left something behind");
    }
}

/// What is said of a gradient is one thing, whoever says it.
#[test]
fn a_gradient_that_zero_scatters_has_a_collective() {
    let lab = Lab::new("scattered");
    lab.model("llama_mha");
    let compile = ["compile", "llama_mha", "--seq", "16", "--mesh", "dp=2", "-o", "plan", "--zero"];
    for (stage, scattered) in [("0", false), ("1", false), ("2", true), ("3", true)] {
        lab.ok(&[&compile[..], &[stage]].concat());
        let name = "tensor:model.layers.0.mlp.up_proj.weight";
        let said = text(&lab.ok(&["explain", "plan", name]));
        assert!(!said.contains("no collective"), "--zero {stage}: {said}");
        assert_eq!(said.contains("no other collective"), scattered, "--zero {stage}: {said}");
    }
}
