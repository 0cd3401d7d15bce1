"""Lints base_model_tp_plan of every causal language model of the installed transformers, and lets transformers confirm it.

    plans.py whole FOLDER [KIND…]   tiny models on one rank: losses, logits and gradients, and what reading their plans finds
    plans.py split FOLDER           the same on two gloo ranks by their plans, which are compared with these
    plans.py table FOLDER           what was found, as a table
    plans.py all FOLDER [KIND…]     one behind the other

Each model is of its own config class, with sizes of a few numbers, and again with each switch of SWITCHES turned that it
has. A model of which no such one can be made is listed. Reading a plan (`lint`) looks at shapes, heads, sums that are
missing, tied heads, and what is gathered. What it finds stands in the table if two ranks differ from one in the same
parameter, or fail, and is dropped otherwise; two ranks are compared in a forward pass, a backward pass, two backward passes
whose gradients add up, as with several microbatches, and, where there are experts, with these split by base_model_ep_plan. Exits with 3 if transformers is not installed.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import socket
import sys

SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48,
    "num_attention_heads": 4, "n_head": 4, "num_hidden_layers": 2, "n_layer": 2, "head_dim": 8, "vocab_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12, "v_head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "sliding_window": 16, "num_nextn_predict_layers": 0, "intermediate_size_mlp": 48, "global_head_dim": 8,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 8, "mlp_only_layers": [], "moe_layer_start_index": 0,
    "ffn_hidden_size": 48, "mamba_n_heads": 4, "mamba_d_head": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rotary_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
# Switches that make other parameters: each is turned by itself.
SWITCHES = {
    "tied": ["tie_word_embeddings"], "qk": ["use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"],
    "bias": ["attention_bias", "qkv_bias", "mlp_bias", "use_bias"],
}
# Keys of one class, without which its sizes do not fit, or it has no experts.
OWN = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"intermediate_size": [48, 48], "activation_sparsity_pattern": [0.95, 0.0], "num_kv_shared_layers": 0},
    "inkling2_text": {"unpadded_vocab_size": 64},
    "inkling2_loop_text": {"unpadded_vocab_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
MOST = 8_000_000  # parameters of what is tiny
LOOSE = dict(rtol=1e-4, atol=2e-5)  # f32, sums of some hundred products in another order


def put(config, key, value):
    """Sets a key; a class that looks at all keys behind each would refuse what is between two sets of them."""
    try:
        setattr(config, key, value)
    except Exception:
        config.__dict__[key] = value


def got(config, key, default=None):
    """The value of a key; one that each layer has its own of raises."""
    try:
        return getattr(config, key, default)
    except Exception:
        return default


def tiny(config, turned=None):
    import torch

    layers = got(config, "num_hidden_layers", None)
    kv = got(config, "num_key_value_heads", None)
    heads = got(config, "num_attention_heads", None)
    for key, value in SIZES.items():
        if got(config, key, None) is not None or (key == "head_dim" and hasattr(config, key)):
            put(config, key, value)
    for key, value in {"num_key_value_heads": 4, "num_attention_heads": 4, "num_experts_per_tok": 2}.items():
        if got(config, key, 0) is None:
            put(config, key, value)
    if isinstance(kv, int):
        put(config, "num_key_value_heads", 4 if kv == heads else 2)
    if got(config, "qk_rope_head_dim", None):  # latent attention turns a part of its heads
        config.head_dim, config.num_key_value_heads = config.qk_rope_head_dim, 4
    for key, value in list(vars(config).items()):  # lists with an entry for each layer: kinds of layers, of MLPs
        if isinstance(value, (list, tuple)) and len(value) == layers and all(isinstance(x, (str, int)) for x in value):
            kinds = list(dict.fromkeys(value))
            put(config, key, (kinds * 2)[:2])
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(got(config, key, None), (int, list)):
            setattr(config, key, 1)
    for key in ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
        if got(config, key, None) is not None:
            setattr(config, key, 0.0)
    for key in SWITCHES.get(turned, ()):
        if isinstance(got(config, key, None), bool):
            setattr(config, key, not got(config, key))
    for key, value in OWN.get(config.model_type, {}).items():
        put(config, key, value)
    config.use_cache = False
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    return config


def has(config, turned):
    return any(isinstance(got(config, key), bool) for key in SWITCHES[turned])


COLUMNS = {"colwise", "packed_colwise"}
ROWS = {"rowwise", "packed_rowwise"}
#: The dim of its weight that a style splits.
SPLIT = {"colwise": 0, "colwise_gather_output": 0, "colwise_rep": 0, "packed_colwise": 0, "embedding_rowwise": 0,
         "rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1, "packed_rowwise": 1, "embedding_colwise": 1}


def generic(name):
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def lint(model):
    """What reading a plan finds: of each kind the names it is of, and a reason."""
    plan, out = model.tp_plan, []
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    names = {generic(n): n for n in [*params, *modules]}

    def style(name):
        name = generic(name)
        return plan.get(name) or plan.get(name.rpartition(".")[0])

    def say(kind, name, why):
        if (kind, generic(name), why) not in out:
            out.append((kind, generic(name), why))

    for rule, word in plan.items():
        if rule not in names:
            say("names nothing", rule, word)
            continue
        module = modules.get(names[rule])
        if module is None:
            continue
        if word in COLUMNS - {"packed_colwise"} and not hasattr(module, "out_features"):
            say("shape", rule, f"{word} is for linears, and this is a {type(module).__name__}")
        if word in ROWS - {"packed_rowwise"} and not hasattr(module, "in_features"):
            say("shape", rule, f"{word} is for linears, and this is a {type(module).__name__}")
        if word in ("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"):
            say("gathered", rule, word)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    for name, module in modules.items():
        if hasattr(module, "in_features"):
            continue
        own = [n for n, _ in module.named_children()] + [n for n, _ in module.named_parameters(recurse=False)]
        of = {n: style(f"{name}.{n}" if name else n) for n in own}
        columns = [n for n, s in of.items() if s in COLUMNS]
        rows = [n for n, s in of.items() if s in ROWS]
        if columns and not rows:
            say("sum", name, f"{', '.join(columns)} split what no row sums")
        if rows and not columns:
            say("sum", name, f"{', '.join(rows)} sum what no column splits")
        if not columns or not name:
            continue
        for n, (count, what) in {"q_proj": (heads, "heads"), "k_proj": (groups, "groups of heads")}.items():
            if n in columns and isinstance(count, int) and count % 2:
                say("heads", f"{name}.{n}", f"{count} {what} on two ranks")
        before = {getattr(config, k, None) for k in ("hidden_size", "q_lora_rank", "kv_lora_rank", "kv_dim")}
        for n, p in module.named_parameters():
            full, first = f"{name}.{n}", n.split(".")[0]
            if style(full) in SPLIT or style(full) == "replicated_with_grad_allreduce" or of.get(first) in (*COLUMNS, *ROWS):
                continue
            if style(full) is None and "kv_a_proj" in n and n.endswith("weight") and {"kv_b_proj", "q_b_proj"} & set(columns):
                say("sum", full, "the rotary part of keys is used by the heads of a rank")
            elif p.shape[:1] and p.shape[0] in (heads, groups) and not hasattr(modules[full.rpartition(".")[0]], "in_features"):
                say("shape", full, "a row for each head, on every rank, beside the heads of a rank")
            elif p.dim() < 2 and p.numel() not in before:
                say("sum", full, "on every rank, between what columns split and rows sum")
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed is not None and head is not None and embed.weight is head.weight:
        where = {id(m): n for n, m in modules.items()}
        of = [style(where[id(m)] + ".weight") for m in (embed, head)]
        if SPLIT.get(of[0]) != SPLIT.get(of[1]):
            say("tied", where[id(head)], f"one weight, {of[0]} and {of[1]}")
    return out


def tokens():
    import torch

    return torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def passes(model, ids, n):
    """The loss, the logits, and gradients that n backward passes add up to."""
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    for _ in range(n - 1):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return out.loss, out.logits


def make(folder, kind, cls, turned):
    """A tiny model, whose numbers on one rank are stored, and what reading its plan finds."""
    import torch
    from transformers import AutoModelForCausalLM

    to = folder / (f"{kind}+{turned}" if turned else kind)
    if (to / "whole.pt").exists():
        return
    config = tiny(cls(), turned)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        size, found = sum(p.numel() for p in model.parameters()), lint(model)
    if size > MOST:
        raise ValueError(f"{size} parameters, although sizes are small")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms of ones and biases of zeros would hide what is wrong with them
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    to.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(to)
    # Read again, as ranks read it: what is lost on the way is no plan's fault.
    how = dict(dtype=torch.float32, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(to, **how)
    loss, logits = passes(model, tokens(), 1)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    (to / "lint.json").write_text(json.dumps(found))
    torch.save({"loss": loss.detach(), "logits": logits.detach(), "grads": grads}, to / "whole.pt")


def whole(folder, *asked):
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    left = {}
    for kind in asked or sorted(CAUSAL):
        kind, _, only = kind.partition("+")
        try:
            cls = CONFIG_MAPPING[kind]
        except KeyError:
            continue
        if not getattr(cls, "base_model_tp_plan", None):
            continue
        for turned in [only or None] if asked else [None, *SWITCHES]:
            try:
                if turned and (kind in left or not has(cls(), turned)):
                    continue
                make(folder, kind, cls, turned)
            except Exception as e:
                left[f"{kind}+{turned}" if turned else kind] = f"{type(e).__name__}: {e}".splitlines()[0][:160]
    (folder / "left.json").write_text(json.dumps(left, indent=1))
    print(sum("+" not in k for k in left), "of which no tiny model is made")


def differ(folder, kind, n, sizes):
    """What differs on two ranks after n backward passes, and whether experts have a plan."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    full = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
    want = torch.load(folder / kind / "whole.pt")
    how = dict(dtype=torch.float32, attn_implementation="eager", distributed_config=DistributedConfig(**sizes))
    model = AutoModelForCausalLM.from_pretrained(folder / kind, **how)
    loss, logits = passes(model, tokens(), n)
    out = []
    if not torch.allclose(full(logits), want["logits"], **LOOSE):
        out.append(f"logits differ by {(full(logits) - want['logits']).abs().max():.3g}")
    # What is 0 but for rounding, as the gradient of a bias of keys without positions, is compared with all of them.
    least = 1e-4 * n * sum(g.norm() ** 2 for g in want["grads"].values()) ** 0.5
    split = 0
    for name, p in model.named_parameters():
        split += isinstance(p, DTensor)
        if name not in want["grads"]:
            continue
        want_g = n * want["grads"][name]
        got = torch.zeros_like(want_g) if p.grad is None else full(p.grad)
        if got.shape != want_g.shape:
            out.append(f"{name}: gradient of shape {tuple(got.shape)}, not {tuple(want_g.shape)}")
            continue
        size = max(want_g.norm(), least)
        gap = (got - want_g).norm() / size
        if not gap < 1e-3:
            twice = got.clone()
            torch.distributed.all_reduce(twice)
            part = (twice - want_g).norm() < 1e-3 * size
            how = "a part on each rank: not summed" if part else f"relative difference {gap:.2g}"
            out.append(f"{name}: gradient: {how}")
    if not split:
        out.append("the plan splits nothing")
    return out, bool(model.ep_plan)


def one_mesh():
    """Lets models of equal layouts share a mesh: each new one has groups of its own, and threads that stay."""
    import torch.distributed as dist

    make, kept = dist.init_device_mesh, {}

    def kept_or_made(device, shape, mesh_dim_names=None):
        key = (device, tuple(shape), mesh_dim_names)
        if key not in kept:
            kept[key] = make(device, shape, mesh_dim_names=mesh_dim_names)
        return kept[key]

    dist.init_device_mesh = kept_or_made


def rank(r, folder, port, kinds):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    one_mesh()
    for kind in kinds:
        found = []
        try:
            for n, sizes in ((1, {}), (2, {}), (1, {"ep_size": 2})):
                if sizes and not experts:
                    continue
                more, experts = differ(folder, kind, n, {"tp_size": 2, **sizes})
                found.append(more)
        except Exception as e:
            found.append([f"{type(e).__name__}: {e}".replace("\n", " ")[:200]])
        all_found = [None, None]
        dist.all_gather_object(all_found, found)
        if r == 0:
            (folder / kind / "split.json").write_text(json.dumps(all_found[0] if len(found) > 1 else found))
    dist.destroy_process_group()


def forked(f, *calls):
    """Runs a function in processes that have what this one has imported, and no threads of it."""
    of = multiprocessing.get_context("fork")
    all_of_them = [of.Process(target=f, args=call) for call in calls]
    for p in all_of_them:
        p.start()
    for p in all_of_them:
        p.join()


def split(folder):
    kinds = sorted(p.parent.name for p in folder.glob("*/whole.pt"))
    while left := [k for k in kinds if not (folder / k / "split.json").exists()]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        forked(rank, (0, folder, port, left), (1, folder, port, left))
        first = next((k for k in left if not (folder / k / "split.json").exists()), None)
        if first:  # the ranks ended here: one waits for the other
            (folder / first / "split.json").write_text(json.dumps([["the ranks do not end"]]))


def table(folder):
    version = importlib.metadata.version
    short = lambda x: x if ": " not in x else generic(x.partition(": ")[0]) + x[x.index(": "):]
    print(f"transformers {version('transformers')}, torch {version('torch')}, {datetime.date.today()}")
    for p in sorted(folder.glob("*/split.json")):
        found = json.loads(p.read_text())
        one = list(dict.fromkeys(map(short, found[0])))
        more = [[x for x in dict.fromkeys(map(short, f)) if x not in one] for f in found[1:]]
        runs = " ".join(one + sum(more, []))
        print(p.parent.name, "|", "; ".join(one) or "as on one rank", *(f"| {'; '.join(m) or 'the same'}" for m in more))
        for kind, name, why in json.loads((p.parent / "lint.json").read_text()):
            if kind == "gathered":
                continue
            # A rank that fails, or logits that differ, confirm what is said of shapes.
            whole = kind != "sum" and any(x.startswith("logits") or "Error" in x for x in one)
            state = "by itself" if kind == "names nothing" else "confirmed" if whole or name in runs else "dropped"
            print("   ", f"{state}: {kind}: {name}: {why}")


if __name__ == "__main__":
    if not importlib.util.find_spec("transformers"):
        sys.exit(3)
    what, to, kinds = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    if what != "table":
        import torch.distributed.tensor  # once, for all processes
        import transformers.distributed
    if what in ("whole", "all"):
        forked(whole, (to, *kinds))
    if what in ("split", "all"):
        split(to)
    if what in ("table", "all"):
        table(to)
