//! What it costs to move values between layouts.

use super::reshard::Resharder;
use crate::choose::Cost;
use shardc_ir::builder;
use shardc_ir::func::{Func, LayoutStep, Name};
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::price;
use shardc_ir::types::Type;

/// Prices of changes of layout, each worked out once.
pub(crate) struct Moves<'a> {
    mesh: &'a Mesh,
    hardware: &'a Hardware,
    /// Gradients are made.
    trains: bool,
    resharder: Resharder,
    all: Vec<Type>,
    ids: HashMap<Type, u32>,
    known: HashMap<(u32, u32, bool), Cost>,
}

impl<'a> Moves<'a> {
    /// Of a mesh whose links have these speeds; with the gradients' moves, if it `trains`.
    pub fn new(mesh: &'a Mesh, hardware: &'a Hardware, trains: bool) -> Moves<'a> {
        let resharder = Resharder::new(hardware);
        let (all, ids, known) = Default::default();
        Moves { mesh, hardware, trains, resharder, all, ids, known }
    }

    /// The number of a type.
    pub fn id(&mut self, t: &Type) -> u32 {
        if let Some(&id) = self.ids.get(t) {
            return id;
        }
        self.all.push(t.clone());
        self.ids.insert(t.clone(), self.all.len() as u32 - 1);
        self.all.len() as u32 - 1
    }

    /// Picoseconds of the collectives from a type to another; and, of a value with a gradient (`active`), of
    /// their mirrors. Not allowed where no steps lead.
    pub fn cost(&mut self, from: u32, to: u32, active: bool) -> Cost {
        if from == to {
            return Cost::ZERO;
        }
        if let Some(&known) = self.known.get(&(from, to, active)) {
            return known;
        }
        let [a, b] = [from, to].map(|i| &self.all[i as usize]);
        let cost = match self.resharder.path(self.mesh, a, b) {
            None => Cost::NEVER,
            Some(steps) => Cost { time: self.time(a, &steps, active), memory: 0 },
        };
        self.known.insert((from, to, active), cost);
        cost
    }

    /// Picoseconds of one change of layout and, of a value with a gradient, of its mirror.
    pub fn step(&self, op: &Op, from: &Type, to: &Type, active: bool) -> u64 {
        self.time(from, &[LayoutStep { op: op.clone(), ty: to.clone() }], active)
    }

    fn time(&self, from: &Type, steps: &[LayoutStep], active: bool) -> u64 {
        let (hw, mesh) = (self.hardware, self.mesh);
        let mut at = from;
        let mut sum = 0;
        for s in steps {
            let backward = active && self.trains;
            if s.op.collective().is_some() {
                // Pieces are saved, and gathered again in backward.
                let times = if backward && s.op.gathers() { 2 } else { 1 };
                sum += times * price::op(hw, mesh, &s.op, &[at], &s.ty);
            }
            if backward {
                sum += mirrored(hw, mesh, &s.op, at, &s.ty);
            }
            at = &s.ty;
        }
        sum
    }
}

/// Picoseconds of the mirror of a step: from the cotangent of its result to that of its operand.
fn mirrored(hw: &Hardware, mesh: &Mesh, op: &Op, from: &Type, to: &Type) -> u64 {
    let mut f = Func::new("mirror");
    let [x, d] = [from.clone(), to.cotangent()].map(|t| f.arg(t, Name::parse("x"), None));
    let mut b = builder::Builder::new(mesh, &mut f);
    let y = b.push_as("y", op.clone(), &[x], to);
    op.def().grad(&mut b, &[x], &[y], &[Some(d)]);
    let sends = f.nodes[1..].iter().filter(|n| n.op.collective().is_some());
    sends.map(|n| price::op(hw, mesh, &n.op, &[f.ty(n.ins[0])], f.ty(n.outs[0]))).sum()
}
