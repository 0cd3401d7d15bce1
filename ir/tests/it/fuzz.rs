//! Any text is read or refused, never more: mutated programs are parsed, verified, printed and
//! parsed again. A fixed number of inputs, or as many as `SHARDC_FUZZ_SECONDS` allow, from the seed
//! `SHARDC_FUZZ_SEED`; a panic fails the test and shows the input, which then belongs in the
//! corpus.

use shardc_ir::phase::Phase;
use shardc_ir::text::update::{BUILT_IN, Rules, Update};
use shardc_ir::text::{Repeat, expand, parse, parse_source, print, print_source, print_with};
use shardc_ir::verify::verify;
use shardc_testing::texts::{Draws, mutate};
use std::collections::{BTreeMap, HashSet};
use std::panic::catch_unwind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Inputs when no time is given.
const DEFAULT_INPUTS: u64 = 2000;
/// Most inputs that are kept because they did something new, and their largest size.
const MAX_POOL: usize = 4000;
const MAX_SIZE: usize = 1 << 14;

/// xorshift64* (Vigna, 2016).
struct Random(u64);

impl Draws for Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }
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
        let text = mutate(&mut r, shardc_ir::ops::NAMES, &pool[one], &pool[other]);
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

/// Texts of update rules: each rule that is read is written out for a few shapes, or refused.
fn exercise_rules(text: &str) -> usize {
    let Ok(rules) = Rules::parse(text, "rules.ir") else { return 0 };
    let mut made = 0;
    for name in rules.names() {
        for (rule, shape) in
            rules.named(name).flat_map(|r| [(r, &[4, 6][..]), (r, &[6, 4]), (r, &[5])])
        {
            if !rule.fits(shape) {
                continue;
            }
            let Ok(attrs) = rule.attributes(&BTreeMap::new(), [4, 6], Some(2), shape) else {
                continue;
            };
            for stack in [false, true] {
                let (rule, attrs) = (rule.clone(), attrs.clone());
                let u = Update { rule, attrs, stack, lr: 1.0, group: 0 };
                let shape = if stack { [&[3], shape].concat() } else { shape.to_vec() };
                let kept = u.kept(shape.len());
                let _ = u.fused();
                made += usize::from(u.func(&shape).is_ok() && kept.is_ok());
            }
        }
    }
    made
}

#[test]
fn mutated_rules_are_read_or_refused() {
    let seed = std::env::var("SHARDC_FUZZ_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1u64);
    let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    // A rule at a time: of a text with one that is wrong nothing is read.
    let whole = |t: &str| format!("update {t}");
    let mut pool: Vec<String> = BUILT_IN.split("update ").skip(1).map(whole).collect();
    let own = pool.len();
    let mut made = pool.iter().map(|t| exercise_rules(t)).sum::<usize>();
    for input in 0..DEFAULT_INPUTS {
        let (one, other) = (r.below(pool.len()), r.below(own));
        let text = mutate(&mut r, shardc_ir::ops::NAMES, &pool[one], &pool[other]);
        let Ok(n) = catch_unwind(|| exercise_rules(&text)) else {
            panic!("input {input} of seed {seed}:\n{text}\n(escaped: {text:?})");
        };
        made += n;
        if n > 0 && pool.len() < MAX_POOL && text.len() < MAX_SIZE {
            pool.push(text);
        }
    }
    assert!(made > 100, "{made} functions of {DEFAULT_INPUTS} texts");
}
