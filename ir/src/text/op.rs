//! Reads an op: its name, its attributes, and whether passes keep it as it is.

use super::cursor::{Fail, Res};
use super::items::atoms_error;
use super::parse::Parser;
use super::unknown::{said_of, unknown_op};
use crate::attr::{AttrCx, AttrError};
use crate::ops::{NAMES, Op, SAMPLES};

/// The last attribute of a collective that passes leave as it stands ([`Node::kept`](crate::func::Node::kept)).
pub(super) const KEEP: &str = "keep";

/// An op as a text has it: what its attributes say depends on its operands, which come behind it.
pub(super) struct OpHead<'t> {
    name: &'t str,
    attrs: Option<&'t str>,
    /// Where its attributes are, or its name if it has none.
    at: usize,
}

impl OpHead<'_> {
    /// Takes `keep` off the attributes; whether it was there.
    pub fn kept(&mut self) -> bool {
        let before =
            self.attrs.and_then(|a| a.trim_end().strip_suffix(KEEP)?.trim_end().strip_suffix(';'));
        self.attrs = before.or(self.attrs);
        before.is_some()
    }
}

impl<'t> Parser<'t> {
    /// The text of an op up to its operands.
    pub fn op_text(&mut self) -> Res<OpHead<'t>> {
        let at = self.c.at;
        let name = self.c.word();
        if !NAMES.contains(&name) {
            return Err(unknown_op(name, at));
        }
        if !self.c.eat("[") {
            return Ok(OpHead { name, attrs: None, at });
        }
        let closed = self.c.line().split_once(']').filter(|(t, _)| !t.contains('%'));
        let Some((text, _)) = closed else {
            let f = self.c.needs("`]`");
            return Err(f.help(format!("close the attributes of `{name}` with `]`")));
        };
        let at = self.c.at;
        self.c.at += text.len() + 1;
        Ok(OpHead { name, attrs: Some(text), at })
    }

    /// The op of a text, of operands of these ranks. Only a collective is `kept`.
    pub fn op(&self, text: &OpHead, ranks: &[usize], kept: bool) -> Res<Op> {
        let op = Op::read(text.name, text.attrs, AttrCx { mesh: &self.mesh, ranks })
            .map_err(|e| self.bad_attribute(&e, text))?;
        if kept && op.layout().is_none() {
            let attrs = text.attrs.unwrap_or_default();
            let what = format!("`keep` is for collectives, and `{}` is none", text.name);
            return Err(Fail::new("attribute", text.at, attrs.len() + 1, what)
                .rule("`keep` leaves a collective as it stands")
                .help("leave `; keep` out"));
        }
        Ok(op)
    }

    fn bad_attribute(&self, e: &AttrError, text: &OpHead) -> Box<Fail> {
        let (name, attrs) = (text.name, text.attrs.unwrap_or(""));
        if let Some(f) = atoms_error(&e.message, attrs, &self.mesh, text.at) {
            return f;
        }
        let sample = SAMPLES.iter().find(|s| s.0 == name).and_then(|s| s.1.first());
        Fail::new("attribute", text.at, attrs.len(), format!("`{name}`: {}", e.message))
            .rule(said_of(name, e.attr))
            .help(match sample {
                Some(s) => format!("for example `{s}`"),
                None => format!("for example `{name}[tp]`, with `; dim=0` where a dim is needed"),
            })
    }
}
