//! What the words after flags mean: numbers, meshes, orders, schedules, shardings.

use shardc_cost::device::Device;
use shardc_ir::axes::ROLES;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files;
use shardc_ir::loss_scale::is_scale;
use shardc_ir::names::nearest;
use shardc_passes::autodiff::chunks::{LossChunks, MOST_CHUNKS};
use shardc_passes::autodiff::recompute::{GROUPS, Recompute};
use shardc_passes::options::{Order, ShardRule};
use shardc_passes::schedule::Named;
use std::path::Path;
use std::result::Result as Result2;

/// The place of an axis among all, outer to inner.
pub fn place_of(axis: &str) -> Option<usize> {
    ROLES.iter().position(|r| r.name == axis)
}

/// Policies of --recompute that are one word.
const POLICIES: [&str; 6] = ["none", "elementwise", "selective", "full", "sqrt", "fit"];

pub(super) fn recompute(text: &str) -> Result<Recompute> {
    Recompute::parse(text).map_err(|name| {
        let d = Diag::new("flag", format!("`{name}` is not a value of --recompute"))
            .at(format!("--recompute {text}"));
        let of_ops = text.starts_with("ops:");
        let ops = || GROUPS.into_iter().chain(shardc_ir::ops::NAMES.iter().copied());
        let known: Vec<&str> = if of_ops { ops().collect() } else { POLICIES.to_vec() };
        let d = match nearest(&name, known.iter().copied(), 1)[..] {
            [near, ..] if of_ops => d.help(format!("did you mean {near}?")),
            [near, ..] => d.help(format!("did you mean --recompute {near}?")),
            [] => d,
        };
        d.help(match of_ops {
            true => format!("names after ops: are {}", known.join(", ")),
            false => format!(
                "use {}, every:N, layers:N, mix:N*full+elementwise, or ops:NAME,NAME with {} and names of ops",
                known.join(", "),
                GROUPS.join(", ")
            ),
        })
    })
}

pub(super) fn loss_chunks(text: &str) -> Result<LossChunks> {
    let digits = Some(text).filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    let number = || digits.and_then(|t| t.parse().ok()).filter(|n| (1..=MOST_CHUNKS).contains(n));
    let d = || {
        Diag::new("flag", format!("`{text}` is not a number of chunks"))
            .at(format!("--loss-chunks {text}"))
            .help(format!("use 1 to {MOST_CHUNKS} chunks, or auto"))
    };
    match text {
        "auto" => Ok(LossChunks::Auto),
        _number => number().map(LossChunks::Of).ok_or_else(d),
    }
}

/// `24GiB`, `80GB`, `1.5e9` or a number of bytes; or a machine, `h100-sxm`, whose memory it is.
pub fn memory(text: &str) -> Result<usize> {
    if !text.trim().starts_with(|c: char| c.is_ascii_alphabetic()) {
        return memory_of("--memory", text);
    }
    let device = Device::named(text.trim());
    device.map(|d| d.memory as usize).map_err(|d| {
        d.at(format!("--memory {text}")).help("or an amount: --memory 24GiB, 80GB or 1500000000")
    })
}

/// Numbers below this have a unit where a rank's memory is meant.
const BARE: f64 = (1 << 20) as f64;

/// The memory of a rank, of which a small number without a unit is no amount that somebody means.
///
/// # Errors
/// `flag`.
pub fn memory_of(flag: &str, text: &str) -> Result<usize> {
    let Some(n) = text.trim().parse::<f64>().ok().filter(|n| *n >= 1.0 && *n < BARE) else {
        return bytes_of(flag, text);
    };
    // Tools of GPUs count in MiB, people in GiB.
    let unit = if n < 4096.0 { "GiB" } else { "MiB" };
    let given = text.trim();
    Err(Diag::new("flag", format!("{given} is bytes: did you mean {given}{unit}?"))
        .at(valued(flag, given))
        .rule("less than 1 MiB is written with its unit")
        .help(format!("use {}{unit}, or {given}B for so few bytes", valued(flag, given))))
}

/// A flag with its value; one that ends in `=` is a number of a list.
fn valued(flag: &str, value: &str) -> String {
    if flag.ends_with('=') { format!("{flag}{value}") } else { format!("{flag} {value}") }
}

/// The units of bytes in lower case: of each power in its short form, of 1000 and of 1024.
const UNITS: [[&str; 3]; 4] =
    [["k", "kb", "kib"], ["m", "mb", "mib"], ["g", "gb", "gib"], ["t", "tb", "tib"]];

/// An amount of bytes of a flag, whose unit may be in letters of any case.
///
/// # Errors
/// `flag`.
pub fn bytes_of(flag: &str, text: &str) -> Result<usize> {
    let t = text.trim();
    let digits = t.find(|c: char| c.is_ascii_alphabetic() && c != 'e' && c != 'E');
    let (number, unit) = t.split_at(digits.unwrap_or(t.len()));
    let unit = unit.trim().to_ascii_lowercase();
    let powers = UNITS.iter().zip(1..);
    let scale = match unit.as_str() {
        "" | "b" => Some(1.0),
        u => powers
            .filter(|(all, _)| all.contains(&u))
            .map(|(all, power)| f64::powi(if u == all[2] { 1024.0 } else { 1000.0 }, power))
            .next(),
    };
    let bytes = scale.zip(number.trim().parse::<f64>().ok()).map(|(s, n)| s * n);
    match bytes.filter(|b| *b >= 1.0 && *b <= 2f64.powi(60)) {
        Some(b) => Ok(b as usize),
        None => Err(Diag::new("flag", format!("`{text}` is not an amount of memory"))
            .at(valued(flag, text))
            .help(format!("for example {}, 80GB or 1500000000", valued(flag, "24GiB")))),
    }
}

/// A whole number of a flag, which may not be written short.
///
/// # Errors
/// What would be right in its place.
pub fn whole(text: &str) -> Result2<usize, String> {
    let thousands = |unit: &[char]| text.trim().strip_suffix(unit)?.parse::<usize>().ok();
    match (text.parse(), thousands(&['k', 'K'])) {
        (Ok(n), _) => Ok(n),
        (Err(_), Some(n)) => {
            let by = |k: usize| n.saturating_mul(k);
            Err(format!("a number is written out: {} or {}", by(1024), by(1000)))
        }
        (Err(_), None) => Err("a whole number, for example 8192".into()),
    }
}

/// Largest CSV file of a schedule that is read, in bytes.
const MAX_CSV: u64 = 64 << 20;

/// A schedule by name, or the text of a CSV file.
pub(super) fn schedule(text: &str) -> Result<Order> {
    if !text.to_ascii_lowercase().ends_with(".csv") {
        let name = text.to_ascii_lowercase();
        if name != "search" {
            Named::parse(&name).map_err(|mut d| {
                let known = Named::ALL.iter().map(|n| n.name()).chain(["search"]);
                let near = nearest(&name, known, 1).first().map(|n| format!("did you mean {n}?"));
                d.help.splice(..0, near);
                d.at(format!("--schedule {text}"))
                    .help("or search, which looks for an order, or FILE.csv with one")
            })?;
        }
        return Ok(Order::Named(name));
    }
    files::read_text(Path::new(text), MAX_CSV).map(Order::Csv).map_err(|d| {
        d.help("--schedule FILE.csv: one line per rank of the pipeline, cells such as 0F0")
    })
}

/// One positive number per rank of the pipeline.
pub(super) fn speeds(text: &str, ranks: usize) -> Result<Vec<f64>> {
    if text.is_empty() {
        return Ok(vec![]);
    }
    let all: Vec<f64> = text.split(',').filter_map(|t| t.trim().parse().ok()).collect();
    let positive = all.iter().all(|x: &f64| *x > 0.0 && x.is_finite());
    if positive && all.len() == ranks && text.matches(',').count() + 1 == ranks {
        return Ok(all);
    }
    Err(Diag::new(
        "flag",
        format!("`{text}` is not {}", count(ranks, "positive number", "positive numbers")),
    )
    .at(format!("--speeds {text}"))
    .rule("one speed per rank of the pipeline")
    .help(format!("for example --speeds {}", vec!["1"; ranks].join(","))))
}

/// A number above 0; `example` is one that people use.
pub(super) fn positive(flag: &str, x: f64, example: &str) -> Result<f64> {
    if x > 0.0 && x.is_finite() {
        return Ok(x);
    }
    Err(Diag::new("flag", format!("{flag} {x} is not a positive number"))
        .at(flag)
        .help(format!("for example {flag} {example}")))
}

/// A scale of the loss: a power of two, so that it changes no digit of a gradient.
pub(super) fn scale(flag: &str, x: f64) -> Result<f32> {
    let near = x as f32;
    if is_scale(near) && f64::from(near) == x {
        return Ok(near);
    }
    let nearest =
        if x.is_finite() && x >= 2.0 { 2f64.powf(x.log2().floor().min(126.0)) } else { 1.0 };
    Err(Diag::new("flag", format!("{flag} {x} is not a power of 2"))
        .at(format!("{flag} {x}"))
        .rule("a power of 2 up to 2^126 changes no digit of a gradient")
        .help(format!("for example {flag} {nearest}")))
}

pub(super) fn not_negative(flag: &str, x: f64, example: &str) -> Result<f64> {
    if x >= 0.0 && x.is_finite() {
        return Ok(x);
    }
    Err(Diag::new("flag", format!("{flag} {x} is neither 0 nor a positive number"))
        .at(flag)
        .help(format!("for example {flag} {example}")))
}

pub(super) fn betas(text: &str) -> Result<(f64, f64)> {
    let two: Vec<f64> = text
        .split(',')
        .filter_map(|t| t.trim().parse().ok())
        .filter(|b| (0.0..1.0).contains(b))
        .collect();
    match two[..] {
        [a, b] if text.matches(',').count() == 1 => Ok((a, b)),
        _ => Err(Diag::new("flag", format!("`{text}` is not two numbers in [0, 1)"))
            .at("--betas")
            .help("for example --betas 0.9,0.95")),
    }
}

/// Axes and their sizes; then ep and etp, which are none.
pub(super) type Axes = (Vec<(String, usize)>, [Option<usize>; 2]);

/// The word for the size of the one axis that takes the ranks of `--gpus` that others leave.
const AUTO: &str = "auto";

/// Axes as in `text`, where the size `auto` is what the others leave of so many ranks.
fn filled(text: &str, gpus: Option<usize>) -> Result<String> {
    let axis = |part: &str| -> Option<(String, String)> {
        part.split_once('=').map(|(n, s)| (n.trim().to_string(), s.trim().to_string()))
    };
    let all: Vec<(String, String)> = text.split(',').filter_map(axis).collect();
    let open: Vec<&str> = all.iter().filter(|a| a.1 == AUTO).map(|a| &*a.0).collect();
    let of_mesh = |m: String| Diag::new("mesh", m).at(format!("--mesh {text}"));
    let Some(gpus) = gpus else {
        return match open.first() {
            None => Ok(text.into()),
            Some(name) => {
                Err(of_mesh(format!("{name}=auto, but the number of ranks is not given"))
                    .help(format!("add --gpus N (compile and check), or give {name} a number")))
            }
        };
    };
    let no_flag =
        |m: &str, help: String| Err(Diag::new("flag", m).at(format!("--gpus {gpus}")).help(help));
    let example = || "for example --gpus 16 --mesh tp=2,dp=auto".to_string();
    if all.is_empty() {
        return no_flag("--gpus without --mesh does not determine axes", example());
    }
    let name = match &open[..] {
        [name] => *name,
        [] => {
            let help = "leave out --gpus, or write auto as the size of one axis".to_string();
            return no_flag("--gpus, and no axis of --mesh is auto", help);
        }
        _several => {
            return Err(of_mesh(format!(
                "{} are auto, and --gpus gives one size",
                open.join(", ")
            ))
            .help("give all of them but one a number"));
        }
    };
    if ["ep", "etp"].contains(&name) {
        return Err(of_mesh(format!("{name} is not an axis: it has no ranks of its own"))
            .help(format!("give {name} a number")));
    }
    let others = all.iter().filter(|a| a.1 != AUTO && !["ep", "etp"].contains(&&*a.0));
    let sizes = others.filter_map(|a| a.1.parse::<usize>().ok());
    let ranks = sizes.fold(1usize, usize::saturating_mul);
    // What is not a size is reported where sizes are read.
    if ranks > 0 && !gpus.is_multiple_of(ranks) {
        let near = ranks * (gpus / ranks).max(1);
        return Err(of_mesh(format!(
            "{gpus} ranks are not a multiple of the {ranks} of other axes"
        ))
        .rule("--gpus is the product of all axes")
        .help(format!("for example --gpus {near}")));
    }
    let size = gpus / ranks.max(1);
    let known = |part: &str| match axis(part) {
        Some((name, word)) if word == AUTO => format!("{name}={size}"),
        _given => part.to_string(),
    };
    Ok(text.split(',').map(known).collect::<Vec<_>>().join(","))
}

/// Reads `dp=2,tp=4,ep=2` into canonical names, in the order given.
pub(super) fn parse_mesh(text: &str, gpus: Option<usize>, zero: u8) -> Result<Axes> {
    let text = &*filled(text, gpus)?;
    let bad = |m: String| {
        Diag::new("mesh", m).at(format!("--mesh {text}")).help("for example --mesh dp=2,tp=2")
    };
    let mut out: Vec<(String, usize)> = vec![];
    let mut experts = [None; 2];
    for part in text.split(',').filter(|p| !p.trim().is_empty()) {
        let (name, size) =
            part.split_once('=').ok_or_else(|| bad(format!("`{part}` is not axis=size")))?;
        let size: usize =
            size.trim().parse().map_err(|_| bad(format!("`{}` is not a size", size.trim())))?;
        if let Some(i) = ["ep", "etp"].iter().position(|n| *n == name.trim()) {
            let fits = (1..=shardc_ir::mesh::MAX_RANKS).contains(&size);
            if !fits || experts[i].replace(size).is_some() {
                let most = shardc_ir::mesh::MAX_RANKS;
                return Err(bad(format!("`{part}` is not one number of 1 to {most}")));
            }
            continue;
        }
        out.push((name.trim().into(), size));
    }
    if out.iter().any(|a| a.0 == "dp") && out.iter().any(|a| a.0.starts_with("dp_")) {
        let what = "dp is short for dp_replicate or dp_shard, and one of them is given too";
        return Err(bad(what.into()).help("write dp_replicate=2,dp_shard=2 for both"));
    }
    let shards = zero > 0 || experts[0].is_some_and(|ep| ep > 1);
    for (name, _) in out.iter_mut().filter(|a| a.0 == "dp") {
        *name = if shards { "dp_shard" } else { "dp_replicate" }.into();
    }
    if out.iter().all(|a| place_of(&a.0).is_some()) {
        out.sort_by_key(|a| place_of(&a.0));
    }
    shardc_ir::mesh::Mesh::new(&out.iter().map(|(n, s)| (n.as_str(), *s)).collect::<Vec<_>>())
        .map_err(|d| d.at(format!("--mesh {text}")))?;
    Ok((out, experts))
}

/// Puts the axes into an order given from the axis that varies fastest: `tp-cp-ep-dp-pp`. Both
/// data-parallel axes go by `dp`; an axis of the mesh that is not named must have one rank, as in
/// Megatron-LM.
pub(super) fn in_order(mesh: Vec<(String, usize)>, order: &str) -> Result<Vec<(String, usize)>> {
    let bad = |m: String| {
        Diag::new("flag", m)
            .at(format!("--order {order}"))
            .rule("every axis of the mesh stands in the order once")
            .help("for example --order tp-cp-ep-dp-pp, or tp-dp-pp")
    };
    let words: Vec<&str> = order.split('-').map(str::trim).collect();
    let known = |w: &str| place_of(w).is_some() || ["dp", "ep"].contains(&w);
    if let Some(w) = words.iter().find(|w| !known(w)) {
        return Err(bad(format!("`{w}` is not an axis")));
    }
    let place = |axis: &str| {
        let all = || words.iter().enumerate();
        let own = all().find(|(_, w)| **w == axis);
        own.or_else(|| all().find(|(_, w)| **w == "dp" && axis.starts_with("dp_"))).map(|x| x.0)
    };
    if let Some((axis, n)) = mesh.iter().find(|a| a.1 > 1 && place(&a.0).is_none()) {
        return Err(bad(format!("{axis} has {n} ranks and is not in the order")));
    }
    if let Some(w) = words.iter().enumerate().find(|(i, w)| words[..*i].contains(w)) {
        return Err(bad(format!("`{}` stands twice", w.1)));
    }
    let mut mesh = mesh;
    mesh.sort_by_key(|a| std::cmp::Reverse(place(&a.0).unwrap_or(0)));
    Ok(mesh)
}

pub(super) fn shard_rule(text: &str) -> Result<ShardRule> {
    let bad = |m: &str| {
        Diag::new("shard", m)
            .at(format!("--shard '{text}'"))
            .help("for example --shard '*.q_proj.weight=tp,-' or '*.mlp=dp,tp?,-@p1'")
    };
    let (glob, dims) = text.rsplit_once('=').ok_or_else(|| bad("a sharding is GLOB=D,D"))?;
    let (dims, priority) = match dims.rsplit_once("@p") {
        Some((d, p)) => (d, p.parse().map_err(|_| bad("a priority is @p0 to @p255"))?),
        None => (dims, 0),
    };
    Ok(ShardRule {
        glob: glob.into(),
        dims: dims.split(',').map(|d| d.trim().to_string()).collect(),
        priority,
    })
}
