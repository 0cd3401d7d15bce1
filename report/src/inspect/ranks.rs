//! The ranks of a mesh: coordinates, groups, and slices of the weights.

use super::summary::{lines, trimmed};
use serde::Serialize;
use serde_json::json;
use shardc_ir::diag::{Diag, Result, count, one_line};
use shardc_ir::func::RoleKind;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::plan::Plan;
use shardc_ir::steps;
use shardc_passes::options::Options;
use shardc_passes::shard::experts::{ExpertRole, ranks_of};
use shardc_process::terminal::{self, json_line};
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranks of the table if nobody says which.
const FIRST: usize = 64;
/// Most ranks of one group that are named.
const MAX_GROUP: usize = 8;

/// Index along every axis, by axis name, for the rank.
pub fn coordinates(mesh: &Mesh, rank: usize) -> Vec<(String, usize)> {
    let digits = mesh.coords(rank);
    let one = |a: &shardc_ir::mesh::Axis| {
        let atoms = mesh.axis(&a.name).unwrap_or_default();
        (a.name.clone(), mesh.place(atoms, &digits))
    };
    mesh.axes.iter().map(one).collect()
}

/// `0 1 2 3 … 4 more`.
pub fn group_text(group: impl ExactSizeIterator<Item = usize>) -> String {
    let more = group.len().saturating_sub(MAX_GROUP);
    let some: Vec<String> = group.take(MAX_GROUP).map(|r| r.to_string()).collect();
    steps::add("ranks", some.len());
    match more {
        0 => some.join(" "),
        more => format!("{} … {more} more", some.join(" ")),
    }
}

/// The axes, each followed by its parts if it is used in parts, then what they are for experts: name
/// and atoms.
fn axes_and_parts(mesh: &Mesh, experts: Option<&Options>) -> Vec<(String, AtomSet)> {
    let mut out = vec![];
    for a in &mesh.axes {
        let all = mesh.axis(&a.name).unwrap_or_default();
        out.push((a.name.clone(), all));
        let parts = all.iter().filter(|_| all.len() > 1).map(AtomSet::one);
        out.extend(parts.map(|p| (mesh.names(p, "*"), p)));
    }
    for (name, part) in
        [("edp", ExpertRole::Data), ("ep", ExpertRole::Expert), ("etp", ExpertRole::Tensor)]
    {
        let atoms = experts.map(|o| ranks_of(mesh, o, part)).unwrap_or_default();
        out.extend((!atoms.is_empty()).then(|| (name.to_string(), atoms)));
    }
    out
}

/// The ranks that a word asks for: `all`, `8-15`, `3`, or nothing for the first of them.
///
/// # Errors
/// `unknown-rank` if the plan has fewer ranks, or the word is none of these.
pub fn asked(word: &str, ranks: usize) -> Result<Range<usize>> {
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    let found = match word {
        "" => Some(0..ranks.min(FIRST)),
        "all" => Some(0..ranks),
        _ => first.trim().parse().ok().zip(last.trim().parse::<usize>().ok()).and_then(|(a, b)| {
            let end = b.checked_add(1).filter(|end| *end <= ranks)?;
            (a < end).then_some(a..end)
        }),
    };
    found.ok_or_else(|| {
        Diag::new("unknown-rank", format!("the plan has ranks 0 to {}", ranks.saturating_sub(1)))
            .at(format!("--ranks={word}"))
            .help(format!("use --ranks=all, or a part such as --ranks=0-{}", ranks.clamp(1, 8) - 1))
    })
}

/// These ranks with coordinates and groups; those of experts if options are given.
pub fn table(mesh: &Mesh, experts: Option<&Options>, asked: Range<usize>, as_json: bool) -> String {
    let over = axes_and_parts(mesh, experts);
    if as_json {
        return json_of(mesh, &over, asked);
    }
    let mut t = terminal::table();
    let axes = || mesh.axes.iter().map(|a| a.name.clone());
    let groups = over.iter().map(|(name, _)| format!("group over {name}"));
    t.set_header(["rank".to_string()].into_iter().chain(axes()).chain(groups));
    let shown = asked.len();
    for r in asked {
        let at = coordinates(mesh, r).into_iter().map(|(_, i)| i.to_string());
        let of = over.iter().map(|(_, atoms)| group_text(mesh.members(*atoms, r)));
        t.add_row([r.to_string()].into_iter().chain(at).chain(of));
    }
    let mut out = trimmed(&t);
    if mesh.ranks() > shown {
        let more = mesh.ranks() - shown;
        out.push_str(&format!("… {more} more: --ranks=all, or --ranks=FROM-TO\n"));
    }
    out
}

/// Each group once, as its ranks; a rank says which of them are its own. So the text grows with the ranks, and
/// not with their square where an axis has them all.
fn json_of(mesh: &Mesh, over: &[(String, AtomSet)], asked: Range<usize>) -> String {
    let mut groups: Vec<Vec<Vec<usize>>> = vec![vec![]; over.len()];
    let mut by_first: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new(); over.len()];
    let mut one = |r: usize| {
        let at: BTreeMap<String, usize> = coordinates(mesh, r).into_iter().collect();
        let mut own = BTreeMap::new();
        for (k, (name, atoms)) in over.iter().enumerate() {
            let first = mesh.members(*atoms, r).next().unwrap_or(r);
            let group = *by_first[k].entry(first).or_insert_with(|| {
                groups[k].push(mesh.group(*atoms, r));
                groups[k].len() - 1
            });
            own.insert(&**name, group);
        }
        json!({ "rank": r, "coordinates": at, "groups": own })
    };
    let shown: Vec<_> = asked.map(&mut one).collect();
    let groups: BTreeMap<&str, _> = over.iter().map(|(name, _)| &**name).zip(groups).collect();
    let all = json!({
        "$schema": "shardc/inspect-ranks/2", "ranks": mesh.ranks(), "groups": groups, "shown": shown,
    });
    json_line("inspect-ranks", all)
}

/// One rank: where it stands and what it holds.
#[derive(Serialize)]
pub struct Rank {
    rank: usize,
    ranks: usize,
    coordinates: Vec<(String, usize)>,
    weights: Vec<Slice>,
}

/// A rank's piece of a weight: per dim offset, length and the whole size.
#[derive(Serialize)]
struct Slice {
    name: String,
    dims: Vec<(usize, usize, usize)>,
}

impl Rank {
    /// A rank of a plan.
    ///
    /// # Errors
    /// `unknown-rank` if the plan has fewer ranks.
    pub fn of(plan: &Plan, rank: usize) -> Result<Rank> {
        let mesh = &plan.module.mesh;
        if rank >= mesh.ranks() {
            return Err(Diag::new(
                "unknown-rank",
                format!("the plan has {}", count(mesh.ranks(), "rank", "ranks")),
            )
            .at(format!("--rank {rank}"))
            .help(format!("use --rank 0 to --rank {}", mesh.ranks() - 1)));
        }
        let digits = mesh.coords(rank);
        let mut weights: Vec<Slice> = vec![];
        let own = &plan.classes[plan.class_of(rank)].funcs;
        for f in own.iter().map(|&f| &plan.module.funcs[f]) {
            for a in &f.args {
                let Some(role) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) else {
                    continue;
                };
                if weights.iter().any(|w| *w.name == *role.name) {
                    continue;
                }
                let t = f.ty(a.value);
                let dim = |d: usize| {
                    let e = t.extent(mesh, d, &digits);
                    (e.offset, e.len, t.dims[d].size)
                };
                let dims = (0..t.rank()).map(dim).collect();
                weights.push(Slice { name: role.name.to_string(), dims });
            }
        }
        Ok(Rank { rank, ranks: mesh.ranks(), coordinates: coordinates(mesh, rank), weights })
    }

    /// Comment lines above the program, so that the whole still is a program.
    pub fn header(&self) -> String {
        let at: Vec<String> = self.coordinates.iter().map(|(a, i)| format!("{a}={i}")).collect();
        let at = if at.is_empty() { "alone".into() } else { at.join(", ") };
        let mut t = terminal::table();
        for w in &self.weights {
            let dim = |&(from, len, n): &(usize, usize, usize)| match len == n {
                true => format!("all {n}"),
                false => format!("{from}..{} of {n}", from + len),
            };
            let dims: Vec<String> = w.dims.iter().map(dim).collect();
            t.add_row([one_line(&w.name).into_owned(), dims.join(", ")]);
        }
        let head =
            format!("rank {} of {}: {at}\nits slices of the weights\n", self.rank, self.ranks);
        lines("// ", &(head + &trimmed(&t)))
    }
}
