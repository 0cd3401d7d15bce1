//! A schedule in a terminal: one line per pipeline rank, one cell per action, as long as the action takes.
//!
//! ```text
//! time   0     2     4     6     8     10
//! pp 0   F0 F1 ······B0─── F2 B1─── ···B2───
//! pp 1   ···F0 B0─── F1 B1─── F2 B2─── ······
//! ```
//!
//! Time goes on from panel to panel. A schedule too long to read is shown with its first and last
//! panels, and a line that says what is left out.

mod page;

use super::measure::{bubble, live, number, span};
use page::Page;
use shardc_ir::schedule::{ActionKind, Timeline};

/// Columns of a terminal.
const WIDTH: usize = 80;

/// The schedule in lines of at most 80 columns. `chunks`: stages per rank. `colour`: with ANSI
/// escapes, which take no columns. `only`: the one rank that is shown, of all whose time is counted.
pub fn text(t: &Timeline, chunks: usize, colour: bool, only: Option<usize>) -> String {
    let ranks = t.ranks.len();
    let actions: usize = t.ranks.iter().map(Vec::len).sum();
    if actions == 0 {
        return format!("no actions on {ranks} pipeline ranks\n");
    }
    let page = Page::new(t, chunks, colour, only);
    let mut out = legend(t, &page);
    out.push_str(&page.panels());
    let makespan = span(t).1;
    let idle = 100.0 * bubble(t);
    out.push_str(&format!(
        "makespan {}, bubble {idle:.1} % of the time of {ranks} pipeline rank{}\n",
        number(makespan),
        if ranks == 1 { "" } else { "s" }
    ));
    let live = live(t);
    if !live.is_empty() {
        let words: Vec<String> = live.iter().map(usize::to_string).collect();
        let what = match chunks {
            1 => "microbatches alive at the peak, by pipeline rank:".to_string(),
            n => format!(
                "microbatches alive at the peak, by pipeline rank, for each of its {n} stages:"
            ),
        };
        out.push_str(&wrap(&what, &words, ""));
    }
    out
}

/// What the letters mean; only those that occur.
fn legend(t: &Timeline, page: &Page) -> String {
    let has = |k: ActionKind| t.ranks.iter().flatten().any(|s| s.action.kind == k);
    let mut all = vec![];
    for (kind, words) in [
        (ActionKind::Forward, "forward"),
        (ActionKind::Backward, "backward"),
        (ActionKind::Input, "backward, gradient of the input"),
        (ActionKind::Weight, "backward, gradients of the weights"),
    ] {
        if has(kind) {
            all.push(format!("{} {words}", kind.letter()));
        }
    }
    all.push("then the microbatch".into());
    match page.chunks.count {
        1 => {}
        2 => all.push("lower case: second chunk of the rank".into()),
        _ => all.push("in front: the stage".into()),
    }
    all.push("· idle".into());
    wrap("", &all, ";")
}

/// Words one after the other in as many lines as they need.
fn wrap(head: &str, words: &[String], between: &str) -> String {
    let mut out = String::from(head);
    let mut column = head.chars().count();
    for (i, w) in words.iter().enumerate() {
        let end = if i + 1 < words.len() { between } else { "" };
        let len = w.chars().count() + end.len();
        if column > 0 && column + 1 + len > WIDTH {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(w);
        out.push_str(end);
        column += len;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests;
