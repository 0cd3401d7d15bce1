//! Functions of two elements, of which one is the result, or a comparison: rows of a table.

use super::*;
use crate::attr::Broadcast;
use cast::in_f32;

/// Declares an op of two operands, spread by a rule: beside what [`op!`] takes, what bf16 may do to it, the
/// function of elements `x` and `y`, and the same as instructions of a kernel `b`. If it `picks` one of its
/// operands it has a gradient: `picks |a, b|` gives the operands of the `less` that is 1 where the second
/// is the result.
macro_rules! pairs {
    ($($(#[doc = $doc:literal])* $op:ident = $name:literal $precision:ident, $gradient:ident, samples [$($sample:literal),*]
       |$x:ident, $y:ident| $f:expr;
       |$e:ident, $ex:ident, $ey:ident| $element:expr;
       $of:ident $(picks |$a:ident, $b:ident| $second:expr)?;)*) => {$(
        op! {
            $(#[doc = $doc])*
            $op = $name (a, b) { rule: Broadcast }
            facts { kind: Elementwise, fusion: Some(Each), precision: Wants::$precision, gradient: $gradient, linear: Linear::No }
            samples [$($sample),*]
        }
        impl $op {
            /// Of operands of the same dims.
            pub fn same() -> $op {
                $op { rule: Broadcast::SAME }
            }
        }
        impl OpDef for $op {
            fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
                $of(&self.rule, ins)
            }
            fn dtypes(&self, ins: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
                let compares = self.facts().gradient == Gradient::Stops;
                smallvec::smallvec![if compares { DType::F32 } else { ins[0].dtype }]
            }
            fn element(&self, $e: &mut Body, x: &[usize]) -> Option<Results> {
                let ($ex, $ey) = (x[0], x[1]);
                Some(smallvec::smallvec![$element])
            }
            fn grad(&self, _b: &mut Builder, _ins: &[Value], _: &[Value], _d: &[Option<Value>]) -> Grads {
                $(if let Some(d) = _d[0] {
                    let ($a, $b) = (0, 1);
                    return picked(_b, &self.rule, [_ins[0], _ins[1]], $second, d);
                })?
                smallvec::smallvec![None, None]
            }
            fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
                let parts = mul::spread(cx, &self.rule(&mul::ranks(ins)), ins);
                vec![parts[0].zip(&parts[1], |$x, $y| $f)]
            }
        }
    )*};
}

pairs! {
    /// The larger of two elements, or the one that is not NaN; where both are equal, the gradient goes to the
    /// first. A rule broadcasts a smaller operand.
    Max = "max" Same, Flows,
    samples ["max f32[3,4], f32[3,4]", "max[bsh,h->bsh] f32[2,3,4], f32[4]", "max[ab,ba->ba] f32[3,3], f32[3,3]"]
    |x, y| x.max(y);
    |b, x, y| b.binary(Binary::Max, x, y);
    numbers picks |a, b| [a, b];

    /// The smaller of two elements, or the one that is not NaN; where both are equal, the gradient goes to the
    /// first. A rule broadcasts a smaller operand.
    Min = "min" Same, Flows,
    samples ["min f32[3,4], f32[3,4]", "min[bsh,h->bsh] f32[2,3,4], f32[4]", "min[ab,ba->ba] f32[3,3], f32[3,3]"]
    |x, y| x.min(y);
    |b, x, y| b.binary(Binary::Min, x, y);
    numbers picks |a, b| [b, a];

    /// 1.0 where `a < b`, else 0.0, as f32; no gradient flows through it. Integers are compared as f32, which
    /// is exact below 2^24.
    Less = "less" Wide, Stops,
    samples ["less f32[3,4], f32[3,4]", "less i32[3,4], i32[3,4]", "less[bsh,->bsh] f32[2,3,4], f32[]"]
    |x, y| if x < y { 1.0 } else { 0.0 };
    |b, x, y| {
        let (up, one) = (b.binary(Binary::AtLeast, y, x), b.constant(1.0));
        let same = b.push(Scalar::Where(x, y, one));
        b.sub(up, same)
    };
    alike;

    /// 1.0 where both elements are equal, else 0.0, as f32; no gradient flows through it. Integers are compared
    /// as f32, which is exact below 2^24.
    Equal = "equal" Wide, Stops,
    samples ["equal f32[3,4], f32[3,4]", "equal i32[3,4], i32[3,4]", "equal[bs,bt->bst] i32[2,3], i32[2,4]"]
    |x, y| if x == y { 1.0 } else { 0.0 };
    |b, x, y| {
        let one = b.constant(1.0);
        b.push(Scalar::Where(x, y, one))
    };
    alike;
}

/// Two float operands that fit a broadcast.
fn numbers(rule: &Broadcast, ins: &[&Type]) -> Result<(), String> {
    mul::binary(rule, ins)
}

/// Two operands of one element type, float or not, that fit a broadcast.
fn alike(rule: &Broadcast, ins: &[&Type]) -> Result<(), String> {
    if ins.len() != 2 || ins[0].dtype != ins[1].dtype {
        return Err("two operands of one element type are needed".into());
    }
    rule.accepts(&[ins[0].rank(), ins[1].rank()])
}

/// The cotangent where an operand is the result: the second where `less` of the operands with these numbers
/// is 1, else the first.
fn picked(b: &mut Builder, rule: &Broadcast, ins: [Value; 2], less: [usize; 2], d: Value) -> Grads {
    let r = rule.rule(&ins.map(|v| b.ty(v).rank()));
    let d = in_f32(b, d);
    let of = Rule::of(&less.map(|i| &r.ins[i]), &[&r.outs[0]]);
    let rule = Broadcast(Some(std::sync::Arc::new(of)));
    let second = b.push("second", Less { rule }, &less.map(|i| ins[i]));
    let mut one = |i: usize| {
        b.wants(ins[i]).then(|| {
            let mask = if i == 1 {
                second
            } else {
                let minus = b.push("minus", Scale { by: -1.0 }, &[second]);
                b.push("first", Shift { by: 1.0 }, &[minus])
            };
            dot::product(b, "picked_grad", (d, &r.outs[0]), (mask, &r.outs[0]), &r.ins[i])
        })
    };
    smallvec::smallvec![one(0), one(1)]
}
