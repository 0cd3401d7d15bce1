//! Random programs of text, under names that look like ours and on random meshes: each compiles, reads
//! back, and gives the loss and the gradients of one rank under plain names, which are those of finite
//! differences.

use crate::fixture::{interpret, options};
use shardc::proof::{self, Texts};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::interp::StepState;
use shardc_ir::phase::Phase;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_ir::verify::verify;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Balance, Options, Order};
use shardc_passes::pipeline::{Compiled, compile};
use shardc_passes::schedule::Named;
use shardc_prove::field::Data;
use shardc_prove::{Report, Verdict};

pub const ROWS: usize = 4;
pub const SEQ: usize = 4;
const WIDTH: usize = 6;
pub const VOCAB: usize = 10;
const PROGRAMS: u64 = 36;

/// Values that look like what passes make.
const VALUES: &[&str] = &[
    "d",
    "d_x",
    "d_",
    "l3",
    "l3.x",
    "grad.w0.1",
    "d_grad.w0.1",
    "forward.3",
    "loss",
    "x.1",
    "x.2",
    "x_acc",
    "d_loss",
    "loss_scale",
    "x_total",
    "primal",
    "step",
    "lr",
    "inv_tokens",
    "x_f",
    "l0.d",
    "_",
    "1",
    "x.01",
    "d_l3.q.1",
    "d_d",
    "l99999999.x",
    "x.99999999",
    "backward",
    "w.load",
    "d_w_acc",
    "l.1",
    "d_l",
    "step_prologue.0",
    "x_t",
    "sum",
    "d_x.1",
    "d_sum.2",
];
/// Parameters that look like what is kept of others.
const PARAMS: &[&str] = &[
    "w:load",
    "w:exp_avg",
    "grad.w.1",
    "l.1.w",
    "loss",
    "a b",
    "forward.0",
    "w.exp_avg_sq",
    "lr",
    "w \"q\"",
    "x of stage 1",
    "grad_norm",
    "d_w",
    "step",
    "w:exp_avg:exp_avg",
    "a {i}.b",
];
/// Losses beside `loss`.
const SUMS: &[&str] =
    &["w:load", "grad_norm", "loss_scale", "reg:load", "d", "inv", "x y", "l.1.w:load", "loss.1"];
/// What a program may show.
const OUTPUTS: &[&str] = &["logits", "loss", "grad_norm", "grad.w", "w:load"];

struct Draw {
    stream: Stream,
    at: u64,
}

impl Draw {
    fn new(seed: u64, what: &str) -> Draw {
        Draw { stream: Stream::new(seed, what, 0), at: 0 }
    }
    fn real(&mut self) -> f64 {
        self.at += 1;
        self.stream.uniform(self.at)
    }
    fn below(&mut self, n: usize) -> usize {
        ((self.real() * n as f64) as usize).min(n - 1)
    }
    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

/// Names of a kind: the pool's in random order, or plain ones.
struct Names {
    pool: Vec<&'static str>,
    plain: char,
    given: usize,
}

impl Names {
    fn new(pool: &[&'static str], plain: char, hostile: bool, seed: u64) -> Names {
        let mut d = Draw::new(seed, "names");
        let mut rest: Vec<&str> = if hostile { pool.to_vec() } else { vec![] };
        let pool = (0..rest.len()).map(|_| rest.swap_remove(d.below(rest.len()))).collect();
        Names { pool, plain, given: 0 }
    }
    fn next(&mut self) -> String {
        self.given += 1;
        match self.pool.get(self.given - 1) {
            Some(name) => name.to_string(),
            None => format!("{}{}", self.plain, self.given),
        }
    }
}

pub struct Program {
    pub text: String,
    pub params: Vec<String>,
}

/// A program while it is written. Values are `[rows, tokens, width]` or, turned, `[tokens, rows, width]`.
struct Writer {
    d: Draw,
    values: Names,
    body: String,
    /// Name, and whether it is turned.
    made: Vec<(String, bool)>,
}

impl Writer {
    fn line(&mut self, op: &str, ins: &[&str], ty: &str) -> String {
        let name = self.values.next();
        let ins: Vec<String> = ins.iter().map(|i| format!("%{i}")).collect();
        self.body += &format!("  %{name} = {op} {} : {ty}\n", ins.join(", "));
        name
    }
    fn value(&mut self, op: &str, ins: &[&str], turned: bool) {
        let name = self.line(op, ins, &format!("f32[{ROWS},{SEQ},{WIDTH}]"));
        self.made.push((name, turned));
    }
    fn any(&mut self) -> (String, bool) {
        let recent = self.made.len().min(3);
        self.made[self.made.len() - 1 - self.d.below(recent)].clone()
    }
    fn layer(&mut self, weights: &[String]) {
        let letters = |turned: bool| if turned { "sbh" } else { "bsh" };
        for _ in 0..1 + self.d.below(3) {
            let (a, ta) = self.any();
            let (b, tb) = self.any();
            let (la, lb) = (letters(ta), letters(tb));
            match self.d.below(14) {
                0 | 1 => {
                    let w = &weights[self.d.below(weights.len())];
                    let out = &la[..2];
                    self.value(&format!("dot[{la},oh->{out}o]"), &[&a, w], ta);
                }
                2 => {
                    let op =
                        self.d.one(&["tanh", "silu", "gelu", "scale[0.7]", "abs", "silu[1.702]"]);
                    self.value(op, &[&a], ta);
                }
                3 => self.value(&format!("mul[{la},{lb}->{}]", letters(!ta)), &[&a, &b], !ta),
                4 => self.value(&format!("add[{la},{lb}->{la}]"), &[&a, &b], ta),
                5 => self.value(&format!("transpose[{la}->{}]", letters(!ta)), &[&a], !ta),
                6 => {
                    let functions =
                        ["erf", "softplus", "clamp[-0.5; hi=0.6]", "pow[2.0]", "pow[3.0]"];
                    let op = self.d.one(&functions);
                    self.value(op, &[&a], ta);
                }
                7 => {
                    let op = self.d.one(&["max", "min"]);
                    self.value(&format!("{op}[{la},{lb}->{la}]"), &[&a, &b], ta);
                }
                8 => {
                    let op = self.d.one(&["less", "equal"]);
                    let ty = format!("f32[{ROWS},{SEQ},{WIDTH}]");
                    let mask = self.line(&format!("{op}[{la},{lb}->{la}]"), &[&a, &b], &ty);
                    let out = letters(!ta);
                    self.value(&format!("select[{la},{la},{lb}->{out}]"), &[&mask, &a, &b], !ta);
                }
                9 => {
                    let op = self.d.one(&["cumsum[2]", "cumsum[0]", "cumsum[1; reverse=true]"]);
                    self.value(op, &[&a], ta);
                }
                10 => {
                    // Every second of rows and tokens, of which there are as many, then the others.
                    let half = format!("f32[{ROWS},{},{WIDTH}]", SEQ / 2);
                    let part = |start: usize| {
                        format!("narrow[p={}; start={start}; dim=1; step=2]", SEQ / 2)
                    };
                    let odd = self.line(&part(1), &[&a], &half);
                    let even = self.line(&part(0), &[&a], &half);
                    self.value(&format!("concat[d={SEQ}; dim=1]"), &[&odd, &even], ta);
                }
                11 => {
                    let op = self.d.one(&["reduce_max", "reduce_min"]);
                    let ty = format!("f32[{SEQ},{ROWS}]");
                    let top = self.line(&format!("{op}[{la}->bs]"), &[&a], &ty);
                    self.value(&format!("sub[{la},bs->{la}]"), &[&a, &top], ta);
                }
                // The same value in two orders: rows and tokens are as many.
                12 => {
                    let op = self.d.one(&["mul", "sub", "add"]);
                    self.value(&format!("{op}[bsh,sbh->{la}]"), &[&a, &a], ta);
                }
                _rows => {
                    let ty = format!("f32[{SEQ},{ROWS}]");
                    let sum = self.line(&format!("reduce_sum[{la}->bs]"), &[&a], &ty);
                    let out = letters(!ta);
                    self.value(&format!("sub[{la},bs->{out}]"), &[&a, &sum], !ta);
                }
            }
            // Numbers stay small.
            let (x, turned) = self.made[self.made.len() - 1].clone();
            self.value("tanh", &[&x], turned);
        }
    }
}

fn program(seed: u64, hostile: bool) -> Program {
    let mut params = Names::new(PARAMS, 'p', hostile, seed);
    let mut w = Writer {
        d: Draw::new(seed, "program"),
        values: Names::new(VALUES, 'v', hostile, seed + 1),
        body: String::new(),
        made: vec![],
    };
    let mut head = String::new();
    let mut names = vec![];
    let mut param = |w: &mut Writer, rows: usize| {
        let (value, param) = (w.values.next(), params.next());
        let mark = w.d.one(&["", " [tp_dim=0]", " [tp_dim=1]"]);
        head += &format!("  %{value}: f32[{rows},{WIDTH}] param {param:?}{mark},\n");
        names.push(param);
        value
    };
    let embed = param(&mut w, VOCAB);
    let weights: Vec<String> = (0..1 + w.d.below(3)).map(|_| param(&mut w, WIDTH)).collect();
    let tied = w.d.below(3) == 0;
    let output = if tied { embed.clone() } else { param(&mut w, VOCAB) };
    let (ids, targets) = (w.values.next(), w.values.next());
    for (name, role) in [(&ids, "input_ids"), (&targets, "targets")] {
        head += &format!("  %{name}: i32[{ROWS},{SEQ}] input \"{role}\",\n");
    }
    w.value("take[vh,bs->bsh]", &[&embed, &ids], false);
    for layer in 0..2 + w.d.below(3) {
        w.body += &format!(" m.{layer}:\n");
        w.layer(&weights);
    }
    w.body += " top:\n";
    let (last, turned) = w.made[w.made.len() - 1].clone();
    let letters = if turned { "sbh" } else { "bsh" };
    let (rows, all) = (format!("f32[{ROWS},{SEQ}]"), format!("f32[{ROWS},{SEQ},{VOCAB}]"));
    let logits = w.line(&format!("dot[{letters},vh->bsv]"), &[&last, &output], &all);
    let exp = w.line("exp", &[&logits], &all);
    let sum = w.line("reduce_sum[bsv->bs]", &[&exp], &rows);
    let log = w.line("log", &[&sum], &rows);
    let own = w.line("take[bsv,bs->bs]", &[&logits, &targets], &rows);
    let nll = w.line("sub", &[&log, &own], &rows);
    let loss = w.line("reduce_sum[bs->]", &[&nll], "f32[]");
    let mut results = vec![("f32[]".to_string(), "sum \"loss\"".to_string(), loss)];
    let mut sums = Names::new(SUMS, 's', hostile, seed + 2);
    for _ in 0..w.d.below(3) {
        let (x, _) = w.any();
        let square = w.line("dot[abc,abc->]", &[&x, &x], "f32[]");
        let small = w.line("scale[0.01]", &[&square], "f32[]");
        results.push(("f32[]".into(), format!("sum {:?}", sums.next()), small));
    }
    let shown = Names::new(OUTPUTS, 'o', hostile, seed + 3).next();
    results.push((all, format!("output {shown:?}"), logits));
    let types: Vec<String> = results.iter().map(|r| format!("{} {}", r.0, r.1)).collect();
    let values: Vec<String> = results.iter().map(|r| format!("%{}", r.2)).collect();
    let (types, values) = (types.join(", "), values.join(", "));
    // Long lists of results have names in place of `return`.
    let text = match results.len() > 3 {
        false => {
            format!("func @model(\n{head}) -> ({types}) {{\n{}  return {values}\n}}\n", w.body)
        }
        true => {
            let named = results.iter().map(|r| format!("  %{}: {} {},\n", r.2, r.0, r.1));
            format!("func @model(\n{head}) -> (\n{}) {{\n{}}}\n", named.collect::<String>(), w.body)
        }
    };
    Program { text, params: names }
}

/// A plan shown to be its program, by terms.
fn prove(p: &Program, o: &Options, c: &Compiled) {
    let source = text::parse_source(&p.text).expect("read before");
    let recipe = proof::recipe(o, &source.weights, &source.module).expect("globs");
    let [source, model] = proof::both(source, o).expect("experts for the mesh");
    let texts = Texts {
        recipe,
        source,
        model,
        programs: c.plan.module.clone(),
        schedule: c.plan.schedule.clone(),
        data: Data { vocab: VOCAB },
    };
    let r = texts.prove();
    let (refuted, gap) = (r.refuted.first(), r.gaps.first());
    assert_eq!(r.verdict(), Verdict::Proved, "{refuted:?}\n{gap:?}\n{}", p.text);
    let mut types = Report::default();
    shardc_prove::local::prove(&texts.programs, true, &mut types);
    let (refuted, gap) = (types.refuted.first(), types.gaps.first());
    assert_eq!(types.verdict(), Verdict::Proved, "{refuted:?}\n{gap:?}\n{}", p.text);
}

pub fn build(p: &Program, o: &Options) -> Result<Compiled, shardc_ir::diag::Diag> {
    let source = text::parse_source(&p.text).unwrap_or_else(|e| panic!("{e}\n{}", p.text));
    if let Err(all) = verify(&source.module, Phase::Source) {
        panic!("{}\n{}", all[0], p.text);
    }
    let made = compile(source, o, &mut |_, _| {})?;
    let printed = text::print(&made.plan.module);
    let back = text::parse(&printed).unwrap_or_else(|e| panic!("{e}\n{}", p.text));
    assert_eq!(text::print(&back), printed, "{}", p.text);
    Ok(made)
}

/// Parameters by their number, wherever they are called what.
pub fn parameters(p: &Program, seed: u64) -> Vec<Tensor> {
    let draw = |i: usize| {
        let mut d = Draw::new(seed, &format!("parameter {i}"));
        move |shape: &[usize]| Tensor::from_fn(shape, |_| d.real() - 0.5)
    };
    let source = text::parse_source(&p.text).expect("read before");
    let f = &source.module.funcs[0];
    let sizes = f.args.iter().take(p.params.len()).map(|a| f.ty(a.value).sizes());
    sizes.enumerate().map(|(i, s)| draw(i)(&s)).collect()
}

/// The loss, and the gradients by number of their parameter.
pub fn step(p: &Program, c: &Compiled, values: &[Tensor], batch: usize) -> (f64, Vec<Vec<f64>>) {
    let m = &c.plan.module;
    let mut state = StepState::default();
    for (f, a) in m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a))) {
        let (role, ty) = (a.role.clone().expect("roles"), f.ty(a.value));
        let whole = match role.kind {
            RoleKind::Param => {
                let i = p.params.iter().position(|x| **x == *role.name).expect("one of its own");
                values[i].clone()
            }
            RoleKind::State(_) => Tensor::full(&ty.sizes(), 0.0),
            _given => continue,
        };
        state.put(&m.mesh, role, ty, &whole);
    }
    let mut d = Draw::new(1, "batch");
    for name in ["input_ids", "targets"] {
        let x = Tensor::from_fn(&[batch, SEQ], |_| d.below(VOCAB) as f64);
        state.inputs.insert(name.into(), x);
    }
    let places = Tensor::from_fn(&[SEQ], |i| i[0] as f64);
    state.inputs.insert("positions".into(), places);
    interpret(c, &mut state, 1).unwrap_or_else(|e| panic!("{e}\n{}", p.text));
    let shown = |kind, name: &str| {
        let x = state.output(&m.mesh, kind, name);
        x.unwrap_or_else(|e| panic!("{name}: {e}\n{}", p.text)).data
    };
    let grads = p.params.iter().map(|n| {
        let there = state.outputs.contains_key(&Role::new(RoleKind::GradShown, n.as_str()));
        if there { shown(RoleKind::GradShown, n) } else { vec![] }
    });
    (shown(RoleKind::Metric, "loss")[0], grads.collect())
}

pub fn close(what: &str, got: &[f64], want: &[f64], tolerance: f64, p: &Program) {
    assert_eq!(got.len(), want.len(), "{what}\n{}", p.text);
    let scale = want.iter().fold(1e-3, |s: f64, x| s.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (g - w).abs() / scale;
        assert!(off < tolerance, "{what}, element {i}: {g} for {w}\n{}", p.text);
    }
}

/// The mesh, and what is asked for beside it.
fn layout(d: &mut Draw, microbatches: usize) -> Options {
    let all: [&[(&str, usize)]; 8] = [
        &[("tp", 2)],
        &[("pp", 2)],
        &[("pp", 2), ("tp", 2)],
        &[("pp", 3)],
        &[("dp_shard", 2)],
        &[("dp_replicate", 2), ("tp", 2)],
        &[("pp", 2), ("dp_shard", 2)],
        &[("pp", 2), ("dp_replicate", 2), ("tp", 2)],
    ];
    // A data-parallel rank has other rows in a microbatch, which programs here mix.
    let mesh = all[d.below(if microbatches == 1 { 8 } else { 4 })];
    let mut o = base(mesh, microbatches);
    o.recompute = match d.below(3) {
        0 => Recompute::None,
        1 => Recompute::Selective,
        _ => Recompute::Full,
    };
    if mesh[0].0 == "pp" && d.below(2) == 0 {
        o.schedule = Order::Named(Named::ZbH1.name().into());
    }
    if mesh.iter().any(|a| a.0 == "dp_shard") {
        o.zero = d.below(4) as u8;
    }
    o
}

pub fn base(mesh: &[(&str, usize)], microbatches: usize) -> Options {
    let o = options(mesh, false, 1);
    let microbatch = ROWS / o.data_parallel();
    Options {
        microbatch,
        global_batch: ROWS * microbatches,
        seq: SEQ,
        balance: Balance { rate: 1e-3, ..Balance::default() },
        ..o
    }
}

#[test]
fn random_programs_under_any_names() {
    let (mut compiled, mut refused) = (0, vec![]);
    for seed in 0..PROGRAMS {
        let (plain, named) = (program(seed, false), program(seed, true));
        let mut d = Draw::new(seed, "layout");
        let m = 1 + d.below(2);
        let one = build(&plain, &base(&[], m)).unwrap_or_else(|e| panic!("{e}\n{}", plain.text));
        let values = parameters(&plain, seed);
        let (loss, grads) = step(&plain, &one, &values, ROWS * m);
        // Along one direction for each parameter.
        for (i, g) in grads.iter().enumerate() {
            const H: f64 = 1e-5;
            let to: Vec<f64> = values[i].data.iter().map(|_| d.real() - 0.5).collect();
            let moved = |by: f64| {
                let mut all = values.clone();
                all[i].data.iter_mut().zip(&to).for_each(|(x, t)| *x += by * t);
                step(&plain, &one, &all, ROWS * m).0
            };
            let want = (moved(H) - moved(-H)) / (2.0 * H);
            let got: f64 = g.iter().zip(&to).map(|(g, t)| g * t).sum();
            let what = format!("program {seed}: gradient {i} against finite differences");
            close(&what, &[got], &[want], 1e-5, &plain);
        }
        for o in [base(&[], m), layout(&mut d, m), layout(&mut d, m)] {
            let c = match build(&named, &o) {
                Ok(c) => c,
                // A stage may need what a later one makes, and a model may have few parts.
                Err(e) if ["stage-order", "too-many-stages"].contains(&e.code) => {
                    refused.push(e.code);
                    continue;
                }
                Err(e) => panic!("program {seed} on {:?}: {e}\n{}", o.mesh, named.text),
            };
            compiled += 1;
            prove(&named, &o, &c);
            let what = format!("program {seed} on {:?}, zero {}, {}", o.mesh, o.zero, o.recompute);
            let (l, g) = step(&named, &c, &values, ROWS * m);
            close(&format!("{what}: loss"), &[l], &[loss], 1e-10, &named);
            for (i, (got, want)) in g.iter().zip(&grads).enumerate() {
                close(&format!("{what}: gradient {i}"), got, want, 1e-9, &named);
            }
        }
    }
    assert!(compiled > 8 * refused.len() && compiled > 80, "{compiled} compiled, not {refused:?}");
}
