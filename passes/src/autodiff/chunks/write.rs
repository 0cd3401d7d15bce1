//! Writes a loss in chunks.

use super::{Stage, StageParts, Tokens, rule_of};
use shardc_ir::attr::{RuleAttr, Sizes};
use shardc_ir::func::{Func, Name, Node, Part, Scope, Value};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Add, Cast, Concat, Narrow, Op, Reshape};
use shardc_ir::rule::Letter;
use shardc_ir::types::{DType, Type};

pub struct Writer<'a> {
    pub mesh: &'a Mesh,
    pub f: &'a mut Func,
    pub tokens: &'a Tokens,
    /// What the gradient makes again rather than keep, and the node of forward that makes it.
    pub again: HashMap<Value, usize>,
    /// What values are in the chunk that is written.
    pub known: HashMap<Value, Value>,
    pub new: Vec<Node>,
    pub scope: Scope,
}

impl Writer<'_> {
    pub fn write(mut self, stage: &Stage, parts: &StageParts, count: usize) {
        let passed = stage.passed_on(self.f, parts);
        let leaving = self.leaving(parts);
        let len = self.tokens.own.div_ceil(count.min(self.tokens.own));
        let chunks = self.tokens.own.div_ceil(len);
        // By value that leaves: what the chunks made of it, or their sum.
        let mut made: HashMap<Value, Vec<Value>> = HashMap::default();
        for chunk in 0..chunks {
            self.known.clear();
            let range = chunk * len..(chunk * len + len).min(self.tokens.own);
            for (at, &i) in parts.chunked.iter().enumerate() {
                if i >= stage.from && at > 0 && parts.chunked[at - 1] < stage.from {
                    let again = &self.again;
                    self.known.retain(|v, _| !again.contains_key(v));
                }
                let n = self.f.nodes[i].clone();
                self.scope = n.scope;
                let ins: Vec<Value> = n.ins.iter().map(|&v| self.of_chunk(v, &range)).collect();
                self.node(&n, &ins, range.len());
                for o in n.outs.iter().filter(|o| leaving.contains(o)) {
                    let all = made.entry(*o).or_default();
                    match self.tokens.dims.contains_key(o) {
                        true => all.push(self.known[o]),
                        false => self.add(all, *o, chunk + 1 == chunks),
                    }
                }
            }
        }
        // What another stage of the pipeline reads of backward is sent by backward.
        let mut sent: Vec<Node> = vec![];
        for &i in &parts.chunked {
            self.scope = self.f.nodes[i].scope;
            for o in self.f.nodes[i].outs.clone() {
                if let Some(all) = made.get(&o).filter(|_| self.tokens.dims.contains_key(&o)) {
                    let start = self.new.len();
                    self.joined(all, o);
                    if i >= stage.from && stage.crosses(self.f, &self.f.nodes[i], o) {
                        let new = self.new.drain(start..);
                        sent.extend(new.map(|n| Node { part: Part::Backward, ..n }));
                    }
                }
            }
        }
        self.place(stage, parts, &passed, sent);
    }

    /// Adds a chunk's part of a sum to those before it: in f32, so that a sum of 16 bits is rounded once.
    fn add(&mut self, sum: &mut Vec<Value>, o: Value, last: bool) {
        let (dtype, mut own) = (self.f.ty(o).dtype, self.known[&o]);
        let short = dtype.is_half();
        if short {
            own = self.push(Cast { to: DType::F32 }.into(), &[own], o, None);
        }
        let Some(before) = sum.pop() else {
            sum.push(own);
            return;
        };
        let is = (last && !short).then_some(o);
        let mut all = self.push(Add::same().into(), &[before, own], o, is);
        if last && short {
            all = self.push(Cast { to: dtype }.into(), &[all], o, Some(o));
        }
        sum.push(all);
    }

    /// What the chunks make that others read.
    fn leaving(&self, parts: &StageParts) -> HashSet<Value> {
        let f = &self.f;
        let chunked: HashSet<usize> = parts.chunked.iter().copied().collect();
        let others = f.nodes.iter().enumerate().filter(|(i, _)| !chunked.contains(i));
        let read = others.flat_map(|(_, n)| n.ins.iter().copied());
        let read: HashSet<Value> = read.chain(f.results.iter().map(|r| r.value)).collect();
        let made = parts.chunked.iter().flat_map(|&i| f.nodes[i].outs.iter().copied());
        made.filter(|v| read.contains(v)).collect()
    }

    /// The nodes in their new order.
    fn place(self, stage: &Stage, parts: &StageParts, passed: &[usize], sent: Vec<Node>) {
        let Writer { f, new, .. } = self;
        let old = std::mem::take(&mut f.nodes);
        let listed = parts.once.iter().chain(&parts.chunked).chain(&parts.after).chain(passed);
        let gone: HashSet<usize> = listed.copied().collect();
        let of = |all: &[usize]| -> Vec<Node> {
            let forward = |&i: &usize| Node { part: Part::Forward, ..old[i].clone() };
            all.iter().map(forward).collect()
        };
        let rest = |from: usize, to: usize| {
            (from..to).filter(|i| !gone.contains(i)).map(|i| old[i].clone()).collect::<Vec<_>>()
        };
        let all = [
            rest(0, stage.from),
            of(&parts.once),
            new,
            of(passed),
            of(&parts.after),
            sent,
            rest(stage.from, old.len()),
        ];
        f.nodes = all.concat();
    }

    /// A value as a chunk has it.
    fn of_chunk(&mut self, v: Value, range: &std::ops::Range<usize>) -> Value {
        if let Some(&known) = self.known.get(&v) {
            return known;
        }
        if let Some(n) = self.again.get(&v).map(|&i| self.f.nodes[i].clone()) {
            let ins: Vec<Value> = n.ins.iter().map(|&v| self.of_chunk(v, range)).collect();
            self.node(&n, &ins, range.len());
            return self.known[&v];
        }
        let Some(&dim) = self.tokens.dims.get(&v) else { return v };
        let narrow = |dim| Narrow::along(dim, range.start, range.len(), 1).into();
        let part = match self.tokens.ways {
            1 => self.push(narrow(dim), &[v], v, None),
            ways => {
                let split = self.reshaped(v, v, (dim, ways), true, None);
                let part = self.push(narrow(dim + 1), &[split], v, None);
                self.reshaped(part, v, (dim, ways), false, None)
            }
        };
        self.known.insert(v, part);
        part
    }

    /// The chunks of a value one after the other: the value.
    fn joined(&mut self, all: &[Value], is: Value) {
        let (dim, ways) = (self.tokens.dims[&is], self.tokens.ways);
        let concat = |dim| Op::from(Concat::along(dim, self.tokens.own));
        if ways == 1 {
            self.push(concat(dim), all, is, Some(is));
            return;
        }
        let (joint, split) = (concat(dim + 1), (dim, ways));
        let all: Vec<Value> =
            all.iter().map(|&v| self.reshaped(v, is, split, true, None)).collect();
        let joint = self.push(joint, &all, is, None);
        self.reshaped(joint, is, split, false, Some(is));
    }

    /// A value with a dim as ranks times tokens, or with these two as one again.
    fn reshaped(
        &mut self,
        v: Value,
        like: Value,
        (dim, ways): (usize, usize),
        apart: bool,
        is: Option<Value>,
    ) -> Value {
        let rank = self.f.ty(v).rank() + usize::from(apart);
        let letters: Vec<String> =
            (0..rank as u8).map(|i| char::from(b'a' + i).to_string()).collect();
        let split = letters.concat();
        let joint = [
            &letters[..dim],
            &[format!("({})", letters[dim..dim + 2].concat())],
            &letters[dim + 2..],
        ]
        .concat()
        .concat();
        let text = if apart { format!("{joint}->{split}") } else { format!("{split}->{joint}") };
        let rule = RuleAttr::new(&text, &[self.f.ty(v).rank()]);
        let sizes = Sizes([(Letter(dim as u8), ways)].into_iter().collect());
        self.push(Reshape { rule, sizes }.into(), &[v], like, is)
    }

    /// A node of the stage on a chunk.
    fn node(&mut self, n: &Node, ins: &[Value], tokens: usize) {
        let declared: Vec<Type> = n.outs.iter().map(|o| self.short(*o, tokens)).collect();
        let types: Vec<&Type> = ins.iter().map(|&v| self.f.ty(v)).collect();
        let op = self.resized(n, &declared[0]);
        let declared: Vec<Option<&Type>> = declared.iter().map(Some).collect();
        let made = op.check(self.mesh, &types, &declared);
        let made = made.unwrap_or_else(|e| panic!("chunks: {op:?}: {}; {}", e.message, e.help));
        let outs: Vec<Value> = n.outs.iter().zip(made).map(|(&o, t)| self.value(o, t)).collect();
        self.known.extend(n.outs.iter().copied().zip(outs.iter().copied()));
        let plain = Node::new(op, ins, &outs, n.scope);
        self.new.push(Node { note: n.note.clone(), kept: n.kept, ..plain });
    }

    /// A node's op with as many tokens in its sizes as its result has in a chunk.
    fn resized(&self, n: &Node, out: &Type) -> Op {
        let mut op = n.op.clone();
        let Some(&dim) = self.tokens.dims.get(&n.outs[0]) else { return op };
        let letter = rule_of(self.f, n).outs[0][dim].single();
        let tokens = op.sizes_mut().and_then(|s| s.0.iter_mut().find(|s| Some(s.0) == letter));
        tokens.into_iter().for_each(|s| s.1 = out.dims[dim].size);
        op
    }

    /// A value's type with so many tokens of each rank.
    fn short(&self, v: Value, tokens: usize) -> Type {
        let mut ty = self.f.ty(v).clone();
        if let Some(&dim) = self.tokens.dims.get(&v) {
            assert_eq!(ty.dims[dim], self.tokens.whole, "chunks: tokens are split alike");
            ty.dims[dim].size = tokens * self.tokens.ways;
        }
        ty
    }

    /// A new value, named after another one, and as nothing before was.
    fn value(&mut self, like: Value, ty: Type) -> Value {
        let name = self.f.name(like).clone();
        let name = Name { hint: name.hint + "_chunk", dup: 0, ..name };
        self.f.value(ty, name)
    }

    /// Appends a node with one result that makes `is`, or a new value named after another one.
    fn push(&mut self, op: Op, ins: &[Value], like: Value, is: Option<Value>) -> Value {
        let types: Vec<&Type> = ins.iter().map(|&v| self.f.ty(v)).collect();
        let made = op.check(self.mesh, &types, &[None]);
        let made = made.unwrap_or_else(|e| panic!("chunks: {op:?}: {}; {}", e.message, e.help));
        let ty = made[0].clone();
        let out = match is {
            Some(v) => {
                assert_eq!(*self.f.ty(v), ty, "chunks: together they are {}", self.f.name(v));
                v
            }
            None => self.value(like, ty),
        };
        self.new.push(Node::new(op, ins, &[out], self.scope));
        out
    }
}
