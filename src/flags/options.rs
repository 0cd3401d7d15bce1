//! What flags ask of the passes: options, with defaults where nothing is asked for.

use super::rate::Rate;
use super::text::{Brought, default_microbatch, global_batch, rows_of};
use super::values::*;
use super::{Flags, read_hardware};
use crate::machine;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::Documents;
use shardc_ir::hardware::Hardware;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::types::DType;
use shardc_passes::options::{
    Balance, Buffers, CpMode, CpSplit, Decay, Fuse, Optimizer, Options, TpMode, TpSteps, Transport,
};
use shardc_passes::shard::zero::Accumulate;
use shardc_passes::stages::layout::StageLayout;
use std::path::Path;

/// Largest batch and sequence: products of them with a mesh stay far from overflow.
const MAX_COUNT: usize = 1 << 30;

const DTYPES: [(&str, DType); 3] =
    [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];

impl Flags {
    /// The options, with the defaults that a text brings.
    pub(super) fn options_with(&self, text: Option<&Brought>) -> Result<Options> {
        self.refuse_unbuilt()?;
        let mut o = Options {
            sp: self.sp,
            seed: self.seed.unwrap_or(0),
            chunks: self.chunks,
            layers: self.layers.clone().unwrap_or_default(),
            given: self.given(),
            ..Options::default()
        };
        self.ranks(&mut o, text)?;
        self.types(&mut o)?;
        self.training(&mut o)?;
        self.splits(&mut o)?;
        self.schedules(&mut o)?;
        o.dropout = self.dropout(&o)?;
        o.documents = self.documents.as_deref().map(documents).transpose()?;
        self.batch(&mut o, text)?;
        Ok(o)
    }

    fn dropout(&self, o: &Options) -> Result<Dropout> {
        let Some(word) = &self.dropout else { return Ok(Dropout::Nothing) };
        let place = format!("--dropout {word}");
        let asked = match (word.as_str(), word.parse::<f64>()) {
            ("config", _) => Dropout::Config,
            (_, Ok(0.0)) => return Ok(Dropout::Nothing),
            (_, Ok(p)) if p > 0.0 && p < 1.0 => Dropout::Rate(p),
            _ => {
                return Err(Diag::new("flag", format!("`{word}` is not a value of --dropout"))
                    .at(place)
                    .help("use config, or a rate from 0 to below 1"));
            }
        };
        if o.tp_mode != TpMode::OneD {
            return Err(Diag::new("not-built", "dropout on a grid of ranks is not built yet")
                .at(place)
                .help("use --tp-mode 1d, or --dropout 0"));
        }
        Ok(asked)
    }

    /// The mesh that flags name; that of a text is not among them.
    ///
    /// # Errors
    /// `mesh`, `flag`.
    pub(crate) fn own_mesh(&self) -> Result<Mesh> {
        let word = self.mesh.as_deref().unwrap_or("");
        let (axes, _) = parse_mesh(word, self.gpus, self.zero.unwrap_or(0))?;
        let axes = self.ordered(axes)?;
        Mesh::new(&axes.iter().map(|(n, s)| (n.as_str(), *s)).collect::<Vec<_>>())
    }

    fn ordered(&self, axes: Vec<(String, usize)>) -> Result<Vec<(String, usize)>> {
        self.order.as_ref().map_or(Ok(axes.clone()), |order| in_order(axes, order))
    }

    /// Mesh, nodes, transport and ZeRO, which says what dp means.
    fn ranks(&self, o: &mut Options, text: Option<&Brought>) -> Result<()> {
        o.zero = self.zero.unwrap_or(0);
        if o.zero > 3 {
            return Err(Diag::new("flag", format!("--zero {} is not a stage of ZeRO", o.zero))
                .at(format!("--zero {}", o.zero))
                .help("use --zero 0, 1, 2 or 3"));
        }
        let (mut mesh, [ep, etp]) =
            parse_mesh(self.mesh.as_deref().unwrap_or(""), self.gpus, o.zero)?;
        if let (None, Some(text)) = (&self.mesh, text) {
            mesh.clone_from(&text.mesh);
        }
        o.mesh = self.ordered(mesh)?;
        (o.ep, o.etp, o.node) = (ep.unwrap_or(1), etp, self.node);
        if o.node == Some(0) {
            return Err(Diag::new("flag", "a node of 0 ranks")
                .at("--node 0")
                .help("for example --node 8"));
        }
        let accumulate = Accumulate::ALL.map(|a| (a.name(), a));
        choose(&mut o.zero_accumulate, &self.zero_accumulate, "--zero-accumulate", &accumulate)?;
        let yes_no = [("yes", true), ("no", false)];
        let again = &self.reshard_after_forward;
        choose(&mut o.reshard_after_forward, again, "--reshard-after-forward", &yes_no)?;
        let transports = Transport::ALL.map(|t| (t.name(), t));
        choose(&mut o.transport, &self.transport, "--transport", &transports)
    }

    /// Mode and element types.
    fn types(&self, o: &mut Options) -> Result<()> {
        let modes = [("train", Mode::Train), ("infer", Mode::Infer)];
        choose(&mut o.mode, &self.mode, "--mode", &modes)?;
        choose(&mut o.dtype, &self.dtype, "--dtype", &DTYPES)?;
        choose(&mut o.grad_dtype, &self.grad_dtype, "--grad-dtype", &DTYPES)?;
        if o.grad_dtype != DType::F32 && o.grad_dtype != o.dtype {
            let word = o.grad_dtype.name();
            return Err(Diag::new("flag", format!("--grad-dtype {word} is for weights of {word}"))
                .at(format!("--grad-dtype {word}"))
                .help(format!(
                    "add --dtype {word}, or leave it out: gradients are f32 (4 bytes)"
                )));
        }
        o.loss_scaling = self.loss_scaling()?;
        let fuse = [("yes", Fuse::Yes), ("rows", Fuse::Rows), ("no", Fuse::No)];
        choose(&mut o.fuse, &self.fuse, "--fuse", &fuse)
    }

    /// The optimizer, what it trains, and what backward computes again.
    fn training(&self, o: &mut Options) -> Result<()> {
        let optimizers = [("adamw", o.optimizer), ("sgd", Optimizer::Sgd)];
        choose(&mut o.optimizer, &self.optimizer, "--optimizer", &optimizers)?;
        if let Optimizer::AdamW { beta1, beta2, eps } = &mut o.optimizer {
            if let Some(given) = &self.betas {
                (*beta1, *beta2) = betas(given)?;
            }
            if let Some(given) = self.eps {
                *eps = positive("--eps", given, "1e-8")?;
            }
        }
        let decays = [("all", Decay::All), ("matrices", Decay::Matrices)];
        choose(&mut o.decay, &self.decay, "--decay", &decays)?;
        if let Some(by) = self.weight_decay {
            o.weight_decay = not_negative("--weight-decay", by, "0.1")?;
        }
        o.clip = self.clip.map(|c| positive("--clip", c, "1")).transpose()?;
        o.freeze.clone_from(&self.freeze);
        if let Some(text) = &self.recompute {
            o.recompute = recompute(text)?;
        }
        if let Some(text) = &self.loss_chunks {
            o.loss_chunks = loss_chunks(text)?;
        }
        self.rate(o)
    }

    /// How the loss is scaled, where it is.
    fn loss_scaling(&self) -> Result<LossScaling> {
        let given = |flag, x: Option<f64>| x.map(|x| scale(flag, x)).transpose();
        let [constant, first, least] = [
            given("--loss-scale", self.loss_scale)?,
            given("--initial-loss-scale", self.initial_loss_scale)?,
            given("--min-loss-scale", self.min_loss_scale)?,
        ];
        if let Some(scale) = constant {
            return Ok(LossScaling::Constant { scale });
        }
        let mut all = LossScaling::default();
        if let LossScaling::Dynamic { initial, min, window, hysteresis } = &mut all {
            *initial = first.unwrap_or(*initial);
            *min = least.unwrap_or(*min);
            let counts = [
                ("--loss-scale-window", self.loss_scale_window, window),
                ("--hysteresis", self.hysteresis, hysteresis),
            ];
            for (flag, given, to) in counts {
                *to = given.unwrap_or(*to);
                if *to == 0 {
                    return Err(Diag::new("flag", format!("{flag} 0"))
                        .at(format!("{flag} 0"))
                        .help(format!("use {flag} 1 or more")));
                }
            }
            if *min > *initial {
                // As f32 they would be shown with fewer digits than they have.
                let (min, initial) = (f64::from(*min), f64::from(*initial));
                let what = format!("--min-loss-scale {min} is above the scale of the first step");
                return Err(Diag::new("flag", what)
                    .at(format!("--initial-loss-scale {initial}"))
                    .help(format!("use --min-loss-scale {initial} or less")));
            }
        }
        Ok(all)
    }

    /// The learning rate, step by step.
    fn rate(&self, o: &mut Options) -> Result<()> {
        let given = Rate {
            lr: self.lr,
            lr_schedule: self.lr_schedule.clone(),
            warmup: self.warmup,
            total_steps: self.total_steps,
            min_lr: self.min_lr,
        };
        o.lr = given.over(o.lr)?;
        Ok(())
    }

    /// What is cut over the axes, and how.
    fn splits(&self, o: &mut Options) -> Result<()> {
        let rules = self.shard.iter().filter(|s| *s != "auto");
        o.shard = rules.map(|s| shard_rule(s)).collect::<Result<_>>()?;
        o.auto = self.shard.iter().any(|s| s == "auto");
        if o.auto {
            self.left_to_price(o)?;
        }
        if let Some(word) = &self.hardware {
            o.hardware = match machine::in_place_of_speeds(word)? {
                Some(device) => {
                    o.machine = Some(word.clone());
                    machine::in_nodes(device, o)?.hardware(&o.mesh, machine::precision(o))?
                }
                None => links_of(read_hardware(Path::new(word))?, o, word)?,
            };
        }
        o.moe = self.buffers()?;
        o.balance = Balance {
            aux: self.moe_aux.map(|x| not_negative("--moe-aux", x, "0.01")).transpose()?,
            z: not_negative("--moe-z-loss", self.moe_z_loss.unwrap_or(0.0), "1e-3")?,
            rate: not_negative("--moe-bias-rate", self.moe_bias_rate.unwrap_or(0.0), "1e-3")?,
        };
        let modes = [
            ("all-gather", CpMode::AllGather),
            ("ring", CpMode::Ring),
            ("ulysses", CpMode::Ulysses),
        ];
        choose(&mut o.cp_mode, &self.cp_mode, "--cp-mode", &modes)?;
        let splits = [CpSplit::Contiguous, CpSplit::Zigzag].map(Some);
        let splits = [("contiguous", splits[0]), ("zigzag", splits[1])];
        choose(&mut o.cp_split, &self.cp_split, "--cp-split", &splits)?;
        o.tp_mode = self.tp_mode()?;
        let steps = [("gathered", TpSteps::Gathered), ("summa", TpSteps::Summa)];
        choose(&mut o.tp_steps, &self.tp_steps, "--tp-steps", &steps)
    }

    /// Refuses what says how something is cut, where prices do.
    pub fn left_to_price(&self, o: &Options) -> Result<()> {
        let asked = [
            ("another --shard", !o.shard.is_empty()),
            ("--zero", self.zero.is_some()),
            ("--zero-accumulate", self.zero_accumulate.is_some()),
            ("--sp", self.sp),
            ("--tp-mode", self.tp_mode.is_some()),
            ("--cp-mode", self.cp_mode.is_some()),
            ("--cp-split", self.cp_split.is_some()),
            ("--tp-steps", self.tp_steps.is_some()),
            ("--reshard-after-forward", self.reshard_after_forward.is_some()),
            ("ep and etp in --mesh", o.ep > 1 || o.etp.is_some()),
        ];
        match asked.into_iter().find(|a| a.1) {
            None => Ok(()),
            Some((flag, _)) => Err(Diag::new("flag", format!("{flag} beside --shard auto"))
                .rule("--shard auto chooses how everything is cut")
                .help(format!("leave out {flag}, or --shard auto"))),
        }
    }

    /// Order of the pipeline, its cuts, and the memory that it may need.
    fn schedules(&self, o: &mut Options) -> Result<()> {
        o.schedule = schedule(self.schedule.as_deref().unwrap_or("1f1b"))?;
        o.speeds = speeds(self.speeds.as_deref().unwrap_or(""), o.axis("pp"))?;
        o.memory = self.memory.as_deref().map(memory).transpose()?;
        StageLayout::parse(&o.layers).map(drop)
    }

    /// Batch, microbatch and sequence.
    fn batch(&self, o: &mut Options, text: Option<&Brought>) -> Result<()> {
        o.global_batch = self.global_batch.unwrap_or(global_batch(text));
        o.seq = self.seq.unwrap_or(text.and_then(|t| t.seq).unwrap_or(o.seq));
        let sizes = [
            ("--global-batch", o.global_batch),
            ("--seq", o.seq),
            ("--microbatch", self.microbatch.unwrap_or(1)),
        ];
        for (flag, n) in sizes {
            if n == 0 || n > MAX_COUNT {
                return Err(Diag::new("flag", format!("{flag} {n} is not in 1..={MAX_COUNT}"))
                    .at(format!("{flag} {n}"))
                    .help(format!("for example {flag} 8")));
            }
        }
        o.microbatch = match (self.microbatch, text.and_then(|t| t.rows)) {
            (Some(n), _) => n,
            (None, Some(rows)) => rows_of(rows, o),
            (None, None) => default_microbatch(o),
        };
        Ok(())
    }

    fn buffers(&self) -> Result<Buffers> {
        let factor = |flag: &str, x: f64| -> Result<f64> {
            let x = positive(flag, x, "1.25")?;
            if x <= 1e6 { Ok(x) } else { positive(flag, f64::INFINITY, "1.25") }
        };
        match (self.moe_bound, self.moe_capacity) {
            (None, None) => Ok(Buffers::Worst),
            (Some(x), None) if x > 0.0 && x < 1.0 => Err(Diag::new(
                "flag",
                format!("--moe-bound {x} is less than a balanced load needs"),
            )
            .at(format!("--moe-bound {x}"))
            .help("use --moe-bound 1.5, or --moe-capacity to drop what does not fit")),
            (Some(x), None) => Ok(Buffers::Bound(factor("--moe-bound", x)?)),
            (None, Some(x)) => Ok(Buffers::Capacity(factor("--moe-capacity", x)?)),
            (Some(x), Some(y)) => Err(Diag::new("flag", "two sizes of the buffers of experts")
                .at(format!("--moe-bound {x} --moe-capacity {y}"))
                .rule("with a capacity no buffer is too small: what it has no room for is dropped")
                .help("give 1 of them")),
        }
    }

    fn tp_mode(&self) -> Result<TpMode> {
        let mode = match self.tp_mode.as_deref().unwrap_or("1d") {
            "1d" => TpMode::OneD,
            "2d" => TpMode::TwoD,
            "2.5d" => TpMode::TwoAndHalfD { depth: self.tp_depth.unwrap_or(2) },
            "3d" => TpMode::ThreeD,
            other => {
                return Err(Diag::new("flag", format!("`{other}` is not a value of --tp-mode"))
                    .at(format!("--tp-mode {other}"))
                    .help("use 1d or 2d or 2.5d or 3d"));
            }
        };
        let Some(depth) = self.tp_depth else { return Ok(mode) };
        let bad = |what: String, help: &str| {
            Err(Diag::new("flag", what).at(format!("--tp-depth {depth}")).help(help))
        };
        match mode {
            TpMode::TwoAndHalfD { .. } if depth == 0 || depth > MAX_COUNT => {
                bad(format!("{depth} grids are not in 1..={MAX_COUNT}"), "for example --tp-depth 2")
            }
            TpMode::TwoAndHalfD { .. } => Ok(mode),
            TpMode::OneD | TpMode::TwoD | TpMode::ThreeD => {
                bad(format!("--tp-mode {mode} has no depth"), "use --tp-mode 2.5d, or leave it out")
            }
        }
    }
}

/// Speeds with those of `dp` for the axes that it means here. Refuses speeds of axes that the mesh has not.
fn links_of(mut hw: Hardware, o: &Options, path: &str) -> Result<Hardware> {
    let has = |name: &str| o.mesh.iter().any(|a| a.0 == name);
    if let Some(dp) = hw.links.remove("dp").filter(|_| !o.mesh.is_empty()) {
        for name in ["dp_replicate", "dp_shard"] {
            hw.links.entry(name.into()).or_insert(dp);
        }
    }
    let known = |name: &str| has(name) || ["dp_replicate", "dp_shard"].contains(&name);
    match hw.links.keys().find(|name| !o.mesh.is_empty() && !known(name)) {
        None => Ok(hw),
        Some(name) => Err(Diag::new("hardware", format!("the mesh has no axis `{name}`"))
            .at(path.to_string())
            .rule("[links] has speeds of axes of the mesh")
            .help("name an axis of --mesh, or dp")),
    }
}

/// Reads `eod=ID` or `eod=ID,pad=ID`.
fn documents(text: &str) -> Result<Documents> {
    let wrong = |what: String| {
        Diag::new("flag", what)
            .at(format!("--documents {text}"))
            .rule("eod=ID, the token that ends a document, or eod=ID,pad=ID")
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
    if padding == Some(end) {
        let what = format!("token {end} cannot both end documents and pad rows");
        return Err(wrong(what).help(format!(
            "use --documents eod={end}: each one after the first is a document of 1 token, which is not scored"
        )));
    }
    Ok(Documents { end, padding })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_documents_are_read_or_refused() {
        let of = |end, padding| Ok(Documents { end, padding });
        assert_eq!(documents("eod=2").map_err(|d| d.message), of(2, None));
        assert_eq!(documents("pad=0, eod=2").map_err(|d| d.message), of(2, Some(0)));
        for bad in [
            "",
            "2",
            "eod",
            "eod=",
            "eod=-1",
            "eod=x",
            "pad=1",
            "eod=1,eod=2",
            "eod=1,pad=1",
            "eos=1",
        ] {
            assert_eq!(documents(bad).map_err(|d| d.code), Err("flag"), "{bad}");
        }
    }
}
