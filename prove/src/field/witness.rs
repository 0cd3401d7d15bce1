//! Whether two terms differ: both, computed over the field on the same inputs.

use super::ranks::Ranks;
use super::{Data, Inputs, Values, rows_of_an_owner};
use crate::Subject;
use crate::term::{Node, Store, Term};
use shardc_ir::func::RoleKind;
use std::collections::{BTreeSet, HashMap};

/// Most multiplications and elements of the terms that are computed.
const LARGEST: f64 = (1u64 << 26) as f64;
/// Tokens are below this: an index of any table.
const TOKENS: usize = 5;

/// The inputs that terms are computed on, and what was computed.
pub(crate) struct Witness<'a> {
    s: &'a Store,
    inputs: Inputs,
    own: usize,
}

impl<'a> Witness<'a> {
    pub fn new(subject: &Subject, s: &'a Store) -> Witness<'a> {
        let inputs = subject.model.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a)));
        let mut inputs =
            inputs.filter(|(_, a)| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Input));
        let wide = |(f, a): (&shardc_ir::func::Func, &shardc_ir::func::Port)| {
            f.ty(a.value).sizes().get(1).copied()
        };
        let data = Data { seq: inputs.find_map(wide).unwrap_or(1), vocab: TOKENS };
        let rows = subject.recipe.global_batch;
        let inputs = Inputs { data, rows, microbatches: subject.schedule.microbatches };
        let own = rows_of_an_owner(subject.programs, &Ranks::new(&subject.programs.mesh));
        Witness { s, inputs, own }
    }

    /// `None` if the terms are too large, or mention what has no meaning of its own.
    pub fn differ(&self, sides: [Term; 2]) -> Option<bool> {
        let mut seen = BTreeSet::new();
        let mut cost = 0.0;
        let mut open = sides.to_vec();
        while let Some(t) = open.pop() {
            if !seen.insert(t) {
                continue;
            }
            cost += self.cost(t);
            if cost > LARGEST {
                return None;
            }
            open.extend(self.s.made_of(t));
        }
        let mut values = Values::new(self.s, &self.inputs, self.own);
        let [a, b] = sides.map(|t| values.of(t, Some(0)).ok());
        Some(a? != b?)
    }

    /// Elements of a term, and for all microbatches what its letters multiply to.
    fn cost(&self, t: Term) -> f64 {
        let shape: f64 = self.s.shape(t).iter().map(|&n| n as f64).product();
        let all = match self.s.node(t) {
            Node::Product(factors) => {
                let mut sizes: HashMap<u8, usize> = HashMap::new();
                for (u, letters) in factors.iter() {
                    sizes.extend(letters.iter().copied().zip(self.s.shape(*u).iter().copied()));
                }
                sizes.values().map(|&n| n as f64).product::<f64>().max(shape)
            }
            _other => shape,
        };
        all * self.inputs.microbatches as f64
    }
}
