"""Norms and their gradients: torch's own kernels where it has them, else in as few passes over memory as go."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tuple[Tensor, Tensor]:
    """`F.rms_norm` over the last dim, and 1 over the root of each row, which the gradient reads."""
    if x.device.type == "cuda":
        y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        return y, rstd[..., 0]
    # torch composes it on a CPU, which takes three times as long.
    rstd = torch.rsqrt(torch.linalg.vecdot(x, x) / x.shape[-1] + eps)
    return (x * rstd[..., None]).mul_(weight), rstd


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tuple[Tensor, Tensor, Tensor]:
    """`F.layer_norm` over the last dim; `x` less its mean, and 1 over the root of the variance of each row, which the gradient
    reads."""
    centered = x - x.mean(-1, keepdim=True)
    y, _, rstd = torch.native_layer_norm(centered, [x.shape[-1]], weight, bias, eps)
    return y, centered, rstd[..., 0]


def layer_norm_grad(d: Tensor, centered: Tensor, weight: Tensor, rstd: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, of the weight and of the bias."""
    mean, wanted = torch.zeros_like(rstd)[..., None], [True, True, True]
    own = torch.ops.aten.native_layer_norm_backward
    # Of the bias the shape alone is asked for.
    dx, dw, db = own(d, centered, [d.shape[-1]], mean, rstd[..., None], weight, weight, wanted)
    return dx, dw, db


def rms_norm_grad(d: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight."""
    if x.device.type == "cuda":
        wanted = [True, True]
        dx, dw = torch.ops.aten._fused_rms_norm_backward(d, x, [x.shape[-1]], rstd[..., None], weight, wanted)
        return dx, dw
    product = d * x
    dw = rstd.flatten() @ product.flatten(0, -2)
    by_root = (product @ weight) * rstd**3 / -x.shape[-1]
    dx = torch.mul(d, weight, out=product).mul_(rstd[..., None]).addcmul_(x, by_root[..., None])
    return dx, dw
