//! `a ~ b` of templates joins `str(a)` and `str(b)` of Python; the engine would join what it prints itself of lists, dicts,
//! `none`, booleans and floats. So operands are written `(a)|string ~ (b)|string` before a template is read.

/// A token of an expression, by its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token {
    Open,
    Close,
    /// What ends an operand of `~`: operators that bind less, and separators.
    Ends,
    /// `+` and `-`, which may also begin an operand.
    Sign,
    Joins,
    /// A string, a number, a name, or an operator that binds more.
    Part,
}

/// Words that end an operand.
const WORDS: [&str; 9] = ["and", "or", "not", "in", "if", "elif", "else", "set", "for"];

/// The token that a text begins with, and its length; nothing at its end or for a string that does not end.
fn token(text: &str) -> Option<(Token, usize)> {
    let first = text.chars().next()?;
    let word = |c: char| c == '_' || c.is_alphanumeric();
    Some(match first {
        '"' | '\'' => {
            let mut escaped = false;
            let end = text.char_indices().skip(1).find(|&(_, c)| {
                let ends = c == first && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            })?;
            (Token::Part, end.0 + 1)
        }
        '(' | '[' | '{' => (Token::Open, 1),
        ')' | ']' | '}' => (Token::Close, 1),
        '~' => (Token::Joins, 1),
        '+' | '-' => (Token::Sign, 1),
        ',' | ':' | '=' | '<' | '>' | '!' => (Token::Ends, 1),
        c if word(c) => {
            let n = text.find(|c| !word(c)).unwrap_or(text.len());
            (if WORDS.contains(&&text[..n]) { Token::Ends } else { Token::Part }, n)
        }
        c => (Token::Part, c.len_utf8()),
    })
}

/// An operand that is not over.
#[derive(Clone, Copy, Default)]
struct Operand {
    /// Where it begins and ends so far.
    bytes: Option<(usize, usize)>,
    /// It stands behind `~`.
    joined: bool,
}

/// The template with operands of `~` as Python's `str` has them.
pub fn with_strings(source: &str) -> String {
    let mut inserts: Vec<(usize, &str)> = vec![];
    let mut at = 0;
    while let Some(n) = source[at..].find('{') {
        at += n;
        let rest = &source[at..];
        let Some(close) =
            [("{{", "}}"), ("{%", "%}"), ("{#", "#}")].iter().find(|x| rest.starts_with(x.0))
        else {
            at += 1;
            continue;
        };
        let known = inserts.len();
        let end = match close.0 {
            "{#" => rest.find(close.1).map(|n| n + 2),
            _code => {
                // A sign there trims what stands before.
                let begin = at + 2 + usize::from(rest[2..].starts_with(['-', '+']));
                expression(source, begin, close.1, &mut inserts).map(|end| end - at)
            }
        };
        let Some(end) = end else {
            inserts.truncate(known);
            break;
        };
        let inner = rest[2..end - 2].trim_matches(['-', '+']).trim();
        let raw = close.0 == "{%" && inner == "raw";
        at += end;
        if raw {
            let Some(over) = source[at..].find("endraw") else { break };
            at += over;
        }
    }
    inserts.sort_by_key(|i| i.0);
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    for (to, text) in inserts {
        out.push_str(&source[from..to]);
        out.push_str(text);
        from = to;
    }
    out.push_str(&source[from..]);
    out
}

/// What is to be written into an expression from `at` on, up to a tag's end, behind which it returns; nothing if it does
/// not end.
fn expression(
    source: &str,
    mut at: usize,
    close: &str,
    inserts: &mut Vec<(usize, &str)>,
) -> Option<usize> {
    let mut open = vec![];
    let mut now = Operand::default();
    let ends = |o: Operand, joins: bool, inserts: &mut Vec<(usize, &str)>| {
        if let Some((from, to)) = o.bytes.filter(|_| o.joined || joins) {
            inserts.extend([(from, "("), (to, ")|string")]);
        }
        Operand { bytes: None, joined: joins }
    };
    loop {
        let rest = &source[at..];
        let blank = rest.len() - rest.trim_start().len();
        if blank > 0 {
            at += blank;
            continue;
        }
        // A sign before the end of a tag trims what follows.
        let trims = rest.starts_with(['-', '+']) && rest[1..].starts_with(close);
        if open.is_empty() && (trims || rest.starts_with(close)) {
            ends(now, false, inserts);
            return Some(at + usize::from(trims) + close.len());
        }
        let (mut token, n) = token(rest)?;
        // The name of an attribute may be any word.
        if token == Token::Ends
            && rest.starts_with(char::is_alphabetic)
            && source[..at].ends_with('.')
        {
            token = Token::Part;
        }
        let span = |o: Operand, from: usize| o.bytes.map_or((from, at + n), |b| (b.0, at + n));
        match token {
            Token::Open => {
                let bytes = Some(span(now, at));
                open.push(Operand { bytes, ..now });
                now = Operand::default();
            }
            Token::Close => {
                ends(now, false, inserts);
                let outer = open.pop()?;
                now = Operand { bytes: Some(span(outer, at)), ..outer };
            }
            Token::Joins => now = ends(now, true, inserts),
            Token::Ends => now = ends(now, false, inserts),
            Token::Sign if now.bytes.is_some() => now = ends(now, false, inserts),
            Token::Sign | Token::Part => now.bytes = Some(span(now, at)),
        }
        at += n;
    }
}

#[cfg(test)]
mod tests {
    use super::with_strings;

    #[test]
    fn operands_end_where_they_do() {
        for (source, want) in [
            ("{{ a ~ b }}", "{{ (a)|string ~ (b)|string }}"),
            ("{{- a ~ b -}}", "{{- (a)|string ~ (b)|string -}}"),
            ("{{--a ~ b}}", "{{-(-a)|string ~ (b)|string}}"),
            (
                "{{ a ~ 'x~y' ~ c[0].d(1, e) }}{# a ~ b #}",
                "{{ (a)|string ~ ('x~y')|string ~ (c[0].d(1, e))|string }}{# a ~ b #}",
            ),
            (
                "{%- set x = a|trim ~ b * 2 -%} ~ ",
                "{%- set x = (a|trim)|string ~ (b * 2)|string -%} ~ ",
            ),
            (
                "{% if a ~ b == c ~ -d and e %}",
                "{% if (a)|string ~ (b)|string == (c)|string ~ (-d)|string and e %}",
            ),
            (
                "{{ f(a ~ [b ~ c, d]) + e ~ g }}",
                "{{ f((a)|string ~ ([(b)|string ~ (c)|string, d])|string) + (e)|string ~ (g)|string }}",
            ),
            ("{{ {'a': b ~ {}}['a'] }}", "{{ {'a': (b)|string ~ ({})|string}['a'] }}"),
            ("{% raw %}{{ a ~ b }}{% endraw %}", "{% raw %}{{ a ~ b }}{% endraw %}"),
            ("{{ a ~ 'it\\'s' if b else c }}", "{{ (a)|string ~ ('it\\'s')|string if b else c }}"),
            ("{{ a.in ~ b.set }}", "{{ (a.in)|string ~ (b.set)|string }}"),
            ("{{ a ~ 'open", "{{ a ~ 'open"),
            ("{{ a } ~ b }}", "{{ a } ~ b }}"),
            ("plain { ~ } {", "plain { ~ } {"),
        ] {
            assert_eq!(with_strings(source), want);
        }
    }
}
