//! Weights of experts in blocks of MXFP4 (`tests/fixtures/mxfp4.safetensors`): read as transformers
//! reads them, by whoever asks for whichever part of them, and refused where they are none.

use super::hostile::{Folder, changed};
use super::save::save;
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use shardc_frontends::{Checkpoint, Saving, Shape, load};
use shardc_ir::diag::Result;
use shardc_ir::plan::Mode;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn stored(file: &Path) -> Stored {
    let bytes = std::fs::read(file).unwrap();
    let own =
        |(n, t): (String, TensorView)| (n, (t.dtype(), t.shape().to_vec(), t.data().to_vec()));
    SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(own).collect()
}

fn write(dir: &Folder, all: &Stored) {
    let view = |(d, s, b): &(Dtype, Vec<usize>, Vec<u8>)| {
        TensorView::new(*d, s.clone(), Box::leak(b.clone().into_boxed_slice())).unwrap()
    };
    let bytes = serialize(all.iter().map(|(n, t)| (n, view(t))), None).unwrap();
    dir.write("model.safetensors", bytes);
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn fixture() -> Stored {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut all = stored(&root.join("../tests/fixtures/mxfp4.safetensors"));
    all.insert("y".into(), all["x"].clone());
    all.remove("x");
    all
}

fn part(c: &Checkpoint, ranges: &[Range<usize>]) -> Result<Vec<f32>> {
    let mut out = vec![0.0; ranges.iter().map(Range::len).product()];
    c.read_ranges("x", ranges, &mut out).map(|()| out)
}

/// All codes with all scales, bit for bit; and any part is that part of the whole.
#[test]
fn numbers_are_those_of_transformers() {
    let (dir, all) = (Folder::new("mxfp4"), fixture());
    write(&dir, &all);
    let c = Checkpoint::open(&dir.0).unwrap().unwrap();
    let want = numbers(&all["y"].2);
    let got = part(&c, &[0..1, 0..32, 0..255]).unwrap();
    let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&want));
    for (rows, columns) in [(0..1, 0..255), (3..30, 100..130), (31..32, 254..255), (5..5, 0..9)] {
        let got = part(&c, &[0..1, rows.clone(), columns.clone()]).unwrap();
        let one = |r: usize| want[r * 255..][columns.clone()].to_vec();
        assert_eq!(bits(&got), bits(&rows.flat_map(one).collect::<Vec<_>>()));
    }
}

#[test]
fn what_are_no_blocks_is_refused() {
    let dir = Folder::new("mxfp4-wrong");
    let code = |change: &dyn Fn(&mut Stored)| {
        let mut all = fixture();
        change(&mut all);
        write(&dir, &all);
        let c = Checkpoint::open(&dir.0).and_then(|c| part(&c.unwrap(), &[0..1, 0..32, 0..255]));
        c.map_or_else(|d| (d.code, d.message), |_| ("", String::new()))
    };
    let nan = code(&|all| all.get_mut("x_scales").unwrap().2[7] = 255);
    assert_eq!(nan, ("weights", "block scale 255 (NaN) in x_scales".into()));
    assert_eq!(code(&|all| drop(all.remove("x_scales"))).0, "missing-tensor");
    for shape in [vec![255, 1, 16], vec![1, 255, 2, 8], vec![1, 255, 16, 1]] {
        assert_eq!(
            code(&|all| all.get_mut("x_blocks").unwrap().1 = shape.clone()).0,
            "tensor-shape"
        );
    }
    assert_eq!(code(&|all| all.get_mut("x_scales").unwrap().1 = vec![1, 51, 5]).0, "tensor-shape");
    assert_eq!(code(&|_| ()).0, "");
}

/// A folder as it is published: its experts are read by the config's sizes, and saved as they are
/// without blocks.
#[test]
fn a_folder_with_blocks() {
    let dir = Folder::new("mxfp4-folder");
    let keys = json!({"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"});
    let config = dir.write("config.json", changed("gpt_oss", &keys).to_string());
    let shape = Shape::new(1, 8, Mode::Train);
    let plain = load(&config, &shape).unwrap();
    assert!(plain.warnings.is_empty(), "{:?}", plain.warnings);
    let mut all = Stored::new();
    for (i, w) in plain.weights.iter().enumerate() {
        let noise =
            |n: usize| (0..n).map(|k| (k * k + 31 * k + 7 * i) as u8 % 251).collect::<Vec<_>>();
        match &w.tensor_shape[..] {
            &[e, width, out] => {
                let blocks = vec![e, out, width / 32, 16];
                let packed =
                    |shape: Vec<usize>| (Dtype::U8, shape.clone(), noise(shape.iter().product()));
                all.insert(format!("{}_scales", w.tensor), packed(blocks[..3].to_vec()));
                all.insert(format!("{}_blocks", w.tensor), packed(blocks));
            }
            _plain => {
                let n: usize = w.tensor_shape.iter().product();
                all.insert(w.tensor.clone(), (Dtype::BF16, w.tensor_shape.clone(), vec![0; 2 * n]));
            }
        }
    }
    write(&dir, &all);
    let model = load(&dir.0, &shape).unwrap_or_else(|d| panic!("{d}"));
    assert!(model.warnings.is_empty() && model.config.get("quantization_config").is_none());
    let c = model.checkpoint.as_ref().unwrap();
    let values = |w: &shardc_ir::weights::Weight| {
        let whole: Vec<_> = w.shape.iter().map(|&n| 0..n).collect();
        let mut out = vec![0.0; w.shape.iter().product()];
        c.read(w, &whole, &mut out).map(|()| out)
    };
    // Gate and up have every second column of the tensor.
    let named = |end: &str| model.weights.iter().find(|w| w.param.ends_with(end)).unwrap();
    let (gate, up) =
        (named("0.mlp.experts.gate_up_proj.gate"), named("0.mlp.experts.gate_up_proj.up"));
    let mut fused = vec![0.0; 2 * 64 * 64];
    c.read_ranges(&gate.tensor, &[0..2, 0..64, 0..64], &mut fused).unwrap();
    let apart = |i: usize| fused.iter().skip(i).step_by(2).copied().collect::<Vec<_>>();
    assert_eq!((values(gate).unwrap(), values(up).unwrap()), (apart(0), apart(1)));
    // So have parts of them.
    let mut some = vec![0.0; 5 * 3];
    c.read(up, &[1..2, 30..35, 7..10], &mut some).unwrap();
    let all = values(up).unwrap();
    let want: Vec<f32> = (30..35).flat_map(|r| all[(64 + r) * 32 + 7..][..3].to_vec()).collect();
    assert_eq!(some, want);

    let to = dir.0.join("saved");
    let how = Saving { base: shardc_frontends::Base::open(&dir.0).unwrap(), ..Saving::default() };
    save(&to, &model.config, &model.weights, &how, values).unwrap();
    let saved = stored(&to.join("model.safetensors"));
    let (dtype, shape, bytes) = &saved[&gate.tensor];
    assert_eq!((*dtype, &shape[..]), (Dtype::BF16, &[2, 64, 64][..]));
    let narrow = |x: &f32| half::bf16::from_f32(*x).to_le_bytes();
    assert_eq!(*bytes, fused.iter().flat_map(narrow).collect::<Vec<_>>());
    assert!(!saved.keys().any(|n| n.ends_with("_blocks") || n.ends_with("_scales")));

    // Sizes that are no whole blocks are not those of the file.
    let mut keys = keys;
    keys["hidden_size"] = 48.into();
    dir.write("config.json", changed("gpt_oss", &keys).to_string());
    assert_eq!(load(&dir.0, &Shape::new(1, 8, Mode::Train)).unwrap_err().code, "tensor-shape");
}
