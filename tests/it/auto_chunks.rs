//! `--loss-chunks auto`: what it promises of numbers of chunks is compiled again here, number by number.

use crate::fixture::{options, train_and_compare};
use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};
use shardc::Output;
use shardc::search::Prices;
use shardc_ir::diag::Result;
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order};
use shardc_testing::taken;
use std::path::{Path, PathBuf};

/// The numbers that documentation says are tried.
const NUMBERS: [usize; 6] = [1, 2, 4, 8, 16, 24];

/// A config of a llama with so many tokens in its vocabulary.
fn config(lab: &Lab, vocab: usize, tied: bool) -> PathBuf {
    let text = std::fs::read(format!("{FIXTURES}/llama_gqa/config.json")).expect("the fixture");
    let mut c: Json = serde_json::from_slice(&text).expect("JSON");
    for (k, v) in [("vocab_size", vocab), ("max_position_embeddings", 64)] {
        c[k] = json!(v);
    }
    c["tie_word_embeddings"] = json!(tied);
    lab.write("config.json", c.to_string())
}

fn compiled(model: &Path, o: &Options) -> Result<Output> {
    shardc::compile(model, o, &mut |_, _| {})
}

fn auto(model: &Path, o: &Options) -> Result<Output> {
    compiled(model, &Options { loss_chunks: LossChunks::Auto, ..o.clone() })
}

fn of(n: usize, o: &Options) -> Options {
    Options { loss_chunks: LossChunks::Of(n), ..o.clone() }
}

fn chosen(done: &Output) -> usize {
    done.stored.options.loss_chunks.number().unwrap_or_else(|e| panic!("{e}"))
}

/// What a rank needs with every number.
fn peaks(model: &Path, o: &Options) -> Vec<usize> {
    let peak = |n: &usize| {
        let done = compiled(model, &Options { memory: None, ..of(*n, o) });
        done.unwrap_or_else(|e| panic!("{n}: {e}")).stored.plan.peak_bytes()
    };
    NUMBERS.iter().map(peak).collect()
}

/// The number that the rule without a limit asks for: the first behind which nothing saves over 1 %.
fn asked_for(peaks: &[usize]) -> usize {
    let saves = |i: usize| peaks[i + 1..].iter().any(|&p| (p as f64) < 0.99 * peaks[i] as f64);
    NUMBERS[(0..peaks.len()).find(|&i| !saves(i)).expect("the last one")]
}

/// Without a limit and with limits at, above and below what each number needs: the number is the one that the rule
/// gives, the plan that of this number by hand, and the options hold the number. Returns what is chosen without a
/// limit, and peaks.
fn is_exact(model: &Path, o: &Options) -> (usize, Vec<usize>) {
    let peaks = peaks(model, o);
    let done = auto(model, o).unwrap_or_else(|e| panic!("{e}"));
    let free = chosen(&done);
    assert_eq!(free, asked_for(&peaks), "{peaks:?}");
    let by_hand = compiled(model, &of(free, o)).unwrap_or_else(|e| panic!("{e}"));
    let text = |p: &Plan| text::print(&p.module);
    assert_eq!(text(&done.stored.plan), text(&by_hand.stored.plan));
    assert_eq!(done.stored.options, by_hand.stored.options);
    let said = format!("loss chunks: {free}: a rank needs ");
    assert!(done.notes.iter().any(|n| n.starts_with(&said)), "{:?}", done.notes);
    let limits = peaks.iter().flat_map(|p| [p - 1, *p]).enumerate();
    for (_, limit) in limits.filter(|(i, _)| taken(*i, 3)) {
        let fits = NUMBERS.iter().zip(&peaks).find(|x| *x.1 <= limit);
        let got = auto(model, &Options { memory: Some(limit), ..o.clone() });
        match (fits, got) {
            (Some((n, peak)), Ok(done)) => {
                assert_eq!(chosen(&done), *n, "{limit} of {peaks:?}");
                assert_eq!(done.stored.plan.peak_bytes(), *peak);
            }
            (None, Err(d)) => {
                assert_eq!(d.code, "out-of-memory", "{d}");
                let least = peaks.iter().min().expect("numbers").to_string();
                assert!(d.message.contains(&least), "{d}");
            }
            (fits, got) => panic!("{fits:?}, {limit} of {peaks:?}: {:?}", got.map(|d| d.notes)),
        }
    }
    (free, peaks)
}

fn wide(mesh: &[(&str, usize)], microbatch: usize) -> Options {
    Options { seq: 64, global_batch: 8, observe: false, ..options(mesh, false, microbatch) }
}

/// Logits that are most of the memory are made in chunks, and a rank needs less; where they are not, they are whole.
#[test]
fn chunks_are_as_many_as_memory_asks_for() {
    let lab = Lab::new("auto-chunks");
    let model = config(&lab, 4096, false);
    let half = |o: Options| Options { dtype: DType::BF16, grad_dtype: DType::BF16, ..o };
    let named = |name: &str| Order::Named(name.into());
    let cp_mode = CpMode::Ring;
    let cases = [
        wide(&[], 8),
        half(wide(&[], 8)),
        Options { sp: true, ..wide(&[("dp_replicate", 2), ("tp", 2)], 4) },
        Options { zero: 3, ..wide(&[("dp_shard", 2)], 4) },
        Options { cp_mode, recompute: Recompute::Full, ..wide(&[("cp", 2)], 8) },
        wide(&[("pp", 2)], 4),
        Options { schedule: named("zb-h1"), ..wide(&[("pp", 2)], 4) },
        half(Options { schedule: named("zb-v"), ..wide(&[("pp", 2)], 2) }),
    ];
    for (i, o) in cases.into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let (n, peaks) = is_exact(&model, &o);
        assert!(n > 1, "case {i}: {peaks:?}");
        let at = NUMBERS.iter().position(|&m| m == n).expect("one of them");
        assert!(peaks[at] * 100 < peaks[0] * 99, "case {i}: {n} of {peaks:?}");
    }
    let tied = Lab::new("auto-chunks-tied");
    let (n, peaks) = is_exact(&config(&tied, 4096, true), &wide(&[], 8));
    assert!(n > 1, "{peaks:?}");
    let few = Lab::new("auto-chunks-few");
    for o in [wide(&[], 8), wide(&[("pp", 3)], 1)] {
        let (n, peaks) = is_exact(&config(&few, 16, false), &o);
        assert_eq!(n, 1, "{peaks:?}");
    }
}

/// With the number that is chosen a fixture trains as its reference does, on any layout.
#[test]
fn numbers_stay_what_they_are() {
    let cases = [
        ("llama_gqa", options(&[], false, 8)),
        ("llama_bias_tied", options(&[("tp", 2)], true, 4)),
        ("gpt2", options(&[("dp_replicate", 2), ("pp", 2)], false, 2)),
    ];
    for (name, o) in cases {
        let model = PathBuf::from(FIXTURES).join(name);
        let o = Options { observe: false, ..o };
        let peaks = peaks(&model, &o);
        let least = *peaks.iter().min().expect("numbers");
        let done =
            auto(&model, &Options { memory: Some(least), ..o }).unwrap_or_else(|e| panic!("{e}"));
        let own = Options { memory: None, observe: true, ..done.stored.options.clone() };
        train_and_compare(name, &own);
    }
}

/// Archives and texts as any model.
#[test]
fn imports_and_texts_are_chosen_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, tokens) in [("tests/imports/llama.pt2", 8), ("examples/mlp.ir", 32)] {
        let o =
            Options { global_batch: 16, observe: false, seq: tokens, ..options(&[], false, 16) };
        let o = match name.ends_with("ir") {
            true => o,
            false => Options { global_batch: 8, microbatch: 8, ..o },
        };
        is_exact(&root.join(name), &o);
    }
}

/// A loss that is not made of chunks stays whole, with a warning; and so it does where nothing is trained.
#[test]
fn a_loss_that_cannot_be_cut_is_one() {
    let lab = Lab::new("auto-chunks-one-token");
    let model = config(&lab, 64, false);
    let o = Options { seq: 1, global_batch: 1, ..wide(&[], 1) };
    for memory in [None, Some(1 << 30)] {
        let done = auto(&model, &Options { memory, ..o.clone() }).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(chosen(&done), 1);
        let d = done.warnings.iter().find(|d| d.code == "no-effect").expect("a warning");
        let why = "--loss-chunks auto has no effect: the loss of this model is not made in chunks: a rank has one token";
        assert_eq!(d.message, why);
    }
    let infer = Options { mode: Mode::Infer, ..wide(&[], 8) };
    let done = auto(&model, &infer).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((chosen(&done), done.notes.len()), (1, 0));
    let args = ["compile", "config.json", "--mode", "infer", "--loss-chunks", "auto", "--seq", "8"];
    let said = String::from_utf8_lossy(&lab.ok(&args).stderr).into_owned();
    assert!(said.contains("--loss-chunks has no effect: nothing is trained"), "{said}");
    // What no number of chunks changes is said as without them.
    let uneven = Options { global_batch: 7, ..wide(&[], 2) };
    assert_eq!(auto(&model, &uneven).map(|_| ()).expect_err("7 rows").code, "batch-not-divisible");
}

/// Beside `--recompute fit` and `--schedule search` the cheapest of what these find with each number is taken.
#[test]
fn beside_other_searches_the_cheapest_is_taken() {
    let lab = Lab::new("auto-chunks-fit");
    let model = config(&lab, 1024, false);
    let fit = Options { recompute: Recompute::Fit, ..wide(&[], 8) };
    let search = Order::Named("search".into());
    let both =
        Options { schedule: search.clone(), recompute: Recompute::Fit, ..wide(&[("pp", 2)], 2) };
    let order = Options { schedule: search, ..wide(&[("pp", 2)], 2) };
    let plain = |o: &Options| Options {
        recompute: Recompute::None,
        schedule: Order::default(),
        ..o.clone()
    };
    for (i, o) in [fit.clone(), both, order.clone()].into_iter().enumerate() {
        let peaks = peaks(&model, &plain(&o));
        let least = *peaks.iter().min().expect("numbers");
        let limits = [peaks[0], peaks[0] - 1, least - least / 20];
        for (_, limit) in limits.into_iter().enumerate().filter(|(j, _)| taken(i + j, 3)) {
            let o = Options { memory: Some(limit), ..o.clone() };
            let cost = |p: &Plan| {
                let price = Prices::of(&o).and_then(|x| x.price(p, &[]));
                let price = price.unwrap_or_else(|e| panic!("{e}"));
                if i == 0 { price.work } else { price.step }
            };
            let each: Vec<(usize, f64)> = NUMBERS
                .iter()
                .filter_map(|&n| Some((n, cost(&compiled(&model, &of(n, &o)).ok()?.stored.plan))))
                .collect();
            let best = each.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1));
            match (best, auto(&model, &o)) {
                (None, Err(d)) => assert_eq!(d.code, "out-of-memory", "{d}"),
                (Some((n, least)), Ok(done)) => {
                    let plan = &done.stored.plan;
                    assert_eq!((chosen(&done), cost(plan)), (n, least), "{each:?}");
                    assert!(plan.peak_bytes() <= limit);
                    assert!(!shardc::search::searches(&done.stored.options));
                }
                (best, got) => panic!("{best:?}: {:?}", got.map(|d| d.notes)),
            }
        }
    }
    // Without a limit there is nothing to fit; a schedule is searched for all the same.
    assert_eq!(auto(&model, &fit).map(|_| ()).expect_err("no limit").code, "flag");
    let done = auto(&model, &order).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(done.notes.len(), 2, "{:?}", done.notes);
}

/// The whole way: flags, shardc.toml, a stored plan with the number, its proof and its numbers; words that are none.
#[test]
fn the_number_is_in_the_plan() {
    let lab = Lab::new("auto-chunks-plan");
    let model = config(&lab, 512, false);
    let model = model.file_name().expect("a name").to_string_lossy().into_owned();
    let sizes = ["--seq", "16", "--global-batch", "4", "--mesh", "tp=2"];
    let args =
        [&["compile", &model, "--loss-chunks", "auto", "-o", "p", "--prove", "yes"], &sizes[..]]
            .concat();
    let out = lab.ok(&args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("loss chunks: "), "{said}");
    let stored = std::fs::read_to_string(lab.path("p/options.toml")).expect("options");
    let line = stored.lines().find(|l| l.starts_with("loss_chunks = ")).expect("the number");
    let n: usize = line["loss_chunks = ".len()..].parse().expect("a number");
    assert!(n > 1, "{line}");
    lab.ok(&["verify", "p", "--numbers"]);
    let shown = lab.ok(&["inspect", "p", "--summary", "--format", "json"]);
    let shown: Json = serde_json::from_slice(&shown.stdout).expect("JSON");
    assert_eq!(shown["options"]["training"]["loss_chunks"], json!(n));
    let shown =
        String::from_utf8_lossy(&lab.ok(&["inspect", "p", "--summary"]).stdout).into_owned();
    assert!(shown.contains(&format!("loss chunks {n}")), "{shown}");
    for (value, is) in [("\"auto\"", n), ("3", 3)] {
        let toml = format!(
            "model = \"config.json\"\nmesh = \"tp=2\"\nseq = 16\nglobal-batch = 4\nloss-chunks = {value}\n"
        );
        lab.write("shardc.toml", toml);
        lab.ok(&["compile", "shardc.toml", "-o", "q"]);
        let stored = std::fs::read_to_string(lab.path("q/options.toml")).expect("options");
        assert!(stored.contains(&format!("loss_chunks = {is}\n")), "{stored}");
    }
    for bad in ["0", "25", "-1", "many", "AUTO", "1.5", "+4", ""] {
        let flag = format!("--loss-chunks={bad}");
        let said = lab.refuses(&[&["compile", &model, &flag], &sizes[..]].concat(), 2, "flag");
        assert!(said.contains("use 1 to 24 chunks, or auto"), "{said}");
    }
    for bad in ["0", "25", "-1", "\"many\"", "1.5", "true", "[2]"] {
        lab.write("shardc.toml", format!("model = \"config.json\"\nloss-chunks = {bad}\n"));
        let out = lab.shardc(&["compile", "shardc.toml", "-o", "r"]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{bad}: {said}");
        assert!(said.contains("loss-chunks") && !lab.path("r").exists(), "{bad}: {said}");
    }
    let args =
        [&["compile", &model, "--loss-chunks", "auto", "--memory", "300KiB"], &sizes[..]].concat();
    let said = lab.refuses(&args, 3, "out-of-memory");
    assert!(said.contains("= help: "), "{said}");
    // A single pass searches for nothing.
    lab.ok(&[&["compile", &model, "--dump-all", "d"], &sizes[..]].concat());
    let text = std::fs::read_dir(lab.path("d")).expect("programs").map(|e| e.expect("one").path());
    let text = text.map(|p| p.display().to_string());
    let text = text.into_iter().find(|p| p.contains("differentiate")).expect("the joint program");
    let args =
        [&["opt", &text, "--pass", "chunk-loss", "--loss-chunks", "auto"], &sizes[..]].concat();
    let said = lab.refuses(&args, 2, "flag");
    assert!(said.contains("not chosen yet"), "{said}");
    // Nor does what begins in the middle, whose program no search compiles.
    for search in [
        &["--loss-chunks", "auto"][..],
        &["--recompute", "fit", "--memory", "1GiB"],
        &["--schedule", "search"],
    ] {
        let from = ["compile", &model, "--from", "chunk-loss", &text];
        let said = lab.refuses(&[&from[..], search, &sizes].concat(), 2, "flag");
        assert!(said.contains("--from chunk-loss starts in the middle"), "{said}");
    }
}

/// What a pass before the first one would have to do is not silently left undone: with the flags of the program
/// it goes on.
#[test]
fn what_passes_would_do_that_do_not_run_is_refused() {
    let lab = Lab::new("begun");
    let model = format!("{FIXTURES}/llama_gqa");
    let compile = ["compile", &model, "--seq", "8"];
    let own = ["--loss-chunks", "2", "--dtype", "bf16"];
    lab.ok(&[&compile[..], &["--dump-all", "plain", "-o", "p"]].concat());
    lab.ok(&[&compile[..], &["--dump-all", "own", "-o", "q"], &own].concat());
    let names: Vec<&str> = shardc_passes::pipeline::names().collect();
    let before = |dir: &str, pass: &str| {
        let n = names.iter().position(|n| *n == pass).expect("a pass");
        format!("{dir}/{n:02}-{}.ir", names[n - 1])
    };
    for pass in ["summa", "split", "step", "group"] {
        let plain = before("plain", pass);
        for flag in [["--loss-chunks", "2"], ["--dtype", "bf16"]] {
            let args = [&compile[..], &["--from", pass, &plain, "-o", "r"], &flag].concat();
            let said = lab.refuses(&args, 2, "flag");
            assert!(said.contains(&format!("--> {}\n", flag[0])), "{said}");
            assert!(said.contains(&format!("--from {pass} starts behind")), "{said}");
        }
        let with = before("own", pass);
        lab.ok(&[&compile[..], &["--from", pass, &with, "-o", pass], &own].concat());
    }
    // The pass itself runs.
    let plain = before("plain", "chunk-loss");
    let from = ["--from", "chunk-loss", &plain, "-o", "r", "--loss-chunks", "2"];
    lab.ok(&[&compile[..], &from].concat());
}
