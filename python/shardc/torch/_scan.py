"""Gated linear recurrences and their gradients, a chunk of tokens at a time.

Shapes as in plans: q and k `[b,s,n,k]`, g and beta `[b,s,n]`, v `[b,s,n,v]`, segments `[b,s]`, states `[b,n,k,v]`. Within a
chunk the heads of all rows are one dim: `[bn,c,k]`.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

#: Tokens of a chunk.
CHUNK = 64


class Chunk(NamedTuple):
    """Tokens of a chunk, and how much of others each of them sees."""

    k: Tensor
    v: Tensor
    #: How much of token j is left at token i, `[bn,c,c]`; 0 where j is behind i or in another segment.
    pairs: Tensor
    #: How much of the state before the chunk is left at each token, `[bn,c,1]`.
    reads: Tensor
    #: How much of each token is left where the chunk ends, `[bn,c,1]`.
    keeps: Tensor
    beta: Optional[Tensor]


def _of(x: Tensor, part: slice) -> Tensor:
    """Tokens of a chunk, `[bn,c,…]`."""
    return x[:, part].transpose(1, 2).flatten(0, 1)


def _chunk(part: slice, k: Tensor, g: Tensor, v: Tensor, beta: Optional[Tensor], segments: Optional[Tensor]) -> Chunk:
    sums = g[:, part].transpose(1, 2).double().cumsum(2)
    c = sums.shape[2]
    same = torch.ones(c, c, dtype=torch.bool, device=k.device).tril()
    reads, keeps = sums.exp(), (sums[..., -1:] - sums).exp()
    if segments is not None:
        own = segments[:, part]
        # Equal segments apart are two.
        runs = torch.cat((torch.zeros_like(own[:, :1]), (own[:, 1:] != own[:, :-1]).cumsum(1)), 1)
        before = (runs == 0) & (own[:, :1] == segments[:, max(part.start - 1, 0), None])
        same = (same & (runs[:, :, None] == runs[:, None]))[:, None]
        reads, keeps = reads * before[:, None], keeps * (runs == runs[:, -1:])[:, None]
    pairs = (sums[..., :, None] - sums[..., None, :]).masked_fill_(~same, -torch.inf).exp_().to(k.dtype)
    reads, keeps = (x.to(k.dtype).flatten(0, 1)[..., None] for x in (reads, keeps))
    by = None if beta is None else _of(beta, part)[..., None]
    return Chunk(_of(k, part), _of(v, part), pairs.flatten(0, 1), reads, keeps, by)


def _written(c: Chunk, state: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """What tokens write, `[bn,c,v]`, and of the delta rule the products of keys by which it is solved."""
    if c.beta is None:
        return c.v, None
    products = torch.bmm(c.k, c.k.mT).mul_(c.pairs).tril_(-1)
    new = torch.baddbmm(c.v, c.k * c.reads, state, alpha=-1).mul_(c.beta)
    return torch.linalg.solve_triangular(products * c.beta, new, upper=False, unitriangular=True), products


def _further(c: Chunk, state: Tensor, new: Tensor) -> Tensor:
    """The state behind a chunk."""
    return (c.reads[:, -1:] * state).baddbmm_((c.k * c.keeps).mT, new)


def _parts(s: int) -> List[slice]:
    return [slice(i, i + CHUNK) for i in range(0, s, CHUNK)]


def scan(
    q: Tensor, k: Tensor, g: Tensor, v: Tensor, beta: Optional[Tensor] = None, segments: Optional[Tensor] = None,
    start: Optional[Tensor] = None, piece: Optional[int] = None,
) -> Tuple[Tensor, Tensor]:
    """The outputs `[b,s,n,v]` and the last state of S = a S + k vᵀ with a = e^g or, with `beta`, of
    S = a (I - beta k kᵀ) S + beta k vᵀ; the output of a token is Sᵀ q. A segment begins with a state of 0.
    Every `piece` tokens are walked by themselves: states are `[b,c,n,k,v]`."""
    if piece is not None:
        c = q.shape[1] // piece
        rows = [None if x is None else x.reshape(-1, piece, *x.shape[2:]) for x in (q, k, g, v, beta, segments)]
        o, end = scan(*rows, start=None if start is None else start.flatten(0, 1))
        return o.reshape(-1, c * piece, *o.shape[2:]), end.reshape(-1, c, *end.shape[1:])
    b, s, n, width = q.shape
    out = v.new_empty(b, s, n, v.shape[-1])
    state = q.new_zeros(b * n, width, v.shape[-1]) if start is None else start.flatten(0, 1)
    for part in _parts(s):
        c, own_q = _chunk(part, k, g, v, beta, segments), _of(q, part)
        new, _ = _written(c, state)
        o = torch.bmm(own_q * c.reads, state).baddbmm_(torch.bmm(own_q, c.k.mT).mul_(c.pairs), new)
        out[:, part].transpose(1, 2).copy_(o.unflatten(0, (b, n)))
        state = _further(c, state, new)
    return out, state.unflatten(0, (b, n))


def scan_grad(
    q: Tensor, k: Tensor, g: Tensor, v: Tensor, do: Tensor, d_end: Tensor,
    beta: Optional[Tensor] = None, segments: Optional[Tensor] = None, start: Optional[Tensor] = None,
    piece: Optional[int] = None,
) -> Tuple[Tensor, ...]:
    """The gradients of q, k, g, v, and of `beta` and `start` where they are given."""
    if piece is not None:
        rows = [None if x is None else x.reshape(-1, piece, *x.shape[2:]) for x in (q, k, g, v, do, beta, segments)]
        ends = [None if x is None else x.flatten(0, 1) for x in (d_end, start)]
        made = scan_grad(*rows[:5], ends[0], rows[5], rows[6], ends[1])
        of = [x for x in (q, k, g, v, beta, start) if x is not None]
        return tuple(x.view(y.shape) for x, y in zip(made, of))
    b, s, n, width = q.shape
    parts = _parts(s)
    # States before chunks are made again.
    states = [q.new_zeros(b * n, width, v.shape[-1]) if start is None else start.flatten(0, 1)]
    for part in parts[:-1]:
        c = _chunk(part, k, g, v, beta, segments)
        states.append(_further(c, states[-1], _written(c, states[-1])[0]))
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, g, v, beta) if x is not None]
    d_state = d_end.flatten(0, 1)
    for part in reversed(parts):
        c = _chunk(part, k, g, v, beta, segments)
        d_state, made = _chunk_grad(c, _of(q, part), _of(do, part), states.pop(), d_state)
        for out, x in zip(outs, made):
            out[:, part].transpose(1, 2).copy_(x.view(b, n, *x.shape[1:]))
        del c, made, x
    d_start = d_state.unflatten(0, (b, n))
    return (*outs, d_start) if start is not None else tuple(outs)


def _chunk_grad(c: Chunk, q: Tensor, do: Tensor, state: Tensor, d_end: Tensor) -> Tuple[Tensor, List[Tensor]]:
    """Of the state before a chunk and of its q, k, g, v and beta the gradients, from those of its outputs and of its last state."""
    new, products = _written(c, state)
    # Outputs are reads q S + T new with T = pairs q kᵀ; `d_far` is of exponents of pairs.
    d_pairs, t = torch.bmm(do, new.mT).mul_(c.pairs), torch.bmm(q, c.k.mT)
    d_far = t * d_pairs
    d_new = torch.bmm(t.mul_(c.pairs).mT, do).baddbmm_(c.k * c.keeps, d_end)
    del t
    dq, dk = torch.bmm(do, state.mT), torch.bmm(new, d_end.mT).mul_(c.keeps)
    # Of the exponents of reads and keeps.
    d_keeps = torch.linalg.vecdot(dk, c.k)
    d_sums = torch.linalg.vecdot(dq.mul_(c.reads), q) - d_keeps
    d_sums[:, -1] += d_keeps.sum(1) + (state * d_end).sum((1, 2)) * c.reads[:, -1, 0]
    d_state = (c.reads[:, -1:] * d_end).baddbmm_((q * c.reads).mT, do)
    dq.baddbmm_(d_pairs, c.k)
    dk.baddbmm_(d_pairs.mT, q)
    del d_pairs
    d_beta = None
    if c.beta is not None:
        assert products is not None
        # Written is (I + beta products)⁻¹ beta (v - reads k S).
        d_w = torch.linalg.solve_triangular((products * c.beta).mT, d_new, upper=True, unitriangular=True)
        d_products = torch.bmm(d_w, new.mT).neg_()
        read = torch.bmm(c.k, state).mul_(c.reads)
        d_beta = torch.linalg.vecdot(d_products, products) + torch.linalg.vecdot(d_w, c.v)
        d_beta -= torch.linalg.vecdot(d_w, read)
        d_products.mul_(c.beta)
        d_far.addcmul_(d_products, products)
        d_products.mul_(c.pairs).tril_(-1)
        dk.baddbmm_(d_products, c.k).baddbmm_(d_products.mT, c.k)
        del products, d_products
        d_new = d_w.mul_(c.beta)
        d_sums -= torch.linalg.vecdot(d_new, read)
        del read
        d_read = c.reads * d_new
        dk.baddbmm_(d_read, state.mT, alpha=-1)
        d_state.baddbmm_(c.k.mT, d_read, alpha=-1)
    d_sums += d_far.sum(2) - d_far.sum(1)
    dg = d_sums.flip(1).cumsum(1).flip(1)
    return d_state, [x for x in (dq, dk, dg, d_new, d_beta) if x is not None]
