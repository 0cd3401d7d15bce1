"""A step of a plan: the loop over the instructions of a rank, and what is kept between them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .._command import ShardcError, run
from ._attention import Known, remember
from ._checkpoint import ask, shared
from ._data import Inputs, Layout, wrong
from ._link import Asked, Link
from ._mesh import Mesh, device, free_memory, this_rank, world_size
from ._scale import LossScale
from ._store import Tensors, Values, Weights, whole_tensors

#: What a value is to the world outside of its function, its name, and of what is made for each microbatch its number.
Key = Tuple[str, str, Optional[int]]
#: The optimizer of a step: that of its plan.
PLANNED = "plan"
#: The form of program.json that is read.
FORMAT = 3
#: Kinds of which there is one for each microbatch.
_LOOPED = {"stash", "edge"}
#: Kinds that functions do not take from each other.
_GIVEN = {"input", "scalar"}
#: Kinds that are shown to the user.
_SHOWN = {"output", "metric", "mean", "grad_shown"}
#: What a call has shown: kind, name, microbatch, this rank's piece.
Shown = List[Tuple[str, str, int, Tensor]]


def _lasts(kind: str) -> bool:
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


class Step:
    """A step of training by a plan. Call it with a batch: tensors by name, of all ranks or of this one's rows alone."""

    def __init__(
        self, module: Any, facts: Mapping[str, Any], weights: Weights, adapter: Union[str, Path, None] = None,
        plan: Union[str, Path, None] = None, optimizer: Optional[str] = PLANNED,
    ) -> None:
        if optimizer not in (None, PLANNED):
            raise TypeError(f'optimizer is "{PLANNED}", or None for one of your own, not {optimizer!r}')
        # Whether somebody else updates parameters.
        self._gives = optimizer is None
        if self._gives:
            self._hand_out(module, facts)
        #: The hash of the plan.
        self.plan: str = facts["plan"]
        self._plan, self._states = plan, facts["states"]
        self._base = ["--weights", str(weights)] if isinstance(weights, (str, Path)) else []
        self.settings: Dict[str, Any] = facts["settings"]
        self.weights: List[Dict[str, Any]] = facts["weights"]
        self.mesh: Mesh = module.mesh
        #: Steps that were taken.
        self.steps = 0
        # Steps before the optimizer's states began anew.
        self._before = 0
        #: The learning rate of a step, counted from 1.
        self.lr: Callable[[int], float] = self._planned_lr
        self._scale = LossScale(self.settings.get("loss_scaling"))
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
        self._device_mesh: Any = None
        self._known: Known = {}
        self._load(weights if isinstance(weights, Values) else Tensors(weights, adapter))

    def __call__(self, batch: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """Trains on a batch; the loss, the norm of gradients and other metrics, on all ranks.

        With `optimizer=None` it leaves gradients at the parameters, and updates none.
        """
        self._inputs.begin(batch)
        if self._gives:
            for x in self.parameters().values():
                x.grad = None
        update = max(self.steps + 1 - self._scale.skipped - self._before, 0)
        lr = self.lr(self.steps + 1 - self._scale.skipped)
        out = self._run("step", self.steps + 1, {"lr": lr, "step": update, "loss_scale": self._scale.scale})
        self.steps += 1
        if self._scale.how is not None:
            self._scale.update(math.isfinite(float(out["grad_norm"])))
        return out

    def evaluate(self, batch: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """The loss of a batch, which changes nothing."""
        if not self._lists["evaluation"]:
            raise wrong("the plan has no evaluation", "call the step itself: it does not train", "no-evaluation")
        self._inputs.begin(batch)
        return self._run("evaluation", 0, {"loss_scale": self._scale.scale})

    def told(self, how: Mapping[str, Any], columns: Mapping[str, Tensor]) -> Shown:
        """Does a step as another program tells it, with all that inputs have; what this rank has to show of it."""
        self._inputs.take(columns)
        scalars = {"lr": how["lr"], "step": how["update"], "loss_scale": how["loss_scale"]}
        shown: Shown = []
        self._run("evaluation" if how["evaluate"] else "step", how["step"], scalars, (shown, how["observe"]))
        return shown

    def show(self, link: Link, head: Mapping[str, Any]) -> None:
        """Gives this rank's piece of a value that is kept, or was shown last."""
        kind, name = head["piece"]
        x = self._store.get((kind, name, None))
        if x is not None and self._gives and kind.startswith("state["):
            x = torch.full(self._layouts[kind, name].shape, float(self._init(kind)))
        link.send({"found": x is not None}, [] if x is None else [x])

    def save(self, folder: Union[str, Path], keep: int = 2) -> Path:
        """Saves a checkpoint of the steps so far, as `shardc run --save DIR --save-every N` does; to be called on all ranks.

        `shardc run --resume` and `load` go on from it. Of those in the folder as many stay as `keep` says. The path.
        """
        if self._gives:
            raise wrong(
                "a checkpoint has the states of the plan's optimizer, which this step does not run",
                "save_hf has the model; torch.distributed.checkpoint saves state_dict() beside your optimizer's states",
                "torch",
            )
        return self._save(folder, keep)

    def _save(self, folder: Union[str, Path], keep: int = 2) -> Path:
        scale = {**self._scale.state(), "before": self._before}
        args = ["--save", str(folder), "--step", str(self.steps), "--keep", str(keep), "--scale", json.dumps(scale)]
        said = ask(self, self._plan_folder(), args + self._base, lambda link: link.send({"ready": True}))
        return Path(said["saved"])

    def load(self, folder: Union[str, Path]) -> None:
        """Goes on from a checkpoint of a run or of `save`, on whatever mesh it was made; to be called on all ranks."""

        def fill(link: Link) -> None:
            self._load(Asked(link))
            link.send({"ready": True})

        said = ask(self, self._plan_folder(), ["--load", str(folder), *self._base], fill)
        self.steps, self._before = said["step"], said["scale"]["before"]
        self._scale.go_on(said["scale"])

    def save_hf(self, folder: Union[str, Path]) -> None:
        """Saves the model as a folder of transformers, as `shardc run --save DIR` does; to be called on all ranks."""
        made = shared(tempfile.mkdtemp(prefix="shardc-") if this_rank() == 0 else None)
        try:
            saved = self._save(Path(made) / "checkpoint")
            failed = None
            if this_rank() == 0:
                base = ["--base", self._base[1]] if self._base and os.path.isdir(self._base[1]) else []
                try:
                    run(["reshard", str(saved), "--to", "hf", "-o", str(folder), *base])
                except ShardcError as error:
                    failed = error
            failed = shared(failed)
            if failed is not None:
                raise failed
        finally:
            if this_rank() == 0:
                shutil.rmtree(made, ignore_errors=True)

    def state_dict(self) -> Dict[str, Tensor]:
        """Parameters and optimizer states of this rank as DTensors, which share memory with the step's: what
        `torch.distributed.checkpoint` saves, and loads in place. To be called on all ranks.

        Names are those of the plan, `exp_avg.NAME` of a state; raises ShardcError where DTensor has no word for a layout.
        """
        from ._dtensor import device_mesh, dtensor, placements

        if self._device_mesh is None:
            self._device_mesh = device_mesh(self.mesh)
        out: Dict[str, Tensor] = {}
        for (kind, name, _), x in self._store.items():
            if kind == "param" or (_lasts(kind) and not self._gives):
                key = name if kind == "param" else f"{kind[len('state['):-1]}.{name}"
                layout = self._layouts[kind, name]
                out[key] = dtensor(x, layout, self._device_mesh, placements(self.mesh, layout, name))
        return out

    def _plan_folder(self) -> str:
        if self._plan is None:
            raise wrong("the folder of the plan is not known", "shardc.torch.load(PROGRAM, weights, plan=PLAN)", "plan")
        return str(self._plan)

    def parameters(self) -> Dict[str, Tensor]:
        """What this rank has of each parameter: tensors that stay the same ones, for an optimizer of your own."""
        return {name: x for (kind, name, _), x in self._store.items() if kind == "param"}

    def gradients(self) -> Dict[str, Tensor]:
        """With `optimizer=None`, the gradient of what this rank has of each parameter that trains, after a step.

        They are those of the whole batch, summed over ranks and clipped as the plan clips; parameters have them as `.grad`.
        There are none after a step whose gradients overflowed.
        """
        if not self._gives:
            raise wrong("the optimizer of the plan uses gradients up", "load the step with optimizer=None", "torch")
        return {name: x.grad for name, x in self.parameters().items() if x.grad is not None}

    def _hand_out(self, module: Any, facts: Mapping[str, Any]) -> None:
        """Makes of updates of parameters the gradients that they would have used."""
        if facts["programs"]:
            raise wrong(
                f"the plan updates {facts['programs'][0]!r} by a program, in which no gradient stands by itself",
                "compile with --optimizer sgd, which keeps no state, for an optimizer of your own", "torch",
            )

        def sgd(p: Tensor, g: Tensor, lr: Tensor, scale: Tensor, applies: Optional[Tensor] = None, **how: Any) -> None:
            if applies is None or bool(applies):
                p.grad = (g * scale).to(p.dtype)

        def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, step: Tensor, *rest: Tensor, **how: Any) -> None:
            sgd(p, g, lr, *rest)

        module.adamw, module.sgd = adamw, sgd

    def whole(self, kind: str) -> Dict[str, Tensor]:
        """All of what the ranks have of a kind, `param` or `grad_shown`, as tensors of a checkpoint; to be called on all ranks."""
        own = {name: x for (k, name, _), x in self._store.items() if k == kind}
        found: Dict[str, Tensor] = {}
        for w in self.weights:
            x, layout = own.get(w["param"]), self._layouts.get((kind, w["param"]))
            has = [(None if x is None else x.cpu())]
            if self.mesh.ranks > 1:
                has = [None] * self.mesh.ranks
                dist.all_gather_object(has, None if x is None else x.cpu())
            if layout is None or all(h is None for h in has):
                continue
            y = torch.zeros(layout.sizes, dtype=layout.dtype)
            for rank, piece in enumerate(has):
                if piece is not None:
                    y[tuple(slice(s, s + n) for s, n in layout.extents(rank))] = piece
            found[w["param"]] = y
        return whole_tensors(self.weights, found)

    def close(self) -> None:
        """Ends the process groups of this plan."""
        for link in self._links:
            dist.destroy_process_group(link)
        self.mesh.disconnect()

    def _planned_lr(self, step: int) -> float:
        how = self.settings["lr"]
        if how["kind"] == "constant":
            return float(how["lr"])
        lr, warmup, floor = how["lr"], how["warmup"], how["floor"]
        if step <= warmup:
            return float(lr * step / warmup)
        done = (step - warmup) / max(how["total"] - warmup, 1)
        return float(floor + (lr - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def _load(self, values: Values) -> None:
        by_name = {w["param"]: w for w in self.weights}
        #: Of what is kept or shown its layout, whichever rank has it.
        self._layouts: Dict[Tuple[str, str], Layout] = {}
        for f in self._functions.values():
            for _, (kind, name), t in [*f.args, *f.results]:
                self._layouts.setdefault((kind, name), self._types[t])
        called = {i[1] for of in self._lists.values() for i in of if i[0] == "call"}
        filled = set()
        for f in (self._functions[c] for c in sorted(called)):
            for _, (kind, name), t in f.args:
                key, layout = (kind, name, None), self._types[t]
                if not _lasts(kind) or key in filled:
                    continue
                filled.add(key)
                if key not in self._store:
                    # Of an optimizer that does not run nothing is kept.
                    shape = [0] if self._gives and kind != "param" else layout.shape
                    self._store[key] = torch.empty(shape, dtype=layout.dtype, device=device)
                if self._gives and kind != "param":
                    continue
                x = values.first(kind, name, by_name.get(name, {}), self._init(kind), layout.extents())
                # In place: who holds a parameter goes on with it.
                self._store[key].copy_(x)

    def _init(self, kind: str) -> Any:
        return "file" if kind == "param" else self._states[kind[len("state[") : -1]]

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

    def _last_uses(self, of: List[Any]) -> List[set]:
        """For each instruction the values that nothing reads behind it, as it leaves them."""
        ends: List[set] = [set() for _ in of]
        read_later: Dict[Key, bool] = {}
        for at in reversed(range(len(of))):
            reads, makes = self._accesses(of[at])
            for key in makes:
                read_later[key] = False
            for key in reads:
                if not read_later.get(key, _lasts(key[0])):
                    ends[at].add(key)
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
        for key in [k for k in self._store if not _lasts(k[0])]:
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
                work, x = posted.pop(key, None) or receive(i)
                work.wait()
                self._store[key] = x
            elif i[0] == "send":
                key = _key(tuple(i[1]), i[2])
                x = self._store[key].contiguous()
                work = dist.isend(x, self._peer(i[3]), self._links[i[3] > own], tag(True, i[3]))
                sent.setdefault(i[3], []).append((work, x))
                if key in ends:
                    del self._store[key]
            elif i[0] == "sent":
                sent[i[1]].pop(0)[0].wait()
        for work, _ in (one for all_of in sent.values() for one in all_of):
            work.wait()
        return self._all_metrics(what) if shown is None else {}

    def _call(
        self, f: Function, microbatch: Optional[int], now: Tuple[int, Mapping[str, float]], ends: set,
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
        for key in ends:
            self._store.pop(key, None)
        f.call(v)
        for value, role, t in f.results:
            self._store[_key(role, microbatch)] = v[value]
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


def load(
    folder: Union[str, Path],
    weights: Weights,
    timeout: Optional[float] = None,
    adapter: Union[str, Path, None] = None,
    plan: Union[str, Path, None] = None,
    optimizer: Optional[str] = PLANNED,
    compile: bool = False,
) -> Step:
    """The step of a folder that `shardc export --to torch` wrote, on this rank of torch.distributed.

    Makes the default process group, if there is none. `timeout` is of its exchanges, in seconds. `adapter` is the folder
    of an adapter, for a plan that has them; `plan` the folder of the plan, which checkpoints need. With `optimizer=None` the step
    updates no parameter and gives `gradients()`; with `compile` functions of layers are compiled by torch, each once.
    """
    folder = Path(folder)
    facts = json.loads((folder / "program.json").read_text(encoding="utf-8"))
    if facts.get("format") != FORMAT:
        raise wrong(f"the program is of another shardc, {facts['version']}", "export the plan again into a new folder", "plan")
    ranks = math.prod(size for _, size in facts["mesh"])
    if ranks != world_size():
        has = world_size()
        count = f"{has} was" if has == 1 else f"{has} were"
        raise wrong(f"the plan is for {ranks} ranks, and {count} started", f"torchrun --nproc-per-node {ranks}", "mesh")
    if ranks > 1 and not dist.is_initialized():
        more: Dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            more["device_id"] = device
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **more)
    spec = importlib.util.spec_from_file_location(f"shardc_program_{len(sys.modules)}", folder / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.PLAN != facts["plan"]:
        raise wrong("program.py and program.json are of two plans", "export the plan again into a new folder", "plan")
    if compile:
        _compile(module)
    return Step(module, facts, weights, adapter, plan, optimizer)


def _compile(module: Any) -> None:
    """Compiles what layers do forward and backward. Exchanges, attention and rows of experts are calls between compiled parts."""
    from . import _attention, _exchange, _experts, _scan

    layers = [name for name in vars(module) if re.fullmatch(r"(forward|backward|weight)_layer(_\d+)?", name)]
    if not layers:
        raise wrong("no layer of this program is a function of its own, so there is nothing to compile", "load it without compile", "torch")
    for name, own in list(vars(module).items()):
        if name in layers:
            setattr(module, name, torch.compile(own, dynamic=False))
        elif getattr(own, "__module__", None) in [m.__name__ for m in (_attention, _exchange, _experts, _scan)]:
            if callable(own) and not isinstance(own, type):
                setattr(module, name, torch.compiler.disable(own))


def main(program: Union[str, Path]) -> None:
    """The command line of a program."""
    p = argparse.ArgumentParser(prog=Path(program).name, description="Trains by a plan under torchrun.")
    p.add_argument("--weights", required=True, metavar="MODEL", help="folder of the model's safetensors")
    p.add_argument("--adapter", metavar="DIR", help="folder of an adapter, for a plan with adapters")
    p.add_argument("--batch", required=True, metavar="FILE", help="safetensors with input_ids and labels")
    p.add_argument("--steps", type=int, default=1, help="steps on this batch [1]")
    p.add_argument("--dump", metavar="FILE", help="file for the loss, gradients (if the plan shows them) and parameters")
    p.add_argument("--compile", action="store_true", help="compile each kind of layer by torch.compile")
    p.add_argument("--timeout", type=float, metavar="SECONDS", help="of exchanges")
    a = p.parse_args()
    first = this_rank() == 0
    try:
        from safetensors.torch import load_file, save_file

        step = load(Path(program).parent, a.weights, a.timeout, a.adapter, compile=a.compile)
        batch = load_file(a.batch)
        dump: Dict[str, Tensor] = {}
        for n in range(1, a.steps + 1):
            out = step(batch)
            if first:
                print(f"step {n}  " + "  ".join(f"{k} {float(x):.6f}" for k, x in out.items()), flush=True)
            if n == 1 and a.dump:
                dump = {k: x.reshape(()).clone() for k, x in out.items()}
                dump.update({f"grad.{k}": x for k, x in step.whole("grad_shown").items()})
        if a.dump:
            dump.update({f"param.{k}": x for k, x in step.whole("param").items()})
            if first:
                save_file(dump, a.dump)
    except (ShardcError, OSError) as error:
        if first:
            print(error if isinstance(error, ShardcError) else f"error[file]: {error}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_status", None) or 2)
    if dist.is_initialized():
        dist.destroy_process_group()
