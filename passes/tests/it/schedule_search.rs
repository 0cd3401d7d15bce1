//! The search for schedules, and the table of `docs/schedules.md`.

use std::fmt::Write;
use std::path::Path;

use shardc_ir::diag::Exit;
use shardc_ir::schedule::{Held, Times, replay};
use shardc_passes::schedule::{CutCosts, Named, Placement, make, search};

/// What a full stage holds of one microbatch; divisible by the numbers of chunks used here.
const STAGE: u64 = 840;

/// A model in which F, I and W of a full stage take about 1; `skew` makes some stages slower.
fn costs(p: usize, v: usize, skew: f64, limit: u64) -> CutCosts {
    let n = p * v;
    let time = |s: usize, k: f64| (1.0 + skew * k * (s * 7 % 5) as f64) / v as f64;
    let times = |k: f64| (0..n).map(|s| time(s, k)).collect();
    let held = Held { input: STAGE / 4 / v as u64, weight: STAGE / 4 * 3 / v as u64 };
    CutCosts {
        times: Times { forward: times(1.0), input: times(1.3), weight: times(0.4) },
        held: vec![held; n],
        limit: vec![limit; p],
    }
}

#[test]
fn search_is_never_worse_than_a_named_schedule_that_fits() {
    let (mut compared, mut better) = (0, 0);
    for (p, m) in [(1_usize, 4), (2, 3), (2, 8), (3, 7), (4, 4), (4, 16), (8, 16)] {
        for skew in [0.0, 0.07, 0.3] {
            for microbatches in [2, p.div_ceil(2), p, 2 * p, 1000] {
                let limit = STAGE * microbatches as u64;
                let found = search(p, &[1, 2, 4], m, &|_, v| costs(p, v, skew, limit));
                let found = found.unwrap_or_else(|d| panic!("p={p} m={m} {limit}: {d}"));
                let c = costs(p, found.chunks, skew, limit);
                let t = replay(&found.schedule, &c.times).expect("runs");
                let peak = (0..p).map(|r| t.held(r, &|s| c.held[s])).max().expect("a rank");
                assert_eq!((t.makespan(), peak), (found.makespan, found.peak));
                assert!(peak <= limit, "p={p} m={m} skew={skew}: {peak} > {limit}");
                assert_eq!(found.schedule.owner, found.placement.owner(p, found.chunks));
                let mut best = f64::INFINITY;
                for n in Named::ALL {
                    for v in [1, 2, 4] {
                        let Ok(s) = make(n, p, v, m) else { continue };
                        let c = costs(p, v, skew, limit);
                        let t = replay(&s, &c.times).expect("runs");
                        if (0..p).all(|r| t.held(r, &|s| c.held[s]) <= limit) {
                            compared += 1;
                            best = best.min(t.makespan());
                        }
                    }
                }
                assert!(found.makespan <= best, "p={p} m={m} skew={skew} limit={limit}");
                better += usize::from(found.named.is_none());
                let again = search(p, &[1, 2, 4], m, &|_, v| costs(p, v, skew, limit));
                assert_eq!(again, Ok(found));
            }
        }
    }
    // It compares with something, and is better now and then.
    assert!(compared > 500 && better > 20, "{compared} {better}");
}

#[test]
fn search_keeps_to_the_memory_of_each_rank() {
    let limit = |r: usize| STAGE * (4 - r as u64);
    let uneven =
        |_: Placement, v| CutCosts { limit: (0..4).map(limit).collect(), ..costs(4, v, 0.0, 0) };
    let found = search(4, &[1, 2], 8, &uneven).expect("1f1b fits");
    let c = uneven(found.placement, found.chunks);
    let t = replay(&found.schedule, &c.times).expect("runs");
    assert!((0..4).all(|r| t.held(r, &|s| c.held[s]) <= limit(r)));
    assert!(found.makespan <= 33.0, "1f1b fits and takes 33, not {}", found.makespan);
}

#[test]
fn search_says_what_is_lacking() {
    let d = search(4, &[1, 2], 8, &|_, v| costs(4, v, 0.0, STAGE - 1)).expect_err("no room");
    assert_eq!((d.code, d.exit), ("schedule-memory", Exit::Infeasible));
    let text = d.render();
    for t in ["p=4, m=8", "takes 840 B", "which has 839", "= rule: ", "= help: v=1: give rank"] {
        assert!(text.contains(t), "{t} in {text}");
    }
    let d = search(4, &[], 8, &|_, v| costs(4, v, 0.0, 0)).expect_err("no chunks");
    assert!(d.rule.as_ref().is_some_and(|r| r.starts_with("v >= 1")), "{d}");
    let d = search(1, &[2], 8, &|_, v| costs(1, v, 0.0, 0)).expect_err("chunks on one rank");
    assert!(d.rule.as_ref().is_some_and(|r| r.starts_with("v == 1 where p == 1")), "{d}");
    let d = search(4, &[1], 8, &|_, v| costs(4, v, f64::NAN, 0)).expect_err("no times");
    assert_eq!(d.code, "schedule", "{d}");
}

/// One table for p ranks, figures in times and memory of a full stage.
fn table(p: usize) -> String {
    let all = [4, 8, 16];
    let mut text = format!("### p = {p}\n\n| schedule | v |");
    all.iter().for_each(|m| write!(text, " m = {m} |").expect("text"));
    text += "\n|-|-|-|-|-|\n";
    for n in Named::ALL.into_iter().filter(|&n| n != Named::Naive) {
        let v = n.default_chunks();
        write!(text, "| {} | {v} |", n.name()).expect("text");
        for m in all {
            let cell = make(n, p, v, m).map_or("–".to_string(), |s| {
                let unit = costs(p, v, 0.0, u64::MAX);
                let t = replay(&s, &unit.times).expect("runs");
                let live = (0..p).map(|r| t.live(r)).max().expect("a rank");
                cell(t.makespan(), t.longest_span(), live as f64 / v as f64)
            });
            write!(text, " {cell} |").expect("text");
        }
        text.push('\n');
    }
    let limits = [
        ("any memory", u64::MAX),
        ("memory of 1F1B", p as u64),
        ("memory of v-half, (p + 2)/2", 0),
    ];
    for (name, microbatches) in limits {
        let limit = match microbatches {
            0 => STAGE * (p as u64 + 2) / 2,
            n => STAGE.saturating_mul(n),
        };
        write!(text, "| search, {name} | 1, 2 |").expect("text");
        for m in all {
            let unit = |_: Placement, v: usize| CutCosts {
                // Nothing is freed before the end of W, as in the other lines.
                held: vec![Held { input: 0, weight: STAGE / v as u64 }; p * v],
                ..costs(p, v, 0.0, limit)
            };
            let f = search(p, &[1, 2], m, &unit).expect("something fits");
            let t = replay(&f.schedule, &unit(f.placement, f.chunks).times).expect("runs");
            let live = f.peak as f64 / STAGE as f64;
            write!(text, " {} |", cell(f.makespan, t.longest_span(), live)).expect("text");
        }
        text.push('\n');
    }
    text
}

fn cell(makespan: f64, span: f64, live: f64) -> String {
    format!("{makespan} / {span} / {live}")
}

/// `UPDATE_DOCS=1 cargo test --workspace --test it -- schedule_search` writes the table anew.
#[test]
fn the_table_of_the_documentation_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schedules.md");
    let text = std::fs::read_to_string(&path).expect("docs/schedules.md");
    let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->");
    let (head, rest) = text.split_once(begin).expect("the begin of the table");
    let (was, tail) = rest.split_once(end).expect("the end of the table");
    let tables: Vec<String> = [2, 4, 8].into_iter().map(table).collect();
    let now = format!("\n{}\n", tables.join("\n"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{begin}{now}{end}{tail}")).expect("writable");
    } else {
        assert_eq!(was, now, "run with UPDATE_DOCS=1 to write docs/schedules.md anew");
    }
    for n in Named::ALL {
        assert!(head.contains(&format!("\n### {}\n", n.name())), "{} is described", n.name());
    }
}
