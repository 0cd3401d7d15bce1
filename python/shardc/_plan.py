"""Compiling a model, and asking a plan."""

from __future__ import annotations

import html
import json
import os
import shutil
import tempfile
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from ._command import ShardcError, lines, run

if TYPE_CHECKING:
    import torch

    from .torch import Step

#: Flags of the command that `compile` gives itself, or that answer with no plan.
_OWN = {"help", "format", "output", "version"}

Inputs = Union[Mapping[str, Any], Tuple[Any, ...]]
#: A path, a configuration (the contents of config.json), or a live module.
Model = Union[str, "os.PathLike[str]", Mapping[str, Any], "torch.nn.Module"]


@dataclass(frozen=True)
class Parameter:
    """How the ranks of one rank class hold a parameter between steps."""

    name: str
    shape: Tuple[int, ...]
    #: Element type, as f32.
    dtype: str
    #: One of `Shard(DIM)` and `Replicate()` for each axis of `mesh`, outer to inner.
    placements: Tuple[str, ...]
    #: Axes and sizes, without that of the pipeline, outer to inner.
    mesh: Tuple[Tuple[str, int], ...]
    #: The ranks that hold it, in the order of `mesh`.
    ranks: Tuple[int, ...]


@dataclass(frozen=True)
class Explanation:
    """Why something of a plan is as it is."""

    subject: str
    #: Lines by the name of a part: type, why, used by, memory.
    parts: Dict[str, List[str]]
    #: The same as data: types, bytes, groups; empty for a rule.
    facts: Dict[str, Any]

    def __str__(self) -> str:
        lines = [f"{name if i == 0 else '':<10}{line}" for name, part in self.parts.items() for i, line in enumerate(part)]
        return "\n".join([self.subject, *lines])


class Plan:
    """A compiled plan: the folder that `shardc compile -o` writes."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        #: The folder.
        self.path = Path(path).absolute()
        #: What was compiled; None if that is not known.
        self.model: Optional[Path] = None
        #: What the command said of compiling; empty for a plan that was opened.
        self.report: Dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"shardc.Plan({str(self.path)!r})"

    def _json(self, command: str, *args: str) -> Any:
        return json.loads(run([command, str(self.path), *args]))

    @property
    def summary(self) -> Dict[str, Any]:
        """Mesh, memory and collectives per layer of every rank class, as `shardc inspect --summary` has them."""
        out: Dict[str, Any] = self._json("inspect", "--summary")
        return out

    @property
    def memory(self) -> Dict[str, int]:
        """Bytes of the rank that needs most, at its peak, by what they are for; `peak` is their sum."""
        text = (self.path / "plan.json").read_text(encoding="utf-8")
        classes = json.loads(text)["report"]["per_class"]
        most = max(classes, key=lambda c: int(c["peak_bytes"]))
        kinds = ["weights", "grads", "optimizer", "activation", "collective_buffer", "temporary", "input", "peak"]
        return {kind: int(most[f"{kind}_bytes"]) for kind in kinds}

    def explain(self, what: str) -> Explanation:
        """Explains `%value`, `collective:N`, `tensor:NAME`, `rule:CODE` or `price`."""
        answer = self._json("explain", what)
        subject = answer.pop("subject")
        answer.pop("$schema")
        facts = answer.pop("facts", {})
        page = answer.pop("page", None)
        return Explanation(subject, answer if page is None else {"": page.splitlines()}, facts)

    @property
    def parameters(self) -> List[Parameter]:
        """How ranks hold each parameter: one entry for each rank class that has it.

        Raises ShardcError where DTensor cannot say it: shards in an order other than the mesh's, or uneven ones.
        """
        found = json.loads(json.loads(run(["export", str(self.path), "--to", "dtensor"]))["text"])
        mesh = tuple(zip(found["mesh_dim_names"], found["mesh_shape"]))
        ranks = [tuple(own) for own in found["ranks_of_class"]]
        return [
            Parameter(p["name"], tuple(p["shape"]), p["dtype"], tuple(p["placements"]), mesh, ranks[p["class"]])
            for p in found["parameters"]
        ]

    def placements(self) -> Dict[str, Tuple[Any, ...]]:
        """Placements of DTensor for each parameter, on a DeviceMesh with the axes of `Parameter.mesh`.

        Raises ShardcError without torch, and where `parameters` does.
        """
        try:
            from torch.distributed.tensor import Replicate, Shard
        except ModuleNotFoundError as error:
            raise ShardcError(
                {
                    "code": "missing-library",
                    "message": "placements are those of torch, which is not installed",
                    "place": "Plan.placements()",
                    "help": ["pip install torch, 2.5 or newer; or read Plan.parameters, which has them as text"],
                }
            ) from error

        def read(word: str) -> Any:
            return Replicate() if word == "Replicate()" else Shard(int(word[len("Shard(") : -1]))

        return {p.name: tuple(read(word) for word in p.placements) for p in self.parameters}

    def _repr_html_(self) -> str:
        """The report, as a notebook shows it."""
        with tempfile.TemporaryDirectory(prefix="shardc-") as folder:
            page = Path(folder) / "report.html"
            run(["report", str(self.path), "-o", str(page)])
            text = page.read_text(encoding="utf-8")
        return f'<iframe srcdoc="{html.escape(text)}" style="width:100%;height:800px;border:0"></iframe>'

    def run(self, **options: Any) -> Iterator[Dict[str, Any]]:
        """Runs the plan, ranks as threads, and yields what each step and each evaluation came to, as they end.

        `options` are flags of `shardc run`, with `_` for `-`: `plan.run(data="train.jsonl", weights="my-model", epochs=2,
        save="tuned")`. A step has `step`, `loss`, `grad_norm`, `tokens` and `ms`, an evaluation `step` and `eval_loss`.
        Nothing runs before the first is asked for; whoever stops asking ends the run.
        """
        return lines(["run", str(self.path), *flags(options)])

    def torch(
        self, weights: Any = None, timeout: Optional[float] = None, optimizer: Optional[str] = "plan", compile: bool = False
    ) -> Step:
        """A step of the plan on this rank of torch.distributed: call it with a batch. See docs/torch.md.

        `weights` are a model's folder, by default the one that was compiled, or tensors by name. With `optimizer=None` the step
        gives gradients to an optimizer of yours; with `compile` torch compiles each kind of layer.
        """
        from .torch import load

        if weights is None and self.model is None:
            raise TypeError("which weights? The plan was opened, so its model is not known: give weights")
        with tempfile.TemporaryDirectory(prefix="shardc-") as folder:
            program = os.path.join(folder, "program")
            run(["export", str(self.path), "--to", "torch", "-o", program])
            step = load(program, self.model if weights is None else weights, timeout, None, self.path, optimizer, compile)
        # What it saves needs the plan's folder, which may go with the plan.
        step.made_by = self
        return step


def compile(
    model: Model,
    *,
    mesh: Union[str, Mapping[str, int], None] = None,
    output: Union[str, "os.PathLike[str]", None] = None,
    inputs: Optional[Inputs] = None,
    dynamic_shapes: Any = None,
    loss: Optional[Callable[..., Any]] = None,
    **options: Any,
) -> Plan:
    """Compiles a model for a mesh.

    `model` is a path (a Hugging Face folder or its config.json, an archive `.pt2`, a text `.ir`, a `shardc.toml`), the
    contents of a config.json, or a live `torch.nn.Module`, which `torch.export` takes `inputs` and `dynamic_shapes` of.
    A module that returns no loss is given one: `loss(output, labels)`, of what it returns and of those `inputs` that the
    other arguments of the function name.
    `mesh` is as `"dp=2,tp=2"`, or a mapping. `output` is the folder of the plan; without, it is a temporary one that goes with
    the Plan. All else are flags of `shardc compile`, with `_` for `-`: True gives a flag, False and None leave it
    out, a list gives it once for each item.

    Raises ShardcError with the code, message and help of the command.
    """
    if inputs is None and dynamic_shapes is not None:
        raise TypeError("dynamic_shapes are those of inputs: give both")
    traced = (inputs, dynamic_shapes, loss)
    if output is not None:
        return _compiled(model, Path(output).absolute(), mesh, traced, options)
    folder = tempfile.mkdtemp(prefix="shardc-")
    try:
        plan = _compiled(model, Path(folder) / "plan", mesh, traced, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(plan, shutil.rmtree, folder, ignore_errors=True)
    return plan


def _compiled(
    model: Model,
    out: Path,
    mesh: Union[str, Mapping[str, int], None],
    traced: Tuple[Optional[Inputs], Any, Optional[Callable[..., Any]]],
    options: Mapping[str, Any],
) -> Plan:
    path: Path
    if isinstance(model, (str, os.PathLike)):
        _no_inputs(traced)
        if not os.fspath(model):
            raise ValueError("the path of the model is empty")
        path = Path(model)
        # `ORG/NAME` of a cache is not a path.
        source = str(path.absolute()) if path.exists() else str(os.fspath(model))
    elif isinstance(model, Mapping):
        _no_inputs(traced)
        path = _beside(out) / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(model)), encoding="utf-8")
        source = str(path)
    else:
        try:
            from ._export import export
        except ModuleNotFoundError as error:
            what = f"{type(model).__name__} is no model: give a path or a configuration, or a module where torch is installed"
            raise TypeError(what) from error

        path = export(model, _beside(out), *traced)
        source = str(path)
        options = _frozen(model, options)
    args = ["compile", source, "-o", str(out), *flags(options, mesh)]
    plan = Plan(out)
    plan.report = json.loads(run(args))
    plan.model = path
    return plan


def _frozen(model: torch.nn.Module, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with the parameters frozen of which the module wants no gradient."""
    still = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not still or options.get("mode") == "infer":
        return options
    given = options.get("freeze") or []
    return {**options, "freeze": [*([given] if isinstance(given, str) else given), *still]}


@contextmanager
def source_of(model: Model) -> Iterator[str]:
    """A path or a configuration as the command takes it."""
    with tempfile.TemporaryDirectory(prefix="shardc-") as folder:
        if isinstance(model, Mapping):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(dict(model)), encoding="utf-8")
            yield str(path)
        elif isinstance(model, (str, os.PathLike)):
            yield str(os.fspath(model))
        else:
            raise TypeError("give a path or a configuration, or ask the plan of `compile`")


def _beside(out: Path) -> Path:
    """The folder of what is compiled into `out`."""
    return out.with_name(out.name + ".model")


def _no_inputs(traced: Tuple[Optional[Inputs], Any, Optional[Callable[..., Any]]]) -> None:
    inputs, _, loss = traced
    if inputs is not None or loss is not None:
        raise TypeError("inputs and loss are those of a live module")


def flags(options: Mapping[str, Any], mesh: Union[str, Mapping[str, int], None] = None) -> List[str]:
    """Options as words of the command."""
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    out: List[str] = []
    for name in _OWN & options.keys():
        raise TypeError(f"{name} is not an option here")
    for name, value in {"mesh": mesh, **options}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            out.append(flag)
        elif value is not False and value is not None:
            # One word: a value may begin with a dash.
            out += [f"{flag}={v}" for v in (value if isinstance(value, (list, tuple)) else [value])]
    return out
