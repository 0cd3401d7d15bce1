"""Lints base_model_tp_plan of every causal language model of the installed transformers, and lets transformers confirm it.

    plans.py whole FOLDER           tiny models on one rank: losses, logits and gradients
    plans.py split FOLDER           the same on two gloo ranks by their plans, which are compared with these
    plans.py table FOLDER           what differs, as a table

Each model is of its own config class, with sizes of a few numbers. A model of which no such one can be made is listed. A
finding is what two ranks give and one rank does not: of a forward pass, of a backward pass, and of two backward passes
whose gradients add up, as with several microbatches. Exits with 3 if transformers is not installed.
"""

import datetime
import json
import os
import pathlib
import re
import socket
import subprocess
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
MOST = 2_000_000  # parameters of what is tiny
LOOSE = dict(rtol=1e-4, atol=2e-5)  # f32, sums of some hundred products in another order


def tiny(config):
    import torch

    kv = getattr(config, "num_key_value_heads", None)
    heads = getattr(config, "num_attention_heads", None)
    for key, value in SIZES.items():
        if getattr(config, key, None) is not None or (key == "head_dim" and hasattr(config, key)):
            setattr(config, key, value)
    if isinstance(kv, int):
        config.num_key_value_heads = 4 if kv == heads else 2
    if getattr(config, "qk_rope_head_dim", None):  # latent attention turns a part of its heads
        config.head_dim, config.num_key_value_heads = config.qk_rope_head_dim, 4
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = (kinds * 2)[:2]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, key, None), (int, list)):
            setattr(config, key, 1)
    for key in ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
        if getattr(config, key, None) is not None:
            setattr(config, key, 0.0)
    config.use_cache = False
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    return config


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


def whole(folder):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    torch.set_num_threads(1)
    left = {}
    for kind in sorted(CAUSAL):
        try:
            cls = CONFIG_MAPPING[kind]
        except KeyError:
            continue
        if not getattr(cls, "base_model_tp_plan", None):
            continue
        to = folder / kind
        if (to / "whole.pt").exists():
            continue
        try:
            config = tiny(cls())
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
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
            torch.save({"loss": loss.detach(), "logits": logits.detach(), "grads": grads}, to / "whole.pt")
        except Exception as e:
            left[kind] = f"{type(e).__name__}: {e}".splitlines()[0][:160]
    (folder / "left.json").write_text(json.dumps(left, indent=1))
    print(len(left), "of which no tiny model is made")


def differ(folder, kind, n):
    """What differs on two ranks after n backward passes."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    full = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
    want = torch.load(folder / kind / "whole.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / kind, tp_plan="auto", dtype=torch.float32, attn_implementation="eager")
    loss, logits = passes(model, tokens(), n)
    out = []
    if not torch.allclose(full(logits), want["logits"], **LOOSE):
        out.append(f"logits differ by {(full(logits) - want['logits']).abs().max():.3g}")
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
        size = want_g.norm()
        gap = (got - want_g).norm() / size if size > 0 else (got - want_g).norm()
        if not gap < 1e-3:
            twice = got.clone()
            torch.distributed.all_reduce(twice)
            part = (twice - want_g).norm() < 1e-3 * size
            how = "a part on each rank: not summed" if part else f"relative difference {gap:.2g}"
            out.append(f"{name}: gradient: {how}")
    if not split:
        out.append("the plan splits nothing")
    return out


def rank(folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for kind in sys.argv[3:]:
        found = []
        try:
            for n in (1, 2):
                found.append(differ(folder, kind, n))
        except Exception as e:
            found.append([f"{type(e).__name__}: {e}".replace("\n", " ")[:200]])
        all_found = [None, None]
        dist.all_gather_object(all_found, found)
        if dist.get_rank() == 0:
            (folder / kind / "split.json").write_text(json.dumps(all_found[0] if len(found) == 2 else found))
    dist.destroy_process_group()


def split(folder):
    kinds = sorted(p.parent.name for p in folder.glob("*/whole.pt"))
    while left := [k for k in kinds if not (folder / k / "split.json").exists()]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = lambda r: dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r))
        command = [sys.executable, __file__, "rank", str(folder), *left]
        ranks = [subprocess.Popen(command, env=env(r), stderr=subprocess.DEVNULL) for r in range(2)]
        for r in ranks:
            r.wait()
        first = next(k for k in kinds if not (folder / k / "split.json").exists()) if any(
            not (folder / k / "split.json").exists() for k in kinds) else None
        if first:  # the ranks ended here: one waits for the other
            (folder / first / "split.json").write_text(json.dumps([["the ranks do not end"]]))


def table(folder):
    import torch
    import transformers

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {datetime.date.today()}")
    short = lambda text: re.sub(r"\.\d+\.", ".*.", text)
    for p in sorted(folder.glob("*/split.json")):
        found = json.loads(p.read_text())
        one = list(dict.fromkeys(map(short, found[0])))
        two = [x for x in dict.fromkeys(map(short, found[1])) if x not in one] if len(found) > 1 else []
        print(p.parent.name, "|", "; ".join(one) or "as on one rank", "|", "; ".join(two) or "the same")


if __name__ == "__main__":
    try:
        import transformers
    except ImportError:
        sys.exit(3)
    {"whole": whole, "split": split, "rank": rank, "table": table}[sys.argv[1]](pathlib.Path(sys.argv[2]))
