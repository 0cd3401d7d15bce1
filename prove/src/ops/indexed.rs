//! What indices choose from a table, or add to one. An index that is not in a rank's piece gives 0,
//! or adds to nothing.

use super::*;

/// With an index of padding, whose elements are 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Take(pub Pattern, pub Option<usize>);

/// With an index of padding, to which nothing is added.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct IndexAdd(pub Pattern, pub Option<usize>);

fn but(padding: Option<usize>) -> String {
    padding.map(|p| format!("; padding {p} is 0")).unwrap_or_default()
}

impl Function for Take {
    fn name(&self) -> String {
        format!("take[{}{}]", self.0, but(self.1))
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], at: &Begins) -> Result<Vec<Tensor>, String> {
        indexed(true, (&self.0, self.1), [x[0], x[1]], shape, at)
    }
    fn is_linear(&self) -> bool {
        true
    }
    fn letters(&self, _: usize, _: usize) -> Option<Signature> {
        Some(self.0.wide())
    }
}

impl Function for IndexAdd {
    fn name(&self) -> String {
        format!("put[{}{}]", self.0, but(self.1))
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], at: &Begins) -> Result<Vec<Tensor>, String> {
        indexed(false, (&self.0, self.1), [x[0], x[1]], shape, at)
    }
    fn is_linear(&self) -> bool {
        true
    }
    fn letters(&self, _: usize, _: usize) -> Option<Signature> {
        Some(self.0.wide())
    }
}

/// Index of a tensor with these letters, from that of another; `own` where the other lacks one.
pub(super) fn index(letters: &[u8], of: &[u8], i: &[usize], own: usize) -> Vec<usize> {
    letters.iter().map(|l| of.iter().position(|m| m == l).map_or(own, |d| i[d])).collect()
}

/// The place of an index in a piece of `n` that begins at `begin`, if it is there and no padding.
fn place(index: i64, padding: Option<usize>, begin: i64, n: usize) -> Option<usize> {
    let here = usize::try_from(index - begin).ok().filter(|k| *k < n)?;
    (padding.is_none_or(|p| p as i64 != index)).then_some(here)
}

/// What indices choose from the first operand, or add to the result: the other has a letter less.
fn indexed(
    takes: bool,
    (p, padding): (&Pattern, Option<usize>),
    [x, n]: [&Tensor; 2],
    shape: &[usize],
    at: &Begins,
) -> Result<Vec<Tensor>, String> {
    let (table, rest) = if takes { (&p.ins[0], &p.out) } else { (&p.out, &p.ins[0]) };
    let dim = Pattern::own(table, &[&p.ins[1], rest]).ok_or("no letter is indexed")?;
    let (begin, size) = match takes {
        true => ((at.operand)(0, dim), x.shape[dim]),
        false => ((at.result)(dim), shape[dim]),
    };
    let mut out = Tensor::full(shape, 0);
    each(if takes { shape } else { &x.shape }, |i| {
        let k = n.integer(&index(&p.ins[1], rest, i, 0));
        let Some(k) = place(k, padding, begin as i64, size) else { return };
        let there = index(table, rest, i, k);
        if takes {
            let here = out.place(i);
            out.data[here] = x.at(&there);
        } else {
            out.add_at(&there, x.at(i));
        }
    });
    Ok(vec![out])
}

/// Of the letter that is indexed, every place and none.
fn indices(x: &mut Operands) {
    let sizes = x.all.iter().flat_map(|t| t.shape.clone());
    let most = sizes.chain(x.o.outs[0].ty.sizes()).max().unwrap_or(1) as u64;
    x.all[1] = x.noise(1).map(|v| if v % 7 == 6 { -100i64 as u64 } else { v % most.max(1) });
}

/// The pattern of what goes the other way.
fn mirrored(p: &Pattern) -> Pattern {
    let mut seen: Vec<u8> = vec![];
    let mut rename = |l: &Vec<u8>| -> Vec<u8> {
        let one = |x: &u8| {
            seen.iter().position(|s| s == x).unwrap_or_else(|| {
                seen.push(*x);
                seen.len() - 1
            }) as u8
        };
        l.iter().map(one).collect()
    };
    let ins = vec![rename(&p.out), rename(&p.ins[1])];
    Pattern { ins, out: rename(&p.ins[0]) }
}

impl Law for ops::Take {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        given(&self.rule.0, 2, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::Each(&[0]), lost: SUM, kinds: ["si", "s"], ..NONLINEAR })
    }
    fn operands(&self, x: &mut Operands) {
        indices(x);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Take { rule, padding } = self;
        Ok(Some(Take(pattern(&rule.0)?, padding.zero()).into()))
    }
    /// What was taken is put at its index: d and index are operands, x is the result.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (d, shape, p) = (at.d()?, at.shape(0), mirrored(&pattern(&self.rule.0)?));
        // A padding token's row has no gradient, be it looked up or 0.
        let put = IndexAdd(p, self.padding.index());
        Ok(vec![Some(at.s.apply(put, &[d, at.x[1]], 0, &shape)), None])
    }
}

impl Law for ops::IndexAdd {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        given(&self.rule.0, 2, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        let linear = Linear::Each(&[0]);
        Some(Typing { linear, lost: SUM, makes: true, kinds: ["ni", "n"], ..NONLINEAR })
    }
    fn operands(&self, x: &mut Operands) {
        indices(x);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::IndexAdd { rule, sizes: _, padding } = self;
        Ok(Some(IndexAdd(pattern(&rule.0)?, padding.zero()).into()))
    }
    /// What was put is taken from its index.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (d, shape, p) = (at.d()?, at.shape(0), mirrored(&pattern(&self.rule.0)?));
        let take = Take(p, self.padding.zero());
        Ok(vec![Some(at.s.apply(take, &[d, at.x[1]], 0, &shape)), None])
    }
}
