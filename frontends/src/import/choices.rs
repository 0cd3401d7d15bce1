//! What depends on data: truth values as 0 and 1, and choices of elements.

use super::folded::spread;
use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::reshape::sized;
use super::view::{View, letter};
use shardc_ir::attr::Padding;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Abs, AtLeast, Cast, Fill, IndexAdd, Scale, Select, Shift, Take, TopK};
use shardc_ir::types::{DType, Type};

impl Lower<'_> {
    /// Whole numbers as floats.
    pub(super) fn float(&mut self, n: &Node, x: &View) -> Result<View> {
        Ok(x.with(self.emit(n, "float", Cast { to: DType::F32 }, &[x.value])?))
    }

    /// 1 where a number is not 0, else 0.
    pub(super) fn truth(&mut self, n: &Node, x: &View) -> Result<View> {
        if matches!(self.maker(x.value), Some((shardc_ir::ops::Op::AtLeast(_), _))) {
            return Ok(x.clone());
        }
        let x = if self.draft.ty(x.value).dtype.is_float() { x.clone() } else { self.float(n, x)? };
        let size = self.emit(n, "size", Abs {}, &[x.value])?;
        let minus = self.emit(n, "size", Scale { by: -1.0 }, &[size])?;
        let zero = self.emit(n, "zero", AtLeast { bound: 0.0 }, &[minus])?;
        self.without(n, &x.with(zero))
    }

    /// 1 less a truth value.
    pub(super) fn without(&mut self, n: &Node, x: &View) -> Result<View> {
        let minus = self.emit(n, "not", Scale { by: -1.0 }, &[x.value])?;
        Ok(x.with(self.emit(n, "not", Shift { by: 1.0 }, &[minus])?))
    }

    /// The other truth value.
    pub(super) fn not(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let taken = matches!(n.arg("self"), Arg::Value(id) if self.g.truths.contains(id));
        let is_truth = taken || n.outs.iter().any(|o| self.g.truths.contains(o));
        if !self.draft.ty(x.value).dtype.is_float() || !is_truth {
            return Err(self.refuse(n, "bits of integers"));
        }
        Ok(vec![Val::Data(self.without(n, &x)?)])
    }

    /// A number where a mask of data says so.
    pub(super) fn filled(&mut self, n: &Node, mask: &View, c: f64) -> Result<View> {
        let x = self.data(n, "self")?;
        let to = spread(&x.shape, &mask.shape);
        let to = to.ok_or_else(|| self.refuse(n, "its mask is of another shape"))?;
        let (x, mask) = (self.spread_to(n, &x, &to)?, self.spread_to(n, mask, &to)?);
        let x = if self.draft.ty(x.value).dtype.is_float() { x } else { self.float(n, &x)? };
        let (x, m) = (self.whole(n, &x)?, self.whole(n, &mask)?);
        let c = self.finite(n, c)?;
        let number = self.emit_n(n, &["number"], Fill { value: c }, &[], Some(&Type::f32(&[])))?[0];
        let l = x.letters(x.shape.len());
        let ins = [m.value, number, x.value];
        let rule = self.spread(n, &[&l, "", &l], &l, &ins)?;
        Ok(x.with(self.emit(n, "filled", Select { rule }, &ins)?))
    }

    /// Value and place of the largest elements along a dim.
    pub(super) fn topk(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let x = self.whole(n, &x)?;
        let rank = x.shape.len();
        let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), rank, self, n)?;
        let k = self.int(n, "k")?.and_then(|k| usize::try_from(k).ok());
        let k = k.filter(|&k| k > 0 && k <= x.shape[d]);
        let k =
            k.ok_or_else(|| self.refuse(n, "it takes more elements than there are, or none"))?;
        let of = match n.arg("largest") {
            Arg::Bool(false) => x.with(self.emit(n, "negative", Scale { by: -1.0 }, &[x.value])?),
            _usual => x.clone(),
        };
        let at = self.largest(n, &of, d, k)?;
        Ok(vec![Val::Data(self.at_places(n, &x, &at, d)?), Val::Data(at)])
    }

    /// All elements of a dim in their order, and the place of each: those of `sort`, or of `argsort` the places alone. Of
    /// equal ones the one with the lower index comes first.
    pub(super) fn sorted(&mut self, n: &Node, values: bool) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let x = self.whole(n, &x)?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), x.shape.len(), self, n)?;
        let of = match self.flag(n, "descending") {
            true => x.clone(),
            false => x.with(self.emit(n, "negative", Scale { by: -1.0 }, &[x.value])?),
        };
        let at = self.largest(n, &of, d, x.shape[d])?;
        let mut all = vec![Val::Data(at.clone())];
        if values {
            all.insert(0, Val::Data(self.at_places(n, &x, &at, d)?));
        }
        Ok(all)
    }

    /// The places of so many largest elements of a dim.
    pub(super) fn largest(&mut self, n: &Node, x: &View, d: usize, k: usize) -> Result<View> {
        let rank = x.shape.len();
        let from: String = (0..rank).map(letter).collect();
        let to: String = (0..rank).map(|i| if i == d { 'z' } else { letter(i) }).collect();
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        let sizes = shardc_ir::attr::Sizes([sized('z', k)].into_iter().collect());
        let at = self.emit(n, "chosen", TopK { rule, sizes }, &[x.value])?;
        let mut shape = x.shape.clone();
        shape[d] = k;
        Ok(View::plain(at, &shape))
    }

    /// Along a dim the elements at the places of an index with the same other dims.
    pub(super) fn at_places(&mut self, n: &Node, x: &View, at: &View, d: usize) -> Result<View> {
        let rank = x.shape.len();
        let fits = at.shape.len() == rank && (0..rank).all(|k| k == d || at.shape[k] == x.shape[k]);
        if !fits {
            return Err(self.refuse(n, "its index does not fit"));
        }
        if self.is_computed(at) {
            return self.at_computed(n, x, at, d);
        }
        let (x, at) = (self.whole(n, x)?, self.whole(n, at)?);
        let from: String = (0..rank).map(letter).collect();
        let to: String = (0..rank).map(|i| if i == d { 'z' } else { letter(i) }).collect();
        let rule = self.rule(n, &format!("{from},{to}->{to}"), &[x.value, at.value])?;
        let op = Take { rule, padding: Padding::None };
        let v = self.emit(n, "taken", op, &[x.value, at.value])?;
        Ok(at.with(v))
    }

    pub(super) fn gather(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, at) = (self.data(n, "self")?, self.data(n, "index")?);
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), x.shape.len(), self, n)?;
        Ok(vec![Val::Data(self.at_places(n, &x, &at, d)?)])
    }

    /// A number at the places of an index along a dim, and 0 elsewhere.
    pub(super) fn scatter(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (base, value) = (self.folded(n, "self", 0)?, self.number(n, "value"));
        let (Some(base), Some(value)) = (base.filter(|b| b.scalar() == Some(0.0)), value) else {
            return self.written_at(n);
        };
        let at = self.data(n, "index")?;
        if self.is_computed(&at) {
            return self.written_at(n);
        }
        let at = self.whole(n, &at)?;
        let rank = base.shape.len();
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?;
        let fits =
            at.shape.len() == rank && (0..rank).all(|k| k == d || at.shape[k] == base.shape[k]);
        if !fits {
            return Err(self.refuse(n, "its index does not fit"));
        }
        // Ones that are put, and may fall on one place: what is there counts once.
        let one = self.everywhere(n, 1.0, DType::F32, &at.shape)?;
        let from: String = (0..rank).map(|i| if i == d { 'z' } else { letter(i) }).collect();
        let to: String = (0..rank).map(letter).collect();
        let rule = self.rule(n, &format!("{from},{from}->{to}"), &[one, at.value])?;
        let sizes = shardc_ir::attr::Sizes([sized(letter(d), base.shape[d])].into_iter().collect());
        let op = IndexAdd { rule, sizes, padding: Padding::None };
        let v = self.emit(n, "put", op, &[one, at.value])?;
        let v = self.emit(n, "there", AtLeast { bound: 1.0 }, &[v])?;
        let y = self.scaled(n, &View::plain(v, &base.shape), value)?;
        Ok(vec![Val::Data(y)])
    }
}
