//! Times kernels one by one, launched by graphs as steps launch them.

use super::arena::DeviceArena;
use super::device::Stream;
use super::exec::DeviceExecutor;
use super::modules::{Modules, Ready};
use super::products::Products;
use crate::threads::Threads;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Heads, Kernel};
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::mesh::Mesh;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operands begin at multiples of this.
const ALIGN: usize = 256;
/// Launches of a graph take so long together, in seconds, unless they would be more than this.
const LONG: f64 = 2e-3;
const MOST: usize = 256;
/// Graphs that are timed; what counts is their median.
const ROUNDS: usize = 3;
/// Operands of launches that follow each other are apart, until so many bytes lie between two uses of
/// the same: no cache holds them. And copies of them at most.
const COLD: usize = 128 << 20;
const COPIES: usize = 16;

/// A kernel with its launches, and at least so many bytes for each operand, result and workspace.
#[derive(Clone, Copy, Debug)]
pub struct Timed<'a> {
    pub kernel: &'a Kernel,
    pub launches: &'a [DeviceLaunch],
    pub sizes: &'a [usize],
}

/// Kernels of a device, with memory that they run in.
pub struct Timer {
    stream: Arc<Stream>,
    modules: Arc<Modules>,
    own: DeviceExecutor,
    library: Option<DeviceExecutor>,
    arena: Option<(usize, DeviceArena)>,
    numbers: Vec<u8>,
}

fn heads(k: &Kernel) -> Option<&Heads> {
    match k {
        Kernel::Attention(k) => Some(&k.heads),
        Kernel::AttentionGrad(k) => Some(&k.heads),
        _without => None,
    }
}

/// Numbers between a half and one of either sign, as f32 and as bf16.
fn numbers() -> Vec<u8> {
    let mut state = 1u32;
    let mut word = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state & 0x807f_807f) | 0x3f00_3f00
    };
    (0..1 << 20).flat_map(|_| word().to_le_bytes()).collect()
}

impl Timer {
    /// With the code of all kernels, and NVIDIA's library if `library`.
    ///
    /// # Errors
    /// Those of the driver, and `missing-library`.
    pub fn new(stream: &Arc<Stream>, modules: &Arc<Modules>, library: bool) -> Result<Timer> {
        let executor = || {
            let end = Threads::connect(&Mesh::default(), Duration::from_secs(60)).swap_remove(0);
            DeviceExecutor::new(stream, modules, Box::new(end))
        };
        let library = match library {
            true => Some(executor()?.with(Some(Products::open(stream)?))),
            false => None,
        };
        Ok(Timer {
            stream: stream.clone(),
            modules: modules.clone(),
            own: executor()?,
            library,
            arena: None,
            numbers: numbers(),
        })
    }

    /// True if NVIDIA's library does this kernel here, where it is asked to.
    pub fn in_library(&self, k: &Kernel) -> bool {
        matches!(k, Kernel::Gemm(k) if self.library.is_some() && Products::can(k))
    }

    /// Seconds of a launch of a kernel, by the library if `library` and it can; operands are numbers, and
    /// come from memory as far as memory goes.
    ///
    /// # Errors
    /// Those of the driver; `plan` for a collective, or if launches are none.
    pub fn seconds(&mut self, t: Timed, library: bool) -> Result<f64> {
        if t.launches.is_empty() || !DeviceExecutor::repeats(t.kernel) {
            return Err(Diag::new("plan", "this kernel is not a launch that repeats"));
        }
        let mut sizes: Vec<usize> = t.sizes.to_vec();
        t.kernel.reach(&mut |operand, end| {
            if operand >= sizes.len() {
                sizes.resize(operand + 1, 0);
            }
            // No element has more than 4 bytes.
            sizes[operand] = sizes[operand].max(4 * end);
        });
        let room: usize = sizes.iter().map(|n| n.next_multiple_of(ALIGN)).sum();
        let copies = COLD.div_ceil(room.max(1)).clamp(1, COPIES);
        let arena = room_for(&mut self.arena, &self.stream, room * copies, &self.numbers)?;
        let memory: Vec<Vec<*mut f32>> = (0..copies)
            .map(|i| {
                let mut at = i * room;
                let places = sizes.iter().map(|n| {
                    let place = arena.address(at) as *mut f32;
                    at += n.next_multiple_of(ALIGN);
                    place
                });
                places.collect()
            })
            .collect();
        place_tokens(arena, t.kernel, &sizes, (room, copies))?;
        let executor = match &mut self.library {
            Some(by) if library => by,
            _own => &mut self.own,
        };
        let launches = self.modules.ready(t.launches)?;
        let seconds = timed(executor, (t.kernel, &launches), &memory);
        executor.forget();
        seconds
    }
}

/// Memory of so many bytes, filled with these numbers.
fn room_for<'a>(
    arena: &'a mut Option<(usize, DeviceArena)>,
    stream: &Arc<Stream>,
    bytes: usize,
    numbers: &[u8],
) -> Result<&'a mut DeviceArena> {
    if arena.as_ref().is_some_and(|a| a.0 < bytes) {
        *arena = None;
    }
    let (_, own) = match arena {
        Some(own) => own,
        None => arena.insert((bytes, DeviceArena::new(stream, bytes, false)?)),
    };
    own.fill(bytes, numbers)?;
    Ok(own)
}

/// Attention needs to know the places of tokens.
fn place_tokens(
    arena: &mut DeviceArena,
    k: &Kernel,
    sizes: &[usize],
    (room, copies): (usize, usize),
) -> Result<()> {
    let Some(h) = heads(k) else { return Ok(()) };
    for (view, n) in [(&h.q_pos, h.queries), (&h.k_pos, h.keys)] {
        let places: Vec<u8> = (0..n as i32).flat_map(i32::to_le_bytes).collect();
        let first: usize = sizes[..view.operand].iter().map(|n| n.next_multiple_of(ALIGN)).sum();
        (0..copies).try_for_each(|i| arena.write(i * room + first, &places))?;
    }
    Ok(())
}

/// Seconds of a launch among many, on each memory in turn.
fn timed(
    executor: &mut DeviceExecutor,
    (kernel, launches): (&Kernel, &[Ready]),
    memory: &[Vec<*mut f32>],
) -> Result<f64> {
    let queue = |executor: &mut DeviceExecutor, count: usize| {
        (0..count).try_for_each(|i| {
            // SAFETY: every operand has room for what the kernel reaches, and nobody else has it; the memory
            // lives until this kernel's runs are forgotten.
            unsafe { executor.run(kernel, launches, &memory[i % memory.len()]) }
        })
    };
    let several = |executor: &mut DeviceExecutor, count: usize| -> Result<f64> {
        let since = Instant::now();
        queue(executor, count)?;
        executor.wait()?;
        Ok(since.elapsed().as_secs_f64())
    };
    // Waiting takes longer than a small kernel.
    several(executor, 1)?;
    let one = match several(executor, 1)? {
        short if short < LONG / 2.0 => several(executor, 8)? / 8.0,
        long => long,
    };
    let count = (LONG / one).ceil().clamp(1.0, MOST as f64) as usize;
    executor.keep(0, count * launches.len(), |executor| queue(executor, count))?;
    let graph = |executor: &mut DeviceExecutor| -> Result<f64> {
        let since = Instant::now();
        // SAFETY: as above. Where there is no room for the graph, its launches are queued.
        if !unsafe { executor.replay(0)? } {
            queue(executor, count)?;
        }
        executor.wait()?;
        Ok(since.elapsed().as_secs_f64() / count as f64)
    };
    // The first brings the graph to the device.
    graph(executor)?;
    let mut all = (0..ROUNDS).map(|_| graph(executor)).collect::<Result<Vec<f64>>>()?;
    all.sort_by(f64::total_cmp);
    Ok(all[ROUNDS / 2])
}
