//! Memory over time: a panel per rank, its classes on top of each other.

use super::frame::{Frame, LEFT, LINE, escape, px};
use super::{Area, Memory};
use crate::report::bytes;

/// Height of a panel.
const PANEL: f64 = 72.0;
/// Between panels.
const BETWEEN: f64 = 14.0;
/// Colours of classes; more classes than these begin again.
const FILLS: [&str; 8] =
    ["#4a62b0", "#9fc4ee", "#dcc096", "#d9772f", "#6f2f55", "#f0f07a", "#2f7f5a", "#a0a0ac"];

/// Legend and panels from `y` on. Returns the bottom.
pub fn draw(out: &mut String, f: &Frame, m: &Memory, y: f64) -> f64 {
    let mut names: Vec<&str> = vec![];
    for a in m.ranks.iter().flatten() {
        if !names.contains(&a.name.as_str()) {
            names.push(&a.name);
        }
    }
    let stacks: Vec<Stack> = m.ranks.iter().map(|areas| Stack::new(areas)).collect();
    let most = stacks.iter().map(Stack::peak).max().unwrap_or(0);
    // A limit far above everything would press the areas flat.
    let limit = m.limit.filter(|&l| l <= most.max(1).saturating_mul(4));
    let full = most.max(limit.unwrap_or(0)).max(1) as f64 * 1.06;
    let mut head = String::from("memory of each rank");
    match (m.limit, limit) {
        (Some(l), None) => {
            head += &format!("; each has {}, far above what is shown", bytes(l));
        }
        (Some(l), _) => head += &format!("; dashed: the {} each has", bytes(l)),
        _ => {}
    }
    out.push_str(&format!("<text class=\"b\" x=\"8\" y=\"{}\">{head}</text>\n", px(y + 10.0)));
    let items: Vec<(Vec<String>, String)> =
        names.iter().enumerate().map(|(i, n)| (vec![fill(i).into()], n.to_string())).collect();
    let top = f.legend(out, y + LINE, &items) + LINE;
    for (rank, (areas, stack)) in m.ranks.iter().zip(&stacks).enumerate() {
        let base = top + PANEL + rank as f64 * (PANEL + BETWEEN);
        let panel = Panel { f, base, full };
        panel.axis(out, rank);
        for (k, a) in areas.iter().enumerate().rev() {
            // The highest is drawn first; those below it cover their part.
            let name = names.iter().position(|n| *n == a.name).unwrap_or(0);
            out.push_str(&format!(
                "<path fill=\"{}\" d=\"{}\"><title>rank {rank}, {}: up to {}</title></path>\n",
                fill(name),
                panel.path(&stack.times, &stack.tops[k]),
                escape(&a.name),
                bytes(a.points.iter().map(|p| p.1).max().unwrap_or(0))
            ));
        }
        let peak = m.arenas.get(rank).copied().unwrap_or(stack.peak());
        panel.peak(out, peak, m.limit, limit);
    }
    let bottom = top + m.ranks.len() as f64 * (PANEL + BETWEEN);
    f.grid(out, top, bottom - BETWEEN);
    bottom
}

fn fill(name: usize) -> &'static str {
    FILLS[name % FILLS.len()]
}

/// Areas on top of each other.
struct Stack {
    times: Vec<f64>,
    /// By area: the bytes of it and all below it, from each of `times` on.
    tops: Vec<Vec<usize>>,
}

impl Stack {
    fn new(areas: &[Area]) -> Stack {
        let mut changes: Vec<(f64, usize, usize)> = vec![];
        for (k, a) in areas.iter().enumerate() {
            changes.extend(a.points.iter().map(|&(time, n)| (time, k, n)));
        }
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut now = vec![0usize; areas.len()];
        let mut stack = Stack { times: vec![], tops: vec![vec![]; areas.len()] };
        for same in changes.chunk_by(|a, b| a.0 == b.0) {
            for &(_, k, n) in same {
                now[k] = n;
            }
            stack.times.push(same[0].0);
            let mut sum = 0usize;
            for (top, n) in stack.tops.iter_mut().zip(&now) {
                sum = sum.saturating_add(*n);
                top.push(sum);
            }
        }
        stack
    }

    fn peak(&self) -> usize {
        self.tops.last().and_then(|top| top.iter().copied().max()).unwrap_or(0)
    }
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

    /// Steps from change to change. Of those within half a pixel the highest and the last stay.
    fn path(&self, times: &[f64], tops: &[usize]) -> String {
        let mut out = format!("M{} {}", px(LEFT), px(self.base));
        let mut drawn = 0;
        let mut i = 0;
        while i < times.len() {
            let x = self.f.x(times[i]);
            let near = times[i..].iter().take_while(|t| self.f.x(**t) - x < 0.5).count().max(1);
            let high = tops[i..i + near].iter().copied().max().unwrap_or(0);
            let last = tops[i + near - 1];
            for (n, at) in [(high, x), (last, x)] {
                if n != drawn {
                    out.push_str(&format!("H{}V{}", px(at), px(self.y(n))));
                    drawn = n;
                }
            }
            i += near;
        }
        out + &format!("H{}V{}Z", px(self.f.right()), px(self.base))
    }

    /// Name of the rank, and bytes at round heights.
    fn axis(&self, out: &mut String, rank: usize) {
        let (left, right) = (px(LEFT), px(self.f.right()));
        out.push_str(&format!(
            "<rect x=\"{left}\" y=\"{}\" width=\"{}\" height=\"{PANEL}\" fill=\"#f4f4f4\"/>\
             <text class=\"b\" x=\"8\" y=\"{}\">rank {rank}</text>\n",
            px(self.base - PANEL),
            px(self.f.lanes),
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

    /// The most at once, and the line that it must stay below.
    fn peak(&self, out: &mut String, peak: usize, has: Option<usize>, line: Option<usize>) {
        if let Some(limit) = line {
            let d = format!("M{} {}H{}", px(LEFT), px(self.y(limit)), px(self.f.right()));
            out.push_str(&format!(
                "<path d=\"{d}\" stroke=\"#fff\" stroke-width=\"3\"/>\
                 <path d=\"{d}\" stroke=\"#b3261e\" stroke-width=\"1.5\" \
                 stroke-dasharray=\"6 3\"/>\n"
            ));
        }
        let x = px(self.f.right() + 8.0);
        let over = has.filter(|&l| peak > l);
        let class = if over.is_some() { "over" } else { "" };
        out.push_str(&format!(
            "<text class=\"{class}\" x=\"{x}\" y=\"{0}\">peak</text>\
             <text class=\"{class}\" x=\"{x}\" y=\"{1}\">{2}</text>\n",
            px(self.base - PANEL + 12.0),
            px(self.base - PANEL + 26.0),
            bytes(peak)
        ));
        if let Some(l) = over {
            out.push_str(&format!(
                "<text class=\"over\" x=\"{x}\" y=\"{0}\">over by</text>\
                 <text class=\"over\" x=\"{x}\" y=\"{1}\">{2}</text>\n",
                px(self.base - PANEL + 42.0),
                px(self.base - PANEL + 56.0),
                bytes(peak - l)
            ));
        }
    }
}
