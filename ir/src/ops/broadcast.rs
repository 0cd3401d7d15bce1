//! `broadcast`: one piece of S → R.

use super::*;

op! {
    /// Piece number `from` of a dim that the axes cut evenly, on all ranks of the axes: the dim of the
    /// result has the size of a piece. The rank that holds the piece gives it.
    Broadcast = "broadcast" (x) { axes: AtomSet, dim: usize, from: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// The place in the group of the rank that holds piece `number` of the split tensor; `extent` is a
/// rank's piece.
pub(crate) fn holder<'a>(
    cx: &[EvalCx<'a>],
    number: usize,
    extent: impl Fn(&EvalCx<'a>) -> Extent,
) -> usize {
    let holds = |c: &EvalCx<'a>| {
        let e = extent(c);
        e.offset == number * e.chunk
    };
    cx.iter().position(holds).expect("every piece has a holder")
}

impl OpDef for Broadcast {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        fan_out::one(ins)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn types(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        _: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let mut t = ins[0].clone();
        let ways = mesh.ways(self.axes);
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| d.atoms.set() == self.axes) else {
            return fan_out::wrong(mesh, self.axes, &format!("all that splits dim {}", self.dim));
        };
        if d.size % ways != 0 || self.from >= ways || d.size == 0 {
            return infer::err(
                "collective",
                format!("{} in {ways} equal pieces has no piece {}", d.size, self.from),
                format!("name piece 0 to {} of a multiple of {ways}", ways.max(1) - 1),
            );
        }
        *d = crate::types::Dim { size: d.size / ways, atoms: crate::types::AtomList::EMPTY };
        t.replicated = t.replicated.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = Reduce { axes: self.axes, dim: self.dim, to: self.from };
        let g = grads_of(d, |d| b.push_as("reduced", op, &[d], &like));
        if d[0].is_some() {
            b.note("mirror of a broadcast");
        }
        g
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
    fn collective(&self) -> Option<&dyn Collective> {
        Some(self)
    }
}

impl Collective for Broadcast {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "broadcast"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let root = holder(cx, self.from, |c| c.in_extent(0, self.dim));
        ins.iter().map(|_| vec![ins[root][0].clone()]).collect()
    }
    /// The mean over all pieces: in a ring everybody but the last sends the piece on.
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        (p - 1.0) / p * input.local_bytes(mesh) as f64
    }
}
