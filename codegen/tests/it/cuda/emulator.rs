//! Runs launches on the CPU: a C++ compiler makes a library of a kernel's text and `emulate.h`,
//! which is loaded and called; under the sanitizers a program, which runs a launch on a file of
//! memory. Where there is a device, some of them run there instead.

use super::device;
use libloading::Library;
use libloading::os::unix;
use shardc_codegen::cuda::HEADERS;
use shardc_codegen::cuda::limits::Limits;
use shardc_ir::launch::{DeviceLaunch, KernelSource, SCRATCH, Word};
use shardc_testing::{standin, taken};
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What texts begin with whose products are made by groups of warps, as on sm_90a.
pub const AS_SM_90A: &str = "#define EMULATED_SM90A\n";

/// How a kernel is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Plain,
    /// The last thread of the last block first.
    Reversed,
    /// Under the address and undefined behaviour sanitizers.
    Sanitized,
}

/// How a text is run: under the sanitizers, whose programs take the longest to make, in the long
/// run; in every run some texts, by what they say.
pub fn modes(text: &str) -> Vec<Mode> {
    let chosen = taken(text.bytes().map(usize::from).sum(), 8);
    let sanitized = chosen.then_some(Mode::Sanitized);
    [Mode::Plain, Mode::Reversed].into_iter().chain(sanitized).collect()
}

/// The C++ compiler, if there is one.
pub fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let runs = || Command::new("g++").arg("--version").output().is_ok_and(|o| o.status.success());
    FOUND.get_or_init(runs).then_some("g++")
}

/// Names of the entry points of a text.
pub fn entries(text: &str) -> Vec<&str> {
    text.split("KERNEL void ").skip(1).map(entry).collect()
}

/// The name in `__launch_bounds__(128) name(const Params p) …`.
fn entry(rest: &str) -> &str {
    let rest = match rest.strip_prefix("__launch_bounds__(") {
        Some(bounds) => bounds.split_once(") ").expect("bounds end").1,
        None => rest,
    };
    rest.split('(').next().expect("a split has a first part")
}

/// Runs launches whose operands have these memories.
pub fn run_at(launches: &[DeviceLaunch], operands: &[usize], memory: &mut [Vec<u8>], mode: Mode) {
    let at = |w: &Word| match *w {
        Word::Address { operand, byte } => Word::Address { operand: operands[operand], byte },
        other => other,
    };
    let moved =
        |l: &DeviceLaunch| DeviceLaunch { words: l.words.iter().map(at).collect(), ..l.clone() };
    let all: Vec<DeviceLaunch> = launches.iter().map(moved).collect();
    assert_eq!(run(&all, memory, mode), 0);
}

/// Runs launches on memory of operands; returns the status that kernels set.
pub fn run(launches: &[DeviceLaunch], memory: &mut [Vec<u8>], mode: Mode) -> u64 {
    let mut status = 0u64.to_le_bytes().to_vec();
    let mut scratch = vec![0xff; SCRATCH];
    for l in launches {
        let arch = if l.source.text.starts_with(AS_SM_90A) { "sm_90a" } else { "sm_80" };
        Limits::of(arch).check(l).unwrap_or_else(|d| panic!("{d}"));
    }
    // In the first of the modes, a device runs them instead; races and what is read where nothing
    // is are the emulator's.
    let device = device::here().filter(|d| mode == Mode::Plain && d.can(launches));
    if let Some(device) = device {
        return device.run(launches, memory);
    }
    let mut operands: Vec<&mut [u8]> = memory.iter_mut().map(|m| &mut m[..]).collect();
    operands.extend([&mut status[..], &mut scratch]);
    match mode {
        Mode::Sanitized => launches.iter().for_each(|l| apart(l, &mut operands)),
        Mode::Plain => here(launches, &mut operands, false),
        Mode::Reversed => here(launches, &mut operands, true),
    }
    u64::from_le_bytes(status[..].try_into().unwrap())
}

/// Which operand a word is an address in, and of which byte; or none, and its value. The status and
/// the scratch are the last of so many operands.
fn word(w: &Word, operands: usize) -> (Option<usize>, u64) {
    match *w {
        Word::Address { operand, byte } => (Some(operand), byte as u64),
        Word::Status => (Some(operands - 2), 0),
        Word::Scratch => (Some(operands - 1), 0),
        Word::Int(x) => (None, x as u64),
        Word::Float(x) => (None, x.to_bits()),
    }
}

/// `Dim` and `Launch` of emulate.h.
#[repr(C)]
struct Dim(u32, u32, u32);
#[repr(C)]
struct Called {
    words: *const u64,
    count: usize,
    grid: Dim,
    size: Dim,
    shared: usize,
    reversed: bool,
}
type Find = unsafe extern "C" fn(*const c_char) -> Option<unsafe extern "C" fn(&Called)>;

/// Runs launches in this process, whose end is that of a kernel that does what it may not.
fn here(launches: &[DeviceLaunch], operands: &mut [&mut [u8]], reversed: bool) {
    // Memory of devices is aligned so.
    const ALIGNED: usize = 256;
    let mut memory: Vec<Vec<u8>> = operands.iter().map(|m| vec![0; m.len() + ALIGNED]).collect();
    let mut own: Vec<&mut [u8]> = vec![];
    for (all, given) in memory.iter_mut().zip(&*operands) {
        let begin = all.as_ptr().align_offset(ALIGNED);
        let m = &mut all[begin..][..given.len()];
        m.copy_from_slice(given);
        own.push(m);
    }
    let at: Vec<u64> = own.iter_mut().map(|m| m.as_mut_ptr() as u64).collect();
    let _runner = runner();
    for l in launches {
        let of = |w: &Word| match word(w, at.len()) {
            (Some(operand), byte) => at[operand] + byte,
            (None, value) => value,
        };
        let words: Vec<u64> = l.words.iter().map(of).collect();
        let (grid, size) = (Dim(l.grid[0], l.grid[1], l.grid[2]), Dim(l.threads, 1, 1));
        let (count, shared) = (words.len(), l.shared as usize);
        let called = Called { words: words.as_ptr(), count, grid, size, shared, reversed };
        let name = CString::new(&*l.entry).expect("a name");
        // SAFETY: our own library, whose kernels take these words and stay in these operands.
        unsafe {
            let library = Library::new(build(&l.source, false)).unwrap();
            let find = library.get::<Find>(c"find_kernel").unwrap();
            let run = find(name.as_ptr()).unwrap_or_else(|| panic!("no kernel {}", l.entry));
            run(&called);
        }
    }
    operands.iter_mut().zip(own).for_each(|(to, m)| to.copy_from_slice(m));
}

/// Runs a launch as a process.
fn apart(l: &DeviceLaunch, operands: &mut [&mut [u8]]) {
    let program = build(&l.source, true);
    let file = unique("launch");
    let (given, made) = (file.with_extension("in"), file.with_extension("out"));
    std::fs::write(&given, image(l, operands)).unwrap();
    let mut command = Command::new(&program);
    let out = command.arg(&given).arg(&made).env("ASAN_OPTIONS", "detect_leaks=0").output();
    let out = out.unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{} under sanitizers: {said}", l.entry);
    let bytes = std::fs::read(&made).unwrap();
    let mut rest = &bytes[..];
    for operand in operands {
        let (own, after) = rest.split_at(operand.len());
        operand.copy_from_slice(own);
        rest = after;
    }
    [given, made].iter().for_each(|f| std::fs::remove_file(f).unwrap());
}

/// The file that `run.cpp` reads.
fn image(l: &DeviceLaunch, operands: &[&mut [u8]]) -> Vec<u8> {
    let mut out: Vec<u8> = vec![];
    let number = |out: &mut Vec<u8>, x: usize| out.extend((x as u64).to_le_bytes());
    let padded = |out: &mut Vec<u8>, bytes: &[u8]| {
        number(out, bytes.len());
        out.extend(bytes);
        out.resize(out.len().next_multiple_of(8), 0);
    };
    number(&mut out, operands.len());
    operands.iter().for_each(|m| padded(&mut out, m));
    padded(&mut out, l.entry.as_bytes());
    l.grid.iter().for_each(|&n| number(&mut out, n as usize));
    number(&mut out, l.threads as usize);
    number(&mut out, l.shared as usize);
    number(&mut out, l.words.len());
    for w in &l.words {
        let (operand, value) = word(w, operands.len());
        number(&mut out, operand.map_or(0, |o| o + 1));
        out.extend(value.to_le_bytes());
    }
    out
}

/// The library of a text, or its program; made once, and kept for the next run of the tests.
fn build(source: &KernelSource, sanitize: bool) -> PathBuf {
    let here = standin::sources();
    let ours = ["emulate.h", "emulate.cpp", "run.cpp", "half.h"];
    let ours = ours.map(|f| std::fs::read_to_string(here.join(f)).unwrap());
    let mut hash = DefaultHasher::new();
    (&source.text, &HEADERS, &ours, FLAGS, sanitize).hash(&mut hash);
    let stem = Path::new(source.file).file_stem().unwrap().to_string_lossy();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let kept = dir.join(format!("{stem}-{:016x}", hash.finish()));
    if kept.exists() {
        return kept;
    }
    let named = entries(&source.text).iter().map(|e| format!("ENTRY({e})\n")).collect::<String>();
    let text = format!("#include \"emulate.h\"\n{}\nKERNELS\n{named}KERNELS_END\n", source.text);
    let made = unique("build");
    let file = made.with_extension("cpp");
    std::fs::write(&file, text).unwrap();
    let mut command = compile(sanitize);
    command.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")).arg(&file);
    match sanitize {
        true => command.args(sanitized_runner()),
        // The names of the runner are found when it is loaded: most of the time of a linker is
        // spent on libraries.
        false => command.args(["-O1", "-nostdlib", "-fvisibility=hidden"]),
    };
    run_compiler(command.arg("-o").arg(&made));
    std::fs::rename(&made, &kept).unwrap();
    std::fs::remove_file(&file).unwrap();
    kept
}

/// What runs the kernels of every library, compiled once: it stays loaded, and their names are
/// found in it.
fn runner() -> &'static unix::Library {
    static MADE: OnceLock<unix::Library> = OnceLock::new();
    MADE.get_or_init(|| {
        let made = unique("runner");
        let mut command = compile(false);
        // Most of the time of kernels is spent in it.
        command.arg("-O2").arg(standin::sources().join("emulate.cpp"));
        run_compiler(command.arg("-o").arg(&made));
        // SAFETY: our own library, which does nothing when it is loaded.
        let opened =
            unsafe { unix::Library::open(Some(&made), unix::RTLD_NOW | unix::RTLD_GLOBAL) };
        std::fs::remove_file(&made).unwrap();
        opened.unwrap()
    })
}

/// What runs the kernels of every program, compiled once.
fn sanitized_runner() -> &'static [PathBuf; 2] {
    static MADE: OnceLock<[PathBuf; 2]> = OnceLock::new();
    MADE.get_or_init(|| {
        ["emulate.cpp", "run.cpp"].map(|source| {
            let made = unique("object");
            let mut command = compile(true);
            command.arg("-c").arg(standin::sources().join(source));
            run_compiler(command.arg("-o").arg(&made));
            let object = made.with_file_name(format!("{source}.o"));
            std::fs::rename(&made, &object).unwrap();
            object
        })
    })
}

/// Words of a table of parameters are those of a kernel; a product and a sum are one instruction,
/// as on devices.
const FLAGS: [&str; 6] = [
    "-std=c++17",
    "-ffp-contract=fast",
    "-fexpensive-optimizations",
    "-fno-strict-aliasing",
    "-march=native",
    "-w",
];

/// The compiler with its flags.
fn compile(sanitize: bool) -> Command {
    let mut command = Command::new(compiler().expect("looked for before"));
    command.args(FLAGS).arg("-I");
    command.arg(standin::sources());
    // Checks of null and of sizes are the address sanitizer's too; the compiler takes half as long
    // without them.
    let checks =
        ["-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow"];
    match sanitize {
        true => command.args(["-O0", "-g1", "-fno-sanitize-recover=all"]).args(checks),
        false => command.args(["-fPIC", "-shared", "-fno-gnu-unique"]),
    };
    command
}

fn run_compiler(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// A path that no other test uses.
fn unique(what: &str) -> PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{what}-{process}-{n}"))
}
