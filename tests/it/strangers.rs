//! A stranger's folder, or one that a group shares: nothing is written elsewhere, nothing of a
//! user's is replaced, and what is refused or ends early leaves nothing.

use crate::lab::*;
use serde_json::json;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

fn said(o: &Output) -> String {
    [&o.stdout[..], &o.stderr].map(String::from_utf8_lossy).concat()
}

/// A folder with a plan, and checkpoints of it.
fn planned(name: &str) -> Lab {
    let lab = Lab::new(name);
    let model = format!("{FIXTURES}/llama_mha");
    lab.ok(&["compile", &model, "--seq", "16", "--global-batch", "8", "-o", "plan"]);
    lab.ok(&["run", "plan", "--steps", "1", "--save", "ck", "--save-every", "1"]);
    lab
}

/// A command under a limit of the shell.
fn limited(lab: &Lab, limit: &str, args: &[&str]) -> Output {
    let text = format!("ulimit {limit}; exec \"$@\"");
    let mut c = Command::new("sh");
    c.args(["-c", &text, "sh", SHARDC]).current_dir(&lab.0).args(args);
    c.output().expect("a shell")
}

#[test]
fn no_link_is_followed_to_what_shardc_makes() {
    let lab = planned("links");
    let steps = ["run", "plan", "--steps", "2", "--save", "to", "--save-every", "1"];
    let hf = ["reshard", "ck", "--to", "hf", "-o", "to"];
    // A lock: nothing is made where it leads to, and an empty file is no lock that may be taken.
    lab.write("empty", "");
    for to in ["nowhere", "empty"] {
        symlink(to, lab.path(".to.shardc.lock")).expect("a link");
        for args in [&steps[..], &hf] {
            let said = lab.refuses(args, 2, "file");
            assert!(said.contains(".to.shardc.lock") && said.contains("a link"), "{said}");
        }
        assert_eq!(std::fs::read(lab.path("empty")).expect("a file"), b"");
        std::fs::remove_file(lab.path(".to.shardc.lock")).expect("still there");
    }
    // Unfinished checkpoints: of two steps in one folder, and in another checkpoint.
    let index = lab.path("ck/step-00000001/index.json");
    let before = std::fs::read(&index).expect("a file");
    std::fs::create_dir(lab.path("to")).expect("a folder");
    for step in [1, 2] {
        let link = lab.path(&format!("to/.step-0000000{step}.unfinished"));
        symlink("../ck/step-00000001", link).expect("a link");
    }
    for args in [&steps[..], &["reshard", "ck", "--to", "dp=2", "-o", "to"]] {
        let said = lab.refuses(args, 6, "save");
        assert!(said.contains(".unfinished") && said.contains("a link"), "{said}");
    }
    assert_eq!(std::fs::read(&index).expect("a file"), before);
}

/// In a folder that a group shares, a file that a run writes all along says nothing of the name
/// that the run saves under at its end.
#[test]
fn no_unfinished_name_says_the_next_one() {
    let lab = planned("shared");
    std::fs::create_dir(lab.path("mine")).expect("a folder");
    let args = ["run", "plan", "--steps", "1000000", "--trace", "t.json", "--save", "out"];
    let mut c = Command::new(SHARDC);
    c.current_dir(&lab.0).args(args).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut run = c.spawn().expect("shardc starts");
    let mut line = String::new();
    BufReader::new(run.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a step");
    let names = std::fs::read_dir(&lab.0).expect("a folder").flatten();
    let names = names.map(|e| e.file_name().to_string_lossy().into_owned());
    let rest = names.filter_map(|n| Some(n.strip_prefix(".t.json.unfinished-")?.to_string()));
    let rest: Vec<String> = rest.collect();
    assert_eq!(rest.len(), 1, "one file is being written");
    symlink("mine", lab.path(&format!(".out.unfinished-{}", rest[0]))).expect("a link");
    let pid = run.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().expect("kill").success());
    run.wait().expect("it ends");
    assert_eq!(std::fs::read_dir(lab.path("mine")).expect("a folder").count(), 0);
    assert!(lab.path("out/config.json").exists() && !lab.path("out").is_symlink());
}

#[test]
fn an_output_replaces_no_file_that_begins_alike() {
    let lab = planned("alike");
    let archive = Path::new(FIXTURES).with_file_name("imports").join("bert.pt2");
    let archive = archive.to_str().expect("a path");
    lab.write("m.ir", "func @f(%x: f32[4]) -> f32[4] {\n  return %x\n}\n");
    let svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\"></svg>";
    let outputs: [(&[&str], &str); 6] = [
        (&["report", "plan", "-o"], "<!doctype html>\n<html lang=\"en\">\n<p>mine"),
        (&["inspect", "plan", "--timeline", "--svg"], svg),
        (&["run", "plan", "--steps", "1", "--trace"], "{\"displayTimeUnit\":\"ms\",\"mine\":1}"),
        (&["run", "plan", "--steps", "1", "--metrics"], "{\"step\":1,\"mine\":2}\n"),
        (&["import", archive, "-o"], "func @mine() {}\n"),
        (&["opt", "m.ir", "--pass", "rewrite", "-o"], "function mine() {}\n"),
    ];
    for (args, mine) in outputs {
        lab.write("user", mine);
        symlink("user", lab.path("link")).expect("a link");
        for to in ["user", "link"] {
            let said = lab.refuses(&[args, &[to]].concat(), 2, "output");
            assert!(said.contains(to), "{said}");
            assert_eq!(std::fs::read_to_string(lab.path("user")).expect("a file"), mine);
        }
        std::fs::remove_file(lab.path("link")).expect("still there");
        // Its own it does.
        lab.ok(&[args, &["own"]].concat());
        lab.ok(&[args, &["own"]].concat());
        std::fs::remove_file(lab.path("own")).expect("written");
    }
}

#[test]
fn what_is_refused_leaves_nothing() {
    let lab = planned("refused");
    let archive = Path::new(FIXTURES).with_file_name("imports").join("bert.pt2");
    let archive = archive.to_str().expect("a path");
    let model = format!("{FIXTURES}/llama_mha");
    let full: [&[&str]; 4] = [
        &["import", archive, "-o", "m.ir"],
        &["export", "plan", "--to", "chakra", "-o", "traces"],
        &["reshard", "ck", "--to", "dp=2", "-o", "new"],
        &["reshard", "ck", "--to", "hf", "-o", "new"],
    ];
    let names = lab.names();
    for args in full {
        // A block is of 512 or 1024 bytes: room for a lock, and not for what is written.
        let out = limited(&lab, "-f 1", args);
        assert!(!out.status.success(), "{args:?}: {}", said(&out));
        assert!(said(&out).contains("File too large"), "{args:?}: {}", said(&out));
        assert_eq!(lab.names(), names, "{args:?} left something behind");
    }
    let dump = ["compile", &model, "--seq", "16", "--dump-all", "dump"];
    // Before a pass runs, behind the last one, and where the plan cannot be written.
    lab.refuses(&[&dump[..], &["--mesh", "tp=3"]].concat(), 2, "heads-not-divisible");
    lab.refuses(&[&dump[..], &["--memory", "1KB"]].concat(), 3, "out-of-memory");
    lab.refuses(&[&dump[..], &["-o", "ck"]].concat(), 2, "output");
    lab.ok(&dump);
    // What somebody else has put there under such a name stays.
    lab.write("dump/08-partition.ir", "function mine() {}");
    let said = lab.refuses(&dump, 2, "output");
    assert!(said.contains("08-partition.ir"), "{said}");
}

/// The text of a lock is cut short where a machine went down: nobody has to remove it.
#[test]
fn a_lock_that_is_cut_short_is_taken_over() {
    let lab = planned("cut");
    let hf = ["reshard", "ck", "--to", "hf", "-o", "to"];
    for text in ["{", "{\"pid\":12,\"host\":\"elsew", "\0\0\0\0"] {
        lab.write(".to.shardc.lock", text);
        let said = said(&lab.ok(&hf));
        assert!(said.contains("took over the lock of to"), "{said}");
        assert!(!lab.path(".to.shardc.lock").exists(), "the lock is left");
    }
    lab.write(".to.shardc.lock", "somebody's notes");
    let said = lab.refuses(&hf, 5, "save-locked");
    assert!(said.contains("does not say who"), "{said}");
}

/// With less and less room for addresses: what does not work says so, and leaves nothing
/// unfinished.
#[test]
fn the_end_of_memory_is_one_line() {
    let lab = planned("memory");
    let model = format!("{FIXTURES}/llama_mha");
    let compile = ["compile", &model, "--seq", "16", "--global-batch", "8", "-o", "new"];
    let save = ["run", "plan", "--steps", "1", "--save", "saved"];
    let mut ended = 0;
    for args in [&compile[..], &save] {
        let least = (48..).map(|i| i * 1_000).find(|kb| {
            let out = limited(&lab, &format!("-v {kb}"), args);
            let said = said(&out);
            let text: Vec<&str> = said.lines().filter(|l| l.contains("no more memory")).collect();
            assert!(text.len() <= 1 && !said.contains("memory allocation of"), "{kb}: {said}");
            if let [line] = text[..] {
                assert!(line.starts_with("error[no-memory]: "), "{kb}: {said}");
                assert_eq!(out.status.code(), Some(5), "{kb}: {said}");
                ended += 1;
            }
            let left = lab.names().into_iter().filter(|n| {
                n.file_name().is_some_and(|n| n.to_string_lossy().contains(".unfinished"))
            });
            assert_eq!(left.count(), 0, "{kb}: {said}");
            out.status.success()
        });
        assert!(least.is_some_and(|kb| kb < 2_000_000));
    }
    assert!(ended > 0, "there was enough at once: this test shows nothing");
}

/// Names in files, and of files, are part of lines, and make none of their own.
#[test]
fn names_forge_no_line() {
    let lab = planned("forged");
    let name = "x\nwarning[foo]: forged\nplan proved by terms: forged\n   = rule: forged";
    let mut told = 0;
    let mut check = |args: &[&str]| {
        let out = lab.shardc(args);
        let said = said(&out);
        let words = ["warning[foo]", "plan proved by terms: forged", "= rule: forged"];
        let forged = |l: &&str| words.iter().any(|w| l.trim_start().starts_with(w));
        assert_eq!(said.lines().find(forged), None, "{args:?}: {said}");
        told += usize::from(said.contains("x\\nwarning[foo]: forged\\nplan"));
    };
    // Keys and words of configs.
    for (key, value) in [(name, json!(1)), ("hidden_act", json!(name)), ("model_type", json!(name))]
    {
        lab.config("llama_mha", json!({ key: value }));
        check(&["check", "config.json", "--seq", "16"]);
    }
    // Tensors of a model, and columns of data.
    let column = json!({ "dtype": "I64", "shape": [8, 16], "data_offsets": [0, 1024] });
    let header = json!({ name: column }).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 1024]].concat();
    lab.write("rows.safetensors", &bytes);
    check(&["run", "plan", "--batch", "rows.safetensors"]);
    check(&["run", "plan", "--data", "rows.safetensors"]);
    let m = lab.model("llama_mha");
    lab.write("llama_mha/model.safetensors", bytes);
    check(&["run", "plan", "--weights", &m, "--steps", "1"]);
    // Texts.
    let quoted = name.replace('\n', "\\u{a}");
    let param = format!("f32[4] param \"{quoted}\"");
    let text = format!("func @f(%x: {param}, %y: {param}) -> f32[4] {{\n  return %x\n}}\n");
    lab.write("m.ir", text);
    check(&["check", "m.ir"]);
    // Paths, flags and words; what is written.
    check(&["inspect", name]);
    check(&["inspect", "plan", name]);
    check(&["inspect", "plan", &format!("--rank={name}")]);
    check(&["inspect", "plan", &format!("--{name}")]);
    let model = format!("{FIXTURES}/llama_mha");
    check(&["compile", &model, "--seq", "16", "-o", name]);
    check(&["run", name, "--steps", "1", "--trace", &format!("{name}/none/t.json")]);
    assert!(told > 9, "it is told {told} times");
}
