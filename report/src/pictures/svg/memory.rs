//! Memory over time: a panel per pipeline rank, its kinds on top of each other.

use super::frame::{Frame, LEFT, LINE, px};
use super::{Drawn, Memory};
use crate::pictures::palette::{STACK, memory, named};
use crate::pictures::step::Sample;
use shardc_ir::diag::bytes;

/// Height of a panel.
const PANEL: f64 = 72.0;
/// Between panels.
const BETWEEN: f64 = 14.0;
/// Between the lines of texts beside a panel.
const TEXT: f64 = 14.0;
/// Ranks with peaks nearer than this part of them are one lane.
const ALIKE: f64 = 0.02;
/// The part of a peak below which gaps are not worth a line.
const FEW: f64 = 0.001;

/// Legend and panels from `y` on. Returns the bottom.
pub fn draw(out: &mut String, f: &Frame, m: &Memory, d: &Drawn, y: f64) -> f64 {
    let shown: Vec<usize> = (0..m.ranks.len()).filter(|&r| d.shows(r)).collect();
    let kinds = 0..STACK.len();
    let most_of = |rank: usize, k: usize| m.ranks[rank].iter().map(|s| s.bytes[k]).max();
    let occurs = |k: &usize| shown.iter().any(|&r| most_of(r, *k).unwrap_or(0) > 0);
    let kinds: Vec<usize> = kinds.filter(occurs).collect();
    let arena = |rank: usize| m.arenas.get(rank).copied().unwrap_or(peak(&m.ranks[rank]));
    let most = shown.iter().map(|&r| arena(r).max(peak(&m.ranks[r]))).max().unwrap_or(0);
    // A limit far above everything would press the areas flat.
    let limit = m.limit.filter(|&l| l <= most.max(1).saturating_mul(4));
    let full = most.max(limit.unwrap_or(0)).max(1) as f64 * 1.06;
    let mut head = String::from("memory of a rank");
    match (m.limit, limit) {
        (Some(l), None) => {
            head += &format!("; each has {}, far above what is shown", bytes(l));
        }
        (Some(l), _) => head += &format!("; dashed: the {} each has", bytes(l)),
        _ => {}
    }
    let of = |rank: usize| Peak {
        all: arena(rank),
        kinds: kinds.iter().map(|&k| most_of(rank, k).unwrap_or(0)).collect(),
    };
    let lanes = joined(&shown, of);
    if lanes.len() < shown.len() {
        head += "; ranks that differ by less than 2 % are one lane, drawn as the fullest";
    }
    out.push_str(&format!("<text class=\"b\" x=\"8\" y=\"{}\">{head}</text>\n", px(y + 10.0)));
    let items: Vec<(Vec<String>, String)> = kinds
        .iter()
        .map(|&k| (vec![memory(STACK[k]).light.into()], STACK[k].name().into()))
        .collect();
    let top = f.legend(out, y + LINE, &items) + LINE;
    for (row, (first, last, rank)) in lanes.iter().copied().enumerate() {
        let base = top + PANEL + row as f64 * (PANEL + BETWEEN);
        let panel = Panel { f, base, full };
        panel.axis(out, &super::lane(first, last, m.ranks.len()));
        for &k in kinds.iter().rev() {
            // The highest is drawn first; those below it cover their part.
            out.push_str(&format!(
                "<path fill=\"{}\" d=\"{}\"><title>pipeline rank {rank}, {}: up to {}</title></path>\n",
                memory(STACK[k]).light,
                panel.path(&m.ranks[rank], k),
                STACK[k].name(),
                bytes(most_of(rank, k).unwrap_or(0))
            ));
        }
        let gaps = m.gaps.get(rank).copied().unwrap_or(0);
        panel.peak(out, (arena(rank), gaps), m.limit, limit);
    }
    let bottom = top + lanes.len() as f64 * (PANEL + BETWEEN);
    f.grid(out, top, bottom - BETWEEN);
    bottom
}

/// The most that a rank has: in all, and of each kind.
struct Peak {
    all: usize,
    kinds: Vec<usize>,
}

/// Neighbouring ranks that are nearly alike, as the first, the last, and the fullest of them.
fn joined(ranks: &[usize], of: impl Fn(usize) -> Peak) -> Vec<(usize, usize, usize)> {
    let near = |a: usize, b: usize, whole: usize| a.abs_diff(b) as f64 <= ALIKE * whole as f64;
    let mut out: Vec<(usize, usize, usize)> = vec![];
    for &rank in ranks {
        let own = of(rank);
        let alike = |&other: &usize| {
            let other = of(other);
            let mut kinds = own.kinds.iter().zip(&other.kinds);
            near(own.all, other.all, own.all) && kinds.all(|(&a, &b)| near(a, b, own.all))
        };
        match out.last_mut() {
            Some(lane) if ranks.iter().filter(|r| (lane.0..=lane.1).contains(r)).all(alike) => {
                lane.1 = rank;
                if own.all > of(lane.2).all {
                    lane.2 = rank;
                }
            }
            _other => out.push((rank, rank, rank)),
        }
    }
    out
}

/// The most at once.
fn peak(samples: &[Sample]) -> usize {
    samples.iter().map(Sample::total).max().unwrap_or(0)
}

/// Where a rank's areas stand.
struct Panel<'a> {
    f: &'a Frame,
    /// The position of no bytes.
    base: f64,
    /// Bytes of the whole height.
    full: f64,
}

impl Panel<'_> {
    fn y(&self, n: usize) -> f64 {
        self.base - PANEL * n as f64 / self.full
    }

    /// The upper end of a kind, in steps from change to change. Of those within a pixel the highest stays, and
    /// the last where both are seen.
    fn path(&self, samples: &[Sample], kind: usize) -> String {
        let top = |s: &Sample| s.bytes[..=kind].iter().fold(0usize, |a, b| a.saturating_add(*b));
        let seen = |a: usize, b: usize| (self.y(a) - self.y(b)).abs() >= 0.3;
        let mut out = String::new();
        let mut drawn = 0;
        let mut last = LEFT;
        let mut i = 0;
        while i < samples.len() {
            let x = self.f.x(samples[i].time);
            let near = samples[i..].iter().take_while(|s| self.f.x(s.time) - x < 1.0).count();
            let near = &samples[i..i + near.max(1)];
            let high = near.iter().map(top).max().unwrap_or(0);
            let end = near.last().map_or(0, top);
            if out.is_empty() {
                out = format!("M{} {}", px(x), px(self.base));
            }
            if seen(high, drawn) {
                out.push_str(&format!("H{}V{}", px(x), px(self.y(high))));
                (drawn, last) = (high, x + 1.0);
            }
            if seen(end, drawn) {
                // What lasts no time is a pixel wide.
                out.push_str(&format!("H{}V{}", px(x + 1.0), px(self.y(end))));
                (drawn, last) = (end, x + 1.0);
            }
            i += near.len();
        }
        out + &format!("H{}V{}Z", px(self.f.right().max(last)), px(self.base))
    }

    /// Name of the rank, and bytes at round heights.
    fn axis(&self, out: &mut String, name: &str) {
        let (left, right) = (px(LEFT), px(self.f.right()));
        out.push_str(&format!(
            "<rect x=\"{left}\" y=\"{}\" width=\"{}\" height=\"{PANEL}\" fill=\"{}\"/>\
             <text class=\"b\" x=\"8\" y=\"{}\">{name}</text>\n",
            px(self.base - PANEL),
            px(self.f.lanes),
            named("ground").light,
            px(self.base - PANEL / 2.0 + 4.0)
        ));
        // Powers of two are round in every unit.
        let step = (self.full / 3.0).log2().ceil().max(0.0).exp2();
        let mut n = 0.0;
        while n <= self.full {
            let y = self.base - PANEL * n / self.full;
            out.push_str(&format!(
                "<text class=\"e\" x=\"{}\" y=\"{}\">{}</text>\
                 <path class=\"g\" d=\"M{left} {}H{right}\"/>\n",
                px(LEFT - 8.0),
                px(y + 3.0),
                bytes(n as usize).replace(".00", ""),
                px(y)
            ));
            n += step;
        }
    }

    /// The most at once as a line with its number, and the line that it must stay below.
    fn peak(
        &self,
        out: &mut String,
        (peak, gaps): (usize, usize),
        has: Option<usize>,
        line: Option<usize>,
    ) {
        if let Some(limit) = line {
            let d = format!("M{} {}H{}", px(LEFT), px(self.y(limit)), px(self.f.right()));
            out.push_str(&format!(
                "<path d=\"{d}\" stroke=\"{}\" stroke-width=\"3\"/>\
                 <path d=\"{d}\" stroke=\"{}\" stroke-width=\"1.5\" \
                 stroke-dasharray=\"6 3\"/>\n",
                named("panel").light,
                named("over").light
            ));
        }
        let over = has.filter(|&l| peak > l).map(|l| bytes(peak - l));
        let class = if over.is_some() { "over" } else { "" };
        let top = self.y(peak);
        out.push_str(&format!(
            "<path d=\"M{} {}H{}\" stroke=\"{}\"/>\n",
            px(LEFT),
            px(top),
            px(self.f.right()),
            named(if over.is_some() { "over" } else { "ink" }).light
        ));
        let mut lines = vec![(class, "peak".to_string()), (class, bytes(peak))];
        lines.extend(over.into_iter().flat_map(|n| [("over", "over by".to_string()), ("over", n)]));
        if gaps as f64 >= FEW * peak as f64 && gaps > 0 {
            lines.push(("", format!("gaps {}", bytes(gaps))));
        }
        // Beside the line, and all of them beside the panel.
        let last = self.base - TEXT * (lines.len() - 1) as f64;
        let first = (top + 4.0).min(last).max(self.base - PANEL + 9.0);
        let x = px(self.f.right() + 8.0);
        for (i, (class, text)) in lines.iter().enumerate() {
            let y = px(first + TEXT * i as f64);
            out.push_str(&format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>\n"));
        }
    }
}
