"""The tensors of a model's folder, and parameters as plans have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Union

import torch
from torch import Tensor

from ._data import wrong


class Values:
    """What a rank keeps, before its first step."""

    def first(self, kind: str, name: str, weight: Mapping[str, Any], init: Any, extents: Sequence[Tuple[int, int]]) -> Tensor:
        """A piece of a parameter or a state; `init` is a number, or "file" for what `weight` says."""
        raise NotImplementedError


#: Tensors by name, the folder of a model, or who has them.
Weights = Union[str, Path, Mapping[str, Tensor], Values]


class Tensors(Values):
    """Tensors of a folder of safetensors, of which pieces are read, of an archive of torch.export, or of a mapping."""

    def __init__(self, weights: Weights, adapter: Union[str, Path, None] = None) -> None:
        self._given: Mapping[str, Tensor] = {}
        self._files: Dict[str, Any] = {}
        if adapter is not None:
            self._open(Path(adapter) / "adapter_model.safetensors", "give --adapter the folder of an adapter")
        assert not isinstance(weights, Values)
        if isinstance(weights, Mapping):
            self._given = weights
            return
        folder = Path(weights)
        if folder.suffix == ".pt2":
            archive = torch.export.load(folder)
            self._given = {**archive.constants, **archive.state_dict}
            return
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        for name in files:
            self._open(folder / name, "give --weights the folder of a model")

    def first(self, kind: str, name: str, weight: Mapping[str, Any], init: Any, extents: Sequence[Tuple[int, int]]) -> Tensor:
        if init == "file":
            return self.parameter(weight, extents)
        return torch.full([n for _, n in extents], float(init))

    def _open(self, file: Path, way: str) -> None:
        from safetensors import safe_open

        if not file.is_file():
            raise wrong(f"{file} is not there", way, "missing-weights")
        opened = safe_open(str(file), "pt")
        self._files.update({key: opened for key in opened.keys()})

    def read(self, name: str, extents: Sequence[Tuple[int, int]]) -> Tensor:
        """A piece of a tensor, by where it begins in each dim and its length."""
        box = tuple(slice(s, s + n) for s, n in extents)
        if name in self._given:
            return self._given[name][box]
        if name not in self._files:
            way = "give the model that was compiled"
            if ".lora_" in name:
                way = "give --adapter DIR: shardc run PLAN --weights MODEL --steps 0 --save DIR makes a new adapter"
            raise wrong(f"the weights have no tensor {name!r}", way, "missing-tensor")
        if not box:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[box]

    def parameter(self, weight: Mapping[str, Any], extents: Sequence[Tuple[int, int]]) -> Tensor:
        """A piece of a parameter: a part of a tensor, every so many indices of one, or a stack of one per expert."""
        if is_stacked(weight):
            (first, n), rest = extents[0], extents[1:]
            each = [self.read(weight["tensor"].replace("{}", str(e), 1), rest) for e in range(first, first + n)]
            return torch.stack(each) if each else torch.empty([m for _, m in extents])
        part = weight.get("part")
        if part is None:
            return self.read(weight["tensor"], extents)
        dim, step = part["dim"], part.get("step", 1)
        (s, n), own = extents[dim], list(extents)
        own[dim] = (part["start"] + s * step, max(0, (n - 1) * step + 1))
        return self.read(weight["tensor"], own)[every(dim, slice(None, None, step))]


def is_stacked(weight: Mapping[str, Any]) -> bool:
    """Whether each expert has a tensor of its own."""
    return bool(weight.get("experts")) and "{}" in weight["tensor"]


def every(dim: int, indices: slice) -> Tuple[slice, ...]:
    """All indices of the dims before, and these of one."""
    return (slice(None),) * dim + (indices,)


def whole_tensors(weights: List[Dict[str, Any]], parameters: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Parameters as the tensors of a checkpoint; one of which a part is missing is left out."""
    out: Dict[str, Tensor] = {}
    filled: Dict[str, int] = {}
    for w in weights:
        x = parameters.get(w["param"])
        if x is None:
            continue
        stacked, shape = is_stacked(w), w["tensor_shape"]
        for e in range(w["experts"] if stacked else 1):
            name, own = (w["tensor"].replace("{}", str(e), 1), x[e]) if stacked else (w["tensor"], x)
            tensor = out.setdefault(name, own.new_empty(shape))
            part = w.get("part")
            if part is None:
                tensor.copy_(own)
            else:
                dim, start, step = part["dim"], part["start"], part.get("step", 1)
                tensor[every(dim, slice(start, start + part["len"] * step, step))] = own
            filled[name] = filled.get(name, 0) + own.numel()
    return {name: tensor for name, tensor in out.items() if tensor.numel() == filled[name]}
