//! Who makes and who uses a value, and from which node to which it lives: buffers of functions, and
//! objects, which outlive a call.

use crate::step::instructions::Lists;
use shardc_ir::func::{Func, Module, Node, Role, RoleKind, Value};
use shardc_ir::group::{Launch, Roles, launches};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{Instr, MemoryClass};
use shardc_ir::types::DType;
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashMap, HashSet};

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

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
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
#[derive(Clone)]
pub(super) struct Lifetimes<'a> {
    pub m: &'a Module,
    microbatches: usize,
    pub funcs: &'a [usize],
    looped: HashSet<usize>,
    /// Values that are offered to other ranks.
    sent: HashSet<(usize, Value)>,
    /// The last function that takes a role, as a position in `funcs`.
    last_user: HashMap<&'a Role, usize>,
    /// The same for an object: that of all its roles.
    last: Vec<usize>,
    /// Stages whose functions take a role, and those that take an object.
    role_stages: HashMap<&'a Role, BTreeSet<usize>>,
    stages: Vec<BTreeSet<usize>>,
    by_role: HashMap<&'a Role, usize>,
    /// Roles whose value a function adds to.
    summed: HashSet<&'a Role>,
    /// Those that every step makes anew before its microbatches.
    cleared: HashSet<&'a Role>,
    pub objects: Vec<Object>,
    /// By object: who makes it, who uses it, and whether it is sent.
    pub makers: Vec<Option<usize>>,
    pub users: Vec<BTreeSet<usize>>,
    pub offered: Vec<bool>,
    /// By function.
    launches: Vec<Vec<Launch>>,
    pub buffers: Vec<Vec<Buffer>>,
    pub of: Vec<Vec<usize>>,
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
        let (mut last_user, mut role_stages) = (HashMap::new(), HashMap::new());
        for (i, &f) in funcs.iter().enumerate() {
            for a in &m.funcs[f].args {
                if let Some(r) = &a.role {
                    last_user.insert(r, i);
                    role_stages.entry(r).or_insert_with(BTreeSet::new).insert(m.funcs[f].stage);
                }
            }
        }
        let (mut looped, mut sent) = (HashSet::new(), HashSet::new());
        for i in lists.step.iter().chain(&lists.evaluation) {
            match i {
                Instr::Call(c) if c.microbatch.is_some() => drop(looped.insert(c.func)),
                Instr::Send(t) => drop(sent.insert((t.func, t.value))),
                Instr::Call(_) | Instr::Sent { .. } | Instr::Recv(_) => {}
            }
        }
        let (mut summed, mut cleared) = (HashSet::new(), HashSet::new());
        for &f in funcs {
            let taken: HashSet<&Role> =
                m.funcs[f].args.iter().filter_map(|a| a.role.as_ref()).collect();
            for r in m.funcs[f].results.iter().filter_map(|r| r.role.as_ref()) {
                match taken.contains(r) {
                    true => drop(summed.insert(r)),
                    false if !looped.contains(&f) => drop(cleared.insert(r)),
                    false => {}
                }
            }
        }
        cleared.retain(|r| summed.contains(*r));
        // Weights that are a cast of what is stored.
        let ports = funcs.iter().flat_map(|&f| m.funcs[f].results.iter().map(move |r| (f, r)));
        let cast = ports.filter_map(|(f, r)| {
            let half = m.funcs[f].ty(r.value).dtype != DType::F32;
            Some(&*r.role.as_ref().filter(|r| half && r.kind == RoleKind::Ready)?.name)
        });
        let n = m.funcs.len();
        let mut p = Lifetimes {
            m,
            microbatches,
            funcs,
            looped,
            sent,
            last_user,
            last: vec![],
            role_stages,
            stages: vec![],
            by_role: HashMap::new(),
            summed,
            cleared,
            objects: vec![],
            makers: vec![],
            users: vec![],
            offered: vec![],
            launches: vec![vec![]; n],
            buffers: (0..n).map(|_| vec![]).collect(),
            of: vec![vec![]; n],
            work: vec![vec![]; n],
            cast: cast.collect(),
        };
        for &f in funcs {
            p.launches[f] = launches(&m.funcs[f]);
            p.function(f);
        }
        for &f in funcs {
            p.in_place(f);
            p.workspaces(f);
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
        self.find(f, self.of[f][v.0 as usize])
    }

    /// The same; `NONE` if the value has no memory.
    fn root_if_any(&self, f: usize, v: Value) -> usize {
        let b = self.of[f][v.0 as usize];
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

    fn object(&mut self, f: usize, v: Value, role: &'a Role, maker: Option<usize>) -> usize {
        let ty = self.m.funcs[f].ty(v);
        let kind = match role.kind {
            RoleKind::Stash | RoleKind::Edge | RoleKind::GradFrom(_) => Lifetime::Micro,
            RoleKind::Input if ty.rank() > 1 => Lifetime::Input,
            RoleKind::Grad if !self.summed.contains(role) => Lifetime::Part,
            _lasting => Lifetime::Whole,
        };
        let class = match role.kind {
            // A master copy is the optimizer's, and the weight is its cast.
            RoleKind::Param if ty.dtype == DType::F32 && self.cast.contains(&*role.name) => {
                MemoryClass::Optimizer
            }
            RoleKind::Ready if ty.dtype != DType::F32 => MemoryClass::Weights,
            kind => MemoryClass::of(kind),
        };
        let bytes = self.bytes(f, v);
        self.objects.push(Object { kind, bytes, class, name: (f, v), offset: 0, frame: NONE });
        self.makers.push(maker);
        self.users.push(BTreeSet::new());
        self.offered.push(false);
        self.last.push(0);
        self.stages.push(BTreeSet::new());
        let o = self.objects.len() - 1;
        self.name(role, o);
        o
    }

    /// Gives an object a role, or one more.
    fn name(&mut self, role: &'a Role, o: usize) {
        self.by_role.insert(role, o);
        let last = self.last_user.get(role).copied().unwrap_or(0);
        self.last[o] = self.last[o].max(last);
        self.stages[o].extend(self.role_stages.get(role).into_iter().flatten());
    }

    /// Buffers of arguments, nodes and results, with views and roles tied together.
    fn function(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        let end = func.nodes.len() + 1;
        self.of[f] = vec![NONE; func.values.len()];
        let mut own: HashMap<&Role, usize> = HashMap::new();
        for a in &func.args {
            let b = self.buffer(f, a.value, 0, MemoryClass::Input);
            self.of[f][a.value.0 as usize] = b;
            let Some(role) = &a.role else { continue };
            let o = match self.by_role.get(role) {
                Some(&o) => o,
                None => self.object(f, a.value, role, None),
            };
            if self.objects[o].kind == Lifetime::Input {
                let parts = if self.looped.contains(&f) { self.microbatches } else { 1 };
                let all = self.bytes(f, a.value) * parts;
                self.objects[o].bytes = self.objects[o].bytes.max(all);
            }
            self.users[o].insert(f);
            // Only within a stage is the last function also the last to run, and behind the
            // microbatches. What they have added up is spent then: the next step clears it.
            let ends = self.stages[o].len() == 1 && self.objects[o].kind.is_framed();
            let spent = !self.looped.contains(&f) && self.cleared.contains(role);
            let dies = (ends || spent) && !self.offered[o] && self.funcs[self.last[o]] == f;
            let buffer = &mut self.buffers[f][b];
            (buffer.object, buffer.class) = (Some(o), self.objects[o].class);
            buffer.death = if dies { 0 } else { NONE };
            own.insert(role, b);
        }
        for x in &self.launches[f].clone() {
            // A launch takes no time: its results live from its first node on, what it reads to its
            // last.
            let (from, until) = (x.nodes.start + 1, x.nodes.end);
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
                self.of[f][o.0 as usize] = b;
            }
        }
        for r in &func.results {
            self.touch(f, r.value, end);
            let Some(role) = &r.role else { continue };
            let b = self.root(f, r.value);
            if let Some(&old) = own.get(role) {
                // The new value of something this function was given: written over the old.
                let old = self.find(f, old);
                self.merge(f, b, old);
                continue;
            }
            if role.kind.is_shown() {
                continue;
            }
            let o = match self.buffers[f][b].object {
                Some(o) => {
                    self.name(role, o);
                    o
                }
                None => {
                    let o = self.object(f, r.value, role, Some(f));
                    self.buffers[f][b].object = Some(o);
                    self.buffers[f][b].class = self.objects[o].class;
                    o
                }
            };
            self.offered[o] |= self.sent.contains(&(f, r.value));
        }
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
    fn in_place(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        let roles = Roles::of(func);
        for x in &self.launches[f].clone() {
            // Buffers that the launch reads, in order, and whether an earlier result of it lies in one.
            let mut read: SmallVec<[(usize, bool); 8]> =
                x.ins.iter().map(|&v| (self.root(f, v), false)).collect();
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
    fn workspaces(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        for x in self.launches[f].clone() {
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
    let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let outs: Vec<_> = n.outs.iter().map(|&v| f.ty(v)).collect();
    n.op.def().workspace(mesh, &ins, &outs)
}
