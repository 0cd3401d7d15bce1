"""Runs what `shardc export --to torch` wrote: a plan as a program of PyTorch's distributed runtime.

`load(FOLDER, WEIGHTS)` gives a step, which is called with a batch; `from shardc.torch import *` is what a program needs.
"""

from ._attention import Mask, attention, attention_grad, causal, full, merge_attention
from ._exchange import all_gather, all_reduce, all_to_all_v, broadcast, exchange, permute, reduce, reduce_scatter
from ._experts import combine_gates_grad, dispatch, grouped_dot, grouped_dot_t, grouped_outer, route, unpermute
from ._mesh import Exchange, Mesh, device
from ._norms import layer_norm, layer_norm_grad, rms_norm, rms_norm_grad
from ._ops import adamw, constant, cross_entropy, cross_entropy_grad, draw, index_add, pad, rope, sgd, take, top_k
from ._scan import scan, scan_grad
from ._step import Step, load, main

# fmt: off
__all__ = [
    "Exchange", "Mask", "Mesh", "Step", "adamw", "all_gather", "all_reduce", "all_to_all_v", "attention", "attention_grad",
    "broadcast", "causal", "combine_gates_grad", "constant", "cross_entropy", "cross_entropy_grad", "device", "dispatch", "draw", "exchange", "full", "grouped_dot",
    "grouped_dot_t", "grouped_outer", "index_add", "layer_norm", "layer_norm_grad", "load", "main", "merge_attention", "pad", "permute", "reduce",
    "reduce_scatter", "rms_norm", "rms_norm_grad", "rope", "route", "scan", "scan_grad", "sgd", "take", "top_k", "unpermute",
]
