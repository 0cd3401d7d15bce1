//! How far prices are off: bands of classes of runs.

/// How far prices of a class of runs are off.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Band {
    /// The class, in words.
    pub class: &'static str,
    /// Of the price: the least that holds four of five runs of the class, when the source of each is left out of the fit.
    pub width: f64,
    /// Published runs of the class.
    pub runs: usize,
}

/// Longest sequences of the class of usual ones.
const USUAL: usize = 8192;

const fn band(class: &'static str, width: f64, runs: usize) -> Band {
    Band { class, width, runs }
}

/// The bands, as the tables of runs give them (`cost/tests/it/tables.rs`). Of machines with the prior's share for products
/// each chip counts as much as the others.
pub const BANDS: [Band; 4] = [
    band("dense models, up to 8,192 tokens", 0.09, 160),
    band("dense models, more than 8,192 tokens", 0.06, 8),
    band("models with experts, up to 8,192 tokens", 0.62, 35),
    band("dense models on a machine whose share for products is a guess", 0.20, 168),
];

impl Band {
    /// The band of a model with or without experts, on a machine whose share for products is fitted or the prior; none where
    /// no run of the class is known, or only runs that differ too much.
    pub fn of(experts: bool, fitted: bool, seq: usize) -> Option<Band> {
        match (experts, fitted, seq > USUAL) {
            (false, true, false) => Some(BANDS[0]),
            (false, true, true) => Some(BANDS[1]),
            (true, true, false) => Some(BANDS[2]),
            (false, false, _) => Some(BANDS[3]),
            (true, false, _) | (true, true, true) => None,
        }
    }
}
