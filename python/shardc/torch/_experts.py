"""Rows of experts: buffers `[g,z,c,h]` of g groups and z shards of tokens, whose first rows experts have by `counts` `[g,e,z]`."""

from __future__ import annotations

from typing import Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def route(index: Tensor, groups: int, experts: int, rows: int, capacity: Optional[int]) -> Tuple[Tensor, Tensor]:
    """The row of each copy of a token, by expert and then by token, and how many rows experts have; -1 of padding, whose expert is
    negative."""
    z, t, k = index.shape
    flat = index.reshape(z, -1).long()
    real, flat = flat >= 0, flat.clamp(min=0)
    hot = F.one_hot(flat, groups * experts) * real[..., None]
    n = hot.sum(1)
    rank = (hot.cumsum(1) * hot).sum(-1) - 1
    if capacity is not None:
        n = n.clamp(max=capacity)
    n = n.view(z, groups, experts)
    if capacity is None:
        torch._assert_async((n.sum(-1) <= rows).all(), "a buffer of experts is too small for their rows")
    first = (n.cumsum(-1) - n).flatten(1)
    slot = flat // experts * rows + first.gather(1, flat) + rank
    if capacity is not None:
        real = real & (rank < capacity)
    slot = torch.where(real, slot, -1)
    return slot.view(z, t, k).int(), n.permute(1, 2, 0).int().contiguous()


def _inside(slot: Tensor, rows: int) -> Tensor:
    return (slot >= 0) & (slot < rows)


def dispatch(x: Tensor, slot: Tensor, gates: Tensor, groups: int, rows: int) -> Tensor:
    """Copies of tokens `[z,t,h]`, times their gates, in the rows that slots `[z,t,k]` name; others are 0."""
    z, h = slot.shape[0], x.shape[-1]
    # What is dropped goes into a row of its own.
    at = torch.where(_inside(slot, groups * rows), slot.long(), groups * rows).flatten(1)
    copies = (x[:, :, None] * gates[..., None].to(x.dtype)).flatten(1, 2)
    y = x.new_zeros(z, groups * rows + 1, h).scatter_(1, at[..., None].expand_as(copies), copies)
    return y[:, :-1].view(z, groups, rows, h).transpose(0, 1).contiguous()


def _rows_at(rows: Tensor, slot: Tensor) -> Tensor:
    """The row of each copy, `[z,t,k,h]`; 0 of one that was dropped."""
    g, z, c, h = rows.shape
    inside = _inside(slot, g * c)
    at = torch.where(inside, slot.long(), 0).flatten(1)
    flat = rows.transpose(0, 1).reshape(z, g * c, h).gather(1, at[..., None].expand(-1, -1, h))
    return flat.view(*slot.shape, h).masked_fill_(~inside[..., None], 0.0)


def unpermute(rows: Tensor, slot: Tensor, gates: Tensor) -> Tensor:
    """The sum over copies of a token of their rows times their gates."""
    return _rows_at(rows, slot).mul_(gates[..., None].to(rows.dtype)).sum(2)


def combine_gates_grad(rows: Tensor, slot: Tensor, x: Tensor) -> Tensor:
    """For each copy of a token the product of its row with the token's."""
    return torch.einsum("ztkh,zth->ztk", _rows_at(rows, slot).float(), x.float())


def _runs(counts: Tensor) -> Iterator[Tuple[int, int, slice, int]]:
    """Group, shard, rows and expert (of this rank) of all that have rows."""
    for g, shards in enumerate(counts.permute(0, 2, 1).tolist()):
        for z, experts in enumerate(shards):
            first = 0
            for e, n in enumerate(experts):
                if n:
                    yield g, z, slice(first, first + n), g * len(experts) + e
                first += n


def _has_kernel(*all: Tensor) -> bool:
    """Whether torch multiplies groups of rows by one call: on devices of bf16, and where rows are of whole 16 bytes."""
    fits = all[0].device.type == "cpu" or all[0].dtype == torch.bfloat16
    return fits and not any(t.shape[-1] * t.element_size() % 16 for t in all)


def _ends(counts: Tensor) -> Tensor:
    """Where the rows of each expert end, `[g,z,e]`."""
    return counts.permute(0, 2, 1).cumsum(-1, dtype=torch.int32)


def _grouped(x: Tensor, counts: Tensor, w: Tensor, has_kernel: bool) -> Tensor:
    """Rows times the weights `[(g e),i,o]` of their experts."""
    if not has_kernel:
        y = x.new_zeros(*x.shape[:3], w.shape[2])
        for g, z, rows, e in _runs(counts):
            y[g, z, rows] = x[g, z, rows] @ w[e]
        return y
    ends = _ends(counts)
    own = list(enumerate(w.chunk(len(ends))))
    parts = [torch._grouped_mm(x[g, z], of, offs=ends[g, z]) for g, of in own for z in range(ends.shape[1])]
    y = (torch.stack(parts) if len(parts) > 1 else parts[0]).view(*x.shape[:3], w.shape[2])
    # What is behind all experts' rows the kernel leaves as it was.
    unfilled = torch.arange(x.shape[2], device=x.device) >= ends[..., -1:]
    return y.masked_fill_(unfilled[..., None], 0.0)


def grouped_dot(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """Rows times the weights `[(g e),o,i]` of their experts."""
    return _grouped(x, counts, w.transpose(1, 2), _has_kernel(x, w))


def grouped_dot_t(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """The same, summed over the weights' other dim."""
    return _grouped(x, counts, w, _has_kernel(x, w))


def grouped_outer(y: Tensor, counts: Tensor, x: Tensor) -> Tensor:
    """For each expert the sum over its rows of outer products."""
    if _has_kernel(y, x):
        ends, parts = _ends(counts), []
        for g in range(len(ends)):
            of = torch._grouped_mm(y[g, 0].t(), x[g, 0], offs=ends[g, 0])
            for z in range(1, ends.shape[1]):
                of.add_(torch._grouped_mm(y[g, z].t(), x[g, z], offs=ends[g, z]))
            parts.append(of)
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    w = y.new_zeros(counts.shape[0] * counts.shape[1], y.shape[3], x.shape[3])
    for g, z, rows, e in _runs(counts):
        w[e].addmm_(y[g, z, rows].t(), x[g, z, rows])
    return w
