//! Mutants of programs as text: other bytes, words, numbers, ops, attributes and lines, of the same program or another.

/// Pieces of programs, and what a terminal would obey.
const WORDS: &[&str] = &[
    "%",
    "@",
    "@(",
    "?",
    "-",
    "->",
    "..",
    "..=",
    ":",
    "::",
    ",",
    ";",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "{i}",
    "{i-1}",
    "{i+1}",
    "//",
    "\"",
    "\\u{0}",
    "\n",
    "\r\n",
    "\t",
    "é",
    "\u{2028}",
    "~tp",
    "!tp",
    "+tp",
    " max:tp",
    " min:dp",
    "@tp",
    "@dp*tp",
    "tp:(1)2",
    "tp:(2)2",
    "tp:(0)0",
    "tp:(3)5",
    "f32[",
    "i32[3]",
    "bf16[4]",
    "f32[]",
    "f32[0]",
    "f32[4,8@tp]",
    "func @g(",
    "return",
    "mesh [tp=2]\n",
    "repeat i in 0..=3 {\n",
    "repeat i in 3..=0 by 2, %h at 3 is %x {\n",
    "}\n",
    " m.0:\n",
    " :\n",
    "  %y = gelu %x : f32[4]\n",
    " by ",
    " at ",
    " is ",
    "none",
    "; dim=1",
    "; h=4",
    "mk,kn->mn",
    "(ab)c->abc",
    "ab,->ab",
    "..a->a",
    "!k",
    "->",
    "nan",
    "inf",
    "-1",
    "1e308",
    "p7",
    "param \"w\"",
    "[ones]",
    " [normal=0.02; tp_dim=1]",
    "; part=0:1:9",
    "; experts=3; tensor=\"e.*.w\"",
    " residual=1",
    "stash \"l0.h\"",
    "\u{1b}[31m",
    "\u{9b}2J",
    "\u{202e}",
];

/// Numbers that programs trip over.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "7",
    "8",
    "12",
    "13",
    "63",
    "64",
    "65",
    "255",
    "256",
    "4096",
    "65536",
    "16777215",
    "16777216",
    "2147483648",
    "4294967295",
    "4294967296",
    "1099511627776",
    "1099511627777",
    "281474976710656",
    "18446744073709551615",
    "18446744073709551616",
    "00",
    "01",
];

/// Draws numbers below others; 0 below 0.
pub trait Draws {
    fn below(&mut self, n: usize) -> usize;
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Byte ranges of a text's words, numbers or lines.
fn ranges(t: &str, of: impl Fn(char) -> bool) -> Vec<(usize, usize)> {
    let mut out = vec![];
    let mut start = None;
    for (i, c) in t.char_indices().chain([(t.len(), '\0')]) {
        match (of(c), start) {
            (true, None) => start = Some(i),
            (false, Some(s)) => {
                out.push((s, i));
                start = None;
            }
            _ => {}
        }
    }
    out
}

/// A place between two characters.
fn boundary(r: &mut impl Draws, t: &str) -> usize {
    let mut i = r.below(t.len() + 1);
    while !t.is_char_boundary(i) {
        i -= 1;
    }
    i
}

/// One to four changes of a text; `ops` are the names of ops, `other` is a text to take from.
pub fn mutate(r: &mut impl Draws, ops: &[&str], text: &str, other: &str) -> String {
    let mut t = text.to_string();
    for _ in 0..r.pick(&[1, 1, 1, 2, 4]) {
        let lines = ranges(&t, |c| c != '\n');
        match r.below(12) {
            0 => {
                // One byte is another.
                let i = boundary(r, &t);
                if t.as_bytes().get(i).is_some_and(u8::is_ascii) {
                    t.replace_range(i..=i, &((r.below(128) as u8) as char).to_string());
                }
            }
            1 => {
                let i = boundary(r, &t);
                t.insert_str(i, r.pick(WORDS));
            }
            2 => {
                let a = boundary(r, &t);
                let b = a + r.below(24);
                let b = (b..t.len()).find(|&b| t.is_char_boundary(b)).unwrap_or(t.len());
                t.replace_range(a..b, "");
            }
            3 => {
                // A number is another.
                let all = ranges(&t, |c| c.is_ascii_digit());
                if !all.is_empty() {
                    let (a, b) = r.pick(&all);
                    t.replace_range(a..b, r.pick(NUMBERS));
                }
            }
            4 | 5 => {
                // A word is another of the same program: operands, axes, attributes change places.
                let all = ranges(&t, |c| c.is_ascii_alphanumeric() || "%_.@".contains(c));
                if !all.is_empty() {
                    let (a, b) = r.pick(&all);
                    let (c, d) = r.pick(&all);
                    let word = t[c..d].to_string();
                    t.replace_range(a..b, &word);
                }
            }
            6 => {
                // An op is another.
                let names: Vec<_> = t.match_indices("= ").map(|m| m.0 + 2).collect();
                if !names.is_empty() {
                    let a = r.pick(&names);
                    let b = t[a..].find(['[', ' ', '\n']).map_or(t.len(), |n| a + n);
                    t.replace_range(a..b, r.pick(ops));
                }
            }
            7 => {
                // Attributes are gone, or others.
                let open: Vec<_> = t.match_indices('[').map(|m| m.0).collect();
                if !open.is_empty() {
                    let a = r.pick(&open);
                    let b = t[a..].find(']').map_or(t.len(), |n| a + n + 1);
                    let other = r.pick(&open);
                    let c = t[other..].find(']').map_or(t.len(), |n| other + n + 1);
                    let with =
                        if r.below(3) == 0 { String::new() } else { t[other..c].to_string() };
                    t.replace_range(a..b, &with);
                }
            }
            8 if !lines.is_empty() => {
                let (a, b) = r.pick(&lines);
                t.replace_range(a..b, "");
            }
            9 if !lines.is_empty() => {
                let (a, b) = r.pick(&lines);
                let line = t[a..b].to_string() + "\n";
                let at = r.pick(&lines).0;
                t.insert_str(at, &line);
            }
            10 if !lines.is_empty() => {
                // A line of another program.
                let theirs = ranges(other, |c| c != '\n');
                if !theirs.is_empty() {
                    let (a, b) = r.pick(&theirs);
                    let at = r.pick(&lines).0;
                    t.insert_str(at, &(other[a..b].to_string() + "\n"));
                }
            }
            _ => {
                let (i, j) = (boundary(r, &t), boundary(r, other));
                t = t[..i].to_string() + &other[j..];
            }
        }
    }
    t
}
