//! `shardc reshard`: a checkpoint as another mesh would write it, or as a Hugging Face folder.

use super::saving::{CHECKPOINTS, HowToSave, apart, place_of, prepare, same_model, write};
use serde_json::json;
use shardc_compiler::retarget;
use shardc_frontends::check_target;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::plan::Plan;
use shardc_ir::weights::Weight;
use shardc_passes::options::{CpSplit, Options, Order, TpMode};
use shardc_plans::adapters::{self, Merge};
use shardc_plans::flags::Flags;
use shardc_plans::stored::Stored;
use shardc_plans::{axes, rules};
use shardc_process::terminal::{json_line, note, show};
use shardc_runtime::holdings::{Holding, holdings};
use shardc_train::checkpoint::{self, Reached, Saved};
use shardc_train::lock;
use std::path::PathBuf;

/// Flags of `reshard`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Reshard {
    /// A checkpoint, or a folder of checkpoints, of which the latest is taken
    pub dir: PathBuf,
    /// hf for a Hugging Face folder, peft for the folder of an adapter, or a mesh: dp_shard=8
    #[arg(long, value_name = "hf|peft|MESH")]
    pub to: String,
    /// With --to hf, add adapters to the weights of the base model
    #[arg(long)]
    pub merge: bool,
    /// Folder to write: the model, or the folder of the checkpoint
    #[arg(short, long)]
    pub output: PathBuf,
    /// ZeRO stage on that mesh [default: that of the checkpoint's plan]
    #[arg(long)]
    pub zero: Option<u8>,
    /// With --to hf and --to peft, the model folder that provides the tokenizer and element types, and the weights that
    /// adapters are added to [default: that of the checkpoint's plan]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    #[command(flatten)]
    pub saving: HowToSave,
}

/// Runs the command.
///
/// # Errors
/// `checkpoint` if it is none or its data are not those that were written; those of compiling for
/// the mesh, and of writing.
pub fn reshard(how: &Reshard, as_json: bool) -> Result<i32> {
    let saved = Saved::open(&how.dir)?;
    saved.verify(0, 1)?;
    let stored = saved.plan()?;
    let written = match how.to.as_str() {
        "hf" | "peft" => to_model(&saved, &stored, how)?,
        mesh => to_mesh(&saved, &stored, mesh, how)?,
    };
    match as_json {
        true => show(json_line(
            "reshard",
            json!({ "written": written, "step": saved.step, "to": how.to }),
        )),
        false => note(format!("wrote {}, of step {}", written.display(), saved.step)),
    }
    Ok(0)
}

fn to_model(saved: &Saved, stored: &Stored, how: &Reshard) -> Result<PathBuf> {
    if let Some(zero) = how.zero {
        return Err(Diag::new("flag", "--zero is for checkpoints: a saved model is not sharded")
            .at(format!("--zero {zero}"))
            .help("leave --zero out"));
    }
    with_adapters(how, stored.options.lora.is_some())?;
    let base = how.base.as_deref();
    if let Some(dir) = base.filter(|b| !same_model(b, &stored.config)) {
        let what = match dir.join("config.json").is_file() {
            true => "the config.json in this folder is not that of the checkpoint's plan",
            false => "this is not a model folder: it has no config.json",
        };
        return Err(Diag::new("flag", what)
            .at(format!("--base {}", dir.display()))
            .help("give the folder of the model that was trained from, or leave --base out"));
    }
    let to = place_of(&how.output)?;
    apart(to.path(), base, stored, &how.saving)?;
    check_target(&to, how.saving.force)?;
    let _lock = lock::of_model(&to, &how.dir)?;
    let saving = prepare(&how.saving, base, stored)?;
    let read = |w: &Weight| {
        let ranges: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
        let mut out = vec![0.0; w.shape.iter().product()];
        let role = Role::new(RoleKind::Param, w.param.as_str());
        saved.read(&role, &w.shape, &ranges, &mut out)?;
        Ok(out)
    };
    if !how.merge {
        let saving = adapters::saving(stored, saving)?;
        return write(&to, &stored.config, &adapters::saved(stored)?, &saving, read);
    }
    let merge = Merge::open(stored, base)?;
    saved.check_base(Some(merge.base()), &stored.plan)?;
    let mut get = |w: &Weight| match saved.leaves_out(&Role::new(RoleKind::Param, &*w.param)) {
        true => Ok(None),
        false => read(w).map(Some),
    };
    let mut worst = 0.0f32;
    let dir = write(&to, &stored.config, &merge.all(), &saving, |w| {
        let values = merge.weight(w, &mut get)?;
        let rounded = saving.rounded(&w.tensor, &stored.config);
        let most = values.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
        let off = values.iter().fold(0.0f32, |m, &x| m.max((rounded(x) - x).abs()));
        worst = worst.max(if merge.has(w) { off / most } else { 0.0 });
        Ok(values)
    })?;
    note(format!(
        "rounding changes merged weights by up to {worst:.1e} of the largest of their tensor"
    ));
    Ok(dir)
}

/// Refuses what a checkpoint without adapters cannot become, and one with them as a whole model without their sum.
fn with_adapters(how: &Reshard, has: bool) -> Result<()> {
    let refuse =
        |flag: String, what: &str, help: &str| Err(Diag::new("flag", what).at(flag).help(help));
    match (&*how.to, how.merge, has) {
        ("peft", true, _) => refuse(
            "--merge".into(),
            "--to peft writes the adapters alone",
            "use --to hf --merge for a model, or leave --merge out",
        ),
        ("peft", _, false) => refuse(
            "--to peft".into(),
            "the checkpoint has no adapters",
            "use --to hf; plans with adapters are compiled with --lora",
        ),
        ("hf", false, true) => refuse(
            "--to hf".into(),
            "the checkpoint has adapters and not the model that they belong to",
            "use --to hf --merge for a model without adapters, or --to peft for the adapters",
        ),
        ("hf", true, false) => {
            refuse("--merge".into(), "the checkpoint has no adapters to merge", "leave --merge out")
        }
        _fine => Ok(()),
    }
}

fn to_mesh(saved: &Saved, stored: &Stored, mesh: &str, how: &Reshard) -> Result<PathBuf> {
    how.saving.refuse_for(CHECKPOINTS, false)?;
    if let Some(base) = &how.base {
        return Err(Diag::new("flag", "--base is for models: a checkpoint has its plan's")
            .at(format!("--base {}", base.display()))
            .help("leave --base out, or use --to hf"));
    }
    if !mesh.contains('=') && !mesh.trim().is_empty() {
        return Err(Diag::new("flag", format!("`{mesh}` is neither hf nor a mesh"))
            .at(format!("--to {mesh}"))
            .help("use --to hf, or a mesh such as --to dp_shard=8"));
    }
    let to_flag = |d: Diag| match &d.place {
        Some(p) if p.starts_with("--mesh") => d.clone().at(format!("--to {mesh}")),
        _ => d,
    };
    if how.merge {
        return Err(Diag::new("flag", "--merge is for --to hf: a checkpoint keeps its adapters")
            .at("--merge")
            .help("leave --merge out, or use --to hf --merge"));
    }
    let plan = plan_for(stored, mesh, how.zero).map_err(to_flag)?;
    let to = place_of(&how.output)?;
    let _lock = lock::of_checkpoints(&to, &how.dir)?;
    let base = saved.base.as_ref();
    let reached = Reached { step: saved.step, run: saved.run.as_ref(), scale: saved.scale, base };
    let mut ranks = holdings(&plan)?;
    ranks.iter_mut().for_each(|all| all.retain(|h| !saved.leaves_out(&h.role)));
    checkpoint::write_all(to.path(), reached, stored, &ranks, |h: &Holding| {
        let ranges: Vec<_> = h.offset.iter().zip(&h.len).map(|(&at, &n)| at..at + n).collect();
        let mut out = vec![0.0; h.len.iter().product()];
        saved.read(&h.role, &h.shape, &ranges, &mut out)?;
        Ok(out)
    })
}

/// The model on another mesh. What a step does there is of no interest: its batch is the smallest
/// that this mesh can take.
fn plan_for(stored: &Stored, mesh: &str, zero: Option<u8>) -> Result<Plan> {
    let zero = zero.unwrap_or(stored.options.zero);
    let flags = Flags::default().with("mesh", mesh).try_with("zero", zero)?;
    let new = flags.options()?;
    let size = |axis: &str| new.mesh.iter().find(|a| a.0 == axis).map_or(1, |a| a.1);
    let mut o = Options {
        mesh: new.mesh.clone(),
        zero,
        ep: new.ep,
        etp: new.etp,
        sp: false,
        // Weights are the same whichever tokens a rank has.
        cp_split: Some(CpSplit::Contiguous),
        tp_mode: TpMode::OneD,
        schedule: Order::default(),
        chunks: None,
        layers: String::new(),
        speeds: vec![],
        shard: vec![],
        memory: None,
        observe: false,
        microbatch: 1,
        seq: 2 * size("cp") * size("tp"),
        ..stored.options.clone()
    };
    o.global_batch = o.data_parallel() * size("pp");
    if stored.facts.is_none() {
        // A text has the sizes that it has.
        (o.seq, o.microbatch) = (stored.options.seq, stored.options.microbatch);
        o.global_batch = stored.options.global_batch;
    }
    // A checkpoint for a mesh that nothing can run on helps nobody.
    if let Some(f) = &stored.facts {
        axes::misnamed(&o)?;
        if let Some(v) = rules::violations(f, &o).first() {
            // What would be legal besides is of runs, with flags that are none of this command.
            let mut d = v.diag();
            d.help.clear();
            return Err(d.help("use a mesh that compile takes for this model, as --to dp_shard=8"));
        }
    }
    Ok(retarget(stored, &o)?.stored.plan)
}
