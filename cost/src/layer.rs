//! Seconds of a layer, of the embedding and of the loss, for one microbatch on one rank.

use crate::collective::{Group, Kind, all_to_all, exposed, exposed_at_least, seconds, send};
use crate::device::{Device, Precision};
use crate::kernel::{Attention, Gemm, rows};
use crate::layout::{Anew, Context, Job, Kernels, Layout, Modules, Recompute, Rows, Stack};
use crate::model::{Cut, Mixer, Scans, Sizes};
use crate::parts::Times;
use shardc_ir::diag::Result;
use shardc_ir::ops::scan::CHUNK;

/// What kernels of compiled layers (Mamba-2 of 4,096 columns) do around a walk over a state, forward and backward. Times that
/// a convolution of four tokens reads or writes what it convolves: shifts 6, products 7, their sum 5; backward all of it
/// again, and about as much for its weights and back.
const CONVOLVED: [f64; 2] = [18.0, 41.0];
/// The same of keys and queries of all heads, in elements of the narrow type: they are made f32, in backward twice, and their
/// gradients narrow; and where heads share them they are repeated, and gradients summed.
const WIDENED: [f64; 2] = [6.0, 12.0];
const REPEATED: [f64; 2] = [2.0, 4.0];
/// The same of values: in backward the gate and its norm are computed again, in f32.
const GATED_AGAIN: f64 = 22.0;
/// Launches of all this.
const AROUND: [f64; 2] = [33.0, 80.0];

/// Times that merging what attention makes of two blocks reads or writes an element of the result.
const MERGED: f64 = 3.0;

/// What is to be priced.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    pub sizes: &'a Sizes,
    pub layout: &'a Layout,
    pub job: &'a Job,
    pub stack: &'a Stack,
    pub device: &'a Device,
}

/// A block between a gather and a scatter over tp.
struct Block {
    /// The first product reads what tp gathers, the last writes what it sums.
    products: Vec<Gemm>,
    enters: usize,
    leaves: usize,
}

impl Question<'_> {
    /// Tokens of a rank and microbatch.
    pub fn tokens(&self) -> f64 {
        let l = self.layout;
        l.microbatch as f64 * self.job.seq as f64 / l.cp as f64
    }

    /// Ranks that cut the tokens of what is outside blocks.
    fn by_row(&self) -> f64 {
        if self.layout.sp { self.layout.tp as f64 } else { 1.0 }
    }

    /// Bytes of the residual stream of all tokens of a rank of cp.
    fn stream(&self) -> f64 {
        self.tokens() * self.sizes.hidden as f64 * self.job.precision.wide().bytes()
    }

    fn rows(&self) -> Rows {
        self.stack.rows(self.job.compiled)
    }

    fn mixer_block(&self, m: Mixer) -> Block {
        let (t, tokens) = (self.layout.tp as f64, self.tokens());
        let of = |(n, k, cut): (f64, f64, Cut)| match cut {
            Cut::Columns => Gemm::new(tokens, n / t, k),
            Cut::Rows => Gemm::new(tokens, n, k / t),
            Cut::Whole => Gemm::new(tokens / self.by_row(), n, k),
        };
        let products: Vec<Gemm> = self.sizes.mixer_products(m).into_iter().map(of).collect();
        Block { enters: 0, leaves: products.len() - 1, products }
    }

    fn mlp_block(&self, width: usize) -> Block {
        let (t, tokens) = (self.layout.tp as f64, self.tokens());
        let (h, f) = (self.sizes.hidden as f64, width as f64 / t);
        let up = Gemm::new(tokens, (self.sizes.mlp_products() - 1.0) * f, h);
        Block { products: vec![up, Gemm::new(tokens, h, f)], enters: 0, leaves: 1 }
    }

    /// Products of a block and what tp exchanges around it.
    fn block(&self, b: &Block, p: Precision) -> Result<Times> {
        let (d, l) = (self.device, self.layout);
        let mut out = Times::default();
        let mut each = vec![];
        for g in &b.products {
            let (f, i) = (g.seconds(d, p)?, g.input_gradient().seconds(d, p)?);
            let w = g.weight_gradient().seconds(d, p)?;
            out.forward.products += f;
            out.input.products += i;
            out.weight.products += w;
            each.push((f, i, w));
        }
        if l.tp == 1 {
            return Ok(out);
        }
        let (over, group, bytes) = (self.job.overlap, l.tp_group(d), self.stream());
        let time = |kind| seconds(d, kind, group, bytes);
        let seen = |t: f64, hides: bool, work: f64| if hides { exposed(t, work) } else { t };
        let ((f, i, w), (last, last_i, _)) = (each[b.enters], each[b.leaves]);
        let backward = over.tp || over.tp_backward;
        if l.sp {
            let (gather, scatter) = (time(Kind::AllGather), time(Kind::ReduceScatter));
            out.forward.tp += seen(gather, over.tp, f) + seen(scatter, over.tp, last);
            // The gradient is gathered, and what went in, which was not kept whole.
            out.input.tp += seen(gather, over.tp, last_i) + seen(gather, backward, i);
            out.input.tp += seen(scatter, backward, w);
        } else {
            let sum = time(Kind::AllReduce);
            out.forward.tp += seen(sum, over.tp, last);
            out.input.tp += seen(sum, backward, w);
        }
        Ok(out)
    }

    /// Attention between its products: seconds, and what is exchanged over cp.
    fn attention(&self) -> Result<Times> {
        let (s, l, d) = (self.sizes, self.layout, self.device);
        let ((width, value), heads) = (s.widths(), s.heads as f64 / l.tp as f64);
        let (rows, seq) = (l.microbatch as f64, self.job.seq as f64);
        let (queries, wide) = (seq / l.cp as f64, self.job.precision.wide());
        let mut out = Times::default();
        let ring = if l.cp > 1 { self.stack.ring } else { 1.0 };
        if let Kernels::Flash(_) | Kernels::Cudnn | Kernels::Own = self.job.attention {
            let share = self.job.attention.share(d)? * ring;
            let blocks = if l.context == Context::Ring { l.cp as f64 } else { 1.0 };
            let (keys, cut) = (seq / blocks, if l.context == Context::Heads { l.cp } else { 1 });
            let (heads, queries) = (heads / cut as f64, queries * cut as f64);
            // Of all keys; of a ring, where ranks wait for each other, the rank that has most of each block.
            let uneven = match (l.even || l.context == Context::Heads, l.context) {
                (true, _) => 1.0,
                (false, Context::Ring) => 2.0 - 1.0 / blocks,
                (false, _) => 2.0 - 1.0 / l.cp as f64,
            };
            let seen = uneven * self.job.seen;
            let (values, computed) = (value, seen);
            let a = Attention { rows, heads, queries, keys, width, values, seen, computed };
            let (forward, backward) = a.seconds(d, share, wide)?;
            (out.forward.attention, out.input.attention) = (blocks * forward, blocks * backward);
            // What each block gives is merged with what others gave, in f32.
            let merged = 4.0 * MERGED * self.tokens() * heads * value;
            let launches = 2.0 * (blocks - 1.0);
            out.forward.memory = crate::kernel::rows(d, (blocks - 1.0) * merged, launches);
            out.input.memory = out.forward.memory;
        } else {
            let batch = rows * heads;
            let scores = Gemm { m: queries, n: seq, k: width, batch };
            let mixed = Gemm { m: queries, n: value, k: seq, batch };
            let forward = scores.seconds(d, wide)? + mixed.seconds(d, wide)?;
            let bytes = self.rows().scores * batch * queries * seq;
            let moved = crate::kernel::rows(d, bytes, 2.0);
            out.forward.attention = forward + moved;
            out.input.attention = 2.0 * forward + self.rows().backward * moved;
        }
        self.exchanged(&mut out)?;
        Ok(out)
    }

    /// A recurrence, as products of its chunks of tokens, behind its convolution: seconds, and the states that ranks of cp
    /// exchange.
    fn scan(&self, x: Scans) -> Result<Times> {
        let (l, d) = (self.layout, self.device);
        let queries = self.job.seq as f64 / l.cp as f64;
        let chunk = queries.min(CHUNK as f64);
        let (heads, (keys, values)) = (x.heads as f64 / l.tp as f64, x.elements());
        let batch = l.microbatch as f64 * heads * (queries / chunk).ceil();
        let [k, v] = [x.key_width, x.value_width].map(|n| n as f64);
        // Over cp a piece is walked from 0, too, and by the delta rule with the identity for a state.
        let walks = match (l.cp > 1, x.delta) {
            (false, _) => 1.0,
            (true, false) => 2.0,
            (true, true) => 3.0,
        };
        let walk = |flops: f64| {
            let each = flops / x.heads as f64 / (2.0 * v);
            let g = Gemm { m: chunk, n: v, k: each, batch };
            Ok(walks * g.seconds(d, Precision::F32)?)
        };
        let [forward, backward] = x.flops(chunk).map(walk);
        let mut out = Times::default();
        (out.forward.attention, out.input.attention) = (forward?, backward?);
        // What is walked is f32, and read and written once.
        let part = self.tokens() / l.tp as f64;
        let bytes = walks * 4.0 * part * 2.0 * (keys + values);
        let narrow = self.job.precision.wide().bytes() * part;
        let convolved = narrow * (2.0 * keys + values);
        // Of all heads, each of keys and queries.
        let widened = narrow * (x.heads * x.key_width) as f64;
        let repeated = if x.heads > x.key_heads { widened } else { 0.0 };
        let moved = |i: usize, times: f64, gated: f64| {
            let all = CONVOLVED[i] * convolved + WIDENED[i] * widened + REPEATED[i] * repeated;
            rows(d, all + times * bytes + gated * narrow * values, AROUND[i])
        };
        out.forward.memory = moved(0, 1.0, 0.0);
        out.input.memory = moved(1, self.rows().backward, GATED_AGAIN);
        if l.cp > 1 {
            let states = 4.0 * l.microbatch as f64 * heads * l.cp as f64;
            // Of two pieces what the first makes of a state is not asked for.
            let makes = if x.delta { k * k } else { 1.0 };
            let sent = k * v + if l.cp > 2 { makes } else { 0.0 };
            let time = |elements| seconds(d, Kind::AllGather, l.cp_group(d), states * elements);
            (out.forward.cp, out.input.cp) = (time(sent), time(k * v));
        }
        Ok(out)
    }

    /// What attention exchanges over cp, beside or before its work.
    fn exchanged(&self, t: &mut Times) -> Result<()> {
        let (s, l, d) = (self.sizes, self.layout, self.device);
        let (width, value) = s.widths();
        let (kv_heads, heads) =
            ((s.kv_heads as f64 / l.tp as f64).max(1.0), s.heads as f64 / l.tp as f64);
        let wide = self.tokens() * self.job.precision.wide().bytes();
        let (kv, group) = (wide * kv_heads * (width + value), l.cp_group(d));
        let work = [t.forward.attention, t.input.attention];
        let both = match l.context {
            Context::Gathered => {
                let gather = seconds(d, Kind::AllGather, group, kv * l.cp as f64);
                if self.job.overlap.early_keys {
                    let queries = self.mixer_block(Mixer::Attention).products[0]
                        .seconds(d, self.job.precision)?;
                    [exposed(gather, queries), 2.0 * gather]
                } else {
                    [exposed(gather, work[0]), exposed(2.0 * gather, work[1])]
                }
            }
            // A step's block is on its way while the one before it is worked on: backward also takes its gradient along,
            // which goes all around.
            Context::Ring => {
                let steps = l.cp as f64 - 1.0;
                let far = if group.domains() > 1.0 { d.domain as usize } else { l.tp };
                let step = send(d, far, kv);
                let one = |n: f64, work: f64| steps * exposed(n * step, work / (steps + 1.0));
                let last = if steps > 0.0 { step } else { 0.0 };
                [one(1.0, work[0]), one(2.0, work[1]) + last]
            }
            Context::Heads => {
                let q = wide * heads * (width + value);
                // Ranks that share a head get a part of it each, and gather the rest.
                let share = (l.cp as f64 / kv_heads).max(1.0);
                let among = Group::new(d, l.tp, share as usize);
                let shared = seconds(d, Kind::AllGather, among, share * kv);
                let all = seconds(d, Kind::AllToAll, group, q + kv) + shared;
                [all, all]
            }
        };
        [t.forward.cp, t.input.cp] = both;
        Ok(())
    }

    /// Work over rows; `elements` are those of the MLP's width.
    fn over_rows(&self, m: Mixer, elements: f64, more: f64) -> Times {
        let (s, r, t) = (self.sizes, self.rows(), self.layout.tp as f64);
        let (enters, leaves) = s.mixed(m);
        let heads = enters + leaves;
        let stream = self.tokens() * s.hidden as f64 / self.by_row();
        let part = if s.of_halves() { 0.5 } else { 1.0 };
        let (own, launches) = (part * r.stream, part * r.launches);
        let bytes = own * stream + r.heads * self.tokens() * heads / t + r.ffn * elements;
        let mut out = Times::default();
        let all = bytes + more;
        out.forward.memory = rows(self.device, all, launches);
        out.input.memory = rows(self.device, r.backward * all, r.backward * launches);
        out
    }

    /// What it takes to make operands fp8: bytes forward and backward.
    fn casts(&self, all: &[Gemm]) -> (f64, f64) {
        if self.job.precision != Precision::Fp8 {
            return (0.0, 0.0);
        }
        let forward: f64 = all.iter().map(|g| g.batch * (g.m * g.k + g.k * g.n)).sum();
        let backward: f64 = all.iter().map(|g| g.batch * (g.m * g.n + g.m * g.k)).sum();
        (self.stack.fp8 * forward, self.stack.fp8 * backward)
    }

    /// Seconds to add a microbatch's gradients to those of so many parameters.
    fn accumulated(&self, params: f64) -> f64 {
        rows(self.device, self.stack.accumulate * params, 0.0)
    }

    /// Experts of a layer: grouped products, and exchanges with other ranks.
    fn experts(&self) -> Result<(Times, f64, Vec<Gemm>)> {
        let (s, l, d) = (self.sizes, self.layout, self.device);
        let Some(x) = s.experts else { return Ok((Times::default(), 0.0, vec![])) };
        let (p, h) = (self.job.precision, s.hidden as f64);
        // Each rank of tp routes its tokens; those of etp see what all of them route.
        let own = self.tokens() / l.tp as f64 * x.top_k as f64;
        let copies = own * l.etp as f64;
        let local = (x.experts as f64 / l.ep as f64).max(1.0);
        let (m, width) = (copies / local, x.ffn as f64 / l.etp as f64);
        let up = Gemm { m, n: (s.mlp_products() - 1.0) * width, k: h, batch: local };
        let down = Gemm { m, n: h, k: width, batch: local };
        let mut out = Times::default();
        let seconds = |g: Gemm| match self.job.attention {
            Kernels::Own => g.seconds_then(d, p, 0.0),
            _library => g.seconds(d, p),
        };
        for g in [up, down] {
            out.forward.products += seconds(g)?;
            out.input.products += seconds(g.input_gradient())?;
            out.weight.products += seconds(g.weight_gradient())?;
        }
        let wide = p.wide().bytes();
        let group = l.ep_group(d);
        let copies_out = x.domains.map_or(x.top_k, |n| n.min(x.top_k)) as f64 / x.top_k as f64;
        let move_all =
            |bytes: f64| all_to_all(d, group, own * h * bytes * copies_out, own * h * bytes);
        let (sent, back) = (move_all(p.bytes()), move_all(wide));
        let both = sent + back;
        let work = out.all().work() / 2.0;
        let routed = self.stack.experts;
        out.forward.ep = match self.job.overlap.ep {
            true => exposed_at_least(routed.seen, both, work),
            false => both,
        };
        out.input.ep = out.forward.ep;
        // Copies are put in order and back.
        out.forward.memory = rows(d, routed.moves * wide * copies * h, 4.0);
        out.input.memory = out.forward.memory;
        Ok((out, copies * width, vec![up, down]))
    }

    /// Seconds to compute modules of a layer again.
    fn modules(&self, m: Modules, dense: bool) -> Result<f64> {
        let (d, p, l) = (self.device, self.job.precision, self.layout);
        let mut out = 0.0;
        if let Some(x) = self.sizes.latent.filter(|_| m.latents) {
            let all = self.mixer_block(Mixer::Attention).products;
            let up = &all[1..all.len() - 1];
            // Without a vector for queries these come from what enters.
            let from = usize::from(x.query_rank.is_none());
            for g in &up[from..] {
                out += g.seconds(d, p)? + rows(d, 2.0 * p.wide().bytes() * g.m * g.n, 1.0);
            }
        }
        if dense || m.experts == Anew::Nothing {
            return Ok(out);
        }
        let (experts, _, _) = self.experts()?;
        out += experts.forward.products;
        if m.experts == Anew::All {
            out += experts.forward.total() - experts.forward.products;
            let shared = self.sizes.experts.map_or(0, |x| x.shared);
            if shared > 0 {
                out += self.block(&self.mlp_block(shared), p)?.forward.total();
            }
        }
        let width = self.sizes.experts.map_or(0, |x| x.top_k * x.ffn) as f64 / l.tp as f64;
        Ok(out + rows(d, self.rows().ffn * self.tokens() * width, 1.0))
    }

    /// Seconds in which the host starts the launches of a layer's forward, of which so many are products.
    fn host(&self, products: usize, dense: bool) -> f64 {
        let (routed, s) = (self.stack.experts, self.sizes);
        let experts = s.experts.filter(|_| !dense).map_or(0.0, |x| {
            let local = (x.experts as f64 / self.layout.ep as f64).max(1.0);
            routed.launches + routed.each * local
        });
        self.stack.host * (self.rows().launches + products as f64 + 1.0 + experts)
    }

    /// A layer with dense MLP, or with experts; in the mean, if layers mix tokens in several ways.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn layer(&self, dense: bool) -> Result<Times> {
        match self.sizes.mixers()[..] {
            [(_, only)] => self.layer_with(only, dense),
            ref all => all.iter().try_fold(Times::default(), |sum, (share, m)| {
                Ok(sum + self.layer_with(*m, dense)? * *share)
            }),
        }
    }

    fn layer_with(&self, m: Mixer, dense: bool) -> Result<Times> {
        let (s, p) = (self.sizes, self.job.precision);
        let between = match m {
            Mixer::Attention => self.attention()?,
            Mixer::Scan(x) => self.scan(x)?,
            Mixer::Nothing => Times::default(),
        };
        let (mut all, mut out) = (vec![], between);
        if m != Mixer::Nothing {
            let block = self.mixer_block(m);
            out = self.block(&block, p)? + between;
            all = block.products;
        }
        let mut elements = 0.0;
        let width = match s.experts {
            Some(x) if !dense => x.shared,
            _ => s.ffn,
        };
        if width > 0 {
            let mlp = self.mlp_block(width);
            out = out + self.block(&mlp, p)?;
            all.extend(&mlp.products);
            elements += self.tokens() * width as f64 / self.layout.tp as f64;
        }
        if !dense {
            let (experts, more, products) = self.experts()?;
            out = out + experts;
            all.extend(products);
            elements += more;
        }
        let (forward, backward) = self.casts(&all);
        let mut moved = self.over_rows(m, elements, forward);
        moved.input.memory += rows(self.device, backward - self.rows().backward * forward, 0.0);
        out = out + moved;
        let (own, of_experts) = self.layer_params(dense);
        out.weight.memory += self.accumulated(own + of_experts);
        out.input.recompute += match self.layout.recompute {
            Recompute::None => 0.0,
            Recompute::Selective => between.forward.total(),
            Recompute::Ops => out.forward.products / 2.0 + out.forward.memory,
            Recompute::Modules(m) => self.modules(m, dense)?,
            again => again.whole() * out.forward.total(),
        };
        let host = self.host(all.len(), dense);
        out.forward.host = (host - out.forward.total()).max(0.0);
        let backward = out.input.total() + out.weight.total();
        out.input.host = (2.0 * host - backward).max(0.0);
        Ok(out)
    }

    /// The embedding.
    pub fn embedding(&self) -> Times {
        let (l, d) = (self.layout, self.device);
        let mut out = Times::default();
        out.forward.memory = rows(d, 2.0 * self.stream() / self.by_row(), 1.0);
        out.weight.memory = rows(d, 3.0 * self.stream() / self.by_row(), 1.0);
        out.weight.memory += self.accumulated(self.sizes.embedding_params() / l.tp as f64);
        let kind = if l.sp { Kind::ReduceScatter } else { Kind::AllReduce };
        out.forward.tp = seconds(d, kind, l.tp_group(d), self.stream());
        if l.sp {
            out.weight.tp = seconds(d, Kind::AllGather, l.tp_group(d), self.stream());
        }
        out
    }

    /// Logits and loss, which stay out of fp8.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn head(&self) -> Result<Times> {
        let (l, d, wide) = (self.layout, self.device, self.job.precision.wide());
        let vocab = self.sizes.vocab as f64 / l.tp as f64;
        let logits = Gemm::new(self.tokens(), vocab, self.sizes.hidden as f64);
        let block = Block { products: vec![logits], enters: 0, leaves: 0 };
        let mut out = self.block(&block, wide)?;
        let moved = rows(d, self.rows().loss * self.tokens() * vocab, 8.0);
        out.forward.memory += 0.4 * moved;
        out.input.memory += 0.6 * moved;
        out.weight.memory += self.accumulated(self.sizes.embedding_params() / l.tp as f64);
        if l.tp > 1 {
            // Nothing is summed after logits, which stay cut: the largest and the sum of exponentials are.
            let sums = seconds(d, Kind::AllReduce, l.tp_group(d), 12.0 * self.tokens());
            let kind = if l.sp { Kind::AllGather } else { Kind::AllReduce };
            let time = seconds(d, kind, l.tp_group(d), self.stream());
            out.forward.tp = sums + if l.sp { time } else { 0.0 };
            out.input.tp = if l.sp { 2.0 * time } else { time };
        }
        Ok(out)
    }

    /// Parameters of a layer on a rank, without those of experts; and of experts.
    pub fn layer_params(&self, dense: bool) -> (f64, f64) {
        let (s, l) = (self.sizes, self.layout);
        let own = s.layer_params(dense) / l.tp as f64;
        let experts = if dense { 0.0 } else { s.expert_params() / (l.ep * l.etp) as f64 };
        (own, experts)
    }
}
