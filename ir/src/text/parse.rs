//! Reads a module from text: syntax, names, number of results. What it reads may still be ill
//! typed; [`verify`](crate::verify::verify) says so.

use super::cursor::{Cursor, Fail, Res};
use super::expand::{Expanded, expand};
use super::marks::Read;
use super::near::nearest;
use super::params::unsaid;
use super::types::type_text;
use super::update::{Rules, groups_of, without_groups};
use crate::diag::Diag;
use crate::func::{
    Annotation, Func, FusedWithNext, Module, Name, Node, Part, Port, Role, Scope, Value, ValueInfo,
};
use crate::maps::{HashMap, HashSet};
use crate::mesh::Mesh;
use crate::phase::Phase;
use crate::source::Source;
use crate::types::Type;
use smallvec::SmallVec;
use std::borrow::Cow;

/// Reads a module. The grammar is in [`text`](super).
///
/// Types are checked by [`verify`](crate::verify::verify), except that the results of a function
/// have the types its head says.
///
/// # Errors
/// A [`Diag`] with the place: `syntax`, `undefined-value`, `redefined`, `unknown-op`,
/// `unknown-axis`, `attribute`, `size`, `arity`, `result-type`, `repeat`, `too-large`, `mesh` or
/// `sub-axis`.
pub fn parse(text: &str) -> Result<Module, Diag> {
    read(text, None, &Mesh::default()).map(|r| r.0)
}

/// Reads a model: a module, and what its text says of parameters and of the residual stream. What a
/// text says nothing of is as [`Weight::plain`](crate::weights::Weight::plain) has it.
///
/// # Errors
/// Those of [`parse`]; `attribute` also for what is said of parameters.
pub fn parse_source(text: &str) -> Result<Source, Diag> {
    parse_source_on(text, &Mesh::default())
}

/// The same of a text whose annotations are for `mesh` if it has no mesh itself. What asks for no sharding stays
/// without a mesh.
///
/// # Errors
/// Those of [`parse_source`].
pub fn parse_source_on(text: &str, mesh: &Mesh) -> Result<Source, Diag> {
    let (program, updates) = text.split_at(updates_at(text));
    let (module, marks) = read(program, Some(Read::default()), mesh)?;
    let mut source = marks.unwrap_or_default().source(module);
    if !updates.is_empty() {
        // Messages count lines of the whole text.
        source.updates = "\n".repeat(program.lines().count()) + updates;
        groups_of(updates)?;
        Rules::parse(&without_groups(&source.updates), "the model's text")?;
    }
    Ok(source)
}

/// Where a model's text says how parameters are updated: from its first line that begins with `group`.
fn updates_at(text: &str) -> usize {
    match text.starts_with("group ") {
        true => 0,
        false => text.find("\ngroup ").map_or(text.len(), |at| at + 1),
    }
}

fn read(text: &str, source: Option<Read>, mesh: &Mesh) -> Result<(Module, Option<Read>), Diag> {
    let e: Expanded = expand(text)?;
    let c = Cursor { text: &e.text, at: 0 };
    let mut p = Parser { c, mesh: mesh.clone(), func: None, source };
    match p.module() {
        Ok(module) => Ok((module, p.source)),
        Err(f) => Err(f.diag(&e, p.func)),
    }
}

/// Where reading is, and what is known of the module so far.
pub(super) struct Parser<'t> {
    pub c: Cursor<'t>,
    pub mesh: Mesh,
    /// The function being read.
    pub func: Option<&'t str>,
    /// What is read beside the program, if it is a model.
    pub source: Option<Read>,
}

/// The values of a function by name.
type Defined<'t> = HashMap<&'t str, Value>;

/// What the head of a function says of a result.
/// A value, and where and how the text names it.
type Named<'t> = (Value, usize, &'t str);

/// A result in the head of a function: where and how it is named, if it is, its type and role.
type Declared<'t> = (Option<(usize, &'t str)>, Type, Option<Role>);

impl<'t> Parser<'t> {
    fn module(&mut self) -> Res<Module> {
        self.c.blank();
        let given = self.c.eat("mesh");
        if given {
            self.mesh()?;
        }
        self.cuts()?;
        let (phase, states, params) = (self.phase()?, self.states()?, self.layouts()?);
        let mut funcs: Vec<Func> = vec![];
        let mut seen = HashSet::default();
        loop {
            self.c.blank();
            if self.c.peek().is_none() {
                let of_model = self.source.is_some();
                let unsaid = || if of_model { Phase::Source } else { unsaid(&funcs) };
                let phase = phase.unwrap_or_else(unsaid);
                let split = |f: &Func| f.values.iter().any(|v| !v.ty.marked().is_empty());
                let between = |f: &Func| f.nodes.iter().any(|n| n.op.layout().is_some());
                let names = |f: &Func| !f.annotations.is_empty() || split(f) || between(f);
                let used = given || funcs.iter().any(names);
                let mesh = std::mem::take(&mut self.mesh);
                let mesh = if used { mesh } else { Mesh::default() };
                return Ok(Module { mesh, phase, states, params, funcs });
            }
            let at = self.c.at;
            if !self.c.eat("func") {
                let f = self.c.needs("`func`");
                return Err(f.help("a module is `mesh [tp=2]`, then `func @name(…) -> … { … }`"));
            }
            let f = self.func()?;
            if !seen.insert(f.name.clone()) {
                let m = format!("a second function is called `@{}`", f.name);
                let help = format!("call it `@{}.{}`", f.name, funcs.len());
                return Err(Fail::new("redefined", at, 4, m).help(help));
            }
            funcs.push(f);
        }
    }

    /// Items separated by commas until `close`, on any number of lines.
    pub fn list(&mut self, close: &str, mut item: impl FnMut(&mut Self) -> Res<()>) -> Res<()> {
        loop {
            self.c.blank();
            if self.c.eat(close) {
                return Ok(());
            }
            item(self)?;
            self.c.blank();
            if !self.c.eat(",") {
                if self.c.eat(close) {
                    return Ok(());
                }
                let f = self.c.needs(&format!("`,` or `{close}`"));
                return Err(f.help(format!("close the list with `{close}`")));
            }
        }
    }

    fn func(&mut self) -> Res<Func> {
        self.c.spaces();
        self.c.must("@")?;
        let name = self.c.name();
        if name.is_empty() {
            let f = self.c.needs("the name of a function");
            return Err(f.help("for example `func @forward(…)`"));
        }
        self.func = Some(name);
        let mut f = Func::new(name);
        let mut known: Defined = HashMap::default();
        self.c.must("(")?;
        self.list(")", |p| {
            let (at, name) = p.value_name()?;
            p.c.spaces();
            p.c.must(":")?;
            p.c.spaces();
            let ty = p.ty()?;
            let role = p.role()?;
            p.weight(&ty, &role)?;
            let asked = p.asked(ty.rank())?;
            let value = p.define(&mut f, &mut known, (at, name), ty, asked)?;
            f.args.push(Port { value, role });
            Ok(())
        })?;
        self.c.blank();
        self.c.must("->")?;
        self.c.blank();
        let mut results: Vec<Declared<'t>> = vec![];
        if self.c.eat("(") {
            self.list(")", |p| {
                let name = if p.c.peek() == Some(b'%') {
                    let name = p.value_name()?;
                    p.c.spaces();
                    p.c.must(":")?;
                    p.c.spaces();
                    Some(name)
                } else {
                    None
                };
                results.push((name, p.ty()?, p.role()?));
                Ok(())
            })?;
        } else {
            results.push((None, self.ty()?, None));
        }
        self.c.blank();
        self.c.must("{")?;
        self.body(&mut f, &mut known, results)?;
        self.c.blank();
        self.c.must("}")?;
        // The function learns which names are taken, in an order in which each gets its own number.
        let mut by_number: Vec<Value> = f.values.ids().collect();
        by_number.sort_by_key(|&v| f.name(v).dup);
        for v in by_number {
            let name = f.name(v).clone();
            f.rename(v, name);
        }
        Ok(f)
    }

    fn body(&mut self, f: &mut Func, known: &mut Defined<'t>, heads: Vec<Declared<'t>>) -> Res<()> {
        let (mut scope, mut part) = (Scope(0), Part::Forward);
        let mut stages: HashMap<Scope, usize> = HashMap::default();
        // A head that names its results needs no `return`.
        let named = !heads.is_empty() && heads.iter().all(|h| h.0.is_some());
        loop {
            self.c.blank();
            if self.c.peek() == Some(b'%') {
                stages.entry(scope).or_insert(f.scope_info(scope).stage);
                self.node(f, known, scope)?;
                f.nodes.iter_mut().last().expect("it was read").part = part;
                continue;
            }
            if named && self.c.peek() == Some(b'}') {
                let named = heads.iter().filter_map(|h| h.0);
                let values = named.map(|n| self.defined(known, n)).collect::<Res<_>>()?;
                return self.results(f, values, heads);
            }
            let code = self.c.line().split("//").next().unwrap_or("").trim_end();
            match code.strip_suffix(':').and_then(place) {
                Some((path, stage, of)) => {
                    (scope, part) = (f.scope(path), of);
                    let before = *stages.entry(scope).or_insert(stage);
                    if before != stage {
                        let m = format!("this scope was in stage {before} before");
                        return Err(Fail::new("syntax", self.c.at, code.len(), m)
                            .help("a scope is in one stage: say the same one everywhere"));
                    }
                    f.scopes[scope].stage = stage;
                    self.c.at += code.len();
                }
                _ if self.c.eat("return") => {
                    let values = self.returned(known)?;
                    return self.results(f, values, heads);
                }
                _ => {
                    let f = self.c.needs("an op, a scope or `return`");
                    return Err(f.help("write `%y = op[..] %x : type`, `path:` or `return %y`"));
                }
            }
        }
    }

    /// The values after `return`.
    fn returned(&mut self, known: &Defined<'t>) -> Res<Vec<Named<'t>>> {
        self.c.spaces();
        let mut values = vec![];
        if self.c.eat("(") {
            self.list(")", |p| {
                values.push(p.operand(known)?);
                Ok(())
            })?;
        } else {
            while self.c.peek() == Some(b'%') {
                values.push(self.operand(known)?);
                self.c.spaces();
                if !self.c.eat(",") {
                    break;
                }
                self.c.spaces();
            }
        }
        Ok(values)
    }

    fn results(&mut self, f: &mut Func, values: Vec<Named>, heads: Vec<Declared>) -> Res<()> {
        let at = self.c.at;
        if values.len() != heads.len() {
            let (n, k) = (values.len(), heads.len());
            let m = format!("{n} values are returned, the head of the function has {k}");
            return Err(Fail::new("arity", at, 1, m).help(format!("return {k} values")));
        }
        for ((value, at, name), (_, ty, role)) in values.into_iter().zip(heads) {
            let own = f.ty(value);
            if *own != ty {
                let (own, ty) = (type_text(&self.mesh, own), type_text(&self.mesh, &ty));
                let m = format!("`%{name}` is {own}, the head of the function says {ty}");
                return Err(Fail::new("result-type", at, name.len() + 1, m)
                    .rule("a result has the type that the head of the function gives it")
                    .help(format!("write `-> {own}` in the head")));
            }
            f.results.push(Port { value, role });
        }
        Ok(())
    }

    fn node(&mut self, f: &mut Func, known: &mut Defined<'t>, scope: Scope) -> Res<()> {
        let mut names: SmallVec<[(usize, &'t str); 2]> = SmallVec::new();
        loop {
            names.push(self.value_name()?);
            self.c.spaces();
            if !self.c.eat(",") {
                break;
            }
            self.c.spaces();
        }
        self.c.must("=")?;
        self.c.spaces();
        let mut text = self.op_text()?;
        let kept = text.kept();
        self.c.spaces();
        let mut ins: SmallVec<[Value; 4]> = SmallVec::new();
        while self.c.peek() == Some(b'%') {
            ins.push(self.operand(known)?.0);
            self.c.spaces();
            if !self.c.eat(",") {
                break;
            }
            self.c.spaces();
        }
        let ranks: SmallVec<[usize; 4]> = ins.iter().map(|&v| f.ty(v).rank()).collect();
        let op = self.op(&text, &ranks, kept)?;
        self.c.must(":")?;
        let mut outs: SmallVec<[Value; 2]> = SmallVec::new();
        let wrong_number = |at: usize, n: &str| {
            let m = format!("{} values are defined, but {n} types are given", names.len());
            Fail::new("arity", at, 1, m).help(format!("give {} after the `:`", names.len()))
        };
        for (i, &name) in names.iter().enumerate() {
            self.c.spaces();
            if i > 0 && !self.c.eat(",") {
                return Err(wrong_number(self.c.at, &i.to_string()));
            }
            self.c.spaces();
            let ty = self.ty()?;
            let asked = self.asked(ty.rank())?;
            let out = self.define(f, known, name, ty, asked)?;
            self.residual(f, out)?;
            outs.push(out);
        }
        self.c.spaces();
        if self.c.peek() == Some(b',') {
            return Err(wrong_number(self.c.at, "more"));
        }
        let fused = match () {
            () if self.c.eat("&&") => FusedWithNext::Launch,
            () if self.c.eat("&") => FusedWithNext::Kernel,
            () => FusedWithNext::No,
        };
        self.c.spaces();
        let note = self.note();
        if !matches!(self.c.peek(), None | Some(b'\n')) {
            let f = self.c.needs("the end of the line");
            return Err(f.help("put each op on a line of its own"));
        }
        f.nodes.push(Node { note, fused, kept, ..Node::new(op, &ins, &outs, scope) });
        Ok(())
    }

    fn note(&mut self) -> Option<Cow<'static, str>> {
        if !self.c.eat("//") {
            return None;
        }
        let text = self.c.line();
        self.c.at += text.len();
        let text = text.replace(char::is_control, " ");
        Some(text.trim()).filter(|t| !t.is_empty()).map(|t| Cow::Owned(t.to_string()))
    }

    /// `%name`, without the sign.
    pub fn value_name(&mut self) -> Res<(usize, &'t str)> {
        let at = self.c.at;
        self.c.must("%")?;
        let name = self.c.name();
        if name.is_empty() {
            return Err(self.c.needs("the name of a value").help("for example `%x`"));
        }
        Ok((at, name))
    }

    /// A value that was defined before.
    fn operand(&mut self, known: &Defined<'t>) -> Res<Named<'t>> {
        let name = self.value_name()?;
        self.defined(known, name)
    }

    /// The value of this name.
    fn defined(&self, known: &Defined<'t>, (at, name): (usize, &'t str)) -> Res<Named<'t>> {
        if let Some(&v) = known.get(name) {
            return Ok((v, at, name));
        }
        // Sorted, so that of equally near names the same ones are told every time.
        let mut all: Vec<&str> = known.keys().copied().collect();
        all.sort_unstable();
        let m = format!("`%{name}` is not defined above this line");
        let f = Fail::new("undefined-value", at, name.len() + 1, m)
            .rule("a value is defined once, above its uses");
        let near: Vec<_> = nearest(name, all).iter().map(|n| format!("`%{n}`")).collect();
        Err(f.help(match near.is_empty() {
            false => format!("did you mean {}?", near.join(" or ")),
            true => format!("define it first: `%{name} = …`, or make it an argument"),
        }))
    }

    fn define(
        &self,
        f: &mut Func,
        known: &mut Defined<'t>,
        (at, name): (usize, &'t str),
        ty: Type,
        asked: Option<Annotation>,
    ) -> Res<Value> {
        let value = Value(f.values.len() as u32);
        f.values.push(ValueInfo { ty, name: Name::parse(name) });
        if known.insert(name, value).is_some() {
            let m = format!("`%{name}` is defined a second time");
            return Err(Fail::new("redefined", at, name.len() + 1, m)
                .rule("a value is defined once, above its uses")
                .help(format!("call it `%{name}.{}`", known.len())));
        }
        if let Some(a) = asked {
            f.annotations.insert(value, a);
        }
        Ok(value)
    }
}

/// What stands before the `:` of a scope line: a path, and where they are not as by default its stage and
/// the part of its nodes, as in `model.norm stage 1 backward`. `None` for anything else.
fn place(head: &str) -> Option<(&str, usize, Part)> {
    let (mut words, mut stage, mut part) = (head.split(' '), 0, Part::Forward);
    let path = words.next().map(|p| if p == "\"\"" { "" } else { p }).filter(|p| is_path(p))?;
    while let Some(word) = words.next() {
        match Part::ALL.into_iter().find(|p| p.name() == word) {
            Some(of) => part = of,
            None if word == "stage" => {
                stage = words.next()?.parse().ok().filter(|s| *s < MAX_STAGES)?
            }
            None => return None,
        }
    }
    Some((path, stage, part))
}

/// Most stages that a text may name.
const MAX_STAGES: usize = 1 << 20;

/// True for what may stand before the `:` of a scope line.
pub fn is_path(path: &str) -> bool {
    let plain = |c: u8| c.is_ascii_graphic() && !matches!(c, b'%' | b'{' | b'}' | b'"' | b':');
    path.bytes().all(plain) && !path.contains("//")
}
