//! Archives of `torch.export`, whose program is changed: a member of a zip file as JSON, and the file anew.

use super::mutate::{Draw, NUMBERS, bytes};
use serde_json::Value;

/// Sizes that are many and fit a number, beside those that programs trip over.
const MANY: [&str; 4] = ["3037000500", "100000000", "281474976710656", "-9223372036854775808"];
/// Other values than numbers.
const OTHERS: [&str; 5] = ["null", "true", "\"\"", "[]", "{}"];

/// Members of a zip file of stored ones, in order.
fn members(zip: &[u8]) -> Vec<(String, Vec<u8>)> {
    let number = |at: usize, n: usize| {
        zip[at..at + n].iter().rev().fold(0usize, |x, b| x << 8 | usize::from(*b))
    };
    let end = (0..zip.len() - 21).rev().find(|&i| zip[i..].starts_with(b"PK\x05\x06"));
    let end = end.expect("the end of a zip file");
    let (count, mut at) = (number(end + 10, 2), number(end + 16, 4));
    let mut out = vec![];
    for _ in 0..count {
        let (len, name, local) = (number(at + 24, 4), number(at + 28, 2), number(at + 42, 4));
        let text = String::from_utf8(zip[at + 46..at + 46 + name].to_vec()).expect("a name");
        let from = local + 30 + number(local + 26, 2) + number(local + 28, 2);
        out.push((text, zip[from..from + len].to_vec()));
        at += 46 + name + number(at + 30, 2) + number(at + 32, 2);
    }
    out
}

/// A zip file of these members, as they are. Nobody reads their sums.
fn zip(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut directory) = (vec![], vec![]);
    for (name, data) in members {
        let at = out.len() as u32;
        let len = (data.len() as u32).to_le_bytes();
        // Version, flags, method, time, date and sum: all 0.
        let both = [&[0; 14][..], &len, &len, &(name.len() as u16).to_le_bytes(), &[0; 2]].concat();
        out.extend([&b"PK\x03\x04"[..], &both, name.as_bytes(), data].concat());
        let own = [&b"PK\x01\x02\0\0"[..], &both, &[0; 10], &at.to_le_bytes()].concat();
        directory.extend([&own[..], name.as_bytes()].concat());
    }
    let count = (members.len() as u16).to_le_bytes();
    let [size, at] = [directory.len(), out.len()].map(|n| (n as u32).to_le_bytes());
    out.extend(directory);
    out.extend([&b"PK\x05\x06\0\0\0\0"[..], &count, &count, &size, &at, &[0; 2]].concat());
    out
}

/// The archive with one to four changes of its program.
pub fn program(own: &[u8], draw: &mut Draw) -> Vec<u8> {
    let mut all = members(own);
    let is_model = |m: &&mut (String, Vec<u8>)| m.0.ends_with("models/model.json");
    let model = all.iter_mut().find(is_model).expect("a program");
    model.1 = match draw.below(8) {
        0 => bytes(&model.1, draw),
        _ => {
            let mut json = serde_json::from_slice(&model.1).expect("a program is JSON");
            (0..=draw.below(4)).for_each(|_| change(&mut json, draw));
            serde_json::to_vec(&json).expect("JSON")
        }
    };
    zip(&all)
}

/// The archive with another text for one of its program.
pub fn replaced(own: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut all = members(own);
    let model = all.iter_mut().find(|m| m.0.ends_with("models/model.json")).expect("a program");
    let text = String::from_utf8(std::mem::take(&mut model.1)).expect("JSON is text");
    assert!(text.contains(from), "no {from} in the program");
    model.1 = text.replace(from, to).into_bytes();
    zip(&all)
}

/// Paths of all values but of metadata, which nobody reads; of numbers alone if asked for.
fn places(v: &Value, numbers: bool, path: &str, out: &mut Vec<String>) {
    if !numbers || v.is_number() {
        out.push(path.to_string());
    }
    match v {
        Value::Array(all) => {
            all.iter()
                .enumerate()
                .for_each(|(i, v)| places(v, numbers, &format!("{path}/{i}"), out));
        }
        Value::Object(all) => {
            for (key, v) in all.iter().filter(|x| x.0 != "metadata") {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(v, numbers, &format!("{path}/{key}"), out);
            }
        }
        _leaf => {}
    }
}

/// One change: another number, a value that is gone, twice there, another one's, or of another kind.
fn change(json: &mut Value, draw: &mut Draw) {
    let how = draw.below(8);
    let mut all = vec![];
    places(json, how < 4, "", &mut all);
    let at = |draw: &mut Draw| all.get(draw.below(all.len())).cloned().unwrap_or_default();
    let (path, other) = (at(draw), at(draw));
    let word = |words: &[&str], draw: &mut Draw| {
        let word = words[draw.below(words.len())];
        serde_json::from_str(word).unwrap_or_else(|_| word.into())
    };
    let value = match how {
        0..4 => word(&[&NUMBERS[..], &MANY].concat(), draw),
        4 => word(&OTHERS, draw),
        5 => json.pointer(&other).cloned().unwrap_or_default(),
        _ => {
            let (list, key) = path.rsplit_once('/').unwrap_or_default();
            match json.pointer_mut(list) {
                Some(Value::Array(v)) if how == 6 => drop(v.remove(key.parse().unwrap_or(0))),
                Some(Value::Array(v)) => v.push(v[0].clone()),
                Some(Value::Object(v)) => drop(v.remove(key)),
                _none => {}
            }
            return;
        }
    };
    if let Some(v) = json.pointer_mut(&path) {
        *v = value;
    }
}

#[test]
fn an_archive_is_written_as_it_was_read() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imports/toy.pt2");
    let own = members(&std::fs::read(path).expect("an archive"));
    assert!(own.len() > 3 && own.iter().any(|m| m.0.ends_with("models/model.json")));
    assert_eq!(members(&zip(&own)), own);
}
