//! Matrices that are shared out among the ranks which hold pieces of them: each rank makes what matrix products make
//! of some of the matrices, and of no other.
//!
//! Before: `%x: bf16[64,160@tp]`, `%y: …`, of two parameters; every rank iterates on both
//! After:  a stack `bf16[2,64,160@tp]` goes by one exchange to `bf16[2@tp,64,160]`, on which the lines of the rule run
//! with a letter more, and what they make goes back
//!
//! An owner is the split of the stack's letter, so types, collectives, memory, price and proof are those of all
//! values. Each rank computes what one alone would of the same gradients.

use super::{Given, Made, Scalars, Updates, kind, program};
use crate::shard::reshard::path;
use shardc_ir::attr::{RuleAttr, Sizes};
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, LayoutStep, Name, Node, ParamLayout, Port, RoleKind, Value, ValueMap};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::price;
use shardc_ir::rule::Letter;
use shardc_ir::text::update::Update;
use shardc_ir::types::{AtomList, Dim, Type};
use std::sync::Arc;

/// Most operands of a concat.
const MOST: usize = 24;

/// A rule of which owners run a part.
pub(super) struct Owners {
    /// The rest of it, which ranks run on pieces: what owners make is an argument without a role, what they take a
    /// result behind the new values.
    outer: Func,
    /// How many lines of it need nothing of owners.
    early: usize,
    /// The rule for the whole stack; of its lines those that owners run.
    stacked: Func,
    lines: Vec<usize>,
    taken: Vec<Moved>,
    given: Vec<Moved>,
    /// How the stack is split.
    pub list: AtomList,
    /// The parameter itself is a stack.
    is_stack: bool,
    count: usize,
}

/// A value that goes to owners, or comes from them.
struct Moved {
    /// That of the rule.
    value: Value,
    /// A parameter's, in pieces.
    piece: Type,
    steps: Vec<LayoutStep>,
}

/// Which lines of a rule make matrices as a whole, what they read and what they make.
struct Inner {
    lines: Vec<usize>,
    ins: Vec<Value>,
    outs: Vec<Value>,
}

impl Inner {
    /// None if there are none, or they read or make other things than matrices of the parameter's size.
    fn of(f: &Func, first: usize, is_whole: &ValueMap<bool>) -> Option<Inner> {
        let large = |v: &Value| f.ty(*v).rank() > first;
        let mut made = f.per_value(false);
        let mut is: Vec<bool> = vec![false; f.nodes.len()];
        for (i, n) in f.nodes.iter().enumerate() {
            let whole = |v: &Value| is_whole[v] || made[v] || !large(v);
            let reads = n.ins.iter().any(|v| made[v] || (large(v) && is_whole[v]));
            is[i] = reads && n.ins.iter().chain(&n.outs).all(whole);
            n.outs.iter().for_each(|o| made[o] = is[i]);
        }
        let bytes = |v: Value| f.ty(v).elements() * f.ty(v).dtype.bytes();
        let each = |n: &Node| n.op.facts().fusion == Some(FusionClass::Each) && n.ins.len() == 1;
        // What is done to elements of what they read, and makes it no larger, is done to pieces.
        let uses = f.uses();
        for (i, n) in f.nodes.iter().enumerate() {
            let ([one], [out]) = (&n.ins[..], &n.outs[..]) else { continue };
            let alone = uses.users(*one).all(|u| u == i || !is[u]);
            let whole = is[i] && each(n) && large(out) && !made[one];
            if whole && alone && bytes(*out) <= bytes(*one) {
                (is[i], made[out]) = (false, false);
            }
        }
        // What is done to elements of what they make, and makes it larger, is done to pieces.
        for (i, n) in f.nodes.iter().enumerate().rev() {
            let ([one], [out]) = (&n.ins[..], &n.outs[..]) else { continue };
            let outside = uses.users(*out).all(|u| !is[u]);
            let whole = is[i] && each(n) && large(one) && made[one];
            if whole && outside && bytes(*one) <= bytes(*out) {
                (is[i], made[out]) = (false, false);
            }
        }
        let lines: Vec<usize> = (0..is.len()).filter(|&i| is[i]).collect();
        let (mut ins, mut outs) = (vec![], vec![]);
        for &i in &lines {
            let n = &f.nodes[i];
            for &v in n.ins.iter().filter(|&v| !made[v]) {
                let scalar =
                    f.args.iter().any(|a| a.value == v && kind(a) == Some(RoleKind::Scalar));
                if !scalar && !ins.contains(&v) {
                    ins.push(v);
                }
            }
            let shown = |o: &Value| uses.is_result(*o) || uses.users(*o).any(|u| !is[u]);
            outs.extend(n.outs.iter().copied().filter(shown));
        }
        let param = f.args.iter().find(|a| kind(a) == Some(RoleKind::Param))?.value;
        let fits = ins.iter().chain(&outs).all(|v| f.ty(*v).sizes() == f.ty(param).sizes());
        (fits && !ins.is_empty() && !outs.is_empty()).then_some(Inner { lines, ins, outs })
    }
}

impl Owners {
    /// For so many parameters that are stored so, shared out among the ranks that hold their pieces, and those of other
    /// axes, which hold `copies`; `None` if the rule has no such part, or pieces do not fit.
    pub fn of(
        mesh: &Mesh,
        hw: &Hardware,
        u: &Update,
        stored: &Type,
        count: usize,
        copies: AtomSet,
    ) -> Option<Owners> {
        let of = |dims: &[Dim]| dims.iter().flat_map(|d| d.atoms.iter()).collect::<Vec<_>>();
        let (own, pieces) = stored.dims.split_at(usize::from(u.stack));
        let (own, mut pieces) = (of(own), of(pieces));
        pieces.sort_unstable();
        // In one order for all stacks, so that it is known what each adds to a rank's work; or, where it costs less,
        // copies first: they are cut for nothing before pieces move.
        let cut = [copies.iter().collect(), pieces].concat();
        let mut sorted = cut.clone();
        sorted.sort_unstable();
        let lists = [Some(sorted.clone()), Some(cut).filter(|cut| *cut != sorted)];
        let over = |rest: Vec<Atom>| {
            let list = AtomList::collect(own.iter().copied().chain(rest))?;
            Owners::over(mesh, hw, u, stored, count, list)
        };
        lists.into_iter().flatten().filter_map(over).min_by_key(|o| o.price(mesh, hw))
    }

    /// The same where the stack is split so.
    pub fn over(
        mesh: &Mesh,
        hw: &Hardware,
        u: &Update,
        stored: &Type,
        count: usize,
        list: AtomList,
    ) -> Option<Owners> {
        let first = usize::from(u.stack);
        if first == 0 && count < 2 {
            return None;
        }
        let f = u.func(&stored.sizes()).expect("it was checked");
        let inner = Inner::of(&f, first, &program::whole(&f, first))?;
        if list.is_empty() {
            return None;
        }
        let axes = list.set();
        let outer = outer(mesh, hw, &f, u, stored, &inner);
        let olds = outer.results.len() - inner.ins.len();
        // A stack of pieces, and one whose letter is split.
        let own = |t: &Type| {
            let mut own = t.clone();
            own.dims.iter_mut().for_each(|d| d.atoms = AtomList::EMPTY);
            own.dims[0].atoms = list;
            own.replicated = own.replicated.minus(axes);
            own
        };
        let as_stack = |piece: &Type| {
            let mut t = piece.clone();
            if first == 0 {
                t.dims.insert(0, Dim { size: count, atoms: AtomList::EMPTY });
            }
            t
        };
        let mut stacked = match first {
            0 => {
                let sizes = [&[count], &stored.sizes()[..]].concat();
                Update { stack: true, ..u.clone() }.func(&sizes).ok()?
            }
            _own => f.clone(),
        };
        for a in stacked.args.clone() {
            if kind(&a) == Some(RoleKind::Scalar) {
                stacked.values[a.value].ty.replicated = axes;
            }
        }
        let mut taken = vec![];
        for (&value, r) in inner.ins.iter().zip(&outer.results[olds..]) {
            let piece = outer.ty(r.value).clone();
            if piece.dims != stored.dims || (first == 0 && !splits(mesh, &piece)) {
                return None;
            }
            let from = as_stack(&piece);
            let steps = path(hw, mesh, &from, &own(&from))?.steps;
            stacked.values[value].ty = own(&from);
            taken.push(Moved { value, piece, steps });
        }
        for &i in &inner.lines {
            let n = stacked.nodes[i].clone();
            let ins: Vec<&Type> = n.ins.iter().map(|&v| stacked.ty(v)).collect();
            let types = n.op.check(mesh, &ins, &[]).ok()?;
            n.outs.iter().zip(types).for_each(|(&o, ty)| stacked.values[o].ty = ty);
        }
        let mut given = vec![];
        for &value in &inner.outs {
            let mut piece = Type::new(f.ty(value).dtype, &[]);
            piece.dims.clone_from(&stored.dims);
            let steps = path(hw, mesh, stacked.ty(value), &as_stack(&piece))?.steps;
            given.push(Moved { value, piece, steps });
        }
        let mut late = outer.per_value(false);
        outer.args[f.args.len()..].iter().for_each(|a| late[a.value] = true);
        for n in &outer.nodes {
            let is = n.ins.iter().any(|v| late[v]);
            n.outs.iter().for_each(|o| late[o] = is);
        }
        let is_late = |n: &Node| n.ins.iter().chain(&n.outs).any(|v| late[v]);
        let early = outer.nodes.iter().position(is_late).unwrap_or(outer.nodes.len());
        let (lines, is_stack) = (inner.lines, first == 1);
        Some(Owners { outer, early, stacked, lines, taken, given, list, is_stack, count })
    }

    /// Picoseconds that an owner needs for one matrix.
    pub fn work(&self, mesh: &Mesh, hw: &Hardware) -> u64 {
        let stack = self.taken[0].value;
        let rows = self.stacked.ty(stack).chunk(mesh, 0);
        self.lines(mesh, hw) / rows.max(1) as u64
    }

    /// Of what the owner with most matrices does.
    fn lines(&self, mesh: &Mesh, hw: &Hardware) -> u64 {
        let one = |&i: &usize| {
            let n = &self.stacked.nodes[i];
            let ins: Vec<&Type> = n.ins.iter().map(|&v| self.stacked.ty(v)).collect();
            price::op(hw, mesh, &n.op, &ins, self.stacked.ty(n.outs[0]))
        };
        self.lines.iter().map(one).fold(0, u64::saturating_add)
    }

    /// Picoseconds of all that a rank does for all parameters.
    pub fn price(&self, mesh: &Mesh, hw: &Hardware) -> u64 {
        let mut all = program::price(mesh, hw, &self.outer).saturating_mul(self.count as u64);
        all = all.saturating_add(self.lines(mesh, hw));
        let mut add = |op: &Op, ins: &[&Type], out: &Type, times: usize| {
            all =
                all.saturating_add(price::op(hw, mesh, op, ins, out).saturating_mul(times as u64));
        };
        for (m, from_owners) in
            self.taken.iter().map(|m| (m, false)).chain(self.given.iter().map(|m| (m, true)))
        {
            // Each piece is copied into the stack, or out of it.
            if !self.is_stack {
                add(&Scale { by: 1.0 }.into(), &[&m.piece], &m.piece, self.count);
            }
            let mut at = match (from_owners, self.is_stack) {
                (true, _) => self.stacked.ty(m.value).clone(),
                (false, true) => m.piece.clone(),
                (false, false) => {
                    let mut t = m.piece.clone();
                    t.dims.insert(0, Dim { size: self.count, atoms: AtomList::EMPTY });
                    t
                }
            };
            for s in &m.steps {
                add(&s.op, &[&at], &s.ty, 1);
                at = s.ty.clone();
            }
        }
        all
    }
}

/// The rest of a rule, as ranks run it on pieces.
fn outer(mesh: &Mesh, hw: &Hardware, f: &Func, u: &Update, stored: &Type, inner: &Inner) -> Func {
    let mut outer = f.clone();
    let mut late = f.per_value(false);
    inner.outs.iter().for_each(|o| late[o] = true);
    let nodes = std::mem::take(&mut outer.nodes).into_iter().enumerate();
    let rest: Vec<Node> = nodes.filter(|(i, _)| !inner.lines.contains(i)).map(|x| x.1).collect();
    for n in &rest {
        let is = n.ins.iter().any(|v| late[v]);
        n.outs.iter().for_each(|o| late[o] = is);
    }
    let (behind, before): (Vec<Node>, Vec<Node>) =
        rest.into_iter().partition(|n| n.outs.iter().any(|o| late[o]));
    outer.nodes = before;
    outer.nodes.extend(behind);
    let port = |&value: &Value| Port { value, role: None };
    outer.args.extend(inner.outs.iter().map(port));
    outer.results.extend(inner.ins.iter().map(port));
    program::on_ranks(mesh, hw, outer, u, stored, &f.per_value(false))
}

/// Whether a piece may be seen as a stack of one.
fn splits(mesh: &Mesh, piece: &Type) -> bool {
    let Some(first) = piece.dims.first() else { return false };
    let ways: usize = first.atoms.iter().map(|a| mesh.size(a)).product();
    first.size % ways == 0
}

/// The view of a matrix as a stack of one, or of that as a matrix.
fn view(rank: usize, as_stack: bool) -> Reshape {
    let l: String = ('b'..).take(rank).collect();
    let (row, rest) = l.split_at(1);
    let (matrix, stack) = (format!("(a{row}){rest}"), format!("a{row}{rest}"));
    let (rule, rank) = match as_stack {
        true => (format!("{matrix}->{stack}"), rank),
        false => (format!("{stack}->{matrix}"), rank + 1),
    };
    let sizes = Sizes(smallvec::smallvec![(Letter(0), 1)]);
    Reshape { rule: RuleAttr::new(&rule, &[rank]), sizes }
}

/// Values one behind the other along a new first dim.
fn stack(b: &mut Builder, all: &[&Given], pieces: Vec<Value>) -> Value {
    let view_of = |(x, v): (&&Given, Value)| {
        b.enter(&x.p.scope);
        let rank = b.ty(v).rank();
        b.push("stack", view(rank, true), &[v])
    };
    let mut rows: Vec<Value> = all.iter().zip(pieces).map(view_of).collect();
    b.enter("step");
    while rows.len() > 1 {
        let join = |part: &[Value]| {
            let size = part.iter().map(|&v| b.ty(v).dims[0].size).sum();
            b.push("stack", Concat::along(0, size), part)
        };
        rows = rows.chunks(MOST).map(join).collect();
    }
    rows[0]
}

fn moved(b: &mut Builder, mut v: Value, m: &Moved, name: &Name, note: &'static str) -> Value {
    for s in &m.steps {
        let new = b.f.value(s.ty.clone(), name.clone());
        let scope = b.scope;
        b.f.nodes
            .push(Node { note: Some(note.into()), ..Node::new(s.op.clone(), &[v], &[new], scope) });
        v = new;
    }
    v
}

/// Makes the new values of parameters that are updated together.
pub(super) fn update(
    b: &mut Builder,
    all: &[&Given],
    u: &Arc<Update>,
    o: &Owners,
    scalars: &mut Scalars,
) -> Vec<Vec<Value>> {
    let (early, late) = o.outer.nodes.split_at(o.early);
    let mut made: Vec<Made> = vec![];
    for x in all {
        let mut own = Updates::begin(b, x, u, &o.outer, scalars);
        Updates::run(b, x.p, &o.outer, early.iter(), &mut own, scalars);
        made.push(own);
    }
    b.enter("step");
    let first: &ParamLayout = all[0].p;
    let named = |hint: &str| {
        let hint = [&first.name.hint, "_", hint].concat().into();
        Name { grad: false, layer: None, hint, dup: 0 }
    };
    let mut inner: Made = o.stacked.per_value(None);
    for a in o.stacked.args.iter().filter(|a| kind(a) == Some(RoleKind::Scalar)) {
        let name = a.role.as_ref().map_or("", |r| &r.name);
        let used = |&i: &usize| o.stacked.nodes[i].ins.contains(&a.value);
        if o.lines.iter().any(used) {
            let own = scalars.named(b, name, u);
            inner[a.value] = Some(scalars.one(b, own, o.list.set()));
        }
    }
    let taken = o.outer.results.len() - o.taken.len();
    for (m, r) in o.taken.iter().zip(&o.outer.results[taken..]) {
        let pieces: Vec<Value> =
            made.iter().map(|own| own[r.value].expect("it was made")).collect();
        let v = if o.is_stack { pieces[0] } else { stack(b, all, pieces) };
        let name = named(&o.stacked.name(m.value).hint);
        inner[m.value] = Some(moved(b, v, m, &name, "whole matrices to their owners"));
    }
    for &i in &o.lines {
        let n = &o.stacked.nodes[i];
        let ins: Vec<Value> = n.ins.iter().map(|v| inner[v].expect("made before")).collect();
        let mut outs = vec![];
        for v in &n.outs {
            let new = b.f.value(o.stacked.ty(*v).clone(), named(&o.stacked.name(*v).hint));
            inner[v] = Some(new);
            outs.push(new);
        }
        let scope = b.scope;
        b.f.nodes.push(Node::new(n.op.clone(), &ins, &outs, scope));
    }
    let given = o.outer.args.len() - o.given.len();
    for (m, a) in o.given.iter().zip(&o.outer.args[given..]) {
        b.enter("step");
        let name = named(&o.stacked.name(m.value).hint);
        let v = moved(b, inner[m.value].expect("it was made"), m, &name, "back, as pieces");
        for (k, (x, own)) in all.iter().zip(&mut made).enumerate() {
            b.enter(&x.p.scope);
            own[a.value] = Some(match o.is_stack {
                true => v,
                false => {
                    let row = b.push("row", Narrow::along(0, k, 1, 1), &[v]);
                    let rank = b.ty(row).rank() - 1;
                    b.push("own", view(rank, false), &[row])
                }
            });
        }
    }
    let mut outs = vec![];
    for (x, own) in all.iter().zip(&mut made) {
        Updates::run(b, x.p, &o.outer, late.iter(), own, scalars);
        outs.push(Updates::end(b, x, &o.outer, own, scalars));
    }
    outs
}
