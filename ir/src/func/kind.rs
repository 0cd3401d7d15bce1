//! What the functions of a plan are for.

/// What a function is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum FuncKind {
    /// Nothing in a plan: a model, before it is cut into stages.
    #[default]
    Model,
    /// Once per step and rank of the pipeline, before the microbatches.
    StepPrologue,
    /// Of a stage, for each microbatch: F.
    Forward,
    /// B; the gradient of the stage's input alone (I) if there is a [`FuncKind::Weight`].
    Backward,
    /// W: the gradients of the stage's parameters.
    Weight,
    /// As [`FuncKind::Backward`], for the last microbatch of its stage: it starts sums over ranks of gradients that
    /// are whole then.
    BackwardLast,
    /// As [`FuncKind::Weight`], for the last microbatch of its stage.
    WeightLast,
    /// Once per step and rank of the pipeline, after the microbatches: the optimizer.
    OptimizerStep,
    /// The loss of an evaluation, after the forwards.
    Evaluate,
}

impl FuncKind {
    /// The kinds of a plan's functions.
    pub const OF_PLAN: [FuncKind; 8] = [
        FuncKind::StepPrologue,
        FuncKind::Forward,
        FuncKind::Backward,
        FuncKind::Weight,
        FuncKind::BackwardLast,
        FuncKind::WeightLast,
        FuncKind::OptimizerStep,
        FuncKind::Evaluate,
    ];

    /// As the text has it, without a number.
    pub fn name(self) -> &'static str {
        match self {
            FuncKind::Model => "model",
            FuncKind::StepPrologue => "step_prologue",
            FuncKind::Forward => "forward",
            FuncKind::Backward => "backward",
            FuncKind::Weight => "weight",
            FuncKind::BackwardLast => "backward_last",
            FuncKind::WeightLast => "weight_last",
            FuncKind::OptimizerStep => "optimizer_step",
            FuncKind::Evaluate => "evaluate",
        }
    }

    /// The name of the function of this kind that is number `at` of `count`: `forward`, `forward.3`.
    pub fn numbered(self, at: usize, count: usize) -> String {
        if count == 1 { self.name().into() } else { format!("{}.{at}", self.name()) }
    }

    /// True for what runs once per microbatch.
    pub fn is_looped(self) -> bool {
        matches!(self.plain(), FuncKind::Forward | FuncKind::Backward | FuncKind::Weight)
    }

    /// The kind of what runs for the other microbatches, of what runs for the last one of its stage; else its own.
    pub fn plain(self) -> FuncKind {
        match self {
            FuncKind::BackwardLast => FuncKind::Backward,
            FuncKind::WeightLast => FuncKind::Weight,
            own => own,
        }
    }

    /// The kind of what runs in its place for the last microbatch of its stage, if there is one.
    pub fn of_last(self) -> Option<FuncKind> {
        match self {
            FuncKind::Backward => Some(FuncKind::BackwardLast),
            FuncKind::Weight => Some(FuncKind::WeightLast),
            _same => None,
        }
    }

    /// Reads the text after `@`: kind and number. The one place that does.
    pub(super) fn read(name: &str) -> (FuncKind, usize) {
        let (word, at) = match name.split_once('.') {
            Some((word, n)) => (word, n.parse().ok().filter(|at: &usize| at.to_string() == n)),
            None => (name, Some(0)),
        };
        let kind = FuncKind::OF_PLAN.into_iter().find(|k| k.name() == word);
        kind.zip(at).unwrap_or_default()
    }
}
