//! `inspect --rank R --instructions`: what a rank does in a step, one after the other, in the words of other
//! pipelines' instructions (DeepSpeed, shallowspeed).

use super::ranks::coordinates;
use crate::report::Experts;
use serde::Serialize;
use serde_json::json;
use shardc_ir::diag::bytes;
use shardc_ir::func::{Func, FuncKind};
use shardc_ir::group::begins_call;
use shardc_ir::ops::Kind;
use shardc_ir::plan::{Call, Instr, Plan, Transfer};
use shardc_plans::stored::Stored;
use shardc_process::terminal::json_line;
use std::fmt::Write as _;

/// Collectives of one kind over one axis, one after the other.
#[derive(Serialize, PartialEq)]
struct Exchange {
    kind: String,
    axis: String,
    calls: usize,
    tensors: usize,
    bytes: f64,
}

/// One line.
#[derive(Serialize, Default)]
struct InstructionLine {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<usize>,
    /// The other rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<usize>,
    /// What is sent, received, or updated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<usize>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    exchanges: Vec<Exchange>,
}

/// `all_reduce` as `AllReduce`.
fn camel(kind: &str) -> String {
    let word = |w: &str| match w.split_at_checked(1) {
        Some((first, rest)) => first.to_uppercase() + rest,
        None => String::new(),
    };
    kind.split('_').map(word).collect()
}

fn exchange(plan: &Plan, experts: &Experts, f: &Func, ni: usize) -> Option<Exchange> {
    let n = &f.nodes[ni];
    let (c, mesh) = (n.op.collective()?, &plan.module.mesh);
    let pairs = n.ins.iter().zip(&n.outs);
    Some(Exchange {
        kind: camel(c.kind()),
        axis: experts.axis(mesh, f, n, c.atoms()),
        calls: usize::from(begins_call(f, ni)),
        tensors: n.outs.len(),
        bytes: pairs.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum(),
    })
}

/// Adds an exchange to those of its kind and axis.
fn join(all: &mut Vec<Exchange>, x: Exchange) {
    match all.iter_mut().find(|o| (&o.kind, &o.axis) == (&x.kind, &x.axis)) {
        Some(o) => {
            o.calls += x.calls;
            o.tensors += x.tensors;
            o.bytes += x.bytes;
        }
        None => all.push(x),
    }
}

/// A call for a microbatch is one line, with what it exchanges. One for the step is a line for each run of
/// like collectives and one for the optimizer, in the order of its nodes.
fn call(plan: &Plan, experts: &Experts, c: &Call, out: &mut Vec<InstructionLine>) {
    let f = &plan.module.funcs[c.func];
    if c.microbatch.is_some() {
        let name = match f.kind.plain() {
            FuncKind::Forward => "Forward",
            FuncKind::Weight => "BackwardWeight",
            _ if plan.schedule.splits_backward() => "BackwardInput",
            _ => "Backward",
        };
        let mut all = vec![];
        let found = (0..f.nodes.len()).filter_map(|n| exchange(plan, experts, f, n));
        found.for_each(|x| join(&mut all, x));
        let (stage, microbatch) = (Some(f.stage), c.microbatch);
        out.push(InstructionLine {
            name: name.into(),
            stage,
            microbatch,
            exchanges: all,
            ..InstructionLine::default()
        });
        return;
    }
    let begin = out.len();
    for (ni, n) in f.nodes.iter().enumerate() {
        if let Some(x) = exchange(plan, experts, f, ni) {
            match out.last_mut().filter(|s| s.name == x.kind && s.exchanges[0].axis == x.axis) {
                Some(same) => join(&mut same.exchanges, x),
                None => {
                    let name = x.kind.clone();
                    out.push(InstructionLine {
                        name,
                        exchanges: vec![x],
                        ..InstructionLine::default()
                    });
                }
            }
        } else if n.op.facts().kind == Kind::Update {
            let values = n.outs.iter().take(1).map(|&v| f.name(v).to_string());
            match out[begin..].iter_mut().find(|s| s.name == "OptimizerStep") {
                Some(step) => step.values.extend(values),
                None => {
                    let (name, values) = ("OptimizerStep".into(), values.collect());
                    out.push(InstructionLine { name, values, ..InstructionLine::default() });
                }
            }
        }
    }
}

fn transfer(plan: &Plan, rank: usize, way: &str, t: &Transfer) -> InstructionLine {
    let f = &plan.module.funcs[t.func];
    let what = match (t.microbatch, f.kind) {
        (None, _) => "",
        (Some(_), FuncKind::Forward) => "Activations",
        (Some(_), _) => "Gradients",
    };
    InstructionLine {
        name: format!("{way}{what}"),
        stage: Some(f.stage),
        microbatch: t.microbatch,
        peer: Some(plan.peer(rank, t.with)),
        values: vec![f.name(t.value).to_string()],
        bytes: Some(t.bytes),
        exchanges: vec![],
    }
}

fn steps(plan: &Plan, rank: usize) -> Vec<InstructionLine> {
    let experts = Experts::of(plan);
    let mut out = vec![];
    for i in &plan.classes[plan.class_of(rank)].step {
        match i {
            Instr::Call(c) => call(plan, &experts, c, &mut out),
            Instr::Send(t) => out.push(transfer(plan, rank, "Send", t)),
            Instr::PostRecv(t) => out.push(transfer(plan, rank, "PostRecv", t)),
            Instr::Recv(t) => out.push(transfer(plan, rank, "Recv", t)),
            Instr::Sent { to } => {
                let (name, peer) = ("WaitSent".into(), Some(plan.peer(rank, *to)));
                out.push(InstructionLine { name, peer, ..InstructionLine::default() });
            }
        }
    }
    out
}

fn line(s: &InstructionLine) -> String {
    let mut of: Vec<String> = vec![];
    of.extend(s.stage.map(|n| format!("stage {n}")));
    of.extend(s.microbatch.map(|n| format!("microbatch {n}")));
    let receives = s.name.starts_with("Recv") || s.name.starts_with("PostRecv");
    let to = if receives { "from" } else { "to" };
    of.extend(s.peer.map(|n| format!("{to} rank {n}")));
    match (&s.values[..], s.bytes) {
        ([], _) => {}
        (all, None) => of.push(format!("{} parameters", all.len())),
        (all, Some(n)) => of.push(format!("{} of {}", all.join(", "), bytes(n))),
    }
    let exchange = |x: &Exchange| {
        let (calls, tensors) = (x.calls, x.tensors);
        let what = if s.name == x.kind { String::new() } else { format!("{} ", x.kind) };
        let each = if tensors == calls { String::new() } else { format!(" of {tensors} tensors") };
        format!("{calls} {what}over {}{each}, {}", x.axis, bytes(x.bytes as usize))
    };
    of.extend(s.exchanges.iter().map(exchange));
    format!("{}({})", s.name, of.join(", "))
}

/// A rank's instructions; the rank is one of the plan.
pub fn instructions(s: &Stored, rank: usize, as_json: bool) -> String {
    let (plan, mesh) = (&s.plan, &s.plan.module.mesh);
    let all = steps(plan, rank);
    if as_json {
        return json_line("inspect-instructions", json!({ "rank": rank, "instructions": all }));
    }
    let at: Vec<String> = coordinates(mesh, rank).iter().map(|(a, i)| format!("{a}={i}")).collect();
    let mut out = format!("rank {rank} of {}   {}\n", mesh.ranks(), at.join(", "));
    for (i, s) in all.iter().enumerate() {
        let _ = writeln!(out, "{i:>5}  {}", line(s));
    }
    out
}
