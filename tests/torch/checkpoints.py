"""Checkpoints of steps: `checkpoints.py PLAN MODEL OWN FOLDER`, on 2 ranks which this starts.

OWN is a checkpoint of `shardc run`, of 2 steps; to FOLDER go what the ranks save, and `losses.json`.
"""

import json
import sys
from pathlib import Path

import forked
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import shardc
import shardc.torch

plan, model, own, folder = (Path(a) for a in sys.argv[1:5])


def kept(step):
    return {k: x.to_local().clone() for k, x in step.state_dict().items()}


def same(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), "states differ"


def rank(number):
    torch.set_num_threads(1)
    batch = load_file(str(model / "batch.safetensors"))
    opened = shardc.Plan(plan)
    step = opened.torch(weights=str(model), timeout=60)
    begin = kept(step)
    step.load(own)
    assert step.steps == 2
    losses = [float(step(batch)["loss"]) for _ in range(2)]
    saved = step.save(folder / "saved")
    assert saved.name == "step-00000004", saved
    before, further = kept(step), float(step(batch)["loss"])
    # What follows is the same again, bit for bit.
    step.load(folder / "saved")
    same(kept(step), before)
    assert step.steps == 4 and float(step(batch)["loss"]) == further
    step.load(folder / "saved")
    step.save_hf(folder / "hf")
    # Through PyTorch's own checkpoints, in place.
    dcp.save(step.state_dict(), checkpoint_id=str(folder / "dcp"))
    step(batch)
    dcp.load(step.state_dict(), checkpoint_id=str(folder / "dcp"))
    same(kept(step), before)
    fresh = opened.torch(weights=str(model), timeout=60)
    same(kept(fresh), begin)
    try:
        step.load(folder / "nothing")
    except shardc.ShardcError as error:
        assert error.help and error.code in ("file", "checkpoint"), str(error)
    else:
        raise AssertionError("a folder that is not there was loaded")
    same(kept(step), before)
    if number == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


sys.exit(forked.run(2, rank))
