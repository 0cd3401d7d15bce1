//! What runs for the last microbatch of a stage: in whose place.

use shardc_ir::func::{Func, Module};

/// By function: the one in whose place it runs for the last microbatch of a stage, or itself.
pub(super) fn plain(m: &Module) -> Vec<usize> {
    let is = |f: &Func, g: &Func| (g.kind, g.stage) == (f.kind.plain(), f.stage);
    let of = |f: &Func| m.funcs.iter().position(|g| f.kind != f.kind.plain() && is(f, g));
    m.funcs.iter().enumerate().map(|(i, f)| of(f).unwrap_or(i)).collect()
}
