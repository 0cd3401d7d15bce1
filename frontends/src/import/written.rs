//! What is on its way to attention or to a loss as a mask, a softmax of scores or labels, and is asked for as a value after
//! all: its node is lowered once more, as the data that it makes.

use super::folded::Folded;
use super::graph::{Arg, Elem, Id, Node, Source};
use super::lower::{Lower, Val};
use super::view::{Dim, View};
use shardc_ir::diag::Result;
use shardc_ir::func::{Fill as Filled, Reads, RoleKind};
use shardc_ir::ops::Fill;
use shardc_ir::types::Type;

/// Most nodes behind each other that are lowered once more.
const DEEPEST: usize = 200;
/// A table of so many numbers is made of those of its distances, if they are all.
const LARGE: usize = 1 << 8;

impl Lower<'_> {
    /// A value as an operand of a node that is made here.
    pub(super) fn held(&mut self, v: Val) -> Arg {
        Arg::Value(self.env.push(v))
    }

    /// The same of a view.
    pub(super) fn of(&mut self, v: &View) -> Arg {
        self.held(Val::Data(v.clone()))
    }

    /// What an op makes of operands, in the place of a node: nothing of it is kept for attention or a loss.
    pub(super) fn call(&mut self, n: &Node, op: &str, args: Vec<(&str, Arg)>) -> Result<Val> {
        let out = self.env.push(Val::Unmade);
        let args = args.into_iter().map(|(name, a)| (name.into(), a)).collect();
        let node = Node { op: op.into(), args, outs: vec![out], scope: n.scope.clone() };
        let before = std::mem::replace(&mut self.plainly, true);
        let made = self.node(&node);
        self.plainly = before;
        made.map_err(|e| {
            let what = format!("of which it is made: {}", e.message);
            e.help.iter().fold(self.refuse(n, &what), |d, h| d.help(h.clone()))
        })?;
        Ok(self.val(out).clone())
    }

    /// The same as a view.
    pub(super) fn view_by(&mut self, n: &Node, op: &str, args: Vec<(&str, Arg)>) -> Result<View> {
        let v = self.call(n, op, args)?;
        let Arg::Value(id) = self.held(v) else { return Err(self.refuse(n, "it makes nothing")) };
        self.data_of(n, id)
    }

    /// What is on its way elsewhere as data.
    pub(super) fn as_data(&mut self, n: &Node, id: Id) -> Result<View> {
        match self.lowered_again(n, id, 0)? {
            Val::Data(v) => Ok(v),
            Val::Folded(f) => self.constant(n, &f),
            _other => Err(self.refuse(n, "its operand is a mask that is only for attention")),
        }
    }

    fn lowered_again(&mut self, n: &Node, id: Id, depth: usize) -> Result<Val> {
        if let Some(v) = self.again.get(&id) {
            return Ok(v.clone());
        }
        if depth > DEEPEST {
            return Err(self.refuse(n, "its operand is made of too many nodes"));
        }
        let made = match self.val(id).clone() {
            v @ (Val::Data(_) | Val::Folded(_)) => return Ok(v),
            // Its node takes the mean as a number.
            Val::Mean(_) => return Err(self.refuse(n, "its operand is made of a mean")),
            _other => match self.makers_of.get(&id).copied() {
                None => self.input_again(n, id)?,
                Some(at) => {
                    let m = self.g.nodes[at].clone();
                    self.node_again(&m, id, depth)?
                }
            },
        };
        self.again.insert(id, made.clone());
        Ok(made)
    }

    fn node_again(&mut self, m: &Node, id: Id, depth: usize) -> Result<Val> {
        let mut before = vec![];
        for o in m.ids() {
            let own = self.val(o).clone();
            if !matches!(own, Val::Data(_) | Val::Folded(_) | Val::Mean(_)) {
                let v = self.lowered_again(m, o, depth + 1)?;
                before.push((o, own));
                self.set(o, v);
            }
        }
        before.extend(m.outs.iter().map(|&o| (o, self.val(o).clone())));
        let plainly = std::mem::replace(&mut self.plainly, true);
        let made = self.node(m);
        self.plainly = plainly;
        let own = self.val(id).clone();
        before.into_iter().for_each(|(o, v)| self.set(o, v));
        made.map(|()| own)
    }

    /// An input that is no data yet.
    fn input_again(&mut self, n: &Node, id: Id) -> Result<Val> {
        let g = self.g;
        let Some(i) = g.inputs.iter().find(|i| i.id == id) else {
            return Err(self.refuse(n, "its operand was not made"));
        };
        let name = g.names[id].clone();
        let shape = self.shape(&name, &i.sizes)?;
        let value = match (&i.source, self.val(id)) {
            (Source::Input, Val::Padded(_)) => self.mask_input(&name),
            (Source::Input, Val::Labels(_)) => {
                let labels = |kind: &RoleKind| match kind {
                    RoleKind::Input(own) if own.fill == Filled::Labels => Some(own.reads),
                    _other => None,
                };
                let own = self.inputs.iter().find_map(|(r, v)| Some((labels(&r.kind)?, *v)));
                match own {
                    Some((Reads::Next, _)) => {
                        return Err(
                            self.refuse(n, "labels that are moved are also read as they are")
                        );
                    }
                    Some((_, v)) => v,
                    None => self.column(&name, i, &shape),
                }
            }
            _constants => {
                let (env, labels) = (self.val(id).clone(), self.labels.clone());
                self.input(i, &mut vec![])?;
                let made = self.val(id).clone();
                self.set(id, env);
                self.labels = labels;
                match made {
                    // Its numbers were freed behind the last node that takes it.
                    Val::Padded(_) => self.mask_input(&name),
                    made => return Ok(made),
                }
            }
        };
        Ok(Val::Data(View::plain(value, &shape)))
    }

    /// Whether the labels are a column that ops read as data.
    pub(super) fn labels_are_data(&self) -> bool {
        let name = &self.labels.0;
        let column =
            |kind: &RoleKind| matches!(kind, RoleKind::Input(own) if own.fill == Filled::Column);
        self.inputs.iter().any(|(r, _)| column(&r.kind) && *r.name == **name)
    }

    /// One number in every place of a shape.
    pub(super) fn number_in(&mut self, n: &Node, value: f64, shape: &[usize]) -> Result<View> {
        let value = self.finite(n, value)?;
        let v = self.emit_n(n, &["number"], Fill { value }, &[], Some(&Type::f32(&[])))?[0];
        Ok(View { value: v, dims: vec![Dim::Virtual; shape.len()], shape: shape.to_vec() })
    }

    /// Numbers that differ along several dims: a list in another shape.
    pub(super) fn table_of(&mut self, n: &Node, f: &Folded, moving: &[usize]) -> Result<View> {
        if let Some((line, [a, b])) = by_distance(f, LARGE) {
            let line = self.constant(n, &line)?;
            let mut y = self.skewed(n, &line, [f.shape[a], f.shape[b]])?;
            for d in 0..f.shape.len() {
                if d != a && d != b {
                    y.dims.insert(d, Dim::Virtual);
                    y.shape.insert(d, f.shape[d]);
                }
            }
            return Ok(y);
        }
        let mut small = f.clone();
        for d in (0..f.shape.len()).rev().filter(|d| !moving.contains(d)) {
            small = small.select(d, 0);
        }
        let all = self.fits(n, small.numbers())?;
        let (low, high) = (f64::from(f32::MIN), f64::from(f32::MAX));
        let list = all.iter().map(|x| x.clamp(low, high) as f32).collect();
        let v = self.literal(n, list)?;
        let table = View::plain(v, &[all.len()]);
        let table = self.reshaped(n, &table, &small.shape)?;
        let table = self.whole(n, &table)?;
        let mut y =
            View { dims: vec![Dim::Virtual; f.shape.len()], shape: f.shape.clone(), ..table };
        moving.iter().enumerate().for_each(|(k, &d)| y.dims[d] = Dim::Real(k));
        Ok(y)
    }

    /// [s, t, …] of [s + t - 1, …]: element (i, j) is that of place j - i + s - 1. Rows of all places lie behind each
    /// other, and are read with rows that are one element shorter (Huang et al., 2018, *Music Transformer*, section 3.4).
    pub(super) fn skewed(&mut self, n: &Node, line: &View, [s, t]: [usize; 2]) -> Result<View> {
        let (rank, len) = (line.shape.len(), s + t - 1);
        let mut x = line.permute(&(1..rank).chain([0]).collect::<Vec<_>>());
        x.dims.insert(rank - 1, Dim::Virtual);
        x.shape.insert(rank - 1, s);
        let rest = x.shape[..rank - 1].to_vec();
        let shape = |last: &[usize]| [&rest, last].concat();
        let x = self.reshaped(n, &x, &shape(&[s * len]))?;
        let x = self.narrowed(n, &x, rank - 1, s - 1, s * (len - 1))?;
        let x = self.reshaped(n, &x, &shape(&[s, len - 1]))?;
        let x = self.narrowed(n, &x, rank, 0, t)?;
        Ok(x.permute(&[rank - 1, rank].into_iter().chain(0..rank - 1).collect::<Vec<_>>()))
    }

    /// Known numbers as a view.
    pub(super) fn table(&mut self, n: &Node, shape: &[usize], numbers: Vec<f64>) -> Result<View> {
        let f = self.fits(n, Folded::new(Elem::Float, shape, numbers))?;
        self.constant(n, &f)
    }
}

/// Numbers that differ along two dims, by the distance of row and column alone: those of all distances, and the dims.
/// Fewer than `least` are a table.
pub(super) fn by_distance(f: &Folded, least: usize) -> Option<(Folded, [usize; 2])> {
    let moving: Vec<usize> = (0..f.shape.len()).filter(|&d| !f.is_same_along(d)).collect();
    let [a, b] = moving[..] else { return None };
    let (s, t) = (f.shape[a], f.shape[b]);
    if s < 2 || t < 2 || s * t < least {
        return None;
    }
    super::room::work(2 * s * t)?;
    let mut index = vec![0; f.shape.len()];
    let mut at = |i: usize, j: usize| {
        (index[a], index[b]) = (i, j);
        f.at(&index)
    };
    let line: Vec<f64> =
        (0..s + t - 1).map(|k| at((s - 1).saturating_sub(k), k.saturating_sub(s - 1))).collect();
    let alike = (0..s).all(|i| (0..t).all(|j| at(i, j).to_bits() == line[j + s - 1 - i].to_bits()));
    let line = Folded::new(f.elem, &[line.len()], line).filter(|_| alike)?;
    Some((line, [a, b]))
}
