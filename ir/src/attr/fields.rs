//! The attributes of one op, in their order.

use super::{Attr, AttrCx};
use crate::mesh::Mesh;

/// Writes attributes in order: bare ones as they are, the first always bare.
pub struct AttrWriter<'a> {
    pub mesh: &'a Mesh,
    pub out: &'a mut String,
    pub count: usize,
}

impl AttrWriter<'_> {
    pub fn attr<A: Attr>(&mut self, name: &str, a: &A) {
        if a.is_implied() {
            return;
        }
        self.out.push_str(if self.count == 0 { "[" } else { "; " });
        if self.count > 0 && !A::BARE {
            self.out.push_str(name);
            self.out.push('=');
        }
        a.write(self.mesh, self.out);
        self.count += 1;
    }
}

/// Why attributes cannot be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttrError {
    /// The one that is wrong, if it is one.
    pub attr: Option<&'static str>,
    pub message: String,
}

impl std::fmt::Display for AttrError {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<String> for AttrError {
    fn from(message: String) -> AttrError {
        AttrError { attr: None, message }
    }
}

impl From<AttrError> for String {
    fn from(e: AttrError) -> String {
        e.message
    }
}

/// Reads attributes in the order they are written.
pub struct AttrReader<'a> {
    pub cx: AttrCx<'a>,
    pub rest: Option<&'a str>,
    pub first: bool,
}

impl AttrReader<'_> {
    /// # Errors
    /// Names the attribute.
    pub fn attr<A: Attr>(&mut self, name: &'static str) -> Result<A, AttrError> {
        self.read(name).map_err(|message| AttrError { attr: Some(name), message })
    }

    fn read<A: Attr>(&mut self, name: &str) -> Result<A, String> {
        let Some(rest) = self.rest else {
            return A::implied().ok_or_else(|| format!("attribute `{name}` is missing"));
        };
        let (head, tail) = match rest.split_once(';') {
            Some((h, t)) => (h, Some(t)),
            None => (rest, None),
        };
        let mut head = head.trim();
        if !self.first && !A::BARE {
            let named = head.strip_prefix(name).and_then(|h| h.trim_start().strip_prefix('='));
            match (named, A::implied()) {
                (Some(own), _) => head = own.trim(),
                // It is that of an attribute behind this one, which is not written.
                (None, Some(implied)) => return Ok(implied),
                (None, None) => {
                    return Err(format!("attribute `{name}=` is expected, not `{head}`"));
                }
            }
        }
        (self.rest, self.first) = (tail, false);
        A::read(head, &self.cx)
    }
}
