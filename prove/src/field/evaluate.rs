//! A function of one rank at work over the field, by which both sides of a law can be executed.

use super::ranks::{Pieces, Ranks};
use super::tensor::Tensor;
use shardc_ir::func::Module;
use shardc_ir::types::Type;

/// What the first function of a module of one rank makes of its arguments, by result. Numbers are elements of the
/// field, integers 64 bits of two's complement; both in the order of a dense tensor.
///
/// # Errors
/// Names what has no meaning over a field, and arguments that are missing or have other sizes.
pub fn evaluate(m: &Module, args: &[Vec<u64>]) -> Result<Vec<Vec<u64>>, String> {
    let f = m.funcs.first().ok_or("a module without a function")?;
    let ranks = Ranks::new(&m.mesh);
    if ranks.count() != 1 || args.len() != f.args.len() {
        return Err("one rank with all arguments is evaluated".into());
    }
    let mut values: Vec<Option<Pieces>> = vec![None; f.values.len()];
    for (port, data) in f.args.iter().zip(args) {
        let shape = f.ty(port.value).sizes().to_vec();
        if shape.iter().product::<usize>() != data.len() {
            return Err(format!("{} numbers are no tensor {shape:?}", data.len()));
        }
        values[port.value.0 as usize] = Some(vec![Tensor { shape, data: data.clone() }]);
    }
    let missing = "an operand that nothing makes";
    for n in &f.nodes {
        let x: Option<Vec<&Pieces>> = n.ins.iter().map(|v| values[v.0 as usize].as_ref()).collect();
        let types = [&n.ins[..], &n.outs[..]].map(|all| all.iter().map(|&v| f.ty(v)).collect());
        let [of, to]: [Vec<&Type>; 2] = types;
        let made = ranks.node(&n.op, [&of, &to], &x.ok_or(missing)?)?;
        n.outs.iter().zip(made).for_each(|(v, p)| values[v.0 as usize] = Some(p));
    }
    let one = |v: Option<&Pieces>| Some(v?.first()?.data.clone());
    let results = f.results.iter().map(|r| one(values[r.value.0 as usize].as_ref()));
    results.collect::<Option<_>>().ok_or_else(|| missing.into())
}
