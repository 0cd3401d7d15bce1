//! The pass `experts`: a model with its experts laid out for a mesh means what it means on one device, and the
//! prover sees where it does not.

use crate::fixture::*;
use crate::lab::Lab;
use shardc::numbers::{Batch, Reference};
use shardc::proof;
use shardc_ir::documents::Documents;
use shardc_ir::func::{Module, Node};
use shardc_ir::interp::StepState;
use shardc_ir::ops::{Op, Route};
use shardc_ir::rule::Rule;
use shardc_ir::source::Source;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_passes::experts::laid_out;
use shardc_passes::options::{Balance, Buffers, CpMode, Options};
use shardc_prove::{Report, Verdict, experts};
use shardc_testing::taken;
use std::collections::BTreeMap;

/// Mesh, ep, etp, `--sp`, rows per rank and microbatch.
type Row = (&'static [(&'static str, usize)], usize, usize, bool, usize);

/// Shards of rows, of tokens, of both in both orders; groups over any of them.
#[rustfmt::skip]
const MESHES: &[Row] = &[
    (&[("dp_shard", 4)], 2, 1, false, 2),
    (&[("dp_shard", 2)], 2, 1, false, 2),
    (&[("cp", 2)], 2, 1, false, 8),
    (&[("tp", 2)], 2, 1, true, 4),
    (&[("tp", 2)], 1, 2, true, 8),
    (&[("pp", 2), ("dp_shard", 2)], 2, 1, false, 4),
    (&[("dp_shard", 2), ("cp", 2)], 2, 1, false, 4),
    (&[("dp_shard", 2), ("cp", 2)], 2, 2, false, 4),
    (&[("cp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
    (&[("dp_replicate", 2), ("dp_shard", 2), ("cp", 2), ("tp", 2)], 4, 1, true, 2),
];

fn on(&(mesh, ep, etp, sp, rows): &Row) -> Options {
    let balance = Balance { aux: Some(0.03), z: 0.02, rate: 0.01 };
    Options { ep, etp: Some(etp), balance, ..options(mesh, sp, rows) }
}

/// What two steps make of the parameters, and their losses, on one rank in f64.
fn trained(fx: &Fixture, source: &Source, o: &Options) -> (Vec<f64>, BTreeMap<String, Tensor>) {
    let mut state = StepState::default();
    fx.inputs(&mut state, o.documents);
    let labels = state.inputs["targets"].data.iter().filter(|t| **t >= 0.0).count();
    let batch = Batch { inputs: state.inputs, labels };
    let model = fx.model(o);
    let params = source.weights.iter().map(|w| {
        let numbers = fx.parameter(&model, &w.param);
        (w.param.clone(), Tensor::new(&w.shape, numbers))
    });
    let mut alone = Reference::new(source, o, params.collect());
    let mut found = vec![];
    for step in 1..=2 {
        let f = alone.step(&batch, step).unwrap_or_else(|e| panic!("{e}"));
        found.extend([f.loss, f.grad_norm]);
    }
    let moments = alone.states.iter().map(|(name, m)| (format!("moment {name}"), m[0].1.clone()));
    (found, moments.chain(alone.params.clone()).collect())
}

fn near(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-9 * (1.0 + b.abs()))
}

fn judged(source: &Module, laid: &Module) -> Report {
    let mut report = Report::default();
    experts::prove(source, laid, &mut report);
    report
}

fn routes(m: &Module) -> Vec<&Route> {
    let of = |n: &'_ Node| matches!(n.op, Op::Route(_));
    let all = m.funcs[0].nodes.iter().filter(|n| of(n));
    all.filter_map(|n| if let Op::Route(r) = &n.op { Some(r) } else { None }).collect()
}

/// Losses, gradients, loads that move biases: by the numbers, and by the prover.
#[test]
fn laid_out_is_the_same() {
    for (f, name) in EXPERTS.iter().enumerate() {
        let fx = Fixture::open(name);
        for (m, row) in MESHES.iter().enumerate().filter(|(m, _)| taken(m + f, 3)) {
            let o = on(row);
            let what = format!("{name} {row:?}");
            let source = source_of(&fx.model(&o));
            let laid = laid_out(source.clone(), &o).unwrap_or_else(|e| panic!("{what}: {e}"));
            let all = routes(&laid.module);
            assert!(!all.is_empty() && all.iter().all(|r| r.groups()[0] == o.ep), "{what}");
            let r = judged(&source.module, &laid.module);
            assert_eq!(r.verdict(), Verdict::Proved, "{what}: {:?}", r.gaps);
            // Ranks of etp have the same tokens: alone they leave a model as it is.
            let same = text::print_source(&source) == text::print_source(&laid);
            let count = if same { 0 } else { all.len() };
            assert_eq!(r.shown.values().sum::<usize>(), count, "{what}");
            assert_eq!(same, row.0 == [("tp", 2)] && row.1 == 1, "{what}");
            // The reference takes long: two meshes of a family.
            if m < 2 || m + 1 == MESHES.len() || m == 6 {
                let (a, b) = (trained(&fx, &source, &o), trained(&fx, &laid, &o));
                assert!(near(&a.0, &b.0), "{what}: {:?}, laid out {:?}", a.0, b.0);
                for (param, t) in &a.1 {
                    assert!(near(&t.data, &b.1[param].data), "{what}: {param}");
                }
            }
        }
    }
}

/// Documents in rows, and tokens dealt in zigzag: what experts see is each token.
#[test]
fn documents_and_zigzag() {
    let fx = Fixture::open("deepseek_v3");
    let documents = Some(Documents::ends(3, None));
    let o = Options { documents, cp_mode: CpMode::Ring, ..on(&MESHES[6]) };
    let source = source_of(&fx.model(&o));
    let laid = laid_out(source.clone(), &o).unwrap();
    assert_eq!(judged(&source.module, &laid.module).verdict(), Verdict::Proved);
    let (a, b) = (trained(&fx, &source, &o), trained(&fx, &laid, &o));
    assert!(near(&a.0, &b.0), "{:?}, laid out {:?}", a.0, b.0);
}

/// A pass over what it has made changes nothing, whatever the buffers are; a capacity is told apart.
#[test]
fn buffers() {
    let fx = Fixture::open("qwen3_moe");
    for moe in [Buffers::Worst, Buffers::Bound(1.5), Buffers::Capacity(1.0)] {
        for row in [&MESHES[0], &MESHES[7], &(&[], 1, 1, false, 8)] {
            let o = Options { moe, ..on(row) };
            let source = source_of(&fx.model(&o));
            let laid = laid_out(source.clone(), &o).unwrap();
            let again = laid_out(laid.clone(), &o).unwrap();
            assert_eq!(text::print_source(&laid), text::print_source(&again), "{moe:?} {row:?}");
            let drops = matches!(moe, Buffers::Capacity(_));
            assert!(routes(&laid.module).iter().all(|r| r.capacity.is_some() == drops));
            let r = judged(&source.module, &laid.module);
            assert_eq!(r.verdict(), Verdict::Proved, "{moe:?} {row:?}: {:?}", r.gaps);
            let told = r.shown.keys().any(|k| k.contains("no copy is dropped"));
            assert_eq!(told, drops, "{moe:?} {row:?}: {:?}", r.shown);
        }
    }
}

/// Every change of a laid-out program is seen.
#[test]
fn the_prover_sees_what_is_wrong() {
    let fx = Fixture::open("mixtral");
    let o = on(&MESHES[7 - 1]);
    let source = source_of(&fx.model(&o));
    let laid = laid_out(source.clone(), &o).unwrap().module;
    let nodes = &laid.funcs[0].nodes;
    let place = |is: fn(&Op) -> bool, nth: usize| {
        let mut all = nodes.iter().enumerate().filter(|(_, n)| is(&n.op));
        all.nth(nth).expect("such a node").0
    };
    let mut wrong: Vec<(&str, Module)> = vec![];
    let mut change = |what, f: &dyn Fn(&mut Vec<Node>)| {
        let mut m = laid.clone();
        f(&mut m.funcs[0].nodes);
        wrong.push((what, m));
    };
    let turn = |op: &Op| matches!(op, Op::Transpose(_));
    let (cut, join) = (place(turn, 0), place(turn, 1));
    let (route, dispatch) =
        (place(|o| matches!(o, Op::Route(_)), 0), place(|o| matches!(o, Op::Dispatch(_)), 0));
    let combine = place(|o| matches!(o, Op::Unpermute(_)), 0);
    let product = place(|o| matches!(o, Op::GroupedDot(_)), 0);
    // Both factors have two parts: types do not tell them apart.
    let turned = |n: &mut Node, cuts: bool| {
        let Op::Transpose(k) = &mut n.op else { panic!("a transpose") };
        let (mut from, mut to) = (k.rule.0.ins[0].clone(), k.rule.0.outs[0].clone());
        if cuts {
            to.swap(0, 1)
        } else {
            from.swap(0, 1)
        }
        k.rule.0 = Rule::of(&[&from], &[&to]).into();
    };
    change("tokens cut in another order", &|n| turned(&mut n[cut], true));
    change("tokens joined in another order", &|n| turned(&mut n[join], false));
    change("more experts", &|n| {
        if let Op::Route(r) = &mut n[route].op {
            *r = Route::new(r.groups()[0], 2 * r.groups()[1], r.rows, None);
        }
    });
    change("other rows than slots name", &|n| {
        if let Op::Dispatch(d) = &mut n[dispatch].op {
            *d = shardc_ir::ops::Dispatch::new(d.sizes.0[0].1, 2 * d.sizes.0[1].1);
        }
    });
    change("gates that are those of the copies", &|n| n[combine].ins[2] = n[dispatch].ins[2]);
    change("the weight of another product", &|n| n[product].ins[2] = n[product + 1].ins[2]);
    change("a node less", &|n| drop(n.remove(combine + 4)));
    // In another order on both sides they are in their places again.
    let mut other = laid.clone();
    turned(&mut other.funcs[0].nodes[cut], true);
    turned(&mut other.funcs[0].nodes[join], false);
    for right in [&laid, &other] {
        assert_eq!(judged(&source.module, right).verdict(), Verdict::Proved);
    }
    for (what, m) in wrong {
        let r = judged(&source.module, &m);
        assert_ne!(r.verdict(), Verdict::Proved, "{what}");
        assert!(r.shown.is_empty(), "{what}: {:?}", r.shown);
    }
}

/// A stored plan's model is the model: compiled for another ep it is what the folder compiles to.
#[test]
fn a_stored_plan_is_compiled_for_another_mesh() {
    let fx = Fixture::open("qwen3_moe");
    let o = on(&MESHES[0]);
    let model = fx.model(&o);
    let config = &model.config;
    let first = shardc::compile_config(config, &o).unwrap_or_else(|e| panic!("{e}")).stored;
    for row in [&MESHES[6], &(&[("dp_shard", 4)], 4, 1, false, 2), &MESHES[3]] {
        // As many rows in a microbatch.
        let (rows, dp) = (o.microbatch_rows(), on(row).data_parallel());
        let other = Options { microbatch: rows / dp, ..on(row) };
        let again = shardc::recompile(&first, &other).unwrap_or_else(|e| panic!("{row:?}: {e}"));
        let fresh = shardc::compile_config(config, &other).unwrap_or_else(|e| panic!("{e}"));
        let print = |s: &shardc::stored::Stored| text::print(&s.plan.module);
        assert_eq!(print(&again.stored), print(&fresh.stored), "{row:?}");
        assert_eq!(again.stored.source, first.source, "{row:?}");
    }
}

/// A text of four rows of two tokens, and two of four experts for each.
fn program() -> String {
    let case = include_str!("../../passes/tests/cases/experts/rows_over_ranks.ir");
    // Without what the pass makes of its lines.
    let own = case.lines().filter(|l| !l.trim_start().starts_with("//"));
    own.map(|l| format!("{l}\n")).collect()
}

/// That text with something else in place of a part of it.
fn changed(parts: &[(&str, &str)]) -> String {
    parts.iter().fold(program(), |text: String, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    })
}

/// With a loss of which only losses need what shards would change, and an output.
fn with_a_loss_of_experts() -> String {
    let loss = "  %perexpert = reduce_sum[zte->ze] %scores : f32[1,4]
  %sq = mul %perexpert, %perexpert : f32[1,4]
  %aux = reduce_sum[ze->] %sq : f32[]
  %main = reduce_sum[bs->] %l : f32[]
  %loss = add %main, %aux : f32[]
  return %loss, %back
";
    changed(&[
        ("sum \"loss\")", "sum \"loss\", f32[4,2,4] output \"out\")"),
        ("  %loss = reduce_sum[bs->] %l : f32[]\n  return %loss\n", loss),
    ])
}

/// Without training, what only losses need is no reason to leave experts as they are: neither for the plan nor for
/// what it is compared with. In training it is, and that is said.
#[test]
fn what_is_not_computed_does_not_matter() {
    let lab = Lab::new("expert_layouts_infer");
    lab.write("m.ir", with_a_loss_of_experts());
    let flags = ["--mesh", "dp_shard=2,ep=2,etp=1", "--moe-capacity", "1", "--prove", "yes"];
    let compile = [&["compile", "m.ir", "--output", "p", "--mode", "infer"], &flags[..]].concat();
    let said = String::from_utf8_lossy(&lab.ok(&compile).stderr).into_owned();
    assert!(!said.contains("no effect on"), "{said}");
    lab.ok(&["verify", "p", "--numbers"]);
    let plan = std::fs::read_to_string(lab.path("p/programs/all.ir")).unwrap();
    assert!(plan.contains("route[g=2,e=2"), "{plan}");
    let said = lab.ok(&[&["compile", "m.ir"], &flags[..4]].concat()).stderr;
    let said = String::from_utf8_lossy(&said);
    let what = "warning[no-effect]: ep=2, --moe-capacity 1 have no effect on 1 mixture of experts";
    assert!(said.contains(what) && said.contains("%perexpert = reduce_sum"), "{said}");
}

/// Experts that nothing makes different may all be one: every copy of a token may go to the same group.
#[test]
fn experts_of_a_token_that_are_the_same() {
    let lab = Lab::new("expert_layouts_same");
    let given = "reshape[(zp)qk->z(pq)k; z=1] %hash : i32[1,8,2]";
    let text = changed(&[
        ("  %targets: i32", "  %hash: i32[4,2,2] input \"hash\",\n  %targets: i32"),
        ("top_k[zte->ztk; k=2] %scores : i32[1,8,2]", given),
    ]);
    lab.write("m.ir", text);
    let mesh = ["--mesh", "dp_shard=4,ep=4,etp=1", "--global-batch", "4", "--prove", "yes"];
    // The largest bound gives what any load needs.
    for more in [&[][..], &["--moe-bound", "4"]] {
        lab.ok(&[&["compile", "m.ir", "--output", "p"], &mesh[..], more].concat());
        lab.ok(&["verify", "p", "--numbers"]);
    }
}

/// A text brings its sequence: where ranks cannot have equal parts of it, its experts stay, and that is said.
#[test]
fn tokens_that_do_not_divide() {
    let lab = Lab::new("expert_layouts_tokens");
    lab.write("m.ir", program());
    let compile = ["compile", "m.ir", "--output", "p", "--mesh"];
    let said = lab.ok(&[&compile[..], &["cp=4,ep=4,etp=1", "--prove", "yes"]].concat()).stderr;
    let said = String::from_utf8_lossy(&said);
    let what = "warning[no-effect]: ep=4 has no effect on 1 mixture of experts";
    assert!(said.contains(what) && said.contains("%flat = reshape"), "{said}");
    let said = lab.ok(&[&compile[..], &["cp=2,ep=2,etp=1"]].concat()).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(!said.contains("no effect on"), "{said}");
}

/// Copies without a number are refused before a text is written that nobody can read.
#[test]
fn copies_that_cannot_be_counted() {
    let fx = Fixture::open("qwen3_moe");
    let config = fx.model(&on(&MESHES[0])).config;
    let rows = 1 << 26;
    let o = Options { global_batch: rows, microbatch: rows, ..options(&[], false, 1) };
    let d = shardc::compile_config(&config, &o).err().expect("too many copies");
    assert_eq!(d.code, "shape", "{d}");
    assert!(d.help.iter().any(|h| h.contains("--microbatch")), "{d}");
}

/// A model with experts that does not verify is no model to compare a plan with.
#[test]
fn a_model_that_does_not_verify() {
    let mut source = text::parse_source(&program()).unwrap_or_else(|e| panic!("{e}"));
    source.module.funcs[0].nodes.reverse();
    assert!(proof::both(source, &options(&[("dp_shard", 2)], false, 2)).is_err());
}

/// The same of a text of which nothing is known but its program: its ranks exchange rows of experts.
#[test]
fn a_text_is_laid_out() {
    let source = text::parse_source(&program()).unwrap_or_else(|e| panic!("{e}"));
    let o = |ep| Options {
        mesh: vec![("dp_shard".into(), 2)],
        ep,
        etp: Some(1),
        global_batch: 4,
        microbatch: 2,
        seq: 2,
        ..Options::default()
    };
    let plan = |o: &Options| {
        let made = shardc_passes::pipeline::compile(source.clone(), o, &mut |_, _| {});
        made.unwrap_or_else(|e| panic!("{e}")).plan
    };
    let exchanges = |o: &Options| text::print(&plan(o).module).matches("= all_to_all").count();
    // Counts, rows to the experts and back, and the gradients of both.
    assert_eq!((exchanges(&o(1)), exchanges(&o(2))), (0, 5));
    let [model, laid] = proof::both(source.clone(), &o(2)).unwrap();
    assert_eq!(judged(&model, &laid).verdict(), Verdict::Proved);
}

/// Rows that no token fills are undefined: what would sum over them, in forward or in a gradient, is refused.
#[test]
fn rows_that_no_token_fills_are_not_read() {
    let lab = Lab::new("expert_layouts_rows");
    let act = "%act = silu %up : f32[1,1,16,4]";
    let param = |name: &str, ty: &str| format!("  %{name}: {ty} param \"{name}.weight\",\n  %ids:");
    let with = |name: &str, ty: &str, line: &str| {
        let line = format!("%act0 = silu %up : f32[1,1,16,4]\n  {line} : f32[1,1,16,4]");
        changed(&[("  %ids:", &param(name, ty)), (act, &line)])
    };
    let summed = "the gradient of %own is a sum over all rows of a buffer";
    let bias = with("own", "f32[4]", "%act = add[gzch,h->gzch] %act0, %own");
    let texts = [
        (bias.clone(), summed),
        (with("own", "f32[4]", "%act = mul[gzch,h->gzch] %act0, %own"), summed),
        (with("own", "f32[4,4]", "%act = dot[gzch,oh->gzco] %act0, %own"), summed),
        (
            changed(&[(
                act,
                "%act0 = silu %up : f32[1,1,16,4]\n  %all = reduce_max[gzch->gzh] %act0 : f32[1,1,4]\n  %act = add[gzch,gzh->gzch] %act0, %all : f32[1,1,16,4]",
            )]),
            "%all is made of several rows of a buffer",
        ),
        (
            changed(&[
                ("-> (f32[] sum \"loss\")", "-> (f32[] sum \"loss\", f32[1,1,16,4] output \"up\")"),
                ("return %loss", "return %loss, %up"),
            ]),
            "%up is a result",
        ),
        (
            changed(&[(
                act,
                "%act0 = silu %up : f32[1,1,16,4]\n  %made = reshape[gz(ef)h->(gze)fh; e=4] %act0 : f32[4,4,4]\n  %act = grouped_dot %rows, %counts, %made : f32[1,1,16,4]",
            )]),
            "%made is made of rows of a buffer",
        ),
    ];
    for (text, what) in &texts {
        lab.write("m.ir", text);
        for mesh in [&[][..], &["--mesh", "dp=2,ep=2"]] {
            let said =
                lab.refuses(&[&["compile", "m.ir", "-o", "p"], mesh].concat(), 4, "not-built");
            assert!(said.contains(what), "{said}");
        }
    }
    // Without its gradient each row is its own, and the others are nobody's.
    lab.write("m.ir", &bias);
    lab.ok(&["compile", "m.ir", "-o", "f", "--freeze", "own.weight", "--mesh", "dp=2,ep=2"]);
    lab.ok(&["verify", "f", "--numbers"]);
    lab.write(
        "m.ir",
        bias.replace("sum \"loss\")", "sum \"loss\", f32[4,2,4] output \"y\")")
            .replace("return %loss", "return %loss, %back"),
    );
    lab.ok(&["compile", "m.ir", "-o", "p", "--mode", "infer", "--mesh", "dp=2,ep=2"]);
    lab.ok(&["verify", "p", "--numbers"]);
}

/// Random tokens may need more rows than a bound gives: then there are no numbers to compare, and that is said.
#[test]
fn numbers_with_too_few_rows_are_not_compared() {
    let lab = Lab::new("expert_layouts_bound");
    let moe = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mixtral");
    let compile = ["compile", moe, "--mesh", "dp=2,ep=2", "-o"];
    lab.ok(&[&compile[..], &["few", "--moe-bound", "1.2"]].concat());
    let said = lab.refuses(&["verify", "few", "--numbers"], 6, "moe-bound");
    assert!(said.contains("compile with a larger --moe-bound"), "{said}");
    lab.ok(&[&compile[..], &["enough", "--moe-bound", "2"]].concat());
    lab.ok(&["verify", "enough", "--numbers"]);
}
