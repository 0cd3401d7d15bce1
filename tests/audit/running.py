"""Runs what `shardc audit --check` printed, check.py in this folder, in a program of two ranks of tensor parallelism.

The program is a layer of a transformer as Megatron-LM has it: norms on every rank, linears cut over tp, gradients from a
backward pass. It is checked as it is, with a norm that has drifted, and with a norm of gradients that one rank alone counts.
"""

import os
import socket
import sys

sys.path.insert(0, os.getcwd())


def program(tp):
    import torch
    import torch.distributed as dist

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, d):
            d = d.clone()
            dist.all_reduce(d, group=tp)
            return d

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x, group=tp)
            return x

        @staticmethod
        def backward(ctx, d):
            return d

    r, n = dist.get_rank(tp), dist.get_world_size(tp)
    make = torch.Generator().manual_seed(0)
    norm = torch.rand(8, generator=make).requires_grad_()
    whole = [torch.randn(16, 8, generator=make), torch.randn(8, 16, generator=make)]
    up = whole[0].chunk(n)[r].clone().requires_grad_()
    down = whole[1].chunk(n, 1)[r].clone().requires_grad_()
    x = torch.randn(5, 8, generator=make)
    h = F.apply(torch.nn.functional.rms_norm(x, (8,), norm))
    y = G.apply(torch.tanh(h @ up.T) @ down.T)
    y.square().mean().backward()
    layer = "decoder.layers.0."
    return [(layer + "pre_mlp_layernorm.weight", norm, norm.grad), (layer + "mlp.linear_fc1.weight", up, up.grad),
            (layer + "mlp.linear_fc2.weight", down, down.grad)]


def rank(r, port):
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=r, world_size=2)
    from check import check

    tp = dist.new_group([0, 1])
    named = program(tp)
    parts = torch.stack([g.double().square().sum() for _, _, g in named])
    dist.all_reduce(parts)
    norm = (parts[0] / 2 + parts[1] + parts[2]).sqrt()

    def says(what, given, norm):
        try:
            check(given, {"tp": tp}, norm)
            text = "holds"
        except AssertionError as e:
            text = str(e)
        if r == 0:
            print(f"{what}: {text}", flush=True)

    says("right", named, norm)
    drifted = [(n, p + r if "norm" in n else p, g) for n, p, g in named]
    says("drifted norm", drifted, norm)
    alone = torch.stack([g.double().square().sum() for _, _, g in named]).sum().sqrt()
    dist.broadcast(alone, 0)
    says("norm of one rank", named, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(rank, (port,), nprocs=2, start_method="spawn")
