//! The groups of parameters that have update rules of their own, as reports show them.

use super::bytes;
use serde::Serialize;
use shardc_ir::diag::{Result, count};
use shardc_ir::plan::Mode;
use shardc_ir::source::Source;
use shardc_ir::text::parse_source;
use shardc_passes::globs::frozen;
use shardc_passes::optim::{groups, is_plain};
use shardc_passes::options::Options;
use shardc_plans::stored::Stored;
use shardc_process::terminal;

/// A group of parameters, and what they are updated by.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupReport {
    /// Globs over tensors of the checkpoint, as it was asked for.
    pub on: String,
    pub rule: String,
    pub parameters: usize,
    pub elements: usize,
    /// The learning rate, as a multiple of the run's.
    pub lr: f64,
    /// Weight decays of its parameters.
    pub decay: Vec<f64>,
    /// Of states, of all ranks together without copies.
    pub state_bytes: usize,
}

impl GroupReport {
    /// Rule, parameters, elements, rate, decay and states, in words.
    fn words(&self) -> [String; 6] {
        let decays: Vec<String> = self.decay.iter().map(f64::to_string).collect();
        let decays = if decays.is_empty() { "none".into() } else { decays.join(" or ") };
        [
            self.rule.clone(),
            count(self.parameters, "parameter", "parameters"),
            count(self.elements, "element", "elements"),
            format!("lr x {}", self.lr),
            format!("decay {decays}"),
            format!("states {}", bytes(self.state_bytes)),
        ]
    }
}

/// A row for each group that has parameters; none where one rule updates all parameters.
///
/// # Errors
/// Those of groups, which compiling has refused.
pub fn rows(source: &Source, o: &Options) -> Result<Vec<GroupReport>> {
    let model = source.module.funcs.first();
    let Some(f) = model.filter(|_| o.mode == Mode::Train && !is_plain(o)) else {
        return Ok(vec![]);
    };
    let still = frozen(&source.weights, o)?;
    let all = groups(f, &source.weights, &still, o)?;
    let mut out = vec![];
    for (k, g) in all.all.iter().enumerate() {
        let (mut parameters, mut elements, mut state_bytes) = (0, 0, 0);
        let mut decay: Vec<f64> = vec![];
        for a in &f.args {
            let name = a.role.as_ref().map_or("", |r| &*r.name);
            let Some(u) = all.of.get(name).filter(|u| u.group == k) else { continue };
            let sizes = f.ty(a.value).sizes();
            (parameters, elements) = (parameters + 1, elements + sizes.iter().product::<usize>());
            for state in u.kept(sizes.len())? {
                let of: usize = state.dims.iter().map(|&d| sizes[d]).product();
                state_bytes += of * state.dtype.bytes();
            }
            decay.extend(u.numbers_of("decay").first());
        }
        decay.sort_by(f64::total_cmp);
        decay.dedup();
        let (on, rule, lr) = (g.on.clone(), g.rule.clone(), g.lr);
        if parameters > 0 {
            out.push(GroupReport { on, rule, parameters, elements, lr, decay, state_bytes });
        }
    }
    Ok(out)
}

/// The rows of a stored plan, as a table with its heading; empty if there are none.
///
/// # Errors
/// Those of reading the model.
pub fn table(s: &Stored) -> Result<String> {
    let rows = rows(&parse_source(&s.source)?, &s.options)?;
    if rows.is_empty() {
        return Ok(String::new());
    }
    let mut t = terminal::table();
    for row in rows {
        let [rule, others @ ..] = row.words();
        let head = [format!("  {rule}"), row.on.clone()];
        t.add_row(head.into_iter().chain(others));
    }
    Ok(format!("update rules\n{t}\n"))
}

/// The rows as pairs of a name and what is said of it.
///
/// # Errors
/// Those of reading the model.
pub fn settings(s: &Stored) -> Result<Vec<(String, String)>> {
    let rows = rows(&parse_source(&s.source)?, &s.options)?;
    let one = |row: GroupReport| (format!("group {}", row.on), row.words().join(", "));
    Ok(rows.into_iter().map(one).collect())
}
