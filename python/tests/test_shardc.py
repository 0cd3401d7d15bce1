"""Tests of the package against the command: `python -m unittest` with SHARDC_BINARY, or the wheel, installed.

What needs torch is skipped where it is not installed, unless SHARDC_HAS names it.
"""

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import shardc

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests/fixtures/llama_gqa"
HAS = os.environ.get("SHARDC_HAS", "").split()
try:
    import torch
except ImportError:
    if "torch" in HAS:
        raise
    torch = None
SIZE = dict(seq=16, global_batch=8)


class Questions(unittest.TestCase):
    def test_answers_are_those_of_the_schemas(self):
        folder = ROOT / "python"
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            import answers

            self.assertEqual((folder / "shardc/_answers.py").read_text(), answers.text(), "python3 python/answers.py")

    def test_each_command_answers(self):
        one, two = (shardc.compile(LLAMA, mesh=mesh, **SIZE) for mesh in ("tp=2", "dp=2"))
        wrong = shardc.check(LLAMA, mesh="tp=3")
        self.assertEqual((wrong.ok, wrong.violations[0].code), (False, "heads-not-divisible"))
        self.assertIn("--mesh tp=2", wrong.violations[0].nearest)
        self.assertTrue(shardc.check(LLAMA, mesh={"tp": 2}).ok)
        checks = {c.name: c.ok for c in shardc.verify(one, numbers=True).checks}
        self.assertTrue(all(checks.values()) and "loss" in checks, checks)
        self.assertEqual(shardc.prove(one.path).verdict, "proved")
        self.assertEqual({o.option for o in shardc.diff(one, two).options}, {"mesh", "microbatch"})
        self.assertTrue(shardc.diff(one, one).same)
        price = shardc.price(one, machine="h100-sxm")
        self.assertGreater(price.step_s, 0)
        self.assertEqual(price.options.training.zero, 0)
        config = json.loads((LLAMA / "config.json").read_text())
        found = shardc.plan(config, gpus=2, machine="h100-sxm", budget=2, **SIZE)
        self.assertLessEqual(found.compiled, 2)
        self.assertEqual(found.plans[0].step_s, min(p.step_s for p in found.plans))
        self.assertIn("placements", shardc.export(one, "dtensor"))
        with self.assertRaises(shardc.ShardcError) as raised:
            shardc.plan(LLAMA, gpus=0, machine="h100-sxm")
        self.assertEqual(raised.exception.exit_status, 2)

    def test_an_audit_answers(self):
        styles = {f"model.layers.*.self_attn.{m}_proj": "colwise" for m in "qkv"} | {"model.layers.*.self_attn.o_proj": "rowwise"}
        plan = {"tp_size": 2, "tp_plan": styles}
        whole = shardc.audit("transformers", plan, model=LLAMA)
        self.assertEqual(whole.findings, [])
        [query] = [p for p in whole.parameters if "q_proj" in p.name]
        self.assertEqual((query.split, query.local[0] * 2), ("tp", query.sizes[0]))
        sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
        model = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 128"
        latent = "--multi-latent-attention --micro-batch-size 1 --tensor-model-parallel-size 2 --untie-embeddings-and-output-weights"
        found = shardc.audit("megatron", arguments=f"{sizes} {model} {latent}".split(), gpus=2).findings
        self.assertEqual([(f.kind, f.axes) for f in found], [("sum-missing", "tp")])
        with self.assertRaises(shardc.ShardcError) as raised:
            shardc.audit("transformers", {"tp_size": 2, "tp_plan": {"lm_head": "columns"}}, model=LLAMA)
        self.assertIn("unsupported `tp_plan` style: columns", str(raised.exception))
        with self.assertRaises(shardc.ShardcError) as raised:
            shardc.audit("transformers", {**plan, "tp_plan": {**styles, "model.layers.*.self_attn.k_proj": "replicate"}}, model=LLAMA)
        self.assertIn("all 2 of model.layers.*.self_attn.k_proj", str(raised.exception))

    def test_a_notebook_shows_the_report(self):
        plan = shardc.compile(LLAMA, mesh="tp=2", **SIZE)
        self.assertIn("&lt;!doctype html", plan._repr_html_().lower())
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.html"
            shardc.report(plan, page)
            self.assertIn("<!doctype html", page.read_text().lower())


class Paths(unittest.TestCase):
    def test_a_folder(self):
        plan = shardc.compile(LLAMA, mesh={"dp": 2, "tp": 2}, sp=True, freeze=["*norm*"], fuse=None, **SIZE)
        self.assertTrue((plan.path / "plan.json").is_file())
        self.assertEqual(plan.report["ranks"], 4)
        memory = plan.memory
        self.assertEqual(sum(n for kind, n in memory.items() if kind != "peak"), memory["peak"])
        self.assertEqual(memory["peak"], plan.report["per_class"][0]["peak_bytes"])
        self.assertEqual(plan.summary["ranks"], 4)
        options = (plan.path / "options.toml").read_text()
        self.assertIn("norm", options)

    def test_an_explanation(self):
        plan = shardc.compile(LLAMA, mesh="tp=2", **SIZE)
        said = plan.explain("collective:1")
        self.assertIn("over tp", said.subject)
        self.assertTrue(all(isinstance(line, str) for part in said.parts.values() for line in part), said)
        words = [shardc.find_binary(), "explain", str(plan.path), "collective:1"]
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        self.assertEqual([l.rstrip() for l in str(said).splitlines()], shown.splitlines())
        self.assertIn("# mesh", str(plan.explain("rule:mesh")))

    def test_parameters_lie_as_tensor_parallelism_wants(self):
        plan = shardc.compile(LLAMA, mesh="dp=2,tp=2", **SIZE)
        found = {p.name: p for p in plan.parameters}
        q = next(p for name, p in found.items() if name.endswith("q_proj.weight"))
        o = next(p for name, p in found.items() if name.endswith("o_proj.weight"))
        norm = next(p for name, p in found.items() if "norm" in name)
        self.assertEqual(q.mesh, (("dp_replicate", 2), ("tp", 2)))
        self.assertEqual(q.ranks, (0, 1, 2, 3))
        self.assertEqual([q.placements[0], norm.placements[1]], ["Replicate()"] * 2)
        self.assertEqual({q.placements[1], o.placements[1]}, {"Shard(0)", "Shard(1)"})

    def test_stages_have_parameters_of_their_own(self):
        plan = shardc.compile(LLAMA, mesh="pp=2", microbatch=1, **SIZE)
        self.assertEqual({p.ranks for p in plan.parameters}, {(0,), (1,)})

    def test_a_configuration_and_where_the_plan_lies(self):
        config = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=4, vocab_size=64, max_position_embeddings=64)
        with tempfile.TemporaryDirectory() as folder:
            plan = shardc.compile(config, mesh="tp=4", output=Path(folder) / "x.plan", **SIZE)
            self.assertEqual(plan.path.name, "x.plan")
            again = shardc.Plan(plan.path)
            self.assertEqual((again.memory, again.report), (plan.memory, {}))
        kept = shardc.compile(config, **SIZE)
        path = kept.path
        self.assertTrue(path.is_dir())
        del kept
        self.assertFalse(path.exists(), "a temporary plan goes with its object")

    def test_a_run_yields_its_steps(self):
        plan = shardc.compile(LLAMA, mesh="dp=2", **SIZE)
        batch = str(LLAMA / "batch.safetensors")
        run = plan.run(batch=batch, weights=str(LLAMA), steps=3, kernels="interpreted")
        losses = [step["loss"] for step in run]
        expected = [step["loss"] for step in plan.run(batch=batch, weights=str(LLAMA), steps=2, kernels="interpreted")]
        self.assertEqual((len(losses), losses[:2]), (3, expected))
        self.assertLess(losses[2], losses[0])
        first = next(iter(plan.run(batch=batch, weights=str(LLAMA), steps=1000, kernels="interpreted")))
        self.assertEqual((first["step"], first["loss"]), (1, losses[0]))
        with self.assertRaises(shardc.ShardcError) as caught:
            list(plan.run(data="none.xyz"))
        self.assertEqual(caught.exception.code, "data")
        with self.assertRaises(TypeError):
            plan.run(format="human")

    @unittest.skipUnless(torch, "torch is not installed")
    def test_adapters_train_on_torch_as_in_peft(self):
        script = """
import sys, torch, shardc
from safetensors.torch import load_file
root, port = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=0, world_size=1)
base, adapter = root + "/llama_mha", root + "/lora/llama"
plan = shardc.compile(base, lora_from=adapter, seq=16, global_batch=8, eps="1e-5", clip=0.5, prove="no")
weights = {**load_file(base + "/model.safetensors"), **load_file(adapter + "/adapter_model.safetensors")}
step, batch = plan.torch(weights=weights), load_file(adapter + "/batch.safetensors")
for loss in load_file(adapter + "/expected.safetensors")["losses"]:
    off = abs(float(step(batch)["loss"]) / float(loss) - 1)
    assert off < 1e-5, (off, loss)
"""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [sys.executable, "-c", script, str(ROOT / "tests/fixtures"), port]
        done = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_errors_have_code_and_help(self):
        with self.assertRaises(shardc.ShardcError) as caught:
            shardc.compile(LLAMA, mesh="tp=3", **SIZE)
        e = caught.exception
        self.assertEqual((e.code, e.exit_status), ("heads-not-divisible", 2))
        self.assertIn("tp", e.rule)
        self.assertTrue(e.help)
        self.assertTrue(str(e).startswith("error[heads-not-divisible]: " + e.message))
        # Workers hand exceptions on by pickle.
        again = pickle.loads(pickle.dumps(e))
        self.assertEqual((str(again), again.code, again.help), (str(e), e.code, e.help))
        for bad, code in [(dict(mash="tp=2"), "usage"), (dict(optimizer="adam"), "usage"), (dict(betas="1"), "flag"), (dict(memory="1KiB"), "out-of-memory")]:
            with self.assertRaises(shardc.ShardcError) as caught:
                shardc.compile(LLAMA, **bad, **SIZE)
            self.assertEqual(caught.exception.code, code)
        with self.assertRaises(shardc.ShardcError):
            shardc.compile("no/such/model", **SIZE)

    def test_warnings_are_told(self):
        with self.assertWarnsRegex(shardc.ShardcWarning, "idle-axis") as seen:
            shardc.compile(LLAMA, mesh="zebra=2", **SIZE)
        # It is about the line that called.
        self.assertEqual(os.path.abspath(seen.filename), os.path.abspath(__file__))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardc.compile(LLAMA, mesh="tp=2", **SIZE)

    def test_a_command_of_another_version_is_named(self):
        with self.assertRaisesRegex(shardc.ShardcError, "of different versions: its answer has no `options`"):
            shardc._ask.read({}, shardc._answers.Price)

    def test_what_goes_with_a_module_alone(self):
        for bad in [dict(inputs={}), dict(dynamic_shapes={})]:
            with self.assertRaises(TypeError):
                shardc.compile(LLAMA, **bad, **SIZE)

    def test_what_is_no_compilation_is_refused(self):
        with self.assertRaises(ValueError):
            shardc.compile("", **SIZE)
        for name in ["help", "format"]:
            with self.assertRaisesRegex(TypeError, name):
                shardc.compile(LLAMA, **{name: True}, **SIZE)
        with self.assertRaisesRegex(TypeError, "int"):
            shardc.compile(7, mesh="tp=2")

    def test_placements_without_torch_are_an_error_of_the_house(self):
        plan = shardc.Plan("nowhere")
        with mock.patch.dict(sys.modules, {"torch": None, "torch.distributed.tensor": None}):
            with self.assertRaises(shardc.ShardcError) as raised:
                plan.placements()
        self.assertEqual(raised.exception.code, "missing-library")
        self.assertTrue(any("pip install torch" in line for line in raised.exception.help))

    def test_the_module_is_the_command(self):
        words = [sys.executable, "-m", "shardc", "--version"]
        out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        self.assertTrue(out.startswith("shardc 0."), out)


@unittest.skipIf(torch is None, "torch is not installed")
class Modules(unittest.TestCase):
    def test_a_module_without_a_loss_is_told_what_to_export(self):
        module = torch.nn.Linear(6, 4)
        with self.assertRaises(shardc.ShardcError) as caught:
            shardc.compile(module, inputs=(torch.randn(8, 6),))
        e = caught.exception
        self.assertEqual((e.code, e.message), ("no-loss", "the archive returns no loss to train"))
        self.assertTrue(any("returns its loss first" in line for line in e.help), e.help)
        self.assertTrue(any('mode="infer"' in line for line in e.help), e.help)
        shardc.compile(module, inputs=(torch.randn(8, 6),), mode="infer")

    def test_a_live_language_model(self):
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            self.skipTest("transformers is not installed")
        config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
        model = LlamaForCausalLM(config)
        plan = shardc.compile(model, mesh="tp=2", **SIZE)
        self.assertTrue(model.config.use_cache)
        self.assertEqual(plan.summary["ranks"], 2)
        placed = plan.placements()
        from torch.distributed.tensor import Replicate, Shard
        names = {name for name, _ in model.named_parameters()}
        self.assertEqual(set(placed), names)
        self.assertEqual(placed["model.layers.0.self_attn.q_proj.weight"], (Shard(0),))
        self.assertEqual(placed["model.layers.0.mlp.down_proj.weight"], (Shard(1),))
        self.assertEqual(placed["model.norm.weight"], (Replicate(),))
        # Its numbers go with it: the first loss is the model's own.
        torch.manual_seed(1)
        ids = torch.randint(0, 64, (8, 16))
        with torch.no_grad():
            want = model(input_ids=ids, labels=ids).loss.item()
        from safetensors.torch import save_file
        batch = plan.path.parent / "batch.safetensors"
        save_file({"input_ids": ids, "labels": ids.clone()}, batch)
        words = [shardc.find_binary(), "run", str(plan.path), "--weights", str(plan.model), "--batch", str(batch), "--steps", "1",
                 "--kernels", "interpreted", "--format", "json"]
        out = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertAlmostEqual(json.loads(out.stdout)["loss"], want, delta=5e-6 * want)

    def test_a_module_of_rows(self):
        class Scored(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

            def forward(self, x, y):
                return torch.nn.functional.mse_loss(self.fc2(torch.relu(self.fc1(x))), y)

        inputs = (torch.randn(8, 16), torch.randn(8, 8))
        with tempfile.TemporaryDirectory() as folder:
            plan = shardc.compile(Scored(), mesh="tp=2", output=Path(folder) / "p", inputs=inputs)
            self.assertTrue(plan.model.is_file())
            self.assertEqual(len(plan.placements()), 4)
            # What the module does not train is frozen.
            still = Scored()
            still.fc1.requires_grad_(False)
            less = shardc.compile(still, mesh="tp=2", output=Path(folder) / "q", inputs=inputs)
            self.assertLess(less.memory["optimizer"] * 2, plan.memory["optimizer"])

    def test_a_module_is_given_a_loss(self):
        class Rows(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

            def forward(self, x):
                return self.fc2(torch.relu(self.fc1(x)))

        def loss(output, y):
            return torch.nn.functional.mse_loss(output, y)

        model, inputs = Rows(), {"x": torch.randn(8, 16), "y": torch.randn(8, 8)}
        plan = shardc.compile(model, mesh="tp=2", inputs=inputs, loss=loss)
        self.assertEqual(set(plan.placements()), {name for name, _ in model.named_parameters()})
        from safetensors.torch import save_file
        batch = plan.path.parent / "batch.safetensors"
        save_file(inputs, batch)
        run = plan.run(weights=str(plan.model), batch=str(batch), steps=1, kernels="interpreted")
        want = loss(model(inputs["x"]), inputs["y"]).item()
        self.assertAlmostEqual(next(iter(run))["loss"], want, delta=1e-5)
        # On PyTorch, too, from the archive.
        step = shardc.compile(model, inputs=inputs, loss=loss, lr=1e-2).torch()
        losses = [step(inputs)["loss"].item() for _ in range(3)]
        self.assertAlmostEqual(losses[0], want, delta=1e-5)
        self.assertLess(losses[2], losses[0])
        for wrong, word in [(dict(inputs=(inputs["x"],)), "as a dict"), (dict(inputs={"x": inputs["x"]}), "takes 'y'"),
                            (dict(inputs={**inputs, "z": inputs["y"]}), "takes 'z'")]:
            with self.assertRaisesRegex(TypeError, word):
                shardc.compile(model, loss=loss, **wrong)
        with self.assertRaisesRegex(TypeError, "live module"):
            shardc.compile(LLAMA, loss=loss, **SIZE)

    def test_layers_are_compiled_once(self):
        from functools import partial
        from torch._dynamo.testing import CompileCounter
        config = json.loads((LLAMA / "config.json").read_text())
        torch.manual_seed(0)
        found = []
        for layers in (4, 7):
            plan = shardc.compile({**config, "num_hidden_layers": layers}, **SIZE)
            parameters = json.loads((plan.path / "weights.json").read_text())
            weights = {w["tensor"]: 0.1 * torch.randn(w["tensor_shape"]) for w in parameters}
            ids = torch.randint(0, 60, (8, 16))
            torch._dynamo.reset()
            graphs = CompileCounter()
            with mock.patch("torch.compile", partial(torch.compile, backend=graphs)):
                compiled, plain = (plan.torch(weights, compile=how) for how in (True, False))
                losses = [[step({"input_ids": ids, "labels": ids})["loss"].item() for _ in range(2)] for step in (compiled, plain)]
            for x, y in zip(*losses):
                self.assertAlmostEqual(x, y, delta=1e-5)
            found.append(graphs.frame_count)
        self.assertEqual(found[0], found[1])
        self.assertGreater(found[0], 0)

    def test_what_is_not_a_model(self):
        with self.assertRaisesRegex(TypeError, "inputs"):
            shardc.compile(torch.nn.Linear(2, 2), mesh="tp=2")


if __name__ == "__main__":
    unittest.main()
