//! Sizes of a rank's piece, as notes on every line.

use shardc_ir::func::Module;
use shardc_ir::mesh::Mesh;
use shardc_ir::text::parse_type;
use shardc_ir::types::Type;

/// `[2,64]`: the storage shape of a rank's piece.
fn sizes(mesh: &Mesh, t: &Type) -> String {
    let all: Vec<String> = t.chunks(mesh).iter().map(usize::to_string).collect();
    format!("[{}]", all.join(","))
}

/// Puts `local [2,64]` before the note of every node.
pub fn annotate(m: &mut Module) {
    for f in &mut m.funcs {
        for i in 0..f.nodes.len() {
            let of = |v: &shardc_ir::func::Value| sizes(&m.mesh, f.ty(*v));
            let all: Vec<String> = f.nodes[i].outs.iter().map(of).collect();
            let local = format!("local {}", all.join(", "));
            let note = match f.nodes[i].note.take() {
                Some(old) => format!("{local}; {old}"),
                None => local,
            };
            f.nodes[i].note = Some(note.into());
        }
    }
}

/// Adds ` // local [2,64]` to the lines of a printed program that are arguments or results of a
/// function. They have no notes in the program, and comments are not part of it.
pub fn arguments(mesh: &Mesh, text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 5 / 4);
    for line in text.lines() {
        out.push_str(line);
        let item = line.strip_prefix(' ').and_then(|l| l.strip_suffix(','));
        let ty = item.map(|l| l.split_once(": ").map_or(l, |(_, t)| t).trim_start());
        // The type ends at its bracket: what follows does not change sizes.
        let ty =
            ty.and_then(|t| Some(&t[..=t.find(']')?])).filter(|t| !t.contains(['%', '=', ' ']));
        if let Some(t) = ty.and_then(|t| parse_type(mesh, t).ok()) {
            out.push_str("  // local ");
            out.push_str(&sizes(mesh, &t));
        }
        out.push('\n');
    }
    out
}
