//! Execution traces of MLCommons Chakra (`schema/protobuf/et_def.proto`, Sridharan et al., 2023), one of each rank:
//! what it computes, exchanges and waits for in a step, with sizes and without times.

use super::{Export, File};
use serde_json::json;
use shardc_cost::device::Device;
use shardc_cost::plan::launch::{Pricer, Work};
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::group::{Launch, launches};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::Sends;
use shardc_ir::overlap::awaited;
use shardc_ir::plan::{Call, Instr, Plan, RankClass};
use std::collections::{BTreeMap, HashMap};

/// Most nodes of all traces.
const MOST: usize = 20_000_000;

/// A message of protobuf while it is written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push((n & 0x7f) as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn number(&mut self, field: u64, n: u64) {
        self.varint(field << 3);
        self.varint(n);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// An attribute of a node, whose value is field `kind` of `AttributeProto`.
    fn attribute(&mut self, name: &str, kind: u64, value: u64) {
        let mut a = Message::default();
        a.bytes(1, name.as_bytes());
        a.number(kind, value);
        self.bytes(10, &a.0);
    }

    fn text(&mut self, name: &str, value: &str) {
        let mut a = Message::default();
        a.bytes(1, name.as_bytes());
        a.bytes(29, value.as_bytes());
        self.bytes(10, &a.0);
    }
}

/// Kinds of values: fields of `AttributeProto`.
const INT32: u64 = 7;
const INT64: u64 = 9;
const UINT64: u64 = 13;
const BOOL: u64 = 27;
/// Types of nodes.
const COMPUTE: u64 = 4;
const SEND: u64 = 5;
const RECV: u64 = 6;
const COLLECTIVE: u64 = 7;

/// The trace of one rank while it is written.
struct Trace {
    out: Message,
    next: u64,
    /// The last node that computes, and the last that exchanges; nodes that the next one waits for.
    compute: Option<u64>,
    exchange: Option<u64>,
    waits: Vec<u64>,
}

impl Trace {
    fn new() -> Trace {
        let mut head = Message::default();
        head.bytes(1, b"0.0.4");
        let mut out = Message::default();
        out.varint(head.0.len() as u64);
        out.0.extend_from_slice(&head.0);
        Trace { out, next: 0, compute: None, exchange: None, waits: vec![] }
    }

    /// Adds a node that waits for others; its number.
    fn node(&mut self, name: &str, kind: u64, deps: &[u64], fill: impl Fn(&mut Message)) -> u64 {
        let id = self.next;
        self.next += 1;
        let mut n = Message::default();
        n.number(1, id);
        n.bytes(2, name.as_bytes());
        n.number(3, kind);
        let mut all: Vec<u64> = deps.to_vec();
        all.sort_unstable();
        all.dedup();
        let mut packed = Message::default();
        all.iter().for_each(|d| packed.varint(*d));
        if !all.is_empty() {
            n.bytes(5, &packed.0);
        }
        n.attribute("is_cpu_op", BOOL, 0);
        fill(&mut n);
        self.out.varint(n.0.len() as u64);
        self.out.0.extend_from_slice(&n.0);
        id
    }

    fn computes(&mut self, name: &str, flops: f64, bytes: f64) {
        let mut deps: Vec<u64> = std::mem::take(&mut self.waits);
        deps.extend(self.compute);
        let id = self.node(name, COMPUTE, &deps, |n| {
            n.attribute("num_ops", INT64, flops as u64);
            n.attribute("tensor_size", UINT64, bytes as u64);
        });
        self.compute = Some(id);
    }
}

/// Groups of ranks by their name, as `comm_group.json` has them.
#[derive(Default)]
struct Groups {
    names: HashMap<Vec<usize>, usize>,
}

impl Groups {
    fn name(&mut self, ranks: Vec<usize>) -> String {
        let next = self.names.len() + 1;
        self.names.entry(ranks).or_insert(next).to_string()
    }
}

/// What Chakra calls a collective, of those it has.
fn kind(sends: Sends) -> Option<u64> {
    Some(match sends {
        Sends::SumToAll => 0,
        Sends::ShareOfResult | Sends::MeanShare => 2,
        Sends::Pieces | Sends::Rows { .. } | Sends::Boxes { .. } => 6,
        Sends::Share => 7,
        Sends::Nothing | Sends::Whole => return None,
    })
}

/// `plan.R.et` of every rank R, and the groups.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    let plan = &e.s.plan;
    let mesh = &plan.module.mesh;
    let ring = plan.module.funcs.iter().flat_map(|f| &f.nodes);
    let ring = ring.filter_map(|n| n.op.collective()).any(|c| c.sends() == Sends::Whole);
    e.lack(ring, "transfers around a ring (--cp-mode ring)");
    let of_class = |c: &RankClass| -> usize {
        let of = |i: &Instr| match i {
            Instr::Call(c) => plan.module.funcs[c.func].nodes.len(),
            Instr::Send(_) | Instr::PostRecv(_) | Instr::Recv(_) | Instr::Sent { .. } => 1,
        };
        c.step.iter().map(of).sum()
    };
    let each = mesh.ranks() / plan.classes.len().max(1);
    let nodes: usize = plan.classes.iter().map(|c| of_class(c).saturating_mul(each)).sum();
    e.lack(nodes > MOST, format!("{nodes} nodes over all ranks, more than the limit of {MOST}"));
    e.done()?;
    if plan.classes.is_empty() {
        return Ok(vec![]);
    }
    // Sizes alone are asked for: they are the same on every machine.
    let device = Device::named("h100-sxm")?;
    let mut pricer = Pricer::new(mesh, &device, plan.settings.tokens);
    let mut works: BTreeMap<usize, (Vec<Launch>, Vec<Work>)> = BTreeMap::new();
    for c in plan.classes.iter().flat_map(RankClass::calls) {
        let f = &plan.module.funcs[c.func];
        works.entry(c.func).or_insert_with(|| {
            let all = launches(f);
            let work = all.iter().map(|x| pricer.work(f, x)).collect();
            (all, work)
        });
    }
    let mut groups = Groups::default();
    let mut out = vec![];
    for rank in 0..mesh.ranks() {
        let mut t = Trace::new();
        let class = &plan.classes[plan.class_of(rank)];
        let mut tags: HashMap<(usize, usize), u64> = HashMap::new();
        for i in &class.step {
            match i {
                Instr::Call(c) => {
                    let (all, work) = &works[&c.func];
                    call(plan, rank, (class, c), (all, work), &mut groups, &mut t);
                }
                Instr::Send(x) | Instr::Recv(x) => {
                    let peer = plan.peer(rank, x.with);
                    let sends = matches!(i, Instr::Send(_));
                    let (from, to) = if sends { (rank, peer) } else { (peer, rank) };
                    let tag = tags.entry((from, to)).or_default();
                    *tag += 1;
                    let tag = *tag;
                    let name = plan.module.funcs[x.func].name(x.value).to_string();
                    let deps: Vec<u64> = t.compute.into_iter().collect();
                    let id = t.node(&name, if sends { SEND } else { RECV }, &deps, |n| {
                        n.attribute("comm_size", INT64, x.bytes as u64);
                        n.attribute("comm_src", INT32, from as u64);
                        n.attribute("comm_dst", INT32, to as u64);
                        n.attribute("comm_tag", INT32, tag);
                    });
                    if !sends {
                        t.waits.push(id);
                    }
                }
                Instr::Sent { .. } | Instr::PostRecv(_) => {}
            }
        }
        out.push(File::new(format!("plan.{rank}.et"), t.out.0));
    }
    let all: BTreeMap<usize, &Vec<usize>> = groups.names.iter().map(|(r, n)| (*n, r)).collect();
    out.push(File::new("comm_group.json", json!(all).to_string() + "\n"));
    Ok(out)
}

fn call(
    plan: &Plan,
    rank: usize,
    (class, c): (&RankClass, &Call),
    (all, work): (&[Launch], &[Work]),
    groups: &mut Groups,
    t: &mut Trace,
) {
    let f: &Func = &plan.module.funcs[c.func];
    let mesh = &plan.module.mesh;
    let until = awaited(f, all, &class.memory, c);
    // By launch the exchanges that it waits for.
    let mut ends: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    let name = |x: &Launch| {
        let n = &f.nodes[x.nodes.start];
        let made = n.outs.first().map_or(String::new(), |v| f.name(*v).to_string());
        format!("{} {made}", n.op.mnemonic())
    };
    let bytes = |x: &Launch| -> f64 {
        x.ins.iter().chain(&x.outs).map(|v| f.ty(*v).local_bytes(mesh) as f64).sum()
    };
    for (j, (x, w)) in all.iter().zip(work).enumerate() {
        t.waits.extend(ends.remove(&j).into_iter().flatten());
        match w {
            Work::View => {}
            Work::Exchange { sends, bytes, atoms, .. } => {
                let Some(kind) = kind(*sends) else { continue };
                let group = groups.name(group(plan, *atoms, rank));
                let mut deps = std::mem::take(&mut t.waits);
                deps.extend(t.compute.into_iter().chain(t.exchange));
                let id = t.node(&name(x), COLLECTIVE, &deps, |n| {
                    n.attribute("comm_type", INT64, kind);
                    n.attribute("comm_size", INT64, *bytes as u64);
                    n.text("pg_name", &group);
                });
                t.exchange = Some(id);
                ends.entry(until[j]).or_default().push(id);
            }
            Work::Product { .. }
            | Work::Grouped { .. }
            | Work::Attention { .. }
            | Work::Rows { .. } => t.computes(&name(x), Pricer::flops(w), bytes(x)),
        }
    }
    t.waits.extend(ends.into_values().flatten());
}

fn group(plan: &Plan, atoms: AtomSet, rank: usize) -> Vec<usize> {
    let mut all = plan.module.mesh.group(atoms, rank);
    all.sort_unstable();
    all
}
