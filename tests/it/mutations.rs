//! Removing, doubling or re-axing any single collective, fan_out, slice or place of a program is
//! caught by the types: all of them, in whole models, one mutant at a time.

use crate::fixture::*;
use shardc::commands::verify::{Verify, checks};
use shardc::numbers::{TOLERANCE, compare};
use shardc::plan_dir::reseal;
use shardc_frontends::Model;
use shardc_ir::diag::Exit;
use shardc_ir::func::{Func, Module, Name, Node, Value};
use shardc_ir::interp::{Precision, StepState, call};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{Op, Permute};
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Fall, LrSchedule, Mode};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{DType, Type};
use shardc_ir::verify::verify;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Balance, CpMode, Decay, Optimizer, Options, ShardRule};
use shardc_passes::pipeline::Compiled;
use shardc_testing::taken;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Mutants by what was done to which op: refused, and the text of those that were not.
#[derive(Default)]
struct Tally {
    caught: BTreeMap<(&'static str, &'static str), usize>,
    /// Word codes of the first messages.
    codes: BTreeMap<&'static str, usize>,
    survivors: Vec<(&'static str, String, Module)>,
}

impl Tally {
    fn judge(&mut self, m: &Module, what: &'static str, op: &Op, place: &str) {
        match verify(m, Phase::Ranked) {
            Err(all) => {
                *self.caught.entry((what, op.mnemonic())).or_default() += 1;
                *self.codes.entry(all[0].code).or_default() += 1;
            }
            Ok(()) => self.survivors.push((what, place.into(), m.clone())),
        }
    }
}

/// The axes of an op that is tested; `None` for all other ops.
fn axes(op: &mut Op) -> Option<&mut AtomSet> {
    match op {
        Op::FanOut(o) => Some(&mut o.axes),
        Op::Slice(o) => Some(&mut o.axes),
        Op::PadToPartial(o) => Some(&mut o.axes),
        Op::AllReduce(o) => Some(&mut o.axes),
        Op::AllGather(o) => Some(&mut o.axes),
        Op::ReduceScatter(o) => Some(&mut o.axes),
        Op::AllToAll(o) => Some(&mut o.axes),
        Op::Exchange(o) => Some(&mut o.axes),
        Op::AllToAllV(o) => Some(&mut o.axes),
        Op::Permute(o) => Some(&mut o.axes),
        Op::ToPartial(o) => Some(&mut o.axes),
        Op::ToVarying(o) => Some(&mut o.axes),
        Op::FromVarying(o) => Some(&mut o.axes),
        Op::RingShard(o) => Some(&mut o.axes),
        other => {
            assert!(other.collective().is_none(), "`{}` is not tested", other.mnemonic());
            None
        }
    }
}

/// All sets of one or two atoms.
fn atom_sets(mesh: &Mesh) -> Vec<AtomSet> {
    let atoms: Vec<Atom> = mesh.all().iter().collect();
    let two = |&a: &Atom| atoms.iter().map(move |&b| AtomSet::one(a).with(b)).collect::<Vec<_>>();
    let mut all: Vec<AtomSet> = atoms.iter().flat_map(two).collect();
    all.sort();
    all.dedup();
    all
}

/// Uses and results of `from` become `to`, but for node `but`.
fn redirect(f: &mut Func, from: Value, to: Value, but: Option<usize>) {
    let nodes = f.nodes.iter_mut().enumerate().filter(|(i, _)| Some(*i) != but);
    let uses = nodes.flat_map(|(_, n)| n.ins.iter_mut());
    uses.chain(f.results.iter_mut().map(|r| &mut r.value))
        .filter(|v| **v == from)
        .for_each(|v| *v = to);
}

/// The types that the op of a node gives, if it can be typed.
fn inferred(mesh: &Mesh, f: &Func, op: &Op, ins: &[Value], hint: &[Value]) -> Option<Vec<Type>> {
    let ins: Vec<&Type> = ins.iter().map(|&v| f.ty(v)).collect();
    let hint: Vec<Option<&Type>> = hint.iter().map(|&v| Some(f.ty(v))).collect();
    op.check(mesh, &ins, &hint).ok().map(|t| t.to_vec())
}

fn remove(f: &mut Func, i: usize) {
    let n = f.nodes.remove(i);
    n.outs.iter().zip(&n.ins).for_each(|(&o, &x)| redirect(f, o, x, None));
}

/// The op once more on its own results, whose users use the second.
fn double(f: &mut Func, i: usize, types: &[Type]) {
    let n = f.nodes[i].clone();
    let again = |ty: &Type| {
        f.value(ty.clone(), Name { grad: false, layer: None, hint: "again".into(), dup: 0 })
    };
    let outs: Vec<Value> = types.iter().map(again).collect();
    let ins = n.outs.iter().copied().collect();
    let second = Node { ins, outs: outs.iter().copied().collect(), ..n.clone() };
    f.nodes.insert(i + 1, second);
    n.outs.iter().zip(outs).for_each(|(&o, new)| redirect(f, o, new, Some(i + 1)));
}

/// All mutants of one node.
fn mutate(m: &Module, func: usize, i: usize, t: &mut Tally) {
    let (mesh, f) = (&m.mesh, &m.funcs[func]);
    let n = f.nodes[i].clone();
    let mut op = n.op.clone();
    let Some(own) = axes(&mut op).map(|a| *a) else { return };
    let place = format!("@{} {}", f.name, shardc_ir::text::node_text(mesh, f, &n).text);
    let mutant = |change: &dyn Fn(&mut Func)| {
        let mut m = m.clone();
        change(&mut m.funcs[func]);
        m
    };
    t.judge(&mutant(&|f| remove(f, i)), "remove", &n.op, &place);
    let declared: Vec<Type> = n.outs.iter().map(|&v| f.ty(v).clone()).collect();
    let again = inferred(mesh, f, &n.op, &n.outs, &n.outs);
    for types in [Some(declared.clone()), again.filter(|t| *t != declared)].into_iter().flatten() {
        t.judge(&mutant(&|f| double(f, i, &types)), "double", &n.op, &place);
    }
    for set in atom_sets(mesh).into_iter().filter(|&s| s != own) {
        *axes(&mut op).expect("has axes") = set;
        let place = format!("[{}] {place}", mesh.names(set, "*"));
        t.judge(&mutant(&|f| f.nodes[i].op = op.clone()), "re-axe", &n.op, &place);
        // As if the compiler had meant these axes: the result is declared what the op gives. Its
        // state over the axes may be I or R, as it is or as the op would have it.
        let mut types = vec![inferred(mesh, f, &op, &n.ins, &n.outs)];
        types.push(infer_plain(mesh, f, &op, &n.ins));
        types.dedup();
        for made in types.into_iter().flatten().filter(|t| *t != declared) {
            let retyped = mutant(&|f| {
                f.nodes[i].op = op.clone();
                n.outs.iter().zip(&made).for_each(|(v, t)| f.values[v].ty = t.clone());
            });
            t.judge(&retyped, "re-axe and retype", &n.op, &place);
        }
    }
    if n.ins.len() > 1 {
        for k in 0..n.ins.len() {
            let dropped = mutant(&|f| {
                let (x, o) = (f.nodes[i].ins.remove(k), f.nodes[i].outs.remove(k));
                redirect(f, o, x, None);
            });
            t.judge(&dropped, "drop an operand", &n.op, &place);
        }
    }
}

/// Types without a hint.
fn infer_plain(mesh: &Mesh, f: &Func, op: &Op, ins: &[Value]) -> Option<Vec<Type>> {
    inferred(mesh, f, op, ins, &[])
}

/// All mutants of a module.
fn tally(m: &Module) -> Tally {
    verify(m, Phase::Ranked).unwrap_or_else(|all| panic!("{}", all[0]));
    let mut t = Tally::default();
    for func in 0..m.funcs.len() {
        (0..m.funcs[func].nodes.len()).for_each(|i| mutate(m, func, i, &mut t));
    }
    for ((what, op), n) in &t.caught {
        println!("  {what:18} {op:15} {n:5} refused");
    }
    println!("  by {:?}; {} are other programs of the same numbers", t.codes, t.survivors.len());
    t
}

impl Tally {
    /// Every one of these ops was removed, doubled and given other axes.
    fn has(&self, ops: &[&str]) {
        for op in ops {
            let some = |what| self.caught.get(&(what, *op)).is_some_and(|&n| n > 0);
            assert!(some("remove") && some("double") && some("re-axe"), "no `{op}` was mutated");
        }
    }
}

/// Everything that a step leaves behind, on every rank.
fn numbers(fx: &Fixture, model: &Model, compiled: &Compiled) -> StepState {
    let mut state = start(fx, model, compiled);
    interpret(compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
    state
}

/// A mutant that the types allow must be another spelling of the same program: its result is
/// declared anew too, so it is not a mistake in one line. One is known. To fan out over more axes and
/// then slice (R to S) is to slice what is invariant (I to S): all numbers are equal. Only that a
/// block went another number of places around a ring is not a matter of types: the numbers show it.
fn check(name: &str, o: &Options, expect: &[&str]) {
    println!("{name} {:?} sp={}", o.mesh, o.sp);
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let mut compiled = compile(&model, o);
    let t = tally(&compiled.plan.module);
    t.has(expect);
    if t.survivors.is_empty() {
        return;
    }
    let want = numbers(&fx, &model, &compiled);
    let some = t.survivors.into_iter().enumerate().filter(|(i, _)| taken(*i, 3));
    for (what, place, mutant) in some.map(|s| s.1) {
        let sliced = what == "re-axe and retype" && place.contains("= fan_out[");
        let turned = ["remove", "double"].contains(&what) && place.contains("= permute[");
        assert!(sliced || turned, "{name}: survives: {what} {place}");
        compiled.plan.module = mutant;
        let got = numbers(&fx, &model, &compiled);
        if turned {
            assert!(got.values != want.values, "{name}: the same numbers: {what} {place}");
            continue;
        }
        assert!(got.values == want.values, "{name}: other numbers: {what} {place}");
        let shown = |s: &StepState| -> Vec<Vec<_>> {
            s.outputs.values().map(|all| all.iter().map(|x| x.ranks.clone()).collect()).collect()
        };
        assert!(shown(&got) == shown(&want), "{name}: other outputs: {what} {place}");
    }
}

const DP2_TP2: &[(&str, usize)] = &[("dp_replicate", 2), ("tp", 2)];

#[test]
fn fewer_kv_heads_than_ranks() {
    check("llama_gqa", &options(&[("tp", 4)], false, 2), &["fan_out", "all_reduce"]);
}

#[test]
fn tied_on_two_axes() {
    check("gpt2", &options(DP2_TP2, false, 2), &["fan_out", "all_reduce"]);
}

#[test]
fn sequence_parallel() {
    let ops = ["fan_out", "all_reduce", "all_gather", "reduce_scatter"];
    check("qwen3", &options(DP2_TP2, true, 2), &ops);
    check("qwen3", &Options { observe: false, ..options(DP2_TP2, true, 2) }, &ops);
}

/// What is summed over the stages, and everything else of a stage, with an axis more to mistake.
#[test]
fn stages() {
    let mesh = [("pp", 2), ("tp", 2)];
    check("gpt2", &options(&mesh, false, 2), &["fan_out", "all_reduce", "to_partial"]);
    let ops = ["fan_out", "all_reduce", "to_partial", "all_gather", "reduce_scatter"];
    check("qwen3", &options(&mesh, true, 2), &ops);
}

/// Blocks that go around, beside another axis to mistake cp for.
#[test]
fn rings_of_attention() {
    let o = options(&[("cp", 2), ("tp", 2)], false, 4);
    let o = Options { cp_mode: CpMode::Ring, ..o };
    check(
        "llama_gqa",
        &o,
        &["fan_out", "all_reduce", "slice", "to_varying", "from_varying", "ring_shard"],
    );
}

#[test]
fn forward_only() {
    check(
        "gpt2",
        &Options { mode: Mode::Infer, ..options(DP2_TP2, false, 2) },
        &["fan_out", "all_reduce"],
    );
}

/// A layout of the user's brings the ops that recipes do not use.
#[test]
fn layouts_of_a_user() {
    let rule = |glob: &str, dims: &[&str], priority| ShardRule {
        glob: glob.into(),
        dims: dims.iter().map(|d| d.to_string()).collect(),
        priority,
    };
    let shard = vec![
        rule("model.layers.0.mlp", &["?", "tp", "-"], 1),
        rule("model.layers.1.mlp", &["?", "-", "tp"], 1),
        rule("*.1.mlp.gate_proj.weight", &["-", "tp"], 0),
    ];
    let o = Options { shard, ..options(DP2_TP2, false, 2) };
    let ops = ["fan_out", "all_reduce", "all_gather", "reduce_scatter", "slice"];
    check("llama_mha", &o, &ops);
}

#[test]
fn heads_against_tokens() {
    let o = Options {
        cp_mode: CpMode::Ulysses,
        ..options(&[("dp_replicate", 2), ("cp", 2)], false, 2)
    };
    check("llama_mha", &o, &["all_reduce", "all_to_all"]);
}

/// No recipe makes a `place`: it is the gradient of a slice of what is replicated.
#[test]
fn pieces_among_zeros() {
    let text = "mesh [dp=2,tp=2]

func @f(%x: f32[4,8]~tp, %w: f32[8]) -> (f32[4,8] stash \"y\") {
  %x.p = slice[tp; dim=1] %x : f32[4,8@tp]
  %w.p = slice[tp; dim=0] %w : f32[8@tp]
  %y.p = mul[bh,h->bh] %x.p, %w.p : f32[4,8@tp]
  %y.s = pad_to_partial[tp; dim=1] %y.p : f32[4,8]+tp
  %y = all_reduce[tp] %y.s : f32[4,8]
  return %y
}

func @g(%y: f32[4,8] stash \"y\") -> f32[4,8] {
  return %y
}
";
    let m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let t = tally(&m);
    t.has(&["slice", "pad_to_partial", "all_reduce"]);
    let left: Vec<_> = t.survivors.iter().map(|s| format!("{} {}", s.0, s.1)).collect();
    assert!(left.is_empty(), "{}", left.join("\n"));
}

/// To move data around a ring changes no type: that a `permute` is missing, doubled or has another
/// shift shows in the numbers, and that it has other axes in the types.
#[test]
fn rings() {
    let text = "mesh [dp=2,tp=3]

func @f(%x: f32[1]!tp) -> f32[1]!tp {
  %y = permute[tp; shift=1] %x : f32[1]!tp
  return %y
}
";
    let m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let (mesh, f) = (&m.mesh, &m.funcs[0]);
    let ring: Vec<Tensor> = (0..6).map(|r| Tensor::full(&[1], f64::from(r))).collect();
    let run = |f: &Func| {
        let out = call(mesh, f, std::slice::from_ref(&ring), Precision::F64);
        out.unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    };
    let want = run(f);
    let mutant = |change: &dyn Fn(&mut Func)| {
        let mut f = f.clone();
        change(&mut f);
        f
    };
    let declared = f.ty(f.nodes[0].outs[0]).clone();
    assert_ne!(run(&mutant(&|f| remove(f, 0))), want);
    assert_ne!(run(&mutant(&|f| double(f, 0, std::slice::from_ref(&declared)))), want);
    let Op::Permute(Permute { axes, .. }) = f.nodes[0].op else { panic!("a permute") };
    for shift in [0, 2] {
        assert_ne!(run(&mutant(&|f| f.nodes[0].op = Permute { axes, shift }.into())), want);
    }
    for other in atom_sets(mesh).into_iter().filter(|&s| s != axes) {
        let op = Permute { axes: other, shift: 1 };
        let mut m = m.clone();
        m.funcs[0].nodes[0].op = op.into();
        assert!(verify(&m, Phase::Ranked).is_err(), "{other:?}");
    }
}

/// A text whose first line with all of `has` has another number behind `key`.
fn with_number(text: &str, has: &[&str], key: &str, new: &str) -> String {
    let fits = |l: &str| has.iter().chain([&key]).all(|w| l.contains(w));
    let at = text.lines().take_while(|l| !fits(l)).map(|l| l.len() + 1).sum::<usize>();
    let at = at + text[at..].find(key).unwrap_or_else(|| panic!("no {has:?} {key}")) + key.len();
    let number = |c: char| c.is_ascii_digit() || matches!(c, '.' | 'e' | '-');
    let old = text[at..].find(|c| !number(c)).expect("an end");
    assert!(old > 0 && text[at..at + old] != *new, "{key}");
    format!("{}{new}{}", &text[..at], &text[at + old..])
}

/// A plan in a folder of its own: of a fixture with other sizes.
fn written(fixture: &str, sizes: &[(&str, usize)], o: &Options) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutations").join(fixture);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    let config = std::fs::read_to_string(Fixture::open(fixture).dir.join("config.json"));
    let mut config: serde_json::Value =
        serde_json::from_str(&config.expect("a config")).expect("JSON");
    for (key, size) in sizes {
        config[key] = (*size).into();
    }
    let (file, out) = (dir.join("config.json"), dir.join("plan"));
    std::fs::write(&file, config.to_string()).expect("written");
    shardc::compile(&file, o, &mut |_, _| {})
        .and_then(|mut done| done.write(&out))
        .unwrap_or_else(|e| panic!("{e}"));
    out
}

/// Names of the checks that fail.
fn failing(plan: &Path) -> Vec<String> {
    let all = checks(plan, Verify { numbers: true, ..Verify::default() })
        .unwrap_or_else(|e| panic!("{e}"));
    all.into_iter().filter(|c| !c.ok).map(|c| c.name).collect()
}

/// What a person edits in a plan, with the hash made right again, is seen: the text is not what its
/// model compiles to, and where numbers change, they are not the model's.
#[test]
fn edited_plans_are_seen() {
    let small =
        [("hidden_size", 16), ("intermediate_size", 16), ("vocab_size", 24), ("head_dim", 4)];
    let o = Options {
        seq: 8,
        global_batch: 2,
        clip: Some(0.01),
        observe: false,
        ..options(&[("tp", 2)], false, 1)
    };
    let plan = written("mistral_window", &small, &o);
    assert_eq!(failing(&plan), [""; 0]);
    let programs = "programs/all.ir";
    // The file, what its line has and what stands before the number; does it change numbers?
    let edits: [(&str, &[&str], &str, &str, bool); 16] = [
        (programs, &["variance"], "= scale[", "0.04", true),
        (programs, &["variance"], "= shift[", "1e-2", true),
        (programs, &["embed_tokens_new"], "; eps=", "1e-4", true),
        (programs, &["embed_tokens_new"], "beta2=", "0.99", true),
        (programs, &["embed_tokens_new"], "adamw[", "0.95", true),
        (programs, &["lm_head_new"], "decay=", "0.2", true),
        (programs, &["l1.attn"], "= attention[", "0.4", true),
        (programs, &["l1.attn"], "mask=-", "5..0", true),
        (programs, &["max_norm"], "fill[", "0.02", true),
        (programs, &["d_l1.half"], "= scale[", "-0.4", true),
        ("plan.json", &["0.001"], "\"lr\": ", "0.5", true),
        ("plan.json", &[], "\"seed\": ", "3", false),
        ("plan.json", &[], "\"vocab\": ", "79", false),
        ("options.toml", &["eps = 0."], "eps = ", "0.001", true),
        ("model.ir", &["lse"], "= attention[", "0.4", true),
        ("model.ir", &["embed_tokens"], "normal=", "0.5", true),
    ];
    let tamper = |file: &str, change: &dyn Fn(&str) -> String| -> Vec<String> {
        let old = std::fs::read_to_string(plan.join(file)).expect("a file");
        std::fs::write(plan.join(file), change(&old)).expect("written");
        // Hashes tell it before anything else.
        let all = checks(&plan, Verify::default()).expect("checks");
        let said = all[0].detail.clone().unwrap_or_default();
        assert!(said.contains("hash") && said.contains(file), "{file}: {said}");
        reseal(&plan).unwrap_or_else(|e| panic!("{e}"));
        let found = failing(&plan);
        std::fs::write(plan.join(file), old).expect("written");
        reseal(&plan).unwrap_or_else(|e| panic!("{e}"));
        found
    };
    let judge = |what: &str, found: Vec<String>, numbers: bool| {
        assert!(found.contains(&"source".into()), "{what}: {found:?}");
        let computed = found.iter().any(|c| c != "source");
        assert_eq!(computed, numbers, "{what}: {found:?}");
    };
    for (file, has, key, new, numbers) in edits {
        let found = tamper(file, &|old| with_number(old, has, key, new));
        judge(&format!("{file}: {has:?} {key}{new}"), found, numbers);
    }
    let crossed = |old: &str| {
        let name = |x: &str| format!("\"tensor\": \"model.layers.1.self_attn.{x}_proj.weight\"");
        old.replace(&name("k"), "K").replace(&name("v"), &name("k")).replace('K', &name("v"))
    };
    judge("k and v crossed", tamper("weights.json", &crossed), true);
    let family = |old: &str| old.replacen("\"family\": \"mistral\"", "\"family\": \"llama\"", 1);
    judge("another family", tamper("plan.json", &family), false);
    let unknown = |old: &str| {
        let (at, end) =
            (old.find("\"facts\": {").expect("facts"), old.find("\"origin\"").expect("it"));
        format!("{}\"facts\": null, {}", &old[..at], &old[end..])
    };
    judge("no facts", tamper("plan.json", &unknown), false);
    let zeros = |old: &str| old.replacen("\"ones\"", "\"zeros\"", 1);
    judge("a norm of zeros", tamper("weights.json", &zeros), true);
    assert_eq!(failing(&plan), [""; 0], "all is as it was");
}

/// Numbers that anybody may write into a plan, hashes and all, are refused or seen; none ends in a bug.
#[test]
fn numbers_beyond_all_bounds_are_refused() {
    let small = [("hidden_size", 16), ("intermediate_size", 16), ("vocab_size", 24)];
    let o = Options { seq: 8, global_batch: 2, ..options(&[("tp", 2)], false, 1) };
    let plan = written("qwen2", &small, &o);
    let shardc = |args: &[&str]| {
        let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
        let out = c.args(args).current_dir(plan.parent().expect("a folder")).output();
        let out = out.expect("shardc starts");
        let said = [&out.stdout[..], &out.stderr].map(String::from_utf8_lossy).concat();
        (out.status.code(), said)
    };
    let huge = (i64::MAX).to_string();
    let most = usize::MAX.to_string();
    let edits = [
        ("options.toml", "global_batch = 2", format!("global_batch = {huge}")),
        ("options.toml", "global_batch = 2", "global_batch = 4".into()),
        ("options.toml", "seq = 8", "seq = 16".into()),
        ("options.toml", "[\"tp\", 2]", "[\"tp\", 0]".into()),
        ("options.toml", "[\"tp\", 2]", "[\"tp\", 1], [\"tp\", 2]".into()),
        ("options.toml", "microbatch = 1", "microbatch = 0".into()),
        ("options.toml", "rate = 0.0", "rate = nan".into()),
        ("options.toml", "rate = 0.0", "rate = 0.0\nrates = 1.0".into()),
        ("options.toml", "seq = 8", "seq = 8\nsequence = 8".into()),
        ("plan.json", "\"heads\": ", format!("\"heads\": {most}")),
        ("weights.json", "\"shape\": [\n      24,", format!("\"shape\": [\n      {most},")),
    ];
    for (file, old, new) in &edits {
        let text = std::fs::read_to_string(plan.join(file)).expect("a file");
        let at = text.find(old).unwrap_or_else(|| panic!("{file}: no {old} in {text}"));
        // A number at the end of `old` goes too.
        let rest = text[at + old.len()..].trim_start_matches(|c: char| c.is_ascii_digit());
        let changed = format!("{}{new}{rest}", &text[..at]);
        std::fs::write(plan.join(file), changed).expect("written");
        let sealed = reseal(&plan);
        for args in [
            &["verify", "plan", "--numbers"][..],
            &["verify", "plan", "--tiny"],
            &["inspect", "plan", "--summary"],
            &["run", "plan", "--steps", "1"],
        ] {
            let (status, said) = shardc(args);
            let refused = matches!(status, Some(1 | 2)) && !said.contains("bug: ");
            assert!(refused && said.contains(file), "{args:?}, {file}: {new}: {said}");
        }
        std::fs::write(plan.join(file), text).expect("written");
        sealed.and_then(|()| reseal(&plan)).unwrap_or_else(|e| panic!("{e}"));
    }
    assert_eq!(failing(&plan), [""; 0], "all is as it was");
    // What compiles is read, with the largest numbers that flags take.
    let lr = LrSchedule::WarmupCosine(Fall {
        lr: 1e-3,
        warmup: 5,
        total: usize::MAX,
        floor: 0.0,
        decay: Some(usize::MAX - 5),
    });
    let most = Options { seed: u64::MAX, node: Some(usize::MAX), lr, ..o };
    let plan = written("qwen3", &small, &most);
    let read = shardc::plan_dir::read(&plan).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(read.options, most);
}

/// The numbers of stored programs are those of their model, whatever the layout; of a plan that is
/// too large for the interpreter that is said.
#[test]
fn numbers_of_plans_are_those_of_their_models() {
    let on = |mesh: &[(&str, usize)], microbatch| Options {
        seq: 8,
        global_batch: 4,
        observe: false,
        ..options(mesh, false, microbatch)
    };
    let sgd = Options { optimizer: Optimizer::Sgd, ..on(&[("dp_shard", 2)], 1) };
    let plans = [
        ("llama_gqa", Options { sp: true, ..on(&[("dp_replicate", 2), ("tp", 2)], 1) }),
        ("llama_deep", Options { sp: true, ..on(&[("pp", 2), ("tp", 2)], 2) }),
        ("llama_bias_tied", Options { zero: 3, ..sgd }),
        ("gpt2", Options { decay: Decay::Matrices, zero: 2, ..on(&[("dp_shard", 4)], 1) }),
        ("qwen2", Options { cp_mode: CpMode::Ring, ..on(&[("cp", 2)], 2) }),
        ("gemma2", Options { dtype: DType::BF16, ..on(&[("tp", 2)], 4) }),
        ("qwen3", Options { mode: Mode::Infer, ..on(&[("tp", 2), ("cp", 2)], 2) }),
        ("llama_mha", Options { freeze: vec!["*norm*".into()], clip: None, ..on(&[], 4) }),
        ("mixtral", Options { ep: 2, zero: 1, ..on(&[("dp_shard", 2)], 1) }),
        ("deepseek_v3", {
            let balance = Balance { aux: Some(0.01), z: 0.001, rate: 0.01 };
            Options { ep: 2, balance, recompute: Recompute::Full, ..on(&[("dp_shard", 2)], 1) }
        }),
    ];
    for (name, o) in plans {
        let config = Fixture::open(name).dir.join("config.json");
        let compiled = shardc::compile(&config, &o, &mut |_, _| {});
        let stored = compiled.unwrap_or_else(|e| panic!("{name}: {e}")).stored;
        let all = compare(&stored).unwrap_or_else(|e| panic!("{name}: {e}"));
        let least = if o.mode == Mode::Infer { 1 } else { 3 };
        assert!(all.len() >= least, "{name}: {all:?}");
        for d in all {
            assert!(d.error <= TOLERANCE, "{name} on {:?}: {d:?}", o.mesh);
        }
    }
    let out = written("llama_gqa", &[("vocab_size", 50_000_000)], &on(&[("tp", 2)], 4));
    let all = checks(&out, Verify::default()).unwrap_or_else(|e| panic!("{e}"));
    assert!(all.len() == 4 && all.iter().all(|c| c.ok), "{all:?}");
    let d = checks(&out, Verify { numbers: true, ..Verify::default() }).expect_err("too large");
    assert_eq!((d.code, d.exit), ("numbers-too-large", Exit::Unsupported), "{d}");
    let all =
        checks(&out, Verify { tiny: true, ..Verify::default() }).unwrap_or_else(|e| panic!("{e}"));
    assert!(all.len() > 6 && all.iter().all(|c| c.ok), "{all:?}");
}
