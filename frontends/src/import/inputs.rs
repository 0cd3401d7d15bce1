//! What the inputs of an archive mean: the one place that knows the names of inputs.

use super::Sizes;
use super::graph::{Elem, Input};
use shardc_ir::diag::{Diag, Exit, Result};

/// Tokens i32 [rows, seq].
pub(super) const TOKENS: &str = "input_ids";
/// What each position is scored against, i32 [rows, seq]; negative where it is not.
pub(super) const TARGETS: &str = "targets";
/// The number of each token in its row, i32 [seq].
pub(super) const POSITIONS: &str = "positions";

/// The order of inputs in a program.
pub(super) const ORDER: [&str; 3] = [TOKENS, TARGETS, POSITIONS];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    Tokens,
    Labels,
    Positions,
}

const LABELS: [&str; 3] = ["labels", "targets", "target"];
const PLACES: [&str; 3] = ["position_ids", "positions", "pos"];

/// What an input is: by its name, and else the first one of whole numbers is the tokens. `seen` are those
/// before it.
///
/// # Errors
/// `import-input` for what no step can fill; `import-dims` for other sizes than those that were asked for.
pub(super) fn meaning(
    name: &str,
    i: &Input,
    shape: &[usize],
    sizes: Sizes,
    seen: &[Meaning],
) -> Result<Meaning> {
    let refuse = |what: String| {
        Err(Diag::new("import-input", format!("input `{name}`: {what}"))
            .rule("inputs are tokens, labels and positions: whole numbers [rows, tokens]")
            .help(
                "export with input_ids and labels alone: masks of padding and floats are not read",
            )
            .exit(Exit::Unsupported))
    };
    if i.elem != Elem::Int {
        return refuse("its elements are no whole numbers".into());
    }
    let is = |list: &[&str]| list.contains(&name);
    let m = match name {
        _ if is(&LABELS) => Meaning::Labels,
        _ if is(&PLACES) => Meaning::Positions,
        _ if name.contains("mask") => return refuse("masks of padding are not read".into()),
        _ if !seen.contains(&Meaning::Tokens) => Meaning::Tokens,
        _ if !seen.contains(&Meaning::Labels) => Meaning::Labels,
        _ => return refuse("it is one more than there are".into()),
    };
    if seen.contains(&m) {
        return refuse("another input is the same".into());
    }
    if m != Meaning::Positions && shape != [sizes.rows, sizes.seq] {
        let what = format!(
            "input `{name}` is {shape:?}, asked for are {} rows of {} tokens",
            sizes.rows, sizes.seq
        );
        return Err(Diag::new("import-dims", what)
            .rule("sizes that are fixed in an archive are those of the program")
            .help(match shape {
                [rows, seq] => format!("leave --seq and --microbatch out, or use --seq {seq}, and --microbatch so that all ranks of dp have {rows} rows"),
                _ => "export with inputs of 2 dims, [rows, tokens]".to_string(),
            }));
    }
    Ok(m)
}
