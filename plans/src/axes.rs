//! Names of axes: those that no recipe splits anything over are refused where another name is meant.

use shardc_ir::diag::{Diag, Result};
use shardc_passes::options::Options;
use shardc_passes::warnings::meant;

/// Refuses an axis whose name is another's: of another program, or misspelt. No recipe would split anything over it.
///
/// # Errors
/// `mesh`.
pub fn misnamed(o: &Options) -> Result<()> {
    // Whoever says what an axis splits may call it as they like.
    let named = |axis: &str| o.shard.iter().any(|r| r.dims.iter().any(|d| names(d, axis)));
    let own = o.mesh.iter().filter(|(name, _)| !o.auto && !named(name));
    let found = own.filter_map(|(name, size)| Some((name, size, meant(name, *size)?)));
    match found.into_iter().next() {
        None => Ok(()),
        Some((name, size, own)) => {
            let what =
                format!("nothing is split over `{name}`: its {size} ranks would do the same work");
            Err(Diag::new("mesh", what)
                .at(format!("--mesh {name}={size}"))
                .rule("an axis has a name of shardc's, or --shard says what it splits")
                .help(format!("did you mean --mesh {own}?")))
        }
    }
}

/// True if a dim of `--shard` has an axis: `dp*tp`, `tp:(1)2?`.
fn names(dim: &str, axis: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    dim.split(|c| !word(c)).any(|w| w == axis)
}
