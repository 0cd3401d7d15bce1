//! What is asked of adapters, as flags and files say it.

use super::linears::Linear;
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::{glob, nearest};
use std::collections::{BTreeMap, BTreeSet};

/// Low-rank adapters beside frozen weights: `--lora`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Rows of A and columns of B.
    pub r: usize,
    /// The branch is times alpha / r, or alpha / √r.
    pub alpha: f64,
    /// `linear`, `experts`, globs over paths of modules, or ends of such paths.
    pub targets: Vec<String>,
    /// The share of what a branch reads that is set to 0, at random.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropout: f64,
    /// The branch is times alpha / √r (Kalajdzievski, 2023, *rsLoRA*).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rslora: bool,
    /// r and alpha of some modules, by their paths or ends of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, usize>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Modules that are trained whole beside adapters, by ends of their paths ([`shardc_ir::names::in_module`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub whole: Vec<String>,
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

/// What is done where nobody says.
const LINEAR: &str = "linear";
const EXPERTS: &str = "experts";
/// A target by our word for it, where PEFT or LLaMA-Factory have another.
fn target(word: &str) -> String {
    if ["all-linear", "all"].contains(&word) { LINEAR.into() } else { word.into() }
}

/// Most modules that a message lists.
const LISTED: usize = 12;

impl Lora {
    /// Reads `r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,rslora`.
    ///
    /// # Errors
    /// `flag`, `lora-rank`.
    pub fn parse(text: &str) -> Result<Lora> {
        let help = "for example --lora r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05";
        let place = format!("--lora {text}");
        let wrong = |what: String| Diag::new("flag", what).at(&place).help(help);
        let mut l = Lora {
            r: 0,
            alpha: f64::NAN,
            targets: vec![LINEAR.into()],
            dropout: 0.0,
            rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            whole: vec![],
        };
        let mut seen = BTreeSet::new();
        for item in text.split(',').map(str::trim) {
            let (key, value) = item.split_once('=').map_or((item, None), |x| (x.0, Some(x.1)));
            if !seen.insert(key) {
                return Err(wrong(format!("`{key}` is given twice")));
            }
            let number = || {
                let x = value.and_then(|v| v.parse::<f64>().ok()).filter(|x| x.is_finite());
                x.ok_or_else(|| wrong(format!("`{item}`: a number, as in {key}=0.5")))
            };
            match (key, value) {
                ("r", Some(v)) => {
                    let r = v
                        .parse()
                        .map_err(|_| wrong(format!("`{item}`: a whole number, as in r=16")))?;
                    l.r = r;
                }
                ("alpha", Some(_)) => l.alpha = number()?,
                ("dropout", Some(_)) => l.dropout = number()?,
                ("targets", Some(v)) => l.targets = v.split('+').map(target).collect(),
                ("rslora", None) => l.rslora = true,
                _unknown => {
                    return Err(wrong(format!(
                        "`{item}`: keys are r=, alpha=, targets=, dropout= and rslora"
                    )));
                }
            }
        }
        if !seen.contains("r") {
            return Err(wrong("no rank is given".into()));
        }
        if l.alpha.is_nan() {
            l.alpha = 2.0 * l.r as f64;
        }
        l.checked().map_err(|d| d.at(&place).help(help))
    }

    /// Itself, if its numbers are such.
    ///
    /// # Errors
    /// `lora-rank` without a rank; `flag` for what is none of a share or a factor.
    pub fn checked(self) -> Result<Lora> {
        if self.r == 0 || self.rank_pattern.values().any(|&r| r == 0) {
            return Err(Diag::new("lora-rank", "r=0: an adapter has at least one row")
                .rule("r is 1 or more"));
        }
        let alphas = || self.alpha_pattern.values().chain([&self.alpha]);
        if alphas().any(|a| !a.is_finite() || *a == 0.0) {
            return Err(Diag::new("flag", "alpha is a number other than 0"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Diag::new("flag", format!("dropout={} is not in 0..1", self.dropout)));
        }
        if self.targets.iter().any(String::is_empty) {
            return Err(Diag::new("flag", "a target has no name"));
        }
        if self.whole.iter().any(String::is_empty) {
            return Err(Diag::new("flag", "a module that is trained whole has no name"));
        }
        Ok(self)
    }

    /// The rank of a module's adapter.
    pub fn rank(&self, module: &str) -> usize {
        own(&self.rank_pattern, module).unwrap_or(self.r)
    }

    /// By what a module's branch is multiplied.
    pub fn scale(&self, module: &str) -> f64 {
        let (alpha, r) =
            (own(&self.alpha_pattern, module).unwrap_or(self.alpha), self.rank(module) as f64);
        if self.rslora { alpha / r.sqrt() } else { alpha / r }
    }

    /// Those of some products that are asked for.
    ///
    /// # Errors
    /// `lora-target`, `lora-tied`.
    pub(super) fn chosen<'a>(&self, all: &'a [Linear]) -> Result<Vec<&'a Linear>> {
        let is = |target: &str, x: &Linear| match target {
            LINEAR => x.usual,
            EXPERTS => x.experts,
            name => {
                let table = x.tied.as_ref().is_some_and(|table| names(name, table));
                !x.experts && (table || names(name, &x.module))
            }
        };
        for target in &self.targets {
            let mut found = all.iter().filter(|x| is(target, x)).peekable();
            if found.peek().is_none() {
                return Err(self.no_such(target, all));
            }
            if let Some(x) = found.find(|x| x.tied.is_some()) {
                let what = format!("the weight of {} is also the embedding", x.module);
                return Err(Diag::new("lora-tied", what)
                    .at("--lora")
                    .rule("an adapter changes one of them: they would not be tied any more")
                    .help("leave it out of the targets: `targets=linear` has all other products"));
            }
        }
        Ok(all.iter().filter(|x| self.targets.iter().any(|t| is(t, x))).collect())
    }

    fn no_such(&self, target: &str, all: &[Linear]) -> Diag {
        let some = all.iter().filter(|x| !x.experts);
        let words: BTreeSet<&str> = some.map(Linear::word).collect();
        let shown: Vec<&str> = words.iter().copied().take(LISTED).collect();
        let dots = if words.len() > LISTED { ", …" } else { "" };
        let what = match target {
            EXPERTS => "`experts`: this model has no experts".to_string(),
            _other => format!("`{target}` matches no linear"),
        };
        let d = Diag::new("lora-target", what)
            .at("--lora")
            .rule("a target is the end of a module's path, or a glob over the paths")
            .why(format!("this model has {}{dots}", shown.join(", ")));
        let of_experts = all.iter().any(|x| x.experts && names(target, &x.module));
        match (of_experts, nearest(target, words.iter().copied(), 1).first()) {
            (true, _) => d.help("use targets=experts for the products of all experts"),
            (_, Some(near)) => d.help(format!("did you mean `{near}`?")),
            _none => d.help("use targets=linear for all products of the layers"),
        }
    }
}

/// What a pattern's own entry is; of several that fit, the first, as in PEFT.
fn own<T: Copy>(patterns: &BTreeMap<String, T>, module: &str) -> Option<T> {
    patterns.iter().find(|(p, _)| names(p, module)).map(|x| *x.1)
}

/// Whether a target names a module: as a glob, or as its path or the end of it.
fn names(target: &str, module: &str) -> bool {
    if target.contains(['*', '?']) {
        return glob(target, module) || glob(target, &format!("{module}.weight"));
    }
    module.strip_suffix(target).is_some_and(|s| s.is_empty() || s.ends_with('.'))
}

/// As the flag has it.
impl std::fmt::Display for Lora {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let targets = self.targets.join("+");
        write!(f, "r={}, alpha={}, targets={targets}", self.r, self.alpha)?;
        if self.dropout > 0.0 {
            write!(f, ", dropout={}", self.dropout)?;
        }
        f.write_str(if self.rslora { ", rslora" } else { "" })
    }
}
