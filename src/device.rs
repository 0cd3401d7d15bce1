//! Code of a plan's kernels for CUDA devices: compiled when a plan is made, into its folder, or when
//! it is run.

use shardc_codegen::{cuda, kept};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Program;
use shardc_ir::launch::{Launches, Source};
use shardc_ir::plan::Plan;
use shardc_runtime::cuda::{Code, Device, Devices};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The folder of a plan with code for devices.
pub const FOLDER: &str = "kernels";

/// All texts that ranks launch, and that of exchanges.
fn sources(all: &[Launches]) -> BTreeSet<Arc<Source>> {
    let launched = all.iter().flatten().flatten().flatten().map(|l| l.source.clone());
    launched.chain([cuda::collective()]).collect()
}

/// Where a text is launched first: what its nodes do, for a message about its code.
fn purpose(plan: &Plan, all: &[Launches], source: &Source, d: Diag) -> Diag {
    let place = d.place.clone().unwrap_or_default();
    // Of a text with several kernels, the one that the message is about.
    let named = |entry: &str| !place.contains(", in ") || place.contains(&format!(", in {entry}"));
    for (i, f) in plan.module.funcs.iter().enumerate() {
        let made = shardc_ir::group::launches(f);
        let own = all.iter().filter_map(|l| l.get(i)).find(|l| !l.is_empty());
        let of = |l: &[shardc_ir::launch::Launch]| {
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
type Key = (Arc<Source>, String);

/// Calls `one` for every text and architecture, on several threads.
fn each<T: Send>(
    plan: &Plan,
    all: &[Launches],
    archs: &BTreeSet<String>,
    one: impl Fn(&Source, &str) -> Result<T> + Sync,
) -> Result<BTreeMap<Key, T>> {
    let sources = sources(all);
    let work: Vec<Key> =
        archs.iter().flat_map(|a| sources.iter().map(|s| (s.clone(), a.clone()))).collect();
    let (next, made) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let worker = || {
        while let Some((source, arch)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let x = one(source, arch).map_err(|d| purpose(plan, all, source, d));
            let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
            made.insert((source.clone(), arch.clone()), x);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|s| (0..cores.min(work.len())).for_each(|_| drop(s.spawn(worker))));
    let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    made.into_iter().map(|(key, x)| Ok((key, x?))).collect()
}

/// The devices of this machine with the code of a plan's ranks, from rank `first` on, which take turns
/// on all devices or are on `one`; `dir` is the plan's folder, if it has one, and `library` says who
/// multiplies matrices.
///
/// # Errors
/// `missing-library`, `cuda-driver` and `cuda-compile`.
pub fn open(
    plan: &Plan,
    programs: &[Program],
    (first, one): (usize, Option<usize>),
    dir: Option<&Path>,
    library: bool,
) -> Result<Arc<Devices>> {
    let count = Device::count()?.min(programs.len());
    let numbers = one.map_or(0..count, |d| d..d + 1);
    let devices: Vec<Arc<Device>> = numbers.map(Device::open).collect::<Result<_>>()?;
    let archs: Vec<String> = devices.iter().map(|d| d.arch()).collect::<Result<_>>()?;
    let launches: Vec<Launches> = programs.iter().map(cuda::program).collect();
    let folder = dir.map(|d| d.join(FOLDER));
    let distinct = archs.iter().cloned().collect();
    let made = each(plan, &launches, &distinct, |source, arch| {
        kept::find(source, arch, folder.as_deref())
    })?;
    let code = |arch: &String| -> Code {
        let own = made.iter().filter(|((_, a), _)| a == arch);
        own.map(|((source, _), code)| (source.clone(), code.clone())).collect()
    };
    let devices: Vec<(Arc<Device>, Code)> =
        devices.into_iter().zip(&archs).map(|(d, arch)| (d, code(arch))).collect();
    let ranks = (first..).zip(launches).collect();
    Ok(Arc::new(Devices::new(&devices, ranks, cuda::collective(), library)?))
}

/// Compiles the kernels of all ranks of a plan into its folder; how many texts for each
/// architecture.
///
/// # Errors
/// `missing-library` and `cuda-compile`.
pub fn compile(plan: &Plan, archs: &BTreeSet<String>, dir: &Path) -> Result<usize> {
    let mut launches: Vec<Launches> = vec![];
    for rank in 0..plan.module.mesh.ranks() {
        launches.push(cuda::program(&shardc_codegen::program(plan, rank)?));
    }
    let dir = dir.join(FOLDER);
    let made = each(plan, &launches, archs, |source, arch| kept::put(source, arch, &dir))?;
    Ok(made.len() / archs.len().max(1))
}
