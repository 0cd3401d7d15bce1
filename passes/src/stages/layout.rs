//! Cuts by hand: `--layers`.

use super::Unit;
use shardc_ir::diag::{Diag, Result, count};

/// What `--layers` says.
#[derive(Clone, PartialEq, Debug)]
pub enum StageLayout {
    /// By cost.
    Balanced,
    /// The same number of layers in every stage.
    Equal,
    /// Layers per stage; what stands before the layers goes with the first, what follows with the
    /// last.
    Counts(Vec<usize>),
    /// Scopes with which a new stage begins.
    Cuts(Vec<String>),
    /// Megatron-LM's layout: per stage its parts.
    Parts(Vec<Vec<LayoutItem>>),
}

/// One letter of Megatron-LM's layout (`pipeline_model_parallel_layout`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayoutItem {
    /// E: what stands before the layers.
    Embedding,
    /// t: a decoder layer.
    Layer,
    /// L: what follows the layers.
    Loss,
}

/// Most letters of a layout when it is written out.
const MAX_PARTS: usize = 1 << 16;

fn bad(text: &str, what: impl Into<String>) -> Diag {
    wrong(text, what)
        .help("for example --layers 'Et*3|(tt|)*2,tL' for 4 stages of 3, 2, 2 and 1 layers")
}

/// The same of a model, which has an example of its own.
fn wrong(text: &str, what: impl Into<String>) -> Diag {
    Diag::new("layers", what).at(format!("--layers {text}")).rule(
        "balanced, equal, layers per stage (8,8,9,7), scopes that begin a stage, or E t L | *n ()",
    )
}

impl StageLayout {
    /// Reads the flag.
    pub fn parse(text: &str) -> Result<StageLayout> {
        let text = text.trim();
        match text {
            "" | "balanced" => return Ok(StageLayout::Balanced),
            "equal" => return Ok(StageLayout::Equal),
            _ => {}
        }
        if text.contains('|') {
            return Ok(StageLayout::Parts(parts(text)?));
        }
        let items: Vec<&str> = text.split(',').map(str::trim).collect();
        let counts: std::result::Result<Vec<usize>, _> = items.iter().map(|i| i.parse()).collect();
        Ok(match counts {
            Ok(counts) => StageLayout::Counts(counts),
            Err(_) => StageLayout::Cuts(items.into_iter().map(String::from).collect()),
        })
    }

    /// Where stages begin among the units, and the end.
    pub(super) fn cuts(&self, units: &[Unit], stages: usize, text: &str) -> Result<Vec<usize>> {
        self.asked(units, stages, text).map_err(|mut d| {
            d.help.splice(..0, example(units, stages));
            d
        })
    }

    fn asked(&self, units: &[Unit], stages: usize, text: &str) -> Result<Vec<usize>> {
        let is_layer = |u: &Unit| u.layer.is_some();
        let layers = units.iter().filter(|u| is_layer(u)).count();
        let first = units.iter().position(is_layer).unwrap_or(0);
        let counts = match self {
            StageLayout::Balanced => vec![],
            StageLayout::Equal => {
                if layers % stages != 0 {
                    let near = |s: usize| s.max(1);
                    let fits = (1..=layers).filter(|s| layers % s == 0);
                    let near = fits.min_by_key(|s| s.abs_diff(near(stages))).unwrap_or(1);
                    return Err(wrong(
                        text,
                        format!("{} in {stages} equal stages", count(layers, "layer", "layers")),
                    )
                    .rule("layers % (pp * chunks) == 0 with --layers equal")
                    .help(format!(
                        "use {}, or --layers balanced",
                        count(near, "stage", "stages")
                    )));
                }
                vec![layers / stages; stages]
            }
            StageLayout::Counts(counts) => counts.clone(),
            StageLayout::Cuts(names) => return by_name(names, units, stages, text),
            StageLayout::Parts(parts) => {
                return by_parts(parts, units, stages, first, layers, text);
            }
        };
        let total = counts.iter().fold(0usize, |n, &c| n.saturating_add(c));
        if counts.len() != stages || total != layers {
            let what = stages_of(counts.len(), total);
            return Err(wrong(text, what).rule(here(stages, layers)));
        }
        let mut cuts = vec![0];
        let mut at = first;
        for c in &counts[..stages - 1] {
            at += c;
            cuts.push(at);
        }
        cuts.push(units.len());
        check(cuts, text)
    }
}

/// No stage may be empty.
fn check(cuts: Vec<usize>, text: &str) -> Result<Vec<usize>> {
    match cuts.windows(2).position(|w| w[0] >= w[1]) {
        None => Ok(cuts),
        Some(i) => Err(wrong(text, format!("stage {i} is empty"))),
    }
}

/// So many stages of so many layers.
fn stages_of(stages: usize, layers: usize) -> String {
    format!("{} of {}", count(stages, "stage", "stages"), count(layers, "layer", "layers"))
}

/// What there is in place of other numbers.
fn here(stages: usize, layers: usize) -> String {
    format!("here: {}", stages_of(stages, layers))
}

/// What to write in place of stages that are not legal; none if there are too many.
fn example(units: &[Unit], stages: usize) -> Option<String> {
    let layers = units.iter().filter(|u| u.layer.is_some()).count();
    let all: Vec<String> = match stages {
        0 | 1 => return Some("leave it out: without pp nothing is cut".into()),
        _ if layers >= stages => {
            let each = |i: usize| layers / stages + usize::from(i < layers % stages);
            (0..stages).map(|i| each(i).to_string()).collect()
        }
        _ if units.len() >= stages => {
            (1..stages).map(|i| units[i * units.len() / stages].name.clone()).collect()
        }
        _too_many => return None,
    };
    Some(format!("for example --layers {}", all.join(",")))
}

fn by_name(names: &[String], units: &[Unit], stages: usize, text: &str) -> Result<Vec<usize>> {
    let mut cuts = vec![0];
    for name in names {
        let Some(at) = units.iter().position(|u| u.name == *name) else {
            let known: Vec<&str> = units.iter().map(|u| &*u.name).take(6).collect();
            return Err(wrong(text, format!("no part of the model is called `{name}`"))
                .help(format!("the first {} are {}", known.len(), known.join(", "))));
        };
        cuts.push(at);
    }
    cuts.push(units.len());
    if cuts.len() != stages + 1 {
        let cuts = |n: usize| count(n, "cut", "cuts");
        let (given, makes) = (cuts(names.len()), if names.len() == 1 { "makes" } else { "make" });
        return Err(wrong(
            text,
            format!("{given} {makes} {}", count(names.len() + 1, "stage", "stages")),
        )
        .rule(format!("here: {}, {}", count(stages, "stage", "stages"), cuts(stages - 1))));
    }
    check(cuts, text)
}

fn by_parts(
    parts: &[Vec<LayoutItem>],
    units: &[Unit],
    stages: usize,
    first: usize,
    layers: usize,
    text: &str,
) -> Result<Vec<usize>> {
    let all: Vec<LayoutItem> = parts.concat();
    let of = |p: LayoutItem| all.iter().filter(|x| **x == p).count();
    if parts.len() != stages || of(LayoutItem::Layer) != layers {
        let what = stages_of(parts.len(), of(LayoutItem::Layer));
        return Err(wrong(text, what).rule(here(stages, layers)));
    }
    let order =
        all.first() == Some(&LayoutItem::Embedding) && all.last() == Some(&LayoutItem::Loss);
    if !order || of(LayoutItem::Embedding) != 1 || of(LayoutItem::Loss) != 1 {
        return Err(wrong(text, "there is one E, at the beginning, and one L, at the end"));
    }
    let mut cuts = vec![0];
    let mut at = 0;
    for p in &parts[..stages - 1] {
        for part in p {
            at += match part {
                LayoutItem::Embedding => first,
                LayoutItem::Layer => 1,
                LayoutItem::Loss => units.len() - first - layers,
            };
        }
        cuts.push(at);
    }
    cuts.push(units.len());
    check(cuts, text)
}

/// Reads Megatron-LM's layout: letters, `|` between stages, `x*n` and `(…)*n` repeated, commas for
/// the eye.
fn parts(text: &str) -> Result<Vec<Vec<LayoutItem>>> {
    let mut r = Reader { text, rest: text.as_bytes(), made: 0 };
    let all = r.group(0)?;
    if !r.rest.is_empty() {
        return Err(bad(text, "a `)` too many"));
    }
    let mut out = vec![vec![]];
    for p in all {
        match p {
            Some(p) => out.last_mut().expect("never empty").push(p),
            None => out.push(vec![]),
        }
    }
    Ok(out)
}

struct Reader<'a> {
    text: &'a str,
    rest: &'a [u8],
    made: usize,
}

impl Reader<'_> {
    /// Items up to a `)` or the end; `None` is a `|`.
    fn group(&mut self, depth: usize) -> Result<Vec<Option<LayoutItem>>> {
        let mut out: Vec<Option<LayoutItem>> = vec![];
        while let Some((&c, rest)) = self.rest.split_first() {
            if c == b')' {
                break;
            }
            self.rest = rest;
            let item = match c {
                b',' | b' ' => continue,
                b'E' => vec![Some(LayoutItem::Embedding)],
                b't' => vec![Some(LayoutItem::Layer)],
                b'L' => vec![Some(LayoutItem::Loss)],
                b'|' => vec![None],
                b'm' => {
                    return Err(bad(self.text, "`m` is a layer for multi-token prediction")
                        .help("take m out: 0 of them are in the models that are read today"));
                }
                b'(' if depth < 8 => {
                    let inner = self.group(depth + 1)?;
                    match self.rest.split_first() {
                        Some((b')', rest)) => self.rest = rest,
                        _ => return Err(bad(self.text, "a `(` is not closed")),
                    }
                    inner
                }
                c => return Err(bad(self.text, format!("`{}` is not a part", char::from(c)))),
            };
            let times = self.times()?;
            self.made = self.made.saturating_add(item.len().saturating_mul(times));
            if self.made > MAX_PARTS {
                return Err(bad(self.text, format!("more than {MAX_PARTS} parts")));
            }
            (0..times).for_each(|_| out.extend_from_slice(&item));
        }
        Ok(out)
    }

    /// `*n`, if it stands here, else 1.
    fn times(&mut self) -> Result<usize> {
        let Some((b'*', rest)) = self.rest.split_first() else { return Ok(1) };
        let digits = rest.iter().take_while(|c| c.is_ascii_digit()).count();
        let number = std::str::from_utf8(&rest[..digits]).ok().and_then(|d| d.parse().ok());
        self.rest = &rest[digits..];
        number.ok_or_else(|| bad(self.text, "a number stands after `*`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(text: &str) -> Vec<usize> {
        match StageLayout::parse(text) {
            Ok(StageLayout::Parts(p)) => {
                p.iter().map(|s| s.iter().filter(|x| **x == LayoutItem::Layer).count()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn megatron_layouts_are_read() {
        // The layout of DeepSeek-V3 on 16 ranks of 2 chunks, without its m.
        let all = layers("Et*3|(tt|)*29,|L");
        assert_eq!((all.len(), all[0], all[1], all[29], all[31]), (32, 3, 2, 2, 0));
        assert_eq!(all.iter().sum::<usize>(), 61);
        assert_eq!(layers("Ett|t*2|tL"), [2, 2, 1]);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["E|(t", "E|t)", "E|x", "E|t*", "E|t*99999999", "E|m|L", "(((((((((t|)"] {
            assert!(StageLayout::parse(text).is_err(), "{text}");
        }
    }
}
