//! `top_k.cu`, `route.cu`, `copies.cu`: what sends tokens to experts and back.

use super::moves::index_name;
use super::{File, Words, pack, row, starts};
use shardc_ir::kernel::{Copies, Route, TopK, View};
use shardc_ir::launch::{DeviceLaunch, Word};
use shardc_ir::types::DType;

pub(super) fn top_k(k: &TopK) -> Vec<DeviceLaunch> {
    /// Rows of a block.
    const ROWS: usize = 4;
    let (n, rank) = (k.extents.iter().product::<usize>(), k.extents.len().max(1));
    let file = File::new("top_k.cu", include_str!("../../cuda/top_k.cu"))
        .define("ELEM", k.elem.facts().cuda)
        .define("RANK", rank)
        .define("INDEX", index_name(n));
    let mut w = Words::default();
    w.view(&k.x, k.elem);
    w.view(&k.out, DType::I32);
    w.int(n);
    for (strides, alone) in [(&k.extents, 1), (&k.x.strides, 0), (&k.out.strides, 0)] {
        if strides.is_empty() {
            w.int(alone);
        }
        w.ints(strides);
    }
    w.ints(&[k.n, k.k, k.x_stride, k.out_stride]);
    if n == 0 || k.k == 0 {
        return vec![];
    }
    let grid = row([n.div_ceil(ROWS), 1, 1]);
    let (source, threads) = (file.source(), 32 * ROWS as u32);
    vec![DeviceLaunch { source, entry: "top_k".into(), grid, threads, shared: 0, words: w.0 }]
}

pub(super) fn route(k: &Route) -> Vec<DeviceLaunch> {
    let [shards, tokens, copies] = k.copies;
    let mut w = Words::default();
    [&k.index, &k.slot, &k.counts].iter().for_each(|v| w.view(v, DType::I32));
    w.0.push(Word::Status);
    [&k.index, &k.slot, &k.counts].iter().for_each(|v| w.ints(&v.strides));
    let capacity = k.capacity.map_or(i32::MAX as usize, |c| c.min(i32::MAX as usize));
    w.ints(&[tokens, copies, k.groups, k.experts, k.rows, capacity]);
    let source = File::new("route.cu", include_str!("../../cuda/route.cu")).source();
    let one = |entry: &'static str| DeviceLaunch {
        source: source.clone(),
        entry: entry.into(),
        grid: row([k.groups * k.experts, shards, 1]),
        threads: 256,
        shared: 0,
        words: w.0.clone(),
    };
    if shards == 0 { vec![] } else { vec![one("route_counts"), one("route_places")] }
}

/// `dispatch`, `unpermute` or `combine_gates_grad`.
pub(super) fn copies(k: &Copies, entry: &'static str) -> Vec<DeviceLaunch> {
    let [shards, tokens, copies] = k.copies;
    let smallest = if k.buffer_elem.is_half() { k.buffer_elem } else { k.token_elem };
    let rows = [&k.buffer, &k.tokens].into_iter().flat_map(starts);
    let file = File::new("copies.cu", include_str!("../../cuda/copies.cu"))
        .define("PACK", pack(smallest, [k.width].into_iter().chain(rows)))
        .define("BUFFER", k.buffer_elem.facts().cuda)
        .define("TOKEN", k.token_elem.facts().cuda)
        .define("GATE", k.gate_elem.facts().cuda);
    let views: [(&View, DType); 4] = [
        (&k.buffer, k.buffer_elem),
        (&k.tokens, k.token_elem),
        (&k.gates, k.gate_elem),
        (&k.slot, DType::I32),
    ];
    let mut w = Words::default();
    views.iter().for_each(|(v, elem)| w.view(v, *elem));
    views.iter().for_each(|(v, _)| w.ints(&v.strides));
    w.ints(&[tokens, copies, k.groups, k.rows, k.width]);
    if shards * tokens == 0 {
        return vec![];
    }
    let grid = row([tokens, shards, 1]);
    vec![DeviceLaunch {
        source: file.source(),
        entry: entry.into(),
        grid,
        threads: 128,
        shared: 0,
        words: w.0,
    }]
}
