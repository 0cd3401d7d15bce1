//! The modules of a model as transformers has them, and which words of a plan their forward runs with.
//!
//! A word makes DTensors of parameters, and that of a module also of the value that it is given. In a forward pass DTensors
//! meet only DTensors, and torch moves what lies otherwise; a plain tensor beside one is an error. So of each module
//! this matters: what it is, whether its parameters are DTensors, and whether what it is given is one.

use super::transformers::{Does, Plan, SUMMED, Style, generic, style_of};
use shardc_ir::func::Func;
use shardc_ir::ops::Kind;
use shardc_ir::weights::Weight;
use std::collections::{BTreeMap, BTreeSet};

/// What a module is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Is {
    Linear,
    Table,
    /// It chooses experts, and gives several values.
    Router,
    Experts,
    /// Anything else that has parameters and no modules.
    Leaf,
    /// A norm of what a recurrence gives, which is given a gate, too.
    Gated,
    /// Its parameters are read by the module that it is in, and its own forward is not called.
    Apart,
    /// No parameters: an activation, a dropout.
    Idle,
    /// Positions, of which it gives two values.
    Turns,
    /// Layers: it is never called.
    List,
    /// It has modules.
    Box,
}

/// Modules without parameters, which programs here do not have.
const IDLE: [&str; 8] =
    ["act", "act_fn", "activation", "activation_fn", "drop", "dropout", "qk_norm", "rotary_emb"];

/// Norms that are given two values.
const GATED: [&str; 3] = [".linear_attn.norm", ".mamba.norm", ".mixer.norm"];

/// Modules that have another name in checkpoints than in transformers: of which models, and both.
const RENAMED: [(&str, &str, &str); 5] = [
    ("mixtral", ".mlp", ".block_sparse_moe"),
    ("minimax_m2", ".mlp", ".block_sparse_moe"),
    ("granitemoe", ".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    ("granitemoehybrid", ".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    ("ernie4_5_moe", ".mlp.gate.moe_statics", ".mlp.moe_statics"),
];

/// The name that a checkpoint has for what a rule names.
pub(super) fn renamed(model: &str, rule: &str) -> Option<String> {
    let (_, theirs, ours) = RENAMED.iter().find(|r| r.0 == model)?;
    let (before, after) = rule.split_once(theirs)?;
    (after.is_empty() || after.starts_with('.')).then(|| format!("{before}{ours}{after}"))
}

/// What people call a name of a checkpoint, in a text.
pub(super) fn in_their_words(model: &str, text: &str) -> String {
    let of = RENAMED.iter().find(|r| r.0 == model);
    of.map_or(text.to_string(), |(_, theirs, ours)| text.replace(ours, theirs))
}

/// The modules of a model, by the names that rules have for them.
pub(super) struct Modules {
    /// Modules that multiply by a matrix, or look up in a table.
    pub(super) linears: BTreeSet<String>,
    tables: BTreeSet<String>,
    all: BTreeSet<String>,
    /// By module, its own parameters and how many dims each has.
    own: BTreeMap<String, Vec<(String, usize)>>,
    /// A parameter that is another one: the weight of a tied head.
    tied: Option<(String, String)>,
    /// Matrices of linears lie as those of Conv1D, which has neither `in_features` nor `out_features`.
    conv: bool,
}

impl Modules {
    /// Those of a program and its weights; `tied`: the output projection is the embedding.
    pub(super) fn of(f: &Func, weights: &[Weight], model: &str, tied: bool) -> Modules {
        let params: BTreeMap<&str, &Weight> =
            weights.iter().map(|w| (w.param.as_str(), w)).collect();
        let matrices: Vec<_> = f
            .args
            .iter()
            .filter(|a| {
                let name = a.role.as_ref().map(|r| r.name.to_string()).unwrap_or_default();
                params.contains_key(name.as_str()) && f.ty(a.value).rank() > 1
            })
            .map(|a| a.value)
            .collect();
        let path = |s| generic(&f.scope_info(s).path);
        let of = |kind: Kind| {
            let is = move |k: Kind| k == kind;
            let nodes = f.nodes.iter().filter(|n| is(n.op.facts().kind));
            let nodes = nodes.filter(|n| n.ins.iter().any(|v| matrices.contains(v)));
            nodes.map(|n| path(n.scope)).collect::<BTreeSet<String>>()
        };
        let tables = of(Kind::Lookup);
        let linears: BTreeSet<String> = of(Kind::Product).union(&tables).cloned().collect();
        let mut out = Modules {
            linears,
            tables,
            all: f.nodes.iter().map(|n| path(n.scope)).collect(),
            own: BTreeMap::new(),
            tied: None,
            conv: model == "gpt2",
        };
        weights.iter().for_each(|w| out.add(w));
        let (head, table) = (out.head().map(str::to_string), out.tables.iter().next().cloned());
        if let (true, Some(head), Some(table)) = (tied, head, table) {
            out.own.entry(head.clone()).or_default().push(("weight".into(), 2));
            out.tied = Some((format!("{head}.weight"), format!("{table}.weight")));
        }
        for name in out.all.clone() {
            let mut at = name.as_str();
            while let Some((parent, _)) = at.rsplit_once('.') {
                out.all.insert(parent.to_string());
                at = parent;
            }
        }
        out
    }

    /// Adds a parameter to the module that has it; those of experts are in one tensor.
    fn add(&mut self, w: &Weight) {
        let name = generic(&w.tensor.replace("{}", "0"));
        let (module, leaves, rank) = match w.experts {
            None => {
                let (module, leaf) = name.rsplit_once('.').unwrap_or(("", &name));
                (module.to_string(), vec![leaf], w.tensor_shape.len())
            }
            Some(_) => {
                // Where a checkpoint has its tensors under other names, they are in that module all the same.
                let above = || name.rsplitn(3, '.').nth(2);
                let Some(of) = name.split_once(".experts").map(|s| s.0).or_else(above) else {
                    return;
                };
                let module = format!("{of}.experts");
                match name.ends_with("_bias") {
                    false => (module, vec!["gate_up_proj", "down_proj"], 3),
                    true => (module, vec!["gate_up_proj_bias", "down_proj_bias"], 2),
                }
            }
        };
        self.all.insert(module.clone());
        let own = self.own.entry(module).or_default();
        for leaf in leaves {
            if !own.iter().any(|o| o.0 == leaf) {
                own.push((leaf.to_string(), rank));
            }
        }
    }

    /// True if transformers has a module or a parameter of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let Some((owner, last)) = name.rsplit_once('.') else { return self.all.contains(name) };
        let param = || self.own.get(owner).is_some_and(|o| o.iter().any(|p| p.0 == last));
        self.all.contains(name) || param() || self.is_idle(name)
    }

    /// The module of the output projection.
    pub(super) fn head(&self) -> Option<&str> {
        let is = |l: &&String| !l.contains('.') && !self.tables.contains(*l);
        self.linears.iter().find(is).map(String::as_str)
    }

    /// True if its own forward is called, and not that of another module in its place.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.has_module(name) && !matches!(self.is(name), Is::List | Is::Apart)
    }

    /// True if it is a module.
    fn has_module(&self, name: &str) -> bool {
        self.all.contains(name) || self.is_idle(name)
    }

    fn is_idle(&self, name: &str) -> bool {
        let Some((owner, last)) = name.rsplit_once('.') else { return false };
        (IDLE.contains(&last) || last.ends_with("_dropout")) && self.all.contains(owner)
    }

    fn is(&self, name: &str) -> Is {
        let (owner, last) = name.rsplit_once('.').unwrap_or(("", name));
        let inside = format!("{name}.");
        let within = || self.all.iter().any(|m| m.starts_with(&inside));
        let weight = || self.own.get(name).is_some_and(|o| o.iter().any(|p| p.0 == "weight"));
        if last == "experts" {
            Is::Experts
        } else if (name.contains(".router") || last == "gate")
            && self.all.contains(&format!("{}.experts", owner.trim_end_matches(".router")))
        {
            Is::Router
        } else if self.tables.contains(name) {
            Is::Table
        } else if self.linears.contains(name) && weight() && !(self.conv && name.contains('.')) {
            Is::Linear
        } else if GATED.iter().any(|m| name.ends_with(m)) {
            Is::Gated
        } else if name.ends_with(".linear_attn.conv1d") {
            Is::Apart
        } else if self.all.contains(&format!("{name}.*")) {
            Is::List
        } else if within() {
            Is::Box
        } else if last == "rotary_emb" {
            Is::Turns
        } else if self.own.contains_key(name) {
            Is::Leaf
        } else if self.is_idle(name) {
            Is::Idle
        } else {
            Is::Box
        }
    }

    /// What transformers raises, or computes otherwise, for what a module is and not for sizes.
    pub(super) fn misfits(&self, plan: &Plan) -> Vec<String> {
        let mut out = vec![];
        for (name, word) in plan.words() {
            if let Some(style) = style_of(word).filter(|_| self.has_module(name))
                && let Some(why) = misfit(style, self.is(name))
            {
                out.push(format!("{name}: {word}: {why}"));
            }
        }
        for (module, own) in &self.own {
            own.iter().for_each(|(p, rank)| out.extend(self.mixed(plan, module, p, *rank)));
        }
        out
    }

    /// A parameter that is a DTensor where its module has plain tensors, or the other way round.
    fn mixed(&self, plan: &Plan, module: &str, param: &str, rank: usize) -> Option<String> {
        let name = format!("{module}.{param}");
        let of = self.tied.as_ref().filter(|t| t.0 == name).map_or(&name, |t| &t.1);
        let own = plan.of_param(of).map(|(_, style)| style);
        let word = own.map_or("no word".into(), |s| s.word.to_string());
        let same = if *of == name { String::new() } else { format!(", which is {of}") };
        if own.is_some_and(|s| s.word == "embedding_colwise") && rank < 2 {
            return Some(format!("{name}: {word}: it splits dim 1, and this has one dim"));
        }
        let hook = plan.own_style(module).filter(|_| self.is_called(module));
        let given = hook.is_some_and(Style::makes_dtensors);
        let local = hook.is_some_and(|s| s.local || s.word == "packed_colwise");
        let hook = hook.map_or("no word".into(), |s| s.word.to_string());
        match (own.is_some_and(|s| s.dim.is_some() || s.word == "grouped_gemm"), given) {
            (true, false) if !local => Some(format!(
                "{name}: {word}{same}: it becomes a DTensor, and what {module} ({hook}) is given is a plain tensor; \
                 both, or none, have a word (local_params takes the part of a rank)"
            )),
            (false, true) => Some(format!(
                "{name}: {word}{same}: it is a plain tensor, and {hook} makes a DTensor of what {module} is given"
            )),
            _fits => None,
        }
    }

    /// Parameters whose gradients a hook sums behind each accumulation: those that a called module has itself.
    pub(super) fn summed<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = String> + 'a {
        let summed = |m: &str| {
            let hook = plan.own_style(m);
            hook.is_some_and(|s| s.word == SUMMED)
        };
        let of = self.own.iter().filter(move |(m, _)| summed(m) && self.is_called(m));
        of.flat_map(|(m, own)| match self.is(m) {
            // Checkpoints may have a tensor for each expert.
            Is::Experts => vec![format!("{m}.*")],
            _other => own.iter().map(|(p, _)| format!("{m}.{p}")).collect(),
        })
    }
}

/// Why a style cannot be that of such a module, whatever sizes are.
fn misfit(style: Style, is: Is) -> Option<&'static str> {
    use Is::{Apart, Experts, Gated, Idle, Leaf, Linear, List, Table, Turns};
    let packed = style.word == "packed_colwise";
    let (fits, why) = match style.does {
        Does::Columns if packed => (
            matches!(is, Linear | Table | List | Turns | Apart),
            "it is for a linear of two matrices, or their tensor, and adds gradients of what this takes",
        ),
        Does::Columns | Does::Gathers | Does::Rows | Does::SplitsRows if is == Table => {
            (false, "it is for linears, and this is a table")
        }
        Does::Columns | Does::Gathers | Does::Rows | Does::SplitsRows => {
            (is == Linear, "it is for linears, and this is none")
        }
        Does::Table => (
            matches!(is, Linear | Table | Leaf | Apart | List | Idle),
            "it makes a DTensor of the first value, and this takes or gives several, or has modules of its own",
        ),
        Does::Adds => (
            matches!(is, Linear | Table | Leaf | Gated | Experts | List | Apart),
            "it adds what ranks give, and each gives all of it",
        ),
        Does::Dispatches => (is == Experts, "it is for experts, in ep_plan"),
        Does::Nothing => (
            style.word != "mla_kv_a_proj" || matches!(is, Linear | List | Apart),
            "it is for the projection to latents of keys, and this is none",
        ),
    };
    (!fits).then_some(why)
}
