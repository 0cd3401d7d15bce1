//! A rule for one parameter: with its sizes and attributes, as a function of one op per line.

use super::number::evaluate;
use super::parse::wrong;
use super::writer::{Made, Writer};
use super::*;
use crate::attr::AttrCx;
use crate::builder::Builder;
use crate::func::{Func, Name, Port, Role, RoleKind};
use crate::maps::{HashMap, HashSet};
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::text::cursor::{Fail, Res};
use crate::types::Type;

impl UpdateRule {
    /// Whether it is for parameters of this shape.
    pub fn fits(&self, shape: &[usize]) -> bool {
        let Some(sizes) = self.letters(shape) else { return false };
        let size = |l: char| sizes.iter().find(|s| s.0 == l).map_or(0, |s| s.1);
        self.fits.is_none_or(|(a, below, b)| (size(a) <= size(b)) == below)
    }

    /// What its letters stand for, if its parameter may have this shape.
    fn letters(&self, shape: &[usize]) -> Option<Vec<(char, usize)>> {
        match &self.args.iter().find(|a| a.kind == ArgKind::Param)?.dims {
            UpdateDims::Any => Some(vec![]),
            UpdateDims::Letters(l) if l.len() == shape.len() => {
                Some(l.iter().copied().zip(shape.iter().copied()).collect())
            }
            UpdateDims::Letters(_) => None,
        }
    }

    /// Its attributes: those given, as texts, and the others as the rule has them. Numbers may name
    /// `fan_out` and `fan_in`, those of the parameter's matrix, `heads`, if what its product makes is seen by heads,
    /// `elements`, and its letters, which are the sizes of its dims.
    ///
    /// # Errors
    /// Says what is wrong with one, in words, and what to write.
    pub fn attributes(
        &self,
        given: &BTreeMap<String, String>,
        fans: [usize; 2],
        heads: Option<usize>,
        shape: &[usize],
    ) -> Result<Attrs, [String; 2]> {
        let names: Vec<&str> = self.with.iter().map(|w| &*w.1).collect();
        if let Some(name) = given.keys().find(|g| !names.contains(&&***g)) {
            let what = format!("`@{}` has no attribute `{name}`", self.name);
            return Err([what, format!("its attributes are {}", names.join(", "))]);
        }
        let mut all = Attrs::new();
        for (name, n) in ["fan_out", "fan_in"].into_iter().zip(fans) {
            all.insert(name.into(), AttrValue::Numbers(vec![n as f64]));
        }
        if let Some(n) = heads {
            all.insert("heads".into(), AttrValue::Numbers(vec![n as f64]));
        }
        all.insert(
            "elements".into(),
            AttrValue::Numbers(vec![shape.iter().product::<usize>() as f64]),
        );
        for (letter, n) in self.letters(shape).unwrap_or_default() {
            all.insert(letter.into(), AttrValue::Numbers(vec![n as f64]));
        }
        for (at, name, default) in &self.with {
            let word = given.get(name);
            let text = match (default, word) {
                (Preset::Plain(own), None) => own,
                (Preset::Plain(_), Some(word)) => word,
                (Preset::Choice(of), word) => {
                    let found = word.map_or(of.first(), |w| of.iter().find(|c| c.0 == *w));
                    let Some((word, is)) = found else {
                        let words: Vec<&str> = of.iter().map(|c| &*c.0).collect();
                        let what = format!("`{}` is no {name}", word.map_or("", |w| w));
                        return Err([what, format!("it is one of {}", words.join(", "))]);
                    };
                    if is.is_empty() { word } else { is }
                }
            };
            let is = |text: &str| read(text, &all);
            if let (Preset::Plain(own), Some(word)) = (default, word)
                && matches!(
                    (is(own), is(word)),
                    (Ok(AttrValue::Numbers(_)), Ok(AttrValue::Word(_)))
                )
            {
                let what = format!("`{word}` is no {name} of `@{}`: it is a word", self.name);
                return Err([what, format!("give a number: the rule has {name}={own}")]);
            }
            let value = read(text, &all).map_err(|why| {
                let line = self.origin.text[..*at].matches('\n').count() + 1;
                let of = if word.is_none() { format!("@{}, line {line}", self.name) } else { format!("@{}", self.name) };
                [
                    format!("`{name}` of `{of}`: {why}"),
                    "give a number, a word, or numbers separated by `,` without brackets: 3, -4.5, 2".into(),
                ]
            })?;
            all.insert(name.clone(), value);
        }
        Ok(all)
    }

    /// Whether its parameters may have any shape.
    pub fn of_any_shape(&self) -> bool {
        self.args.iter().any(|a| a.kind == ArgKind::Param && a.dims == UpdateDims::Any)
    }

    /// The dims of the parameters of rules of one name, as their texts have them, with what must hold of them. What
    /// holds for one of two rules of the same dims or else for the other holds.
    pub fn dims_of_all(all: &[Arc<UpdateRule>]) -> String {
        let dims = |r: &UpdateRule| match r.args.iter().find(|a| a.kind == ArgKind::Param)?.dims {
            UpdateDims::Letters(ref l) => Some(l.clone()),
            UpdateDims::Any => None,
        };
        let mut out: Vec<String> = vec![];
        for r in all {
            let own = dims(r);
            let others = all.iter().filter(|o| dims(o) == own).map(|o| o.fits);
            let fits = r.fits.filter(|&(a, below, b)| {
                others.into_iter().all(|o| o.is_some() && o != Some((a, !below, b)))
            });
            let fits = fits
                .map(|(a, below, b)| format!(" where {a} {} {b}", if below { "<=" } else { ">" }));
            let letters = own.map_or("*".into(), |l| {
                l.iter().map(char::to_string).collect::<Vec<_>>().join(",")
            });
            let text = format!("[{letters}]{}", fits.unwrap_or_default());
            if !out.contains(&text) {
                out.push(text);
            }
        }
        out.join(", or ")
    }

    /// Whether it is a rule of matrices that are seen by heads.
    pub fn by_heads(&self) -> bool {
        self.text().contains("$heads")
    }

    /// Whether it has an attribute of this name.
    pub fn has(&self, attribute: &str) -> bool {
        self.with.iter().any(|w| w.1 == attribute)
    }

    fn diag(&self, f: Fail) -> Diag {
        self.origin.diag(f, &self.name)
    }
}

/// An attribute's text: numbers separated by commas, or a word.
fn read(text: &str, known: &Attrs) -> Result<AttrValue, String> {
    let plain = text.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
    if plain && text.starts_with(|c: char| c.is_ascii_alphabetic()) && text != "inf" {
        return Ok(AttrValue::Word(text.into()));
    }
    let names = |name: &str, at| number_of(known, name, at);
    // Commas of functions stand in parentheses.
    let (mut open, mut parts) = (0, vec![String::new()]);
    for c in text.chars() {
        open += i32::from(c == '(') - i32::from(c == ')');
        match c {
            ',' if open == 0 => parts.push(String::new()),
            c => parts.last_mut().expect("there is one").push(c),
        }
    }
    let all: Result<Vec<f64>, String> = parts.iter().map(|p| evaluate(p, &names)).collect();
    Ok(AttrValue::Numbers(all?))
}

pub(super) fn number_of(attrs: &Attrs, name: &str, at: Option<f64>) -> Result<f64, String> {
    match attrs.get(name) {
        Some(AttrValue::Numbers(all)) => match (&all[..], at) {
            ([one], None) => Ok(*one),
            (all, Some(i)) if !all.is_empty() && i >= 0.0 => Ok(all[i as usize % all.len()]),
            _other => Err(format!("`${name}` is a list: write `${name}[0]`")),
        },
        Some(AttrValue::Word(word)) => Err(format!("`${name}` is the word {word}, not a number")),
        None => Err(format!("`${name}` is no attribute of this rule")),
    }
}

impl Update {
    /// Whether it multiplies matrices.
    pub fn multiplies(&self) -> bool {
        fn any(e: &Expr) -> bool {
            match e {
                Expr::Value { .. } => false,
                Expr::Op { op, attrs, ins, .. } => {
                    let kept =
                        attrs.as_deref().and_then(|a| a.split_once("->")).map_or("", |x| x.1);
                    let dims = kept.split(';').next().unwrap_or("").trim();
                    (op == "dot" && dims.len() > 1) || ins.iter().any(any)
                }
            }
        }
        fn line(l: &BodyLine) -> bool {
            match l {
                BodyLine::Define { expr, .. } => any(expr),
                BodyLine::Repeat { body, .. } => body.iter().any(line),
            }
        }
        self.rule.body.iter().any(line) || self.rule.results.iter().any(any)
    }

    /// The numbers of an attribute; none of a word, or of what is no attribute.
    pub fn numbers_of(&self, name: &str) -> &[f64] {
        match self.attrs.get(name) {
            Some(AttrValue::Numbers(all)) => all,
            _other => &[],
        }
    }

    /// What it keeps of a parameter of this rank.
    ///
    /// # Errors
    /// `update-rule` if its types are none.
    pub fn kept(&self, rank: usize) -> Result<Vec<KeptState>, Diag> {
        let rule = &self.rule;
        let own = rule.args.iter().find(|a| a.kind == ArgKind::Param).map(|a| &a.dims);
        let first = usize::from(self.stack);
        let dims = |a: &Arg| match (&a.dims, own) {
            (UpdateDims::Letters(l), Some(UpdateDims::Letters(of))) => {
                let at = |l: &char| of.iter().position(|o| o == l).map(|d| d + first);
                let own: Option<Vec<usize>> = l.iter().map(at).collect();
                let once = |d: &Vec<usize>| (1..d.len()).all(|k| !d[..k].contains(&d[k]));
                own.filter(once).map(|d| (0..first).chain(d).collect())
            }
            (UpdateDims::Letters(l), _) => l.is_empty().then(|| (0..first).collect()),
            (UpdateDims::Any, _) => Some((0..rank).collect()),
        };
        let one = |a: &Arg, name, init| {
            let dims = dims(a).ok_or_else(|| {
                let m = "a state has dims that its parameter has not";
                rule.diag(*wrong(a.at, 1, m).help("use letters of the parameter's dims, each once"))
            })?;
            Ok(KeptState { name, dtype: self.dtype(a).map_err(|f| rule.diag(*f))?, init, dims })
        };
        let mut names = HashSet::default();
        let mut one = |a: &Arg, name, init| match names.insert(name) {
            true => one(a, name, init),
            false => {
                let d = wrong(a.at, 1, format!("a second state is called `{name}`"));
                Err(rule.diag(*d.help("give each state a name of its own")))
            }
        };
        let all = rule.args.iter().filter_map(|a| match &a.kind {
            ArgKind::State(name, init) => Some(one(a, *name, *init)),
            _other => None,
        });
        all.collect()
    }

    fn dtype(&self, a: &Arg) -> Res<DType> {
        let word = match a.dtype.strip_prefix('$') {
            Some(name) => match self.attrs.get(name) {
                Some(AttrValue::Word(word)) => word,
                _other => "",
            },
            None => &a.dtype,
        };
        let found = DType::named(word);
        let state = matches!(a.kind, ArgKind::State(..));
        match found {
            Some(DType::F32) => Ok(DType::F32),
            Some(DType::BF16) if state => Ok(DType::BF16),
            _other => {
                let m = format!("`{word}` is no element type here");
                Err(wrong(a.at, 1, m)
                    .rule("states are f32 or bf16, everything else is f32")
                    .help("use f32 (4 bytes), or bf16 (2 bytes) for a state"))
            }
        }
    }

    /// The op that does all of it, if there is one and states are what it takes.
    ///
    /// # Errors
    /// `attribute` if the rule does not say it as an op is written.
    pub fn fused(&self) -> Result<Option<Op>, Diag> {
        let rule = &self.rule;
        let Some((at, text)) = &rule.fused else { return Ok(None) };
        let states = rule.args.iter().filter(|a| matches!(a.kind, ArgKind::State(..)));
        for a in states {
            if self.dtype(a).map_err(|f| rule.diag(*f))? != DType::F32 {
                return Ok(None);
            }
        }
        let read = || {
            let (name, attrs) = text.split_once('[').unwrap_or((text, ""));
            let attrs = attrs.strip_suffix(']');
            let attrs = attrs.map(|a| self.numbers(a, None)).transpose()?;
            let cx = AttrCx { mesh: &Mesh::default(), ranks: &[] };
            Op::read(name, attrs.as_deref(), cx).map_err(|e| e.message)
        };
        let op =
            read().map_err(|m| rule.diag(*wrong(*at, 5, m).help("name an op as text has it")))?;
        let own: Vec<StateName> = rule.args.iter().filter_map(|a| a.kind.state()).collect();
        let states = op.def().states();
        let known = |n: &&str| SCALARS.contains(n) || ["g_scale", "applies"].contains(n);
        let scalars = op.operands().get(2 + states.len()..).unwrap_or_default();
        let whole = rule.args.iter().all(|a| a.kind.state().is_none() || a.dims == UpdateDims::Any);
        if !whole || *states != own || scalars.is_empty() || !scalars.iter().all(known) {
            let m = format!("`{}` is no update of a parameter with these states", op.mnemonic());
            let help = "leave `fused` out: the rule's own lines are run";
            return Err(rule.diag(*wrong(*at, 5, m).help(help)));
        }
        Ok(Some(op))
    }

    /// The text of an op's attributes with numbers for names; `i` is that of the iteration.
    pub(super) fn numbers(&self, text: &str, i: Option<f64>) -> Result<String, String> {
        let known = |name: &str, at: Option<f64>| match (name, i) {
            ("i", Some(i)) => Ok(i),
            _other => number_of(&self.attrs, name, at),
        };
        let one = |piece: &str| {
            let (key, value) = match piece.split_once('=') {
                Some((key, value)) => (format!("{key}="), value),
                None => (String::new(), piece),
            };
            let value = value.trim();
            let word = value.strip_prefix('$').and_then(|n| match self.attrs.get(n) {
                Some(AttrValue::Word(word)) => Some(word.clone()),
                _other => None,
            });
            let value = match word {
                Some(word) => word,
                None if value.contains('$') => {
                    let x = evaluate(value, &known)?;
                    // Sizes are whole numbers, and have names.
                    let is_size = !key.is_empty() && x.fract() == 0.0 && x.is_finite();
                    if is_size { format!("{x}") } else { format!("{x:?}") }
                }
                None => value.into(),
            };
            Ok::<_, String>(key + &value)
        };
        let all: Result<Vec<String>, String> = text.split(';').map(one).collect();
        Ok(all?.join(";"))
    }

    /// The rule as a function of a whole parameter of this shape. Roles have no names.
    ///
    /// # Errors
    /// `update-rule` and those of ops and types, with the line.
    pub fn func(&self, shape: &[usize]) -> Result<Func, Diag> {
        let mut f = Func::new("update");
        let own = self.write(&mut f, shape);
        own.map_err(|f| self.rule.diag(*f))?;
        Ok(f)
    }

    fn write(&self, f: &mut Func, shape: &[usize]) -> Res<()> {
        let rule = &*self.rule;
        let (batch, inner) = shape.split_at(usize::from(self.stack));
        let letters = rule.letters(inner).unwrap_or_default();
        let mut known: HashMap<String, Made> = HashMap::default();
        for a in &rule.args {
            let sizes: Option<Vec<usize>> = match &a.dims {
                UpdateDims::Any => Some(inner.to_vec()),
                UpdateDims::Letters(l) => {
                    let size = |l: &char| letters.iter().find(|s| s.0 == *l).map(|s| s.1);
                    l.iter().map(size).collect()
                }
            };
            let sizes = sizes.ok_or_else(|| {
                let m = format!("`%{}` has dims that its parameter has not", a.name);
                wrong(a.at, a.name.len() + 1, m).help("use letters of the parameter's dims")
            })?;
            let kind = match &a.kind {
                ArgKind::Param => RoleKind::Param,
                ArgKind::Grad => RoleKind::Grad,
                ArgKind::State(name, _) => RoleKind::State(*name),
                ArgKind::Scalar(_) => RoleKind::Scalar,
            };
            let stacked = self.stack && kind != RoleKind::Scalar;
            let sizes: Vec<usize> =
                batch.iter().copied().filter(|_| stacked).chain(sizes).collect();
            let name = match &a.kind {
                ArgKind::Scalar(name) => name,
                _other => "",
            };
            let ty = Type::new(self.dtype(a)?, &sizes);
            let value = f.arg(ty, Name::parse(&a.name), Some(Role::new(kind, name)));
            known.insert(a.name.clone(), Made { value, stacked });
        }
        let mesh = Mesh::default();
        let b = Builder::new(&mesh, f);
        let rank = inner.len();
        let mut w = Writer { u: self, b, known, rank, i: None, begins: vec![], lines: 0, ops: 0 };
        w.lines_of(&rule.body)?;
        let outputs =
            rule.args.iter().filter(|a| matches!(a.kind, ArgKind::Param | ArgKind::State(..)));
        let wanted = outputs.clone().count();
        if rule.results.len() != wanted {
            let m = format!("{} values are returned, not {wanted}", rule.results.len());
            return Err(wrong(rule.at, rule.name.len() + 1, m)
                .rule("a rule returns its parameter and then all of its states, in their order")
                .help("separate them by `;`, as in `return %p2; %m2`"));
        }
        for (a, e) in outputs.zip(&rule.results) {
            let made = w.expr(e)?;
            let old = w.known[&a.name].value;
            if w.b.ty(made.value) != w.b.ty(old) {
                let [is, was] = [made.value, old].map(|v| crate::text::type_text(&mesh, w.b.ty(v)));
                let m = format!("what is returned for `%{}` is {is}, not {was}", a.name);
                return Err(wrong(e.at(), 1, m).help(format!("return a value of type {was}")));
            }
            let role = w.b.f.args.iter().find(|x| x.value == old).and_then(|x| x.role.clone());
            w.b.f.results.push(Port { value: made.value, role });
        }
        Ok(())
    }
}

impl Expr {
    pub(super) fn at(&self) -> usize {
        match self {
            Expr::Value { at, .. } | Expr::Op { at, .. } => *at,
        }
    }
}
