//! Reads the text of update rules.

use super::*;
use crate::ops::NAMES;
use crate::text::cursor::{Cursor, Fail, Res};
use crate::text::expand::Expanded;
use crate::text::unknown::unknown_op;

impl Rules {
    /// Reads a text of update rules; `place` is what messages call it.
    ///
    /// # Errors
    /// `syntax`, `unknown-op`, `update-rule`: with the line.
    pub fn parse(text: &str, place: &str) -> Result<Rules, Diag> {
        let origin = Origin { text: text.into(), place: place.into() };
        let origin = Arc::new(origin);
        let mut p = Reader { c: Cursor { text, at: 0 }, name: String::new(), deep: 0 };
        let mut all = vec![];
        loop {
            p.c.blank();
            if p.c.peek().is_none() {
                return Ok(Rules { all });
            }
            match p.rule(&origin) {
                Ok(rule) => all.push(Arc::new(rule)),
                Err(f) => return Err(origin.diag(*f, &p.name)),
            }
        }
    }
}

impl Origin {
    /// A message of a rule in this text.
    pub(super) fn diag(&self, f: Fail, rule: &str) -> Diag {
        let mut d = f.diag(&Expanded::plain(&self.text), (!rule.is_empty()).then_some(rule));
        d.place = d.place.map(|p| format!("{}: {p}", self.place));
        d
    }
}

struct Reader<'t> {
    c: Cursor<'t>,
    name: String,
    /// Expressions that the one that is read stands in.
    deep: usize,
}

/// Most expressions in each other.
pub(super) const DEEPEST: usize = 64;

/// A message of code `update-rule`.
pub(super) fn wrong(at: usize, len: usize, what: impl Into<String>) -> Box<Fail> {
    Fail::new("update-rule", at, len, what)
}

impl<'t> Reader<'t> {
    fn rule(&mut self, origin: &Arc<Origin>) -> Res<UpdateRule> {
        self.name.clear();
        let begin = self.c.at;
        if !self.c.eat("update") {
            let f = self.c.needs("`update`");
            return Err(f.help("a rule is `update @name(%p: f32[*] param, …) -> (…) { … }`"));
        }
        self.c.spaces();
        let at = self.c.at;
        self.c.must("@")?;
        self.name = self.c.name().into();
        if self.name.is_empty() {
            return Err(self.c.needs("the name of a rule").help("for example `update @lion(`"));
        }
        self.c.must("(")?;
        let mut args = vec![];
        self.list(")", |p| {
            let arg = p.arg()?;
            args.push(arg);
            Ok(())
        })?;
        self.c.blank();
        self.c.must("->")?;
        self.c.blank();
        self.c.must("(")?;
        let mut results = vec![];
        self.list(")", |p| {
            let at = p.c.at;
            let (dtype, dims) = p.ty()?;
            p.c.spaces();
            let kind = p.kind()?;
            results.push((at, Arg { name: String::new(), at, dtype, dims, kind }));
            Ok(())
        })?;
        check_ports(at, self.name.len() + 1, &args, &results)?;
        let mut rule = UpdateRule {
            name: self.name.clone(),
            origin: origin.clone(),
            span: begin..begin,
            at,
            args,
            fits: None,
            with: vec![],
            fused: None,
            body: vec![],
            results: vec![],
        };
        self.clauses(&mut rule)?;
        self.body(&mut rule)?;
        rule.span.end = self.c.at;
        Ok(rule)
    }

    /// What stands between the results and the body.
    fn clauses(&mut self, rule: &mut UpdateRule) -> Res<()> {
        loop {
            self.c.blank();
            let at = self.c.at;
            match () {
                () if self.c.eat("{") => return Ok(()),
                () if self.c.eat("where ") => {
                    let text = self.line();
                    let mut words = text.split_whitespace();
                    let fits = (words.next(), words.next(), words.next(), words.next());
                    rule.fits = match fits {
                        (Some(a), Some(by @ ("<=" | ">")), Some(b), None)
                            if a.len() == 1 && b.len() == 1 =>
                        {
                            let letter = |t: &str| t.chars().next().unwrap_or('?');
                            Some((letter(a), by == "<=", letter(b)))
                        }
                        _other => {
                            let m = format!("`where {text}` is no condition");
                            return Err(wrong(at, 5, m)
                                .help("compare 2 letters: `where n <= m`, or `where n > m`"));
                        }
                    };
                }
                () if self.c.eat("with ") => {
                    let text = self.line();
                    let (name, default) = text.split_once('=').unwrap_or((text, ""));
                    let default = default.trim();
                    if name.trim().is_empty() || default.is_empty() {
                        let m = "an attribute has a name and a value";
                        return Err(wrong(at, 4, m).help("for example `with mu = 0.95`"));
                    }
                    rule.with.push((at, name.trim().into(), Preset::read(default)));
                }
                () if self.c.eat("fused ") => rule.fused = Some((at, self.line().into())),
                () => {
                    let f = self.c.needs("`where`, `with`, `fused` or `{`");
                    return Err(f.help("the body of a rule begins with `{`"));
                }
            }
        }
    }

    /// The rest of the line, up to a `{` or a note; what stands behind it is left.
    fn line(&mut self) -> &'t str {
        let line = self.c.line();
        let line = line.split("//").next().unwrap_or("");
        let line = line.strip_suffix('{').unwrap_or(line);
        self.c.at += line.len();
        line.trim()
    }

    fn body(&mut self, rule: &mut UpdateRule) -> Res<()> {
        loop {
            self.c.blank();
            let at = self.c.at;
            match self.c.peek() {
                Some(b'%') => rule.body.push(self.define()?),
                _ if self.c.eat("repeat ") => rule.body.push(self.repeat(at)?),
                _ if self.c.eat("return") => {
                    loop {
                        self.c.spaces();
                        rule.results.push(self.expr()?);
                        self.c.spaces();
                        if !self.c.eat(";") {
                            break;
                        }
                    }
                    self.c.blank();
                    return self.c.must("}");
                }
                _other => {
                    let f = self.c.needs("a value, `repeat` or `return`");
                    return Err(f.help("write `%y = op[..] %x`, or `return %p2; %m2`"));
                }
            }
        }
    }

    fn define(&mut self) -> Res<BodyLine> {
        let (at, name) = self.value()?;
        self.c.spaces();
        self.c.must("=")?;
        self.c.spaces();
        let expr = self.expr()?;
        self.end()?;
        Ok(BodyLine::Define { at, name, expr })
    }

    /// `repeat i in 0..$steps, %x{i} at 0 is %x {`
    fn repeat(&mut self, at: usize) -> Res<BodyLine> {
        let head = self.line();
        let mut parts = head.split(',');
        let range = parts.next().unwrap_or("").strip_prefix("i in ");
        let range = range.and_then(|r| r.split_once(".."));
        let Some((first, end)) = range.map(|(a, b)| (a.trim(), b.trim())) else {
            let m = "a repeat has a range";
            return Err(
                wrong(at, 6, m).help("for example `repeat i in 0..$steps, %x{i} at 0 is %x {`")
            );
        };
        let mut begins = vec![];
        for part in parts {
            let found = part.trim().split_once(" at 0 is ").and_then(|(a, b)| {
                Some((a.trim().strip_prefix('%')?, b.trim().strip_prefix('%')?))
            });
            let Some((name, is)) = found else {
                let m = format!("`{}` is not of the form `%x{{i}} at 0 is %x`", part.trim());
                return Err(
                    wrong(at, 6, m).help("say what stands for a value in the first iteration")
                );
            };
            begins.push((name.to_string(), is.to_string()));
        }
        let (first, end) = (first.to_string(), end.to_string());
        self.c.blank();
        self.c.must("{")?;
        let mut body = vec![];
        loop {
            self.c.blank();
            if self.c.eat("}") {
                return Ok(BodyLine::Repeat { at, first, end, begins, body });
            }
            if self.c.peek() != Some(b'%') {
                let f = self.c.needs("a value or `}`");
                return Err(f.help("a repeat has lines `%y = op[..] %x`, and no other in it"));
            }
            body.push(self.define()?);
        }
    }

    fn end(&mut self) -> Res<()> {
        self.c.spaces();
        if matches!(self.c.peek(), None | Some(b'\n')) || self.c.rest().starts_with("//") {
            return Ok(());
        }
        Err(self.c.needs("the end of the line").help("put each value on a line of its own"))
    }

    /// `%x{i+1}`, without the sign.
    fn value(&mut self) -> Res<(usize, String)> {
        let at = self.c.at;
        self.c.must("%")?;
        let rest = self.c.rest();
        let mut open = false;
        let len = rest.find(|c: char| {
            open = (open || c == '{') && c != '}';
            !(open || c.is_ascii_alphanumeric() || matches!(c, '_' | '}'))
        });
        let name = &rest[..len.unwrap_or(rest.len())];
        if name.is_empty() {
            return Err(self.c.needs("the name of a value").help("for example `%x`"));
        }
        self.c.at += name.len();
        Ok((at, name.into()))
    }

    fn expr(&mut self) -> Res<Expr> {
        if self.deep == DEEPEST {
            let m = format!("more than {DEEPEST} expressions stand in each other here");
            return Err(
                wrong(self.c.at, 1, m).help("give a part of it a name, on a line of its own")
            );
        }
        self.deep += 1;
        let found = self.one_expr();
        self.deep -= 1;
        found
    }

    fn one_expr(&mut self) -> Res<Expr> {
        if self.c.eat("(") {
            self.c.spaces();
            let inner = self.expr()?;
            self.c.spaces();
            self.c.must(")")?;
            return Ok(inner);
        }
        if self.c.peek() == Some(b'%') {
            let (at, name) = self.value()?;
            return Ok(Expr::Value { at, name });
        }
        let at = self.c.at;
        let op = self.c.word().to_string();
        let attrs = if self.c.eat("[") { Some(self.attrs(&op)?) } else { None };
        let count = match arity(&op, attrs.as_deref()) {
            Some(n) => n,
            None if op.is_empty() => {
                let f = self.c.needs("a value or an op");
                return Err(f.help("for example `%x`, or `sqrt %x`"));
            }
            None if NAMES.contains(&&*op) => {
                let m = format!("`{op}` has no place in an update rule");
                let f = wrong(at, op.len(), m);
                let rule = "a rule is written for a whole parameter on one device: what ranks exchange for it is \
                            added when it is compiled";
                return Err(f.rule(rule).help("leave it out"));
            }
            None => return Err(unknown_op(&op, at)),
        };
        let mut ins = vec![];
        for k in 0..count {
            self.c.spaces();
            if k > 0 {
                if !self.c.eat(",") {
                    let m = format!("`{op}` has {count} operands, this is {k}");
                    return Err(wrong(at, op.len(), m).help("separate operands by `,`"));
                }
                self.c.spaces();
            }
            ins.push(self.expr()?);
        }
        Ok(Expr::Op { at, op, attrs, ins })
    }

    /// The text up to the `]` that closes it; others may stand in it.
    fn attrs(&mut self, op: &str) -> Res<String> {
        let line = self.c.line();
        let mut open = 1;
        let end = line.find(|c| {
            open += i32::from(c == '[') - i32::from(c == ']');
            open == 0
        });
        let Some(end) = end else {
            let f = self.c.needs("`]`");
            return Err(f.help(format!("close the attributes of `{op}` with `]`")));
        };
        self.c.at += end + 1;
        Ok(line[..end].into())
    }

    fn arg(&mut self) -> Res<Arg> {
        let (at, name) = self.value()?;
        self.c.spaces();
        self.c.must(":")?;
        self.c.spaces();
        let (dtype, dims) = self.ty()?;
        self.c.spaces();
        let kind = self.kind()?;
        Ok(Arg { name, at, dtype, dims, kind })
    }

    /// An element type, be it an attribute, and dims.
    fn ty(&mut self) -> Res<(String, UpdateDims)> {
        let at = self.c.at;
        let dollar = if self.c.eat("$") { "$" } else { "" };
        let dtype = format!("{dollar}{}", self.c.word());
        self.c.must("[")?;
        let line = self.c.line();
        let Some(end) = line.find(']') else { return Err(self.c.needs("`]`")) };
        self.c.at += end + 1;
        let all: Vec<&str> = line[..end].split(',').map(str::trim).collect();
        let letter = |t: &&str| t.len() == 1 && t.bytes().all(|c| c.is_ascii_lowercase());
        let dims = match &all[..] {
            ["*"] => UpdateDims::Any,
            [""] => UpdateDims::Letters(vec![]),
            all if all.iter().all(letter) => UpdateDims::Letters(all.concat().chars().collect()),
            _other => {
                let m = format!("`{}` are no dims of a rule", &line[..end]);
                return Err(wrong(at, 1, m).help("give a letter to each dim, or `*` for any shape"));
            }
        };
        Ok((dtype, dims))
    }

    fn kind(&mut self) -> Res<ArgKind> {
        let at = self.c.at;
        let word = self.c.word();
        Ok(match word {
            "param" => ArgKind::Param,
            "grad" => ArgKind::Grad,
            "state" => {
                self.c.must("[")?;
                let (at, word) = (self.c.at, self.c.word());
                let name = StateName::read(word).ok_or_else(|| {
                    wrong(at, word.len().max(1), format!("`{word}` is not the name of a state"))
                        .help("use lower case letters, digits and `_`, as in `state[exp_avg]`")
                })?;
                self.c.must("]")?;
                self.c.spaces();
                let mut init = 0.0;
                if self.c.eat("=") {
                    self.c.spaces();
                    let (at, text) = (self.c.at, self.c.decimal());
                    let number = text.parse().ok();
                    let most = DType::BF16.largest();
                    init = number.filter(|x: &f64| x.abs() <= most).ok_or_else(|| {
                        let m = match text {
                            "" => "a number is missing".into(),
                            text => format!("`{text}` is not a number that a state can have"),
                        };
                        wrong(at, text.len().max(1), m).help("a state begins as one, as in `= 0`")
                    })?;
                }
                ArgKind::State(name, init)
            }
            "scalar" => {
                self.c.spaces();
                let at = self.c.at;
                let name = self.c.quoted()?;
                if !SCALARS.contains(&&*name) {
                    let m = format!("no scalar of a step is called `{name}`");
                    return Err(wrong(at, name.len() + 2, m)
                        .help(format!("the scalars are {}", SCALARS.join(", "))));
                }
                ArgKind::Scalar(name)
            }
            other => {
                let m = format!("`{other}` is nothing that an update rule is given or makes");
                return Err(wrong(at, other.len().max(1), m)
                    .rule("a rule reads one parameter, its gradient and states, and scalars")
                    .help("say `param`, `grad`, `state[NAME]` or `scalar \"lr\"`"));
            }
        })
    }

    fn list(&mut self, close: &str, mut item: impl FnMut(&mut Self) -> Res<()>) -> Res<()> {
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
}

/// One parameter and its gradient, states once each; results are the parameter and all states, in
/// their order.
fn check_ports(at: usize, len: usize, args: &[Arg], results: &[(usize, Arg)]) -> Res<()> {
    let of = |is: fn(&ArgKind) -> bool| args.iter().filter(move |a| is(&a.kind));
    for (kind, found) in [
        ("param", of(|k| *k == ArgKind::Param).collect::<Vec<_>>()),
        ("grad", of(|k| *k == ArgKind::Grad).collect()),
    ] {
        if found.len() != 1 {
            let at = found.get(1).map_or(at, |a| a.at);
            let m = format!("{} arguments are `{kind}`, not 1", found.len());
            return Err(wrong(at, len, m)
                .rule("a rule updates one parameter by its gradient, and reads no other")
                .help(format!("give it 1 argument `%x: f32[*] {kind}`")));
        }
    }
    let written: Vec<&Arg> = of(|k| matches!(k, ArgKind::Param | ArgKind::State(..))).collect();
    let (first, states): (Vec<&Arg>, Vec<&Arg>) =
        written.into_iter().partition(|a| a.kind == ArgKind::Param);
    let wanted: Vec<&Arg> = first.into_iter().chain(states).collect();
    let place = |k: usize| results.get(k).map_or(at, |r| r.0);
    for (k, want) in wanted.iter().enumerate() {
        let same = |r: &Arg| match (&r.kind, &want.kind) {
            (ArgKind::State(a, _), ArgKind::State(b, _)) => a == b,
            (a, b) => a == b,
        };
        let what = match &want.kind {
            ArgKind::State(name, _) => format!("state[{name}]"),
            _param => "param".into(),
        };
        let Some((_, r)) = results.get(k).filter(|r| same(&r.1)) else {
            let m = format!("result {} is not `{what}`", k + 1);
            return Err(wrong(place(k), 1, m)
                .rule("a rule returns its parameter and then all of its states, in their order")
                .help(format!("make result {} `{what}`", k + 1)));
        };
        if (&r.dtype, &r.dims) != (&want.dtype, &want.dims) {
            let m = format!("`{what}` is returned in another type than it is taken");
            return Err(wrong(place(k), 1, m).help("give both the same element type and dims"));
        }
    }
    if results.len() > wanted.len() {
        let m = format!("{} results, of {} that the rule updates", results.len(), wanted.len());
        return Err(wrong(place(wanted.len()), 1, m).help("return the parameter and its states"));
    }
    Ok(())
}
