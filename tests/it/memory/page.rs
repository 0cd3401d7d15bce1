//! The tables of `docs/memory.md`, and how what a layer saves follows from the published formula.

use super::held::held;
use super::live::excess;
use super::saved::{BlockKind, Entry, Over, layer, saved};
use super::*;
use shardc_testing::taken;
use std::fmt::Write;

/// Bytes of a layer: coefficients of sbh (for what tensor parallelism leaves whole, and for what it
/// splits), as²b, abs and sb.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Terms {
    whole: i64,
    split: i64,
    scores: i64,
    heads: i64,
    rows: i64,
}

/// A change from the published formula to ours.
struct Step {
    why: &'static str,
    by: Terms,
}

/// Sizes of the 22B model of the paper, table 3.
const SEQUENCE: usize = 2048;
const HIDDEN: usize = 6144;
const HEADS: usize = 64;
const ROWS: usize = 4;

impl Terms {
    fn plus(self, o: Terms) -> Terms {
        Terms {
            whole: self.whole + o.whole,
            split: self.split + o.split,
            scores: self.scores + o.scores,
            heads: self.heads + o.heads,
            rows: self.rows + o.rows,
        }
    }

    fn bytes(self, t: usize, sp: bool) -> i64 {
        let (s, b, h, a) = (SEQUENCE as i64, ROWS as i64, HIDDEN as i64, HEADS as i64);
        let (t, along) = (t as i64, if sp { t as i64 } else { 1 });
        let sequence = self.whole * s * b * h + self.rows * s * b;
        let width = self.split * s * b * h + self.scores * a * s * s * b + self.heads * a * b * s;
        sequence / along + width / t
    }

    /// As a formula, `+` before every term.
    fn text(self) -> String {
        let parts = [
            (self.whole, "sbh"),
            (self.split, "sbh/t"),
            (self.scores, "as²b/t"),
            (self.heads, "abs/t"),
            (self.rows, "sb"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|p| p.0 != 0).map(|(n, what)| format!("{n:+} {what}")).collect();
        parts.join(" ").replace('-', "−")
    }
}

/// sbh(10 + 24/t + 5as/(ht)): Korthikanti et al., 2022, equation 2.
const PUBLISHED: Terms = Terms { whole: 10, split: 24, scores: 5, heads: 0, rows: 0 };

/// What differs, for `--recompute none`.
fn steps() -> Vec<Step> {
    let z = Terms::default();
    vec![
        // Two inputs of norms and two of products; q, k, v, o's operand, and 4h and 4h of the MLP;
        // the softmax and what dropout makes of it.
        Step {
            why: "activations are f32, not of 16 bits",
            by: Terms { whole: 8, split: 24, scores: 4, ..z },
        },
        Step {
            why: "no dropout: two masks of bytes after the halves of a layer, one of the scores",
            by: Terms { whole: -2, scores: -1, ..z },
        },
        Step { why: "no dropout: its result is the softmax itself", by: Terms { scores: -4, ..z } },
        Step { why: "attention recomputes the softmax", by: Terms { scores: -4, ..z } },
        Step { why: "and keeps its log-sum-exp for it", by: Terms { heads: 4, ..z } },
        Step {
            why: "a norm is made of primitives: two keep x·rstd beside x − mean",
            by: Terms { whole: 8, ..z },
        },
        Step { why: "and rstd, which the paper leaves out", by: Terms { rows: 8, ..z } },
    ]
}

/// What differs from `none`, for `--recompute elementwise`.
fn elementwise() -> Vec<Step> {
    let z = Terms::default();
    vec![
        Step {
            why: "x·rstd and results of the norms are recomputed, from x − mean and rstd",
            by: Terms { whole: -16, ..z },
        },
        Step { why: "gelu is recomputed", by: Terms { split: -16, ..z } },
    ]
}

/// What differs from that, for `--recompute selective`.
fn selective() -> Vec<Step> {
    let z = Terms::default();
    vec![Step { why: "rstd too, from x in place of x − mean", by: Terms { rows: -8, ..z } }]
}

/// What differs from `selective`, for `--recompute full`: all but what enters the layer.
fn full() -> Vec<Step> {
    let z = Terms::default();
    vec![Step {
        why: "all but what enters the layer",
        by: Terms { whole: -4, split: -32, heads: -4, ..z },
    }]
}

fn sum(from: Terms, steps: &[Step]) -> Terms {
    steps.iter().fold(from, |all, s| all.plus(s.by))
}

/// The model of the paper with two layers: they are all alike.
fn gpt() -> serde_json::Value {
    serde_json::json!({
        "model_type": "gpt2", "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2, "vocab_size": 51200,
        "n_positions": SEQUENCE, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    })
}

/// Bytes that a layer of that model saves, by the plan.
fn planned_bytes(t: usize, sp: bool, r: Recompute) -> i64 {
    let mut o = asked(&[("tp", t)], sp, SEQUENCE, 1, r);
    (o.microbatch, o.global_batch) = (ROWS, ROWS);
    let (layers, _) = saved(&planned(&gpt(), &o).1);
    let bytes: Vec<usize> = layers.values().map(|l| l.iter().sum()).collect();
    assert_eq!(bytes[0], bytes[1], "layers are alike");
    bytes[0] as i64
}

/// Ways of tensor parallelism, and whether with `--sp`.
const LAYOUTS: [(usize, bool); 3] = [(1, false), (8, false), (8, true)];

#[test]
fn the_published_formula_leads_to_what_a_layer_saves() {
    // The paper's three formulas are one: 34 = 10 + 24.
    let score = 5 * (HEADS * SEQUENCE) as i64;
    let sbh = (SEQUENCE * ROWS * HIDDEN) as i64;
    let h = HIDDEN as i64;
    assert_eq!(PUBLISHED.bytes(1, false), sbh * 34 + sbh / h * score);
    assert_eq!(PUBLISHED.bytes(8, false), sbh * 10 + sbh * 24 / 8 + sbh / h * score / 8);
    assert_eq!(PUBLISHED.bytes(8, true), (sbh * 34 + sbh / h * score) / 8);
    let none = sum(PUBLISHED, &steps());
    let each = sum(none, &elementwise());
    let some = sum(each, &selective());
    let least = sum(some, &full());
    for (t, sp) in LAYOUTS {
        let all = [
            (none, Recompute::None),
            (each, Recompute::Elementwise),
            (some, Recompute::Selective),
            (least, Recompute::Full),
        ];
        for (terms, r) in all {
            let what = format!("tp={t} sp={sp} {r:?}: {}", terms.text());
            assert_eq!(terms.bytes(t, sp) - planned_bytes(t, sp, r), 0, "{what}");
        }
    }
}

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

fn reconciliation() -> String {
    let mut text =
        String::from("| | bytes per layer | t = 1 | t = 8 | t = 8, `--sp` |\n|-|-|-:|-:|-:|\n");
    let mut line = |why: &str, terms: Terms, bold: bool| {
        let mark = if bold { "**" } else { "" };
        write!(text, "| {mark}{why}{mark} | {} |", terms.text()).expect("text");
        for (t, sp) in LAYOUTS {
            write!(text, " {mark}{}{mark} |", terms.bytes(t, sp)).expect("text");
        }
        text.push('\n');
    };
    line("the paper", PUBLISHED, true);
    let mut now = PUBLISHED;
    let policies = [
        ("none", steps()),
        ("elementwise", elementwise()),
        ("selective", selective()),
        ("full", full()),
    ];
    for (name, steps) in policies {
        steps.iter().for_each(|s| line(s.why, s.by, false));
        now = sum(now, &steps);
        line(&format!("`--recompute {name}`"), now, true);
    }
    text
}

/// What a layer of each kind saves, entry by entry.
fn per_op() -> String {
    let facts = planned(&llama("8b"), &asked(&[], false, 8, 1, Recompute::Full)).0;
    let mut text = String::new();
    for (title, k) in [("Llama", BlockKind::LLAMA), ("GPT-2", BlockKind::GPT2)] {
        writeln!(text, "\n{title}:\n").expect("text");
        text +=
            "| saved | read by the gradient of | elements per token | split over |\n|-|-|-|-|\n";
        for e in layer(k, &facts, &Recompute::None) {
            let over = match e.over {
                Over::Sequence => "sequence, with `--sp`",
                Over::Width => "t",
                Over::KvHeads => "min(t, g)",
                Over::Whole => unreachable!("not in layers"),
            };
            let Entry { what, reader, letters, .. } = e;
            writeln!(text, "| {what} | {reader} | {letters} | {over} |").expect("text");
        }
    }
    text.push('\n');
    text
}

/// MiB per layer of Llama-3.1-8B with 4096 tokens.
fn layers_of_8b() -> String {
    let mut text =
        String::from("| `--recompute` | t = 1 | t = 8 | t = 8, `--sp` |\n|-|-:|-:|-:|\n");
    for r in [Recompute::None, Recompute::Elementwise, Recompute::Selective, Recompute::Full] {
        write!(text, "| {r} |").expect("text");
        for (t, sp) in LAYOUTS {
            let (_, plan) = planned(&llama("8b"), &asked(&[("tp", t)], sp, 4096, 1, r.clone()));
            let bytes: usize = saved(&plan).0[&1].iter().sum();
            write!(text, " {:.2} |", bytes as f64 / MIB).expect("text");
        }
        text.push('\n');
    }
    text
}

/// Microbatches held by each rank, in full stages.
fn in_flight() -> String {
    let (p, m) = (4, 8);
    let mut text = String::from("| schedule | rank 0 | 1 | 2 | 3 |\n|-|-:|-:|-:|-:|\n");
    for n in Named::ALL.into_iter().filter(|&n| n != Named::Naive) {
        let o = scheduled(asked(&[("pp", p)], false, SEQ, m, Recompute::None), n);
        let (_, plan) = planned(&fixture_config("llama_deep"), &o);
        write!(text, "| {} |", n.name()).expect("text");
        for class in &plan.classes {
            let held = held(&plan, class).chunks as f64 / n.default_chunks() as f64;
            write!(text, " {held} |").expect("text");
        }
        text.push('\n');
    }
    text
}

/// A line that only the long run makes.
const LATER: &str = "later\n";

fn update() -> bool {
    std::env::var_os("UPDATE_DOCS").is_some()
}

/// The lines of a table that were made now are those of the page.
fn same(was: &str, now: &str) {
    assert_eq!(was.lines().count(), now.lines().count(), "lines of a table of docs/memory.md");
    let made = was.lines().zip(now.lines()).filter(|(_, now)| *now != LATER.trim_end());
    for (was, now) in made {
        assert_eq!(was, now, "run with UPDATE_DOCS=1 to write docs/memory.md anew");
    }
}

/// Arenas of published models, and what is alive in them at once.
fn arenas() -> String {
    use Named::*;
    let mut text = String::from(
        "| Llama-3.1 | mesh | schedule | `--recompute` | m | largest arena, GiB | most above what \
         lives |\n|-|-|-|-|-:|-:|-:|\n",
    );
    type Row<'a> = (&'a str, &'a [(&'a str, usize)], Named, Recompute, usize);
    let rows: [Row; 12] = [
        ("8b", &[("dp_replicate", 8), ("tp", 8)], OneFOneB, Recompute::None, 4),
        ("8b", &[("pp", 4), ("tp", 8)], OneFOneB, Recompute::None, 16),
        ("8b", &[("pp", 4), ("tp", 8)], Interleaved, Recompute::None, 16),
        ("8b", &[("pp", 4), ("tp", 8)], ZbH1, Recompute::None, 16),
        ("8b", &[("pp", 4), ("tp", 8)], VHalf, Recompute::None, 16),
        ("8b", &[("pp", 4), ("tp", 8)], DualPipeV, Recompute::None, 16),
        ("70b", &[("pp", 8), ("tp", 8)], OneFOneB, Recompute::Selective, 16),
        ("70b", &[("pp", 8), ("tp", 8)], Gpipe, Recompute::Full, 16),
        ("70b", &[("pp", 8), ("tp", 8)], ZbH1, Recompute::Selective, 16),
        ("70b", &[("pp", 8), ("tp", 8)], ZbV, Recompute::Selective, 16),
        ("405b", &[("pp", 16), ("tp", 8)], OneFOneB, Recompute::Selective, 32),
        ("405b", &[("pp", 16), ("tp", 8)], ZbV, Recompute::Full, 32),
    ];
    for (i, (size, mesh, n, r, m)) in rows.into_iter().enumerate() {
        if !(update() || taken(i, 3)) {
            text += LATER;
            continue;
        }
        let o = scheduled(asked(mesh, true, 4096, m, r.clone()), n);
        let (_, plan) = planned(&llama(size), &o);
        let axes: Vec<String> = mesh.iter().map(|a| format!("{}={}", a.0, a.1)).collect();
        let (axes, r) = (axes.join(","), format!("{r:?}").to_lowercase());
        let (name, peak) = (n.name(), plan.peak_bytes() as f64 / GIB);
        let above = excess(size, &plan);
        writeln!(text, "| {size} | {axes} | {name} | {r} | {m} | {peak:.2} | {above:.2} % |")
            .expect("text");
    }
    text
}

/// `UPDATE_DOCS=1 cargo test --workspace --test it -- memory` writes the tables anew.
#[test]
fn the_tables_of_the_documentation_are_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.md");
    let mut page = std::fs::read_to_string(&path).expect("docs/memory.md");
    for (name, now) in [
        ("arenas", arenas()),
        ("saved", per_op()),
        ("layers", layers_of_8b()),
        ("formula", reconciliation()),
        ("in flight", in_flight()),
    ] {
        let (begin, end) = (format!("<!-- generated: {name} -->\n"), "<!-- generated: end -->");
        let (head, rest) = page.split_once(&begin).expect("the begin of a table");
        let (was, tail) = rest.split_once(end).expect("the end of a table");
        if update() {
            page = format!("{head}{begin}{now}{end}{tail}");
        } else {
            same(was, &now);
        }
    }
    if update() {
        std::fs::write(&path, page).expect("writable");
    }
}
