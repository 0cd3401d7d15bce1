"""What ranks keep as DTensors, for `torch.distributed.checkpoint` and whoever else takes those."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
from torch import Tensor

from ._data import Layout, wrong
from ._mesh import Mesh, device


def device_mesh(mesh: Mesh) -> Any:
    """The mesh of torch for the ranks of one stage of the pipeline; to be called on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, _ in mesh.axes)
    whole = init_device_mesh(device.type, tuple(size for _, size in mesh.axes), mesh_dim_names=names)
    own = tuple(name for name in names if name != "pp")
    return whole[own] if own != names else whole


def placements(mesh: Mesh, layout: Layout, name: str) -> Tuple[Any, ...]:
    """How a value lies on the axes of `device_mesh`; raises ShardcError where DTensor has no word for it."""
    from torch.distributed.tensor import Replicate, Shard

    axes = [axis for axis, _ in mesh.axes if axis != "pp"]
    out: List[Any] = [Replicate()] * len(axes)
    for dim, over in enumerate(layout.over):
        order = [axes.index(axis) for axis, _, _ in over.atoms]
        parts = any(size != mesh.sizes[axis] for axis, _, size in over.atoms)
        if parts or order != sorted(order) or layout.sizes[dim] % over.ways:
            why = "part of an axis splits it" if parts else "its pieces are uneven, or lie in another order than the mesh's"
            raise wrong(f"DTensor cannot say how dim {dim} of {name!r} is split: {why}", "use Step.save, which can", "export")
        for i in order:
            out[i] = Shard(dim)
    return tuple(out)


def dtensor(x: Tensor, layout: Layout, mesh: Any, how: Tuple[Any, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(layout.sizes)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, how, run_check=False, shape=shape, stride=stride)
