//! How far a module is on its way from a model to the programs of all ranks.

/// What a module is. Every pass takes a module of one phase and leaves one of the same or a later one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Phase {
    /// A model: one function on one device. No mesh, or annotations alone.
    #[default]
    Source,
    /// The same over a mesh: values have shardings, and no collective stands in it yet.
    Sharded,
    /// What every rank runs of one microbatch, collectives included; layouts of parameters beside it.
    Ranked,
    /// The same with its backward behind it, if the plan trains.
    Differentiated,
    /// A function for each stage, and for forward, backward and gradients of weights.
    Staged,
    /// The functions of a whole step: those of the microbatches, and what is done once around them.
    Step,
}

impl Phase {
    pub const ALL: [Phase; 6] = [
        Phase::Source,
        Phase::Sharded,
        Phase::Ranked,
        Phase::Differentiated,
        Phase::Staged,
        Phase::Step,
    ];

    /// As the text has it.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Source => "source",
            Phase::Sharded => "sharded",
            Phase::Ranked => "ranked",
            Phase::Differentiated => "differentiated",
            Phase::Staged => "staged",
            Phase::Step => "step",
        }
    }

    /// True if its programs are those of ranks: collectives stand in them.
    pub fn is_of_ranks(self) -> bool {
        self >= Phase::Ranked
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
