//! Which loops the letters of a `dot` become.

use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, launch, lower};
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name};
use shardc_ir::group::launches;
use shardc_ir::kernel::{Gemm, Kernel};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Dot;
use shardc_ir::text::parse;
use shardc_ir::types::{AtomList, Type};

/// The kernel of a `dot` on one rank; dim 1 of the operands marked `true` is split over tp, the
/// others are replicated.
fn dot(ways: usize, rank: usize, rule: &str, ins: [(&[usize], bool); 2]) -> Kernel {
    let mesh = Mesh::new(&[("tp", ways)]).unwrap();
    let mut f = Func::new("f");
    let args = ins.map(|(sizes, split)| {
        let mut t = Type::f32(sizes);
        if ways > 1 && split {
            t.dims[1].atoms = AtomList::collect([Atom(0)]).unwrap();
        } else if ways > 1 {
            t.replicated = AtomSet::one(Atom(0));
        }
        f.arg(t, Name::parse("x"), None)
    });
    let ranks = ins.map(|i| i.0.len());
    Builder::new(&mesh, &mut f).push("y", Dot::by(rule, &ranks), &args);
    lower(&mesh, &f, &f.nodes[0], &mesh.coords(rank)).unwrap()
}

fn gemm(k: Kernel) -> Gemm {
    match k {
        Kernel::Gemm(g) => g,
        other => panic!("{other:?} is not a product"),
    }
}

#[test]
fn adjacent_letters_become_one_loop() {
    let g = gemm(dot(1, 0, "bsh,oh->bso", [(&[2, 3, 4], false), (&[5, 4], false)]));
    assert_eq!((g.m, g.n, g.k, g.batch.len(), g.sum.len()), (6, 5, 4, 0, 0));
    let g = gemm(dot(1, 0, "bso,bsh->oh", [(&[2, 3, 5], false), (&[2, 3, 4], false)]));
    assert_eq!((g.m, g.n, g.k, g.batch.len(), g.sum.len()), (5, 4, 6, 0, 0));
    let g = gemm(dot(1, 0, "bmk,bkn->bmn", [(&[2, 3, 5], false), (&[2, 5, 4], false)]));
    assert_eq!((g.m, g.n, g.k, &g.batch[..]), (3, 4, 5, &[2][..]));
}

#[test]
fn columns_of_a_result_are_adjacent() {
    // A gradient of a weight of GPT-2, [in, out], from that of the output and the input.
    let g = gemm(dot(1, 0, "bso,bsh->ho", [(&[2, 3, 5], false), (&[2, 3, 4], false)]));
    assert_eq!((g.m, g.n, g.k), (4, 5, 6));
    assert_eq!((g.a.view.operand, g.b.view.operand), (1, 0));
    assert_eq!((g.out.row_stride, g.out.col_stride, g.a.row_stride, g.b.col_stride), (5, 1, 1, 1));
}

#[test]
fn padded_letters_stay_loops_of_their_own() {
    // 5 positions over 2 ranks: rank 0 holds 3 of 3, rank 1 holds 2 of 3 places.
    let forward = |r| gemm(dot(2, r, "bsh,oh->bso", [(&[4, 5, 7], true), (&[6, 7], false)]));
    assert_eq!((forward(0).m, forward(0).batch.len()), (12, 0));
    let g = forward(1);
    assert_eq!((g.m, &g.batch[..], g.a.view.strides[0]), (4, &[2][..], 7));
    assert_eq!(g.a.row_stride, 21);
    let g = gemm(dot(2, 1, "bso,bsh->oh", [(&[4, 5, 6], true), (&[4, 5, 7], true)]));
    assert_eq!((g.k, &g.sum[..], g.out.view.strides.len()), (4, &[2][..], 0));
}

#[test]
fn products_without_two_sides_are_reductions() {
    for (rule, ins) in [
        ("bsh,bsh->bs", [(&[2, 3, 4][..], false), (&[2, 3, 4][..], false)]),
        ("ab,ab->", [(&[2, 3], false), (&[2, 3], false)]),
        ("bs,bsh->h", [(&[2, 3], false), (&[2, 3, 4], false)]),
    ] {
        assert!(matches!(dot(1, 0, rule, ins), Kernel::Rows(_)), "{rule}");
    }
}

/// 5 columns over 4 ranks, 2 places each: the last has none, and nothing to launch.
#[test]
fn epilogues_of_columns_that_do_not_divide() {
    let text = "mesh [tp=4]

func @f(%x: f32[3,4], %w: f32[4,5@tp]) -> f32[3,5@tp] {
  %d = dot[rk,kc->rc] %x, %w : f32[3,5@tp] &
  %y = silu %d : f32[3,5@tp]
  return %y
}
";
    let m = parse(text).unwrap_or_else(|e| panic!("{}", e.render()));
    let f = &m.funcs[0];
    for (rank, cols) in [2, 2, 1, 0].into_iter().enumerate() {
        let k = launch(&m.mesh, f, &launches(f)[0], &m.mesh.coords(rank)).unwrap();
        assert_eq!(cuda::launches(&k, &Limits::of("sm_80")).unwrap().len(), usize::from(cols > 0));
        let Kernel::GemmThen(k) = k else { panic!("no epilogue") };
        assert_eq!((k.product.n, k.blocks.len()), (cols, usize::from(cols > 0)));
    }
}
