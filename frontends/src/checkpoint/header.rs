//! The header of one safetensors file, read with bounds and without its data.

use super::dtype_error;
use safetensors::{Dtype, tensor::Metadata};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

/// Longest header that is read, in bytes: that of the format.
const MAX_HEADER: u64 = 100_000_000;

pub(crate) struct Header {
    pub tensors: BTreeMap<String, Info>,
}

pub(crate) struct Info {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the file, inside it.
    pub bytes: Range<u64>,
}

impl Header {
    /// Errors: `file`; `truncated` for a file shorter than it says; `safetensors` for a header that
    /// is none, or whose offsets overlap, leave gaps or disagree with a shape; `tensor-dtype`.
    pub fn read(path: &Path) -> Result<Header> {
        let place = path.display().to_string();
        let wrong = |code, what: String, help: &str| Diag::new(code, what).at(&place).help(help);
        let again = "download or write the file again";
        let (mut file, len) = files::open(path)?;
        let fail = |e: std::io::Error| files::io_error("cannot read the header", path, &e);
        let mut size = [0; 8];
        if len < 8 {
            return Err(wrong("truncated", format!("{len} bytes hold no header"), again));
        }
        file.read_exact(&mut size).map_err(fail)?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER {
            let what = format!("the header says it has {size} bytes, more than {MAX_HEADER}");
            return Err(wrong("safetensors", what, "check that this is a safetensors file"));
        }
        let start = 8 + size;
        if start > len {
            let what = format!("the header says it has {size} bytes, the file has {len}");
            return Err(wrong("truncated", what, again));
        }
        let mut text = vec![0; size as usize];
        file.read_exact(&mut text).map_err(fail)?;
        let meta: Metadata = serde_json::from_slice(&text).map_err(|e| {
            // The crate's element types are an enum: one it lacks is an unknown variant.
            let e = e.to_string();
            match e.strip_prefix("unknown variant ").and_then(|e| e.split(", expected").next()) {
                Some(t) => dtype_error(format!("a tensor has elements of type {t}")).at(&place),
                None => wrong("safetensors", format!("the header is wrong: {e}"), again),
            }
        })?;
        let data = meta.data_len() as u64;
        if start.checked_add(data) != Some(len) {
            let (code, word) =
                if data > len - start { ("truncated", "fewer") } else { ("safetensors", "more") };
            let what =
                format!("the tensors need {data} bytes, the file has {word}: {}", len - start);
            return Err(wrong(code, what, again));
        }
        let info = |(name, t): (String, &safetensors::tensor::TensorInfo)| {
            let bytes = start + t.data_offsets.0 as u64..start + t.data_offsets.1 as u64;
            (name, Info { dtype: t.dtype, shape: t.shape.clone(), bytes })
        };
        Ok(Header { tensors: meta.tensors().into_iter().map(info).collect() })
    }
}

/// The format's name of an element type.
pub(super) fn name(d: Dtype) -> String {
    format!("{d:?}")
}
