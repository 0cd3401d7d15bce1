//! Configurations of torchtitan and DeepSpeed: ranks and batches in TOML or JSON, the model in a folder.

use super::rules::{Given, Table};
use super::{Job, States, in_range};
use serde_json::Value as Json;
use shardc_cost::held::Software;
use shardc_cost::layout::{Context, Layout, Recompute, Schedule};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit, Options};
use std::path::Path;

/// Largest config.json that is read, in bytes.
const MAX: u64 = 16 << 20;

/// Larger numbers are taken as this one, which no job has.
const MOST: u64 = 1 << 24;

/// The numbers of a configuration.
struct Ranks {
    pp: usize,
    replicas: usize,
    shards: usize,
    cp: usize,
    tp: usize,
    ep: usize,
    sp: bool,
    micro: usize,
    global: usize,
    seq: usize,
    zero: u8,
    dtype: DType,
}

/// A configuration, by dotted names of its numbers and words.
struct Config<'a> {
    json: &'a Json,
    place: &'a str,
}

impl Config<'_> {
    fn get(&self, name: &str) -> Option<&Json> {
        name.split('.').try_fold(self.json, |at, key| at.get(key))
    }

    /// A number that is counted with; none if it is not there or not above 0.
    fn count(&self, name: &str) -> Option<usize> {
        self.get(name).and_then(Json::as_u64).filter(|n| *n > 0).map(|n| n.min(MOST) as usize)
    }

    fn is(&self, name: &str) -> Option<bool> {
        self.get(name).and_then(Json::as_bool)
    }

    /// Values that are no number above 0, but for `idle`, which says that there is none.
    fn misfits(&self, names: &[&str], idle: i64) -> Vec<String> {
        let of = |name: &&str| {
            let v = self.get(name)?;
            let fits = v.is_null() || v.as_i64().is_some_and(|n| n > 0 || n == idle);
            (!fits).then(|| wanted(name, v, "a whole number above 0"))
        };
        names.iter().filter_map(of).collect()
    }

    /// Values that are no switch.
    fn no_switches(&self, names: &[&str]) -> Vec<String> {
        let of = |name: &&str| {
            let v = self.get(name)?;
            let fits = v.is_null() || v.is_boolean();
            (!fits).then(|| wanted(name, v, "true or false"))
        };
        names.iter().filter_map(of).collect()
    }

    fn refused(&self, why: Vec<String>, software: &str) -> Result<()> {
        if why.is_empty() {
            return Ok(());
        }
        let d = Diag::new("audit", format!("{software} refuses this configuration"))
            .at(self.place.to_string());
        Err(why.into_iter().fold(d, Diag::why).help("correct the numbers, or --gpus"))
    }

    /// Keys of some sections, or of the top (``), that nothing is made of.
    fn unread(&self, sections: &[&str], known: &[&str]) -> Vec<String> {
        let mut out = vec![];
        for section in sections {
            let top = section.is_empty();
            let of = if top { Some(self.json) } else { self.get(section) };
            for (key, value) in of.and_then(Json::as_object).into_iter().flatten() {
                let name = if top { key.clone() } else { format!("{section}.{key}") };
                let idle = value.is_null() || *value == Json::Bool(false) || *value == "";
                if !idle && !known.contains(&name.as_str()) {
                    let text: String = format!("{name} = {value}").chars().take(80).collect();
                    out.push(format!("{text}: not modelled"));
                }
            }
        }
        out
    }
}

/// What is wanted in the place of a value, in words.
fn wanted(name: &str, value: &Json, what: &str) -> String {
    let text: String = format!("{name} = {value}").chars().take(80).collect();
    let auto = if *value == "auto" { ": write the one that the trainer puts there" } else { "" };
    format!("{text}: {what} is wanted{auto}")
}

/// A text as JSON or as TOML.
fn parsed(text: &str, place: &str) -> Result<Json> {
    let json = match text.trim_start().starts_with('{') {
        true => serde_json::from_str(text).map_err(|e| e.to_string()),
        false => toml::from_str(text).map_err(|e| e.message().to_string()),
    };
    json.map_err(|e| {
        Diag::new("audit", format!("neither JSON nor TOML: {e}"))
            .at(place.to_string())
            .rule("a configuration is a text of numbers and words; no program is executed")
            .help("docs/audit.md has the lines of Python that write one")
    })
}

/// The config.json of a folder, or of its path.
fn model(path: Option<&Path>) -> Result<Json> {
    let path = path.ok_or_else(|| {
        Diag::new("audit", "the model is not given")
            .rule("this software's configuration does not have the sizes of its model")
            .help("give --model FOLDER, with the model's config.json")
    })?;
    let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let text = files::read_text(&file, MAX)?;
    serde_json::from_str(&text).map_err(|e| {
        Diag::new("config", e.to_string())
            .at(file.display().to_string())
            .help("give the config.json of a model")
    })
}

/// Keys of torchtitan of which something is made.
const TITAN: [&str; 16] = [
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.enable_sequence_parallel",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
    "training.max_context_length",
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.num_tokens_per_train_step",
    "training.max_norm",
    "training.steps",
];

/// A configuration of torchtitan.
///
/// # Errors
/// `audit` for what it refuses itself, and for numbers that are not given.
pub fn torchtitan(text: &str, place: &str, gpus: Option<usize>, at: Option<&Path>) -> Result<Job> {
    let json = parsed(text, place)?;
    let c = Config { json: &json, place };
    let of = |key: &str| c.count(&format!("parallelism.{key}")).unwrap_or(1);
    let (pp, cp, tp) = (
        of("pipeline_parallel_degree"),
        of("context_parallel_degree"),
        of("tensor_parallel_degree"),
    );
    let (replicas, ep) = (of("data_parallel_replicate_degree"), of("expert_parallel_degree"));
    let world = needed(gpus, place)?;
    let others = [pp, cp, tp, replicas].into_iter().fold(1, usize::saturating_mul);
    let rest = (world / others).max(1);
    let shards = c.count("parallelism.data_parallel_shard_degree").unwrap_or(rest);
    let product = others.saturating_mul(shards);
    let config = model(at)?;
    let mut why = c.misfits(&TITAN_NUMBERS, -1);
    if pp > 1 && tied(&config) {
        why.push("Decoder: weight tying is not supported with pipeline stages".into());
    }
    if product != world {
        why.push(format!("ParallelDims: dp_replicate * dp_shard * cp * tp * pp ({product}) == world size ({world})"));
    }
    let sharing = [shards, cp, tp].into_iter().fold(1, usize::saturating_mul);
    if sharing % ep != 0 {
        why.push(format!("ParallelDims: dp_shard * cp * tp ({sharing}) is divisible by ep ({ep})"));
    }
    c.refused(why, "torchtitan")?;
    let seq =
        c.count("training.seq_len").or(c.count("training.max_context_length")).unwrap_or(2048);
    let rows = |name: &str| c.count(name).map(|tokens| (tokens / seq).max(1));
    let micro = c.count("training.local_batch_size");
    let micro = micro.or(rows("training.num_tokens_per_microbatch_per_dp_rank")).unwrap_or(8);
    let global =
        c.count("training.global_batch_size").or(rows("training.num_tokens_per_train_step"));
    let dp = replicas * shards;
    let sp = tp > 1 && c.is("parallelism.enable_sequence_parallel") != Some(false);
    let global = global.unwrap_or(micro * dp);
    let (zero, dtype) = (3, DType::BF16);
    let r = Ranks { pp, replicas, shards, cp, tp, ep, sp, micro, global, seq, zero, dtype };
    let unread = c.unread(&["parallelism", "training"], &TITAN);
    job("torchtitan", Table::torchtitan(), &r, config, unread, place)
}

/// Whether a config.json says that the embedding is the output projection, too.
fn tied(config: &Json) -> bool {
    let of = |c: &Json| c["tie_word_embeddings"] == true;
    of(config) || of(&config["text_config"])
}

/// Those of torchtitan that are numbers; -1 stands for what is left.
const TITAN_NUMBERS: [&str; 12] = [
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
    "training.max_context_length",
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.num_tokens_per_train_step",
];

/// Keys of DeepSpeed of which something is made, and its sections.
const DEEPSPEED: [&str; 14] = [
    "tensor_parallel",
    "tensor_parallel.autotp_size",
    "zero_optimization",
    "zero_optimization.stage",
    "bf16",
    "bf16.enabled",
    "bfloat16",
    "bfloat16.enabled",
    "fp16",
    "fp16.enabled",
    "sequence_parallel_size",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
];

/// Values of DeepSpeed that are of another kind than is wanted, or that it refuses together.
fn of_deepspeed(c: &Config, tp: usize) -> Vec<String> {
    let numbers = [
        "sequence_parallel_size",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ];
    let mut why = c.misfits(&numbers, 1);
    why.extend(c.misfits(&["tensor_parallel.autotp_size"], 0));
    why.extend(c.no_switches(&["bf16.enabled", "bfloat16.enabled", "fp16.enabled"]));
    for (key, value) in c.json.as_object().into_iter().flatten() {
        let of = |k: &&str| k.split_once('.').is_some_and(|(section, _)| section == key);
        if DEEPSPEED.iter().any(of) && !value.is_null() && !value.is_object() {
            why.push(wanted(key, value, "a section in braces"));
        }
    }
    let stage = c.get("zero_optimization.stage").filter(|v| !v.is_null());
    why.extend(
        stage
            .filter(|v| v.as_u64().is_none_or(|n| n > 3))
            .map(|v| wanted("zero_optimization.stage", v, "a number from 0 to 3")),
    );
    if tp > 1 && stage.is_some_and(|v| *v == 3) {
        why.push(
            "_configure_tensor_parallel_states: autotp_size > 1 has ZeRO of stages 0 to 2".into(),
        );
    }
    let halves = ["bf16.enabled", "bfloat16.enabled"].iter().any(|k| c.is(k) == Some(true));
    if c.is("fp16.enabled") == Some(true) && halves {
        why.push("fp16 and bf16 are not both enabled".into());
    }
    why
}

/// A configuration of DeepSpeed.
///
/// # Errors
/// As for [`torchtitan`].
pub fn deepspeed(text: &str, place: &str, gpus: Option<usize>, at: Option<&Path>) -> Result<Job> {
    let json = parsed(text, place)?;
    let c = Config { json: &json, place };
    let world = needed(gpus, place)?;
    let tp = c.count("tensor_parallel.autotp_size").unwrap_or(1);
    let cp = c.count("sequence_parallel_size").unwrap_or(1);
    let dp = world / tp.saturating_mul(cp).max(1);
    let [global, micro, steps] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
            .map(|k| c.count(k));
    let mut why = of_deepspeed(&c, tp);
    if dp == 0 || world % (tp * cp) != 0 {
        why.push(format!("the number of ranks ({world}) is divisible by autotp_size * sequence_parallel_size ({})", tp * cp));
    }
    let batch = |m: usize, s: usize| m.saturating_mul(s).saturating_mul(dp);
    if let (Some(g), Some(m), Some(s)) = (global, micro, steps)
        && g != batch(m, s)
    {
        why.push(format!(
            "_batch_assertion: train_batch_size ({g}) == micro batch * accumulation steps * dp ({})",
            batch(m, s)
        ));
    }
    c.refused(why, "DeepSpeed")?;
    let micro = micro.or(global.map(|g| (g / dp / steps.unwrap_or(1)).max(1))).unwrap_or(1);
    let global = global.unwrap_or(batch(micro, steps.unwrap_or(1)));
    let config = model(at)?;
    let seq = config["max_position_embeddings"].as_u64().unwrap_or(4096).min(4096) as usize;
    let zero = c.count("zero_optimization.stage").unwrap_or(0).min(3) as u8;
    let is = |keys: &[&str]| keys.iter().any(|k| c.is(k) == Some(true));
    let dtype = match (is(&["bf16.enabled", "bfloat16.enabled"]), is(&["fp16.enabled"])) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _neither => DType::F32,
    };
    let r = Ranks {
        pp: 1,
        replicas: 1,
        shards: dp,
        cp,
        tp,
        ep: 1,
        sp: false,
        micro,
        global,
        seq,
        zero,
        dtype,
    };
    let sections = ["", "zero_optimization", "tensor_parallel", "bf16", "bfloat16", "fp16"];
    let unread = c.unread(&sections, &DEEPSPEED);
    job("DeepSpeed", Table::deepspeed(), &r, config, unread, place)
}

fn needed(gpus: Option<usize>, place: &str) -> Result<usize> {
    let ranks = gpus.ok_or_else(|| {
        Diag::new("audit", "the number of ranks is not given")
            .at(place.to_string())
            .help("give --gpus N")
    })?;
    in_range(ranks, place)?;
    Ok(ranks)
}

fn job(
    software: &'static str,
    table: Table,
    r: &Ranks,
    config: Json,
    not_modelled: Vec<String>,
    place: &str,
) -> Result<Job> {
    let dp = r.replicas * r.shards;
    if r.global as u64 > MOST {
        return Err(Diag::new("audit", format!("a global batch of {}", r.global))
            .at(place.to_string())
            .rule(format!("it is at most {MOST}"))
            .help("correct the batches"));
    }
    if r.global % (r.micro * dp) != 0 {
        return Err(Diag::new(
            "audit",
            format!(
                "the global batch ({}) is no multiple of microbatch * dp ({})",
                r.global,
                r.micro * dp
            ),
        )
        .at(place.to_string())
        .help("correct the batches, or --gpus"));
    }
    let etp = if r.ep > 1 { 1 } else { r.tp };
    let axes = [
        ("pp", r.pp),
        ("dp_replicate", r.replicas),
        ("dp_shard", r.shards),
        ("cp", r.cp),
        ("tp", r.tp),
    ];
    let options = Options {
        mesh: axes.into_iter().filter(|a| a.1 > 1).map(|(n, s)| (n.into(), s)).collect(),
        global_batch: r.global,
        microbatch: r.micro,
        seq: r.seq,
        dtype: r.dtype,
        sp: r.sp,
        ep: r.ep,
        etp: (r.ep > 1).then_some(etp),
        cp_mode: if software == "DeepSpeed" { CpMode::Ulysses } else { CpMode::AllGather },
        cp_split: (r.cp > 1 && software != "DeepSpeed").then_some(CpSplit::Zigzag),
        ..Options::default()
    };
    let m = r.global / (r.micro * dp);
    let edp = (r.tp * r.cp * dp / (r.ep * etp)).max(1);
    let sizes = [
        ("tp", r.tp),
        ("pp", r.pp),
        ("cp", r.cp),
        ("dp", dp),
        ("ep", r.ep),
        ("etp", etp),
        ("edp", edp),
        ("tokens", r.micro * r.seq / r.cp),
        ("m", m),
    ];
    let mut given = Given::default();
    given.sizes.extend(sizes.map(|(name, n)| (name.to_string(), n as f64)));
    given.facts.extend(r.sp.then(|| "sp".to_string()));
    let layout = Layout {
        tp: r.tp,
        cp: r.cp,
        // As torchtitan rotates and balances unless it is told otherwise.
        context: Context::Gathered,
        even: true,
        dp,
        pp: r.pp,
        chunks: 1,
        ep: r.ep,
        etp,
        shards: r.shards,
        zero: r.zero,
        sp: r.sp,
        recompute: Recompute::None,
        schedule: Schedule::OneFOneB,
        microbatch: r.micro,
        microbatches: m,
    };
    let (weight, bytes) = if r.dtype != DType::F32 && r.zero < 3 { (2, 12) } else { (4, 8) };
    let states =
        States { zero: r.zero, instances: r.replicas, bytes, weight, gradient: 4, data: dp * r.cp };
    Ok(Job {
        software,
        config,
        options,
        given,
        states,
        layout,
        held: Software::Torchtitan,
        absent: vec![],
        table,
        not_modelled,
    })
}
