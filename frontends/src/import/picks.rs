//! Repeats, and elements of a dim by their numbers.

use super::folded::Folded;
use super::graph::{Arg, Elem, Node};
use super::lower::{Lower, MAX_RANK, Val};
use super::operands::dim_of;
use super::view::{Dim, View, letter};
use shardc_ir::attr::Padding;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Concat, Take};

/// Most elements of a dim that are taken one by one.
const MOST: usize = 24;

impl Lower<'_> {
    /// Each index of a dim as a value of its own.
    pub(super) fn unbind(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), x.shape.len(), self, n)?;
        if x.shape[d] != n.outs.len() {
            return Err(self.refuse(n, "it has another number of results"));
        }
        let one = |l: &mut Lower, i| {
            let y = l.narrowed(n, &x, d, i, 1)?;
            let mut to = y.shape.clone();
            to.remove(d);
            l.reshaped(n, &y, &to).map(Val::Data)
        };
        (0..x.shape[d]).map(|i| one(self, i)).collect()
    }

    /// Of a `repeat`: the shape with dims in front that are repeated, that with each dim behind its repeats, and
    /// that of the result.
    pub(super) fn repeated(
        &self,
        n: &Node,
        shape: &[usize],
        times: &[i64],
    ) -> Result<(Vec<usize>, Vec<usize>, Vec<usize>)> {
        let times: Option<Vec<usize>> = times.iter().map(|&t| usize::try_from(t).ok()).collect();
        let times = times.filter(|t| t.len() >= shape.len() && 2 * t.len() <= MAX_RANK);
        let times = times.filter(|t| t.iter().all(|&t| t > 0));
        let times = times.ok_or_else(|| self.refuse(n, "it repeats nothing, or fewer dims"))?;
        let own = [vec![1; times.len() - shape.len()], shape.to_vec()].concat();
        let between = times.iter().zip(&own).flat_map(|(&t, &s)| [t, s]).collect();
        let to: Option<Vec<usize>> =
            times.iter().zip(&own).map(|(&t, &s)| t.checked_mul(s)).collect();
        let to = to.ok_or_else(|| self.refuse(n, "its result is too large"))?;
        Ok((own, between, to))
    }

    /// All of a value so many times along each dim.
    pub(super) fn repeat(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let x = self.settled(n, &x)?;
        let (own, _, to) = self.repeated(n, &x.shape, &self.ints(n, "repeats")?)?;
        let mut y = View { value: x.value, dims: vec![], shape: vec![] };
        let before = own.len() - x.shape.len();
        for (d, &size) in own.iter().enumerate() {
            let dim = d.checked_sub(before).map_or(Dim::Virtual, |d| x.dims[d]);
            // What does not change is repeated by itself.
            let (dims, sizes) = match (to[d] / size, dim) {
                (1, _) | (_, Dim::Virtual) => (vec![dim], vec![to[d]]),
                (times, _) => (vec![Dim::Virtual, dim], vec![times, size]),
            };
            y.dims.extend(dims);
            y.shape.extend(sizes);
        }
        self.reshaped(n, &y, &to).map(|y| vec![Val::Data(y)])
    }

    /// `x[:, i]`, and `index_select`: elements of one dim, by known numbers or by those of a tensor.
    pub(super) fn index(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let given: Vec<_> = match (n.arg("indices"), n.arg("index")) {
            (Arg::Values(all), _) => {
                all.iter().enumerate().filter_map(|(d, id)| id.map(|id| (d, id))).collect()
            }
            (_, Arg::Value(id)) => {
                vec![(dim_of(self.int(n, "dim")?.unwrap_or(0), x.shape.len(), self, n)?, *id)]
            }
            _none => vec![],
        };
        let [(d, id)] = given[..] else {
            return match given.is_empty() {
                true => Err(self.refuse(n, "it has no index")),
                false => self.by_several(n, &x, &given).map(|y| vec![Val::Data(y)]),
            };
        };
        if let Val::Folded(mask) = self.val(id).clone()
            && mask.elem == Elem::Bool
        {
            return self.by_mask(n, &x, &mask, d).map(|y| vec![Val::Data(y)]);
        }
        if d >= x.shape.len() {
            return Err(self.refuse(n, "its index is of no dim"));
        }
        let from_start = |f: &Folded| f.numbers().is_none_or(|i| i.iter().all(|&i| i >= 0.0));
        let known = matches!(self.val(id), Val::Folded(f) if (f.shape.len() > 1 || f.elements() > MOST) && from_start(f));
        if known && d == 0 && x.shape.len() == 2 {
            return self.looked_up(n, x, id, None);
        }
        let Val::Folded(index) = self.val(id).clone() else {
            let i = self.data_of(n, id)?;
            return self.taken(n, &x, d, &i).map(|y| vec![Val::Data(y)]);
        };
        if index.shape.len() != 1 || index.elements() == 0 || index.elements() > MOST {
            let index = self.known_index(n, &index, x.shape[d])?;
            let i = self.constant(n, &index)?;
            return self.taken(n, &x, d, &i).map(|y| vec![Val::Data(y)]);
        }
        let at = self.fits(n, index.numbers())?.into_iter();
        let at = at.map(|i| dim_of(i as i64, x.shape[d], self, n));
        let at: Vec<usize> = at.collect::<Result<_>>()?;
        let mut parts = vec![];
        let mut rest = &at[..];
        while let Some(&first) = rest.first() {
            let run = rest.iter().enumerate().take_while(|(k, i)| **i == first + k).count();
            parts.push(self.narrowed(n, &x, d, first, run)?);
            rest = &rest[run..];
        }
        let [first, ..] = &parts[..] else { return Err(self.refuse(n, "its index is empty")) };
        if parts.len() == 1 {
            return Ok(vec![Val::Data(first.clone())]);
        }
        let mut y = first.clone();
        let Dim::Real(k) = y.dims[d] else {
            y.shape[d] = at.len();
            return Ok(vec![Val::Data(y)]);
        };
        let values: Vec<_> = parts.iter().map(|p| p.value).collect();
        y.shape[d] = at.len();
        let v = self.emit(n, "picked", Concat::along(k, at.len()), &values)?;
        Ok(vec![Val::Data(y.with(v))])
    }

    /// The elements of a dim that a tensor of whole numbers names: its dims stand in that place.
    fn taken(&mut self, n: &Node, x: &View, d: usize, index: &View) -> Result<View> {
        if self
            .g
            .truths
            .iter()
            .any(|t| matches!(self.env.find(*t), Some(Val::Data(v)) if v == index))
        {
            return Err(self.refuse(n, "how many elements it has depends on data"));
        }
        if self.is_computed(index) {
            let index = self.computed_index(n, index, x.shape[d])?;
            return self.taken_by(n, x, d, &index);
        }
        let (x, i) = (self.settled(n, x)?, self.ordered(n, index)?);
        let (rank, more) = (x.shape.len(), i.shape.len());
        if !matches!(x.dims[d], Dim::Real(_)) || rank + more > MAX_RANK {
            return Err(self.refuse(n, "nothing changes along the dim of its index"));
        }
        // Letters: those of x, where the index stands z, and behind them those of the index.
        let lx: String =
            x.letters(rank).chars().map(|c| if c == letter(d) { 'z' } else { c }).collect();
        let shift = |c: char| letter((c as u8 - b'a') as usize + rank);
        let li: String = i.letters(more).chars().map(shift).collect();
        let all: Vec<char> = (0..d)
            .map(letter)
            .chain((rank..rank + more).map(letter))
            .chain((d + 1..rank).map(letter))
            .collect();
        let out: String = all.iter().filter(|c| lx.contains(**c) || li.contains(**c)).collect();
        let rule = self.rule(n, &format!("{lx},{li}->{out}"), &[x.value, i.value])?;
        let v =
            self.emit(n, "taken", Take { rule, padding: Padding::None }, &[x.value, i.value])?;
        let shape = [&x.shape[..d], &i.shape[..], &x.shape[d + 1..]].concat();
        let dims =
            all.iter().map(|c| out.chars().position(|o| o == *c).map_or(Dim::Virtual, Dim::Real));
        Ok(View { value: v, dims: dims.collect(), shape })
    }
}
