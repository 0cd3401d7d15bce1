//! The loss of a step: of what was summed over microbatches, in `@optimizer_step` and `@evaluate`.

use crate::step::enter::{COUNTED, sums};
use crate::step::norm::wholes;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, FuncKind, Name, Port, Role, RoleKind, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::*;
use shardc_ir::types::Type;

/// Makes `@evaluate`, which ends an evaluation: the loss and nothing else. `None` if the loss is not
/// made by these functions.
pub fn evaluate(
    mesh: &Mesh,
    (rank, ranks): (usize, usize),
    loops: &[&Func],
    counts: bool,
) -> Option<Func> {
    let mut f = Func::of(FuncKind::Evaluate, rank, ranks);
    let sums = Sums::arguments(&mut f, loops, counts)?;
    let mut b = Builder::new(mesh, &mut f);
    b.enter("step");
    let wholes = wholes(&mut b, &parts(&sums));
    loss(&mut b, &sums, &wholes);
    Some(f)
}

/// What was summed over microbatches, as arguments.
pub(super) struct Sums {
    /// Over the labels of the batch, and one over their number, if the model has labels.
    counted: Option<(Value, Value)>,
    /// Losses of microbatches by name, and one over the number of microbatches.
    others: Vec<(String, Value)>,
    inv_microbatches: Option<Value>,
}

impl Sums {
    /// `None` if these functions make no loss.
    pub fn arguments(f: &mut Func, loops: &[&Func], counts: bool) -> Option<Sums> {
        let mut found = sums(loops);
        if found.is_empty() {
            return None;
        }
        let mut arg = |hint: String, ty: &Type, kind, name: &str| {
            let name_of = Name { grad: false, layer: None, hint: hint.into(), dup: 0 };
            f.arg(ty.clone(), name_of, Some(Role::new(kind, name)))
        };
        let (sum, step, scalar) = (RoleKind::Sum, RoleKind::Step, Type::f32(&[]));
        let counted = if counts { found.remove(COUNTED) } else { None };
        let counted = counted.map(|ty| {
            let loss = arg("loss_sum".into(), ty, sum, COUNTED);
            (loss, arg("inv_tokens".into(), &scalar, step, "inv_tokens"))
        });
        let others: Vec<(String, Value)> = found
            .iter()
            .map(|(name, ty)| (name.to_string(), arg(format!("{name}_sum"), ty, sum, name)))
            .collect();
        let inv_microbatches = (!others.is_empty())
            .then(|| arg("inv_microbatches".into(), &scalar, step, "inv_microbatches"));
        Some(Sums { counted, others, inv_microbatches })
    }
}

/// Shows a value of the step.
pub(super) fn show(b: &mut Builder, value: Value, kind: RoleKind, name: &str) {
    b.f.results.push(Port { value, role: Some(Role::new(kind, name)) });
}

/// What ranks have summed, by hint; the scalars are to be whole before they make a loss.
pub(super) fn parts(sums: &Sums) -> Vec<(&'static str, Value)> {
    let counted = sums.counted.iter().map(|c| c.0);
    counted.chain(sums.others.iter().map(|o| o.1)).map(|v| ("loss_sum", v)).collect()
}

/// Makes the loss of the step of its `parts` as a whole, and shows it.
pub(super) fn loss(b: &mut Builder, sums: &Sums, wholes: &[Value]) {
    let mut wholes = wholes.iter().copied();
    let mut whole = || wholes.next().expect("as many as parts");
    let mut loss = sums.counted.map(|(_, inv_tokens)| {
        let sum = whole();
        b.push("loss", Mul::same(), &[sum, inv_tokens])
    });
    for (name, _) in &sums.others {
        let inv = sums.inv_microbatches.expect("there is another sum");
        let mean = b.push("loss", Mul::same(), &[whole(), inv]);
        if name != COUNTED {
            show(b, mean, RoleKind::Mean, name);
        }
        loss = Some(match loss {
            Some(others) => b.push("loss", Add::same(), &[others, mean]),
            None => mean,
        });
    }
    show(b, loss.expect("there is a sum"), RoleKind::Metric, "loss");
}
