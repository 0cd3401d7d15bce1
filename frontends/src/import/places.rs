//! Elements by whole numbers that are computed, and not given: such an index is a float, and what it names is a product
//! with 1 where it is and 0 elsewhere. And several indices at once, and writes to places.

use super::folded::Folded;
use super::graph::{Arg, Elem, Id, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::reshape::sized;
use super::room;
use super::table::Arithmetic;
use super::view::{View, letter};
use shardc_ir::attr::Padding;
use shardc_ir::diag::Result;
use shardc_ir::ops::{AtLeast, IndexAdd, Select, Take};

impl Lower<'_> {
    /// Whether whole numbers were computed, and are floats.
    pub(super) fn is_computed(&self, index: &View) -> bool {
        self.draft.ty(index.value).dtype.is_float()
    }

    /// 1 where a number of an index is that of a place, of so many, which are a new last dim.
    pub(super) fn one_hot_of(&mut self, n: &Node, index: &View, size: usize) -> Result<View> {
        self.countable(n, &[size])?;
        let line = self.table(n, &[size], (0..size).map(|i| i as f64).collect())?;
        let index = index.unsqueeze(index.shape.len());
        let line = (1..index.shape.len()).fold(line, |l, _| l.unsqueeze(0));
        self.both(n, Arithmetic::Equal, &index, &line)
    }

    pub(super) fn one_hot(&mut self, n: &Node) -> Result<Vec<Val>> {
        let classes = self.int(n, "num_classes")?.and_then(|c| usize::try_from(c).ok());
        let Some(classes) = classes.filter(|&c| c > 0) else {
            return Err(self
                .refuse(n, "how many classes there are depends on data")
                .help("give num_classes"));
        };
        let x = self.data(n, "self")?;
        Ok(vec![Val::Data(self.one_hot_of(n, &x, classes)?)])
    }

    /// Of each index of the other dims the element of dim `d` that an index of these names; 0 if there is none.
    pub(super) fn picked(&mut self, n: &Node, x: &View, d: usize, index: &View) -> Result<View> {
        let (x, mut i) = (self.whole(n, x)?, index.clone());
        let mut others = x.shape.clone();
        others.remove(d);
        if i.shape != others {
            i = self.spread_to(n, &i, &others)?;
        }
        if self.is_computed(&i) {
            let mut order: Vec<usize> = (0..others.len()).collect();
            order.insert(d, others.len());
            let is = self.one_hot_of(n, &i, x.shape[d])?.permute(&order);
            let own = self.both(n, Arithmetic::Mul, &x, &is)?;
            return self.sum_over(n, &own, &[d], false);
        }
        let i = self.whole(n, &i)?;
        let lx: String = (0..x.shape.len()).map(letter).collect();
        let li: String = lx.chars().filter(|c| *c != letter(d)).collect();
        let rule = self.rule(n, &format!("{lx},{li}->{li}"), &[x.value, i.value])?;
        let op = Take { rule, padding: Padding::None };
        Ok(View::plain(self.emit(n, "taken", op, &[x.value, i.value])?, &others))
    }

    /// A view in a larger shape, repeated along dims of one element.
    pub(super) fn spread_to(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        let sizes = to.iter().map(|&d| super::graph::IntArg::Is(d as i64)).collect();
        let x = self.of(x);
        self.view_by(n, "expand.default", vec![("self", x), ("size", Arg::Ints(sizes))])
    }

    /// The same along a dim with a computed index of as many dims.
    pub(super) fn at_computed(&mut self, n: &Node, x: &View, at: &View, d: usize) -> Result<View> {
        let rank = at.shape.len();
        let mut order: Vec<usize> = (0..rank).collect();
        order.insert(d + 1, rank);
        let is = self.one_hot_of(n, at, x.shape[d])?.permute(&order);
        let x = x.unsqueeze(d);
        let own = self.both(n, Arithmetic::Mul, &is, &x)?;
        self.sum_over(n, &own, &[d + 1], false)
    }

    /// Where dim `d` is named by an index of any dims, which stand in its place.
    pub(super) fn taken_by(&mut self, n: &Node, x: &View, d: usize, index: &View) -> Result<View> {
        let more = index.shape.len();
        let is = self.one_hot_of(n, index, x.shape[d])?;
        let name = |i: usize| char::from(b'a' + i as u8);
        let own: String = (0..x.shape.len()).map(name).collect();
        let new: String = (0..more).map(|i| char::from(b'A' + i as u8)).collect();
        let to: String =
            own.chars().map(|c| if c == name(d) { new.clone() } else { c.into() }).collect();
        self.by_rule(n, &format!("{new}{},{own}->{to}", name(d)), vec![is, x.clone()])
    }

    /// A known index of a dim of so many elements, in which those below 0 count from its end.
    pub(super) fn known_index(&mut self, n: &Node, f: &Folded, size: usize) -> Result<Folded> {
        let from_start = |i: f64| if i < 0.0 { i + size as f64 } else { i };
        match f.elem {
            Elem::Int => self.fits(n, f.map(Elem::Int, from_start)),
            _truths => Ok(f.clone()),
        }
    }

    /// The same of one that is computed.
    pub(super) fn computed_index(&mut self, n: &Node, i: &View, size: usize) -> Result<View> {
        let i = self.whole(n, i)?;
        let is = i.with(self.emit(n, "from_start", AtLeast { bound: 0.0 }, &[i.value])?);
        let not = self.without(n, &is)?;
        let more = self.scaled(n, &not, size as f64)?;
        self.both(n, Arithmetic::Add, &i, &more)
    }

    /// The same of any. Of columns of data those below 0 are refused when they are read.
    fn index_of(&mut self, n: &Node, id: Id, size: usize) -> Result<View> {
        if let Val::Folded(f) = self.val(id).clone() {
            let f = self.known_index(n, &f, size)?;
            return self.constant(n, &f);
        }
        let i = self.data_of(n, id)?;
        if self.is_computed(&i) { self.computed_index(n, &i, size) } else { Ok(i) }
    }

    /// `x[i, j]`: dims that follow each other by as many indices.
    pub(super) fn by_several(&mut self, n: &Node, x: &View, given: &[(usize, Id)]) -> Result<View> {
        let first = given[0].0;
        let mask = |id: &Id| matches!(self.val(*id), Val::Folded(f) if f.elem == Elem::Bool);
        if given.iter().any(|(_, id)| self.g.truths.contains(id) || mask(id)) {
            return Err(self.refuse(n, "a mask beside another index"));
        }
        if given.iter().enumerate().any(|(k, g)| g.0 != first + k)
            || first + given.len() > x.shape.len()
        {
            return Err(self.refuse(n, "indices of dims that do not follow each other"));
        }
        // A row for each number of a range: those of the other index are of their rows.
        if let [(d, rows), (_, id)] = given[..]
            && let Val::Folded(f) = self.val(rows).clone()
            && f.shape[..] == [x.shape[d]]
            && f.counts_from(0) == Some(0.0)
        {
            let i = self.index_of(n, id, x.shape[d + 1])?;
            if i.shape == f.shape {
                let rest: Vec<usize> =
                    (0..x.shape.len()).filter(|&k| k != d && k != d + 1).collect();
                let mut order = vec![d];
                order.extend(&rest);
                order.push(d + 1);
                let y = x.permute(&order);
                let y = self.whole(n, &y)?;
                let i = rest.iter().fold(i, |i, _| i.unsqueeze(i.shape.len()));
                let y = self.picked(n, &y, order.len() - 1, &i)?;
                let mut back: Vec<usize> = (1..=rest.len()).collect();
                back.insert(d.min(rest.len()), 0);
                return Ok(y.permute(&back));
            }
        }
        let mut at: Option<View> = None;
        for &(d, id) in given {
            let i = self.index_of(n, id, x.shape[d])?;
            let size = x.shape[d] as f64;
            at = Some(match at {
                None => i,
                Some(a) => {
                    let a = if self.is_computed(&a) { a } else { self.float(n, &a)? };
                    let a = self.scaled(n, &a, size)?;
                    self.both(n, Arithmetic::Add, &a, &i)?
                }
            });
        }
        let at = at.ok_or_else(|| self.refuse(n, "it has no index"))?;
        let mut to = x.shape.clone();
        to.splice(first..first + given.len(), [room::count(&x.shape[first..first + given.len()])]);
        let x = self.whole(n, x)?;
        let flat = self.reshaped(n, &x, &to)?;
        self.taken_by(n, &flat, first, &at)
    }

    /// `x[m]` of a mask of dims from `d` on that is known: the elements where it is true.
    pub(super) fn by_mask(&mut self, n: &Node, x: &View, mask: &Folded, d: usize) -> Result<View> {
        let r = mask.shape.len();
        if x.shape.get(d..d + r) != Some(&mask.shape[..]) {
            return Err(self.refuse(n, "its mask is of another shape"));
        }
        let all = self.fits(n, mask.numbers())?;
        let at: Vec<f64> =
            all.iter().enumerate().filter(|m| *m.1 != 0.0).map(|m| m.0 as f64).collect();
        let to = [&x.shape[..d], &[all.len()], &x.shape[d + r..]].concat();
        let x = self.whole(n, x)?;
        let x = self.reshaped(n, &x, &to)?;
        let at: Vec<usize> = at.into_iter().map(|i| i as usize).collect();
        if at.is_empty() {
            return Err(self.refuse(n, "its mask is true nowhere"));
        }
        self.chosen(n, &x, d, &at)
    }

    /// What is added up at the places of an index along dim `d` of a shape: of each element of `x`, with an index of as
    /// many dims, or of one.
    fn put(&mut self, n: &Node, x: &View, at: &View, d: usize, shape: &[usize]) -> Result<View> {
        let (x, at) = (self.whole(n, x)?, self.whole(n, at)?);
        let (rank, size) = (x.shape.len(), shape[d]);
        let all = at.shape == x.shape;
        let alike = rank == shape.len() && (0..rank).all(|k| k == d || x.shape[k] == shape[k]);
        if !alike || !all && at.shape[..] != [x.shape[d]] {
            return Err(self.refuse(n, "its index does not fit"));
        }
        let from: String = (0..rank).map(|i| if i == d { 'z' } else { letter(i) }).collect();
        let to: String = (0..rank).map(letter).collect();
        if self.is_computed(&at) {
            let is = self.one_hot_of(n, &at, size)?;
            let own = if all { from.clone() } else { "z".into() };
            let rule = format!("{from},{own}{}->{to}", letter(d));
            return self.by_rule(n, &rule, vec![x, is]);
        }
        let own = if all { &*from } else { "z" };
        let rule = self.rule(n, &format!("{from},{own}->{to}"), &[x.value, at.value])?;
        let sizes = shardc_ir::attr::Sizes([sized(letter(d), size)].into_iter().collect());
        let op = IndexAdd { rule, sizes, padding: Padding::None };
        Ok(View::plain(self.emit(n, "put", op, &[x.value, at.value])?, shape))
    }

    /// Adds what `from` has at the places of an index.
    pub(super) fn added_at(&mut self, n: &Node, from: &str) -> Result<Vec<Val>> {
        let base = self.data(n, "self")?;
        let (at, x) = (self.data(n, "index")?, self.data(n, from)?);
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), base.shape.len(), self, n)?;
        let x = self.scaled(n, &x, self.number(n, "alpha").unwrap_or(1.0))?;
        let put = self.put(n, &x, &at, d, &base.shape)?;
        Ok(vec![Val::Data(self.both(n, Arithmetic::Add, &base, &put)?)])
    }

    /// Writes what `src` has, or a number, to the places of an index.
    pub(super) fn written_at(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (base, at) = (self.data(n, "self")?, self.data(n, "index")?);
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), base.shape.len(), self, n)?;
        let one = self.number_in(n, 1.0, &at.shape)?;
        let there = self.put(n, &one, &at, d, &base.shape)?;
        let there = there.with(self.emit(n, "there", AtLeast { bound: 1.0 }, &[there.value])?);
        let put = match self.number(n, "value") {
            // Once, however often a place is named.
            Some(c) => self.scaled(n, &there, c)?,
            None => {
                let x = self.data(n, "src")?;
                self.put(n, &x, &at, d, &base.shape)?
            }
        };
        let put = self.whole(n, &put)?;
        let base = self.whole(n, &base)?;
        let rule = shardc_ir::attr::Broadcast::SAME;
        let ins = [there.value, put.value, base.value];
        Ok(vec![Val::Data(base.with(self.emit(n, "written", Select { rule }, &ins)?))])
    }

    /// Sums or means of rows of a table, of as many for each bag.
    pub(super) fn bags(&mut self, n: &Node) -> Result<Vec<Val>> {
        let offsets = self.operand(n, "offsets");
        let plain =
            [self.operand(n, "per_sample_weights").is_none(), !self.flag(n, "scale_grad_by_freq")];
        let Some(Val::Folded(f)) = offsets.filter(|_| plain == [true; 2]) else {
            return Err(self.refuse(n, "its bags are not known, or weigh"));
        };
        let index = self.data(n, "indices")?;
        let starts = self.fits(n, f.numbers())?;
        let many = index.shape.first().copied().unwrap_or(0);
        let each = many / starts.len().max(1);
        let even = each > 0
            && each * starts.len() == many
            && starts.iter().enumerate().all(|(i, &s)| s == (i * each) as f64);
        if !even || self.int(n, "padding_idx")?.unwrap_or(-1) >= 0 {
            return Err(self.refuse(n, "its bags are of different sizes, or padded"));
        }
        let index = self.reshaped(n, &index, &[starts.len(), each])?;
        let (w, index) = (self.data(n, "weight")?, self.of(&index));
        let Arg::Value(index) = index else { return Err(self.refuse(n, "it has no index")) };
        let made = self.looked_up(n, w, index, None)?;
        let Some(Val::Data(rows)) = made.into_iter().next() else {
            return Err(self.refuse(n, "it has no rows"));
        };
        let y = match self.int(n, "mode")?.unwrap_or(0) {
            0 => self.sum_over(n, &rows, &[1], false)?,
            1 => {
                let y = self.sum_over(n, &rows, &[1], false)?;
                self.scaled(n, &y, 1.0 / each as f64)?
            }
            _largest => return Err(self.refuse(n, "the largest of bags")),
        };
        Ok(vec![Val::Data(y)])
    }

    /// Elements on one side of a diagonal of the last two dims, and 0 on the other.
    pub(super) fn triangle(&mut self, n: &Node, lower: bool) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let k = self.int(n, "diagonal")?.unwrap_or(0);
        let Some(r) = x.shape.len().checked_sub(2) else {
            return Err(self.refuse(n, "its operand is no matrix"));
        };
        let (s, t) = (x.shape[r], x.shape[r + 1]);
        let is = |i: usize| {
            let by = (i % t) as i64 - (i / t) as i64;
            f64::from(u8::from(if lower { by <= k } else { by >= k }))
        };
        self.countable(n, &[s, t])?;
        let mask = self.table(n, &[s, t], (0..s * t).map(is).collect())?;
        Ok(vec![Val::Data(self.both(n, Arithmetic::Mul, &x, &mask)?)])
    }

    /// The elements on the diagonal of a square.
    pub(super) fn diagonal(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let [a, b] = x.shape[..] else { return Err(self.refuse(n, "its operand is no matrix")) };
        if a != b || self.int(n, "offset")?.unwrap_or(0) != 0 {
            return Err(self.refuse(n, "another diagonal, or that of no square"));
        }
        self.countable(n, &[a, a])?;
        let is = |i: usize| f64::from(u8::from(i / a == i % a));
        let eye = self.table(n, &[a, a], (0..a * a).map(is).collect())?;
        let y = self.both(n, Arithmetic::Mul, &x, &eye)?;
        Ok(vec![Val::Data(self.sum_over(n, &y, &[1], false)?)])
    }

    /// Whole numbers of floats: what is behind the point is left out.
    pub(super) fn truncated(&mut self, n: &Node, x: &View) -> Result<View> {
        if self.elem_is_truth(n) {
            return Ok(x.clone());
        }
        let x = self.of(x);
        let size = self.view_by(n, "abs.default", vec![("self", x.clone())])?;
        let size = self.of(&size);
        let size = self.view_by(n, "floor.default", vec![("self", size)])?;
        let sign = self.view_by(n, "sign.default", vec![("self", x)])?;
        self.both(n, Arithmetic::Mul, &size, &sign)
    }

    fn elem_is_truth(&self, n: &Node) -> bool {
        self.elem_of(n, "self") == Elem::Bool
    }
}
