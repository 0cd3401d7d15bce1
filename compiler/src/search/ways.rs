//! What is offered in place of numbers that a rule refuses. Everything was compiled with all else that
//! was asked for, and so fits in `--memory` too.

use shardc_frontends::Facts;
use shardc_ir::axes;
use shardc_ir::schedule::MAX_MICROBATCHES;
use shardc_passes::options::{Options, Order, TpMode};
use shardc_passes::pipeline::Manager;
use shardc_plans::flags;
use shardc_plans::rules::{self, Violation};
use std::cell::Cell;
use std::path::Path;

/// Most values that are offered for a rule, and most meshes.
const OFFERED: usize = 3;
/// Most compilations to find them.
const COMPILED: usize = 8;
/// Most changes that make one offer.
const DEEP: usize = 4;
/// Most changes that are looked at for one offer.
const LOOKED_AT: usize = 256;
/// Most forward passes of a pipeline's ranks in the steps that are compiled for a refusal, which is said
/// within a second: a small model takes some 0.4 ms for each.
const ACTIONS: usize = 1 << 10;
/// Most of them in a step of which the schedule alone is made.
const MADE: usize = 1 << 17;

/// The violations with those of their nearest values that compile: where several rules are violated,
/// each with what else must change.
pub fn checked(model: &Path, f: &Facts, o: &Options, found: Vec<Violation>) -> Vec<Violation> {
    let room = Cell::new(ACTIONS);
    let offered = |v: &Violation| {
        // By offer its changes, and as a user writes them.
        let mut out: Vec<(Vec<String>, String)> = vec![];
        let (mut untried, mut left) = (vec![], COMPILED);
        // What needs the fewest changes comes first.
        for deep in 1..=DEEP {
            let mut looked = LOOKED_AT;
            for change in &v.nearest {
                if out.len() == OFFERED || left == 0 || looked == 0 {
                    break;
                }
                let Some(new) = with(o, change) else { continue };
                if is_long(&new) {
                    if deep == 1 && untried.len() < OFFERED && actions(&new) <= MADE {
                        left -= 1;
                        let legal = rules::violations(f, &new).is_empty();
                        untried.extend(legal.then(|| written(o, &new, &[change])));
                    }
                    continue;
                }
                let done = completed(f, new, &[change], deep, &mut looked);
                let Some((new, more)) = done.filter(|d| d.1.len() + 1 == deep) else { continue };
                let all: Vec<&String> = [change].into_iter().chain(&more).collect();
                if out.iter().any(|x| x.0.iter().all(|w| all.contains(&w))) {
                    continue;
                }
                let text = written(o, &new, &all);
                let Some(rest) = room.get().checked_sub(actions(&new)) else {
                    untried.extend((deep == 1 && untried.len() < OFFERED).then_some(text));
                    continue;
                };
                left -= 1;
                room.set(rest);
                if compiles(model, &new) {
                    out.push((all.into_iter().cloned().collect(), text));
                }
            }
        }
        (out.into_iter().map(|x| x.1).collect::<Vec<_>>(), untried)
    };
    let several = found.len() > 1;
    // Numbers beyond all limits: the rule says the limit, and nothing near it is tried.
    let beyond = is_beyond(o);
    let one = |v: &Violation| {
        if beyond {
            return Violation { nearest: vec![], untried: vec![], beyond, ..v.clone() };
        }
        let (nearest, untried) = offered(v);
        let alone = v.nearest.iter().filter(|_| several).take(OFFERED).cloned().collect();
        Violation { nearest, untried, alone, ..v.clone() }
    };
    found.iter().map(one).collect()
}

/// Meshes of as many ranks that compile, the nearest to the one asked for first, as `--mesh` takes
/// them; with the microbatch that they need if that is another. Those of the axes that were asked for, and of data
/// parallelism, come first; others only where none of these is legal and no number nearby helps.
pub fn meshes(model: &Path, f: &Facts, o: &Options, found: &[Violation]) -> Vec<String> {
    if is_beyond(o) {
        return vec![];
    }
    let expected = |new: &Options| {
        let of = |a: &(String, usize)| a.1 == 1 || a.0.starts_with("dp_") || o.axis(&a.0) > 1;
        new.mesh.iter().all(of)
    };
    let (own, others): (Vec<_>, Vec<_>) = nearest_meshes(f, o).into_iter().partition(expected);
    let mut room = ACTIONS;
    let mut tried = |new: &Options| {
        let rest = room.checked_sub(actions(new));
        room = rest.unwrap_or(room);
        rest.is_some() && compiles(model, new)
    };
    let mut fits: Vec<Options> =
        own.into_iter().take(COMPILED).filter(|new| tried(new)).take(OFFERED).collect();
    if fits.is_empty() && found.iter().any(|v| v.nearest.is_empty()) {
        fits.extend(others.into_iter().take(COMPILED).filter(|new| tried(new)).take(OFFERED));
    }
    let text = |new: Options| match new.microbatch == o.microbatch {
        true => mesh_text(&new),
        false => format!("{} --microbatch {}", mesh_text(&new), new.microbatch),
    };
    fits.into_iter().map(text).collect()
}

/// True if a schedule of so many stages or microbatches is refused whatever else is asked.
fn is_beyond(o: &Options) -> bool {
    let stages = o.axis("pp").saturating_mul(o.chunks.unwrap_or(1));
    stages > 1 << 16 || o.microbatches() > MAX_MICROBATCHES
}

/// Forward passes of the ranks of a pipeline in a step.
fn actions(o: &Options) -> usize {
    let ranks = o.axis("pp").saturating_mul(o.chunks.unwrap_or(1));
    ranks.saturating_mul(o.microbatches())
}

/// True if a plan of these options takes longer to make than a refusal may.
pub fn is_long(o: &Options) -> bool {
    actions(o) > ACTIONS
}

/// Whether there is a speed of each rank of the pipeline, if of any: as the flag asks.
fn has_all_speeds(o: &Options) -> bool {
    o.speeds.is_empty() || o.speeds.len() == o.axis("pp")
}

fn compiles(model: &Path, o: &Options) -> bool {
    !is_long(o) && has_all_speeds(o) && crate::compile_legal(model, o, Manager::default()).is_ok()
}

/// Options with further changes until no rule is violated, and these changes.
fn completed(
    f: &Facts,
    o: Options,
    made: &[&String],
    deep: usize,
    looked: &mut usize,
) -> Option<(Options, Vec<String>)> {
    let found = rules::violations(f, &o);
    let Some(first) = found.first() else { return Some((o, vec![])) };
    if deep == 1 {
        return None;
    }
    for change in &first.nearest {
        *looked = looked.checked_sub(1)?;
        // What was changed on the way here stays so.
        if made.iter().any(|m| about(m).iter().any(|w| about(change).contains(w))) {
            continue;
        }
        let Some(new) = with(&o, change).filter(|new| !is_long(new)) else { continue };
        let made = [made, &[change]].concat();
        if let Some((new, mut more)) = completed(f, new, &made, deep - 1, looked) {
            more.insert(0, change.clone());
            return Some((new, more));
        }
    }
    None
}

/// Changes as flags of `compile`: those of axes as the whole mesh; with the microbatch that was compiled, if that is
/// another. A flag that is not to be there is named.
fn written(o: &Options, new: &Options, all: &[&String]) -> String {
    let of_mesh = |c: &str| !about(c).iter().any(|w| w.starts_with("--"));
    let mut words: Vec<String> = vec![];
    let whole = all.iter().any(|c| of_mesh(c));
    words.extend(whole.then(|| mesh_flag(new)));
    let flags = all.iter().filter(|c| !of_mesh(c));
    words.extend(flags.map(|c| c.replace("no --", "without --")));
    let silent = new.microbatch == o.microbatch || words.iter().any(|w| w.contains("--microbatch"));
    words.extend((!silent).then(|| format!("--microbatch {}", new.microbatch)));
    // What is to be left out comes last, so that nobody takes what follows for a part of it.
    words.sort_by_key(|w| w.starts_with("without"));
    words.join(" ")
}

/// The axes and flags that a change is about.
fn about(change: &str) -> Vec<&str> {
    let words = change.split([' ', '=']);
    words.filter(|w| w.parse::<usize>().is_err() && !["no", "and"].contains(w)).collect()
}

/// Axes and numbers of experts as `--mesh` takes them.
pub fn mesh_text(o: &Options) -> String {
    let axes = o.mesh.iter().filter(|a| a.1 > 1);
    let mut all: Vec<String> = axes.map(|(name, n)| format!("{name}={n}")).collect();
    all.extend((o.ep > 1).then(|| format!("ep={}", o.ep)));
    all.extend(o.etp.map(|n| format!("etp={n}")));
    all.join(",")
}

/// The flag of a mesh; one rank has none.
pub fn mesh_flag(o: &Options) -> String {
    match mesh_text(o) {
        text if text.is_empty() => "without --mesh".into(),
        text => format!("--mesh {text}"),
    }
}

/// Meshes of as many ranks that violate nothing, the nearest to the one asked for first. Near is where no axis is new,
/// sizes that are new are powers of two, and few axes change by small factors.
fn nearest_meshes(f: &Facts, o: &Options) -> Vec<Options> {
    let both = o.axis("dp_replicate") > 1 && o.axis("dp_shard") > 1;
    let shards = o.zero > 0 || o.ep > 1 || o.axis("dp_shard") > 1;
    let axes: Vec<&str> = axes::names(|r| both || !r.of_rows() || r.shares == shards).collect();
    let ranks: usize = o.mesh.iter().map(|a| a.1).product();
    let other = o.mesh.iter().any(|a| a.1 > 1 && !axes.contains(&&*a.0));
    if ranks <= 1 || ranks > 1 << 16 || other {
        return vec![];
    }
    let divisors: Vec<usize> = (1..=ranks).filter(|d| ranks % d == 0).collect();
    // All ways to write the ranks as a product over the axes, the last taking what is left.
    let mut all: Vec<Vec<usize>> = vec![vec![]];
    for axis in &axes[..axes.len() - 1] {
        let most = if *axis == "pp" { f.layers } else { ranks };
        let more = |sizes: &Vec<usize>| {
            let left = ranks / sizes.iter().product::<usize>();
            let fits = divisors.iter().filter(move |&&d| left % d == 0 && d <= most);
            fits.map(|&d| [&sizes[..], &[d]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(more).collect();
    }
    all.iter_mut().for_each(|s| s.push(ranks / s.iter().product::<usize>()));
    let apart = |sizes: &Vec<usize>| -> f64 {
        let one = |(a, n): (&&str, &usize)| (*n as f64 / o.axis(a) as f64).log2().abs();
        axes.iter().zip(sizes).map(one).sum()
    };
    let strange = |sizes: &Vec<usize>| -> (usize, usize) {
        let pairs = || axes.iter().zip(sizes).filter(|(a, n)| **n > 1 && **n != o.axis(a));
        let new = pairs().filter(|(a, _)| o.axis(a) == 1).count();
        (new, pairs().filter(|(_, n)| !n.is_power_of_two()).count())
    };
    all.sort_by(|a, b| {
        let by_size = apart(a).total_cmp(&apart(b)).then(a.cmp(b));
        strange(a).cmp(&strange(b)).then(by_size)
    });
    let options = |sizes: Vec<usize>| {
        let some = axes.iter().zip(sizes).filter(|(_, n)| *n > 1);
        let mesh: Vec<(String, usize)> = some.map(|(a, n)| (a.to_string(), n)).collect();
        let new = with_mesh(o, mesh);
        Some(new).filter(|new| !is_long(new) && rules::violations(f, new).is_empty())
    };
    all.into_iter().filter_map(options).take(rules::LOOKED_AT).collect()
}

/// Options on another mesh; the microbatch stays the default if it was.
pub fn with_mesh(o: &Options, mesh: Vec<(String, usize)>) -> Options {
    let of_default = o.microbatch == flags::default_microbatch(o);
    let mut new = Options { mesh, ..o.clone() };
    if of_default {
        new.microbatch = flags::default_microbatch(&new);
    }
    new
}

/// Options with a change as rules write it: `tp=2`, `ep=1 and no etp`, `--seq 16`, `no --sp`.
fn with(o: &Options, change: &str) -> Option<Options> {
    let of_default = o.microbatch == flags::default_microbatch(o);
    let mut new = o.clone();
    let mut own_microbatch = false;
    let mut words = change.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "and" => {}
            "no" => match words.next()? {
                "--sp" => new.sp = false,
                "etp" => new.etp = None,
                _ => return None,
            },
            "--schedule" => new.schedule = Order::Named(words.next()?.into()),
            "--tp-mode" => {
                new.tp_mode = if words.next()? == "1d" { TpMode::OneD } else { return None };
            }
            flag if flag.starts_with("--") => {
                let n: usize = words.next()?.parse().ok()?;
                match flag {
                    "--seq" => new.seq = n,
                    "--global-batch" => new.global_batch = n,
                    "--chunks" => new.chunks = Some(n),
                    "--microbatch" => (new.microbatch, own_microbatch) = (n, true),
                    _ => return None,
                }
            }
            number => {
                let (name, n) = number.split_once('=')?;
                resize(&mut new, name, n.parse().ok()?);
            }
        }
    }
    if of_default && !own_microbatch {
        new.microbatch = flags::default_microbatch(&new);
    }
    has_all_speeds(&new).then_some(new)
}

/// Gives an axis another size, or adds it where it belongs.
fn resize(o: &mut Options, name: &str, size: usize) {
    match name {
        "ep" => o.ep = size,
        "etp" => o.etp = Some(size),
        _ => {
            if let Some(a) = o.mesh.iter_mut().find(|a| a.0 == name) {
                a.1 = size;
            } else {
                let at = o.mesh.iter().position(|a| flags::place_of(&a.0) > flags::place_of(name));
                o.mesh.insert(at.unwrap_or(o.mesh.len()), (name.into(), size));
            }
        }
    }
}
