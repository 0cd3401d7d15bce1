//! The ranks of a plan on the devices of this machine.

use super::arena::DeviceArena;
use super::device::{Device, Stream};
use super::exec::DeviceExecutor;
use super::modules::{Code, Modules, Ready};
use super::movement::OnDevice;
use super::nccl::{Id, Job, Nccl};
use super::products::{Chosen, Products, told};
use crate::alarm::Alarm;
use crate::engine::{Engine, Queued, out_of_arena};
use crate::threads::Threads;
use crate::transport::Transport;
use shardc_ir::diag::Result;
use shardc_ir::kernel::Kernel;
use shardc_ir::launch::{DeviceLaunch, KernelSource, Launches};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Plan;
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, OnceLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Bytes that pass through memory of this process at once.
const AT_ONCE: usize = 16 << 20;
/// How long a rank that waits for its device goes on to after another has failed: what is queued ends
/// soon, unless it waits for a device that is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// A rank on a device.
struct DeviceRank {
    stream: Arc<Stream>,
    modules: Arc<Modules>,
    /// By function, then by launch of that.
    launches: Vec<Vec<Vec<Ready>>>,
}

/// The ranks of this process on their devices.
pub struct Devices {
    ranks: BTreeMap<usize, DeviceRank>,
    collective: Arc<KernelSource>,
    library: bool,
    /// How the library does products.
    chosen: Chosen,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} ranks on devices", self.ranks.len())
    }
}

impl Devices {
    /// Ranks with what each launches, which take turns on devices with their code; the source of
    /// exchanges, whose code is among the others, and whether NVIDIA's library multiplies.
    ///
    /// # Errors
    /// Those of the driver; `cuda-driver` if devices do not reach each other's memory.
    pub fn new(
        devices: &[(Arc<Device>, Code)],
        ranks: Vec<(usize, Launches)>,
        collective: Arc<KernelSource>,
        library: bool,
    ) -> Result<Devices> {
        for (a, _) in devices {
            let others = devices.iter().filter(|(b, _)| !Arc::ptr_eq(a, b));
            others.into_iter().try_for_each(|(b, _)| a.reach(b))?;
        }
        let modules: Vec<Arc<Modules>> =
            devices.iter().map(|(d, code)| Modules::new(d, code)).collect::<Result<_>>()?;
        let one = |(i, (rank, launches)): (usize, (usize, Launches))| {
            let i = i % devices.len();
            let (stream, modules) = (Stream::new(&devices[i].0)?, modules[i].clone());
            let of = |f: Vec<Vec<DeviceLaunch>>| f.iter().map(|l| modules.ready(l)).collect();
            let launches = launches.into_iter().map(of).collect::<Result<_>>()?;
            Ok((rank, DeviceRank { stream, modules, launches }))
        };
        let ranks = ranks.into_iter().enumerate().map(one).collect::<Result<_>>()?;
        devices.iter().try_for_each(|(d, _)| d.phase("code"))?;
        Ok(Devices { ranks, collective, library, chosen: Chosen::default() })
    }

    /// What of the memory of each rank's device who has taken, in words.
    pub fn memory(&self) -> Vec<String> {
        let line =
            |(rank, b): (&usize, &DeviceRank)| format!("rank {rank}: {}", b.stream.device.held());
        self.ranks.iter().map(line).collect()
    }

    /// By whom products that nothing else is joined with are done, in words.
    pub fn products(&self) -> String {
        if self.library { told(&self.chosen) } else { "our own kernels do all".into() }
    }

    /// The ends of all ranks of a plan, which are here, in their order.
    pub(crate) fn connect(&self, mesh: &Mesh, timeout: Duration) -> Result<Vec<Threads<OnDevice>>> {
        let mover = |b: &DeviceRank| OnDevice::new(&b.stream, &b.modules, self.collective.clone());
        let movers = self.ranks.values().map(mover).collect::<Result<_>>()?;
        let ends = Threads::connect_with(mesh, timeout, movers);
        for (b, end) in self.ranks.values().zip(&ends) {
            let (fine, failed) = (end.failure_check(), OnceLock::new());
            b.stream.watch(Box::new(move |waited| match waited.map_or(Ok(()), |_| fine()) {
                Err(d) if failed.get_or_init(Instant::now).elapsed() > PATIENCE => Err(d),
                _goes_on => Ok(()),
            }));
        }
        Ok(ends)
    }

    /// The ends of the ranks that are here, of those of a plan, all of which have the same `id`. They wait for the
    /// others so long, at the start and then in a step; so many ranks, which follow each other, are `near`: of a host.
    ///
    /// # Errors
    /// Those of NCCL and of the driver.
    pub fn join(
        &self,
        plan: &Plan,
        id: &Id,
        (start, timeout): (Duration, Duration),
        (alarm, near): (&Arc<Alarm>, usize),
    ) -> Result<Vec<Box<dyn Transport>>> {
        let end = |(&rank, b): (&usize, &DeviceRank)| {
            let lane = || {
                let stream = Stream::first(&b.stream.device)?;
                let mover = OnDevice::new(&stream, &b.modules, self.collective.clone())?;
                Ok((stream, mover))
            };
            let job = Job { id, start, timeout, alarm: alarm.clone(), near };
            let end = Nccl::connect(plan, rank, &job, &b.stream, &lane)?;
            b.stream.device.phase("NCCL")?;
            Ok(Box::new(end) as Box<dyn Transport>)
        };
        // They wait for each other, too, if several are here.
        std::thread::scope(|s| {
            let end = &end;
            let all: Vec<_> = self.ranks.iter().map(|b| s.spawn(move || end(b))).collect();
            let ended = |t: ScopedJoinHandle<_>| t.join().unwrap_or_else(|p| resume_unwind(p));
            all.into_iter().map(ended).collect()
        })
    }

    /// The memory and the executor of the rank of a transport.
    pub(crate) fn engine(
        self: &Arc<Devices>,
        transport: Box<dyn Transport>,
        bytes: usize,
        poison: bool,
    ) -> Result<OnCuda> {
        let rank = transport.rank();
        let b = &self.ranks[&rank];
        let arena = DeviceArena::new(&b.stream, bytes, poison)?.staged()?;
        let open = || Products::noted(&b.stream, self.chosen.clone());
        let products = self.library.then(open).transpose()?;
        let executor = DeviceExecutor::new(&b.stream, &b.modules, transport)?.with(products);
        b.stream.device.phase("arena and libraries")?;
        let devices = self.clone();
        Ok(OnCuda { devices, rank, executor, arena, buffer: vec![], touched: 0 })
    }
}

/// A rank's memory and executor on a device.
pub(crate) struct OnCuda {
    devices: Arc<Devices>,
    rank: usize,
    executor: DeviceExecutor,
    arena: DeviceArena,
    /// Memory of this process, for what is written and read.
    buffer: Vec<u64>,
    touched: usize,
}

impl OnCuda {
    /// Room for so many bytes, with whatever was there.
    fn room(&mut self, bytes: usize) -> &mut [u64] {
        let words = bytes.div_ceil(8);
        if self.buffer.len() < words {
            self.buffer.resize(words, 0);
        }
        &mut self.buffer[..words]
    }
}

/// The bytes of words.
fn bytes_of(words: &mut [u64], bytes: usize) -> &mut [u8] {
    assert!(bytes <= size_of_val(words), "as many as there are");
    // SAFETY: bytes of words that are there, borrowed as these are.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), bytes) }
}

impl Engine for OnCuda {
    fn queues(&self) -> bool {
        true
    }

    fn transport(&mut self) -> &mut dyn Transport {
        self.executor.transport()
    }

    fn at(&mut self, offset: usize, bytes: usize) -> Option<*mut f32> {
        self.arena.check(offset, bytes).ok()?;
        self.touched = self.touched.max(offset + bytes);
        Some(self.arena.address(offset) as *mut f32)
    }

    fn at_once(&self) -> usize {
        AT_ONCE
    }

    fn write(
        &mut self,
        offset: usize,
        bytes: usize,
        make: &mut dyn FnMut(*mut f32) -> Result<()>,
    ) -> Result<()> {
        self.at(offset, bytes).ok_or_else(out_of_arena)?;
        make(self.room(bytes).as_mut_ptr().cast())?;
        self.arena.write(offset, bytes_of(&mut self.buffer, bytes))
    }

    fn read(&mut self, offset: usize, bytes: usize, take: &mut dyn FnMut(*mut f32)) -> Result<()> {
        self.at(offset, bytes).ok_or_else(out_of_arena)?;
        self.room(bytes);
        self.arena.read(offset, bytes_of(&mut self.buffer, bytes))?;
        take(self.buffer.as_mut_ptr().cast());
        Ok(())
    }

    fn clear(&mut self, offset: usize, bytes: usize) -> Result<()> {
        self.at(offset, bytes).ok_or_else(out_of_arena)?;
        self.arena.clear(offset, bytes)
    }

    fn repeated(&self, (func, launch): (usize, usize), kernel: &Kernel) -> Option<usize> {
        let all = &self.devices.ranks[&self.rank].launches[func][launch];
        DeviceExecutor::repeats(kernel).then_some(all.len())
    }

    unsafe fn replay(&mut self, run: usize) -> Result<bool> {
        // SAFETY: by the caller.
        unsafe { self.executor.replay(run) }
    }

    unsafe fn keep(&mut self, run: usize, launches: usize, all: &[Queued]) -> Result<()> {
        let own = &self.devices.ranks[&self.rank].launches;
        self.executor.keep(run, launches, |executor| {
            all.iter().try_for_each(|q| {
                let (func, launch) = q.launch;
                // SAFETY: by the caller.
                unsafe { executor.run(q.kernel, &own[func][launch], &q.memory) }
            })
        })
    }

    fn prepare(&mut self, kernel: &Kernel) -> Result<()> {
        self.executor.prepare(kernel)
    }

    unsafe fn rehearse(&mut self, kernel: &Kernel, memory: &[*mut f32]) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.executor.rehearse(kernel, memory) }
    }

    unsafe fn run(
        &mut self,
        (func, launch): (usize, usize),
        kernel: &Kernel,
        memory: &[*mut f32],
    ) -> Result<()> {
        let launches = &self.devices.ranks[&self.rank].launches[func][launch];
        // SAFETY: by the caller.
        unsafe { self.executor.run(kernel, launches, memory) }
    }

    fn wait(&mut self) -> Result<()> {
        self.executor.wait()
    }

    fn touched(&self) -> usize {
        self.touched
    }
}
