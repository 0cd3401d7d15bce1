//! Lines beside those of plans: products in fp8, as the software of `--for` has them, and activations on the host. No
//! plan has either: both are priced by formula, and never are line 1.

use super::guess::ClosedForm;
use super::space::Candidate;
use super::{Asked, Compiled, memory};
use shardc_cost::collective::exposed;
use shardc_cost::device::Precision;
use shardc_cost::layer::Question;
use shardc_cost::layout::{Job, Layout, Recompute};
use shardc_cost::step::{Closed, Pieces, StageLoads};
use shardc_ir::diag::Result;
use shardc_passes::schedule::make;
use shardc_plans::flags::Target;

/// Lines that are looked at.
const LINES: usize = 3;

/// Bytes per second of a host's link in each direction: most of what PCIe 4.0 x16 has.
const HOST: f64 = 25e9;

/// The part of what is saved that may be on the host: the rest is being made or used.
const MOST_AWAY: f64 = 0.8;

/// What no plan does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extra {
    Fp8,
    /// So many bytes that backward needs are on the host.
    Offload(usize),
}

/// A line that is priced by formula.
pub struct Beyond {
    /// The line of which it is made, from 0.
    pub line: usize,
    pub candidate: Candidate,
    pub extra: Extra,
    pub seconds: f64,
    /// What a rank needs on its device.
    pub bytes: usize,
}

/// What is faster than the lines that it is made of, the fastest first.
///
/// # Errors
/// `device` if the device lacks products of an element type.
pub(super) fn beyond(asked: &Asked, form: &ClosedForm, fits: &[Compiled]) -> Result<Vec<Beyond>> {
    let mut out = vec![];
    if form.ifs.is_any() {
        return Ok(out);
    }
    for (line, c) in fits.iter().enumerate().take(LINES) {
        let more = [in_fp8(asked, form, c)?, offloaded(asked, form, c)?];
        let faster = |b: &Beyond| b.seconds < c.seconds;
        out.extend(more.into_iter().flatten().map(|b| Beyond { line, ..b }).filter(faster));
    }
    out.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(out)
}

/// A line with products in fp8, each part of it as much faster as in closed form. Weights are kept as they are.
fn in_fp8(asked: &Asked, form: &ClosedForm, c: &Compiled) -> Result<Option<Beyond>> {
    let knows = matches!(asked.target, Some(Target::Megatron | Target::Torchtitan));
    let has = asked.device.peak.contains_key(&Precision::Fp8);
    if !knows || !has || form.plain.precision != Precision::Bf16 {
        return Ok(None);
    }
    let candidate = c.guess.candidate;
    let parts = |precision| {
        let job = Job { precision, ..form.plain };
        let question = Question { job: &job, ..form.question(&asked.device, &candidate) };
        Ok(Closed { question, balanced: true }.price()?.parts)
    };
    let (wide, narrow) = (parts(Precision::Bf16)?, parts(Precision::Fp8)?);
    let ratio = narrow.with(wide, |x, y| if y > 0.0 { x / y } else { 1.0 });
    let seconds = c.parts.with(ratio, |x, by| x * by).total();
    let bytes = c.in_target.unwrap_or(c.peak);
    Ok(Some(Beyond { line: 0, candidate, extra: Extra::Fp8, seconds, bytes }))
}

/// A line that computes more than element-wise work again without that: what there is no room for goes to the host in
/// forward, and comes back in backward.
fn offloaded(asked: &Asked, form: &ClosedForm, c: &Compiled) -> Result<Option<Beyond>> {
    let own = c.guess.candidate;
    if own.layout.recompute == Recompute::None {
        return Ok(None);
    }
    let layout = Layout { recompute: Recompute::None, ..own.layout };
    let candidate = Candidate { layout, ..own };
    let closed = Closed { question: form.question(&asked.device, &candidate), balanced: true };
    let pieces = Pieces::of(&closed.question)?;
    let loads = closed.loads(&pieces);
    let parts = closed.parts(&closed.ranks(&pieces, &StageLoads::of(&loads)));
    let (named, p, v, m) = memory::order(&candidate);
    let Ok(schedule) = make(named, p, v, m) else { return Ok(None) };
    let kept = memory::kept(&schedule);
    // As much of the formulas as the line itself.
    let likely = form.memory().likely(&candidate, &loads, &kept);
    let bytes = likely * c.peak as f64 / c.guess.likely;
    let room = asked.room(c.beside) as f64;
    let of_layer = form.memory().kept(&candidate);
    let layers = |rank: usize| (loads[rank][0] + loads[rank][1]) as f64;
    let on_their_way = |rank: usize| kept[rank].iter().map(|k| k.0 + k.1).max().unwrap_or(0) as f64;
    let saved = |rank: usize| layers(rank) * of_layer * on_their_way(rank) / layout.chunks as f64;
    let most = (0..loads.len()).map(saved).fold(0.0, f64::max);
    let part = (bytes - room) / most;
    if !(part > 0.0 && part <= MOST_AWAY) {
        return Ok(None);
    }
    let longest = (0..loads.len()).map(layers).fold(0.0, f64::max);
    let moved = part * layout.microbatches as f64 * longest * of_layer / HOST;
    let work = parts.work();
    let seen = exposed(moved, work / 3.0) + exposed(moved, 2.0 * work / 3.0);
    let seconds = parts.total() * c.seconds / c.guess.seconds + seen;
    let extra = Extra::Offload((bytes - room) as usize);
    Ok(Some(Beyond { line: 0, candidate, extra, seconds, bytes: room as usize }))
}
