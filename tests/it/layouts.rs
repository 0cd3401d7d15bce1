//! Shardings that users ask for: every mix compiles to a plan that verifies and has the reference's
//! loss and gradients, or is refused with a diagnostic. Never a panic, never other numbers.

mod reshapes;
use crate::fixture::*;
use shardc_frontends::Model;
use shardc_ir::attr::read_atoms;
use shardc_ir::diag::Diag;
use shardc_ir::func::RoleKind;
use shardc_ir::names::glob;
use shardc_ir::plan::Plan;
use shardc_ir::rng::Stream;
use shardc_ir::types::AtomList;
use shardc_passes::memory::replay::replay;
use shardc_passes::options::{Options, ShardRule};
use shardc_passes::pipeline::Compiled;
use shardc_runtime::StepBatch;
use shardc_testing::samples;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

type Axes<'a> = &'a [(&'a str, usize)];

/// `GLOB=D,D[@pN]`.
fn rule(text: &str) -> ShardRule {
    let (glob, dims) = text.rsplit_once('=').expect("GLOB=D,D");
    let (dims, p) = dims.rsplit_once("@p").unwrap_or((dims, "0"));
    let dims = dims.split(',').map(String::from).collect();
    ShardRule { glob: glob.into(), dims, priority: p.parse().expect("a priority") }
}

/// What came of a mix.
enum Outcome {
    Equal,
    Refused(Box<Diag>),
    Wrong(String),
}

/// Compiles a mix, runs it on thread ranks in f32 and, if `exact`, by the interpreter in f64.
fn run(fx: &Fixture, mesh: Axes, sp: bool, shards: &[String], exact: bool) -> Outcome {
    let mut o: Options = options(mesh, sp, 1);
    o.microbatch = ROWS / o.data_parallel();
    o.shard = shards.iter().map(|s| rule(s)).collect();
    let model = fx.model(&o);
    let one = || -> Result<(), Diag> {
        let compiled = try_compile(&model, &o)?;
        obeyed(&compiled, &o.shard);
        replay(&compiled.plan).unwrap_or_else(|e| panic!("replay: {e}"));
        on_threads(fx, &model, &compiled);
        if exact {
            interpreted(fx, &model, &compiled);
        }
        Ok(())
    };
    match catch_unwind(AssertUnwindSafe(one)) {
        Ok(Ok(())) => Outcome::Equal,
        Ok(Err(d)) => Outcome::Refused(Box::new(d)),
        Err(e) => {
            let text = e.downcast_ref::<String>().cloned();
            Outcome::Wrong(
                text.unwrap_or_else(|| e.downcast_ref::<&str>().unwrap_or(&"?").to_string()),
            )
        }
    }
}

/// Parameters are stored as the last rule that names them says.
fn obeyed(compiled: &Compiled, rules: &[ShardRule]) {
    let m = &compiled.plan.module;
    let f = m.func("step_prologue").expect("enter");
    for a in &f.args {
        let Some(role) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) else { continue };
        let w = compiled.plan.weights.iter().find(|w| *w.param == *role.name).expect("a weight");
        let means = |r: &&ShardRule| w.tensors().all(|t| glob(&r.glob, &t));
        let Some(r) = rules.iter().rev().find(means) else { continue };
        if ["colwise", "rowwise", "replicated"].contains(&r.dims[0].as_str()) {
            continue; // `words_split_what_they_say`
        }
        for (d, word) in f.ty(a.value).dims.iter().zip(&r.dims).filter(|(_, w)| !w.ends_with('?')) {
            let asked = if word == "-" { Ok(AtomList::EMPTY) } else { read_atoms(word, &m.mesh) };
            assert_eq!(Ok(d.atoms), asked, "`{}` is not stored as asked", role.name);
        }
    }
}

fn on_threads(fx: &Fixture, model: &Model, compiled: &Compiled) {
    let mut s = session(model, compiled);
    let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), true);
    let r = s.step(&batch, 1e-3, 1).unwrap_or_else(|e| panic!("{e}"));
    let out = |k, n: &str| {
        r.output(k, n).expect(n).data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
    };
    fx.compare_loss(out(RoleKind::Metric, "loss")[0]);
    fx.compare_logits(&out(RoleKind::Output, "logits"));
    fx.compare_grads(model, |p| out(RoleKind::GradShown, p));
}

fn interpreted(fx: &Fixture, model: &Model, compiled: &Compiled) {
    let mut state = start(fx, model, compiled);
    interpret(compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
    let mesh = &compiled.plan.module.mesh;
    let out = |k, n: &str| state.output(mesh, k, n).unwrap_or_else(|e| panic!("{n}: {e}")).data;
    fx.compare_loss(out(RoleKind::Metric, "loss")[0]);
    fx.compare_logits(&out(RoleKind::Output, "logits"));
    fx.compare_grads(model, |p| out(RoleKind::GradShown, p));
}

/// Outcomes of many mixes.
struct Trial {
    name: &'static str,
    fx: Fixture,
    tried: usize,
    compiled: usize,
    wrong: Vec<String>,
}

impl Trial {
    fn new(name: &'static str) -> Trial {
        Trial { name, fx: Fixture::open(name), tried: 0, compiled: 0, wrong: vec![] }
    }

    /// Tries one mix; every twelfth is interpreted too, which is slow.
    fn mix(&mut self, mesh: Axes, sp: bool, shards: &[String]) {
        let what = format!("{} {mesh:?} sp={sp} {shards:?}", self.name);
        let exact = self.tried % 12 == 0;
        self.tried += 1;
        match run(&self.fx, mesh, sp, shards, exact) {
            Outcome::Equal => {
                println!("equal    {what}");
                self.compiled += 1;
            }
            Outcome::Refused(d) => {
                println!("refused  {what}: {}", d.code);
                if d.help.is_empty() {
                    self.wrong.push(format!("{what}: no help: {d}"));
                }
            }
            Outcome::Wrong(e) => self.wrong.push(format!("{what}:\n  {e}")),
        }
    }

    /// `refused`: how many mixes may be no legal layout.
    fn end(self, refused: usize) {
        let Trial { name, tried, compiled, wrong, .. } = self;
        println!("{name}: {compiled} of {tried} compile");
        assert!(wrong.is_empty(), "{} of {tried} are wrong:\n{}", wrong.len(), wrong.join("\n"));
        assert!(compiled + refused >= tried, "{name}: {} of {tried} are refused", tried - compiled);
    }
}

const TP2: Axes = &[("tp", 2)];
const TP4: Axes = &[("tp", 4)];
const DP2: Axes = &[("dp_replicate", 2)];
const DP2_TP2: Axes = &[("dp_replicate", 2), ("tp", 2)];
const DP2_TP4: Axes = &[("dp_replicate", 2), ("tp", 4)];
const X2: Axes = &[("x", 2)];
const DP2_X2_TP2: Axes = &[("dp_replicate", 2), ("x", 2), ("tp", 2)];
const DP2_X3: Axes = &[("dp_replicate", 2), ("x", 3)];
const X3: Axes = &[("x", 3)];

/// Meshes and mixes, in the order of the models below.
const LLAMA: &[(Axes, &[&str])] = &[
    (TP2, &["*.gate_proj.weight=rowwise", "*.q_proj.weight=replicated"]),
    (DP2_TP2, &["*.q_proj.weight=dp_replicate,-"]),
    (TP2, &["*.embed_tokens.weight=-,tp"]),
    (TP2, &["*.gate_proj.weight=-,tp", "*.up_proj.weight=-,tp", "*.down_proj.weight=tp,-"]),
    (TP2, &["*.gate_proj.weight=-,tp"]),
    (DP2_TP2, &["model.layers.0.mlp=?,tp,-@p1"]),
    (DP2_TP2, &["model.layers.*.mlp=?,-,tp@p1"]),
    (
        TP4,
        &[
            "*.gate_proj.weight=tp:(1)2,-",
            "*.up_proj.weight=tp:(1)2,-",
            "*.down_proj.weight=-,tp:(1)2",
        ],
    ),
    (TP4, &["*.down_proj.weight=tp:(1)2,tp:(2)2"]),
    (TP4, &["*.q_proj.weight=tp:(2)2,-", "*.o_proj.weight=-,tp:(2)2"]),
    (DP2_TP2, &["*.up_proj.weight=dp_replicate*tp,-"]),
    (DP2_TP2, &["lm_head.weight=tp*dp_replicate,-"]),
    (X2, &["*.q_proj.weight=x,-", "*.o_proj.weight=-,x"]),
    (DP2_X2_TP2, &["*.up_proj.weight=tp,x", "*.gate_proj.weight=tp,x"]),
    (DP2_X2_TP2, &["lm_head.weight=tp*x,-"]),
    (X3, &["*.embed_tokens.weight=x,-"]),
    (X3, &["*.embed_tokens.weight=-,x"]),
    (X3, &["*.up_proj.weight=-,x"]),
    (X3, &["lm_head.weight=x,-"]),
    (
        TP4,
        &[
            "*.q_proj.weight=-,tp",
            "*.k_proj.weight=-,tp",
            "*.v_proj.weight=-,tp",
            "*.o_proj.weight=tp,-",
        ],
    ),
    (DP2_TP4, &["*.k_proj.weight=tp:(1)2,-"]),
    // Uneven pieces are joined whole before they are cut anew.
    (DP2_X3, &["*.down_proj.weight=x*dp_replicate,-"]),
    (TP2, &["*.input_layernorm.weight=tp", "model.norm.weight=tp"]),
    (DP2, &["*.mlp.*=dp_replicate,-"]),
    (TP2, &["input_ids=-,tp"]),
    (TP2, &["input_ids=tp,-", "targets=tp,-"]),
    (TP2, &["model.layers.1.self_attn=-,tp,-@p1"]),
    (DP2_TP2, &["*_proj.weight=-,-"]),
];

const GPT2: &[(Axes, &[&str])] = &[
    (DP2_TP2, &["*wte.weight=-,tp"]),
    (DP2_TP2, &["*wpe.weight=tp,-"]),
    (DP2_TP2, &["*wpe.weight=-,tp"]),
    (TP2, &["*.mlp.c_fc.weight=tp,-", "*.mlp.c_proj.weight=-,tp"]),
    (TP2, &["*.mlp.c_fc.bias=-"]),
    (TP2, &["*.mlp.c_fc.weight=rowwise", "*.mlp.c_fc.bias=replicated"]),
    (TP2, &["*.mlp.c_proj.weight=colwise", "*.mlp.c_proj.bias=colwise"]),
    (TP2, &["*.ln_1.weight=tp"]),
    (TP4, &["*.mlp.c_fc.weight=-,tp:(1)2", "*.mlp.c_proj.weight=tp:(1)2,-"]),
    (DP2_TP2, &["*.mlp.c_fc.weight=-,dp_replicate*tp"]),
    (X2, &["*.mlp.c_fc.weight=-,x"]),
    // A fused tensor is all of its parts.
    (TP2, &["transformer.h.*.attn.c_attn.weight=-,tp"]),
    (TP2, &["transformer.h.0.attn.c_attn.weight=tp,-", "*.c_attn.bias=-"]),
    (DP2_TP2, &["*.c_attn.weight=-,-", "*.c_attn.bias=-", "*.attn.c_proj.weight=-,-"]),
    (X3, &["*wte.weight=x,-"]),
    (X3, &["*.mlp.c_fc.weight=-,x"]),
    (TP2, &["*.h.0=-,tp,-@p1"]),
    (TP2, &["*.h.*.mlp=-,-,tp@p1"]),
    (DP2_TP4, &["*.attn.c_proj.weight=tp:(1)2,tp:(2)2"]),
];

fn check(name: &'static str, mixes: &[(Axes, &[&str])]) {
    let mut t = Trial::new(name);
    for (mesh, shards) in mixes {
        let shards: Vec<String> = shards.iter().map(|s| s.to_string()).collect();
        t.mix(mesh, false, &shards);
    }
    t.end(0);
}

#[test]
fn chosen_llama() {
    check("llama_mha", LLAMA);
}

#[test]
fn chosen_gpt2() {
    check("gpt2", GPT2);
}

/// Random mixes of one to three rules for parameters and for activations of a scope.
fn drawn(name: &'static str, scopes: &[&str], count: u64) {
    let count = samples(12, count) as usize;
    let mut t = Trial::new(name);
    let model = t.fx.model(&options(&[], false, ROWS));
    let params: Vec<(&str, usize)> =
        model.weights.iter().map(|w| (w.tensor.as_str(), w.shape.len())).collect();
    let meshes: [(Axes, &[&str]); 5] = [
        (TP2, &["tp"]),
        (TP4, &["tp", "tp:(1)2", "tp:(2)2"]),
        (DP2_TP2, &["tp", "dp_replicate", "dp_replicate*tp", "tp*dp_replicate"]),
        (DP2_X2_TP2, &["tp", "x", "x*tp", "dp_replicate", "tp*x"]),
        (X3, &["x"]),
    ];
    let s = Stream::new(11, name, 0);
    let mut counter = 0;
    let mut pick = |n: usize| {
        counter += 1;
        (s.uniform(counter) * n as f64) as usize
    };
    for _ in 0..count {
        let (mesh, words) = meshes[pick(meshes.len())];
        let one = |pick: &mut dyn FnMut(usize) -> usize| {
            let scope = pick(4) == 0;
            let (what, rank) =
                if scope { (scopes[pick(scopes.len())], 3) } else { params[pick(params.len())] };
            let (at, word) = (pick(rank), words[pick(words.len())]);
            let dims: Vec<&str> = (0..rank).map(|d| if d == at { word } else { "-" }).collect();
            // The batch stays split as it is.
            let dims =
                if scope && at > 0 { format!("?,{}", dims[1..].join(",")) } else { dims.join(",") };
            format!("{what}={dims}{}", if scope { "@p1" } else { "" })
        };
        let rules = 1 + pick(3);
        let shards: Vec<String> = (0..rules).map(|_| one(&mut pick)).collect();
        let sp = mesh.iter().any(|a| a.0 == "tp") && pick(3) == 0;
        t.mix(mesh, sp, &shards);
    }
    t.end(count / 4);
}

#[test]
fn drawn_llama() {
    drawn("llama_mha", &["model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.?"], 40);
}

#[test]
fn drawn_gqa() {
    drawn("llama_gqa", &["model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.?"], 25);
}

#[test]
fn drawn_gpt2() {
    drawn("gpt2", &["transformer.h.0.mlp", "transformer.h.1.attn", "transformer.h.?"], 40);
}

/// Columns of a product are dim 0 of Hugging Face's [out, in] and dim 1 of Conv1D's [in, out].
#[test]
fn words_split_what_they_say() {
    let cases = [
        ("llama_mha", "model.layers.0.mlp.gate_proj.weight", "colwise", [true, false]),
        ("llama_mha", "model.layers.0.mlp.gate_proj.weight", "rowwise", [false, true]),
        ("llama_mha", "model.layers.0.mlp.gate_proj.weight", "replicated", [false, false]),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "colwise", [false, true]),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "rowwise", [true, false]),
    ];
    for (name, param, word, split) in cases {
        let fx = Fixture::open(name);
        let mut o = options(TP2, false, ROWS);
        o.shard = vec![rule(&format!("{param}={word}"))];
        let module = compile(&fx.model(&o), &o).plan.module;
        let f = module.func("step_prologue").expect("enter");
        let is = |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| &*r.name == param);
        let ty = f.ty(f.args.iter().find(is).expect("the parameter").value);
        let found = [0, 1].map(|d| !ty.dims[d].atoms.is_empty());
        assert_eq!(found, split, "{name} {param}={word}");
    }
}

/// PyTorch's ToyModel with its plan, `net1` colwise and `net2` rowwise, given to scopes: weights and
/// biases are cut as torch's ColwiseParallel and RowwiseParallel cut them, forward has torch's one
/// all_reduce, backward none (the input has no gradient), and gradients are those of one rank.
#[test]
fn words_of_scopes_are_torchs_plan() {
    let (want, _) = toy(&[], &[]);
    let (got, plan) = toy(TP2, &["net1=colwise", "net2=rowwise"]);
    let over = |phase: &str| -> Vec<(&'static str, String)> {
        let mesh = &plan.module.mesh;
        let f = plan.module.func(phase).expect("a function");
        let calls = f.nodes.iter().filter_map(|n| n.op.collective());
        calls.map(|c| (c.kind(), mesh.names(c.atoms(), "*"))).collect()
    };
    assert_eq!(over("forward"), [("all_reduce", "tp".to_string())]);
    assert_eq!(over("backward"), []);
    let enter = plan.module.func("step_prologue").expect("enter");
    let cut = |param: &str| -> Vec<bool> {
        let is = |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| &*r.name == param);
        let ty = enter.ty(enter.args.iter().find(is).expect("the parameter").value);
        ty.dims.iter().map(|d| !d.atoms.is_empty()).collect()
    };
    assert_eq!(cut("net1.weight"), [true, false]);
    assert_eq!(cut("net1.bias"), [true]);
    assert_eq!(cut("net2.weight"), [false, true]);
    assert_eq!(cut("net2.bias"), [false]);
    assert!(want.keys().any(|k| k.contains("net1.bias")), "{:?}", want.keys());
    for (name, a) in &want {
        let most = a.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let b = &got[name];
        assert_eq!(a.len(), b.len(), "{name}");
        assert!(a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-6 * most), "{name}");
    }
    // A family's scopes have weights too: the same calls as with the parameters' names.
    let fx = Fixture::open("llama_mha");
    let calls = |shard: &str| {
        let mut o = options(&[("dp_replicate", 2), ("tp", 2)], false, 2);
        o.shard = vec![rule(shard)];
        let module = compile(&fx.model(&o), &o).plan.module;
        let of = |f: &shardc_ir::func::Func| {
            f.nodes.iter().filter(|n| n.op.collective().is_some()).count()
        };
        module.funcs.iter().map(of).collect::<Vec<_>>()
    };
    let columns = calls("*.gate_proj.weight=colwise");
    assert_ne!(calls("*.gate_proj.weight=-,tp"), columns);
    // The end of a module's name is enough; with as many dims as its weight has it is its weight.
    for same in ["*.gate_proj=colwise", "mlp.gate_proj=colwise", "mlp.gate_proj=tp,-"] {
        assert_eq!(calls(same), columns, "{same}");
    }
    // Without a weight of its own a scope cannot be cut so.
    let mut o = options(TP2, false, ROWS);
    o.shard = vec![rule("model.layers.0.mlp=colwise")];
    let d = try_compile(&fx.model(&o), &o).expect_err("no weight");
    assert!(d.code == "shard" && d.help[0].contains("model.layers.0.mlp.gate_proj"), "{d}");
}

/// Two steps of `tests/cases/toy.ir`: everything observed in the first, by name; and the plan.
fn toy(mesh: Axes, shard: &[&str]) -> (BTreeMap<String, Vec<f32>>, Plan) {
    use shardc_runtime::{Options as How, Session, fresh};
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/toy.ir");
    let mut o = options(mesh, false, 8);
    (o.seq, o.freeze) = (4, vec!["rows.weight".into()]);
    o.shard = shard.iter().map(|s| rule(s)).collect();
    let done = shardc::compile(&file, &o, &mut |_, _| {});
    let plan = done.unwrap_or_else(|e| panic!("{e}")).stored.plan;
    let load = |w: &_, r: &[_], out: &mut [f32]| shardc_frontends::init(w, r, 5, out);
    let lower = |p: &_, rank| shardc_codegen::program(p, rank);
    let how = How { poison: true, ..How::default() };
    let mut s = Session::new(&plan, how, &lower, &fresh(load)).unwrap_or_else(|e| panic!("{e}"));
    let ids: Vec<i32> = (0..32).map(|i| i * 7 % 5).collect();
    let targets: Vec<i32> = (0..32).map(|i| i * 3 % 5).collect();
    let batch = StepBatch::tokens(&ids, &targets, true);
    let out = s.step(&batch, 1e-2, 1).unwrap_or_else(|e| panic!("{e}")).outputs;
    drop(s);
    let named = |r: shardc_ir::func::Role| format!("{} {}", r.kind, r.name);
    (out.into_iter().map(|(role, t)| (named(role), t.data)).collect(), plan)
}
