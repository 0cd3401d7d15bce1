"""What PyTorch computes where `toy` has another op in the place of its relu: a line of ops.jsonl for each.

A line has the name of the case, its nodes (op, operands by name, results), the loss, and of the gradient of
model.net1.weight the norm and the product with the cosines of 0, 1, 2, ... Run it in tests/imports, with make.py's pins.
"""
import json
import torch
from safetensors.torch import load_file

H = "%linear"
SHAPE = lambda x, *to: ("reshape.default", {"self": x, "shape": list(to)})


def last(*rows):
    """Nodes behind each other: each takes the one before it as %0, %1, ...; the last is what stands in for relu."""
    out = []
    for i, row in enumerate(rows):
        op, args = row[0], row[1]
        outs = row[2] if len(row) > 2 else 1
        names = [f"t{i}" if k == 0 else f"t{i}_{k}" for k in range(outs)]
        out.append([op, args, names])
    out[-1][2][0] = "relu"
    return out


def one(op, **more):
    return last((op, {"self": H, **more}))


def grouped(op, *shape, **args):
    """An op of [8, *shape], whose results are put beside each other until there are 10."""
    return last(SHAPE(H, 8, *shape), (op, args), ("flatten.using_ints", {"self": "%t1", "start_dim": 1}))


# Of 16 rows and columns, and a table of 40 rows.
DISTANCES = [("arange.default", {"end": 16}), ("unsqueeze.default", {"self": "%t0", "dim": 1}), ("sub.Tensor", {"self": "%t0", "other": "%t1"}),
             ("add.Tensor", {"self": "%t2", "other": 15}), ("cat.default", {"tensors": ["%p_model_net1_weight"] * 4, "dim": 0})]

CASES = {
    "leaky_relu": one("leaky_relu.default", negative_slope=0.2),
    "elu": one("elu.default", alpha=0.7),
    "selu": one("selu.default"),
    "celu": one("celu.default", alpha=1.3),
    "relu6": one("relu6.default"),
    "hardtanh": one("hardtanh.default", min_val=-0.3, max_val=0.4),
    "hardswish": one("hardswish.default"),
    "hardsigmoid": one("hardsigmoid.default"),
    "mish": one("mish.default"),
    "log_sigmoid": one("log_sigmoid.default"),
    "softshrink": one("softshrink.default", lambd=0.2),
    "threshold": one("threshold.default", threshold=0.1, value=0.5),
    "square": one("square.default"),
    "expm1": one("expm1.default"),
    "exp2": one("exp2.default"),
    "log2": last(("square.default", {"self": H}), ("add.Tensor", {"self": "%t0", "other": 0.1}), ("log2.default", {"self": "%t1"})),
    "pow_scalar": one("pow.Scalar", self=2.5, exponent=H),
    "prelu": last(("prelu.default", {"self": H, "weight": "%p_model_net1_bias"})),
    "glu": last(("cat.default", {"tensors": [H, H], "dim": 1}), ("mul.Tensor", {"self": "%t0", "other": "%t0"}), ("glu.default", {"self": "%t1", "dim": 1})),
    "clamp_min": one("clamp_min.default", min=0.2),
    "lerp": last(("lerp.Scalar", {"self": H, "end": "%x", "weight": 0.3})),
    "addcmul": last(("addcmul.default", {"self": H, "tensor1": H, "tensor2": "%x", "value": 0.5})),
    "max_other_ties": last(("mul.Tensor", {"self": H, "other": 1.0}), ("max.other", {"self": H, "other": "%t0"})),
    "remainder": one("remainder.Scalar", other=0.3),
    "logsumexp": last(("logsumexp.default", {"self": H, "dim": [1], "keepdim": True}), ("sub.Tensor", {"self": H, "other": "%t0"})),
    "amax": last(("amax.default", {"self": H, "dim": [1], "keepdim": True}), ("sub.Tensor", {"self": H, "other": "%t0"})),
    "max_dim": last(("max.dim", {"self": H, "dim": 0, "keepdim": True}, 2), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "min_dim": last(("min.dim", {"self": H, "dim": 1, "keepdim": True}, 2), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "argmax": last(("argmax.default", {"self": H, "dim": 1, "keepdim": True}), ("gather.default", {"self": "%x", "dim": 1, "index": "%t0"}), ("mul.Tensor", {"self": H, "other": "%t1"})),
    "var": last(("var.correction", {"self": H, "dim": [1], "keepdim": True}), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "std": last(("std.dim", {"self": H, "dim": [0], "unbiased": False, "keepdim": True}), ("div.Tensor", {"self": H, "other": "%t0"})),
    "vector_norm": last(("linalg_vector_norm.default", {"self": H, "ord": 2, "dim": [1], "keepdim": True}), ("div.Tensor", {"self": H, "other": "%t0"})),
    "vector_norm_1": last(("linalg_vector_norm.default", {"self": H, "ord": 1, "dim": [1], "keepdim": True}), ("div.Tensor", {"self": H, "other": "%t0"})),
    "cosine_similarity": last(("cosine_similarity.default", {"x1": H, "x2": "%x", "dim": 1}), ("unsqueeze.default", {"self": "%t0", "dim": 1}), ("mul.Tensor", {"self": H, "other": "%t1"})),
    "pairwise_distance": last(("pairwise_distance.default", {"x1": H, "x2": "%x", "keepdim": True}), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "cdist": last(("cdist.default", {"x1": H, "x2": "%p_model_net1_weight"})),
    "einsum": last(("einsum.default", {"equation": "bi,ij->bj", "tensors": [H, "%p_model_net1_weight"]})),
    "einsum_three": last(("einsum.default", {"equation": "bi,bj,ij->bj", "tensors": [H, "%x", "%p_model_net1_weight"]})),
    "cumsum": one("cumsum.default", dim=1),
    "cumprod": one("cumprod.default", dim=1),
    "roll": one("roll.default", shifts=[3], dims=[1]),
    "flip": one("flip.default", dims=[1]),
    "one_hot": last(("argmax.default", {"self": H, "dim": 1}), ("one_hot.default", {"self": "%t0", "num_classes": 10}), ("mul.Tensor", {"self": "%t1", "other": H})),
    "group_norm": last(SHAPE(H, 8, 2, 5), ("group_norm.default", {"input": "%t0", "num_groups": 2}), SHAPE("%t1", 8, 10)),
    "tril": last(SHAPE(H, 8, 2, 5), ("tril.default", {"self": "%t0", "diagonal": 1}), SHAPE("%t1", 8, 10)),
    "max_pool1d": last(SHAPE(H, 8, 1, 10), ("max_pool1d.default", {"self": "%t0", "kernel_size": [3], "stride": [1], "padding": [1]}), SHAPE("%t1", 8, 10)),
    "max_pool2d": last(("cat.default", {"tensors": [H, "%x"], "dim": 1}), SHAPE("%t0", 8, 1, 4, 5), ("max_pool2d.default", {"self": "%t1", "kernel_size": [2, 1], "stride": [2, 1]}), SHAPE("%t2", 8, 10)),
    "avg_pool1d": last(SHAPE(H, 8, 1, 10), ("avg_pool1d.default", {"self": "%t0", "kernel_size": [3], "stride": [1], "padding": [1]}), SHAPE("%t1", 8, 10)),
    "adaptive": last(SHAPE(H, 8, 1, 10), ("adaptive_avg_pool1d.default", {"self": "%t0", "output_size": [4]}), ("repeat.default", {"self": "%t1", "repeats": [1, 1, 3]}), SHAPE("%t2", 8, 12), ("slice.Tensor", {"self": "%t3", "dim": 1, "start": 0, "end": 10})),
    "upsample_nearest": last(SHAPE(H, 8, 2, 5), ("upsample_nearest1d.vec", {"input": "%t0", "output_size": [10], "scale_factors": None}), ("sum.dim_IntList", {"self": "%t1", "dim": [1]})),
    "upsample_linear": last(SHAPE(H, 8, 2, 5), ("upsample_linear1d.vec", {"input": "%t0", "output_size": [10], "align_corners": False, "scale_factors": None}), ("sum.dim_IntList", {"self": "%t1", "dim": [1]})),
    "pad_reflect": last(("slice.Tensor", {"self": H, "dim": 1, "start": 0, "end": 7}), ("pad.default", {"self": "%t0", "pad": [1, 2], "mode": "reflect"})),
    "pad_value": last(("slice.Tensor", {"self": H, "dim": 1, "start": 0, "end": 7}), ("pad.default", {"self": "%t0", "pad": [1, 2], "mode": "constant", "value": 0.5})),
    "conv_transpose1d": last(SHAPE(H, 8, 2, 5), ("slice.Tensor", {"self": "%p_model_net1_weight", "dim": 0, "start": 0, "end": 2}), SHAPE("%t1", 2, 2, 5), ("conv_transpose1d.default", {"input": "%t0", "weight": "%t2", "stride": [2], "padding": [2], "output_padding": [1]}), ("sum.dim_IntList", {"self": "%t3", "dim": [1]})),
    "unfold": last(("unfold.default", {"self": H, "dimension": 1, "size": 3, "step": 2}), ("sum.dim_IntList", {"self": "%t0", "dim": [2], "keepdim": True}), ("mul.Tensor", {"self": "%t0", "other": "%t1"}), SHAPE("%t2", 8, 12), ("slice.Tensor", {"self": "%t3", "dim": 1, "start": 1, "end": 11})),
    "scatter_src": last(("topk.default", {"self": H, "k": 3, "dim": 1}, 2), ("scatter.src", {"self": "%x", "dim": 1, "index": "%t0_1", "src": "%t0"})),
    "scatter_add": last(("topk.default", {"self": H, "k": 3, "dim": 1}, 2), ("scatter_add.default", {"self": "%x", "dim": 1, "index": "%t0_1", "src": "%t0"})),
    "index_add": last(("argmax.default", {"self": H, "dim": 1}), ("index_add.default", {"self": "%p_model_net1_weight", "dim": 0, "index": "%t0", "source": H}), ("slice.Tensor", {"self": "%t1", "dim": 0, "start": 0, "end": 8})),
    "pad_far": last(("slice.Tensor", {"self": H, "dim": 1, "start": 0, "end": 7}), ("pad.default", {"self": "%t0", "pad": [1, 2], "mode": "constant", "value": -1e9}), ("clamp_min.default", {"self": "%t1", "min": -1.0})),
    "scatter_value_twice": last(("argmax.default", {"self": H, "dim": 1, "keepdim": True}), ("expand.default", {"self": "%t0", "size": [8, 3]}), ("scatter.value", {"self": H, "dim": 1, "index": "%t1", "value": 0.5})),
    "norm_of_zeros": last(("sub.Tensor", {"self": H, "other": H}), ("linalg_vector_norm.default", {"self": "%t0", "ord": 2, "dim": [1], "keepdim": True}), ("add.Tensor", {"self": H, "other": "%t1"})),
    "norm_3_of_zeros": last(("sub.Tensor", {"self": H, "other": H}), ("linalg_vector_norm.default", {"self": "%t0", "ord": 3, "dim": [1], "keepdim": True}), ("add.Tensor", {"self": H, "other": "%t1"})),
    "std_of_zeros": last(("sub.Tensor", {"self": H, "other": H}), ("std.dim", {"self": "%t0", "dim": [1], "keepdim": True}), ("add.Tensor", {"self": H, "other": "%t1"})),
    "vector_norm_3": last(("linalg_vector_norm.default", {"self": H, "ord": 3, "dim": [1], "keepdim": True}), ("div.Tensor", {"self": H, "other": "%t0"})),
    "index_from_the_end": last(("argmax.default", {"self": H, "dim": 1}), ("sub.Tensor", {"self": "%t0", "other": 1}), ("index.Tensor", {"self": "%p_model_net1_weight", "indices": ["%t1"]}), ("mul.Tensor", {"self": "%t2", "other": H})),
    "remainder_of_whole": last(("argmax.default", {"self": H, "dim": 1, "keepdim": True}), ("mul.Tensor", {"self": "%t0", "other": 41}), ("remainder.Scalar", {"self": "%t1", "other": 41}), ("mul.Tensor", {"self": H, "other": "%t2"}), ("add.Tensor", {"self": H, "other": "%t3"})),
    "einsum_of_dots": last(SHAPE(H, 8, 2, 5), ("slice.Tensor", {"self": "%p_model_net1_weight", "dim": 0, "start": 0, "end": 5}), ("einsum.default", {"equation": "...j,jk", "tensors": ["%t0", "%t1"]}), ("sum.dim_IntList", {"self": "%t2", "dim": [1]})),
    "outer": last(("sum.dim_IntList", {"self": H, "dim": [1]}), ("outer.default", {"self": "%t0", "vec2": "%p_model_net1_bias"})),
    "gru_cell": last(("cat.default", {"tensors": ["%p_model_net1_weight"] * 3, "dim": 0}), ("gru_cell.default", {"input": "%x", "hx": H, "w_ih": "%t0", "w_hh": "%t0", "b_ih": None, "b_hh": None})),
    "lstm_cell": last(("cat.default", {"tensors": ["%p_model_net1_weight"] * 4, "dim": 0}), ("lstm_cell.default", {"input": "%x", "hx": [H, H], "w_ih": "%t0", "w_hh": "%t0", "b_ih": None, "b_hh": None}, 2)),
    "clamp_tensor": last(("clamp.Tensor", {"self": H, "min": "%p_model_net1_bias", "max": "%x"})),
    "clamp_tensor_ties": last(("mul.Tensor", {"self": H, "other": 1.0}), ("clamp.Tensor", {"self": H, "min": "%t0", "max": None})),
    "index_select": last(("argmax.default", {"self": H, "dim": 1}), ("index_select.default", {"self": "%p_model_net1_weight", "dim": 0, "index": "%t0"}), ("mul.Tensor", {"self": "%t1", "other": H})),
    "attention_bias": last(SHAPE(H, 8, 1, 2, 5), ("slice.Tensor", {"self": "%p_model_net1_weight", "dim": 0, "start": 0, "end": 2}), ("slice.Tensor", {"self": "%t1", "dim": 1, "start": 0, "end": 2}), ("scaled_dot_product_attention.default", {"query": "%t0", "key": "%t0", "value": "%t0", "attn_mask": "%t2", "scale": 0.7}), SHAPE("%t3", 8, 10)),
    "attention_of_truths": last(SHAPE(H, 8, 1, 2, 5), ("slice.Tensor", {"self": "%x", "dim": 1, "start": 0, "end": 4}), SHAPE("%t1", 8, 1, 2, 2), ("amax.default", {"self": "%t2", "dim": [3], "keepdim": True}), ("ge.Tensor", {"self": "%t2", "other": "%t3"}), ("scaled_dot_product_attention.default", {"query": "%t0", "key": "%t0", "value": "%t0", "attn_mask": "%t4"}), SHAPE("%t5", 8, 10)),
    "attention_that_sees_nothing": last(SHAPE(H, 8, 1, 2, 5), ("slice.Tensor", {"self": "%x", "dim": 1, "start": 0, "end": 4}), SHAPE("%t1", 8, 1, 2, 2), ("gt.Scalar", {"self": "%t2", "other": 0.0}), ("scaled_dot_product_attention.default", {"query": "%t0", "key": "%t0", "value": "%t0", "attn_mask": "%t3"}), SHAPE("%t4", 8, 10)),
    "attention_of_infinite": last(SHAPE(H, 8, 1, 2, 5), ("slice.Tensor", {"self": "%x", "dim": 1, "start": 0, "end": 4}), SHAPE("%t1", 8, 1, 2, 2), ("relu.default", {"self": "%t2"}), ("log.default", {"self": "%t3"}), ("scaled_dot_product_attention.default", {"query": "%t0", "key": "%t0", "value": "%t0", "attn_mask": "%t4"}), SHAPE("%t5", 8, 10)),
    "attention_of_groups": last(SHAPE(H, 8, 2, 1, 5), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 0, "end": 1}), ("slice.Tensor", {"self": "%p_model_net1_weight", "dim": 0, "start": 0, "end": 2}), SHAPE("%t2", 2, 2, 5), ("slice.Tensor", {"self": "%t3", "dim": 2, "start": 0, "end": 3}), ("cat.default", {"tensors": ["%t1"] * 3, "dim": 2}), SHAPE("%t4", 2, 2, 3), ("slice.Tensor", {"self": "%t6", "dim": 1, "start": 0, "end": 1}), ("scaled_dot_product_attention.default", {"query": "%t0", "key": "%t5", "value": "%t5", "attn_mask": "%t7", "enable_gqa": True}), SHAPE("%t8", 8, 10)),
    "distances": last(*DISTANCES, ("embedding.default", {"weight": "%t4", "indices": "%t3"}), ("slice.Tensor", {"self": "%t5", "dim": 0, "start": 2, "end": 5}), ("slice.Tensor", {"self": "%t6", "dim": 1, "start": 1, "end": 9}), ("mean.dim", {"self": "%t7", "dim": [0, 1]}), ("mul.Tensor", {"self": H, "other": "%t8"})),
    "distances_of_more_dims": last(*DISTANCES, ("unsqueeze.default", {"self": "%t3", "dim": 2}), ("embedding.default", {"weight": "%t4", "indices": "%t5"}), ("slice.Tensor", {"self": "%t6", "dim": 0, "start": 2, "end": 5}), ("slice.Tensor", {"self": "%t7", "dim": 1, "start": 1, "end": 9}), ("mean.dim", {"self": "%t8", "dim": [0, 1, 2]}), ("mul.Tensor", {"self": H, "other": "%t9"})),
    "argsort": last(("argsort.default", {"self": H, "dim": 1}), ("gather.default", {"self": "%x", "dim": 1, "index": "%t0"}), ("mul.Tensor", {"self": H, "other": "%t1"})),
    "argsort_of_argsort": last(("argsort.stable", {"self": H, "stable": True, "dim": 0, "descending": True}), ("argsort.default", {"self": "%t0", "dim": 0}), ("gather.default", {"self": H, "dim": 0, "index": "%t1"}), ("mul.Tensor", {"self": "%x", "other": "%t2"})),
    "sort": last(("sort.default", {"self": H, "dim": 1, "descending": True}, 2), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "topk_of_the_smallest": last(("topk.default", {"self": H, "k": 3, "dim": 1, "largest": False}, 2), ("scatter_add.default", {"self": "%x", "dim": 1, "index": "%t0_1", "src": "%t0"})),
    "batch_norm": last(("batch_norm.default", {"input": H, "weight": "%p_model_net1_bias", "bias": "%p_model_net1_bias", "running_mean": None, "running_var": None, "training": True, "momentum": 0.1, "eps": 0.01, "cudnn_enabled": False})),
    "batch_norm_of_places": last(SHAPE(H, 8, 2, 5), ("batch_norm.default", {"input": "%t0", "weight": None, "bias": None, "running_mean": None, "running_var": None, "training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}), SHAPE("%t1", 8, 10)),
    "conv_of_many_places": last(SHAPE(H, 8, 1, 10), SHAPE("%p_model_net1_weight", 1, 1, 100), ("conv1d.default", {"input": "%t0", "weight": "%t1", "padding": [50]}), ("slice.Tensor", {"self": "%t2", "dim": 2, "start": 0, "end": 10}), SHAPE("%t3", 8, 10)),
    "part_written": last(("mul.Tensor", {"self": H, "other": 2.0}), ("slice.Tensor", {"self": "%x", "dim": 1, "start": 0, "end": 3}), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 4, "end": 7}), ("copy_.default", {"self": "%t2", "src": "%t1"}), ("mul.Tensor", {"self": "%t0", "other": H})),
    "parts_written_one_after_the_other": last(("new_empty.default", {"self": H, "size": [8, 10]}), ("slice.Tensor", {"self": H, "dim": 1, "start": 0, "end": 4}), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 6, "end": 10}), ("copy_.default", {"self": "%t2", "src": "%t1"}), ("slice.Tensor", {"self": "%x", "dim": 1, "start": 0, "end": 6}), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 0, "end": 6}), ("copy_.default", {"self": "%t5", "src": "%t4"}), ("mul.Tensor", {"self": "%t0", "other": H})),
    "part_of_a_part_written": last(("mul.Tensor", {"self": H, "other": 2.0}), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 2, "end": 9}), ("transpose.int", {"self": "%t1", "dim0": 0, "dim1": 1}), ("select.int", {"self": "%t2", "dim": 0, "index": 3}), ("fill_.Scalar", {"self": "%t3", "value": 0.7}), ("add_.Tensor", {"self": "%t2", "other": 1.5}), ("mul_.Tensor", {"self": "%t0", "other": H}), ("sum.dim_IntList", {"self": "%t1", "dim": [1], "keepdim": True}), ("add.Tensor", {"self": "%t0", "other": "%t7"})),
    "known_part_written": last(("zeros.default", {"size": [10]}), ("slice.Tensor", {"self": "%t0", "dim": 0, "start": 1, "end": 9, "step": 2}), ("fill_.Scalar", {"self": "%t1", "value": 2.5}), ("mul.Tensor", {"self": H, "other": "%t0"})),
    "argsort_of_both_zeros": last(("mul.Tensor", {"self": "%x", "other": 0.3}), ("round.default", {"self": "%t0"}), ("argsort.stable", {"self": "%t1", "stable": True, "dim": 1, "descending": True}), ("gather.default", {"self": "%x", "dim": 1, "index": "%t2"}), ("mul.Tensor", {"self": H, "other": "%t3"})),
    "turned_before_a_write": last(("mul.Tensor", {"self": H, "other": 2.0}), ("mT.default", {"self": "%t0"}), ("mul_.Tensor", {"self": "%t0", "other": H}), ("sum.dim_IntList", {"self": "%t1", "dim": [0]}), ("unsqueeze.default", {"self": "%t3", "dim": 1}), ("add.Tensor", {"self": H, "other": "%t4"})),
    "turned_in_place": last(("mul.Tensor", {"self": H, "other": 2.0}), ("slice.Tensor", {"self": "%t0", "dim": 1, "start": 0, "end": 8}), ("select.int", {"self": "%t1", "dim": 0, "index": 0}), ("t_.default", {"self": "%t1"}), ("select.int", {"self": "%t3", "dim": 0, "index": 1}), ("mul.Tensor", {"self": "%t2", "other": "%t4"}), ("unsqueeze.default", {"self": "%t5", "dim": 1}), ("mul.Tensor", {"self": H, "other": "%t6"})),
}


def main():
    at = load_file("toy.safetensors")
    with open("ops.jsonl", "w") as file:
        for name, nodes in CASES.items():
            w = {k[5:]: v for k, v in at.items() if k.startswith("grad.")}
            import zipfile
            z = zipfile.ZipFile("toy.pt2")
            shapes = [(10, 10), (10,), (5, 10), (5,)]
            raw = [torch.frombuffer(bytearray(z.read(f"toy/data/weights/weight_{i}")), dtype=torch.float32) for i in range(4)]
            p = [r.clone().reshape(s).requires_grad_() for r, s in zip(raw, shapes)]
            env = {"x": at["x"], "linear": torch.nn.functional.linear(at["x"], p[0], p[1]), "p_model_net1_weight": p[0], "p_model_net1_bias": p[1]}
            get = lambda a: env[a[1:]] if isinstance(a, str) and a.startswith("%") else [get(b) for b in a] if isinstance(a, list) else a
            for op, args, outs in nodes:
                packet, overload = op.split(".")
                f = getattr(getattr(torch.ops.aten, packet), overload)
                own = {a.name for a in f._schema.arguments}
                assert set(args) <= own, (name, op, set(args) - own)
                made = f(**{k: get(v) for k, v in args.items()})
                made = made if isinstance(made, (tuple, list)) else [made]
                env.update(zip(outs, made))
            h = env["relu"]
            assert h.shape == (8, 10), (name, h.shape)
            y = torch.nn.functional.linear(h, p[2], p[3])
            loss = torch.nn.functional.mse_loss(y, at["y"])
            loss.backward()
            g = p[0].grad.double().flatten()
            by = (g * torch.cos(torch.arange(100.0, dtype=torch.float64))).sum()
            row = {"name": name, "nodes": nodes, "loss": loss.item(), "norm": g.norm().item(), "product": by.item()}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
