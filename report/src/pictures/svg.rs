//! A step as one SVG file: a lane per pipeline rank and, below, its memory over time.
//! The file needs nothing else: no scripts, no style sheets, no fonts but the reader's own.

mod frame;
mod lanes;
mod memory;

use super::measure::{bubble, number, span};
use super::palette::named;
use super::step::{Sample, Step};
pub use frame::escape;
use frame::{Frame, LINE};

/// What each pipeline rank keeps.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Memory {
    /// By rank, in the order of time.
    pub ranks: Vec<Vec<Sample>>,
    /// Size of each rank's arena: what is shown, and gaps. Empty: what is shown.
    pub arenas: Vec<usize>,
    /// What of each arena is between tensors at its peak. Empty: nothing.
    pub gaps: Vec<usize>,
    /// Bytes a rank has.
    pub limit: Option<usize>,
}

/// What is drawn besides a step.
#[derive(Clone, Debug, Default)]
pub struct Drawn<'a> {
    /// Stages per rank.
    pub chunks: usize,
    pub title: &'a str,
    /// What a time of 1 is.
    pub unit: &'a str,
    pub memory: Option<&'a Memory>,
    /// The one pipeline rank that is shown; else all are.
    pub only: Option<usize>,
}

impl Drawn<'_> {
    fn shows(&self, rank: usize) -> bool {
        self.only.is_none_or(|only| only == rank)
    }
}

/// What a lane of some pipeline ranks, the first and the last, is called, out of so many.
fn lane(first: usize, last: usize, ranks: usize) -> String {
    match (ranks, first == last) {
        (1, _) => "all ranks".into(),
        (_, true) => format!("pp {first}"),
        (_, false) => format!("pp {first}–{last}"),
    }
}

/// The step as an SVG file.
pub fn svg(step: &Step, d: &Drawn) -> String {
    let t = &step.timeline;
    let frame = Frame::new(step);
    let makespan = span(t).1;
    let ranks = t.ranks.len();
    let mut body = String::new();
    let idle = match ranks {
        1 => String::new(),
        _ => format!(", bubble {:.1} % of the time of {ranks} pipeline ranks", 100.0 * bubble(t)),
    };
    let summary = format!(
        "makespan {}{idle}{}",
        number(makespan),
        if d.unit.is_empty() { String::new() } else { format!("; time in {}", d.unit) },
    );
    body.push_str(&format!(
        "<text class=\"h\" x=\"8\" y=\"22\">{}</text>\n<text x=\"8\" y=\"40\">{summary}</text>\n",
        escape(d.title),
        summary = escape(&summary)
    ));
    let mut y = lanes::draw(&mut body, &frame, step, d, 40.0 + LINE);
    if let Some(m) = d.memory.filter(|m| !m.ranks.is_empty()) {
        y = memory::draw(&mut body, &frame, m, d, y + LINE);
    }
    let (width, height) = (frame.width, y.ceil() + 10.0);
    format!(
        "{BEGIN} role=\"img\" width=\"{width}\" \
         height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n<title>{}</title>\n{}\
         <rect width=\"100%\" height=\"100%\" fill=\"{}\"/>\n{body}</svg>\n",
        escape(d.title),
        style(),
        named("panel").light
    )
}

/// How a picture of a plan begins, and no other one does.
pub const BEGIN: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" data-by=\"shardc inspect\"";

/// Colours of cells are attributes, because their shade says the chunk. `n`: numbers in cells.
fn style() -> String {
    let of = |name: &str| named(name).light;
    format!(
        "<style>
text {{ font: 11px sans-serif; fill: {ink} }}
.h {{ font-size: 16px; font-weight: bold }}
.b {{ font-weight: bold }}
.n {{ font-size: 10px; text-anchor: middle; pointer-events: none }}
.e {{ text-anchor: end }}
.m {{ text-anchor: middle }}
.over {{ fill: {over}; font-weight: bold }}
.g {{ stroke: {ink}; stroke-opacity: .13; pointer-events: none }}
.c {{ stroke: {panel}; stroke-width: .8 }}
.s {{ pointer-events: none }}
</style>
<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
<rect width=\"6\" height=\"6\" fill=\"{idle}\"/><path d=\"M0 6 6 0\" stroke=\"{hatch}\"/>\
</pattern></defs>
",
        ink = of("ink"),
        over = of("over"),
        panel = of("panel"),
        idle = of("idle"),
        hatch = of("hatch"),
    )
}

#[cfg(test)]
mod tests;
