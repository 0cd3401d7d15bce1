"""Optimizers of one's own: `own.py PLAN PROGRAMS MODEL FOLDER FROZEN…`, on 2 ranks which this starts.

PLAN trains by AdamW with the numbers below, PROGRAMS by an optimizer that is a program. Tensors
that begin as FROZEN are not trained.
"""

import sys
from pathlib import Path

import forked
import torch
from safetensors.torch import load_file

import shardc

plan, programs, model, folder = (Path(a) for a in sys.argv[1:5])
frozen = tuple(sys.argv[5:])


def refused(code, work):
    try:
        work()
    except shardc.ShardcError as error:
        assert error.code == code and error.help, str(error)
    else:
        raise AssertionError(f"{code} was not refused")


def near(a, b, what):
    off = max((x - b[k]).abs().max().item() for k, x in a.items())
    assert a.keys() == b.keys() and off <= 1e-6, f"{what} are off by {off:.1e}"


def rank(number):
    torch.set_num_threads(1)
    batch = load_file(str(model / "batch.safetensors"))
    opened = shardc.Plan(plan)
    planned = opened.torch(weights=str(model), timeout=60)
    refused("torch", planned.gradients)
    want = [planned(batch) for _ in range(3)]
    step = opened.torch(weights=str(model), timeout=60, optimizer=None)
    own = step.parameters()
    begin = {k: x.clone() for k, x in own.items()}
    tensors = {w["param"]: w["tensor"] for w in step.weights}
    trained = {k for k in own if not tensors[k].startswith(frozen)}
    adamw = torch.optim.AdamW(own.values(), lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01, fused=True)
    # Each rank shuffles by itself.
    refused("batch-shape", lambda: step({k: x.roll(number, 0) for k, x in batch.items()}))
    for n in range(3):
        got = step(batch)
        assert all(abs(got[k] - want[n][k]) <= 1e-6 * abs(want[n][k]) for k in want[n]), (n, got, want[n])
        gradients = step.gradients()
        assert gradients.keys() == trained and all(gradients[k] is own[k].grad for k in trained)
        adamw.step()
    moved = {k for k, x in own.items() if not torch.equal(begin[k], x)}
    assert moved == trained, f"trained are {trained}, and {moved} have moved"
    near(own, planned.parameters(), "parameters")
    # The end of data is no rank's share of a batch.
    refused("batch-shape", lambda: step({k: x[:4] for k, x in batch.items()}))
    # The norm is that of all ranks, and is clipped as the plan clips.
    assert torch.allclose(step.clip_grad_norm_(1e9), got["grad_norm"].clamp(max=0.5), rtol=1e-5)
    before = {k: x.clone() for k, x in step.gradients().items()}
    assert torch.allclose(step.clip_grad_norm_(0.125), got["grad_norm"].clamp(max=0.5), rtol=1e-5)
    for k, x in step.gradients().items():
        assert torch.allclose(x, before[k] * 0.125 / got["grad_norm"].clamp(max=0.5), rtol=1e-4, atol=1e-9), k
    assert torch.allclose(step.clip_grad_norm_(0.25), torch.tensor(0.125), rtol=1e-4)
    # What is left of checkpoints.
    refused("torch", lambda: step.save(folder / "saved"))
    assert step.state_dict().keys() == own.keys()
    step.save_hf(folder / "hf")
    whole = step.whole("param")
    if number == 0:
        near(load_file(str(folder / "hf/model.safetensors")), whole, "saved parameters")
    # A checkpoint of a run goes into the tensors that an optimizer holds.
    planned.save(folder / "planned")
    step(batch)
    adamw.step()
    step.load(folder / "planned")
    assert step.steps == 3 and all(x is own[k] for k, x in step.parameters().items())
    near(own, planned.parameters(), "loaded parameters")
    refused("torch", lambda: shardc.Plan(programs).torch(weights=str(model), timeout=60, optimizer=None))


sys.exit(forked.run(2, rank))
