//! An all_reduce of 64 MB: between threads, against what the memory of the machine can copy; under
//! mpirun, against MPI's own on the same buffers.
//!
//! ```text
//! cargo bench --bench collectives
//! cargo bench --bench collectives --features mpi --no-run     # then: mpirun -n 2 THE-BINARY
//! ```

use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::{DType, Reduction};
use shardc_runtime::threads::Threads;
use shardc_runtime::transport::{Reduced, Region, Transport};
use std::time::{Duration, Instant};

/// Elements of a tensor: 64 MB.
const ELEMENTS: usize = 16 << 20;
const ROUNDS: usize = 15;

fn median(mut all: Vec<Duration>) -> f64 {
    all.sort();
    all[all.len() / 2].as_secs_f64()
}

/// A sum of one tensor over all ranks, into another.
fn sum(from: &mut [f32], to: &mut [f32]) -> Reduced {
    let len = from.len();
    // SAFETY: the slices live until the call that gets this has returned.
    unsafe {
        Reduced {
            fold: Reduction::Sum,
            from: Region::adjacent(from.as_mut_ptr(), DType::F32, len),
            to: Region::adjacent(to.as_mut_ptr(), DType::F32, len),
        }
    }
}

/// Seconds that an all_reduce takes, from the last rank's start to the last rank's end.
fn seconds(end: &mut dyn Transport) -> f64 {
    let (mut x, mut y) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
    let all = AtomSet(1);
    let mut took = vec![];
    for _ in 0..ROUNDS {
        end.barrier(all).expect("a barrier");
        let start = Instant::now();
        end.all_reduce(all, &[sum(&mut x, &mut y)]).expect("a sum");
        end.barrier(all).expect("a barrier");
        took.push(start.elapsed());
    }
    assert!(y.iter().all(|&v| v == end.world() as f32));
    median(took)
}

/// Bytes per second that all cores copy, reads and writes counted.
fn copied() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let one = |_: usize| {
        let (x, mut y) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
        let round = |_| {
            let start = Instant::now();
            y.copy_from_slice(&x);
            std::hint::black_box(&mut y);
            start.elapsed()
        };
        median((0..ROUNDS).map(round).collect())
    };
    let all: Vec<f64> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..cores).map(|i| s.spawn(move || one(i))).collect();
        threads.into_iter().map(|t| t.join().expect("a copy")).collect()
    });
    let slowest = all.into_iter().fold(0.0, f64::max);
    (cores * ELEMENTS * 8) as f64 / slowest
}

fn threads() {
    let copy = copied();
    println!("all cores copy {:.1} GB/s, reads and writes counted", copy / 1e9);
    for ranks in [2, 4] {
        let mesh = Mesh::new(&[("dp_replicate", ranks)]).expect("a mesh");
        let ends = Threads::connect(&mesh, Duration::from_secs(60));
        let took = std::thread::scope(|s| {
            let one = |mut end: Threads| s.spawn(move || seconds(&mut end));
            let all: Vec<_> = ends.into_iter().map(one).collect();
            all.into_iter().map(|t| t.join().expect("a rank")).fold(0.0, f64::max)
        });
        // Every rank reads its chunk of all tensors and writes it, then reads and writes the others'.
        let (n, t) = ((ELEMENTS * 4) as f64, ranks as f64);
        let bytes = t * (n + n / t + 2.0 * n * (t - 1.0) / t);
        println!(
            "{ranks} ranks as threads: {:6.1} ms, {:5.1} GB/s of {:.0} MB, {:3.0} % of copying",
            took * 1e3,
            bytes / took / 1e9,
            bytes / 1e6,
            100.0 * bytes / took / copy
        );
    }
}

#[cfg(feature = "mpi")]
fn processes() {
    use mpi::collective::SystemOperation;
    use mpi::traits::CommunicatorCollectives;
    use shardc_runtime::messages::Messages;
    let world = shardc_runtime::mpi::World::start().expect("MPI").expect("it starts once");
    let (rank, ranks) = world.place();
    let mesh = Mesh::new(&[("dp_replicate", ranks)]).expect("a mesh");
    let limit = Duration::from_secs(60);
    let mut end = Messages::new(&mesh, rank, world.post(), limit, Default::default());
    let ours = seconds(&mut end);
    let everybody = world.everybody();
    let (x, mut y) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
    let mut took = vec![];
    for _ in 0..ROUNDS {
        everybody.barrier();
        let start = Instant::now();
        everybody.all_reduce_into(&x[..], &mut y[..], SystemOperation::sum());
        everybody.barrier();
        took.push(start.elapsed());
    }
    let theirs = median(took);
    let again = seconds(&mut end);
    let ours = ours.min(again);
    if rank == 0 {
        println!(
            "{ranks} processes: ours {:.1} ms, MPI's own {:.1} ms, ratio {:.2}",
            ours * 1e3,
            theirs * 1e3,
            ours / theirs
        );
    }
}

fn main() {
    #[cfg(feature = "mpi")]
    if std::env::var_os("OMPI_COMM_WORLD_RANK").is_some() {
        return processes();
    }
    threads();
}
