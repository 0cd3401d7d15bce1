"""A plan on PyTorch (`shardc export --to torch`) beside PyTorch written by hand, a step of each in turns.

    venv/bin/python engines.py                       # all layouts, eager
    venv/bin/python engines.py --layouts "tp=2;fsdp=2" --rounds 20
    venv/bin/python engines.py --profile FOLDER      # and a table of the ops of a step of each

Both have all their ranks as processes that wait while the other is measured, so that what else the machine does falls on both.
Beside the time of a step (the slowest rank's) it says the CPU time of all ranks, which others on the machine change less.
Exit status 1: losses differ. Needs what `bench.py` needs; shardc only compiles, so that any build of it will do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import shardc_side

HERE = Path(__file__).resolve().parent
LAYOUTS = ["dp=1", "tp=2", "dp=2", "fsdp=2", "pp=2"]
THREADS = 2  # of all ranks together
WARMUP = 2  # steps that do not count


class Side:
    """A candidate: its ranks, which take a step when they are told."""

    def __init__(self, script, model, dir, layout, variant, profile):
        self.ms, self.cpu, self.losses = [], [], []
        ranks = common.ranks_of(layout)
        meeting = tempfile.mkdtemp(dir=dir)
        package = str(HERE / "../../python")

        def start(rank):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "STORE": f"{meeting}/store",
                                "PYTHONPATH": package, "IN_TURNS": "1", "PROFILE": (profile if rank == 0 else profile and os.devnull)}
            args = ["--model", model, "--dir", dir, "--layout", layout, "--variant", variant,
                    "--threads", max(1, THREADS // ranks), "--schedule", "1f1b"]
            return subprocess.Popen([sys.executable, HERE / script, *map(str, args)], env=env, text=True,
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        self.ranks = [start(rank) for rank in range(ranks)]

    def step(self, counts):
        for p in self.ranks:
            p.stdin.write("step\n")
            p.stdin.flush()
        said = [json.loads(p.stdout.readline()) for p in self.ranks]
        if counts:
            self.ms.append(max(s["ms"] for s in said))
            self.cpu.append(sum(s["cpu"] for s in said))
        self.losses.append(said[0]["loss"])

    def close(self):
        for p in self.ranks:
            p.stdin.close()
        for p in self.ranks:
            p.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="llama")
    p.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by ';'")
    p.add_argument("--rounds", type=int, default=10, help="steps of each, in turns")
    p.add_argument("--variant", choices=["eager", "compile"], default="eager")
    p.add_argument("--profile", default="", metavar="FOLDER", help="where tables of ops of the last step go")
    p.add_argument("--shardc", type=Path, default=HERE / "../../target/release/shardc")
    options = p.parse_args()
    wrong = False
    print("| model | layout | plan, ms | by hand, ms | ratio | CPU of the plan, ms | by hand, ms | ratio |\n|-|-|-|-|-|-|-|-|")
    with tempfile.TemporaryDirectory(prefix="engines-") as work:
        for model in options.models.split(","):
            dir = Path(work) / model
            common.write_inputs(model, dir)
            for layout in options.layouts.split(";"):
                shardc_side.prepare(options.shardc, model, dir, layout, "f32", THREADS, "1f1b")
                program = shardc_side.export(options.shardc, dir, layout, "f32")
                sides = []
                for script, variant in ("engine_side.py", f":{program}"), ("torch_side.py", ":"):
                    profile = options.profile and f"{options.profile}/{layout}-{script}.txt"
                    sides.append(Side(script, model, dir, layout, options.variant + variant, profile))
                for n in range(WARMUP + options.rounds):
                    # Each is first in every other round.
                    for side in sides[:: 1 if n % 2 else -1]:
                        side.step(n >= WARMUP)
                for side in sides:
                    side.close()
                plan, hand = sides
                if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(plan.losses[:3], hand.losses[:3])):
                    wrong = True
                    print(f"{layout}: losses {plan.losses[:3]}, not {hand.losses[:3]}", file=sys.stderr)
                ms, cpu = ([statistics.median(getattr(s, w)) for s in sides] for w in ("ms", "cpu"))
                print(f"| {model} | {layout} | {ms[0]:.0f} | {ms[1]:.0f} | {ms[0] / ms[1]:.2f} "
                      f"| {cpu[0]:.0f} | {cpu[1]:.0f} | {cpu[0] / cpu[1]:.2f} |", flush=True)
    sys.exit(wrong)


main()
