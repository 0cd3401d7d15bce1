//! `shardc generate`: text that a model writes behind a prompt. Each token is one forward pass over the whole text: for
//! samples of a model, not for serving it.

mod last;
mod sampling;
mod writer;

use super::run::{Kernels, On};
use clap::builder::RangedU64ValueParser;
use sampling::Sampling;
use serde_json::{Value as Json, json};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::types::DType;
use shardc_plans::hub;
use shardc_process::terminal::{json_line, note, print, rest};
use shardc_train::data::{Prompts, Reading, Templating};
use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::time::Instant;
use writer::{Writer, read_json};

/// Flags of `generate`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Generate {
    /// A checkpoint (or a folder of them, of which the latest is taken), a plan, or a model: an HF folder, .pt2 or .ir
    pub from: PathBuf,
    /// HF folder or .pt2 with the weights; of a checkpoint of adapters those of the base model [default: those that
    /// the plan was made of]
    #[arg(long, value_name = "PATH")]
    pub weights: Option<PathBuf>,
    /// Folder with an adapter, as PEFT writes it
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Tokenizer: a folder with tokenizer.json, or that file [default: that of the weights, or of the model's folder]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Text to go on with [default: standard input]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["chat", "chat_file"])]
    pub prompt: Option<String>,
    /// What a user says in a chat, which the model's template makes a prompt of
    #[arg(long, value_name = "TEXT", conflicts_with = "chat_file")]
    pub chat: Option<String>,
    /// The system message before what --chat says
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Examples (FILE.jsonl or FILE.json): each chat up to its last answer, each prompt, or each text
    #[arg(long, value_name = "FILE")]
    pub chat_file: Option<PathBuf>,
    /// Most tokens to write
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_new: usize,
    /// Divides logits before a token is drawn; at 0 the most probable token is taken
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f64,
    /// Draw from the fewest of the most probable tokens that have this share of the probability
    #[arg(long, value_name = "P", value_parser = share)]
    pub top_p: Option<f64>,
    /// Draw from the K most probable tokens
    #[arg(long, value_name = "K", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub top_k: Option<usize>,
    /// What draws depend on: the same seed gives the same text [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text, beside the tokens that end one; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Samples of each prompt
    #[arg(short, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub n: u32,
    /// Element type of weights and activations: f32, bf16 or f16 [default: that of the plan, of a model f32]
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub dtype: Option<DType>,
    #[command(flatten)]
    pub template: Templating,
    /// Threads [default: the cores available to the process]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub threads: Option<usize>,
    /// Where the model runs: cpu, or cuda
    #[arg(long, value_enum, default_value_t)]
    pub device: On,
    /// Row kernels on the CPU: compiled by the machine's C compiler, or interpreted, a few per cent slower in f32
    /// [default: compiled; interpreted, with a warning, if there is no working compiler]
    #[arg(long, value_enum)]
    pub kernels: Option<Kernels>,
}

/// A temperature.
fn temperature(text: &str) -> std::result::Result<f64, String> {
    let x = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    x.ok_or_else(|| "it is 0 or more, for example 0.7".into())
}

/// A share of the probability.
fn share(text: &str) -> std::result::Result<f64, String> {
    let x = text.parse::<f64>().ok().filter(|x| *x > 0.0 && *x <= 1.0);
    x.ok_or_else(|| "it is above 0 and at most 1, for example 0.9".into())
}

/// An element type.
fn dtype(text: &str) -> std::result::Result<DType, String> {
    DType::named(text).filter(|t| t.is_float()).ok_or_else(|| "it is f32, bf16 or f16".into())
}

/// Longest prompt that is read from standard input, in bytes.
const MAX_PROMPT: u64 = 16 << 20;

/// What a model is asked to go on with.
struct Prompt {
    /// Where it stands, of a file.
    place: Option<String>,
    ids: Vec<u32>,
}

/// Why a text ended.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Ended {
    /// A token that ends texts.
    Token(u32),
    /// A text of `--stop`.
    Text(String),
    /// It has `--max-new` tokens.
    Length,
    /// The model has no more positions.
    Positions,
}

/// Writes texts; the exit status.
///
/// # Errors
/// `flag`, `data`, `sequence-too-long`, `missing-weights`, `tokenizer`, and those of reading, compiling and running a
/// model.
pub fn generate(how: &Generate, as_json: bool) -> Result<i32> {
    check(how)?;
    let mut writer = Writer::open(how)?;
    let place = tokenizer(how, &writer)?;
    let reading = Reading { template: how.template.clone(), ..Reading::default() };
    let words = Prompts::open(&place, &reading)?;
    let prompts = prompts(how, &words)?;
    for p in &prompts {
        fits(p, &writer)?;
    }
    let ends = ends(&words, &writer)?;
    let sampling = Sampling {
        temperature: how.temperature,
        top_p: how.top_p.unwrap_or(1.0),
        top_k: how.top_k.unwrap_or(usize::MAX),
        seed: how.seed.unwrap_or(0),
    };
    note(
        "each token is a forward pass over the whole text: for samples; serve a model with other software",
    );
    let many = prompts.len() > 1 || how.n > 1;
    let (mut tokens, since) = (0, Instant::now());
    for p in &prompts {
        for sample in 0..how.n {
            let heads =
                [p.place.clone().filter(|_| many), (how.n > 1).then(|| format!("sample {sample}"))];
            let heads: Vec<String> = heads.into_iter().flatten().collect();
            if !as_json && !heads.is_empty() {
                print(format!("# {}\n", heads.join(", ")))?;
            }
            let mut text =
                Text { words: &words, how, live: !as_json, whole: String::new(), shown: 0 };
            let (ids, ended) = written(&mut writer, &sampling, (p, sample), &ends, &mut text)?;
            tokens += ids.len();
            match as_json {
                true => {
                    print(json_line("generate", object(p, sample, &ids, &text, &ended, &words)))?
                }
                false => print("\n")?,
            }
        }
    }
    let seconds = since.elapsed().as_secs_f64();
    let rate = tokens as f64 / seconds;
    note(format!("{} in {seconds:.1} s, {rate:.1} tokens/s", count(tokens, "token", "tokens")));
    Ok(0)
}

/// Refuses flags that change nothing.
fn check(how: &Generate) -> Result<()> {
    let given = [
        ("--top-p", how.top_p.is_some()),
        ("--top-k", how.top_k.is_some()),
        ("--seed", how.seed.is_some()),
        ("-n", how.n > 1),
    ];
    let chat = how.chat.is_some() || how.chat_file.is_some();
    let refuse =
        |flag: &str, what: &str, help: &str| Err(Diag::new("flag", what).at(flag).help(help));
    if let Some((flag, _)) = given.iter().find(|f| f.1 && how.temperature == 0.0) {
        let what = "at --temperature 0 nothing is drawn: every sample is the most probable text";
        return refuse(flag, what, "add --temperature 1, or leave it out");
    }
    match how.template.given().filter(|_| !chat) {
        Some(flag) => refuse(
            &flag,
            "a prompt is taken as it is, without a template",
            "use --chat or --chat-file",
        ),
        None => Ok(()),
    }
}

/// The tokenizer: the one that is given, or that of the model.
fn tokenizer(how: &Generate, writer: &Writer) -> Result<PathBuf> {
    if let Some(given) = &how.tokenizer {
        return hub::resolved(given);
    }
    writer.folder_with("tokenizer.json").cloned().ok_or_else(|| {
        let d = Diag::new("data", "no --tokenizer: the model's folder has no tokenizer.json");
        let looked = writer.folders().iter();
        let d = looked.fold(d, |d, f| d.why(format!("it is looked for in {}", f.display())));
        d.help("add --tokenizer DIR, the folder of the model with tokenizer.json")
    })
}

fn prompts(how: &Generate, words: &Prompts) -> Result<Vec<Prompt>> {
    let alone = |ids| vec![Prompt { place: None, ids }];
    Ok(match (&how.prompt, &how.chat, &how.chat_file) {
        (Some(text), ..) => alone(words.text(text)?),
        (_, Some(said), _) => alone(words.chat(how.system.as_deref(), said)?),
        (_, _, Some(file)) => {
            let all = words.file(file)?.into_iter();
            all.map(|p| Prompt { place: Some(p.place), ids: p.ids }).collect()
        }
        _none => alone(words.text(&standard_input()?)?),
    })
}

/// The text of standard input, without the end of its last line.
fn standard_input() -> Result<String> {
    let input = std::io::stdin();
    let help = "give --prompt TEXT, --chat TEXT or --chat-file FILE";
    if input.is_terminal() {
        return Err(Diag::new("flag", "there is no prompt").help(help));
    }
    let wrong = |what: String| Diag::new("data", what).at("standard input").help(help);
    let mut text = String::new();
    let read = input.lock().take(MAX_PROMPT + 1).read_to_string(&mut text);
    read.map_err(|e| wrong(format!("it cannot be read: {e}")))?;
    if text.len() as u64 > MAX_PROMPT {
        return Err(wrong(format!("the prompt has more than {MAX_PROMPT} bytes")));
    }
    let end = text.strip_suffix('\n').map_or(text.len(), str::len);
    text.truncate(end);
    Ok(text)
}

/// Refuses a prompt of no token, and one that leaves no room for another.
fn fits(p: &Prompt, writer: &Writer) -> Result<()> {
    let at = |d: Diag| p.place.iter().fold(d, |d, place| d.at(place));
    if p.ids.is_empty() {
        return Err(at(Diag::new("data", "the prompt has no token"))
            .rule("a model goes on with a text")
            .help("give a text, or a chat"));
    }
    match writer.most.filter(|&most| p.ids.len() >= most) {
        None => Ok(()),
        Some(most) => {
            let n = p.ids.len();
            let what = format!("the prompt has {n} tokens, the model has {most} positions");
            Err(at(Diag::new("sequence-too-long", what))
                .rule("the prompt and what follows stand in the positions of the model")
                .help(format!("give a prompt of at most {} tokens", most - 1)))
        }
    }
}

/// The tokens that end a text: those of generation_config.json, or else of config.json, or else of the tokenizer, and
/// the one that the template writes behind what an assistant says.
fn ends(words: &Prompts, writer: &Writer) -> Result<BTreeSet<u32>> {
    let of = |json: &Json| -> Vec<u32> {
        let ids = &json["eos_token_id"];
        let one = |x: &Json| x.as_u64().and_then(|x| u32::try_from(x).ok());
        ids.as_array().map_or_else(
            || one(ids).into_iter().collect(),
            |all| all.iter().filter_map(one).collect(),
        )
    };
    let read = |name: &str| -> Result<Vec<u32>> {
        let folder = writer.folder_with(name).map_or(Path::new(""), |f| f);
        Ok(of(&read_json(&folder.join(name))?))
    };
    let mut all = match writer.folder_with("generation_config.json") {
        Some(_) => read("generation_config.json")?,
        None => vec![],
    };
    if all.is_empty() {
        all = of(&writer.config);
    }
    if all.is_empty() {
        all = words.end().into_iter().collect();
    }
    all.extend(words.turn_end());
    Ok(all.into_iter().collect())
}

/// A text as it grows.
struct Text<'a> {
    words: &'a Prompts,
    how: &'a Generate,
    /// It is printed as it grows.
    live: bool,
    whole: String,
    /// Bytes of it that are printed.
    shown: usize,
}

impl Text<'_> {
    /// Takes one more token; a text of `--stop` that is reached.
    fn grows(&mut self, prompt: &[u32], ids: &[u32]) -> Result<Option<String>> {
        // Some tokenizers write a token otherwise at the beginning of a text: what stands before it counts.
        let (before, all) =
            (self.words.decode(prompt)?, self.words.decode(&[prompt, ids].concat())?);
        self.whole = match all.strip_prefix(&*before) {
            Some(own) => own.into(),
            None => self.words.decode(ids)?,
        };
        let found = self.how.stop.iter().filter_map(|s| Some((self.whole.find(&**s)?, s)));
        let found = found.min_by_key(|f| f.0).map(|(at, s)| (at, s.clone()));
        if let Some((at, stop)) = found {
            self.whole.truncate(at);
            self.show(self.whole.len())?;
            return Ok(Some(stop));
        }
        // What may be the beginning of a character, or of a text to stop before, waits.
        let begun = self.whole.trim_end_matches('\u{fffd}').len();
        let held = |s: &String| {
            let most = s.len().min(begun);
            let ends = |&n: &usize| s.is_char_boundary(n) && self.whole[..begun].ends_with(&s[..n]);
            (1..=most).rev().find(ends).unwrap_or(0)
        };
        let held = self.how.stop.iter().map(held).max().unwrap_or(0);
        self.show(begun - held)?;
        Ok(None)
    }

    fn show(&mut self, to: usize) -> Result<()> {
        if self.live && to > self.shown && self.whole.is_char_boundary(self.shown) {
            print(&self.whole[self.shown..to])?;
            self.shown = to;
        }
        Ok(())
    }
}

/// Writes one text: its tokens, and why it ended.
fn written(
    writer: &mut Writer,
    sampling: &Sampling,
    (prompt, sample): (&Prompt, u32),
    ends: &BTreeSet<u32>,
    text: &mut Text,
) -> Result<(Vec<u32>, Ended)> {
    let (mut all, begin) = (prompt.ids.clone(), prompt.ids.len());
    let ended = loop {
        if all.len() - begin == text.how.max_new {
            break Ended::Length;
        }
        if writer.most == Some(all.len()) {
            break Ended::Positions;
        }
        let logits = writer.logits(&all)?;
        rest();
        let id = sampling.pick(&logits, sample, all.len())? as u32;
        if ends.contains(&id) {
            break Ended::Token(id);
        }
        all.push(id);
        if let Some(stop) = text.grows(&prompt.ids, &all[begin..])? {
            break Ended::Text(stop);
        }
    };
    text.show(text.whole.len())?;
    Ok((all.split_off(begin), ended))
}

fn object(
    p: &Prompt,
    sample: u32,
    ids: &[u32],
    text: &Text,
    ended: &Ended,
    words: &Prompts,
) -> Json {
    let (why, stop) = match ended {
        Ended::Token(id) => ("token", Some(words.name(*id))),
        Ended::Text(stop) => ("stop", Some(stop.clone())),
        Ended::Length => ("length", None),
        Ended::Positions => ("positions", None),
    };
    json!({
        "place": p.place, "sample": sample, "prompt_tokens": p.ids.len(), "tokens": ids, "text": text.whole,
        "ended": why, "stop": stop,
    })
}
