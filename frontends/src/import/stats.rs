//! Extremes, variances and norms along dims, and norms over groups of channels.

use super::graph::{Arg, Id, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::room;
use super::table::Arithmetic;
use super::view::{View, letter};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::ops::{Abs, Cumsum, Pow, ReduceMax, ReduceMin, Rsqrt, Scale};

/// Most elements of a dim that are multiplied one by one.
const MOST: usize = 512;

impl Lower<'_> {
    /// Data as floats.
    pub(super) fn float_data(&mut self, n: &Node, name: &str) -> Result<View> {
        let x = self.data(n, name)?;
        if self.draft.ty(x.value).dtype.is_float() { Ok(x) } else { self.float(n, &x) }
    }

    /// The largest, or smallest, element over dims; equal ones share the gradient, as in PyTorch.
    pub(super) fn extreme(&mut self, n: &Node, largest: bool) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let (dims, keep) = self.reduced(n, x.shape.len())?;
        let x = self.settled(n, &x)?;
        let from = x.letters(x.shape.len());
        let gone = |c: &char| dims.iter().any(|&d| letter(d) == *c);
        let to: String = from.chars().filter(|c| !gone(c)).collect();
        let v = if from == to {
            x.value
        } else {
            let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
            match largest {
                true => self.emit(n, "largest", ReduceMax { rule }, &[x.value])?,
                false => self.emit(n, "smallest", ReduceMin { rule }, &[x.value])?,
            }
        };
        let shape = (0..x.shape.len()).map(|d| if dims.contains(&d) { 1 } else { x.shape[d] });
        let mut y = View::of(v, &to, shape.collect());
        if !keep {
            for d in (0..x.shape.len()).rev().filter(|d| dims.contains(d)) {
                y = y.squeeze(d);
            }
        }
        Ok(vec![Val::Data(y)])
    }

    /// Where the largest, or smallest, element of a dim is, and the element.
    pub(super) fn extreme_at(&mut self, n: &Node, largest: bool, value: bool) -> Result<Vec<Val>> {
        let mut x = self.float_data(n, "self")?;
        if *n.arg("dim") == Arg::None {
            x = self.reshaped(n, &x, &[room::count(&x.shape)])?;
        }
        let x = self.whole(n, &x)?;
        let rank = x.shape.len();
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?;
        let of = match largest {
            true => x.clone(),
            false => x.with(self.emit(n, "negative", Scale { by: -1.0 }, &[x.value])?),
        };
        let at = self.largest(n, &of, d, 1)?;
        let mut shape = at.shape.clone();
        let mut all = vec![at.clone()];
        if value {
            all.insert(0, self.at_places(n, &x, &at, d)?);
        }
        if !self.flag(n, "keepdim") || *n.arg("dim") == Arg::None {
            shape.remove(d);
            all = all.iter().map(|y| self.reshaped(n, y, &shape)).collect::<Result<_>>()?;
        }
        Ok(all.into_iter().map(Val::Data).collect())
    }

    /// The larger, or smaller, of two values, which share the gradient where they are equal, as in PyTorch.
    pub(super) fn tied(&mut self, n: &Node, how: Arithmetic, a: &View, b: &View) -> Result<View> {
        let one = self.both(n, how, a, b)?;
        if !self.is_trained(a.value) && !self.is_trained(b.value) {
            return Ok(one);
        }
        let other = self.both(n, how, b, a)?;
        let sum = self.both(n, Arithmetic::Add, &one, &other)?;
        self.scaled(n, &sum, 0.5)
    }

    /// The mean of squares of distances from the mean, over one less than there are unless the node says otherwise.
    pub(super) fn variance(&mut self, n: &Node, root: bool) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let (dims, keep) = self.reduced(n, x.shape.len())?;
        let less = match (n.arg("unbiased"), self.number(n, "correction")) {
            (Arg::Bool(false), _) => 0.0,
            (_, Some(c)) => c,
            _usual => 1.0,
        };
        let count: f64 = dims.iter().map(|&d| x.shape[d] as f64).product();
        if count <= less {
            return Err(self.refuse(n, "a variance of too few elements"));
        }
        let x = self.whole(n, &x)?;
        let mean = self.sum_over(n, &x, &dims, true)?;
        let mean = self.scaled(n, &mean, 1.0 / count)?;
        let apart = self.both(n, Arithmetic::Sub, &x, &mean)?;
        let square = self.both(n, Arithmetic::Mul, &apart, &apart)?;
        let sum = self.sum_over(n, &square, &dims, keep)?;
        let y = self.scaled(n, &sum, 1.0 / (count - less))?;
        let y = if root { self.root(n, &y)? } else { y };
        Ok(vec![Val::Data(y)])
    }

    /// The root of a sum of squares s, as s times the root of 1/s: 0 where s is, with a gradient of 0, as in PyTorch. Of
    /// a sum below the least one it is less; that is the smallest whose derivative is a number in f32.
    fn root(&mut self, n: &Node, s: &View) -> Result<View> {
        const LEAST: f64 = 1.2e-25;
        let own = self.bounded(n, Arithmetic::Max, LEAST, s)?;
        let rstd = self.each(n, "rstd", Rsqrt {}.into(), &own)?;
        self.both(n, Arithmetic::Mul, s, &rstd)
    }

    /// (Σ |x|^p)^(1/p) over dims.
    pub(super) fn vector_norm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let p = self.number(n, "ord").unwrap_or(2.0);
        let (dims, keep) = self.reduced(n, x.shape.len())?;
        let x = self.whole(n, &x)?;
        let y = match p {
            2.0 => {
                let square = self.both(n, Arithmetic::Mul, &x, &x)?;
                let sum = self.sum_over(n, &square, &dims, keep)?;
                self.root(n, &sum)?
            }
            p if p >= 1.0 && p.is_finite() => {
                let size = self.each(n, "size", Abs {}.into(), &x)?;
                let own = if p == 1.0 {
                    size
                } else {
                    self.each(n, "power", Pow { to: p }.into(), &size)?
                };
                let sum = self.sum_over(n, &own, &dims, keep)?;
                if p == 1.0 {
                    sum
                } else {
                    // As for the root of squares, with a power whose derivative is up to that of 1/s.
                    let own = self.bounded(n, Arithmetic::Max, 1e-18, &sum)?;
                    let by = self.each(n, "root", Pow { to: 1.0 / p - 1.0 }.into(), &own)?;
                    self.both(n, Arithmetic::Mul, &sum, &by)?
                }
            }
            _other => return Err(self.refuse(n, "a norm of another order than a number from 1 on")),
        };
        Ok(vec![Val::Data(y)])
    }

    /// Norms of each row over groups of its channels: `group_norm` and, with a group for each channel, `instance_norm`.
    pub(super) fn group_norm(&mut self, n: &Node, each: bool) -> Result<Vec<Val>> {
        let x = self.data(n, "input")?;
        if x.shape.len() < 2 || each && !self.flag(n, "use_input_stats") {
            return Err(self.refuse(n, "it has no channels, or statistics of its own"));
        }
        let groups = if each { x.shape[1] as i64 } else { self.int(n, "num_groups")?.unwrap_or(1) };
        let groups = usize::try_from(groups).ok().filter(|&g| g > 0 && x.shape[1] % g == 0);
        let groups =
            groups.ok_or_else(|| self.refuse(n, "its groups do not divide the channels"))?;
        let x = self.whole(n, &x)?;
        let many = room::count(&x.shape[1..]) / groups;
        let y = self.reshaped(n, &x, &[x.shape[0], groups, many])?;
        let mean = self.mean_of(n, &y, 2)?;
        let y = self.both(n, Arithmetic::Sub, &y, &mean)?;
        let y = self.over_root(n, &y, 2, 1e-5)?;
        let y = self.reshaped(n, &y, &x.shape)?;
        self.by_channel(n, y)
    }

    /// The norm of a batch: by statistics that the archive keeps or, in training, by those of the rows of a microbatch on all
    /// ranks.
    pub(super) fn batch_norm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "input")?;
        let kept = *n.arg("running_mean") != Arg::None;
        if self.is_training(n) || !kept {
            return self.norm_of_batch(n, &x, kept);
        }
        let more = x.shape.len().saturating_sub(2);
        let channel = |l: &mut Self, name: &str| -> Result<View> {
            let v = l.data(n, name)?;
            Ok((0..more).fold(v, |v, _| v.unsqueeze(v.shape.len())))
        };
        let (mean, var) = (channel(self, "running_mean")?, channel(self, "running_var")?);
        let y = self.both(n, Arithmetic::Sub, &x, &mean)?;
        let var = self.shifted(n, &var, self.number(n, "eps").unwrap_or(1e-5))?;
        let rstd = self.each(n, "rstd", Rsqrt {}.into(), &var)?;
        let y = self.both(n, Arithmetic::Mul, &y, &rstd)?;
        self.by_channel(n, y)
    }

    fn is_training(&self, n: &Node) -> bool {
        ["training", "train"].iter().any(|k| self.flag(n, k))
    }

    /// The norm of a batch by its own statistics; that those which are kept stay as they are is said once.
    fn norm_of_batch(&mut self, n: &Node, x: &View, kept: bool) -> Result<Vec<Val>> {
        let x = self.whole(n, x)?;
        let dims: Vec<usize> = (0..x.shape.len()).filter(|&d| d != 1).collect();
        let count: f64 = dims.iter().map(|&d| x.shape[d] as f64).product();
        if x.shape.len() < 2 || count < 2.0 {
            return Err(self.refuse(n, "statistics of fewer than 2 elements of a channel"));
        }
        if kept && self.reads_statistics_behind(n) {
            let what = "statistics that it keeps and that are read behind it";
            return Err(self
                .refuse(n, what)
                .help("norms in eval() before those in train(), or apart"));
        }
        let mean = self.sum_over(n, &x, &dims, true)?;
        let mean = self.scaled(n, &mean, 1.0 / count)?;
        let y = self.both(n, Arithmetic::Sub, &x, &mean)?;
        let square = self.both(n, Arithmetic::Mul, &y, &y)?;
        let var = self.sum_over(n, &square, &dims, true)?;
        let var = self.scaled(n, &var, 1.0 / count)?;
        let var = self.shifted(n, &var, self.number(n, "eps").unwrap_or(1e-5))?;
        let rstd = self.each(n, "rstd", Rsqrt {}.into(), &var)?;
        let y = self.both(n, Arithmetic::Mul, &y, &rstd)?;
        if kept && !self.warnings.iter().any(|w| w.code == "batch-statistics") {
            let what = "batch normalisation takes statistics of each microbatch, and keeps none";
            let warning = Diag::new("batch-statistics", what)
                .at(format!("{}: {}", self.archive.path().display(), n.scope))
                .why("evaluation normalises by its own rows, and saved weights have no running statistics")
                .help("estimate them behind training: torch.optim.swa_utils.update_bn(rows, model)")
                .help("or export after eval(), for the statistics that were kept");
            self.warnings.push(warning);
        }
        self.by_channel(n, y)
    }

    /// True if what a norm in training writes is read afterwards, by other ops or by itself in evaluation.
    fn reads_statistics_behind(&self, n: &Node) -> bool {
        let kept = ["running_mean", "running_var"].map(|k| n.arg(k).clone());
        let is_kept = |id: &Id| kept.contains(&Arg::Value(*id));
        let here = self.g.nodes.iter().position(|o| o.outs == n.outs);
        let behind = self.g.nodes.iter().skip(here.map_or(0, |i| i + 1));
        let writes = |o: &Node| o.op.starts_with("batch_norm") && self.is_training(o);
        behind.filter(|o| !writes(o)).any(|o| o.ids().iter().any(is_kept))
            || self.g.outputs.iter().any(is_kept)
    }

    /// A count of the batches that a norm has seen, which nothing reads but the archive's next step, and the norm's next
    /// use.
    pub(super) fn counts_batches(&self, n: &Node) -> bool {
        let norm =
            |o: &Node| o.scope == n.scope && o.op.starts_with("batch_norm") && self.is_training(o);
        let counts = |o: &&Node| &*o.op == "add_.Tensor" && o.scope == n.scope;
        let before = |o: &&Node| o.ids().first().copied();
        // From one use of the norm to the next, each counts what the one before has made.
        let mut first = n;
        while let Some(o) =
            self.g.nodes.iter().filter(counts).find(|o| o.outs.first().copied() == before(&first))
        {
            first = o;
        }
        let read = |o: &&Node| o.ids().iter().any(|id| n.outs.contains(id));
        &*n.op == "add_.Tensor"
            && self.written(first).is_some_and(|b| b.ends_with("num_batches_tracked"))
            && self.g.nodes.iter().any(norm)
            && self.g.nodes.iter().filter(read).all(|o| counts(&o))
    }

    /// Times a weight and plus a bias of each channel, where there are such.
    fn by_channel(&mut self, n: &Node, mut y: View) -> Result<Vec<Val>> {
        for (name, how) in [("weight", Arithmetic::Mul), ("bias", Arithmetic::Add)] {
            if *n.arg(name) != Arg::None {
                let w = self.data(n, name)?;
                let w = (2..y.shape.len()).fold(w, |w, _| w.unsqueeze(w.shape.len()));
                y = self.both(n, how, &y, &w)?;
            }
        }
        Ok(vec![Val::Data(y)])
    }

    /// Sums of all elements of a dim up to each.
    pub(super) fn cumsum(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let x = self.whole(n, &x)?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), x.shape.len(), self, n)?;
        let op = Cumsum { dim: d, reverse: false };
        Ok(vec![Val::Data(x.with(self.emit(n, "sums", op, &[x.value])?))])
    }

    /// Products of all elements of a dim, or of those up to each.
    pub(super) fn product_along(&mut self, n: &Node, each: bool) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), x.shape.len(), self, n)?;
        if x.shape[d] > MOST {
            let what =
                format!("a product of {} elements, of which at most {MOST} are read", x.shape[d]);
            return Err(self.refuse(n, &what));
        }
        let mut all: Vec<View> = vec![];
        for i in 0..x.shape[d] {
            let own = self.narrowed(n, &x, d, i, 1)?;
            let next = match all.last() {
                None => own,
                Some(p) => self.both(n, Arithmetic::Mul, p, &own)?,
            };
            all.push(next);
        }
        if each {
            return self.cat_of(n, all, d).map(|y| vec![Val::Data(y)]);
        }
        let y = all.pop().ok_or_else(|| self.refuse(n, "a product of nothing"))?;
        let mut to = y.shape.clone();
        if !self.flag(n, "keepdim") {
            to.remove(d);
        }
        self.reshaped(n, &y, &to).map(|y| vec![Val::Data(y)])
    }
}
