//! Python that asserts in a running program what an audit says of it.

use super::Audit;
use std::fmt::Write;

/// What is printed behind the rows.
const PROGRAM: &str = include_str!("check.py");

/// Axes among whose ranks states are shared out.
const DATA: [&str; 3] = ["dp", "cp", "edp"];

impl Audit {
    /// A program of at most 40 lines, with the classes of parameters that the model has.
    pub fn check(&self) -> String {
        let mut rows: Vec<[String; 4]> = vec![];
        let mut classes: Vec<&super::rules::Class> = self.job.table.class.iter().collect();
        // A norm may be part of a linear: it is looked for first.
        classes.sort_by_key(|c| !c.name.contains("norm"));
        for c in classes {
            let own = self
                .derived
                .params
                .iter()
                .filter(|p| self.job.table.class(&p.name) == Some(&c.name) && p.trained);
            for p in own {
                let [same, gradient] = self.same(p.sharded, &c.name);
                let called = match c.called.is_empty() {
                    true => numbered(&p.name),
                    false => c.called.clone(),
                };
                if !rows.iter().any(|r| r[0] == called) {
                    rows.push([called, self.axes(p.sharded, &c.name), same, gradient]);
                }
            }
        }
        let mut out =
            String::from("ROWS = [  # names, split over, the same over, gradients too over\n");
        // Several to a line: the whole is to be short.
        let each = rows.len().div_ceil(8).max(1);
        for some in rows.chunks(each) {
            let all: Vec<String> = some
                .iter()
                .map(|[n, s, o, g]| format!("(r{n:?}, {s:?}, {o:?}, {g:?})").replace("\\\\", "\\"))
                .collect();
            let _ = writeln!(out, "    {},", all.join(", "));
        }
        let sharded = if self.shards() { "True" } else { "False" };
        out + "]\nSHARDED = " + sharded + "\n" + PROGRAM
    }

    /// Groups that split a parameter, as the software names them.
    fn axes(&self, sharded: shardc_ir::mesh::AtomSet, class: &str) -> String {
        let names: &[&str] =
            if class.starts_with("expert") { &["ep", "etp"] } else { &["dp", "cp", "tp"] };
        let of =
            |n: &&&str| !self.derived.axis(n).is_empty() && self.derived.axis(n).meets(sharded);
        names.iter().filter(of).copied().collect::<Vec<_>>().join(" ")
    }

    /// Whether a rank has the sums of gradients of its own shard of the states alone.
    fn shards(&self) -> bool {
        self.job.states.zero > 0 && DATA.iter().any(|n| !self.derived.axis(n).is_empty())
    }

    /// Groups whose ranks hold the same of it, and the same gradient.
    fn same(&self, sharded: shardc_ir::mesh::AtomSet, class: &str) -> [String; 2] {
        let names: &[&str] =
            if class.starts_with("expert") { &["edp", "etp"] } else { &["dp", "cp", "tp"] };
        let of =
            |n: &&&str| !self.derived.axis(n).is_empty() && !self.derived.axis(n).meets(sharded);
        let all: Vec<&str> = names.iter().filter(of).copied().collect();
        let but = |data: bool| {
            let own = all.iter().copied().filter(|n| !(data && DATA.contains(n)));
            own.collect::<Vec<_>>().join(" ")
        };
        let zero = self.job.states.zero;
        [but(zero > 2), but(zero > 0)]
    }
}

/// A name as an expression that any layer matches.
fn numbered(name: &str) -> String {
    let word = |w: &str| if w.parse::<u32>().is_ok() { r"\d+".to_string() } else { w.to_string() };
    name.split('.').map(word).collect::<Vec<_>>().join(r"\.")
}
