//! The programs of a plan: calls and their places, collectives, ranks, kernels, the schedule.

pub mod collectives;
pub mod instructions;
pub mod kernels;
pub mod layers;
pub mod local;
pub mod ranks;
pub mod summary;
pub mod timeline;

pub use layers::{
    Calls, LayerCollectives, Section, Where, is_gradient, layer_collectives, numbered,
};
pub use ranks::{coordinates, group_text};
pub use summary::{layers as layers_of, mesh_line, order, trimmed};
pub use timeline::{measured, read as read_trace, unit};

use shardc_ir::diag::Diag;
use shardc_ir::func::Module;
use shardc_ir::text;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{note, warn};

/// A warning where a plan's programs are not those that its model compiles to, or a note where they need not be.
pub fn other_programs(s: &Stored, again: &Module) {
    if let Some(from) = &s.from {
        let why = "why, and what passes leave, is said of its model, compiled without that";
        return note(format!("this plan was made with --from {}: {why}", from.pass));
    }
    let differ = text::print(&s.plan.module) != text::print(again);
    let what =
        "this plan's programs differ from those that its model.ir and options.toml compile to";
    let d = || {
        Diag::new("plan", what)
            .why("what passes leave, and why, is made again from model.ir")
            .help("without --phase, shardc inspect shows the stored programs; shardc verify says where they differ")
    };
    warn(&Vec::from_iter(differ.then(d)));
}

/// A scope without the number of its layer.
pub fn place(path: &str) -> String {
    let part = |p: &str| if p.parse::<usize>().is_ok() { "*".into() } else { p.to_string() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}
