//! How an op runs where layouts are asked for: as its results want it, or as its operands lie, whichever sends less.

use crate::choose::Cost;
use crate::shard::factors::{Factors, OpFactors};
use crate::shard::moves::Moves;
use crate::shard::ways::Execution;
use shardc_ir::alike::Alike;
use shardc_ir::func::{Func, Node, Port, Uses, Value, ValueMap};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Kind;
use shardc_ir::types::{AtomList, Type};
use smallvec::SmallVec;

/// Who says how loops are split.
#[derive(Clone, Copy, PartialEq)]
enum Says {
    /// Parameters stay where they are.
    Params,
    Results,
    /// Operands, of loops that are summed: each rank has its part.
    Sums,
    Operands,
}

/// Orders in which they are asked. The first counts unless another sends less.
const ORDERS: [[Says; 3]; 3] = [
    [Says::Params, Says::Results, Says::Sums],
    [Says::Params, Says::Sums, Says::Results],
    [Says::Params, Says::Operands, Says::Results],
];

/// What says how ops run.
pub struct Orders<'a> {
    pub mesh: &'a Mesh,
    pub f: &'a Func,
    /// By value; `active` are those with a gradient.
    pub is_param: &'a ValueMap<bool>,
    pub active: &'a ValueMap<bool>,
    /// Ranks form a grid, whose products are taken piece by piece as they were asked for.
    pub on_grid: bool,
}

/// Ways in which an op may run; the first counts unless another sends less.
type Ways = SmallVec<[Execution; 3]>;

/// How all ops may run.
struct RunFacts<'a> {
    ops: &'a Factors,
    /// Of nodes that are alike they are the same.
    ways: Vec<Ways>,
    /// By node.
    of: Vec<u32>,
    /// Nodes that use each value, and as which operand.
    uses: Uses,
}

impl RunFacts<'_> {
    fn ways(&self, u: usize) -> &Ways {
        &self.ways[self.of[u] as usize]
    }

    /// Whether a value is needed in this layout by another op than `u`, as they run by the first order.
    fn needed_by_others(&self, f: &Func, u: usize, v: Value, to: &Type) -> bool {
        self.uses.of(v).iter().any(|x| {
            let (other, j) = (x.at(), x.operand as usize);
            let needs = || self.ways(other)[0].required(f, &self.ops[other], other, j);
            other != u && needs().dims == to.dims
        })
    }
}

impl Orders<'_> {
    /// How all ops run.
    pub fn all(&self, ops: &Factors, moves: &mut Moves) -> Vec<Execution> {
        let f = self.f;
        let (mut ways, mut of) = (vec![], Vec::with_capacity(ops.len()));
        let mut alike: Alike<(usize, u32)> = Alike::default();
        for u in 0..ops.len() {
            let kind = ops.kind(u).into();
            let own = alike.find(kind, |x| self.lie_alike(x.0, u)).map(|x| x.1);
            of.push(own.unwrap_or_else(|| {
                let new = ways.len() as u32;
                ways.push(self.ways(u, &ops[u]));
                alike.add(kind, (u, new));
                new
            }));
        }
        let known = RunFacts { ops, ways, of, uses: f.uses() };
        (0..ops.len()).map(|u| self.execution(u, &known, moves)).collect()
    }

    /// True if values of two nodes of one op are split alike, and the same of their operands are parameters.
    fn lie_alike(&self, a: usize, b: usize) -> bool {
        let [a, b] = [a, b].map(|u| &self.f.nodes[u]);
        let same = |(a, b): (&Value, &Value)| {
            let is_param = |v: &Value| self.is_param[v];
            self.f.ty(*a).dims == self.f.ty(*b).dims && is_param(a) == is_param(b)
        };
        a.ins.iter().zip(&b.ins).all(same) && a.outs.iter().zip(&b.outs).all(same)
    }

    /// The splits of an op's loops by each order.
    fn ways(&self, u: usize, op: &OpFactors) -> Ways {
        let n = &self.f.nodes[u];
        let one = |order| execution(self.mesh, self.f, n, op, self.is_param, order);
        let mut all: Ways = SmallVec::new();
        all.push(one(&ORDERS[0]));
        // What later becomes a ring, or an exchange of rows, has to be as it was asked for.
        let kind = n.op.facts().kind;
        if self.on_grid || kind == Kind::Attention || kind.of_experts() {
            return all;
        }
        // Without loops that are summed the second is the first.
        let other = |order: &&[Says; 3]| order[1] != Says::Sums || op.is_sum();
        all.extend(ORDERS[1..].iter().filter(other).map(|order| one(order)));
        // What is shifted is gathered before, or else what crosses is exchanged.
        if let Some((g, _)) = op.shifted() {
            let gathered: Ways = all.iter().map(|e| e.whole_in(g)).collect();
            all.extend(gathered);
        }
        all.dedup();
        all
    }

    /// The split of an op's loops that sends least, forward and backward; of equal ones that of the first order.
    fn execution(&self, u: usize, known: &RunFacts, moves: &mut Moves) -> Execution {
        let all = known.ways(u);
        let least = match all.len() {
            1 => 0,
            _several => {
                let costs: SmallVec<[u64; 6]> =
                    all.iter().map(|e| self.sends(u, e, known, moves)).collect();
                costs.iter().enumerate().min_by_key(|c| c.1).map_or(0, |c| c.0)
            }
        };
        all[least].clone()
    }

    /// Picoseconds of what is sent so that an op runs so, between its values as they lie.
    fn sends(&self, u: usize, e: &Execution, known: &RunFacts, moves: &mut Moves) -> u64 {
        let (mesh, f, n, op) = (self.mesh, self.f, &self.f.nodes[u], &known.ops[u]);
        let mut sum = Cost::ZERO;
        let mut moved = |from: &Type, to: &Type, v: Value| {
            let (from, to) = (moves.id(from), moves.id(to));
            sum = sum.plus(moves.cost(from, to, self.active[v]));
        };
        let ins: SmallVec<[Type; 4]> = (0..n.ins.len()).map(|j| e.required(f, op, u, j)).collect();
        // Parameters change their layout once per step.
        for (&v, to) in n.ins.iter().zip(&ins).filter(|x| !self.is_param[x.0]) {
            // What another op needs as well is moved for both.
            if !known.needed_by_others(f, u, v, to) {
                moved(f.ty(v), to, v);
            }
        }
        let given: SmallVec<[&Type; 4]> = ins.iter().collect();
        let Ok((runs, outs)) = e.check(mesh, f, op, u, &given) else { return u64::MAX };
        for (&o, made) in n.outs.iter().zip(&outs) {
            let summed =
                |r: &Port| r.value == o && r.role.as_ref().is_some_and(|r| r.kind.is_summed());
            // What is summed over microbatches is reduced once per step.
            if !f.results.iter().any(summed) {
                let mut to = f.ty(o).clone();
                to.replicated = to.replicated.union(made.replicated).minus(to.sharded());
                moved(made, &to, o);
            }
        }
        if runs.layout().is_some() {
            let active = n.outs.iter().any(|o| self.active[o]);
            sum.time = sum.time.saturating_add(moves.step(&runs, &ins[0], &outs[0], active));
        }
        sum.time
    }
}

fn execution(
    mesh: &Mesh,
    f: &Func,
    n: &Node,
    op: &OpFactors,
    is_param: &ValueMap<bool>,
    order: &[Says],
) -> Execution {
    let mut e = Execution::whole(op);
    let mut take = |fac: u8, list: AtomList| {
        let mine = e.lists[fac as usize];
        if op.is_whole(fac) || !list.starts_with(mine) {
            return;
        }
        let mut new = mine;
        for a in list.iter().skip(mine.len()) {
            match new
                .push(a)
                .filter(|_| !e.atoms.has(a) && op.may_take(mesh, fac, new, a, &e.lists))
            {
                Some(l) => new = l,
                None => break,
            }
            e.atoms = e.atoms.with(a);
        }
        e.lists[fac as usize] = new;
    };
    for &says in order {
        op.each_dim(n, |i, v, result, d| {
            let speaks = match says {
                Says::Params => !result && is_param[v],
                Says::Results => result,
                Says::Sums | Says::Operands => !result,
            };
            let atoms = f.ty(v).dims[d].atoms;
            if speaks && !atoms.is_empty() {
                op.project_dim(mesh, i, d, atoms, |g, l| {
                    if says != Says::Sums || op.is_reduced(g) {
                        take(g, l);
                    }
                });
            }
        });
    }
    e
}
