//! What a rank of a plan of transformers has of each value, beside what the styles of its modules take.
//!
//! The program of such a rank is that of one device, with fewer columns: what a module gives goes into the next one as
//! it is, and nothing is exchanged but what styles exchange. So sizes follow from letters: what two operands have in
//! common, a rank has of both or a part of both; what is summed or used as a whole, it has all of, or a style adds the
//! parts. [`propagate`](super::super::derive) would put an exchange wherever sizes do not fit, and tell of a program that
//! runs. Backward is read off the same letters: of what every rank has alike and uses with its own part of another value,
//! each has a part of the gradient, until a style adds these.

use super::modules::Modules;
use super::transformers::{Does, Plan, Style, generic};
use shardc_ir::func::{Func, Node, Value, ValueMap};
use shardc_ir::infer::{Linear, Loops, sizes};
use shardc_ir::ops::Kind;
use shardc_ir::rule::{Dims, Group, Letter, Rule, has_letter};
use shardc_ir::weights::Weight;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Reasons that are told.
const MOST: usize = 12;

/// What a rank has of a value.
#[derive(Clone, Default)]
struct OnRank {
    /// By dim: one of as many parts as there are ranks; none: as much as what it meets.
    cut: Vec<Option<bool>>,
    /// A part of a sum.
    part: bool,
    /// The module that made it; none: a parameter or an input.
    by: String,
    /// The same, without modules that change its dims and elements alone.
    of: String,
    /// A parameter, or made of parameters alone.
    weight: bool,
}

struct Fitting<'a> {
    plan: &'a Plan,
    f: &'a Func,
    /// Ranks of tp.
    ranks: usize,
    weights: BTreeMap<&'a str, &'a Weight>,
    held: ValueMap<OnRank>,
    modules: &'a Modules,
    /// By node what its module takes, and whether it is a product of a linear that has a style.
    taken: Vec<(Vec<OnRank>, bool)>,
    why: Vec<String>,
}

/// What follows from a plan.
pub(super) struct Fit {
    /// Why ranks do not compute what the model means; none if they do.
    pub(super) why: Vec<String>,
    /// Parameters of whose gradients each rank has a part.
    pub(super) parts: BTreeSet<String>,
}

/// Walks through the program of a rank, forward and backward.
pub(super) fn fit(
    plan: &Plan,
    f: &Func,
    (weights, modules): (&[Weight], &Modules),
    ranks: usize,
) -> Fit {
    let by_param = weights.iter().map(|w| (w.param.as_str(), w)).collect();
    let held = f.per_value(OnRank::default());
    let why = if plan.has_dtensors() { modules.misfits(plan) } else { vec![] };
    let taken = vec![];
    let mut walk = Fitting { plan, f, ranks, weights: by_param, held, modules, taken, why };
    for a in &f.args {
        let name = a.role.as_ref().map(|r| r.name.to_string()).unwrap_or_default();
        let weight = walk.weights.get(name.as_str()).copied();
        walk.held[a.value] = OnRank {
            cut: vec![Some(false); f.ty(a.value).rank()],
            weight: weight.is_some(),
            by: weight.map_or(String::new(), name_of),
            of: weight.map_or(name, name_of),
            ..OnRank::default()
        };
    }
    let experts = f.nodes.iter().map(|n| walk.module(n)).filter(|m| m.ends_with(".experts"));
    experts.collect::<BTreeSet<_>>().iter().for_each(|m| walk.of_their_rules(m));
    for n in &f.nodes {
        walk.node(n);
    }
    let (parts, twice) = walk.parts();
    twice.into_iter().for_each(|w| walk.say(w));
    walk.why.truncate(MOST);
    Fit { why: walk.why, parts }
}

/// A parameter as rules name it.
fn name_of(w: &Weight) -> String {
    generic(&w.tensor.replace("{}", "0"))
}

impl<'a> Fitting<'a> {
    fn say(&mut self, why: String) {
        if !self.why.contains(&why) {
            self.why.push(why);
        }
    }

    fn module(&self, n: &Node) -> String {
        generic(&self.f.scope_info(n.scope).path)
    }

    fn does(&self, module: &str) -> Does {
        self.plan.of_module(module).map_or(Does::Nothing, |s| s.does)
    }

    /// Experts whose module and parameters have styles that do not go together.
    fn of_their_rules(&mut self, module: &str) {
        let does = self.does(module);
        let biases = self.weights.values().any(|w| w.experts.is_some() && !w.matrix);
        if does == Does::Adds && biases {
            self.say(format!("{module}: moe_tp_experts: each rank adds the biases of experts"));
        }
        for rows in [false, true] {
            let own = self.plan.of_experts(rows);
            if own.is_some_and(|s| s.1.word == "grouped_gemm") != (does == Does::Dispatches) {
                let what = if rows { "down_proj" } else { "gate_up_proj" };
                self.say(format!(
                    "{module}: ep_dispatch_experts and grouped_gemm go together ({what})"
                ));
            }
        }
    }

    /// What a module takes of a value that another one has made.
    fn taken(&mut self, v: Value, module: &str) -> OnRank {
        let mut h = self.held[v].clone();
        if h.weight || h.by == module || h.by.is_empty() {
            return h;
        }
        let does = self.does(&h.by);
        match does {
            Does::Gathers => h.cut.fill(Some(false)),
            Does::Adds if h.part => {}
            Does::Adds => self.say(format!(
                "{}: moe_tp_experts: it adds what {} ranks give, and each gives all of it",
                h.by, self.ranks
            )),
            _other if h.part => self
                .say(format!("{}: each rank gives a part of a sum, and no style adds them", h.by)),
            _other => {}
        }
        h.part = false;
        h
    }

    /// The letters of a node, with sizes.
    fn rule(&self, n: &'a Node) -> (Cow<'a, Rule>, Loops) {
        let types: Vec<_> = n.ins.iter().map(|v| self.f.ty(*v)).collect();
        let ranks: Vec<usize> = types.iter().map(|t| t.rank()).collect();
        let rule = n.op.def().rule(&ranks);
        let loops = sizes(&rule, &types, n.op.def().sizes()).unwrap_or_default();
        (rule, loops)
    }

    fn node(&mut self, n: &'a Node) {
        let module = self.module(n);
        let does = self.does(&module);
        let mut ins: Vec<OnRank> = n.ins.iter().map(|v| self.taken(*v, &module)).collect();
        if does == Does::Table && ins.iter().any(|h| h.by != module && is_cut(h).contains(&true)) {
            self.say(format!(
                "{module}: embeddings take all of what they are given, and a rank has a part"
            ));
        }
        let weight = !ins.is_empty() && ins.iter().all(|h| h.weight);
        let of_matrix = (self.modules.linears.contains(&module) && does.is_linear())
            .then(|| ins.iter().position(|h| h.weight && !weight))
            .flatten();
        let rows = ins.first().is_some_and(|h| h.by == module);
        let outs = match (of_matrix, n.op.facts().kind) {
            (Some(w), Kind::Product) => self.product(n, &module, &ins, w),
            (Some(_), Kind::Lookup) => self.lookup(n, &module),
            (at, _) => {
                for (i, h) in ins.iter_mut().enumerate().filter(|(_, h)| h.weight && !weight) {
                    // A bias is cut as what it is added to; where torch knows the parts, it brings what is needed.
                    let bias = at == Some(i) && matches!(does, Does::Columns | Does::Gathers);
                    let moved = self.plan.own_style(&module).is_some_and(Style::makes_dtensors);
                    h.cut = match (bias, moved) {
                        (true, _) => vec![Some(true); h.cut.len()],
                        (false, true) => vec![Some(false); h.cut.len()],
                        (false, false) => self.own(h, rows),
                    };
                }
                self.by_letters(n, &module, &ins)
            }
        };
        use Kind::{Attention, Copies, GroupedProduct, Lookup, Product, Reduction};
        let makes = [Attention, Copies, GroupedProduct, Lookup, Product, Reduction];
        let new = makes.contains(&n.op.facts().kind) || !weight && ins.iter().any(|h| h.weight);
        let of = ins.first().filter(|_| !new).map_or(module.clone(), |h| h.of.clone());
        self.taken.push((ins.clone(), of_matrix.is_some()));
        for (v, mut h) in n.outs.iter().zip(outs) {
            (h.by, h.of, h.weight) = (module.clone(), of.clone(), weight);
            if weight {
                h.by = ins[0].by.clone();
            }
            self.held[*v] = h;
        }
    }

    /// All of each result.
    fn whole(&self, n: &Node) -> Vec<OnRank> {
        let of = |v: &Value| OnRank {
            cut: vec![Some(false); self.f.ty(*v).rank()],
            ..OnRank::default()
        };
        n.outs.iter().map(of).collect()
    }

    fn lookup(&mut self, n: &Node, module: &str) -> Vec<OnRank> {
        let style = self.plan.of_module(module).expect("it has one");
        if style.word == "packed_colwise" {
            self.say(format!("{module}: packed_colwise: it is for linears, and this is a table"));
        }
        self.whole(n)
    }

    /// A product of a linear that has a style: operand `w` is its matrix.
    fn product(&mut self, n: &'a Node, module: &str, ins: &[OnRank], w: usize) -> Vec<OnRank> {
        let style = self.plan.of_module(module).expect("it has one");
        let (rule, _) = self.rule(n);
        let x = 1 - w.min(1);
        let Some((dims, own, out)) = rule
            .ins
            .get(x)
            .zip(rule.ins.get(w))
            .zip(rule.outs.first())
            .map(|((a, b), c)| (a, b, c))
        else {
            return self.whole(n);
        };
        let summed = |g: &Group| g.letters().iter().any(|l| !has_letter(out, *l));
        let at: Vec<usize> = (0..dims.len()).filter(|d| summed(&dims[*d])).collect();
        let cut = at.iter().any(|d| ins[x].cut.get(*d) == Some(&Some(true)));
        let size: usize = at.iter().map(|d| self.f.ty(n.ins[x]).dims[*d].size).product();
        let (part, of) = (size.div_ceil(self.ranks), &ins[x].of);
        let word = style.word;
        match (style.does, cut) {
            (Does::Rows, false) => self.say(format!(
                "{module}: {word}: a rank's part of the weight takes {part} columns, and what \
                 {of} gives has {size}"
            )),
            (Does::Columns, false) if self.columns(out, own, dims, n) == 1 => self.say(format!(
                "{module}: {word}: it has one column, and ranks behind the first have none"
            )),
            (Does::Rows, true) | (_, false) => {}
            (_, true) => self.say(format!(
                "{module}: {word}: it takes {size} columns, and what {of} gives has {part} on a rank"
            )),
        }
        self.joined(n.ins[w], module, style);
        let mut outs = self.whole(n);
        let columns = matches!(style.does, Does::Columns | Does::Gathers);
        for (d, g) in out.iter().enumerate() {
            let flows = dims.iter().position(|x| x == g);
            let kept = flows.and_then(|d| *ins[x].cut.get(d)?);
            let new = columns && flows.is_none() && own.contains(g);
            outs[0].cut[d] = kept.or(Some(false)).map(|kept| kept || new);
        }
        outs
    }

    /// How many columns a linear's matrix gives.
    fn columns(&self, out: &Dims, own: &Dims, dims: &Dims, n: &Node) -> usize {
        let new = |d: &usize| !dims.contains(&out[*d]) && own.contains(&out[*d]);
        (0..out.len()).filter(new).map(|d| self.f.ty(n.outs[0]).dims[d].size).product()
    }

    /// Refuses columns of several matrices in one tensor that are cut as if they were one, and the other way round.
    fn joined(&mut self, v: Value, module: &str, style: Style) {
        let w = self.f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
        let w = w.and_then(|r| self.weights.get(r.name.to_string().as_str()).copied());
        let Some(w) = w.filter(|_| style.does == Does::Columns) else { return };
        let block = w.part.filter(|p| p.step == 1 && p.dim + 2 >= w.tensor_shape.len());
        let packed = style.word == "packed_colwise";
        let halves = |p: shardc_ir::weights::TensorSlice| p.len * 2 == w.tensor_shape[p.dim];
        match block {
            Some(p) if !packed || !halves(p) => {
                let all = w.tensor_shape[p.dim];
                self.say(format!(
                    "{module}: {}: {} of {all} columns are one of the matrices in it, and a rank's part is {} in a row",
                    style.word, p.len, all.div_ceil(self.ranks)
                ));
            }
            None if packed => self.say(format!("{module}: {}: one matrix is in it", style.word)),
            _fits => {}
        }
    }

    /// The dims that are cut of a parameter that is no matrix of a linear.
    fn own(&mut self, h: &OnRank, rows: bool) -> Vec<Option<bool>> {
        let (rank, whole) = (h.cut.len(), vec![Some(false); h.cut.len()]);
        let name = &h.by;
        let experts = name.split('.').any(|w| w == "experts");
        let plan = self.plan;
        let found = if experts { plan.of_experts(rows) } else { plan.of_param(name) };
        let Some((_, style)) = found else { return whole };
        let dim = match style.dim {
            Some("rowwise") if style.does == Does::Table => 0,
            Some(_) if style.does == Does::Table => 1.min(rank - 1),
            Some("colwise") => rank.saturating_sub(2),
            Some(_) if !name.ends_with(".bias") => rank.saturating_sub(1),
            _none => return whole,
        };
        if experts {
            self.in_one_tensor(name, style);
        }
        (0..rank).map(|d| Some(d == dim)).collect()
    }

    /// Matrices of experts are joined in one tensor where they have two of a shape.
    fn in_one_tensor(&mut self, name: &str, style: Style) {
        let Some(w) = self.weights.values().find(|w| name_of(w) == name) else { return };
        let like = |o: &&&Weight| {
            let layer = |w: &Weight| w.param.split(".experts.").next().map(str::to_string);
            (o.experts, o.tp_dim, &o.shape) == (w.experts, w.tp_dim, &w.shape)
                && layer(o) == layer(w)
        };
        let interleaved = w.part.is_some_and(|p| p.step > 1);
        let joined = self.weights.values().filter(like).count() > 1 && !interleaved;
        if style.word.starts_with("packed") != joined {
            let n = if joined { "two matrices are" } else { "one matrix is" };
            self.say(format!("{name}: {}: {n} in the tensor of its experts", style.word));
        }
    }

    /// A node that exchanges nothing: what its operands have of each letter.
    fn by_letters(&mut self, n: &'a Node, module: &str, ins: &[OnRank]) -> Vec<OnRank> {
        let (rule, loops) = self.rule(n);
        let size = |l: &Letter| loops.size(*l).unwrap_or(1);
        let mut cut: BTreeMap<Letter, (bool, usize)> = BTreeMap::new();
        let mut why = vec![];
        let said = |i: usize| ins[i].of.as_str();
        for (i, (dims, h)) in rule.ins.iter().zip(ins).enumerate() {
            for (g, is) in dims.iter().zip(&h.cut) {
                let Some(is) = *is else { continue };
                let carrier = carrier(g, &loops);
                for l in g.letters().iter().filter(|l| size(l) > 1) {
                    let is = is && carrier == Some(*l);
                    let (before, j) = *cut.entry(*l).or_insert((is, i));
                    let (all, part) = (size(l), size(l).div_ceil(self.ranks));
                    if before != is {
                        let (a, b) = if is { (i, j) } else { (j, i) };
                        why.push(format!(
                            "{module}: a rank has {part} of {all} of {}, and all {all} of {}",
                            said(a),
                            said(b)
                        ));
                    } else if is && g.letters().len() > 1 && all % self.ranks != 0 {
                        why.push(format!(
                            "{module}: view(…, -1, head_dim): {all} is divisible by tp_size ({})",
                            self.ranks
                        ));
                    }
                }
            }
        }
        let given = |l: &Letter| rule.outs.iter().any(|o: &Dims| has_letter(o, *l));
        let mut part = ins.iter().any(|h| h.part);
        if part && !adds_up(n, ins) {
            why.push(format!("{module}: a rank has a part of a sum, and it is used as the sum"));
        }
        for (l, (is, i)) in &cut {
            let (all, of) = (size(l), size(l).div_ceil(self.ranks));
            if *is && rule.is_whole(*l) {
                why.push(format!(
                    "{module}: all {all} of {} are used together, and a rank has {of}",
                    said(*i)
                ));
            } else if *is && !given(l) {
                let product = matches!(n.op.facts().kind, Kind::Product | Kind::GroupedProduct);
                part |= product && self.does(module) == Does::Adds;
                if !part {
                    why.push(format!(
                        "{module}: all {all} of {} are summed, and a rank has {of}",
                        said(*i)
                    ));
                }
            }
        }
        let mut outs = self.whole(n);
        // What a new dim is repeated for is as much as the next op has of it.
        let is = |g: &Group| carrier(g, &loops).map_or(Some(false), |l| Some(cut.get(&l)?.0));
        for (h, dims) in outs.iter_mut().zip(&rule.outs) {
            h.part = part && why.is_empty();
            h.cut = dims.iter().map(is).collect();
        }
        why.into_iter().for_each(|w| self.say(w));
        outs
    }
}

impl<'a> Fitting<'a> {
    /// Parameters that ranks have alike, with parts of a gradient; and where gradients are added that are no parts.
    fn parts(&self) -> (BTreeSet<String>, Vec<String>) {
        let mut part = self.f.per_value(false);
        let mut cut: ValueMap<Vec<bool>> = self.f.per_value(vec![]);
        for v in self.held.ids() {
            cut[v] = is_cut(&self.held[v]);
        }
        let mut twice = vec![];
        for (n, (ins, matrix)) in self.f.nodes.iter().zip(&self.taken).rev() {
            let module = self.module(n);
            let adds = self.plan.own_style(&module).is_some_and(|s| s.word == "mla_kv_a_proj")
                && self.modules.is_called(&module);
            let leaves = |v: &Value| {
                self.f.nodes.iter().any(|o| o.ins.contains(v) && self.module(o) != module)
            };
            if adds && n.outs.iter().any(|v| leaves(v) && !part[*v]) {
                twice.push(format!(
                    "{module}: mla_kv_a_proj: it adds gradients of its last columns, and each rank has all of them"
                ));
            }
            self.behind(n, ins, *matrix, (&mut part, &mut cut));
        }
        let names = self.f.args.iter().filter(|a| part[a.value]).filter_map(|a| a.role.as_ref());
        let own = names.filter_map(|r| self.weights.get(r.name.to_string().as_str()));
        (own.map(|w| w.tensor.replace("{}", "*")).collect(), twice)
    }

    /// What the gradients of a node's results say of those of its operands.
    fn behind(
        &self,
        n: &'a Node,
        ins: &[OnRank],
        matrix: bool,
        (part, cut): (&mut ValueMap<bool>, &mut ValueMap<Vec<bool>>),
    ) {
        let module = self.module(n);
        let sums = self.plan.of_module(&module).is_some_and(|s| s.word == "mla_kv_a_proj");
        let all = n.outs.iter().any(|v| part[*v]) && !sums;
        let (rule, loops) = self.rule(n);
        let operands = rule.ins.iter().zip(ins.iter().map(is_cut));
        let results = rule.outs.iter().zip(n.outs.iter().map(|v| cut[*v].clone()));
        let dims = operands.chain(results).flat_map(|(dims, is)| dims.iter().zip(is));
        let letters: BTreeSet<Letter> =
            dims.filter(|(_, is)| *is).filter_map(|(g, _)| carrier(g, &loops)).collect();
        let own = matrix || self.does(&module) == Does::Dispatches;
        for (i, (v, dims)) in n.ins.iter().zip(&rule.ins).enumerate() {
            let lacks = letters.iter().any(|l| !has_letter(dims, *l));
            let adds = self.does(&module) == Does::Adds && !ins[i].weight && ins[i].by != module;
            part[*v] |= all || lacks && !own && !adds;
            // What is as much as it meets is cut where that is.
            for (d, g) in dims.iter().enumerate().filter(|(d, _)| ins[i].cut.get(*d) == Some(&None))
            {
                cut[*v][d] |= carrier(g, &loops).is_some_and(|l| letters.contains(&l));
            }
        }
    }
}

fn is_cut(h: &OnRank) -> Vec<bool> {
    h.cut.iter().map(|c| *c == Some(true)).collect()
}

/// The letter that parts of a dim are of: the first of several values.
fn carrier(g: &Group, loops: &Loops) -> Option<Letter> {
    g.letters().iter().copied().find(|l| loops.size(*l).unwrap_or(1) > 1)
}

/// Whether an op of parts of a sum gives parts of the sum of its results.
fn adds_up(n: &Node, ins: &[OnRank]) -> bool {
    let in_mask = |mask: u32| move |i: &usize| mask >> i & 1 == 1;
    let parts: Vec<usize> = (0..ins.len()).filter(|i| ins[*i].part).collect();
    match n.op.def().linear() {
        Linear::No => false,
        Linear::Each(mask) => parts.len() == 1 && parts.iter().all(in_mask(mask)),
        Linear::Together(mask) => (0..ins.len()).filter(in_mask(mask)).eq(parts),
    }
}
