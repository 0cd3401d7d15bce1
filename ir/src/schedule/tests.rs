//! Replay, its diagnostics, and CSV, on schedules small enough to check by hand.

use super::*;
use crate::diag::Diag;

const TWO: &str = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n";

fn read(text: &str) -> Schedule {
    parse_csv(text).expect("a schedule")
}

fn refused(text: &str) -> Diag {
    let s = read(text);
    replay(&s, &Times::unit(s.owner.len())).expect_err(text)
}

/// Code and texts of a diagnostic, and that it has a rule and a way out.
fn says(d: &Diag, code: &str, texts: &[&str]) {
    assert_eq!(d.code, code, "{d}");
    assert!(d.rule.is_some() && !d.help.is_empty(), "{d}");
    for t in texts {
        assert!(d.render().contains(t), "{t} in {d}");
    }
}

#[test]
fn two_ranks_by_hand() {
    let t = replay(&read(TWO), &Times::unit(2)).expect("runs");
    // Rank 0: F 0-1, F 1-2, B 4-6, B 7-9. Rank 1: F 1-2, B 2-4, F 4-5, B 5-7.
    let times = |r: usize| t.ranks[r].iter().map(|s| (s.start, s.end)).collect::<Vec<_>>();
    assert_eq!(times(0), [(0., 1.), (1., 2.), (4., 6.), (7., 9.)]);
    assert_eq!(times(1), [(1., 2.), (2., 4.), (4., 5.), (5., 7.)]);
    assert_eq!((t.makespan(), t.span(1), t.longest_span()), (9., 6., 9.));
    assert_eq!((t.busy(0), t.bubble(1)), (6. / 9., 1. - 6. / 9.));
    assert_eq!((t.live(0), t.live(1)), (2, 1));
    let held = |_| Held { input: 2, weight: 3 };
    assert_eq!(t.steps(0, &held), [(0., 5), (1., 10), (6., 5), (9., 0)]);
    // Starts never decrease; of the two at 1 and at 4 the lower rank comes first.
    assert_eq!(t.order, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (1, 3), (0, 3)]);
}

#[test]
fn a_cut_backward_frees_in_two_steps() {
    let s = read("0F0,0F1,0I0,0I1,0W0,0W1");
    let t = replay(&s, &Times { forward: vec![1.], input: vec![2.], weight: vec![3.] });
    let t = t.expect("runs");
    assert_eq!((t.makespan(), t.live(0), t.live_to_input(0)), (12., 2, 2));
    let held = |_| Held { input: 1, weight: 10 };
    let steps = [(0., 11), (1., 22), (4., 21), (6., 20), (9., 10), (12., 0)];
    assert_eq!(t.steps(0, &held), steps);
    assert!(s.splits_backward() && !read(TWO).splits_backward());
}

#[test]
fn actions_without_time_keep_their_order() {
    let s = read("0F0,1F0,1B0,0B0");
    let none = Times { forward: vec![0.; 2], input: vec![0.; 2], weight: vec![0.; 2] };
    let t = replay(&s, &none).expect("runs");
    assert_eq!(t.order, [(0, 0), (0, 1), (0, 2), (0, 3)]);
    assert_eq!((t.busy(0), t.live(0)), (1., 2));
}

#[test]
fn incomplete_schedules_are_refused() {
    says(&refused("0F0,0F1,0B0"), "schedule", &["0B1 is missing from rank 0"]);
    says(&refused("0F0,0I0,0F1,0B1"), "schedule", &["0W0 is missing from rank 0"]);
    says(&refused("0F1,0B1"), "schedule", &["0F0 is missing from rank 0"]);
    says(&refused("0F0,0F0,0B0"), "schedule", &["0F0 is on rank 0 twice", "action 1"]);
    says(&refused("0F0,0W0,0I0"), "schedule", &["0W0 comes before 0I0 on rank 0"]);
    says(&refused("0B0,0F0"), "schedule", &["0B0 comes before 0F0 on rank 0"]);
    says(&refused("0F0,0I0,0B0"), "schedule", &["rank 0 has both 0I0 and 0B0"]);
    let mut s = read(TWO);
    let foreign = s.ranks[1][0];
    s.ranks[0].push(foreign);
    let d = replay(&s, &Times::unit(2)).expect_err("foreign");
    says(&d, "schedule", &["1F0 is on rank 0, but stage 1 on 1", "move 1F0 to rank 1"]);
    s = read(TWO);
    s.owner[1] = 7;
    let d = replay(&s, &Times::unit(2)).expect_err("no such rank");
    says(&d, "schedule", &["stage 1 is on rank 7 of 2 ranks"]);
    s.owner[1] = 0;
    says(&replay(&s, &Times::unit(2)).expect_err("idle"), "schedule", &["rank 1 has no stage"]);
    s = read(TWO);
    s.ranks[0][0].stage = usize::MAX;
    says(&replay(&s, &Times::unit(2)).expect_err("range"), "schedule", &["of 2"]);
    s = read(TWO);
    s.ranks[0][0].microbatch = usize::MAX;
    says(&replay(&s, &Times::unit(2)).expect_err("range"), "schedule", &["of 2"]);
    says(&replay(&s, &Times::unit(2)).expect_err("range"), "schedule", &["from 0 to 1"]);
}

#[test]
fn hostile_sizes_are_refused() {
    let mut s = read(TWO);
    s.microbatches = usize::MAX;
    let d = replay(&s, &Times::unit(2)).expect_err("large");
    says(
        &d,
        "schedule",
        &["stages * microbatches <= 4194304", "nearest legal: 131072 microbatches"],
    );
    let d = parse_csv("4000000F4000000,4000000B4000000").expect_err("large");
    says(&d, "schedule", &["nearest legal: 65536 stages, 64 microbatches"]);
    let d = replay(&read(TWO), &Times::unit(3)).expect_err("times");
    says(&d, "schedule", &["3 times of forward for 2 stages"]);
    let mut t = Times::unit(2);
    t.weight[1] = f64::NAN;
    says(&replay(&read(TWO), &t).expect_err("NaN"), "schedule", &["weight of stage 1 takes NaN"]);
}

#[test]
fn a_deadlock_names_its_circle() {
    let d = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1");
    says(
        &d,
        "deadlock",
        &[
            "0B0 of rank 0 and 1F1 of rank 1 wait on each other",
            "rank 0 is at 0B0, which waits for 1B0 of rank 1",
            "rank 1 is at 1F1, which waits for 0F1 of rank 0",
            "move 1B0 before 1F1 in the list of rank 1",
        ],
    );
    let d = refused("1F0,0F0,1B0,0B0");
    says(&d, "deadlock", &["rank 0 is at 1F0, which waits for 0F0, later in its own list"]);
    // Three in a circle, and a fourth that waits for one of them but is not part of it.
    let d = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n3F0,3B0,3F1,3B1\n");
    assert_eq!(d.why.len(), 2, "{d}");
    says(&d, "deadlock", &["rank 0 is at 0B0", "rank 1 is at 1F1"]);
}

#[test]
fn csv_round_trip() {
    let text = "0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1B0\n";
    let s = read(text);
    assert_eq!((s.owner.as_slice(), s.microbatches), ([0, 1, 1, 0].as_slice(), 1));
    assert_eq!(s.stages_of(0), [0, 3]);
    assert_eq!(write_csv(&s), text);
    assert_eq!(read("0F0, ,0B0 ,\r\n\n"), read("0F0,0B0"));
}

#[test]
fn overlapped_cells_are_two_actions() {
    assert_eq!(read("0F0,(0F1;0B0)OVERLAP_F_B,0B1"), read("0F0,0F1,0B0,0B1"));
    for bad in ["(0F1;0B0)", "(0F1)OVERLAP_F_B", "(0F0;(0F1;0B0)OVERLAP_F_B)OVERLAP_F_B"] {
        says(&parse_csv(bad).expect_err(bad), "schedule-csv", &["is not a cell"]);
    }
}

#[test]
fn cells_that_are_derived_or_no_cells_are_refused() {
    for c in
        ["0SEND_F0", "1RECV_F0", "0SEND_B2", "0RECV_B1", "0UNSHARD", "0RESHARD", "0REDUCE_GRAD"]
    {
        let d = parse_csv(&format!("0F0,{c},0B0")).expect_err(c);
        says(&d, "schedule-csv", &[c, "line 1, cell 2", "sends and receives are derived"]);
    }
    let long = "9".repeat(1000);
    for c in
        ["F0", "0F", "0X0", "é", "0F0é", "-1F0", "99999999999999999999F0", "((", "0F4194304", &long]
    {
        says(&parse_csv(c).expect_err(c), "schedule-csv", &["`"]);
    }
    says(&parse_csv("\n \n").expect_err("empty"), "schedule-csv", &["no action"]);
    says(&parse_csv("0F0\n,\n1F0").expect_err("line"), "schedule-csv", &["rank 1 has no action"]);
    says(&parse_csv("0F0\n0B0").expect_err("two"), "schedule-csv", &["on rank 0 and, by 0B0"]);
    says(&parse_csv("0F0,2F0").expect_err("gap"), "schedule-csv", &["no rank has stage 1 of 3"]);
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "[0-9FBIW,;()\n OVERLAP_S]{0,60}", any in ".{0,40}") {
        for t in [text, any] {
            if let Ok(s) = parse_csv(&t) {
                let _ = replay(&s, &Times::unit(s.owner.len()));
                assert_eq!(parse_csv(&write_csv(&s)), Ok(s));
            }
        }
    }
}
