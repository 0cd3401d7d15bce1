//! `route`: where the copies of tokens stand in the buffers of the experts.

use super::*;
use crate::attr::Sizes;

op! {
    /// Assigns copies of tokens to rows of the buffers of experts. `index` `[z,t,k]` names the experts of each
    /// token; the e experts of each of g groups share a buffer of `rows` rows for each of z shards of tokens.
    /// Copies are ordered by expert, then by token. Results: `slot` `[z,t,k]`, which is the group times `rows`
    /// plus the row, or -1 if the copy is dropped; and `counts` `[g,e,z]`, the number of rows of each expert.
    /// With a `capacity`, an expert keeps that many copies of a shard and drops the rest (Lepikhin et al.,
    /// 2021, *GShard*, algorithm 1); without one, a buffer that is too small is an error at run time.
    Route = "route" (index) { sizes: Sizes, rows: usize, capacity: Option<usize> }
    facts { kind: Copies, fusion: None, precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples [
        "route[g=2,e=3; rows=6; capacity=none] i32[2,3,2]",
        "route[g=1,e=6; rows=6; capacity=1] i32[2,3,2]",
    ]
}

impl Route {
    pub fn new(groups: usize, experts: usize, rows: usize, capacity: Option<usize>) -> Route {
        let sizes =
            smallvec::smallvec![(Letter(b'g' - b'a'), groups), (Letter(b'e' - b'a'), experts)];
        Route { sizes: Sizes(sizes), rows, capacity }
    }
    /// Groups, and experts of a group.
    pub fn groups(&self) -> [usize; 2] {
        ["g", "e"].map(|l| {
            let named = |s: &&(Letter, usize)| s.0.name().to_string() == l;
            self.sizes.0.iter().find(named).map_or(0, |s| s.1)
        })
    }
}

impl OpDef for Route {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 || ins[0].rank() != 3 || ins[0].dtype != DType::I32 {
            return Err("one operand i32 [z, t, k] is needed".into());
        }
        if self.sizes.0.len() != 2 || self.groups().contains(&0) {
            return Err("give groups and experts of a group, as in `g=2,e=4`".into());
        }
        let [groups, experts] = self.groups();
        let copies = ins[0].dims[1].size.checked_mul(ins[0].dims[2].size);
        let numbers = [groups.checked_mul(experts), groups.checked_mul(self.rows), copies];
        if numbers.iter().any(|n| n.is_none_or(|n| i32::try_from(n).is_err())) {
            return Err(format!(
                "experts, slots and copies of a shard are counted in i32: up to {}",
                i32::MAX
            ));
        }
        Ok(())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("z!t!k->ztk,!g!ez", &[3])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    /// NaN is the slot of a copy for which there is no row: the executor stops there.
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [_, experts] = self.groups();
        let index = ins[0];
        let (mut slot, mut counts) =
            (Tensor::full(&cx.out_shape(0), -1.0), Tensor::full(&cx.out_shape(1), 0.0));
        let (groups, per_group) = (counts.shape[0], counts.shape[1]);
        for z in 0..index.shape[0] {
            for g in 0..groups {
                let mut row = 0;
                for e in 0..per_group {
                    let mut kept = 0;
                    for t in 0..index.shape[1] {
                        for k in 0..index.shape[2] {
                            let here = index.at(&[z, t, k]) == (g * experts + e) as f64;
                            if !here || self.capacity.is_some_and(|c| kept >= c) {
                                continue;
                            }
                            let fits = row < self.rows;
                            let place = (g * self.rows + row) as f64;
                            *slot.at_mut(&[z, t, k]) = if fits { place } else { f64::NAN };
                            (row, kept) = (row + 1, kept + 1);
                        }
                    }
                    *counts.at_mut(&[g, e, z]) = kept as f64;
                }
            }
        }
        vec![slot, counts]
    }
}
