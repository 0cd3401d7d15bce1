//! The head of `program.py`: what somebody who knows PyTorch has to know of it.

use super::write::{Lines, comment};
use shardc_ir::func::{Func, Port, RoleKind};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{Instr, Plan, RankClass};
use std::collections::BTreeSet;

/// Most calls of a step that are named.
const MOST_CALLS: usize = 24;

/// The comments, imports and the hash of the plan, of a model that is called so.
pub(super) fn text(plan: &Plan, called: &str, hash: &str) -> String {
    let m = &plan.module.mesh;
    let mut out = Lines::default();
    out.push(0, &format!("# The plan of {} on {}.", comment(called), ranks(m)));
    let version = env!("CARGO_PKG_VERSION");
    out.push(
        0,
        &format!("# Written by shardc {version}. shardc.torch calls the functions that take `v`:"),
    );
    for (stage, class) in plan.classes.iter().enumerate() {
        let who = match plan.classes.len() {
            1 => "each rank".to_string(),
            _stages => format!("the ranks of stage {stage}"),
        };
        out.note(0, &format!("in a step {who}: {}.", calls(plan, class)));
    }
    let text = "\
# [2] is of microbatch 2. Sends and receives of a pipeline stand between them in program.json.
# `v` has this rank's pieces of tensors by their names in the plan: l0.q_proj of layer 0, d_l0.q_proj its
# gradient, and _acc its sum over microbatches (_total with the last one). A function finds its arguments
# there and leaves its results; what it reads last it drops, so that memory is free where the plan says.";
    text.lines().for_each(|l| out.push(0, l));
    let renamed = renamed(plan);
    if !renamed.is_empty() {
        out.note(0, &format!("What has two names: {}.", renamed.join(", ")));
    }
    let text = "\
# `over_tp` is a group of ranks, and over_tp.start(64) where this rank's piece of 64 begins. `places` names
# positions that are the same in each step, so that a mask is made once. A collective with `wait=False`
# goes on until its .wait().
# A comment behind a line is the type of its result: sizes of the whole tensor, @ axes that split a dim,
# + axes over which it is a sum yet to be taken, ~ axes whose ranks use it differently.
# Lines may be changed or added as in any program, the same on all ranks; names, shapes and the order of
# what functions take and leave are program.json's, by PLAN.
import math

import torch
import torch.nn.functional as F

from shardc.torch import *
";
    text.lines().for_each(|l| out.push(0, l));
    out.push(0, "");
    out.push(0, &format!("PLAN = \"{hash}\""));
    out.push(0, "");
    out.text()
}

fn ranks(m: &Mesh) -> String {
    let axes: Vec<String> = m.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    match axes.is_empty() {
        true => "one rank".to_string(),
        false => format!("{} ranks: {}", m.ranks(), axes.join(", ")),
    }
}

/// The functions that ranks call in a step, with microbatches.
fn calls(plan: &Plan, class: &RankClass) -> String {
    let of = |i: &Instr| match i {
        Instr::Call(c) => {
            let name = plan.module.funcs[c.func].name.replace('.', "_");
            Some(c.microbatch.map_or(name.clone(), |m| format!("{name}[{m}]")))
        }
        _transfer => None,
    };
    let all: Vec<String> = class.step.iter().filter_map(of).collect();
    match all.len() > MOST_CALLS {
        true => {
            let last = all.last().map_or("", |l| l);
            format!("{}, … {last}", all[..MOST_CALLS].join(", "))
        }
        false => all.join(", "),
    }
}

/// What a function leaves under one name and others take under another: of all layers once.
fn renamed(plan: &Plan) -> Vec<String> {
    let name = |f: &Func, p: &Port| {
        let name = f.name(p.value);
        let text = name.to_string();
        let text = text.trim_start_matches('%');
        name.layer.map_or(text.into(), |l| text.replacen(&format!("l{l}."), "l{i}.", 1))
    };
    let mut out = BTreeSet::new();
    for f in &plan.module.funcs {
        // Names of sums, parameters and states say what they are.
        let kind = |p: &&Port| p.role.as_ref().map(|r| r.kind);
        let is = |p: &&Port| matches!(kind(p), Some(RoleKind::Step | RoleKind::Scale));
        for r in f.results.iter().filter(is) {
            let made = name(f, r);
            for g in &plan.module.funcs {
                let taken = g.args.iter().filter(|a| a.role == r.role).map(|a| name(g, a));
                out.extend(taken.filter(|t| *t != made).map(|t| format!("{made} is {t} later on")));
            }
        }
    }
    out.into_iter().map(|t| comment(&t)).collect()
}
