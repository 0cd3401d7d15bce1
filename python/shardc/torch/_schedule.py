"""The loop over the instructions of a rank, and what is kept between them."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._attention import Known, remember
from ._data import Inputs, Layout, wrong
from ._mesh import Mesh, device, free_memory, this_rank

#: What a value is to the world outside of its function, its name, and of what is made for each microbatch its number.
Key = Tuple[str, str, Optional[int]]
#: Kinds of which there is one for each microbatch.
_LOOPED = {"stash", "edge"}
#: Kinds that functions do not take from each other.
_GIVEN = {"input", "scalar"}
#: Kinds that are shown to the user.
_SHOWN = {"output", "metric", "mean", "grad_shown"}
#: What a call has shown: kind, name, microbatch, this rank's piece.
Shown = List[Tuple[str, str, int, Tensor]]


def lasts(kind: str) -> bool:
    """Whether it is kept from step to step."""
    return kind == "param" or kind.startswith("state[")


class Function:
    """A function of the program: its arguments and results by name, each with its role and the number of its type."""

    def __init__(self, call: Callable[[Dict[str, Tensor]], None], ports: Mapping[str, Any]) -> None:
        self.call = call
        self.args: List[Tuple[str, Tuple[str, str], int]] = [(v, tuple(r), t) for v, r, t in ports["args"]]
        self.results: List[Tuple[str, Tuple[str, str], int]] = [(v, tuple(r), t) for v, r, t in ports["results"]]


def _fits(peak: int, free: Optional[int]) -> None:
    """Refuses what does not fit, before anything is loaded."""
    if free is not None and peak > free:
        have, need = (f"{n / 2**30:.2f} GiB" for n in (free, peak))
        raise wrong(
            f"rank {this_rank()} of the plan needs {need}, and {have} are free where it runs",
            "compile for more ranks, or with --recompute full, --zero 3 or a smaller --microbatch", "no-memory",
        )


def _key(role: Tuple[str, str], microbatch: Optional[int]) -> Key:
    return (*role, microbatch if role[0] in _LOOPED else None)


def _received(begun: Tuple[Any, Tensor]) -> Tensor:
    work, x = begun
    work.wait()
    return x


class Schedule:
    """A rank of a plan: its functions, its instructions, and values between them."""

    def __init__(self, module: Any, facts: Mapping[str, Any]) -> None:
        self.settings: Dict[str, Any] = facts["settings"]
        self.mesh: Mesh = module.mesh
        self._stages = self.mesh.group("pp") if "pp" in self.mesh.sizes else None
        if self.mesh.ranks > 1:
            self.mesh.connect()
        # What goes up the pipeline does not wait for what comes down.
        self._links = [self.mesh.new_group(self._stages) for _ in range(2)] if self._stages is not None else []
        self._types = [Layout(self.mesh, t) for t in facts["types"]]
        self._inputs = Inputs(self.mesh, self.settings, facts["inputs"])
        calls = {name: getattr(module, name.replace(".", "_")) for name in facts["functions"]}
        self._functions = {n: Function(calls[n], ports) for n, ports in facts["functions"].items()}
        own = self._stages.place if self._stages is not None else 0
        classes = facts["classes"]
        self._lists = {k: classes[own][k] for k in ("step", "evaluation")}
        _fits(classes[own]["program_bytes"], free_memory())
        self._ends = {k: self._last_uses(of) for k, of in self._lists.items()}
        # Which rank of the pipeline has what is shown of a step.
        self._shown = {k: [self._metrics(c[k]) for c in classes] for k in self._lists}
        self._store: Dict[Key, Tensor] = {}
        self._known: Known = {}

    def close(self) -> None:
        """Ends the process groups of this plan."""
        for link in self._links:
            dist.destroy_process_group(link)
        self.mesh.disconnect()

    def _accesses(self, i: List[Any]) -> Tuple[List[Key], List[Key]]:
        """What an instruction reads, and what it makes."""
        if i[0] == "call":
            f = self._functions[i[1]]
            reads = [_key(r, i[2]) for _, r, _ in f.args if r[0] not in _GIVEN]
            return reads, [_key(r, i[2]) for _, r, _ in f.results]
        if i[0] == "send":
            return [_key(tuple(i[1]), i[2])], []
        if i[0] == "recv":
            return [], [_key(tuple(i[1]), i[2])]
        return [], []

    def _last_uses(self, of: List[Any]) -> List[Tuple[set, set]]:
        """For each instruction the values that nothing reads behind it, as it leaves them, and what of a microbatch it makes that
        nothing reads: without a backward pass all that would be saved for it."""
        ends: List[Tuple[set, set]] = [(set(), set()) for _ in of]
        read_later: Dict[Key, bool] = {}
        for at in reversed(range(len(of))):
            reads, makes = self._accesses(of[at])
            for key in makes:
                if key[0] in _LOOPED and not read_later.get(key, False):
                    ends[at][1].add(key)
                read_later[key] = False
            for key in reads:
                if not read_later.get(key, lasts(key[0])):
                    ends[at][0].add(key)
                read_later[key] = True
        return ends

    def _metrics(self, of: List[Any]) -> List[Tuple[str, str]]:
        calls = [self._functions[i[1]] for i in of if i[0] == "call"]
        shown = {r for f in calls for _, r, _ in f.results if r[0] in ("metric", "mean")}
        return sorted(shown)

    def _peer(self, stage: int) -> int:
        assert self._stages is not None
        return self._stages.ranks[stage]

    @torch.no_grad()
    def _run(
        self, what: str, step: int, scalars: Mapping[str, float], shown: Optional[Tuple[Shown, bool]] = None
    ) -> Dict[str, Tensor]:
        remember(self._known)
        for key in [k for k in self._store if not lasts(k[0])]:
            del self._store[key]
        own = self._stages.place if self._stages is not None else 0
        posted: Dict[Key, Tuple[Any, Tensor]] = {}
        sent: Dict[int, List[Tuple[Any, Tensor]]] = {}
        tags: Dict[Tuple[bool, int], int] = {}

        def tag(sends: bool, stage: int) -> int:
            tags[sends, stage] = tags.get((sends, stage), 0) + 1
            return tags[sends, stage]

        def receive(i: List[Any]) -> Tuple[Any, Tensor]:
            layout = self._types[i[4]]
            x = torch.empty(layout.shape, dtype=layout.dtype, device=device)
            return dist.irecv(x, self._peer(i[3]), self._links[own > i[3]], tag(False, i[3])), x

        for i, ends in zip(self._lists[what], self._ends[what]):
            if i[0] == "call":
                self._call(self._functions[i[1]], i[2], (step, scalars), ends, shown)
            elif i[0] == "post":
                posted[_key(tuple(i[1]), i[2])] = receive(i)
            elif i[0] == "recv":
                key = _key(tuple(i[1]), i[2])
                self._store[key] = _received(posted.pop(key, None) or receive(i))
            elif i[0] == "send":
                key = _key(tuple(i[1]), i[2])
                x = self._store[key].contiguous()
                work = dist.isend(x, self._peer(i[3]), self._links[i[3] > own], tag(True, i[3]))
                sent.setdefault(i[3], []).append((work, x))
                # A name of this loop would have its memory until the next transfer.
                del work, x
                if key in ends[0]:
                    del self._store[key]
            elif i[0] == "sent":
                sent[i[1]].pop(0)[0].wait()
        for work, _ in (one for all_of in sent.values() for one in all_of):
            work.wait()
        return self._all_metrics(what) if shown is None else {}

    def _call(
        self, f: Function, microbatch: Optional[int], now: Tuple[int, Mapping[str, float]], ends: Tuple[set, set],
        shown: Optional[Tuple[Shown, bool]],
    ) -> None:
        step, scalars = now
        v: Dict[str, Tensor] = {}
        for value, role, t in f.args:
            kind, name = role
            if kind == "input":
                v[value] = self._inputs.get(name, self._types[t], t, microbatch, step)
            elif kind == "scalar":
                v[value] = torch.tensor(scalars[name], dtype=torch.float32, device=device)
            else:
                v[value] = self._store[_key(role, microbatch)]
        # What nobody reads behind this call is the call's own, which drops it where it is done with it.
        for key in ends[0]:
            self._store.pop(key, None)
        f.call(v)
        for value, role, t in f.results:
            if (key := _key(role, microbatch)) not in ends[1]:
                self._store[key] = v[value]
            if shown is not None and role[0] in _SHOWN and (shown[1] or math.prod(self._types[t].sizes) == 1):
                shown[0].append((*role, microbatch or 0, v[value]))

    def _all_metrics(self, what: str) -> Dict[str, Tensor]:
        """Metrics, which one rank of the pipeline may have alone, on all."""
        own = {name: x for (kind, name, _), x in self._store.items() if kind in ("metric", "mean")}
        if self._stages is None:
            return own
        out, has = {}, self._shown[what]
        for stage, names in enumerate(has):
            names = [n for n in names if all(n not in before for before in has[:stage])]
            if not names:
                continue
            if self._stages.place == stage:
                x = torch.stack([own[n].float() for _, n in names])
            else:
                x = torch.empty(len(names), device=device)
            dist.broadcast(x, self._peer(stage), self._stages.group)
            out.update({n: y for (_, n), y in zip(names, x.unbind())})
        return out
