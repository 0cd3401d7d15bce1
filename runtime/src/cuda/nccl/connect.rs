//! How a rank's communicators are made: one per group, and one per direction of the pipeline.

use super::library::{Comm, Config, Data, DataType, Library};
use super::{Edge, Group, Job, Lane, Nccl, Scratch, UnderWay, warm};
use crate::alarm::{Alarm, silent};
use crate::cuda::arena::Arena;
use crate::cuda::device::Stream;
use crate::cuda::movement::OnDevice;
use crate::transport::failure;
use shardc_ir::diag::Result;
use shardc_ir::mesh::AtomSet;
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Blocks of the device that a transfer between stages takes, which may be posted long before it comes.
const BLOCKS: i32 = 4;

/// A rank's communicators by what they are for, and all of them in the order in which they were made.
#[derive(Default)]
struct Parts {
    groups: BTreeMap<AtomSet, Group>,
    to: BTreeMap<usize, Edge>,
    from: BTreeMap<usize, Edge>,
    comms: Vec<Arc<Comm>>,
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
        let ranks = plan.module.mesh.ranks();
        main.device.bind()?;
        job.alarm.begin(format!(", making the communicator of all {ranks} ranks"));
        let all = Comm::of_all(job.id, rank, ranks, &job.alarm)?;
        let mut parts = Parts::default();
        // Groups are in a host or not: on all ranks alike, as ranks of hosts follow each other.
        let mesh = &plan.module.mesh;
        let near = |axes: AtomSet| {
            let same = |r: usize| mesh.group(axes, r).iter().all(|m| m / job.near == r / job.near);
            (0..ranks).all(same)
        };
        let near: BTreeSet<AtomSet> = plan.groups().into_iter().filter(|&g| near(g)).collect();
        let apart = Library::get()?.launches_in_order()? && near.len() < plan.groups().len();
        let lane_of = |axes: AtomSet| usize::from(apart && near.contains(&axes));
        parts.split_groups(plan, rank, &all, (&job.alarm, &lane_of))?;
        let room = Arena::new(main, warm::room(plan), false)?;
        main.wait()?;
        let connected = parts
            .split_edges(plan, rank, (&all, job), main, &room)
            .and_then(|()| warm::groups(plan, &parts.groups, main, &room, &job.alarm));
        if let Err(d) = connected.and_then(|()| parts.met(rank, main, job)) {
            // What is queued may never end: nothing that it uses is freed.
            job.alarm.ring();
            std::mem::forget(room);
            return Err(d);
        }
        job.alarm.begin(String::new());
        drop(room);
        let Parts { groups, to, from, mut comms } = parts;
        comms.push(Arc::new(all));
        let under_way = Arc::<UnderWay>::default();
        let seen = under_way.clone();
        job.alarm.ask(Box::new(move || seen.seen()));
        // At a clean end they are destroyed.
        let ended: Vec<Weak<Comm>> = comms.iter().map(Arc::downgrade).collect();
        job.alarm.at_end(Box::new(move || {
            ended.iter().filter_map(Weak::upgrade).for_each(|c| c.abort());
        }));
        watch(main, rank, job, comms, under_way.clone());
        let lanes = (0..1 + groups.values().map(|g| g.lane).max().unwrap_or(0)).map(|_| {
            let ((stream, mover), deferred) = (lane()?, VecDeque::new());
            Ok(Lane { stream, mover, scratch: Scratch::default(), deferred })
        });
        Ok(Nccl {
            rank,
            ranks,
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

impl Parts {
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
            let name = format!("rank {rank} of {}", mesh.names(axes, "+"));
            alarm.begin(format!(", making the communicator of {}", mesh.names(axes, "+")));
            let comm = Arc::new(
                all.part((Some(members[0]), me), Config::of(None), name)?.expect("it has a number"),
            );
            self.comms.push(comm.clone());
            self.groups.insert(axes, Group { comm, me, ways: members.len(), lane: lane(axes) });
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
        byte: &Arena,
    ) -> Result<()> {
        let class = plan.class_of(rank);
        for (sender, receiver) in plan.edges() {
            let other = plan.peer(rank, if class == sender { receiver } else { sender });
            let (number, name) = match (class == sender, class == receiver) {
                (true, _) => (Some(rank), format!("rank {rank}, which sends to rank {other}")),
                (_, true) => (Some(other), format!("rank {rank}, which receives of rank {other}")),
                _ => (None, format!("rank {rank}, which is not part of it")),
            };
            let key = usize::from(class == receiver);
            job.alarm.begin(format!(", making the communicator of stages {sender} and {receiver}"));
            let Some(comm) = all.part((number, key), Config::of(Some(BLOCKS)), name)?.map(Arc::new)
            else {
                continue;
            };
            self.comms.push(comm.clone());
            let stream = Stream::first(&main.device)?;
            let queue = stream.stream.cast();
            let first = Data { at: byte.address(0), count: 1, kind: DataType::Byte };
            // SAFETY: `first` is the first byte of an arena, which `connect` keeps until the streams are
            // done, and for ever after an error; what it holds has no meaning, so that several may
            // write it.
            unsafe {
                match class == sender {
                    true => comm.send(first, 1, queue)?,
                    false => comm.recv(first, 0, queue)?,
                }
            }
            let (offers, posted) = (VecDeque::new(), VecDeque::new());
            let edge = Edge { comm, stream, offers, posted };
            if class == sender { &mut self.to } else { &mut self.from }.insert(other, edge);
        }
        Ok(())
    }

    /// Waits until something has passed along every direction, and in every group.
    fn met(&self, rank: usize, main: &Stream, job: &Job) -> Result<()> {
        let since = Instant::now();
        let edge = |(other, e): (&usize, &Edge)| Ok((format!("rank {other}"), e.stream.mark()?));
        let mut passed = self.to.iter().chain(&self.from).map(edge).collect::<Result<Vec<_>>>()?;
        passed.push(("its groups".to_string(), main.mark()?));
        for (whom, passed) in passed {
            while !passed.done()? {
                self.comms.iter().try_for_each(|c| c.check_async())?;
                if job.alarm.is_rung() {
                    return Err(failure("another rank failed".into()));
                }
                if since.elapsed() > job.start {
                    let s = job.start.as_secs_f64();
                    let message = format!("rank {rank} waited {s} s for {whom} at the start");
                    return Err(failure(message));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
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
            return Err(failure("another rank failed".into()));
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
        Err(silent(rank, timeout))
    }));
}
