//! `shardc launch-script`: a file that starts a plan's ranks on a cluster.

use super::run::Engine;
use clap::ValueEnum as _;
use serde_json::json;
use shardc_ir::diag::{Diag, Result};
use shardc_plans::plan_dir;
use shardc_process::shell::{no_flag, quoted};
use shardc_process::terminal::json_line;
use shardc_train::cluster::Transport;
use std::path::PathBuf;

/// The launcher of a site.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    Slurm,
    K8s,
    Mpirun,
    Torchrun,
}

/// What a script is written for.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct LaunchScript {
    /// Folder that shardc compile wrote
    pub plan: PathBuf,
    /// The launcher
    #[arg(long = "for", value_enum)]
    pub launcher: For,
    /// What run trains on: its --data [default: random tokens, or what the script is given]
    #[arg(long, value_name = "DATA")]
    pub data: Option<String>,
    /// What run begins with where there is no checkpoint: its --weights [default: random weights]
    #[arg(long, value_name = "DIR")]
    pub weights: Option<PathBuf>,
    /// How many steps run takes: its --steps [default: those of run, or what the script is given]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: Option<u64>,
    /// How long the job may take, as Slurm has it (minutes, HH:MM:SS, D-HH:MM:SS); Slurm alone [default: the partition's]
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    pub time: Option<String>,
    /// Who computes: shardc, or torch, PyTorch's distributed runtime: of that a process on each host starts the ranks;
    /// slurm alone
    #[arg(long, value_enum, default_value_t)]
    pub engine: Engine,
    /// Cores of a process, which its threads share [default: the launcher's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub cpus_per_task: Option<u64>,
}

/// A limit of time in one of the forms of `sbatch --time`.
fn time_limit(text: &str) -> std::result::Result<String, String> {
    let (days, rest) = text.split_once('-').map_or((None, text), |(d, r)| (Some(d), r));
    let number = |x: &str| !x.is_empty() && x.len() <= 6 && x.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> = rest.split(':').collect();
    match days.is_none_or(number) && parts.len() <= 3 && parts.iter().all(|p| number(p)) {
        true => Ok(text.to_string()),
        false => Err("a time is minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS".into()),
    }
}

/// Seconds of a limit of time, which [`time_limit`] has passed: minutes, MM:SS or HH:MM:SS, behind days hours first.
fn seconds(limit: &str) -> u64 {
    let (days, rest) = limit.split_once('-').map_or(("0", limit), |(d, r)| (d, r));
    let number = |x: &str| x.parse::<u64>().unwrap_or(0);
    let parts: Vec<u64> = rest.split(':').map(number).collect();
    let units: &[u64] = match (limit.contains('-'), parts.len()) {
        (false, 1 | 2) => &[60, 1],
        _hours_first => &[3600, 60, 1],
    };
    number(days) * 86_400 + parts.iter().zip(units).map(|(n, unit)| n * unit).sum::<u64>()
}

/// Seconds before the end of a job at which it is told to save.
const BEFORE_END: u64 = 120;

/// How long before the end of a limit of time. Slurm counts limits in whole minutes, and may send a signal up to a minute
/// earlier than it is asked to: of a short job it is half of what that leaves.
fn before_end(limit: Option<&str>) -> u64 {
    match limit.map_or(0, seconds).div_ceil(60) {
        0 => BEFORE_END,
        minutes => BEFORE_END.min((minutes - 1) * 30).max(1),
    }
}

/// What differs from plan to plan.
struct Sizes {
    /// In quotes of a shell.
    plan: String,
    /// Name, flag of run, and value in quotes.
    variables: Vec<(&'static str, &'static str, String)>,
    time: Option<String>,
    cpus: Option<u64>,
    ranks: usize,
    nodes: usize,
    per_node: usize,
    /// Of a host, what a process without a device needs, in MiB: the largest peak of a rank, and what else processes
    /// need.
    memory: usize,
    /// True if ranks exchange by NCCL, on a device each.
    nccl: bool,
    /// Ranks are PyTorch's.
    torch: bool,
    /// True if the plan has it so; else it is the launcher that asks for it.
    of_plan: bool,
}

impl Sizes {
    /// What every rank runs; more flags follow.
    fn run(&self) -> String {
        let how = match (self.torch, self.nccl) {
            (true, _) => "--engine torch",
            (false, true) => "--transport nccl --device cuda",
            (false, false) => "--transport mpi",
        };
        let flags: String = self.variables.iter().map(|v| v.1).collect();
        format!("shardc run {} {how}{flags} --save \"$SAVE\" --save-every \"$EVERY\"", self.plan)
    }

    /// Variables with what they are where nobody sets them.
    fn set(&self) -> String {
        let own =
            self.variables.iter().map(|(name, _, value)| format!(" {name}=${{{name}:-{value}}}"));
        format!("SAVE=${{SAVE:-ckpt}} EVERY=${{EVERY:-100}}{}", own.collect::<String>())
    }

    /// The flag of the weights to begin with.
    fn first(&self) -> &'static str {
        if self.variables.iter().any(|v| v.0 == "WEIGHTS") { "--weights \"$WEIGHTS\"" } else { "" }
    }

    /// Goes on where the last job has ended.
    fn resume(&self) -> String {
        let (set, first) = (self.set(), self.first());
        format!(
            "# Where checkpoints go, and every how many steps; what is set when this starts, stays so.\n\
             {set}\nresume=({first})\n\
             if compgen -G \"$SAVE/step-*/index.json\" >/dev/null; then resume=(--resume \"$SAVE\"); fi\n"
        )
    }
}

/// Memory of a process beside its arena, in MiB: code, buffers of messages, libraries.
const BESIDE: usize = 512;

/// Cores of a process whose rank is on a device, where nobody says how many: its own thread looks for what the device
/// has done, beside NCCL's, which move data between nodes, and those that watch the job.
const DEVICE_CORES: u64 = 8;

/// The script for a plan, of as many ranks per node as it was compiled with (`--node`), or all; or JSON with it.
///
/// # Errors
/// `not-built` for Kubernetes if ranks exchange by NCCL, and those of reading the plan.
pub fn launch_script(how: &LaunchScript, as_json: bool) -> Result<String> {
    let (dir, launcher) = (&how.plan, how.launcher);
    let stored = plan_dir::read(dir)?;
    if launcher != For::Slurm && how.time.is_some() {
        return Err(Diag::new("flag", "a limit of time is Slurm's alone")
            .at("--time")
            .help("leave it out, or use --for slurm"));
    }
    if launcher == For::Torchrun && stored.options.transport == Transport::Mpi {
        return Err(Diag::new(
            "flag",
            "torchrun hands on no MPI, for which this plan was compiled",
        )
        .at("--for torchrun")
        .help("use --for mpirun or slurm, or compile with --transport nccl"));
    }
    let ranks = stored.plan.module.mesh.ranks();
    let per_node = stored.options.node.unwrap_or(ranks).clamp(1, ranks);
    if !ranks.is_multiple_of(per_node) {
        let even = (1..=per_node).rev().find(|n| ranks.is_multiple_of(*n)).unwrap_or(1);
        let what = format!("{ranks} ranks do not fill nodes of {per_node}");
        return Err(Diag::new("flag", what)
            .at(format!("--node {per_node}, of the plan"))
            .rule("launchers start as many processes on each node")
            .help(format!(
                "compile with --node {even}, or for a mesh whose ranks fill its nodes"
            )));
    }
    let torch = how.engine == Engine::Torch;
    if torch && launcher != For::Slurm {
        return Err(Diag::new("flag", "scripts that start PyTorch's ranks are written for Slurm")
            .at("--engine torch")
            .help("use --for slurm; on 1 machine run shardc run PLAN --engine torch"));
    }
    let of_plan = stored.options.transport == Transport::Nccl;
    let nccl = launcher == For::Torchrun || of_plan || torch;
    let s = Sizes {
        plan: quoted(&no_flag(&dir.display().to_string())),
        variables: variables(how),
        time: how.time.clone(),
        cpus: how.cpus_per_task,
        ranks,
        nodes: ranks.div_ceil(per_node),
        per_node,
        memory: stored.plan.peak_bytes().div_ceil(1 << 20) + BESIDE,
        nccl,
        torch,
        of_plan,
    };
    let script = match launcher {
        For::Slurm => slurm(&s),
        For::K8s if s.nccl => {
            return Err(Diag::new(
                "not-built",
                "no file for Kubernetes starts ranks on devices yet",
            )
            .at("--for k8s, of a plan with --transport nccl")
            .help("let a PyTorchJob run what --for torchrun prints"));
        }
        For::K8s => k8s(&s),
        For::Mpirun => mpirun(&s),
        For::Torchrun => torchrun(&s),
    };
    let word = launcher.to_possible_value().expect("no variant is hidden");
    let Sizes { ranks, nodes, per_node, .. } = s;
    Ok(match as_json {
        false => script,
        true => {
            let out = json!({
                "for": word.get_name(), "ranks": ranks, "nodes": nodes, "ranks_per_node": per_node,
                "script": script,
            });
            json_line("launch-script", out)
        }
    })
}

/// What a script says of data, steps and weights: variables, which whoever starts it may set otherwise.
fn variables(how: &LaunchScript) -> Vec<(&'static str, &'static str, String)> {
    let data = how.data.as_ref().map(|d| ("DATA", " --data \"$DATA\"", quoted(d)));
    let steps = how.steps.map(|n| ("STEPS", " --steps \"$STEPS\"", n.to_string()));
    let weights =
        how.weights.as_ref().map(|w| ("WEIGHTS", "", quoted(&no_flag(&w.display().to_string()))));
    data.into_iter().chain(steps).chain(weights).collect()
}

/// What the processes of a job know each other by, where MPI does not hand it on: a file that this user
/// alone can read, which all hosts see.
const SECRET: &str = r#"export SHARDC_SECRET_FILE=${SHARDC_SECRET_FILE:-$PWD/.shardc-secret}
if [ ! -e "$SHARDC_SECRET_FILE" ]; then
    new=$(umask 077; mktemp "$SHARDC_SECRET_FILE.XXXXXX")
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$new"
    # Of several hosts one makes it.
    ln "$new" "$SHARDC_SECRET_FILE" 2>/dev/null || [ -e "$SHARDC_SECRET_FILE" ] || mv -n "$new" "$SHARDC_SECRET_FILE" || [ -e "$SHARDC_SECRET_FILE" ]
    rm -f "$new"
fi
"#;

fn slurm(s: &Sizes) -> String {
    let Sizes { ranks, nodes, per_node, .. } = s;
    let (run, resume) = (s.run(), s.resume());
    // Of PyTorch's ranks a process on each host starts those of the host.
    let (tasks, tasks_per_node) = if s.torch { (nodes, &1) } else { (ranks, per_node) };
    let all = if s.torch { DEVICE_CORES * *per_node as u64 } else { DEVICE_CORES };
    let cores = s.cpus.or(s.nccl.then_some(all));
    let memory = match s.nccl {
        // Jobs on devices have nodes of their own.
        true => "--mem=0".to_string(),
        false => format!("--mem-per-cpu={}M", s.memory.div_ceil(cores.map_or(1, |n| n as usize))),
    };
    let cpus = cores.map_or(String::new(), |n| format!("#SBATCH --cpus-per-task={n}\n"));
    let before = before_end(s.time.as_deref());
    let time = s.time.as_ref().map_or(String::new(), |t| format!("#SBATCH --time={t}\n"));
    // Of Slurm 22.05 and later srun does not take it over from sbatch.
    let each = cores.map_or(String::new(), |n| format!(" --cpus-per-task={n}"));
    let (ports, who) = match s.torch {
        true => (
            "# Two ports of its own for each job on a node: PyTorch's, and the next.\nexport MASTER_PORT=$((20000 + SLURM_JOB_ID % 6000 * 2))\n",
            "# One process per host, which starts the host's ranks.",
        ),
        false => (
            "# A port of its own for each job on a node.\nexport MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))\n",
            "# One process per rank and device.",
        ),
    };
    // How ranks find each other.
    let (devices, meet, mpi) = match s.nccl {
        true => (
            format!("#SBATCH --gpus-per-node={per_node}\n"),
            format!("{SECRET}{ports}MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\nexport MASTER_ADDR\n{who}"),
            if s.torch { "" } else { " --gpu-bind=closest" },
        ),
        false => (
            String::new(),
            "# One process per rank; --mpi must be that of the MPI which shardc was built with (srun --mpi=list).".to_string(),
            " --mpi=pmix",
        ),
    };
    format!(
        "#!/bin/bash
# Usage: sbatch [--partition NAME --account NAME] FILE [flags of shardc run, as --data FILE --steps N; without data, random tokens]
#SBATCH --job-name=shardc
#SBATCH --nodes={nodes}
#SBATCH --ntasks={tasks}
#SBATCH --ntasks-per-node={tasks_per_node}
{cpus}#SBATCH {memory}
{time}#SBATCH --requeue --open-mode=append
# {before} seconds before its time is over, or up to a minute earlier, the job saves, and ends; start it again to go on.
#SBATCH --signal=TERM@{before}
{devices}set -euo pipefail
{resume}
{meet}
srun --kill-on-bad-exit=1{mpi}{each} {run} ${{resume[@]+\"${{resume[@]}}\"}} \"$@\"
"
    )
}

fn mpirun(s: &Sizes) -> String {
    let Sizes { ranks, per_node, .. } = s;
    let (run, resume) = (s.run(), s.resume());
    let map = s.cpus.map_or("slot".into(), |n| format!("slot:PE={n}"));
    let (meet, pass) = match s.nccl {
        true => (
            format!(
                "{SECRET}# The first host of HOSTS has rank 0.\nfirst=${{HOSTS:-$(hostname)}}\nexport MASTER_ADDR=${{MASTER_ADDR:-${{first%%[:,]*}}}} MASTER_PORT=${{MASTER_PORT:-29500}}\n"
            ),
            " -x MASTER_ADDR -x MASTER_PORT -x SHARDC_SECRET_FILE",
        ),
        false => (String::new(), ""),
    };
    format!(
        "#!/bin/bash
# Usage: HOSTS=host1:{per_node},host2:{per_node} bash FILE [flags of shardc run]
# On this machine alone, with fewer cores than ranks: HOSTS=localhost:{ranks}. Open MPI refuses to be started by root unless
# OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 are set.
set -euo pipefail
{resume}
{meet}hosts=()
if [ -n \"${{HOSTS:-}}\" ]; then hosts=(--host \"$HOSTS\"); fi
# On more ranks than cores, waiting ranks give way. mpirun misses a host that is gone some seconds after
# shardc does (--silence, 30 s), which says why.
exec mpirun -n {ranks} --map-by {map} --mca mpi_yield_when_idle 1{pass} ${{hosts[@]+\"${{hosts[@]}}\"}} \\
    --mca oob_tcp_keepalive_time 20 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 4 \\
    {run} ${{resume[@]+\"${{resume[@]}}\"}} \"$@\"
"
    )
}

fn torchrun(s: &Sizes) -> String {
    let Sizes { nodes, per_node, .. } = s;
    let (run, resume) = (s.run(), s.resume());
    let threads = s.cpus.map_or(String::new(), |n| format!(" --threads {n}"));
    let other = match s.of_plan {
        true => "",
        false => {
            "# Not as the plan has it: torchrun hands on no MPI, so ranks exchange by NCCL, each on a CUDA device.\n"
        }
    };
    format!(
        "#!/bin/bash
# Usage, on every host: [NODE_RANK=I MASTER_ADDR=HOST0] bash FILE [flags of shardc run]
{other}set -euo pipefail
{resume}
{SECRET}exec torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank \"${{NODE_RANK:-0}}\" \\
    --master-addr \"${{MASTER_ADDR:-127.0.0.1}}\" --master-port \"${{MASTER_PORT:-29500}}\" --no-python \\
    {run}{threads} ${{resume[@]+\"${{resume[@]}}\"}} \"$@\"
"
    )
}

fn k8s(s: &Sizes) -> String {
    let Sizes { ranks, nodes, per_node, memory, .. } = s;
    let run = s.run();
    let memory = memory * per_node;
    let cpu = s.cpus.unwrap_or(1) as usize * per_node;
    let (set, first) = (s.set(), s.first());
    let said = match s.variables.iter().any(|v| v.0 == "DATA") {
        false => {
            "as it stands it trains on random tokens for 10 steps: put flags of shardc run, such as\n# --data FILE --steps N, between the quotes of FLAGS"
        }
        true => "more flags of shardc run go between the\n# quotes of FLAGS",
    };
    format!(
        "# kubectl apply -f FILE; {said}. Needs the MPI operator (kubeflow.org/v2beta1). The image has shardc, its
# MPI and sshd; the claim `shared` is mounted at /shared, where jobs start.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: shardc
spec:
  slotsPerWorker: {per_node}
  runPolicy:
    cleanPodPolicy: Running
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          containers:
            - name: launcher
              image: shardc:latest
              workingDir: /shared
              command: [bash, -c]
              args:
                - >-
                  {set} FLAGS='';
                  resume=({first});
                  if compgen -G \"$SAVE/step-*/index.json\" >/dev/null; then resume=(--resume \"$SAVE\"); fi;
                  exec mpirun -n {ranks} {run} ${{resume[@]+\"${{resume[@]}}\"}} $FLAGS
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: shared}}}}]
    Worker:
      replicas: {nodes}
      template:
        spec:
          containers:
            - name: worker
              image: shardc:latest
              resources: {{requests: {{memory: {memory}Mi, cpu: {cpu}}}}}
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: shared}}}}]
"
    )
}

#[cfg(test)]
mod tests;
