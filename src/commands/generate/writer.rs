//! A model that says what follows: where it comes from, and a session of it for texts of some length.

use super::Generate;
use super::last::{AT, at_one_position};
use crate::commands::run::{Run, Start, session};
use serde_json::Value as Json;
use shardc_frontends::Checkpoint;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::func::{Fill, InputRow, RoleKind, inputs};
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::source::Source;
use shardc_passes::lora::Lora;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{self, Manager};
use shardc_plans::adapters::same_factors;
use shardc_plans::again::source_for;
use shardc_plans::flags::adapter_of;
use shardc_plans::input::{self, is_archive, read_model};
use shardc_plans::stored::Stored;
use shardc_plans::{hub, plan_dir};
use shardc_process::terminal::{doing, note};
use shardc_runtime::session::{Session, StepBatch};
use shardc_runtime::{Columns, Numbers};
use shardc_train::checkpoint::Saved;
use std::path::{Path, PathBuf};

/// Largest config.json that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;
/// Shortest text that a session is made for, in tokens.
const SHORTEST: usize = 128;

/// What was named.
enum From {
    /// A folder, an archive or a text.
    Model(PathBuf),
    Plan(Box<Stored>),
    Checkpoint(Box<Stored>),
}

/// A model that says what follows.
pub struct Writer<'a> {
    how: &'a Generate,
    from: From,
    /// Of a checkpoint, until it is opened for good.
    saved: Option<Saved>,
    start: Option<Start>,
    options: Options,
    /// Rows and tokens, where the model fixes them.
    rows: usize,
    fixed: Option<usize>,
    /// Longest text, where that is known.
    pub most: Option<usize>,
    /// Up to so many tokens positions turn otherwise than beyond.
    original: Option<usize>,
    /// Folders that may have what belongs to the model, in order.
    folders: Vec<PathBuf>,
    pub config: Json,
    open: Option<Open>,
}

/// A session for texts of at most so many tokens.
struct Open {
    seq: usize,
    vocab: usize,
    session: Session,
    table: Vec<InputRow>,
}

impl<'a> Writer<'a> {
    /// Finds out what is named, and where its weights are.
    ///
    /// # Errors
    /// `file` for what is none of a checkpoint, a plan or a model; `flag`, `missing-weights`, and those of reading them.
    pub fn open(how: &'a Generate) -> Result<Writer<'a>> {
        let path = &how.from;
        let is_plan = path.join("plan.json").is_file();
        let is_model = path.is_file() || path.join("config.json").is_file();
        let weights = how.weights.as_deref().map(hub::resolved).transpose()?;
        let (from, saved) = match (is_plan, is_model || hub::is_name(path)) {
            (true, _) => (From::Plan(Box::new(plan_dir::read(path)?)), None),
            (_, true) => (From::Model(hub::resolved(path)?), None),
            _checkpoint => {
                let known = "it is a checkpoint, a plan, or a model: a folder with config.json, .pt2 or .ir";
                let named = |d: Diag| if d.code == "file" { d.rule(known) } else { d };
                let saved = Saved::open(path).map_err(named)?;
                saved.verify(0, 1)?;
                (From::Checkpoint(Box::new(saved.plan()?)), Some(saved))
            }
        };
        let (known, config) = match &from {
            From::Model(m) if m.is_dir() => (Some(m.clone()), read_config(m)?),
            From::Model(m) => (Some(files::make::parent(m).to_path_buf()), Json::Null),
            From::Plan(s) | From::Checkpoint(s) => {
                (s.origin.clone().map(PathBuf::from), s.config.clone())
            }
        };
        let folders = weights.into_iter().chain(known).collect();
        let mut w = Writer {
            how,
            from,
            saved,
            start: None,
            options: Options::default(),
            rows: 1,
            fixed: None,
            most: None,
            original: original(&config),
            folders,
            config,
            open: None,
        };
        w.sized()?;
        Ok(w)
    }

    /// The options of the model's forward pass, and the sizes that it has.
    fn sized(&mut self) -> Result<()> {
        let how = self.how;
        let own = match &self.from {
            From::Model(m) => {
                if let Some(b) = input::brought(m)? {
                    (self.rows, self.fixed) = (b.rows.unwrap_or(1), b.seq);
                }
                self.most = shardc_plans::input::facts(m)?.map(|f| f.max_positions);
                None
            }
            From::Plan(s) | From::Checkpoint(s) => {
                self.most = s.facts.map(|f| f.max_positions);
                if s.facts.is_none() {
                    (self.rows, self.fixed) = (s.options.microbatch_rows(), Some(s.options.seq));
                }
                Some(&**s)
            }
        };
        self.most = self.fixed.or(self.most);
        let lora = match (&how.adapter, own) {
            (Some(dir), None) => Some(adapter_of("--adapter", dir)?),
            (Some(_), Some(s)) if s.options.lora.is_none() => {
                return Err(Diag::new("flag", "the plan has no adapters")
                    .at("--adapter")
                    .help("name the model's folder in place of the plan"));
            }
            (Some(_), Some(_)) if self.saved.is_some() => {
                return Err(Diag::new("flag", "a checkpoint has an adapter of its own")
                    .at("--adapter")
                    .help(
                        "leave it out, or name the plan or the model in place of the checkpoint",
                    ));
            }
            (_, own) => own.and_then(|s| s.options.lora.clone()),
        };
        self.options = Options {
            mode: Mode::Infer,
            global_batch: self.rows,
            microbatch: self.rows,
            dtype: how.dtype.or(own.map(|s| s.options.dtype)).unwrap_or(Options::default().dtype),
            lora: lora.map(|l| Lora { dropout: 0.0, ..l }),
            documents: own.filter(|s| s.facts.is_none()).and_then(|s| s.options.documents),
            ..Options::default()
        };
        Ok(())
    }

    /// The folder that has a file of the model.
    pub fn folder_with(&self, file: &str) -> Option<&PathBuf> {
        self.folders.iter().find(|f| f.join(file).is_file())
    }

    /// Folders that are looked for files of the model.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// The model before any pass, for texts of so many tokens.
    fn source(&self, o: &Options) -> Result<Source> {
        match &self.from {
            From::Model(m) => Ok(read_model(m, o)?.source),
            From::Plan(s) | From::Checkpoint(s) => source_for(s, o),
        }
    }

    fn plan(&self, seq: usize) -> Result<Plan> {
        let o = Options { seq, ..self.options.clone() };
        let mut source = self.source(&o)?;
        source.module.mesh = Default::default();
        source.module.funcs[0].annotations.clear();
        at_one_position(&mut source)?;
        Ok(pipeline::compile_with(source, &o, Manager::default())?.plan)
    }

    /// Where the weights of a plan come from.
    fn start(&mut self, plan: &Plan) -> Result<Start> {
        let given = self.how.weights.as_deref().map(hub::resolved).transpose()?;
        let is_archive = |m: &Path| m.is_file() && is_archive(m);
        let known = match &self.from {
            From::Model(m) => Some(m.clone()).filter(|m| m.is_dir() || is_archive(m)),
            From::Plan(s) | From::Checkpoint(s) => s.origin.clone().map(PathBuf::from),
        };
        let Some(saved) = self.saved.take() else {
            let from = given.or(known).ok_or_else(|| {
                Diag::new("missing-weights", "it is not known where the weights are")
                    .at(self.how.from.display().to_string())
                    .help("add --weights with the folder of the model")
            })?;
            let adapter = self.how.adapter.as_deref();
            let start = Start::open(Some(&from), adapter, plan).map_err(|d| {
                let help = d.code == "missing-weights";
                let d = if help { Diag { help: vec![], ..d } } else { d };
                if help { d.help("add --weights with the folder of the model") } else { d }
            })?;
            if let (From::Plan(s), Some(dir)) = (&self.from, adapter) {
                same_factors(s, dir)?;
            }
            return Ok(start);
        };
        let own = known.filter(|k| given.is_none() && saved.needs_base() && k.is_dir());
        if let Some(base) = &own {
            note(format!("the base model is that in {}", base.display()));
        }
        let base = given.or(own).map(|w| Start::weights(&w, plan)).transpose()?;
        let base: Option<Checkpoint> = base;
        saved.check_base(base.as_ref(), plan)?;
        Ok(Start::Resumed(Box::new(saved), base))
    }

    /// How many tokens a session has in which so many fit.
    fn length(&self, tokens: usize) -> usize {
        if let Some(n) = self.fixed {
            return n;
        }
        let n = tokens.next_power_of_two().max(SHORTEST);
        let n = self.original.filter(|&o| tokens <= o).map_or(n, |o| n.min(o));
        self.most.map_or(n, |most| n.min(most))
    }

    fn opened(&mut self, tokens: usize) -> Result<&mut Open> {
        let seq = self.length(tokens);
        if self.open.as_ref().is_none_or(|o| o.seq < seq) {
            doing("compiling");
            // What there is makes room first.
            self.open = None;
            let plan = self.plan(seq)?;
            let table = inputs(&plan.module);
            let known = [Fill::Tokens, Fill::Mask, Fill::Segments];
            let feeds = |r: &&InputRow| {
                let column = !r.input.fill.is_data() || known.contains(&r.input.fill);
                !column && &*r.name != AT
            };
            if let Some(r) = table.iter().find(feeds) {
                return Err(Diag::new(
                    "data",
                    format!("the model takes `{}` beside tokens", r.name),
                )
                .rule("generate gives a model tokens alone")
                .help("export or write a model of input_ids that returns logits"));
            }
            let start = match self.start.take() {
                Some(start) => start,
                None => self.start(&plan)?,
            };
            doing("reading the weights");
            let run = Run {
                device: self.how.device,
                threads: self.how.threads,
                kernels: self.how.kernels,
                timeout: 600,
                ..Run::default()
            };
            let session = session(&plan, &start, &run)?;
            self.start = Some(start);
            self.open = Some(Open { seq, vocab: plan.settings.vocab, session, table });
        }
        Ok(self.open.as_mut().expect("just made"))
    }

    /// Logits of the token behind a text.
    ///
    /// # Errors
    /// `token-range`, those of compiling, and of a session.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let rows = self.rows;
        let Open { seq, vocab, session, table, .. } = self.opened(ids.len())?;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= *vocab) {
            return Err(Diag::new("token-range", format!("the text has token {id}"))
                .why(format!("the model has {vocab} tokens"))
                .rule("a token is in 0..vocab_size")
                .help("use the tokenizer of this model: --tokenizer DIR"));
        }
        let (n, seq) = (ids.len(), *seq);
        let mut columns = Columns::new();
        for r in table.iter() {
            let row: Vec<i32> = match r.input.fill {
                Fill::Tokens => (0..seq).map(|i| ids.get(i).map_or(0, |&id| id as i32)).collect(),
                Fill::Mask => (0..seq).map(|i| i32::from(i < n)).collect(),
                Fill::Segments => (0..seq).map(|i| if i < n { 0 } else { -1 }).collect(),
                _ if &*r.name == AT => vec![n as i32 - 1],
                _other => continue,
            };
            columns.insert(r.name.to_string(), Numbers::I32(row.repeat(rows)));
        }
        // Step 0: nothing is dropped.
        let done = session.step(&StepBatch { columns, observe: true }, 0.0, 0)?;
        let logits = done.output(RoleKind::Output, "logits").map(|a| &a.data[..]);
        let logits = logits.expect("the plan shows them");
        Ok(logits[..logits.len() / rows].to_vec())
    }
}

/// The config.json of a folder.
pub fn read_config(dir: &Path) -> Result<Json> {
    read_json(&dir.join("config.json"))
}

/// A file of JSON of a model's folder; null if there is none.
///
/// # Errors
/// `config` if it is not JSON.
pub fn read_json(path: &Path) -> Result<Json> {
    if !path.is_file() {
        return Ok(Json::Null);
    }
    serde_json::from_str(&files::read_text(path, MAX_CONFIG)?).map_err(|e| {
        Diag::new("config", format!("it is not JSON: {e}"))
            .at(path.display().to_string())
            .help("write it again with save_pretrained of transformers")
    })
}

/// How many tokens a model was made for before its positions were stretched.
fn original(config: &Json) -> Option<usize> {
    let map = config.as_object()?;
    let own = map.get("original_max_position_embeddings").and_then(Json::as_u64);
    own.map(|n| n as usize).filter(|&n| n > 0).or_else(|| map.values().find_map(original))
}
