//! Gives every value of every function its place in one arena per rank.
//!
//! Lifetimes run over the whole step: `enter`, one microbatch, `finish`,
//! `evaluate`. What is made before the
//! microbatches and used by one of them lives through all of them. Views share their operand's
//! place; so do results that an op may write over an operand nobody reads later; so do values that
//! one function hands to another. Offsets are first fit in order of birth.

pub mod replay;

use shardc_ir::func::{Func, Module, Node, Role, RoleKind, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{ALIGN, Class, Memory, Place};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Bytes by class.
type ByClass = Vec<(Class, usize)>;
/// Values with their class and bytes.
type Live = Vec<(String, Class, usize)>;

/// A piece of memory and its life, in node positions over the whole step.
struct Buffer {
    bytes: usize,
    birth: usize,
    death: usize,
    class: Class,
    name: (usize, Value),
    offset: usize,
    /// Merged into another buffer.
    into: Option<usize>,
}

struct Planner<'a> {
    m: &'a Module,
    base: Vec<usize>,
    end: usize,
    loop_range: (usize, usize),
    microbatches: usize,
    buffers: Vec<Buffer>,
    of: Vec<Vec<usize>>,
}

const NONE: usize = usize::MAX;

/// Plans the arena. Functions `forward` and `backward` run once per microbatch.
pub fn memory(m: &Module, microbatches: usize) -> Memory {
    let mut base = vec![];
    let mut at = 1;
    let mut loop_range = (0, 0);
    for f in &m.funcs {
        base.push(at);
        // One position before the nodes, for arguments, and one after, for results.
        let next = at + f.nodes.len() + 2;
        if f.name == "forward" {
            loop_range = (at, next - 1);
        } else if f.name == "backward" {
            loop_range.1 = next - 1;
        }
        at = next;
    }
    let of = m.funcs.iter().map(|f| vec![NONE; f.values.len()]).collect();
    let mut p = Planner { m, base, end: at, loop_range, microbatches, buffers: vec![], of };
    p.lifetimes();
    p.in_place();
    let workspaces = p.workspaces();
    p.allocate(workspaces)
}

impl Planner<'_> {
    fn find(&self, mut b: usize) -> usize {
        while let Some(next) = self.buffers[b].into {
            b = next;
        }
        b
    }

    fn new_buffer(&mut self, func: usize, v: Value, birth: usize, class: Class) -> usize {
        let bytes = self.m.funcs[func].ty(v).local_bytes(&self.m.mesh);
        self.buffers.push(Buffer {
            bytes,
            birth,
            death: birth,
            class,
            name: (func, v),
            offset: 0,
            into: None,
        });
        self.buffers.len() - 1
    }

    fn touch(&mut self, func: usize, v: Value, at: usize) {
        let b = self.find(self.of[func][v.0 as usize]);
        self.buffers[b].death = self.buffers[b].death.max(at);
    }

    /// Buffers of arguments, nodes and results, with views and roles tied together.
    fn lifetimes(&mut self) {
        let mut by_role: HashMap<Role, usize> = HashMap::new();
        for (fi, f) in self.m.funcs.iter().enumerate() {
            let base = self.base[fi];
            let mut own: HashMap<&Role, Value> = HashMap::new();
            for a in &f.args {
                let role = a
                    .role
                    .clone()
                    .unwrap_or_else(|| Role::new(RoleKind::Input, f.name(a.value).to_string()));
                let b = match by_role.get(&role) {
                    Some(&b) => b,
                    None => {
                        let b = self.new_buffer(fi, a.value, 0, class_of_role(role.kind));
                        self.buffers[b].death = self.end;
                        by_role.insert(role.clone(), b);
                        b
                    }
                };
                if role.kind == RoleKind::Input && f.ty(a.value).rank() > 1 && self.in_loop(base) {
                    let bytes = f.ty(a.value).local_bytes(&self.m.mesh) * self.microbatches;
                    self.buffers[b].bytes = self.buffers[b].bytes.max(bytes);
                }
                self.of[fi][a.value.0 as usize] = b;
                self.touch(fi, a.value, base);
                if let Some(r) = &a.role {
                    own.insert(r, a.value);
                }
            }
            for (i, n) in f.nodes.iter().enumerate() {
                let at = base + 1 + i;
                n.ins.iter().for_each(|&v| self.touch(fi, v, at));
                for &o in &n.outs {
                    let b = if n.op.def().is_view() {
                        self.find(self.of[fi][n.ins[0].0 as usize])
                    } else {
                        let class = if n.op.collective().is_some() {
                            Class::CollectiveBuffer
                        } else {
                            Class::Temporary
                        };
                        self.new_buffer(fi, o, at, class)
                    };
                    self.of[fi][o.0 as usize] = b;
                }
            }
            let last = base + f.nodes.len() + 1;
            for r in &f.results {
                self.touch(fi, r.value, last);
                let Some(role) = &r.role else { continue };
                let b = self.find(self.of[fi][r.value.0 as usize]);
                match own.get(role) {
                    // The new value of something this function was given: written over the old.
                    Some(&old) => {
                        let old = self.find(self.of[fi][old.0 as usize]);
                        self.merge(b, old);
                    }
                    None => {
                        if self.buffers[b].class != Class::Weights {
                            self.buffers[b].class = match role.kind {
                                RoleKind::Output => self.buffers[b].class,
                                k => class_of_role(k),
                            };
                        }
                        by_role.insert(role.clone(), b);
                    }
                }
            }
        }
        let (first, last) = self.loop_range;
        for b in self.buffers.iter_mut().filter(|b| b.birth < first && b.death >= first) {
            b.death = b.death.max(last);
        }
    }

    fn in_loop(&self, at: usize) -> bool {
        at >= self.loop_range.0 && at <= self.loop_range.1
    }

    fn merge(&mut self, from: usize, into: usize) {
        if from == into {
            return;
        }
        let (birth, death) = (self.buffers[from].birth, self.buffers[from].death);
        self.buffers[from].into = Some(into);
        self.buffers[into].birth = self.buffers[into].birth.min(birth);
        self.buffers[into].death = self.buffers[into].death.max(death);
    }

    /// Results written over operands that die at their node.
    fn in_place(&mut self) {
        for (fi, f) in self.m.funcs.iter().enumerate() {
            for (i, n) in f.nodes.iter().enumerate() {
                let at = self.base[fi] + 1 + i;
                for (k, &o) in n.outs.iter().enumerate() {
                    let Some(j) = n.op.def().in_place(k) else { continue };
                    let x = n.ins[j];
                    let (from, into) = (
                        self.find(self.of[fi][o.0 as usize]),
                        self.find(self.of[fi][x.0 as usize]),
                    );
                    let fits = f.ty(x).dims == f.ty(o).dims
                        && f.ty(x).dtype == f.ty(o).dtype
                        && (n.op.collective().is_some() || walked_alike(f, n, j, k));
                    let once = n
                        .ins
                        .iter()
                        .filter(|v| self.find(self.of[fi][v.0 as usize]) == into)
                        .count()
                        == 1;
                    if fits
                        && once
                        && self.buffers[into].death == at
                        && self.buffers[into].bytes == self.buffers[from].bytes
                    {
                        self.merge(from, into);
                    }
                }
            }
        }
    }

    fn workspaces(&mut self) -> Vec<Vec<usize>> {
        let mut all = vec![];
        for (fi, f) in self.m.funcs.iter().enumerate() {
            let mut own = vec![];
            for (i, n) in f.nodes.iter().enumerate() {
                let bytes = workspace(&self.m.mesh, f, i);
                if bytes == 0 {
                    own.push(NONE);
                    continue;
                }
                let at = self.base[fi] + 1 + i;
                self.buffers.push(Buffer {
                    bytes,
                    birth: at,
                    death: at,
                    class: Class::Temporary,
                    name: (fi, n.outs[0]),
                    offset: 0,
                    into: None,
                });
                own.push(self.buffers.len() - 1);
            }
            all.push(own);
        }
        all
    }

    fn allocate(mut self, workspaces: Vec<Vec<usize>>) -> Memory {
        let mut order: Vec<usize> = (0..self.buffers.len())
            .filter(|&b| self.buffers[b].into.is_none() && self.buffers[b].bytes > 0)
            .collect();
        order.sort_by_key(|&b| (self.buffers[b].birth, b));
        let mut free = FreeList::default();
        let mut dying: BTreeSet<(usize, usize)> = BTreeSet::new();
        let (mut peak, mut peak_at) = (0, 0);
        for &b in &order {
            let birth = self.buffers[b].birth;
            while let Some(&(death, d)) = dying.first().filter(|x| x.0 < birth) {
                dying.remove(&(death, d));
                free.give(self.buffers[d].offset, padded(self.buffers[d].bytes));
            }
            let size = padded(self.buffers[b].bytes);
            let offset = free.take(size);
            self.buffers[b].offset = offset;
            let end = offset + self.buffers[b].bytes;
            if end > peak {
                (peak, peak_at) = (end, birth);
            }
            dying.insert((self.buffers[b].death, b));
        }
        let place = |b: usize, bytes: usize, per_microbatch: usize| match b {
            NONE => Place::default(),
            b => Place { offset: self.buffers[self.find(b)].offset, per_microbatch, bytes },
        };
        let mut places = vec![];
        for (fi, f) in self.m.funcs.iter().enumerate() {
            let mut input: BTreeSet<Value> = f
                .args
                .iter()
                .filter(|a| {
                    a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Input)
                        && f.ty(a.value).rank() > 1
                        && self.in_loop(self.base[fi])
                })
                .map(|a| a.value)
                .collect();
            // A view of an input moves from microbatch to microbatch as the input does.
            for n in f.nodes.iter().filter(|n| n.op.def().is_view()) {
                if input.contains(&n.ins[0]) {
                    input.extend(&n.outs);
                }
            }
            let one = |v: usize| {
                let bytes = f.values[v].ty.local_bytes(&self.m.mesh);
                let per = if input.contains(&Value(v as u32)) { bytes } else { 0 };
                place(self.of[fi][v], bytes, per)
            };
            places.push((0..f.values.len()).map(one).collect());
        }
        let scratch = workspaces
            .iter()
            .map(|w| {
                w.iter()
                    .map(|&b| place(b, if b == NONE { 0 } else { self.buffers[b].bytes }, 0))
                    .collect()
            })
            .collect();
        let (at_peak, live_at_peak) = self.account(&order, peak, peak_at);
        Memory { places, workspaces: scratch, peak_bytes: peak, at_peak, live_at_peak }
    }

    /// Bytes by class at the peak, and the largest values alive then. Gaps, of
    /// alignment and of first fit, count as temporary.
    fn account(&self, order: &[usize], peak: usize, at: usize) -> (ByClass, Live) {
        let alive: Vec<&Buffer> = order
            .iter()
            .map(|&b| &self.buffers[b])
            .filter(|b| b.birth <= at && b.death >= at)
            .collect();
        let mut by: BTreeMap<Class, usize> = BTreeMap::new();
        for b in &alive {
            *by.entry(b.class).or_default() += b.bytes;
        }
        let used: usize = by.values().sum();
        *by.entry(Class::Temporary).or_default() += peak - used;
        let mut live = alive;
        live.sort_by_key(|b| (std::cmp::Reverse(b.bytes), b.birth, b.offset));
        let text =
            |b: &&Buffer| (self.m.funcs[b.name.0].name(b.name.1).to_string(), b.class, b.bytes);
        (by.into_iter().collect(), live.iter().take(10).map(text).collect())
    }
}

/// True if the op walks operand `j` as it walks result `k`, so that each element is read before it is
/// written: not if the rule permutes the letters.
fn walked_alike(f: &Func, n: &Node, j: usize, k: usize) -> bool {
    let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    let rule = n.op.def().rule(&ranks);
    rule.ins[j] == rule.outs[k]
}

fn workspace(mesh: &Mesh, f: &Func, node: usize) -> usize {
    let n = &f.nodes[node];
    let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let outs: Vec<_> = n.outs.iter().map(|&v| f.ty(v)).collect();
    n.op.def().workspace(mesh, &ins, &outs)
}

fn class_of_role(k: RoleKind) -> Class {
    match k {
        RoleKind::Param => Class::Weights,
        RoleKind::Ready => Class::CollectiveBuffer,
        RoleKind::Grad => Class::Grads,
        RoleKind::State => Class::Optimizer,
        RoleKind::Input | RoleKind::Scalar => Class::Input,
        RoleKind::Stash => Class::Activation,
        RoleKind::Sum | RoleKind::Step | RoleKind::Output => Class::Temporary,
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// Free blocks by offset; everything from `top` on is free.
#[derive(Default)]
struct FreeList {
    blocks: BTreeMap<usize, usize>,
    top: usize,
}

impl FreeList {
    fn take(&mut self, size: usize) -> usize {
        let fit = self.blocks.iter().find(|b| *b.1 >= size).map(|(&o, &s)| (o, s));
        if let Some((o, s)) = fit {
            self.blocks.remove(&o);
            if s > size {
                self.blocks.insert(o + size, s - size);
            }
            return o;
        }
        // The last block may reach up to the top and be extended.
        let last =
            self.blocks.last_key_value().map(|(&o, &s)| (o, s)).filter(|(o, s)| o + s == self.top);
        let o = last.map_or(self.top, |(o, _)| o);
        if last.is_some() {
            self.blocks.remove(&o);
        }
        self.top = o + size;
        o
    }

    fn give(&mut self, mut offset: usize, mut size: usize) {
        if let Some((&o, &s)) =
            self.blocks.range(..offset).next_back().filter(|(o, s)| **o + **s == offset)
        {
            self.blocks.remove(&o);
            (offset, size) = (o, s + size);
        }
        if let Some(s) = self.blocks.remove(&(offset + size)) {
            size += s;
        }
        self.blocks.insert(offset, size);
    }
}
