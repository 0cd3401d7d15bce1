"""Collectives over groups of the mesh. With `wait=False` one is begun, and `.wait()` gives its result."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Sequence, Union

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ._mesh import Exchange, Over


class Pending:
    """A collective that was begun."""

    def __init__(self, work: List[Any], done: Callable[[], Any]) -> None:
        self._work, self._done = work, done

    def wait(self) -> Any:
        """Its result, once it is there."""
        # What is done has its operands no longer.
        while self._work:
            self._work.pop(0).wait()
        return self._done()


def _result(work: Any, done: Callable[[], Any], wait: bool) -> Any:
    pending = Pending(work if isinstance(work, list) else [work], done)
    return pending.wait() if wait else pending


def _filled(x: Tensor, dim: int, size: int) -> Tensor:
    """`x`, with zeros behind it up to a size."""
    short = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, short]) if short else x


def all_reduce(x: Union[Tensor, List[Tensor]], over: Over, how: str = "sum", wait: bool = True) -> Any:
    """The sum, max or min over ranks; of several tensors in one call."""
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[how]
    if isinstance(x, Tensor):
        flat = x.clone(memory_format=torch.contiguous_format)
        return _result(dist.all_reduce(flat, op, over.group, async_op=True), lambda: flat, wait)
    shapes = [t.shape for t in x]
    flat = torch.cat([t.reshape(-1) for t in x])
    del x

    def done() -> List[Tensor]:
        parts = flat.split([math.prod(s) for s in shapes])
        return [t.view(s) for t, s in zip(parts, shapes)]

    return _result(dist.all_reduce(flat, op, over.group, async_op=True), done, wait)


def all_gather(x: Tensor, over: Over, dim: int, piece: int, size: int, wait: bool = True) -> Any:
    """The pieces of a dim, of `piece` elements each, one after the other: `size` of them."""
    x = _filled(x, dim, piece).contiguous()
    out = x.new_empty(over.ways, *x.shape)
    work = dist.all_gather_into_tensor(out.view(-1), x.view(-1), over.group, async_op=True)

    def done() -> Tensor:
        if dim == 0 and over.order == sorted(over.order):
            return out.flatten(0, 1)[:size]
        return torch.cat([out[k] for k in over.order], dim).narrow(dim, 0, size)

    return _result(work, done, wait)


def reduce_scatter(x: Tensor, over: Over, dim: int, piece: int, size: int, wait: bool = True) -> Any:
    """This rank's piece, `size` of `piece` elements, of the sum over ranks."""
    parts = _filled(x, dim, piece * over.ways).unflatten(dim, (over.ways, piece)).movedim(dim, 0)
    if over.order != sorted(over.order):
        parts = parts[[over.order.index(k) for k in range(over.ways)]]
    parts = parts.contiguous()
    if parts.device.type == "cpu":
        # gloo scatters by reducing all of it on all ranks: here each sends the others their pieces alone.
        got, sent = torch.empty_like(parts), [parts]
        begun = [dist.all_to_all_single(got.view(-1), parts.view(-1), group=over.group, async_op=True)]
        del parts

        def summed() -> Tensor:
            sent.clear()
            return got.sum(0).narrow(dim, 0, size)

        return _result(begun, summed, wait)
    out = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(out.view(-1), parts.view(-1), group=over.group, async_op=True)
    return _result(work, lambda: out.narrow(dim, 0, size), wait)


def broadcast(x: Tensor, over: Over, place: int, wait: bool = True) -> Any:
    """What the rank at a place has."""
    x = x.clone(memory_format=torch.contiguous_format)
    return _result(dist.broadcast(x, over.ranks[place], over.group, async_op=True), lambda: x, wait)


def reduce(x: Tensor, over: Over, place: int, wait: bool = True) -> Any:
    """The sum over ranks, at the rank of a place; zeros elsewhere."""
    x = x.clone(memory_format=torch.contiguous_format)
    own = over.place == place
    work = dist.reduce(x, over.ranks[place], group=over.group, async_op=True)
    return _result(work, lambda: x if own else torch.zeros_like(x), wait)


def permute(x: Tensor, over: Over, shift: int, wait: bool = True) -> Any:
    """What the rank has that is so many places before this one in the ring."""
    x = x.contiguous()
    out = torch.empty_like(x)
    to = over.ranks[(over.place + shift) % over.ways]
    ops = [dist.P2POp(dist.isend, x, to, over.group), dist.P2POp(dist.irecv, out, over.ranks[over.before(shift)], over.group)]
    work = dist.batch_isend_irecv(ops)
    return _result(work, lambda: (x, out)[1], wait)


def _count(box: Sequence[slice]) -> int:
    return math.prod(s.stop - s.start for s in box)


def exchange(x: Tensor, how: Exchange, wait: bool = True) -> Any:
    """The same tensor in another layout; 0 where nothing comes."""
    parts = [x[box].reshape(-1) for boxes in how.give for box in boxes]
    flat = torch.cat(parts) if parts else x.new_empty(0)
    del parts
    given = [sum(map(_count, boxes)) for boxes in how.give]
    taken = [sum(map(_count, boxes)) for boxes in how.take]
    out = x.new_empty(sum(taken))
    work = dist.all_to_all_single(out, flat, taken, given, how.over.group, async_op=True)

    def done() -> Tensor:
        y, at = x.new_zeros(how.shape), 0
        for box in (box for boxes in how.take for box in boxes):
            n = _count(box)
            y[box] = out[at : at + n].view([s.stop - s.start for s in box])
            at += n
        return y

    return _result(work, done, wait)


def all_to_all_v(x: Tensor, sent: Tensor, received: Tensor, over: Over, to_experts: bool, wait: bool = True) -> Any:
    """Rows `[g,z,c,h]` of experts: only those that the counts `[g,e,z]` name are sent, others are 0."""
    ways, width = over.ways, x.shape[-1]
    has, gets = sent.sum(1).tolist(), received.sum(1).tolist()

    def cells(counts: List[List[int]], by_group: bool, place: int) -> List[Any]:
        groups, shards = len(counts), len(counts[0])
        n = -(-(groups if by_group else shards) // ways)
        return [(g, z) for g in range(groups) for z in range(shards) if (g if by_group else z) // n == place]

    sends: List[Any] = [None] * ways
    sizes, back = [0] * ways, [[] for _ in range(ways)]
    for place in range(ways):
        at = over.order[place]
        rows = [x[g, z, : has[g][z]].reshape(-1) for g, z in cells(has, to_experts, place)]
        sends[at] = torch.cat(rows) if rows else x.new_empty(0)
        back[at] = cells(gets, not to_experts, place)
        sizes[at] = sum(gets[g][z] for g, z in back[at]) * width
    given = [s.numel() for s in sends]
    flat = torch.cat(sends)
    del sends, rows
    out = x.new_empty(sum(sizes))
    work = dist.all_to_all_single(out, flat, sizes, given, over.group, async_op=True)
    shape = (len(gets), len(gets[0]), x.shape[2], width)

    def done() -> Tensor:
        y, at = out.new_zeros(shape), 0
        for g, z in (cell for cells_of in back for cell in cells_of):
            n = gets[g][z]
            y[g, z, :n] = out[at : at + n * width].view(n, width)
            at += n * width
        return (flat, y)[1]

    return _result(work, done, wait)
