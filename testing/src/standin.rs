//! Makes the stand-ins for libcuda, libnvrtc, libcublasLt and libnccl, with a C++ compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the stand-ins' sources, and of `emulate.h` and `run.h`, which run kernels on the CPU.
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
    let one = |source: &str, library: &str, name: &str| -> Option<()> {
        let flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fvisibility-inlines-hidden"];
        let mut command = Command::new("g++");
        command.args(flags).arg(format!("-Wl,-soname,{name}")).arg(sources.join(source));
        let out = command.arg("-o").arg(to.join(library)).output().ok()?;
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Some(())
    };
    one("driver.cpp", "libcuda.so.1", "libcuda.so")?;
    one("compiler.cpp", "libnvrtc.so.13", "libnvrtc.so")?;
    one("products.cpp", "libcublasLt.so.13", "libcublasLt.so")?;
    one("collectives.cpp", "libnccl.so.2", "libnccl.so.2")
}
