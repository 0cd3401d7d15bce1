//! Update rules on ranks: that they are torch's, that layouts change nothing but rounding, that
//! plans are proved and mistakes refused.

mod owners;
mod planted;
mod written;

use crate::fixture::*;
use crate::lab::{FIXTURES, Lab};
use crate::proofs::proved;
use safetensors::SafeTensors;
use shardc_frontends::Model;
use shardc_ir::func::{FuncKind, Role, RoleKind};
use shardc_ir::interp::{Precision, call};
use shardc_ir::mesh::Mesh;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_ir::text::update::{BUILT_IN, Update, built_in};
use shardc_ir::types::DType;
use shardc_passes::optim::groups;
use shardc_passes::options::{Options, Order};
use shardc_prove::field::prove_smaller;
use shardc_prove::lemmas::Lemmas;
use shardc_prove::{Verdict, by_form};
use shardc_runtime::StepBatch;
use shardc_testing::taken;
use std::collections::{BTreeMap, BTreeSet};

type Axes = &'static [(&'static str, usize)];

/// Rules as the references have them: in f32.
const MUON: &str = "hidden=muon,dtype=f32";

/// Projections head by head.
const HEADS: &str = "*.q_proj.weight+*.k_proj.weight+*.v_proj.weight=muon_heads,dtype=f32";
const HEADS_OF_MLA: &str = "*.q_b_proj.weight+*.kv_b_proj.weight=muon_heads,dtype=f32";

/// Options of a layout whose parameters are updated by these groups.
fn by(optim: &[&str], mesh: Axes, zero: u8, microbatch: usize) -> Options {
    let optim = optim.iter().map(|g| g.to_string()).collect();
    let sp = mesh.iter().any(|a| a.0 == "tp");
    Options { optim, zero, ..options(mesh, sp, microbatch) }
}

/// Parameters after three steps on thread ranks, by name.
fn trained(name: &str, o: &Options) -> (Model, BTreeMap<String, Vec<f32>>) {
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let compiled = compile(&model, o);
    let mut s = session(&model, &compiled);
    let targets = fx.targets();
    for step in 1..=3 {
        let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
        s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
    s.evaluate(&batch).unwrap_or_else(|e| panic!("{name}: {e}"));
    let peaks: Vec<usize> = compiled.plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
    assert_eq!(s.touched(), peaks, "{name}: high-water marks of the arenas");
    let mut after = BTreeMap::new();
    for w in &model.weights {
        let role = Role::new(RoleKind::Param, w.param.as_str());
        let t = s.tensor(&role).unwrap_or_else(|e| panic!("{e}"));
        after.insert(w.param.clone(), t.data);
    }
    (model, after)
}

/// What has no gradient but for rounding: what only chooses experts, and biases of keys, which
/// softmax does not see.
fn is_rounding(param: &str) -> bool {
    param.ends_with(".e_score_correction_bias") || param.ends_with(".c_attn.bias.k")
}

/// Compares with the file of torch's parameters: 2e-5 absolute, and 3e-4 of each tensor's update.
fn as_torch(name: &str, file: &str, o: &Options) {
    let fx = Fixture::open(name);
    let bytes = std::fs::read(fx.dir.join(format!("{file}.safetensors"))).expect("the reference");
    let st = SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |d: &[u8]| -> Vec<f64> {
        d.as_chunks::<4>().0.iter().map(|c| f64::from(f32::from_le_bytes(*c))).collect()
    };
    let all: BTreeMap<String, Vec<f64>> =
        st.tensors().iter().map(|(n, t)| (n.clone(), floats(t.data()))).collect();
    let (model, after) = trained(name, o);
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
    for w in model.weights.iter().filter(|w| !is_rounding(&w.param)) {
        let want = fx.part_of(&all, w, "param");
        let before = fx.parameter(&model, &w.param);
        let got: Vec<f64> = after[&w.param].iter().map(|&x| f64::from(x)).collect();
        let worst = got.iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        let apart = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        let moved = norm(&mut want.iter().zip(&before).map(|(a, b)| a - b));
        let what = format!("{name} {file} {:?} zero={} {}", o.mesh, o.zero, w.param);
        assert!(worst <= 2e-5, "{what}: {worst:.2e} after 3 steps");
        assert!(apart <= 3e-4 * moved, "{what}: {apart:.2e} of an update of {moved:.2e}");
    }
}

const PP2: Axes = &[("pp", 2)];
const DP2: Axes = &[("dp_shard", 2)];
const TP2: Axes = &[("tp", 2)];

#[test]
fn rules_are_those_of_torch() {
    as_torch("llama_gqa", "muon", &by(&[MUON], &[], 0, 8));
    as_torch("llama_gqa", "muon_rms", &by(&[&format!("{MUON},scale=match_rms_adamw")], &[], 0, 8));
    as_torch("llama_gqa", "adafactor", &by(&["*=adafactor"], &[], 0, 8));
    as_torch("llama_gqa", "lion", &by(&["*=lion"], &[], 0, 8));
    // Conv1D weights, fused tensors, low ranks and experts.
    for name in ["gpt2", "phi3", "deepseek_v3", "qwen3_moe"] {
        as_torch(name, "muon", &by(&[MUON], &[], 0, 8));
    }
    as_torch("qwen3_moe", "lion", &by(&["*=lion"], &[], 0, 8));
    as_torch("llama_gqa", "muon_heads", &by(&[MUON, HEADS], &[], 0, 8));
    as_torch("deepseek_v3", "muon_heads", &by(&[MUON, HEADS_OF_MLA], &[], 0, 8));
}

/// Adafactor of three dims is torch's: rows and columns of each matrix, the sizes of updates and parameters of all.
#[test]
fn adafactor_of_three_dims_is_that_of_torch() {
    let path = format!("{FIXTURES}/adafactor.json");
    let text = std::fs::read_to_string(path).expect("what torch makes");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let number = |v: &serde_json::Value| v.as_f64().expect("a number");
    let numbers = |v: &serde_json::Value| -> Vec<f64> {
        v.as_array().expect("numbers").iter().map(number).collect()
    };
    let shape: Vec<usize> = numbers(&json["shape"]).into_iter().map(|n| n as usize).collect();
    let rule = built_in().named("adafactor").find(|r| r.fits(&shape)).expect("one of three dims");
    let given = [("decay".to_string(), json["decay"].to_string())].into();
    let attrs = rule.attributes(&given, [1, 1], None, &shape).expect("attributes");
    let u = Update { rule: rule.clone(), attrs, stack: false, lr: 1.0, group: 0 };
    let f = u.func(&shape).unwrap_or_else(|d| panic!("{d}"));
    let tensor = |shape: &[usize], data| Tensor { shape: shape.to_vec().into(), data };
    let (mut p, mut states) = (
        tensor(&shape, numbers(&json["before"])),
        vec![tensor(&shape[..2], vec![0.0; 6]), tensor(&[shape[0], shape[2]], vec![0.0; 8])],
    );
    let near = |got: &Tensor, want: &serde_json::Value, what: &str| {
        for (a, b) in got.data.iter().zip(numbers(want)) {
            assert!((a - b).abs() <= 1e-12, "{what}: {a} and {b}");
        }
    };
    let after = json["after"].as_array().expect("steps");
    for (step, grad) in json["grads"].as_array().expect("steps").iter().enumerate() {
        let mut args = vec![p, tensor(&shape, numbers(grad))];
        args.append(&mut states);
        args.extend([number(&json["lr"]), (step + 1) as f64].map(Tensor::scalar));
        let args: Vec<Vec<Tensor>> = args.into_iter().map(|t| vec![t]).collect();
        let made = call(&Mesh::default(), &f, &args, Precision::F64).expect("it runs");
        let mut made = made.into_iter().map(|mut t| t.swap_remove(0));
        p = made.next().expect("the parameter");
        states = made.collect();
        near(&p, &after[step], "the parameter");
    }
    near(&states[0], &json["row_var"], "rows");
    near(&states[1], &json["col_var"], "columns");
}

/// Each family on a sample of layouts is torch's Muon, too.
#[test]
fn families_on_layouts_are_those_of_torch() {
    const BOTH: Axes = &[("dp_shard", 2), ("tp", 2)];
    let experts = |o: Options| Options { ep: 4, etp: Some(1), ..o };
    for (i, name) in
        ["gpt2", "phi3", "deepseek_v3", "qwen3_moe", "llama_gqa"].into_iter().enumerate()
    {
        let layouts = [(TP2, 0), (DP2, 3), (BOTH, 1), (PP2, 0), (&[("dp_shard", 4)], 2)];
        for (mesh, zero) in (0..).zip(layouts).filter(|(j, _)| taken(i + j, 5)).map(|x| x.1) {
            let o = by(&[MUON], mesh, zero, 2);
            let has_experts = ["deepseek_v3", "qwen3_moe"].contains(&name);
            as_torch(name, "muon", &if has_experts && mesh == BOTH { experts(o) } else { o });
        }
    }
}

/// Heads that tp has whole are iterated on where they are, others are put together; no matrix is cut within.
#[test]
fn heads_are_matrices_on_every_layout() {
    let four: Axes = &[("dp_shard", 4), ("tp", 2)];
    for (i, (mesh, zero)) in
        [(TP2, 0), (DP2, 1), (DP2, 3), (four, 1), (PP2, 0)].into_iter().enumerate()
    {
        if taken(i, 2) {
            let o = by(&[MUON, HEADS], mesh, zero, 2);
            as_torch("llama_gqa", "muon_heads", &o);
            proved("llama_gqa", &o);
        }
    }
    let o = by(&[MUON, HEADS_OF_MLA], TP2, 0, 4);
    as_torch("deepseek_v3", "muon_heads", &o);
    proved("deepseek_v3", &o);
    // Behind its products are norms of all heads.
    proved("olmo2", &by(&[HEADS], TP2, 0, 4));
    // What tp has whole is not sent.
    let o = by(&[HEADS], TP2, 0, 4);
    let compiled = compile(&Fixture::open("llama_gqa").model(&o), &o);
    let all = compiled.plan.module.of_kind(FuncKind::OptimizerStep).flat_map(|f| &f.nodes);
    let sent = all.filter(|n| n.op.collective().is_some_and(|c| c.dim().is_some())).count();
    assert_eq!(sent, 0, "{}", text::print(&compiled.plan.module));
    for (name, group) in
        [("llama_gqa", "*.o_proj.weight=muon_heads"), ("gpt2", "*.c_attn.weight=muon_heads")]
    {
        let o = by(&[group], &[], 0, 8);
        let d = try_compile(&Fixture::open(name).model(&o), &o).expect_err(group);
        assert!(d.code == "update-rule" && d.message.contains("makes no heads"), "{}", d.render());
    }
}

#[test]
fn layouts_change_no_rule() {
    let layouts = [(TP2, 0), (DP2, 1), (DP2, 2), (DP2, 3), (PP2, 0)];
    for (i, (file, group)) in
        [("muon", MUON), ("lion", "*=lion"), ("adafactor", "*=adafactor")].into_iter().enumerate()
    {
        for (j, (mesh, zero)) in layouts.into_iter().enumerate().filter(|(j, _)| taken(i + j, 3)) {
            let o = by(&[group], mesh, zero, if j == 4 { 2 } else { 4 });
            as_torch("llama_gqa", file, &o);
            proved("llama_gqa", &o);
        }
    }
    let experts: Axes = &[("dp_shard", 2), ("tp", 2)];
    let o = Options { ep: 2, ..by(&[MUON], experts, 1, 4) };
    proved("qwen3_moe", &o);
    proved("gpt2", &by(&[MUON], experts, 3, 2));
    // Weights of convolutions have three dims.
    proved("mamba2", &by(&["*=adafactor"], DP2, 1, 2));
    let half = Options { dtype: DType::BF16, ..by(&["hidden=muon,state_dtype=bf16"], TP2, 0, 4) };
    proved("llama_gqa", &half);
    let f16 = Options { dtype: DType::F16, ..by(&["*=lion"], DP2, 1, 4) };
    proved("llama_gqa", &f16);
    let order = Order::Named("interleaved".into());
    proved("llama_bias_tied", &Options { schedule: order, ..by(&[MUON], PP2, 0, 2) });
}

/// What rules make of whole matrices, of their rows and of their heads is evaluated at the least sizes, too: states have
/// dims of their own, and matrices are put one behind the other for their owners.
#[test]
fn updates_are_proved_at_the_least_sizes() {
    const BOTH: Axes = &[("dp_shard", 2), ("tp", 2)];
    let owners = format!("{MUON},spread=owners");
    let cases = [
        ("llama_gqa", by(&["*=adafactor"], BOTH, 1, 2)),
        ("llama_gqa", by(&[&owners], BOTH, 1, 2)),
        ("llama_deep", by(&[&owners], &[("dp_shard", 4), ("tp", 2)], 3, 1)),
        ("gpt2", by(&[&owners], TP2, 0, 4)),
        ("llama_gqa", by(&[MUON, HEADS], BOTH, 1, 2)),
        ("qwen3", by(&[MUON], DP2, 3, 2)),
    ];
    for (i, (name, o)) in cases.into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let model = Fixture::open(name).model(&o);
        let texts = texts(&model, &o, &compile(&model, &o));
        let r = prove_smaller(&texts.subject(), texts.data);
        assert_eq!(r.verdict(), Verdict::Proved, "{i}: {name} {:?}: {:?}", o.mesh, r.gaps);
        let full = by_form(&texts.subject(), Lemmas::default());
        assert!(r.shown["results on all ranks"] >= full.shown["updates"], "{name}: {:?}", r.shown);
    }
}

/// Changes of a program that compute another update: none is proved.
#[test]
fn other_updates_are_refused() {
    for (mesh, zero) in [(TP2, 0), (DP2, 1)] {
        let gather = format!("{MUON},spread=gather");
        let o = by(&[&gather, "*.embed_tokens.weight=lion"], mesh, zero, 4);
        let fx = Fixture::open("llama_gqa");
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let mut texts = texts(&model, &o, &compiled);
        let text = text::print(&texts.programs);
        assert_eq!(by_form(&texts.subject(), Lemmas::default()).verdict(), Verdict::Proved);
        for (from, to) in [
            ("scale[3.4445]", "scale[3.4446]"),
            ("scale[-4.775]", "scale[-4.774]"),
            ("scale[2.0315]", "scale[-2.0315]"),
            ("scale[0.050000000000000044]", "scale[0.05]"),
            ("clamp[1e-7; hi=inf]", "clamp[1e-6; hi=inf]"),
            (" = sign ", " = abs "),
            ("scale[0.01]", "scale[0.02]"),
            ("scale[0.99]", "scale[0.9]"),
            // A scale of the turned matrix, no eps, an iteration fewer, momentum without its correction.
            ("scale[1.224744871391589]", "scale[0.8164965809277261]"),
            ("_f.1, %l{i}.k_proj_norm", "_f.1, %l{i}.k_proj_sqrt"),
            ("scale[1.0] %l{i}.k_proj_x5", "scale[1.0] %l{i}.k_proj_x4"),
            ("k_proj_f = sub ", "k_proj_f = add "),
            // A gradient that is not clipped, and the update of another matrix.
            ("sub %d_l{i}.g.1, %l{i}.k", "sub %d_l{i}.k_proj, %l{i}.k"),
            ("add %l{i}.v_proj_scale_piece", "add %l{i}.k_proj_scale_piece"),
        ] {
            let other = text.replace(from, to);
            assert_ne!(other, text, "{from} is not in the programs");
            texts.programs = text::parse(&other).unwrap_or_else(|d| panic!("{d}"));
            let r = by_form(&texts.subject(), Lemmas::default());
            assert_ne!(r.verdict(), Verdict::Proved, "{from} as {to} on {mesh:?}");
        }
    }
}

/// A group that means nothing is refused by what it lacks.
#[test]
fn groups_that_mean_nothing_are_refused() {
    let fx = Fixture::open("llama_gqa");
    for (group, says) in [
        ("*.nothing=muon", "`*.nothing` matches no trained parameter"),
        ("*.norm.weight=muon", "`@muon` is not for"),
        ("*=moun", "no update rule is called `moun`"),
        ("hidden=muon,scale=rms", "`rms` is no scale"),
        ("hidden=muon,lr=-1", "a learning rate is a number above 0"),
        ("hidden=muon,momentum", "an attribute has no value"),
        ("hidden=muon,momentum=2", "`2` is no momentum"),
        ("hidden=muon,decay=-1", "`-1` is no decay"),
        ("hidden=adamw,eps=0", "`0` is no eps"),
        ("hidden=muon,steps=0", "`0` is no steps"),
        ("*=adafactor,d=0", "`0` is no d"),
        ("*=adafactor,beta2_decay=0.8", "`0.8` is no beta2_decay"),
        ("*=adafactor,eps1=0", "`0` is no eps1"),
        ("*=adamw,beta1=0.9,beta1=0.8", "beta1 is given twice"),
        ("hidden=muon,lr*=1e-300", "a learning rate is a number above 0"),
        ("hidden=muon,lr*=1e-36", "out of the range of f32"),
        ("hidden=muon,spread=all", "spread is one of auto, owners and gather"),
        ("hidden=muon,state_dtype=u8", "`u8` is no state_dtype"),
        ("hidden=muon,decay=x", "`x` is no decay of `@muon`: it is a word"),
        ("*=adamw,decay=x", "`x` is no decay of `@adamw`: it is a word"),
        ("hidden=muon,lr_at=warmup-cosine", "a group has no schedule of its own"),
        ("*=adamw8bit", "no update rule is called `adamw8bit`"),
        ("hidden", "no update rule is named"),
    ] {
        let o = by(&[group], &[], 0, 8);
        let d = try_compile(&fx.model(&o), &o).expect_err(group);
        assert!(d.code == "update-rule" && d.message.contains(says), "{group}: {}", d.render());
        assert!(!d.help.is_empty(), "{}", d.render());
        let said = d.render();
        let more = match group {
            "*.norm.weight=muon" => "it takes tensors of the dims [n,m]\n",
            "hidden=muon,steps=0" => "steps are a whole number from 1 to 100",
            "*=adamw8bit" => "states of 8 bits are not built: state_dtype=bf16",
            _ => group.split(',').next().unwrap_or(""),
        };
        assert!(said.contains(more), "{group}: {said}");
    }
    let other = "update @other(%p: f32[*] param, %g: f32[*] grad, %m: f32[*] state[exp_avg] = 1) -> \
                 (f32[*] param, f32[*] state[exp_avg]) {\n  return sub %p, %g; %m\n}\n";
    let o = by(&["*.norm.weight=other", "hidden=lion"], &[], 0, 8);
    let o = Options { optim_file: other.into(), ..o };
    let d = try_compile(&fx.model(&o), &o).expect_err("two beginnings of one state");
    assert!(d.message.contains("two rules begin a state exp_avg"), "{}", d.render());
}

/// Lion in bf16 beside AdamW in f32: states of one name have the element types of their groups.
#[test]
fn states_of_one_name_have_several_element_types() {
    let of = |mesh, zero| by(&["hidden=lion,state_dtype=bf16"], mesh, zero, 2);
    let (_, one) = trained("llama_gqa", &of(&[], 0));
    for (mesh, zero) in [(TP2, 0), (DP2, 3), (PP2, 0)] {
        let o = of(mesh, zero);
        let (model, all) = trained("llama_gqa", &o);
        let compiled = compile(&model, &o);
        let types: Vec<DType> = compiled.plan.module.states.iter().map(|s| s.dtype).collect();
        assert_eq!(
            types,
            [DType::F32, DType::F32, DType::BF16],
            "{:?}",
            compiled.plan.module.states
        );
        for (param, want) in &one {
            let off = all[param].iter().zip(want).filter(|(a, b)| (**a - **b).abs() > 2e-5).count();
            // Signs of what is 0 but for rounding may differ, of what Lion trains: of few.
            let few = if param.contains("_proj") { want.len() / 100 } else { 0 };
            assert!(off <= few, "{param}: {off} of {}", want.len());
        }
        proved("llama_gqa", &o);
    }
}

/// `hidden` is what a product of a layer takes as a matrix: no norm by heads, though it has two dims, and no bias of
/// experts. What has the dims and is left out is named.
#[test]
fn hidden_are_the_matrices_of_products() {
    for (name, others, said) in [
        (
            "cohere",
            &["_norm.weight", "bias"][..],
            Some("layers.0.self_attn.q_norm.weight` and 3 other"),
        ),
        ("gpt_oss", &["bias", "sinks"], None),
    ] {
        let o = by(&[MUON], &[], 0, 8);
        let model = Fixture::open(name).model(&o);
        let f = &model.module.funcs[0];
        let all = groups(f, &model.weights, &BTreeSet::new(), &o).unwrap_or_else(|d| panic!("{d}"));
        for (param, update) in &all.of {
            let layer = param.contains(".layers.");
            let norm = param.ends_with("layernorm.weight");
            let hidden = layer && !norm && !others.iter().any(|o| param.contains(o));
            assert_eq!(update.rule.name == "muon", hidden, "{name}: {param}");
        }
        let left = all.warnings.into_iter().next().map(|d| d.message);
        assert_eq!(left.is_some(), said.is_some(), "{left:?}");
        assert!(said.is_none_or(|said| left.is_some_and(|m| m.contains(said))), "{name}");
    }
}

/// A rule that no book has: two means of which one is of old parameters, signs and a norm by rows.
const OWN: &str = "
update @mine(
  %p: f32[n,m] param, %g: f32[n,m] grad, %m: f32[n,m] state[mean] = 0,
  %old: f32[n,m] state[before] = 0, %rows: f32[n] state[rows] = 1,
  %lr: f32[] scalar \"lr\", %step: f32[] scalar \"step\", %norm: f32[] scalar \"grad_norm\",
) -> (f32[n,m] param, f32[n,m] state[mean], f32[n,m] state[before], f32[n] state[rows])
  with mu = 0.9
  with decay = 0
{
  %m2 = lerp[1 - $mu] %m, %g
  %r2 = lerp[0.75] %rows, scale[1 / $m] dot[nm,nm->n] %g, %g
  %u = div[nm,n->nm] %m2, shift[1e-3] sqrt %r2
  %drift = scale[0.01] sub %p, %old
  %all = add %u, (add sign %m2, (add %drift, scale[$decay] %p))
  %rate = div %lr, (add %step, %norm)
  return sub %p, mul[nm,->nm] %all, %rate; %m2; %p; %r2
}
";

/// It runs on eight ranks, as on one, and is proved.
#[test]
fn a_rule_of_ones_own_is_partitioned_and_proved() {
    let eight: Axes = &[("pp", 2), ("dp_shard", 2), ("tp", 2)];
    let own = |mesh, zero| Options {
        optim_file: OWN.into(),
        ..by(&["hidden=mine,lr*=2"], mesh, zero, 2)
    };
    let (_, one) = trained("llama_gqa", &own(&[], 0));
    let (_, all) = trained("llama_gqa", &own(eight, 1));
    for (name, want) in &one {
        let worst = all[name].iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 2e-5, "{name}: {worst:e}");
    }
    proved("llama_gqa", &own(eight, 1));
}

/// Rules of papers, written as a user would.
const PAPERS: &str = include_str!("optimizers/papers.ir");

/// Each runs on eight ranks as on one, and is proved.
#[test]
fn rules_of_papers_are_partitioned_and_proved() {
    let eight: Axes = &[("pp", 2), ("dp_shard", 2), ("tp", 2)];
    let all = ["adan", "mars", "cautious", "adopt", "ademamix", "lamb", "normuon", "schedule_free"];
    for (_, name) in all.into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let on = if name == "normuon" { "hidden" } else { "*" };
        let group = format!("{on}={name},eps=1e-5");
        let of = |mesh, zero| Options { optim_file: PAPERS.into(), ..by(&[&group], mesh, zero, 2) };
        let (_, one) = trained("llama_gqa", &of(&[], 0));
        let (_, all) = trained("llama_gqa", &of(eight, 3));
        for (param, want) in &one {
            let worst = all[param].iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst <= 5e-5, "{name}: {param}: {worst:e}");
        }
        proved("llama_gqa", &of(eight, 3));
    }
}

/// A rule of any shape may keep a number of each parameter, split or not: one for all of it.
#[test]
fn a_number_is_a_state_of_any_shape() {
    let text = "update @mine(\n  %p: f32[*] param, %g: f32[*] grad, %e: f32[] state[energy] = 1,\n  \
                %lr: f32[] scalar \"lr\",\n) -> (f32[*] param, f32[] state[energy]) {\n  \
                %q = scale[1 / $elements] reduce_sum[*->] mul %g, %g\n  %e2 = lerp[0.1] %e, %q\n  \
                return sub %p, mul[*,->*] %g, mul %lr, rsqrt %e2; %e2\n}\n";
    let of = |mesh, zero| Options { optim_file: text.into(), ..by(&["*=mine"], mesh, zero, 2) };
    let (_, one) = trained("llama_gqa", &of(&[], 0));
    for (mesh, zero) in [(DP2, 3), (TP2, 0)] {
        let o = of(mesh, zero);
        let (_, all) = trained("llama_gqa", &o);
        for (param, want) in &one {
            let worst = all[param].iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst <= 2e-5, "{param} zero={zero}: {worst:e}");
        }
        proved("llama_gqa", &o);
    }
}

/// An op stands for the lines of a rule that is built in, letter for letter: others run their own.
#[test]
fn no_other_rule_is_an_op() {
    let lab = Lab::new("fused-rules");
    let start = BUILT_IN.find("update @adamw").expect("AdamW's text");
    let text = &BUILT_IN[start..start + BUILT_IN[start..].find("\n}").expect("its end") + 3];
    let model = format!("{FIXTURES}/llama_gqa");
    let args = ["compile", &model, "--seq", "16", "--optim-file", "rules.ir", "-o", "p"];
    let args = [&args[..], &["--optim", "*=adamw"]].concat();
    lab.write("rules.ir", text);
    lab.ok(&args);
    let other = text.replace("sqrt div", "abs div");
    assert_ne!(text, other);
    lab.write("rules.ir", &other);
    let said = lab.refuses(&args, 2, "update-rule");
    assert!(said.contains("leave its line `fused` out"), "{said}");
    let own: Vec<&str> = other.lines().filter(|l| !l.contains("fused")).collect();
    lab.write("rules.ir", own.join("\n") + "\n");
    lab.ok(&args);
}

/// A rule of one's own that is called as a built-in one has attributes of its own: those of flags that nobody gave are its
/// to say.
#[test]
fn a_rule_of_ones_own_may_be_called_adamw() {
    let lab = Lab::new("own-adamw");
    let model = format!("{FIXTURES}/llama_gqa");
    let rule = |name: &str, with: &str| {
        format!(
            "update @{name}(\n  %p: f32[*] param, %g: f32[*] grad, %m: f32[*] state[momentum] = 0,\n  %lr: f32[] scalar \
             \"lr\",\n) -> (f32[*] param, f32[*] state[momentum])\n  with {with} = 0.7\n{{\n  %m2 = lerp[1 - ${with}] \
             %m, %g\n  return sub %p, mul[*,->*] %m2, %lr; %m2\n}}\n"
        )
    };
    let compile = |name: &str, more: &[&str]| {
        let args = ["compile", &model, "--seq", "16", "--optim-file", "rules.ir", "-o", name];
        lab.ok(&[&args[..], more].concat());
        let text = std::fs::read_to_string(lab.path(name).join("programs/all.ir")).expect("read");
        text.lines().filter(|l| l.contains("_scale = scale[")).map(String::from).collect::<Vec<_>>()
    };
    lab.write("rules.ir", rule("mine", "beta1"));
    let want = compile("mine", &["--optim", "*=mine"]);
    assert!(!want.is_empty());
    lab.write("rules.ir", rule("adamw", "beta1"));
    assert_eq!(compile("own", &["--optim", "*=adamw"]), want);
    assert_eq!(compile("all", &[]), want);
    assert_ne!(compile("said", &["--optim", "*=adamw,beta1=0.9"]), want);
    assert_ne!(
        compile(
            "given",
            &[
                "--betas",
                "0.9,0.999",
                "--eps",
                "1e-8",
                "--optimizer",
                "sgd",
                "--optim",
                "*=adamw,beta1=0.9"
            ]
        ),
        want
    );
    lab.write("rules.ir", rule("adamw", "mu"));
    compile("other", &[]);
    let typed = ["compile", &model, "--seq", "16", "--optim-file", "rules.ir", "-o", "p"];
    let said = lab.refuses(&[&typed[..], &["--betas", "0.9,0.95"]].concat(), 2, "update-rule");
    assert!(said.contains("`@adamw` has no attribute `beta1`"), "{said}");
}

/// A rule may read what a state was in what it makes of the parameter, though a view of it is what it reads.
#[test]
fn old_values_of_states_are_read_before_they_are_written_over() {
    let at = BUILT_IN.find("update @adafactor(").expect("Adafactor's text");
    let text = BUILT_IN[at..].replace("mul[n,m->nm] %r2, %c2", "mul[n,m->nm] %r2, %c");
    assert_ne!(text, BUILT_IN[at..]);
    let of = |mesh, zero| Options {
        optim_file: text.clone(),
        ..by(&["*=adafactor,eps1=1e-3"], mesh, zero, 2)
    };
    let (_, one) = trained("llama_gqa", &of(&[], 0));
    for (mesh, zero) in [(DP2, 1), (TP2, 0)] {
        let o = of(mesh, zero);
        let (_, all) = trained("llama_gqa", &o);
        for (param, want) in &one {
            let worst = all[param].iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst <= 2e-5, "{param} zero={zero}: {worst:e}");
        }
        proved("llama_gqa", &o);
    }
}

/// What a rule of matrices makes of numbers is made of those of each expert, beside those of the step; and it decays as
/// it says itself, unless a group or the run says it.
#[test]
fn rules_of_ones_own_see_experts_one_by_one_and_decay_as_they_say() {
    let text = "update @mine(\n  %p: f32[n,m] param, %g: f32[n,m] grad,\n  %lr: f32[] scalar \"lr\", %norm: \
                f32[] scalar \"grad_norm\",\n) -> (f32[n,m] param)\n  with decay = 0\n{\n  \
                %s = sqrt dot[nm,nm->] %g, %g\n  %rate = div (mul %lr, %s), shift[1e-3] add %norm, %s\n  \
                return sub %p, mul[nm,->nm] (add %g, scale[$decay] %p), %rate\n}\n";
    let of = |group: &str, o: Options| Options {
        optim_file: text.into(),
        optim: vec![group.into()],
        ..o
    };
    let plain = |mesh, zero| by(&[], mesh, zero, 2);
    let (model, one) = trained("qwen3_moe", &of("hidden=mine", plain(&[], 0)));
    let o = of("hidden=mine", Options { ep: 2, ..plain(&[("dp_shard", 2), ("tp", 2)], 1) });
    let (_, all) = trained("qwen3_moe", &o);
    for (param, want) in one.iter().filter(|p| !is_rounding(p.0)) {
        let worst = all[param].iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 2e-5, "{param}: {worst:e}");
    }
    proved("qwen3_moe", &o);
    let decays = |group: &str, o: Options| {
        let o = of(group, o);
        let f = &model.module.funcs[0];
        let all = groups(f, &model.weights, &BTreeSet::new(), &o).unwrap_or_else(|d| panic!("{d}"));
        let own = all.of.values().find(|u| u.rule.name == "mine").expect("it updates some");
        own.numbers_of("decay").to_vec()
    };
    let of_run = |x| Options { weight_decay: x, ..plain(&[], 0) };
    let said = Options { given: vec!["weight-decay".into()], ..of_run(0.01) };
    assert_eq!(decays("hidden=mine", of_run(0.01)), [0.0]);
    assert_eq!(decays("hidden=mine", of_run(0.1)), [0.1]);
    assert_eq!(decays("hidden=mine", said), [0.01]);
    assert_eq!(decays("hidden=mine,decay=0.2", of_run(0.1)), [0.2]);
    assert_eq!(decays("hidden=mine,decay=0", of_run(0.1)), [0.0]);
}

/// A warning says that nobody shares what nobody makes together.
#[test]
fn spread_in_vain_is_said() {
    let fx = Fixture::open("llama_gqa");
    for (group, mesh, said) in [
        ("*=lion,spread=owners", TP2, "`@lion` makes no product of matrices"),
        ("hidden=muon,spread=gather", PP2, "no rank holds a part of a matrix"),
        ("hidden=muon,spread=owners", TP2, ""),
    ] {
        let o = by(&[group], mesh, 0, 4);
        let model = fx.model(&o);
        let f = &model.module.funcs[0];
        let all = groups(f, &model.weights, &BTreeSet::new(), &o).unwrap_or_else(|d| panic!("{d}"));
        let whys: Vec<String> = all.warnings.iter().map(|d| d.render()).collect();
        assert_eq!(whys.len(), usize::from(!said.is_empty()), "{group}: {whys:?}");
        assert!(whys.iter().all(|w| w.contains(said)), "{group}: {whys:?}");
    }
}

/// What a user's text may have wrong, as the command says it.
#[test]
fn wrong_texts_are_refused_by_the_command() {
    let lab = Lab::new("update-rules");
    let good = "update @mine(\n  %p: f32[n,m] param, %g: f32[n,m] grad, %s: f32[n] state[rows] = 0,\n  \
                %lr: f32[] scalar \"lr\",\n) -> (f32[n,m] param, f32[n] state[rows]) {\n  \
                return sub %p, mul[nm,->nm] %g, %lr; %s\n}\n";
    let model = format!("{FIXTURES}/llama_gqa");
    let args =
        ["compile", &model, "--seq", "16", "--optim-file", "rules.ir", "--optim", "hidden=mine"];
    for (from, to, says) in [
        ("", "", ""),
        ("; %s\n}", "\n}", "1 values are returned, not 2"),
        ("; %s\n}", "; %g\n}", "what is returned for `%s`"),
        (
            "%g: f32[n,m] grad",
            "%g: f32[n,m] grad, %q: f32[n,m] param",
            "2 arguments are `param`, not 1",
        ),
        ("\"lr\"", "\"loss\"", "no scalar of a step is called `loss`"),
        (
            "  return",
            "  repeat i in 0..inf, %x{i} at 0 is %g {\n %x{i+1} = exp %x{i}\n}\n  return",
            "does not end",
        ),
        ("f32[n] state", "f32[n,n] state", "a state has dims that its parameter has not"),
        ("f32[n] state", "f16[n] state", "is no element type here"),
        ("return sub %p, mul[nm,->nm] %g", "return sub %p, mul[nm,->nm] %h", "`%h` is not defined"),
        ("state[rows]) {", "state[rows])\n  with w = [1, 2]\n{", "`w` of `@mine, line 5`"),
    ] {
        lab.write("rules.ir", good.replace(from, to));
        if says.is_empty() {
            lab.ok(&args);
            continue;
        }
        let out = lab.shardc(&args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{to}: {said}");
        assert!(said.contains(says) && said.contains("= help: "), "{to}: {said}");
        assert!(said.contains("@mine, line ") || said.contains("rules.ir"), "{to}: {said}");
    }
    let again =
        |text: &str, of: &str| text.replace(of, &format!("{of}, {}", of.replace("%s", "%t")));
    let twice = again(&again(good, "%s: f32[n] state[rows] = 0"), "f32[n] state[rows])");
    let twice =
        twice.replace("state[rows]), f32[n] state[rows])", "state[rows], f32[n] state[rows])");
    lab.write("rules.ir", twice.replace("; %s\n}", "; %s; %t\n}"));
    let said = lab.refuses(&args, 2, "update-rule");
    assert!(said.contains("a second state is called `rows`"), "{said}");
}
