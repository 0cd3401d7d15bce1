//! Padding chooses no expert: losses of routers, loads, biases and capacity are those of rows without it, and of
//! transformers with a mask; the same on every mesh.

use crate::fixture::*;
use shardc_ir::documents::{Documents, Ends};
use shardc_ir::func::{Fill, Role, RoleKind};
use shardc_ir::interp::StepState;
use shardc_ir::ops::Op;
use shardc_ir::plan::Mode;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_passes::options::{Balance, Buffers, CpMode, CpSplit, Options, Order};
use shardc_prove::Verdict;
use shardc_runtime::StepBatch;

/// As `tests/fixtures/make.py` masks rows; no document ends.
const PADDED: Ends = Ends { end: 2, padding: Some(0) };

/// What keeps experts in balance, all of it or without the auxiliary loss.
const ALL_THREE: Balance = Balance { aux: Some(0.03), z: 0.02, rate: 0.01 };
const LINEAR: Balance = Balance { aux: Some(0.0), ..ALL_THREE };

fn padded(o: Options) -> Options {
    Options { documents: Some(Documents::Ends(PADDED)), ..o }
}

/// Tokens of a fixture of which none is padding or ends a document.
fn tokens(fx: &Fixture) -> Vec<i32> {
    fx.input_ids.iter().map(|&t| if [PADDED.end, 0].contains(&t) { t + 3 } else { t }).collect()
}

/// The labels of rows of so many tokens: those behind tokens that are none are ignored.
fn targets(ids: &[i32], seq: usize) -> Vec<i32> {
    let row = |r: &[i32]| r[1..].iter().copied().chain([-100]).collect::<Vec<_>>();
    let mut all: Vec<i32> = ids.chunks(seq).flat_map(row).collect();
    PADDED.ignore(ids, &mut all);
    all
}

/// What three steps of the interpreter make in f64: the loss and gradients of the first, and parameters.
struct Exact {
    loss: f64,
    grads: Vec<(String, Vec<f64>)>,
    params: Vec<(String, Vec<f64>)>,
}

fn exact(fx: &Fixture, ids: &[i32], o: &Options) -> Exact {
    let model = fx.model(o);
    let compiled = compile(&model, o);
    let mut state = start(fx, &model, &compiled);
    put(&mut state, ids, o);
    let mesh = &compiled.plan.module.mesh;
    let mut made = Exact { loss: 0.0, grads: vec![], params: vec![] };
    for step in 1..=3 {
        interpret(&compiled, &mut state, step).unwrap_or_else(|e| panic!("{e}"));
        if step == 1 {
            let out = |kind: RoleKind, of: &str| state.output(mesh, kind, of).map(|t| t.data);
            made.loss = out(RoleKind::Metric, "loss").unwrap_or_else(|e| panic!("{e}"))[0];
            let grad = |p: &String| Some((p.clone(), out(RoleKind::GradShown, p).ok()?));
            made.grads = model.weights.iter().filter_map(|w| grad(&w.param)).collect();
        }
    }
    let param = |p: &str| state.values[&Role::new(RoleKind::Param, p)][0].data.clone();
    made.params = model.weights.iter().map(|w| (w.param.clone(), param(&w.param))).collect();
    made
}

/// Puts rows of the options' length into a state.
fn put(state: &mut StepState, ids: &[i32], o: &Options) {
    let seq = o.seq;
    let of = |x: Vec<i32>| Tensor::new(&[ROWS, seq], x.into_iter().map(f64::from).collect());
    let [segments, offsets] = PADDED.places(ids, seq);
    let count = Documents::count(&segments, o.microbatches());
    for (name, t) in [
        ("input_ids", of(ids.to_vec())),
        ("targets", of(targets(ids, seq))),
        ("positions", Tensor::from_fn(&[seq], |i| i[0] as f64)),
        ("segments", of(segments)),
        ("offsets", of(offsets)),
        ("tokens", Tensor::scalar(count)),
    ] {
        state.inputs.insert(name.into(), t);
    }
}

/// How far numbers are from others, in the norm of those.
fn far(got: &[f64], want: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(got.len(), want.len());
    norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied()).max(1e-9)
}

/// Rows with columns of padding, and the same rows without them, which are computed by a program without documents.
/// Half of the rows that have a capacity would be dropped if padding came first.
#[test]
fn rows_are_those_without_their_padding() {
    for (name, columns, before, capacity) in [
        ("qwen3_moe", 14, true, false),
        ("qwen3_moe", 8, true, true),
        ("deepseek_v3", 4, false, false),
        ("mixtral", 8, true, false),
        ("deepseek_v3", 8, true, true),
    ] {
        let (fx, own) = (Fixture::open(name), SEQ - columns);
        let (all, none) = (tokens(&fx), vec![0; columns]);
        let rows = || all.chunks(SEQ).map(|r| &r[..own]);
        let short: Vec<i32> = rows().flatten().copied().collect();
        let row = |r: &[i32]| if before { [&none, r].concat() } else { [r, &none].concat() };
        let long: Vec<i32> = rows().flat_map(row).collect();
        let of = |seq: usize| {
            let keep = 0.75 * own as f64 / seq as f64;
            let moe = if capacity { Buffers::Capacity(keep) } else { Buffers::Worst };
            // The auxiliary loss is one of a microbatch.
            Options { seq, moe, balance: ALL_THREE, ..options(&[], false, 4) }
        };
        let want = exact(&fx, &short, &of(own));
        let got = exact(&fx, &long, &padded(of(SEQ)));
        let what = format!("{name}, {columns} of {SEQ} columns, capacity {capacity}");
        assert!((got.loss - want.loss).abs() < 1e-12 * want.loss, "{what}: {}", got.loss);
        assert!(want.grads.len() > 10);
        for (kind, got, want, bound) in [
            ("gradient of", &got.grads, &want.grads, 1e-9),
            ("three steps of", &got.params, &want.params, 1e-9),
        ] {
            for ((p, got), (q, want)) in got.iter().zip(want) {
                let off = far(got, want);
                assert!(p == q && off < bound, "{what}: {kind} {p} is off by {off:.1e}");
            }
        }
    }
}

/// Meshes with their ep, etp and `--sp`, rows per rank and microbatch, and what else is asked.
#[rustfmt::skip]
fn meshes() -> Vec<Options> {
    let on = |mesh: &[(&str, usize)], ep, etp, sp, rows| {
        let o = options(mesh, sp, rows);
        padded(Options { ep, etp: Some(etp), balance: ALL_THREE, ..o })
    };
    let cp = |cp_mode, split, ep, rows| {
        Options { cp_mode, cp_split: Some(split), ..on(&[("cp", 2)], ep, 1, false, rows) }
    };
    vec![
        on(&[("dp_replicate", 2)], 1, 1, false, 4),
        Options { moe: Buffers::Bound(1.3), zero: 3, ..on(&[("dp_shard", 2)], 2, 1, false, 4) },
        Options { balance: LINEAR, ..on(&[("dp_shard", 2)], 2, 1, false, 1) },
        on(&[("tp", 2)], 1, 2, true, 8),
        on(&[("tp", 2)], 2, 1, true, 8),
        on(&[("tp", 2)], 1, 2, false, 8),
        cp(CpMode::AllGather, CpSplit::Contiguous, 2, 8),
        cp(CpMode::Ring, CpSplit::Zigzag, 1, 8),
        Options { balance: LINEAR, ..cp(CpMode::Ulysses, CpSplit::Contiguous, 2, 2) },
        Options { balance: LINEAR, schedule: Order::Named("zb-h1".into()),
                  ..on(&[("pp", 2)], 1, 1, false, 2) },
        on(&[("pp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
        Options { auto: true, ..on(&[("dp_shard", 2), ("tp", 2)], 2, 2, false, 4) },
    ]
}

/// Rows with 0 to 14 places of padding before or behind 16 to 2 tokens.
fn uneven(fx: &Fixture) -> Vec<i32> {
    let mut ids = tokens(fx);
    for (r, row) in ids.chunks_mut(SEQ).enumerate() {
        let none = if r % 2 == 0 { 0..2 * r } else { SEQ - 2 * r..SEQ };
        row[none].fill(0);
    }
    ids
}

#[test]
fn every_mesh_counts_tokens_alike() {
    for (name, skip) in [("deepseek_v3", 0), ("qwen3_moe", 1)] {
        let fx = Fixture::open(name);
        let ids = uneven(&fx);
        let numbers = |o: &Options| {
            let model = fx.model(o);
            let compiled = compile(&model, o);
            let r = texts(&model, o, &compiled).prove();
            let shown = r.verdict() == Verdict::Proved;
            assert!(shown, "{name} {:?}: {:?} {:?}", o.mesh, r.refuted, r.gaps);
            let n = three_steps(&model, &compiled, &ids, &targets(&ids, SEQ));
            (model, n)
        };
        let alone = |balance| numbers(&padded(Options { balance, ..options(&[], false, 8) }));
        let (all, linear) = (alone(ALL_THREE), alone(LINEAR));
        for o in meshes().iter().skip(skip).step_by(2) {
            let (model, one) = if o.balance == LINEAR { &linear } else { &all };
            let what = format!("{name} {:?} ep={} sp={} {}", o.mesh, o.ep, o.sp, o.microbatch);
            numbers(o).1.compare(model, one, &what);
        }
    }
}

/// A capacity for the tokens that are there drops none of them, wherever padding stands: every mesh computes what
/// buffers that are always sufficient give.
#[test]
fn padding_takes_no_capacity() {
    let fx = Fixture::open("qwen3_moe");
    let mut ids = tokens(&fx);
    ids.chunks_mut(SEQ).for_each(|row| row[..SEQ - 2].fill(0));
    let numbers = |o: &Options| {
        let model = fx.model(o);
        let n = three_steps(&model, &compile(&model, o), &ids, &targets(&ids, SEQ));
        (model, n)
    };
    let balance = ALL_THREE;
    let (model, want) = numbers(&padded(Options { balance, ..options(&[], false, 8) }));
    // An eighth of the tokens, each with 3 of 8 experts: as many rows as there are tokens.
    let moe = Buffers::Capacity(1.0 / 3.0);
    for (mesh, ep, etp, rows) in [
        (&[][..], 1, 1, 8),
        (&[("dp_shard", 2)], 2, 1, 4),
        (&[("dp_shard", 2), ("tp", 2)], 2, 2, 4),
    ] {
        let o = Options { ep, etp: Some(etp), moe, balance, ..options(mesh, false, rows) };
        let mut got = numbers(&padded(o)).1;
        // Padding is behind nothing: what it becomes is its own.
        got.logits.clone_from(&want.logits);
        got.compare(&model, &want, &format!("{mesh:?}"));
    }
}

/// Loss, logits of tokens, gradients and three steps are those of transformers with a mask, which leaves padding out of
/// the auxiliary loss.
#[test]
fn masked_rows_are_those_of_transformers() {
    let fx = Fixture::open("qwen3_moe_padded");
    let on = |mesh: &[(&str, usize)], ep, rows| {
        padded(Options { ep, etp: Some(1), ..options(mesh, false, rows) })
    };
    for o in [
        on(&[], 1, 8),
        on(&[("dp_shard", 2)], 2, 4),
        on(&[("cp", 2), ("tp", 2)], 4, 8),
        on(&[("pp", 2), ("dp_shard", 2)], 2, 4),
    ] {
        let model = fx.model(&o);
        let n = three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets());
        let at = |p: &str| model.weights.iter().position(|w| w.param == p).expect("a weight");
        fx.compare_loss(n.loss);
        let want = fx.reference("logits");
        let width = want.len() / fx.input_ids.len();
        let of = |(i, x): (usize, &f64)| if fx.input_ids[i / width] == 0 { want[i] } else { *x };
        fx.compare_logits(&n.logits.iter().enumerate().map(of).collect::<Vec<_>>());
        fx.compare_grads(&model, |p| n.grads[at(p)].clone());
        fx.compare_params(&model, |p| n.params[at(p)].clone());
    }
}

/// A tokenizer that pads with the token that ends documents: the rows are those that pad with another.
#[test]
fn the_end_of_documents_may_pad() {
    let fx = Fixture::open("qwen3_moe");
    let mut ids = tokens(&fx);
    for (r, row) in ids.chunks_mut(SEQ).enumerate() {
        // Two documents, the second cut off in one row, and padding behind them or before them.
        let (before, end) = if r % 2 == 0 { (0, 10 - r) } else { (4, SEQ - 1) };
        row[..before].fill(0);
        row[before + 4] = PADDED.end;
        if r != 3 {
            row[end] = PADDED.end;
        }
        row.get_mut(end + 1..).into_iter().flatten().for_each(|t| *t = 0);
    }
    let ends = |t: &i32| if *t == 0 { PADDED.end } else { *t };
    let other = Ends { end: PADDED.end, padding: Some(PADDED.end) };
    let (same, seq): (Vec<i32>, _) = (ids.iter().map(ends).collect(), SEQ);
    assert_eq!(other.places(&same, seq), PADDED.places(&ids, seq));
    let numbers = |ids: &[i32], documents| {
        let o = options(&[("dp_shard", 2)], false, 2);
        let o =
            Options { documents: Some(Documents::Ends(documents)), balance: ALL_THREE, ep: 2, ..o };
        let model = fx.model(&o);
        // Labels as they are in data: what is not scored is found by the documents.
        let row = |r: &[i32]| r[1..].iter().copied().chain([-100]).collect::<Vec<_>>();
        let labels: Vec<i32> = ids.chunks(SEQ).flat_map(row).collect();
        let n = three_steps(&model, &compile(&model, &o), ids, &labels);
        (model, n)
    };
    let ((model, want), (_, mut got)) = (numbers(&ids, PADDED), numbers(&same, other));
    got.logits.clone_from(&want.logits);
    got.compare(&model, &want, "padded with its end");
}

/// A step of padding alone has loss 0 and moves no bias.
#[test]
fn a_batch_of_padding_has_no_loss() {
    let fx = Fixture::open("deepseek_v3");
    let o = padded(Options { balance: ALL_THREE, ..options(&[], false, 4) });
    let model = fx.model(&o);
    let mut s = session(&model, &compile(&model, &o));
    let (ids, targets) = (vec![0; ROWS * SEQ], vec![-100; ROWS * SEQ]);
    let r = s.step(&StepBatch::tokens(&ids, &targets, false), 0.0, 1);
    let r = r.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((r.loss, r.grad_norm), (Some(0.0), Some(0.0)));
    for w in model.weights.iter().filter(|w| w.param.ends_with("_correction_bias")) {
        let role = Role::new(RoleKind::Param, w.param.as_str());
        let bias = s.tensor(&role).unwrap_or_else(|e| panic!("{e}")).data;
        let bias: Vec<f64> = bias.into_iter().map(f64::from).collect();
        assert_eq!(bias, fx.parameter(&model, &w.param), "{}", w.param);
    }
}

/// A program of documents without padding, as a plan keeps it, is not taken for rows with padding.
#[test]
fn a_program_whose_padding_chooses_is_refused() {
    let packed = |padding| Options {
        documents: Some(Documents::Ends(Ends { padding, ..PADDED })),
        ..options(&[], false, 8)
    };
    let of = |name: &str| Fixture::open(name).model(&packed(None));
    let d = try_compile(&of("mixtral"), &packed(PADDED.padding)).expect_err("refused");
    assert!(d.code == "source" && d.message.contains("experts of padding"), "{d}");
    for (name, padding) in [("mixtral", None), ("llama_packed", PADDED.padding)] {
        try_compile(&of(name), &packed(padding)).unwrap_or_else(|d| panic!("{d}"));
    }
}

/// Without padding the program is the one of old: no token is asked whether it is one.
#[test]
fn without_padding_nothing_is_asked() {
    let of = |name: &str, documents, mode| {
        let o = Options { documents, mode, balance: ALL_THREE, ..options(&[], false, 8) };
        Fixture::open(name).model(&o).module
    };
    let asks = |name: &str, documents, mode| {
        let m = of(name, documents, mode);
        let selects = m.funcs[0].nodes.iter().filter(|n| matches!(n.op, Op::Select(_))).count();
        let counts = m.funcs[0].args.iter().filter(|a| a.fills(Fill::Count)).count();
        (selects, counts)
    };
    let ends = Some(Documents::ends(2, None));
    for name in ["qwen3_moe", "deepseek_v3"] {
        assert_eq!(asks(name, None, Mode::Train), (0, 0), "{name}");
        assert_eq!(asks(name, ends, Mode::Train), (0, 0), "{name}");
        assert_eq!(asks(name, Some(Documents::Ends(PADDED)), Mode::Train), (2, 1), "{name}");
        assert_eq!(asks(name, Some(Documents::Ends(PADDED)), Mode::Infer), (2, 0), "{name}");
    }
    let of = |documents| text::print(&of("llama_packed", documents, Mode::Train));
    assert_eq!(
        of(ends),
        of(Some(Documents::Ends(PADDED))),
        "without experts padding changes nothing"
    );
}
