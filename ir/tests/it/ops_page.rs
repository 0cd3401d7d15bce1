//! `docs/ops.md` lists every op, and `docs/types.md` those that are linear; both are made from the table of ops. `SHARDC_BLESS=1` writes them again.

use shardc_ir::attr::AttrCx;
use shardc_ir::infer::Linear;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{DOCS, Gradient, Kind, Op, SAMPLES};
use shardc_ir::samples::Sample;
use shardc_ir::text::type_text;
use shardc_ir::types::Reduction;
use std::fmt::Write as _;

/// Attributes of the ops that have no samples, because they need a mesh: here pp=2, tp=2.
const LAYOUTS: [(&str, &str); 16] = [
    ("fan_out", "tp"),
    ("all_reduce", "tp"),
    ("all_gather", "tp; dim=1"),
    ("reduce_scatter", "tp; dim=1"),
    ("broadcast", "tp; dim=1; from=0"),
    ("reduce", "tp; dim=1; to=0"),
    ("slice", "tp; dim=1"),
    ("pad_to_partial", "tp; dim=1"),
    ("all_to_all", "tp; from=1; to=2"),
    ("exchange", "tp"),
    ("all_to_all_v", "tp; from=1; to=0; copies=48"),
    ("permute", "tp; shift=1"),
    ("to_partial", "pp"),
    ("to_varying", "tp; dim=1"),
    ("from_varying", "tp; dim=1"),
    ("ring_shard", "tp; dim=0; shift=1"),
];

/// The section of the page that an op belongs to.
fn section(name: &str, kind: Kind) -> &'static str {
    match kind {
        // To the passes merging two results is element-wise.
        Kind::Elementwise if name == "merge_attention" => "Attention",
        Kind::Elementwise | Kind::Activation | Kind::Conversion => "Element-wise ops",
        Kind::Constant => "Constants and random numbers",
        Kind::Reduction | Kind::Product => "Reductions and products",
        Kind::Movement => "Reshaping",
        Kind::Lookup | Kind::Scatter | Kind::Choice => "Indexing",
        Kind::Attention => "Attention",
        Kind::Recurrence => "Recurrences",
        Kind::Copies | Kind::GroupedProduct => "Mixtures of experts",
        Kind::Update => "Optimizer steps",
        Kind::Layout => "Layout changes and collectives",
    }
}

const SECTIONS: [&str; 10] = [
    "Element-wise ops",
    "Reductions and products",
    "Reshaping",
    "Indexing",
    "Attention",
    "Recurrences",
    "Mixtures of experts",
    "Constants and random numbers",
    "Optimizer steps",
    "Layout changes and collectives",
];

/// An op of this name, and uses of it.
fn uses(name: &str, samples: &'static [&'static str]) -> (Op, Vec<String>) {
    let none = Mesh::default();
    if let Some((_, attrs)) = LAYOUTS.iter().find(|l| l.0 == name) {
        let mesh = Mesh::new(&[("pp", 2), ("tp", 2)]).expect("a mesh");
        let op = Op::read(name, Some(attrs), AttrCx { mesh: &mesh, ranks: &[3] });
        let op = op.unwrap_or_else(|e| panic!("{name}[{attrs}]: {e}"));
        let mut text = String::new();
        op.write(&mesh, &mut text);
        return (op, vec![text]);
    }
    let parsed: Vec<Sample> =
        samples.iter().map(|s| Sample::parse(s).unwrap_or_else(|e| panic!("{s}: {e}"))).collect();
    let shown = parsed.iter().take(3).map(|s| {
        let types: Vec<String> = s.types().iter().map(|t| type_text(&none, t)).collect();
        format!("{} -> {}", s.text.split(" -> ").next().unwrap_or(s.text), types.join(", "))
    });
    let shown = shown.collect();
    let first = parsed.into_iter().next();
    (first.unwrap_or_else(|| panic!("`{name}` has no sample: add it to LAYOUTS")).op, shown)
}

/// The part of the page that is made from the table.
fn listed() -> String {
    let mut text = String::new();
    let all: Vec<(&str, &str, Op, Vec<String>)> = DOCS
        .iter()
        .zip(SAMPLES)
        .map(|((name, doc), (_, samples))| {
            let (op, shown) = uses(name, samples);
            (*name, *doc, op, shown)
        })
        .collect();
    for s in SECTIONS {
        writeln!(text, "\n## {s}").expect("text");
        for (name, doc, op, shown) in all.iter().filter(|o| section(o.0, o.2.facts().kind) == s) {
            let operands = op.operands().join(", ");
            let doc = doc.split_whitespace().collect::<Vec<_>>().join(" ");
            let gradient = match op.facts().gradient {
                Gradient::Flows => "",
                Gradient::Stops => " No gradient.",
                Gradient::Unasked => " Not differentiated.",
            };
            writeln!(text, "\n### {name}\n").expect("text");
            let operands = if operands.is_empty() { "none".into() } else { operands };
            writeln!(text, "Operands: {operands}.{gradient}\n\n{doc}\n").expect("text");
            writeln!(text, "```text\n{}\n```", shown.join("\n")).expect("text");
        }
    }
    text + "\n"
}

/// In which operands ops are linear, by how: together, each, or neither.
fn linear() -> String {
    let mut ways: [Vec<String>; 2] = Default::default();
    for ((name, _), (_, samples)) in DOCS.iter().zip(SAMPLES) {
        let all: Vec<Op> = samples
            .iter()
            .map(|s| Sample::parse(s).unwrap_or_else(|e| panic!("{s}: {e}")).op)
            .collect();
        let Some(op) = all.first().filter(|op| op.layout().is_none()) else { continue };
        let how = op.def().linear();
        assert!(
            all.iter().all(|o| o.def().linear() == how),
            "`{name}` is linear as its attributes say"
        );
        let (way, mask) = match how {
            Linear::No => continue,
            Linear::Together(mask) => (0, mask),
            Linear::Each(mask) => (1, mask),
        };
        let operands = op.operands().iter().enumerate();
        let own: Vec<&str> = operands.filter(|(i, _)| mask >> i & 1 == 1).map(|x| *x.1).collect();
        let whole = mask == !0 || own.len() == op.operands().len();
        let of = if whole { String::new() } else { format!(" in {}", own.join(" and ")) };
        let of_max = match op.def().reduction() {
            Reduction::Sum => "",
            Reduction::Max => " (P(max))",
            Reduction::Min => " (P(min))",
        };
        ways[way].push(format!("`{name}`{of}{of_max}"));
    }
    let [together, each] = ways.map(|w| w.join(", "));
    format!(
        "\n- **together** (these operands are all P, or there is one): {together}.\n\
         - **each** (one of these operands is P, all others R): {each}.\n\n"
    )
}

#[test]
fn the_page_of_ops_is_current() {
    current("docs/ops.md", &listed());
}

#[test]
fn the_list_of_linear_ops_is_current() {
    current("docs/types.md", &linear());
}

fn current(page: &str, now: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let page = std::fs::read_to_string(&path).expect("a page");
    let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->");
    let (head, rest) = page.split_once(begin).expect("the begin of the list");
    let (was, tail) = rest.split_once(end).expect("the end of the list");
    if std::env::var_os("SHARDC_BLESS").is_some() {
        std::fs::write(&path, format!("{head}{begin}{now}{end}{tail}")).expect("writable");
    } else {
        assert_eq!(was, now, "SHARDC_BLESS=1 cargo test -p shardc-ir --test it ops_page");
    }
}
