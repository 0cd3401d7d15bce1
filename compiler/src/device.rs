//! Code of a plan's kernels for CUDA devices: compiled when a plan is made, into its folder, or when
//! it is run.

use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, kept};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Program;
use shardc_ir::launch::{KernelSource, Launches};
use shardc_ir::plan::Plan;
use shardc_passes::threads;
use shardc_plans::plan_dir;
use shardc_runtime::cuda::{Code, Device, Devices};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The folder of a plan with code for devices.
pub const FOLDER: &str = "kernels";

/// All texts that ranks launch, and that of exchanges.
fn sources(all: &[Launches]) -> BTreeSet<Arc<KernelSource>> {
    let launched = all.iter().flatten().flatten().flatten().map(|l| l.source.clone());
    launched.chain([cuda::collective()]).collect()
}

/// Where a text is launched first: what its nodes do, for a message about its code.
fn purpose(plan: &Plan, all: &[Launches], source: &KernelSource, d: Diag) -> Diag {
    let place = d.place.clone().unwrap_or_default();
    // Of a text with several kernels, the one that the message is about.
    let named = |entry: &str| !place.contains(", in ") || place.contains(&format!(", in {entry}"));
    for (i, f) in plan.module.funcs.iter().enumerate() {
        let made = shardc_ir::group::launches(f);
        let own = all.iter().filter_map(|l| l.get(i)).find(|l| !l.is_empty());
        let of = |l: &[shardc_ir::launch::DeviceLaunch]| {
            l.iter().any(|l| *l.source == *source && named(&l.entry))
        };
        let Some(at) = own.and_then(|own| own.iter().position(|l| of(l))) else { continue };
        let nodes = &f.nodes[made[at].nodes.clone()];
        let mut ops: Vec<&str> = vec![];
        for n in nodes {
            if !ops.contains(&n.op.mnemonic()) {
                ops.push(n.op.mnemonic());
            }
        }
        let out = nodes.last().and_then(|n| n.outs.first());
        let name = out.map_or(String::new(), |v| format!(" {}", f.name(*v)));
        return d.why(format!("it does {} in @{}:{name}", ops.join(", "), f.name));
    }
    d
}

/// A text and an architecture.
pub type Key = (Arc<KernelSource>, String);

/// What ranks launch that run code for one architecture on devices of another.
///
/// # Errors
/// `cuda-limit` if these can launch something of it not at all.
fn launches(plan: &Plan, programs: &[Program], code: &str, device: &str) -> Result<Vec<Launches>> {
    let (made, limits) = (Limits::of(code), Limits::of(device));
    let all: Vec<Launches> = programs.iter().map(|p| cuda::program(p, &made)).collect();
    for l in all.iter().flatten().flatten().flatten() {
        limits.check(l).map_err(|d| purpose(plan, &all, &l.source, d))?;
    }
    Ok(all)
}

/// What ranks launch on devices of an architecture: what the plan's own code is for, if the devices run it and
/// can launch it, as there may be no compiler.
fn launched(
    plan: &Plan,
    programs: &[Program],
    device: &str,
    own: Option<&kept::Own>,
) -> Result<Vec<Launches>> {
    let archs = own.map(|own| own.archs(device)).unwrap_or_default();
    let of = |code: &String| launches(plan, programs, code, device).ok();
    archs.iter().find_map(of).map_or_else(|| launches(plan, programs, device, device), Ok)
}

/// Calls `one` for every text and architecture, on several threads.
fn each<T: Send>(
    plan: &Plan,
    all: &BTreeMap<String, Vec<Launches>>,
    one: impl Fn(&KernelSource, &str) -> Result<T> + Sync,
) -> Result<BTreeMap<Key, T>> {
    let of = |(arch, all): (&String, &Vec<Launches>)| {
        sources(all).into_iter().map(|s| (s, arch.clone())).collect::<Vec<Key>>()
    };
    let work: Vec<Key> = all.iter().flat_map(of).collect();
    let made = threads::all(&work, usize::MAX, |(source, arch)| {
        one(source, arch).map_err(|d| purpose(plan, &all[arch], source, d))
    });
    work.into_iter().zip(made).map(|(key, x)| Ok((key, x?))).collect()
}

/// What ranks launch on a device of an architecture, and its code; a plan may have some of its `own`.
///
/// # Errors
/// `missing-library`, `cuda-compile` and `cuda-limit`.
pub fn made_for(
    plan: &Plan,
    programs: &[Program],
    arch: &str,
    own: Option<&kept::Own>,
) -> Result<(Vec<Launches>, Code)> {
    let mut all = BTreeMap::from([(arch.to_string(), launched(plan, programs, arch, own)?)]);
    let made = each(plan, &all, |source, arch| kept::find(source, arch, own))?;
    let code = made.into_iter().map(|((source, _), code)| (source, code)).collect();
    Ok((all.remove(arch).unwrap_or_default(), code))
}

/// Of a compiler that is missing, and a plan whose own code is not trusted: what else can be done.
pub fn without(d: Diag, dir: Option<&Path>, trusted: Option<&Path>) -> Diag {
    let has_code = dir.is_some_and(|dir| dir.join(FOLDER).is_dir());
    if d.code != "missing-library" || !has_code || trusted.is_some() {
        return d;
    }
    d.help("or use the compiled kernels in the plan's folder with --trust-kernels, if you trust whoever made it")
}

/// The devices of this machine with the code of a plan's ranks, from rank `first` on, which take turns
/// on all devices or are on `one`; `trusted` is the plan's folder, if the code there may run, and `library`
/// says who multiplies matrices.
///
/// # Errors
/// `missing-library`, `cuda-driver`, `cuda-compile` and `cuda-limit`.
pub fn open(
    plan: &Plan,
    programs: &[Program],
    (first, one): (usize, Option<usize>),
    trusted: Option<&Path>,
    library: bool,
) -> Result<Arc<Devices>> {
    let count = Device::count()?.min(programs.len());
    let numbers = one.map_or(0..count, |d| d..d + 1);
    let devices: Vec<Arc<Device>> = numbers.map(Device::open).collect::<Result<_>>()?;
    let archs: Vec<String> = devices.iter().map(|d| d.arch()).collect::<Result<_>>()?;
    let own = trusted.map(plan_dir::device_code).transpose()?;
    // Ranks launch the same wherever they are: what the least of the devices can.
    let can = |a: &&String| (Limits::of(a).shared, Limits::of(a).groups);
    let least = archs.iter().min_by_key(can).map_or("", |a| a);
    let launches = launched(plan, programs, least, own.as_ref())?;
    let distinct = archs.iter().map(|a| (a.clone(), launches.clone())).collect();
    let made = each(plan, &distinct, |source, arch| kept::find(source, arch, own.as_ref()))?;
    let code = |arch: &String| -> Code {
        let own = made.iter().filter(|((_, a), _)| a == arch);
        own.map(|((source, _), code)| (source.clone(), code.clone())).collect()
    };
    let devices: Vec<(Arc<Device>, Code)> =
        devices.into_iter().zip(&archs).map(|(d, arch)| (d, code(arch))).collect();
    let ranks = (first..).zip(launches).collect();
    Ok(Arc::new(Devices::new(&devices, ranks, cuda::collective(), library)?))
}

/// Compiles the kernels of all ranks of a plan: code by text and architecture.
///
/// # Errors
/// `missing-library`, `cuda-compile` and `cuda-limit`.
pub fn compile(plan: &Plan, archs: &BTreeSet<String>) -> Result<BTreeMap<Key, Vec<u8>>> {
    let ranks = 0..plan.module.mesh.ranks();
    let programs: Vec<Program> =
        ranks.map(|r| shardc_codegen::program(plan, r)).collect::<Result<_>>()?;
    let of = |arch: &String| Ok((arch.clone(), launches(plan, &programs, arch, arch)?));
    let all = archs.iter().map(of).collect::<Result<_>>()?;
    each(plan, &all, |source, arch| kept::find(source, arch, None))
}

/// Writes compiled kernels into the folder of their plan.
///
/// # Errors
/// `cuda-compile` if it cannot be written.
pub fn write(made: &BTreeMap<Key, Vec<u8>>, dir: &Path) -> Result<()> {
    let folder = dir.join(FOLDER);
    made.iter().try_for_each(|((source, arch), code)| kept::put(source, arch, code, &folder))?;
    plan_dir::reseal(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_plans::flags::Flags;

    /// Code for sm_80 runs on sm_89, which has less shared memory: launches of wide heads are made for it.
    #[test]
    fn a_device_launches_what_it_can() {
        let dir = std::env::temp_dir().join(format!("shardc-launched-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let config = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 128,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        });
        let file = dir.join("config.json");
        std::fs::write(&file, config.to_string()).expect("a file");
        let flags = Flags::default().with("global-batch", 1).with("seq", 32).with("dtype", "bf16");
        let o = flags.options().expect("options");
        let plan = crate::compile(&file, &o, &mut |_, _| {}).expect("a plan").stored.plan;
        std::fs::remove_dir_all(&dir).expect("removed");
        let programs = [shardc_codegen::program(&plan, 0).expect("a program")];
        let most = |all: &[Launches]| {
            let shared = all.iter().flatten().flatten().flatten().map(|l| l.shared);
            shared.max().expect("launches")
        };
        let own = |arch: &str| kept::Own {
            hashes: BTreeMap::from([(format!("attention-{arch}-0.cubin"), String::new())]),
            ..kept::Own::default()
        };
        let made = |device: &str, arch: &str| {
            most(&launched(&plan, &programs, device, Some(&own(arch))).expect("launches"))
        };
        let limit = Limits::of("sm_89").shared;
        assert!(made("sm_80", "sm_80") > limit);
        assert!(made("sm_89", "sm_80") <= limit);
        // Hopper's own products take more than those that its plain code has.
        assert!(made("sm_90a", "sm_90a") >= made("sm_90a", "sm_90"));
    }
}
