//! A recurrence whose tokens are cut into pieces, between which states are exchanged, is the recurrence.
//!
//! Where a model's laid-out form has such an exchange, the recurrence is put in its place by these laws, x and y being pieces of
//! tokens and S a state:
//!
//! | law | |
//! |---|---|
//! | composition | scan(x ++ y, S) is (o_x ++ o_y, e_y), where (o_x, e_x) = scan(x, S) and (o_y, e_y) = scan(y, e_x) |
//! | affine | end(x, S) = Φ(x) S + end(x, 0), where Φ(x) = end(x with values 0, I); by the plain rule Φ(x) is a number times I |
//! | documents | where the segment of the first token of y is not that of the last of x, scan(y, e_x) is scan(y, 0) |
//! | filling | scan(x ++ z, S) is (o_x ++ o_z, e_x), if keys, values and decays g of z are 0, and z is of the segment of the last token of x |
//!
//! By induction over pieces the state before piece r + 1 is Φ_r S_r + E_r. An exchange that is written otherwise stays, and is
//! no form of its model.

use super::sizes;
use shardc_ir::func::{Func, Module, Node, Value};
use shardc_ir::ops::{
    Add, Cast, Concat, Dot, Equal, Literal, Mul, Narrow, Op, Pad, Reshape, Scale, Scan,
};
use shardc_ir::types::{DType, Type};
use std::collections::{BTreeMap, BTreeSet};

/// A laid-out model with recurrences in the place of their pieces, and how many there are.
pub fn joined(laid: &Module) -> (Module, usize) {
    let mut m = laid.clone();
    let [f] = &mut m.funcs[..] else { return (m, 0) };
    let read = Reader::new(f);
    let found: Vec<(usize, Exchange)> =
        (0..f.nodes.len()).filter_map(|i| Some((i, read.exchange(&f.nodes[i])?))).collect();
    for (i, x) in &found {
        let own = &f.nodes[*i];
        let Op::Scan(op) = &own.op else { continue };
        let op = Scan { pieces: Default::default(), start: x.start.is_some(), ..op.clone() };
        let mut ins = own.ins.to_vec();
        ins.pop();
        let (mut out, scope) = (own.outs[0], own.scope);
        if let Some((at, real)) = &x.filled {
            // The recurrence makes the outputs of these tokens alone, in the place of the node that takes them.
            ins.clone_from(real);
            out = f.nodes[*at].outs[0];
            f.nodes[*at].outs[0] = own_value(f, out);
        }
        ins.extend(x.start);
        let end = match x.end {
            Some((at, end)) => {
                // The recurrence makes it now.
                f.nodes[at].outs[0] = own_value(f, end);
                end
            }
            None => {
                let shape: Vec<usize> = f.ty(f.nodes[*i].outs[1]).sizes().to_vec();
                let [b, _, n, k, v] = shape[..] else { continue };
                let name = f.name(out).clone();
                f.value(Type::f32(&[b, n, k, v]), name)
            }
        };
        f.nodes[*i] = Node::new(op, &ins, &[out, end], scope);
    }
    f.drop_dead();
    (m, found.len())
}

/// A value of the same type that nothing reads.
fn own_value(f: &mut Func, like: Value) -> Value {
    let (ty, name) = (f.ty(like).clone(), f.name(like).clone());
    f.value(ty, name)
}

/// What an exchange is, beside the recurrence that its pieces have.
struct Exchange {
    /// The state before the first piece, if it is not 0.
    start: Option<Value>,
    /// The node that makes the last state, and this.
    end: Option<(usize, Value)>,
    /// The node that takes the outputs of the tokens that are not filled up, and the operands without those.
    filled: Option<(usize, Vec<Value>)>,
}

struct Reader<'a> {
    f: &'a Func,
    made: BTreeMap<Value, (usize, usize)>,
}

impl<'a> Reader<'a> {
    fn new(f: &'a Func) -> Reader<'a> {
        let of = |(i, n): (usize, &Node)| {
            n.outs.iter().enumerate().map(|(j, v)| (*v, (i, j))).collect::<Vec<_>>()
        };
        Reader { f, made: f.nodes.iter().enumerate().flat_map(of).collect() }
    }

    /// The node that makes a value as its only result.
    fn maker(&self, v: Value) -> Option<&'a Node> {
        let (i, _) = self.made.get(&v)?;
        Some(&self.f.nodes[*i]).filter(|n| n.outs.len() == 1)
    }

    /// The operands of an op that makes a value.
    fn by(&self, v: Value, op: impl Into<Op>) -> Option<&'a [Value]> {
        let n = self.maker(v)?;
        (n.op == op.into()).then_some(&n.ins[..])
    }

    fn size(&self, v: Value, dim: usize) -> usize {
        self.f.ty(v).dims.get(dim).map_or(0, |d| d.size)
    }

    /// What a value is the piece `at` of, along a dim of pieces.
    fn piece(&self, v: Value, at: usize) -> Option<Value> {
        self.by(v, Narrow::along(1, at, 1, 1)).map(|x| x[0])
    }

    /// Whether a value is 0 everywhere, whatever it is made of: states and keys are finite.
    fn is_zero(&self, v: Value) -> bool {
        let Some(n) = self.maker(v) else { return false };
        match &n.op {
            Op::Scale(s) => *s == Scale { by: 0.0 },
            Op::Expand(_) => self.is_zero(n.ins[0]),
            _other => false,
        }
    }

    /// Whether rows and columns of the last two dims are those of the identity.
    fn is_identity(&self, v: Value) -> bool {
        let read = || {
            let n = self.maker(v)?;
            let Op::Expand(e) = &n.op else { return None };
            let x = self.by(n.ins[0], Equal::same())?;
            let axis = |v: Value, rule: &str| {
                let n = self.maker(v)?;
                let Op::Expand(e) = &n.op else { return None };
                (e.rule.0.to_string() == rule).then_some(n.ins[0])
            };
            let places = axis(x[0], "k->kj")?;
            let Op::Literal(Literal { values }) = &self.maker(places)?.op else { return None };
            let each: BTreeSet<u32> = values.iter().map(|x| x.to_bits()).collect();
            // Numbers that are equal have the same bits, but for those of 0.
            let apart = each.len() == values.len() && !each.contains(&(-0.0f32).to_bits());
            let finite = values.iter().all(|x| x.is_finite());
            let both = axis(x[1], "j->kj") == Some(places);
            (both && apart && finite && e.rule.0.to_string() == "kj->bcnkj").then_some(())
        };
        read().is_some()
    }

    fn is_one(&self, v: Value) -> bool {
        let Some(n) = self.maker(v) else { return false };
        let one = Literal { values: [1.0f32].into() };
        let Op::Expand(e) = &n.op else { return false };
        e.rule.0.to_string() == "v->bcnkv" && self.by(n.ins[0], one).is_some()
    }

    /// A scan of the same pieces whose last states these are, with or without a start.
    fn ends(&self, v: Value, of: &Scan, start: bool) -> Option<&'a Node> {
        let (i, 1) = *self.made.get(&v)? else { return None };
        let n = &self.f.nodes[i];
        (n.op == Op::from(Scan { start, ..of.clone() })).then_some(n)
    }

    fn exchange(&self, n: &Node) -> Option<Exchange> {
        let Op::Scan(op) = &n.op else { return None };
        let pieces = op.pieces.0.first().map(|x| x.1).filter(|_| op.start)?;
        let (&before, own) = n.ins.split_last()?;
        let states = self.by(before, Concat::along(1, pieces))?;
        if states.len() != pieces || states.iter().any(|s| self.size(*s, 1) != 1) {
            return None;
        }
        let segments = op.segments.then(|| own[own.len() - 1]);
        let start = match self.is_zero(states[0]) {
            true => None,
            false => Some(self.first(states[0])?),
        };
        let (mut left, mut map, mut keeps) = (None, None, None);
        for r in 1..pieces {
            let mut now = states[r];
            if let Some(segments) = segments {
                let x = self.by(now, Mul::by("bcnkv,bc->bcnkv", &[5, 2]))?;
                let keep = self.piece(x[1], r - 1)?;
                if *keeps.get_or_insert(keep) != keep || !self.keeps(keep, segments, pieces) {
                    return None;
                }
                now = x[0];
            }
            // Behind a first piece that begins with 0 there is what it leaves.
            let one = if r == 1 && start.is_none() {
                now
            } else {
                let x = self.by(now, Add::same())?;
                let own = self.mapped(op, x[0], states[r - 1], r - 1)?;
                if *map.get_or_insert(own) != own {
                    return None;
                }
                x[1]
            };
            let own = self.piece(one, r - 1)?;
            if *left.get_or_insert(own) != own {
                return None;
            }
        }
        self.is_left(op, own, left?).then_some(())?;
        if let Some(map) = map {
            self.is_map(op, own, map).then_some(())?;
        }
        let filled = self.filled(op, n.outs[0], own);
        let end = self.end(n.outs[1], pieces);
        // States behind pieces that something else reads are not there any more.
        let alone = match end {
            None => self.readers(n.outs[1]) == 0,
            Some((at, _)) => {
                let last = self.f.nodes[at].ins[0];
                self.readers(n.outs[1]) == 1 && self.readers(last) == 1
            }
        };
        alone.then_some(Exchange { start, end, filled })
    }

    /// How many nodes and results read a value.
    fn readers(&self, v: Value) -> usize {
        let nodes = self.f.nodes.iter().filter(|n| n.ins.contains(&v)).count();
        nodes + self.f.results.iter().filter(|r| r.value == v).count()
    }

    /// Whether all operands are filled up by zeros, which keep a state, behind as many tokens, and segments by the last of
    /// these; and nothing reads outputs but those of these.
    fn filled(&self, op: &Scan, out: Value, own: &[Value]) -> Option<(usize, Vec<Value>)> {
        let segments = op.segments.then(|| own.len() - 1);
        let one = |(i, v): (usize, &Value)| match segments == Some(i) {
            true => self.before_last(*v),
            false => self.among_zeros(*v),
        };
        let real: Vec<Value> = own.iter().enumerate().map(one).collect::<Option<_>>()?;
        let tokens = self.size(*real.first()?, 1);
        let alike = real.iter().all(|v| self.size(*v, 1) == tokens);
        let at = self.f.nodes.iter().position(|n| n.ins.contains(&out))?;
        let takes = self.f.nodes[at].op == Narrow::along(1, 0, tokens, 1).into();
        (alike && takes && self.readers(out) == 1).then_some((at, real))
    }

    /// What stands first among zeros, along the dim of tokens.
    fn among_zeros(&self, v: Value) -> Option<Value> {
        let n = self.maker(v)?;
        let Op::Pad(Pad { start: 0, dim, step, .. }) = &n.op else { return None };
        let x = *n.ins.first()?;
        let first = Narrow::along(1, 0, 1, 1);
        (*dim == first.dim && *step == first.step && self.size(x, 1) < self.size(v, 1)).then_some(x)
    }

    /// What stands before its own last token, again and again.
    fn before_last(&self, v: Value) -> Option<Value> {
        let n = self.maker(v)?;
        let (&x, more) = n.ins.split_first()?;
        let tokens = self.size(x, 1);
        let last = Narrow::along(1, tokens.checked_sub(1)?, 1, 1);
        let alike = more.iter().all(|&v| self.by(v, last.clone()).is_some_and(|of| of == [x]));
        (n.op == Concat::along(1, self.size(v, 1)).into() && alike).then_some(x)
    }

    /// The state before all pieces.
    fn first(&self, state: Value) -> Option<Value> {
        let n = self.maker(state)?;
        let Op::Expand(e) = &n.op else { return None };
        (e.rule.0.to_string() == "bnkv->bcnkv").then_some(n.ins[0])
    }

    /// What a piece leaves of a state of 0: a scan of the same keys, decays and values.
    fn is_left(&self, op: &Scan, own: &[Value], left: Value) -> bool {
        self.ends(left, op, false).is_some_and(|n| n.ins[1..] == own[1..])
    }

    /// What a piece makes of a state: a scan of the same keys and decays, without values, of the identity.
    fn is_map(&self, op: &Scan, own: &[Value], map: Value) -> bool {
        let same = |n: &Node, from: usize| {
            let k = n.ins.len() - 1;
            n.ins[from] == own[from] && self.is_zero(n.ins[3]) && n.ins[4..k] == own[4..]
        };
        if op.delta.0 {
            let of = self.ends(map, op, true).filter(|n| same(n, 1) && n.ins[2] == own[2]);
            return of.is_some_and(|n| n.ins.last().is_some_and(|s| self.is_identity(*s)));
        }
        // One number for each head: its own key and value have a width of 1.
        let Some(n) = self.maker(map) else { return false };
        let Op::Reshape(Reshape { rule, .. }) = &n.op else { return false };
        let of = self.ends(n.ins[0], op, true).filter(|n| same(n, 2));
        rule.0.to_string() == "bcnkv->bc(nkv)"
            && self.size(n.ins[0], 3) == 1
            && self.size(n.ins[0], 4) == 1
            && of.is_some_and(|n| n.ins.last().is_some_and(|s| self.is_one(*s)))
    }

    /// The maps of pieces, of which one is applied to a state.
    fn mapped(&self, op: &Scan, v: Value, state: Value, at: usize) -> Option<Value> {
        let (by, to) = match op.delta.0 {
            true => {
                let x = self.by(v, Dot::by("bcnkj,bcnjv->bcnkv", &[5, 5]))?;
                (x[0], x[1])
            }
            false => {
                let x = self.by(v, Mul::by("bcnkv,bcn->bcnkv", &[5, 3]))?;
                (x[1], x[0])
            }
        };
        self.piece(by, at).filter(|_| to == state)
    }

    /// Whether a value says of each piece but the first that its first token is of the segment of the token before it.
    fn keeps(&self, v: Value, segments: Value, pieces: usize) -> bool {
        let tokens = self.size(segments, 1) / pieces;
        let read = |v: Value, from: usize, at: usize| {
            let x = self.by(v, Narrow::along(1, from, pieces - 1, 1))?[0];
            let n = self.maker(x)?;
            let Op::Reshape(Reshape { rule, .. }) = &n.op else { return None };
            let x = self.by(n.ins[0], Narrow::new(at, 1))?[0];
            let m = self.maker(x)?;
            let Op::Reshape(r) = &m.op else { return None };
            let fits = rule.0.to_string() == "bcs->b(cs)"
                && r.rule.0.to_string() == "b(cs)->bcs"
                && sizes(&m.op).iter().any(|x| x.0.name() == 'c' && x.1 == pieces);
            let own = self.by(m.ins[0], Cast { to: DType::F32 })?[0];
            (fits && own == segments).then_some(())
        };
        let both = |x: &[Value]| read(x[0], 0, tokens - 1).is_some() && read(x[1], 1, 0).is_some();
        tokens > 0 && self.by(v, Equal::same()).is_some_and(both)
    }

    /// The node that makes the state behind all pieces, of those behind each, and that state.
    fn end(&self, states: Value, pieces: usize) -> Option<(usize, Value)> {
        let (at, n) = self.f.nodes.iter().enumerate().find(|(_, n)| {
            matches!(&n.op, Op::Reshape(r) if r.rule.0.to_string() == "bcnkv->b(cn)kv")
                && self.piece(n.ins[0], pieces - 1) == Some(states)
        })?;
        Some((at, n.outs[0]))
    }
}
