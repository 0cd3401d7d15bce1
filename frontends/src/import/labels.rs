//! Labels on their way to the loss. Hugging Face's models move them by one inside; what a program of ours
//! takes is moved already, so that is read and not done.

use super::graph::Node;
use super::losses::{self, Mean};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::room;
use super::table::Arithmetic;
use super::view::View;
use crate::graph::loss::{self, Scoring};
use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{Fill, Input, Reads, Role, RoleKind, Value};
use shardc_ir::ops::{Div, Dot, Literal, Mul, Op, ReduceSum};
use shardc_ir::types::Type;

/// What was done to the labels.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Labels {
    pub shape: Vec<usize>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// As they are given: position i is scored against label i.
    Whole,
    /// With one more behind each row, which is not scored.
    Padded,
    /// Position i is scored against label i + 1.
    Moved,
    /// The same without the last position.
    Tail,
}

/// What leaves labels as they are.
const COPIES: [&str; 5] = ["to", "_to_copy", "contiguous", "clone", "alias"];
/// What leaves them in their order.
const VIEWS: [&str; 4] = ["view", "reshape", "_unsafe_view", "flatten"];

/// Whether what an op makes is its first operand, in other places: labels are followed through it.
pub(super) fn moves(op: &str) -> bool {
    let name = op.split('.').next().unwrap_or(op);
    [&COPIES[..], &VIEWS, &["pad", "slice", "detach"]].concat().contains(&name)
}

/// The label that is not scored, in PyTorch.
const IGNORED: f64 = -100.0;

impl Labels {
    pub fn new(shape: Vec<usize>) -> Labels {
        Labels { shape, state: State::Whole }
    }
}

impl Lower<'_> {
    /// What a node makes of labels, or of logits without their last row; nothing for what makes data of those.
    ///
    /// # Errors
    /// `import-op` for what is not known to keep labels what they are.
    pub(super) fn labelled(&mut self, n: &Node, first: &Val) -> Result<Option<Val>> {
        let name = n.op.split('.').next().unwrap_or(&n.op);
        let shape = match first {
            Val::Labels(l) => l.shape.clone(),
            Val::Head(v) => v.shape.clone(),
            _ => vec![],
        };
        let with = |shape: Vec<usize>| match first {
            Val::Labels(l) => Val::Labels(Labels { shape, ..l.clone() }),
            Val::Head(v) => Val::Head(View { shape, ..v.clone() }),
            other => other.clone(),
        };
        match name {
            _ if COPIES.contains(&name) => Ok(Some(first.clone())),
            _ if VIEWS.contains(&name) => {
                let key = if name == "reshape" { "shape" } else { "size" };
                let to = if name == "flatten" { vec![-1] } else { self.ints(n, key)? };
                Ok(Some(with(self.resolved(n, &to, room::count(&shape))?)))
            }
            "pad" => {
                let Val::Labels(l) = first else { return Ok(None) };
                let value = self.number(n, "value").unwrap_or(0.0);
                if l.state != State::Whole || self.ints(n, "pad")? != [0, 1] || value != IGNORED {
                    let what = "labels are padded by other than one -100 behind each row";
                    return Err(self.refuse(n, what));
                }
                let shape = vec![shape[0], shape[1] + 1];
                Ok(Some(Val::Labels(Labels { shape, state: State::Padded })))
            }
            "slice" => {
                let d = dim_of(self.int(n, "dim")?.unwrap_or(0), shape.len(), self, n)?;
                let (start, len, step) = self.range(n, shape[d])?;
                if (start, len, step) == (0, shape[d], 1) {
                    return Ok(Some(first.clone()));
                }
                let Val::Labels(l) = first else { return Ok(None) };
                let mut cut = shape.clone();
                cut[d] = len;
                let state = match l.state {
                    _ if d != 1 || (start, step) != (1, 1) || len + 1 != shape[1] => None,
                    State::Whole => Some(State::Tail),
                    State::Padded => Some(State::Moved),
                    State::Moved | State::Tail => None,
                };
                let state =
                    state.ok_or_else(|| self.refuse(n, "labels are cut otherwise than by one"))?;
                Ok(Some(Val::Labels(Labels { shape: cut, state })))
            }
            "cross_entropy_loss" | "sym_size" => {
                Err(self.refuse(n, "its first operand is not logits"))
            }
            _ if matches!(first, Val::Head(_)) => Ok(None),
            // They are read as data.
            _ => Ok(None),
        }
    }

    /// The cross-entropy of logits and labels: the mean as a sum over tokens, of which a step has
    /// the count.
    ///
    /// # Errors
    /// `import-op` for what does not pair, and weights that are not known.
    pub(super) fn cross_entropy(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (rows, seq) = (self.sizes.rows, self.sizes.seq);
        let head = self.operand(n, "self");
        let target = self.operand(n, "target");
        if let Some(Val::Data(y)) = &target
            && self.draft.ty(y.value).dtype.is_float()
            && head.as_ref().and_then(Val::shape) == Some(&y.shape[..])
        {
            return self.soft_cross_entropy(n, y);
        }
        let Some(Val::Labels(labels)) = target.filter(|_| !self.plainly && !self.labels_are_data())
        else {
            return self.plain_cross_entropy(n);
        };
        let (logits, cut) = match head {
            Some(Val::Head(v)) => (v.value, true),
            Some(Val::Data(v)) => (self.rows_of_logits(n, &v)?, false),
            _ => return Err(self.refuse(n, "its first operand is not logits")),
        };
        let sizes = self.draft.ty(logits).sizes();
        let plain = labels.state == State::Whole;
        // Those of a decoder may be more or fewer than tokens.
        let all = match &self.labels.1[..] {
            &[r, own] if plain && r == rows => [rows, own],
            _of_tokens => [rows, seq],
        };
        let of_rows = labels.state == State::Whole && labels.shape == all[..1];
        let own = if of_rows { &all[..1] } else { &all[..] };
        let fits = sizes.len() == own.len() + 1 && sizes.starts_with(own);
        // Of more dims than rows and tokens they are a column.
        let of_more = self.labels.1.len() > 2;
        if plain
            && !cut
            && (of_more
                || !fits
                || (!of_rows && labels.shape.iter().product::<usize>() != all[0] * all[1]))
        {
            return self.plain_cross_entropy(n);
        }
        if !fits || cut != (labels.state == State::Tail) || labels.state == State::Padded {
            return Err(self.refuse(
                n,
                "logits [rows, tokens, vocabulary], or [rows, classes], and labels do not pair",
            ));
        }
        let how = self.scoring(n, sizes[own.len()])?;
        let targets = self.targets(matches!(labels.state, State::Moved | State::Tail), logits);
        let mut b = Builder::new(&self.mesh, &mut self.draft);
        let mut s = loss::scores(&mut b, logits, targets, &how);
        let reduction = self.reduction(n)?;
        let weighs = reduction == losses::MEAN && how.divides();
        let histogram = weighs.then(|| self.histogram(sizes[own.len()]));
        let mut b = Builder::new(&self.mesh, &mut self.draft);
        b.enter("loss");
        let t = &"bs"[..own.len()];
        if let Some(histogram) = histogram {
            s.each = over_weights(&mut b, &how, histogram, s.each, t);
        }
        let made = match reduction {
            losses::NONE => b.push("each", Mul::same(), &[s.each, s.valid]),
            _total => loss::sum_of(&mut b, &s),
        };
        self.makers = self.draft.makers();
        self.logits = self.logits.or(Some(logits));
        self.scored = self.scored.or(n.outs.first().copied());
        Ok(vec![match reduction {
            losses::NONE if cut => {
                return Err(self.refuse(n, "losses of tokens without the last are not read"));
            }
            losses::NONE => {
                let each = View::plain(made, own);
                Val::Data(self.reshaped(n, &each, &labels.shape)?)
            }
            losses::MEAN => {
                self.of_labels.insert(made);
                Val::Mean(Mean { sum: made, targets, added: None })
            }
            _sum => Val::Data(View::plain(made, &[])),
        }])
    }

    /// The cross-entropy of logits and of what is wanted of each class: -Σ w y log softmax(logits), of which a mean is over
    /// rows, whatever classes weigh. Smoothing spreads a part of what is wanted over all classes.
    fn soft_cross_entropy(&mut self, n: &Node, y: &View) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let class = usize::from(x.shape.len() > 1);
        let classes = x.shape.get(class).copied().unwrap_or(1);
        if x.shape != y.shape || classes < 2 {
            return Err(self.refuse(n, "logits and what is wanted of each class do not pair"));
        }
        let how = self.scoring(n, classes)?;
        let logs = self.log_softmax(n, &x, class)?;
        let y = match how.smoothing {
            0.0 => y.clone(),
            part => {
                let y = self.scaled(n, y, 1.0 - part)?;
                self.shifted(n, &y, part / classes as f64)?
            }
        };
        let y = match self.operand(n, "weight") {
            None => y,
            // Along the dim of classes.
            Some(_) => {
                let w = self.data(n, "weight")?;
                let behind = x.shape.len() - 1 - class;
                let w = (0..behind).fold(w, |w, _| w.unsqueeze(w.shape.len()));
                self.both(n, Arithmetic::Mul, &y, &w)?
            }
        };
        let each = self.both(n, Arithmetic::Mul, &y, &logs)?;
        let each = self.sum_over(n, &each, &[class], false)?;
        let each = self.scaled(n, &each, -1.0)?;
        self.reduced_loss(n, &each)
    }

    /// The input of how many labels are each class.
    fn histogram(&mut self, classes: usize) -> Value {
        let own = Input { fill: Fill::Histogram, batch: false, seq: None, reads: Reads::Usual };
        let role = Role::new(RoleKind::Input(own), format!("histogram.{classes}").as_str());
        self.input_arg(role, Type::f32(&[classes]))
    }

    fn reduction(&self, n: &Node) -> Result<i64> {
        Ok(self.int(n, "reduction")?.unwrap_or(losses::MEAN))
    }

    /// How a cross-entropy scores labels of so many classes.
    fn scoring(&self, n: &Node, classes: usize) -> Result<Scoring> {
        let weights = match n.arg("weight") {
            super::graph::Arg::None => None,
            super::graph::Arg::Value(id) => match self.val(*id) {
                Val::Folded(f) if f.shape[..] == [classes] => {
                    f.numbers().map(|all| all.iter().map(|&x| x as f32).collect())
                }
                _other => {
                    return Err(self.refuse(n, "its weights are not known, one of each class"));
                }
            },
            _other => return Err(self.refuse(n, "its weights are no tensor")),
        };
        let ignored = self.int(n, "ignore_index")?.unwrap_or(-100);
        let smoothing = self.number(n, "label_smoothing").unwrap_or(0.0);
        // Negative labels are not scored, whichever of them PyTorch is told.
        let ignored = i32::try_from(ignored).ok().filter(|&i| i >= 0);
        Ok(Scoring { ignored, smoothing, weights })
    }

    /// The operand's value, whatever it is.
    pub(super) fn operand(&self, n: &Node, name: &str) -> Option<Val> {
        match n.arg(name) {
            super::graph::Arg::Value(id) => Some(self.val(*id).clone()),
            _ => None,
        }
    }

    /// Logits [rows, tokens, vocabulary] of which this is a view of two dims, or one with dims exchanged.
    fn rows_of_logits(&mut self, n: &Node, v: &View) -> Result<Value> {
        if let (2, Some((Op::Reshape(_), [of]))) = (v.shape.len(), self.maker(v.value))
            && self.rank(*of) == 3
            && self.draft.ty(*of).sizes()[2] == v.shape[1]
        {
            return Ok(*of);
        }
        let back = if v.shape.len() == 3 { v.transpose(1, 2) } else { v.clone() };
        Ok(self.ordered(n, &back)?.value)
    }
}

/// Losses of tokens times how many labels are not negative and over what those that count weigh together, in the whole
/// step: a step divides their sum by the former.
fn over_weights(b: &mut Builder, how: &Scoring, histogram: Value, each: Value, t: &str) -> Value {
    let classes = b.ty(histogram).dims[0].size;
    let own = |c: usize| how.weights.as_ref().map_or(1.0, |w| w[c]);
    let weight = |c: usize| if how.ignored.is_some_and(|i| i as usize == c) { 0.0 } else { own(c) };
    let weights = (0..classes).map(weight).collect();
    let weights = b.push("weights", Literal { values: weights }, &[]);
    let all = b.push("labels", ReduceSum { rule: RuleAttr::new("v->", &[1]) }, &[histogram]);
    let weighed = b.push("weighed", Dot::by("v,v->", &[1, 1]), &[histogram, weights]);
    let by = b.push("by", Div::same(), &[all, weighed]);
    let rule = Broadcast::new(&format!("{t},->{t}"), &[t.len(), 0]);
    b.push("nll", Mul { rule }, &[each, by])
}
