//! Mutants of bytes and of words.

use shardc_ir::rng::Stream;

/// Numbers that programs trip over.
pub const NUMBERS: [&str; 15] = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "255",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "1e-320",
    "NaN",
    "-0.0",
];

/// Words that are none, of several formats, and what a terminal would obey, as it is and as JSON writes it.
const WORDS: [&str; 14] = [
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    ",",
    "=",
    "\u{e9}",
    "..",
    "\u{1b}[31m",
    "\u{9b}2J",
    "\u{202e}",
    "\\u001b[2J",
    "\\u009b31m",
];

/// Draws for one mutant.
pub struct Draw {
    stream: Stream,
    next: u64,
    from: (u64, u64, u64),
}

impl Draw {
    pub fn new(seed: u64, round: u64, target: u64) -> Draw {
        let stream = Stream::new(seed ^ round << 20, "fuzz", target as u32);
        Draw { stream, next: 0, from: (seed, round, target) }
    }
    /// A number below `n`; 0 if that is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        ((self.stream.uniform(self.next) * n as f64) as usize).min(n.saturating_sub(1))
    }
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i + 1));
        }
    }
    /// What it was made from, as a word.
    pub fn seed(&self) -> String {
        format!("{}-{}-{}", self.from.0, self.from.1, self.from.2)
    }
}

/// Begin and end of a number or word around a place in a text.
fn word_at(text: &[u8], at: usize) -> (usize, usize) {
    let part = |b: &u8| b.is_ascii_alphanumeric() || b"._-+".contains(b);
    let begin = text[..at].iter().rposition(|b| !part(b)).map_or(0, |i| i + 1);
    let end = text[at..].iter().position(|b| !part(b)).map_or(text.len(), |i| at + i);
    (begin, end)
}

/// One to four changes of bytes; near the beginning more often, where headers are.
pub fn bytes(own: &[u8], draw: &mut Draw) -> Vec<u8> {
    let mut out = own.to_vec();
    for _ in 0..=draw.below(4) {
        if out.is_empty() {
            break;
        }
        let near = [out.len(), out.len().min(512), out.len().min(64)][draw.below(3)];
        let at = draw.below(near);
        match draw.below(9) {
            0 => out[at] ^= 1 << draw.below(8),
            1 => out[at] = draw.below(256) as u8,
            2 => out.truncate(at),
            3 => {
                let end = at + draw.below((out.len() - at).min(64));
                out.drain(at..end);
            }
            4 => {
                let end = at + draw.below((out.len() - at).min(64));
                let part = out[at..end].to_vec();
                out.splice(at..at, part);
            }
            5 => {
                let n = [0, 1, u64::MAX, i64::MAX as u64, 1 << 32, 1 << 40][draw.below(6)];
                let end = (at + 8).min(out.len());
                out[at..end].copy_from_slice(&n.to_le_bytes()[..end - at]);
            }
            // Words of a text: another one, one of its own, or twice.
            6 | 7 => {
                let (begin, end) = word_at(&out, at);
                let all = NUMBERS.iter().chain(&WORDS);
                let word = all.clone().nth(draw.below(all.count())).expect("one of them");
                out.splice(begin..end, word.bytes());
            }
            _ => {
                let (begin, end) = word_at(&out, at);
                let (b, e) = word_at(own, draw.below(own.len()));
                out.splice(begin..end, own[b..e].iter().copied());
            }
        }
    }
    out
}

/// A word of a command, changed; it has no byte that a command cannot be given.
pub fn words(own: &str, draw: &mut Draw) -> String {
    let out = bytes(own.as_bytes(), draw);
    let text = String::from_utf8_lossy(&out).replace('\0', "0");
    // A flag in its place would be another command.
    text.trim_start_matches('-').to_string()
}
