//! The program of docs/library.md: compiles a model, walks the programs of its ranks, prices a step.

use shardc::flags::Flags;
use shardc::proof::Prove;
use shardc_cost::device::Device;
use shardc_ir::diag::Result;
use std::path::Path;

fn main() {
    let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tiny-llama"));
    match study(model) {
        Ok(lines) => println!("{}", lines.join("\n")),
        Err(d) => {
            eprintln!("{d}");
            std::process::exit(d.exit as i32);
        }
    }
}

fn study(model: &Path) -> Result<Vec<String>> {
    // Options have the names of the flags of `shardc compile`, and their defaults.
    let flags = Flags::default().with("mesh", "dp=2,tp=2").with("seq", 128);
    let options = flags.with("global-batch", 8).options()?;
    let mut compiled = shardc::compile(model, &options, &mut |_, _| {})?;
    compiled.prove(Prove::Auto)?;

    // A plan has one module of functions; ranks of one pipeline stage run the same ones.
    let plan = &compiled.stored.plan;
    let mesh = &plan.module.mesh;
    let mut lines = vec![];
    for func in &plan.module.funcs {
        for node in &func.nodes {
            let Some(collective) = node.op.collective() else { continue };
            let axes = mesh.names(collective.atoms(), "+");
            let scope = &func.scope_info(node.scope).path;
            lines.push(format!("@{} {} over {axes} in {scope}", func.name, node.op.mnemonic()));
        }
    }
    for (rank, class) in plan.classes.iter().enumerate() {
        lines.push(format!("pipeline rank {rank}: peak {} B", class.memory.peak_bytes));
    }

    let device = Device::named("h100-sxm")?;
    let price = shardc_cost::plan::price(plan, &device, &options.speeds)?;
    lines.push(format!("a step on {}: {:.2} ms", device.name, 1e3 * price.total));
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page shows this program as it is, and it says what it says there.
    #[test]
    fn the_page_shows_this_program() {
        let page = include_str!("../../../docs/library.md");
        let program = include_str!("main.rs").split("\n#[cfg(test)]").next().unwrap_or_default();
        assert!(page.contains(program), "docs/library.md shows another program");
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tiny-llama"));
        let lines = study(model).expect("a plan");
        let shown = page.split("```text\n").nth(1).and_then(|t| t.split("\n```").next());
        let ends = |n: usize| lines[n..].join("\n");
        let shown: Vec<&str> = shown.expect("output").split("\n...\n").collect();
        assert!(ends(0).starts_with(shown[0]), "{}", ends(0));
        assert!(ends(0).ends_with(shown[1]), "{}", ends(0));
    }
}
