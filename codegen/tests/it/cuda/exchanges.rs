//! Exchanges that shift the indices of a dim: what each rank clears and what is copied from rank to rank, by kernels
//! that are compiled for devices and run on the CPU, is what the node means.

use super::emulator::{self, Mode};
use super::resources::{ARCHS, compile};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, launch};
use shardc_ir::func::Func;
use shardc_ir::group::launches;
use shardc_ir::interp::{self, Precision, scatter};
use shardc_ir::kernel::{Block, Collective, Exchange, Kernel};
use shardc_ir::launch::regions::{self, Region};
use shardc_ir::launch::{DeviceLaunch, Word};
use shardc_ir::mesh::Mesh;
use shardc_ir::tensor::{Shape, Tensor, each_index};
use shardc_ir::text;
use shardc_ir::types::{DType, Type};
use shardc_testing::{Tool, skip};

/// A piece in memory, NaN where there is none of it.
fn bytes(mesh: &Mesh, ty: &Type, piece: &Tensor) -> Vec<u8> {
    let chunks = ty.chunks(mesh);
    let size = ty.dtype.bytes();
    let mut out = vec![0xff; chunks.iter().product::<usize>() * size];
    each_index(&piece.shape, |i| {
        let at = i.iter().zip(&chunks).fold(0, |at, (i, n)| at * n + i) * size;
        let own = match ty.dtype {
            DType::I32 => (piece.at(i) as i32).to_le_bytes(),
            // The upper half, and no more than that is not 0.
            _float => (piece.at(i) as f32).to_le_bytes(),
        };
        out[at..at + size].copy_from_slice(&own[4 - size..]);
    });
    out
}

/// A block as launches take it.
fn region(b: &Block, operand: usize) -> Region {
    let first = Word::Address { operand, byte: b.view.offset * b.elem.bytes() };
    Region::new(first, b.elem, &b.extents, &b.view.strides)
}

/// All that is launched for one node on all ranks: the operand of rank r is number 2r, its result 2r + 1.
fn all(mesh: &Mesh, f: &Func, limits: &Limits) -> Vec<DeviceLaunch> {
    let [one] = &launches(f)[..] else { panic!("one node") };
    let kernels: Vec<Kernel> = (0..mesh.ranks())
        .map(|r| launch(mesh, f, one, &mesh.coords(r)).expect("a kernel"))
        .collect();
    let boxes = |r: usize| match &kernels[r] {
        Kernel::Collective(Collective { axes, exchange: Exchange::AllToAll { from, to, .. } }) => {
            (mesh.group(*axes, r), from, to)
        }
        other => panic!("{other:?}"),
    };
    let mut made = vec![];
    for (r, kernel) in kernels.iter().enumerate() {
        for l in cuda::launches(kernel, limits).expect("what is cleared") {
            let moved = |w: &Word| match *w {
                Word::Address { operand, byte } => Word::Address { operand: 2 * r + operand, byte },
                other => other,
            };
            made.push(DeviceLaunch { words: l.words.iter().map(moved).collect(), ..l });
        }
    }
    for taker in 0..mesh.ranks() {
        let (group, _, to) = boxes(taker);
        for (place, &giver) in group.iter().enumerate() {
            let (others, from, _) = boxes(giver);
            let back = others.iter().position(|&r| r == taker).expect("of one group");
            let (from, to) = (&from[back], &to[place]);
            let n: usize = to.extents.iter().product();
            assert_eq!(n, from.extents.iter().product::<usize>(), "{giver} to {taker}");
            if n == 0 {
                continue;
            }
            let (from, to) = (region(from, 2 * giver), region(to, 2 * taker + 1));
            made.extend(regions::copy(&cuda::collective(), &from, &to, 0..n));
        }
    }
    made
}

/// Of a node from one type to another on the mesh `[x=2, y=3]`.
fn check(from: &str, op: &str, to: &str) {
    let what = format!("{op} of {from}");
    let text = format!(
        "mesh [x=2, y=3]\n\nfunc @f(%a: {from}) -> {to} {{\n  %b = {op} %a : {to}\n  return %b\n}}\n"
    );
    let m = text::parse(&text).unwrap_or_else(|e| panic!("{}", e.render()));
    let (mesh, f) = (&m.mesh, &m.funcs[0]);
    compile(&what, &ARCHS, |l| all(mesh, f, l), 64);
    if emulator::compiler().is_none() {
        return skip(Tool::Cpp, &format!("{what} would have been run on the CPU"));
    }
    let [given, made] = [f.args[0].value, f.results[0].value].map(|v| f.ty(v));
    let mut next = 0;
    let x = Tensor::from_fn(&given.sizes(), |_: &[usize]| {
        next += 1;
        f64::from(next % 127)
    });
    let pieces = scatter(mesh, given, &x);
    let wanted = interp::call(mesh, f, std::slice::from_ref(&pieces), Precision::F64);
    let wanted = wanted.unwrap_or_else(|e| panic!("{what}: {e}"));
    for mode in [Mode::Plain, Mode::Reversed] {
        let nothing = Tensor::full(&Shape::from_elem(0, made.rank()), 0.0);
        let mut memory: Vec<Vec<u8>> = pieces
            .iter()
            .flat_map(|p| [bytes(mesh, given, p), bytes(mesh, made, &nothing)])
            .collect();
        let before = memory.clone();
        assert_eq!(emulator::run(&all(mesh, f, &Limits::of("sm_80")), &mut memory, mode), 0);
        for (r, want) in wanted[0].iter().enumerate() {
            assert_eq!(memory[2 * r], before[2 * r], "{what}: rank {r} changes its operand");
            // What is behind a piece may be cleared too.
            let mut want = bytes(mesh, made, want);
            let found = &memory[2 * r + 1];
            want.iter_mut().zip(found).filter(|w| *w.0 == 0xff).for_each(|(w, f)| *w = *f);
            assert_eq!(found, &want, "{what}: rank {r}");
        }
    }
}

#[test]
fn exchanges_with_a_start() {
    check("f32[3,12@y,2]", "exchange[y; start=-1; dim=1]", "f32[3,12@y,2]");
    // Past a whole piece, and of pieces of unequal sizes.
    check("f32[2,13@y]", "exchange[y; start=6]", "f32[2,11@y]");
    check("bf16[12@x,6]", "exchange[x; start=-2; dim=0]", "bf16[14@x,6]");
    // Along one dim, while another one is split instead.
    check("i32[12@x,6]", "exchange[x*y; start=1]", "i32[12@y,5@x]");
}
