//! Headers of .npy files (NumPy's format 1.0 to 3.0).

use shardc_ir::diag::{Diag, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Longest header of an .npy file that is read.
const MOST_HEADER: usize = 1 << 16;

/// What a header says.
pub struct Npy {
    /// Where the numbers begin.
    pub start: u64,
    /// The type of the elements, as NumPy writes it: `<f4`.
    pub descr: String,
    /// The sizes, of an array in the order of C; else none.
    pub shape: Option<Vec<u64>>,
    /// The header itself, for messages.
    pub text: String,
}

/// Reads the header of a file that was just opened; `wrong` makes a message.
///
/// # Errors
/// Those of `wrong`: no .npy file, or one that ends in its header, or has too long a one.
pub fn header(file: &mut File, wrong: impl Fn(String) -> Diag) -> Result<Npy> {
    let fail = |e: std::io::Error| wrong(format!("its header ends early: {e}"));
    let mut head = [0; 10];
    file.read_exact(&mut head).map_err(fail)?;
    if head[..6] != *b"\x93NUMPY" || !(1..=3).contains(&head[6]) {
        return Err(wrong("it is not a .npy file of version 1, 2 or 3".into()));
    }
    let mut len = usize::from(u16::from_le_bytes([head[8], head[9]]));
    let mut start = 10;
    if head[6] > 1 {
        let mut rest = [0; 2];
        file.read_exact(&mut rest).map_err(fail)?;
        len = u32::from_le_bytes([head[8], head[9], rest[0], rest[1]]) as usize;
        start = 12;
    }
    if len > MOST_HEADER {
        return Err(wrong(format!("its header has {len} B, more than {MOST_HEADER}")));
    }
    let mut text = vec![0; len];
    file.seek(SeekFrom::Start(start)).map_err(fail)?;
    file.read_exact(&mut text).map_err(fail)?;
    let text = String::from_utf8_lossy(&text).trim().to_string();
    let after = |key: &str| text.split_once(key).map(|t| t.1.trim_start_matches([' ', ':']));
    let descr = after("'descr'").and_then(|t| t.trim_start_matches('\'').split('\'').next());
    let descr = descr.unwrap_or_default().to_string();
    let sizes = after("'shape'").and_then(|t| t.strip_prefix('(')?.split(')').next());
    let of_c = after("'fortran_order'").is_some_and(|t| t.starts_with("False"));
    let shape: Option<Vec<u64>> = sizes.filter(|_| of_c).and_then(|s| {
        s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| s.parse().ok()).collect()
    });
    Ok(Npy { start: start + len as u64, descr, shape, text })
}
