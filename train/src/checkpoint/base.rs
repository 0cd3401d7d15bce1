//! The base model of checkpoints that have adapters alone: what tells it from others.

use super::Saved;
use serde::{Deserialize, Serialize};
use shardc_frontends::Checkpoint;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, io_error};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::plan::Plan;
use shardc_ir::weights::Weight;
use shardc_plans::adapters;
use shardc_plans::stored::Stored;
use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes at the beginning and at the end of a tensor that its hash is of: reading all of a model would take minutes.
const ENDS: u64 = 64 << 10;

/// A model whose adapters are trained.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseModel {
    /// Its weights were drawn.
    Random { seed: u64 },
    /// Those of files: a hash of names, shapes, element types, and of both ends of each tensor.
    Files { blake3: String },
}

impl BaseModel {
    /// That of files, as far as a plan has its tensors.
    ///
    /// # Errors
    /// `io`.
    pub fn of(c: &Checkpoint, weights: &[Weight]) -> Result<BaseModel> {
        let own = weights.iter().filter(|w| !w.is_adapter());
        let names: BTreeSet<String> = own.flat_map(Weight::tensors).collect();
        let mut hasher = blake3::Hasher::new();
        for name in names {
            let Some(e) = c.get(&name) else { continue };
            hasher.update(format!("{name} {:?} {:?}\n", e.shape, e.dtype).as_bytes());
            let (start, end) = (e.bytes.start, e.bytes.end);
            let first = start..end.min(start.saturating_add(ENDS));
            let last = end.saturating_sub(ENDS).max(first.end)..end;
            hash(c.file(e), first, &mut hasher)?;
            hash(c.file(e), last, &mut hasher)?;
        }
        Ok(BaseModel::Files { blake3: hasher.finalize().to_hex().to_string() })
    }
}

/// Adds bytes of a file to a hash.
fn hash(path: &Path, bytes: Range<u64>, hasher: &mut blake3::Hasher) -> Result<()> {
    let fail = |e: std::io::Error| io_error("cannot read the tensor", path, &e);
    let (mut file, _) = files::open(path)?;
    file.seek(SeekFrom::Start(bytes.start)).map_err(fail)?;
    let mut read = vec![];
    file.take(bytes.end - bytes.start).read_to_end(&mut read).map_err(fail)?;
    hasher.update(&read);
    Ok(())
}

/// What checkpoints of a plan with adapters leave out: parameters that are not trained, which are the base model's.
#[derive(Clone, Debug, Default)]
pub struct LeftOut {
    params: Arc<BTreeSet<String>>,
    pub base: Option<BaseModel>,
}

impl LeftOut {
    /// That of a plan; nothing without adapters.
    ///
    /// # Errors
    /// Those of the globs of its options.
    pub fn of(stored: &Stored, base: Option<BaseModel>) -> Result<LeftOut> {
        let params = if base.is_some() { adapters::frozen(stored)? } else { BTreeSet::new() };
        Ok(LeftOut { params: Arc::new(params), base })
    }

    /// True for a parameter of the base model.
    pub fn has(&self, role: &Role) -> bool {
        role.kind == RoleKind::Param && self.params.contains(&*role.name)
    }
}

impl Saved {
    /// The seed of a base model that was drawn.
    pub fn seed(&self) -> Option<u64> {
        match &self.base {
            Some(BaseModel::Random { seed }) => Some(*seed),
            _other => None,
        }
    }

    /// Whether its parameters stand beside those of files.
    pub fn needs_base(&self) -> bool {
        matches!(self.base, Some(BaseModel::Files { .. }))
    }

    /// The command that makes a model of it.
    pub fn becomes(&self) -> String {
        let merge = if self.base.is_some() { " --merge" } else { "" };
        format!("shardc reshard {} --to hf{merge} -o DIR", self.dir().display())
    }

    /// Refuses a base model that is not the one whose adapters the checkpoint has.
    ///
    /// # Errors
    /// `lora-base`.
    pub fn check_base(&self, base: Option<&Checkpoint>, plan: &Plan) -> Result<()> {
        let wrong = |what: &str| {
            Diag::new("lora-base", what)
                .at(self.dir().display().to_string())
                .rule("a checkpoint of adapters goes on beside the model that they were trained on")
        };
        let adapters = plan.weights.iter().any(Weight::is_adapter);
        match (&self.base, base) {
            (None, _) if adapters => Err(wrong(
                "the checkpoint is of a whole model, the plan trains adapters",
            )
            .help(format!(
                "begin with its model: {}, then --weights DIR in place of --resume",
                self.becomes()
            ))),
            (None, None) => Ok(()),
            (Some(_), _) if !adapters => Err(wrong(
                "the checkpoint has adapters alone, the plan has none",
            )
            .help("resume with the plan that wrote it, or one that was compiled with its --lora")
            .help(format!(
                "or begin with its model: {}, then --weights DIR in place of --resume",
                self.becomes()
            ))),
            (None, Some(_)) => {
                Err(wrong("the checkpoint has all parameters: --weights adds nothing")
                    .help("leave --weights out"))
            }
            (Some(BaseModel::Random { .. }), None) => Ok(()),
            (Some(BaseModel::Files { .. }), None) => {
                Err(wrong("the checkpoint has adapters alone: the base model is missing")
                    .help("add --weights with the folder of the base model"))
            }
            (Some(BaseModel::Random { seed }), Some(_)) => {
                let what = format!("the base model was drawn, from seed {seed}: no files have it");
                Err(wrong(&what).help(
                    "leave --weights out to resume; what is to be merged begins with --weights",
                ))
            }
            (Some(known), Some(c)) => match BaseModel::of(c, &plan.weights)? == *known {
                true => Ok(()),
                false => Err(wrong("the checkpoint was trained on another base")
                    .why(format!("the weights in {} are not those of that run", c.dir().display()))
                    .help("give --weights the folder that the run began with")),
            },
        }
    }
}
