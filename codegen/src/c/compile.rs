//! Compiles kernels to shared objects, with the C compiler of the machine.
//!
//! Kernels are kept in a folder of the user's, each under the hash of all it depends on: text, compiler,
//! flags, processor. What is not there is compiled at once, to one object; a file for each of its kernels
//! names it. So a plan that differs from another in some kernels has these compiled alone. Files are written
//! beside and renamed, so that processes may race; an object that is found is opened once, and what was
//! checked is what is loaded.

use super::Functions;
use crate::cache::{self, Folder, MOST};
use rustix::process::{Pid, Signal, kill_process_group};
use shardc_ir::cpu;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Undo, Unfinished, make, trust};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{Read, Write as _};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a compiler must know: nothing is contracted, and no sum reordered, so that the bits are those of
/// the interpreter.
const NEEDED: [&str; 5] = ["-std=gnu11", "-O2", "-ffp-contract=off", "-shared", "-fPIC"];
/// What makes kernels faster, and no processor's compiler knows all of: of each row the first that it
/// takes.
const WISHED: [&[&str]; 6] = [
    &["-march=native", "-mcpu=native"],
    &["-mprefer-vector-width=512"],
    &["-ftree-vectorize"],
    &["-fno-math-errno"],
    &["-fno-trapping-math"],
    &["-Wno-psabi"],
];

/// Of these, what is for the processor that kernels are for.
fn wished() -> [&'static [&'static str]; 6] {
    let mut all = WISHED;
    if cpu::portable() {
        (all[0], all[1]) = (&[], &[]);
    }
    all
}

/// How much of what a compiler says is kept, in bytes.
const SAID: u64 = 1 << 16;

/// The compiler: `CC`, or `cc`.
fn compiler() -> String {
    std::env::var("CC").ok().filter(|c| !c.is_empty()).unwrap_or_else(|| "cc".into())
}

/// The compiler with the flags that its name may bring: `gcc -m64`.
fn command(cc: &str) -> Command {
    let mut words = cc.split_whitespace();
    let mut c = Command::new(words.next().unwrap_or("cc"));
    c.args(words);
    c
}

fn failed(what: String) -> Diag {
    Diag::new("c-compiler", what)
        .rule("kernels over rows are compiled on the machine that runs them")
        .help("install a C compiler (gcc or clang), or name one with CC")
        .help("kernels may be interpreted: --kernels interpreted")
}

/// The processor, as far as the compiler looks at it.
fn processor() -> String {
    let text = files::read_text(Path::new("/proc/cpuinfo"), 64 << 20).unwrap_or_default();
    let mut lines = text.lines().take_while(|l| !l.is_empty());
    let wanted = ["model name", "flags", "Features", "cpu family", "model"];
    let line =
        |l: &&str| wanted.iter().any(|w| l.split(':').next().is_some_and(|k| k.trim() == *w));
    lines.by_ref().filter(line).collect::<Vec<_>>().join("\n")
}

/// A path that leads to what is open, whatever becomes of the file. It stays open as long as the process: the
/// system knows libraries by their paths, so no other may ever have this one.
fn lasting(file: File, path: PathBuf) -> PathBuf {
    let number = file.into_raw_fd();
    let open = PathBuf::from(format!("/proc/self/fd/{number}"));
    if open.exists() { open } else { path }
}

/// Compiles functions, or finds them compiled; the objects that have them, from where they are loaded. A compiler that
/// takes longer than `limit` is ended.
///
/// # Errors
/// `c-compiler` if there is none, if it refuses the text, or if others can write where objects are kept;
/// with exit status 5.
pub fn compile(functions: &Functions, limit: Duration) -> Result<Vec<PathBuf>> {
    let cc = Compiler { words: compiler(), limit };
    let base = cc.base()?;
    let dir = cache::place()
        .ok_or_else(|| failed("no folder for compiled kernels: HOME is not set".into()))?;
    let other = "name another folder with SHARDC_CACHE";
    let folder = Folder::open(&dir).map_err(|d| {
        let interpreted = "kernels may be interpreted: --kernels interpreted";
        d.coded("c-compiler").help(other).help(interpreted)
    })?;
    let mut objects = Objects { folder: &folder, found: BTreeMap::new() };
    let mut missing = vec![];
    for text in functions.0.values() {
        let key = key(&base, text);
        if !objects.have(&key) {
            missing.push((key, text));
        }
    }
    let mut paths = objects.paths();
    if !missing.is_empty() {
        let cannot = |e: &dyn std::fmt::Display| {
            failed(format!("compiled kernels cannot be kept in {}: {e}", dir.display())).help(other)
        };
        paths.push(cc.keep(&folder, &missing, &cannot)?);
    }
    Ok(paths)
}

/// The name under which a function is kept: the hash of its text and of all else that its code depends on.
fn key(base: &blake3::Hasher, text: &str) -> String {
    base.clone().update(text.as_bytes()).finalize().to_hex()[..32].to_string()
}

/// The file of a function: the name of the object that has it.
fn place(key: &str) -> String {
    format!("rows-{key}")
}

/// An object's name, by what it has.
fn named(missing: &[(String, &String)]) -> String {
    let keys: String = missing.iter().map(|(key, _)| key.as_str()).collect();
    format!("kernels-{}.so", &blake3::hash(keys.as_bytes()).to_hex()[..32])
}

/// Objects that functions were found in; `None`: one that is not as it was written.
struct Objects<'a> {
    folder: &'a Folder,
    found: BTreeMap<String, Option<PathBuf>>,
}

impl Objects<'_> {
    /// Whether the function of a key is in an object that is whole.
    fn have(&mut self, key: &str) -> bool {
        let name = self.folder.read(&place(key)).and_then(|name| String::from_utf8(name).ok());
        let ours = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
        let Some(name) = name.filter(|n| n.chars().all(ours)) else { return false };
        self.found.entry(name).or_insert_with_key(|name| whole(self.folder, name)).is_some()
    }

    fn paths(self) -> Vec<PathBuf> {
        self.found.into_values().flatten().collect()
    }
}

/// What the compiler works in, in the folder of compiled kernels.
const WORK: &str = "kernels";

/// An object that is there as it was written, and ours: a damaged one would end the process.
fn whole(folder: &Folder, name: &str) -> Option<PathBuf> {
    let (sum, file) = (folder.read(&sum(name))?, folder.file(name)?);
    let (path, what) = (folder.path.join(name), "a file of compiled kernels");
    let bytes = file.try_clone().ok()?;
    let bytes = trust::read_checked(bytes, what, &path, trust::WRITABLE, MOST).ok()?;
    let same = blake3::hash(&bytes).to_hex().as_bytes() == sum;
    same.then(|| lasting(file, path))
}

/// The file of an object's hash.
fn sum(object: &str) -> String {
    format!("{object}.blake3")
}

/// Writes a new file.
fn written(path: &Path, text: &str) -> std::io::Result<()> {
    make::file(path)?.write_all(text.as_bytes())
}

/// The machine's C compiler.
struct Compiler {
    words: String,
    limit: Duration,
}

/// Which of a compiler's streams is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    Out,
    Err,
}

/// A run of the compiler.
struct Ran {
    status: ExitStatus,
    said: String,
}

impl Compiler {
    /// What the code of every function depends on.
    fn base(&self) -> Result<blake3::Hasher> {
        let version = self.run(None, Stream::Out, &["--version"])?.said;
        let mut hash = blake3::Hasher::new();
        for part in [super::HEADER, &version, &processor(), &self.words] {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        for flag in NEEDED.iter().chain(wished().into_iter().flatten()) {
            hash.update(flag.as_bytes());
        }
        Ok(hash)
    }

    /// Makes an object of functions, and keeps it under their keys; from where it is loaded.
    fn keep(
        &self,
        folder: &Folder,
        functions: &[(String, &String)],
        cannot: &dyn Fn(&dyn std::fmt::Display) -> Diag,
    ) -> Result<PathBuf> {
        // All that the compiler and what it starts write; it goes when this ends.
        let work = Unfinished::beside(&folder.path.join(WORK)).map_err(|e| cannot(&e))?;
        let (source, new) = (work.path().join("kernels.c"), work.path().join("kernels.so"));
        let text = super::text_of(functions.iter().map(|(_, text)| text.as_str()));
        written(&source, &text).map_err(|e| cannot(&e))?;
        let made = self.build(&source, &new)?;
        // The compiler gives others what they may have of any file.
        let own = std::fs::set_permissions(&new, Permissions::from_mode(0o700));
        own.map_err(|e| cannot(&e))?;
        // Another process may put its own in the place at once: this one goes by what is open.
        let name = named(functions);
        let (file, path) = (files::open(&new)?.0, folder.path.join(&name));
        std::fs::rename(&new, &path).map_err(|e| cannot(&e))?;
        let keep =
            |file: &str, text: &str| folder.keep(file, text.as_bytes()).map_err(|e| cannot(&e));
        keep(&sum(&name), &blake3::hash(&made).to_hex())?;
        for (key, _) in functions {
            keep(&place(key), &name)?;
        }
        Ok(lasting(file, path))
    }

    /// Makes an object of a file, with the flags that the compiler knows; its bytes.
    fn build(&self, source: &Path, object: &Path) -> Result<Vec<u8>> {
        let all = wished().map(|row| row.first().copied());
        let mut ran = self.make(&all, source, object)?;
        if !ran.status.success() {
            // It may be about the flags: those that it takes with a text that nothing is wrong with.
            let (probe, made) = (object.with_extension("probe.c"), object.with_extension("probe"));
            let write = written(&probe, "int shardc_probe;\n");
            write.map_err(|e| failed(format!("{}: {e}", probe.display())))?;
            let known = self.known(&probe, &made)?;
            if known != all {
                ran = self.make(&known, source, object)?;
            }
        }
        let cc = &self.words;
        if ran.status.success() {
            let none = |d: Diag| {
                failed(format!(
                    "the C compiler `{cc}` exits with status 0 and writes nothing: {}",
                    d.message
                ))
            };
            return files::read(object, MOST).map_err(none);
        }
        let mut said: Vec<&str> =
            ran.said.lines().filter(|l| l.contains("error")).take(3).collect();
        let status = ran.status.to_string();
        if said.is_empty() {
            said.push(&status);
        }
        Err(failed(format!("the C compiler `{cc}` refuses the kernels: {}", said.join("; "))))
    }

    /// The flags of [`WISHED`] that the compiler takes.
    fn known(&self, probe: &Path, made: &Path) -> Result<[Option<&'static str>; 6]> {
        let mut known = [None; 6];
        for (to, row) in known.iter_mut().zip(wished()) {
            for flag in row {
                let one = [Some(*flag), None, None, None, None, None];
                if self.make(&one, probe, made)?.status.success() {
                    *to = Some(*flag);
                    break;
                }
            }
        }
        Ok(known)
    }

    fn make(&self, flags: &[Option<&str>; 6], source: &Path, object: &Path) -> Result<Ran> {
        let (work, source) = (source.parent(), source.as_os_str());
        let flags = NEEDED.iter().copied().chain(flags.iter().copied().flatten());
        let flags = flags.map(OsStr::new);
        let files = [OsStr::new("-o"), object.as_os_str(), source, OsStr::new("-lm")];
        self.run(work, Stream::Err, &flags.chain(files).collect::<Vec<_>>())
    }

    /// Runs it to its end, or with all that it has started to the limit; `work`: where it may put what it needs
    /// meanwhile. What it says on a stream, as far as that is kept.
    fn run(
        &self,
        work: Option<&Path>,
        stream: Stream,
        arguments: &[impl AsRef<OsStr>],
    ) -> Result<Ran> {
        let cc = &self.words;
        let starts = |e| failed(format!("the C compiler `{cc}` does not start: {e}"));
        let pipe = |own| if stream == own { Stdio::piped() } else { Stdio::null() };
        let mut c = command(cc);
        c.args(arguments).stdin(Stdio::null()).stdout(pipe(Stream::Out)).stderr(pipe(Stream::Err));
        work.map(|dir| c.env("TMPDIR", dir));
        let running: Running = Arc::default();
        let own = running.clone();
        let undo = Undo::new(move || end(&own));
        let from = {
            let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
            // A group of its own: what it starts is in it.
            let child = running.insert(c.process_group(0).spawn().map_err(starts)?);
            let out = child.stdout.take().map(|x| Box::new(x) as Box<dyn Read + Send>);
            out.or(child.stderr.take().map(|x| Box::new(x) as _)).expect("one is piped")
        };
        let (send, said) = channel();
        let reader = std::thread::Builder::new().spawn(move || drop(send.send(read(from))));
        let ended = match reader {
            Ok(_) => wait(&running, self.limit),
            Err(e) => Err(e),
        };
        // If it runs still.
        drop(undo);
        let late =
            || failed(format!("the C compiler `{cc}` runs for {:?} without end", self.limit));
        let status = ended.map_err(starts)?.ok_or_else(late)?;
        // What it has started may go on, and hold the stream.
        let said = said.recv_timeout(HELD).unwrap_or_default();
        Ok(Ran { status, said: String::from_utf8_lossy(&said).into_owned() })
    }
}

/// How long a stream may stay open behind the end of the compiler.
const HELD: Duration = Duration::from_secs(1);

/// Reads a stream to its end, and keeps the first part.
fn read(mut from: impl Read) -> Vec<u8> {
    let mut said = vec![];
    let _ = from.by_ref().take(SAID).read_to_end(&mut said);
    let _ = std::io::copy(&mut from, &mut std::io::sink());
    said
}

/// A process that runs, with the group of what it has started; nothing once it has ended.
type Running = Arc<Mutex<Option<Child>>>;

/// How often is tried to end a process that another thread looks at, and the time between.
const TRIES: (usize, Duration) = (100, Duration::from_millis(5));

/// Ends a process and what it has started, if it runs. The thread that holds it may be the one that ends our own.
fn end(running: &Running) {
    let look = |_| {
        let held = running.try_lock().ok();
        if held.is_none() {
            std::thread::sleep(TRIES.1);
        }
        held
    };
    if let Some(mut child) = (0..TRIES.0).find_map(look).and_then(|mut held| held.take()) {
        // Before it is waited for, as its number may be another's then.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.wait();
    }
}

/// Waits for the end of a process, for so long at most.
fn wait(running: &Running, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let (since, mut pause) = (Instant::now(), Duration::from_millis(1));
    loop {
        let mut held = running.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(child) = held.as_mut() else {
            drop(held);
            // What ends our own process has ended it: nothing else is to be said.
            loop {
                std::thread::park();
            }
        };
        if let Some(status) = child.try_wait()? {
            *held = None;
            return Ok(Some(status));
        }
        drop(held);
        if since.elapsed() >= limit {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}
