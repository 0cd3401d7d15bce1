//! Fixtures made with transformers (`tests/fixtures/make.py`) and how results are compared with them.

use safetensors::SafeTensors;
use shardc::proof::{self, Texts};
use shardc_frontends::{Model, load};
use shardc_ir::diag::Diag;
use shardc_ir::documents::Documents;
use shardc_ir::interp::{Precision, StepState, run_step};
use shardc_ir::plan::{Instr, Plan};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Decay, Optimizer, Options};
use shardc_passes::pipeline::{Compiled, Source, compile as run_passes};
use shardc_prove::Verdict;
use shardc_prove::field::Data;
use shardc_runtime::{Session, fresh};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// All fixture folders.
pub const ALL: &[&str] = &[
    "llama_mha",
    "llama_gqa",
    "llama_bias_tied",
    "llama_deep",
    "llama_yarn",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma2",
    "llama_padded",
    "gemma2_padded",
    "olmo2",
    "phi3",
    "gemma3",
    "gpt_neox",
    "gpt_neox_serial",
];

/// Those with experts. The first two have the auxiliary loss, which is a mean over microbatches: they
/// equal the reference with one microbatch.
pub const EXPERTS: &[&str] =
    &["mixtral", "qwen3_moe_raw", "qwen3_moe", "deepseek_v3", "deepseek_v3_yarn", "glm4_moe"];

pub struct Fixture {
    pub dir: PathBuf,
    expected: BTreeMap<String, Vec<f64>>,
    pub input_ids: Vec<i32>,
    pub labels: Vec<i32>,
}

pub const ROWS: usize = 8;
pub const SEQ: usize = 16;

/// The settings with which the reference was made.
pub fn options(mesh: &[(&str, usize)], sp: bool, microbatch: usize) -> Options {
    Options {
        mesh: mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect(),
        global_batch: ROWS,
        microbatch,
        seq: SEQ,
        sp,
        optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-5 },
        clip: Some(0.5),
        // As torch's optimizers do.
        decay: Decay::All,
        observe: true,
        recompute: Recompute::None,
        ..Options::default()
    }
}

/// What a proof takes of a compiled model.
pub fn texts(model: &Model, o: &Options, compiled: &Compiled) -> Texts {
    let [source, laid] = proof::both(source_of(model), o).expect("experts for the mesh");
    Texts {
        recipe: proof::recipe(o, &model.weights, &model.module).expect("globs"),
        source,
        model: laid,
        programs: compiled.plan.module.clone(),
        schedule: compiled.plan.schedule.clone(),
        data: Data { vocab: model.facts.vocab },
    }
}

/// Compiles a model; with `SHARDC_PROVE` set, what is compiled is proved, too. In the long run it is also exported as
/// a program of torch: nothing of it is refused.
pub fn compile(model: &Model, o: &Options) -> Compiled {
    let compiled = compile_only(model, o);
    if shardc_testing::nightly() {
        let p = shardc::export::torch::program(&compiled.plan, "a fixture", "");
        assert!(p.refused.is_empty(), "{o:?}: {:?}", p.refused);
    }
    if std::env::var_os("SHARDC_PROVE").is_some() {
        let r = texts(model, o, &compiled).prove();
        assert_eq!(r.verdict(), Verdict::Proved, "{o:?}\n{:?}\n{:?}", r.refuted, r.gaps);
    }
    compiled
}

/// A model as the passes take it.
pub fn source_of(model: &Model) -> Source {
    Source {
        module: model.module.clone(),
        weights: model.weights.clone(),
        sequence: model.sequence.clone(),
        vocab: model.facts.vocab,
        updates: String::new(),
    }
}

fn compile_only(model: &Model, o: &Options) -> Compiled {
    run_passes(source_of(model), o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

fn read(file: PathBuf) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let st = SafeTensors::deserialize(&bytes).expect("safetensors");
    let numbers = |t: &safetensors::tensor::TensorView| -> Vec<f64> {
        match t.dtype() {
            safetensors::Dtype::F32 => t
                .data()
                .chunks(4)
                .map(|c| f32::from_le_bytes(c.try_into().unwrap()) as f64)
                .collect(),
            safetensors::Dtype::I64 => t
                .data()
                .chunks(8)
                .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as f64)
                .collect(),
            d => panic!("{d:?}"),
        }
    };
    st.tensors().iter().map(|(n, t)| (n.clone(), numbers(t))).collect()
}

impl Fixture {
    /// A tensor of the reference.
    pub fn expected(&self, name: &str) -> &[f64] {
        &self.expected[name]
    }

    pub fn open(name: &str) -> Fixture {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let batch = read(dir.join("batch.safetensors"));
        let ints = |k: &str| batch[k].iter().map(|&x| x as i32).collect();
        Fixture {
            expected: read(dir.join("expected.safetensors")),
            input_ids: ints("input_ids"),
            labels: ints("labels"),
            dir,
        }
    }

    pub fn model(&self, o: &Options) -> Model {
        let shape = shardc::shape(o);
        load(&self.dir, &shape).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Labels moved one to the left: what position i is scored against.
    pub fn targets(&self) -> Vec<i32> {
        let row = |r: &[i32]| r[1..].iter().copied().chain([-100]).collect::<Vec<_>>();
        self.labels.chunks(SEQ).flat_map(row).collect()
    }

    pub fn parameter(&self, model: &Model, param: &str) -> Vec<f64> {
        let w = model.weights.iter().find(|w| w.param == param).expect("a weight");
        let mut out = vec![0f32; w.shape.iter().product()];
        let ranges: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
        model
            .checkpoint
            .as_ref()
            .expect("weights")
            .read(w, &ranges, &mut out)
            .unwrap_or_else(|e| panic!("{e}"));
        out.into_iter().map(f64::from).collect()
    }

    /// Puts the batch into the interpreter's state, of packed documents also what is made of tokens.
    pub fn inputs(&self, state: &mut StepState, documents: Option<Documents>) {
        let numbers = |v: &[i32]| v.iter().map(|&x| f64::from(x)).collect();
        let mut targets = self.targets();
        if let Some(d) = documents {
            let p = d.places(&self.input_ids, None, Some(&mut targets), SEQ);
            for (name, x) in [("segments", p.segments), ("offsets", p.offsets)] {
                state.inputs.insert(name.into(), Tensor::new(&[ROWS, SEQ], numbers(&x)));
            }
        }
        let positions = (0..SEQ).map(|i| i as f64).collect();
        for (name, t) in [
            ("input_ids", Tensor::new(&[ROWS, SEQ], numbers(&self.input_ids))),
            ("targets", Tensor::new(&[ROWS, SEQ], numbers(&targets))),
            ("positions", Tensor::new(&[SEQ], positions)),
            ("places", Tensor::from_fn(&[ROWS, SEQ], |i| (i[0] * SEQ + i[1]) as f64)),
            ("run", Tensor::new(&[3], vec![7.0, 0.0, 1.0])),
        ] {
            state.inputs.insert(name.into(), t);
        }
    }

    pub fn compare_loss(&self, loss: f64) {
        let want = self.expected["loss"][0];
        assert!(
            (loss - want).abs() <= 1e-6 * want.abs(),
            "{}: loss {loss}, reference {want}",
            self.dir.display()
        );
    }

    pub fn compare_logits(&self, logits: &[f64]) {
        let want = &self.expected["logits"];
        assert_eq!(logits.len(), want.len());
        let top = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let worst = logits.iter().zip(want).fold(0.0f64, |m, (a, b)| larger(m, (a - b).abs()));
        assert!(
            worst <= 1e-5 * top,
            "{}: logits differ by {worst:.2e} of {top:.2e}",
            self.dir.display()
        );
    }

    /// ‖Δ‖ ≤ 1e-4·‖ref‖ + 1e-8·√n, per tensor of the checkpoint.
    pub fn compare_grads(&self, model: &Model, get: impl Fn(&str) -> Vec<f64>) {
        for w in model.weights.iter().filter(|w| self.is_trained(w)) {
            let (got, want) = (get(&w.param), self.part(w, "grad"));
            assert_eq!(got.len(), want.len(), "{}", w.param);
            let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
            let d = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b));
            let r = norm(&mut want.iter().copied());
            let bound = 1e-4 * r + 1e-8 * (want.len() as f64).sqrt();
            assert!(
                d <= bound,
                "{}: gradient of {}: |Δ| {d:.3e}, |ref| {r:.3e}",
                self.dir.display(),
                w.param
            );
        }
    }

    /// ≤ 1e-5 absolute after 3 steps.
    pub fn compare_params(&self, model: &Model, get: impl Fn(&str) -> Vec<f64>) {
        for w in &model.weights {
            let got = get(&w.param);
            if !self.is_trained(w) {
                assert_eq!(got, self.parameter(model, &w.param), "{} is not trained", w.param);
                continue;
            }
            let want = self.part(w, "param");
            let worst = got.iter().zip(&want).fold(0.0f64, |m, (a, b)| larger(m, (a - b).abs()));
            assert!(
                worst <= 1e-5,
                "{}: {} differs by {worst:.2e} after 3 steps",
                self.dir.display(),
                w.param
            );
        }
    }

    /// False for what only chooses experts, which has no gradient.
    fn is_trained(&self, w: &Weight) -> bool {
        let trained = w.tensors().all(|t| self.expected.contains_key(&format!("grad.{t}")));
        assert!(trained || w.tensor.ends_with(".e_score_correction_bias"), "{}", w.tensor);
        trained
    }

    /// The reference of one parameter: its slice of the checkpoint tensor, or a stack of tensors.
    fn part(&self, w: &Weight, what: &str) -> Vec<f64> {
        self.part_of(&self.expected, w, what)
    }

    /// The same of other reference numbers.
    pub fn part_of(&self, all: &BTreeMap<String, Vec<f64>>, w: &Weight, what: &str) -> Vec<f64> {
        if w.is_stacked() {
            return w.tensors().flat_map(|t| all[&format!("{what}.{t}")].clone()).collect();
        }
        let whole = &all[&format!("{what}.{}", w.tensor)];
        let t = Tensor::new(&w.tensor_shape, whole.clone());
        match w.part {
            Some(p) => {
                let place = |i: &[usize]| {
                    let mut at = i.to_vec();
                    at[p.dim] = p.start + p.step * at[p.dim];
                    t.at(&at)
                };
                Tensor::from_fn(&w.shape, place).data
            }
            None => t.data,
        }
    }
}

impl Fixture {
    /// What a program dumped, in place of the reference's numbers.
    pub fn dumped(&self, file: impl Into<PathBuf>) -> Fixture {
        let (dir, expected) = (self.dir.clone(), read(file.into()));
        let (input_ids, labels) = (self.input_ids.clone(), self.labels.clone());
        Fixture { dir, expected, input_ids, labels }
    }

    /// A weight after three steps.
    pub fn param(&self, w: &Weight) -> Vec<f64> {
        self.part(w, "param")
    }

    /// The reference's gradient of a weight.
    pub fn grad(&self, w: &Weight) -> Vec<f64> {
        self.part(w, "grad")
    }

    /// Numbers of the bf16 reference, by name.
    pub fn half_reference(&self, dtype: DType) -> BTreeMap<String, Vec<f64>> {
        read(self.dir.join(format!("{}.safetensors", dtype.name())))
    }

    /// Reference numbers by name, as the file has them.
    pub fn reference(&self, name: &str) -> &[f64] {
        &self.expected[name]
    }
}

/// The interpreter's state before the first step: weights of the checkpoint, empty optimizer state.
pub fn start(fx: &Fixture, model: &Model, compiled: &Compiled) -> StepState {
    use shardc_ir::func::RoleKind;
    let m = &compiled.plan.module;
    let mut state = StepState::default();
    for f in &m.funcs {
        for a in &f.args {
            let (role, ty) = (a.role.clone().expect("roles"), f.ty(a.value));
            let whole = match role.kind {
                RoleKind::Param => Tensor::new(&ty.sizes(), fx.parameter(model, &role.name)),
                RoleKind::State(_) => Tensor::full(&ty.sizes(), 0.0),
                _ => continue,
            };
            state.put(&m.mesh, role, ty, &whole);
        }
    }
    fx.inputs(&mut state, compiled.plan.settings.documents);
    state
}

/// One step of the interpreter in f64, the `step`-th, at the reference's learning rate.
pub fn interpret(compiled: &Compiled, state: &mut StepState, step: usize) -> Result<(), Diag> {
    interpret_plan(&compiled.plan, state, step)
}

pub fn interpret_plan(plan: &Plan, state: &mut StepState, step: usize) -> Result<(), Diag> {
    use shardc_ir::func::{Role, RoleKind};
    let m = &plan.module;
    let scale = plan.settings.loss_scaling.map_or(1.0, |how| f64::from(how.initial()));
    for (name, x) in [("lr", 1e-3), ("step", step as f64), ("loss_scale", scale)] {
        let role = Role::new(RoleKind::Scalar, name);
        let finish = |f: &&shardc_ir::func::Func| f.name.starts_with("optimizer_step");
        let Some(f) = m.funcs.iter().find(finish) else { continue };
        if let Some(a) = f.args.iter().find(|a| a.role.as_ref() == Some(&role)) {
            state.put(&m.mesh, role, f.ty(a.value), &Tensor::scalar(x));
        }
    }
    let lists: Vec<&[Instr]> = plan.classes.iter().map(|c| &c.step[..]).collect();
    run_step(m, &lists, state, Precision::F64)
}

/// The passes on a model that was read, with what they refuse.
pub fn try_compile(model: &Model, o: &Options) -> Result<Compiled, Diag> {
    run_passes(source_of(model), o, &mut |_, _| {})
}

/// Thread ranks of a plan with the weights of the model's checkpoint.
pub fn session(model: &Model, compiled: &Compiled) -> Session {
    let checkpoint = model.checkpoint.as_ref().expect("weights");
    let load =
        |w: &Weight, ranges: &[Range<usize>], out: &mut [f32]| checkpoint.read(w, ranges, out);
    let lower = |p: &_, rank| shardc_codegen::program(p, rank);
    let how = shardc_runtime::Options { poison: true, ..Default::default() };
    Session::new(&compiled.plan, how, &lower, &fresh(load)).unwrap_or_else(|e| panic!("{e}"))
}

/// The loss of the first step on thread ranks with these weights.
pub fn loss_of(
    compiled: &Compiled,
    load: impl Fn(&Weight, &[Range<usize>], &mut [f32]) -> Result<(), Diag> + Sync,
    fx: &Fixture,
) -> f64 {
    let lower = |p: &_, rank| shardc_codegen::program(p, rank);
    let how = shardc_runtime::Options { poison: true, ..Default::default() };
    let session = Session::new(&compiled.plan, how, &lower, &fresh(load));
    let batch = shardc_runtime::StepBatch::tokens(&fx.input_ids, &fx.targets(), true);
    let step = session.unwrap_or_else(|e| panic!("{e}")).step(&batch, 1e-3, 1);
    step.unwrap_or_else(|e| panic!("{e}")).loss.expect("a loss").into()
}

/// The larger of two, or NaN: `f64::max` would forget it.
fn larger(a: f64, b: f64) -> f64 {
    if b.is_nan() || b > a { b } else { a }
}

/// Trains a fixture for three steps on thread ranks in f32 and compares logits, loss, every gradient
/// and the parameters with transformers; then an evaluation with the next step, and the most of the
/// arena that was used with the plan's peak. The plan, and the model.
pub fn train_and_compare(name: &str, o: &Options) -> (Model, Compiled) {
    use shardc_ir::func::{Role, RoleKind};
    use shardc_runtime::StepBatch;
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let compiled = compile(&model, o);
    let plan = &compiled.plan;
    let what = format!("{name} {:?} {:?} microbatch={}", o.mesh, o.schedule, o.microbatch);
    shardc_passes::memory::replay::replay(plan).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut s = session(&model, &compiled);
    let targets = fx.targets();
    for step in 1..=3 {
        let batch = StepBatch::tokens(&fx.input_ids, &targets, step == 1);
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{what}: {e}"));
        if step == 1 {
            let out = |k, n: &str| {
                r.output(k, n).expect(n).data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
            };
            fx.compare_loss(f64::from(r.loss.expect("a loss")));
            fx.compare_logits(&out(RoleKind::Output, "logits"));
            fx.compare_grads(&model, |p| out(RoleKind::GradShown, p));
        }
    }
    let param = |s: &mut Session, p: &str| -> Vec<f64> {
        let a = s.tensor(&Role::new(RoleKind::Param, p)).unwrap_or_else(|e| panic!("{e}"));
        a.data.into_iter().map(f64::from).collect()
    };
    let after: Vec<Vec<f64>> = model.weights.iter().map(|w| param(&mut s, &w.param)).collect();
    fx.compare_params(&model, |p| {
        after[model.weights.iter().position(|w| w.param == p).expect("a weight")].clone()
    });
    // An evaluation is the loss of the next step, and changes nothing.
    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
    let evaluation = s.evaluate(&batch).unwrap_or_else(|e| panic!("{what}: {e}")).loss;
    let step = s.step(&batch, 1e-3, 4).unwrap_or_else(|e| panic!("{what}: {e}")).loss;
    assert_eq!(evaluation, step, "{what}: loss of an evaluation");
    let peaks: Vec<usize> = plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
    assert_eq!(s.touched(), peaks, "{what}: high-water marks of the arenas, by class");
    (model, compiled)
}

/// What three steps on thread ranks give.
pub struct Numbers {
    pub loss: f64,
    pub logits: Vec<f64>,
    /// By parameter.
    pub grads: Vec<Vec<f64>>,
    pub params: Vec<Vec<f64>>,
}

/// Three steps on one batch of thread ranks with the weights of the checkpoint; the arenas' use is
/// compared with the plan.
pub fn three_steps(model: &Model, compiled: &Compiled, ids: &[i32], targets: &[i32]) -> Numbers {
    use shardc_ir::func::{Role, RoleKind};
    use shardc_runtime::StepBatch;
    let plan = &compiled.plan;
    shardc_passes::memory::replay::replay(plan).unwrap_or_else(|e| panic!("{e}"));
    let mut s = session(model, compiled);
    let wide = |a: &shardc_runtime::Array| a.data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let mut n = Numbers { loss: 0.0, logits: vec![], grads: vec![], params: vec![] };
    for step in 1..=3 {
        let batch = StepBatch::tokens(ids, targets, step == 1);
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
        if step == 1 {
            n.loss = f64::from(r.loss.expect("a loss"));
            n.logits = wide(r.output(RoleKind::Output, "logits").expect("logits"));
            // What only chooses experts has no gradient.
            let grad = |p: &str| r.output(RoleKind::GradShown, p).map_or(vec![], wide);
            n.grads = model.weights.iter().map(|w| grad(&w.param)).collect();
        }
    }
    for w in &model.weights {
        let role = Role::new(RoleKind::Param, w.param.as_str());
        n.params.push(wide(&s.tensor(&role).unwrap_or_else(|e| panic!("{e}"))));
    }
    // An evaluation may need more of an arena than a step, whose frames lie in other places.
    let batch = StepBatch::tokens(ids, targets, false);
    s.evaluate(&batch).unwrap_or_else(|e| panic!("{e}"));
    let peaks: Vec<usize> = plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
    assert_eq!(s.touched(), peaks, "high-water marks of the arenas, by class");
    n
}

impl Numbers {
    /// The bounds of `compare_*`, against one rank instead of transformers.
    pub fn compare(&self, model: &Model, one: &Numbers, what: &str) {
        let close = |a: f64, b: f64, bound: f64| (a - b).abs() <= bound;
        assert!(close(self.loss, one.loss, 1e-6 * one.loss.abs()), "{what}: loss {}", self.loss);
        let most = |v: &[f64]| v.iter().fold(0.0f64, |m, x| larger(m, x.abs()));
        let worst = |a: &[f64], b: &[f64]| {
            assert_eq!(a.len(), b.len(), "{what}");
            a.iter().zip(b).fold(0.0f64, |m, (a, b)| larger(m, (a - b).abs()))
        };
        let logits = worst(&self.logits, &one.logits);
        assert!(logits <= 1e-5 * most(&one.logits), "{what}: logits differ by {logits:.2e}");
        for (i, w) in model.weights.iter().enumerate() {
            let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
            let d = norm(&mut self.grads[i].iter().zip(&one.grads[i]).map(|(a, b)| a - b));
            let r = norm(&mut one.grads[i].iter().copied());
            let bound = 1e-4 * r + 1e-8 * (one.grads[i].len() as f64).sqrt();
            assert!(d <= bound, "{what}: gradient of {}: |Δ| {d:.3e}, |ref| {r:.3e}", w.param);
            let p = worst(&self.params[i], &one.params[i]);
            assert!(p <= 1e-5, "{what}: {} differs by {p:.2e} after 3 steps", w.param);
        }
    }
}
