//! Numbers of ranks and batches of a configuration, whatever software it is of.

use super::rules::Given;
use shardc_cost::layout::{Context, Layout, Recompute, Schedule};
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit, Options};

/// Ranks by axis, and the rows and tokens of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct JobSizes {
    pub pp: usize,
    pub dp: usize,
    pub cp: usize,
    pub tp: usize,
    pub ep: usize,
    pub etp: usize,
    pub sp: bool,
    pub micro: usize,
    pub global: usize,
    pub seq: usize,
}

impl JobSizes {
    /// Microbatches of a step.
    pub fn microbatches(&self) -> usize {
        self.global / (self.micro * self.dp)
    }

    /// As rules name them.
    pub fn given(&self) -> Given {
        let JobSizes { pp, dp, cp, tp, ep, etp, .. } = *self;
        let sizes = [
            ("tp", tp),
            ("pp", pp),
            ("cp", cp),
            ("dp", dp),
            ("ep", ep),
            ("etp", etp),
            ("edp", (tp * cp * dp / (ep * etp)).max(1)),
            ("tokens", self.micro * self.seq / cp),
            ("m", self.microbatches()),
        ];
        let mut given = Given::default();
        given.sizes.extend(sizes.map(|(name, n)| (name.to_string(), n as f64)));
        given.facts.extend(self.sp.then(|| "sp".to_string()));
        given
    }

    /// As options of a compilation, where `replicas` of dp have all of a model's shards.
    pub fn options(&self, replicas: usize, dtype: DType, cp: (CpMode, Option<CpSplit>)) -> Options {
        let axes = [
            ("pp", self.pp),
            ("dp_replicate", replicas),
            ("dp_shard", self.dp / replicas),
            ("cp", self.cp),
            ("tp", self.tp),
        ];
        Options {
            mesh: axes.into_iter().filter(|a| a.1 > 1).map(|(n, s)| (n.into(), s)).collect(),
            global_batch: self.global,
            microbatch: self.micro,
            seq: self.seq,
            dtype,
            sp: self.sp,
            ep: self.ep,
            etp: (self.ep > 1 || self.etp != self.tp).then_some(self.etp),
            cp_mode: cp.0,
            cp_split: cp.1.filter(|_| self.cp > 1),
            ..Options::default()
        }
    }

    /// As prices see it, with tokens in zigzag and nothing recomputed.
    pub fn priced(&self, shards: usize, zero: u8, context: Context) -> Layout {
        Layout {
            tp: self.tp,
            cp: self.cp,
            context,
            even: true,
            dp: self.dp,
            pp: self.pp,
            chunks: 1,
            ep: self.ep,
            etp: self.etp,
            shards,
            zero,
            sp: self.sp,
            recompute: Recompute::None,
            schedule: Schedule::OneFOneB,
            microbatch: self.micro,
            microbatches: self.microbatches(),
        }
    }
}
