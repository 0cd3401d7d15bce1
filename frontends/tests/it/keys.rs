//! What keys of config.json change here and in transformers: `tests/fixtures/keys.json`, which `keys.py` measures.

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Map, Value, json};
use shardc_frontends::{Checkpoint, Model, Shape, check_readable, from_config_named, load};
use shardc_ir::diag::Diag;
use shardc_ir::func::{Port, RoleKind};
use shardc_ir::interp::{Precision, call};
use shardc_ir::plan::Mode;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::print;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const ROWS: usize = 2;
const SEQ: usize = 16;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn json_of(file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(file)).unwrap()).unwrap()
}

/// A reference folder, whose config is changed.
struct Folder {
    config: Map<String, Value>,
    checkpoint: Checkpoint,
    ids: Vec<i32>,
}

impl Folder {
    fn open(name: &str) -> Folder {
        Folder::with(name, &fixtures().join(name))
    }

    /// The same with weights of another folder.
    fn with(name: &str, weights: &Path) -> Folder {
        let config = json_of(&format!("{name}/config.json")).as_object().unwrap().clone();
        let checkpoint = Checkpoint::open(weights).unwrap().expect("weights");
        let bytes = std::fs::read(fixtures().join(name).join("batch.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let numbers = file.tensor("input_ids").unwrap().data().as_chunks::<8>().0;
        let one = |b: &[u8; 8]| i32::try_from(i64::from_le_bytes(*b)).unwrap();
        Folder { config, checkpoint, ids: numbers[..ROWS * SEQ].iter().map(one).collect() }
    }

    /// The model of the config with a change; "-" takes a key away.
    fn model(&self, change: &Value) -> Result<Model, Diag> {
        let mut config = self.config.clone();
        config.extend(change.as_object().unwrap().clone());
        config.retain(|_, v| v != "-");
        let has = |name: &str| self.checkpoint.get(name).is_some();
        let shape = Shape::new(ROWS, SEQ, Mode::Train);
        from_config_named(&config.into(), "config.json", &shape, &has)
    }

    /// Mean loss of the first rows, each token's label the next one, with what experts add.
    fn loss(&self, m: &Model) -> f64 {
        let f = &m.module.funcs[0];
        let mut weights = m.weights.iter();
        let ids = self.ids.iter().copied().map(f64::from);
        let last = |i: usize| i % SEQ == SEQ - 1;
        let labels = (0..ROWS * SEQ).map(|i| if last(i) { -100.0 } else { self.ids[i + 1].into() });
        let mut one = |port: &Port| {
            let role = port.role.as_ref().expect("a role");
            let shape = f.ty(port.value).sizes();
            let data: Vec<f64> = match (role.kind, &*role.name) {
                (RoleKind::Param, _) => {
                    let w = weights.next().expect("one weight per parameter");
                    let whole: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
                    let mut out = vec![0.0; w.shape.iter().product()];
                    self.checkpoint.read(w, &whole, &mut out).unwrap_or_else(|d| panic!("{d}"));
                    out.into_iter().map(f64::from).collect()
                }
                (_, "input_ids") => ids.clone().collect(),
                (_, "targets") => labels.clone().collect(),
                (_, "positions") => (0..SEQ).map(|i| i as f64).collect(),
                (_, other) => panic!("{other}"),
            };
            vec![Tensor::new(&shape, data)]
        };
        let args: Vec<_> = f.args.iter().map(&mut one).collect();
        let out = call(&m.module.mesh, f, &args, Precision::F64).unwrap();
        let sums = f.results.iter().zip(&out).filter_map(|(r, o)| match r.role.as_ref()?.kind {
            RoleKind::Sum => Some((&*r.role.as_ref()?.name, o[0].data[0])),
            _ => None,
        });
        sums.map(|(name, x)| if name == "loss" { x / (ROWS * (SEQ - 1)) as f64 } else { x }).sum()
    }
}

/// What a model is: its program, and the shapes of its tensors.
fn program(m: &Model) -> (String, Vec<(String, Vec<usize>)>) {
    let tensors = m.weights.iter().map(|w| (w.tensor.clone(), w.tensor_shape.clone()));
    (print(&m.module), tensors.collect())
}

/// A scaling that changes rows longer than the model's positions only, which the table does not have.
fn of_long_rows(change: &Value) -> bool {
    let text = change.to_string();
    text.contains("\"dynamic\"") && !text.contains("\"alpha\"")
}

/// Last keys of changes that alter numbers in transformers and are refused here, with the code: of rotary numbers,
/// a part of DeepSeek's heads, and both dialects at once for Gemma 3.
const REFUSED: [&str; 21] = [
    "activation: activation",
    "activation_function: activation",
    "alibi: unsupported-config",
    "head_dim: unsupported-config",
    "hidden_act: activation",
    "hidden_activation: activation",
    "is_causal: unsupported-config",
    "layer_types: config",
    "mamba_hidden_act: unsupported-config",
    "mlp_hidden_act: activation",
    "output_router_logits: unsupported-config",
    "rescale_prenorm_residual: unsupported-config",
    "rope_parameters: unsupported-config",
    "rope_scaling: unsupported-config",
    "router_aux_loss_coef: unsupported-config",
    "router_jitter_noise: unsupported-config",
    "scale_attn_by_inverse_layer_idx: unsupported-config",
    "scale_attn_weights: unsupported-config",
    "topk_group: config",
    "use_bidirectional_attention: unsupported-config",
    "z_loss_coefficient: unsupported-config",
];

/// A key changes here what it changes in transformers, or is refused; one that changes nothing there changes nothing
/// here, and nobody is refused for it. So does a key that is null.
#[test]
fn keys_change_what_they_change_in_transformers() {
    let table = json_of("keys.json");
    let all = std::env::var_os("SHARDC_NIGHTLY").is_some();
    let (mut wrong, mut refused) = (vec![], BTreeSet::new());
    for (at, (name, kinds)) in
        table.as_object().unwrap().iter().enumerate().filter(|t| t.1.0 != "*")
    {
        let folder = Folder::open(name);
        let base = folder.model(&json!({})).unwrap_or_else(|d| panic!("{name}: {d}"));
        assert!(base.warnings.is_empty(), "{name}: {:?}", base.warnings);
        let base = program(&base);
        let mut losses: BTreeMap<String, f64> = BTreeMap::new();
        let rows = |kind: &str| kinds[kind].as_array().unwrap().iter();
        let everywhere = table["*"]["nothing"].as_array().unwrap().iter().enumerate();
        let everywhere = everywhere.filter(|(i, _)| all || i % 8 == at % 8).map(|e| e.1);
        for change in rows("nothing").chain(everywhere).filter(|c| !of_long_rows(c)) {
            match folder.model(change) {
                Ok(m) if program(&m) == base => {
                    let known =
                        ["unread-keys", "assumed-sizes", "sequence-length", "dropout-ignored"];
                    let other = m.warnings.iter().find(|w| !known.contains(&w.code));
                    wrong.extend(other.map(|w| format!("{name} {change}: {w}")));
                }
                Ok(_) => wrong.push(format!("{name} {change}: changes the model")),
                Err(d) => wrong.push(format!("{name} {change}: {}", d.message)),
            }
        }
        for change in rows("shapes") {
            if folder.model(change).is_ok_and(|m| program(&m).1 == base.1) {
                wrong.push(format!("{name} {change}: asks for the same tensors"));
            }
        }
        for (i, row) in rows("loss").enumerate().filter(|r| !of_long_rows(r.1)) {
            let (change, want) = (&row[0], row[1].as_f64().unwrap());
            let m = match folder.model(change) {
                Ok(m) if m.warnings.iter().any(|w| w.code == "dropout-ignored") => continue,
                Ok(m) => m,
                Err(d) => {
                    let key = change.as_object().unwrap().keys().next_back().unwrap();
                    refused.insert(format!("{key}: {}", d.code));
                    continue;
                }
            };
            if change != &json!({}) && program(&m).0 == base.0 {
                wrong.push(format!("{name} {change}: changes nothing"));
            } else if all || name == "gemma3" || i % 16 == at % 16 {
                let got = *losses.entry(program(&m).0).or_insert_with(|| folder.loss(&m));
                if (got - want).abs() > 1e-5 * want {
                    wrong.push(format!("{name} {change}: loss {got}, in transformers {want}"));
                }
            }
        }
        rows("error").for_each(|change| drop(folder.model(change)));
    }
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(refused.into_iter().collect::<Vec<_>>(), REFUSED);
}

/// Rewrites the weights of a reference folder with other tensors: from all of them, by name.
fn rewritten(name: &str, to: &Path, change: impl Fn(&mut BTreeMap<String, (Vec<usize>, Vec<u8>)>)) {
    let bytes = std::fs::read(fixtures().join(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = |(n, t): (String, TensorView)| (n, (t.shape().to_vec(), t.data().to_vec()));
    let mut tensors = file.tensors().into_iter().map(own).collect();
    change(&mut tensors);
    let view = |(shape, data)| TensorView::new(Dtype::F32, shape, data).unwrap();
    let views = tensors
        .iter()
        .map(|(n, (s, d)): (&String, &(Vec<usize>, Vec<u8>))| (n, view((s.clone(), d))));
    std::fs::create_dir_all(to).unwrap();
    std::fs::write(to.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    std::fs::copy(fixtures().join(name).join("config.json"), to.join("config.json")).unwrap();
}

/// A head that is stored is tied to the embedding if it is the embedding, as in transformers; of two that are tied
/// either may be stored.
#[test]
fn a_stored_head_is_tied_if_it_is_the_embedding() {
    let table = json_of("heads.json");
    let root = std::env::temp_dir().join(format!("shardc-heads-{}", std::process::id()));
    for (name, losses) in table.as_object().unwrap() {
        let embedding = if name == "gpt2" { "transformer.wte" } else { "model.embed_tokens" };
        let embedding = format!("{embedding}.weight");
        let half = |bytes: &[u8]| -> Vec<u8> {
            let all = bytes.as_chunks::<4>().0.iter();
            all.flat_map(|b| (0.5 * f32::from_le_bytes(*b)).to_le_bytes()).collect()
        };
        for what in ["stored", "other", "same", "only"] {
            let dir = root.join(format!("{name}-{what}"));
            rewritten(name, &dir, |tensors| {
                let mut head = tensors[&embedding].clone();
                if what == "other" {
                    head.1 = half(&head.1);
                }
                if what != "stored" {
                    tensors.insert("lm_head.weight".into(), head);
                }
                if what == "only" {
                    tensors.remove(&embedding);
                }
            });
            let m =
                load(&dir, &Shape::new(ROWS, SEQ, Mode::Train)).unwrap_or_else(|d| panic!("{d}"));
            let said: Vec<_> = m.warnings.iter().map(|w| w.code).collect();
            assert_eq!(
                said,
                if what == "other" { vec!["untied-head"] } else { vec![] },
                "{name}, {what}"
            );
            let (got, want) = (Folder::with(name, &dir).loss(&m), losses[what].as_f64().unwrap());
            assert!((got - want).abs() <= 1e-5 * want, "{name}, {what}: {got}, not {want}");
            // What is kept of the config says what was compiled.
            assert_eq!(m.config["tie_word_embeddings"] == false, what == "other", "{name}, {what}");
            let c = m.checkpoint.as_ref().unwrap();
            let tied =
                load(&fixtures().join(name), &Shape::new(1, 1, Mode::Infer)).unwrap().weights;
            let code = c.check_tied(&tied).map_err(|d| d.code);
            assert_eq!(
                code,
                if what == "other" { Err("untied-head") } else { Ok(()) },
                "{name}, {what}"
            );
        }
    }
    std::fs::remove_dir_all(&root).unwrap();
}

/// Each key that nothing reads is named once, with the nearest that is read, or with what is computed; what all
/// configs have is not.
#[test]
fn keys_that_nothing_reads_are_named() {
    let one = |name: &str, change: Value| -> Vec<String> {
        let m =
            Folder::open(name).model(&change).unwrap_or_else(|d| panic!("{name} {change}: {d}"));
        m.warnings.iter().map(|w| format!("{w}")).collect()
    };
    let says = |name: &str, change: Value, words: &[&str]| {
        let said = one(name, change);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(words.iter().all(|w| said[0].contains(w)), "{}", said[0]);
    };
    says(
        "llama_mha",
        json!({"rope_thetta": 5.0, "embedding_multiplier": 2.0}),
        &[
            "`rope_thetta`, `embedding_multiplier` have no effect",
            "`rope_thetta`: the nearest key that is read is `rope_theta`",
        ],
    );
    // No key is near to it: that of an object of numbers is none of the model's.
    let said = one("llama_mha", json!({"rope_interleaved": false}));
    assert!(said.len() == 1 && !said[0].contains("the nearest key"), "{said:?}");
    says(
        "llama_mha",
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "facto": 2.0}}),
        &["`facto`: the nearest key that is read is `factor`"],
    );
    for name in ["deepseek_v3", "glm4_moe"] {
        for (key, other, computed) in [
            ("scoring_func", json!("softmax"), json!("sigmoid")),
            ("topk_method", json!("greedy"), json!("noaux_tc")),
            ("moe_layer_freq", json!(2), json!(1)),
        ] {
            let words =
                [format!("`{key}` has no effect"), format!("computed is `{key}`: {computed}")];
            says(name, json!({ key: other }), &[&words[0], &words[1]]);
            assert!(one(name, json!({ key: computed })).is_empty(), "{name}: {key}");
        }
    }
    let linear = json!({"type": "linear", "factor": 8.0});
    says("gemma3", json!({ "rope_scaling": linear }), &["`rope_scaling/type`"]);
    says(
        "gemma3",
        json!({"rope_scaling": {"full_attention": linear}}),
        &["`rope_scaling/full_attention`"],
    );
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false});
    let change = json!({"rope_scaling": "-", "rope_parameters": {"full_attention": yarn}});
    says("gemma3", change, &["`rope_parameters/full_attention/truncate`"]);
    let quiet = json!({"pretraining_tp": 1, "torch_dtype": "bfloat16", "eos_token_id": [1, 2], "head_dim": null,
        "use_cache": false, "unknown": null, "top_p": 0.9, "transformers_version": "4.40.0"});
    for name in ["llama_mha", "qwen2", "gpt2", "gemma3", "mixtral", "deepseek_v3"] {
        assert!(one(name, quiet.clone()).is_empty(), "{name}: {:?}", one(name, quiet.clone()));
    }
}

/// Sizes need no weights: a config of quantized weights compiles, and what is kept of it does not say so. With weights
/// it is refused, and the method is named.
#[test]
fn quantized_weights_are_refused_where_they_would_be_read() {
    let root = std::env::temp_dir().join(format!("shardc-quantized-{}", std::process::id()));
    rewritten("llama_mha", &root, |_| {});
    let mut config = json_of("llama_mha/config.json");
    config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    std::fs::write(root.join("config.json"), config.to_string()).unwrap();
    let shape = Shape::new(ROWS, SEQ, Mode::Train);
    let d = load(&root, &shape).unwrap_err();
    assert_eq!((d.code, d.exit as i32), ("unsupported-config", 4));
    assert!(d.message.contains("`gptq`"), "{d}");
    assert_eq!(check_readable(&root).unwrap_err().code, "unsupported-config");
    std::fs::remove_file(root.join("model.safetensors")).unwrap();
    let m = load(&root, &shape).unwrap_or_else(|d| panic!("{d}"));
    let said: Vec<_> = m.warnings.iter().map(|w| (w.code, w.message.contains("`gptq`"))).collect();
    assert_eq!(said, [("weights-not-read", true)]);
    assert!(m.config.get("quantization_config").is_none());
    assert!(check_readable(&fixtures().join("llama_mha")).is_ok());
    std::fs::remove_dir_all(&root).unwrap();
}

/// What stands in the tree is clean.
#[test]
fn configs_of_the_tree_have_no_key_that_nothing_reads() {
    let root = fixtures().join("../..");
    let in_folder = |dir: &str| {
        let all = std::fs::read_dir(root.join(dir)).unwrap().map(|e| e.unwrap().path());
        all.map(|p| if p.is_dir() { p.join("config.json") } else { p }).collect::<Vec<_>>()
    };
    let dirs = ["tests/fixtures", "tests/imports", "benches/configs", "examples"];
    let mut seen = 0;
    for file in dirs
        .iter()
        .flat_map(|d| in_folder(d))
        .filter(|f| f.extension().is_some_and(|e| e == "json"))
    {
        let Ok(bytes) = std::fs::read(&file) else { continue };
        let config: Value = serde_json::from_slice(&bytes).unwrap();
        if config.get("model_type").is_none() {
            continue;
        }
        let m =
            from_config_named(&config, "config.json", &Shape::new(1, 8, Mode::Infer), &|_| false);
        let m = m.unwrap_or_else(|d| panic!("{}: {d}", file.display()));
        assert!(m.warnings.is_empty(), "{}: {:?}", file.display(), m.warnings);
        seen += 1;
    }
    assert!(seen > 30, "{seen} configs");
}
