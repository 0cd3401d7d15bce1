//! Samples of ops: `name[attrs] operand types -> result types`, with random operands to suit.
//!
//! Every op comes with samples, and everything that is said of ops in general (gradient, splits,
//! kernels) is tested on all of them.

use crate::attr::{AttrCx, read_size};
use crate::mesh::Mesh;
use crate::ops::{EvalCx, Op, SAMPLES};
use crate::rng::Stream;
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// One use of an op, on one device.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The text it was read from.
    pub text: &'static str,
    pub op: Op,
    pub ins: Vec<Type>,
    /// Declared result types; empty if they follow from the operands.
    pub declared: Vec<Type>,
}

/// All samples of all ops, in table order. Collectives have none.
///
/// # Panics
/// If an op's sample does not parse.
pub fn all() -> Vec<Sample> {
    let texts = SAMPLES.iter().flat_map(|(_, samples)| samples.iter());
    texts.map(|t| Sample::parse(t).unwrap_or_else(|e| panic!("sample `{t}`: {e}"))).collect()
}

impl Sample {
    /// Reads a sample, whose types name no mesh axes.
    ///
    /// ```
    /// # use shardc_ir::samples::Sample;
    /// let s = Sample::parse("dot[mk,kn->mn] f32[3,5], f32[5,4]").unwrap();
    /// assert_eq!((s.ins.len(), s.types()[0].sizes()[..] == [3, 4]), (2, true));
    /// ```
    pub fn parse(text: &'static str) -> Result<Sample, String> {
        let end = text.find(['[', ' ']).unwrap_or(text.len());
        let (name, mut rest) = text.split_at(end);
        let mut attrs = None;
        if let Some(t) = rest.strip_prefix('[') {
            let (a, t) = t.split_once(']').ok_or("`[` is not closed")?;
            (attrs, rest) = (Some(a), t);
        }
        let (ins, outs) = rest.split_once("->").unwrap_or((rest, ""));
        let (ins, declared) = (read_types(ins)?, read_types(outs)?);
        let mesh = Mesh::default();
        let ranks: Vec<usize> = ins.iter().map(Type::rank).collect();
        let op = Op::read(name, attrs, AttrCx { mesh: &mesh, ranks: &ranks })?;
        let s = Sample { text, op, ins, declared };
        s.check()?;
        Ok(s)
    }

    fn check(&self) -> Result<Vec<Type>, String> {
        let ins: Vec<&Type> = self.ins.iter().collect();
        let declared: Vec<Option<&Type>> = self.declared.iter().map(Some).collect();
        let types = self.op.check(&Mesh::default(), &ins, &declared);
        types.map(|t| t.into_vec()).map_err(|e| format!("{}; {}", e.message, e.help))
    }

    /// Result types.
    pub fn types(&self) -> Vec<Type> {
        self.check().expect("checked by parse")
    }

    /// Random operands, the same for the same seed: floats in ±1.5 (positive where needed),
    /// integers in -1..=6, positions a permutation, statistics consistent with each other.
    pub fn draw(&self, seed: u64) -> Vec<Tensor> {
        let mut out: Vec<Tensor> = (0..self.ins.len()).map(|i| self.operand(seed, i)).collect();
        self.op.def().settle(&self.ins, &mut out);
        out
    }

    fn operand(&self, seed: u64, i: usize) -> Tensor {
        let ty = &self.ins[i];
        let stream = Stream::new(seed, self.text, i as u32);
        let sizes = ty.sizes();
        let mut k = 0;
        let mut uniform = || {
            k += 1;
            stream.uniform(k)
        };
        let name = self.op.operands().get(i).copied().unwrap_or("");
        if matches!(name, "q_pos" | "k_pos") {
            // Even positions, then odd ones: every query sees a key, not in the order of time.
            let half = sizes[0].div_ceil(2);
            let at = |i: usize| if i < half { 2 * i } else { 2 * (i - half) + 1 };
            return Tensor::from_fn(&sizes, |i| at(i[0]) as f64);
        }
        if name == "slot" {
            // A permutation of a shard's rows, another one in each.
            let copies = sizes[1] * sizes[2];
            let at = |i: &[usize]| 5 * (i[1] * sizes[2] + i[2]) + i[0];
            return Tensor::from_fn(&sizes, |i| (at(i) % copies) as f64);
        }
        if name == "counts" {
            // All rows of a buffer: one of each expert but the last, which has the rest.
            let (rows, experts) = (self.ins[0].dims[2].size, sizes[1]);
            let of = |e: usize| if e + 1 < experts { 1 } else { rows + 1 - experts };
            return Tensor::from_fn(&sizes, |i| of(i[1]) as f64);
        }
        if self.op.mnemonic() == "select" && name == "m" {
            return Tensor::from_fn(&sizes, |_| f64::from(uniform() < 0.5));
        }
        if name == "applies" {
            return Tensor::scalar(f64::from(uniform() < 0.5));
        }
        let positive = self.op.positive().contains(&name);
        Tensor::from_fn(&sizes, |_| match ty.dtype {
            DType::I32 => (uniform() * 8.0).floor() - 1.0,
            _ if positive => 0.2 + 1.8 * uniform(),
            _ => 3.0 * uniform() - 1.5,
        })
    }

    /// Evaluates the op on one device.
    pub fn eval(&self, ins: &[&Tensor]) -> Vec<Tensor> {
        let types: Vec<&Type> = self.ins.iter().collect();
        eval(&self.op, &types, &self.declared, ins)
    }
}

/// Evaluates an op on one device.
pub(crate) fn eval(op: &Op, types: &[&Type], declared: &[Type], ins: &[&Tensor]) -> Vec<Tensor> {
    let mesh = Mesh::default();
    let declared: Vec<Option<&Type>> = declared.iter().map(Some).collect();
    let outs = op.check(&mesh, types, &declared).expect("a sample's op");
    let outs: Vec<&Type> = outs.iter().collect();
    op.def().eval(&EvalCx { mesh: &mesh, coords: &[], ins: types, outs: &outs }, ins)
}

/// Reads `f32[3,4], i32[2]`.
fn read_types(text: &str) -> Result<Vec<Type>, String> {
    let mut out = vec![];
    let mut rest = text.trim();
    while !rest.is_empty() {
        let bad = || format!("a type is written `f32[3,4]`, not `{text}`");
        let (name, tail) = rest.split_once('[').ok_or_else(bad)?;
        let (sizes, tail) = tail.split_once(']').ok_or_else(bad)?;
        let dtype = DType::named(name.trim()).ok_or_else(bad)?;
        let sizes = sizes.split(',').map(str::trim).filter(|s| !s.is_empty());
        let sizes = sizes.map(read_size).collect::<Result<Vec<usize>, String>>()?;
        out.push(Type::new(dtype, &sizes));
        let tail = tail.trim_start();
        rest = tail.strip_prefix(',').unwrap_or(tail).trim_start();
    }
    Ok(out)
}
