//! Runs of launches that are queued once, captured once, and then repeated.

use super::machine::{self, Machine};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, lower};
use shardc_ir::kernel::Kernel;
use shardc_ir::launch::Launch;
use shardc_ir::mesh::Mesh;
use shardc_ir::samples::Sample;
use shardc_runtime::cuda::{Arena, Executor, Modules, Stream};
use shardc_runtime::threads::Threads;
use std::sync::Arc;
use std::time::Duration;

/// Elements of a matrix of 5 rows.
const N: usize = 35;
const PLACE: usize = 256;

/// One rank, which transposes the matrix in its first place into the second, and that into the third.
struct Rank {
    arena: Arena,
    executor: Executor,
    kernels: [(Kernel, Vec<Launch>); 2],
}

fn rank(machine: &Machine) -> Rank {
    let mesh = Mesh::default();
    let kernels = ["transpose[ab->ba] f32[5,7]", "transpose[ab->ba] f32[7,5]"].map(|text| {
        let s = Sample::parse(text).unwrap();
        let f = super::function(&mesh, s.op, &s.ins);
        let kernel = lower(&mesh, &f, &f.nodes[0], &[]).unwrap();
        assert!(Executor::repeats(&kernel));
        let launches = cuda::launches(&kernel, &Limits::of("sm_80")).unwrap();
        (kernel, launches)
    });
    let sources = kernels.iter().flat_map(|k| &k.1).map(|l| l.source.clone());
    let modules = Modules::new(&machine.device, machine.code(sources).unwrap());
    let stream: Arc<Stream> = Stream::new(&machine.device).unwrap();
    let end = Threads::connect(&mesh, Duration::from_secs(20)).remove(0);
    let arena = Arena::new(&stream, 3 * PLACE, true).unwrap();
    let executor = Executor::new(&stream, &modules, Box::new(end)).unwrap();
    Rank { arena, executor, kernels }
}

impl Rank {
    fn write(&mut self, x: f32) {
        let data: Vec<u8> = (0..N).flat_map(|i| (x + i as f32).to_le_bytes()).collect();
        self.arena.write(0, &data).unwrap();
    }

    fn run(&mut self, kernel: usize) {
        let memory = [0, 1].map(|i| self.arena.address((kernel + i) * PLACE) as *mut f32);
        let (k, launches) = &self.kernels[kernel];
        // SAFETY: both matrices have room.
        unsafe { self.executor.run(k, launches, &memory) }.unwrap();
    }

    /// Both kernels as a run; true if it was repeated.
    fn both(&mut self, number: usize, launches: usize) -> bool {
        // SAFETY: both matrices have room, in every run.
        let repeated = unsafe { self.executor.replay(number, launches) }.unwrap();
        if !repeated {
            self.run(0);
            self.run(1);
            assert!(self.executor.keep().unwrap());
        }
        repeated
    }

    /// The first and the last element of the third place.
    fn ends(&mut self) -> [f32; 2] {
        let mut out = [0; N * 4];
        self.arena.read(2 * PLACE, &mut out).unwrap();
        [0, N - 1].map(|i| f32::from_le_bytes(out[i * 4..][..4].try_into().unwrap()))
    }
}

#[test]
fn runs_are_repeated_from_the_third_time_on() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    for step in 0..5 {
        r.write(step as f32 * 100.0);
        assert_eq!(r.both(0, 2), step > 1, "step {step}");
        assert_eq!(r.ends(), [step as f32 * 100.0, step as f32 * 100.0 + 34.0]);
    }
}

/// The host cannot wait in the midst of a run, and what failed there is not repeated.
#[test]
fn runs_that_do_not_end_are_none() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    r.write(1.0);
    assert!(!r.both(0, 2));
    assert_eq!(r.ends(), [1.0, 35.0]);
    r.write(2.0);
    // SAFETY: as above.
    assert!(!unsafe { r.executor.replay(0, 2) }.unwrap());
    r.run(0);
    let d = r.arena.read(0, &mut [0; 4]).unwrap_err();
    assert!(d.message.contains("code 900"), "{d}");
    // Nothing of it was done.
    r.executor.wait().unwrap();
    assert_eq!(r.ends(), [1.0, 35.0]);
    for repeated in [false, true] {
        assert_eq!(r.both(0, 2), repeated);
        assert_eq!(r.ends(), [2.0, 36.0]);
    }
}

/// Graphs need memory of the device, which the plan does not have.
#[test]
fn so_many_launches_are_kept_and_no_more() {
    let Some(machine) = machine::get() else { return };
    let mut r = rank(machine);
    let times = |r: &mut Rank, number: usize, launches: usize| {
        r.write(number as f32);
        let repeated = [(); 3].map(|()| r.both(number, launches));
        assert_eq!(r.ends()[0], number as f32);
        repeated
    };
    assert_eq!(times(&mut r, 0, 4095), [false, false, true]);
    assert_eq!(times(&mut r, 1, 2), [false; 3]);
    assert_eq!(times(&mut r, 2, 1), [false, false, true]);
    assert_eq!(times(&mut r, 3, 1), [false; 3]);
    assert!(r.both(0, 4095) && r.both(2, 1));
}
