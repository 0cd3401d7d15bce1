"""shardc: `compile` once, `run` on every visit; and `export` for PyTorch."""

import json
import os
import subprocess
import time

import common


def plan_of(dir, layout, dtype):
    return dir / f"{layout.replace(',', '-')}-{dtype}.plan"


def export(shardc, dir, layout, dtype):
    """A program of PyTorch of what `prepare` has compiled; its folder."""
    plan = plan_of(dir, layout, dtype)
    program = plan.with_suffix(".torch")
    subprocess.run(list(map(str, [shardc, "export", plan, "--to", "torch", "-o", program])), capture_output=True)
    return program


def prepare(shardc, model, dir, layout, dtype, threads, schedule):
    """A visit to shardc: a function of the number of steps."""
    plan = plan_of(dir, layout, dtype)
    batch, seq = common.BATCHES[model]
    mesh = common.mesh_of(layout)
    ranks = common.ranks_of(layout)
    args = ["--global-batch", batch, "--seq", seq, "--dtype", dtype, "--lr", common.LR, "--eps", common.EPS,
            "--betas", ",".join(map(str, common.BETAS)), "--weight-decay", common.DECAY,
            "--mesh", layout.replace("fsdp", "dp")]
    if "fsdp" in mesh:
        args += ["--zero", 3]
    if "pp" in mesh:
        args += ["--schedule", schedule, "--microbatch", batch // common.MICROBATCHES]
    command = [shardc, "compile", dir, *args, "-o", plan]
    began = time.perf_counter()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    compile_ms = 1e3 * (time.perf_counter() - began)

    def visit(steps):
        if done.returncode:
            raise RuntimeError(done.stderr)
        run = [shardc, "run", plan, "--weights", dir, "--batch", dir / "batch.safetensors", "--steps", steps,
               "--threads", max(1, threads // ranks), "--format", "json"]
        with open(dir / "shardc.log", "w+") as log:
            p = subprocess.Popen(list(map(str, run)), stdout=subprocess.PIPE, stderr=log, text=True)
            lines = p.stdout.read().splitlines()
            _, status, used = os.wait4(p.pid, 0)
            p.returncode = os.waitstatus_to_exitcode(status)
            if p.returncode:
                log.seek(0)
                raise RuntimeError(log.read()[-3000:])
        seen = [s for s in map(json.loads, lines) if "step" in s]
        return {"losses": [s["loss"] for s in seen], "ms": [s["ms"] for s in seen], "compile_ms": compile_ms,
                "peak": used.ru_maxrss / 1024, "imported": None}

    return visit
