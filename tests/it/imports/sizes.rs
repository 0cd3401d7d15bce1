//! Sizes of an archive that lie: products of them do not overflow, and folding has an end.

use super::files::{Scratch, edited, members, node, refused, zip};
use serde_json::{Value, json};
use shardc_frontends::import::Opened;
use shardc_ir::diag::Diag;

/// The argument of a node by its name.
fn arg<'a>(n: &'a mut Value, name: &str) -> &'a mut Value {
    let all = n["inputs"].as_array_mut().expect("arguments");
    let found = all.iter_mut().find(|a| a["name"] == name);
    &mut found.unwrap_or_else(|| panic!("no {name}"))["arg"]
}

fn ints(all: &[i64]) -> Value {
    json!({ "as_ints": all })
}

/// What is said of the archive with one node changed.
fn said(name: &str, target: &str, change: impl FnOnce(&mut Value)) -> Diag {
    let scratch = Scratch::new("sizes");
    refused(edited(&scratch, name, |j| change(node(j, target))))
}

/// Each is refused where it stands, and none is a number that has wrapped around.
#[test]
fn no_count_of_elements_overflows() {
    let most = i64::MAX;
    let sets: [(&str, &str, &str, Value); 8] = [
        ("llama.pt2", "expand.default", "size", ints(&[most, -1])),
        ("llama.pt2", "expand.default", "size", ints(&[1 << 30, 1 << 30, 1, 8])),
        ("llama.pt2", "new_ones.default", "size", ints(&[most, most])),
        ("llama.pt2", "new_ones.default", "size", ints(&[0, most, most])),
        ("llama.pt2", "view.default", "size", ints(&[most, most])),
        ("llama.pt2", "reshape.default", "shape", ints(&[0, most, most])),
        ("picture.pt2", "conv2d.default", "groups", json!({ "as_int": most })),
        ("picture.pt2", "conv2d.default", "padding", ints(&[most, most])),
    ];
    for (name, target, key, value) in sets {
        let d = said(name, target, |n| {
            let all = n["inputs"].as_array_mut().expect("arguments");
            all.retain(|a| a["name"] != key);
            all.push(json!({ "name": key, "arg": value.clone(), "kind": 1 }));
        });
        assert_eq!(d.code, "import-op", "{target} {value}: {d}");
    }
}

/// Shapes of parameters and inputs, before anything is made of them.
#[test]
fn tensors_are_of_as_many_elements_as_a_value_may_have() {
    let scratch = Scratch::new("meta");
    for (name, code) in [("p_model_norm_weight", "archive"), ("input_ids", "archive")] {
        let d = refused(edited(&scratch, "llama.pt2", |j| {
            let sizes = &mut j["graph_module"]["graph"]["tensor_values"][name]["sizes"];
            *sizes = json!([{ "as_int": 1u64 << 40 }, { "as_int": 1 << 20 }]);
        }));
        assert!(d.code == code && d.message.contains("2^48"), "{name}: {d}");
    }
    let mut all = members("llama.pt2");
    let list = all.iter_mut().find(|m| m.0.ends_with("model_weights_config.json")).expect("a list");
    let mut j: Value = serde_json::from_slice(&list.1).expect("JSON");
    let sizes = &mut j["config"]["model.norm.weight"]["tensor_meta"]["sizes"];
    *sizes = json!([{ "as_int": 0 }, { "as_int": i64::MAX }, { "as_int": i64::MAX }]);
    list.1 = serde_json::to_vec(&j).expect("JSON");
    let d = Opened::read(&scratch.write(&zip(&all))).err().expect("a diagnostic");
    assert!(d.code == "archive" && d.message.contains("2^48"), "{d}");
}

/// A few words may ask for gigabytes of known numbers.
#[test]
fn what_folding_stores_is_bounded() {
    for end in [100_000_000, (1 << 25) + 1, i64::MAX] {
        let d = said("llama.pt2", "arange.default", |n| *arg(n, "end") = json!({ "as_int": end }));
        assert!(d.code == "import-op" && d.message.contains("too long"), "{end}: {d}");
    }
}
