//! Operands and attributes of a node: data, known numbers as literals or positions, whole numbers, shapes.

use super::folded::Folded;
use super::graph::{Arg, Elem, Id, IntArg, Node};
use super::inputs;
use super::lower::{Lower, MAX_RANK, Val};
use super::room;
use super::view::{Dim, View};
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Cast, Literal};
use shardc_ir::types::DType;
use std::sync::Arc;

/// Most numbers of a list that stands in the program.
const MAX_LITERAL: usize = 1 << 20;

/// A dim counted from either end; errors name the node.
pub(super) fn dim_of(d: i64, rank: usize, l: &Lower, n: &Node) -> Result<usize> {
    let from = if d < 0 { d.checked_add(rank as i64) } else { Some(d) };
    let found = from.and_then(|d| usize::try_from(d).ok()).filter(|&d| d < rank);
    found.ok_or_else(|| l.refuse(n, &format!("dim {d} is none of {rank}")))
}

impl Lower<'_> {
    /// An attribute that is a whole number, if it is there.
    pub fn int(&self, n: &Node, name: &str) -> Result<Option<i64>> {
        match n.arg(name) {
            Arg::None => Ok(None),
            Arg::Int(i) => Ok(Some(*i)),
            Arg::Value(id) => self.int_of(n, *id).map(Some),
            _ => Err(self.refuse(n, &format!("`{name}` is not a whole number"))),
        }
    }

    fn int_of(&self, n: &Node, id: Id) -> Result<i64> {
        let Val::Folded(f) = self.val(id) else {
            return Err(self.refuse(n, "a size depends on data"));
        };
        f.scalar().map(|x| x as i64).ok_or_else(|| self.refuse(n, "a size is not a single number"))
    }

    /// An attribute that is a list of integers.
    pub fn ints(&self, n: &Node, name: &str) -> Result<Vec<i64>> {
        let one = |i: &IntArg| match i {
            IntArg::Is(i) => Ok(*i),
            IntArg::Of(id) => self.int_of(n, *id),
        };
        match n.arg(name) {
            Arg::Ints(all) if all.len() <= MAX_RANK => all.iter().map(one).collect(),
            Arg::None | Arg::Values(_) => Ok(vec![]),
            Arg::Int(i) => Ok(vec![*i]),
            _ => Err(self.refuse(n, &format!("`{name}` is not a short list of integers"))),
        }
    }

    /// An attribute that is a number.
    pub fn number(&self, n: &Node, name: &str) -> Option<f64> {
        match n.arg(name) {
            Arg::Int(i) => Some(*i as f64),
            Arg::Float(x) => Some(*x),
            Arg::Value(id) => match self.val(*id) {
                Val::Folded(f) => f.scalar(),
                _ => None,
            },
            _ => None,
        }
    }

    pub fn flag(&self, n: &Node, name: &str) -> bool {
        matches!(n.arg(name), Arg::Bool(true) | Arg::Int(1))
    }

    /// The shape of an operand, whatever it became.
    pub fn shape_of(&self, n: &Node, name: &str) -> Result<Vec<usize>> {
        let Arg::Value(id) = n.arg(name) else {
            return Err(self.refuse(n, &format!("`{name}` is not a tensor")));
        };
        match self.val(*id) {
            Val::Missing(m) => Err(self.lacks(n, m)),
            v => match v.shape() {
                Some(shape) => Ok(shape.to_vec()),
                None => Err(self.refuse(n, "its operand was not made")),
            },
        }
    }

    /// A new order of dims.
    pub fn order(&self, n: &Node, rank: usize) -> Result<Vec<usize>> {
        let all = self.ints(n, "dims")?;
        let order: Vec<usize> =
            all.iter().map(|&d| dim_of(d, rank, self, n)).collect::<Result<_>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        match sorted.iter().copied().eq(0..rank) {
            true => Ok(order),
            false => Err(self.refuse(n, "dims are named twice, or not at all")),
        }
    }

    /// Start, length and step of a slice of a dim of `size` elements.
    pub fn range(&self, n: &Node, size: usize) -> Result<(usize, usize, usize)> {
        let step = self.int(n, "step")?.unwrap_or(1);
        let step = usize::try_from(step).ok().filter(|&s| s > 0);
        let step = step.ok_or_else(|| self.refuse(n, "its step is not positive"))?;
        let clip = |x: i64| {
            let from = if x < 0 { x.saturating_add(size as i64) } else { x };
            from.clamp(0, size as i64) as usize
        };
        let start = clip(self.int(n, "start")?.unwrap_or(0));
        let end = clip(self.int(n, "end")?.unwrap_or(i64::MAX));
        Ok((start, end.saturating_sub(start).div_ceil(step), step))
    }

    /// A shape in which one size may be -1: as large as it must be for so many elements.
    pub fn resolved(&self, n: &Node, to: &[i64], elements: usize) -> Result<Vec<usize>> {
        let bad = || self.refuse(n, &format!("{to:?} is not a shape of {elements} elements"));
        let mut known = to.iter().filter(|&&d| d != -1).map(|&d| usize::try_from(d).ok());
        let product = known.try_fold(1usize, |p, d| p.checked_mul(d?)).ok_or_else(bad)?;
        let open = to.iter().filter(|&&d| d == -1).count();
        let rest = match open {
            0 => 1,
            1 if product > 0 && elements % product == 0 => elements / product,
            _ => return Err(bad()),
        };
        if product.checked_mul(rest) != Some(elements) {
            return Err(bad());
        }
        self.allowed(n, to.iter().map(|&d| if d == -1 { rest } else { d as usize }).collect())
    }

    /// The sizes of a tensor that is made.
    pub fn sized(&self, n: &Node, to: &[i64]) -> Result<Vec<usize>> {
        let all = to.iter().map(|&d| usize::try_from(d)).collect::<std::result::Result<_, _>>();
        self.allowed(n, all.map_err(|_| self.refuse(n, "a size is negative"))?)
    }

    /// A shape, if a value can have it.
    pub fn allowed(&self, n: &Node, shape: Vec<usize>) -> Result<Vec<usize>> {
        if shape.len() > MAX_RANK {
            return Err(self.refuse(n, &format!("its result has more than {MAX_RANK} dims")));
        }
        match room::elements(&shape) {
            Some(_) => Ok(shape),
            None => {
                let what = format!("{shape:?} has more elements than a value may have: 2^48");
                Err(self.refuse(n, &what))
            }
        }
    }

    /// A known number. An infinity is none that a plan can be proved with: the largest one stands for it.
    pub(super) fn finite(&self, n: &Node, x: f64) -> Result<f64> {
        match x.is_nan() {
            true => Err(self.refuse(n, "a known number is none (NaN)")),
            false => Ok(x.clamp(f64::from(f32::MIN), f64::from(f32::MAX))),
        }
    }

    /// Refuses lists of numbers that are longer than a value may be made of, before there are any.
    pub(super) fn countable(&self, n: &Node, sizes: &[usize]) -> Result<()> {
        let all = sizes.iter().try_fold(1usize, |all, &d| all.checked_mul(d));
        match all.filter(|&all| all <= MAX_LITERAL) {
            Some(_) => Ok(()),
            None => {
                let what = format!("it needs a list of {sizes:?} numbers, which is not read");
                Err(self.refuse(n, &what).help(format!("use at most {MAX_LITERAL}")))
            }
        }
    }

    /// The shape of an `expand`, where -1 keeps a size.
    pub fn expanded(&self, n: &Node, own: &[usize], to: &[i64]) -> Result<Vec<usize>> {
        let more = to.len().checked_sub(own.len());
        let more = more.ok_or_else(|| self.refuse(n, "it has more dims than it is expanded to"))?;
        let size = |(d, &to): (usize, &i64)| match (d.checked_sub(more), to) {
            (Some(d), -1) => Ok(own[d]),
            (_, to) => usize::try_from(to).map_err(|_| self.refuse(n, "a size is negative")),
        };
        self.allowed(n, to.iter().enumerate().map(size).collect::<Result<_>>()?)
    }

    /// An operand as data: known numbers become a literal.
    pub fn data(&mut self, n: &Node, name: &str) -> Result<View> {
        let Arg::Value(id) = n.arg(name) else {
            return Err(self.refuse(n, &format!("`{name}` is not a tensor")));
        };
        self.data_of(n, *id)
    }

    pub fn data_of(&mut self, n: &Node, id: Id) -> Result<View> {
        match self.val(id).clone() {
            Val::Data(v) => Ok(v),
            Val::Folded(f) => self.constant(n, &f),
            Val::Unmade | Val::Mean(_) => Err(self.refuse(n, "its operand was not made")),
            Val::Missing(m) => Err(self.lacks(n, &m)),
            Val::Labels(_) | Val::Padded(_) | Val::Masked(..) | Val::Probs(..) => {
                self.as_data(n, id)
            }
            // No logits after all, but rows of tokens without the last one.
            Val::Head(v) => {
                let sizes = self.draft.ty(v.value).sizes();
                let x = View::plain(v.value, &sizes);
                let x = self.narrowed(n, &x, 1, 0, sizes[1].saturating_sub(1))?;
                self.reshaped(n, &x, &v.shape)
            }
        }
    }

    /// A list of numbers, once.
    pub fn literal(&mut self, n: &Node, values: Arc<[f32]>) -> Result<Value> {
        // Each is looked up and written as text.
        if values.len() > MAX_LITERAL || room::work(8 * values.len()).is_none() {
            let what = format!("a list of {} numbers would stand in the program", values.len());
            return Err(self.refuse(n, &what).help(format!("use at most {MAX_LITERAL}")));
        }
        let finite = |&x: &f32| self.finite(n, f64::from(x)).map(|x| x as f32);
        let values: Arc<[f32]> = values.iter().map(finite).collect::<Result<_>>()?;
        let key: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
        if let Some(&v) = self.literals.get(&key) {
            return Ok(v);
        }
        let v = self.emit(n, "literal", Literal { values }, &[])?;
        self.literals.insert(key, v);
        Ok(v)
    }

    /// Known numbers as a value: positions, or a literal of those that differ along one dim.
    pub fn constant(&mut self, n: &Node, f: &Folded) -> Result<View> {
        let moving: Vec<usize> = (0..f.shape.len()).filter(|&d| !f.is_same_along(d)).collect();
        if let ([d], Elem::Int) = (&moving[..], f.elem)
            && f.counts_from(*d) == Some(0.0)
            && f.shape[*d] == self.sizes.seq
        {
            let v = self.of_input(inputs::POSITIONS);
            return Ok(along(v, *d, &f.shape));
        }
        let d = match &moving[..] {
            [] => None,
            [d] => Some(*d),
            _several => return self.table_of(n, f, &moving),
        };
        let line = match d {
            None => vec![f.first().unwrap_or(0.0)],
            Some(d) => {
                let mut index = vec![0; f.shape.len()];
                let at = |i| {
                    index[d] = i;
                    f.at(&index)
                };
                if f.shape[d] > MAX_LITERAL {
                    let what = format!("a list of {} numbers is not read", f.shape[d]);
                    return Err(self.refuse(n, &what).help(format!("use at most {MAX_LITERAL}")));
                }
                (0..f.shape[d]).map(at).collect()
            }
        };
        let values: Arc<[f32]> = line.iter().map(|&x| x as f32).collect();
        let v = self.literal(n, values)?;
        Ok(match d {
            Some(d) => along(v, d, &f.shape),
            // A number is a list of one.
            None => {
                let mut view = along(v, 0, &[1]);
                view.shape = vec![1; f.shape.len().max(1)];
                view.dims = vec![Dim::Virtual; view.shape.len()];
                let last = view.dims.len() - 1;
                view.dims[last] = Dim::Real(0);
                return match (f.elements(), f.shape.is_empty()) {
                    (1, false) => Ok(view),
                    _repeated => self.number_in(n, line[0], &f.shape),
                };
            }
        })
    }

    /// A range that becomes floats is the positions: so context parallelism can cut it.
    pub(super) fn position_of(&mut self, n: &Node) -> Result<Option<View>> {
        let to_float = match (&*n.op, n.arg("dtype")) {
            (op, Arg::Elem(Elem::Float)) => op.starts_with("to.") || op.starts_with("_to_copy"),
            _ => false,
        };
        let Some(f) = self.folded(n, "self", 0)?.filter(|f| to_float && f.elem == Elem::Int) else {
            return Ok(None);
        };
        let seq = self.sizes.seq;
        let moving: Vec<usize> =
            (0..f.shape.len()).filter(|&d| f.shape[d] > 1 && !f.is_same_along(d)).collect();
        let [d] = moving[..] else { return Ok(None) };
        if f.shape[d] != seq || f.counts_from(d) != Some(0.0) {
            return Ok(None);
        }
        let v = match self.position {
            Some(v) => v,
            None => {
                let ids = self.of_input(inputs::POSITIONS);
                let cast = Cast { to: DType::F32 };
                let v = self.emit(n, "position", cast, &[ids])?;
                self.position = Some(v);
                v
            }
        };
        Ok(Some(along(v, d, &f.shape)))
    }
}

/// A value of one dim as dim `d` of a shape along whose other dims nothing changes.
fn along(v: Value, d: usize, shape: &[usize]) -> View {
    let dims = (0..shape.len()).map(|i| if i == d { Dim::Real(0) } else { Dim::Virtual });
    View { value: v, dims: dims.collect(), shape: shape.to_vec() }
}
