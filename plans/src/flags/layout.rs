//! Options of the layout: the mesh, and what is split over it, and how.

use super::options::{read_buffers, read_tp_mode};
use super::shown::{context, lower, of_experts, tp, trained, trains, yes};
use super::spec::{Key, Kind, OptionSpec, Seen, TRAINERS, idle, key, lack, row, word};
use super::values::place_of;
use crate::flags::Target::{Deepspeed, HfTpPlan, Megatron, Nanotron, Torchtitan};
use shardc_frontends::ExpertFacts;
use shardc_ir::mesh::MAX_RANKS;
use shardc_ir::ops::Kind as OpKind;
use shardc_passes::options::{Buffers, CpMode, Options, TpMode};
use shardc_passes::zero::Accumulate;

pub(super) const LAYOUT: OptionSpec = OptionSpec { heading: "Layout", ..OptionSpec::NONE };

const MOE: Key = key("moe", "experts").range(
    |o| match o.moe {
        Buffers::Worst => true,
        Buffers::Bound(x) | Buffers::Capacity(x) => x > 0.0 && x <= 1e6,
    },
    "a factor is above 0, and at most 1e6",
);

const TP_MODE: Key = key("tp_mode", "annotate")
    .range(|o| o.tp_mode != TpMode::TwoAndHalfD { depth: 0 }, "a grid is not 0 deep");

const NO_EXPERTS: &str = "the model has no experts";

/// Largest batch, sequence, and depth of a grid: products of them with a mesh stay far from
/// overflow.
pub const MAX_COUNT: usize = 1 << 30;

pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        flag: "mesh",
        help: "Mesh axes and sizes, outermost first: pp=2,dp=2,tp=2 (dp is short for dp_replicate, \
               or for dp_shard with --zero or ep). ep and etp, as in dp=4,tp=2,ep=4,etp=1, are not \
               axes of their own: they factorise the ranks of dp_shard, cp and tp a second time, \
               for experts",
        keys: &[
            key("mesh", ""),
            key("ep", "experts").word("ep in --mesh").range(|o| o.ep > 0, "it is not 0"),
            key("etp", "experts").word("etp in --mesh").range(|o| o.etp != Some(0), "it is not 0"),
        ],
        said: Some((50, |o| {
            let asked = o.ep > 1 || o.etp.is_some();
            asked.then(|| format!("experts ep={}, etp={}", o.ep, o.etp()))
        })),
        lacks: &[lack(
            &[Deepspeed],
            |o| o.ep > 1,
            "expert parallelism: it belongs in the model, not in the config",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "gpus",
        value: "N",
        help: "Number of ranks of the mesh, if one axis of --mesh is auto and takes the remaining \
               ranks: --gpus 16 --mesh tp=2,dp=auto is --mesh tp=2,dp=8",
        kind: Kind::Whole(1, MAX_RANKS),
        ..LAYOUT
    },
    OptionSpec {
        flag: "order",
        help: "Order of the axes, fastest-varying first, with Megatron's names",
        default: "tp-cp-ep-dp-pp",
        idle: &[idle(
            |s| s.o.mesh.iter().filter(|a| a.1 > 1).count() < 2,
            "the mesh has fewer than 2 axes",
        )],
        lacks: &[lack(
            TRAINERS,
            |o| !is_canonical(o),
            "an order of ranks other than tp-cp-ep-dp-pp (--order)",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "node",
        help: "Ranks per node; warns if a group of tp or cp crosses nodes",
        kind: Kind::Whole(1, usize::MAX),
        set: |o, g| {
            o.node = Some(g.whole());
            Ok(())
        },
        keys: &[key("node", "").range(|o| o.node != Some(0), "a node has a rank")],
        rows: &[row("Parallelism", "ranks per node", |s| s.options.node.map(|n| n.to_string()))],
        ..LAYOUT
    },
    OptionSpec {
        flag: "zero",
        help: "ZeRO stage, what is sharded over dp_shard: 1 the optimizer state, 2 also gradients, \
               3 also parameters (FSDP)",
        default: "0",
        kind: Kind::Whole(0, 3),
        set: |o, g| {
            o.zero = g.whole() as u8;
            Ok(())
        },
        keys: &[key("zero", "partition").range(|o| o.zero <= 3, "it is 0, 1, 2 or 3")],
        cuts: true,
        said: Some((20, |o| (o.zero > 0 && trains(o)).then(|| format!("ZeRO-{}", o.zero)))),
        rows: &[row("Parallelism", "ZeRO stage", |s| trained(s, s.options.zero))],
        lacks: &[
            lack(
                &[Torchtitan],
                |o| matches!(o.zero, 1 | 2),
                "ZeRO-1 and 2: it shards weights, gradients and states together",
            ),
            lack(
                &[HfTpPlan],
                |o| matches!(o.zero, 1 | 2),
                "ZeRO-1 and 2: FSDP2 shards weights, gradients and states together",
            ),
            lack(&[Nanotron], |o| o.zero > 1, "ZeRO-2 and 3: it shards only the optimizer state"),
        ],
        ..LAYOUT
    },
    OptionSpec {
        flag: "zero-accumulate",
        value: "WHAT",
        help: "What --zero 2 and 3 keep unsharded over the microbatches of a step, like FSDP's \
               no_sync: gradients (reduced once per step), weights (gathered once per step), both \
               or none",
        default: "none",
        kind: Kind::Words(&["none", "gradients", "weights", "both"]),
        set: word!(zero_accumulate),
        keys: &[key("zero_accumulate", "partition")],
        cuts: true,
        trains: true,
        rows: &[row("Parallelism", "ZeRO accumulates", |s| {
            trained(s, s.options.zero_accumulate.name())
        })],
        lacks: &[
            lack(
                &[Megatron, Deepspeed, Nanotron],
                |o| o.zero_accumulate != Accumulate::None && o.zero >= 2,
                "unsharded accumulation over microbatches (--zero-accumulate)",
            ),
            lack(
                &[Torchtitan],
                |o| match o.zero_accumulate {
                    Accumulate::None => false,
                    // PyTorch's pipelines do so.
                    Accumulate::Gradients | Accumulate::Both => o.zero >= 2 && o.axis("pp") == 1,
                    Accumulate::Weights => o.zero >= 2,
                },
                "unsharded accumulation over microbatches (--zero-accumulate)",
            ),
        ],
        ..LAYOUT
    },
    OptionSpec {
        flag: "sp",
        help: "Split the residual stream along the sequence over tp (sequence parallelism)",
        kind: Kind::Switch,
        set: |o, _| {
            o.sp = true;
            Ok(())
        },
        keys: &[key("sp", "annotate")],
        cuts: true,
        said: Some((30, |o| o.sp.then(|| "sequence parallel".into()))),
        rows: &[row("Parallelism", "sequence parallel", |s| tp(s).then(|| yes(s.options.sp)))],
        lacks: &[
            lack(&[Deepspeed], |o| o.sp, "sequence parallelism (--sp) of its tensor parallelism"),
            lack(&[HfTpPlan], |o| o.sp, "sequence parallelism (--sp)"),
        ],
        ..LAYOUT
    },
    OptionSpec {
        flag: "moe-bound",
        value: "F",
        help: "Size of the expert buffers, as a multiple of what balanced routing needs; a run \
               that needs more is aborted",
        default: "enough for any routing",
        kind: Kind::Number,
        set: read_buffers,
        keys: &[MOE],
        in_plan: true,
        idle: &[
            idle(|s| !s.has(OpKind::Copies), NO_EXPERTS),
            idle(is_roomy, "no group of experts ever gets more than that"),
        ],
        rows: &[row("Numbers", "expert buffers", |s| of_experts(s, buffers(&s.options)))],
        ..LAYOUT
    },
    OptionSpec {
        flag: "moe-capacity",
        value: "F",
        help: "Capacity factor: token copies that an expert keeps, as a multiple of its balanced \
               share; further copies are dropped",
        default: "none are dropped",
        kind: Kind::Number,
        set: read_buffers,
        keys: &[MOE],
        idle: &[idle(|s| !s.has(OpKind::Copies), NO_EXPERTS)],
        lacks: &[lack(
            TRAINERS,
            |o| matches!(o.moe, Buffers::Capacity(_)),
            "token dropping by capacity (--moe-capacity)",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "cp-mode",
        help: "Context parallelism over cp: all-gather (of keys and values), ring (ring \
               attention), or ulysses (an all-to-all of heads and tokens)",
        default: "all-gather",
        kind: Kind::Words(&["all-gather", "ring", "ulysses"]),
        set: word!(cp_mode),
        keys: &[key("cp_mode", "annotate")],
        cuts: true,
        in_plan: true,
        idle: &[idle(
            |s| {
                let asked = s.o.cp_mode != CpMode::AllGather && s.o.axis("cp") > 1;
                asked && !s.has(OpKind::Attention)
            },
            "the model has no attention",
        )],
        said: Some((45, |o| {
            (o.axis("cp") > 1).then(|| format!("context parallel {}", context(o)))
        })),
        rows: &[row("Parallelism", "context parallel mode", |s| {
            (s.options.axis("cp") > 1).then(|| lower(&s.options.cp_mode))
        })],
        ..LAYOUT
    },
    OptionSpec {
        flag: "cp-split",
        help: "Which tokens a rank of cp has: contiguous, or zigzag (one chunk from the front and \
               one from the back, which balances causal attention)",
        default: "zigzag in a ring and, with causal attention, of all-gather where a model and its length allow it; else contiguous",
        kind: Kind::Words(&["contiguous", "zigzag"]),
        set: word!(cp_split),
        keys: &[key("cp_split", "annotate")],
        cuts: true,
        in_plan: true,
        fills: &[(Megatron, "zigzag")],
        ..LAYOUT
    },
    OptionSpec {
        flag: "tp-mode",
        help: "Tensor parallelism: 1d (Megatron), or blocks of weights and activations on a grid \
               of tp ranks: 2d (tp = q²), 2.5d (tp = depth·q²), 3d (tp = q³)",
        default: "1d",
        kind: Kind::Words(&["1d", "2d", "2.5d", "3d"]),
        set: read_tp_mode,
        keys: &[TP_MODE],
        cuts: true,
        // Plain tensor parallelism goes without saying.
        said: Some((40, |o| {
            let asked = o.axis("tp") > 1 && o.tp_mode != TpMode::OneD;
            asked.then(|| format!("tensor parallel {}", o.tp_mode))
        })),
        rows: &[row("Parallelism", "tensor parallel mode", |s| {
            tp(s).then(|| s.options.tp_mode.to_string())
        })],
        lacks: &[lack(
            &[Megatron, Torchtitan, Deepspeed, Nanotron, HfTpPlan],
            |o| o.tp_mode != TpMode::OneD,
            "tensor parallelism on a grid (--tp-mode)",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "tp-depth",
        help: "Number of grids of --tp-mode 2.5d, each with its own rows of the batch",
        default: "2",
        kind: Kind::Whole(1, MAX_COUNT),
        set: read_tp_mode,
        keys: &[TP_MODE],
        ..LAYOUT
    },
    OptionSpec {
        flag: "tp-steps",
        help: "Operands of products with --tp-mode 2d and 2.5d: gathered (few calls), or summa \
               (broadcast one piece at a time, in as many steps as the grid is wide: less memory)",
        default: "gathered",
        kind: Kind::Words(&["gathered", "summa"]),
        set: word!(tp_steps),
        keys: &[key("tp_steps", "summa")],
        cuts: true,
        rows: &[row("Parallelism", "tensor parallel steps", |s| {
            tp(s).then(|| lower(&s.options.tp_steps))
        })],
        ..LAYOUT
    },
];

/// Ranks are numbered as they are where nothing else is said: axes from outer to inner.
fn is_canonical(o: &Options) -> bool {
    let places = o.mesh.iter().map(|a| place_of(&a.0));
    places.clone().all(|p| p.is_some()) && places.is_sorted()
}

/// How large the buffers of experts are, in words.
fn buffers(o: &Options) -> String {
    match o.moe {
        Buffers::Worst => "enough for any routing".into(),
        Buffers::Bound(by) => format!("{by} times a balanced load"),
        Buffers::Capacity(by) => format!("capacity {by}"),
    }
}

/// The buffers have room for all that a group of experts may ever get.
fn is_roomy(s: &Seen) -> bool {
    let bound = s.flags.number("moe-bound").filter(|_| s.has(OpKind::Copies));
    // All that a group of experts may get, against its share.
    let most = |x: &ExpertFacts| {
        let groups = s.o.ep.max(1);
        x.top_k.min(x.experts / groups) as f64 * groups as f64 / x.top_k as f64
    };
    bound.zip(s.facts.and_then(|f| f.experts)).is_some_and(|(by, x)| by >= most(&x))
}
