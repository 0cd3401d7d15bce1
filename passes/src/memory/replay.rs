//! Checks a memory plan by replay: every value that is read still lies where it was written.
//!
//! It knows nothing of how places were chosen. Each write stamps the bytes of its place; each read
//! asks for the stamp of the value. Two steps of two microbatches are replayed, so that values which
//! live from one to the next are asked for too.

use shardc_ir::func::{Func, Role, RoleKind, Value};
use shardc_ir::plan::{Place, Plan};
use std::collections::{BTreeMap, HashMap};

/// Who wrote which bytes of the arena last.
#[derive(Default)]
struct Arena {
    /// Start → (end, stamp); ranges do not overlap.
    ranges: BTreeMap<usize, (usize, u64)>,
}

impl Arena {
    fn write(&mut self, from: usize, to: usize, stamp: u64) {
        if from == to {
            return;
        }
        let before = self.ranges.range(..from).next_back().map(|(&s, &r)| (s, r));
        if let Some((s, (end, old))) = before.filter(|b| b.1.0 > from) {
            self.ranges.insert(s, (from, old));
            if end > to {
                self.ranges.insert(to, (end, old));
            }
        }
        let inside: Vec<usize> = self.ranges.range(from..to).map(|(&s, _)| s).collect();
        for s in inside {
            let (end, old) = self.ranges.remove(&s).expect("just listed");
            if end > to {
                self.ranges.insert(to, (end, old));
            }
        }
        self.ranges.insert(from, (to, stamp));
    }

    fn holds(&self, from: usize, to: usize, stamp: u64) -> bool {
        let mut at = from;
        while at < to {
            match self.ranges.range(..=at).next_back() {
                Some((_, &(end, s))) if end > at && s == stamp => at = end,
                _ => return false,
            }
        }
        true
    }
}

struct Replay<'a> {
    plan: &'a Plan,
    arena: Arena,
    next: u64,
    /// Stamp of what each role now holds.
    roles: HashMap<Role, u64>,
}

/// Replays two steps and an evaluation between them; says which value is lost, and where.
pub fn replay(plan: &Plan) -> Result<(), String> {
    let mut r = Replay { plan, arena: Arena::default(), next: 1, roles: HashMap::new() };
    for actions in [&plan.actions, &plan.evaluation, &plan.actions] {
        r.fill_inputs()?;
        for a in actions {
            // Microbatches beyond the second repeat what the second did.
            if a.microbatch.is_none_or(|j| j < 2) {
                r.call(a.func, a.microbatch.unwrap_or(0))?;
            }
        }
    }
    Ok(())
}

impl Replay<'_> {
    fn span(&self, p: Place, microbatch: usize) -> Result<(usize, usize), String> {
        let from = p.offset + p.per_microbatch * microbatch;
        let to = from + p.bytes;
        if to > self.plan.memory.peak_bytes {
            return Err(format!(
                "bytes {from}..{to} are outside the arena of {}",
                self.plan.memory.peak_bytes
            ));
        }
        Ok((from, to))
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Data and scalars of a step, and at first parameters and state, are written from outside.
    fn fill_inputs(&mut self) -> Result<(), String> {
        let plan = self.plan;
        for (fi, f) in plan.module.funcs.iter().enumerate() {
            for a in &f.args {
                let Some(role) = &a.role else { continue };
                let outside = match role.kind {
                    RoleKind::Input | RoleKind::Scalar => true,
                    RoleKind::Param | RoleKind::State => !self.roles.contains_key(role),
                    _ => false,
                };
                if outside {
                    let stamp = self.fresh();
                    let p = plan.memory.places[fi][a.value.0 as usize];
                    let parts = if p.per_microbatch > 0 { plan.settings.microbatches } else { 1 };
                    for j in 0..parts {
                        let (from, to) = self.span(p, j)?;
                        self.arena.write(from, to, stamp);
                    }
                    self.roles.insert(role.clone(), stamp);
                }
            }
        }
        Ok(())
    }

    fn call(&mut self, fi: usize, microbatch: usize) -> Result<(), String> {
        let f = &self.plan.module.funcs[fi];
        let mut stamps: HashMap<Value, u64> = HashMap::new();
        for a in &f.args {
            let Some(role) = &a.role else {
                return Err(format!("@{}: {} has no role", f.name, f.name(a.value)));
            };
            let Some(&stamp) = self.roles.get(role) else {
                return Err(format!(
                    "@{}: nobody made {} \"{}\"",
                    f.name,
                    role.kind.name(),
                    role.name
                ));
            };
            stamps.insert(a.value, stamp);
        }
        for (i, n) in f.nodes.iter().enumerate() {
            for &v in &n.ins {
                self.read(fi, f, v, stamps[&v], microbatch)?;
            }
            let scratch = self.plan.memory.workspaces[fi][i];
            let (from, to) = self.span(scratch, 0)?;
            let stamp = self.fresh();
            self.arena.write(from, to, stamp);
            for &o in &n.outs {
                if n.op.def().is_view() {
                    stamps.insert(o, stamps[&n.ins[0]]);
                    continue;
                }
                let stamp = self.fresh();
                let (from, to) = self.span(self.plan.memory.places[fi][o.0 as usize], 0)?;
                self.arena.write(from, to, stamp);
                stamps.insert(o, stamp);
            }
        }
        for r in &f.results {
            self.read(fi, f, r.value, stamps[&r.value], microbatch)?;
            if let Some(role) = &r.role {
                self.roles.insert(role.clone(), stamps[&r.value]);
            }
        }
        Ok(())
    }

    fn read(
        &self,
        fi: usize,
        f: &Func,
        v: Value,
        stamp: u64,
        microbatch: usize,
    ) -> Result<(), String> {
        let (from, to) = self.span(self.plan.memory.places[fi][v.0 as usize], microbatch)?;
        if self.arena.holds(from, to, stamp) {
            return Ok(());
        }
        Err(format!(
            "@{}: {} was overwritten before it was read (bytes {from}..{to})",
            f.name,
            f.name(v)
        ))
    }
}
