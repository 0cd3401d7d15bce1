//! The verifier: what is right passes, and every small thing that is wrong with a program that
//! ranks run is refused, with the collective that is missing.

use shardc_ir::diag::Diag;
use shardc_ir::func::Module;
use shardc_ir::phase::Phase;
use shardc_ir::text::{parse, print};
use shardc_ir::verify::verify;

const MLP: &str = include_str!("../corpus/mlp.ir");
const RANKED: &str = include_str!("../corpus/mlp_ranked.ir");

fn read(text: &str) -> Module {
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn problems(text: &str, phase: Phase) -> Vec<Diag> {
    verify(&read(text), phase).err().unwrap_or_default()
}

/// The one problem of a program.
fn problem(text: &str, phase: Phase) -> Diag {
    let mut all = problems(text, phase);
    assert_eq!(all.len(), 1, "{text}\n{all:#?}");
    let d = all.remove(0);
    assert!(!d.help.is_empty() && d.place.is_some(), "{d}");
    d
}

/// Replaces exactly one place of a text.
fn with(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

#[test]
fn the_corpus_is_right_in_its_phase() {
    use Phase::*;
    for (text, phases) in [
        (MLP, vec![Sharded]),
        (RANKED, vec![Sharded, Ranked]),
        (include_str!("../corpus/alternating.ir"), vec![Source, Sharded, Ranked]),
        (include_str!("../corpus/layers.ir"), vec![Sharded, Ranked]),
        (include_str!("../corpus/sharded.ir"), vec![Sharded]),
        (include_str!("../corpus/optimizer.ir"), vec![Sharded, Ranked]),
        (include_str!("../corpus/subaxes.ir"), vec![Sharded, Ranked]),
        (include_str!("../corpus/attention.ir"), vec![Sharded, Ranked]),
    ] {
        for phase in [Source, Sharded, Ranked] {
            let found = problems(text, phase);
            assert_eq!(found.is_empty(), phases.contains(&phase), "{phase:?} {found:#?}\n{text}");
        }
    }
}

#[test]
fn mutations_of_a_ranked_program_are_refused() {
    let all_reduce = RANKED.lines().find(|l| l.contains("all_reduce[tp]")).unwrap();
    let all_reduce = all_reduce.to_string() + "\n";
    let two = "mesh [dp=2, tp=2]";
    let cases = [
        // The fan_out is dropped: what it made is its operand.
        ("mixed", with(RANKED, "fan_out[tp] %x : f32[4,8]~tp", "scale[1.0] %x : f32[4,8]")),
        ("mixed", with(RANKED, "%x.f, %w1", "%x, %w1")),
        // The all_reduce is doubled.
        (
            "collective",
            with(
                &with(
                    RANKED,
                    &all_reduce,
                    &(all_reduce.clone() + "  %z = all_reduce[tp] %y : f32[4,8]\n"),
                ),
                "return %y",
                "return %z",
            ),
        ),
        // Each goes over another axis.
        ("collective", with(&with(RANKED, "mesh [tp=2]", two), "all_reduce[tp]", "all_reduce[dp]")),
        ("result-type", with(&with(RANKED, "mesh [tp=2]", two), "fan_out[tp]", "fan_out[dp]")),
        // The all_reduce is dropped, and another op stands in its place.
        ("partial", with(RANKED, "all_reduce[tp] %y.part", "gelu %y.part")),
        ("result-type", with(RANKED, "all_reduce[tp] %y.part", "scale[2.0] %y.part")),
        // A weight is split in another dim, or not at all.
        ("sharding-conflict", with(RANKED, "%w2: f32[16@tp,8]", "%w2: f32[16,8@tp]")),
        ("sharding-conflict", with(RANKED, "%w2: f32[16@tp,8]", "%w2: f32[16,8]")),
        ("size", with(RANKED, "%w2: f32[16@tp,8]", "%w2: f32[17@tp,8]")),
        // Declared types that are not what the op makes.
        (
            "result-type",
            with(
                RANKED,
                "%y.part = dot[mn,nk->mk] %a, %w2 : f32[4,8]+tp",
                "%y.part = dot[mn,nk->mk] %a, %w2 : f32[4,8]~tp",
            ),
        ),
        ("operands", with(RANKED, "gelu %h", "gelu %h, %h")),
    ];
    for (code, text) in cases {
        let found = problems(&text, Phase::Ranked);
        assert_eq!(found.first().map(|d| d.code), Some(code), "{text}\n{found:#?}");
    }
}

#[test]
fn a_type_error_as_people_see_it() {
    let text = with(RANKED, "%x.f, %w1", "%x, %w1");
    insta::assert_snapshot!("missing_fan_out", problem(&text, Phase::Ranked).to_string());
    let text = with(RANKED, "all_reduce[tp] %y.part", "scale[2.0] %y.part");
    insta::assert_snapshot!("missing_all_reduce", problem(&text, Phase::Ranked).to_string());
    let text = with(MLP, "%w2: f32[16@tp,8]", "%w2: f32[17,8]");
    insta::assert_snapshot!("sizes", problem(&text, Phase::Sharded).to_string());
}

#[test]
fn a_source_has_no_marks_and_no_collectives() {
    let one =
        "mesh [tp=2]\nfunc @f(%x: f32[4]) -> f32[4] {\n  %y = gelu %x : f32[4]\n  return %y\n}\n";
    assert!(problems(one, Phase::Source).is_empty());
    for (from, to) in [
        ("%x: f32[4]", "%x: f32[4@tp]"),
        ("%x: f32[4]", "%x: f32[4]+tp"),
        ("gelu", "slice[tp; dim=0]"),
        ("gelu", "fan_out[tp]"),
    ] {
        assert_eq!(problem(&with(one, from, to), Phase::Source).code, "phase");
    }
    // A sharding that is asked for is not a mark.
    assert!(problems(&with(one, "%x: f32[4]", "%x: f32[4] @(tp)"), Phase::Source).is_empty());
}

#[test]
fn an_axis_has_one_state() {
    let text = "mesh [tp=2]\nfunc @f(%x: f32[4@tp,2@tp], %y: f32[4@tp]+tp) -> () {\n  return\n}\n";
    let found = problems(text, Phase::Sharded);
    assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["mixed", "mixed"]);
    assert!(found[0].to_string().contains("`%x` has two states over tp"), "{}", found[0]);
}

#[test]
fn a_problem_of_every_layer_is_told_once() {
    let text = "mesh [tp=2]\n\
        func @f(%h: f32[4@tp]) -> () {\n\
        \x20 repeat i in 0..=31, %l{i-1}.y at 0 is %h {\n\
        \x20  m.{i}:\n\
        \x20   %l{i}.y = gelu %l{i-1}.y : f32[4]\n\
        \x20   %l{i}.z = gelu %l{i-1}.y : f32[5]\n\
        \x20 }\n\
        \x20 return\n\
        }\n";
    let found = problems(text, Phase::Ranked);
    // Both results of layer 0, whose operand is another, then the second of layers 1..=31.
    assert_eq!(found.len(), 3, "{found:#?}");
    assert_eq!(found[2].why.last().unwrap(), "same in 30 other layers");
}

/// Keys and values have a loop that queries, the first operand, lack.
#[test]
fn a_loop_that_is_split_in_two_ways_is_told_with_the_first_operand_that_has_it() {
    let text = "mesh [tp=2]\n\
        func @f(%q: f32[2,3,2,2], %k: f32[2,4@tp,1,2], %v: f32[2,4,1,2], %p: i32[3], %s: i32[4]) -> () {\n\
        \x20 %o, %l = attention[0.7; mask=full] %q, %k, %v, %p, %s : f32[2,3,2,2], f32[2,3,2]\n\
        \x20 return\n\
        }\n";
    let d = problem(text, Phase::Ranked);
    assert_eq!(d.code, "sharding-conflict");
    assert_eq!(d.message, "`attention`: `t` is 4@tp in `%k` and 4 in `%v`");
}

#[test]
fn roles_join_functions() {
    let text = "mesh [tp=2]\n\
        func @forward(%x: f32[4@tp]) -> (f32[4@tp] stash \"h\") {\n\
        \x20 return %x\n\
        }\n\
        func @backward(%h: f32[4@tp] stash \"h\", %s: f32[5] stash \"other\") -> () {\n\
        \x20 return\n\
        }\n";
    for phase in [Phase::Sharded, Phase::Ranked] {
        assert!(problems(text, phase).is_empty());
    }
    let marks = with(text, "%h: f32[4@tp]", "%h: f32[4]");
    assert!(problems(&marks, Phase::Sharded).is_empty());
    let d = problem(&marks, Phase::Ranked);
    assert_eq!(d.code, "role");
    assert!(d.help[0].contains("f32[4@tp]"), "{d}");
    assert_eq!(problem(&with(text, "%h: f32[4@tp]", "%h: f32[8@tp]"), Phase::Sharded).code, "role");
    let twice = "mesh []\n\
        func @f(%x: f32[]) -> (f32[] output \"a\", f32[] output \"a\") {\n\
        \x20 return %x, %x\n\
        }\n";
    assert_eq!(problem(twice, Phase::Source).code, "role");
}

/// A state of each parameter and one of the run.
const STATES: &str = "mesh [dp=2]
state exp_avg: f32 of param = 0
state scale: f32 of run = 65536

func @forward(%w: f32[4@dp] param \"w\", %m: f32[4@dp] state[exp_avg] \"w\") -> (f32[4@dp] output \"m\") {
  return %m
}

func @optimizer_step(%m: f32[4@dp] state[exp_avg] \"w\", %s: f32[] state[scale] \"\") -> (f32[4@dp] state[exp_avg] \"w\", f32[] state[scale] \"\") {
  %m.1 = scale[2.0] %m : f32[4@dp]
  %s.1 = scale[0.5] %s : f32[]
  return %m.1, %s.1
}
";

#[test]
fn states_are_declared_once_and_have_one_writer() {
    assert_eq!(problems(STATES, Phase::Step), []);
    let old = "func @optimizer_step(%m: f32[4@dp] state[exp_avg] \"w\"";
    let shown = "output \"m\"";
    for (from, to, count, what) in [
        ("state scale: f32 of run = 65536\n", "", 2, "not declared"),
        ("of run = 65536\n", "of run = 1\nstate scale: f32 of run = 2\n", 1, "second time"),
        ("of run = 65536", "of param = 65536", 2, "a state of param"),
        ("exp_avg: f32 of param", "exp_avg: f32 of run", 6, "a state of run"),
        ("state scale: f32", "state scale: bf16", 2, "declared bf16"),
        (old, "func @optimizer_step(%m: f32[4@dp]+dp state[exp_avg] \"w\"", 1, ""),
        (old, "func @optimizer_step(%m: f32[4@dp] state[exp_avg] \"v\"", 1, "no parameter"),
        ("= 65536", "= 1e300", 1, "which f32 has not"),
        (shown, "state[exp_avg] \"w\"", 2, "for each microbatch"),
        ("func @forward", "func @evaluate", 0, ""),
    ] {
        let found = problems(&with(STATES, from, to), Phase::Step);
        assert_eq!(found.len(), count, "{to}: {found:#?}");
        assert!(found.iter().all(|d| d.code == "role" || what.is_empty()), "{to}: {found:#?}");
        assert!(count == 0 || found.iter().any(|d| d.message.contains(what)), "{to}: {found:#?}");
    }
    let two = with(
        &with(STATES, "func @forward", "func @optimizer_step.0"),
        shown,
        "state[exp_avg] \"w\"",
    );
    let d = problem(&two, Phase::Step);
    assert!(d.code == "role" && d.message.contains("both write state[exp_avg] \"w\""), "{d}");
}

#[test]
fn numbers_of_results() {
    let text =
        "mesh []\nfunc @f(%x: f32[4]) -> () {\n  %a, %b = gelu %x : f32[4], f32[4]\n  return\n}\n";
    for phase in [Phase::Source, Phase::Sharded, Phase::Ranked] {
        assert_eq!(problem(text, phase).code, "arity");
    }
    let two = "mesh [tp=2]\n\
        func @f(%x: f32[4], %y: f32[5]) -> () {\n\
        \x20 %a = all_reduce[tp] %x, %y : f32[4]\n\
        \x20 return\n\
        }\n";
    assert_eq!(problem(two, Phase::Sharded).code, "arity");
    assert!(
        problems(
            &two.replace("%a =", "%a, %b =").replace(" : f32[4]\n", " : f32[4], f32[5]\n"),
            Phase::Sharded
        )
        .is_empty()
    );
}

/// What no text says, but a pass may leave behind.
#[test]
fn broken_functions_are_refused_not_followed() {
    let broken = |change: fn(&mut shardc_ir::func::Func)| {
        let mut m = read(RANKED);
        change(&mut m.funcs[0]);
        let codes: Vec<_> = verify(&m, Phase::Ranked).unwrap_err().iter().map(|d| d.code).collect();
        codes[0]
    };
    use shardc_ir::func::{Annotation, Scope, Value};
    use shardc_ir::mesh::{Atom, AtomSet};
    assert_eq!(broken(|f| f.nodes[1].ins[0] = Value(99)), "ssa");
    assert_eq!(broken(|f| f.nodes.swap(0, 1)), "ssa");
    assert_eq!(broken(|f| f.nodes[1].outs[0] = f.nodes[0].outs[0]), "ssa");
    assert_eq!(broken(|f| drop(f.nodes.pop())), "ssa");
    assert_eq!(broken(|f| f.values[Value(4)].name = f.values[Value(3)].name.clone()), "ssa");
    assert_eq!(broken(|f| f.nodes[0].scope.0 = 7), "ssa");
    assert_eq!(broken(|f| f.values[Value(0)].ty.sum = AtomSet::one(Atom(3))), "mesh");
    assert_eq!(broken(|f| f.values[Value(0)].name.hint = "a b".into()), "name");
    assert_eq!(broken(|f| f.values[Value(0)].name.hint = "l3.q".into()), "name");
    assert_eq!(broken(|f| f.values[Value(0)].name.hint = "d_q".into()), "name");
    assert_eq!(broken(|f| f.values[Value(0)].name.hint = "q.1".into()), "name");
    assert_eq!(broken(|f| f.nodes[0].note = Some("two\nlines".into())), "name");
    assert_eq!(broken(|f| f.scopes[Scope(0)].path = "a: b".into()), "name");
    assert_eq!(broken(|f| f.values[Value(0)].ty.dims[0].size = 1 << 48), "size");
    assert_eq!(
        broken(|f| {
            f.annotations.insert(Value(0), Annotation { dims: Default::default(), priority: 0 });
        }),
        "arity"
    );
}

/// Names with dots, numbers and prefixes, as long as they read back, are names.
#[test]
fn unusual_names_are_names() {
    let text = "mesh []\n\
        \n\
        func @f(%d_d_x: f32[2], %l3.5: f32[2], %l3.: f32[2],\n\
         %x.01: f32[2], %.1: f32[2], %d_: f32[2], %l07.a.1: f32[2]) -> () {\n\
        \x20 return\n\
        }\n";
    let m = read(text);
    assert!(verify(&m, Phase::Source).is_ok(), "{:#?}", verify(&m, Phase::Source));
    assert_eq!(print(&read(&print(&m))), print(&m));
}

/// Nodes that are like one that is right are not checked again: one that is almost like it is.
#[test]
fn a_wrong_node_among_many_alike_is_found() {
    let program = |wrong: usize, line: &str| {
        let one = |i: usize| match i == wrong {
            true => format!("  %y{i} = {line}\n"),
            false => format!("  %y{i} = add %x, %x : f32[4,8]\n"),
        };
        let lines: String = (0..40).map(one).collect();
        format!(
            "mesh []\n\nfunc @f(%x: f32[4,8], %z: f32[4,9], %h: bf16[4,8]) -> (f32[4,8]) {{\n{lines}  return %x\n}}\n"
        )
    };
    assert!(problems(&program(0, "add %x, %x : f32[4,8]"), Phase::Source).is_empty());
    for wrong in [0, 1, 20, 39] {
        for (code, line) in [
            ("result-type", "add %x, %x : f32[4,9]"),
            ("result-type", "add %z, %z : f32[4,8]"),
            ("result-type", "add %x, %x : bf16[4,8]"),
            ("size", "add %x, %z : f32[4,8]"),
        ] {
            let found = problems(&program(wrong, line), Phase::Source);
            assert!(found.iter().any(|d| d.code == code), "{wrong}: {line}: {found:?}");
        }
    }
}

/// What `accumulate` writes over is a sum over microbatches, or a value that nothing reads later.
#[test]
fn what_is_added_to_in_place_is_read_no_more() {
    let grad = "grad \"w\"";
    let of = |role: &str, lines: &str, result: &str| {
        format!(
            "mesh []\nfunc @f(%a: f32[4] {role}, %x: f32[4]) -> (f32[4] {grad}) {{\n{lines}  \
             return {result}\n}}\n"
        )
    };
    let line = |text: &str| format!("  {text} : f32[4]\n");
    let lines = |all: &[&str]| all.iter().map(|l| line(l)).collect::<String>();
    for all in [
        &["%s = accumulate %a, %x"][..],
        &["%s = accumulate %a, %x, %x"],
        &["%y = exp %a", "%s = accumulate %a, %y"],
        &["%t = accumulate %a, %x", "%s = accumulate %t, %x"],
        &["%t = exp %a", "%s = accumulate %t, %x"],
    ] {
        let text = of(grad, &lines(all), "%s");
        assert!(problems(&text, Phase::Staged).is_empty(), "{text}");
    }
    for (all, result, message) in [
        (&["%s = accumulate %a, %x", "%y = exp %a"][..], "%s", "`%a` is read, but written over"),
        (&["%v = stop_gradient %a", "%s = accumulate %a, %x", "%y = exp %v"], "%s", "`%v` is read"),
        (&["%v = stop_gradient %a", "%s = accumulate %v, %x", "%y = exp %a"], "%s", "`%a` is read"),
        (&["%t = accumulate %a, %x", "%s = accumulate %a, %t"], "%s", "`%a` is read"),
        (&["%s = accumulate %a, %x"], "%a", "`%a` is returned, but written over"),
        (&["%s = accumulate %a, %a"], "%s", "`%a` is added to itself in place"),
        (&["%v = stop_gradient %a", "%s = accumulate %a, %v"], "%s", "`%a` is added to itself"),
    ] {
        let d = problem(&of(grad, &lines(all), result), Phase::Staged);
        assert!(d.code == "overwritten" && d.message.starts_with(message), "{d}");
    }
    let text = of("param \"w\"", &lines(&["%s = accumulate %a, %x"]), "%s");
    let d = problem(&text, Phase::Staged);
    assert!(d.code == "overwritten" && d.message.contains("param \"w\" lasts"), "{d}");
    let d = problem(&of("", &lines(&["%s = accumulate %a, %x"]), "%s"), Phase::Source);
    assert!(d.code == "phase" && d.message.contains("in a model"), "{d}");
    let d = problem(&of(grad, &lines(&["%s = accumulate %a"]), "%s"), Phase::Staged);
    assert_eq!(d.code, "operands");
}
