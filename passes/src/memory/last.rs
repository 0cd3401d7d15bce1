//! What runs for the last microbatch of a stage: in whose place.

use shardc_ir::func::{Func, FuncKind, Module};
use shardc_ir::maps::HashMap;

/// By function: the one in whose place it runs for the last microbatch of a stage, or itself.
pub(super) fn plain(m: &Module) -> Vec<usize> {
    let is_last = |f: &Func| f.kind != f.kind.plain();
    let mut first: HashMap<(FuncKind, usize), usize> = HashMap::default();
    if m.funcs.iter().any(is_last) {
        let all = m.funcs.iter().enumerate().rev();
        first.extend(all.map(|(i, f)| ((f.kind, f.stage), i)));
    }
    let of = |(i, f): (usize, &Func)| match is_last(f) {
        true => first.get(&(f.kind.plain(), f.stage)).copied().unwrap_or(i),
        false => i,
    };
    m.funcs.iter().enumerate().map(of).collect()
}
