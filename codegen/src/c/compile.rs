//! Compiles the text of kernels to a shared object, with the C compiler of the machine.
//!
//! Objects are kept in a folder of the user's, under the hash of all they depend on: text, compiler,
//! flags, processor. They are written beside and renamed, so that processes may race.

use crate::kept::{beside, cache, keep};
use shardc_ir::diag::{Diag, Exit, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How kernels are compiled. Nothing is contracted, and no sum reordered: the bits are those of the
/// interpreter.
const FLAGS: [&str; 11] = [
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
];

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
        .help("or let kernels be interpreted, several times slower: --kernels interpreted")
        .exit(Exit::Environment)
}

/// The processor, as far as the compiler looks at it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = text.lines().take_while(|l| !l.is_empty());
    let wanted = ["model name", "flags", "Features", "cpu family", "model"];
    let line =
        |l: &&str| wanted.iter().any(|w| l.split(':').next().is_some_and(|k| k.trim() == *w));
    lines.by_ref().filter(line).collect::<Vec<_>>().join("\n")
}

/// Compiles a text, or finds it compiled; the object's path.
///
/// # Errors
/// `c-compiler` if there is none, or if it refuses the text; with exit status 5.
pub fn compile(text: &str) -> Result<PathBuf> {
    let cc = compiler();
    let version = command(&cc).arg("--version").output();
    let version =
        version.map_err(|e| failed(format!("the C compiler `{cc}` does not start: {e}")))?;
    let mut hash = blake3::Hasher::new();
    for part in [text.as_bytes(), &version.stdout, processor().as_bytes(), cc.as_bytes()] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    for flag in FLAGS {
        hash.update(flag.as_bytes());
    }
    let name = format!("kernels-{}.so", &hash.finalize().to_hex()[..32]);
    let dir =
        cache().ok_or_else(|| failed("no folder for compiled kernels: HOME is not set".into()))?;
    let object = dir.join(&name);
    let sum = format!("{name}.blake3");
    if whole(&object, &dir.join(&sum)) {
        return Ok(object);
    }
    let cannot = |e: std::io::Error| {
        failed(format!("compiled kernels cannot be kept in {}: {e}", dir.display()))
            .help("name another folder with SHARDC_CACHE")
    };
    std::fs::create_dir_all(&dir).map_err(cannot)?;
    let (source, new) = (beside(&dir, &format!("{name}.c")), beside(&dir, &name));
    let put = || -> std::io::Result<()> {
        let hash = blake3::hash(&std::fs::read(&new)?).to_hex();
        std::fs::rename(&new, &object)?;
        keep(&dir, &sum, hash.as_bytes())
    };
    let done = build(&cc, text, &source, &new).and_then(|()| put().map_err(cannot));
    let _ = std::fs::remove_file(&source);
    if done.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    done.map(|()| object)
}

/// True if an object is there as it was written: a damaged one would end the process.
fn whole(object: &Path, sum: &Path) -> bool {
    let read = |p: &Path| std::fs::read(p).ok();
    read(object).zip(read(sum)).is_some_and(|(o, s)| blake3::hash(&o).to_hex().as_bytes() == s)
}

fn build(cc: &str, text: &str, source: &Path, object: &Path) -> Result<()> {
    std::fs::write(source, text)
        .map_err(|e| failed(format!("{} cannot be written: {e}", source.display())))?;
    let run = command(cc).args(FLAGS).arg("-o").arg(object).arg(source).arg("-lm").output();
    let out = run.map_err(|e| failed(format!("the C compiler `{cc}` does not start: {e}")))?;
    if out.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    let mut said: Vec<&str> = said.lines().filter(|l| l.contains("error")).take(3).collect();
    let status = out.status.to_string();
    if said.is_empty() {
        said.push(&status);
    }
    Err(failed(format!("the C compiler `{cc}` refuses the kernels: {}", said.join("; "))))
}
