"""Writes the archives of this directory with torch.export, and what PyTorch computes with each.

    python3 -m venv venv && venv/bin/pip install -r <(sed -n 's/^# pin: //p' ../fixtures/make.py)
    venv/bin/python make.py [NAME ...]        # no NAME: every entry of TABLE

NAME.pt2 is the exported model; NAME.safetensors has its batch (input_ids, labels, attention_mask if it takes one), loss, logits and the
gradient of every parameter, as f32; of a model of FLOATS its columns x and y, loss, output and gradients; of LABELLED its arguments by their names. NAME.json is the
configuration, if it is of a family. What an importer does not read, above all stack
traces, is taken out of the archives, so that they are small; what is in WHOLE keeps it.
"""

import json
import struct
import sys
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
ROWS, SEQ = 8, 16
VALID = [3, 9, 14, 0, 6, 16, 1, 11]  # labels that are not -100, per row
BASE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=32, max_position_embeddings=64, initializer_range=0.15, bos_token_id=1, eos_token_id=2,
            pad_token_id=None, use_cache=False, attention_dropout=0.0)
TANH = "gelu_pytorch_tanh"


def gpt(**more):
    return dict(n_embd=16, n_head=4, n_layer=2, n_positions=64, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, **more)


# name -> (model_type, configuration on top of BASE)
TABLE = {
    "llama": ("llama", {}),
    "llama_mqa": ("llama", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=8)),
    "mistral": ("mistral", dict(sliding_window=5)),
    "gpt2": ("gpt2", gpt(activation_function="gelu_new")),
    "gpt2_whole": ("gpt2", {**gpt(activation_function="gelu_new"), "n_layer": 1, "num_hidden_layers": 1}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", dict(num_attention_heads=2, partial_rotary_factor=0.5, original_max_position_embeddings=64, resid_pdrop=0.0,
                          embd_pdrop=0.0, sliding_window=None)),
    "granite": ("granite", dict(embedding_multiplier=2.0, logits_scaling=1.5, residual_multiplier=0.7,
                                attention_multiplier=0.4)),
    "gemma2": ("gemma2", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=12, attn_logit_softcapping=1.5,
                              final_logit_softcapping=2.0, attn_implementation="eager")),
    "gemma3": ("gemma3_text", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=12,
                                   layer_types=["sliding_attention", "full_attention"])),
    "gpt_neox": ("gpt_neox", dict(num_attention_heads=2, rotary_pct=0.5, hidden_dropout=0.0, use_parallel_residual=True)),
    "starcoder2": ("starcoder2", dict(hidden_act=TANH, sliding_window=None, residual_dropout=0.0,
                                      embedding_dropout=0.0)),
    "stablelm": ("stablelm", dict(num_attention_heads=2, partial_rotary_factor=0.5, hidden_dropout=0.0)),
    "opt": ("opt", dict(ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, layerdrop=0.0, num_attention_heads=4)),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", dict(head_dim=8)),
    "phi": ("phi", dict(num_attention_heads=2, partial_rotary_factor=0.5, hidden_act="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0)),
}

TABLE |= {
    # Every query sees every key; labels are not moved.
    "bert": ("bert", dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, type_vocab_size=2)),
    # ALiBi.
    "bloom": ("bloom", dict(n_head=4, n_layer=2, hidden_dropout=0.0)),
    "falcon": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=24, hidden_dropout=0.0)),
    "modernbert": ("modernbert", dict(local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1, sep_token_id=2)),
    "mpt": ("mpt", dict(d_model=16, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64)),
}

# With an attention_mask: rows that end early, and one that begins late: of causal models only its tokens would see
# padding.
PADDED = {"llama_padded": "llama", "bert_padded": "bert", "gemma2_padded": "gemma2"}
TABLE |= {name: TABLE[of] for name, of in PADDED.items()}
LENGTHS = [5, 9, 16, 4, 8, 16, 2, 12]


def padding():
    mask = (torch.arange(SEQ) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    mask[2, :3] = 0
    return mask


# Sizes are numbers, and not symbols.
FIXED = ["qwen2", "gpt2", "gpt2_whole", "phi3"]
# Whose programs are compared with those of their families.
FAMILIES = ["llama", "qwen3"]
# As torch.export.save writes them, but for the folder of this Python, whose name has other letters.
WHOLE = ["gpt2_whole"]


def model_of(name):
    kind, own = TABLE[name]
    torch.manual_seed(sum(map(ord, name)))
    how = {k: own[k] for k in ["attn_implementation"] if k in own}
    config = AutoConfig.for_model(kind, **{**BASE, **{k: v for k, v in own.items() if k not in how}})
    of = AutoModelForMaskedLM if "bert" in kind else AutoModelForCausalLM
    model = of.from_config(config, **how).train()
    # Norms and biases begin as ones and zeros, which would hide what is done with them.
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def batch(vocab):
    torch.manual_seed(7)
    ids = torch.randint(3, vocab, (ROWS, SEQ))
    labels = ids.clone()
    for row, n in enumerate(VALID):
        labels[row, n:] = -100
    return ids, labels


def slim(path):
    """Writes an archive again, stored, without what an importer does not read."""
    with zipfile.ZipFile(path) as z:
        members = [(n, z.read(n)) for n in z.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for name, data in members:
            if name.endswith("sample_inputs/model.pt"):
                continue
            if name.endswith("models/model.json"):
                data = json.loads(data)
                strip(data)
                data = json.dumps(data, separators=(",", ":")).encode()
            z.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)


def elsewhere(path):
    """Writes other letters in place of this Python's folder, in stored members, and their checksums."""
    own = sys.prefix.encode()
    data = path.read_bytes()
    with zipfile.ZipFile(path) as z:
        for info in z.infolist():
            member = z.read(info)
            new = member.replace(own, b"/" + b"x" * (len(own) - 1))
            sums = [struct.pack("<I", s) for s in (info.CRC, zlib.crc32(new))]
            data = data.replace(member, new).replace(*sums) if new != member else data
    path.write_bytes(data)


def strip(program):
    """Takes out of a program, and of the graphs within it, what an importer does not read."""
    program["graph_module"]["module_call_graph"] = []
    graphs = [program["graph_module"]["graph"]]
    while graphs:
        graph = graphs.pop()
        inputs = {a["as_tensor"]["name"] for a in graph["inputs"] if "as_tensor" in a}
        # Of inputs the shapes are read, of others whether they are truth values (dtype 12).
        graph["tensor_values"] = {k: v for k, v in graph["tensor_values"].items() if k in inputs or v["dtype"] == 12}
        graph["nodes"] = [n for n in graph["nodes"] if "_assert_tensor_metadata" not in n["target"]]
        for node in graph["nodes"]:
            # Of key,path,class;key,path,class the last path.
            path = node["metadata"].get("nn_module_stack", ",,").split(";")[-1].split(",")[1]
            node["metadata"] = {"nn_module_stack": f",{path},"}
            del node["is_hop_single_tensor_return"]
            graphs += [a["arg"]["as_graph"]["graph"] for a in node["inputs"] if "as_graph" in a["arg"]]


class ToyModel(nn.Module):
    """That of PyTorch's tutorials on data, tensor and pipeline parallelism."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class Digits(nn.Module):
    """Classes of rows of floats and of a kind, scored by a cross-entropy without tokens."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(6, 12)
        self.fc1 = nn.Linear(12, 16)
        self.fc2 = nn.Linear(16, 6)

    def forward(self, x, kind):
        return self.fc2(nn.functional.silu(self.fc1(x + self.kinds(kind))))


class Picture(nn.Module):
    """Windows that touch, that overlap, and of groups of channels; attention over what is no token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        # A bias of keys has no gradient: it is the same for all of them.
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.wide = nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8)
        self.groups = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 2, groups=2, padding="same"), dim=2)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        y = self.patches(x)
        t = y.flatten(2).transpose(1, 2)
        q, k, v = (f(t).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        t = t + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.wide(t.transpose(1, 2).unflatten(-1, (4, 4))).flatten(2)
        return self.head(nn.functional.gelu(self.groups(y)).mean(2))


class Chosen(nn.Module):
    """The two best of four experts, of the better of two groups, and what they do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.up = nn.Parameter(torch.randn(4, 10, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 6, 10) * 0.3)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        best = scores.view(-1, 2, 2).topk(2)[0].sum(-1).topk(1)[1]
        mask = torch.zeros_like(scores[:, :2]).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 4)
        at = scores.masked_fill(~mask.bool(), -1e30).topk(2)[1]
        by = scores.gather(1, at)
        by = by / by.sum(-1, keepdim=True)
        flat = at.reshape(-1)
        y = torch.bmm(self.up[flat], x.repeat_interleave(2, 0).unsqueeze(-1)).clamp(-0.5, 0.9)
        y = torch.bmm(self.down[flat], y).squeeze(-1)
        return (y * by.reshape(-1, 1)).view(-1, 2, 6).sum(1)


class Truths(nn.Module):
    """Sums of truth values, factors of what something is taken from, and numbers that depend on no data."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(12, 6)
        self.register_buffer("column", torch.linspace(0.5, 1.5, 6).unsqueeze(-1))

    def forward(self, x):
        y = self.lin(x)
        few, many = (y - 0.1).relu().bool(), (0.4 - y).relu().bool()
        some, both = (few + many).float(), (~(few * many)).float()
        steps = torch.arange(6).clamp(min=1.5) * torch.full_like(torch.arange(6), 1.7)
        steps = torch.rsub(steps, torch.ones(6), alpha=2) + (torch.arange(6) % 2 == 0).add(torch.ones(6).bool())
        return torch.rsub(y, some, alpha=2) * self.column.squeeze() + both * steps


class Functions(nn.Module):
    """Functions of an element, comparisons, and what they choose."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(12, 6)

    def forward(self, x):
        y = self.lin(x)
        z = nn.functional.softplus(y, beta=1.5)
        steps = (4 * y).floor() + (3 * y).ceil() * 0.5 + (2 * y).round() * 0.25
        first, last = x[:, :6], x[:, 6:]
        w = torch.where(y > 0.1, z.pow(1.7), y * y)
        w = torch.where(first <= last, w, 0.3) + torch.where(z.lt(0.5) + (y >= 0.4), y, steps * y)
        same = (steps == steps.round()).float()
        # As numbers, and of numbers of which many are equal.
        order = (steps <= 1).float() + 2 * (steps >= 1).float() + 4 * (steps.floor() == steps).float()
        return w * same + (z != 0.7).float() + 0.1 * order * y


class Stopped(nn.Module):
    """Gradients that stop: at values, at the edge of regions, at a parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(4))
        self.e = nn.Linear(12, 6)
        self.d.weight.requires_grad_(False)

    def forward(self, x):
        x = self.a(x)
        x = x * x.detach()
        y = self.b(x)
        # As if it were not rounded.
        y = y + (y.round() - y).detach()
        with torch.no_grad():
            z = nn.functional.silu(self.c(y))
            with torch.enable_grad():
                w = self.d(z * y)
            v = w * z
        s = self.a(y).tanh()
        t = s * 2
        t.detach_()
        return self.e(x + y * z + w + v + s * t)


class Joined(nn.Module):
    """What is joined lies in several orders; a factor is a column of whole numbers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 16)
        self.b = nn.Linear(64, 6)

    def forward(self, x, kind):
        x = self.a(x).view(-1, 4, 4)
        turned = torch.cat([x, x.transpose(1, 2)], -1)
        stacked = torch.stack([x[:, i] for i in (2, 0, 1)], 1)
        moved = torch.cat([x[:, :1], x[:, :-1]], 1)
        all = torch.cat([turned.flatten(1), stacked.flatten(1), moved.flatten(1)], -1)
        return self.b(torch.cat([all, x[:, 3]], -1) * kind[:, None])


class Normed(nn.Module):
    """Batch norm, whose statistics are state of their own: no importer reads it."""

    def __init__(self):
        super().__init__()
        self.lin, self.bn = nn.Linear(12, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.bn(self.lin(x))


class Control(nn.Module):
    """A branch that data choose: no importer reads it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(12, 6)

    def forward(self, x):
        y = self.lin(x)
        return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))


class Scored(nn.Module):
    """A model of rows with its loss."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs):
        target = inputs.pop("labels", inputs.pop("y", None))
        out = self.model(**inputs)
        return self.loss(out, target), out


# name -> model, its loss, its inputs beside x
FLOATS = {
    "toy": (ToyModel, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 10), y=torch.randn(ROWS, 5))),
    "mlp": (Mlp, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 16), y=torch.randn(ROWS, 8))),
    "picture": (Picture, nn.functional.cross_entropy, lambda: dict(
        x=torch.randn(ROWS, 3, 8, 8), labels=torch.tensor([0, 5, -100, 2, 3, 3, -100, 1]))),
    "chosen": (Chosen, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "truths": (Truths, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "functions": (Functions, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "stopped": (Stopped, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "joined": (Joined, nn.functional.mse_loss, lambda: dict(
        x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6), kind=torch.arange(ROWS) - 3)),
    "control": (Control, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "normed": (Normed, nn.functional.mse_loss, lambda: dict(x=torch.randn(ROWS, 12), y=torch.randn(ROWS, 6))),
    "digits": (Digits, nn.functional.cross_entropy, lambda: dict(
        x=torch.randn(ROWS, 12), kind=torch.randint(6, (ROWS,)), labels=torch.tensor([0, 5, -100, 2, 3, 3, -100, 1]))),
}


class Nano(nn.Module):
    """A decoder, or an encoder, whose labels are scored as they lie, or moved by one inside."""

    def __init__(self, causal=True, moves=False, classes=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(24, 8), nn.Embedding(SEQ, 8)
        self.qkv, self.proj, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, classes)
        self.causal, self.moves = causal, moves

    def logits(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.head(x + self.proj(y.transpose(1, 2).flatten(2)))

    def scored(self, logits, targets):
        of, to = (logits[:, :-1], targets[:, 1:]) if self.moves else (logits, targets)
        return nn.functional.cross_entropy(of.reshape(-1, of.shape[-1]), to.reshape(-1)), logits

    def forward(self, idx, targets):
        return self.scored(self.logits(idx), targets)


class Classes(Nano):
    """Classes of tokens, more of them than there are tokens: kinds of tokens come first."""

    def forward(self, token_type_ids, input_ids, labels):
        return self.scored(self.logits(input_ids) + self.head(self.wte(token_type_ids)), labels)


class Mixed(Nano):
    """Behind causal attention an attention written out that sees all tokens, or a mean of them."""

    def __init__(self, mean=False):
        super().__init__()
        self.mean = mean

    def logits(self, ids):
        x = super().logits(ids)
        if self.mean:
            return x + x.mean(1, keepdim=True)
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


class Speech(Nano):
    """Frames of another length beside tokens of a decoder."""

    def __init__(self):
        super().__init__()
        self.frames = nn.Linear(6, 24)

    def forward(self, frames, decoder_input_ids, labels):
        return self.scored(self.logits(decoder_input_ids) + self.frames(frames).mean(1, keepdim=True), labels)


class Nodes(nn.Module):
    """Classes of the nodes of graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x, adjacency, labels):
        logits = self.b(adjacency @ (adjacency @ self.a(x)).relu())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def whole(below, *ignored):
    x = torch.randint(below, (ROWS, SEQ))
    x[:, list(ignored)] = -100
    return x


# Models that return their loss and logits -> model, its inputs in the order of its arguments
LABELLED = {
    "nano": (Nano, lambda: dict(idx=whole(24), targets=whole(24, 3))),
    "nano_moves": (lambda: Nano(moves=True), lambda: dict(idx=whole(24), targets=whole(24, 3))),
    "classes": (lambda: Classes(causal=False, classes=40), lambda: dict(
        token_type_ids=whole(2), input_ids=whole(24), labels=whole(40, 0, 9))),
    "few_classes": (lambda: Nano(causal=False, classes=5), lambda: dict(idx=whole(24), targets=whole(5, 0))),
    "mixed": (Mixed, lambda: dict(idx=whole(24), targets=whole(24, 3))),
    "mean": (lambda: Mixed(mean=True), lambda: dict(idx=whole(24), targets=whole(24, 3))),
    "speech": (Speech, lambda: dict(frames=torch.randn(ROWS, 5, 6), decoder_input_ids=whole(24), labels=whole(24, 2))),
    "nodes": (Nodes, lambda: dict(x=torch.randn(ROWS, SEQ, 6), adjacency=torch.rand(ROWS, SEQ, SEQ), labels=whole(5, 1))),
}


class Losses(nn.Module):
    """A bag of tokens with a loss of its own; what classes weigh is a buffer."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False), loss
        self.register_buffer("weights", torch.linspace(0.2, 2.0, 24))

    def forward(self, idx, targets):
        logits = self.head(self.embed(idx))
        return self.loss(self, logits, targets), logits


def entropy(**how):
    return lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), **how)


# What is made of logits and labels: exact over microbatches, and of one microbatch only.
LOSSES = {
    "ignore_last": entropy(ignore_index=-1),
    "smooth": entropy(label_smoothing=0.2),
    "none": lambda m, x, y: entropy(reduction="none")(m, x, y).mean(),
    "quarter": lambda m, x, y: entropy()(m, x, y) / 4,
    "with_more": lambda m, x, y: 2 * entropy(ignore_index=-1)(m, x, y) + 0.1 * x.pow(2).mean(),
    "twice": lambda m, x, y: entropy()(m, x, y) - 0.5 * entropy(label_smoothing=0.1)(m, x, y),
    "ignore_first": entropy(ignore_index=0),
    "weights": lambda m, x, y: entropy(weight=m.weights)(m, x, y),
    "weights_smooth": lambda m, x, y: entropy(weight=m.weights, label_smoothing=0.2, ignore_index=3)(m, x, y),
    "sum": entropy(reduction="sum"),
    "exp": lambda m, x, y: entropy()(m, x, y).exp(),
    "none_sum": lambda m, x, y: entropy(reduction="none")(m, x, y).sum(),
    "squares": lambda m, x, y: entropy()(m, x, y) + 0.01 * x.pow(2).sum(),
    "by_rows": lambda m, x, y: entropy()(m, x, y) * x.shape[0],
    "squares_by_rows": lambda m, x, y: entropy()(m, x, y) + x.pow(2).mean() * x.shape[0],
    "over_rows": lambda m, x, y: entropy()(m, x, y) + 0.01 * x.pow(2).sum() / x.shape[0],
    "more": lambda m, x, y: 1.5 - 0.5 * (entropy()(m, x, y) + 1),
}
# What is not scored, in the place of -100.
IGNORED = {"ignore_last": -1, "with_more": -1, "ignore_first": 0, "weights_smooth": 3}
FOR_FLOATS = {
    "bce": lambda m, x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "bce_logits": lambda m, x, y: F.binary_cross_entropy_with_logits(x, y),
    "bce_weights": lambda m, x, y: F.binary_cross_entropy_with_logits(x, y, weight=m.weights, pos_weight=m.weights + 1),
    "kl": lambda m, x, y: F.kl_div(x - 3, y * (y > 0.5)),
    "kl_log": lambda m, x, y: F.kl_div(x, y - 1, log_target=True),
    "l1": lambda m, x, y: F.l1_loss(x, y),
    "smooth_l1": lambda m, x, y: F.smooth_l1_loss(x, y, beta=0.7),
    "huber": lambda m, x, y: F.huber_loss(x, y, delta=0.6),
    "mse": lambda m, x, y: F.mse_loss(x, y),
    "mse_sum": lambda m, x, y: F.mse_loss(x, y, reduction="sum"),
    "soft": lambda m, x, y: F.cross_entropy(x.transpose(1, 2), y.transpose(1, 2)),
    "soft_weights": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1), weight=m.weights, label_smoothing=0.2),
    "log_softmax": lambda m, x, y: -(y * x.log_softmax(-1)).sum(-1).mean(),
    "soft_tokens": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1)),
    "soft_sum": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1), reduction="sum"),
}


def make_losses():
    """losses/NAME.pt2 of each, for any rows, and losses.safetensors: one batch, the parameters, each loss and its gradients."""
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    rows = 24
    labels = torch.randint(24, (rows, 4))
    labels[torch.rand(rows, 4) < 0.3] = -100
    labels[3] = -100
    batch = dict(idx=torch.randint(24, (rows, 4)), targets=labels, y=torch.rand(rows, 4, 24))
    embed, head = 0.5 * torch.randn(24, 8), 0.5 * torch.randn(24, 8)
    stored = dict(batch)
    for name, loss in {**LOSSES, **FOR_FLOATS}.items():
        model = Losses(loss)
        model.embed.weight.data, model.head.weight.data = embed.clone(), head.clone()
        y = batch["y"] if name in FOR_FLOATS else labels
        if name in IGNORED:
            y = torch.where(labels == -100, IGNORED[name], labels)
        value, _ = model(batch["idx"], y)
        value.backward()
        stored |= {f"{name}.loss": value.detach().reshape(1), f"{name}.embed.weight": model.embed.weight.grad,
                   f"{name}.head.weight": model.head.weight.grad}
        dim = {0: torch.export.Dim("batch")}
        if name == "soft_tokens":  # what is wanted is of tokens, which the program says by a symbol
            dim |= {1: torch.export.Dim("seq")}
        program = torch.export.export(model, (batch["idx"], y), strict=False, dynamic_shapes=(dim, dim))
        path = HERE / "losses" / f"{name}.pt2"
        path.parent.mkdir(exist_ok=True)
        torch.export.save(program, path)
        slim(path)
        print(f"losses/{name}: {value.item():.6f}, {path.stat().st_size} bytes", flush=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, HERE / "losses.safetensors")



def make_labelled(name):
    torch.manual_seed(sum(map(ord, name)))
    of, inputs = LABELLED[name]
    model, inputs = of(), inputs()
    loss, logits = model(**inputs)
    loss.backward()
    stored = {**inputs, "loss": loss.detach().reshape(1), "logits": logits.detach()}
    stored |= {"grad." + n: p.grad for n, p in model.named_parameters()}
    save_file({k: v.contiguous() for k, v in stored.items()}, HERE / f"{name}.safetensors")
    torch.export.save(torch.export.export(model, (), inputs, strict=False), HERE / f"{name}.pt2")
    slim(HERE / f"{name}.pt2")
    print(f"{name}: loss {loss.item():.6f}", flush=True)


def make_floats(name):
    torch.manual_seed(sum(map(ord, name)))
    of, loss, inputs = FLOATS[name]
    model, inputs = Scored(of(), loss), inputs()
    value, out = model(**inputs)
    value.backward()
    stored = {**inputs, "loss": value.detach().reshape(1), "output": out.detach()}
    stored |= {"grad." + n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    save_file({k: v.contiguous() for k, v in stored.items()}, HERE / f"{name}.safetensors")
    rows = {0: torch.export.Dim("batch")}
    shapes = None if name == "mlp" else dict(inputs={k: rows for k in inputs})
    program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=shapes)
    torch.export.save(program, HERE / f"{name}.pt2")
    slim(HERE / f"{name}.pt2")
    print(f"{name}: loss {value.item():.6f}", flush=True)


def make(name):
    if name in FLOATS:
        return make_floats(name)
    if name in LABELLED:
        return make_labelled(name)
    model = model_of(name)
    ids, labels = batch(model.config.vocab_size)
    inputs = dict(input_ids=ids, labels=labels)
    if name in PADDED:
        # The first token is predicted from padding, of which models make different things.
        labels[2, :4] = -100
        inputs["attention_mask"] = padding()
    out = model(**inputs)
    out.loss.backward()
    stored = {**inputs, "loss": out.loss.detach().reshape(1), "logits": out.logits.detach()}
    seen = set()
    for n, p in model.named_parameters():
        if p.grad is not None and p.data_ptr() not in seen:
            seen.add(p.data_ptr())
            stored["grad." + n] = p.grad
    save_file({k: v.contiguous() for k, v in stored.items()}, HERE / f"{name}.safetensors")
    if name in FAMILIES:
        (HERE / f"{name}.json").write_text(model.config.to_json_string())
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=63)}
    shapes = None if name in FIXED else {k: dims for k in inputs}
    program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=shapes)
    path = HERE / f"{name}.pt2"
    torch.export.save(program, path)
    (elsewhere if name in WHOLE else slim)(path)
    sizes = [(HERE / f"{name}.{e}").stat().st_size for e in ["pt2", "safetensors"]]
    print(f"{name}: loss {out.loss.item():.6f}, {len(seen)} gradients, {sizes} bytes", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name in sys.argv[1:] or [*TABLE, *FLOATS, *LABELLED, "losses"]:
        try:
            make_losses() if name == "losses" else make(name)
        except Exception as e:  # the others are made
            print(f"{name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
