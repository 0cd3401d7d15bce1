//! Folding by evaluation: what an op makes of tensors whose numbers are known.

use super::folded::{Folded, spread};
use super::graph::{Arg, Elem, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use shardc_ir::diag::Result;

/// What the names of functions of symbols begin with; their operands go by place.
const OF_SYMBOLS: [&str; 2] = ["_operator.", "torch.sym_"];

/// True for what is made of the shape of an operand alone.
pub(super) fn of_shape(op: &str) -> bool {
    let name = op.split('.').next().unwrap_or(op);
    name == "sym_size"
        || matches!(name, "zeros_like" | "ones_like" | "full_like")
        || matches!(name, "new_zeros" | "new_ones" | "new_full" | "zero" | "fill")
        || matches!(name, "empty_like" | "new_empty")
}

impl Lower<'_> {
    /// The results of a node all of whose tensors are known; nothing if folding does not know the op.
    ///
    /// # Errors
    /// `import-op` if the operands do not fit, or the result is too large.
    pub(super) fn fold(&mut self, n: &Node) -> Result<Option<Vec<Folded>>> {
        let symbols = OF_SYMBOLS.iter().find_map(|p| n.op.strip_prefix(p));
        let op = symbols.unwrap_or(&n.op);
        let name = op.split('.').next().unwrap_or(op);
        if name == "pow" {
            let (a, b) = (self.folded(n, "self", 0)?, self.folded(n, "exponent", 1)?);
            let Some((a, b)) = a.zip(b) else { return Ok(None) };
            let elem = joined(name, &a, &b);
            return self.fits(n, a.zip(&b, elem, f64::powf)).map(one);
        }
        if let Some((f, elem)) = binary(name) {
            let (a, b) = (self.folded(n, "self", 0)?, self.folded(n, "other", 1)?);
            let Some((a, b)) = a.zip(b) else { return Ok(None) };
            let bits = name.starts_with("bitwise") || name.starts_with("__");
            if bits && (a.elem, b.elem) != (Elem::Bool, Elem::Bool) {
                return Ok(None);
            }
            let times = |x: Folded| x.map(x.elem, |v| v * alpha(n)).unwrap_or(x);
            let (a, b) = if name == "rsub" { (times(a), b) } else { (a, times(b)) };
            let elem = elem.unwrap_or_else(|| joined(name, &a, &b));
            let made = self.fits(n, a.zip(&b, elem, f))?;
            return match (n.arg("rounding_mode"), elem) {
                // Of truth values a sum is or.
                (_, Elem::Bool) => {
                    self.fits(n, made.map(elem, |x| f64::from(u8::from(x != 0.0)))).map(one)
                }
                (Arg::Text(_), _) => Ok(None),
                _ => Ok(one(made)),
            };
        }
        if let Some(f) = unary(name) {
            let Some(x) = self.folded(n, "self", 0)? else { return Ok(None) };
            if name == "bitwise_not" && x.elem != Elem::Bool {
                return Ok(None);
            }
            let elem = if matches!(
                name,
                "neg" | "abs" | "sign" | "ceil" | "floor" | "bitwise_not" | "logical_not"
            ) {
                x.elem
            } else {
                float(x.elem)
            };
            let elem = if name == "logical_not" { Elem::Bool } else { elem };
            return self.fits(n, x.map(elem, f)).map(one);
        }
        self.fold_shape(n, name)
    }

    pub(super) fn fits<T>(&self, n: &Node, x: Option<T>) -> Result<T> {
        x.ok_or_else(|| self.refuse(n, "its operands do not fit, or its result is too large"))
    }

    /// An operand with known numbers; nothing if it is absent or not known.
    pub(super) fn folded(&self, n: &Node, name: &str, at: usize) -> Result<Option<Folded>> {
        let arg = match n.arg(name) {
            Arg::None => n
                .args
                .get(at)
                .filter(|a| a.0.is_empty() || OF_SYMBOLS.iter().any(|p| n.op.starts_with(p)))
                .map(|a| &a.1),
            a => Some(a),
        };
        let number = |elem, x| Some(Folded::full(elem, &[], x));
        Ok(match arg {
            Some(Arg::Value(id)) => self.numbers_of(*id).cloned(),
            Some(Arg::Int(i)) => number(Elem::Int, *i as f64),
            Some(Arg::Float(x)) => number(Elem::Double, *x),
            Some(Arg::Bool(x)) => number(Elem::Bool, f64::from(u8::from(*x))),
            _ => None,
        })
    }

    fn fold_shape(&mut self, n: &Node, name: &str) -> Result<Option<Vec<Folded>>> {
        if let Some(made) = self.fold_new(n, name)? {
            return Ok(Some(vec![made]));
        }
        let Some(x) = self.folded(n, "self", 0)? else {
            return match name {
                "cat" => self.fold_cat(n),
                "where" => {
                    let m = self.folded(n, "condition", 0)?;
                    let (a, b) = (self.folded(n, "self", 1)?, self.folded(n, "other", 2)?);
                    let (Some(m), Some(a), Some(b)) = (m, a, b) else { return Ok(None) };
                    self.fits(n, m.choose(&a, &b)).map(one)
                }
                _ => Ok(None),
            };
        };
        let rank = x.shape.len();
        let dim = |d: &str, or: i64| dim_of(self.int(n, d)?.unwrap_or(or), rank, self, n);
        Ok(Some(vec![match name {
            "to" | "_to_copy" | "type_as" => {
                let elem = match n.arg("dtype") {
                    Arg::Elem(e) => *e,
                    _ => self.folded(n, "other", 1)?.map_or(x.elem, |o| o.elem),
                };
                self.fits(n, x.cast(elem))?
            }
            "contiguous" | "clone" | "alias" | "detach" | "detach_" | "lift_fresh_copy" => x,
            "where" => {
                let (m, b) = (self.folded(n, "condition", 0)?, self.folded(n, "other", 2)?);
                let Some((m, b)) = m.zip(b) else { return Ok(None) };
                self.fits(n, m.choose(&x, &b))?
            }
            "masked_fill" => {
                let (m, v) = (self.folded(n, "mask", 1)?, self.folded(n, "value", 2)?);
                let Some((m, v)) = m.zip(v) else { return Ok(None) };
                let v = self.fits(n, v.cast(x.elem))?;
                self.fits(n, m.choose(&v, &x))?
            }
            "unsqueeze" => {
                let at = dim_of(self.int(n, "dim")?.unwrap_or(0), rank + 1, self, n)?;
                x.unsqueeze(at)
            }
            "squeeze" => self.fold_squeeze(n, x)?,
            "expand" | "expand_as" | "broadcast_to" => {
                let to = match n.arg("size") {
                    Arg::Ints(_) => self.ints(n, "size")?,
                    _ => self.shape_of(n, "other")?.iter().map(|&d| d as i64).collect(),
                };
                let to = self.expanded(n, &x.shape, &to)?;
                self.fits(n, x.expand(&to))?
            }
            "view" | "reshape" | "_unsafe_view" => {
                let to = if matches!(n.arg("size"), Arg::None) { "shape" } else { "size" };
                let to = self.resolved(n, &self.ints(n, to)?, x.elements())?;
                self.fits(n, x.reshape(&to))?
            }
            "transpose" => {
                let mut order: Vec<usize> = (0..rank).collect();
                order.swap(dim("dim0", 0)?, dim("dim1", 1)?);
                x.permute(&order)
            }
            "permute" => {
                let order = self.order(n, rank)?;
                x.permute(&order)
            }
            "select" => {
                let d = dim("dim", 0)?;
                let i = self.int(n, "index")?.unwrap_or(0);
                x.select(d, dim_of(i, x.shape[d], self, n)?)
            }
            "slice" => {
                let d = dim("dim", 0)?;
                let (start, len, step) = self.range(n, x.shape[d])?;
                x.slice(d, start, len, step)
            }
            "copy" => {
                let Some(src) = self.folded(n, "src", 1)? else { return Ok(None) };
                self.fits(n, src.expand(&x.shape).and_then(|s| s.cast(x.elem)))?
            }
            "select_scatter" | "slice_scatter" => {
                let Some(src) = self.folded(n, "src", 1)? else { return Ok(None) };
                self.fold_within(n, &x, &src)?
            }
            "repeat" => self.fold_repeat(n, x)?,
            "clamp" => self.fold_clamp(n, &x)?,
            "cumsum" => self.fits(n, x.cumsum(dim("dim", 0)?))?,
            "diff" => self.fold_diff(n, &x)?,
            "gather" => {
                let Some(index) = self.folded(n, "index", 2)? else { return Ok(None) };
                self.fold_gather(n, &x, &index)?
            }
            "index" => return self.fold_index(n, &x),
            "sym_size" => Folded::full(Elem::Int, &[], x.shape[dim("dim", 0)?] as f64),
            "tril" | "triu" if rank >= 2 => self.fold_triangle(n, &x, name == "tril")?,
            _ => return Ok(None),
        }]))
    }

    /// All of it so many times along each dim.
    fn fold_repeat(&self, n: &Node, x: Folded) -> Result<Folded> {
        let (own, between, to) = self.repeated(n, &x.shape, &self.ints(n, "repeats")?)?;
        let mut y = self.fits(n, x.reshape(&own))?;
        (0..to.len()).for_each(|d| y = y.unsqueeze(2 * d));
        let y = self.fits(n, y.expand(&between))?;
        self.fits(n, y.reshape(&to))
    }

    /// Along a dim the elements that an index of as many dims says.
    fn fold_gather(&self, n: &Node, x: &Folded, index: &Folded) -> Result<Folded> {
        let rank = x.shape.len();
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?;
        let within = (0..rank).all(|k| k == d || index.shape.get(k) <= x.shape.get(k));
        if index.shape.len() != rank || !within {
            return Err(self.refuse(n, "its index does not fit"));
        }
        if let Some(same) = x.scalar() {
            return Ok(Folded::full(x.elem, &index.shape, same));
        }
        let all = self.fits(n, index.numbers())?;
        let mut numbers = Vec::with_capacity(all.len());
        for (i, at) in all.into_iter().enumerate() {
            let mut rest = i;
            let mut place = vec![0; rank];
            for k in (0..rank).rev() {
                (place[k], rest) = (rest % index.shape[k], rest / index.shape[k]);
            }
            place[d] = dim_of(at as i64, x.shape[d], self, n)?;
            numbers.push(x.at(&place));
        }
        self.fits(n, Folded::new(x.elem, &index.shape, numbers))
    }

    /// What lies on one side of a diagonal, and 0 on the other.
    fn fold_triangle(&self, n: &Node, x: &Folded, lower: bool) -> Result<Folded> {
        let k = self.int(n, "diagonal")?.unwrap_or(0) as f64;
        let [s, t] = [2, 1].map(|i| x.shape[x.shape.len() - i]);
        let [rows, columns] = [s, t].map(Folded::iota);
        let (rows, columns) = (self.fits(n, rows)?.unsqueeze(1), self.fits(n, columns)?);
        let keeps = |d: f64| f64::from(u8::from(if lower { d <= k } else { d >= k }));
        let keep = self.fits(n, columns.zip(&rows, Elem::Bool, |j, i| keeps(j - i)))?;
        self.fits(n, keep.choose(x, &Folded::full(x.elem, &[], 0.0)))
    }

    /// The element type of an operand.
    pub(super) fn elem_of(&self, n: &Node, operand: &str) -> Elem {
        let is_truth = matches!(n.arg(operand), Arg::Value(id) if self.g.truths.contains(id));
        match self.operand(n, operand) {
            Some(Val::Folded(f)) => f.elem,
            Some(Val::Padded(c)) => c.plain.elem,
            _ if is_truth => Elem::Bool,
            Some(Val::Data(v)) if !self.draft.ty(v.value).dtype.is_float() => Elem::Int,
            _ => Elem::Float,
        }
    }

    fn fold_cat(&mut self, n: &Node) -> Result<Option<Vec<Folded>>> {
        let Arg::Values(all) = n.arg("tensors") else { return Ok(None) };
        let mut parts = vec![];
        for id in all.iter().flatten() {
            let Some(f) = self.numbers_of(*id) else { return Ok(None) };
            parts.push(f.clone());
        }
        let rank = parts.first().map_or(0, |p| p.shape.len());
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?;
        self.fits(n, Folded::concat(&parts, d)).map(one)
    }

    /// Differences of neighbours, with what stands before the first.
    fn fold_diff(&mut self, n: &Node, x: &Folded) -> Result<Folded> {
        if self.int(n, "n")?.unwrap_or(1) != 1 || *n.arg("append") != Arg::None {
            return Err(self.refuse(n, "differences of differences, or with what stands behind"));
        }
        let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), x.shape.len(), self, n)?;
        let mut x = x.clone();
        if let Some(first) = self.folded(n, "prepend", usize::MAX)? {
            // Dims along which nothing changes stay so.
            let same: Vec<usize> = (0..x.shape.len())
                .filter(|&k| k != d && x.is_same_along(k) && first.is_same_along(k))
                .collect();
            let (whole, mut a, mut b) = (x.shape.clone(), first, x);
            for &k in &same {
                (a, b) = (a.slice(k, 0, 1.min(a.shape[k]), 1), b.slice(k, 0, 1.min(b.shape[k]), 1));
            }
            let mut to = whole;
            to[d] += a.shape[d];
            let joined = self.fits(n, Folded::concat(&[a, b], d))?;
            x = self.fits(n, joined.expand(&to))?;
        }
        let len = x.shape[d].saturating_sub(1);
        let (a, b) = (x.slice(d, 0, len, 1), x.slice(d, 1.min(x.shape[d]), len, 1));
        self.fits(n, b.zip(&a, x.elem, |b, a| b - a))
    }

    /// `x[i, j, …]` by index tensors for its leading dims.
    fn fold_index(&mut self, n: &Node, x: &Folded) -> Result<Option<Vec<Folded>>> {
        let Arg::Values(all) = n.arg("indices") else { return Ok(None) };
        let mut by = vec![];
        for id in all {
            let Some(f) = id.and_then(|i| self.numbers_of(i)) else { return Ok(None) };
            by.push(f.clone());
        }
        if by.len() != x.shape.len() || by.iter().any(|f| f.elem != Elem::Int) {
            return Ok(None);
        }
        let shape = by.iter().try_fold(vec![], |s: Vec<usize>, f| spread(&s, &f.shape));
        let shape = self.fits(n, shape)?;
        // One index after the other; along what does not change an index says nothing.
        let mut at: Option<Folded> = None;
        let mut sizes = vec![];
        for (d, f) in by.iter().enumerate() {
            if x.is_same_along(d) {
                continue;
            }
            let size = x.shape[d] as f64;
            let inside = self.fits(n, f.map(Elem::Int, |i| if i < 0.0 { i + size } else { i }))?;
            if self.fits(n, inside.numbers())?.iter().any(|i| !(0.0..size).contains(i)) {
                return Err(self.refuse(n, "an index lies outside its dim"));
            }
            sizes.push(d);
            at = Some(match at {
                None => inside,
                Some(a) => self.fits(n, a.zip(&inside, Elem::Int, |a, i| a * size + i))?,
            });
        }
        let flat = {
            let mut y = x.clone();
            for d in (0..x.shape.len()).rev().filter(|d| !sizes.contains(d)) {
                if y.shape[d] == 0 {
                    return Ok(None);
                }
                y = y.select(d, 0);
            }
            self.fits(n, y.numbers())?
        };
        let picked = match at {
            None => Folded::full(x.elem, &[], flat.first().copied().unwrap_or(0.0)),
            Some(a) => self.fits(n, a.map(x.elem, |i| flat[i as usize]))?,
        };
        self.fits(n, picked.expand(&shape)).map(one)
    }
}

fn one(f: Folded) -> Option<Vec<Folded>> {
    Some(vec![f])
}

/// The factor of the second operand of sums.
fn alpha(n: &Node) -> f64 {
    match n.arg("alpha") {
        Arg::Int(i) => *i as f64,
        Arg::Float(x) => *x,
        _ => 1.0,
    }
}

fn float(e: Elem) -> Elem {
    if e == Elem::Double { e } else { Elem::Float }
}

/// What makes truth values of truth values.
fn of_truths(name: &str) -> bool {
    name.contains("and")
        || name.contains("or")
        || matches!(name, "add" | "mul" | "maximum" | "minimum")
}

/// The element type of a result of both: a tensor's before a number's of the same kind.
fn joined(name: &str, a: &Folded, b: &Folded) -> Elem {
    let (x, y) = match (a.shape.is_empty(), b.shape.is_empty()) {
        (true, false) => (b, a),
        _ => (a, b),
    };
    let is_float = |e| matches!(e, Elem::Float | Elem::Double);
    if is_float(x.elem) {
        return x.elem;
    }
    if is_float(y.elem) || matches!(name, "div" | "truediv") {
        return Elem::Float;
    }
    match (x.elem, y.elem) {
        (Elem::Bool, Elem::Bool) if of_truths(name) => Elem::Bool,
        _ => Elem::Int,
    }
}

type Both = fn(f64, f64) -> f64;

/// A function of two elements, and the type of its result if it does not follow.
fn binary(name: &str) -> Option<(Both, Option<Elem>)> {
    let truth = |f: Both| Some((f, Some(Elem::Bool)));
    let number = |f: Both| Some((f, None));
    match name {
        "add" => number(|a, b| a + b),
        "sub" => number(|a, b| a - b),
        "rsub" => number(|a, b| b - a),
        "mul" => number(|a, b| a * b),
        "div" | "truediv" => number(|a, b| a / b),
        "floordiv" | "floor_divide" => number(|a, b| (a / b).floor()),
        "remainder" | "mod" => number(|a, b| a - (a / b).floor() * b),
        "maximum" | "max" => number(f64::max),
        "minimum" | "min" => number(f64::min),
        "eq" => truth(|a, b| f64::from(u8::from(a == b))),
        "ne" => truth(|a, b| f64::from(u8::from(a != b))),
        "lt" => truth(|a, b| f64::from(u8::from(a < b))),
        "le" => truth(|a, b| f64::from(u8::from(a <= b))),
        "gt" => truth(|a, b| f64::from(u8::from(a > b))),
        "ge" => truth(|a, b| f64::from(u8::from(a >= b))),
        "__and__" | "bitwise_and" | "logical_and" => {
            truth(|a, b| f64::from(u8::from(a != 0.0 && b != 0.0)))
        }
        "__or__" | "bitwise_or" | "logical_or" => {
            truth(|a, b| f64::from(u8::from(a != 0.0 || b != 0.0)))
        }
        _ => None,
    }
}

fn unary(name: &str) -> Option<fn(f64) -> f64> {
    Some(match name {
        "neg" => |x| -x,
        "abs" => f64::abs,
        "exp" => f64::exp,
        "log" => f64::ln,
        "sqrt" => f64::sqrt,
        "rsqrt" => |x| 1.0 / x.sqrt(),
        "exp2" => f64::exp2,
        "square" => |x| x * x,
        "reciprocal" => |x| 1.0 / x,
        "sign" => |x| if x == 0.0 { 0.0 } else { x.signum() },
        "ceil" => f64::ceil,
        "floor" => f64::floor,
        "bitwise_not" | "logical_not" => |x| f64::from(u8::from(x == 0.0)),
        _ => return None,
    })
}
