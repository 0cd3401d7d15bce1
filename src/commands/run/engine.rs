//! Who computes what ranks do, and with what.

use super::Run;
use shardc_ir::diag::{Diag, Result};

/// Who multiplies matrices on a device.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Products {
    #[default]
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

    /// Whether NVIDIA's library is asked for products.
    pub fn library(self) -> bool {
        match self {
            Products::Own => false,
            Products::Cublaslt => true,
            Products::Auto => shardc_runtime::cuda::Products::are_here(),
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

/// How kernels over rows run.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernels {
    Compiled,
    Interpreted,
}

/// Refuses what is for ranks of shardc's own.
pub(super) fn for_torch(how: &Run) -> Result<()> {
    let given = [
        ("--transport", how.transport.is_some(), "torch.distributed connects the ranks"),
        ("--device", how.device != On::Cpu, "PyTorch runs on the GPUs that it finds"),
        ("--products", how.products != Products::Own, "products are PyTorch's"),
        ("--kernels", how.kernels.is_some(), "kernels are PyTorch's"),
        ("--trust-kernels", how.trust_kernels, "kernels are PyTorch's"),
        ("--trace", how.trace.is_some(), "what PyTorch does is shown by torch.profiler"),
    ];
    match given.into_iter().find(|g| g.1) {
        None => Ok(()),
        Some((flag, _, why)) => Err(Diag::new("flag", format!("with --engine torch, {why}"))
            .at(flag)
            .help(format!("leave {flag} or --engine torch out"))),
    }
}
