//! Names of values, and which of them are taken.

use crate::maps::HashMap;
use crate::text::push_number;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::sync::{LazyLock, PoisonError, RwLock};

/// The word of a name, such as `q`. Its text is kept and looked at once per process, so words are copied and
/// compared without it: there are many values, and few words.
#[derive(Clone, Copy)]
pub struct Hint(&'static NameWord);

/// The text of a word, and what follows from it for names.
struct NameWord {
    text: &'static str,
    /// It has only letters, digits, `_` and `.`: anything else is not read as part of a name.
    is_legal: bool,
    /// It is legal, not empty, and has no dot: behind a layer it is read as it is.
    is_plain: bool,
    /// It begins like a prefix.
    is_like_prefix: bool,
}

impl NameWord {
    fn new(text: &str) -> NameWord {
        let of_word = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.');
        let is_legal = text.bytes().all(of_word);
        NameWord {
            is_legal,
            is_plain: is_legal && !text.is_empty() && !text.contains('.'),
            is_like_prefix: text.starts_with(['d', 'l']),
            text: Box::leak(text.into()),
        }
    }
}

impl From<&str> for Hint {
    fn from(text: &str) -> Hint {
        type All = HashMap<&'static str, Hint>;
        static ALL: LazyLock<RwLock<All>> = LazyLock::new(Default::default);
        let known = ALL.read().unwrap_or_else(PoisonError::into_inner).get(text).copied();
        known.unwrap_or_else(|| {
            let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
            all.get(text).copied().unwrap_or_else(|| {
                let hint = Hint(Box::leak(Box::new(NameWord::new(text))));
                all.insert(hint.0.text, hint);
                hint
            })
        })
    }
}

impl From<String> for Hint {
    fn from(text: String) -> Hint {
        text.as_str().into()
    }
}

/// The word with more behind it.
impl std::ops::Add<&str> for Hint {
    type Output = Hint;
    fn add(self, more: &str) -> Hint {
        [&self, more].concat().into()
    }
}

impl Hint {
    /// The word, which stays as long as the program runs.
    pub(super) fn text(self) -> &'static str {
        self.0.text
    }
}

impl std::ops::Deref for Hint {
    type Target = str;
    fn deref(&self) -> &str {
        self.0.text
    }
}

impl PartialEq for Hint {
    fn eq(&self, other: &Hint) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Hint {}

impl PartialEq<str> for Hint {
    fn eq(&self, other: &str) -> bool {
        **self == *other
    }
}

impl PartialEq<&str> for Hint {
    fn eq(&self, other: &&str) -> bool {
        **self == **other
    }
}

impl Hash for Hint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(std::ptr::from_ref(self.0) as usize);
    }
}

/// As their texts.
impl Ord for Hint {
    fn cmp(&self, other: &Hint) -> Ordering {
        (**self).cmp(other)
    }
}

impl PartialOrd for Hint {
    fn partial_cmp(&self, other: &Hint) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl std::fmt::Display for Hint {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self)
    }
}

impl std::fmt::Debug for Hint {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:?}", self.0.text)
    }
}

/// Name of a value: `%d_l3.q.1` is a gradient (`d_`), of layer 3, hinted `q`, the second of that name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Name {
    pub grad: bool,
    pub layer: Option<u32>,
    pub hint: Hint,
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
        Name { grad, layer, hint: t.into(), dup }
    }

    /// True if its text reads back as this name.
    pub fn is_readable(&self) -> bool {
        let word = self.hint.0;
        let numbers = self.layer.unwrap_or(0).max(self.dup) < MAX_NUMBER;
        if !numbers || !word.is_legal {
            return false;
        }
        // Only a hint with a dot, or that begins like a prefix, can be read in two ways.
        if word.is_plain && !(self.layer.is_none() && word.is_like_prefix) {
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
        out.push('%');
        if self.grad {
            out.push_str("d_");
        }
        if let Some(l) = self.layer {
            out.push('l');
            push_number(l as usize, out);
            out.push('.');
        }
        out.push_str(&self.hint);
        if self.dup > 0 {
            out.push('.');
            push_number(self.dup as usize, out);
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

/// Numbers in use of a name: all below `next`, `other`, and those of `others`.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken {
    next: u32,
    /// One of the others, if not 0: mostly there is no second.
    other: u32,
    others: BTreeSet<u32>,
}

impl Taken {
    /// The wanted number if it is free, else the first free one.
    pub(super) fn take(&mut self, wanted: u32) -> u32 {
        if wanted > self.next && self.add(wanted) {
            return wanted;
        }
        let n = self.next;
        self.next += 1;
        while self.remove(self.next) {
            self.next += 1;
        }
        n
    }

    /// Adds one of the others, above 0; false if it is there.
    fn add(&mut self, n: u32) -> bool {
        match self.other {
            0 if self.others.is_empty() => self.other = n,
            own if own == n => return false,
            _other => return self.others.insert(n),
        }
        true
    }

    fn remove(&mut self, n: u32) -> bool {
        if self.other == n {
            self.other = 0;
            return true;
        }
        self.others.remove(&n)
    }
}
