//! How terms are shown, and where two of them begin to differ.

use crate::number::Coef;
use crate::term::{Node, Store, Term};

/// Most terms of a sum that are shown.
const MOST_TERMS: usize = 6;

impl Store {
    /// The term as text, to a depth; what is deeper has its number.
    pub fn show(&self, t: Term, depth: usize) -> String {
        let inner = |t: &Term| self.show(*t, depth.saturating_sub(1));
        match self.node(t) {
            Node::Leaf(name) => name.to_string(),
            Node::Product(f) if f.is_empty() => "1".into(),
            _deep if depth == 0 => format!("#{}", t.0),
            Node::Apply(f, args, out) => {
                let args: Vec<String> = args.iter().map(inner).collect();
                let number = if *out > 0 { format!(".{out}") } else { String::new() };
                format!("{}{number}({})", f.name(), args.join(", "))
            }
            Node::Product(f) => {
                let word = |l: &[u8]| l.iter().map(|&x| char::from(b'a' + x % 26)).collect();
                let all: Vec<String> = f
                    .iter()
                    .map(|(t, l)| {
                        let letters: String = word(l);
                        format!("{}[{letters}]", inner(t))
                    })
                    .collect();
                let out: String = word(&(0..self.shape(t).len() as u8).collect::<Vec<_>>());
                format!("<{} -> {out}>", all.join(" · "))
            }
            Node::Sum(s) if self.sums.len(*s) == 0 => "0".into(),
            Node::Sum(s) => {
                let s = self.sums.list(*s);
                let one = |(c, t): &(Coef, Term)| match *c {
                    Coef::ONE => inner(t),
                    _other => format!("{c}·{}", inner(t)),
                };
                let more = match s.len().saturating_sub(MOST_TERMS) {
                    0 => String::new(),
                    more => format!(" + {more} more"),
                };
                let all: Vec<String> = s.iter().take(MOST_TERMS).map(one).collect();
                format!("({}{more})", all.join(" + "))
            }
        }
    }

    /// The terms of which the text has the numbers alone, in its order.
    pub fn numbered(&self, t: Term, depth: usize, out: &mut Vec<Term>) {
        let inner: Vec<Term> = match self.node(t) {
            Node::Leaf(_) => return,
            Node::Product(f) if f.is_empty() => return,
            _deep if depth == 0 => {
                if !out.contains(&t) {
                    out.push(t);
                }
                return;
            }
            Node::Apply(_, args, _) => args.to_vec(),
            Node::Product(f) => f.iter().map(|x| x.0).collect(),
            Node::Sum(s) => self.sums.list(*s).iter().take(MOST_TERMS).map(|x| x.1).collect(),
        };
        inner.into_iter().for_each(|t| self.numbered(t, depth - 1, out));
    }

    /// The first place where two terms differ: as far down as only one operand, term or factor does.
    pub fn differ(&self, a: Term, b: Term) -> (Term, Term) {
        let (mut a, mut b) = (a, b);
        loop {
            let next = match (self.node(a), self.node(b)) {
                (Node::Apply(f, x, i), Node::Apply(g, y, j)) if (f, i) == (g, j) => {
                    single(x.iter().zip(y.iter()).filter(|(p, q)| p != q))
                        .filter(|_| x.len() == y.len())
                        .map(|(p, q)| (*p, *q))
                }
                (Node::Sum(x), Node::Sum(y)) => {
                    let [x, y] = [x, y].map(|s| self.sums.list(*s));
                    let p = single(x.iter().filter(|e| !y.contains(e)));
                    let q = single(y.iter().filter(|e| !x.contains(e)));
                    p.zip(q).filter(|(p, q)| p.0 == q.0).map(|(p, q)| (p.1, q.1))
                }
                // Letters are named after the factors, so one other factor may rename them all.
                (Node::Product(x), Node::Product(y)) => {
                    let p = single(x.iter().filter(|e| y.iter().all(|f| f.0 != e.0)));
                    let q = single(y.iter().filter(|e| x.iter().all(|f| f.0 != e.0)));
                    p.zip(q).map(|(p, q)| (p.0, q.0))
                }
                _apart => None,
            };
            match next {
                Some((p, q)) if p != q => (a, b) = (p, q),
                _here => return (a, b),
            }
        }
    }
}

/// The only item.
fn single<T>(mut it: impl Iterator<Item = T>) -> Option<T> {
    it.next().filter(|_| it.next().is_none())
}
