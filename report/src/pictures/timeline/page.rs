//! The panels of a schedule: which columns they show, and what stands in each.

use super::WIDTH;
use crate::pictures::measure::{Chunks, lengths, number, round_step, span};
use shardc_ir::schedule::{ActionKind, Slot, Timeline};

/// As many lines of panels are shown without leaving anything out.
const LINES: usize = 60;
/// As many panels are shown of the warm-up, and of the cool-down, if something is left out.
const ENDS: usize = 3;
/// Columns of an action of middle length at most, however short the others are.
const LONG: f64 = 24.0;

/// What is drawn where. Columns count from the first action on, through all panels.
pub struct Page<'a> {
    t: &'a Timeline,
    pub chunks: Chunks,
    colour: bool,
    /// The one rank that is shown; else all are.
    only: Option<usize>,
    /// Time of column 0.
    begin: f64,
    /// Columns per unit of time.
    scale: f64,
    total: usize,
    /// Columns of a unit of time, or 1 where they are not whole.
    unit: usize,
    /// Columns of a panel.
    panel: usize,
    /// Columns left of the panels.
    margin: usize,
}

/// What stands in a column, and the colour behind it, if any.
type Spot = (char, Option<ActionKind>);

impl<'a> Page<'a> {
    pub fn new(t: &'a Timeline, chunks: usize, colour: bool, only: Option<usize>) -> Page<'a> {
        let (begin, makespan) = span(t);
        let margin = format!("pp {} ", t.ranks.len().saturating_sub(1)).len();
        let mut page = Page {
            t,
            chunks: Chunks::new(t, chunks),
            colour,
            only,
            begin,
            scale: 0.0,
            total: 0,
            unit: 1,
            panel: WIDTH - margin,
            margin,
        };
        let label = |(r, s): (usize, &Slot)| page.label(r, s).len();
        let label = page.slots().map(label).max().unwrap_or(0);
        let lengths = lengths(t);
        if let (Some(shortest), Some(middle)) = (lengths.first(), lengths.get(lengths.len() / 2)) {
            // A blank after each label tells cells apart.
            page.scale = ((label + 1) as f64 / shortest).min(LONG / middle);
        }
        if !page.scale.is_finite() {
            page.scale = 0.0;
        }
        page.total = (makespan * page.scale).round().min(1e15) as usize;
        // Panels of whole units of time, where a unit has whole columns.
        if page.scale >= 1.0 && page.scale.fract() == 0.0 && page.scale < page.panel as f64 {
            page.unit = page.scale as usize;
            page.panel -= page.panel % page.unit;
        }
        page
    }

    fn shows(&self, rank: usize) -> bool {
        self.only.is_none_or(|only| only == rank)
    }

    fn slots(&self) -> impl Iterator<Item = (usize, &'a Slot)> {
        self.t.ranks.iter().enumerate().flat_map(|(r, slots)| slots.iter().map(move |s| (r, s)))
    }

    /// With more than two chunks the stage stands in front, as in CSV files.
    fn label(&self, rank: usize, s: &Slot) -> String {
        let a = s.action;
        let short = format!("{}{}", a.kind.letter(), a.microbatch);
        match self.chunks.count {
            1 => short,
            2 if self.chunks.of(rank, a.stage) == 0 => short,
            2 => short.to_lowercase(),
            _ => a.to_string(),
        }
    }

    fn column(&self, time: f64) -> usize {
        (((time - self.begin) * self.scale).round() as usize).min(self.total)
    }

    /// Columns of each panel, and how many of them come before what is left out.
    fn windows(&self) -> (Vec<(usize, usize)>, usize) {
        let cut = |from: usize, count: usize| -> Vec<(usize, usize)> {
            let starts = (0..count).map(|i| from + i * self.panel);
            starts.map(|a| (a, (a + self.panel).min(self.total))).collect()
        };
        let count = self.total.div_ceil(self.panel);
        let of = |cols: usize| cols.div_ceil(self.panel).clamp(1, ENDS);
        let (head, tail) = (of(self.warm_up()), of(self.total - self.cool_down()));
        let few = count.saturating_mul(self.t.ranks.len() + 2) <= LINES;
        if few || count < head + tail + 2 {
            return (cut(0, count), count);
        }
        // The last panel is full; a unit of time begins it where one begins the others.
        let from = self.total.div_ceil(self.unit) * self.unit - tail * self.panel;
        (cut(0, head).into_iter().chain(cut(from, tail)).collect(), head)
    }

    /// The column at which all ranks have done some backward.
    fn warm_up(&self) -> usize {
        let first =
            |slots: &'a Vec<Slot>| slots.iter().find(|s| s.action.kind != ActionKind::Forward);
        self.t.ranks.iter().filter_map(first).map(|s| self.column(s.end)).max().unwrap_or(0)
    }

    /// The column at which the first rank has done its last forward.
    fn cool_down(&self) -> usize {
        let last =
            |slots: &'a Vec<Slot>| slots.iter().rfind(|s| s.action.kind == ActionKind::Forward);
        let ends = self.t.ranks.iter().filter_map(last).map(|s| self.column(s.end));
        ends.min().unwrap_or(self.total)
    }

    /// All panels, and notes on what they do not show.
    pub fn panels(&self) -> String {
        let (windows, head) = self.windows();
        let idle = |w: &(usize, usize)| vec![vec![('·', None); w.1 - w.0]; self.t.ranks.len()];
        let mut panels: Vec<Vec<Vec<Spot>>> = windows.iter().map(idle).collect();
        let (mut left_out, mut short, mut unseen) = (vec![], 0, 0);
        for (rank, s) in self.slots() {
            let (from, to) = (self.column(s.start), self.column(s.end));
            let parts: Vec<(usize, usize, usize)> = windows
                .iter()
                .enumerate()
                .map(|(i, w)| (i, from.max(w.0), to.min(w.1)))
                .filter(|(_, a, b)| a < b)
                .collect();
            if from >= to {
                unseen += 1;
            } else if parts.is_empty() {
                left_out.push(s.action.microbatch);
            }
            let label = self.label(rank, s);
            let room = |least: usize| parts.iter().position(|(_, a, b)| b - a >= least);
            let named = room(label.len() + 1).or(room(label.len()));
            short += usize::from(named.is_none() && !parts.is_empty());
            for (n, &(i, a, b)) in parts.iter().enumerate() {
                let text = match named {
                    Some(k) if k == n => label.as_str(),
                    None if n == 0 => letter(&label),
                    _ => "",
                };
                let blank = b == to && b - a > text.len().max(1);
                let row = &mut panels[i][rank][a - windows[i].0..b - windows[i].0];
                let fill = text.chars().chain(std::iter::repeat('─'));
                for (spot, c) in row.iter_mut().zip(fill) {
                    *spot = (c, Some(s.action.kind));
                }
                if let Some(last) = row.last_mut().filter(|_| blank) {
                    *last = (' ', None);
                }
            }
        }
        let mut out = String::new();
        for (i, (window, rows)) in windows.iter().zip(&panels).enumerate() {
            if i == head {
                out.push_str(&self.gap(windows[i - 1].1, window.0, &left_out));
            }
            out.push_str(&format!("\n{:<1$}{2}\n", "time", self.margin, self.ruler(*window)));
            for (rank, row) in rows.iter().enumerate().filter(|(r, _)| self.shows(*r)) {
                let rank = format!("pp {rank}");
                out.push_str(&format!("{rank:<0$}{1}\n", self.margin, self.line(row)));
            }
        }
        out.push('\n');
        if short + unseen > 0 {
            out.push_str(&format!(
                "{short} actions are too short for their number, {unseen} too short for a column\n"
            ));
        }
        out
    }

    /// What is between two panels.
    fn gap(&self, from: usize, to: usize, left_out: &[usize]) -> String {
        let time = |columns: usize| number(columns as f64 / self.scale);
        let all = self.slots().count();
        let mut out =
            format!("\n… {} of {} time units left out", time(to - from), time(self.total));
        if let (Some(first), Some(last)) = (left_out.iter().min(), left_out.iter().max()) {
            out.push_str(&format!(
                ": {} of {all} actions,\n  of microbatches {first} to {last}",
                left_out.len()
            ));
        }
        out + "; --svg FILE draws all\n"
    }

    /// Times, each beginning at its column.
    fn ruler(&self, (from, to): (usize, usize)) -> String {
        if self.scale <= 0.0 {
            return String::new();
        }
        let widest = number(self.total as f64 / self.scale).len().max(4);
        let step = round_step((widest + 2) as f64 / self.scale);
        let mut out = vec![' '; to - from];
        let first = (from as f64 / self.scale / step).floor();
        for k in 0..=out.len() {
            let time = (first + k as f64) * step;
            let at = (time * self.scale).round() as usize;
            let label = number(time);
            if at >= to {
                break;
            }
            if at >= from && at - from + label.len() <= out.len() {
                for (spot, c) in out[at - from..].iter_mut().zip(label.chars()) {
                    *spot = c;
                }
            }
        }
        out.iter().collect::<String>().trim_end().into()
    }

    fn line(&self, row: &[Spot]) -> String {
        if !self.colour {
            return row.iter().map(|(c, _)| c).collect();
        }
        let mut out = String::new();
        for run in row.chunk_by(|a, b| a.1 == b.1) {
            let text: String = run.iter().map(|(c, _)| c).collect();
            match run[0].1 {
                // Black on one of 256 colours; those of the SVG, as near as there are.
                Some(kind) => {
                    let code = match kind {
                        ActionKind::Forward => 117,
                        ActionKind::Backward => 214,
                        ActionKind::Input => 175,
                        ActionKind::Weight => 150,
                    };
                    out.push_str(&format!("\x1b[30;48;5;{code}m{text}\x1b[0m"));
                }
                None => out.push_str(&text),
            }
        }
        out
    }
}

/// The letter alone, where the number has no room.
fn letter(label: &str) -> &str {
    let at = label.find(char::is_alphabetic).unwrap_or(0);
    &label[at..at + 1]
}
