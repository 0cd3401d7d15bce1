//! Who computes what ranks do, and with what.

use super::Run;
use shardc_ir::diag::{Diag, Result};

/// Who multiplies matrices on a device.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Products {
    Own,
    Cublaslt,
    /// The library where it is installed.
    Auto,
}

impl Products {
    /// As it is given.
    pub fn word(self) -> &'static str {
        match self {
            Products::Own => "own",
            Products::Cublaslt => "cublaslt",
            Products::Auto => "auto",
        }
    }

    /// Whether NVIDIA's library is asked for products of a device: where it is installed, unless the user says
    /// otherwise.
    pub fn library(asked: Option<Products>) -> bool {
        match asked {
            Some(Products::Own) => false,
            Some(Products::Cublaslt) => true,
            Some(Products::Auto) | None => shardc_runtime::cuda::Products::are_here(),
        }
    }
}

/// Who computes what ranks do.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Engine {
    #[default]
    Shardc,
    /// PyTorch.
    Torch,
}

/// Where ranks run.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum On {
    #[default]
    Cpu,
    Cuda,
}

/// Which kernels run.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernels {
    Compiled,
    Interpreted,
    /// On a device ours alone, and no library's.
    Own,
}

/// Refuses kernels that are not for where ranks run.
pub(super) fn checked(how: &Run) -> Result<()> {
    let refused = |at: String, why: &str, help: &str| Err(Diag::new("flag", why).at(at).help(help));
    if let (On::Cpu, Some(p)) = (how.device, how.products.filter(|p| *p != Products::Own)) {
        let help = "add --device cuda, or leave --products out";
        return refused(
            format!("--products {}", p.word()),
            "on the CPU, products use shardc's own kernels",
            help,
        );
    }
    match (how.device, how.kernels, how.products) {
        (On::Cpu, ..) if how.memory_log => {
            let why = "on the CPU, the plan says what is taken";
            refused("--memory-log".into(), why, "add --device cuda, or leave --memory-log out")
        }
        (On::Cpu, Some(Kernels::Own), _) => {
            let why = "on the CPU, all kernels are shardc's own";
            refused("--kernels own".into(), why, "add --device cuda, or leave --kernels out")
        }
        (On::Cuda, Some(Kernels::Compiled | Kernels::Interpreted), _) => {
            let why = "on a device, kernels are compiled for it";
            refused("--kernels".into(), why, "say --kernels own, or leave --kernels out")
        }
        (On::Cuda, Some(Kernels::Own), Some(p)) if p != Products::Own => {
            let why = "with --kernels own, products use shardc's own kernels";
            refused(format!("--products {}", p.word()), why, "leave 1 of the 2 out")
        }
        _fits => Ok(()),
    }
}

/// Whether NVIDIA's library is asked for products of a run.
pub(super) fn library(how: &Run) -> bool {
    how.device == On::Cuda && how.kernels.is_none() && Products::library(how.products)
}

/// Which library multiplies, in words.
pub(super) fn multiplies(how: &Run) -> String {
    match library(how) {
        true => {
            let version = shardc_runtime::cuda::Products::version();
            format!("cuBLASLt {}", version.unwrap_or_else(|| "of no known version".into()))
        }
        false => "our own kernels".into(),
    }
}

/// Refuses what is for ranks of shardc's own.
pub(super) fn for_torch(how: &Run) -> Result<()> {
    let given = [
        ("--transport", how.transport.is_some(), "torch.distributed connects the ranks"),
        ("--device", how.device != On::Cpu, "PyTorch runs on the GPUs that it finds"),
        ("--products", how.products.is_some(), "products are PyTorch's"),
        ("--kernels", how.kernels.is_some(), "kernels are PyTorch's"),
        ("--trust-kernels", how.trust_kernels, "kernels are PyTorch's"),
        ("--memory-log", how.memory_log, "memory is PyTorch's"),
        ("--trace", how.trace.is_some(), "what PyTorch does is shown by torch.profiler"),
    ];
    match given.into_iter().find(|g| g.1) {
        None => Ok(()),
        Some((flag, _, why)) => Err(Diag::new("flag", format!("with --engine torch, {why}"))
            .at(flag)
            .help(format!("leave {flag} or --engine torch out"))),
    }
}
