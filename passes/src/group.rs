//! Joins nodes that run as one kernel, so that what only they read never reaches memory.
//!
//! ```text
//! Before:  %s = dot[bsh,bsh->bs] %x, %x : f32[4,8]      After:  %s = dot[bsh,bsh->bs] %x, %x :
//! f32[4,8] &          %r = rsqrt %s : f32[4,8]                             %r = rsqrt %s :
//! f32[4,8] &          %y = mul[bsh,bs->bsh] %x, %r : f32[4,8,6]            %y = mul[bsh,bs->bsh]
//! %x, %r : f32[4,8,6]
//! ```
//! Assumes: the functions of a plan, all other passes done but schedule and memory.
//! Leaves: the same nodes, those of a kernel next to each other and marked.
//!
//! What is saved is memory traffic: a value that only its group reads is neither written nor read,
//! and one that several of its nodes read is read once. So each node in turn joins the groups that
//! make its operands, or that read them too, as long as the result is one kernel over rows (see
//! [`IterationSpace`]), no path leads out of it and back, and it names at most `MOST` tensors. A
//! product joins the sum that it is added to, and else a group that is element-wise work on its
//! result, which is then written only for others.
//!
//! Updates of parameters that follow each other are one launch of several kernels, as many as have
//! gradients of a bucket's size: threads share all of it, and a device begins it once.

mod bucket;

use crate::options::{Fuse, Options};
pub(crate) use bucket::BUCKET_BYTES;
use bucket::bucket;
use shardc_ir::func::{Func, FuncKind, FusedWithNext, Node, Port, Role, RoleKind, Uses, Value};
use shardc_ir::group::{IterationSpace, LoopSpace, Roles};
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Facts, FusionClass, Kind};
use shardc_ir::price;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Most tensors that one kernel reads and writes.
const MOST: usize = 24;
/// Most nodes from the first to the last of a kernel: what is farther apart would wait.
const SPAN: usize = 64;
/// Groups that are farther apart than this many others are not made one.
const FAR: usize = 512;

/// Nodes: most groups have one, and most values one reader.
type Members = SmallVec<[usize; 2]>;

/// Groups of nodes while they are made.
struct NodeGroups<'a> {
    mesh: &'a Mesh,
    hardware: &'a Hardware,
    f: &'a Func,
    roles: Roles<'a>,
    /// By node.
    facts: Vec<Facts>,
    /// By node: its group, which is known by one of its nodes.
    of: Vec<usize>,
    /// By group: its nodes, in order; empty if it joined another.
    members: Vec<Members>,
    /// By group: how many tensors its nodes name.
    named: Vec<usize>,
    /// By group: its loops, if they were asked for.
    loops: Vec<Option<LoopSpace>>,
    /// The groups in an order in which all that one reads is made before it, with gaps.
    order: Vec<Option<usize>>,
    /// By group: its place in the order.
    place: Vec<usize>,
    /// By value: who makes it, and who reads it.
    uses: Uses,
    /// By node that makes a parameter or a state anew: the others that read the old one, over which
    /// it is written.
    overwrites: HashMap<usize, Members>,
}

/// What nodes write over of what others read.
fn overwrites(f: &Func, uses: &Uses) -> HashMap<usize, Members> {
    let stored = |k: RoleKind| matches!(k, RoleKind::Param | RoleKind::State(_));
    let role = |p: &Port| p.role.clone().filter(|r| stored(r.kind));
    let olds: HashMap<Role, Value> =
        f.args.iter().filter_map(|a| Some((role(a)?, a.value))).collect();
    let mut all: HashMap<usize, Members> = HashMap::default();
    for r in f.results.iter().filter(|_| !olds.is_empty()) {
        let old = role(r).and_then(|role| olds.get(&role).copied());
        if let (Some(old), Some(m)) = (old, uses.maker(r.value)) {
            all.entry(m).or_default().extend(uses.users(old).filter(|&u| u < m));
        }
    }
    all
}

/// Joins the nodes of a function, as far as is asked for.
pub fn group(mesh: &Mesh, f: &mut Func, o: &Options) {
    if o.fuse == Fuse::No {
        return;
    }
    let groups = NodeGroups::of(mesh, f, o.fuse, &o.hardware);
    let order = groups.sorted();
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut f.nodes).into_iter().map(Some).collect();
    f.nodes.reserve(nodes.len());
    for g in order {
        let (last, rest) = g.split_last().expect("a group has nodes");
        let mut take = |i: usize, fused: FusedWithNext| {
            let n = nodes[i].take().expect("a node is in one group");
            f.nodes.push(Node { fused, ..n });
        };
        rest.iter().for_each(|&i| take(i, FusedWithNext::Kernel));
        take(*last, FusedWithNext::No);
    }
    bucket(mesh, f);
}

impl<'a> NodeGroups<'a> {
    fn of(mesh: &'a Mesh, f: &'a Func, fuse: Fuse, hardware: &'a Hardware) -> NodeGroups<'a> {
        let count = f.nodes.len();
        let uses = f.uses();
        let facts: Vec<Facts> = f.nodes.iter().map(|n| n.op.facts()).collect();
        let mut g = NodeGroups {
            mesh,
            hardware,
            f,
            roles: Roles::of(f),
            loops: (0..count).map(|_| None).collect(),
            facts,
            named: f.nodes.iter().map(|n| n.ins.len() + n.outs.len()).collect(),
            of: (0..count).collect(),
            members: (0..count).map(|i| Members::from_slice(&[i])).collect(),
            order: (0..count).map(Some).collect(),
            place: (0..count).collect(),
            overwrites: overwrites(f, &uses),
            uses,
        };
        for i in 0..count {
            g.accumulate(i);
        }
        if fuse == Fuse::Yes {
            (0..count).for_each(|i| g.sum_of_chunks(i));
        }
        for i in 0..count {
            g.visit(i);
        }
        if fuse == Fuse::Yes {
            (0..count).rev().for_each(|i| g.epilogue(i));
        }
        g
    }

    /// A product, or what is put into rows, joins what adds it in place and alone reads it: a
    /// gradient that microbatches or several uses of a weight add to.
    fn accumulate(&mut self, i: usize) {
        let n = &self.f.nodes[i];
        let (true, &[_, second]) = (n.op.accumulates(), &n.ins[..]) else { return };
        let Some(m) = self.made_for(second, i) else { return };
        if self.roles.accumulates(&self.f.nodes[m], n) {
            self.merge(m, i);
        }
    }

    /// The maker of a value that only this node reads.
    fn made_for(&self, v: Value, reader: usize) -> Option<usize> {
        self.uses.maker(v).filter(|_| self.uses.only_user(v) == Some(reader))
    }

    /// In forward gradients are those of a loss in chunks: a product, its cast and the sum over
    /// chunks are one kernel, so that no chunk's product waits for the sum.
    fn sum_of_chunks(&mut self, i: usize) {
        let (f, n) = (self.f, &self.f.nodes[i]);
        let casts = |i: usize| self.facts[i].kind == Kind::Conversion;
        let of_chunk = f.kind == FuncKind::Forward && f.name(n.outs[0]).grad;
        let cast = match n.ins.last().filter(|_| n.op.is_sum()) {
            Some(&v) => self.made_for(v, i).filter(|&c| casts(c)),
            None => Some(i).filter(|&c| casts(c)),
        };
        let Some(c) = cast.filter(|_| of_chunk) else { return };
        let Some(m) = self.made_for(f.nodes[c].ins[0], c) else { return };
        let all = if c == i { vec![m, c] } else { vec![m, c, i] };
        if self.roles.epilogue(all.iter().map(|&i| &f.nodes[i])).is_some() {
            for x in all.windows(2) {
                let [a, b] = [x[0], x[1]].map(|i| self.of[i]);
                let _ = a == b || self.merge(a, b);
            }
        }
    }

    /// A product joins a group that reads it, if all of that is element by element: of several
    /// products that a group reads, the last one, for which it need not wait.
    fn epilogue(&mut self, i: usize) {
        let n = &self.f.nodes[i];
        if !self.facts[i].is_matrix_product() || self.members[self.of[i]][..] != [i] {
            return;
        }
        for r in self.uses.users(n.outs[0]).collect::<Members>() {
            let group = self.of[r];
            let then = &self.members[group];
            let nodes = || std::iter::once(&i).chain(then).map(|&i| &self.f.nodes[i]);
            let both = [i, group];
            let used = self.outs(both).any(|v| self.seen(v, both));
            let fits = self.span(i, group) <= SPAN && used && !self.is_wide(both);
            let fits = fits && self.pays(n, both);
            if fits && self.roles.epilogue(nodes()).is_some() && self.merge(i, group) {
                // The product is the first, wherever it was.
                self.members[group].sort_by_key(|&m| m != i);
                return;
            }
        }
    }

    /// Joins a node with the groups around its operands.
    fn visit(&mut self, i: usize) {
        let n = &self.f.nodes[i];
        if self.facts[i].fusion.is_none() {
            return;
        }
        let made = n.ins.iter().filter_map(|&v| self.uses.maker(v));
        let mut near: SmallVec<[usize; 16]> = made.collect();
        near.sort_by_key(|&m| Reverse(m));
        // Others that read the same: what is small is read from a cache anyway.
        let large = |v: &&Value| self.f.ty(**v).rank() > 1;
        for v in n.ins.iter().filter(large) {
            let close = |r: &usize| *r < i && i - *r < SPAN;
            near.extend(self.uses.users(*v).rev().filter(close));
        }
        // Groups that the node's, as it is, is not a kernel with.
        let mut apart: SmallVec<[usize; 8]> = SmallVec::new();
        for other in near {
            let (a, b) = (self.of[other], self.of[i]);
            if a == b || apart.contains(&a) {
                continue;
            }
            match self.join(a, b) {
                true => apart.clear(),
                false => apart.push(a),
            }
        }
    }

    /// Makes two groups one, if that is a kernel; says whether it did.
    fn join(&mut self, a: usize, b: usize) -> bool {
        let rows = |g: usize| self.members[g].iter().all(|&i| self.facts[i].fusion.is_some());
        if self.span(a, b) > SPAN || !rows(a) || !rows(b) || !self.may_share_rows(a, b) {
            return false;
        }
        if self.repeats(a, b) || self.is_wide([a, b]) || !self.worth(a) || !self.worth(b) {
            return false;
        }
        let both = [a, b];
        for g in both {
            if let (None, &[i]) = (&self.loops[g], &self.members[g][..]) {
                self.loops[g] = LoopSpace::of(self.f, std::iter::once((i, &self.f.nodes[i])));
            }
        }
        let Some(space) = self.space(both).filter(|s| self.walks_once(both, s)) else {
            return false;
        };
        let joined = self.merge(a, b);
        if joined {
            self.loops[b] = Some(space.loops);
        }
        joined
    }

    /// The kernel over rows that two groups would be.
    fn space(&self, both: [usize; 2]) -> Option<IterationSpace> {
        let [Some(x), Some(y)] = both.map(|g| self.loops[g].as_ref()) else { return None };
        let loops = x.and(y)?;
        let mut all: SmallVec<[usize; 16]> = self.nodes(both).collect();
        all.sort_unstable();
        let nodes = all.iter().map(|&i| Some((&self.f.nodes[i], self.facts[i].fusion?)));
        loops.space(self.f, &nodes.collect::<Option<SmallVec<[_; 16]>>>()?)
    }

    /// Nodes from the first to the last of two groups.
    fn span(&self, a: usize, b: usize) -> usize {
        let ends = [a, b].map(|g| (self.members[g][0], self.members[g][self.members[g].len() - 1]));
        ends[0].1.max(ends[1].1) - ends[0].0.min(ends[1].0)
    }

    /// True if one makes again what the other makes: in forward that is the f32 of a loss in
    /// chunks, which is not to be kept until its gradient wants it.
    fn repeats(&self, a: usize, b: usize) -> bool {
        let casts = |i: &&usize| self.facts[**i].kind == Kind::Conversion;
        let same = |x: &Node, y: &Node| x.ins == y.ins && x.op == y.op;
        let again = |&i: &usize| {
            let mut others = self.members[b].iter();
            others.any(|&j| same(&self.f.nodes[i], &self.f.nodes[j]))
        };
        self.f.kind == FuncKind::Forward && self.members[a].iter().filter(casts).any(again)
    }

    /// False if results of the two differ in the sizes of leading dims: these are other loops then.
    fn may_share_rows(&self, a: usize, b: usize) -> bool {
        let [a, b] = [a, b].map(|g| self.f.ty(self.f.nodes[self.members[g][0]].outs[0]));
        a.dims.iter().zip(&b.dims).all(|(a, b)| a.size == b.size)
    }

    /// False if results of rows are written where no row is folded: then nothing but these results
    /// would keep a long row, such as all of a parameter, from being cut into tasks.
    fn walks_once(&self, both: [usize; 2], space: &IterationSpace) -> bool {
        let short = |v: &Value| space.axes(*v).is_some_and(|a| a.len() == space.rows.len());
        let folds =
            |i: usize| matches!(self.facts[i].fusion, Some(FusionClass::Fold | FusionClass::Take));
        space.cols.is_empty()
            || self.nodes(both).any(folds)
            || !self.outs(both).any(|v| short(&v) && self.seen(v, both))
    }

    /// An index is looked up in a row only where the row is walked anyway, and a label that is far
    /// from 0 is still exact.
    fn worth(&self, group: usize) -> bool {
        self.members[group].iter().all(|&i| {
            let n = &self.f.nodes[i];
            let picked = match self.facts[i].fusion {
                Some(FusionClass::Take) => n.ins[0],
                Some(FusionClass::IndexAdd) => n.outs[0],
                Some(FusionClass::Each | FusionClass::Fold) | None => return true,
            };
            self.f.ty(picked).sizes().last().is_some_and(|&n| n < 1 << 24)
        })
    }

    /// The nodes of two groups, and their results.
    fn nodes(&self, both: [usize; 2]) -> impl Iterator<Item = usize> {
        both.into_iter().flat_map(|g| &self.members[g]).copied()
    }
    fn outs(&self, both: [usize; 2]) -> impl Iterator<Item = Value> {
        self.nodes(both).flat_map(|i| &self.f.nodes[i].outs).copied()
    }

    /// True if a kernel of these groups reads and writes too many tensors.
    fn is_wide(&self, both: [usize; 2]) -> bool {
        if both.map(|g| self.named[g]).iter().sum::<usize>() <= MOST {
            return false;
        }
        self.moved(both).count() > MOST
    }

    /// What a kernel of these groups reads, and what it writes.
    fn moved(&self, both: [usize; 2]) -> impl Iterator<Item = Value> {
        let outside = |v: &Value| self.uses.maker(*v).is_none_or(|m| !both.contains(&self.of[m]));
        let mut ins: SmallVec<[Value; 32]> = SmallVec::new();
        for i in self.nodes(both) {
            let own = self.f.nodes[i].ins.iter().filter(|v| outside(v));
            own.for_each(|&v| ins.push(v));
        }
        ins.sort_unstable();
        ins.dedup();
        ins.into_iter().chain(self.outs(both).filter(move |&v| self.seen(v, both)))
    }

    /// True if a product is faster with what becomes of its result than alone, by a library.
    fn pays(&self, n: &Node, both: [usize; 2]) -> bool {
        if self.hardware.own.is_none() {
            return true;
        }
        let bytes = |v: Value| self.f.ty(v).local_bytes(self.mesh) as f64;
        let (ins, out) = (n.ins.iter().map(|v| self.f.ty(*v)), self.f.ty(n.outs[0]));
        let flops = price::flops(self.mesh, &n.op, &ins.collect::<Vec<_>>(), out);
        let beside = self.moved(both).filter(|v| !n.ins.contains(v)).map(bytes).sum();
        self.hardware.joins(flops, bytes(n.outs[0]), beside)
    }

    /// True if others than the nodes of these groups see a value.
    fn seen(&self, v: Value, both: [usize; 2]) -> bool {
        self.uses.is_result(v) || self.uses.users(v).any(|r| !both.contains(&self.of[r]))
    }

    /// Makes two groups one, which stands where both may: behind all they read, before all that
    /// reads them. False if a path leads from the first over others to the second.
    fn merge(&mut self, a: usize, b: usize) -> bool {
        let (first, last) = if self.place[a] < self.place[b] { (a, b) } else { (b, a) };
        let (from, to) = (self.place[first], self.place[last]);
        if to - from > FAR {
            return false;
        }
        // What stands between them, split into what needs the first and what does not.
        let mut needs: SmallVec<[usize; 16]> = SmallVec::from_slice(&[first]);
        let mut rest: SmallVec<[usize; 16]> = SmallVec::new();
        for &g in self.order[from + 1..to].iter().flatten() {
            match self.reads(g, &needs) {
                true => needs.push(g),
                false => rest.push(g),
            }
        }
        if self.reads(last, &needs[1..]) || self.holds_more(first, last, &rest) {
            return false;
        }
        let mut all = Members::from_slice(&self.members[a]);
        all.extend_from_slice(&self.members[b]);
        all.sort_unstable();
        all.iter().for_each(|&i| self.of[i] = b);
        self.named[b] += self.named[a];
        self.members[a].clear();
        self.members[b] = all;
        let new: SmallVec<[usize; 16]> =
            rest.into_iter().chain([b]).chain(needs.drain(1..)).collect();
        for (i, at) in (from..=to).enumerate() {
            self.order[at] = new.get(i).copied();
            if let Some(&g) = new.get(i) {
                self.place[g] = at;
            }
        }
        true
    }

    /// The groups, each where its last node was, or as soon after that as what it reads is made.
    fn sorted(&self) -> Vec<Members> {
        let count = self.members.len();
        let mut waits = vec![0usize; count];
        let mut next: Vec<Members> = (0..count).map(|_| Members::new()).collect();
        for i in 0..count {
            for m in self.before(i).filter(|&m| self.of[m] != self.of[i]) {
                next[self.of[m]].push(self.of[i]);
                waits[self.of[i]] += 1;
            }
        }
        let last = |g: usize| self.members[g].last().map(|&i| Reverse((i, g)));
        let free = (0..count).filter(|&g| waits[g] == 0);
        let mut ready: BinaryHeap<Reverse<(usize, usize)>> = free.filter_map(last).collect();
        let mut out = vec![];
        while let Some(Reverse((_, g))) = ready.pop() {
            out.push(self.members[g].clone());
            for &n in &next[g] {
                waits[n] -= 1;
                if waits[n] == 0 {
                    ready.extend(last(n));
                }
            }
        }
        out
    }

    /// True if the first of two groups, moved behind what stands between them, would keep more
    /// bytes alive there than the result that need not be kept: as sums over the steps of a ring
    /// would.
    fn holds_more(&self, first: usize, last: usize, between: &[usize]) -> bool {
        let works =
            |g: &usize| self.members[*g].iter().any(|&i| !self.f.nodes[i].op.def().is_view());
        if !between.iter().any(works) {
            return false;
        }
        let place = |i: usize| self.place[self.of[i]];
        let (now, then) = (self.place[first], self.place[last]);
        let nodes = || self.members[first].iter().map(|&i| &self.f.nodes[i]);
        let mut ins: Vec<Value> = nodes().flat_map(|n| n.ins.iter().copied()).collect();
        ins.sort_unstable();
        ins.dedup();
        // What nobody reads later, and what only the other group reads.
        let dies = |&&v: &&Value| {
            let made = self.uses.maker(v).is_some_and(|m| self.of[m] != first);
            made && self.uses.users(v).all(|r| place(r) <= now)
        };
        let inside = |&&v: &&Value| {
            let mut readers = self.uses.users(v);
            !self.uses.is_result(v) && readers.all(|r| place(r) == now || place(r) == then)
        };
        let bytes = |v: &Value| self.f.ty(*v).local_bytes(self.mesh);
        let held: usize = ins.iter().filter(dies).map(bytes).sum();
        let outs = nodes().flat_map(|n| &n.outs);
        held > outs.filter(|&&v| self.leaves(v, first)).filter(inside).map(bytes).sum()
    }

    /// True if others than its group read a value.
    fn leaves(&self, v: Value, group: usize) -> bool {
        self.uses.users(v).any(|r| self.of[r] != group)
    }

    /// True if a group has to stand behind one of these.
    fn reads(&self, g: usize, of: &[usize]) -> bool {
        let mut before = self.members[g].iter().flat_map(|&i| self.before(i));
        before.any(|m| of.contains(&self.of[m]))
    }

    /// The nodes that a node has to stand behind: those that make what it reads, and those that
    /// read what it writes over.
    fn before(&self, i: usize) -> impl Iterator<Item = usize> {
        let makers = self.f.nodes[i].ins.iter().filter_map(|&v| self.uses.maker(v));
        makers.chain(self.overwrites.get(&i).into_iter().flatten().copied())
    }
}
