//! What a session holds beside its arenas: its own test program, whose allocator counts.

#[allow(dead_code)]
mod fixture;
use fixture::*;
use shardc_frontends::{from_config, init};
use shardc_ir::plan::Plan;
use shardc_ir::types::DType;
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::Named;
use shardc_runtime::{Session, StepBatch, fresh};
use shardc_testing::{samples, taken};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts live and peak bytes of the heap, as the program asked for them.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may live while one is copied to the other.
        grown(size);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Most bytes beside the arenas of all ranks, each of one thread.
fn most_beside(plan: &Plan) -> usize {
    shardc_runtime::beside(plan.module.mesh.ranks())
}

/// Bytes of the arenas of all ranks.
fn arenas(plan: &Plan) -> usize {
    let ranks = 0..plan.module.mesh.ranks();
    ranks.map(|r| plan.classes[plan.class_of(r)].memory.peak_bytes).sum()
}

/// Bytes of this process in memory; 0 where nobody says.
fn resident() -> usize {
    let all = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = all.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

/// Steps after which a session has all it needs.
const WARM: usize = 6;

/// Bytes per rank that come and go with the timing of threads: a block of a channel's messages, and
/// who waits for one.
const SETTLES: usize = 2 << 10;

/// Runs so many steps; the largest heap of that time, in which no arena is: these are mappings. Once warm the
/// heap between steps does not grow.
fn run(
    plan: &Plan,
    make: impl Fn() -> Session,
    steps: usize,
    [ids, targets]: [&[i32]; 2],
) -> usize {
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let before = resident();
    let mut s = make();
    let mut between = Vec::with_capacity(steps);
    for step in 1..=steps {
        let batch = StepBatch::tokens(ids, targets, step == 1);
        s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
        between.push(LIVE.load(Ordering::Relaxed));
    }
    let most = |steps: &[usize]| steps.iter().copied().max().unwrap_or(0);
    let (early, late) = between.split_at(WARM.min(steps));
    let (early, late) = (most(early), most(late));
    let settled = early + SETTLES * plan.module.mesh.ranks();
    assert!(late <= settled, "the heap grows with the steps: {between:?}");
    // Arenas are mappings, not of the heap: each once.
    let grown = resident().saturating_sub(before);
    let (arenas, most) = (arenas(plan), most_beside(plan));
    assert!(grown <= arenas + most, "{grown} bytes more for arenas of {arenas}");
    let heap = PEAK.load(Ordering::Relaxed);
    assert!(heap <= most, "{heap} bytes beside the arenas of {} ranks", plan.module.mesh.ranks());
    // An evaluation may need more of an arena than a step, whose frames lie in other places.
    let batch = StepBatch::tokens(ids, targets, false);
    s.evaluate(&batch).unwrap_or_else(|e| panic!("{e}"));
    let peaks: Vec<usize> = plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
    assert_eq!(s.touched(), peaks, "high-water marks of the arenas, by class");
    heap
}

/// Every family from its checkpoint, on one layout by turns; on all of them in the long run.
fn families() -> usize {
    let dp2_tp2: &[(&str, usize)] = &[("dp_replicate", 2), ("tp", 2)];
    let mut largest = 0;
    for (f, name) in ALL.iter().enumerate() {
        let layouts = [
            (dp2_tp2, true, DType::F32),
            (dp2_tp2, true, DType::BF16),
            (dp2_tp2, false, DType::F32),
            (&[][..], false, DType::F32),
        ];
        let some = layouts.into_iter().enumerate().filter(|(i, _)| taken(f + i, 4));
        for (_, (mesh, sp, dtype)) in some {
            let fx = Fixture::open(name);
            let o = Options { dtype, ..options(mesh, sp, 2) };
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            let make = || session(&model, &compiled);
            println!("{name} {mesh:?} sp={sp} {dtype:?}");
            let beside = run(&compiled.plan, make, 2 * WARM, [&fx.input_ids, &fx.targets()]);
            largest = largest.max(beside);
        }
    }
    largest
}

/// Every family with experts in bf16, on its own and with expert parallelism.
fn experts() -> usize {
    let mut largest = 0;
    for (f, name) in EXPERTS.iter().enumerate() {
        let two = [(&[][..], 1), (&[("dp_shard", 2), ("tp", 2)][..], 4)];
        for (_, (mesh, ep)) in two.into_iter().enumerate().filter(|(i, _)| taken(f + i, 2)) {
            let fx = Fixture::open(name);
            let o = Options { dtype: DType::BF16, ep, etp: Some(1), ..options(mesh, false, 2) };
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            let make = || session(&model, &compiled);
            let beside = run(&compiled.plan, make, 2 * WARM, [&fx.input_ids, &fx.targets()]);
            largest = largest.max(beside);
        }
    }
    largest
}

/// Pipelines with and without tensor parallelism, by schedule.
fn pipelines() -> usize {
    let meshes: [&[(&str, usize)]; 3] =
        [&[("pp", 2)], &[("pp", 2), ("tp", 2)], &[("pp", 4), ("tp", 2)]];
    let mut largest = 0;
    let schedules = [Named::OneFOneB, Named::Gpipe, Named::Interleaved, Named::ZbH1, Named::ZbV];
    for (m, mesh) in meshes.into_iter().enumerate() {
        for (_, n) in schedules.into_iter().enumerate().filter(|(i, _)| taken(m + i, 3)) {
            let fx = Fixture::open("llama_deep");
            let mut o = options(mesh, false, 1);
            o.schedule = Order::Named(n.name().into());
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            let make = || session(&model, &compiled);
            let beside = run(&compiled.plan, make, 2 * WARM, [&fx.input_ids, &fx.targets()]);
            largest = largest.max(beside);
        }
    }
    largest
}

/// Sizes of a model, and how often it is run.
struct Larger {
    hidden: usize,
    inner: usize,
    layers: usize,
    vocab: usize,
    steps: usize,
}

/// A model whose arenas are larger than what may stand beside them, so that a copy shows: both.
fn larger(size: &Larger, o: &Options) -> (usize, usize) {
    let Larger { hidden, inner, layers, vocab, steps } = *size;
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "vocab_size": vocab, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    let shape = shardc::shape(o);
    let model = from_config(&config, "config.json", &shape).unwrap_or_else(|e| panic!("{e}"));
    let plan = compile(&model, o).plan;
    let make = || {
        let load = |w: &_, ranges: &[_], out: &mut [f32]| init(w, ranges, 0, out);
        let lower = |p: &_, rank| shardc_codegen::program(p, rank);
        Session::new(&plan, Default::default(), &lower, &fresh(load))
            .unwrap_or_else(|e| panic!("{e}"))
    };
    let ids: Vec<i32> = (0..8 * o.seq as i32).map(|i| i * 31 % vocab as i32).collect();
    (run(&plan, make, steps, [&ids, &ids]), arenas(&plan))
}

#[test]
fn sessions_hold_little_beside_their_arenas() {
    let (small, piped) = (families().max(experts()), pipelines());
    println!("beside the arenas: {small} bytes for the fixtures, {piped} in pipelines");
    let all = [
        (&[("dp_replicate", 2), ("tp", 2)][..], true, 2, DType::F32),
        (&[("dp_replicate", 2), ("tp", 2)], true, 2, DType::BF16),
        (&[("pp", 2), ("tp", 2)], false, 8, DType::F32),
        (&[("pp", 4), ("tp", 2)], true, 8, DType::F32),
    ];
    // Of every run one in bf16 and one of more stages.
    for (_, (mesh, sp, layers, dtype)) in
        all.into_iter().enumerate().filter(|(i, _)| taken(i + 1, 2))
    {
        let mut o = options(mesh, sp, if mesh[0].0 == "pp" { 1 } else { 2 });
        (o.seq, o.observe, o.dtype) = (32, false, dtype);
        // Its size is what shows; that it stays, others show in every run.
        let steps = samples(3, 2 * WARM as u64) as usize;
        let (beside, arenas) =
            larger(&Larger { hidden: 256, inner: 640, layers, vocab: 8001, steps }, &o);
        println!("{mesh:?} {dtype:?}: {beside} bytes beside arenas of {arenas}");
        assert!(arenas > 2 * beside, "{mesh:?}: arenas of {arenas} bytes are too small to tell");
    }
    // Packed operands are those of each rank: the larger the matrices, up to a size, the more.
    let mut o = options(&[("dp_shard", 8)], false, 1);
    (o.seq, o.observe, o.zero) = (16, false, 3);
    let wide = Larger { hidden: 1024, inner: 2560, layers: 1, vocab: 1031, steps: 2 };
    let (beside, arenas) = larger(&wide, &o);
    println!("8 ranks, matrices of 1024 by 2560: {beside} bytes beside arenas of {arenas}");
}
