//! Whether bytes are code of a device as far as its driver reads them before it runs anything: the driver is
//! given an address and no length.

/// Bytes of the header of an ELF file of 64 bits, of a row of its table of sections, and of segments.
const HEADER: usize = 64;
const SECTION: usize = 64;
const SEGMENT: usize = 56;
/// Of NVIDIA's devices (`EM_CUDA`), and where the header has it.
pub const MACHINE: u16 = 190;
/// A section that takes no bytes of the file.
const NOBITS: u32 = 8;

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(len)?)?;
    Some(part.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
}

/// Checks that bytes are an ELF file of a device whose tables and parts all lie inside them.
///
/// # Errors
/// What is wrong, in words.
pub fn check(code: &[u8]) -> Result<(), String> {
    let whole = || "it is cut short".to_string();
    let get = |at, len| number(code, at, len).ok_or_else(whole);
    if !code.starts_with(b"\x7fELF") || get(4, 1)? != 2 || get(5, 1)? != 1 {
        return Err("it is not an ELF file of 64 bits".into());
    }
    if get(18, 2)? != u64::from(MACHINE) {
        return Err(format!("its processor is {}, not a CUDA device", get(18, 2)?));
    }
    let inside =
        |from: u64, len: u64| from.checked_add(len).is_some_and(|end| end <= code.len() as u64);
    if code.len() < HEADER {
        return Err(whole());
    }
    // Where each table begins, how long its rows are and how many there are; where a row has the
    // place and the length of its part.
    let sections = (get(40, 8)?, get(58, 2)?, get(60, 2)?, SECTION, [24, 32]);
    let segments = (get(32, 8)?, get(54, 2)?, get(56, 2)?, SEGMENT, [8, 32]);
    for (start, row, count, least, [place, length]) in [sections, segments] {
        if count == 0 {
            continue;
        }
        if row < least as u64 || !inside(start, row * count) {
            return Err(whole());
        }
        for i in 0..count {
            let at = (start + i * row) as usize;
            let empty = least == SECTION && get(at + 4, 4)? == u64::from(NOBITS);
            if !empty && !inside(get(at + place, 8)?, get(at + length, 8)?) {
                return Err(whole());
            }
        }
    }
    if get(60, 2)? == 0 {
        return Err("it has no sections".into());
    }
    Ok(())
}

/// The least that passes, with some bytes in its one section.
#[cfg(test)]
pub(crate) fn least(data: &[u8]) -> Vec<u8> {
    let mut all = vec![0; HEADER];
    all[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    all[18..20].copy_from_slice(&MACHINE.to_le_bytes());
    all[40..48].copy_from_slice(&((HEADER + data.len()) as u64).to_le_bytes());
    all[58] = SECTION as u8;
    all[60] = 1;
    all.extend_from_slice(data);
    let mut row = [0; SECTION];
    row[4] = 1;
    row[24..32].copy_from_slice(&(HEADER as u64).to_le_bytes());
    row[32..40].copy_from_slice(&(data.len() as u64).to_le_bytes());
    all.extend_from_slice(&row);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_read_beyond_its_end_is_refused() {
        let good = least(b"sixteen bytes ..");
        check(&good).expect("an ELF file");
        for len in 0..good.len() {
            assert!(check(&good[..len]).is_err(), "{len} of {} bytes", good.len());
        }
        let with = |at: usize, bytes: &[u8]| {
            let mut c = good.clone();
            c[at..at + bytes.len()].copy_from_slice(bytes);
            check(&c)
        };
        let far = u64::MAX.to_le_bytes();
        let row = HEADER + 16;
        for (what, refused) in [
            ("another processor", with(18, &62u16.to_le_bytes())),
            ("of 32 bits", with(4, &[1])),
            ("sections far away", with(40, &far)),
            ("rows that are too short", with(58, &[8])),
            ("no sections", with(60, &[0])),
            ("many sections", with(60, &[255, 255])),
            ("a section far away", with(row + 24, &far)),
            ("a long section", with(row + 32, &17u64.to_le_bytes().map(|b| b | 0x40))),
            ("segments beyond the end", with(56, &[1])),
        ] {
            assert!(refused.is_err(), "{what}");
        }
        // It takes no bytes of the file, however long it says it is.
        let mut empty = good.clone();
        empty[row + 4] = NOBITS as u8;
        empty[row + 32..row + 40].copy_from_slice(&far);
        check(&empty).expect("an ELF file");
    }
}
