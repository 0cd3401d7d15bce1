//! Archives that lie: a diagnostic each, never a panic.

use super::labelled::inputs_of;
use super::{SIZES, file};
use serde_json::{Value, json};
use shardc_frontends::import::{Imported, Opened, Raise};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::plan::Mode;
use shardc_ir::rng::philox;
use shardc_ir::text;
use shardc_testing::samples;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Members of a zip file in their order, as bytes.
type Members = Vec<(String, Vec<u8>)>;

pub(super) fn import(path: &Path) -> Result<Imported> {
    Opened::read(path)?.import(SIZES, Mode::Train, Raise::default())
}

fn u32_at(b: &[u8], at: usize) -> usize {
    u32::from_le_bytes(b[at..at + 4].try_into().unwrap()) as usize
}

fn u16_at(b: &[u8], at: usize) -> usize {
    u16::from_le_bytes(b[at..at + 2].try_into().unwrap()) as usize
}

/// The members of an archive that `make.py` wrote again.
pub(super) fn members(name: &str) -> Members {
    let b = std::fs::read(file(name)).expect("an archive");
    let (mut at, mut out) = (0, vec![]);
    while u32_at(&b, at) == 0x0403_4b50 {
        let (len, name, extra) = (u32_at(&b, at + 22), u16_at(&b, at + 26), u16_at(&b, at + 28));
        let data = at + 30 + name + extra;
        let name = String::from_utf8(b[at + 30..at + 30 + name].to_vec()).expect("a name");
        out.push((name, b[data..data + len].to_vec()));
        at = data + len;
    }
    out
}

/// A zip file of stored members.
pub(super) fn zip(all: &Members) -> Vec<u8> {
    let (mut out, mut directory) = (vec![], vec![]);
    for (name, data) in all {
        let at = out.len() as u32;
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        common.extend((data.len() as u32).to_le_bytes());
        common.extend((data.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0, 0]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(data);
        directory.extend(b"PK\x01\x02\x14\x00");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, count) = (out.len() as u32, all.len() as u16);
    out.extend(&directory);
    out.extend(b"PK\x05\x06\x00\x00\x00\x00");
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend((directory.len() as u32).to_le_bytes());
    out.extend(start.to_le_bytes());
    out.extend([0, 0]);
    out
}

/// A file of its own for a test.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Scratch {
        // Tests run at once, and some share a name.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("shardc-imports-{process}-{n}-{name}"));
        std::fs::create_dir_all(&dir).expect("a folder");
        Scratch(dir)
    }
    pub(super) fn write(&self, bytes: &[u8]) -> PathBuf {
        let path = self.path();
        std::fs::write(&path, bytes).expect("written");
        path
    }
    /// The archive in it.
    pub(super) fn path(&self) -> PathBuf {
        self.0.join("m.pt2")
    }
    fn import(&self, bytes: &[u8]) -> Result<Imported> {
        import(&self.write(bytes))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An archive whose program was edited.
pub(super) fn edited(
    scratch: &Scratch,
    name: &str,
    edit: impl FnOnce(&mut Value),
) -> Result<Imported> {
    let mut all = members(name);
    let model = all.iter_mut().find(|m| m.0.ends_with("models/model.json")).expect("a program");
    let mut json: Value = serde_json::from_slice(&model.1).expect("JSON");
    edit(&mut json);
    model.1 = serde_json::to_vec(&json).expect("JSON");
    scratch.import(&zip(&all))
}

pub(super) fn refused(r: Result<Imported>) -> Diag {
    r.err().expect("a diagnostic")
}

pub(super) fn nodes(j: &mut Value) -> &mut Vec<Value> {
    j["graph_module"]["graph"]["nodes"].as_array_mut().expect("nodes")
}

/// The first node of an op.
pub(super) fn node<'a>(j: &'a mut Value, target: &str) -> &'a mut Value {
    let of = |n: &&mut Value| n["target"].as_str().is_some_and(|t| t.ends_with(target));
    nodes(j).iter_mut().find(of).unwrap_or_else(|| panic!("no {target}"))
}

#[test]
fn an_edit_of_nothing_changes_nothing() {
    let scratch = Scratch::new("same");
    let m = edited(&scratch, "llama.pt2", |_| {}).unwrap_or_else(|e| panic!("{e}"));
    let own = import(&file("llama.pt2")).unwrap_or_else(|e| panic!("{e}"));
    let text = shardc_ir::text::print_source;
    assert_eq!(text(&m.source), text(&own.source));
}

/// Cut off anywhere, and with bytes changed anywhere: read or refused. In the program's text edits are
/// most often valid JSON, so most of what follows it sees them too.
#[test]
fn broken_archives_never_panic() {
    let scratch = Scratch::new("fuzz");
    let whole = zip(&members("llama.pt2"));
    let step = if shardc_testing::nightly() { 211 } else { 4_211 };
    for len in (0..whole.len()).step_by(step).chain(whole.len() - 60..whole.len()) {
        refused(scratch.import(&whole[..len]));
    }
    let at = whole.windows(12).position(|w| w == b"graph_module").expect("a program");
    let mut imported = 0;
    for seed in 0..samples(75, 4_000) {
        let mut draw = Draw::new(seed, 0);
        let mut bytes = whole.clone();
        for _ in 0..1 + draw.below(4) {
            // Half of the edits are in the program.
            let end = whole.len();
            let i = if draw.below(2) == 0 { at + draw.below(end - at) } else { draw.below(end) };
            bytes[i] = match draw.below(3) {
                0 => b'0' + draw.below(10) as u8,
                1 => bytes[draw.below(end)],
                _ => draw.below(256) as u8,
            };
        }
        imported += usize::from(scratch.import(&bytes).is_ok());
    }
    assert!(imported > 0, "edits of numbers of weights do no harm");
}

/// Numbers from a counter, of a seed and a stream.
struct Draw {
    key: [u32; 2],
    at: u32,
}

impl Draw {
    fn new(seed: u64, stream: u32) -> Draw {
        Draw { key: [seed as u32, stream], at: 0 }
    }
    fn below(&mut self, n: usize) -> usize {
        self.at += 1;
        philox([self.at, 0, 0, 0], self.key)[0] as usize % n
    }
}

/// Whole numbers of the program replaced by others: sizes, dims, versions, types.
#[test]
fn odd_numbers_never_panic() {
    let scratch = Scratch::new("numbers");
    let odd = [
        json!(-1),
        json!(0),
        json!(1),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(1u64 << 40),
        json!("x"),
        json!(null),
    ];
    for seed in 0..samples(100, 5_000) {
        let mut draw = Draw::new(seed, 1);
        let name = ["llama.pt2", "phi3.pt2", "gemma3.pt2"][draw.below(3)];
        let _read_or_refused = edited(&scratch, name, |j| {
            let which = draw.below(numbers(j));
            replace(j, which, &mut 0, &odd[draw.below(odd.len())]);
        });
    }
}

fn numbers(j: &Value) -> usize {
    match j {
        Value::Number(_) => 1,
        Value::Array(a) => a.iter().map(numbers).sum(),
        Value::Object(o) => o.values().map(numbers).sum(),
        _ => 0,
    }
}

fn replace(j: &mut Value, which: usize, at: &mut usize, by: &Value) {
    match j {
        Value::Number(_) => {
            if *at == which {
                *j = by.clone();
            }
            *at += 1;
        }
        Value::Array(a) => a.iter_mut().for_each(|v| replace(v, which, at, by)),
        Value::Object(o) => o.values_mut().for_each(|v| replace(v, which, at, by)),
        _ => {}
    }
}

#[test]
fn another_schema_is_refused() {
    let scratch = Scratch::new("schema");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        j["schema_version"]["major"] = json!(9);
        // What else changes with it must not matter.
        j["graph_module"] = json!([]);
    }));
    assert_eq!((d.code, d.exit), ("archive-version", Exit::Unsupported));
    let m = edited(&scratch, "llama.pt2", |j| {
        j["schema_version"]["minor"] = json!(999);
        j["new_in_999"] = json!({ "as_anything": [1, 2] });
        node(j, "silu.default")["new_in_999"] = json!("unknown fields are ignored");
    });
    assert!(m.is_ok(), "a minor version may have more fields");
}

#[test]
fn an_unknown_op_is_named_with_its_scope() {
    let scratch = Scratch::new("op");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        node(j, "silu.default")["target"] = json!("torch.ops.aten.erfinv.default");
    }));
    assert_eq!((d.code, d.exit), ("import-op", Exit::Unsupported));
    assert!(d.message.contains("erfinv.default"), "{d}");
    assert!(d.place.as_ref().is_some_and(|p| p.ends_with("model.layers.0.mlp.act_fn")), "{d}");
    assert!(!d.help.is_empty() && d.why.is_empty(), "{d}");
    // All that follow are named at once, what is made of numbers alone is not.
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        node(j, "silu.default")["target"] = json!("torch.ops.aten.erfinv.default");
        node(j, "silu.default")["target"] = json!("torch.ops.aten.lgamma.default");
    }));
    assert!(d.message.contains("erfinv.default"), "{d}");
    assert_eq!(d.why, ["nor are these ops of the archive: `lgamma.default`"]);
}

#[test]
fn order_names_and_graphs_are_checked() {
    let scratch = Scratch::new("order");
    // A cycle: a value that is used before it is made.
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let last = nodes(j).len() - 1;
        nodes(j).swap(last, 40);
    }));
    assert_eq!(d.code, "archive");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let again = nodes(j)[0].clone();
        nodes(j).insert(0, again);
    }));
    assert!(d.message.contains("two values are called"), "{d}");
    // Graphs within graphs, deeper than the stack is long.
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let n = node(j, "wrap_with_set_grad_enabled").clone();
        let graph = |n: &Value| n["inputs"][1]["arg"]["as_graph"]["graph"].clone();
        let mut deep = n.clone();
        for _ in 0..40 {
            let mut outer = n.clone();
            let mut g = graph(&n);
            g["nodes"] = json!([deep]);
            outer["inputs"][1]["arg"]["as_graph"]["graph"] = g;
            deep = outer;
        }
        *node(j, "wrap_with_set_grad_enabled") = deep;
    }));
    assert_eq!(d.code, "archive", "{d}");
}

#[test]
fn symbols_are_rows_and_tokens_alone() {
    let scratch = Scratch::new("symbols");
    let bomb = format!("{}Symbol('s9'){}", "Pow(".repeat(10_000), ", Integer(9))".repeat(10_000));
    let long = format!("Symbol('{}')", "s".repeat(10_000));
    for expr in ["Symbol('s9', integer=True)", "Mul(Integer(2), Symbol('s70'))", &bomb, &long] {
        let d = refused(edited(&scratch, "llama.pt2", |j| {
            let all = &mut j["graph_module"]["graph"]["tensor_values"];
            all["labels"]["sizes"][1] = json!({ "as_expr": { "expr_str": expr, "hint": null } });
        }));
        assert_eq!(d.code, "import-input", "{}", d.message.get(..80).unwrap_or(&d.message));
        assert!(d.message.len() < 200, "{} letters", d.message.len());
    }
    // Beyond what a tensor may have, and beyond what was asked for.
    for (rows, code) in [(1u64 << 60, "archive"), (1 << 20, "import-dims")] {
        let d = refused(edited(&scratch, "qwen2.pt2", |j| {
            let all = &mut j["graph_module"]["graph"]["tensor_values"];
            all["input_ids"]["sizes"][0] = json!({ "as_int": rows });
        }));
        assert_eq!(d.code, code, "{rows} rows");
    }
}

#[test]
fn members_that_lie_are_refused() {
    let scratch = Scratch::new("members");
    let all = members("llama.pt2");
    let twice: Members = all.iter().cloned().chain([all[0].clone()]).collect();
    assert!(refused(scratch.import(&zip(&twice))).message.contains("two members"));
    let without: Members = all.iter().filter(|m| !m.0.ends_with("model.json")).cloned().collect();
    assert_eq!(refused(scratch.import(&zip(&without))).code, "archive");
    let whole = zip(&all);
    let entry = |b: &[u8]| b.windows(4).rposition(|w| w == b"PK\x01\x02").expect("an entry");
    for (at, byte, what) in
        [(10, 8, "compressed"), (8, 1, "encrypted"), (42, 0xff, "begin"), (24, 0x7f, "lengths")]
    {
        let mut b = whole.clone();
        let i = entry(&b) + at;
        b[i] = byte;
        let d = refused(scratch.import(&b));
        assert_eq!(d.code, "archive", "{what}: {d}");
    }
    // A weight that says it is larger than its member.
    let mut larger = all.clone();
    let config =
        larger.iter_mut().find(|m| m.0.ends_with("model_weights_config.json")).expect("a list");
    let mut j: Value = serde_json::from_slice(&config.1).expect("JSON");
    let sizes = &mut j["config"]["model.norm.weight"]["tensor_meta"]["sizes"];
    sizes[0] = json!({ "as_int": 1_000_000 });
    config.1 = serde_json::to_vec(&j).expect("JSON");
    assert_eq!(refused(scratch.import(&zip(&larger))).code, "archive");
}

/// What an exporter does that gives equal tensors one name must not be trained.
#[test]
fn a_parameter_of_two_modules_is_refused() {
    let scratch = Scratch::new("merged");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let text = j["graph_module"]["graph"]["nodes"].to_string();
        let merged = text.replace(
            "\"p_model_layers_1_input_layernorm_weight\"",
            "\"p_model_layers_0_input_layernorm_weight\"",
        );
        j["graph_module"]["graph"]["nodes"] = serde_json::from_str(&merged).expect("JSON");
    }));
    assert_eq!(d.code, "merged-parameters", "{d}");
    // A tied head is one tensor under two names, and is no such thing.
    assert!(import(&file("qwen2.pt2")).is_ok());
}

#[test]
fn a_loss_that_is_another() {
    let scratch = Scratch::new("loss");
    // What is right with one microbatch only says so.
    for (name, arg, whole) in [
        ("reduction", json!({ "as_int": 2 }), true),
        ("ignore_index", json!({ "as_int": 0 }), false),
        ("ignore_index", json!({ "as_int": -1 }), false),
        ("label_smoothing", json!({ "as_float": 0.1 }), false),
    ] {
        let m = edited(&scratch, "llama.pt2", |j| {
            let inputs =
                node(j, "cross_entropy_loss.default")["inputs"].as_array_mut().expect("inputs");
            inputs.retain(|i| i["name"] != name);
            inputs.push(json!({ "name": name, "arg": arg, "kind": 1 }));
        });
        let m = m.unwrap_or_else(|d| panic!("{name}: {d}"));
        assert_eq!(m.one_microbatch.is_some(), whole, "{name}");
    }
    // Labels that are moved by two.
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let is = |n: &&mut Value| {
            n["target"] == "torch.ops.aten.slice.Tensor"
                && n["inputs"][0]["arg"]["as_tensor"]["name"] == "pad"
        };
        let n = nodes(j).iter_mut().find(is).expect("labels are cut");
        n["inputs"][2]["arg"] = json!({ "as_int": 2 });
    }));
    assert_eq!(d.code, "import-op", "{d}");
}

/// A mask with one comparison turned around is not a rule that is known.
#[test]
fn a_mask_that_is_no_rule_is_refused() {
    let scratch = Scratch::new("mask");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        node(j, "le.Tensor")["target"] = json!("torch.ops.aten.ne.Tensor");
    }));
    assert_eq!((d.code, d.exit), ("mask-rule", Exit::Unsupported), "{d}");
}

/// A fill replaces a score, which a mask that is added does not: then the softmax is written out.
#[test]
fn a_fill_that_leaves_a_score_is_no_mask() {
    const FILL: &str = "torch.ops.aten.masked_fill.Scalar";
    let scratch = Scratch::new("fill");
    let fill = |value: f64| {
        edited(&scratch, "mpt.pt2", |j| {
            for n in nodes(j).iter_mut().filter(|n| n["target"] == FILL) {
                n["inputs"][2]["arg"] = json!({ "as_float": value });
            }
        })
    };
    let attends = |m: Result<Imported>| {
        let m = m.unwrap_or_else(|d| panic!("{d}"));
        let nodes = m.source.module.funcs[0].nodes.iter();
        nodes.filter(|n| matches!(n.op, shardc_ir::ops::Op::Attention(_))).count()
    };
    for value in [0.0, 1.5, -10000.0] {
        assert_eq!(attends(fill(value)), 0, "{value}");
    }
    assert_eq!(attends(fill(-1e9)), 2);
}

/// The program of an archive without numbers says what is tied, and folders have it under its first name.
#[test]
fn ties_of_archives_without_numbers_are_those_of_the_program() {
    let scratch = Scratch::new("ties");
    let own = import(&file("qwen2.pt2")).unwrap_or_else(|e| panic!("{e}"));
    let mut all = members("qwen2.pt2");
    let numbers = |name: &str| name.contains("data/weights/weight_");
    all.iter_mut().filter(|m| numbers(&m.0)).for_each(|m| m.1.clear());
    let m = scratch.import(&zip(&all)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(m.source.weights, own.source.weights);
    assert!(m.source.weights.iter().all(|w| w.param != "lm_head.weight"));
    assert!(Opened::read(&scratch.0.join("m.pt2")).is_ok_and(|o| o.checkpoint().is_none()));
}

fn shardc(args: &[&str]) -> (i32, String) {
    let done = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"))
        .args(args)
        .output()
        .expect("it runs");
    (
        done.status.code().expect("an exit status"),
        String::from_utf8_lossy(&done.stderr).into_owned(),
    )
}

/// From the archive to steps with its numbers, by way of the text and without.
#[test]
fn the_command_imports_compiles_and_runs() {
    let scratch = Scratch::new("command");
    let path = |name: &str| scratch.0.join(name).display().to_string();
    let archive = file("phi3.pt2").display().to_string();
    let (ir, a, b) = (path("m.ir"), path("a.plan"), path("b.plan"));
    assert_eq!(shardc(&["import", &archive, "-o", &ir]).0, 0);
    for (model, plan) in [(&archive, &a), (&ir, &b)] {
        let (code, err) = shardc(&["compile", model, "--mesh", "dp=2,tp=2", "-o", plan]);
        assert_eq!(code, 0, "{err}");
    }
    let programs = |plan: &str| {
        std::fs::read_to_string(Path::new(plan).join("programs/all.ir")).expect("a plan")
    };
    assert_eq!(programs(&a), programs(&b), "the text is the archive");
    let batch = scratch.0.join(inputs_of(&scratch.0, "phi3", "", &[])).display().to_string();
    let (code, err) =
        shardc(&["run", &a, "--weights", &archive, "--batch", &batch, "--steps", "2"]);
    assert_eq!(code, 0, "{err}");
    let (code, err) = shardc(&["compile", &archive, "--seq", "32"]);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("import-dims"), "{err}");
    let none = path("none.pt2");
    let _ = edited(&scratch, "llama.pt2", |j| {
        node(j, "silu.default")["target"] = json!("torch.ops.aten.erfinv.default");
    });
    std::fs::rename(scratch.0.join("m.pt2"), &none).expect("renamed");
    let (code, err) = shardc(&["check", &none, "--seq", "16"]);
    assert_eq!(code, 4, "{err}");
}

/// A plan of an archive freezes what the archive does not train.
#[test]
fn plans_freeze_what_an_archive_does_not_train() {
    let scratch = Scratch::new("frozen");
    let path = |name: &str| scratch.0.join(name).display().to_string();
    let plan = path("a.plan");
    let archive = file("stopped.pt2").display().to_string();
    let (code, err) = shardc(&["compile", &archive, "-o", &plan]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("warning[frozen]: `model.d.weight`"), "{err}");
    let options = std::fs::read_to_string(Path::new(&plan).join("options.toml")).expect("options");
    assert!(options.contains("freeze = [\"model.d.weight\"]"), "{options}");
    // One that trains nothing is none to train.
    let _ = edited(&scratch, "toy.pt2", |j| {
        let all = j["graph_module"]["graph"]["tensor_values"].as_object_mut().expect("values");
        all.values_mut().for_each(|v| v["requires_grad"] = json!(false));
    });
    let none = path("m.pt2");
    let (code, err) = shardc(&["compile", &none, "-o", &plan]);
    assert!(code != 0 && err.contains("error[no-loss]"), "{err}");
    assert!(err.contains("requires_grad"), "{err}");
    let (code, err) = shardc(&["compile", &none, "--mode", "infer", "-o", &path("b.plan")]);
    assert!(code == 0 && !err.contains("warning[frozen]"), "{err}");
}

/// What changes gradients is not left out.
#[test]
fn gradients_by_frequency_are_refused() {
    let scratch = Scratch::new("frequency");
    let d = refused(edited(&scratch, "llama.pt2", |j| {
        let ins = node(j, "embedding.default")["inputs"].as_array_mut().expect("operands");
        ins.push(json!({"name": "scale_grad_by_freq", "arg": {"as_bool": true}, "kind": 1}));
    }));
    assert!(d.code == "import-op" && d.message.contains("scale_grad_by_freq"), "{d}");
}

/// An archive leaves out an epsilon that is PyTorch's default, 1e-5.
#[test]
fn the_epsilon_of_a_layer_norm_may_be_left_out() {
    let scratch = Scratch::new("epsilon");
    let text =
        |m: Result<Imported>| text::print_source(&m.unwrap_or_else(|e| panic!("{e}")).source);
    let own = text(edited(&scratch, "gpt2.pt2", |_| {}));
    let mut left = 0;
    let without = text(edited(&scratch, "gpt2.pt2", |j| {
        for n in nodes(j).iter_mut().filter(|n| n["target"] == "torch.ops.aten.layer_norm.default")
        {
            let ins = n["inputs"].as_array_mut().expect("operands");
            ins.retain(|i| i["name"] != "eps" && i["name"] != "cudnn_enable");
            left += 1;
        }
    }));
    assert!(left > 0 && own == without, "{without}");
}

/// A write without gradients into what has one leaves the gradient, and changes the number: no op of ours.
#[test]
fn writes_in_regions_without_gradients_are_refused() {
    let scratch = Scratch::new("writes");
    let d = refused(edited(&scratch, "stopped.pt2", |j| {
        let region = node(j, "wrap_with_set_grad_enabled");
        let ins = region["inputs"].as_array_mut().expect("operands");
        let graph = ins.iter_mut().find_map(|i| i["arg"].get_mut("as_graph")).expect("a graph");
        let of = graph["graph"]["inputs"][0]["as_tensor"]["name"].clone();
        let nodes = graph["graph"]["nodes"].as_array_mut().expect("nodes");
        let arg = json!({"name": "self", "arg": {"as_tensor": {"name": of}}, "kind": 1});
        let out = json!({"as_tensor": {"name": "written"}});
        nodes.insert(
            0,
            json!({"target": "torch.ops.aten.tanh_.default", "inputs": [arg], "outputs": [out]}),
        );
    }));
    assert!(d.code == "import-op" && d.message.contains("tanh_"), "{d}");
}

/// A program of more than 512 MiB is refused by its length, before it is read: the file is a hole.
#[test]
fn a_program_of_half_a_gibibyte_is_refused() {
    let scratch = Scratch::new("large");
    const LEN: u32 = (512 << 20) + 1;
    let program = members("llama.pt2").into_iter().find(|m| m.0.ends_with("models/model.json"));
    let name = program.expect("a program").0;
    let mut b = zip(&vec![(name.clone(), vec![])]);
    let data = 30 + name.len();
    // Both lengths in both headers, and where the directory begins.
    for at in [18, 22, data + 20, data + 24] {
        b[at..at + 4].copy_from_slice(&LEN.to_le_bytes());
    }
    let start = b.len() - 6;
    b[start..start + 4].copy_from_slice(&(data as u32 + LEN).to_le_bytes());
    let path = scratch.write(&b[..data]);
    let mut file = std::fs::OpenOptions::new().write(true).open(&path).expect("open");
    file.seek(SeekFrom::Start(data as u64 + u64::from(LEN))).expect("a hole");
    file.write_all(&b[data..]).expect("written");
    let d = refused(import(&path));
    assert_eq!(d.code, "archive", "{d}");
    assert!(d.message.contains("536870913"), "{d}");
}

/// Control flow that depends on data, as torch.export writes `torch.cond`.
#[test]
fn control_flow_is_refused() {
    let d = refused(import(&file("control.pt2")));
    assert_eq!((d.code, d.exit), ("import-op", Exit::Unsupported), "{d}");
    assert!(d.message.contains("cond"), "{d}");
    assert!(d.help.iter().any(|h| h.contains("control flow")), "{d}");
}

/// The mask of another row is none of padding, also where rows are so many that those of the trial are alike; and a row of one
/// token has no padding.
#[test]
fn masks_of_other_rows_are_refused() {
    let scratch = Scratch::new("rows");
    let at = |path: &Path, rows, seq| {
        Opened::read(path)?.import(
            shardc_frontends::import::Sizes { rows, seq },
            Mode::Train,
            Raise::default(),
        )
    };
    let own = file("llama_padded.pt2");
    for (rows, seq) in [(2, 1), (2, 16), (8192, 32)] {
        at(&own, rows, seq).unwrap_or_else(|e| panic!("{rows} rows of {seq}: {e}"));
    }
    // All rows take the mask of row 0.
    let _written = edited(&scratch, "llama_padded.pt2", |j| {
        let index = node(j, "index.Tensor");
        let text = index.to_string();
        assert!(text.contains("\"unsqueeze_3\""), "{text}");
        *index = serde_json::from_str(&text.replace("\"unsqueeze_3\"", "\"unsqueeze_6\""))
            .expect("JSON");
    });
    for (rows, seq) in [(2, 16), (8192, 32)] {
        let d = refused(at(&scratch.0.join("m.pt2"), rows, seq));
        assert_eq!(d.code, "mask-rule", "{rows} rows of {seq}: {d}");
    }
}

/// Plans with padding are computed in f64, too, with rows that have some.
#[test]
fn padded_plans_compute_their_model() {
    let lab = crate::lab::Lab::new("padded-numbers");
    let model = file("llama_padded.pt2").display().to_string();
    let compile =
        ["compile", &model, "--mesh", "dp=2,tp=2", "--seq", "16", "--microbatch", "2", "-o", "p"];
    lab.ok(&compile);
    lab.ok(&["verify", "p", "--numbers"]);
}
