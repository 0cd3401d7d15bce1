//! Archives that `tests/imports/survey.py` makes, which are not kept, against PyTorch.

use super::{Expected, MESHES, ROWS, SEQ, compare_with, held};
use crate::fixture::{options, try_compile};
use shardc_frontends::Model;
use shardc_frontends::import::{Opened, Raise, Sizes};
use shardc_ir::diag::Exit;
use shardc_ir::func::{Fill, Value, inputs};
use shardc_ir::ops::Op;
use shardc_ir::plan::Mode;
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options};
use shardc_runtime::{Numbers, StepBatch};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Inputs of a step, as PyTorch had them.
fn batch(m: &Model, want: &Expected) -> StepBatch {
    let all = inputs(&m.module).into_iter();
    let given = |f| matches!(f, Fill::Tokens | Fill::Labels | Fill::Column | Fill::Mask);
    let filled = all.filter(|r| given(r.input.fill));
    let one = |r: shardc_ir::func::InputRow| {
        // What is called tokens may be those of a decoder.
        let name = match r.input.fill {
            Fill::Labels => "targets",
            Fill::Tokens if !want.0.contains_key("input_ids") => "decoder_input_ids",
            _ => &*r.name,
        };
        let all = want.get(name).iter();
        let numbers = match r.dtype {
            DType::I32 => Numbers::I32(all.map(|&x| x as i32).collect()),
            _float => Numbers::F32(all.map(|&x| x as f32).collect()),
        };
        (r.name.to_string(), numbers)
    };
    StepBatch { columns: filled.map(one).collect(), observe: true }
}

/// What becomes of an archive: a line for each mesh that is wrong.
fn look(path: &Path) -> Vec<String> {
    let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let opened = Opened::read(path).unwrap_or_else(|e| panic!("{e}"));
    let want = Expected::at(&path.with_extension("safetensors"), false);
    let tokens = want.0.contains_key("input_ids") || want.0.contains_key("decoder_input_ids");
    let seq = if tokens { SEQ } else { 1 };
    let mut wrong = vec![];
    for (mesh, sp, rows) in MESHES {
        if !tokens && (*sp || mesh.iter().any(|m| m.0 == "cp")) {
            continue;
        }
        let m = match opened.import(Sizes { rows: ROWS, seq }, Mode::Train, Raise::default()) {
            Ok(m) => m,
            Err(e) => {
                eprintln!("{name}: exit {:?}: {}", e.exit, e.message);
                let refused = e.exit == Exit::Unsupported;
                return if refused { vec![] } else { vec![format!("{name}: {e}")] };
            }
        };
        let model = held(&opened, m);
        let o = Options { seq, ..options(mesh, *sp, *rows) };
        let run = || compare_with(&name, &want, &model, &o, &batch(&model, &want));
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(()) => eprintln!("{name} {mesh:?}: as PyTorch"),
            Err(_) => wrong.push(format!("{name} {mesh:?}")),
        }
    }
    wrong
}

/// Of the survey, what is kept: an encoder with a decoder, biases of distances, padding, and two towers with one loss.
#[test]
fn attention_that_is_written_out_is_as_pytorch() {
    let kept = ["biased", "clip", "swin", "t5_padded", "t5_short", "two_biases"];
    let wrong: Vec<String> =
        kept.iter().flat_map(|n| look(&super::file(&format!("{n}.pt2")))).collect();
    assert!(wrong.is_empty(), "not as PyTorch: {wrong:#?}");
}

/// A T5 with padding, as attention that has a bias by offset: no value of its program is of all pairs of tokens.
#[test]
fn a_bias_by_offset_is_an_operand_of_attention() {
    let opened = Opened::read(&super::file("t5_padded.pt2")).unwrap_or_else(|e| panic!("{e}"));
    let sizes = Sizes { rows: ROWS, seq: SEQ };
    let m = opened.import(sizes, Mode::Train, Raise::default()).unwrap_or_else(|e| panic!("{e}"));
    let model = held(&opened, m);
    let biased = |op: &Op| matches!(op, Op::Attention(a) if a.bias);
    assert_eq!(super::count(&model, biased), 4, "of two layers and two");
    let f = &model.module.funcs[0];
    let of_pairs = |v: &Value| {
        let all = [[4, SEQ, SEQ], [SEQ, SEQ, 4]];
        f.ty(*v).sizes().windows(3).any(|w| all.iter().any(|x| x == w))
    };
    assert!(!f.nodes.iter().flat_map(|n| &n.outs).any(of_pairs));
    let want = Expected::at(&super::file("t5_padded.safetensors"), false);
    let more = |o: Options| Options { seq: SEQ, ..o };
    for o in [
        Options { zero: 3, ..options(&[("dp_shard", 2), ("tp", 2)], false, 4) },
        Options { recompute: Recompute::Full, ..options(&[("pp", 2), ("tp", 2)], false, 8) },
        Options { cp_mode: CpMode::Ulysses, ..options(&[("cp", 2), ("tp", 2)], false, 8) },
        Options { cp_split: Some(CpSplit::Zigzag), ..options(&[("cp", 2)], false, 8) },
        options(&[("cp", 3), ("dp_replicate", 2)], false, 4),
    ] {
        let o = more(o);
        compare_with("t5_padded", &want, &model, &o, &batch(&model, &want));
    }
    let ring = more(Options { cp_mode: CpMode::Ring, ..options(&[("cp", 2)], false, 8) });
    let refused = try_compile(&model, &ring).expect_err("a ring");
    assert_eq!(refused.code, "ring");
    assert!(refused.message.contains("a bias by offset is not trained"), "{refused}");
}

#[test]
#[ignore = "SHARDC_SURVEY is a folder of archives that tests/imports/survey.py made"]
fn survey() {
    let folder = std::env::var("SHARDC_SURVEY").expect("SHARDC_SURVEY: a folder of archives");
    let only = std::env::var("SHARDC_SURVEY_ONLY").unwrap_or_default();
    let all = std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok);
    let of = |p: &PathBuf| {
        let stem = p.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let named = only.is_empty() || only.split(',').any(|n| n == stem);
        p.extension().is_some_and(|e| e == "pt2") && named
    };
    let mut paths: Vec<PathBuf> = all.map(|e| e.path()).filter(of).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no archive");
    let wrong: Vec<String> = paths.iter().flat_map(|p| look(p)).collect();
    assert!(wrong.is_empty(), "not as PyTorch: {wrong:#?}");
}
