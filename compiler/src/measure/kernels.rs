//! Kernels of a plan on a CUDA device, each timed alone, as graphs launch it.

use super::samples::Sample;
use crate::device;
use shardc_codegen::kept;
use shardc_cost::device::Device;
use shardc_cost::plan::launch::{Pricer, Work};
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::group;
use shardc_ir::kernel::Kernel;
use shardc_ir::launch::{DeviceLaunch, Launches, Word};
use shardc_ir::plan::{Plan, calls};
use shardc_runtime::cuda::{self, Modules, Stream, Timed, Timer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A kernel of a plan that is like no other before it.
pub struct Distinct {
    pub kernel: Kernel,
    pub launches: Vec<DeviceLaunch>,
    /// What it does, and the sizes of a product.
    pub ops: String,
    /// Launches in a step.
    pub times: usize,
    /// Bytes of operands and results, each once.
    pub bytes: usize,
    /// Bytes of each of them.
    sizes: Vec<usize>,
    /// The function and the launch of the plan that has it first.
    at: (usize, usize),
}

impl Distinct {
    /// What it is to prices on a machine.
    pub fn work(&self, plan: &Plan, priced: &Device) -> Work {
        let f = &plan.module.funcs[self.at.0];
        let mut pricer = Pricer::new(&plan.module.mesh, priced, plan.settings.tokens);
        pricer.work(f, &group::launches(f)[self.at.1])
    }
}

/// The kernels of a plan's first rank on a device.
pub struct OnDevice {
    pub kernels: Vec<Distinct>,
    timer: Timer,
}

impl OnDevice {
    /// Makes them: `own` is code of the plan, and `library` says whether NVIDIA's library is asked for products, too.
    ///
    /// # Errors
    /// Those of compiling kernels and of the driver.
    pub fn open(
        plan: &Plan,
        on: &Arc<cuda::Device>,
        own: Option<&kept::Own>,
        library: bool,
    ) -> Result<OnDevice> {
        let program = shardc_codegen::program(plan, 0)?;
        let programs = std::slice::from_ref(&program);
        let (mut launches, code) = device::made_for(plan, programs, &on.arch()?, own)?;
        let kernels = distinct(plan, &program, &launches.swap_remove(0));
        let timer = Timer::new(&Stream::new(on)?, &Modules::new(on, &code)?, library)?;
        Ok(OnDevice { kernels, timer })
    }

    /// Seconds of a launch of a kernel, by the library if `library` and it can.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn seconds(&mut self, kernel: usize, library: bool) -> Result<f64> {
        let Distinct { kernel, launches, sizes, .. } = &self.kernels[kernel];
        self.timer.seconds(Timed { kernel, launches, sizes }, library)
    }

    /// Times all kernels of the plan but look-ups, and those that memory has no room for; products that the library
    /// can do by both. They are priced on a machine.
    ///
    /// # Errors
    /// As for [`OnDevice::seconds`].
    pub fn samples(&mut self, plan: &Plan, priced: &Device) -> Result<Vec<Sample>> {
        let mut out = vec![];
        let taken = |k: &Distinct| {
            // Operands of 16 bits have room for 32, and something lies beside.
            let fits = 3 * k.sizes.iter().sum::<usize>() as u64 <= priced.memory;
            // Numbers drawn at random look nothing up.
            fits && !matches!(k.kernel, Kernel::Take(_) | Kernel::IndexAdd { .. })
        };
        for i in 0..self.kernels.len() {
            if !taken(&self.kernels[i]) {
                continue;
            }
            let (work, times) = (self.kernels[i].work(plan, priced), self.kernels[i].times);
            let ways = if self.timer.in_library(&self.kernels[i].kernel) { 2 } else { 1 };
            for library in [false, true].into_iter().take(ways) {
                let seconds = self.seconds(i, library)?;
                out.push(Sample { library, ..Sample::of(work, seconds, times) });
            }
        }
        Ok(out)
    }
}

/// What a kernel touches of each operand, in bytes: its type's.
fn sizes(plan: &Plan, f: &Func, x: &group::Launch) -> Vec<usize> {
    let values = x.ins.iter().chain(&x.outs);
    values.map(|&v| f.ty(v).local_bytes(&plan.module.mesh)).collect()
}

/// True for what needs other ranks, or data that numbers drawn at random are not.
fn left_out(k: &Kernel) -> bool {
    matches!(
        k,
        Kernel::Collective(_)
            | Kernel::TopK(_)
            | Kernel::Route(_)
            | Kernel::Dispatch(_)
            | Kernel::Unpermute(_)
            | Kernel::CombineGatesGrad(_)
            | Kernel::Grouped(_)
    )
}

/// What the nodes of a launch do, and the sizes of its product.
fn ops(f: &Func, x: &group::Launch, k: &Kernel) -> String {
    let ops: Vec<&str> = f.nodes[x.nodes.clone()].iter().map(|n| n.op.mnemonic()).collect();
    let product = match k {
        Kernel::Gemm(k) => Some(k),
        Kernel::GemmThen(k) => Some(&k.product),
        _other => None,
    };
    ops.join(", ") + &product.map_or(String::new(), |k| format!(" {}x{}x{}", k.m, k.n, k.k))
}

/// All distinct kernels of the first rank's step.
fn distinct(plan: &Plan, program: &[Vec<Kernel>], launches: &Launches) -> Vec<Distinct> {
    let class = &plan.classes[plan.class_of(0)];
    let mut found: BTreeMap<String, Distinct> = BTreeMap::new();
    for (i, f) in plan.module.funcs.iter().enumerate().filter(|x| !program[x.0].is_empty()) {
        let times = calls(&class.step).filter(|c| c.func == i).count();
        for (j, x) in group::launches(f).iter().enumerate() {
            let (kernel, own) = (&program[i][j], &launches[i][j]);
            if own.is_empty() || left_out(kernel) || times == 0 {
                continue;
            }
            let words = |l: &DeviceLaunch| {
                let number = |w: &&Word| !matches!(w, Word::Address { .. });
                let numbers: Vec<&Word> = l.words.iter().filter(number).collect();
                format!("{} {:?} {} {numbers:?}", l.entry, l.grid, l.source.file)
            };
            let key = own.iter().map(words).collect::<String>();
            let entry = found.entry(key).or_insert_with(|| {
                let each: BTreeSet<_> = x.ins.iter().chain(&x.outs).collect();
                Distinct {
                    kernel: kernel.clone(),
                    launches: own.clone(),
                    ops: ops(f, x, kernel),
                    times: 0,
                    bytes: each.iter().map(|&&v| f.ty(v).local_bytes(&plan.module.mesh)).sum(),
                    sizes: sizes(plan, f, x),
                    at: (i, j),
                }
            });
            entry.times += times;
        }
    }
    found.into_values().collect()
}
