//! Lines of Python of at most 100 columns.

/// Most columns of a line.
const WIDE: usize = 100;

/// Lines of a text.
#[derive(Default)]
pub(super) struct Lines(Vec<String>);

impl Lines {
    /// A line as it is.
    pub fn push(&mut self, depth: usize, text: &str) {
        self.0.push(format!("{}{text}", "    ".repeat(depth)));
    }

    /// A comment, of as many lines as it needs.
    pub fn note(&mut self, depth: usize, text: &str) {
        let mut line = String::from("#");
        for word in text.split(' ') {
            if line.len() > 1 && 4 * depth + line.len() + 1 + word.len() > WIDE {
                self.push(depth, &std::mem::replace(&mut line, String::from("#")));
            }
            line.push(' ');
            line += word;
        }
        self.push(depth, &line);
    }

    /// An assignment, with a note behind it if there is room, and before it otherwise.
    pub fn assign(&mut self, depth: usize, to: &str, made: &str, note: &str) {
        let line = format!("{to} = {made}");
        if 4 * depth + line.len() + 4 + note.len() <= WIDE {
            return self.push(depth, &format!("{line}  # {note}"));
        }
        self.push(depth, &format!("# {note}"));
        match 4 * depth + line.len() > WIDE && is_bare(made) {
            true => self.code(depth, &format!("{to} = ({made})")),
            false => self.code(depth, &line),
        }
    }

    /// Code, broken behind commas and operators within brackets where it is too long.
    pub fn code(&mut self, depth: usize, text: &str) {
        let indent = 4 * depth;
        if indent + text.len() <= WIDE {
            return self.push(depth, text);
        }
        // Targets and results of one tuple may stand in brackets.
        let text = match text.split_once(" = ") {
            Some((to, made)) if indent + to.len() > WIDE / 2 && to.contains(", ") => {
                format!("({to}) = {made}")
            }
            _short => match text.split_once(' ') {
                Some((word @ ("return" | "del"), all)) => format!("{word} ({all})"),
                _other => text.to_string(),
            },
        };
        let (mut nested, mut inside, mut start) = (0i32, false, 0);
        // Where a line may end, and where the next one then begins.
        let mut last: Option<(usize, usize)> = None;
        let mut width = indent;
        let mut lines: Vec<String> = vec![];
        let bytes = text.as_bytes();
        for (i, c) in bytes.iter().enumerate() {
            match c {
                b'"' if i == 0 || bytes[i - 1] != b'\\' => inside = !inside,
                b'(' if !inside => {
                    nested += 1;
                    last = last.or(Some((i + 1, i + 1)));
                }
                b'[' if !inside => nested += 1,
                b')' | b']' if !inside => nested -= 1,
                b' ' if !inside && nested > 0 => last = Some((i, i + 1)),
                _other => {}
            }
            width += 1;
            if width > WIDE
                && let Some((end, next)) = last.take()
            {
                lines.push(text[start..end].to_string());
                start = next;
                width = indent + 8 + i + 1 - next;
            }
        }
        lines.push(text[start..].to_string());
        for (i, l) in lines.iter().enumerate() {
            let more = if i == 0 { "" } else { "        " };
            self.0.push(format!("{}{more}{l}", "    ".repeat(depth)));
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn text(&self) -> String {
        self.0.iter().flat_map(|l| [l.as_str(), "\n"]).collect()
    }
}

/// True of an expression with spaces outside of all brackets.
fn is_bare(made: &str) -> bool {
    let mut nested = 0;
    made.bytes().any(|c| {
        nested += i32::from(matches!(c, b'(' | b'[')) - i32::from(matches!(c, b')' | b']'));
        c == b' ' && nested == 0
    })
}

/// Text of others as part of a comment: nothing in it ends the line.
pub(super) fn comment(text: &str) -> String {
    let one = |c: char| match c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(one).collect()
}
