//! Names in exported files against config classes of released packages: `tests/exports/fields.json`, which
//! `tests/exports/fields.py` made of their wheels and sources.

use super::{CASES, compiled};
use crate::lab::Lab;
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::path::Path;

/// The classes of a package, each with its fields and their types.
fn classes(package: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/fields.json");
    let text = std::fs::read_to_string(path).expect("a table");
    let table: Json = serde_json::from_str(&text).expect("JSON");
    table.get(package).unwrap_or_else(|| panic!("no {package}")).clone()
}

fn exported(lab: &Lab, case: usize, to: &str) -> Option<String> {
    let lacks = CASES[case].2.iter().any(|l| l.0 == to);
    (!lacks).then(|| {
        let plan = format!("{case}.plan");
        compiled(lab, &CASES[case], &plan);
        let out = format!("{case}.{to}");
        lab.ok(&["export", &plan, "--to", to, "-o", &out]);
        let name = match to {
            "torchtitan" => "shardc_plan.py",
            "deepspeed" => "ds_config.json",
            _megatron => "megatron.args",
        };
        std::fs::read_to_string(lab.path(&out).join(name)).expect("a file")
    })
}

/// Names that a module of Python sets, with what is there in this version in place of what is only in another.
fn set(module: &str, newest: bool) -> Vec<(&'static str, String)> {
    let mut out = vec![];
    // Of the two branches that ask for a version, the first is the newest commit's.
    let mut branch: Option<bool> = None;
    for line in module.lines() {
        let deep = line.len() - line.trim_start().len();
        match line.trim() {
            "if hasattr(config.training, \"num_tokens_per_train_step\"):" => branch = Some(true),
            "else:" => branch = Some(false),
            _ if deep <= 4 => branch = None,
            _deeper => {}
        }
        if branch.is_some_and(|b| b != newest) {
            continue;
        }
        let name = line.trim().split([' ', '=']).next().unwrap_or("").to_string();
        if let Some(name) = name.strip_prefix("config.training.") {
            out.push(("TrainingConfig", name.into()));
        } else if let Some(name) = name.strip_prefix("config.compile.") {
            out.push(("CompileConfig", name.into()));
        } else if deep == 8 && line.contains('=') && line.ends_with(',') {
            out.push(("ParallelismConfig", name));
        }
    }
    for name in ["num_pp_microbatches", "pipeline_parallel_microbatch_size"] {
        let own = module.contains(&format!("{{\"{name}\":")) && newest == name.starts_with("num");
        out.extend(own.then(|| ("ParallelismConfig", name.to_string())));
    }
    out
}

/// The module is for the newest commit that was read and for the release, which count a batch by other names.
#[test]
fn torchtitan_has_what_its_module_sets() {
    let lab = Lab::new("exports-fields-torchtitan");
    let mut seen = BTreeSet::new();
    for case in 0..CASES.len() {
        let Some(module) = exported(&lab, case, "torchtitan") else { continue };
        for (package, newest) in [("torchtitan b5bcd76c", true), ("torchtitan 0.3.0", false)] {
            let classes = classes(package);
            for (class, name) in set(&module, newest) {
                assert!(classes[class].get(&name).is_some(), "{package}: {class}.{name}: {module}");
                seen.insert((package, name));
            }
        }
    }
    for (package, name) in [
        ("torchtitan b5bcd76c", "num_pp_microbatches"),
        ("torchtitan b5bcd76c", "num_tokens_per_train_step"),
        ("torchtitan 0.3.0", "pipeline_parallel_microbatch_size"),
        ("torchtitan 0.3.0", "global_batch_size"),
        ("torchtitan 0.3.0", "tensor_parallel_degree"),
    ] {
        assert!(seen.contains(&(package, name.to_string())), "{package} {name}: {seen:?}");
    }
}

#[test]
fn deepspeed_has_what_its_config_sets() {
    let lab = Lab::new("exports-fields-deepspeed");
    let classes = classes("deepspeed 0.19.8");
    let mut seen = 0;
    for case in 0..CASES.len() {
        let Some(config) = exported(&lab, case, "deepspeed") else { continue };
        let config: Json = serde_json::from_str(&config).expect("JSON");
        for (key, class) in [
            ("zero_optimization", "DeepSpeedZeroConfig"),
            ("fp16", "DeepSpeedFP16Config"),
            ("bf16", "DeepSpeedBF16Config"),
        ] {
            for name in config[key].as_object().into_iter().flat_map(|o| o.keys()) {
                assert!(classes[class].get(name).is_some(), "{class}.{name}: {config}");
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
}

/// Flags that are fields of Megatron-Core's configs have values of their types.
#[test]
fn megatron_core_has_fields_of_the_types_of_flags() {
    let lab = Lab::new("exports-fields-megatron");
    let classes = classes("megatron-core 0.16.1");
    let mut seen = BTreeSet::new();
    for case in 0..CASES.len() {
        let Some(flags) = exported(&lab, case, "megatron") else { continue };
        for line in flags.lines().filter(|l| !l.starts_with('#')) {
            let mut words = line.split(' ');
            let name = words.next().unwrap_or("").trim_start_matches("--").replace('-', "_");
            let of = ["MLATransformerConfig", "DistributedDataParallelConfig"];
            let Some(ty) = of.iter().find_map(|c| classes[*c][&name].as_str()) else { continue };
            let good = match words.next() {
                None => ty.contains("bool"),
                Some(v) if v.parse::<i64>().is_ok() => ty.contains("int") || ty.contains("float"),
                Some(v) if v.parse::<f64>().is_ok() => ty.contains("float"),
                Some(_) => !["int", "bool", "float"].contains(&ty),
            };
            assert!(good, "{line}: {ty}");
            seen.insert(name);
        }
    }
    assert!(seen.len() >= 15, "{seen:?}");
}
