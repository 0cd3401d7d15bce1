use super::{Drawn, Memory};
use crate::pictures::palette::STACK;
use crate::pictures::sample::{self, slot};
use crate::pictures::step::{Sample, Step};
use shardc_ir::schedule::{ActionKind, Slot, Timeline};

/// Panics unless all tags are closed in order and texts have no loose `<` or `&`.
fn check_xml(s: &str) {
    let mut open: Vec<&str> = vec![];
    let mut rest = s;
    while let Some(at) = rest.find('<') {
        for amp in rest[..at].split('&').skip(1) {
            let name = amp.split(';').next().unwrap_or_default();
            assert!(["amp", "lt", "gt", "quot", "apos"].contains(&name), "&{name}");
        }
        assert!(!rest[..at].contains('>'), "{}", &rest[..at]);
        let end = at + rest[at..].find('>').unwrap_or_else(|| panic!("open tag: {rest}"));
        let tag = &rest[at + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split([' ', '\n']).next().unwrap_or(tag));
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    assert!(!s.contains("NaN") && !s.contains("inf"), "{s}");
}

/// The number in an attribute of a tag.
fn attribute(tag: &str, name: &str) -> f64 {
    let from = format!(" {name}=\"");
    tag.split(&from).nth(1).and_then(|r| r.split('"').next()?.parse().ok()).unwrap_or(f64::NAN)
}

/// Each cell of a lane: hover text, left and right.
fn cells(s: &str) -> Vec<(String, f64, f64, f64)> {
    let mut all = vec![];
    for tag in s.split("<rect class=\"c\"").skip(1) {
        // A swatch of the legend has no hover text.
        let Some((tag, words)) = tag.split_once("\"><title>") else { continue };
        if tag.contains('>') {
            continue;
        }
        let words = words.split("</title>").next();
        let x = attribute(tag, "x");
        let words = words.unwrap_or_default().to_string();
        all.push((words, attribute(tag, "y"), x, x + attribute(tag, "width")));
    }
    all
}

/// The picture of a timeline alone, with memory if there is some.
fn svg(t: &Timeline, chunks: usize, title: &str, memory: Option<&Memory>) -> String {
    let step = Step::of_actions(t.clone());
    super::svg(&step, &Drawn { chunks, title, memory, ..Drawn::default() })
}

/// Weights, the first of the stack, and activations, the fifth.
fn sample(time: f64, activations: usize) -> Sample {
    let mut bytes = [0; STACK.len()];
    (bytes[0], bytes[4]) = (3 << 29, activations);
    Sample { time, bytes }
}

/// Weights that stay, and an activation per live microbatch.
fn memory(t: &Timeline, limit: Option<usize>) -> Memory {
    let rank = |slots: &Vec<Slot>| {
        let mut live = 0usize;
        let mut all = vec![sample(0.0, 0)];
        for s in slots {
            match s.action.kind {
                ActionKind::Forward => {
                    live += 1;
                    all.push(sample(s.start, live << 28));
                }
                ActionKind::Input => {}
                ActionKind::Backward | ActionKind::Weight => {
                    live -= 1;
                    all.push(sample(s.end, live << 28));
                }
            }
        }
        all
    };
    Memory { ranks: t.ranks.iter().map(rank).collect(), limit, ..Memory::default() }
}

fn all() -> Vec<(Timeline, usize)> {
    vec![
        (sample::one_f_one_b(4, 8), 1),
        (sample::one_f_one_b(1, 1), 1),
        (sample::gpipe(4, 8), 1),
        (sample::one_f_one_b(16, 64), 1),
        (sample::interleaved(4, 8, 2), 2),
        (sample::interleaved(16, 64, 2), 2),
        (sample::zero_bubble(16, 64), 1),
        (sample::timed(4, 12, |k| if k == ActionKind::Forward { 1e-9 } else { 3e11 }), 1),
        (sample::timed(2, 20, |_| 0.0), 1),
        (Timeline::default(), 1),
        (Timeline { ranks: vec![vec![]; 3], order: vec![] }, 2),
    ]
}

#[test]
fn files_are_well_formed_and_small() {
    for (t, chunks) in all() {
        for m in [None, Some(memory(&t, Some(4 << 30))), Some(Memory::default())] {
            let s = svg(&t, chunks, "a <b> & \"c\" \u{1}", m.as_ref());
            check_xml(&s);
            assert!(s.len() < 1_000_000, "{} bytes", s.len());
            // Texts are read, or left out.
            let mut fonts =
                s.split("font-size:").skip(2).filter_map(|x| x.split("px").next()?.parse().ok());
            assert!(fonts.all(|font: f64| font >= 7.0));
            assert!(!s.contains("script") && s.matches("http").count() == 1);
        }
    }
}

/// How many cells that are too narrow for words stand in paths.
fn joined(s: &str) -> usize {
    let counts = s.split("<title>").skip(1).filter_map(|t| t.split_once(" × "));
    counts.filter_map(|(count, _)| count.parse::<usize>().ok()).sum()
}

#[test]
fn each_action_has_one_cell_and_cells_do_not_overlap() {
    for (t, chunks) in all() {
        let s = svg(&t, chunks, "t", None);
        let mut cells = cells(&s);
        assert_eq!(cells.len() + joined(&s), t.ranks.iter().map(Vec::len).sum::<usize>());
        let mut words: Vec<&str> = cells.iter().map(|c| c.0.as_str()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), cells.len());
        cells.sort_by(|a, b| (a.1, a.2).partial_cmp(&(b.1, b.2)).expect("positions are numbers"));
        for pair in cells.windows(2).filter(|p| p[0].1 == p[1].1) {
            // Positions are rounded.
            assert!(pair[0].3 <= pair[1].2 + 0.11, "{pair:?}");
        }
    }
}

#[test]
fn cells_say_what_they_are() {
    let s = svg(&sample::interleaved(4, 8, 2), 2, "t", None);
    for part in [
        "<title>F3: forward of microbatch 3, stage 5 (chunk 1), pipeline rank 1, ",
        "<title>idle for 1, 0–1</title>",
        "the 2 chunks of a rank",
        ">F3</text>",
        "makespan 57, bubble 15.8 % of the time of 4 pipeline ranks",
    ] {
        assert!(s.contains(part), "{part}");
    }
    let s = svg(&sample::zero_bubble(16, 128), 1, "t", None);
    // Too many for words: all of one kind are one path in a lane.
    assert!(!s.contains("W63") && cells(&s).is_empty());
    assert!(s.contains("<title>128 × backward, gradients of the weights, pipeline rank 3</title>"));
    // Forwards are too narrow for a number, backwards have theirs, in a font that fits.
    let s = svg(&sample::interleaved(16, 64, 2), 2, "t", None);
    assert!(s.contains(">63</text>") && !s.contains("F63"));
    assert!(s.contains("<title>64 × forward of chunk 1, pipeline rank 0</title>"));
    assert_eq!((joined(&s), cells(&s).len()), (2 * 16 * 64, 2 * 16 * 64));
    // The gradients of the weights are the foot of a whole backward: a path of all of a chunk.
    let (foot, later) = ("fill=\"#00604c\"", "fill=\"#80b0a6\"");
    assert_eq!(s.matches(foot).count(), 1 + 16, "and the legend");
    assert_eq!(s.matches(later).count(), 16);
}

#[test]
fn memory_is_stacked_and_has_a_limit() {
    let t = sample::one_f_one_b(4, 8);
    let s = svg(&t, 1, "t", Some(&memory(&t, Some(2 << 30))));
    for part in ["peak</text>", ">2.50 GiB<", "over by", ">512.00 MiB<", "dashed: the 2.00 GiB"] {
        assert!(s.contains(part), "{part}");
    }
    assert!(s.contains("pipeline rank 0, activations: up to 1.00 GiB"));
    assert!(s.contains(">1 GiB</text>"), "{s}");
    let far = svg(&t, 1, "t", Some(&memory(&t, Some(80 << 30))));
    assert!(far.contains("far above") && !far.contains("stroke-dasharray"));
    assert!(!s.contains("gaps"));
    let gaps = Memory { gaps: vec![0, 1 << 20, 0, 0], ..memory(&t, None) };
    // Gaps that are next to nothing of the peak are not told.
    assert!(!svg(&t, 1, "t", Some(&gaps)).contains("gaps"));
    let gaps = Memory { gaps: vec![0, 30 << 20, 0, 0], ..gaps };
    assert_eq!(svg(&t, 1, "t", Some(&gaps)).matches(">gaps 30.00 MiB</text>").count(), 1);
}

/// Ranks with nearly as much of every kind are one lane of memory, drawn as the fullest.
#[test]
fn ranks_that_are_alike_are_one_lane() {
    let t = sample::gpipe(4, 8);
    let mut m = memory(&t, None);
    m.arenas = vec![1000 << 20, 1010 << 20, 1005 << 20, 1100 << 20];
    let s = svg(&t, 1, "t", Some(&m));
    assert!(s.contains(">pp 0–2</text>") && s.contains("less than 2 %"), "{s}");
    assert_eq!(s.matches(">1010.00 MiB</text>").count(), 1);
    assert!(!s.contains(">1000.00 MiB</text>") && s.matches(">pp 3</text>").count() == 3);
    let alone = svg(&sample::one_f_one_b(1, 2), 1, "t", None);
    assert!(alone.contains(">all ranks</text>") && !alone.contains("bubble"));
}

#[test]
fn odd_times_stay_inside() {
    let slots = vec![
        slot(ActionKind::Forward, 0, 0, 5e300, f64::MAX),
        slot(ActionKind::Weight, 0, 1, 0.0, 0.0),
    ];
    let odd = vec![slot(ActionKind::Input, 0, 0, f64::NAN, f64::INFINITY)];
    let t = Timeline { ranks: vec![slots, odd], order: vec![] };
    let odd = |time: f64| Sample { time, bytes: [usize::MAX; STACK.len()] };
    let ranks = vec![vec![odd(f64::NAN), odd(9.0), odd(f64::INFINITY)]];
    let m = Memory { ranks, limit: Some(0), ..Memory::default() };
    let s = svg(&t, 1, "t", Some(&m));
    for (words, _, from, to) in cells(&s) {
        assert!(from >= 112.0 && to <= 8000.0, "{words} {from} {to}");
    }
}

#[test]
fn before_and_after_and_one_rank() {
    let t = sample::one_f_one_b(4, 8);
    let mut step = Step::of_actions(t.clone());
    step.enter = vec![(-1.0, 0.0); 4];
    step.finish = (0..4).map(|rank| step.finish(rank).0).map(|end| (end, end + 2.0)).collect();
    let m = memory(&t, None);
    let draw = |only| {
        let d = Drawn { chunks: 1, title: "t", unit: "ms", memory: Some(&m), only };
        super::svg(&step, &d)
    };
    let s = draw(None);
    check_xml(&s);
    assert_eq!(s.matches("<title>enter, once per step").count(), 4);
    assert_eq!(s.matches("<title>finish, once per step").count(), 4);
    assert!(s.contains("makespan 33,") && s.contains("time in ms"));
    let one = draw(Some(2));
    check_xml(&one);
    assert!(one.contains(">pp 2</text>") && !one.contains(">pp 1</text>"));
    assert_eq!(one.matches("enter, once per step, pipeline rank").count(), 1);
    assert!(one.contains("bubble 27.3 % of the time of 4 pipeline ranks"), "of all of them");
}
