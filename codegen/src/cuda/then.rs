//! What becomes of a product in `gemm.cu`, printed: a struct `Then` of the tensors that an epilogue reads
//! and writes, with a function of two adjacent elements of the product.

use super::{Words, rows, type_name, whole};
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
    // What becomes of the elements of a row from a column on, `count` of them.
    DEVICE void take(int r, int c, int count, const float (&product)[2]) const {\n";
    for (i, x) in all.iter().enumerate() {
        let (name, ty, at) = (name(k, i), type_name(x.elem), place(i, x));
        let _ = writeln!(out, "        {ty}* const {name} = ({ty}*)m[{i}]{at};");
    }
    for (i, x) in k.reads.iter().enumerate() {
        let lie = Lie::of(k, x);
        let (ty, n) = (type_name(x.elem), if lie == Lie::Same { 1 } else { 2 });
        let load = match lie {
            Lie::Same | Lie::Pairs => format!("load<{n}>(x{i})"),
            Lie::Apart => format!("load_some<2>(x{i}, col[{i}], count)"),
        };
        let _ = writeln!(out, "        const Pack<{ty}, {n}> e{i} = {load};");
    }
    let results: Vec<String> = (0..k.writes.len()).map(|i| format!("z{i}[2]")).collect();
    let _ = writeln!(out, "        float {};", results.join(", "));
    out += "        #pragma unroll\n        for (int k = 0; k < 2; k++) {\n";
    body(&mut out, k, program);
    out += "        }\n";
    for (i, x) in k.writes.iter().enumerate() {
        let store = match Lie::of(k, x) {
            Lie::Pairs => format!("store_all(y{i}, z{i})"),
            Lie::Same | Lie::Apart => {
                format!("store_some(y{i}, col[{}], count, z{i})", k.reads.len() + i)
            }
        };
        let _ = writeln!(out, "        {store};");
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
        Some(i) if Lie::of(k, &k.reads[i]) == Lie::Same => format!("e{i}.at[0]"),
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

/// How two elements of a row lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lie {
    /// They are one.
    Same,
    /// All pairs are adjacent, and begin at multiples of their size.
    Pairs,
    Apart,
}

impl Lie {
    fn of(k: &Then, x: &Matrix) -> Lie {
        match x.col_stride {
            0 => Lie::Same,
            1 if whole(2, k.product.n, &x.view, &[x.row_stride]) => Lie::Pairs,
            _apart => Lie::Apart,
        }
    }
}
