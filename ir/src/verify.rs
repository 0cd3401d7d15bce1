//! Checks a module: every value defined once and before its uses, every type as its op's rule says,
//! values that pass from one function to the next of one type. All problems are found at once; a
//! problem that every layer has is told once.

mod between;
mod messages;
mod problems;
mod states;
mod written;

use crate::alike::{self, Alike};
use crate::diag::{Diag, Spot};
use crate::func::{Func, Module, Name, Node, Port, Role, RoleKind, Value, ValueMap};
use crate::group::{FusionBuilder, KERNEL_KINDS, launches};
use crate::infer::TypeError;
use crate::maps::{HashMap, HashSet};
use crate::mesh::{AtomSet, Mesh, PIPELINE};
use crate::ops::DOCS;
use crate::phase::Phase;
use crate::steps;
use crate::text::{MAX_DIMS, is_path, node_text, type_text};
use crate::types::{AtomList, DType, MAX_ELEMENTS, Type};
use problems::Problems;
use smallvec::SmallVec;
use std::collections::BTreeSet;

/// Most different problems that are told, and most that are looked at.
const MAX_TOLD: usize = 1000;
const MAX_FOUND: usize = 20_000;

/// Checks a whole module for a phase.
///
/// # Errors
/// All problems, in program order: `ssa` (a value undefined, defined twice), `name`, `arity`,
/// `mesh`, `size`, `phase` (a mark or collective too early), `mixed` (an axis with two states),
/// `result-type`, `role`, `overwritten` (by `accumulate`), and the codes of [`TypeError`].
pub fn verify(m: &Module, phase: Phase) -> Result<(), Vec<Diag>> {
    let mut p = Problems::default();
    let mut fed: HashMap<&Role, (&str, &Type)> = HashMap::default();
    // What one stage hands to another is made before it is used, wherever the function stands.
    for f in &m.funcs {
        for r in &f.results {
            let known = (r.value.0 as usize) < f.values.len();
            if let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Edge && known) {
                fed.insert(role, (&f.name, f.ty(r.value)));
            }
        }
    }
    for f in &m.funcs {
        let (made, root, over) = (f.per_value(Maker::None), f.identity(), f.per_value(false));
        let mut c = Checker { mesh: &m.mesh, f, phase, made, root, over, right: Alike::default() };
        if c.values(&mut p) {
            c.nodes(&mut p);
            c.roles(&mut fed, &mut p);
        }
    }
    if p.told.is_empty() {
        between::between(m, phase, &mut p);
        states::states(m, phase, &mut p);
    }
    p.finish()
}

/// What defines a value.
#[derive(Clone, Copy, PartialEq)]
enum Maker {
    None,
    Arg,
    Node(u32),
}

struct Checker<'a> {
    mesh: &'a Mesh,
    f: &'a Func,
    phase: Phase,
    made: ValueMap<Maker>,
    /// By value: the one whose memory it is, and by this whether it is written over.
    root: ValueMap<Value>,
    over: ValueMap<bool>,
    /// Nodes whose types are right. Those of most layers are like these.
    right: Alike<&'a Node>,
}

impl<'a> Checker<'a> {
    fn diag(&self, code: &'static str, message: String) -> Diag {
        Diag::new(code, message).at(format!("@{}", self.f.name))
    }

    /// A message about a node, with the line and carets below the operands named.
    fn at_node(&self, code: &'static str, n: &Node, operands: &[usize], message: String) -> Diag {
        let path = self.f.scopes.get(n.scope.0 as usize).map_or("", |s| &s.path);
        let t = node_text(self.mesh, self.f, n);
        let mut place = format!("@{}", self.f.name);
        if !path.is_empty() {
            place += &format!(", {path}");
        }
        place += &format!("\n\n{}\n", t.text);
        let mut at = 0;
        for r in operands.iter().filter_map(|&i| t.ins.get(i)) {
            place += &" ".repeat(r.start - at);
            place += &"^".repeat(r.len());
            at = r.end;
        }
        let d = Diag::new(code, message).at(place);
        match n.outs.first() {
            Some(&o) => d.of(self.spot(self.f.name(o))),
            None => d,
        }
    }

    /// Where a value is defined.
    fn spot(&self, name: &Name) -> Spot {
        Spot::Value { func: self.f.name.to_string(), value: name.to_string() }
    }

    /// A message about a value.
    fn at_value(&self, code: &'static str, name: &Name, message: String) -> Diag {
        self.diag(code, message).of(self.spot(name))
    }

    fn type_of(&self, v: Value) -> String {
        type_text(self.mesh, self.f.ty(v))
    }

    /// Checks that all indices exist, and every value alone. False if nothing more can be asked.
    fn values(&mut self, p: &mut Problems) -> bool {
        let f = self.f;
        let known = |v: &Value| (v.0 as usize) < f.values.len();
        let ports = f.args.iter().chain(&f.results).map(|p| &p.value);
        let mut used = ports.chain(f.nodes.iter().flat_map(|n| n.ins.iter().chain(&n.outs)));
        let scopes = f.nodes.iter().all(|n| (n.scope.0 as usize) < f.scopes.len());
        if !used.all(known) || !scopes {
            let m = "a value or a scope is used that the function does not have".to_string();
            p.push(None, || {
                self.diag("ssa", m).help(format!("use one of its {} values", f.values.len()))
            });
            return false;
        }
        let all = self.mesh.all();
        if f.values.iter().any(|v| !v.ty.marked().within(all)) {
            let m = "a type names a part of an axis that the mesh does not have".to_string();
            p.push(None, || {
                self.diag("mesh", m).help(format!("the mesh has {} parts of axes", all.len()))
            });
            return false;
        }
        let pipeline = self.mesh.axis(PIPELINE).unwrap_or_default();
        let mut names = HashSet::with_capacity_and_hasher(f.values.len(), Default::default());
        for v in &f.values {
            if !names.insert(&v.name) {
                p.push(v.name.layer, || {
                    self.diag("ssa", format!("two values are called `{}`", v.name))
                        .rule("the names of a function's values differ")
                        .help(format!("call one of them `{}.{}`", v.name, v.name.dup + 1))
                });
            }
            if !v.name.is_readable() {
                p.push(v.name.layer, || {
                    self.diag("name", format!("`{}` does not read back as the name it is", v.name))
                        .rule(
                            "a name is [d_][lN.]word[.N], its word of letters, digits, `_` and `.`",
                        )
                        .help("call it `%x`, or put its prefixes into the fields they belong to")
                });
            }
            self.alone(&v.name, &v.ty, p);
            if v.ty.marked().minus(v.ty.sum).meets(pipeline) {
                p.push(v.name.layer, || {
                    let ty = type_text(self.mesh, &v.ty);
                    self.diag("pipeline-axis", format!("`{}` is {ty}", v.name))
                        .rule(format!(
                            "{PIPELINE} splits the model into stages; a type names it only as +{PIPELINE}"
                        ))
                        .help(format!("take {PIPELINE} out of the type, or split over 1 other axis"))
                });
            }
        }
        steps::add("scopes", f.scopes.len());
        for s in f.scopes.iter().filter(|s| !is_path(&s.path)) {
            p.push(s.layer, || {
                self.diag("name", format!("`{}` is not a scope path", s.path.escape_debug()))
                    .help("use letters, digits, `.` and `_`, for example `model.layers.0`")
            });
        }
        for (v, a) in &f.annotations {
            let rank = f.values.get(v.0 as usize).map_or(0, |v| v.ty.rank());
            let fits = a.dims.iter().all(|d| d.atoms.set().within(all));
            if a.dims.len() != rank || !fits {
                p.push(None, || {
                    let m = format!(
                        "a sharding of {} dims is asked of a value of {rank}",
                        a.dims.len()
                    );
                    self.diag("arity", m).help(format!("name {rank} dims over the mesh's axes"))
                });
                return false;
            }
            let of_dims = || a.dims.iter().map(|d| d.atoms.set());
            let all = of_dims().fold(AtomSet::EMPTY, AtomSet::union);
            if self.phase == Phase::Source && of_dims().map(AtomSet::len).sum::<usize>() > all.len()
            {
                let name = f.name(*v);
                p.push(name.layer, || {
                    let m = "an axis splits two dims of one tensor".to_string();
                    self.at_value("mixed", name, m).help("use each axis once")
                });
            }
        }
        true
    }

    /// Checks one type by itself.
    fn alone(&self, name: &Name, ty: &Type, p: &mut Problems) {
        if let Some(a) = ty.clash() {
            p.push(name.layer, || {
                let axis = self.mesh.names(AtomSet::one(a), "*");
                let m =
                    format!("`{name}` has two states over {axis}: {}", type_text(self.mesh, ty));
                self.at_value("mixed", name, m)
                    .rule("over each axis a value is in one state")
                    .help(format!("name {axis} once in its type"))
            });
        }
        if self.phase == Phase::Source && !ty.marked().is_empty() {
            p.push(name.layer, || {
                let m =
                    format!("`{name}` is {}, but nothing is sharded yet", type_text(self.mesh, ty));
                self.at_value("phase", name, m).rule("a source program is for one device").help(
                    format!(
                        "declare `{}`, and ask for shardings with `@(…)`",
                        type_text(self.mesh, &erased(ty))
                    ),
                )
            });
        }
        let elements = ty.dims.iter().fold(1usize, |n, d| n.saturating_mul(d.size.max(1)));
        if elements > MAX_ELEMENTS || ty.rank() > MAX_DIMS {
            p.push(name.layer, || {
                self.at_value(
                    "size",
                    name,
                    format!("`{name}` is too large: {}", type_text(self.mesh, ty)),
                )
                .rule(format!("dims <= {MAX_DIMS}, elements <= {MAX_ELEMENTS}"))
                .help(format!("use at most {MAX_ELEMENTS} elements"))
            });
        }
    }

    /// Nodes that are marked as one launch are one kernel.
    fn launches(&self, p: &mut Problems) {
        let f = self.f;
        let mut found = FusionBuilder::of(f);
        for x in launches(f).iter().filter(|x| x.nodes.len() > 1) {
            if x.has_form(&mut found) {
                continue;
            }
            let nodes = &f.nodes[x.nodes.clone()];
            let names: Vec<&str> = nodes.iter().map(|n| n.op.mnemonic()).collect();
            p.push(self.layer(&nodes[0]), || {
                let m = format!("no kernel does {} in one launch", names.join(", "));
                self.at_node("plan", &nodes[0], &[], m)
                    .rule(KERNEL_KINDS)
                    .help("leave out the & of 1 of them, or recompile the plan")
            });
        }
    }

    fn nodes(&mut self, p: &mut Problems) {
        let f = self.f;
        for a in &f.args {
            self.define(a.value, Maker::Arg, p);
        }
        // Before ranks have programs, marks do not fit together yet: sizes only.
        let marks = !self.phase.is_of_ranks() && f.values.iter().any(|v| !v.ty.marked().is_empty());
        let plain: Vec<Type> = match marks {
            true => f.values.iter().map(|v| erased(&v.ty)).collect(),
            false => vec![],
        };
        for (i, n) in f.nodes.iter().enumerate() {
            for (k, v) in n.ins.iter().enumerate() {
                if self.made[v] == Maker::None {
                    p.push(self.layer(n), || {
                        let m = format!("`{}` is used before it is defined", f.name(*v));
                        self.at_node("ssa", n, &[k], m)
                            .rule("a value is defined once, above its uses")
                            .help("define it above, or make it an argument")
                    });
                }
            }
            self.written(n, p);
            for &o in &n.outs {
                self.define(o, Maker::Node(i as u32), p);
            }
            let bad_note = |t: &str| t.is_empty() || t.trim() != t || t.contains(char::is_control);
            if n.note.as_deref().is_some_and(bad_note) {
                p.push(self.layer(n), || {
                    self.at_node("name", n, &[], "a note that does not read back as it is".into())
                        .help("write one line, without spaces around it")
                });
            }
            self.node(n, &plain, p);
        }
        for r in &f.results {
            self.returned(r.value, p);
            if self.made[r.value] == Maker::None {
                p.push(None, || {
                    self.diag("ssa", format!("`{}` is returned but never defined", f.name(r.value)))
                        .help("define it, or take it off the results")
                });
            }
        }
        // Kinds of operands are told apart: of nodes that are wrong themselves nothing can be said.
        if self.phase.is_of_ranks() && p.told.is_empty() {
            self.launches(p);
        }
    }

    fn define(&mut self, v: Value, by: Maker, p: &mut Problems) {
        let made = &mut self.made[v];
        if *made != Maker::None {
            p.push(self.f.name(v).layer, || {
                self.diag("ssa", format!("`{}` is defined a second time", self.f.name(v)))
                    .rule("a value is defined once, above its uses")
                    .help("give the second a name of its own")
            });
            return;
        }
        *made = by;
    }

    fn layer(&self, n: &Node) -> Option<u32> {
        self.f.scope_info(n.scope).layer.or_else(|| self.f.name(*n.outs.first()?).layer)
    }

    /// Types of one op's results.
    fn node(&mut self, n: &'a Node, plain: &[Type], p: &mut Problems) {
        let f = self.f;
        let ty = |v: &Value| plain.get(v.0 as usize).unwrap_or_else(|| f.ty(*v));
        let same = |a: &[Value], b: &[Value]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| ty(a) == ty(b))
        };
        let is_like = |x: &&Node| x.op == n.op && same(&x.ins, &n.ins) && same(&x.outs, &n.outs);
        let key = alike::key(std::iter::once(&n.op), n.ins.iter().chain(&n.outs).map(ty));
        if self.right.find(key, is_like).is_some() {
            return;
        }
        let ins: SmallVec<[&Type; 8]> = n.ins.iter().map(ty).collect();
        let outs: SmallVec<[&Type; 4]> = n.outs.iter().map(ty).collect();
        if n.op.layout().is_some() && !self.phase.is_of_ranks() {
            return self.early_collective(n, &ins, &outs, p);
        }
        let declared: SmallVec<[Option<&Type>; 4]> = outs.iter().map(|&t| Some(t)).collect();
        let made = match n.op.check(self.mesh, &ins, &declared) {
            Ok(made) => made,
            Err(e) => return p.push(self.layer(n), || self.type_error(n, &e)),
        };
        if made.len() != n.outs.len() {
            return p.push(self.layer(n), || {
                let m = format!(
                    "`{}` has {} results, {} are named",
                    n.op.mnemonic(),
                    made.len(),
                    n.outs.len()
                );
                self.at_node("arity", n, &[], m)
                    .help(format!("name {} values before `=`", made.len()))
            });
        }
        let mut right = true;
        for ((t, o), own) in made.iter().zip(&n.outs).zip(outs) {
            if t != own {
                right = false;
                p.push(self.layer(n), || self.wrong_result(n, *o, t, own));
            }
        }
        if right {
            self.right.add(key, n);
        }
    }

    /// The dims that an input speaks of are there.
    fn input(&self, a: &Port, p: &mut Problems) {
        let (Some(own), rank) = (a.input(), self.f.ty(a.value).rank()) else { return };
        let least = usize::from(own.batch);
        if rank < least || own.tokens().is_some_and(|d| d < least || d >= rank) {
            let name = self.f.name(a.value);
            p.push(name.layer, || {
                let m = format!("`{name}` is input[{own}] and has {rank} dims");
                self.at_value("role", name, m)
                    .rule("the dim of tokens is there, and behind dim 0 if that is rows")
                    .help("say `batch` if dim 0 is rows, and `seq=D` if dim D is tokens")
            });
        }
    }

    /// A result and the later arguments it feeds have one type.
    fn roles(&self, fed: &mut HashMap<&'a Role, (&'a str, &'a Type)>, p: &mut Problems) {
        for a in &self.f.args {
            let Some(role) = &a.role else { continue };
            self.input(a, p);
            let Some(&(from, ty)) = fed.get(role) else { continue };
            let own = self.f.ty(a.value);
            let same = match self.phase {
                Phase::Sharded => erased(ty) == erased(own),
                _exact => ty == own,
            };
            if !same {
                let name = self.f.name(a.value);
                p.push(name.layer, || {
                    let (ty, own) = (type_text(self.mesh, ty), type_text(self.mesh, own));
                    let m = format!("`{name}` is {own}, but @{from} makes it {ty}");
                    self.diag("role", m)
                        .rule(format!("{role} has one type everywhere"))
                        .help(format!("declare the argument `{ty}`"))
                });
            }
        }
        let mut own = HashSet::default();
        for r in &self.f.results {
            let Some(role) = &r.role else { continue };
            // Before stages are cut apart, each has a gradient of a parameter that several use.
            let stage = match (self.phase, self.made[r.value]) {
                (Phase::Differentiated, Maker::Node(n)) if role.kind == RoleKind::Grad => {
                    self.f.stage_of(&self.f.nodes[n as usize])
                }
                _one_of_all => 0,
            };
            if !own.insert((stage, role)) {
                let name = self.f.name(r.value);
                p.push(name.layer, || {
                    let m = format!("`{name}` is the second result that is {role}");
                    self.diag("role", m)
                        .rule("the results of a function have different roles")
                        .help("add the two, or return one of them")
                });
            }
            fed.insert(role, (&self.f.name, self.f.ty(r.value)));
        }
    }
}

/// The type on one device.
fn erased(t: &Type) -> Type {
    let mut plain = Type::new(t.dtype, &[]);
    plain.dims = t.dims.clone();
    plain.dims.iter_mut().for_each(|d| d.atoms = AtomList::EMPTY);
    plain
}

/// The op that turns one type into another, if one does.
fn bridge(mesh: &Mesh, from: &Type, to: &Type) -> Option<String> {
    if from.sizes() != to.sizes() {
        return None;
    }
    if from.dtype != to.dtype {
        return (to.dtype != DType::I32).then(|| format!("cast[{}]", to.dtype.name()));
    }
    let name = |s: AtomSet| mesh.names(s, "*");
    let dim =
        |t: &Type, s: AtomSet| t.dims.iter().position(|d| d.atoms.set().meets(s)).unwrap_or(0);
    let summed = from.partial().minus(to.partial());
    let scattered = summed.and(to.sharded());
    let gathered = from.sharded().minus(to.sharded());
    let sliced = to.sharded().minus(from.marked().minus(from.replicated));
    let fanned = to.replicated.minus(from.marked());
    if !scattered.is_empty() {
        Some(format!("reduce_scatter[{}; dim={}]", name(scattered), dim(to, scattered)))
    } else if !summed.is_empty() {
        Some(format!("all_reduce[{}]", name(summed)))
    } else if !gathered.is_empty() {
        Some(format!("all_gather[{}; dim={}]", name(gathered), dim(from, gathered)))
    } else if !sliced.is_empty() {
        Some(format!("slice[{}; dim={}]", name(sliced), dim(to, sliced)))
    } else if !fanned.is_empty() {
        Some(format!("fan_out[{}]", name(fanned)))
    } else {
        None
    }
}
