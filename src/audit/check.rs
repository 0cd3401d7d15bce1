//! Python that asserts in a running program what an audit says of it.

use super::Audit;
use std::fmt::Write;

/// What is printed behind the rows.
const PROGRAM: &str = include_str!("check.py");

impl Audit {
    /// A program of at most 40 lines, with the classes of parameters that the model has.
    pub fn check(&self) -> String {
        let mut rows: Vec<(String, String, String)> = vec![];
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
                let same = self.same(p.sharded, &c.name);
                let called = match c.called.is_empty() {
                    true => numbered(&p.name),
                    false => c.called.clone(),
                };
                if !rows.iter().any(|r| r.0 == called) {
                    rows.push((called, self.axes(p.sharded, &c.name), same));
                }
            }
        }
        let mut out = String::from("ROWS = [  # names, split over, the same over\n");
        // Several to a line: the whole is to be short.
        let each = rows.len().div_ceil(10).max(1);
        for some in rows.chunks(each) {
            let all: Vec<String> = some
                .iter()
                .map(|(n, s, o)| format!("(r{n:?}, {s:?}, {o:?})").replace("\\\\", "\\"))
                .collect();
            let _ = writeln!(out, "    {},", all.join(", "));
        }
        out + "]\n" + PROGRAM
    }

    /// Groups that split a parameter, as the software names them.
    fn axes(&self, sharded: shardc_ir::mesh::AtomSet, class: &str) -> String {
        let names: &[&str] =
            if class.starts_with("expert") { &["ep", "etp"] } else { &["dp", "cp", "tp"] };
        let of =
            |n: &&&str| !self.derived.axis(n).is_empty() && self.derived.axis(n).meets(sharded);
        names.iter().filter(of).copied().collect::<Vec<_>>().join(" ")
    }

    /// Groups whose ranks hold the same of it.
    fn same(&self, sharded: shardc_ir::mesh::AtomSet, class: &str) -> String {
        let names: &[&str] =
            if class.starts_with("expert") { &["edp", "etp"] } else { &["dp", "cp", "tp"] };
        let of =
            |n: &&&str| !self.derived.axis(n).is_empty() && !self.derived.axis(n).meets(sharded);
        names.iter().filter(of).copied().collect::<Vec<_>>().join(" ")
    }
}

/// A name as an expression that any layer matches.
fn numbered(name: &str) -> String {
    let word = |w: &str| if w.parse::<u32>().is_ok() { r"\d+".to_string() } else { w.to_string() };
    name.split('.').map(word).collect::<Vec<_>>().join(r"\.")
}
