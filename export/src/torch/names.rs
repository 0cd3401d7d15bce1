//! Words of Python for values: identifiers are ours, whatever a model calls its tensors.

use super::dims::quoted;
use shardc_ir::func::{Func, Name, Value};
use std::collections::{BTreeMap, BTreeSet};

/// What no value may be called: keywords, and what a program has from elsewhere.
const TAKEN: &str = "False None True and as assert async await break class continue def del elif else except finally for \
from global if import in is lambda nonlocal not or pass raise return try while with yield match case type range torch \
math F device mesh constant causal full Mask Mesh Exchange take index_add pad top_k rope attention attention_grad \
merge_attention scan scan_grad route dispatch unpermute combine_gates_grad grouped_dot grouped_dot_t grouped_outer draw adamw sgd \
rms_norm rms_norm_grad layer_norm layer_norm_grad cross_entropy cross_entropy_grad all_reduce \
all_gather reduce_scatter broadcast reduce permute exchange all_to_all_v";

/// The identifiers of one function.
pub(super) struct Words {
    of: BTreeMap<Value, String>,
    taken: BTreeSet<String>,
    /// Values are numbers, in the order in which they are asked for.
    numbers: bool,
}

impl Words {
    pub fn new<const N: usize>(more: [&str; N]) -> Words {
        let taken = TAKEN.split(' ').map(String::from).chain(more.map(String::from));
        Words { of: BTreeMap::new(), taken: taken.collect(), numbers: false }
    }

    /// Numbers in place of words: by them texts are equal that differ in names alone.
    pub fn numbers() -> Words {
        Words { of: BTreeMap::new(), taken: BTreeSet::new(), numbers: true }
    }

    /// The identifier of a value, in a function of this layer.
    pub fn of(&mut self, f: &Func, v: Value, base: Option<u32>) -> String {
        if let Some(known) = self.of.get(&v) {
            return known.clone();
        }
        if self.numbers {
            let text = format!("x{}", self.of.len());
            self.of.insert(v, text.clone());
            return text;
        }
        let name = f.name(v);
        let mut text = String::new();
        if name.grad {
            text += "d_";
        }
        match (name.layer, base) {
            (Some(l), Some(b)) if l < b => text += "below_",
            (Some(l), Some(b)) if l > b => text += "above_",
            (Some(l), None) => text += &format!("l{l}_"),
            _own => {}
        }
        text.extend(name.hint.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }));
        if name.dup > 0 {
            text += &format!("_{}", name.dup);
        }
        let begins = |c: char| c.is_ascii_alphabetic() || c == '_';
        if !text.starts_with(begins) || text.starts_with("over_") || text.starts_with("exchange_") {
            text.insert_str(0, "v_");
        }
        while !self.taken.insert(text.clone()) {
            text.push('_');
        }
        self.of.insert(v, text.clone());
        text
    }
}

/// The name of a value as a string of Python.
pub(super) fn key(f: &Func, v: Value) -> String {
    quoted(f.name(v).to_string().trim_start_matches('%'))
}

/// The same as a pattern, where the layer is that of a unit or near to it: `f"l{i-1}.hidden"`.
pub(super) fn pattern(f: &Func, v: Value, base: Option<u32>) -> String {
    let name = f.name(v);
    let (Some(layer), Some(base)) = (name.layer, base) else { return key(f, v) };
    let plain = Name { layer: None, ..name.clone() }.to_string();
    let rest = plain.trim_start_matches('%');
    let rest = if name.grad { rest.trim_start_matches("d_") } else { rest };
    let grad = if name.grad { "d_" } else { "" };
    let i = match i64::from(layer) - i64::from(base) {
        0 => "{i}".to_string(),
        by => format!("{{i{by:+}}}"),
    };
    format!("f\"{grad}l{i}.{rest}\"")
}

/// A scope's path, with `{i}` for the number of the layer.
pub(super) fn relative(path: &str, base: Option<u32>) -> String {
    let Some(base) = base else { return path.to_string() };
    let part = |p: &str| match p.parse::<u32>() {
        Ok(n) if n == base => "{i}".to_string(),
        Ok(n) => format!("{{i{:+}}}", i64::from(n) - i64::from(base)),
        Err(_) => p.to_string(),
    };
    // Only the first number is that of a layer.
    let mut done = false;
    let parts = path.split('.').map(|p| match done || p.parse::<u32>().is_err() {
        true => p.to_string(),
        false => {
            done = true;
            part(p)
        }
    });
    parts.collect::<Vec<_>>().join(".")
}
