//! What is said of ops that are not read: all of an archive's at once.

use super::fold;
use super::graph::{Arg, Id, Input, Node, Source};
use super::lower::{Lower, Val, checks};
use super::table;
use shardc_ir::diag::Diag;
use std::collections::BTreeSet;

impl Lower<'_> {
    pub(super) fn unknown(&self, n: &Node) -> Diag {
        let missing = n.ids().into_iter().find_map(|id| match self.val(id) {
            Val::Missing(m) => Some(m),
            _ => None,
        });
        if let Some(m) = missing {
            return self.lacks(n, m);
        }
        if let Some(buffer) = self.written(n) {
            // A module that keeps numbers from step to step is refused for what it does with them.
            let own = self.g.nodes.iter().filter(|o| o.scope == n.scope && !o.op.contains("_."));
            let unread = |o: &&Node| table::row(&o.op).is_none();
            if let Some(other) = own.into_iter().find(unread) {
                return self
                    .refuse(other, "shardc does not import this op")
                    .help(table::nearest(&other.op));
            }
            let what =
                format!("it writes into the buffer `{buffer}`, which no step of a plan does");
            return self.refuse(n, &what).help("export a model that changes no buffer");
        }
        let known = match self.is_known(n) {
            true => "shardc does not compute this op of numbers that are known",
            false => "shardc does not import this op",
        };
        let d = self.refuse(n, known).help(table::nearest(&n.op));
        match &self.unknown_too(n)[..] {
            [] => d,
            all => d.why(format!("nor are these ops of the archive: `{}`", all.join("`, `"))),
        }
    }

    /// Ops behind an unknown one that are not known either, of parameters and inputs: each once.
    fn unknown_too(&self, n: &Node) -> Vec<&str> {
        // What is done to labels needs no rows of the table.
        let known = |i: &Input| {
            matches!(i.source, Source::Constant(_)) || *self.g.names[i.id] == *self.labels.0
        };
        let mut data: BTreeSet<Id> =
            self.g.inputs.iter().filter(|i| !known(i)).map(|i| i.id).collect();
        let (mut all, mut behind): (Vec<&str>, _) = (vec![], false);
        for m in &self.g.nodes {
            let of_data = m.ids().iter().any(|id| data.contains(id)) && !fold::of_shape(&m.op);
            if of_data {
                data.extend(&m.outs);
            }
            let read = table::row(&m.op).is_some() || checks(m) || *m.op == *n.op;
            if behind && of_data && !read && !all.contains(&&*m.op) {
                all.push(&m.op);
            }
            behind |= m.outs == n.outs;
        }
        all.truncate(SHOWN);
        all
    }

    /// The buffer that an op in place writes into.
    pub(super) fn written(&self, n: &Node) -> Option<&str> {
        let Some((_, Arg::Value(id))) = n.args.first().filter(|_| n.op.contains("_.")) else {
            return None;
        };
        self.g.inputs.iter().find_map(|i| match &i.source {
            Source::Constant(name) if i.id == *id => Some(&**name),
            _other => None,
        })
    }
}

/// Most ops that one message names.
const SHOWN: usize = 16;
