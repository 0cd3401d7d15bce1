//! Software that plans are exported for: what it lacks stands with each option.

use super::Flags;
use super::spec::{self, OptionSpec};

/// Software that reads an export.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// Megatron-LM flags
    Megatron,
    /// A Python module that modifies a torchtitan config
    Torchtitan,
    /// A DeepSpeed JSON config
    Deepspeed,
    /// A nanotron YAML config
    Nanotron,
    /// Arguments of `DistributedConfig` in Hugging Face transformers
    HfTpPlan,
    /// DTensor placements of every parameter (PyTorch)
    Dtensor,
    /// MLCommons Chakra execution traces, one per rank
    Chakra,
    /// A Python program that trains on PyTorch's distributed runtime
    Torch,
}

impl Target {
    /// The name that `--to` has.
    pub fn name(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        value.map_or(String::new(), |v| v.get_name().to_string())
    }

    /// Flags, with what the target does itself whatever is asked in those that are not given.
    pub fn fill(self, f: Flags) -> Flags {
        let words = |s: &'static OptionSpec| s.fills.iter().map(|fill| (s.flag, *fill));
        let own = spec::all().flat_map(words).filter(|(_, fill)| fill.0 == self);
        f.over(own.fold(Flags::default(), |own, (flag, (_, word))| own.with(flag, word)))
    }

    /// What the software is called.
    pub fn software(self) -> &'static str {
        match self {
            Target::Megatron => "Megatron-LM",
            Target::Torchtitan => "torchtitan",
            Target::Deepspeed => "DeepSpeed",
            Target::Nanotron => "nanotron",
            Target::HfTpPlan => "transformers",
            Target::Dtensor | Target::Torch => "PyTorch",
            Target::Chakra => "Chakra",
        }
    }
}
