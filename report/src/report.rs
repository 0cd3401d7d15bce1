//! What a plan costs: collectives and memory per rank, as `compile --format json` prints them.

mod chosen;
pub mod groups;
pub mod moments;

use crate::pictures::measure::{bubble_of, textbook_bubble};
use crate::proof::Outcome;
pub use chosen::{Chosen, Training};
use serde::{Deserialize, Serialize};
use shardc_ir::attr::Padding;
pub use shardc_ir::diag::bytes;
use shardc_ir::diag::count;
use shardc_ir::func::{Func, FuncKind, Node, Port, RoleKind, Value, inputs};
use shardc_ir::group::begins_call;
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::{IndexAdd, Op};
use shardc_ir::plan::{Instr, MemoryClass, Plan, RankClass};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The report of a compilation.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub schema: u32,
    pub ranks: usize,
    pub classes: usize,
    pub microbatches: usize,
    /// The part of the time of all ranks of the pipeline, from 0 to 1, in which nothing is done.
    pub bubble: f64,
    /// From model to written plan, proof and kernels not included.
    pub compile_ms: f64,
    /// Of the proof, if one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prove_ms: Option<f64>,
    /// Making code of kernels for devices, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_ms: Option<f64>,
    pub phases: Vec<PhaseTime>,
    /// What `--zero-accumulate` costs and saves, if it changes something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_accumulate: Option<Kept>,
    /// Rows of tables that look-ups train not: those of padding tokens.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub padding: Vec<PaddingReport>,
    /// Groups of parameters, if they have update rules of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub update_rules: Vec<groups::GroupReport>,
    /// Whether the plan was proved when it was compiled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof: Option<Outcome>,
    pub per_class: Vec<ClassReport>,
}

/// What is kept whole over microbatches, and what a rank sends in a step and needs at the peak: the most
/// of any rank, of this plan and of the one that keeps nothing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Kept {
    pub what: String,
    #[serde(serialize_with = "whole")]
    pub sent_bytes: f64,
    #[serde(serialize_with = "whole")]
    pub sent_bytes_without: f64,
    pub peak_bytes: usize,
    pub peak_bytes_without: usize,
}

impl Kept {
    /// Of a plan, and of one that is the same but for `--zero-accumulate`.
    pub fn of(what: &str, plan: &Plan, without: &Plan) -> Kept {
        let sent = |p: &Plan| {
            let experts = Experts::of(p);
            let all =
                p.classes.iter().map(|c| of_class(p, &experts, c).iter().map(|x| x.bytes).sum());
            all.fold(0.0, f64::max)
        };
        Kept {
            what: what.into(),
            sent_bytes: sent(plan),
            sent_bytes_without: sent(without),
            peak_bytes: plan.peak_bytes(),
            peak_bytes_without: without.peak_bytes(),
        }
    }
}

impl std::fmt::Display for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let [sent, before] = [self.sent_bytes, self.sent_bytes_without].map(|n| bytes(n as usize));
        let [peak, lower] = [self.peak_bytes, self.peak_bytes_without].map(bytes);
        write!(
            f,
            "--zero-accumulate {}: a rank sends {sent} per step and needs {peak}; without it {before} and {lower}",
            self.what
        )
    }
}

/// A token whose row of an embedding gets no gradient from its look-up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PaddingReport {
    /// Scope of the look-up.
    pub scope: String,
    pub token: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct PhaseTime {
    pub name: String,
    pub ms: f64,
}

/// One rank class: ranks that run the same program.
#[derive(Clone, Debug, Serialize)]
pub struct ClassReport {
    pub class: usize,
    pub stages: Vec<usize>,
    pub ranks: usize,
    /// Ranges of rank numbers.
    pub rank_list: String,
    pub peak_bytes: usize,
    /// The most bytes alive at once: no arena can be smaller.
    pub live_bytes: usize,
    pub weights_bytes: usize,
    pub grads_bytes: usize,
    pub optimizer_bytes: usize,
    pub activation_bytes: usize,
    pub collective_buffer_bytes: usize,
    pub temporary_bytes: usize,
    pub input_bytes: usize,
    pub collectives: Vec<CollectiveReport>,
}

/// All calls of one kind over one axis in one scope and phase, per rank and optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveReport {
    pub phase: &'static str,
    pub kind: &'static str,
    pub axis: String,
    pub scope: String,
    /// Calls, after combining.
    pub count: usize,
    /// Tensors in these calls.
    pub tensors: usize,
    /// Whole bytes that one rank sends, under the ring cost of each call; of experts, if all are used alike.
    #[serde(serialize_with = "whole")]
    pub bytes: f64,
    /// The most that these bytes may be.
    #[serde(serialize_with = "whole")]
    pub bytes_max: f64,
}

/// Writes a number of whole bytes without a point.
pub fn whole<S: serde::Serializer>(bytes: &f64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_u64(*bytes as u64)
}

/// Over which atoms experts are split, and the scopes in which they are: there these atoms are the
/// axis ep, which no mesh has.
pub struct Experts<'a> {
    atoms: AtomSet,
    scopes: BTreeSet<&'a str>,
}

impl<'a> Experts<'a> {
    /// Those of a plan; without experts there are none.
    pub fn of(plan: &'a Plan) -> Experts<'a> {
        let (mut atoms, mut scopes) = (AtomSet::EMPTY, BTreeSet::new());
        for f in &plan.module.funcs {
            for n in &f.nodes {
                if let Op::GroupedDot(_) = n.op {
                    // A stack of weights, one of each expert.
                    atoms = f.ty(n.ins[2]).dims[0].atoms.set();
                }
                if n.op.facts().kind.of_experts() {
                    scopes.insert(&*f.scope_info(n.scope).path);
                }
            }
        }
        Experts { atoms, scopes }
    }

    /// What is left of the atoms that cut a dim of a parameter beside ep; `None` if ep does not cut it: that
    /// cuts the first dim of a stack of weights in a scope of experts.
    pub fn beside(&self, param: &str, dims: usize, dim: usize, atoms: AtomSet) -> Option<AtomSet> {
        let inside = self.scopes.iter().any(|scope| param.starts_with(scope));
        let stack = inside && dims == 3 && dim == 0;
        let cut = stack && !self.atoms.is_empty() && self.atoms.within(atoms);
        cut.then(|| atoms.minus(self.atoms))
    }

    /// The axes of a collective, joined by `+`: ep where it is one of experts.
    pub fn axis(&self, mesh: &Mesh, f: &Func, n: &Node, atoms: AtomSet) -> String {
        let inside = self.scopes.contains(&*f.scope_info(n.scope).path);
        if !inside || self.atoms.is_empty() || !self.atoms.within(atoms) {
            return mesh.names(atoms, "+");
        }
        let rest = atoms.minus(self.atoms);
        match rest.is_empty() {
            true => "ep".into(),
            false => format!("ep+{}", mesh.names(rest, "+")),
        }
    }
}

/// Layers of which a function has work: some that reads a parameter. What all layers share, such as positions,
/// is made in the first of each stage and stands in the scope of the model's first.
pub fn layers_of(f: &Func) -> BTreeSet<u32> {
    let is_weight = |p: &&Port| {
        p.role.as_ref().is_some_and(|r| matches!(r.kind, RoleKind::Unsharded | RoleKind::Param))
    };
    let weights: HashSet<Value> = f.args.iter().filter(is_weight).map(|p| p.value).collect();
    let reads = |n: &&Node| n.ins.iter().any(|v| weights.contains(v));
    f.nodes.iter().filter(reads).filter_map(|n| f.scope_info(n.scope).layer).collect()
}

/// Phase of a function in the report.
pub fn phase_of(kind: FuncKind) -> &'static str {
    match kind {
        FuncKind::Forward => "forward",
        FuncKind::Backward | FuncKind::Weight => "backward",
        FuncKind::BackwardLast | FuncKind::WeightLast => "backward",
        FuncKind::Model | FuncKind::StepPrologue | FuncKind::OptimizerStep | FuncKind::Evaluate => {
            "step"
        }
    }
}

/// What the ranks of a class send and receive in a step, in program order; transfers between stages
/// come last.
pub fn collectives(plan: &Plan, class: &RankClass) -> Vec<CollectiveReport> {
    of_class(plan, &Experts::of(plan), class)
}

/// The same, where experts are known: they are looked for in all functions, of which a class has some.
pub fn of_class(plan: &Plan, experts: &Experts, class: &RankClass) -> Vec<CollectiveReport> {
    let mesh = &plan.module.mesh;
    let mut at: BTreeMap<(usize, &'static str, u32, u32), usize> = BTreeMap::new();
    let mut out: Vec<CollectiveReport> = vec![];
    for &fi in &class.funcs {
        let f = &plan.module.funcs[fi];
        let calls = class.calls().filter(|c| c.func == fi).count();
        if calls == 0 {
            continue; // only an evaluation runs it
        }
        for (ni, n) in f.nodes.iter().enumerate() {
            let Some(c) = n.op.collective() else { continue };
            let key = (fi, c.kind(), c.atoms().0, n.scope.0);
            let i = *at.entry(key).or_insert_with(|| {
                out.push(CollectiveReport {
                    phase: phase_of(f.kind),
                    kind: c.kind(),
                    axis: experts.axis(mesh, f, n, c.atoms()),
                    scope: f.scope_info(n.scope).path.to_string(),
                    count: 0,
                    tensors: 0,
                    bytes: 0.0,
                    bytes_max: 0.0,
                });
                out.len() - 1
            });
            let pairs = || n.ins.iter().zip(&n.outs).map(|(&x, &y)| (f.ty(x), f.ty(y)));
            let bytes = pairs().map(|(x, y)| c.ring_bytes(mesh, x, y)).sum::<f64>().ceil();
            let most = pairs().map(|(x, y)| c.max_bytes(mesh, x, y)).sum::<f64>().ceil();
            out[i].count += calls * usize::from(begins_call(f, ni));
            out[i].tensors += calls * n.outs.len();
            out[i].bytes += bytes * calls as f64;
            out[i].bytes_max += most * calls as f64;
        }
    }
    out.extend(transfers(plan, class));
    out
}

/// The sends and receives of a class, by phase and scope. Who receives sends nothing.
fn transfers(plan: &Plan, class: &RankClass) -> Vec<CollectiveReport> {
    let mut out: Vec<CollectiveReport> = vec![];
    // It is the same for every microbatch.
    let mut known: BTreeMap<(&str, usize, Value, bool), usize> = BTreeMap::new();
    for i in &class.step {
        let (kind, t) = match i {
            Instr::Send(t) => ("send", t),
            Instr::Recv(t) => ("recv", t),
            Instr::Call(_) | Instr::Sent { .. } | Instr::PostRecv(_) => continue,
        };
        let i =
            *known.entry((kind, t.func, t.value, t.microbatch.is_some())).or_insert_with(|| {
                let f = &plan.module.funcs[t.func];
                let phase = if t.microbatch.is_some() { phase_of(f.kind) } else { "step" };
                let at = |n: &&Node| match kind {
                    "send" => n.outs.contains(&t.value),
                    _received => n.ins.contains(&t.value),
                };
                let scope = f.nodes.iter().find(at).map_or("", |n| &*f.scope_info(n.scope).path);
                let same =
                    |x: &CollectiveReport| (x.phase, x.kind, &*x.scope) == (phase, kind, scope);
                out.iter().position(same).unwrap_or_else(|| {
                    out.push(CollectiveReport {
                        phase,
                        kind,
                        axis: PIPELINE.into(),
                        scope: scope.into(),
                        count: 0,
                        tensors: 0,
                        bytes: 0.0,
                        bytes_max: 0.0,
                    });
                    out.len() - 1
                })
            });
        out[i].count += 1;
        out[i].tensors += 1;
        out[i].bytes += if kind == "send" { t.bytes as f64 } else { 0.0 };
        out[i].bytes_max = out[i].bytes;
    }
    out
}

/// The padding tokens of what a plan trains, each once.
pub fn padding(plan: &Plan) -> Vec<PaddingReport> {
    let mut out = vec![];
    let backward = |f: &&Func| matches!(f.kind, FuncKind::Backward | FuncKind::Weight);
    for f in plan.module.funcs.iter().filter(backward) {
        for n in &f.nodes {
            let Op::IndexAdd(IndexAdd { padding: Padding::Zero(token), .. }) = n.op else {
                continue;
            };
            let one = PaddingReport { scope: f.scope_info(n.scope).path.to_string(), token };
            if !out.contains(&one) {
                out.push(one);
            }
        }
    }
    out
}

/// The same for people: a line each, as other lines that begin a summary.
pub fn padding_lines(plan: &Plan) -> String {
    let line = |p: &PaddingReport| {
        format!(
            "pad    token {}: its row of {} gets no gradient from the look-up\n",
            p.token, p.scope
        )
    };
    padding(plan).iter().map(line).collect()
}

/// Ranges of rank numbers: `0-3, 8-11`.
fn ranges(ranks: &[usize]) -> String {
    let mut out: Vec<String> = vec![];
    for run in ranks.chunk_by(|a, b| a + 1 == *b) {
        out.push(match run {
            [one] => one.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        });
    }
    out.join(", ")
}

/// The report of a plan; times and the proof are added by whoever has them.
pub fn report(
    plan: &Plan,
    phases: &[(&'static str, f64)],
    zero_accumulate: Option<Kept>,
) -> Report {
    let ranks = plan.module.mesh.ranks();
    let experts = Experts::of(plan);
    let mut of_class: Vec<Vec<usize>> = vec![vec![]; plan.classes.len()];
    (0..ranks).for_each(|r| of_class[plan.class_of(r)].push(r));
    let all = plan.classes.iter().zip(&of_class).enumerate();
    let per_class: Vec<ClassReport> =
        all.map(|(i, (c, ranks))| class_report(plan, &experts, i, c, ranks)).collect();
    let phases = phases.iter().map(|(n, ms)| PhaseTime { name: n.to_string(), ms: *ms }).collect();
    let (schema, classes) = (shardc_plans::plan_dir::SCHEMA, per_class.len());
    let (microbatches, bubble) = (plan.settings.microbatches, bubble_of(plan));
    let padding = padding(plan);
    Report {
        schema,
        ranks,
        classes,
        microbatches,
        bubble,
        compile_ms: 0.0,
        prove_ms: None,
        kernel_ms: None,
        phases,
        zero_accumulate,
        padding,
        update_rules: vec![],
        proof: None,
        per_class,
    }
}

/// What a GPU holds beside a plan, in words.
pub fn beside_words(n: usize) -> String {
    let n = bytes(n);
    format!("beside the plan: up to {n} for the driver's context, NCCL's buffers and cuBLASLt")
}

/// The bubble in words; nothing where there is no pipeline.
pub fn bubble_line(plan: &Plan) -> Option<String> {
    let ranks = plan.module.mesh.pipeline();
    let bubble = bubble_of(plan);
    let stages = || plan.module.of_kind(FuncKind::Forward);
    let (all, empty) = (stages().count(), stages().filter(|f| layers_of(f).is_empty()).count());
    let has_layers = empty < all;
    let formula = match all > ranks {
        true => "interleaved 1F1B by its formula, (p-1)/(v m)",
        false => "1F1B by its formula, (p-1)/m",
    };
    (ranks > 1).then(|| {
        let mut line = format!(
            "bubble {:.1} % of the time of {ranks} pipeline ranks (idle/total); {:.2} % of their work (idle/work); \
             {formula}: {:.2} %; if all stages take equally long",
            100.0 * bubble,
            100.0 * bubble / (1.0 - bubble),
            100.0 * textbook_bubble(plan)
        );
        if has_layers && empty > 0 {
            line += &format!("; but {empty} of {all} stages have no layer");
        }
        line
    })
}

/// What a step is of: `8 sequences of 2048 tokens in 4 microbatches`; of a model without tokens, rows.
pub fn step_words(plan: &Plan) -> String {
    let s = &plan.settings;
    let each = match inputs(&plan.module).iter().any(|r| r.input.seq.is_some()) {
        false => count(s.global_batch, "row", "rows"),
        true => {
            let sequences = count(s.global_batch, "sequence", "sequences");
            format!("{sequences} of {}", count(s.seq, "token", "tokens"))
        }
    };
    format!("{each} in {}", count(s.microbatches, "microbatch", "microbatches"))
}

/// Columns of a line that people read.
const WIDTH: usize = 80;

/// A text of parts that `;` separates, in lines of at most 80 columns behind a head, which the lines after the first
/// leave blank.
pub fn wrapped(head: &str, text: &str) -> String {
    let mut out = String::from(head);
    let mut width = out.chars().count();
    for part in text.split_inclusive(';').map(str::trim) {
        let own = part.chars().count();
        if width > head.len() && width + 1 + own > WIDTH {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', head.len()));
            width = head.len();
        } else if width > head.len() {
            out.push(' ');
            width += 1;
        }
        out.push_str(part);
        width += own;
    }
    out + "\n"
}

/// Bytes to three digits, for rows that are to be short; no fewer than there are.
pub fn brief(n: usize) -> String {
    let text = bytes(n);
    let long = text.split_once(' ').filter(|(x, _)| x.len() > 4 && x.contains('.'));
    match long.and_then(|(x, unit)| Some((x.parse::<f64>().ok()?, unit))) {
        Some((x, unit)) if x > 99.9 => format!("{:.0} {unit}", (x - 1e-6).ceil()),
        Some((x, unit)) => format!("{:.1} {unit}", (x * 10.0 - 1e-6).ceil() / 10.0),
        None => text,
    }
}

fn class_report(
    plan: &Plan,
    experts: &Experts,
    number: usize,
    c: &RankClass,
    own: &[usize],
) -> ClassReport {
    let of = |c2: MemoryClass| c.memory.at_peak.iter().find(|x| x.0 == c2).map_or(0, |x| x.1);
    ClassReport {
        class: number,
        stages: c.stages.clone(),
        ranks: own.len(),
        rank_list: ranges(own),
        peak_bytes: c.memory.peak_bytes,
        live_bytes: c.memory.live_bytes,
        weights_bytes: of(MemoryClass::Weights),
        grads_bytes: of(MemoryClass::Grads),
        optimizer_bytes: of(MemoryClass::Optimizer),
        activation_bytes: of(MemoryClass::Activation),
        collective_buffer_bytes: of(MemoryClass::CollectiveBuffer),
        temporary_bytes: of(MemoryClass::Temporary),
        input_bytes: of(MemoryClass::Input),
        collectives: of_class(plan, experts, c),
    }
}
