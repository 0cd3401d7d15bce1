//! The groups of parameters that have update rules of their own, as a report shows them.

use super::bytes;
use crate::plan_dir::Stored;
use crate::terminal;
use shardc_ir::diag::{Result, count};
use shardc_ir::text::parse_source;
use shardc_passes::globs::frozen;
use shardc_passes::optim::groups;

/// A row for each group with its rule, parameters, elements, rate, decay and bytes of states on all
/// ranks together; empty where one rule updates all parameters.
///
/// # Errors
/// Those of reading the model.
pub fn table(s: &Stored) -> Result<String> {
    if s.options.optim.is_empty() {
        return Ok(String::new());
    }
    let source = parse_source(&s.source)?;
    let f = &source.module.funcs[0];
    let still = frozen(&source.weights, &s.options)?;
    let all = groups(f, &source.weights, &still, &s.options)?;
    let mut t = terminal::table();
    for (k, g) in all.all.iter().enumerate() {
        let (mut params, mut elements, mut kept) = (0, 0, 0);
        let mut decays: Vec<f64> = vec![];
        for a in &f.args {
            let name = a.role.as_ref().map_or("", |r| &*r.name);
            let Some(u) = all.of.get(name).filter(|u| u.group == k) else { continue };
            let sizes = f.ty(a.value).sizes();
            (params, elements) = (params + 1, elements + sizes.iter().product::<usize>());
            for state in u.kept(sizes.len())? {
                let of: usize = state.dims.iter().map(|&d| sizes[d]).product();
                kept += of * state.dtype.bytes();
            }
            decays.extend(u.numbers_of("decay").first());
        }
        decays.sort_by(f64::total_cmp);
        decays.dedup();
        let decays: Vec<String> = decays.iter().map(f64::to_string).collect();
        if params > 0 {
            t.add_row([
                format!("  {}", g.rule),
                g.on.clone(),
                count(params, "parameter", "parameters"),
                count(elements, "element", "elements"),
                format!("lr x {}", g.lr),
                format!("decay {}", decays.join(" or ")),
                format!("states {}", bytes(kept)),
            ]);
        }
    }
    Ok(format!("update rules\n{t}\n"))
}
