"""Runs programs of `shardc export --to torch` on processes over gloo.

    walk.py RANKS LIST

LIST is a JSON file: of each program its folder, the folder of the weights, the file of the batch, the file to dump to, and
the number of steps. torch is imported once, and the ranks are forked. Prints a line for each program; exits with 1 if one
failed, whose error is printed.
"""

import json
import sys

import forked
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import shardc.torch


def run(case):
    step = shardc.torch.load(case["program"], case["weights"], timeout=60)
    batch = load_file(case["batch"])
    dump = {}
    for n in range(1, case["steps"] + 1):
        out = step(batch)
        dump[f"loss.{n}"] = out["loss"].reshape(())
        if n == 1:
            dump["loss"] = out["loss"].reshape(())
            dump.update({f"grad.{k}": x for k, x in step.whole("grad_shown").items()})
    dump.update({f"param.{k}": x for k, x in step.whole("param").items()})
    step.close()
    return dump


def rank(number, cases):
    torch.set_num_threads(1)
    for case in cases:
        try:
            dump = run(case)
        except BaseException as error:
            raise RuntimeError(case["program"]) from error
        if number == 0:
            save_file({k: x.detach().clone() for k, x in dump.items()}, case["dump"])
            print(case["program"], flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


listed = json.load(open(sys.argv[2]))
sys.exit(forked.run(int(sys.argv[1]), lambda number: rank(number, listed)))
