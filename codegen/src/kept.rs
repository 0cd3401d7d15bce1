//! Compiled kernels in folders, each file named by the hash of all that it depends on: the user's
//! cache, and a plan's own code for devices. Files are written beside and renamed, so that
//! processes may race.

use crate::cuda::HEADERS;
use crate::nvrtc;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::files;
use shardc_ir::launch::Source;
use std::path::{Path, PathBuf};

/// Largest file of compiled kernels that is read, in bytes.
pub(crate) const MOST: u64 = 1 << 30;

/// The user's cache: `SHARDC_CACHE`, else the user's folder for such.
pub(crate) fn cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = set("SHARDC_CACHE");
    let user = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache")));
    own.or_else(|| user().map(|c| c.join("shardc")))
}

/// The file of a text's code for an architecture.
fn name(source: &Source, arch: &str) -> String {
    let mut hash = blake3::Hasher::new();
    let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    for part in [source.file, &source.text, arch].into_iter().chain(headers) {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    let stem = source.file.split('.').next().unwrap_or_default();
    format!("{stem}-{arch}-{}.cubin", &hash.finalize().to_hex()[..24])
}

/// Whether a file of a folder is one that [`put`] writes, or leaves if it is killed.
pub fn is_ours(file: &str) -> bool {
    let hex = |text: &str, n: usize| text.len() == n && text.bytes().all(|b| b.is_ascii_hexdigit());
    let unfinished = file.strip_prefix('.').and_then(|f| f.split_once('-'));
    let name = unfinished.filter(|x| hex(x.0, 16)).map_or(file, |x| x.1);
    let mut words = name.strip_suffix(".cubin").unwrap_or_default().rsplit('-');
    let (hash, arch) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    hex(hash, 24) && arch.starts_with("sm_") && words.next().is_some()
}

fn cannot(dir: &Path, e: &std::io::Error) -> Diag {
    let what = format!("compiled kernels cannot be kept in {}: {e}", dir.display());
    Diag::new("cuda-compile", what)
        .help("name another folder for compiled kernels with SHARDC_CACHE")
        .exit(Exit::Environment)
}

/// A name beside a file that no other process has, nor another thread.
pub(crate) fn beside(dir: &Path, name: &str) -> PathBuf {
    use std::hash::{BuildHasher, Hasher};
    // Keys of a table of the standard library are random; process numbers are not, in containers.
    let number = std::hash::RandomState::new().build_hasher().finish();
    dir.join(format!(".{number:016x}-{name}"))
}

/// Writes a file beside its place, and renames it.
#[expect(clippy::disallowed_methods, reason = "of a cache; a whole one is told by its hash")]
pub(crate) fn keep(dir: &Path, name: &str, code: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let beside = beside(dir, name);
    let done =
        std::fs::write(&beside, code).and_then(|()| std::fs::rename(&beside, dir.join(name)));
    if done.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    done
}

/// Architectures of Tegra: no other runs their code, and they run no other's.
const TEGRA: [&str; 7] = ["sm_53", "sm_62", "sm_72", "sm_87", "sm_88", "sm_101", "sm_101a"];

/// The architectures whose code a device with this one runs, the best first: its own, and older
/// ones of its generation, but for what is special to one (`sm_90a`): CUDA C++ Programming Guide,
/// "Binary Compatibility".
fn run_by(arch: &str) -> Vec<String> {
    if TEGRA.contains(&arch) {
        return vec![arch.to_string()];
    }
    let digits = arch.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
    let number: u32 = digits.parse().unwrap_or(0);
    let older = (0..=number % 10).rev().map(|minor| format!("sm_{}", number / 10 * 10 + minor));
    let mut all = vec![arch.to_string()];
    all.extend(older.filter(|a| a != arch && !TEGRA.contains(&&**a)));
    all
}

/// The code of a text for an architecture: from the folder `own`, if that has some that runs there,
/// else from the user's cache, else compiled and kept there.
///
/// # Errors
/// Those of [`nvrtc::compile`], and `cuda-compile` if there is no folder to keep code in.
pub fn find(source: &Source, arch: &str, own: Option<&Path>) -> Result<Vec<u8>> {
    let read = |dir: &Path, arch: &str| files::read(&dir.join(name(source, arch)), MOST).ok();
    match own.and_then(|dir| run_by(arch).iter().find_map(|a| read(dir, a))) {
        Some(code) => Ok(code),
        None => cached(source, arch),
    }
}

/// The code of a text for this very architecture: from the user's cache, else compiled and kept
/// there.
fn cached(source: &Source, arch: &str) -> Result<Vec<u8>> {
    let name = name(source, arch);
    let none = || std::io::Error::other("HOME is not set");
    let dir = cache().ok_or_else(|| cannot(Path::new("~/.cache"), &none()))?;
    if let Ok(code) = files::read(&dir.join(&name), MOST) {
        return Ok(code);
    }
    let code = nvrtc::compile(source, arch)?.cubin;
    keep(&dir, &name, &code).map_err(|e| cannot(&dir, &e))?;
    Ok(code)
}

/// Writes the code of a text for an architecture to a folder, from which [`find`] takes it.
///
/// # Errors
/// As for [`find`].
pub fn put(source: &Source, arch: &str, dir: &Path) -> Result<()> {
    let name = name(source, arch);
    if dir.join(&name).is_file() {
        return Ok(());
    }
    keep(dir, &name, &cached(source, arch)?).map_err(|e| cannot(dir, &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_runs_code_of_its_generation() {
        assert_eq!(run_by("sm_80"), ["sm_80"]);
        assert_eq!(run_by("sm_82"), ["sm_82", "sm_81", "sm_80"]);
        assert_eq!(run_by("sm_90a"), ["sm_90a", "sm_90"]);
        assert_eq!(run_by("sm_87"), ["sm_87"]);
        assert_eq!(
            run_by("sm_89"),
            ["89", "86", "85", "84", "83", "82", "81", "80"].map(|n| format!("sm_{n}"))
        );
        assert_eq!(run_by("sm_121a"), ["sm_121a", "sm_121", "sm_120"]);
    }

    #[test]
    fn code_of_the_same_generation_is_found() {
        let text = "this is no text of a kernel".to_string();
        let source = Source { file: "gemm.cu", text };
        let dir = beside(&std::env::temp_dir(), "kept");
        let keep = |arch: &str| keep(&dir, &name(&source, arch), arch.as_bytes()).unwrap();
        let find = |arch: &str| find(&source, arch, Some(&dir)).ok();
        let found = |arch: &str| Some(arch.as_bytes().to_vec());
        keep("sm_80");
        assert!(
            is_ours(&name(&source, "sm_80"))
                && is_ours(&beside(Path::new(""), &name(&source, "sm_80")).display().to_string())
        );
        assert!(!is_ours("notes.txt") && !is_ours("gemm-sm_80.cubin") && !is_ours(".cubin"));
        assert_eq!(find("sm_89"), found("sm_80"));
        keep("sm_86");
        assert_eq!([find("sm_80"), find("sm_89")], [found("sm_80"), found("sm_86")]);
        keep("sm_90");
        assert_eq!([find("sm_90a"), find("sm_100a")], [found("sm_90"), None]);
        keep("sm_90a");
        assert_eq!([find("sm_90a"), find("sm_90")], [found("sm_90a"), found("sm_90")]);
        // What is written for an architecture is not taken from another.
        assert!(put(&source, "sm_89", &dir).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
