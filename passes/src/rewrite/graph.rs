//! A segment as an e-graph, saturated by rules within limits.

use super::attrs;
use super::pattern::{AttrPattern, Bindings, Line, Pattern, Target, read_op};
use super::segment::{Facts, Ref, Segment};
use egg::{Analysis, DidMerge, EGraph, ENodeOrVar, Id, Language, PatternAst, Searcher, Var};
use shardc_ir::func::Func;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{NAMES, Op};
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::mem::Discriminant;
use std::ops::Range;

/// Rounds of saturation.
const ROUNDS: usize = 8;
/// Nodes of an e-graph, beyond which no rule is applied.
const NODES: usize = 2_000;

/// What a term is, apart from its children.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Head {
    /// An attribute's text, by number.
    Attr(u32),
    /// A value that rules do not look into.
    Leaf(Ref),
    /// The op with this place in [`NAMES`]. Its children are attributes, then operands.
    Op { name: u8, attrs: u8, operands: u32 },
}

/// A node of the e-graph. The result's type is part of it, because ops may have a choice; patterns
/// match any type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Term {
    pub head: Head,
    pub children: SmallVec<[Id; 4]>,
    pub ty: u32,
}

impl Language for Term {
    type Discriminant = Head;
    fn discriminant(&self) -> Head {
        self.head
    }
    fn matches(&self, other: &Term) -> bool {
        self.head == other.head
    }
    fn children(&self) -> &[Id] {
        &self.children
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

/// Texts of attributes and types of values, by number.
#[derive(Clone, Default)]
pub(crate) struct Texts {
    pub attrs: Vec<String>,
    numbers: HashMap<String, u32>,
    pub types: Vec<Type>,
    type_numbers: HashMap<Type, u32>,
}

impl Texts {
    fn attr(&mut self, text: &str) -> u32 {
        if let Some(&n) = self.numbers.get(text) {
            return n;
        }
        self.attrs.push(text.into());
        let n = self.attrs.len() as u32 - 1;
        self.numbers.insert(text.into(), n);
        n
    }
    fn ty(&mut self, t: &Type) -> u32 {
        if let Some(&n) = self.type_numbers.get(t) {
            return n;
        }
        self.types.push(t.clone());
        let n = self.types.len() as u32 - 1;
        self.type_numbers.insert(t.clone(), n);
        n
    }
}

/// What an e-graph knows of its classes: an attribute, or the type of a value.
pub(crate) struct Known {
    pub mesh: Mesh,
    pub texts: Texts,
    /// Terms that rules made, with the line that made them first.
    pub made: Vec<(Term, &'static str)>,
    rule: &'static str,
}

impl Analysis<Term> for Known {
    /// Number of the type; of an attribute, its own number.
    type Data = u32;
    fn make(_: &mut EGraph<Term, Self>, t: &Term, _: Id) -> u32 {
        match t.head {
            Head::Attr(n) => n,
            Head::Leaf(_) | Head::Op { .. } => t.ty,
        }
    }
    fn merge(&mut self, a: &mut u32, b: u32) -> DidMerge {
        debug_assert_eq!(*a, b, "only values of one type are joined");
        DidMerge(false, false)
    }
}

pub(crate) type Graph = EGraph<Term, Known>;

/// A saturated segment.
pub(crate) struct Saturated {
    pub graph: Graph,
    /// The class of every node's result; `None` for opaque nodes.
    pub class: Vec<Option<Id>>,
    /// Classes of all operands, node by node.
    pub operands: Vec<Vec<Id>>,
}

/// One line, ready to search.
struct Compiled1 {
    name: &'static str,
    lhs: Pattern,
    rhs: Pattern,
    search: egg::Pattern<Term>,
    when: Option<(String, Vec<String>)>,
}

/// A set of lines, ready to search.
pub(crate) struct Compiled {
    lines: Vec<Compiled1>,
    texts: Texts,
    /// Lines by the op of their root.
    by_root: Vec<Vec<usize>>,
}

fn number_of(name: &str) -> usize {
    NAMES.iter().position(|n| *n == name).expect("an op's own name")
}

fn ast(p: &Pattern, texts: &mut Texts, out: &mut PatternAst<Term>) -> Id {
    let var = |v: &str| ENodeOrVar::Var(format!("?{v}").parse::<Var>().expect("a variable"));
    let (name, attrs, ins) = match p {
        Pattern::Var(v) => return out.add(var(v)),
        Pattern::Op { name, attrs, ins } => (name, attrs, ins),
    };
    let mut children = SmallVec::new();
    for a in attrs {
        children.push(match a {
            AttrPattern::Var(v) => out.add(var(v)),
            AttrPattern::Text(t) => {
                let head = Head::Attr(texts.attr(t));
                out.add(ENodeOrVar::ENode(Term { head, children: SmallVec::new(), ty: 0 }))
            }
            AttrPattern::Call { .. } => unreachable!("left sides compute nothing"),
        });
    }
    for i in ins {
        let id = ast(i, texts, out);
        children.push(id);
    }
    let (name, operands) = (number_of(name) as u8, ins.len() as u32);
    let head = Head::Op { name, attrs: attrs.len() as u8, operands };
    out.add(ENodeOrVar::ENode(Term { head, children, ty: 0 }))
}

impl Compiled {
    pub(crate) fn new(lines: &[&'static Line]) -> Compiled {
        let mut c =
            Compiled { lines: vec![], texts: Texts::default(), by_root: vec![vec![]; NAMES.len()] };
        for line in lines {
            let read = |text: &str| {
                Pattern::parse(text).unwrap_or_else(|e| panic!("rule {}: {e}", line.name))
            };
            let (lhs, rhs) = (read(line.lhs), read(line.rhs));
            let Pattern::Op { name, .. } = &lhs else { panic!("rule {}: no op", line.name) };
            c.by_root[number_of(name)].push(c.lines.len());
            let mut pattern = PatternAst::default();
            ast(&lhs, &mut c.texts, &mut pattern);
            let when = line.when.split_once(" ?").map(|(predicate, of)| {
                (predicate.to_string(), of.split(" ?").map(str::to_string).collect())
            });
            let search = egg::Pattern::new(pattern);
            c.lines.push(Compiled1 { name: line.name, lhs, rhs, search, when });
        }
        c
    }

    /// False if no left side stands anywhere in a run of nodes. Attributes are not compared.
    pub(crate) fn may_match(&self, f: &Func, facts: &Facts, run: &Range<usize>) -> bool {
        thread_local! {
            static NUMBERS: std::cell::RefCell<HashMap<Discriminant<Op>, usize>> =
                std::cell::RefCell::default();
        }
        let root = |op: &Op| {
            NUMBERS.with_borrow_mut(|n| {
                *n.entry(std::mem::discriminant(op)).or_insert_with(|| number_of(op.mnemonic()))
            })
        };
        run.clone().any(|n| {
            let lines = &self.by_root[root(&f.nodes[n].op)];
            lines.iter().any(|&l| stands(f, facts, run, n, &self.lines[l].lhs))
        })
    }
}

/// True if node `n` has the ops of a pattern.
fn stands(f: &Func, facts: &Facts, run: &Range<usize>, n: usize, p: &Pattern) -> bool {
    let Pattern::Op { name, ins, .. } = p else { return true };
    let node = &f.nodes[n];
    node.op.mnemonic() == *name
        && node.outs.len() == 1
        && node.ins.len() == ins.len()
        && node.ins.iter().zip(ins).all(|(v, p)| match p {
            Pattern::Var(_) => true,
            Pattern::Op { .. } => {
                let maker = facts.uses.maker(*v).filter(|m| run.contains(m));
                maker.is_some_and(|m| stands(f, facts, run, m, p))
            }
        })
}

/// The text of an op's attributes, one by one.
fn attrs_of(mesh: &Mesh, op: &Op) -> Vec<String> {
    let mut text = String::new();
    op.write(mesh, &mut text);
    let inside = text.split_once('[').map(|(_, t)| t.strip_suffix(']').unwrap_or(t));
    inside.map_or(vec![], |t| t.split(';').map(|a| a.trim().to_string()).collect())
}

fn add(g: &mut Graph, head: Head, children: SmallVec<[Id; 4]>, ty: u32) -> Id {
    let ty = if matches!(head, Head::Attr(_)) { 0 } else { ty };
    g.add(Term { head, children, ty })
}

/// The term of an op applied to classes.
fn op_term(g: &mut Graph, name: &str, attrs: &[String], ins: &[Id], ty: &Type) -> Term {
    let mut children = SmallVec::new();
    for a in attrs {
        let n = g.analysis.texts.attr(a);
        children.push(add(g, Head::Attr(n), SmallVec::new(), 0));
    }
    children.extend_from_slice(ins);
    let (name, operands) = (number_of(name) as u8, ins.len() as u32);
    let head = Head::Op { name, attrs: attrs.len() as u8, operands };
    Term { head, children, ty: g.analysis.texts.ty(ty) }
}

impl Term {
    /// The op of a term with its operands' classes; `None` for leaves and attributes.
    pub(crate) fn op(&self, g: &Graph) -> Option<(Op, &[Id])> {
        let Head::Op { name, attrs, .. } = self.head else { return None };
        let (a, ins) = self.children.split_at(attrs as usize);
        let attr = |id: &Id| g.analysis.texts.attrs[g[*id].data as usize].clone();
        let attrs: Vec<String> = a.iter().map(attr).collect();
        let ranks: Vec<usize> = ins.iter().map(|&i| ty_of(g, i).rank()).collect();
        let op = read_op(&g.analysis.mesh, NAMES[name as usize], &attrs, &ranks);
        Some((op.expect("terms are made of ops"), ins))
    }
    /// Children that are values.
    pub(crate) fn ins(&self) -> &[Id] {
        match self.head {
            Head::Op { attrs, .. } => &self.children[attrs as usize..],
            Head::Attr(_) | Head::Leaf(_) => &[],
        }
    }
}

pub(crate) fn ty_of(g: &Graph, id: Id) -> &Type {
    &g.analysis.texts.types[g[id].data as usize]
}

impl Target for Graph {
    type Id = Id;
    fn mesh(&self) -> &Mesh {
        &self.analysis.mesh
    }
    fn ty(&self, id: Id) -> Type {
        ty_of(self, id).clone()
    }
    fn push(
        &mut self,
        op: &Op,
        attrs: &[String],
        ins: &[Id],
        declared: Option<&Type>,
    ) -> Option<Id> {
        let types: SmallVec<[&Type; 4]> = ins.iter().map(|&i| ty_of(self, i)).collect();
        let outs = op.check(&self.analysis.mesh, &types, &[declared]).ok()?;
        drop(types);
        let [ty] = &outs[..] else { return None };
        let term = op_term(self, op.mnemonic(), attrs, ins, ty);
        if self.lookup(term.clone()).is_none() {
            let rule = self.analysis.rule;
            self.analysis.made.push((term.clone(), rule));
        }
        Some(self.add(term))
    }
}

/// Builds the e-graph of a segment and applies all lines until nothing is new or a limit is
/// reached. `None` if no line held.
pub(crate) fn saturate(
    mesh: &Mesh,
    f: &Func,
    s: &Segment,
    rules: &Compiled,
    fired: &mut BTreeMap<&'static str, usize>,
) -> Option<Saturated> {
    let texts = rules.texts.clone();
    let mut sat = build(Known { mesh: mesh.clone(), texts, made: vec![], rule: "" }, f, s);
    let g = &mut sat.graph;
    let mut any = false;
    for _ in 0..ROUNDS {
        let found: Vec<_> = rules.lines.iter().map(|l| l.search.search(g)).collect();
        let mut changed = false;
        for (line, matches) in rules.lines.iter().zip(found) {
            for m in matches {
                for subst in m.substs {
                    if g.total_number_of_nodes() < NODES && apply(g, line, m.eclass, &subst) {
                        *fired.entry(line.name).or_default() += 1;
                        changed = true;
                    }
                }
            }
        }
        g.rebuild();
        any |= changed;
        if !changed {
            break;
        }
    }
    any.then_some(sat)
}

fn build(known: Known, f: &Func, s: &Segment) -> Saturated {
    let mut g: Graph = EGraph::new(known);
    let (mut class, mut operands) = (vec![], vec![]);
    for (n, node) in f.nodes[s.run.clone()].iter().enumerate() {
        let mut ins: Vec<Id> = vec![];
        for &r in &s.ins[n] {
            let made = match r {
                Ref::Inner { node, .. } => class[node as usize],
                Ref::Outer(_) | Ref::Fresh(_) => None,
            };
            ins.push(made.unwrap_or_else(|| {
                let ty = g.analysis.texts.ty(s.ty(f, r));
                add(&mut g, Head::Leaf(r), SmallVec::new(), ty)
            }));
        }
        class.push((!s.nodes[n].opaque).then(|| {
            let attrs = attrs_of(&g.analysis.mesh, &node.op);
            let term = op_term(&mut g, node.op.mnemonic(), &attrs, &ins, f.ty(node.outs[0]));
            g.add(term)
        }));
        operands.push(ins);
    }
    g.rebuild();
    Saturated { graph: g, class, operands }
}

/// Applies a line to one match; true if the e-graph learnt something.
fn apply(g: &mut Graph, line: &Compiled1, root: Id, subst: &egg::Subst) -> bool {
    let mut with = Bindings::default();
    if !bind(g, &line.lhs, subst, &mut with) {
        return false;
    }
    if let Some((predicate, of)) = &line.when {
        let args: Option<Vec<&str>> = of.iter().map(|v| with.attr(v)).collect();
        if !args.is_some_and(|a| attrs::holds(predicate, &a)) {
            return false;
        }
    }
    let ty = ty_of(g, root).clone();
    g.analysis.rule = line.name;
    match line.rhs.build(&with, g, Some(&ty)) {
        Some(id) if ty_of(g, id) == &ty => g.union(root, id),
        _untyped => false,
    }
}

/// Reads what the variables of a pattern matched.
fn bind(g: &Graph, p: &Pattern, subst: &egg::Subst, with: &mut Bindings<Id>) -> bool {
    let get = |v: &str| subst.get(format!("?{v}").parse::<Var>().expect("a variable")).copied();
    match p {
        Pattern::Var(v) => {
            let Some(id) = get(v) else { return false };
            with.values.push((v.clone(), id));
            true
        }
        Pattern::Op { attrs, ins, .. } => {
            for a in attrs {
                let AttrPattern::Var(v) = a else { continue };
                let Some(id) = get(v) else { return false };
                with.attrs.push((v.clone(), g.analysis.texts.attrs[g[id].data as usize].clone()));
            }
            ins.iter().all(|p| bind(g, p, subst, with))
        }
    }
}
