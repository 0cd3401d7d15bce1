"""The plan that shardc has compiled, on PyTorch: `shardc export --to torch` once, a process per rank on every visit."""

import os

import common

args = common.arguments()

import torch
import torch.distributed as dist
from safetensors.torch import load_file

imported = common.memory("VmRSS")
torch.set_num_threads(args.threads)
if int(os.environ["WORLD_SIZE"]) > 1:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
import shardc.torch

step = shardc.torch.load(args.variant.partition(":")[2], str(args.dir), compile=args.variant.startswith("compile"))
batch = load_file(args.dir / "batch.safetensors")
common.serve(lambda: float(step(batch)["loss"]), args.steps, imported)
