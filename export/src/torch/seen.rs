//! What is known of a function while it is written: its lines, which values are one, and who reads them first and last.

use super::ops;
use super::ops::memory::viewed;
use super::ops::over;
use super::ops::raised::{Call, Raised};
use super::order::Order;
use shardc_ir::func::{Func, Node, Port, Role, RoleKind, Value, ValueMap};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A line of a function: an op, or a call that stands for several.
pub(super) struct Line<'a> {
    /// The op; of a call that stands for several, the one in whose place it stands.
    pub n: &'a Node,
    pub call: Option<&'a Call>,
    pub ins: Vec<Value>,
    pub outs: Vec<Value>,
    /// The operand over which its first result is written, because nothing has that any more.
    pub over: Option<usize>,
    /// Whether a gradient is used up, so that its memory may be written over.
    pub spent: bool,
}

/// What is known of a function while it is written.
pub(super) struct Seen<'a> {
    pub f: &'a Func,
    pub mesh: &'a Mesh,
    pub lines: Vec<Line<'a>>,
    /// What a value is that an op passes on as it is.
    pub same: ValueMap<Value>,
    /// The last line that reads a value; [`KEPT`] of a result.
    pub last: ValueMap<usize>,
    /// The first one.
    pub first: ValueMap<usize>,
    /// Results whose memory is this function's own, and no other result has any of it.
    pub own: BTreeSet<Value>,
    /// Values that are small beside others of the function: they are dropped where it ends.
    pub small: ValueMap<bool>,
}

/// A value that is smaller than the largest by this factor is small.
const SMALL: usize = 8;

/// For each value the one that it is: ops pass operands on as they are, or write results over them.
pub(super) fn same(f: &Func) -> ValueMap<Value> {
    let mut same = f.identity();
    for n in &f.nodes {
        for (o, v) in n.outs.iter().enumerate().filter(|_| !n.ins.is_empty()) {
            // Other sums may be views of what is read elsewhere.
            let adds = is_accumulator(f, same[n.ins[0]]);
            let over = ops::written_over(&n.op, o).filter(|_| adds || !n.op.accumulates());
            let from = ops::is_nothing(&n.op).then_some(0).or(over);
            if let Some(i) = from {
                same[*v] = same[n.ins[i]];
            }
        }
    }
    same
}

/// True of an argument that microbatches add to.
fn is_accumulator(f: &Func, v: Value) -> bool {
    let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
    role.is_some_and(|r| r.kind.is_summed())
}

/// Later than all nodes.
pub(super) const KEPT: usize = usize::MAX;

/// The lines of a function. Nothing is written for ops whose result is their operand.
fn lines<'a>(f: &'a Func, same: &ValueMap<Value>, raised: &'a Raised) -> Vec<Line<'a>> {
    let calls = raised.of_func(f);
    // What calls have made of several values: the others are not there.
    let mut gone: BTreeSet<Value> = BTreeSet::new();
    gone.extend(calls.keys().flat_map(|n| f.nodes[*n].outs.iter().copied()));
    calls.values().flatten().flat_map(|c| &c.outs).for_each(|v| _ = gone.remove(v));
    let mut out: Vec<Line> = vec![];
    for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| !ops::is_nothing(&n.op)) {
        match calls.get(&i) {
            Some(None) => {}
            Some(Some(call)) => {
                let (ins, outs) = (call.ins.clone(), call.outs.clone());
                out.push(Line { n, call: Some(call), ins, outs, over: call.over, spent: false });
            }
            None => {
                let ins = n.ins.iter().map(|v| same[*v]).filter(|v| !gone.contains(v));
                let (ins, outs) = (ins.collect(), n.outs.to_vec());
                out.push(Line { n, call: None, ins, outs, over: None, spent: false });
            }
        }
    }
    out
}

/// Writes results over operands whose memory is this function's own and nobody has behind the line: what a plan's kernels do,
/// too.
///
/// `handed` is what has come from a function that keeps nothing of it. Gives the results of whose memory that is true.
fn write_over(
    (f, handed): (&Func, &BTreeSet<Role>),
    same: &ValueMap<Value>,
    lines: &mut [Line],
    last: &ValueMap<usize>,
) -> BTreeSet<Value> {
    // The value whose memory a value has; of that one the last line that reads any of it, where it is made, and whether it may be
    // written over.
    let mut root = f.identity();
    let (mut ends, mut made, mut own) = (last.clone(), f.per_value(0), f.per_value(false));
    for a in f.args.iter().filter(|a| a.role.as_ref().is_some_and(|r| handed.contains(r))) {
        own[same[a.value]] = true;
    }
    for (at, l) in lines.iter_mut().enumerate() {
        let dead = |i: &usize| {
            let (v, of) = (l.ins[*i], root[l.ins[*i]]);
            let (a, b) = (f.ty(v), f.ty(l.outs[0]));
            let elsewhere = l.ins.iter().enumerate().all(|(j, o)| j == *i || root[*o] != of);
            let alike = a.dims == b.dims && a.dtype == b.dtype && a.rank() > 0;
            own[of] && ends[of] <= at && elsewhere && alike
        };
        if let Some(call) = l.call.filter(|c| c.spare.is_some()) {
            l.over = call.spare.filter(dead);
        } else if l.call.is_none() {
            // Nothing behind the optimizer reads gradients.
            let is_grad = |v: Value| {
                let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
                role.is_some_and(|r| matches!(r.kind, RoleKind::Grad | RoleKind::GradSum))
            };
            l.spent = over::is_update(&l.n.op) && {
                let of = root[l.ins[1]];
                ends[of] == at && (own[of] || is_grad(of))
            };
            let all = over::overwritable(l.n).filter(|i| *i < l.ins.len()).filter(dead);
            l.over = all.max_by_key(|i| made[l.ins[*i]]);
        }
        let from = viewed(f, same, l);
        for (o, v) in l.outs.iter().enumerate().filter(|(_, v)| same[**v] == **v) {
            match from.filter(|_| o == 0) {
                Some(i) => {
                    root[*v] = root[l.ins[i]];
                    let of = root[*v];
                    ends[of] = ends[of].max(last[*v]);
                }
                None => own[*v] = l.call.is_some() || over::is_fresh(&l.n.op),
            }
            made[*v] = at;
        }
        // What is sent may still be on its way; what is expanded has elements of many places.
        if ops::is_exchange(&l.n.op) || over::repeats(&l.n.op) {
            l.ins.iter().for_each(|v| own[root[*v]] = false);
        }
    }
    let results = || f.results.iter().map(|r| same[r.value]).filter(|v| last[*v] == KEPT);
    results()
        .filter(|v| own[root[*v]] && results().filter(|o| root[*o] == root[*v]).count() == 1)
        .collect()
}

/// What functions hand to one other alone, and keep nothing of: that may write over it.
pub(super) fn handed(plan: &Plan, seen: &[Seen]) -> BTreeSet<Role> {
    let mut readers: BTreeMap<&Role, usize> = BTreeMap::new();
    let mut makers: BTreeMap<&Role, bool> = BTreeMap::new();
    for (f, s) in plan.module.funcs.iter().zip(seen) {
        for a in f.args.iter().filter_map(|a| a.role.as_ref()) {
            *readers.entry(a).or_default() += 1;
        }
        for r in &f.results {
            if let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Stash) {
                *makers.entry(role).or_insert(true) &= s.own.contains(&s.same[r.value]);
            }
        }
    }
    let alone = |r: &&Role| readers.get(r) == Some(&1);
    makers.into_iter().filter(|m| m.1).map(|m| m.0).filter(alone).cloned().collect()
}

impl<'a> Seen<'a> {
    pub fn new(
        f: &'a Func,
        mesh: &'a Mesh,
        raised: &'a Raised,
        handed: &BTreeSet<Role>,
        order: Order,
    ) -> Seen<'a> {
        let same = same(f);
        let mut lines = order.of(f, &same, lines(f, &same, raised));
        let (mut last, mut first) = (f.per_value(0), f.per_value(KEPT));
        for (i, l) in lines.iter().enumerate() {
            for v in &l.ins {
                last[*v] = i;
                first[*v] = first[*v].min(i);
            }
        }
        let kept = |r: &&Port| r.role.as_ref().is_none_or(|r| raised.is_kept(r));
        f.results.iter().filter(kept).for_each(|r| last[same[r.value]] = KEPT);
        let own = write_over((f, handed), &same, &mut lines, &last);
        let bytes = |v: Value| f.ty(v).local_bytes(mesh);
        let most = f.values.ids().map(bytes).max().unwrap_or(0);
        let small = f.values.ids().map(|v| bytes(v) * SMALL <= most).collect();
        Seen { f, mesh, lines, same, last, first, own, small }
    }

    /// What a rank has of a value.
    pub fn bytes(&self, v: Value) -> usize {
        self.f.ty(v).local_bytes(self.mesh)
    }

    /// The values that lines read and do not make, in the order of their uses.
    pub fn reads(&self, lines: Range<usize>) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        let all = &self.lines[lines];
        let made: BTreeSet<Value> = all.iter().flat_map(|l| l.outs.iter().copied()).collect();
        for v in all.iter().flat_map(|l| &l.ins) {
            if !made.contains(v) && !out.contains(v) {
                out.push(*v);
            }
        }
        out
    }

    /// The line before which the exchange of a line is waited for, if others go on until then.
    pub fn goes_on(&self, at: usize) -> Option<usize> {
        let l = &self.lines[at];
        let first = l.outs.iter().map(|v| self.first[*v]).min().unwrap_or(KEPT);
        let between = |r: Range<usize>| self.lines[r].iter().any(|l| !l.n.op.def().is_view());
        let is = ops::is_exchange(&l.n.op) && between(at + 1..first.min(self.lines.len()));
        is.then_some(first)
    }

    /// The results of a line that are not its operands.
    pub fn own(&self, line: usize) -> impl Iterator<Item = Value> {
        self.lines[line].outs.iter().copied().filter(|v| self.same[*v] == *v)
    }

    /// The values of a line that nobody reads behind it.
    pub fn dying(&self, line: usize) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        for v in &self.lines[line].ins {
            if self.last[*v] == line && !out.contains(v) {
                out.push(*v);
            }
        }
        out
    }
}
