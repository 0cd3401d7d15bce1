//! Saved folders load again, bit for bit, and nothing else is ever replaced.

use serde_json::json;
use shardc_frontends::{
    Base, Checkpoint, Model, Saving, Shape, check_target, init, load, write_tensors,
};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::Place;
use shardc_ir::plan::Mode;
use shardc_ir::weights::{Init, Weight};
use std::fs;
use std::path::{Path, PathBuf};

fn shape() -> Shape {
    Shape::new(1, 4, Mode::Infer)
}

/// A fresh path that does not exist.
fn target(test: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("shardc-save-{test}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    dir
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// Saves as commands do.
pub(crate) fn save(
    dir: &Path,
    config: &serde_json::Value,
    weights: &[Weight],
    how: &Saving,
    get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<()> {
    let place = Place::of(dir)?;
    check_target(&place, how.force)?;
    let written = shardc_frontends::save(&place, config, weights, how, get)?;
    assert!(written.instead.is_none() && written.dir == place.path());
    Ok(())
}

fn values(c: &Checkpoint, w: &Weight) -> Result<Vec<f32>> {
    let mut out = vec![0.0; w.shape.iter().product()];
    let all: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
    c.read(w, &all, &mut out).map(|()| out)
}

fn save_model(dir: &Path, m: &Model) -> Result<()> {
    let c = m.checkpoint.as_ref().expect("weights");
    let how = Saving { base: Base::open(c.dir())?, ..Saving::default() };
    save(dir, &m.config, &m.weights, &how, |w| values(c, w))
}

#[test]
fn a_saved_model_is_the_model() {
    for name in ["gpt2", "llama_gqa", "llama_bias_tied"] {
        let dir = target(name);
        let m = load(&fixture(name), &shape()).unwrap();
        save_model(&dir, &m).unwrap();
        // Replacing it gives the same again, however the folder is written.
        save_model(&dir.join(""), &m).unwrap();
        let again = load(&dir, &shape()).unwrap();
        assert_eq!((&again.weights, &again.config), (&m.weights, &m.config));
        assert!(again.warnings.is_empty(), "{:?}", again.warnings);
        let (a, b) = (m.checkpoint.unwrap(), again.checkpoint.unwrap());
        assert!(a.iter().map(|x| x.0).eq(b.iter().map(|x| x.0)), "the same tensors");
        for w in &m.weights {
            assert_eq!(values(&a, w).unwrap(), values(&b, w).unwrap(), "{}", w.param);
        }
        // The safetensors crate reads it too.
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let (_, meta) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(meta.metadata().as_ref().unwrap()["format"], "pt");
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn names_without_prefix_are_found() {
    let dir = target("bare");
    let m = load(&fixture("gpt2"), &shape()).unwrap();
    let bare: Vec<Weight> = m
        .weights
        .iter()
        .cloned()
        .map(|mut w| {
            w.tensor = w.tensor.trim_start_matches("transformer.").into();
            w
        })
        .collect();
    let c = m.checkpoint.as_ref().unwrap();
    save(&dir, &m.config, &bare, &Saving::default(), |w| {
        let of = m.weights.iter().find(|f| f.param == w.param).expect("the same parameters");
        values(c, of)
    })
    .unwrap();
    let again = load(&dir, &shape()).unwrap();
    assert_eq!(again.weights[0].param, "wte.weight");
    assert!(again.weights.iter().any(|w| w.param == "h.0.attn.c_attn.weight.q"));
    let f = &again.module.funcs[0];
    assert!(f.scopes.iter().any(|s| &*s.path == "transformer.h.0.attn.c_attn"));
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_element_type_is_kept_consistent() {
    let dir = target("dtype");
    let config = json!({"model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 1});
    save(&dir, &config, &[], &Saving::default(), |_| Ok(vec![])).unwrap();
    let text = fs::read(dir.join("config.json")).unwrap();
    let got: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(got, json!({"model_type": "llama", "torch_dtype": "float32", "hidden_size": 1}));
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn other_folders_are_not_replaced() {
    let dir = target("other");
    fs::create_dir_all(&dir).unwrap();
    let save =
        |d: &Path| save(d, &json!({}), &[], &Saving::default(), |_| Ok(vec![])).map_err(|d| d.code);
    fs::write(dir.join("thesis.tex"), "ten years").unwrap();
    assert_eq!(save(&dir), Err("save-target"));
    assert_eq!(save(&dir.join("thesis.tex")), Err("save-target"));
    assert_eq!(save(&dir.join("..")), Err("file"));
    fs::write(dir.join("config.json"), "{\"name\": \"a web page\"}").unwrap();
    assert_eq!(save(&dir), Err("save-target"));
    fs::write(dir.join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
    fs::create_dir(dir.join("src")).unwrap();
    assert_eq!(save(&dir), Err("save-target"));
    assert_eq!(fs::read(dir.join("thesis.tex")).unwrap(), b"ten years");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn only_what_shardc_wrote_is_replaced_and_no_model_is_lost() {
    let dir = target("ours");
    let m = load(&fixture("gpt2"), &shape()).unwrap();
    save_model(&dir, &m).unwrap();
    let c = m.checkpoint.as_ref().unwrap();
    let get = |w: &Weight| values(c, w);
    let place = Place::of(&dir).unwrap();
    // Files came there while the model was written.
    let late = |w: &Weight| {
        fs::write(dir.join("notes.txt"), "mine").unwrap();
        get(w)
    };
    let how = Saving::default();
    let aside = |n: usize| PathBuf::from(format!("{}-{n}", dir.display()));
    for n in [1, 2] {
        let _ = fs::remove_dir_all(aside(n));
        let w = shardc_frontends::save(&place, &m.config, &m.weights, &how, late).unwrap();
        assert_eq!(w.instead.map(|d| d.code), Some("save-target"));
        assert_eq!(fs::read(dir.join("notes.txt")).unwrap(), b"mine");
        assert_eq!(w.dir.canonicalize().unwrap(), aside(n).canonicalize().unwrap());
        load(&w.dir, &shape()).unwrap();
    }
    // Where nothing was, something is.
    fs::remove_dir_all(&dir).unwrap();
    let place = Place::of(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    let w = shardc_frontends::save(&place, &m.config, &m.weights, &how, get).unwrap();
    assert!(w.instead.is_some() && dir.join("notes.txt").exists());
    [&w.dir, &dir, &aside(1), &aside(2)].iter().for_each(|d| fs::remove_dir_all(d).unwrap());
    // Another's model.
    save_model(&dir, &m).unwrap();
    fs::copy(fixture("gpt2").join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    assert_eq!(save_model(&dir, &m).unwrap_err().code, "save-target");
    let how = Saving { force: true, ..Saving::default() };
    save(&dir, &m.config, &m.weights, &how, get).unwrap();
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_is_no_file_is_not_taken_from_a_base() {
    let dir = target("skipped");
    fs::create_dir_all(dir.join("LICENSES")).unwrap();
    fs::create_dir_all(dir.join("tokenizer")).unwrap();
    std::os::unix::fs::symlink("gone", dir.join("vocab.json")).unwrap();
    fs::write(dir.join("merges.txt"), "1").unwrap();
    let skipped = Base::open(&dir).unwrap().skipped;
    let (folder, nothing) = ("is not a regular file", "is a link to nothing");
    let all = [("LICENSES", folder), ("tokenizer", folder), ("vocab.json", nothing)];
    assert_eq!(skipped, all.map(|(name, why)| (name.to_string(), why)));
    fs::remove_dir_all(&dir).unwrap();
}

/// A stranger's folder has links to files of the user's, which nobody wants to give on.
#[test]
fn links_out_of_a_base_are_not_followed() {
    let dir = target("links");
    let link = |to: &str, at: &str| {
        let at = dir.join(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(to, at).unwrap();
    };
    let write = |at: &str, text: &str| {
        fs::create_dir_all(dir.join(at).parent().unwrap()).unwrap();
        fs::write(dir.join(at), text).unwrap();
    };
    write("secret", "secret");
    write("m/own.txt", "own");
    link("own.txt", "m/tokenizer.json");
    link("../secret", "m/vocab.json");
    link(dir.join("secret").canonicalize().unwrap().to_str().unwrap(), "m/merges.txt");
    link("../outside", "m/additional_chat_templates");
    write("outside/of.jinja", "secret");
    // Links of a folder that is called as that of the hub's cache, and is none.
    link("../blobs/1", "m/vocab.txt");
    write("blobs/1", "secret");
    let kept = |at: &str| {
        let base = Base::open(&dir.join(at)).unwrap();
        let skipped: Vec<String> = base.skipped.iter().map(|s| s.0.clone()).collect();
        let to = dir.join("out");
        let m = load(&fixture("gpt2"), &shape()).unwrap();
        let how = Saving { base, ..Saving::default() };
        save(&to, &m.config, &m.weights, &how, |w| Ok(vec![0.0; w.shape.iter().product()]))
            .unwrap();
        let mut names = fs::read_dir(&to)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect::<Vec<_>>();
        names.retain(|n| n != "config.json" && n != "model.safetensors");
        let text = |n: &String| fs::read_to_string(to.join(n)).unwrap();
        assert!(names.iter().all(|n| text(n) == "own"), "{names:?}");
        names.sort();
        fs::remove_dir_all(&to).unwrap();
        (names, skipped)
    };
    let out = ["additional_chat_templates/of.jinja", "merges.txt", "vocab.json", "vocab.txt"];
    assert_eq!(kept("m"), (vec!["tokenizer.json".into()], out.map(String::from).to_vec()));
    // The hub's cache.
    write("models--a--b/blobs/1", "own");
    link("../../blobs/1", "models--a--b/snapshots/r/tokenizer.json");
    link("../../../secret", "models--a--b/snapshots/r/vocab.json");
    link("../../secret", "models--a--b/blobs/2");
    link("../../blobs/2", "models--a--b/snapshots/r/merges.txt");
    let out = ["merges.txt", "vocab.json"].map(String::from).to_vec();
    assert_eq!(kept("models--a--b/snapshots/r"), (vec!["tokenizer.json".into()], out));
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_failed_save_leaves_what_was_there() {
    let dir = target("failed");
    let m = load(&fixture("gpt2"), &shape()).unwrap();
    save_model(&dir, &m).unwrap();
    let before = fs::read(dir.join("model.safetensors")).unwrap();
    let fail = |_: &Weight| Err(Diag::new("slice", "gone"));
    assert_eq!(
        save(&dir, &m.config, &m.weights, &Saving::default(), fail).unwrap_err().code,
        "slice"
    );
    let short = |_: &Weight| Ok(vec![0.0; 3]);
    assert_eq!(
        save(&dir, &m.config, &m.weights, &Saving::default(), short).unwrap_err().code,
        "weights"
    );
    let some = &m.weights[..6];
    assert!(some.iter().any(|w| w.part.is_some()), "an incomplete fused tensor");
    assert_eq!(save(&dir, &m.config, some, &Saving::default(), short).unwrap_err().code, "weights");
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), before);
    let name = dir.file_name().unwrap().to_str().unwrap().to_string();
    let beside = fs::read_dir(dir.parent().unwrap()).unwrap();
    let left: Vec<_> = beside
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with(&name) && *n != name)
        .collect();
    assert!(left.is_empty(), "{left:?}");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn dumps_are_safetensors_files() {
    let path = target("dump");
    let tensor = |n: usize| ("loss".to_string(), vec![n], vec![1.5f32, -0.25]);
    write_tensors(&path, vec![tensor(2), ("s".into(), vec![], vec![7.0])]).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("loss").unwrap().data(), [1.5f32, -0.25].map(f32::to_le_bytes).concat());
    assert_eq!(file.tensor("s").unwrap().shape(), [0usize; 0]);
    assert_eq!(write_tensors(&path, vec![tensor(3)]).unwrap_err().code, "weights");
    assert_eq!(write_tensors(&path, vec![tensor(2), tensor(2)]).unwrap_err().code, "weights");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    fs::remove_file(&path).unwrap();
}

#[test]
fn initial_values_do_not_depend_on_the_slice() {
    let w = |init| Weight {
        param: "w".into(),
        tensor: "w".into(),
        tensor_shape: vec![64, 48],
        part: None,
        shape: vec![64, 48],
        init,
        matrix: true,
        tp_dim: None,
        experts: None,
    };
    let normal = w(Init::Normal(0.02));
    let (mut all, mut part) = (vec![0.0; 64 * 48], vec![0.0; 5 * 7]);
    init(&normal, &[0..64, 0..48], 3, &mut all).unwrap();
    init(&normal, &[10..15, 40..47], 3, &mut part).unwrap();
    let want: Vec<f32> = (10..15).flat_map(|r| all[r * 48 + 40..r * 48 + 47].to_vec()).collect();
    assert_eq!(part, want);
    let mean_square = all.iter().map(|x| f64::from(x * x)).sum::<f64>() / all.len() as f64;
    assert!((mean_square.sqrt() / 0.02 - 1.0).abs() < 0.05, "{mean_square}");
    // Of more than a thread draws at once, from the middle of rows on.
    let large =
        Weight { tensor_shape: vec![40, 5, 700], shape: vec![40, 5, 700], ..w(Init::Normal(1.0)) };
    let mut many = vec![0.0; 39 * 5 * 699];
    init(&large, &[1..40, 0..5, 1..700], 3, &mut many).unwrap();
    for (i, x) in many.iter().enumerate().step_by(97) {
        let (a, b, c) = (1 + i / (5 * 699), i / 699 % 5, 1 + i % 699);
        let mut one = [0.0];
        init(&large, &[a..a + 1, b..b + 1, c..c + 1], 3, &mut one).unwrap();
        assert_eq!(*x, one[0], "{i}");
    }
    init(&w(Init::Ones), &[10..15, 40..47], 3, &mut part).unwrap();
    assert_eq!(part, [1.0; 35]);
    assert_eq!(init(&normal, &[0..65, 0..1], 3, &mut [0.0; 65]).unwrap_err().code, "slice");
}
