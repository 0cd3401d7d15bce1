//! What a text says of the batch: defaults of flags that are not given.

use super::Flags;
use crate::input::Brought;
use shardc_ir::diag::Result;
use shardc_ir::func::Module;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::source::Source;
use shardc_passes::options::{Options, Order, TpMode};
use shardc_passes::schedule::{Named, legal};
use shardc_passes::shard::auto::MOST_EXACT;
use std::path::Path;

impl Flags {
    /// The options for a model: a text says itself what batch it is for, and perhaps on which mesh; an archive
    /// may fix the batch, and a config its sequence, if that is shorter than ours. Where neither a text, nor words of an archive, nor a flag ask for a layout, layouts are
    /// chosen by price.
    ///
    /// # Errors
    /// Those of [`Flags::options`], and of reading the text or archive.
    pub fn options_for(&self, model: &Path) -> Result<Options> {
        let text = crate::input::text_source(model, &self.own_mesh()?)?;
        let own = match &text {
            Some(s) => Brought::of(&s.module),
            None => crate::input::brought(model)?,
        };
        let mut o = self.options_with(own.as_ref())?;
        // What is wrong with a config is said when it is compiled.
        if !self.has("seq")
            && own.is_none()
            && let Ok(facts) = shardc_frontends::facts(model)
        {
            o.seq = o.seq.min(facts.max_positions.max(1));
        }
        o.auto |= match (&text, crate::input::is_archive(model)) {
            (Some(s), _) => s.sequence.is_empty() && self.leaves_layouts(s, &o),
            // What cannot be imported is said when it is compiled.
            (None, true) if self.cuts(&o) => crate::input::read_model(model, &o)
                .is_ok_and(|m| self.leaves_layouts(&m.source, &o)),
            _no_text => false,
        };
        Ok(o)
    }

    /// Whether nobody asks for a layout: neither the text, by annotations or by what it marks, nor a flag; and the
    /// mesh is one over which prices can choose.
    fn leaves_layouts(&self, s: &Source, o: &Options) -> bool {
        let marks = s.weights.iter().any(|w| w.tp_dim.is_some());
        let asks = s.module.funcs.iter().any(|f| !f.annotations.is_empty());
        self.cuts(o) && !marks && !asks
    }

    /// Whether no flag asks for a layout, and prices can choose one on the mesh. Axes of data parallelism alone ask
    /// for that.
    fn cuts(&self, o: &Options) -> bool {
        let mut axes = o.mesh.iter().filter(|a| a.0 != PIPELINE);
        let flags = self.has("shard") || self.left_to_price(o).is_err();
        let open = axes.clone().any(|a| a.1 > 1 && !a.0.starts_with("dp_"));
        open && axes.by_ref().count() <= MOST_EXACT && !flags
    }

    /// What is said where layouts are chosen by price though no flag asks for that.
    pub fn unasked(&self, o: &Options) -> Option<String> {
        let asked = self.many("shard").iter().any(|s| s == "auto");
        let what = "the model asks for no layout, so they are chosen as with --shard auto";
        (o.auto && !asked).then(|| what.to_string())
    }

    /// The options for a program, of which it says itself what batch and mesh it is for.
    ///
    /// # Errors
    /// Those of [`Flags::options`].
    pub fn options_of(&self, m: &Module) -> Result<Options> {
        self.options_with(Brought::of(m).as_ref())
    }
}

/// Most microbatches that a default has.
const MANY: usize = 1 << 16;

/// Rows per rank of a microbatch if nobody says: all of them, or in a pipeline as many as leave at
/// least one microbatch for each of its ranks, as far as the batch, the schedule and a grid allow.
pub fn default_microbatch(o: &Options) -> usize {
    let (pp, ways) = (o.axis("pp"), o.data_parallel());
    let rows = o.global_batch.div_ceil(ways);
    if pp == 1 || o.global_batch % ways != 0 {
        return rows;
    }
    let side = o.tp_mode.side(o.axis("tp")).unwrap_or(1);
    let whole = if o.tp_mode == TpMode::OneD { 1 } else { o.tp_mode.rows(side) };
    let of_file = match &o.schedule {
        Order::Csv(text) => shardc_ir::schedule::parse_csv(text).ok().map(|s| s.microbatches),
        Order::Named(_) => None,
    };
    let named = match &o.schedule {
        Order::Named(name) => Named::parse(name).ok(),
        Order::Csv(_) => None,
    };
    let fits = |m: &usize| {
        let chunks = |n: Named| o.chunks.unwrap_or(n.default_chunks());
        rows % m == 0
            && (rows / m) % whole == 0
            && of_file.is_none_or(|n| n == *m)
            && named.is_none_or(|n| legal(n, pp, chunks(n), *m).is_ok())
    };
    let most = rows.min(MANY);
    let found = (pp..=most).find(fits).or_else(|| (1..pp.min(most + 1)).rev().find(fits));
    found.map_or(rows, |m| rows / m)
}

/// Sequences of a step if nobody says: as many for a text as for the folder that it may have been made of,
/// if its microbatches divide them.
pub(super) fn global_batch(text: Option<&Brought>) -> usize {
    const DEFAULT: usize = 8;
    match text.and_then(|t| t.rows).map(|r| r.max(1)) {
        Some(rows) if DEFAULT % rows != 0 => rows,
        _any => DEFAULT,
    }
}

/// Rows of a rank's microbatch where all ranks have so many, if they divide them.
pub(super) fn rows_of(rows: usize, o: &Options) -> usize {
    rows.max(1).div_ceil(o.data_parallel())
}
