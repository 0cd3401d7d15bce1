//! Tensors that are made of sizes and numbers: ranges, and the same number everywhere.

use super::folded::Folded;
use super::graph::{Arg, Elem, Node};
use super::lower::Lower;
use super::room::{MAX_LISTED, rounded};
use shardc_ir::diag::Result;

impl Lower<'_> {
    /// Tensors that are made of sizes.
    pub(super) fn fold_new(&mut self, n: &Node, name: &str) -> Result<Option<Folded>> {
        let elem = |or| if let Arg::Elem(e) = n.arg("dtype") { *e } else { or };
        let shape = |l: &Lower| -> Result<Vec<usize>> { l.sized(n, &l.ints(n, "size")?) };
        let own = |l: &Lower| l.shape_of(n, "self");
        let full = |e, s: &[usize], x| Ok(Some(Folded::full(e, s, x)));
        match name {
            "arange" => {
                let number = |k: &str, or: f64| -> Result<f64> {
                    Ok(self.folded(n, k, usize::MAX)?.and_then(|f| f.scalar()).unwrap_or(or))
                };
                let (start, end, step) =
                    (number("start", 0.0)?, number("end", 0.0)?, number("step", 1.0)?);
                let len = ((end - start) / step).ceil();
                if !(0.0..=(MAX_LISTED as f64)).contains(&len) {
                    return Err(self.refuse(n, "it is too long a range"));
                }
                let whole = [start, step].iter().all(|x| x.fract() == 0.0);
                let x = (0..len as usize).map(|i| start + step * i as f64);
                let e = elem(if whole { Elem::Int } else { Elem::Float });
                self.fits(n, Folded::new(e, &[len as usize], x)).map(Some)
            }
            "linspace" => {
                let number = |k: &str| Ok(self.folded(n, k, usize::MAX)?.and_then(|f| f.scalar()));
                let (Some(start), Some(end)) = (number("start")?, number("end")?) else {
                    return Ok(None);
                };
                let steps = self.int(n, "steps")?.and_then(|s| usize::try_from(s).ok());
                let steps = steps.filter(|&s| s <= MAX_LISTED).unwrap_or(0);
                let step = (end - start) / steps.saturating_sub(1).max(1) as f64;
                let x = (0..steps).map(|i| start + step * i as f64);
                self.fits(n, Folded::new(elem(Elem::Float), &[steps], x)).map(Some)
            }
            "eye" => {
                let rows = self.int(n, "n")?.and_then(|s| usize::try_from(s).ok());
                let rows = rows.ok_or_else(|| self.refuse(n, "it has no size"))?;
                let columns = self.int(n, "m")?.and_then(|s| usize::try_from(s).ok());
                let [a, b] = [rows, columns.unwrap_or(rows)].map(Folded::iota);
                let (a, b) = (self.fits(n, a)?.unsqueeze(1), self.fits(n, b)?);
                let one = |a: f64, b: f64| f64::from(u8::from(a == b));
                self.fits(n, a.zip(&b, elem(Elem::Float), one)).map(Some)
            }
            "ones" => full(elem(Elem::Float), &shape(self)?, 1.0),
            "zeros" => full(elem(Elem::Float), &shape(self)?, 0.0),
            "new_ones" => full(elem(self.elem_of(n, "self")), &shape(self)?, 1.0),
            // Numbers that nobody has written yet: any are right.
            "empty" => full(elem(Elem::Float), &shape(self)?, 0.0),
            "new_empty" | "new_zeros" => full(elem(self.elem_of(n, "self")), &shape(self)?, 0.0),
            "ones_like" => full(elem(self.elem_of(n, "self")), &own(self)?, 1.0),
            "empty_like" | "zero" | "zeros_like" => {
                full(elem(self.elem_of(n, "self")), &own(self)?, 0.0)
            }
            "fill" | "full" | "full_like" | "scalar_tensor" | "new_full" => {
                let to = match name {
                    "fill" | "full_like" => own(self)?,
                    "scalar_tensor" => vec![],
                    _ => shape(self)?,
                };
                let key = match name {
                    "scalar_tensor" => "s",
                    "fill" => "value",
                    _ => "fill_value",
                };
                let x = self.folded(n, key, usize::MAX)?.and_then(|f| Some((f.scalar()?, f.elem)));
                let Some((x, e)) = x else { return Ok(None) };
                let e = elem(match (name, e) {
                    ("fill" | "full_like" | "new_full", _) => self.elem_of(n, "self"),
                    (_, Elem::Double) => Elem::Float,
                    (_, e) => e,
                });
                let x = match e {
                    Elem::Int => x.trunc(),
                    Elem::Bool => f64::from(u8::from(x != 0.0)),
                    _ => x,
                };
                full(e, &to, rounded(e, x))
            }
            _ => Ok(None),
        }
    }
}
