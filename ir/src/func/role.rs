//! What arguments and results are to the world outside of their function.

use super::{Fill, Input, Reads, StateName, Value};
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// What an argument or result of a function is to the world outside. A result with a role feeds
/// every later argument with the same role and name.
///
/// All that a role means is here: its name is one thing, and is never taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum RoleKind {
    /// A stored parameter; its name is the parameter's.
    Param,
    /// A parameter as forward and backward use it: fanned out or gathered.
    Unsharded,
    /// The gradient of a parameter, accumulated over microbatches.
    Grad,
    /// The gradient of a parameter from all microbatches, after the first exchange of its sum over ranks.
    GradSum,
    /// A parameter's gradient that this rank of the pipeline has made for the parameter's owner.
    GradFrom(u32),
    /// What is kept from step to step beside a parameter; its name is the parameter's.
    State(StateName),
    /// Data of a step: `input_ids`, `targets`, `positions`, or columns of the user's.
    Input(Input),
    /// Saved by forward for backward.
    Stash,
    /// Made in one stage of the pipeline and used in another.
    Edge,
    /// A run-time scalar: `lr`, `step`.
    Scalar,
    /// A sum over microbatches that is a loss, or a part of one: `loss`.
    Sum,
    /// How often a router chose each expert, summed over microbatches; its name is that of the
    /// parameter by which the router chooses. No loss.
    TokensPerExpert,
    /// The cotangent of a sum, of the same name: what one of its terms counts in the loss.
    Scale,
    /// Computed once per step and used by later functions: `inv_tokens`.
    Step,
    /// Shown to the user by the model: `logits`.
    Output,
    /// Shown to the user of a step: `loss`, all in all, and `grad_norm`.
    Metric,
    /// Shown to the user of a step: the mean of a sum over microbatches, of the same name.
    Mean,
    /// Shown to the user of a step: the gradient of a parameter, of all microbatches and ranks.
    GradShown,
}

impl RoleKind {
    /// All kinds; of those with a number that with 0, of inputs a column, of states one of any name.
    pub const ALL: [RoleKind; 18] = [
        RoleKind::Param,
        RoleKind::Unsharded,
        RoleKind::Grad,
        RoleKind::GradSum,
        RoleKind::GradFrom(0),
        RoleKind::State(StateName::new("state")),
        RoleKind::Input(Input { fill: Fill::Column, batch: true, seq: None, reads: Reads::Usual }),
        RoleKind::Stash,
        RoleKind::Edge,
        RoleKind::Scalar,
        RoleKind::Sum,
        RoleKind::TokensPerExpert,
        RoleKind::Scale,
        RoleKind::Step,
        RoleKind::Output,
        RoleKind::Metric,
        RoleKind::Mean,
        RoleKind::GradShown,
    ];

    /// The kind without what stands in `[…]`.
    pub fn name(self) -> &'static str {
        match self {
            RoleKind::Param => "param",
            RoleKind::Unsharded => "unsharded",
            RoleKind::Grad => "grad",
            RoleKind::GradSum => "grad_sum",
            RoleKind::GradFrom(_) => "grad_from",
            RoleKind::State(_) => "state",
            RoleKind::Input(_) => "input",
            RoleKind::Stash => "stash",
            RoleKind::Edge => "edge",
            RoleKind::Scalar => "scalar",
            RoleKind::Sum => "sum",
            RoleKind::TokensPerExpert => "tokens_per_expert",
            RoleKind::Scale => "scale",
            RoleKind::Step => "step",
            RoleKind::Output => "output",
            RoleKind::Metric => "metric",
            RoleKind::Mean => "mean",
            RoleKind::GradShown => "grad_shown",
        }
    }

    /// What it says of an input, if it is one.
    pub fn input(self) -> Option<Input> {
        match self {
            RoleKind::Input(own) => Some(own),
            _other => None,
        }
    }

    /// True for what microbatches add to.
    pub fn is_summed(self) -> bool {
        matches!(self, RoleKind::Sum | RoleKind::TokensPerExpert | RoleKind::Grad)
    }

    /// True for what a step shows to the user.
    pub fn is_shown(self) -> bool {
        matches!(self, RoleKind::Output | RoleKind::Metric | RoleKind::Mean | RoleKind::GradShown)
    }
}

/// The role by which a value of these ports goes from one stage to another: shown to the user, it stays.
pub fn sent(ports: &[Port], v: Value) -> Option<&Role> {
    let roles = ports.iter().filter(|p| p.value == v).filter_map(|p| p.role.as_ref());
    roles.filter(|r| !r.kind.is_shown()).min_by_key(|r| r.kind != RoleKind::Edge)
}

/// As the text has it: `param`, `state[exp_avg]`, `grad_from[1]`.
impl std::fmt::Display for RoleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())?;
        match self {
            RoleKind::GradFrom(rank) => write!(f, "[{rank}]"),
            RoleKind::State(name) => write!(f, "[{name}]"),
            _plain => Ok(()),
        }
    }
}

/// The name of a role: text that is hashed once, since maps from roles are asked again and again.
#[derive(Clone, Debug)]
pub struct RoleName {
    text: Arc<str>,
    hash: u64,
}

impl From<Arc<str>> for RoleName {
    fn from(text: Arc<str>) -> RoleName {
        let hash = crate::maps::hash(&*text);
        RoleName { text, hash }
    }
}

impl From<&str> for RoleName {
    fn from(text: &str) -> RoleName {
        Arc::<str>::from(text).into()
    }
}

impl From<String> for RoleName {
    fn from(text: String) -> RoleName {
        Arc::<str>::from(text).into()
    }
}

impl RoleName {
    /// The text, which others may keep.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }
}

impl std::ops::Deref for RoleName {
    type Target = str;
    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq for RoleName {
    fn eq(&self, other: &RoleName) -> bool {
        let same = || Arc::ptr_eq(&self.text, &other.text) || self.text == other.text;
        self.hash == other.hash && same()
    }
}

impl Eq for RoleName {}

impl Hash for RoleName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl std::fmt::Display for RoleName {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// As their texts.
impl Ord for RoleName {
    fn cmp(&self, other: &RoleName) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl PartialOrd for RoleName {
    fn partial_cmp(&self, other: &RoleName) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A role with the name it is known by.
#[derive(Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Role {
    pub kind: RoleKind,
    pub name: RoleName,
}

/// Names of the losses of layers that predict tokens behind the next begin so, and go on with how far behind: they
/// train, and are no part of an evaluation's loss.
pub const FURTHER: &str = "mtp_loss.";

/// Names of the losses of routers: what keeps experts in balance, and what keeps logits small.
pub const OF_ROUTERS: [&str; 2] = ["aux_loss", "z_loss"];

/// True for the name of a loss that is added for training alone, which an evaluation leaves out.
pub fn trains_alone(name: &str) -> bool {
    name.starts_with(FURTHER) || OF_ROUTERS.contains(&name)
}

impl Role {
    pub fn new(kind: RoleKind, name: impl Into<RoleName>) -> Role {
        Role { kind, name: name.into() }
    }

    /// An input that is what its name means.
    pub fn input(name: impl Into<RoleName>) -> Role {
        let name = name.into();
        Role { kind: RoleKind::Input(Input::named(&name)), name }
    }

    /// True if it is of this kind and has this name.
    pub fn is(&self, kind: RoleKind, name: &str) -> bool {
        self.kind == kind && *self.name == *name
    }
}

/// As the text has it: `state[exp_avg] "w"`; of an input that is not what its name means
/// `input[labels, batch] "y"`.
impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(own) = self.kind.input().filter(|own| *own != Input::named(&self.name)) {
            write!(f, "[{own}]")?;
        }
        write!(f, " {}", crate::text::quoted(&self.name))
    }
}

/// An argument or result.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub value: Value,
    pub role: Option<Role>,
}

impl Port {
    /// What it is as an input, if it is one.
    pub fn input(&self) -> Option<Input> {
        self.role.as_ref()?.kind.input()
    }

    /// True if it is an input that this fills.
    pub fn fills(&self, fill: Fill) -> bool {
        self.input().is_some_and(|i| i.fill == fill)
    }

    /// True if its role is of this kind and has this name.
    pub fn is(&self, kind: RoleKind, name: &str) -> bool {
        self.role.as_ref().is_some_and(|r| r.is(kind, name))
    }
}
