//! `program.json`: what `shardc.torch` knows of a plan beside its functions.

use super::ops::raised::Raised;
use super::seen::same;
use serde_json::{Value as Json, json};
use shardc_ir::func::{Fill, Func, Port, Role, RoleKind, Value, inputs, sent};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Kind;
use shardc_ir::plan::{Instr, Plan, Transfer};
use shardc_ir::types::Type;

/// The number of the form of `program.json`, and of what programs call: `shardc.torch` takes one alone.
const FORMAT: u32 = 3;

/// What of a plan beside its ops cannot be run.
pub(super) fn refused(plan: &Plan) -> Vec<String> {
    let random = inputs(&plan.module).into_iter().filter(|r| r.input.fill == Fill::Random);
    random.map(|r| format!("the input {:?}, of numbers at random", r.name.to_string())).collect()
}

/// The parameters with a gradient that no single op updates: those of optimizers that are programs.
fn updated_by_programs(plan: &Plan) -> Vec<&str> {
    let mut out = vec![];
    for f in &plan.module.funcs {
        let has_gradient = |name: &str| {
            let of = |r: &Role| matches!(r.kind, RoleKind::Grad | RoleKind::GradSum);
            f.args.iter().filter_map(|a| a.role.as_ref()).any(|r| of(r) && *r.name == *name)
        };
        let one_op = |v: Value| {
            let n = f.nodes.iter().find(|n| n.outs.contains(&v));
            n.is_none_or(|n| n.op.facts().kind == Kind::Update)
        };
        for r in &f.results {
            let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Param) else {
                continue;
            };
            if has_gradient(&role.name) && !one_op(r.value) {
                out.push(&**role.name.text());
            }
        }
    }
    out
}

/// The types of a plan, each once.
struct Types<'a> {
    mesh: &'a Mesh,
    known: Vec<Json>,
}

impl Types<'_> {
    fn of(&mut self, t: &Type) -> usize {
        let dim = |d: &shardc_ir::types::Dim| {
            let atoms = d.atoms.iter().map(|a| {
                let i = self.mesh.atoms[a];
                json!([self.mesh.axes[usize::from(i.axis)].name, i.pre, i.size])
            });
            json!([d.size, atoms.collect::<Vec<_>>()])
        };
        let dims: Vec<Json> = t.dims.iter().map(dim).collect();
        let own = json!([t.dtype.name(), dims]);
        self.known.iter().position(|k| *k == own).unwrap_or_else(|| {
            self.known.push(own);
            self.known.len() - 1
        })
    }
}

fn role(r: &Role) -> Json {
    // Of an input what it reads stands in a table.
    let kind =
        if r.kind.input().is_some() { r.kind.name().to_string() } else { r.kind.to_string() };
    json!([kind, &*r.name])
}

/// The text of `program.json`, without line breaks but between functions.
pub(super) fn json(plan: &Plan, hash: &str, raised: &Raised, peaks: &[usize]) -> String {
    let m = &plan.module;
    let mut types = Types { mesh: &m.mesh, known: vec![] };
    let mut ports = |f: &Func, all: &[Port]| -> Vec<Json> {
        let same = same(f);
        let with_role = all.iter().filter_map(|p| Some((p, p.role.as_ref()?)));
        let with_role = with_role.filter(|(_, r)| raised.is_kept(r));
        let one = |(p, r): (&Port, &Role)| {
            let name = f.name(same[p.value]).to_string();
            json!([name.trim_start_matches('%'), role(r), types.of(f.ty(p.value))])
        };
        with_role.map(one).collect()
    };
    let functions: serde_json::Map<String, Json> = m
        .funcs
        .iter()
        .map(|f| {
            let (args, results) = (ports(f, &f.args), ports(f, &f.results));
            (f.name.clone(), json!({ "args": args, "results": results }))
        })
        .collect();
    let mut transfer = |what: &str, t: &Transfer| {
        let f = &m.funcs[t.func];
        let own = match what {
            "send" => sent(&f.results, t.value),
            _taken => f.args.iter().find(|a| a.value == t.value).and_then(|a| a.role.as_ref()),
        };
        let own = own.expect("what is sent has a role");
        json!([what, role(own), t.microbatch, t.with, types.of(f.ty(t.value))])
    };
    let mut list = |all: &[Instr]| -> Vec<Json> {
        let one = |i: &Instr| match i {
            Instr::Call(c) => json!(["call", m.funcs[c.func].name, c.microbatch]),
            Instr::Send(t) => transfer("send", t),
            Instr::PostRecv(t) => transfer("post", t),
            Instr::Recv(t) => transfer("recv", t),
            Instr::Sent { to } => json!(["sent", to]),
        };
        all.iter().map(one).collect()
    };
    let classes: Vec<Json> = plan
        .classes
        .iter()
        .zip(peaks)
        .map(|(c, peak)| {
            let (step, evaluation) = (list(&c.step), list(&c.evaluation));
            let plan = c.memory.peak_bytes;
            json!({
                "step": step, "evaluation": evaluation, "peak_bytes": plan, "program_bytes": peak,
            })
        })
        .collect();
    let input = |r: &shardc_ir::func::InputRow| {
        let own = r.input;
        json!({
            "name": &*r.name, "fill": own.fill.name(), "batch": own.batch, "seq": own.seq,
            "reads": own.reads.name(), "dtype": r.dtype.name(), "sizes": r.sizes,
            "below": r.indexes().then(|| r.bound(plan.settings.vocab)),
        })
    };
    let states = m.states.iter().map(|s| {
        let init = match s.init {
            shardc_ir::func::StateInit::Number(x) => json!(x),
            shardc_ir::func::StateInit::File => json!("file"),
        };
        (s.name.name().to_string(), init)
    });
    let states: serde_json::Map<String, Json> = states.collect();
    let axes: Vec<Json> = m.mesh.axes.iter().map(|a| json!([a.name, a.size])).collect();
    let head = json!({
        "format": FORMAT,
        "version": env!("CARGO_PKG_VERSION"),
        "plan": hash,
        "mesh": axes,
        "settings": plan.settings,
        "states": states,
        "programs": updated_by_programs(plan),
        "inputs": inputs(m).iter().map(input).collect::<Vec<_>>(),
        "weights": plan.weights,
        "functions": functions,
        "classes": classes,
        "types": types.known,
    });
    serde_json::to_string(&head).expect("plain data") + "\n"
}
