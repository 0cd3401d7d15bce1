//! `shardc plan --what-if` with what no plan has: priced by hand-computed bytes, and never executable.

use crate::lab::Lab;
use serde_json::{Value as Json, json};
use shardc_cost::device::Device;

const LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");

/// Parameters of Llama-3.1-8B: 32 layers of 4096 x (4096 + 2 * 1024 + 4096 + 3 * 14336) and two norms, a table, a
/// head, and the last norm.
const PARAMS: u64 =
    32 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096) + 2 * 128256 * 4096 + 4096;

fn plan(lab: &Lab, model: &str, args: &[&str]) -> Json {
    let base = ["plan", model, "--machine", "h100-sxm", "--format", "json"];
    serde_json::from_slice(&lab.ok(&[&base[..], args].concat()).stdout).expect("JSON")
}

/// The only line: bytes and seconds less than those of its plan.
fn less(found: &Json) -> (i64, f64) {
    let line = &found["plans"][0];
    let bytes = |v: &Json| v["peak_bytes"].as_i64().expect("bytes");
    let seconds = |v: &Json| v["step_s"].as_f64().expect("seconds");
    let plain = &line["as_compiled"];
    (bytes(plain) - bytes(line), seconds(plain) - seconds(line))
}

/// Of AdamW's 8 B per parameter in f32, 2 B are left in 8 bits and 4 B in bf16; all of it, with the master copy of 4 B,
/// is on the host with `offload`; weights in fp8 have 1 B in place of 2. A rank of 8 has an eighth of the state.
#[test]
fn bytes_are_those_by_hand() {
    let lab = Lab::new("what-if-bytes");
    let fixed = "tp=1,pp=1,cp=1,dp=8,zero=1,mb=1";
    let args = ["--gpus", "8", "--seq", "2048", "--fix", fixed, "--top", "1"];
    let of = |ifs: &str, more: &[&str]| {
        plan(&lab, LLAMA, &[&args[..], &["--what-if", ifs], more].concat())
    };
    let shard = (PARAMS / 8) as i64;
    let memory = Device::named("h100-sxm").expect("known").memory_speed();
    let cases = [
        ("optimizer=8bit", 6 * shard, 2.0 * 6.0 * shard as f64 / memory),
        ("optimizer=bf16", 4 * shard, 2.0 * 4.0 * shard as f64 / memory),
        ("offload=50", 12 * shard, -12.0 * shard as f64 / 50e9),
        ("offload", 12 * shard, -12.0 * shard as f64 / 25e9),
        (
            "offload=50,optimizer=8bit",
            12 * shard,
            2.0 * 6.0 * shard as f64 / memory - 6.0 * shard as f64 / 50e9,
        ),
    ];
    for (ifs, bytes, seconds) in cases {
        let found = of(ifs, &[]);
        let (saved, faster) = less(&found);
        assert_eq!(saved, bytes, "{ifs}");
        assert!((faster - seconds).abs() < 1e-9, "{ifs}: {faster} {seconds}");
        assert_eq!(found["plans"][0]["executable"], json!(false), "{ifs}");
        // The closed form has these, too: of what it says without, more or less by as much.
        let plain = of("domain=8", &[]);
        let closed = |f: &Json| f["plans"][0]["closed_form_s"].as_f64().expect("seconds");
        assert_eq!(closed(&found) < closed(&plain), seconds > 0.0, "{ifs}");
    }
    let found = of("weights=fp8", &[]);
    let (saved, faster) = less(&found);
    assert_eq!(saved, PARAMS as i64, "1 B of 2 of whole weights");
    let line = &found["plans"][0];
    // Products have twice the peak, and casts take some of that.
    let step = line["step_s"].as_f64().expect("seconds");
    assert!(faster > 0.0 && step > 0.5 * (step + faster), "{line}");
    // In f32 there is no master copy: 8 B per parameter are all of the state, and 2 B are left.
    let whole = ["--dtype", "f32", "--memory", "1TiB"];
    assert_eq!(less(&of("optimizer=8bit", &whole)).0, 6 * shard);
    assert_eq!(less(&of("offload", &whole)).0, 8 * shard);
    // Numbers of the machine are no plan's business.
    let other = of("nic=100", &[]);
    assert_eq!((&other["not_executable"], less(&other)), (&json!([]), (0, 0.0)));
    assert_eq!(other["plans"][0]["executable"], json!(true));
}

/// A layout that fits only if the state were elsewhere is found, and said to be not executable.
#[test]
fn what_fits_only_so_is_found_and_not_written() {
    let lab = Lab::new("what-if-fits");
    let m = &*lab.config("llama_gqa", json!({}));
    let args = ["--gpus", "2", "--global-batch", "4", "--seq", "16", "--fix", "dp=1", "--top", "1"];
    let gpus = [&["plan", m, "--machine", "h100-sxm"], &args[..]].concat();
    let peak = |found: &Json| found["plans"][0]["peak_bytes"].as_u64().expect("bytes");
    let words = |found: &Json| found["plans"][0]["layout"].as_str().expect("words").to_string();
    let all = [&args[..8], &["--top", "100", "--budget", "600"]].concat();
    let every = plan(&lab, m, &all);
    let least = every["plans"].as_array().expect("plans").iter().map(|p| p["peak_bytes"].as_u64());
    let bytes = least.flatten().min().expect("one fits") - 1;
    let less = format!("{bytes}B");
    lab.refuses(&[&gpus[..], &["--memory", &less]].concat(), 3, "no-layout");
    let ifs = ["--what-if", "offload=50,nic=100"];
    let found = plan(&lab, m, &[&args[..], &ifs, &["--memory", &less]].concat());
    assert!(peak(&found) <= bytes, "{}", words(&found));
    assert_eq!(found["not_executable"], json!(["offload=50"]));
    let said = lab.ok(&[&gpus[..], &ifs, &["--memory", &less]].concat());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("(not executable: offload=50)"), "{said}");
    assert!(said.contains("on h100-sxm with nic=100 GB/s"), "{said}");
    let more = ["--explain", "1", "--max", "microbatch"];
    let said = lab.ok(&[&gpus[..], &ifs, &["--memory", &less], &more].concat());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for words in [
        "largest microbatch of each line with offload=50 (not executable), by",
        "not executable: offload=50; the plan without it takes",
        "the plan without what is not executable:\nshardc compile ",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // The largest sequence is that of the changed bytes.
    let largest = |more: &[&str]| {
        let max = ["--max", "microbatch", "--memory", "400KiB"];
        let tp = ["--gpus", "2", "--global-batch", "64", "--seq", "16", "--fix", "tp=2,mb=1"];
        let found = plan(&lab, m, &[&tp[..], &["--top", "1"], &max, more].concat());
        let most = &found["plans"][0]["largest"];
        assert!(most["peak_bytes"].as_u64() <= Some(400 << 10), "{most}");
        most["value"].as_u64().expect("a number")
    };
    assert!(largest(&["--what-if", "offload"]) > largest(&[]));
    for bad in [
        "offload=0",
        "offload=fast",
        "offload=-1",
        "offload=inf",
        "optimizer",
        "optimizer=4bit",
        "weights=int4",
        "weights",
        "optimizer=8bit,optimizer=bf16",
        "offload,offload=25",
    ] {
        let said = lab.refuses(&[&gpus[..], &["--what-if", bad]].concat(), 2, "flag");
        assert!(said.contains("optimizer=8bit"), "{said}");
    }
    lab.refuses(&[&gpus[..], &ifs, &["-o", "best"]].concat(), 2, "flag");
    let fp8 = ["--what-if", "weights=fp8"];
    lab.refuses(&[&gpus[..], &fp8, &["--dtype", "f32"]].concat(), 2, "flag");
    let old = ["plan", m, "--machine", "a100-80"];
    lab.refuses(&[&old[..], &args[..], &fp8].concat(), 2, "device");
}
