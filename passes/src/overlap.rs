//! Puts work behind a collective that it does not need, so that it runs while data move: where
//! collectives have a stream, or a thread, of their own.
//!
//! ```text
//! Before:  %d_x_part = dot[bsf,fh->bsh] %d_y, %w         After:  %d_x_part = dot[bsf,fh->bsh] %d_y, %w
//!          %d_w = dot[bsf,bsh->fh] %d_y, %x                      %d_x = all_reduce[tp] %d_x_part
//!          %d_x = all_reduce[tp] %d_x_part                       %d_w = dot[bsf,bsh->fh] %d_y, %x
//! ```
//! Assumes: phase Ranked, nodes grouped.  Leaves: the same launches in another order.
//!
//! As Megatron-LM does for gradients of weights (Narayanan et al., 2021, *Efficient large-scale language
//! model training*), and FSDP for the weights of the next layer (Zhao et al., 2023), by one rule: what
//! stands before a collective and is not needed for it goes behind it, as far back as one
//! product or another collective. So few tensors live longer. Before that, `blocks` joins the gathers, and the
//! scattered sums, of the parameters of a block.

mod blocks;

use blocks::blocks;
use shardc_ir::func::{Func, FusedWithNext, Node, Port, Role, Value, ValueMap};
use shardc_ir::group::{Launch, launches};
use shardc_ir::maps::{HashMap, HashSet};

/// Most products that are put behind one collective: one hides most of it, and what several read and
/// write would live longer.
const HEAVY: usize = 1;

/// Reorders a function.
pub fn overlap(f: &mut Func) {
    blocks(f);
    let all = launches(f);
    let order = order(f, &all);
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut f.nodes).into_iter().map(Some).collect();
    for i in order {
        let range = all[i].nodes.clone();
        let last = range.end - 1;
        for n in range {
            let node = nodes[n].take().expect("a node is in one launch");
            // The last launch of a function is ended by the function.
            let fused = if n == last { FusedWithNext::No } else { node.fused };
            f.nodes.push(Node { fused, ..node });
        }
    }
}

/// True if a launch is worth a collective's time.
fn heavy(f: &Func, x: &Launch) -> bool {
    f.nodes[x.nodes.clone()].iter().any(|n| n.op.is_heavy())
}

/// Values that launches need, and those that they write over.
#[derive(Default)]
struct Needs {
    values: HashSet<Value>,
    written: HashSet<Value>,
}

/// What is known of a function.
struct OverlapFacts<'a> {
    f: &'a Func,
    all: &'a [Launch],
    /// By value: the argument over which it may be written, after all that reads this.
    over: HashMap<Value, Value>,
    /// By value: the one whose memory it is.
    root: ValueMap<Value>,
}

impl<'a> OverlapFacts<'a> {
    fn of(f: &'a Func, all: &'a [Launch]) -> OverlapFacts<'a> {
        let root = f.roots();
        let mut over = HashMap::default();
        let of_role = |a: &'a Port| Some((a.role.as_ref()?, a.value));
        // Of two arguments of one role the first.
        let old: HashMap<&Role, Value> = f.args.iter().rev().filter_map(of_role).collect();
        for (role, value) in f.results.iter().filter_map(of_role) {
            over.extend(old.get(role).map(|&a| (root[value], a)));
        }
        OverlapFacts { f, all, over, root }
    }

    fn exchanges(&self, i: usize) -> bool {
        self.f.nodes[self.all[i].nodes.start].op.collective().is_some()
    }

    fn need(&self, i: usize, needs: &mut Needs) {
        let x = &self.all[i];
        needs.values.extend(x.ins.iter().copied());
        needs.written.extend(x.outs.iter().filter_map(|o| self.over.get(o)));
        let sums = self.f.nodes[x.nodes.clone()].iter().filter(|n| n.op.accumulates());
        needs.written.extend(sums.map(|n| self.root[n.ins[0]]));
    }

    /// True if a launch has to be before those that need this.
    fn is_needed(&self, i: usize, needs: &Needs) -> bool {
        let x = &self.all[i];
        let mut made = self.f.nodes[x.nodes.clone()].iter().flat_map(|n| &n.outs);
        made.any(|o| needs.values.contains(o))
            || x.ins.iter().any(|v| needs.written.contains(&self.root[v]))
    }

    /// Puts behind a collective what stands before it and is not needed.
    fn early(&self, i: usize, order: &mut [usize]) {
        let at = order.iter().position(|&x| x == i).expect("every launch is there");
        let mut needs = Needs::default();
        self.need(i, &mut needs);
        let (mut before, mut behind) = (vec![], vec![]);
        let (mut first, mut found) = (at, 0);
        while first > 0 && !self.exchanges(order[first - 1]) {
            let j = order[first - 1];
            if self.is_needed(j, &needs) {
                self.need(j, &mut needs);
                before.push(j);
            } else {
                found += usize::from(heavy(self.f, &self.all[j]));
                if found > HEAVY {
                    break;
                }
                behind.push(j);
            }
            first -= 1;
        }
        if found > 0 {
            let new = before.iter().rev().chain([&i]).chain(behind.iter().rev());
            let new: Vec<usize> = new.copied().collect();
            order[first..=at].copy_from_slice(&new);
        }
    }
}

fn order(f: &Func, all: &[Launch]) -> Vec<usize> {
    let o = OverlapFacts::of(f, all);
    let mut order: Vec<usize> = (0..all.len()).collect();
    // What several exchange in one call is where it should be.
    let alone = |i: &usize| o.exchanges(*i) && all[*i].nodes.len() == 1;
    (0..all.len()).filter(alone).for_each(|i| o.early(i, &mut order));
    order
}
