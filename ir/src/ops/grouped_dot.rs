//! `grouped_dot`: every row times the weight of its expert.

use super::*;

op! {
    /// Rows `[g,z,c,i]` times the weights `[(g e),o,i]` of their experts: `[g,z,c,o]`. A buffer has the rows of
    /// expert 0 first, then those of expert 1, and so on, as many as `counts` `[g,e,z]` says; the remaining
    /// rows are undefined, here and in the result, and are not read.
    GroupedDot = "grouped_dot" (x, counts, w) {}
    facts { kind: GroupedProduct, fusion: None, precision: Wants::Half, gradient: Flows }
    samples ["grouped_dot f32[2,2,3,4], i32[2,2,2], f32[4,5,4]"]
}

/// Checks two floats of these ranks around i32 counts `[g,e,z]`.
pub(crate) fn accepts(ins: &[&Type], ranks: [usize; 2]) -> Result<(), String> {
    if ins.len() != 3 || ins[0].rank() != ranks[0] || ins[2].rank() != ranks[1] {
        return Err(format!("operands of {}, 3 and {} dims are needed", ranks[0], ranks[1]));
    }
    if !ins[0].dtype.is_float() || !ins[2].dtype.is_float() {
        return Err("rows and weights are floats".into());
    }
    if ins[1].rank() != 3 || ins[1].dtype != DType::I32 {
        return Err("`counts` is i32 [g, e, z]".into());
    }
    Ok(())
}

/// Products of rows and weights that are not f32 are made of blocks of at most so many rows and columns.
pub const BLOCK: usize = 512;

/// Rows of an expert that a kernel gathers from the buffers of several shards, for one product
/// instead of many small ones.
pub const ROWS: usize = 128;

/// Bytes of what a kernel has in f32 beside its operands: [`ROWS`] rows of both widths, if there
/// are several shards; or, if the types are not all f32, a block of each tensor. `x` and `y` are
/// rows `[g,z,c,·]`.
pub(crate) fn workspace(mesh: &Mesh, x: &Type, y: &Type, w: &Type) -> usize {
    let shards = x.chunk(mesh, 1);
    let rows = shards.saturating_mul(x.chunk(mesh, 2));
    let widths = [x, y].map(|t| t.chunk(mesh, 3));
    if [x, y, w].iter().all(|t| t.dtype == DType::F32) {
        let gathered = if shards > 1 { rows.min(ROWS) } else { 0 };
        return gathered * (widths[0] + widths[1]) * 4;
    }
    let ([a, b], rows) = (widths.map(|n| n.min(BLOCK)), rows.min(BLOCK));
    (rows * (a + b) + a * b) * 4
}

/// Calls `f(group, expert of the group, shard, row)` for every row that the counts name.
pub(crate) fn each_row(
    counts: &Tensor,
    rows: usize,
    mut f: impl FnMut(usize, usize, usize, usize),
) {
    for g in 0..counts.shape[0] {
        for z in 0..counts.shape[2] {
            let mut row = 0;
            for e in 0..counts.shape[1] {
                let n = counts.at(&[g, e, z]) as usize;
                (row..(row + n).min(rows)).for_each(|c| f(g, e, z, c));
                row += n;
            }
        }
    }
}

/// Multiplications and additions if every row of the buffers is used.
pub(crate) fn flops(loops: &[(Letter, f64)]) -> f64 {
    let of = |c: char| loops.iter().find(|l| l.0.name() == c).map_or(1.0, |l| l.1);
    2.0 * "gzcio".chars().map(of).product::<f64>()
}

impl OpDef for GroupedDot {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        accepts(ins, [4, 3])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("gz!ci,g!ez,(ge)oi->gzco", &[4, 3, 3])
    }
    fn linear(&self) -> Linear {
        Linear::Each(0b101)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        flops(loops)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let [x, n, w] = [ins[0], ins[1], ins[2]];
        let d_x = b.wants(x).then(|| b.push("grouped_grad", GroupedDotT {}, &[d, n, w]));
        let d_w = b.wants(w).then(|| b.push("grouped_grad", GroupedOuter {}, &[d, n, x]));
        smallvec::smallvec![d_x, None, d_w]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], outs: &[&Type]) -> usize {
        workspace(mesh, ins[0], outs[0], ins[2])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [x, counts, w] = [ins[0], ins[1], ins[2]];
        // NaN is what nobody may read.
        let mut out = Tensor::full(&cx.out_shape(0), f64::NAN);
        let experts = counts.shape[1];
        each_row(counts, x.shape[2], |g, e, z, c| {
            let row = x.row(&[g, z, c]);
            for (o, to) in out.row_mut(&[g, z, c]).iter_mut().enumerate() {
                let weights = w.row(&[g * experts + e, o]);
                *to = row.iter().zip(weights).map(|(x, w)| x * w).sum();
            }
        });
        vec![out]
    }
}
