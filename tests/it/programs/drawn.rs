//! Random models as text: ops of all families with types that fit, with layouts asked for of some values and
//! parameters.

use super::Draw;
use super::axes::Axes;

/// Rows of a batch, and of the table of tokens.
pub const ROWS: usize = 4;
pub const VOCAB: usize = 6;
/// Most elements of a value.
const MOST: usize = 1024;
/// Values that may be larger than this are scaled down.
const LARGE: f64 = 8.0;

/// Sizes of dims.
const SIZES: [usize; 8] = [1, 2, 2, 3, 4, 4, 6, 8];
/// A value of the program, in f32.
#[derive(Clone)]
pub struct Known {
    pub name: String,
    pub sizes: Vec<usize>,
    /// About how large its elements get.
    pub large: f64,
}

/// Letters from `a` on.
pub fn letters(n: usize) -> Vec<char> {
    ('a'..='z').take(n).collect()
}

pub fn text(letters: &[char]) -> String {
    letters.iter().collect()
}

pub fn ty(sizes: &[usize]) -> String {
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    format!("f32[{}]", sizes.join(","))
}

/// A program that is being written.
pub struct Program<'a> {
    pub draw: &'a mut Draw,
    axes: &'a Axes,
    /// One in so many values has a layout that is asked for; 0 for none.
    asks: usize,
    params: Vec<String>,
    pub body: String,
    pub known: Vec<Known>,
    count: usize,
    layer: usize,
    /// Tokens of a row.
    pub seq: usize,
}

/// What a program is drawn for.
pub struct For<'a> {
    pub axes: &'a Axes,
    /// Tokens of a row.
    pub seq: usize,
    /// One in so many values has a layout that is asked for; 0 for none.
    pub asks: usize,
    /// It has an output.
    pub shown: bool,
}

/// A model with some ops.
pub fn program(draw: &mut Draw, f: &For) -> String {
    let &For { axes, seq, asks, shown } = f;
    let mut p = Program {
        draw,
        axes,
        asks,
        params: vec![],
        body: String::new(),
        known: vec![],
        count: 0,
        layer: 0,
        seq,
    };
    let h = SIZES[p.draw.below(SIZES.len())];
    let table = p.param(&[VOCAB, h]);
    let x = p.op(&format!("take[vh,bs->bsh] {}, %ids", table.name), &[ROWS, seq, h], 1.0);
    p.known.push(x);
    for _ in 0..1 + p.draw.below(10) {
        if p.draw.below(4) == 0 {
            p.layer += 1;
            p.body += &format!(" model.layers.{}:\n", p.layer);
        }
        let new = p.step();
        p.known.push(new);
    }
    p.end(shown)
}

impl Program<'_> {
    fn end(mut self, shown: bool) -> String {
        // The loss takes the last value, and some others.
        let mut sums = vec![];
        for i in (0..self.known.len()).rev() {
            if i + 1 == self.known.len() || self.draw.below(3) == 0 {
                let x = self.known[i].clone();
                let all = text(&letters(x.sizes.len()));
                let bent = self.op(&format!("silu {}", x.name), &x.sizes, 1.0);
                sums.push(match x.sizes.len() {
                    0 => bent,
                    _ => self.op(&format!("reduce_sum[{all}->] {}", bent.name), &[], 1.0),
                });
            }
        }
        let first = sums.swap_remove(0);
        let sum = sums
            .iter()
            .fold(first, |a, b| self.op(&format!("add {}, {}", a.name, b.name), &[], 1.0));
        let valid = self.op("at_least[0.0] %targets", &[ROWS, self.seq], 1.0);
        let count = self.op(&format!("reduce_sum[ab->] {}", valid.name), &[], 1.0);
        let loss = self.op(&format!("mul {}, {}", sum.name, count.name), &[], 1.0);
        let mut results = vec!["f32[] sum \"loss\"".to_string()];
        let mut values = vec![loss.name];
        if shown {
            let last = self.known.last().expect("one at least");
            results.push(format!("{} output \"logits\"", ty(&last.sizes)));
            values.push(last.name.clone());
        }
        let mesh: Vec<String> =
            self.axes.mesh.iter().map(|(name, n)| format!("{name}={n}")).collect();
        let seq = self.seq;
        let inputs = format!(
            "%ids: i32[{ROWS},{seq}] input \"input_ids\", %targets: i32[{ROWS},{seq}] input \"targets\", \
             %positions: i32[{seq}] input \"positions\""
        );
        format!(
            "mesh [{}]\n\nfunc @model(\n{}  {inputs}\n) -> ({}) {{\n model:\n{}  return {}\n}}\n",
            mesh.join(", "),
            self.params.concat(),
            results.join(", "),
            self.body,
            values.join(", ")
        )
    }

    fn asked(&mut self, sizes: &[usize]) -> String {
        match self.asks > 0 && !sizes.is_empty() && self.draw.below(self.asks) == 0 {
            true => self.axes.asked(self.draw, sizes),
            false => String::new(),
        }
    }

    pub fn param(&mut self, sizes: &[usize]) -> Known {
        let name = format!("%w{}", self.params.len());
        let asked = self.asked(sizes);
        let n = self.params.len();
        self.params.push(format!("  {name}: {} param \"w{n}\" [normal=0.5]{asked},\n", ty(sizes)));
        Known { name, sizes: sizes.to_vec(), large: 1.0 }
    }

    pub fn name(&mut self) -> String {
        self.count += 1;
        format!("%v{}", self.count)
    }

    /// Appends a node of one result in f32.
    pub fn op(&mut self, what: &str, sizes: &[usize], large: f64) -> Known {
        let (name, asked) = (self.name(), self.asked(sizes));
        self.body += &format!("  {name} = {what} : {}{asked}\n", ty(sizes));
        Known { name, sizes: sizes.to_vec(), large }
    }

    /// A value that is there, mostly the last.
    fn old(&mut self) -> Known {
        let n = self.known.len();
        let at = if self.draw.below(2) == 0 { n - 1 } else { self.draw.below(n) };
        self.known[at].clone()
    }

    /// A value with these sizes: one that is there, or a new parameter.
    pub fn like(&mut self, sizes: &[usize]) -> Known {
        let same: Vec<Known> = self.known.iter().filter(|k| k.sizes == sizes).cloned().collect();
        match same.is_empty() || self.draw.below(2) == 0 {
            true => self.param(sizes),
            false => same[self.draw.below(same.len())].clone(),
        }
    }

    /// The value, small enough.
    pub fn tame(&mut self, x: Known) -> Known {
        match x.large > LARGE {
            true => self.op(&format!("scale[{}] {}", 1.0 / x.large.ceil(), x.name), &x.sizes, 1.0),
            false => x,
        }
    }

    fn step(&mut self) -> Known {
        let x = self.old();
        let new = match self.draw.below(16) {
            0 | 1 => self.unary(&x),
            2 | 3 => self.binary(&x),
            4..=6 => self.dot(&x),
            7 => self.reduce(&x),
            8 | 9 => self.reshape(&x),
            10 => self.transpose(&x),
            11 => self.expand(&x),
            12 => self.one_dim(&x),
            13 => self.norm(&x),
            14 => self.tokens(&x),
            _ => self.block(&x),
        };
        self.tame(new)
    }

    pub fn unary(&mut self, x: &Known) -> Known {
        let plain =
            ["tanh", "silu", "gelu", "sin", "cos", "logistic", "abs", "clamp[-0.5; hi=0.5]"];
        let kind = self.draw.below(plain.len() + 5);
        if let Some(op) = plain.get(kind) {
            return self.op(&format!("{op} {}", x.name), &x.sizes, x.large.max(1.0));
        }
        match kind - plain.len() {
            0 => self.positive(x),
            1 => {
                let on = self.op(&format!("at_least[0.0] {}", x.name), &x.sizes, 1.0);
                self.op(&format!("mul {}, {}", x.name, on.name), &x.sizes, x.large)
            }
            2 => {
                let y = self.positive(x);
                let op = ["log", "sqrt", "rsqrt"][self.draw.below(3)];
                self.op(&format!("{op} {}", y.name), &x.sizes, 3.0)
            }
            3 => {
                let half = format!("bf16{}", &ty(&x.sizes)[3..]);
                let name = self.name();
                self.body += &format!("  {name} = cast[bf16] {} : {half}\n", x.name);
                self.op(&format!("cast[f32] {name}"), &x.sizes, x.large)
            }
            _ => {
                let still = self.op(&format!("stop_gradient {}", x.name), &x.sizes, x.large);
                self.op(&format!("sub {}, {}", x.name, still.name), &x.sizes, x.large)
            }
        }
    }

    /// A function of a value that is between 0.3 and 3.
    fn positive(&mut self, x: &Known) -> Known {
        let y = self.op(&format!("tanh {}", x.name), &x.sizes, 1.0);
        self.op(&format!("exp {}", y.name), &x.sizes, 3.0)
    }

    /// Two values element by element, one of them perhaps smaller, the result perhaps with other dims first.
    fn binary(&mut self, x: &Known) -> Known {
        let all = letters(x.sizes.len());
        let kept: Vec<usize> = (0..all.len()).filter(|_| self.draw.below(3) > 0).collect();
        let sizes: Vec<usize> = kept.iter().map(|&d| x.sizes[d]).collect();
        let mut y = self.like(&sizes);
        let op = ["add", "mul", "sub", "div"][self.draw.below(4)];
        if op == "div" {
            y = self.positive(&y);
        }
        let of_y: Vec<char> = kept.iter().map(|&d| all[d]).collect();
        let mut out: Vec<usize> = (0..all.len()).collect();
        if self.draw.below(4) == 0 {
            self.draw.shuffle(&mut out);
        }
        let to: Vec<char> = out.iter().map(|&d| all[d]).collect();
        let rule = match of_y == all && to == all {
            true => String::new(),
            false => format!("[{},{}->{}]", text(&all), text(&of_y), text(&to)),
        };
        let sizes: Vec<usize> = out.iter().map(|&d| x.sizes[d]).collect();
        let large = if op == "mul" { x.large * y.large } else { x.large * 3.0 + y.large };
        self.op(&format!("{op}{rule} {}, {}", x.name, y.name), &sizes, large)
    }

    /// A product of any kind: letters of both that are kept, letters that are summed, letters of one.
    fn dot(&mut self, x: &Known) -> Known {
        let all = letters(x.sizes.len());
        let (mut of_y, mut to, mut inner) = (vec![], vec![], 1);
        for (&l, &n) in all.iter().zip(&x.sizes) {
            match self.draw.below(3) {
                0 => {
                    of_y.push((l, n));
                    inner *= n;
                }
                1 => to.push((l, n)),
                _ => {
                    of_y.push((l, n));
                    to.push((l, n));
                }
            }
        }
        for (i, l) in ['x', 'y'].into_iter().enumerate() {
            let room = MOST / to.iter().map(|t| t.1).product::<usize>().max(1);
            let n = SIZES[self.draw.below(SIZES.len())].min(room);
            if n > 0 && to.len() < 4 && self.draw.below(2 + i) == 0 {
                of_y.push((l, n));
                to.push((l, n));
            }
        }
        if self.draw.below(3) == 0 {
            self.draw.shuffle(&mut of_y);
            self.draw.shuffle(&mut to);
        }
        let split = |t: &[(char, usize)]| -> (Vec<char>, Vec<usize>) { t.iter().copied().unzip() };
        let ((of_y, sizes), (to, out)) = (split(&of_y), split(&to));
        let y = self.like(&sizes);
        let rule = format!("{},{}->{}", text(&all), text(&of_y), text(&to));
        let large = x.large * y.large * (inner as f64).sqrt();
        self.op(&format!("dot[{rule}] {}, {}", x.name, y.name), &out, large)
    }

    fn reduce(&mut self, x: &Known) -> Known {
        if x.sizes.is_empty() {
            return self.unary(x);
        }
        let all = letters(x.sizes.len());
        let gone = self.draw.below(all.len());
        let mut out: Vec<usize> =
            (0..all.len()).filter(|&d| d != gone && self.draw.below(3) > 0).collect();
        if self.draw.below(3) == 0 {
            self.draw.shuffle(&mut out);
        }
        let to: Vec<char> = out.iter().map(|&d| all[d]).collect();
        let sizes: Vec<usize> = out.iter().map(|&d| x.sizes[d]).collect();
        let op = ["reduce_sum", "reduce_sum", "reduce_max", "reduce_min"][self.draw.below(4)];
        let n: usize = x.sizes.iter().product::<usize>() / sizes.iter().product::<usize>().max(1);
        let large = if op == "reduce_sum" { x.large * (n as f64).sqrt() } else { x.large };
        self.op(&format!("{op}[{}->{}] {}", text(&all), text(&to), x.name), &sizes, large)
    }

    /// Dims are split into factors, and these are grouped anew.
    fn reshape(&mut self, x: &Known) -> Known {
        let mut from: Vec<Vec<usize>> = vec![];
        for &n in &x.sizes {
            let splits: Vec<usize> = (1..=n).filter(|p| n % p == 0).collect();
            let p = splits[self.draw.below(splits.len())];
            from.push(if p > 1 && self.draw.below(2) == 0 { vec![p, n / p] } else { vec![n] });
        }
        if from.is_empty() {
            return self.unary(x);
        }
        let flat: Vec<usize> = from.concat();
        let mut to: Vec<Vec<usize>> = vec![vec![flat[0]]];
        for &n in &flat[1..] {
            match to.len() < 5 && self.draw.below(2) == 0 {
                true => to.push(vec![n]),
                false => to.last_mut().expect("one at least").push(n),
            }
        }
        let all = letters(flat.len());
        let rule = |dims: &Vec<Vec<usize>>| {
            let mut left = all.iter();
            let one = |d: &Vec<usize>| {
                let s: String = left.by_ref().take(d.len()).collect();
                if d.len() == 1 { s } else { format!("({s})") }
            };
            dims.iter().map(one).collect::<String>()
        };
        let mut given = vec![];
        let mut left = all.iter();
        for d in &from {
            for (i, n) in d.iter().enumerate() {
                let l = left.next().expect("a letter each");
                given.extend((i + 1 < d.len()).then(|| format!("{l}={n}")));
            }
        }
        let given = if given.is_empty() { String::new() } else { format!("; {}", given.join(",")) };
        let sizes: Vec<usize> = to.iter().map(|d| d.iter().product()).collect();
        let what = format!("reshape[{}->{}{given}] {}", rule(&from), rule(&to), x.name);
        self.op(&what, &sizes, x.large)
    }

    fn transpose(&mut self, x: &Known) -> Known {
        let all = letters(x.sizes.len());
        let mut out: Vec<usize> = (0..all.len()).collect();
        self.draw.shuffle(&mut out);
        let to: Vec<char> = out.iter().map(|&d| all[d]).collect();
        if to == all {
            return self.unary(x);
        }
        let sizes: Vec<usize> = out.iter().map(|&d| x.sizes[d]).collect();
        self.op(&format!("transpose[{}->{}] {}", text(&all), text(&to), x.name), &sizes, x.large)
    }

    fn expand(&mut self, x: &Known) -> Known {
        let n = [2, 3, 4][self.draw.below(3)];
        let all = letters(x.sizes.len());
        if x.sizes.iter().product::<usize>() * n > MOST || all.len() > 3 {
            return self.reduce(x);
        }
        let at = self.draw.below(all.len() + 1);
        let (mut to, mut sizes) = (all.clone(), x.sizes.clone());
        to.insert(at, 'x');
        sizes.insert(at, n);
        let rule = format!("{}->{}; x={n}", text(&all), text(&to));
        self.op(&format!("expand[{rule}] {}", x.name), &sizes, x.large)
    }

    /// A piece of a dim, a dim with zeros around it, or two of them side by side.
    fn one_dim(&mut self, x: &Known) -> Known {
        if x.sizes.is_empty() {
            return self.unary(x);
        }
        let dim = self.draw.below(x.sizes.len());
        let n = x.sizes[dim];
        let with = |m: usize| {
            let mut sizes = x.sizes.clone();
            sizes[dim] = m;
            sizes
        };
        match self.draw.below(3) {
            0 => {
                let p = 1 + self.draw.below(n);
                let start = self.draw.below(n - p + 1);
                self.op(
                    &format!("narrow[p={p}; start={start}; dim={dim}] {}", x.name),
                    &with(p),
                    x.large,
                )
            }
            1 => {
                // Some elements may have no place.
                let d = 1 + self.draw.below(n + 4);
                let start = self.draw.below(d + n - 1) as i64 - (n as i64 - 1);
                self.op(
                    &format!("pad[d={d}; start={start}; dim={dim}] {}", x.name),
                    &with(d),
                    x.large,
                )
            }
            _ => {
                let m = SIZES[self.draw.below(SIZES.len())];
                let y = self.like(&with(m));
                let d = n + m;
                let what = format!("concat[d={d}; dim={dim}] {}, {}", x.name, y.name);
                self.op(&what, &with(d), x.large.max(y.large))
            }
        }
    }
}
