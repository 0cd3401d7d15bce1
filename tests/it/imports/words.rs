//! What is said of archives that cannot be imported: the cause, and the road from there.

use super::file;
use super::files::{Scratch, edited, import, nodes, refused};
use crate::lab::Lab;
use serde_json::{Value, json};
use shardc_frontends::import::Imported;
use shardc_ir::diag::Diag;
use shardc_ir::func::{Role, RoleKind};

fn tensor(name: &str, of: &str) -> Value {
    json!({ "name": name, "arg": { "as_tensor": { "name": of } }, "kind": 1 })
}

/// `nano` with a last op, made of the loss.
fn after_the_loss(op: &str, other: Value) -> Result<Imported, Diag> {
    let scratch = Scratch::new("factor");
    edited(&scratch, "nano.pt2", |j| {
        let loss = nodes(j).iter().find(|n| n["target"].to_string().contains("cross_entropy"));
        let mut made = loss.expect("a loss").clone();
        let of = made["outputs"][0]["as_tensor"]["name"].as_str().expect("a name").to_string();
        made["target"] = json!(format!("torch.ops.aten.{op}"));
        made["inputs"] = json!([tensor("self", &of), other]);
        made["outputs"][0]["as_tensor"]["name"] = json!("made");
        nodes(j).push(made);
    })
}

#[test]
fn a_loss_of_which_something_is_made() {
    let number = |x: f64| json!({ "name": "other", "arg": { "as_float": x }, "kind": 1 });
    // Nobody shows what is made: the loss is what it was.
    let bias = || tensor("other", "p_head_bias");
    for (op, other) in [
        ("div.Tensor", number(4.0)),
        ("mul.Tensor", number(2.0)),
        ("add.Tensor", bias()),
        ("mul.Tensor", bias()),
    ] {
        let m = after_the_loss(op, other).unwrap_or_else(|d| panic!("{op}: {d}"));
        assert!(m.one_microbatch.is_none(), "{op}");
        let results = &m.source.module.funcs[0].results;
        assert_eq!(results[0].role, Some(Role::new(RoleKind::Sum, "loss")), "{op}");
    }
}

/// A buffer whose numbers the archive does not have is told as before.
#[test]
fn numbers_that_an_archive_lacks() {
    let scratch = Scratch::new("lacks");
    let mut all = super::files::members("llama.pt2");
    all.retain(|m| !m.0.contains("constants/") || m.0.ends_with(".json"));
    let is = |m: &&mut (String, Vec<u8>)| m.0.ends_with("model_constants_config.json");
    if let Some(config) = all.iter_mut().find(is) {
        config.1 = b"{\"config\": {}}".to_vec();
    }
    let d = refused(import(&scratch.write(&super::files::zip(&all))));
    assert!(d.code == "import-op" && d.message.contains("no numbers of"), "{d}");
    assert!(d.help.iter().any(|h| h.contains("keep buffers on the CPU")), "{d}");
}

/// `strict=True` leaves one name of a tied tensor.
#[test]
fn tied_weights_of_a_strict_export() {
    let scratch = Scratch::new("strict");
    let d = refused(edited(&scratch, "nano.pt2", |j| {
        let text = j["graph_module"]["graph"]["nodes"].to_string();
        let one = text.replace("\"p_head_weight\"", "\"p_wte_weight\"");
        j["graph_module"]["graph"]["nodes"] = serde_json::from_str(&one).expect("JSON");
    }));
    assert_eq!(d.code, "merged-parameters", "{d}");
    assert!(d.help.iter().any(|h| h.contains("tied: export with strict=False")), "{d}");
}

/// What a step does not keep is said; another write into a buffer is refused.
#[test]
fn batch_norm_keeps_no_statistics() {
    let lab = Lab::new("imports-statistics");
    let archive = file("normed.pt2").display().to_string();
    let out = lab.ok(&["compile", &archive, "-o", "plan"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("warning[batch-statistics]") && said.contains("update_bn"), "{said}");
    assert_eq!(said.matches("[batch-statistics]").count(), 1, "{said}");
    let scratch = Scratch::new("statistics");
    let d = refused(edited(&scratch, "normed.pt2", |j| {
        let text = j["graph_module"]["graph"]["nodes"].to_string();
        let other = text.replace("num_batches_tracked", "running_mean");
        assert_ne!(text, other);
        j["graph_module"]["graph"]["nodes"] = serde_json::from_str(&other).expect("JSON");
    }));
    assert!(d.code == "import-op" && d.message.contains("it writes into the buffer"), "{d}");
}

#[test]
fn an_archive_without_a_loss() {
    let lab = Lab::new("imports-no-loss");
    // The loss is no output any more.
    let scratch = Scratch::new("no-loss");
    let _ = edited(&scratch, "toy.pt2", |j| {
        let graph = &mut j["graph_module"];
        let outputs = graph["graph"]["outputs"].as_array_mut().expect("outputs");
        outputs.remove(0);
        graph["signature"]["output_specs"].as_array_mut().expect("outputs").remove(0);
    });
    let archive = scratch.path().display().to_string();
    let said = lab.refuses(&["compile", &archive, "-o", "plan"], 2, "no-loss");
    assert!(said.contains("the archive returns no loss to train"), "{said}");
    assert!(said.contains("returns its loss first") && !said.contains("sum \""), "{said}");
    lab.ok(&["compile", &archive, "--mode", "infer", "-o", "plan"]);
}

/// The lines of the page for unknown types make an archive of a folder with a config.json, for other rows and tokens.
#[test]
fn lines_of_a_page_make_an_archive() {
    let what = "archives by the lines of a page";
    if !crate::torch::has_torch() {
        return shardc_testing::skip(shardc_testing::Tool::Torch, what);
    }
    let page = include_str!("../../../docs/errors/unknown-model-type.md");
    let lines = page.split("```python\n").nth(1).and_then(|p| p.split("```").next());
    let sizes = json!({ "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64 });
    let two = json!({ "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2 });
    for (kind, class, mut config) in
        [("opt", "OPTForCausalLM", sizes), ("t5", "T5ForConditionalGeneration", two)]
    {
        let lab = Lab::new(&format!("page-{kind}"));
        lab.write("make.py", lines.expect("lines of Python"));
        config["model_type"] = json!(kind);
        config["architectures"] = json!([class]);
        lab.write("model/config.json", config.to_string());
        let mut c = std::process::Command::new(crate::torch::python());
        let made = c.current_dir(lab.path("")).args(["make.py", "model"]).output();
        let made = made.expect("Python starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        lab.ok(&["compile", "model.pt2", "--mesh", "tp=2", "--seq", "32", "-o", "p"]);
    }
}
