//! Options of passes that do not run, because a compilation begins behind them with `--from`.

use super::flag_of;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{Begin, names};
use std::collections::BTreeSet;
use toml::Table;

/// Options by the first pass that acts on them, by their names in options.toml. On what is not here no pass acts, or
/// only the last ones, which always run.
const FIRST: [(&str, &[&str]); 11] = [
    ("experts", &["mode", "seq", "ep", "etp", "moe", "balance", "dropout", "documents"]),
    ("precision", &["dtype"]),
    ("stages", &["schedule", "chunks", "layers", "speeds"]),
    ("annotate", &["global_batch", "microbatch", "shard", "sp", "tp_mode", "cp_mode", "cp_split"]),
    ("partition", &["auto", "zero", "zero_accumulate", "observe", "freeze"]),
    ("differentiate", &["grad_dtype"]),
    ("chunk-loss", &["loss_chunks"]),
    ("summa", &["tp_steps"]),
    ("split", &["recompute", "reshard_after_forward"]),
    ("step", &["optimizer", "weight_decay", "decay", "clip"]),
    // It looks at what fusion leads to.
    ("early-sums", &["transport", "fuse"]),
];

/// What else layouts depend on that are chosen by price.
const PRICED: [&str; 2] = ["memory", "hardware"];

/// Options that the last passes, or none, act on; the mesh, which stands in a program; the budget, which follows
/// from the memory; and which flags were given.
#[cfg(test)]
const LAST: [&str; 7] = ["mesh", "node", "lr", "seed", "loss_scaling", "budget", "given"];

/// Options whose flags have other names.
const WORDS: [(&str, &str); 5] = [
    ("auto", "--shard auto"),
    ("ep", "ep in --mesh"),
    ("etp", "etp in --mesh"),
    ("moe", "--moe-bound or --moe-capacity"),
    ("balance", "--moe-aux, --moe-z-loss or --moe-bias-rate"),
];

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
    let auto = made.auto;
    let [made, asked] = [made, o].map(|o| Table::try_from(o).expect("options are plain data"));
    let place = |name: &str| names().position(|n| n == name);
    let all: BTreeSet<&String> = made.keys().chain(asked.keys()).collect();
    let first = begin.pass.name;
    for name in all.into_iter().filter(|n| made.get(*n) != asked.get(*n)) {
        let row = FIRST.iter().find(|row| row.1.contains(&name.as_str())).map(|row| row.0);
        let priced = (auto && PRICED.contains(&name.as_str())).then_some("partition");
        let Some(pass) = row.or(priced).filter(|pass| place(pass) < place(first)) else { continue };
        let word = WORDS.iter().find(|w| w.0 == name);
        let flag = word.map_or_else(|| flag_of(name), |w| w.1.to_string());
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
    use shardc_ir::documents::Documents;

    /// Each option has one place, and each place is a pass, in order.
    #[test]
    fn every_option_has_its_pass() {
        let rows = || FIRST.iter();
        let known = rows().flat_map(|r| r.1).chain(&LAST).chain(&PRICED);
        let mut known: Vec<&str> = known.copied().collect();
        known.sort_unstable();
        let all = Options {
            node: Some(1),
            clip: Some(1.0),
            budget: Some(1),
            documents: Some(Documents { end: 0, padding: None }),
            etp: Some(1),
            cp_split: Some(shardc_passes::options::CpSplit::Zigzag),
            chunks: Some(1),
            memory: Some(1),
            given: vec!["clip".into()],
            ..Options::default()
        };
        let mut options: Vec<String> =
            Table::try_from(&all).expect("plain").into_iter().map(|x| x.0).collect();
        options.sort_unstable();
        assert_eq!(known, options);
        let places: Vec<_> = rows().map(|r| names().position(|n| n == r.0).expect(r.0)).collect();
        assert!(places.is_sorted(), "{places:?}");
    }
}
