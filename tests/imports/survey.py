"""Exports a small model of each of many architectures, and says what becomes of it.

    venv/bin/python survey.py FOLDER [NAME ...]              # archives, and what PyTorch computes with each
    SHARDC=target/debug/shardc venv/bin/python survey.py FOLDER [NAME ...] --import
    SHARDC_SURVEY=FOLDER cargo test --test it survey -- --ignored   # what imports, against PyTorch

With --import nothing is made: `shardc import` reads each archive of the folder, and a line says whether it did, or
with which exit status and message it was refused. Pins are those of ../fixtures/make.py; archives have the form of those
of make.py. All models have 2 layers (of each kind), few and small dims, and their loss where they have one.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging

import make

ROWS, SEQ, CLASSES = make.ROWS, make.SEQ, 6
IMAGE, PATCH, FRAMES, SHORT = 16, 4, 12, 5

LLM, MLM = "AutoModelForCausalLM", "AutoModelForMaskedLM"
CLASSES_OF_IMAGES = "AutoModelForImageClassification"
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0,
                  classifier_dropout=0.0, dropout=0.0, activation_dropout=0.0)
VISION = dict(image_size=IMAGE, patch_size=PATCH, num_channels=3, num_labels=CLASSES)
MOE = dict(experts_implementation="batched_mm", moe_intermediate_size=8, norm_topk_prob=True)
DEEPSEEK = dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4,
                num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
                num_key_value_heads=4)
TWO = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24,
           decoder_ffn_dim=24, d_model=16, decoder_start_token_id=2, pad_token_id=1)
CLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, projection_dim=8,
            attention_dropout=0.0)

# name -> (class, model_type, configuration on top of make.BASE and NO_DROPOUT, what it takes)
TABLE = {name: (LLM, kind, own, "tokens") for name, (kind, own) in make.TABLE.items() if name in (
    "llama gemma3 phi3 olmo2 gpt_neox granite opt mpt".split())}
TABLE |= {
    "falcon": (LLM, "falcon", dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=24), "tokens"),
    "cohere2": (LLM, "cohere2", dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]), "tokens"),
    "bloom": (LLM, "bloom", dict(n_head=4, n_layer=2), "tokens"),
    "bert": (MLM, "bert", dict(type_vocab_size=2), "tokens"),
    "roberta": (MLM, "roberta", dict(type_vocab_size=1, pad_token_id=1), "tokens"),
    "distilbert": (MLM, "distilbert", dict(dim=16, hidden_dim=24, n_heads=4, n_layers=2, pad_token_id=0), "tokens"),
    "electra": (MLM, "electra", dict(embedding_size=12, type_vocab_size=2, pad_token_id=0), "tokens"),
    "modernbert": (MLM, "modernbert", dict(local_attention=4, global_attn_every_n_layers=2, embedding_dropout=0.0, mlp_dropout=0.0,
                                           pad_token_id=0, cls_token_id=1, sep_token_id=2, reference_compile=False), "tokens"),
    "deberta_v2": (MLM, "deberta-v2", dict(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"],
                                           norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0, pad_token_id=0,
                                           max_relative_positions=-1), "tokens"),
    "bart": ("BartForConditionalGeneration", "bart", dict(TWO), "two"),
    "whisper": ("WhisperForConditionalGeneration", "whisper", dict(TWO, num_mel_bins=8, max_source_positions=FRAMES,
                                                                   max_target_positions=SEQ), "mel"),
    "clip": ("CLIPModel", "clip", dict(text_config=dict(CLIP, vocab_size=32, max_position_embeddings=SEQ, eos_token_id=2, bos_token_id=1,
                                                        pad_token_id=1),
                                       vision_config=dict(CLIP, image_size=IMAGE, patch_size=PATCH), projection_dim=8, logit_scale_init_value=0.5), "both"),
    "vit": (CLASSES_OF_IMAGES, "vit", VISION, "image"),
    "dinov2": (CLASSES_OF_IMAGES, "dinov2", VISION, "image"),
    "siglip": ("SiglipForImageClassification", "siglip",
               dict(text_config=dict(CLIP, vocab_size=32, max_position_embeddings=SEQ),
                    vision_config=dict(CLIP, image_size=IMAGE, patch_size=PATCH), num_labels=CLASSES), "image"),
    "siglip_pairs": ("SiglipModel", "siglip",
                     dict(text_config=dict(CLIP, vocab_size=32, max_position_embeddings=SEQ, projection_size=16, pad_token_id=1),
                          vision_config=dict(CLIP, image_size=IMAGE, patch_size=PATCH)), "both"),
    "vit_mae": ("ViTMAEForPreTraining", "vit_mae", dict(VISION, decoder_hidden_size=16, decoder_num_hidden_layers=2,
                                                        decoder_num_attention_heads=4, decoder_intermediate_size=24), "pixels"),
    "segformer": (CLASSES_OF_IMAGES, "segformer", dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
                                                       patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                                                       decoder_hidden_size=8, num_labels=CLASSES, drop_path_rate=0.0), "image"),
    "resnet": (CLASSES_OF_IMAGES, "resnet", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                                                 num_labels=CLASSES), "image"),
    "convnext": (CLASSES_OF_IMAGES, "convnext", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4,
                                                     num_labels=CLASSES, drop_path_rate=0.0), "image"),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "wav2vec2",
                 dict(conv_dim=[8, 8], conv_kernel=[4, 3], conv_stride=[4, 2], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                      num_conv_pos_embedding_groups=2, num_labels=CLASSES, classifier_proj_size=8, feat_proj_dropout=0.0,
                      layerdrop=0.0, mask_time_prob=0.0, mask_feature_prob=0.0, final_dropout=0.0, feat_extract_norm="layer",
                      do_stable_layer_norm=True), "wave"),
    "mamba": (LLM, "mamba", dict(state_size=4, time_step_rank=2, use_mambapy=False), "tokens"),
    "mamba2": (LLM, "mamba2", dict(state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=8), "tokens"),
    "qwen3_moe": (LLM, "qwen3_moe", dict(MOE, num_experts=4, num_experts_per_tok=2, head_dim=8), "tokens"),
    "deepseek_v3": (LLM, "deepseek_v3", dict(MOE, **DEEPSEEK, n_shared_experts=1), "tokens"),
    "glm4_moe": (LLM, "glm4_moe", dict(MOE, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
                                       first_k_dense_replace=1, head_dim=8, partial_rotary_factor=0.5), "tokens"),
    "gpt_oss": (LLM, "gpt_oss", dict(experts_implementation="batched_mm", num_local_experts=4, num_experts_per_tok=2, head_dim=8,
                                     sliding_window=5, layer_types=["sliding_attention", "full_attention"]), "tokens"),
    "qwen3_next": (LLM, "qwen3_next", dict(MOE, num_experts=4, num_experts_per_tok=2, head_dim=8, linear_num_key_heads=2,
                                           linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                                           layer_types=["linear_attention", "full_attention"],
                                           shared_expert_intermediate_size=8), "tokens"),
    "t5": ("T5ForConditionalGeneration", "t5", dict(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4,
                                                    dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0), "two"),
}
TABLE |= {
    "t5_padded": (*TABLE["t5"][:3], "two_padded"),
    "t5_short": (*TABLE["t5"][:3], "two_short"),
    "biased": (None, None, {}, "padded"),
    "two_biases": (None, None, {}, "tokens"),
    "mt5": ("MT5ForConditionalGeneration", "mt5", dict(TABLE["t5"][2], feed_forward_proj="gated-gelu"), "two"),
    "swin": (CLASSES_OF_IMAGES, "swin", dict(VISION, patch_size=2, embed_dim=8, depths=[2, 2], num_attention_heads=[2, 4], window_size=4,
                                             drop_path_rate=0.0), "image"),
    "esm": (MLM, "esm", dict(mask_token_id=31, pad_token_id=1, position_embedding_type="rotary", token_dropout=False), "tokens"),
}

# Numbers of positions that a program looks up: rows and tokens are numbers there.
FIXED = ["phi3"]


class WithPositions(nn.Module):
    """Positions that do not depend on tokens: without, a padding token takes none."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels):
        places = torch.arange(input_ids.shape[1]) + self.config.pad_token_id + 1
        return self.model(input_ids=input_ids, labels=labels, position_ids=places.expand(input_ids.shape[0], -1))


class Biased(nn.Module):
    """A learned bias of all pairs of tokens, to which padding is added, as no class of transformers does in this order."""

    def __init__(self):
        super().__init__()
        self.config = transformers.PretrainedConfig(vocab_size=32)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.bias = nn.Parameter(torch.randn(4, SEQ, SEQ))

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        q = x.view(x.shape[0], SEQ, 4, 4).transpose(1, 2)
        mask = self.bias[None] + (1 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        logits = self.head(x + y)
        loss = nn.functional.cross_entropy(logits.view(-1, 32), labels.view(-1))
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


class TwoBiases(nn.Module):
    """Scores with two learned biases of distances, of which one knows the direction, in front of a causal mask."""

    def __init__(self):
        super().__init__()
        self.config = transformers.PretrainedConfig(vocab_size=32)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.near, self.far = nn.Embedding(8, 4), nn.Embedding(8, 4)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        q = x.view(x.shape[0], SEQ, 4, 4).transpose(1, 2)
        places = torch.arange(SEQ)
        away = places[None] - places[:, None]
        scores = q @ q.transpose(2, 3) / 2
        scores = scores + self.near(away.clamp(-3, 4) + 3).permute(2, 0, 1)[None]
        scores = scores + self.far(away.abs().clamp(max=7)).permute(2, 0, 1)[None]
        scores = scores + torch.full((SEQ, SEQ), torch.finfo(torch.float32).min).triu(1)[None, None]
        y = (scores.softmax(-1) @ q).transpose(1, 2).reshape(x.shape)
        logits = self.head(x + y)
        loss = nn.functional.cross_entropy(logits.view(-1, 32), labels.view(-1))
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


# Modules of our own, by name.
OWN = {"biased": Biased, "two_biases": TwoBiases}

# What of a model is exported.
AROUND = {"roberta": WithPositions}


def inputs(kind, vocab):
    torch.manual_seed(7)
    labels = torch.arange(ROWS) % CLASSES
    ids, tokens = make.batch(vocab)
    pixels = torch.randn(ROWS, 3, IMAGE, IMAGE)
    return {
        "tokens": lambda: dict(input_ids=ids, labels=tokens),
        # What the decoder begins with is an input: labels are moved in place otherwise.
        "padded": lambda: dict(input_ids=ids, labels=tokens, attention_mask=make.padding()),
        "two": lambda: dict(input_ids=ids, decoder_input_ids=ids.roll(3, 1), labels=tokens),
        "two_padded": lambda: dict(input_ids=ids, decoder_input_ids=ids.roll(3, 1), labels=tokens, attention_mask=make.padding()),
        "two_short": lambda: dict(input_ids=ids, decoder_input_ids=ids[:, 3 : 3 + SHORT].contiguous(), labels=tokens[:, :SHORT].contiguous()),
        "image": lambda: dict(pixel_values=pixels, labels=labels),
        "pixels": lambda: dict(pixel_values=pixels, noise=torch.rand(ROWS, (IMAGE // PATCH) ** 2)),
        "mel": lambda: dict(input_features=torch.randn(ROWS, 8, 2 * FRAMES), decoder_input_ids=ids, labels=tokens),
        "wave": lambda: dict(input_values=torch.randn(ROWS, 64), labels=labels),
        "both": lambda: dict(input_ids=ids, pixel_values=pixels, return_loss=True),
    }[kind]()


def model_of(name):
    of, kind, own, takes = TABLE[name]
    torch.manual_seed(sum(map(ord, name)))
    if name in OWN:
        return OWN[name]()
    own = dict(own)
    experts = own.pop("experts_implementation", None)
    base = make.BASE if takes in ("tokens", "mel") or takes.startswith("two") else {k: make.BASE[k] for k in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "initializer_range")}
    if takes == "both" or "vision_config" in own:
        base = {}
    config = AutoConfig.for_model(kind, **{**base, **NO_DROPOUT, **own})
    of = getattr(transformers, of)
    model = (of.from_config if hasattr(of, "from_config") else of._from_config)(config).train()
    if experts:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for p in model.parameters():
            # An archive does not say which are frozen.
            p.requires_grad_(True)
            if p.dim() == 1 or not p.any():
                p.add_(torch.randn_like(p) * 0.1)
    return AROUND.get(name, lambda m: m)(model)


def export(folder, name):
    takes = TABLE[name][3]
    model = model_of(name)
    vocab = getattr(model.config, "vocab_size", None) or 32
    given = inputs(takes, vocab)
    out = model(**given)
    out.loss.backward()
    # Of two towers what is compared is what tokens have.
    shown = out.text_model_output[0] if takes == "both" else out.logits if getattr(out, "logits", None) is not None else out[1]
    stored = {k: v for k, v in given.items() if torch.is_tensor(v)}
    if "labels" in stored:
        # What each position is scored against: decoders alone move labels inside.
        moved = TABLE[name][0] == LLM
        stored["targets"] = nn.functional.pad(stored["labels"], (0, 1), value=-100)[:, 1:] if moved else stored["labels"]
    stored |= {"loss": out.loss.detach().reshape(1), "logits": shown.detach()}
    seen = set()
    for n, p in model.named_parameters():
        if p.grad is not None and p.data_ptr() not in seen:
            seen.add(p.data_ptr())
            stored["grad." + n] = p.grad
    save_file({k: v.contiguous().clone() for k, v in stored.items()}, folder / f"{name}.safetensors")
    for p in model.parameters():
        p.grad = None
    shapes = None
    if takes in ("tokens", "two", "two_padded", "two_short") and name not in FIXED:
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=48)}
        shapes = {k: dims if given[k].shape[1] == SEQ else {0: dims[0]} for k in given}
    path = folder / f"{name}.pt2"
    try:
        program = torch.export.export(model, (), given, strict=False, dynamic_shapes=shapes)
    except Exception as e:
        if shapes is None:
            raise
        print(f"{name}: not with symbols: {type(e).__name__}: {str(e)[:160]!r}", flush=True)
        program = torch.export.export(model, (), given, strict=False)
    torch.export.save(program, path)
    make.slim(path)
    print(f"{name}: loss {out.loss.item():.6f}, {len(seen)} gradients, {path.stat().st_size} bytes", flush=True)


def read(folder, name):
    """One line about what `shardc import` does with an archive."""
    path = folder / f"{name}.pt2"
    if not path.exists():
        return "torch.export makes no archive"
    out = folder / f"{name}.ir"
    run = subprocess.run([os.environ.get("SHARDC", "shardc"), "import", path, "-o", out], capture_output=True, text=True)
    said = " | ".join(line.strip() for line in run.stderr.splitlines() if line.strip())
    return "imports" + (": " + said if "warning" in said else "") if run.returncode == 0 else f"exit {run.returncode}: {said}"


def main():
    reads = "--import" in sys.argv
    folder, *names = [a for a in sys.argv[1:] if a != "--import"]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name in names or TABLE:
        if reads:
            print(f"{name}: {read(folder, name)}", flush=True)
            continue
        try:
            export(folder, name)
        except Exception as e:  # the others are made
            print(f"{name}: {type(e).__name__}: {str(e)[:300]}", flush=True)


if __name__ == "__main__":
    main()
