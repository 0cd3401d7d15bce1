//! What is given in the place of a model: it is called by what it is, with the road to one.

use super::hostile::{Folder, changed, load_changed, names, shape};
use serde_json::json;
use shardc_frontends::load;
use shardc_ir::diag::{Diag, Exit};
use std::fs;

/// Files that are no models are called by what they are, with the road from there; a config may have any name.
#[test]
fn files_of_other_kinds() {
    let dir = Folder::new("foreign");
    for (name, what, road) in [
        ("m.pt", "torch.save", "save_pretrained"),
        ("m.pth", "torch.save", "torch.export.export"),
        ("m.gguf", "llama.cpp", "gguf_file="),
        ("m.onnx", "ONNX", "torch.export.export"),
        ("m.mlir", "MLIR", "torch.export.export"),
        ("train.py", "Python", "torch.export.export"),
        ("model.safetensors", "weights, without", "give the folder"),
        ("adapter_config.json", "an adapter of PEFT", "merge_and_unload"),
        ("params.json", "Meta's or Mistral's", "Hugging Face's format"),
        ("model_index.json", "a diffusers pipeline", "torch.export.export"),
    ] {
        let says = |d: Diag, at: &str| {
            let all = format!("{d}");
            assert!(all.contains(what) && all.contains(road), "{name}: {all}");
            names(&d, at).code
        };
        let file = dir.write(name, "{\"dim\": 4}");
        assert_eq!(says(load(&file, &shape()).unwrap_err(), name), "not-a-model", "{name}");
        assert_eq!(says(load(&dir.0, &shape()).unwrap_err(), "config.json"), "file", "{name}");
        fs::remove_file(&file).unwrap();
    }
    let config = changed("llama_mha", &json!({})).to_string();
    assert!(load(&dir.write("params.json", config), &shape()).is_ok());
    let d = load(&dir.0.join("absent.onnx"), &shape()).unwrap_err();
    assert_eq!(d.code, "file", "{d}");
}

/// A model of an unknown type that holds one of a known family says so, and what to do.
#[test]
fn models_that_hold_a_known_one() {
    for (own, known) in [("deepseek_v3", "deepseek_v3"), ("qwen3_vl_text", "qwen3")] {
        let config = json!({
            "model_type": "kimi_vl", "text_config": {"model_type": own, "hidden_size": 32}
        });
        let dir = Folder::new(&format!("held-{own}"));
        let d = load(&dir.write("config.json", config.to_string()), &shape()).unwrap_err();
        let all = format!("{d}");
        assert_eq!((d.code, d.exit), ("unknown-model-type", Exit::Unsupported), "{own}");
        let words = [&*format!("\"model_type\": \"{known}\""), "text_config", "of a new folder"];
        assert!(words.iter().all(|w| all.contains(w)), "{all}");
    }
    let d = load_changed("held-none", "llama_mha", json!({"model_type": "whisper"})).unwrap_err();
    assert!(!format!("{d}").contains("text model"), "{d}");
}
