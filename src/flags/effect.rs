//! Flags that were given and change nothing, because of other flags or of what the model is.
//!
//! What the mesh alone decides, the passes say; here is what is known of flags, so that none is
//! silently ignored.

use super::Flags;
use shardc_frontends::{ExpertFacts, Facts};
use shardc_ir::diag::Diag;
use shardc_ir::func::Func;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::ops::Kind;
use shardc_ir::plan::{LrSchedule, Mode};
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, Optimizer, Options};

/// A flag, whether it was given, whether it changes nothing here, and why.
type Row<'a> = (&'a str, bool, bool, &'a str);

impl Flags {
    /// A warning for every flag that was given and changes nothing in this model.
    pub fn without_effect(&self, o: &Options, model: &Func, facts: Option<&Facts>) -> Vec<Diag> {
        let has = |kind: Kind| model.nodes.iter().any(|n| n.op.facts().kind == kind);
        let experts = has(Kind::Copies);
        let attention = has(Kind::Attention);
        let bound = self.moe_bound.filter(|_| experts).zip(facts.and_then(|f| f.experts));
        // All that a group of experts may get, against its share.
        let most = |x: &ExpertFacts| {
            let groups = o.ep.max(1);
            x.top_k.min(x.experts / groups) as f64 * groups as f64 / x.top_k as f64
        };
        let roomy = bound.is_some_and(|(by, x)| by >= most(&x));
        let axes = o.mesh.iter().filter(|a| a.1 > 1).count();
        let trains = o.mode == Mode::Train;
        let sgd = matches!(o.optimizer, Optimizer::Sgd);
        let constant = matches!(o.lr, LrSchedule::Constant { .. });
        let no_decay = o.weight_decay == 0.0;
        let one_stage = o.axis("pp") == 1;
        // On one stage these are one order; all backwards behind all forwards is another one.
        let in_turn = ["1f1b", "zb-h1", "zb-h2"];
        let in_turn = self.schedule.as_deref().is_some_and(|s| in_turn.contains(&s));
        let one_order = one_stage && self.chunks.is_none() && (in_turn || o.microbatches() == 1);
        let infer = "nothing is trained with --mode infer";
        let pp = "the mesh has no pp";
        let word = |given: &Option<String>, word| given.as_deref() == Some(word);
        let priced = o.auto || word(&self.schedule, "search") || word(&self.recompute, "fit");
        let scaled = [
            ("--initial-loss-scale", self.initial_loss_scale.is_some()),
            ("--min-loss-scale", self.min_loss_scale.is_some()),
            ("--loss-scale-window", self.loss_scale_window.is_some()),
            ("--hysteresis", self.hysteresis.is_some()),
        ];
        let trained: [(&str, bool); 17] = [
            ("--dropout", self.dropout.is_some()),
            ("--zero-accumulate", self.zero_accumulate.is_some()),
            ("--grad-dtype", self.grad_dtype.is_some()),
            ("--recompute", self.recompute.is_some()),
            ("--loss-chunks", self.loss_chunks.is_some()),
            ("--optimizer", self.optimizer.is_some()),
            ("--lr", self.lr.is_some()),
            ("--lr-schedule", self.lr_schedule.is_some()),
            ("--warmup", self.warmup.is_some()),
            ("--total-steps", self.total_steps.is_some()),
            ("--min-lr", self.min_lr.is_some()),
            ("--betas", self.betas.is_some()),
            ("--eps", self.eps.is_some()),
            ("--weight-decay", self.weight_decay.is_some()),
            ("--decay", self.decay.is_some()),
            ("--clip", self.clip.is_some()),
            ("--freeze", !self.freeze.is_empty()),
        ];
        let tokens = model.args.iter().any(|a| a.input().is_some_and(|i| i.seq.is_some()));
        let auto = self.shard.iter().any(|s| s == "auto");
        let rows: [Row; 18] = [
            ("--seq", self.seq.is_some(), !tokens, "the model takes no tokens"),
            ("--betas", self.betas.is_some(), trains && sgd, "they are AdamW's"),
            ("--eps", self.eps.is_some(), trains && sgd, "it is AdamW's"),
            ("--warmup", self.warmup.is_some(), trains && constant, CONSTANT),
            ("--total-steps", self.total_steps.is_some(), trains && constant, CONSTANT),
            ("--min-lr", self.min_lr.is_some(), trains && constant, CONSTANT),
            ("--decay", self.decay.is_some(), trains && no_decay, "--weight-decay is 0"),
            ("--schedule", self.schedule.is_some(), one_order, pp),
            ("--chunks", self.chunks.is_some_and(|n| n == 1), one_stage, pp),
            ("--layers", self.layers.is_some(), one_stage && self.chunks.is_none(), pp),
            ("--speeds", self.speeds.is_some(), one_stage, pp),
            ("--order", self.order.is_some(), axes < 2, "the mesh has fewer than 2 axes"),
            ("--shard auto", auto, axes == 0, "one rank has nothing to split"),
            ("--cp-mode", self.cp_mode.is_some(), ring_of_nothing(o, attention), NO_ATTENTION),
            ("--hardware", self.hardware.is_some(), !priced, "nothing is chosen by price"),
            ("--moe-bound", self.moe_bound.is_some(), !experts, NO_EXPERTS),
            ("--moe-bound", self.moe_bound.is_some(), roomy, ROOMY),
            ("--moe-capacity", self.moe_capacity.is_some(), !experts, NO_EXPERTS),
        ];
        let short = o.dtype == DType::F16 || model.values.iter().any(|v| v.ty.dtype == DType::F16);
        let constant = matches!(o.loss_scaling, LossScaling::Constant { .. });
        let scaling = scaled.into_iter().chain([("--loss-scale", self.loss_scale.is_some())]);
        let no_f16 = scaling.map(|(flag, given)| (flag, given, !short || !trains, NO_F16));
        let fixed = scaled.map(|(flag, given)| (flag, given, short && trains && constant, FIXED));
        let of_training = trained.map(|(flag, given)| (flag, given, !trains, infer));
        let silent =
            rows.into_iter().chain(of_training).chain(no_f16).chain(fixed).filter(|r| r.1 && r.2);
        let warn = |(flag, _, _, why): Row| {
            Diag::new("no-effect", format!("{flag} has no effect: {why}")).help("leave it out")
        };
        silent.map(warn).collect()
    }
}

const NO_F16: &str = "the loss is scaled only in training with --dtype f16";
const FIXED: &str = "--loss-scale stays as it is";
const CONSTANT: &str = "it belongs to --lr-schedule warmup-cosine";
const ROOMY: &str = "no group of experts ever gets more than that";
const NO_EXPERTS: &str = "the model has no experts";
const NO_ATTENTION: &str = "the model has no attention";

/// True if `--cp-mode` asks for something of attention, on a mesh with cp, and there is none.
fn ring_of_nothing(o: &Options, attention: bool) -> bool {
    !attention && o.cp_mode != CpMode::AllGather && o.axis("cp") > 1
}
