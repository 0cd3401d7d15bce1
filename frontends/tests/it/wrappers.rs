//! Models that hold one of text, against transformers' own classes of them (`tests/fixtures/wrappers.py`).

use safetensors::SafeTensors;
use serde_json::{Value, json};
use shardc_frontends::{Model, Shape, from_config, load};
use shardc_ir::func::RoleKind;
use shardc_ir::interp::{Precision, call};
use shardc_ir::plan::Mode;
use shardc_ir::tensor::Tensor;
use std::path::PathBuf;

/// Types, and the families that are compiled.
const NAMES: [(&str, &str); 15] = [
    ("gemma3", "gemma3_text"),
    ("idefics3", "llama"),
    ("internvl", "qwen2"),
    ("llama4", "llama4_text"),
    ("llava", "llama"),
    ("llava_next", "llama"),
    ("mistral3", "mistral"),
    ("qwen2_vl", "qwen2"),
    ("qwen2_5_vl", "qwen2"),
    ("qwen3_vl", "qwen3"),
    ("smolvlm", "llama"),
    ("gemma3-softcap", "gemma3_text"),
    ("llava_next-granite", "granite"),
    ("llava-tied", "llama"),
    ("qwen3_vl-window", "qwen3"),
];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/wrappers").join(name)
}

/// Logits of a model, of the tokens of its folder.
fn logits(m: &Model, ids: &[f64]) -> Vec<f64> {
    let (f, checkpoint) = (&m.module.funcs[0], m.checkpoint.as_ref().expect("weights"));
    let mut weights = m.weights.iter();
    let args = f.args.iter().map(|port| {
        let role = port.role.as_ref().expect("a role");
        let shape = f.ty(port.value).sizes();
        let data = match (role.kind, &*role.name) {
            (RoleKind::Param, _) => {
                let w = weights.next().expect("one weight per parameter");
                let whole: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
                let mut out = vec![0.0; w.shape.iter().product()];
                checkpoint.read(w, &whole, &mut out).unwrap_or_else(|d| panic!("{d}"));
                out.into_iter().map(f64::from).collect()
            }
            (_, "input_ids") => ids.to_vec(),
            (_, "positions") => (0..shape[0]).map(|i| i as f64).collect(),
            (_, other) => panic!("{other}"),
        };
        vec![Tensor::new(&shape, data)]
    });
    let args: Vec<_> = args.collect();
    call(&m.module.mesh, f, &args, Precision::F64).expect("it runs")[0][0].data.to_vec()
}

#[test]
fn text_alone_is_what_the_whole_computes_of_it() {
    for (name, family) in NAMES {
        let m = load(&folder(name), &Shape::new(2, 16, Mode::Infer));
        let m = m.unwrap_or_else(|d| panic!("{name}: {d}"));
        assert_eq!(m.family, family, "{name}");
        let codes: Vec<_> = m.warnings.iter().map(|d| d.code).collect();
        let unread = (name == "qwen3_vl-window").then_some("unread-keys");
        let want: Vec<_> = unread.into_iter().chain(["text-model-only"]).collect();
        assert_eq!(codes, want, "{name}: {:?}", m.warnings);
        let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("a reference");
        let file = SafeTensors::deserialize(&bytes).expect("tensors");
        let (ids, want) = (file.tensor("input_ids").unwrap(), file.tensor("logits").unwrap());
        let ids: Vec<f64> =
            ids.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect();
        let want = want.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
        let (got, want) = (logits(&m, &ids), want.collect::<Vec<_>>());
        assert_eq!(got.len(), want.len(), "{name}");
        let most = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let off = got.iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        // The reference is of f32.
        assert!(off <= 1e-5 * most, "{name}: logits are off by {off:e} of {most:e}");
    }
}

fn facts(config: &Value) -> shardc_frontends::Facts {
    let shape = Shape::new(1, 16, Mode::Infer);
    from_config(config, "config.json", &shape).unwrap_or_else(|d| panic!("{d}")).facts
}

/// Published files leave out what their class knows, and the whole says whether the head is the embedding.
#[test]
fn what_is_left_out_is_what_the_class_assumes() {
    let f = facts(&json!({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 2}}));
    assert_eq!((f.hidden, f.heads, f.kv_heads, f.head_dim, f.ffn), (2560, 8, 4, 256, 9216));
    assert_eq!((f.vocab, f.tied), (262_208, true));
    // Keys of the text model beside those of the towers, as older files have them.
    let f = facts(&json!({"model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 50,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}));
    assert_eq!((f.hidden, f.kv_heads, f.tied), (64, 4, false));
    let of = |whole: Value, text: Value| {
        let mut config = json!({"model_type": "mistral3", "text_config": {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}});
        config["tie_word_embeddings"] = whole;
        config["text_config"]["tie_word_embeddings"] = text;
        facts(&config).tied
    };
    assert!(of(Value::Null, false.into()) && of(true.into(), false.into()));
    assert!(!of(false.into(), true.into()));
    // The head of these is the embedding where either says so, or the text model's class assumes it.
    let of = |kind: &str, whole: Value, text: Value, own: &str| {
        let mut config = json!({"model_type": kind, "text_config": {"model_type": own,
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}});
        config["tie_word_embeddings"] = whole;
        config["text_config"]["tie_word_embeddings"] = text;
        facts(&config).tied
    };
    for kind in ["llava", "qwen2_vl", "qwen2_5_vl"] {
        assert!(of(kind, Value::Null, true.into(), "llama"), "{kind}");
        assert!(of(kind, false.into(), true.into(), "llama"), "{kind}");
        assert!(of(kind, true.into(), false.into(), "llama"), "{kind}");
        assert!(!of(kind, Value::Null, Value::Null, "llama"), "{kind}");
    }
    assert!(of("llava", Value::Null, Value::Null, "gemma2"));
    assert!(!of("llava_next", Value::Null, true.into(), "llama"));
    // Without a text model it is the class's own, whatever stands beside.
    let f = facts(&json!({"model_type": "llava", "hidden_size": 32}));
    assert_eq!((f.hidden, f.heads, f.layers), (4096, 32, 32));
    // One class reads the text of these, whatever type is written there.
    let config = json!({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2"}});
    assert_eq!(facts(&config).kv_heads, 8);
}

/// The loss of routers is that of a class which the whole does not have.
#[test]
fn routers_of_a_text_model_inside_have_no_loss() {
    let of = |routers: bool| {
        let config = json!({"model_type": "llava", "text_config": {"model_type": "mixtral",
            "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 10,
            "output_router_logits": routers, "router_aux_loss_coef": 0.5}});
        let shape = Shape::new(2, 8, Mode::Train);
        let m = from_config(&config, "config.json", &shape).unwrap_or_else(|d| panic!("{d}"));
        shardc_ir::text::print(&m.module)
    };
    assert!(of(true) == of(false));
}

/// Of others it is said what they hold, and where the numbers of pictures are no family's.
#[test]
fn others_are_refused_with_what_they_hold() {
    let refused = |config: Value| {
        let shape = Shape::new(1, 16, Mode::Infer);
        let d = from_config(&config, "config.json", &shape).expect_err("a known type");
        (d.code, format!("{d}"))
    };
    let (code, said) =
        refused(json!({"model_type": "another", "text_config": {"model_type": "qwen3"}}));
    assert!(code == "unknown-model-type" && said.contains("\"model_type\": \"qwen3\""), "{said}");
    let (code, _) =
        refused(json!({"model_type": "llava", "text_config": {"model_type": "another"}}));
    assert_eq!(code, "unknown-model-type");
    let (code, said) =
        refused(json!({"model_type": "gemma3", "text_config": {"hidden_size": "x"}}));
    assert!(code == "config" && said.contains("/text_config/hidden_size"), "{said}");
    let (code, _) = refused(json!({"model_type": "gemma3", "text_config": []}));
    assert_eq!(code, "config");
    let (code, said) = refused(json!({"model_type": "mistral3", "hidden_size": 32}));
    assert!(code == "config" && said.contains("`text_config` is missing"), "{said}");
    // Numbers of pictures are those of text in no plain family.
    let (code, _) =
        refused(json!({"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 50, "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}));
    assert_eq!(code, "rope-type");
}
