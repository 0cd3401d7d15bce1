//! Kernels for a CUDA device: the written ones, real files in `codegen/cuda`, with a prelude of
//! `#define`s before them, and printed ones over rows; their parameters are words.

mod attention;
mod experts;
pub mod limits;
mod moves;
mod product;
mod recurrence;
mod rows;
mod then;

use limits::Limits;
use shardc_ir::kernel::{Copy, Exchange, Kernel, Program, View};
use shardc_ir::launch::{DeviceLaunch, KernelSource, Launches, Word, regions};
use shardc_ir::types::DType;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;

/// What sources include, by name.
pub const HEADERS: [(&str, &str); 6] = [
    ("device.cuh", include_str!("../../cuda/device.cuh")),
    ("attention.cuh", include_str!("../../cuda/attention.cuh")),
    ("random.cuh", include_str!("../../cuda/random.cuh")),
    ("product.cuh", include_str!("../../cuda/product.cuh")),
    ("recurrence.cuh", include_str!("../../cuda/recurrence.cuh")),
    ("rows.cuh", include_str!("../../cuda/rows.cuh")),
];

/// What ranks that share a device exchange their data with. The runtime makes its launches, of regions
/// that are known only then.
pub fn collective() -> Arc<KernelSource> {
    File::new("collective.cu", include_str!("../../cuda/collective.cu"))
        .define("LOOPS", regions::LOOPS)
        .define("PARTS", regions::PARTS)
        .source()
}

/// What runs in place of a kernel on devices with these limits, in order, or before the ranks of a collective meet; `None` for a
/// literal, which the runtime copies itself.
pub fn launches(kernel: &Kernel, limits: &Limits) -> Option<Vec<DeviceLaunch>> {
    Some(match kernel {
        Kernel::View => vec![],
        Kernel::Copy(all) => all.iter().flat_map(moves::copy).collect(),
        Kernel::Gemm(k) => product::gemm(k, limits),
        Kernel::GemmThen(k) => product::then(k, limits),
        Kernel::Take(k) => moves::take(k),
        Kernel::IndexAdd { pick, clear } => moves::index_add(pick, clear.as_ref()),
        Kernel::Draw(k) => moves::draw(k),
        Kernel::Scan(k) => moves::scan(k),
        Kernel::Rope(k) => moves::rope(k),
        Kernel::Attention(k) => attention::forward(k, limits),
        Kernel::AttentionGrad(k) => attention::backward(k, limits),
        Kernel::Recurrence(k) => recurrence::forward(k),
        Kernel::RecurrenceGrad(k) => recurrence::backward(k),
        Kernel::TopK(k) => experts::top_k(k),
        Kernel::Route(k) => experts::route(k),
        Kernel::Dispatch(k) => experts::copies(k, "dispatch"),
        Kernel::Unpermute(k) => experts::copies(k, "unpermute"),
        Kernel::CombineGatesGrad(k) => experts::copies(k, "combine_gates_grad"),
        Kernel::Grouped(k) => product::grouped(k, limits),
        Kernel::Collective(c) => match &c.exchange {
            Exchange::Broadcast { own: Some(own), to, .. } => moves::copy(&Copy {
                elem: own.elem,
                clear: None,
                extents: own.extents.clone(),
                from: own.view.clone(),
                to: to.view.clone(),
            }),
            Exchange::AllToAll { clear: Some(block), .. }
            | Exchange::Reduce { clear: Some(block), .. } => {
                moves::clear(block).into_iter().collect()
            }
            _meeting_alone => vec![],
        },
        Kernel::Rows(k) => rows::launches(k),
        Kernel::HorizontalFusion(k) => rows::several(k),
        Kernel::Literal { .. } => return None,
    })
}

/// What a rank launches for its program, on devices with these limits; printed kernels are one text. Ranks with the same kernels
/// have the same texts, whichever of them a process has.
pub fn program(p: &Program, limits: &Limits) -> Launches {
    let own = |k: &Kernel| launches(k, limits).unwrap_or_default();
    let mut made: Launches = p.iter().map(|f| f.iter().map(own).collect()).collect();
    join(made.iter_mut().flatten().flatten());
    made
}

/// Makes one text of all printed ones among these launches: the compiler takes half as long for it.
pub fn join<'a>(launches: impl Iterator<Item = &'a mut DeviceLaunch>) {
    let printed: Vec<&mut DeviceLaunch> =
        launches.filter(|l| l.source.file == rows::FILE).collect();
    let texts: BTreeSet<&KernelSource> = printed.iter().map(|l| &*l.source).collect();
    let text = texts.iter().map(|s| s.text.as_str()).collect();
    let all = Arc::new(KernelSource { file: rows::FILE, text });
    printed.into_iter().for_each(|l| l.source = all.clone());
}

/// A file of `codegen/cuda` and what is defined before it.
struct File {
    name: &'static str,
    text: &'static str,
    prelude: String,
}

impl File {
    fn new(name: &'static str, text: &'static str) -> File {
        File { name, text, prelude: String::new() }
    }
    fn define(mut self, name: &str, value: impl Display) -> File {
        self.prelude += &format!("#define {name} {value}\n");
        self
    }
    fn text(mut self, text: &str) -> File {
        self.prelude += text;
        self
    }
    fn source(self) -> Arc<KernelSource> {
        // Lines of messages are those of the file.
        let text = format!("{}#line 1 \"{}\"\n{}", self.prelude, self.name, self.text);
        Arc::new(KernelSource { file: self.name, text })
    }
}

/// Bytes of a row of a tile in shared memory, at most, as `Tile` of `device.cuh` has it.
fn row_bytes(elem: DType, cols: usize) -> usize {
    cols * elem.bytes() + 16
}

/// How many adjacent elements, up to 16 bytes of the smallest, all of these lengths, offsets and
/// strides are multiples of.
fn pack(smallest: DType, all: impl Iterator<Item = usize> + Clone) -> usize {
    let most = 16 / smallest.bytes();
    [8, 4, 2].into_iter().find(|n| *n <= most && all.clone().all(|x| x % n == 0)).unwrap_or(1)
}

/// True if so many adjacent elements, and what lies between rows of them, are of whole units.
fn whole(unit: usize, adjacent: usize, v: &View, strides: &[usize]) -> bool {
    [adjacent, v.offset].iter().chain(&v.strides).chain(strides).all(|n| n % unit == 0)
}

/// Where rows of a view begin: multiples of the greatest common divisor of these.
fn starts(v: &View) -> impl Iterator<Item = usize> + Clone + '_ {
    v.strides.iter().copied().chain([v.offset])
}

/// Parameters, in the order of the struct that takes them.
#[derive(Default)]
struct Words(Vec<Word>);

impl Words {
    /// Where the walk of a view begins.
    fn view(&mut self, v: &View, elem: DType) {
        self.0.push(Word::Address { operand: v.operand, byte: v.offset * elem.bytes() });
    }
    fn int(&mut self, x: usize) {
        self.0.push(Word::Int(i64::try_from(x).expect("sizes of memory")));
    }
    fn ints(&mut self, all: &[usize]) {
        all.iter().for_each(|&x| self.int(x));
    }
    fn float(&mut self, x: f64) {
        self.0.push(Word::Float(x));
    }
}

/// A grid of so many blocks, as it is; more than there can be are for [`Limits::check`] to refuse.
fn grid(sizes: [usize; 3]) -> [u32; 3] {
    sizes.map(|n| u32::try_from(n).unwrap_or(u32::MAX))
}

/// A grid of so many blocks, of which `place` of `device.cuh` finds one's place: all along the first
/// dim, as a device has fewer than 2^16 along the others.
fn row(sizes: [usize; 3]) -> [u32; 3] {
    grid([sizes.into_iter().fold(1, usize::saturating_mul), 1, 1])
}
