//! Texts in lines that a terminal has room for.

/// How commands begin that somebody copies: they are not broken. Those of this program end where a sentence goes on.
const COMMANDS: [&str; 5] = ["shardc ", "hf download ", "iconv -", "jq -", "sed '"];

/// Words of a line, of which a command is one, and what was a space in it.
fn words(line: &str) -> Vec<&str> {
    let (mut out, mut rest) = (vec![], line);
    loop {
        let begins = COMMANDS.iter().position(|c| rest.starts_with(c));
        let end = match begins {
            Some(0) => {
                let goes_on = [", ", "; ", " · ", " (", ") "].iter().filter_map(|e| rest.find(e));
                goes_on.map(|at| at + rest[at..].find(' ').unwrap_or(0)).min()
            }
            Some(_others) => None,
            // In a sentence they are between backticks.
            None if rest.starts_with("`shardc ") => {
                let quoted = rest[1..].find('`').map_or(0, |at| at + 1);
                rest[quoted..].find(' ').map(|at| quoted + at)
            }
            None => rest.find(' '),
        };
        let Some(end) = end else {
            out.push(rest);
            return out;
        };
        out.push(&rest[..end]);
        rest = &rest[end + 1..];
    }
}

/// A line in lines of at most so many columns, if its words and commands are no longer; all but the first are indented.
pub(super) fn wrapped(line: &str, width: usize, indent: usize) -> String {
    let (mut out, mut at) = (String::new(), 0);
    // Nothing stands in the line yet; nothing but spaces does.
    let (mut begins, mut blank) = (true, true);
    for word in words(line) {
        let own = word.chars().count();
        if !blank && at + 1 + own > width {
            out.truncate(out.trim_end().len());
            out += &format!("\n{:indent$}", "");
            (at, begins, blank) = (indent, true, true);
        }
        if !std::mem::take(&mut begins) {
            out.push(' ');
            at += 1;
        }
        out += word;
        (at, blank) = (at + own, blank && own == 0);
    }
    out
}

/// A text in lines of at most so many columns. What goes on in the next line stands below the last column of its line,
/// if that has columns. Lines with colours, and lines of a program with carets below them stay as they are.
pub(super) fn fitted(text: &str, width: usize) -> String {
    let one = |line: &str| {
        let stays = line.contains('\u{1b}') || line.starts_with("    |");
        if stays || line.chars().count() <= width {
            return line.to_string() + "\n";
        }
        let begins = line.len() - line.trim_start().len();
        let last = line.trim_end().rfind("  ").filter(|at| *at > begins);
        let last = last.map(|at| line[..at].chars().count() + 2).filter(|at| *at <= width * 3 / 4);
        wrapped(line, width, last.unwrap_or(begins + 2)) + "\n"
    };
    text.lines().map(one).collect()
}

/// A page of Markdown in lines of at most so many columns: its paragraphs and items are lines of their own width.
/// Code and tables stay as they are.
pub(super) fn page(text: &str, width: usize) -> String {
    let (mut out, mut part, mut code) = (String::new(), String::new(), false);
    let ends = |part: &mut String, out: &mut String| {
        let indent = if part.trim_start().starts_with("- ") { 2 } else { 0 };
        let indent = part.len() - part.trim_start().len() + indent;
        if !part.is_empty() {
            *out += &(wrapped(&std::mem::take(part), width, indent) + "\n");
        }
    };
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        let alone = code || fence || line.starts_with("    ") || line.starts_with(['#', '|']);
        code ^= fence;
        if alone || line.trim().is_empty() {
            ends(&mut part, &mut out);
            out += &format!("{line}\n");
            continue;
        }
        if line.trim_start().starts_with("- ") {
            ends(&mut part, &mut out);
        }
        match part.is_empty() {
            true => part = line.trim_end().into(),
            false => part = format!("{part} {}", line.trim()),
        }
    }
    ends(&mut part, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::{fitted, page};

    #[test]
    fn lines_are_as_wide_as_a_terminal() {
        let text =
            "what    takes the sum of two parts\n  a b\n\u{1b}[31mred, and no wider than it is\n";
        let want = "what    takes the sum of\n        two parts\n  a b\n\u{1b}[31mred, and no wider than it is\n";
        assert_eq!(fitted(text, 24), want);
        assert_eq!(
            fitted("  = help: use another word\n", 15),
            "  = help: use\n    another\n    word\n"
        );
        assert_eq!(fitted("averylongword and\n", 8), "averylongword\n  and\n");
    }

    /// A command is copied: pasted in two lines it would be another.
    #[test]
    fn commands_are_not_broken() {
        let text = "   = help: begin with its model: shardc reshard ckpt --to hf -o DIR, then --weights DIR instead\n";
        let want = "   = help: begin with its model:\n     shardc reshard ckpt --to hf -o DIR,\n     then --weights DIR instead\n";
        assert_eq!(fitted(text, 40), want);
        let next = "wrote a   next: shardc inspect a.plan --summary · shardc run a.plan\n";
        let lines = "wrote a   next:\n          shardc inspect a.plan --summary\n          · shardc run a.plan\n";
        assert_eq!(fitted(next, 41), lines);
        // Longer than a line: the terminal breaks it.
        let long = format!("shardc compile {}\n", "--mesh tp=2 ".repeat(9).trim_end());
        assert_eq!(fitted(&long, 40), long);
    }

    #[test]
    fn paragraphs_of_pages_are_joined_before_they_are_broken() {
        let text = "# ring\n\nBlocks of keys travel around\nthe ranks of cp.\n\n- Leave it\n  out, or do not.\n- No.\n\n```text\nerror[ring]: a line that stays as it is\n```\n";
        let want = "# ring\n\nBlocks of keys travel\naround the ranks of cp.\n\n- Leave it out, or do\n  not.\n- No.\n\n```text\nerror[ring]: a line that stays as it is\n```\n";
        assert_eq!(page(text, 24), want);
    }
}
