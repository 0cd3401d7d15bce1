//! Edits of a plan's texts that leave them well written: sizes, attributes, operands, roles, marks of
//! launches, the mesh, settings and the schedule.

use super::mutate::{Draw, NUMBERS};
use std::ops::Range;

/// What is edited.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    Sizes,
    Attributes,
    Operands,
    Roles,
    Marks,
    Mesh,
    Settings,
    Schedule,
}

pub const KINDS: [Kind; 8] = [
    Kind::Sizes,
    Kind::Attributes,
    Kind::Operands,
    Kind::Roles,
    Kind::Marks,
    Kind::Mesh,
    Kind::Settings,
    Kind::Schedule,
];

/// How often each is drawn: what reading mostly refuses, seldom.
const WEIGHTS: [usize; 8] = [3, 4, 5, 2, 3, 1, 2, 1];

/// The texts of a plan that are edited.
#[derive(Clone, PartialEq, Eq)]
pub struct Texts {
    pub programs: String,
    pub head: String,
    pub options: String,
    pub weights: String,
    pub schedule: String,
}

impl Texts {
    /// Programs alone.
    pub fn of_programs(programs: String) -> Texts {
        let none = String::new;
        Texts { programs, head: none(), options: none(), weights: none(), schedule: none() }
    }
}

impl Kind {
    pub fn drawn(draw: &mut Draw) -> Kind {
        let at = draw.below(WEIGHTS.iter().sum());
        let upto = |i: usize| WEIGHTS[..=i].iter().sum::<usize>();
        KINDS[(0..KINDS.len()).find(|&i| at < upto(i)).expect("less than all")]
    }

    pub fn edit(self, t: &mut Texts, draw: &mut Draw) {
        match self {
            Kind::Sizes => sizes(t, draw),
            Kind::Attributes => attributes(&mut t.programs, draw),
            Kind::Operands => operands(&mut t.programs, draw),
            Kind::Roles => roles(&mut t.programs, draw),
            Kind::Marks => marks(&mut t.programs, draw),
            Kind::Mesh => mesh(t, draw),
            Kind::Settings => settings(t, draw),
            Kind::Schedule => schedule(&mut t.schedule, draw),
        }
    }
}

/// One of the items, which are some.
fn one<'a, T>(items: &'a [T], draw: &mut Draw) -> Option<&'a T> {
    items.get(draw.below(items.len()))
}

/// Lines by their places, without the ends of lines, for which something holds.
fn lines(text: &str, holds: impl Fn(&str) -> bool) -> Vec<Range<usize>> {
    let begin = text.as_ptr() as usize;
    let place = |l: &str| l.as_ptr() as usize - begin..l.as_ptr() as usize - begin + l.len();
    text.lines().filter(|l| holds(l)).map(place).collect()
}

/// A line of a node: `%x = op[..] %y : type`.
fn is_node(line: &str) -> bool {
    line.starts_with("  %") && line.contains(" = ")
}

/// Places of whole numbers in a text.
fn numbers(text: &str) -> Vec<Range<usize>> {
    let b = text.as_bytes();
    let word = |c: u8| c.is_ascii_alphanumeric() || b"_.%-".contains(&c);
    let mut all = vec![];
    let mut i = 0;
    while i < b.len() {
        let end = (i..b.len()).find(|&j| !word(b[j])).unwrap_or(b.len());
        if end > i && b[i..end].iter().all(u8::is_ascii_digit) {
            all.push(i..end);
        }
        i = end + 1;
    }
    all
}

/// Another number: near, a multiple, a part, or, seldom, one that programs trip over.
fn other(n: &str, draw: &mut Draw) -> String {
    let n: u64 = n.parse().unwrap_or(1);
    match draw.below(16) {
        0..4 => n.saturating_add(1),
        4..8 => n.saturating_sub(1),
        8..11 => n.saturating_mul(2),
        11..13 => n / 2,
        13 | 14 => draw.below(64) as u64,
        _ => return NUMBERS[draw.below(NUMBERS.len())].to_string(),
    }
    .to_string()
}

/// Another number of any kind.
fn other_real(x: f64, draw: &mut Draw) -> String {
    match draw.below(8) {
        0 => NUMBERS[draw.below(NUMBERS.len())].to_string(),
        i => format!("{:?}", x * [2.0, -1.0, 1e30, 0.5, 0.0, 1.5, 1e-30][i - 1]),
    }
}

/// A size in all texts at once, or in one line.
fn sizes(t: &mut Texts, draw: &mut Draw) {
    let dims = |l: &str| l.trim_start().starts_with('%') && l.contains('[');
    let Some(line) = one(&lines(&t.programs, dims), draw).cloned() else { return };
    let Some(at) = one(&numbers(&t.programs[line.clone()]), draw).cloned() else { return };
    let at = line.start + at.start..line.start + at.end;
    let old = t.programs[at.clone()].to_string();
    let new = other(&old, draw);
    if draw.below(6) == 0 {
        return t.programs.replace_range(at, &new);
    }
    // Of the head, settings and facts, which stand before the hashes.
    let begin = t.head.find("\"settings\"").unwrap_or(0);
    for (text, begin) in
        [(&mut t.programs, 0), (&mut t.weights, 0), (&mut t.head, begin), (&mut t.options, 0)]
    {
        for at in numbers(text).into_iter().rev() {
            if at.start >= begin && text[at.clone()] == old {
                text.replace_range(at, &new);
            }
        }
    }
}

/// A number or a word in the brackets behind an op's name.
fn attributes(text: &mut String, draw: &mut Draw) {
    let inside = |l: &str| -> Option<Range<usize>> {
        let op = l.find(" = ")? + 3;
        let open = op + l[op..].find(['[', ' '])?;
        let close = open + l[open..].find(']')?;
        (l.as_bytes()[open] == b'[').then_some(open + 1..close)
    };
    let has = |l: &str| is_node(l) && inside(l).is_some_and(|r| !r.is_empty());
    let all = lines(text, has);
    let Some(line) = one(&all, draw).cloned() else { return };
    let of = inside(&text[line.clone()]).expect("looked at");
    let whole = line.start + of.start..line.start + of.end;
    let own = text[whole.clone()].to_string();
    let part = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    let words: Vec<&str> = own.split(|c| !part(c)).filter(|w| !w.is_empty()).collect();
    let Some(word) = one(&words, draw).copied() else { return };
    let new = match draw.below(8) {
        // Of another use of such brackets, all of them or a word.
        0 => {
            let from = one(&all, draw).cloned().expect("one is there");
            let of = inside(&text[from.clone()]).expect("looked at");
            text[from.start + of.start..from.start + of.end].to_string()
        }
        1 => own.replacen(word, NUMBERS[draw.below(NUMBERS.len())], 1),
        _ => match word.parse::<f64>() {
            Ok(x) if word.contains(['.', 'e']) => own.replacen(word, &other_real(x, draw), 1),
            Ok(_) => own.replacen(word, &other(word, draw), 1),
            // Letters of a rule, exchanged.
            Err(_) => {
                let mut letters: Vec<char> = word.chars().collect();
                let (i, j) = (draw.below(letters.len()), draw.below(letters.len()));
                letters.swap(i, j);
                own.replacen(word, &letters.into_iter().collect::<String>(), 1)
            }
        },
    };
    text.replace_range(whole, &new);
}

/// The type of a node's or argument's only value, as text.
fn only_type(line: &str) -> Option<(&str, &str)> {
    let line = line.split("  //").next()?.trim().trim_end_matches(['&', ' ', ',']);
    let name = line.split([' ', ':']).next()?;
    let of = line.rsplit_once(" : ").map(|x| x.1);
    let of = of.or_else(|| line.split_once(": ").and_then(|x| x.1.split(' ').next()))?;
    (!of.contains(", ")).then_some((name, of))
}

/// An operand becomes another value before it in the same function, mostly of the same type, or two are
/// exchanged, or one goes.
fn operands(text: &mut String, draw: &mut Draw) {
    let Some(line) = one(&lines(text, is_node), draw).cloned() else { return };
    let own = text[line.clone()].to_string();
    let Some((left, right)) = own.split_once(" = ") else { return };
    let end = right.find(" : ").unwrap_or(right.len());
    let places: Vec<Range<usize>> = right[..end]
        .match_indices('%')
        .map(|(i, _)| {
            let close = right[i..end].find([',', ' ']).map_or(end, |n| i + n);
            left.len() + 3 + i..left.len() + 3 + close
        })
        .collect();
    let Some(at) = one(&places, draw).cloned() else { return };
    let operand = own[at.clone()].to_string();
    let function = text[..line.start].rfind("func @").unwrap_or(0);
    let before: Vec<(&str, &str)> = text[function..line.start]
        .lines()
        .filter(|l| l.starts_with("  %") && !l.contains('{'))
        .filter_map(only_type)
        .collect();
    let of = before.iter().rev().find(|v| v.0 == operand).map(|v| v.1);
    let alike: Vec<&str> =
        before.iter().filter(|v| Some(v.1) == of && v.0 != operand).map(|v| v.0).collect();
    let all: Vec<&str> = before.iter().map(|v| v.0).collect();
    let mut new = own.clone();
    match draw.below(16) {
        0..3 => {
            let Some(second) = one(&places, draw).cloned() else { return };
            let other = own[second.clone()].to_string();
            let (first, second, a, b) = match at.start <= second.start {
                true => (at, second, other, operand),
                false => (second, at, operand, other),
            };
            new.replace_range(second, &b);
            new.replace_range(first, &a);
        }
        3 => new.replace_range(at, one(&all, draw).unwrap_or(&"%none")),
        4 => new.replace_range(at, ""),
        _ => match one(&alike, draw) {
            Some(v) => new.replace_range(at, v),
            None => return,
        },
    }
    text.replace_range(line, &new);
}

/// The role or the name of an argument or a result is that of another, or two lines change places.
fn roles(text: &mut String, draw: &mut Draw) {
    let all = lines(text, |l| l.trim_start().starts_with('%') && l.ends_with("\","));
    let (Some(a), Some(b)) = (one(&all, draw).cloned(), one(&all, draw).cloned()) else { return };
    let (a, b) = if a.start <= b.start { (a, b) } else { (b, a) };
    if a == b {
        return;
    }
    let (first, second) = (text[a.clone()].to_string(), text[b.clone()].to_string());
    // `%x: f32[2] param "x",`: the type, the role, the name.
    let parts = |l: &str| -> Option<[String; 3]> {
        let (name, open) = (l.find(" \"")?, l.rfind("] ").map_or(l.find("[]")?, |i| i + 1));
        Some([l[..open].into(), l[open..name.max(open)].into(), l[name..].into()])
    };
    match (draw.below(4), parts(&first), parts(&second)) {
        (0, ..) => {
            text.replace_range(b, &first);
            text.replace_range(a, &second);
        }
        (1, Some(x), Some(y)) => text.replace_range(a, &[&x[0][..], &y[1], &x[2]].concat()),
        (2, Some(x), Some(y)) => text.replace_range(a, &[&x[0][..], &x[1], &y[2]].concat()),
        (_, Some(x), Some(y)) => text.replace_range(b, &[&y[0][..], &x[1], &x[2]].concat()),
        _ => {}
    }
}

/// A node runs in the same launch as the next one, or no more.
fn marks(text: &mut String, draw: &mut Draw) {
    for _ in 0..=draw.below(8) {
        let Some(line) = one(&lines(text, is_node), draw).cloned() else { return };
        let own = &text[line.clone()];
        let end = own.find("  //").unwrap_or(own.len());
        // `&`: one row of work with the next; `&&`: one launch with it.
        let without = own[..end].trim_end_matches(['&', ' ']);
        let marked = without.len() < end;
        let mark = match (marked, draw.below(8)) {
            (true, 0..5) => "",
            (true, _) if own[..end].ends_with("&&") => " &",
            (true, _) => " &&",
            (false, 0) => " &",
            (false, 1) => " &&",
            // Mostly no kernel does both.
            (false, _) => continue,
        };
        let new = format!("{without}{mark}{}", &own[end..]);
        text.replace_range(line, &new);
    }
}

/// A size or an axis of the mesh, mostly also where options have it.
fn mesh(t: &mut Texts, draw: &mut Draw) {
    let line = 0..t.programs.find('\n').unwrap_or(0);
    let own = t.programs[line.clone()].to_string();
    let axes: Vec<&str> =
        own.trim_start_matches("mesh [").trim_end_matches(']').split(", ").collect();
    let Some((axis, n)) = one(&axes, draw).and_then(|a| a.split_once('=')) else { return };
    const AXES: [&str; 6] = ["tp", "dp_shard", "dp_replicate", "pp", "cp", "ep"];
    let (to, many) = match draw.below(3) {
        0 => (AXES[draw.below(AXES.len())].to_string(), n.to_string()),
        _ => (axis.to_string(), other(n, draw)),
    };
    t.programs
        .replace_range(line, &own.replacen(&format!("{axis}={n}"), &format!("{to}={many}"), 1));
    if to != axis {
        t.programs = t.programs.replace(&format!("@{axis}"), &format!("@{to}"));
        t.programs = t.programs.replace(&format!("[{axis}]"), &format!("[{to}]"));
        t.programs = t.programs.replace(&format!("+{axis}"), &format!("+{to}"));
        t.programs = t.programs.replace(&format!("~{axis}"), &format!("~{to}"));
    }
    if draw.below(8) > 0 {
        let (old, new) = (format!("[\"{axis}\", {n}]"), format!("[\"{to}\", {many}]"));
        t.options = t.options.replace(&old, &new);
    }
}

/// A value of the settings in `plan.json`, of the options, or of a weight.
fn settings(t: &mut Texts, draw: &mut Draw) {
    let end = t.head.find("\"files\"").unwrap_or(t.head.len());
    let (text, end) = match draw.below(3) {
        0 => (&mut t.head, end),
        1 => (&mut t.options, usize::MAX),
        _ => (&mut t.weights, usize::MAX),
    };
    let real = |c: char| c.is_ascii_digit() || ".eE+-".contains(c);
    let base = text.as_ptr() as usize;
    let place = |w: &str| w.as_ptr() as usize - base..w.as_ptr() as usize - base + w.len();
    let all: Vec<Range<usize>> = text
        .split(|c| !real(c))
        .filter(|w| w.starts_with(|c: char| c.is_ascii_digit()) && w.parse::<f64>().is_ok())
        .map(place)
        .filter(|at| at.end < end)
        .collect();
    let Some(at) = one(&all, draw).cloned() else { return };
    let old = text[at.clone()].to_string();
    let new = match old.parse::<u64>() {
        Ok(_) => other(&old, draw),
        Err(_) => other_real(old.parse().expect("a number"), draw),
    };
    text.replace_range(at, &new);
}

/// Two actions of a rank change places, or one is that of another.
fn schedule(text: &mut String, draw: &mut Draw) {
    let mut rows: Vec<Vec<String>> =
        text.lines().map(|l| l.split(',').map(String::from).collect()).collect();
    let (i, j) = (draw.below(rows.len()), draw.below(rows.len()));
    let a = draw.below(rows[i].len());
    // Mostly those that follow each other.
    let near = draw.below(4) > 0;
    let (j, b) = if near { (i, a + 1) } else { (j, draw.below(rows[j].len())) };
    let Some(second) = rows[j].get(b).cloned() else { return };
    let first = std::mem::replace(&mut rows[i][a], second);
    if near || draw.below(3) > 0 {
        rows[j][b] = first;
    }
    *text = rows.iter().map(|r| r.join(",") + "\n").collect();
}
