"""JAX: a plain jax.numpy model, jit with donated buffers; layouts by NamedSharding, pipelines by shard_map."""

import math
import os

import common

args = common.arguments()
mesh_axes = common.mesh_of(args.layout)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={math.prod(mesh_axes.values())}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from safetensors.numpy import load_file

imported = common.memory("VmRSS")
c = common.CONFIGS[args.model]
LLAMA = args.model != "gpt2"
EXPERTS = args.model == "mixtral"
LAYERS = "model.layers." if LLAMA else "transformer.h."
PRECISION = jnp.bfloat16 if args.dtype == "bf16" else jnp.float32


# The model. Weights are as in the checkpoint: Llama's [out, in], GPT-2's [in, out].

def rms_norm(x, weight):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + c["rms_norm_eps"])
    return (x32 * weight).astype(x.dtype)


def layer_norm(x, weight, bias):
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + c["layer_norm_epsilon"])
    return (x32 * weight + bias).astype(x.dtype)


def rotate(x):
    """Rotary positions of x [batch, seq, heads, head]."""
    half = x.shape[-1] // 2
    theta = c["rope_parameters"]["rope_theta"]
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama_layer(p, x):
    b, s, _ = x.shape
    h = rms_norm(x, p["input_layernorm.weight"])
    q, k, v = ((h @ p[f"self_attn.{n}_proj.weight"].T).reshape(b, s, -1, c["head_dim"]) for n in "qkv")
    attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + attended.reshape(b, s, -1) @ p["self_attn.o_proj.weight"].T
    h = rms_norm(x, p["post_attention_layernorm.weight"])
    if EXPERTS:
        return x + experts(p, h.reshape(b * s, -1)).reshape(x.shape)
    h = jax.nn.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)
    return x + h @ p["mlp.down_proj.weight"].T


def experts(p, x):
    """x [tokens, d] by all experts, of which the router's choices count. XLA's ragged_dot takes longer on a CPU."""
    scores = jax.nn.softmax((x @ p["block_sparse_moe.gate.weight"].T).astype(jnp.float32))
    top, chosen = jax.lax.top_k(scores, c["num_experts_per_tok"])
    top = (top / top.sum(-1, keepdims=True)).astype(x.dtype)
    scores = jnp.einsum("tk,tke->et", top, jax.nn.one_hot(chosen, scores.shape[-1], dtype=x.dtype))
    w1, w2, w3 = (p[f"block_sparse_moe.{n}"] for n in ("w1", "w2", "w3"))
    rows = jax.nn.silu(jnp.einsum("td,edf->etf", x, w1)) * jnp.einsum("td,edf->etf", x, w3)
    return jnp.einsum("etf,efd->td", rows * scores[..., None], w2)


def gpt2_layer(p, x):
    b, s, d = x.shape
    h = layer_norm(x, p["ln_1.weight"], p["ln_1.bias"])
    # [in, 3, out]: a cut over the last dimension cuts heads.
    qkv = jnp.einsum("bsi,ijo->bsjo", h, p["attn.c_attn.weight"]) + p["attn.c_attn.bias"]
    q, k, v = (qkv[:, :, j].reshape(b, s, c["n_head"], -1) for j in range(3))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, d)
    x = x + attended @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
    h = layer_norm(x, p["ln_2.weight"], p["ln_2.bias"])
    h = jax.nn.gelu(h @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"], approximate=True)
    return x + h @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]


layer = llama_layer if LLAMA else gpt2_layer


def embed(p, ids):
    if LLAMA:
        return p["model.embed_tokens.weight"][ids]
    return p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: ids.shape[1]]


def head_loss(p, x, targets):
    """Mean cross-entropy where the target is not -100."""
    if LLAMA:
        logits = rms_norm(x, p["model.norm.weight"]) @ p["lm_head.weight"].T
    else:
        logits = layer_norm(x, p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
        logits = logits @ p["transformer.wte.weight"].T
        if logits.shape[-1] > c["vocab_size"]:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < c["vocab_size"], logits, -jnp.inf)
    logits, scored = logits.astype(jnp.float32), targets >= 0
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(logits, -1) - chosen) * scored) / jnp.sum(scored)


# Layouts.

mesh = jax.make_mesh(tuple(mesh_axes.values()), tuple(mesh_axes), axis_types=(AxisType.Auto,) * len(mesh_axes))
data = next((a for a in ("dp", "fsdp") if a in mesh_axes), None)


def place(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def sharding(name, shape):
    """Of a parameter: Megatron's cut over tp, the first dimension that divides over fsdp, layers over pp."""
    spec = [None] * len(shape)
    if name.startswith("layers."):
        spec[0] = "pp"
    if "tp" in mesh_axes:
        llama_cut = {"q_proj": -2, "k_proj": -2, "v_proj": -2, "o_proj": -1, "gate_proj": -2, "up_proj": -2,
                     "down_proj": -1, "lm_head": 0, "embed_tokens": 0}
        gpt2_cut = {"c_attn.": -1, "attn.c_proj.weight": -2, "c_fc.": -1, "mlp.c_proj.weight": -2, "wte": 0}
        for part, dim in (llama_cut if LLAMA else gpt2_cut).items():
            if part in name:
                spec[dim] = "tp"
    if "fsdp" in mesh_axes:
        divides = [i for i, n in enumerate(shape) if n % mesh_axes["fsdp"] == 0]
        spec[divides[0]] = "fsdp"
    return NamedSharding(mesh, P(*spec))


def split_layers(p):
    """Layer by layer, parameters under their names within the layer."""
    out = [{} for _ in range(c["num_hidden_layers" if LLAMA else "n_layer"])]
    for name, w in p.items():
        if name.startswith(LAYERS):
            i, rest = name[len(LAYERS):].split(".", 1)
            out[int(i)][rest] = w
    return out


def forward(p, ids):
    x = place(embed(p, ids), data)
    for one in split_layers(p):
        x = place(layer(one, x), data)
    return x


def pipeline(p, ids):
    """GPipe: at every tick each stage computes one microbatch and passes it on; idle stages compute nothing."""
    stages, m = mesh_axes["pp"], common.MICROBATCHES
    stacked = {n.removeprefix("layers."): w for n, w in p.items() if n.startswith("layers.")}
    x = embed(p, ids)
    x = x.reshape(m, -1, *x.shape[1:])

    def stage(mine, x):
        per_stage = next(iter(mine.values())).shape[0]

        def run(x):
            for i in range(per_stage):
                x = layer({n: w[i] for n, w in mine.items()}, x)
            return x

        me, state, done = jax.lax.axis_index("pp"), jnp.zeros_like(x[0]), []
        state, x = (jax.lax.pcast(v, "pp", to="varying") for v in (state, x))
        for tick in range(m + stages - 1):
            state = jnp.where(me == 0, x[min(tick, m - 1)], state)
            busy = (me <= tick) & (tick < me + m)
            state = jax.lax.cond(busy, run, lambda x: x, state)
            done.append(state)
            state = jax.lax.ppermute(state, "pp", [(i, i + 1) for i in range(stages - 1)])
        return jnp.stack(done[stages - 1:])[None]

    out = jax.shard_map(stage, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"), axis_names={"pp"})(stacked, x)
    # The head is not on the last rank alone: every rank has its part of the batch.
    return place(out[-1].reshape(ids.shape + x.shape[-1:]), "pp")


def loss_of(p, ids, targets):
    p = {n: w.astype(PRECISION) for n, w in p.items()}
    return head_loss(p, (pipeline if "pp" in mesh_axes else forward)(p, ids), targets)


def train(state, ids, targets):
    params, m, v, t = state
    loss, grads = jax.value_and_grad(loss_of)(params, ids, targets)
    t, (b1, b2) = t + 1, common.BETAS
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)

    def adamw(w, m, v):
        moved = (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + common.EPS)
        return w - common.LR * (moved + common.DECAY * w)

    return (jax.tree.map(adamw, params, m, v), m, v, t), loss


def load():
    p = load_file(args.dir / "model.safetensors")
    for n in p:
        if "c_attn" in n:
            p[n] = p[n].reshape(*p[n].shape[:-1], 3, -1)
    if EXPERTS:  # [expert, in, out]
        moes = [f"{LAYERS}{i}.block_sparse_moe" for i in range(c["num_hidden_layers"])]
        p |= {f"{moe}.{n}": np.stack([p.pop(f"{moe}.experts.{e}.{n}.weight").T
                                      for e in range(c["num_local_experts"])])
              for moe in moes for n in ("w1", "w2", "w3")}
    if not LLAMA and "tp" in mesh_axes:  # a vocabulary that divides
        padding = -c["vocab_size"] % mesh_axes["tp"]
        p["transformer.wte.weight"] = np.pad(p["transformer.wte.weight"], ((0, padding), (0, 0)))
    if "pp" in mesh_axes:
        layers = split_layers(p)
        p = {n: w for n, w in p.items() if not n.startswith(LAYERS)}
        p |= {f"layers.{n}": np.stack([one[n] for one in layers]) for n in layers[0]}
    return p


def main():
    params = {n: jax.device_put(w, sharding(n, w.shape)) for n, w in load().items()}
    zeros = lambda: {n: jnp.zeros_like(w, device=w.sharding) for n, w in params.items()}
    state = (params, zeros(), zeros(), jnp.zeros((), jnp.float32, device=NamedSharding(mesh, P())))
    batch = load_file(args.dir / "batch.safetensors")
    rows = NamedSharding(mesh, P(data))
    ids, targets = batch["input_ids"], common.targets(batch["labels"])
    ids, targets = (jax.device_put(a.astype("int32"), rows) for a in (ids, targets))
    jitted = jax.jit(train, donate_argnums=0)

    def step():
        nonlocal state
        state, loss = jitted(state, ids, targets)
        jax.block_until_ready(state)
        return float(loss)

    common.serve(step, args.steps, imported)


main()
