//! Options of passes that do not run, because a compilation begins behind them with `--from`.

use super::spec::keys;
use crate::flags::PRICES;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{Begin, names};
use std::collections::BTreeSet;
use toml::Table;

/// Refuses options that a pass before the first one would have to act on, and that the program was not made with: the
/// plan would say that it has them.
///
/// # Errors
/// `flag` for such an option.
pub fn begun(begin: &Begin, o: &Options) -> Result<()> {
    let Some(made) = &begin.made else { return shown(begin, o) };
    if made.mesh != o.mesh {
        // Another mesh is refused by itself, and other options follow from it.
        return Ok(());
    }
    let (auto, joins) = (made.auto, made.hardware.own != o.hardware.own);
    let [made, asked] = [made, o].map(|o| Table::try_from(o).expect("options are plain data"));
    let place = |name: &str| names().position(|n| n == name);
    let all: BTreeSet<&String> = made.keys().chain(asked.keys()).collect();
    let first = begin.pass.name;
    for name in all.into_iter().filter(|n| made.get(*n) != asked.get(*n)) {
        let Some(key) = keys().find(|k| k.name == name) else { continue };
        let priced = auto && key.pass.is_empty() && key.priced;
        let pass = match (priced, joins && key.name == PRICES) {
            (true, _) => "partition",
            // Fusion goes by how fast our products are there, and this by what fusion leads to.
            (_, true) => "early-sums",
            (_, false) => key.pass,
        };
        if place(pass).is_none_or(|at| Some(at) >= place(first)) {
            continue;
        }
        let flag = key.flags();
        let word = |v: Option<&toml::Value>| v.map_or("not set".into(), |v| v.to_string());
        let program = format!("in the program it is {}", word(made.get(name)));
        let what = format!("--from {first} starts behind `{pass}`: {flag} has no effect");
        return Err(Diag::new("flag", what)
            .at(flag)
            .rule("a program continues with the flags that it was compiled with")
            .why(format!("{program}, here {}", word(asked.get(name))))
            .help(match place(pass) < place("propagate") {
                true => "give the flags of the program, or compile the model".to_string(),
                false => {
                    format!("give the flags of the program, or start at `{pass}` or before it")
                }
            }));
    }
    Ok(())
}

/// Refuses what a program shows that it was not made with, where it is not known with what it was.
fn shown(begin: &Begin, o: &Options) -> Result<()> {
    let place = |name: &str| names().position(|n| n == name);
    let chunks = o.loss_chunks.number()?;
    let values = || begin.module.funcs.iter().flat_map(|f| &f.values);
    let chunked = values().any(|v| v.name.hint.ends_with("_chunk"));
    let half = values().any(|v| v.ty.dtype == o.dtype);
    let trains = o.mode == Mode::Train;
    let rows = [
        ("--loss-chunks", "chunk-loss", trains && chunks > 1 && !chunked),
        ("--dtype", "precision", o.dtype.is_half() && !half),
    ];
    let first = begin.pass.name;
    match rows.into_iter().find(|row| row.2 && place(row.1) < place(first)) {
        None => Ok(()),
        Some((flag, pass, _)) => {
            let what = format!("--from {first} starts behind `{pass}`: {flag} has no effect");
            Err(Diag::new("flag", what)
                .at(flag)
                .rule("a program continues with the flags that it was compiled with")
                .help(format!("leave {flag} out, or start at `{pass}` or before it")))
        }
    }
}

/// That nobody knows what a program was made with.
pub fn unknown(begin: &Begin) -> Option<Diag> {
    begin.made.is_none().then(|| {
        let first = begin.pass.name;
        let what = format!("nothing says with which flags the program of --from {first} was made");
        Diag::new("no-effect", what)
            .rule("flags of passes before the first one have no effect, but the plan says that it has them")
            .help("keep it beside the options.toml that --dump-all writes")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::spec::all;

    /// Each option is declared, and each place is a pass; each flag is declared once.
    #[test]
    fn every_option_has_its_pass() {
        let mut known: Vec<&str> = keys().map(|k| k.name).collect();
        let mut options = Options::NAMES.to_vec();
        known.sort_unstable();
        options.sort_unstable();
        assert_eq!(known, options);
        for k in keys().filter(|k| !k.pass.is_empty()) {
            assert!(names().any(|n| n == k.pass), "{}: no pass {}", k.name, k.pass);
        }
        let flags: BTreeSet<&str> = all().map(|s| s.flag).collect();
        assert_eq!(flags.len(), all().count());
    }
}
