//! Windows, and elements of dims in other places: pools, padding, turns, sizes that are interpolated, transposed
//! convolutions.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::room;
use super::table::Arithmetic;
use super::view::{Dim, View, letter};
use shardc_ir::attr::Sizes;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Dot, Narrow, Pad};
use shardc_ir::rule::Letter;

/// Most places of a window.
const MOST: usize = 256;

impl Lower<'_> {
    /// One of a list of numbers, of which one may stand for all.
    fn nth(&self, n: &Node, name: &str, d: usize, or: usize) -> Result<usize> {
        let all = self.ints(n, name)?;
        let own = all.get(d).or(all.first()).map_or(Some(or), |&i| usize::try_from(i).ok());
        // So that its product with any dim is a number.
        let own = own.filter(|&i| i <= 1 << 15);
        own.ok_or_else(|| self.refuse(n, &format!("`{name}` is negative, or more than 32768")))
    }

    /// A dim of a value in a larger one from `start`, at a distance, that is 0 elsewhere.
    fn placed(
        &mut self,
        n: &Node,
        x: &View,
        d: usize,
        (start, step, to): (i64, usize, usize),
    ) -> Result<View> {
        let x = self.whole(n, x)?;
        let sizes = Sizes([(Letter(b'd' - b'a'), to)].into_iter().collect());
        let dim = Narrow::along(d, 0, 1, 1).dim;
        let step = Narrow::along(d, 0, 1, step).step;
        let op = Pad { sizes, dim, step, ..Pad::new(start, to) };
        let v = self.emit(n, "padded", op, &[x.value])?;
        let mut shape = x.shape.clone();
        shape[d] = to;
        Ok(View::plain(v, &shape))
    }

    /// Elements of a dim from `start` at a distance.
    fn spaced(
        &mut self,
        n: &Node,
        x: &View,
        d: usize,
        (start, len, step): (usize, usize, usize),
    ) -> Result<View> {
        let x = self.whole(n, x)?;
        if (start, len, step) == (0, x.shape[d], 1) {
            return Ok(x);
        }
        let v = self.emit(n, "place", Narrow::along(d, start, len, step), &[x.value])?;
        let mut shape = x.shape.clone();
        shape[d] = len;
        Ok(View::plain(v, &shape))
    }

    /// The largest, or the mean, of windows of the last dims.
    pub(super) fn pool(&mut self, n: &Node, dims: usize, largest: bool) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let mut x = self.whole(n, &x)?;
        let first = x.shape.len().checked_sub(dims).filter(|&f| f > 0);
        let first = first.ok_or_else(|| self.refuse(n, "its operand has too few dims"))?;
        let mut along = vec![];
        for d in 0..dims {
            let window = self.nth(n, "kernel_size", d, 1)?;
            let stride = self.nth(n, "stride", d, window)?;
            let (pad, dilation) = (self.nth(n, "padding", d, 0)?, self.nth(n, "dilation", d, 1)?);
            let size = x.shape[first + d] + 2 * pad;
            let reach = dilation * window.saturating_sub(1) + 1;
            if window == 0 || stride == 0 || reach > size || window > MOST {
                return Err(self.refuse(n, "its window does not fit"));
            }
            let out = (size - reach) / stride + 1;
            if self.flag(n, "ceil_mode") && (size - reach) % stride != 0 {
                return Err(self.refuse(n, "windows that reach over the end (ceil_mode)"));
            }
            along.push((window, stride, dilation, out));
            if pad > 0 {
                let own = x.shape[first + d];
                x = self.placed(n, &x, first + d, (pad as i64, 1, size))?;
                if largest {
                    let far = |i: usize| {
                        if i < pad || i >= pad + own { f64::from(f32::MIN) } else { 0.0 }
                    };
                    let mut edge = self.table(n, &[size], (0..size).map(far).collect())?;
                    (d + 1..dims).for_each(|_| edge = edge.unsqueeze(edge.shape.len()));
                    x = self.both(n, Arithmetic::Add, &x, &edge)?;
                } else if matches!(n.arg("count_include_pad"), Arg::Bool(false)) {
                    return Err(self.refuse(n, "means that do not count what is padded"));
                }
            }
        }
        let places: usize = along.iter().map(|a| a.0).product();
        if places > MOST || *n.arg("divisor_override") != Arg::None {
            return Err(self.refuse(n, "its window has too many places, or another divisor"));
        }
        let mut made: Option<View> = None;
        for place in 0..places {
            let (mut y, mut rest) = (x.clone(), place);
            for (d, (window, stride, dilation, out)) in along.iter().enumerate().rev() {
                y = self.spaced(n, &y, first + d, (rest % window * dilation, *out, *stride))?;
                rest /= window;
            }
            let how = if largest { Arithmetic::Max } else { Arithmetic::Add };
            made = Some(match made {
                None => y,
                Some(m) => self.both(n, how, &m, &y)?,
            });
        }
        let y = made.ok_or_else(|| self.refuse(n, "its window has no places"))?;
        let y = if largest { y } else { self.scaled(n, &y, 1.0 / places as f64)? };
        Ok(vec![Val::Data(y)])
    }

    /// A dim by known numbers: of each new element a row of how much it has of the old ones.
    fn mixed(&mut self, n: &Node, x: &View, d: usize, rows: &[Vec<f64>]) -> Result<View> {
        let x = self.whole(n, x)?;
        let table = self.table(n, &[rows.len(), x.shape[d]], rows.concat())?;
        let table = self.whole(n, &table)?;
        let from: String = (0..x.shape.len()).map(letter).collect();
        let to: String = from.chars().map(|c| if c == letter(d) { 'z' } else { c }).collect();
        let rule =
            self.rule(n, &format!("{from},z{}->{to}", letter(d)), &[x.value, table.value])?;
        let v = self.emit(n, "mixed", Dot { rule }, &[x.value, table.value])?;
        let mut shape = x.shape.clone();
        shape[d] = rows.len();
        Ok(View::plain(v, &shape))
    }

    /// Elements of a dim by their numbers.
    pub(super) fn chosen(&mut self, n: &Node, x: &View, d: usize, at: &[usize]) -> Result<View> {
        if !matches!(x.dims[d], Dim::Real(_) | Dim::Each(..)) {
            let mut y = x.clone();
            y.shape[d] = at.len();
            return Ok(y);
        }
        let mut runs: Vec<(usize, usize)> = vec![];
        for &i in at {
            match runs.last_mut() {
                Some((from, len)) if *from + *len == i => *len += 1,
                _other => runs.push((i, 1)),
            }
        }
        if runs.len() > 24 {
            self.countable(n, &[at.len(), x.shape[d]])?;
            let row = |&i: &usize| (0..x.shape[d]).map(|k| f64::from(u8::from(k == i))).collect();
            return self.mixed(n, x, d, &at.iter().map(row).collect::<Vec<_>>());
        }
        let parts = runs.iter().map(|&(from, len)| self.narrowed(n, x, d, from, len));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.cat_of(n, parts, d)
    }

    /// Means of parts of the last dims, as many as are asked for.
    pub(super) fn adaptive(&mut self, n: &Node, dims: usize) -> Result<Vec<Val>> {
        let mut x = self.data(n, "self")?;
        let first = x.shape.len().checked_sub(dims);
        let first = first.ok_or_else(|| self.refuse(n, "its operand has too few dims"))?;
        for d in first..x.shape.len() {
            let (to, size) = (self.nth(n, "output_size", d - first, 1)?, x.shape[d]);
            if to == 1 {
                x = self.mean_of(n, &x, d)?;
                continue;
            }
            self.countable(n, &[to, size])?;
            let row = |o: usize| {
                let (from, end) = (o * size / to, ((o + 1) * size).div_ceil(to));
                let part =
                    |i: usize| if i < from || i >= end { 0.0 } else { 1.0 / (end - from) as f64 };
                (0..size).map(part).collect()
            };
            x = self.mixed(n, &x, d, &(0..to).map(row).collect::<Vec<_>>())?;
        }
        Ok(vec![Val::Data(x)])
    }

    /// The last dims in other sizes: of the nearest elements, or between neighbours.
    pub(super) fn resized(&mut self, n: &Node, linear: bool) -> Result<Vec<Val>> {
        let mut x = self.data(n, "input").or_else(|_| self.data(n, "self"))?;
        let corners = self.flag(n, "align_corners");
        for d in 2..x.shape.len() {
            let size = x.shape[d];
            let given = self.ints(n, "output_size")?;
            let (to, factor) = match (given.get(d - 2), n.arg("scale_factors")) {
                (Some(&to), _) => (usize::try_from(to).unwrap_or(0), None),
                (None, Arg::Floats(all)) if all.len() + 2 == x.shape.len() => {
                    ((size as f64 * all[d - 2]) as usize, Some(all[d - 2]))
                }
                _other => return Err(self.refuse(n, "nothing says its sizes")),
            };
            if to == 0 {
                return Err(self.refuse(n, "nothing is left of a dim"));
            }
            self.countable(n, &[to, if linear { size } else { 1 }])?;
            let step = factor.map_or(size as f64 / to as f64, |f| 1.0 / f);
            if !linear {
                let at = |o: usize| ((o as f64 * step) as usize).min(size - 1);
                x = self.chosen(n, &x, d, &(0..to).map(at).collect::<Vec<_>>())?;
                continue;
            }
            let row = |o: usize| {
                let at = match corners {
                    true if to > 1 => o as f64 * (size - 1) as f64 / (to - 1) as f64,
                    true => 0.0,
                    false => ((o as f64 + 0.5) * step - 0.5).max(0.0),
                };
                let (low, part) = ((at as usize).min(size - 1), at.fract());
                let mut all = vec![0.0; size];
                all[low] += 1.0 - part;
                all[(low + 1).min(size - 1)] += part;
                all
            };
            x = self.mixed(n, &x, d, &(0..to).map(row).collect::<Vec<_>>())?;
        }
        Ok(vec![Val::Data(x)])
    }

    /// More elements before and behind each of the last dims.
    pub(super) fn padded(&mut self, n: &Node) -> Result<Vec<Val>> {
        let mut x = self.float_data(n, "self")?;
        let (pads, value) = (self.ints(n, "pad")?, self.number(n, "value").unwrap_or(0.0));
        let mode = if let Arg::Text(t) = n.arg("mode") { t.clone() } else { "constant".into() };
        for (k, p) in pads.chunks(2).enumerate() {
            let d = x.shape.len().checked_sub(k + 1);
            let (Some(d), [before, behind]) = (d, p) else {
                return Err(self.refuse(n, "it pads other dims than there are"));
            };
            let size = x.shape[d] as i64;
            let to = size.saturating_add(*before).saturating_add(*behind);
            if to <= 0 {
                return Err(self.refuse(n, "nothing is left of a dim"));
            }
            if (*before, *behind) == (0, 0) {
                continue;
            }
            self.allowed(n, vec![to as usize])?;
            if value != 0.0 || &*mode != "constant" {
                self.countable(n, &[to as usize])?;
            }
            let mirror = |i: i64| {
                if i < 0 {
                    -i
                } else if i >= size {
                    2 * (size - 1) - i
                } else {
                    i
                }
            };
            let at: Box<dyn Fn(i64) -> i64> = match &*mode {
                "reflect" => Box::new(mirror),
                "replicate" => Box::new(move |i| i.clamp(0, size - 1)),
                "circular" => Box::new(move |i| i.rem_euclid(size)),
                _constant => {
                    x = self.placed(n, &x, d, (*before, 1, to as usize))?;
                    if value != 0.0 {
                        let c = self.finite(n, value)?;
                        let own = *before..before.saturating_add(size);
                        let around = (0..to).map(|i| if own.contains(&i) { 0.0 } else { c });
                        let line = self.table(n, &[to as usize], around.collect())?;
                        let behind = d + 1..x.shape.len();
                        let line = behind.fold(line, |l, _| l.unsqueeze(l.shape.len()));
                        x = self.both(n, Arithmetic::Add, &x, &line)?;
                    }
                    continue;
                }
            };
            let all: Vec<i64> = (0..to).map(|i| at(i - before)).collect();
            if all.iter().any(|i| !(0..size).contains(i)) {
                return Err(self.refuse(n, "it pads by more than there is"));
            }
            x = self.chosen(n, &x, d, &all.iter().map(|&i| i as usize).collect::<Vec<_>>())?;
        }
        Ok(vec![Val::Data(x)])
    }

    /// Dims whose last elements come first.
    pub(super) fn roll(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let (by, dims) = (self.ints(n, "shifts")?, self.ints(n, "dims")?);
        let flat = dims.is_empty();
        let mut y = if flat { self.reshaped(n, &x, &[room::count(&x.shape)])? } else { x.clone() };
        let dims = if flat { vec![0] } else { dims };
        for (d, by) in dims.into_iter().zip(by) {
            let d = dim_of(d, y.shape.len(), self, n)?;
            let size = y.shape[d];
            self.countable(n, &[size])?;
            let from = (by.wrapping_neg()).rem_euclid(size.max(1) as i64) as usize;
            y = self.chosen(n, &y, d, &(from..size).chain(0..from).collect::<Vec<_>>())?;
        }
        self.reshaped(n, &y, &x.shape).map(|y| vec![Val::Data(y)])
    }

    pub(super) fn flip(&mut self, n: &Node) -> Result<Vec<Val>> {
        let mut x = self.data(n, "self")?;
        for d in self.ints(n, "dims")? {
            let d = dim_of(d, x.shape.len(), self, n)?;
            self.countable(n, &[x.shape[d]])?;
            x = self.chosen(n, &x, d, &(0..x.shape[d]).rev().collect::<Vec<_>>())?;
        }
        Ok(vec![Val::Data(x)])
    }

    /// Windows of a dim, whose places are a new last dim.
    pub(super) fn unfold(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = dim_of(self.int(n, "dimension")?.unwrap_or(0), x.shape.len(), self, n)?;
        let (window, step) = (self.nth(n, "size", 0, 1)?, self.nth(n, "step", 0, 1)?);
        if window == 0 || step == 0 || window > x.shape[d] || window > MOST {
            return Err(self.refuse(n, "its window does not fit"));
        }
        let count = (x.shape[d] - window) / step + 1;
        let mut parts = vec![];
        for i in 0..window {
            let y = self.spaced(n, &x, d, (i, count, step))?;
            parts.push(y.unsqueeze(y.shape.len()));
        }
        let last = x.shape.len();
        self.cat_of(n, parts, last).map(|y| vec![Val::Data(y)])
    }

    /// A convolution's transpose: for each place in the window its product, put where it falls.
    pub(super) fn conv_back(&mut self, n: &Node, dims: usize) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "input")?, self.data(n, "weight")?);
        let (x, w) = (self.whole(n, &x)?, self.whole(n, &w)?);
        let groups = self.nth(n, "groups", 0, 1)?;
        let fits =
            x.shape.len() == dims + 2 && w.shape.len() == dims + 2 && x.shape[1] == w.shape[0];
        if !fits || groups == 0 || x.shape[1] % groups != 0 {
            return Err(self.refuse(n, "its operands do not fit"));
        }
        let places = room::count(&w.shape[2..]);
        if places > MOST {
            return Err(self.refuse(n, "its window has too many places"));
        }
        let (c, o) = (x.shape[1] / groups, w.shape[1]);
        let grouped = [&[x.shape[0], groups, c], &x.shape[2..]].concat();
        let xs = self.reshaped(n, &x, &grouped)?;
        let xs = self.whole(n, &xs)?;
        let mut sum: Option<View> = None;
        for place in 0..places {
            let (mut own, mut rest, mut at) = (w.clone(), place, vec![0; dims]);
            for d in (0..dims).rev() {
                at[d] = rest % w.shape[d + 2];
                rest /= w.shape[d + 2];
                own = self.spaced(n, &own, d + 2, (at[d], 1, 1))?;
            }
            let own = self.reshaped(n, &own, &[groups, c, o])?;
            let own = self.whole(n, &own)?;
            let from: String = (0..grouped.len()).map(letter).collect();
            let to: String = from.chars().map(|l| if l == 'c' { 'z' } else { l }).collect();
            let rule = self.rule(n, &format!("{from},bcz->{to}"), &[xs.value, own.value])?;
            let v = self.emit(n, "part", Dot { rule }, &[xs.value, own.value])?;
            let shape = [&[x.shape[0], groups, o], &x.shape[2..]].concat();
            let mut y = View::plain(v, &shape);
            for (d, &at) in at.iter().enumerate() {
                let (stride, dilation) =
                    (self.nth(n, "stride", d, 1)?, self.nth(n, "dilation", d, 1)?);
                let (pad, more) =
                    (self.nth(n, "padding", d, 0)?, self.nth(n, "output_padding", d, 0)?);
                let size = (x.shape[d + 2] - 1) * stride.max(1)
                    + dilation * (w.shape[d + 2] - 1)
                    + 1
                    + more;
                self.allowed(n, vec![size])?;
                if size <= 2 * pad {
                    return Err(self.refuse(n, "nothing is left of a dim"));
                }
                y = self.placed(n, &y, d + 3, ((at * dilation) as i64, stride, size))?;
                y = self.spaced(n, &y, d + 3, (pad, size - 2 * pad, 1))?;
            }
            sum = Some(match sum {
                None => y,
                Some(s) => self.both(n, Arithmetic::Add, &s, &y)?,
            });
        }
        let y = sum.ok_or_else(|| self.refuse(n, "its window has no places"))?;
        let to = [&[x.shape[0], groups * o], &y.shape[3..]].concat();
        let y = self.reshaped(n, &y, &to)?;
        if *n.arg("bias") == Arg::None {
            return Ok(vec![Val::Data(y)]);
        }
        let b = self.data(n, "bias")?;
        let b = (0..dims).fold(b, |b, _| b.unsqueeze(b.shape.len()));
        Ok(vec![Val::Data(self.both(n, Arithmetic::Add, &y, &b)?)])
    }

    /// Channels as more places of two dims.
    pub(super) fn pixel_shuffle(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let r = self.nth(n, "upscale_factor", 0, 1)?;
        let [b, c, h, w] = x.shape[..] else {
            return Err(self.refuse(n, "its operand is not [rows, channels, height, width]"));
        };
        if r == 0 || c % (r * r) != 0 {
            return Err(self.refuse(n, "its factor does not divide the channels"));
        }
        let x = self.whole(n, &x)?;
        let y = self.reshaped(n, &x, &[b, c / (r * r), r, r, h, w])?;
        let y = y.permute(&[0, 1, 4, 2, 5, 3]);
        self.reshaped(n, &y, &[b, c / (r * r), h * r, w * r]).map(|y| vec![Val::Data(y)])
    }
}
