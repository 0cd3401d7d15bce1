//! Where times and texts stand in the picture.

use crate::pictures::measure::{lengths, number, round_step};
use crate::pictures::step::Step;

/// Left of the lanes, for names and bytes.
pub const LEFT: f64 = 112.0;
/// Right of them, for names and peaks.
const RIGHT: f64 = 96.0;
/// Between the lines of texts.
pub const LINE: f64 = 18.0;
/// Widths between which the lanes stay, however short their actions are: the whole step is seen at once,
/// and what is small can be magnified.
const WIDTHS: (f64, f64) = (800.0, 2400.0);
/// About as wide is a digit in a cell of the usual font.
pub const DIGIT: f64 = 6.4;

/// Times as positions.
pub struct Frame {
    /// When the first rank begins, and how long it is until the last ends.
    pub begin: f64,
    pub length: f64,
    /// What times are counted from: the first action.
    pub zero: f64,
    /// Pixels of the lanes.
    pub lanes: f64,
    /// Pixels of the whole picture.
    pub width: f64,
    /// Digits of the greatest microbatch.
    pub digits: usize,
}

impl Frame {
    /// As wide as most actions need for their numbers.
    pub fn new(step: &Step) -> Frame {
        let t = &step.timeline;
        let (begin, end) = step.span();
        let length = end - begin;
        let lengths = lengths(t);
        let most = t.ranks.iter().flatten().map(|s| s.action.microbatch).max().unwrap_or(0);
        let digits = most.to_string().len();
        let cell = |letters: usize| letters as f64 * DIGIT + 9.0;
        let short = lengths.get(lengths.len() / 5).map_or(0.0, |d| length / d);
        let lanes = (short * cell(digits + 1)).clamp(WIDTHS.0, WIDTHS.1).ceil();
        let zero = crate::pictures::measure::span(t).0;
        Frame { begin, length, zero, lanes, width: LEFT + lanes + RIGHT, digits }
    }

    /// The position of a time.
    pub fn x(&self, time: f64) -> f64 {
        let part = (time - self.begin) / self.length;
        LEFT + if part.is_finite() { part.clamp(0.0, 1.0) * self.lanes } else { 0.0 }
    }

    /// Right end of the lanes.
    pub fn right(&self) -> f64 {
        LEFT + self.lanes
    }

    /// Round times since the first action, with their positions.
    pub fn ticks(&self) -> Vec<(String, f64)> {
        let room = (number(self.length).len() as f64 * 7.0 + 24.0).max(60.0);
        let step = round_step(self.length * room / self.lanes);
        let count = ((self.begin + self.length - self.zero) / step).floor() as usize;
        let times = (0..=count).map(|k| k as f64 * step);
        times.map(|time| (number(time), self.x(self.zero + time))).collect()
    }

    /// Lines through `top..bottom` at round times, which stand above.
    pub fn grid(&self, out: &mut String, top: f64, bottom: f64) {
        let mut path = String::new();
        for (label, x) in self.ticks() {
            out.push_str(&format!(
                "<text class=\"m\" x=\"{}\" y=\"{}\">{label}</text>\n",
                px(x),
                px(top - 5.0)
            ));
            path.push_str(&format!("M{} {}V{}", px(x), px(top - 3.0), px(bottom)));
        }
        out.push_str(&format!("<path class=\"g\" d=\"{path}\"/>\n"));
    }

    /// Swatches with words, in as many lines as they need. Returns the bottom.
    pub fn legend(&self, out: &mut String, y: f64, items: &[(Vec<String>, String)]) -> f64 {
        let (mut x, mut y) = (LEFT, y);
        for (fills, words) in items {
            let wide = fills.len() as f64 * 14.0 + 5.0 + words.chars().count() as f64 * 6.6;
            if x > LEFT && x + wide > self.width - 8.0 {
                (x, y) = (LEFT, y + LINE);
            }
            for (i, fill) in fills.iter().enumerate() {
                out.push_str(&format!(
                    "<rect class=\"c\" x=\"{}\" y=\"{}\" width=\"13\" height=\"12\" \
                     fill=\"{fill}\"/>",
                    px(x + 14.0 * i as f64),
                    px(y)
                ));
            }
            out.push_str(&format!(
                "<text x=\"{}\" y=\"{}\">{}</text>\n",
                px(x + 14.0 * fills.len() as f64 + 4.0),
                px(y + 10.0),
                escape(words)
            ));
            x += wide + 18.0;
        }
        y + LINE
    }
}

/// A position in as few digits as show.
pub fn px(x: f64) -> String {
    let s = format!("{x:.1}");
    s.strip_suffix(".0").unwrap_or(&s).into()
}

/// A text as XML and HTML have it. Control characters have no place there.
pub fn escape(s: &str) -> String {
    let mut out = String::new();
    for c in s.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\t' | '\n' | '\r' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
