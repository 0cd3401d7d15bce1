//! Rows whose elements are walked by one thread each, by a team of threads, or by several blocks.

use super::Entry;
use super::cut::{Shape, THREADS, folds};
use super::text::{Lie, Writer};
use shardc_ir::kernel::{Scalar, Stage, Store};
use std::collections::BTreeSet;

/// What one entry point does.
struct Job<'a> {
    /// Walks that others have done: what they have folded waits in scratch memory.
    done: &'a [Stage],
    /// Walks of its own, and what is made before and behind them.
    walks: &'a [Stage],
    /// Results of elements, and of the row.
    each: Vec<&'a Store>,
    row: Vec<&'a Store>,
}

/// A walk over a row that has begun.
struct Walk {
    depth: usize,
    /// The number of a thread's first pack.
    first: String,
    /// What keeps threads from packs that are not there.
    guard: Option<String>,
}

impl<'a> Writer<'a> {
    /// Prints all entry points.
    pub fn entries(&mut self) -> Vec<Entry> {
        let k = self.k;
        let stages = k.stages();
        let (each, row): (Vec<&Store>, Vec<&Store>) =
            k.stores.iter().partition(|s| k.stores_each(s));
        match self.cut.shape {
            Shape::Columns { lanes, parts } => self.columns(&stages, lanes, parts),
            Shape::Each | Shape::Team(_) => {
                vec![self.job(&self.name.clone(), &Job { done: &[], walks: &stages, each, row })]
            }
            Shape::Parts(_) => {
                let last = stages.len() - 1;
                let mut jobs: Vec<Job> = (0..last)
                    .filter(|&i| !stages[i].folds.is_empty())
                    .map(|i| (&stages[..i], &stages[i..=i]))
                    .map(|(done, walks)| Job { done, walks, each: vec![], row: vec![] })
                    .collect();
                let ends = [(each, vec![]), (vec![], row)];
                let ends = ends.into_iter().filter(|(e, r)| !e.is_empty() || !r.is_empty());
                jobs.extend(ends.map(|(each, row)| Job {
                    done: &stages[..last],
                    walks: &stages[last..],
                    each,
                    row,
                }));
                let named = jobs.iter().enumerate();
                named.map(|(i, job)| self.job(&format!("{}_{i}", self.name), job)).collect()
            }
        }
    }

    fn job(&mut self, name: &str, job: &Job) -> Entry {
        let k = self.k;
        let stores: Vec<&Store> = job.each.iter().chain(&job.row).copied().collect();
        let folded = job.walks.iter().flat_map(|s| &s.folds).flat_map(|&f| k.body[f].uses());
        let needed = self.needed(folded.chain(stores.iter().map(|s| s.value)));
        self.kept.clear();
        self.line(0, "");
        let entry = self.head(name, job);
        self.pointers(1, &needed, &stores);
        for stage in job.done {
            self.before(stage, &needed);
            stage.folds.iter().filter(|f| needed.contains(f)).for_each(|&f| self.join(f));
        }
        for (i, stage) in job.walks.iter().enumerate() {
            self.before(stage, &needed);
            let written = if i + 1 == job.walks.len() { &job.each[..] } else { &[] };
            if stage.folds.is_empty() && written.is_empty() {
                continue;
            }
            for &f in &stage.folds {
                let start = self.fold(f).0[1];
                self.line(1, &format!("float a{f} = {start};"));
            }
            if self.cut.packs > 0 {
                self.walk(stage, written);
            }
            stage.folds.iter().for_each(|&f| self.folded(f));
        }
        if !job.row.is_empty() {
            self.results(&job.row);
        }
        self.line(0, "}");
        entry
    }

    /// Which row a thread has, and which place in its team.
    fn head(&mut self, name: &str, job: &Job) -> Entry {
        let (k, cut, index) = (self.k, self.cut.clone(), self.index());
        let (rows, packs) = (cut.rows, cut.packs);
        let made = |grid: [usize; 3], threads| Entry { name: name.into(), grid, threads };
        let entry = match cut.shape {
            Shape::Each => {
                let n = rows * packs;
                let block = if self.part { "block" } else { "blockIdx.x" };
                self.open(name, THREADS);
                self.line(
                    1,
                    &format!("const {index} at = ({index}){block} * {THREADS} + threadIdx.x;"),
                );
                self.line(1, &format!("if (at >= {n}) return;"));
                let (row, t) = match (rows, packs) {
                    (1, _) => ("0".to_string(), "at".to_string()),
                    (_, 1) => ("at".into(), "0".into()),
                    _ => (format!("at / {packs}"), format!("at % {packs}")),
                };
                self.line(1, &format!("const {index} row = {row}, thread = {t};"));
                made([n.div_ceil(THREADS), 1, 1], THREADS)
            }
            Shape::Team(team) if team > 32 => {
                self.open(name, team);
                self.line(1, &format!("const {index} row = blockIdx.x;"));
                self.line(1, "const int thread = threadIdx.x;");
                made([rows, 1, 1], team)
            }
            Shape::Team(team) => {
                let threads = (rows * team).next_multiple_of(32).min(THREADS);
                let of_block = threads / team;
                self.open(name, threads);
                self.line(1, &format!("const {index} at = ({index})blockIdx.x * {of_block} + threadIdx.x / {team};"));
                // Threads without a row do what those of the last one do, and write nothing.
                let last = rows - 1;
                self.line(1, &format!("const {index} row = at < {last} ? at : {last};"));
                self.line(1, &format!("const int thread = threadIdx.x % {team};"));
                made([rows.div_ceil(of_block), 1, 1], threads)
            }
            Shape::Parts(parts) => {
                let walked = !job.each.is_empty() || job.row.is_empty();
                self.open(name, THREADS);
                self.line(1, &format!("const {index} row = blockIdx.y;"));
                self.line(1, "const int thread = threadIdx.x;");
                made([if walked { parts } else { 1 }, rows, 1], THREADS)
            }
            Shape::Columns { .. } => panic!("columns are printed by themselves"),
        };
        if self.team() > 32 && !matches!(cut.shape, Shape::Each) {
            self.line(1, &format!("__shared__ float folded[{}][32];", folds(k).max(1)));
        }
        self.split(1, "row", 0, &k.outer);
        entry
    }

    /// Threads of a row.
    fn team(&self) -> usize {
        match self.cut.shape {
            Shape::Each | Shape::Columns { .. } => 1,
            Shape::Team(n) => n,
            Shape::Parts(_) => THREADS,
        }
    }

    /// Numbers of the row that are made before a walk.
    fn before(&mut self, stage: &Stage, needed: &BTreeSet<usize>) {
        for &i in stage.before.iter().filter(|i| needed.contains(i)) {
            let line = self.scalar(i, "0", |l| format!("*x{l}"));
            self.line(1, &line);
        }
    }

    /// The place of a fold's numbers in scratch memory: one of every part, for every row.
    fn scratch(&self, f: usize, parts: usize, part: &str) -> String {
        format!("p.scratch[({} + row) * {parts} + {part}]", self.slot(f) * self.cut.rows)
    }

    /// Folds what the parts of a row have left.
    fn join(&mut self, f: usize) {
        let Shape::Parts(parts) = self.cut.shape else { panic!("only parts wait for each other") };
        let ([function, start, whole], slot) = (self.fold(f).0, self.slot(f));
        let left = self.scratch(f, parts, "i");
        self.line(1, &format!("float a{f} = {start};"));
        self.line(
            1,
            &format!(
                "for (int i = thread; i < {parts}; i += {THREADS}) a{f} = {function}(a{f}, {left});"
            ),
        );
        self.line(1, &format!("const float v{f} = {whole}<{THREADS}>(a{f}, folded[{slot}]);"));
    }

    /// Folds what the threads of a row have; that of a part is left to later launches.
    fn folded(&mut self, f: usize) {
        let (whole, team, slot) = (self.fold(f).0[2], self.team(), self.slot(f));
        let shared = if team > 32 { format!("folded[{slot}]") } else { "nullptr".into() };
        self.line(1, &format!("const float v{f} = {whole}<{team}>(a{f}, {shared});"));
        if let Shape::Parts(parts) = self.cut.shape {
            let place = self.scratch(f, parts, "blockIdx.x");
            self.line(1, &format!("if (thread == 0) {place} = v{f};"));
        }
    }

    /// Writes the numbers of the row, after all its threads have read what they may lie on.
    fn results(&mut self, stores: &[&Store]) {
        let k = self.k;
        match self.cut.shape {
            Shape::Each => {}
            _ if self.team() > 32 => self.line(1, "__syncthreads();"),
            _ => self.line(1, "__syncwarp();"),
        }
        let whose = match self.cut.shape {
            Shape::Each => None,
            Shape::Team(team) if team <= 32 => {
                Some(format!("if (thread == 0 && at < {}) {{", self.cut.rows))
            }
            _ => Some("if (thread == 0) {".to_string()),
        };
        let depth = 1 + usize::from(whose.is_some());
        whose.iter().for_each(|w| self.line(1, w));
        for (i, s) in k.stores.iter().enumerate().filter(|(_, s)| stores.contains(s)) {
            self.line(depth, &format!("assign(*y{i}, v{});", s.value));
        }
        if whose.is_some() {
            self.line(1, "}");
        }
    }

    /// Walks over the elements of a row, several packs at once.
    fn walk(&mut self, stage: &Stage, written: &[&Store]) {
        let w = self.begin();
        let read = |i: &usize| match self.k.body[*i] {
            Scalar::Load(l) => Some(l).filter(|l| !self.kept.contains(l)),
            _ => None,
        };
        let fresh: Vec<usize> = stage.each.iter().filter_map(read).collect();
        self.read(&w, &fresh);
        if self.cut.keep {
            self.kept.extend(&fresh);
        }
        let inside = self.open_packs(&w);
        let names = self.place(inside);
        self.compute(inside, stage, written);
        self.write(inside, written, &names);
        self.close_packs(&w);
        if !self.cut.keep {
            self.line(1, "}");
        }
    }

    /// Begins the loop of a walk, if there is one, and says where its packs are.
    fn begin(&mut self) -> Walk {
        let (packs, index) = (self.cut.packs, self.index());
        let step = self.team() * self.cut.at_once;
        let (begin, end, whole) = match self.cut.shape {
            Shape::Each => ("0", packs.to_string(), true),
            Shape::Parts(parts) => {
                let len = packs.div_ceil(parts);
                self.line(1, &format!("const {index} begin = ({index})blockIdx.x * {len};"));
                let end = format!("begin + {len} < {packs} ? begin + {len} : {packs}");
                self.line(1, &format!("const {index} end = {end};"));
                ("begin", "end".into(), false)
            }
            _ => ("0", packs.to_string(), packs % step == 0),
        };
        let guard = (!whole).then(|| format!("if (t < {end}) {{"));
        if self.cut.keep {
            return Walk { depth: 1, first: "thread".into(), guard };
        }
        let head = format!("{index} first = {begin}; first < {end}; first += {step}");
        self.line(1, &format!("for ({head}) {{"));
        Walk { depth: 2, first: "first + thread".into(), guard }
    }

    /// Begins what is done with each of the packs that a thread has at once: `t` is its number. The
    /// depth of what follows.
    fn open_packs(&mut self, w: &Walk) -> usize {
        let (index, team, at_once) = (self.index(), self.team(), self.cut.at_once);
        let mut at = w.first.clone();
        if at_once > 1 {
            self.line(w.depth, "#pragma unroll");
            self.line(w.depth, &format!("for (int u = 0; u < {at_once}; u++) {{"));
            at += &format!(" + u * {team}");
        } else {
            self.line(w.depth, "{");
        }
        self.line(w.depth + 1, &format!("const {index} t = {at};"));
        w.guard.iter().for_each(|g| self.line(w.depth + 1, g));
        w.depth + 1 + usize::from(w.guard.is_some())
    }

    fn close_packs(&mut self, w: &Walk) {
        w.guard.iter().for_each(|_| self.line(w.depth + 1, "}"));
        self.line(w.depth, "}");
    }

    /// The one of several packs that is meant.
    fn unit(&self) -> &'static str {
        if self.cut.at_once > 1 { "[u]" } else { "" }
    }

    /// Reads the packs of loads.
    fn read(&mut self, w: &Walk, loads: &[usize]) {
        let (pack, at_once) = (self.cut.pack, self.cut.at_once);
        let size = if at_once > 1 { format!("[{at_once}]") } else { String::new() };
        for &l in loads {
            let ty = self.lie(l).ty(self.k.loads[l].elem, pack);
            self.line(w.depth, &format!("{ty} e{l}{size};"));
        }
        if loads.is_empty() {
            return;
        }
        let inside = self.open_packs(w);
        let names = self.place(inside);
        for &l in loads {
            let at = self.at(&self.k.loads[l].view, self.k.outer.len(), &names);
            let x = self.lie(l).load(pack, &format!("x{l} + {at}"), self.count());
            self.line(inside, &format!("e{l}{} = {x};", self.unit()));
        }
        self.close_packs(w);
    }

    /// How elements of a load lie in a pack.
    fn lie(&self, load: usize) -> Lie {
        Lie::of(&self.k.loads[load].view, (self.k.outer.len() + self.k.inner.len()).wrapping_sub(1))
    }

    /// How many elements of a pack are there, if that is not always all.
    fn count(&self) -> Option<&'static str> {
        self.k.inner.last().filter(|n| **n % self.cut.pack != 0).map(|_| "count")
    }

    /// Names of the indices of pack `t` along the loops of the row.
    fn place(&mut self, depth: usize) -> Vec<String> {
        let (k, pack, index) = (self.k, self.cut.pack, self.index());
        let (no, ni) = (k.outer.len(), k.inner.len());
        self.line(depth, &format!("const {index} c = t * {pack};"));
        if self.count().is_some() {
            let n = k.inner[ni - 1];
            self.line(
                depth,
                &format!("const int count = {n} - c < {pack} ? (int)({n} - c) : {pack};"),
            );
        }
        if ni == 1 {
            return vec!["c".into()];
        }
        self.split(depth, "c", no, &k.inner);
        (0..ni).map(|l| format!("i{}", no + l)).collect()
    }

    /// The instructions of every element of a pack.
    fn compute(&mut self, depth: usize, stage: &Stage, written: &[&Store]) {
        let (k, pack) = (self.k, self.cut.pack);
        let stored = |s: &Store| k.stores.iter().position(|x| x == s).expect("one of the kernel's");
        for s in written {
            self.line(depth, &format!("float w{}[{pack}];", stored(s)));
        }
        self.line(depth, "#pragma unroll");
        self.line(depth, &format!("for (int k = 0; k < {pack}; k++) {{"));
        for &i in &stage.each {
            let element = |l| format!("e{l}{}.{}", self.unit(), self.lie(l).element());
            let line = self.scalar(i, "c + k", element);
            self.line(depth + 1, &line);
        }
        for &f in &stage.folds {
            let ([function, ..], x) = self.fold(f);
            let there = if self.count().is_some() { "if (k < count) " } else { "" };
            self.line(depth + 1, &format!("{there}a{f} = {function}(a{f}, v{x});"));
        }
        for s in written {
            self.line(depth + 1, &format!("w{}[k] = v{};", stored(s), s.value));
        }
        self.line(depth, "}");
    }

    /// Writes a pack of every result.
    fn write(&mut self, depth: usize, written: &[&Store], names: &[String]) {
        let (k, pack) = (self.k, self.cut.pack);
        let last = (k.outer.len() + k.inner.len()).wrapping_sub(1);
        // Threads without a row of their own write nothing.
        let rows = self.cut.rows;
        let idle = matches!(self.cut.shape, Shape::Team(t) if t <= 32);
        for (i, s) in k.stores.iter().enumerate().filter(|(_, s)| written.contains(s)) {
            let at = format!("y{i} + {}", self.at(&s.view, k.outer.len(), names));
            let lines = Lie::of(&s.view, last).store(pack, &at, self.count(), &format!("w{i}"));
            let guarded = idle && !lines.is_empty();
            if guarded {
                self.line(depth, &format!("if (at < {rows}) {{"));
            }
            lines.iter().for_each(|l| self.line(depth + usize::from(guarded), l));
            if guarded {
                self.line(depth, "}");
            }
        }
    }
}
