"""What transformers does on two gloo ranks if one rule of a model's plan has another word.

    words.py run FOLDER [FIRST STEP]    each word for each module and parameter of the models of MODELS, or each STEP-th
    words.py write FOLDER               words.json, from what runs have found, and names.json

A run writes a line of JSON for each plan: its rule, its word, and what the two ranks do beside one rank: `e`, they end with
an error or do not end; `l`, other logits; `g`, other gradients; `s`, the same. Behind `g` stand the parameters, and behind
`e` the error. Names are those of the model's own modules and parameters, with `*` for the number of a layer. A second
run goes on where the first one ended. words.json has of each name the letters in the order of WORDS, `.` for the plan's own
word and `-` for one that was not run; names.json has the names of all modules, by fixture.
"""

import datetime
import json
import os
import pathlib
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

sys.path.insert(0, os.path.dirname(__file__))
from plans import forked, generic, one_mesh, passes

WORDS = ["colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "embedding_colwise",
         "packed_colwise", "packed_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "local_params",
         "replicate", "grouped_gemm", "ep_dispatch_experts"]
#: Folders of tests/fixtures, and keys that are others here: sizes that kernels take, and no layers that transformers does not read.
MODELS = {
    "llama_gqa": {}, "llama_bias_tied": {}, "qwen3_moe": {}, "mixtral": {}, "gpt_oss": {}, "qwen2_moe": {},
    "deepseek_v3": {"num_nextn_predict_layers": 0},
    "qwen3_next": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hidden_size": 32, "intermediate_size": 48,
                   "linear_value_head_dim": 8, "linear_key_head_dim": 8, "vocab_size": 64},
}
HERE = pathlib.Path(__file__).parent
FIXTURES = HERE.parent / "fixtures"
HOW = dict(dtype=torch.float32, attn_implementation="eager")
WAIT = 15  # seconds that a rank waits for the other


def ids(model):
    few = min(model.config.vocab_size, 30)
    return torch.randint(2, few, (2, 12), generator=torch.Generator().manual_seed(1))


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def verdict(folder, plan, want):
    """What this rank sees: a letter, and what it is of."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan), **HOW)
    loss, logits = passes(model, ids(model), 1)
    grads = {n: torch.zeros_like(p) if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
    if not torch.allclose(full(logits), want["logits"], rtol=1e-4, atol=1e-4):
        return "l", f"{(full(logits) - want['logits']).abs().max():.3g}"
    least = 1e-4 * sum(g.norm() ** 2 for g in want["grads"].values()) ** 0.5
    off = [n for n, g in want["grads"].items() if grads[n].shape != g.shape or not (full(grads[n]) - g).norm() < 1e-3 * max(g.norm(), least)]
    return ("g", sorted({generic(n) for n in off})) if off else ("s", "")


def rank(r, folder, out, port, cases, want):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT))
    side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2 * WAIT))
    one_mesh()
    sys.stderr = open(os.devnull, "w")
    for name, word in cases:
        begin = time.time()
        try:
            found = verdict(folder, {name: word} if name else None, want)
        except Exception as e:
            found = ("e", f"{type(e).__name__}: {e}".replace("\n", " ")[:160])
        late = time.time() - begin > WAIT - 1
        both = [None, None]
        dist.all_gather_object(both, (*found, late), group=side)
        worst = min(both, key=lambda f: "elgs".index(f[0]))
        if r == 0:
            with out.open("a") as f:
                print(json.dumps([name, word, worst[0], worst[1]]), file=f)
        # A rank that went on alone leaves what the other one would take for its own.
        if any(f[2] for f in both) or (both[0][0] == "e") != (both[1][0] == "e"):
            os._exit(0)
    dist.destroy_process_group()


def made(family, folder):
    """A random model of a fixture's config, in a folder."""
    to = folder / family
    if not (to / "config.json").exists():
        config = AutoConfig.from_pretrained(FIXTURES / family)
        for key, value in MODELS[family].items():
            setattr(config, key, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn(p.shape))
        model.save_pretrained(to)
    return to


def run(family, to, first=0, step=1):
    folder, out = made(family, to), to / f"{family}.jsonl"
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, **HOW)
    loss, logits = passes(model, ids(model), 1)
    want = {"logits": logits.detach(), "grads": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}
    names = dict.fromkeys(generic(n) for n, _ in [*model.named_modules(), *model.named_parameters()] if n)
    plan = {k: v for k, v in model.tp_plan.items() if k in names}
    if not out.exists():
        out.write_text(json.dumps({"plan": plan}) + "\n")
    cases = [("", "")] + [(n, w) for n in names for w in WORDS if plan.get(n) != w][first::step]
    while True:
        done = {tuple(json.loads(line)[:2]) for line in out.read_text().splitlines()[1:]}
        left = [c for c in cases if c not in done]
        if not left:
            return
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        before = len(done)
        forked(rank, (0, folder, out, port, left, want), (1, folder, out, port, left, want))
        if len(out.read_text().splitlines()) - 1 == before:
            with out.open("a") as f:
                print(json.dumps([*left[0], "e", "the ranks do not end"]), file=f)


def write(folder):
    """What runs have found, as a test reads it."""
    found = {}
    for family, changes in MODELS.items():
        first, *rows = map(json.loads, (folder / f"{family}.jsonl").read_text().splitlines())
        of = {}
        for name, word, letter, _ in rows:
            of.setdefault(name, dict.fromkeys(WORDS, "-") | {w: "." for w in WORDS if first["plan"].get(name) == w})
            of[name] |= {word: letter} if name else {}
        del of[""]
        names = {name: "".join(letters.values()) for name, letters in sorted(of.items())}
        found[family] = {"config": changes, "plan": first["plan"], "names": names}
    lines = json.dumps({"words": WORDS, "models": found}, indent=0)
    (HERE / "words.json").write_text(lines + "\n")
    names = {}
    for config in sorted(FIXTURES.glob("*/config.json")):
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.parent))
            except ValueError:  # a config of something else
                continue
        names[config.parent.name] = sorted({generic(n) for n, _ in model.named_modules() if n})
    (HERE / "names.json").write_text(json.dumps(names, indent=0) + "\n")


if __name__ == "__main__":
    what, folder, part = sys.argv[1], pathlib.Path(sys.argv[2]), [int(n) for n in sys.argv[3:5]]
    folder.mkdir(parents=True, exist_ok=True)
    if what == "write":
        write(folder)
    else:
        for family in MODELS:
            forked(run, (family, folder, *part))
