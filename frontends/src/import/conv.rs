//! Convolutions over one or two dims, as products: of windows that touch each other one product, of others one
//! product for each place in the window.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::{View, letter};
use shardc_ir::attr::Sizes;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Dot, Narrow, Pad};
use shardc_ir::rule::Letter;

/// Most places of a window.
const MOST: usize = 128;

/// A convolution along one dim.
#[derive(Clone, Copy)]
struct Along {
    size: usize,
    window: usize,
    stride: usize,
    dilation: usize,
    /// Zeros before and behind.
    pad: [usize; 2],
}

impl Along {
    /// Elements of the result; nothing if the window is too large.
    fn out(self) -> Option<usize> {
        let all = self.size.checked_add(self.pad[0])?.checked_add(self.pad[1])?;
        let reach = (self.window.checked_sub(1)?).checked_mul(self.dilation)?.checked_add(1)?;
        Some(all.checked_sub(reach)? / self.stride + 1)
    }
    /// Windows touch each other, and nothing lies between them.
    fn touches(self) -> bool {
        self.stride == self.window && self.dilation == 1 && self.pad == [0, 0]
    }
}

impl Lower<'_> {
    /// `conv1d` or `conv2d` of [rows, channels, size…] by a weight [results, channels of a group, window…].
    pub(super) fn conv(&mut self, n: &Node, dims: usize) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "input")?, self.data(n, "weight")?);
        let (x, w) = (self.whole(n, &x)?, self.whole(n, &w)?);
        let groups = self.int(n, "groups")?.unwrap_or(1);
        let groups = usize::try_from(groups).ok().filter(|&g| g > 0);
        let fits = x.shape.len() == dims + 2 && w.shape.len() == dims + 2;
        let groups = groups.filter(|g| {
            fits && w.shape[1].checked_mul(*g) == Some(x.shape[1]) && w.shape[0] % g == 0
        });
        let groups = groups.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        let along = (0..dims).map(|d| self.along(n, &x, &w, d)).collect::<Result<Vec<Along>>>()?;
        let places = along.iter().fold(1usize, |n, a| n.saturating_mul(a.window));
        let touching = groups == 1 && along.iter().all(|a| a.touches());
        let y = match touching {
            true => self.of_patches(n, &x, &w, &along)?,
            false if places <= MOST => self.of_places(n, &x, &w, &along, groups)?,
            false => {
                let what =
                    format!("its window has {places} places, of which at most {MOST} are read");
                return Err(self.refuse(n, &what));
            }
        };
        if *n.arg("bias") == Arg::None {
            return Ok(vec![Val::Data(y)]);
        }
        // Of each channel one.
        let mut b = self.data(n, "bias")?;
        (0..dims).for_each(|_| b = b.unsqueeze(b.shape.len()));
        Ok(vec![Val::Data(self.both(n, Arithmetic::Add, &y, &b)?)])
    }

    /// What a convolution does along its dim `d`.
    fn along(&self, n: &Node, x: &View, w: &View, d: usize) -> Result<Along> {
        let one = |name: &str, or: usize| -> Result<usize> {
            let all = self.ints(n, name)?;
            let own = all.get(d).or(all.first()).map_or(Some(or), |&i| usize::try_from(i).ok());
            own.ok_or_else(|| self.refuse(n, &format!("`{name}` is negative")))
        };
        let (stride, dilation) = (one("stride", 1)?, one("dilation", 1)?);
        let window = w.shape[d + 2];
        let pad = match n.arg("padding") {
            Arg::Text(t) if &**t == "valid" => [0, 0],
            Arg::Text(_) => {
                let all = window.saturating_sub(1).saturating_mul(dilation);
                [all / 2, all - all / 2]
            }
            _ => [one("padding", 0)?; 2],
        };
        let a = Along { size: x.shape[d + 2], window, stride, dilation, pad };
        let fits = stride > 0 && dilation > 0 && a.out().is_some();
        if fits { Ok(a) } else { Err(self.refuse(n, "its window is larger than its operand")) }
    }

    /// One product of windows that touch each other.
    fn of_patches(&mut self, n: &Node, x: &View, w: &View, along: &[Along]) -> Result<View> {
        let (mut x, mut split) = (x.clone(), x.shape[..2].to_vec());
        for (d, a) in along.iter().enumerate() {
            let count = a.size / a.window;
            x = self.narrowed(n, &x, d + 2, 0, count * a.window)?;
            split.extend([count, a.window]);
        }
        let x = self.reshaped(n, &x, &split)?;
        let x = self.whole(n, &x)?;
        // Of the weight a and then the channel and the window, as x has them.
        let all: String = (0..split.len()).map(letter).collect();
        let inner: String = all
            .chars()
            .enumerate()
            .filter(|(i, _)| *i == 1 || *i > 2 && i % 2 == 1)
            .map(|c| c.1)
            .collect();
        let outer: Vec<char> = all.chars().filter(|c| !inner.contains(*c)).collect();
        let out: String = outer.iter().chain(&['z']).collect();
        let rule = self.rule(n, &format!("{all},z{inner}->{out}"), &[x.value, w.value])?;
        let v = self.emit(n, "patches", Dot { rule }, &[x.value, w.value])?;
        let sizes = along.iter().map(|a| a.size / a.window);
        let sizes: Vec<usize> = [x.shape[0]].into_iter().chain(sizes).chain([w.shape[0]]).collect();
        Ok(channels_second(&View::plain(v, &sizes)))
    }

    /// For each place in the window the product of all elements that stand there, and their sum.
    fn of_places(
        &mut self,
        n: &Node,
        x: &View,
        w: &View,
        along: &[Along],
        groups: usize,
    ) -> Result<View> {
        let mut v = x.value;
        for (d, a) in along.iter().enumerate().filter(|(_, a)| a.pad != [0, 0]) {
            let to = a.size + a.pad[0] + a.pad[1];
            let sizes = Sizes([(Letter(b'd' - b'a'), to)].into_iter().collect());
            let dim = Narrow::along(d + 2, 0, 1, 1).dim;
            let wide = Pad { sizes, dim, ..Pad::new(a.pad[0] as i64, to) };
            v = self.emit(n, "padded", wide, &[v])?;
        }
        let outs: Vec<usize> = along.iter().map(|a| a.out().unwrap_or(1)).collect();
        let places = along.iter().fold(1usize, |n, a| n.saturating_mul(a.window));
        let (c, o) = (w.shape[1], w.shape[0]);
        let mut sum: Option<View> = None;
        for place in 0..places {
            let (mut xs, mut ws, mut rest) = (v, w.value, place);
            for (d, a) in along.iter().enumerate().rev() {
                let at = rest % a.window;
                rest /= a.window;
                let cut = Narrow::along(d + 2, at * a.dilation, outs[d], a.stride);
                let whole = self.draft.ty(xs).sizes()[d + 2] == outs[d] && a.stride == 1;
                xs = if whole { xs } else { self.emit(n, "place", cut, &[xs])? };
                if a.window > 1 {
                    ws = self.emit(n, "weight", Narrow::along(d + 2, at, 1, 1), &[ws])?;
                }
            }
            // Groups are a dim of their own: [rows, g, c, size…] by [g, o, c].
            let shape = [&[x.shape[0], groups, c][..], &outs[..]].concat();
            let plain = [&[x.shape[0], groups * c][..], &outs[..]].concat();
            let xs = self.reshaped(n, &View::plain(xs, &plain), &shape)?;
            let xs = self.whole(n, &xs)?;
            let ones = [&[o, c][..], &vec![1; along.len()][..]].concat();
            let ws = self.reshaped(n, &View::plain(ws, &ones), &[groups, o / groups, c])?;
            let ws = self.whole(n, &ws)?;
            let lx: String = (0..shape.len()).map(letter).collect();
            let out: String = lx.chars().filter(|&l| l != 'c').chain(['z']).collect();
            let rule = self.rule(n, &format!("{lx},bzc->{out}"), &[xs.value, ws.value])?;
            let y = self.emit(n, "part", Dot { rule }, &[xs.value, ws.value])?;
            let y = View::plain(y, &[&[x.shape[0], groups][..], &outs[..], &[o / groups]].concat());
            sum = Some(match sum {
                None => y,
                Some(s) => self.both(n, Arithmetic::Add, &s, &y)?,
            });
        }
        let sum = sum.ok_or_else(|| self.refuse(n, "its window has no places"))?;
        // [rows, g, size…, o] as [rows, g o, size…].
        let last = sum.shape.len() - 1;
        let order: Vec<usize> = [0, 1, last].into_iter().chain(2..last).collect();
        let to = [&[x.shape[0], o][..], &outs[..]].concat();
        self.reshaped(n, &sum.permute(&order), &to)
    }
}

/// [rows, size…, channels] as [rows, channels, size…].
fn channels_second(y: &View) -> View {
    let last = y.shape.len() - 1;
    let order: Vec<usize> = [0, last].into_iter().chain(1..last).collect();
    y.permute(&order)
}
