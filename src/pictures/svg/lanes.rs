//! The lanes: who does what, and when nobody does.

use super::frame::{DIGIT, Frame, LEFT, LINE, px};
use crate::pictures::measure::{Chunks, KINDS, number};
use shardc_ir::schedule::{ActionKind, Slot, Timeline};

/// Height of a lane.
const LANE: f64 = 22.0;

/// Legend, axis and lanes from `y` on. Returns the bottom.
pub fn draw(out: &mut String, f: &Frame, t: &Timeline, chunks: usize, y: f64) -> f64 {
    let chunks = Chunks::new(t, chunks);
    let top = f.legend(out, y, &legend(t, &chunks)) + LINE + 4.0;
    let bottom = top + t.ranks.len() as f64 * (LANE + 3.0);
    for (rank, slots) in t.ranks.iter().enumerate() {
        let y = top + rank as f64 * (LANE + 3.0);
        let text = px(y + LANE / 2.0 + 4.0);
        out.push_str(&format!(
            "<text class=\"e b\" x=\"{}\" y=\"{text}\">rank {rank}</text>\
             <text class=\"b\" x=\"{}\" y=\"{text}\">rank {rank}</text>\n",
            px(LEFT - 8.0),
            px(f.right() + 8.0)
        ));
        idle(out, f, slots, y);
        for s in slots {
            cell(out, f, s, &chunks, rank, y);
        }
    }
    f.grid(out, top, bottom);
    bottom
}

/// Colours that stay apart for people who see few.
fn colour(kind: ActionKind) -> [f64; 3] {
    match kind {
        ActionKind::Forward => [86.0, 180.0, 233.0],
        ActionKind::Backward => [230.0, 159.0, 0.0],
        ActionKind::Input => [185.0, 115.0, 165.0],
        ActionKind::Weight => [140.0, 205.0, 120.0],
    }
}

/// The last chunk is the palest.
fn shade(kind: ActionKind, chunk: usize, count: usize) -> String {
    let pale = 0.62 * chunk as f64 / (count.max(2) - 1) as f64;
    let [r, g, b] = colour(kind).map(|c| (c + (255.0 - c) * pale).round() as u8);
    format!("#{r:02x}{g:02x}{b:02x}")
}

fn words(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::Forward => "forward",
        ActionKind::Backward => "backward",
        ActionKind::Input => "backward, gradient of the input",
        ActionKind::Weight => "backward, gradients of the weights",
    }
}

fn legend(t: &Timeline, chunks: &Chunks) -> Vec<(Vec<String>, String)> {
    let has = |k: &&ActionKind| t.ranks.iter().flatten().any(|s| s.action.kind == **k);
    let mut all: Vec<(Vec<String>, String)> = KINDS
        .iter()
        .filter(has)
        .map(|&k| (vec![shade(k, 0, chunks.count)], format!("{} {}", k.letter(), words(k))))
        .collect();
    if chunks.count > 1 {
        let fills =
            (0..chunks.count).map(|c| shade(ActionKind::Forward, c, chunks.count)).collect();
        all.push((fills, format!("the {} chunks of a rank, first to last", chunks.count)));
    }
    all.push((vec!["url(#idle)".into()], "idle".into()));
    all.push((vec![], "number in a cell: microbatch".into()));
    all
}

/// What is left of a lane where nothing is done.
fn idle(out: &mut String, f: &Frame, slots: &[Slot], y: f64) {
    let mut from = f.begin;
    let last = (f.begin + f.makespan, f.begin + f.makespan);
    for (start, end) in slots.iter().map(|s| (s.start, s.end)).chain([last]) {
        // Sums of times differ in their last digits.
        if start - from > 1e-9 * f.makespan {
            let length = number(start - from);
            let [a, b] = [from, start].map(|time| number(time - f.begin));
            out.push_str(&format!(
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" fill=\"url(#idle)\">\
                 <title>idle for {length}, {a}–{b}</title></rect>\n",
                px(f.x(from)),
                px(y),
                px(f.x(start) - f.x(from))
            ));
        }
        from = from.max(end);
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
    let [start, end] = [s.start, s.end].map(|time| number(time - f.begin));
    out.push_str(&format!(
        "<rect class=\"c\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" fill=\"{}\">\
         <title>{letter}{m}: {} of microbatch {m}, {place}, rank {rank}, {start}–{end}</title>\
         </rect>",
        px(from),
        px(y),
        // Not even an action that takes no time is invisible.
        px((to - from).max(0.6)),
        shade(a.kind, chunk, chunks.count),
        words(a.kind),
        m = a.microbatch,
    ));
    let number = a.microbatch.to_string();
    let room = to - from - 3.0;
    // Cells of one length all have a letter, or none has.
    let label =
        if room >= (f.digits + 1) as f64 * DIGIT { format!("{letter}{number}") } else { number };
    if room >= label.len() as f64 * DIGIT - 1.0 {
        out.push_str(&format!(
            "<text class=\"n\" x=\"{}\" y=\"{}\">{label}</text>",
            px((from + to) / 2.0),
            px(y + LANE / 2.0 + 3.6)
        ));
    }
    out.push('\n');
}
