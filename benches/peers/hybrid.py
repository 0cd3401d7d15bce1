"""A step of a hybrid with gated DeltaNet on shardc and on transformers' code in chunks, in turns: medians of time and of CPU time.

    venv/bin/python hybrid.py [--seq 1024] [--batch 2] [--layers linear,full] [--rounds 3] [--shardc FILE]

Both train in f32 on the same threads, with the same AdamW as bench.py; losses of the first steps must agree.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

import common

p = ArgumentParser()
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--batch", type=int, default=2)
p.add_argument("--layers", default="linear,full")
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--shardc", default="../../target/release/shardc")
p.add_argument("--side", type=Path, help="what a round of PyTorch runs")
args = p.parse_args()

KINDS = [f"{k}_attention" for k in args.layers.split(",")]
CONFIG = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=len(KINDS), num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=8192, layer_types=KINDS, linear_num_key_heads=8, linear_num_value_heads=8,
    linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4, mlp_only_layers=list(range(len(KINDS))),
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    max_position_embeddings=8192, tie_word_embeddings=False, dtype="float32")


def seconds(pid):
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def pytorch(dir):
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3NextForCausalLM

    torch.set_num_threads(args.threads)
    model = Qwen3NextForCausalLM.from_pretrained(dir, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=common.LR, betas=common.BETAS, eps=common.EPS,
                                  weight_decay=common.DECAY, fused=True)
    batch = load_file(dir / "batch.safetensors")
    for _ in range(args.steps):
        began, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ms = 1e3 * (time.perf_counter() - began)
        print(json.dumps(dict(loss=loss.item(), ms=ms, cpu=1e3 * (time.process_time() - cpu))), flush=True)


def steps(command):
    """What a program says of its steps; CPU time is what its process has used when it says so."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    seen, before = [], None
    for line in process.stdout:
        now, step = seconds(process.pid), json.loads(line)
        if "loss" in step and "step" in step or "cpu" in step:
            own = None if before is None else 1e3 * (now - before)
            seen.append((step["loss"], step["ms"], step.get("cpu", own)))
            before = now
    assert process.wait() == 0, command
    return seen


def prepare(dir):
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).save_pretrained(dir)
    ids = torch.randint(CONFIG["vocab_size"], (args.batch, args.seq))
    save_file({"input_ids": ids, "labels": ids.clone()}, dir / "batch.safetensors")
    subprocess.run(list(map(str, [
        args.shardc, "compile", dir, "--global-batch", args.batch, "--seq", args.seq, "--lr", common.LR, "--eps", common.EPS,
        "--betas", ",".join(map(str, common.BETAS)), "--weight-decay", common.DECAY, "--decay", "all", "-o", dir / "plan"])),
        check=True, capture_output=True)


def main():
    if args.side:
        return pytorch(args.side)
    with tempfile.TemporaryDirectory() as d:
        dir = Path(d)
        prepare(dir)
        run = [args.shardc, "run", dir / "plan", "--weights", dir, "--batch", dir / "batch.safetensors", "--steps", args.steps,
               "--threads", args.threads, "--format", "json"]
        sides = {"shardc": run, "transformers": [sys.executable, __file__, *sys.argv[1:], "--side", dir]}
        all = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, command in sides.items():
                all[name].append(steps(command))
        losses = {name: [s[0] for s in rounds[0]] for name, rounds in all.items()}
        for a, b in zip(*losses.values()):
            assert abs(a - b) < 1e-4 * b, losses
        medians = {}
        for name, rounds in all.items():
            later = [s for r in rounds for s in r[2:]]
            medians[name] = [statistics.median(s[i] for s in later) for i in (1, 2)]
            print(f"{name}: {medians[name][0]:.0f} ms, {medians[name][1]:.0f} ms of CPU")
        a, b = medians["shardc"], medians["transformers"]
        print(f"{args.batch} x {args.seq}, {args.layers}: {a[0] / b[0]:.2f} of the time, {a[1] / b[1]:.2f} of the CPU time")


if __name__ == "__main__":
    main()
