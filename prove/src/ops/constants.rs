//! Tensors of no operands, and numbers at random.

use super::*;

/// The numbers, as bits of f32.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Literal(pub Arc<[u32]>);

impl Function for Literal {
    fn name(&self) -> String {
        let first: Vec<String> =
            self.0.iter().take(4).map(|b| format!("{:?}", f32::from_bits(*b))).collect();
        format!("literal[{}{}]", first.join(", "), if self.0.len() > 4 { ", …" } else { "" })
    }
    fn results(&self, _: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let data = self.0.iter().map(|b| number(f64::from(f32::from_bits(*b)))).collect();
        Ok(vec![Tensor { shape: shape.to_vec(), data }])
    }
}

/// Numbers at random of a stream: by the rule, from what, with its name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Draw(pub Pattern, pub Arc<str>, pub Arc<str>);

impl Function for Draw {
    fn name(&self) -> String {
        format!("draw[{}; from={}; stream={}]", self.0, self.1, self.2)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], at: &Begins) -> Result<Vec<Tensor>, String> {
        let (p, name, none) = (&self.0, seed(&self.name()), vec![]);
        let place = p.ins.get(1).unwrap_or(&none);
        Ok(vec![Tensor::from_fn(shape, |i| {
            let mut args = x[0].data.clone();
            args.extend(x.get(1).map(|t| t.at(&indexed::index(place, &p.out, i, 0))));
            let own = (0..i.len()).filter(|&d| !place.contains(&p.out[d]));
            args.extend(own.map(|d| ((at.result)(d) + i[d]) as u64));
            oracle(name, &args)
        })])
    }
}

impl Law for ops::Literal {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        ranks.is_empty().then(|| Rule::same(0, 1, 1))
    }
    fn typing(&self) -> Option<Typing> {
        None
    }
    fn held(&self, _: &Mesh, held: &[&Held], outs: &[&Type]) -> Result<Vec<Vec<Block>>, Fault> {
        match (held, outs) {
            ([], [t]) if t.marked().is_empty() && t.dtype.is_float() => {
                match t.sizes()[..] == [self.values.len()] {
                    true => Ok(vec![vec![]]),
                    false => wrong("it has another size".into()),
                }
            }
            _other => wrong("a literal is an invariant vector".into()),
        }
    }
    fn shrink(&mut self, small: &mut Small) {
        let n = small.sizes.values().product::<usize>().min(self.values.len());
        self.values = self.values[..n].into();
        small.sizes.values_mut().for_each(|size| *size = n);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Literal { values } = self;
        Ok(Some(Literal(values.iter().map(|x| x.to_bits()).collect()).into()))
    }
}

impl Law for ops::Fill {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        ranks.is_empty().then(|| Rule::same(0, 1, 0))
    }
    fn typing(&self) -> Option<Typing> {
        None
    }
    fn held(&self, _: &Mesh, held: &[&Held], outs: &[&Type]) -> Result<Vec<Vec<Block>>, Fault> {
        match (held, outs) {
            ([], [t]) if self.value == 0.0 || t.partial().is_empty() => {
                match t.varying.is_empty() {
                    true => Ok(vec![vec![]]),
                    false => Err(Fault::Unknown("a number that varies".into())),
                }
            }
            _other => wrong("parts of a number have another sum".into()),
        }
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        Ok(vec![t.s.fill(coef(self.value)?, t.shape())])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        Ok(vec![Tensor::full(e.shape, number(self.value))])
    }
}

impl Law for ops::Draw {
    /// The letter of the run is whole.
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let taken = matches!(ranks.len(), 1 | 2);
        let mut rule = given(&self.rule.0, ranks.len(), ranks).filter(|_| taken)?.into_owned();
        let run = rule.ins[0].first()?.single()?;
        rule.keep_whole(run);
        Some(Cow::Owned(rule))
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { makes: true, kinds: ["i", "n"], ..NONLINEAR })
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Draw { rule, from, stream, sizes: _ } = self;
        let from = format!("{from:?}").into();
        Ok(Some(Draw(pattern(&rule.0)?, from, stream.0.clone()).into()))
    }
    fn is_constant(&self) -> bool {
        true
    }
}
