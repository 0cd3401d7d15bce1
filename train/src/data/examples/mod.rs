//! Examples to train on: chats, prompts with completions, and texts, in lines of JSON. Each is rendered by a chat
//! template, tokenized, and scored where an assistant speaks; rows of a step are made of them when it begins.

mod coder;
mod file;
mod made;
mod pack;
mod python;
mod room;
mod shape;
mod spans;
mod stats;
mod template;

use super::order::{Order, Picks};
use super::{Reading, Recipe, TooLong};
use coder::{Coded, Coder};
pub use coder::{Prompt, Prompts};
use file::{Files, Spot};
pub use made::{Row, Sample, Setup};
use pack::{Deal, Lens, Rows};
pub use room::guarded;
use room::roomy;
use shape::{Reader, Shape};
use shardc_frontends::batch::IGNORED;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::documents::PADDING;
use spans::Marked;
pub use stats::Stats;
use std::path::PathBuf;

/// Bytes of text that are tokenized together, and texts at most: of each more is kept until then.
const GROUP: (usize, usize) = (1 << 20, 1 << 13);

/// Where the tokens of a row come from.
#[derive(Clone, Copy)]
struct Entry {
    spot: Spot,
    /// Which of the rows that its example makes.
    part: u32,
    /// Tokens.
    len: u32,
}

impl Lens for Vec<Entry> {
    fn count(&self) -> usize {
        self.len()
    }
    fn of(&self, example: usize) -> usize {
        self[example].len as usize
    }
}

/// Examples of files, and what is known of each: tokens are made again when a row is read.
pub struct Examples {
    files: Files,
    coder: Coder,
    shape: Shape,
    index: Vec<Entry>,
    rows: Rows,
    /// Tokens of a row.
    seq: usize,
    /// Rows have several examples.
    pub pack: bool,
    pub stats: Stats,
    /// blake3 of the bytes of the files.
    pub hash: String,
    /// The first rows.
    pub samples: Vec<Sample>,
}

impl Examples {
    /// Reads all examples of files once: an entry of an index remains of each.
    ///
    /// # Errors
    /// `data`, `chat-mask`, `chat-bos`, `tokenizer`, `token-range`, `io`.
    pub fn open(paths: &[PathBuf], setup: &Setup) -> Result<Examples> {
        roomy(|| Examples::read(paths, setup))
    }

    fn read(paths: &[PathBuf], setup: &Setup) -> Result<Examples> {
        let files = Files::open(paths)?;
        let coder = Coder::open(setup.tokenizer, setup.vocab, setup.reading)?;
        let (mut reader, mut group) = (Reader::default(), Group::default());
        let mut pass = Pass {
            coder: &coder,
            seq: setup.seq,
            index: vec![],
            stats: Stats::default(),
            show: setup.show,
            samples: vec![],
        };
        let hash = files.each(|spot, place, bytes| {
            let at = |d: Diag| if d.place.is_some() { d } else { d.at(place) };
            let example = reader.read(&bytes).map_err(at)?;
            pass.stats.shape = reader.shape;
            let [empty, none] = [coder.says_nothing(&example), coder.writes_none(&example)];
            pass.stats.example(&example, empty, place);
            pass.stats.none.add(none, place);
            pass.stats.parts.add(coder.writes_parts(&example), place);
            reader.leaves(coder.unnamed(&example));
            let line = place.rsplit(':').next().unwrap_or_default();
            group.add(spot, place, coder.texts(&example, line).map_err(at)?);
            let full = group.bytes > GROUP.0 || group.texts.len() > GROUP.1;
            if full { pass.take(std::mem::take(&mut group)) } else { Ok(()) }
        })?;
        pass.take(group)?;
        let Pass { mut index, mut stats, samples, .. } = pass;
        index.shrink_to_fit();
        stats.unused = reader.unused.into_iter().collect();
        let name = files.name();
        let Some(shape) = reader.shape else {
            return Err(Diag::new("data", format!("{name} is empty"))
                .at(name)
                .help("give a file with an example in each line"));
        };
        if index.is_empty() {
            let d = Diag::new("data", "no token is scored").at(name);
            let d = d.rule("a row without a scored token teaches nothing, and is left out");
            return Err(match (stats.long.count > 0, shape) {
                _ if stats.barred == stats.examples => d
                    .why("each chat has turns of an assistant, and all of them have `weight` 0 or `train` false")
                    .help("take these keys out, or score all tokens: --loss-on all"),
                (true, _) => d.help("all examples are too long: compile with a larger --seq"),
                (_, Shape::Texts | Shape::Pairs) => d.help("write texts of two tokens or more"),
                _ => d.help("chats have no turn of an assistant, or it is cut: look at them with shardc data"),
            });
        }
        Ok(Examples {
            files,
            coder,
            shape,
            index,
            rows: Rows::default(),
            seq: setup.seq,
            pack: setup.pack,
            stats,
            hash,
            samples,
        })
    }

    fn deal(&self, picks: &Picks) -> Deal {
        Deal { seed: picks.seed, order: picks.order, pack: self.pack.then_some(self.seq) }
    }

    /// Rows of so many epochs.
    pub fn rows_of(&self, picks: &Picks, epochs: f64) -> u64 {
        let (whole, part) = (epochs.floor(), epochs.fract());
        let begin = |epoch: f64| self.rows.begin(&self.index, self.deal(picks), epoch as u64);
        let last = if part > 0.0 { (begin(whole + 1.0) - begin(whole)) as f64 * part } else { 0.0 };
        begin(whole) + last.ceil() as u64
    }

    /// Examples, or parts of them, that rows are made of; and their tokens.
    pub fn kept(&self) -> (usize, u64) {
        (self.index.len(), self.index.iter().map(|e| u64::from(e.len)).sum())
    }

    /// The share of tokens in rows that is not padding.
    pub fn full(&self, picks: &Picks, pack: bool) -> f64 {
        let deal = Deal { pack: pack.then_some(self.seq), ..self.deal(picks) };
        let rows = Rows::default().begin(&self.index, deal, 1);
        self.kept().1 as f64 / (rows as f64 * self.seq as f64)
    }

    /// Rows by their numbers since training began.
    ///
    /// # Errors
    /// `io`, `data` if the files have changed.
    pub fn batch(&self, picks: &Picks, rows: impl Iterator<Item = u64>) -> Result<Vec<Row>> {
        let deal = self.deal(picks);
        let of: Vec<Vec<usize>> = rows.map(|row| self.rows.row(&self.index, deal, row).1).collect();
        let mut coded = roomy(|| self.coded(&of.concat()))?.into_iter();
        Ok(of.iter().map(|row| self.row(coded.by_ref().take(row.len()))).collect())
    }

    /// Tokens of entries, read again.
    fn coded(&self, entries: &[usize]) -> Result<Vec<Coded>> {
        let mut reader = Reader { shape: Some(self.shape), ..Reader::default() };
        let (mut texts, mut counts) = (vec![], vec![]);
        for &i in entries {
            let spot = self.index[i].spot;
            let changed = |_| self.files.changed(spot);
            let example = reader.read(&self.files.read(spot)?).map_err(changed)?;
            let own = self.coder.texts(&example, "").map_err(changed)?;
            counts.push(own.len());
            texts.extend(own);
        }
        let mut all = self.coder.code(texts, &|_| self.files.name())?.into_iter();
        let mut out = vec![];
        for (&i, n) in entries.iter().zip(counts) {
            let entry = self.index[i];
            let changed = || self.files.changed(entry.spot);
            let mut parts = vec![];
            for c in all.by_ref().take(n) {
                parts.extend(c.cut(self.seq, long(&self.coder.reading, self.shape))?);
            }
            let c = parts.into_iter().nth(entry.part as usize).ok_or_else(changed)?;
            if c.ids.len() != entry.len as usize {
                return Err(changed());
            }
            out.push(c);
        }
        Ok(out)
    }

    /// A row of examples one behind the other, and padding.
    fn row(&self, all: impl Iterator<Item = Coded>) -> Row {
        let (mut ids, mut labels, mut segments) = (vec![], vec![], vec![]);
        for (i, c) in all.enumerate() {
            let label = |(&id, &scored): (&i32, &bool)| if scored { id } else { IGNORED };
            labels.extend(c.ids.iter().zip(&c.scored).map(label));
            segments.extend(std::iter::repeat_n(i as i32, c.ids.len()));
            ids.extend(c.ids);
        }
        ids.resize(self.seq, self.coder.pad);
        labels.resize(self.seq, IGNORED);
        segments.resize(self.seq, PADDING);
        // A position is scored against the token behind it.
        labels.rotate_left(1);
        labels.iter_mut().last().into_iter().for_each(|l| *l = IGNORED);
        Row { ids, targets: labels, segments }
    }

    /// How they became rows.
    pub fn recipe(&self) -> Recipe {
        let r = &self.coder.reading;
        Recipe {
            file: self.hash[..16].into(),
            template: self.coder.template.as_ref().map(|t| t.hash[..16].into()),
            tokenizer: self.coder.hash.clone(),
            seq: self.seq,
            pack: self.pack,
            too_long: long(r, self.shape),
            loss_on: r.loss_on,
            split_turns: r.split_turns,
            date: r.date(),
            rows: self.arrangement(),
        }
    }

    /// What tells these examples from others.
    pub fn mark(&self) -> String {
        let template = self.coder.template.as_ref().map_or("none", |t| &t.hash[..16]);
        format!(
            "of {}, hash {}, rows {}, template {template}, tokenizer {}",
            self.stats.what(),
            &self.hash[..16],
            self.arrangement(),
            self.coder.hash
        )
    }

    /// Hash of what decides which tokens row N has, but for the order: which examples there are, and how long.
    fn arrangement(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for e in &self.index {
            hash.update(&e.spot.at.to_le_bytes());
            hash.update(&e.part.to_le_bytes());
            hash.update(&e.len.to_le_bytes());
        }
        hash.finalize().to_hex()[..16].to_string()
    }

    /// What is told before the first step: of the examples, and of their tokens.
    pub fn told(&self) -> Vec<String> {
        let of = match (self.shape, &self.coder.template) {
            (Shape::Texts, _) | (_, None) => String::new(),
            // Two texts are no chat.
            (Shape::Pairs, _) if self.stats.turns == 0 => String::new(),
            (_, Some(t)) => {
                let how = match t.tags {
                    true => "masks by its generation tags",
                    false => "no generation tags: masks by prefix",
                };
                format!(", template of {} ({how})", self.coder.model())
            }
        };
        let first = format!("data {}: {}{of}", self.files.name(), self.stats.what());
        [vec![first], self.stats.lines(self.kept().1)].concat()
    }

    /// What is told of rows, of an epoch of steps of so many, and of the first row.
    pub fn told_rows(&self, picks: &Picks, batch: Option<usize>) -> Vec<String> {
        let mut out = vec![];
        let rows = self.rows_of(picks, 1.0);
        let (full, packed) = (self.full(picks, self.pack), self.full(picks, true));
        let percent = |x: f64| format!("{:.1} %", 100.0 * x);
        let mut line = format!(
            "seq {}: {}, {} full",
            self.seq,
            count(rows as usize, "row", "rows"),
            percent(full)
        );
        if !self.pack && packed > 1.1 * full {
            line += &format!(
                "; packed they would be {} full (compile with --documents rows)",
                percent(packed)
            );
        }
        out.push(line);
        if let Some(batch) = batch {
            let order = match picks.order {
                Order::Shuffled => format!("shuffled, seed {}", picks.seed),
                other => other.name().into(),
            };
            let steps = rows as f64 / batch.max(1) as f64;
            out.push(format!("an epoch is {steps:.1} steps of {batch} rows; order {order}"));
        }
        let first = self.samples.first().filter(|_| batch.is_some());
        out.extend(first.map(|s| format!("first row, scored in [ ]: {}", s.shown)));
        out
    }
}

/// What becomes of examples that are longer than a row.
fn long(reading: &Reading, shape: Shape) -> TooLong {
    reading.too_long.unwrap_or(match shape {
        Shape::Texts => TooLong::Split,
        _chats => TooLong::Truncate,
    })
}

/// Texts that are tokenized together.
#[derive(Default)]
struct Group {
    texts: Vec<Marked>,
    /// Of each text the example, and where it stands.
    of: Vec<(Spot, String)>,
    bytes: usize,
}

impl Group {
    fn add(&mut self, spot: Spot, place: &str, texts: Vec<Marked>) {
        self.bytes += texts.iter().map(|t| t.text.len()).sum::<usize>();
        self.of.extend(texts.iter().map(|_| (spot, place.to_string())));
        self.texts.extend(texts);
    }
}

/// The pass over all examples.
struct Pass<'a> {
    coder: &'a Coder,
    seq: usize,
    index: Vec<Entry>,
    stats: Stats,
    show: usize,
    samples: Vec<Sample>,
}

impl Pass<'_> {
    fn take(&mut self, group: Group) -> Result<()> {
        if group.texts.is_empty() {
            return Ok(());
        }
        let all = self.coder.code(group.texts, &|i| group.of[i].1.clone())?;
        let how = long(&self.coder.reading, self.stats.shape.unwrap_or(Shape::Texts));
        let mut part = 0;
        for (i, c) in all.into_iter().enumerate() {
            let (spot, place) = &group.of[i];
            if i == 0 || group.of[i - 1].0 != *spot {
                part = 0;
            }
            self.stats.coded(&c);
            let parts = c.cut(self.seq, how).map_err(|d| {
                let flag = d.place.clone().unwrap_or_default();
                d.why(flag).at(place)
            })?;
            let scored: usize = parts.iter().map(Coded::scores).sum();
            self.stats.cut.add(parts.first().is_some_and(|c| c.cut), place);
            self.stats.long.add(parts.is_empty(), place);
            self.stats.unscored.add(scored == 0 && !parts.is_empty(), place);
            for c in parts {
                let n = c.scores();
                if n > 0 {
                    self.stats.scored += n as u64;
                    self.index.push(Entry { spot: *spot, part, len: c.ids.len() as u32 });
                    if self.samples.len() < self.show {
                        let shown = stats::shown(&c, |id| self.coder.name(id as u32));
                        let (place, ids, scored) = (place.clone(), c.ids, c.scored);
                        self.samples.push(Sample { place, ids, scored, shown });
                    }
                }
                part += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
