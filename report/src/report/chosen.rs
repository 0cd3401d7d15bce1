//! What a plan was compiled with, in a line, as every report says it.

use serde::Serialize;
use shardc_ir::plan::Mode;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::options::Options;
use shardc_plans::flags::spec::all;
use shardc_plans::flags::{context, optimizer};

/// The options without which no figure of a plan can be read.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Chosen {
    pub mode: Mode,
    pub dtype: &'static str,
    /// Of what trains: the element type of gradients, the optimizer, the ZeRO stage, what is recomputed, and the
    /// chunks of the loss.
    pub training: Option<Training>,
    pub sequence_parallel: bool,
    /// Of tensor parallelism: `1d`, `2d`, `2.5d` or `3d`.
    pub tensor_parallel: Option<String>,
    /// Of context parallelism: `ring, zigzag`.
    pub context_parallel: Option<String>,
    /// Ranks of a group over which experts, and their widths, are split.
    pub experts: Option<ExpertOptions>,
    /// Of pipelines.
    pub schedule: Option<String>,
    pub transport: &'static str,
    /// What each option says of itself.
    #[serde(skip)]
    said: Vec<String>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Training {
    pub grad_dtype: &'static str,
    pub optimizer: String,
    pub zero: u8,
    pub recompute: String,
    pub loss_chunks: LossChunks,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ExpertOptions {
    pub ep: usize,
    pub etp: usize,
}

impl Chosen {
    pub fn of(o: &Options) -> Chosen {
        let training = || Training {
            grad_dtype: o.grad_dtype.name(),
            optimizer: optimizer(o),
            zero: o.zero,
            recompute: o.recompute.to_string(),
            loss_chunks: o.loss_chunks,
        };
        Chosen {
            mode: o.mode,
            dtype: o.dtype.name(),
            training: (o.mode == Mode::Train).then(training),
            sequence_parallel: o.sp,
            tensor_parallel: (o.axis("tp") > 1).then(|| o.tp_mode.to_string()),
            context_parallel: (o.axis("cp") > 1).then(|| context(o)),
            experts: (o.ep > 1 || o.etp.is_some())
                .then(|| ExpertOptions { ep: o.ep, etp: o.etp() }),
            schedule: (o.axis("pp") > 1).then(|| o.schedule.name().to_string()),
            transport: o.transport.name(),
            said: said(o),
        }
    }

    /// `bf16, gradients f32; AdamW; ZeRO-1; sequence parallel; recompute elementwise; 1f1b; nccl`.
    pub fn words(&self) -> String {
        self.said.join("; ")
    }

    /// As a line of a report, with a word before it, or as many as it takes.
    pub fn line(&self) -> String {
        super::wrapped("with   ", &self.words())
    }
}

/// What options say of themselves, in their places.
fn said(o: &Options) -> Vec<String> {
    let mut all: Vec<(u8, String)> =
        all().filter_map(|s| s.said).filter_map(|(at, of)| Some((at, of(o)?))).collect();
    all.sort();
    all.into_iter().map(|x| x.1).collect()
}

#[cfg(test)]
mod tests {
    use super::super::WIDTH;
    use super::*;
    use shardc_passes::options::{CpMode, Optimizer, TpMode};

    #[test]
    fn a_line_says_what_was_chosen() {
        let mut o = Options::default();
        assert_eq!(
            Chosen::of(&o).words(),
            "f32, gradients f32; AdamW; recompute elementwise; transport threads"
        );
        o.mesh = vec![("pp".into(), 2), ("tp".into(), 2)];
        (o.zero, o.sp, o.optimizer) = (1, true, Optimizer::Sgd);
        o.loss_chunks = LossChunks::Of(4);
        let said = Chosen::of(&o).words();
        assert!(said.contains("recompute elementwise; loss chunks 4;"), "{said}");
        assert!(said.contains("SGD; ZeRO-1; sequence parallel; recompute"), "{said}");
        assert!(said.contains("; schedule 1f1b"), "{said}");
        assert!(Chosen::of(&o).line().lines().all(|l| l.len() <= WIDTH));
        o.mesh = vec![("cp".into(), 2), ("tp".into(), 4)];
        (o.tp_mode, o.cp_mode, o.ep, o.etp) = (TpMode::TwoD, CpMode::Ring, 2, Some(1));
        let said = Chosen::of(&o).words();
        let all = "; tensor parallel 2d; context parallel ring, zigzag; experts ep=2, etp=1; ";
        assert!(said.contains(all), "{said}");
        o.mode = Mode::Infer;
        let said = Chosen::of(&o).words();
        assert!(!said.contains("SGD") && !said.contains("recompute"), "{said}");
    }
}
