//! The instructions of a step against a clock for each rank of the pipeline.

use super::FuncPrice;
use crate::collective::send;
use crate::device::Device;
use crate::parts::Parts;
use shardc_ir::plan::{Instr, Plan};
use std::collections::{BTreeMap, VecDeque};

/// A transfer that was offered: when, and when it was taken.
#[derive(Default)]
struct Offers {
    offered: VecDeque<f64>,
    taken: VecDeque<f64>,
}

/// Seconds until all ranks have ended, the class that ends last, and its parts. A value is offered when
/// it is made, and moves when it is taken; who offered it goes on, until it needs the memory.
pub(super) fn run(plan: &Plan, device: &Device, funcs: &[FuncPrice]) -> (f64, usize, Parts) {
    let n = plan.classes.len();
    let (mut at, mut clock, mut parts) = (vec![0; n], vec![0.0f64; n], vec![Parts::default(); n]);
    let mut between: BTreeMap<(usize, usize), Offers> = BTreeMap::new();
    let mut waiting = n;
    // Until no rank can go on: a plan's lists were checked, so then all have ended.
    while waiting > 0 {
        waiting = 0;
        for c in 0..n {
            while let Some(i) = plan.classes[c].step.get(at[c]) {
                let (now, own) = (&mut clock[c], &mut parts[c]);
                match i {
                    Instr::Call(call) => {
                        *own += funcs[call.func].parts;
                        *now += funcs[call.func].parts.total();
                    }
                    Instr::Send(t) => {
                        between.entry((c, t.with)).or_default().offered.push_back(*now);
                    }
                    Instr::Recv(t) => {
                        let all = between.entry((t.with, c)).or_default();
                        let Some(offered) = all.offered.pop_front() else { break };
                        let far = plan.peer(0, t.with).abs_diff(plan.peer(0, c));
                        let moves = send(device, far, t.bytes as f64);
                        own.bubble += (offered - *now).max(0.0);
                        own.send += moves;
                        *now = now.max(offered) + moves;
                        all.taken.push_back(*now);
                    }
                    Instr::Sent { to } => {
                        let all = between.entry((c, *to)).or_default();
                        let Some(taken) = all.taken.pop_front() else { break };
                        own.bubble += (taken - *now).max(0.0);
                        *now = now.max(taken);
                    }
                }
                at[c] += 1;
                waiting += 1;
            }
        }
    }
    let last = (0..n).max_by(|a, b| clock[*a].total_cmp(&clock[*b]).then(b.cmp(a))).unwrap_or(0);
    let total = parts.get(last).map_or(0.0, Parts::total);
    (total, last, parts.get(last).copied().unwrap_or_default())
}
