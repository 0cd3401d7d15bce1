//! Whether NCCL starts kernels of several communicators in the order of their calls, and nothing more.
//!
//! Since 2.26 it does where `NCCL_LAUNCH_ORDER_IMPLICIT` is 1; but if the driver, or the CUDA that NCCL was built with,
//! is older than 12.3, it lets each of them end before the next one starts (`getImplicitOrder` in NCCL's `enqueue.cc`):
//! then a receive that was posted early holds up what it waits for, for ever. NCCL has no function for what it was
//! built with; it is in its text, as `NCCL version 2.26.2+cuda12.2`.

use cudarc::driver::sys as driver;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const ASKED: &str = "NCCL_LAUNCH_ORDER_IMPLICIT";
/// The first version of NCCL that does, as 22600 for 2.26.0, and of CUDA with which it does no more than that.
const SINCE: i32 = 22_600;
const CUDA: i32 = 12_030;
/// Most bytes of the part of a library that has its texts.
const MOST: u64 = 64 << 20;

/// Asks for it where it is safe, and nobody has said otherwise; before NCCL reads it. Whether it does.
pub(super) fn ask(version: i32) -> bool {
    let safe = version >= SINCE && old().is_none();
    if let Some(set) = std::env::var_os(ASKED) {
        return safe && set == "1";
    }
    if safe {
        // SAFETY: NCCL was loaded and makes nothing yet, and has no threads that read it; Rust's own are held up.
        unsafe { std::env::set_var(ASKED, "1") };
    }
    safe
}

/// Checks that nobody asks for it where a receive that was posted would hold up all else.
///
/// # Errors
/// `missing-library`.
pub(super) fn check(version: i32) -> Result<()> {
    let asked = std::env::var(ASKED).is_ok_and(|set| set.trim() == "1") && version >= SINCE;
    let Some(what) = asked.then(old).flatten() else { return Ok(()) };
    Err(Diag::new("missing-library", format!("{ASKED} is 1, and {what}"))
        .rule("NCCL starts its kernels in order, beside each other, with CUDA 12.3 or later")
        .why(
            "with older ones each ends before the next starts: stages wait for each other for ever",
        )
        .help(format!("unset {ASKED}: shardc sets it where that is right")))
}

/// What is too old, or not known, in words.
fn old() -> Option<String> {
    let written = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    let mut own = 0;
    // SAFETY: looks for the library by name, and asks it for a number.
    let told = unsafe {
        driver::is_culib_present()
            && driver::cuDriverGetVersion(&mut own) == driver::CUresult::CUDA_SUCCESS
    };
    if !told || own < CUDA {
        return Some(format!("the driver is that of CUDA {}", written(own)));
    }
    match built() {
        Some(v) if v >= CUDA => None,
        Some(v) => Some(format!("NCCL was built with CUDA {}", written(v))),
        None => Some("NCCL does not say with which CUDA it was built".into()),
    }
}

/// The CUDA that the loaded library was built with, as 12030 for 12.3.
fn built() -> Option<i32> {
    let maps = files::read_text(Path::new("/proc/self/maps"), MOST).ok()?;
    let path = maps.lines().filter_map(|l| l.split_once('/').map(|x| format!("/{}", x.1)));
    let of_nccl = |p: &String| {
        let name = Path::new(p).file_name().and_then(|n| n.to_str());
        name.is_some_and(|n| n.starts_with("libnccl.so"))
    };
    let (file, _) = files::open(Path::new(&path.into_iter().find(of_nccl)?)).ok()?;
    let texts = texts(&file)?;
    version_in(&texts)
}

/// The version of CUDA in the texts of a library.
fn version_in(texts: &[u8]) -> Option<i32> {
    const BEFORE: &[u8] = b"NCCL version ";
    let at = texts.windows(BEFORE.len()).enumerate().filter(|w| w.1 == BEFORE);
    at.into_iter().find_map(|(at, _)| {
        let said = texts[at..].split(|&b| b == 0).next()?;
        let said = std::str::from_utf8(said).ok()?;
        let (major, minor) = said.split_once("+cuda")?.1.split_once('.')?;
        let digits = minor.find(|c: char| !c.is_ascii_digit()).unwrap_or(minor.len());
        let (major, minor): (i32, i32) = (major.parse().ok()?, minor[..digits].parse().ok()?);
        (major < 1000 && minor < 100).then_some(major * 1000 + minor * 10)
    })
}

/// The section `.rodata` of an ELF file of 64 bits: its constants.
fn texts(file: &File) -> Option<Vec<u8>> {
    let bytes = |at: u64, n: u64| -> Option<Vec<u8>> {
        let mut out = vec![0; usize::try_from(Some(n).filter(|&n| n <= MOST)?).ok()?];
        file.read_exact_at(&mut out, at).ok().map(|()| out)
    };
    let number = |from: &[u8], at: usize, n: usize| -> Option<u64> {
        let mut word = [0; 8];
        word[..n].copy_from_slice(from.get(at..at + n)?);
        Some(u64::from_le_bytes(word))
    };
    let head = bytes(0, 64)?;
    let (at, each) = (number(&head, 0x28, 8)?, number(&head, 0x3a, 2)?);
    let (count, names) = (number(&head, 0x3c, 2)?, number(&head, 0x3e, 2)?);
    let sections = bytes(at, each * count)?;
    let of = |section: u64| -> Option<(u64, u64, u64)> {
        let at = usize::try_from(section * each).ok()?;
        let head = sections.get(at..at + 64)?;
        Some((number(head, 0, 4)?, number(head, 0x18, 8)?, number(head, 0x20, 8)?))
    };
    let (_, at, n) = of(names)?;
    let names = bytes(at, n)?;
    let (_, at, n) = (0..count).filter_map(of).find(|&(name, ..)| {
        let name = usize::try_from(name).ok().and_then(|at| names.get(at..));
        name.is_some_and(|n| n.starts_with(b".rodata\0"))
    })?;
    bytes(at, n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_which_cuda() {
        let of = |text: &str| version_in(format!("a\0{text}\0b").as_bytes());
        assert_eq!(of("NCCL version 2.26.2+cuda12.2"), Some(12_020));
        assert_eq!(of("NCCL version 2.30.7+cuda13.3\n"), Some(13_030));
        assert_eq!(of("NCCL version 2.18.1+cuda12.10"), Some(12_100));
        assert_eq!(of("NCCL version %s\0NCCL version 2.26.2+cuda12.2"), Some(12_020));
        for other in ["NCCL version 2.18.1", "NCCL version ", "+cuda12.2", "NCCL version +cuda."] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    /// This program has constants of its own.
    #[test]
    fn constants_of_a_program_are_found() {
        let own = File::open(std::env::current_exe().expect("a program")).expect("a file");
        let texts = texts(&own).expect("an ELF file");
        let some = b"constants of a program are found, and this is one";
        assert!(texts.windows(some.len()).any(|w| w == some));
        let (none, _) = files::open(Path::new("/proc/self/cmdline")).expect("a file");
        assert!(super::texts(&none).is_none());
    }
}
