//! A plan as a program of PyTorch: `program.py`, which people read, and `program.json`, by which
//! `shardc.torch` runs it.

mod body;
mod dims;
mod facts;
mod head;
mod layers;
mod layout;
mod names;
mod ops;
mod order;
mod peak;
mod seen;
mod write;

use super::{Export, File};
use body::Writer;
use ops::raised::Raised;
use order::Order;
use peak::peaks;
use seen::Seen;
use shardc_ir::diag::Result;
use shardc_ir::func::Role;
use shardc_ir::plan::{Plan, RankClass};
use std::collections::BTreeSet;
use write::Lines;

/// `program.py` and `program.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    let made = program(&e.s.plan, e.s.called(), &e.s.hash());
    if made.refused.is_empty() {
        e.notes.push(needs(e.s.plan.peak_bytes(), made.peak_bytes));
    }
    for what in made.refused {
        e.lack(true, what);
    }
    Ok(made.files)
}

/// A program, and what of the plan it lacks: it is none if it lacks anything.
pub struct Program {
    pub files: Vec<File>,
    pub refused: BTreeSet<String>,
    /// The most bytes that tensors of a rank take at a time.
    pub peak_bytes: usize,
}

/// What a rank needs, beside what the plan says.
fn needs(plan: usize, program: usize) -> String {
    let mb = |n: usize| format!("{:.1} MB", n as f64 / 1e6);
    format!(
        "a rank's tensors take at most {}, with what torch's calls take beside their results; in the plan {}",
        mb(program),
        mb(plan)
    )
}

/// The program of a plan, of a model that is called so.
pub fn program(plan: &Plan, called: &str, hash: &str) -> Program {
    let raised = Raised::of(plan);
    let (seen, peaks) = laid_out(plan, &raised);
    let mut w = Writer::new(plan);
    seen.iter().for_each(|s| w.function(s));
    let mut refused: BTreeSet<String> =
        std::mem::take(&mut w.refused).into_iter().map(|op| format!("the op {op}")).collect();
    refused.extend(facts::refused(plan));
    let files = vec![
        File::new("program.py", text(plan, &w, called, hash)),
        File::new("program.json", facts::json(plan, hash, &raised, &peaks)),
    ];
    Program { files, refused, peak_bytes: peaks.into_iter().max().unwrap_or(0) }
}

/// Over the plan's peak so many percent are free: a percent less than what docs/torch.md says, which what is not counted takes.
const FREE: usize = 4;

/// The lines of functions, and the peaks that they have. They stand in the first order whose peaks are near those of the plan; if
/// none is, in that of least.
fn laid_out<'a>(plan: &'a Plan, raised: &'a Raised) -> (Vec<Seen<'a>>, Vec<usize>) {
    let see = |handed: &BTreeSet<Role>, order: Order| -> Vec<Seen<'a>> {
        let all = plan.module.funcs.iter();
        all.map(|f| Seen::new(f, &plan.module.mesh, raised, handed, order)).collect()
    };
    let near = |(peak, c): (&usize, &RankClass)| peak * 100 <= c.memory.peak_bytes * (100 + FREE);
    let mut best: Option<(Vec<Seen>, Vec<usize>)> = None;
    for order in Order::ALL {
        let seen = see(&seen::handed(plan, &see(&BTreeSet::new(), order)), order);
        let peaks = peaks(plan, &seen);
        if peaks.iter().zip(&plan.classes).all(near) {
            return (seen, peaks);
        }
        let most = |peaks: &[usize]| peaks.iter().copied().max();
        if best.as_ref().is_none_or(|b| most(&peaks) < most(&b.1)) {
            best = Some((seen, peaks));
        }
    }
    best.expect("there are orders")
}

/// The text of `program.py`.
fn text(plan: &Plan, w: &Writer, called: &str, hash: &str) -> String {
    let mut out = head::text(plan, called, hash);
    let mut lines = Lines::default();
    w.layouts.lines().iter().for_each(|l| lines.code(0, l));
    out += &lines.text();
    for t in &w.texts {
        out += "\n\n";
        out += t;
    }
    out += "\n\nif __name__ == \"__main__\":\n    main(__file__)\n";
    out
}
