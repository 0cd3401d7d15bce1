//! What all shapes of kernels over rows are printed with: lines, places of views, instructions.

use super::cut::{Cut, Shape};
use crate::c::{binary, fold, number, unary};
use shardc_ir::kernel::{Rows, Scalar, Store, View};
use shardc_ir::launch::Word;
use shardc_ir::types::DType;
use std::collections::BTreeSet;
use std::fmt::Write as _;

pub(super) struct Writer<'a> {
    pub k: &'a Rows,
    /// That of the kernel in C, whose text is the same for any number of rows, and this number.
    pub name: String,
    pub cut: Cut,
    /// By instruction: it differs from element to element.
    pub each: Vec<bool>,
    pub out: String,
    /// Loads of elements that are in registers already.
    pub kept: BTreeSet<usize>,
    /// A function for blocks of a launch that runs other kernels too, instead of an entry point.
    pub part: bool,
}

impl<'a> Writer<'a> {
    pub fn new(k: &'a Rows) -> Writer<'a> {
        let each = k.by_element();
        let name = format!("{}_of_{}", k.symbol, k.outer.iter().product::<usize>());
        let (out, kept) = (String::new(), BTreeSet::new());
        Writer { k, name, cut: Cut::new(k), each, out, kept, part: false }
    }

    pub fn line(&mut self, depth: usize, text: &str) {
        let _ = writeln!(self.out, "{:1$}{text}", "", depth * 4);
    }

    /// The type of numbers of elements.
    pub fn index(&self) -> &'static str {
        let k = self.k;
        let sizes: Vec<usize> = k.outer.iter().chain(&k.inner).copied().collect();
        let end = |v: &View| {
            v.offset
                + v.strides.iter().zip(&sizes).map(|(s, n)| s * n.saturating_sub(1)).sum::<usize>()
        };
        let views = k.loads.iter().map(|l| &l.view).chain(k.stores.iter().map(|s| &s.view));
        let most = views.map(end).chain([sizes.iter().product()]).max().unwrap_or(0);
        if most < 1 << 30 { "int" } else { "i64" }
    }

    /// Indices of loops, numbered from `first` on, from one number, the last loop fastest.
    pub fn split(&mut self, depth: usize, from: &str, first: usize, sizes: &[usize]) {
        let (index, mut rest) = (self.index(), from.to_string());
        for (l, &n) in sizes.iter().enumerate().rev() {
            let i = first + l;
            if l == 0 {
                self.line(depth, &format!("const {index} i{i} = {rest};"));
            } else {
                self.line(
                    depth,
                    &format!("const {index} i{i} = {rest} % {n}, r{i} = {rest} / {n};"),
                );
                rest = format!("r{i}");
            }
        }
    }

    /// The place of a view at loops `first..`, whose indices have these names.
    pub fn at(&self, v: &View, first: usize, names: &[String]) -> String {
        let strides = v.strides.iter().skip(first).zip(names);
        let terms: Vec<String> = strides
            .filter(|(s, _)| **s != 0)
            .map(|(&s, i)| if s == 1 { i.clone() } else { format!("{i} * {s}") })
            .collect();
        if terms.is_empty() { "0".into() } else { terms.join(" + ") }
    }

    fn pointer(&mut self, depth: usize, name: &str, elem: DType, v: &View, outer: &[String]) {
        let mut at = self.at(v, 0, outer);
        if v.offset > 0 {
            at += &format!(" + {}", v.offset);
        }
        let (ty, m) = (elem.facts().cuda, v.operand);
        let at = if at == "0" { at } else { format!("({at})") };
        self.line(depth, &format!("{ty}* const {name} = ({ty}*)p.m[{m}] + {at};"));
    }

    /// Where a row of every view begins.
    pub fn pointers(&mut self, depth: usize, needed: &BTreeSet<usize>, stores: &[&Store]) {
        let k = self.k;
        let outer: Vec<String> = (0..k.outer.len()).map(|l| format!("i{l}")).collect();
        for &i in needed {
            if let Scalar::Load(l) = k.body[i] {
                let load = &k.loads[l];
                self.pointer(depth, &format!("x{l}"), load.elem, &load.view, &outer);
            }
        }
        for (i, s) in k.stores.iter().enumerate().filter(|(_, s)| stores.contains(s)) {
            self.pointer(depth, &format!("y{i}"), s.elem, &s.view, &outer);
        }
    }

    /// One instruction, other than a fold, as a number; `load` is how a load is written.
    pub fn scalar(&self, i: usize, column: &str, load: impl Fn(usize) -> String) -> String {
        line(self.k, i, column, load)
    }

    /// The function of a fold, the number that changes nothing, what folds those of threads.
    pub fn fold(&self, i: usize) -> ([&'static str; 3], usize) {
        match self.k.body[i] {
            Scalar::Fold(r, x) => (fold(r), x),
            other => panic!("{other:?} is not a fold"),
        }
    }

    /// The place of a fold among those of the kernel.
    pub fn slot(&self, i: usize) -> usize {
        self.k.body[..i].iter().filter(|s| matches!(s, Scalar::Fold(..))).count()
    }

    /// All that these instructions need, themselves included, but for what folds are made of.
    pub fn needed(&self, all: impl Iterator<Item = usize>) -> BTreeSet<usize> {
        let (mut todo, mut found): (Vec<usize>, _) = (all.collect(), BTreeSet::new());
        while let Some(i) = todo.pop() {
            if found.insert(i) && !matches!(self.k.body[i], Scalar::Fold(..)) {
                todo.extend(self.k.body[i].uses());
            }
        }
        found
    }

    /// Begins an entry point.
    pub fn open(&mut self, name: &str, threads: usize) {
        let of = &self.name;
        self.line(
            0,
            &match self.part {
                false => {
                    format!("KERNEL void __launch_bounds__({threads}) {name}(const Of_{of} p) {{")
                }
                true => format!("DEVICE void {name}(const Of_{of}& p, const u32 block) {{"),
            },
        );
    }

    /// The parameters of all entry points.
    pub fn params(&self) -> String {
        let mut out = format!("struct Of_{} {{\n", self.name);
        let _ = writeln!(out, "    char* m[{}];", self.operands());
        if !self.k.params.is_empty() {
            let _ = writeln!(out, "    double p[{}];", self.k.params.len());
        }
        if self.cut.scratch() {
            out += "    float* scratch;\n";
        }
        out + "};\n"
    }

    /// What the parameters are.
    pub fn words(&self) -> Vec<Word> {
        let mut words: Vec<Word> =
            (0..self.operands()).map(|operand| Word::Address { operand, byte: 0 }).collect();
        words.extend(self.k.params.iter().map(|&p| Word::Float(f64::from(p))));
        words.extend(self.cut.scratch().then_some(Word::Scratch));
        words
    }

    /// Operands are numbered below this.
    pub fn operands(&self) -> usize {
        self.k.operands().max(1)
    }
}

/// One instruction of a program, other than a fold, as a number.
pub(in crate::cuda) fn line(
    k: &Rows,
    i: usize,
    column: &str,
    load: impl Fn(usize) -> String,
) -> String {
    let x = match k.body[i] {
        Scalar::Load(l) => format!("number({})", load(l)),
        Scalar::Const(c) => number(c),
        Scalar::Param(p) => format!("(float)p.p[{p}]"),
        Scalar::Column if k.inner.is_empty() => "0.0f".into(),
        Scalar::Column => format!("(float)({column})"),
        Scalar::Unary(f, a) => format!("{}(v{a})", unary(f)),
        Scalar::Binary(f, a, b) => format!("{}(v{a}, v{b})", binary(f)),
        Scalar::Where(a, b, c) => format!("f_where(v{a}, v{b}, v{c})"),
        Scalar::Select(m, a, b) => format!("f_select(v{m}, v{a}, v{b})"),
        Scalar::Fold(..) => panic!("a fold is not of one element"),
    };
    format!("const float v{i} = {x};")
}

impl Cut {
    /// True if launches leave each other numbers.
    pub fn scratch(&self) -> bool {
        matches!(self.shape, Shape::Parts(_))
            || matches!(self.shape, Shape::Columns { parts, .. } if parts > 1)
    }
}

/// How the elements of a pack lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lie {
    /// All are one.
    Same,
    Adjacent,
    Apart(usize),
}

impl Lie {
    pub fn of(v: &View, along: usize) -> Lie {
        match v.strides.get(along).copied().unwrap_or(0) {
            0 => Lie::Same,
            1 => Lie::Adjacent,
            s => Lie::Apart(s),
        }
    }

    /// The type of a pack that is read.
    pub fn ty(self, e: DType, pack: usize) -> String {
        let n = if self == Lie::Same { 1 } else { pack };
        format!("Pack<{}, {n}>", e.facts().cuda)
    }

    /// Reads a pack of which `count` elements are there, if that may be fewer than all.
    pub fn load(self, pack: usize, at: &str, count: Option<&str>) -> String {
        let all = pack.to_string();
        match (self, count) {
            (Lie::Same, _) => format!("load<1>({at})"),
            (Lie::Adjacent, None) => format!("load<{pack}>({at})"),
            (Lie::Adjacent, Some(n)) => {
                format!("{n} == {pack} ? load<{pack}>({at}) : load_some<{pack}>({at}, 1, {n})")
            }
            (Lie::Apart(s), n) => format!("load_some<{pack}>({at}, {s}, {})", n.unwrap_or(&all)),
        }
    }

    /// Element `k` of a pack that was read.
    pub fn element(self) -> &'static str {
        if self == Lie::Same { "at[0]" } else { "at[k]" }
    }

    /// Writes a pack, as far as it is there.
    pub fn store(self, pack: usize, at: &str, count: Option<&str>, x: &str) -> Vec<String> {
        let whole = format!("store_all({at}, {x});");
        let some = |s: usize, n: &str| format!("store_some({at}, {s}, {n}, {x});");
        match (self, count) {
            (Lie::Adjacent, None) => vec![whole],
            (Lie::Adjacent, Some(n)) => {
                vec![format!("if ({n} == {pack}) {whole}"), format!("else {}", some(1, n))]
            }
            (Lie::Same, n) => vec![some(1, n.unwrap_or(&pack.to_string()))],
            (Lie::Apart(s), n) => vec![some(s, n.unwrap_or(&pack.to_string()))],
        }
    }
}
