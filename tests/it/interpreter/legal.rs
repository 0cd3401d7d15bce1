//! Unusual models that are legal compile to the numbers of one rank; what cannot be meant is refused.

use super::programs::{Program, ROWS, SEQ, VOCAB, base, build, close, parameters, step};
use crate::fixture::{Fixture, try_compile};
use shardc_ir::source::Source;
use shardc_ir::text::print_source;
use shardc_passes::options::Options;
use std::path::PathBuf;

/// A fixture's config with other values, read as a model of this file's sizes.
fn changed(
    fixture: &str,
    name: &str,
    change: &[(&str, &str)],
) -> Result<Program, shardc_ir::diag::Diag> {
    let text = std::fs::read(Fixture::open(fixture).dir.join("config.json")).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    for (key, value) in change {
        config[*key] = serde_json::from_str(value).expect("JSON");
    }
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join("config.json"), config.to_string()).expect("a file");
    let m = shardc_frontends::load(&dir, &shardc::shape(&base(&[], 1)))?;
    let params = m.weights.iter().map(|w| w.param.clone()).collect();
    let (module, weights, sequence) = (m.module, m.weights, m.sequence);
    let (vocab, updates) = (m.facts.vocab, String::new());
    let source = Source { module, weights, sequence, vocab, updates };
    Ok(Program { text: print_source(&source), params })
}

/// Compares layouts with one rank.
fn as_one_rank(p: &Program, all: &[Options]) {
    let one = base(&[], 1);
    let made = build(p, &one).unwrap_or_else(|e| panic!("{e}"));
    let values = parameters(p, 1);
    let (loss, grads) = step(p, &made, &values, ROWS);
    for o in all {
        let c = build(p, o).unwrap_or_else(|e| panic!("{:?}: {e}", o.mesh));
        let (l, g) = step(p, &c, &values, ROWS);
        close(&format!("{:?}: loss", o.mesh), &[l], &[loss], 1e-10, p);
        for (got, want) in g.iter().zip(&grads) {
            close(&format!("{:?}: a gradient", o.mesh), got, want, 1e-9, p);
        }
    }
}

/// Of more tokens than the vocabulary has, the factor of the last softcap moves to the head's weight:
/// the head is cut as it would be without it.
#[test]
fn a_softcap_on_an_untied_head() {
    let vocab = VOCAB.to_string();
    let change = [("vocab_size", &*vocab), ("tie_word_embeddings", "false")];
    let p = changed("gemma2", "untied", &change).unwrap_or_else(|e| panic!("{e}"));
    const { assert!(ROWS * SEQ > VOCAB) };
    as_one_rank(&p, &[base(&[("tp", 2)], 1), base(&[("dp_replicate", 2), ("tp", 2)], 1)]);
}

/// Kernels have numbers in f32.
#[test]
fn numbers_of_a_config_are_those_of_f32() {
    for key in ["attn_logit_softcapping", "final_logit_softcapping", "rms_norm_eps"] {
        for value in ["1e39", "1e-39", "1e-300"] {
            let refused = changed("gemma2", "numbers", &[(key, value)]).map(|_| ());
            let d = refused.expect_err("no f32");
            assert!(d.code == "config" && d.message.contains(key), "{key}={value}: {d}");
            assert!(d.help.join(" ").contains("f32"), "{d}");
        }
    }
    assert!(changed("gemma2", "numbers", &[("final_logit_softcapping", "1e6")]).is_ok());
}

/// What only chooses has no gradient, so nothing is left to train.
#[test]
fn nothing_to_train() {
    let fx = Fixture::open("deepseek_v3");
    for (pp, rate) in [(1, 0.0), (2, 0.0), (1, 1e-3)] {
        let mut o = crate::fixture::options(&[("pp", pp)], false, 4);
        o.freeze = vec!["*.weight".into()];
        o.balance.rate = rate;
        let d = try_compile(&fx.model(&o), &o).map(|_| ()).expect_err("all weights are frozen");
        assert!(d.code == "no-loss" && d.help.join(" ").contains("freeze fewer"), "{d}");
    }
}

const TOWERS: &str = r#"
func @model(
  %e: f32[10,6] param "e.weight",
  %w: f32[6,6] param "w.weight",
  %input_ids: i32[4,4] input "input_ids",
  %targets: i32[4,4] input "targets",
) -> (f32[] sum "loss", f32[] sum "reg:load") {
 a.0:
  %a0 = take[vh,bs->bsh] %e, %input_ids : f32[4,4,6]
  %a1 = dot[bsh,oh->bso] %a0, %w : f32[4,4,6]
 m.1:
  %a2 = tanh %a1 : f32[4,4,6]
  %a3 = dot[bsh,oh->bso] %a2, %w : f32[4,4,6]
 m.3:
  %a4 = dot[bsh,oh->bso] %a3, %w : f32[4,4,6]
 b.0:
  %b0 = take[vh,bs->bsh] %e, %targets : f32[4,4,6]
  %b1 = dot[bsh,oh->bso] %b0, %w : f32[4,4,6]
 m.1:
  %b2 = tanh %b1 : f32[4,4,6]
  %b3 = dot[bsh,oh->bso] %b2, %w : f32[4,4,6]
 m.4:
  %b4 = dot[bsh,oh->bso] %b3, %w : f32[4,4,6]
 top:
  %s = mul %a4, %b4 : f32[4,4,6]
  %x = dot[bsh,vh->bsv] %s, %e : f32[4,4,10]
  %own = take[bsv,bs->bs] %x, %targets : f32[4,4]
  %loss = reduce_sum[bs->] %own : f32[]
  %reg = dot[oh,oh->] %w, %w : f32[]
  return %loss, %reg
}
"#;

/// Both towers use the weights in both stages, by turns.
#[test]
fn towers_that_share_weights() {
    let params = vec!["e.weight".into(), "w.weight".into()];
    let p = Program { text: TOWERS.into(), params };
    let zero = Options { zero: 2, ..base(&[("pp", 2), ("dp_shard", 2)], 1) };
    as_one_rank(&p, &[base(&[("pp", 2)], 1), base(&[("pp", 2), ("tp", 2)], 1), zero]);
}

/// A model's results are sums, loads and outputs, each as it can be used.
#[test]
fn results_that_mean_nothing_are_refused() {
    let params = vec!["e.weight".into(), "w.weight".into()];
    let with = |result: &str, value: &str| {
        let text = TOWERS.replace("f32[] sum \"reg:load\"", result);
        let text = format!("state exp_avg: f32 of param = 0\n\n{text}");
        Program { text: text.replace("return %loss, %reg", value), params: params.clone() }
    };
    let cases = [
        ("f32[6,6] grad \"w.weight\"", "return %loss, %w"),
        ("f32[] state[exp_avg] \"w.weight\"", "return %loss, %reg"),
        ("f32[] grad_from[1] \"w.weight\"", "return %loss, %reg"),
        ("f32[] metric \"loss\"", "return %loss, %reg"),
        ("f32[4,4,6] sum \"reg\"", "return %loss, %s"),
        ("f32[] tokens_per_expert \"w.weight\"", "return %loss, %reg"),
        ("f32[] tokens_per_expert \"nobody\"", "return %loss, %reg"),
    ];
    for (result, value) in cases {
        for mesh in [&[][..], &[("pp", 2)]] {
            let d = build(&with(result, value), &base(mesh, 1)).map(|_| ()).expect_err(result);
            assert_eq!(d.code, "source", "{result}: {d}");
        }
    }
    // A bias that a load corrects only chooses.
    let text = TOWERS
        .replace("  %input_ids:", "  %bias: f32[6] param \"bias\",\n  %input_ids:")
        .replace("mul %a4, %b4", "mul[bsh,h->bsh] %a4, %bias")
        .replace("f32[] sum \"reg:load\"", "f32[6] tokens_per_expert \"bias\"")
        .replace("%reg = dot[oh,oh->] %w, %w : f32[]", "%reg = reduce_sum[oh->o] %w : f32[6]");
    let p = Program { text, params: vec![] };
    let d = build(&p, &base(&[], 1)).map(|_| ()).expect_err("a trained bias");
    assert!(d.code == "source" && d.message.contains("has a gradient too"), "{d}");
}

/// A loss that an earlier stage makes would not reach the step's.
#[test]
fn losses_of_earlier_stages_are_refused() {
    let reg = "  %reg = dot[oh,oh->] %w, %w : f32[]\n";
    let text = TOWERS.replace(reg, "").replacen(" m.3:\n", &format!("{reg} m.3:\n"), 1);
    let p = Program { text, params: vec![] };
    assert!(build(&p, &base(&[], 1)).is_ok());
    let d = build(&p, &base(&[("pp", 2)], 1)).map(|_| ()).expect_err("a loss of stage 0");
    assert!(d.code == "stage-order" && d.message.contains("reg:load"), "{d}");
}
