//! Gradients: against finite differences on one device, then split in every way against one device.

use super::{Case, close, pending, results, run, splits, with_args};
use shardc_ir::attr::{AttrCx, Padding};
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Gradient, Op, Take};
use shardc_ir::rng::Stream;
use shardc_ir::samples::{self, Sample};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::Type;

/// Float operands that get none: positions are not parameters.
const FIXED: &[(&str, &str)] =
    &[("rope", "cos"), ("rope", "sin"), ("select", "m"), ("attention", "slopes")];

fn flows(s: &Sample) -> bool {
    s.op.facts().gradient == Gradient::Flows
}

/// The op followed by its gradient. Arguments are the operands, then the results' cotangents; the
/// function's results are the gradients that exist, whose operand numbers are returned too.
fn backward(mesh: &Mesh, op: &Op, ins: &[Type], declared: &[Type]) -> (Func, Vec<usize>) {
    let (mut f, args) = with_args(ins);
    let hints: Vec<Option<&Type>> = declared.iter().map(Some).collect();
    let mut b = Builder::new(mesh, &mut f);
    let outs = b.try_push(op.clone(), &args, &hints, &[]).expect("typed before");
    let cotangent = |b: &mut Builder, &v: &Value| {
        let ty = b.ty(v).cotangent();
        let name = b.named("cotangent");
        Some(b.f.arg(ty, name, None))
    };
    let d: Vec<Option<Value>> = outs.iter().map(|v| cotangent(&mut b, v)).collect();
    b.grad = true;
    let grads = op.def().grad(&mut b, &args, &outs, &d);
    let some: Vec<usize> = (0..grads.len()).filter(|&i| grads[i].is_some()).collect();
    let values: Vec<Value> = grads.into_iter().flatten().collect();
    results(&mut f, &values);
    (f, some)
}

fn cotangents(s: &Sample) -> Vec<Tensor> {
    let stream = |o: usize| Stream::new(9, s.text, o as u32);
    let one = |(o, ty): (usize, &Type)| {
        let mut k = 0;
        Tensor::from_fn(&ty.sizes(), |_| {
            k += 1;
            2.0 * stream(o).uniform(k) - 1.0
        })
    };
    s.types().iter().enumerate().map(one).collect()
}

/// Gradients on one device, with the numbers of their operands.
fn whole(s: &Sample) -> (Vec<Tensor>, Vec<usize>) {
    let mesh = Mesh::default();
    let (f, some) = backward(&mesh, &s.op, &s.ins, &s.declared);
    let globals: Vec<Tensor> = s.draw(5).into_iter().chain(cotangents(s)).collect();
    (run(&mesh, &f, &globals).unwrap_or_else(|e| panic!("{}: {e}", s.text)), some)
}

fn loss(s: &Sample, ins: &[Tensor], cotangents: &[Tensor]) -> f64 {
    let outs = s.eval(&ins.iter().collect::<Vec<_>>());
    let dot =
        |(a, b): (&Tensor, &Tensor)| a.data.iter().zip(&b.data).map(|(x, y)| x * y).sum::<f64>();
    outs.iter().zip(cotangents).map(dot).sum()
}

#[test]
fn the_right_operands_have_gradients() {
    for s in samples::all() {
        let op = s.op.mnemonic();
        let has = |i: usize| {
            let name = s.op.operands().get(i).copied().unwrap_or("");
            // In the place of slopes there may be a bias, which is trained.
            let biased = matches!(&s.op, Op::Attention(k) if k.bias) && name == "slopes";
            let fixed = FIXED.contains(&(op, name)) && !biased;
            flows(&s) && s.ins[i].dtype.is_float() && !fixed
        };
        let want: Vec<usize> = (0..s.ins.len()).filter(|&i| has(i)).collect();
        assert_eq!(whole(&s).1, want, "{}", s.text);
    }
}

#[test]
fn gradients_equal_finite_differences() {
    const H: f64 = 1e-5;
    for s in samples::all() {
        let (grads, some) = whole(&s);
        let cotangents = cotangents(&s);
        let mut ins = s.draw(5);
        for (g, &i) in grads.iter().zip(&some) {
            let mut difference = Tensor::full(&ins[i].shape.clone(), 0.0);
            for e in 0..difference.data.len() {
                let x = ins[i].data[e];
                let mut at = |y: f64| {
                    ins[i].data[e] = y;
                    loss(&s, &ins, &cotangents)
                };
                difference.data[e] = (at(x + H) - at(x - H)) / (2.0 * H);
                ins[i].data[e] = x;
            }
            stop_at_padding(&s, &mut difference);
            close(g, &difference, 1e-6).unwrap_or_else(|m| panic!("{}: operand {i}: {m}", s.text));
        }
    }
}

/// The gradient of a padding token's row is 0 by definition, though the row is looked up.
fn stop_at_padding(s: &Sample, difference: &mut Tensor) {
    let Op::Take(Take { padding: Padding::Constant(at), .. }) = &s.op else { return };
    let row = difference.shape[1];
    let row = &mut difference.data[at * row..][..row];
    assert!(row.iter().all(|x| x.abs() > 0.1), "{}: padding is not looked up", s.text);
    row.fill(0.0);
}

fn replicated(s: &Sample) -> Case {
    let mesh = Mesh::new(&[("x", 2)]).expect("a mesh");
    let mut ins = s.ins.clone();
    ins.iter_mut().for_each(|t| t.replicated = mesh.all());
    Case { what: format!("{}, all replicated", s.text), mesh, ins, declared: s.declared.clone() }
}

#[test]
fn gradients_of_spread_ops_are_typed_and_equal() {
    for s in samples::all().iter().filter(|s| flows(s)) {
        let (want, _) = whole(s);
        let globals: Vec<Tensor> = s.draw(5).into_iter().chain(cotangents(s)).collect();
        let cases = splits(s).into_iter().chain(pending(s)).chain([replicated(s)]);
        for case in cases {
            let (f, some) = backward(&case.mesh, &s.op, &case.ins, &case.declared);
            for (p, &i) in f.results.iter().zip(&some) {
                let (got, want) = (f.ty(p.value), case.ins[i].cotangent());
                assert_eq!(got, &want, "{}: gradient of operand {i}", case.what);
            }
            let got =
                run(&case.mesh, &f, &globals).unwrap_or_else(|e| panic!("{}: {e}", case.what));
            for ((g, w), i) in got.iter().zip(&want).zip(&some) {
                close(g, w, 1e-10).unwrap_or_else(|m| panic!("{}: operand {i}: {m}", case.what));
            }
        }
    }
}

/// An operand that nobody asks for costs nothing.
#[test]
fn unwanted_gradients_are_not_computed() {
    let s = Sample::parse("dot[mk,kn->mn] f32[3,5], f32[5,4]").expect("a sample");
    let mesh = Mesh::default();
    let (mut f, args) = with_args(&s.ins);
    let out = Builder::new(&mesh, &mut f).push("y", s.op.clone(), &args);
    let wanted = [false, true, false];
    let mut b = Builder { wanted: &wanted, ..Builder::new(&mesh, &mut f) };
    let grads = s.op.def().grad(&mut b, &args, &[out], &[Some(out)]);
    assert_eq!((grads[0].is_some(), grads[1].is_some(), f.nodes.len()), (false, true, 2));
}

/// What gradients are made of can be written and read back, whatever letters it uses.
#[test]
fn gradients_survive_a_round_trip_through_text() {
    let mesh = Mesh::default();
    for s in samples::all() {
        let (f, _) = backward(&mesh, &s.op, &s.ins, &s.declared);
        for n in &f.nodes {
            let mut text = String::new();
            n.op.write(&mesh, &mut text);
            let (name, attrs) = match text.split_once('[') {
                Some((n, a)) => (n, Some(a.strip_suffix(']').expect("closed"))),
                None => (text.as_str(), None),
            };
            let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
            let back = Op::read(name, attrs, AttrCx { mesh: &mesh, ranks: &ranks });
            assert_eq!(back.as_ref(), Ok(&n.op), "{}: {text}", s.text);
        }
    }
}
