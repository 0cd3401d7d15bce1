//! Dropout of archives: by the rates of their programs, or at another one.

use super::files::{Scratch, members, nodes, zip};
use super::{Expected, MESHES, ROWS, SIZES, held};
use crate::fixture::{compile, options, texts, three_steps};
use serde_json::{Value, json};
use shardc_frontends::Model;
use shardc_frontends::import::{Imported, Opened, Raise};
use shardc_ir::ops::Op;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::rng::Distribution;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options};
use shardc_prove::Verdict;

/// GPT-2 with these rates of activations and of probabilities.
fn archive(of: f64, probabilities: f64) -> (Scratch, Opened) {
    let scratch = Scratch::new(&format!("drops-{of}-{probabilities}"));
    let mut all = members("gpt2.pt2");
    let model = all.iter_mut().find(|m| m.0.ends_with("models/model.json")).expect("a program");
    let mut json: Value = serde_json::from_slice(&model.1).expect("JSON");
    for n in nodes(&mut json) {
        let target = n["target"].as_str().expect("a target").to_string();
        let ins = n["inputs"].as_array_mut().expect("operands");
        if target.contains("aten.dropout") {
            let p = ins.iter_mut().find(|i| i["name"] == "p").expect("a rate");
            p["arg"] = json!({"as_float": of});
        } else if target.contains("scaled_dot_product") {
            let arg = json!({"as_float": probabilities});
            ins.push(json!({"name": "dropout_p", "arg": arg, "kind": 1}));
        }
    }
    model.1 = serde_json::to_vec(&json).expect("JSON");
    let path = scratch.write(&zip(&all));
    (scratch, Opened::read(&path).unwrap_or_else(|e| panic!("{e}")))
}

fn import(opened: &Opened, mode: Mode) -> Imported {
    opened.import(SIZES, mode, Raise::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// With which probabilities activations and attention keep what they have.
fn kept(m: &Imported) -> [Vec<f64>; 2] {
    let nodes = &m.source.module.funcs[0].nodes;
    let draws = nodes.iter().filter_map(|n| match &n.op {
        Op::Draw(d) => match d.from {
            Distribution::Keep(p) => Some(p),
            Distribution::Uniform | Distribution::Normal => None,
        },
        _other => None,
    });
    let inside = nodes.iter().filter_map(|n| match &n.op {
        Op::Attention(a) => a.kept.as_ref().map(|k| k.rate),
        _other => None,
    });
    [draws.collect(), inside.collect()]
}

const NOTHING: [Vec<f64>; 2] = [vec![], vec![]];

#[test]
fn rates_are_those_of_the_archive_or_asked_for() {
    let codes = |m: &Imported| m.warnings.iter().map(|w| w.code).collect::<Vec<_>>();
    let (_files, opened) = archive(0.25, 0.5);
    let m = import(&opened, Mode::Train);
    assert_eq!((kept(&m), &codes(&m)[..]), (NOTHING, &["dropout-ignored"][..]));
    let opened = opened.drops(Dropout::Config);
    let m = import(&opened, Mode::Train);
    assert_eq!(kept(&m), [vec![0.75; 5], vec![0.5; 2]]);
    assert!(m.warnings.is_empty(), "{:?}", m.warnings);
    let opened = opened.drops(Dropout::Rate(0.125));
    assert_eq!(kept(&import(&opened, Mode::Train)), [vec![0.875; 5], vec![0.875; 2]]);
    assert_eq!(kept(&import(&opened, Mode::Infer)), NOTHING);
    let (_files, plain) = archive(0.0, 0.0);
    let m = import(&plain.drops(Dropout::Config), Mode::Train);
    assert_eq!((kept(&m), &codes(&m)[..]), (NOTHING, &["no-effect"][..]));
    let (_files, all) = archive(1.0, 0.0);
    let e = all.drops(Dropout::Config).import(SIZES, Mode::Train, Raise::default()).err();
    assert!(e.is_some_and(|e| e.code == "import-op" && e.message.contains("rate is 1")));
}

/// The same elements on every mesh, in rings and where backward computes again; other losses than without.
#[test]
fn archives_drop_the_same_on_every_mesh() {
    let (_files, opened) = archive(0.25, 0.25);
    let want = Expected::open("gpt2");
    let (ids, targets) = (want.ids(), want.targets());
    let opened = opened.drops(Dropout::Config);
    let model: Model = held(&opened, import(&opened, Mode::Train));
    let run = |o: &Options| {
        let compiled = compile(&model, o);
        let proof = texts(&model, o, &compiled).prove();
        assert_eq!(proof.verdict(), Verdict::Proved, "{:?}: {:?}", o.mesh, proof.gaps);
        three_steps(&model, &compiled, &ids, &targets)
    };
    let one = run(&options(&[], false, ROWS));
    assert!((one.loss - want.get("loss")[0]).abs() > 1e-3, "nothing is dropped: {}", one.loss);
    let mut all: Vec<Options> =
        MESHES.iter().map(|(mesh, sp, rows)| options(mesh, *sp, *rows)).collect();
    all.push(Options { cp_mode: CpMode::Ring, ..options(&[("cp", 2)], false, ROWS) });
    all.push(Options { recompute: Recompute::Full, ..options(&[("tp", 2)], false, ROWS) });
    for o in all {
        run(&o).compare(&model, &one, &format!("{:?} {:?}", o.mesh, o.cp_mode));
    }
}
