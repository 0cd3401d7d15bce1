//! A function of a plan as Python: a function per distinct layer, and one that calls them.

use super::layers::{Stretch, stretches};
use super::layout::Layouts;
use super::names::{Words, key, pattern, relative};
use super::ops::{self, Refused, Site};
use super::seen::{KEPT, Seen};
use super::write::{Lines, comment};
use shardc_ir::func::{Func, RoleKind, Value};
use shardc_ir::plan::Plan;
use shardc_ir::text::type_text;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Most arguments of a call that Python passes one by one: of more it makes a tuple, which has them until the call ends.
const MOST_ARGUMENTS: usize = 30;

/// Writes the functions of a plan.
pub(super) struct Writer<'a> {
    plan: &'a Plan,
    pub layouts: Layouts<'a>,
    /// Names of functions of layers, by what stands in them.
    layers: BTreeMap<String, String>,
    /// Their texts, in the order in which they are met.
    pub texts: Vec<String>,
    /// What is not written.
    pub refused: BTreeSet<Refused>,
}

impl<'a> Writer<'a> {
    pub fn new(plan: &'a Plan) -> Writer<'a> {
        Writer {
            plan,
            layouts: Layouts::new(&plan.module.mesh),
            layers: BTreeMap::new(),
            texts: vec![],
            refused: BTreeSet::new(),
        }
    }

    /// Writes a function, behind the functions of its layers that are not yet there.
    pub fn function(&mut self, seen: &Seen<'a>) {
        let f = seen.f;
        let name = f.name.replace('.', "_");
        let mut out = Lines::default();
        out.push(0, &format!("def {name}(v):"));
        let mut words = Words::new(["v", "i"]);
        let mut scope = None;
        // Values that are in `v`: others are names of Python.
        let mut inside: BTreeSet<Value> = f.args.iter().map(|a| a.value).collect();
        let kept = f.results.iter().map(|r| seen.same[r.value]);
        inside.extend(kept.filter(|v| seen.last[*v] == KEPT));
        let all = stretches(seen, &self.plan.module.mesh);
        for s in &all {
            if let Stretch::Layers { first, lines, count } = *s {
                let units = first..first + lines * count;
                inside.extend(seen.reads(units.clone()));
                inside.extend(seen.lines[units].iter().flat_map(|l| l.outs.iter().copied()));
            }
        }
        let mut waits = Waits::default();
        for s in all {
            match s {
                Stretch::Plain(range) => {
                    self.plain(seen, range, &inside, (&mut words, &mut scope, &mut waits), &mut out)
                }
                Stretch::Layers { first, lines, count } => {
                    for v in seen.reads(first..first + lines * count) {
                        waits.before(v, &mut out);
                    }
                    self.units(seen, (first, lines, count), &mut out);
                    scope = None;
                }
            }
        }
        waits.all(&mut out);
        if out.len() == 1 {
            out.push(1, "pass");
        }
        self.texts.push(out.text());
    }

    /// Lines that belong to no layer that repeats.
    fn plain(
        &mut self,
        seen: &Seen<'a>,
        range: Range<usize>,
        inside: &BTreeSet<Value>,
        (words, scope, waits): (&mut Words, &mut Option<String>, &mut Waits),
        out: &mut Lines,
    ) {
        let f = seen.f;
        let mut spelled = |v: Value| match inside.contains(&v) {
            true => format!("v[{}]", key(f, v)),
            false => words.of(f, v, None),
        };
        for at in range {
            self.line(seen, at, (&mut spelled, None, scope), waits, out);
            let unread = seen.own(at).filter(|o| seen.first[*o] == KEPT && seen.last[*o] == 0);
            let dead = seen.dying(at).into_iter().chain(unread);
            let dead: Vec<String> = dead.filter(|v| !seen.small[*v]).map(&mut spelled).collect();
            if !dead.is_empty() && at + 1 < seen.lines.len() {
                waits.settle(&dead, out);
                out.code(1, &format!("del {}", dead.join(", ")));
            }
        }
    }

    /// A line, behind those that wait for what it reads.
    fn line(
        &mut self,
        seen: &Seen<'a>,
        at: usize,
        (spelled, base, scope): (&mut dyn FnMut(Value) -> String, Option<u32>, &mut Option<String>),
        waits: &mut Waits,
        out: &mut Lines,
    ) {
        let (f, l) = (seen.f, &seen.lines[at]);
        let n = l.n;
        let path = relative(&f.scope_info(n.scope).path, base);
        if scope.as_ref() != Some(&path) {
            if !path.is_empty() {
                out.push(1, &format!("# {}", comment(&path)));
            }
            *scope = Some(path);
        }
        l.ins.iter().for_each(|v| waits.before(*v, out));
        let x: Vec<String> = l.ins.iter().map(|v| spelled(*v)).collect();
        let plan = self.plan;
        let origin = |v: Value| origin(plan, f, v, 0);
        let over = seen.own(at).next().is_none();
        let layouts = &mut self.layouts;
        let made = match l.call {
            Some(call) => {
                let out = f.ty(call.outs[0]);
                let last = out.rank().checked_sub(1);
                let start = last.filter(|_| call.has_start()).map(|d| layouts.start(out, d));
                Ok(call.text(&x, &start.unwrap_or_default(), l.over))
            }
            None => {
                let (dead, spent) = (l.over, l.spent);
                let x = &x;
                ops::expression(&mut Site { f, n, x, layouts, over, dead, spent, origin: &origin })
            }
        };
        let made = match made {
            Ok(made) => made,
            Err(refused) => {
                self.refused.insert(refused);
                return;
            }
        };
        let outs: Vec<String> = seen.own(at).map(&mut *spelled).collect();
        if outs.is_empty() {
            return out.code(1, &made);
        }
        let types: Vec<String> =
            l.outs.iter().map(|v| type_text(&self.plan.module.mesh, f.ty(*v))).collect();
        let note = types.join(", ");
        // An exchange goes on beside what does not read its result.
        if seen.goes_on(at).is_some() {
            let made = format!("{}, wait=False)", made.strip_suffix(')').unwrap_or(&made));
            out.assign(1, &outs[0], &made, &note);
            waits.add(l.outs.clone(), outs);
        } else {
            out.assign(1, &outs.join(", "), &made, &note);
        }
    }

    /// Calls of units that are alike but for the numbers of their layers.
    fn units(
        &mut self,
        seen: &Seen<'a>,
        (first, lines, count): (usize, usize, usize),
        out: &mut Lines,
    ) {
        let f = seen.f;
        let unit = |k: usize| first + k * lines..first + (k + 1) * lines;
        // Where results stand that are read behind any of the units.
        let mut places: Vec<(usize, usize)> = vec![];
        for k in 0..count {
            for (t, l) in seen.lines[unit(k)].iter().enumerate() {
                for (o, v) in l.outs.iter().enumerate() {
                    let own = seen.same[*v] == *v;
                    if seen.last[*v] >= unit(k).end && own && !places.contains(&(t, o)) {
                        places.push((t, o));
                    }
                }
            }
        }
        places.sort_unstable();
        let all = first..first + lines * count;
        let reads: Vec<Vec<Value>> = (0..count).map(|k| seen.reads(unit(k))).collect();
        // What several units read is called by its own name, and dropped behind all of them.
        let own: Vec<Value> = seen.reads(all.clone());
        let units = |v: &Value| reads.iter().filter(|r| r.contains(v)).count();
        let common: BTreeSet<Value> = own.into_iter().filter(|v| units(v) > 1).collect();
        let pops = |v: Value, k: usize| seen.last[v] < unit(k).end && !common.contains(&v);
        // Arguments that some unit is the last to read.
        let popped: BTreeSet<usize> = (0..count)
            .flat_map(|k| {
                let own = reads[k].iter().enumerate();
                own.filter(|(_, v)| pops(**v, k)).map(|x| x.0).collect::<Vec<_>>()
            })
            .collect();
        // Names are those of the second one, in which what comes from the layer before is called so.
        self.layer(seen, unit(1), &places, &popped);
        // By unit its call, and the number of its layer.
        let mut calls: Vec<Call> = vec![];
        for (k, ins) in reads.iter().enumerate() {
            let base = base(seen, unit(k));
            let name = self.layer(seen, unit(k), &places, &popped);
            let text = |base: Option<u32>| {
                let base = |v: Value| if common.contains(&v) { None } else { base };
                let at = |v: Value| pattern(f, v, base(v));
                let ins = ins.iter().copied().map(|v| match pops(v, k) {
                    true => format!("v.pop({})", at(v)),
                    false => format!("v[{}]", at(v)),
                });
                let mut unread = false;
                let outs: Vec<String> = places
                    .iter()
                    .map(|&(t, o)| {
                        let v = seen.lines[unit(k).start + t].outs[o];
                        let read = seen.last[v] >= unit(k).end;
                        unread |= !read;
                        if read { format!("v[{}]", at(v)) } else { "_".into() }
                    })
                    .collect();
                let ins = ins.collect::<Vec<_>>();
                let call = match ins.len() > MOST_ARGUMENTS {
                    true => format!("{name}([{}])", ins.join(", ")),
                    false => format!("{name}({})", ins.join(", ")),
                };
                let comma = if outs.len() == 1 { "," } else { "" };
                let text = match outs.is_empty() {
                    true => call,
                    false => format!("{}{comma} = {call}", outs.join(", ")),
                };
                if unread { text + "\ndel _" } else { text }
            };
            let layer = i64::from(base.unwrap_or(0));
            calls.push(Call { pattern: text(base), alone: text(None), layer });
        }
        loops(&calls, out);
        let ends = common.iter().filter(|v| seen.last[**v] < all.end);
        let dead: Vec<String> = ends.map(|v| format!("v[{}]", key(f, *v))).collect();
        if !dead.is_empty() {
            out.code(1, &format!("del {}", dead.join(", ")));
        }
    }

    /// The function of a layer; a new one, if none is like it.
    fn layer(
        &mut self,
        seen: &Seen<'a>,
        unit: Range<usize>,
        places: &[(usize, usize)],
        pops: &BTreeSet<usize>,
    ) -> String {
        // Names are not compared.
        let (_, alike) = self.text(seen, unit.clone(), places, pops, Words::numbers());
        if let Some(known) = self.layers.get(&alike) {
            return known.clone();
        }
        let (ins, text) = self.text(seen, unit.clone(), places, pops, Words::new(["args"]));
        let plain = format!("{}_layer", seen.f.kind.name());
        let taken = |n: &String| self.layers.values().any(|l| l == n);
        let number = |k: usize| if k == 0 { plain.clone() } else { format!("{plain}_{k}") };
        let name = (0..).map(number).find(|n| !taken(n)).expect("there are more numbers");
        let mut head = Lines::default();
        if ins.len() > MOST_ARGUMENTS {
            head.push(0, &format!("def {name}(args):"));
            head.push(1, "# A list, since Python keeps so many arguments until a call ends.");
            head.code(1, &format!("{} = args", ins.join(", ")));
            head.push(1, "args.clear()");
        } else {
            head.code(0, &format!("def {name}({}):", ins.join(", ")));
        }
        let reads = seen.reads(unit);
        let typed = |(x, v): (&String, &Value)| {
            format!("{x} {}", type_text(&self.plan.module.mesh, seen.f.ty(*v)))
        };
        let types: Vec<String> = ins.iter().zip(&reads).map(typed).collect();
        if !types.is_empty() {
            head.note(1, &types.join(", "));
        }
        self.texts.push(head.text() + &text);
        self.layers.insert(alike, name.clone());
        name
    }

    /// The arguments and lines of a unit; `pops` are those of its arguments that it alone has.
    fn text(
        &mut self,
        seen: &Seen<'a>,
        unit: Range<usize>,
        places: &[(usize, usize)],
        pops: &BTreeSet<usize>,
        mut words: Words,
    ) -> (Vec<String>, String) {
        let (f, base) = (seen.f, base(seen, unit.clone()));
        let mut spelled = |v: Value| words.of(f, v, base);
        let reads = seen.reads(unit.clone());
        let ins: Vec<String> = reads.iter().map(|v| spelled(*v)).collect();
        let outs: Vec<Value> =
            places.iter().map(|&(t, o)| seen.lines[unit.start + t].outs[o]).collect();
        let given = |v: Value| reads.iter().position(|r| *r == v);
        let kept = |v: Value| {
            outs.contains(&v) || given(v).is_some_and(|i| !pops.contains(&i)) || seen.small[v]
        };
        let mut out = Lines::default();
        let mut waits = Waits::default();
        let mut scope = None;
        for at in unit.clone() {
            self.line(seen, at, (&mut spelled, base, &mut scope), &mut waits, &mut out);
            // What this unit reads for the last time, whether others read it or not.
            let later = |v: Value| seen.lines[at + 1..unit.end].iter().any(|l| l.ins.contains(&v));
            let mut dead: Vec<Value> = vec![];
            for v in seen.lines[at].ins.iter().copied().chain(seen.own(at)) {
                if !later(v) && !kept(v) && !dead.contains(&v) {
                    dead.push(v);
                }
            }
            let dead: Vec<String> = dead.into_iter().map(&mut spelled).collect();
            if !dead.is_empty() && at + 1 < unit.end {
                waits.settle(&dead, &mut out);
                out.code(1, &format!("del {}", dead.join(", ")));
            }
        }
        waits.all(&mut out);
        if !outs.is_empty() {
            let comma = if outs.len() == 1 { "," } else { "" };
            let all: Vec<String> = outs.into_iter().map(&mut spelled).collect();
            out.code(1, &format!("return {}{comma}", all.join(", ")));
        }
        (ins, out.text())
    }
}

/// A call of the function of a layer: in a loop over layers, and alone.
struct Call {
    pattern: String,
    alone: String,
    layer: i64,
}

/// Calls, those that are alike as loops.
fn loops(all: &[Call], out: &mut Lines) {
    let mut k = 0;
    while k < all.len() {
        let c = &all[k];
        let step = all.get(k + 1).map_or(0, |next| next.layer - c.layer);
        let follows = |j: &usize| {
            all[*j].pattern == c.pattern && all[*j].layer == c.layer + step * (*j - k) as i64
        };
        let more = if step == 0 { 0 } else { (k + 1..all.len()).take_while(follows).count() };
        if more > 0 {
            let last = all[k + more].layer + step.signum();
            let by = if step == 1 { String::new() } else { format!(", {step}") };
            out.push(1, &format!("for i in range({}, {last}{by}):", c.layer));
            c.pattern.lines().for_each(|l| out.code(2, l));
        } else {
            c.alone.lines().for_each(|l| out.code(1, l));
        }
        k += more + 1;
    }
}

/// The layer that most lines are of.
fn base(seen: &Seen, unit: Range<usize>) -> Option<u32> {
    let mut by: BTreeMap<u32, usize> = BTreeMap::new();
    for l in &seen.lines[unit] {
        if let Some(l) = seen.f.scope_info(l.n.scope).layer {
            *by.entry(l).or_default() += 1;
        }
    }
    by.into_iter().max_by_key(|(l, n)| (*n, std::cmp::Reverse(*l))).map(|x| x.0)
}

/// Exchanges that were begun, and are waited for where their results are read first.
#[derive(Default)]
struct Waits(Vec<(Vec<Value>, Vec<String>)>);

impl Waits {
    fn add(&mut self, values: Vec<Value>, names: Vec<String>) {
        self.0.push((values, names));
    }

    fn write((_, names): (Vec<Value>, Vec<String>), out: &mut Lines) {
        out.code(1, &format!("{} = {}.wait()", names.join(", "), names[0]));
    }

    fn before(&mut self, v: Value, out: &mut Lines) {
        if let Some(i) = self.0.iter().position(|w| w.0.contains(&v)) {
            Waits::write(self.0.remove(i), out);
        }
    }

    /// Those whose results are dropped.
    fn settle(&mut self, names: &[String], out: &mut Lines) {
        while let Some(i) = self.0.iter().position(|w| w.1.iter().any(|n| names.contains(n))) {
            Waits::write(self.0.remove(i), out);
        }
    }

    fn all(&mut self, out: &mut Lines) {
        self.0.drain(..).for_each(|w| Waits::write(w, out));
    }
}

/// How positions follow from those of the sequence, which are the same in every step: as a key. Nothing, if they do
/// not.
fn origin(plan: &Plan, f: &Func, v: Value, depth: usize) -> Option<String> {
    if depth > 64 {
        return None;
    }
    if let Some(a) = f.args.iter().find(|a| a.value == v) {
        let role = a.role.as_ref()?;
        if role.kind.input().is_some_and(|i| i.fill == shardc_ir::func::Fill::Positions) {
            return Some(type_text(&plan.module.mesh, f.ty(v)));
        }
        if role.kind != RoleKind::Step {
            return None;
        }
        let makes = |g: &&Func| g.results.iter().any(|r| r.role.as_ref() == Some(role));
        let g = plan.module.funcs.iter().find(makes)?;
        let r = g.results.iter().find(|r| r.role.as_ref() == Some(role))?;
        return origin(plan, g, r.value, depth + 1);
    }
    let n = f.nodes.iter().find(|n| n.outs.contains(&v))?;
    let [from] = n.ins[..] else { return None };
    let before = origin(plan, f, from, depth + 1)?;
    if ops::is_nothing(&n.op) {
        return Some(before);
    }
    let mut op = String::new();
    n.op.write(&plan.module.mesh, &mut op);
    Some(format!("{op} {before}"))
}
