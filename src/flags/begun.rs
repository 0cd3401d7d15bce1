//! Options of passes that do not run, because a compilation begins behind them with `--from`.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{Pass, names};

/// Refuses options that a pass before the first one would have to act on, and of which the program shows
/// nothing: the plan would say that it has them.
///
/// # Errors
/// `flag` for such an option.
pub fn begun(first: &Pass, program: &Module, o: &Options) -> Result<()> {
    let place = |name: &str| names().position(|n| n == name);
    let chunks = o.loss_chunks.number()?;
    let values = || program.funcs.iter().flat_map(|f| &f.values);
    let chunked = || values().any(|v| v.name.hint.ends_with("_chunk"));
    let half = || values().any(|v| v.ty.dtype == o.dtype);
    let rows: [(String, &str, bool, &dyn Fn() -> bool); 2] = [
        (
            format!("--loss-chunks {chunks}"),
            "chunk-loss",
            o.mode == Mode::Train && chunks > 1,
            &chunked,
        ),
        (format!("--dtype {}", o.dtype.name()), "precision", o.dtype.is_half(), &half),
    ];
    for (flag, pass, asked, is_shown) in rows {
        if asked && place(pass) < place(first.name) && !is_shown() {
            let what =
                format!("--from {} starts behind `{pass}`: {flag} has no effect", first.name);
            return Err(Diag::new("flag", what)
                .at(flag.clone())
                .rule("a program continues with the flags that it was compiled with")
                .help(format!("leave {flag} out, or start at `{pass}` or before it")));
        }
    }
    Ok(())
}
