//! What a session holds beside its arenas: its own test program, whose allocator counts.

mod fixture;
use fixture::*;
use shardc_frontends::{Shape, from_config, init};
use shardc_ir::plan::Plan;
use shardc_runtime::{Session, StepBatch};
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

/// Most bytes beside the arenas, whatever the model: code, queues, packed operands of products.
const BESIDE: usize = 64 << 20;

/// Runs three steps; the largest heap of that time, less the arenas.
fn run(plan: &Plan, make: impl Fn() -> Session, ids: &[i32], targets: &[i32]) -> usize {
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut s = make();
    for step in 1..=3 {
        let batch = StepBatch { input_ids: ids, targets, observe: step == 1 };
        s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
    }
    let arenas = plan.module.mesh.ranks() * plan.peak_bytes();
    let peak = PEAK.load(Ordering::Relaxed);
    assert!(peak >= arenas, "the arenas of {arenas} bytes are not in the heap of {peak}");
    assert_eq!(s.touched(), [plan.peak_bytes()], "high-water mark of the arena");
    peak - arenas
}

/// Every family on every layout, from its checkpoint.
fn families() -> usize {
    let dp2_tp2: &[(&str, usize)] = &[("dp_replicate", 2), ("tp", 2)];
    let mut largest = 0;
    for name in ALL {
        for (mesh, sp) in [(&[][..], false), (dp2_tp2, false), (dp2_tp2, true)] {
            let fx = Fixture::open(name);
            let o = options(mesh, sp, 2);
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            let make = || session(&model, &compiled);
            let beside = run(&compiled.plan, make, &fx.input_ids, &fx.targets());
            assert!(beside <= BESIDE, "{name} {mesh:?} sp={sp}: {beside} bytes beside the arenas");
            largest = largest.max(beside);
        }
    }
    largest
}

/// A model whose arenas are larger than what may stand beside them, so that a copy shows.
fn larger() -> (usize, usize) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 640, "vocab_size": 8001,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    let mut o = options(&[("dp_replicate", 2), ("tp", 2)], true, 2);
    (o.seq, o.observe) = (32, false);
    let shape = Shape { batch: o.microbatch_rows(), seq: o.seq, mode: o.mode };
    let model = from_config(&config, "config.json", shape).unwrap_or_else(|e| panic!("{e}"));
    let plan = compile(&model, &o).plan;
    let make = || {
        let load = |w: &_, ranges: &[_], out: &mut [f32]| init(w, ranges, 0, out);
        let lower = |p: &_, rank| shardc_codegen::program(p, rank);
        Session::new(&plan, Default::default(), &lower, &load).unwrap_or_else(|e| panic!("{e}"))
    };
    let ids: Vec<i32> = (0..8 * 32).map(|i| i * 31 % 8001).collect();
    (run(&plan, make, &ids, &ids), 4 * plan.peak_bytes())
}

#[test]
fn sessions_hold_little_beside_their_arenas() {
    let small = families();
    let (beside, arenas) = larger();
    println!("beside the arenas: {small} bytes for the fixtures, {beside} for arenas of {arenas}");
    assert!(arenas > 2 * BESIDE, "arenas of {arenas} bytes are too small to tell");
    assert!(beside <= BESIDE, "{beside} bytes beside arenas of {arenas}");
}
