//! `attention.cu` and `attention_grad.cu`: tiles that fit registers and shared memory.

use super::limits::{DECLARED, Limits};
use super::{File, Words, grid, row_bytes};
use shardc_ir::kernel::{Attention, AttentionGrad, Heads, View};
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::ops::Mask;
use shardc_ir::rng::Distribution;
use shardc_ir::types::DType;

/// Rows of the matrix that one instruction multiplies.
const WARP_ROWS: usize = 16;

/// How a block of threads cuts the work.
#[derive(Clone, Copy)]
struct AttentionTiles {
    width: usize,
    value_width: usize,
    /// Rows that a block owns, [`WARP_ROWS`] for each warp.
    rows: usize,
    /// Rows of the other side that it treats at once.
    cols: usize,
    /// Warps that share rows, each making its part of the columns of the result.
    split: usize,
}

impl AttentionTiles {
    /// By the registers of a thread: forward it holds `width / 2` sums and `cols / 2` scores,
    /// backward `width / 2` sums twice and `cols / 2` scores twice; and f32 tiles, which are twice
    /// as large, must fit the shared memory of a block.
    fn new(h: &Heads, owned: usize, backward: bool) -> AttentionTiles {
        let widest = h.width.max(h.value_width);
        let f32s = h.elem == DType::F32;
        let cols = match (widest, backward) {
            (..=64, _) if !f32s => 64,
            (..=128, false) if !f32s => 64,
            (..=64, _) => 32,
            (..=128, _) if !f32s => 32,
            (_, false) => 32,
            (_, true) if !f32s => 32,
            _ => 16,
        };
        let split = if backward && widest > 128 { 2 } else { 1 };
        let most = if f32s && (backward || widest > 128) { 32 } else { 64 };
        let rows = if owned <= WARP_ROWS { WARP_ROWS } else { most };
        let [width, value_width] =
            [h.width, h.value_width].map(|w| w.max(1).next_multiple_of(WARP_ROWS * split));
        AttentionTiles { width, value_width, rows, cols, split }
    }

    fn file(&self, name: &'static str, text: &'static str, h: &Heads, aligned: bool) -> File {
        File::new(name, text)
            .define("ELEM", h.elem.facts().cuda)
            .define("WIDTH", self.width)
            .define("VALUE_WIDTH", self.value_width)
            .define("ROWS", self.rows)
            .define("COLS", self.cols)
            .define("SPLIT", self.split)
            .define("ALIGNED", aligned)
            .define("CAPPED", h.softcap.is_some())
            .define("SLOPED", h.slopes.is_some())
            .define("BIASED", u8::from(h.bias.is_some()))
            .define("SEGMENTS", u8::from(h.segments.is_some()))
            .define("DROPS", u8::from(h.kept.is_some()))
            .define("POSITIVE", h.scale > 0.0)
    }

    fn threads(&self) -> u32 {
        (self.rows / WARP_ROWS * self.split * 32) as u32
    }

    /// Bytes of the tiles: of queries, keys and values; backward also of what has their gradients,
    /// and twice of the other side.
    fn shared(&self, elem: DType, backward: bool) -> u32 {
        let [rows, value_rows] = match backward {
            false => [self.rows + self.cols, self.cols],
            true => [self.rows + 2 * self.cols; 2],
        };
        let bytes =
            rows * row_bytes(elem, self.width) + value_rows * row_bytes(elem, self.value_width);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Bytes of shared memory that the text declares: what rows see, positions of columns twice, backward with
    /// two numbers beside them, and places if weights are dropped, segments if there are some; what each warp
    /// tells the others; and backward what all rows see.
    fn declared(&self, h: &Heads, backward: bool) -> u32 {
        let of_columns = match (backward, &h.kept) {
            (false, _) => 8,
            (true, None) => 24,
            (true, Some(_)) => 32,
        };
        let of_columns = of_columns + if h.segments.is_some() { 8 } else { 0 };
        let of_rows = 8 * (self.rows + usize::from(backward));
        let bytes = of_rows + of_columns * self.cols + 8 * self.threads() as usize / 32;
        (bytes as u32).next_multiple_of(DECLARED)
    }

    /// The largest tiles, up to those of [`AttentionTiles::new`], that a block has shared memory for; the smallest
    /// there are if there is none.
    fn within(limits: &Limits, h: &Heads, owned: usize, backward: bool) -> AttentionTiles {
        let most = AttentionTiles::new(h, owned, backward);
        let halves = |from: usize| (0..).map(move |i| from >> i).take_while(|&n| n >= WARP_ROWS);
        let sizes = halves(most.rows).flat_map(|r| halves(most.cols).map(move |c| (r, c)));
        let mut all = sizes.map(|(rows, cols)| AttentionTiles { rows, cols, ..most });
        let fits =
            |t: &AttentionTiles| limits.hold(t.shared(h.elem, backward), t.declared(h, backward));
        let least = AttentionTiles { rows: WARP_ROWS, cols: WARP_ROWS, ..most };
        all.find(fits).unwrap_or(least)
    }
}

/// True if all rows, of these widths, are of whole 16 bytes and begin at multiples of them.
fn aligned(h: &Heads, rows: &[(&View, usize)]) -> bool {
    let step = 16 / h.elem.bytes();
    rows.iter()
        .all(|(v, width)| [v.offset, *width].iter().chain(v.strides.iter()).all(|n| n % step == 0))
}

/// Offsets of a block of the kernel of a bias's gradient, as in `attention_grad.cu`.
const OFFSETS: usize = 128;

/// What is at the end of both structs of parameters: sizes, and what there may be; `d_bias` is where the gradient of a bias
/// goes.
fn sizes(w: &mut Words, h: &Heads, d_bias: Option<&View>) {
    // Positions are i32: 2^32 is farther than any two are apart.
    let far = |n: Option<usize>| n.map_or(1 << 32, |n| n.min(1 << 32));
    let Mask { left, right, chunk } = h.mask;
    w.ints(&[h.queries, h.keys, h.repeat, h.width, h.value_width]);
    w.ints(&[far(left), far(right), chunk.map_or(0, |n| far(Some(n)))]);
    w.float(f64::from(h.scale));
    w.float(f64::from(h.softcap.unwrap_or(0.0)));
    if let Some((of, offsets)) = &h.bias {
        let all = [of, d_bias.unwrap_or(of)];
        all.iter().for_each(|v| w.view(v, DType::F32));
        all.iter().for_each(|v| w.int(v.strides[0]));
        w.ints(&[*offsets, h.batch]);
    }
    if let Some(both) = &h.segments {
        both.iter().for_each(|v| w.view(v, DType::I32));
        both.iter().for_each(|v| w.int(v.strides[0]));
    }
    if let Some(k) = &h.kept {
        [&k.run, &k.place].iter().for_each(|v| w.view(v, DType::I32));
        w.ints(&k.place.strides);
        w.ints(&[k.first_head, k.stream as u32 as usize, (k.stream >> 32) as usize]);
        w.int(usize::try_from(Distribution::Keep(k.rate).threshold()).expect("33 bits"));
        w.float(1.0 / k.rate);
    }
}

pub(super) fn forward(k: &Attention, limits: &Limits) -> Vec<DeviceLaunch> {
    let h = &k.heads;
    if [h.batch, h.queries, h.groups * h.repeat].contains(&0) {
        return vec![];
    }
    let t = AttentionTiles::within(limits, h, h.queries, false);
    let rows = [(&k.q, h.width), (&k.k, h.width), (&k.v, h.value_width), (&k.out, h.value_width)];
    let text = include_str!("../../cuda/attention.cu");
    let mut w = Words::default();
    rows.iter().for_each(|(v, _)| w.view(v, h.elem));
    w.view(&k.lse, DType::F32);
    [&h.q_pos, &h.k_pos].iter().for_each(|v| w.view(v, DType::I32));
    w.view(h.slopes.as_ref().unwrap_or(&k.lse), DType::F32);
    [&k.q, &k.k, &k.v, &k.out, &k.lse].iter().for_each(|v| w.ints(&v.strides));
    sizes(&mut w, h, None);
    vec![DeviceLaunch {
        source: t.file("attention.cu", text, h, aligned(h, &rows)).source(),
        entry: "attention".into(),
        grid: grid([h.queries.div_ceil(t.rows), h.groups * h.repeat, h.batch]),
        threads: t.threads(),
        shared: t.shared(h.elem, false),
        words: w.0,
    }]
}

pub(super) fn backward(k: &AttentionGrad, limits: &Limits) -> Vec<DeviceLaunch> {
    let h = &k.heads;
    let rows = [
        (&k.q, h.width),
        (&k.k, h.width),
        (&k.v, h.value_width),
        (&k.d_out, h.value_width),
        (&k.d_q, h.width),
        (&k.d_k, h.width),
        (&k.d_v, h.value_width),
    ];
    let mut w = Words::default();
    rows[..4].iter().for_each(|(v, _)| w.view(v, h.elem));
    [&k.lse, &k.delta].iter().for_each(|v| w.view(v, DType::F32));
    [&h.q_pos, &h.k_pos].iter().for_each(|v| w.view(v, DType::I32));
    w.view(h.slopes.as_ref().unwrap_or(&k.lse), DType::F32);
    rows[4..].iter().for_each(|(v, _)| w.view(v, h.elem));
    let views = [&k.q, &k.k, &k.v, &k.d_out, &k.lse, &k.delta, &k.d_q, &k.d_k, &k.d_v];
    views.iter().for_each(|v| w.ints(&v.strides));
    sizes(&mut w, h, k.d_bias.as_ref());
    let text = include_str!("../../cuda/attention_grad.cu");
    let one = |entry: &'static str, owned: usize, heads: usize| {
        let t = AttentionTiles::within(limits, h, owned, true);
        DeviceLaunch {
            source: t.file("attention_grad.cu", text, h, aligned(h, &rows)).source(),
            entry: entry.into(),
            grid: grid([owned.div_ceil(t.rows), heads, h.batch]),
            threads: t.threads(),
            shared: t.shared(h.elem, true),
            words: w.0.clone(),
        }
    };
    let keys = one("attention_grad_keys", h.keys, h.groups);
    let queries = one("attention_grad_queries", h.queries, h.groups * h.repeat);
    let bias = h.bias.as_ref().filter(|_| k.d_bias.is_some()).map(|(_, offsets)| DeviceLaunch {
        entry: "attention_grad_bias".into(),
        grid: grid([offsets.div_ceil(OFFSETS), h.groups * h.repeat, 1]),
        threads: OFFSETS as u32,
        shared: 0,
        ..queries.clone()
    });
    [keys, queries].into_iter().chain(bias).filter(|l| !l.grid.contains(&0)).collect()
}
