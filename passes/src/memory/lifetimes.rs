//! Who makes and who uses a value, and from which node to which it lives: buffers of functions, and
//! objects, which outlive a call.

use super::last::plain;
use super::roles::{RoleFacts, RoleNumbers, Takers, roles};
use crate::step::instructions::Lists;
use shardc_ir::func::{Func, GradTotal, Module, Node, Role, RoleKind, Value, ValueMap};
use shardc_ir::group::{Launch, Roles, launches};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::Mesh;
use shardc_ir::overlap::held;
use shardc_ir::plan::{Instr, MemoryClass};
use shardc_ir::types::DType;
use smallvec::SmallVec;

/// A value that outlives a call.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub kind: Lifetime,
    pub bytes: usize,
    pub class: MemoryClass,
    /// A function and the value's name there.
    pub name: (usize, Value),
    /// Offset in its frame; in the arena, if it lives through a step.
    pub offset: usize,
    /// Its frame, if it has one.
    pub frame: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Lifetime {
    /// Lives through a step.
    Whole,
    /// A step's data, one microbatch after the other.
    Input,
    /// Belongs to a microbatch.
    Micro,
    /// Lives from who makes it to who uses it last.
    Part,
}

impl Lifetime {
    /// True if it lies in a frame with others like it.
    pub fn is_framed(self) -> bool {
        matches!(self, Lifetime::Micro | Lifetime::Part)
    }
}

/// A piece of memory and its life, in node positions of one function.
#[derive(Clone)]
pub(super) struct Buffer {
    pub bytes: usize,
    pub birth: usize,
    pub death: usize,
    pub class: MemoryClass,
    pub name: Value,
    pub object: Option<usize>,
    /// Without an object: the part of what the call needs for itself in which it lies, and where.
    pub part: usize,
    pub offset: usize,
    /// Merged into another buffer.
    pub into: Option<usize>,
}

pub(super) const NONE: usize = usize::MAX;

/// The buffers and objects of a rank of the pipeline.
pub(super) struct Lifetimes<'a> {
    pub m: &'a Module,
    microbatches: usize,
    pub funcs: &'a [usize],
    looped: HashSet<usize>,
    /// By function: the one in whose place it runs for the last microbatch of a stage, or itself.
    plain: Vec<usize>,
    /// Values that are offered to other ranks.
    sent: HashSet<(usize, Value)>,
    /// By function: the numbers of its roles; and by number what is known of a role.
    numbers: Vec<RoleNumbers>,
    known: Vec<RoleFacts>,
    pub objects: Vec<Object>,
    /// By object: who takes it by any of its roles.
    takers: Vec<Takers>,
    /// By object: who makes it, who uses it in the order of the functions, and whether it is sent.
    pub makers: Vec<Option<usize>>,
    pub users: Vec<SmallVec<[usize; 4]>>,
    pub offered: Vec<bool>,
    /// By function.
    pub buffers: Vec<Vec<Buffer>>,
    pub of: Vec<ValueMap<usize>>,
    pub work: Vec<Vec<usize>>,
    /// Names of parameters of which a cast is used.
    cast: HashSet<&'a str>,
}

impl<'a> Lifetimes<'a> {
    /// Those of these functions, in the order in which they feed each other.
    pub fn of(
        m: &'a Module,
        microbatches: usize,
        funcs: &'a [usize],
        lists: &Lists,
    ) -> Lifetimes<'a> {
        let (mut looped, mut sent) = (HashSet::default(), HashSet::default());
        for i in lists.step.iter().chain(&lists.evaluation) {
            match i {
                Instr::Call(c) if c.microbatch.is_some() => drop(looped.insert(c.func)),
                Instr::Send(t) => drop(sent.insert((t.func, t.value))),
                Instr::Call(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => {}
            }
        }
        let plain = plain(m);
        let (numbers, known) = roles(m, funcs, &looped, &plain);
        // Weights that are a cast of what is stored.
        let ports = funcs.iter().flat_map(|&f| m.funcs[f].results.iter().map(move |r| (f, r)));
        let cast = ports.filter_map(|(f, r)| {
            let half = m.funcs[f].ty(r.value).dtype != DType::F32;
            Some(&*r.role.as_ref().filter(|r| half && r.kind == RoleKind::Unsharded)?.name)
        });
        let n = m.funcs.len();
        let mut p = Lifetimes {
            m,
            microbatches,
            funcs,
            looped,
            plain,
            sent,
            numbers,
            known,
            objects: vec![],
            takers: vec![],
            makers: vec![],
            users: vec![],
            offered: vec![],
            buffers: (0..n).map(|_| vec![]).collect(),
            of: vec![ValueMap::default(); n],
            work: vec![vec![]; n],
            cast: cast.collect(),
        };
        let launches: Vec<Vec<Launch>> = funcs.iter().map(|&f| launches(&m.funcs[f])).collect();
        for (&f, launches) in funcs.iter().zip(&launches) {
            p.function(f, launches);
        }
        for (&f, launches) in funcs.iter().zip(&launches) {
            p.in_place(f, launches);
            p.workspaces(f, launches);
        }
        p
    }

    pub fn bytes(&self, f: usize, v: Value) -> usize {
        self.m.funcs[f].ty(v).local_bytes(&self.m.mesh)
    }

    fn find(&self, f: usize, mut b: usize) -> usize {
        while let Some(next) = self.buffers[f][b].into {
            b = next;
        }
        b
    }

    pub fn root(&self, f: usize, v: Value) -> usize {
        self.find(f, self.of[f][v])
    }

    /// The same; `NONE` if the value has no memory.
    fn root_if_any(&self, f: usize, v: Value) -> usize {
        let b = self.of[f][v];
        if b == NONE { NONE } else { self.find(f, b) }
    }

    fn buffer(&mut self, f: usize, v: Value, birth: usize, class: MemoryClass) -> usize {
        let bytes = self.bytes(f, v);
        let (death, name) = (birth, v);
        let (object, into, part, offset) = (None, None, 0, 0);
        let new = Buffer { bytes, birth, death, class, name, object, part, offset, into };
        self.buffers[f].push(new);
        self.buffers[f].len() - 1
    }

    /// The object of a role, whose number is given, too.
    fn object(
        &mut self,
        f: usize,
        v: Value,
        (role, number): (&'a Role, usize),
        maker: Option<usize>,
    ) -> usize {
        let ty = self.m.funcs[f].ty(v);
        let kind = match role.kind {
            RoleKind::Stash | RoleKind::Edge | RoleKind::GradFrom(_) => Lifetime::Micro,
            RoleKind::Input(i) if i.batch => Lifetime::Input,
            RoleKind::Grad if !self.known[number].is_summed => Lifetime::Part,
            RoleKind::GradSum => Lifetime::Part,
            _lasting => Lifetime::Whole,
        };
        let class = match role.kind {
            // A master copy is the optimizer's, and the weight is its cast.
            RoleKind::Param if ty.dtype == DType::F32 && self.cast.contains(&*role.name) => {
                MemoryClass::Optimizer
            }
            kind => MemoryClass::of(kind),
        };
        let bytes = self.bytes(f, v);
        self.objects.push(Object { kind, bytes, class, name: (f, v), offset: 0, frame: NONE });
        self.makers.push(maker);
        self.users.push(SmallVec::new());
        self.offered.push(false);
        self.takers.push(Takers::default());
        let o = self.objects.len() - 1;
        self.name(number, o);
        o
    }

    /// Gives an object a role, or one more.
    fn name(&mut self, role: usize, o: usize) {
        let known = &mut self.known[role];
        known.object = Some(o);
        self.takers[o].join(known.takers);
    }

    /// Buffers of arguments, nodes and results, with views and roles tied together.
    fn function(&mut self, f: usize, launches: &[Launch]) {
        let func: &'a Func = &self.m.funcs[f];
        let end = func.nodes.len() + 1;
        self.of[f] = func.per_value(NONE);
        let made: usize = launches.iter().map(|x| x.outs.len()).sum();
        self.buffers[f].reserve(func.args.len() + made);
        let numbers = std::mem::take(&mut self.numbers[f]);
        // Arguments that are views of one value have one place: their buffer, by object.
        let mut placed: HashMap<usize, usize> = HashMap::default();
        for (a, number) in func.args.iter().zip(numbers.args) {
            let b = self.buffer(f, a.value, 0, MemoryClass::Input);
            self.of[f][a.value] = b;
            let Some((role, number)) = a.role.as_ref().zip(number) else { continue };
            let o = match self.known[number].object {
                Some(o) => o,
                None => self.object(f, a.value, (role, number), None),
            };
            if self.objects[o].kind == Lifetime::Input {
                let parts = if self.looped.contains(&f) { self.microbatches } else { 1 };
                let all = self.bytes(f, a.value) * parts;
                self.objects[o].bytes = self.objects[o].bytes.max(all);
            }
            if !self.users[o].contains(&self.plain[f]) {
                self.users[o].push(self.plain[f]);
            }
            // Only within a stage is the last function also the last to run, and behind the
            // microbatches. What they have added up is spent then: the next step clears it.
            let takers = self.takers[o];
            let ends = takers.are_of_one_stage() && self.objects[o].kind.is_framed();
            let spent = !self.looped.contains(&f) && self.known[number].is_cleared;
            let dies =
                (ends || spent) && !self.offered[o] && self.funcs[takers.last] == self.plain[f];
            let buffer = &mut self.buffers[f][b];
            (buffer.object, buffer.class) = (Some(o), self.objects[o].class);
            buffer.death = if dies { 0 } else { NONE };
            self.known[number].own = Some((f, b));
            let first = *placed.entry(o).or_insert(b);
            self.merge(f, b, first);
        }
        for (x, held) in launches.iter().zip(held(func, launches)) {
            // A launch takes no time: its results live from its first node on, what it reads to its
            // last; longer only what is read while others run.
            let kept = launches.get(held).map_or(func.nodes.len(), |next| next.nodes.start);
            let (from, until) = (x.nodes.start + 1, kept.max(x.nodes.end));
            x.ins.iter().for_each(|&v| self.touch(f, v, until));
            for (n, &o) in
                func.nodes[x.nodes.clone()].iter().flat_map(|n| n.outs.iter().map(move |o| (n, o)))
            {
                let b = match n.op.def().is_view() {
                    true => self.root_if_any(f, n.ins[0]),
                    false if !x.outs.contains(&o) => NONE,
                    false if n.op.collective().is_some() => {
                        self.buffer(f, o, from, MemoryClass::CollectiveBuffer)
                    }
                    false => self.buffer(f, o, from, MemoryClass::Temporary),
                };
                self.of[f][o] = b;
            }
        }
        let totals = func.grad_totals();
        for (r, number) in func.results.iter().zip(numbers.results) {
            self.touch(f, r.value, end);
            let Some((role, number)) = r.role.as_ref().zip(number) else { continue };
            let b = self.root(f, r.value);
            if let Some((_, old)) = self.known[number].own.filter(|own| own.0 == f) {
                // The new value of something this function was given: written over the old.
                let old = self.find(f, old);
                self.merge(f, b, old);
                continue;
            }
            if role.kind.is_shown() {
                continue;
            }
            let total = totals.iter().find(|g| g.sum == r.value);
            if total.is_some_and(|g| self.is_over_accumulator(f, g, number)) {
                continue;
            }
            let o = match self.buffers[f][b].object {
                Some(o) => {
                    self.name(number, o);
                    o
                }
                None => {
                    let o = self.object(f, r.value, (role, number), Some(f));
                    self.buffers[f][b].object = Some(o);
                    self.buffers[f][b].class = self.objects[o].class;
                    o
                }
            };
            self.offered[o] |= self.sent.contains(&(f, r.value));
        }
        self.sums(f);
    }

    /// Puts what is added to in place where the sum is.
    fn sums(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        for n in func.nodes.iter().filter(|n| n.op.accumulates()) {
            let [from, into] = [n.ins[0], n.outs[0]].map(|v| self.root_if_any(f, v));
            if from != NONE && into != NONE && self.buffers[f][from].object.is_none() {
                self.merge(f, from, into);
            }
        }
    }

    /// Puts a gradient from all microbatches where it was added up before, and its sum over ranks too if that may lie
    /// on it; says whether that does.
    fn is_over_accumulator(&mut self, f: usize, g: &GradTotal, number: usize) -> bool {
        let (old, total) = (self.root(f, g.before), self.root(f, g.total));
        let object = self.buffers[f][old].object;
        let bytes = self.buffers[f][old].bytes;
        let apart = self.buffers[f][total].object.is_none() && self.bytes(f, g.total) == bytes;
        let Some(o) = object.filter(|_| apart) else { return false };
        self.merge(f, total, old);
        let fits = g.in_place && self.bytes(f, g.sum) == bytes;
        if fits {
            let sum = self.root(f, g.sum);
            self.merge(f, sum, old);
            self.known[number].is_cleared = true;
            self.name(number, o);
        }
        fits
    }

    fn touch(&mut self, f: usize, v: Value, at: usize) {
        let b = self.root(f, v);
        self.buffers[f][b].death = self.buffers[f][b].death.max(at);
    }

    fn merge(&mut self, f: usize, from: usize, into: usize) {
        if from == into {
            return;
        }
        let (birth, death) = (self.buffers[f][from].birth, self.buffers[f][from].death);
        let object = self.buffers[f][from].object;
        self.buffers[f][from].into = Some(into);
        let b = &mut self.buffers[f][into];
        (b.birth, b.death) = (b.birth.min(birth), b.death.max(death));
        b.object = b.object.or(object);
    }

    /// Results written over operands that die at their launch.
    fn in_place(&mut self, f: usize, launches: &[Launch]) {
        let func: &'a Func = &self.m.funcs[f];
        let roles = Roles::of(func);
        for x in launches {
            // Buffers that the launch reads, in order, and whether an earlier result of it lies in one.
            let mut read: SmallVec<[(usize, bool); 8]> =
                x.ins.iter().map(|&v| (self.root(f, v), false)).collect();
            // Without one of a result's size that dies here there is nothing to write over.
            let buffers = read.iter().map(|r| &self.buffers[f][r.0]);
            let dying: SmallVec<[usize; 8]> =
                buffers.filter(|b| b.death == x.nodes.end).map(|b| b.bytes).collect();
            let fits = |&o: &Value| dying.contains(&self.buffers[f][self.root(f, o)].bytes);
            if dying.is_empty() || !x.outs.iter().any(fits) {
                continue;
            }
            read.sort_unstable();
            let place = |read: &[(usize, bool)], b: usize| {
                read.partition_point(|r| r.0 < b)..read.partition_point(|r| r.0 <= b)
            };
            for (&o, over) in x.outs.iter().zip(x.overs(&roles)) {
                let from = self.root(f, o);
                // What has its place already, as the new value of an argument, keeps it.
                let is_placed = self.buffers[f][from].birth <= x.nodes.start;
                let over = over.into_iter().filter(|_| !is_placed).find(|&v| {
                    let into = self.root(f, v);
                    let (a, b) = (&self.buffers[f][from], &self.buffers[f][into]);
                    let apart = a.object.is_none() || b.object.is_none();
                    let own = &read[place(&read, into)];
                    let free = matches!(own, [(_, false)]) && b.death == x.nodes.end;
                    from != into && free && apart && a.bytes == b.bytes
                });
                if let Some(v) = over {
                    let into = self.root(f, v);
                    self.merge(f, from, into);
                }
                let own = place(&read, self.root(f, o));
                read[own].iter_mut().for_each(|r| r.1 = true);
            }
        }
    }

    /// Of nodes that are launches by themselves: those of several have no workspace.
    fn workspaces(&mut self, f: usize, launches: &[Launch]) {
        let func: &'a Func = &self.m.funcs[f];
        for x in launches {
            for (i, n) in x.nodes.clone().zip(&func.nodes[x.nodes.clone()]) {
                let alone = x.nodes.len() == 1;
                let bytes = if alone { workspace(&self.m.mesh, func, n) } else { 0 };
                let mut b = NONE;
                if bytes > 0 {
                    b = self.buffer(f, n.outs[0], i + 1, MemoryClass::Temporary);
                    self.buffers[f][b].bytes = bytes;
                }
                self.work[f].push(b);
            }
        }
    }
}

fn workspace(mesh: &Mesh, f: &Func, n: &Node) -> usize {
    let ins: SmallVec<[_; 8]> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let outs: SmallVec<[_; 4]> = n.outs.iter().map(|&v| f.ty(v)).collect();
    n.op.def().workspace(mesh, &ins, &outs)
}
