"""Reads what `shardc export` wrote with the parsers of its targets.

    check.py dtensor FILE         placements on gloo ranks: local shapes and offsets are those of the plan
    check.py hf FILE CONFIG       DistributedConfig on a live model: shards as named, logits as on one rank
    check.py schedule FILE RANKS  the schedule of torchtitan, by the parser of torch
    check.py torchtitan FOLDER [SOURCE]  the module, with the dataclasses of torchtitan's source, or of the package
    check.py megatron FILE SOURCE        the flags, with the parser of Megatron-LM's source
    check.py mcore FILE                  what they set of the configs of megatron-core, with the package
    check.py deepspeed FILE RANKS        the config, with DeepSpeed
    check.py nanotron FILE SOURCE        the parallelism, with nanotron's dataclass
    check.py chakra FOLDER SOURCE        the traces, with Chakra's schema, compiled by grpc_tools

Exits with 3 if torch, or what else is needed, is not installed.
"""

import json
import os
import socket
import sys
import tempfile


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks(n, work, *args):
    import torch.multiprocessing as mp

    mp.start_processes(entry, (n, port(), work, args), nprocs=n, start_method="spawn")


def entry(rank, n, at, work, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at), "RANK": str(rank)}
    os.environ.update(env, WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=n)
    work(rank, *args)
    dist.destroy_process_group()


def dtensor(path):
    plan = json.load(open(path))
    ranks(sum(len(r) for r in plan["ranks_of_class"]), placed, plan)
    print(len(plan["parameters"]), "parameters lie as the plan says")


def placed(rank, plan):
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    names = {"Shard": Shard, "Replicate": Replicate}
    checked = 0
    for c, own in enumerate(plan["ranks_of_class"]):
        shape = plan["mesh_shape"] or [1]
        grid = torch.tensor(own).reshape(shape)
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=tuple(plan["mesh_dim_names"] or ["one"]))
        if rank not in own:
            continue
        for p in (p for p in plan["parameters"] if p["class"] == c):
            placements = [eval(x, names) for x in p["placements"] or ["Replicate()"]]
            whole = torch.arange(torch.Size(p["shape"]).numel()).reshape(p["shape"])
            t = distribute_tensor(whole, mesh, placements)
            want = p["local"][str(rank)]
            shape, offset = compute_local_shape_and_global_offset(t.shape, mesh, placements)
            assert list(t.to_local().shape) == [n for _, n in want], (rank, p, t.to_local().shape)
            if all(n for _, n in want):
                assert list(offset) == [o for o, _ in want], (rank, p, offset)
                index = tuple(slice(o, o + n) for o, n in want)
                assert torch.equal(t.to_local(), whole[index]), (rank, p)
            checked += 1
    assert checked > 0


def hf(path, config):
    args = json.load(open(path))
    ranks(args["tp_size"] * args.get("fsdp_size", 1) * args.get("dp_replicate_size", 1), live, args, config)
    print("the model runs with this plan:", len(args.get("tp_plan", {})) + len(args.get("ep_plan", {})), "rules")


def live(rank, args, config):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(config)
    whole = AutoModelForCausalLM.from_config(config).eval()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    if rank == 0:
        whole.save_pretrained(box[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(box[0], distributed_config=DistributedConfig(**args))
    tokens = torch.arange(12).reshape(1, 12) % config.vocab_size
    tp, rules, experts = args["tp_size"], args.get("tp_plan", {}), args.get("ep_plan", {})
    dims = {"colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0, "rowwise": 1, "embedding_colwise": 1}
    seen = set()
    for name, p in model.named_parameters():
        rule = ".".join("*" if x.isdigit() else x for x in name.removesuffix(".weight").split("."))
        if experts.get(rule) == "grouped_gemm":
            # What ranks with the same experts share out, FSDP has split again.
            split = p.device_mesh.size() if isinstance(p, DTensor) else 1
            local = p.to_local() if isinstance(p, DTensor) else p
            assert local.shape[0] * split == whole.get_parameter(name).shape[0], (name, local.shape, split)
            seen.add(rule)
            continue
        dim = dims.get(rules.get(rule))
        if dim is None:
            continue
        seen.add(rule)
        assert isinstance(p, DTensor) and p.placements[-1] == Shard(dim), (name, p)
        if p.device_mesh.ndim > 1:
            continue  # FSDP has split it again
        part = -(-p.shape[dim] // tp)
        first = min(part * rank, p.shape[dim])
        assert p.to_local().shape[dim] == min(part, p.shape[dim] - first), name
    assert seen == {r for r, s in (rules | experts).items() if s in dims or s == "grouped_gemm"}, seen
    with torch.no_grad():
        mine, theirs = model(tokens).logits, whole(tokens).logits
    mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
    assert torch.allclose(mine, theirs, atol=1e-5), (mine - theirs).abs().max()


def schedule(path, n):
    import csv

    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    rows = {i: [_Action.from_str(x) for x in row] for i, row in enumerate(csv.reader(open(path)))}
    assert len(rows) == int(n), len(rows)
    stages = 1 + max(a.stage_index for r in rows.values() for a in r)
    microbatches = 1 + max(a.microbatch_index for r in rows.values() for a in r)
    _validate_schedule(rows, int(n), stages, microbatches)
    print(sum(map(len, rows.values())), "actions of", stages, "stages")


def torchtitan(folder, source=None):
    import dataclasses

    sys.path[:0] = [folder] + ([source] if source else [])
    import shardc_plan

    class Any:
        pass

    from torchtitan.config.configs import CompileConfig, TrainingConfig

    config = Any()
    config.training, config.compile = TrainingConfig(), CompileConfig()
    # Its other modules want packages that a layout does not need.
    sys.modules.setdefault("torchtitan.distributed", type(sys)("torchtitan.distributed"))
    fake = type(sys)("torchtitan.distributed.activation_checkpoint")
    fake.FullAC = Any
    Any.Config = Any
    sys.modules.setdefault("torchtitan.distributed.activation_checkpoint", fake)
    out = shardc_plan.with_plan(config)
    TrainingConfig(**dataclasses.asdict(out.training))
    print(out.parallelism)


def megatron(path, source):
    import argparse
    import typing
    import warnings

    warnings.simplefilter("ignore")
    typing.override = getattr(typing, "override", lambda f: f)
    sys.path.insert(0, source)
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    words = [w for l in open(path) if not l.startswith("#") for w in l.split()]
    args = parser.parse_args(words)
    flags = [w for w in words if w.startswith("--")]
    print(len(flags), "flags:", args.tensor_model_parallel_size, args.pipeline_model_parallel_size)


# Fields of megatron-core whose flags have other names, and values that flags without one stand for.
RENAMED = {"num-experts": "num_moe_experts", "swiglu": "gated_linear_unit", "bf16": "bf16", "fp16": "fp16"}
NEGATED = {"disable-bias-linear": "add_bias_linear"}


def mcore(path):
    import dataclasses
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    flags = [line.split() for line in open(path) if line.startswith("--")]
    given = {words[0][2:]: words[1:] for words in flags}
    latent = "multi-latent-attention" in given
    taken = set()
    for of in (MLATransformerConfig if latent else TransformerConfig, DistributedDataParallelConfig):
        known = {f.name: f.default for f in dataclasses.fields(of)}
        values = {}
        for flag, words in given.items():
            name = NEGATED.get(flag) or RENAMED.get(flag) or flag.replace("-", "_")
            if name not in known:
                continue
            value = [json.loads(w) if w[0] in "-0123456789" else w for w in words]
            # One way of context parallelism is a word for all layers, as core_transformer_config_from_args gives it.
            several = name == "recompute_modules" or name == "cp_comm_type" and len(value) > 1
            values[name] = flag not in NEGATED if not words else value if several else value[0]
            taken.add(flag)
        if "moe_layer_freq" in values:
            values["moe_layer_freq"] = eval(values["moe_layer_freq"])
        if of is not DistributedDataParallelConfig:
            values.setdefault("pipeline_dtype", "bf16")
        # Its __post_init__ refuses what contradicts itself.
        of(**values)
    print(len(taken), "of", len(given), "flags are fields of its configs:", *sorted(taken))
    assert len(taken) > 10, taken


def deepspeed(path, n):
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    class Groups:
        def get_data_parallel_world_size(self):
            given = json.load(open(path))
            return int(n) // given.get("tensor_parallel", {}).get("autotp_size", 1)

    # It asks for the rank before it asks the groups.
    comm.get_rank = lambda group=None: 0
    c = DeepSpeedConfig(path, mpu=Groups())
    print("batch", c.train_batch_size, "ZeRO", c.zero_optimization_stage)


def nanotron(path, source):
    import dataclasses

    import yaml

    c = yaml.safe_load(open(path))
    text = open(os.path.join(source, "nanotron/config/parallelism_config.py")).read()
    names = {}
    body = text[text.index("@dataclass") :]
    for word in ("PipelineEngine", "TensorParallelLinearMode", "AllForwardAllBackwardPipelineEngine"):
        names[word] = type(word, (), {"__class_getitem__": classmethod(lambda c, k: k)})
    names.update(dataclass=dataclasses.dataclass, cast_str_to_pipeline_engine=str)
    exec("from typing import Optional\n" + body, names)
    made = names["ParallelismArgs"](**c["parallelism"])
    floats = [c["optimizer"]["optimizer_factory"]["adam_eps"], c["model"]["model_config"]["rms_norm_eps"]]
    assert all(isinstance(x, float) for x in floats), floats
    print(made)


def chakra(folder, source):
    from grpc_tools import protoc

    out = tempfile.mkdtemp()
    schema = os.path.join(source, "schema/protobuf")
    assert protoc.main(["", f"-I{schema}", f"--python_out={out}", "et_def.proto"]) == 0
    sys.path.insert(0, out)
    import et_def_pb2 as et

    groups = json.load(open(os.path.join(folder, "comm_group.json")))
    sent, received, calls = {}, {}, {}
    files = [f for f in os.listdir(folder) if f.endswith(".et")]
    for f in files:
        rank = int(f.split(".")[-2])
        nodes = list(messages(open(os.path.join(folder, f), "rb").read(), et))
        seen = set()
        for n in nodes:
            assert set(n.data_deps) <= seen, (f, n)
            seen.add(n.id)
            a = {x.name: getattr(x, x.WhichOneof("value")) for x in n.attr}
            if n.type == et.COMM_COLL_NODE:
                assert rank in groups[a["pg_name"]], (f, n)
                key = (a["pg_name"], rank)
                calls.setdefault(key, []).append((a["comm_type"], a["comm_size"]))
            elif n.type == et.COMM_SEND_NODE:
                sent[(a["comm_src"], a["comm_dst"], a["comm_tag"])] = a["comm_size"]
            elif n.type == et.COMM_RECV_NODE:
                received[(a["comm_src"], a["comm_dst"], a["comm_tag"])] = a["comm_size"]
            else:
                assert n.type == et.COMP_NODE and a["num_ops"] >= 0, (f, n)
    assert sent == received, (sent, received)
    # All ranks of a group exchange the same, in the same order.
    for group, members in groups.items():
        lists = [calls.get((group, r)) for r in members]
        assert all(l == lists[0] for l in lists), group
    print(len(files), "traces,", len(groups), "groups,", len(sent), "transfers")


def messages(data, et):
    at, first = 0, True
    while at < len(data):
        size, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        m = et.GlobalMetadata() if first else et.Node()
        m.ParseFromString(data[at : at + size])
        at += size
        if not first:
            yield m
        first = False


if __name__ == "__main__":
    try:
        import torch  # noqa: F401

        if sys.argv[1] == "hf":
            import accelerate, transformers  # noqa: E401, F401
    except ImportError as e:
        print(e)
        sys.exit(3)
    globals()[sys.argv[1]](*sys.argv[2:])
