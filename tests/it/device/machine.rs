//! The machine of these tests: a real driver, or stand-ins that run kernels on the CPU.

use super::hangs::HARD;
use safetensors::SafeTensors;
use shardc_testing::{Tool, skip, standin};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

pub const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The folder of that name.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("on-{name}"));
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

/// A machine with devices.
pub struct Machine {
    pub dir: PathBuf,
    /// The stand-ins' folder; `None` if there is a driver.
    pub libraries: Option<PathBuf>,
    /// Of compiled kernels.
    cache: PathBuf,
}

/// The stand-ins, made once; `None` if there is a driver, and `Err` if there is nothing.
fn libraries() -> Result<Option<&'static Path>, &'static str> {
    static MADE: OnceLock<Result<Option<PathBuf>, &str>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        // SAFETY: NVIDIA's library, or none.
        if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
            return Ok(None);
        }
        let to = folder("stand-ins");
        let made = standin::make(&to);
        made.map(|()| Some(to)).ok_or("no CUDA device, and no C++ compiler for a stand-in of one")
    });
    made.as_ref().map(|m| m.as_deref()).map_err(|e| *e)
}

impl Machine {
    /// With an empty folder.
    pub fn new(name: &str) -> Option<Machine> {
        let m = Machine::again(name)?;
        std::fs::remove_dir_all(&m.dir).expect("it is there");
        std::fs::create_dir_all(&m.dir).expect("a folder");
        Some(m)
    }

    /// With the folder of that name as it is.
    pub fn again(name: &str) -> Option<Machine> {
        let made = libraries().map_err(|why| skip(Tool::Cpp, why)).ok()?;
        let (dir, libraries) = (folder(name), made.map(Path::to_path_buf));
        let cache = made.map_or_else(|| dir.join("cache"), |m| m.join("cache"));
        Some(Machine { dir, libraries, cache })
    }

    /// With a cache of its own, which is empty.
    pub fn alone(self) -> Machine {
        Machine { cache: self.dir.join("cache"), ..self }
    }

    pub fn command(&self, args: &[&str], also: &[(&str, &str)]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
        c.current_dir(&self.dir).args(args).env("SHARDC_CACHE", &self.cache);
        if let Some(l) = &self.libraries {
            c.env("LD_LIBRARY_PATH", l).env_remove("SHARDC_NVRTC_DIR").envs(HARD);
        }
        c.envs(also.iter().copied());
        c
    }

    pub fn shardc(&self, args: &[&str], also: &[(&str, &str)]) -> Output {
        self.command(args, also).output().expect("shardc starts")
    }

    pub fn ok(&self, args: &[&str], also: &[(&str, &str)]) -> String {
        let out = self.shardc(args, also);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    pub fn tensors(&self, file: &str) -> BTreeMap<String, Vec<f32>> {
        let bytes = std::fs::read(self.dir.join(file)).expect("a dump");
        let all = SafeTensors::deserialize(&bytes).expect("safetensors");
        let word = |w: &[u8]| f32::from_le_bytes(w.try_into().expect("4 bytes"));
        let numbers = |data: &[u8]| data.chunks_exact(4).map(word).collect();
        all.tensors().into_iter().map(|(name, t)| (name, numbers(t.data()))).collect()
    }
}

/// Compares what was dumped of 3 steps here and there: losses, logits, gradients and parameters, in
/// parts of a tensor's largest element. Parameters of bf16 are compared by how far they went: AdamW
/// divides by the size of a gradient, so where that is its rounding error a step may go either way.
pub fn compare(
    cpu: &BTreeMap<String, Vec<f32>>,
    cuda: &BTreeMap<String, Vec<f32>>,
    tolerance: f64,
) {
    assert!(cpu.len() > 20 && cpu.keys().eq(cuda.keys()), "{:?}", cuda.keys());
    let rate = 1e-3;
    for (name, want) in cpu {
        let got = &cuda[name];
        let largest = want.iter().fold(1e-3f64, |a, b| a.max(f64::from(b.abs())));
        let bound = if name.starts_with("param.") { 6.0 * rate } else { tolerance * largest };
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            let off = f64::from((g - w).abs());
            assert!(off <= bound, "{name} {i}: {g} is not {w}");
        }
        // Few elements have such gradients.
        let far = got.iter().zip(want).filter(|(g, w)| f64::from((*g - *w).abs()) > rate * 0.1);
        let few = got.len() / 20 + 1;
        assert!(!name.starts_with("param.") || far.count() <= few, "{name}");
    }
}
