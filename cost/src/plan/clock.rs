//! The instructions of a step against a clock for each rank of the pipeline.

use super::{FuncPrice, SEEN};
use crate::collective::send;
use crate::device::Device;
use crate::parts::Parts;
use shardc_ir::plan::{Instr, Plan};
use std::collections::{BTreeMap, VecDeque};

/// Transfers in one direction: when they were offered, posted and taken, and when the last one had moved.
#[derive(Default)]
struct Offers {
    offered: VecDeque<f64>,
    posted: VecDeque<f64>,
    taken: VecDeque<f64>,
    moved: f64,
}

/// When an instruction of a step begins and ends, in seconds since the step began.
pub type Moments = (f64, f64);

/// Waiting of ranks of the pipeline that differs by less of a step is alike.
const AS_LITTLE: f64 = 0.01;

/// A step that was run against the clock.
pub(super) struct ClockedStep {
    /// Seconds until all ranks have ended.
    pub total: f64,
    /// The class that waits least, which the others wait for: of those that wait as little, the one that ends last.
    pub class: usize,
    /// What that class does in the time, waiting behind its end too.
    pub parts: Parts,
    /// By class and instruction. What is waited for is in none of them.
    pub moments: Vec<Vec<Moments>>,
}

/// A value is offered when it is made, and moves when it is taken; or before, while its taker works, if the
/// device overlaps and the receive was posted. Who offered it goes on, until it needs the memory.
pub(super) fn run(plan: &Plan, device: &Device, funcs: &[FuncPrice]) -> ClockedStep {
    let n = plan.classes.len();
    let (mut clock, mut parts) = (vec![0.0f64; n], vec![Parts::default(); n]);
    let mut moments: Vec<Vec<Moments>> = vec![vec![]; n];
    let mut between: BTreeMap<(usize, usize), Offers> = BTreeMap::new();
    let mut waiting = n;
    // Until no rank can go on: a plan's lists were checked, so then all have ended.
    while waiting > 0 {
        waiting = 0;
        for c in 0..n {
            while let Some(i) = plan.classes[c].step.get(moments[c].len()) {
                let (now, own) = (&mut clock[c], &mut parts[c]);
                let from = match i {
                    Instr::Call(call) => {
                        let from = *now;
                        *own += funcs[call.func].parts;
                        *now += funcs[call.func].parts.total();
                        from
                    }
                    Instr::Send(t) => {
                        between.entry((c, t.with)).or_default().offered.push_back(*now);
                        *now
                    }
                    Instr::PostRecv(t) => {
                        if device.overlaps {
                            between.entry((t.with, c)).or_default().posted.push_back(*now);
                        }
                        *now
                    }
                    Instr::Recv(t) => {
                        let all = between.entry((t.with, c)).or_default();
                        let Some(offered) = all.offered.pop_front() else { break };
                        let far = plan.peer(0, t.with).abs_diff(plan.peer(0, c));
                        let moves = send(device, far, t.bytes as f64);
                        let (from, seen) = match all.posted.pop_front() {
                            None => (now.max(offered), moves),
                            Some(posted) => {
                                // One after the other, as the receives of one direction are.
                                all.moved = posted.max(offered).max(all.moved) + moves;
                                let from = now.max(offered);
                                (from, (all.moved - from).clamp(SEEN * moves, moves))
                            }
                        };
                        own.bubble += (offered - *now).max(0.0);
                        own.send += seen;
                        *now = from + seen;
                        all.taken.push_back(*now);
                        from
                    }
                    Instr::Sent { to } => {
                        let all = between.entry((c, *to)).or_default();
                        let Some(taken) = all.taken.pop_front() else { break };
                        own.bubble += (taken - *now).max(0.0);
                        *now = now.max(taken);
                        *now
                    }
                };
                moments[c].push((from, *now));
                waiting += 1;
            }
        }
    }
    let total = clock.iter().copied().fold(0.0, f64::max);
    let waits = |c: usize| parts[c].bubble + total - clock[c];
    let least = (0..n).map(waits).fold(f64::INFINITY, f64::min);
    let last = |a: &usize, b: &usize| clock[*a].total_cmp(&clock[*b]).then(b.cmp(a));
    let some = (0..n).filter(|&c| waits(c) <= least + AS_LITTLE * total);
    let class = some.max_by(last).unwrap_or(0);
    let mut parts = parts.get(class).copied().unwrap_or_default();
    parts.bubble += total - clock.get(class).copied().unwrap_or(total);
    ClockedStep { total: parts.total(), class, parts, moments }
}
