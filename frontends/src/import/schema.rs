//! `models/model.json` of a `.pt2` archive, read as it streams by: what is not named here, stack traces
//! above all, is skipped without being kept.
//!
//! The format is `torch/_export/serde/schema.py`, of which major version 8 is known.

use super::graph::{Arg, Elem, Graph, Id, Input, IntArg, Node, Size, Source};
use super::regions::{self, NoGradValues};
use super::room;
use super::zip::{Zip, broken};
use crate::stored::StoredType;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use shardc_ir::diag::{Diag, Result};
use std::collections::HashMap;
use std::fmt;
use std::io::BufReader;
use std::sync::Arc;

/// Largest model.json that is read, in bytes.
const MAX_JSON: u64 = 512 << 20;
/// Letters of an expression that a message shows.
const SHOWN: usize = 60;
/// The major version of the schema.
const MAJOR: u64 = 8;
/// Most graphs within graphs.
const MAX_DEPTH: usize = 16;

/// Reads the program.
///
/// # Errors
/// `archive-version` for another major version; `archive` for what is no such program, or uses a value
/// before it is made.
pub(super) fn read(zip: &Zip, member: &str) -> Result<Graph> {
    let v: Versioned = json(zip, member)?;
    if v.schema_version.major != MAJOR {
        let got = v.schema_version.major;
        return Err(Diag::new("archive-version", format!("its schema is version {got}"))
            .at(zip.path.display().to_string())
            .rule(format!("archives of schema {MAJOR} are read: those of torch 2.6 to 2.15"))
            .help("export the model with such a torch"));
    }
    let p: Program = json(zip, member)?;
    let mut b = Build { zip, g: Graph::default(), still: NoGradValues::default() };
    b.program(p)?;
    Ok(b.g)
}

/// A member as JSON.
pub(super) fn json<T: for<'a> Deserialize<'a>>(zip: &Zip, member: &str) -> Result<T> {
    let reader = BufReader::with_capacity(1 << 16, zip.reader(member, MAX_JSON)?);
    serde_json::from_reader(reader)
        .map_err(|e| broken(&zip.path, format!("`{member}` is not what it should be: {e}")))
}

#[derive(Deserialize)]
struct Versioned {
    schema_version: Version,
}

#[derive(Deserialize)]
struct Version {
    major: u64,
}

#[derive(Deserialize)]
struct Program {
    graph_module: GraphModule,
    #[serde(default)]
    range_constraints: HashMap<String, RangeConstraint>,
}

#[derive(Deserialize)]
struct RangeConstraint {
    min_val: Option<i64>,
    max_val: Option<i64>,
}

#[derive(Deserialize)]
struct GraphModule {
    graph: RawGraph,
    signature: Signature,
}

#[derive(Deserialize)]
pub(super) struct RawGraph {
    pub inputs: Vec<RawArg>,
    pub outputs: Vec<RawArg>,
    pub nodes: Vec<RawNode>,
    pub tensor_values: HashMap<String, TensorMeta>,
}

/// What is known of a tensor without its numbers.
#[derive(Deserialize)]
pub(super) struct TensorMeta {
    pub dtype: u32,
    pub sizes: Vec<RawSize>,
    #[serde(default)]
    pub strides: Vec<RawSize>,
    pub storage_offset: Option<RawSize>,
    pub requires_grad: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawSize {
    AsInt(i64),
    AsExpr { expr_str: String },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawInt {
    AsInt(i64),
    AsName(String),
}

#[derive(Deserialize)]
pub(super) struct RawNode {
    pub target: String,
    pub inputs: Vec<NamedArg>,
    pub outputs: Vec<RawArg>,
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Deserialize, Default)]
struct Metadata {
    nn_module_stack: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct NamedArg {
    name: String,
    pub arg: RawArg,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct NamedGraph {
    graph: RawGraph,
}

#[derive(Deserialize)]
struct Signature {
    input_specs: Vec<HashMap<String, Spec>>,
}

/// Where an argument comes from: its name is under one of these.
#[derive(Deserialize)]
struct Spec {
    arg: Option<SpecArg>,
    parameter_name: Option<String>,
    buffer_name: Option<String>,
    tensor_constant_name: Option<String>,
}

#[derive(Deserialize)]
struct SpecArg {
    name: Option<String>,
    as_tensor: Option<Named>,
}

/// A number, or a word for one that JSON has no digits for.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Digits(f64),
    Word(String),
}

impl Number {
    fn value(&self) -> f64 {
        match self {
            Number::Digits(x) => *x,
            Number::Word(w) => w.parse().unwrap_or(f64::NAN),
        }
    }
}

pub(super) enum RawArg {
    None,
    Tensor(String),
    Tensors(Vec<Option<String>>),
    Int(RawInt),
    Ints(Vec<RawInt>),
    Float(f64),
    Floats(Vec<f64>),
    Bool(bool),
    Text(String),
    Dtype(u32),
    Graph(Box<RawGraph>),
    Other(String),
}

impl<'de> Deserialize<'de> for RawArg {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<RawArg, D::Error> {
        d.deserialize_map(ArgVisitor)
    }
}

struct ArgVisitor;

impl<'de> Visitor<'de> for ArgVisitor {
    type Value = RawArg;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an argument, such as {\"as_int\": 1}")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut m: A) -> std::result::Result<RawArg, A::Error> {
        let Some(kind) = m.next_key::<String>()? else { return Ok(RawArg::None) };
        let names = |all: Vec<Named>| all.into_iter().map(|n| Some(n.name)).collect();
        let arg = match kind.as_str() {
            "as_tensor" => RawArg::Tensor(m.next_value::<Named>()?.name),
            "as_tensors" => RawArg::Tensors(names(m.next_value()?)),
            "as_optional_tensors" => {
                let all: Vec<RawArg> = m.next_value()?;
                let one = |a| if let RawArg::Tensor(n) = a { Some(n) } else { None };
                RawArg::Tensors(all.into_iter().map(one).collect())
            }
            "as_int" => RawArg::Int(RawInt::AsInt(m.next_value()?)),
            "as_sym_int" => RawArg::Int(m.next_value()?),
            "as_ints" => {
                let all: Vec<i64> = m.next_value()?;
                RawArg::Ints(all.into_iter().map(RawInt::AsInt).collect())
            }
            "as_sym_ints" => RawArg::Ints(m.next_value()?),
            "as_float" => RawArg::Float(m.next_value::<Number>()?.value()),
            "as_floats" => {
                let all: Vec<Number> = m.next_value()?;
                RawArg::Floats(all.iter().map(Number::value).collect())
            }
            "as_bool" => RawArg::Bool(m.next_value()?),
            "as_string" => RawArg::Text(m.next_value()?),
            "as_scalar_type" => RawArg::Dtype(m.next_value()?),
            "as_graph" => RawArg::Graph(Box::new(m.next_value::<NamedGraph>()?.graph)),
            "as_none" => {
                m.next_value::<IgnoredAny>()?;
                RawArg::None
            }
            _ => {
                m.next_value::<IgnoredAny>()?;
                RawArg::Other(kind)
            }
        };
        while m.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(arg)
    }
}

/// The name in `Symbol('s72', positive=True, integer=True)`.
fn symbol(expr: &str) -> Option<&str> {
    let name = expr.strip_prefix("Symbol('")?.split('\'').next()?;
    let plain = !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
    (plain && name.len() <= SHOWN && expr.matches('(').count() == 1).then_some(name)
}

/// The path in the last entry of `key,path,class;key,path,class`.
fn scope(stack: &str) -> &str {
    let last = stack.rsplit(';').next().unwrap_or("");
    let mut parts = last.splitn(3, ',');
    let path = parts.nth(1).unwrap_or("");
    let path = path.split('@').next().unwrap_or("");
    if path.starts_with('_') { "" } else { path }
}

pub(super) type Names = HashMap<String, Id>;

/// A program as it is read.
pub(super) struct Build<'a> {
    zip: &'a Zip,
    g: Graph,
    pub still: NoGradValues,
}

impl Build<'_> {
    pub fn bad(&self, what: String) -> Diag {
        broken(&self.zip.path, what)
    }

    fn id(&mut self, name: &str) -> Id {
        self.g.names.push(name.into())
    }

    fn program(&mut self, p: Program) -> Result<()> {
        let size = |x: Option<i64>, or: usize| x.map_or(or, |x| usize::try_from(x).unwrap_or(0));
        let ranges = p.range_constraints.into_iter();
        let mut ranges: Vec<_> = ranges
            .map(|(n, r)| (n.as_str().into(), size(r.min_val, 0), size(r.max_val, usize::MAX)))
            .collect();
        ranges.sort_unstable();
        self.g.ranges = ranges;
        let mut names = Names::new();
        let graph = p.graph_module.graph;
        self.inputs(&graph, &p.graph_module.signature, &mut names)?;
        self.nodes(graph.nodes, &mut names, 0)?;
        self.truths(&graph.tensor_values, &names);
        let cast = |n: &&Node| n.args.iter().any(|(_, a)| matches!(a, Arg::Elem(Elem::Bool)));
        let cast = self.g.nodes.iter().filter(cast).flat_map(|n| n.outs.iter().copied());
        self.g.truths.extend(cast);
        for o in &graph.outputs {
            if let RawArg::Tensor(n) = o {
                let id = self.known(&names, n)?;
                let id = self.still.read(&mut self.g, id);
                self.g.outputs.push(id);
            }
        }
        self.still.mark(&mut self.g);
        Ok(())
    }

    fn inputs(&mut self, g: &RawGraph, s: &Signature, names: &mut Names) -> Result<()> {
        let mut sources: HashMap<&str, Source> = HashMap::new();
        for spec in s.input_specs.iter().flat_map(|m| m.values()) {
            let arg = spec.arg.as_ref();
            let arg = arg.and_then(|a| {
                a.name.as_deref().or_else(|| a.as_tensor.as_ref().map(|t| t.name.as_str()))
            });
            let constant = spec.buffer_name.as_ref().or(spec.tensor_constant_name.as_ref());
            let source = match (&spec.parameter_name, constant) {
                (Some(p), _) => Source::Param(p.as_str().into()),
                (None, Some(c)) => Source::Constant(c.as_str().into()),
                (None, None) => Source::Input,
            };
            if let Some(arg) = arg {
                sources.insert(arg, source);
            }
        }
        for a in &g.inputs {
            let name = match a {
                RawArg::Tensor(n) => n,
                // What the program was exported with is a number in it.
                RawArg::None | RawArg::Bool(_) | RawArg::Float(_) | RawArg::Text(_) => continue,
                _ => return Err(self.bad("an input of the program is not a tensor".into())),
            };
            let meta = g.tensor_values.get(name);
            let meta =
                meta.ok_or_else(|| self.bad(format!("nothing says the shape of `{name}`")))?;
            let elem = StoredType::of_torch(meta.dtype).map(Elem::of);
            let elem = elem
                .ok_or_else(|| self.bad(format!("`{name}` has elements of type {}", meta.dtype)))?;
            let sizes = meta.sizes.iter().map(|s| match s {
                RawSize::AsInt(n) => usize::try_from(*n).ok().map(Size::Fixed),
                RawSize::AsExpr { expr_str: e } => Some(match symbol(e) {
                    Some(s) => Size::Symbol(s.into()),
                    None => Size::Other(e.chars().take(SHOWN).collect::<String>().into()),
                }),
            });
            let sizes: Option<Vec<Size>> = sizes.collect();
            let sizes = sizes.ok_or_else(|| self.bad(format!("a size of `{name}` is negative")))?;
            let fixed =
                sizes.iter().filter_map(|s| if let Size::Fixed(n) = s { Some(*n) } else { None });
            if room::elements(&fixed.collect::<Vec<_>>()).is_none() {
                return Err(self.bad(format!("`{name}` has more than 2^48 elements")));
            }
            let source = sources.get(name.as_str()).cloned().unwrap_or(Source::Input);
            let id = self.bind(names, name)?;
            let frozen = meta.requires_grad == Some(false);
            self.g.inputs.push(Input { id, source, elem, sizes, frozen });
        }
        Ok(())
    }

    fn bind(&mut self, names: &mut Names, name: &str) -> Result<Id> {
        let id = self.id(name);
        match names.insert(name.to_string(), id) {
            None => Ok(id),
            Some(_) => Err(self.bad(format!("two values are called `{name}`"))),
        }
    }

    pub fn known(&self, names: &Names, name: &str) -> Result<Id> {
        let id = names.get(name).copied();
        id.ok_or_else(|| self.bad(format!("`{name}` is used before it is made")))
    }

    /// Marks those of a graph's values that are truth values.
    pub fn truths(&mut self, all: &HashMap<String, TensorMeta>, names: &Names) {
        let is =
            |meta: &TensorMeta| StoredType::of_torch(meta.dtype).map(Elem::of) == Some(Elem::Bool);
        let of = all.iter().filter(|(_, meta)| is(meta)).filter_map(|(name, _)| names.get(name));
        self.g.truths.extend(of);
    }

    pub fn nodes(&mut self, nodes: Vec<RawNode>, names: &mut Names, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(self.bad(format!("more than {MAX_DEPTH} graphs are within each other")));
        }
        for n in nodes {
            if regions::INLINED.contains(&n.target.as_str()) {
                self.inline(n, names, depth)?;
                continue;
            }
            let op = n.target.strip_prefix("torch.ops.aten.").unwrap_or(&n.target);
            let mut args = vec![];
            for a in &n.inputs {
                args.push((Arc::from(a.name.as_str()), self.arg(&a.arg, names)?));
            }
            let scope = scope(n.metadata.nn_module_stack.as_deref().unwrap_or(""));
            let (op, scope) = (op.into(), scope.into());
            let mut outs = vec![];
            for o in n.outputs.iter().flat_map(made) {
                outs.push(self.bind(names, o)?);
            }
            let n = Node { op, args, outs, scope };
            self.still.made(&mut self.g, &n);
            self.g.nodes.push(n);
        }
        Ok(())
    }

    /// A tensor as a node reads it.
    fn tensor(&mut self, names: &Names, name: &str) -> Result<Id> {
        let id = self.known(names, name)?;
        Ok(self.still.read(&mut self.g, id))
    }

    fn arg(&mut self, a: &RawArg, names: &Names) -> Result<Arg> {
        let int = |i: &RawInt| match i {
            RawInt::AsInt(n) => Ok(IntArg::Is(*n)),
            RawInt::AsName(n) => self.known(names, n).map(IntArg::Of),
        };
        Ok(match a {
            RawArg::None => Arg::None,
            RawArg::Tensor(n) => Arg::Value(self.tensor(names, n)?),
            RawArg::Tensors(all) => {
                let mut one =
                    |n: &Option<String>| n.as_ref().map(|n| self.tensor(names, n)).transpose();
                Arg::Values(all.iter().map(&mut one).collect::<Result<_>>()?)
            }
            RawArg::Int(i) => match int(i)? {
                IntArg::Is(n) => Arg::Int(n),
                IntArg::Of(id) => Arg::Value(id),
            },
            RawArg::Ints(all) => Arg::Ints(all.iter().map(int).collect::<Result<_>>()?),
            RawArg::Float(x) => Arg::Float(*x),
            RawArg::Floats(all) => Arg::Floats(all.clone()),
            RawArg::Bool(x) => Arg::Bool(*x),
            RawArg::Text(t) => Arg::Text(t.as_str().into()),
            RawArg::Dtype(d) => match StoredType::of_torch(*d) {
                Some(s) => Arg::Elem(Elem::of(s)),
                None => Arg::Other("as_scalar_type".into()),
            },
            RawArg::Graph(_) => Arg::Other("as_graph".into()),
            RawArg::Other(kind) => Arg::Other(kind.as_str().into()),
        })
    }
}

/// The names that an output, or an argument of a graph, stands for.
pub(super) fn made(o: &RawArg) -> Vec<&str> {
    match o {
        RawArg::Tensor(n) | RawArg::Int(RawInt::AsName(n)) => vec![n],
        RawArg::Tensors(all) => all.iter().flatten().map(String::as_str).collect(),
        _ => vec![],
    }
}
