//! `scan_grad`: gradients of `scan`, token by token from the last.

use super::scan::{self, DeltaRule, STATES, ScanOperands, Walk};
use super::*;
use crate::attr::Sizes;
use crate::kernel::Recurrent;

op! {
    /// The gradients of q, k, g, v, and of beta and start if there are such, of the `scan` with the same attributes;
    /// behind v stand the cotangents `d_o` of the outputs and `d_end` of the last state, then the scan's other operands.
    /// Linear in both. With G the cotangent of the state behind a token, P the decayed state before it and
    /// u = v - Pᵀ κ: G gains q d_oᵀ; then d_q = S d_o, d_v = β Gᵀ κ, d_β = κᵀ G u, d_κ = β G u - P d_v, and of P it is
    /// G - κ d_vᵀ, whose product with P is d_g; by the plain rule β is 1, u is v and P is not read. Kernels keep the state
    /// of every chunk of tokens, not of every token.
    ScanGrad = "scan_grad" (q, k, g, v, d_o, d_end, beta, segments, start) { delta: DeltaRule, segments: bool, start: bool, pieces: Sizes }
    facts { kind: Recurrence, fusion: None, precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::Together(1 << 4 | 1 << 5) }
    samples [
        "scan_grad[plain] f32[2,5,2,3], f32[2,5,2,3], f32[2,5,2], f32[2,5,2,4], f32[2,5,2,4], f32[2,2,3,4]",
        "scan_grad[delta] f32[2,5,2,3], f32[2,5,2,3], f32[2,5,2], f32[2,5,2,4], f32[2,5,2,4], f32[2,2,3,4], f32[2,5,2]",
        "scan_grad[plain; start=true] f32[2,5,2,3], f32[2,5,2,3], f32[2,5,2], f32[2,5,2,4], f32[2,5,2,4], f32[2,2,3,4], f32[2,2,3,4]",
        "scan_grad[delta; segments=true; start=true] f32[2,6,2,3], f32[2,6,2,3], f32[2,6,2], f32[2,6,2,2], f32[2,6,2,2], f32[2,2,3,2], f32[2,6,2], i32[2,6], f32[2,2,3,2]",
        "scan_grad[plain; c=2] f32[2,4,2,3], f32[2,4,2,3], f32[2,4,2], f32[2,4,2,4], f32[2,4,2,4], f32[2,2,2,3,4]",
        "scan_grad[delta; segments=true; start=true; c=2] f32[2,6,2,3], f32[2,6,2,3], f32[2,6,2], f32[2,6,2,2], f32[2,6,2,2], f32[2,2,2,3,2], f32[2,6,2], i32[2,6], f32[2,2,2,3,2]",
    ]
}

impl ScanGrad {
    /// The scan whose gradients these are.
    pub fn forward(&self) -> Scan {
        let ScanGrad { delta, pieces, segments, start } = self.clone();
        Scan { delta, pieces, segments, start }
    }
    /// Where the operands behind the cotangents stand.
    pub fn behind(&self) -> ScanOperands {
        ScanOperands::new(6, &self.forward())
    }
    fn operands(&self) -> (String, Vec<usize>) {
        self.forward().operands(&[("b!snv", 4), (STATES, 4)])
    }
}

/// As [`scan::flops_of`], backward: of `scan` the states of chunks and what is written to them again; then two products
/// for each of its own.
pub fn flops_of(delta: bool, c: f64, k: f64, v: f64) -> f64 {
    match delta {
        false => c * (6.0 * k + 4.0 * v) + 10.0 * k * v,
        true => c * (14.0 * k + 9.0 * v) + 18.0 * k * v,
    }
}

impl OpDef for ScanGrad {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        self.forward().takes(ins, &self.operands().1, self.behind())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let (text, ranks) = self.operands();
        let mut outs = "bsnk,bsnk,bsn,bsnv".to_string();
        outs += if self.delta.0 { ",bsn" } else { "" };
        outs += if self.start { ",bnkv" } else { "" };
        Rule::known(&(text + "->" + &self.forward().letters(&outs)), &ranks)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        scan::flops(loops, |c, k, v| flops_of(self.delta.0, c, k, v))
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; ins.len()]
    }
    fn dtypes(&self, _: &[&Type], outs: usize) -> SmallVec<[DType; 2]> {
        std::iter::repeat_n(DType::F32, outs).collect()
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], _: &[&Type]) -> usize {
        Recurrent::room(true, self.forward().room(mesh, ins))
    }
    fn settle(&self, _: &[Type], drawn: &mut [Tensor]) {
        Scan::suit(self.behind(), drawn);
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let outs = 4 + usize::from(self.delta.0) + usize::from(self.start);
        let shapes: Vec<_> = (0..outs).map(|o| cx.out_shape(o)).collect();
        let rows = self.forward().rows(ins, &ins[5].shape);
        let ins = &rows.iter().collect::<Vec<_>>()[..];
        let behind = self.behind();
        // Each result is like an operand.
        let like = [Some(0), Some(1), Some(2), Some(3), behind.beta, behind.start];
        let like = like.into_iter().flatten();
        let mut made: Vec<Tensor> = like.map(|i| Tensor::full(&ins[i].shape, 0.0)).collect();
        let width = ins[3].shape[3];
        let of_state = |t: &Tensor, b: usize, n: usize| -> Vec<f64> {
            (0..t.shape[2]).flat_map(|d| t.row(&[b, n, d]).to_vec()).collect()
        };
        let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let rows = ins[1].shape[3];
        let times = |m: &[f64], x: &[f64]| -> Vec<f64> {
            (0..rows).map(|d| product(&m[d * width..][..width], x)).collect()
        };
        scan::each_head(ins[3], |b, n| {
            let walk = Walk { delta: self.delta.0, ins, behind, b, n };
            let mut state = walk.start();
            let mut before = vec![];
            for t in 0..ins[3].shape[1] {
                let token = walk.decayed(&mut state, t);
                before.push((state.clone(), token));
                let written = &before[t].1.written;
                Walk::add(&mut state, walk.of(1, t), written);
            }
            let mut d_state = of_state(ins[5], b, n);
            for (t, (old, token)) in before.iter().enumerate().rev() {
                let at = [b, t, n];
                let (q, key, d_o) = (walk.of(0, t), walk.of(1, t), ins[4].row(&at));
                let mut new = old.clone();
                Walk::add(&mut new, key, &token.written);
                made[0].row_mut(&at).copy_from_slice(&times(&new, d_o));
                Walk::add(&mut d_state, q, d_o);
                let of_key = Walk::columns(&d_state, key, width);
                let d_v: Vec<f64> = of_key.iter().map(|x| walk.beta(t) * x).collect();
                let mut d_key = times(&d_state, &token.written);
                if self.delta.0 {
                    *made[4].at_mut(&at) = product(&of_key, &token.error);
                    let less = times(old, &d_v);
                    d_key.iter_mut().zip(less).for_each(|(d, x)| *d -= x);
                    let minus: Vec<f64> = key.iter().map(|x| -x).collect();
                    Walk::add(&mut d_state, &minus, &d_v);
                }
                made[1].row_mut(&at).copy_from_slice(&d_key);
                made[3].row_mut(&at).copy_from_slice(&d_v);
                *made[2].at_mut(&at) = product(&d_state, old);
                d_state.iter_mut().for_each(|x| *x *= token.decay);
            }
            if self.start {
                let last = made.last_mut().expect("that of start");
                for (d, row) in d_state.chunks(width.max(1)).enumerate() {
                    last.row_mut(&[b, n, d]).copy_from_slice(row);
                }
            }
        });
        made.iter().zip(&shapes).map(|(t, shape)| t.reshape(shape)).collect()
    }
}
