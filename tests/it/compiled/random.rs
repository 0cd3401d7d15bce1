//! Kernels over rows of functions that are drawn: compiled or interpreted, by any number of threads, with results on
//! any operands that they may lie on, the bits are the same.

use super::*;
use shardc_ir::func::Port;
use shardc_testing::nightly;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Functions that the long run draws, of which every other run takes one in so many.
const ALL: usize = 3000;
const ONE_IN: usize = 50;
/// Functions whose kernels are compiled at a time.
const AT_ONCE: usize = 300;

/// A value of a function that is drawn: its dims as letters, of `r`, `s` and `c`.
#[derive(Clone)]
struct Drawn {
    name: String,
    dims: String,
    half: bool,
    /// No element is larger.
    bound: f64,
    /// It has no rounding errors, so that what jumps may be made of it.
    exact: bool,
    /// Roundings that its error may be of.
    roundings: f64,
}

/// A function while it is drawn.
struct Draw {
    stream: Stream,
    next: u64,
    sizes: [(char, usize); 3],
    /// The dims of rows, and of rows and their elements.
    row: String,
    full: String,
    args: Vec<String>,
    /// Name, the names of what it reads, and the line.
    nodes: Vec<(String, Vec<String>, String)>,
    values: Vec<Drawn>,
    /// Most roundings of a value. Those of 16 bits are large, and few of them within what a test allows.
    most: f64,
}

/// Functions of one operand that are nowhere steep.
const GENTLE: [(&str, f64); 12] = [
    ("tanh", 1.0),
    ("logistic", 1.0),
    ("silu", 0.0),
    ("gelu", 0.0),
    ("sin", 1.0),
    ("cos", 1.0),
    ("erf", 1.0),
    ("clamp[-0.5; hi=0.5]", 0.5),
    ("clamp[0.0; hi=1.0]", 1.0),
    ("scale[0.5]", 0.0),
    ("scale[0.0]", 0.0),
    ("scale[-1.0]", 0.0),
];

impl Draw {
    fn of(seed: u64) -> Draw {
        let stream = Stream::new(seed, "random rows", 0);
        let (row, full) = (String::new(), String::new());
        let (args, nodes, values) = (vec![], vec![], vec![]);
        let sizes = [('r', 1), ('s', 3), ('c', 1)];
        let mut d = Draw { stream, next: 0, sizes, row, full, args, nodes, values, most: 7.0 };
        d.sizes[0].1 = d.size();
        d.sizes[2].1 = d.size();
        // Now and then several tasks for a thread, or rows that are cut.
        match d.below(8) {
            0 => d.sizes[0].1 = 65 + d.below(400),
            1 => (d.sizes[0].1, d.sizes[2].1) = (1 + d.below(2), 4090 + d.below(4500)),
            _ => {}
        }
        let [full, row] = d.one(&[
            ["rc", "r"],
            ["rc", "r"],
            ["rc", "r"],
            ["rc", "c"],
            ["rc", ""],
            ["rsc", "rs"],
            ["rsc", "r"],
            ["rsc", "rc"],
            ["rsc", "sc"],
        ]);
        (d.full, d.row) = (full.into(), row.into());
        d
    }

    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        ((self.stream.uniform(self.next) * n as f64) as usize).min(n - 1)
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Small, odd or around a vector, a block of rows.
    fn size(&mut self) -> usize {
        match self.below(4) {
            0 => self.one(&[1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67]),
            _ => 1 + self.below(70),
        }
    }

    fn len(&self, dims: &str) -> usize {
        self.sizes.iter().filter(|s| dims.contains(s.0)).map(|s| s.1).product()
    }

    fn ty(&self, dims: &str, dtype: &str) -> String {
        let size = |l| self.sizes.iter().find(|s| s.0 == l).expect("a dim").1.to_string();
        format!("{dtype}[{}]", dims.chars().map(size).collect::<Vec<_>>().join(","))
    }

    fn dtype(half: bool) -> &'static str {
        if half { "bf16" } else { "f32" }
    }

    fn arg(&mut self, dims: &str, dtype: &str) -> String {
        let name = format!("%a{}", self.args.len());
        self.args.push(format!("{name}: {}", self.ty(dims, dtype)));
        name
    }

    fn number(&mut self, dims: &str, half: bool) {
        let name = self.arg(dims, Draw::dtype(half));
        let bound = if dims.is_empty() { 3.0 } else { 2.0 };
        self.values.push(Drawn {
            name,
            dims: dims.into(),
            half,
            bound,
            exact: true,
            roundings: 0.0,
        });
    }

    /// A node with one result, which is a value of its own.
    fn node(&mut self, op: &str, ins: &[&Drawn], dims: &str, half: bool, bound: f64, exact: bool) {
        let of = ins.iter().map(|v| v.roundings);
        let before = match op.split('[').next() {
            Some("mul" | "div" | "dot") => of.sum::<f64>(),
            Some("pow" | "exp") => 2.0 * of.sum::<f64>(),
            _ => of.fold(0.0, f64::max),
        };
        let roundings = if exact { 0.0 } else { before + 1.0 };
        if roundings > self.most {
            return;
        }
        let ins: Vec<String> = ins.iter().map(|v| v.name.clone()).collect();
        let (name, dims) = (String::new(), dims.into());
        self.node_of(op, ins, Drawn { name, dims, half, bound, exact, roundings });
    }

    fn node_of(&mut self, op: &str, ins: Vec<String>, out: Drawn) {
        let name = format!("%v{}", self.nodes.len());
        let ty = self.ty(&out.dims, Draw::dtype(out.half));
        let line = format!("{name} = {op} {} : {ty}", ins.join(", "));
        self.nodes.push((name.clone(), ins, line));
        self.values.push(Drawn { name, ..out });
    }

    fn any(&mut self) -> Drawn {
        // What is new is read more often.
        let (n, late) = (self.values.len(), self.below(3) > 0);
        let i = if late { n - 1 - self.below(n.min(4)) } else { self.below(n) };
        self.values[i].clone()
    }

    fn last(&self) -> Drawn {
        self.values.last().expect("a value").clone()
    }

    /// The dims of what is made of both, if that is a row or all.
    fn joined(&self, a: &Drawn, b: &Drawn) -> Option<String> {
        let has = |d: &str, l| d.contains(l);
        let union: String = "rsc".chars().filter(|&l| has(&a.dims, l) || has(&b.dims, l)).collect();
        [&self.row, &self.full].into_iter().find(|d| **d == union).cloned()
    }

    fn two(&mut self) {
        let (a, b) = (self.any(), self.any());
        let Some(dims) = self.joined(&a, &b).filter(|_| a.half == b.half) else { return };
        let how = [&a.dims, &b.dims, &dims];
        let how = match how.iter().all(|d| **d == dims) {
            true => String::new(),
            false => format!("[{},{}->{dims}]", a.dims, b.dims),
        };
        let most = a.bound.max(b.bound);
        let exact = a.exact && b.exact;
        let (op, bound, exact) = match self.below(12) {
            0..=2 => ("add", a.bound + b.bound, false),
            3 | 4 => ("sub", a.bound + b.bound, false),
            5..=7 => ("mul", a.bound * b.bound, false),
            8 => ("max", most, exact),
            9 => ("min", most, exact),
            10 if exact => ("less", 1.0, true),
            11 if exact => ("equal", 1.0, true),
            _ => {
                if b.roundings + 2.0 > self.most {
                    return;
                }
                self.node("abs", &[&b], &b.dims, b.half, b.bound, false);
                if b.dims != self.row && b.dims != self.full {
                    return;
                }
                let b = self.last();
                self.node("shift[1.0]", &[&b], &b.dims, b.half, b.bound + 1.0, false);
                let b = self.last();
                self.node(&format!("div{how}"), &[&a, &b], &dims, a.half, a.bound, false);
                return;
            }
        };
        // A mask is f32 whatever it is made of.
        let half = a.half && !matches!(op, "less" | "equal");
        if bound < 1e4 {
            self.node(&format!("{op}{how}"), &[&a, &b], &dims, half, bound, exact);
        }
    }

    fn element(&mut self) {
        let x = self.any();
        if x.dims != self.row && x.dims != self.full {
            return;
        }
        let how = self.below(16);
        let jumps = ["round[floor]", "round[ceil]", "round[even]", "sign"];
        let (op, bound, exact): (&str, f64, bool) = match how {
            0..=5 => {
                let (op, most) = self.one(&GENTLE);
                (op, if most > 0.0 { most } else { x.bound }, x.exact && op.starts_with("scale"))
            }
            6 | 7 if x.bound <= 2.0 => ("exp", 7.4, false),
            8 if x.bound <= 4.0 => ("pow[2.0]", x.bound * x.bound, false),
            9 if x.exact => (self.one(&jumps), x.bound + 1.0, true),
            10 => ("abs", x.bound, x.exact),
            11 => ("shift[0.25]", x.bound + 0.25, false),
            12 | 13 => ("softplus", x.bound + 1.0, false),
            14 | 15 if x.roundings + 2.0 <= self.most => {
                // What is steep near 0, away from there.
                self.node("abs", &[&x], &x.dims, x.half, x.bound, false);
                let y = self.last();
                self.node("shift[1.0]", &[&y], &x.dims, x.half, x.bound + 1.0, false);
                let y = self.last();
                let op = self.one(&["log", "sqrt", "rsqrt", "log1p", "pow[0.7]"]);
                return self.node(op, &[&y], &x.dims, x.half, y.bound, false);
            }
            _ => return,
        };
        self.node(op, &[&x], &x.dims, x.half, bound, exact);
    }

    fn cast(&mut self) {
        let x = self.any();
        let to = format!("cast[{}]", Draw::dtype(!x.half));
        if self.most.is_finite() && (x.dims == self.row || x.dims == self.full) {
            self.node(&to, &[&x], &x.dims, !x.half, x.bound, x.exact && x.half);
        }
    }

    fn fold(&mut self) {
        let (x, y) = (self.any(), self.any());
        let [row, full] = [&self.row, &self.full].map(String::clone);
        if x.dims != full {
            return;
        }
        let map = format!("{full}->{row}");
        let terms = self.len(&full) as f64 / self.len(&row) as f64;
        match self.below(5) {
            0 => self.node(&format!("reduce_max[{map}]"), &[&x], &row, x.half, x.bound, x.exact),
            1 => self.node(&format!("reduce_min[{map}]"), &[&x], &row, x.half, x.bound, x.exact),
            2 if (y.dims == full) && y.half == x.half => {
                let bound = x.bound * y.bound * terms;
                self.node(&format!("dot[{full},{map}]"), &[&x, &y], &row, x.half, bound, false);
            }
            _ => {
                let bound = x.bound * terms;
                self.node(&format!("reduce_sum[{map}]"), &[&x], &row, x.half, bound, false);
            }
        }
    }

    /// Look-ups along the one dim that a row has, what is put there, and numbers of a row for all of it.
    fn along(&mut self) {
        let [row, full] = [&self.row, &self.full].map(String::clone);
        let mut left = full.chars().filter(|&l| !row.contains(l));
        let (Some(l), None) = (left.next(), left.next()) else { return };
        let x = self.any();
        let n = self.len(&l.to_string());
        match self.below(3) {
            0 if x.dims == row => {
                let how = format!("expand[{row}->{full}; {l}={n}]");
                self.node(&how, &[&x], &full, x.half, x.bound, x.exact);
            }
            1 if x.dims == full => {
                let i = self.arg(&row, "i32");
                let how = format!("take[{full},{row}->{row}]");
                self.node_of(&how, vec![x.name.clone(), i], Drawn { dims: row, ..x });
            }
            2 if x.dims == row && !x.half => {
                let i = self.arg(&row, "i32");
                let how = format!("index_add[{row},{row}->{full}; {l}={n}]");
                self.node_of(&how, vec![x.name.clone(), i], Drawn { dims: full, ..x });
            }
            _ => {}
        }
    }

    fn choice(&mut self) {
        let all = [self.any(), self.any(), self.any()];
        let [m, a, b] = &all;
        let dims = a.dims.clone();
        let alike = a.half == b.half && b.dims == dims && (m.dims == dims || m.dims == self.row);
        if !m.exact || !alike || (dims != self.row && dims != self.full) {
            return;
        }
        let how = match m.dims == dims {
            true => "select".into(),
            false => format!("select[{},{dims},{dims}->{dims}]", m.dims),
        };
        let bound = a.bound.max(b.bound);
        self.node(&how, &[m, a, b], &dims, a.half, bound, a.exact && b.exact);
    }

    /// A function as text, and the size of the dim of look-ups.
    fn text(mut self) -> (String, usize) {
        let [row, full] = [&self.row, &self.full].map(String::clone);
        // Elements, or rows of which there are more: these are then folded side by side.
        let halves = self.below(4);
        if halves == 3 {
            self.most = f64::INFINITY;
        }
        let half = |d: &mut Draw| match halves {
            0 => d.below(2) == 0,
            1 => true,
            _ => false,
        };
        let [of_full, of_row] = self.one(&[[1, 1], [2, 1], [1, 3], [1, 4], [2, 4], [3, 0]]);
        for _ in 0..of_full {
            let h = half(&mut self);
            self.number(&full, h);
        }
        for _ in 0..of_row {
            let h = half(&mut self);
            self.number(&row, h);
        }
        let rest: String = full.chars().filter(|&l| !row.contains(l)).collect();
        for dims in [rest.as_str(), "", "c", "r", "rs"] {
            if dims.chars().all(|l| full.contains(l)) && self.below(4) == 0 {
                let h = half(&mut self);
                self.number(dims, h);
            }
        }
        let (nodes, mut tries) = (2 + self.below(14), 0);
        while self.nodes.len() < nodes && tries < 400 {
            tries += 1;
            match self.below(12) {
                0..=4 => self.two(),
                5..=7 => self.element(),
                8 | 9 => self.fold(),
                10 => match self.below(3) {
                    0 => self.cast(),
                    _ => self.choice(),
                },
                _ => self.along(),
            }
        }
        self.ended()
    }

    fn ended(mut self) -> (String, usize) {
        let read = |v: &str, d: &Draw| d.nodes.iter().any(|n| n.1.iter().any(|i| i == v));
        let made: Vec<Drawn> =
            self.values.iter().filter(|v| v.name.starts_with("%v")).cloned().collect();
        // What nobody reads, and some of what is read.
        let mut results = vec![];
        for v in made {
            if !read(&v.name, &self) || self.below(5) == 0 {
                results.push(v);
            }
        }
        while results.len() > 5 {
            let i = self.below(results.len());
            results.remove(i);
        }
        let mut needed: Vec<String> = results.iter().map(|v| v.name.clone()).collect();
        for n in self.nodes.iter().rev() {
            if needed.contains(&n.0) {
                needed.extend(n.1.iter().cloned());
            }
        }
        let kept = |name: &str| needed.iter().any(|n| n == name);
        let args: Vec<&str> = (self.args.iter().map(String::as_str))
            .filter(|a| kept(a.split(':').next().expect("a name")))
            .collect();
        let types: Vec<String> =
            results.iter().map(|v| self.ty(&v.dims, Draw::dtype(v.half))).collect();
        let names: Vec<&str> = results.iter().map(|v| v.name.as_str()).collect();
        let lines: String =
            self.nodes.iter().filter(|n| kept(&n.0)).map(|n| format!("\n  {}", n.2)).collect();
        let (args, names) = (args.join(", "), names.join(", "));
        let types = match &types[..] {
            [one] => one.clone(),
            all => format!("({})", all.join(", ")),
        };
        let text = format!("({args}) -> {types} {{{lines}\n  return {names} }}");
        let rest: String = self.full.chars().filter(|&l| !self.row.contains(l)).collect();
        (text, self.len(&rest))
    }
}

/// Pairs of results and operands that may be laid on each other, alone and many at once.
fn laid(f: &Func) -> Vec<Vec<(Value, Value)>> {
    let pairs = over(f);
    let mut all: Vec<Vec<(Value, Value)>> = pairs.iter().map(|&p| vec![p]).collect();
    for first in 0..pairs.len().min(4) {
        let mut at_once: Vec<(Value, Value)> = vec![];
        for &p in pairs[first..].iter().chain(&pairs[..first]) {
            if at_once.iter().all(|q| q.0 != p.0 && q.1 != p.1) {
                at_once.push(p);
            }
        }
        if at_once.len() > 1 && !all.contains(&at_once) {
            all.push(at_once);
        }
    }
    all
}

/// The largest number that a function meets.
fn largest(f: &Func, args: &[Tensor]) -> f64 {
    let mut f = f.clone();
    let made = f.nodes.iter().flat_map(|n| n.outs.iter().copied());
    let like = f.results[0].clone();
    f.results = made.map(|value| Port { value, ..like.clone() }).collect();
    let wide: Vec<Vec<Tensor>> = args.iter().map(|t| vec![t.clone()]).collect();
    let all = interp::call(&Mesh::default(), &f, &wide, Precision::F64);
    let all = all.unwrap_or_else(|e| panic!("{e}"));
    let numbers = all.iter().flat_map(|t| t[0].data.iter());
    numbers.fold(1e-3f64, |a, b| a.max(b.abs()))
}

/// How many functions have something, and how many results lie on operands, alone and at once.
#[derive(Default, Debug)]
struct Met {
    fused: usize,
    by_columns: usize,
    parts: usize,
    laid: usize,
    several: usize,
}

/// Asserts all of a function.
fn check(f: &Func, program: &[Kernel], terms: usize, native: &Arc<Native>, i: u64, met: &mut Met) {
    let (stream, mut next) = (Stream::new(i, "random numbers", 0), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let args = draw(f, terms, &mut rng);
    let want = results(f, program, &args, Some(native.clone()), 1, &[]);
    for (native, threads) in [(None, 1), (None, 3), (Some(native.clone()), 3)] {
        let how = if native.is_some() { "compiled" } else { "interpreted" };
        let got = results(f, program, &args, native, threads, &[]);
        assert!(bits(&got) == bits(&want), "{how}, {threads} threads");
    }
    for pairs in laid(f) {
        met.laid += 1;
        met.several += usize::from(pairs.len() > 1);
        for (native, threads) in [(None, 1), (None, 3), (Some(native.clone()), 3)] {
            let how = if native.is_some() { "compiled" } else { "interpreted" };
            let got = results(f, program, &args, native, threads, &pairs);
            assert!(bits(&got) == bits(&want), "{how}, {threads} threads, {pairs:?}");
        }
    }
    let apart = meaning(f, program, &args, &want, terms, largest(f, &args));
    assert!(apart.is_none(), "{}", apart.unwrap_or_default());
}

#[test]
fn functions_that_are_drawn_give_the_bits_and_the_numbers() {
    let mesh = Mesh::default();
    let all: Vec<usize> = (0..ALL).filter(|i| taken(*i, ONE_IN)).collect();
    let (mut met, mut wrong) = (Met::default(), vec![]);
    for some in all.chunks(AT_ONCE) {
        let lowered: Vec<(u64, Func, usize)> = some
            .iter()
            .map(|&i| {
                let (text, terms) = Draw::of(i as u64).text();
                (i as u64, function(&text, (0, 0)), terms)
            })
            .collect();
        let of = |x: &(u64, Func, usize)| -> Vec<Kernel> {
            let one = |l| shardc_codegen::launch(&mesh, &x.1, l, &[]).expect("a kernel");
            launches(&x.1).iter().map(one).collect()
        };
        let programs: Program = lowered.iter().map(of).collect();
        let functions = shardc_codegen::c::Functions::of(programs.iter().flatten());
        let objects = shardc_codegen::c::compile(&functions, MINUTES);
        let objects = objects.unwrap_or_else(|e| panic!("{}", e.render()));
        let native = Native::load(&objects, std::iter::once(&programs)).expect("it loads");
        let native = Arc::new(native);
        for ((i, f, terms), program) in lowered.iter().zip(&programs) {
            met.fused += usize::from(program.len() < f.nodes.len());
            let rows = || program.iter().flat_map(|k| k.rows());
            met.by_columns += usize::from(rows().any(|k| k.by_columns()));
            met.parts += usize::from(rows().any(|k| k.in_parts().is_some()));
            let run = || check(f, program, *terms, &native, *i, &mut met);
            if let Err(e) = catch_unwind(AssertUnwindSafe(run)) {
                let said = e.downcast_ref::<String>().cloned().unwrap_or_default();
                wrong.push(format!("function {i}: {said}: {}", text_of(f)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {}", wrong.len(), all.len(), wrong.join("\n"));
    let least = all.len() / 20;
    let enough = [met.fused, met.by_columns, met.laid, met.several].iter().all(|&n| n > least);
    assert!(enough && (met.parts > 0 || !nightly()), "of {} functions: {met:?}", all.len());
}

/// The same where vectors are those of any processor of the target.
#[test]
fn any_processor_gives_the_same_of_functions_that_are_drawn() {
    let test = "compiled::random::functions_that_are_drawn_give_the_bits_and_the_numbers";
    let mut c = std::process::Command::new(std::env::current_exe().expect("this program"));
    let out = c.arg("--exact").arg(test).env("SHARDC_CPU", "portable").output();
    let out = out.expect("it starts");
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}
