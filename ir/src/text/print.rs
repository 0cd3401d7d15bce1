//! Prints a module: first every line into one buffer, then, unless told otherwise, equal layers
//! folded into one.

use super::fold;
use super::marks::SourceMarks;
use super::op::KEEP;
use super::types::{push_number, write_annotation, write_quoted, write_type};
use crate::func::{Func, FusedWithNext, Input, Module, Node, Part, Port, RoleKind, Scope, Value};
use crate::mesh::Mesh;
use crate::source::Source;
use std::fmt::Write as _;
use std::ops::Range;

/// What to do with layers that differ only in their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Repeat {
    /// Print each different layer once.
    #[default]
    Fold,
    /// Print every layer.
    Unroll,
}

/// Lists up to this long stand on one line, if they are of results or have no roles.
const SHORT: usize = 3;

/// One printed line: where it begins, and the layer it belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub start: usize,
    /// [`NO_LAYER`] if it belongs to none.
    pub layer: u32,
    /// Lines of different kinds do not repeat as one: stashes from the last layer to the first,
    /// then parameters from the first to the last, are two lists.
    pub kind: Option<RoleKind>,
    /// The mark of its node, if it has one.
    pub fused: FusedWithNext,
}

pub(super) const NO_LAYER: u32 = u32::MAX;

/// The module as text, equal layers folded. [`parse`](super::parse) gives it back.
pub fn print(m: &Module) -> String {
    print_with(m, Repeat::Fold)
}

/// A model as text: its program, and all else that a frontend knows of it.
/// [`parse_source`](super::parse_source) gives it back. An empty mesh is left out.
pub fn print_source(s: &Source) -> String {
    print_marked(&s.module, Repeat::Fold, Some(SourceMarks::of(s)), false)
        + s.updates.trim_start_matches('\n')
}

/// The module as text.
pub fn print_with(m: &Module, repeat: Repeat) -> String {
    print_marked(m, repeat, None, false)
}

/// The module as text between two passes, which says its phase whatever it is.
pub fn print_between(m: &Module) -> String {
    print_marked(m, Repeat::Fold, None, true)
}

fn print_marked(m: &Module, repeat: Repeat, marks: Option<SourceMarks>, between: bool) -> String {
    let no_mesh = marks.is_some() && m.mesh.axes.is_empty();
    let items = |f: &Func| f.nodes.len() + f.args.len() + f.results.len();
    let lines: usize = m.funcs.iter().map(items).sum();
    let mut p = Printer {
        mesh: &m.mesh,
        marks: marks.unwrap_or_default(),
        out: String::with_capacity(lines * 128 + 256),
        lines: Vec::with_capacity(lines * 2 + 16),
    };
    if !no_mesh {
        p.mesh();
    }
    p.phase(m.phase, between);
    m.states.iter().for_each(|x| p.state(x));
    m.params.iter().for_each(|x| p.layout(x));
    m.funcs.iter().for_each(|f| p.func(f));
    match repeat {
        Repeat::Unroll => p.out,
        Repeat::Fold => fold::fold(&p.out, &p.lines),
    }
}

/// One op as text, and where its operands stand in it.
#[derive(Clone, Debug)]
pub struct NodeText {
    pub text: String,
    /// Byte range of each operand.
    pub ins: Vec<Range<usize>>,
}

/// One op as text, without its note: `%y = dot[mk,kn->mn] %a, %b : f32[4,8]`. The node's values
/// must be values of the function.
pub fn node_text(mesh: &Mesh, f: &Func, n: &Node) -> NodeText {
    let mut t = NodeText { text: String::new(), ins: vec![] };
    let name = |v, out: &mut String| f.name(v).write(out);
    write_node(mesh, f, n, name, &mut t.text, |r| t.ins.push(r), &SourceMarks::default());
    t
}

fn write_node(
    mesh: &Mesh,
    f: &Func,
    n: &Node,
    name: impl Fn(Value, &mut String),
    out: &mut String,
    mut operand: impl FnMut(Range<usize>),
    marks: &SourceMarks,
) {
    for (i, &o) in n.outs.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        name(o, out);
    }
    out.push_str(" = ");
    n.op.write(mesh, out);
    if n.kept {
        // A collective names its axes.
        out.truncate(out.len() - 1);
        let _ = write!(out, "; {KEEP}]");
    }
    for (i, &v) in n.ins.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { " " });
        let start = out.len();
        name(v, out);
        operand(start..out.len());
    }
    out.push_str(" : ");
    for (i, &o) in n.outs.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write_type(mesh, f.ty(o), out);
        if let Some(a) = f.annotations.get(&o) {
            write_annotation(mesh, a, out);
        }
        marks.write_residual(o, out);
    }
}

/// The names of a function's values, written once: most are printed several times.
struct Names {
    text: String,
    ends: Vec<usize>,
}

impl Names {
    fn new(f: &Func) -> Names {
        let mut n = Names {
            text: String::with_capacity(f.values.len() * 12),
            ends: Vec::with_capacity(f.values.len()),
        };
        for v in &f.values {
            v.name.write(&mut n.text);
            n.ends.push(n.text.len());
        }
        n
    }
    fn get(&self, v: Value) -> &str {
        let i = v.0 as usize;
        &self.text[if i == 0 { 0 } else { self.ends[i - 1] }..self.ends[i]]
    }
}

pub(super) struct Printer<'a> {
    pub mesh: &'a Mesh,
    marks: SourceMarks<'a>,
    pub out: String,
    lines: Vec<Line>,
}

impl Printer<'_> {
    /// A new line begins here.
    fn line(&mut self, layer: u32) {
        let (start, fused) = (self.out.len(), FusedWithNext::No);
        self.lines.push(Line { start, layer, kind: None, fused });
    }

    pub fn line_of_no_layer(&mut self) {
        self.line(NO_LAYER);
    }

    fn mesh(&mut self) {
        self.line(NO_LAYER);
        self.out.push_str("mesh [");
        for (i, a) in self.mesh.axes.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { "" });
            self.out.push_str(&a.name);
            self.out.push('=');
            push_number(a.size, &mut self.out);
        }
        self.out.push_str("]\n");
    }

    fn func(&mut self, f: &Func) {
        let names = Names::new(f);
        self.line(NO_LAYER);
        self.out.push_str(if self.out.is_empty() { "" } else { "\n" });
        self.line(NO_LAYER);
        self.out.push_str("func @");
        self.out.push_str(&f.name);
        self.out.push('(');
        let short = f.args.len() <= SHORT && f.args.iter().all(|p| p.role.is_none());
        self.list(f, &f.args, short, "  ", |p, port| {
            p.out.push_str(names.get(port.value));
            p.out.push_str(": ");
            p.port(f, port);
            p.marks.write_weight(port.value, &mut p.out);
            if let Some(a) = f.annotations.get(&port.value) {
                write_annotation(p.mesh, a, &mut p.out);
            }
        });
        self.out.push_str(") -> ");
        let short = f.results.len() <= SHORT;
        match &f.results[..] {
            [one] if one.role.is_none() => self.port(f, one),
            all => {
                self.out.push('(');
                self.list(f, all, short, "  ", |p, port| {
                    if !short {
                        p.out.push_str(names.get(port.value));
                        p.out.push_str(": ");
                    }
                    p.port(f, port);
                });
                self.out.push(')');
            }
        }
        self.out.push_str(" {\n");
        self.body(f, &names);
        self.line(NO_LAYER);
        if short {
            self.out.push_str("  return");
            self.out.push_str(if f.results.is_empty() { "" } else { " " });
            self.list(f, &f.results, true, "", |p, port| p.out.push_str(names.get(port.value)));
            self.out.push('\n');
            self.line(NO_LAYER);
        }
        self.out.push_str("}\n");
    }

    fn body(&mut self, f: &Func, names: &Names) {
        let (mut place, mut layer) = ((Scope(0), 0, Part::Forward), NO_LAYER);
        for n in &f.nodes {
            let info = f.scope_info(n.scope);
            let now = (n.scope, info.stage, n.part);
            if now != place {
                place = now;
                layer = info.layer.unwrap_or(NO_LAYER);
                self.line(layer);
                self.out.push(' ');
                let plain = info.stage == 0 && n.part == Part::Forward;
                self.out.push_str(if info.path.is_empty() && !plain { "\"\"" } else { &info.path });
                if info.stage > 0 {
                    let _ = write!(self.out, " stage {}", info.stage);
                }
                if n.part != Part::Forward {
                    let _ = write!(self.out, " {}", n.part.name());
                }
                self.out.push_str(":\n");
            }
            self.lines.push(Line { start: self.out.len(), layer, kind: None, fused: n.fused });
            self.out.push_str("  ");
            let name = |v, out: &mut String| out.push_str(names.get(v));
            write_node(self.mesh, f, n, name, &mut self.out, |_| (), &self.marks);
            self.out.push_str(match n.fused {
                FusedWithNext::No => "",
                FusedWithNext::Kernel => " &",
                FusedWithNext::Launch => " &&",
            });
            if let Some(note) = n.note.as_deref().filter(|n| !n.is_empty()) {
                self.out.push_str("  // ");
                match note.contains(char::is_control) {
                    false => self.out.push_str(note),
                    true => self.out.push_str(&note.replace(char::is_control, " ")),
                }
            }
            self.out.push('\n');
        }
    }

    /// Items on this line, or each on its own.
    fn list(
        &mut self,
        f: &Func,
        ports: &[Port],
        short: bool,
        indent: &str,
        item: impl Fn(&mut Self, &Port),
    ) {
        let on_lines = !short && !ports.is_empty();
        self.out.push_str(if on_lines { "\n" } else { "" });
        for (i, p) in ports.iter().enumerate() {
            if on_lines {
                let layer = f.name(p.value).layer.unwrap_or(NO_LAYER);
                let kind = p.role.as_ref().map(|r| r.kind);
                let (start, fused) = (self.out.len(), FusedWithNext::No);
                self.lines.push(Line { start, layer, kind, fused });
                self.out.push_str(indent);
                item(self, p);
                self.out.push_str(",\n");
            } else {
                self.out.push_str(if i > 0 { ", " } else { "" });
                item(self, p);
            }
        }
        if on_lines {
            self.line(NO_LAYER);
        }
    }

    fn port(&mut self, f: &Func, p: &Port) {
        write_type(self.mesh, f.ty(p.value), &mut self.out);
        if let Some(r) = &p.role {
            self.out.push(' ');
            match r.kind {
                RoleKind::Input(own) if own != Input::named(&r.name) => {
                    let _ = write!(self.out, "input[{own}]");
                }
                RoleKind::GradFrom(_) | RoleKind::State(_) => {
                    let _ = write!(self.out, "{}", r.kind);
                }
                plain => self.out.push_str(plain.name()),
            }
            self.out.push(' ');
            write_quoted(&r.name, &mut self.out);
        }
    }
}
