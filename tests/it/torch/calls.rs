//! What programs have as one call of a library: the words in them, and their numbers against transformers.

use super::*;

/// Ranks, fixture, layout, what stands in the program, and what does not.
type Row = (usize, &'static str, Layout, &'static [&'static str], &'static [&'static str]);

/// What the arithmetic of calls would be.
const ARITHMETIC: &[&str] =
    &["torch.exp(", "torch.rsqrt(", "torch.sigmoid(", ".amax(", "torch.dot(v[\"d_", "einsum"];

const ROWS: &[Row] = &[
    (
        1,
        "llama_gqa",
        ("one rank", |_| {}),
        &[
            "F.linear(",
            " = rms_norm(",
            " = rms_norm_grad(",
            " = attention(",
            " = attention_grad(",
            " = cross_entropy(",
            " = cross_entropy_grad(",
            "torch.ops.aten.silu_backward(",
            ", grad_input=d_l1_act)",
            "torch.stack(torch._foreach_norm([",
            "decay=0.01, spent=True)",
        ],
        ARITHMETIC,
    ),
    (
        1,
        "gpt2",
        ("one rank", |_| {}),
        &[
            " = layer_norm(",
            " = layer_norm_grad(",
            "torch.ops.aten.gelu_backward(",
            "F.linear(normed_2, c_attn_q.t(), c_attn_q_bias)",
        ],
        ARITHMETIC,
    ),
    (
        1,
        "gpt_neox",
        ("gelu by erf", |o| o.recompute = Recompute::Elementwise),
        &[" = F.gelu(", "torch.ops.aten.gelu_backward("],
        &["torch.erf(", "torch.exp("],
    ),
    (
        1,
        "qwen2",
        ("chunks", |o| o.loss_chunks = LossChunks::Of(2)),
        &["F.linear(normed_1, q_proj, q_proj_bias)", " = cross_entropy(", " = cross_entropy_grad("],
        ARITHMETIC,
    ),
    // Ranks have a piece of the vocabulary each.
    (
        2,
        "llama_gqa",
        ("tp=2 sp", |o| {
            mesh(o, &[("tp", 2)]);
            o.sp = true;
        }),
        &[
            " = cross_entropy_grad(d_nll, v[\"exp\"], v[\"targets\"], over_tp.start(67), v[\"sum\"])",
        ],
        &["torch.sigmoid("],
    ),
    // Gradients are scattered at once, and weights are gathered before.
    (
        2,
        "llama_gqa",
        ("dp=2 zero=3", |o| {
            mesh(o, &[("dp_shard", 2)]);
            (o.zero, o.microbatch) = (3, 2);
        }),
        &[" = rms_norm_grad(", "torch.stack(torch._foreach_norm(["],
        ARITHMETIC,
    ),
    // Gradients are added where they are made.
    (
        2,
        "gpt2",
        ("pp=2 1f1b", |o| staged(o, &[("pp", 2)], "1f1b")),
        &["_acc\"].addmm_(", " = layer_norm_grad(", " = cross_entropy("],
        &["torch.sigmoid("],
    ),
    (
        1,
        "qwen3_moe",
        ("experts", |_| {}),
        &[" = grouped_dot(", " = grouped_dot_t(", " = grouped_outer("],
        &["torch.sigmoid("],
    ),
];

#[test]
fn calls_of_libraries() {
    let has = has_torch();
    for ranks in [1, 2] {
        let lab = Lab::new(&format!("torch-calls{ranks}"));
        let mut all: Vec<Case> = vec![];
        for (_, name, layout, words, not) in ROWS.iter().filter(|r| r.0 == ranks) {
            let o = Options { observe: false, ..with(layout) };
            let fx = Fixture::open(name);
            let model = fx.model(&o);
            let text = |p: &Program| String::from_utf8(p.files[0].bytes.clone()).expect("text");
            let own = text(&made(&compile(&model, &o).plan, name));
            for word in *words {
                assert!(own.contains(word), "{name} {}: no {word:?} in\n{own}", layout.0);
            }
            for word in *not {
                assert!(!own.contains(word), "{name} {}: {word:?} in\n{own}", layout.0);
            }
            // Numbers are those of a program that shows its gradients.
            let shown = compile(&model, &with(layout));
            let json = written(&lab.path(""), all.len(), &fx, &made(&shown.plan, name));
            let what = format!("{name} {}", layout.0);
            all.push(Case { what, fx, model, json, runtime: None });
        }
        if has {
            walk(ranks, &lab.path(""), &all);
            all.iter().for_each(Case::compare);
        }
    }
    if !has {
        skip(Tool::Torch, "numbers of what is a call in programs of torch");
    }
}
