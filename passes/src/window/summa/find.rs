//! Which products can be taken in steps, and which of them go together.

use shardc_ir::func::{Func, Part, Uses, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{AllGather, Op, ReduceScatter};
use shardc_ir::rule::{Letter, Rule, has_letter};
use shardc_ir::types::AtomList;
use std::collections::BTreeMap;

/// A gathered operand: what is gathered, along which dim, and over what.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    pub piece: Value,
    pub dim: usize,
    pub atoms: AtomList,
}

/// What is gathered, and along which dim.
pub type Operand = (Value, usize);

impl Gathered {
    pub fn operand(&self) -> Operand {
        (self.piece, self.dim)
    }
}

/// A product: its node, and what is gathered of its operands; others stand as they are.
pub struct Leaf {
    pub dot: usize,
    pub gathered: [Option<Gathered>; 2],
}

/// A value that a sum of products makes, in so many steps.
pub struct Job {
    /// The node whose result this is.
    pub node: usize,
    pub leaves: Vec<Leaf>,
    /// Along which dim of the result the sum is reduced, and over what.
    pub reduced: Option<(usize, AtomList)>,
    /// Nodes whose place the steps take.
    pub replaces: Vec<usize>,
    pub steps: usize,
}

impl Job {
    /// Its last product. Where that was, its steps are: operands that others read die no later than
    /// they did.
    pub fn product(&self) -> usize {
        self.leaves.iter().map(|l| l.dot).max().expect("a job has products")
    }
}

/// The leading atoms of a list that have so many ranks together.
pub fn prefix(mesh: &Mesh, list: AtomList, ways: usize) -> Option<AtomList> {
    let of = |n: usize| list.take(n).iter().map(|a| mesh.size(a)).product::<usize>();
    (1..=list.len()).find(|&n| of(n) == ways).map(|n| list.take(n))
}

/// The smallest number of pieces of these lists, if all of them can be cut so first.
fn steps(mesh: &Mesh, lists: &[AtomList]) -> Option<usize> {
    let ways = |l: &AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
    let least = lists.iter().map(ways).min()?;
    lists.iter().all(|&l| prefix(mesh, l, least).is_some()).then_some(least)
}

/// Finds the products that can be taken in steps.
pub fn find(mesh: &Mesh, f: &Func) -> Vec<Job> {
    let s = GatheredSearch { mesh, f, uses: f.uses() };
    let whole = (0..f.nodes.len()).filter_map(|n| s.summed(n));
    let mut jobs: Vec<Job> = whole.collect();
    jobs.extend((0..f.nodes.len()).filter_map(|n| s.scattered(n)));
    jobs.sort_by_key(|j| j.node);
    jobs
}

struct GatheredSearch<'a> {
    mesh: &'a Mesh,
    f: &'a Func,
    uses: Uses,
}

impl GatheredSearch<'_> {
    /// What the value is gathered of, if all that cuts the dim is gathered and cuts it evenly.
    fn gathered(&self, v: Value) -> Option<Gathered> {
        let n = self.uses.made_by(&self.f.nodes, v)?;
        let Op::AllGather(AllGather { axes, dim }) = n.op else { return None };
        let piece = n.ins[0];
        let d = self.f.ty(piece).dims[dim];
        let all = !n.kept && d.atoms.set() == axes && axes.within(self.f.ty(v).replicated);
        (all && d.size % self.mesh.ways(axes) == 0).then_some(Gathered {
            piece,
            dim,
            atoms: d.atoms,
        })
    }

    fn rule(&self, dot: usize) -> Option<&Rule> {
        let Op::Dot(d) = &self.f.nodes[dot].op else { return None };
        Some(&d.rule.0)
    }

    /// What is gathered of operand `i` of a product, if it is along this letter.
    fn along(&self, dot: usize, i: usize, letter: Letter) -> Option<Gathered> {
        let g = self.gathered(self.f.nodes[dot].ins[i])?;
        (self.rule(dot)?.ins[i][g.dim].single() == Some(letter)).then_some(g)
    }

    /// A product of two operands that are gathered along what it sums.
    fn summed(&self, node: usize) -> Option<Job> {
        let rule = self.rule(node)?;
        let first = self.gathered(self.f.nodes[node].ins[0])?;
        let letter = rule.ins[0][first.dim].single()?;
        let second = self.along(node, 1, letter)?;
        if has_letter(&rule.outs[0], letter) {
            return None;
        }
        let steps = steps(self.mesh, &[first.atoms, second.atoms])?;
        let leaf = Leaf { dot: node, gathered: [Some(first), Some(second)] };
        Some(Job { node, leaves: vec![leaf], reduced: None, replaces: vec![node], steps })
    }

    /// A reduce_scatter of products with an operand gathered along what is scattered.
    fn scattered(&self, node: usize) -> Option<Job> {
        let n = &self.f.nodes[node];
        let Op::ReduceScatter(ReduceScatter { dim, .. }) = n.op else { return None };
        if n.kept || !self.f.ty(n.ins[0]).dims[dim].atoms.is_empty() {
            return None;
        }
        let to = self.f.ty(n.outs[0]).dims[dim];
        let mut job = Job {
            node,
            leaves: vec![],
            reduced: Some((dim, to.atoms)),
            replaces: vec![node],
            steps: 1,
        };
        let mut open = vec![n.ins[0]];
        while let Some(v) = open.pop() {
            let m = self.uses.maker(v)?;
            if self.uses.count(v) != 1 {
                return None;
            }
            job.replaces.push(m);
            if self.f.nodes[m].op.is_plain_sum() {
                open.extend(self.f.nodes[m].ins.iter().rev());
                continue;
            }
            let rule = self.rule(m)?;
            let letter = rule.outs[0][dim].single()?;
            let gathered = [0, 1].map(|i| self.along(m, i, letter));
            let plain = |i: usize| gathered[i].is_some() != has_letter(&rule.ins[i], letter);
            if plain(0) || plain(1) || gathered.iter().flatten().count() != 1 {
                return None;
            }
            job.leaves.push(Leaf { dot: m, gathered });
        }
        let lists =
            job.leaves.iter().flat_map(|l| l.gathered.into_iter().flatten()).map(|g| g.atoms);
        let lists: Vec<AtomList> = lists.chain([to.atoms]).collect();
        job.steps = steps(self.mesh, &lists)?;
        (to.size % job.steps == 0).then_some(job)
    }
}

/// Jobs of forward, or of backward, that share a gathered operand.
pub fn together<'a>(f: &Func, jobs: &'a [Job]) -> Vec<Vec<&'a Job>> {
    let mut groups: Vec<Vec<&'a Job>> = vec![];
    let mut of: BTreeMap<(Operand, bool, usize), usize> = BTreeMap::new();
    for job in jobs {
        let keys: Vec<_> = job
            .leaves
            .iter()
            .flat_map(|l| l.gathered.into_iter().flatten())
            .map(|g| (g.operand(), f.nodes[job.product()].part == Part::Forward, job.steps))
            .collect();
        let known = keys.iter().find_map(|k| of.get(k).copied());
        let group = known.unwrap_or(groups.len());
        if known.is_none() {
            groups.push(vec![]);
        }
        groups[group].push(job);
        keys.into_iter().for_each(|k| {
            of.entry(k).or_insert(group);
        });
    }
    groups
}
