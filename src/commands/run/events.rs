//! The numbers of steps as TensorBoard reads them: a file of `tf.Event` messages (tensorflow/core/util/event.proto), each a
//! record of TFRecord: its length, what is in it, and a CRC-32C of both (Castagnoli et al., 1993, masked as in
//! tensorflow/core/lib/hash/crc32c.h).

use serde_json::Value as Json;

/// What a file begins with; behind steps that are done, which a run does again, they begin anew.
pub(super) fn begin(wall: f64, done: usize) -> Vec<u8> {
    let mut out = record(&event(wall, 0, &field(3, b"brain.Event:2")));
    if done > 0 {
        // SessionLog with the status START: what follows takes the place of later steps.
        out.extend(record(&event(wall, done + 1, &field(7, &[0x08, 0x01]))));
    }
    out
}

/// The numbers of an object of `--metrics` as scalars, each by its name.
pub(super) fn scalars(wall: f64, line: &Json) -> Vec<u8> {
    let step = line["step"].as_u64().unwrap_or(0) as usize;
    let mut values = vec![];
    let mut one = |name: &str, x: &Json| {
        if let Some(x) = x.as_f64() {
            let mut value = field(1, name.as_bytes());
            // simple_value, a float.
            value.push(2 << 3 | 5);
            value.extend((x as f32).to_le_bytes());
            values.extend(field(1, &value));
        }
    };
    for (name, x) in line.as_object().into_iter().flatten() {
        match x {
            Json::Object(all) => all.iter().for_each(|(k, x)| one(&format!("{name}/{k}"), x)),
            _ if name == "step" => {}
            x => one(name, x),
        }
    }
    record(&event(wall, step, &field(5, &values)))
}

/// An event of a time in seconds, and of a step.
fn event(wall: f64, step: usize, what: &[u8]) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1];
    out.extend(wall.to_le_bytes());
    out.push(2 << 3);
    varint(&mut out, step as u64);
    out.extend(what);
    out
}

/// A field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    varint(&mut out, bytes.len() as u64);
    out.extend(bytes);
    out
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u64).to_le_bytes();
    [&len[..], &masked(&len), bytes, &masked(bytes)].concat()
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1));
    !bytes.iter().fold(!0, |crc, &b| (0..8).fold(crc ^ u32::from(b), bit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// RFC 3720, B.4, and the check value of the CRC catalogue.
    #[test]
    fn sums_are_those_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    /// What TensorBoard's own writer makes of this event (tensorboard 2.21, `RecordWriter`).
    #[test]
    fn an_event_is_as_tensorboard_writes_it() {
        let line = json!({ "step": 300, "loss": 0.5, "lr": null });
        let hex: String = scalars(2.0, &line).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, EVENT);
    }

    const EVENT: &str =
        "1b000000000000001a0d9e1309000000000000004010ac022a0d0a0b0a046c6f7373150000003fdfc52b60";
}
