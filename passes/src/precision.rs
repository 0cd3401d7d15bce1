//! Decides what is of 16 bits and what stays f32: the policy of `--dtype bf16` and `f16`, by what each op wants.
//!
//! Before:  `%w: f32[16,8] param "w"`, `%y = dot[bsh,oh->bso] %x, %w : f32[2,4,16]`
//! After:   `%w: bf16[16,8] param "w"`, `%y = dot[bsh,oh->bso] %x, %w : bf16[2,4,16]`
//! Assumes: phase Source.  Leaves: phase Source.
//!
//! Below, bf16 stands for the type that is asked for. Parameters are bf16. What an op computes in is in its file ([`shardc_ir::ops::Wants`]):
//!
//! | op | operands | result |
//! |---|---|---|
//! | product of matrices, attention, rotation | made bf16 | bf16; the log-sum-exp f32 |
//! | product that decides a choice: that of a router | made bf16, then f32 | f32 |
//! | rows and weights of experts | made bf16 | bf16; of combine_gates_grad f32 |
//! | the scores of top_k, the gates of dispatch and unpermute | made f32 | |
//! | reduction, and functions that lose digits near their poles: exp, log, roots, quotients | made f32 | f32 |
//! | anything else | as they are; f32 if one is f32 | the same |
//!
//! A product decides a choice if `top_k` takes what is made of its result without another product.
//! A parameter that is added on that way (the bias of a router) stays f32. What is only moved on
//! its way to a product is rounded before, so that moves are of 2 bytes.
//!
//! So the statistics of norms, softmax and cross-entropy are f32, and what is computed with them
//! stays f32 until a product takes it. Every kernel computes in f32 inside; see
//! [`shardc_ir::kernel`]. That a trained bf16 parameter has an f32 master copy, and in which type
//! gradients are kept, is not said here: [`crate::shard::partition`] and
//! [`crate::autodiff::differentiate`] read it off the types.

use shardc_ir::func::{Func, Name, Node, Role, RoleKind, Scope, Value, ValueMap};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::ops::{Cast, Kind, Wants};
use shardc_ir::types::{DType, Type};
use smallvec::SmallVec;

/// Values that decide a choice: what `top_k` takes, and what that is made of, up to products.
fn deciding(f: &Func) -> ValueMap<bool> {
    let mut decides = f.per_value(false);
    for n in f.nodes.iter().rev() {
        let wants = n.op.facts().precision;
        let is = wants == Wants::Decides || n.outs.iter().any(|o| decides[o]);
        if is && !matches!(wants, Wants::Half | Wants::Gated) {
            n.ins.iter().for_each(|v| decides[v] = true);
        }
    }
    decides
}

/// The last operand of floats.
fn gates(f: &Func, n: &Node) -> usize {
    n.ins.iter().rposition(|&v| f.ty(v).dtype.is_float()).unwrap_or(0)
}

/// Values that products alone take, now or after moves.
fn for_products(f: &Func) -> ValueMap<bool> {
    let mut only = f.per_value(None);
    f.results.iter().for_each(|r| only[r.value] = Some(false));
    for n in f.nodes.iter().rev() {
        let wants = n.op.facts().precision;
        let moved = wants == Wants::Moved && only[n.outs[0]] == Some(true);
        for (i, v) in n.ins.iter().enumerate() {
            let takes = match wants {
                Wants::Half => true,
                Wants::Gated => i < gates(f, n),
                Wants::Wide | Wants::Decides => false,
                Wants::Same | Wants::Moved | Wants::HalfFirst | Wants::AsTheyAre => moved,
            };
            let known = &mut only[v];
            *known = Some(known.unwrap_or(true) && takes);
        }
    }
    only.into_iter().map(|x| x == Some(true)).collect()
}

/// Makes the parameters of a model `half`, a float of 16 bits, and with them what is computed.
pub fn precision(f: &mut Func, half: DType) {
    let (decides, for_products) = (deciding(f), for_products(f));
    for a in &f.args {
        let ty = &mut f.values[a.value].ty;
        let is_param = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
        if is_param && ty.dtype == DType::F32 && !decides[a.value] {
            ty.dtype = half;
        }
    }
    let homes = f.values.iter().map(|_| Scope(0)).collect();
    let mut p = PrecisionPass { homes, casts: HashMap::default(), exact: HashSet::default() };
    let mut drawn: HashSet<Value> = HashSet::default();
    for mut n in std::mem::take(&mut f.nodes) {
        let floats = |f: &Func, n: &Node| -> SmallVec<[DType; 4]> {
            let all = n.ins.iter().map(|&v| f.ty(v).dtype);
            all.filter(|d| d.is_float()).collect()
        };
        let wants = n.op.facts().precision;
        let to = match wants {
            Wants::Half | Wants::Gated => Some(half),
            Wants::Wide | Wants::Decides => Some(DType::F32),
            Wants::Moved if for_products[n.outs[0]] => Some(half),
            Wants::Same | Wants::Moved if floats(f, &n).contains(&DType::F32) => Some(DType::F32),
            Wants::Same | Wants::Moved | Wants::HalfFirst | Wants::AsTheyAre => None,
        };
        // What is dropped stays of its type, though the factor is f32.
        let back = to.filter(|to| wants == Wants::Same && *to == DType::F32).and_then(|_| {
            let mut others = n.ins.iter().filter(|v| !drawn.contains(v));
            let short = others.all(|&v| f.ty(v).dtype == half);
            (short && n.ins.iter().any(|v| !drawn.contains(v))).then_some(half)
        });
        if n.op.facts().kind == Kind::Constant && !n.ins.is_empty() {
            drawn.extend(n.outs.iter().copied());
        }
        if wants == Wants::HalfFirst {
            n.ins[0] = p.cast(f, n.ins[0], half, n.scope);
        }
        let gates = if wants == Wants::Gated { gates(f, &n) } else { n.ins.len() };
        let routes = wants == Wants::Half && n.outs.iter().any(|o| decides[o]);
        for (i, v) in n.ins.iter_mut().enumerate() {
            let Some(to) = to.filter(|_| f.ty(*v).dtype.is_float()) else { continue };
            if routes && p.exact.contains(v) {
                continue;
            }
            *v = p.cast(f, *v, if i < gates { to } else { DType::F32 }, n.scope);
            if routes {
                *v = p.cast(f, *v, DType::F32, n.scope);
            }
        }
        if n.op.facts().kind == Kind::Conversion && f.ty(n.ins[0]).dtype == half {
            p.exact.insert(n.outs[0]);
        }
        let types = {
            let ins: SmallVec<[&Type; 4]> = n.ins.iter().map(|&v| f.ty(v)).collect();
            n.op.def().dtypes(&ins, n.outs.len())
        };
        for (&o, dtype) in n.outs.iter().zip(types).filter(|_| !n.ins.is_empty()) {
            f.values[o].ty.dtype = dtype;
            p.homes[o] = n.scope;
        }
        let (out, scope) = (n.outs[0], n.scope);
        if back.is_some() {
            let name = f.name(out).clone();
            let hint = name.hint + "_f32";
            n.outs[0] = f.value(f.ty(out).clone(), Name { hint, dup: 0, ..name });
        }
        let made = n.outs[0];
        f.nodes.push(n);
        if let Some(to) = back {
            f.values[out].ty.dtype = to;
            f.nodes.push(Node::new(Cast { to }, &[made], &[out], scope));
        }
    }
    // A sum over microbatches takes many small numbers into a large one.
    for i in 0..f.results.len() {
        let is_sum = |r: &Role| r.kind.is_summed();
        if f.results[i].role.as_ref().is_some_and(is_sum) {
            f.results[i].value = p.cast(f, f.results[i].value, DType::F32, Scope(0));
        }
    }
}

struct PrecisionPass {
    /// By value of the source: where it is made.
    homes: ValueMap<Scope>,
    /// By value and scope.
    casts: HashMap<(Value, DType, Scope), Value>,
    /// Casts of bf16: what a product would take of them, they are already.
    exact: HashSet<Value>,
}

impl PrecisionPass {
    /// The value in this type. What is rounded is rounded where it is made, once for all users; what
    /// is widened is widened where it is used, so that backward can do it again.
    fn cast(&mut self, f: &mut Func, v: Value, to: DType, user: Scope) -> Value {
        if f.ty(v).dtype == to {
            return v;
        }
        let home = self.homes.get(v.0 as usize).copied().filter(|_| to != DType::F32);
        let scope = home.unwrap_or(user);
        *self.casts.entry((v, to, scope)).or_insert_with(|| {
            let name = f.name(v).clone();
            let hint = format!("{}_{}", name.hint, to.name()).into();
            let new = f.value(Type { dtype: to, ..f.ty(v).clone() }, Name { hint, dup: 0, ..name });
            f.nodes.push(Node::new(Cast { to }, &[v], &[new], scope));
            new
        })
    }
}
