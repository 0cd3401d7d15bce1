//! Options of pipelines, of what backward computes again, of memory, and of layouts asked for.

use super::layout::LAYOUT;
use super::options::{
    read_layers, read_loss_chunks, read_memory, read_recompute, read_schedule, read_shard,
    read_speeds,
};
use super::shown::{trained, trains, yes};
use super::spec::{Idle, Kind, OptionSpec, Seen, TRAINERS, idle, key, lack, row};
use crate::flags::Target::{Deepspeed, HfTpPlan, Nanotron, Torchtitan};
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Fuse;

const NO_PP: &str = "the mesh has no pp";

pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        flag: "schedule",
        help: "Pipeline schedule: naive, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, \
               v-half, v-min, dualpipe-v, search (the fastest that fits --memory), or a CSV file",
        default: "1f1b",
        set: read_schedule,
        keys: &[key("schedule", "stages")],
        idle: &[idle(is_one_order, NO_PP)],
        said: Some((80, |o| (o.axis("pp") > 1).then(|| format!("schedule {}", o.schedule.name())))),
        rows: &[row("Step", "schedule", |s| {
            (s.plan.schedule.ranks.len() > 1).then(|| s.options.schedule.name().into())
        })],
        ..LAYOUT
    },
    OptionSpec {
        flag: "chunks",
        help: "Stages per pipeline rank",
        default: "what the schedule needs, 1 or 2",
        kind: Kind::Whole(1, usize::MAX),
        set: |o, g| {
            o.chunks = Some(g.whole());
            Ok(())
        },
        keys: &[key("chunks", "stages").range(|o| o.chunks != Some(0), "it is not 0")],
        idle: &[idle(|s| s.o.chunks == Some(1) && s.one_stage(), NO_PP)],
        rows: &[row("Step", "stages per rank", |s| {
            let of = &s.plan.schedule;
            Some((of.owner.len() / of.ranks.len().max(1)).to_string())
        })],
        ..LAYOUT
    },
    OptionSpec {
        flag: "layers",
        help: "Where stages begin: balanced, equal, layers per stage (8,8,9,7), the scopes that \
               begin a stage, or Megatron's layout notation, as in Et*3|(tt|)*2,tL",
        default: "balanced",
        set: read_layers,
        keys: &[key("layers", "stages")],
        in_plan: true,
        idle: &[idle(|s| s.one_stage() && s.o.chunks.is_none(), NO_PP)],
        rows: &[row("Step", "layers per stage", |s| {
            let own = &s.options.layers;
            Some(if own.is_empty() { "balanced".into() } else { own.clone() })
        })],
        fills: &[(Nanotron, "equal")],
        ..LAYOUT
    },
    OptionSpec {
        flag: "speeds",
        help: "Relative speed of each pipeline rank, as in 1,1,0.5,1",
        default: "all equal",
        set: read_speeds,
        keys: &[
            key("speeds", "stages").range(|o| o.speeds.iter().all(|&x| x > 0.0), "each is above 0")
        ],
        idle: &[idle(|s| s.one_stage(), NO_PP)],
        rows: &[row("Step", "speeds", |s| {
            let all: Vec<String> = s.options.speeds.iter().map(f64::to_string).collect();
            (!all.is_empty()).then(|| all.join(", "))
        })],
        ..LAYOUT
    },
    OptionSpec {
        flag: "reshard-after-forward",
        help: "Free the parameters gathered by ZeRO-3 or a grid after forward, and gather them \
               again in backward",
        default: "yes",
        kind: Kind::Words(&["yes", "no"]),
        set: |o, g| {
            o.reshard_after_forward = g.text() == "yes";
            Ok(())
        },
        keys: &[key("reshard_after_forward", "split")],
        cuts: true,
        rows: &[row("Parallelism", "reshard after forward", |s| {
            (s.options.zero == 3).then(|| yes(s.options.reshard_after_forward))
        })],
        lacks: &[lack(
            &[Deepspeed],
            |o| o.zero == 3 && !o.reshard_after_forward,
            "weights that stay gathered after forward",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "recompute",
        help: "Activation checkpointing, what backward recomputes: none, elementwise (element-wise \
               work, where that saves bytes), selective, full, every:N and layers:N (whole layers: \
               every N-th, or the first N of a stage), sqrt (runs of layers), mix: \
               (N*full+elementwise: the first N layers of a stage by one policy, the rest by the \
               last), fit (the cheapest that fits --memory), or ops: with names of ops, norms, \
               activations, selective, elementwise, mla_up_proj, moe_act, experts, moe",
        default: "elementwise",
        set: read_recompute,
        keys: &[key("recompute", "split")],
        trains: true,
        said: Some((60, |o| trains(o).then(|| format!("recompute {}", o.recompute)))),
        rows: &[row("Step", "recompute", |s| trained(s, &s.options.recompute))],
        // Which element-wise results are saved is the target's own choice: numbers and exchanges are
        // the same.
        lacks: &[
            // Megatron-LM has modules and numbers of layers: its export says which.
            lack(
                &[Torchtitan, Deepspeed, Nanotron],
                |o| {
                    use Recompute::{Elementwise, Full, None};
                    !matches!(o.recompute, None | Elementwise | Full)
                },
                "recomputation by op, by module or of some layers (--recompute)",
            ),
            lack(
                &[Deepspeed],
                |o| o.recompute == Recompute::Full,
                "recomputation: it belongs in the model, not in the config",
            ),
        ],
        ..LAYOUT
    },
    OptionSpec {
        flag: "loss-chunks",
        value: "N|auto",
        help: "Compute the loss and its gradients in N chunks of tokens, so that the full logits \
               are never in memory; auto: the fewest with which a rank fits --memory or, without \
               it, with which no more chunks save over 1 %",
        default: "1",
        set: read_loss_chunks,
        keys: &[key("loss_chunks", "chunk-loss")],
        trains: true,
        // A loss that is whole goes without saying.
        said: Some((70, |o| {
            let asked = trains(o) && o.loss_chunks != LossChunks::default();
            asked.then(|| format!("loss chunks {}", o.loss_chunks))
        })),
        rows: &[row("Step", "loss chunks", |s| trained(s, s.options.loss_chunks))],
        lacks: &[lack(
            TRAINERS,
            |o| o.loss_chunks != LossChunks::Of(1),
            "a loss in chunks of tokens (--loss-chunks)",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "memory",
        value: "BYTES",
        help: "Memory of a rank: 24GiB, 80e9, or a machine's (h100-sxm); a plan that needs more is \
               refused",
        set: read_memory,
        keys: &[key("memory", "").priced()],
        rows: &[row("Step", "memory limit", |s| s.options.memory.map(shardc_ir::diag::bytes))],
        ..LAYOUT
    },
    OptionSpec {
        flag: "hardware",
        value: "NAME|FILE.toml",
        help: "Hardware for choices by estimated cost (--shard auto, --schedule search, \
               --recompute fit, and products with an epilogue, if it says how fast ours are): a \
               machine as for `shardc plan --machine`, or a TOML file with any of: link (bytes/s, \
               and by axis in a table `links`), memory (bytes/s), flops (1/s), latency, start, \
               line (s), own.flops and own.memory of products with an epilogue",
        default: "link = 50e9, memory = 1e12, flops = 50e12, latency = 10e-6, start = 1e-6, line = \
                  50e-9",
        keys: &[
            key("machine", "").unstored(),
            key("hardware", "")
                .priced()
                .range(|o| o.hardware.clone().checked().is_ok(), "its speeds are above 0"),
        ],
        idle: &[idle(
            |s| {
                let is = |flag, word| s.flags.text(flag) == Some(word);
                let joins = s.o.hardware.own.is_some() && s.o.fuse == Fuse::Yes;
                !(s.o.auto || is("schedule", "search") || is("recompute", "fit") || joins)
            },
            "nothing is chosen by price",
        )],
        ..LAYOUT
    },
    OptionSpec {
        flag: "shard",
        value: "GLOB=D,D|auto",
        help: "Sharding of a checkpoint tensor, or of the last value of a scope: D is -, ?, an \
               axis, a*b or a:(k)n, then @pN; or one of the words colwise, rowwise, replicated, \
               for a tensor or the weight and bias of a scope. In a GLOB `*` and `?` are \
               wildcards, and nothing else; repeatable, the last one holds. auto: layouts of all \
               values and parameters are chosen by estimated cost, regardless of the names of the \
               axes",
        kind: Kind::Many,
        set: read_shard,
        keys: &[key("shard", "annotate"), key("auto", "partition").word("--shard auto")],
        idle: &[Idle {
            value: "auto",
            when: |s| s.o.mesh.iter().all(|a| a.1 < 2),
            why: "one rank has nothing to split",
        }],
        rows: &[
            row("Parallelism", "layouts by estimated cost", |s| Some(yes(s.options.auto))),
            row("Optimizer", "other layouts", |s| {
                let n = s.options.shard.len();
                (n > 0).then(|| format!("{n} by --shard"))
            }),
        ],
        lacks: &[
            lack(TRAINERS, |o| o.auto, "a layout for every op (--shard auto)"),
            lack(TRAINERS, |o| !o.shard.is_empty(), "layouts of single tensors (--shard)"),
            lack(
                &[HfTpPlan],
                |o| o.auto || !o.shard.is_empty(),
                "layouts of single tensors (--shard)",
            ),
        ],
        ..LAYOUT
    },
];

/// On one stage some schedules are one order; all backwards behind all forwards is another one.
fn is_one_order(s: &Seen) -> bool {
    let in_turn = s.flags.text("schedule").is_some_and(|s| ["1f1b", "zb-h1", "zb-h2"].contains(&s));
    s.one_stage() && s.o.chunks.is_none() && (in_turn || s.o.microbatches() == 1)
}
