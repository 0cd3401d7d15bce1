//! Files that people give in the place of a model, and the road from each to one.

use shardc_ir::diag::Diag;
use std::path::Path;

/// A kind of file that is not read as a model.
struct Foreign {
    /// Ends of its name, or its whole name.
    names: &'static [&'static str],
    what: &'static str,
    roads: &'static [&'static str],
}

/// What makes an archive of a module.
const EXPORT: &str = "export the module in Python: torch.export.save(torch.export.export(module, \
                      inputs), \"model.pt2\"); then shardc compile model.pt2";

/// The first row of which a folder has a file says the most of it.
const FOREIGN: [Foreign; 11] = [
    Foreign {
        names: &["adapter_config.json"],
        what: "an adapter of PEFT, which changes a model that lies elsewhere",
        roads: &[
            "join both in Python: PeftModel.from_pretrained(base, \"DIR\").merge_and_unload()\
             .save_pretrained(\"OUT\"); then shardc compile OUT",
            "for sizes alone: give the folder that `base_model_name_or_path` names",
        ],
    },
    Foreign {
        names: &["model_index.json"],
        what: "the list of a diffusers pipeline, which is several models",
        roads: &["export the one that is meant, such as pipeline.transformer", EXPORT],
    },
    Foreign {
        names: &["params.json"],
        what: "sizes in the format of Meta's or Mistral's own code",
        roads: &["give the folder in Hugging Face's format, which has config.json and \
                  model.safetensors; most are published in both"],
    },
    Foreign {
        names: &[".gguf"],
        what: "weights of llama.cpp, mostly quantized",
        roads: &[
            "give the folder that it was made from, which has config.json",
            "or write one in Python: AutoModelForCausalLM.from_pretrained(\"DIR\", \
             gguf_file=\"FILE.gguf\").save_pretrained(\"OUT\"); then shardc compile OUT",
        ],
    },
    Foreign {
        names: &[".onnx"],
        what: "a graph of ONNX",
        roads: &["ONNX is not read: go back to the module that it was made from", EXPORT],
    },
    Foreign {
        names: &[".mlir", ".mlirbc", ".stablehlo"],
        what: "a program of MLIR",
        roads: &[EXPORT, "or write it as a text, MODEL.ir: docs/ops.md has its ops"],
    },
    Foreign {
        names: &[".h5", ".msgpack", ".tflite", ".pb"],
        what: "a model of TensorFlow or JAX",
        roads: &["give a folder of its PyTorch version, which has config.json", EXPORT],
    },
    Foreign {
        names: &[".pt", ".pth", ".bin", ".ckpt"],
        what: "tensors of torch.save, without the model that they are of",
        roads: &[
            "of a Hugging Face model: give its folder, which has config.json; weights are read \
             from safetensors files, which its save_pretrained(\"DIR\") writes",
            EXPORT,
            "if torch.export.save wrote it, call it model.pt2",
        ],
    },
    Foreign {
        names: &[".safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"],
        what: "weights, without the model that they are of",
        roads: &[
            "give the folder that holds them and config.json, such as examples/tiny-llama",
            "to a plan they are given when it runs: shardc run PLAN --weights DIR",
        ],
    },
    Foreign { names: &[".py", ".ipynb"], what: "Python, which is not run", roads: &[EXPORT] },
    Foreign {
        names: &["tokenizer.json", "tokenizer_config.json", "generation_config.json"],
        what: "what lies beside one",
        roads: &["give its folder, which has config.json"],
    },
];

/// The row of what is not read as a model, by its name.
fn row(name: &str) -> Option<usize> {
    let name = name.to_ascii_lowercase();
    let whole = FOREIGN.iter().position(|f| f.names.contains(&&*name));
    whole.or_else(|| FOREIGN.iter().position(|f| f.names.iter().any(|n| name.ends_with(n))))
}

fn row_of(file: &Path) -> Option<usize> {
    file.file_name()?.to_str().and_then(row).filter(|_| file.is_file())
}

/// What to say of this file in the place of a model; nothing if its name is not that of another kind.
pub(crate) fn refused(file: &Path) -> Option<Diag> {
    let kind = &FOREIGN[row_of(file)?];
    let d = Diag::new("not-a-model", format!("not a model, but {}", kind.what));
    Some(kind.roads.iter().fold(d.at(file.display().to_string()), |d, road| d.help(*road)))
}

/// Says of a folder without config.json what it has instead, and the road from there.
pub(crate) fn in_folder(dir: &Path, d: Diag) -> Diag {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let best = files.filter_map(|f| Some((row_of(&f)?, f))).min();
    let Some((row, file)) = best else { return d };
    let kind = &FOREIGN[row];
    let d = d.why(format!("{} is there: {}", file.display(), kind.what));
    kind.roads.iter().fold(d, |d, road| d.help(*road))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A whole name comes before an end, and no end is that of what is read.
    #[test]
    fn names_are_known() {
        let what = |n: &str| row(n).map_or("", |i| FOREIGN[i].what);
        assert!(what("model.safetensors.index.json").starts_with("weights, without"));
        assert!(what("MODEL.GGUF").contains("llama.cpp"));
        for read in ["config.json", "model.pt2", "model.ir", "shardc.toml", "gguf", "sizes.json"] {
            assert_eq!(what(read), "", "{read}");
        }
    }
}
