//! Layers that predict tokens behind the next (`--mtp`), against losses and gradients of transformers' own modules
//! (`tests/fixtures/mtp.py`): loss, logits, every gradient, three steps.

use crate::fixture::*;
use shardc_frontends::{Shape, from_config, load};
use shardc_ir::documents::Documents;
use shardc_ir::func::RoleKind;
use shardc_ir::plan::Mode;
use shardc_passes::options::{Balance, CpMode, CpSplit, Options, Order};
use shardc_prove::Verdict;
use shardc_runtime::StepBatch;
use shardc_testing::taken;

/// As the references were made.
fn with(o: Options) -> Options {
    Options { mtp: 0.3, ..o }
}

/// Trains and compares, and proves the plan.
fn trains(name: &str, o: &Options) {
    eprintln!("{name} {:?} ep={} zero={} sp={} {:?}", o.mesh, o.ep, o.zero, o.sp, o.schedule);
    let (model, compiled) = train_and_compare(name, o);
    let r = texts(&model, o, &compiled).prove();
    assert_eq!(r.verdict(), Verdict::Proved, "{name} {:?}: {:?} {:?}", o.mesh, r.refuted, r.gaps);
}

fn meshes() -> Vec<Options> {
    let named = |o: Options, name: &str| Options { schedule: Order::Named(name.into()), ..o };
    vec![
        options(&[], false, 8),
        options(&[], false, 2),
        options(&[("tp", 2)], false, 8),
        Options { zero: 3, ep: 2, ..options(&[("dp_shard", 2)], false, 2) },
        Options { ep: 2, ..options(&[("dp_shard", 2), ("tp", 2)], true, 4) },
        options(&[("cp", 2)], false, 4),
        Options {
            cp_mode: CpMode::Ring,
            cp_split: Some(CpSplit::Contiguous),
            ..options(&[("cp", 2)], false, 8)
        },
        Options { cp_split: Some(CpSplit::Zigzag), ..options(&[("cp", 2)], false, 4) },
        Options {
            cp_mode: CpMode::Ring,
            cp_split: Some(CpSplit::Zigzag),
            ..options(&[("cp", 2), ("tp", 2)], true, 8)
        },
        options(&[("pp", 2)], false, 2),
        named(options(&[("pp", 2), ("tp", 2)], true, 2), "zb-h1"),
    ]
}

#[test]
fn every_mesh() {
    for (f, name) in ["deepseek_v3_mtp", "glm4_moe_mtp"].into_iter().enumerate() {
        for (_, o) in meshes().into_iter().enumerate().filter(|(m, _)| taken(f + m, 3)) {
            trains(name, &with(o));
        }
    }
}

/// A label counts if its document has the tokens before it that its prediction starts from.
#[test]
fn documents() {
    let packed = Some(Documents::ends(2, None));
    for (_, o) in meshes().into_iter().enumerate().filter(|(m, _)| taken(*m, 3)) {
        trains("deepseek_v3_mtp_packed", &with(Options { documents: packed, ..o }));
    }
}

/// What keeps experts in balance counts the layers' routers, too, at the tokens that have one so far behind them.
#[test]
fn routers_are_balanced() {
    let balance = Balance { aux: Some(0.02), z: 0.01, rate: 0.0 };
    let (ends, whole) = (Some(Documents::ends(2, None)), options(&[], false, 8));
    let rows =
        [("deepseek_v3_mtp", None), ("glm4_moe_mtp", None), ("deepseek_v3_mtp_packed", ends)];
    for (name, documents) in rows {
        let fx = Fixture::open(name);
        let with = |o: Options| with(Options { balance, documents, ..o });
        let trained = |o: &Options| {
            let model = fx.model(o);
            let compiled = compile(&model, o);
            let r = texts(&model, o, &compiled).prove();
            assert_eq!(r.verdict(), Verdict::Proved, "{name} {:?}: {:?}", o.mesh, r.gaps);
            let n = three_steps(&model, &compiled, &fx.input_ids, &fx.targets());
            (model, compiled, n)
        };
        let (model, compiled, alone) = trained(&with(whole.clone()));
        let mut s = session(&model, &compiled);
        let r = s.step(&StepBatch::tokens(&fx.input_ids, &fx.targets(), true), 1e-3, 1);
        let r = r.unwrap_or_else(|e| panic!("{e}"));
        for (loss, by) in [("aux_loss", 0.02), ("z_loss", 0.01)] {
            let got = f64::from(r.output(RoleKind::Mean, loss).expect("a mean").data[0]);
            let want = by * fx.expected(loss)[0];
            assert!((got - want).abs() <= 1e-5 * want, "{name} {loss}: {got}, not {want}");
        }
        for o in [
            options(&[("tp", 2)], true, 8),
            Options { zero: 3, ep: 2, ..options(&[("dp_shard", 2)], false, 4) },
            Options { cp_split: Some(CpSplit::Zigzag), ..options(&[("cp", 2)], false, 8) },
            options(&[("pp", 2)], false, 8),
        ] {
            let o = with(o);
            trained(&o).2.compare(&model, &alone, &format!("{name} {:?}", o.mesh));
        }
    }
}

/// Each loss is shown, times its weight.
#[test]
fn each_loss_is_shown() {
    let (fx, o) = (Fixture::open("deepseek_v3_mtp"), with(options(&[("pp", 2)], false, 2)));
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let mut s = session(&model, &compiled);
    let r = s.step(&StepBatch::tokens(&fx.input_ids, &fx.targets(), true), 1e-3, 1);
    let r = r.unwrap_or_else(|e| panic!("{e}"));
    for depth in [1, 2] {
        let name = format!("mtp_loss.{depth}");
        let got = r.output(RoleKind::Mean, &name).expect("a mean").data[0];
        let want = fx.expected(&name)[0];
        assert!((f64::from(got) - want).abs() <= 1e-5 * want, "{name}: {got}, not {want}");
    }
}

/// Weight 0 is the model without the layers, and says so of a checkpoint that has them.
#[test]
fn without_a_weight_nothing_of_them_is_there() {
    let name = "glm4_moe_mtp";
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let shape = Shape::new(ROWS, SEQ, Mode::Train);
    let m = load(&dir, &shape).unwrap_or_else(|d| panic!("{d}"));
    let said: Vec<_> = m.warnings.iter().map(|w| w.code).collect();
    assert_eq!(said, ["mtp-not-trained"]);
    assert!(!m.weights.iter().any(|w| w.param.contains("layers.2.")));
    let m = load(&dir, &Shape { mtp: 0.3, ..shape.clone() }).unwrap_or_else(|d| panic!("{d}"));
    assert!(m.warnings.is_empty(), "{:?}", m.warnings);
    assert!(m.weights.iter().any(|w| w.param == "model.layers.2.eh_proj.weight"));
    // Nothing is trained without training.
    let infer = Shape { mode: Mode::Infer, mtp: 0.3, ..shape.clone() };
    assert!(load(&dir, &infer).is_ok_and(|m| m.warnings.is_empty()));
    let without = |key: &str, value: serde_json::Value, shape: &Shape| {
        let mut config = m.config.clone();
        config[key] = value;
        from_config(&config, "config.json", shape).map(|_| ()).unwrap_err()
    };
    let asked = Shape { mtp: 0.3, ..shape.clone() };
    for value in [0.into(), serde_json::Value::Null] {
        let d = without("num_nextn_predict_layers", value, &asked);
        assert_eq!(d.code, "no-mtp-layers", "{d}");
    }
    let d = without("num_nextn_predict_layers", 99.into(), &asked);
    assert_eq!(d.code, "config", "{d}");
    let d = without("num_nextn_predict_layers", 4.into(), &Shape { seq: 4, ..asked.clone() });
    assert_eq!(d.code, "shape", "{d}");
    let config = serde_json::json!({"model_type": "llama"});
    let d = from_config(&config, "config.json", &asked).map(|_| ()).unwrap_err();
    assert!(d.code == "no-mtp-layers" && d.to_string().contains("`llama`"), "{d}");
}
