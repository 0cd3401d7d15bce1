//! Makes the stand-ins for libcuda, libnvrtc, libcublasLt and libnccl, with a C++ compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the stand-ins' sources, and of `emulate.h`, `emulate.cpp` and `run.cpp`, which run
/// kernels on the CPU.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

/// Makes the libraries in a folder; `None` if there is no C++ compiler.
///
/// # Panics
/// If a source does not compile, or the folder cannot be written.
pub fn make(to: &Path) -> Option<()> {
    let sources = sources();
    std::fs::create_dir_all(to).expect("a folder of the tests");
    std::fs::copy(sources.join("emulate.h"), to.join("emulate.h")).expect("a copy");
    let made = |flags: &[&str], source: &str, file: &str| -> Option<()> {
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O1", "-w", "-fPIC"]).args(flags).arg(sources.join(source));
        let out = command.arg("-o").arg(to.join(file)).output().ok()?;
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Some(())
    };
    let one = |source: &str, library: &str, name: &str| {
        let name = format!("-Wl,-soname,{name}");
        made(&["-shared", "-fvisibility-inlines-hidden", &name], source, library)
    };
    // Most of the time of kernels is spent in it.
    let object = ["-c", "-O2", "-march=native", "-fno-strict-aliasing", "-fvisibility=hidden"];
    made(&object, "emulate.cpp", "emulate.o")?;
    one("driver.cpp", "libcuda.so.1", "libcuda.so")?;
    one("compiler.cpp", "libnvrtc.so.13", "libnvrtc.so")?;
    one("products.cpp", "libcublasLt.so.13", "libcublasLt.so")?;
    one("collectives.cpp", "libnccl.so.2", "libnccl.so.2")
}
