"""The products of matrices in a training step of llama and gpt2, in f32, by shardc and by libraries.

    venv/bin/python products.py               # builds what it times: `cargo bench`, and the crate in products/
    venv/bin/python products.py --rounds 1 --models llama    # does everything run?

Every product of tokens with weights [out, in] has three passes: forward x wᵀ, backward dy w, and the gradient
of the weights dyᵀ x. The counts are those of shardc's plan: GPT-2's q, k and v are products of their own. All
have 2 threads and memory that was touched before. Rounds visit everybody in turn, in a process of its own; a
time is the least of all rounds, so that what else the machine does counts as little as possible. Do not
compare times of different runs.

It prints Markdown: milliseconds of one product, and per model the sum of all (each as often as it is
computed) with its ratio to shardc's: above 1, the library takes longer. Of what shardc fuses into products,
such as activations, nothing is in the times; nor are attention and the products of vectors.

- MKL: torch.mm of this build of PyTorch; oneDNN: `mkldnn._linear_pointwise` of it; OpenBLAS: numpy's
- gemm, faer: the crates; shardc: `benches/products.rs`
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
THREADS = 2
# Name in benches/products.rs: tokens, in, out, count.
MODELS = {
    "llama": {"q": (2048, 512, 512, 2 * 6), "k": (2048, 512, 256, 2 * 6), "up": (2048, 512, 1408, 2 * 6),
              "down": (2048, 1408, 512, 6), "vocab": (2048, 512, 8192, 1)},
    "gpt2": {"q": (1024, 768, 768, 4 * 12), "up": (1024, 768, 3072, 12), "down": (1024, 3072, 768, 12),
             "vocab": (1024, 768, 50257, 1)},
}
PASSES = ["forward", "backward", "weight"]
LIBRARIES = ["MKL", "oneDNN", "OpenBLAS"]


def every(models):
    """(model, name, (tokens, in, out)) of every matrix of weights."""
    return [(model, name, tuple(dims)) for model in models for name, (*dims, _) in MODELS[model].items()]


def best(run):
    """Milliseconds of the fastest of some runs."""

    def once():
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    first = once()
    return min([first] + [once() for _ in range(min(200, max(4, int(300 / first))))])


def factory(library):
    """Of a library: how a matrix of it is made from numpy's, and a product of two into a third or a new one."""
    import numpy as np

    if library == "OpenBLAS":
        return (lambda a: a), lambda a, b, out: np.matmul(a, b, out=out)
    import torch

    torch.set_num_threads(THREADS)
    if library == "MKL":
        return torch.from_numpy, lambda a, b, out: torch.mm(a, b, out=out)
    linear = torch.ops.mkldnn._linear_pointwise
    return torch.from_numpy, lambda a, b, out: linear(a, b.T, None, "none", [], "")


def library(name, models):
    """Times all products in this process, and prints a line of JSON."""
    import numpy as np

    matrix, multiply = factory(name)
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    seen = []
    for model, what, (tokens, ins, outs) in every(models):
        x, w, dy = random(tokens, ins), random(outs, ins), random(tokens, outs)
        ms = []
        for a, b in (x, w.T), (dy, w), (dy.T, x):
            out = np.zeros((a.shape[0], b.shape[1]), np.float32)
            operands = matrix(a), matrix(b), matrix(out)
            ms.append(best(lambda: multiply(*operands)))
            got, rows = np.asarray(multiply(*operands))[:8], np.matmul(a[:8].astype(float), b)
            assert np.abs(got - rows).max() <= 1e-4 * np.abs(rows).max(), f"{name} multiplies {model} {what} wrongly"
        seen.append((model, what, ms))
    print(json.dumps(seen))


def by_library(name, models):
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    # Nothing is given back to the system, so that results without a place of their own are in touched memory.
    env |= {"OPENBLAS_NUM_THREADS": str(THREADS), "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    command = [sys.executable, __file__, "--library", name, "--models", *models]
    return json.loads(subprocess.check_output(command, env=env))


def built(*args):
    """The program that cargo builds."""
    said = subprocess.check_output(["cargo", *args, "--message-format", "json"], cwd=HERE, text=True)
    found = [m["executable"] for m in map(json.loads, said.splitlines()) if m.get("executable")]
    return found[-1]


def by_crates(program, models):
    """(crate, model, name, milliseconds of the passes) of both crates."""
    asked = every(models)
    text = "".join(f"{tokens} {ins} {outs}\n" for _, _, (tokens, ins, outs) in asked)
    lines = [line.split() for line in subprocess.check_output([program], input=text, text=True).splitlines()]
    return [(words[0], *asked[i // 2][:2], [float(ms) for ms in words[4:]]) for i, words in enumerate(lines)]


def by_shardc(program, models):
    seen = []
    for model, name, (tokens, ins, outs) in every(models):
        said = subprocess.check_output([program, "--bench", f"f32 {model} {name} "], text=True)
        ms = []
        for way in PASSES:
            label = f"f32 {model} {name} {way}"
            [line] = [line for line in said.splitlines() if line.startswith(label + " ")]
            rate = float(line[len(label):].replace("%", " ").split()[2])  # GFLOP/s of 1 thread, its %, of 2 threads
            ms.append(2e-6 * tokens * ins * outs / rate)
        seen.append((model, name, ms))
    return seen


def table(times, models):
    """Least milliseconds under (who, model, name, pass) as Markdown."""
    who = list(dict.fromkeys(k[0] for k in times))
    print(f"| model | product | tokens x in x out | count | {' | '.join(f'{w}, ms' for w in who)} |")
    print("|-|-|-|" + "-:|" * (1 + len(who)))
    for model in models:
        sums = dict.fromkeys(who, 0)
        for name, (tokens, ins, outs, count) in MODELS[model].items():
            for way in PASSES:
                ms = {w: times[w, model, name, way] for w in who}
                sums = {w: sums[w] + count * ms[w] for w in who}
                cells = " | ".join(f"{ms[w]:.2f}" for w in who)
                print(f"| {model} | {name} {way} | {tokens} x {ins} x {outs} | {count} | {cells} |")
        print(f"| {model} | sum of all | | | {' | '.join(f'{sums[w]:.0f}' for w in who)} |")
        ratios = " | ".join(f"{sums[w] / sums['shardc']:.2f}" for w in who)
        print(f"| {model} | sum / shardc's | | | {ratios} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--bench", help="the built benches/products.rs [default: cargo builds it]")
    p.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = p.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    if options.library:
        return library(options.library, options.models)
    crates = built("build", "--release", "--manifest-path", "products/Cargo.toml")
    bench = options.bench or built("bench", "--bench", "products", "--no-run")
    times = {}
    for i in range(options.rounds):
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr)
        seen = [("shardc", *s) for s in by_shardc(bench, options.models)]
        seen += [(name, *s) for name in LIBRARIES for s in by_library(name, options.models)]
        for who, model, name, ms in seen + by_crates(crates, options.models):
            for way, value in zip(PASSES, ms, strict=True):
                key = who, model, name, way
                times[key] = min(value, times.get(key, value))
    table(times, options.models)


main()
