//! Plans with adapters: what of them is trained and saved, the adapter as PEFT has it, and models with adapters merged.

use crate::again::model_of;
use crate::flags::lora_of;
use crate::hub;
use crate::stored::Stored;
use shardc_frontends::{
    AdapterConfig, CONFIG, Checkpoint, Saving, is_wrapper, name_in_adapter, rooted, whole_modules,
};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::globs;
use shardc_passes::lora::{self, AdapterPlace};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the parameters that a plan does not train.
///
/// # Errors
/// Those of the globs of its options.
pub fn frozen(s: &Stored) -> Result<BTreeSet<String>> {
    let all = globs::frozen(&s.plan.weights, &s.options)?;
    Ok(all.into_iter().collect())
}

/// The weights that saving a plan's model writes: all, or of one with adapters what is trained, by the names that PEFT
/// gives to tensors.
///
/// # Errors
/// Those of [`frozen`].
pub fn saved(s: &Stored) -> Result<Vec<Weight>> {
    if s.options.lora.is_none() {
        return Ok(s.plan.weights.clone());
    }
    let still = frozen(s)?;
    let own = in_modules(s).into_iter().filter(|w| !still.contains(&w.param));
    Ok(own.map(|w| Weight { tensor: name_in_adapter(&w.tensor), ..w }).collect())
}

/// The weights of a plan, by the names that transformers' modules have.
fn in_modules(s: &Stored) -> Vec<Weight> {
    let tensors: BTreeSet<String> = s.plan.weights.iter().flat_map(Weight::tensors).collect();
    let has = |name: &str| tensors.contains(name);
    let named = |w: &Weight| match w.is_adapter() {
        true => w.clone(),
        false => Weight { tensor: rooted(&s.config, &w.tensor, &has), ..w.clone() },
    };
    s.plan.weights.iter().map(named).collect()
}

/// Models of which PEFT 0.21 takes modules of these names for their experts, whatever their paths are
/// (`utils/transformers_weight_conversion.py`: experts of transformers 4 were modules, those of 5 are not).
const RENAMED: [(&[&str], &[&str]); 2] = [
    (&["mixtral", "minimax_m2"], &["gate", "w1", "w2", "w3"]),
    (
        &[
            "deepseek_v2",
            "deepseek_v3",
            "ernie4_5_moe",
            "glm4_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
        ],
        &["gate", "gate_proj", "up_proj", "down_proj"],
    ),
];

/// What of a plan's adapters PEFT would not read, or would read as something else; nothing of a plan without.
///
/// # Errors
/// Those of [`frozen`].
pub fn unread(s: &Stored) -> Result<Option<Diag>> {
    let Some(l) = &s.options.lora else { return Ok(None) };
    let refuse = |what: String| {
        Some(
            Diag::new("not-built", what)
                .rule("an adapter is saved as PEFT reads it")
                .help("save checkpoints with --save-every N, and the merged model with shardc reshard CKPT --to hf --merge"),
        )
    };
    if s.plan.weights.iter().any(|w| w.is_adapter() && w.experts.is_some()) {
        return Ok(refuse("adapters of experts are not saved as PEFT's yet".into()));
    }
    let places = lora::places(&model_of(s)?, l);
    let words = RENAMED.iter().find(|r| r.0.contains(&&*s.family)).map_or(&[][..], |r| r.1);
    let own = places.iter().filter(|p| p.adapter.is_some());
    if let Some(word) = own.map(word).find(|w| words.contains(w)) {
        let what = format!("PEFT 0.21 takes `{word}` of a {} for its experts'", s.family);
        return Ok(refuse(what)
            .map(|d| d.help("or choose other targets, for example targets=q_proj+v_proj")));
    }
    let still = frozen(s)?;
    let mut tied = places.iter().filter(|p| !still.contains(&p.param));
    if let Some((table, p)) = tied.find_map(|p| Some((p.tied.as_ref()?, p))) {
        let what = format!("PEFT would untie {table}, which is trained, and {}", p.module);
        return Ok(refuse(what).map(|d| {
            d.why("a module of `modules_to_save` has a weight of its own, and the other the base model's")
        }));
    }
    Ok(match whole_modules(&in_modules(s), &|w| !still.contains(&w.param)) {
        Some(_) => None,
        None => {
            refuse("--train names a part of a module, which adapter_config.json cannot say".into())
                .map(|d| d.help("or name all tensors of its module"))
        }
    })
}

/// Refuses an adapter by whose configuration, if it has one, a module's branch counts otherwise than in the plan.
///
/// # Errors
/// `adapter`; those of [`AdapterConfig::of_tensors`].
pub fn same_factors(s: &Stored, dir: &Path) -> Result<()> {
    let flag = format!("--adapter {}", dir.display());
    let config = AdapterConfig::of_tensors(dir).map_err(|d| d.why(format!("{flag} reads it")))?;
    let Some((plan, config)) = s.options.lora.as_ref().zip(config) else { return Ok(()) };
    let own = lora_of(config, flag)?;
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
    let places = lora::places(&model_of(s)?, plan);
    let mut all = places.iter().filter_map(|p| Some((&p.module, p.adapter.as_ref()?.0)));
    match all.find(|(module, scale)| !near(*scale, own.scale(module))) {
        None => Ok(()),
        Some((module, scale)) => {
            let what = format!(
                "the adapter of {module} is multiplied by {scale} in the plan, and by {} as it was trained",
                own.scale(module)
            );
            Err(Diag::new("adapter", what)
                .at(dir.join(CONFIG).display().to_string())
                .rule("it is multiplied by alpha / r, or alpha / sqrt(r) with rslora")
                .help(format!("compile with --lora-from {}", dir.display())))
        }
    }
}

/// The last word of a module's path.
fn word(p: &AdapterPlace) -> &str {
    p.module.rsplit('.').next().unwrap_or(&p.module)
}

/// How an adapter is saved, of how its model would be; the same for a plan without adapters.
///
/// # Errors
/// `not-built` for what PEFT would not read: [`unread`].
pub fn saving(s: &Stored, how: Saving) -> Result<Saving> {
    let Some(l) = &s.options.lora else { return Ok(how) };
    unread(s)?.map_or(Ok(()), Err)?;
    let still = frozen(s)?;
    let whole = whole_modules(&in_modules(s), &|w| !still.contains(&w.param)).unwrap_or_default();
    let places = lora::places(&model_of(s)?, l);
    let config = AdapterConfig {
        r: l.r,
        alpha: l.alpha,
        targets: targets(&places, is_wrapper(&s.config)),
        dropout: l.dropout,
        rslora: l.rslora,
        rank_pattern: l.rank_pattern.clone(),
        alpha_pattern: l.alpha_pattern.clone(),
        whole,
    };
    let turned = places.iter().any(|p| p.adapter.is_some() && p.turned);
    let text = config.text(s.name.as_deref(), turned);
    let mut base = how.base;
    base.without_tensors();
    Ok(Saving {
        base,
        dtype: how.dtype.or(Some(DType::F32)),
        max_shard: u64::MAX,
        adapter: Some(text),
        ..how
    })
}

/// The modules with adapters: by the last words of their paths if no other module has one of them, else by the paths.
fn targets(places: &[AdapterPlace], wrapped: bool) -> Vec<String> {
    let word = |p: &AdapterPlace| word(p).to_string();
    let of = |with: bool| places.iter().filter(move |p| p.adapter.is_some() == with);
    let words: BTreeSet<String> = of(true).map(word).collect();
    let others: BTreeSet<String> = of(false).map(word).collect();
    match words.is_disjoint(&others) && !wrapped {
        true => words.into_iter().collect(),
        false => of(true).map(|p| p.module.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
    }
}

/// A model with its adapters merged: by weight what is added to it.
pub struct Merge<'a> {
    base: Checkpoint,
    weights: &'a [Weight],
    by_param: BTreeMap<String, AdapterPlace>,
}

impl<'a> Merge<'a> {
    /// Of a plan with adapters, and its base model's folder.
    ///
    /// # Errors
    /// `lora-base` if it is not known where the base model is; those of reading it.
    pub fn open(s: &'a Stored, base: Option<&Path>) -> Result<Merge<'a>> {
        let known = s.origin.as_deref().map(Path::new);
        let dir = base.or(known.filter(|d| d.is_dir())).ok_or_else(|| {
            Diag::new("lora-base", "the base model is not known, or not there any more")
                .rule("merging adds the adapters to the weights of the base model")
                .help("add --base with the folder of the base model")
        })?;
        let dir = hub::resolved(dir)?;
        let c = Checkpoint::open(&dir)?.ok_or_else(|| {
            Diag::new("missing-weights", "the folder has no model.safetensors and no index")
                .at(dir.display().to_string())
                .help("add --base with the folder of the base model")
        })?;
        let c = c.called_as(&s.plan.weights);
        let own = s.plan.weights.iter().filter(|w| !w.is_adapter()).cloned();
        c.check(&own.collect::<Vec<Weight>>())?;
        let places = match &s.options.lora {
            Some(l) => lora::places(&model_of(s)?, l),
            None => vec![],
        };
        let by_param = places.into_iter().filter(|p| p.adapter.is_some());
        let by_param = by_param.map(|p| (p.param.clone(), p)).collect();
        Ok(Merge { base: c, weights: &s.plan.weights, by_param })
    }

    /// The base model's tensors.
    pub fn base(&self) -> &Checkpoint {
        &self.base
    }

    /// Whether something is added to a weight.
    pub fn has(&self, w: &Weight) -> bool {
        self.by_param.contains_key(&w.param)
    }

    /// The weights of the merged model.
    pub fn all(&self) -> Vec<Weight> {
        self.weights.iter().filter(|w| !w.is_adapter()).cloned().collect()
    }

    /// W + s B A, in f32; `get` has what is trained, and nothing of other parameters.
    ///
    /// # Errors
    /// Those of reading.
    pub fn weight(
        &self,
        w: &Weight,
        get: &mut impl FnMut(&Weight) -> Result<Option<Vec<f32>>>,
    ) -> Result<Vec<f32>> {
        let mut out = match get(w)? {
            Some(own) => own,
            None => {
                let mut out = vec![0.0; w.shape.iter().product()];
                let ranges: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
                self.base.read(w, &ranges, &mut out)?;
                out
            }
        };
        let Some(p) = self.by_param.get(&w.param) else { return Ok(out) };
        let (scale, [a, b]) = p.adapter.as_ref().expect("only those with adapters");
        let mut part = |name: &str| -> Result<(Vec<f32>, usize)> {
            let of = self.weights.iter().find(|w| w.param == name).expect("it is in the program");
            let stack = usize::from(of.experts.is_some());
            Ok((get(of)?.unwrap_or_default(), of.shape[stack]))
        };
        let ((a, r), (b, outs)) = (part(a)?, part(b)?);
        let experts = w.experts.unwrap_or(1);
        let input = a.len() / (r * experts).max(1);
        for e in 0..experts {
            let own = &mut out[e * outs * input..(e + 1) * outs * input];
            let (a, b) =
                (&a[e * r * input..(e + 1) * r * input], &b[e * outs * r..(e + 1) * outs * r]);
            add_product(own, a, b, [outs, input, r], *scale as f32, p.turned);
        }
        Ok(out)
    }
}

/// Adds s B A to a matrix [out, in], or turned.
fn add_product(
    w: &mut [f32],
    a: &[f32],
    b: &[f32],
    [outs, input, r]: [usize; 3],
    s: f32,
    turned: bool,
) {
    let mut row = vec![0.0f32; input];
    for o in 0..outs {
        row.fill(0.0);
        for k in 0..r {
            let by = b[o * r + k];
            row.iter_mut().zip(&a[k * input..]).for_each(|(x, a)| *x += by * a);
        }
        for (i, x) in row.iter().enumerate() {
            w[if turned { i * outs + o } else { o * input + i }] += s * x;
        }
    }
}
