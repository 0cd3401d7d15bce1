//! Plans on CUDA devices, by the command line: real ones, or stand-ins for the driver and the
//! compiler, which run kernels on the CPU. The numbers are those of `--device cpu`.

mod hangs;
mod machine;
mod measured;
mod nccl;
mod queues;
mod start;
mod sweep;

use machine::{HERE, Machine, compare};

/// Trains a fixture 3 steps on both, and compares. On devices, what is timed is launched one by one, and
/// gives the same bits as graphs.
fn same(model: &str, flags: &[&str], (devices, products): (&str, &str), tolerance: f64) {
    let name = format!("{model}{}", flags.concat().replace(['-', '=', ','], "_"));
    let Some(m) = Machine::new(&name) else { return };
    let model = format!("{HERE}/tests/fixtures/{model}");
    let compile = ["compile", &model, "--global-batch", "8", "--seq", "16", "-o", "plan"];
    m.ok(&[&compile, flags].concat(), &[]);
    let batch = format!("{model}/batch.safetensors");
    let run = ["run", "plan", "--weights", &model, "--batch", &batch, "--steps", "3"];
    let run = [&run[..], &["--format", "json"]].concat();
    m.ok(&[&run[..], &["--dump", "cpu"]].concat(), &[]);
    let on = [("STANDIN_DEVICES", devices)];
    let run = [&run[..], &["--device", "cuda", "--products", products]].concat();
    let said = m.ok(&[&run[..], &["--dump", "cuda"]].concat(), &on);
    assert_eq!(said.lines().count(), 3, "{said}");
    compare(&m.tensors("cpu"), &m.tensors("cuda"), tolerance);
    m.ok(&[&run[..], &["--dump", "timed", "--trace", "trace.json"]].concat(), &on);
    let bits = |file: &str| std::fs::read(m.dir.join(file)).expect("a dump");
    assert!(bits("cuda") == bits("timed"), "graphs give other bits");
}

#[test]
fn ranks_share_a_device() {
    same("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp", "--microbatch", "2"], ("1", "auto"), 1e-4);
}

#[test]
fn scores_with_a_softcap() {
    same("gemma2", &["--mesh", "cp=2", "--cp-mode", "ring"], ("1", "own"), 1e-4);
}

#[test]
fn ranks_of_a_pipeline_on_two_devices() {
    same(
        "llama_bias_tied",
        &["--mesh=pp=2,dp=2", "--zero=3", "--clip=0.5", "--microbatch=2", "--fuse=rows"],
        ("2", "cublaslt"),
        1e-4,
    );
}

/// The delta rule, with states that ranks of cp exchange.
#[test]
fn recurrences_on_a_device() {
    same("qwen3_next", &["--mesh", "cp=2"], ("1", "own"), 1e-4);
}

#[test]
fn experts_on_a_device() {
    same("mixtral", &["--mesh", "dp=2,ep=2"], ("1", "own"), 1e-4);
}

/// bf16 has 8 bits: a rounding that falls the other way is 2^-8 of a value, and passes some layers.
#[test]
fn elements_of_16_bits() {
    same("qwen3", &["--mesh=tp=2", "--dtype=bf16", "--fuse=rows"], ("1", "cublaslt"), 0.06);
    let f16 = ["--mesh=tp=2", "--dtype=f16", "--loss-scale=1024", "--fuse=rows"];
    same("qwen3", &f16, ("1", "cublaslt"), 0.02);
}

/// The least that runs: its plan has code for the architecture of the stand-in.
#[test]
fn code_of_a_plan() {
    let Some(m) = Machine::new("code").map(Machine::alone) else { return };
    let Some(libraries) = m.libraries.clone() else {
        println!("skipped: with a driver, nothing is missing");
        return;
    };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "2", "--seq", "8", "--mode", "infer", "-o", "plan"];
    let compile = [&["compile", &model][..], &flags].concat();
    let devices = ["--device", "cuda", "--arch", "sm_90a", "--format", "json"];
    let said = m.ok(&[&compile[..], &devices].concat(), &[]);
    assert!(said.contains("\"kernel_ms\":"), "{said}");
    let of = |dir: &str| {
        let files = std::fs::read_dir(m.dir.join(dir)).expect("a folder");
        let names = files.map(|f| f.expect("a file").file_name().to_string_lossy().into_owned());
        names.collect::<std::collections::BTreeSet<String>>()
    };
    let made = of("plan/kernels");
    assert!(made.len() > 3 && made.iter().all(|n| n.contains("-sm_90a-")), "{made:?}");
    // In the cache, the name has the compiler too.
    let cached = || {
        let plain =
            |n: &String| format!("{}.cubin", n.split_once("-nvrtc_13.0_").expect("a version").0);
        of("cache").iter().map(plain).collect::<std::collections::BTreeSet<String>>()
    };
    assert_eq!(cached(), made);
    std::fs::remove_dir_all(m.dir.join("cache")).expect("it is there");
    // Nothing is left to compile.
    let run = ["run", "plan", "--device", "cuda"];
    let only_driver = m.dir.join("driver");
    std::fs::create_dir_all(&only_driver).expect("a folder");
    std::fs::copy(libraries.join("libcuda.so.1"), only_driver.join("libcuda.so.1"))
        .expect("a copy");
    let driver = only_driver.display().to_string();
    // Without a compiler it runs, if whoever made it is trusted; else it is as if it were not there.
    let out = m.shardc(&run, &[("LD_LIBRARY_PATH", &driver)]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(
        said.contains("error[missing-library]: ") && said.contains("--trust-kernels"),
        "{said}"
    );
    m.ok(&[&run[..], &["--trust-kernels"]].concat(), &[("LD_LIBRARY_PATH", &driver)]);
    // Code of somebody else's under the names and hashes of the plan's own is not looked at.
    for file in std::fs::read_dir(m.dir.join("plan/kernels")).expect("a folder") {
        std::fs::write(file.expect("a file").path(), "planted").expect("written");
    }
    shardc::plan_dir::reseal(&m.dir.join("plan")).expect("a plan");
    let out = m.shardc(&[&run[..], &["--trust-kernels"]].concat(), &[]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("not an ELF file"));
    m.ok(&run, &[]);
    std::fs::remove_dir_all(m.dir.join("cache")).expect("it is there");
    // Without it there is, and it is kept.
    std::fs::remove_dir_all(m.dir.join("plan/kernels")).expect("it is there");
    m.ok(&run, &[]);
    assert_eq!(cached(), made);
    m.ok(&run, &[("LD_LIBRARY_PATH", &driver)]);
    std::fs::remove_dir_all(m.dir.join("cache")).expect("it is there");
    // What is missing is named, and it is not a bug of ours.
    let missing = |also: &[(&str, &str)], library: &str| {
        let out = m.shardc(&run, also);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(5), "{said}");
        assert!(said.contains(&format!("error[missing-library]: {library} is not here")), "{said}");
        assert!(said.contains("= help: "), "{said}");
    };
    missing(&[("LD_LIBRARY_PATH", &driver)], "libnvrtc.so.13");
    missing(&[("LD_LIBRARY_PATH", "")], "libcuda.so.1");
    m.ok(&run, &[]);
    let out = m
        .shardc(&[&run[..], &["--products", "cublaslt"]].concat(), &[("LD_LIBRARY_PATH", &driver)]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(said.contains("error[missing-library]: libcublasLt.so.13 is not here"), "{said}");
    m.ok(&[&run[..], &["--products", "auto"]].concat(), &[("LD_LIBRARY_PATH", &driver)]);
}

/// A kernel that the compiler refuses is shown with its lines and with what it does.
#[test]
fn a_refused_kernel_is_shown() {
    let Some(mut m) = Machine::new("refused").map(Machine::alone) else { return };
    let Some(made) = m.libraries.replace(m.dir.join("libraries")) else {
        println!("skipped: with a driver, no kernel is refused");
        return;
    };
    let libraries = m.dir.join("libraries");
    std::fs::create_dir_all(&libraries).expect("a folder");
    for name in ["libcuda.so.1", "libnvrtc.so.13", "emulate.h", "emulate.o"] {
        std::fs::copy(made.join(name), libraries.join(name)).expect("a copy");
    }
    // The stand-in no longer knows a word that only printed kernels use.
    let file = libraries.join("emulate.h");
    let text = std::fs::read_to_string(&file).expect("a text");
    std::fs::write(&file, text.replace("#define __syncwarp()", "#define gone()")).expect("a file");
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    m.ok(&["compile", &model, "--global-batch", "2", "--seq", "8", "-o", "plan"], &[]);
    let out = m.shardc(&["run", "plan", "--device", "cuda"], &[]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(said.contains("error[cuda-compile]: rows.cu does not compile for sm_90a"), "{said}");
    assert!(said.contains("--> rows.cu, line ") && said.contains(", in rows_"), "{said}");
    assert!(said.contains("    __syncwarp();\n"), "{said}");
    assert!(said.contains("= why: it does ") && said.contains(" in @"), "{said}");
}

/// What a device has saved goes on there to the same bits, and on the CPU to nearly the same numbers.
#[test]
fn checkpoints_of_a_device() {
    let Some(m) = Machine::new("checkpoints") else { return };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "4", "--seq", "8", "--mesh", "dp=2", "--zero", "1"];
    m.ok(&[&["compile", &model, "-o", "plan"][..], &flags].concat(), &[]);
    let run = |args: &[&str]| -> Vec<f64> {
        let said = m.ok(&[&["run", "plan", "--format", "json"][..], args].concat(), &[]);
        let line = |l: &str| serde_json::from_str::<serde_json::Value>(l).expect("JSON");
        said.lines().filter_map(|l| line(l)["loss"].as_f64()).collect()
    };
    let cuda = ["--device", "cuda"];
    let whole = run(&[&cuda[..], &["--steps", "3"]].concat());
    run(&[&cuda[..], &["--steps", "2", "--save", "saved", "--save-every", "2"]].concat());
    let resume = ["--resume", "saved", "--steps", "3"];
    assert_eq!(run(&[&cuda[..], &resume].concat()), whole[2..]);
    let there = run(&resume);
    assert_eq!(there.len(), 1);
    // Sums of f32 in another order.
    assert!((there[0] - whole[2]).abs() <= 1e-4 * whole[2], "{there:?} is not {whole:?}");
}
