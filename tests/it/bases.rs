//! What a model is trained from, and what a saved one keeps of it, where the plan has it otherwise than the folder:
//! tables under other names, config.json that compile changes, files behind links.

use crate::lab::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value as Json, json};
use std::os::unix::fs::symlink;

const IMPORTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imports");
/// What a tied model may store in its place.
const TABLES: [&str; 2] = ["model.embed_tokens.weight", "lm_head.weight"];

/// A fixture whose tied table is stored under these names, the second time of zeros.
fn tied(lab: &Lab, to: &str, names: &[&str]) {
    let from = format!("{FIXTURES}/llama_bias_tied");
    let config = std::fs::read(format!("{from}/config.json")).expect("a config");
    lab.write(&format!("{to}/config.json"), config);
    let bytes = std::fs::read(format!("{from}/model.safetensors")).expect("weights");
    let all = SafeTensors::deserialize(&bytes).expect("weights");
    let mut out: Vec<(String, TensorView)> = vec![];
    let zeros = vec![0; all.tensor(TABLES[0]).expect("the table").data().len()];
    for (name, t) in all.tensors() {
        if name != TABLES[0] {
            out.push((name, t));
            continue;
        }
        for (i, name) in names.iter().enumerate() {
            let data = if i == 0 { t.data() } else { &zeros };
            let t = TensorView::new(Dtype::F32, t.shape().to_vec(), data).expect("a table");
            out.push((name.to_string(), t));
        }
    }
    let bytes = safetensors::serialize(out, None).expect("weights");
    lab.write(&format!("{to}/model.safetensors"), bytes);
    lab.write(&format!("{to}/tokenizer.json"), "{}");
}

fn compiled(lab: &Lab, model: &str, plan: &str) {
    let flags = ["--seq", "16", "--global-batch", "8", "--prove", "no", "-o", plan];
    lab.ok(&[&["compile", model][..], &flags].concat());
}

/// What a run of one step prints and says.
fn ran(lab: &Lab, args: &[&str]) -> [String; 2] {
    let own = ["--steps", "1", "--kernels", "interpreted", "--threads", "1"];
    let out = lab.ok(&[&["run"], args, &own].concat());
    [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned())
}

fn read(lab: &Lab, name: &str) -> Json {
    serde_json::from_slice(&std::fs::read(lab.path(name)).expect("a file")).expect("JSON")
}

#[test]
fn a_tied_table_has_either_name() {
    let lab = Lab::new("either_name");
    let folders = ["embedding", "head"];
    for (name, table) in folders.iter().zip(TABLES) {
        tied(&lab, name, &[table]);
        compiled(&lab, name, &format!("{name}-plan"));
    }
    let loss = |plan: &str, weights: &str| {
        let args = [plan, "--weights", weights, "--format", "json"];
        let [out, _] = ran(&lab, &args);
        let line: Json = serde_json::from_str(out.lines().next().expect("a step")).expect("JSON");
        line["loss"].as_f64().expect("a loss")
    };
    let want = loss("embedding-plan", "embedding");
    for (plan, weights) in
        [("embedding-plan", "head"), ("head-plan", "embedding"), ("head-plan", "head")]
    {
        assert_eq!(loss(plan, weights), want, "{plan} of {weights}");
    }
    // Neither of them is one too few.
    tied(&lab, "neither", &[]);
    for plan in ["embedding-plan", "head-plan"] {
        let args = ["run", plan, "--weights", "neither", "--steps", "1"];
        lab.refuses(&args, 2, "missing-tensor");
    }
    for (folder, [own, other]) in folders.iter().zip([TABLES, [TABLES[1], TABLES[0]]]) {
        let args = ["compile", folder, "--seq", "16", "--freeze", other];
        let said = lab.refuses(&args, 2, "unknown-tensor");
        assert!(said.contains(&format!("`{other}` is tied to `{own}`")), "{said}");
        assert!(said.contains(&format!("name it so: {own}")), "{said}");
    }
}

/// A model that holds one of text is saved whole: what is trained, and the rest as it was.
#[test]
fn towers_of_pictures_stay_as_they_are() {
    let lab = Lab::new("towers");
    for name in ["llava", "gemma3", "qwen2_vl", "smolvlm"] {
        let model = format!("{FIXTURES}/wrappers/{name}");
        let [plan, saved] = ["plan", "saved"].map(|end| format!("{name}-{end}"));
        compiled(&lab, &model, &plan);
        let [_, said] = ran(&lab, &[&plan, "--weights", &model, "--save", &saved]);
        assert!(!said.contains("no tensors but"), "{said}");
        let file = |dir: &str| std::fs::read(format!("{dir}/model.safetensors")).expect("weights");
        let bytes = [file(&model), file(&lab.path(&saved).display().to_string())];
        let [base, own] = bytes.each_ref().map(|b| SafeTensors::deserialize(b).expect("weights"));
        let names = |all: &SafeTensors| {
            let mut names: Vec<String> = all.names().into_iter().map(String::from).collect();
            names.sort();
            names
        };
        assert_eq!(names(&own), names(&base), "{name}");
        let mut kept = 0;
        for n in names(&base) {
            let text = ["language_model", "text_model", "lm_head"].iter().any(|w| n.contains(w));
            let [a, b] = [&base, &own].map(|all| all.tensor(&n).expect("a tensor"));
            let (alike, same) = (a.shape() == b.shape(), a.data() == b.data());
            // qwen2_vl calls its text model `model`, and its tower `visual`.
            let text = text || (name == "qwen2_vl" && !n.contains("visual"));
            assert!(alike && same != text, "{name}: {n}");
            kept += usize::from(same);
        }
        assert!(kept > 5, "{name}: {kept}");
    }
    // Without the folder there is nothing to keep.
    std::fs::create_dir(lab.path("moved")).expect("a folder");
    let model = format!("{FIXTURES}/wrappers/llava");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(format!("{model}/{file}"), lab.path(&format!("moved/{file}")))
            .expect("a file");
    }
    compiled(&lab, "moved", "moved-plan");
    std::fs::remove_dir_all(lab.path("moved")).expect("removed");
    let [_, said] = ran(&lab, &["moved-plan", "--save", "moved-saved"]);
    assert!(said.contains("no tensors but those of its text model"), "{said}");
}

/// Layers that predict tokens behind the next have copies of both tables in published files: a saved model has them,
/// too, as they are after training.
#[test]
fn copies_of_tables_are_saved() {
    let lab = Lab::new("copies");
    for (name, layer, head) in [("deepseek_v3_mtp", 1, TABLES[1]), ("glm4_moe_mtp", 2, TABLES[0])] {
        let model = format!("{FIXTURES}/{name}");
        let [plan, saved] = ["plan", "saved"].map(|end| format!("{name}-{end}"));
        let flags = ["--seq", "16", "--global-batch", "8", "--mtp", "0.3", "-o", &plan];
        lab.ok(&[&["compile", &model][..], &flags].concat());
        ran(&lab, &[&plan, "--weights", &model, "--save", &saved]);
        let file = |dir: &str| std::fs::read(format!("{dir}/model.safetensors")).expect("weights");
        let bytes = [file(&model), file(&lab.path(&saved).display().to_string())];
        let [base, own] = bytes.each_ref().map(|b| SafeTensors::deserialize(b).expect("weights"));
        let names = |all: &SafeTensors| {
            all.names().into_iter().map(String::from).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(names(&own), names(&base), "{name}");
        for (copy, table) in [("embed_tokens", TABLES[0]), ("shared_head.head", head)] {
            let copy = format!("model.layers.{layer}.{copy}.weight");
            let of = |all: &SafeTensors, n: &str| all.tensor(n).expect("a tensor").data().to_vec();
            assert_eq!(of(&own, &copy), of(&own, table), "{name}: {copy}");
            assert_ne!(of(&own, &copy), of(&base, &copy), "{name}: {copy}");
        }
    }
}

/// What compile says itself of the weights is no other model.
#[test]
fn tokenizers_stay_where_compile_changes_the_config() {
    let lab = Lab::new("changed_config");
    tied(&lab, "untied", &TABLES);
    lab.config("llama_mha", json!({ "quantization_config": { "quant_method": "gptq" } }));
    std::fs::create_dir(lab.path("quantized")).expect("a folder");
    std::fs::rename(lab.path("config.json"), lab.path("quantized/config.json")).expect("moved");
    lab.write("quantized/tokenizer.json", "{}");
    for (model, key, value) in [
        ("untied", "tie_word_embeddings", json!(false)),
        ("quantized", "quantization_config", Json::Null),
    ] {
        let (plan, saved) = (format!("{model}-plan"), format!("{model}-saved"));
        compiled(&lab, model, &plan);
        let [_, said] = ran(&lab, &[&plan, "--save", &saved]);
        assert!(!said.contains("tokenizer"), "{said}");
        assert!(lab.path(&format!("{saved}/tokenizer.json")).exists(), "{model}: {said}");
        assert_eq!(read(&lab, &format!("{saved}/config.json"))[key], value, "{model}");
    }
}

/// A cache has links to files that lie elsewhere: what belongs to a model lies beside the link.
#[test]
fn an_archive_may_be_a_link() {
    let lab = Lab::new("linked_archive");
    let bytes = std::fs::read(format!("{IMPORTS}/llama.pt2")).expect("an archive");
    lab.write("hub/blobs/abc.pt2", bytes);
    let config = json!({ "model_type": "x", "quantization_config": { "bits": 4 } });
    for snapshot in ["snap", "snap2"] {
        lab.write(&format!("hub/{snapshot}/config.json"), config.to_string());
        symlink("../blobs/abc.pt2", lab.path(&format!("hub/{snapshot}/m.pt2"))).expect("a link");
    }
    lab.write("hub/snap/tokenizer.json", "{}");
    lab.write("hub/blobs/tokens", "{}");
    symlink("../blobs/tokens", lab.path("hub/snap2/tokenizer.json")).expect("a link");
    compiled(&lab, "hub/snap/m.pt2", "plan");
    let stored = read(&lab, "plan/plan.json");
    let origin = stored["origin"].as_str().expect("a folder");
    assert!(origin.ends_with("hub/snap") && stored["name"] == "m", "{stored}");
    let [_, said] = ran(&lab, &["plan", "--save", "saved"]);
    assert!(!said.contains("tokenizer") && lab.path("saved/tokenizer.json").exists(), "{said}");
    // What is saved is not quantized.
    let saved = read(&lab, "saved/config.json");
    assert!(saved["model_type"] == "x" && saved["quantization_config"].is_null(), "{saved}");
    // Why a tokenizer that is there is not kept.
    compiled(&lab, "hub/snap2/m.pt2", "plan2");
    let [_, said] = ran(&lab, &["plan2", "--save", "saved2"]);
    let why = "tokenizer.json is a link out of the folder";
    let line = said.lines().find(|l| l.contains("will have no tokenizer")).expect("a line");
    assert!(line.ends_with(why), "{said}");
    // The same of a config.json alone.
    let own = lab.config("llama_mha", json!({}));
    std::fs::rename(lab.path(&own), lab.path("hub/blobs/def")).expect("moved");
    std::fs::create_dir(lab.path("hub/snap3")).expect("a folder");
    symlink("../blobs/def", lab.path("hub/snap3/config.json")).expect("a link");
    compiled(&lab, "hub/snap3/config.json", "plan3");
    let stored = read(&lab, "plan3/plan.json");
    let origin = stored["origin"].as_str().expect("a folder");
    assert!(origin.ends_with("hub/snap3") && stored["name"] == "snap3", "{stored}");
}
