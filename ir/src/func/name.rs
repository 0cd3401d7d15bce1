//! Names of values, and which of them are taken.

use std::borrow::Cow;
use std::collections::BTreeSet;

/// Name of a value: `%d_l3.q.1` is a gradient (`d_`), of layer 3, hinted `q`, the second of that name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Name {
    pub grad: bool,
    pub layer: Option<u32>,
    pub hint: Cow<'static, str>,
    pub dup: u32,
}

/// Layers and `.N` of names are below.
const MAX_NUMBER: u32 = 1 << 24;

impl Name {
    /// Reads the text after `%`.
    pub fn parse(text: &str) -> Name {
        let (grad, mut t) = match text.strip_prefix("d_") {
            Some(t) => (true, t),
            None => (false, text),
        };
        let number =
            |s: &str| s.parse::<u32>().ok().filter(|n| *n < MAX_NUMBER && n.to_string() == s);
        let mut layer = None;
        if let Some((head, rest)) = t.split_once('.')
            && let Some(n) = head.strip_prefix('l').and_then(number)
        {
            (layer, t) = (Some(n), rest);
        }
        let mut dup = 0;
        if let Some((head, n)) = t.rsplit_once('.')
            && let Some(n) = number(n).filter(|&n| n > 0 && !head.is_empty())
        {
            (t, dup) = (head, n);
        }
        Name { grad, layer, hint: Cow::Owned(t.to_string()), dup }
    }

    /// True if its text reads back as this name.
    pub fn is_readable(&self) -> bool {
        let word = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.');
        let numbers = self.layer.unwrap_or(0).max(self.dup) < MAX_NUMBER;
        if !numbers || !self.hint.bytes().all(word) {
            return false;
        }
        // Only a hint with a dot, or that begins like a prefix, can be read in two ways.
        let prefix = self.layer.is_none() && self.hint.starts_with(['d', 'l']);
        if !self.hint.is_empty() && !prefix && !self.hint.contains('.') {
            return true;
        }
        let text = self.to_string();
        text.len() > 1 && Name::parse(&text[1..]) == *self
    }

    /// The name that its text is read as, whatever it is made of: of hint `d_x` the gradient of `x`.
    pub(super) fn readable(self) -> Name {
        if self.is_readable() {
            return self;
        }
        let word =
            |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '_' };
        let text: String = self.to_string().chars().skip(1).map(word).collect();
        Name::parse(if text.is_empty() { "v" } else { &text })
    }

    pub fn write(&self, out: &mut String) {
        use std::fmt::Write as _;
        out.push('%');
        if self.grad {
            out.push_str("d_");
        }
        if let Some(l) = self.layer {
            let _ = write!(out, "l{l}.");
        }
        out.push_str(&self.hint);
        if self.dup > 0 {
            let _ = write!(out, ".{}", self.dup);
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let mut s = String::new();
        self.write(&mut s);
        f.write_str(&s)
    }
}

/// Numbers in use of a name: all below `next`, and those of `others`.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken {
    next: u32,
    others: BTreeSet<u32>,
}

impl Taken {
    /// The wanted number if it is free, else the first free one.
    pub(super) fn take(&mut self, wanted: u32) -> u32 {
        let free = |t: &Taken, n: u32| n >= t.next && !t.others.contains(&n);
        if wanted > self.next && free(self, wanted) {
            self.others.insert(wanted);
            return wanted;
        }
        let n = self.next;
        self.next += 1;
        while self.others.remove(&self.next) {
            self.next += 1;
        }
        n
    }
}
