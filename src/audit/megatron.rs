//! Arguments of Megatron-LM as a config.json, options and what its rules ask for.

mod model;

use super::rules::{Given, Table};
use super::words::{Words, flags};
use super::{Job, States, in_range};
use crate::export::megatron::arguments;
use serde_json::Value as Json;
use shardc_cost::held::Software;
use shardc_cost::layout::{Context, Layout as Priced, Recompute, Schedule};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::{glob, nearest};
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit, Options};
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

/// The sizes of a layout.
struct Layout {
    tp: usize,
    pp: usize,
    cp: usize,
    dp: usize,
    ep: usize,
    etp: usize,
    sp: bool,
    micro: usize,
    global: usize,
    seq: usize,
    /// Layers are Megatron-LM's own, and not Transformer Engine's.
    local: bool,
}

/// Reads arguments for so many ranks.
///
/// # Errors
/// `audit` for what Megatron-LM itself refuses, for numbers that are not given, and for models of no family.
pub fn read(text: &str, place: &str, gpus: Option<usize>) -> Result<Job> {
    let mut words = flags(text, place)?;
    let of_launcher = |names: [&str; 2]| -> Option<usize> {
        names.iter().find_map(|n| words.get(*n)?.first()?.parse().ok())
    };
    let launched = of_launcher(LAUNCHER[0])
        .map(|n: usize| n.saturating_mul(of_launcher(LAUNCHER[1]).unwrap_or(1)));
    let mut not_modelled = vec![];
    let table = Table::megatron();
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
    contradictions(&a, &l, world, place)?;
    if !a.has("num-experts") {
        // It splits nothing.
        l.etp = l.tp;
    }
    if a.has("sequence-parallel") && l.tp == 1 {
        not_modelled.push(
            "--sequence-parallel: it has no effect with one rank of tp, and is switched off".into(),
        );
    }
    let (config, more) = model::config(&a, &l, place)?;
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
        given: given(&a, &l, &config),
        states: states(&a, &l),
        layout: priced(&a, &l),
        held: Software::Megatron,
        absent,
        table,
        config,
        not_modelled,
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

fn layout(a: &Args, world: usize) -> Result<Layout> {
    let one = |flag| a.size(flag, 1).max(1);
    let (tp, pp, cp) = (
        one("tensor-model-parallel-size"),
        one("pipeline-model-parallel-size"),
        one("context-parallel-size"),
    );
    let dp = (world / product([tp, pp, cp])).max(1);
    let micro = a.needed("micro-batch-size")?;
    Ok(Layout {
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
        local: a.text("transformer-impl") == Some("local"),
    })
}

/// Refuses what Megatron-LM's own validation refuses, all of it at once.
fn contradictions(a: &Args, l: &Layout, world: usize, place: &str) -> Result<()> {
    let all = of_ranks(l, world).into_iter().chain(of_model(a, l)).chain(of_flags(a, l));
    let all: Vec<String> = all.filter(|x| x.0).map(|x| x.1).collect();
    if all.is_empty() {
        return Ok(());
    }
    let d = Diag::new("audit", "Megatron-LM refuses these flags together").at(place.to_string());
    let d = all.into_iter().fold(d, Diag::why);
    Err(d.help("correct the flags, or --gpus"))
}

/// Numbers of ranks together; the largest number if they are more.
fn product(all: [usize; 3]) -> usize {
    all.into_iter().fold(1, usize::saturating_mul)
}

/// Whether a rule is violated, and the rule, with what checks it.
type Checked = (bool, String);

fn of_ranks(l: &Layout, world: usize) -> Vec<Checked> {
    let Layout { tp, pp, cp, dp, ep, etp, sp, micro, global, seq, .. } = *l;
    let (model, experts) = (product([tp, pp, cp]), product([etp, ep, pp]));
    vec![
        (
            world % model != 0,
            format!("validate_args: world size ({world}) is divisible by tp * pp * cp ({model})"),
        ),
        (
            world % experts != 0,
            format!(
                "parallel_state: world size ({world}) is divisible by etp * ep * pp ({experts})"
            ),
        ),
        (
            global > MOST as usize,
            format!("the global batch ({global}) is larger than {MOST}, which no job has"),
        ),
        (
            global % (micro * dp) != 0,
            format!(
                "num_microbatches_calculator: the global batch ({global}) is divisible by \
                 the micro batch * dp ({})",
                micro * dp
            ),
        ),
        (
            cp > 1 && seq % (2 * cp) != 0,
            format!("validate_args: seq_length ({seq}) % (context_parallel_size * 2) == 0"),
        ),
        (
            sp && seq % (tp * cp) != 0,
            format!("sequence parallelism: seq_length ({seq}) is divisible by tp * cp"),
        ),
    ]
}

fn of_model(a: &Args, l: &Layout) -> Vec<Checked> {
    let Layout { tp, pp, ep, sp, seq, .. } = *l;
    let heads = a.size("num-attention-heads", 1);
    let groups = a.size("num-query-groups", 1).max(1);
    let grouped = a.has("group-query-attention");
    let experts = a.number::<usize>("num-experts");
    let layers = a.size("num-layers", 1);
    let given = [
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "pipeline-model-parallel-layout",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
    ];
    let uneven = given.iter().any(|f| a.has(f));
    vec![
        (
            a.size("max-position-embeddings", seq) < seq,
            "validate_args: max_position_embeddings >= seq_length".into(),
        ),
        (
            heads % tp != 0,
            format!("TransformerConfig: num_attention_heads ({heads}) is a multiple of tp ({tp})"),
        ),
        (
            grouped && groups % tp != 0 && tp % groups != 0,
            format!(
                "TransformerConfig: num_query_groups ({groups}) is a multiple or a divisor of \
                 tp ({tp})"
            ),
        ),
        (
            experts.is_some_and(|n| n % ep != 0),
            format!("TransformerConfig: num_experts is divisible by ep ({ep})"),
        ),
        (experts.is_none() && ep > 1, format!("TransformerConfig: ep ({ep}) needs --num-experts")),
        (
            experts.is_some() && tp > 1 && !sp,
            "MoELayer.forward: with experts and tp > 1, training needs --sequence-parallel".into(),
        ),
        (
            pp > 1 && layers % pp != 0 && !uneven,
            format!("validate_args: num_layers ({layers}) is divisible by pp ({pp})"),
        ),
    ]
}

/// Flags that are not given together.
const APART: [[&str; 3]; 4] = [
    ["validate_args", "fp16", "bf16"],
    ["validate_args", "multi-latent-attention", "group-query-attention"],
    [
        "validate_args",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
    ],
    ["DistributedDataParallel", "calculate-per-token-loss", "ddp-average-in-collective"],
];

fn of_flags(a: &Args, l: &Layout) -> Vec<Checked> {
    let both = |[by, one, other]: [&str; 3]| {
        (a.has(one) && a.has(other), format!("{by}: --{one} and --{other} are not given together"))
    };
    let mut out: Vec<Checked> = APART.into_iter().map(both).collect();
    let sharded = a.has("use-distributed-optimizer") || a.has("use-megatron-fsdp");
    let own_norm = l.local && a.text("normalization") == Some("RMSNorm");
    out.push((
        a.has("overlap-param-gather") && !sharded,
        "validate_args: --overlap-param-gather needs --use-distributed-optimizer".into(),
    ));
    out.push((
        own_norm && l.sp,
        "WrappedTorchNorm: --transformer-impl local with RMSNorm has no --sequence-parallel".into(),
    ));
    out
}

fn options(a: &Args, l: &Layout) -> Options {
    let axes = [("pp", l.pp), ("dp_shard", l.dp), ("cp", l.cp), ("tp", l.tp)];
    let dtype = match (a.has("bf16"), a.has("fp16")) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _ => DType::F32,
    };
    Options {
        mesh: axes.into_iter().filter(|x| x.1 > 1).map(|(n, s)| (n.into(), s)).collect(),
        global_batch: l.global,
        microbatch: l.micro,
        seq: l.seq,
        dtype,
        sp: l.sp,
        ep: l.ep,
        etp: (l.ep > 1 || l.etp != l.tp).then_some(l.etp),
        cp_mode: match a.text("cp-comm-type") {
            Some("all_gather") => CpMode::AllGather,
            Some("a2a") => CpMode::Ulysses,
            _ => CpMode::Ring,
        },
        cp_split: (l.cp > 1).then_some(CpSplit::Zigzag),
        mtp: if a.size("mtp-num-layers", 0) > 0 {
            a.number("mtp-loss-scaling-factor").unwrap_or(0.1)
        } else {
            0.0
        },
        ..Options::default()
    }
}

fn given(a: &Args, l: &Layout, config: &Json) -> Given {
    let edp = (l.tp * l.cp * l.dp / (l.ep * l.etp)).max(1);
    let tokens = l.micro * l.seq / l.cp;
    let micros = l.global / (l.micro * l.dp);
    let sizes = [
        ("tp", l.tp),
        ("pp", l.pp),
        ("cp", l.cp),
        ("dp", l.dp),
        ("ep", l.ep),
        ("etp", l.etp),
        ("edp", edp),
        ("tokens", tokens),
        ("m", micros),
    ];
    let mut g = Given::default();
    g.sizes.extend(sizes.map(|(name, n)| (name.to_string(), n as f64)));
    let facts = [
        ("sp", l.sp),
        ("local", l.local),
        // Its projection of queries, keys and values is cut further than its groups.
        ("few-groups", a.has("group-query-attention") && a.size("num-query-groups", 1) < l.tp),
        ("per-token", a.has("calculate-per-token-loss")),
        ("average-in-collective", a.has("ddp-average-in-collective")),
        ("tied", config["tie_word_embeddings"] == true),
        ("further", a.size("mtp-num-layers", 0) > 0),
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

/// The layout as prices see it.
fn priced(a: &Args, l: &Layout) -> Priced {
    let states = states(a, l);
    let stages = match a.number::<usize>("num-layers-per-virtual-pipeline-stage") {
        Some(n) => a.size("num-layers", 1) / l.pp / n.max(1),
        None => a.size("num-virtual-stages-per-pipeline-rank", 1),
    };
    let chunks = if l.pp > 1 { stages.max(1) } else { 1 };
    Priced {
        tp: l.tp,
        cp: l.cp,
        // Megatron-LM deals tokens in zigzag whatever is exchanged.
        context: match a.text("cp-comm-type") {
            Some("all_gather") => Context::Gathered,
            Some("a2a") => Context::Heads,
            _ring => Context::Ring,
        },
        even: true,
        dp: l.dp,
        pp: l.pp,
        chunks,
        ep: l.ep,
        etp: l.etp,
        shards: (l.dp / states.instances).max(1),
        zero: states.zero,
        sp: l.sp,
        recompute: match a.text("recompute-granularity") {
            Some("full") => Recompute::Full,
            Some(_) => Recompute::Selective,
            None => Recompute::None,
        },
        schedule: if chunks > 1 { Schedule::Interleaved } else { Schedule::OneFOneB },
        microbatch: l.micro,
        microbatches: l.global / (l.micro * l.dp),
    }
}

/// How states of the optimizer are shared out, and what is sent.
fn states(a: &Args, l: &Layout) -> States {
    let fsdp = a.has("use-megatron-fsdp");
    let strategy = a.text("data-parallel-sharding-strategy").unwrap_or("no_shard");
    let instances = a.size("num-distributed-optimizer-instances", 1).max(1);
    let zero = match (fsdp, strategy) {
        (true, "optim_grads_params") => 3,
        (true, "optim_grads") => 2,
        _ => u8::from(a.has("use-distributed-optimizer")),
    };
    let half = a.has("bf16") || a.has("fp16");
    let adam = matches!(a.text("optimizer").unwrap_or("adam"), "adam");
    States {
        zero,
        instances,
        // An f32 copy where weights are not f32, and AdamW's two moments.
        bytes: if half { 4 } else { 0 } + if adam { 8 } else { 0 },
        weight: if half { 2 } else { 4 },
        gradient: if half && a.has("grad-reduce-in-bf16") { 2 } else { 4 },
        data: l.dp * l.cp,
    }
}
