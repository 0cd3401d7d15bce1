"""What a program refuses, each by one message: `refused.py ONE TWO MODEL`, programs for one rank and for two, and their model."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

import shardc
import shardc.torch

one, two, model = (Path(a) for a in sys.argv[1:4])


def refused(code, word, work):
    try:
        work()
    except shardc.ShardcError as error:
        assert error.code == code and word in str(error) and error.help, str(error)
    else:
        raise AssertionError(f"{code} was not refused")


refused("mesh", "for 2 ranks, and 1 was started", lambda: shardc.torch.load(two, model))
refused("missing-weights", "is not there", lambda: shardc.torch.load(one, model / "nowhere"))
refused("missing-tensor", "embed_tokens", lambda: shardc.torch.load(one, {}))
with mock.patch("shardc.torch._schedule.free_memory", lambda: 1000):
    refused("no-memory", "needs 0.00 GiB, and 0.00 GiB are free", lambda: shardc.torch.load(one, model))
step = shardc.torch.load(one, model)
batch = load_file(str(model / "batch.safetensors"))
short = {k: x[:, :-1] for k, x in batch.items()}
refused("batch-shape", "needs [8, 16]", lambda: step(short))
refused("batch-shape", "no 'input_ids'", lambda: step({"labels": batch["labels"]}))
refused("batch-shape", "torch.int32", lambda: step({**batch, "input_ids": batch["input_ids"].float()}))
refused("batch-shape", "list, and not a tensor", lambda: step({**batch, "input_ids": batch["input_ids"].tolist()}))
refused("token-range", "use 0 to 66", lambda: step({**batch, "input_ids": batch["input_ids"] + 9999}))
for name in "attention_mask", "position_ids":
    refused("batch-shape", f"no column {name!r}", lambda: step({**batch, name: 0 * batch["input_ids"]}))
# What was refused changed nothing; a mapping of weights is as good as a folder.
loss = step.evaluate(batch)["loss"]
assert loss == step.evaluate({**batch, "attention_mask": 1 + 0 * batch["input_ids"]})["loss"]
assert step.steps == 0 and loss == step(batch)["loss"]
other = shardc.torch.load(one, step.whole("param"))
assert abs(other.evaluate(batch)["loss"] - step.evaluate(batch)["loss"]) < 1e-6
# From a model to a step in two lines.
plan = shardc.compile(str(model), seq=16)
assert abs(plan.torch().evaluate(batch)["loss"] - loss) < 1e-6
# Rows of two documents, as the batch says, are rows of half the tokens. A step saves also where nobody else has its plan.
packed = shardc.compile(str(model), seq=16, documents="rows").torch()
short = shardc.compile(str(model), seq=8, global_batch=16).torch()
halves = {k: batch[k].reshape(16, 8) for k in ("input_ids", "labels")}
rows = packed.evaluate({**batch, "segments": (batch["input_ids"] * 0).index_fill(1, torch.arange(8, 16), 3)})["loss"]
packed.save_hf(one / "saved")
assert (one / "saved/model.safetensors").is_file()
assert abs(rows - short.evaluate(halves)["loss"]) < 1e-6 and abs(packed.evaluate(batch)["loss"] - loss) < 1e-6 < abs(rows - loss)
text = (one / "program.py").read_text()
(one / "program.py").write_text(text.replace('PLAN = "0', 'PLAN = "1'))
refused("plan", "of two plans", lambda: shardc.torch.load(one, model))
facts = (one / "program.json").read_text()
(one / "program.json").write_text(facts.replace('"format":3', '"format":1'))
refused("plan", "of another shardc", lambda: shardc.torch.load(one, model))
# By itself a program says so once, and ends with the status of `run`.
said, pipe = os.pipe()
pid = os.fork()
if pid == 0:
    os.dup2(pipe, 2)
    args = ["--weights", str(model), "--batch", str(model / "batch.safetensors")]
    sys.argv = [str(two / "program.py"), *args]
    runpy.run_path(str(two / "program.py"), run_name="__main__")
    os._exit(0)
os.close(pipe)
text = os.fdopen(said).read()
_, status = os.waitpid(pid, 0)
assert os.WEXITSTATUS(status) == 2 and text.startswith("error[mesh]: ") and "Traceback" not in text, text
print("OK")
