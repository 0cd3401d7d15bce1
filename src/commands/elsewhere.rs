//! Flags of other software, and what says the same here: who types one is told.

use crate::commands::Cli;
use clap::CommandFactory as _;
use clap::error::{ContextKind, ContextValue};
use shardc_ir::diag::{Diag, one_line};

/// Names without dashes before them, `-` for `_`, and our words; `=N` and ` N` become the value that was given. Of
/// Megatron-LM, torchtitan, DeepSpeed, transformers' Trainer and PEFT, TRL, axolotl, LLaMA-Factory.
const WORDS: &[(&[&str], &str)] = &[
    (
        &["tp", "tensor-model-parallel-size", "tensor-parallel-size", "tensor-parallel-degree"],
        "--mesh tp=N",
    ),
    (
        &[
            "pp",
            "pipeline-model-parallel-size",
            "pipeline-parallel-size",
            "pipeline-parallel-degree",
        ],
        "--mesh pp=N",
    ),
    (&["cp", "context-parallel-size", "context-parallel-degree"], "--mesh cp=N"),
    (
        &["ep", "expert-model-parallel-size", "expert-parallel-size", "expert-parallel-degree"],
        "--mesh ep=N",
    ),
    (&["etp", "expert-tensor-parallel-size", "expert-tensor-parallel-degree"], "--mesh etp=N"),
    (&["dp", "data-parallel-size", "data-parallel-replicate-degree"], "--mesh dp=N"),
    (
        &["fsdp", "use-torch-fsdp2", "use-megatron-fsdp", "data-parallel-shard-degree"],
        "--zero 3 (with --mesh dp=RANKS)",
    ),
    (&["use-distributed-optimizer"], "--zero 1 (with --mesh dp=RANKS)"),
    (&["zero-stage", "stage"], "--zero N"),
    (&["sequence-parallel"], "--sp"),
    (&["bf16", "bfloat16"], "--dtype bf16"),
    (
        &["fp8", "fp8-format", "fp8-recipe", "enable-fp8"],
        "--dtype bf16: there are no kernels of fp8, whose time `shardc plan --what-if weights=fp8` estimates",
    ),
    (&["fp16", "float16", "half"], "--dtype f16"),
    (&["fp32", "float32"], "--dtype f32"),
    (
        &[
            "micro-batch-size",
            "per-device-train-batch-size",
            "local-batch-size",
            "train-micro-batch-size-per-gpu",
        ],
        "--microbatch N",
    ),
    (
        &["gradient-accumulation-steps"],
        "--global-batch: microbatches follow from it, --microbatch and the mesh",
    ),
    (&["train-batch-size", "batch-size"], "--global-batch N"),
    (
        &[
            "seq-length",
            "seq-len",
            "sequence-len",
            "max-seq-length",
            "max-seq-len",
            "max-length",
            "cutoff-len",
        ],
        "--seq N",
    ),
    (
        &["num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"],
        "--chunks: stages of each rank",
    ),
    (&["recompute-activations"], "--recompute selective"),
    (
        &["recompute-granularity", "gradient-checkpointing", "activation-checkpoint"],
        "--recompute selective|full|layers:N",
    ),
    (&["clip-grad", "max-grad-norm", "gradient-clipping"], "--clip N"),
    (&["adam-beta1", "adam-beta2", "adam-beta-1", "adam-beta-2"], "--betas BETA1,BETA2"),
    (&["adam-eps", "adam-epsilon"], "--eps N"),
    (&["learning-rate"], "--lr N"),
    (
        &["lr-decay-style", "lr-scheduler-type", "lr-scheduler"],
        "--lr-schedule constant|warmup-cosine|warmup-linear",
    ),
    (&["lr-warmup-iters", "warmup-steps"], "--warmup N"),
    (&["attention-dropout", "hidden-dropout"], "--dropout N"),
    (
        &["attn-implementation", "flash-attn", "use-flash-attn", "attention-backend"],
        "no flag for it: attention is one kernel on every device",
    ),
    (&["moe-aux-loss-coeff", "router-aux-loss-coef"], "--moe-aux N"),
    (&["moe-z-loss-coeff"], "--moe-z-loss N"),
    (&["mtp-num-layers"], "--mtp FACTOR: the layers are those of the model"),
    (&["lora-r", "lora-rank"], "--lora r=N,alpha=A"),
    (&["lora-alpha"], "--lora r=R,alpha=N"),
    (&["lora-target-modules", "lora-target"], "--lora r=R,targets=MODULES"),
    (&["lora-target-linear"], "--lora r=R,targets=linear"),
    (&["lora-dropout"], "--lora r=R,dropout=N"),
    (&["use-rslora", "peft-use-rslora"], "--lora r=R,rslora"),
    (&["use-peft", "finetuning-type", "adapter"], "--lora r=R,alpha=A"),
    (
        &["loraplus-lr-ratio"],
        "--optim '*.lora_B.*=RULE,lr*=N' (RULE is that of --optimizer, adamw unless it is given)",
    ),
    (&["modules-to-save", "lora-modules-to-save", "additional-target"], "--train GLOB"),
    (&["packing", "sample-packing", "neat-packing"], "--documents rows"),
    (&["warmup-ratio"], "--warmup STEPS: N times the steps that `shardc run --epochs` tells"),
    (&["deepspeed"], "--zero 1|2|3 (with --mesh dp=RANKS)"),
    (
        &[
            "assistant-only-loss",
            "completion-only-loss",
            "train-on-inputs",
            "train-on-prompt",
            "mask-history",
            "roles-to-train",
        ],
        "shardc run --loss-on assistant|completion|all",
    ),
    (
        &["chat-template", "chat-template-path", "chat-template-jinja", "template"],
        "shardc run --chat-template FILE",
    ),
    (&["dataset-name", "datasets"], "shardc run --data FILE.jsonl"),
    (&["val-set-size", "val-size"], "shardc run --eval-data FILE.jsonl: lines that --data has not"),
    (&["eval-strategy", "evals-per-epoch"], "shardc run --eval-every STEPS|epoch"),
    (&["save-total-limit"], "shardc run --keep N"),
    (&["train-iters", "max-steps"], "shardc run --steps N"),
    (&["num-train-epochs", "num-epochs"], "shardc run --epochs N"),
    (&["save-interval", "save-steps"], "shardc run --save-every N"),
    (&["output-dir", "save-dir"], "shardc run --save DIR"),
    (
        &["logging-steps", "log-interval", "report-to"],
        "shardc run --metrics FILE.jsonl or --tensorboard DIR",
    ),
    (&["max-new-tokens", "max-tokens"], "shardc generate --max-new N"),
    (&["do-sample"], "shardc generate --temperature 1"),
    (&["eval-interval", "eval-steps"], "shardc run --eval-every N"),
    (&["load", "resume-from-checkpoint"], "shardc run --resume DIR"),
    (&["data-path", "train-file", "dataset"], "shardc run --data"),
    (
        &["model-name-or-path", "pretrained-model-name-or-path", "model"],
        "the model as an argument: shardc compile MODEL",
    ),
];

/// What is said of an argument that is other software's or another command's, where the flags of a command are given in
/// these words.
pub fn answer(e: &clap::Error, words: &[String]) -> Option<Diag> {
    let Some(ContextValue::String(flag)) = e.get(ContextKind::InvalidArg) else { return None };
    let named = flag.split('=').next().unwrap_or(flag).split(' ').next()?;
    let own = named.trim_start_matches('-').replace('_', "-");
    if own.starts_with("dtype-frozen") || matches!(&*own, "load-in-4bit" | "qlora") {
        return Some(four_bits(named));
    }
    if e.kind() != clap::error::ErrorKind::UnknownArgument {
        return None;
    }
    if let Some(d) = below_zero(named, words) {
        return Some(d);
    }
    let command = words.iter().skip(1).find(|w| !w.starts_with('-')).map_or("", |w| w);
    let given = value(named, words).map_or_else(|| "N".into(), |v| one_line(&v).into_owned());
    let Some(ours) = WORDS.iter().find(|w| w.0.contains(&&*own)) else {
        return of_another(named.strip_prefix("--")?, command);
    };
    let ours = ours.1.replace("=N", &format!("={given}")).replace(" N", &format!(" {given}"));
    let flag = ours.strip_prefix("--").and_then(|o| o.split(' ').next()).unwrap_or_default();
    let knows = || {
        let all = Cli::command();
        let found = all.find_subcommand(command);
        found.is_some_and(|c| c.get_arguments().any(|a| a.get_long() == Some(flag)))
    };
    let way = match command {
        "audit" => format!(
            "put flags of the software that is audited behind --: audit … -- {}",
            one_line(named)
        ),
        _another if ours.starts_with("no flag") => ours,
        _another if !ours.starts_with("--") || knows() => format!("use {ours}"),
        _another => format!("compile with {ours}"),
    };
    let named = one_line(named);
    Some(Diag::new("usage", format!("there is no {named} here")).at(&*named).help(way))
}

/// A number below 0 behind a flag, which takes none: nothing says so but that it looks like a flag.
fn below_zero(number: &str, words: &[String]) -> Option<Diag> {
    // Of `-10` the parser has read `-1`.
    let is_number = |w: &String| number.starts_with('-') && w.parse::<f64>().is_ok();
    let at = words.iter().position(|w| w.starts_with(number) && is_number(w))?;
    let number = &words[at];
    let flag = words.get(at.checked_sub(1)?).filter(|w| w.starts_with("--") && !w.contains('='))?;
    let what = format!("`{}` is not a value of {}", one_line(number), one_line(flag));
    Some(Diag::new("usage", what).at(one_line(flag)).help("give a number that is not below 0"))
}

/// A flag that another command has.
fn of_another(flag: &str, command: &str) -> Option<Diag> {
    let all = Cli::command();
    let has = |c: &clap::Command| {
        c.get_arguments().any(|a| a.get_long() == Some(flag) && !a.is_hide_set())
    };
    let of: Vec<String> =
        all.get_subcommands().filter(|c| has(c)).map(|c| format!("shardc {c}")).collect();
    let d = Diag::new("usage", format!("there is no --{flag} here")).at(format!("--{flag}"));
    let compiled = of.iter().any(|c| c == "shardc compile");
    Some(match (command, &of[..]) {
        // What is audited has its own behind `--`, as the parser says.
        (_, []) | ("audit", _) => return None,
        ("plan", _) if flag == "mesh" => {
            d.help("use --fix, as in --fix tp=8,dp=4: the rest is searched")
        }
        ("run" | "generate" | "price" | "report" | "verify" | "prove" | "inspect", _)
            if compiled =>
        {
            d.rule("a plan has what it was compiled with")
                .help(format!("compile with it: shardc compile MODEL --{flag} …"))
        }
        (_, [one]) => d.help(format!("{one} has it")),
        _other => d.help(format!("{} have it", of.join(", "))),
    })
}

/// The value of a flag among words: behind `=`, or the next word if it is no flag.
fn value(flag: &str, words: &[String]) -> Option<String> {
    let at = words
        .iter()
        .position(|w| w == flag || w.strip_prefix(flag).is_some_and(|r| r.starts_with('=')))?;
    match words[at].split_once('=') {
        Some((_, v)) => Some(v.to_string()),
        None => words.get(at + 1).filter(|w| w.parse::<f64>().is_ok()).cloned(),
    }
}

/// A base of 4 bits, by the flag that other software's users look for.
fn four_bits(flag: &str) -> Diag {
    Diag::new("not-built", "frozen weights of 4 bits (nf4, QLoRA) are not built")
        .at(flag)
        .rule("frozen weights have the element type of --dtype")
        .help("use --dtype bf16 with --lora: 8B fits one GPU of 24 GB with --recompute full --loss-chunks 8")
        .help("for 70B use 8 GPUs: --mesh dp=8 --zero 3, or --mesh tp=8 --sp (docs/lora.md has the peaks)")
}
