//! Who sees whom in attention, by positions.

use crate::attr::{Attr, AttrCx, read_size};
use crate::mesh::Mesh;
use std::fmt;

/// Which keys a query sees, by their positions: a key at k is seen from q if q - left <= k <= q + right,
/// and both are in one chunk. A limit that is `None` is none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Mask {
    /// How far before a query keys are seen.
    pub left: Option<usize>,
    /// How far behind it.
    pub right: Option<usize>,
    /// Positions are cut into chunks of so many, at least 1: ⌊k / chunk⌋ = ⌊q / chunk⌋.
    pub chunk: Option<usize>,
}

impl Mask {
    /// Every query sees every key.
    pub const FULL: Mask = Mask { left: None, right: None, chunk: None };
    /// No key behind the query.
    pub const CAUSAL: Mask = Mask { right: Some(0), ..Mask::FULL };

    /// Causal; with a window of so many keys, at least 1, the query's own among them.
    pub fn causal(window: Option<usize>) -> Mask {
        Mask { left: window.map(|w| w.saturating_sub(1)), ..Mask::CAUSAL }
    }

    /// What keys see of queries: the same pairs.
    pub fn turned(self) -> Mask {
        Mask { left: self.right, right: self.left, chunk: self.chunk }
    }

    /// The first and the last position that are seen from one. Both ascend with it.
    pub fn reach(self, from: i32) -> [i32; 2] {
        let wide = |n: Option<usize>| n.map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        let at = i64::from(from);
        let mut first = wide(self.left).map_or(i64::MIN, |n| at.saturating_sub(n));
        let mut last = wide(self.right).map_or(i64::MAX, |n| at.saturating_add(n));
        if let Some(chunk) = wide(self.chunk).filter(|&c| c > 0) {
            let begin = at - at.rem_euclid(chunk);
            first = first.max(begin);
            last = last.min(begin.saturating_add(chunk - 1));
        }
        let near = |x: i64| x.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
        [near(first), near(last)]
    }

    /// Says what is wrong with it.
    pub(crate) fn accepts(self) -> Result<(), String> {
        match self.chunk {
            Some(0) => Err("a chunk has at least 1 position".into()),
            _ => Ok(()),
        }
    }
}

/// `full`, `causal`, or the range of keys that are seen from position 0, as `-4..0`; behind it the chunk, as
/// in `causal/8`.
impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match (self.left, self.right) {
            (None, None) => f.write_str("full"),
            (None, Some(0)) => f.write_str("causal"),
            (left, right) => {
                if let Some(n) = left {
                    f.write_str(if n == 0 { "" } else { "-" })?;
                    write!(f, "{n}")?;
                }
                f.write_str("..")?;
                right.map_or(Ok(()), |n| write!(f, "{n}"))
            }
        }?;
        self.chunk.map_or(Ok(()), |n| write!(f, "/{n}"))
    }
}

impl Attr for Mask {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        out.push_str(&self.to_string());
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        let (seen, chunk) = match text.split_once('/') {
            Some((seen, n)) => (seen.trim(), Some(read_size(n.trim())?)),
            None => (text, None),
        };
        let limit = |n: &str| match n.trim() {
            "" => Ok(None),
            n => read_size(n).map(Some),
        };
        let mask = match (seen, seen.split_once("..")) {
            ("full", _) => Mask::FULL,
            ("causal", _) => Mask::CAUSAL,
            (_, Some((left, right))) => {
                let before = left.trim();
                let left = match before.strip_prefix('-') {
                    Some(n) => Some(read_size(n)?),
                    None if before.is_empty() || before == "0" => limit(before)?,
                    None => {
                        return Err(format!("`{before}` keys before a query: write `-{before}`"));
                    }
                };
                Mask { left, right: limit(right)?, chunk: None }
            }
            _ => return Err(format!("`{text}` is not a mask: write `causal`, `full` or `-4..0`")),
        };
        Ok(Mask { chunk, ..mask })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Mask, String> {
        Mask::read(text, &AttrCx { mesh: &Mesh::default(), ranks: &[] })
    }

    #[test]
    fn text_is_read_as_it_is_written() {
        let sizes = [None, Some(0), Some(4)];
        for left in sizes {
            for right in sizes {
                for chunk in [None, Some(8)] {
                    let m = Mask { left, right, chunk };
                    assert_eq!(read(&m.to_string()), Ok(m), "{m}");
                }
            }
        }
        assert_eq!(Mask::causal(Some(5)).to_string(), "-4..0");
        assert_eq!(Mask { chunk: Some(3), ..Mask::CAUSAL }.to_string(), "causal/3");
        for bad in
            ["", "none", "5", "4..0", "-..0", "-4..-1", "--4..0", "causal/", "full/x", "-4..0..1"]
        {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    /// The reach of every position is what the definition says, and that of keys its mirror; at the ends
    /// of i32 nothing wraps.
    #[test]
    fn reach_is_the_definition() {
        let sizes = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];
        let near: Vec<i32> = (-9..9).collect();
        let ends = [i32::MIN, i32::MIN + 2, i32::MAX - 1, i32::MAX];
        for (left, right) in sizes.iter().flat_map(|l| sizes.map(move |r| (*l, r))) {
            for chunk in [None, Some(1), Some(4), Some(usize::MAX)] {
                let m = Mask { left, right, chunk };
                let all = || near.iter().chain(&ends);
                for (&q, &k) in all().flat_map(|q| all().map(move |k| (q, k))) {
                    let far = i128::from(q) - i128::from(k);
                    let within = |n: Option<usize>, far: i128| n.is_none_or(|n| far <= n as i128);
                    let of = |at: i32| chunk.map(|c| i128::from(at).div_euclid(c as i128));
                    let seen = within(left, far) && within(right, -far) && of(q) == of(k);
                    let is = |[first, last]: [i32; 2], at: i32| first <= at && at <= last;
                    assert_eq!(is(m.reach(q), k), seen, "{m}: {k} from {q}");
                    assert_eq!(is(m.turned().reach(k), q), seen, "{m}: {q} from {k}");
                }
            }
        }
    }
}
