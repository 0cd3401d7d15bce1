//! Appends typed nodes to a function.

use crate::alike;
use crate::func::{Func, Hint, Name, Node, Scope, Typed, Value};
use crate::infer::TypeError;
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::types::Type;
use smallvec::SmallVec;
use std::borrow::Cow;

/// Writes nodes at the end of a function, in one scope at a time. Types follow from the ops' rules.
pub struct Builder<'a> {
    pub mesh: &'a Mesh,
    pub f: &'a mut Func,
    pub scope: Scope,
    /// New values are gradients: their names begin with `d_`.
    pub grad: bool,
    /// Values whose gradient somebody needs; empty means all.
    pub wanted: &'a [bool],
}

impl<'a> Builder<'a> {
    pub fn new(mesh: &'a Mesh, f: &'a mut Func) -> Builder<'a> {
        Builder { mesh, f, scope: Scope(0), grad: false, wanted: &[] }
    }

    /// Nodes from here on stand in this scope.
    pub fn enter(&mut self, path: &str) {
        self.scope = self.f.scope(path);
    }

    /// True if an op should compute the gradient of this operand.
    pub fn wants(&self, v: Value) -> bool {
        self.wanted.get(v.0 as usize).copied().unwrap_or(self.wanted.is_empty())
    }

    pub fn ty(&self, v: Value) -> &Type {
        self.f.ty(v)
    }

    /// Name for a value with this hint in the current scope.
    pub fn named(&self, hint: impl Into<Hint>) -> Name {
        let layer = self.f.scope_info(self.scope).layer;
        Name { grad: self.grad, layer, hint: hint.into(), dup: 0 }
    }

    /// Appends an op whose result types follow from its operands, or says why it cannot.
    pub fn try_push(
        &mut self,
        op: Op,
        ins: &[Value],
        declared: &[Option<&Type>],
        hints: &[&'static str],
    ) -> Result<SmallVec<[Value; 2]>, TypeError> {
        let outs = self.types(&op, ins, declared)?;
        let mut values = SmallVec::new();
        for (i, ty) in outs.into_iter().enumerate() {
            let hint = hints.get(i).copied().unwrap_or(op.mnemonic());
            let name = self.named(hint);
            values.push(self.f.value(ty, name));
        }
        self.f.nodes.push(Node::new(op, ins, &values, self.scope));
        Ok(values)
    }

    /// The types of an op's results. Where none is declared they follow from op and operands.
    fn types(
        &mut self,
        op: &Op,
        ins: &[Value],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let Func { typed, values, .. } = &mut *self.f;
        let ty = |v: &Value| &values[v].ty;
        let same = |x: &Typed| x.op == *op && x.ins.iter().eq(ins.iter().map(ty));
        let follow = declared.iter().all(Option::is_none);
        let key = alike::key(std::iter::once(op), ins.iter().map(ty));
        if follow && let Some(known) = typed.find(key, same) {
            return Ok(known.outs.clone());
        }
        let types: SmallVec<[&Type; 4]> = ins.iter().map(ty).collect();
        let outs = op.def().types(self.mesh, &types, declared)?;
        if follow {
            let ins = ins.iter().map(|v| ty(v).clone()).collect();
            typed.add(key, Typed { op: op.clone(), ins, outs: outs.clone() });
        }
        Ok(outs)
    }

    fn must(
        &mut self,
        op: Op,
        ins: &[Value],
        declared: &[Option<&Type>],
        hints: &[&'static str],
    ) -> SmallVec<[Value; 2]> {
        let text = op.mnemonic();
        self.try_push(op, ins, declared, hints).unwrap_or_else(|e| {
            let types: Vec<_> = ins
                .iter()
                .map(|&v| {
                    format!(
                        "{} : {}",
                        self.f.name(v),
                        crate::text::type_text(self.mesh, self.f.ty(v))
                    )
                })
                .collect();
            panic!("@{}: {text} of ({}): {}; {}", self.f.name, types.join(", "), e.message, e.help)
        })
    }

    /// Appends an op with one result.
    pub fn push(&mut self, hint: &'static str, op: impl Into<Op>, ins: &[Value]) -> Value {
        self.must(op.into(), ins, &[], &[hint])[0]
    }

    /// Appends an op with one result whose type has a choice (a new letter's split, I or R).
    pub fn push_as(
        &mut self,
        hint: &'static str,
        op: impl Into<Op>,
        ins: &[Value],
        ty: &Type,
    ) -> Value {
        self.must(op.into(), ins, &[Some(ty)], &[hint])[0]
    }

    /// Appends an op with several results.
    pub fn push_n(
        &mut self,
        hints: &[&'static str],
        op: impl Into<Op>,
        ins: &[Value],
    ) -> SmallVec<[Value; 2]> {
        self.must(op.into(), ins, &[], hints)
    }

    /// Sets the note of the last node.
    pub fn note(&mut self, note: impl Into<Cow<'static, str>>) {
        if let Some(n) = self.f.nodes.last_mut() {
            n.note = Some(note.into());
        }
    }
}
