//! Options of training: the optimizer, its learning rate, what it trains, and how losses are scaled
//! and balanced.

use super::options::{
    read_adapter, read_balance, read_loss_scaling, read_mtp, read_optimizer, read_rate, read_rules,
};
use super::shown::{lower, of_experts, trained, trains};
use super::spec::{Idle, Key, Kind, OptionSpec, Seen, TRAINERS, idle, key, lack, row, word};
use super::values::{not_negative, positive};
use crate::flags::Target::{Deepspeed, Torchtitan};
use crate::seal::hash;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::text::update::BUILT_IN;
use shardc_ir::types::DType;
use shardc_passes::lora::Lora;
use shardc_passes::optim::{own_rules, place, rules};
use shardc_passes::options::{Optimizer, Options};

const OPTIMIZER: OptionSpec = OptionSpec { heading: "Optimizer", ..OptionSpec::NONE };
const NUMBER: OptionSpec = OptionSpec { kind: Kind::Number, ..OPTIMIZER };

/// What `plan` and torchtitan's own config take, too, and belongs to an optimizer.
const OF_IT: OptionSpec =
    OptionSpec { in_plan: true, trains: true, elsewhere: &[Torchtitan], ..OPTIMIZER };
/// A part of the learning rate, which `run` takes, too.
const RATE: OptionSpec = OptionSpec { set: read_rate, keys: &[LR], in_run: true, ..OF_IT };
/// A part of how the loss is scaled.
const SCALE: OptionSpec = OptionSpec {
    value: "SCALE",
    kind: Kind::Number,
    set: read_loss_scaling,
    keys: &[key("loss_scaling", "").trained()],
    in_plan: true,
    idle: &[UNSCALED, FIXED],
    ..OPTIMIZER
};
/// A part of what keeps experts in balance.
const BALANCING: OptionSpec =
    OptionSpec { value: "F", set: read_balance, keys: &[BALANCE], in_plan: true, ..NUMBER };

const BALANCE: Key = key("balance", "experts").trained().range(
    |o| {
        let all = [o.balance.aux.unwrap_or(0.0), o.balance.z, o.balance.rate];
        all.iter().all(|&x| x >= 0.0)
    },
    "none is below 0",
);
const KIND: Key = key("optimizer", "step").trained().range(
    |o| match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => {
            let is = |x: f64| (0.0..1.0).contains(&x);
            is(beta1) && is(beta2) && eps > 0.0
        }
        Optimizer::Sgd => true,
    },
    "betas are in 0..1, eps is above 0",
);
const GROUPS: Key = key("optim", "step").trained();
const LR: Key = key("lr", "").range(
    |o| {
        let is = |lr: f64| lr > 0.0 && (lr as f32).is_normal();
        is(o.lr.peak()) && o.lr.fall().is_none_or(|f| f.is_valid())
    },
    "it is above 0 and falls, after a warmup that ends before it does",
);

const LORA: Key = key("lora", "experts").trained().word("--lora").range(
    |o| o.lora.clone().is_none_or(|l| l.checked().is_ok()),
    "r is above 0, alpha is not 0, dropout is in 0..1",
);

const UNSCALED: Idle =
    idle(|s| !is_scaled(s) || !s.trains(), "the loss is scaled only in training with --dtype f16");
const FIXED: Idle = idle(
    |s| {
        let fixed = matches!(s.o.loss_scaling, LossScaling::Constant { .. });
        is_scaled(s) && s.trains() && fixed
    },
    "--loss-scale stays as it is",
);
const CONSTANT: Idle = idle(
    |s| s.trains() && s.o.lr.fall().is_none(),
    "it belongs to --lr-schedule warmup-cosine and warmup-linear",
);

pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        flag: "moe-aux",
        help: "Coefficient of the auxiliary load-balancing loss; 0 turns it off",
        default: "the config's",
        rows: &[row("Numbers", "expert balancing", |s| of_experts(s, balance(&s.options)))],
        elsewhere: &[Torchtitan, Deepspeed],
        ..BALANCING
    },
    OptionSpec {
        flag: "moe-z-loss",
        help: "Coefficient of the router z-loss, which keeps router logits small",
        default: "0",
        elsewhere: &[Torchtitan, Deepspeed],
        ..BALANCING
    },
    OptionSpec {
        flag: "moe-bias-rate",
        help: "Update rate of router biases per step, towards experts that were chosen too rarely \
               (for families whose routers have a bias)",
        default: "0",
        lacks: &[lack(
            TRAINERS,
            |o| o.balance.rate != 0.0,
            "updates of router biases (--moe-bias-rate)",
        )],
        ..BALANCING
    },
    OptionSpec {
        flag: "mtp",
        value: "F",
        help: "Train the layers that predict tokens behind the next one (multi-token prediction), with this weight of \
               their loss; 0 leaves them out",
        default: "0",
        set: read_mtp,
        keys: &[key("mtp", "experts").trained().range(|o| o.mtp >= 0.0, "it is not below 0")],
        in_plan: true,
        trains: true,
        lacks: &[lack(TRAINERS, |o| o.mtp != 0.0, "multi-token prediction (--mtp)")],
        ..NUMBER
    },
    OptionSpec {
        flag: "optimizer",
        help: "adamw, sgd, lion, adafactor, or muon, which updates matrices of layers and leaves the rest to \
               AdamW",
        default: "adamw",
        kind: Kind::Words(&["adamw", "sgd", "lion", "adafactor", "muon"]),
        set: read_optimizer,
        keys: &[KIND, GROUPS],
        said: Some((10, |o| Some(if trains(o) { name(o) } else { "no training".into() }))),
        rows: &[row("Optimizer", "optimizer", |s| trained(s, name(&s.options)))],
        ..OF_IT
    },
    OptionSpec {
        flag: "optim",
        value: "GLOB[+GLOB]=RULE[,ATTRIBUTE=VALUE]",
        help: "Update rule of the checkpoint tensors that match: a rule's name, lr= (a peak rate on the \
               schedule), lr*= (a factor) and attributes of the rule; repeatable, later ones win",
        kind: Kind::Many,
        set: read_optimizer,
        keys: &[GROUPS],
        in_plan: true,
        rows: &[
            row("Optimizer", "groups", |s| {
                let all = &s.options.optim;
                (!all.is_empty()).then(|| trained(s, all.join("; "))).flatten()
            }),
            row("Optimizer", "update rules", |s| {
                let some = !s.options.optim.is_empty();
                some.then(|| trained(s, texts(&s.options))).flatten()
            }),
        ],
        trains: true,
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "optim-file",
        value: "FILE",
        help: "Update rules as text, found by name before those that are built in",
        kind: Kind::Text,
        set: read_rules,
        keys: &[key("optim_file", "step").trained()],
        in_plan: true,
        trains: true,
        idle: &[idle(without_own, "no group names a rule of it: add --optim 'GLOB=NAME'")],
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "muon-dtype",
        value: "DTYPE",
        help: "Element type in which --optimizer muon iterates: bf16 or f32",
        default: "bf16",
        kind: Kind::Words(&["bf16", "f32"]),
        set: read_optimizer,
        keys: &[GROUPS],
        in_plan: true,
        trains: true,
        idle: &[idle(
            |s| s.trains() && s.flags.text("optimizer") != Some("muon"),
            "it belongs to --optimizer muon; of other groups write dtype=f32 in --optim",
        )],
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "lr",
        help: "Learning rate",
        default: "1e-3",
        kind: Kind::Number,
        rows: &[row("Optimizer", "learning rate", |s| trained(s, s.options.lr))],
        ..RATE
    },
    OptionSpec {
        flag: "lr-schedule",
        help: "constant, or a rise along a line and a fall along a half cosine or a line",
        default: "constant",
        kind: Kind::Words(&["constant", "warmup-cosine", "warmup-linear"]),
        ..RATE
    },
    OptionSpec {
        flag: "warmup",
        help: "Steps over which the learning rate rises from 0 along a line",
        kind: Kind::Whole(0, usize::MAX),
        idle: &[CONSTANT],
        ..RATE
    },
    OptionSpec {
        flag: "total-steps",
        help: "Step at which the learning rate has fallen to --min-lr",
        default: "1000",
        kind: Kind::Whole(0, usize::MAX),
        idle: &[CONSTANT],
        ..RATE
    },
    OptionSpec {
        flag: "decay-steps",
        help: "Steps over which it falls, the last before --total-steps; before them it stays at --lr",
        default: "all behind the warmup",
        kind: Kind::Whole(1, usize::MAX),
        idle: &[CONSTANT],
        ..RATE
    },
    OptionSpec {
        flag: "min-lr",
        value: "LR",
        help: "Learning rate to which it falls, and at which it stays",
        default: "0",
        kind: Kind::Number,
        idle: &[CONSTANT],
        ..RATE
    },
    OptionSpec {
        flag: "betas",
        help: "Betas of AdamW, or of Lion",
        default: "0.9,0.999",
        set: read_optimizer,
        keys: &[KIND],
        idle: &[idle(without_betas, "they are those of --optimizer adamw and lion")],
        rows: &[row("Optimizer", "betas", |s| match s.options.optimizer {
            Optimizer::AdamW { beta1, beta2, .. } => trained(s, format!("{beta1}, {beta2}")),
            Optimizer::Sgd => None,
        })],
        ..OF_IT
    },
    OptionSpec {
        flag: "eps",
        help: "AdamW's epsilon",
        default: "1e-8",
        kind: Kind::Number,
        set: read_optimizer,
        keys: &[KIND],
        idle: &[idle(without_adamw, "it is that of --optimizer adamw")],
        rows: &[row("Optimizer", "epsilon", |s| match s.options.optimizer {
            Optimizer::AdamW { eps, .. } => trained(s, format!("{eps:e}")),
            Optimizer::Sgd => None,
        })],
        ..OF_IT
    },
    OptionSpec {
        flag: "weight-decay",
        help: "Decoupled weight decay",
        default: "0.01",
        kind: Kind::Number,
        set: |o, g| {
            o.weight_decay = not_negative(&g.flag(), g.number(), "0.1")?;
            Ok(())
        },
        keys: &[key("weight_decay", "step")
            .trained()
            .range(|o| o.weight_decay >= 0.0, "it is not below 0")],
        rows: &[row("Optimizer", "weight decay", |s| trained(s, s.options.weight_decay))],
        ..OF_IT
    },
    OptionSpec {
        flag: "decay",
        help: "Parameters with weight decay: all, or matrices",
        default: "matrices",
        kind: Kind::Words(&["all", "matrices"]),
        set: word!(decay),
        keys: &[key("decay", "step").trained()],
        idle: &[idle(|s| s.trains() && s.o.weight_decay == 0.0, "--weight-decay is 0")],
        rows: &[row("Optimizer", "decayed parameters", |s| trained(s, lower(&s.options.decay)))],
        ..OF_IT
    },
    OptionSpec {
        flag: "clip",
        help: "Maximum global gradient norm, for gradient clipping",
        default: "off",
        set: |o, g| {
            o.clip = Some(positive(&g.flag(), g.number(), "1")?);
            Ok(())
        },
        keys: &[key("clip", "step")
            .trained()
            .range(|o| o.clip.is_none_or(|x| x > 0.0), "it is above 0")],
        in_plan: true,
        trains: true,
        rows: &[row("Optimizer", "clip", |s| s.options.clip.and_then(|c| trained(s, c)))],
        ..NUMBER
    },
    OptionSpec {
        flag: "loss-scale",
        help: "Constant loss scale (f16), a power of 2",
        default: "dynamic loss scaling",
        idle: &[UNSCALED],
        rows: &[row("Optimizer", "loss scale", |s| {
            s.plan.settings.loss_scaling.map(|how| match how {
                LossScaling::Constant { scale } => f64::from(scale).to_string(),
                LossScaling::Dynamic { initial, .. } => {
                    format!("dynamic, from {}", f64::from(initial))
                }
            })
        })],
        ..SCALE
    },
    OptionSpec {
        flag: "initial-loss-scale",
        help: "Loss scale of the first step (f16), a power of 2",
        default: "4294967296, 2^32",
        ..SCALE
    },
    OptionSpec {
        flag: "min-loss-scale",
        help: "Minimum loss scale (f16), a power of 2; the next overflow there ends the run",
        default: "1",
        ..SCALE
    },
    OptionSpec {
        flag: "loss-scale-window",
        value: "STEPS",
        help: "Consecutive steps without overflow after which the loss scale is doubled (f16)",
        default: "1000",
        kind: Kind::Whole(1, u32::MAX as usize),
        ..SCALE
    },
    OptionSpec {
        flag: "hysteresis",
        value: "N",
        help: "The number of overflows, counted since the loss scale was last doubled, from which \
               on each overflow halves it (f16)",
        default: "2",
        kind: Kind::Whole(1, u32::MAX as usize),
        ..SCALE
    },
    OptionSpec {
        flag: "freeze",
        value: "GLOB",
        help: "Checkpoint tensors that are not trained; repeatable",
        kind: Kind::Many,
        set: |o, g| {
            o.freeze = g.value.many().to_vec();
            Ok(())
        },
        keys: &[key("freeze", "partition").trained()],
        in_plan: true,
        trains: true,
        rows: &[row("Optimizer", "frozen", |s| {
            let all = &s.options.freeze;
            (!all.is_empty()).then(|| trained(s, all.join(", "))).flatten()
        })],
        lacks: &[lack(
            TRAINERS,
            |o| !o.freeze.is_empty(),
            "parameters that are not trained, by name (--freeze)",
        )],
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "lora",
        value: "r=R,..",
        help: "Train low-rank adapters and nothing else: r=16[,alpha=32][,targets=q_proj+v_proj][,dropout=0.05]\
               [,rslora]; alpha is 2r unless given. Targets are ends of paths of modules, globs over the paths, \
               linear (all products of the layers) or experts",
        default: "off",
        set: |o, g| {
            o.lora = Some(Lora::parse(g.text())?);
            Ok(())
        },
        keys: &[LORA],
        in_plan: true,
        trains: false,
        rows: &[row("Optimizer", "adapters", |s| s.options.lora.as_ref().map(Lora::to_string))],
        lacks: &[lack(TRAINERS, |o| o.lora.is_some(), "adapters (--lora)")],
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "lora-from",
        value: "DIR",
        help: "Adapters as those in a folder that PEFT wrote: rank, alpha, targets, dropout, and modules that are \
               trained whole beside them are those of its adapter_config.json",
        set: |o, g| {
            o.lora = Some(read_adapter(g)?);
            Ok(())
        },
        keys: &[LORA],
        in_plan: true,
        ..OPTIMIZER
    },
    OptionSpec {
        flag: "train",
        value: "GLOB",
        help: "Checkpoint tensors that are trained beside adapters; repeatable",
        kind: Kind::Many,
        set: |o, g| {
            o.train = g.value.many().to_vec();
            Ok(())
        },
        keys: &[key("train", "partition").trained()],
        in_plan: true,
        trains: true,
        rows: &[row("Optimizer", "trained beside adapters", |s| {
            let whole = s.options.lora.iter().flat_map(|l| &l.whole);
            let all: Vec<&str> = s.options.train.iter().chain(whole).map(|x| &**x).collect();
            (!all.is_empty()).then(|| trained(s, all.join(", "))).flatten()
        })],
        ..OPTIMIZER
    },
];

/// Some value is f16.
fn is_scaled(s: &Seen) -> bool {
    s.o.dtype == DType::F16 || s.model.values.iter().any(|v| v.ty.dtype == DType::F16)
}

/// Something is trained, and by none of these rules.
fn without(s: &Seen, names: &[&str]) -> bool {
    s.trains() && !rules(s.o).iter().any(|r| names.contains(&&**r))
}

/// Something is trained, and nothing by the AdamW of the group of all.
fn without_adamw(s: &Seen) -> bool {
    without(s, &["adamw"]) || (s.trains() && s.o.optimizer == Optimizer::Sgd)
}

/// The same, and not by `--optimizer lion`, whose group has the betas.
fn without_betas(s: &Seen) -> bool {
    without_adamw(s) && !s.o.optim.first().is_some_and(|t| t.starts_with("*=lion,beta1="))
}

/// Something is trained, and nothing by a rule of the user's own text.
fn without_own(s: &Seen) -> bool {
    s.trains() && own_rules(s.o).is_empty()
}

/// Where the texts of the update rules are from, each with the beginning of its hash: a proof is one of these texts.
fn texts(o: &Options) -> String {
    let one = |name: String| {
        let head = format!("@{name}(");
        let of = |text: &str| -> String {
            let all = format!("\n{text}");
            all.split("\nupdate ").filter(|rule| rule.starts_with(&head)).collect()
        };
        let (own, built_in) = (of(&o.optim_file), of(BUILT_IN));
        let (text, from) = match own.is_empty() {
            true => (built_in, "built in"),
            false => (own, place(o)),
        };
        format!("@{name} {from}, {}", &hash(text.as_bytes())[..8])
    };
    rules(o).into_iter().map(one).collect::<Vec<String>>().join("; ")
}

/// The optimizer, in a few words.
pub fn name(o: &Options) -> String {
    let own = own_rules(o);
    let one = |rule: String| match &*rule {
        _own if own.contains(&rule) => format!("@{rule}"),
        "adamw" => "AdamW".into(),
        "sgd" => "SGD".into(),
        "lion" => "Lion".into(),
        "muon" => "Muon".into(),
        "adafactor" => "Adafactor".into(),
        _own => rule,
    };
    rules(o).into_iter().map(one).collect::<Vec<String>>().join(" and ")
}

/// What keeps experts in balance, in words.
fn balance(o: &Options) -> String {
    let b = &o.balance;
    let aux = b.aux.map_or("from the config".into(), |x| x.to_string());
    format!("aux {aux}, z {}, rate {}", b.z, b.rate)
}
