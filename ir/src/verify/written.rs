//! What is written over is a role that microbatches add to, or a value of the function's own, and is
//! read by nobody afterwards.

use super::problems::Problems;
use super::{Checker, Maker};
use crate::func::{Node, Role, Value};
use crate::phase::Phase;

const RULE: &str = "what `accumulate` adds to is written over: nothing reads it afterwards";
const HELP: &str = "read it above, or use `add`, which leaves it as it is";

impl Checker<'_> {
    /// Follows what is written over, and checks that a node reads nothing of it.
    pub(super) fn written(&mut self, n: &Node, p: &mut Problems) {
        if let Some(k) = n.ins.iter().position(|v| self.over[self.root[v]]) {
            p.push(self.layer(n), || {
                let m = format!("`{}` is read, but written over before", self.f.name(n.ins[k]));
                self.at_node("overwritten", n, &[k], m).rule(RULE).help(HELP)
            });
        }
        if let (true, [root], [out]) = (n.op.def().is_view(), &n.ins[..], &n.outs[..]) {
            self.root[out] = self.root[root];
        }
        if let (true, Some(&first)) = (n.op.accumulates(), n.ins.first()) {
            self.over[self.root[first]] = true;
            if let Some((code, m, help)) = self.no_accumulator(n, first) {
                p.push(self.layer(n), || self.at_node(code, n, &[0], m).rule(RULE).help(help));
            }
        }
    }

    /// Why a value cannot be written over here: a code, what it is and a way out.
    fn no_accumulator(&self, n: &Node, v: Value) -> Option<(&'static str, String, &'static str)> {
        let (name, root) = (self.f.name(v), self.root[v]);
        let is_root = |a: &&crate::func::Port| a.value == root;
        let role = || self.f.args.iter().find(is_root).and_then(|a| a.role.as_ref());
        let lasts = |r: &Role| !r.kind.is_summed();
        if n.ins[1..].iter().any(|v| self.root[v] == root) {
            return Some(("overwritten", format!("`{name}` is added to itself in place"), HELP));
        }
        if self.phase == Phase::Source {
            let m = format!("`{name}` is written over in a model");
            return Some(("phase", m, "use `add`: the compiler says what is added up in place"));
        }
        let lasting = (self.made[root] == Maker::Arg).then(role).flatten().filter(|r| lasts(r))?;
        Some(("overwritten", format!("`{name}` is written over, but {lasting} lasts"), HELP))
    }

    /// Checks that a result is not written over.
    pub(super) fn returned(&self, v: Value, p: &mut Problems) {
        if self.over[self.root[v]] {
            let m = format!("`{}` is returned, but written over before", self.f.name(v));
            p.push(None, || self.diag("overwritten", m).rule(RULE).help(HELP));
        }
    }
}
