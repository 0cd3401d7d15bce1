//! What the functions of a plan are for, by their names.

use shardc_ir::func::Func;

/// What a function of a plan is for, by its name: `forward.3` is of stage 3.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// Once per step and rank of the pipeline, before the microbatches.
    Enter(usize),
    /// Of a stage, for each microbatch: F, B or I, W.
    Forward(usize),
    Backward(usize),
    Weight(usize),
    /// Once per step and rank, after the microbatches.
    Finish(usize),
    /// Ends an evaluation.
    Evaluate(usize),
}

impl Part {
    /// `None` for a name that no plan has.
    pub fn of(f: &Func) -> Option<Part> {
        let (word, number) = f.name.split_once('.').unwrap_or((&f.name, "0"));
        let n = number.parse().ok()?;
        Some(match word {
            "enter" => Part::Enter(n),
            "forward" => Part::Forward(n),
            "backward" => Part::Backward(n),
            "weight" => Part::Weight(n),
            "finish" => Part::Finish(n),
            "evaluate" => Part::Evaluate(n),
            _other => return None,
        })
    }
    /// Runs for each microbatch.
    pub fn of_microbatch(self) -> bool {
        matches!(self, Part::Forward(_) | Part::Backward(_) | Part::Weight(_))
    }
    /// The rank of the pipeline that runs it.
    pub fn rank(self, owner: &[usize]) -> usize {
        match self {
            Part::Enter(r) | Part::Finish(r) | Part::Evaluate(r) => r,
            Part::Forward(s) | Part::Backward(s) | Part::Weight(s) => {
                owner.get(s).copied().unwrap_or(0)
            }
        }
    }
}
