//! Where a model is cut into stages, and what crosses the cuts.

use crate::fixture::*;
use crate::lab::Lab;
use shardc_ir::diag::Diag;
use shardc_ir::func::{Func, RoleKind};
use shardc_ir::plan::{Instr, Mode, Plan, Transfer};
use shardc_passes::options::{Options, Order};
use shardc_passes::pipeline::Compiled;
use std::path::Path;

const PP4: &[(&str, usize)] = &[("pp", 4)];

fn named(name: &str) -> Order {
    Order::Named(name.into())
}

fn forwards(plan: &Plan) -> Vec<&Func> {
    plan.module.funcs.iter().filter(|f| f.name.starts_with("forward")).collect()
}

/// Decoder layers of every stage.
fn layers(plan: &Plan) -> Vec<usize> {
    let of = |f: &&Func| {
        let all = f.nodes.iter().filter_map(|n| f.scope_info(n.scope).layer);
        all.collect::<std::collections::BTreeSet<u32>>().len()
    };
    let mut all: Vec<(usize, usize)> = forwards(plan)
        .iter()
        .map(|f| (f.name.rsplit_once('.').map_or(0, |n| n.1.parse().expect("a stage")), of(f)))
        .collect();
    all.sort_unstable();
    all.into_iter().map(|x| x.1).collect()
}

fn sends(plan: &Plan, class: usize) -> Vec<Transfer> {
    let one = |i: &Instr| match i {
        Instr::Send(t) => Some(*t),
        Instr::Call(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
    };
    plan.classes[class].step.iter().filter_map(one).collect()
}

/// A model of a config alone, without weights.
fn of_config(file: &str, o: &Options) -> Plan {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs").join(file);
    let text = std::fs::read_to_string(&file).expect("a config");
    let config = serde_json::from_str(&text).expect("JSON");
    let done = shardc::compile_config(&config, o).unwrap_or_else(|e| panic!("{e}"));
    done.stored.plan
}

/// The head of Llama-3.1-8B costs more than two layers: the last stage has fewer, the first, with
/// the embedding, does not. A rank of half the speed gets about half.
#[test]
fn stages_are_balanced_by_cost_and_speed() {
    let base = Options { seq: 4096, observe: false, ..options(PP4, false, 1) };
    let even = layers(&of_config("llama-3.1-8b.json", &base));
    assert_eq!(even.iter().sum::<usize>(), 32);
    assert!(even[3] + 2 <= even[0], "{even:?}");
    assert!(even[..3].iter().max() <= even[..3].iter().min().map(|m| m + 1).as_ref(), "{even:?}");
    let slow = Options { speeds: vec![1.0, 0.5, 1.0, 1.0], ..base.clone() };
    let slow = layers(&of_config("llama-3.1-8b.json", &slow));
    assert!(slow[1] * 2 <= slow[0] + 1 && slow[1] > 0, "{slow:?}");
    // With V placement the first and the last stage are one rank's, and share its speed.
    let v = Options {
        schedule: named("zb-v"),
        speeds: vec![0.5, 1.0, 1.0, 1.0],
        global_batch: 8,
        ..base
    };
    let v = layers(&of_config("llama-3.1-8b.json", &v));
    assert!(v.len() == 8 && v[0] < v[1] && v[7] < v[6], "{v:?}");
}

fn by_hand(text: &str) -> Result<Compiled, Diag> {
    let o = Options { layers: text.into(), ..options(PP4, false, 2) };
    try_compile(&Fixture::open("llama_deep").model(&o), &o)
}

#[test]
fn stages_are_cut_by_hand() {
    let cut = |text: &str| layers(&by_hand(text).unwrap_or_else(|e| panic!("{e}")).plan);
    assert_eq!(cut("equal"), [2, 2, 2, 2]);
    assert_eq!(cut("1,4,2,1"), [1, 4, 2, 1]);
    assert_eq!(cut("Et*3|(t|)*2,t*3L"), [3, 1, 1, 3]);
    assert_eq!(cut("E|t*5|ttt|L"), [0, 5, 3, 0]);
}

#[test]
fn cuts_by_hand_that_do_not_fit_are_refused() {
    let code = |text: &str| by_hand(text).expect_err("refused");
    let d = code("3,3,2");
    assert!(d.code == "layers" && d.rule.as_deref() == Some("here: 4 stages of 8 layers"), "{d}");
    assert_eq!(d.help, ["for example --layers 2,2,2,2"], "of this model");
    assert_eq!(code("3,3,2,1").code, "layers");
    assert_eq!(code("Ett|tt|tt|tt").code, "layers");
    let d = code("model.layers.2,model.layers.4,model.layers.99");
    assert!(d.message.contains("model.layers.99") && d.help[1].contains("model."), "{d}");
    let d = code("E|t*8||L");
    assert!(d.message.contains("stage 2 is empty"), "{d}");
    // A text without layers is cut by its parts.
    let lab = Lab::new("cuts-of-a-text");
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/mlp.ir");
    let args = |layers| ["compile", text, "--mesh", "pp=2", "-o", "p", "--layers", layers];
    for given in ["up,loss", "a", "2,2", "equal", "Et|tL"] {
        let said = lab.refuses(&args(given), 2, "layers");
        assert!(said.contains("for example --layers down\n"), "{given}: {said}");
    }
    lab.ok(&args("down"));
    // Without pp there is nothing to cut.
    let said = lab.refuses(&["compile", text, "-o", "p", "--layers", "2,2"], 2, "layers");
    assert!(said.contains("leave it out: without pp nothing is cut"), "{said}");
    // Equal layers need 8 % stages == 0; otherwise any number will do.
    let three = |layers: &str| {
        let mut o = options(&[("pp", 3)], false, 2);
        o.layers = layers.into();
        try_compile(&Fixture::open("llama_deep").model(&o), &o)
    };
    let d = three("equal").expect_err("8 layers in 3 stages");
    assert!(d.rule.as_deref().is_some_and(|r| r.contains("layers % (pp * chunks) == 0")), "{d}");
    assert!(d.help[1].contains("use 2 stages") || d.help[1].contains("use 4 stages"), "{d}");
    assert!(three("balanced").is_ok());
    let mut o = options(&[("pp", 16)], false, 2);
    o.layers = String::new();
    let d = try_compile(&Fixture::open("llama_mha").model(&o), &o).expect_err("too many");
    assert!(d.code == "too-many-stages" && d.message.contains("16 stages of 6 parts"), "{d}");
}

/// Wherever it is cut, also inside what belongs together, the numbers are those of one device.
#[test]
fn cuts_by_hand_train_to_the_same_numbers() {
    for cut in ["1,4,2,1", "E|t*5|ttt|L", "model.layers.1,model.layers.7,lm_head"] {
        for schedule in ["1f1b", "zb-h1"] {
            let o = Options { layers: cut.into(), ..options(PP4, false, 2) };
            train_and_compare("llama_deep", &Options { schedule: named(schedule), ..o });
        }
    }
}

/// The residual stream crosses, and nothing else; with `--sp` only each rank's piece of it.
#[test]
fn what_crosses_is_what_is_used() {
    let hidden = 16 * SEQ * 2 * 4;
    for (sp, bytes) in [(false, hidden), (true, hidden / 2)] {
        let o = Options { sp, ..options(&[("pp", 4), ("tp", 2)], false, 2) };
        let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
        for class in 0..4 {
            let all = sends(&plan, class);
            let each: Vec<&Transfer> = all.iter().filter(|t| t.microbatch.is_some()).collect();
            let neighbours = usize::from(class > 0) + usize::from(class < 3);
            assert_eq!(each.len(), 4 * neighbours, "class {class}");
            assert!(each.iter().all(|t| t.bytes == bytes), "class {class} sp={sp}");
        }
    }
}

/// A tied table belongs to the first stage. The last one receives it and sends its gradient back,
/// once per step, before the sum over data ranks, which is the owner's; with a V both are one rank.
#[test]
fn a_tied_table_has_one_owner() {
    let o = options(&[("pp", 2), ("dp_replicate", 2)], false, 1);
    let model = Fixture::open("llama_deep").model(&o);
    let plan = compile(&model, &o).plan;
    let once = |class: usize| -> Vec<Transfer> {
        sends(&plan, class).into_iter().filter(|t| t.microbatch.is_none()).collect()
    };
    let table = 64 * 16 * 4;
    for class in 0..2 {
        let all = once(class);
        assert!(all.len() == 1 && all[0].bytes == table, "class {class}: {all:?}");
    }
    let holds = |of: fn(RoleKind) -> bool| -> Vec<&str> {
        let has = |f: &&Func| {
            let is = |a: &&shardc_ir::func::Port| {
                let r = a.role.as_ref();
                r.is_some_and(|r| of(r.kind) && r.name.starts_with("model.embed_tokens"))
            };
            f.args.iter().any(|a| is(&a))
        };
        plan.module.funcs.iter().filter(has).map(|f| &*f.name).collect()
    };
    assert_eq!(holds(|k| matches!(k, RoleKind::State(_))), ["optimizer_step.0"]);
    assert_eq!(holds(|k| k == RoleKind::Param), ["step_prologue.0", "optimizer_step.0"]);
    let v = Options { schedule: named("zb-v"), ..o };
    let plan = compile(&model, &v).plan;
    for class in 0..2 {
        assert!(sends(&plan, class).iter().all(|t| t.microbatch.is_some()), "class {class}");
    }
}

/// Several tensors, used in several later stages, cross once to each rank that uses them, and
/// what several stages send back is summed: a model written by hand, on 2 to 6 stages.
#[test]
fn values_that_skip_stages() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/skip.ir");
    skips(&file, &["1f1b", "zb-h1", "zb-h2"]);
}

/// The same where one value is the gradient of two parameters, and where a gradient is a view.
#[test]
fn gradients_of_two_parameters_and_views() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/skip.ir");
    let text = std::fs::read_to_string(file).expect("a text");
    let other = |with: [(&str, &str); 2]| {
        with.iter().fold(text.clone(), |t, (from, to)| {
            assert!(t.contains(from), "{from}");
            t.replacen(from, to, 1)
        })
    };
    let own = "  %ww = mul %w0, %w0 : f32[12,12]\n";
    let two = [
        ("%h: ", "%w3: f32[12,12] param \"w3\", %h: "),
        (own, "  %ww = add %w3, %w1 : f32[12,12]\n"),
    ];
    let view = [
        ("%h: ", "%w3: f32[144] param \"w3\", %h: "),
        (
            own,
            "  %sq = mul %w0, %w0 : f32[12,12]\n  %row = reshape[ab->(ab)] %sq : f32[144]\n  \
             %both = add %w3, %row : f32[144]\n  \
             %ww = reshape[(ab)->ab; a=12] %both : f32[12,12]\n",
        ),
    ];
    let dir = std::env::temp_dir().join(format!("shardc-cuts-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    for (name, with) in [("two.ir", two), ("view.ir", view)] {
        std::fs::write(dir.join(name), other(with)).expect("a file");
        skips(&dir.join(name), &["1f1b", "zb-h1"]);
    }
    std::fs::remove_dir_all(&dir).expect("it was made");
}

fn skips(file: &Path, schedules: &[&str]) {
    use shardc_runtime::{Options as How, Session, StepBatch, fresh};
    let (rows, seq) = (8, 6);
    let ids: Vec<i32> = (0..rows * seq).map(|i| (i * 7 % 40) as i32).collect();
    let targets: Vec<i32> = (0..rows * seq).map(|i| (i * 11 % 40) as i32 - 3).collect();
    let run = |pp: usize, schedule: &str| {
        let mut o = options(&[("pp", pp)], false, rows);
        (o.seq, o.schedule, o.mode) = (seq, named(schedule), Mode::Train);
        let done = shardc::compile(file, &o, &mut |_, _| {});
        let plan = done.unwrap_or_else(|e| panic!("{e}")).stored.plan;
        shardc_passes::step::replay::replay(&plan).unwrap_or_else(|e| panic!("{e}"));
        shardc_passes::memory::replay::replay(&plan).unwrap_or_else(|e| panic!("{e}"));
        let load = |w: &_, r: &[_], out: &mut [f32]| shardc_frontends::init(w, r, 5, out);
        let lower = |p: &_, rank| shardc_codegen::program(p, rank);
        let how = How { poison: true, ..How::default() };
        let mut s =
            Session::new(&plan, how, &lower, &fresh(load)).unwrap_or_else(|e| panic!("{e}"));
        let mut step = |i| {
            let batch = StepBatch::tokens(&ids, &targets, true);
            s.step(&batch, 1e-2, i).unwrap_or_else(|e| panic!("{e}")).outputs
        };
        (plan, [step(1), step(2)])
    };
    let (_, want) = run(1, "1f1b");
    for pp in 2..=6 {
        for &schedule in schedules {
            let (plan, got) = run(pp, schedule);
            // Sums are taken stage by stage: the order of a few terms, no more.
            for (i, bound) in [1e-6, 1e-5].into_iter().enumerate() {
                for (name, a) in &got[i] {
                    let most = want[i][name].data.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    let close = |(x, y): (&f32, &f32)| (x - y).abs() <= bound * most;
                    let all = a.data.iter().zip(&want[i][name].data).all(close);
                    assert!(all, "pp={pp} {schedule}: {name} of step {i}");
                }
            }
            let edges = (0..pp).flat_map(|c| sends(&plan, c)).count();
            assert!(edges >= 2 * (pp - 1), "pp={pp}: {edges}");
        }
    }
}
