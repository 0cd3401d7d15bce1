//! What ranks are asked to do and what they answer, here and to other processes.

use crate::batch::StepData;
use crate::flight_recorder::{Done, Timing};
use crate::holdings::Task;
use shardc_ir::plan::Plan;
use std::sync::Arc;
use std::time::Duration;

/// What a rank is asked to do.
pub(crate) enum Command {
    Step(Arc<StepData>),
    /// This rank's piece of the value in a place, if it is its owner.
    Fetch {
        func: usize,
        value: shardc_ir::func::Value,
    },
    /// Something with all that this rank holds; by its number other processes know it.
    Task(u32, Arc<Task>),
}

/// What process 0 asks of the others' ranks: a command, but for the tokens, which each reads itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Order {
    Step { lr: f32, step: usize, update: usize, loss_scale: f32, observe: bool, evaluate: bool },
    Fetch { func: usize, value: shardc_ir::func::Value },
    Task(u32),
}

impl Command {
    /// For another process: eight words of 4 bytes.
    pub fn order(&self) -> [u8; 32] {
        let two = |x: usize| [x as u32, (x as u64 >> 32) as u32];
        let words = match self {
            Command::Step(d) => {
                let flags = u32::from(d.observe) | u32::from(d.evaluate) << 1;
                let ([a, b], [c, e]) = (two(d.step), two(d.update));
                [0, d.lr.to_bits(), a, b, c, e, d.loss_scale.to_bits(), flags]
            }
            Command::Fetch { func, value } => [1, *func as u32, value.0, 0, 0, 0, 0, 0],
            Command::Task(number, _) => [2, *number, 0, 0, 0, 0, 0, 0],
        };
        let mut out = [0; 32];
        for (to, w) in out.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&w.to_le_bytes());
        }
        out
    }
}

impl Order {
    /// `None` if there is nothing more to do.
    pub fn read(bytes: &[u8]) -> Option<Order> {
        let word = |i: usize| {
            Some(u32::from_le_bytes(bytes.get(i * 4..i * 4 + 4)?.try_into().expect("4 bytes")))
        };
        let [kind, a, b, flags] = [word(0)?, word(1)?, word(2)?, word(7)?];
        let number = |i| usize::try_from(u64::from(word(i + 1)?) << 32 | u64::from(word(i)?)).ok();
        Some(match kind {
            0 => Order::Step {
                lr: f32::from_bits(a),
                step: number(2)?,
                update: number(4)?,
                loss_scale: f32::from_bits(word(6)?),
                observe: flags & 1 != 0,
                evaluate: flags & 2 != 0,
            },
            1 => Order::Fetch { func: a as usize, value: shardc_ir::func::Value(b) },
            _ => Order::Task(a),
        })
    }
}

/// A rank's piece of an output, dense.
pub(crate) struct OutputPiece {
    /// Number of the output among [`Wiring::results`].
    pub output: usize,
    pub microbatch: usize,
    pub data: Vec<f32>,
}

pub(crate) struct Reply {
    pub pieces: Vec<OutputPiece>,
    /// High-water mark of the arena, in bytes.
    pub touched: usize,
    pub timings: Vec<Timing>,
    /// What a task has given.
    pub given: Vec<u8>,
}

impl Reply {
    /// Bytes that no reply of a process exceeds, with room to spare: what a rank holds of every microbatch, as
    /// f32, and the times of what it does.
    pub fn largest(plan: &Plan) -> usize {
        const TIMES: usize = 1 << 28;
        let settings = &plan.settings;
        let held = plan.peak_bytes().saturating_mul(2);
        held.saturating_mul(settings.microbatches + 1).saturating_add(TIMES)
    }

    /// For another process: numbers of 8 bytes, little-endian, and elements.
    pub fn to_bytes(&self, rank: usize) -> Vec<u8> {
        let mut out = vec![];
        let int = |out: &mut Vec<u8>, x: u64| out.extend_from_slice(&x.to_le_bytes());
        for x in [rank, self.touched, self.timings.len(), self.pieces.len(), self.given.len()] {
            int(&mut out, x as u64);
        }
        out.extend_from_slice(&self.given);
        for t in &self.timings {
            let (kind, a, b) = match t.what {
                Done::Instr(i) => (0, i, 0),
                Done::Launch(f, n) => (1, f, n),
            };
            let (start, end) = (t.start.as_nanos() as u64, t.end.as_nanos() as u64);
            [kind, a as u64, b as u64, start, end].iter().for_each(|&x| int(&mut out, x));
        }
        for p in &self.pieces {
            for x in [p.output, p.microbatch, p.data.len()] {
                int(&mut out, x as u64);
            }
            p.data.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        }
        out
    }

    /// The replies of a process, by rank, as far as they are whole.
    pub fn from_bytes(bytes: &[u8]) -> Vec<(usize, Reply)> {
        let mut rest = bytes;
        std::iter::from_fn(|| Reply::take(&mut rest)).collect()
    }

    fn take(rest: &mut &[u8]) -> Option<(usize, Reply)> {
        fn int(rest: &mut &[u8]) -> Option<usize> {
            let (word, left) = rest.split_first_chunk::<8>()?;
            *rest = left;
            usize::try_from(u64::from_le_bytes(*word)).ok()
        }
        let [rank, touched, timings, pieces, given] =
            [int(rest)?, int(rest)?, int(rest)?, int(rest)?, int(rest)?];
        let (given, left) = rest.split_at_checked(given)?;
        *rest = left;
        let given = given.to_vec();
        let mut reply = Reply { pieces: vec![], touched, timings: vec![], given };
        for _ in 0..timings {
            let [kind, a, b, start, end] =
                [int(rest)?, int(rest)?, int(rest)?, int(rest)?, int(rest)?];
            let what = if kind == 0 { Done::Instr(a) } else { Done::Launch(a, b) };
            let time = |ns: usize| Duration::from_nanos(ns as u64);
            reply.timings.push(Timing { what, start: time(start), end: time(end) });
        }
        for _ in 0..pieces {
            let [output, microbatch, len] = [int(rest)?, int(rest)?, int(rest)?];
            let (data, left) = rest.split_at_checked(len.checked_mul(4)?)?;
            *rest = left;
            let word = |w: &[u8]| f32::from_le_bytes([w[0], w[1], w[2], w[3]]);
            let data = data.chunks_exact(4).map(word).collect();
            reply.pieces.push(OutputPiece { output, microbatch, data });
        }
        Some((rank, reply))
    }
}
