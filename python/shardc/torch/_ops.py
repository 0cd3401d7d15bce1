"""Ops of plans that torch has no word for."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._mesh import device


@lru_cache(maxsize=None)
def constant(values: Tuple[float, ...]) -> Tensor:
    """Numbers that stand in the program."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _split(rule: str) -> Tuple[str, str, str]:
    x, index, out = re.split(",|->", rule)
    return x, index, out


def _places(index: Tensor, start: int, size: int, padding: Optional[int]) -> Tuple[Tensor, Tensor]:
    """Indices within this rank's piece of a dim, and which of them are in it."""
    at = index.long() - start
    inside = (at >= 0) & (at < size)
    if padding is not None:
        inside &= index != padding
    return at.clamp(0, max(size - 1, 0)), inside


def take(x: Tensor, index: Tensor, rule: str, start: int, padding: Optional[int] = None) -> Tensor:
    """Elements of `x` at `index` along the letter that only `x` has; 0 where this rank has none."""
    a, b, out = _split(rule)
    letter = next(c for c in a if c not in out and c not in b)
    shared, own, new = [c for c in a if c in b], [c for c in a if c not in b and c != letter], [c for c in b if c not in a]
    at, inside = _places(index, start, x.shape[a.index(letter)], padding)
    if not shared and a[0] == letter:
        y = F.embedding(at, x) if len(a) == 2 else x[at]
        names = [*b, *own]
        mask = inside.reshape(inside.shape + (1,) * len(own))
    else:
        x = x.permute([a.index(c) for c in [*shared, *own, letter]])
        lead = [index.shape[b.index(c)] for c in shared]

        def spread(t: Tensor) -> Tensor:
            return t.permute([b.index(c) for c in [*shared, *new]]).reshape([*lead, *[1] * len(own), -1])

        at, inside = spread(at), spread(inside)
        y = x.gather(-1, at.expand(*x.shape[:-1], at.shape[-1]))
        sizes = [index.shape[b.index(c)] for c in new]
        y, mask = y.reshape(*y.shape[:-1], *sizes), inside.reshape(*inside.shape[:-1], *sizes)
        names = [*shared, *own, *new]
    return y.masked_fill_(~mask, 0).permute([names.index(c) for c in out])


def index_add(x: Tensor, index: Tensor, rule: str, start: int, size: int, padding: Optional[int] = None) -> Tensor:
    """Adds elements of `x` at `index` of a new letter, of which this rank has `size`; sums are f32."""
    a, b, out = _split(rule)
    letter = next(c for c in out if c not in a and c not in b)
    shared = [c for c in out if c in b]
    own = [c for c in out if c in a and c not in b]
    gone = [c for c in b if c not in out]
    at, inside = _places(index, start, size, padding)
    if not shared and out[0] == letter:
        x = x.permute([a.index(c) for c in [*b, *own]]).float()
        # What is not this rank's goes to a place behind.
        y = torch.zeros(size + 1, *x.shape[len(b) :], dtype=torch.float32, device=x.device)
        y = y.index_add_(0, torch.where(inside, at, size).flatten(), x.flatten(0, len(b) - 1))[:size]
        names = [letter, *own]
    else:
        x = x.permute([a.index(c) for c in [*shared, *own, *gone]]).float()
        lead, full = [index.shape[b.index(c)] for c in shared], x.shape[: len(shared) + len(own)]

        def spread(t: Tensor) -> Tensor:
            t = t.permute([b.index(c) for c in [*shared, *gone]])
            return t.reshape([*lead, *[1] * len(own), -1]).expand(*full, -1)

        at, inside = spread(at), spread(inside)
        y = torch.zeros(*full, size, dtype=torch.float32, device=x.device)
        y.scatter_add_(-1, at, torch.where(inside, x.reshape(*full, -1), 0.0))
        names = [*shared, *own, letter]
    return y.permute([names.index(c) for c in out])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tuple[Tensor, Tensor]:
    """`F.cross_entropy` of each token, and the log-probabilities, which the gradient reads. Where the target is negative, the
    logarithm of the sum of exponentials beside the largest logit, as the plan has it: it leaves it out itself, if it does."""
    log_p = torch.log_softmax(logits, -1)
    at, inside = _places(targets, 0, logits.shape[-1], None)
    return torch.where(inside, -log_p.gather(-1, at[..., None])[..., 0], -log_p.amax(-1)), log_p


def cross_entropy_grad(d: Tensor, saved: Tensor, targets: Tensor, start: int, total: Optional[Tensor] = None) -> Tensor:
    """The gradient of logits, over what was saved: log-probabilities; or exponentials whose sum over all ranks is `total`, where
    this rank has the vocabulary from `start` on."""
    p = saved.exp_().mul_(d[..., None]) if total is None else saved.mul_((d / total)[..., None])
    at, inside = _places(targets, start, p.shape[-1], None)
    return p.scatter_add_(-1, at[..., None], torch.where(inside, -d, 0.0)[..., None])


def pad(x: Tensor, dim: int, size: int, start: int, step: int = 1) -> Tensor:
    """The elements of a dim from `start` in a larger dim, `step` apart; what lies outside is left out."""
    y = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    low = max(0, -start)
    high = min(x.shape[dim], (size - 1 - start) // step + 1)
    if high > low:
        first = start + low * step
        y.narrow(dim, first, (high - 1 - low) * step + 1)[(slice(None),) * dim + (slice(None, None, step),)] = x.narrow(
            dim, low, high - low
        )
    return y


def top_k(x: Tensor, dim: int, k: int) -> Tensor:
    """Indices of the largest elements, largest first; of equal ones the lower index first."""
    return torch.sort(x, dim=dim, descending=True, stable=True).indices.narrow(dim, 0, k).int()


def rope(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """Rotary positions: `x` `[b,s,n,d]`, of which the first elements turn."""
    r = 2 * cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    c, s = (t[..., :, None, :].to(x.dtype) for t in (cos, sin))
    if adjacent:
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        return torch.cat((y, rest), -1) if rest.shape[-1] else y
    # Rows as they lie in memory: half of them at a time takes three times as long on a CPU.
    y = turned * torch.cat((c, c), -1)
    y = torch.cat((y, rest), -1) if rest.shape[-1] else y
    a, b = turned.chunk(2, -1)
    y[..., : r // 2].addcmul_(b, s, value=-1)
    y[..., r // 2 : r].addcmul_(a, s)
    return y


def philox(counter: Sequence[Tensor], key: Tuple[Tensor, Tensor]) -> List[Tensor]:
    """Philox 4x32-10 (Salmon et al., 2011), words in int64."""

    def product(a: Tensor, m: int) -> Tuple[Tensor, Tensor]:
        low, high = (a & 0xFFFF) * m, (a >> 16) * m
        s = low + ((high & 0xFFFF) << 16)
        return (high >> 16) + (s >> 32), s & 0xFFFFFFFF

    c, (k, l) = list(counter), key
    for _ in range(10):
        (ah, al), (bh, bl) = product(c[0], 0xD2511F53), product(c[2], 0xCD9E8D57)
        c = [bh ^ c[1] ^ k, bl, ah ^ c[3] ^ l, al]
        k, l = (k + 0x9E3779B9) & 0xFFFFFFFF, (l + 0xBB67AE85) & 0xFFFFFFFF
    return c


def stream_key(run: Tensor, stream: str) -> Tuple[Tensor, Tensor]:
    """What the numbers of a stream depend on beside their places."""
    h = 0xCBF29CE484222325
    for byte in stream.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return run[0] ^ (h & 0xFFFFFFFF), run[1] ^ (h >> 32)


def kept(word: Tensor, rate: float, step: Tensor) -> Tensor:
    """1/rate with this probability, else 0; 1 in an evaluation, which is step 0."""
    return torch.where(step == 0, 1.0, torch.where(word < int(rate * 2**32), 1 / rate, 0.0)).float()


def draw(
    run: Tensor, place: Tensor, rule: str, shape: List[int], starts: List[int], sizes: List[int], keep: Optional[float],
    stream: str,
) -> Tensor:
    """Numbers at random: the same on every mesh, by the run, the stream, the place and the index there."""
    _, p, out = _split(rule)
    run = run.long() & 0xFFFFFFFF
    index, step = torch.zeros((), dtype=torch.int64, device=device), 1
    for d in reversed(range(len(out))):
        if out[d] not in p:
            own = torch.arange(shape[d], device=device) + starts[d]
            index = index + own.view([-1] + [1] * (len(out) - 1 - d)) * step
            step *= sizes[d]
    place = place.long().permute([p.index(c) for c in out if c in p])
    place = place[tuple(slice(None) if c in p else None for c in out)]
    none = torch.zeros(shape, dtype=torch.int64, device=device)
    words = philox([(index // 4).expand(shape), place.expand(shape), run[2].expand(shape), none], stream_key(run, stream))
    word = torch.stack(words, -1).gather(-1, (index % 4).expand(shape)[..., None])[..., 0]
    if keep is None:
        return ((word >> 9).double() + 0.5).div(8388608.0).float()
    return kept(word, keep, run[2])


def adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: Tensor, step: Tensor, scale: Tensor,
    applies: Optional[Tensor] = None, *, betas: Tuple[float, float], eps: float, decay: float, spent: bool = False,
) -> Tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW in place, of a gradient that is first multiplied by `scale`, and written over if it is `spent`; none where
    `applies` is 0."""
    # torch's kernel goes through memory, whatever strides say, and scales gradients where they are.
    assert param.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()
    by_kernel = spent and grad.dtype == param.dtype and grad.is_contiguous()
    torch._fused_adamw_(
        [param], [grad if by_kernel else (grad * scale).to(param.dtype).contiguous()], [exp_avg], [exp_avg_sq], [], [step],
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=1 / scale if by_kernel else None, found_inf=None if applies is None else (1 - applies).reshape(1),
    )
    return param, exp_avg, exp_avg_sq


def sgd(param: Tensor, grad: Tensor, lr: Tensor, scale: Tensor, applies: Optional[Tensor] = None, *, decay: float) -> Tensor:
    """One step of SGD in place."""
    change = lr * (grad * scale + decay * param)
    return param.sub_(change if applies is None else torch.where(applies != 0, change, 0.0))
