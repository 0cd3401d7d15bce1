//! Attention sinks (OpenAI, 2025, *gpt-oss*): a learned logit per head that takes part in the softmax
//! and has no value, so that it only enlarges the denominator. With the log-sum-exp L of a head,
//! attention with a sink is attention · e^L / (e^L + e^sink) = attention · logistic(L - sink): two ops
//! behind attention, which every layout and both directions follow. Here these are put into a Llama,
//! whose reference has the attention of transformers' gpt-oss.

use crate::fixture::*;
use shardc_frontends::Model;
use shardc_ir::attr::Broadcast;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::ops::{Logistic, Mul, Op, Sub};
use shardc_ir::types::Type;
use shardc_ir::weights::{Init, Weight};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options};
use std::collections::HashMap;

/// The model with a sink for every head of every layer.
fn with_sinks(mut model: Model) -> Model {
    let (heads, mesh) = (model.facts.heads, model.module.mesh.clone());
    let f = &mut model.module.funcs[0];
    let mut moved: HashMap<Value, Value> = HashMap::new();
    let mut layer = 0;
    for mut n in std::mem::take(&mut f.nodes) {
        n.ins.iter_mut().for_each(|v| *v = moved.get(v).copied().unwrap_or(*v));
        let (attention, scope) = (matches!(n.op, Op::Attention(_)), n.scope);
        let outs = n.outs.clone();
        f.nodes.push(n);
        if !attention {
            continue;
        }
        let param = format!("model.layers.{layer}.self_attn.sinks");
        layer += 1;
        let mut b = Builder::new(&mesh, f);
        b.scope = scope;
        let (name, role) = (b.named("sinks"), Role::new(RoleKind::Param, param.as_str()));
        let sinks = b.f.arg(Type::f32(&[heads]), name, Some(role));
        let above =
            b.push("above", Sub { rule: Broadcast::new("bsn,n->bsn", &[3, 1]) }, &[outs[1], sinks]);
        let share = b.push("share", Logistic {}, &[above]);
        let out = b.push("attn", Mul::by("bsnd,bsn->bsnd", &[4, 3]), &[outs[0], share]);
        moved.insert(outs[0], out);
        model.weights.push(Weight {
            tensor: param.clone(),
            param,
            tensor_shape: vec![heads],
            experts: None,
            part: None,
            shape: vec![heads],
            init: Init::Zeros,
            matrix: false,
            tp_dim: Some(0),
        });
    }
    model
}

fn check(mesh: &[(&str, usize)], change: impl FnOnce(&mut Options)) {
    let fx = Fixture::open("llama_sinks");
    let mut o = options(mesh, false, 2);
    change(&mut o);
    let model = with_sinks(fx.model(&o));
    let compiled = compile(&model, &o);
    let n = three_steps(&model, &compiled, &fx.input_ids, &fx.targets());
    let at = |p: &str| model.weights.iter().position(|w| w.param == p).expect("a weight");
    fx.compare_loss(n.loss);
    fx.compare_logits(&n.logits);
    fx.compare_grads(&model, |p| n.grads[at(p)].clone());
    fx.compare_params(&model, |p| n.params[at(p)].clone());
}

#[test]
fn one_rank() {
    check(&[], |_| ());
    check(&[], |o| o.recompute = Recompute::Selective);
}

#[test]
fn split_with_the_heads() {
    check(&[("tp", 2)], |o| o.sp = true);
    check(&[("tp", 4)], |_| ());
    check(&[("dp_shard", 2), ("tp", 2)], |o| o.zero = 3);
    check(&[("pp", 2), ("tp", 2)], |_| ());
}

#[test]
fn behind_a_ring() {
    for mesh in [&[("cp", 2)][..], &[("cp", 4)], &[("cp", 2), ("tp", 2)]] {
        check(mesh, |o| o.cp_mode = CpMode::Ring);
    }
}

#[test]
fn with_gathered_keys_and_with_ulysses() {
    for cp_mode in [CpMode::AllGather, CpMode::Ulysses] {
        check(&[("cp", 2), ("tp", 2)], |o| o.cp_mode = cp_mode);
        check(&[("cp", 4)], |o| o.cp_mode = cp_mode);
    }
}
