//! Changes of a function that are queued, and made at once.

use super::{Func, Node, Value, ValueMap};

/// What is to change in a function. Until it does, its nodes have the numbers that they had when this was begun,
/// so that what is known of them (as [`Func::uses`]) stays true meanwhile. Values may be added.
#[derive(Debug)]
pub struct Patch {
    /// By node: it goes.
    erased: Vec<bool>,
    /// New nodes, and the number of the one that they stand before.
    inserted: Vec<(usize, Node)>,
    /// What is read in place of each value that was there: itself, until that changes.
    now: ValueMap<Value>,
    replaces: bool,
}

impl Patch {
    /// No change of a function.
    pub fn of(f: &Func) -> Patch {
        Patch {
            erased: vec![false; f.nodes.len()],
            inserted: vec![],
            now: f.identity(),
            replaces: false,
        }
    }

    /// Lets all that read a value, results and new nodes too, read another one.
    pub fn replace(&mut self, old: Value, new: Value) {
        self.now[old] = new;
        self.replaces = true;
    }

    /// Takes a node away.
    pub fn erase(&mut self, node: usize) {
        self.erased[node] = true;
    }

    /// Puts a node before another one, or at the end if there is none of this number; behind those that
    /// were put there already.
    pub fn insert(&mut self, before: usize, node: Node) {
        self.inserted.push((before, node));
    }

    /// Puts a node behind another one.
    pub fn insert_after(&mut self, node: usize, new: Node) {
        self.insert(node + 1, new);
    }

    /// What is read in place of a value, so far.
    pub fn now(&self, mut v: Value) -> Value {
        while let Some(&new) = self.now.find(v).filter(|new| **new != v) {
            v = new;
        }
        v
    }

    /// Makes the changes.
    pub fn apply(mut self, f: &mut Func) {
        let mut inserted = std::mem::take(&mut self.inserted);
        inserted.sort_by_key(|x| x.0);
        let mut inserted = inserted.into_iter().peekable();
        let old = std::mem::take(&mut f.nodes);
        f.nodes.reserve(old.len() + inserted.len());
        for (i, n) in old.into_iter().enumerate() {
            while let Some((_, new)) = inserted.next_if(|x| x.0 <= i) {
                f.nodes.push(new);
            }
            if !self.erased[i] {
                f.nodes.push(n);
            }
        }
        f.nodes.extend(inserted.map(|x| x.1));
        if self.replaces {
            let read = f.nodes.iter_mut().flat_map(|n| &mut n.ins);
            let read = read.chain(f.results.iter_mut().map(|r| &mut r.value));
            read.for_each(|v| *v = self.now(*v));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Exp;
    use crate::text::{parse, print};

    /// New nodes stand in the order in which they were given; what replaces a value may be replaced itself.
    #[test]
    fn changes_are_made_at_once() {
        let text = "mesh []\n\nfunc @f(%x: f32[4]) -> (f32[4]) {\n  %a = exp %x : f32[4]\n  \
                    %b = exp %a : f32[4]\n  %c = add %a, %b : f32[4]\n  return %c\n}\n";
        let mut m = parse(text).unwrap_or_else(|e| panic!("{e}"));
        let f = &mut m.funcs[0];
        let [x, a, b, c] = f.values.ids().collect::<Vec<_>>()[..] else { panic!("four values") };
        let mut patch = Patch::of(f);
        let [d, e] = ["d", "e"].map(|hint| {
            let name = crate::func::Name { hint: hint.into(), ..f.name(x).clone() };
            f.value(f.ty(x).clone(), name)
        });
        let node = |of, out| Node::new(Exp {}, &[of], &[out], Default::default());
        patch.insert_after(2, node(c, e));
        patch.insert(1, node(b, d));
        patch.erase(1);
        patch.replace(b, a);
        patch.replace(a, x);
        patch.apply(f);
        f.results[0].value = e;
        let lines = "  %a = exp %x : f32[4]\n  %d = exp %x : f32[4]\n  %c = add %x, %x : f32[4]\n  \
                     %e = exp %c : f32[4]\n  return %e\n";
        assert!(print(&m).contains(lines), "{}", print(&m));
    }
}
