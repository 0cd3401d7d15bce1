//! What becomes of a product in `gemm.cu`, printed: a struct `Then` of the tensors that an epilogue reads
//! and writes, with a function of adjacent elements of a row of the product.

use super::{Words, rows, whole};
use shardc_ir::kernel::{Matrix, Rows, Scalar, Then};
use std::fmt::Write as _;

/// What it reads, then what it writes.
fn tensors(k: &Then) -> impl Iterator<Item = &Matrix> + Clone {
    k.reads.iter().chain(&k.writes)
}

/// The struct, for as many loops as `BATCHES` says.
pub(super) fn print(k: &Then) -> String {
    let program = &k.blocks[0];
    let all: Vec<&Matrix> = tensors(k).collect();
    let of = all.len();
    let mut out = format!(
        "#include \"rows.cuh\"
struct Then {{
    char* m[{of}];
    i64 row[{of}], col[{of}], batch[{of}][BATCHES];
    // Goes to a row and a column of a result.
    DEVICE void move(u32 at, const i64 (&sizes)[BATCHES], i64 r, i64 c) {{\n"
    );
    for (i, x) in all.iter().enumerate() {
        let at = format!("walk(at, sizes, batch[{i}]){}", place(i, x));
        let _ = writeln!(out, "        m[{i}] += ({at}) * {};", x.elem.bytes());
    }
    out += "    }
    // What becomes of adjacent elements of a row, from a column on.
    DEVICE void take(int r, int c, const float (&product)[WIDTH]) const {\n";
    for (i, x) in all.iter().enumerate() {
        let (name, ty, at) = (name(k, i), x.elem.facts().cuda, place(i, x));
        let _ = writeln!(out, "        {ty}* const {name} = ({ty}*)m[{i}]{at};");
    }
    for (i, x) in k.reads.iter().enumerate() {
        let (ty, n) = (x.elem.facts().cuda, if x.col_stride == 0 { "1" } else { "WIDTH" });
        let _ = writeln!(out, "        const Pack<{ty}, {n}> e{i} = load<{n}>(x{i});");
    }
    let results: Vec<String> = (0..k.writes.len()).map(|i| format!("z{i}[WIDTH]")).collect();
    let _ = writeln!(out, "        float {};", results.join(", "));
    out += "        #pragma unroll\n        for (int k = 0; k < WIDTH; k++) {\n";
    body(&mut out, k, program);
    out += "        }\n";
    for i in 0..k.writes.len() {
        let _ = writeln!(out, "        store_all(y{i}, z{i});");
    }
    out + "    }\n};\n"
}

/// How far from a tensor's first element that of a row and a column is.
fn place(i: usize, x: &Matrix) -> String {
    let term = |index: &str, stride: usize, name: &str| match stride {
        0 => String::new(),
        1 => format!(" + {index}"),
        _ => format!(" + {index} * {name}[{i}]"),
    };
    term("r", x.row_stride, "row") + &term("c", x.col_stride, "col")
}

/// The instructions of an element.
fn body(out: &mut String, k: &Then, program: &Rows) {
    let load = |l: usize| match l.checked_sub(1) {
        None => "product[k]".to_string(),
        Some(i) if k.reads[i].col_stride == 0 => format!("e{i}.at[0]"),
        Some(i) => format!("e{i}.at[k]"),
    };
    for i in 0..program.body.len() {
        assert!(!matches!(program.body[i], Scalar::Param(_)), "an epilogue has no parameters");
        let _ = writeln!(out, "            {}", rows::line(program, i, "0", load));
    }
    for (i, s) in program.stores.iter().enumerate() {
        let _ = writeln!(out, "            z{i}[k] = v{};", s.value);
    }
}

fn name(k: &Then, tensor: usize) -> String {
    match tensor.checked_sub(k.reads.len()) {
        None => format!("x{tensor}"),
        Some(i) => format!("y{i}"),
    }
}

/// Parameters of the struct.
pub(super) fn words(k: &Then, w: &mut Words) {
    tensors(k).for_each(|x| w.view(&x.view, x.elem));
    tensors(k).for_each(|x| w.int(x.row_stride));
    tensors(k).for_each(|x| w.int(x.col_stride));
    // Loops, or one of one step.
    let one: &[usize] = if k.product.batch.is_empty() { &[0] } else { &[] };
    tensors(k).for_each(|x| {
        w.ints(&x.view.strides);
        w.ints(one);
    });
}

/// Bytes that are read and written for an element of the result.
pub(super) fn bytes(k: &Then) -> usize {
    let own = tensors(k).filter(|x| x.row_stride != 0 && x.col_stride != 0);
    own.map(|x| x.elem.bytes()).sum()
}

/// Whether so many elements of a row are adjacent and begin at multiples of so many, in all tensors that do
/// not have one for the whole row.
pub(super) fn wide(k: &Then, width: usize) -> bool {
    let same = |x: &Matrix| x.col_stride == 0;
    let fits =
        |x: &Matrix| x.col_stride == 1 && whole(width, k.product.n, &x.view, &[x.row_stride]);
    k.reads.iter().all(|x| same(x) || fits(x)) && k.writes.iter().all(fits)
}
