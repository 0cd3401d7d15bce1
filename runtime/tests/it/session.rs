//! A whole step, by hand, on several meshes: the same numbers as the reference interpreter's, and
//! what happens when something is wrong.

use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Module, Role, RoleKind, StateName};
use shardc_ir::interp::{self, Precision, StepState};
use shardc_ir::kernel::{Kernel, Program, Route, Scalar, View};
use shardc_ir::plan::{
    ALIGN, Call, FramePlace, Instr, LrSchedule, Memory, Mode, Plan, RankClass, Settings, TokenOrder,
};
use shardc_ir::rng::Stream;
use shardc_ir::schedule::Schedule;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_ir::types::Type;
use shardc_ir::weights::{Init, Weight};
use shardc_runtime::{Array, Options, Session, StepBatch, fresh};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const BATCH: usize = 8;
const SEQ: usize = 5;
const VOCAB: usize = 7;
const LR: f64 = 0.05;
/// Seconds that a rank waits where it should not have to: a test that hangs so long has failed.
const HOUR: u64 = 3600;

/// Places values one after the other; those that must share memory do.
#[derive(Default)]
struct Planner {
    /// What each value shares memory with, by (function, value).
    same: BTreeMap<(usize, usize), (usize, usize)>,
}

impl Planner {
    fn root(&self, mut x: (usize, usize)) -> (usize, usize) {
        while let Some(&y) = self.same.get(&x) {
            x = y;
        }
        x
    }
    fn join(&mut self, a: (usize, usize), b: (usize, usize)) {
        let (a, b) = (self.root(a), self.root(b));
        if a != b {
            self.same.insert(a.max(b), a.min(b));
        }
    }
}

/// Everything in frame 0, but that what moves with the microbatch has a frame of its own in every
/// function that runs once per microbatch: where it begins, and bytes per microbatch.
fn plan_memory(m: &Module, microbatches: usize) -> (Memory, Vec<Vec<(usize, usize)>>) {
    let mut p = Planner::default();
    let mut roles: BTreeMap<Role, (usize, usize)> = BTreeMap::new();
    let mut inputs: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for (i, f) in m.funcs.iter().enumerate() {
        for port in f.args.iter().chain(&f.results) {
            let at = (i, port.value.0 as usize);
            let role = port.role.clone().expect("all ports have roles");
            if !role.kind.is_shown() {
                let first = *roles.entry(role.clone()).or_insert(at);
                p.join(at, first);
            }
        }
        for n in f.nodes.iter().filter(|n| n.op.def().is_view()) {
            p.join((i, n.ins[0].0 as usize), (i, n.outs[0].0 as usize));
        }
    }
    for (i, f) in m.funcs.iter().enumerate().filter(|f| f.1.name == "forward") {
        for a in f.args.iter().filter(|a| a.input().is_some()) {
            inputs.insert(p.root((i, a.value.0 as usize)), f.ty(a.value).local_bytes(&m.mesh));
        }
    }
    let mut memory = Memory::default();
    let mut placed: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut moving = vec![];
    for (i, f) in m.funcs.iter().enumerate() {
        let looped = ["forward", "backward"].contains(&&*f.name);
        let (mut places, mut own) = (vec![], vec![]);
        for (v, info) in f.values.iter().enumerate() {
            let root = p.root((i, v));
            let bytes = info.ty.local_bytes(&m.mesh);
            let per = inputs.get(&root).copied().unwrap_or(0);
            let offset = *placed.entry(root).or_insert_with(|| {
                let offset = memory.peak_bytes;
                let all = bytes.max(per * microbatches);
                memory.peak_bytes += all.next_multiple_of(ALIGN);
                offset
            });
            places.push(if per > 0 && looped {
                own.push((offset, per));
                FramePlace { frame: own.len() as u32, offset: 0, bytes }
            } else {
                FramePlace { frame: 0, offset, bytes }
            });
        }
        memory.places.push(places.into());
        memory.workspaces.push(vec![FramePlace::default(); f.nodes.len()]);
        moving.push(own);
    }
    for own in &moving {
        let sizes = own.iter().map(|o| o.1);
        memory.frames.push([memory.peak_bytes].into_iter().chain(sizes).collect());
    }
    (memory, moving)
}

/// The bigram model of `bigram.ir`: logits = embedding · head, loss, gradients, an optimizer.
fn plan(mesh: &str) -> Plan {
    let module = text::parse(&include_str!("bigram.ir").replace("MESH", mesh))
        .unwrap_or_else(|e| panic!("{e}"));
    let (memory, moving) = plan_memory(&module, 2);
    let call = |func: usize, microbatch: Option<usize>| {
        let at = |o: &(usize, usize)| o.0 + o.1 * microbatch.unwrap_or(0);
        let frames = [0].into_iter().chain(moving[func].iter().map(at)).collect();
        Instr::Call(Call { func, microbatch, frames })
    };
    let both = |j| [call(1, Some(j)), call(2, Some(j))];
    let step = [call(0, None)].into_iter().chain(both(0)).chain(both(1)).chain([call(3, None)]);
    let weight = |param: &str, shape: [usize; 2]| Weight {
        param: param.into(),
        tensor: param.into(),
        tensor_shape: shape.to_vec(),
        part: None,
        shape: shape.to_vec(),
        init: Init::Normal(1.0),
        matrix: true,
        tp_dim: None,
        experts: None,
    };
    let class = RankClass {
        stages: vec![0],
        funcs: (0..module.funcs.len()).collect(),
        step: step.collect(),
        evaluation: vec![],
        memory,
    };
    Plan {
        classes: vec![class],
        schedule: Schedule::default(),
        module,
        weights: vec![weight("e", [VOCAB, 3]), weight("h", [3, VOCAB])],
        settings: Settings {
            mode: Mode::Train,
            global_batch: BATCH,
            microbatches: 2,
            seq: SEQ,
            tokens: TokenOrder::Contiguous,
            vocab: VOCAB,
            lr: LrSchedule::Constant { lr: LR },
            seed: 1,
            documents: None,
            loss_scaling: None,
            early_receives: false,
        },
    }
}

fn weight_at(name: &str, cols: usize, i: usize, j: usize) -> f32 {
    Stream::new(1, name, 0).normal((i * cols + j) as u64) as f32
}

fn load(w: &Weight, r: &[Range<usize>], out: &mut [f32]) -> Result<()> {
    assert_eq!(out.len(), r[0].len() * r[1].len());
    let at = |i: usize| (r[0].start + i / r[1].len(), r[1].start + i % r[1].len());
    for (k, x) in out.iter_mut().enumerate() {
        let (i, j) = at(k);
        *x = weight_at(&w.param, w.shape[1], i, j);
    }
    Ok(())
}

fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let s = Stream::new(2, "batch", step as u32);
    let id = |i: usize| (s.uniform(i as u64) * VOCAB as f64) as i32;
    let ids = (0..BATCH * SEQ).map(id).collect();
    let targets = (0..BATCH * SEQ).map(|i| if i % 4 == 3 { -100 } else { id(1000 + i) }).collect();
    (ids, targets)
}

fn options(seconds: u64) -> Options {
    Options { poison: true, timeout: Duration::from_secs(seconds), ..Options::default() }
}

fn start(plan: &Plan) -> Session {
    Session::new(plan, options(20), &shardc_codegen::program, &fresh(load))
        .unwrap_or_else(|e| panic!("{e}"))
}

fn run(s: &mut Session, step: usize) -> Result<shardc_runtime::StepResult> {
    let (ids, targets) = batch(step);
    s.step(&StepBatch::tokens(&ids, &targets, true), LR, step)
}

fn same(what: &str, got: &Array, want: &Tensor) {
    assert_eq!(got.shape, want.shape.to_vec(), "{what}");
    for (i, (g, w)) in got.data.iter().zip(&want.data).enumerate() {
        assert!((f64::from(*g) - w).abs() < 2e-5 * w.abs().max(1.0), "{what} {i}: {g} is not {w}");
    }
}

#[test]
fn steps_match_the_interpreter() {
    for mesh in ["dp=2, tp=2", "dp=4, tp=2", "dp=2, tp=4"] {
        let plan = plan(mesh);
        let m = &plan.module;
        let mut state = StepState::default();
        let f32s = |name: &str, shape: [usize; 2]| {
            Tensor::from_fn(&shape, |i| f64::from(weight_at(name, shape[1], i[0], i[1])))
        };
        let finish = m.func("optimizer_step").unwrap();
        for p in &finish.args {
            let (role, ty) = (p.role.clone().unwrap(), finish.ty(p.value));
            match role.kind {
                RoleKind::Param => {
                    let shape: Vec<usize> = ty.sizes().to_vec();
                    let x = f32s(&role.name, [shape[0], shape[1]]);
                    state.put(&m.mesh, role, ty, &x);
                }
                RoleKind::State(_) => state.put(&m.mesh, role, ty, &Tensor::full(&ty.sizes(), 0.0)),
                _ => {}
            }
        }
        let mut session = start(&plan);
        for step in 1..=3 {
            let (ids, targets) = batch(step);
            let ints =
                |x: &[i32]| Tensor::new(&[BATCH, SEQ], x.iter().map(|&i| f64::from(i)).collect());
            state.inputs = BTreeMap::from([
                ("input_ids".into(), ints(&ids)),
                ("targets".into(), ints(&targets)),
            ]);
            state.outputs.clear();
            let scalar = Type::f32(&[]);
            state.put(&m.mesh, Role::new(RoleKind::Scalar, "lr"), &scalar, &Tensor::scalar(LR));
            state.put(
                &m.mesh,
                Role::new(RoleKind::Scalar, "step"),
                &scalar,
                &Tensor::scalar(step as f64),
            );
            interp::run_step(m, &[&plan.classes[0].step], &mut state, Precision::F64)
                .unwrap_or_else(|e| panic!("{e}"));
            let got = run(&mut session, step).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_eq!(got.tokens, 30);
            assert_eq!(
                got.loss,
                got.output(RoleKind::Metric, "loss").unwrap().data.first().copied()
            );
            assert!(got.grad_norm.is_some_and(|n| n > 0.0));
            for (kind, name) in [
                (RoleKind::Metric, "loss"),
                (RoleKind::Metric, "grad_norm"),
                (RoleKind::GradShown, "h"),
                (RoleKind::Output, "logits"),
            ] {
                let want = state.output(&m.mesh, kind, name).unwrap();
                let got = got.output(kind, name).unwrap();
                same(&format!("{mesh}, step {step}, {kind} {name}"), got, &want);
            }
        }
        let kinds = [
            (RoleKind::Param, "e"),
            (RoleKind::Param, "h"),
            (RoleKind::State(StateName::new("exp_avg")), "h"),
        ];
        for (kind, name) in kinds {
            let role = Role::new(kind, name);
            let arg = finish.args.iter().find(|p| p.role.as_ref() == Some(&role)).unwrap();
            let want = interp::gather(&m.mesh, finish.ty(arg.value), &state.values[&role]).unwrap();
            same(&format!("{mesh}, {name}"), &session.tensor(&role).unwrap(), &want);
        }
        assert_eq!(session.touched()[0].next_multiple_of(ALIGN), plan.peak_bytes());
        let e = session.tensor(&Role::new(RoleKind::Param, "w")).unwrap_err();
        assert!(e.code == "unknown-tensor" && e.help[0].contains('h'), "{e}");
    }
}

#[test]
fn wrong_data_is_refused_before_anything_runs() {
    let mut s = start(&plan("dp=2, tp=2"));
    let (ids, targets) = batch(1);
    let mut step = |ids: &[i32], targets: &[i32]| {
        s.step(&StepBatch::tokens(ids, targets, false), LR, 1).map_err(|d| (d.code, d.render()))
    };
    let with = |x: &[i32], at: usize, id: i32| {
        let mut x = x.to_vec();
        x[at] = id;
        x
    };
    for (id, at) in [(-1, 13), (7, 13)] {
        let (code, text) = step(&with(&ids, at, id), &targets).unwrap_err();
        assert!(code == "token-range" && text.contains("row 2, column 3"), "{text}");
    }
    let (code, text) = step(&ids, &with(&targets, 6, 9)).unwrap_err();
    assert!(code == "label-range" && text.contains("9 in row 1, column 1"), "{text}");
    assert_eq!(step(&ids[1..], &targets).unwrap_err().0, "batch-shape");
    assert_eq!(step(&ids, &[]).unwrap_err().0, "batch-shape");
    // Nothing of this has harmed the session.
    assert!(
        step(&ids, &targets).unwrap().outputs.keys().map(|r| &*r.name).eq(["grad_norm", "loss"])
    );
}

#[test]
fn a_loss_that_is_no_number_is_reported() {
    let huge = |_: &Weight, _: &[Range<usize>], out: &mut [f32]| {
        out.fill(1e4);
        Ok(())
    };
    let mut s =
        Session::new(&plan("dp=2, tp=2"), options(20), &shardc_codegen::program, &fresh(huge))
            .unwrap();
    let e = run(&mut s, 7).unwrap_err();
    assert!(e.code == "nan-loss" && e.message.contains("step 7"), "{e}");
}

/// A program in which rank 1's `n`-th node of a function is replaced.
fn sabotage(
    func: usize,
    kernel: impl Fn(&Kernel) -> Option<Kernel> + Sync,
) -> impl Fn(&Plan, usize) -> Result<Program> + Sync {
    move |plan, rank| {
        let mut p = shardc_codegen::program(plan, rank)?;
        let found = p[func].iter_mut().find_map(|k| kernel(k).map(|new| (k, new)));
        if let Some((k, new)) = found.filter(|_| rank == 1) {
            *k = new;
        }
        Ok(p)
    }
}

/// A rank whose experts get more copies than their buffer holds is the one that is reported, and
/// the others end too.
#[test]
fn too_many_copies_for_experts_end_the_step_on_every_rank() {
    let walk = |operand| View { operand, offset: 0, strides: [5, 1, 1].into_iter().collect() };
    // The step's tokens as choices among 7 experts whose buffer has 4 rows.
    let route = Route {
        copies: [1, 5, 1],
        first_shard: 3,
        groups: 1,
        experts: 7,
        rows: 4,
        capacity: None,
        index: walk(1),
        slot: walk(2),
        counts: View { operand: 2, offset: 0, strides: [7, 1, 1].into_iter().collect() },
    };
    let replaced =
        |k: &Kernel| matches!(k, Kernel::Take(_)).then(|| Kernel::Route(Box::new(route.clone())));
    let mut s =
        Session::new(&plan("dp=2, tp=2"), options(HOUR), &sabotage(1, replaced), &fresh(load))
            .unwrap();
    let e = run(&mut s, 1).unwrap_err();
    assert_eq!((e.code, e.exit), ("moe-bound", Exit::RankFailed));
    let text = e.render();
    for part in [
        "rank 1 (dp=0, tp=1)",
        "take[vh,bs->bsh]",
        "in model.embed",
        "5 rows",
        "shard 3",
        "gives 4",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert_eq!(run(&mut s, 2).unwrap_err(), e);
}

#[test]
fn a_rank_that_skips_a_collective_ends_the_step_with_one_message() {
    let skip = sabotage(1, |k| matches!(k, Kernel::Collective(_)).then_some(Kernel::View));
    let mut s = Session::new(&plan("dp=2, tp=2"), options(1), &skip, &fresh(load)).unwrap();
    let e = run(&mut s, 1).unwrap_err();
    assert_eq!(e.exit, Exit::RankFailed, "{e}");
    let text = e.render();
    for part in ["rank 0 (dp=0, tp=0)", "@forward", "all_reduce[tp]", "model."] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert_eq!(run(&mut s, 2).unwrap_err(), e);
}

#[test]
fn a_rank_that_panics_is_named() {
    let broken = sabotage(2, |k| {
        let Kernel::Rows(m) = k else { return None };
        let mut m = m.clone();
        m.body[0] = Scalar::Load(99);
        Some(Kernel::Rows(m))
    });
    let mut s = Session::new(&plan("dp=2, tp=2"), options(HOUR), &broken, &fresh(load)).unwrap();
    let e = run(&mut s, 1).unwrap_err();
    let text = e.render();
    assert!(
        text.contains("rank 1 (dp=0, tp=1) panicked")
            && text.contains("@backward")
            && text.contains("model.head"),
        "{text}"
    );
}

#[test]
fn what_is_added_in_place_lies_there() {
    let adds = sabotage(2, |k| match k {
        Kernel::IndexAdd { pick, .. } => Some(Kernel::IndexAdd { pick: pick.clone(), clear: None }),
        _other => None,
    });
    let refused = Session::new(&plan("dp=2, tp=2"), options(1), &adds, &fresh(load)).err();
    let text = refused.expect("a plan of other places").render();
    assert!(text.contains("a sum does not lie where its first term does"), "{text}");
}

#[test]
fn what_cannot_start_says_why() {
    let base = plan("dp=2, tp=2");
    let refuse = |plan: &Plan| {
        Session::new(plan, options(1), &shardc_codegen::program, &fresh(load)).err().map(|e| e.code)
    };
    let mut small = base.clone();
    small.classes[0].memory.peak_bytes -= ALIGN;
    assert_eq!(refuse(&small), Some("plan"));
    let mut tight = base.clone();
    tight.classes[0].memory.places[1].last_mut().unwrap().bytes = 0;
    tight.classes[0].memory.places[1].iter_mut().for_each(|p| p.bytes /= 2);
    assert_eq!(refuse(&tight), Some("plan"));
    let mut odd = base.clone();
    odd.classes[0].memory.places.pop();
    assert_eq!(refuse(&odd), Some("plan"));
    let mut far = base.clone();
    let Instr::Call(c) = &mut far.classes[0].step[1] else { panic!("a call") };
    c.microbatch = Some(2);
    assert_eq!(refuse(&far), Some("plan"));
    let mut seq = base.clone();
    seq.settings.seq = 6;
    assert_eq!(refuse(&seq), Some("plan"));
    let mut lost = base.clone();
    lost.weights.pop();
    assert_eq!(refuse(&lost), Some("weight-missing"));
    let calls = AtomicUsize::new(0);
    let fails = |w: &Weight, _: &[Range<usize>], _: &mut [f32]| {
        calls.fetch_add(1, Ordering::Relaxed);
        Err(Diag::new("weight-file", format!("{} is not there", w.tensor)))
    };
    let e = Session::new(&base, options(1), &shardc_codegen::program, &fresh(fails)).err().unwrap();
    assert!(e.code == "weight-file" && calls.into_inner() == 4);
}
