//! Any text is read or refused, never more: mutated programs are parsed, verified, printed and
//! parsed again. A fixed number of inputs, or as many as `SHARDC_FUZZ_SECONDS` allow, from the seed
//! `SHARDC_FUZZ_SEED`; a panic fails the test and shows the input, which then belongs in the
//! corpus.

use shardc_ir::phase::Phase;
use shardc_ir::text::{Repeat, expand, parse, parse_source, print, print_source, print_with};
use shardc_ir::verify::verify;
use std::collections::HashSet;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Inputs when no time is given.
const DEFAULT_INPUTS: u64 = 2000;
/// Most inputs that are kept because they did something new, and their largest size.
const MAX_POOL: usize = 4000;
const MAX_SIZE: usize = 1 << 14;

/// Pieces of programs.
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
];
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

/// xorshift64* (Vigna, 2016).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }
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

fn mutate(r: &mut Random, text: &str, other: &str) -> String {
    let mut t = text.to_string();
    for _ in 0..r.pick(&[1, 1, 1, 2, 4]) {
        let boundary = |r: &mut Random, t: &str| {
            let mut i = r.below(t.len() + 1);
            while !t.is_char_boundary(i) {
                i -= 1;
            }
            i
        };
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
                    t.replace_range(a..b, r.pick(shardc_ir::ops::NAMES));
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

/// Reads, checks, prints and reads again; a word for what happened.
fn exercise(text: &str) -> String {
    let source = match parse_source(text) {
        Ok(s) => s,
        Err(d) => return shape(&format!("{} {}", d.code, d.message)),
    };
    let said = print_source(&source);
    let back = parse_source(&said).unwrap_or_else(|d| panic!("a model cannot be read back: {d}"));
    assert_eq!(print_source(&back), said);
    assert_eq!((&back.weights, back.vocab), (&source.weights, source.vocab));
    let m = source.module;
    let mut seen = String::from("read");
    for phase in Phase::ALL {
        for d in verify(&m, phase).err().unwrap_or_default().iter() {
            // What can be read has names, uses and sizes that are right.
            assert!(!["name", "ssa", "mesh"].contains(&d.code), "{d}");
            if seen.len() < 400 {
                seen += &shape(&format!(" {} {}", d.code, d.message));
            }
        }
    }
    let (folded, unrolled) = (print(&m), print_with(&m, Repeat::Unroll));
    assert_eq!(expand(&folded).expect("folded text expands").text, unrolled);
    let back = parse(&folded).unwrap_or_else(|d| panic!("what is printed cannot be read: {d}"));
    assert_eq!(print_with(&back, Repeat::Unroll), unrolled);
    assert_eq!(print(&back), folded);
    seen
}

/// A message without its names and numbers.
fn shape(message: &str) -> String {
    message
        .split('`')
        .step_by(2)
        .flat_map(|s| s.chars())
        .filter(|c| !c.is_ascii_digit())
        .take(120)
        .collect()
}

fn corpus() -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files.iter().map(|f| std::fs::read_to_string(f).unwrap()).collect()
}

/// A small program of every sample of every op.
fn samples() -> Vec<String> {
    let one = |s: &shardc_ir::samples::Sample| {
        let mesh = shardc_ir::mesh::Mesh::default();
        let ty = |t| shardc_ir::text::type_text(&mesh, t);
        let args: Vec<_> =
            s.ins.iter().enumerate().map(|(i, t)| format!("%x{i}: {}", ty(t))).collect();
        let ins: Vec<_> = (0..s.ins.len()).map(|i| format!("%x{i}")).collect();
        let types = s.types();
        let outs: Vec<_> = (0..types.len()).map(|i| format!("%y{i}")).collect();
        let made: Vec<_> = types.iter().map(ty).collect();
        let mut op = String::new();
        s.op.write(&mesh, &mut op);
        format!(
            "mesh [dp=2, tp=4]\n\nfunc @f({}) -> ({}) {{\n  {} = {op} {} : {}\n  return {}\n}}\n",
            args.join(", "),
            made.join(", "),
            outs.join(", "),
            ins.join(", "),
            made.join(", "),
            outs.join(", ")
        )
    };
    shardc_ir::samples::all().iter().map(one).collect()
}

#[test]
fn seeds_are_read_or_refused() {
    for text in corpus().into_iter().chain(samples()) {
        exercise(&text);
    }
}

#[test]
fn mutated_programs_are_read_or_refused() {
    let number = |name: &str| std::env::var(name).ok().and_then(|s| s.parse::<u64>().ok());
    let seconds = number("SHARDC_FUZZ_SECONDS");
    let seed = number("SHARDC_FUZZ_SEED").unwrap_or(1);
    let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut pool: Vec<String> = corpus().into_iter().chain(samples()).collect();
    let mut seen = HashSet::new();
    let (start, mut inputs, mut read) = (Instant::now(), 0u64, 0u64);
    loop {
        let done = match seconds {
            Some(s) => start.elapsed() >= Duration::from_secs(s),
            None => inputs >= DEFAULT_INPUTS,
        };
        if done {
            break;
        }
        let (one, other) = (r.below(pool.len()), r.below(pool.len()));
        let text = mutate(&mut r, &pool[one], &pool[other]);
        inputs += 1;
        let Ok(what) = catch_unwind(|| exercise(&text)) else {
            panic!("input {inputs} of seed {seed}:\n{text}\n(escaped: {text:?})");
        };
        // Programs that can be read are worth more as parents than those that cannot.
        let is_read = what.starts_with("read");
        read += u64::from(is_read);
        if seen.insert(what) && is_read && pool.len() < MAX_POOL && text.len() < MAX_SIZE {
            pool.push(text);
        }
    }
    println!("{inputs} inputs, {read} of them read, {} different outcomes", seen.len());
}
