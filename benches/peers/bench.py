"""One training step of three models by shardc, JAX and PyTorch, measured in turns on this machine.

    python3 -m venv venv && venv/bin/pip install -r <(sed -n 's/^# pin: //p' bench.py)
    venv/bin/python bench.py                  # one rank, f32
    venv/bin/python bench.py --dtype bf16
    venv/bin/python bench.py --layouts        # 2 and 4 ranks
    venv/bin/python bench.py --models mixtral # experts, against every way that transformers has for them
    venv/bin/python bench.py --quick          # few steps: does everything run and agree?

It prints Markdown. Exit status 1: a candidate failed, or its losses are not those of shardc. Versions
(Python 3.11):
"""
# pin: jax==0.10.2
# pin: torch==2.15.0
# pin: transformers==5.24.0
# pin: safetensors==0.8.0
# pin: numpy==2.4.6

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import mkl
import shardc_side

HERE = Path(__file__).resolve().parent
LAYOUTS = ["tp=2", "dp=2", "pp=2", "fsdp=2", "pp=2,tp=2", "dp=2,tp=2"]
# How transformers computes experts on a CPU, but for batched_mm: it copies an expert's matrices for every row,
# 24 GB in a layer.
EXPERTS = ["grouped_mm", "eager"]
THREADS = 2  # cores that all threads and processes of a candidate share
WARMUP = 2  # steps at the beginning of every process that are not counted
COMPARED, TOLERANCE = 3, 1e-4  # first steps whose losses are compared, in f32; relative difference


class Candidate:
    """Something that trains, in a fresh process (or one per rank) on every visit, and what it took."""

    def __init__(self, name, dtype, visit, reference=False):
        self.name, self.dtype, self.visit, self.reference = name, dtype, visit, reference
        self.first_ms, self.losses, self.ms, self.peak, self.imported, self.error = None, [], [], 0, None, None

    def measure(self, steps):
        try:
            seen = self.visit(WARMUP + steps)
        except RuntimeError as error:
            self.error = str(error)
            return
        self.first_ms = self.first_ms or seen["compile_ms"] + seen["ms"][0]
        self.losses = self.losses or seen["losses"][:COMPARED]
        self.ms += seen["ms"][WARMUP:]
        self.peak, self.imported = max(self.peak, seen["peak"]), seen["imported"]

    def disagrees(self, reference):
        return any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(self.losses, reference.losses, strict=True))


def workers(script, model, dir, layout, dtype, variant, env, timeout):
    """A visit to a Python side: PyTorch has a process per rank, JAX one process for all of them."""
    ranks = common.ranks_of(layout)
    processes = 1 if script == "jax_side.py" else ranks
    args = ["--model", model, "--dir", dir, "--layout", layout, "--dtype", dtype, "--variant", variant,
            "--threads", max(1, THREADS // ranks)]

    def visit(steps):
        with tempfile.TemporaryDirectory(dir=dir) as meeting:
            rank_env = lambda i: os.environ | env | {
                "RANK": str(i), "WORLD_SIZE": str(processes), "STORE": f"{meeting}/store"}
            log = open(f"{meeting}/log", "w+")
            started = [
                subprocess.Popen([sys.executable, HERE / script, *map(str, args), "--steps", str(steps)],
                                 env=rank_env(i), stdout=subprocess.PIPE, stderr=log, text=True)
                for i in range(processes)]
            began = time.monotonic()
            while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
                time.sleep(0.2)
                if time.monotonic() - began > timeout:
                    log.write(f"took more than {timeout} s")
                    break
            for p in started:
                p.kill()
            if any(p.wait() for p in started):
                log.seek(0)
                raise RuntimeError(log.read()[-3000:])
            said = [json.loads(p.stdout.read()) for p in started]
            total = lambda what: sum(s[what] for s in said)
            return said[0] | {"peak": total("peak"), "imported": total("imported"), "compile_ms": 0}

    return visit


def candidates(options, model, dir, layout):
    """Who is measured for a model and a layout."""
    f32 = options.dtype == "f32"

    def shardc(dtype):
        return shardc_side.prepare(options.shardc, model, dir, layout, dtype, THREADS, options.schedule)

    def side(script, variant="", env={}):
        return workers(script, model, dir, layout, options.dtype, variant, env, options.timeout)

    found = [Candidate("shardc", "f32", shardc("f32"), reference=True)]
    if not f32:
        found.append(Candidate("shardc", "bf16", shardc("bf16")))
    program = shardc_side.export(options.shardc, dir, layout, options.dtype)
    package = {"PYTHONPATH": str(HERE / "../../python"), "TORCHINDUCTOR_CACHE_DIR": str(dir / "cache-plan")}
    for variant, called in ("eager", "eager"), ("compile", "compiled"):
        visit = side("engine_side.py", f"{variant}:{program}", package)
        found.append(Candidate(f"shardc's plan on PyTorch, {called}", options.dtype, visit))
    experts = model == "mixtral"
    if not experts or layout == "dp=1":  # with experts, the others have one rank only
        found.append(Candidate("JAX", options.dtype, side("jax_side.py")))
        forced = mkl.preload(dir) if f32 else {}
        for library, env in ("", {}), *([(", MKL AVX-512", forced)] if forced else []):
            for way in EXPERTS if experts else [""]:
                name = (f", {way} experts" if way else "") + library
                # Every candidate compiles on its first visit, and only then.
                caches = {"TORCHINDUCTOR_CACHE_DIR": str(dir / f"cache{name}".replace(" ", "-"))}
                for variant, called in ("eager", "eager"), ("compile", "compiled"):
                    visit = side("torch_side.py", f"{variant}:{way}", env | caches)
                    found.append(Candidate(f"PyTorch {called}{name}", options.dtype, visit))
    wanted = options.only.lower().split(";") if options.only else [""]
    return [k for k in found if k.reference or any(k.name.lower().startswith(w) for w in wanted)]


def row(k, reference, model, layout):
    if k.error or not k.ms:
        return f"| {model} | {layout} | {k.name} | {k.dtype} | failed |" + " |" * 8
    batch, seq = common.BATCHES[model]
    median = statistics.median(k.ms)
    ratio = f"{median / statistics.median(reference.ms):.2f}" if reference.ms else "-"
    imported = f"{k.imported:.0f}" if k.imported else "-"
    losses = ", ".join(f"{x:.5f}" for x in k.losses)
    first = f"{k.first_ms / 1e3:.1f}"
    return (f"| {model} | {layout} | {k.name} | {k.dtype} | {median:.0f} | {min(k.ms):.0f} | {max(k.ms):.0f} "
            f"| {batch * seq / median * 1e3:.0f} | {ratio} | {first} | {k.peak:.0f} | {imported} | {losses} |")


def machine():
    """What it runs on, in words."""
    lines = subprocess.check_output(["lscpu"], text=True).splitlines()
    seen = dict(line.split(":", 1) for line in lines if ":" in line)
    get = lambda key: seen.get(key, "?").strip()
    return (f"{get('Model name')} (family {get('CPU family')}, model {get('Model')}), {get('CPU(s)')} CPUs, "
            f"of which {THREADS} used; load before: {os.getloadavg()[0]:.1f}")


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="llama,gpt2,mixtral")
    p.add_argument("--layouts", nargs="?", const=";".join(LAYOUTS), default="dp=1",
                   help=f"meshes separated by ';' [without a value: {';'.join(LAYOUTS)}]")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    p.add_argument("--rounds", type=int, default=5, help="visits to every candidate, in turns")
    p.add_argument("--steps", type=int, default=5, help=f"steps of a visit that count; {WARMUP} more do not")
    p.add_argument("--quick", action="store_true", help="one round of one step")
    p.add_argument("--only", help="names of candidates, or how they begin, separated by ';'; shardc always runs")
    p.add_argument("--schedule", default="1f1b", help="of shardc's pipelines; the others run GPipe")
    p.add_argument("--shardc", type=Path, default=HERE / "../../target/release/shardc")
    p.add_argument("--timeout", type=float, default=1800, help="seconds that a visit may take")
    return p.parse_args()


def main():
    options = parse()
    rounds, steps = (1, 1) if options.quick else (options.rounds, options.steps)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    print(f"{machine()}. {rounds} rounds of {steps} steps.\n")
    wrong = []
    with tempfile.TemporaryDirectory(prefix="peers-") as work:
        if options.dtype == "f32" and (proof := mkl.proof(Path(work))):
            print(proof + "\n")
        print("| model | layout | candidate | dtype | step, ms | min | max | tokens/s | time / shardc's "
              "| compile and first step, s | peak, MiB | after import, MiB | loss of steps 1 to 3 |")
        print("|-|-|-|-|-|-|-|-|-|-|-|-|-|", flush=True)
        for model in options.models.split(","):
            common.write_inputs(model, Path(work) / model)
            for layout in options.layouts.split(";"):
                asked = candidates(options, model, Path(work) / model, layout)
                for i in range(rounds):
                    for k in asked:
                        print(f"{model} {layout}, round {i + 1}: {k.name} {k.dtype}", file=sys.stderr)
                        k.error or k.measure(steps)
                for k in asked:
                    print(row(k, asked[0], model, layout), flush=True)
                    where = f"{model} {layout} {k.name} {k.dtype}"
                    if k.error:
                        wrong.append(f"{where} failed:\n{k.error}")
                    elif k.dtype == "f32" and not asked[0].error and k.disagrees(asked[0]):
                        wrong.append(f"{where}: losses differ from shardc's by more than {TOLERANCE} of their size")
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
