"""Questions about models and plans, each answered by a command as data."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from contextlib import ExitStack
from typing import Any, Mapping, Optional, Sequence, Type, TypeVar, Union

from . import _answers as answers
from ._command import ShardcError, find_binary, run
from ._plan import Model, Plan, flags, source_of

Answer = TypeVar("Answer")
#: A plan, or its folder.
AnyPlan = Union[Plan, str, "os.PathLike[str]"]


def read(json_value: Any, wanted: Any) -> Any:
    """A value of JSON as a type: dataclasses by their fields; keys that no field has are left out."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Union:
        own = [a for a in args if a is not type(None)]
        return None if json_value is None else read(json_value, own[0]) if len(own) == 1 else json_value
    if origin is list:
        return [read(x, args[0]) for x in json_value]
    if origin is dict:
        return {k: read(x, args[1]) for k, x in json_value.items()}
    if dataclasses.is_dataclass(wanted):
        hints = typing.get_type_hints(wanted, vars(answers))
        given = {k.replace("-", "_"): x for k, x in json_value.items()}
        needed = [f.name for f in dataclasses.fields(wanted) if f.default is dataclasses.MISSING]
        for name in needed:
            if name.rstrip("_") not in given:
                what = f"the command {find_binary()} and this package are of different versions: its answer has no `{name}`"
                raise ShardcError({"message": what, "help": ["install both from one wheel, or give SHARDC_BINARY another command"]})
        return wanted(**{k: read(given[k.rstrip("_")], t) for k, t in hints.items() if k.rstrip("_") in given})
    return json_value


def _answer(wanted: Type[Answer], words: Sequence[str], no: int = 0) -> Answer:
    out: Answer = read(json.loads(run(words, no)), wanted)
    return out


def _path(plan: AnyPlan) -> str:
    return str(plan.path) if isinstance(plan, Plan) else str(os.fspath(plan))


def plan(model: Model, **options: Any) -> answers.Planned:
    """Layouts of a model for so many GPUs, fastest first: `shardc.plan("my-model", gpus=64, machine="h100-sxm")`.

    Options are flags of `shardc plan`.
    """
    with source_of(model) as source:
        return _answer(answers.Planned, ["plan", source, *flags(options)])


def check(model: Model, mesh: Union[str, Mapping[str, int], None] = None, **options: Any) -> answers.Check:
    """The rules that a model on a mesh breaks, with the nearest legal values. Options are flags of `shardc check`."""
    with source_of(model) as source:
        return _answer(answers.Check, ["check", source, *flags(options, mesh)], 1)


def audit(
    software: str,
    config: Optional[Model] = None,
    arguments: Sequence[str] = (),
    model: Optional[Model] = None,
    **options: Any,
) -> answers.Audit:
    """What a configuration of other software does to gradients: `shardc.audit("megatron", "args.txt", gpus=32)`.

    A configuration is a file, or the mapping that it would have; arguments are flags of Megatron-LM. Options are flags of
    `shardc audit`.
    """
    with ExitStack() as stack:
        given = {"config": config, "model": model}
        path = {k: v if v is None else stack.enter_context(source_of(v)) for k, v in given.items()}
        words = ["audit", software, *([] if config is None else [path["config"]])]
        words += flags({**options, "model": path["model"]})
        return _answer(answers.Audit, [*words, *(["--", *arguments] if arguments else [])], 1)


def price(plan: AnyPlan, **options: Any) -> answers.Price:
    """How long a step of a plan takes on a machine, and why. Options are flags of `shardc price`."""
    return _answer(answers.Price, ["price", _path(plan), *flags(options)])


def verify(plan: AnyPlan, **options: Any) -> answers.Verified:
    """Whether a plan is what its model compiles to, and computes its numbers. Options are flags of `shardc verify`."""
    return _answer(answers.Verified, ["verify", _path(plan), *flags(options)], 1)


def prove(plan: AnyPlan, **options: Any) -> answers.Proof:
    """Whether a plan computes what its model does, whatever the numbers. Options are flags of `shardc prove`."""
    return _answer(answers.Proof, ["prove", _path(plan), *flags(options)], 1)


def diff(before: AnyPlan, after: AnyPlan, **options: Any) -> answers.Diff:
    """What differs between two plans, and which options make it. Options are flags of `shardc diff`."""
    return _answer(answers.Diff, ["diff", _path(before), _path(after), *flags(options)], 1)


def export(plan: AnyPlan, to: str, output: Union[str, "os.PathLike[str]", None] = None, **options: Any) -> str:
    """A plan as flags or files of other software; what `shardc export` prints, which is nothing with an output."""
    words = ["export", _path(plan), "--to", to, *([] if output is None else ["-o", str(output)])]
    return json.loads(run([*words, *flags(options)])).get("text", "")


def report(plan: AnyPlan, output: Union[str, "os.PathLike[str]"], **options: Any) -> None:
    """Writes the page of a plan. Options are flags of `shardc report`."""
    run(["report", _path(plan), "-o", str(output), *flags(options)])
