//! Exchanges in many rounds, all queued before any is looked at. Operands are written over as soon as a
//! call returns: whoever reads too early finds those of the round before, too late those of the next.

use super::machine::{self, Machine};
use shardc_codegen::cuda;
use shardc_ir::diag::Result;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::{DType, Reduction};
use shardc_runtime::cuda::{Device, DeviceArena, Modules, OnDevice, Stream};
use shardc_runtime::threads::{Mover, Threads};
use shardc_runtime::transport::{Gathered, Reduced, Region, Scattered, Transport};
use std::sync::Arc;
use std::time::Duration;

const ROUNDS: usize = 120;
const RANKS: usize = 3;
/// Elements of an operand: a chunk of a sum for each rank.
const N: usize = 96;
const TP: AtomSet = AtomSet(1);
/// Places in the arena, in operands: the operand, what it is in each round, what comes of each.
const TABLE: usize = 1;
const RESULTS: usize = TABLE + ROUNDS;
const PLACES: usize = RESULTS + ROUNDS * RANKS;

/// A rank's ends: for exchanges, and for copies on its own stream.
struct Ends {
    transport: Threads<OnDevice>,
    own: OnDevice,
}

/// Exchanges operands into results.
type Exchange = fn(&mut Ends, &Region, &[Region]) -> Result<()>;

/// What is in a rank's operand in a round.
fn value(round: usize, rank: usize) -> f32 {
    (round * 10 + rank) as f32
}

fn copy(ends: &mut Ends, from: &Region, to: &Region) -> Result<()> {
    // SAFETY: all regions of these tests have N elements, in arenas that outlive what is queued.
    unsafe { ends.own.copy(from, to, 0..N) }
}

/// The memory of a rank after all rounds, which it queues one after the other.
fn one_rank(rank: usize, arena: &mut DeviceArena, mut ends: Ends, exchange: Exchange) -> Vec<f32> {
    let table = (0..ROUNDS).flat_map(|i| value(i, rank).to_le_bytes().repeat(N));
    arena.write(TABLE * N * 4, &table.collect::<Vec<u8>>()).unwrap();
    let region = |place: usize| {
        // SAFETY: as above.
        unsafe { Region::adjacent(arena.address(place * N * 4) as *mut f32, DType::F32, N) }
    };
    for i in 0..ROUNDS {
        let to: Vec<Region> = (0..RANKS).map(|p| region(RESULTS + i * RANKS + p)).collect();
        copy(&mut ends, &region(TABLE + i), &region(0)).unwrap();
        exchange(&mut ends, &region(0), &to).unwrap();
    }
    let mut bytes = vec![0; PLACES * N * 4];
    arena.read(0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The ranks take turns on the first two devices.
fn machines(machine: &Machine) -> Vec<(Arc<Device>, Arc<Modules>)> {
    let mut devices = vec![machine.device.clone()];
    if Device::count().unwrap() > 1 {
        devices.push(Device::open(1).unwrap());
        devices[0].reach(&devices[1]).unwrap();
        devices[1].reach(&devices[0]).unwrap();
    }
    let code = machine.code(std::iter::once(cuda::collective())).unwrap();
    devices.into_iter().map(|d| (d.clone(), Modules::new(&d, &code).unwrap())).collect()
}

/// Runs all rounds on all ranks, and compares what came of every one.
fn rounds(what: &str, exchange: Exchange, expected: fn(round: usize, rank: usize) -> Vec<f32>) {
    let Some(machine) = machine::get() else { return };
    let devices = machines(machine);
    let one = |r: usize| &devices[r % devices.len()];
    let streams: Vec<Arc<Stream>> = (0..RANKS).map(|r| Stream::new(&one(r).0).unwrap()).collect();
    let mover = |r: usize| OnDevice::new(&streams[r], &one(r).1, cuda::collective()).unwrap();
    let mesh = Mesh::new(&[("tp", RANKS)]).unwrap();
    let ends =
        Threads::connect_with(&mesh, Duration::from_secs(60), (0..RANKS).map(mover).collect());
    let mut arenas: Vec<DeviceArena> =
        streams.iter().map(|s| DeviceArena::new(s, PLACES * N * 4, true).unwrap()).collect();
    let memory: Vec<Vec<f32>> = std::thread::scope(|s| {
        let all: Vec<_> = arenas
            .iter_mut()
            .zip(ends)
            .enumerate()
            .map(|(rank, (arena, transport))| {
                let ends = Ends { transport, own: mover(rank) };
                s.spawn(move || one_rank(rank, arena, ends, exchange))
            })
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (rank, memory) in memory.iter().enumerate() {
        for i in 0..ROUNDS {
            for (p, want) in expected(i, rank).into_iter().enumerate() {
                let found = &memory[(RESULTS + i * RANKS + p) * N..][..N];
                assert_eq!(found, [want; N], "{what}, round {i}, rank {rank}, part {p}");
            }
        }
    }
}

fn all(round: usize, _rank: usize) -> Vec<f32> {
    (0..RANKS).map(|p| value(round, p)).collect()
}

fn sum(round: usize, rank: usize) -> Vec<f32> {
    vec![all(round, rank).iter().sum()]
}

fn of_the_last(round: usize, rank: usize) -> Vec<f32> {
    vec![value(round, (rank + RANKS - 1) % RANKS)]
}

#[test]
fn gathers_and_permutations() {
    let gather = |ends: &mut Ends, own: &Region, to: &[Region]| {
        ends.transport.all_gather(TP, &[Gathered { from: own.clone(), to: to.to_vec() }])
    };
    rounds("all_gather", gather, all);
    let to_all = |ends: &mut Ends, own: &Region, to: &[Region]| {
        ends.transport.all_to_all(TP, &[(); RANKS].map(|()| own.clone()), to)
    };
    rounds("all_to_all", to_all, all);
    rounds("permute", |ends, own, to| ends.transport.permute(TP, 1, own, &to[0]), of_the_last);
    let broadcast = |ends: &mut Ends, own: &Region, to: &[Region]| {
        ends.transport.broadcast(TP, 1, own)?;
        copy(ends, own, &to[0])
    };
    rounds("broadcast", broadcast, |round, _| vec![value(round, 1)]);
}

fn summed(from: &Region, to: &Region) -> Reduced {
    Reduced { fold: Reduction::Sum, from: from.clone(), to: to.clone() }
}

#[test]
fn sums() {
    let scatter = |ends: &mut Ends, own: &Region, to: &[Region]| {
        let from = vec![own.clone(); RANKS];
        let tensor = Scattered { fold: Reduction::Sum, from, to: to[0].clone() };
        ends.transport.reduce_scatter(TP, &[tensor])
    };
    rounds("reduce_scatter", scatter, sum);
    let apart = |ends: &mut Ends, own: &Region, to: &[Region]| {
        ends.transport.all_reduce(TP, &[summed(own, &to[0])])
    };
    rounds("all_reduce", apart, sum);
    let in_place = |ends: &mut Ends, own: &Region, to: &[Region]| {
        ends.transport.all_reduce(TP, &[summed(own, own)])?;
        copy(ends, own, &to[0])
    };
    rounds("all_reduce in place", in_place, sum);
}

#[test]
fn sends() {
    let ring = |ends: &mut Ends, own: &Region, to: &[Region]| {
        let me = ends.transport.rank();
        let next = (me + 1) % RANKS;
        ends.transport.send(next, own)?;
        ends.transport.recv((me + RANKS - 1) % RANKS, &to[0])?;
        ends.transport.sent(next)
    };
    rounds("send", ring, of_the_last);
}
