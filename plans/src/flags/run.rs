//! Options of a run: its batch, element types and kernels, and where it runs.

use super::layout::MAX_COUNT;
use super::options::{read_documents, read_dropout};
use super::shown::{lower, trained, trains};
use super::spec::{Kind, OptionSpec, TRAINERS, idle, key, lack, row, word};
use crate::flags::Target::{Deepspeed, Nanotron, Torchtitan};
use shardc_ir::documents::Documents;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::types::DType;
use shardc_passes::options::Options;

const RUN: OptionSpec = OptionSpec { heading: "Run", ..OptionSpec::NONE };

pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        flag: "mode",
        help: "train, or infer (forward pass to logits)",
        default: "train",
        kind: Kind::Words(&["train", "infer"]),
        set: word!(mode),
        keys: &[key("mode", "experts").trained()],
        rows: &[row("Step", "mode", |s| Some(lower(&s.options.mode)))],
        lacks: &[lack(TRAINERS, |o| o.mode == Mode::Infer, "inference plans (--mode infer)")],
        ..RUN
    },
    OptionSpec {
        flag: "global-batch",
        help: "Sequences per step over all ranks",
        default: "8; of a text model whose rows do not divide 8, its rows",
        kind: Kind::Whole(1, MAX_COUNT),
        keys: &[key("global_batch", "annotate").trained()],
        rows: &[row("Step", "global batch", |s| Some(s.plan.settings.global_batch.to_string()))],
        ..RUN
    },
    OptionSpec {
        flag: "microbatch",
        help: "Sequences per rank and microbatch",
        default: "all of a rank's, or with pp as many as give at least pp microbatches",
        kind: Kind::Whole(1, MAX_COUNT),
        keys: &[key("microbatch", "annotate")],
        rows: &[row("Step", "microbatch × count", |s| {
            Some(format!("{} × {}", s.options.microbatch, s.plan.settings.microbatches))
        })],
        ..RUN
    },
    OptionSpec {
        flag: "seq",
        help: "Tokens per sequence",
        default: "512, or the model's maximum if that is less, or those of a text model",
        kind: Kind::Whole(1, MAX_COUNT),
        keys: &[key("seq", "experts").trained()],
        idle: &[idle(
            |s| !s.model.args.iter().any(|a| a.input().is_some_and(|i| i.seq.is_some())),
            "the model takes no tokens",
        )],
        rows: &[row("Step", "sequence", |s| Some(s.plan.settings.seq.to_string()))],
        ..RUN
    },
    OptionSpec {
        flag: "dtype",
        help: "Element type of weights and activations: f32, bf16 or f16 (training keeps f32 \
               master copies; sums and statistics are f32; f16 uses loss scaling)",
        default: "f32",
        kind: Kind::Words(&["f32", "bf16", "f16"]),
        set: word!(dtype),
        keys: &[key("dtype", "precision")
            .trained()
            .range(|o| o.dtype.is_float(), "it is f32, bf16 or f16")],
        said: Some((0, |o| Some(types(o)))),
        rows: &[row("Numbers", "element type", |s| Some(s.options.dtype.name().into()))],
        lacks: &[lack(
            &[Torchtitan, Nanotron],
            |o| o.dtype == DType::F16,
            "f16: it has no loss scaling",
        )],
        ..RUN
    },
    OptionSpec {
        flag: "grad-dtype",
        help: "Element type in which gradients of bf16 or f16 weights are accumulated and reduced: \
               f32, or that of the weights",
        default: "f32",
        kind: Kind::Words(&["f32", "bf16", "f16"]),
        set: word!(grad_dtype),
        keys: &[key("grad_dtype", "differentiate")
            .trained()
            .range(|o| [DType::F32, o.dtype].contains(&o.grad_dtype), "it is f32 or dtype")],
        in_plan: true,
        trains: true,
        rows: &[row("Numbers", "gradients", |s| trained(s, s.options.grad_dtype.name()))],
        lacks: &[lack(
            &[Torchtitan],
            |o| o.dtype == DType::BF16 && o.grad_dtype == DType::BF16,
            "gradients in bf16",
        )],
        ..RUN
    },
    OptionSpec {
        flag: "seed",
        help: "Seed of initial weights and of the data order",
        default: "0",
        kind: Kind::Whole(0, usize::MAX),
        set: |o, g| {
            o.seed = g.whole() as u64;
            Ok(())
        },
        keys: &[key("seed", "")],
        in_plan: true,
        rows: &[row("Numbers", "seed", |s| Some(s.options.seed.to_string()))],
        elsewhere: &[Torchtitan, Deepspeed],
        ..RUN
    },
    OptionSpec {
        flag: "fuse",
        help: "Kernel fusion of element-wise work, reductions and sums: yes (also with the \
               products they read), rows (not with products) or no",
        default: "yes",
        kind: Kind::Words(&["yes", "rows", "no"]),
        set: word!(fuse),
        // It looks at what fusion leads to.
        keys: &[key("fuse", "early-sums")],
        rows: &[row("Numbers", "fused kernels", |s| Some(lower(&s.options.fuse)))],
        ..RUN
    },
    OptionSpec {
        flag: "dropout",
        help: "Dropout of the embedding, of the output of blocks and of attention probabilities: \
               config (the rates of config.json), or a rate below 1",
        default: "0",
        set: read_dropout,
        keys: &[key("dropout", "experts").trained().range(
            |o| !matches!(o.dropout, Dropout::Rate(p) if !(p > 0.0 && p < 1.0)),
            "a rate is above 0 and below 1",
        )],
        trains: true,
        rows: &[row("Numbers", "dropout", |s| trained(s, dropout(&s.options)))],
        lacks: &[lack(
            TRAINERS,
            |o| o.dropout != Dropout::Nothing,
            "dropout at these places (--dropout)",
        )],
        ..RUN
    },
    OptionSpec {
        flag: "documents",
        value: "rows|eod=ID",
        help: "Document masking for packed rows: tokens attend only within their document, and \
               positions restart. rows: the data say where documents are, as examples do; \
               eod=ID is the end-of-document token; eod=ID,pad=ID also names the padding token",
        default: "a row is one document",
        set: read_documents,
        keys: &[key("documents", "experts").trained()],
        rows: &[row("Step", "documents per row", |s| {
            Some(match s.options.documents {
                None => "1".into(),
                Some(Documents::Given(_)) => "masked, as the data say".into(),
                Some(Documents::Ends(d)) => format!("masked, each ends with token {}", d.end),
            })
        })],
        lacks: &[lack(TRAINERS, |o| o.documents.is_some(), "document masking (--documents)")],
        ..RUN
    },
    OptionSpec {
        flag: "transport",
        help: "How ranks communicate when the plan runs: threads, mpi or nccl; plans for mpi and \
               nccl overlap communication with work",
        default: "threads",
        kind: Kind::Words(&["threads", "mpi", "nccl"]),
        set: word!(transport),
        keys: &[key("transport", "early-sums")],
        said: Some((90, |o| Some(format!("transport {}", o.transport.name())))),
        rows: &[row("Numbers", "transport", |s| Some(s.options.transport.name().into()))],
        ..RUN
    },
    OptionSpec {
        flag: "device",
        help: "Device: cpu, or cuda, which adds compiled kernels to the plan's folder (run \
               compiles them if they are missing)",
        default: "cpu",
        kind: Kind::Words(&["cpu", "cuda"]),
        ..RUN
    },
    OptionSpec {
        flag: "arch",
        value: "ARCH,..",
        help: "Architectures for which --device cuda compiles kernels",
        default: "sm_80,sm_90a",
        ..RUN
    },
];

/// Element types, in words.
fn types(o: &Options) -> String {
    match trains(o) {
        true => format!("{}, gradients {}", o.dtype.name(), o.grad_dtype.name()),
        false => o.dtype.name().into(),
    }
}

/// What is dropped, in words.
fn dropout(o: &Options) -> String {
    match o.dropout {
        Dropout::Nothing => "none".into(),
        Dropout::Config => "as in the config".into(),
        Dropout::Rate(p) => p.to_string(),
    }
}
