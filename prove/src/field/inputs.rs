//! The data of a step: numbers that depend on the names of inputs alone.

use super::functions::{mix, oracle, seed};
use super::tensor::Tensor;
use super::{Data, noise};
use crate::Subject;
use shardc_ir::func::{Fill, InputRow, Role, RoleName, inputs};
use std::collections::{BTreeMap, BTreeSet};

/// Inputs of a step.
pub(super) struct Inputs {
    pub data: Data,
    pub rows: usize,
    pub microbatches: usize,
    /// Inputs whose elements are not whole numbers.
    pub floats: BTreeSet<RoleName>,
    /// What the others are below.
    pub below: BTreeMap<RoleName, usize>,
}

impl Inputs {
    pub fn new(subject: &Subject, data: Data) -> Inputs {
        let (floats, whole): (Vec<_>, Vec<_>) =
            inputs(subject.model).into_iter().partition(|r| r.dtype.is_float());
        let below = |r: InputRow| (r.name.clone(), r.bound(data.vocab).min(data.vocab));
        Inputs {
            data,
            rows: subject.recipe.global_batch,
            microbatches: subject.schedule.microbatches,
            floats: floats.into_iter().map(|r| r.name).collect(),
            below: whole.into_iter().map(below).collect(),
        }
    }

    /// A whole input of the step, of which a part has this shape.
    fn whole(&self, role: &Role, shape: &[usize]) -> Tensor {
        let (seed, mut k) = (seed(&role.name), 0);
        let mut all = shape.to_vec();
        let Some(own) = role.kind.input() else { return noise(&role.to_string(), shape) };
        if let Some(rows) = all.first_mut().filter(|_| own.batch) {
            *rows = self.rows;
        }
        let seq = own.tokens().and_then(|d| all.get(d).copied()).unwrap_or(1);
        let token = |i: &[usize]| own.tokens().map_or(0, |d| i[d]);
        match own.fill {
            // Neighbours change places, so that a position is not the place.
            Fill::Positions => Tensor::from_fn(&all, |i| {
                let other = token(i) ^ 1;
                (if other < seq { other } else { token(i) }) as u64
            }),
            Fill::Run => Tensor::from_fn(&all, |i| 1 + i[0] as u64),
            // Two documents and padding in turn, so that every query sees some other key.
            Fill::Segments => {
                Tensor::from_fn(&all, |i| [0, 1, -1i64 as u64][(i[0] + token(i)) % 3])
            }
            Fill::Count => Tensor::from_fn(&all, |_| oracle(seed, &[])),
            Fill::Scored | Fill::Histogram => {
                Tensor::from_fn(&all, |i| oracle(seed, &[i[0] as u64]))
            }
            // Of any two neighbours one is a token, and the first is.
            Fill::Mask => {
                Tensor::from_fn(&all, |i| u64::from(token(i) == 0 || (i[0] + token(i)) % 3 != 0))
            }
            Fill::Offsets => Tensor::from_fn(&all, |i| ((i[0] + token(i)) / 3) as u64),
            Fill::Places => Tensor::from_fn(&all, |i| (i[0] * seq + token(i)) as u64),
            Fill::Tokens
            | Fill::Labels
            | Fill::Ahead
            | Fill::LabelsAhead
            | Fill::Column
            | Fill::Random => {
                let float = self.floats.contains(&role.name);
                let below = self.below.get(&role.name).copied().unwrap_or(self.data.vocab);
                Tensor::from_fn(&all, |_| {
                    k += 1;
                    match own.fill {
                        _ if float => oracle(seed, &[k]),
                        Fill::Labels | Fill::Ahead | Fill::LabelsAhead if k % 7 == 0 => {
                            -100i64 as u64
                        }
                        _whole => mix(seed, k) % below.max(1) as u64,
                    }
                })
            }
        }
    }

    /// The rows of a microbatch, of which every owner has `own` consecutive ones; nothing if the microbatches have other
    /// rows than the batch.
    pub fn of(
        &self,
        role: &Role,
        microbatch: Option<usize>,
        shape: &[usize],
        own: usize,
    ) -> Option<Tensor> {
        let whole = self.whole(role, shape);
        let m = self.microbatches;
        let rows = role.kind.input().is_some_and(|i| i.batch);
        match microbatch.filter(|_| rows && whole.shape != shape) {
            Some(j) => {
                let of_all = own > 0 && shape[0] % own == 0 && shape[0] * m == self.rows;
                of_all.then(|| {
                    Tensor::from_fn(shape, |i| {
                        let mut at = i.to_vec();
                        at[0] = (i[0] / own * m + j) * own + i[0] % own;
                        whole.at(&at)
                    })
                })
            }
            None => Some(whole),
        }
    }
}
