//! What types say of gradients against what rules say.

use super::Job;
use super::derive::{Derived, Param};
use super::rules::{Holding, ROUTER_LOSS, Rule, power};
use serde::Serialize;
use shardc_ir::mesh::AtomSet;
use std::collections::BTreeMap;

/// What a token counts in the mean over all tokens of a step, and a microbatch's loss in that of routers.
const MEAN: &str = "1/tokens/m/dp/cp";
const MEAN_OF_ROUTERS: &str = "1/m/dp";

/// Parameters that are alike: of equal layers, in equal layouts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// Their name, with the range of its layers: `model.layers.0-31.mlp.up_proj.weight`.
    pub name: String,
    pub class: String,
    pub parameters: usize,
    /// Sizes of one, and of what a rank holds of it.
    pub sizes: Vec<usize>,
    pub local: Vec<usize>,
    /// Axes that split it.
    pub split: String,
    /// Axes over which its gradient is to be summed, by types, and over which it is by rules.
    pub sums: String,
    pub rule_sums: String,
    /// What a token's loss counts in the gradient, as a multiple of its share of the mean over all tokens.
    pub scale: f64,
    /// Ranks on each of which this part of its squares is in the norm.
    pub norm_ranks: usize,
    /// Bytes of one's optimizer state on a rank, and of what a rank sends of its gradient and its weight in a step.
    pub state_bytes: usize,
    pub sent_bytes: usize,
    pub trained: bool,
    /// Names of the rules that hold for it.
    pub rules: Vec<String>,
}

/// A rule, as a finding names it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Cited {
    pub name: String,
    pub source: String,
    pub commit: String,
    pub says: String,
}

/// A difference.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Finding {
    /// `sum-missing`, `sum-twice`, `scale`, `norm-left-out`, `norm-twice`.
    pub kind: &'static str,
    /// Parameters that it is of, as rows have them.
    pub parameters: Vec<String>,
    pub axes: String,
    /// What types say, and what the software does.
    pub derived: String,
    pub does: String,
    pub rules: Vec<Cited>,
    /// What it does to training.
    pub effect: String,
}

/// What rules make of a class.
struct Ruled<'a> {
    sums: AtomSet,
    whole: AtomSet,
    splits: AtomSet,
    /// The axis of stages is among what is summed; whatever is partial is.
    stages: bool,
    partial: bool,
    counts: Option<(&'a Rule, bool, AtomSet, String)>,
    rules: Vec<&'a Rule>,
}

impl Ruled<'_> {
    /// Axes over which the gradient has to be summed, where backward leaves each rank what it leaves there.
    fn need(&self, p: &Param) -> AtomSet {
        p.sums.minus(self.whole).union(self.splits)
    }
}

struct Compared<'a> {
    job: &'a Job,
    d: &'a Derived,
    holding: Holding<'a>,
}

/// Rows of parameters, and where types and rules differ.
pub fn compare(job: &Job, d: &Derived) -> (Vec<Row>, Vec<Finding>) {
    let c = Compared { job, d, holding: job.table.holding(&job.given, job.at.as_deref()) };
    let mut groups: BTreeMap<(usize, String), (Row, Vec<u32>, Param)> = BTreeMap::new();
    let mut order: BTreeMap<String, usize> = BTreeMap::new();
    for p in &d.params {
        let class = job.table.class(&p.name).unwrap_or("other");
        if job.absent.contains(&class) {
            continue;
        }
        let p = &c.as_there(p, class);
        let row = c.row(p, class);
        let (pattern, layer) = numbered(&p.name);
        let n = order.len();
        let at = *order.entry(pattern.clone()).or_insert(n);
        let key =
            (at, format!("{pattern} {:?} {:?} {} {}", row.sizes, row.local, row.split, row.sums));
        let of = groups
            .entry(key)
            .or_insert_with(|| (Row { parameters: 0, name: pattern, ..row }, vec![], p.clone()));
        of.0.parameters += 1;
        of.1.extend(layer);
    }
    let mut rows = vec![];
    let mut findings: Vec<Finding> = vec![];
    for (mut row, layers, p) in groups.into_values() {
        row.name = row.name.replacen('*', &ranges(layers), 1);
        if row.trained {
            for f in c.findings(&p, &row) {
                let same = |o: &&mut Finding| {
                    (o.kind, &o.axes, &o.derived, &o.does, &o.rules)
                        == (f.kind, &f.axes, &f.derived, &f.does, &f.rules)
                };
                match findings.iter_mut().find(same) {
                    Some(old) => old.parameters.extend(f.parameters),
                    None => findings.push(f),
                }
            }
        }
        rows.push(row);
    }
    findings.extend(c.of_losses());
    (rows, findings)
}

/// A name with `*` for its layer, and the layer.
fn numbered(name: &str) -> (String, Option<u32>) {
    let mut layer = None;
    let word = |w: &str| match (layer, w.parse::<u32>()) {
        (None, Ok(n)) => {
            layer = Some(n);
            "*".to_string()
        }
        _ => w.to_string(),
    };
    let name = name.split('.').map(word).collect::<Vec<_>>().join(".");
    (name, layer)
}

/// Numbers as ranges: `0-2,5`.
fn ranges(mut all: Vec<u32>) -> String {
    all.sort_unstable();
    all.dedup();
    let runs = all.chunk_by(|a, b| a + 1 == *b);
    let one = |r: &[u32]| match r {
        [n] => n.to_string(),
        r => format!("{}-{}", r[0], r[r.len() - 1]),
    };
    runs.map(one).collect::<Vec<_>>().join(",")
}

/// A number as people write a factor: `1/4`, `2`.
pub fn factor(x: f64) -> String {
    let near = |x: f64| (x - x.round()).abs() < 1e-9 * x.abs().max(1.0);
    match (x >= 1.0 && near(x), x > 0.0 && near(1.0 / x)) {
        (true, _) => format!("{}", x.round()),
        (_, true) => format!("1/{}", (1.0 / x).round()),
        _ => format!("{x:.3}"),
    }
}

impl<'a> Compared<'a> {
    fn atoms<'s>(&self, axes: impl IntoIterator<Item = &'s String>) -> AtomSet {
        axes.into_iter().fold(AtomSet::EMPTY, |all, a| all.union(self.d.axis(a)))
    }

    fn ruled(&self, class: &'a str) -> Ruled<'a> {
        let rules: Vec<&Rule> = self.holding.of(class).collect();
        let all = |of: fn(&Rule) -> &Vec<String>| self.atoms(rules.iter().flat_map(|r| of(r)));
        let counts = rules.iter().rev().find_map(|r| {
            let (how, axes) = r.counts.as_deref()?.split_once(' ')?;
            let atoms = axes.split(' ').fold(AtomSet::EMPTY, |s, a| s.union(self.d.axis(a)));
            Some((*r, how == "each", atoms, axes.to_string()))
        });
        Ruled {
            sums: all(|r| &r.sums),
            whole: all(|r| &r.whole),
            splits: all(|r| &r.splits),
            stages: rules.iter().any(|r| r.sums.iter().any(|a| a == "pp")),
            partial: rules.iter().any(|r| r.sums.iter().any(|a| a == "partial")),
            counts,
            rules,
        }
    }

    /// What a token's loss counts in the gradient of a class, of its share of the mean over all tokens.
    fn scale(&self, class: &'a str) -> f64 {
        let g = &self.holding.given;
        let mean = g.product(MEAN);
        self.holding.factor(class).0 / mean
    }

    /// A parameter as the software splits it, where that is otherwise than in the layout of the types.
    fn as_there(&self, p: &Param, class: &'a str) -> Param {
        let cuts = self.atoms(self.holding.of(class).flat_map(|r| &r.cuts)).minus(p.sharded);
        let mut p = p.clone();
        (p.sharded, p.sums) = (p.sharded.union(cuts), p.sums.minus(cuts));
        // Stages are cut elsewhere there; an output projection is where its losses are.
        if class == "output" {
            p.stages.truncate(1);
        }
        if let Some(n) = p.local.first_mut() {
            *n = n.div_ceil(self.d.mesh.ways(cuts));
        }
        p
    }

    fn row(&self, p: &Param, class: &'a str) -> Row {
        let (mesh, states) = (&self.d.mesh, &self.job.states);
        let ruled = self.ruled(class);
        let need = ruled.need(p);
        let ruled_sums = match ruled.partial {
            true => ruled.sums.union(need),
            false => ruled.sums,
        };
        let local: usize = p.local.iter().product();
        let copies = mesh.ways(mesh.all().minus(p.sharded).and(self.data(class)));
        let shards = (copies / states.instances.max(1)).max(1);
        let trained = p.trained && class != "choice-bias";
        let split = if states.zero > 0 { shards } else { 1 };
        let stages = p.stages.len() > 1;
        let sums = self.words(need, stages);
        // A reduce-scatter and a gather, or an all-reduce; and that of the gradient's other sums.
        let part = |n: usize| if n > 1 { (n - 1) as f64 / n as f64 } else { 0.0 };
        let (w, g) = (states.weight as f64, states.gradient as f64);
        let data = part(copies)
            * match states.zero {
                0 => 2.0 * g,
                // Weights are gathered forward and backward.
                3 => 2.0 * w + g,
                _ => w + g,
            };
        let others = mesh.ways(need.minus(self.data(class)));
        let sent = local as f64 * (data + 2.0 * g * part(others));
        Row {
            name: p.name.clone(),
            class: class.into(),
            parameters: 1,
            sizes: p.sizes.clone(),
            local: p.local.clone(),
            split: self.d.names(p.sharded),
            sums,
            rule_sums: self.words(ruled_sums, ruled.stages && stages),
            scale: self.scale(class),
            norm_ranks: mesh.ways(p.sharded),
            state_bytes: if trained { (local * states.bytes).div_ceil(split) } else { 0 },
            sent_bytes: if trained { sent as usize } else { 0 },
            trained,
            rules: ruled.rules.iter().map(|r| r.name.clone()).collect(),
        }
    }

    /// The ranks whose gradients of a class are of other tokens, and among which states are shared out.
    fn data(&self, class: &'a str) -> AtomSet {
        match class.starts_with("expert") {
            // Where ranks of edp are not all of other tokens, rules sum over fewer.
            true => {
                self.atoms(self.holding.of(class).flat_map(|r| &r.sums)).and(self.d.axis("edp"))
            }
            false => self.d.axis("dp").union(self.d.axis("cp")),
        }
    }

    fn words(&self, atoms: AtomSet, stages: bool) -> String {
        let own = self.d.names(atoms);
        let all = [own.as_str(), if stages { "pp" } else { "" }];
        all.into_iter().filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ")
    }

    fn cited(&self, rules: &[&Rule]) -> Vec<Cited> {
        let one = |r: &&Rule| Cited {
            name: r.name.clone(),
            source: r.source.clone(),
            commit: r.commit.clone().unwrap_or_else(|| self.job.table.short().to_string()),
            says: r.says.clone(),
        };
        rules.iter().map(one).collect()
    }

    fn findings(&self, p: &Param, row: &Row) -> Vec<Finding> {
        let class = self.job.table.class(&p.name).unwrap_or("other");
        let mut out = vec![];
        let r = self.ruled(class);
        let stages = p.stages.len() > 1;
        let need = r.need(p);
        let sums = if r.partial { r.sums.union(need) } else { r.sums };
        let (missing, extra) = (need.minus(sums), sums.minus(need));
        let found =
            |kind, axes: String, derived: String, does: String, rules: &[&Rule], effect: String| {
                Finding {
                    kind,
                    parameters: vec![row.name.clone()],
                    axes,
                    derived,
                    does,
                    rules: self.cited(rules),
                    effect,
                }
            };
        let summed: Vec<&Rule> = r
            .rules
            .iter()
            .copied()
            .filter(|x| [&x.sums, &x.whole, &x.splits].iter().any(|v| !v.is_empty()))
            .collect();
        let all = |atoms: AtomSet, stages: bool| {
            let words = self.words(atoms, stages);
            if words.is_empty() {
                "summed over nothing".to_string()
            } else {
                format!("summed over {words}")
            }
        };
        let (ours, theirs) = (all(need, stages), all(sums, r.stages && stages));
        if !missing.is_empty() || stages && !r.stages {
            let n =
                self.d.mesh.ways(missing) * if stages && !r.stages { p.stages.len() } else { 1 };
            let effect = format!(
                "each of {n} ranks steps with its own part of the gradient: their copies drift apart"
            );
            let axes = self.words(missing, stages && !r.stages);
            out.push(found("sum-missing", axes, ours.clone(), theirs.clone(), &summed, effect));
        }
        if !extra.is_empty() {
            let n = self.d.mesh.ways(extra);
            let effect = match p.sharded.meets(extra) {
                true => "what is added are gradients of other parameters".to_string(),
                false => format!("the gradient is {n} times as large as it should be"),
            };
            out.push(found("sum-twice", self.d.names(extra), ours, theirs, &summed, effect));
        }
        out.extend(self.summed_again(&r, need, row));
        out.extend(self.of_scale(class, row));
        if let Some((rule, each, atoms, axes)) = &r.counts {
            let (left, twice) = match each {
                true => (AtomSet::EMPTY, atoms.minus(p.sharded)),
                false => (atoms.and(p.sharded), AtomSet::EMPTY),
            };
            if !left.is_empty() {
                let n = self.d.mesh.ways(left);
                let effect = format!(
                    "the norm has 1/{n} of its elements: it is too small, and gradients are clipped less than --clip-grad says"
                );
                let ours =
                    format!("split over {}: each rank counts its part", self.d.names(p.sharded));
                out.push(found(
                    "norm-left-out",
                    self.d.names(left),
                    ours,
                    format!("counted on the first rank of {axes}"),
                    &[rule],
                    effect,
                ));
            }
            if !twice.is_empty() {
                let n = self.d.mesh.ways(twice);
                let effect = format!(
                    "its squares are in the norm {n} times: it is too large, and gradients are clipped more than --clip-grad says"
                );
                let ours =
                    format!("the same on {n} ranks of {}: counted once", self.d.names(twice));
                out.push(found(
                    "norm-twice",
                    self.d.names(twice),
                    ours,
                    format!("counted on each rank of {axes}"),
                    &[rule],
                    effect,
                ));
            }
        }
        out
    }

    /// A sum behind each microbatch, of a gradient that earlier ones are in already.
    fn summed_again(&self, r: &Ruled, need: AtomSet, row: &Row) -> Option<Finding> {
        let again: Vec<&Rule> = r.rules.iter().copied().filter(|x| !x.again.is_empty()).collect();
        let axes = self.atoms(again.iter().flat_map(|x| &x.again)).and(need);
        let m = self.holding.given.size("m") as usize;
        if axes.is_empty() || m < 2 {
            return None;
        }
        let ways = self.d.mesh.ways(axes) as f64;
        let sum = (0..m).fold(0.0, |before: f64, _| before * ways + 1.0);
        let words = self.words(axes, false);
        Some(Finding {
            kind: "sum-twice",
            parameters: vec![row.name.clone()],
            axes: words.clone(),
            derived: format!("summed over {words}, once a step"),
            does: format!("summed over {words} behind each of {m} microbatches"),
            rules: self.cited(&again),
            effect: format!(
                "what earlier microbatches have left is summed again: the gradient is {} times as large as it should be",
                factor(sum / m as f64)
            ),
        })
    }

    fn of_scale(&self, class: &'a str, row: &Row) -> Option<Finding> {
        if (row.scale - 1.0).abs() < 1e-9 {
            return None;
        }
        let (_, rules) = self.holding.factor(class);
        Some(self.scaled(
            row.name.clone(),
            (row.scale, MEAN),
            "the mean over all tokens of the step",
            &rules,
        ))
    }

    fn scaled(
        &self,
        of: String,
        (x, right): (f64, &str),
        derived: &str,
        rules: &[&Rule],
    ) -> Finding {
        let effect = match x > 1.0 {
            true => {
                "clipping and epsilon act as on a larger loss, and a step without Adam is larger"
            }
            false => {
                "clipping and epsilon act as on a smaller loss, and its share of the step shrinks"
            }
        };
        // Numbers that are in the factor more or less often than in the one that is right.
        let differs = |a: &&str| {
            let all = rules.iter().filter_map(|r| r.times.as_deref());
            let own: i32 = all.map(|t| power(t, a)).sum();
            self.holding.given.size(a) > 1.0 && own != power(right, a)
        };
        let axes: Vec<&str> =
            ["cp", "tp", "ep", "etp", "edp", "dp"].into_iter().filter(differs).collect();
        Finding {
            kind: "scale",
            parameters: vec![of],
            axes: axes.join(" "),
            derived: derived.into(),
            does: format!("{} times that", factor(x)),
            rules: self.cited(rules),
            effect: effect.into(),
        }
    }

    /// Of losses of routers: the mean over microbatches and dp.
    fn of_losses(&self) -> Option<Finding> {
        if !self.job.given.facts.contains(ROUTER_LOSS) {
            return None;
        }
        let (x, rules) = self.holding.factor(ROUTER_LOSS);
        let x = x / self.holding.given.product(MEAN_OF_ROUTERS);
        let derived = "the mean of the routers' losses over microbatches and dp";
        ((x - 1.0).abs() > 1e-9 && !rules.is_empty())
            .then(|| self.scaled("losses of routers".into(), (x, MEAN_OF_ROUTERS), derived, &rules))
    }
}
