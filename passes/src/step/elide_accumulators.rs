//! One microbatch: a gradient that one function makes needs no accumulator, which would be cleared
//! before and read again.
//!
//! ```text
//! Before:  @backward(%d_w_acc: f32[4,8] grad "w", …)    After:  @backward(…)
//!          %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]            %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]
//!          %d_w_total = add %d_w_acc, %d_w : f32[4,8]           return %d_w grad "w"
//!          return %d_w_total grad "w"
//! ```

use shardc_ir::func::{Func, Role, RoleKind};
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

/// Makes what a function adds to an accumulator of these roles its result, if that is a node's own
/// result and not another one of the function's.
fn direct(f: &mut Func, alone: &HashMap<Role, usize>) {
    let makers = f.makers();
    let (mut reads, mut shown) = (vec![0; f.values.len()], vec![0; f.values.len()]);
    f.nodes.iter().flat_map(|n| &n.ins).for_each(|v| reads[v.0 as usize] += 1);
    f.results.iter().for_each(|r| shown[r.value.0 as usize] += 1);
    let ports = f.results.iter().enumerate();
    let results: HashMap<&Role, usize> =
        ports.filter_map(|(i, r)| Some((r.role.as_ref()?, i))).collect();
    // Sums and accumulators that go, and what results are instead.
    let (mut sums, mut gone, mut instead) = (HashSet::default(), HashSet::default(), vec![]);
    for a in &f.args {
        let role = a.role.as_ref().filter(|r| alone.contains_key(*r));
        let Some(&at) = role.and_then(|r| results.get(r)) else { continue };
        let total = f.results[at].value;
        let Some(sum) = makers[total.0 as usize].map(|m| m as usize) else { continue };
        let [first, made] = f.nodes[sum].ins[..] else { continue };
        let maker = makers[made.0 as usize].map(|m| &f.nodes[m as usize]);
        let own = maker.is_some_and(|n| !n.op.def().is_view());
        let [of_sum, of_total] = [a.value, total].map(|v| reads[v.0 as usize]);
        if first == a.value && [of_sum, of_total] == [1, 0] && own && shown[made.0 as usize] == 0 {
            shown[made.0 as usize] += 1;
            sums.insert(sum);
            gone.insert(a.value);
            instead.push((at, made));
        }
    }
    f.args.retain(|a| !gone.contains(&a.value));
    instead.into_iter().for_each(|(at, made)| f.results[at].value = made);
    let mut i = 0;
    f.nodes.retain(|_| {
        i += 1;
        !sums.contains(&(i - 1))
    });
}
