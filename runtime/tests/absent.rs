//! Without the libraries of CUDA: a diagnostic that names the library, and no panic.

use shardc_codegen::nvrtc;
use shardc_ir::diag::Exit;
use shardc_ir::launch::KernelSource;
use shardc_runtime::cuda::Device;

#[test]
fn a_missing_compiler_is_named() {
    // SAFETY: the other test of this program does not read the environment.
    unsafe { std::env::set_var(nvrtc::DIR, "/nowhere") };
    let source = KernelSource { file: "k.cu", text: String::new() };
    let d = nvrtc::compile(&source, "sm_80").unwrap_err();
    assert_eq!((d.code, d.exit), ("missing-library", Exit::Environment));
    assert!(d.message.contains("libnvrtc.so"), "{d}");
    assert!(d.why[0].contains("SHARDC_NVRTC_DIR: /nowhere"), "{d}");
}

#[test]
fn a_missing_driver_is_named() {
    let Err(d) = Device::open(0) else { return println!("skipped: there is a device") };
    assert_eq!(d.exit, Exit::Environment);
    if d.code == "missing-library" {
        assert!(d.message.contains("libcuda.so.1"), "{d}");
    }
}
