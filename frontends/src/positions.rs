//! How a family's model knows where a token stands.

/// How a model knows where a token stands.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Positions {
    /// Queries and keys turn with their position.
    Rotary(Turning),
    /// A second embedding, of this module.
    Learned(&'static str),
    /// By no number: what a recurrence makes of the tokens before says it.
    None,
}

/// How queries and keys turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turning {
    /// Key of the base of the frequencies, where they have no object of their own; `None`: no key changes them.
    pub theta: Option<&'static str>,
    /// The part of a head that turns: its key there, and the part where it is absent. `None`: all of it.
    pub part: Option<(&'static str, f64)>,
    /// Key of how many elements of a head turn, where the part is absent; and how many where it is absent, too.
    pub width: Option<(&'static str, Option<usize>)>,
    /// A config may give numbers by kinds of layers, which is compiled of `local` only.
    pub kinds: bool,
    /// Layers with a window turn by a base of their own: its key, if there is one, and the base where it is absent.
    pub local: Option<(Option<&'static str>, f64)>,
    /// The one scaling is `longrope`, also called `su` or `yarn`: its `original_max_position_embeddings`
    /// stands in the config itself, and is this where it is absent.
    pub stretched: Option<usize>,
    pub adjacent: Adjacent,
    pub still: Still,
    /// The scaling `dynamic` with `alpha` makes the base larger, whatever the length of rows.
    pub alpha: bool,
}

/// Whether neighbours of a head turn together, and not elements of its halves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adjacent {
    Never,
    Always,
    /// Unless this key is false.
    Unless(&'static str),
}

/// The layers in which queries and keys do not turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Still {
    Never,
    /// Those without a window; with `unless_all`, only if `sliding_window` is a number.
    WithoutWindow {
        unless_all: bool,
    },
    /// Those that have 0 in `no_rope_layers`, or every so many-th: by `no_rope_layer_interval`, or this one.
    Listed {
        every: usize,
    },
    /// All, unless this key is this word.
    Unless(&'static str, &'static str),
}

impl Turning {
    /// Whole heads, in all layers alike.
    pub const PLAIN: Turning = Turning {
        theta: Some("rope_theta"),
        part: None,
        width: None,
        kinds: false,
        local: None,
        stretched: None,
        adjacent: Adjacent::Never,
        still: Still::Never,
        alpha: false,
    };
}
