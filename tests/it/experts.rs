//! Mixtures of experts: families, expert parallelism and its factorisations, against transformers.

use crate::fixture::*;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::interp::{Precision, run_step};
use shardc_ir::ops::Op;
use shardc_ir::plan::Instr;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{DType, Type};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order};
use shardc_passes::precision::precision;
use shardc_passes::schedule::{Named, legal};
use shardc_passes::shard::experts::fold;
use shardc_testing::{samples, taken};

/// Options for a mesh with its ep and etp.
fn on(mesh: &[(&str, usize)], ep: usize, etp: usize, sp: bool, microbatch: usize) -> Options {
    Options { ep, etp: Some(etp), ..options(mesh, sp, microbatch) }
}

#[test]
fn one_rank() {
    for name in EXPERTS {
        train_and_compare(name, &on(&[], 1, 1, false, 8));
    }
    for name in &EXPERTS[2..] {
        train_and_compare(name, &on(&[], 1, 1, false, 2));
    }
}

#[test]
fn expert_parallel() {
    for name in EXPERTS {
        train_and_compare(name, &on(&[("dp_shard", 2)], 2, 1, false, 4));
    }
}

/// Mesh, ep, etp, `--sp`, rows per rank and microbatch.
type Row = (&'static [(&'static str, usize)], usize, usize, bool, usize);

#[rustfmt::skip]
const MESHES: &[Row] = &[
    (&[("dp_replicate", 2)], 1, 1, false, 4),
    (&[("tp", 2)], 1, 2, false, 8),
    (&[("tp", 2)], 1, 2, true, 8),
    (&[("tp", 2)], 2, 1, false, 8),
    (&[("tp", 2)], 2, 1, true, 8),
    (&[("tp", 2)], 1, 1, false, 8),
    (&[("cp", 2)], 2, 1, false, 8),
    (&[("dp_shard", 4)], 2, 1, false, 2),
    (&[("dp_shard", 4)], 4, 1, false, 2),
    (&[("dp_shard", 2), ("tp", 2)], 2, 2, false, 4),
    (&[("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
    (&[("dp_shard", 2), ("tp", 2)], 4, 1, false, 4),
    (&[("dp_shard", 2), ("tp", 2)], 4, 1, true, 4),
    (&[("dp_shard", 2), ("tp", 2)], 1, 4, true, 4),
    (&[("dp_shard", 2), ("cp", 2)], 4, 1, false, 4),
    (&[("dp_shard", 2), ("cp", 2)], 2, 2, false, 4),
    (&[("cp", 2), ("tp", 2)], 2, 2, true, 8),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 4, 2, true, 4),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 8, 1, true, 4),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 2, 1, false, 4),
    (&[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], 2, 1, true, 2),
    (&[("pp", 2), ("dp_shard", 2)], 2, 1, false, 4),
    (&[("pp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
    // Other orders of ranks: pp need not be last, though edp is not dp.
    (&[("dp_shard", 2), ("pp", 2), ("tp", 2)], 2, 1, true, 4),
    (&[("dp_shard", 2), ("tp", 2), ("pp", 2)], 4, 1, false, 4),
    (&[("tp", 2), ("cp", 2), ("dp_shard", 2)], 4, 1, true, 4),
    (&[("cp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
];

#[test]
fn factorisations() {
    for (m, &(mesh, ep, etp, sp, rows)) in MESHES.iter().enumerate() {
        for (_, name) in EXPERTS.iter().enumerate().filter(|(f, _)| taken(m + f, 6)) {
            eprintln!("{name} {mesh:?} ep={ep} etp={etp} sp={sp}");
            train_and_compare(name, &on(mesh, ep, etp, sp, rows));
        }
    }
}

#[test]
fn zero() {
    for stage in 1..=3 {
        for (f, name) in EXPERTS.iter().enumerate() {
            let meshes = [(&[("dp_shard", 4)][..], 2), (&[("dp_shard", 2), ("tp", 2)], 2)];
            let first = f + stage as usize;
            for (_, (mesh, ep)) in
                meshes.into_iter().enumerate().filter(|(m, _)| taken(first + 3 * m, 6))
            {
                train_and_compare(
                    name,
                    &Options { zero: stage, ..on(mesh, ep, 1, false, 8 / mesh[0].1) },
                );
            }
        }
    }
}

/// Options drawn over all axes and factorisations; none if what was drawn is not legal.
fn draw(s: &Stream, i: u64) -> Option<(&'static str, Options)> {
    let pick = |k: u64, n: usize| (s.uniform(i * 16 + k) * n as f64) as usize % n;
    let which = pick(0, EXPERTS.len());
    let sizes: [usize; 5] = std::array::from_fn(|k| [1, 1, 2, 2, 4][pick(1 + k as u64, 5)]);
    let [pp, replicas, shards, cp, tp] = sizes;
    let (ranks, dp): (usize, usize) = (sizes.iter().product(), replicas * shards);
    if !(2..=16).contains(&ranks) || dp > ROWS || SEQ % (2 * cp * tp) != 0 {
        return None;
    }
    let m = if which < 2 { 1 } else { 1 << pick(6, (ROWS / dp).trailing_zeros() as usize + 1) };
    let named = if pp > 1 { Named::ALL[pick(7, Named::ALL.len())] } else { Named::OneFOneB };
    let chunks = named.default_chunks();
    if legal(named, pp, chunks, m).is_err() || pp * chunks > 4 {
        return None;
    }
    let axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp"];
    let mesh: Vec<(&str, usize)> = axes.into_iter().zip(sizes).filter(|a| a.1 > 1).collect();
    let heads = 4 % (tp * cp) == 0;
    let o = Options {
        zero: if shards > 1 { pick(8, 4) as u8 } else { 0 },
        cp_mode: match pick(9, 3) {
            1 if cp > 1 => CpMode::Ring,
            2 if cp > 1 && heads => CpMode::Ulysses,
            _gathered => CpMode::AllGather,
        },
        schedule: Order::Named(named.name().into()),
        recompute: [Recompute::None, Recompute::Selective, Recompute::Full, Recompute::Sqrt]
            [pick(10, 4)]
        .clone(),
        ..on(
            &mesh,
            [1, 2, 4, 8][pick(12, 4)],
            [1, 2, 4][pick(13, 3)],
            tp > 1 && pick(11, 2) == 1,
            ROWS / dp / m,
        )
    };
    fold(&o).ok()?;
    Some((EXPERTS[which], o))
}

/// `SWEEP=200 SEED=7 cargo test --workspace --test it -- experts::sweep` draws more.
#[test]
fn sweep() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let s = Stream::new(number("SEED").unwrap_or(1), "experts", 0);
    let mut left = number("SWEEP").unwrap_or(samples(6, 200));
    for i in 0.. {
        if left == 0 {
            break;
        }
        if let Some((name, o)) = draw(&s, i) {
            eprintln!(
                "{name} {:?} ep={} etp={:?} sp={} zero={} {:?} {:?} {:?} rows={}",
                o.mesh, o.ep, o.etp, o.sp, o.zero, o.cp_mode, o.schedule, o.recompute, o.microbatch
            );
            train_and_compare(name, &o);
            left -= 1;
        }
    }
}

/// The most by which rounding to bf16 moves a number, relatively.
const U: f64 = 1.0 / 256.0;

fn half(o: Options) -> Options {
    Options { dtype: DType::BF16, ..o }
}

/// The largest distance of a weight's gradient from the other one, over its norm; of nearly 0, over
/// what a tensor of its size has on average.
fn apart(got: &[Vec<f64>], want: &[Vec<f64>]) -> f64 {
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let elements: usize = want.iter().map(Vec::len).sum();
    let all: Vec<f64> = want.iter().map(|x| norm(x)).collect();
    let mean = norm(&all) / (elements as f64).sqrt();
    let one = |(g, w): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(g.len(), w.len());
        let d: Vec<f64> = g.iter().zip(w).map(|(a, b)| a - b).collect();
        norm(&d) / (norm(w) + mean * (w.len() as f64).sqrt()).max(f64::MIN_POSITIVE)
    };
    let most = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
    got.iter().zip(want).map(one).fold(0.0, most)
}

/// Most by which a loss is off, a mean over all tokens: a choice that changes moves that of a token.
const LOSS: f64 = U / 2.0;
/// Most by which gradients are off where choices may change: those of an expert, of few tokens each,
/// then are by 20 to 45 U. A part that is missing or counted twice would move them by 128 U.
const CHOICES: f64 = 64.0 * U;

/// In bf16, against the f32 reference. Choices of the fixtures are clear by 1e-4 of the largest
/// score, less than a rounded hidden state moves a score: some token may choose another expert than
/// the reference does. Then its gates are nearly the same, and so is the loss; its gradients are
/// those of another expert. So only the loss is compared closely, here and where a product is cut.
#[test]
fn bf16_trains_as_f32_does() {
    for name in EXPERTS {
        let fx = Fixture::open(name);
        let o = half(on(&[], 1, 1, false, 8));
        let model = fx.model(&o);
        let got = three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets());
        let off = (got.loss / fx.reference("loss")[0] - 1.0).abs();
        assert!(off <= LOSS, "{name}: the loss is off by {:.2} U", off / U);
        let grads = model.weights.iter().zip(&got.grads).filter(|(_, g)| !g.is_empty());
        let (want, got): (Vec<_>, Vec<_>) = grads.map(|(w, g)| (fx.grad(w), g.clone())).unzip();
        let off = apart(&got, &want);
        assert!(off <= CHOICES, "{name}: gradients are off by {:.1} U", off / U);
    }
}

/// The text of a plan in bf16, evaluated in f64 without any rounding, is the reference: what a plan is
/// off by comes of rounding, and of the choices that it changes.
#[test]
fn bf16_without_rounding_is_exact() {
    for name in EXPERTS {
        let fx = Fixture::open(name);
        let o = half(on(&[("dp_shard", 2)], 2, 1, false, 4));
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let mut state = start(&fx, &model, &compiled);
        interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{name}: {e}"));
        let m = &compiled.plan.module;
        let shown = |k, n: &str| state.output(&m.mesh, k, n).unwrap_or_else(|e| panic!("{e}")).data;
        fx.compare_loss(shown(RoleKind::Metric, "loss")[0]);
        fx.compare_grads(&model, |p| shown(RoleKind::GradShown, p));
    }
}

/// Against the plan's own text, evaluated in f64 and rounded to the type of every value: scores are
/// made of the same bf16 numbers in f32, so that choices are the same.
#[test]
fn bf16_kernels_do_what_the_text_says() {
    for name in ["mixtral", "deepseek_v3"] {
        let fx = Fixture::open(name);
        let o = half(on(&[("dp_shard", 2)], 2, 1, false, 4));
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let got = three_steps(&model, &compiled, &fx.input_ids, &fx.targets());
        let mut state = start(&fx, &model, &compiled);
        let m = &compiled.plan.module;
        for (scalar, x) in [("lr", 1e-3), ("step", 1.0)] {
            let role = Role::new(RoleKind::Scalar, scalar);
            state.put(&m.mesh, role, &Type::f32(&[]), &Tensor::scalar(x));
        }
        let lists: Vec<&[Instr]> = compiled.plan.classes.iter().map(|c| &c.step[..]).collect();
        run_step(m, &lists, &mut state, Precision::F32).unwrap_or_else(|e| panic!("{name}: {e}"));
        let shown = |k, n: &str| state.output(&m.mesh, k, n).unwrap_or_else(|e| panic!("{e}")).data;
        let off = (got.loss / shown(RoleKind::Metric, "loss")[0] - 1.0).abs();
        assert!(off <= U / 4.0, "{name}: the loss is off by {:.2} U", off / U);
        let grads = model.weights.iter().zip(&got.grads).filter(|(_, g)| !g.is_empty());
        let (want, got): (Vec<_>, Vec<_>) =
            grads.map(|(w, g)| (shown(RoleKind::GradShown, &w.param), g.clone())).unzip();
        let off = apart(&got, &want);
        assert!(off <= 3.0 * U, "{name}: gradients are off by {:.2} U", off / U);
    }
}

/// In bf16, against one rank. Where tokens are cut and no product, forward is the same bit for bit,
/// choices too, and a gradient is a sum of parts that were rounded one by one. Where a product is
/// cut, what follows is rounded from other sums, and choices may change.
#[test]
fn bf16_factorisations() {
    for (f, name) in EXPERTS.iter().enumerate() {
        let fx = Fixture::open(name);
        let train = |o: Options| {
            let model = fx.model(&o);
            three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets())
        };
        let one = train(half(on(&[], 1, 1, false, 8)));
        let taken = MESHES.iter().enumerate().filter(|(m, _)| taken(f + m + 1, 6));
        for &(mesh, ep, etp, sp, rows) in taken.map(|(_, row)| row) {
            let got = train(half(on(mesh, ep, etp, sp, rows)));
            let what = format!("{name} {mesh:?} ep={ep} etp={etp} sp={sp}");
            let off = apart(&got.grads, &one.grads);
            let whole = etp == 1 && mesh.iter().all(|(axis, _)| *axis != "tp");
            assert!(!whole || got.logits == one.logits, "{what}: logits differ");
            let bound = if whole { 2.0 * U } else { CHOICES };
            assert!(off <= bound, "{what}: gradients are off by {:.2} U", off / U);
            let off = (got.loss / one.loss - 1.0).abs();
            assert!(off <= LOSS, "{what}: the loss is off by {:.2} U", off / U);
        }
    }
}

/// Between stages goes the residual stream, and nothing of what it was made of, in either type.
#[test]
fn one_value_crosses_a_boundary() {
    for dtype in [DType::F32, DType::BF16] {
        for name in ["qwen3_moe", "deepseek_v3"] {
            let o = on(&[("pp", 2), ("dp_shard", 2)], 2, 1, false, 4);
            let o = Options { dtype, observe: false, ..o };
            let model = Fixture::open(name).model(&o);
            let plan = compile(&model, &o).plan;
            let f = plan.module.funcs.iter().find(|f| f.name == "forward.1").expect("a stage");
            let is_edge = |r: &shardc_ir::func::Role| r.kind == RoleKind::Edge;
            let edges = f.args.iter().filter(|a| a.role.as_ref().is_some_and(is_edge)).count();
            assert_eq!(edges, 1, "{name} in {}", dtype.name());
        }
    }
}

/// ZeRO, and gradients in bf16, which are rounded once per reduction.
#[test]
fn bf16_zero() {
    for name in ["mixtral", "deepseek_v3"] {
        let fx = Fixture::open(name);
        let train = |o: Options| {
            let model = fx.model(&o);
            three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets())
        };
        let one = train(half(on(&[], 1, 1, false, 8)));
        for (zero, grad_dtype) in [(1, DType::F32), (2, DType::BF16), (3, DType::F32)] {
            let o = Options { zero, grad_dtype, ..half(on(&[("dp_shard", 4)], 2, 1, false, 2)) };
            let got = train(o);
            assert!(got.logits == one.logits, "{name} zero={zero}: logits differ");
            let off = apart(&got.grads, &one.grads);
            assert!(off <= 2.0 * U, "{name} zero={zero}: gradients are off by {:.2} U", off / U);
        }
    }
}

/// Rows and weights of experts are bf16, here and on the wire; scores, gates and what is added to
/// scores are f32, and the router's product is one of f32 operands that were bf16.
#[test]
fn bf16_is_for_rows_and_f32_for_choices() {
    for name in ["mixtral", "qwen3_moe", "deepseek_v3"] {
        let fx = Fixture::open(name);
        let o = half(on(&[("dp_shard", 2)], 2, 1, false, 4));
        let model = fx.model(&o);
        let mut f = model.module.funcs[0].clone();
        precision(&mut f, DType::BF16);
        let makers = f.makers();
        let maker = |v: Value| &f.nodes[makers[v].expect("a node") as usize];
        let (mut routers, mut products) = (0, 0);
        for n in &f.nodes {
            let types: Vec<DType> = n.ins.iter().map(|&v| f.ty(v).dtype).collect();
            let (half, full, int) = (DType::BF16, DType::F32, DType::I32);
            match &n.op {
                Op::TopK(_) => assert_eq!(types, [full], "{name}"),
                Op::Dispatch(_) | Op::Unpermute(_) => {
                    assert_eq!(types, [half, int, full], "{name}")
                }
                Op::GroupedDot(_) => {
                    assert_eq!(types, [half, int, half], "{name}");
                    products += 1;
                }
                Op::Dot(_) if f.name(n.outs[0]).hint == "router_logits" => {
                    for &v in &n.ins {
                        let cast = maker(v);
                        assert!(matches!(cast.op, Op::Cast(_)) && f.ty(cast.ins[0]).dtype == half);
                    }
                    routers += 1;
                }
                _other => {}
            }
        }
        assert!(routers > 0 && products == 3 * routers, "{name}: {routers}, {products}");
        for a in &f.args {
            let Some(role) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) else {
                continue;
            };
            let chooses = role.name.ends_with("e_score_correction_bias");
            let want = if chooses { DType::F32 } else { DType::BF16 };
            assert_eq!(f.ty(a.value).dtype, want, "{}", role.name);
        }
        let mut twice = f.clone();
        precision(&mut twice, DType::BF16);
        assert!(f.nodes == twice.nodes && f.values == twice.values, "{name}: changed twice");
        let plan = compile(&model, &o).plan;
        let nodes = plan.module.funcs.iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let sent: Vec<DType> = nodes
            .filter(|(_, n)| matches!(n.op, Op::AllToAll(_) | Op::AllToAllV(_)))
            .map(|(f, n)| f.ty(n.ins[0]).dtype)
            .filter(|d| d.is_float())
            .collect();
        assert!(!sent.is_empty() && sent.iter().all(|&d| d == DType::BF16), "{name}: {sent:?}");
    }
}
