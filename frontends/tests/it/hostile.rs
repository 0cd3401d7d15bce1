//! Files and configs that lie: a diagnostic with its code and place, never a panic.

#![allow(clippy::single_range_in_vec_init)]

use serde_json::{Value, json};
use shardc_frontends::{Checkpoint, Shape, load};
use shardc_ir::diag::{Diag, Exit};
use shardc_ir::plan::Mode;
use shardc_ir::weights::{Init, Weight};
use std::fs;
use std::path::{Path, PathBuf};

/// A folder that is removed at the end of the test.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Folder {
        let dir =
            std::env::temp_dir().join(format!("shardc-hostile-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Folder(dir)
    }
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.0.join(name), bytes).unwrap();
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A safetensors file with this header and so many bytes of data.
fn safetensors(header: &Value, data: usize) -> Vec<u8> {
    let text = header.to_string();
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

fn tensor(dtype: &str, shape: &[usize], start: usize, end: usize) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// The config of a fixture with some keys replaced.
pub(crate) fn changed(name: &str, changes: &Value) -> Value {
    let text = fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (k, v) in changes.as_object().unwrap() {
        config[k] = v.clone();
    }
    config
}

/// A diagnostic that names the file which it is about.
pub(crate) fn names<'a>(d: &'a Diag, file: &str) -> &'a Diag {
    assert!(d.place.as_ref().is_some_and(|p| p.contains(file)), "{file} is not named: {d}");
    d
}

pub(crate) fn shape() -> Shape {
    Shape::new(2, 8, Mode::Train)
}

pub(crate) fn load_changed(test: &str, name: &str, changes: Value) -> Result<Vec<Diag>, Diag> {
    let dir = Folder::new(test);
    dir.write("config.json", changed(name, &changes).to_string());
    load(&dir.0, &shape()).map(|m| m.warnings)
}

#[test]
fn headers_that_lie() {
    let dir = Folder::new("headers");
    let one = |h: Value, data| {
        dir.write("model.safetensors", safetensors(&h, data));
        let d = Checkpoint::open(&dir.0).unwrap_err();
        assert!(d.place.as_ref().unwrap().contains("model.safetensors") && !d.help.is_empty());
        d
    };
    let a = || tensor("F32", &[2], 0, 8);
    assert_eq!(one(json!({"a": a()}), 7).code, "truncated");
    assert_eq!(one(json!({"a": a()}), 9).code, "safetensors");
    assert_eq!(one(json!({"a": a(), "b": tensor("F32", &[2], 4, 12)}), 12).code, "safetensors");
    assert_eq!(one(json!({"a": a(), "b": tensor("F32", &[2], 12, 20)}), 20).code, "safetensors");
    assert_eq!(one(json!({"a": tensor("F32", &[3], 0, 8)}), 8).code, "safetensors");
    assert_eq!(one(json!({"a": tensor("F32", &[2], 8, 0)}), 8).code, "safetensors");
    assert_eq!(one(json!({"a": tensor("F32", &[1 << 40, 1 << 40], 0, 8)}), 8).code, "safetensors");
    assert_eq!(one(json!({"a": tensor("F32", &[2], 0, 1 << 60)}), 8).code, "safetensors");
    assert_eq!(one(json!([1, 2]), 0).code, "safetensors");
    let d = one(json!({"a": tensor("F9", &[2], 0, 8)}), 8);
    assert_eq!((d.code, d.exit), ("tensor-dtype", Exit::Unsupported));
}

#[test]
fn header_lengths_that_lie() {
    let dir = Folder::new("lengths");
    let one = |bytes: &[u8]| {
        dir.write("model.safetensors", bytes);
        names(&Checkpoint::open(&dir.0).unwrap_err(), "/model.safetensors").code
    };
    assert_eq!(one(b""), "truncated");
    assert_eq!(one(&[1, 2, 3]), "truncated");
    assert_eq!(one(&u64::MAX.to_le_bytes()), "safetensors");
    assert_eq!(one(&[&99_000_000u64.to_le_bytes()[..], b"{}"].concat()), "truncated");
    assert_eq!(one(&[&2u64.to_le_bytes()[..], b"{\xff"].concat()), "safetensors");
    fs::remove_file(dir.0.join("model.safetensors")).unwrap();
    fs::create_dir(dir.0.join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(&dir.0).unwrap_err().code, "file");
}

#[test]
fn an_index_cannot_leave_its_folder() {
    let dir = Folder::new("index");
    dir.write("good.safetensors", safetensors(&json!({"near": tensor("F32", &[1], 0, 4)}), 4));
    let one = |file: Value| {
        let index = json!({"weight_map": {"nearly": file}});
        dir.write("model.safetensors.index.json", index.to_string());
        let d = Checkpoint::open(&dir.0).unwrap_err();
        names(
            &d,
            if d.code == "file" { "/absent.safetensors" } else { "/model.safetensors.index.json" },
        );
        d
    };
    for bad in ["../good.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b"] {
        assert_eq!(one(json!(bad)).code, "index", "{bad}");
    }
    assert_eq!(one(json!(7)).code, "index");
    assert_eq!(one(json!("absent.safetensors")).code, "file");
    let d = one(json!("good.safetensors"));
    assert_eq!(d.code, "missing-tensor");
    assert!(d.help[0].contains("`near`"), "{d}");
    dir.write("model.safetensors.index.json", "{\"weight_map\": 3}");
    let index =
        || names(&Checkpoint::open(&dir.0).unwrap_err(), "/model.safetensors.index.json").code;
    assert_eq!(index(), "index");
    dir.write("model.safetensors.index.json", "[".repeat(100_000));
    assert_eq!(index(), "index");
}

#[test]
fn weights_that_do_not_fit_the_config() {
    let dir = Folder::new("weights");
    fs::copy(fixture("llama_mha/model.safetensors"), dir.0.join("model.safetensors")).unwrap();
    let one = |changes: Value| {
        dir.write("config.json", changed("llama_mha", &changes).to_string());
        load(&dir.0, &shape())
    };
    assert!(one(json!({})).unwrap().warnings.is_empty());
    let d = one(json!({"intermediate_size": 64})).unwrap_err();
    assert_eq!(d.code, "tensor-shape");
    assert!(d.place.unwrap().contains("model.safetensors") && d.message.contains("[48, 32]"));
    let d = one(json!({"num_hidden_layers": 3})).unwrap_err();
    assert_eq!(
        (d.code, &*d.message),
        ("missing-tensor", "tensor `model.layers.2.input_layernorm.weight` is missing")
    );
    assert!(d.help[0].contains("model.layers.1.input_layernorm.weight"), "{d:?}");
    names(&d, "/model.safetensors");
    assert!(d.why[0].starts_with("9 are missing"), "{d:?}");
    let m = one(json!({"num_hidden_layers": 1})).unwrap();
    assert_eq!(m.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["unused-tensors"]);
    names(&m.warnings[0], "/model.safetensors");
}

fn weight(tensor: &str, shape: &[usize]) -> Weight {
    Weight {
        param: tensor.into(),
        tensor: tensor.into(),
        tensor_shape: shape.into(),
        part: None,
        shape: shape.into(),
        init: Init::Zeros,
        matrix: shape.len() == 2,
        tp_dim: None,
        experts: None,
    }
}

#[test]
fn element_types_and_slices() {
    let dir = Folder::new("types");
    let header = json!({"half": tensor("F16", &[2], 0, 4), "brain": tensor("BF16", &[2], 4, 8),
        "f8": tensor("F8_E4M3", &[2], 8, 10), "word": tensor("I16", &[1], 10, 12)});
    let mut bytes = safetensors(&header, 0);
    bytes.extend([0x00, 0x3e, 0x00, 0xc0, 0xc0, 0x3f, 0x00, 0xc0, 0, 0, 0, 0]);
    let path = dir.write("model.safetensors", &bytes);
    let c = Checkpoint::open(&dir.0).unwrap().unwrap();
    let mut two = [0.0; 2];
    for name in ["half", "brain"] {
        c.read(&weight(name, &[2]), &[0..2], &mut two).unwrap();
        assert_eq!(two, [1.5, -2.0], "{name}");
    }
    let d = c.read(&weight("f8", &[2]), &[0..2], &mut two).unwrap_err();
    assert_eq!((d.code, d.exit), ("tensor-dtype", Exit::Unsupported));
    assert_eq!(c.check(&[weight("word", &[1])]).unwrap_err().code, "tensor-dtype");
    let slice = |ranges: &[std::ops::Range<usize>], n| {
        let read = c.read(&weight("half", &[2]), ranges, &mut vec![0.0; n]);
        read.map_err(|d| names(&d, "/model.safetensors").code)
    };
    let d = c.read_ranges("half", &[0..3], &mut [0.0; 3]).unwrap_err();
    assert_eq!(names(&d, "/model.safetensors").code, "slice");
    let d = c.read_ranges("none", &[0..3], &mut [0.0; 3]).unwrap_err();
    assert_eq!(names(&d, "/model.safetensors").code, "missing-tensor");
    let d = c.read(&weight("half", &[3]), &[0..3], &mut [0.0; 3]).unwrap_err();
    assert_eq!(names(&d, "/model.safetensors").code, "tensor-shape");
    let stack = Weight { experts: Some(3), ..weight("{}", &[2]) };
    let d = c.read(&stack, &[0..2], &mut [0.0; 2]).unwrap_err();
    assert_eq!(names(&d, "/model.safetensors").code, "slice");
    assert_eq!(slice(&[1..3], 2), Err("slice"));
    assert_eq!(slice(&[0..2], 1), Err("slice"));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 2..1;
    assert_eq!(slice(&[backwards], 0), Err("slice"));
    assert_eq!(slice(&[0..1, 0..1], 1), Err("slice"));
    assert_eq!(slice(&[1..1], 0), Ok(()));
    fs::write(&path, &bytes[..bytes.len() - 10]).unwrap();
    assert_eq!(slice(&[0..2], 2), Err("truncated"));
}

#[test]
fn configs_that_lie() {
    let code = |changes: Value| {
        let d = load_changed("configs", "llama_mha", changes).unwrap_err();
        names(&d, "/config.json");
        assert!(!d.help.is_empty(), "{d}");
        (d.code, d.place.unwrap().rsplit(": ").next().unwrap().to_string())
    };
    let config = |key: &str| ("config", format!("/{key}"));
    for token in
        [json!(64), json!(-65), json!(1.5), json!("2"), json!(true), json!([2]), json!(1u64 << 63)]
    {
        assert_eq!(code(json!({ "pad_token_id": token })), config("pad_token_id"), "{token}");
    }
    assert_eq!(code(json!({"num_attention_heads": 0})), config("num_attention_heads"));
    assert_eq!(code(json!({"num_attention_heads": -4})), config("num_attention_heads"));
    assert_eq!(code(json!({"hidden_size": "32"})), config("hidden_size"));
    assert_eq!(code(json!({"hidden_size": 32.5})), config("hidden_size"));
    assert_eq!(code(json!({"hidden_size": null})), config("hidden_size"));
    assert_eq!(code(json!({"vocab_size": 1u64 << 40})), config("vocab_size"));
    assert_eq!(code(json!({"num_key_value_heads": 3})), config("num_key_value_heads"));
    assert_eq!(code(json!({"hidden_size": 33, "head_dim": null})), config("hidden_size"));
    assert_eq!(code(json!({"num_hidden_layers": 1u32 << 30})), config("num_hidden_layers"));
    assert_eq!(code(json!({"head_dim": 1u32 << 20})), config("head_dim"));
    assert_eq!(code(json!({"head_dim": 7})), config("head_dim"));
    assert_eq!(code(json!({"rms_norm_eps": 0})), config("rms_norm_eps"));
    assert_eq!(code(json!({"attention_bias": 1})), config("attention_bias"));
    assert_eq!(
        code(json!({"rope_parameters": {"rope_theta": -1}})),
        config("rope_parameters/rope_theta")
    );
    let big = json!({"hidden_size": 1u32 << 31, "vocab_size": 1u32 << 31});
    assert_eq!(code(big).0, "config");
    assert_eq!(code(json!({"hidden_act": "relu"})), ("activation", "/hidden_act".into()));
    assert_eq!(
        code(json!({"rope_scaling": {"type": "dynamic"}})),
        ("rope-type", "/rope_scaling/type".into())
    );
    let long = |short: Value, long: Value| {
        code(
            json!({"rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long}}),
        )
    };
    let four = json!([1, 1, 1, 1.5]);
    let key = |k: &str| config(&format!("rope_scaling/{k}"));
    assert_eq!(long(Value::Null, four.clone()), key("short_factor"));
    assert_eq!(long(json!([1, 0, 1, 1]), four.clone()), key("short_factor"));
    assert_eq!(long(four, json!([1])), key("long_factor"));
    assert_eq!(code(json!({"model_type": "lama"})).0, "unknown-model-type");
    assert_eq!(code(json!({"is_causal": false})).0, "unsupported-config");
    // What is said is of the key that was read, and null is no absence.
    let d = load_changed("heads", "deepseek_v3", json!({"qk_rope_head_dim": 3})).unwrap_err();
    let said = names(&d, "/qk_rope_head_dim").to_string();
    assert!(said.contains("use qk_rope_head_dim 4 or 2"), "{said}");
    let d = load_changed("nulls", "llama_mha", json!({"vocab_size": null})).unwrap_err();
    assert!(d.message == "`vocab_size` is null" && d.help.len() == 1, "{d}");
    let layer = json!({"0": {"rms_norm_eps": 0.1}});
    assert_eq!(code(json!({ "per_layer_config": layer })).0, "unsupported-config");
}

/// What a family assumes is checked as what is written.
#[test]
fn padding_that_is_assumed_is_a_token() {
    let cases = [("phi3", 32000, 32001), ("olmo2", 1, 2), ("gemma2", 0, 1), ("gemma3", 0, 1)];
    for (name, few, enough) in cases {
        let dir = Folder::new(&format!("padding-{name}"));
        let load = |vocab: usize| {
            let mut config = changed(name, &json!({ "vocab_size": vocab }));
            config.as_object_mut().unwrap().remove("pad_token_id");
            dir.write("config.json", config.to_string());
            load(&dir.0, &shape())
        };
        let d = load(few).err().unwrap_or_else(|| panic!("{name}: {few} tokens"));
        assert_eq!(d.code, "config", "{name}: {d}");
        assert!(few == 0 || names(&d, "/pad_token_id").message.contains("absent"), "{d}");
        assert!(load(enough).is_ok(), "{name}");
    }
}

#[test]
fn configs_that_are_no_objects() {
    let dir = Folder::new("objects");
    for text in ["", "{", "[]", "3", "{\"model_type\": 3}", "{\"hidden_size\": 1e999}"] {
        dir.write("config.json", text);
        assert_eq!(load(&dir.0, &shape()).unwrap_err().code, "config", "{text}");
    }
    dir.write("config.json", "[".repeat(1 << 20));
    assert_eq!(load(&dir.0, &shape()).unwrap_err().code, "config");
    assert_eq!(load(&dir.0.join("absent"), &shape()).unwrap_err().code, "file");
}

#[test]
fn layers_and_windows() {
    let windows =
        |c: Value| load_changed("windows", "qwen3", c).map_err(|d| (d.code, d.place.unwrap()));
    let sliding = json!(["full_attention", "sliding_attention"]);
    let on = json!({"use_sliding_window": true, "sliding_window": 4, "layer_types": sliding});
    assert!(windows(on).is_ok());
    let (code, place) = windows(json!({"layer_types": sliding})).unwrap_err();
    assert!(code == "config" && place.ends_with("/layer_types/1"), "{place}");
    assert_eq!(windows(json!({"layer_types": ["full_attention"]})).unwrap_err().0, "config");
    let other = json!({"layer_types": ["full_attention", "chunked_attention"]});
    assert_eq!(windows(other).unwrap_err().0, "unsupported-config");
}

/// As in transformers, whose attention of Gemma 3 takes no softcap.
#[test]
fn gemma3_has_no_softcap_of_scores() {
    let text = |c: Value| {
        let config = changed("gemma3", &c);
        let m = shardc_frontends::from_config(&config, "config.json", &shape()).expect("a model");
        shardc_ir::text::print(&m.module)
    };
    let plain = text(json!({}));
    assert_eq!(text(json!({"attn_logit_softcapping": 1.5})), plain);
    assert_ne!(text(json!({"final_logit_softcapping": 1.5})), plain);
}

#[test]
fn gemma2_softcaps_and_windows() {
    let load =
        |c: Value| load_changed("gemma2", "gemma2", c).map_err(|d| (d.code, d.place.unwrap()));
    for key in ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"] {
        for bad in [json!(0), json!(-1.5), json!("50"), json!([])] {
            let (code, place) = load(json!({ key: bad })).unwrap_err();
            assert!(code == "config" && place.ends_with(key), "{place}: {code}");
        }
        assert!(load(json!({ key: null })).is_ok());
    }
    let (code, place) = load(json!({"layer_types": null, "sliding_window": null})).unwrap_err();
    assert!(code == "config" && place.ends_with("/sliding_window"), "{place}: {code}");
    // Transformers' class of Gemma 2 does not read it, that of Gemma 3 does.
    let both = json!({"use_bidirectional_attention": true});
    assert_eq!(load(both.clone()).unwrap().len(), 1);
    let other = load_changed("gemma3-bidirectional", "gemma3", both).unwrap_err();
    assert_eq!(other.code, "unsupported-config");
    assert_eq!(load(json!({"hidden_activation": "gelu"})).unwrap_err().0, "activation");
}

#[test]
fn gpt2_switches_and_warnings() {
    let load = |c: Value| load_changed("gpt2", "gpt2", c);
    let warnings = load(json!({"resid_pdrop": 0.1})).unwrap();
    assert_eq!(warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["dropout-ignored"]);
    assert_eq!(load(json!({"activation_function": "relu"})).unwrap_err().code, "activation");
    assert_eq!(load(json!({"scale_attn_weights": false})).unwrap_err().code, "unsupported-config");
    assert_eq!(load(json!({"n_positions": 4})).unwrap_err().code, "sequence-length");
    let long = load_changed("long", "llama_mha", json!({"max_position_embeddings": 4})).unwrap();
    assert_eq!(long[0].code, "sequence-length");
}

/// Numbers in a fixed order, different for every seed.
fn random(seed: u32) -> impl FnMut(usize) -> usize {
    let mut at = 0;
    move |below| {
        at += 1;
        shardc_ir::rng::philox([at, 0, 0, 0], [seed, 0])[0] as usize % below
    }
}

#[test]
fn damaged_configs_do_not_panic() {
    let dir = Folder::new("damaged-configs");
    let values =
        ["0", "1", "-1", "3", "null", "true", "\"x\"", "[]", "{}", "1e300", "2147483648", "0.5"];
    for (seed, name) in ["llama_gqa", "llama_yarn", "qwen3", "gpt2"].into_iter().enumerate() {
        let mut random = random(seed as u32);
        let whole: Value =
            serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
        for _ in 0..300 {
            let mut config = whole.clone();
            for _ in 0..1 + random(2) {
                let mut object = config.as_object_mut().unwrap();
                if random(4) == 0 && object.contains_key("rope_scaling") {
                    let Some(inner) = object["rope_scaling"].as_object_mut() else { continue };
                    object = inner;
                }
                if let Some(v) = object.values_mut().nth(random(30)) {
                    *v = serde_json::from_str(values[random(values.len())]).unwrap();
                }
            }
            dir.write("config.json", config.to_string());
            if let Err(d) = load(&dir.0, &shape()) {
                assert!(!d.help.is_empty(), "{d}\n{config}");
                names(&d, "/config.json");
            }
        }
    }
}

#[test]
fn damaged_headers_do_not_panic() {
    let dir = Folder::new("damaged-headers");
    let config = fs::read(fixture("llama_mha/config.json")).unwrap();
    dir.write("config.json", config);
    let whole = fs::read(fixture("llama_mha/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut random = random(9);
    for _ in 0..500 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random(3) {
            // A digit or a bracket does more harm than a random byte.
            bytes[random(header)] = b"0123456789[]{},:\"\0\xff"[random(19)];
        }
        if random(4) == 0 {
            bytes.truncate(random(whole.len()));
        }
        dir.write("model.safetensors", bytes);
        if let Err(d) = load(&dir.0, &shape()) {
            assert!(!d.help.is_empty(), "{d}");
            names(&d, "/model.safetensors");
        }
    }
}
