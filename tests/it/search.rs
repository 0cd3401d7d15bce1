//! Searches of the driver: `--schedule search`, `--recompute fit`, and the ways out of a plan that
//! does not fit. What they promise is compiled again here.

use crate::fixture::{Fixture, compile, options, session};
use crate::lab::Lab;
use serde_json::{Value as Json, json};
use shardc::machine::device;
use shardc::search::Prices;
use shardc_cost::plan::launch::Work;
use shardc_ir::diag::Result;
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::hardware::Hardware;
use shardc_ir::plan::Plan;
use shardc_ir::schedule::parse_csv;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order, Transport};
use shardc_passes::schedule::{Named, make};
use shardc_runtime::StepBatch;
use shardc_testing::{samples, taken};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const DEEP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama_deep");

/// A config of a deep and narrow llama.
fn config(layers: usize) -> Json {
    let text = std::fs::read(Path::new(DEEP).join("config.json")).expect("the fixture");
    let mut c: Json = serde_json::from_slice(&text).expect("JSON");
    for (k, v) in [("num_hidden_layers", layers), ("max_position_embeddings", 512)] {
        c[k] = json!(v);
    }
    c
}

/// A folder of one test with the config in it.
fn lab(name: &str, layers: usize) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("search").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder for the test");
    std::fs::write(dir.join("config.json"), config(layers).to_string()).expect("a config");
    dir
}

/// Compiles a fixture through the driver, searches included.
fn driver(o: &Options) -> Result<(Plan, Vec<String>)> {
    let done = shardc::compile(Path::new(DEEP), o, &mut |_, _| {})?;
    assert_eq!(done.stored.options.memory, o.memory);
    Ok((done.stored.plan, done.notes))
}

fn pipeline(p: usize, m: usize, order: Order) -> Options {
    Options { global_batch: m, observe: false, schedule: order, ..options(&[("pp", p)], false, 1) }
}

fn named(n: Named) -> Order {
    Order::Named(n.name().into())
}

#[test]
fn no_named_schedule_that_fits_is_faster() {
    let with_tp = Options {
        mesh: [("pp", 4), ("tp", 2)].map(|(n, s)| (n.to_string(), s)).to_vec(),
        sp: true,
        recompute: Recompute::Full,
        ..pipeline(4, 6, Order::default())
    };
    let eight = pipeline(4, 8, Order::default());
    // There the price is the one that `shardc price` shows.
    let on_machine = Options { machine: Some("h100-sxm".into()), ..eight.clone() };
    // Sums of gradients begin early under some schedules.
    let dp = |axes: &[(&str, usize)], zero| Options {
        mesh: axes.iter().map(|(n, s)| (n.to_string(), *s)).collect(),
        transport: Transport::Nccl,
        recompute: Recompute::Full,
        machine: Some("h100-sxm".into()),
        zero,
        global_batch: 8,
        ..pipeline(1, 8, Order::default())
    };
    let one_stage = dp(&[("dp_shard", 2)], 1);
    let stages = dp(&[("pp", 2), ("dp_replicate", 2)], 0);
    let generic = Options { machine: None, ..stages.clone() };
    let layouts = [pipeline(2, 4, Order::default()), eight, with_tp, on_machine];
    let layouts = layouts.into_iter().chain([one_stage, stages, generic]);
    for (i, o) in layouts.enumerate() {
        let (p, m) = (o.axis("pp"), o.microbatches());
        let search = Options { schedule: Order::Named("search".into()), ..o.clone() };
        let prices = Prices::of(&o).unwrap_or_else(|e| panic!("{e}"));
        let device = o.machine.as_deref().map(|name| device(name).expect("a machine"));
        let step = |plan: &Plan| match &device {
            Some(d) => shardc_cost::plan::price(plan, d, &[]).expect("a price").total,
            None => prices.price(plan, &[]).unwrap_or_else(|e| panic!("{e}")).step,
        };
        let all: Vec<(Named, f64, usize)> = Named::ALL
            .into_iter()
            .filter(|&n| make(n, p, n.default_chunks(), m).is_ok())
            .map(|n| {
                let o = Options { schedule: named(n), ..o.clone() };
                let (plan, _) = driver(&o).expect("it compiles");
                (n, step(&plan), plan.peak_bytes())
            })
            .collect();
        let mut limits: Vec<Option<usize>> = all.iter().map(|a| Some(a.2)).collect();
        limits.push(None);
        limits.push(all.iter().map(|a| a.2 * 2).max());
        for (_, memory) in limits.into_iter().enumerate().filter(|(k, _)| taken(i + k, 6)) {
            let (plan, notes) = driver(&Options { memory, ..search.clone() })
                .unwrap_or_else(|e| panic!("{memory:?}: {e}"));
            let fits = |peak: usize| memory.is_none_or(|l| peak <= l);
            assert!(fits(plan.peak_bytes()), "{memory:?}");
            // But for the order in which times are added.
            let found = step(&plan) * (1.0 - 1e-9);
            for (n, named, _) in all.iter().filter(|a| fits(a.2)) {
                assert!(found <= *named, "{memory:?}: {found} against {named} of {}", n.name());
            }
            assert!(notes.len() == 1 && notes[0].starts_with("schedule: "), "{notes:?}");
        }
        // Below what any schedule needs: the refusal of the one that needs least.
        let d = driver(&Options { memory: Some(1 << 14), ..search }).expect_err("too little");
        assert_eq!(d.code, "out-of-memory");
        let needs = d.message.split(['(', ' ']).find_map(|n| n.parse::<usize>().ok());
        let needs = needs.expect("bytes");
        assert!(all.iter().all(|a| needs <= a.2), "{needs} {all:?}");
    }
}

/// A rank of half the speed takes twice as long for what it does itself, and a step longer, but not twice as long:
/// exchanges are as fast, and only one of the ranks is slow.
#[test]
fn a_price_knows_how_fast_ranks_are() {
    let with_tp = Options {
        mesh: [("pp", 2), ("tp", 2)].map(|(n, s)| (n.to_string(), s)).to_vec(),
        ..pipeline(2, 4, named(Named::OneFOneB))
    };
    let (plan, _) = driver(&with_tp).expect("it compiles");
    let d = device("h100-sxm").expect("a machine");
    let price = |speeds: &[f64]| shardc_cost::plan::price(&plan, &d, speeds).expect("a price");
    let (alike, slow) = (price(&[]), price(&[1.0, 0.5]));
    assert_eq!(price(&[1.0, 1.0]).total, alike.total);
    assert!(slow.total > alike.total && slow.total < 2.0 * alike.total);
    let mut changed = 0;
    for (rank, class) in plan.classes.iter().enumerate() {
        for &f in &class.funcs {
            for (x, y) in alike.funcs[f].items.iter().zip(&slow.funcs[f].items) {
                let of_links = matches!(x.work, Work::Exchange { .. });
                let by = if rank == 1 && !of_links { 2.0 } else { 1.0 };
                assert_eq!(y.seconds, by * x.seconds, "rank {rank}: {:?}", x.work);
                changed += usize::from(by == 2.0 && x.seconds > 0.0);
            }
        }
    }
    assert!(changed > 10, "{changed}");
}

/// Losses of two steps, the bits of all parameters after them, and the plan.
fn train(o: &Options) -> (Vec<u32>, Plan) {
    let fx = Fixture::open("llama_deep");
    let model = fx.model(o);
    let compiled = compile(&model, o);
    shardc_passes::memory::replay::replay(&compiled.plan).unwrap_or_else(|e| panic!("{e}"));
    let mut s = session(&model, &compiled);
    let targets = fx.targets();
    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
    let mut bits = vec![];
    for step in 1..=2 {
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
        bits.push(r.loss.expect("a loss").to_bits());
    }
    for w in &model.weights {
        let a = s.tensor(&Role::new(RoleKind::Param, &*w.param)).unwrap_or_else(|e| panic!("{e}"));
        bits.extend(a.data.iter().map(|x| x.to_bits()));
    }
    (bits, compiled.plan)
}

/// How many values forwards save for backwards.
fn saved(plan: &Plan) -> usize {
    let forward = plan.module.funcs.iter().filter(|f| f.name.starts_with("forward"));
    let stash = |r: &Role| r.kind == RoleKind::Stash;
    forward.flat_map(|f| &f.results).filter(|r| r.role.as_ref().is_some_and(stash)).count()
}

#[test]
fn runs_and_groups_give_the_same_bits() {
    let groups = [
        "elementwise",
        "every:2",
        "layers:1",
        "mix:1*full+elementwise",
        "mix:1*ops:attention,selective+1*full+none",
        "ops:norms",
        "ops:activations",
        "ops:norms,activations,attention",
        "ops:selective,attention",
    ];
    let meshes = [
        (&[("pp", 2)][..], Named::Gpipe),
        (&[("pp", 2), ("tp", 2)][..], Named::ZbH1),
        (&[("tp", 2)][..], Named::OneFOneB),
    ];
    for (i, (mesh, schedule)) in meshes.into_iter().enumerate() {
        let o = Options {
            observe: false,
            schedule: named(schedule),
            sp: mesh.len() == 2,
            ..options(mesh, false, 1)
        };
        let run = |recompute| train(&Options { recompute, ..o.clone() });
        let (none, all) = run(Recompute::None);
        let (full, layers) = run(Recompute::Full);
        let (sqrt, runs) = run(Recompute::Sqrt);
        assert_eq!(none, full, "{mesh:?}: full");
        assert_eq!(none, sqrt, "{mesh:?}: sqrt");
        // Eight microbatches in flight make runs of several layers worth their while.
        let fewer = saved(&runs) < saved(&layers);
        assert_eq!(fewer, schedule == Named::Gpipe, "{mesh:?}");
        assert!(saved(&layers) < saved(&all));
        for (_, names) in groups.into_iter().enumerate().filter(|(k, _)| taken(i + k, 3)) {
            let policy = Recompute::parse(names).expect("known names");
            let (bits, some) = run(policy);
            assert_eq!(none, bits, "{mesh:?}: {names}");
            assert!(saved(&some) < saved(&all), "{mesh:?}: {names}");
        }
    }
}

/// Compiles a config without weights.
fn of_config(layers: usize, o: &Options) -> Plan {
    let done = shardc::compile_config(&config(layers), o).unwrap_or_else(|e| panic!("{e}"));
    done.stored.plan
}

#[test]
fn runs_of_layers_need_less_than_layers_where_there_are_many() {
    let o = Options { seq: 256, observe: false, ..options(&[], false, 8) };
    let peak =
        |layers, recompute| of_config(layers, &Options { recompute, ..o.clone() }).peak_bytes();
    for layers in [48, 96] {
        let (full, sqrt) = (peak(layers, Recompute::Full), peak(layers, Recompute::Sqrt));
        assert!(sqrt < full, "{layers} layers: {sqrt} B, with whole layers {full} B");
    }
    // Of a short model every layer is a run.
    assert_eq!(peak(4, Recompute::Sqrt), peak(4, Recompute::Full));
    // Growth: four times the layers, about twice the activations.
    let weights = |layers| {
        let plan = of_config(layers, &Options { recompute: Recompute::Sqrt, ..o.clone() });
        plan.classes[0].memory.frames[0][0]
    };
    let beside = |layers| (peak(layers, Recompute::Sqrt) - weights(layers)) as f64;
    let growth = beside(192) / beside(48);
    assert!(growth < 2.6, "{growth}");
}

#[test]
fn fit_recomputes_no_more_than_it_must() {
    let o = Options { observe: false, ..options(&[("tp", 2)], false, 8) };
    let plain = |recompute| driver(&Options { recompute, ..o.clone() }).expect("it compiles").0;
    let fit = |limit: usize| {
        driver(&Options { recompute: Recompute::Fit, memory: Some(limit), ..o.clone() })
    };
    let work = |p: &Plan| {
        Prices::Generic(Hardware::default()).price(p, &[]).unwrap_or_else(|e| panic!("{e}")).work
    };
    let (none, selective) = (plain(Recompute::None), plain(Recompute::Selective));
    let (full, sqrt) = (plain(Recompute::Full), plain(Recompute::Sqrt));
    // Nothing, if that fits.
    let (got, notes) = fit(none.peak_bytes()).expect("it fits");
    assert_eq!(work(&got), work(&none), "{notes:?}");
    let mut before = work(&none);
    for limit in [none.peak_bytes() - 1, selective.peak_bytes(), full.peak_bytes()] {
        let (got, notes) = fit(limit).unwrap_or_else(|e| panic!("{limit}: {e}"));
        assert!(got.peak_bytes() <= limit, "{notes:?}");
        assert!(work(&got) <= work(&full) && work(&got) >= before, "{notes:?}");
        assert!(limit < selective.peak_bytes() || work(&got) <= work(&selective), "{notes:?}");
        assert!(notes[0].contains("% more FLOPs"), "{notes:?}");
        before = work(&got);
    }
    let (between, _) = fit((selective.peak_bytes() + full.peak_bytes()) / 2).expect("it fits");
    assert!(work(&between) < work(&full), "something cheaper than whole layers");
    let least = full.peak_bytes().min(sqrt.peak_bytes());
    let d = fit(least - 1).expect_err("nothing fits");
    assert_eq!(d.code, "out-of-memory");
    assert!(d.message.contains(&least.to_string()), "{d}");
    let d = driver(&Options { recompute: Recompute::Fit, ..o.clone() }).expect_err("no limit");
    assert_eq!(d.code, "flag");
}

/// A model that marks no layers has one policy beside none, and messages speak of what was asked for.
#[test]
fn fit_without_layers() {
    let lab = Lab::new("fit-no-layers");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/mlp.ir");
    let model = model.display().to_string();
    let args = ["compile", &model, "--recompute", "fit", "--memory", "1KiB", "-o", "p"];
    let said = lab.refuses(&args, 3, "out-of-memory");
    assert!(!said.contains("selective"), "{said}");
}

#[test]
fn both_searches_together() {
    let o = Options { recompute: Recompute::Fit, ..pipeline(4, 8, Order::Named("search".into())) };
    let peak = |o: &Options| driver(o).expect("it compiles").0.peak_bytes();
    let v_min = |recompute| peak(&Options { recompute, ..pipeline(4, 8, named(Named::VMin)) });
    let (none, full) = (v_min(Recompute::None), v_min(Recompute::Full));
    assert!(full < none, "{full} {none}");
    let limits = [2 * none, none, full].into_iter().enumerate();
    for (_, limit) in limits.filter(|(i, _)| taken(*i, 2)) {
        let (plan, notes) = driver(&Options { memory: Some(limit), ..o.clone() })
            .unwrap_or_else(|e| panic!("{limit}: {e}"));
        assert!(plan.peak_bytes() <= limit, "{notes:?}");
        assert_eq!(notes.len(), 2, "{notes:?}");
    }
}

fn shardc(dir: &Path, args: &[String]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    c.current_dir(dir).args(args).output().expect("shardc starts")
}

/// The arguments with flags in place of those of the same name; `--flag value` or `--flag`.
fn with(args: &[String], flags: &str) -> Vec<String> {
    let mut out = args.to_vec();
    let words: Vec<&str> = flags.split(' ').collect();
    let mut i = 0;
    while i < words.len() {
        let value = words.get(i + 1).filter(|w| !w.starts_with("--"));
        if let Some(at) = out.iter().position(|a| a == words[i]) {
            out.drain(at..at + 1 + usize::from(value.is_some()));
        }
        out.push(words[i].into());
        out.extend(value.map(|v| v.to_string()));
        i += 1 + usize::from(value.is_some());
    }
    out
}

#[test]
fn what_is_proposed_fits() {
    let dir = lab("advice", 8);
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<String>>();
    let run = |args: &[String]| {
        let out = shardc(&dir, args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        (out, said)
    };
    let peak = |args: &[String]| -> usize {
        let (out, said) = run(&[args, &words("--format json")].concat());
        assert!(out.status.success(), "{args:?}: {said}");
        let report: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
        let classes = report["per_class"].as_array().expect("a list").iter();
        classes.filter_map(|c| c["peak_bytes"].as_u64()).max().expect("a peak") as usize
    };
    let base = "compile config.json --seq 128 --mesh";
    let cases = [
        "dp=2,tp=2 --global-batch 16 --microbatch 4",
        "dp=4 --global-batch 16",
        "dp_replicate=4,dp_shard=2 --zero 1 --global-batch 16 --microbatch 1",
        "dp_replicate=4 --zero 1 --global-batch 16 --microbatch 2",
        "pp=4 --global-batch 16 --microbatch 1 --schedule gpipe",
        "pp=2,tp=2 --global-batch 8 --microbatch 2 --schedule interleaved --chunks 2",
        "pp=2,dp=2 --global-batch 16 --microbatch 2 --schedule search",
        "dp=2,tp=2 --global-batch 16 --microbatch 4 --recompute fit",
    ];
    let mut proposed = 0;
    for (i, case) in cases.into_iter().enumerate() {
        let args = words(&format!("{base} {case}"));
        // Where nothing is searched for, the peak is that of the same without a limit.
        let plain = with(&with(&args, "--recompute none"), "--schedule 1f1b");
        let whole =
            peak(if case.contains("search") || case.contains("fit") { &plain } else { &args });
        let parts = [0.95, 0.7, 0.5, 0.35].into_iter().enumerate();
        for (_, part) in parts.filter(|(k, _)| taken(i + k, 4)) {
            let limit = (whole as f64 * part) as usize;
            let args = with(&args, &format!("--memory {limit}B"));
            let (out, said) = run(&args);
            if out.status.success() {
                continue; // a search found one that fits
            }
            assert_eq!(out.status.code(), Some(3), "{args:?}: {said}");
            assert!(
                said.contains("error[out-of-memory]") && said.contains("at the peak"),
                "{said}"
            );
            let help = |l: &str| l.trim().strip_prefix("= help: ").map(String::from);
            let lines: Vec<String> = said.lines().filter_map(help).collect();
            let (last, ways) = lines.split_last().expect("help");
            let needs: usize = last
                .rsplit(' ')
                .next()
                .and_then(|n| n.strip_suffix('B')?.parse().ok())
                .expect("bytes");
            assert!(last.starts_with("use --memory ") && needs > limit, "{last}");
            assert!(ways.len() <= 6, "{said}");
            for way in ways {
                let Some((flags, rest)) = way.strip_prefix("use ").and_then(|w| w.split_once(": "))
                else {
                    // Nothing fits: what comes nearest has the peak that is said.
                    let (bytes, flags) = way.split_once("B), with ").expect("the least");
                    let bytes: usize = bytes
                        .rsplit('(')
                        .next()
                        .and_then(|n| n.trim().parse().ok())
                        .expect("bytes");
                    let again = with(&args, flags);
                    let again = with(&again, &format!("--memory {bytes}B"));
                    assert!(bytes > limit && peak(&again) <= bytes, "{way}");
                    continue;
                };
                let got = peak(&with(&args, flags));
                assert!(got <= limit, "{way}: {got} B of {limit} B");
                let said_peak = shardc::report::bytes(got);
                assert!(rest.contains(&said_peak) || rest.contains("as little as"), "{way}: {got}");
                proposed += 1;
            }
        }
    }
    assert!(proposed > samples(5, 20), "{proposed} ways out");
}

#[test]
fn a_found_schedule_is_part_of_the_plan() {
    let dir = lab("stored", 8);
    let args = |text: &str| text.split(' ').map(String::from).collect::<Vec<String>>();
    let compile = "compile config.json --seq 32 --mesh pp=4 --global-batch 8 --microbatch 1 \
                   --schedule search -o plan";
    let out = shardc(&dir, &args(compile));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("schedule: ") && said.contains("than 1f1b"), "{said}");
    let text = std::fs::read_to_string(dir.join("plan/schedule.csv")).expect("the schedule");
    assert_eq!(parse_csv(&text).map(|s| (s.ranks.len(), s.microbatches)), Ok((4, 8)));
    for command in ["verify plan --numbers", "verify plan --tiny", "inspect plan --phase partition"]
    {
        let out = shardc(&dir, &args(command));
        assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
    }
    // The same question has the same answer.
    let again = shardc(&dir, &args(&compile.replace("-o plan", "-o again")));
    assert!(again.status.success());
    let again = std::fs::read_to_string(dir.join("again/schedule.csv")).expect("the schedule");
    assert_eq!(text, again);
}

/// Arguments with a change as a rule offers it: `--mesh tp=2`, `--seq 16`, `without --sp`, several in a row.
fn changed(args: &[String], change: &str) -> Vec<String> {
    let mut out = args.to_vec();
    let words: Vec<&str> = change.split(' ').collect();
    let mut i = 0;
    while i < words.len() {
        let word = words[i];
        i += 1;
        match word {
            "without" => {
                let at = out.iter().position(|a| a == words[i]).expect("it is there");
                out.drain(at..at + if words[i] == "--mesh" { 2 } else { 1 });
                i += 1;
            }
            // As it stands: nothing but flags with their values is offered.
            flag => {
                assert!(flag.starts_with("--"), "{change}");
                out = with(&out, &format!("{flag} {}", words[i]));
                i += 1;
            }
        }
    }
    out
}

/// Everything that `check` offers, values and meshes, compiles with all else that was asked, in the
/// memory there is.
#[test]
fn what_a_refusal_offers_compiles() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let dir = lab("offers", 8);
    let deep = "config.json".to_string();
    let (mha, moe) = (format!("{fixtures}/llama_mha"), format!("{fixtures}/qwen3_moe"));
    let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<String>>();
    let gqa = format!("{fixtures}/llama_gqa");
    let cases: [(&String, &str); 36] = [
        (&moe, "--mesh dp=3,tp=2,ep=3 --global-batch 9"),
        (&moe, "--mesh dp=2,ep=3"),
        (&moe, "--mesh dp=2,ep=32 --zero 1"),
        (&gqa, "--seq 8 --chunks 2"),
        (&gqa, "--mesh pp=2 --schedule interleaved --chunks 1"),
        (&gqa, "--mesh pp=2 --global-batch 1201 --microbatch 5"),
        (&mha, "--mesh tp=3"),
        (&mha, "--mesh tp=8,dp=2"),
        (&mha, "--mesh dp=3"),
        (&mha, "--mesh dp=2 --microbatch 3"),
        (&mha, "--mesh tp=3 --seq 33"),
        (&mha, "--mesh cp=3 --seq 16 --cp-mode ring"),
        (&mha, "--mesh cp=4 --seq 18 --cp-mode ring"),
        (&mha, "--mesh tp=2,cp=4 --cp-mode ulysses"),
        (&mha, "--mesh tp=4 --sp --seq 18"),
        (&mha, "--sp"),
        (&mha, "--mesh tp=6 --tp-mode 2d"),
        (&mha, "--mesh tp=9 --tp-mode 2d --sp"),
        (&mha, "--mesh tp=8 --tp-mode 2.5d --microbatch 2"),
        (&mha, "--mesh dp=4,ep=4,etp=1"),
        (&mha, "--mesh tp=2,etp=1,ep=2"),
        (&deep, "--mesh pp=4 --schedule interleaved --microbatch 8"),
        (&deep, "--mesh pp=3 --schedule dualpipe-v"),
        (&deep, "--mesh pp=2 --schedule zb-v --chunks 3"),
        (&deep, "--mesh pp=2,tp=3 --global-batch 6"),
        (&moe, "--mesh dp=8,tp=4,etp=32"),
        (&moe, "--mesh dp=3,ep=3,etp=1 --global-batch 9"),
        (&moe, "--mesh dp=2,ep=4,etp=1"),
        (&moe, "--mesh dp_replicate=4,ep=4"),
        (&moe, "--mesh tp=4,etp=3"),
        (&moe, "--mesh dp=2,tp=2,ep=2,etp=32"),
        (&moe, "--mesh cp=3,ep=3"),
        (&moe, "--mesh dp=2,cp=4 --seq 18"),
        (&moe, "--mesh tp=4 --tp-mode 2d"),
        (&moe, "--mesh tp=2,dp=4,ep=8,etp=2"),
        (&mha, "--mesh tp=3 --memory 500000B"),
    ];
    let mut tried = 0;
    for (model, flags) in cases {
        let seq = if flags.contains("--seq") { "" } else { "--seq 16" };
        let args = words(&format!("check {model} {seq} {flags}"));
        let out = shardc(&dir, &[&args[..], &words("--format json")].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        let found: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
        let list = |v: &Json| -> Vec<String> {
            let all = v.as_array().expect("a list").iter();
            all.map(|x| x.as_str().expect("text").to_string()).collect()
        };
        let violations = found["violations"].as_array().expect("a list");
        let mut offers: Vec<String> = violations.iter().flat_map(|v| list(&v["nearest"])).collect();
        let whole = list(&found["meshes"]);
        offers.extend(whole.iter().map(|m| format!("--mesh {m}")));
        assert!(!offers.is_empty(), "{args:?} offers nothing: {found}");
        // Every run takes the first of each refusal, and every other one that follows.
        for (_, offer) in offers.into_iter().enumerate().filter(|(k, _)| *k == 0 || taken(*k, 2)) {
            let mut again = changed(&args, &offer);
            again[0] = "compile".into();
            let out = shardc(&dir, &again);
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{args:?}: `{offer}`: {again:?}: {said}");
            tried += 1;
        }
    }
    assert!(tried > samples(40, 60), "{tried} offers");
}

/// Offers are what is least to change, and for many microbatches nothing is compiled to find them.
#[test]
fn offers_are_small() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let dir = lab("small-offers", 8);
    let said = |flags: &str| {
        let args = format!("check {fixtures}/llama_gqa --seq 8 {flags}");
        let args: Vec<String> = args.split_whitespace().map(String::from).collect();
        let out = shardc(&dir, &args);
        assert_eq!(out.status.code(), Some(1), "{flags}");
        let all = [&out.stdout[..], &out.stderr].map(String::from_utf8_lossy).concat();
        let of = |word| all.lines().find_map(|l| l.split_once(word));
        let found =
            of("nearest legal: ").or(of("not compiled (a step of so many parts takes long): "));
        found.unwrap_or_else(|| panic!("{flags}: {all}")).1.to_string()
    };
    let offers = |flags| said(flags).split(", ").map(String::from).collect::<Vec<_>>();
    let one = offers("--chunks 2");
    assert_eq!(one[0], "--chunks 1", "{one:?}");
    assert!(one[1..].iter().all(|o| !o.contains("--chunks 1")), "{one:?}");
    let chunks = offers("--mesh pp=2 --schedule interleaved --chunks 1");
    assert!(chunks[0].starts_with("--chunks 2"), "{chunks:?}");
    // Of many microbatches it is said that nothing was compiled.
    let many = said("--mesh pp=2,tp=3 --global-batch 8192 --microbatch 1");
    assert!(many.starts_with("--mesh pp=2,tp="), "{many}");
}

/// All stages of ZeRO that are enough are offered, what needs least first.
#[test]
fn all_stages_of_zero_are_offered() {
    let dir = lab("zero-stages", 8);
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<String>>();
    let base = words("compile config.json --seq 128 --mesh dp=8 --global-batch 8 --microbatch 1");
    let out = shardc(&dir, &[&base[..], &words("--format json")].concat());
    let report: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
    let peak = report["per_class"][0]["peak_bytes"].as_u64().expect("a peak");
    let out = shardc(&dir, &with(&base, &format!("--memory {}B", peak - 1)));
    let said = String::from_utf8_lossy(&out.stderr);
    for zero in ["--zero 3", "--zero 2", "--zero 1"] {
        assert!(said.contains(zero), "{zero}: {said}");
    }
    let needs =
        said.lines().filter_map(|l| l.split_once("a rank then needs ")?.1.strip_suffix(" KiB"));
    let needs: Vec<f64> = needs.map(|n| n.parse().expect("a number")).collect();
    assert!(needs.len() >= 4 && needs.is_sorted(), "{said}");
}

/// On the ranks there are, ZeRO and recomputation together are found before more ranks are asked for.
#[test]
fn the_ranks_there_are_come_first() {
    let dir = lab("same-ranks", 8);
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<String>>();
    let base =
        "compile config.json --seq 128 --mesh dp=8 --global-batch 16 --microbatch 1 --node 8";
    let peak = |flags: &str| -> usize {
        let args = with(&words(base), flags);
        let out = shardc(&dir, &[&args[..], &words("--format json")].concat());
        let report: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
        report["per_class"][0]["peak_bytes"].as_u64().expect("a peak") as usize
    };
    let least = peak("--zero 3 --recompute full");
    let one = peak("--zero 3").min(peak("--recompute full"));
    assert!(least < one, "neither alone is enough");
    let args = with(&words(base), &format!("--memory {}B", least + (one - least) / 50));
    let out = shardc(&dir, &args);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert!(
        said.contains("--recompute full --zero 3") || said.contains("--zero 3 --recompute full"),
        "{said}"
    );
    assert!(!said.contains("of 16 ranks") && !said.contains(" time"), "{said}");
}
