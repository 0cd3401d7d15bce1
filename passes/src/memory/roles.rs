//! What is known of the roles of a rank of the pipeline before they have memory.

use shardc_ir::func::{Module, Port, Role};
use shardc_ir::maps::{HashMap, HashSet};

/// Who takes a role, or an object.
#[derive(Clone, Copy, Default)]
pub(super) struct Takers {
    /// The last function, as a position in `funcs`.
    pub last: usize,
    /// The first stage, and whether there are others.
    stage: Option<usize>,
    are_several: bool,
}

impl Takers {
    pub fn join(&mut self, other: Takers) {
        self.last = self.last.max(other.last);
        let differ = self.stage.zip(other.stage).is_some_and(|(a, b)| a != b);
        self.are_several |= differ || other.are_several;
        self.stage = self.stage.or(other.stage);
    }

    pub fn are_of_one_stage(self) -> bool {
        self.stage.is_some() && !self.are_several
    }
}

/// What is known of a role.
#[derive(Clone, Copy, Default)]
pub(super) struct RoleFacts {
    pub takers: Takers,
    pub object: Option<usize>,
    /// A function adds to its value.
    pub is_summed: bool,
    /// Every step makes it anew before its microbatches, to be added to.
    pub is_cleared: bool,
    /// The last function that has it as an argument, and the buffer of that; none while there is no such.
    pub own: Option<(usize, usize)>,
}

/// The numbers of the roles of a function's arguments and results.
#[derive(Clone, Default)]
pub(super) struct RoleNumbers {
    pub args: Vec<Option<usize>>,
    pub results: Vec<Option<usize>>,
}

/// The roles of these functions as numbers, and what is known of each before it has memory.
pub(super) fn roles<'m>(
    m: &'m Module,
    funcs: &[usize],
    looped: &HashSet<usize>,
    plain: &[usize],
) -> (Vec<RoleNumbers>, Vec<RoleFacts>) {
    let mut by_role: HashMap<&'m Role, usize> = HashMap::default();
    let mut numbers = vec![RoleNumbers::default(); m.funcs.len()];
    for &f in funcs {
        let mut number = |p: &'m Port| {
            let next = by_role.len();
            p.role.as_ref().map(|r| *by_role.entry(r).or_insert(next))
        };
        numbers[f].args = m.funcs[f].args.iter().map(&mut number).collect();
        numbers[f].results = m.funcs[f].results.iter().map(&mut number).collect();
    }
    let mut known = vec![RoleFacts::default(); by_role.len()];
    // By role: one more than the last function that takes it, as a position in `funcs`.
    let mut taken = vec![0; known.len()];
    for (at, &f) in funcs.iter().enumerate() {
        // What runs in place of another counts as that.
        let last = funcs.iter().position(|&g| g == plain[f]).unwrap_or(at);
        let stage = Some(m.funcs[f].stage);
        for &r in numbers[f].args.iter().flatten() {
            known[r].takers.join(Takers { last, stage, are_several: false });
            taken[r] = last + 1;
        }
        for &r in numbers[f].results.iter().flatten() {
            let adds = taken[r] == last + 1;
            known[r].is_summed |= adds;
            known[r].is_cleared |= !adds && !looped.contains(&f);
        }
    }
    known.iter_mut().for_each(|k| k.is_cleared &= k.is_summed);
    (numbers, known)
}
