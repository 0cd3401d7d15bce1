//! `shardc plan`: which layouts fit a machine, how long a step takes in each, and where the time goes.

mod lines;

use super::{Format, show};
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use shardc_compiler::planner::largest::{Largest, Limit, Of, largest};
use shardc_compiler::planner::plan as search;
use shardc_compiler::planner::space::NUMBERS;
use shardc_compiler::planner::what_if::{self, Ifs};
use shardc_compiler::planner::{
    Asked, BUDGET, Compiled, CutShort, EACH, PlannedLayouts, Progress, SEQ, about_a_million,
    with_narrow_gradients,
};
use shardc_compiler::search::ways::mesh_text;
use shardc_cost::device::Device;
use shardc_ir::diag::time;
use shardc_ir::diag::{Diag, Result, bytes, count};
use shardc_passes::options::Options;
use shardc_passes::pipeline::Manager;
use shardc_plans::flags::{self, Target, Training, memory, memory_of, whole};
use shardc_plans::machine::device;
use shardc_process::signals;
use shardc_process::terminal::{self, json_line, note};
use shardc_report::prices::trust;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What is planned.
#[derive(Args, Debug)]
pub struct Plan {
    /// HF folder, or its config.json
    pub model: PathBuf,
    /// Number of ranks, one per device
    #[arg(long)]
    pub gpus: usize,
    /// Machine that the ranks run on: a name, or a TOML file like those in cost/hardware
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml")]
    pub machine: String,
    /// Sequences per step over all ranks [default: about a million tokens]
    #[arg(long, value_parser = whole)]
    pub global_batch: Option<usize>,
    /// Tokens per sequence [default: 8192, or as many as the model can have]
    #[arg(long, value_parser = whole)]
    pub seq: Option<usize>,
    /// Element type of weights and activations: f32, bf16 or f16
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(flags::words("dtype")))]
    pub dtype: String,
    /// Memory of a rank for its plan [default: the machine's, less what lies beside a plan on a GPU]
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Only layouts that `export --to` takes for this software; what it always does is the default (for megatron
    /// --cp-split zigzag, for nanotron --layers equal)
    #[arg(long = "for", value_enum, value_name = "TARGET")]
    pub target: Option<Target>,
    /// Number of fitting plans to find
    #[arg(long, default_value_t = 10)]
    pub top: usize,
    /// Number of layouts to compile, fitting or not: the same number finds the same plans [default: 40, or 4 for each
    /// plan of --top]
    #[arg(long, value_name = "LAYOUTS", value_parser = whole)]
    pub budget: Option<usize>,
    /// Stop after so many seconds, with what was found by then (as Ctrl-C does)
    #[arg(long, value_name = "SECONDS", value_parser = whole)]
    pub for_seconds: Option<usize>,
    /// Fixed numbers of the layout: tp, cp, pp, dp, ep, etp, v (stages per rank), mb, zero, sp
    #[arg(long, value_name = "tp=8,..", value_delimiter = ',')]
    pub fix: Vec<String>,
    /// Changed numbers of the machine: hbm, link, nic (GB/s), memory (bytes), domain. Also features that shardc
    /// does not have, with which lines are estimated but not executable: offload=GB/s (the optimizer state on the
    /// host, over a link of this speed in each direction; 25 if no number is given), optimizer=8bit or bf16 (its
    /// moments), weights=fp8
    #[arg(long, value_name = "nic=100,..", value_delimiter = ',')]
    pub what_if: Vec<String>,
    /// Show where the time of a line goes, and the constants that the estimate uses
    #[arg(long, value_name = "LINE")]
    pub explain: Option<usize>,
    /// For each line, the largest sequence (in steps of 64 tokens if --seq is a multiple of 64, else of --seq) or
    /// microbatch that fits with everything else unchanged, and what limits it
    #[arg(long, value_enum)]
    pub max: Option<Of>,
    /// Folder to write the plan of the first line to
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub training: Training,
}

/// Most ranks and plans that are asked for.
const MOST: (usize, usize) = (1 << 20, 100);

fn bad(flag: &str, given: &str, help: &str) -> Diag {
    let short: String = given.chars().take(40).collect();
    Diag::new("flag", format!("`{short}` is not a value of {flag}"))
        .at(format!("{flag} {short}"))
        .help(help)
}

impl Plan {
    /// The machine with its other numbers, and what no plan has.
    fn machine(&self) -> Result<(Device, Ifs)> {
        let (mut d, mut ifs, mut changed) = (device(&self.machine)?, Ifs::default(), vec![]);
        for given in &self.what_if {
            if ifs.take(given)? {
                continue;
            }
            let no = || bad("--what-if", given, "for example --what-if nic=100,memory=141GiB");
            let (name, value) = given.split_once('=').ok_or_else(no)?;
            let value = match name {
                "memory" => memory_of("--what-if memory=", value)? as f64,
                _ => value.parse().map_err(|_| no())?,
            };
            let name = Device::number(name);
            if !(value > 0.0 && value.is_finite()) && Device::NUMBERS.contains(&name) {
                let d = bad("--what-if", given, &format!("give {name} a positive number"));
                return Err(Diag { code: "device", ..d });
            }
            d = d.with(name, value).map_err(|d| match Device::NUMBERS.contains(&name) {
                true => d.at(format!("--what-if {given}")),
                false => what_if::unknown(name, d.at(format!("--what-if {given}"))),
            })?;
            let unit = if ["hbm", "link", "nic"].contains(&name) { " GB/s" } else { "" };
            changed.push(format!("{given}{unit}"));
        }
        if !changed.is_empty() {
            d.name = format!("{} with {}", d.name, changed.join(", "));
        }
        if let Some(dir) = self.output.as_ref().filter(|_| ifs.is_any()) {
            return Err(Diag::new("flag", format!("no plan has {}", ifs.words().join(", ")))
                .at(format!("-o {}", dir.display()))
                .rule("what is not executable is priced, and not written")
                .help("leave out -o, or what no plan has of --what-if"));
        }
        Ok((d, ifs))
    }

    /// The flags of `compile` that are given, with what the target does itself.
    fn training(&self) -> Training {
        let flags = self.training.0.clone();
        Training(self.target.map_or(flags.clone(), |to| to.fill(flags)))
    }

    fn asked(&self) -> Result<Asked> {
        let (machine, (device, ifs)) = (device(&self.machine)?, self.machine()?);
        let budget = self.budget.unwrap_or(BUDGET.max(EACH * self.top));
        let counts = [("--gpus", self.gpus, MOST.0), ("--top", self.top, MOST.1)];
        for (flag, n, most) in counts.into_iter().chain([("--budget", budget, MOST.0)]) {
            if n == 0 || n > most {
                return Err(bad(flag, &n.to_string(), &format!("a number from 1 to {most}")));
            }
        }
        if let Some(line) = self.explain.filter(|n| *n == 0 || *n > self.top) {
            let help = format!("{}, or a larger --top", lines_to(self.top));
            return Err(bad("--explain", &line.to_string(), &help));
        }
        let fix = |given: &String| -> Result<(String, usize)> {
            let no = || bad("--fix", given, &format!("numbers of {}", NUMBERS.join(", ")));
            let (name, value) = given.split_once('=').ok_or_else(no)?;
            let value = value.parse().ok().filter(|_| NUMBERS.contains(&name));
            Ok((name.to_string(), value.ok_or_else(no)?))
        };
        let own = self.training().0.with("dtype", &self.dtype);
        let seq = match (self.seq, shardc_plans::input::facts(&self.model)?) {
            (Some(seq), _) => seq,
            (None, facts) => facts.map_or(SEQ, |f| f.max_positions.clamp(1, SEQ)),
        };
        let batch = self.global_batch.unwrap_or_else(|| about_a_million(seq, self.gpus));
        let flags = own.try_with("seq", seq)?.try_with("global-batch", batch)?;
        let memory = match &self.memory {
            Some(text) => memory(text)?,
            None => device.memory as usize,
        };
        let fixed = self.fix.iter().map(fix).collect::<Result<_>>()?;
        // What is started on several nodes is started on as many of them as it was priced on.
        let domain = device.ranks_of_domain(self.gpus);
        let node = (self.gpus > domain && self.gpus.is_multiple_of(domain)).then_some(domain);
        let options = Options { node, ..flags.options_for(&self.model)? };
        let of_device = self.memory.is_none() && device.is_gpu();
        let seconds = |n: usize| Instant::now().checked_add(Duration::from_secs(n as u64));
        Ok(Asked {
            gpus: self.gpus,
            device,
            machine,
            options,
            memory,
            of_device,
            target: self.target,
            top: self.top,
            budget,
            end: self.for_seconds.and_then(seconds),
            fixed,
            ifs,
        })
    }
}

fn lines_to(last: usize) -> String {
    format!("a line from 1 to {last}")
}

/// Plans and prints the table.
///
/// # Errors
/// `no-layout`, `device`, `flag`, and those of reading and compiling the model.
pub fn plan(what: &Plan, format: Format) -> Result<i32> {
    super::no_plan(&what.model)?;
    let asked = what.asked()?;
    let quiet = format == Format::Json;
    // The first signal ends the search, the second the process.
    signals::end_clean()?;
    let found = search(&what.model, &asked, &mut teller("", quiet))?;
    if found.fits.is_empty() {
        return Err(nothing_fits(what, &asked, &found, quiet));
    }
    let of =
        |of: Of| (of, found.fits.iter().map(|c| largest(of, &asked, &found.input, c)).collect());
    let most: Option<(Of, Vec<Largest>)> = what.max.map(of);
    match format {
        Format::Json => {
            let mut out = to_json(&asked, &found, what);
            if let Some((of, all)) = &most {
                for (plan, m) in out["plans"].as_array_mut().into_iter().flatten().zip(all) {
                    plan["largest"] = largest_json(*of, m);
                }
            }
            show(json_line("plan", out));
        }
        Format::Human => {
            show(table(what, &asked, &found));
            show(most.map_or(String::new(), |(of, all)| largest_text(of, &asked, &all)));
            if let Some(c) = what.explain.and_then(|line| found.fits.get(line - 1)) {
                show(lines::explain(&asked, &found.input, c, what)?);
            }
            note(trust(&asked.device));
        }
    }
    if let Some(dir) = &what.output {
        write(&what.model, &asked, &found.fits[0], dir)?;
        note(format!("wrote {}", dir.display()));
    }
    match what.explain.filter(|n| *n > found.fits.len()) {
        Some(line) => Err(bad("--explain", &line.to_string(), &lines_to(found.fits.len()))),
        None => Ok(match found.cut {
            Some(CutShort::Signal(signal)) => signals::status(signal),
            _ => 0,
        }),
    }
}

/// Says how far a search is: on a terminal in one line, elsewhere when something better was found.
fn teller(what: &str, quiet: bool) -> impl FnMut(Progress) {
    let (what, mut best) = (what.to_string(), f64::INFINITY);
    move |progress| match progress {
        _ if quiet => {}
        Progress::Priced(text) => note(format!("{what}{text}")),
        Progress::Narrower(kind) => note(format!("{what}looking at --grad-dtype {}", kind.name())),
        Progress::Compiled(n, fit, found) => {
            let better = found.filter(|c| c.seconds < best);
            best = better.map_or(best, |c| c.seconds);
            let words = |c: &Compiled| {
                format!("; best so far {}: {}", time(c.seconds), c.guess.candidate.words())
            };
            let text =
                format!("{what}{n} compiled, {fit} fit{}", found.map_or(String::new(), words));
            if better.is_some() || terminal::is_rewritten() {
                terminal::rewrite(text);
            }
        }
    }
}

/// What ended a search early, as the table says it.
fn cut(found: &PlannedLayouts) -> Option<String> {
    let last = match found.cut? {
        CutShort::Time => "--for-seconds".to_string(),
        CutShort::Signal(signal) => signals::name(signal).to_string(),
    };
    Some(format!(
        "{last} ended the search behind layout {}: a longer one may find faster plans",
        found.compiled + found.refused.len()
    ))
}

/// The fastest layout that fits if gradients have the type of the weights, as flags say it; where they have not.
fn narrow(what: &Plan, asked: &Asked, quiet: bool) -> Option<String> {
    let options = with_narrow_gradients(&asked.options)?;
    let flag = format!("--grad-dtype {}", options.grad_dtype.name());
    let asked_so = Asked { options, top: 1, ..asked.clone() };
    let found = search(&what.model, &asked_so, &mut teller(&format!("with {flag}: "), quiet));
    let fits = found.ok()?.fits;
    let best = fits.first()?;
    Some(format!(
        "use {flag}: {} then needs {}, and a step takes {}",
        best.guess.candidate.words(),
        needs(best.peak, if asked.of_device { best.beside } else { 0 }),
        time(best.seconds)
    ))
}

/// Bytes of a plan, and of what lies beside it.
fn needs(peak: usize, beside: usize) -> String {
    match beside {
        0 => bytes(peak),
        n => format!("{} and up to {} beside it = {}", bytes(peak), bytes(n), bytes(peak + n)),
    }
}

fn nothing_fits(what: &Plan, asked: &Asked, found: &PlannedLayouts, quiet: bool) -> Diag {
    let limit = bytes(asked.memory);
    let message = match found.compiled {
        0 if found.cut.is_some() => "the search ended before a layout was compiled".to_string(),
        0 => format!("no layout fits in {limit}"),
        n => format!("none of {n} compiled layouts fits in {limit}"),
    };
    let d = Diag::new("no-layout", message).rule("a layout fits if its compiled plan does");
    let d = match (&found.least, found.refused.first()) {
        (Some((c, peak, beside)), _) => {
            d.why(format!("of these {} needs least: {}", c.words(), needs(*peak, *beside)))
        }
        (None, Some((c, why))) => d.why(format!("{}: {}", c.words(), why.message)),
        (None, None) if found.cut.is_some() => d,
        (None, None) => d.why("states and one microbatch alone need more in every layout"),
    };
    let d = narrow(what, asked, quiet).into_iter().fold(d, Diag::help);
    let d = match found.put_off {
        0 => d,
        n => d.help(format!(
            "{} not compiled: --budget {} compiles twice as many",
            count(n, "layout was", "layouts were"),
            2 * asked.budget
        )),
    };
    let d = cut(found).into_iter().fold(d, Diag::help);
    d.help("use more --gpus, or a machine with more memory")
}

/// The first line compiled as `compile` does, and written.
fn write(model: &Path, asked: &Asked, best: &Compiled, dir: &Path) -> Result<()> {
    let memory = Some(asked.room(best.beside));
    let o = Options { memory, ..best.options.clone() };
    let mut done = shardc_compiler::compile_with(model, &o, Manager::default())?;
    // As the command that is printed makes it.
    done.stored.options.memory = None;
    done.write(dir)
}

/// True if the line is within the band of the fastest.
fn is_tie(found: &PlannedLayouts, c: &Compiled) -> bool {
    let best = found.fits.iter().map(|c| c.seconds).fold(f64::INFINITY, f64::min);
    found.band.is_some_and(|b| c.seconds <= best * (1.0 + b.width))
}

/// True if no line is both faster and smaller.
fn is_front(all: &[Compiled], c: &Compiled) -> bool {
    !all.iter().any(|o| {
        o.seconds <= c.seconds && o.peak <= c.peak && (o.seconds < c.seconds || o.peak < c.peak)
    })
}

fn table(what: &Plan, asked: &Asked, found: &PlannedLayouts) -> String {
    let target = asked.target.filter(|_| found.fits.iter().any(|c| c.in_target.is_some()));
    let theirs = target.map(|to| to.software().to_string());
    let step = match found.band {
        None => "step (guess)".to_string(),
        Some(b) => format!("step ±{:.0} %", 100.0 * b.width),
    };
    let head = ["".into(), step, "MFU".into(), "tokens/s".into(), "memory".into()].into_iter();
    let rest = ["layout", "where the time goes"].map(String::from);
    let mut all: Vec<Vec<String>> = vec![head.chain(theirs).chain(rest).collect()];
    let ifs = asked.ifs.words().join(", ");
    let not = |words: String| match asked.ifs.is_any() {
        true => format!("{words} (not executable: {ifs})"),
        false => words,
    };
    for (i, c) in found.fits.iter().enumerate() {
        let front = if is_front(&found.fits, c) { "*" } else { " " };
        let tied = if is_tie(found, c) { "~" } else { " " };
        let mut row = vec![
            format!("{}{front}{tied}", i + 1),
            time(c.seconds),
            format!("{:.1} %", 100.0 * c.mfu),
            format!("{:.0}", c.tokens_per_s),
            bytes(c.peak),
        ];
        let over = if asked.is_over(c) { " (over)" } else { "" };
        row.extend(c.in_target.map(|b| format!("{}{over}", bytes(b))));
        row.extend([not(c.guess.candidate.words()), shares(c)]);
        all.push(row);
    }
    all.extend(found.beyond.iter().map(|b| lines::beyond(found, b, target.is_some())));
    let rows = lines::rows(all, 1..5 + usize::from(target.is_some()));
    let [above, below] = lines::step(what, asked);
    let counted = format!(
        "{below}{} legal, of {} states and what enters layers alone are within {}, all priced in \
         closed form; {} \
         compiled, {} refused, {} passed over (a plan that needs less does not fit), {} not compiled that may be as \
         fast; the last {} brought nothing faster",
        found.legal,
        found.may_fit,
        bytes(asked.memory),
        found.compiled,
        found.refused.len(),
        found.passed_over,
        found.put_off,
        found.since_best
    );
    let within = lines::within(found);
    let cut = cut(found).map_or(String::new(), |text| format!("\n{text}"));
    let said = format!(
        "{counted}{cut}\nof those compiled, line 1 is the fastest that {}, by this model of costs, or takes 1 % more \
         with less memory; {within}; * none is faster and smaller\n{}",
        lines::fits(asked, found),
        lines::assumed(asked, found)
    );
    format!("{above}{rows}\n\n{}", terminal::prose(&said))
}

fn largest_text(of: Of, asked: &Asked, all: &[Largest]) -> String {
    let name = of.to_possible_value().map_or(String::new(), |v| v.get_name().to_string());
    let ifs = match asked.ifs.is_any() {
        true => format!(" with {} (not executable)", asked.ifs.words().join(", ")),
        false => String::new(),
    };
    let mut out = format!("\nlargest {name} of each line{ifs}, by bisection over compiled plans\n");
    for (i, m) in all.iter().enumerate() {
        let why = match &m.next {
            None => "no larger one is tried".to_string(),
            Some((n, Limit::Memory(peak))) => format!("{n} needs {}", bytes(*peak)),
            Some((n, Limit::Refused(why))) => format!("{n}: {why}"),
        };
        out += &format!("{:>2}  {:>8}  {:>10}  {why}\n", i + 1, m.value, bytes(m.peak));
    }
    out
}

fn largest_json(of: Of, m: &Largest) -> Value {
    let name = of.to_possible_value().map(|v| v.get_name().to_string());
    let next = m.next.as_ref().map(|(n, why)| match why {
        Limit::Memory(peak) => json!({ "value": n, "limit": "memory", "peak_bytes": peak }),
        Limit::Refused(why) => json!({ "value": n, "limit": "refused", "why": why }),
    });
    json!({ "of": name, "value": m.value, "peak_bytes": m.peak, "next": next })
}

/// The parts that take most, in percent.
fn shares(c: &Compiled) -> String {
    let mut all = c.parts.list();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let whole = |s: f64| (100.0 * s / c.seconds).round();
    let some = all.into_iter().filter(|p| whole(p.1) >= 1.0).take(3);
    some.map(|(n, s)| format!("{n} {}", whole(s))).collect::<Vec<_>>().join(" · ")
}

fn to_json(asked: &Asked, found: &PlannedLayouts, what: &Plan) -> Value {
    let one = |c: &Compiled| {
        json!({
            "layout": c.guess.candidate.words(),
            "mesh": mesh_text(&c.options),
            "options": lines::options(what, c),
            "step_s": c.seconds,
            "band": found.band.map(|b| [c.seconds * (1.0 - b.width), c.seconds * (1.0 + b.width)]),
            "closed_form_s": c.guess.seconds,
            "mfu": c.mfu,
            "tokens_per_s": c.tokens_per_s,
            "peak_bytes": c.peak,
            "beside_bytes": c.beside,
            "target_bytes": c.in_target,
            "tie": is_tie(found, c),
            "pareto": is_front(&found.fits, c),
            "extrapolated": true,
            "executable": !asked.ifs.is_any(),
            "as_compiled": { "step_s": c.plain.0, "peak_bytes": c.plain.1 },
            "parts": c.parts,
        })
    };
    json!({
        "device": asked.device.name,
        "gpus": asked.gpus,
        "memory": asked.memory,
        "not_executable": asked.ifs.words(),
        "legal": found.legal,
        "may_fit": found.may_fit,
        "compiled": found.compiled,
        "budget": asked.budget,
        "cut": found.cut.is_some(),
        "refused": found.refused.len(),
        "left_out": found.left_out.count,
        "left_out_most": found.left_out.most().map(|(why, n)| json!({ "why": why, "count": n })),
        "passed_over": found.passed_over,
        "put_off": found.put_off,
        "since_best": found.since_best,
        "plans": found.fits.iter().map(one).collect::<Vec<_>>(),
        "by_formula": found.beyond.iter().map(lines::beyond_json).collect::<Vec<_>>(),
        "with_narrow_gradients": found.narrower.as_ref().map(lines::narrower_json),
    })
}
