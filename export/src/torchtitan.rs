//! A Python module for torchtitan: a function that gives a config of it this plan's layout.

use super::{Export, File};
use shardc_ir::diag::Result;
use shardc_ir::plan::TokenOrder;
use shardc_ir::schedule::write_csv;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::CpMode;
use shardc_passes::zero::Accumulate;

/// Schedules that it makes itself, by our names.
const SCHEDULES: [(&str, &str); 6] = [
    ("1f1b", "1F1B"),
    ("gpipe", "GPipe"),
    ("interleaved", "Interleaved1F1B"),
    ("looped-bfs", "LoopedBFS"),
    ("zb-v", "ZBVZeroBubble"),
    ("dualpipe-v", "DualPipeV"),
];

/// `shardc_plan.py`, and the schedule if torchtitan has none of its name.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    e.trains();
    let f = e.facts()?;
    let o = e.o;
    let [tp, cp, pp, replicas, shards] = e.axes();
    let named = SCHEDULES.into_iter().find(|s| Some(s.0) == e.schedule());
    let stages = e.stages();
    e.lack(o.zero == 0 && shards > 1, "data parallelism over dp_shard without sharded weights");
    e.lack(
        cp > 1 && o.zero != 3,
        "weights that are not sharded over cp: it shards them over cp too",
    );
    e.lack(cp > 1 && o.cp_mode != CpMode::AllGather, "a choice of --cp-mode");
    e.lack(
        o.etp() > 1 && f.experts.is_some() && tp > 1,
        "experts split over tp: it supports only etp=1",
    );
    let mut args: Vec<(String, String)> = vec![];
    let mut put = |name: &str, value: String| args.push((name.into(), value));
    put("data_parallel_replicate_degree", replicas.to_string());
    put("data_parallel_shard_degree", shards.to_string());
    put("tensor_parallel_degree", tp.to_string());
    put("enable_sequence_parallel", python(o.sp).into());
    put("context_parallel_degree", cp.to_string());
    let zigzag = matches!(o.tokens(), TokenOrder::Zigzag { .. });
    put("context_parallel_load_balancer", if zigzag { "\"headtail\"" } else { "None" }.into());
    put("expert_parallel_degree", o.ep.to_string());
    let whole = o.zero_accumulate == Accumulate::Both || !o.reshard_after_forward;
    let policy = if whole { "never" } else { "always" };
    put("fsdp_reshard_after_forward", format!("\"{policy}\""));
    put("pipeline_parallel_degree", pp.to_string());
    let mut files = vec![];
    if pp > 1 {
        if o.zero >= 2 && o.zero_accumulate == Accumulate::None && o.microbatches() > 1 {
            e.notes.push(
                "plan: gradients are reduced for each microbatch; pipelines of PyTorch keep them whole and reduce them \
                 once, which needs more memory (shardc compile --zero-accumulate gradients says how much)"
                    .into(),
            );
        }
        match named {
            Some((_, theirs)) => put("pipeline_parallel_schedule", format!("\"{theirs}\"")),
            None => {
                put("pipeline_parallel_schedule", "\"PipelineScheduleMulti\"".into());
                put(
                    "pipeline_parallel_schedule_csv",
                    "os.path.join(HERE, \"schedule.csv\")".into(),
                );
                files.push(File::new("schedule.csv", write_csv(&e.s.plan.schedule)));
            }
        }
        put("module_fqns_per_model_part", modules(&stages));
    }
    let list = |all: &[(String, String)]| -> String {
        all.iter().map(|(n, v)| format!("        {n}={v},\n")).collect()
    };
    let training = training(e);
    let (again, import) = match &o.recompute {
        Recompute::Full => (
            "FullAC.Config()",
            "    from torchtitan.distributed.activation_checkpoint import FullAC\n\n",
        ),
        Recompute::None => ("None", ""),
        // What torch.compile's min-cut recomputes is near it.
        _ => (
            "None",
            "    # The plan makes again what costs least, as torch.compile does: without compile.enable,\n    \
             # more is saved than the plan says (shardc compile --recompute none says how much).\n    \
             config.compile.enable = True\n",
        ),
    };
    // The newest commit says how many microbatches a pipeline has, release 0.3.0 how many sequences each of them has.
    let counted = match pp {
        1 => String::new(),
        _ => format!(
            "    known = ParallelismConfig.__dataclass_fields__\n    counted = {{\"num_pp_microbatches\": {}}}\n    \
             if \"num_pp_microbatches\" not in known:\n        \
             counted = {{\"pipeline_parallel_microbatch_size\": {}}}\n",
            o.microbatches(),
            o.microbatch
        ),
    };
    let more = if pp > 1 { "        **counted,\n" } else { "" };
    let text = format!(
        "\"\"\"The layout of a plan of shardc, for torchtitan (b5bcd76c, or release 0.3.0): `config = \
         with_plan(config)`.\n\nModel, data and optimizer are the config's.\n\"\"\"\n\nimport os\n\n\
         from torchtitan.config.configs import ParallelismConfig\n\n\
         HERE = os.path.dirname(os.path.abspath(__file__))\n\n\ndef parallelism():\n{counted}    \
         return ParallelismConfig(\n{}{more}    )\n\n\n\
         def with_plan(config):\n{import}    config.parallelism = parallelism()\n{training}    \
         config.activation_checkpoint = {again}\n    return config\n",
        list(&args)
    );
    files.insert(0, File::new("shardc_plan.py", text));
    Ok(files)
}

/// Lines of what the config says of a training.
fn training(e: &mut Export) -> String {
    let o = e.o;
    let tokens = |rows: usize| (rows * o.seq).to_string();
    // The newest commit counts tokens, release 0.3.0 sequences: those of all microbatches of a pipeline.
    let newest = [
        ("num_tokens_per_microbatch_per_dp_rank", tokens(o.microbatch)),
        ("num_tokens_per_train_step", tokens(o.global_batch)),
        ("max_context_length", o.seq.to_string()),
    ];
    let of_pipeline = if e.n("pp") > 1 { o.microbatches() } else { 1 };
    let release = [
        ("local_batch_size", (o.microbatch * of_pipeline).to_string()),
        ("global_batch_size", o.global_batch.to_string()),
        ("seq_len", o.seq.to_string()),
    ];
    let either = |all: [(&str, String); 3]| -> String {
        all.map(|(n, v)| format!("        config.training.{n} = {v}\n")).concat()
    };
    let batch = format!(
        "    if hasattr(config.training, \"num_tokens_per_train_step\"):\n{}    else:\n{}",
        either(newest),
        either(release)
    );
    let training = [
        ("dtype", "\"float32\"".into()),
        ("mixed_precision_param", format!("\"{}\"", o.dtype.facts().torch)),
    ];
    let clip = e
        .asks("clip", |o| o.clip)
        .then(|| ("max_norm", o.clip.map_or("float(\"inf\")".into(), |c| c.to_string())));
    if clip.is_none() {
        e.leaves("no clipping", "max_norm 1.0");
    }
    // It records none of pipelines, and few of experts.
    let graphs = (e.n("pp") > 1 || o.ep > 1).then(|| ("disable_cuda_graphs", "True".into()));
    let training = training.iter().chain(&clip).chain(&graphs);
    let mut training: String = batch
        + &training.map(|(n, v)| format!("    config.training.{n} = {v}\n")).collect::<String>();
    training.extend(e.notes.drain(..).map(|note| format!("    # {note}\n")));
    let [given, others] = e.elsewhere();
    for (what, flags) in [("given, and not written", given), ("not given", others)] {
        if !flags.is_empty() {
            let flags = flags.join(" ");
            training += &format!("    # plan ({what}): {flags}; here the config's own apply\n");
        }
    }
    training
}

fn python(b: bool) -> &'static str {
    if b { "True" } else { "False" }
}

/// The modules of every stage by torchtitan's names.
fn modules(stages: &[(u32, usize)]) -> String {
    let last = stages.len().saturating_sub(1);
    let one = |(i, (first, n)): (usize, &(u32, usize))| {
        let mut all: Vec<String> = vec![];
        all.extend((i == 0).then(|| "tok_embeddings".into()));
        all.extend((0..*n as u32).map(|l| format!("layers.{}", first + l)));
        all.extend(
            (i == last).then(|| vec!["norm".to_string(), "lm_head".into()]).into_iter().flatten(),
        );
        serde_json::to_string(&all).expect("text")
    };
    let all: Vec<String> = stages.iter().enumerate().map(one).collect();
    format!("[{}]", all.join(", "))
}
