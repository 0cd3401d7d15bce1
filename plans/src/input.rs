//! A model before it is compiled: from a folder, an archive, or a text.

use shardc_frontends::import::{DEFAULT, Opened, Raise, Sizes, split_as};
use shardc_frontends::{Balance, Facts, Model, Shape};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::documents::Documents;
use shardc_ir::func::{Fill, Func, Input as Filled, Module, Part, Port, RoleKind};
use shardc_ir::mesh::Mesh;
use shardc_ir::names::nearest;
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::source::Source;
use shardc_ir::verify::verify;
use shardc_ir::{files, text};
use shardc_passes::lora;
use shardc_passes::options::Options;
use std::path::Path;

/// A model before compilation: from a Hugging Face folder, or from text.
pub struct Input {
    pub source: Source,
    pub family: String,
    pub facts: Option<Facts>,
    pub config: serde_json::Value,
    /// The folder that it came from.
    pub origin: Option<String>,
    /// What people call it: the name of its folder or file.
    pub name: Option<String>,
    /// Tensors that an archive does not train.
    pub frozen: Vec<String>,
    /// Other names of tensors to which something is tied, each with the tensor.
    pub tied: Vec<[String; 2]>,
    pub warnings: Vec<Diag>,
}

/// The sizes that options give to a model.
pub fn shape(o: &Options) -> Shape {
    let b = o.balance;
    let balance = Balance { aux: b.aux, z: b.z, load: b.rate != 0.0 };
    let (batch, dropout) = (o.microbatch_rows(), o.dropout);
    let packed = o.documents.is_some();
    let padded = o.documents.is_some_and(Documents::pads);
    Shape { batch, seq: o.seq, mode: o.mode, balance, dropout, mtp: o.mtp, packed, padded }
}

/// The facts of a model that is not text.
pub fn facts(path: &Path) -> Result<Option<Facts>> {
    let known = !is_text(path) && !is_archive(path);
    if known { shardc_frontends::facts(path).map(Some) } else { Ok(None) }
}

/// Mesh, rows of a microbatch over all ranks, and tokens of a row, as a text has them, or an archive where
/// it fixes them.
#[derive(Clone, Default, Debug)]
pub struct Brought {
    pub mesh: Vec<(String, usize)>,
    pub rows: Option<usize>,
    pub seq: Option<usize>,
}

impl Brought {
    /// Those of a text; nothing if it has no input of a batch.
    pub fn of(m: &Module) -> Option<Brought> {
        let f = m.funcs.first()?;
        let inputs = || f.args.iter().filter_map(|a| Some((f.ty(a.value), a.input()?)));
        let batch = inputs().find(|x| x.1.batch)?.0;
        let tokens = inputs().find_map(|(t, own)| Some(t.dims.get(own.tokens()?)?.size));
        let mesh = m.mesh.axes.iter().map(|a| (a.name.clone(), a.size)).collect();
        // A row without tokens counts as one.
        Some(Brought { mesh, rows: Some(batch.dims.first()?.size), seq: tokens.or(Some(1)) })
    }
}

/// Largest text of a model that is read, in bytes.
const MAX_TEXT: u64 = 64 << 20;
/// The same of the config beside an archive.
const MAX_CONFIG: u64 = 16 << 20;

/// Reads a Hugging Face folder, its config.json, an archive of `torch.export`, or a `.ir` file, with the adapters that
/// are asked for.
pub fn read_model(path: &Path, o: &Options) -> Result<Input> {
    adapted(Input { name: name_of(path), ..read(path, o)? }, o)
}

/// A model with the adapters that options ask for, which one of a plan's own text has already.
///
/// # Errors
/// Those of [`lora::adapt`].
pub fn adapted(mut input: Input, o: &Options) -> Result<Input> {
    o.lora.iter().try_for_each(|l| lora::adapt(&mut input.source, l))?;
    Ok(input)
}

/// What people call the model at a path: of a file its name, of a folder that of the folder, of one in Hugging
/// Face's cache the name there.
fn name_of(path: &Path) -> Option<String> {
    let folder = if path.is_dir() { path } else { files::make::parent(path) };
    let folder = std::fs::canonicalize(folder).ok()?;
    let text = |x: &std::ffi::OsStr| x.to_str().map(String::from);
    let cached = path.components().rev().find_map(|c| {
        let hub = c.as_os_str().to_str()?.strip_prefix("models--")?;
        Some(hub.split_once("--").map_or(hub, |x| x.1).to_string())
    });
    let file = || path.file_stem().filter(|stem| *stem != "config" && path.is_file());
    cached.or_else(|| file().or_else(|| folder.file_name()).and_then(text))
}

fn read(path: &Path, o: &Options) -> Result<Input> {
    if is_archive(path) {
        let sizes = Sizes { rows: o.microbatch_rows(), seq: o.seq };
        let opened = Opened::read(path)?.drops(o.dropout);
        let mut m = opened.import(sizes, o.mode, Raise::default())?;
        let mut config = config_beside(path)?;
        shardc_frontends::unquantize(&mut config);
        split_as(&mut m.source, &plan_of(&config, path)?);
        has_loss(&m.source, path, o)?;
        one_microbatch(m.one_microbatch.filter(|_| o.mode == Mode::Train), path, o)?;
        let (frozen, tied, warnings) = (m.frozen, m.tied, m.warnings);
        // What a saved model needs beside its weights lies there, if the config does.
        let origin = Some(folder_of(path)).filter(|_| config != empty());
        return Ok(Input {
            frozen,
            tied,
            warnings,
            config,
            origin,
            ..without_facts(m.source, PROGRAMS[1])
        });
    }
    if is_text(path) {
        let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, s)| (n.as_str(), *s)).collect();
        let mut input = read_text(path, &Mesh::new(&axes)?)?;
        if o.balance.aux.is_some() || o.balance.z != 0.0 {
            let what = "--moe-aux and --moe-z-loss change nothing: the losses of a text model are part of the text";
            input.warnings.push(Diag::new("no-effect", what).help("leave them out"));
        }
        if o.mtp != 0.0 {
            let what = "--mtp has no effect: the losses of a text model are part of the text";
            input.warnings.push(Diag::new("no-effect", what).help("leave it out"));
        }
        if o.dropout != Dropout::Nothing {
            let what = "--dropout has no effect: dropout of a text model is part of the text";
            input.warnings.push(Diag::new("no-effect", what).help("leave it out"));
        }
        input.warnings.extend(unused(&input.source.module.funcs[0]));
        let mut roles = input.source.module.funcs[0].results.iter().filter_map(|r| r.role.as_ref());
        if o.balance.rate != 0.0 && !roles.any(|r| r.kind == RoleKind::TokensPerExpert) {
            let what = "--moe-bias-rate has no effect: the text does not count choices of experts";
            input.warnings.push(Diag::new("no-effect", what).help("leave it out"));
        }
        return Ok(input);
    }
    let mut input = from_model(shardc_frontends::load(path, &shape(o))?);
    input.origin = Some(if path.is_dir() { whole(path) } else { folder_of(path) });
    Ok(input)
}

/// The path of a folder, links followed.
fn whole(dir: &Path) -> String {
    std::fs::canonicalize(dir).unwrap_or_else(|_| dir.into()).display().to_string()
}

/// The folder of a file, which may itself be a link, as those of caches are: what belongs to it lies beside the link.
fn folder_of(file: &Path) -> String {
    whole(files::make::parent(file))
}

/// Reads a `.ir` file; a text without a mesh asks for shardings on this one.
fn read_text(path: &Path, mesh: &Mesh) -> Result<Input> {
    let text = files::read_text(path, MAX_TEXT)?;
    let file = path.display().to_string();
    model_of_text(&text, mesh).map_err(|d| text::in_file(d, &text, &file))
}

/// A warning for what a text has and no result depends on, and for each input whose name is nearly one that means
/// something by itself.
fn unused(f: &Func) -> Vec<Diag> {
    let mut read = f.per_value(false);
    f.results.iter().for_each(|r| read[r.value] = true);
    for n in f.nodes.iter().rev().filter(|n| !n.outs.is_empty()) {
        if n.outs.iter().any(|o| read[o]) {
            n.ins.iter().for_each(|v| read[v] = true);
        }
    }
    let args = f.args.iter().map(|a| a.value);
    // Of a node that has several results some may be left.
    let made = f.nodes.iter().filter(|n| n.outs.iter().all(|o| !read[o]));
    let all = args.filter(|v| !read[v]).chain(made.map(|n| n.outs[0]));
    let names: Vec<String> = all.map(|v| format!("`{}`", f.name(v))).collect();
    let what = |names: &str, is: &str| {
        Diag::new("no-effect", format!("{names} {is} no effect: no result depends on it"))
            .at(format!("@{}", f.name))
            .help("take it out of the text, or use it")
    };
    let mut out: Vec<Diag> = match &names[..] {
        [] => vec![],
        [one] => vec![what(one, "has")],
        [first, rest @ ..] => {
            let more = rest.len();
            let others = count(more, "other value", "other values");
            let all =
                if more < LISTED { names.join(", ") } else { format!("{first} and {others}") };
            vec![what(&all, "have")]
        }
    };
    for a in &f.args {
        let Some((role, own)) = a.role.as_ref().zip(a.input()) else { continue };
        let named = |p: &Port, name: &str| {
            p.role.as_ref().is_some_and(|r| r.kind.input().is_some() && &*r.name == name)
        };
        let there = |name: &str| f.args.iter().any(|p| named(p, name));
        let known = Filled::KNOWN.into_iter().filter(|n| !there(n));
        let near = nearest(&role.name, known.filter(|n| n.len() > 3), 1);
        if let (Fill::Column, Some(near)) = (own.fill, near.first()) {
            let what = format!("input \"{}\" is a column of the data", role.name);
            let help =
                format!("did you mean \"{near}\", which is filled by itself? Then rename it");
            out.push(Diag::new("no-effect", what).at(format!("@{}", f.name)).help(help));
        }
    }
    out
}

/// Most values that a warning lists.
const LISTED: usize = 8;

/// The model of a `.ir` file, for this mesh if it has none; nothing if the model is not text.
///
/// # Errors
/// Those of reading and parsing it.
pub fn text_source(path: &Path, mesh: &Mesh) -> Result<Option<Source>> {
    if is_text(path) { Ok(Some(read_text(path, mesh)?.source)) } else { Ok(None) }
}

/// Rows of a microbatch over all ranks and tokens of a row, where an archive fixes them; nothing if the model is
/// none.
///
/// # Errors
/// Those of reading it.
pub fn brought(path: &Path) -> Result<Option<Brought>> {
    if !is_archive(path) {
        return Ok(None);
    }
    let [rows, seq] = Opened::read(path)?.fixed(DEFAULT);
    Ok(Some(Brought { rows, seq, ..Brought::default() }))
}

/// Refuses to train an archive that computes no loss.
fn has_loss(source: &Source, path: &Path, o: &Options) -> Result<()> {
    let results = &source.module.funcs[0].results;
    let is_loss = |p: &Port| p.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum);
    if o.mode == Mode::Infer || results.iter().any(is_loss) {
        return Ok(());
    }
    Err(Diag::new("no-loss", "the archive returns no loss to train")
        .at(path.display().to_string())
        .rule("the loss is an output of the module: a mean cross-entropy, or another scalar")
        .help("export a module that also takes the labels, or targets, and returns its loss first, as in \
               forward(self, x, y): out = self.model(x); return mse_loss(out, y), out")
        .help("or compile with --mode infer (in Python: mode=\"infer\")"))
}

/// Refuses several microbatches of a loss that is not the mean of theirs.
fn one_microbatch(why: Option<&str>, path: &Path, o: &Options) -> Result<()> {
    let n = o.microbatches();
    let Some(why) = why.filter(|_| n > 1) else { return Ok(()) };
    let rows = o.global_batch / o.data_parallel().max(1);
    Err(Diag::new("import-loss", format!("the loss of {n} microbatches is not the mean of theirs"))
        .at(path.display().to_string())
        .why(why)
        .help(format!("use --microbatch {rows}, which is one microbatch"))
        .help("or return a mean over labels or rows, or sums of such means"))
}

/// The config.json beside an archive; without one an empty object.
fn config_beside(archive: &Path) -> Result<serde_json::Value> {
    let path = archive.with_file_name("config.json");
    if !path.is_file() {
        return Ok(empty());
    }
    let text = files::read_text(&path, MAX_CONFIG)?;
    let wrong = |what: String| {
        Diag::new("config", what)
            .at(path.display().to_string())
            .rule("config.json beside an archive is that of its model: an object of JSON")
            .help("move the archive or the file to another folder")
    };
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    if json.is_object() { Ok(json) } else { Err(wrong("it is not an object of JSON".into())) }
}

fn empty() -> serde_json::Value {
    serde_json::json!({})
}

/// How the modules of an archive are split: `base_model_tp_plan` of its config, if it says so.
fn plan_of(config: &serde_json::Value, archive: &Path) -> Result<Vec<(String, String)>> {
    let wrong = |what: String| {
        Diag::new("config", what)
            .at(archive.with_file_name("config.json").display().to_string())
            .rule("base_model_tp_plan is an object of words by globs of modules")
            .help("write { \"layers.*.mlp.up_proj\": \"colwise\" }, or leave it out")
    };
    let plan = match config.get("base_model_tp_plan") {
        None | Some(serde_json::Value::Null) => return Ok(vec![]),
        Some(plan) => {
            plan.as_object().ok_or_else(|| wrong("base_model_tp_plan is not an object".into()))?
        }
    };
    let word = |(glob, word): (&String, &serde_json::Value)| match word.as_str() {
        Some(word) => Ok((glob.clone(), word.to_string())),
        None => Err(wrong(format!("base_model_tp_plan of `{glob}` is not a word"))),
    };
    plan.iter().map(word).collect()
}

/// True if a path leads to an archive of `torch.export`, by its name.
pub fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "pt2")
}

pub fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "ir")
}

pub fn from_model(m: Model) -> Input {
    let tied = m.tied().into_iter().collect();
    let (vocab, updates) = (m.facts.vocab, String::new());
    let source =
        Source { module: m.module, weights: m.weights, sequence: m.sequence, vocab, updates };
    Input {
        source,
        family: m.family.into(),
        facts: Some(m.facts),
        config: m.config,
        origin: None,
        name: None,
        frozen: vec![],
        tied,
        warnings: m.warnings,
    }
}

/// Reads a model of one function; parameters are its arguments with role `param`.
pub fn from_text(text: &str) -> Result<Input> {
    model_of_text(text, &Mesh::default())
}

fn model_of_text(text: &str, mesh: &Mesh) -> Result<Input> {
    let source = text::parse_source_on(text, mesh)?;
    verify(&source.module, Phase::Source).map_err(|mut all| all.swap_remove(0))?;
    let m = &source.module;
    let is_cut = |f: &Func| {
        f.scopes.iter().any(|s| s.stage > 0) || f.nodes.iter().any(|n| n.part != Part::Forward)
    };
    if m.phase != Phase::Source || !m.params.is_empty() || m.funcs.iter().any(is_cut) {
        let what = "a model says nothing of phases, layouts, stages and parts: passes add them";
        return Err(Diag::new("source", what).help(
            "take out `phase`, `layout` and what follows the paths of scopes, or see `shardc opt`",
        ));
    }
    if source.module.funcs.len() != 1 {
        let n = source.module.funcs.len();
        return Err(Diag::new("source", format!("a model is one function, the text has {n}"))
            .help("put everything into one `func @model`"));
    }
    Ok(without_facts(source, PROGRAMS[0]))
}

/// What stands for a family where there is none: a text's, and an archive's.
pub const PROGRAMS: [&str; 2] = ["ir", "pt2"];

/// A model of which nothing is known but its program.
fn without_facts(source: Source, family: &str) -> Input {
    Input {
        source,
        family: family.into(),
        facts: None,
        config: empty(),
        origin: None,
        name: None,
        frozen: vec![],
        tied: vec![],
        warnings: vec![],
    }
}
