//! A schedule as one SVG file: a lane per rank of the pipeline and, below, its memory over time.
//! The file needs nothing else: no scripts, no style sheets, no fonts but the reader's own.

mod frame;
mod lanes;
mod memory;

use super::measure::{bubble, number, span};
use frame::{Frame, LINE, escape};
use shardc_ir::schedule::Timeline;

/// Bytes of one class over time: `points` are times and the bytes from then on, in order.
#[derive(Clone, PartialEq, Debug)]
pub struct Area {
    pub name: String,
    pub points: Vec<(f64, usize)>,
}

/// What each rank keeps, class by class, the lowest first.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Memory {
    pub ranks: Vec<Vec<Area>>,
    /// Size of each rank's arena: what is shown, and gaps. Empty: what is shown.
    pub arenas: Vec<usize>,
    /// Bytes a rank has.
    pub limit: Option<usize>,
}

/// The schedule as an SVG file. `chunks`: stages per rank.
pub fn svg(t: &Timeline, chunks: usize, title: &str, memory: Option<&Memory>) -> String {
    let frame = Frame::new(t);
    let makespan = span(t).1;
    let ranks = t.ranks.len();
    let mut body = String::new();
    let summary = format!(
        "makespan {}, bubble {:.1} % of the time of {ranks} rank{}",
        number(makespan),
        100.0 * bubble(t),
        if ranks == 1 { "" } else { "s" }
    );
    body.push_str(&format!(
        "<text class=\"h\" x=\"8\" y=\"22\">{}</text>\n<text x=\"8\" y=\"40\">{summary}</text>\n",
        escape(title)
    ));
    let mut y = lanes::draw(&mut body, &frame, t, chunks, 40.0 + LINE);
    if let Some(m) = memory.filter(|m| !m.ranks.is_empty()) {
        y = memory::draw(&mut body, &frame, m, y + LINE);
    }
    let (width, height) = (frame.width, y.ceil() + 10.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{width}\" \
         height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n<title>{}</title>\n{STYLE}\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n",
        escape(title)
    )
}

/// Colours of cells are attributes, because their shade says the chunk. `n`: numbers in cells.
const STYLE: &str = "<style>
text { font: 11px sans-serif; fill: #222 }
.h { font-size: 16px; font-weight: bold }
.b { font-weight: bold }
.n { font-size: 10px; text-anchor: middle; pointer-events: none }
.e { text-anchor: end }
.m { text-anchor: middle }
.over { fill: #b3261e; font-weight: bold }
.g { stroke: #000; stroke-opacity: .13; pointer-events: none }
.c { stroke: #fff; stroke-width: .8 }
</style>
<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
<rect width=\"6\" height=\"6\" fill=\"#f4f4f4\"/><path d=\"M0 6 6 0\" stroke=\"#cfcfcf\"/>\
</pattern></defs>
";

#[cfg(test)]
mod tests;
