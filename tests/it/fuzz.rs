//! Strangers' files and words against the real command: mutants of all that it reads, each a run of its
//! own under limits. Whatever is wrong gets a diagnostic: no panic, no signal, no run of more than 5 s of
//! processor time or 1 GiB of memory, and where a hash covers the file no result but the one before.
//! `fuzz/plans.rs` has plans that lie, under guard pages.
//!
//! Every base ends with status 0 before it is mutated. `FUZZ_RUNS` (300), `FUZZ_SECONDS` (`.ci/nightly` has 600) or both,
//! `FUZZ_WORKERS` (as many as cores) and `SEED` say how many or how long, how many at once and which: `.ci/fuzz SEED RUNS`.
//! `FUZZ_ONLY` has a part of the names of targets that are wanted. `FUZZ_ONE` is one of the runs alone, by the words that its defect has. `SHARDC_BIN` names another build of the
//! command. A defect is kept in the folder of the test with what it needs. Its own test program: it needs the command,
//! and nothing else that takes long to build.

mod fuzz {
    pub mod archive;
    pub mod drawn;
    pub mod edits;
    mod found;
    pub mod limits;
    pub mod mutate;
    pub mod plans;
    pub mod programs;
}

use fuzz::archive::program;
use fuzz::drawn::{Drawn, PLANS, Source};
use fuzz::limits::{self, Ran};
use fuzz::mutate::{Draw, bytes, words};
use fuzz::plans::believed;
use shardc_ir::samples::Sample;
use shardc_testing::nightly;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// What is mutated.
enum What {
    /// A file, by its path.
    File(&'static str),
    /// The program in an archive, by the path of that.
    Program(&'static str),
    /// A file of a plan, whose hashes are made anew afterwards, of this plan.
    Sealed(&'static str, &'static str),
    /// One word of the command, by its number.
    Word(usize),
    /// The values of the variables.
    Variables,
    /// All of the command, and what it finds.
    All(Source),
}

/// A command that reads something.
struct Target {
    name: &'static str,
    command: &'static str,
    what: What,
    /// A hash covers the file: no other result than before.
    covered: bool,
    variables: &'static [(&'static str, &'static str)],
}

const fn file(name: &'static str, command: &'static str, path: &'static str) -> Target {
    Target { name, command, what: What::File(path), covered: false, variables: &[] }
}
const fn covered(name: &'static str, command: &'static str, path: &'static str) -> Target {
    Target { covered: true, ..file(name, command, path) }
}
const fn sealed(path: &'static str) -> Target {
    let what = What::Sealed(path, "plan");
    Target { name: "plan, hashes recomputed", what, ..file("", RUN, "") }
}
const fn archive(command: &'static str, path: &'static str) -> Target {
    Target { what: What::Program(path), ..file("archive's program (.pt2)", command, "") }
}
const fn word(name: &'static str, command: &'static str, number: usize) -> Target {
    Target { what: What::Word(number), ..file(name, command, "") }
}
const fn drawn(name: &'static str, source: Source) -> Target {
    Target { what: What::All(source), ..file(name, "--version", "") }
}
const RUN: &str = "run plan --steps 1 --threads 1 --kernels interpreted --format json";
const RESUME: &str =
    "run plan --steps 2 --threads 1 --kernels interpreted --format json --resume ckpt";

#[cfg(feature = "tokenizers")]
const CHATS: &str = "data chat/test.jsonl --tokenizer chat --seq 32 --too-long split --show 3";
#[cfg(feature = "tokenizers")]
const GENERATE: &str = "generate chat --chat Hi --max-new 3 --kernels interpreted --threads 1";

/// All targets; what reads text by a tokenizer needs that feature.
const TARGETS: &[Target] = &[
    file("config.json", "check model --seq 8", "model/config.json"),
    file(
        "index",
        "run whole --steps 1 --threads 1 --weights cut",
        "cut/model.safetensors.index.json",
    ),
    file(
        "safetensors",
        "run plan --steps 1 --threads 1 --weights model",
        "model/model.safetensors",
    ),
    file("text (.ir)", "check model.ir --seq 8", "model.ir"),
    file("shardc.toml", "check asked/shardc.toml --seq 8", "asked/shardc.toml"),
    file(
        "machine (.toml)",
        "check model --mesh tp=2 --shard auto --hardware machine.toml --seq 8",
        "machine.toml",
    ),
    file(
        "schedule (.csv)",
        "check model --mesh pp=2 --microbatch 1 --schedule order.csv --seq 8 --global-batch 2",
        "order.csv",
    ),
    file("archive (.pt2)", "check toy.pt2", "toy.pt2"),
    archive("check llama.pt2 --mesh tp=2", "llama.pt2"),
    archive("check bert_padded.pt2", "bert_padded.pt2"),
    archive("check picture.pt2", "picture.pt2"),
    covered("plan.json", RUN, "plan/plan.json"),
    covered("plan's model.ir", RUN, "plan/model.ir"),
    covered("plan's options.toml", RUN, "plan/options.toml"),
    covered("plan's programs", RUN, "plan/programs/all.ir"),
    covered("plan's schedule.csv", RUN, "plan/schedule.csv"),
    covered("plan's weights.json", RUN, "plan/weights.json"),
    covered("plan's config.json", RUN, "plan/config.json"),
    sealed("plan/programs/all.ir"),
    sealed("plan/plan.json"),
    sealed("plan/options.toml"),
    sealed("plan/schedule.csv"),
    sealed("plan/weights.json"),
    sealed("plan/config.json"),
    sealed("plan/model.ir"),
    covered("checkpoint's index", RESUME, "ckpt/step-00000001/index.json"),
    covered("checkpoint's piece", RESUME, "ckpt/step-00000001/rank-00000.safetensors"),
    covered(
        "checkpoint's plan",
        "reshard ckpt --to hf -o out",
        "ckpt/step-00000001/plan/plan.json",
    ),
    file(
        "tokens (.npy)",
        "run words --steps 1 --threads 1 --kernels interpreted --data data/row.npy",
        "data/row.npy",
    ),
    file(
        "tokens (.bin)",
        "run words --steps 1 --threads 1 --kernels interpreted --data data/mega.bin",
        "data/mega.bin",
    ),
    file(
        "tokens (.idx)",
        "run words --steps 1 --threads 1 --kernels interpreted --data data/mega.bin",
        "data/mega.idx",
    ),
    file(
        "batch",
        "run batch --steps 1 --threads 1 --kernels interpreted --batch batch.safetensors",
        "batch.safetensors",
    ),
    #[cfg(feature = "tokenizers")]
    file(
        "tokenizer.json",
        "run words --steps 1 --threads 1 --kernels interpreted --data text:data/tokenizer/one.txt --tokenizer data/tokenizer",
        "data/tokenizer/tokenizer.json",
    ),
    #[cfg(feature = "tokenizers")]
    file("chats (.jsonl)", CHATS, "chat/test.jsonl"),
    #[cfg(feature = "tokenizers")]
    file("chat template", CHATS, "chat/chat_template.jinja"),
    #[cfg(feature = "tokenizers")]
    file("chat tokenizer", CHATS, "chat/tokenizer.json"),
    #[cfg(feature = "tokenizers")]
    file("tokenizer_config.json", CHATS, "chat/tokenizer_config.json"),
    #[cfg(feature = "tokenizers")]
    file("generate's tokenizer", GENERATE, "chat/tokenizer.json"),
    #[cfg(feature = "tokenizers")]
    file("generation_config.json", GENERATE, "chat/generation_config.json"),
    file(
        "adapter_config.json",
        "check model --seq 8 --lora-from adapter",
        "adapter/adapter_config.json",
    ),
    file(
        "adapter",
        "run adapted --steps 1 --threads 1 --kernels interpreted --weights model --adapter adapter",
        "adapter/adapter_model.safetensors",
    ),
    file("times", "inspect pipe --timeline --times times.json", "times.json"),
    word("--mesh", "check model --seq 8 --mesh dp=2,tp=2", 5),
    word(
        "--shard",
        "check model --seq 8 --mesh dp=2,tp=2 --shard model.layers.*.mlp.up_proj.weight=tp,-",
        7,
    ),
    word("--layers", "check model --seq 8 --mesh pp=2 --layers Et|tL", 7),
    word("--schedule", "check model --seq 8 --mesh pp=2 --schedule zb-h1", 7),
    word("--recompute", "check model --seq 8 --recompute full", 5),
    Target {
        what: What::Variables,
        variables: &[
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        ],
        ..file("launcher's variables", RUN, "")
    },
    drawn("texts, with any flags", Source::Text),
    drawn("programs of passes", Source::From),
    drawn("plans, in any command", Source::Plan),
    drawn("launchers' variables, any", Source::Launcher),
    drawn("update rules", Source::Rules),
];
/// Of what is drawn as a whole, so many runs to one of each other target.
const MORE: usize = 12;

/// What `f` of a worker makes of 0, 1, 2 and so on, which workers take in turn as long as there are `more`.
fn each<T: Send>(
    workers: usize,
    more: impl Fn(usize) -> bool + Sync,
    f: impl Fn(usize, usize) -> T + Sync,
) -> Vec<T> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = |worker: usize| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if !more(i) {
                return;
            }
            let one = f(worker, i);
            made.lock().expect("a lock").insert(i, one);
        }
    };
    std::thread::scope(|s| {
        let work = &work;
        let all: Vec<_> = (0..workers).map(|w| s.spawn(move || work(w))).collect();
        all.into_iter().for_each(|w| w.join().expect("a worker"));
    });
    made.into_inner().expect("a lock").into_values().collect()
}

/// Folders of so many workers, each with all bases, which are made once.
fn bases(workers: usize) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    let _ = std::fs::remove_dir_all(&root);
    let dirs: Vec<PathBuf> = (0..workers).map(|w| root.join(w.to_string())).collect();
    let dir = &dirs[0];
    let copy = |from: &str, to: &str, names: &[&str]| {
        std::fs::create_dir_all(dir.join(to)).expect("a folder");
        for name in names {
            let from = Path::new(FIXTURES).join(from).join(name);
            std::fs::copy(&from, dir.join(to).join(name))
                .unwrap_or_else(|e| panic!("{from:?}: {e}"));
        }
    };
    let model = ["config.json", "model.safetensors"];
    copy("llama_mha", "model", &model);
    copy("llama_mha", "asked", &model);
    copy("llama_mha", "", &["batch.safetensors"]);
    let cut = ["alpha", "model-z", "part-2_of_3"].map(|n| format!("{n}.safetensors"));
    let cut: Vec<&str> = cut.iter().map(|n| n.as_str()).collect();
    copy(
        "llama_gqa",
        "cut",
        &[&cut[..], &["config.json", "model.safetensors.index.json"]].concat(),
    );
    copy("data", "data", &["mega.bin", "mega.idx", "row.npy"]);
    copy("data/tokenizer", "data/tokenizer", &["tokenizer.json", "one.txt"]);
    copy("lora/llama", "adapter", &["adapter_config.json", "adapter_model.safetensors"]);
    let chat =
        ["config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"];
    let words = ["tokenizer.json", "tokenizer_config.json"];
    copy("../../examples/tiny-chat/my-model", "chat", &[&chat[..], &words].concat());
    copy("../../examples/tiny-chat", "chat", &["test.jsonl"]);
    let archives = ["toy.pt2", "llama.pt2", "bert_padded.pt2", "picture.pt2"];
    copy("../imports", "", &archives);
    copy("llama_mha", "large", &["config.json"]);
    copy("../../cost/hardware", "", &["a100-40.toml"]);
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).expect("a file");
    let config = std::fs::read_to_string(dir.join("large/config.json")).expect("a config");
    write("large/config.json", &config.replace("\"vocab_size\": 64", "\"vocab_size\": 600"));
    write(
        "asked/shardc.toml",
        "model = \".\"\nmesh = \"dp=2,tp=2\"\nglobal-batch = 4\nlr = 1e-3\nshard = [\"*.up_proj.weight=tp,-\"]\n",
    );
    std::fs::rename(dir.join("a100-40.toml"), dir.join("machine.toml")).expect("renamed");
    let mut lies = vec![];
    for (plan, fixture, flags) in PLANS {
        copy(fixture, fixture, &["config.json"]);
        lies.push(format!("compile {fixture} {flags} -o {plan} --dump-all {plan}-dumps"));
    }
    for line in lies.iter().map(String::as_str).chain([
        "compile model --seq 8 --global-batch 2 --mesh tp=2 -o plan",
        "compile cut --seq 8 --global-batch 2 -o whole",
        "compile large --seq 8 --global-batch 2 -o words",
        "compile model --seq 16 -o batch",
        "compile model --seq 8 --global-batch 2 --lora-from adapter -o adapted",
        "compile model --seq 8 --global-batch 2 --mesh pp=2 --microbatch 1 -o pipe",
        "run plan --steps 1 --kernels interpreted --save ckpt --save-every 1",
        "run pipe --steps 1 --kernels interpreted --trace times.json",
    ]) {
        let out = run(dir, &line.split(' ').collect::<Vec<_>>(), &[]);
        assert!(out.good(), "{line}: {}", out.err);
    }
    std::fs::copy(dir.join("plan/model.ir"), dir.join("model.ir")).expect("a copy");
    std::fs::copy(dir.join("pipe/schedule.csv"), dir.join("order.csv")).expect("a copy");
    std::fs::create_dir_all(dir.join("lie/programs")).expect("a folder");
    for other in &dirs[1..] {
        let copied = Command::new("cp").arg("-R").args([dir, other]).status().expect("cp");
        assert!(copied.success(), "a copy of {dir:?}");
    }
    dirs
}

fn run(dir: &Path, args: &[&str], variables: &[(&str, String)]) -> Ran {
    let mut c = Command::new(limits::shardc());
    c.args(args).envs(variables.iter().map(|(n, v)| (n, v)));
    limits::run(c, dir)
}

/// Runs by target and outcome, and what is wrong.
#[derive(Default)]
struct Tally {
    outcomes: BTreeMap<(usize, String), usize>,
    defects: Vec<String>,
    /// Most seconds of processor time and bytes of memory of a run.
    seconds: f64,
    resident: u64,
}

/// What is changed for a run: the command, files and their contents, and the plan whose hashes are made anew.
fn change(
    dir: &Path,
    t: &Target,
    samples: &[Sample],
    draw: &mut Draw,
) -> (Drawn, Option<&'static str>) {
    let mut d = Drawn {
        args: t.command.split(' ').map(String::from).collect(),
        variables: t.variables.iter().map(|(n, v)| (*n, v.to_string())).collect(),
        files: vec![],
        sealed: false,
    };
    let mut plan = None;
    match t.what {
        What::File(path) | What::Sealed(path, _) | What::Program(path) => {
            let own = std::fs::read(dir.join(path)).expect("a base");
            let new =
                if let What::Program(_) = t.what { program(&own, draw) } else { bytes(&own, draw) };
            if let What::Sealed(_, of) = t.what {
                plan = Some(of);
            }
            d.files.push((path.into(), new));
        }
        What::Word(i) => d.args[i] = words(&d.args[i], draw),
        What::Variables => {
            let i = draw.below(d.variables.len());
            d.variables[i].1 = words(&d.variables[i].1, draw);
        }
        What::All(source) => {
            d = source.draw(dir, samples, draw);
            plan = d.sealed.then_some("lie");
        }
    }
    // An environment cannot have it.
    d.variables.iter_mut().for_each(|v| v.1.retain(|c| c != '\0'));
    (d, plan)
}

/// One mutant of a target; its outcome, its run, and whether that is a defect.
fn mutant(
    dir: &Path,
    t: &Target,
    base: &str,
    samples: &[Sample],
    draw: &mut Draw,
) -> Option<(String, Ran, bool)> {
    let (d, plan) = change(dir, t, samples, draw);
    let mut before = vec![];
    let head = plan.map(|plan| (format!("{plan}/plan.json"), None));
    let paths = d.files.iter().map(|(path, new)| (path.clone(), Some(new)));
    for (path, new) in head.into_iter().chain(paths) {
        let path = dir.join(path);
        let own = std::fs::read(&path).ok();
        if !matches!(t.what, What::All(_)) && new.is_some() && own.as_ref() == new {
            return None;
        }
        if let Some(new) = new {
            std::fs::write(&path, new).expect("a mutant");
        }
        before.push((path, own));
    }
    // A mutant of a plan.json that is none stays as it is.
    let made = plan.map(|p| {
        std::panic::catch_unwind(|| {
            believed(&dir.join(p));
        })
    });
    let panics = made.is_some_and(|made| made.is_err());
    let args: Vec<&str> = d.args.iter().map(String::as_str).collect();
    let out = run(dir, &args, &d.variables);
    let other = t.covered && out.good() && out.results() != base;
    let defect = panics || other || out.defect();
    let outcome = if other { "0 with another result".into() } else { out.outcome.clone() };
    if defect {
        let kept = dir.parent().expect("a folder").join("defects");
        std::fs::create_dir_all(&kept).expect("a folder");
        let name = format!("{}-{}", t.name.replace(['/', ' ', '\''], "_"), draw.seed());
        let variables = &d.variables;
        let mut all = format!("{args:?}\n{variables:?}\n{outcome}\n{}\n", out.err).into_bytes();
        for (path, _) in &before {
            all.extend_from_slice(format!("--- {}\n", path.display()).as_bytes());
            all.extend(std::fs::read(path).unwrap_or_default());
        }
        std::fs::write(kept.join(name), all).expect("what was wrong");
    }
    // In reverse: the first that was read is the last that is put back.
    for (path, own) in before.iter().rev() {
        match own {
            Some(own) => std::fs::write(path, own).expect("the base"),
            // A plan.json is there twice.
            None => drop(std::fs::remove_file(path)),
        }
    }
    for left in ["out", "shardc-failure"] {
        let _ = std::fs::remove_dir_all(dir.join(left));
    }
    for left in ["made.svg", "made.html"] {
        let _ = std::fs::remove_file(dir.join(left));
    }
    Some((outcome, out, defect))
}

/// Which target a run is of, by its place in a round of all, and how many there are in a round.
fn round() -> Vec<usize> {
    let is_drawn = |i: &usize| matches!(TARGETS[*i].what, What::All(_));
    let only = std::env::var("FUZZ_ONLY").unwrap_or_default();
    let wanted = (0..TARGETS.len()).filter(|&i| TARGETS[i].name.contains(&only));
    let (drawn, others): (Vec<usize>, Vec<usize>) = wanted.partition(is_drawn);
    // Those that take long are not all at the end.
    let mut all = vec![];
    for i in 0..MORE.max(others.len().div_ceil(4)) {
        all.extend(drawn.iter().filter(|_| i < MORE));
        all.extend(others.iter().skip(4 * i).take(4));
    }
    all
}

#[test]
fn no_mutant_does_more_than_be_refused() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let nightly = if nightly() { Some(600) } else { None };
    let seconds = number("FUZZ_SECONDS").or(nightly.filter(|_| number("FUZZ_RUNS").is_none()));
    let runs = number("FUZZ_RUNS").unwrap_or(300) as usize;
    let seed = number("SEED").unwrap_or(1);
    let cores = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    let workers = number("FUZZ_WORKERS").map_or(cores, |n| n as usize);
    let tally = Mutex::new(Tally::default());
    let dirs = bases(workers);
    let samples = shardc_ir::samples::all();
    let results = each(
        workers,
        |i| i < TARGETS.len(),
        |worker, i| {
            let (dir, t) = (&dirs[worker], &TARGETS[i]);
            let own: Vec<(&str, String)> =
                t.variables.iter().map(|(n, v)| (*n, v.to_string())).collect();
            let out = run(dir, &t.command.split(' ').collect::<Vec<_>>(), &own);
            let _ = std::fs::remove_dir_all(dir.join("out"));
            assert!(out.good(), "{}: {}", t.name, out.err);
            out.results()
        },
    );
    let (start, round) = (Instant::now(), round());
    let one = std::env::var("FUZZ_ONE").ok();
    // Every target has one mutant, whatever time there is; so many runs and so many seconds are ended by what is first.
    let in_time = |s: u64| start.elapsed() < Duration::from_secs(s);
    let more = |n: usize| match seconds {
        Some(s) => {
            n < round.len() || in_time(s) && number("FUZZ_RUNS").is_none_or(|all| (n as u64) < all)
        }
        None => n < runs,
    };
    each(workers, more, |worker, n| {
        let (of, i) = (n / round.len(), round[n % round.len()]);
        let (t, mut draw) = (&TARGETS[i], Draw::new(seed, of as u64, (n % round.len()) as u64));
        if one.as_ref().is_some_and(|one| *one != draw.seed()) {
            return;
        }
        let made = mutant(&dirs[worker], t, &results[i], &samples, &mut draw);
        let Some((outcome, ran, defect)) = made else { return };
        let mut all = tally.lock().expect("a lock");
        all.seconds = all.seconds.max(ran.seconds);
        all.resident = all.resident.max(ran.resident);
        *all.outcomes.entry((i, outcome.clone())).or_default() += 1;
        if defect {
            all.defects.push(format!("{}: {outcome}, {}", t.name, draw.seed()));
        }
    });
    let tally = tally.into_inner().expect("a lock");
    report(&tally, seed);
    // One that nobody reads would be fine whatever is in it.
    let refused = |i: usize| tally.outcomes.iter().any(|((t, o), _)| *t == i && o != "0");
    let runs = |i: usize| tally.outcomes.iter().filter(|x| x.0.0 == i).map(|x| x.1).sum::<usize>();
    for (i, t) in TARGETS.iter().enumerate() {
        assert!(runs(i) < 100 || refused(i), "no mutant of {} is refused: is it read?", t.name);
    }
    assert!(tally.defects.is_empty(), "{} defects: {:#?}", tally.defects.len(), tally.defects);
}

/// The table of docs/safety.md: runs by target and outcome.
fn report(tally: &Tally, seed: u64) {
    let mut rows: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for ((i, outcome), n) in &tally.outcomes {
        *rows.entry(TARGETS[*i].name).or_default().entry(outcome).or_default() += n;
    }
    let total: usize = tally.outcomes.values().sum();
    let (seconds, resident) = (tally.seconds, tally.resident >> 20);
    println!("{total} mutants, seed {seed}, at most {seconds:.1} s and {resident} MiB");
    println!("| what | mutants | by exit status |\n|---|---|---|");
    for (name, by) in rows {
        let each: Vec<String> = by.iter().map(|(o, n)| format!("{o}: {n}")).collect();
        println!("| {name} | {} | {} |", by.values().sum::<usize>(), each.join(", "));
    }
}
