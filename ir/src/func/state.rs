//! What a run keeps from step to step beside its parameters: states, by their names.

use super::Hint;
use crate::types::DType;

/// The name of a state, of lower case letters, digits and `_`: `exp_avg`. Whoever adds a state adds a name; there
/// is no list of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct StateName(&'static str);

const fn is_legal(text: &str) -> bool {
    let (bytes, mut i) = (text.as_bytes(), 0);
    while i < bytes.len() {
        if !matches!(bytes[i], b'a'..=b'z' | b'0'..=b'9' | b'_') {
            return false;
        }
        i += 1;
    }
    i > 0
}

impl StateName {
    /// A name that the program knows.
    ///
    /// # Panics
    /// If it is none.
    pub const fn new(text: &'static str) -> StateName {
        assert!(is_legal(text), "a name is of lower case letters, digits and `_`");
        StateName(text)
    }

    /// The name of a text, if it is one.
    pub fn read(text: &str) -> Option<StateName> {
        is_legal(text).then(|| StateName(Hint::from(text).text()))
    }

    /// As text.
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl std::fmt::Display for StateName {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// What a module says of a state, once: whose it is, of which elements, and how it begins. Its layout is that of the
/// values that have its role, which is the same everywhere; one function writes it, once per step, and what reads it
/// before has the old value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StateDecl {
    pub name: StateName,
    pub dtype: DType,
    pub owner: StateOwner,
    pub init: StateInit,
}

/// Whose a state is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateOwner {
    /// There is one of each parameter that has one, split as its type says; the role has the parameter's name.
    Param,
    /// There is one, which all ranks hold alike; the role has the empty name.
    Run,
}

impl StateOwner {
    pub const ALL: [StateOwner; 2] = [StateOwner::Param, StateOwner::Run];

    /// As the text has it.
    pub fn name(self) -> &'static str {
        match self {
            StateOwner::Param => "of param",
            StateOwner::Run => "of run",
        }
    }
}

impl std::fmt::Display for StateOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a state is before the first step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum StateInit {
    /// All elements are this number.
    Number(f64),
    /// As the model's weights have it under the name of its role.
    File,
}

/// As the text has it.
impl std::fmt::Display for StateInit {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            StateInit::Number(x) => write!(f, "{x}"),
            StateInit::File => f.write_str("file"),
        }
    }
}

/// The declaration, as the text has it: `state exp_avg: f32 of param = 0`.
impl std::fmt::Display for StateDecl {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "state {}: {} {} = {}", self.name, self.dtype.name(), self.owner, self.init)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_few_characters_and_by_text() {
        assert_eq!(StateName::read("exp_avg"), Some(StateName::new("exp_avg")));
        assert!(StateName::new("exp_avg") < StateName::new("exp_avg_sq"));
        for text in ["", "Exp", "a b", "ä", "a-b", "a.b", "state[x]"] {
            assert_eq!(StateName::read(text), None, "{text}");
        }
    }
}
