//! Plans of transformers, each with another word for one name, beside what two ranks of gloo do with it. What these do is in
//! `tests/audit/words.json`, which `tests/audit/words.py` writes.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};

const AUDIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit");

/// Of how many plans one is taken in a run.
const SAMPLE: usize = 24;

fn stored(file: &str) -> Json {
    let text = std::fs::read_to_string(format!("{AUDIT}/{file}")).expect("a file");
    serde_json::from_str(&text).expect("JSON")
}

/// The config of a fixture, with some keys that are others.
fn config(family: &str, changes: &Json) -> Json {
    let text =
        std::fs::read_to_string(format!("{FIXTURES}/{family}/config.json")).expect("a fixture");
    let mut config: Json = serde_json::from_str(&text).expect("JSON");
    for (key, value) in changes.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

/// The exit status of an audit of a plan on two ranks, and what it says.
fn status(lab: &Lab, plan: &Json) -> (i32, String) {
    lab.write("plan.json", json!({ "tp_size": 2, "tp_plan": plan }).to_string());
    let args = ["audit", "transformers", "plan.json", "--model", "config.json", "--format", "json"];
    let out = lab.shardc(&args);
    let said = [out.stdout, out.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
    (out.status.code().expect("a status"), said.concat())
}

#[test]
fn each_word_for_each_name_is_what_two_ranks_do() {
    let lab = Lab::new("audit-words-of-plans");
    let all = stored("words.json");
    let words: Vec<&str> =
        all["words"].as_array().expect("words").iter().filter_map(Json::as_str).collect();
    let mut at = 0;
    let mut counts = [0; 3];
    for (family, of) in all["models"].as_object().expect("models") {
        lab.write("config.json", config(family, &of["config"]).to_string());
        assert_eq!(status(&lab, &of["plan"]).0, 0, "{family}: its own plan");
        for (name, letters) in of["names"].as_object().expect("names") {
            for (word, letter) in words.iter().zip(letters.as_str().expect("letters").chars()) {
                let (allowed, n): (&[i32], usize) = match letter {
                    's' => (&[0], 0),
                    // A sum that is missing or twice, or a style that its module cannot have.
                    'g' => (&[1, 2], 1),
                    'e' | 'l' => (&[2], 2),
                    _not_run => continue,
                };
                at += 1;
                if !shardc_testing::taken(at, SAMPLE) {
                    continue;
                }
                counts[n] += 1;
                let mut plan = of["plan"].clone();
                plan[name] = (*word).into();
                let (code, said) = status(&lab, &plan);
                assert!(allowed.contains(&code), "{family}: {name}: {word}: {letter}: {said}");
            }
        }
    }
    assert!(at > 3_800 && counts.iter().all(|n| *n > 3), "{at}: {counts:?}");
}

#[test]
fn every_module_of_transformers_has_a_name_here() {
    let lab = Lab::new("audit-names-of-modules");
    let all = stored("names.json");
    let all = all.as_object().expect("models");
    assert!(all.len() > 50);
    for (i, (family, names)) in all.iter().enumerate() {
        if !shardc_testing::taken(i, 4) {
            continue;
        }
        lab.write("config.json", config(family, &Json::Null).to_string());
        let names = names.as_array().expect("names").iter().filter_map(Json::as_str);
        let plan: serde_json::Map<String, Json> =
            names.map(|n| (n.to_string(), "replicate".into())).collect();
        let (_, said) = status(&lab, &plan.into());
        assert!(!said.contains("names nothing"), "{family}: {said}");
    }
}

/// Names of parameters that findings are of, and their kind.
fn findings(said: &str) -> Vec<String> {
    let json: Json = serde_json::from_str(said).expect("JSON");
    let of = |f: &Json| {
        let names = f["parameters"].as_array().expect("names").iter();
        let last =
            |p: &Json| p.as_str().expect("a name").split('.').skip(3).collect::<Vec<_>>().join(".");
        names
            .map(|p| format!("{} {}", f["kind"].as_str().expect("a kind"), last(p)))
            .collect::<Vec<_>>()
    };
    json["findings"].as_array().expect("findings").iter().flat_map(of).collect()
}

#[test]
fn hooks_sum_what_a_called_module_has_itself() {
    let lab = Lab::new("audit-hooks");
    let all = stored("words.json");
    let of = &all["models"]["qwen3_next"];
    lab.write("config.json", config("qwen3_next", &of["config"]).to_string());
    let with = |name: &str| {
        let mut plan = of["plan"].clone();
        plan[format!("model.layers.*.{name}")] = "replicated_with_grad_allreduce".into();
        status(&lab, &plan)
    };
    // A word for a parameter puts no hook, nor one for a module whose forward is not called.
    for name in ["linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d"] {
        let (code, said) = with(name);
        assert_eq!(code, 0, "{name}: {said}");
    }
    let (_, said) = with("linear_attn");
    let mut found = findings(&said);
    found.sort();
    assert_eq!(found, ["sum-twice linear_attn.A_log", "sum-twice linear_attn.dt_bias"]);
    // The rank-1 bias of a linear may lie in any way, where torch knows how.
    let all = stored("words.json");
    let of = &all["models"]["llama_bias_tied"];
    lab.write("config.json", config("llama_bias_tied", &of["config"]).to_string());
    let mut plan = of["plan"].clone();
    plan["model.layers.*.mlp.down_proj.bias"] = "colwise".into();
    assert_eq!(status(&lab, &plan).0, 0);
    // A head that is the table: both are DTensors, or none.
    plan = of["plan"].clone();
    plan["model.embed_tokens"] = "replicate".into();
    let (code, said) = status(&lab, &plan);
    assert!(
        code == 2 && said.contains("lm_head.weight: replicate, which is model.embed_tokens.weight"),
        "{said}"
    );
}

#[test]
fn experts_without_ep_are_exchanged_among_copies_alone() {
    let lab = Lab::new("audit-experts-sent");
    let all = stored("words.json");
    let of = &all["models"]["gpt_oss"];
    lab.write("config.json", config("gpt_oss", &of["config"]).to_string());
    let sent = |fsdp: u32| {
        lab.write(
            "plan.json",
            json!({ "tp_size": 2, "fsdp_size": fsdp, "tp_plan": of["plan"] }).to_string(),
        );
        let args =
            ["audit", "transformers", "plan.json", "--model", "config.json", "--format", "json"];
        let json: Json = serde_json::from_slice(&lab.ok(&args).stdout).expect("JSON");
        let rows = json["parameters"].as_array().expect("rows").clone();
        let row = rows
            .iter()
            .find(|r| r["name"].as_str().is_some_and(|n| n.ends_with("experts.down_proj")));
        let row = row.expect("experts").clone();
        let elements: u64 =
            row["local"].as_array().expect("sizes").iter().filter_map(Json::as_u64).product();
        (row["sent_bytes"].as_u64().expect("bytes"), elements)
    };
    // Both ranks of tp have all experts and the same tokens.
    assert_eq!(sent(1).0, 0);
    // FSDP on two ranks gathers f32 weights twice and reduces f32 gradients once: half of each crosses.
    let (bytes, elements) = sent(2);
    assert_eq!(bytes, elements * 4 * 3 / 2);
}
