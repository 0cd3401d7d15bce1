//! Ring attention: blocks of keys and values go around the ranks of `cp`, and no rank ever holds all.
//!
//! Before:  `%k_all = all_gather[cp; dim=1] %k : f32[2,8,1,4]~cp`, `%v_all` alike,
//!          `%attn, %lse = attention %q, %k_all, %v_all, %at, %positions : f32[2,8@cp,1,4], …`
//! After:   `%k_own = to_varying[cp; dim=1] %k : f32[2,4,1,4]!cp`, q, v and the queries' positions alike;
//!          `%k_block = permute[cp; shift=1] %k_own`, `%key_at = ring_shard[cp; dim=0; shift=0] %positions`,
//!          `%attn_block, %lse_block = attention %q_own, %k_own, %v_own, %at_own, %key_at`,
//!          the same of `%k_block` with shift=1, …; `%out, %lse_out = merge_attention` of the two, …;
//!          `%attn = from_varying[cp; dim=1] %out : f32[2,8@cp,1,4]`
//! Assumes: phase Staged.  Leaves: phase Staged.
//!
//! Of c ranks, forward sends c-1 blocks of K and V. Backward sends them again, and with each the sums
//! of its gradients, which travel c times, the last time home; that takes the place of the gather and
//! of the reduce_scatter (Liu et al., 2023, *Ring Attention with Blockwise Transformers*, section 3).
//! A block is passed on before it is used: two are there at once. What a rank sees of a block is
//! decided by positions, so tokens may be dealt in any order, and by segments, of which a rank has those of all keys.

use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Node, Uses, Value};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::attention::Behind;
use shardc_ir::ops::{
    Add, Attention, AttentionGrad, FromVarying, MergeAttention, Op, Permute, RingShard, ToVarying,
};
use shardc_ir::types::AtomList;
use std::collections::BTreeSet;

/// The dim of q, k, v and of what is made of them that tokens stand in.
const TOKENS: usize = 1;

/// Replaces attention over keys and values that were gathered over `cp`, and its gradient.
///
/// # Errors
/// `ring` for attention whose operands are cut in another way, or whose bias is trained.
pub fn ring(mesh: &Mesh, cp: AtomSet, f: &mut Func) -> Result<()> {
    let uses = f.uses();
    let nodes = std::mem::take(&mut f.nodes);
    let gathered = RingFunc { mesh, cp, nodes: &nodes, uses };
    // Results of the reduce_scatters whose place a ring takes.
    let mut homes: BTreeSet<Value> = BTreeSet::new();
    for n in &nodes {
        if let Op::Attention(op) = &n.op {
            let blocks = gathered.blocks(f, n)?;
            Ring::new(mesh, cp, f, n).forward(n, op, blocks);
        } else if let Op::AttentionGrad(op) = &n.op {
            let blocks = gathered.blocks(f, n)?;
            let home = [gathered.home(f, n, 1)?, gathered.home(f, n, 2)?];
            homes.extend(home.into_iter().flatten());
            Ring::new(mesh, cp, f, n).backward(n, op, blocks, home);
        } else if !n.outs.iter().any(|o| homes.contains(o)) {
            f.nodes.push(n.clone());
        }
    }
    f.drop_dead();
    Ok(())
}

/// A function as it was: where the operands of attention come from, and its gradients go.
struct RingFunc<'a> {
    mesh: &'a Mesh,
    cp: AtomSet,
    nodes: &'a [Node],
    uses: Uses,
}

impl RingFunc<'_> {
    /// The pieces that keys and values were gathered of; an error if anything is cut in another way
    /// than a ring can use.
    fn blocks(&self, f: &Func, n: &Node) -> Result<[Value; 2]> {
        let (at, behind) = match &n.op {
            Op::Attention(k) => (3, k.behind()),
            Op::AttentionGrad(k) if k.bias && self.uses.count(n.outs[3]) > 0 => {
                return Err(self.biased(f, n));
            }
            Op::AttentionGrad(k) => (6, k.behind()),
            _other => return Err(self.unlike(f, n)),
        };
        let [q, k, v, q_pos, k_pos] = [0, 1, 2, at, at + 1].map(|i| n.ins[i]);
        let (Some(k), Some(v)) = (self.piece(k), self.piece(v)) else {
            return Err(self.unlike(f, n));
        };
        let cut = AtomList::collect(self.cp.iter());
        let ways = self.mesh.ways(self.cp);
        let even = |v: Value, dim: usize| {
            let d = f.ty(v).dims[dim];
            Some(d.atoms) == cut && d.size % ways == 0
        };
        let whole = |v: Value, dim: usize| {
            let t = f.ty(v);
            self.cp.within(t.replicated) && t.dims[dim].atoms.is_empty()
        };
        let places = behind.drawn.map(|[_, place]| n.ins[place]);
        let [q_seg, k_seg] = [0, 1].map(|i| behind.segments.map(|both| n.ins[both[i]]));
        let mut of_tokens = [q, k, v].into_iter().chain(places).chain(q_seg);
        let fits = of_tokens.all(|x| even(x, TOKENS))
            && even(q_pos, 0)
            && whole(k_pos, 0)
            && k_seg.is_none_or(|x| whole(x, TOKENS));
        if fits { Ok([k, v]) } else { Err(self.unlike(f, n)) }
    }

    /// What was gathered to have this value.
    fn piece(&self, v: Value) -> Option<Value> {
        let maker = self.uses.made_by(self.nodes, v)?;
        let Op::AllGather(g) = &maker.op else { return None };
        (g.axes == self.cp && g.dim == TOKENS && !maker.kept).then(|| maker.ins[0])
    }

    /// What a gradient of gathered keys or values is scattered to; `None` if nobody wants it.
    fn home(&self, f: &Func, n: &Node, result: usize) -> Result<Option<Value>> {
        let v = n.outs[result];
        let user = match self.uses.only_user(v) {
            Some(one) => &self.nodes[one],
            None if self.uses.count(v) == 0 => return Ok(None),
            None => return Err(self.unlike(f, n)),
        };
        match &user.op {
            Op::ReduceScatter(s) if s.axes == self.cp && s.dim == TOKENS && !user.kept => {
                Ok(Some(user.outs[0]))
            }
            _other => Err(self.unlike(f, n)),
        }
    }

    fn biased(&self, f: &Func, n: &Node) -> Diag {
        let cp = self.mesh.names(self.cp, "*");
        let what = format!("a bias by offset is not trained where blocks go around {cp}");
        let at = format!("@{}, {}", f.name, f.scope_info(n.scope).path);
        Diag::new("ring", what).at(at).help("use --cp-mode all-gather or --cp-mode ulysses")
    }

    fn unlike(&self, f: &Func, n: &Node) -> Diag {
        let (cp, ways) = (self.mesh.names(self.cp, "*"), self.mesh.ways(self.cp));
        Diag::new("ring", format!("keys and values of {} cannot go around {cp}", f.name(n.outs[0])))
            .at(format!("@{}, {}", f.name, f.scope_info(n.scope).path))
            .rule(format!("queries, keys and values are cut over {cp} along the sequence, alone and evenly"))
            .why(format!("it is `{}`", shardc_ir::text::node_text(self.mesh, f, n).text))
            .help(format!("use a --seq that is a multiple of {ways}, leave --shard off keys and values, take `keep` off their collectives, or use --cp-mode all-gather"))
    }
}

/// Operands of attention behind positions.
struct Others {
    /// A rank's own, and those that all ranks have.
    own: Vec<Value>,
    /// Which of them are segments of keys, and those of all keys.
    key_segments: Option<(usize, Value)>,
}

/// Writes one ring.
struct Ring<'a> {
    b: Builder<'a>,
    cp: AtomSet,
    ways: usize,
}

impl<'a> Ring<'a> {
    fn new(mesh: &'a Mesh, cp: AtomSet, f: &'a mut Func, n: &Node) -> Ring<'a> {
        let mut b = Builder::new(mesh, f);
        b.scope = n.scope;
        Ring { b, cp, ways: mesh.ways(cp) }
    }

    fn own(&mut self, hint: &'static str, v: Value, dim: usize) -> Value {
        self.b.push(hint, ToVarying { axes: self.cp, dim }, &[v])
    }

    /// Hands a value to the next rank, for the one of the rank before.
    fn pass(&mut self, hint: &'static str, v: Value, note: &'static str) -> Value {
        let passed = self.b.push(hint, Permute { axes: self.cp, shift: 1 }, &[v]);
        self.b.note(note);
        passed
    }

    /// The keys and values of every step, where they stand, and what is behind positions, with the segments
    /// of these keys; `f` uses one block.
    fn around(
        &mut self,
        blocks: [Value; 2],
        k_pos: Value,
        mut behind: Others,
        mut f: impl FnMut(&mut Self, [Value; 3], &[Value]),
    ) {
        let [k, v] = blocks;
        let mut block = [self.own("k_own", k, TOKENS), self.own("v_own", v, TOKENS)];
        for step in 0..self.ways {
            let [k, v] = block;
            if step + 1 < self.ways {
                let note = "ring: the next block comes while this one is used";
                block = [self.pass("k_block", k, note), self.pass("v_block", v, note)];
            }
            let piece = RingShard { axes: self.cp, dim: 0, shift: step };
            let at = self.b.push("key_at", piece, &[k_pos]);
            if let Some((i, all)) = behind.key_segments {
                let piece = RingShard { axes: self.cp, dim: TOKENS, shift: step };
                behind.own[i] = self.b.push("key_segment", piece, &[all]);
            }
            f(self, [k, v, at], &behind.own);
        }
    }

    /// Sets a value of the gathered form to the pieces that the ring has made.
    fn join(&mut self, own: Value, whole: Value) {
        self.b.f.nodes.push(Node::new(
            FromVarying { axes: self.cp, dim: TOKENS },
            &[own],
            &[whole],
            self.b.scope,
        ));
    }

    /// Operands behind positions: a rank's own places and segments of queries, and the others as they are.
    fn behind(&mut self, n: &Node, all: Behind, first: usize) -> Others {
        let mut own = n.ins[first..].to_vec();
        if let Some([query, _]) = all.segments {
            own[query - first] = self.own("query_segment", n.ins[query], TOKENS);
        }
        if let Some([_, place]) = all.drawn {
            own[place - first] = self.own("place_own", n.ins[place], TOKENS);
        }
        let key_segments = all.segments.map(|[_, key]| (key - first, n.ins[key]));
        Others { own, key_segments }
    }

    fn forward(&mut self, n: &Node, op: &Attention, blocks: [Value; 2]) {
        let [q, _, _, q_pos, k_pos, ..] = n.ins[..] else {
            unreachable!("attention has five operands")
        };
        let behind = self.behind(n, op.behind(), 5);
        let (q, at) = (self.own("q_own", q, TOKENS), self.own("query_at", q_pos, 0));
        let mut all: Option<[Value; 2]> = None;
        self.around(blocks, k_pos, behind, |ring, [k, v, key_at], behind| {
            let ins = [&[q, k, v, at, key_at], behind].concat();
            let made = ring.b.push_n(&["attn_block", "lse_block"], op.clone(), &ins);
            all = Some(match all {
                None => [made[0], made[1]],
                Some([out, lse]) => {
                    let ins = [out, lse, made[0], made[1]];
                    let merged = ring.b.push_n(&["attn_own", "lse_own"], MergeAttention {}, &ins);
                    [merged[0], merged[1]]
                }
            });
        });
        let [out, lse] = all.expect("a ring has ranks");
        self.join(out, n.outs[0]);
        self.join(lse, n.outs[1]);
    }

    fn backward(
        &mut self,
        n: &Node,
        op: &AttentionGrad,
        blocks: [Value; 2],
        homes: [Option<Value>; 2],
    ) {
        let [q, _, _, lse, d_o, delta, q_pos, k_pos, ..] = n.ins[..] else {
            unreachable!("attention_grad has eight operands")
        };
        let behind = self.behind(n, op.behind(), 8);
        let [q, lse] = [("q_own", q), ("lse_own", lse)].map(|(h, v)| self.own(h, v, TOKENS));
        let at = self.own("query_at", q_pos, 0);
        self.b.grad = true;
        let [d_o, delta] =
            [("attn_own", d_o), ("delta_own", delta)].map(|(h, v)| self.own(h, v, TOKENS));
        // The gradients of q, and of the block that is here, as far as ranks have added theirs.
        let mut sums: [Option<Value>; 3] = [None; 3];
        let wanted = [true, homes[0].is_some(), homes[1].is_some()];
        let hints = ["q_own", "k_block", "v_block"];
        self.b.grad = false;
        self.around(blocks, k_pos, behind, |ring, [k, v, key_at], behind| {
            ring.b.grad = true;
            for i in [1, 2] {
                let note = "ring: the gradient of a block of keys or values travels with it";
                sums[i] = sums[i].map(|d| ring.pass(hints[i], d, note));
            }
            let ins = [&[q, k, v, lse, d_o, delta, at, key_at], behind].concat();
            let made = ring.b.push_n(&hints, op.clone(), &ins);
            for i in (0..3).filter(|&i| wanted[i]) {
                sums[i] = Some(match sums[i] {
                    None => made[i],
                    Some(sum) => ring.b.push(hints[i], Add::same(), &[sum, made[i]]),
                });
            }
            ring.b.grad = false;
        });
        self.b.grad = true;
        self.join(sums[0].expect("a ring has ranks"), n.outs[0]);
        for (i, home) in [1, 2].into_iter().zip(homes) {
            if let (Some(sum), Some(home)) = (sums[i], home) {
                let sum = self.pass(hints[i], sum, "ring: home, with what all ranks have added");
                self.join(sum, home);
            }
        }
    }
}
