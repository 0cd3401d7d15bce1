//! Makes the stand-ins for libcuda, libnvrtc, libcublasLt and libnccl, with a C++ compiler.

use std::path::Path;
use std::process::Command;

/// Makes the libraries in a folder, from the sources in the folder of the tests of kernels; `None`
/// if there is no C++ compiler.
pub fn make(sources: &Path, to: &Path) -> Option<()> {
    std::fs::create_dir_all(to).unwrap();
    std::fs::copy(sources.join("emulate.h"), to.join("emulate.h")).unwrap();
    let one = |source: &str, library: &str, name: &str| -> Option<()> {
        let mut command = Command::new("g++");
        command.args([
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-fvisibility-inlines-hidden",
        ]);
        command.arg(format!("-Wl,-soname,{name}")).arg("-I").arg(sources);
        let source = sources.join("standin").join(source);
        let out = command.arg(source).arg("-o").arg(to.join(library)).output().ok()?;
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Some(())
    };
    one("driver.cpp", "libcuda.so.1", "libcuda.so")?;
    one("compiler.cpp", "libnvrtc.so.13", "libnvrtc.so")?;
    one("products.cpp", "libcublasLt.so.13", "libcublasLt.so")?;
    one("collectives.cpp", "libnccl.so.2", "libnccl.so.2")
}
