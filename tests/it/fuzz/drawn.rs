//! Commands of which all is drawn: texts of models with any flags, programs that `--from` and `opt` begin with, with
//! edits, plans with edits and their hashes made anew, and variables of launchers.

use super::edits::{Kind, Texts};
use super::mutate::{Draw, NUMBERS, words};
use super::programs::axes::Axes;
use super::programs::drawn::{For, ROWS, program};
use clap::CommandFactory;
use shardc::commands::Cli;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::NAMES;
use shardc_ir::samples::Sample;
use shardc_ir::text::type_text;
use shardc_ir::text::update::BUILT_IN;
use shardc_testing::texts::{Draws, mutate};
use std::path::Path;

/// What is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Text,
    From,
    Plan,
    Launcher,
    Rules,
}

/// A command, and what it finds.
pub struct Drawn {
    pub args: Vec<String>,
    pub variables: Vec<(&'static str, String)>,
    /// Files, by their paths.
    pub files: Vec<(String, Vec<u8>)>,
    /// Whether the hashes of the plan `lie` are made anew.
    pub sealed: bool,
}

/// Folders with a plan each, and with the programs of its passes in `dumps`: a model, and the flags.
pub const PLANS: [(&str, &str, &str); 6] = [
    ("lie0", "llama_mha", "--mesh tp=2 --sp --seq 4 --global-batch 2"),
    ("lie1", "llama_mha", "--mesh pp=2 --microbatch 1 --seq 4 --global-batch 2"),
    ("lie2", "mixtral", "--mesh dp_shard=2,ep=2 --seq 4 --global-batch 2"),
    ("lie3", "gpt2", "--mesh dp_shard=2 --zero 3 --seq 4 --global-batch 2 --clip 1"),
    ("lie4", "gemma2", "--seq 4 --global-batch 1 --dtype bf16"),
    ("lie5", "qwen3", "--mesh cp=2 --cp-mode ring --seq 4 --global-batch 1"),
];

/// Values of flags, where no list of them is part of the command line. The others get numbers and words.
const VALUES: &[(&str, &[&str])] = &[
    (
        "mesh",
        &[
            "tp=2",
            "dp=2,tp=2",
            "pp=2",
            "dp_shard=4",
            "cp=2",
            "dp=2,ep=2",
            "tp=3",
            "tp=4",
            "dp=auto",
        ],
    ),
    ("gpus", &["2", "4"]),
    ("order", &["tp-cp-ep-dp-pp", "pp-dp-tp"]),
    ("node", &["1", "2", "8"]),
    ("zero", &["0", "1", "2", "3"]),
    ("zero-accumulate", &["gradients", "weights", "both", "none"]),
    ("moe-bound", &["1", "1.5"]),
    ("moe-capacity", &["0.5", "1"]),
    ("cp-mode", &["all-gather", "ring", "ulysses"]),
    ("cp-split", &["contiguous", "zigzag"]),
    ("tp-mode", &["1d", "2d", "2.5d", "3d"]),
    ("tp-depth", &["1", "2"]),
    ("tp-steps", &["gathered", "summa"]),
    (
        "schedule",
        &[
            "naive",
            "gpipe",
            "1f1b",
            "interleaved",
            "looped-bfs",
            "zb-h1",
            "zb-v",
            "v-min",
            "dualpipe-v",
        ],
    ),
    ("chunks", &["1", "2"]),
    ("layers", &["balanced", "equal", "1,1", "Et|tL", "model.layers.1"]),
    ("speeds", &["1,0.5"]),
    ("reshard-after-forward", &["yes", "no"]),
    (
        "recompute",
        &[
            "none",
            "selective",
            "full",
            "sqrt",
            "every:2",
            "layers:1",
            "ops:gelu",
            "mix:(1*full+none)",
            "fit",
        ],
    ),
    ("loss-chunks", &["1", "2", "auto"]),
    ("memory", &["1000", "1MiB", "80e9", "h100-sxm"]),
    ("hardware", &["h100-sxm"]),
    ("shard", &["auto", "*=tp", "*=-,tp", "*.weight=dp*tp,-", "*=?", "model.layers.*=tp,-,-"]),
    ("mode", &["train", "infer"]),
    ("global-batch", &["1", "2", "4", "8"]),
    ("microbatch", &["1", "2", "4"]),
    ("seq", &["1", "3", "4"]),
    ("dtype", &["f32", "bf16", "f16"]),
    ("grad-dtype", &["f32", "bf16", "f16"]),
    ("fuse", &["yes", "rows", "no"]),
    ("dropout", &["config", "0.5"]),
    ("documents", &["rows", "eod=1", "eod=1,pad=0"]),
    ("transport", &["threads", "mpi", "nccl"]),
    ("optimizer", &["adamw", "sgd"]),
    ("lr-schedule", &["constant", "warmup-cosine", "warmup-linear"]),
    ("decay-steps", &["0", "1", "7", "18446744073709551615"]),
    ("betas", &["0.9,0.95"]),
    ("decay", &["all", "matrices"]),
    ("freeze", &["*", "w*", "p*"]),
    ("lora", &["r=1", "r=2,targets=*w*", "r=1,dropout=0.5,rslora", "r=0", "r=1,targets=experts"]),
    ("train", &["*", "w*"]),
    ("prove", &["auto", "yes", "no"]),
    ("dump-after", &["annotate", "partition", "differentiate", "memory"]),
];

/// Flags that are not drawn: files, help, and what needs a compiler for devices.
const LEFT_OUT: [&str; 9] =
    ["output", "help", "version", "dump-all", "from", "device", "arch", "pass", "text"];

/// What may be asked of a plan, each with the folder in place of `{}`.
const ASKED: &[&str] = &[
    "run {} --steps 1 --threads 1 --kernels interpreted --format json",
    "inspect {}",
    "inspect {} --local",
    "inspect {} --rank 1 --format json",
    "inspect {} --summary",
    "inspect {} --ranks=all",
    "inspect {} --collectives",
    "inspect {} --rank 0 --instructions",
    "inspect {} --timeline",
    "inspect {} --timeline --svg made.svg",
    "inspect {} --phase kernels",
    "inspect {} --phase partition",
    "explain {} schedule",
    "explain {} transfers",
    "explain {} memory",
    "explain {} price",
    "explain {} collective:1",
    "explain {} %loss",
    "explain {} tensor:lm_head.weight",
    "prove {} --by both",
    "prove {} --by both --text",
    "prove {} --by field --format json",
    "verify {}",
    "verify {} --numbers",
    "verify {} --tiny",
    "price {} --device h100-sxm --explain",
    "report {} --device h100-sxm -o made.html",
    "export {} --to megatron",
    "export {} --to torchtitan",
    "export {} --to deepspeed",
    "export {} --to nanotron",
    "export {} --to hf-tp-plan",
    "export {} --to dtensor",
    "export {} --to chakra -o out",
    "diff plan {}",
    "launch-script {} --for slurm",
    "launch-script {} --for k8s",
    "launch-script {} --for torchrun",
    "compile {}/model.ir -o out",
];

/// The variables of launchers, as one process of one or the first of two has them.
const LAUNCHERS: [&[(&str, &str)]; 5] = [
    &[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")],
    &[
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ],
    &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")],
    &[
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "1"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_NTASKS_PER_NODE", "1"),
    ],
    &[
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29517"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("SHARDC_SECRET", "0123456789abcdef"),
    ],
];

impl Draws for Draw {
    fn below(&mut self, n: usize) -> usize {
        Draw::below(self, n)
    }
}

fn split(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

/// Some flags of a command, with values that fit mostly.
fn flags(command: &str, draw: &mut Draw) -> Vec<String> {
    let mut cli = Cli::command();
    cli.build();
    let own = cli.find_subcommand(command).expect("a command");
    let all: Vec<&clap::Arg> = own
        .get_arguments()
        .filter(|a| a.get_long().is_some_and(|name| !LEFT_OUT.contains(&name)))
        .collect();
    let mut out = vec![];
    for _ in 0..draw.below(5) {
        let a = draw.pick(&all);
        let name = a.get_long().expect("it is filtered by it");
        if !a.get_action().takes_values() {
            out.push(format!("--{name}"));
            continue;
        }
        let possible: Vec<String> =
            a.get_possible_values().iter().map(|v| v.get_name().to_string()).collect();
        let known = VALUES.iter().find(|v| v.0 == name).map(|v| v.1);
        let value = match (known, &possible[..]) {
            (Some(known), _) => draw.pick(known).to_string(),
            (None, []) => draw.pick(&NUMBERS).to_string(),
            (None, some) => some[draw.below(some.len())].clone(),
        };
        let value = if draw.below(8) == 0 { words(&value, draw) } else { value };
        out.push(format!("--{name}={value}"));
    }
    out
}

/// A model of one op.
fn of_one_op(s: &Sample) -> String {
    let mesh = Mesh::default();
    let ty = |t| type_text(&mesh, t);
    let args = s.ins.iter().enumerate();
    let args = args.map(|(i, t)| format!("%x{i}: {} input \"x{i}\"", ty(t)));
    let types = s.types();
    let outs: Vec<String> = (0..types.len()).map(|i| format!("%y{i}")).collect();
    let made: Vec<String> = types.iter().map(ty).collect();
    let heads = made.iter().enumerate().map(|(i, t)| format!("{t} output \"y{i}\""));
    let mut op = String::new();
    s.op.write(&mesh, &mut op);
    format!(
        "func @model({}) -> ({}) {{\n  {} = {op} {} : {}\n  return {}\n}}\n",
        args.collect::<Vec<_>>().join(", "),
        heads.collect::<Vec<_>>().join(", "),
        outs.join(", "),
        (0..s.ins.len()).map(|i| format!("%x{i}")).collect::<Vec<_>>().join(", "),
        made.join(", "),
        outs.join(", "),
    )
}

/// A text of a model, and flags that fit it.
fn model(dir: &Path, samples: &[Sample], draw: &mut Draw) -> (String, Vec<String>) {
    match draw.below(4) {
        0 => {
            let text = of_one_op(&samples[draw.below(samples.len())]);
            (text, if draw.below(4) == 0 { vec![] } else { split("--mode infer") })
        }
        1 => {
            let (plan, _, flags) = PLANS[draw.below(PLANS.len())];
            let text = std::fs::read_to_string(dir.join(plan).join("model.ir")).expect("a model");
            (text, split(flags))
        }
        _ => {
            let axes = Axes::draw(draw, 4);
            let seq = [3, 4, 6][draw.below(3)];
            let asks = [0, 1, 2, 4][draw.below(4)];
            let shown = draw.below(2) == 0;
            let text = program(draw, &For { axes: &axes, seq, asks, shown });
            let mesh: Vec<String> = axes.mesh.iter().map(|(n, s)| format!("{n}={s}")).collect();
            let (mesh_of, rows) = (mesh.join(","), ROWS / axes.rows());
            let rest =
                format!("--mesh {mesh_of} --seq {seq} --global-batch {ROWS} --microbatch {rows}");
            let ours = draw.below(4) > 0 && !mesh.is_empty();
            (text, if ours { split(&rest) } else { vec![] })
        }
    }
}

/// The first of flags that are given twice, unless they may be.
fn without_twice(all: Vec<String>) -> Vec<String> {
    let (mut out, mut known): (Vec<String>, Vec<String>) = (vec![], vec![]);
    let mut words = all.into_iter().peekable();
    while let Some(word) = words.next() {
        let name = word.split('=').next().unwrap_or("").to_string();
        let again = name.starts_with("--") && name != "--shard" && known.contains(&name);
        known.push(name);
        let value = words.next_if(|w| !w.starts_with("--"));
        if !again {
            out.push(word);
            out.extend(value);
        }
    }
    out
}

fn text(dir: &Path, samples: &[Sample], draw: &mut Draw) -> Drawn {
    let (own, fit) = model(dir, samples, draw);
    let (other, _) = model(dir, samples, draw);
    let new = if draw.below(3) == 0 { own } else { edited(&own, &other, draw) };
    let (command, args) = match draw.below(6) {
        0 | 1 => ("check", split("check drawn.ir")),
        2 => {
            let all: Vec<&str> = shardc_passes::pipeline::names().collect();
            let pass = all[draw.below(all.len())];
            ("opt", split(&format!("opt drawn.ir --pass {pass}")))
        }
        3 => ("compile", split("compile drawn.ir --verify-each")),
        _ => ("compile", split("compile drawn.ir -o out")),
    };
    let known = flags(command, draw);
    let args = without_twice([args, known, fit].concat());
    Drawn { files: vec![("drawn.ir".into(), new.into_bytes())], ..Drawn::of(args) }
}

/// A program of a pass, edited as programs of plans are or as any text.
fn edited(own: &str, other: &str, draw: &mut Draw) -> String {
    if draw.below(3) == 0 {
        return mutate(draw, NAMES, own, other);
    }
    let mut t = Texts::of_programs(own.into());
    for _ in 0..=draw.below(3) {
        [Kind::Sizes, Kind::Attributes, Kind::Operands, Kind::Roles][draw.below(4)]
            .edit(&mut t, draw);
    }
    t.programs
}

fn from(dir: &Path, draw: &mut Draw) -> Drawn {
    let (plan, fixture, fit) = PLANS[draw.below(PLANS.len())];
    let dumps = dir.join(format!("{plan}-dumps"));
    let mut all: Vec<String> = std::fs::read_dir(&dumps)
        .expect("the dumps")
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".ir"))
        .collect();
    all.sort();
    let read = |name: &str| std::fs::read_to_string(dumps.join(name)).expect("a program");
    let at = draw.below(all.len());
    let other = draw.below(all.len());
    let new = edited(&read(&all[at]), &read(&all[other]), draw);
    let pass =
        |name: &str| name.split_once('-').map_or("", |x| x.1).trim_end_matches(".ir").to_string();
    // Mostly the pass that follows.
    let next = if draw.below(8) == 0 { draw.below(all.len()) } else { (at + 1).min(all.len() - 1) };
    let next = pass(&all[next]);
    let line = match draw.below(3) {
        0 => format!("opt drawn.ir --pass {next} {fit}"),
        1 => format!("compile {fixture} --from {next} drawn.ir --prove no -o out {fit}"),
        _ => format!("compile {fixture} --from {next} drawn.ir {fit}"),
    };
    Drawn { files: vec![("drawn.ir".into(), new.into_bytes())], ..Drawn::of(split(&line)) }
}

fn plan(dir: &Path, draw: &mut Draw) -> Drawn {
    let own = PLANS[draw.below(PLANS.len())].0;
    let name = |file: &str| format!("lie/{file}");
    let read = |file: &str| std::fs::read_to_string(dir.join(own).join(file)).expect("a text");
    let mut model = read("model.ir");
    let mut config = read("config.json");
    let mut t = Texts {
        programs: read("programs/all.ir"),
        head: read("plan.json"),
        options: read("options.toml"),
        weights: read("weights.json"),
        schedule: read("schedule.csv"),
    };
    for _ in 0..=draw.below(8) / 6 {
        match draw.below(8) {
            0..3 => model = edited(&model.clone(), &t.programs, draw),
            3 => config = words(&config, draw),
            4 => {
                let at = draw.below(5);
                let of =
                    [&mut t.programs, &mut t.head, &mut t.options, &mut t.weights, &mut t.schedule];
                let of = of.into_iter().nth(at).expect("one of five");
                *of = words(of, draw);
            }
            _ => Kind::drawn(draw).edit(&mut t, draw),
        }
    }
    let files = [
        ("model.ir", model),
        ("config.json", config),
        ("programs/all.ir", t.programs),
        ("plan.json", t.head),
        ("options.toml", t.options),
        ("weights.json", t.weights),
        ("schedule.csv", t.schedule),
    ];
    let args = split(&draw.pick(ASKED).replace("{}", "lie"));
    let files = files.map(|(n, text)| (name(n), text.into_bytes())).into();
    Drawn { files, sealed: true, ..Drawn::of(args) }
}

fn launcher(draw: &mut Draw) -> Drawn {
    let mut variables: Vec<(&'static str, String)> = vec![];
    for _ in 0..=draw.below(2) {
        let of = draw.pick(&LAUNCHERS);
        variables.extend(of.iter().map(|(n, v)| (*n, v.to_string())));
    }
    for _ in 0..=draw.below(3) {
        let i = draw.below(variables.len());
        match draw.below(4) {
            0 => drop(variables.remove(i)),
            1 => variables[i].1 = NUMBERS[draw.below(NUMBERS.len())].into(),
            _ => variables[i].1 = words(&variables[i].1, draw),
        }
        if variables.is_empty() {
            break;
        }
    }
    let line = "run lie4 --steps 1 --threads 1 --kernels interpreted --timeout 2 --silence 1";
    let mut args = split(line);
    if draw.below(4) == 0 {
        args.extend(split("--transport threads"));
    }
    Drawn { variables, ..Drawn::of(args) }
}

/// Update rules of a user, by which a model is trained.
fn rules(draw: &mut Draw) -> Drawn {
    let all: Vec<&str> = BUILT_IN.split("update @").skip(1).collect();
    let (one, other) = (all[draw.below(all.len())], all[draw.below(all.len())]);
    let name: String = one.chars().take_while(|c| c.is_ascii_alphanumeric()).collect();
    let text = mutate(draw, NAMES, &format!("update @{one}"), &format!("update @{other}"));
    let (_, fixture, fit) = PLANS[draw.below(PLANS.len())];
    let group = if draw.below(2) == 0 { "hidden" } else { "*" };
    let line = format!("compile {fixture} {fit} --optim-file drawn.ir --optim {group}={name}");
    Drawn { files: vec![("drawn.ir".into(), text.into_bytes())], ..Drawn::of(split(&line)) }
}

impl Drawn {
    fn of(args: Vec<String>) -> Drawn {
        Drawn { args, variables: vec![], files: vec![], sealed: false }
    }
}

impl Source {
    /// One of the folder of bases.
    pub fn draw(self, dir: &Path, samples: &[Sample], draw: &mut Draw) -> Drawn {
        match self {
            Source::Text => text(dir, samples, draw),
            Source::From => from(dir, draw),
            Source::Plan => plan(dir, draw),
            Source::Launcher => launcher(draw),
            Source::Rules => rules(draw),
        }
    }
}
