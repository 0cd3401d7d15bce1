//! What the pass `group` makes launches of.

mod alike;
mod buckets;
mod epilogues;
mod loops;
mod sums;

use shardc_ir::func::{Func, Module};
use shardc_ir::group::{Launch, launches};
use shardc_ir::phase::Phase;
use shardc_ir::text::{parse, print};
use shardc_ir::verify::verify;
use shardc_passes::group::group;
use shardc_passes::options::{Fuse, Options};

/// A module of one function without a mesh.
fn module(text: &str) -> Module {
    parse(&format!("mesh []\n\nfunc @f{text}\n")).unwrap_or_else(|e| panic!("{}", e.render()))
}

/// The launches of a function after the pass; their text is read as what it was printed from.
fn grouped(text: &str, fuse: Fuse) -> (Func, Vec<Launch>) {
    let mut m = module(text);
    group(&m.mesh, &mut m.funcs[0], &Options { fuse, ..Options::default() });
    verify(&m, Phase::Ranked).unwrap_or_else(|all| panic!("{all:?}"));
    let text = print(&m);
    assert_eq!(print(&parse(&text).expect("what was printed")), text);
    let f = m.funcs.swap_remove(0);
    let all = launches(&f);
    (f, all)
}
