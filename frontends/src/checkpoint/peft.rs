//! Adapters as PEFT writes them: adapter_config.json, and the names of tensors in adapter_model.safetensors.

use super::Checkpoint;
use serde_json::{Map, Value, json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::names::nearest;
use shardc_ir::weights::Weight;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Name of the file that says what an adapter is, beside that of its tensors.
pub const CONFIG: &str = "adapter_config.json";
/// Name of the file of its tensors.
pub const TENSORS: &str = "adapter_model.safetensors";
/// Largest adapter_config.json that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;
/// Most targets, and entries of a pattern.
const MOST: usize = 1 << 16;

/// What stands before the path of a module.
const PREFIX: &str = "base_model.model.";

/// What a tensor of a weight is called in an adapter.
pub fn name_in_adapter(tensor: &str) -> String {
    if tensor.starts_with(PREFIX) { tensor.into() } else { format!("{PREFIX}{tensor}") }
}

impl Checkpoint {
    /// The tensors of an adapter's folder by the names that weights have: all of the adapters, and perhaps others that
    /// were trained.
    ///
    /// # Errors
    /// `adapter` if it has no tensors, or some that no weight has; `missing-tensor`, `tensor-shape`, `tensor-dtype`;
    /// `not-built` for biases and other kinds; those of opening a file.
    pub fn of_adapter(dir: &Path, weights: &[Weight]) -> Result<Checkpoint> {
        let at = |d: Diag| d.at(dir.join(TENSORS).display().to_string());
        if !dir.join(TENSORS).is_file() {
            return Err(at(Diag::new("adapter", format!("the folder has no {TENSORS}"))
                .help("give the folder that PEFT's save_pretrained wrote")));
        }
        let mut c = Checkpoint::of_files(dir, [TENSORS].into_iter())?;
        let own: BTreeMap<String, String> =
            (weights.iter().flat_map(Weight::tensors)).map(|t| (name_in_adapter(&t), t)).collect();
        let mut tensors = BTreeMap::new();
        for (name, entry) in std::mem::take(&mut c.tensors) {
            // The name of the adapter, which PEFT has in memory, and other software in files.
            let plain = name.replacen(".default.", ".", 1).replacen(".modules_to_save.", ".", 1);
            // Checkpoints may have tensors without the root that modules have.
            let less = || {
                let (_, path) = plain.strip_prefix(PREFIX)?.split_once('.')?;
                own.get(&format!("{PREFIX}{path}"))
            };
            let Some(tensor) = own.get(&plain).or_else(less) else {
                let what = format!("the plan has no adapter `{name}`");
                let d = at(Diag::new("adapter", what));
                return Err(match nearest(&plain, own.keys().map(String::as_str), 1).first() {
                    Some(near) => d.help(format!("the nearest name that it has: `{near}`")),
                    None => d.help("compile with --lora-from and the folder of this adapter"),
                });
            };
            if tensors.insert(tensor.clone(), entry).is_some() {
                return Err(at(Diag::new("adapter", format!("`{plain}` is there twice"))
                    .help("write the adapter again with PEFT")));
            }
        }
        c.tensors = tensors;
        let adapters =
            weights.iter().filter(|w| w.is_adapter() || w.tensors().any(|t| c.get(&t).is_some()));
        let adapters: Vec<Weight> = adapters.cloned().collect();
        c.check(&adapters).map_err(|d| match d.code {
            "tensor-shape" => Diag { help: vec![], ..d }
                .rule("the rank of an adapter and its weights give its shapes")
                .help("compile with --lora-from and the folder of this adapter, or with its rank"),
            _other => d.help("compile with --lora-from and the folder of this adapter"),
        })?;
        Ok(c)
    }
}

/// The modules that are trained whole beside adapters, as adapter_config.json lists them; none if a module is trained in
/// part.
pub fn whole_modules(weights: &[Weight], trained: &dyn Fn(&Weight) -> bool) -> Option<Vec<String>> {
    let module = |w: &Weight| w.tensor.rsplit_once('.').map_or(w.tensor.clone(), |x| x.0.into());
    let own = || weights.iter().filter(|w| !w.is_adapter());
    let all: BTreeSet<String> = own().filter(|w| trained(w)).map(module).collect();
    let whole = own().filter(|w| all.contains(&module(w))).all(|w| trained(w) && !w.is_stacked());
    whole.then(|| all.into_iter().collect())
}

/// Keys that say nothing of what an adapter computes, or only how one began.
const WITHOUT_EFFECT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that say which modules an adapter has, and which are trained beside it: so do its tensors.
const CHOOSES: &[&str] = &[
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "modules_to_save",
    "target_modules",
];

/// Ways in which an adapter begins that leave the weights beside it as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) change
/// these, which PEFT does again when it loads one.
const BEGINNINGS: &[&str] = &["gaussian", "orthogonal", "eva"];

/// What is known of an adapter beside its tensors.
#[derive(Clone, PartialEq, Debug)]
pub struct AdapterConfig {
    pub r: usize,
    pub alpha: f64,
    /// Paths of modules, ends of them, or `linear`; sorted.
    pub targets: Vec<String>,
    pub dropout: f64,
    pub rslora: bool,
    pub rank_pattern: BTreeMap<String, usize>,
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Ends of the paths of modules that are trained whole beside adapters.
    pub whole: Vec<String>,
}

impl AdapterConfig {
    /// Reads the adapter_config.json of a folder.
    ///
    /// # Errors
    /// `file`; `adapter` for what is no such file; `not-built` for a key that asks for what is not built.
    pub fn read(dir: &Path) -> Result<AdapterConfig> {
        let file = dir.join(CONFIG);
        if !file.is_file() {
            return Err(Diag::new("adapter", format!("the folder has no {CONFIG}"))
                .at(file.display().to_string())
                .help("give the folder that PEFT's save_pretrained wrote"));
        }
        AdapterConfig::of_file(&file, &[])
    }

    /// The same without targets, of an adapter of which tensors say which modules it has; nothing where no such file is.
    ///
    /// # Errors
    /// Those of [`AdapterConfig::read`].
    pub fn of_tensors(dir: &Path) -> Result<Option<AdapterConfig>> {
        let file = dir.join(CONFIG);
        match file.is_file() {
            true => AdapterConfig::of_file(&file, CHOOSES).map(Some),
            false => Ok(None),
        }
    }

    fn of_file(file: &Path, unread: &[&str]) -> Result<AdapterConfig> {
        let at = |d: Diag| d.at(file.display().to_string());
        let text = files::read(file, MAX_CONFIG)?;
        let json: Value = serde_json::from_slice(&text).map_err(|e| {
            at(Diag::new("adapter", format!("this is not JSON: {e}"))
                .help("write it again with PEFT"))
        })?;
        AdapterConfig::of(&json, unread).map_err(at)
    }

    /// The same, of what the file has but for some keys.
    fn of(json: &Value, unread: &[&str]) -> Result<AdapterConfig> {
        let wrong = |what: String| {
            Diag::new("adapter", what).help("write it again with PEFT's save_pretrained")
        };
        let map = json.as_object().ok_or_else(|| wrong("it is not an object of JSON".into()))?;
        let keys = AdapterKeys { map, wrong: &wrong };
        keys.supported(unread)?;
        let targets = if unread.is_empty() { keys.targets()? } else { vec![] };
        let r = keys.whole("r", map.get("r"))?;
        let c = AdapterConfig {
            r,
            alpha: keys.number("lora_alpha", 8.0)?,
            targets,
            dropout: keys.number("lora_dropout", 0.0)?,
            rslora: keys.flag("use_rslora")?,
            rank_pattern: keys.pattern("rank_pattern", |k, v| keys.whole(k, Some(v)))?,
            alpha_pattern: keys.pattern("alpha_pattern", |k, v| {
                v.as_f64().ok_or_else(|| wrong(format!("`{k}` is not a number")))
            })?,
            whole: if unread.is_empty() { keys.names("modules_to_save")? } else { vec![] },
        };
        Ok(c)
    }

    /// The text of the file. `base` is the model that it belongs to, and `turned` whether its weights are stored
    /// `[in, out]`.
    pub fn text(&self, base: Option<&str>, turned: bool) -> String {
        let whole = if self.whole.is_empty() { Value::Null } else { json!(self.whole) };
        let json = json!({
            "alpha_pattern": self.alpha_pattern,
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": turned,
            "inference_mode": true,
            "lora_alpha": plain(self.alpha),
            "lora_dropout": self.dropout,
            "modules_to_save": whole,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": self.rank_pattern,
            "target_modules": self.targets,
            "task_type": "CAUSAL_LM",
            "use_rslora": self.rslora,
        });
        let mut text = serde_json::to_string_pretty(&json).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// A number as PEFT writes it: whole ones without a point.
fn plain(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

struct AdapterKeys<'a> {
    map: &'a Map<String, Value>,
    wrong: &'a dyn Fn(String) -> Diag,
}

impl AdapterKeys<'_> {
    /// Refuses what another kind of adapter has, or a feature that is not built. A key that nobody knows is one, unless
    /// it is off.
    fn supported(&self, unread: &[&str]) -> Result<()> {
        const READ: &[&str] = &[
            "r",
            "lora_alpha",
            "lora_dropout",
            "use_rslora",
            "target_modules",
            "rank_pattern",
            "alpha_pattern",
            "modules_to_save",
            "peft_type",
        ];
        let kind = self.map.get("peft_type").and_then(Value::as_str);
        if kind != Some("LORA") {
            let what = match kind {
                Some(kind) => format!("peft_type is {kind}"),
                None => "there is no peft_type".to_string(),
            };
            return Err(Diag::new("not-built", what)
                .rule("adapters are of peft_type LORA")
                .help("train a LoRA adapter, or merge this one into its model with PEFT"));
        }
        let off = |v: &Value| match v {
            Value::Null => true,
            Value::Bool(x) => !x,
            Value::Array(x) => x.is_empty(),
            Value::Object(x) => x.is_empty(),
            Value::String(x) => x.is_empty() || x == "none",
            Value::Number(_) => false,
        };
        let begins = |k: &str, v: &Value| {
            let word = || v.as_str().is_some_and(|word| BEGINNINGS.contains(&word));
            k == "init_lora_weights" && (v.is_boolean() || word())
        };
        let listed = |k: &str| [READ, WITHOUT_EFFECT, unread].iter().any(|all| all.contains(&k));
        let known = |k: &str, v: &Value| listed(k) || begins(k, v);
        match self.map.iter().find(|(k, v)| !known(k, v) && !off(v)) {
            None => Ok(()),
            Some((key, value)) => {
                let mut value = value.to_string();
                value.truncate(value.char_indices().nth(40).map_or(value.len(), |x| x.0));
                let d = Diag::new("not-built", format!("`{key}` is {value}"))
                    .rule("adapters are products of A and B beside weights, without biases and other parts");
                Err(match key.as_str() {
                    "init_lora_weights" => d.help(
                        "it changes the model's own weights: save it with PEFT's path_initial_model_for_weight_conversion, \
                         or merge it into its model with PEFT",
                    ),
                    "use_dora" => {
                        d.help("train without DoRA, or merge the adapter into its model with PEFT")
                    }
                    _other => {
                        d.help("train without it, or merge the adapter into its model with PEFT")
                    }
                })
            }
        }
    }

    fn targets(&self) -> Result<Vec<String>> {
        let all = self.names("target_modules")?;
        match all.is_empty() {
            true => Err((self.wrong)("target_modules names no modules".into())),
            false => Ok(all),
        }
    }

    /// Names of modules under a key: a list, or one.
    fn names(&self, key: &str) -> Result<Vec<String>> {
        let wrong = |what: &str| (self.wrong)(format!("{key} {what}"));
        let one = |v: &Value| match v.as_str() {
            Some("all-linear") if key == "target_modules" => Ok("linear".to_string()),
            Some(text) if is_plain(text) => Ok(text.to_string()),
            Some(text) => {
                let what = format!("{key} has `{text}`, a regular expression");
                Err(Diag::new("not-built", what).help("write the names of the modules as a list"))
            }
            None => Err(wrong("has what is no text")),
        };
        let mut all = match self.map.get(key) {
            None | Some(Value::Null) => vec![],
            Some(text @ Value::String(_)) => vec![one(text)?],
            Some(Value::Array(all)) if all.len() <= MOST => {
                all.iter().map(one).collect::<Result<_>>()?
            }
            Some(_) => return Err(wrong("is no list of modules")),
        };
        all.sort();
        all.dedup();
        Ok(all)
    }

    fn whole(&self, key: &str, v: Option<&Value>) -> Result<usize> {
        let n = v.and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        n.ok_or_else(|| (self.wrong)(format!("`{key}` is not a whole number")))
    }

    fn number(&self, key: &str, absent: f64) -> Result<f64> {
        match self.map.get(key) {
            None => Ok(absent),
            Some(v) => v.as_f64().ok_or_else(|| (self.wrong)(format!("`{key}` is not a number"))),
        }
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(v) => {
                v.as_bool().ok_or_else(|| (self.wrong)(format!("`{key}` is not true or false")))
            }
        }
    }

    fn pattern<T>(
        &self,
        key: &str,
        read: impl Fn(&str, &Value) -> Result<T>,
    ) -> Result<BTreeMap<String, T>> {
        let map = match self.map.get(key) {
            None | Some(Value::Null) => return Ok(BTreeMap::new()),
            Some(Value::Object(map)) if map.len() <= MOST => map,
            Some(_) => return Err((self.wrong)(format!("`{key}` is not an object"))),
        };
        if let Some([first, second]) = ambiguous(map) {
            let what = format!("{key} has `{first}` and `{second}`, which may both fit a module");
            return Err(
                Diag::new("not-built", what).help("write the path of each module once, without ^")
            );
        }
        let one = |(name, v): (&String, &Value)| {
            // The pattern of a whole path begins so.
            let own = name.strip_prefix('^').unwrap_or(name);
            if !is_plain(own) {
                return Err(Diag::new(
                    "not-built",
                    format!("{key} has `{name}`, a regular expression"),
                )
                .help("write the path of each module"));
            }
            Ok((own.to_string(), read(name, v)?))
        };
        map.iter().map(one).collect()
    }
}

/// Two entries of a pattern with different values of which PEFT takes another than is taken here: there the first in the file
/// that fits a module, with `^` for whole paths; here the first by name.
fn ambiguous(map: &Map<String, Value>) -> Option<[&String; 2]> {
    let plain = |name: &'_ str| name.strip_prefix('^').unwrap_or(name).to_string();
    let fits = |end: &str, path: &str| {
        path.strip_suffix(end).is_some_and(|s| s.is_empty() || s.ends_with('.'))
    };
    let differ = |(first, v): (&String, &Value), (second, w): (&String, &Value)| {
        let (a, b) = (plain(first), plain(second));
        let anchors = first.starts_with('^') || second.starts_with('^');
        v != w && (fits(&a, &b) || fits(&b, &a)) && (anchors || b < a)
    };
    let all: Vec<(&String, &Value)> = map.iter().collect();
    let pairs =
        all.iter().enumerate().flat_map(|(i, a)| all[i + 1..].iter().map(move |b| (*a, *b)));
    pairs.into_iter().find(|(a, b)| differ(*a, *b)).map(|(a, b)| [a.0, b.0])
}

/// A path of a module, without anything that a regular expression would mean but the dots.
fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(more: &str) -> Option<String> {
        let text =
            format!(r#"{{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], {more}}}"#);
        let json: Value = serde_json::from_str(&text).expect("JSON");
        AdapterConfig::of(&json, &[]).err().map(|d| format!("{}: {}", d.code, d.message))
    }

    /// Those that PEFT gives other weights beside, or other ranks and factors, are refused.
    #[test]
    fn adapters_that_peft_reads_otherwise_are_refused() {
        for good in ["true", "false", "null", "\"gaussian\"", "\"orthogonal\"", "\"eva\""] {
            assert_eq!(refused(&format!(r#""init_lora_weights": {good}"#)), None, "{good}");
        }
        for bad in ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"] {
            let said = refused(&format!(r#""init_lora_weights": "{bad}""#)).expect(bad);
            assert!(said.starts_with("not-built: `init_lora_weights` is"), "{said}");
        }
        let patterns = [
            (r#"{"layers.1.q_proj": 128, "q_proj": 1}"#, false),
            (r#"{"q_proj": 1, "layers.1.q_proj": 128}"#, true),
            (r#"{"q_proj": 1, "layers.1.q_proj": 1}"#, false),
            (r#"{"^model.layers.1.q_proj": 128, "layers.1.q_proj": 1}"#, true),
            (r#"{"^model.layers.1.q_proj": 128, "^model.layers.2.q_proj": 1}"#, false),
            (r#"{"v_proj": 128, "q_proj": 1}"#, false),
        ];
        for (pattern, bad) in patterns {
            let said = refused(&format!(r#""alpha_pattern": {pattern}"#));
            assert_eq!(said.is_some(), bad, "{pattern}: {said:?}");
        }
    }
}
