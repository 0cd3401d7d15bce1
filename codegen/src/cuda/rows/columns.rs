//! Rows that lie next to each other: neighbouring threads have neighbouring rows, and the threads of
//! a block every other element of them.

use super::Entry;
use super::cut::{THREADS, folds};
use super::text::{Lie, Writer};
use shardc_ir::kernel::{Scalar, Stage, Store};

impl Writer<'_> {
    /// Prints the fold of rows, and what becomes of it: in one launch, or, if several blocks share the
    /// elements of a row, in two.
    pub fn columns(&mut self, stages: &[Stage], lanes: usize, parts: usize) -> Vec<Entry> {
        let [walk, end] = stages else { panic!("a fold by columns is one walk") };
        let all = self.cut.rows * self.rows_beside();
        let blocks = self.cut.rows * self.cut.packs.div_ceil(lanes);
        let threads = THREADS;
        if parts == 1 {
            let name = self.name.clone();
            self.block_of_columns(&name, [walk, end], lanes, parts);
            return vec![Entry { name, grid: [blocks, 1, 1], threads }];
        }
        let [first, second] = [0, 1].map(|i| format!("{}_{i}", self.name));
        self.block_of_columns(&first, [walk, end], lanes, parts);
        self.parts_of_columns(&second, [walk, end], parts, all);
        let last = [all.div_ceil(threads), 1, 1];
        vec![
            Entry { name: first, grid: [blocks, parts, 1], threads },
            Entry { name: second, grid: last, threads },
        ]
    }

    /// Rows that lie next to each other.
    fn rows_beside(&self) -> usize {
        *self.k.outer.last().expect("columns have an outer loop")
    }

    /// A block folds rows next to each other: their results, or one part of them, for scratch memory.
    fn block_of_columns(
        &mut self,
        name: &str,
        [walk, end]: [&Stage; 2],
        lanes: usize,
        parts: usize,
    ) {
        let (k, index, n, pack) = (self.k, self.index(), self.rows_beside(), self.cut.pack);
        let (blocks, teams, wide) = (self.cut.packs.div_ceil(lanes), THREADS / lanes, lanes * pack);
        let last = k.outer.len() - 1;
        self.line(0, "");
        self.open(name, THREADS);
        self.line(1, &format!("__shared__ float folded[{}][{teams}][{wide}];", folds(k)));
        self.line(1, &format!("const int lane = threadIdx.x % {lanes};"));
        self.line(1, &format!("const int team = threadIdx.x / {lanes};"));
        self.line(1, &format!("const {index} rest = blockIdx.x / {blocks};"));
        let first = format!("({index})(blockIdx.x % {blocks}) * {wide}");
        self.line(1, &format!("const {index} first = {first};"));
        self.split(1, "rest", 0, &k.outer[..last]);
        self.line(1, &format!("if (first + lane * {pack} < {n}) {{"));
        self.team_of_columns(walk, teams, parts);
        self.line(1, "}");
        self.line(1, "__syncthreads();");
        let own = format!("int s = threadIdx.x; s < {wide} && first + s < {n}; s += {THREADS}");
        self.line(1, &format!("for ({own}) {{"));
        self.line(2, &format!("const {index} i{last} = first + s;"));
        for &f in &walk.folds {
            let from = format!("folded[{}][i][s]", self.slot(f));
            self.fold_all(2, f, teams, &from);
        }
        if parts == 1 {
            self.results_of_column(2, walk, end);
        } else {
            let (all, at) = (self.cut.rows * n, format!("rest * {n} + first + s"));
            for &f in &walk.folds {
                let part = format!("({} + blockIdx.y) * {all}", self.slot(f) * parts);
                self.line(2, &format!("p.scratch[{part} + {at}] = a{f};"));
            }
        }
        self.line(1, "}");
        self.line(0, "}");
    }

    /// A thread folds the parts of a row that blocks have left in scratch memory.
    fn parts_of_columns(&mut self, name: &str, [walk, end]: [&Stage; 2], parts: usize, all: usize) {
        let (k, index) = (self.k, self.index());
        self.line(0, "");
        self.open(name, THREADS);
        let row = format!("({index})blockIdx.x * {THREADS} + threadIdx.x");
        self.line(1, &format!("const {index} row = {row};"));
        self.line(1, &format!("if (row >= {all}) return;"));
        self.split(1, "row", 0, &k.outer);
        for &f in &walk.folds {
            let from = format!("p.scratch[({} + i) * {all} + row]", self.slot(f) * parts);
            self.fold_all(1, f, parts, &from);
        }
        self.results_of_column(1, walk, end);
        self.line(0, "}");
    }

    /// Folds `from`, of so many `i`, in their order.
    fn fold_all(&mut self, depth: usize, f: usize, n: usize, from: &str) {
        let [function, start, _] = self.fold(f).0;
        self.line(depth, &format!("float a{f} = {start};"));
        let next = format!("a{f} = {function}(a{f}, {from});");
        self.line(depth, &format!("for (int i = 0; i < {n}; i++) {next}"));
    }

    /// A thread folds every so manieth element of neighbouring rows, and leaves that to its block.
    fn team_of_columns(&mut self, walk: &Stage, teams: usize, parts: usize) {
        let (k, index, pack, at_once) = (self.k, self.index(), self.cut.pack, self.cut.at_once);
        let (last, n) = (k.outer.len() - 1, self.rows_beside());
        let elements: usize = k.inner.iter().product();
        let count = (n % pack != 0).then_some("count");
        self.line(2, &format!("const {index} i{last} = first + lane * {pack};"));
        if count.is_some() {
            let there = format!("{n} - i{last} < {pack} ? (int)({n} - i{last}) : {pack}");
            self.line(2, &format!("const int count = {there};"));
        }
        let needed = self.needed(walk.folds.iter().flat_map(|&f| k.body[f].uses()));
        self.pointers(2, &needed, &[]);
        let loads = |each: bool| {
            let load = |&i: &usize| match k.body[i] {
                Scalar::Load(l) => Some(l).filter(|_| self.each[i] == each),
                _ => None,
            };
            needed.iter().filter_map(load).collect::<Vec<usize>>()
        };
        let (same, each) = (loads(false), loads(true));
        let lie = |l: usize| Lie::of(&k.loads[l].view, last);
        for &l in &same {
            let x = lie(l).load(pack, &format!("x{l}"), count);
            let ty = lie(l).ty(k.loads[l].elem, pack);
            self.line(2, &format!("const {ty} e{l} = {x};"));
        }
        for &f in &walk.folds {
            let start = self.fold(f).0[1];
            self.line(2, &format!("float a{f}[{pack}];"));
            self.line(2, "#pragma unroll");
            self.line(2, &format!("for (int k = 0; k < {pack}; k++) a{f}[k] = {start};"));
        }
        let len = elements.div_ceil(parts);
        let end = format!("begin + {len} < {elements} ? begin + {len} : {elements}");
        self.line(2, &format!("const {index} begin = ({index})blockIdx.y * {len};"));
        self.line(2, &format!("const {index} end = {end};"));
        let step = teams * at_once;
        self.line(2, &format!("for ({index} at = begin + team; at < end; at += {step}) {{"));
        for &l in &each {
            let ty = lie(l).ty(k.loads[l].elem, pack);
            self.line(3, &format!("{ty} e{l}[{at_once}];"));
        }
        self.open_elements(teams);
        self.split(4, "t", last + 1, &k.inner);
        let names: Vec<String> = (0..k.inner.len()).map(|l| format!("i{}", last + 1 + l)).collect();
        for &l in &each {
            let at = self.at(&k.loads[l].view, last + 1, &names);
            let x = lie(l).load(pack, &format!("x{l} + {at}"), count);
            self.line(4, &format!("e{l}[u] = {x};"));
        }
        self.line(3, "}");
        self.open_elements(teams);
        self.line(4, "#pragma unroll");
        self.line(4, &format!("for (int k = 0; k < {pack}; k++) {{"));
        for &i in walk.before.iter().chain(&walk.each).filter(|i| needed.contains(i)) {
            let unit = if self.each[i] { "[u]" } else { "" };
            let line = self.scalar(i, "0", |l| format!("e{l}{unit}.{}", lie(l).element()));
            self.line(5, &line);
        }
        for &f in &walk.folds {
            let ([function, ..], x) = self.fold(f);
            self.line(5, &format!("a{f}[k] = {function}(a{f}[k], v{x});"));
        }
        self.line(4, "}");
        self.line(3, "}");
        self.line(2, "}");
        self.line(2, "#pragma unroll");
        self.line(2, &format!("for (int k = 0; k < {pack}; k++) {{"));
        for &f in &walk.folds {
            let slot = self.slot(f);
            self.line(3, &format!("folded[{slot}][team][lane * {pack} + k] = a{f}[k];"));
        }
        self.line(2, "}");
    }

    /// Begins what is done with each of the elements that a thread has at once: `t` is its number.
    fn open_elements(&mut self, teams: usize) {
        let (index, at_once) = (self.index(), self.cut.at_once);
        self.line(3, "#pragma unroll");
        self.line(3, &format!("for (int u = 0; u < {at_once}; u++) {{"));
        self.line(4, &format!("const {index} t = at + u * {teams};"));
        self.line(4, "if (t >= end) continue;");
    }

    /// What becomes of a folded row, whose index is known.
    fn results_of_column(&mut self, depth: usize, walk: &Stage, end: &Stage) {
        let k = self.k;
        let stores: Vec<&Store> = k.stores.iter().collect();
        let needed = self.needed(stores.iter().map(|s| s.value));
        self.pointers(depth, &needed, &stores);
        for &f in walk.folds.iter().filter(|f| needed.contains(f)) {
            self.line(depth, &format!("const float v{f} = a{f};"));
        }
        for &i in walk.before.iter().chain(&end.before).filter(|i| needed.contains(i)) {
            let line = self.scalar(i, "0", |l| format!("*x{l}"));
            self.line(depth, &line);
        }
        for (i, s) in stores.iter().enumerate() {
            self.line(depth, &format!("assign(*y{i}, v{});", s.value));
        }
    }
}
