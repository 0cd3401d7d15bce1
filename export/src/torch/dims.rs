//! Pieces of Python for dims and numbers.

use shardc_ir::rule::{Dims, Group, Rule};

/// A number as Python reads it back.
pub(super) fn number(x: f64) -> String {
    match x {
        x if x.is_nan() => "math.nan".into(),
        x if x.is_infinite() => (if x > 0.0 { "math.inf" } else { "-math.inf" }).into(),
        x => format!("{x:?}"),
    }
}

/// A string of Python.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text")
}

/// The dim of `all` whose letters neither of the others has.
pub(super) fn lone(all: &[Group], others: [&Dims; 2]) -> usize {
    let own = |g: &Group| others.iter().all(|o| !o.contains(g));
    all.iter().position(own).expect("an op that looks up has one")
}

/// The dim of `to` that `from` lacks.
pub(super) fn added(to: &Dims, from: &Dims) -> Group {
    *to.iter().find(|g| !from.contains(g)).expect("a new letter")
}

/// For each dim of `to` its place in `from`.
pub(super) fn places(from: &[Group], to: &[Group]) -> Vec<usize> {
    to.iter().filter_map(|g| from.iter().position(|f| f == g)).collect()
}

/// `x` with its dims in the order that they have in `to`.
pub(super) fn permuted(x: &str, from: &[Group], to: &[Group]) -> String {
    let order = places(from, to);
    if order.is_sorted() { x.into() } else { format!("{x}.permute({order:?})") }
}

/// `x` with the dims of `to`, of size 1 where it has none.
pub(super) fn spread(x: &str, from: &[Group], to: &[Group]) -> String {
    let x = permuted(x, from, to);
    if from.is_empty() || from.len() == to.len() {
        return x;
    }
    // What is missing in front is so by itself.
    let first = to.iter().position(|g| from.contains(g)).unwrap_or(0);
    let own = |g: &Group| if from.contains(g) { ":" } else { "None" };
    let all: Vec<&str> = to[first..].iter().map(own).collect();
    if all.contains(&"None") { format!("{x}[{}]", all.join(", ")) } else { x }
}

/// `x` reduced over the letters that are missing on the right.
pub(super) fn reduced(x: &str, how: &str, r: &Rule) -> String {
    let (from, to) = (&r.ins[0], &r.outs[0]);
    let gone: Vec<usize> = (0..from.len()).filter(|&d| !to.contains(&from[d])).collect();
    let left: Vec<Group> = from.iter().filter(|g| to.contains(g)).copied().collect();
    match &gone[..] {
        [] => permuted(x, &left, to),
        [one] => permuted(&format!("{x}.{how}({one})"), &left, to),
        many => permuted(&format!("{x}.{how}({many:?})"), &left, to),
    }
}

/// A rule of plain letters, for einsum.
pub(super) fn letters(r: &Rule) -> String {
    let all = r.letters();
    let plain = r.to_string();
    if plain.bytes().all(|b| b.is_ascii_alphabetic() || b",->".contains(&b)) {
        return plain;
    }
    let one = |g: &Group| {
        let at = all.iter().position(|l| g.single() == Some(*l)).unwrap_or(0);
        char::from(b'a' + at as u8)
    };
    let text = |dims: &Dims| dims.iter().map(one).collect::<String>();
    let ins: Vec<String> = r.ins.iter().map(text).collect();
    format!("{}->{}", ins.join(","), text(&r.outs[0]))
}

/// Terms as items of a list: those of layers that have the same ones as one item for all of them.
pub(super) fn items(terms: &[String]) -> Vec<String> {
    // All are gradients, or none.
    let prefix = if terms.iter().all(|t| t.starts_with("v[\"d_")) { "d_" } else { "" };
    let of_layer = |t: &String| -> Option<(u32, String)> {
        let name = t.strip_prefix("v[\"")?.strip_suffix("\"]")?;
        let (layer, rest) = name.strip_prefix(prefix)?.strip_prefix('l')?.split_once('.')?;
        Some((layer.parse().ok()?, rest.into()))
    };
    // Terms of one layer that follow each other.
    let mut blocks: Vec<(Option<u32>, Vec<String>)> = vec![];
    for t in terms {
        let (layer, name) = of_layer(t).map_or((None, t.clone()), |(l, n)| (Some(l), n));
        match blocks.last_mut() {
            Some((of, names)) if *of == layer => names.push(name),
            _other => blocks.push((layer, vec![name])),
        }
    }
    let mut out = vec![];
    let mut at = 0;
    while at < blocks.len() {
        let (layer, names) = &blocks[at];
        let goes_on = |k: &usize| {
            let next = layer.map(|l| l + (*k - at) as u32);
            blocks[*k].0 == next && blocks[*k].1 == *names
        };
        let more = (at..blocks.len()).take_while(goes_on).count();
        match layer {
            Some(l) if more > 1 => {
                let names: Vec<String> = names.iter().map(|n| quoted(n)).collect();
                let end = *l as usize + more;
                let all = names.join(", ");
                out.push(format!(
                    "*(v[f\"{prefix}l{{i}}.{{n}}\"] for i in range({l}, {end}) for n in ({all},))"
                ));
                at += more;
            }
            Some(l) => {
                out.extend(names.iter().map(|n| format!("v[\"{prefix}l{l}.{n}\"]")));
                at += 1;
            }
            None => {
                out.extend(names.iter().cloned());
                at += 1;
            }
        }
    }
    out
}
