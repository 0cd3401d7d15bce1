//! Element-wise kernels: a blocked interpreter. Every instruction runs over a block of elements
//! that stays in the nearest cache, so its loop is plain and vectorises, and the cost of
//! interpreting is shared by the block.

use crate::math;
use shardc_ir::kernel::{Elem, Extents, Load, Map, Scalar, Store, View};
use smallvec::SmallVec;

/// Elements per block.
pub(crate) const BLOCK: usize = 512;

/// One block per instruction; kept from kernel to kernel.
#[derive(Default)]
pub(crate) struct Registers(Vec<f32>);

/// A body with its memory: evaluates blocks of elements along one loop.
pub(crate) struct Interp<'a> {
    loads: &'a [Load],
    body: &'a [Scalar],
    memory: &'a [*mut f32],
    registers: *mut f32,
    /// Where each instruction's block is: its register, or the operand itself.
    at: SmallVec<[*const f32; 32]>,
    /// Instructions that give the same for all elements of the kernel are done once.
    uniform: SmallVec<[bool; 32]>,
}

/// Address of an element of an operand's memory.
pub(crate) fn element(base: *mut f32, elem: Elem, i: usize) -> *mut f32 {
    base.wrapping_byte_add(i * elem.bytes())
}

/// Walks all indices of some loops, first loop outermost.
pub(crate) struct Odometer {
    extents: Extents,
    index: Extents,
    more: bool,
}

impl Odometer {
    pub fn new(extents: &[usize]) -> Odometer {
        let index = extents.iter().map(|_| 0).collect();
        Odometer { extents: extents.into(), index, more: !extents.contains(&0) }
    }
    /// The current index; `None` at the end.
    pub fn index(&self) -> Option<&[usize]> {
        self.more.then_some(&self.index[..])
    }
    pub fn advance(&mut self) {
        for (i, n) in self.index.iter_mut().zip(&self.extents).rev() {
            *i += 1;
            if *i < *n {
                return;
            }
            *i = 0;
        }
        self.more = false;
    }
}

impl<'a> Interp<'a> {
    /// # Safety
    /// `memory` is valid for everything that the loads reach.
    pub unsafe fn new(
        loads: &'a [Load],
        body: &'a [Scalar],
        memory: &'a [*mut f32],
        registers: &'a mut Registers,
    ) -> Interp<'a> {
        if registers.0.len() < body.len() * BLOCK {
            registers.0.resize(body.len() * BLOCK, 0.0);
        }
        let registers = registers.0.as_mut_ptr();
        let at = (0..body.len()).map(|i| registers.wrapping_add(i * BLOCK).cast_const()).collect();
        let mut x = Interp { loads, body, memory, registers, at, uniform: SmallVec::new() };
        for (i, instruction) in body.iter().enumerate() {
            let uniform = match *instruction {
                Scalar::Load(l) => loads[l].view.strides.iter().all(|&s| s == 0),
                Scalar::Const(_) => true,
                Scalar::Unary(_, a) => x.uniform[a],
                Scalar::Binary(_, a, b) => x.uniform[a] && x.uniform[b],
            };
            x.uniform.push(uniform);
            if uniform {
                // SAFETY: the element of a load that does not move is its first, which it reaches.
                unsafe {
                    x.step(i, 1, |l| (loads[l].view.offset, 0), None);
                    let r = x.register(i);
                    let value = r[0];
                    r.fill(value);
                }
            }
        }
        x
    }

    /// # Safety
    /// No other reference to this register is used while this one is.
    #[allow(clippy::mut_from_ref)]
    unsafe fn register(&self, i: usize) -> &mut [f32] {
        // SAFETY: `new` made room for one block per instruction.
        unsafe { std::slice::from_raw_parts_mut(self.registers.add(i * BLOCK), BLOCK) }
    }

    /// # Safety
    /// `walk` gives first element and stride of a load, whose `n` elements are valid; `direct` is
    /// valid for n writes and overlaps no load.
    unsafe fn step(
        &mut self,
        i: usize,
        n: usize,
        walk: impl Fn(usize) -> (usize, usize),
        direct: Option<*mut f32>,
    ) {
        let target = direct.unwrap_or_else(|| self.registers.wrapping_add(i * BLOCK));
        self.at[i] = target;
        // SAFETY: the register of this instruction, which no operand is, or the caller's.
        let out = unsafe { std::slice::from_raw_parts_mut(target, n) };
        // SAFETY: registers hold a block; operands were checked by the caller.
        let of = |at: *const f32| unsafe { std::slice::from_raw_parts(at, n) };
        match self.body[i] {
            Scalar::Const(c) => out.fill(c),
            Scalar::Unary(f, a) => math::unary(f, of(self.at[a]), out),
            Scalar::Binary(f, a, b) => math::binary(f, of(self.at[a]), of(self.at[b]), out),
            Scalar::Load(l) => {
                let (first, stride) = walk(l);
                let load = &self.loads[l];
                let from = element(self.memory[load.view.operand], load.elem, first).cast_const();
                match load.elem {
                    Elem::F32 if stride == 1 && direct.is_none() => self.at[i] = from,
                    // SAFETY: all elements are valid, by the caller.
                    Elem::F32 => unsafe { gather(from, stride, out, |x| x) },
                    // SAFETY: as above; every bit pattern is an i32.
                    Elem::I32 => unsafe { gather(from.cast::<i32>(), stride, out, |x| x as f32) },
                    // SAFETY: as above; every bit pattern is a bf16.
                    Elem::BF16 => unsafe {
                        gather(from.cast::<u16>(), stride, out, math::from_bf16);
                    },
                }
            }
        }
    }

    /// Evaluates the body for `n` elements along a loop and returns where instruction `value` has
    /// put them; `walk` gives the first element and the stride of each load. If `direct` is given,
    /// the last instruction writes there.
    ///
    /// # Safety
    /// All elements walked are valid; `direct` is valid for n writes and overlaps no load's
    /// elements. `n` is at most [`BLOCK`].
    pub unsafe fn block(
        &mut self,
        n: usize,
        value: usize,
        walk: impl Fn(usize) -> (usize, usize),
        direct: Option<*mut f32>,
    ) -> *const f32 {
        let last = self.body.len() - 1;
        for i in 0..self.body.len() {
            if self.uniform[i] {
                continue;
            }
            // SAFETY: by the caller.
            unsafe { self.step(i, n, &walk, direct.filter(|_| i == last)) };
        }
        self.at[value]
    }

    /// True if instruction `i` is the last and is done for every block.
    fn ends_with(&self, i: usize) -> bool {
        i + 1 == self.body.len() && !self.uniform[i]
    }
}

/// # Safety
/// `out.len()` elements from `from`, `stride` apart, are valid.
#[inline(always)]
unsafe fn gather<T: Copy>(from: *const T, stride: usize, out: &mut [f32], f: impl Fn(T) -> f32) {
    match stride {
        // SAFETY: by the caller.
        0 => unsafe { out.fill(f(*from)) },
        1 => {
            // SAFETY: by the caller.
            let x = unsafe { std::slice::from_raw_parts(from, out.len()) };
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x));
        }
        _ => {
            for (i, o) in out.iter_mut().enumerate() {
                // SAFETY: by the caller.
                *o = f(unsafe { *from.add(i * stride) });
            }
        }
    }
}

/// Reads elements that lie together.
///
/// # Safety
/// `out.len()` elements from `at` are valid, and apart from `out`.
pub(crate) unsafe fn read(at: *const f32, elem: Elem, out: &mut [f32]) {
    // SAFETY: by the caller.
    unsafe {
        match elem {
            Elem::F32 => gather(at, 1, out, |x| x),
            Elem::I32 => gather(at.cast::<i32>(), 1, out, |x| x as f32),
            Elem::BF16 => gather(at.cast::<u16>(), 1, out, math::from_bf16),
        }
    }
}

/// # Safety
/// `n` elements from `to`, `stride` apart, are valid for writes, `n` from `from` for reads.
pub(crate) unsafe fn scatter(from: *const f32, to: *mut f32, stride: usize, n: usize, elem: Elem) {
    // SAFETY: by the caller. A block may be stored where it lies.
    unsafe {
        match (elem, stride) {
            (Elem::F32, 1) => std::ptr::copy(from, to, n),
            (Elem::F32, _) => (0..n).for_each(|i| *to.add(i * stride) = *from.add(i)),
            (Elem::I32, _) => {
                (0..n).for_each(|i| *to.cast::<i32>().add(i * stride) = *from.add(i) as i32);
            }
            (Elem::BF16, 1) => {
                let out = std::slice::from_raw_parts_mut(to.cast::<u16>(), n);
                math::narrow(std::slice::from_raw_parts(from, n), out);
            }
            (Elem::BF16, _) => {
                let to = to.cast::<u16>();
                (0..n).for_each(|i| *to.add(i * stride) = math::to_bf16(*from.add(i)));
            }
        }
    }
}

/// Runs a map.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches.
pub(crate) unsafe fn run(k: &Map, memory: &[*mut f32], registers: &mut Registers) {
    // SAFETY: by the caller.
    let mut interp = unsafe { Interp::new(&k.loads, &k.body, memory, registers) };
    let (len, outer) = match k.extents.split_last() {
        Some((&n, outer)) => (n, outer),
        None => (1, &[][..]),
    };
    let inner = |v: &View| v.strides.get(outer.len()).copied().unwrap_or(0);
    let single = match &k.stores[..] {
        [s] if s.elem == Elem::F32 && inner(&s.view) == 1 && interp.ends_with(s.value) => Some(s),
        _ => None,
    };
    let mut o = Odometer::new(outer);
    while let Some(index) = o.index() {
        let starts: SmallVec<[usize; 8]> = k.loads.iter().map(|l| l.view.at(index)).collect();
        let mut i = 0;
        while i < len {
            let n = BLOCK.min(len - i);
            let walk = |l: usize| {
                let stride = inner(&k.loads[l].view);
                (starts[l] + i * stride, stride)
            };
            let target = |s: &Store| {
                let v = &s.view;
                element(memory[v.operand], s.elem, v.at(index) + i * inner(v))
            };
            // A result on its operand goes through a register: a loop whose operands may overlap
            // its result would not vectorise.
            let direct = single.map(target).filter(|&to| {
                k.loads.iter().enumerate().all(|(l, load)| {
                    let (first, stride) = walk(l);
                    let at = |i| element(memory[load.view.operand], load.elem, i);
                    let (from, end) = (at(first), at(first + stride * (n - 1) + 1));
                    end <= to || to.wrapping_add(n) <= from
                })
            });
            // SAFETY: the kernel reaches these elements, and `direct` overlaps no load.
            unsafe {
                interp.block(n, 0, walk, direct);
                if direct.is_none() {
                    for s in &k.stores {
                        scatter(interp.at[s.value], target(s), inner(&s.view), n, s.elem);
                    }
                }
            }
            i += n;
        }
        o.advance();
    }
}
