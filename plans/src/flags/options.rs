//! What flags ask of the passes: options, with defaults where nothing is asked for.

use super::spec::{Given, all};
use super::text::{default_microbatch, global_batch, rows_of};
use super::values::*;
use super::{Flags, read_hardware};
use crate::input::Brought;
use crate::machine;
use shardc_frontends::AdapterConfig;
use shardc_ir::axes::{self, AxisRole};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::Documents;
use shardc_ir::files;
use shardc_ir::hardware::Hardware;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Dropout;
use shardc_ir::text::update::Rules;
use shardc_ir::types::DType;
use shardc_passes::lora::Lora;
use shardc_passes::optim::HIDDEN;
use shardc_passes::options::{Balance, Buffers, Optimizer, Options, TpMode};
use shardc_passes::stages::layout::StageLayout;
use std::path::Path;

impl Flags {
    /// The options, with the defaults that a text brings.
    pub(super) fn options_with(&self, text: Option<&Brought>) -> Result<Options> {
        let mut given: Vec<String> = self.given().map(|(s, _)| s.flag.into()).collect();
        given.sort_unstable();
        let mut o = Options { given, ..Options::default() };
        self.ranks(&mut o, text)?;
        for (spec, value) in self.given() {
            (spec.set)(&mut o, &Given { spec, value, all: self })?;
        }
        if o.auto {
            self.left_to_price(&o)?;
        }
        self.agree(&o)?;
        if let Some(word) = self.text("hardware") {
            o.hardware = match machine::in_place_of_speeds(word)? {
                Some(device) => {
                    o.machine = Some(word.into());
                    machine::in_nodes(device, &o)?.hardware(&o.mesh, machine::precision(&o))?
                }
                None => links_of(read_hardware(Path::new(word))?, &o, word)?,
            };
        }
        self.batch(&mut o, text);
        Ok(o)
    }

    /// The mesh that flags name; that of a text is not among them.
    ///
    /// # Errors
    /// `mesh`, `flag`.
    pub fn own_mesh(&self) -> Result<Mesh> {
        let (axes, _) = self.axes()?;
        let axes = self.ordered(axes)?;
        Mesh::new(&axes.iter().map(|(n, s)| (n.as_str(), *s)).collect::<Vec<_>>())
    }

    /// The axes of `--mesh`; `--zero` says what dp means.
    fn axes(&self) -> Result<Axes> {
        let zero = self.whole("zero").unwrap_or(0) as u8;
        parse_mesh(self.text("mesh").unwrap_or(""), self.whole("gpus"), zero)
    }

    fn ordered(&self, axes: Vec<(String, usize)>) -> Result<Vec<(String, usize)>> {
        self.text("order").map_or(Ok(axes.clone()), |order| in_order(axes, order))
    }

    /// The mesh, and how experts are split over it.
    fn ranks(&self, o: &mut Options, text: Option<&Brought>) -> Result<()> {
        let (mut mesh, [ep, etp]) = self.axes()?;
        if let (false, Some(text)) = (self.has("mesh"), text) {
            mesh.clone_from(&text.mesh);
        }
        o.mesh = self.ordered(mesh)?;
        (o.ep, o.etp) = (ep.unwrap_or(1), etp);
        Ok(())
    }

    /// Refuses options that do not go together.
    fn agree(&self, o: &Options) -> Result<()> {
        if o.grad_dtype != DType::F32 && o.grad_dtype != o.dtype {
            let word = o.grad_dtype.name();
            return Err(Diag::new("flag", format!("--grad-dtype {word} is for weights of {word}"))
                .at(format!("--grad-dtype {word}"))
                .help(format!(
                    "add --dtype {word}, or leave it out: gradients are f32 (4 bytes)"
                )));
        }
        if o.dropout != Dropout::Nothing && o.tp_mode != TpMode::OneD {
            return Err(Diag::new("not-built", "dropout on a grid of ranks is not built yet")
                .at(format!("--dropout {}", self.text("dropout").unwrap_or_default()))
                .help("use --tp-mode 1d, or --dropout 0"));
        }
        adapters(self, o)
    }

    /// Refuses what says how something is cut, where prices do.
    pub fn left_to_price(&self, o: &Options) -> Result<()> {
        let cuts = all().filter(|s| s.cuts && self.has(s.flag)).map(|s| format!("--{}", s.flag));
        let another = (!o.shard.is_empty()).then(|| "another --shard".to_string());
        let experts = (o.ep > 1 || o.etp.is_some()).then(|| "ep and etp in --mesh".to_string());
        match another.into_iter().chain(cuts).chain(experts).next() {
            None => Ok(()),
            Some(flag) => Err(Diag::new("flag", format!("{flag} beside --shard auto"))
                .rule("--shard auto chooses how everything is cut")
                .help(format!("leave out {flag}, or --shard auto"))),
        }
    }

    /// Batch, microbatch and sequence.
    fn batch(&self, o: &mut Options, text: Option<&Brought>) {
        o.global_batch = self.whole("global-batch").unwrap_or(global_batch(text));
        o.seq = self.whole("seq").or(text.and_then(|t| t.seq)).unwrap_or(o.seq);
        o.microbatch = match (self.whole("microbatch"), text.and_then(|t| t.rows)) {
            (Some(n), _) => n,
            (None, Some(rows)) => rows_of(rows, o),
            (None, None) => default_microbatch(o),
        };
    }
}

pub(super) fn read_dropout(o: &mut Options, g: &Given) -> Result<()> {
    let word = g.text();
    o.dropout = match (word, word.parse::<f64>()) {
        ("config", _) => Dropout::Config,
        (_, Ok(0.0)) => Dropout::Nothing,
        (_, Ok(p)) if p > 0.0 && p < 1.0 => Dropout::Rate(p),
        _ => {
            return Err(Diag::new("flag", format!("`{word}` is not a value of --dropout"))
                .at(format!("--dropout {word}"))
                .help("use config, or a rate from 0 to below 1"));
        }
    };
    Ok(())
}

/// The optimizer and its constants, and groups of parameters that have others.
pub(super) fn read_optimizer(o: &mut Options, g: &Given) -> Result<()> {
    let word = g.all.text("optimizer").unwrap_or("adamw");
    if word == "sgd" {
        o.optimizer = Optimizer::Sgd;
    }
    o.optim = match word {
        "lion" | "adafactor" => vec![format!("*={word}")],
        "muon" => vec![format!("{HIDDEN}=muon")],
        _of_all => vec![],
    };
    if let (Some(own), "lion", Some(given)) = (o.optim.first_mut(), word, g.all.text("betas")) {
        let (beta1, beta2) = betas(given)?;
        *own += &format!(",beta1={beta1:?},beta2={beta2:?}");
    }
    if let (Some(own), "muon", Some(dtype)) = (o.optim.first_mut(), word, g.all.text("muon-dtype"))
    {
        *own += &format!(",dtype={dtype}");
    }
    o.optim.extend_from_slice(g.all.many("optim"));
    let Optimizer::AdamW { beta1, beta2, eps } = &mut o.optimizer else { return Ok(()) };
    if let Some(given) = g.all.text("betas") {
        (*beta1, *beta2) = betas(given)?;
    }
    if let Some(given) = g.all.number("eps") {
        *eps = positive("--eps", given, "1e-8")?;
    }
    Ok(())
}

/// The text of update rules.
pub(super) fn read_rules(o: &mut Options, g: &Given) -> Result<()> {
    let path = g.text();
    o.optim_file = files::read_text(Path::new(path), MAX_RULES)?;
    Rules::parse(&o.optim_file, path)?;
    Ok(())
}

/// Most bytes of a text of update rules.
const MAX_RULES: u64 = 1 << 20;

/// The learning rate, step by step.
pub(super) fn read_rate(o: &mut Options, g: &Given) -> Result<()> {
    o.lr = g.all.rate(Options::default().lr)?;
    Ok(())
}

/// How the loss is scaled, where it is.
pub(super) fn read_loss_scaling(o: &mut Options, g: &Given) -> Result<()> {
    let given = |flag: &str| g.all.number(flag).map(|x| scale(&format!("--{flag}"), x)).transpose();
    let constant = given("loss-scale")?;
    let (first, least) = (given("initial-loss-scale")?, given("min-loss-scale")?);
    o.loss_scaling = LossScaling::default();
    if let Some(scale) = constant {
        o.loss_scaling = LossScaling::Constant { scale };
    }
    if let LossScaling::Dynamic { initial, min, window, hysteresis } = &mut o.loss_scaling {
        *initial = first.unwrap_or(*initial);
        *min = least.unwrap_or(*min);
        let count = |flag, was: u32| g.all.whole(flag).map_or(was, |n| n as u32);
        *window = count("loss-scale-window", *window);
        *hysteresis = count("hysteresis", *hysteresis);
        if *min > *initial {
            // As f32 they would be shown with fewer digits than they have.
            let (min, initial) = (f64::from(*min), f64::from(*initial));
            let what = format!("--min-loss-scale {min} is above the scale of the first step");
            return Err(Diag::new("flag", what)
                .at(format!("--initial-loss-scale {initial}"))
                .help(format!("use --min-loss-scale {initial} or less")));
        }
    }
    Ok(())
}

/// What keeps experts in balance.
pub(super) fn read_balance(o: &mut Options, g: &Given) -> Result<()> {
    let of = |flag: &str, example: &str| {
        let given = g.all.number(flag);
        given.map(|x| not_negative(&format!("--{flag}"), x, example)).transpose()
    };
    o.balance = Balance {
        aux: of("moe-aux", "0.01")?,
        z: of("moe-z-loss", "1e-3")?.unwrap_or(0.0),
        rate: of("moe-bias-rate", "1e-3")?.unwrap_or(0.0),
    };
    Ok(())
}

/// The weight of the loss of layers that predict tokens behind the next.
pub(super) fn read_mtp(o: &mut Options, g: &Given) -> Result<()> {
    o.mtp = match g.all.number("mtp") {
        Some(x) => not_negative("--mtp", x, "0.3")?,
        None => 0.0,
    };
    Ok(())
}

/// Layouts of single tensors, and whether prices choose all.
pub(super) fn read_shard(o: &mut Options, g: &Given) -> Result<()> {
    let rules = g.value.many().iter().filter(|s| *s != "auto");
    o.shard = rules.map(|s| shard_rule(s)).collect::<Result<_>>()?;
    o.auto = g.value.many().iter().any(|s| s == "auto");
    Ok(())
}

pub(super) fn read_schedule(o: &mut Options, g: &Given) -> Result<()> {
    o.schedule = schedule(g.text())?;
    Ok(())
}

pub(super) fn read_layers(o: &mut Options, g: &Given) -> Result<()> {
    o.layers = g.text().into();
    StageLayout::parse(&o.layers).map(drop)
}

pub(super) fn read_speeds(o: &mut Options, g: &Given) -> Result<()> {
    o.speeds = speeds(g.text(), o.axis("pp"))?;
    Ok(())
}

pub(super) fn read_memory(o: &mut Options, g: &Given) -> Result<()> {
    o.memory = Some(memory(g.text())?);
    Ok(())
}

pub(super) fn read_recompute(o: &mut Options, g: &Given) -> Result<()> {
    o.recompute = recompute(g.text())?;
    Ok(())
}

pub(super) fn read_loss_chunks(o: &mut Options, g: &Given) -> Result<()> {
    o.loss_chunks = loss_chunks(g.text())?;
    Ok(())
}

/// How large the buffers of experts are.
pub(super) fn read_buffers(o: &mut Options, g: &Given) -> Result<()> {
    let factor = |flag: &str, x: f64| -> Result<f64> {
        let x = positive(flag, x, "1.25")?;
        if x <= 1e6 { Ok(x) } else { positive(flag, f64::INFINITY, "1.25") }
    };
    o.moe = match (g.all.number("moe-bound"), g.all.number("moe-capacity")) {
        (None, None) => Buffers::Worst,
        (Some(x), None) if x > 0.0 && x < 1.0 => {
            let what = format!("--moe-bound {x} is less than a balanced load needs");
            return Err(Diag::new("flag", what)
                .at(format!("--moe-bound {x}"))
                .help("use --moe-bound 1.5, or --moe-capacity to drop what does not fit"));
        }
        (Some(x), None) => Buffers::Bound(factor("--moe-bound", x)?),
        (None, Some(x)) => Buffers::Capacity(factor("--moe-capacity", x)?),
        (Some(x), Some(y)) => {
            return Err(Diag::new("flag", "two sizes of the buffers of experts")
                .at(format!("--moe-bound {x} --moe-capacity {y}"))
                .rule("with a capacity no buffer is too small: what it has no room for is dropped")
                .help("give 1 of them"));
        }
    };
    Ok(())
}

pub(super) fn read_tp_mode(o: &mut Options, g: &Given) -> Result<()> {
    let depth = g.all.whole("tp-depth");
    o.tp_mode = match g.all.text("tp-mode") {
        Some("2d") => TpMode::TwoD,
        Some("2.5d") => TpMode::TwoAndHalfD { depth: depth.unwrap_or(2) },
        Some("3d") => TpMode::ThreeD,
        _one => TpMode::OneD,
    };
    match (depth, o.tp_mode) {
        (None, _) | (_, TpMode::TwoAndHalfD { .. }) => Ok(()),
        (Some(depth), mode) => Err(Diag::new("flag", format!("--tp-mode {mode} has no depth"))
            .at(format!("--tp-depth {depth}"))
            .help("use --tp-mode 2.5d, or leave it out")),
    }
}

/// Speeds with those of `dp` for the axes that it means here. Refuses speeds of axes that the mesh has not.
fn links_of(mut hw: Hardware, o: &Options, path: &str) -> Result<Hardware> {
    let has = |name: &str| o.mesh.iter().any(|a| a.0 == name);
    if let Some(dp) = hw.links.remove("dp").filter(|_| !o.mesh.is_empty()) {
        for name in axes::names(AxisRole::of_rows) {
            hw.links.entry(name.into()).or_insert(dp);
        }
    }
    let known = |name: &str| has(name) || axes::role(name).is_some_and(AxisRole::of_rows);
    match hw.links.keys().find(|name| !o.mesh.is_empty() && !known(name)) {
        None => Ok(hw),
        Some(name) => Err(Diag::new("hardware", format!("the mesh has no axis `{name}`"))
            .at(path.to_string())
            .rule("[links] has speeds of axes of the mesh")
            .help("name an axis of --mesh, or dp")),
    }
}

pub(super) fn read_documents(o: &mut Options, g: &Given) -> Result<()> {
    o.documents = Some(match g.text() {
        "rows" => Documents::ROWS,
        tokens => documents(tokens)?,
    });
    Ok(())
}

/// Reads tokens: `eod=ID` or `eod=ID,pad=ID`.
fn documents(text: &str) -> Result<Documents> {
    let wrong = |what: String| {
        Diag::new("flag", what)
            .at(format!("--documents {text}"))
            .rule("rows, or eod=ID, the token that ends a document, or eod=ID,pad=ID")
            .help("give the ids of the tokenizer, for example --documents eod=2,pad=0")
    };
    let (mut end, mut padding) = (None, None);
    for word in text.split(',') {
        let (key, id) = word.split_once('=').unwrap_or((word, ""));
        let to = match key.trim() {
            "eod" => &mut end,
            "pad" => &mut padding,
            _other => return Err(wrong(format!("`{word}` is not a token of documents"))),
        };
        let id = id.trim().parse::<i32>().ok().filter(|&id| id >= 0);
        let id = id.ok_or_else(|| wrong(format!("`{word}` has no token's number")))?;
        if to.replace(id).is_some() {
            return Err(wrong(format!("`{key}` is given twice")));
        }
    }
    let end = end.ok_or_else(|| wrong("no token ends a document".into()))?;
    Ok(Documents::ends(end, padding))
}

/// Adapters as those of a folder that PEFT wrote.
pub(super) fn read_adapter(g: &Given) -> Result<Lora> {
    adapter_of("--lora-from", Path::new(g.text()))
}

/// The adapters of a folder that PEFT wrote, which a flag names.
///
/// # Errors
/// Those of [`AdapterConfig::read`] and [`Lora::checked`].
pub fn adapter_of(flag: &str, dir: &Path) -> Result<Lora> {
    let flag = format!("{flag} {}", dir.display());
    let c = AdapterConfig::read(dir).map_err(|d| d.why(format!("{flag} reads it")))?;
    lora_of(c, flag)
}

/// Adapters as a configuration has them, which a flag names.
///
/// # Errors
/// Those of [`Lora::checked`].
pub fn lora_of(c: AdapterConfig, flag: String) -> Result<Lora> {
    let l = Lora {
        r: c.r,
        alpha: c.alpha,
        targets: c.targets,
        dropout: c.dropout,
        rslora: c.rslora,
        rank_pattern: c.rank_pattern,
        alpha_pattern: c.alpha_pattern,
        whole: c.whole,
    };
    l.checked().map_err(|d| d.at(flag).help("write it again with PEFT"))
}

/// Refuses what does not go together with adapters, or is nothing without them.
fn adapters(flags: &Flags, o: &Options) -> Result<()> {
    let refuse = |what: &str, flag: &str, help: &str| {
        Err(Diag::new("flag", what).at(format!("--{flag}")).help(help))
    };
    match &o.lora {
        None if !o.train.is_empty() => refuse(
            "--train names what is trained beside adapters, of which there are none",
            "train",
            "add --lora r=16, or name what is not trained with --freeze",
        ),
        None => Ok(()),
        Some(_) if flags.has("lora") && flags.has("lora-from") => refuse(
            "--lora and --lora-from both say what adapters are",
            "lora-from",
            "leave one of them out",
        ),
        Some(_) if !o.freeze.is_empty() => refuse(
            "--lora freezes all parameters of the base model: --freeze adds nothing",
            "freeze",
            "leave --freeze out; --train GLOB says what is trained beside adapters",
        ),
        Some(_) if o.tp_mode != TpMode::OneD => {
            Err(Diag::new("not-built", "adapters on a grid of ranks are not built yet")
                .at(format!("--tp-mode {}", o.tp_mode))
                .help("use --tp-mode 1d, or leave --lora out"))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_documents_are_read_or_refused() {
        let of = |end, padding| Ok(Documents::ends(end, padding));
        assert_eq!(documents("eod=2").map_err(|d| d.message), of(2, None));
        assert_eq!(documents("pad=0, eod=2").map_err(|d| d.message), of(2, Some(0)));
        assert_eq!(documents("eod=2,pad=2").map_err(|d| d.message), of(2, Some(2)));
        for bad in ["", "2", "eod", "eod=", "eod=-1", "eod=x", "pad=1", "eod=1,eod=2", "eos=1"] {
            assert_eq!(documents(bad).map_err(|d| d.code), Err("flag"), "{bad}");
        }
    }
}
