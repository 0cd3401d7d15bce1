//! Passes one by one, from the command line.

use crate::lab::{FIXTURES, Lab};
use std::process::Output;

fn text(out: &[u8]) -> String {
    String::from_utf8_lossy(out).into_owned()
}

/// What `--dump-all` writes before a pass, `opt` takes to what it writes after it, and `--from` to the plan.
#[test]
fn every_pass_begins_where_the_last_one_ended() {
    let lab = Lab::new("passes");
    let cases: [(&str, &[&str]); 4] = [
        ("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp", "--zero", "3", "--seq", "8"]),
        (
            "gpt2",
            &[
                "--mesh",
                "pp=2,dp=2",
                "--schedule",
                "zb-h1",
                "--microbatch",
                "1",
                "--zero",
                "2",
                "--seq",
                "8",
            ],
        ),
        (
            "mixtral",
            &["--mesh", "dp=2,ep=2", "--seq", "8", "--dtype", "bf16", "--loss-chunks", "3"],
        ),
        ("llama_mha", &["--mesh", "tp=4", "--tp-mode", "2d", "--tp-steps", "summa", "--seq", "8"]),
    ];
    for (i, (fixture, flags)) in cases.into_iter().enumerate() {
        let model = format!("{FIXTURES}/{fixture}");
        let (dump, plan) = (format!("dump{i}"), format!("plan{i}"));
        let whole = ["compile", &model, "--dump-all", &dump, "--verify-each", "-o", &plan];
        lab.ok(&[&whole[..], flags].concat());
        let program =
            |dir: &str| std::fs::read_to_string(lab.path(&format!("{dir}/programs/all.ir")));
        let made = program(&plan).expect("programs");
        let names: Vec<&str> = shardc_passes::pipeline::names().collect();
        let file = |n: usize| format!("{dump}/{:02}-{}.ir", n + 1, names[n]);
        for (n, &name) in names.iter().enumerate().skip(1) {
            let (before, after) = (file(n - 1), file(n));
            let read = std::fs::read_to_string(lab.path(&after)).expect("a dump");
            // What a family knows of its weights is not in the text: only how they are laid out is.
            if !["annotate", "partition", "step"].contains(&name) {
                let out = lab.ok(&[&["opt", &before, "--pass", name][..], flags].concat());
                assert_eq!(text(&out.stdout), program_of(&read), "{fixture}: {name}");
            }
            if ["partition", "step", "group"].contains(&name) {
                let from = format!("from{i}-{n}");
                let flags = [&["--from", name, &before, "-o", &from][..], flags].concat();
                lab.ok(&[&["compile", &model, "--prove", "no"][..], &flags].concat());
                assert_eq!(program(&from).expect("programs"), made, "{fixture}: {name}");
            }
        }
    }
}

/// A file without its first line, by which shardc knows that it wrote it.
fn program_of(file: &str) -> &str {
    let (mark, text) = file.split_once('\n').expect("lines");
    assert!(mark.starts_with("// Written by shardc"), "{mark}");
    text
}

/// A file test says what a pass makes: where it does not, with which line, in which words.
#[test]
fn file_tests_run_by_the_command() {
    let lab = Lab::new("file-tests");
    let case = concat!(env!("CARGO_MANIFEST_DIR"), "/passes/tests/cases/split/attention.ir");
    let both =
        |out: Output| [out.stdout, out.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
    let [said, _] = both(lab.ok(&["opt", case, "--check"]));
    assert!(said.ends_with("split/attention.ir: `split` makes what it says\n"), "{said}");
    let text = std::fs::read_to_string(case).expect("a file of the tests");
    let check = |text: &str, more: &[&str]| {
        lab.write("mine.ir", text);
        let out = lab.shardc(&[&["opt", "mine.ir", "--pass", "split", "--check"], more].concat());
        (out.status.code(), both(out).concat())
    };
    let returned = "`return %loss_total`, not `return %loss`";
    for (from, to, line) in [
        ("// becomes: return %loss_total", "// becomes: return %loss", returned),
        ("// becomes: phase staged", "// not: all_gather", "there is `all_gather`"),
        ("phase differentiated", "phase source", "error[phase]"),
    ] {
        assert!(text.contains(from), "{from}");
        let (status, said) = check(&text.replace(from, to), &[]);
        assert!(status == Some(1) && said.contains(line), "{said}");
    }
    let options = "// options: mesh =";
    for (text, more, code) in [
        (text.replace(options, "// options: mash ="), &[][..], "syntax"),
        (format!("// gone\n{text}"), &[], "syntax"),
        (text.clone(), &["--sp"], "flag"),
    ] {
        let (status, said) = check(&text, more);
        assert!(status == Some(2) && said.contains(code), "{said}");
    }
    lab.refuses(&["opt", "mine.ir", "--check"], 2, "unknown-pass");
    assert_eq!(lab.shardc(&["opt", "mine.ir"]).status.code(), Some(2), "a pass is to be named");
}

/// What is of another phase, unknown or nothing for a pass is refused, and nothing is written.
#[test]
fn passes_refuse_what_they_do_not_take() {
    let lab = Lab::new("passes-refuse");
    let model = format!("{FIXTURES}/llama_gqa");
    let flags = ["--mesh", "dp_shard=2,tp=2", "--zero", "1", "--seq", "8"];
    lab.ok(&[&["compile", &model, "--dump-all", "dump"][..], &flags].concat());
    let refused = |args: &[&str], code: &str| {
        lab.refuses(args, 2, code);
    };
    let passes = &shardc_passes::pipeline::PASSES;
    let file = |n: usize| format!("dump/{:02}-{}.ir", n + 1, passes[n].name);
    // Every program, by every pass that takes another phase: a program says its own.
    for n in 0..passes.len() {
        for p in passes.iter().filter(|p| p.from != passes[n].to) {
            refused(&["opt", &file(n), "--pass", p.name], "phase");
        }
    }
    refused(&["opt", "dump/08-partition.ir", "--pass", "grup"], "unknown-pass");
    refused(&["opt", "dump/99-none.ir", "--pass", "group"], "file");
    let from = |args: &[&str], code: &str| {
        refused(&[&["compile", &model, "-o", "plan"][..], &flags, args].concat(), code);
    };
    from(&["--from", "group", "dump/08-partition.ir"], "phase");
    from(&["--from", "annotate", "dump/05-stages.ir"], "pass");
    from(&["--from", "split", "dump/12-ragged.ir", "--dump-after", "partition"], "unknown-pass");
    let other = ["compile", &model, "--mesh", "dp=2", "--seq", "8", "--from"];
    refused(&[&other[..], &["split", "dump/12-ragged.ir"]].concat(), "mesh");
    assert!(!lab.path("plan").exists());
    // What a text has already is not asked for again.
    let opt = ["opt", "dump/12-ragged.ir", "--pass", "split"];
    let said = lab.refuses(&[&opt[..], &["--mesh", "tp=2"]].concat(), 2, "mesh");
    assert!(
        said.contains("--> --mesh tp=2") && said.contains("give --mesh dp_shard=2,tp=2"),
        "{said}"
    );
    lab.ok(&[&opt[..], &["--mesh", "dp_shard=2,tp=2", "--zero", "1"]].concat());
    for word in ["auto", "lm_head.weight=tp,-"] {
        let said = lab.refuses(&[&opt[..], &["--shard", word]].concat(), 2, "flag");
        assert!(said.contains(&format!("--> --shard {word}")), "{said}");
    }
    let ranked = std::fs::read_to_string(lab.path("dump/08-partition.ir")).expect("a dump");
    let layout = "layout \"model.norm.weight\"";
    for (from, to, code) in [
        ("phase ranked", "phase cooked", "syntax"),
        ("phase ranked\n", "", "phase"),
        ("phase ranked", "phase step", "phase"),
        (" once 1 ", " once 9 ", "arity"),
        (" once 1 ", " once 0 ", "phase"),
        ("fan_out[tp]", "fan_in[tp]", "unknown-op"),
        ("~tp", "", "result-type"),
        (layout, "layout \"lm_head.weight\"", "phase"),
        (" model.norm:", " model.norm backward:", "phase"),
    ] {
        if !ranked.contains(from) {
            panic!("{from}\n{ranked}");
        }
        lab.write("bad.ir", ranked.replacen(from, to, 1));
        refused(&["opt", "bad.ir", "--pass", "differentiate"], code);
    }
    // A model says none of it.
    let source = std::fs::read_to_string(format!("{FIXTURES}/../cases/toy.ir")).expect("toy.ir");
    for (from, to, code) in [
        ("func ", "phase ranked\nfunc ", "source"),
        ("net1:", "net1 stage 1:", "source"),
        ("net1:", "net1 weight:", "phase"),
    ] {
        assert!(source.contains(from), "{from}\n{source}");
        lab.write("bad.ir", format!("mesh []\n{}", source.replacen(from, to, 1)));
        refused(&["compile", "bad.ir"], code);
    }
    // What verifies and is still nothing for a pass is said so, without a word of bugs.
    let staged = std::fs::read_to_string(lab.path("dump/15-ring.ir")).expect("a dump");
    lab.write("bad.ir", staged.replace("@backward(", "@backward.7("));
    let said = lab.refuses(&[&["opt", "bad.ir", "--pass", "step"][..], &flags].concat(), 2, "pass");
    assert!(!said.contains("please report"), "{said}");
    lab.ok(&[&["compile", &model, "-o", "plan"][..], &flags].concat());
    refused(&[&["compile", &model, "--dump-all", "plan"][..], &flags].concat(), "output");
}

/// What `inspect --phase` shows of a pass, the next pass takes; a text without its phase is told which to write.
#[test]
fn what_inspect_shows_of_a_pass_is_taken() {
    let lab = Lab::new("passes-inspect");
    let model = format!("{FIXTURES}/llama_gqa");
    let flags = ["--mesh", "dp=2,tp=2", "--seq", "8"];
    lab.ok(&[&["compile", &model, "--dump-all", "dump", "-o", "plan"][..], &flags].concat());
    let names: Vec<&str> = shardc_passes::pipeline::names().collect();
    for phase in ["annotate", "partition", "step"] {
        let shown = text(&lab.ok(&["inspect", "plan", "--phase", phase]).stdout);
        let place = names.iter().position(|n| *n == phase).expect("a pass") + 1;
        let dump = lab.path(&format!("dump/{place:02}-{phase}.ir"));
        let dump = std::fs::read_to_string(dump).expect("a dump");
        assert_eq!(shown, program_of(&dump), "{phase}");
    }
    let programs = "plan/programs/all.ir";
    let opt = |path: &str| lab.refuses(&["opt", path, "--pass", "propagate"], 2, "phase");
    assert!(opt(programs).contains("write `phase step`"), "{}", opt(programs));
    // A model is one function, of phase source.
    lab.ok(&["opt", "plan/model.ir", "--pass", "propagate"]);
    let said = lab.refuses(&["opt", "plan/model.ir", "--pass", "partition"], 2, "phase");
    assert!(said.contains("takes modules of phase sharded, not source"), "{said}");
    // `verify` takes any phase, also what `inspect` shows of a plan.
    let programs = text(&lab.ok(&["inspect", "plan"]).stdout);
    assert!(programs.contains("\nphase step\n"), "{programs}");
    lab.write("programs.ir", programs);
    for file in ["programs.ir", "plan/model.ir", "dump/08-partition.ir"] {
        lab.ok(&["opt", file, "--pass", "verify"]);
    }
}

/// A program that somebody has changed is not the model's any more: that is said, and is no bug.
#[test]
fn a_changed_program_is_refuted_as_changed() {
    let lab = Lab::new("passes-changed");
    let toy = std::fs::read_to_string(format!("{FIXTURES}/../../examples/toy.ir")).expect("toy.ir");
    lab.write("toy.ir", toy);
    let base = ["compile", "toy.ir", "--mesh", "dp=2"];
    lab.ok(&[&base[..], &["--dump-all", "dump"]].concat());
    let program = std::fs::read_to_string(lab.path("dump/08-partition.ir")).expect("a dump");
    assert!(program.contains("scale[0.025]"), "{program}");
    lab.write("new.ir", program.replace("scale[0.025]", "scale[0.004]"));
    let from = [&base[..], &["--from", "differentiate", "new.ir", "-o", "plan"]].concat();
    let said = lab.refuses(&from, 2, "refuted");
    assert!(said.contains("the program of new.ir does not compute this model"), "{said}");
    assert!(said.contains("--prove no") && !said.contains("a bug of shardc"), "{said}");
    assert!(said.contains("0.004") && !said.contains("mod 2^61"), "{said}");
    lab.ok(&[&from[..], &["--prove", "no"]].concat());
    // It is what its own program compiles to, and does not compute the model.
    let verified = |status: i32| {
        let out = lab.shardc(&["verify", "plan"]);
        let said = text(&out.stdout);
        assert_eq!(out.status.code(), Some(status), "{said}");
        assert!(said.contains("made with --from differentiate: from.ir"), "{said}");
        said
    };
    let said = verified(1);
    assert!(said.contains("from.ir does not compute model.ir: "), "{said}");
    // The smallest values that differ are named, by what both have there.
    let proved = lab.shardc(&["prove", "plan"]);
    for said in [said, text(&proved.stdout)] {
        let line = |head: &str| said.lines().find(|l| l.trim_start().starts_with(head));
        let [has, should] =
            ["in the plan", "should be"].map(|head| line(head).unwrap_or("nothing"));
        assert!(has.contains("scale[0.004]") && has.contains("@forward"), "{said}");
        assert!(should.contains("scale[0.025]") && should.contains("@model"), "{said}");
    }
    // Nothing else is trained where values are shown.
    let dump =
        ["run", "plan", "--steps", "1", "--batch", "b.safetensors", "--dump", "d.safetensors"];
    let said = lab.refuses(&dump, 2, "flag");
    assert!(said.contains("it was made with --from differentiate"), "{said}");
    // What is shown of it is made again from the model: that is said.
    let warns = |args: &[&str], warned: bool| {
        let said = String::from_utf8_lossy(&lab.ok(args).stderr).into_owned();
        let made = "this plan was made with --from differentiate";
        assert_eq!(said.contains(made), warned, "{args:?}: {said}");
    };
    warns(&["inspect", "plan", "--phase", "partition"], true);
    warns(&["explain", "plan", "%loss"], true);
    warns(&["inspect", "plan"], false);
    lab.ok(&[&base[..], &["-o", "plan"]].concat());
    warns(&["inspect", "plan", "--phase", "partition"], false);
    warns(&["explain", "plan", "%loss"], false);
    // A program that nobody has changed; and one that somebody changes in the plan.
    let same = ["--from", "differentiate", "dump/08-partition.ir", "-o", "plan"];
    lab.ok(&[&base[..], &same].concat());
    verified(0);
    let kept = std::fs::read_to_string(lab.path("plan/from.ir")).expect("from.ir");
    lab.write("plan/from.ir", kept.replace("scale[0.025]", "scale[0.004]"));
    lab.refuses(&["inspect", "plan"], 2, "plan");
}

/// A collective that somebody wrote stays as it is if its text says so, and what else is split is said.
#[test]
fn own_collectives_are_kept() {
    let lab = Lab::new("passes-kept");
    lab.write(
        "m.ir",
        "func @model(%w1: f32[8,16] param \"w1\", %w2: f32[16,8] param \"w2\", %x: f32[4,2,8] param \"x\", \
         %t: i32[4,2] input \"targets\") -> (f32[] sum \"loss\") {\n  \
           %h = dot[bsm,mn->bsn] %x, %w1 : f32[4,2,16]\n  \
           %a = exp %h : f32[4,2,16]\n  \
           %y = dot[bsn,nm->bsm] %a, %w2 : f32[4,2,8]\n  \
           %z = exp %y : f32[4,2,8]\n  \
           %own = take[bsm,bs->bs] %z, %t : f32[4,2]\n  \
           %loss = reduce_sum[bs->] %own : f32[]\n  \
           return %loss\n}\n",
    );
    let base = ["compile", "m.ir", "--mesh", "tp=2", "--shard", "w1=-,tp"];
    let said = text(&lab.ok(&[&base[..], &["--dump-all", "dump"]].concat()).stderr);
    assert!(said.contains("split as asked: %w1; because of that also %h, %a:"), "{said}");
    let program = std::fs::read_to_string(lab.path("dump/08-partition.ir")).expect("a dump");
    let sum = program.lines().find(|l| l.contains("%y = all_reduce[tp] ")).expect("a sum");
    let made = |keep: &str| {
        let own = format!(
            "  %piece = reduce_scatter[tp; dim=1{keep}] %y_part : f32[4,2@tp,8]\n  \
             %y = all_gather[tp; dim=1{keep}] %piece : f32[4,2,8]"
        );
        lab.write("dump/new.ir", program.replace(sum, &own));
        lab.ok(&[&base[..], &["--from", "differentiate", "dump/new.ir", "-o", "plan"]].concat());
        let counts = |op: &str, all: &str| all.matches(&format!(" = {op}[tp; dim=1")).count();
        let all = text(&lab.ok(&["inspect", "plan"]).stdout);
        ["reduce_scatter", "all_gather", "slice"].map(|op| counts(op, &all))
    };
    // Two that are one, and their mirrors, are cheaper as one.
    assert_eq!(made(""), [0, 0, 0]);
    assert_eq!(made("; keep"), [1, 2, 1]);
    let said = text(&lab.ok(&["explain", "plan", "collective:1"]).stdout);
    assert!(said.contains("reduce_scatter[tp; dim=1; keep]") && said.contains("kept: "), "{said}");
    let said = text(&lab.ok(&["verify", "plan", "--numbers"]).stdout);
    assert!(said.contains("made with --from differentiate") && !said.contains("FAILED"), "{said}");
}

/// A changed program whose terms are too large to compute is refuted all the same, by `compile` and by `prove`.
#[test]
fn a_large_changed_program_is_refuted() {
    let lab = Lab::new("passes-large");
    let model = format!("{FIXTURES}/../../examples/tiny-llama");
    let base = ["compile", &model, "--mesh", "dp=2,tp=2", "--seq", "64"];
    lab.ok(&[&base[..], &["--dump-all", "dump"]].concat());
    let program = std::fs::read_to_string(lab.path("dump/08-partition.ir")).expect("a dump");
    lab.write("same.ir", &program);
    assert!(program.contains("= silu "), "{program}");
    lab.write("new.ir", program.replace("= silu ", "= gelu "));
    let from = |file| [&base[..], &["--from", "differentiate", file, "-o", "plan"]].concat();
    let said = lab.refuses(&from("new.ir"), 2, "refuted");
    assert!(said.contains("the program of new.ir does not compute this model"), "{said}");
    assert!(!lab.path("plan").exists());
    lab.ok(&[&from("new.ir")[..], &["--prove", "no"]].concat());
    let proved = lab.shardc(&["prove", "plan"]);
    assert_eq!(proved.status.code(), Some(1));
    // Where all layers differ, it is said of which line of the first one.
    let verified = text(&lab.shardc(&["verify", "plan"]).stdout);
    for said in [said, text(&proved.stdout), verified] {
        let line = said.lines().find(|l| l.contains("that the plan makes nowhere"));
        let line = line.unwrap_or_else(|| panic!("{said}"));
        assert!(line.contains("= silu %l0.gate") && line.contains("model.layers.0.mlp"), "{line}");
    }
    lab.ok(&from("same.ir"));
    // Of a wrong update nothing is said of forward, which may have other forms of the same.
    let other = format!("{FIXTURES}/mamba2");
    let base = ["compile", &other, "--mesh", "dp=2", "--seq", "16"];
    lab.ok(&[&base[..], &["--dump-all", "steps"]].concat());
    let step = std::fs::read_to_string(lab.path("steps/16-step.ir")).expect("a dump");
    assert!(step.contains("adamw[0.9;"), "{step}");
    lab.write("update.ir", step.replace("adamw[0.9;", "adamw[0.8;"));
    let wrong = ["--from", "early-sums", "update.ir", "-o", "other"];
    let said = lab.refuses(&[&base[..], &wrong].concat(), 2, "refuted");
    assert!(!said.contains("makes nowhere"), "{said}");
}

/// Two states that change their parameters: the program verifies, and memory cannot hold what it says. It is the
/// program, and no pass, that is said to be wrong.
#[test]
fn a_program_that_cannot_be_planned_is_named() {
    let lab = Lab::new("passes-unplanned");
    let model = format!("{FIXTURES}/llama_mha");
    let base = ["compile", &model, "--mesh", "dp=2", "--microbatch", "1", "--seq", "8"];
    lab.ok(&[&base[..], &["--dump-all", "dump"]].concat());
    let program = std::fs::read_to_string(lab.path("dump/17-early-sums.ir")).expect("a dump");
    let states = ["self_attn.k_proj", "self_attn.v_proj"]
        .map(|of| format!("state[exp_avg] \"model.layers.1.{of}.weight\",\n"));
    let found = states.each_ref().map(|s| program.find(s.as_str()).expect("a state"));
    assert!(found[0] < found[1]);
    let (head, rest) = program.split_at(found[0]);
    let rest = rest.replacen(&states[1], &states[0], 1).replacen(&states[0], &states[1], 1);
    lab.write("dump/new.ir", format!("{head}{rest}"));
    let from = ["--from", "bucket-grads", "dump/new.ir", "--prove", "no"];
    let said = lab.refuses(&[&base[..], &from].concat(), 2, "pass");
    assert!(said.contains("the program that was given does not become a plan"), "{said}");
    assert!(said.contains("--> dump/new.ir") && !said.contains("panicked"), "{said}");
}
