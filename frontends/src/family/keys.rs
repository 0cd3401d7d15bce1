//! What the keys of config.json mean to a family: which are read, which would change the numbers in a way that is
//! not compiled, which change nothing, and which are names of others.
//!
//! The yardstick is transformers' own class of the model type: `tests/fixtures/keys.py` measures what each key
//! changes there, and a test compares these lists with its table.

use super::wrappers;
use super::{
    Adjacent, Beside, Bias, Eps, Experts, Factor, Family, Groups, Growth, Halves, Heads, KvHeads,
    Linear, Mixer, Normed, Positions, QkScale, SparseLayers, Still, Unlisted, Walking, Window,
};
use crate::config::Config;
use crate::rope;
use serde_json::Value;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::nearest;

/// The keys of a family beside those that other fields of its descriptor name.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Other names of keys, each with the key that it stands for. It counts where both are given.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Other words for activations, each with the word that it stands for.
    pub words: &'static [(&'static str, &'static str)],
    /// Keys that change the numbers, with the only value that is compiled.
    pub refused: &'static [(&'static str, Only)],
    /// Keys that say what is computed, and change nothing: any other value is worth a word.
    pub idle: &'static [(&'static str, Only)],
    /// Keys that change nothing and say nothing of numbers.
    pub harmless: &'static [&'static str],
}

impl Known {
    pub const NONE: Known =
        Known { aliases: &[], words: &[], refused: &[], idle: &[], harmless: &[] };
}

/// The value of a key that means what is compiled, as does its absence. A null flag is false.
#[derive(Clone, Copy, Debug)]
pub enum Only {
    Flag(bool),
    Word(&'static str),
    /// Any of these.
    Numbers(&'static [f64]),
    /// None, or an empty object.
    Nothing,
}

impl Only {
    fn is(self, v: &Value) -> bool {
        match self {
            Only::Flag(b) => v.as_bool().or(v.is_null().then_some(false)) == Some(b),
            _ if v.is_null() => true,
            Only::Word(w) => v.as_str() == Some(w),
            Only::Numbers(all) => v.as_f64().is_some_and(|x| all.contains(&x)),
            Only::Nothing => v.as_object().is_some_and(|m| m.is_empty()),
        }
    }

    /// How it is written in config.json.
    fn shown(self) -> String {
        match self {
            Only::Flag(b) => b.to_string(),
            Only::Word(w) => format!("\"{w}\""),
            Only::Numbers(all) => all.first().map_or("null".into(), |x| x.to_string()),
            Only::Nothing => "null".into(),
        }
    }
}

/// Keys of all families that change the numbers, with the only value that is compiled.
const REFUSED: [(&str, Only); 2] =
    [("is_causal", Only::Flag(true)), ("per_layer_config", Only::Nothing)];

/// Keys of all families that published files have and that change nothing: what wrote the file, how a model is called
/// and stored, and how text is made with it.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_softmax_in_fp32",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "base_model_tp_plan",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_factor",
    "inference_runner",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_batch_size",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "n_ctx",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "pad_key_length",
    "pre_allocate_kv_cache",
    "problem_type",
    "quantization_config",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "scale_attention_softmax_in_fp32",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
    "validate_runner_input",
];

/// Most keys that a note names.
const SHOWN: usize = 6;

impl Family {
    /// Every key that the descriptor's fields name, or that is read of all families.
    pub fn reads(&self) -> Vec<&'static str> {
        let k = &self.keys;
        let mut all = vec!["model_type", "vocab_size", "initializer_range", "tie_word_embeddings"];
        all.extend([k.hidden, k.layers, k.heads].into_iter().chain(k.max_positions));
        all.extend(Some(k.ffn).filter(|_| self.halves != Halves::First));
        if let Eps::Key(key) = k.eps {
            all.push(key);
        }
        if let KvHeads::Key(key) = k.kv_heads {
            all.push(key);
        }
        all.extend(self.mlp.activations.first().map(|_| k.activation));
        all.extend(k.head_dim);
        all.extend(k.dropout.all());
        if self.padding {
            all.push("pad_token_id");
        }
        if let Positions::Rotary(t) = self.positions {
            if let Some(theta) = t.theta {
                all.extend([theta, "rope_scaling", "rope_parameters", rope::ORIGINAL]);
                all.push(t.part.map_or(rope::PART, |p| p.0));
            }
            all.extend(t.local.and_then(|l| l.0).into_iter().chain(t.width.map(|w| w.0)));
            if let Adjacent::Unless(key) = t.adjacent {
                all.push(key);
            }
            match t.still {
                Still::Never | Still::WithoutWindow { .. } => {}
                Still::Listed { .. } => all.extend(["no_rope_layers", "no_rope_layer_interval"]),
                Still::Unless(key, _) => all.push(key),
            }
        }
        if let Beside::Unless(key) = self.beside {
            all.push(key);
        }
        if let QkScale::OverRootOf(key, _) | QkScale::Times(key, _) = self.attention.scores {
            all.push(key);
        }
        all.extend(self.attention.clip.into_iter().chain(self.mtp));
        all.extend(self.factors.all().into_iter().filter_map(Factor::key));
        all.extend(self.attention.softcap.iter().chain(&self.softcap).map(|s| s.key));
        let biases = self.linears().into_iter().map(|l| l.bias).chain([self.head_bias]);
        let biases = biases.chain(self.recurrent.into_iter().flat_map(|r| match r.mixer {
            Mixer::DeltaNet => vec![],
            Mixer::Mamba2(m) => vec![m.bias, m.conv_bias],
        }));
        all.extend(biases.filter_map(|bias| match bias {
            Bias::Key(key) | Bias::Unless(key) => Some(key),
            Bias::Never | Bias::Always => None,
        }));
        match self.attention.heads {
            Heads::Plain { .. } | Heads::Joined(_) => {}
            Heads::Latent(_) => all.extend([
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
            ]),
        }
        if let Halves::One(list, word) = self.halves {
            all.extend([list, word]);
        }
        if let Some(r) = self.recurrent {
            all.extend(r.layers.reads().chain(r.keys.all().map(|k| k.0)));
            if let Mixer::Mamba2(m) = r.mixer {
                all.extend(m.expand.map(|e| e.0).into_iter().chain([m.steps.key()]));
            }
        }
        let window: &[&str] = match self.attention.window {
            Window::Never => &[],
            Window::All { listed: false, .. } => &["sliding_window"],
            Window::All { listed: true, .. } | Window::Alternating { .. } => {
                &["sliding_window", "layer_types"]
            }
            Window::Chunks(..) => &["layer_types"],
            Window::AllSwitched { .. } => &["sliding_window", "use_sliding_window"],
            Window::Switched { unlisted: Unlisted::Still, .. } => {
                &["sliding_window", "use_sliding_window", "layer_types"]
            }
            Window::Switched { .. } => {
                &["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"]
            }
        };
        all.extend(window);
        match self.attention.window {
            Window::Alternating { key, .. } => all.extend(key),
            Window::Chunks(key, _) => all.push(key),
            _others => {}
        }
        all.extend(self.attention.norms.and_then(|n| n.key).map(|k| k.0));
        if self.attention.growth == Growth::Still {
            all.extend(["attn_temperature_tuning", "attn_scale", "floor_scale"]);
        }
        all.extend(self.experts.iter().flat_map(Experts::reads));
        all.extend(self.known.aliases.iter().map(|a| a.0));
        all.extend(self.known.refused.iter().chain(&REFUSED).map(|r| r.0));
        all
    }

    fn linears(&self) -> Vec<Linear> {
        let (a, m) = (&self.attention, &self.mlp);
        let mut all = vec![a.o];
        if self.halves != Halves::First {
            all.extend([m.up, m.down].into_iter().chain(m.gate));
        }
        match a.heads {
            Heads::Plain { q, k, v, .. } => all.extend([q, k, v]),
            Heads::Joined(qkv) => all.push(qkv),
            Heads::Latent(l) => all.extend([l.q, l.q_down, l.q_up, l.kv_down, l.kv_up]),
        }
        all
    }

    /// Refuses what would change the mathematics.
    ///
    /// # Errors
    /// `unsupported-config`, with the key and the value that is compiled.
    pub(crate) fn refuse(&self, c: &Config) -> Result<()> {
        let attends = !self.recurrent.is_some_and(|r| matches!(r.layers, Walking::All));
        let of_all = REFUSED.iter().filter(|r| attends || r.0 != "is_causal");
        for &(key, only) in self.known.refused.iter().chain(of_all) {
            let null = c.is_null(key).then_some(&Value::Null);
            let Some(v) = c.get(key).or(null).filter(|v| !only.is(v)) else { continue };
            let what = match v {
                Value::Object(_) | Value::Array(_) => format!("`{key}` is not compiled"),
                v => format!("`{key}`: {v} is not compiled"),
            };
            let help = format!("set it to {}, if the weights were trained so", only.shown());
            return Err(c.unsupported("unsupported-config", key, what, help));
        }
        Ok(())
    }

    /// One note that names the sizes which a config of its own does not say.
    pub(crate) fn assumed(&self, c: &Config) -> Option<Diag> {
        let k = &self.keys;
        let ffn = Some(k.ffn).filter(|_| self.halves != Halves::First);
        let layers = match self.halves {
            Halves::One(list, word) => Some(list).filter(|_| c.get(word).is_none()),
            Halves::Both | Halves::First => Some(k.layers),
        };
        let sizes = [k.hidden].into_iter().chain(layers).chain([k.heads]);
        let sizes = sizes.chain(ffn).chain(["vocab_size"]);
        let all = c.assumed(&sizes.collect::<Vec<_>>());
        let (first, _) = all.first().filter(|_| !c.is_held())?;
        let shown: Vec<String> = all.iter().map(|(key, n)| format!("`{key}` {n}")).collect();
        let shown = shown.join(", ");
        let what =
            format!("sizes are those that the class of `{}` assumes: {shown}", self.model_type);
        let d = Diag::new("assumed-sizes", what).at(c.place(first));
        Some(d.help("write them into config.json, if others are meant"))
    }

    /// One note that names all keys which nothing reads, if there are any.
    pub(crate) fn unread(&self, c: &Config) -> Option<Diag> {
        let reads = self.reads();
        let says_what_is = |key: &str, v: &Value| {
            self.known.idle.iter().find(|i| i.0 == key).is_some_and(|row| row.1.is(v))
        };
        let known = |key: &str| {
            let of_whole = !c.has_own_head() && wrappers::OF_PICTURES.contains(&key);
            let harmless = HARMLESS.contains(&key) || self.known.harmless.contains(&key);
            reads.contains(&key) || harmless || of_whole
        };
        let own = c.entries().filter(|(k, v)| !known(k) && !says_what_is(k, v));
        let mut all: Vec<String> = own.map(|(k, _)| k.into()).collect();
        if let Positions::Rotary(t) = self.positions {
            all.extend(rope::unread(c, t, self.attention.growth == Growth::Rotary));
        }
        let first = all.first()?;
        let shown: Vec<String> = all.iter().take(SHOWN).map(|k| format!("`{k}`")).collect();
        let more = if all.len() > SHOWN { ", …" } else { "" };
        let (has, it) = if all.len() == 1 { ("has", "it") } else { ("have", "them") };
        let (keys, family) = (shown.join(", ") + more, self.model_type);
        let what = format!("{keys} {has} no effect: nothing of a `{family}` reads {it}");
        let d = Diag::new("unread-keys", what).at(c.place(first));
        let near = all.iter().take(SHOWN).filter_map(|key| {
            let (name, known) = match key.rsplit_once('/') {
                Some((_, name)) => (name, rope::KEYS),
                None => (&**key, &reads[..]),
            };
            let near = *nearest(name, known.iter().copied().filter(|k| *k != name), 1).first()?;
            Some(format!("`{name}`: the nearest key that is read is `{near}`"))
        });
        let d = near.fold(d, Diag::help);
        let expected = all.iter().take(SHOWN).filter_map(|key| {
            let row = self.known.idle.iter().find(|i| i.0 == key)?;
            Some(format!("what is computed is `{key}`: {}", row.1.shown()))
        });
        let d = expected.fold(d, Diag::why);
        Some(d.help(format!("leave {it} out")))
    }
}

impl Experts {
    /// Keys that are read of a family with experts.
    fn reads(&self) -> Vec<&'static str> {
        let mut all = vec![self.count, self.top_k, self.width];
        all.extend(self.shared.map(|s| s.width.key()));
        all.extend(self.clamped.iter().flat_map(|c| [c.alpha.0, c.limit.0]));
        all.extend(self.narrowed.map(|n| n.key));
        if self.aux {
            all.extend(["output_router_logits", "router_aux_loss_coef"]);
        }
        if let Normed::Key(key) | Normed::Unless(key) | Normed::AtLeast(key, _) = self.score.normed
        {
            all.push(key);
        }
        all.extend(self.score.factor.map(|f| f.0));
        match self.score.groups {
            Groups::None => {}
            Groups::Best => all.extend(["topk_method", "n_group", "topk_group"]),
            Groups::BestTwo { .. } => all.extend(["n_group", "topk_group"]),
        }
        match self.layers {
            SparseLayers::All | SparseLayers::Typed | SparseLayers::IfAny => {}
            SparseLayers::Stepped => all.extend(["decoder_sparse_step", "mlp_only_layers"]),
            SparseLayers::From { .. } => all.push("first_k_dense_replace"),
            SparseLayers::Between { first, last, step } => all.extend([first.0, last, step]),
            SparseLayers::Listed(list, step) => all.extend([list, step]),
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::ASKED;
    use crate::family::{self, FAMILIES};
    use crate::{Shape, from_config};
    use serde_json::{Value, json};
    use shardc_ir::plan::{Dropout, Mode};
    use std::path::Path;

    fn fixture(name: &str) -> Value {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name);
        serde_json::from_slice(&std::fs::read(file.join("config.json")).unwrap()).unwrap()
    }

    /// A config with a switch on behind which other keys are read.
    fn switched(config: &Value, switch: &str) -> Value {
        let mut config = config.clone();
        if config.get(switch).is_some() {
            config[switch] = json!(true);
        }
        config
    }

    /// What is asked for anywhere is on the list of what is read, and what is on it is asked for.
    #[test]
    fn the_list_of_keys_is_what_is_read() {
        let names = [
            "llama_gqa",
            "mistral_window",
            "qwen2",
            "qwen3",
            "gpt2",
            "gemma2",
            "gemma3",
            "mixtral",
            "qwen3_moe",
            "deepseek_v3",
            "olmo2",
            "phi3",
            "gpt_neox",
            "glm4_moe",
            "gemma",
            "granite",
            "cohere",
            "cohere2",
            "glm",
            "glm4",
            "ernie4_5",
            "olmo3",
            "smollm3",
            "exaone4",
            "seed_oss",
            "starcoder2",
            "arcee",
            "nemotron",
            "hunyuan",
            "qwen2_moe",
            "olmoe",
            "minimax_m2",
            "ministral3",
            "gpt_oss",
            "granitemoe",
            "deepseek_v2",
            "helium",
            "ministral",
            "stablelm",
            "ernie4_5_moe",
            "llama4",
            "phi",
            "olmo",
            "falcon",
            "gpt_bigcode",
            "gptj",
            "qwen3_next",
        ];
        let shape = Shape { dropout: Dropout::Config, ..Shape::new(2, 16, Mode::Train) };
        for name in names {
            let config = fixture(name);
            let word = config["model_type"].as_str().unwrap().to_string();
            let family = FAMILIES.iter().find(|f| f.model_type == word).unwrap();
            ASKED.with_borrow_mut(|all| all.clear());
            let refused = |key: &&str| family.known.refused.iter().any(|r| r.0 == *key);
            let switches = ["model_type", "use_sliding_window", "output_router_logits"];
            for switch in switches.into_iter().filter(|key| !refused(key)) {
                let config =
                    if switch == "model_type" { config.clone() } else { switched(&config, switch) };
                let (view, _) = family::of(&config, "config.json").unwrap();
                assert!(family.unread(&view).is_none(), "{name}");
                let made = from_config(&config, "config.json", &shape);
                made.unwrap_or_else(|d| panic!("{name}: {d}"));
            }
            let reads = family.reads();
            let asked = ASKED.with_borrow(|all| all.clone());
            let top = asked.iter().filter_map(|p| p.strip_prefix('/')).filter(|p| !p.contains('/'));
            let own = [
                "quantization_config",
                super::rope::PART,
                "rope_theta",
                "rope_type",
                "type",
                "truncate",
            ];
            let odd: Vec<&str> = top.filter(|k| !reads.contains(k) && !own.contains(k)).collect();
            assert!(odd.is_empty(), "{name} reads {odd:?}");
            // A layer's list is read in the place of what makes one.
            let aliases: Vec<&str> = family.known.aliases.iter().map(|a| a.0).collect();
            let instead = [
                "max_window_layers",
                "sliding_window_pattern",
                "original_max_position_embeddings",
                "full_attention_interval",
            ];
            let idle = reads.iter().filter(|k| !asked.contains(&format!("/{k}")));
            let idle: Vec<_> = idle
                .filter(|k| {
                    !aliases.contains(k) && !instead.contains(k) && **k != super::rope::PART
                })
                .collect();
            assert!(idle.is_empty(), "{name} does not read {idle:?}");
        }
    }
}
