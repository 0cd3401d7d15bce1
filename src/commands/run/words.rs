//! What is said of a run before it begins.

use super::Start;
use super::feed::Feed;
use shardc_ir::func::{Fill, InputRow};
use shardc_plans::stored::Stored;

/// How labels are made of tokens alone, for a model that does not move labels.
pub(super) fn made_labels(row: &InputRow) -> String {
    let name = &row.name;
    format!(
        "`{name}` of position i is token i + 1: the data are tokens alone, and the model does not move labels"
    )
}

/// That a run which goes on keeps nothing of its steps.
pub(super) fn unsaved(start: &Start, saves: bool) -> Option<String> {
    let Start::Resumed(s, _) = start else { return None };
    let folder = s.dir().parent().filter(|_| !saves)?.display();
    Some(format!("nothing of this run is saved: --save {folder} --save-every N writes checkpoints"))
}

/// What of a run is random: its start, and its data, if it takes steps.
pub(super) fn random(
    stored: &Stored,
    start: &Start,
    (feed, steps): (&Feed, bool),
    table: &[InputRow],
) -> Vec<String> {
    let s = &stored.plan.settings;
    let mut out = vec![];
    if matches!(start, Start::Random { .. }) {
        out.push(format!(
            "starting from random weights, seed {} (--weights DIR starts from a checkpoint)",
            s.seed
        ));
    }
    if !steps {
        return out;
    }
    let unfed = feed.unfed(table);
    if !unfed.is_empty() {
        out.push(format!(
            "random numbers for {} (--data FILE.safetensors or --data NAME=FILE.npy gives columns)",
            unfed.join(", ")
        ));
    }
    if feed.is_random() && table.iter().any(InputRow::of_tokens) {
        // What the loss of a text is, nobody knows.
        let near = match stored.family == "ir" {
            false => {
                // What is scored may be classes, and not tokens.
                let labels = table.iter().find(|r| r.input.fill == Fill::Labels);
                let of = labels.map_or(s.vocab, |r| r.bound(s.vocab));
                format!(", and the loss stays near {:.2}", (of as f64).ln())
            }
            true => String::new(),
        };
        out.push(format!(
            "random tokens below {} (--data FILE trains on data): they have nothing to learn{near}",
            s.vocab,
        ));
    }
    out
}
