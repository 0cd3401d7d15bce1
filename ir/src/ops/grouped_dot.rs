//! `grouped_dot`: every row times the weight of its expert; `grouped_dot_t`: times the transposed weight;
//! `grouped_outer`: sums of outer products by expert, the gradient of the weights.

use super::*;

/// Checks two floats of these ranks around i32 counts `[g,e,z]`.
fn accepts(ins: &[&Type], ranks: [usize; 2]) -> Result<(), String> {
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
fn workspace(mesh: &Mesh, x: &Type, y: &Type, w: &Type) -> usize {
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
fn each_row(counts: &Tensor, rows: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
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
fn flops(loops: &[(Letter, f64)]) -> f64 {
    let of = |c: char| loops.iter().find(|l| l.0.name() == c).map_or(1.0, |l| l.1);
    2.0 * "gzcio".chars().map(of).product::<f64>()
}

/// Declares products of experts: beside what [`op!`] takes, their rule with the ranks of both floats, which of operands
/// and result are rows and rows and weights, the gradient's ops for the first and the last operand, with the operands of each
/// (of `a`, counts `n`, `b` and cotangent `d`), what the result is before rows are added, and what a row of expert
/// `e` adds.
macro_rules! grouped {
    ($($(#[doc = $doc:literal])* $op:ident = $name:literal ($a:ident, $b:ident) $rule:literal $ranks:expr, samples [$sample:literal]
       workspace |$w:ident, $out:ident| $shape:expr;
       grad |$ga:ident, $n:ident, $gb:ident, $d:ident| $first:ident $of_first:expr, $last:ident $of_last:expr;
       eval $start:expr, |$x:ident, $y:ident, $to:ident, $row:ident, $e:ident| $add:expr;)*) => {$(
        op! {
            $(#[doc = $doc])*
            $op = $name ($a, counts, $b) {}
            facts { kind: GroupedProduct, fusion: None, precision: Wants::Half, gradient: Flows, linear: Linear::Each(0b101) }
            samples [$sample]
        }
        impl OpDef for $op {
            fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
                accepts(ins, $ranks)
            }
            fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
                Rule::known($rule, &[$ranks[0], 3, $ranks[1]])
            }
            fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
                flops(loops)
            }
            fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
                let Some($d) = d[0] else { return smallvec::smallvec![None; 3] };
                let [$ga, $n, $gb] = [ins[0], ins[1], ins[2]];
                let first = b.wants($ga).then(|| b.push("grouped_grad", $first {}, &$of_first));
                let last = b.wants($gb).then(|| b.push("grouped_grad", $last {}, &$of_last));
                smallvec::smallvec![first, None, last]
            }
            fn workspace(&self, mesh: &Mesh, $w: &[&Type], outs: &[&Type]) -> usize {
                let $out = outs[0];
                let [x, y, w] = $shape;
                workspace(mesh, x, y, w)
            }
            fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
                let [$x, counts, $y] = [ins[0], ins[1], ins[2]];
                let mut $to = Tensor::full(&cx.out_shape(0), $start);
                each_row(counts, $x.shape[2], |g, e, z, c| {
                    let ($row, $e) = (&[g, z, c], g * counts.shape[1] + e);
                    $add
                });
                vec![$to]
            }
        }
    )*};
}

// NaN is what nobody may read.
grouped! {
    /// Rows `[g,z,c,i]` times the weights `[(g e),o,i]` of their experts: `[g,z,c,o]`. A buffer has the rows of
    /// expert 0 first, then those of expert 1, and so on, as many as `counts` `[g,e,z]` says; the remaining
    /// rows are undefined, here and in the result, and are not read.
    GroupedDot = "grouped_dot" (x, w) "gz!ci,g!ez,(ge)oi->gzco" [4, 3],
    samples ["grouped_dot f32[2,2,3,4], i32[2,2,2], f32[4,5,4]"]
    workspace |ins, out| [ins[0], out, ins[2]];
    grad |x, n, w, d| GroupedDotT [d, n, w], GroupedOuter [d, n, x];
    eval f64::NAN, |x, w, to, row, e| for (o, to) in to.row_mut(row).iter_mut().enumerate() {
        *to = x.row(row).iter().zip(w.row(&[e, o])).map(|(x, w)| x * w).sum();
    };

    /// Rows `[g,z,c,o]` times the weights `[(g e),o,i]` of their experts, summed over o: `[g,z,c,i]`. Rows and
    /// counts are as in `grouped_dot`.
    GroupedDotT = "grouped_dot_t" (x, w) "gz!co,g!ez,(ge)oi->gzci" [4, 3],
    samples ["grouped_dot_t f32[2,2,3,4], i32[2,2,2], f32[4,4,5]"]
    workspace |ins, out| [ins[0], out, ins[2]];
    grad |x, n, w, d| GroupedDot [d, n, w], GroupedOuter [x, n, d];
    eval f64::NAN, |x, w, to, row, e| {
        to.row_mut(row).fill(0.0);
        for (o, x) in x.row(row).iter().enumerate() {
            add_scaled(to.row_mut(row), *x, w.row(&[e, o]));
        }
    };

    /// For each expert, the sum over its rows of the outer products of `y` `[g,z,c,o]` and `x` `[g,z,c,i]`:
    /// `[(g e),o,i]`. Rows and counts are as in `grouped_dot`.
    GroupedOuter = "grouped_outer" (y, x) "gz!co,g!ez,gzci->(ge)oi" [4, 4],
    samples ["grouped_outer f32[2,2,3,4], i32[2,2,2], f32[2,2,3,5]"]
    workspace |ins, out| [ins[0], ins[2], out];
    grad |y, n, x, d| GroupedDot [x, n, d], GroupedDotT [y, n, d];
    eval 0.0, |y, x, to, row, e| for (o, y) in y.row(row).iter().enumerate() {
        add_scaled(to.row_mut(&[e, o]), *y, x.row(row));
    };
}

/// Adds a row times a number.
fn add_scaled(to: &mut [f64], by: f64, row: &[f64]) {
    to.iter_mut().zip(row).for_each(|(to, x)| *to += by * x);
}
