use super::span;
use crate::pictures::sample::{self, slot};
use shardc_ir::schedule::{ActionKind, Slot, Timeline};

/// Of all ranks.
fn text(t: &Timeline, chunks: usize, colour: bool) -> String {
    super::text(t, chunks, colour, None)
}

/// Escapes take no columns.
fn plain(s: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in s.chars() {
        match c {
            '\x1b' => inside = true,
            'm' if inside => inside = false,
            c if !inside => out.push(c),
            _ => {}
        }
    }
    out
}

fn all() -> Vec<(Timeline, usize)> {
    vec![
        (sample::one_f_one_b(4, 8), 1),
        (sample::gpipe(4, 8), 1),
        (sample::gpipe(16, 64), 1),
        (sample::one_f_one_b(16, 64), 1),
        (sample::one_f_one_b(1, 3), 1),
        (sample::interleaved(4, 8, 2), 2),
        (sample::interleaved(4, 8, 3), 3),
        (sample::interleaved(16, 64, 2), 2),
        (sample::zero_bubble(4, 8), 1),
        (sample::zero_bubble(16, 64), 1),
        (sample::timed(4, 12, |k| if k == ActionKind::Forward { 0.731 } else { 1.617 }), 1),
        (sample::timed(4, 12, |k| if k == ActionKind::Forward { 1e-9 } else { 3e11 }), 1),
        (sample::timed(2, 300, |_| 0.0), 1),
    ]
}

#[test]
fn no_line_is_longer_than_80_columns() {
    for (t, chunks) in all() {
        for colour in [false, true] {
            let s = text(&t, chunks, colour);
            let widest = plain(&s).lines().map(|l| l.chars().count()).max();
            assert!(widest <= Some(80), "{widest:?} columns\n{s}");
            assert_eq!(s.contains('\x1b'), colour && span(&t).1 > 0.0);
        }
    }
}

#[test]
fn colours_change_no_text() {
    for (t, chunks) in all() {
        assert_eq!(plain(&text(&t, chunks, true)), text(&t, chunks, false));
    }
}

/// The cells of a rank, over all panels.
fn row(s: &str, rank: usize) -> String {
    let head = format!("pp {rank} ");
    s.lines().filter_map(|l| l.strip_prefix(&head)).map(str::trim_start).collect()
}

#[test]
fn every_action_is_there_once_and_in_order() {
    for (t, chunks) in all() {
        let s = text(&t, chunks, false);
        if s.contains('…') || s.contains("too short") {
            continue;
        }
        for (rank, slots) in t.ranks.iter().enumerate() {
            let line = row(&s, rank);
            // A cell cut by the end of a panel may have no blank after it.
            let apart = |c: char| if c.is_alphabetic() { format!(" {c}") } else { c.into() };
            let cells = if chunks == 3 { line } else { line.chars().map(apart).collect() };
            let shown: Vec<&str> =
                cells.split([' ', '─', '·']).filter(|cell| !cell.is_empty()).collect();
            let per_rank = t.ranks.len();
            let want: Vec<String> = slots
                .iter()
                .map(|s| match (chunks, s.action.stage / per_rank) {
                    (3, _) => s.action.to_string(),
                    (_, 1) => {
                        format!("{}{}", s.action.kind.letter(), s.action.microbatch).to_lowercase()
                    }
                    _ => format!("{}{}", s.action.kind.letter(), s.action.microbatch),
                })
                .collect();
            assert_eq!(shown, want, "{s}");
        }
    }
}

#[test]
fn cells_are_as_long_as_their_actions() {
    let s = text(&sample::one_f_one_b(4, 8), 1, false);
    assert!(row(&s, 0).starts_with("F0 F1 F2 F3 ··················B0─── F4 B1─── F5 "), "{s}");
    assert!(row(&s, 3).starts_with("·········F0 B0─── F1 B1─── "), "{s}");
    assert_eq!(row(&s, 0).chars().count(), 33 * 3);
    assert!(s.contains("makespan 33, bubble 27.3 % of the time of 4 pipeline ranks\n"), "{s}");
    assert!(s.contains("microbatches alive at the peak, by pipeline rank: 4 3 2 1\n"), "{s}");
}

#[test]
fn a_long_schedule_says_what_it_leaves_out() {
    let t = sample::one_f_one_b(16, 64);
    let s = text(&t, 1, false);
    assert!(s.lines().count() < 125, "{s}");
    assert!(s.contains("… 129 of 237 time units left out: "), "{s}");
    assert!(s.contains("; --svg FILE draws all\n"), "{s}");
    // The first and the last action of the first rank, and all that is not in the middle.
    assert!(row(&s, 0).starts_with("F0─ F1─ F2─ ") && row(&s, 0).ends_with("B63──── "), "{s}");
    let line = s.lines().find(|l| l.starts_with('…')).unwrap_or_default();
    let count = line.split("out: ").nth(1).and_then(|r| r.split(' ').next());
    let inside = |s: &&Slot| s.start >= 54.0 && s.end <= 183.0;
    let count_of = t.ranks.iter().flatten().filter(inside).count();
    assert_eq!(count, Some(count_of.to_string().as_str()));
}

#[test]
fn nothing_and_next_to_nothing() {
    assert_eq!(text(&Timeline::default(), 1, false), "no actions on 0 pipeline ranks\n");
    let mut t = Timeline { ranks: vec![vec![]; 2], order: vec![] };
    assert_eq!(text(&t, 1, true), "no actions on 2 pipeline ranks\n");
    t.ranks[0].push(slot(ActionKind::Forward, 0, 7, 0.0, 0.25));
    let s = text(&t, 1, false);
    assert!(s.contains("pp 0 F7 \npp 1 ···\n"), "{s}");
    assert!(!s.contains("live"), "{s}");
    t.ranks[0].push(slot(ActionKind::Backward, 0, 7, 0.25, 0.25));
    let s = text(&t, 1, false);
    assert!(s.contains("0 actions are too short for their number, 1 too short"), "{s}");
}

#[test]
fn times_that_are_not_whole_are_scaled() {
    let t = sample::timed(2, 3, |k| if k == ActionKind::Forward { 0.41 } else { 0.97 });
    let s = text(&t, 1, false);
    let [f, b] = ["F2", "B2"].map(|cell| row(&s, 1).find(cell).unwrap_or_default());
    assert!(f < b, "{s}");
    // Every panel begins and ends inside, however many columns a unit takes.
    let t = sample::timed(8, 64, |k| if k == ActionKind::Forward { 0.001 } else { 0.002 });
    assert!(row(&text(&t, 1, false), 0).ends_with("B63──── "));
    let huge = Timeline {
        ranks: vec![vec![slot(ActionKind::Forward, 0, 0, 1e300, f64::MAX)]],
        order: vec![],
    };
    assert!(text(&huge, 1, false).contains("F0"));
    let mut t = sample::one_f_one_b(4, 32);
    t.ranks[3].push(slot(ActionKind::Backward, 3, 32, 99.0, 1e300));
    assert!(text(&t, 1, false).contains("; --svg FILE draws all"));
    let odd = vec![
        slot(ActionKind::Forward, 0, 0, 0.0, f64::INFINITY),
        slot(ActionKind::Forward, 0, 1, 0.0, 1.0),
    ];
    assert!(text(&Timeline { ranks: vec![odd], order: vec![] }, 1, false).contains("F1"));
}

#[test]
fn one_rank_is_shown_of_all() {
    let t = sample::one_f_one_b(4, 8);
    let (all, one) = (text(&t, 1, false), super::text(&t, 1, false, Some(2)));
    assert_eq!(row(&one, 2), row(&all, 2));
    assert!(!one.contains("\npp 1 ") && one.contains("of 4 pipeline ranks"), "{one}");
}
