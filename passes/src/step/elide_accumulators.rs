//! One microbatch: a gradient that one function makes needs no accumulator, which would be cleared
//! before and read again.
//!
//! ```text
//! Before:  @backward(%d_w_acc: f32[4,8] grad "w", …)    After:  @backward(…)
//!          %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]            %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]
//!          %d_w_total = add %d_w_acc, %d_w : f32[4,8]           return %d_w grad "w"
//!          return %d_w_total grad "w"
//! ```

use shardc_ir::func::{Func, Role, RoleKind, Value};
use shardc_ir::maps::{HashMap, HashSet};

/// Takes the accumulators out of the functions that a rank of the pipeline runs, once each.
pub fn elide_accumulators(loops: &mut [Func]) {
    let mut takers: HashMap<Role, usize> = HashMap::default();
    let roles = loops.iter().flat_map(|f| f.args.iter().filter_map(|a| a.role.as_ref()));
    for r in roles.filter(|r| r.kind == RoleKind::Grad) {
        *takers.entry(r.clone()).or_default() += 1;
    }
    takers.retain(|_, n| *n == 1);
    for f in loops {
        direct(f, &takers);
    }
}

/// Makes what a function first adds to an accumulator of these roles what the rest is added to, or its result, if
/// that is a node's own result and not another one of the function's.
fn direct(f: &mut Func, alone: &HashMap<Role, usize>) {
    let makers = f.makers();
    let (mut reads, mut shown) = (vec![0; f.values.len()], vec![0; f.values.len()]);
    let mut reader = vec![0; f.values.len()];
    for (i, n) in f.nodes.iter().enumerate() {
        for v in &n.ins {
            reads[v.0 as usize] += 1;
            reader[v.0 as usize] = i;
        }
    }
    f.results.iter().for_each(|r| shown[r.value.0 as usize] += 1);
    // Sums and accumulators that go, and what values are instead.
    let (mut sums, mut gone) = (HashSet::default(), HashSet::default());
    let mut instead: HashMap<Value, Value> = HashMap::default();
    for a in f.args.iter().filter(|a| a.role.as_ref().is_some_and(|r| alone.contains_key(r))) {
        let before = a.value.0 as usize;
        if [reads[before], shown[before]] != [1, 0] {
            continue;
        }
        let sum = &f.nodes[reader[before]];
        let (&[first, made], total) = (&sum.ins[..], sum.outs[0]) else { continue };
        let maker = makers[made.0 as usize].map(|m| &f.nodes[m as usize]);
        let own = maker.is_some_and(|n| !n.op.def().is_view());
        let once = reads[total.0 as usize] + shown[total.0 as usize] == 1;
        let adds = sum.op.is_plain_sum() && first == a.value;
        if adds && once && own && shown[made.0 as usize] == 0 {
            shown[made.0 as usize] += 1;
            sums.insert(reader[before]);
            gone.insert(a.value);
            instead.insert(total, made);
        }
    }
    f.args.retain(|a| !gone.contains(&a.value));
    let mut i = 0;
    f.nodes.retain(|_| {
        i += 1;
        !sums.contains(&(i - 1))
    });
    let read = f.nodes.iter_mut().flat_map(|n| &mut n.ins);
    let read = read.chain(f.results.iter_mut().map(|r| &mut r.value));
    read.for_each(|v| *v = instead.get(v).copied().unwrap_or(*v));
}
