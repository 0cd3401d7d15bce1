"""PyTorch: one rank of it. Layouts over gloo: DTensor, DDP, FSDP2, pipelining.

Variants: eager, compile. Of a model with experts, which is that of transformers on one rank, they go on with
how these are computed: eager:grouped_mm, compile:eager.
"""

import os
from contextlib import nullcontext

import common

args = common.arguments()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_model import Gpt2, Llama

EXPERTS = args.model == "mixtral"
if EXPERTS:
    from transformers import MixtralForCausalLM

imported = common.memory("VmRSS")
torch.set_num_threads(args.threads)
c = common.CONFIGS[args.model]
axes = {axis: size for axis, size in common.mesh_of(args.layout).items() if size > 1}
HOW, _, DISPATCH = args.variant.partition(":")
COMPILE = HOW == "compile"


def cut(axis):
    """Rank and number of ranks along an axis."""
    return (mesh.get_local_rank(axis), axes[axis]) if axis in axes else (0, 1)


def build():
    """This rank's stage with the checkpoint's weights."""
    if EXPERTS:
        return MixtralForCausalLM.from_pretrained(
            args.dir, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=DISPATCH).train()
    kind, layers = (Llama, c["num_hidden_layers"]) if args.model == "llama" else (Gpt2, c["n_layer"])
    (stage, stages), (_, tp) = cut("pp"), cut("tp")
    here = range(layers * stage // stages, layers * (stage + 1) // stages)
    model = kind(c, here, stage == 0, stage == stages - 1)
    with safe_open(args.dir / "model.safetensors", "pt") as f, torch.no_grad():
        for name, param in model.named_parameters():
            stored = model.stored_as(name)
            param.copy_(model.convert(stored, f.get_tensor(stored), tp))
    return model


def tensor_parallel(model):
    """Megatron's cuts; logits stay cut over the vocabulary."""
    rows = RowwiseParallel(input_layouts=Replicate())
    styles = {"embed_tokens": rows, "wte": rows,
              "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    styles |= {n: ColwiseParallel() for n in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")}
    styles |= {n: RowwiseParallel() for n in ("o_proj", "down_proj", "c_proj")}
    names = {name: name.rsplit(".")[-1] for name, _ in model.named_modules()}
    parallelize_module(model, mesh["tp"], {name: styles[last] for name, last in names.items() if last in styles})
    model.tie()


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def precision():
    return torch.autocast("cpu", torch.bfloat16) if args.dtype == "bf16" else nullcontext()


def trainer(model, ids, targets):
    """A function that computes gradients and gives the loss, on the last stage."""
    if "pp" in axes:
        rank, stages = cut("pp")
        stage = PipelineStage(model, rank, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        kind = Schedule1F1B if args.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stage, common.MICROBATCHES, loss_fn=loss_of)
        inputs = [ids] if rank == 0 else []

        def run():
            losses = []
            with precision():
                schedule.step(*inputs, target=targets if rank == stages - 1 else None, losses=losses)
            return sum(losses) / len(losses) if losses else torch.zeros(())

        return run

    def forward(ids, targets):
        logits = model(ids, use_cache=False).logits if EXPERTS else model(ids)
        return loss_of(logits, targets)

    whole = torch.compile(forward) if COMPILE and not axes else forward

    def run():
        with precision():
            loss = whole(ids, targets)
        loss.backward()
        return loss

    return run


def main():
    model = build()
    layers = [] if EXPERTS else model.get_submodule(model.layers_name).values()
    if "tp" in axes:
        tensor_parallel(model)
    if COMPILE and axes:
        for part in [model] if "tp" in axes else layers:
            part.compile()
    if "fsdp" in axes:
        for layer in layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if list(axes) == ["dp"] else model
    batch = load_file(args.dir / "batch.safetensors")
    ids, targets = torch.from_numpy(batch["input_ids"]), torch.from_numpy(common.targets(batch["labels"]))
    replica, replicas = cut("fsdp" if "fsdp" in axes else "dp")
    ids, targets = (t.chunk(replicas)[replica].contiguous() for t in (ids, targets))

    # Tensors that are cut and tensors that are not, in groups of their own: a fused step takes one kind.
    params = list(model.parameters())
    groups = [[p for p in params if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    adamw = torch.optim.AdamW([{"params": g} for g in groups if g], lr=common.LR, betas=common.BETAS, eps=common.EPS,
                              weight_decay=common.DECAY, fused=True)
    run = trainer(trained, ids, targets)

    def reduce_gradients():
        """What no wrapper does: replicas of tensor parallel ranks, and the two copies of a tied embedding."""

        def local(p):
            if not isinstance(p.grad, DTensor):
                return p.grad
            p.grad = p.grad.redistribute(placements=p.placements)  # cut as its parameter
            return p.grad.to_local()

        if "dp" in axes and "tp" in axes:
            flat = torch.cat([local(p).flatten() for p in params])
            dist.all_reduce(flat, group=mesh.get_group("dp"))
            flat /= axes["dp"]
            for p, part in zip(params, flat.split([local(p).numel() for p in params])):
                local(p).copy_(part.view_as(local(p)))
        if "pp" in axes and model.tied_across_stages() is not None:
            dist.all_reduce(local(model.tied_across_stages()), group=mesh.get_group("pp"))

    def step():
        adamw.zero_grad()
        with loss_parallel() if "tp" in axes else nullcontext():
            loss = run().detach()
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        reduce_gradients()
        adamw.step()
        if axes:  # also waits until every rank is done
            dist.all_reduce(loss)
            loss *= axes.get("pp", 1) / dist.get_world_size()
        return loss.item()

    common.serve(step, args.steps, imported)


if axes:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
main()
