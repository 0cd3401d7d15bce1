//! `run --trace`: what every rank did and when, as one file for a trace viewer.

use shardc_ir::diag::Result;
use shardc_ir::files::{FileFormat, Growing};
use shardc_ir::func::{FuncKind, FusedWithNext, Node};
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Call, Instr, Plan, Transfer};
use shardc_ir::schedule::ActionKind;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{fail, warn};
use shardc_report::pictures::trace::{Chrome, Event};
use shardc_report::report::Experts;
use shardc_runtime::{Done, Timing};
use std::collections::HashMap;
use std::path::Path;

/// What `--trace` writes.
const TRACE: FileFormat =
    FileFormat { name: "a trace", is: |begin| begin.starts_with(Chrome::BEGIN.as_bytes()) };

/// The file, which grows with the run beside its place.
pub struct Trace {
    /// Or why nothing more is written.
    file: Result<Growing>,
    text: Chrome,
    /// Messages sent and received so far, by giver and taker.
    sent: HashMap<(usize, usize), u64>,
    received: HashMap<(usize, usize), u64>,
}

impl Trace {
    /// To a file, of a run of this plan.
    ///
    /// # Errors
    /// Those of [`Growing`].
    pub fn new(file: &Path, stored: &Stored) -> Result<Trace> {
        let mut file = Growing::new(file, &TRACE)?;
        file.write(Chrome::head(&stored.hash()).as_bytes())?;
        let (sent, received) = (HashMap::new(), HashMap::new());
        Ok(Trace { file: Ok(file), text: Chrome::default(), sent, received })
    }

    /// Adds what the ranks did in a step. What cannot be written ends the trace, and not the run.
    pub fn add(&mut self, plan: &Plan, step: usize, timings: &[Vec<Timing>]) {
        if self.file.is_err() {
            return;
        }
        let experts = Experts::of(plan);
        let mut events = vec![];
        for (rank, all) in timings.iter().enumerate() {
            events.extend(all.iter().filter_map(|t| self.event((plan, &experts), rank, t, step)));
        }
        let text = self.text.add(&events);
        if let Some(d) = self.file.as_mut().ok().and_then(|f| f.write(text.as_bytes()).err()) {
            warn(&[d.clone().why("the run goes on without a trace")]);
            // What there is of it goes, and its room on the disk is free.
            self.file = Err(d);
        }
    }

    fn event(
        &mut self,
        (plan, experts): (&Plan, &Experts),
        rank: usize,
        t: &Timing,
        step: usize,
    ) -> Option<Event> {
        let us = |d: std::time::Duration| d.as_secs_f64() * 1e6;
        let class = &plan.classes[plan.class_of(rank)];
        let funcs = &plan.module.funcs;
        let mut args = vec![("step", step.to_string())];
        let mut flow = None;
        let (name, category) = match t.what {
            Done::Launch(func, node) => {
                let (f, n) = (&funcs[func], &funcs[func].nodes[node]);
                args.push(("scope", f.scope_info(n.scope).path.to_string()));
                args.push(("value", f.name(n.outs[0]).to_string()));
                args.push(("function", f.name.to_string()));
                args.push(("node", node.to_string()));
                match n.op.collective() {
                    Some(c) => {
                        let axes = experts.axis(&plan.module.mesh, f, n, c.atoms());
                        (format!("{} over {axes}", c.kind()), "collective")
                    }
                    None => (ops(&f.nodes[node..])?, "compute"),
                }
            }
            Done::Instr(i) => match &class.step.get(i)? {
                Instr::Call(c) => (label(plan, c), "compute"),
                Instr::Send(x) => {
                    let peer = peer(plan, rank, x.with);
                    flow = Some((self.number(rank, peer, true), true));
                    args.push(("bytes", x.bytes.to_string()));
                    (format!("send {} to rank {peer}", message(plan, x)), "send")
                }
                Instr::Recv(x) => {
                    let peer = peer(plan, rank, x.with);
                    flow = Some((self.number(peer, rank, false), false));
                    args.push(("bytes", x.bytes.to_string()));
                    (format!("recv {} from rank {peer}", message(plan, x)), "recv")
                }
                Instr::PostRecv(x) => {
                    let peer = peer(plan, rank, x.with);
                    (format!("post recv {} from rank {peer}", message(plan, x)), "recv")
                }
                Instr::Sent { to } => (format!("wait for rank {}", peer(plan, rank, *to)), "send"),
            },
        };
        let (start_us, end_us) = (us(t.start), us(t.end));
        Some(Event { rank, name, category, start_us, end_us, flow, args })
    }

    /// The number of the next message from one rank to another: the n-th one sent is the n-th one
    /// received.
    fn number(&mut self, from: usize, to: usize, sends: bool) -> u64 {
        let counts = if sends { &mut self.sent } else { &mut self.received };
        let n = counts.entry((from, to)).or_default();
        *n += 1;
        (*n << 24) | ((from as u64) << 12) | to as u64
    }

    /// Puts the file in its place: the exit status of a run that has done everything else.
    pub fn write(self, stored: &Stored) -> i32 {
        let mesh = &stored.plan.module.mesh;
        let name = |r: usize| {
            let at = shardc_report::inspect::coordinates(mesh, r);
            let at: Vec<String> = at.iter().map(|(a, i)| format!("{a}={i}")).collect();
            format!("rank {r} {}", at.join(" ")).trim_end().to_string()
        };
        let names: Vec<String> = (0..mesh.ranks()).map(name).collect();
        let end = self.text.end(&names);
        let done = self.file.and_then(|mut file| {
            file.write(end.as_bytes())?;
            file.publish()
        });
        done.as_ref().err().map_or(0, fail)
    }
}

/// The ops of the launch that begins a list of nodes, each once; `None` if it does nothing.
fn ops(nodes: &[Node]) -> Option<String> {
    let last = nodes.iter().position(|n| n.fused == FusedWithNext::No)?;
    let mut names: Vec<&str> = vec![];
    for n in nodes[..=last].iter().filter(|n| !n.op.def().is_view()) {
        if !names.contains(&n.op.mnemonic()) {
            names.push(n.op.mnemonic());
        }
    }
    (!names.is_empty()).then(|| names.join("+"))
}

/// `1F3` as in a schedule, or the name of a function of the step.
fn label(plan: &Plan, c: &Call) -> String {
    let f = &plan.module.funcs[c.func];
    let Some(microbatch) = c.microbatch else { return f.kind.name().into() };
    let kind = match f.kind.plain() {
        FuncKind::Forward => ActionKind::Forward,
        FuncKind::Weight => ActionKind::Weight,
        _ if plan.schedule.splits_backward() => ActionKind::Input,
        _ => ActionKind::Backward,
    };
    format!("{}{}{microbatch}", f.stage, kind.letter())
}

fn message(plan: &Plan, t: &Transfer) -> String {
    let name = plan.module.funcs[t.func].name(t.value);
    t.microbatch.map_or(name.to_string(), |m| format!("{name} of microbatch {m}"))
}

/// The rank of another class with the other coordinates of this one.
fn peer(plan: &Plan, rank: usize, class: usize) -> usize {
    let mesh = &plan.module.mesh;
    let axes = mesh.axis(PIPELINE).unwrap_or_default();
    mesh.group(axes, rank).get(class).copied().unwrap_or(rank)
}
