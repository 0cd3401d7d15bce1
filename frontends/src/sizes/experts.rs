//! How many experts layers have, and how they are chosen and balanced.

use super::*;
use crate::family::{Groups, Normed, ScoreFunction, SharedWidth, SparseLayers};
use crate::{Balance, ExpertFacts};

/// Most experts of a layer.
const MAX_EXPERTS: usize = 1 << 14;

/// How experts are chosen, beside what the facts say.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Routing {
    /// Scores are sigmoids, and not a softmax.
    pub sigmoid: bool,
    /// Gates multiply what experts take.
    pub before: bool,
    /// What gates are divided by.
    pub normed: Option<Divisor>,
    /// Factor of the gates.
    pub scale: f64,
    /// Groups of experts, and how many of them a token may use.
    pub groups: Option<(usize, usize)>,
    /// A group counts as its so many best experts.
    pub best: usize,
    /// Coefficient of the auxiliary loss, if training has it.
    pub aux: Option<f64>,
    /// Coefficient of the z-loss, if training has it.
    pub z: Option<f64>,
    /// Choices are counted for the correcting bias.
    pub load: bool,
    /// Alpha and the limit of the product of gate and up, if it has one.
    pub clamped: Option<[f64; 2]>,
}

/// What gates are divided by: their sum, and this.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Divisor {
    /// As much more.
    Plus(f64),
    /// Or this, if it is larger.
    AtLeast(f64),
}

/// Whether there are experts, by their number.
pub(super) fn there(e: &Experts, c: &Config) -> bool {
    let none = || c.get(e.count).and_then(serde_json::Value::as_u64) == Some(0);
    e.layers != SparseLayers::IfAny || !none()
}

pub(super) fn expert_facts(e: &Experts, c: &Config) -> Result<ExpertFacts> {
    let key = e.count;
    let experts = c.count(key)?;
    if experts > MAX_EXPERTS {
        let what = format!("{experts} experts are more than the {MAX_EXPERTS} compiled at most");
        return Err(c.error(key, what, format!("use at most {MAX_EXPERTS}")));
    }
    let top_k = c.count(e.top_k)?;
    if top_k > experts {
        let what = format!("a token cannot use {top_k} of {experts} experts");
        let help = format!("use at most {experts}");
        return Err(c.error(e.top_k, what, help).rule("num_experts_per_tok <= number of experts"));
    }
    let ffn = c.count(e.width)?;
    let shared = match e.shared.map(|s| s.width) {
        None => 0,
        Some(w) if c.get(w.key()).and_then(|v| v.as_u64()) == Some(0) => 0,
        Some(SharedWidth::Experts(key, absent)) => {
            c.count_if(key)?.unwrap_or(absent).saturating_mul(ffn)
        }
        Some(SharedWidth::Key(key, absent)) => c.count_if(key)?.unwrap_or(absent),
    };
    let narrow = e.narrowed.map_or(Ok(None), |n| c.count_if(n.key))?;
    Ok(ExpertFacts { experts, top_k, ffn, shared, narrow })
}

/// Which layers have experts.
pub(super) fn sparse((f, e): (&Family, &Experts), c: &Config, layers: usize) -> Result<Vec<bool>> {
    // 0 is a value in all of these.
    let whole = |key: &str, absent: usize| match c.get(key).map(serde_json::Value::as_u64) {
        Some(Some(0)) => Ok(0),
        _ => Ok(c.count_if(key)?.unwrap_or(absent)),
    };
    match e.layers {
        SparseLayers::All | SparseLayers::IfAny => Ok(vec![there(e, c); layers]),
        SparseLayers::Typed => {
            let kinds = kinds(f, c)?.unwrap_or_default();
            let more = layers - kinds.len();
            let own = kinds.iter().map(|&kind| kind == Kind::Experts);
            Ok(own.chain(std::iter::repeat_n(false, more)).collect())
        }
        SparseLayers::From { absent } => {
            let first = whole("first_k_dense_replace", absent)?;
            Ok((0..layers).map(|i| i >= first).collect())
        }
        SparseLayers::Between { first, last, step } => {
            let (first, step) = (whole(first.0, first.1)?, c.count_if(step)?.unwrap_or(1));
            let last = c.whole_if(last)?.filter(|&n| n != -1);
            let within = |i: usize| i >= first && last.is_none_or(|n| i as i64 <= n);
            Ok((0..layers).map(|i| within(i) && (i + 1) % step == 0).collect())
        }
        SparseLayers::Listed(list, step) => {
            let step = c.count_if(step)?.unwrap_or(1);
            Ok(match c.counts_if(list)? {
                Some(list) => (0..layers).map(|i| list.contains(&i)).collect(),
                None => (0..layers).map(|i| (i + 1) % step == 0).collect(),
            })
        }
        SparseLayers::Stepped => {
            let step = c.count_if("decoder_sparse_step")?.unwrap_or(1);
            let plain = c.counts_if("mlp_only_layers")?.unwrap_or_default();
            Ok((0..layers).map(|i| !plain.contains(&i) && (i + 1) % step == 0).collect())
        }
    }
}

/// A warning for each option of balance that changes nothing.
pub(super) fn idle_balance(f: &Family, shape: &Shape, sparse: bool) -> Vec<Diag> {
    let corrected = f.experts.as_ref().is_some_and(|e| e.score.bias.is_some()) && sparse;
    let b = shape.balance;
    let asked = [
        ("--moe-aux", b.aux.is_some_and(|x| x != 0.0), sparse, "the model has no experts"),
        ("--moe-z-loss", b.z != 0.0, sparse, "the model has no experts"),
        ("--moe-bias-rate", b.load, corrected, "no router has a bias that corrects its choice"),
    ];
    let why = |serves: bool, lacks: &'static str| match (shape.mode, serves) {
        (Mode::Infer, _) => Some("nothing is trained"),
        (Mode::Train, false) => Some(lacks),
        (Mode::Train, true) => None,
    };
    let idle = asked.into_iter().filter(|a| a.1).filter_map(|(flag, _, serves, lacks)| {
        let what = format!("{flag} has no effect: {}", why(serves, lacks)?);
        Some(Diag::new("no-effect", what).help("leave it out"))
    });
    idle.collect()
}

pub(super) fn routing(
    e: &Experts,
    c: &Config,
    facts: Option<&ExpertFacts>,
    shape: &Shape,
) -> Result<Routing> {
    let Some(x) = facts else { return Ok(Routing::default()) };
    let train = shape.mode == Mode::Train;
    let own = if e.aux && c.has_own_head() { c.number_if("router_aux_loss_coef")? } else { None };
    let own = if e.aux && train && c.flag("output_router_logits", false)? { own } else { None };
    let on = |x: Option<f64>| x.filter(|&x| train && x != 0.0);
    let Balance { aux, z, load } = shape.balance;
    let (aux, z) = (on(aux.or(own)), on(Some(z)));
    let number = |of: (&str, f64)| Ok(c.positive_if(of.0)?.unwrap_or(of.1));
    let clamped = match e.clamped {
        None => None,
        Some(k) => Some([number(k.alpha)?, number(k.limit)?]),
    };
    let plus = |on: bool, more| on.then_some(Divisor::Plus(more));
    let normed = match e.score.normed {
        Normed::Never => None,
        Normed::Always => plus(true, 0.0),
        Normed::Key(key) => plus(c.flag(key, false)?, 0.0),
        Normed::Unless(key) => plus(c.flag(key, true)?, 1e-20),
        Normed::AtLeast(key, absent) => Some(Divisor::AtLeast(number((key, absent))?)),
    };
    let scale = match e.score.factor {
        None => 1.0,
        Some((key, absent)) => c.number_if(key)?.unwrap_or(absent),
    };
    let (groups, best) = match e.score.groups {
        Groups::None => (None, 1),
        Groups::Best => (if by_groups(c)? { Some(groups(c, x, [1, 1], 1)?) } else { None }, 1),
        Groups::BestTwo { absent: (all, kept) } => (Some(groups(c, x, [all, kept], 2)?), 2),
    };
    let groups = groups.filter(|(all, kept)| kept < all);
    let sigmoid = e.score.function == ScoreFunction::Sigmoid;
    let (before, load) = (e.score.before, load && train && e.score.bias.is_some());
    Ok(Routing { sigmoid, before, normed, scale, groups, best, aux, z, load, clamped })
}

/// Whether groups of experts are chosen first, by the name of the method.
fn by_groups(c: &Config) -> Result<bool> {
    const METHOD: &str = "topk_method";
    match c.word_if(METHOD)?.unwrap_or("greedy") {
        "greedy" => Ok(false),
        "group_limited_greedy" => Ok(true),
        other => {
            let what = format!("experts are not chosen by `{other}` here");
            let help = "the 2 known methods are greedy, group_limited_greedy".into();
            Err(c.unsupported("unsupported-config", METHOD, what, help))
        }
    }
}

/// Groups of experts and how many of them are used, of at least so many experts.
fn groups(c: &Config, x: &ExpertFacts, absent: [usize; 2], least: usize) -> Result<(usize, usize)> {
    let groups = c.count_if("n_group")?.unwrap_or(absent[0]);
    let kept = c.count_if("topk_group")?.unwrap_or(absent[1]);
    let per = x.experts / groups;
    if x.experts % groups == 0 && per >= least && kept <= groups && kept * per >= x.top_k {
        return Ok((groups, kept));
    }
    let what = format!(
        "{} of {} experts cannot be chosen from {kept} of {groups} groups",
        x.top_k, x.experts
    );
    let rule = "n_group divides the experts, 2 or more are in a group where their best two count, \
                topk_group <= n_group, and so many groups hold num_experts_per_tok";
    let help = "use n_group 1 and topk_group 1, for example";
    Err(c.error("n_group", what, help).rule(rule))
}
