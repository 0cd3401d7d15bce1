//! `shardc measure --device cuda`: a GPU as a device file, from kernels of models that are compiled for it.
//!
//! Kernels run one by one. One device has no links: these are a known machine's.

use super::fit::{FitOptions, fit};
use super::kernels::OnDevice;
use super::{config, today};
use shardc_cost::device::{Device, Fit, Precision};
use shardc_cost::kernel::TILES;
use shardc_cost::plan::launch::Pricer;
use shardc_ir::diag::Result;
use shardc_ir::group::launches;
use shardc_ir::plan::{Plan, calls};
use shardc_ir::types::DType;
use shardc_passes::options::Options;
use shardc_runtime::cuda;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Models that are measured: as those of a processor, then sequences of a step and the element type. Each has more work
/// than the one before, by which is known how long it takes; heads have 16, 64 and 128 elements.
const MODELS: [([usize; 6], usize, DType); 7] = [
    ([64, 128, 4, 2, 256, 64], 1, DType::BF16),
    ([64, 128, 4, 2, 256, 64], 1, DType::F32),
    ([256, 704, 4, 2, 2048, 512], 4, DType::BF16),
    ([1024, 2816, 16, 8, 16384, 1024], 4, DType::BF16),
    ([1024, 2816, 16, 8, 16384, 1024], 4, DType::F32),
    ([2048, 5632, 16, 4, 32768, 2048], 4, DType::BF16),
    ([4096, 11264, 64, 16, 98304, 4096], 4, DType::BF16),
];

/// Longest step of a model that is measured, in seconds, as the one before lets expect it.
const LONGEST: f64 = 2.0;

/// Queries that a block of our attention takes.
const QUERIES: u32 = 64;

/// The first device of this machine, with products by NVIDIA's library if `library`; what one device cannot show is
/// that of `like`, or of the known machine whose name and memory are most like the device's.
///
/// # Errors
/// `missing-library`, `no-device`, and those of compiling and running.
pub fn of_device(
    like: Option<Device>,
    library: bool,
    say: &mut dyn FnMut(String),
) -> Result<Device> {
    let on = cuda::Device::open(0)?;
    let (title, memory) = (on.title()?, on.memory()? as u64);
    let base = like.or_else(|| alike(&title, memory));
    let mut device = blank(base.as_ref(), &title, memory, on.multiprocessors()? as u32);
    let (mut all, mut last) = (vec![], None);
    for (i, (model, batch, dtype)) in MODELS.into_iter().enumerate() {
        let (seq, microbatch) = (model[5], batch);
        let options = Options { dtype, seq, global_batch: batch, microbatch, ..Options::default() };
        let plan = crate::compile_config(&config(model), &options)?.stored.plan;
        let work = flops(&plan, &device);
        // The first two are small, and of the two types.
        let too_long = |(seconds, before): (f64, f64)| seconds * work / before > LONGEST;
        if i > 1 && last.is_some_and(too_long) {
            break;
        }
        let own = OnDevice::open(&plan, &on, None, library)?.samples(&plan, &device)?;
        let step = own.iter().filter(|s| !s.library).map(|s| s.seconds * s.calls as f64).sum();
        last = Some((step, work));
        let [hidden, ffn, heads, ..] = model;
        say(format!(
            "{}, {hidden} wide, mlp {ffn}, {heads} heads, {batch} x {seq} tokens: {} kernels",
            dtype.name(),
            own.len()
        ));
        all.extend(own);
    }
    fit(&mut device, &all, &how(library));
    if let Some(&peak) = device.peak.get(&Precision::Bf16) {
        device.peak.insert(Precision::F16, peak);
        let text = "that of bf16, which the same kernels multiply";
        device.source.insert("peak.f16".into(), text.into());
        if let Some(e) = &mut device.epilogue {
            e.gemm.extend(e.gemm.get(&Precision::Bf16).copied().map(|x| (Precision::F16, x)));
        }
    }
    Ok(device)
}

/// What is fitted to launches of a device: all tiles of GPUs together, or one of them for all products.
pub(super) fn how(library: bool) -> FitOptions {
    let one = |&[m, n, _]: &[f64; 3]| vec![[m, n, 1.0]];
    let tiles = [TILES.to_vec()].into_iter().chain(TILES.iter().map(one)).collect();
    let types = vec![Precision::Bf16, Precision::F32];
    FitOptions { ranks: 1, types, tiles, epilogues: Some(library) }
}

/// FLOPs of a step of the first rank.
fn flops(plan: &Plan, d: &Device) -> f64 {
    let mut pricer = Pricer::new(&plan.module.mesh, d, plan.settings.tokens);
    let mut of = |f: usize| {
        let f = &plan.module.funcs[f];
        let all = launches(f);
        all.iter().map(|x| Pricer::flops(&pricer.work(f, x))).sum::<f64>()
    };
    calls(&plan.classes[plan.class_of(0)].step).map(|c| of(c.func)).sum()
}

/// The known machine whose chip the device's name has, with most of its words, and whose memory is nearest. A name says
/// of a card that it is one, and which number it has.
fn alike(title: &str, memory: u64) -> Option<Device> {
    let title = title.to_lowercase();
    let words: Vec<&str> = title.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let said = |p: &&str| *p == "pcie" || p.len() == 4 && p.parse::<u32>().is_ok();
    let own = |d: &Device| {
        let mut parts = d.name.split('-');
        parts.next().is_some_and(|p| words.contains(&p))
            && parts.filter(said).all(|p| words.contains(&p))
    };
    let shared = |d: &Device| d.name.split('-').filter(|p| words.contains(p)).count();
    let all = Device::known().into_iter().filter(|d| d.is_gpu() && own(d));
    all.min_by_key(|d| (Reverse(shared(d)), d.memory.abs_diff(memory)))
}

/// Before anything is measured: what the driver says, what a known machine has between devices, and priors.
fn blank(base: Option<&Device>, title: &str, memory: u64, sms: u32) -> Device {
    let mut source: BTreeMap<String, String> = BTreeMap::new();
    let mut say = |name: &str, text: String| drop(source.insert(name.into(), text));
    say("sms", format!("the driver, {}", today()));
    say("memory", format!("the driver, {}", today()));
    say("chip", format!("the driver calls it {title}"));
    say("queries", "those of our kernel".into());
    let fit = Fit::default();
    let mut out = Device {
        name: "measured-cuda".into(),
        also: vec![],
        chip: title.to_string(),
        sms,
        hbm: 1.0,
        memory,
        domain: 1,
        link: 10e9,
        nic: 1.25e9,
        nics_per_domain: 1,
        power: None,
        full_power: None,
        tiles: None,
        short: None,
        queries: Some(QUERIES),
        weighing: None,
        backward: None,
        overlaps: true,
        peak: BTreeMap::new(),
        attention: [("flash2".to_string(), 0.3)].into_iter().collect(),
        epilogue: None,
        source: BTreeMap::new(),
        fit,
    };
    match base {
        None => ["domain", "link", "nic"].map(|name| {
            say(name, "a guess: one device has none, and no known machine is like it".into())
        }),
        Some(b) => {
            out.name = format!("measured-{}", b.name);
            out.chip = b.chip.clone();
            (out.domain, out.link) = (b.domain, b.link);
            (out.nic, out.nics_per_domain) = (b.nic, b.nics_per_domain);
            (out.hbm, out.peak) = (b.hbm, b.peak.clone());
            out.peak.retain(|p, _| *p == Precision::Bf16);
            (out.fit.link, out.fit.nic) = (b.fit.link, b.fit.nic);
            (out.fit.hop, out.fit.step) = (b.fit.hop, b.fit.step);
            for (name, of) in [("hbm", "hbm"), ("peak.bf16", "peak")] {
                let known = b.source.get(of).map_or("its file", |s| s);
                say(name, format!("of {}: {known}", b.name));
            }
            ["domain", "link", "nic"].map(|name| {
                let known = b.source.get(name).map_or("its file", |s| s);
                say(name, format!("not measured, as one device has none: of {}: {known}", b.name))
            })
        }
    };
    out.source = source;
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_like_the_machine_of_its_name_and_memory() {
        let of = |title: &str, gib: u64| alike(title, gib << 30).map(|d| d.name);
        assert_eq!(of("NVIDIA H100 80GB HBM3", 79).as_deref(), Some("h100-sxm"));
        assert_eq!(of("NVIDIA H200", 140).as_deref(), Some("h200"));
        assert_eq!(of("NVIDIA A100-SXM4-40GB", 39).as_deref(), Some("a100-40"));
        assert_eq!(of("Tesla V100-SXM2-32GB", 32).as_deref(), Some("v100-32"));
        assert_eq!(of("NVIDIA H100 PCIe", 79).as_deref(), Some("h100-pcie"));
        assert_eq!(of("NVIDIA L40S", 44).as_deref(), Some("l40s"));
        assert_eq!(of("NVIDIA GeForce RTX 4090", 24).as_deref(), Some("rtx-4090"));
        assert_eq!(of("NVIDIA GeForce RTX 4080", 16), None);
        assert_eq!(of("NVIDIA RTX 6000 Ada Generation", 48), None);
    }

    /// What no device shows comes from the machine that it is like, and the file says so.
    #[test]
    fn links_are_those_of_a_known_machine() {
        let base = Device::named("h100-sxm").expect("known");
        let d = blank(Some(&base), "NVIDIA H100", 80 << 30, 132);
        assert_eq!((d.link, d.nic, d.domain), (base.link, base.nic, base.domain));
        assert!(d.source["link"].contains("not measured") && d.source["link"].contains("h100-sxm"));
        let d = blank(None, "NVIDIA X", 80 << 30, 132);
        assert!(d.source["link"].contains("a guess"));
        assert_eq!(d.domain, 1);
    }
}
