//! Prints kernels over rows as C, for the compiler of the machine they run on.
//!
//! A kernel is one function, `void NAME(char *const *m, const float *p, word from, word to)`: `m` is
//! the memory of its operands, `p` are its parameters, and it does tasks `from..to` of those that
//! [`Rows::tasks`] counts, or the one behind them. Sizes and strides are numbers in the text; what
//! differs between layers and ranks is not, so like layers are one kernel.

mod compile;
mod parts;

pub use compile::compile;

use shardc_ir::kernel::{Binary, CHUNK, COLUMNS, Kernel, Load, Rows, Scalar, Stage, Unary, View};
use shardc_ir::types::{DType, Reduction};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Helpers that the text of every kernel begins with.
pub const HEADER: &str = include_str!("../../c/rows.h");

/// Functions of kernels over rows, each once, by name.
pub struct Functions(BTreeMap<String, String>);

impl Functions {
    /// Those of the kernels over rows of some programs.
    pub fn of<'a>(kernels: impl Iterator<Item = &'a Kernel>) -> Functions {
        let bodies = kernels.flat_map(Kernel::rows).map(text);
        let named = bodies.map(|body| {
            let name = name(&body);
            let text = format!(
                "\nvoid {name}(char *const *m, const float *p, word from, word to) {body}\n"
            );
            (name, text)
        });
        Functions(named.collect())
    }
}

/// The kernels over rows of some programs, each once: one text.
pub fn print<'a>(kernels: impl Iterator<Item = &'a Kernel>) -> String {
    text_of(Functions::of(kernels).0.values().map(String::as_str))
}

/// The text that a compiler is given.
fn text_of<'a>(functions: impl Iterator<Item = &'a str>) -> String {
    std::iter::once(HEADER).chain(functions).collect()
}

/// The name of a kernel's function: it is that of its text.
pub fn symbol(k: &Rows) -> String {
    name(&text(k))
}

fn name(body: &str) -> String {
    format!("rows_{}", &blake3::hash(body.as_bytes()).to_hex()[..16])
}

/// How the elements of a view lie along the loops of the text.
struct StrideWriter<'a> {
    k: &'a Rows,
    out: String,
    /// The loop that vectors run along.
    along: Option<usize>,
}

/// The body of a kernel's function.
fn text(k: &Rows) -> String {
    let columns = k.by_columns();
    let (no, ni) = (k.outer.len(), k.inner.len());
    let along = if columns { Some(no - 1) } else { (ni > 0).then(|| no + ni - 1) };
    let mut w = StrideWriter { k, out: String::new(), along };
    w.line(0, "{");
    w.line(1, "(void)p;");
    w.line(1, "for (word task = from; task < to; task++) {");
    if columns {
        w.columns()
    } else {
        w.rows()
    }
    w.line(1, "}");
    w.line(0, "}");
    w.out
}

pub(crate) fn unary(f: Unary) -> String {
    let name = match f {
        Unary::Round(d) => return format!("f_round_{}", d.name()),
        Unary::Exp => "f_exp",
        Unary::ExpM1 => "f_expm1",
        Unary::Log => "f_log",
        Unary::Sqrt => "f_sqrt",
        Unary::Rsqrt => "f_rsqrt",
        Unary::Tanh => "f_tanh",
        Unary::Logistic => "f_logistic",
        Unary::Silu => "f_silu",
        Unary::Sin => "f_sin",
        Unary::Cos => "f_cos",
        Unary::Erf => "f_erf",
        Unary::Log1P => "f_log1p",
        Unary::Floor => "f_floor",
        Unary::Nearest => "f_nearest",
    };
    name.into()
}

pub(crate) fn binary(f: Binary) -> &'static str {
    match f {
        Binary::Add => "f_add",
        Binary::Sub => "f_sub",
        Binary::Mul => "f_mul",
        Binary::Div => "f_div",
        Binary::Max => "f_max",
        Binary::Min => "f_min",
        Binary::AtLeast => "f_at_least",
        Binary::Pow => "f_pow",
    }
}

/// The function, the number that changes nothing, and what makes one of 16.
pub(crate) fn fold(r: Reduction) -> [&'static str; 3] {
    match r {
        Reduction::Sum => ["f_add", "0.0f", "sum_of"],
        Reduction::Max => ["f_max", "-INFINITY", "max_of"],
        Reduction::Min => ["f_min", "INFINITY", "min_of"],
    }
}

/// What takes an element into a fold along a row.
fn into(r: Reduction) -> &'static str {
    match r {
        Reduction::Sum => "f_add",
        Reduction::Max => "f_into_max",
        Reduction::Min => "f_into_min",
    }
}

/// A number as C reads it back, bit for bit.
pub(crate) fn number(x: f32) -> String {
    match x {
        _ if x.is_nan() => "NAN".into(),
        f32::INFINITY => "INFINITY".into(),
        f32::NEG_INFINITY => "-INFINITY".into(),
        _ => format!("{x:e}f"),
    }
}

impl<'a> StrideWriter<'a> {
    fn line(&mut self, depth: usize, text: &str) {
        let _ = writeln!(self.out, "{:1$}{text}", "", depth * 4);
    }

    /// The first element of a vector: `i0 * 512 + i1 * 64 + j`.
    fn at(&self, v: &View) -> String {
        let mut terms = vec![];
        for (l, &s) in v.strides.iter().enumerate().filter(|(_, s)| **s != 0) {
            let index = if Some(l) == self.along { "j".to_string() } else { format!("i{l}") };
            terms.push(if s == 1 { index } else { format!("{index} * {s}") });
        }
        if v.offset > 0 {
            terms.push(v.offset.to_string());
        }
        if terms.is_empty() { "0".into() } else { terms.join(" + ") }
    }

    fn stride(&self, v: &View) -> usize {
        self.along.and_then(|l| v.strides.get(l)).copied().unwrap_or(0)
    }

    /// One instruction as a vector; `count` elements of it are there.
    fn vector(&self, i: usize, count: &str) -> String {
        let k = self.k;
        let x = match k.body[i] {
            Scalar::Load(l) => self.load(&k.loads[l].view, k.loads[l].elem, count),
            Scalar::Const(c) => format!("all({})", number(c)),
            Scalar::Param(p) => format!("all(p[{p}])"),
            Scalar::Column if k.inner.is_empty() => "all(0.0f)".into(),
            Scalar::Column => {
                let (no, inner) = (k.outer.len(), &k.inner);
                let index = |l: usize| {
                    if Some(no + l) == self.along { "j".into() } else { format!("i{}", no + l) }
                };
                let at = (1..inner.len())
                    .fold(index(0), |at, l| format!("({at}) * {} + {}", inner[l], index(l)));
                format!("column({at})")
            }
            Scalar::Unary(f, a) => format!("{}(v{a})", unary(f)),
            Scalar::Binary(f, a, b) => format!("{}(v{a}, v{b})", binary(f)),
            Scalar::Where(a, b, c) => format!("f_where(v{a}, v{b}, v{c})"),
            Scalar::Select(m, a, b) => format!("f_select(v{m}, v{a}, v{b})"),
            Scalar::Fold(..) => panic!("a fold is not of one element"),
        };
        format!("V v{i} = {x};")
    }

    fn load(&self, v: &View, e: DType, count: &str) -> String {
        let (e, at) = (e.name(), self.at(v));
        match self.stride(v) {
            0 => format!("all(one_{e}(m[{}], {at}))", v.operand),
            s => format!("load_{e}(m[{}], {at}, {s}, {count})", v.operand),
        }
    }

    fn store(&self, value: usize, s: &shardc_ir::kernel::Store, count: &str) -> String {
        let (e, v) = (s.elem.name(), &s.view);
        format!(
            "store_{e}(m[{}], {}, {}, {count}, v{value});",
            v.operand,
            self.at(v),
            self.stride(v).max(1)
        )
    }

    /// Loops over all of these but the last, which vectors run along; calls `body` for whole vectors
    /// and for the rest.
    fn walk(
        &mut self,
        depth: usize,
        loops: std::ops::Range<usize>,
        size: impl Fn(usize) -> usize,
        bounds: Option<(&str, &str)>,
        body: &mut dyn FnMut(&mut Self, usize, &str),
    ) {
        let mut depth = depth;
        let last = self.along.filter(|l| loops.contains(l));
        let before = depth;
        for l in loops.clone().filter(|l| Some(*l) != last) {
            self.line(depth, &format!("for (word i{l} = 0; i{l} < {}; i{l}++) {{", size(l)));
            depth += 1;
        }
        match last {
            None => body(self, depth, "1"),
            Some(l) => {
                let n = size(l).to_string();
                let (start, end) = bounds.unwrap_or(("0", &n));
                self.line(depth, &format!("word j = {start};"));
                self.line(depth, &format!("for (; j + 16 <= {end}; j += 16) {{"));
                body(self, depth + 1, "16");
                self.line(depth, "}");
                if size(l) % 16 != 0 {
                    self.line(depth, &format!("if (j < {end}) {{"));
                    self.line(depth + 1, &format!("int rest = (int)({end} - j);"));
                    body(self, depth + 1, "rest");
                    self.line(depth, "}");
                }
            }
        }
        while depth > before {
            depth -= 1;
            self.line(depth, "}");
        }
    }

    /// Indices of loops from one number, the last loop fastest.
    fn split(&mut self, depth: usize, from: &str, loops: &[usize]) {
        let mut rest = from.to_string();
        for (l, &n) in loops.iter().enumerate().rev() {
            if l == 0 {
                self.line(depth, &format!("word i0 = {rest};"));
            } else {
                self.line(depth, &format!("word i{l} = {rest} % {n}, r{l} = {rest} / {n};"));
                rest = format!("r{l}");
            }
        }
    }

    /// What a fold is, and of what.
    fn fold(&self, f: usize) -> (Reduction, usize) {
        let Scalar::Fold(r, x) = self.k.body[f] else { panic!("a fold") };
        (r, x)
    }

    /// Begins folds of elements.
    fn begin(&mut self, folds: &[usize]) {
        for &f in folds {
            self.line(2, &format!("V acc{f} = all({});", fold(self.fold(f).0)[1]));
        }
    }

    /// Takes a vector into a fold; `count` elements of it are there.
    fn take(&mut self, depth: usize, f: usize, x: &str, count: &str) {
        let r = self.fold(f).0;
        let x = match count {
            "16" => x.to_string(),
            n => format!("first({n}, {x}, all({}))", fold(r)[1]),
        };
        self.line(depth, &format!("acc{f} = {}(acc{f}, {x});", into(r)));
    }

    /// What a walk does with a vector, of which `count` elements are there.
    fn elements(&mut self, depth: usize, stage: &Stage, count: &str) {
        let k = self.k;
        for &i in &stage.each {
            let found = stage.found.iter().find(|x| x.0 == i).map(|x| &k.stores[x.1]);
            let line = match found {
                Some(s) => format!("V v{i} = {};", self.load(&s.view, s.elem, count)),
                None => self.vector(i, count),
            };
            self.line(depth, &line);
        }
        for &f in &stage.folds {
            self.take(depth, f, &format!("v{}", self.fold(f).1), count);
        }
        for &(s, value) in &stage.written {
            let line = self.store(value, &k.stores[s], count);
            self.line(depth, &line);
        }
    }

    /// Makes the numbers of the row that folds are.
    fn end(&mut self, folds: &[usize]) {
        for &f in folds {
            self.line(2, &format!("V v{f} = all({}(acc{f}));", fold(self.fold(f).0)[2]));
        }
    }

    /// Operands of which the next row may be fetched from memory while this one is computed.
    fn next(&self) -> Vec<&'a Load> {
        let k = self.k;
        let Some(row) = k.outer.len().checked_sub(1) else { return vec![] };
        let new = |l: &&Load| self.stride(&l.view) == 1 && l.view.strides[row] > 0;
        k.loads.iter().filter(new).collect()
    }

    /// A task is a row or, if nothing is folded or the only row is folded in parts, some elements of
    /// one. The processor fetches elements ahead of the first walk over a row; a later one that
    /// computes for long leaves the memory idle, but for the next row that it asks for.
    fn rows(&mut self) {
        let k = self.k;
        let (no, ni) = (k.outer.len(), k.inner.len());
        let chunks = k.chunks();
        let mut bounds = None;
        if chunks > 1 {
            let n = k.inner[ni - 1];
            self.line(
                2,
                &format!("word row = task / {chunks}, start = task % {chunks} * {CHUNK};"),
            );
            self.line(2, &format!("word end = start + {CHUNK} < {n} ? start + {CHUNK} : {n};"));
            bounds = Some(("start", "end"));
        }
        let outer = k.outer.clone();
        self.split(2, if chunks > 1 { "row" } else { "task" }, &outer);
        if let Some(stages) = k.in_parts() {
            return self.parts(&stages, chunks);
        }
        let size = |l: usize| k.inner[l - no];
        let stages = k.stages_kept();
        let slow = (1..stages.len()).find(|&at| k.costly(&stages[at..=at]) > 0);
        for (at, stage) in stages.iter().enumerate() {
            let fetched = if slow == Some(at) { self.next() } else { vec![] };
            for &i in &stage.before {
                let line = self.vector(i, "1");
                self.line(2, &line);
            }
            if stage.folds.is_empty() && stage.written.is_empty() {
                continue;
            }
            self.begin(&stage.folds);
            self.line(2, "{");
            self.walk(3, no..no + ni, size, bounds, &mut |w, depth, count| {
                for l in &fetched {
                    let (e, v, row) = (l.elem.name(), &l.view, l.view.strides[no - 1]);
                    let at = w.at(v);
                    w.line(depth, &format!("fetch_{e}(m[{}], {at} + {row});", v.operand));
                }
                w.elements(depth, stage, count);
            });
            self.line(2, "}");
            self.end(&stage.folds);
        }
        for s in k.stores.iter().filter(|s| !k.stores_each(s)) {
            let line = self.store(s.value, s, "1");
            self.line(2, &line);
        }
    }

    /// A task is a block of rows that lie next to each other, each a lane of a vector.
    fn columns(&mut self) {
        let k = self.k;
        let (no, ni) = (k.outer.len(), k.inner.len());
        let n = k.outer[no - 1];
        let blocks = n.div_ceil(COLUMNS);
        self.line(2, &format!("word row = task / {blocks}, start = task % {blocks} * {COLUMNS};"));
        self.line(2, &format!("word end = start + {COLUMNS} < {n} ? start + {COLUMNS} : {n};"));
        let outer: Vec<usize> = k.outer[..no - 1].to_vec();
        self.split(2, "row", &outer);
        let stages = k.stages();
        let (stage, after) = (&stages[0], &stages[1]);
        // Whole blocks keep their sums in registers, over all elements of the rows.
        let vectors = COLUMNS / 16;
        let whole: Vec<String> = (0..vectors).map(|v| format!("start + {}", v * 16)).collect();
        let block = |w: &mut Self, depth: usize, at: &[String], count: &str| {
            let each_vector =
                |w: &mut Self, depth: usize, body: &mut dyn FnMut(&mut Self, usize)| {
                    for (v, at) in at.iter().enumerate() {
                        w.line(depth, "{");
                        w.line(depth + 1, &format!("word j = {at};"));
                        body(w, v);
                        w.line(depth, "}");
                    }
                };
            for &f in &stage.folds {
                let Scalar::Fold(r, _) = k.body[f] else { continue };
                let starts: Vec<String> =
                    at.iter().map(|_| format!("all({})", fold(r)[1])).collect();
                w.line(depth, &format!("V acc{f}[{}] = {{{}}};", at.len(), starts.join(", ")));
            }
            let mut inside = depth;
            for l in 0..ni {
                let i = no + l;
                w.line(inside, &format!("for (word i{i} = 0; i{i} < {}; i{i}++) {{", k.inner[l]));
                inside += 1;
            }
            each_vector(w, inside, &mut |w, v| {
                for &i in stage.before.iter().chain(&stage.each) {
                    let line = w.vector(i, count);
                    w.line(inside + 1, &line);
                }
                for &f in &stage.folds {
                    let Scalar::Fold(r, x) = k.body[f] else { continue };
                    let line = format!("acc{f}[{v}] = {}(acc{f}[{v}], v{x});", fold(r)[0]);
                    w.line(inside + 1, &line);
                }
            });
            while inside > depth {
                inside -= 1;
                w.line(inside, "}");
            }
            each_vector(w, depth, &mut |w, v| {
                for &i in &stage.before {
                    let line = w.vector(i, count);
                    w.line(depth + 1, &line);
                }
                for &f in &stage.folds {
                    w.line(depth + 1, &format!("V v{f} = acc{f}[{v}];"));
                }
                for &i in &after.before {
                    let line = w.vector(i, count);
                    w.line(depth + 1, &line);
                }
                for s in &k.stores {
                    let line = w.store(s.value, s, count);
                    w.line(depth + 1, &line);
                }
            });
        };
        self.line(2, &format!("if (end - start == {COLUMNS}) {{"));
        block(self, 3, &whole, "16");
        self.line(2, "} else for (word at = start; at < end; at += 16) {");
        self.line(3, "int count = end - at < 16 ? (int)(end - at) : 16;");
        block(self, 3, &["at".to_string()], "count");
        self.line(2, "}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_back() {
        for x in [0.0, 1.0, -0.5, 65536.0, 12.0, 1e-5, 3.4e38, 0.1, 16777216.0, -7.25e-12] {
            let text = number(x);
            assert_eq!(text.strip_suffix('f').and_then(|t| t.parse().ok()), Some(x), "{text}");
            // In C, too: a number with an exponent has at most one point.
            assert!(text.contains('e') && text.matches('.').count() <= 1, "{text}");
        }
        assert_eq!(number(f32::NEG_INFINITY), "-INFINITY");
    }
}
