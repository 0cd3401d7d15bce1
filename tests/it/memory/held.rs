//! How many microbatches a rank holds at once, counted in its list of instructions and the offsets
//! of its frames, without the schedule.

use super::*;
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::plan::{Instr, RankClass};
use shardc_testing::taken;
use std::collections::{BTreeMap, BTreeSet};

/// A frame that a forward leaves to its backward: the instructions between which it is needed, and
/// where it lies.
struct Life {
    stage: usize,
    microbatch: usize,
    /// Function and number of the frame in it.
    frame: (usize, usize),
    from: usize,
    to: usize,
    start: usize,
    end: usize,
}

/// What forwards of a class save, or receive and save: all that a backward of the class reads.
fn lives(plan: &Plan, class: &RankClass) -> Vec<Life> {
    let m = &plan.module;
    let is = |f: usize, words: &[&str]| words.contains(&m.funcs[f].kind.name());
    let mut readers: BTreeMap<&Role, BTreeSet<usize>> = BTreeMap::new();
    for &f in class.funcs.iter().filter(|&&f| is(f, &["backward", "weight"])) {
        for role in m.funcs[f].args.iter().filter_map(|a| a.role.as_ref()) {
            readers.entry(role).or_default().insert(f);
        }
    }
    let forwards = || class.funcs.iter().copied().filter(|&f| is(f, &["forward"]));
    let mut makers: BTreeMap<&Role, usize> = BTreeMap::new();
    for role in forwards().flat_map(|f| &m.funcs[f].results).filter_map(|r| r.role.as_ref()) {
        *makers.entry(role).or_default() += 1;
    }
    let mut out = vec![];
    for f in forwards() {
        let func = &m.funcs[f];
        let stage = func.name.rsplit_once('.').map_or(0, |n| n.1.parse().expect("a stage"));
        // By frame: the functions that read it.
        let mut frames: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
        let made = func.results.iter().map(|p| (p, RoleKind::Stash));
        let received = func.args.iter().map(|p| (p, RoleKind::Edge));
        for (p, kind) in made.chain(received) {
            let Some(role) = p.role.as_ref().filter(|r| r.kind == kind) else { continue };
            let Some(by) = readers.get(role) else { continue };
            // Cosine and sine are the same for all chunks of a rank, and kept once.
            if kind == RoleKind::Stash && makers[role] > 1 {
                continue;
            }
            let place = class.memory.places[f][p.value];
            frames.entry(place.frame).or_default().extend(by);
        }
        for (from, c) in calls(&class.step).filter(|c| c.1.func == f) {
            for (&frame, by) in &frames {
                let same = |x: &(usize, _)| by.contains(&call(x).func);
                let same = calls(&class.step).filter(|x| same(x) && x.1.microbatch == c.microbatch);
                let to = same.map(|x| x.0).max().expect("what is saved is read");
                let (start, frame) = (c.frames[frame as usize], frame as usize);
                let end = start + class.memory.frames[f][frame];
                let microbatch = c.microbatch.expect("forwards are of microbatches");
                out.push(Life { stage, microbatch, frame: (f, frame), from, to, start, end });
            }
        }
    }
    out
}

type Numbered<'a> = (usize, &'a shardc_ir::plan::Call);

fn call<'a>(x: &Numbered<'a>) -> &'a shardc_ir::plan::Call {
    x.1
}

fn calls(list: &[Instr]) -> impl Iterator<Item = Numbered<'_>> {
    list.iter().enumerate().filter_map(|(i, x)| match x {
        Instr::Call(c) => Some((i, c)),
        Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
    })
}

/// Most spans that share a moment.
fn most(spans: impl Iterator<Item = (usize, usize)>) -> usize {
    let spans: Vec<_> = spans.collect();
    let at = |t: usize| spans.iter().filter(|s| s.0 <= t && t <= s.1).count();
    spans.iter().map(|s| at(s.0)).max().unwrap_or(0)
}

/// What a rank of the pipeline holds.
pub struct Held {
    /// Most microbatches of each frame.
    pub frames: Vec<usize>,
    /// Most pairs of a stage and a microbatch.
    pub chunks: usize,
}

/// Counts what a class holds, and asserts that what it holds lies apart.
pub fn held(plan: &Plan, class: &RankClass) -> Held {
    let all = lives(plan, class);
    for (i, a) in all.iter().enumerate() {
        for b in all[..i].iter().filter(|b| a.from <= b.to && b.from <= a.to) {
            let apart = a.end <= b.start || b.end <= a.start;
            assert!(apart, "{:?} {} and {:?} {}", a.frame, a.microbatch, b.frame, b.microbatch);
        }
    }
    let mut frames: BTreeMap<(usize, usize), Vec<(usize, usize)>> = BTreeMap::new();
    let mut pairs: BTreeMap<(usize, usize), (usize, usize)> = BTreeMap::new();
    for l in &all {
        frames.entry(l.frame).or_default().push((l.from, l.to));
        let pair = pairs.entry((l.stage, l.microbatch)).or_insert((l.from, l.to));
        *pair = (pair.0.min(l.from), pair.1.max(l.to));
    }
    let frames = frames.into_values().map(|spans| most(spans.into_iter())).collect();
    Held { frames, chunks: most(pairs.into_values()) }
}

/// The plan of the deep fixture on p ranks.
fn deep(n: Named, p: usize, m: usize) -> Plan {
    let o = asked(&[("pp", p)], false, SEQ, m, Recompute::None);
    planned(&fixture_config("llama_deep"), &scheduled(o, n)).1
}

#[test]
fn one_f_one_b_holds_the_ranks_that_follow_and_gpipe_holds_all() {
    for p in [2, 4] {
        for m in [1, p - 1, p, p + 1, 2 * p, 3 * p + 1] {
            for n in [Named::OneFOneB, Named::Gpipe] {
                let plan = deep(n, p, m);
                for (r, class) in plan.classes.iter().enumerate() {
                    let want = if n == Named::Gpipe { m } else { m.min(p - r) };
                    let h = held(&plan, class);
                    let what = format!("{} p={p} m={m} rank {r}", n.name());
                    assert!(h.frames.len() >= 8 / p, "{what}: a layer saves something");
                    assert!(h.frames.iter().all(|&f| f == want), "{what}: {want} {:?}", h.frames);
                    assert_eq!(h.chunks, want, "{what}");
                }
            }
        }
    }
}

/// A line of the page of schedules.
struct Figures {
    name: String,
    chunks: usize,
    /// By number of microbatches, the most that a rank holds; nothing if it is not legal.
    most: Vec<(usize, Option<f64>)>,
}

/// The lines for p ranks.
fn figures(page: &str, p: usize) -> Vec<Figures> {
    let section = page.split(&format!("### p = {p}\n")).nth(1).expect("a section");
    let section = section.split("\n### ").next().expect("its text");
    let cells = |l: &str| -> Vec<String> {
        l.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect()
    };
    let mut rows = section.lines().filter(|l| l.starts_with('|')).map(cells);
    let head = rows.next().expect("a head");
    let ms: Vec<usize> =
        head[2..].iter().map(|c| c.trim_start_matches("m = ").parse().expect("m")).collect();
    let rows = rows.filter(|r| Named::ALL.iter().any(|n| n.name() == r[0]));
    rows.map(|r| {
        let most = |c: &String| c.rsplit(" / ").next().and_then(|x| x.parse().ok());
        let by_m = ms.iter().copied().zip(r[2..].iter().map(most)).collect();
        Figures { name: r[0].clone(), chunks: r[1].parse().expect("v"), most: by_m }
    })
    .collect()
}

#[test]
fn plans_hold_what_the_page_of_schedules_says() {
    let page = include_str!("../../../docs/schedules.md");
    for p in [2, 4] {
        let figures = figures(page, p);
        assert_eq!(figures.len(), Named::ALL.len() - 1, "all but naive have figures");
        for Figures { name, chunks: v, most } in figures {
            for (i, (m, most)) in most.into_iter().enumerate() {
                let Some(most) = most.filter(|_| taken(i + v, 2)) else { continue };
                let plan = deep(Named::parse(&name).unwrap_or_else(|e| panic!("{e}")), p, m);
                let chunks = plan.classes.iter().map(|c| held(&plan, c).chunks).max();
                let got = chunks.unwrap_or(0) as f64 / v as f64;
                assert_eq!(got, most, "{name} p={p} m={m}");
            }
        }
    }
}
