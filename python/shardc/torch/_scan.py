"""Gated linear recurrences and their gradients, a chunk of tokens at a time.

Shapes as in plans: q and k `[b,s,n,k]`, g and beta `[b,s,n]`, v `[b,s,n,v]`, segments `[b,s]`, states `[b,n,k,v]`.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

#: Tokens of a chunk.
CHUNK = 64


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
    state = q.new_zeros(b, n, width, v.shape[-1]) if start is None else start
    outs: List[Tensor] = []
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    runs = torch.zeros(b, s, dtype=torch.long, device=q.device)
    if segments is not None:
        runs[:, 1:] = (segments[:, 1:] != segments[:, :-1]).cumsum(1)
    for i in range(0, s, CHUNK):
        part = slice(i, i + CHUNK)
        own_q, own_k, own_v, sums = q[:, :, part], k[:, :, part], v[:, :, part], g[:, :, part].double().cumsum(2)
        run = runs[:, part]
        before = (run == (runs[:, i - 1] if i else torch.zeros_like(runs[:, 0]))[:, None])[:, None]
        same = (run[:, :, None] == run[:, None]).tril()[:, None]
        far = torch.where(same, sums[..., :, None] - sums[..., None, :], -torch.inf)
        pairs = far.exp().to(q.dtype)
        reads = torch.where(before, sums, -torch.inf).exp().to(q.dtype)[..., None]
        last = same[:, :, -1]
        keeps = torch.where(last, sums[..., -1:] - sums, -torch.inf).exp().to(q.dtype)[..., None]
        new = own_v
        if beta is not None:
            by = beta.transpose(1, 2)[:, :, part, None]
            system = (own_k @ own_k.mT * pairs).tril(-1) * by + torch.eye(run.shape[1], dtype=q.dtype, device=q.device)
            new = by * (own_v - reads * (own_k @ state))
            new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
        outs.append(reads * (own_q @ state) + (own_q @ own_k.mT * pairs) @ new)
        state = reads[:, :, -1:] * state + (keeps * own_k).mT @ new
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), state


def scan_grad(
    q: Tensor, k: Tensor, g: Tensor, v: Tensor, do: Tensor, d_end: Tensor,
    beta: Optional[Tensor] = None, segments: Optional[Tensor] = None, start: Optional[Tensor] = None,
    piece: Optional[int] = None,
) -> Tuple[Tensor, ...]:
    """The gradients of q, k, g, v, and of `beta` and `start` where they are given."""
    with torch.enable_grad():
        q, k, g, v = (x.detach().requires_grad_() for x in (q, k, g, v))
        beta, start = (None if x is None else x.detach().requires_grad_() for x in (beta, start))
        o, end = scan(q, k, g, v, beta, segments, start, piece)
        of = [x for x in (q, k, g, v, beta, start) if x is not None]
        return torch.autograd.grad([o, end], of, [do, d_end])
