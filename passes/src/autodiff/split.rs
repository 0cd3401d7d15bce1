//! Cuts the joint program into `forward` and `backward`, with explicit stashes between them.
//!
//! Before:  one function with F and B
//! After:   `@forward` with results `stash NAME`, `@backward` with arguments `stash NAME`; gradients
//!          and the loss are added to accumulators that live through all microbatches
//! Assumes: phase Ranked.  Leaves: phase Ranked.
//!
//! Every value that crosses from F to B is saved or recomputed, as [`super::recompute`] says.

use super::differentiate::Joint;
use super::recompute::{Recompute, recomputed};
use shardc_ir::func::{Func, Name, Node, Port, Role, RoleKind, Scope, Value};
use shardc_ir::ops::Add;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Cuts the joint program.
pub fn split(joint: Joint, policy: &Recompute) -> (Func, Func) {
    let Joint { func: j, backward_from } = joint;
    let makers = j.makers();
    let mut s = Split {
        j: &j,
        makers: &makers,
        backward_from,
        again: recomputed(&j, backward_from, policy),
        b: j.like("backward"),
        map: vec![None; j.values.len()],
        stash: vec![],
    };
    // Arguments of backward in the order of the joint program's, then stashes, then accumulators.
    let used = used(&j, backward_from);
    for a in j.args.iter().filter(|a| used[a.value.0 as usize]) {
        s.argument(a.value, a.role.clone());
    }
    let mut grads: BTreeMap<Value, Vec<Role>> = BTreeMap::new();
    for r in &j.results {
        if let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Grad) {
            grads.entry(r.value).or_default().push(role.clone());
        }
    }
    for n in &j.nodes[backward_from..] {
        let ins: SmallVec<[Value; 4]> = n.ins.iter().map(|&v| s.provide(v, n.scope)).collect();
        s.copy(n, ins, n.scope);
        for o in &n.outs {
            for role in grads.remove(o).unwrap_or_default() {
                let v = s.map[o.0 as usize].expect("just copied");
                accumulate(&mut s.b, v, role);
            }
        }
    }
    for (v, roles) in grads {
        let v = s.provide(v, Scope(0));
        roles.into_iter().for_each(|role| accumulate(&mut s.b, v, role));
    }
    let Split { mut stash, mut b, .. } = s;
    // By kind, and what belongs to no layer first, so that layers look alike.
    let order =
        |f: &Func, p: &Port| (p.role.as_ref().map(|r| r.kind), f.name(p.value).layer.is_some());
    stash.sort_by_key(|p| order(&j, p));
    let mut args = std::mem::take(&mut b.args);
    args.sort_by_key(|p| order(&b, p));
    b.args = args;
    drop_unused_args(&mut b);
    b.drop_dead();
    let mut f = j;
    f.name = "forward".into();
    f.nodes.truncate(backward_from);
    f.args.retain(|a| a.role.as_ref().is_none_or(|r| r.kind != RoleKind::Step));
    let results = std::mem::take(&mut f.results);
    for r in results {
        match r.role {
            Some(role) if role.kind == RoleKind::Grad => {}
            Some(role) if role.kind == RoleKind::Sum => accumulate(&mut f, r.value, role),
            role => f.results.push(Port { value: r.value, role }),
        }
    }
    f.results.extend(stash);
    f.drop_dead();
    (f, b)
}

/// Adds a value to the accumulator of its role: an argument that the result replaces.
pub(crate) fn accumulate(f: &mut Func, v: Value, role: Role) {
    let ty = f.ty(v).clone();
    let name = f.name(v).clone();
    let acc = f.arg(
        ty.clone(),
        Name { hint: format!("{}_acc", name.hint).into(), dup: 0, ..name.clone() },
        Some(role.clone()),
    );
    let sum = f.value(ty, Name { hint: format!("{}_total", name.hint).into(), dup: 0, ..name });
    let scope =
        f.nodes.iter().rev().find(|n| n.outs.contains(&v)).map(|n| n.scope).unwrap_or_default();
    f.nodes.push(Node {
        op: Add::same().into(),
        ins: SmallVec::from_slice(&[acc, v]),
        outs: SmallVec::from_slice(&[sum]),
        scope,
        note: None,
    });
    f.results.push(Port { value: sum, role: Some(role) });
}

fn drop_unused_args(f: &mut Func) {
    let used = used(f, 0);
    f.args.retain(|a| used[a.value.0 as usize]);
}

/// Which values are operands of nodes from `first` on.
fn used(f: &Func, first: usize) -> Vec<bool> {
    let mut used = vec![false; f.values.len()];
    f.nodes[first..].iter().flat_map(|n| &n.ins).for_each(|v| used[v.0 as usize] = true);
    used
}

struct Split<'a> {
    j: &'a Func,
    makers: &'a [Option<u32>],
    backward_from: usize,
    /// Per forward node: backward makes its results again.
    again: Vec<bool>,
    b: Func,
    map: Vec<Option<Value>>,
    stash: Vec<Port>,
}

impl Split<'_> {
    fn argument(&mut self, v: Value, role: Option<Role>) -> Value {
        let new = self.b.arg(self.j.ty(v).clone(), self.j.name(v).clone(), role);
        self.map[v.0 as usize] = Some(new);
        new
    }

    /// The value in backward: already there, recomputed, or saved by forward.
    /// What is recomputed stands in the scope of its first user.
    fn provide(&mut self, v: Value, scope: Scope) -> Value {
        if let Some(new) = self.map[v.0 as usize] {
            return new;
        }
        let Some(maker) = self.makers[v.0 as usize] else {
            let role = self.j.args.iter().find(|a| a.value == v).and_then(|a| a.role.clone());
            return self.argument(v, role);
        };
        assert!((maker as usize) < self.backward_from, "backward values are made in order");
        let n = &self.j.nodes[maker as usize];
        if self.again[maker as usize] {
            let ins = n.ins.iter().map(|&x| self.provide(x, scope)).collect();
            self.copy(n, ins, scope);
            return self.map[v.0 as usize].expect("just copied");
        }
        let role = Some(Role::new(RoleKind::Stash, &self.j.name(v).to_string()[1..]));
        self.stash.push(Port { value: v, role: role.clone() });
        self.argument(v, role)
    }

    fn copy(&mut self, n: &Node, ins: SmallVec<[Value; 4]>, scope: Scope) {
        let outs: SmallVec<[Value; 2]> = n
            .outs
            .iter()
            .map(|&o| {
                let new = self.b.value(self.j.ty(o).clone(), self.j.name(o).clone());
                self.map[o.0 as usize] = Some(new);
                new
            })
            .collect();
        self.b.nodes.push(Node { op: n.op.clone(), ins, outs, scope, note: n.note.clone() });
    }
}
