"""One training step of a Llama of 1.2e9 parameters on one CUDA device, by shardc (products by its own
kernels, and by cuBLASLt) and by PyTorch, in turns;
and the kernels of shardc's plan against what the device does at best.

    cargo build --release && cargo bench --bench device --no-run
    python3 -m venv venv && venv/bin/pip install torch safetensors numpy
    venv/bin/python gpu.py                     # bf16, 2048 and 4096 tokens
    venv/bin/python gpu.py --quick             # a small model, few steps: does everything run?

It prints Markdown. Exit status 1: a candidate failed, or its first loss is not near that of a model that
knows nothing, the logarithm of the vocabulary's size: weights are random, everybody draws his own.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WARMUP = 3  # steps at the beginning of every process that are not counted

MODEL = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", hidden_size=2048,
    intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0), attention_bias=False, mlp_bias=False,
    attention_dropout=0.0, dtype="bfloat16")
SMALL = MODEL | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=1024)
# What makers promise for dense bf16, TFLOP/s, by a part of the device's name.
PROMISED = {"H200": 989, "H100": 989, "A100": 312}


def flops_per_token(c, seq):
    """Of forward and backward: 6 for every weight of a product, and of attention the half that is seen."""
    d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer = d * q * 2 + d * kv * 2 + 3 * d * f
    products = c["num_hidden_layers"] * layer + c["vocab_size"] * d
    return 6 * products + c["num_hidden_layers"] * 6 * q * seq


def call(command, env={}):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ | env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-3000:]}")
    return done.stdout


def torch(variant, dir, batch, seq, steps):
    return json.loads(call([sys.executable, HERE / "gpu_torch.py", "--config", dir / "config.json", "--variant",
                            variant, "--batch", batch, "--seq", seq, "--steps", WARMUP + steps],
                           {"TORCHINDUCTOR_CACHE_DIR": str(dir / "inductor")}))


def compile_plan(options, dir, batch, seq):
    plan = dir / f"{seq}.plan"
    call([options.shardc, "compile", dir, "--global-batch", batch, "--seq", seq, "--dtype", "bf16", "--lr", common.LR,
          "--eps", common.EPS, "--betas", ",".join(map(str, common.BETAS)), "--weight-decay", common.DECAY,
          "-o", plan])
    return plan


def shardc(options, plan, products, steps):
    out = call([options.shardc, "run", plan, "--device", "cuda", "--products", products, "--steps", WARMUP + steps,
                "--format", "json"])
    seen = [json.loads(line) for line in out.splitlines()]
    head = json.loads((plan / "plan.json").read_text())
    return dict(losses=[s["loss"] for s in seen], ms=[s["ms"] for s in seen], peak=max(head["peak_bytes"]) / 2**20)


def kernels(options, plan, *how):
    """The lines of `cargo bench --bench device`."""
    cargo = ["cargo", "bench", "--quiet", "--manifest-path", ROOT / "Cargo.toml", "--bench", "device", "--"]
    out = call([*([options.bench] if options.bench else cargo), plan, *how])
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def show_kernels(found, library, best):
    """The kernels that take most of a step; a product by its speed, all else by what it moves."""
    for k, other in zip(found, library, strict=True):
        k["library"] = f"{other['us']:.1f}" if k["ops"].startswith("dot ") else "-"
    total = sum(k["us"] * k["times"] for k in found)
    print(f"\nKernels, {total / 1e3:.1f} ms in a step one by one:\n")
    print("| ops | a step | each, us | part of all | speed | of the best | by cuBLASLt, us |\n|-|-|-|-|-|-|-|")
    for k in sorted(found, key=lambda k: -k["us"] * k["times"])[:25]:
        if k["flops"]:
            speed, unit, top = k["flops"] / k["us"] / 1e6, "TFLOP/s", best["bf16"]
        else:
            speed, unit, top = k["bytes"] / k["us"] / 1e3, "GB/s", best["copy"]
        part = k["us"] * k["times"] / total
        print(f"| {k['ops'][:60]} | {k['times']} | {k['us']:.1f} | {part:.1%} | {speed:.0f} {unit} "
              f"| {speed / top:.0%} | {k['library']} |")


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seqs", default="2048,4096")
    p.add_argument("--tokens", type=int, default=16384, help="of a step")
    p.add_argument("--rounds", type=int, default=3, help="visits to every candidate, in turns")
    p.add_argument("--steps", type=int, default=10, help=f"steps of a visit that count; {WARMUP} more do not")
    p.add_argument("--quick", action="store_true", help="a small model, one round of one step")
    p.add_argument("--only", default="", help="candidates, by a regular expression")
    p.add_argument("--bench", type=Path, help="the program of `cargo bench --bench device`, where there is no cargo")
    p.add_argument("--shardc", type=Path, default=ROOT / "target/release/shardc")
    return p.parse_args()


def main():
    options = parse()
    rounds, steps = (1, 1) if options.quick else (options.rounds, options.steps)
    config, tokens = (SMALL, 512) if options.quick else (MODEL, options.tokens)
    seqs = [128] if options.quick else [int(s) for s in options.seqs.split(",")]
    name = call(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()[0]
    promised = next((t for part, t in PROMISED.items() if part in name), None)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        dir = Path(work)
        (dir / "config.json").write_text(json.dumps(config))
        best = torch("ceilings", dir, 0, 0, 0)
        print(f"{name}: copies {best['copy']:.0f} GB/s, products {best['bf16']:.0f} TFLOP/s in bf16, "
              f"{best['f32']:.0f} in f32; {rounds} rounds of {steps} steps.\n")
        print("| tokens | candidate | step, ms | min | max | tokens/s | of the best product | of what is promised "
              "| peak, MiB | first loss |\n|-|-|-|-|-|-|-|-|-|-|", flush=True)
        for seq in seqs:
            batch = max(1, tokens // seq)
            plan = compile_plan(options, dir, batch, seq)
            candidates = {
                "shardc": lambda: shardc(options, plan, "own", steps),
                "shardc, products by cuBLASLt": lambda: shardc(options, plan, "cublaslt", steps),
                "PyTorch eager": lambda: torch("eager", dir, batch, seq, steps),
                "PyTorch compiled": lambda: torch("compile", dir, batch, seq, steps),
            }
            candidates = {who: visit for who, visit in candidates.items() if re.search(options.only, who)}
            seen = {name: dict(ms=[], losses=[], peak=0) for name in candidates}
            for i in range(rounds):
                for who, visit in candidates.items():
                    print(f"{seq} tokens, round {i + 1}: {who}", file=sys.stderr)
                    try:
                        made = visit()
                    except RuntimeError as error:
                        wrong.append(f"{seq} {who} failed:\n{error}")
                        continue
                    mine = seen[who]
                    mine["ms"] += made["ms"][WARMUP:]
                    mine["losses"].append(made["losses"][0])
                    mine["peak"] = max(mine["peak"], made["peak"])
            for who, mine in seen.items():
                if not mine["ms"]:
                    print(f"| {batch} x {seq} | {who} | failed |" + " |" * 7)
                    continue
                median, loss = statistics.median(mine["ms"]), mine["losses"][0]
                rate = batch * seq / median * 1e3
                reached = rate * flops_per_token(config, seq) / 1e12
                part = f"{reached / promised:.1%}" if promised else "-"
                print(f"| {batch} x {seq} | {who} | {median:.1f} | {min(mine['ms']):.1f} | {max(mine['ms']):.1f} "
                      f"| {rate:.0f} | {reached / best['bf16']:.1%} | {part} | {mine['peak']:.0f} | {loss:.4f} |",
                      flush=True)
                if abs(loss - math.log(config["vocab_size"])) > 1:
                    wrong.append(f"{seq} {who}: a first loss of {loss}")
            show_kernels(kernels(options, plan), kernels(options, plan, "cublaslt"), best)
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
