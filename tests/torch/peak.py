"""How much memory the tensors of a step take at most: `peak.py LIST RANKS`, as `walk.py` takes them.

Prints a line for each program and rank: what was measured, and what the exporter has said. Counted are storages, from when an op
makes them until the last tensor on them goes; not what kernels allocate within themselves.
"""

import json
import os
import sys
import time
import traceback
import weakref
from pathlib import Path

import forked
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardc.torch
from shardc.torch._exchange import Pending

#: Seconds.
PAUSE = 0.003


def places():
    """The lines of the program, and of the package where it calls that, which are being done."""
    frames = [f for f in traceback.extract_stack() if "shardc/torch" in f.filename or f.filename.endswith("program.py")]
    return "".join(f" < {Path(f.filename).name}:{f.lineno} {f.line}" for f in frames[:-5:-1] if "_schedule" not in f.filename)


class Live(TorchDispatchMode):
    """Bytes of storages that are alive, and the most of them."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = {}
        self.where = None

    def see(self, x):
        storage = x.untyped_storage()
        key, n = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.now += n
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, n))

    def _gone(self, key, n):
        self.now -= n
        del self._known[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x)
        if self.now > self.most:
            self.most, self.where = self.now, f"{func}{places()}"
        return out


def settled(pending, own=Pending.wait):
    """Waits for an exchange until gloo's thread has dropped what it had, too: it does so behind who waits, and on a busy machine late."""
    while pending._work:
        pending._work.pop(0).wait()
    time.sleep(PAUSE)
    return own(pending)


def measure(case, number):
    step = shardc.torch.load(case["program"], case["weights"], timeout=60)
    batch = load_file(case["batch"])
    step(batch)
    live = Live()
    # What is known from the first step on, and parameters and states.
    for x in step._store.values():
        live.see(x)
    kept = live.now
    # A batch is the host's, wherever the rank computes.
    step._inputs.begin(batch)
    begun, step._inputs.begin = dict(step._inputs._columns), lambda *_: None
    for x in begun.values():
        live.see(x)
    host = live.now - kept
    with live:
        step(batch)
    facts = json.loads((Path(case["program"]) / "program.json").read_text())
    own = facts["classes"][step._stages.place if step._stages is not None else 0]
    step.close()
    return {"name": case["name"], "rank": number, "measured": live.most - host, "plan": own["peak_bytes"],
            "program": own.get("program_bytes"), "where": live.where}


def rank(number, cases):
    torch.set_num_threads(1)
    Pending.wait = settled
    for case in cases:
        # In one piece: ranks write to one pipe.
        os.write(1, (json.dumps(measure(case, number)) + "\n").encode())
    if dist.is_initialized():
        dist.destroy_process_group()


listed = json.load(open(sys.argv[1]))
sys.exit(forked.run(int(sys.argv[2]), lambda number: rank(number, listed)))
