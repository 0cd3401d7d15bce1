//! What every microbatch would make alike is made once per step, in `@step_prologue`.
//!
//! ```text
//! Before:  @forward:   %angle = mul[s,r->sr] %position, %inv_freq : f32[32,16]
//!                      %cos = cos %angle : f32[32,16]
//!                      return %cos stash "cos", …
//!          @backward(%cos: f32[32,16] stash "cos", …)
//! After:   @step_prologue:     %cos = cos %angle : f32[32,16]
//!                      return %cos step "cos of every microbatch", …
//!          @forward(%cos: f32[32,16] step "cos of every microbatch", …)
//!          @backward(%cos: f32[32,16] step "cos of every microbatch", …)
//! ```
//! Assumes: the functions of a rank of the pipeline, in the order in which they feed each other.
//!
//! Alike is what follows from numbers that the program has and from inputs without rows, such as
//! `positions`. What depends on parameters stays where it is: ZeRO gathers them for one microbatch so that
//! they need no memory between two. Of the rest only what is in memory anyway is kept for the step: what
//! backward takes from forward, of which there was one for each microbatch in flight; what several nodes
//! read; and what is made several times, if it is no larger than what it is made of. A mask that one kernel
//! makes while it uses it is no table. Whole numbers stay too: what they index is checked at the inputs,
//! which are followed within a function.

use crate::autodiff::split::drop_unused_args;
use shardc_ir::func::{Fill, Func, Name, Node, Patch, Port, Role, RoleKind, Value, ValueMap};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::ops::Op;
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of something that is the same for all microbatches.
type Key = usize;

/// How it is made.
enum Maker {
    Input(Role),
    Node { node: Box<Node>, ins: SmallVec<[Key; 4]>, scope: Arc<str> },
}

/// Something that is the same for all microbatches.
struct Alike {
    maker: Maker,
    ty: Type,
    name: Name,
}

/// What `@step_prologue` makes once for all microbatches of a rank of the pipeline.
#[derive(Default)]
pub struct Once {
    /// All that is alike; what one is made of stands before it.
    all: Vec<Alike>,
    /// What is kept for the step, and its role.
    tables: BTreeMap<Key, Role>,
}

/// Takes what all microbatches make alike out of the functions that a rank of the pipeline runs for each.
pub fn once(loops: &mut [Func]) -> Once {
    let mut out = Once::default();
    let keys = numbered(loops, &mut out.all);
    let mut names: HashSet<String> = HashSet::default();
    for (f, keys) in loops.iter().zip(&keys) {
        for key in tables(f, keys, |_, found| found.is_kept()) {
            if out.tables.contains_key(&key) {
                continue;
            }
            let text = out.all[key].name.to_string();
            let mut name = format!("{} of every microbatch", &text[1..]);
            let mut n = 1;
            while !names.insert(name.clone()) {
                n += 1;
                name = format!("{} ({n}) of every microbatch", &text[1..]);
            }
            out.tables.insert(key, Role::new(RoleKind::Step, name));
        }
    }
    if !out.tables.is_empty() {
        for (f, keys) in loops.iter_mut().zip(&keys) {
            let own = tables(f, keys, |key, _| out.tables.contains_key(&key));
            take(f, keys, &own, &out.tables);
        }
    }
    // Of some only others are made.
    let taken: HashSet<&Role> =
        loops.iter().flat_map(|f| f.args.iter().filter_map(|a| a.role.as_ref())).collect();
    out.tables.retain(|_, role| taken.contains(role));
    out
}

impl Once {
    /// Appends what makes the tables to a function.
    pub fn make(&self, f: &mut Func) {
        let mut needed: Vec<bool> = vec![false; self.all.len()];
        self.tables.keys().for_each(|&k| needed[k] = true);
        for (k, alike) in self.all.iter().enumerate().rev() {
            if let Maker::Node { ins, .. } = &alike.maker
                && needed[k]
            {
                ins.iter().for_each(|&i| needed[i] = true);
            }
        }
        let mut values: Vec<Option<Value>> = vec![None; self.all.len()];
        for (k, alike) in self.all.iter().enumerate().filter(|x| needed[x.0]) {
            let (ty, name) = (alike.ty.clone(), alike.name.clone());
            values[k] = Some(match &alike.maker {
                Maker::Input(role) => f.arg(ty, name, Some(role.clone())),
                Maker::Node { node, ins, scope } => {
                    let scope = f.scope(scope);
                    let out = f.value(ty, name);
                    let made = |i: &Key| values[*i].expect("what it is made of stands before it");
                    let ins: Vec<Value> = ins.iter().map(made).collect();
                    let (note, kept) = (node.note.clone(), node.kept);
                    let new = Node::new(node.op.clone(), &ins, &[out], scope);
                    f.nodes.push(Node { note, kept, ..new });
                    out
                }
            });
        }
        for (&k, role) in &self.tables {
            let value = values[k].expect("a table is needed");
            f.results.push(Port { value, role: Some(role.clone()) });
        }
    }
}

/// Of each function, the number of each value that is the same for all microbatches.
fn numbered(loops: &[Func], all: &mut Vec<Alike>) -> Vec<ValueMap<Option<Key>>> {
    let mut inputs: HashMap<Role, Key> = HashMap::default();
    let mut made: HashMap<(&str, SmallVec<[Key; 4]>), Vec<Key>> = HashMap::default();
    // By role, what a function hands to a later one; none if two do not make the same of it.
    let mut handed: HashMap<&Role, Option<Key>> = HashMap::default();
    let mut out = vec![];
    for f in loops {
        let mut keys: ValueMap<Option<Key>> = f.per_value(None);
        for a in &f.args {
            let Some(role) = &a.role else { continue };
            keys[a.value] = match role.kind {
                // Labels are also counted in `@step_prologue`.
                RoleKind::Input(i) if !i.batch && i.fill != Fill::Labels => {
                    let ty = f.ty(a.value);
                    let key = *inputs.entry(role.clone()).or_insert_with(|| {
                        let (ty, name) = (ty.clone(), f.name(a.value).clone());
                        all.push(Alike { maker: Maker::Input(role.clone()), ty, name });
                        all.len() - 1
                    });
                    Some(key).filter(|&k| all[k].ty == *ty)
                }
                RoleKind::Stash => handed.get(role).copied().flatten(),
                _differs => None,
            };
        }
        // What goes elsewhere than to a later function of the rank is made where it is.
        let stays = |r: &&Port| r.role.as_ref().is_none_or(|r| r.kind != RoleKind::Stash);
        let shown: HashSet<Value> = f.results.iter().filter(stays).map(|r| r.value).collect();
        for n in &f.nodes {
            let [out] = n.outs[..] else { continue };
            let ins: Option<SmallVec<[Key; 4]>> = n.ins.iter().map(|v| keys[v]).collect();
            let Some(ins) = ins.filter(|_| !shown.contains(&out)) else { continue };
            let same = made.entry((n.op.mnemonic(), ins.clone())).or_default();
            let is = |k: &&Key| !n.kept && all[**k].is_made_by(&n.op, f.ty(out));
            let known = same.iter().find(is).copied();
            let key = known.unwrap_or_else(|| {
                let scope = f.scope_info(n.scope).path.clone();
                let maker = Maker::Node { node: Box::new(n.clone()), ins, scope };
                all.push(Alike { maker, ty: f.ty(out).clone(), name: f.name(out).clone() });
                same.push(all.len() - 1);
                all.len() - 1
            });
            // Of several layers it is none's.
            let layer = f.name(out).layer;
            let name = &mut all[key].name;
            name.layer = name.layer.filter(|_| name.layer == layer);
            keys[out] = Some(key);
        }
        for r in &f.results {
            let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Stash) else {
                continue;
            };
            let key = keys[r.value];
            handed.entry(role).and_modify(|k| *k = k.filter(|_| *k == key)).or_insert(key);
        }
        out.push(keys);
    }
    out
}

impl Alike {
    fn is_made_by(&self, op: &Op, ty: &Type) -> bool {
        matches!(&self.maker, Maker::Node { node, .. } if node.op == *op && !node.kept)
            && self.ty == *ty
    }
}

/// How a function makes and uses something.
#[derive(Clone, Copy, Default)]
struct InvariantUse {
    /// Nodes that read it.
    readers: usize,
    /// It is handed to another function.
    saved: bool,
    /// Nodes that make the same.
    copies: usize,
    /// Elements of its largest operand, and its own; none without operands.
    sizes: Option<[usize; 2]>,
}

impl InvariantUse {
    /// True if it, or something as large, is in memory anyway while a microbatch runs.
    fn is_kept(self) -> bool {
        let several = |[of, own]: [usize; 2]| self.readers > 1 || self.copies > 1 && own <= of;
        self.saved || self.sizes.is_some_and(several)
    }
}

/// What a function would take from `@step_prologue`, if `is_table` says so of it: what is alike and read by what is
/// not. Views, which cost nothing, stay.
fn tables(
    f: &Func,
    keys: &ValueMap<Option<Key>>,
    is_table: impl Fn(Key, InvariantUse) -> bool,
) -> Vec<Key> {
    let mut uses = f.per_value(InvariantUse::default());
    let mut copies: HashMap<Key, usize> = HashMap::default();
    for key in f.nodes.iter().flat_map(|n| &n.outs).filter_map(|o| keys[o]) {
        *copies.entry(key).or_default() += 1;
    }
    let elements = |v: &Value| f.ty(*v).elements();
    let mut out = vec![];
    for r in &f.results {
        uses[r.value].saved = true;
    }
    for n in f.nodes.iter().rev() {
        if let [made] = n.outs[..]
            && let Some(key) = keys[made]
        {
            let sizes = n.ins.iter().map(elements).max().map(|of| [of, elements(&made)]);
            let found = InvariantUse { copies: copies[&key], sizes, ..uses[made] };
            let is_used = found.saved || found.readers > 0;
            if !is_used {
                continue;
            }
            let may = f.ty(made).dtype.is_float() && !n.op.def().is_view();
            if may && is_table(key, found) {
                out.push(key);
                continue;
            }
            if n.op.def().is_view() {
                let of = &mut uses[n.ins[0]];
                (of.readers, of.saved) = (of.readers + found.readers, of.saved | found.saved);
                continue;
            }
        }
        n.ins.iter().for_each(|v| uses[v].readers += 1);
    }
    out
}

/// Makes arguments of what a function makes, or has from another function, if `@step_prologue` makes it.
fn take(f: &mut Func, keys: &ValueMap<Option<Key>>, own: &[Key], roles: &BTreeMap<Key, Role>) {
    let key = |v: Value| keys[v].filter(|k| roles.contains_key(k));
    let own: HashSet<Key> = own.iter().copied().collect();
    // What stands for each value: one argument for all that are the same.
    let mut patch = Patch::of(f);
    let mut args: HashMap<Key, Value> = HashMap::default();
    f.args.retain_mut(|a| {
        let is_stash = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
        let Some(key) = key(a.value).filter(|_| is_stash) else { return true };
        a.role = Some(roles[&key].clone());
        let first = *args.entry(key).or_insert(a.value);
        patch.replace(a.value, first);
        first == a.value
    });
    let mut new = vec![];
    for (i, n) in f.nodes.iter().enumerate() {
        let [out] = n.outs[..] else { continue };
        let Some(key) = key(out).filter(|k| own.contains(k)) else { continue };
        let first = *args.entry(key).or_insert_with(|| {
            new.push(Port { value: out, role: Some(roles[&key].clone()) });
            out
        });
        patch.replace(out, first);
        patch.erase(i);
    }
    f.args.extend(new);
    let handed = |r: &Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
    f.results.retain(|r| !(handed(r) && key(r.value).is_some()));
    patch.apply(f);
    f.drop_dead();
    drop_unused_args(f);
}
