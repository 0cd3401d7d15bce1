//! CUDA C++ to code of a processor, by NVIDIA's run-time compiler, which is loaded when it is first
//! needed: from the folder in `SHARDC_NVRTC_DIR`, or from where the system finds libraries. It needs
//! no device.

use crate::cuda::HEADERS;
use cudarc::nvrtc::{result, sys};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::launch::KernelSource;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::OnceLock;

/// The variable that names the library's folder.
pub const DIR: &str = "SHARDC_NVRTC_DIR";

/// Code for one architecture.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// An ELF file that the driver loads.
    pub cubin: Vec<u8>,
    /// What each entry point takes, in the order of the compiler's report.
    pub usage: Vec<Usage>,
    /// Where the assembler makes products of groups of warps wait, and the text does not.
    pub losses: Vec<String>,
}

/// What the threads of an entry point take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub entry: String,
    pub registers: u32,
    /// Bytes written and read because registers did not suffice.
    pub spilled: u32,
    /// Bytes of memory of a thread's own.
    pub stack: u32,
    /// Bytes of shared memory that the text declares.
    pub shared: u32,
}

/// Whether the compiler is here: it is loaded.
///
/// # Errors
/// `missing-library`.
pub fn is_here() -> Result<()> {
    static LOADED: OnceLock<Result<()>> = OnceLock::new();
    LOADED.get_or_init(load).clone()
}

/// What the compiler is told beside the architecture.
const OPTIONS: [&str; 2] = ["--ptxas-options=-v", "--std=c++17"];

/// Which compiler this is and what it is told, as a word: its version and a hash of the options.
///
/// # Errors
/// `missing-library` without the compiler.
pub fn identity() -> Result<String> {
    is_here()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded; it writes two integers, which live until it returns.
    let said = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    said.result().map_err(|e| failed("nvrtcVersion", &e))?;
    let hash = blake3::hash(OPTIONS.join(" ").as_bytes()).to_hex();
    Ok(format!("nvrtc_{major}.{minor}_{}", &hash[..8]))
}

/// Compiles a text for an architecture such as `sm_90a`.
///
/// # Errors
/// `missing-library` without the compiler, `cuda-compile` with its first message and the lines that
/// it is about.
pub fn compile(source: &KernelSource, arch: &str) -> Result<Compiled> {
    let (program, log) = compiled(source, arch)?;
    Ok(Compiled { cubin: program.cubin()?, usage: usage(&log), losses: losses(&log) })
}

/// The instructions of a text for an architecture, as text (PTX); for a virtual one such as `compute_90a`
/// nothing else is made.
///
/// # Errors
/// Those of [`compile`].
pub fn instructions(source: &KernelSource, arch: &str) -> Result<String> {
    let (program, _) = compiled(source, arch)?;
    // SAFETY: the program is compiled, and its text ends with a zero.
    unsafe {
        let text = result::get_ptx(program.0).map_err(|e| failed("nvrtcGetPTX", &e))?;
        Ok(CStr::from_ptr(text.as_ptr()).to_string_lossy().into())
    }
}

/// A program that has been compiled, and what the compiler says of it.
fn compiled(source: &KernelSource, arch: &str) -> Result<(NvrtcProgram, String)> {
    is_here()?;
    let program = NvrtcProgram::new(source)?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(OPTIONS.map(String::from));
    // SAFETY: the program is alive.
    let done = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    match done {
        Ok(()) => Ok((program, log)),
        Err(e) => Err(refused(source, arch, &log, &e)),
    }
}

/// Loads the compiler, so that later calls of it find it.
fn load() -> Result<()> {
    if let Some(dir) = std::env::var_os(DIR) {
        let dir = Path::new(&dir);
        let missing = |why: String| missing("libnvrtc.so.13").why(format!("{DIR}: {why}"));
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .map_err(|e| missing(format!("{}: {e}", dir.display())))?
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter(|p| file_name(p).starts_with("libnvrtc") && !file_name(p).contains(".alt."))
            .filter(|p| file_name(p).contains(".so"))
            .collect();
        // The part that the compiler loads by its bare name comes before it: `-builtins` < `.so`.
        names.sort();
        for path in names {
            // SAFETY: the compiler's own libraries, which run nothing of interest when they load.
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
            // Never unloaded: from now on its name finds it.
            std::mem::forget(library.map_err(|e| missing(e.to_string()))?);
        }
    }
    // SAFETY: looks for the library by name, as every later call does.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => Err(missing("libnvrtc.so.13")),
    }
}

fn file_name(p: &Path) -> &str {
    p.file_name().and_then(|n| n.to_str()).unwrap_or("")
}

fn missing(library: &str) -> Diag {
    Diag::new("missing-library", format!("{library} is not here"))
        .rule("kernels for CUDA are compiled by NVIDIA's run-time compiler (NVRTC)")
        .help(format!("install CUDA 12 or 13, or set {DIR} to the folder of the library"))
        .help("pip download --no-deps 'nvidia-cuda-nvrtc==13.0.*', and unzip it: no GPU is needed")
}

/// A program of the compiler's.
struct NvrtcProgram(sys::nvrtcProgram);

impl NvrtcProgram {
    fn new(source: &KernelSource) -> Result<NvrtcProgram> {
        let string = |s: &str| CString::new(s).expect("texts of kernels have no zero bytes");
        let (text, name) = (string(&source.text), string(source.file));
        let texts = HEADERS.map(|(_, text)| string(text));
        let names = HEADERS.map(|(name, _)| string(name));
        let [texts, names] = [&texts, &names].map(|all| all.each_ref().map(|s| s.as_ptr()));
        let mut program = std::ptr::null_mut();
        // SAFETY: the strings live until the call returns, and the library copies them.
        let made = unsafe {
            let n = HEADERS.len() as i32;
            let (texts, names) = (texts.as_ptr(), names.as_ptr());
            sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), n, texts, names)
        };
        made.result().map_err(|e| failed("nvrtcCreateProgram", &e))?;
        Ok(NvrtcProgram(program))
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive, and its log ends with a zero.
        unsafe {
            let log = result::get_program_log(self.0);
            log.map_or(String::new(), |l| CStr::from_ptr(l.as_ptr()).to_string_lossy().into())
        }
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is compiled; the vector has as many bytes as it asks for.
        unsafe {
            let sized = sys::nvrtcGetCUBINSize(self.0, &mut size);
            sized.result().map_err(|e| failed("nvrtcGetCUBINSize", &e))?;
            let mut cubin = vec![0u8; size];
            let copied = sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast());
            copied.result().map_err(|e| failed("nvrtcGetCUBIN", &e))?;
            Ok(cubin)
        }
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used any more. An error would leak some memory.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn failed(call: &str, e: &result::NvrtcError) -> Diag {
    Diag::new("cuda-compile", format!("{call}: {:?}", e.0))
}

/// The compiler's first error, with the lines around it.
fn refused(source: &KernelSource, arch: &str, log: &str, e: &result::NvrtcError) -> Diag {
    let first = log.lines().find(|l| l.contains("error")).unwrap_or("").trim();
    let d = Diag::new("cuda-compile", format!("{} does not compile for {arch}", source.file))
        .why(if first.is_empty() { format!("{:?}", e.0) } else { first.to_string() });
    let Some((file, line)) = place(first) else { return d };
    let text = HEADERS.iter().find(|(name, _)| *name == file).map(|(_, text)| *text);
    let own = || source.text.split_once("#line 1 ").and_then(|(_, t)| Some(t.split_once('\n')?.1));
    let text = text.or_else(own).unwrap_or(&source.text);
    let around = line.saturating_sub(3)..line + 2;
    let shown = text.lines().enumerate().filter(|(i, _)| around.contains(i));
    let picture = shown.map(|(i, l)| format!("\n{:>4}  {l}", i + 1)).collect::<String>();
    // The entry point that the line is part of.
    let entry = |l: &str| Some(l.split_once("KERNEL void ")?.1.split_once(") ")?.1.to_string());
    let entry = text.lines().take(line).filter_map(entry).last();
    let inside =
        entry.map_or(String::new(), |l| format!(", in {}", l.split('(').next().unwrap_or(&l)));
    d.at(format!("{file}, line {line}{inside}\n{picture}"))
}

/// File and line of `attention.cu(12): error: …`.
fn place(message: &str) -> Option<(&str, usize)> {
    let (file, rest) = message.split_once('(')?;
    Some((file, rest.split_once(')')?.0.parse().ok()?))
}

/// Reads the report of the assembler.
fn usage(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = vec![];
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let entry = rest.split('\'').next().unwrap_or("").to_string();
            all.push(Usage { entry, ..Usage::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        // `0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads` and
        // `Used 168 registers, used 1 barriers, 128 bytes smem`.
        for part in line.split(',') {
            let number = || {
                let digits = part.split_whitespace().find_map(|w| w.parse().ok());
                digits.unwrap_or(0)
            };
            match part {
                p if p.contains("bytes stack frame") => last.stack = number(),
                p if p.contains("bytes spill") => last.spilled += number(),
                p if p.contains("registers") => last.registers = number(),
                p if p.contains("bytes smem") => last.shared = number(),
                _ => {}
            }
        }
    }
    all
}

/// Remarks such as `(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized`
/// and `(C7517) warpgroup.wait is injected`.
fn losses(log: &str) -> Vec<String> {
    log.lines().filter(|l| l.contains("(C75")).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_the_assembler_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
            ptxas info    : Function properties for a\n    \
            8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n\
            ptxas info    : Used 96 registers, used 1 barriers, 128 bytes smem, 616 bytes cmem[0]\n\
            ptxas info    : Compiling entry function 'b' for 'sm_80'\n\
            ptxas info    : Used 8 registers, used 0 barriers\n";
        let a = Usage { entry: "a".into(), registers: 96, spilled: 16, stack: 8, shared: 128 };
        let b = Usage { entry: "b".into(), registers: 8, ..Usage::default() };
        assert_eq!(usage(log), [a, b]);
        assert!(losses(log).is_empty());
        let wait =
            "ptxas info    : (C7517) warpgroup.wait is injected in around line 9 by compiler";
        assert_eq!(losses(&format!("{wait}\n{log}")), [wait]);
    }

    #[test]
    fn an_error_shows_its_lines() {
        let text =
            "#define A 1\n#line 1 \"k.cu\"\nKERNEL void __launch_bounds__(8) k(const P p) {\n\
            two\nthree\nfour\n"
                .to_string();
        let source = KernelSource { file: "k.cu", text };
        let log = "k.cu(3): error: identifier \"three\" is undefined\n";
        let e = result::NvrtcError(sys::nvrtcResult::NVRTC_ERROR_COMPILATION);
        let shown = refused(&source, "sm_80", log, &e).render();
        assert!(shown.contains("--> k.cu, line 3, in k"), "{shown}");
        assert!(shown.contains(" |    3  three"), "{shown}");
        assert!(shown.contains("k.cu does not compile for sm_80"), "{shown}");
    }
}
