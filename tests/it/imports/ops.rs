//! Ops in the place of another one of `toy`: losses and gradients as `tests/imports/ops.py` has them of PyTorch.

use super::files::{Scratch, edited, nodes};
use super::{Expected, held, norm};
use crate::fixture::{compile, options, session};
use serde_json::{Value, json};
use shardc_frontends::import::{Imported, Opened};
use shardc_ir::func::RoleKind;
use shardc_runtime::{Numbers, StepBatch};

/// An operand as an archive has it: `%name` is a tensor.
fn operand(x: &Value) -> Value {
    let tensor =
        |x: &Value| x.as_str().and_then(|t| t.strip_prefix('%')).map(|n| json!({ "name": n }));
    match x {
        _ if tensor(x).is_some() => json!({ "as_tensor": tensor(x) }),
        Value::String(t) => json!({ "as_string": t }),
        Value::Bool(b) => json!({ "as_bool": b }),
        Value::Null => json!({ "as_none": true }),
        Value::Number(n) if n.is_i64() => json!({ "as_int": n }),
        Value::Array(all) if all.iter().all(|x| tensor(x).is_some()) => {
            json!({ "as_tensors": all.iter().map(tensor).collect::<Vec<_>>() })
        }
        Value::Array(_) => json!({ "as_ints": x }),
        number => json!({ "as_float": number }),
    }
}

/// `toy` with a case's nodes in the place of its relu.
fn import(scratch: &Scratch, case: &Value) -> shardc_ir::diag::Result<Imported> {
    edited(scratch, "toy.pt2", |j| {
        let all = nodes(j);
        let at = all.iter().position(|n| n["target"].to_string().contains("relu")).expect("relu");
        let mut old = all.remove(at);
        // Some take parameters of the layer in front: they are in its module.
        old["metadata"] = all[at - 1]["metadata"].clone();
        for (i, n) in case["nodes"].as_array().expect("nodes").iter().enumerate() {
            let inputs = n[1].as_object().expect("operands").iter();
            let inputs = inputs.map(|(k, v)| json!({ "name": k, "arg": operand(v), "kind": 1 }));
            let outs = n[2].as_array().expect("results").iter();
            let mut new = old.clone();
            new["target"] = json!(format!("torch.ops.aten.{}", n[0].as_str().expect("an op")));
            new["inputs"] = inputs.collect();
            new["outputs"] = outs.map(|o| json!({ "as_tensor": { "name": o } })).collect();
            all.insert(at + i, new);
        }
        // What compares has truth values, as an archive says.
        let values = &mut j["graph_module"]["graph"]["tensor_values"];
        for n in case["nodes"]
            .as_array()
            .expect("nodes")
            .iter()
            .filter(|n| n[0] == "ge.Tensor" || n[0] == "gt.Scalar")
        {
            let mut meta = values["x"].clone();
            meta["dtype"] = json!(12);
            values[n[2][0].as_str().expect("a name")] = meta;
        }
    })
}

#[test]
fn ops_are_those_of_pytorch() {
    let text = include_str!("../../imports/ops.jsonl");
    let want = Expected::open("toy");
    let mut wrong = vec![];
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).expect("JSON");
        let (name, number) = (&case["name"], |k: &str| case[k].as_f64().expect("a number"));
        let scratch = Scratch::new("ops");
        let made = match import(&scratch, &case) {
            Ok(made) => made,
            Err(d) => {
                wrong.push(format!("{name}: {d}"));
                continue;
            }
        };
        let model = held(&Opened::read(&scratch.path()).expect("an archive"), made);
        let mut o = options(&[("dp_replicate", 2)], false, 4);
        (o.seq, o.global_batch) = (1, 8);
        let compiled = compile(&model, &o);
        let columns = ["x", "y"].map(|k| {
            (k.to_string(), Numbers::F32(want.get(k).iter().map(|&x| x as f32).collect()))
        });
        let batch = StepBatch { columns: columns.into_iter().collect(), observe: true };
        let r = session(&model, &compiled)
            .step(&batch, 1e-3, 1)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let weight =
            model.weights.iter().find(|w| w.tensor == "model.net1.weight").expect("a weight");
        let grad = r.output(RoleKind::GradShown, &weight.param).expect("shown");
        let grad: Vec<f64> = grad.data.iter().map(|&x| f64::from(x)).collect();
        let product: f64 = grad.iter().enumerate().map(|(i, g)| g * (i as f64).cos()).sum();
        let (size, loss) = (number("norm"), f64::from(r.loss.expect("a loss")));
        let off = [
            (loss - number("loss")).abs() / number("loss").abs().max(1.0),
            (norm(grad.iter().copied()) - size).abs() / size,
            (product - number("product")).abs() / size,
        ];
        // What is no number is wrong, too.
        if !(off[0] <= 5e-6 && off[1] <= 1e-4 && off[2] <= 1e-4) {
            wrong.push(format!("{name}: off by {off:?}"));
        }
    }
    assert!(wrong.is_empty(), "not as PyTorch: {wrong:#?}");
}
