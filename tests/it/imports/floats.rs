//! Archives of models on floats, without tokens, against PyTorch.

use super::{Expected, file, norm};
use crate::fixture::{compile, options, session, texts, try_compile};
use shardc_frontends::import::{Opened, Raise, Sizes};
use shardc_frontends::{Facts, Model};
use shardc_ir::func::{Fill, RoleKind, inputs};
use shardc_ir::plan::Mode;
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::options::TpMode::{ThreeD, TwoAndHalfD, TwoD};
use shardc_passes::options::{Options, ShardRule, TpSteps};
use shardc_prove::Verdict;
use shardc_runtime::{Columns, Numbers, StepBatch};

const ROWS: usize = 8;

fn model(name: &str, rows: usize) -> Model {
    imported(name, rows).0
}

/// An archive, and what it does not train.
fn imported(name: &str, rows: usize) -> (Model, Vec<String>) {
    let opened = Opened::read(&file(&format!("{name}.pt2"))).unwrap_or_else(|e| panic!("{e}"));
    let m = opened
        .import(Sizes { rows, seq: 1 }, Mode::Train, Raise::default())
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let told: Vec<&str> = m.warnings.iter().map(|w| w.code).collect();
    let frozen = if m.frozen.is_empty() { vec![] } else { vec!["frozen"] };
    let normed = if name == "normed" { vec!["batch-statistics"] } else { vec![] };
    assert_eq!(told, [normed, frozen].concat(), "{name}: {:?}", m.warnings);
    let vocab = m.source.vocab;
    let model = Model {
        family: "pt2",
        module: m.source.module,
        weights: m.source.weights,
        facts: Facts { vocab, ..super::no_facts() },
        sequence: m.source.sequence,
        config: serde_json::json!({}),
        warnings: vec![],
        checkpoint: opened.checkpoint(),
    };
    (model, m.frozen)
}

/// The columns of an archive, as PyTorch had them.
fn columns(m: &Model, want: &Expected) -> Columns {
    let one = |r: shardc_ir::func::InputRow| {
        let name = if r.input.fill == Fill::Labels { "labels" } else { &*r.name };
        let all = want.get(name).iter();
        let numbers = match r.dtype {
            DType::I32 => Numbers::I32(all.map(|&x| x as i32).collect()),
            _float => Numbers::F32(all.map(|&x| x as f32).collect()),
        };
        (r.name.to_string(), numbers)
    };
    inputs(&m.module).into_iter().map(one).collect()
}

/// A mesh, rows of a rank's microbatch, and what is asked for beside.
type Case = (&'static [(&'static str, usize)], usize, fn(&mut Options));

fn words(o: &mut Options, first: &str, second: &str) {
    o.shard = [(first, "colwise"), (second, "rowwise")]
        .map(|(glob, word)| ShardRule { glob: glob.into(), dims: vec![word.into()], priority: 0 })
        .into();
}

/// One step against PyTorch: loss 5e-6, output 2e-5, every gradient 1e-4; and the plan is proved.
fn check(name: &str, cases: &[Case]) {
    let want = Expected::open(name);
    for (mesh, rows, ask) in cases {
        let mut o = options(mesh, false, *rows);
        (o.seq, o.global_batch) = (1, ROWS);
        ask(&mut o);
        let (model, frozen) = imported(name, o.microbatch_rows());
        o.freeze = frozen;
        let columns = columns(&model, &want);
        let what = format!("{name} on {mesh:?}, {:?}, {:?}", o.tp_mode, o.shard);
        let compiled = compile(&model, &o);
        let proof = texts(&model, &o, &compiled).prove();
        let (refuted, gaps) = (&proof.refuted, &proof.gaps);
        assert_eq!(proof.verdict(), Verdict::Proved, "{what}: {refuted:?} {gaps:?}");
        let mut s = session(&model, &compiled);
        let batch = StepBatch { columns: columns.clone(), observe: true };
        let r = s.step(&batch, 1e-3, 1).unwrap_or_else(|e| panic!("{what}: {e}"));
        let (loss, reference) = (f64::from(r.loss.expect("a loss")), want.get("loss")[0]);
        assert!((loss - reference).abs() <= 5e-6, "{what}: loss {loss}, PyTorch {reference}");
        let out = |k, n: &str| -> Vec<f64> {
            r.output(k, n).expect("shown").data.iter().map(|&x| f64::from(x)).collect()
        };
        let outputs = || r.outputs.keys().filter(|k| k.kind == RoleKind::Output);
        assert_eq!(outputs().count(), 1, "{what}");
        let name = outputs().map(|k| k.name.to_string()).collect::<String>();
        let (output, reference) = (out(RoleKind::Output, &name), want.get("output"));
        let d = norm(output.iter().zip(reference).map(|(a, b)| a - b));
        let all = norm(reference.iter().copied());
        assert!(
            output.len() == reference.len() && d <= 2e-5 * all,
            "{what}: output off by {d:.1e}"
        );
        let shown = |n: &str| r.outputs.keys().any(|k| k.is(RoleKind::GradShown, n));
        let has = |w: &&Weight| want.0.contains_key(&format!("grad.{}", w.tensor));
        let without = model.weights.iter().filter(|w| !has(w) && shown(&w.param));
        assert_eq!(without.count(), 0, "{what}: gradients of what is not trained");
        for w in model.weights.iter().filter(has) {
            let (got, reference) = (out(RoleKind::GradShown, &w.param), want.grad(w));
            let d = norm(got.iter().zip(&reference).map(|(a, b)| a - b));
            let r = norm(reference.iter().copied());
            // A norm of a batch sees nothing of a bias in front of it: what both have is rounding.
            if what.starts_with("normed") && w.tensor == "model.lin.bias" {
                assert!(r < 1e-6 && norm(got.iter().copied()) < 1e-6, "{what}: {r:.1e}");
                continue;
            }
            assert!(got.len() == reference.len() && r > 0.0, "{what}: {}", w.param);
            assert!(
                d <= 1e-4 * r,
                "{what}: gradient of {}: |Δ| {d:.3e}, |PyTorch| {r:.3e}",
                w.param
            );
        }
        let grads = want.0.keys().filter(|n| n.starts_with("grad.")).count();
        assert_eq!(grads, model.weights.iter().filter(has).count(), "{what}: all gradients");
    }
}

const NOTHING: fn(&mut Options) = |_| {};

#[test]
fn toy() {
    let tp: fn(&mut Options) = |o| words(o, "model.net1", "model.net2");
    check(
        "toy",
        &[
            (&[], 8, NOTHING),
            (&[], 2, NOTHING),
            (&[("dp_replicate", 2)], 4, NOTHING),
            (&[("dp_shard", 4)], 1, |o| o.zero = 3),
            (&[("tp", 2)], 8, tp),
            (&[("dp_replicate", 2), ("tp", 2)], 2, tp),
            (&[("tp", 2)], 8, |o| o.auto = true),
            (&[("pp", 2)], 4, NOTHING),
            (&[("pp", 2), ("dp_replicate", 2), ("tp", 2)], 2, tp),
        ],
    );
}

#[test]
fn mlp() {
    check(
        "mlp",
        &[
            (&[], 8, NOTHING),
            (&[("dp_replicate", 2)], 4, NOTHING),
            (&[("tp", 2)], 8, NOTHING),
            (&[("dp_replicate", 2), ("tp", 2)], 4, NOTHING),
            (&[("pp", 2)], 8, NOTHING),
        ],
    );
}

#[test]
fn mlp_on_grids() {
    check(
        "mlp",
        &[
            (&[("tp", 4)], 8, |o| o.tp_mode = TwoD),
            (&[("tp", 4)], 8, |o| (o.tp_mode, o.tp_steps) = (TwoD, TpSteps::Summa)),
            (&[("dp_replicate", 2), ("tp", 4)], 4, |o| o.tp_mode = TwoD),
            (&[("tp", 8)], 8, |o| o.tp_mode = TwoAndHalfD { depth: 2 }),
            (&[("tp", 8)], 8, |o| o.tp_mode = ThreeD),
            (&[("pp", 2), ("tp", 4)], 8, |o| o.tp_mode = TwoD),
        ],
    );
}

/// A model that marks nothing is on a grid by words.
#[test]
fn words_put_products_on_a_grid() {
    let asked: fn(&mut Options) = |o| {
        o.tp_mode = TwoD;
        words(o, "model.net1", "model.net2");
    };
    check("toy", &[(&[("tp", 4)], 8, asked)]);
    let mut o = Options { tp_mode: TwoD, seq: 1, ..options(&[("tp", 4)], false, ROWS) };
    let refused = try_compile(&model("toy", ROWS), &o).expect_err("a refusal");
    assert_eq!(refused.code, "not-marked", "{refused}");
    asked(&mut o);
    let plan = compile(&model("toy", ROWS), &o).plan;
    let f = plan.module.func("step_prologue").expect("a function");
    let is = |a: &&shardc_ir::func::Port| a.is(RoleKind::Param, "model.net1.weight");
    let ty = f.ty(f.args.iter().find(is).expect("a weight").value);
    assert!(ty.dims.iter().all(|d| d.atoms.iter().count() == 1), "both dims are cut: {ty:?}");
}

#[test]
fn digits() {
    check(
        "digits",
        &[
            (&[], 8, NOTHING),
            (&[], 4, NOTHING),
            (&[("dp_replicate", 2)], 2, NOTHING),
            (&[("tp", 2)], 8, NOTHING),
            (&[("dp_replicate", 2), ("tp", 2)], 4, NOTHING),
            (&[("pp", 2)], 4, NOTHING),
        ],
    );
}

/// Statistics of a batch are those of all rows of a microbatch, wherever these are.
#[test]
fn normed() {
    check(
        "normed",
        &[
            (&[], 8, NOTHING),
            (&[("dp_replicate", 2)], 4, NOTHING),
            (&[("dp_shard", 4)], 2, |o| o.zero = 3),
            (&[("tp", 2)], 8, |o| o.auto = true),
            (&[("dp_replicate", 2), ("tp", 2)], 4, |o| o.auto = true),
        ],
    );
}

/// Convolutions, and attention over what is no token.
#[test]
fn picture() {
    check(
        "picture",
        &[(&[], 8, NOTHING), (&[("dp_replicate", 2)], 4, NOTHING), (&[("tp", 2)], 8, NOTHING)],
    );
}

/// Experts that data choose, written out.
#[test]
fn chosen() {
    check(
        "chosen",
        &[
            (&[], 8, NOTHING),
            (&[("dp_replicate", 2)], 4, NOTHING),
            (&[("tp", 2)], 8, NOTHING),
            (&[("pp", 2)], 4, NOTHING),
        ],
    );
}

/// Truth values are added as or; constants are as they are in torch.
#[test]
fn truths() {
    check("truths", &[(&[], 8, NOTHING), (&[("tp", 2)], 4, NOTHING)]);
}

/// `detach`, regions without gradients with a region with some in them, and a parameter that is not trained.
#[test]
fn stopped() {
    assert_eq!(imported("stopped", ROWS).1, ["model.d.weight"]);
    check(
        "stopped",
        &[
            (&[], 8, NOTHING),
            (&[], 2, NOTHING),
            (&[("dp_replicate", 2)], 4, NOTHING),
            (&[("dp_shard", 2)], 2, |o| o.zero = 3),
            (&[("tp", 2)], 8, NOTHING),
            (&[("tp", 2)], 8, |o| o.auto = true),
        ],
    );
}

/// What is joined lies in different orders, and a factor is whole numbers.
#[test]
fn joined() {
    check(
        "joined",
        &[(&[], 8, NOTHING), (&[("dp_replicate", 2)], 4, NOTHING), (&[("tp", 2)], 8, NOTHING)],
    );
}

/// Functions, comparisons, and choices between data.
#[test]
fn functions() {
    check(
        "functions",
        &[(&[], 8, NOTHING), (&[("dp_replicate", 2)], 4, NOTHING), (&[("tp", 2)], 8, NOTHING)],
    );
}
