"""PyTorch on one CUDA device: a training step of a Llama, or what the device does at best.

Variants: eager, compile (both with scaled_dot_product_attention and fused AdamW, bf16 by autocast over
f32 parameters), ceilings. Prints JSON.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

import common
from torch_model import Llama

p = argparse.ArgumentParser()
p.add_argument("--config", help="config.json of the model")
p.add_argument("--variant", choices=["eager", "compile", "ceilings"])
p.add_argument("--batch", type=int)
p.add_argument("--seq", type=int)
p.add_argument("--steps", type=int, default=10)
args = p.parse_args()
torch.set_default_device("cuda")


def timed(f, turns=20):
    """Seconds of one call, the first 3 left out."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(turns):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / turns


def ceilings():
    """GB/s of copying 2 GiB, TFLOP/s of products of bf16 and of f32 (without TF32)."""
    a = torch.zeros(1 << 29)
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / timed(lambda: b.copy_(a)) / 1e9
    del a, b

    def product(dtype, n):
        x, y = (torch.randn(n, n).to(dtype) for _ in range(2))
        return 2 * n**3 / timed(lambda: x @ y) / 1e12

    return dict(copy=copy, bf16=product(torch.bfloat16, 8192), f32=product(torch.float32, 4096))


def train():
    config = json.load(open(args.config))
    torch.manual_seed(0)
    model = Llama(config, range(config["num_hidden_layers"]), True, True)
    if config["tie_word_embeddings"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.02)
    adamw = torch.optim.AdamW(model.parameters(), lr=common.LR, betas=common.BETAS, eps=common.EPS,
                              weight_decay=common.DECAY, fused=True)
    ids = torch.randint(config["vocab_size"], (args.batch, args.seq))
    targets = torch.cat([ids[:, 1:], torch.full((args.batch, 1), -100)], 1)

    def forward(ids, targets):
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    whole = torch.compile(forward) if args.variant == "compile" else forward
    losses, ms = [], []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = whole(ids, targets)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        ms.append(1e3 * (time.perf_counter() - began))
    return dict(losses=losses, ms=ms, peak=torch.cuda.max_memory_allocated() / 2**20)


print(json.dumps(ceilings() if args.variant == "ceilings" else train()))
