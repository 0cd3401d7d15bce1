//! What surrounds a command: standard streams that are full or gone, a limit of threads, C compilers
//! that are missing, old, broken or slow.

use crate::lab::{FIXTURES, Lab};
use shardc_testing::{Tool, skip};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

/// A pipe that nobody reads.
fn unread() -> Stdio {
    std::io::pipe().expect("a pipe").1.into()
}

fn in_lab(lab: &Lab, args: &[&str]) -> Command {
    let mut c = Command::new(SHARDC);
    c.current_dir(&lab.0).args(args).stdin(Stdio::null());
    c
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// A lab with the plan `plan` of one layout, and a checkpoint of it in `saved`.
fn with_plan(name: &str, mesh: &[&str]) -> Lab {
    let lab = Lab::new(name);
    let mha = format!("{FIXTURES}/llama_mha");
    lab.ok(&[&["compile", &mha, "--seq", "16", "-o", "plan"][..], mesh].concat());
    lab
}

/// Every command: its arguments, its exit status, and whether it prints a result.
fn commands(mha: &str) -> Vec<(Vec<&str>, i32, bool)> {
    vec![
        (vec!["--help"], 0, true),
        (vec!["--version"], 0, true),
        (vec!["run", "--help"], 0, true),
        (vec!["what"], 2, false),
        (vec!["check", mha, "--mesh", "tp=2", "--seq", "16"], 0, true),
        (vec!["check", mha, "--mesh", "tp=3", "--seq", "16"], 1, true),
        (vec!["compile", mha, "--seq", "16"], 0, true),
        (vec!["compile", mha, "--seq", "16", "--dump-after", "partition"], 0, true),
        (vec!["compile", mha, "--seq", "16", "--format", "json"], 0, true),
        (vec!["compile", mha, "--seq", "16", "--mesh", "tp=3"], 2, false),
        (vec!["inspect", "plan"], 0, true),
        (vec!["inspect", "plan", "--summary"], 0, true),
        (vec!["explain", "plan", "%loss"], 0, true),
        (vec!["launch-script", "plan", "--for", "torchrun"], 0, true),
        (vec!["verify", "plan", "--tiny"], 0, true),
        (vec!["run", "plan", "--steps", "2"], 0, true),
        (vec!["run", "plan", "--steps", "2", "--format", "json"], 0, true),
        (vec!["run", "none"], 2, false),
        (vec!["reshard", "saved", "--to", "hf", "-o", "saved"], 2, false),
    ]
}

#[test]
fn streams_that_are_full_or_gone() {
    let lab = with_plan("streams", &["--mesh", "dp=2"]);
    lab.ok(&["run", "plan", "--steps", "1", "--save", "saved", "--save-every", "1"]);
    let mha = format!("{FIXTURES}/llama_mha");
    for (args, status, prints) in commands(&mha) {
        let run = |out: Stdio, err: Stdio| {
            let done = in_lab(&lab, &args).stdout(out).stderr(err).output().expect("it starts");
            let code = done.status.code().unwrap_or_else(|| panic!("{args:?}: {}", done.status));
            (code, done)
        };
        let (whole, plain) = run(Stdio::piped(), Stdio::piped());
        assert_eq!((whole, !plain.stdout.is_empty()), (status, prints), "{args:?}: {plain:?}");
        // Notices are dropped; results are as before.
        for err in [full(), unread()] {
            let (code, silent) = run(Stdio::piped(), err);
            assert_eq!(code, status, "{args:?}");
            if args[0] != "run" && !args.contains(&"json") {
                assert_eq!(silent.stdout, plain.stdout, "{args:?}");
            }
        }
        // A result that is cut short is an error; one that nobody reads ends the command.
        let (lost, gone) = if prints { (5, 141) } else { (status, status) };
        let (code, out) = run(full(), Stdio::piped());
        assert_eq!(code, lost, "{args:?}: {}", said(&out));
        assert_eq!(said(&out).contains("error[io]: "), prints, "{args:?}: {}", said(&out));
        let (code, out) = run(unread(), Stdio::piped());
        assert_eq!(code, gone, "{args:?}: {}", said(&out));
        assert!(!prints || !said(&out).contains("error["), "{args:?}: {}", said(&out));
        assert_eq!(run(full(), full()).0, lost, "{args:?}");
        // Streams that are closed from the start are /dev/null.
        let mut closed = Command::new("sh");
        closed.args(["-c", "exec \"$0\" \"$@\" <&- >&- 2>&-", SHARDC]).args(&args);
        let code = closed.current_dir(&lab.0).status().expect("a shell").code();
        assert_eq!(code, Some(status), "{args:?}");
    }
}

#[test]
fn training_goes_on_without_its_log() {
    let lab = with_plan("training", &["--mesh", "dp=2"]);
    let run = |to: &str, out: Stdio, err: Stdio| {
        let args = ["run", "plan", "--steps", "3", "--save", to];
        let out = in_lab(&lab, &args).stdout(out).stderr(err).output().expect("it starts");
        assert!(lab.path(to).join("model.safetensors").is_file(), "{to}: {}", said(&out));
        (out.status.code(), out)
    };
    let weights = |to: &str| std::fs::read(lab.path(to).join("model.safetensors")).expect("saved");
    assert_eq!(run("plain", Stdio::piped(), Stdio::piped()).0, Some(0));
    let (code, out) = run("full", full(), Stdio::piped());
    let said = said(&out);
    assert_eq!(code, Some(5), "{said}");
    assert_eq!(said.matches("warning[io]: ").count(), 1, "{said}");
    assert!(said.contains("training goes on without printing"), "{said}");
    assert!(said.contains("saved full") && said.contains("error[io]: "), "{said}");
    assert_eq!(run("both", full(), full()).0, Some(5));
    assert_eq!(run("err", Stdio::piped(), full()).0, Some(0));
    assert_eq!(run("pipe", unread(), Stdio::piped()).0, Some(141));
    for to in ["full", "both", "err", "pipe"] {
        assert!(weights(to) == weights("plain"), "{to}");
    }
    // Where nothing else is left of it, it ends with the first line that is lost.
    let args = ["run", "plan", "--steps", "1000000000"];
    for (out, status) in [(full(), 5), (unread(), 141)] {
        let done = in_lab(&lab, &args).stdout(out).stderr(full()).status().expect("it starts");
        assert_eq!(done.code(), Some(status));
    }
}

#[test]
fn ranks_need_threads() {
    let lab = with_plan("threads", &["--mesh", "dp=2,tp=2", "--global-batch", "8"]);
    // No system has room for such a stack.
    let mut c = in_lab(&lab, &["run", "plan", "--steps", "1"]);
    let out = c.env("RUST_MIN_STACK", (1u64 << 46).to_string()).output().expect("it starts");
    let said = said(&out);
    assert_eq!(out.status.code(), Some(5), "{said}");
    for part in ["error[threads]: the thread of rank 0 did not start", "limit by 4", "ulimit -u"] {
        assert!(said.contains(part), "{said}");
    }
}

/// A command of a user who may have one thread; `None` if the tests' user cannot be made such.
fn with_one_thread(lab: &Lab, args: &[&str]) -> Option<Output> {
    let user = "exec setpriv --reuid=65534 --regid=65534 --clear-groups";
    let as_nobody = |args: &[&str]| {
        let mut c = Command::new("bash");
        let text =
            format!("ulimit -u 1; [ $(id -u) != 0 ] || {user} \"$0\" \"$@\"; exec \"$0\" \"$@\"");
        c.current_dir(&lab.0).args(["-c", &text, SHARDC]).args(args);
        c.output().expect("a shell")
    };
    let can = as_nobody(&["inspect", "plan"]).status.success();
    can.then(|| as_nobody(args))
}

#[test]
fn one_thread_compiles() {
    let lab = with_plan("one_thread", &["--mesh", "dp=2"]);
    let mha = format!("{FIXTURES}/llama_mha");
    let search = ["--mesh", "pp=2", "--global-batch", "8", "--schedule", "search"];
    let search = [&["compile", &mha, "--seq", "16"][..], &search].concat();
    for args in [&search[..], &["check", &mha, "--mesh", "tp=2", "--seq", "16"]] {
        let Some(out) = with_one_thread(&lab, args) else {
            skip(Tool::OtherUser, "who may read the plan, and has a limit of threads");
            return;
        };
        assert!(out.status.success(), "{args:?}: {}", said(&out));
        assert_eq!(out.stdout, lab.ok(args).stdout, "{args:?}");
    }
    let out = with_one_thread(&lab, &["run", "plan", "--kernels", "interpreted"]).expect("above");
    assert_eq!(out.status.code(), Some(5), "{}", said(&out));
    assert!(said(&out).contains("error[threads]: "), "{}", said(&out));
}

/// Writes a script that is a C compiler.
fn compiler(lab: &Lab, name: &str, text: &str) -> String {
    let path = lab.write(name, format!("#!/bin/sh\n{text}\n"));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("its own file");
    path.display().to_string()
}

/// A compiler that knows none of some flags, as gcc says it, and otherwise is the machine's.
fn without(lab: &Lab, name: &str, flags: &str) -> String {
    let refuse = "echo \"cc: error: unrecognized command-line option '$a'\" >&2; exit 1";
    let text = format!("for a; do case $a in {flags}) {refuse};; esac; done\nexec cc \"$@\"");
    compiler(lab, name, &text)
}

/// Trains with a C compiler and an empty cache; losses, and what was said.
fn train(lab: &Lab, cc: &str, more: &[&str]) -> (Option<i32>, Vec<String>, String) {
    let args = [&["run", "plan", "--steps", "2", "--format", "json"][..], more].concat();
    let cache = lab.path("cache");
    let _ = std::fs::remove_dir_all(&cache);
    let out =
        in_lab(lab, &args).env("CC", cc).env("SHARDC_CACHE", &cache).output().expect("starts");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let loss = |l: &str| l.split("\"loss\":").nth(1).map(|x| x.split(',').next().unwrap().into());
    let left = std::fs::read_dir(&cache).into_iter().flatten().flatten().map(|e| e.file_name());
    let left: Vec<_> = left.filter(|n| n.to_string_lossy().starts_with('.')).collect();
    assert!(left.is_empty(), "{cc} left {left:?}");
    (out.status.code(), text.lines().filter_map(loss).collect(), said(&out))
}

#[test]
fn compilers_with_fewer_flags() {
    let lab = with_plan("old_cc", &[]);
    let (code, want, said) = train(&lab, "cc", &[]);
    assert_eq!((code, want.len()), (Some(0), 2), "{said}");
    assert!(!said.contains("warning"), "{said}");
    // gcc 7 and gcc for other processors; clang 14 for aarch64; one that knows nothing extra.
    for (name, flags) in [
        ("gcc-7", "-mprefer-vector-width=*"),
        ("no-march", "-mprefer-vector-width=*|-march=native"),
        ("plain", "-m*|-ftree-vectorize|-fno-*|-W*"),
    ] {
        let (code, losses, said) = train(&lab, &without(&lab, name, flags), &[]);
        assert_eq!((code, &losses), (Some(0), &want), "{name}: {said}");
        assert!(!said.contains("warning"), "{name}: {said}");
    }
}

/// A kernel is compiled once, whatever plan it is of.
#[test]
fn kernels_that_plans_share_are_compiled_once() {
    let lab = with_plan("shared_kernels", &[]);
    let mha = format!("{FIXTURES}/llama_mha");
    lab.ok(&["compile", &mha, "--seq", "16", "--clip", "0.5", "-o", "other"]);
    let text = "for a; do case $a in *kernels.c) cat \"$a\" >>all.c; echo '// end' >>all.c;; esac; done\nexec cc \"$@\"";
    let (cc, cache) = (compiler(&lab, "shows", text), lab.path("cache"));
    for plan in ["plan", "other", "plan", "other"] {
        let args = ["run", plan, "--steps", "1", "--kernels", "compiled"];
        let mut c = in_lab(&lab, &args);
        let out = c.env("CC", &cc).env("SHARDC_CACHE", &cache).output().expect("starts");
        assert!(out.status.success(), "{}", said(&out));
    }
    let all = std::fs::read_to_string(lab.path("all.c")).expect("it was started");
    let objects: Vec<&str> = all.split("// end").map(str::trim).filter(|t| !t.is_empty()).collect();
    assert_eq!(objects.len(), 2, "one for each plan, once");
    let functions = |t: &str| t.lines().filter(|l| l.starts_with("void rows_")).count();
    let mut names: Vec<&str> = all.lines().filter(|l| l.starts_with("void rows_")).collect();
    let compiled = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), compiled, "a kernel is in both objects");
    let [first, second] = [functions(objects[0]), functions(objects[1])];
    assert!((1..first).contains(&second), "{first} and {second} kernels");
}

/// Objects that others can have put into the cache: a folder that they can write is not used, and an object
/// that is not as it was written, can be written by others, or is a link to one, is made again.
#[test]
fn planted_objects_do_not_run() {
    let lab = with_plan("planted", &[]);
    let (cache, mode) = (lab.path("cache"), <std::fs::Permissions as PermissionsExt>::from_mode);
    let args = ["run", "plan", "--steps", "2", "--format", "json", "--kernels", "compiled"];
    let run = || in_lab(&lab, &args).env("SHARDC_CACHE", &cache).output().expect("starts");
    let whole = || {
        let out = run();
        assert!(out.status.success(), "{}", said(&out));
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        text.lines().map(|l| l.split(",\"ms\"").next().unwrap().to_string()).collect::<Vec<_>>()
    };
    let want = whole();
    let objects = std::fs::read_dir(&cache).expect("a cache").map(|e| e.expect("a file").path());
    let object = objects.into_iter().find(|p| p.extension().is_some_and(|x| x == "so"));
    let (object, planted) = (object.expect("an object"), lab.path("planted.so"));
    // It says so when it is loaded.
    let text = "#include <unistd.h>\n__attribute__((constructor)) void f() { _exit(77); }\n";
    let source = lab.write("planted.c", text);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&planted).arg(&source);
    assert!(cc.status().expect("a compiler").success());
    let before = std::fs::read(&object).expect("an object");
    std::fs::copy(&planted, &object).expect("planted");
    assert_eq!(whole(), want, "another object");
    assert_eq!(std::fs::read(&object).expect("an object").len(), before.len());
    // With the hash of what is there, but as others leave it.
    let sum = std::path::PathBuf::from(format!("{}.blake3", object.display()));
    let hash = blake3::hash(&std::fs::read(&planted).expect("planted")).to_hex();
    std::fs::write(&sum, hash.as_bytes()).expect("a sum");
    std::fs::copy(&planted, &object).expect("planted");
    std::fs::set_permissions(&object, mode(0o777)).expect("a mode");
    assert_eq!(whole(), want, "an object of others");
    std::fs::write(&sum, hash.as_bytes()).expect("a sum");
    std::fs::remove_file(&object).expect("removed");
    std::os::unix::fs::symlink(&planted, &object).expect("a link");
    assert_eq!(whole(), want, "a link");
    // What would run, did nobody look: the same object, put there by this very user.
    std::fs::write(&sum, hash.as_bytes()).expect("a sum");
    std::fs::remove_file(&object)
        .and_then(|()| std::fs::copy(&planted, &object).map(drop))
        .expect("planted");
    std::fs::set_permissions(&object, mode(0o700)).expect("a mode");
    assert_eq!(
        run().status.code(),
        Some(77),
        "the planted object does nothing: this test shows nothing"
    );
    std::fs::set_permissions(&cache, mode(0o770)).expect("a mode");
    let out = run();
    assert_eq!(out.status.code(), Some(5), "{}", said(&out));
    assert!(said(&out).contains("chmod go-w"), "{}", said(&out));
}

/// That processes have been ended, those that nobody has waited for too. What is killed ends when its core is free.
fn are_ended(pids: &str) {
    let lives = |pid: &str| {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        state.is_ok_and(|s| !s.contains(") Z "))
    };
    let since = std::time::Instant::now();
    while pids.split_whitespace().any(lives) {
        assert!(since.elapsed().as_secs() < 20, "one of {pids} goes on");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// A run that is interrupted while its kernels are compiled ends the compiler with all that it started, and leaves
/// nothing of it.
#[test]
fn an_interrupt_ends_the_compiler_too() {
    let lab = with_plan("interrupted_cc", &[]);
    let text = format!(
        "[ \"$1\" = --version ] && exit; sleep 1000 & echo $$ $! >\"{0}.new\"; mv \"{0}.new\" \"{0}\"; wait",
        lab.path("started").display()
    );
    let cc = compiler(&lab, "sleeps", &text);
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let mut c = in_lab(&lab, &["run", "plan", "--steps", "1", "--kernels", "compiled"]);
        c.env("CC", &cc).env("SHARDC_CACHE", lab.path("cache"));
        let mut run = c.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        let started = loop {
            if let Ok(text) = std::fs::read_to_string(lab.path("started")) {
                break text;
            }
            assert!(run.try_wait().expect("a child").is_none(), "it ended");
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        let kill = ["-s", signal, &run.id().to_string()];
        assert!(Command::new("kill").args(kill).status().expect("kill").success());
        assert_eq!(run.wait().expect("it ends").code(), Some(status));
        are_ended(&started);
        let left = std::fs::read_dir(lab.path("cache")).expect("a folder").count();
        assert_eq!(left, 0, "something is left in the cache");
        std::fs::remove_file(lab.path("started")).expect("written");
    }
}

/// A compilation that is interrupted leaves no programs, nor the folder that it made for them; it ends by the signal.
#[test]
fn an_interrupt_leaves_no_programs() {
    use std::os::unix::process::ExitStatusExt as _;
    let lab = Lab::new("interrupted");
    let large = lab.config("llama_mha", serde_json::json!({ "num_hidden_layers": 400 }));
    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let args = ["compile", &large, "--seq", "16", "--dump-all", "dump"];
        let mut c = in_lab(&lab, &args);
        let mut run = c.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        while !lab.path("dump/01-experts.ir").exists() {
            assert!(run.try_wait().expect("a child").is_none(), "it ended");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let kill = ["-s", signal, &run.id().to_string()];
        assert!(Command::new("kill").args(kill).status().expect("kill").success());
        assert_eq!(run.wait().expect("it ends").signal(), Some(number));
        assert_eq!(lab.names(), [lab.path("config.json")]);
    }
}

/// What a compiler that is ended has started ends too, and nothing that they wrote is left.
#[test]
fn a_compiler_is_ended_with_all_that_it_started() {
    let lab = with_plan("endless_cc", &[]);
    let files = "echo x >\"${TMPDIR:-/tmp}/part.s\"; echo x >\"$TMPDIR/part.o\"";
    let text = format!(
        "[ \"$1\" = --version ] && exit; sleep 1000 & echo $! >\"{}\"; {files}; wait",
        lab.path("started").display()
    );
    let (cc, tmp) = (compiler(&lab, "starts", &text), lab.path("tmp"));
    std::fs::create_dir(&tmp).expect("a folder");
    let mut c = in_lab(&lab, &["run", "plan", "--steps", "1", "--timeout", "5"]);
    c.env("CC", &cc).env("SHARDC_CACHE", lab.path("cache")).env("TMPDIR", &tmp);
    let out = c.output().expect("starts");
    assert!(said(&out).contains("without end"), "{}", said(&out));
    let started = std::fs::read_to_string(lab.path("started")).expect("it ran");
    are_ended(&started);
    for dir in ["tmp", "cache"] {
        let left: Vec<_> = std::fs::read_dir(lab.path(dir)).expect("a folder").flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn compilers_that_fail() {
    let lab = with_plan("bad_cc", &[]);
    let want = train(&lab, "cc", &[]).1;
    let write = "while [ \"$1\" != -o ]; do shift; done; echo x >\"$2\"";
    let bad = [
        ("nowhere/cc".to_string(), "does not start"),
        (compiler(&lab, "fails", "exit 3"), "exit status: 3"),
        (without(&lab, "no-fpic", "-fPIC"), "-fPIC"),
        (compiler(&lab, "nothing", "exit 0"), "writes nothing"),
        (compiler(&lab, "garbage", write), "do not load"),
        (compiler(&lab, "endless", "exec yes error >&2"), "without end"),
        (compiler(&lab, "hangs", "[ \"$1\" = --version ] || exec sleep 1000"), "without end"),
    ];
    for (cc, why) in bad {
        let (code, losses, said) = train(&lab, &cc, &["--timeout", "3"]);
        assert_eq!((code, &losses), (Some(0), &want), "{cc}: {said}");
        assert!(said.contains("warning[c-compiler]: ") && said.contains(why), "{cc}: {said}");
        assert!(said.contains("kernels are interpreted"), "{cc}: {said}");
    }
    // What is asked for by name is not replaced; what needs no compiler says nothing.
    let (code, _, said) = train(&lab, "nowhere/cc", &["--kernels", "compiled"]);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("error[c-compiler]: "), "{said}");
    let (code, losses, said) = train(&lab, "nowhere/cc", &["--kernels", "interpreted"]);
    assert_eq!((code, losses), (Some(0), want), "{said}");
    assert!(!said.contains("warning"), "{said}");
}
