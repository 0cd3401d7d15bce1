//! Where the mixtures of experts of a model are: what stands between the cut of its tokens and their joining.
//!
//! Found by ops and letters. A `route` says which dims count shards and tokens, groups, experts and rows;
//! letters carry that from value to value, and it ends at reshapes that take tokens out of their rows and put
//! them back, and where all of them are summed up.

use shardc_ir::func::{Func, Node, Uses, Value};
use shardc_ir::ops::{Kind, Mixing, Op, Route};
use shardc_ir::rule::{Group, Letter, Rule};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// What a dim of a value counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Counts {
    Shards,
    Tokens,
    Groups,
    Experts,
    Rows,
}

/// What a value of a mixture is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// Nothing that shards change.
    Whole,
    /// A number, or several, per token.
    OfTokens,
    /// Rows of buffers.
    OfRows,
    /// How many rows each expert has.
    Counted,
}

/// A reshape between tokens of rows and tokens of shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// `(zb)s… -> z(bs)…`, or `(zb)… -> zb…` of rows that are one token.
    Cut,
    /// Its mirror.
    Join,
}

/// One mixture, or several with values in common: its nodes, and which of them are its ends.
#[derive(Debug, Default)]
pub(super) struct Mixture {
    pub nodes: BTreeSet<usize>,
    pub ends: BTreeMap<usize, End>,
}

impl Mixture {
    /// It stays as it is, because of this node.
    pub fn kept(&self, f: &Func, by: usize) -> Kept {
        let route = self.nodes.iter().find(|&&i| f.nodes[i].op.as_route().is_some());
        Kept { route: route.copied().unwrap_or(by), by }
    }
}

/// A `route` whose mixture stays as it is, and the first node found that keeps it so.
pub(super) struct Kept {
    pub route: usize,
    pub by: usize,
}

/// Whether the experts of a token `[z,t,k]` are different, by the nodes that made them: they are the largest of its
/// scores, or less than 0, which names none. Anything else may name an expert several times.
pub(super) fn different<'a>(index: Value, maker: &impl Fn(Value) -> Option<&'a Node>) -> bool {
    let Some(n) = maker(index) else { return false };
    match &n.op {
        Op::TopK(k) => k.dims().is_some_and(|(_, k, _)| k == 2),
        Op::Select(k) => {
            let rule = k.rule.rule(&[2, 3, 2]);
            let at = maker(n.ins[0]);
            // What takes the place of a choice is below the bound.
            let below = |m: &Node| {
                m.ins[0] == n.ins[2] && matches!(&m.op, Op::AtLeast(k) if k.bound <= 0.0)
            };
            rule.ins[0] == rule.ins[2]
                && rule.ins[1] == rule.outs[0]
                && at.is_some_and(below)
                && different(n.ins[1], maker)
        }
        _other => false,
    }
}

/// The mixtures that mean the same however tokens are cut into shards and experts into groups; and the others.
pub(super) fn mixtures(f: &Func) -> (Vec<Mixture>, Vec<Kept>) {
    let uses = &f.uses();
    let mut seen = BTreeSet::new();
    let (mut found, mut kept) = (vec![], vec![]);
    for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| n.op.as_route().is_some()) {
        if seen.contains(&i) {
            continue;
        }
        let (dims, m) = (BTreeMap::new(), Mixture::default());
        let mut region = Region { f, uses, dims, m, open: vec![i], at: i };
        let holds = region.grow(n).is_some() && region.checked(i).is_some();
        seen.extend(region.m.nodes.iter().copied());
        match holds {
            true => found.push(region.m),
            false => kept.push(Kept { route: i, by: region.at }),
        }
    }
    (found, kept)
}

/// What is known of a mixture while it is looked at.
struct Region<'a> {
    f: &'a Func,
    uses: &'a Uses,
    dims: BTreeMap<(Value, usize), Counts>,
    m: Mixture,
    open: Vec<usize>,
    /// The node that is looked at: where nothing more is known, it is why.
    at: usize,
}

/// The letter rule of a node.
pub(super) fn rule_of<'a>(f: &Func, n: &'a Node) -> Cow<'a, Rule> {
    let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    n.op.def().rule(&ranks)
}

/// The operands and results of a node with their dims.
fn sides<'a>(n: &'a Node, rule: &'a Rule) -> impl Iterator<Item = (Value, &'a [Group])> {
    let ins = n.ins.iter().copied().zip(rule.ins.iter().map(|d| &d[..]));
    ins.chain(n.outs.iter().copied().zip(rule.outs.iter().map(|d| &d[..])))
}

/// Whether `rows` are rows of tokens, and `shards` the same tokens as shards: `(zb)s…` and `z(bs)…`.
fn parts(rows: &[Group], shards: &[Group]) -> bool {
    let letters = |g: &[Group]| -> Vec<Vec<Letter>> {
        g.iter().map(|g| g.letters().to_vec()).collect::<Vec<_>>()
    };
    let (rows, shards) = (letters(rows), letters(shards));
    let ([of_rows, rest @ ..], [z, t, others @ ..]) = (&rows[..], &shards[..]) else {
        return false;
    };
    let ([shard, row], [own]) = (&of_rows[..], &z[..]) else { return false };
    let single = |rest: &[Vec<Letter>]| rest.iter().all(|g| g.len() == 1);
    shard == own
        && match &t[..] {
            [b] => b == row && rest == others && single(others),
            [b, s] => {
                b == row
                    && rest.first().is_some_and(|d| d[..] == [*s])
                    && rest[1..] == *others
                    && single(others)
            }
            _more => false,
        }
}

/// Which end of a mixture a reshape may be.
fn end(n: &Node) -> Option<End> {
    let Op::Reshape(k) = &n.op else { return None };
    let (from, to) = (&k.rule.0.ins[0], &k.rule.0.outs[0]);
    match (parts(from, to), parts(to, from)) {
        (true, _) => Some(End::Cut),
        (_, true) => Some(End::Join),
        _neither => None,
    }
}

impl Region<'_> {
    /// Follows letters from a `route`; `None` if a dim would count two things, or an op makes one dim of several.
    fn grow(&mut self, route: &Node) -> Option<()> {
        let (&index, &slot) = (route.ins.first()?, route.outs.first()?);
        for v in [index, slot] {
            self.mark(v, 0, Counts::Shards)?;
            self.mark(v, 1, Counts::Tokens)?;
        }
        while let Some(i) = self.open.pop() {
            self.m.nodes.insert(i);
            self.at = i;
            self.visit(i)?;
        }
        Some(())
    }

    fn mark(&mut self, v: Value, dim: usize, what: Counts) -> Option<()> {
        match self.dims.insert((v, dim), what) {
            Some(before) => (before == what).then_some(()),
            None => {
                self.open.extend(self.uses.users(v));
                self.open.extend(self.uses.maker(v));
                Some(())
            }
        }
    }

    /// What a dim counts by the op alone.
    fn seeds(n: &Node) -> Vec<(Value, usize, Counts)> {
        let rows = |v: Value| vec![(v, 0, Counts::Groups), (v, 2, Counts::Rows)];
        match n.op.mixing() {
            Some(Mixing::Route(_)) => {
                vec![(n.outs[1], 0, Counts::Groups), (n.outs[1], 1, Counts::Experts)]
            }
            Some(Mixing::Dispatch) => rows(n.outs[0]),
            Some(Mixing::Unpermute) => rows(n.ins[0]),
            Some(Mixing::Product) | None => vec![],
        }
    }

    fn visit(&mut self, i: usize) -> Option<()> {
        let f = self.f;
        let n = &f.nodes[i];
        if let Some(end) = end(n) {
            let tokens = if end == End::Cut { n.outs[0] } else { n.ins[0] };
            if self.dims.contains_key(&(tokens, 0)) {
                self.m.ends.insert(i, end);
                self.mark(tokens, 0, Counts::Shards)?;
                return self.mark(tokens, 1, Counts::Tokens);
            }
        }
        for (v, dim, what) in Region::seeds(n) {
            self.mark(v, dim, what)?;
        }
        let rule = rule_of(f, n);
        let mut letters: BTreeMap<Letter, Counts> = BTreeMap::new();
        for (v, dims) in sides(n, &rule) {
            for (d, g) in dims.iter().enumerate() {
                let Some(&what) = self.dims.get(&(v, d)) else { continue };
                let before = letters.insert(g.single()?, what);
                before.is_none_or(|b| b == what).then_some(())?;
                // One letter each: two of tokens would pair those of a shard.
                (letters.values().filter(|w| **w == what).count() == 1).then_some(())?;
            }
        }
        for (v, dims) in sides(n, &rule) {
            for (d, g) in dims.iter().enumerate() {
                let known = g.letters().iter().find_map(|l| letters.get(l));
                let Some(&what) = known else { continue };
                // Weights of all groups: however many there are.
                let weights = n.op.mixing() == Some(Mixing::Product) && n.ins.get(2) == Some(&v);
                match g.single() {
                    Some(_) => self.mark(v, d, what)?,
                    None if weights => {}
                    None => return None,
                }
            }
        }
        Some(())
    }

    /// What a value is; `None` if it has some of the dims that belong together, or one twice.
    fn form(&self, v: Value) -> Option<Form> {
        use Counts::{Experts, Groups, Rows, Shards, Tokens};
        let own = self.dims.range((v, 0)..=(v, usize::MAX)).map(|(_, &what)| what);
        let mut own: SmallVec<[Counts; 4]> = own.collect();
        own.sort_unstable();
        match &own[..] {
            [] => Some(Form::Whole),
            [Shards, Tokens] => Some(Form::OfTokens),
            [Shards, Groups, Rows] => Some(Form::OfRows),
            [Shards, Groups, Experts] => Some(Form::Counted),
            _some => None,
        }
    }

    /// Checks that shards, groups and rows may change without anything else changing.
    fn checked(&mut self, route: usize) -> Option<()> {
        let f = self.f;
        let values: BTreeSet<Value> = self.dims.keys().map(|k| k.0).collect();
        let ports = f.args.iter().chain(&f.results).map(|p| p.value);
        let mut given = ports.chain(f.annotations.keys().copied()).filter(|v| values.contains(v));
        let marked = || values.iter().copied().find(|&v| !f.ty(v).marked().is_empty());
        if let Some(v) = given.next().or_else(marked) {
            let node = self.uses.maker(v).or(self.uses.users(v).next());
            self.at = node.unwrap_or(route);
            return None;
        }
        // The `route` that placed the rows of each buffer.
        let mut placed: BTreeMap<Value, usize> = BTreeMap::new();
        for i in self.m.nodes.clone() {
            self.at = i;
            self.node(i, &mut placed)?;
        }
        self.at = route;
        let has = |end: End| self.m.ends.values().any(|e| *e == end);
        (has(End::Cut) && has(End::Join)).then_some(())
    }

    fn node(&self, i: usize, placed: &mut BTreeMap<Value, usize>) -> Option<()> {
        let n = &self.f.nodes[i];
        if self.m.ends.contains_key(&i) {
            let (from, to) = (self.form(n.ins[0])?, self.form(n.outs[0])?);
            let one = |v: Value| self.f.ty(v).dims[0].size == 1;
            return match self.m.ends[&i] {
                End::Cut => from == Form::Whole && to == Form::OfTokens && one(n.outs[0]),
                End::Join => from == Form::OfTokens && to == Form::Whole && one(n.ins[0]),
            }
            .then_some(());
        }
        let forms = |all: &[Value]| all.iter().map(|&v| self.form(v)).collect::<Option<Vec<_>>>();
        let (ins, outs) = (forms(&n.ins)?, forms(&n.outs)?);
        match n.op.mixing() {
            Some(Mixing::Route(route)) => self.route(n, route),
            Some(Mixing::Dispatch) => {
                placed.insert(n.outs[0], self.route_of(n.ins[1])?);
                (ins[..] == [Form::OfTokens; 3] && outs[..] == [Form::OfRows]).then_some(())
            }
            Some(Mixing::Product) => {
                let own = *placed.get(&n.ins[0])?;
                placed.insert(n.outs[0], own);
                let same = self.uses.maker(n.ins[1]) == Some(own);
                let forms = [Form::OfRows, Form::Counted, Form::Whole];
                (same && ins[..] == forms && outs[..] == [Form::OfRows]).then_some(())
            }
            Some(Mixing::Unpermute) => {
                let same = *placed.get(&n.ins[0])? == self.route_of(n.ins[1])?;
                let forms = [Form::OfRows, Form::OfTokens, Form::OfTokens];
                (same && ins[..] == forms && outs[..] == [Form::OfTokens]).then_some(())
            }
            None => self.alike(n, &ins, &outs, placed),
        }
    }

    /// The `route` whose slots these are.
    fn route_of(&self, slot: Value) -> Option<usize> {
        let i = self.uses.maker(slot)?;
        let n = &self.f.nodes[i];
        (n.op.as_route().is_some() && n.outs[0] == slot).then_some(i)
    }

    /// A `route` that drops no copy and never lacks a row, and whose results nobody takes for numbers.
    fn route(&self, n: &Node, op: &Route) -> Option<()> {
        let index = self.f.ty(n.ins[0]);
        let [shards, tokens, k] = [0, 1, 2].map(|d| index.dims[d].size);
        let [_, experts] = op.groups();
        let maker = |v: Value| self.uses.made_by(&self.f.nodes, v);
        let most = if different(n.ins[0], &maker) { k.min(experts) } else { k };
        let roomy = op.rows >= tokens.checked_mul(most)?;
        let users = |v: Value| self.uses.of(v).iter().map(|u| (&self.f.nodes[u.at()], u.operand));
        let slots = users(n.outs[0]).all(|(u, j)| match (u.op.mixing(), &u.op) {
            (Some(Mixing::Dispatch | Mixing::Unpermute), _) => j == 1,
            (None, Op::AtLeast(k)) => k.bound == 0.0,
            _number => false,
        });
        let counts =
            users(n.outs[1]).all(|(u, j)| u.op.mixing() == Some(Mixing::Product) && j == 1);
        (shards == 1 && op.capacity.is_none() && roomy && slots && counts).then_some(())
    }

    /// An op that does the same to every token, or to every row of a buffer; or one that sums over all tokens.
    fn alike(
        &self,
        n: &Node,
        ins: &[Form],
        outs: &[Form],
        placed: &mut BTreeMap<Value, usize>,
    ) -> Option<()> {
        let kind = n.op.facts().kind;
        let folds = match kind {
            Kind::Reduction | Kind::Product | Kind::Scatter => true,
            Kind::Constant
            | Kind::Elementwise
            | Kind::Activation
            | Kind::Conversion
            | Kind::Movement
            | Kind::Lookup
            | Kind::Choice => false,
            Kind::Attention
            | Kind::Recurrence
            | Kind::Copies
            | Kind::GroupedProduct
            | Kind::Update
            | Kind::Layout => {
                return None;
            }
        };
        let rule = rule_of(self.f, n);
        let given = n.op.def().sizes();
        let marked = sides(n, &rule).flat_map(|(v, dims)| {
            let own = move |(d, _): &(usize, &Group)| self.dims.contains_key(&(v, *d));
            dims.iter().enumerate().filter(own).filter_map(|x| x.1.single())
        });
        let free = |l: Letter| !rule.is_whole(l) && given.iter().all(|x| x.0 != l);
        let mut letters = marked;
        if !letters.all(free) {
            return None;
        }
        let has = |all: &[Form], form| all.contains(&form);
        let only = |form| ins.iter().chain(outs).all(|x| [Form::Whole, form].contains(x));
        if has(ins, Form::OfTokens) && only(Form::OfTokens) {
            let kept = outs.iter().all(|x| *x == Form::OfTokens);
            return (kept || folds).then_some(());
        }
        if !has(ins, Form::OfRows) || !only(Form::OfRows) || has(outs, Form::Whole) {
            return None;
        }
        let mut routes = n.ins.iter().zip(ins).filter(|x| *x.1 == Form::OfRows);
        let own = *placed.get(routes.next()?.0)?;
        let same = routes.all(|(v, _)| placed.get(v) == Some(&own));
        placed.extend(n.outs.iter().map(|&v| (v, own)));
        same.then_some(())
    }
}
