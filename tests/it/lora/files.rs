//! Files of adapters: saved, resumed, merged, read by others, and refused.

use super::{CASES, TRAINING, folder, tensors};
use crate::lab::{FIXTURES, Lab};
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};
use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

/// Training goes on bit for bit from a checkpoint of adapters, on another mesh too, with its base model and no other; the
/// adapter that it becomes is read again, and the model that it is merged into computes the same.
#[test]
fn adapters_are_saved_resumed_and_merged() {
    let lab = Lab::new("lora-files");
    for (name, base) in [CASES[0], CASES[4], CASES[5]] {
        let (base, adapter) = (format!("{FIXTURES}/{base}"), folder(name));
        for old in std::fs::read_dir(&lab.0).expect("a folder").flatten() {
            let _ = std::fs::remove_dir_all(old.path());
        }
        let batch = format!("{adapter}/batch.safetensors");
        lab.ok(&[&["compile", &base, "--lora-from", &adapter, "-o", "plan"], TRAINING].concat());
        let run = |more: &[&str]| {
            lab.ok(&[&["run", "plan", "--batch", &batch, "--kernels", "interpreted"], more].concat())
        };
        let from = ["--weights", &base, "--adapter", &adapter];
        run(&[&from[..], &["--steps", "3", "--save", "whole"]].concat());
        run(&[&from[..], &["--steps", "2", "--save", "ckpt", "--save-every", "2"]].concat());
        run(&[
            "--resume",
            "ckpt",
            "--weights",
            &base,
            "--steps",
            "3",
            "--save",
            "ckpt",
            "--save-every",
            "3",
        ]);
        // It has what is trained alone.
        let index =
            std::fs::read_to_string(lab.path("ckpt/step-00000003/index.json")).expect("an index");
        let index: Json = serde_json::from_str(&index).expect("JSON");
        let all = index["tensors"].as_array().expect("tensors");
        assert!(
            all.iter().all(|t| t["name"].as_str().is_some_and(|n| n.contains(".lora_"))),
            "{name}"
        );
        assert!(index["base"]["files"]["blake3"].is_string(), "{name}: {}", index["base"]);
        lab.ok(&["reshard", "ckpt", "--to", "peft", "-o", "again"]);
        let [whole, again] =
            ["whole", "again"].map(|d| lab.path(d).join("adapter_model.safetensors"));
        assert_eq!(tensors(&whole), tensors(&again), "{name}: resumed at step 2");
        let config = |dir: &Path| -> Json {
            let text = std::fs::read_to_string(dir.join("adapter_config.json")).expect("a config");
            serde_json::from_str(&text).expect("JSON")
        };
        let (own, peft) = (config(&lab.path("again")), config(Path::new(&adapter)));
        for key in
            own.as_object().expect("an object").keys().filter(|k| *k != "base_model_name_or_path")
        {
            assert_eq!(own[key], peft[key], "{name}: {key}");
        }
        // Read again it is the same model, and so is the one that it was merged into.
        lab.ok(&["reshard", "ckpt", "--to", "hf", "--merge", "-o", "merged"]);
        run(&[
            "--weights",
            &base,
            "--adapter",
            "again",
            "--steps",
            "1",
            "--dump",
            "beside.safetensors",
        ]);
        lab.ok(&[&["compile", "merged", "-o", "one"], TRAINING].concat());
        let one =
            ["run", "one", "--weights", "merged", "--steps", "1", "--dump", "one.safetensors"];
        lab.ok(&[&one[..], &["--batch", &batch, "--kernels", "interpreted"]].concat());
        let [beside, one] =
            ["beside.safetensors", "one.safetensors"].map(|f| tensors(&lab.path(f)));
        let (a, b) = (&beside["logits"].1, &one["logits"].1);
        let most = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let off = a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= 1e-5 * most, "{name}: merged, logits are off by {off:e} of {most}");
        read_by_peft(&lab, &base, &batch);
        // Another base is not the one that it was trained on.
        let other = lab.path("other");
        std::fs::create_dir_all(&other).expect("a folder");
        std::fs::copy(format!("{base}/config.json"), other.join("config.json")).expect("a config");
        let mut bytes = std::fs::read(format!("{base}/model.safetensors")).expect("weights");
        *bytes.last_mut().expect("bytes") ^= 1;
        std::fs::write(other.join("model.safetensors"), bytes).expect("weights");
        let run = ["run", "plan", "--batch", &batch, "--resume", "ckpt", "--steps", "4"];
        let said = lab.refuses(&[&run[..], &["--weights", "other"]].concat(), 2, "lora-base");
        assert!(said.contains("trained on another base"), "{said}");
        let said = lab.refuses(&run, 2, "lora-base");
        assert!(said.contains("--weights"), "{said}");
        lab.refuses(
            &["reshard", "ckpt", "--to", "hf", "--merge", "--base", "other", "-o", "no"],
            2,
            "lora-base",
        );
        lab.refuses(&["reshard", "ckpt", "--to", "hf", "-o", "no"], 2, "flag");
    }
}

/// PEFT reads the adapter, and transformers the merged model: with the same logits.
fn read_by_peft(lab: &Lab, base: &str, batch: &str) {
    let python = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let find = "import importlib.util as u; assert all(map(u.find_spec, ['torch', 'transformers', 'peft']))";
    if !Command::new(&python).args(["-c", find]).output().is_ok_and(|o| o.status.success()) {
        return skip(Tool::Peft, "adapters and merged models, read by others");
    }
    let script = format!("{FIXTURES}/lora_check.py");
    let mut c = Command::new(python);
    c.current_dir(&lab.0).args([
        "-B",
        &script,
        base,
        "again",
        "merged",
        batch,
        "beside.safetensors",
    ]);
    let out = c.output().expect("Python starts");
    let said = [out.stdout, out.stderr].map(|x| String::from_utf8_lossy(&x).into_owned());
    assert!(out.status.success(), "{}", said.join("\n"));
}

/// Whoever gives a checkpoint or an adapter where something else is asked for is told the command that makes it.
#[test]
fn one_thing_in_place_of_another_is_told_the_way() {
    let lab = Lab::new("lora-instead");
    let base = format!("{FIXTURES}/llama_mha");
    for (plan, more, ckpt) in [("all", &[][..], "whole"), ("lora", &["--lora", "r=2"], "adapted")] {
        lab.ok(&[&["compile", &base, "--seq", "8", "-o", plan], more].concat());
        let run = ["run", plan, "--weights", &base, "--steps", "1", "--kernels", "interpreted"];
        lab.ok(&[&run[..], &["--save", ckpt, "--save-every", "1"]].concat());
    }
    lab.ok(&["reshard", "adapted", "--to", "peft", "-o", "adapter"]);
    let run = |plan: &str, more: &[&str], code: &str, words: &[&str]| {
        let said = lab.refuses(&[&["run", plan, "--steps", "2"], more].concat(), 2, code);
        words.iter().for_each(|w| assert!(said.contains(w), "{more:?}: no `{w}` in {said}"));
    };
    let (whole, adapted) = ("whole/step-00000001", "adapted/step-00000001");
    let to_model = [
        format!("shardc reshard {whole} --to hf -o DIR"),
        format!("shardc reshard {adapted} --to hf --merge -o DIR"),
    ];
    let [whole_model, merged] = to_model.each_ref().map(String::as_str);
    for more in [&["--resume", "whole"][..], &["--resume", "whole", "--weights", &base]] {
        let words = ["of a whole model, the plan trains adapters", whole_model, "--weights DIR"];
        run("lora", more, "lora-base", &words);
    }
    run("all", &["--resume", "adapted"], "lora-base", &["the plan has none", "--lora", merged]);
    for (plan, dir, made) in [("lora", "whole", whole_model), ("all", "adapted", merged)] {
        let words = ["this is a checkpoint, --weights takes a model", made, "--resume"];
        run(plan, &["--weights", dir], "missing-weights", &words);
        run(plan, &["--weights", &format!("{dir}@latest")], "missing-weights", &words);
    }
    let words = ["this is an adapter", "--lora-from adapter", "--weights MODEL --adapter adapter"];
    run("lora", &["--weights", "adapter"], "missing-weights", &words);
    let peft = ["shardc reshard adapted --to peft -o DIR"];
    run("lora", &["--weights", &base, "--adapter", "adapted"], "adapter", &peft);
}

/// What is wrong with adapters is said by name.
#[test]
fn what_is_wrong_is_said() {
    let lab = Lab::new("lora-wrong");
    let base = format!("{FIXTURES}/llama_mha");
    let tied = format!("{FIXTURES}/lora/qwen3_tied/base");
    let compile = |model: &str, more: &[&str], status: i32, code: &str, want: &str| {
        let said = lab.refuses(
            &[&["compile", model, "-o", "no", "--seq", "16"], more].concat(),
            status,
            code,
        );
        assert!(said.contains(want), "{more:?}: no `{want}` in {said}");
    };
    compile(
        &base,
        &["--lora", "r=64"],
        2,
        "lora-rank",
        "r=64 exceeds min(32, 32) of model.layers.0.self_attn.q_proj",
    );
    // PEFT's word, and LLaMA-Factory's, for all products of the layers: the plan is that of our word.
    let plan = |targets: &str| {
        let lora = format!("r=2,targets={targets}");
        lab.ok(&["compile", &base, "--seq", "16", "--lora", &lora, "-o", targets]);
        std::fs::read(lab.path(&format!("{targets}/programs/all.ir"))).expect("a program")
    };
    assert!(["all-linear", "all"].map(plan).iter().all(|p| *p == plan("linear")));
    compile(&base, &["--lora", "r=0"], 2, "lora-rank", "at least one row");
    compile(&base, &["--lora", "alpha=3"], 2, "flag", "no rank is given");
    compile(&base, &["--lora", "r=2", "--dtype-frozen", "nf4"], 4, "not-built", "--dtype bf16");
    compile(&base, &["--lora", "r=2,r=3"], 2, "flag", "`r` is given twice");
    compile(&base, &["--lora", "r=2,dropout=1"], 2, "flag", "dropout=1 is not in 0..1");
    compile(&base, &["--lora", "r=2,dora"], 2, "flag", "`dora`");
    compile(&base, &["--lora", "r=2,targets=*.wq"], 2, "lora-target", "`*.wq` matches no linear");
    compile(&base, &["--lora", "r=2,targets=q_prj"], 2, "lora-target", "did you mean `q_proj`?");
    compile(&base, &["--lora", "r=2,targets=experts"], 2, "lora-target", "no experts");
    compile(&tied, &["--lora", "r=2,targets=lm_head"], 2, "lora-tied", "also the embedding");
    compile(&tied, &["--lora", "r=2,targets=embed_tokens"], 2, "lora-tied", "also the embedding");
    compile(&base, &["--lora", "r=2", "--freeze", "*norm*"], 2, "flag", "--train GLOB");
    compile(&base, &["--train", "*norm*"], 2, "flag", "--lora r=16");
    compile(
        &base,
        &["--lora", "r=2", "--train", "*nothing*"],
        2,
        "unknown-tensor",
        "--train '*nothing*'",
    );
    compile(
        &base,
        &["--lora", "r=2", "--mesh", "tp=4", "--tp-mode", "2d"],
        4,
        "not-built",
        "--tp-mode 1d",
    );
    let adapter = Path::new(&folder("llama")).join("adapter_config.json");
    let known: Json =
        serde_json::from_slice(&std::fs::read(adapter).expect("a config")).expect("JSON");
    let changes = [
        ("use_dora", json!(true), "`use_dora` is true"),
        ("lora_bias", json!(true), "`lora_bias` is true"),
        ("bias", json!("all"), "`bias` is \"all\""),
        ("layer_replication", json!([[0, 1]]), "`layer_replication`"),
        ("trainable_token_indices", json!([3]), "`trainable_token_indices`"),
        ("peft_type", json!("IA3"), "peft_type is IA3"),
        ("modules_to_save", json!(".*head"), "regular expression"),
        ("target_modules", json!(".*q_proj"), "regular expression"),
        ("something_new", json!(3), "`something_new` is 3"),
    ];
    for (key, value, want) in changes {
        let mut c = known.clone();
        c[key] = value;
        lab.write("a/adapter_config.json", c.to_string());
        compile(&base, &["--lora-from", "a"], 4, "not-built", want);
    }
    let mut c = known.clone();
    c["modules_to_save"] = json!(["lm_haed"]);
    lab.write("a/adapter_config.json", c.to_string());
    let want = "trains the module `lm_haed` whole, which has no tensor here";
    compile(&base, &["--lora-from", "a"], 2, "unknown-tensor", want);
    for (text, want) in [("{", "not JSON"), ("[]", "not an object"), ("", "not JSON")] {
        lab.write("a/adapter_config.json", text);
        compile(&base, &["--lora-from", "a"], 2, "adapter", want);
    }
    compile(&base, &["--lora-from", "nowhere"], 2, "adapter", "no adapter_config.json");
    compile(
        &base,
        &["--lora-from", &folder("llama"), "--lora", "r=2"],
        2,
        "flag",
        "leave one of them out",
    );
}

/// Tensors of an adapter that the plan has not, or of another rank.
#[test]
fn what_a_plan_does_not_take_is_said() {
    let lab = Lab::new("lora-not-taken");
    let base = format!("{FIXTURES}/llama_mha");
    lab.ok(&[
        "compile",
        &base,
        "-o",
        "plan",
        "--seq",
        "16",
        "--lora",
        "r=4,targets=q_proj",
        "--prove",
        "no",
    ]);
    let run = |more: &[&str], code: &str, want: &str| {
        let said = lab.refuses(&[&["run", "plan", "--steps", "1"], more].concat(), 2, code);
        assert!(said.contains(want), "{more:?}: no `{want}` in {said}");
    };
    run(&["--weights", &base, "--adapter", &folder("llama")], "adapter", "the plan has no adapter");
    run(&["--weights", &base, "--adapter", "nowhere"], "adapter", "no adapter_model.safetensors");
    lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--lora", "r=2", "--prove", "no"]);
    run(&["--weights", &base, "--adapter", &folder("llama")], "tensor-shape", "--lora-from");
    lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--prove", "no"]);
    run(&["--weights", &base, "--adapter", &folder("llama")], "flag", "the plan has no adapters");
}

/// An adapter of the right shapes counts in a plan as it was trained, by a factor of 2, or is refused.
#[test]
fn factors_are_those_of_the_adapter() {
    let lab = Lab::new("lora-factors");
    let (base, adapter) = (format!("{FIXTURES}/llama_mha"), format!("{FIXTURES}/lora/llama"));
    let run = ["run", "plan", "--steps", "0", "--weights", &base, "--adapter", &adapter];
    for (lora, factor) in [("r=4,alpha=64", Some("16")), ("r=4,rslora", Some("4")), ("r=4", None)] {
        lab.ok(&["compile", &base, "-o", "plan", "--seq", "16", "--lora", lora, "--prove", "no"]);
        let Some(factor) = factor else {
            lab.ok(&run);
            continue;
        };
        let said = lab.refuses(&run, 2, "adapter");
        let plan = format!("q_proj is multiplied by {factor} in the plan, and by 2 as");
        assert!(said.contains(&plan) && said.contains("compile with --lora-from"), "{said}");
    }
}

/// A plan's text has its adapters: compiled again, with the same flag, it is the same program.
#[test]
fn a_text_with_adapters_gets_no_more() {
    let lab = Lab::new("lora-again");
    let base = format!("{FIXTURES}/phi3");
    let lora = ["--lora", "r=2,alpha=6", "--seq", "16", "--prove", "no"];
    lab.ok(&[&["compile", &base, "-o", "first"], &lora[..]].concat());
    lab.ok(&[&["compile", "first/model.ir", "-o", "again"], &lora[..]].concat());
    let read = |plan: &str, file: &str| {
        std::fs::read_to_string(lab.path(plan).join(file)).expect("a file")
    };
    for file in ["model.ir", "programs/all.ir", "weights.json"] {
        assert_eq!(read("first", file), read("again", file), "{file}");
    }
    let other = ["compile", "first/model.ir", "-o", "no", "--lora", "r=2,alpha=7", "--seq", "16"];
    let said = lab.refuses(&other, 2, "lora-target");
    assert!(said.contains("has an adapter of r=2 already"), "{said}");
    lab.ok(&["verify", "first"]);
}

/// Names with the adapter's own, as other software writes them, are read; what is trained beside adapters is saved with
/// them and read again, also by PEFT.
#[test]
fn names_of_others_and_whole_modules_are_read() {
    let lab = Lab::new("lora-names");
    let (base, adapter) = (format!("{FIXTURES}/llama_mha"), folder("llama"));
    let batch = format!("{adapter}/batch.safetensors");
    let file = Path::new(&adapter).join("adapter_model.safetensors");
    let (bytes, known) = (std::fs::read(&file).expect("an adapter"), tensors(&file));
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let named =
        all.tensors().into_iter().map(|(n, t)| (n.replace(".weight", ".default.weight"), t));
    let named = safetensors::serialize(named, None).expect("safetensors");
    lab.write("named/adapter_model.safetensors", named);
    lab.ok(&[&["compile", &base, "--lora-from", &adapter, "-o", "plan"], TRAINING].concat());
    let run = ["run", "plan", "--weights", &base, "--batch", &batch, "--kernels", "interpreted"];
    lab.ok(&[&run[..], &["--adapter", "named", "--steps", "0", "--save", "same"]].concat());
    assert_eq!(tensors(&lab.path("same/adapter_model.safetensors")), known);
    // Norms are trained whole, and one more step begins with them.
    let train = ["--lora-from", &adapter, "--train", "*norm.weight"];
    lab.ok(&[&["compile", &base, "-o", "plan"], &train[..], TRAINING].concat());
    let saves = ["--adapter", &adapter, "--steps", "2", "--save", "ckpt", "--save-every", "2"];
    lab.ok(&[&run[..], &saves].concat());
    lab.ok(&["reshard", "ckpt", "--to", "peft", "-o", "again"]);
    lab.ok(&["reshard", "ckpt", "--to", "hf", "--merge", "-o", "merged"]);
    let saved = tensors(&lab.path("again/adapter_model.safetensors"));
    assert_eq!(saved.len(), known.len() + 5);
    let of = |dir: &str| {
        tensors(&lab.path(dir).join("model.safetensors"))["model.norm.weight"].1.clone()
    };
    assert_ne!(saved["base_model.model.model.norm.weight"].1, of(&base));
    assert_eq!(saved["base_model.model.model.norm.weight"].1, of("merged"));
    let more = ["--adapter", "again", "--steps", "1", "--dump", "beside.safetensors"];
    lab.ok(&[&run[..], &more].concat());
    read_by_peft(&lab, &base, &batch);
    // It says itself what is trained: the same as with flags, and the same again.
    let then = tensors(&lab.path("beside.safetensors"));
    lab.ok(&[&["compile", &*base, "--lora-from", "again", "-o", "plan"], TRAINING].concat());
    lab.ok(&[&run[..], &more, &["--save", "more"]].concat());
    assert_eq!(tensors(&lab.path("beside.safetensors")), then);
    lab.ok(&["verify", "plan"]);
    let saves = |dir: &str| -> Json {
        let file = lab.path(dir).join("adapter_config.json");
        let json: Json =
            serde_json::from_slice(&std::fs::read(file).expect("a config")).expect("JSON");
        json["modules_to_save"].clone()
    };
    let whole = ["0.input", "0.post_attention", "1.input", "1.post_attention"];
    let whole = whole.map(|n| format!("model.layers.{n}_layernorm"));
    let whole = json!([&whole[..], &["model.norm".into()]].concat());
    assert_eq!([saves("again"), saves("more")], [whole.clone(), whole]);
}

/// A checkpoint whose tensors lack the root that modules have: what is trained beside adapters is saved by the names of
/// modules, read again, and read by PEFT.
#[test]
fn names_without_a_root_are_those_of_modules() {
    let lab = Lab::new("lora-rootless");
    let from = format!("{FIXTURES}/gpt2");
    let bytes = std::fs::read(format!("{from}/model.safetensors")).expect("weights");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let bare = all.tensors().into_iter().map(|(n, t)| (n.replacen("transformer.", "", 1), t));
    lab.write("bare/model.safetensors", safetensors::serialize(bare, None).expect("safetensors"));
    lab.write("bare/config.json", std::fs::read(format!("{from}/config.json")).expect("a config"));
    let batch = format!("{from}/batch.safetensors");
    let lora = ["--lora", "r=2,targets=c_attn", "--train", "ln_f.*", "--lr", "0.05"];
    lab.ok(
        &[&["compile", "bare", "--seq", "16", "-o", "plan", "--prove", "no"], &lora[..]].concat()
    );
    let run = ["run", "plan", "--weights", "bare", "--batch", &batch, "--kernels", "interpreted"];
    lab.ok(&[&run[..], &["--steps", "2", "--save", "c", "--save-every", "2"]].concat());
    lab.ok(&["reshard", "c", "--to", "peft", "-o", "again"]);
    lab.ok(&["reshard", "c", "--to", "hf", "--merge", "-o", "merged"]);
    let saved = tensors(&lab.path("again/adapter_model.safetensors"));
    let of = |name: &str| saved.keys().filter(|k| k.starts_with(name)).count();
    assert_eq!(of("base_model.model.transformer.ln_f."), 2, "{:?}", saved.keys());
    assert_eq!(of("base_model.model.transformer.h."), saved.len() - 2, "{:?}", saved.keys());
    let base = ["compile", "bare", "--seq", "16", "-o", "plan"];
    for lora in [&lora[..], &["--lora-from", "again"]] {
        lab.ok(&[&base[..], lora, &["--prove", "yes"]].concat());
        lab.ok(&[&run[..], &["--adapter", "again", "--steps", "0", "--save", "same"]].concat());
        assert_eq!(tensors(&lab.path("same/adapter_model.safetensors")), saved);
        std::fs::remove_dir_all(lab.path("same")).expect("it was saved");
    }
    let more = ["--adapter", "again", "--steps", "1", "--dump", "beside.safetensors"];
    lab.ok(&[&run[..], &more].concat());
    read_by_peft(&lab, "bare", &batch);
}

/// What PEFT would take for adapters of experts is refused before training where it is saved, and told where it is not yet.
#[test]
fn adapters_that_peft_reads_as_others_are_refused() {
    let lab = Lab::new("lora-unread");
    let base = format!("{FIXTURES}/deepseek_v3");
    lab.ok(&["compile", &base, "--seq", "16", "-o", "plan", "--lora", "r=2", "--prove", "no"]);
    let run = ["run", "plan", "--steps", "1", "--kernels", "interpreted", "--save", "s"];
    let said = lab.refuses(&run, 4, "not-built");
    assert!(
        said.contains("of a deepseek_v3 for its experts'") && said.contains("--merge"),
        "{said}"
    );
    let out = lab.ok(&[&run[..], &["--save-every", "1"]].concat());
    assert!(String::from_utf8_lossy(&out.stderr).contains("warning[not-built]"), "{out:?}");
    let attention = "r=2,targets=q_a_proj+q_b_proj+kv_b_proj+o_proj";
    lab.ok(&["compile", &base, "--seq", "16", "-o", "other", "--lora", attention, "--prove", "no"]);
    let run = ["run", "other", "--steps", "1", "--kernels", "interpreted", "--save", "t"];
    assert!(!String::from_utf8_lossy(&lab.ok(&run).stderr).contains("not-built"));
    // A table that is trained, and the output projection that is tied to it: PEFT would train one of them.
    let tied = format!("{FIXTURES}/lora/qwen3_tied/base");
    let whole = ["--lora", "r=2,targets=q_proj", "--train", "model.embed_tokens.weight"];
    lab.ok(&[&["compile", &*tied, "--seq", "16", "-o", "tied"], &whole[..]].concat());
    let run = ["run", "tied", "--steps", "1", "--kernels", "interpreted", "--save", "u"];
    let said = lab.refuses(&run, 4, "not-built");
    assert!(
        said.contains("PEFT would untie model.embed_tokens") && said.contains("--merge"),
        "{said}"
    );
}
