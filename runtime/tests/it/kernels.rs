//! Every op's kernel gives what the op means, whole and split along every letter.

use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Node, Port, Scope};
use shardc_ir::interp::{self, Precision};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{Cast, Op};
use shardc_ir::rule::{Dims, Letter};
use shardc_ir::samples::{self, Sample};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};

/// Samples large enough to fill blocks, and odd.
const LARGE: &[&str] = &[
    "dot[mk,kn->mn] f32[33,67], f32[67,35]",
    "dot[bsh,oh->bso] f32[3,7,33], f32[21,33]",
    "dot[bso,bsh->oh] f32[3,7,21], f32[3,7,33]",
    "dot[bso,oh->bsh] f32[3,7,21], f32[21,33]",
    "dot[bmk,bkn->bmn] f32[3,5,9], f32[3,9,7]",
    "dot[kabm,kan->nbma] f32[3,5,2,3], f32[3,5,4]",
    "dot[bsh,bs->h] f32[3,7,530], f32[3,7]",
    "dot[bsh,h->bs] f32[3,7,530], f32[530]",
    "dot[ab,ab->] f32[37,53], f32[37,53]",
    "add f32[3,1300], f32[3,1300], f32[3,1300]",
    "mul[bsh,h->bsh] f32[2,3,1030], f32[1030]",
    "mul[ab,ba->ab] f32[33,34], f32[34,33]",
    "silu f32[1537]",
    "reduce_sum[bsh->h] f32[3,5,1100]",
    "reduce_sum[bsh->bs] f32[2,3,1500]",
    "reduce_sum[bsh->s] f32[3,5,70]",
    "reduce_sum[ab->] f32[33,45]",
    "reduce_max[bsv->bs] f32[2,3,700]",
    "reduce_max[bsv->v] f32[5,7,3]",
    "reduce_min[bsv->bs] f32[2,3,700]",
    "abs f32[7,300]",
    "silu[1.702] f32[7,300]",
    "erf f32[7,300]",
    "softplus f32[7,300]",
    "pow[1.7] f32[7,300]",
    "round[even] f32[7,300]",
    "select[ab,ab,b->ab] f32[7,300], f32[7,300], f32[300]",
    "less[ab,b->ab] f32[7,300], f32[300]",
    "transpose[abc->cba] f32[5,7,9]",
    "transpose[abc->acb] i32[5,7,9]",
    "expand[bs->shb; h=5] f32[3,7]",
    "take[vh,bs->bsh] f32[7,33], i32[3,5]",
    "index_add[bsh,bs->vh; v=7] f32[3,5,33], i32[3,5]",
    "rope f32[2,5,3,10], f32[5,4], f32[5,4]",
    "rope[adjacent] f32[2,5,3,10], f32[5,4], f32[5,4]",
    "concat[d=100] f32[3,7,33], f32[3,7,67]",
    "narrow[p=33; start=30] f32[3,7,67]",
    "pad[d=100; start=33] f32[3,7,41]",
    "concat[d=70; dim=1] f32[3,33,7], f32[3,20,7], f32[3,17,7]",
    "narrow[p=11; start=3; dim=1; step=5] f32[3,67,9]",
    "narrow[p=11; start=3; step=5] f32[3,67]",
    "pad[d=67; start=3; dim=1; step=5] f32[3,11,9]",
    "draw[k,bs->bsh; from=uniform; stream=a.0; h=70] i32[3], i32[3,5]",
    "draw[k,bs->hbs; from=normal; stream=a.1; h=33] i32[3], i32[3,5]",
    "draw[k->ab; from=keep 0.25; stream=b; a=7,b=33] i32[3]",
    "cumsum[1] f32[3,70,33]",
    "cumsum[2; reverse=true] f32[3,7,133]",
    "top_k[bse->bsk; k=8] f32[2,33,130]",
    "top_k[ets->kts; k=3] f32[9,4,5]",
    "route[g=2,e=3; rows=66; capacity=none] i32[3,33,2]",
    "route[g=2,e=3; rows=12; capacity=4] i32[3,33,2]",
    "dispatch[g=2,c=33] f32[3,33,70], i32[3,33,2], f32[3,33,2]",
    "unpermute f32[2,3,33,70], i32[3,33,2], f32[3,33,2]",
    "combine_gates_grad f32[2,3,33,70], i32[3,33,2], f32[3,33,70]",
    "grouped_dot f32[6,3,40,35], i32[6,4,3], f32[24,33,35]",
    "grouped_dot_t f32[6,3,40,33], i32[6,4,3], f32[24,33,35]",
    "grouped_outer f32[6,3,40,33], i32[6,4,3], f32[6,3,40,35]",
    "attention[0.3; mask=causal] f32[1,70,4,3], f32[1,70,2,3], f32[1,70,2,2], i32[70], i32[70]",
    "attention[0.3; mask=-4..0] f32[1,130,2,3], f32[1,130,2,3], f32[1,130,2,3], i32[130], i32[130]",
    "attention[0.3; mask=causal; softcap=0.7] f32[1,70,4,3], f32[1,70,2,3], f32[1,70,2,2], i32[70], i32[70]",
    "attention_grad[0.3; mask=causal; softcap=0.7] f32[1,70,4,3], f32[1,70,2,3], f32[1,70,2,2], f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[70]",
    "attention_grad[0.3; mask=-8..0] f32[1,70,4,3], f32[1,70,2,3], f32[1,70,2,2], f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[70]",
    "attention[0.3; mask=full] f32[1,70,4,3], f32[1,90,2,3], f32[1,90,2,2], i32[70], i32[90]",
    "attention[0.3; mask=full; softcap=0.7; slopes=true] f32[1,70,4,3], f32[1,90,2,3], f32[1,90,2,2], i32[70], i32[90], f32[4]",
    "attention_grad[0.3; mask=causal; slopes=true] f32[1,70,4,3], f32[1,90,2,3], f32[1,90,2,2], f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[90], f32[4]",
    "attention[0.3; mask=causal; slopes=true; kept=0.7 a] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], i32[70], i32[90], f32[4], i32[3], i32[2,70]",
    "attention_grad[0.3; mask=causal; softcap=0.7; kept=0.7 a] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], f32[2,70,4], f32[2,70,4,2], f32[2,70,4], i32[70], i32[90], i32[3], i32[2,70]",
    "attention[0.3; mask=full; segments=true] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], i32[70], i32[90], i32[2,70], i32[2,90]",
    "attention[0.3; mask=causal; segments=true] f32[2,230,2,3], f32[2,900,1,3], f32[2,900,1,2], i32[230], i32[900], i32[2,230], i32[2,900]",
    "attention_grad[0.3; mask=full; softcap=0.7; segments=true] f32[2,230,2,3], f32[2,900,1,3], f32[2,900,1,2], f32[2,230,2], f32[2,230,2,2], f32[2,230,2], i32[230], i32[900], i32[2,230], i32[2,900]",
    "attention_grad[0.3; mask=causal; slopes=true; segments=true; kept=0.7 a] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], f32[2,70,4], f32[2,70,4,2], f32[2,70,4], i32[70], i32[90], f32[4], i32[2,70], i32[2,90], i32[3], i32[2,70]",
    "attention[0.3; mask=full; bias=true] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], i32[70], i32[90], f32[4,179]",
    "attention_grad[0.3; mask=full; bias=true] f32[2,70,4,3], f32[2,90,2,3], f32[2,90,2,2], f32[2,70,4], f32[2,70,4,2], f32[2,70,4], i32[70], i32[90], f32[4,179]",
    "attention[0.3; mask=causal; bias=true; segments=true] f32[2,230,2,3], f32[2,900,1,3], f32[2,900,1,2], i32[230], i32[900], f32[2,41], i32[2,230], i32[2,900]",
    "attention_grad[0.3; mask=causal; softcap=0.7; bias=true; segments=true; kept=0.7 a] f32[2,230,2,3], f32[2,900,1,3], f32[2,900,1,2], f32[2,230,2], f32[2,230,2,2], f32[2,230,2], i32[230], i32[900], f32[2,41], i32[2,230], i32[2,900], i32[3], i32[2,230]",
    "rope f32[3,70,4,6], f32[3,70,2], f32[3,70,2]",
    "attention[0.3; mask=-4..7] f32[1,130,2,3], f32[1,130,2,3], f32[1,130,2,3], i32[130], i32[130]",
    "attention_grad[0.3; mask=-8..3/20] f32[1,70,4,3], f32[1,70,2,3], f32[1,70,2,2], f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[70]",
    "attention_grad[0.3; mask=full; softcap=0.7] f32[1,70,4,3], f32[1,90,2,3], f32[1,90,2,2], f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[90]",
    "scan[plain; segments=true; start=true] f32[2,150,2,9], f32[2,150,2,9], f32[2,150,2], f32[2,150,2,6], i32[2,150], f32[2,2,9,6]",
    "scan[delta; segments=true; start=true] f32[2,150,2,9], f32[2,150,2,9], f32[2,150,2], f32[2,150,2,6], f32[2,150,2], i32[2,150], f32[2,2,9,6]",
    "scan_grad[plain; segments=true; start=true] f32[2,150,2,9], f32[2,150,2,9], f32[2,150,2], f32[2,150,2,6], f32[2,150,2,6], f32[2,2,9,6], i32[2,150], f32[2,2,9,6]",
    "scan_grad[delta; segments=true; start=true] f32[2,150,2,9], f32[2,150,2,9], f32[2,150,2], f32[2,150,2,6], f32[2,150,2,6], f32[2,2,9,6], f32[2,150,2], i32[2,150], f32[2,2,9,6]",
    "scan[delta] f32[1,0,2,3], f32[1,0,2,3], f32[1,0,2], f32[1,0,2,4], f32[1,0,2]",
    "adamw[0.9; beta2=0.99; eps=1e-8; decay=0.1] f32[3,700], f32[3,700], f32[3,700], f32[3,700], f32[], f32[], f32[]",
    "add f32[0,4], f32[0,4]",
    "reduce_sum[ab->a] f32[3,0]",
    "reduce_max[ab->b] f32[0,3]",
    "dot[mk,kn->mn] f32[3,0], f32[0,4]",
];

/// Splits the dims that begin with a letter over the mesh's first atom; other operands are
/// replicated over it.
fn split(t: &Type, dims: &Dims, letter: Option<Letter>) -> Type {
    let mut t = t.clone();
    let Some(letter) = letter else { return t };
    match dims.iter().position(|g| g.letters()[0] == letter) {
        Some(d) => t.dims[d].atoms = AtomList::collect([Atom(0)]).unwrap(),
        None => t.replicated = AtomSet::one(Atom(0)),
    }
    t
}

/// The sample as a function over a mesh, split along a letter, if its types allow that.
fn function(s: &Sample, mesh: &Mesh, letter: Option<Letter>) -> Option<Func> {
    let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
    let rule = s.op.def().rule(&ranks);
    let ins: Vec<Type> = s.ins.iter().zip(&rule.ins).map(|(t, d)| split(t, d, letter)).collect();
    let mut declared: Vec<Type> = s.declared.clone();
    if declared.is_empty() {
        let outs = s.types();
        declared = outs.iter().zip(&rule.outs).map(|(t, d)| split(t, d, letter)).collect();
    }
    let types: Vec<&Type> = ins.iter().collect();
    let outs = s.op.check(mesh, &types, &declared.iter().map(Some).collect::<Vec<_>>()).ok()?;
    let mut f = Func::new("f");
    let args: Vec<_> = ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
    let outs: Vec<_> = outs.into_iter().map(|t| f.value(t, Name::parse("y"))).collect();
    f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
    f.nodes.push(Node::new(s.op.clone(), &args, &outs, Scope(0)));
    Some(f)
}

/// The nearest numbers of a type.
fn rounded(t: &Tensor, ty: &Type) -> Tensor {
    let cast = Cast { to: ty.dtype };
    let mut f = Func::new("f");
    let x = f.arg(Type::f32(&ty.sizes()), Name::parse("x"), None);
    let y = Builder::new(&Mesh::default(), &mut f).push("y", cast, &[x]);
    f.results = vec![Port { value: y, role: None }];
    let args = [vec![t.clone()]];
    interp::call(&Mesh::default(), &f, &args, Precision::F32).unwrap().swap_remove(0).swap_remove(0)
}

/// Compares on so many ranks, split along all letters; says how many splits there were.
fn check(s: &Sample, ways: &[usize]) -> usize {
    let mut global = s.draw(11);
    for (t, ty) in global.iter_mut().zip(&s.ins).filter(|(_, ty)| ty.dtype.is_half()) {
        *t = rounded(t, &Type::new(ty.dtype, &ty.sizes()));
    }
    let mut splits = 0;
    for &ways in ways {
        let mesh = Mesh::new(&[("tp", ways)]).unwrap();
        let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
        let letters: Vec<Option<Letter>> = match ways {
            1 => vec![None],
            _ => s.op.def().rule(&ranks).letters().into_iter().map(Some).collect(),
        };
        for letter in letters {
            let Some(f) = function(s, &mesh, letter) else { continue };
            splits += usize::from(ways > 1);
            let args: Vec<Vec<Tensor>> = f
                .args
                .iter()
                .zip(&global)
                .map(|(p, t)| interp::scatter(&mesh, f.ty(p.value), t))
                .collect();
            let what = format!("{} split {ways} ways along {:?}", s.text, letter.map(Letter::name));
            crate::lab::compare(&what, &mesh, &f, &args);
        }
    }
    splits
}

#[test]
fn all_samples_match_their_meaning() {
    let mut splits = 0;
    for s in samples::all() {
        splits += check(&s, &[1, 2, 3, 4]);
    }
    assert!(splits > 150, "only {splits} splits were tried");
}

#[test]
fn large_samples_match_their_meaning() {
    for text in LARGE {
        check(&Sample::parse(text).unwrap(), &[1, 2, 3]);
    }
}

/// At zeros of both signs and at infinities, functions of one element give what they mean, sign included:
/// 1 / abs(0) is not minus infinity.
#[test]
fn zeros_keep_their_signs() {
    let x = Tensor {
        shape: [6].into_iter().collect(),
        data: vec![0.0, -0.0, f64::INFINITY, -f64::INFINITY, 2.0, -2.0],
    };
    for text in [
        "abs f32[6]",
        "sign f32[6]",
        "at_least[0.0] f32[6]",
        "scale[2.0] f32[6]",
        "erf f32[6]",
        "round[floor] f32[6]",
        "round[ceil] f32[6]",
        "round[even] f32[6]",
    ] {
        let s = Sample::parse(text).unwrap();
        let f = function(&s, &Mesh::default(), None).unwrap();
        let args = [vec![x.clone()]];
        let mean = interp::call(&Mesh::default(), &f, &args, Precision::F32).unwrap();
        let made = crate::lab::run(&Mesh::default(), &f, &args, false).unwrap();
        let bits = |t: &[Vec<Tensor>]| -> Vec<u32> {
            t[0][0].data.iter().map(|x| (*x as f32).to_bits()).collect()
        };
        assert_eq!(
            bits(&made),
            bits(&mean),
            "{text}: {:?}, not {:?}",
            made[0][0].data,
            mean[0][0].data
        );
    }
}

/// Products of up to three letters, each in two of the three tensors or in all, in any order: every
/// seventh of them.
#[test]
fn products_of_any_rule_match_their_meaning() {
    let orders = |all: &[char]| -> Vec<String> {
        let mut out: Vec<String> = vec![String::new()];
        for (n, &c) in all.iter().enumerate() {
            let put = |s: String| {
                (0..=n).map(move |i| [&s[..i], c.encode_utf8(&mut [0; 4]), &s[i..]].concat())
            };
            out = out.into_iter().flat_map(put).collect();
        }
        out
    };
    let (mut seen, mut tried) = (0, 0);
    for letters in 1..=3u32 {
        // Which tensors have a letter: a and b, a and the result, b and the result, or all.
        for kinds in 0..4u32.pow(letters) {
            let of = |tensor: usize| -> Vec<char> {
                let has = |l: &u32| {
                    [[0, 1, 3], [0, 2, 3], [1, 2, 3]][tensor].contains(&(kinds / 4u32.pow(*l) % 4))
                };
                (0..letters).filter(has).map(|l| char::from(b'a' + l as u8)).collect()
            };
            let size = |dims: &str| {
                let all: Vec<String> = dims.bytes().map(|l| (l - b'a' + 2).to_string()).collect();
                all.join(",")
            };
            let [a, b, out] = [0, 1, 2].map(|t| orders(&of(t)));
            for (a, b, out) in a.iter().flat_map(|a| {
                b.iter().flat_map({
                    let out = &out;
                    move |b| out.iter().map(move |out| (a, b, out))
                })
            }) {
                seen += 1;
                if seen % 7 == 0 {
                    let text = format!("dot[{a},{b}->{out}] f32[{}], f32[{}]", size(a), size(b));
                    tried += 1;
                    check(&Sample::parse(text.leak()).unwrap(), &[1, 2]);
                }
            }
        }
    }
    assert!(tried > 250, "{tried}");
}

/// Large enough for several threads to share: many rows, a few long ones, rows that are added to each
/// other.
#[test]
fn large_moves_match_their_meaning() {
    for text in [
        "transpose[abc->cba] f32[35,40,53]",
        "expand[bs->shb; h=30] f32[30,70]",
        "take[vh,bs->bsh] f32[7,700], i32[3,50]",
        "take[vh,bs->bsh] f32[7,40000], i32[1,2]",
        "index_add[bsh,bs->vh; v=7] f32[3,50,700], i32[3,50]",
        "index_add[bsh,bs->vh; v=3] f32[1,2,40000], i32[1,2]",
        "index_add[bs,bs->bsv; v=700] f32[3,30], i32[3,30]",
        "rope f32[2,40,5,150], f32[40,70], f32[40,70]",
        "concat[d=100] f32[3,400,33], f32[3,400,67]",
        "concat[d=60000] f32[2,25000], f32[2,35000]",
        "narrow[p=70; start=30] f32[3,400,103]",
        "pad[d=90000; start=33] f32[1,70001]",
    ] {
        let s = Sample::parse(text).unwrap();
        check(&s, &[1, 2]);
        for half in HALVES.iter().filter_map(|&h| in_half(&s, h)) {
            check(&half, &[1]);
        }
    }
}

/// Blocks of which some or all queries see nothing: outputs 0 with a log-sum-exp of -inf, gradients
/// 0, and no NaN.
#[test]
fn blocks_of_keys_that_are_not_seen() {
    let qkv = "f32[1,70,4,3], f32[1,9,2,3], f32[1,9,2,2]";
    let attention = format!("attention[0.3; mask=causal] {qkv}, i32[70], i32[9]");
    let grad = format!(
        "attention_grad[0.3; mask=causal] {qkv}, f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[9]"
    );
    for (text, at) in [(attention, 3), (grad, 6)] {
        let s = Sample::parse(text.leak()).unwrap();
        let f = function(&s, &Mesh::default(), None).unwrap();
        for first in [0, 40, 66, 1000] {
            let mut args = s.draw(3);
            args[at] = Tensor::from_fn(&[70], |i| i[0] as f64);
            args[at + 1] = Tensor::from_fn(&[9], |i| (first + i[0]) as f64);
            if at == 6 {
                // As of rows that see more elsewhere.
                args[3] = args[3].map(|x| if x.is_finite() { x } else { 0.5 });
            }
            let args: Vec<Vec<Tensor>> = args.into_iter().map(|t| vec![t]).collect();
            crate::lab::compare(&format!("{} from {first}", s.text), &Mesh::default(), &f, &args);
        }
    }
}

/// Floats of 16 bits.
const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// The sample with a float of 16 bits in place of every f32 that its op takes so.
fn in_half(s: &Sample, dtype: DType) -> Option<Sample> {
    let mut half = s.clone();
    half.ins.iter_mut().filter(|t| t.dtype == DType::F32).for_each(|t| t.dtype = dtype);
    let f32s: &[usize] = match &s.op {
        Op::Rope(_) => &[1, 2],
        Op::Attention(k) if k.slopes || k.bias => &[5],
        Op::AttentionGrad(k) if k.slopes || k.bias => &[3, 5, 8],
        Op::AttentionGrad(_) => &[3, 5],
        Op::MergeAttention(_) => &[1, 3],
        // All of it is f32.
        Op::Scan(_) | Op::ScanGrad(_) => return None,
        // A parameter, its moments and its scalars are f32: only the gradient is not.
        Op::AdamW(_) => &[0, 2, 3, 4, 5, 6, 7],
        Op::Sgd(_) => &[0, 2, 3, 4],
        Op::Literal(_) | Op::Fill(_) => return None,
        // Gates are f32.
        Op::Dispatch(_) | Op::Unpermute(_) => &[2],
        _any => &[],
    };
    for &i in f32s.iter().filter(|&&i| i < s.ins.len()) {
        half.ins[i].dtype = DType::F32;
    }
    half.declared.iter_mut().filter(|t| t.dtype == DType::F32).for_each(|t| t.dtype = dtype);
    half.ins.iter().any(|t| t.dtype == dtype).then_some(half)
}

fn samples_in(dtype: DType) {
    let large = LARGE.iter().map(|text| Sample::parse(text).unwrap());
    let halves: Vec<Sample> =
        samples::all().into_iter().chain(large).filter_map(|s| in_half(&s, dtype)).collect();
    assert!(halves.len() > 70, "only {} samples", halves.len());
    let splits: usize = halves.iter().map(|s| check(s, &[1, 2, 3])).sum();
    assert!(splits > 200, "only {splits} splits were tried");
}

#[test]
fn samples_in_bf16_match_their_meaning() {
    samples_in(DType::BF16);
}

#[test]
fn samples_in_f16_match_their_meaning() {
    samples_in(DType::F16);
}

/// A sample of bf16, and the same of f16.
fn check_halves(text: &'static str, ways: &[usize]) {
    check(&Sample::parse(text).unwrap(), ways);
    check(&Sample::parse(text.replace("bf16", "f16").leak()).unwrap(), ways);
}

/// Where an op takes operands of both types, the result has that of the first.
#[test]
fn element_types_may_be_mixed() {
    for text in [
        "dot[mk,kn->mn] bf16[7,9], f32[9,5]",
        "dot[mk,kn->mn] f32[7,9], bf16[9,5]",
        "dot[ab,ab->a] f32[7,9], bf16[7,9]",
        "adamw[0.9; beta2=0.99; eps=1e-8; decay=0.1] f32[3,7], bf16[3,7], f32[3,7], f32[3,7], f32[], f32[], f32[]",
        "dispatch[g=2,c=3] f32[2,3,4], i32[2,3,2], bf16[2,3,2]",
        "unpermute bf16[2,2,3,4], i32[2,3,2], bf16[2,3,2]",
        "combine_gates_grad bf16[2,2,3,4], i32[2,3,2], f32[2,3,4]",
        "combine_gates_grad f32[2,2,3,4], i32[2,3,2], bf16[2,3,4]",
        "grouped_dot f32[2,2,3,4], i32[2,2,2], bf16[4,5,4]",
        "grouped_dot_t bf16[2,2,3,4], i32[2,2,2], f32[4,4,5]",
        "grouped_outer f32[2,2,3,4], i32[2,2,2], bf16[2,2,3,5]",
    ] {
        check_halves(text, &[1, 2]);
    }
}

/// Products of more than one block along m, n and k, and across each other; rows of several pieces.
#[test]
fn products_of_16_bits_join_their_blocks() {
    for text in [
        "dot[mk,kn->mn] bf16[3,1030], bf16[1030,5]",
        "dot[mk,nk->mn] bf16[530,7], bf16[520,7]",
        "dot[km,kn->nm] bf16[9,530], bf16[9,520]",
        "dot[bso,bsh->oh] bf16[3,200,21], bf16[3,200,33]",
        "grouped_dot bf16[1,2,3,1030], i32[1,2,2], bf16[2,520,1030]",
        "grouped_dot_t bf16[1,2,3,1030], i32[1,2,2], bf16[2,1030,5]",
        "grouped_dot bf16[1,3,200,9], i32[1,2,3], bf16[2,520,9]",
        "grouped_outer bf16[1,3,200,21], i32[1,1,3], bf16[1,3,200,520]",
        "dispatch[g=2,c=3] bf16[2,3,1030], i32[2,3,2], f32[2,3,2]",
        "unpermute bf16[2,2,3,1030], i32[2,3,2], f32[2,3,2]",
        "combine_gates_grad bf16[2,2,3,1030], i32[2,3,2], bf16[2,3,1030]",
    ] {
        check_halves(text, &[1, 2]);
    }
}
