//! The device of the tests: a real one, or stand-ins for the driver and the run-time compiler, which a
//! C++ compiler makes of the sources in `testing/cuda`.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use shardc_codegen::nvrtc;
use shardc_ir::diag::Result;
use shardc_ir::launch::KernelSource;
use shardc_runtime::cuda::{Code, Device};
use shardc_testing::{Tool, skip, standin};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A device, and the code that has been made for it.
pub struct Machine {
    pub device: Arc<Device>,
    arch: String,
    code: Mutex<Code>,
}

impl Machine {
    /// The code of these texts, each compiled once.
    pub fn code(&self, sources: impl Iterator<Item = Arc<KernelSource>>) -> Result<Code> {
        let mut known = self.code.lock().unwrap_or_else(PoisonError::into_inner);
        let mut code = Code::new();
        for source in sources {
            if !known.contains_key(&source) {
                let compiled = nvrtc::compile(&source, &self.arch)?;
                known.insert(source.clone(), compiled.cubin);
            }
            code.insert(source.clone(), known[&source].clone());
        }
        Ok(code)
    }
}

/// The machine; `None`, and why, if there is neither a device nor a C++ compiler.
pub fn get() -> Option<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        if !real() {
            stand_in()?;
        }
        let device = Device::open(0).unwrap_or_else(|d| panic!("{d}"));
        let arch = device.arch().unwrap();
        Some(Machine { device, arch, code: Mutex::default() })
    });
    if machine.is_none() {
        skip(Tool::Cpp, "there is no CUDA device, and no stand-in of one");
    }
    machine.as_ref()
}

/// True if there is a driver; then there should be a device.
fn real() -> bool {
    // SAFETY: NVIDIA's library, or none.
    unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.is_ok()
}

/// Makes and loads the stand-ins, which later calls find by the names that they carry.
fn stand_in() -> Option<()> {
    let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // What earlier runs have left.
    for entry in std::fs::read_dir(all).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix("device-of-");
        if process.is_some_and(|p| !Path::new("/proc").join(p).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    let to = all.join(format!("device-of-{}", std::process::id()));
    standin::make(&to)?;
    let driver = to.join("libcuda.so.1");
    // SAFETY: our own libraries; no other thread reads the environment while tests wait for this.
    unsafe {
        std::env::set_var(nvrtc::DIR, &to);
        std::env::set_var("STANDIN_DEVICES", "2");
        for library in [driver, to.join("libcublasLt.so.13")] {
            std::mem::forget(Library::open(Some(library), RTLD_NOW | RTLD_LOCAL).unwrap());
        }
    }
    Some(())
}
