"""A step of a plan, as people call it from Python, and its command line."""

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
from ._checkpoint import ask, shared
from ._data import Layout, wrong
from ._link import Asked, Link
from ._mesh import device, this_rank, world_size
from ._scale import LossScale
from ._schedule import Schedule, Shown, lasts
from ._store import Tensors, Values, Weights, whole_tensors

#: The optimizer of a step: that of its plan.
PLANNED = "plan"
#: The form of program.json that is read.
FORMAT = 3


class Step(Schedule):
    """A step of training by a plan. Call it with a batch: tensors by name, of all ranks or of this one's rows alone."""

    def __init__(
        self, module: Any, facts: Mapping[str, Any], weights: Weights, adapter: Union[str, Path, None] = None,
        plan: Union[str, Path, None] = None, optimizer: Optional[str] = PLANNED,
    ) -> None:
        if optimizer not in (None, PLANNED):
            raise TypeError(f'optimizer is "{PLANNED}", or None for one of your own, not {optimizer!r}')
        # Whether somebody else updates parameters.
        self._gives = optimizer is None
        # Of the gradients that are handed out: what they were multiplied by, if this rank has any, and their norm over
        # all ranks before that and since they were clipped.
        self._factor: Optional[Tensor] = None
        self._plain: Optional[Tensor] = None
        self._norm: Optional[Tensor] = None
        if self._gives:
            self._hand_out(module, facts)
        super().__init__(module, facts)
        #: The hash of the plan.
        self.plan: str = facts["plan"]
        self._plan, self._states = plan, facts["states"]
        #: The plan that made this step, if one did.
        self.made_by: Any = None
        self._base = ["--weights", str(weights)] if isinstance(weights, (str, Path)) else []
        self.weights: List[Dict[str, Any]] = facts["weights"]
        #: Steps that were taken.
        self.steps = 0
        # Steps before the optimizer's states began anew.
        self._before = 0
        #: The learning rate of a step, counted from 1.
        self.lr: Callable[[int], float] = self._planned_lr
        self._scale = LossScale(self.settings.get("loss_scaling"))
        self._device_mesh: Any = None
        self._load(weights if isinstance(weights, Values) else Tensors(weights, adapter))

    def __call__(self, batch: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """Trains on a batch; the loss, the norm of gradients and other metrics, on all ranks.

        With `optimizer=None` it leaves gradients at the parameters, and updates none.
        """
        self._begin(batch, "step")
        if self._gives:
            for x in self.parameters().values():
                x.grad = None
        update = max(self.steps + 1 - self._scale.skipped - self._before, 0)
        lr = self.lr(self.steps + 1 - self._scale.skipped)
        out = self._run("step", self.steps + 1, {"lr": lr, "step": update, "loss_scale": self._scale.scale})
        self._inputs.end()
        self.steps += 1
        if self._gives:
            self._plain, self._norm = out["grad_norm"] * self._scale.scale, None
        if self._scale.how is not None:
            self._scale.update(math.isfinite(float(out["grad_norm"])))
        return out

    def evaluate(self, batch: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """The loss of a batch, which changes nothing."""
        if not self._lists["evaluation"]:
            raise wrong("the plan has no evaluation", "call the step itself: it does not train", "no-evaluation")
        self._begin(batch, "evaluation")
        out = self._run("evaluation", 0, {"loss_scale": self._scale.scale})
        self._inputs.end()
        return out

    def _begin(self, batch: Mapping[str, Tensor], what: str) -> None:
        self._inputs.begin(batch, what)
        args = (a for f in self._functions.values() for a in f.args if a[1][0] == "input" and self._types[a[2]].over)
        self._inputs.agree({name: self._types[t].over[0].place for _, (_, name), t in args})

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
            if kind == "param" or (lasts(kind) and not self._gives):
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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """With `optimizer=None`, makes the norm of all gradients of the last step at most this; what it was before.

        It is the norm over all ranks: `torch.nn.utils.clip_grad_norm_` would take that of this rank's pieces alone. To be
        called on all ranks.
        """
        gradients, norm = self.gradients(), self._norm
        if self._plain is None:
            raise wrong("no step has left gradients", "call the step with a batch first", "torch")
        if norm is None:
            # A rank that trains nothing knows it from others.
            factor = torch.zeros((), device=device) if self._factor is None else self._factor.clone()
            if self.mesh.ranks > 1:
                dist.all_reduce(factor, dist.ReduceOp.MAX)
            norm = self._plain * factor
        by = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients.values():
            g.mul_(by)
        self._norm = norm * by
        return norm

    def _hand_out(self, module: Any, facts: Mapping[str, Any]) -> None:
        """Makes of updates of parameters the gradients that they would have used."""
        if facts["programs"]:
            raise wrong(
                f"the plan updates {facts['programs'][0]!r} by a program, in which no gradient stands by itself",
                "compile with --optimizer sgd, which keeps no state, for an optimizer of your own", "torch",
            )

        def sgd(p: Tensor, g: Tensor, lr: Tensor, scale: Tensor, applies: Optional[Tensor] = None, **how: Any) -> None:
            self._factor = scale
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

    def _planned_lr(self, step: int) -> float:
        how = self.settings["lr"]
        lr = float(how["lr"])
        if how["kind"] == "constant":
            return lr
        warmup, total, floor = how["warmup"], how["total"], float(how["floor"])
        if step <= warmup:
            return lr * step / warmup
        begin = max(total - how.get("decay", total), warmup)
        if step <= begin:
            return lr
        done = min((step - begin) / max(total - begin, 1), 1.0)
        left = {"warmup_cosine": 0.5 * (1 + math.cos(math.pi * done)), "warmup_linear": 1 - done}[how["kind"]]
        return floor + (lr - floor) * left

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
                if not lasts(kind) or key in filled:
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
