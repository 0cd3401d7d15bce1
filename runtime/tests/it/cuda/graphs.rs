//! Runs of launches that are captured once, and then repeated.

use super::machine::{self, Machine};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, lower};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Kernel;
use shardc_ir::mesh::Mesh;
use shardc_ir::samples::Sample;
use shardc_runtime::cuda::{DeviceArena, DeviceExecutor, Modules, Ready, Stream};
use shardc_runtime::threads::Threads;
use std::sync::Arc;
use std::time::Duration;

/// Elements of a matrix of 5 rows.
const N: usize = 35;
const PLACE: usize = 256;

/// One rank, which transposes the matrix in its first place into the second, and that into the third.
struct Rank {
    arena: DeviceArena,
    executor: DeviceExecutor,
    kernels: [(Kernel, Vec<Ready>); 2],
}

fn rank(machine: &Machine) -> Rank {
    let mesh = Mesh::default();
    let kernels = ["transpose[ab->ba] f32[5,7]", "transpose[ab->ba] f32[7,5]"].map(|text| {
        let s = Sample::parse(text).unwrap();
        let f = super::function(&mesh, s.op, &s.ins);
        let kernel = lower(&mesh, &f, &f.nodes[0], &[]).unwrap();
        assert!(DeviceExecutor::repeats(&kernel));
        let launches = cuda::launches(&kernel, &Limits::of("sm_80")).unwrap();
        (kernel, launches)
    });
    let sources = kernels.iter().flat_map(|k| &k.1).map(|l| l.source.clone());
    let modules = Modules::new(&machine.device, &machine.code(sources).unwrap()).unwrap();
    let kernels = kernels.map(|(k, launches)| (k, modules.ready(&launches).unwrap()));
    let stream: Arc<Stream> = Stream::new(&machine.device).unwrap();
    let end = Threads::connect(&mesh, Duration::from_secs(20)).remove(0);
    let arena = DeviceArena::new(&stream, 3 * PLACE, true).unwrap();
    let executor = DeviceExecutor::new(&stream, &modules, Box::new(end)).unwrap();
    Rank { arena, executor, kernels }
}

impl Rank {
    fn write(&mut self, x: f32) {
        let data: Vec<u8> = (0..N).flat_map(|i| (x + i as f32).to_le_bytes()).collect();
        self.arena.write(0, &data).unwrap();
    }

    /// Keeps both kernels as a run of so many launches, unless something fails between them.
    fn keep(&mut self, number: usize, launches: usize, between: Result<()>) -> Result<()> {
        let Rank { arena, executor, kernels } = self;
        executor.keep(number, launches, |executor| {
            queue(arena, executor, kernels, 0)?;
            between?;
            queue(arena, executor, kernels, 1)
        })
    }

    /// Runs both kernels; true if their run was kept.
    fn both(&mut self, number: usize) -> bool {
        let Rank { arena, executor, kernels } = self;
        // SAFETY: both matrices have room, in every run.
        let kept = unsafe { executor.replay(number) }.unwrap();
        if !kept {
            [0, 1].into_iter().for_each(|k| queue(arena, executor, kernels, k).unwrap());
        }
        kept
    }

    /// The first and the last element of the third place.
    fn ends(&mut self) -> [f32; 2] {
        let mut out = [0; N * 4];
        self.arena.read(2 * PLACE, &mut out).unwrap();
        [0, N - 1].map(|i| f32::from_le_bytes(out[i * 4..][..4].try_into().unwrap()))
    }
}

/// Queues a kernel.
fn queue(
    arena: &DeviceArena,
    executor: &mut DeviceExecutor,
    kernels: &[(Kernel, Vec<Ready>); 2],
    k: usize,
) -> Result<()> {
    let memory = [0, 1].map(|i| arena.address((k + i) * PLACE) as *mut f32);
    // SAFETY: both matrices have room.
    unsafe { executor.run(&kernels[k].0, &kernels[k].1, &memory) }
}

#[test]
fn what_is_kept_is_done_when_it_is_repeated() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    r.write(7.0);
    assert!(!r.both(0));
    r.write(1.0);
    r.keep(0, 2, Ok(())).unwrap();
    assert_eq!(r.ends(), [7.0, 41.0]);
    for step in 0..3 {
        r.write(step as f32 * 100.0);
        assert!(r.both(0), "step {step}");
        assert_eq!(r.ends(), [step as f32 * 100.0, step as f32 * 100.0 + 34.0]);
    }
}

/// What fails in the midst of a run is not kept, and nothing of it is done.
#[test]
fn runs_that_do_not_end_are_none() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    r.write(1.0);
    assert!(!r.both(0));
    r.write(2.0);
    let d = r.keep(0, 2, Err(Diag::new("rank-failed", "on purpose"))).unwrap_err();
    assert_eq!(d.message, "on purpose");
    assert_eq!(r.ends(), [1.0, 35.0]);
    assert!(!r.both(0));
    assert_eq!(r.ends(), [2.0, 36.0]);
}

/// Graphs need memory of the device, which the plan does not have.
#[test]
fn so_many_launches_are_kept_and_no_more() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    for (number, launches, kept) in [(0, 4095, true), (1, 2, false), (2, 1, true), (3, 1, false)] {
        r.keep(number, launches, Ok(())).unwrap();
        r.write(number as f32);
        assert_eq!(r.both(number), kept, "{number}");
        assert_eq!(r.ends()[0], number as f32);
    }
}
