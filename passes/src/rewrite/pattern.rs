//! Rules as lines of text: patterns of ops, with attributes in brackets as in a program.
//!
//! `(scale[?a] (scale[?b] ?x))` matches two scales; `[times ?a ?b]` on the right computes an
//! attribute from those that matched.

use super::attrs;
use shardc_ir::attr::AttrCx;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{NAMES, Op};
use shardc_ir::types::Type;

/// One rule, with an example of operands on which it holds (tests run both sides on it). Axes in
/// examples are those of the mesh `[x=2, y=3]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    pub name: &'static str,
    pub lhs: &'static str,
    pub rhs: &'static str,
    /// A predicate on attributes, such as `identity ?r`; empty if there is none.
    pub when: &'static str,
    /// `a: 2.0 | x: f32[3,4]`: each variable's attribute or type; `out` is the type of the whole
    /// where it has a choice.
    pub example: &'static str,
}

/// A table of rules: `"name"; "left" => "right"; "example"`, with `if "predicate"` after the right.
macro_rules! rules {
    ($($name:literal; $lhs:literal => $rhs:literal $(if $when:literal)?; $example:literal)*) => {
        &[$($crate::rewrite::Line {
            name: $name, lhs: $lhs, rhs: $rhs, when: concat!($($when)?), example: $example,
        }),*]
    };
}
pub(crate) use rules;

/// A side of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Any value.
    Var(String),
    Op {
        name: &'static str,
        attrs: Vec<AttrPattern>,
        ins: Vec<Pattern>,
    },
}

/// An attribute in a pattern.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttrPattern {
    /// Exactly this text.
    Text(String),
    Var(String),
    /// Computed from other attributes; only on the right.
    Call {
        function: String,
        of: Vec<String>,
    },
}

/// Where a pattern is built: an e-graph, or a program.
pub trait Target {
    type Id: Copy;
    fn mesh(&self) -> &Mesh;
    fn ty(&self, id: Self::Id) -> Type;
    /// Adds an op with one result, if it types; `attrs` is its text, attribute by attribute.
    fn push(
        &mut self,
        op: &Op,
        attrs: &[String],
        ins: &[Self::Id],
        declared: Option<&Type>,
    ) -> Option<Self::Id>;
}

/// What the variables of a pattern stand for.
#[derive(Clone, Debug)]
pub struct Bindings<Id> {
    pub values: Vec<(String, Id)>,
    pub attrs: Vec<(String, String)>,
}

impl<Id> Default for Bindings<Id> {
    fn default() -> Self {
        Bindings { values: vec![], attrs: vec![] }
    }
}

impl<Id: Copy> Bindings<Id> {
    /// The attribute that a variable stands for.
    pub fn attr(&self, name: &str) -> Option<&str> {
        self.attrs.iter().find(|a| a.0 == name).map(|a| a.1.as_str())
    }

    fn attr_of(&self, mesh: &Mesh, a: &AttrPattern) -> Option<String> {
        match a {
            AttrPattern::Text(t) => Some(t.clone()),
            AttrPattern::Var(v) => self.attr(v).map(str::to_string),
            AttrPattern::Call { function, of } => {
                let args: Vec<&str> = of.iter().map(|v| self.attr(v)).collect::<Option<_>>()?;
                attrs::compute(mesh, function, &args)
            }
        }
    }
}

impl Pattern {
    /// Reads a side of a rule.
    pub fn parse(text: &str) -> Result<Pattern, String> {
        let mut rest = text.trim();
        let p = parse(&mut rest)?;
        if rest.trim().is_empty() {
            Ok(p)
        } else {
            Err(format!("`{rest}` is left over in `{text}`"))
        }
    }

    /// Builds the pattern; the outermost op's result is to have the declared type. `None` if some
    /// op does not type, or an attribute cannot be computed.
    pub fn build<T: Target>(
        &self,
        with: &Bindings<T::Id>,
        to: &mut T,
        declared: Option<&Type>,
    ) -> Option<T::Id> {
        let (name, attrs, ins) = match self {
            Pattern::Var(v) => return with.values.iter().find(|x| x.0 == *v).map(|x| x.1),
            Pattern::Op { name, attrs, ins } => (name, attrs, ins),
        };
        let ins: Vec<T::Id> = ins.iter().map(|p| p.build(with, to, None)).collect::<Option<_>>()?;
        let attrs: Vec<String> =
            attrs.iter().map(|a| with.attr_of(to.mesh(), a)).collect::<Option<_>>()?;
        let op = read_op(
            to.mesh(),
            name,
            &attrs,
            &ins.iter().map(|&i| to.ty(i).rank()).collect::<Vec<_>>(),
        )?;
        to.push(&op, &attrs, &ins, declared)
    }
}

/// The op of this name and attributes, for operands of these ranks.
pub fn read_op(mesh: &Mesh, name: &str, attrs: &[String], ranks: &[usize]) -> Option<Op> {
    let text = attrs.join("; ");
    Op::read(name, (!attrs.is_empty()).then_some(text.as_str()), AttrCx { mesh, ranks }).ok()
}

fn word(rest: &mut &str) -> String {
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    let (w, r) = rest.split_at(end);
    *rest = r;
    w.to_string()
}

fn parse(rest: &mut &str) -> Result<Pattern, String> {
    *rest = rest.trim_start();
    if let Some(r) = rest.strip_prefix('?') {
        *rest = r;
        return Ok(Pattern::Var(word(rest)));
    }
    *rest = rest.strip_prefix('(').ok_or_else(|| format!("`(` or `?` is expected at `{rest}`"))?;
    let name = word(rest);
    let name =
        NAMES.iter().find(|n| **n == name).ok_or_else(|| format!("no op is called `{name}`"))?;
    let mut attrs = vec![];
    if let Some(r) = rest.strip_prefix('[') {
        let (inside, r) = r.split_once(']').ok_or("`[` is not closed")?;
        *rest = r;
        attrs = inside.split(';').map(|a| parse_attr(a.trim())).collect();
    }
    let mut ins = vec![];
    loop {
        *rest = rest.trim_start();
        if let Some(r) = rest.strip_prefix(')') {
            *rest = r;
            return Ok(Pattern::Op { name, attrs, ins });
        }
        ins.push(parse(rest)?);
    }
}

fn parse_attr(text: &str) -> AttrPattern {
    if let Some(v) = text.strip_prefix('?') {
        return AttrPattern::Var(v.to_string());
    }
    match text.split_once(" ?") {
        Some((function, of)) => AttrPattern::Call {
            function: function.to_string(),
            of: of.split(" ?").map(str::to_string).collect(),
        },
        None => AttrPattern::Text(text.to_string()),
    }
}
