//! What the text of a model asks of shardings, and what is said of it.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;

fn toy() -> String {
    std::fs::read_to_string(format!("{FIXTURES}/../../examples/toy.ir")).expect("toy.ir")
}

fn stderr(lab: &Lab, args: &[&str]) -> String {
    String::from_utf8_lossy(&lab.ok(args).stderr).into_owned()
}

/// The first parameter with an annotation.
fn asks(asked: &str) -> String {
    let toy = toy();
    let line = "param \"net1.weight\" [normal=0.2]";
    assert!(toy.contains(line), "{toy}");
    toy.replace(line, &format!("{line} {asked}"))
}

/// A text without a mesh is for that of `--mesh`; its plan compiles again.
#[test]
fn annotations_take_the_mesh_of_the_flags() {
    let lab = Lab::new("asked-mesh");
    lab.write("a.ir", asks("@(tp,-)"));
    lab.ok(&["compile", "a.ir", "--mesh", "tp=2", "-o", "plan"]);
    let source = std::fs::read_to_string(lab.path("plan/model.ir")).expect("model.ir");
    assert!(source.contains("mesh [tp=2]") && source.contains("@(tp,-)"), "{source}");
    lab.ok(&["verify", "plan"]);
    lab.ok(&["opt", "a.ir", "--pass", "annotate", "--mesh", "tp=2"]);
    // As for `--shard`, `dp` is the data-parallel axes.
    lab.write("b.ir", asks("@(-,dp)"));
    lab.ok(&["compile", "b.ir", "--mesh", "dp=2", "-o", "plan"]);
    let said = lab.refuses(&["compile", "a.ir", "--mesh", "dp=2"], 2, "unknown-axis");
    assert!(said.contains("--> a.ir:3:") && said.contains("no axis `tp`"), "{said}");
}

/// What is wrong with a text is said with its file, line and column; in JSON, as fields.
#[test]
fn errors_of_texts_name_the_line() {
    let lab = Lab::new("asked-line");
    lab.write(
        "a.ir",
        toy().replace("%d = sub %out, %y : f32[8,5]", "%d = sub %out, %y : f32[8,6]"),
    );
    let said = lab.refuses(&["compile", "a.ir"], 2, "result-type");
    let number = 1 + toy().lines().position(|l| l.contains("%d = sub")).expect("a line");
    assert!(said.contains(&format!("--> a.ir:{number}:3, @model, loss")), "{said}");
    let out = lab.shardc(&["compile", "a.ir", "--format", "json"]);
    let line = String::from_utf8_lossy(&out.stderr).into_owned();
    let json: Json = serde_json::from_str(line.lines().last().unwrap_or("")).expect("JSON");
    assert_eq!((&json["file"], &json["line"]), (&"a.ir".into(), &number.into()), "{json}");
    assert_eq!(json["column"], 3, "{json}");
    lab.write("twice.ir", asks("@(tp,tp)"));
    let said = lab.refuses(&["compile", "twice.ir", "--mesh", "tp=2"], 2, "mixed");
    assert!(said.contains("an axis splits two dims of one tensor"), "{said}");
    assert!(said.contains("--> twice.ir:3:3"), "{said}");
    let sum = toy().replace("f32[] sum \"loss\"", "f32[8,5] sum \"loss\"");
    lab.write(
        "sum.ir",
        sum.replace("return %loss,", "return %squares_of,")
            .replace("  %squares = dot", "  %squares_of = mul %d, %d : f32[8,5]\n  %squares = dot"),
    );
    let said = lab.refuses(&["compile", "sum.ir"], 2, "source");
    assert!(said.contains("sum \"loss\" is f32[8,5], it must be f32[]"), "{said}");
}

/// What changes nothing in a text, and what something else takes the place of, is warned of.
#[test]
fn what_has_no_effect_is_warned_of() {
    let lab = Lab::new("asked-effect");
    lab.write("a.ir", toy());
    assert!(!stderr(&lab, &["compile", "a.ir"]).contains("warning"));
    let more = "  %unused: f32[10] param \"unused\",\n  %x: f32[8,10]";
    let named = toy().replace("  %x: f32[8,10]", more).replace("input \"y\"", "input \"target\"");
    lab.write("b.ir", named);
    let said = stderr(&lab, &["compile", "b.ir"]);
    assert!(said.contains("`%unused` has no effect: no result depends on it"), "{said}");
    assert!(said.contains("did you mean \"targets\""), "{said}");
    let base = ["compile", "a.ir", "--mesh", "tp=2", "--shard", "net1.weight=-,tp", "--shard"];
    let said = stderr(&lab, &[&base[..], &["net1.weight=tp,-"]].concat());
    assert!(said.contains("--shard 'net1.weight=-,tp' has no effect on %net1"), "{said}");
    assert!(said.contains("--shard 'net1.weight=tp,-', which takes its place"), "{said}");
    let said = stderr(&lab, &[&base[..], &["net1.weight=-,tp"]].concat());
    assert!(!said.contains("takes its place"), "{said}");
    lab.write("c.ir", asks("@(-,tp)"));
    let said = stderr(&lab, &["compile", "c.ir", "--mesh", "tp=2", "--shard", "net1.weight=tp,-"]);
    assert!(said.contains("`@(-,tp)` in the text has no effect on %net1"), "{said}");
}

/// Without stages the order of several microbatches has an effect: with all forwards first, more is in memory.
#[test]
fn orders_of_microbatches_have_an_effect_on_one_stage() {
    let lab = Lab::new("asked-order");
    let model = format!("{FIXTURES}/llama_mha");
    let compile = |batch: &str, schedule: &str| {
        let args = ["compile", &model, "--seq", "16", "--microbatch", "1", "--global-batch", batch];
        let said = stderr(&lab, &[&args[..], &["--schedule", schedule, "-o", schedule]].concat());
        let file = lab.path(&format!("{schedule}/schedule.csv"));
        (said.contains("no-effect"), std::fs::read_to_string(file).expect("a schedule"))
    };
    let (warned, in_turn) = compile("4", "1f1b");
    assert!(warned);
    assert_eq!(compile("4", "zb-h1"), (true, in_turn.clone()));
    let (warned, gpipe) = compile("4", "gpipe");
    assert!(!warned && gpipe != in_turn);
    let (warned, one) = compile("1", "gpipe");
    assert!(warned);
    assert_eq!(compile("1", "1f1b").1, one);
}
