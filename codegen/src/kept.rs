//! Compiled kernels in folders: a plan's own code for devices, each file named by the hash of its text and
//! known by the hash in `plan.json`, and the user's cache, where the name has the compiler too, and
//! the last bytes are the hash of the others. All code is checked before a driver sees it.

use crate::cache::{self, Folder, MOST};
use crate::cubin;
use crate::cuda::HEADERS;
use crate::nvrtc;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, make};
use shardc_ir::launch::KernelSource;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The file of a text's code for an architecture.
fn name(source: &KernelSource, arch: &str) -> String {
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
}

/// Code of a plan: its folder, and by name of file the hash that the plan states.
#[derive(Clone, Debug, Default)]
pub struct Own {
    pub dir: PathBuf,
    pub hashes: BTreeMap<String, String>,
}

impl Own {
    /// The architectures of the plan's code that a device with this one runs, the best first.
    pub fn archs(&self, device: &str) -> Vec<String> {
        let has = |arch: &String| {
            let of = |name: &String| name.rsplit('-').nth(1) == Some(arch);
            self.hashes.keys().any(of)
        };
        run_by(device).into_iter().filter(has).collect()
    }

    /// A file of it, as the plan states it.
    fn read(&self, name: &str) -> Option<Result<Vec<u8>>> {
        let path = self.dir.join(name);
        if !path.exists() {
            return None;
        }
        let bad = |why: &str| {
            Diag::new("plan", format!("code for a device that is not as the plan states it: {why}"))
                .at(path.display().to_string())
                .help("recompile the plan with shardc compile")
        };
        let check = |code: Vec<u8>| match self.hashes.get(name) {
            Some(h) if *h == blake3::hash(&code).to_hex().as_str() => {
                cubin::check(&code).map_err(|why| bad(&why)).map(|()| code)
            }
            _ => Err(bad("its hash differs")),
        };
        Some(files::read(&path, MOST).and_then(check))
    }
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

/// The code of a text for an architecture: a plan's `own`, if it has some that runs there, else from the
/// user's cache, else compiled and kept there.
///
/// # Errors
/// Those of [`nvrtc::compile`], `cuda-compile` if there is no folder to keep code in, and `plan` if the
/// plan's code is not what it states.
pub fn find(source: &KernelSource, arch: &str, own: Option<&Own>) -> Result<Vec<u8>> {
    let read = |own: &Own, arch: &str| own.read(&name(source, arch));
    match own.and_then(|own| run_by(arch).iter().find_map(|a| read(own, a))) {
        Some(code) => code,
        None => cached(source, arch),
    }
}

/// Bytes of the hash behind code in the cache.
const HASH: usize = blake3::OUT_LEN;

/// The code of a file of the cache, if it is whole.
fn sound(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let (code, hash) = file.split_last_chunk::<HASH>()?;
    let len = code.len();
    let is_whole = blake3::hash(code).as_bytes() == hash && cubin::check(code).is_ok();
    file.truncate(len);
    is_whole.then_some(file)
}

/// The code of a text for this very architecture: from the user's cache, else compiled and kept
/// there. Without the compiler, code of any version of it will do.
fn cached(source: &KernelSource, arch: &str) -> Result<Vec<u8>> {
    let none = || std::io::Error::other("HOME is not set");
    let dir = cache::place().ok_or_else(|| cannot(Path::new("~/.cache"), &none()))?;
    let folder = Folder::open(&dir).map_err(|d| {
        let help = "name another folder for compiled kernels with SHARDC_CACHE";
        d.coded("cuda-compile").help(help)
    })?;
    let name = name(source, arch);
    let stem = name.trim_end_matches(".cubin");
    let version = nvrtc::identity();
    let found = match &version {
        Ok(v) => folder.read(&format!("{stem}-{v}.cubin")).and_then(sound),
        Err(_) => {
            let names = folder.names();
            let mut own = names.iter().rev().filter(|n| n.starts_with(stem));
            own.find_map(|n| folder.read(n).and_then(sound))
        }
    };
    if let Some(code) = found {
        return Ok(code);
    }
    let name = format!("{stem}-{}.cubin", version?);
    let code = nvrtc::compile(source, arch)?.cubin;
    cubin::check(&code).map_err(|why| {
        Diag::new("cuda-compile", format!("device code was not compiled: {why}"))
            .help("check which library SHARDC_NVRTC_DIR leads to")
    })?;
    let kept = [&code[..], blake3::hash(&code).as_bytes()].concat();
    folder.keep(&name, &kept).map_err(|e| cannot(&dir, &e))?;
    Ok(code)
}

/// Writes the code of a text for an architecture to a folder of a plan, from which [`find`] takes it.
///
/// # Errors
/// `cuda-compile` if the folder cannot be written.
pub fn put(source: &KernelSource, arch: &str, code: &[u8], dir: &Path) -> Result<()> {
    let name = name(source, arch);
    if dir.join(&name).is_file() {
        return Ok(());
    }
    let put = |folder: make::Folder| {
        folder.replace(&name, |f, beside| f.file(beside), |mut out| out.write_all(code))
    };
    make::Folder::at(dir).and_then(put).map_err(|e| cannot(dir, &e))
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

    /// A folder of a plan with code, which is the name of its architecture.
    fn plan(source: &KernelSource, archs: &[&str]) -> Own {
        let dir = std::env::temp_dir().join(make::beside("kept"));
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut own = Own { dir, hashes: BTreeMap::new() };
        for arch in archs {
            let (name, code) = (name(source, arch), cubin::least(arch.as_bytes()));
            std::fs::write(own.dir.join(&name), &code).expect("a file");
            own.hashes.insert(name, blake3::hash(&code).to_hex().to_string());
        }
        own
    }

    #[test]
    fn code_of_the_same_generation_is_found() {
        let text = "this is not text of a kernel".to_string();
        let source = KernelSource { file: "gemm.cu", text };
        let made = name(&source, "sm_80");
        assert!(is_ours(&made) && is_ours(&make::beside(&made)));
        assert!(!is_ours("notes.txt") && !is_ours("gemm-sm_80.cubin") && !is_ours(".cubin"));
        let found = |arch: &str| Some(cubin::least(arch.as_bytes()));
        let mut archs = vec![];
        for (add, asked) in [
            ("sm_80", [("sm_89", Some("sm_80")), ("sm_80", Some("sm_80"))]),
            ("sm_86", [("sm_80", Some("sm_80")), ("sm_89", Some("sm_86"))]),
            ("sm_90", [("sm_90a", Some("sm_90")), ("sm_100a", None)]),
            ("sm_90a", [("sm_90a", Some("sm_90a")), ("sm_90", Some("sm_90"))]),
        ] {
            archs.push(add);
            let own = plan(&source, &archs);
            for (arch, want) in asked {
                // Without a compiler of CUDA, what is in no plan is not found at all.
                let got = find(&source, arch, Some(&own)).ok();
                assert_eq!(got, want.and_then(found), "{arch} of {archs:?}");
                assert_eq!(own.archs(arch).first().map(|a| &**a), want, "{arch} of {archs:?}");
            }
            std::fs::remove_dir_all(&own.dir).expect("removed");
        }
    }

    #[test]
    fn code_that_a_plan_does_not_state_is_refused() {
        let source =
            KernelSource { file: "gemm.cu", text: "this is not text of a kernel".to_string() };
        let mut own = plan(&source, &["sm_80"]);
        let file = own.dir.join(name(&source, "sm_80"));
        let says = |own: &Own, word: &str| {
            let d = find(&source, "sm_80", Some(own)).expect_err("refused").render();
            assert!(d.contains("error[plan]") && d.contains(word), "{d}");
        };
        let planted = cubin::least(b"planted");
        std::fs::write(&file, &planted).expect("a file");
        says(&own, "its hash differs");
        // With the hash of what is there, it must still be code of a device.
        for (code, word) in
            [(&planted[..planted.len() - 1], "cut short"), (b"ELF", "not an ELF file")]
        {
            std::fs::write(&file, code).expect("a file");
            let name = name(&source, "sm_80");
            own.hashes.insert(name, blake3::hash(code).to_hex().to_string());
            says(&own, word);
        }
        own.hashes.clear();
        says(&own, "its hash differs");
        std::fs::remove_dir_all(&own.dir).expect("removed");
    }

    #[test]
    fn code_in_the_cache_is_whole_or_made_again() {
        let code = cubin::least(b"code");
        let kept = [&code[..], blake3::hash(&code).as_bytes()].concat();
        assert_eq!(sound(kept.clone()), Some(code));
        for i in 0..kept.len() {
            let mut bad = kept.clone();
            bad[i] ^= 1;
            assert_eq!(sound(bad), None, "byte {i}");
            assert_eq!(sound(kept[..i].to_vec()), None, "{i} bytes");
        }
    }
}
