//! Named pipeline schedules: the figures of their papers, what they refuse, and that all run.

use shardc_ir::schedule::{
    Action, ActionKind, Schedule, Timeline, Times, parse_csv, replay, write_csv,
};
use shardc_passes::schedule::{Named, Placement, legal, make};

const RANKS: [usize; 3] = [2, 4, 8];
const MICROBATCHES: [usize; 3] = [4, 8, 16];

fn built(n: Named, p: usize, v: usize, m: usize) -> Schedule {
    make(n, p, v, m).unwrap_or_else(|d| panic!("{} p={p} v={v} m={m}: {d}", n.name()))
}

/// Makespan, longest span and most pairs alive on a rank, to the end of W; F, I and W take 1.
fn figures(n: Named, p: usize, v: usize, m: usize) -> (usize, usize, usize) {
    let t = line(&built(n, p, v, m));
    let live = (0..p).map(|r| t.live(r) as usize).max().expect("a rank");
    (t.makespan() as usize, t.longest_span() as usize, live)
}

fn line(s: &Schedule) -> Timeline {
    replay(s, &Times::unit(s.owner.len())).unwrap_or_else(|d| panic!("{d}\n{}", write_csv(s)))
}

fn each(p: &[usize], m: &[usize], mut f: impl FnMut(usize, usize)) {
    p.iter().for_each(|&p| m.iter().for_each(|&m| f(p, m)));
}

/// Reads `3F12`.
fn action(text: &str) -> Action {
    let kind = [ActionKind::Forward, ActionKind::Backward, ActionKind::Input, ActionKind::Weight];
    let kind = kind.into_iter().find(|k| text.contains(k.letter())).expect("a kind");
    let (stage, microbatch) = text.split_once(kind.letter()).expect("a kind");
    let number = |n: &str| n.parse().expect("a number");
    Action { kind, stage: number(stage), microbatch: number(microbatch) }
}

/// `a` ends before `b` starts.
fn happens_before(s: &Schedule, a: &str, b: &str) -> bool {
    let t = line(s);
    let find = |x: &str| {
        let slot = t.ranks.iter().flatten().find(|slot| slot.action == action(x));
        *slot.unwrap_or_else(|| panic!("{x} is nowhere"))
    };
    find(a).end <= find(b).start
}

#[test]
fn every_schedule_runs_wherever_it_is_legal() {
    let mut runs = 0;
    for n in Named::ALL {
        for p in [1, 2, 3, 4, 8] {
            for v in [1, 2, 3, 4] {
                for m in 1..=2 * p + 1 {
                    let made = make(n, p, v, m);
                    assert_eq!(made.is_ok(), legal(n, p, v, m).is_ok());
                    let Ok(s) = made else { continue };
                    runs += 1;
                    let t = line(&s);
                    assert_eq!(parse_csv(&write_csv(&s)), Ok(s.clone()));
                    assert_eq!(s.owner, n.placement().owner(p, v));
                    assert_eq!((s.ranks.len(), s.microbatches), (p, m));
                    let actions: usize = s.ranks.iter().map(Vec::len).sum();
                    assert_eq!(t.order.len(), actions);
                    let starts = t.order.iter().map(|&(r, i)| t.ranks[r][i].start);
                    assert!(starts.is_sorted());
                }
            }
        }
    }
    // How many are legal, so that a rule that refuses too much is seen: there are 41 pairs of p and
    // m, 38 of them with p > 1. Naive has one m for each p, and four schedules have v = 1 only.
    let single = 5 + 4 * 41;
    // Looped BFS has any v but with p = 1; interleaved m = p and 2 p; three have v = 2.
    let several = (3 + 4 * 38) + 3 * 4 * 2 + 3 * 38;
    // DualPipeV has m = 2 p and 2 p + 1 for p = 2, 4, 8.
    assert_eq!(runs, single + several + 6);
}

#[test]
fn one_rank_runs_what_one_device_would() {
    for n in [Named::OneFOneB, Named::ZbH1, Named::ZbH2] {
        assert_eq!(write_csv(&built(n, 1, 1, 2)), "0F0,0B0,0F1,0B1\n");
    }
    assert_eq!(write_csv(&built(Named::Gpipe, 1, 1, 2)), "0F0,0F1,0B0,0B1\n");
    assert_eq!(write_csv(&built(Named::Naive, 1, 1, 1)), "0F0,0B0\n");
}

#[test]
fn gpipe_and_1f1b_reach_their_figures() {
    each(&RANKS, &MICROBATCHES, |p, m| {
        assert_eq!(figures(Named::Gpipe, p, 1, m), (3 * (m + p - 1), 3 * (m + p - 1), m));
        let s = built(Named::OneFOneB, p, 1, m);
        let t = line(&s);
        assert_eq!(t.makespan() as usize, 3 * (m + p - 1));
        for r in 0..p {
            assert_eq!(t.live(r) as usize, m.min(p - r), "rank {r} of {p}, {m}");
        }
    });
    assert_eq!(figures(Named::Naive, 8, 1, 1), (24, 24, 1));
    let gpipe = built(Named::Gpipe, 3, 1, 4);
    assert!(happens_before(&gpipe, "2F3", "2B0") && happens_before(&gpipe, "2B0", "2B3"));
    let s = built(Named::OneFOneB, 3, 1, 4);
    assert!(happens_before(&s, "2B0", "2F1") && happens_before(&s, "0F2", "0B0"));
    assert!(happens_before(&s, "0B0", "0F3"));
}

#[test]
fn chunks_divide_the_bubble() {
    each(&RANKS, &[4, 8, 16], |p, m| {
        for v in [2, 3, 4] {
            if m % p != 0 {
                continue;
            }
            let (makespan, _, live) = figures(Named::Interleaved, p, v, m);
            assert_eq!(makespan, 3 * (m * v + p - 1), "p={p} v={v} m={m}");
            assert_eq!(live, (m * v).min(p * v + p - 1), "p={p} v={v} m={m}");
        }
    });
    each(&RANKS, &MICROBATCHES, |p, m| {
        let (makespan, _, live) = figures(Named::LoopedBfs, p, 2, m);
        assert!(live == 2 * m && makespan >= 3 * (2 * m + p - 1));
    });
    // A group of p microbatches goes through all chunks before the next one begins.
    let s = built(Named::Interleaved, 2, 2, 4);
    assert!(happens_before(&s, "0F1", "2F0") && happens_before(&s, "2F1", "0F2"));
    assert!(happens_before(&s, "2B1", "0B0") && happens_before(&s, "0B1", "2B2"));
    let s = built(Named::LoopedBfs, 2, 2, 3);
    assert!(happens_before(&s, "0F2", "2F0") && happens_before(&s, "2B2", "2B0"));
    assert!(happens_before(&s, "2B0", "0B2"));
}

/// "Zero Bubble Pipeline Parallelism", section 2.3; the bound for few microbatches is derived in
/// `zero_bubble.rs`.
#[test]
fn zero_bubble_schedules_reach_their_bounds() {
    let all: Vec<usize> = (1..=17).collect();
    each(&[2, 3, 4, 5, 6, 7, 8, 12], &all, |p, m| {
        for (n, memory) in [(Named::ZbH1, p), (Named::ZbH2, 2 * p - 1)] {
            let (_, span, live) = figures(n, p, 1, m);
            assert_eq!(span, 3 * m + 2 * p - 1 - m.min(memory), "{} p={p} m={m}", n.name());
            assert!(live <= memory, "{} p={p} m={m}: {live}", n.name());
        }
    });
    // Where the paper's formulas apply they say the same.
    each(&RANKS, &[8, 16], |p, m| {
        assert_eq!(figures(Named::ZbH1, p, 1, m).1, 3 * m + p - 1);
        if m >= 2 * p - 1 {
            assert_eq!(figures(Named::ZbH2, p, 1, m).1, 3 * m);
        }
    });
    // If I frees all, a later rank of ZB-H1 holds no more than in 1F1B: p - r microbatches.
    let t = line(&built(Named::ZbH1, 4, 1, 16));
    assert!((0..4).all(|r| t.live_to_input(r) <= 4 - r as u64), "{:?}", t.ranks);
    let s = built(Named::ZbH1, 4, 1, 8);
    assert!(s.splits_backward() && happens_before(&s, "0I0", "0W0"));
}

/// No V schedule has a longest span below this: the first rank has m forwards to run before the
/// first I at `2 p - 1`, and nothing but I and W of its first stage after `4 p - 1`.
fn v_bound(p: usize, m: usize) -> usize {
    (6 * m + (2 * p - 1).saturating_sub(m)).max(4 * p - 1 + 2 * m)
}

/// In chunks; the figures are those of `v_shape.rs`: p, (p+2)//2 and (p+4)//3 microbatches held,
/// bubbles of none, half and two thirds of that of 1F1B.
#[test]
fn v_schedules_reach_the_figures_of_their_paper() {
    let all: Vec<usize> = (1..=17).collect();
    each(&[2, 3, 4, 5, 6, 7, 8, 12], &all, |p, m| {
        let (_, span, live) = figures(Named::ZbV, p, 2, m);
        assert_eq!(span, v_bound(p, m), "zb-v p={p} m={m}");
        assert!(live <= 2 * p, "zb-v p={p} m={m}: {live}");
        // Half and two thirds of the 6 (p - 1) of 1F1B.
        let paper = [(Named::VHalf, 3, (p + 2) / 2), (Named::VMin, 4, (p + 4) / 3)];
        for (n, bubble, microbatches) in paper {
            let (_, span, live) = figures(n, p, 2, m);
            let most = v_bound(p, m).max(6 * m + bubble * (p - 1));
            assert!(span <= most, "{} p={p} m={m}: {span} > {most}", n.name());
            assert!(live <= 2 * microbatches, "{} p={p} m={m}: {live}", n.name());
        }
    });
}

/// Schedule, p, m; longest span, makespan and chunks held of the authors' program
/// (github.com/sail-sg/zero-bubble-pipeline-parallelism, zbv.py and zbv_greedy.py, run with all
/// times 1 and communication 0), because the paper has no closed form for few microbatches.
#[rustfmt::skip]
const PROGRAM: [(&str, usize, usize, usize, usize, usize); 54] = [
    ("v-half", 2, 1, 10, 10, 2), ("v-half", 2, 16, 97, 97, 4),
    ("v-half", 2, 2, 15, 15, 4), ("v-half", 2, 3, 19, 19, 4),
    ("v-half", 2, 4, 25, 25, 4), ("v-half", 2, 8, 49, 49, 4),
    ("v-half", 4, 1, 18, 18, 2), ("v-half", 4, 16, 101, 101, 6),
    ("v-half", 4, 2, 22, 22, 4), ("v-half", 4, 3, 27, 27, 6),
    ("v-half", 4, 4, 34, 34, 6), ("v-half", 4, 8, 53, 53, 6),
    ("v-half", 8, 1, 34, 34, 2), ("v-half", 8, 16, 113, 113, 10),
    ("v-half", 8, 2, 38, 38, 4), ("v-half", 8, 3, 43, 43, 6),
    ("v-half", 8, 4, 48, 48, 8), ("v-half", 8, 8, 65, 65, 10),
    ("v-min", 2, 1, 9, 9, 2), ("v-min", 2, 16, 99, 99, 4),
    ("v-min", 2, 2, 15, 15, 4), ("v-min", 2, 3, 21, 21, 4),
    ("v-min", 2, 4, 27, 27, 4), ("v-min", 2, 8, 51, 51, 4),
    ("v-min", 4, 1, 17, 17, 2), ("v-min", 4, 16, 107, 107, 4),
    ("v-min", 4, 2, 23, 23, 4), ("v-min", 4, 3, 29, 29, 4),
    ("v-min", 4, 4, 35, 35, 4), ("v-min", 4, 8, 59, 59, 4),
    ("v-min", 8, 1, 33, 33, 2), ("v-min", 8, 16, 123, 123, 8),
    ("v-min", 8, 2, 38, 38, 4), ("v-min", 8, 3, 44, 44, 6),
    ("v-min", 8, 4, 51, 51, 8), ("v-min", 8, 8, 75, 75, 8),
    ("zb-v", 2, 1, 9, 9, 2), ("zb-v", 2, 16, 96, 97, 4),
    ("zb-v", 2, 2, 13, 13, 4), ("zb-v", 2, 3, 18, 19, 4),
    ("zb-v", 2, 4, 24, 25, 4), ("zb-v", 2, 8, 48, 49, 4),
    ("zb-v", 4, 1, 17, 17, 2), ("zb-v", 4, 16, 96, 99, 8),
    ("zb-v", 4, 2, 19, 19, 4), ("zb-v", 4, 3, 22, 23, 6),
    ("zb-v", 4, 4, 27, 27, 8), ("zb-v", 4, 8, 48, 51, 8),
    ("zb-v", 8, 1, 33, 33, 2), ("zb-v", 8, 16, 96, 103, 16),
    ("zb-v", 8, 2, 35, 35, 4), ("zb-v", 8, 3, 37, 37, 6),
    ("zb-v", 8, 4, 39, 39, 8), ("zb-v", 8, 8, 55, 55, 16),
];

#[test]
fn v_schedules_are_never_behind_the_program_of_the_paper() {
    for (name, p, m, span, makespan, live) in PROGRAM {
        let n = Named::parse(name).expect("a name");
        let ours = figures(n, p, 2, m);
        let better = ours.0 <= makespan && ours.1 <= span && ours.2 <= live;
        assert!(better, "{name} p={p} m={m}: {ours:?}, theirs ({makespan}, {span}, {live})");
    }
}

/// The README of DualPipe for p ranks, PP = 2 p, an overlapped pair F&B counted as F and B: bubble
/// `(PP/2 - 1) (F&B + B - 3 W) = 2 (p - 1)`, activations PP + 1.
#[test]
fn dualpipe_v_reaches_the_figures_of_its_readme() {
    each(&RANKS, &MICROBATCHES, |p, m| {
        if m < 2 * p {
            return;
        }
        let (makespan, span, live) = figures(Named::DualPipeV, p, 2, m);
        assert!(makespan <= 6 * m + 2 * (p - 1), "p={p} m={m}: {makespan}");
        // Without a wait for the other half of a pair it is less.
        assert_eq!((makespan, span), (6 * m + p - 1, 6 * m + p - 1));
        assert_eq!(live, 2 * p + 1);
        // The cut backwards of steps 3, 6 and 7.
        for (r, list) in built(Named::DualPipeV, p, 2, m).ranks.iter().enumerate() {
            let cut = list.iter().filter(|a| a.kind == ActionKind::Weight).count();
            assert_eq!(cut, 2 * (p - r - 1) + r + 1);
        }
    });
}

/// The eight steps of the reference, carried out by hand for p = 2, m = 4.
#[test]
fn dualpipe_v_runs_in_the_order_of_its_reference() {
    let by_hand = "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3\n\
                   1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3\n";
    assert_eq!(write_csv(&built(Named::DualPipeV, 2, 2, 4)), by_hand);
}

#[test]
fn a_wrong_order_is_a_deadlock() {
    let mut s = built(Named::OneFOneB, 4, 1, 4);
    // Rank 3 wants its second forward before the backward that rank 2 waits for.
    s.ranks[3].swap(1, 2);
    s.ranks[2].swap(1, 2);
    let d = replay(&s, &Times::unit(4)).expect_err("stuck");
    assert_eq!(d.code, "deadlock");
    assert!(d.message.contains("2B0 of rank 2 and 3F1 of rank 3 wait on each other"), "{d}");
}

#[test]
fn what_is_refused_is_told_with_numbers_rule_and_way_out() {
    let cases = [
        (Named::Naive, 4, 1, 8, "m == 1", "m=1"),
        (Named::Gpipe, 4, 2, 8, "v == 1", "v=1"),
        (Named::OneFOneB, 4, 2, 8, "v == 1", "v=1"),
        (Named::ZbH1, 4, 3, 8, "v == 1", "v=1"),
        (Named::ZbH2, 4, 2, 8, "v == 1", "v=1"),
        (Named::Interleaved, 4, 2, 6, "m % p == 0", "m=4 or m=8"),
        (Named::Interleaved, 4, 2, 3, "m % p == 0", "m=4"),
        (Named::Interleaved, 1, 2, 4, "p >= 2", "p=2"),
        (Named::Interleaved, 4, 1, 4, "v >= 2", "v=2"),
        (Named::LoopedBfs, 1, 2, 4, "v == 1 where p == 1", "v=1 or p=2"),
        (Named::ZbV, 1, 2, 4, "p >= 2", "p=2"),
        (Named::ZbV, 4, 1, 4, "v == 2", "v=2"),
        (Named::VHalf, 4, 3, 4, "v == 2", "v=2"),
        (Named::VMin, 4, 4, 4, "v == 2", "v=2"),
        (Named::DualPipeV, 3, 2, 12, "p % 2 == 0", "p=2 or p=4"),
        (Named::DualPipeV, 1, 2, 12, "p % 2 == 0", "p=2"),
        (Named::DualPipeV, 4, 1, 12, "v == 2", "v=2"),
        (Named::DualPipeV, 4, 2, 7, "m >= 2 * p", "m=8"),
        (Named::Gpipe, 4, 1, 0, "m >= 1", "m=1"),
        (Named::Interleaved, 4, 2, 0, "m >= 1", "m=4"),
        (Named::DualPipeV, 4, 2, 0, "m >= 1", "m=8"),
        (Named::Gpipe, 0, 1, 4, "p >= 1", "p=1"),
        (Named::Gpipe, 2, 0, 4, "v >= 1", "v=1"),
        (Named::Gpipe, 4, 1, usize::MAX, "m <= 131072", "m=131072"),
        (Named::OneFOneB, 1, 1, 131_073, "m <= 131072", "m=131072"),
        (Named::Gpipe, 512, 1, 16_384, "p * v * m <= 4194304", "m=8192"),
        (Named::LoopedBfs, 1 << 40, 2, 4, "p * v <= 65536", "p=32768"),
        (Named::OneFOneB, 65_537, 1, 16_384, "p * v <= 65536", "p=256"),
        (Named::LoopedBfs, 2, 40_000, 8, "p * v <= 65536", "v=32768"),
    ];
    for (n, p, v, m, rule, nearest) in cases {
        let d = make(n, p, v, m).expect_err(rule);
        let name = n.name();
        assert_eq!(d.code, "schedule-rule");
        // What people read has the words of the flags.
        let word = |what: &str, n: usize| match what {
            "p" => format!("pp={n}"),
            "v" => format!("--chunks {n}"),
            _ if n == 1 => "1 microbatch".into(),
            _ => format!("{n} microbatches"),
        };
        let chunks = if v == 1 { "1 chunk".to_string() } else { format!("{v} chunks") };
        let numbers = format!("pp={p}, {chunks} per rank, {}", word("m", m));
        assert_eq!(d.message, format!("`{name}` does not run with {numbers}"));
        assert!(d.rule.as_ref().is_some_and(|r| r.starts_with(rule)), "{d}");
        let said = nearest.split(" or ").map(|c| {
            let (what, n) = c.split_once('=').expect("what=n");
            word(what, n.parse().expect("a number"))
        });
        let said: Vec<String> = said.collect();
        assert_eq!(d.help[0], format!("nearest legal: {}", said.join(" or ")));
        // Each nearest value is legal with the other numbers as they are.
        for change in nearest.split(" or ") {
            let (what, n2) = change.split_once('=').expect("what=n");
            let n2 = n2.parse().expect("a number");
            let (p, v, m) = match what {
                "p" => (n2, v, m),
                "v" => (p, n2, m),
                _ => (p, v, n2),
            };
            assert_eq!(legal(n, p, v, m), Ok(()), "{change}");
        }
    }
    let d = legal(Named::Interleaved, 4, 2, 6).expect_err("m");
    assert_eq!(d.help[1], "or keep the numbers and use `looped-bfs`");
}

#[test]
fn names_go_both_ways() {
    for n in Named::ALL {
        assert_eq!(Named::parse(n.name()), Ok(n));
        let (p, v, m) = (4, n.default_chunks(), if n == Named::Naive { 1 } else { 8 });
        assert_eq!(legal(n, p, v, m), Ok(()), "{} with its default chunks", n.name());
    }
    let d = Named::parse("zerobubble").expect_err("no name");
    assert_eq!(d.code, "schedule-name");
    assert!(d.help[0].contains("naive, gpipe, 1f1b") && d.message.contains("`zerobubble`"), "{d}");
    assert_eq!(Placement::V.owner(3, 3), [0, 1, 2, 2, 1, 0, 0, 1, 2]);
    assert_eq!(Placement::Loop.owner(3, 2), [0, 1, 2, 0, 1, 2]);
}
