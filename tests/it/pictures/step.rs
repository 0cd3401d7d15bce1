//! The times and the memory of a step, as pictures draw them.

use shardc::pictures::palette::STACK;
use shardc::pictures::step::{Lengths, Sample, Step, place};
use shardc::stored::Stored;
use shardc_frontends::Facts;
use shardc_ir::plan::{Instr, MemoryClass, Span};
use shardc_passes::options::{Options, Order};
use std::path::Path;

/// A fixture compiled for a mesh.
fn compiled(model: &str, mesh: &[(&str, usize)], set: impl Fn(&mut Options, &Facts)) -> Stored {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    let facts = shardc::facts(&dir).expect("facts").expect("a model's");
    let mesh = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
    let mut o = Options { mesh, global_batch: 8, microbatch: 1, seq: 16, ..Options::default() };
    set(&mut o, &facts);
    shardc::compile(&dir, &o, &mut |_, _| {}).expect("it compiles").stored
}

fn step(s: &Stored) -> Step {
    Step::of(&s.plan, Lengths::unit(&s.plan, &s.options)).expect("its schedule runs")
}

fn plans() -> Vec<(&'static str, Stored)> {
    let named = |o: &mut Options, name: &str| o.schedule = Order::Named(name.into());
    vec![
        ("llama pp=4", compiled("llama_deep", &[("pp", 4)], |_, _| {})),
        ("gpt2 alone", compiled("gpt2", &[], |_, _| {})),
        (
            "llama zb-h1 sp zero",
            compiled("llama_deep", &[("pp", 2), ("dp_shard", 2), ("tp", 2)], |o, _| {
                named(o, "zb-h1");
                (o.sp, o.zero) = (true, 1);
                o.dtype = shardc_ir::types::DType::BF16;
            }),
        ),
        (
            "llama interleaved",
            compiled("llama_deep", &[("pp", 2), ("tp", 2)], |o, _| {
                named(o, "interleaved");
                o.chunks = Some(2);
            }),
        ),
        (
            "deepseek ep",
            compiled("deepseek_v3", &[("dp_shard", 2), ("tp", 2)], |o, _| {
                (o.ep, o.etp, o.sp, o.zero) = (4, Some(1), true, 1);
            }),
        ),
        (
            "inference",
            compiled("llama_deep", &[("pp", 2)], |o, _| o.mode = shardc_ir::plan::Mode::Infer),
        ),
    ]
}

/// No curve is above the arena, and none is below what is alive at once in a step.
#[test]
fn curves_reach_what_the_plan_says() {
    for (name, s) in plans() {
        let step = step(&s);
        for (rank, c) in s.plan.classes.iter().enumerate() {
            let all = step.memory(&s.plan, rank);
            let most = all.iter().map(Sample::total).max().unwrap_or(0);
            let (live, peak) = (c.memory.live_bytes, c.memory.peak_bytes);
            assert!(live <= most && most <= peak, "{name} {rank}: {live} {most} {peak}");
            assert!(all.windows(2).all(|w| w[0].time <= w[1].time), "{name} {rank}: time goes on");
            let (begin, end) = step.span();
            assert!(all.iter().all(|x| begin <= x.time && x.time <= end), "{name} {rank}");
            // What lives through a step is there before and after it.
            let whole: usize = c.memory.whole.iter().map(|x| x.1).sum();
            let ends = [all.first(), all.last()].map(|x| x.map_or(0, Sample::total));
            assert!(ends[0] >= whole && ends[1] == whole, "{name} {rank}: {ends:?} {whole}");
        }
    }
}

/// The curve counts whole frames, each as one kind. At the moment of the peak it is so as the frames in use
/// then sum up: not below the values listed, not above the arena, and equal to them in every kind that lies in no
/// frame. No other moment at which the arena is in use to its end has more.
#[test]
fn the_peak_is_on_the_curve() {
    let mut exact = 0;
    for (name, s) in plans() {
        let step = step(&s);
        for (rank, c) in s.plan.classes.iter().enumerate() {
            let m = &c.memory;
            let listed: usize = m.alive.iter().map(|a| a.bytes).sum();
            let by_kind: usize = m.at_peak.iter().map(|x| x.1).sum();
            assert_eq!(by_kind, m.peak_bytes, "{name} {rank}");
            let Some(at) = m.peak_at.filter(|at| !at.in_evaluation) else { continue };
            let at = (at.instr, at.node);
            // By kind, in the order of the curve, at a moment.
            let in_use = |at: (usize, usize)| {
                let during = |x: &&Span| (x.first, x.from_node) <= at && at <= (x.last, x.to_node);
                let mut bytes = [0; STACK.len()];
                m.whole.iter().for_each(|x| bytes[place(x.0)] += x.1);
                m.spans.iter().filter(during).for_each(|x| bytes[place(x.class)] += x.bytes);
                bytes
            };
            let here = in_use(at);
            let total: usize = here.iter().sum();
            assert!(listed <= total && total <= m.peak_bytes, "{name} {rank}: {listed} {total}");
            let all = step.memory(&s.plan, rank);
            let (from, to) = step.clock[rank][at.0];
            let mut near = all.iter().filter(|x| from <= x.time && x.time <= to);
            assert!(near.any(|x| x.bytes == here), "{name} {rank}: {here:?} at {at:?}");
            for &(class, n) in &m.at_peak {
                let of: usize = m.alive.iter().filter(|a| a.class == class).map(|a| a.bytes).sum();
                match class {
                    MemoryClass::Temporary => assert!(of <= n, "{name} {rank}: and gaps"),
                    _no_gaps => assert_eq!(of, n, "{name} {rank} {class:?}"),
                }
                let whole = m.whole.iter().find(|x| x.0 == class).map_or(0, |x| x.1);
                if of == whole {
                    assert_eq!(here[place(class)], of, "{name} {rank} {class:?}");
                    exact += 1;
                }
            }
            let ends = m.spans.iter().filter(|x| x.offset + x.bytes == m.peak_bytes);
            for end in ends {
                let during = |at: &(usize, usize)| {
                    (end.first, end.from_node) <= *at && *at <= (end.last, end.to_node)
                };
                let begins = m.spans.iter().map(|x| (x.first, x.from_node));
                for other in begins.filter(during) {
                    let more = in_use(other).iter().sum::<usize>();
                    assert!(more < total || (more == total && at <= other), "{name} {rank}");
                }
            }
        }
    }
    assert!(exact > 0, "there are kinds that lie in no frame");
}

/// Enter and finish are before the first action and after the last; speeds make ranks slower.
#[test]
fn all_calls_have_their_time() {
    let mut s = compiled("llama_deep", &[("pp", 4)], |_, _| {});
    let even = step(&s);
    assert_eq!((even.enter(1), even.finish(3).1 - even.finish(3).0), ((-1.0, 0.0), 1.0));
    for (rank, c) in s.plan.classes.iter().enumerate() {
        for (i, at) in c.step.iter().zip(&even.clock[rank]) {
            let length = at.1 - at.0;
            match i {
                Instr::Call(_) => assert!(length >= 1.0, "{i:?}"),
                _transfer => assert_eq!(length, 0.0, "{i:?}"),
            }
        }
    }
    s.options.speeds = vec![1.0, 0.5, 1.0, 1.0];
    let uneven = step(&s);
    let length =
        |x: &Step, rank: usize| x.timeline.ranks[rank][0].end - x.timeline.ranks[rank][0].start;
    assert_eq!([length(&uneven, 0), length(&uneven, 1)], [1.0, 2.0]);
    assert_eq!(uneven.enter[1].1 - uneven.enter[1].0, 2.0);
    assert!(uneven.timeline.makespan() > even.timeline.makespan());
}

/// What ZeRO-1 gathers is the same kind whatever the element type.
#[test]
fn gathered_parameters_are_weights() {
    for dtype in [shardc_ir::types::DType::F32, shardc_ir::types::DType::BF16] {
        let of = |zero: u8| {
            let s = compiled("llama_deep", &[("dp_shard", 2)], |o, _| {
                (o.zero, o.dtype) = (zero, dtype);
            });
            let all = s.plan.classes[0].memory.whole.clone();
            all.iter().find(|x| x.0 == MemoryClass::Weights).map_or(0, |x| x.1)
        };
        // Stored pieces lie beside what was gathered, if both are f32.
        assert!(of(1) >= of(0), "{dtype:?}: {} {}", of(1), of(0));
    }
}
