//! Functions of two numbers, and a choice by a third, element by element; a rule spreads smaller
//! operands.

use super::*;

/// A function of two numbers: `max`, `min`, `less`, `equal`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Both(pub &'static str);

impl Function for Both {
    fn name(&self) -> String {
        self.0.into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let name = seed(self.0);
        Ok(vec![match self.0 {
            "equal" => pointwise(x, |v| u64::from(v[0] == v[1])),
            _unknown => pointwise(x, |v| oracle(name, v)),
        }])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Signature> {
        each::own_letters(args, rank)
    }
}

/// The second where the first is not 0, else the third.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Select;

impl Function for Select {
    fn name(&self) -> String {
        "select".into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![pointwise(x, |v| if v[0] != 0 { v[1] } else { v[2] })])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Signature> {
        each::own_letters(args, rank)
    }
}

/// A function of the elements of tensors of one shape.
fn pointwise(x: &[&Tensor], f: impl Fn(&[u64]) -> u64) -> Tensor {
    Tensor::from_fn(&x[0].shape, |i| f(&x.iter().map(|t| t.at(i)).collect::<Vec<_>>()))
}

/// Declares what is believed of functions of several numbers: how many, what their types follow
/// from, the operands that are drawn, and the derivative; one that is `constant` has none.
macro_rules! pairs {
    ($($op:ident of $n:literal is $function:expr, $typing:expr
       $(, draws |$x:ident| $draws:expr)? $(, constant $constant:literal)?
       $(, back |$k:ident, $at:ident| $back:expr)?;)*) => {$(
        impl Law for ops::$op {
            fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                let ops::$op { rule } = self;
                broadcast(&rule.0, Some($n), ranks)
            }
            fn typing(&self) -> Option<Typing> {
                Some($typing)
            }
            $(fn operands(&self, $x: &mut Operands) {
                $draws
            })?
            fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
                Ok(Some($function.into()))
            }
            fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
                let parts = t.spread(self)?;
                Ok(t.call(&$function.into(), &parts))
            }
            fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
                let parts = e.spread(self)?;
                $function.results(&parts.iter().collect::<Vec<_>>(), e.shape, e.at)
            }
            $(fn is_constant(&self) -> bool {
                $constant
            })?
            $(fn back(&self, $at: &mut At) -> Result<Back, String> {
                let $k = self;
                $back
            })?
        }
    )*};
}

pairs! {
    Max of 2 is Both("max"), NONLINEAR, back |k, at| larger(k, at, [0, 1]);
    Min of 2 is Both("min"), NONLINEAR, back |k, at| larger(k, at, [1, 0]);
    Less of 2 is Both("less"), COMPARES, draws |x| few(x), constant true;
    Equal of 2 is Both("equal"), COMPARES, draws |x| few(x), constant true;
    // Linear in what is selected; the mask stays the same.
    Select of 3 is Select,
        Typing { linear: Linear::Together(&[1, 2]), kinds: ["ntt", "t"], ..NONLINEAR },
        draws |x| x.all[0] = x.noise(0).map(|v| v % 2),
        back |k, at| selected(k, at);
}

const COMPARES: Typing = Typing { kinds: ["s", "n"], ..NONLINEAR };

/// Few numbers, so that some are equal.
fn few(x: &mut Operands) {
    for i in 0..x.all.len() {
        x.all[i] = x.noise(i).map(|v| v % 3);
    }
}

/// The operands with the dims of the result, and the letters of operands and result.
fn spread(law: &dyn Law, at: &mut At) -> Result<(Vec<Term>, Vec<Vec<Letter>>), String> {
    let r = at.rule(law)?;
    let mut all = r.ins.iter().chain(&r.outs).map(letters).collect::<Result<Vec<_>, _>>()?;
    let shape = at.s.shape(at.y[0]).to_vec();
    let out = all.last().cloned().unwrap_or_default();
    let mut parts = vec![];
    for (&x, own) in at.x.iter().zip(&all) {
        parts.push(at.s.product(&[(x, own.clone())], &out, &shape)?);
    }
    all.truncate(at.x.len() + 1);
    Ok((parts, all))
}

/// y = one of two: the second where `less` of these two is 1, else the first.
fn larger(law: &dyn Law, at: &mut At, less: [usize; 2]) -> Result<Back, String> {
    let (g, (parts, dims)) = (at.d()?, spread(law, at)?);
    let second = at.both("less", less.map(|i| parts[i]));
    let first = at.affine(-1.0, second, 1.0);
    let mut back = vec![];
    for (i, mask) in [first, second].into_iter().enumerate() {
        let (shape, out) = (at.shape(i), &dims[2]);
        let factors = [(g, out.clone()), (mask, out.clone())];
        back.push(Some(at.s.product(&factors, &dims[i], &shape)?));
    }
    Ok(back)
}

/// y = a where m, else b: d where m, and d where not.
fn selected(law: &dyn Law, at: &mut At) -> Result<Back, String> {
    let (g, (parts, dims)) = (at.d()?, spread(law, at)?);
    let whole = at.s.shape(g).to_vec();
    let zero = at.s.fill(Coef::of(0.0).expect("a number"), &whole);
    let mut back = vec![None];
    for (i, from) in [(1, [g, zero]), (2, [zero, g])] {
        let t = at.s.apply(Select, &[parts[0], from[0], from[1]], 0, &whole);
        let shape = at.shape(i);
        back.push(Some(at.s.product(&[(t, dims[3].clone())], &dims[i], &shape)?));
    }
    Ok(back)
}
