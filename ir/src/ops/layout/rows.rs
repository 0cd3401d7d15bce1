//! Rows of experts: `all_to_all` of those that are there.

use super::*;

impl AllToAllV {
    fn dense(&self) -> AllToAll {
        AllToAll { axes: self.axes, from: self.from, to: self.to }
    }
    /// Says what is wrong with operands.
    pub(super) fn takes(&self, ins: &[&Type]) -> Result<(), String> {
        let ranks = [4, 3, 3];
        if ins.len() != 3 || ins.iter().zip(ranks).any(|(t, n)| t.rank() != n) {
            return Err(format!("three operands of {ranks:?} dims are needed"));
        }
        if ins[1..].iter().any(|t| t.dtype != DType::I32) {
            return Err("counts are i32 [g, e, z]".into());
        }
        if ![[0, 1], [1, 0]].contains(&[self.from, self.to]) {
            return Err("groups (dim 0) and shards (dim 1) are split for each other".into());
        }
        Ok(())
    }
}

/// Says what is wrong with counts of rows of this type.
fn fits(mesh: &Mesh, name: &str, counts: &Type, rows: &Type) -> Result<(), TypeError> {
    let split = counts.dims[0] == rows.dims[0] && counts.dims[2] == rows.dims[1];
    if split && counts.dims[1].atoms.is_empty() {
        return Ok(());
    }
    let [counts, rows] = [counts, rows].map(|t| crate::text::type_text(mesh, t));
    infer::err(
        "collective",
        format!("`{name}` is {counts}, which are not counts of rows {rows}"),
        "give counts [g, e, z] whose groups and shards are split as those of the rows are",
    )
}

/// Rows that the counts do not name are 0, as those that no slot names are in `dispatch`.
fn defined(mut rows: Tensor, counts: &Tensor) -> Tensor {
    let [groups, shards, all, width] = [0, 1, 2, 3].map(|d| rows.shape[d]);
    for (g, z) in (0..groups).flat_map(|g| (0..shards).map(move |z| (g, z))) {
        let named: f64 = (0..counts.shape[1]).map(|e| counts.at(&[g, e, z]).max(0.0)).sum();
        for c in (named as usize).min(all)..all {
            (0..width).for_each(|h| *rows.at_mut(&[g, z, c, h]) = 0.0);
        }
    }
    rows
}

impl LayoutOp for AllToAllV {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        self.dense().change(mesh, t, declared)
    }
    fn changed(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let out = self.dense().types(mesh, &ins[..1], declared)?;
        fits(mesh, "sent", ins[1], ins[0])?;
        fits(mesh, "received", ins[2], &out[0])?;
        if !ins[0].dims[2].atoms.is_empty() {
            return infer::err("collective", "rows are split".into(), "gather the rows first");
        }
        let partial = |t: &&&Type| !t.sum.union(t.max).union(t.min).union(t.varying).is_empty();
        if let Some(t) = ins[1..].iter().find(partial) {
            return infer::err(
                "collective",
                format!("counts are {}", crate::text::type_text(mesh, t)),
                "take their sum first",
            );
        }
        Ok(out)
    }
    fn letters(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("gzch,gez,gez->gzch", &[4, 3, 3])
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = AllToAllV { from: self.to, to: self.from, ..self.clone() };
        let back = |d| b.push_as("all_to_all_grad", op, &[d, ins[2], ins[1]], &like);
        smallvec::smallvec![d[0].map(back), None, None]
    }
    fn alone(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![defined(ins[0].clone(), ins[2])]
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let moved = self.dense().eval_group(cx, ins).into_iter().zip(ins);
        moved.map(|(mut x, ins)| vec![defined(x.remove(0), ins[2])]).collect()
    }
}
