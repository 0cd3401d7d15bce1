"""A live module as an archive of torch.export."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

import torch

#: Tokens of the batch that is made up for a language model, and the rows of it.
TOKENS, ROWS = 64, 2


def export(
    model: Any, folder: Path, inputs: Union[Mapping[str, Any], Tuple[Any, ...], None], shapes: Any,
    loss: Optional[Callable[..., Any]] = None,
) -> Path:
    """Writes `model.pt2`, with its numbers, and config.json if the model has one; the archive."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a model is a path, a mapping or a torch.nn.Module, not {type(model).__name__}")
    if loss is not None:
        model = _with_loss(model, loss, inputs)
    if inputs is None:
        inputs, shapes = _tokens(model)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    try:
        if caches is not None:
            # A cache would be a result.
            config.use_cache = False
        program = torch.export.export(model, args, kwargs, strict=False, dynamic_shapes=shapes)
    finally:
        if caches is not None:
            config.use_cache = caches
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.pt2"
    torch.export.save(program, path)
    # Of the model that was there before.
    (folder / "config.json").unlink(missing_ok=True)
    if hasattr(config, "to_dict"):
        known: Dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
        plan = getattr(config, "base_model_tp_plan", None)
        if plan:
            known["base_model_tp_plan"] = dict(plan)
        (folder / "config.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
    return path


def _with_loss(model: torch.nn.Module, loss: Callable[..., Any], inputs: Any) -> torch.nn.Module:
    """The module, its loss first among its results: `loss` takes what it returns, and the inputs that its arguments name."""
    if not isinstance(inputs, Mapping):
        raise TypeError("which inputs does the loss take? Give inputs as a dict: arguments of the loss are its keys")
    wanted = list(inspect.signature(loss).parameters)[1:]
    missing = [name for name in wanted if name not in inputs]
    if missing:
        raise TypeError(f"the loss takes {missing[0]!r}, and inputs have {', '.join(inputs) or 'nothing'}")
    forward = model.forward
    taken = inspect.signature(forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    names = [name for name in inputs if name in taken or (takes_all and name not in wanted)]
    unread = [name for name in inputs if name not in names and name not in wanted]
    if unread:
        raise TypeError(f"neither the module nor the loss takes {unread[0]!r}")

    def both(**given: Any) -> Any:
        out = forward(**{name: given[name] for name in names})
        return loss(out, **{name: given[name] for name in wanted}), out

    keyword = inspect.Parameter.KEYWORD_ONLY
    both.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in inputs])  # type: ignore[attr-defined]
    # Of the same submodules and parameters, by the same names.
    own = copy.copy(model)
    own.forward = both
    return own


def _tokens(model: torch.nn.Module) -> Tuple[Dict[str, Any], Any]:
    """Tokens and labels for a language model of transformers, of any number."""
    config: Any = getattr(model, "config", None)
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        raise TypeError("what does this module take? Give inputs: a dict of keywords, or a tuple")
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    most = getattr(config, "max_position_embeddings", None)
    tokens = min(TOKENS, max(most // 2, 2)) if isinstance(most, int) else TOKENS
    ids = torch.zeros(ROWS, tokens, dtype=torch.long, device=where)
    dim = torch.export.Dim("seq", max=most) if isinstance(most, int) else torch.export.Dim("seq")
    dims = {0: torch.export.Dim("batch"), 1: dim}
    # One tensor for both would be one input.
    return {"input_ids": ids, "labels": ids.clone()}, {"input_ids": dims, "labels": dims}
