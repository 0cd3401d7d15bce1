//! The program as it grows: ops are appended, and what made a value is looked up.

use super::graph::Node;
use super::lower::{Lower, clean};
use super::view::View;
use shardc_ir::attr::{AttrCx, Broadcast, RuleAttr};
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{RoleKind, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Gradient, Op, StopGradient};
use shardc_ir::rule::Rule;
use shardc_ir::types::Type;
use std::sync::Arc;

/// Whether an op is read back as it is written: of its numbers, none is NaN.
fn is_readable(mesh: &Mesh, op: &Op, ranks: Vec<usize>) -> bool {
    let mut text = String::new();
    op.write(mesh, &mut text);
    let (name, attrs) = text.split_once('[').map_or((&text[..], None), |x| (x.0, Some(x.1)));
    let attrs = attrs.map(|attrs| attrs.strip_suffix(']').unwrap_or(attrs));
    Op::read(name, attrs, AttrCx { mesh, ranks: &ranks }).is_ok()
}

impl Lower<'_> {
    /// Appends an op with one result in the scope of the last node.
    pub fn emit(
        &mut self,
        n: &Node,
        hint: &'static str,
        op: impl Into<Op>,
        ins: &[Value],
    ) -> Result<Value> {
        Ok(self.emit_n(n, &[hint], op, ins, None)?[0])
    }

    /// Appends an op, unless the layer has made the same of the same; `ty` is the type of its result, if it does not follow.
    pub fn emit_n(
        &mut self,
        n: &Node,
        hints: &[&'static str],
        op: impl Into<Op>,
        ins: &[Value],
        ty: Option<&Type>,
    ) -> Result<Vec<Value>> {
        let mut b = Builder::new(&self.mesh, &mut self.draft);
        b.enter(&clean(&n.scope));
        let declared: Vec<Option<&Type>> = ty.into_iter().map(Some).collect();
        let op = op.into();
        if !is_readable(b.mesh, &op, ins.iter().map(|&v| b.f.ty(v).rank()).collect()) {
            let what = format!("`{}` would have an attribute that is no number", op.mnemonic());
            return Err(self.refuse(n, &what));
        }
        let key = (format!("{op:?}"), ins.to_vec(), b.f.scope_info(b.scope).layer);
        if let Some(made) = self.made.get(&key).filter(|_| ty.is_none()) {
            return Ok(made.clone());
        }
        let made = b.try_push(op, ins, &declared, hints);
        let made = made.map_err(|e| self.refuse(n, &e.message).help(e.help.to_string()))?;
        let node = self.draft.nodes.len() as u32 - 1;
        self.makers.resize(self.draft.values.len(), None);
        for v in &made {
            self.makers[v] = Some(node);
            self.allowed(n, self.draft.ty(*v).sizes().to_vec())?;
        }
        self.made.insert(key, made.to_vec());
        Ok(made.to_vec())
    }

    /// The op that makes a value, and its operands.
    pub fn maker(&self, v: Value) -> Option<(&Op, &[Value])> {
        let n = &self.draft.nodes[(*self.makers.find(v)?)? as usize];
        Some((&n.op, &n.ins))
    }

    /// True if a gradient flows from a value to a parameter.
    pub fn is_trained(&mut self, v: Value) -> bool {
        let d = &self.draft;
        self.trained.resize(d.values.len(), false);
        for a in &d.args[self.looked.0..] {
            self.trained[a.value] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
        }
        for n in &d.nodes[self.looked.1..] {
            let flows =
                n.op.facts().gradient != Gradient::Stops && n.ins.iter().any(|x| self.trained[x]);
            for o in &n.outs {
                self.trained[o] = flows && d.ty(*o).dtype.is_float();
            }
        }
        self.looked = (d.args.len(), d.nodes.len());
        self.trained[v]
    }

    /// The same without a gradient.
    pub fn still(&mut self, n: &Node, x: View) -> Result<View> {
        match self.is_trained(x.value) {
            true => Ok(x.with(self.emit(n, "still", StopGradient {}, &[x.value])?)),
            false => Ok(x),
        }
    }

    pub fn rank(&self, v: Value) -> usize {
        self.draft.ty(v).rank()
    }

    /// A rule of these letters.
    pub fn rule(&self, n: &Node, text: &str, ins: &[Value]) -> Result<RuleAttr> {
        let ranks: Vec<usize> = ins.iter().map(|&v| self.rank(v)).collect();
        let r = Rule::parse(text, &ranks).map_err(|e| self.refuse(n, &e))?;
        Ok(RuleAttr(Arc::new(r)))
    }

    /// How operands of these letters are spread over a result of those.
    pub fn spread(&self, n: &Node, ins: &[&str], out: &str, values: &[Value]) -> Result<Broadcast> {
        if ins.iter().all(|l| *l == out) {
            return Ok(Broadcast::SAME);
        }
        let r = self.rule(n, &format!("{}->{out}", ins.join(",")), values)?;
        Ok(Broadcast(Some(r.0)))
    }
}
