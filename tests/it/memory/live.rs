//! How much of an arena is alive at once, counted node by node from the functions and the lists of
//! instructions, without the planner's own tables of lives.
//!
//! What counts: everything that lives through the step (frame 0 and the data of all microbatches), at
//! any time; of the rest, a value from the node that writes it, or its receipt, to the last node that
//! reads it, the end of a call that returns it, or the moment when its offer to another rank was
//! taken; a workspace while its node runs. A view is its operand, and a result that lies where an
//! operand of the same node lies is that operand's memory, written over. Alignment and gaps do not
//! count.

use super::*;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::group::launches;
use shardc_ir::plan::{Call, FramePlace, Instr, RankClass, Transfer};
use shardc_ir::types::DType;
use shardc_testing::taken;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A piece of memory in use from one moment to another, both included.
struct Piece {
    bytes: usize,
    birth: usize,
    death: usize,
}

/// Nothing if the value lives through the step.
type Held = Option<usize>;

struct Count<'a> {
    plan: &'a Plan,
    class: &'a RankClass,
    now: usize,
    pieces: Vec<Piece>,
    roles: HashMap<(&'a Role, Option<usize>), Held>,
    offers: BTreeMap<usize, VecDeque<Held>>,
    /// Receives that were posted.
    posted: BTreeMap<usize, VecDeque<Held>>,
}

/// The most bytes of a class that are alive at once in one of its lists.
fn most_alive(plan: &Plan, class: &RankClass, list: &[Instr]) -> usize {
    let mut c = Count {
        plan,
        class,
        now: 0,
        pieces: vec![],
        roles: HashMap::new(),
        offers: BTreeMap::new(),
        posted: BTreeMap::new(),
    };
    for i in list {
        c.now += 1;
        match i {
            Instr::Call(call) => c.call(call),
            Instr::PostRecv(t) => {
                let held = c.receive(t);
                c.posted.entry(t.with).or_default().push_back(held);
            }
            Instr::Recv(t) => match c.posted.get_mut(&t.with).and_then(VecDeque::pop_front) {
                Some(held) => c.touch(held),
                None => drop(c.receive(t)),
            },
            Instr::Send(t) => c.offer(t),
            Instr::Sent { to } => {
                let held = c.offers.get_mut(to).and_then(VecDeque::pop_front);
                c.touch(held.expect("a wait follows its offer"));
            }
        }
    }
    let mut change = vec![0i64; c.now + 2];
    for p in &c.pieces {
        change[p.birth] += p.bytes as i64;
        change[p.death + 1] -= p.bytes as i64;
    }
    let mut alive = 0;
    let most = change.iter().map(|d| {
        alive += d;
        alive
    });
    through_the_step(plan, class) + most.max().map_or(0, |m| m as usize)
}

/// Bytes of what lives through the step: by place, since several values share one.
fn through_the_step(plan: &Plan, class: &RankClass) -> usize {
    let mut spans: Vec<(usize, usize)> = vec![];
    let mut span = |at: usize, bytes: usize| spans.push((at, at + bytes));
    for &f in &class.funcs {
        let lasting = class.memory.places[f].iter().filter(|p| p.frame == 0);
        lasting.for_each(|p| span(p.offset, p.bytes));
    }
    for c in class.step.iter().chain(&class.evaluation) {
        let Instr::Call(c) = c else { continue };
        for a in &plan.module.funcs[c.func].args {
            let is_data = a.input().is_some();
            let p = class.memory.places[c.func][a.value];
            if is_data && p.frame != 0 {
                span(c.frames[p.frame as usize] + p.offset, p.bytes);
            }
        }
    }
    spans.sort();
    let (mut bytes, mut end) = (0, 0);
    for (from, to) in spans {
        bytes += to.saturating_sub(from.max(end));
        end = end.max(to);
    }
    bytes
}

impl<'a> Count<'a> {
    fn piece(&mut self, bytes: usize) -> Held {
        self.pieces.push(Piece { bytes, birth: self.now, death: self.now });
        Some(self.pieces.len() - 1)
    }

    fn touch(&mut self, held: Held) {
        if let Some(p) = held {
            self.pieces[p].death = self.now;
        }
    }

    fn place(&self, func: usize, v: Value) -> FramePlace {
        self.class.memory.places[func][v]
    }

    fn call(&mut self, c: &Call) {
        let plan: &'a Plan = self.plan;
        let f = &plan.module.funcs[c.func];
        let mut values: HashMap<Value, Held> = HashMap::new();
        for a in &f.args {
            let role = a.role.as_ref().expect("arguments have roles");
            let held = match role.kind {
                RoleKind::Stash | RoleKind::Edge | RoleKind::GradFrom(_) => {
                    self.roles[&(role, c.microbatch)]
                }
                // One that microbatches add to lives through the step.
                RoleKind::Grad if self.place(c.func, a.value).frame != 0 => {
                    self.roles[&(role, None)]
                }
                _lasting => None,
            };
            values.insert(a.value, held);
        }
        for x in launches(f) {
            self.now += 1;
            x.ins.iter().for_each(|v| self.touch(values[v]));
            for work in &self.class.memory.workspaces[c.func][x.nodes.clone()] {
                self.piece(work.bytes);
            }
            for n in &f.nodes[x.nodes.clone()] {
                for &o in &n.outs {
                    let at = self.place(c.func, o);
                    let same = |&&v: &&Value| self.place(c.func, v) == at;
                    let over = x.ins.iter().find(same).map(|v| values[v]);
                    let held = match over {
                        _ if n.op.def().is_view() => values[&n.ins[0]],
                        // Only nodes of the launch read it.
                        _ if !x.outs.contains(&o) => None,
                        _ if at.frame == 0 => None,
                        Some(operand) => operand,
                        None => self.piece(at.bytes),
                    };
                    values.insert(o, held);
                }
            }
        }
        self.now += 1;
        for r in &f.results {
            self.touch(values[&r.value]);
            if let Some(role) = &r.role {
                let microbatch = c.microbatch.filter(|_| role.kind != RoleKind::Grad);
                self.roles.insert((role, microbatch), values[&r.value]);
            }
        }
    }

    fn receive(&mut self, t: &Transfer) -> Held {
        let plan: &'a Plan = self.plan;
        let args = &plan.module.funcs[t.func].args;
        let role = args.iter().find(|a| a.value == t.value).and_then(|a| a.role.as_ref());
        let lasting = self.place(t.func, t.value).frame == 0;
        let held = if lasting { None } else { self.piece(t.bytes) };
        self.roles.insert((role.expect("an argument is received"), t.microbatch), held);
        held
    }

    fn offer(&mut self, t: &Transfer) {
        let results = &self.plan.module.funcs[t.func].results;
        let role = results.iter().find(|r| r.value == t.value).and_then(|r| r.role.as_ref());
        let key = (role.expect("a result is sent"), t.microbatch);
        // What lives through the step was made ready under no microbatch, or another.
        let held = self.roles.get(&key).copied().flatten();
        self.touch(held);
        self.offers.entry(t.with).or_default().push_back(held);
    }
}

/// Checks every class of a plan; the most any arena exceeds what lives in it, in percent.
pub fn excess(what: &str, plan: &Plan) -> f64 {
    let mut worst: f64 = 0.0;
    for (i, c) in plan.classes.iter().enumerate() {
        let (what, m) = (format!("{what}, class {i}"), &c.memory);
        let alive = most_alive(plan, c, &c.step);
        assert_eq!(alive, m.live_bytes, "{what}: alive at once");
        assert!(alive <= m.peak_bytes, "{what}: {alive} in an arena of {}", m.peak_bytes);
        let evaluation = most_alive(plan, c, &c.evaluation);
        assert!(evaluation <= m.peak_bytes, "{what}: {evaluation} in an evaluation");
        let parts: usize = m.at_peak.iter().map(|p| p.1).sum();
        assert_eq!(parts, m.peak_bytes, "{what}: parts of the peak");
        worst = worst.max((m.peak_bytes as f64 / alive as f64 - 1.0) * 100.0);
    }
    worst
}

/// What is alive at once is counted alike for every family, layout and recomputation.
#[test]
fn the_planner_counts_what_is_alive() {
    let two: &[(&str, usize)] = &[("dp_replicate", 2), ("tp", 2)];
    let meshes = [(&[][..], false), (two, false), (two, true), (&[("pp", 2)], false)];
    for (f, name) in ALL.iter().enumerate() {
        for (i, (mesh, sp)) in meshes.into_iter().enumerate() {
            for (j, r) in
                [Recompute::None, Recompute::Elementwise, Recompute::Selective, Recompute::Full]
                    .iter()
                    .enumerate()
            {
                for (_, m) in
                    [1, 4].into_iter().enumerate().filter(|(k, _)| taken(f + i + j + k, 8))
                {
                    let o = asked(mesh, sp, SEQ, m, r.clone());
                    let (_, plan) = planned(&fixture_config(name), &o);
                    let recompute = &o.recompute;
                    excess(&format!("{name} {mesh:?} sp={sp} {recompute:?} m={m}"), &plan);
                }
            }
        }
    }
}

#[test]
fn arenas_are_at_most_5_percent_larger_than_what_lives_in_them() {
    use Named::*;
    let policies = [Recompute::None, Recompute::Elementwise, Recompute::Selective, Recompute::Full];
    let schedules = [OneFOneB, Gpipe, Interleaved, ZbH1, ZbV, VHalf, DualPipeV];
    type Layout<'a> = (&'a str, &'a [(&'a str, usize)], bool, [usize; 2]);
    let layouts: [Layout; 5] = [
        ("8b", &[("pp", 2)], true, [4, 16]),
        ("8b", &[("pp", 4), ("tp", 2)], false, [8, 16]),
        ("8b", &[("pp", 4), ("dp_replicate", 2), ("tp", 8)], true, [8, 16]),
        ("70b", &[("pp", 4), ("tp", 8)], true, [8, 16]),
        ("70b", &[("pp", 8), ("tp", 8)], false, [16, 32]),
    ];
    for (i, (size, mesh, sp, counts)) in layouts.into_iter().enumerate() {
        let config = llama(size);
        let sp = sp && mesh.iter().any(|a| a.0 == "tp");
        for (j, n) in schedules.into_iter().enumerate().filter(|(j, _)| taken(i + j, 5)) {
            let (m, r) = (counts[(i + j) % 2], policies[(i + j) % 3].clone());
            let what = format!("{size} {mesh:?} {} {r:?} m={m}", n.name());
            let o = scheduled(asked(mesh, sp, 4096, m, r), n);
            let excess = excess(&what, &planned(&config, &o).1);
            assert!(excess <= 5.0, "{what}: {excess:.2} % more than lives");
        }
    }
    // What a cut backward frees and what it saves next differ in size.
    let o = asked(&[("pp", 4), ("tp", 2)], false, 4096, 16, Recompute::None);
    let excess_cut = excess("8b, cut", &planned(&llama("8b"), &scheduled(o, ZbH1)).1);
    assert!(excess_cut <= 5.0, "a cut backward: {excess_cut:.2} % more than lives");
    for size in ["8b", "70b"] {
        let all = policies.clone().into_iter().flat_map(|r| [(r.clone(), 1), (r, 4)]);
        for (_, (r, m)) in all.enumerate().filter(|(i, _)| taken(i + size.len(), 3)) {
            let o = asked(&[("dp_replicate", 2), ("tp", 8)], true, 4096, m, r);
            let excess = excess(size, &planned(&llama(size), &o).1);
            let what = format!("{size} {:?} m={m}", o.recompute);
            assert!(excess <= 5.0, "{what}: {excess:.2} % more than lives");
        }
    }
}

/// The same with ZeRO, whose gathered weights and gradients come and go: those that
/// `cargo bench --bench arenas` found hardest.
#[test]
fn arenas_of_zero_are_at_most_5_percent_larger_too() {
    use Recompute::*;
    let [dp, cp]: [&[(&str, usize)]; 2] = [&[("dp_shard", 8)], &[("dp_shard", 2), ("cp", 4)]];
    let pp: &[(&str, usize)] = &[("pp", 4), ("dp_shard", 2)];
    for dtype in [DType::F32, DType::BF16] {
        for zero in 1..=3 {
            let all = [
                (dp, 1, None),
                (dp, 1, Selective),
                (dp, 4, Full),
                (cp, 1, Full),
                (cp, 4, None),
                (pp, 4, Selective),
                (pp, 4, None),
                (pp, 16, Full),
            ];
            let first = usize::from(dtype == DType::F32) + zero as usize;
            for (_, (mesh, m, r)) in
                all.into_iter().enumerate().filter(|(i, _)| taken(first + i, 3))
            {
                let o = Options { zero, dtype, ..asked(mesh, false, 4096, m, r) };
                let what = format!("{mesh:?} {dtype:?} zero={zero} {:?} m={m}", o.recompute);
                let excess = excess(&what, &planned(&llama("8b"), &o).1);
                assert!(excess <= 5.0, "{what}: {excess:.2} % more than lives");
            }
        }
    }
}
