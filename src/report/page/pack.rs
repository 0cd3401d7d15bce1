//! Bytes as a page carries them: deflated (RFC 1951), in base64 (RFC 4648). One block with the fixed codes of
//! the RFC: texts of programs become about a sixth, and every browser unpacks them by itself.

/// How far back a repetition may lie, and how long it is.
const WINDOW: usize = 1 << 15;
const SHORTEST: usize = 3;
const LONGEST: usize = 258;
/// Earlier places with the same hash that are tried.
const TRIED: usize = 48;
/// Bits of a hash of three bytes.
const HASH: u32 = 15;

/// RFC 1951, 3.2.5: the shortest length, or the smallest distance, of each code, and bits that follow it.
const LENGTHS: [(usize, u32); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (258, 0),
];
const DISTANCES: [(usize, u32); 30] = [
    (1, 0),
    (2, 0),
    (3, 0),
    (4, 0),
    (5, 1),
    (7, 1),
    (9, 2),
    (13, 2),
    (17, 3),
    (25, 3),
    (33, 4),
    (49, 4),
    (65, 5),
    (97, 5),
    (129, 6),
    (193, 6),
    (257, 7),
    (385, 7),
    (513, 8),
    (769, 8),
    (1025, 9),
    (1537, 9),
    (2049, 10),
    (3073, 10),
    (4097, 11),
    (6145, 11),
    (8193, 12),
    (12289, 12),
    (16385, 13),
    (24577, 13),
];

/// Deflated, then in base64.
pub fn packed(data: &[u8]) -> String {
    base64(&deflate(data))
}

/// Bits, the lowest of each byte first.
#[derive(Default)]
struct Bits {
    out: Vec<u8>,
    now: u32,
    used: u32,
}

impl Bits {
    fn put(&mut self, value: u32, bits: u32) {
        for i in 0..bits {
            self.now |= (value >> i & 1) << self.used;
            self.used += 1;
            if self.used == 8 {
                self.out.push(self.now as u8);
                (self.now, self.used) = (0, 0);
            }
        }
    }

    /// A code stands with its highest bit first.
    fn code(&mut self, value: u32, bits: u32) {
        self.put(value.reverse_bits() >> (32 - bits), bits);
    }

    /// A literal, the end (256), or a length by the fixed code.
    fn symbol(&mut self, n: u32) {
        match n {
            0..=143 => self.code(0x30 + n, 8),
            144..=255 => self.code(0x190 + n - 144, 9),
            256..=279 => self.code(n - 256, 7),
            _long => self.code(0xc0 + n - 280, 8),
        }
    }

    fn repeat(&mut self, length: usize, distance: usize) {
        let at = LENGTHS.iter().rposition(|l| l.0 <= length).unwrap_or(0);
        self.symbol(257 + at as u32);
        self.put((length - LENGTHS[at].0) as u32, LENGTHS[at].1);
        let at = DISTANCES.iter().rposition(|d| d.0 <= distance).unwrap_or(0);
        self.code(at as u32, 5);
        self.put((distance - DISTANCES[at].0) as u32, DISTANCES[at].1);
    }
}

/// One block with fixed codes; repetitions are found greedily.
pub fn deflate(data: &[u8]) -> Vec<u8> {
    let mut bits = Bits::default();
    // The last block; fixed codes.
    bits.put(0b011, 3);
    let hash = |i: usize| {
        let n = u32::from_le_bytes([data[i], data[i + 1], data[i + 2], 0]);
        (n.wrapping_mul(0x9e37_79b1) >> (32 - HASH)) as usize
    };
    let mut head = vec![usize::MAX; 1 << HASH];
    let mut before = vec![usize::MAX; data.len()];
    let mut i = 0;
    while i < data.len() {
        let (mut length, mut distance) = (0, 0);
        if i + SHORTEST <= data.len() {
            let most = LONGEST.min(data.len() - i);
            let mut at = head[hash(i)];
            for _ in 0..TRIED {
                if at == usize::MAX || i - at > WINDOW {
                    break;
                }
                let same = (0..most).take_while(|k| data[at + k] == data[i + k]).count();
                if same > length {
                    (length, distance) = (same, i - at);
                }
                if length == most {
                    break;
                }
                at = before[at];
            }
        }
        let step = if length >= SHORTEST { length } else { 1 };
        match step {
            1 => bits.symbol(u32::from(data[i])),
            _ => bits.repeat(length, distance),
        }
        let hashed = (i + step).min(data.len().saturating_sub(SHORTEST - 1));
        for (k, before) in before.iter_mut().enumerate().take(hashed).skip(i) {
            let h = hash(k);
            (*before, head[h]) = (head[h], k);
        }
        i += step;
    }
    bits.symbol(256);
    bits.put(0, 7);
    bits.out
}

/// RFC 4648, with padding.
pub fn base64(data: &[u8]) -> String {
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
