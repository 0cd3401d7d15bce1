//! `inspect --phase kernels`: what a rank launches, where it comes from, what it moves, and the text
//! that is compiled.

use super::collectives::between;
use super::place;
use serde_json::{Value as Json, json};
use shardc_codegen::{c, program};
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Value};
use shardc_ir::group::{Launch, launches};
use shardc_ir::kernel::Kernel;
use shardc_ir::mesh::Mesh;
use shardc_plans::stored::Stored;
use shardc_process::terminal::json_line;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// One kernel whose text is made for it.
struct Entry {
    /// Where it runs first: function, launch, and which of its kernels it is there.
    first: (usize, usize, usize),
    runs: usize,
    kernel: Kernel,
    scopes: BTreeSet<String>,
}

/// Bytes of one rank's pieces, each tensor once.
fn bytes(mesh: &Mesh, f: &Func, values: impl Iterator<Item = Value>) -> usize {
    let each: BTreeSet<Value> = values.collect();
    each.iter().map(|&v| f.ty(v).local_bytes(mesh)).sum()
}

/// What a launch moves at least: all it reads and writes, once. And what its nodes would, each alone.
fn moved(mesh: &Mesh, f: &Func, x: &Launch) -> (usize, usize) {
    let all = x.ins.iter().chain(&x.outs).copied();
    let nodes = f.nodes[x.nodes.clone()].iter().filter(|n| !n.op.def().is_view());
    let alone = nodes.map(|n| bytes(mesh, f, n.ins.iter().chain(&n.outs).copied()));
    (bytes(mesh, f, all), alone.sum())
}

/// The name of a kernel over rows; of a product with an epilogue, its sizes and the names of what blocks
/// of its result go through. `None` if a kernel is neither.
fn name(k: &Kernel) -> Option<String> {
    match k {
        Kernel::Rows(k) => Some(k.symbol.to_string()),
        Kernel::GemmThen(then) => {
            let symbols: Vec<&str> = then.blocks.iter().map(|k| &*k.symbol).collect();
            let g = &then.product;
            let batch: usize = g.batch.iter().product();
            let times = if batch == 1 { String::new() } else { format!("{batch} x ") };
            let (m, n, k) = (g.m, g.n, g.k * g.sum.iter().product::<usize>());
            Some(format!("product {times}{m} x {n} x {k} to {}", symbols.join(", ")))
        }
        _other => None,
    }
}

/// What a launch runs, each by itself.
fn kernels_of(k: &Kernel) -> Vec<Kernel> {
    match k {
        Kernel::HorizontalFusion(k) => k.kernels.iter().cloned().map(Kernel::Rows).collect(),
        one => vec![one.clone()],
    }
}

/// Collectives that may be under way while launches run, those of like layers together: how many, and of
/// the first where it begins, what runs meanwhile, and what waits for it.
fn overlaps(s: &Stored, rank: usize) -> (Vec<Json>, String) {
    let (plan, mesh) = (&s.plan, &s.plan.module.mesh);
    let class = &plan.classes[plan.class_of(rank)];
    let mut found = BTreeMap::<(usize, String, String), (usize, Json, String)>::new();
    let each = between(s, class);
    let all = each.len();
    for b in each.into_iter().filter(|b| !b.meanwhile.is_empty()) {
        let f = &plan.module.funcs[b.at.0];
        let n = &f.nodes[b.at.1];
        let Some(k) = n.op.collective() else { continue };
        let axes = mesh.names(k.atoms(), "+");
        let end = b.awaited_by.unwrap_or("the end of the call".into());
        let what = format!("{}[{axes}]", n.op.mnemonic());
        let line = format!("{}, while {}; awaited by {end}", b.name, b.meanwhile.join("; "));
        let row = json!({
            "function": f.name, "collective": b.name, "axes": axes,
            "meanwhile": b.meanwhile, "awaited_by": end,
        });
        let scope = place(&f.scope_info(n.scope).path);
        found.entry((b.at.0, what, scope)).or_insert((0, row, line)).0 += 1;
    }
    let count: usize = found.values().map(|x| x.0).sum();
    let mut text = format!("{count} of {all} collectives can be under way while others run");
    text += if found.is_empty() { "\n" } else { ":\n" };
    for ((i, what, scope), (n, _, line)) in &found {
        let f = &plan.module.funcs[*i].name;
        let _ = writeln!(text, "  {n} {what} of {scope} in @{f}, first {line}");
    }
    (found.into_values().map(|x| x.1).collect(), text)
}

/// The page, or its JSON.
///
/// # Errors
/// `dtype`, `plan`: those of lowering.
pub fn kernels(s: &Stored, rank: usize, json: bool) -> Result<String> {
    let (m, mesh) = (&s.plan.module, &s.plan.module.mesh);
    let all = program(&s.plan, rank)?;
    let mut found: BTreeMap<String, Entry> = BTreeMap::new();
    let mut others: BTreeMap<&'static str, usize> = BTreeMap::new();
    let [mut launched, mut launched_products] = [0; 2];
    for (i, own) in all.iter().enumerate().filter(|p| !p.1.is_empty()) {
        let f = &m.funcs[i];
        for (j, (x, run)) in launches(f).iter().zip(own).enumerate() {
            match run {
                Kernel::Rows(_) | Kernel::HorizontalFusion(_) => launched += 1,
                Kernel::GemmThen(_) => launched_products += 1,
                Kernel::View => continue,
                _other => {
                    *others.entry(f.nodes[x.nodes.start].op.mnemonic()).or_default() += 1;
                    continue;
                }
            }
            for (k, (x, kernel)) in x.kernels(f).iter().zip(kernels_of(run)).enumerate() {
                let Some(name) = name(&kernel) else { continue };
                let e = found.entry(name).or_insert_with(|| Entry {
                    first: (i, j, k),
                    runs: 0,
                    kernel: kernel.clone(),
                    scopes: BTreeSet::new(),
                });
                e.runs += 1;
                let nodes = &f.nodes[x.nodes.clone()];
                e.scopes.extend(nodes.iter().map(|n| place(&f.scope_info(n.scope).path)));
            }
        }
    }
    let mut order: Vec<(&String, &Entry)> = found.iter().collect();
    order.sort_by_key(|e| e.1.first);
    let mut rows: Vec<Json> = vec![];
    let count = |products: bool| {
        let of = |e: &&(&String, &Entry)| matches!(e.1.kernel, Kernel::GemmThen(_)) == products;
        order.iter().filter(of).count()
    };
    let (of_rows, products) = (count(false), count(true));
    let mut text = format!(
        "rank {rank}: {of_rows} kernels over rows in {launched} launches of its functions, {products} \
         products with epilogues in {launched_products}; others: ",
    );
    let other: Vec<String> = others.iter().map(|(name, n)| format!("{name} {n}")).collect();
    let _ = writeln!(text, "{}", other.join(", "));
    let (overlaps, said) = overlaps(s, rank);
    text += &said;
    for (name, e) in &order {
        let f = &m.funcs[e.first.0];
        let x = &launches(f)[e.first.1].kernels(f)[e.first.2];
        let ops: Vec<&str> = f.nodes[x.nodes.clone()].iter().map(|n| n.op.mnemonic()).collect();
        let names = |v: &[Value]| v.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>();
        let (least, alone) = moved(mesh, f, x);
        let scopes: Vec<&str> = e.scopes.iter().map(String::as_str).collect();
        let source = c::print(std::iter::once(&e.kernel));
        let source = source.strip_prefix(c::HEADER).unwrap_or(&source).trim();
        let _ = write!(
            text,
            "\n{name}: {}, {least} B moved each, the least; {alone} B node by node\n  ops     {}\n  first   @{}: {} from {}\n  in      {}\n\n{source}\n",
            shardc_ir::diag::count(e.runs, "time", "times"),
            ops.join(", "),
            f.name,
            names(&x.outs).join(", "),
            names(&x.ins).join(", "),
            scopes.join(", "),
        );
        rows.push(json!({
            "name": name, "runs": e.runs, "ops": ops, "function": f.name,
            "reads": names(&x.ins), "writes": names(&x.outs), "scopes": scopes,
            "bytes": least, "bytes_by_node": alone, "source": source,
        }));
    }
    if json {
        let out = json!({ "phase": "kernels", "rank": rank, "kernels": rows, "others": others, "overlaps": overlaps });
        return Ok(json_line("inspect-kernels", out));
    }
    Ok(text)
}
