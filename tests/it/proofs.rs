//! Proofs of plans: those of all families and layouts are proved, and none that computes something else.

pub mod planted;

use crate::chunks::in_chunks;
use crate::fixture::*;
use shardc::proof::Texts;
use shardc_frontends::Model;
use shardc_ir::func::{Module, StateInit};
use shardc_ir::interp::StepState;
use shardc_ir::ops::{Fill, Op};
use shardc_ir::plan::Mode;
use shardc_ir::schedule::{ActionKind, Schedule};
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{
    Balance, Buffers, CpMode, CpSplit, Decay, Fuse, Optimizer, Options, Order, TpMode, TpSteps,
    Transport,
};
use shardc_passes::pipeline::Compiled;
use shardc_prove::field::prove_smaller;
use shardc_prove::lemmas::Lemmas;
use shardc_prove::local::{BY_EVALUATION, BY_RULE};
use shardc_prove::{Report, Verdict, by_form};
use shardc_testing::samples;
use std::collections::BTreeSet;

/// A compiled model with what its proof takes.
struct Case {
    name: &'static str,
    fx: Fixture,
    model: Model,
    compiled: Compiled,
    texts: Texts,
}

impl Case {
    fn new(name: &'static str, o: &Options) -> Case {
        let fx = Fixture::open(name);
        let model = fx.model(o);
        let compiled = compile(&model, o);
        let texts = texts(&model, o, &compiled);
        Case { name, fx, model, compiled, texts }
    }

    /// The proof of other programs in the place of these, by the forms of terms: many are tried.
    fn judge(&mut self, programs: &Module) -> Report {
        self.texts.programs.clone_from(programs);
        by_form(&self.texts.subject(), Lemmas::default())
    }

    /// Everything that a step leaves behind, by the f64 interpreter.
    fn numbers(&mut self, programs: &Module) -> Result<StepState, String> {
        self.compiled.plan.module.clone_from(programs);
        let mut state = start(&self.fx, &self.model, &self.compiled);
        interpret(&self.compiled, &mut state, 1).map_err(|d| d.to_string())?;
        Ok(state)
    }
}

/// What is wrong, for a failing test.
fn found(r: &Report) -> String {
    let first = r.refuted.first().map(|x| format!("{x:#?}"));
    let gap = r.gaps.first().map(|x| format!("{x:#?}"));
    format!("{:?}\n{}", r.verdict(), first.or(gap).unwrap_or_default())
}

pub fn proved(name: &'static str, o: &Options) {
    let case = Case::new(name, o);
    let r = case.texts.prove();
    let what = format!("{name} {:?} {:?} sp={} zero={}", o.mesh, o.schedule, o.sp, o.zero);
    assert_eq!(r.verdict(), Verdict::Proved, "{what}: {}", found(&r));
    let mut types = Report::default();
    shardc_prove::local::prove(&case.texts.programs, true, &mut types);
    assert_eq!(types.verdict(), Verdict::Proved, "{what}: {}", found(&types));
    let [by_rule, evaluated] = [BY_RULE, BY_EVALUATION].map(|k| types.shown[k]);
    assert!(by_rule > 20 && evaluated == by_rule, "{what}: {:?}", types.shown);
    let updates = if o.mode == Mode::Train { r.shown.get("updates").copied() } else { Some(1) };
    assert!(updates.is_some_and(|n| n > 0), "{what}: no update was shown: {:?}", r.shown);
}

type Axes = &'static [(&'static str, usize)];
const DP2_TP2: Axes = &[("dp_replicate", 2), ("tp", 2)];

#[test]
fn one_small_model() {
    for mesh in [&[][..], &[("tp", 2)], &[("dp_replicate", 2)], DP2_TP2] {
        proved("llama_gqa", &options(mesh, false, 2));
    }
}

#[test]
fn every_family() {
    for name in ALL.iter().chain(EXPERTS) {
        proved(name, &options(&[], false, 8));
        proved(name, &options(DP2_TP2, true, 2));
        let half = Options {
            dtype: DType::BF16,
            recompute: Recompute::Full,
            ..options(DP2_TP2, false, 1)
        };
        proved(name, &half);
        proved(name, &Options { mode: Mode::Infer, ..options(DP2_TP2, false, 2) });
    }
}

#[test]
fn losses_in_chunks() {
    for (name, o) in in_chunks() {
        proved(name, &o);
        proved(name, &Options { dtype: DType::BF16, ..o });
    }
    proved("deepseek_v3", &Options { loss_chunks: LossChunks::Of(3), ..options(DP2_TP2, true, 2) });
}

/// Chunks that are not all tokens, each once, are no proof: another range of any value is seen.
#[test]
fn chunks_of_other_tokens() {
    let mut case = Case::new(
        "llama_gqa",
        &Options { loss_chunks: LossChunks::Of(4), ..options(&[], false, 8) },
    );
    let sound = case.compiled.plan.module.clone();
    assert_eq!(case.judge(&sound).verdict(), Verdict::Proved);
    let of = |m: &Module| m.funcs.iter().position(|f| f.name == "forward").expect("a forward");
    let at = of(&sound);
    let mut changed = 0;
    for i in 0..sound.funcs[at].nodes.len() {
        let mut other = sound.clone();
        let Op::Narrow(n) = &mut other.funcs[at].nodes[i].op else { continue };
        n.start = if n.start == 0 { 4 } else { n.start - 4 };
        assert_ne!(case.judge(&other).verdict(), Verdict::Proved, "node {i}");
        changed += 1;
    }
    // Of four chunks the operand, the labels, and whether these count.
    assert_eq!(changed, 12);
}

#[test]
fn pieces_of_parameters() {
    let meshes: [(Axes, bool); 3] = [
        (&[("dp_shard", 4)], false),
        (&[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], false),
        (&[("pp", 2), ("dp_shard", 2), ("tp", 2)], true),
    ];
    for (mesh, sp) in meshes {
        for zero in 0..=3 {
            for name in ["gpt2", "qwen3"] {
                proved(name, &Options { zero, ..options(mesh, sp, 1) });
            }
        }
    }
    let kept =
        Options { zero: 3, reshard_after_forward: false, ..options(&[("dp_shard", 2)], false, 2) };
    proved("llama_gqa", &kept);
}

#[test]
fn every_schedule() {
    let names = [
        "gpipe",
        "1f1b",
        "interleaved",
        "looped-bfs",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe-v",
    ];
    for name in names {
        let schedule = Order::Named(name.into());
        proved("llama_deep", &Options { schedule, ..options(&[("pp", 2)], false, 1) });
    }
    // A table that both ends of the pipeline use.
    for name in ["gpt2", "llama_bias_tied"] {
        for schedule in ["1f1b", "zb-h1"] {
            let schedule = Order::Named(schedule.into());
            proved(name, &Options { schedule, ..options(&[("pp", 2), ("tp", 2)], false, 2) });
        }
    }
}

#[test]
fn what_backward_computes_again() {
    for recompute in [Recompute::Selective, Recompute::Full, Recompute::Sqrt] {
        for name in ["llama_gqa", "gemma2", "gpt2"] {
            let o = Options { recompute: recompute.clone(), ..options(&[("tp", 2)], true, 4) };
            proved(name, &o);
        }
    }
}

fn ring(split: CpSplit, mesh: Axes) -> Options {
    Options { cp_mode: CpMode::Ring, cp_split: Some(split), ..options(mesh, false, 4) }
}

#[test]
fn tokens_over_ranks() {
    for split in [CpSplit::Contiguous, CpSplit::Zigzag] {
        proved("llama_gqa", &ring(split, &[("cp", 4)]));
        proved("gemma2", &ring(split, &[("cp", 2), ("tp", 2)]));
    }
    for cp_mode in [CpMode::AllGather, CpMode::Ulysses] {
        let o = Options { cp_mode, ..options(&[("cp", 2), ("tp", 2)], false, 4) };
        proved("llama_mha", &o);
    }
}

fn grid(tp_mode: TpMode, tp: Axes, tp_steps: TpSteps) -> Options {
    Options { tp_mode, tp_steps, ..options(tp, false, 8) }
}

#[test]
fn grids() {
    let deep = TpMode::TwoAndHalfD { depth: 2 };
    for steps in [TpSteps::Gathered, TpSteps::Summa] {
        proved("qwen3", &grid(TpMode::TwoD, &[("tp", 4)], steps));
        proved("gpt2", &grid(TpMode::TwoD, &[("tp", 4)], steps));
        proved("llama_mha", &grid(deep, &[("tp", 8)], steps));
    }
    proved("llama_gqa", &grid(TpMode::ThreeD, &[("tp", 8)], TpSteps::Gathered));
}

const BALANCE: Balance = Balance { aux: Some(0.01), z: 0.001, rate: 0.001 };

#[test]
fn experts_over_ranks() {
    let on = |mesh, ep, etp, microbatch| Options { ep, etp, ..options(mesh, false, microbatch) };
    let dp2_tp2: Axes = &[("dp_shard", 2), ("tp", 2)];
    proved("mixtral", &on(dp2_tp2, 2, Some(1), 2));
    proved("qwen3_moe", &on(&[("dp_shard", 4)], 4, None, 1));
    proved("deepseek_v3", &Options { balance: BALANCE, ..on(dp2_tp2, 4, Some(1), 2) });
    let moe = Buffers::Capacity(1.5);
    proved("mixtral", &Options { moe, ..on(&[("dp_shard", 2)], 2, None, 4) });
    let schedule = Order::Named("zb-h1".into());
    let piped = on(&[("pp", 2), ("dp_shard", 2)], 2, None, 1);
    proved("deepseek_v3", &Options { schedule, balance: BALANCE, ..piped });
}

#[test]
fn recipes() {
    let plain = || options(DP2_TP2, false, 1);
    proved("llama_gqa", &Options { clip: None, optimizer: Optimizer::Sgd, ..plain() });
    proved("gpt2", &Options { decay: Decay::Matrices, weight_decay: 0.1, ..plain() });
    proved("llama_gqa", &Options { freeze: vec!["*embed*".into(), "*norm*".into()], ..plain() });
    proved("gpt2", &Options { observe: false, ..plain() });
}

fn evaluated(cases: &[(&'static str, Options)]) {
    for (name, o) in cases {
        // Of a few tokens in every run.
        let o = &Options { seq: samples(4, SEQ as u64) as usize, ..o.clone() };
        let r = Case::new(name, o).texts.evaluate(&mut |_| ());
        assert_eq!(r.verdict(), Verdict::Proved, "{name} {:?}: {}", o.mesh, found(&r));
        assert!(r.shown["elements compared"] > 1000, "{name}: {:?}", r.shown);
    }
}

fn experts_on_four() -> Options {
    Options {
        ep: 2,
        etp: Some(1),
        balance: BALANCE,
        ..options(&[("dp_shard", 2), ("tp", 2)], false, 2)
    }
}

/// All ranks over a field, with the textbook's terms on the same numbers: no lemma of terms is used.
#[test]
fn by_evaluation() {
    evaluated(&[
        ("llama_mha", Options { zero: 3, ..options(&[("dp_shard", 2)], false, 2) }),
        ("qwen3", grid(TpMode::TwoD, &[("tp", 4)], TpSteps::Summa)),
        ("mixtral", experts_on_four()),
    ]);
}

/// The same programs at the least sizes on axes of two ranks are proved, and wrong ones are not.
#[test]
fn plans_made_smaller() {
    let named = |name: &str| Order::Named(name.into());
    let cases = [
        ("llama_gqa", Options { zero: 3, ..options(&[("dp_shard", 4), ("tp", 2)], true, 1) }),
        (
            "gpt2",
            Options { schedule: named("zb-h1"), ..options(&[("pp", 2), ("tp", 4)], false, 2) },
        ),
        ("qwen3", grid(TpMode::TwoD, &[("tp", 4)], TpSteps::Summa)),
        ("gemma2", ring(CpSplit::Zigzag, &[("cp", 2), ("tp", 2)])),
        ("llama_gqa", ring(CpSplit::Zigzag, &[("cp", 4)])),
        ("llama_deep", Options { schedule: named("zb-v"), ..options(&[("pp", 2)], false, 1) }),
    ];
    for (name, o) in cases {
        let mut case = Case::new(name, &o);
        let smaller = |case: &Case| prove_smaller(&case.texts.subject(), case.texts.data);
        let (small, full) = (smaller(&case), case.texts.prove());
        assert_eq!(small.verdict(), Verdict::Proved, "{name} {:?}: {}", o.mesh, found(&small));
        assert!(small.shown["elements compared"] > 300, "{name}: {:?}", small.shown);
        assert!(small.shown["results on all ranks"] >= full.shown["updates"], "{name}");
        let mut nodes = case.texts.programs.funcs.iter_mut().flat_map(|f| &mut f.nodes);
        let scale = nodes.find_map(|n| match &mut n.op {
            Op::AttentionGrad(k) => Some(&mut k.scale),
            _other => None,
        });
        *scale.expect("attention") *= 2.0;
        assert_eq!(smaller(&case).verdict(), Verdict::Refuted, "{name}");
    }
}

/// What cannot be made smaller is named, and nothing is said of the plan.
#[test]
fn what_cannot_be_made_smaller_is_named() {
    let case = Case::new("mixtral", &options(DP2_TP2, false, 2));
    let r = prove_smaller(&case.texts.subject(), case.texts.data);
    assert_eq!(r.verdict(), Verdict::NotUnderstood);
    assert_eq!(
        (r.gaps[0].op.as_str(), &r.gaps[0].lemma[..]),
        ("top_k", "to make what it puts together or chooses smaller")
    );
}

/// Another order, other groups of kernels, and a ring that turns the other way are the same plan.
#[test]
fn equal_plans_are_proved() {
    for fuse in [Fuse::Yes, Fuse::Rows, Fuse::No] {
        proved("gemma2", &Options { fuse, ..options(DP2_TP2, true, 2) });
    }
    let transport = Transport::Nccl;
    proved(
        "qwen3",
        &Options { transport, zero: 3, ..options(&[("dp_shard", 2), ("tp", 2)], true, 2) },
    );
    let mut case = Case::new("gpt2", &options(DP2_TP2, false, 2));
    let mut m = case.texts.programs.clone();
    for n in m.funcs.iter_mut().flat_map(|f| &mut f.nodes) {
        let same = match &n.op {
            Op::Add(a) => a.rule.0.is_none(),
            Op::Mul(a) => a.rule.0.is_none(),
            _other => false,
        };
        if same {
            n.ins.reverse();
        }
    }
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Proved, "{}", found(&r));
    let mut case = Case::new("llama_gqa", &ring(CpSplit::Zigzag, &[("cp", 4)]));
    let mut m = case.texts.programs.clone();
    for n in m.funcs.iter_mut().flat_map(|f| &mut f.nodes) {
        match &mut n.op {
            Op::Permute(k) => k.shift = (4 - k.shift) % 4,
            Op::RingShard(k) => k.shift = (4 - k.shift) % 4,
            _other => {}
        }
    }
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Proved, "{}", found(&r));
}

/// Forgotten clipping shows in no number while the norm is small: terms see it.
#[test]
fn a_forgotten_clip_is_refused() {
    let mut case = Case::new("llama_gqa", &options(DP2_TP2, false, 2));
    let mut m = case.texts.programs.clone();
    let all = m.funcs.iter_mut().filter(|f| f.name == "optimizer_step").flat_map(|f| &mut f.nodes);
    let clip = all.into_iter().find(|n| matches!(n.op, Op::Clamp(_))).expect("a clip");
    (clip.op, clip.ins) = (Fill { value: 1.0 }.into(), Default::default());
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Refuted);
    assert!(r.refuted[0].what.starts_with("new "), "{:?}", r.refuted[0]);
}

/// How a state begins is what its declaration says: AdamW's means begin as 0.
#[test]
fn a_state_that_begins_otherwise_is_refused() {
    let mut case = Case::new("llama_gqa", &options(DP2_TP2, false, 2));
    let plain = case.texts.programs.clone();
    assert_eq!(plain.states.len(), 2);
    for at in 0..2 {
        let mut m = plain.clone();
        m.states[at].init = StateInit::Number(1.0);
        let r = case.judge(&m);
        assert_eq!(r.verdict(), Verdict::Refuted);
        assert!(r.refuted[0].what.ends_with("before the first step"), "{:?}", r.refuted[0]);
    }
}

/// A change of a schedule.
type Change<'a> = &'a dyn Fn(&mut Schedule);

#[test]
fn schedules_that_leave_something_out_are_refused() {
    let o = Options { schedule: Order::Named("zb-h1".into()), ..options(&[("pp", 2)], false, 2) };
    let mut case = Case::new("gpt2", &o);
    let plain = case.texts.schedule.clone();
    let of = |kind: ActionKind| plain.ranks[1].iter().position(|a| a.kind == kind).expect("one");
    let [f, i, w] = [ActionKind::Forward, ActionKind::Input, ActionKind::Weight].map(of);
    let changes: [(&str, Change); 5] = [
        ("F is missing", &|s| _ = s.ranks[1].remove(f)),
        ("I is missing", &|s| _ = s.ranks[1].remove(i)),
        ("W is missing", &|s| _ = s.ranks[1].remove(w)),
        ("W twice", &|s| s.ranks[1].push(plain.ranks[1][w])),
        ("I before F", &|s| s.ranks[1][..=i].rotate_right(1)),
    ];
    assert_eq!(case.texts.prove().verdict(), Verdict::Proved);
    for (what, change) in changes {
        case.texts.schedule = plain.clone();
        change(&mut case.texts.schedule);
        assert_eq!(case.texts.prove().verdict(), Verdict::Refuted, "{what}");
    }
}

/// What is said of a wrong plan: what was to be shown, both terms, and where they are made.
#[test]
fn a_refutation_names_the_place() {
    let mut case = Case::new("llama_gqa", &options(DP2_TP2, false, 2));
    let mut m = case.texts.programs.clone();
    let wrong = m.funcs.iter_mut().filter(|f| f.name == "backward").flat_map(|f| &mut f.nodes);
    let wrong = wrong.into_iter().find_map(|n| match &mut n.op {
        Op::AttentionGrad(k) => Some(k),
        _other => None,
    });
    // Backward begins with the last layer.
    wrong.expect("attention").scale = 0.25;
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Refuted);
    let of_queries = "gradient of `model.layers.2.self_attn.q_proj.weight`";
    let x = r.refuted.iter().find(|x| x.what == of_queries).expect("a gradient of queries");
    assert!(x.plan.contains("attention_grad[0.25"), "{x:#?}");
    assert!(x.textbook.contains("attention_grad[0.35355339059327373"), "{x:#?}");
    // Terms that are shown as numbers are named behind the text: the first ones, and how many more there are.
    for text in [&x.plan, &x.textbook] {
        let (shown, named) = text.split_once("; #").expect("names");
        let numbers: BTreeSet<String> = shown
            .split('#')
            .skip(1)
            .map(|r| r.chars().take_while(char::is_ascii_digit).collect())
            .collect();
        let named: Vec<&str> = named.split("; #").collect();
        let is = |n: &&str| n.split_once(" is ").is_some_and(|n| numbers.contains(n.0));
        assert!(named.iter().all(is), "{x:#?}");
        let rest = numbers.len() - named.len();
        assert_eq!(rest > 0, text.ends_with(&format!("; {rest} more are not shown")), "{x:#?}");
    }
    let place = x.plan_place.as_deref().unwrap_or_default();
    assert!(place.starts_with("@backward, model.layers.") && place.contains("self_attn"), "{x:#?}");
}
