//! What element-wise ops do to one element: a short program.

use shardc_ir::kernel::{Binary, Scalar, Unary};
use shardc_ir::ops::{AdamW, Op, Sgd};
use smallvec::{SmallVec, smallvec};

/// Writes the program of a row.
#[derive(Default)]
pub(crate) struct Body(pub Vec<Scalar>);

/// Instructions with the results of an op.
pub(crate) type Results = SmallVec<[usize; 3]>;

impl Body {
    /// Appends an instruction, unless the same is there.
    pub fn push(&mut self, s: Scalar) -> usize {
        if let Some(i) = self.0.iter().position(|x| *x == s) {
            return i;
        }
        self.0.push(s);
        self.0.len() - 1
    }
    pub fn constant(&mut self, x: f64) -> usize {
        self.push(Scalar::Const(x as f32))
    }
    pub fn unary(&mut self, f: Unary, x: usize) -> usize {
        self.push(Scalar::Unary(f, x))
    }
    pub fn binary(&mut self, f: Binary, x: usize, y: usize) -> usize {
        self.push(Scalar::Binary(f, x, y))
    }
    pub fn add(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Add, x, y)
    }
    pub fn sub(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Sub, x, y)
    }
    pub fn mul(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Mul, x, y)
    }
    pub fn div(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Div, x, y)
    }
    /// The operands folded from the left.
    pub fn chain(&mut self, f: Binary, x: &[usize]) -> usize {
        x[1..].iter().fold(x[0], |a, &b| self.binary(f, a, b))
    }
}

/// Appends what an element-wise op does to elements `x` of its operands; `None` if it is none.
pub(crate) fn each(op: &Op, b: &mut Body, x: &[usize]) -> Option<Results> {
    let by = |b: &mut Body, f: Binary, c: f64| {
        let c = b.constant(c);
        b.binary(f, x[0], c)
    };
    let one = match op {
        Op::Add(_) => b.chain(Binary::Add, x),
        Op::Sub(_) => b.chain(Binary::Sub, x),
        Op::Mul(_) => b.chain(Binary::Mul, x),
        Op::Div(_) => b.chain(Binary::Div, x),
        Op::Scale(o) => by(b, Binary::Mul, o.by),
        Op::Shift(o) => by(b, Binary::Add, o.by),
        Op::AtLeast(o) => by(b, Binary::AtLeast, o.bound),
        Op::Exp(_) => b.unary(Unary::Exp, x[0]),
        Op::Log(_) => b.unary(Unary::Log, x[0]),
        Op::Sqrt(_) => b.unary(Unary::Sqrt, x[0]),
        Op::Rsqrt(_) => b.unary(Unary::Rsqrt, x[0]),
        Op::Tanh(_) => b.unary(Unary::Tanh, x[0]),
        Op::Logistic(_) => b.unary(Unary::Logistic, x[0]),
        Op::Silu(_) => b.unary(Unary::Silu, x[0]),
        Op::Gelu(_) => b.unary(Unary::Gelu, x[0]),
        Op::Sin(_) => b.unary(Unary::Sin, x[0]),
        Op::Cos(_) => b.unary(Unary::Cos, x[0]),
        Op::Clamp(o) => {
            let (lo, hi) = (b.constant(o.lo), b.constant(o.hi));
            let low = b.binary(Binary::Max, x[0], lo);
            b.binary(Binary::Min, low, hi)
        }
        Op::Fill(o) => b.constant(o.value),
        Op::Cast(_) | Op::Expand(_) | Op::StopGradient(_) | Op::FanOut(_) | Op::ToPartial(_) => {
            x[0]
        }
        Op::MergeAttention(_) => return Some(merge_attention(b, x)),
        Op::AdamW(o) => return Some(adamw(b, o, x)),
        Op::Sgd(o) => sgd(b, o, x),
        // Over no letter; others are folds.
        Op::Dot(_) => b.chain(Binary::Mul, x),
        Op::ReduceSum(_) | Op::ReduceMax(_) => x[0],
        Op::Take(_) | Op::Put(_) => return None,
        Op::Literal(_)
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::ToVarying(_)
        | Op::FromVarying(_) => {
            return None;
        }
        Op::Concat(_) | Op::Narrow(_) | Op::Widen(_) | Op::Rope(_) => return None,
        Op::Attention(_) | Op::AttentionGrad(_) | Op::TopK(_) | Op::Route(_) => return None,
        Op::Dispatch(_) | Op::Combine(_) | Op::RowDots(_) => return None,
        Op::GroupedDot(_) | Op::GroupedDotT(_) | Op::GroupedOuter(_) => return None,
        Op::AllReduce(_) | Op::AllGather(_) | Op::ReduceScatter(_) | Op::Broadcast(_) => {
            return None;
        }
        Op::Reduce(_) | Op::Slice(_) | Op::Place(_) | Op::Piece(_) => return None,
        Op::AllToAll(_) | Op::AllToAllV(_) | Op::Permute(_) => return None,
    };
    Some(smallvec![one])
}

/// One step of AdamW: `param - lr (decay · param + m / c1 / (√(v / c2) + eps))`.
fn adamw(b: &mut Body, op: &AdamW, x: &[usize]) -> Results {
    let (p, m, v, lr, step) = (x[0], x[2], x[3], x[4], x[5]);
    let g = b.mul(x[1], x[6]);
    let moment = |b: &mut Body, old, beta: f64, new| {
        let log = b.constant(beta.ln());
        let (beta, rest) = (b.constant(beta), b.constant(1.0 - beta));
        let (x, y) = (b.mul(old, beta), b.mul(new, rest));
        // 1 - beta^step, without the cancellation of the first steps.
        let exponent = b.mul(step, log);
        let (power, minus) = (b.unary(Unary::ExpM1, exponent), b.constant(-1.0));
        (b.add(x, y), b.mul(power, minus))
    };
    let (m, c1) = moment(b, m, op.beta1, g);
    let g2 = b.mul(g, g);
    let (v, c2) = moment(b, v, op.beta2, g2);
    let (m_hat, v_hat) = (b.div(m, c1), b.div(v, c2));
    let (root, eps) = (b.unary(Unary::Sqrt, v_hat), b.constant(op.eps));
    let below = b.add(root, eps);
    let update = b.div(m_hat, below);
    let decay = b.constant(op.decay);
    let decayed = b.mul(p, decay);
    let sum = b.add(decayed, update);
    let change = b.mul(lr, sum);
    smallvec![b.sub(p, change), m, v]
}

/// One step of stochastic gradient descent.
fn sgd(b: &mut Body, op: &Sgd, x: &[usize]) -> usize {
    let decay = b.constant(op.decay);
    let (g, p_decay) = (b.mul(x[1], x[3]), b.mul(x[0], decay));
    let sum = b.add(g, p_decay);
    let change = b.mul(x[2], sum);
    b.sub(x[0], change)
}

/// Operands out and lse over some keys, then over others; results out and lse over all of them. The
/// larger lse is bounded from below: then one of -inf weighs 0, and no difference of infinities
/// arises. The weights sum to at least 1 but where both are -inf, and there the output is 0.
fn merge_attention(b: &mut Body, x: &[usize]) -> Results {
    let (out_a, lse_a, out_b, lse_b) = (x[0], x[1], x[2], x[3]);
    let lowest = b.constant(f64::from(f32::MIN));
    let most = b.binary(Binary::Max, lse_a, lse_b);
    let most = b.binary(Binary::Max, most, lowest);
    let [weight_a, weight_b] = [lse_a, lse_b].map(|lse| {
        let below = b.sub(lse, most);
        b.unary(Unary::Exp, below)
    });
    let sum = b.add(weight_a, weight_b);
    let (part_a, part_b) = (b.mul(out_a, weight_a), b.mul(out_b, weight_b));
    let (parts, one) = (b.add(part_a, part_b), b.constant(1.0));
    let by = b.binary(Binary::Max, sum, one);
    let log = b.unary(Unary::Log, sum);
    smallvec![b.div(parts, by), b.add(most, log)]
}
