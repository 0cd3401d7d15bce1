//! By how many heads a parameter is seen.

use shardc_ir::func::{Func, Node, Value};
use shardc_ir::ops::{FusionClass, Kind};
use shardc_ir::rule::Group as Letters;

/// How many heads see what a parameter's product makes, whose rows are one behind the other in its first dim.
pub(super) fn heads(f: &Func, v: Value) -> Option<usize> {
    let ranks = |n: &Node| n.ins.iter().map(|&x| f.ty(x).rank()).collect::<Vec<usize>>();
    let mut same = vec![v];
    let product = f.nodes.iter().find(|n| {
        let reads = n.ins.iter().any(|x| same.contains(x));
        if reads && n.op.facts().kind == Kind::Conversion {
            same.extend(&n.outs);
        }
        reads && n.op.facts().kind == Kind::Product
    })?;
    let rule = product.op.def().rule(&ranks(product)).into_owned();
    let j = product.ins.iter().position(|x| same.contains(x))?;
    let rows = rule.ins[j].first()?;
    let dim = rule.outs[0].iter().position(|g| g == rows)?;
    // Behind it a bias, another type, or a norm of all heads.
    let mut made = vec![product.outs[0]];
    for n in &f.nodes {
        let Some(k) = n.ins.iter().position(|x| made.contains(x)) else { continue };
        let own = n.op.def().rule(&ranks(n)).into_owned();
        if let Some(&[head, _]) = own.ins[k].get(dim).map(Letters::letters) {
            let at = own.outs[0].iter().position(|g| g.single() == Some(head))?;
            return Some(f.ty(n.outs[0]).dims[at].size);
        }
        let alike = n.outs.len() == 1 && f.ty(n.outs[0]).sizes() == f.ty(n.ins[k]).sizes();
        // A sum of two such values is the residual, which no heads see.
        let sums =
            n.ins.len() > 1 && n.ins.iter().all(|x| f.ty(*x).sizes() == f.ty(n.outs[0]).sizes());
        if alike && n.op.facts().fusion == Some(FusionClass::Each) && !sums {
            made.extend(&n.outs);
        }
    }
    None
}
