"""Attention and its gradient by torch's own kernels, with the log-sum-exp that plans save.

Shapes as in plans: q `[b,s,n,d]`, k `[b,t,g,d]`, v `[b,t,g,e]`, the log-sum-exp `[b,s,n]`.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._mesh import device
from ._ops import kept as kept_of
from ._ops import philox, stream_key


class Mask(NamedTuple):
    """Which keys a query sees by positions: from `left` before it to `right` behind it, in its chunk; None is no limit."""

    left: Optional[int]
    right: Optional[int]
    chunk: Optional[int]


causal = Mask(None, 0, None)
full = Mask(None, None, None)

#: The rate, the stream, the first head of this rank, the run, and places of queries.
Kept = Tuple[float, str, int, Tensor, Tensor]
Segments = Tuple[Tensor, Tensor]


class Extra(NamedTuple):
    """What of attention torch's kernels do not have: then all scores are computed."""

    softcap: Optional[float] = None
    slopes: Optional[Tensor] = None
    #: A number for each head and offset, `[n,o]`, the middle one of offset 0.
    bias: Optional[Tensor] = None
    segments: Optional[Segments] = None
    kept: Optional[Kept] = None


class Seen(NamedTuple):
    """What queries see: a box of queries and keys (causal within it, or whole), or `bias` of all of them."""

    q: slice
    k: slice
    causal: bool
    bias: Optional[Tensor]
    #: Which queries see anything; None if all do.
    rows: Optional[Tensor]


#: What queries see by mask and places: what one program knows of itself.
Known = Dict[Any, Optional[Seen]]
_seen: Known = {}


def remember(own: Known) -> None:
    """What follows is of the program that knows this."""
    global _seen
    _seen = own


def _allowed(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    far = k_pos[None].long() - q_pos[:, None].long()
    ok = torch.ones_like(far, dtype=torch.bool)
    if mask.left is not None:
        ok &= far >= -mask.left
    if mask.right is not None:
        ok &= far <= mask.right
    if mask.chunk is not None:
        ok &= q_pos[:, None] // mask.chunk == k_pos[None] // mask.chunk
    return ok


def _run(flags: Tensor) -> Optional[slice]:
    """The range of what is true, if that is one range."""
    at = flags.nonzero()
    first, last = int(at[0]), int(at[-1]) + 1
    return slice(first, last) if last - first == len(at) else None


def _see(mask: Mask, q_pos: Tensor, k_pos: Tensor, places: Optional[str]) -> Optional[Seen]:
    """What queries see; None if nothing. With `places` it is the same in each step."""
    key = (mask, places)
    if places is not None and key in _seen:
        return _seen[key]
    ok = _allowed(mask, q_pos, k_pos)
    rows, columns = ok.any(1), ok.any(0)
    whole = slice(0, ok.shape[0]), slice(0, ok.shape[1])
    seen: Optional[Seen]
    if not bool(rows.any()):
        seen = None
    elif bool(ok.all()):
        seen = Seen(*whole, False, None, None)
    elif ok.shape[0] == ok.shape[1] and torch.equal(ok, torch.ones_like(ok).tril()):
        seen = Seen(*whole, True, None, None)
    else:
        # A half of queries or of keys, as zigzag has it.
        q, k = _run(rows), _run(columns)
        if q is not None and k is not None and bool(ok[q, k].all()):
            seen = Seen(q, k, False, None, None)
        else:
            bias = torch.zeros(ok.shape, device=device).masked_fill_(~ok, -math.inf)
            seen = Seen(*whole, False, bias, None if bool(rows.all()) else rows)
    if places is not None:
        _seen[key] = seen
    return seen


def _heads(k: Tensor, times: int) -> Tensor:
    return k.repeat_interleave(times, 1) if times > 1 else k


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, bias: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = own(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        return o, lse
    if bias is None and q.dtype != torch.float32:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        return out[0], out[1]
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    # This kernel has rows up to a multiple of 32.
    return out[0], out[1][..., : q.shape[2]]


def _flash_grad(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float,
    bias: Optional[Tensor],
) -> Any:
    if q.device.type == "cpu":
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return own(do, q, k, v, o, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    if bias is None and q.dtype != torch.float32:
        own = torch.ops.aten._scaled_dot_product_flash_attention_backward
        sizes = q.shape[2], k.shape[2]
        return own(do, q, k, v, o, lse, None, None, *sizes, 0.0, is_causal, none, none, scale=scale)
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    lse = F.pad(lse, (0, -lse.shape[-1] % 32))
    own = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    return own(do, q, k, v, bias, o, lse, none, none, 0.0, [True, True, True, False], is_causal, scale=scale)[:3]


def _factors(kept: Kept, k_pos: Tensor, heads: int) -> Tensor:
    """What dropout multiplies probabilities by, `[b,heads,s,t]`."""
    rate, stream, first, run, place = kept
    run = run.long() & 0xFFFFFFFF
    shape = (place.shape[0], heads, place.shape[1], k_pos.shape[0])
    counter = [
        (k_pos.long() // 4).expand(shape), place.long()[:, None, :, None].expand(shape), run[2].expand(shape),
        (torch.arange(heads, device=device) + first + 1)[None, :, None, None].expand(shape),
    ]
    words = torch.stack(philox(counter, stream_key(run, stream)), -1)
    word = words.gather(-1, (k_pos.long() % 4).expand(shape)[..., None])[..., 0]
    return kept_of(word, rate, run[2])


def _offsets(bias: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Which of its offsets each query and key have, `[s,t]`."""
    last = bias.shape[1] - 1
    return (k_pos[None].long() - q_pos[:, None].long() + last // 2).clamp_(0, last)


def _scores(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, scale: float, mask: Mask, more: Extra, grad: bool = False
) -> Tuple[Tensor, Optional[Tensor]]:
    """All scores `[b,n,s,t]` in f32, and for gradients the tanh of a softcap."""
    grouped = q.float().unflatten(2, (k.shape[2], -1))
    s, t = torch.einsum("bsgrd,btgd->bgrst", grouped, k.float()).flatten(1, 2).mul_(scale), None
    if more.softcap is not None:
        t = s.div_(more.softcap).tanh_()
        s, t = (t * more.softcap, t) if grad else (t.mul_(more.softcap), None)
    if more.slopes is not None:
        s.sub_(more.slopes[:, None, None] * (q_pos[:, None] - k_pos[None]).abs().float())
    if more.bias is not None:
        s.add_(more.bias[:, _offsets(more.bias, q_pos, k_pos)])
    ok = _allowed(mask, q_pos, k_pos)[None]
    if more.segments is not None:
        ok = ok & (more.segments[0][:, :, None] == more.segments[1][:, None])
    return s.masked_fill_(~ok[:, None], -math.inf), t


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Scores as probabilities, in their place."""
    return scores.sub_(torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp_()


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, scale: float, mask: Mask,
    places: Optional[str] = None, **extra: Any,
) -> Tuple[Tensor, Tensor]:
    """The output `[b,s,n,e]` and the log-sum-exp of scores `[b,s,n]`: 0 and -inf where a query sees no key."""
    b, s, n, d = q.shape
    groups, e = k.shape[2], v.shape[-1]
    if extra:
        more = Extra(**extra)
        x, _ = _scores(q, k, q_pos, k_pos, scale, mask, more)
        lse = x.logsumexp(-1)
        p = _probabilities(x, lse)
        if more.kept is not None:
            p.mul_(_factors(more.kept, k_pos, n))
        o = torch.einsum("bgrst,btge->bsgre", p.unflatten(1, (groups, -1)), v.float()).flatten(2, 3)
        return o.to(q.dtype), lse.transpose(1, 2).contiguous()
    seen = _see(mask, q_pos, k_pos, places)
    if seen is None:
        return q.new_zeros(b, s, n, e), torch.full((b, s, n), -math.inf, device=q.device)
    bias = None if seen.bias is None else seen.bias.to(q.dtype)
    own_q, own_k, own_v = (x.transpose(1, 2) for x in (q[:, seen.q], k[:, seen.k], v[:, seen.k]))
    if e < d:
        own_v = F.pad(own_v, (0, d - e))
    times = n // groups
    o, lse = _flash(own_q, _heads(own_k, times), _heads(own_v, times), seen.causal, scale, bias)
    if e < d:
        # Without what was padded, which would be kept with it.
        o = o[..., :e].clone()
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    if seen.rows is not None:
        ok = seen.rows[:, None]
        o, lse = torch.where(ok[..., None], o, 0.0), torch.where(ok, lse, -math.inf)
    if o.shape[1] < s:
        ends = seen.q.start, s - seen.q.stop
        o, lse = F.pad(o, (0, 0, 0, 0, *ends)), F.pad(lse, (0, 0, *ends), value=-math.inf)
    return o, lse.contiguous()


def attention_grad(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, do: Tensor, delta: Tensor, q_pos: Tensor, k_pos: Tensor, scale: float,
    mask: Mask, places: Optional[str] = None, **extra: Any,
) -> Tuple[Tensor, ...]:
    """The gradients of q, k and v, and of a bias if there is one; `delta` is rowsum(do o) less the gradient of the log-sum-exp."""
    n, d = q.shape[2:]
    groups, e = k.shape[2], v.shape[-1]
    if extra:
        more = Extra(**extra)
        x, t = _scores(q, k, q_pos, k_pos, scale, mask, more, grad=True)
        p = _probabilities(x, lse.transpose(1, 2))
        do = do.float().unflatten(2, (groups, -1))
        dp = torch.einsum("bsgre,btge->bgrst", do, v.float()).flatten(1, 2)
        drop = None if more.kept is None else _factors(more.kept, k_pos, n)
        if drop is not None:
            dp.mul_(drop)
        ds, of_bias = dp.sub_(delta.transpose(1, 2)[..., None]).mul_(p), ()
        if more.bias is not None:
            at = _offsets(more.bias, q_pos, k_pos).flatten()
            of_bias = (torch.zeros_like(more.bias).index_add_(1, at, ds.sum(0).flatten(1)),)
        ds.mul_(scale)
        if t is not None:
            ds.mul_(t.square_().neg_().add_(1))
        if drop is not None:
            p.mul_(drop)
        ds, p = ds.unflatten(1, (groups, -1)), p.unflatten(1, (groups, -1))
        dq = torch.einsum("bgrst,btgd->bsgrd", ds, k.float()).flatten(2, 3)
        dk = torch.einsum("bgrst,bsgrd->btgd", ds, q.float().unflatten(2, (groups, -1)))
        dv = torch.einsum("bgrst,bsgre->btge", p, do)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *of_bias
    seen = _see(mask, q_pos, k_pos, places)
    if seen is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    s, t_len = q.shape[1], k.shape[1]
    # torch reads the output for rowsum(do o) alone: any with that sum will do, and `delta` is what is wanted.
    wide = do.float()
    o = (wide * (delta / wide.square().sum(-1).clamp_min(1e-30))[..., None]).to(do.dtype)
    if seen.rows is not None:
        lse = torch.where(lse == -math.inf, 0.0, lse)
    bias = None if seen.bias is None else seen.bias.to(q.dtype)
    q, k, v, o, do, lse = q[:, seen.q], k[:, seen.k], v[:, seen.k], o[:, seen.q], do[:, seen.q], lse[:, seen.q]
    q, k, v, o, do = (x.transpose(1, 2) for x in (q, k, v, o, do))
    if e < d:
        v, o, do = (F.pad(x, (0, d - e)) for x in (v, o, do))
    times = n // groups
    lse = lse.transpose(1, 2).contiguous()
    dq, dk, dv = _flash_grad(do, q, _heads(k, times), _heads(v, times), o, lse, seen.causal, scale, bias)
    if times > 1:
        dk, dv = (x.unflatten(1, (groups, times)).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv[..., :e]))
    if dq.shape[1] < s:
        dq = F.pad(dq, (0, 0, 0, 0, seen.q.start, s - seen.q.stop))
    if dk.shape[1] < t_len:
        dk, dv = (F.pad(x, (0, 0, 0, 0, seen.k.start, t_len - seen.k.stop)) for x in (dk, dv))
    return dq, dk, dv


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tuple[Tensor, Tensor]:
    """Attention over some keys and over others as one over all of them."""
    lse = torch.logaddexp(lse_a, lse_b)
    zero = torch.where(lse == -math.inf, 0.0, lse)
    a, b = (o.float() * (l - zero).exp()[..., None] for o, l in ((out_a, lse_a), (out_b, lse_b)))
    return (a + b).to(out_a.dtype), lse
