"""What every side shares: the three models, the optimizer, the inputs on disk, the loop of a worker."""

import json
import math
import os
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

# AdamW on every parameter, without clipping.
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
MICROBATCHES = 4  # of a pipeline

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", hidden_size=512,
    intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    vocab_size=8192, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0), attention_bias=False, mlp_bias=False,
    attention_dropout=0.0, dtype="float32")
GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], activation_function="gelu_new", n_embd=768, n_layer=12,
    n_head=12, n_positions=1024, vocab_size=50257, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, dtype="float32")
# Every expert is as wide as Llama's MLP; the router has no loss of its own.
MIXTRAL = LLAMA | dict(
    model_type="mixtral", architectures=["MixtralForCausalLM"], num_hidden_layers=4, num_local_experts=8,
    num_experts_per_tok=2, router_aux_loss_coef=0.0, router_jitter_noise=0.0, sliding_window=None)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
BATCHES = {"llama": (8, 256), "gpt2": (4, 256), "mixtral": (8, 256)}  # sequences, tokens of each


def shapes(config):
    """Names and shapes of a checkpoint, as Hugging Face writes them. GPT-2's matrices are [in, out]."""
    c, out = config, {}
    if c["model_type"] != "gpt2":
        d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        out["model.embed_tokens.weight"] = out["lm_head.weight"] = (c["vocab_size"], d)
        out["model.norm.weight"] = (d,)
        for i in range(c["num_hidden_layers"]):
            layer = dict(input_layernorm=(d,), post_attention_layernorm=(d,))
            layer |= {f"self_attn.{n}_proj": s for n, s in dict(q=(q, d), k=(kv, d), v=(kv, d), o=(d, q)).items()}
            if c["model_type"] == "llama":
                layer |= {f"mlp.{n}_proj": s for n, s in dict(gate=(f, d), up=(f, d), down=(d, f)).items()}
            else:
                layer["block_sparse_moe.gate"] = (c["num_local_experts"], d)
                layer |= {f"block_sparse_moe.experts.{e}.{n}": s for e in range(c["num_local_experts"])
                          for n, s in dict(w1=(f, d), w2=(d, f), w3=(f, d)).items()}
            out |= {f"model.layers.{i}.{n}.weight": s for n, s in layer.items()}
    else:
        d = c["n_embd"]
        out["transformer.wte.weight"], out["transformer.wpe.weight"] = (c["vocab_size"], d), (c["n_positions"], d)
        layers = {"ln_1": (d,), "attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "ln_2": (d,),
                  "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
        named = {f"h.{i}.{n}": s for i in range(c["n_layer"]) for n, s in layers.items()} | {"ln_f": (d,)}
        for n, s in named.items():
            out[f"transformer.{n}.weight"], out[f"transformer.{n}.bias"] = s, s[-1:]
    return out


def write_inputs(model, dir):
    """A random checkpoint (a Hugging Face folder) and `batch.safetensors`, the same on every machine."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes(CONFIGS[model]).items():
        w = 0.02 * rng.standard_normal(shape, dtype=np.float32)
        norm = "norm" in name or ".ln_" in name
        weights[name] = w + np.float32(norm and name.endswith("weight"))
    dir.mkdir(parents=True, exist_ok=True)
    (dir / "config.json").write_text(json.dumps(CONFIGS[model], indent=1))
    save_file(weights, dir / "model.safetensors", {"format": "pt"})
    # Position i is scored against labels[i + 1].
    ids = rng.integers(0, CONFIGS[model]["vocab_size"], BATCHES[model], dtype=np.int64)
    save_file({"input_ids": ids, "labels": ids}, dir / "batch.safetensors")


def targets(labels):
    """What position i is scored against: labels[i + 1]; -100, where nothing is."""
    import numpy as np

    return np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)


def mesh_of(layout):
    """'pp=2,tp=2' as {'pp': 2, 'tp': 2}."""
    return {axis: int(size) for axis, size in (part.split("=") for part in layout.split(","))}


def ranks_of(layout):
    """How many: ep is no axis of its own, but factorises the ranks of the others."""
    return math.prod(size for axis, size in mesh_of(layout).items() if axis != "ep")


def arguments():
    """Of a worker: one rank of one candidate."""
    p = ArgumentParser()
    p.add_argument("--model", choices=CONFIGS)
    p.add_argument("--dir", type=Path, help="what write_inputs wrote")
    p.add_argument("--layout", default="dp=1", help="as in dp=1 (one rank), tp=2, fsdp=2, pp=2,tp=2")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    p.add_argument("--variant", default="", help="of a side: see its file")
    p.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe", help="of PyTorch's pipelines")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=3)
    return p.parse_args()


def memory(field):
    """MiB of this process: VmRSS now, VmHWM at its peak."""
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024


def in_turns(step):
    """Trains a step for each line of the input and says what it took; with PROFILE, a table of the last one's ops goes there."""

    def one():
        began, used = time.perf_counter(), time.process_time()
        loss = step()
        return dict(loss=loss, ms=1e3 * (time.perf_counter() - began), cpu=1e3 * (time.process_time() - used))

    for _ in sys.stdin:
        print(json.dumps(one()), flush=True)
    if os.environ.get("PROFILE"):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        Path(os.environ["PROFILE"]).write_text(table)


def serve(step, steps, imported):
    """Trains as many steps as asked and says what was seen. `step()` trains and gives the loss."""
    if os.environ.get("IN_TURNS"):
        return in_turns(step)
    losses, ms = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step())
        ms.append(1e3 * (time.perf_counter() - began))
    print(json.dumps(dict(losses=losses, ms=ms, peak=memory("VmHWM"), imported=imported)))
