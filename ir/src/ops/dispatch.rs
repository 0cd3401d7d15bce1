//! `dispatch`: copies of tokens into the buffers of experts; the mirror of `unpermute`.

use super::*;
use crate::attr::Sizes;

op! {
    /// Copies tokens to the buffers of experts: row `slot` of the result is the token for which `slot`
    /// `[z,t,k]` names this row, times its gate, from x `[z,t,h]` to `[g,z,c,h]`. No two copies have the same
    /// slot. A copy whose slot is -1, or outside the buffer, is dropped. Rows that no slot names are undefined
    /// and must not be read: a model that does, in forward or in a gradient, is refused.
    Dispatch = "dispatch" (x, slot, gates) { sizes: Sizes }
    facts { kind: Copies, fusion: None, precision: Wants::Gated, gradient: Flows, linear: Linear::Each(0b101) }
    samples ["dispatch[g=2,c=3] f32[2,3,4], i32[2,3,2], f32[2,3,2]"]
}

impl Dispatch {
    pub fn new(groups: usize, rows: usize) -> Dispatch {
        let sizes = smallvec::smallvec![(Letter(b'g' - b'a'), groups), (Letter(b'c' - b'a'), rows)];
        Dispatch { sizes: Sizes(sizes) }
    }
}

/// Checks x `[z,t,h]` or rows `[g,z,c,h]` and slots, with or without gates.
pub(crate) fn accepts(ins: &[&Type], ranks: [usize; 3]) -> Result<(), String> {
    if ins.len() != 3 || ins.iter().zip(ranks).any(|(t, n)| t.rank() != n) {
        return Err(format!("three operands of {ranks:?} dims are needed"));
    }
    if !ins[0].dtype.is_float() || ins[1].dtype != DType::I32 || !ins[2].dtype.is_float() {
        return Err("floats and i32 slots are needed".into());
    }
    Ok(())
}

/// Calls `f(z, t, k, group, row)` for every copy whose slot names a row of a buffer `[g,z,c,h]`.
pub(crate) fn each_copy(
    slot: &Tensor,
    buffer: &[usize],
    mut f: impl FnMut(usize, usize, usize, usize, usize),
) {
    let (groups, rows) = (buffer[0], buffer[2]);
    crate::tensor::each_index(&slot.shape, |i| {
        let s = slot.at(i);
        if s >= 0.0 && s < (groups * rows) as f64 {
            f(i[0], i[1], i[2], s as usize / rows, s as usize % rows);
        }
    });
}

impl OpDef for Dispatch {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        accepts(ins, [3, 3, 3])?;
        if self.sizes.0.len() != 2 {
            return Err("give groups and rows of a group, as in `g=2,c=4`".into());
        }
        Ok(())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("z!th,zt!k,ztk->!gz!ch", &[3, 3, 3])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let x =
            b.wants(ins[0]).then(|| b.push("dispatch_grad", Unpermute {}, &[d, ins[1], ins[2]]));
        let gates =
            b.wants(ins[2]).then(|| b.push("gates", CombineGatesGrad {}, &[d, ins[1], ins[0]]));
        smallvec::smallvec![x, None, gates]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        // NaN is what nobody may read.
        let mut out = Tensor::full(&cx.out_shape(0), f64::NAN);
        let buffer = out.shape.clone();
        each_copy(ins[1], &buffer, |z, t, k, g, c| {
            for h in 0..buffer[3] {
                *out.at_mut(&[g, z, c, h]) = ins[0].at(&[z, t, h]) * ins[2].at(&[z, t, k]);
            }
        });
        vec![out]
    }
}
