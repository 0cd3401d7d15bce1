//! What is said of an op that does not exist, and of an attribute that one has not.

use super::cursor::Fail;
use super::near::nearest;
use crate::ops::{DOCS, NAMES};

/// Ops that other programs have under these names, and how they are written here.
const ELSEWHERE: &[(&[&str], &str)] = &[
    (&["matmul", "einsum", "mm", "bmm", "linear", "dot_general"], "`dot[mk,kn->mn] %x, %w`"),
    (&["sigmoid"], "`logistic %x`"),
    (&["relu"], "`max[,bs->bs] %zero, %x`, with `%zero = fill[0.0] : f32[]`"),
    (&["maximum", "minimum"], "`max %x, %y` or `min %x, %y`"),
    (&["swish"], "`silu %x`"),
    (&["neg", "negate", "negative"], "`scale[-1.0] %x`"),
    (&["square"], "`mul %x, %x`"),
    (&["reciprocal"], "`pow[-1.0] %x`"),
    (&["sum"], "`reduce_sum[ab->a] %x`; for several values, `add`"),
    (&["mean"], "`reduce_sum[ab->a] %x`, then `scale` by 1 / the size of `b`"),
    (&["amax", "amin"], "`reduce_max[ab->a] %x` or `reduce_min[ab->a] %x`"),
    (&["softmax"], "`reduce_max`, `sub`, `exp`, `reduce_sum` and `div`; of scores, `attention`"),
    (&["sdpa", "scaled_dot_product_attention"], "`attention`"),
    (&["gather", "embedding", "index_select"], "`take[vh,bs->bsh] %table, %index`"),
    (&["scatter", "scatter_add"], "`index_add[bsh,bs->vh; v=5] %x, %index`"),
    (&["where"], "`select %condition, %x, %y`"),
    (&["t", "swapaxes"], "`transpose[ab->ba] %x`"),
    (&["view", "flatten", "squeeze", "unsqueeze"], "`reshape[ab->(ab)] %x`"),
    (&["broadcast_to", "repeat"], "`expand[b->bh; h=4] %x`"),
    (&["cat", "stack"], "`concat[d=7; dim=0] %x, %y`"),
    (&["chunk", "split"], "a `narrow` for each part"),
    (&["convert", "to"], "`cast[bf16] %x`"),
    (&["constant", "zeros", "ones", "full"], "`fill[0.0]`, or `literal` for several numbers"),
];

pub(super) fn unknown_op(name: &str, at: usize) -> Box<Fail> {
    let f = Fail::new("unknown-op", at, name.len(), format!("no op is called `{name}`"));
    if let Some((_, own)) = ELSEWHERE.iter().find(|(names, _)| names.contains(&name)) {
        return f.help(format!("write {own}"));
    }
    let near = nearest(name, NAMES.iter().copied());
    match near.is_empty() {
        false => f.help(format!("did you mean `{}`?", near.join("` or `"))),
        true => f
            .rule(format!("the ops are {}", NAMES.join(", ")))
            .help("build it of these: a mean is a `reduce_sum` and a `scale`"),
    }
}

/// What the doc of an op says of one of its attributes, or else of the op.
pub(super) fn said_of(op: &str, attr: Option<&str>) -> String {
    let doc = DOCS.iter().find(|d| d.0 == op).map_or("", |d| d.1);
    let doc = doc.split_whitespace().collect::<Vec<_>>().join(" ");
    let sentences = || doc.split_inclusive(". ").map(|s| s.trim().trim_end_matches('.'));
    let names = |s: &&str, attr: &str| {
        let mut words = s.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.any(|w| w == attr)
    };
    let about = attr.and_then(|a| sentences().find(|s| names(s, a)));
    about.or_else(|| sentences().next()).unwrap_or("").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_programs_call_otherwise_is_no_op_here() {
        for (name, _) in
            ELSEWHERE.iter().flat_map(|(names, own)| names.iter().map(move |n| (n, own)))
        {
            assert!(!NAMES.contains(name), "`{name}` is an op");
        }
        // What is written instead begins with an op.
        for (_, own) in ELSEWHERE {
            let first =
                own.split('`').nth(1).and_then(|s| s.split(['[', ' ']).next()).unwrap_or("");
            assert!(NAMES.contains(&first), "`{first}` of `{own}`");
        }
    }

    #[test]
    fn an_attribute_is_told_by_its_sentence() {
        let mask = said_of("attention", Some("mask"));
        assert!(mask.starts_with("The mask says by positions"), "{mask}");
        assert!(said_of("attention", Some("kept")).starts_with("With `kept=0.9"));
        assert!(said_of("dot", Some("rule")).starts_with("The product of two operands"));
    }
}
