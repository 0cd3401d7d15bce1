//! A large plan made small: the same programs and the same model on axes of two ranks, with letters of the
//! least sizes that divide as before.
//!
//! All dims that letters or roles tie have one size; a dim of several letters has their product. Numbers
//! stay what they are (1/h is a number that the model has too), and so do layers, stages, microbatches,
//! the axes of rings and of products in steps, whose ranks the programs count, and dims whose elements
//! the programs count: what they put one behind the other, and choose by its number.

mod sizes;

use super::Data;
use crate::ledger::Gap;
use crate::local::Fault;
use crate::local::letters;
use crate::ops::{Counts, law, sizes as sizes_of};
use crate::{Recipe, Subject};
use shardc_ir::func::{Func, FuncKind, Module, Node, RoleKind, StateName, Value};
use shardc_ir::mesh::{Atom, AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::Op;
use shardc_ir::rule::Letter;
use shardc_ir::types::{AtomList, Type};
use std::collections::BTreeMap;

/// The plan and what it was made of, smaller.
pub struct Smaller {
    pub model: Module,
    pub programs: Module,
    pub recipe: Recipe,
    pub data: Data,
}

/// A size that is not known yet: of a dim, or of a letter.
type Size = usize;

/// All sizes and what ties them.
struct Net<'a> {
    modules: [&'a Module; 2],
    mesh: Mesh,
    /// By module and function: where the dims of each value begin.
    first: [Vec<Vec<Size>>; 2],
    /// What it was.
    was: Vec<usize>,
    parent: Vec<Size>,
    /// A size that is a number times other sizes.
    products: Vec<(Size, usize, Vec<Size>)>,
    /// A size that is another one divided by a number.
    quotients: Vec<(Size, usize, Size)>,
    /// A size that must be a multiple of a number.
    multiples: Vec<(Size, usize)>,
    /// One that must be this number: its letter is cut to single elements.
    exact: Vec<(Size, usize)>,
    /// Those that stay as they are: their elements are counted, or the text of a rule names them.
    stays: Vec<Size>,
    /// Sizes in attributes: module, function, node, letter.
    attributes: Vec<([usize; 3], Letter, Size)>,
    /// What is chosen, by size that is not a product.
    chosen: BTreeMap<Size, usize>,
}

const PROGRAMS: usize = 0;
const MODEL: usize = 1;

/// Makes a plan smaller.
///
/// # Errors
/// Names the op or the size that cannot be made smaller.
pub fn smaller(subject: &Subject, data: Data) -> Result<Smaller, Gap> {
    let mut net = Net::new(subject);
    for module in [PROGRAMS, MODEL] {
        for (f, func) in net.modules[module].funcs.iter().enumerate() {
            for (i, n) in func.nodes.iter().enumerate() {
                net.node([module, f, i], n).map_err(|lemma| {
                    let text = shardc_ir::text::node_text(&net.modules[module].mesh, func, n).text;
                    let place = format!("@{}: {text}", func.name);
                    Gap { op: n.op.mnemonic().into(), place, lemma }
                })?;
            }
        }
    }
    let whole = |lemma: String| Gap { op: "plan".into(), place: "programs".into(), lemma };
    let (rows, seq) = net.roles(subject.schedule.microbatches).map_err(whole)?;
    net.pieces();
    net.one_product_each().map_err(whole)?;
    net.choose(seq.as_slice()).map_err(whole)?;
    net.made(subject, data, rows).map_err(whole)
}

impl<'a> Net<'a> {
    fn new(subject: &Subject<'a>) -> Net<'a> {
        let modules = [subject.programs, subject.model];
        let mut was = vec![];
        let first = modules.map(|m| {
            let of = |f: &Func| {
                let dims = |v: &shardc_ir::func::ValueInfo| {
                    let at = was.len();
                    was.extend(v.ty.sizes());
                    at
                };
                f.values.iter().map(dims).collect()
            };
            m.funcs.iter().map(of).collect()
        });
        let parent = (0..was.len()).collect();
        Net {
            modules,
            mesh: mesh(subject.programs),
            first,
            was,
            parent,
            products: vec![],
            quotients: vec![],
            multiples: vec![],
            exact: vec![],
            stays: vec![],
            attributes: vec![],
            chosen: BTreeMap::new(),
        }
    }

    fn dim(&self, module: usize, f: usize, v: Value, dim: usize) -> Size {
        self.first[module][f][v.0 as usize] + dim
    }

    fn root(&self, mut s: Size) -> Size {
        while self.parent[s] != s {
            s = self.parent[s];
        }
        s
    }

    fn tie(&mut self, a: Size, b: Size) -> Result<(), String> {
        let [a, b] = [self.root(a), self.root(b)];
        if self.was[a] != self.was[b] {
            return Err(format!("sizes {} and {} that must be one", self.was[a], self.was[b]));
        }
        self.parent[a.max(b)] = a.min(b);
        Ok(())
    }

    /// Ties the sizes of a node by its letters.
    fn node(&mut self, at: [usize; 3], n: &Node) -> Result<(), String> {
        let [module, f, _] = at;
        let func = &self.modules[module].funcs[f];
        // Operand, result: dims are as they were, but one that is a multiple of the other.
        let alike = |net: &mut Net, but: Option<(usize, bool, usize)>| -> Result<(), String> {
            for (x, y) in n.ins.iter().zip(&n.outs) {
                for d in 0..func.ty(*x).rank().min(func.ty(*y).rank()) {
                    let [x, y] = [*x, *y].map(|v| net.dim(module, f, v, d));
                    match but {
                        Some((dim, true, by)) if dim == d => net.quotients.push((y, by, x)),
                        Some((dim, false, by)) if dim == d => net.quotients.push((x, by, y)),
                        _same => net.tie(x, y)?,
                    }
                }
            }
            Ok(())
        };
        match law(&n.op).between() {
            None if n.ins.is_empty() => Ok(()),
            None => self.letters(at, &n.op, n),
            // Buffers of experts.
            Some(_) if n.ins.len() != n.outs.len() => {
                Err("to make buffers of experts smaller".into())
            }
            Some(b) => {
                let ways = self.mesh.ways(b.axes());
                alike(self, b.whole().map(|(dim, operand)| (dim, operand, ways)))
            }
        }
    }

    fn letters(&mut self, at: [usize; 3], op: &Op, n: &Node) -> Result<(), String> {
        let [module, f, _] = at;
        let func = &self.modules[module].funcs[f];
        let types = |vs: &[Value]| -> Vec<&'a Type> { vs.iter().map(|&v| func.ty(v)).collect() };
        let [ins, outs] = [types(&n.ins), types(&n.outs)];
        let told = |fault: Fault| match fault {
            Fault::Wrong(s) | Fault::Unknown(s) => s,
        };
        let law = law(op);
        let multiples = law.multiples(&ins)?;
        let rule = letters::rule(law, &ins, &outs).map_err(told)?;
        let sizes = letters::sizes(op, &rule, &ins, &outs).map_err(told)?;
        let mut known: BTreeMap<Letter, Size> = BTreeMap::new();
        let dims = rule.ins.iter().chain(&rule.outs).zip(n.ins.iter().chain(&n.outs));
        let all: Vec<_> = dims
            .flat_map(|(dims, &v)| dims.iter().enumerate().map(move |(d, g)| (*g, v, d)))
            .collect();
        for (l, v, d) in all.iter().filter_map(|(g, v, d)| Some((g.single()?, *v, *d))) {
            let own = self.dim(module, f, v, d);
            let first = *known.entry(l).or_insert(own);
            self.tie(first, own)?;
        }
        for (g, v, d) in all.iter().filter(|x| x.0.single().is_none()) {
            for l in g.letters() {
                if !known.contains_key(l) {
                    known.insert(*l, self.was.len());
                    self.parent.push(self.was.len());
                    self.was.push(sizes.get(l).copied().unwrap_or(1));
                }
            }
            let of: Vec<Size> = g.letters().iter().map(|l| known[l]).collect();
            self.products.push((self.dim(module, f, *v, *d), 1, of));
            let dim = func.ty(*v).dims[*d];
            let cut = letters::split(&self.modules[module].mesh, g, &sizes, dim).map_err(told)?;
            for (i, (l, own)) in cut.iter().enumerate() {
                let by = self.ways(*own);
                match cut[i + 1..].iter().any(|c| !c.1.is_empty()) {
                    true => self.exact.push((known[l], by)),
                    false => self.multiples.push((known[l], by)),
                }
            }
        }
        for (dim, by, of) in multiples {
            let [dim, of] = [dim, of].map(|[i, d]| self.dim(module, f, n.ins[i], d));
            self.products.push((dim, by, vec![of]));
        }
        let along = |v: Value| law.along(func.ty(v).rank()).map(|d| self.dim(module, f, v, d));
        let counted = n.ins.iter().chain(&n.outs).filter(|_| law.stays()).filter_map(|&v| along(v));
        self.stays.extend(counted.collect::<Vec<_>>());
        // The textbook has the text of update rules, which says how many parts a dim has.
        let cuts = all.iter().any(|x| x.0.single().is_none());
        let is_text = cuts && func.kind == FuncKind::OptimizerStep;
        for (l, _) in sizes_of(op) {
            let own = known.get(&l).copied().ok_or("an attribute of a letter that no dim has")?;
            self.attributes.push((at, l, own));
            self.stays.extend(is_text.then_some(own));
        }
        Ok(())
    }

    fn ways(&self, list: AtomList) -> usize {
        list.iter().map(|a| self.mesh.size(a)).product()
    }

    /// Ties what functions hand to each other and to the model; the rows of a microbatch, and tokens of a row.
    fn roles(&mut self, microbatches: usize) -> Result<(Size, Option<Size>), String> {
        // A state has dims of its own, as the sums of a matrix's rows.
        type Key = (u8, Option<StateName>, String);
        let mut known: BTreeMap<Key, Vec<Size>> = BTreeMap::new();
        let (mut batch, mut rows, mut seq): (Vec<Size>, Vec<Size>, Vec<Size>) =
            (vec![], vec![], vec![]);
        for module in [MODEL, PROGRAMS] {
            for (f, func) in self.modules[module].funcs.iter().enumerate() {
                let once = module == PROGRAMS && !func.kind.is_looped();
                for p in func.args.iter().chain(&func.results) {
                    let Some(role) = &p.role else { continue };
                    let mut dims: Vec<Size> = (0..func.ty(p.value).rank())
                        .map(|d| self.dim(module, f, p.value, d))
                        .collect();
                    let kind = match role.kind {
                        RoleKind::Param
                        | RoleKind::Unsharded
                        | RoleKind::Grad
                        | RoleKind::GradSum
                        | RoleKind::GradFrom(_)
                        | RoleKind::GradShown
                        | RoleKind::State(_) => 0,
                        RoleKind::Input(_) => 1,
                        RoleKind::Stash => 2,
                        RoleKind::Edge => 3,
                        RoleKind::Sum | RoleKind::TokensPerExpert | RoleKind::Mean => 4,
                        _shown => 5,
                    };
                    if once && role.kind.input().is_some_and(|i| i.batch) {
                        batch.push(dims.remove(0));
                        let row = (6, None, role.name.to_string());
                        let same = known.entry(row).or_insert(dims.clone()).clone();
                        self.all(&same, &dims)?;
                        continue;
                    }
                    if let Some(own) = role.kind.input() {
                        rows.extend(own.batch.then(|| dims[0]));
                        seq.extend(own.tokens().map(|d| dims[d]));
                    }
                    let state = match role.kind {
                        RoleKind::State(state) => Some(state),
                        _other => None,
                    };
                    let key = (kind, state, role.name.to_string());
                    let same = known.entry(key).or_insert(dims.clone()).clone();
                    self.all(&same, &dims)?;
                }
            }
        }
        // One row is of one shape, in a microbatch and in the batch.
        for ((.., name), row) in known.iter().filter(|x| x.0.0 == 6) {
            if let Some(own) = known.get(&(1, None, name.clone())) {
                self.all(own.get(1..).unwrap_or_default(), row)?;
            }
        }
        let all = *rows.first().ok_or("no input of rows")?;
        rows.into_iter().try_for_each(|r| self.tie(all, r))?;
        let tokens = seq.first().copied();
        seq.into_iter().try_for_each(|t| self.tie(tokens.unwrap_or(t), t))?;
        for b in batch {
            self.products.push((b, microbatches, vec![all]));
        }
        Ok((all, tokens))
    }

    fn all(&mut self, a: &[Size], b: &[Size]) -> Result<(), String> {
        if a.len() != b.len() {
            return Err("a role of two shapes".into());
        }
        a.iter().zip(b).try_for_each(|(x, y)| self.tie(*x, *y))
    }

    /// What is cut evenly stays so.
    fn pieces(&mut self) {
        let m = self.modules[PROGRAMS];
        for (f, func) in m.funcs.iter().enumerate() {
            for (v, info) in func.values.iter().enumerate() {
                for (d, dim) in info.ty.dims.iter().enumerate() {
                    let pieces = info.ty.pieces(&m.mesh, d);
                    if pieces > 1 && dim.size % pieces == 0 {
                        let s = self.dim(PROGRAMS, f, Value(v as u32), d);
                        self.multiples.push((s, self.ways(dim.atoms)));
                    }
                }
            }
        }
    }

    fn resized(&self, module: usize) -> Module {
        let mut m = self.modules[module].clone();
        for (f, func) in m.funcs.iter_mut().enumerate() {
            for (v, info) in func.values.iter_mut().enumerate() {
                for (d, dim) in info.ty.dims.iter_mut().enumerate() {
                    dim.size = self.size(self.dim(module, f, Value(v as u32), d));
                }
            }
            for n in &mut func.nodes {
                if let Op::Literal(k) = &mut n.op {
                    let n = func.values[n.outs[0]].ty.elements();
                    k.values = k.values.iter().copied().cycle().take(n).collect();
                }
            }
        }
        for ([_, f, i], l, s) in self.attributes.iter().filter(|x| x.0[0] == module) {
            let own = m.funcs[*f].nodes[*i].op.sizes_mut();
            let own = own.into_iter().flat_map(|sizes| sizes.0.iter_mut());
            own.filter(|x| x.0 == *l).for_each(|x| x.1 = self.size(*s));
        }
        m
    }

    fn made(&self, subject: &Subject, data: Data, rows: Size) -> Result<Smaller, String> {
        let mut programs = self.resized(PROGRAMS);
        programs.mesh = self.mesh.clone();
        // Tokens are places of the tables that they choose from.
        let tables = (0..self.was.len()).filter(|s| self.was[*s] >= data.vocab);
        let tables = tables.filter(|s| self.indexed(*s));
        let vocab = tables.map(|s| self.size(s)).min().unwrap_or(data.vocab);
        let global_batch = self.size(rows) * subject.schedule.microbatches;
        Ok(Smaller {
            model: self.resized(MODEL),
            programs,
            recipe: Recipe { global_batch, ..subject.recipe.clone() },
            data: Data { vocab },
        })
    }

    /// True for a dim of the model that an index chooses from.
    fn indexed(&self, s: Size) -> bool {
        self.modules[MODEL].funcs.iter().enumerate().any(|(f, func)| {
            let takes = func.nodes.iter().filter(|n| matches!(n.op, Op::Take(_)));
            takes.into_iter().any(|n| {
                (0..func.ty(n.ins[0]).rank()).any(|d| self.dim(MODEL, f, n.ins[0], d) == s)
            })
        })
    }
}

/// The mesh with two ranks on each axis, but those of which the programs count the ranks.
fn mesh(m: &Module) -> Mesh {
    let counted = |op: &Op| {
        let between = law(op).between().filter(|b| b.counts() != Counts::Nothing);
        between.map_or(AtomSet::EMPTY, |b| b.axes())
    };
    let nodes = m.funcs.iter().flat_map(|f| &f.nodes);
    let kept = nodes.map(|n| counted(&n.op)).fold(AtomSet::EMPTY, AtomSet::union);
    let kept = kept.union(m.mesh.axis(PIPELINE).unwrap_or_default());
    let mut mesh = m.mesh.clone();
    for (i, a) in mesh.atoms.iter_mut().enumerate() {
        if !kept.has(Atom(i as u8)) {
            a.size = a.size.min(2);
        }
    }
    for (i, axis) in mesh.axes.iter_mut().enumerate() {
        axis.size = 1;
        for a in mesh.atoms.iter_mut().filter(|a| usize::from(a.axis) == i) {
            a.pre = axis.size;
            axis.size *= a.size;
        }
    }
    mesh
}
