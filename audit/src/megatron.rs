//! Arguments of Megatron-LM as a config.json, options and what its rules ask for.

mod model;
mod refuses;

use super::rules::{Given, Table};
use super::sizes::JobSizes;
use super::words::{Words, flags};
use super::{Job, States, in_range};
use shardc_cost::held::Software;
use shardc_cost::layout::{Context, Layout, Recompute, Schedule};
use shardc_export::megatron::arguments;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::{glob, nearest};
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit, Options};
use std::collections::BTreeSet;
use std::str::FromStr;

/// Flags that a launcher has, and its number of processes.
const LAUNCHER: [[&str; 2]; 2] =
    [["--nproc_per_node", "--nproc-per-node"], ["--nnodes", "--nnodes"]];

/// Largest number that is read.
const MOST: i64 = 1 << 24;

/// Arguments, of which each was looked up in the table of all.
struct Args<'a> {
    words: &'a Words,
}

impl Args<'_> {
    fn has(&self, flag: &str) -> bool {
        debug_assert!(arguments::find(&format!("--{flag}")).is_some(), "no flag {flag}");
        self.words.contains_key(&format!("--{flag}"))
    }

    fn text(&self, flag: &str) -> Option<&str> {
        debug_assert!(arguments::find(&format!("--{flag}")).is_some(), "no flag {flag}");
        self.words.get(&format!("--{flag}"))?.first().map(String::as_str)
    }

    /// A number, which was looked at before.
    fn number<T: FromStr>(&self, flag: &str) -> Option<T> {
        self.text(flag)?.parse().ok()
    }

    fn size(&self, flag: &str, absent: usize) -> usize {
        self.number(flag).unwrap_or(absent)
    }

    /// A number without which nothing can be said.
    fn needed(&self, flag: &str) -> Result<usize> {
        self.number(flag).filter(|n| *n > 0).ok_or_else(|| {
            Diag::new("audit", format!("--{flag} is not given"))
                .rule("sizes of the model, of the batch and of the layout are given")
                .help(format!("add --{flag} N"))
        })
    }
}

/// Reads arguments for so many ranks, for a version of Megatron Core.
///
/// # Errors
/// `audit` for what Megatron-LM itself refuses, for numbers that are not given, and for models of no family; `flag` for a
/// version without rules.
pub fn read(text: &str, place: &str, gpus: Option<usize>, at: Option<&str>) -> Result<Job> {
    let mut words = flags(text, place)?;
    let of_launcher = |names: [&str; 2]| -> Option<usize> {
        names.iter().find_map(|n| words.get(*n)?.first()?.parse().ok())
    };
    let launched = of_launcher(LAUNCHER[0])
        .map(|n: usize| n.saturating_mul(of_launcher(LAUNCHER[1]).unwrap_or(1)));
    let mut not_modelled = vec![];
    let table = Table::megatron();
    let at = at.map(|v| table.at(v)).transpose()?;
    let pair = |(flag, values): (&String, &Vec<String>)| match values.first() {
        Some(v) => vec![flag.clone(), format!("{flag}={v}")],
        None => vec![flag.clone()],
    };
    let flags: BTreeSet<String> = words.iter().flat_map(pair).collect();
    let outside = |f: &&String| table.outside.iter().any(|g| glob(g, f));
    if let Some(flag) = words.keys().find(outside) {
        return Err(Diag::new("audit", format!("{flag} is not audited"))
            .at(place.to_string())
            .rule("what is said of other models and layouts would not hold with it")
            .help("leave it out, and audit the rest"));
    }
    words.retain(|flag, values| kept(flag, values, &table, &mut not_modelled));
    check_values(&words, place)?;
    let a = Args { words: &words };
    let world = gpus.or(launched).ok_or_else(|| {
        Diag::new("audit", "the number of ranks is not given")
            .at(place.to_string())
            .help("give --gpus N, or --nproc_per_node and --nnodes of the launcher")
    })?;
    in_range(world, place)?;
    let mut l = layout(&a, world)?;
    let mut given = given(&a, &l);
    given.flags = flags;
    table.refuses(&given, at.as_deref(), (refuses::all(&a, &l, world), "--gpus"), place)?;
    if !a.has("num-experts") {
        // It splits nothing.
        l.etp = l.tp;
        let again = self::given(&a, &l);
        (given.sizes, given.facts) = (again.sizes, again.facts);
    }
    if a.has("sequence-parallel") && l.tp == 1 {
        not_modelled.push(
            "--sequence-parallel: it has no effect with one rank of tp, and is switched off".into(),
        );
    }
    let (config, more) = model::config(&a, &l, place)?;
    if a.text("optimizer").is_some_and(|o| !["adam", "sgd"].contains(&o)) {
        not_modelled.push("--optimizer: states of this one are counted as one moment".into());
    }
    let mut absent = vec![];
    absent.extend((!a.has("moe-router-enable-expert-bias")).then_some("choice-bias"));
    if config["model_type"] == "gpt_oss" && l.etp > 1 {
        absent.push("expert-row-bias");
        not_modelled.push("biases behind the second product of experts that etp splits".into());
    }
    not_modelled.extend(more);
    Ok(Job {
        software: "Megatron-LM",
        options: options(&a, &l),
        given,
        states: states(&a, &l),
        layout: priced(&a, &l),
        held: Software::Megatron,
        absent,
        table,
        at,
        config,
        not_modelled,
        parts: None,
    })
}

/// Whether a flag is one that something is made of; the others are listed, if they may matter.
fn kept(flag: &str, values: &[String], table: &Table, not_modelled: &mut Vec<String>) -> bool {
    if LAUNCHER.iter().flatten().any(|f| *f == flag) {
        return false;
    }
    let idle = |globs: &[String]| globs.iter().any(|g| glob(g, flag));
    let shown = [&[flag.to_string()], values].concat().join(" ");
    let shown: String = shown.chars().take(80).collect();
    if arguments::find(flag).is_none() {
        // A launcher's words have underscores, and are not its.
        if !flag.contains('_') || flag.contains("opt_param") {
            let near = nearest(flag, arguments::names(), 1);
            let near = near.first().map_or(String::new(), |n| format!(" (nearest: {n})"));
            not_modelled.push(format!(
                "{shown}: no argument of Megatron-LM at {}{near}",
                &arguments::commit()[..8]
            ));
        }
        return false;
    }
    if idle(&table.idle) {
        return false;
    }
    if !idle(&table.read) {
        not_modelled.push(format!("{shown}: not modelled"));
        return false;
    }
    true
}

/// Checks values by the table of arguments.
fn check_values(words: &Words, place: &str) -> Result<()> {
    for (flag, values) in words {
        let Some(a) = arguments::find(flag) else { continue };
        let given = values.join(" ");
        let wrong = |why: String| {
            let shown: String = format!("{flag} {given}").chars().take(80).collect();
            Err(Diag::new("audit", format!("`{shown}`: {why}")).at(place.to_string()))
        };
        if a.takes().is_some_and(|n| n != values.len() as u64) {
            let n = a.takes().unwrap_or_default();
            return wrong(format!(
                "{} wanted",
                shardc_ir::diag::count(n as usize, "value is", "values are")
            ))
            .map_err(|d: Diag| d.help("see --help of its pretrain_gpt.py"));
        }
        for v in values {
            let far = a.kind == "int" && v.parse::<i64>().is_ok_and(|n| !(0..=MOST).contains(&n));
            let far = far.then(|| format!("a number from 0 to {MOST} is wanted"));
            if let Some(why) = a.misfit(v).or(far) {
                let help = match v.contains('$') {
                    true => format!("write the value of {v}: no script is executed"),
                    false => "see --help of its pretrain_gpt.py".into(),
                };
                return wrong(why).map_err(|d: Diag| d.help(help));
            }
        }
    }
    Ok(())
}

fn layout(a: &Args, world: usize) -> Result<JobSizes> {
    let one = |flag| a.size(flag, 1).max(1);
    let (tp, pp, cp) = (
        one("tensor-model-parallel-size"),
        one("pipeline-model-parallel-size"),
        one("context-parallel-size"),
    );
    let dp = (world / product([tp, pp, cp])).max(1);
    let micro = a.needed("micro-batch-size")?;
    Ok(JobSizes {
        tp,
        pp,
        cp,
        dp,
        ep: one("expert-model-parallel-size"),
        etp: a.size("expert-tensor-parallel-size", tp).max(1),
        sp: a.has("sequence-parallel") && tp > 1,
        micro,
        global: a.size("global-batch-size", micro * dp),
        seq: a.needed("seq-length")?,
    })
}

/// Numbers of ranks together; the largest number if they are more.
fn product(all: [usize; 3]) -> usize {
    all.into_iter().fold(1, usize::saturating_mul)
}

fn options(a: &Args, l: &JobSizes) -> Options {
    let dtype = match (a.has("bf16"), a.has("fp16")) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _ => DType::F32,
    };
    let mode = match a.text("cp-comm-type") {
        Some("all_gather") => CpMode::AllGather,
        Some("a2a") => CpMode::Ulysses,
        _ => CpMode::Ring,
    };
    let mtp = match a.size("mtp-num-layers", 0) {
        0 => 0.0,
        _ => a.number("mtp-loss-scaling-factor").unwrap_or(0.1),
    };
    Options { mtp, ..l.options(1, dtype, (mode, Some(CpSplit::Zigzag))) }
}

fn given(a: &Args, l: &JobSizes) -> Given {
    let mut g = l.given();
    let facts = [
        ("local", a.text("transformer-impl") == Some("local")),
        // Its projection of queries, keys and values is cut further than its groups.
        ("few-groups", a.has("group-query-attention") && a.size("num-query-groups", 1) < l.tp),
        ("per-token", a.has("calculate-per-token-loss")),
        ("average-in-collective", a.has("ddp-average-in-collective")),
        ("tied", !a.has("untie-embeddings-and-output-weights")),
        ("further", a.size("mtp-num-layers", 0) > 0),
        ("virtual", refuses::virtual_stages(a, l) > 1),
        ("softmax-type", a.text("softmax-type").is_some_and(|t| t != "vanilla")),
        ("router-loss", balanced(a)),
    ];
    g.facts.extend(facts.iter().filter(|f| f.1).map(|f| f.0.to_string()));
    g
}

/// Whether routers have a loss.
fn balanced(a: &Args) -> bool {
    let aux =
        a.words.get("--moe-aux-loss-coeff").is_some_and(|v| v.iter().any(|x| x.parse() != Ok(0.0)));
    let aux =
        aux && a.text("moe-router-load-balancing-type").is_none_or(|t| t.contains("aux_loss"));
    a.has("num-experts") && (aux || a.number("moe-z-loss-coeff").is_some_and(|z: f64| z != 0.0))
}

/// The layout as prices see it. Megatron-LM deals tokens in zigzag whatever is exchanged.
fn priced(a: &Args, l: &JobSizes) -> Layout {
    let states = states(a, l);
    let chunks = if l.pp > 1 { refuses::virtual_stages(a, l) } else { 1 };
    let context = match a.text("cp-comm-type") {
        Some("all_gather") => Context::Gathered,
        Some("a2a") => Context::Heads,
        _ring => Context::Ring,
    };
    Layout {
        chunks,
        recompute: match a.text("recompute-granularity") {
            Some("full") => Recompute::Full,
            Some(_) => Recompute::Selective,
            None if a.has("recompute-activations") => Recompute::Selective,
            None => Recompute::None,
        },
        schedule: if chunks > 1 { Schedule::Interleaved } else { Schedule::OneFOneB },
        ..l.priced((l.dp / states.instances).max(1), states.zero, context)
    }
}

/// How states of the optimizer are shared out, and what is sent.
fn states(a: &Args, l: &JobSizes) -> States {
    let fsdp = a.has("use-megatron-fsdp");
    let strategy = a.text("data-parallel-sharding-strategy").unwrap_or("no_shard");
    let instances = a.size("num-distributed-optimizer-instances", 1).max(1);
    let zero = match (fsdp, strategy) {
        (true, "optim_grads_params") => 3,
        (true, "optim_grads") => 2,
        (true, "no_shard") => 0,
        (true, _) => 1,
        _ => u8::from(a.has("use-distributed-optimizer")),
    };
    let half = a.has("bf16") || a.has("fp16");
    // Types of states are asked of one optimizer only.
    let precise = a.has("use-precision-aware-optimizer");
    let of = |flag| a.text(flag).filter(|_| precise).map_or(4, width);
    let moments = match a.text("optimizer").unwrap_or("adam") {
        "adam" => of("exp-avg-dtype") + of("exp-avg-sq-dtype"),
        "sgd" if a.number("sgd-momentum") == Some(0.0) => 0,
        _one => 4,
    };
    // bf16 is summed in f32 unless it is told otherwise, and f16 as it is.
    let whole = a.has("accumulate-allreduce-grads-in-fp32")
        || a.has("bf16") && !precise_in_half(a, precise) && !a.has("grad-reduce-in-bf16");
    States {
        zero,
        instances,
        // An f32 copy where weights are not f32, and moments.
        bytes: if half { of("main-params-dtype") } else { 0 } + moments,
        weight: if half { 2 } else { 4 },
        gradient: if half && !whole { 2 } else { 4 },
        data: l.dp * l.cp,
    }
}

/// Whether gradients are kept in two bytes.
fn precise_in_half(a: &Args, precise: bool) -> bool {
    precise && a.text("main-grads-dtype").is_some_and(|t| width(t) == 2)
}

/// Bytes of an element of a type, by its name.
fn width(name: &str) -> usize {
    match name {
        "fp8" => 1,
        "bf16" | "fp16" => 2,
        _other => 4,
    }
}
