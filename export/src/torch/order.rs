//! The order of lines: that of the plan, in which exchanges of weights and of gradients go on beside a product; or one in which
//! less is alive at a time.

use super::ops;
use super::ops::memory;
use super::seen::Line;
use shardc_ir::func::{Func, FuncKind, Port, RoleKind, Value, ValueMap};
use shardc_ir::ops::Kind;
use std::collections::BTreeSet;

/// How lines stand.
#[derive(Clone, Copy)]
pub(super) struct Order {
    pub beside: Beside,
    /// Whether gradients of weights are made as soon as their operands are there.
    pub early: bool,
}

impl Order {
    /// The orders that there are, the best for speed first.
    pub const ALL: [Order; 6] = {
        let [all, forward, none] = [Beside::Everywhere, Beside::Forward, Beside::Nowhere];
        [
            Order { beside: all, early: false },
            Order { beside: all, early: true },
            Order { beside: forward, early: false },
            Order { beside: forward, early: true },
            Order { beside: none, early: false },
            Order { beside: none, early: true },
        ]
    };

    /// Lines in this order.
    pub fn of<'a>(self, f: &Func, same: &ValueMap<Value>, lines: Vec<Line<'a>>) -> Vec<Line<'a>> {
        let lines = if self.early { early(f, same, lines) } else { lines };
        if self.beside.is_in(f) { beside_products(f, same, lines) } else { lines }
    }
}

/// Where exchanges go on beside products: what waits takes memory until then.
#[derive(Clone, Copy)]
pub(super) enum Beside {
    Everywhere,
    Forward,
    Nowhere,
}

impl Beside {
    fn is_in(self, f: &Func) -> bool {
        match self {
            Beside::Everywhere => true,
            Beside::Forward => f.kind == FuncKind::Forward,
            Beside::Nowhere => false,
        }
    }
}

/// Lines, in which a weight is gathered from the product before the one that reads it on, and what was exchanged is added
/// behind the next product; within their layer.
fn beside_products<'a>(f: &Func, same: &ValueMap<Value>, lines: Vec<Line<'a>>) -> Vec<Line<'a>> {
    let layer = |l: &Line| f.scope_info(l.n.scope).layer;
    let touches = |l: &Line, v: Value| l.outs.iter().chain(&l.ins).any(|o| same[*o] == v);
    let is_param = |a: &&Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    let params: BTreeSet<Value> = f.args.iter().filter(is_param).map(|a| same[a.value]).collect();
    let mut out: Vec<Line> = Vec::with_capacity(lines.len());
    for l in lines {
        let mut at = out.len();
        if l.call.is_none() && memory::gathers(&l.n.op) && params.contains(&l.ins[0]) {
            let free =
                |b: &Line| layer(b) == layer(&l) && !b.outs.iter().any(|o| same[*o] == l.ins[0]);
            let before = out.iter().rev().take_while(|b| free(b));
            if let Some(far) = before.enumerate().find(|(_, b)| is_product(b)).map(|x| x.0) {
                at -= far + 1;
            }
        }
        out.insert(at, l);
    }
    let collective = |l: &&Line| l.call.is_none() && ops::is_exchange(&l.n.op);
    let exchanged: BTreeSet<Value> =
        out.iter().filter(collective).flat_map(|l| l.outs.iter().copied()).collect();
    // The last first: each goes behind those that stay.
    let mut late: Vec<Line> = Vec::with_capacity(out.len());
    while let Some(l) = out.pop() {
        let mut at = late.len();
        if let [sum, x] = &l.ins[..]
            && l.n.op.accumulates()
            && l.call.is_none()
            && exchanged.contains(x)
        {
            let free =
                |b: &Line| layer(b) == layer(&l) && !touches(b, same[*sum]) && !touches(b, *x);
            let behind = late.iter().rev().take_while(|b| free(b));
            if let Some(far) = behind.enumerate().find(|(_, b)| is_product(b)).map(|x| x.0) {
                at -= far + 1;
            }
        }
        late.insert(at, l);
    }
    late.reverse();
    late
}

/// Lines, in which those stand behind what makes their operands that are the last to read one and whose results no other line
/// reads: gradients of weights, mostly; and other products before the first line that reads them. Within their layer.
fn early<'a>(f: &Func, same: &ValueMap<Value>, mut lines: Vec<Line<'a>>) -> Vec<Line<'a>> {
    let layer = |l: &Line| f.scope_info(l.n.scope).layer;
    let exchanges = |l: &Line| l.call.is_none() && ops::is_exchange(&l.n.op);
    // A call that writes over what forward has left, of which there may be views.
    let stays = |l: &Line| l.call.is_some_and(|c| c.over.is_some() && same[l.outs[0]] == l.outs[0]);
    let swap = |a: &Line, b: &Line| {
        // What one makes or adds to the other does not touch.
        let apart = |a: &Line, b: &Line| {
            let mut made = a.outs.iter().map(|o| same[*o]);
            made.all(|v| !b.ins.contains(&v) && b.outs.iter().all(|o| same[*o] != v))
        };
        let stay = stays(a) || stays(b) || (exchanges(a) && exchanges(b));
        !stay && apart(a, b) && apart(b, a)
    };
    // The last line that reads a value, whether one reads it that does not add it to a sum, and what exchanges make.
    let (mut last, mut read) = (f.per_value(None), f.per_value(false));
    let mut exchanged: BTreeSet<Value> = BTreeSet::new();
    for (at, l) in lines.iter().enumerate() {
        let adds = l.n.op.accumulates() && l.call.is_none();
        for v in &l.ins {
            last[*v] = Some(at);
            read[*v] |= !adds;
        }
        exchanged.extend(l.outs.iter().copied().filter(|_| exchanges(l)));
    }
    f.results.iter().for_each(|r| last[same[r.value]] = None);
    let is_read = |l: &Line| l.outs.iter().any(|v| same[*v] == *v && read[*v]);
    for at in 0..lines.len() {
        let l = &lines[at];
        let ends = l.ins.iter().any(|v| last[*v] == Some(at));
        if ends && !is_read(l) && !exchanges(l) && !l.ins.iter().any(|v| exchanged.contains(v)) {
            // What is of no layer passes those of all.
            let own = |b: &Line| layer(l).is_none() || layer(b) == layer(l);
            let free = lines[..at].iter().rev().take_while(|b| own(b) && swap(l, b)).count();
            lines[at - free..=at].rotate_right(1);
        }
    }
    for at in (0..lines.len()).rev() {
        let l = &lines[at];
        if is_product(l) && is_read(l) {
            let own = |b: &Line| layer(b) == layer(l);
            let free = lines[at + 1..].iter().take_while(|b| own(b) && swap(l, b)).count();
            lines[at..=at + free].rotate_left(1);
        }
    }
    lines
}

/// True of lines that take longer than others.
fn is_product(l: &Line) -> bool {
    let kind = l.n.op.facts().kind;
    let is = matches!(kind, Kind::Product | Kind::Attention | Kind::GroupedProduct);
    l.call.map_or(is, |c| c.is_linear())
}
