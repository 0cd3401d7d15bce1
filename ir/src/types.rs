//! What each rank holds of a value: element type, global sizes, and one state per mesh atom.
//!
//! | state | meaning | gradient | text |
//! |---|---|---|---|
//! | I invariant | same on all ranks, used the same way | I | `f32[4,8]` |
//! | R replicated | same now, ranks go on to use it differently | P | `f32[4,8]~tp` |
//! | S(d) sharded | its own piece of dim d | S(d) | `f32[4,16@tp]` |
//! | V varying | its own value, no global dim | V | `f32[4,4]!tp` |
//! | P(sum) partial | the true value is the sum over ranks | R | `f32[4,8]+tp` |
//! | P(max), P(min) | likewise, no gradient | – | `f32[4,8]max:tp` |
//!
//! The table is that of `spmd_types` (PyTorch, 2026) with I, R, V and P; S keeps the dim, so sizes
//! in a type are always global. A dim of `n` over `k` ranks is cut into pieces of `ceil(n/k)`; the
//! last pieces may be short or empty, and nothing ever reads beyond them. `f32[3@-tp]` has its pieces in
//! the opposite order: the first is with the last rank, so it is the first ranks that have less.

use crate::mesh::{Atom, AtomSet, Mesh};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Most elements of a value, so that no count of bytes or of multiplications overflows: 1 PiB in f32.
pub const MAX_ELEMENTS: usize = 1 << 48;

/// What is known of an element type: whoever has to tell types apart asks here.
#[derive(Debug)]
pub struct DTypeFacts {
    /// As programs and options name it.
    pub name: &'static str,
    /// As torch names it, and config.json.
    pub torch: &'static str,
    /// As safetensors names it.
    pub safetensors: &'static str,
    /// As device code names it.
    pub cuda: &'static str,
    pub bytes: usize,
    /// Of floats: stored bits of the fraction, and the least exponent of a number whose first bit is not stored.
    pub float: Option<(i32, i32)>,
    /// The largest number.
    pub largest: f64,
}

macro_rules! dtypes {
    ($($(#[$note:meta])* $dtype:ident $facts:tt)*) => {
        /// Element type.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Default)]
        #[derive(Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum DType { $($(#[$note])* $dtype),* }
        impl DType {
            pub const ALL: &[DType] = &[$(DType::$dtype),*];
            pub const fn facts(self) -> &'static DTypeFacts {
                match self { $(DType::$dtype => const { &DTypeFacts $facts }),* }
            }
        }
    };
}
dtypes! {
    #[default]
    F32 {
        name: "f32", torch: "float32", safetensors: "F32", cuda: "float", bytes: 4,
        float: Some((23, -126)), largest: f32::MAX as f64,
    }
    BF16 {
        name: "bf16", torch: "bfloat16", safetensors: "BF16", cuda: "Bf16", bytes: 2,
        float: Some((7, -126)), largest: f32::from_bits(0x7f7f_0000) as f64,
    }
    F16 {
        name: "f16", torch: "float16", safetensors: "F16", cuda: "F16", bytes: 2,
        float: Some((10, -14)), largest: 65504.0,
    }
    I32 {
        name: "i32", torch: "int32", safetensors: "I32", cuda: "int", bytes: 4,
        float: None, largest: i32::MAX as f64,
    }
}

impl DType {
    /// The one with this name.
    pub fn named(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|d| d.name() == name)
    }
    pub fn bytes(self) -> usize {
        self.facts().bytes
    }
    pub fn name(self) -> &'static str {
        self.facts().name
    }
    pub fn is_float(self) -> bool {
        self.facts().float.is_some()
    }
    /// The largest number.
    pub fn largest(self) -> f64 {
        self.facts().largest
    }
    /// True of floats of 16 bits.
    pub fn is_half(self) -> bool {
        self.is_float() && self.bytes() == 2
    }
}

/// Most atoms that split one dim.
pub const MAX_LISTED: usize = 11;

/// Ordered atoms (major to minor) that split one dim. At most [`MAX_LISTED`], in one word: their number,
/// from its next bits on the atoms, the first lowest, and in its last bit whether pieces are dealt from the last rank
/// on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AtomList(u64);

/// Bits of an [`AtomList`] for the number of its atoms, and for each of them.
const COUNT: usize = 4;
const EACH: usize = 5;
const TURNED: u64 = 1 << 63;
const _: () = assert!(COUNT + EACH * MAX_LISTED < 64 && MAX_LISTED < 1 << COUNT);
const _: () = assert!(crate::mesh::MAX_ATOMS <= 1 << EACH);

impl AtomList {
    pub const EMPTY: AtomList = AtomList(0);
    /// Adds a minor-most atom; `None` if the list is full.
    #[must_use]
    pub fn push(self, a: Atom) -> Option<AtomList> {
        let fits = self.len() < MAX_LISTED;
        fits.then(|| AtomList((self.0 | u64::from(a.0) << (COUNT + EACH * self.len())) + 1))
    }
    pub fn collect(atoms: impl IntoIterator<Item = Atom>) -> Option<AtomList> {
        atoms.into_iter().try_fold(AtomList::EMPTY, AtomList::push)
    }
    /// The same atoms with the pieces in the opposite order: what a rank has at coordinates c is now with that at
    /// size - 1 - c of each atom. So pieces of pieces are pieces of the whole as before.
    #[must_use]
    pub fn turned(self) -> AtomList {
        if self.is_empty() { self } else { AtomList(self.0 ^ TURNED) }
    }
    /// Whether pieces are dealt from the last rank on.
    pub fn is_turned(self) -> bool {
        self.0 & TURNED != 0
    }
    /// Those that satisfy a condition, in their order.
    #[must_use]
    pub fn filter(self, keep: impl Fn(Atom) -> bool) -> AtomList {
        let few = AtomList::collect(self.iter().filter(|&a| keep(a))).expect("no longer");
        if self.is_turned() { few.turned() } else { few }
    }
    /// The number of the piece of a rank with these coordinates.
    pub fn place(self, mesh: &Mesh, coords: &[usize]) -> usize {
        self.iter().fold(0, |p, a| {
            let (own, size) = (coords[a.0 as usize], mesh.size(a));
            p * size + if self.is_turned() { size - 1 - own } else { own }
        })
    }
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Atom> + Clone {
        (0..self.len()).map(move |i| self.at(i))
    }
    pub fn len(self) -> usize {
        (self.0 & ((1 << COUNT) - 1)) as usize
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    fn at(self, i: usize) -> Atom {
        Atom((self.0 >> (COUNT + EACH * i) & ((1 << EACH) - 1)) as u8)
    }
    pub fn get(self, i: usize) -> Atom {
        assert!(i < self.len());
        self.at(i)
    }
    pub fn set(self) -> AtomSet {
        self.iter().collect()
    }
    pub fn starts_with(self, o: AtomList) -> bool {
        self.take(o.len()) == o
    }
    /// The first `n` atoms.
    pub fn take(self, n: usize) -> AtomList {
        let n = n.min(self.len());
        let atoms = (self.0 >> COUNT) & ((1 << (EACH * n)) - 1);
        let turned = if n > 0 { self.0 & TURNED } else { 0 };
        AtomList(atoms << COUNT | n as u64 | turned)
    }
}

impl std::fmt::Debug for AtomList {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_list().entries(self.iter().map(|a| a.0)).finish()
    }
}

/// One dim: its global size and the atoms that split it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dim {
    pub size: usize,
    pub atoms: AtomList,
}

/// Which sum is still to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Reduction {
    Sum,
    Max,
    Min,
}

impl Reduction {
    /// The fold of nothing.
    pub fn start(self) -> f64 {
        match self {
            Reduction::Sum => 0.0,
            Reduction::Max => f64::NEG_INFINITY,
            Reduction::Min => f64::INFINITY,
        }
    }
    /// The fold of two.
    pub fn of(self, a: f64, b: f64) -> f64 {
        match self {
            Reduction::Sum => a + b,
            Reduction::Max => a.max(b),
            Reduction::Min => a.min(b),
        }
    }
}

/// State of a value over one atom.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    Invariant,
    Replicated,
    Sharded(usize),
    Varying,
    Partial(Reduction),
}

/// As the documentation has it, with the dim that is sharded: `S(0)`, `P(sum)`.
impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            State::Invariant => f.write_str("I"),
            State::Replicated => f.write_str("R"),
            State::Sharded(d) => write!(f, "S({d})"),
            State::Varying => f.write_str("V"),
            State::Partial(Reduction::Sum) => f.write_str("P(sum)"),
            State::Partial(Reduction::Max) => f.write_str("P(max)"),
            State::Partial(Reduction::Min) => f.write_str("P(min)"),
        }
    }
}

/// Type of a value: element type, dims with global sizes, and a state for every mesh atom. Atoms
/// named nowhere are invariant.
#[derive(PartialEq, Eq, Hash, Debug)]
pub struct Type {
    pub dtype: DType,
    pub dims: SmallVec<[Dim; 4]>,
    pub replicated: AtomSet,
    pub varying: AtomSet,
    pub sum: AtomSet,
    pub max: AtomSet,
    pub min: AtomSet,
}

impl Clone for Type {
    /// Dims are copied as they lie in memory: there are many types, and they are copied often.
    fn clone(&self) -> Type {
        Type { dims: SmallVec::from_slice(&self.dims), ..*self }
    }
}

/// A rank's piece of a dim: `len` elements from `offset`, stored in `chunk` places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub offset: usize,
    pub len: usize,
    pub chunk: usize,
}

impl Type {
    /// An invariant type.
    pub fn new(dtype: DType, sizes: &[usize]) -> Type {
        let dims = sizes.iter().map(|&size| Dim { size, atoms: AtomList::EMPTY });
        Type {
            dtype,
            dims: dims.collect(),
            replicated: AtomSet::EMPTY,
            varying: AtomSet::EMPTY,
            sum: AtomSet::EMPTY,
            max: AtomSet::EMPTY,
            min: AtomSet::EMPTY,
        }
    }
    pub fn f32(sizes: &[usize]) -> Type {
        Type::new(DType::F32, sizes)
    }
    pub fn rank(&self) -> usize {
        self.dims.len()
    }
    pub fn sizes(&self) -> SmallVec<[usize; 4]> {
        self.dims.iter().map(|d| d.size).collect()
    }
    /// Number of elements of the global tensor.
    pub fn elements(&self) -> usize {
        self.dims.iter().map(|d| d.size).product()
    }
    /// All atoms that split some dim.
    pub fn sharded(&self) -> AtomSet {
        self.dims.iter().fold(AtomSet::EMPTY, |s, d| s.union(d.atoms.set()))
    }
    /// All atoms over which a reduction is still to be taken.
    pub fn partial(&self) -> AtomSet {
        self.sum.union(self.max).union(self.min)
    }
    /// Atoms with any state but invariant.
    pub fn marked(&self) -> AtomSet {
        self.sharded().union(self.partial()).union(self.replicated).union(self.varying)
    }
    pub fn state(&self, a: Atom) -> State {
        if let Some(d) = self.dims.iter().position(|d| d.atoms.set().has(a)) {
            State::Sharded(d)
        } else if self.sum.has(a) {
            State::Partial(Reduction::Sum)
        } else if self.max.has(a) {
            State::Partial(Reduction::Max)
        } else if self.min.has(a) {
            State::Partial(Reduction::Min)
        } else if self.replicated.has(a) {
            State::Replicated
        } else if self.varying.has(a) {
            State::Varying
        } else {
            State::Invariant
        }
    }
    /// The set of atoms pending this reduction.
    pub fn pending(&self, r: Reduction) -> AtomSet {
        match r {
            Reduction::Sum => self.sum,
            Reduction::Max => self.max,
            Reduction::Min => self.min,
        }
    }
    /// The reduction that is pending over all of these atoms, if it is one.
    pub fn reduction(&self, atoms: AtomSet) -> Option<Reduction> {
        let all = [Reduction::Max, Reduction::Min, Reduction::Sum];
        all.into_iter().find(|&r| atoms.within(self.pending(r)))
    }
    pub fn pending_mut(&mut self, r: Reduction) -> &mut AtomSet {
        match r {
            Reduction::Sum => &mut self.sum,
            Reduction::Max => &mut self.max,
            Reduction::Min => &mut self.min,
        }
    }
    /// Makes an atom invariant, whatever it was.
    pub fn clear(&mut self, a: Atom) {
        let s = AtomSet::one(a);
        for set in
            [&mut self.replicated, &mut self.varying, &mut self.sum, &mut self.max, &mut self.min]
        {
            *set = set.minus(s);
        }
        for d in &mut self.dims {
            d.atoms = d.atoms.filter(|x| x != a);
        }
    }
    /// Type of the gradient: S, V and I stay, R becomes P(sum), P(sum) becomes R.
    pub fn cotangent(&self) -> Type {
        let mut t = self.clone();
        t.replicated = self.sum.union(self.max).union(self.min);
        t.sum = self.replicated;
        (t.max, t.min) = (AtomSet::EMPTY, AtomSet::EMPTY);
        t
    }
    /// Checks that no atom has two states; says which does.
    pub fn clash(&self) -> Option<Atom> {
        let mut seen = AtomSet::EMPTY;
        let sets = [self.replicated, self.varying, self.sum, self.max, self.min];
        let dims = self.dims.iter().flat_map(|d| d.atoms.iter());
        dims.chain(sets.into_iter().flat_map(AtomSet::iter)).find(|&a| {
            let twice = seen.has(a);
            seen = seen.with(a);
            twice
        })
    }

    /// Number of pieces a dim is cut into.
    pub fn pieces(&self, mesh: &Mesh, dim: usize) -> usize {
        self.dims[dim].atoms.iter().map(|a| mesh.size(a)).product()
    }
    /// Storage size of a rank's piece of a dim, the same on every rank: `ceil(size / pieces)`.
    pub fn chunk(&self, mesh: &Mesh, dim: usize) -> usize {
        self.dims[dim].size.div_ceil(self.pieces(mesh, dim))
    }
    /// Storage shape of a rank's piece, the same on every rank.
    pub fn chunks(&self, mesh: &Mesh) -> SmallVec<[usize; 4]> {
        (0..self.rank()).map(|d| self.chunk(mesh, d)).collect()
    }
    /// Bytes of a rank's piece, the same on every rank.
    pub fn local_bytes(&self, mesh: &Mesh) -> usize {
        (0..self.rank()).map(|d| self.chunk(mesh, d)).product::<usize>() * self.dtype.bytes()
    }
    /// What part of a dim the rank with these coordinates holds.
    pub fn extent(&self, mesh: &Mesh, dim: usize, coords: &[usize]) -> Extent {
        let chunk = self.chunk(mesh, dim);
        let place = self.dims[dim].atoms.place(mesh, coords);
        let n = self.dims[dim].size;
        let offset = (place * chunk).min(n);
        Extent { offset, len: chunk.min(n - offset), chunk }
    }
    /// The true (unpadded) shape of a rank's piece.
    pub fn lens(&self, mesh: &Mesh, coords: &[usize]) -> SmallVec<[usize; 4]> {
        (0..self.rank()).map(|d| self.extent(mesh, d, coords).len).collect()
    }
}
