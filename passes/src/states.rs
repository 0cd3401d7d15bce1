//! Recurrences over `cp`: each rank walks its own piece of the tokens, and of all others it takes what they make of a state.
//!
//! Before:  `%o, %end = scan[delta] %q, %k, %g, %v, %beta : f32[2,8,3,4], f32[2,3,4,4]`
//! After:   `%_, %left = scan[delta; c=2] %k, %k, %g, %v, %beta : …, f32[2,2,3,4,4]`, the state behind each piece, from 0;
//!          `%_, %map = scan[delta; start=true; c=2] %k, %k, %g, %zeros, %beta, %ones : …`, what becomes of each column before it;
//!          `%before = concat[d=2; dim=1] %none, %left_0`, and behind the second piece `%map_1 %before_1 + %left_1`, …;
//!          `%o, %ends = scan[delta; start=true; c=2] %q, %k, %g, %v, %beta, %before : f32[2,8,3,4], …`
//! Assumes: phase Source.  Leaves: phase Source.
//!
//! A piece makes Φ S + E of the state S that enters: E is what it leaves of 0, and Φ the same recurrence on the identity
//! without values, or by the plain rule one number. Pieces in their order are products of these maps, so only states are
//! gathered, whose bytes do not depend on how many tokens there are. Where a document begins, Φ is 0; where one begins with a
//! piece, the state before it is dropped.

use shardc_ir::attr::{RuleAttr, Sizes};
use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::scan::DeltaRule;
use shardc_ir::ops::{
    Add, Cast, Concat, Dot, Equal, Expand, Literal, Mul, Narrow, Op, Pad, Reshape, Scale, Scan,
};
use shardc_ir::rule::Letter;
use shardc_ir::types::DType;

/// Most pieces: their states are operands of one op.
const MOST: usize = 24;

/// The recurrence that a node is, if nothing has cut it yet.
fn whole(n: &Node) -> Option<&Scan> {
    let Op::Scan(op) = &n.op else { return None };
    op.pieces.0.is_empty().then_some(op)
}

/// Cuts the tokens of every recurrence into so many pieces, and says whether there was any.
///
/// # Errors
/// `not-built` for more than 24 pieces.
pub fn cut(mesh: &Mesh, f: &mut Func, pieces: usize) -> Result<bool> {
    if pieces == 1 || !f.nodes.iter().any(|n| whole(n).is_some()) {
        return Ok(false);
    }
    let nodes = std::mem::take(&mut f.nodes);
    for n in nodes {
        match whole(&n) {
            Some(op) => {
                fits(f, &n, pieces)?;
                let mut b = Builder::new(mesh, f);
                b.scope = n.scope;
                RecurrenceWriter { b, op: op.clone(), n: &n, ins: n.ins.to_vec(), pieces }.write();
            }
            None => f.nodes.push(n),
        }
    }
    f.drop_dead();
    Ok(true)
}

fn fits(f: &Func, n: &Node, pieces: usize) -> Result<()> {
    let at = format!("@{}, {}", f.name, f.scope_info(n.scope).path);
    if pieces > MOST {
        let what = format!("states of {pieces} ranks of cp are not exchanged, but of {MOST}");
        let help = format!("use a mesh with cp={MOST} at most: tp splits heads, dp rows");
        return Err(Diag::new("not-built", what).at(at).help(help));
    }
    Ok(())
}

/// Writes one recurrence.
struct RecurrenceWriter<'a, 'b> {
    b: Builder<'a>,
    op: Scan,
    n: &'b Node,
    /// Its operands, of as many tokens as the pieces have.
    ins: Vec<Value>,
    pieces: usize,
}

fn letter(c: char) -> Letter {
    Letter(c as u8 - b'a')
}

fn sizes(all: &[(char, usize)]) -> Sizes {
    Sizes(all.iter().map(|&(c, n)| (letter(c), n)).collect())
}

impl RecurrenceWriter<'_, '_> {
    fn write(mut self) {
        let n = self.n;
        let behind = self.op.behind();
        let tokens = self.b.ty(n.ins[0]).dims[1].size;
        let full = tokens.div_ceil(self.pieces) * self.pieces;
        if full > tokens {
            for i in (0..4).chain(behind.beta) {
                let among = Pad { dim: Narrow::along(1, 0, 1, 1).dim, ..Pad::new(0, full) };
                self.ins[i] = self.b.push("filled", among, &[n.ins[i]]);
            }
            if let Some(i) = behind.segments {
                // They are of the last document: in another one a state begins with 0.
                let last = self.b.push("document", Narrow::along(1, tokens - 1, 1, 1), &[n.ins[i]]);
                let all = [&[n.ins[i]], &vec![last; full - tokens][..]].concat();
                self.ins[i] = self.b.push("filled", Concat::along(1, full), &all);
            }
            self.b.note("states: tokens that keep a state as it is, up to pieces of as many each");
        }
        let [k, g, v] = [1, 2, 3].map(|i| self.ins[i]);
        let more: Vec<Value> = self.ins[4..behind.start.unwrap_or(behind.end)].to_vec();
        let left = self.scan("left", [k, k, g, v], &more, None);
        self.b.note("states: what each piece of the tokens leaves, of none before it");
        let map = self.map(&more);
        let keep = behind.segments.map(|i| self.keep(self.ins[i]));
        let first = match behind.start {
            None => {
                let like = self.piece("left", left, 0);
                self.b.push("none", Scale { by: 0.0 }, &[like])
            }
            Some(i) => {
                let rule = RuleAttr::new("bnkv->bcnkv", &[4]);
                self.b.push("before", Expand { rule, sizes: sizes(&[('c', 1)]) }, &[n.ins[i]])
            }
        };
        let (mut all, mut state) = (vec![first], behind.start.map(|_| first));
        for r in 1..self.pieces {
            let own = self.piece("left", left, r - 1);
            let mut next = match state {
                None => own,
                Some(before) => {
                    let kept = self.mapped(map, before, r - 1);
                    self.b.push("before", Add::same(), &[kept, own])
                }
            };
            if let Some(keep) = keep {
                let one = self.b.push("keeps", Narrow::along(1, r - 1, 1, 1), &[keep]);
                next = self.b.push("before", Mul::by("bcnkv,bc->bcnkv", &[5, 2]), &[next, one]);
            }
            all.push(next);
            state = Some(next);
        }
        let before = self.b.push("before", Concat::along(1, self.pieces), &all);
        self.b.note("states: what stands before each piece, of those before it in their order");
        let op = self.op.clone().in_pieces(self.pieces, true);
        let ins = [&self.ins[..4], &more, &[before]].concat();
        let made = self.b.push_n(&["scan", "states"], op, &ins);
        let mut out = made[0];
        if full > tokens {
            out = self.b.push("scan", Narrow::along(1, 0, tokens, 1), &[out]);
        }
        let end = self.piece("end", made[1], self.pieces - 1);
        let rule = RuleAttr::new("bcnkv->b(cn)kv", &[5]);
        let end = (Reshape { rule, sizes: sizes(&[('c', 1)]) }, end);
        // The values that there were, of these.
        let made_by = self.b.f.nodes.iter().rposition(|x| x.outs.first() == Some(&out));
        self.b.f.nodes[made_by.expect("it was pushed")].outs[0] = n.outs[0];
        self.b.f.nodes.push(Node::new(end.0, &[end.1], &[n.outs[1]], self.b.scope));
    }

    /// The last states of pieces: [b, c, n, k, v].
    fn scan(
        &mut self,
        hint: &'static str,
        of: [Value; 4],
        more: &[Value],
        start: Option<Value>,
    ) -> Value {
        let op = self.op.clone().in_pieces(self.pieces, start.is_some());
        let ins: Vec<Value> = of.into_iter().chain(more.iter().copied()).chain(start).collect();
        self.b.push_n(&["unread", hint], op, &ins)[1]
    }

    /// One of the pieces, by itself.
    fn piece(&mut self, hint: &'static str, of: Value, at: usize) -> Value {
        self.b.push(hint, Narrow::along(1, at, 1, 1), &[of])
    }

    /// What pieces make of a state beside what they add: a matrix [b, c, n, k, k], or by the plain rule a number
    /// [b, c, n].
    fn map(&mut self, more: &[Value]) -> Value {
        let (k, g) = (self.ins[1], self.ins[2]);
        let [rows, _, heads, width] = [0, 1, 2, 3].map(|d| self.b.ty(k).dims[d].size);
        let all = [('b', rows), ('c', self.pieces), ('n', heads)];
        let map = match self.op.delta {
            DeltaRule(true) => {
                let zeros = self.b.push("nothing", Scale { by: 0.0 }, &[k]);
                let places = (0..width).map(|i| i as f32).collect();
                let places = self.b.push("place", Literal { values: places }, &[]);
                let [row, col] = [("k->kj", 'j'), ("j->kj", 'k')].map(|(rule, l)| {
                    let expand =
                        Expand { rule: RuleAttr::new(rule, &[1]), sizes: sizes(&[(l, width)]) };
                    self.b.push("place", expand, &[places])
                });
                let one = self.b.push("ones", Equal::same(), &[row, col]);
                let expand = Expand { rule: RuleAttr::new("kj->bcnkj", &[2]), sizes: sizes(&all) };
                let ones = self.b.push("ones", expand, &[one]);
                self.scan("map", [k, k, g, zeros], more, Some(ones))
            }
            DeltaRule(false) => {
                let expand =
                    Expand { rule: RuleAttr::new("bsn->bsnk", &[3]), sizes: sizes(&[('k', 1)]) };
                let zeros = self.b.push("nothing", Scale { by: 0.0 }, &[g]);
                let zeros = self.b.push("nothing", expand, &[zeros]);
                let one = self.b.push("one", Literal { values: [1.0f32].into() }, &[]);
                let rule = RuleAttr::new("v->bcnkv", &[1]);
                let expand = Expand { rule, sizes: sizes(&[&all[..], &[('k', 1)]].concat()) };
                let ones = self.b.push("one", expand, &[one]);
                let map = self.scan("map", [zeros, zeros, g, zeros], more, Some(ones));
                let rule = RuleAttr::new("bcnkv->bc(nkv)", &[5]);
                let sizes = sizes(&[('k', 1), ('v', 1)]);
                self.b.push("map", Reshape { rule, sizes }, &[map])
            }
        };
        self.b.note("states: what each piece of the tokens makes of the one before it");
        map
    }

    /// What a piece makes of a state.
    fn mapped(&mut self, map: Value, state: Value, at: usize) -> Value {
        let own = self.piece("map", map, at);
        match self.op.delta {
            DeltaRule(true) => {
                self.b.push("kept", Dot::by("bcnkj,bcnjv->bcnkv", &[5, 5]), &[own, state])
            }
            DeltaRule(false) => {
                self.b.push("kept", Mul::by("bcnkv,bcn->bcnkv", &[5, 3]), &[state, own])
            }
        }
    }

    /// Whether each piece but the first goes on with the document before it: [b, c-1].
    fn keep(&mut self, segments: Value) -> Value {
        let tokens = self.b.ty(segments).dims[1].size / self.pieces;
        let own = self.b.push("document", Cast { to: DType::F32 }, &[segments]);
        let rule = RuleAttr::new("b(cs)->bcs", &[2]);
        let own =
            self.b.push("document", Reshape { rule, sizes: sizes(&[('c', self.pieces)]) }, &[own]);
        let [last, first] = [(tokens - 1, 0), (0, 1)].map(|(at, from)| {
            let one = self.b.push("document", Narrow::new(at, 1), &[own]);
            let rule = RuleAttr::new("bcs->b(cs)", &[3]);
            let one = self.b.push("document", Reshape { rule, sizes: sizes(&[('s', 1)]) }, &[one]);
            self.b.push("document", Narrow::along(1, from, self.pieces - 1, 1), &[one])
        });
        self.b.push("keeps", Equal::same(), &[last, first])
    }
}
