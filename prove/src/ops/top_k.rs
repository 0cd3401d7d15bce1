//! The places of the largest elements along a letter.

use super::*;

/// By the rule, so many.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TopK(pub Pattern, pub usize);

impl Function for TopK {
    fn name(&self) -> String {
        format!("top_k[{}; {}]", self.0, self.1)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let (p, x) = (&self.0, x[0]);
        let from = Pattern::own(&p.ins[0], &[&p.out]).ok_or("no letter is searched")?;
        let to = Pattern::own(&p.out, &[&p.ins[0]]).ok_or("no letter counts")?;
        let mut rows = shape.to_vec();
        rows[to] = 1;
        let mut out = Tensor::full(shape, 0);
        each(&rows, |i| {
            let value = |e: usize| x.at(&indexed::index(&p.ins[0], &p.out, i, e));
            let mut order: Vec<usize> = (0..x.shape[from]).collect();
            order.sort_by_key(|&e| (std::cmp::Reverse(value(e)), e));
            for (n, &e) in order.iter().take(self.1).enumerate() {
                let mut j = i.to_vec();
                j[to] = n;
                let place = out.place(&j);
                out.data[place] = e as u64;
            }
        });
        Ok(vec![out])
    }
}

/// The dim that is searched, and the dim of the result that counts: the letters that the other
/// lacks.
fn dims(rule: &Rule) -> Option<[usize; 2]> {
    let only = |a: &Dims, b: &Dims| {
        let mut found = (0..a.len()).filter(|&d| !b.contains(&a[d]));
        found.next().filter(|_| found.next().is_none())
    };
    Some([only(&rule.ins[0], &rule.outs[0])?, only(&rule.outs[0], &rule.ins[0])?])
}

impl Law for ops::TopK {
    /// Both letters are whole, and the second one has the size.
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let mut rule = given(&self.rule.0, 1, ranks)?.into_owned();
        let [from, to] = dims(&rule)?;
        let [searched, counts] = [rule.ins[0][from].single()?, rule.outs[0][to].single()?];
        [searched, counts].into_iter().for_each(|l| rule.keep_whole(l));
        matches!(self.sizes.0[..], [(l, _)] if l == counts).then_some(Cow::Owned(rule))
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { kinds: ["n", "i"], ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        let Some([from, to]) = dims(&self.rule.0) else { return };
        let [all, few] = [small.letter(0, Some(from)), small.letter(1, Some(to))];
        let rest = usize::from(small.was(all) > small.was(few));
        small.set(all, small.is(few) + rest);
    }
    fn multiples(&self, _: &[&Type]) -> Result<Vec<Multiple>, String> {
        Err(parts::UNTIED.into())
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::TopK { rule, sizes } = self;
        let k = sizes.0.first().ok_or("no letter is replaced")?.1;
        Ok(Some(TopK(pattern(&rule.0)?, k).into()))
    }
    fn is_constant(&self) -> bool {
        true
    }
}
