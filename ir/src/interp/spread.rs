//! Global tensors cut into the ranks' pieces, and put together again.

use crate::diag::{Diag, Result};
use crate::mesh::{AtomSet, Mesh};
use crate::rng::Stream;
use crate::tensor::{Tensor, each_offset, strides};
use crate::types::{DType, Type};

/// The true pieces of a global tensor, one per rank. Where a sum (max, min) is still to be taken,
/// the ranks get random parts that give the whole; a varying value is the same everywhere.
///
/// ```
/// # use shardc_ir::{interp, mesh::{Atom, AtomSet, Mesh}, tensor::Tensor, types::Type};
/// let mesh = Mesh::new(&[("tp", 2)]).unwrap();
/// let mut ty = Type::f32(&[3]);
/// ty.sum = AtomSet::one(Atom(0));
/// let whole = Tensor::new(&[3], vec![1.0, 2.0, 3.0]);
/// let parts = interp::scatter(&mesh, &ty, &whole);
/// assert_ne!(parts[0], parts[1]);
/// let sum = interp::gather(&mesh, &ty, &parts).unwrap();
/// assert!(sum.data.iter().zip(&whole.data).all(|(a, b)| (a - b).abs() < 1e-12));
/// ```
pub fn scatter(mesh: &Mesh, ty: &Type, global: &Tensor) -> Vec<Tensor> {
    let parts = parts(mesh, ty, global);
    let one = |r: usize| {
        let coords = mesh.coords(r);
        let whole = &parts[mesh.place(ty.partial(), &coords)];
        (0..ty.rank()).fold(whole.clone(), |t, d| {
            let e = ty.extent(mesh, d, &coords);
            if e.len == t.shape[d] { t } else { t.slice(d, e.offset, e.len) }
        })
    };
    (0..mesh.ranks()).map(one).collect()
}

/// Parts of a global tensor, one per place in the group over the atoms still to be reduced.
fn parts(mesh: &Mesh, ty: &Type, global: &Tensor) -> Vec<Tensor> {
    let stream = Stream::new(0, "parts of a sum", 0);
    let mut counter = 0u64;
    let whole_numbers = ty.dtype == DType::I32;
    let mut random = |lo: f64, hi: f64| {
        counter += 1;
        let x = lo + (hi - lo) * stream.uniform(counter);
        if whole_numbers { x.round() } else { x }
    };
    let mut parts = vec![global.clone()];
    // Atom by atom, major to minor, which is group order.
    for a in ty.partial().iter() {
        let n = mesh.size(a);
        let mut next = Vec::with_capacity(parts.len() * n);
        for whole in parts {
            let mut pieces = vec![whole.clone(); n];
            for i in 0..whole.data.len() {
                let keeper = random(0.0, n as f64).min(n as f64 - 1.0) as usize;
                for p in (0..n).filter(|&p| p != keeper) {
                    let x = if ty.sum.has(a) { random(-2.0, 2.0) } else { random(0.0, 3.0) };
                    pieces[p].data[i] = match () {
                        () if ty.sum.has(a) => x,
                        () if ty.max.has(a) => whole.data[i] - x,
                        () => whole.data[i] + x,
                    };
                    if ty.sum.has(a) {
                        pieces[keeper].data[i] -= x;
                    }
                }
            }
            next.extend(pieces);
        }
        parts = next;
    }
    parts
}

/// The global tensor of a value: pieces joined by their offsets, sums (max, min) taken in group
/// order.
///
/// Errors: `ranks-disagree` if ranks over which the value is invariant or replicated hold different
/// bits, `varying` if it has no global tensor, `arguments` if a piece has the wrong shape.
pub fn gather(mesh: &Mesh, ty: &Type, ranks: &[Tensor]) -> Result<Tensor> {
    if !ty.varying.is_empty() {
        let axes = mesh.names(ty.varying, "*");
        return Err(Diag::new(
            "varying",
            format!("a value that varies over {axes} has no global one"),
        )
        .help(format!("read its {} ranks one by one", mesh.ways(ty.varying))));
    }
    let same = mesh.all().minus(ty.sharded()).minus(ty.partial());
    let mut parts: Vec<Option<Tensor>> = vec![None; mesh.ways(ty.partial())];
    for (r, t) in ranks.iter().enumerate() {
        let coords = mesh.coords(r);
        let want = ty.lens(mesh, &coords);
        if t.shape != want {
            let message = format!("rank {r} holds shape {:?}, not {want:?}", t.shape);
            return Err(
                Diag::new("arguments", message).help(format!("give a piece of shape {want:?}"))
            );
        }
        let first = first_of(mesh, same, &coords);
        if first != r {
            agree(mesh, t, &ranks[first], (r, first))?;
            continue;
        }
        let part = &mut parts[mesh.place(ty.partial(), &coords)];
        let part = part.get_or_insert_with(|| Tensor::full(&ty.sizes(), 0.0));
        let offsets: Vec<usize> =
            (0..ty.rank()).map(|d| ty.extent(mesh, d, &coords).offset).collect();
        let steps = [strides(&part.shape), strides(&t.shape)];
        let first: usize = offsets.iter().zip(&steps[0]).map(|(o, step)| o * step).sum();
        each_offset(&t.shape, [&steps[0], &steps[1]], |[to, from]| {
            part.data[first + to] = t.data[from];
        });
    }
    let parts: Vec<Tensor> = parts.into_iter().flatten().collect();
    Ok(reduce_parts(mesh, ty, parts))
}

/// The rank whose coordinates are 0 in these atoms and those of `coords` in all others.
fn first_of(mesh: &Mesh, atoms: AtomSet, coords: &[usize]) -> usize {
    let mut c = coords.to_vec();
    atoms.iter().for_each(|a| c[a.0 as usize] = 0);
    mesh.rank(&c)
}

fn agree(mesh: &Mesh, t: &Tensor, u: &Tensor, (r, first): (usize, usize)) -> Result<()> {
    let bits = |x: f64| x.to_bits();
    let Some(i) = t.data.iter().zip(&u.data).position(|(&a, &b)| bits(a) != bits(b)) else {
        return Ok(());
    };
    let message = format!(
        "rank {r} (coordinates {:?}) holds {} as element {i}, rank {first} holds {}",
        mesh.coords(r),
        t.data[i],
        u.data[i]
    );
    Err(Diag::new("ranks-disagree", message)
        .rule("ranks over which a value is invariant or replicated hold the same bits")
        .help("look for a missing all_reduce or fan_out before the value"))
}

/// Folds the parts from the left, minor atoms first.
fn reduce_parts(mesh: &Mesh, ty: &Type, mut parts: Vec<Tensor>) -> Tensor {
    for a in ty.partial().iter().collect::<Vec<_>>().into_iter().rev() {
        let f: fn(f64, f64) -> f64 = match () {
            () if ty.sum.has(a) => |x, y| x + y,
            () if ty.max.has(a) => f64::max,
            () => f64::min,
        };
        let fold = |g: &[Tensor]| g[1..].iter().fold(g[0].clone(), |x, y| x.zip(y, f));
        parts = parts.chunks(mesh.size(a)).map(fold).collect();
    }
    parts.swap_remove(0)
}
