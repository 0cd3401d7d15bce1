//! Groups of parameters, and by which update rule each parameter is trained.

mod asked;
mod heads;
mod written;

pub use asked::{is_plain, of_all, own_rules, place, rules};
pub use written::{given, in_place, of_text, written};

use crate::options::{Decay, Options};
use asked::{base, read, wrong};
use heads::heads;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, RoleKind, StateDecl, StateInit, StateOwner, Uses, Value};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::names::{self, nearest};
use shardc_ir::ops::Kind;
use shardc_ir::text::update::{KeptState, Rules, Update, UpdateRule, built_in};
use shardc_ir::weights::Weight;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The word that names matrices of layers in place of a glob.
pub const HIDDEN: &str = "hidden";

/// A rule and its attributes, for parameters by name.
#[derive(Clone, Debug)]
pub struct Group {
    /// As it was asked for: globs over tensors of the checkpoint, separated by `+`.
    pub on: String,
    /// The name of the update rule.
    pub rule: String,
    /// Attributes that were given.
    pub given: BTreeMap<String, String>,
    /// The learning rate, as a multiple of the run's.
    pub lr: f64,
    /// Who makes what is made of whole matrices.
    pub spread: Spread,
}

/// Which ranks make what a rule makes of whole matrices that are split over several.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Spread {
    /// As costs less.
    #[default]
    Auto,
    /// Each rank some of the matrices.
    Owners,
    /// Every rank all of them.
    Gather,
}

/// All groups, and what each trained parameter is updated by.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// Later ones win. The first is of all parameters.
    pub all: Vec<Group>,
    /// By parameter.
    pub of: BTreeMap<String, Arc<Update>>,
    /// What is kept of parameters from step to step.
    pub states: Vec<StateDecl>,
    /// What of layers no group of matrices takes, and what groups say in vain.
    pub warnings: Vec<Diag>,
}

/// What parameters have in common that are updated alike: the group, whether they decay, fans, shape,
/// whether they are stacks, and heads.
type SameUpdate = (usize, bool, [usize; 2], Vec<usize>, bool, Option<usize>);

/// The groups of a model's parameters that are not frozen.
///
/// # Errors
/// `update-rule` for a rule that matches nothing, is not known, or does not fit a parameter; those
/// of texts of rules.
pub fn groups(
    f: &Func,
    weights: &[Weight],
    frozen: &BTreeSet<String>,
    o: &Options,
) -> Result<Groups> {
    let own = match o.optim_file.is_empty() {
        true => Rules::default(),
        false => Rules::parse(&o.optim_file, place(o))?,
    };
    let mut all = vec![base(o)];
    for text in &o.optim {
        all.push(read(text, o)?);
    }
    let weights: HashMap<&str, &Weight> = weights.iter().map(|w| (&*w.param, w)).collect();
    let params = f.args.iter().filter_map(|a| {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Param)?;
        (!frozen.contains(&*role.name)).then_some((a.value, &*role.name))
    });
    let params: Vec<(Value, &str)> = params.collect();
    let uses = &f.uses();
    let matches = matches((f, uses), &all, &params, &weights)?;
    let warnings = left_out((f, uses), &all, &params, &weights).into_iter().collect();
    let mut out = Groups { all, warnings, ..Groups::default() };
    let mut known: HashMap<SameUpdate, Arc<Update>> = HashMap::default();
    for ((v, name), group) in params.into_iter().zip(matches) {
        let weight = weights.get(name);
        let shape = f.ty(v).sizes().to_vec();
        let stack = weight.is_some_and(|w| w.experts.is_some());
        let decays = o.decay == Decay::All || weight.is_none_or(|w| w.matrix);
        let fans = fans(f, uses, v, usize::from(stack));
        // Of what takes parameters as they are heads are no difference.
        let sees = sees_heads(&own, &out.all[group].rule);
        let heads = sees.then(|| heads(f, v)).flatten();
        let key = (group, decays, fans, shape, stack, heads);
        let update = match known.get(&key) {
            Some(known) => known.clone(),
            None => {
                let own = UpdateRequest {
                    own: &own,
                    g: &out.all[group],
                    group,
                    name,
                    decays,
                    stack,
                    heads,
                };
                let made = Arc::new(own.update(&key.3, fans, o)?);
                out.keep(&made, key.3.len(), name)?;
                known.insert(key, made.clone());
                made
            }
        };
        out.of.insert(name.into(), update);
    }
    let idle: Vec<Diag> = (0..out.all.len()).filter_map(|k| out.spread_in_vain(k, o)).collect();
    out.warnings.extend(idle);
    Ok(out)
}

impl Groups {
    /// Declares what an update keeps.
    fn keep(&mut self, update: &Update, rank: usize, param: &str) -> Result<()> {
        for KeptState { name, dtype, init, .. } in update.kept(rank)? {
            let init = StateInit::Number(init);
            let new = StateDecl { name, dtype, owner: StateOwner::Param, init };
            let other = self.states.iter().find(|s| s.name == name && s.init != init);
            if let Some(other) = other {
                let what = format!("two rules begin a state {name} in different ways");
                return Err(Diag::new("update-rule", what)
                    .at(format!("`{new}` of `{param}`, and `{other}` of others"))
                    .rule("states of one name begin as one number")
                    .help("call 1 of the states otherwise"));
            }
            if !self.states.contains(&new) {
                self.states.push(new);
            }
        }
        Ok(())
    }

    /// A warning if a group says who makes what is made of whole matrices, and nothing is.
    fn spread_in_vain(&self, group: usize, o: &Options) -> Option<Diag> {
        let g = &self.all[group];
        let word = match g.spread {
            Spread::Auto => return None,
            Spread::Owners => "owners",
            Spread::Gather => "gather",
        };
        let mut own = self.of.values().filter(|u| u.group == group);
        let why = match own.any(|u| u.multiplies()) {
            false => format!(
                "`@{}` makes no product of matrices: pieces are updated as they are",
                g.rule
            ),
            true if o.mesh.iter().all(|a| a.1 == 1 || a.0 == PIPELINE) => {
                "no rank holds a part of a matrix: there is one for each stage".into()
            }
            true => return None,
        };
        let text = format!("{}={}", g.on, g.rule);
        Some(
            Diag::new("no-effect", format!("`spread={word}` of `{text}` has no effect"))
                .why(why)
                .help("leave it out"),
        )
    }

    /// Most numbers of f32 that are kept of an element of a parameter.
    pub fn most_states(&self) -> u64 {
        let of = |u: &Arc<Update>| u.kept(0).map_or(0, |k| k.len() as u64);
        self.of.values().map(of).max().unwrap_or(0)
    }
}

/// The group of each parameter.
fn matches(
    of_model: (&Func, &Uses),
    all: &[Group],
    params: &[(Value, &str)],
    weights: &HashMap<&str, &Weight>,
) -> Result<Vec<usize>> {
    let mut of = vec![0; params.len()];
    for (k, g) in all.iter().enumerate().skip(1) {
        let whole = format!("{}={}", g.on, g.rule);
        for glob in g.on.split('+').map(str::trim) {
            let mut found = false;
            for (i, &(v, name)) in params.iter().enumerate() {
                let is = match (glob, weights.get(name)) {
                    (HIDDEN, w) => is_hidden(of_model, v, w.copied()) == Some(true),
                    (_, None) => names::glob(glob, name),
                    (_, Some(w)) => {
                        let one = std::slice::from_ref(*w);
                        let parts = names::parameters(one, glob);
                        !parts.map_err(|d| d.at(format!("--optim '{whole}'")))?.is_empty()
                    }
                };
                if is {
                    (of[i], found) = (k, true);
                }
            }
            if !found {
                let known: Vec<Weight> = weights.values().map(|w| (*w).clone()).collect();
                let mut known = known;
                known.sort_by(|a, b| a.param.cmp(&b.param));
                return Err(wrong(&whole, format!("`{glob}` matches no trained parameter"))
                    .help(names::suggestion(&known, glob)));
            }
        }
    }
    Ok(of)
}

/// Of what has the dims of a matrix of a layer, or more: whether it is one, or a stack of experts', which a product
/// takes. `None`: an embedding, a head, a bias, or a vector.
fn is_hidden((f, uses): (&Func, &Uses), v: Value, w: Option<&Weight>) -> Option<bool> {
    let first = usize::from(w.is_some_and(|w| w.experts.is_some()));
    // Those of experts have a dim for these.
    let bias = w.is_some_and(|w| w.tensor.ends_with("bias"));
    let large = !bias && f.ty(v).rank() >= 2 + first && f.name(v).layer.is_some();
    large.then(|| f.ty(v).rank() == 2 + first && product(f, uses, v, first).is_some())
}

/// A warning that names what `hidden` leaves out of layers, if there is a group of it.
fn left_out(
    of_model: (&Func, &Uses),
    all: &[Group],
    params: &[(Value, &str)],
    weights: &HashMap<&str, &Weight>,
) -> Option<Diag> {
    let group = all.iter().find(|g| g.on.split('+').any(|g| g.trim() == HIDDEN))?;
    let no =
        |p: &&(Value, &str)| is_hidden(of_model, p.0, weights.get(p.1).copied()) == Some(false);
    let left: Vec<&str> = params.iter().filter(no).map(|p| p.1).collect();
    let (first, more) = (left.first()?, left.len() - 1);
    let others = match more {
        0 => String::new(),
        n => format!(" and {n} other parameters of layers"),
    };
    let what = format!("`{HIDDEN}={}` leaves out `{first}`{others}", group.rule);
    let why = "a matrix of a layer has 2 dims, and a product takes it";
    let help = format!("name it, if it is one: --optim '{}={}'", first, group.rule);
    Some(Diag::new("no-effect", what).why(why).help(help))
}

/// What a parameter's matrix makes of how many: the sizes of dims that its product keeps, and of
/// those that it sums over. Of what is in no product, as torch stores it.
fn fans(f: &Func, uses: &Uses, v: Value, first: usize) -> [usize; 2] {
    let sizes = f.ty(v).sizes();
    product(f, uses, v, first).unwrap_or_else(|| match sizes[first.min(sizes.len())..] {
        [] => [1, 1],
        [one] => [one, 1],
        [out, ref rest @ ..] => [out, rest.iter().product()],
    })
}

/// The sizes of dims that the first product keeps which takes a parameter, converted or as it is, and of those that it
/// sums over.
fn product(f: &Func, uses: &Uses, v: Value, first: usize) -> Option<[usize; 2]> {
    let sizes = f.ty(v).sizes();
    // By number, the nodes that take it, and as which operand first.
    let mut next: BTreeMap<u32, u32> = BTreeMap::new();
    let takes = |next: &mut BTreeMap<u32, u32>, v: Value| {
        uses.of(v).iter().for_each(|u| {
            next.entry(u.node).or_insert(u.operand);
        });
    };
    takes(&mut next, v);
    while let Some((i, operand)) = next.pop_first() {
        let n = &f.nodes[i as usize];
        let kind = n.op.facts().kind;
        if kind == Kind::Conversion {
            n.outs.iter().for_each(|&o| takes(&mut next, o));
        }
        if !matches!(kind, Kind::Product | Kind::GroupedProduct) {
            continue;
        }
        let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        let mut out = [1, 1];
        for (d, group) in rule.ins[operand as usize].iter().enumerate().skip(first) {
            out[usize::from(!rule.outs[0].contains(group))] *= sizes[d];
        }
        return Some(out);
    }
    None
}

/// Whether a rule of this name takes parameters head by head.
fn sees_heads(own: &Rules, rule: &str) -> bool {
    let mut all = own.named(rule).chain(built_in().named(rule));
    all.any(|r| r.by_heads())
}

/// What is asked of the update of a parameter.
struct UpdateRequest<'a> {
    /// The user's own rules, which are found before those that are built in.
    own: &'a Rules,
    g: &'a Group,
    group: usize,
    name: &'a str,
    decays: bool,
    stack: bool,
    heads: Option<usize>,
}

impl UpdateRequest<'_> {
    fn update(&self, shape: &[usize], fans: [usize; 2], o: &Options) -> Result<Update> {
        let (rule, stack) = self.rule(shape)?;
        let mut given = self.g.given.clone();
        // A rule of the user's says itself how much it decays, unless the run does.
        let own = self.own.named(&self.g.rule).next().is_some();
        let of_run = !own
            || o.given.iter().any(|g| g == "weight-decay")
            || o.weight_decay != Options::default().weight_decay;
        if rule.has("decay") && !given.contains_key("decay") && (of_run || !self.decays) {
            let decay = if self.decays { o.weight_decay } else { 0.0 };
            given.insert("decay".into(), format!("{decay:?}"));
        }
        let text = format!("{}={}", self.g.on, self.g.rule);
        let inner = &shape[usize::from(stack)..];
        if rule.by_heads() && self.heads.is_none() {
            let what = format!("`@{}` is not for `{}`, which makes no heads", rule.name, self.name);
            return Err(wrong(&text, what)
                .rule("a matrix of heads has their rows one behind the other in its first dim")
                .help(
                    "leave it to another group: name the projections of queries, keys and values",
                ));
        }
        let attrs = rule.attributes(&given, fans, self.heads, inner);
        let attrs = attrs.map_err(|[what, help]| wrong(&text, what).help(help))?;
        let update = Update { rule, attrs, stack, lr: self.g.lr, group: self.group };
        // What is wrong with its text is said once, and here.
        update.func(shape)?;
        // That an op does what lines say is shown of the rules that are built in, and of no others.
        let is_built_in = || built_in().all().any(|b| b.text() == update.rule.text());
        if update.rule.is_fused() && !is_built_in() {
            let name = &update.rule.name;
            let what = format!(
                "`@{name}` says `fused`, and is not letter for letter a rule that is built in"
            );
            return Err(
                wrong(&text, what).help("leave its line `fused` out: the rule's own lines are run")
            );
        }
        update.fused()?;
        Ok(update)
    }

    /// The first rule of the name that fits, and whether it is one of what is stacked.
    fn rule(&self, shape: &[usize]) -> Result<(Arc<UpdateRule>, bool)> {
        let named = |rules: &Rules| rules.named(&self.g.rule).cloned().collect::<Vec<_>>();
        let mut all = named(self.own);
        if all.is_empty() {
            all = named(built_in());
        }
        let text = format!("{}={}", self.g.on, self.g.rule);
        if all.is_empty() {
            let mut known = self.own.names();
            known.extend(built_in().names());
            let near = nearest(&self.g.rule, known.iter().copied(), 1);
            let d = wrong(&text, format!("no update rule is called `{}`", self.g.rule));
            let d = match near[..] {
                [near, ..] => d.help(format!("did you mean {near}?")),
                [] => d,
            };
            let small = ["8bit", "8_bit", "int8"].iter().any(|w| self.g.rule.contains(w));
            let d = match small {
                true => d.help("states of 8 bits are not built: state_dtype=bf16 keeps 2 bytes"),
                false => d,
            };
            return Err(
                d.help(format!("the rules are {}; --optim-file adds others", known.join(", ")))
            );
        }
        let fits = |shape: &[usize]| all.iter().find(|r| r.fits(shape)).cloned();
        // What is stacked is updated one by one, by a rule of its dims.
        let inner = if self.stack { fits(&shape[1..]).filter(|r| !r.of_any_shape()) } else { None };
        if let Some(rule) = inner {
            return Ok((rule, true));
        }
        fits(shape).map(|rule| (rule, false)).ok_or_else(|| {
            let what =
                format!("`@{}` is not for `{}`, which has shape {shape:?}", self.g.rule, self.name);
            let takes = format!("it takes tensors of the dims {}", UpdateRule::dims_of_all(&all));
            wrong(&text, what).rule(takes).help(format!(
                "leave it to another group: add --optim 'GLOB=adamw' for `{}`",
                self.name
            ))
        })
    }
}
