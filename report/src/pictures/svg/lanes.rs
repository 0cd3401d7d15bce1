//! The lanes: who does what, and when nobody does.

use super::Drawn;
use super::frame::{DIGIT, Frame, LEFT, LINE, px};
use crate::pictures::measure::{Chunks, KINDS, number};
use crate::pictures::palette::{action, named, pale};
use crate::pictures::step::Step;
use shardc_ir::schedule::{ActionKind, Slot};
use std::collections::BTreeMap;

/// Height of a lane.
const LANE: f64 = 22.0;
/// The part of a whole backward's height that stands for the gradients of the weights.
const FOOT: f64 = 0.3;
/// The smallest font of cells, in pixels.
const SMALLEST: f64 = 7.0;

/// Legend, axis and lanes from `y` on. Returns the bottom.
pub fn draw(out: &mut String, f: &Frame, step: &Step, d: &Drawn, y: f64) -> f64 {
    let t = &step.timeline;
    let chunks = Chunks::new(t, d.chunks);
    let top = f.legend(out, y, &legend(step, &chunks)) + LINE + 4.0;
    let shown: Vec<usize> = (0..t.ranks.len()).filter(|&r| d.shows(r)).collect();
    let bottom = top + shown.len() as f64 * (LANE + 3.0);
    for (row, &rank) in shown.iter().enumerate() {
        let (slots, y) = (&t.ranks[rank], top + row as f64 * (LANE + 3.0));
        let text = px(y + LANE / 2.0 + 4.0);
        let name = super::lane(rank, rank, t.ranks.len());
        out.push_str(&format!(
            "<text class=\"e b\" x=\"{}\" y=\"{text}\">{name}</text>\
             <text class=\"b\" x=\"{}\" y=\"{text}\">{name}</text>\n",
            px(LEFT - 8.0),
            px(f.right() + 8.0)
        ));
        idle(out, f, step, rank, y);
        around(out, f, step, rank, y);
        let (wide, narrow): (Vec<&Slot>, Vec<&Slot>) =
            slots.iter().partition(|s| label(f, s).is_some());
        joined(out, f, &narrow, &chunks, rank, y);
        wide.iter().for_each(|s| cell(out, f, s, &chunks, rank, y));
        feet(out, f, slots, &chunks, rank, y);
        wide.iter().for_each(|s| write(out, f, s, y));
    }
    f.grid(out, top, bottom);
    bottom
}

/// The last chunk is the palest.
fn shade(kind: ActionKind, chunk: usize, count: usize) -> String {
    pale(action(kind).light, 0.5 * chunk as f64 / (count.max(2) - 1) as f64)
}

fn words(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::Forward => "forward",
        ActionKind::Backward => "backward",
        ActionKind::Input => "backward, gradient of the input",
        ActionKind::Weight => "backward, gradients of the weights",
    }
}

fn legend(step: &Step, chunks: &Chunks) -> Vec<(Vec<String>, String)> {
    let has = |k: &&ActionKind| step.timeline.ranks.iter().flatten().any(|s| s.action.kind == **k);
    let of = |&k: &ActionKind| {
        let mut fills = vec![shade(k, 0, chunks.count)];
        if k == ActionKind::Backward {
            fills.push(shade(ActionKind::Weight, 0, chunks.count));
        }
        (fills, format!("{} {}", k.letter(), words(k)))
    };
    let mut all: Vec<(Vec<String>, String)> = KINDS.iter().filter(has).map(of).collect();
    if chunks.count > 1 {
        let fills =
            (0..chunks.count).map(|c| shade(ActionKind::Forward, c, chunks.count)).collect();
        all.push((fills, format!("the {} chunks of a rank, first to last", chunks.count)));
    }
    if step.enter.iter().chain(&step.finish).any(|x| x.1 > x.0) {
        all.push((vec![named("edge").light.into()], "once per step: enter, finish".into()));
    }
    all.push((vec!["url(#idle)".into()], "idle".into()));
    all.push((vec![], "number in a cell: microbatch".into()));
    all
}

/// What is left of a lane where nothing is done.
fn idle(out: &mut String, f: &Frame, step: &Step, rank: usize, y: f64) {
    let mut from = f.begin;
    let edges = [step.enter(rank), step.finish(rank)];
    let slots = step.timeline.ranks[rank].iter().map(|s| (s.start, s.end));
    let end = f.begin + f.length;
    let all = [edges[0]].into_iter().chain(slots).chain([edges[1], (end, end)]);
    for (start, stop) in all {
        // Sums of times differ in their last digits.
        if start - from > 1e-9 * f.length {
            let length = number(start - from);
            let [a, b] = [from, start].map(|time| number(time - f.zero));
            out.push_str(&format!(
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" fill=\"url(#idle)\">\
                 <title>idle for {length}, {a}–{b}</title></rect>\n",
                px(f.x(from)),
                px(y),
                px(f.x(start) - f.x(from))
            ));
        }
        from = from.max(stop);
    }
}

/// What a rank does before its first action and after its last.
fn around(out: &mut String, f: &Frame, step: &Step, rank: usize, y: f64) {
    let (before, after) = (step.enter(rank), step.finish(rank));
    for (name, (from, to)) in [("enter", before), ("finish", after)].into_iter() {
        if to > from {
            out.push_str(&format!(
                "<rect class=\"s\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" fill=\"{}\">\
                 <title>{name}, once per step, pipeline rank {rank}</title></rect>\n",
                px(f.x(from)),
                px(y),
                px((f.x(to) - f.x(from)).max(0.6)),
                named("edge").light
            ));
        }
    }
}

/// Paths of boxes that have one colour in a lane.
#[derive(Default)]
struct Boxes {
    path: String,
    count: usize,
}

impl Boxes {
    fn add(&mut self, f: &Frame, s: &Slot, (top, tall): (f64, f64)) {
        // Not even an action that takes no time is invisible.
        let (from, width) = (f.x(s.start), px((f.x(s.end) - f.x(s.start) - 0.4).max(0.6)));
        self.path += &format!("M{} {}h{width}v{}h-{width}z", px(from), px(top), px(tall));
        self.count += 1;
    }
}

/// Cells in which nothing can be read: all of one colour are one path.
fn joined(out: &mut String, f: &Frame, slots: &[&Slot], chunks: &Chunks, rank: usize, y: f64) {
    let mut all: BTreeMap<(usize, ActionKind), Boxes> = BTreeMap::new();
    for s in slots {
        let key = (chunks.of(rank, s.action.stage), s.action.kind);
        all.entry(key).or_default().add(f, s, (y, LANE));
    }
    for ((chunk, kind), Boxes { path, count }) in all {
        let of = if chunks.count > 1 { format!(" of chunk {chunk}") } else { String::new() };
        out.push_str(&format!(
            "<path fill=\"{}\" d=\"{path}\"><title>{count} × {}{of}, pipeline rank {rank}</title></path>\n",
            shade(kind, chunk, chunks.count),
            words(kind),
        ));
    }
}

/// The feet of all whole backwards.
fn feet(out: &mut String, f: &Frame, slots: &[Slot], chunks: &Chunks, rank: usize, y: f64) {
    let mut all: BTreeMap<usize, Boxes> = BTreeMap::new();
    for s in slots.iter().filter(|s| s.action.kind == ActionKind::Backward) {
        let of = all.entry(chunks.of(rank, s.action.stage)).or_default();
        of.add(f, s, (y + LANE * (1.0 - FOOT), LANE * FOOT));
    }
    for (chunk, Boxes { path, .. }) in all {
        let fill = shade(ActionKind::Weight, chunk, chunks.count);
        out.push_str(&format!("<path class=\"s\" fill=\"{fill}\" d=\"{path}\"/>\n"));
    }
}

fn cell(out: &mut String, f: &Frame, s: &Slot, chunks: &Chunks, rank: usize, y: f64) {
    let (a, chunk) = (s.action, chunks.of(rank, s.action.stage));
    let (from, to) = (f.x(s.start), f.x(s.end));
    let letter = a.kind.letter();
    let place = match chunks.count {
        1 => format!("stage {}", a.stage),
        _ => format!("stage {} (chunk {chunk})", a.stage),
    };
    let [start, end] = [s.start, s.end].map(|time| number(time - f.zero));
    out.push_str(&format!(
        "<rect class=\"c\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" fill=\"{}\">\
         <title>{letter}{m}: {} of microbatch {m}, {place}, pipeline rank {rank}, {start}–{end}</title>\
         </rect>\n",
        px(from),
        px(y),
        px(to - from),
        shade(a.kind, chunk, chunks.count),
        words(a.kind),
        m = a.microbatch,
    ));
}

/// Letter and microbatch in a cell, with the font that has room there; nothing if none that is read has.
fn label(f: &Frame, s: &Slot) -> Option<(String, f64)> {
    let number = s.action.microbatch.to_string();
    let width = f.x(s.end) - f.x(s.start);
    let font = |digits: usize| 10.0 * ((width - 2.0) / (digits as f64 * DIGIT)).min(1.0);
    // Cells of one length all have a letter, or none has.
    let with_letter = font(f.digits + 1) >= SMALLEST;
    let text = match with_letter {
        true => format!("{}{number}", s.action.kind.letter()),
        false => number,
    };
    let font = font(f.digits + usize::from(with_letter));
    (font >= SMALLEST).then_some((text, font))
}

/// The label of a cell, above its foot.
fn write(out: &mut String, f: &Frame, s: &Slot, y: f64) {
    let Some((text, font)) = label(f, s) else { return };
    // A style, because the style sheet stands above attributes.
    let mut style = String::new();
    if font < 10.0 {
        style += &format!("font-size:{}px;", px(font));
    }
    if s.action.kind == ActionKind::Weight {
        style += &format!("fill:{}", named("panel").light);
    }
    let style = if style.is_empty() { style } else { format!(" style=\"{style}\"") };
    let up = if s.action.kind == ActionKind::Backward { LANE * FOOT / 2.0 } else { 0.0 };
    out.push_str(&format!(
        "<text class=\"n\"{style} x=\"{}\" y=\"{}\">{text}</text>\n",
        px((f.x(s.start) + f.x(s.end)) / 2.0),
        px(y + (LANE + font * 0.72) / 2.0 - up)
    ));
}
