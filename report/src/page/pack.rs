//! Bytes as a page carries them: deflated (RFC 1951), which every browser unpacks by itself, in base64 (RFC 4648).

use miniz_oxide::deflate::compress_to_vec;

/// How hard repetitions are looked for, of 10.
const LEVEL: u8 = 6;

/// Deflated, then in base64.
pub fn packed(data: &[u8]) -> String {
    base64(&compress_to_vec(data, LEVEL))
}

/// RFC 4648, with padding.
fn base64(data: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(data.len() / 3 * 4 + 4);
    for part in data.chunks(3) {
        let byte = |i: usize| u32::from(part.get(i).copied().unwrap_or(0));
        let n = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = DIGITS[(n >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= part.len() { char::from(digit) } else { '=' });
        }
    }
    out
}
