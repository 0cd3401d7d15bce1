//! Every reference folder loads, and its program gives the logits and the loss that transformers
//! gives.

use shardc_frontends::{Balance, Checkpoint, Model, Shape, from_config, load};
use shardc_ir::attr::Padding;
use shardc_ir::func::{Port, RoleKind};
use shardc_ir::interp::{Precision, call};
use shardc_ir::names::parameters;
use shardc_ir::ops::Op;
use shardc_ir::phase::Phase;
use shardc_ir::plan::Mode;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::{parse, print};
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_ir::weights::Weight;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;

const NAMES: [&str; 59] = [
    "arcee",
    "bamba",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma2_padded",
    "gemma3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_serial",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "helium",
    "hunyuan",
    "llama4",
    "llama_bias_tied",
    "llama_gqa",
    "llama_mha",
    "llama_padded",
    "llama_yarn",
    "mamba2",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral_window",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_raw",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
];

fn train(batch: usize) -> Shape {
    Shape::new(batch, 16, Mode::Train)
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn whole(shape: &[usize]) -> Vec<Range<usize>> {
    shape.iter().map(|&n| 0..n).collect()
}

fn model(name: &str, shape: &Shape) -> Model {
    load(&folder(name), shape).unwrap_or_else(|d| panic!("{name}: {d}"))
}

/// A reference tensor.
fn stored(name: &str, tensor: &str) -> Vec<f64> {
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor(tensor).unwrap().data();
    data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect()
}

/// The shape and the numbers of a tensor of the folder's batch.
fn whole_numbers(name: &str, tensor: &str) -> (Vec<usize>, Vec<i32>) {
    let bytes = std::fs::read(folder(name).join("batch.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let t = file.tensor(tensor).unwrap();
    let one = |b: &[u8; 8]| i32::try_from(i64::from_le_bytes(*b)).unwrap();
    (t.shape().to_vec(), t.data().as_chunks::<8>().0.iter().map(one).collect())
}

/// Arguments of the program: weights from the checkpoint, the batch of the folder.
fn arguments(m: &Model, name: &str) -> Vec<Vec<Tensor>> {
    let [ids, labels] = ["input_ids", "labels"].map(|tensor| whole_numbers(name, tensor));
    let seq = labels.0[1];
    // Position i is scored against label i + 1.
    let next = |row: &[i32]| [&row[1..], &[-100]].concat();
    let targets: Vec<i32> = labels.1.chunks(seq).flat_map(next).collect();
    let checkpoint = m.checkpoint.as_ref().expect("weights");
    let f = &m.module.funcs[0];
    let mut weights = m.weights.iter();
    let mut one = |port: &shardc_ir::func::Port| {
        let role = port.role.as_ref().expect("a role");
        let shape = f.ty(port.value).sizes();
        let n = shape.iter().product();
        let ints = |v: Vec<i32>| v.into_iter().take(n).map(f64::from).collect();
        let data: Vec<f64> = match (role.kind, &*role.name) {
            (RoleKind::Param, param) => {
                let w = weights.next().expect("one weight per parameter");
                assert_eq!((&*w.param, &w.shape[..]), (param, &shape[..]));
                let mut out = vec![0.0; n];
                checkpoint.read(w, &whole(&w.shape), &mut out).unwrap();
                out.into_iter().map(f64::from).collect()
            }
            (_, "input_ids") => ints(ids.1.clone()),
            (_, "targets") => ints(targets.clone()),
            (_, "positions") => (0..shape[0]).map(|i| i as f64).collect(),
            (_, other) => panic!("{other}"),
        };
        vec![Tensor::new(&shape, data)]
    };
    f.args.iter().map(&mut one).collect()
}

fn off(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let most = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    got.iter().zip(want).fold(0.0f64, |m, (g, w)| m.max((g - w).abs())) / most
}

/// Results of the program on the first rows of the folder's batch.
fn results(name: &str, rows: usize) -> (Model, Vec<Vec<Tensor>>, Vec<Vec<Tensor>>) {
    let m = model(name, &train(rows));
    let args = arguments(&m, name);
    let out = call(&m.module.mesh, &m.module.funcs[0], &args, Precision::F64).unwrap();
    (m, args, out)
}

#[test]
fn logits_are_those_of_transformers() {
    for name in NAMES {
        let (m, _, out) = results(name, 2);
        let want = stored(name, "logits");
        let off = off(&out[out.len() - 1][0].data, &want[..2 * 16 * m.facts.vocab]);
        assert!(off <= 1e-5, "{name}: logits are off by {off:e}");
    }
}

#[test]
fn the_loss_is_that_of_transformers() {
    for name in NAMES.into_iter().filter(|n| !n.ends_with("_padded")) {
        let (m, args, out) = results(name, 8);
        let targets = &args[args.len() - 2][0];
        // The program gives the sum, the reference the mean.
        let count = targets.data.iter().filter(|&&t| t >= 0.0).count() as f64;
        // Beside it stands the auxiliary loss of the microbatch, times its coefficient.
        let with_aux = m.config["output_router_logits"] == true;
        assert_eq!(out.len(), 2 + usize::from(with_aux));
        let aux = if with_aux { out[1][0].data[0] } else { 0.0 };
        let off = off(&[out[0][0].data[0] / count + aux], &stored(name, "loss"));
        assert!(off <= 1e-6, "{name}: the loss is off by {off:e}");
    }
}

#[test]
fn programs_have_the_arguments_and_results_that_are_promised() {
    for name in NAMES {
        let m = model(name, &train(8));
        assert!(m.warnings.is_empty(), "{name}: {:?}", m.warnings);
        let f = &m.module.funcs[0];
        assert_eq!((m.module.funcs.len(), f.name.as_str()), (1, "model"));
        let roles: Vec<_> = f.args.iter().map(|a| a.role.clone().unwrap()).collect();
        let (params, inputs) = roles.split_at(m.weights.len());
        assert!(params.iter().all(|r| r.kind == RoleKind::Param));
        let names: Vec<_> = inputs.iter().map(|r| &*r.name).collect();
        assert_eq!(names, ["input_ids", "targets", "positions"]);
        let results: Vec<_> = f.results.iter().map(|r| r.role.clone().unwrap()).collect();
        assert_eq!((results[0].kind, &*results[0].name), (RoleKind::Sum, "loss"));
        let last = results.len() - 1;
        assert_eq!((results[last].kind, &*results[last].name), (RoleKind::Output, "logits"));
        assert_eq!(f.ty(f.results[last].value).sizes()[..], [8, 16, m.facts.vocab]);
        let once =
            ["gpt_neox", "cohere", "cohere2", "phi", "falcon", "gptj", "mamba2", "nemotron_h"];
        let halves = if once.contains(&name) { 1 } else { 2 };
        assert_eq!(m.sequence.len(), 1 + halves * m.facts.layers, "{name}");
        let wide = [8, 16, m.facts.hidden];
        assert!(m.sequence.iter().all(|&(v, d)| d == 1 && f.ty(v).sizes()[..] == wide));
        let per_layer = f.nodes.len() as f64 / m.facts.layers as f64;
        // Those with a recurrence have most.
        assert!((30.0..120.0).contains(&per_layer), "{name}: {per_layer} nodes per layer");
        // Every node passes the ops' own checks, and nothing is computed for nobody.
        for n in &f.nodes {
            let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
            n.op.check(&m.module.mesh, &ins, &[]).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        }
        let mut lean = f.clone();
        lean.drop_dead();
        assert_eq!(lean.nodes.len(), f.nodes.len(), "{name} has dead nodes");
    }
}

#[test]
fn programs_verify_and_survive_their_text() {
    for name in NAMES {
        let m = model(name, &train(8));
        verify(&m.module, Phase::Source).unwrap_or_else(|d| panic!("{name}: {}", d[0]));
        let text = print(&m.module);
        let again = parse(&text).unwrap_or_else(|d| panic!("{name}: {d}"));
        assert_eq!(print(&again), text, "{name}");
    }
}

#[test]
fn inference_gives_logits_only() {
    let m = model("llama_gqa", &Shape::new(1, 4, Mode::Infer));
    let f = &m.module.funcs[0];
    let inputs: Vec<_> = f.args[m.weights.len()..].iter().map(|a| f.ty(a.value).dtype).collect();
    assert_eq!(inputs, [DType::I32; 2]);
    let results: Vec<_> = f.results.iter().map(|r| &*r.role.as_ref().unwrap().name).collect();
    assert_eq!(results, ["logits"]);
}

#[test]
fn scopes_and_names_follow_the_modules() {
    let m = model("llama_gqa", &train(8));
    let f = &m.module.funcs[0];
    let names: Vec<_> = f.args.iter().map(|a| f.name(a.value).to_string()).collect();
    for want in
        ["%embed_tokens", "%l2.q_proj", "%l0.input_layernorm", "%norm", "%lm_head", "%positions"]
    {
        assert!(names.contains(&want.to_string()), "{want} is not in {names:?}");
    }
    let scopes: Vec<_> = f.nodes.iter().map(|n| &*f.scope_info(n.scope).path).collect();
    for want in [
        "model.embed_tokens",
        "model.rotary",
        "model.layers.1",
        "model.layers.1.self_attn",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
        "lm_head",
        "loss",
    ] {
        assert!(scopes.contains(&want), "{want}");
    }
}

#[test]
fn tensor_parallel_dims_follow_the_recipe() {
    let dim = |m: &Model, name: &str| m.weights.iter().find(|w| w.param == name).unwrap().tp_dim;
    let m = model("llama_bias_tied", &train(8));
    let l = "model.layers.0";
    assert_eq!(dim(&m, "model.embed_tokens.weight"), Some(0));
    assert_eq!(dim(&m, &format!("{l}.self_attn.q_proj.weight")), Some(0));
    assert_eq!(dim(&m, &format!("{l}.self_attn.q_proj.bias")), Some(0));
    assert_eq!(dim(&m, &format!("{l}.self_attn.o_proj.weight")), Some(1));
    assert_eq!(dim(&m, &format!("{l}.mlp.down_proj.bias")), None);
    assert_eq!(dim(&m, &format!("{l}.input_layernorm.weight")), None);
    assert!(m.facts.tied && !m.weights.iter().any(|w| w.tensor == "lm_head.weight"));
    let g = model("gpt2", &train(8));
    assert_eq!(dim(&g, "transformer.wpe.weight"), None);
    assert_eq!(dim(&g, "transformer.h.1.attn.c_attn.weight.k"), Some(1));
    assert_eq!(dim(&g, "transformer.h.1.attn.c_attn.bias.v"), Some(0));
    assert_eq!(dim(&g, "transformer.h.1.attn.c_proj.weight"), Some(0));
    assert_eq!(dim(&g, "transformer.h.1.mlp.c_fc.weight"), Some(1));
}

#[test]
fn fused_tensors_are_three_parameters() {
    let m = model("gpt2", &train(8));
    let parts: Vec<_> = m.weights.iter().filter(|w| w.part.is_some()).collect();
    assert_eq!(parts.len(), 2 * 6);
    let k = parts.iter().find(|w| w.param == "transformer.h.0.attn.c_attn.weight.k").unwrap();
    let p = k.part.unwrap();
    assert_eq!((p.dim, p.start, p.len), (1, 32, 32));
    assert_eq!((&k.tensor_shape[..], &k.shape[..]), (&[32, 96][..], &[32, 32][..]));
    // Its slice is that of the stored tensor.
    let bytes = std::fs::read(folder("gpt2/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all: Vec<f32> = file
        .tensor(&k.tensor)
        .unwrap()
        .data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    let mut got = [0.0; 6];
    m.checkpoint.unwrap().read(k, &[4..6, 7..10], &mut got).unwrap();
    let want: Vec<f32> = (4..6).flat_map(|r| all[r * 96 + 39..r * 96 + 42].to_vec()).collect();
    assert_eq!(got[..], want[..]);
}

#[test]
fn windows_of_layers() {
    let windows = |m: &Model| -> Vec<_> {
        let attention = |n: &shardc_ir::func::Node| match &n.op {
            shardc_ir::ops::Op::Attention(a) => Some(a.mask.left),
            _ => None,
        };
        m.module.funcs[0].nodes.iter().filter_map(attention).collect()
    };
    assert_eq!(windows(&model("mistral_window", &train(8))), [Some(4), Some(4)]);
    assert_eq!(windows(&model("gemma2", &train(8))), [Some(4), None, Some(4)]);
    // sliding_window is 4, but use_sliding_window is false.
    assert_eq!(windows(&model("qwen2", &train(8))), [None, None]);
}

#[test]
fn a_config_alone_makes_a_model() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny-llama/config.json");
    let m = load(&path, &Shape::new(2, 8, Mode::Train)).unwrap();
    assert!(m.checkpoint.is_none() && m.warnings.is_empty());
    assert_eq!((m.facts.layers, m.facts.hidden, m.facts.ffn, m.facts.vocab), (4, 128, 352, 256));
    assert_eq!((m.facts.heads, m.facts.kv_heads, m.facts.head_dim), (8, 4, 16));
    assert!(!m.facts.tied && m.weights.len() == 4 * 9 + 3);
}

#[test]
fn a_slice_read_alone_is_the_slice_of_the_whole() {
    for name in ["llama_gqa", "gpt2"] {
        let m = model(name, &train(8));
        let c = Checkpoint::open(&folder(name)).unwrap().unwrap();
        for w in &m.weights {
            let mut all = vec![0.0; w.shape.iter().product()];
            c.read(w, &whole(&w.shape), &mut all).unwrap();
            let part: Vec<_> = w.shape.iter().map(|&n| n / 3..n.div_ceil(2) + 1).collect();
            let mut got = vec![0.0; part.iter().map(Range::len).product()];
            c.read(w, &part, &mut got).unwrap();
            let all = Tensor::new(&w.shape, all.into_iter().map(f64::from).collect());
            let want = part.iter().enumerate().fold(all, |t, (d, r)| t.slice(d, r.start, r.len()));
            assert!(want.data.iter().zip(&got).all(|(a, b)| *a == f64::from(*b)), "{}", w.param);
        }
    }
}

/// The losses of routers are what their formulas make of the logits and choices.
#[test]
fn losses_of_routers() {
    for (name, layers, top_k) in [("mixtral", 2, 2), ("deepseek_v3", 2, 3)] {
        let balance = Balance { aux: Some(0.3), z: 0.7, load: true };
        let m = model(name, &Shape { balance, ..train(8) });
        assert!(m.warnings.is_empty() != (name == "mixtral"), "{name}: {:?}", m.warnings);
        let args = arguments(&m, name);
        let mut f = m.module.funcs[0].clone();
        let names: Vec<_> = f.results.iter().map(|r| r.role.clone().unwrap()).collect();
        let sums: Vec<_> = names.iter().filter(|r| r.kind == RoleKind::Sum).collect();
        let own = f.results.len();
        for end in [".router_logits", ".expert"] {
            let all = f.nodes.iter().flat_map(|n| n.outs.to_vec());
            let found: Vec<_> = all.filter(|&v| f.name(v).to_string().ends_with(end)).collect();
            assert_eq!(found.len(), layers, "{name}: {end}");
            f.results.extend(found.into_iter().map(|value| Port { value, role: None }));
        }
        let out = call(&m.module.mesh, &f, &args, Precision::F64).unwrap();
        let (tokens, experts) = (8 * 16, 8);
        let (mut chosen, mut mean) = (vec![0.0; experts], vec![0.0; experts]);
        let mut z = 0.0;
        for layer in 0..layers {
            let logits = &out[own + layer][0].data;
            let choices = &out[own + layers + layer][0].data;
            assert_eq!((logits.len(), choices.len()), (tokens * experts, tokens * top_k));
            choices.iter().for_each(|&e| chosen[e as usize] += 1.0);
            for l in logits.chunks(experts) {
                let sum: f64 = l.iter().map(|x| x.exp()).sum();
                z += sum.ln().powi(2);
                let score = |x: f64| match name {
                    "mixtral" => x.exp(),
                    _sigmoids => 1.0 / (1.0 + (-x).exp()),
                };
                let all: f64 = l.iter().map(|&x| score(x)).sum();
                mean.iter_mut().zip(l).for_each(|(m, &x)| *m += score(x) / all);
            }
            if name != "mixtral" {
                let (role, got) = (&names[3 + layer], &out[3 + layer][0].data);
                assert_eq!(role.kind, RoleKind::TokensPerExpert);
                assert!(role.name.ends_with("e_score_correction_bias"), "{}", role.name);
                let of = |e: usize| choices.iter().filter(|&&c| c == e as f64).count() as f64;
                assert_eq!(*got, (0..experts).map(of).collect::<Vec<_>>());
            }
        }
        let n = (tokens * layers) as f64;
        let aux: f64 = chosen.iter().zip(&mean).map(|(c, m)| c / n * (m / n)).sum();
        assert_eq!((&*sums[1].name, &*sums[2].name), ("aux_loss", "z_loss"));
        for (got, want) in [(1, 0.3 * experts as f64 * aux), (2, 0.7 * z / n)] {
            let got = out[got][0].data[0];
            assert!((got - want).abs() <= 1e-12 * want, "{name}: {got}, the formula gives {want}");
        }
    }
}

#[test]
fn balance_that_changes_nothing_is_told() {
    let balance = Balance { aux: Some(0.1), z: 0.1, load: true };
    for (name, mode, told) in [
        ("llama_mha", Mode::Train, 3),
        ("mixtral", Mode::Train, 1),
        ("deepseek_v3", Mode::Train, 0),
        ("deepseek_v3", Mode::Infer, 3),
    ] {
        let m = model(name, &Shape { balance, ..Shape::new(8, 16, mode) });
        let codes: Vec<_> = m.warnings.iter().map(|d| d.code).collect();
        assert_eq!(codes, vec!["no-effect"; told], "{name}");
    }
    // 0 turns the config's off.
    let off = Balance { aux: Some(0.0), ..Balance::default() };
    let m = model("mixtral", &Shape { balance: off, ..train(8) });
    assert!(m.warnings.is_empty() && m.module.funcs[0].results.len() == 2);
}

/// Which row of the embedding the look-up does not train, as transformers 5 has it (asked of the library: a
/// config without the key, with null, and with numbers from either end).
#[test]
fn padding_tokens_are_those_of_transformers() {
    let families = ["llama_mha", "mistral_window", "qwen2", "qwen3", "gpt2", "gemma2", "mixtral"];
    for name in families.into_iter().chain(["qwen3_moe", "deepseek_v3"]) {
        let text = std::fs::read(folder(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let padding = |config: &serde_json::Value| {
            let m = from_config(config, "config.json", &train(2)).unwrap_or_else(|d| panic!("{d}"));
            let take = m.module.funcs[0].nodes.iter().find_map(|n| match &n.op {
                Op::Take(t) => Some(t.padding),
                _ => None,
            });
            take.expect("an embedding")
        };
        let vocab = config["vocab_size"].as_i64().unwrap();
        let of =
            |token: usize| if name == "gpt2" { Padding::None } else { Padding::Constant(token) };
        for (id, token) in [(7, 7), (0, 0), (-1, vocab - 1), (-vocab, 0), (vocab - 1, vocab - 1)] {
            config["pad_token_id"] = id.into();
            assert_eq!(padding(&config), of(token as usize), "{name}: {id}");
        }
        config["pad_token_id"] = serde_json::Value::Null;
        assert_eq!(padding(&config), Padding::None, "{name}: null");
        config.as_object_mut().unwrap().remove("pad_token_id");
        let absent = if name == "gemma2" { Padding::Constant(0) } else { Padding::None };
        assert_eq!(padding(&config), absent, "{name}: no key");
    }
}

/// Every tensor of a checkpoint is a name that flags take: it means what is made of the tensor, or is
/// refused where the parameter is a stack of several.
#[test]
fn every_name_of_a_checkpoint_is_known() {
    for name in NAMES {
        let m = model(name, &train(1));
        let mut found = BTreeSet::new();
        for (tensor, _) in m.checkpoint.as_ref().expect("weights").iter() {
            let made_of = |w: &Weight| w.tensors().any(|t| t == tensor);
            let want: Vec<usize> =
                (0..m.weights.len()).filter(|&i| made_of(&m.weights[i])).collect();
            assert!(!want.is_empty(), "{name}: {tensor} belongs to no weight");
            found.extend(want.iter().copied());
            let got = parameters(&m.weights, tensor);
            if !m.weights[want[0]].is_stacked() {
                assert_eq!(got, Ok(want), "{name}: {tensor}");
                continue;
            }
            assert_eq!(got.expect_err("one of a stack").code, "part-of-stack", "{name}: {tensor}");
            let stack = m.weights[want[0]].tensor.replacen("{}", "*", 1);
            assert_eq!(parameters(&m.weights, &stack), Ok(want), "{name}: {stack}");
        }
        assert_eq!(found.len(), m.weights.len(), "{name}");
    }
}
