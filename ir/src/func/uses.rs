//! Def-use chains: which node makes each value of a function, and which read it.

use super::{Func, Node, Value, ValueMap};
use crate::ids::Id;

/// One operand of one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    pub node: u32,
    pub operand: u32,
}

impl Use {
    /// The number of the node.
    pub fn at(self) -> usize {
        self.node as usize
    }
}

/// Who makes and reads the values of a function, as it was when this was asked for.
#[derive(Clone, Debug)]
pub struct Uses {
    makers: ValueMap<Option<u32>>,
    /// By value: where its uses begin; they end where those of the next value begin.
    begin: Vec<u32>,
    /// Uses by value, each in the order of the program.
    all: Vec<Use>,
    /// How many results each value is.
    results: ValueMap<u32>,
}

impl Uses {
    /// The node that makes a value; `None` for arguments.
    pub fn maker(&self, v: Value) -> Option<usize> {
        self.makers[v].map(|m| m as usize)
    }

    /// The node that makes a value, of the function that was asked for this.
    pub fn made_by<'a>(&self, nodes: &'a [Node], v: Value) -> Option<&'a Node> {
        self.maker(v).map(|m| &nodes[m])
    }

    /// The operands that a value is, in the order of the program.
    pub fn of(&self, v: Value) -> &[Use] {
        let i = v.index();
        &self.all[self.begin[i] as usize..self.begin[i + 1] as usize]
    }

    /// The numbers of the nodes that read a value, in the order of the program: one per operand.
    pub fn users(
        &self,
        v: Value,
    ) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator + Clone {
        self.of(v).iter().map(|u| u.at())
    }

    /// True if a value is a result of the function.
    pub fn is_result(&self, v: Value) -> bool {
        self.results[v] > 0
    }

    /// How many operands and results a value is.
    pub fn count(&self, v: Value) -> usize {
        self.of(v).len() + self.results[v] as usize
    }

    /// The operand that a value is, if it is one, and nothing else reads it.
    pub fn only_use(&self, v: Value) -> Option<Use> {
        match self.of(v) {
            &[one] if !self.is_result(v) => Some(one),
            _several_or_none => None,
        }
    }

    /// The node that reads a value, if no other one does and it is no result.
    pub fn only_user(&self, v: Value) -> Option<usize> {
        self.only_use(v).map(|u| u.at())
    }
}

impl Func {
    /// Who makes and reads each value. Of a function that is changed, it is asked for again.
    pub fn uses(&self) -> Uses {
        let mut results = self.per_value(0);
        self.results.iter().for_each(|r| results[r.value] += 1);
        let mut begin = vec![0; self.values.len() + 1];
        let operands = || {
            self.nodes.iter().enumerate().flat_map(|(i, n)| {
                (0u32..).zip(&n.ins).map(move |(operand, v)| (*v, Use { node: i as u32, operand }))
            })
        };
        operands().for_each(|(v, _)| begin[v.index() + 1] += 1);
        for i in 1..begin.len() {
            begin[i] += begin[i - 1];
        }
        let mut next = begin.clone();
        let mut all = vec![Use { node: 0, operand: 0 }; begin[self.values.len()] as usize];
        for (v, u) in operands() {
            let at = &mut next[v.index()];
            all[*at as usize] = u;
            *at += 1;
        }
        Uses { makers: self.makers(), begin, all, results }
    }

    /// The node that makes each value; `None` for arguments.
    pub fn makers(&self) -> ValueMap<Option<u32>> {
        let mut makers = self.per_value(None);
        for (i, n) in self.nodes.iter().enumerate() {
            n.outs.iter().for_each(|&o| makers[o] = Some(i as u32));
        }
        makers
    }

    /// By value: the one whose memory it is; of a view that of its operand.
    pub fn roots(&self) -> ValueMap<Value> {
        let mut roots = self.identity();
        for n in self.nodes.iter().filter(|n| n.op.def().is_view()) {
            roots[n.outs[0]] = roots[n.ins[0]];
        }
        roots
    }

    /// Values that some node or result reads.
    pub fn read(&self) -> ValueMap<bool> {
        let mut read = self.per_value(false);
        self.nodes.iter().flat_map(|n| &n.ins).for_each(|&v| read[v] = true);
        self.results.iter().for_each(|r| read[r.value] = true);
        read
    }
}

#[cfg(test)]
mod tests {
    use crate::text::parse;

    /// An operand that is read twice by one node, a result, an argument that nothing reads.
    #[test]
    fn operands_and_results_are_counted() {
        let text = "mesh []\n\nfunc @f(%x: f32[4], %y: f32[4]) -> (f32[4], f32[4]) {\n  \
                    %a = add %x, %x : f32[4]\n  %b = exp %a : f32[4]\n  %c = exp %a : f32[4]\n  \
                    return %b, %b\n}\n";
        let m = parse(text).unwrap_or_else(|e| panic!("{e}"));
        let f = &m.funcs[0];
        let uses = f.uses();
        let [x, y, a, b, c] = f.values.ids().collect::<Vec<_>>()[..] else { panic!("five values") };
        let operands: Vec<u32> = uses.of(x).iter().map(|u| u.operand).collect();
        assert_eq!((operands, uses.users(x).collect()), (vec![0, 1], vec![0, 0]));
        assert_eq!([x, a, b].map(|v| uses.maker(v)), [None, Some(0), Some(1)]);
        assert_eq!(uses.users(a).collect::<Vec<_>>(), [1, 2]);
        assert_eq!([x, y, a, b, c].map(|v| uses.count(v)), [2, 0, 2, 2, 0]);
        assert!(uses.is_result(b) && !uses.is_result(c));
        assert_eq!(uses.only_user(a), None);
        let read: Vec<bool> = f.read().into_iter().collect();
        assert_eq!(read, [true, false, true, true, false]);
    }
}
