//! Gated linear recurrences in chunks against the recurrence token by token: lengths around chunks, decays of 1 and of
//! almost 0, β of 0 and 1, and documents that end before, at and behind the end of a chunk.

use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Port};
use shardc_ir::mesh::Mesh;
use shardc_ir::samples::Sample;
use shardc_ir::tensor::Tensor;

const HEADS: usize = 2;
const KEYS: usize = 7;
const VALUES: usize = 5;

/// A scan of so many tokens, or its gradient, with all operands that there can be.
fn sample(grad: bool, delta: bool, tokens: usize) -> Sample {
    let (rule, beta) = match delta {
        true => ("delta", format!("f32[1,{tokens},{HEADS}], ")),
        false => ("plain", String::new()),
    };
    let (q, v) =
        (format!("f32[1,{tokens},{HEADS},{KEYS}]"), format!("f32[1,{tokens},{HEADS},{VALUES}]"));
    let state = format!("f32[1,{HEADS},{KEYS},{VALUES}]");
    let first = format!("{q}, {q}, f32[1,{tokens},{HEADS}], {v}");
    let behind = format!("{beta}i32[1,{tokens}], {state}");
    let text = match grad {
        false => format!("scan[{rule}; segments=true; start=true] {first}, {behind}"),
        true => {
            format!("scan_grad[{rule}; segments=true; start=true] {first}, {v}, {state}, {behind}")
        }
    };
    Sample::parse(text.leak()).expect("a sample")
}

/// Compares a scan and its gradient with these decays, βs and first tokens of documents.
fn check(delta: bool, tokens: usize, g: Option<f64>, beta: Option<f64>, borders: &[usize]) {
    for grad in [false, true] {
        let s = sample(grad, delta, tokens);
        let mut args = s.draw(tokens as u64);
        let fill = |t: &mut Tensor, x: Option<f64>| {
            if let Some(x) = x {
                t.data.fill(x);
            }
        };
        let behind = if grad { 6 } else { 4 };
        fill(&mut args[2], g);
        if delta {
            fill(&mut args[behind], beta);
        }
        let segments = behind + usize::from(delta);
        // Numbers of documents come again: what counts is where they change.
        let number = |t: usize| borders.iter().filter(|b| **b <= t).count() % 2;
        args[segments] = Tensor::from_fn(&[1, tokens], |i| number(i[1]) as f64);
        let mesh = Mesh::default();
        let mut f = Func::new("f");
        let own: Vec<_> = s.ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
        let outs = Builder::new(&mesh, &mut f).push_n(&[], s.op.clone(), &own);
        f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
        let args: Vec<Vec<Tensor>> = args.into_iter().map(|t| vec![t]).collect();
        let what = format!("{}, g {g:?}, beta {beta:?}, borders {borders:?}", s.text);
        crate::lab::compare(&what, &mesh, &f, &args);
    }
}

#[test]
fn chunks_are_the_recurrence() {
    for delta in [false, true] {
        for tokens in [1, 2, 3, 17, 63, 64, 65, 128, 200] {
            check(delta, tokens, None, None, &[]);
        }
        for borders in [&[63][..], &[64], &[65], &[1, 2, 64, 127, 128, 129], &[16, 32, 130, 131]] {
            check(delta, 150, None, None, borders);
        }
    }
}

/// Nothing decays, all is forgotten at every token, or both by turns; keys write nothing, or all of it.
#[test]
fn extreme_decays_and_writes_are_the_recurrence() {
    for delta in [false, true] {
        for g in [0.0, -0.01, -30.0] {
            for beta in [None, Some(0.0), Some(1.0)] {
                check(delta, 130, Some(g), beta, &[70]);
            }
        }
    }
}
