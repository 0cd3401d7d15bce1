//! `shardc launch-script`: a file that starts a plan's ranks on a cluster.

use crate::plan_dir;
use shardc_ir::diag::{Diag, Exit, Result};
use std::path::Path;

/// The launcher of a site.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    Slurm,
    K8s,
    Mpirun,
    Torchrun,
}

/// What differs from plan to plan.
struct Sizes {
    plan: String,
    ranks: usize,
    nodes: usize,
    per_node: usize,
    /// Largest peak of a rank, and what processes need beside it, in MiB.
    memory: usize,
}

/// Memory of a process beside its arena, in MiB: code, buffers of messages, libraries.
const BESIDE: usize = 512;

/// The script for a plan, of as many ranks per node as it was compiled with (`--node`), or all.
///
/// # Errors
/// `not-built` for torchrun, and those of reading the plan.
pub fn launch_script(dir: &Path, launcher: For) -> Result<String> {
    let stored = plan_dir::read(dir)?;
    let ranks = stored.plan.module.mesh.ranks();
    let per_node = stored.options.node.unwrap_or(ranks).clamp(1, ranks);
    let s = Sizes {
        // Inside single quotes of a shell.
        plan: dir.display().to_string().replace('\'', r"'\''"),
        ranks,
        nodes: ranks.div_ceil(per_node),
        per_node,
        memory: stored.plan.peak_bytes().div_ceil(1 << 20) + BESIDE,
    };
    Ok(match launcher {
        For::Slurm => slurm(&s),
        For::K8s => k8s(&s),
        For::Mpirun => mpirun(&s),
        For::Torchrun => {
            return Err(Diag::new("not-built", "torchrun starts ranks that exchange by NCCL")
                .why("--transport nccl is not built yet")
                .at("--for torchrun")
                .help("use --for mpirun, slurm or k8s, whose ranks exchange by MPI")
                .exit(Exit::Unsupported));
        }
    })
}

/// What every rank runs; more flags follow.
const FLAGS: &str = "--save ckpt --save-every 100";

/// Goes on where the last job has ended.
const RESUME: &str = r#"resume=()
if compgen -G "ckpt/step-*/index.json" >/dev/null; then resume=(--resume ckpt); fi
"#;

fn slurm(s: &Sizes) -> String {
    let Sizes { plan, ranks, nodes, per_node, memory } = s;
    format!(
        "#!/bin/bash
#SBATCH --job-name=shardc
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --mem-per-cpu={memory}M
set -euo pipefail
{RESUME}
# One process per rank; --mpi must be that of the MPI which shardc was built with (srun --mpi=list).
srun --kill-on-bad-exit=1 --mpi=pmix shardc run '{plan}' --transport mpi {FLAGS} \"${{resume[@]}}\" \"$@\"
"
    )
}

fn mpirun(s: &Sizes) -> String {
    let Sizes { plan, ranks, per_node, .. } = s;
    format!(
        "#!/bin/bash
# Usage: HOSTS=host1:{per_node},host2:{per_node} bash FILE [flags of shardc run]
set -euo pipefail
{RESUME}
hosts=()
if [ -n \"${{HOSTS:-}}\" ]; then hosts=(--host \"$HOSTS\"); fi
# On more ranks than cores, waiting ranks give way; a host that is gone is missed after some seconds.
exec mpirun -n {ranks} --map-by slot --mca mpi_yield_when_idle 1 ${{hosts[@]+\"${{hosts[@]}}\"}} \\
    --mca oob_tcp_keepalive_time 2 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 3 \\
    shardc run '{plan}' --transport mpi {FLAGS} ${{resume[@]+\"${{resume[@]}}\"}} \"$@\"
"
    )
}

fn k8s(s: &Sizes) -> String {
    let Sizes { plan, ranks, nodes, per_node, memory } = s;
    let memory = memory * per_node;
    format!(
        "# kubectl apply -f FILE; needs the MPI operator (kubeflow.org/v2beta1). The image has shardc, its
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
                  exec mpirun -n {ranks} shardc run '{plan}' --transport mpi {FLAGS}
                  $(compgen -G 'ckpt/step-*/index.json' >/dev/null && echo --resume ckpt)
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: shared}}}}]
    Worker:
      replicas: {nodes}
      template:
        spec:
          containers:
            - name: worker
              image: shardc:latest
              resources: {{requests: {{memory: {memory}Mi, cpu: {per_node}}}}}
              volumeMounts: [{{name: shared, mountPath: /shared}}]
          volumes: [{{name: shared, persistentVolumeClaim: {{claimName: shared}}}}]
"
    )
}
