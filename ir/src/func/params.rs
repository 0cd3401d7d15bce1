//! How stored parameters become what forward and backward use.

use super::{Name, Role};
use crate::ops::Op;
use crate::types::Type;

/// An op between two layouts of a value, and the type that it gives.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutStep {
    pub op: Op,
    pub ty: Type,
}

/// How a stored parameter becomes what forward and backward use.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamLayout {
    pub param: Role,
    /// Layout in which a rank stores the parameter.
    pub stored: Type,
    pub steps: Vec<LayoutStep>,
    /// How many of the steps are done at step scope; the others where the parameter is used, for every
    /// microbatch.
    pub prepared: usize,
    /// How many of the steps are mirrored at step scope; the others in backward.
    pub mirrored: usize,
    pub trainable: bool,
    /// Number of the layer and short name, for the names of values.
    pub name: Name,
    /// Where its nodes at step scope stand.
    pub scope: String,
}
