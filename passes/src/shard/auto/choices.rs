//! What was chosen from, for who asks why: what was chosen, the next best, and what both cost.

use crate::choose::{BudgetAnswer, NEVER, Problem, Var, best_with};
use crate::shard::ways::Way;
use shardc_ir::func::{Value, ValueMap};
use shardc_ir::types::Type;
use std::rc::Rc;

/// Where a value's layouts stand among the ways of a variable.
#[derive(Clone, Debug)]
enum Layouts {
    /// The ways are its layouts.
    Own(Rc<[Type]>),
    /// They are those of the op whose result, or operand, of this place it is.
    Result(Rc<[Way]>, usize),
    Operand(Rc<[Way]>, usize),
}

impl Layouts {
    fn of(&self, way: usize) -> &Type {
        match self {
            Layouts::Own(all) => &all[way],
            Layouts::Result(all, o) => &all[way].outs[*o],
            Layouts::Operand(all, j) => &all[way].ins[*j],
        }
    }
}

/// Of a choice: all that it was chosen from.
#[derive(Clone, Debug)]
pub struct Choices {
    problem: Problem,
    found: BudgetAnswer,
    /// By value of the model.
    layouts: ValueMap<Option<(Var, Layouts)>>,
    stored: ValueMap<Option<Var>>,
}

/// What was chosen, and the best of all else; each with the least that a microbatch costs with it, in picoseconds,
/// where all else may be as it likes. Where memory is scarce, a byte has its price in it.
#[derive(Clone, PartialEq, Debug)]
pub struct Compared<T> {
    pub chosen: (T, u64),
    pub other: Option<(T, u64)>,
}

impl Choices {
    pub(super) fn new(
        problem: Problem,
        found: BudgetAnswer,
        stored: ValueMap<Option<Var>>,
    ) -> Choices {
        Choices { problem, found, layouts: ValueMap::filled(None, stored.len()), stored }
    }

    /// A value that has a variable of its own.
    pub(super) fn own(&mut self, v: Value, var: Var, layouts: &[Type]) {
        self.layouts[v] = Some((var, Layouts::Own(layouts.into())));
    }

    /// A result of an op.
    pub(super) fn result(&mut self, v: Value, var: Var, ways: &Rc<[Way]>, o: usize) {
        self.layouts[v].get_or_insert((var, Layouts::Result(ways.clone(), o)));
    }

    /// A parameter that one op uses.
    pub(super) fn operand(&mut self, v: Value, var: Var, ways: &Rc<[Way]>, j: usize) {
        self.layouts[v].get_or_insert((var, Layouts::Operand(ways.clone(), j)));
    }

    /// The layout of a value of the model as its op makes it, a parameter's as it is used; `None` if nothing was
    /// chosen for it, or what else would cost is not known.
    pub fn layout(&self, v: Value) -> Option<Compared<Type>> {
        let (var, layouts) = self.layouts.find(v)?.as_ref()?;
        self.compared(*var, |way| layouts.of(way).clone())
    }

    /// How a parameter is stored.
    pub fn storage(&self, v: Value) -> Option<Compared<&'static str>> {
        let var = (*self.stored.find(v)?)?;
        self.compared(var, |way| super::STORED_AS[way])
    }

    fn compared<T: PartialEq>(&self, var: Var, of: impl Fn(usize) -> T) -> Option<Compared<T>> {
        let (found, lambda) = (&self.found, self.found.lambda);
        let scores = best_with(&self.problem, lambda, var)?;
        let time = |score: u128| (score / u128::from(lambda.bytes())) as u64;
        let own = of(found.ways[var.index()]);
        let allowed = || scores.iter().enumerate().filter(|s| *s.1 < NEVER);
        let least = |same: bool| {
            let all = allowed().filter(|s| (of(s.0) == own) == same);
            all.min_by_key(|s| s.1).map(|(way, &score)| (of(way), time(score)))
        };
        Some(Compared { chosen: least(true)?, other: least(false) })
    }
}
