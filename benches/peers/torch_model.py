"""The two models in PyTorch, under the parameter names of a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


def attention(x, q, k, v):
    """q, k and v [batch, seq, heads, head] of a hidden state x; k and v may have fewer heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2).flatten(2)


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.head = c["hidden_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * self.head, c["num_key_value_heads"] * self.head
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, n, bias=False) for n in (q, kv, kv))
        self.o_proj = nn.Linear(q, d, bias=False)

    def forward(self, x, cos, sin):
        def rotate(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin

        q, k, v = (p(x).unflatten(-1, (-1, self.head)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attention(x, rotate(q), rotate(k), v))


class LlamaMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm = lambda: nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = LlamaAttention(c), LlamaMlp(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """`layers` is a range, and the embedding and the head may be missing: a stage of a pipeline."""

    layers_name = "model.layers"

    def __init__(self, c, layers, first, last):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): LlamaLayer(c) for i in layers})
        if first:
            self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        if last:
            self.model.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
            self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        self.first, self.last = first, last
        half = c["head_dim"] // 2
        theta = c["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-torch.arange(half) / half)

    def forward(self, x):
        if self.first:
            x = self.model.embed_tokens(x)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x)) if self.last else x

    def tie(self):
        pass

    def tied_across_stages(self):
        return None

    def stored_as(self, name):
        return name

    def convert(self, name, w, tp):
        return w


class Gpt2Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c["n_embd"]
        self.head = d // c["n_head"]
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, -1, self.head)).unbind(2)
        return self.c_proj(attention(x, q, k, v))


class Gpt2Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c["n_embd"]
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Gpt2Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm = lambda: nn.LayerNorm(c["n_embd"], c["layer_norm_epsilon"])
        self.ln_1, self.ln_2, self.attn, self.mlp = norm(), norm(), Gpt2Attention(c), Gpt2Mlp(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """As Llama. The head is the embedding; in a pipeline the last stage has a copy."""

    layers_name = "transformer.h"

    def __init__(self, c, layers, first, last):
        super().__init__()
        t = self.transformer = nn.Module()
        t.h = nn.ModuleDict({str(i): Gpt2Layer(c) for i in layers})
        if first:
            t.wte, t.wpe = nn.Embedding(c["vocab_size"], c["n_embd"]), nn.Embedding(c["n_positions"], c["n_embd"])
        if last:
            t.ln_f = nn.LayerNorm(c["n_embd"], c["layer_norm_epsilon"])
            self.lm_head = nn.Linear(c["n_embd"], c["vocab_size"], bias=False)
        self.first, self.last = first, last
        self.tie()

    def tie(self):
        if self.first and self.last:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, x):
        t = self.transformer
        if self.first:
            x = t.wte(x) + t.wpe(torch.arange(x.shape[1]))
        for layer in t.h.values():
            x = layer(x)
        return self.lm_head(t.ln_f(x)) if self.last else x

    def tied_across_stages(self):
        """This stage's copy of the tied matrix, if another stage has one too."""
        if self.first != self.last:
            return self.transformer.wte.weight if self.first else self.lm_head.weight

    def stored_as(self, name):
        return "transformer.wte.weight" if name == "lm_head.weight" else name

    def convert(self, name, w, tp):
        """Matrices of a checkpoint are [in, out]. A rank of tp has q, k and v of its heads, one after the other."""
        if ".c_" in name:
            w = w.t()
        return w.unflatten(0, (3, tp, -1)).transpose(0, 1).flatten(0, 2) if ".c_attn" in name else w
