//! What people are told of prices.

use shardc_cost::device::{Device, Provenance};
use shardc_cost::plan::launch::Work;
use shardc_ir::diag::bytes;
use shardc_plans::again::model_of;
use shardc_plans::machine::{gradients, precision, sizes};
use shardc_plans::stored::Stored;

/// What the figures rest on.
pub fn trust(d: &Device) -> String {
    let from = match d.fit.gemm.from {
        Provenance::Measured => "measured",
        Provenance::Tables => "fitted on published runs of other software",
        Provenance::Prior => "a guess that nothing was compared with",
    };
    format!(
        "extrapolated: no run of a plan of this compiler was compared on {}; its share of the peak for products \
         ({:.2}) is {from}",
        d.name, d.fit.gemm.value
    )
}

/// Model FLOPs of a step over what all ranks could do in its time; none for a model that was a text.
pub fn utilisation(stored: &Stored, d: &Device, seconds: f64) -> Option<f64> {
    let facts = stored.facts.as_ref()?;
    let s = &stored.plan.settings;
    let sizes = sizes(facts, &stored.config);
    let source = model_of(stored).ok()?;
    let gradients = gradients(&source, &stored.options, &sizes).ok()?;
    let tokens = (s.global_batch * s.seq) as f64;
    let flops = sizes.step_flops_with(tokens, s.seq as f64, gradients);
    let peak = d.peak.get(&precision(&stored.options))?;
    Some(flops / (peak * stored.plan.module.mesh.ranks() as f64 * seconds))
}

/// A launch in words.
pub fn words(w: &Work) -> String {
    match w {
        Work::View => "view".into(),
        Work::Product { gemm: g, precision, .. } | Work::Grouped { gemm: g, precision } => {
            let times = if g.batch > 1.0 { format!("{} x ", g.batch) } else { String::new() };
            format!("product {times}m={} n={} k={:.0} {}", g.m, g.n, g.k, precision.name())
        }
        Work::Attention { sizes: a, backward, .. } => {
            let way = if *backward { "backward" } else { "forward" };
            format!(
                "attention {way} rows={} heads={} q={} k={} width={}",
                a.rows, a.heads, a.queries, a.keys, a.width
            )
        }
        Work::Rows { bytes: n } => format!("row-wise kernels, {}", bytes(*n as usize)),
        Work::Exchange { op, group, bytes: sent, .. } => {
            let (n, domains) = (group.size, group.domains());
            let places = if domains == 1.0 { "domain" } else { "domains" };
            format!("{op} over {n} ranks in {domains} {places}, {}", bytes(*sent as usize))
        }
    }
}
