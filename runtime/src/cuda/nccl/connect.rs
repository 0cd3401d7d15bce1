//! How a rank's communicators are made: one per group, and one per direction of the pipeline.

use super::comm::{Comm, Config, Data, Limits, failed_elsewhere};
use super::library::{DataType, Library};
use super::{Edge, Job, Lane, Nccl, RankGroup, Scratch, UnderWay, order, warm};
use crate::alarm::{Alarm, DEVICE, silent};
use crate::cuda::arena::DeviceArena;
use crate::cuda::device::{Event, Stream, wait_for};
use crate::cuda::movement::OnDevice;
use crate::transport::failure;
use shardc_ir::diag::Result;
use shardc_ir::mesh::AtomSet;
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Blocks of the device that a transfer between stages takes, which may be posted long before it comes.
const BLOCKS: i32 = 4;

/// A rank's communicators by what they are for, and all of them in the order in which they were made.
#[derive(Default)]
struct RankCommunicators {
    groups: BTreeMap<AtomSet, RankGroup>,
    to: BTreeMap<usize, Edge>,
    from: BTreeMap<usize, Edge>,
    comms: Vec<Arc<Comm>>,
}

/// The directions between classes, in sets of which none has a class twice: those of a set are split at once, into
/// communicators of two ranks. One communicator for several would let them follow each other.
fn apart(edges: BTreeSet<(usize, usize)>) -> Vec<Vec<(usize, usize)>> {
    let mut sets: Vec<Vec<(usize, usize)>> = vec![];
    for (a, b) in edges {
        let free = |set: &&mut Vec<(usize, usize)>| {
            set.iter().all(|&(c, d)| ![c, d].contains(&a) && ![c, d].contains(&b))
        };
        match sets.iter_mut().find(free) {
            Some(set) => set.push((a, b)),
            None => sets.push(vec![(a, b)]),
        }
    }
    sets
}

impl Nccl {
    /// The end of a rank of a plan; all ranks call it. `main` is the stream of the rank's kernels, and `lane` makes
    /// one of collectives with what moves what is on it.
    ///
    /// # Errors
    /// Those of NCCL and of the driver.
    pub(in crate::cuda) fn connect(
        plan: &Plan,
        rank: usize,
        job: &Job,
        main: &Arc<Stream>,
        lane: &dyn Fn() -> Result<(Arc<Stream>, OnDevice)>,
    ) -> Result<Nccl> {
        let limits = Limits::new(&job.alarm, rank, job.start, job.timeout);
        let given_up = limits.clone();
        job.alarm.at_end(Box::new(move || given_up.abort()));
        let mut parts = RankCommunicators::default();
        if let Err(d) = parts.meet(plan, (job, &limits), main) {
            // What goes on may never end: nothing that it uses is freed.
            job.alarm.ring();
            std::mem::forget(parts);
            return Err(d);
        }
        limits.met();
        job.alarm.begin(String::new());
        let RankCommunicators { groups, to, from, comms } = parts;
        let under_way = Arc::<UnderWay>::default();
        let seen = under_way.clone();
        job.alarm.ask(Box::new(move || seen.seen()));
        watch(main, rank, job, comms, under_way.clone());
        let lanes = (0..1 + groups.values().map(|g| g.lane).max().unwrap_or(0)).map(|_| {
            let ((stream, mover), deferred) = (lane()?, VecDeque::new());
            Ok(Lane { stream, mover, scratch: Scratch::default(), deferred })
        });
        Ok(Nccl {
            rank,
            ranks: plan.module.mesh.ranks(),
            main: main.clone(),
            lanes: lanes.collect::<Result<_>>()?,
            groups,
            to,
            from,
            rehearses: false,
            alarm: job.alarm.clone(),
            defers: false,
            under_way,
            calls: 0,
        })
    }
}

impl RankCommunicators {
    /// Makes all communicators, and exchanges something in each.
    fn meet(
        &mut self,
        plan: &Plan,
        (job, limits): (&Job, &Arc<Limits>),
        main: &Arc<Stream>,
    ) -> Result<()> {
        let (ranks, rank, library) = (plan.module.mesh.ranks(), limits.rank, Library::get()?);
        if !plan.edges().is_empty() {
            order::check(library.version()?)?;
        }
        main.device.bind()?;
        job.alarm.begin(format!(", making the communicator of all {ranks} ranks"));
        let all = Comm::of_all(job.id, ranks, limits)?;
        // Groups are in a host or not: on all ranks alike, as ranks of hosts follow each other.
        let mesh = &plan.module.mesh;
        let near = |axes: AtomSet| {
            let same = |r: usize| mesh.group(axes, r).iter().all(|m| m / job.near == r / job.near);
            (0..ranks).all(same)
        };
        let near: BTreeSet<AtomSet> = plan.groups().into_iter().filter(|&g| near(g)).collect();
        let apart = library.launches_in_order && near.len() < plan.groups().len();
        let lane_of = |axes: AtomSet| usize::from(apart && near.contains(&axes));
        self.split_groups(plan, rank, &all, (&job.alarm, &lane_of))?;
        let room = DeviceArena::new(main, warm::room(plan), false)?;
        main.wait()?;
        let connected = self
            .split_edges(plan, rank, (&all, job), main, &room)
            .and_then(|()| warm::groups(plan, &self.groups, main, &room, &job.alarm))
            .and_then(|()| self.met(rank, main, job));
        self.comms.push(all);
        // What is queued may never end.
        connected.inspect_err(|_| std::mem::forget(room))
    }

    /// Makes the communicators of groups: every rank splits for all of them, in one order.
    fn split_groups(
        &mut self,
        plan: &Plan,
        rank: usize,
        all: &Comm,
        (alarm, lane): (&Alarm, &dyn Fn(AtomSet) -> usize),
    ) -> Result<()> {
        let mesh = &plan.module.mesh;
        for axes in plan.groups() {
            let members = mesh.group(axes, rank);
            let me = members.iter().position(|&r| r == rank).expect("a rank is in its group");
            let label = mesh.names(axes, "+");
            let name = format!("rank {rank} of {label}");
            alarm.begin(format!(", making the communicator of {label}"));
            let config = Config::of(&label, None);
            let comm = all.part((Some(members[0]), me), config, name)?.expect("it has a number");
            self.comms.push(comm.clone());
            self.groups.insert(axes, RankGroup { comm, me, ways: members.len(), lane: lane(axes) });
        }
        Ok(())
    }

    /// Makes the communicators of directions, as all ranks do, and queues a byte along each of this
    /// rank's. The first byte of an arena is there, and stays until all of them were met, or for ever.
    fn split_edges(
        &mut self,
        plan: &Plan,
        rank: usize,
        (all, job): (&Comm, &Job),
        main: &Stream,
        byte: &DeviceArena,
    ) -> Result<()> {
        let class = plan.class_of(rank);
        let sets = apart(plan.edges());
        for (i, set) in sets.iter().enumerate() {
            let (of, n) = (i + 1, sets.len());
            job.alarm.begin(format!(", making communicators between stages, {of} of {n}"));
            let own = set.iter().find(|e| e.0 == class || e.1 == class);
            let Some(&(sender, receiver)) = own else {
                let name = format!("rank {rank}, which is not part of it");
                all.part((None, 0), Config::of("", None), name)?;
                continue;
            };
            let sends = class == sender;
            let other = plan.peer(rank, if sends { receiver } else { sender });
            let (number, name) = match sends {
                true => (rank, format!("rank {rank}, which sends to rank {other}")),
                false => (other, format!("rank {rank}, which receives of rank {other}")),
            };
            let label = format!("pp {sender} to {receiver}");
            let key = (Some(number), usize::from(!sends));
            let config = Config::of(&label, Some(BLOCKS));
            let comm = all.part(key, config, name)?.expect("it has a number");
            self.comms.push(comm.clone());
            let stream = Stream::first(&main.device)?;
            let queue = stream.stream.cast();
            let first = Data { at: byte.address(0), count: 1, kind: DataType::ncclUint8 };
            // SAFETY: `first` is the first byte of an arena, which `meet` keeps until the streams are
            // done, and for ever after an error; what it holds has no meaning, so that several may
            // write it.
            unsafe {
                match sends {
                    true => comm.send(first, 1, queue)?,
                    false => comm.recv(first, 0, queue)?,
                }
            }
            let (offers, posted) = (VecDeque::new(), VecDeque::new());
            let edge = Edge { comm, stream, offers, posted };
            if sends { &mut self.to } else { &mut self.from }.insert(other, edge);
        }
        Ok(())
    }

    /// Waits until something has passed along every direction, and in every group.
    fn met(&self, rank: usize, main: &Stream, job: &Job) -> Result<()> {
        let edge = |(other, e): (&usize, &Edge)| Ok((format!("rank {other}"), e.stream.mark()?));
        let mut passed = self.to.iter().chain(&self.from).map(edge).collect::<Result<Vec<_>>>()?;
        passed.push(("its groups".to_string(), main.mark()?));
        let wait = |(whom, passed): (String, Event)| {
            wait_for(
                || passed.done(),
                |waited| {
                    job.alarm.waits_for_others(true);
                    self.comms.iter().try_for_each(|c| c.check_async())?;
                    if job.alarm.is_rung() {
                        return Err(failed_elsewhere());
                    }
                    if waited < job.start {
                        return Ok(());
                    }
                    let s = job.start.as_secs_f64();
                    Err(failure(format!("rank {rank} waited {s} s for {whom} at the start")))
                },
            )
        };
        passed.into_iter().try_for_each(wait)
    }
}

/// Makes who waits for a rank's stream look at what may have happened meanwhile: to another rank, to
/// a communicator, or nothing for too long.
fn watch(main: &Stream, rank: usize, job: &Job, comms: Vec<Arc<Comm>>, under_way: Arc<UnderWay>) {
    let (timeout, watched): (Duration, Arc<Alarm>) = (job.timeout, job.alarm.clone());
    // The oldest operation that is not done, and since when it is that.
    let seen = Mutex::new((None, Duration::ZERO));
    main.limit(&watched, rank, timeout);
    main.watch(Box::new(move |waited| {
        let oldest = under_way.look();
        let Some(waited) = waited else { return Ok(()) };
        if watched.is_rung() {
            return Err(failed_elsewhere());
        }
        comms.iter().try_for_each(|c| c.check_async())?;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        // A rank's own kernels may take any time.
        if oldest.is_none() || oldest != seen.0 || waited < seen.1 {
            *seen = (oldest, waited);
        }
        if waited - seen.1 < timeout {
            return Ok(());
        }
        Err(silent(rank, timeout, DEVICE))
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many stages, few splits; and no class is twice in one.
    #[test]
    fn directions_are_split_together() {
        let line = |n: usize| (1..n).flat_map(|s| [(s - 1, s), (s, s - 1)]);
        let ring = |n: usize| line(n).chain([(n - 1, 0), (0, n - 1)]);
        let of = |edges: BTreeSet<(usize, usize)>| {
            let sets = apart(edges.clone());
            for set in &sets {
                let classes: Vec<usize> = set.iter().flat_map(|e| [e.0, e.1]).collect();
                assert_eq!(
                    classes.iter().collect::<BTreeSet<_>>().len(),
                    classes.len(),
                    "{sets:?}"
                );
            }
            assert_eq!(sets.concat().into_iter().collect::<BTreeSet<_>>(), edges);
            sets.len()
        };
        assert_eq!(of(BTreeSet::new()), 0);
        assert_eq!(of(line(2).collect()), 2);
        for n in [3, 4, 8, 64] {
            assert_eq!(of(line(n).collect()), 4, "{n} stages");
            assert!(of(ring(n).collect()) <= 7, "{n} stages: {}", of(ring(n).collect()));
        }
    }
}
