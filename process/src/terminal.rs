//! What commands write to standard output and standard error; nothing else writes there.
//!
//! Results go to standard output. One that cannot be written is an error: text that is cut short must
//! not look whole. All else goes to standard error, and is dropped where that is full or gone: no job
//! ends because of its log. (A standard stream that is closed when the command starts is /dev/null.)
//!
//! Names and words of files are part of what is said. A terminal obeys control characters, so none of
//! them is written as it is ([`escaped`]); colours are those that [`Shown::own`] has.

mod lines;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use lines::{fitted, wrapped};
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use serde_json::{Value as Json, json};
use shardc_ir::diag::{self, Diag, Exit, Result, Spot, one_line};
use shardc_ir::files;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write as _};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Mutex, Once, OnceLock};
use std::time::{Duration, Instant};

/// What is said on standard error beside warnings and errors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Volume {
    /// Nothing.
    Quiet,
    /// What was done, and what may come next.
    #[default]
    Normal,
    /// Also how long it took.
    Verbose,
}

/// How this process talks on standard error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Talk {
    pub volume: Volume,
    /// An object of JSON a line, as `docs/schemas/message.json` has it, in place of text.
    pub json: bool,
}

static TALK: OnceLock<Talk> = OnceLock::new();

/// Says how this process talks from now on; the first word stands.
pub fn talk(how: Talk) {
    let _ = TALK.set(how);
}

/// How this process talks.
pub fn talks() -> Talk {
    TALK.get().copied().unwrap_or_default()
}

/// Whether standard output is a terminal that shows colours, and nobody asks for none (<https://no-color.org>).
pub fn colours() -> bool {
    let said = |name: &str| std::env::var_os(name).filter(|x| !x.is_empty());
    let dumb = said("TERM").is_some_and(|t| t == "dumb");
    said("NO_COLOR").is_none() && !dumb && std::io::stdout().is_terminal()
}

/// A text without hidden characters but ends of lines and tabs: the others stand there as JSON writes them, so that
/// a line of JSON still says the same.
///
/// ```
/// # use shardc_process::terminal::escaped;
/// assert_eq!(escaped("a\tline\n"), "a\tline\n");
/// assert_eq!(escaped("red: \u{1b}[31m"), "red: \\u001b[31m");
/// ```
pub fn escaped(text: &str) -> Cow<'_, str> {
    diag::escaped(text, |c| c == '\n')
}

/// A result as it is printed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shown {
    text: String,
    /// It is a file, whose lines stay as they are however wide a terminal is.
    file: bool,
}

impl Shown {
    /// A text that this command makes of nothing but its own words: colours in it stay.
    pub fn own(text: String) -> Shown {
        Shown { text, file: false }
    }

    /// A text that may be the contents of a file: a script, a program, flags.
    pub fn file(text: &str) -> Shown {
        Shown { file: true, ..text.into() }
    }

    /// The same with a text of any words behind it.
    pub fn then(mut self, text: &str) -> Shown {
        self.text.push_str(&escaped(text));
        self
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl<T: AsRef<str>> From<T> for Shown {
    fn from(text: T) -> Shown {
        Shown { text: escaped(text.as_ref()).into_owned(), file: false }
    }
}

/// The line of JSON that a command prints. It begins with the schema that it follows, of which
/// `docs/schemas/NAME.json` has the fields: `shardc/NAME/1`, or what the fields say as `$schema`.
pub fn json_line(name: &str, of: impl Serialize) -> String {
    let mut all = serde_json::Map::new();
    all.insert("$schema".into(), format!("shardc/{name}/1").into());
    match serde_json::to_value(of).expect("plain data") {
        Json::Object(fields) => all.extend(fields),
        other => {
            all.insert("value".into(), other);
        }
    }
    format!("{}\n", Json::Object(all))
}

/// How long a phase of work says nothing of itself.
const PATIENCE: Duration = Duration::from_secs(1);

/// A line of a terminal that says what is being done.
struct Doing {
    /// Since when, and what; nothing if something else has been written since.
    now: Option<(Instant, &'static str)>,
    /// The line has a word.
    shown: bool,
}

static DOING: Mutex<Doing> = Mutex::new(Doing { now: None, shown: false });

impl Doing {
    /// What to write so that the line is right, if it is not.
    fn turn(&mut self, at: Instant) -> Option<String> {
        let (since, word) = self.now?;
        let seconds = at.saturating_duration_since(since).as_secs();
        self.shown |= seconds >= PATIENCE.as_secs();
        self.shown.then(|| format!("\r\x1b[K{word} … {seconds} s"))
    }

    /// What makes the line empty again; the work is done.
    fn end(&mut self) -> &'static str {
        self.now = None;
        if std::mem::take(&mut self.shown) { "\r\x1b[K" } else { "" }
    }
}

/// Says on a terminal what is being done, from a second on, until something else is written or [`rest`] is called.
pub fn doing(word: &'static str) {
    static TELLER: Once = Once::new();
    if talks().volume == Volume::Quiet || talks().json || !std::io::stderr().is_terminal() {
        return;
    }
    let mut doing = DOING.lock().unwrap_or_else(|e| e.into_inner());
    let since = doing.now.map_or_else(Instant::now, |x| x.0);
    doing.now = Some((since, word));
    // Where no thread can be had, nothing is said.
    TELLER.call_once(|| drop(std::thread::Builder::new().name("doing".into()).spawn(tell)));
}

/// Keeps the line of [`doing`] right.
fn tell() {
    loop {
        std::thread::sleep(PATIENCE / 4);
        let mut doing = DOING.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(text) = doing.turn(Instant::now()) {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
}

/// Takes away what [`doing`] says.
pub fn rest() {
    let end = DOING.lock().unwrap_or_else(|e| e.into_inner()).end();
    let _ = std::io::stderr().write_all(end.as_bytes());
}

/// Writes one message, if it can be written.
fn say(text: String, object: impl FnOnce(&str) -> Json) {
    let line = match columns(&std::io::stderr()) {
        _ if talks().json => object(&text).to_string(),
        Some(width) => fitted(&text, width).trim_end().to_string(),
        None => text,
    };
    rest();
    // One write: lines of several processes and threads stay whole.
    let _ = std::io::stderr().write_all(format!("{}\n", escaped(&line)).as_bytes());
}

/// Says something that is neither a warning nor an error, in one line.
pub fn note(text: impl Display) {
    notes([text.to_string()]);
}

/// The same in lines that belong together.
pub fn notes(lines: impl IntoIterator<Item = String>) {
    if talks().volume > Volume::Quiet {
        let lines: Vec<_> = lines.into_iter().map(|l| one_line(&l).into_owned()).collect();
        say(lines.join("\n"), |text| json!({ "level": "note", "message": text }));
    }
}

/// True if [`rewrite`] writes over its last line.
pub fn is_rewritten() -> bool {
    talks().volume > Volume::Quiet && !talks().json && std::io::stderr().is_terminal()
}

/// Says how far something is: on a terminal in place of what this said last, elsewhere as a note.
pub fn rewrite(text: impl Display) {
    if !is_rewritten() {
        return note(text);
    }
    let width = columns(&std::io::stderr()).unwrap_or(PROSE) - 1;
    let text = text.to_string();
    let line: String = escaped(&one_line(&text)).chars().take(width).collect();
    let mut doing = DOING.lock().unwrap_or_else(|e| e.into_inner());
    (doing.now, doing.shown) = (None, true);
    let _ = std::io::stderr().write_all(format!("\r\x1b[K{line}").as_bytes());
}

/// Says something that only those want to know who ask for it.
pub fn detail(text: impl Display) {
    if talks().volume == Volume::Verbose {
        note(text);
    }
}

/// Says an error that came as text, from another process or a panic; its code is null if the text has none.
pub fn say_error(text: impl Display) {
    let code = |text: &str| Some(text.strip_prefix("error[")?.split_once(']')?.0.to_string());
    say(text.to_string(), |text| json!({ "level": "error", "code": code(text), "message": text }));
}

/// A diagnostic as JSON, with the text that people read and the status that it ends the command with.
fn object(level: &str, d: &Diag, exit: i32, rendered: &str) -> Json {
    let (file, line, column) = match d.spot.as_deref() {
        Some(Spot::Text { file, line, column }) => (file.as_deref(), Some(line), Some(column)),
        Some(Spot::Value { .. }) | None => (None, None, None),
    };
    json!({
        "level": level, "code": d.code, "message": d.message, "place": d.place, "file": file,
        "line": line, "column": column, "rule": d.rule, "why": d.why, "help": d.help, "exit": exit,
        "rendered": rendered,
    })
}

/// Says what is wrong and does not end the command.
pub fn warn(all: &[Diag]) {
    for w in all {
        let text = w.render().replacen("error[", "warning[", 1);
        say(text, |text| object("warning", w, 0, text));
    }
}

/// Says why a command ends; its exit status.
pub fn fail(d: &Diag) -> i32 {
    // Whoever reads no more wants to hear no more.
    if d.exit != Exit::ReaderGone {
        say(d.render(), |text| object("error", d, d.exit as i32, text));
    }
    d.exit as i32
}

/// Prints a result.
///
/// # Errors
/// `io`, with [`Exit::ReaderGone`] if the reader has gone away (`| head`).
pub fn print(text: impl Into<Shown>) -> Result<()> {
    let Shown { text, .. } = text.into();
    rest();
    let mut out = std::io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// What became of a write to standard output.
///
/// # Errors
/// As for [`print()`].
fn written(done: std::io::Result<()>) -> Result<()> {
    done.map_err(|e| {
        let gone = e.kind() == ErrorKind::BrokenPipe;
        let d = Diag::new("io", e.to_string())
            .at("standard output")
            .help("make room where standard output goes, or give it another file");
        if gone { d.reader_gone() } else { d }
    })
}

/// Prints help, which is a result, or what is wrong with the words of a command; its exit status. The parser colours
/// what it says, unless the words have hidden characters.
///
/// # Errors
/// As for [`print()`], of help.
pub fn usage(e: &clap::Error) -> Result<i32> {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let hidden: Vec<String> = words.filter(|word| word.contains(diag::is_hidden)).collect();
    if e.use_stderr() && !hidden.is_empty() {
        // Of `--flag=value` either half may be named.
        let halves = hidden.iter().flat_map(|word| std::iter::once(&**word).chain(word.split('=')));
        let said = halves.fold(e.render().to_string(), |said, word| {
            // Line ends alone are the message's own.
            let names = word.contains('\n') && word.contains(|c: char| !c.is_whitespace());
            if names { said.replace(word, &one_line(word)) } else { said }
        });
        say_error(said.trim_end());
        return Ok(e.exit_code());
    }
    let printed = e.print().and_then(|()| std::io::stdout().flush());
    if !e.use_stderr() {
        written(printed)?;
    }
    Ok(e.exit_code())
}

/// Columns that lines may have: those that COLUMNS says, or of a terminal; as many as there are of anything else.
fn columns(of: &(impl IsTerminal + AsFd)) -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|n| n.parse().ok());
    let own = || tcgetwinsize(of).ok().filter(|_| of.is_terminal()).map(|size| size.ws_col);
    said.or_else(own).filter(|n| *n > 0).map(|n| usize::from(n.max(MIN_WIDTH)))
}

/// Prints the result of a command, which ends if that cannot be written. On a terminal its lines are as wide as that.
pub fn show(text: impl Into<Shown>) {
    let mut shown = text.into();
    if let Some(width) = columns(&std::io::stdout()).filter(|_| !shown.file && !talks().json) {
        shown.text = fitted(&shown.text, width);
    }
    if let Err(d) = print(shown) {
        let status = fail(&d);
        files::abandon();
        std::process::exit(status);
    }
}

/// Prints a page of Markdown.
pub fn show_page(text: &str) {
    show(Shown::file(
        &columns(&std::io::stdout()).map_or_else(|| text.into(), |width| lines::page(text, width)),
    ));
}

/// Prints a text that is a whole file: a script, a program, flags. As JSON it is the field of an object.
pub fn show_file(text: &str) {
    match talks().json {
        true => show(json_line("text", json!({ "text": text }))),
        false => show(Shown::file(text)),
    }
}

/// Says which file or folder a command has written, to programs: a note says it to people.
pub fn show_written(path: &Path) {
    if talks().json {
        show(json_line("written", json!({ "written": path.display().to_string() })));
    }
}

/// Columns by which lines of a table may be indented where it is printed, and the fewest that it takes.
const INDENT: u16 = 4;
const MIN_WIDTH: u16 = 40;

/// An empty table without lines. On a terminal its columns are as wide as fits there, and what is longer goes on in the
/// next line of its row; elsewhere a row is one line.
pub fn table() -> Table {
    let mut t = Table::new();
    t.load_preset(presets::NOTHING);
    if let Some(width) = columns(&std::io::stdout()) {
        let width = (width as u16).saturating_sub(INDENT).max(MIN_WIDTH);
        t.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    t
}

/// Whether the lines of a table have room on the terminal, if results go to one.
pub fn fits(rows: &[Vec<String>]) -> bool {
    let columns_of = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max();
    // A space stands on either side of each.
    let needs: usize = (0..columns_of).filter_map(widest).map(|n| n + 2).sum();
    columns(&std::io::stdout()).is_none_or(|width| needs <= width)
}

/// Sets columns of numbers to the right. However narrow the table is, they are not broken.
pub fn numbers(t: &mut Table, columns: impl IntoIterator<Item = usize>) {
    for i in columns {
        if let Some(c) = t.column_mut(i) {
            c.set_cell_alignment(CellAlignment::Right);
            c.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
}

/// Columns of prose.
const PROSE: usize = 80;

/// Prose in lines of at most 80 columns, if its words are no longer; what goes on in the next line is indented.
pub fn prose(text: &str) -> String {
    text.lines().map(|line| wrapped(line, PROSE, 2) + "\n").collect()
}

/// What training prints on standard output as it goes on.
pub struct Progress {
    /// There is more to training than what it prints.
    keeps: bool,
    lost: Option<Diag>,
}

impl Progress {
    /// `keeps` says that training leaves files, for which it goes on where nothing can be printed.
    pub fn new(keeps: bool) -> Progress {
        Progress { keeps, lost: None }
    }

    /// Prints a line, unless one before was lost.
    ///
    /// # Errors
    /// Those of [`print()`], if nothing but what is printed would be left of the training.
    pub fn line(&mut self, text: impl Display) -> Result<()> {
        if self.lost.is_some() {
            return Ok(());
        }
        let Err(d) = print(format!("{text}\n")) else { return Ok(()) };
        if !self.keeps {
            return Err(d);
        }
        if d.exit != Exit::ReaderGone {
            warn(&[d.clone().why("training goes on without printing")]);
        }
        self.lost = Some(d);
        Ok(())
    }

    /// The exit status of a training that has done everything else.
    pub fn status(&self) -> i32 {
        self.lost.as_ref().map_or(0, fail)
    }
}

#[cfg(test)]
mod tests {
    use super::{Doing, PATIENCE, Shown, prose};
    use std::time::{Duration, Instant};

    #[test]
    fn work_is_named_after_a_second_and_leaves_nothing() {
        let since = Instant::now();
        let mut d = Doing { now: Some((since, "compiling")), shown: false };
        assert_eq!(d.turn(since + PATIENCE - Duration::from_millis(1)), None);
        assert_eq!(d.end(), "", "nothing was shown");
        d.now = Some((since, "compiling"));
        assert_eq!(d.turn(since + PATIENCE).as_deref(), Some("\r\x1b[Kcompiling … 1 s"));
        d.now = Some((since, "proving"));
        assert_eq!(d.turn(since + 3 * PATIENCE).as_deref(), Some("\r\x1b[Kproving … 3 s"));
        assert_eq!((d.end(), d.turn(since + 4 * PATIENCE)), ("\r\x1b[K", None));
        assert_eq!(d.end(), "");
    }

    #[test]
    fn colours_stay_where_they_are_ours_alone() {
        let red = "\u{1b}[31m";
        let all =
            Shown::own(format!("{red}F0")).then(&format!("of a {red}file\u{7f}\u{9b}31m\r\n"));
        let said = "\u{1b}[31mF0of a \\u001b[31mfile\\u007f\\u009b31m\\u000d\n";
        assert_eq!(all.to_string(), said);
        assert_eq!(Shown::from("left\u{202e}right").to_string(), "left\\u202eright");
    }

    #[test]
    fn prose_ends_its_lines() {
        assert_eq!(prose("a b"), "a b\n");
    }

    #[test]
    fn json_says_the_same() {
        let name = "a\u{1b}]0;b\u{7}\u{7f}\u{9b}\u{2066}";
        let line = Shown::from(super::json_line("x", name)).to_string();
        let back: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert!(!line.trim_end().contains(shardc_ir::diag::is_hidden), "{line}");
        assert_eq!(back["value"], name);
    }
}
