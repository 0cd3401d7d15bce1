//! Names that users write: globs, the known names nearest to one that is not known, and which
//! parameters a glob means. All of them are names of the checkpoint's tensors, which users know;
//! what parameters are called in programs is ours.

use crate::diag::{Diag, Result};
use crate::weights::Weight;

/// Longest name that is compared, in bytes: names come from strangers.
const MAX_LEN: usize = 200;
/// Most names that are compared: a message is not worth more.
const MAX_NAMES: usize = 20_000;

/// Matches `*` (any run of characters) and `?` (any one) in a glob.
///
/// ```
/// # use shardc_ir::names::glob;
/// assert!(glob("model.layers.*.q_proj.weight", "model.layers.3.q_proj.weight"));
/// assert!(!glob("*.bias", "q_proj.weight"));
/// ```
pub fn glob(pattern: &str, text: &str) -> bool {
    let (p, t) = (pattern.as_bytes(), text.as_bytes());
    // Where to resume if what follows the last `*` does not match here.
    let (mut i, mut j, mut star) = (0, 0, None);
    while j < t.len() {
        if i < p.len() && p[i] == b'*' {
            star = Some((i, j));
            i += 1;
        } else if i < p.len() && (p[i] == t[j] || p[i] == b'?') {
            (i, j) = (i + 1, j + 1);
        } else if let Some((si, sj)) = star {
            star = Some((si, sj + 1));
            (i, j) = (si + 1, sj + 1);
        } else {
            return false;
        }
    }
    p[i..].iter().all(|&c| c == b'*')
}

/// The parameters that a glob over names of tensors means, as indices of `weights`: a part of a fused
/// tensor if the tensor matches, a stack of the experts' tensors if all of them do. None if nothing
/// matches.
///
/// # Errors
/// `part-of-stack` if some tensors of a stack match, and others do not; exit status 4.
pub fn parameters(weights: &[Weight], pattern: &str) -> Result<Vec<usize>> {
    let mut out = vec![];
    for (i, w) in weights.iter().enumerate() {
        let all = w.tensors().count();
        match w.tensors().filter(|t| glob(pattern, t)).count() {
            0 => {}
            n if n == all => out.push(i),
            n => {
                let what =
                    format!("`{pattern}` matches {n} of {all} tensors that are one parameter");
                let stack = w.tensor.replacen("{}", "*", 1);
                return Err(Diag::new("part-of-stack", what)
                    .rule("the experts of a layer have one layout and are trained together")
                    .why(format!("the tensors {stack} are stacked as `{}`", w.param))
                    .help(format!("name all {all} of them: '{stack}'")));
            }
        }
    }
    Ok(out)
}

/// The parameters of modules whose paths end in `end`, as PEFT's `modules_to_save` names modules: with all that is in
/// them, and `norm` is also the end of `input_layernorm`. Tensors may lack the first name of a path, which modules have.
///
/// ```
/// # use shardc_ir::{names::in_module, weights::Weight};
/// let all = ["h.0.norm.weight", "ln_f.weight"].map(|name| Weight::plain(name, &[2]));
/// assert_eq!(in_module(&all, "norm"), [0]);
/// assert_eq!(in_module(&all, "transformer.ln_f"), [1]);
/// ```
pub fn in_module(weights: &[Weight], end: &str) -> Vec<usize> {
    let rest = end.split_once('.').map(|x| x.1);
    let is = |path: &str| path.ends_with(end) || rest == Some(path);
    let has = |w: &Weight| w.tensor.match_indices('.').any(|(dot, _)| is(&w.tensor[..dot]));
    (0..weights.len()).filter(|&i| !weights[i].is_adapter() && has(&weights[i])).collect()
}

/// What to write in the place of a glob that matches no tensor: the names nearest to it, or some.
pub fn suggestion(weights: &[Weight], pattern: &str) -> String {
    let names: Vec<String> = weights.iter().flat_map(Weight::tensors).take(MAX_NAMES).collect();
    let near = nearest(pattern, names.iter().map(String::as_str), 3);
    let wild = match pattern.contains(['[', '{']) {
        true => "; of all characters only `*` and `?` are wildcards",
        false => "",
    };
    let names = match near[..] {
        [] => {
            let some: Vec<&str> = names.iter().take(4).map(String::as_str).collect();
            format!("name some of the checkpoint's tensors: {}, …", some.join(", "))
        }
        _ => format!("the nearest of the checkpoint's names: `{}`", near.join("`, `")),
    };
    names + wild
}

/// Up to `n` of `known`, nearest first; only names that are near at all. Of a glob, `*` and `?` stand
/// for what fits best.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>, n: usize) -> Vec<&'a str> {
    within(name, known, (name.len() / 3).clamp(2, 12), n)
}

/// Up to `n` of `known` that are not farther than `most`, nearest first.
pub(crate) fn within<'a>(
    name: &str,
    known: impl Iterator<Item = &'a str>,
    most: usize,
    n: usize,
) -> Vec<&'a str> {
    let any = name.contains('*');
    let mut found: Vec<(usize, &str)> = known
        .take(MAX_NAMES)
        .filter(|k| name.len().max(k.len()) <= MAX_LEN)
        .filter(|k| any || name.len().abs_diff(k.len()) <= most)
        .map(|k| (distance(name.as_bytes(), k.as_bytes()), k))
        .filter(|x| x.0 <= most)
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(n).map(|x| x.1).collect()
}

/// Fewest insertions, removals and replacements of a byte that turn `b` into something that the glob
/// `a` matches (Levenshtein, 1966).
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for &x in a {
        let mut diagonal = row[0];
        if x != b'*' {
            row[0] += 1;
        }
        for (j, &y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = match x {
                b'*' => above.min(row[j]),
                _ => (diagonal + usize::from(x != y && x != b'?')).min(above + 1).min(row[j] + 1),
            };
            diagonal = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{Init, TensorSlice};

    fn weight(
        param: &str,
        tensor: &str,
        experts: Option<usize>,
        part: Option<TensorSlice>,
    ) -> Weight {
        Weight {
            param: param.into(),
            tensor: tensor.into(),
            tensor_shape: vec![6],
            experts,
            part,
            shape: vec![2],
            init: Init::Zeros,
            matrix: false,
            tp_dim: None,
        }
    }

    fn model() -> Vec<Weight> {
        let part = |start| Some(TensorSlice::of(0, start, 2));
        vec![
            weight("h.0.c_attn.bias.q", "h.0.c_attn.bias", None, part(0)),
            weight("h.0.c_attn.bias.k", "h.0.c_attn.bias", None, part(2)),
            weight("h.0.ln.bias", "h.0.ln.bias", None, None),
            weight("h.0.experts.up.weight", "h.0.experts.{}.up.weight", Some(11), None),
        ]
    }

    #[test]
    fn distance_counts_edits() {
        assert_eq!(distance(b"kitten", b"sitting"), 3);
        assert_eq!(distance(b"", b"ab"), 2);
        assert_eq!(distance(b"*.bia", b"h.0.ln.bias"), 1);
        assert_eq!(distance(b"h.?.ln", b"h.0.ln"), 0);
        assert_eq!(distance(b"*", b"anything"), 0);
    }

    #[test]
    fn near_names_come_first_and_far_ones_not_at_all() {
        let known = ["llama", "mistral", "qwen2", "qwen3", "gpt2"];
        assert_eq!(nearest("qwen", known.into_iter(), 3), ["qwen2", "qwen3"]);
        assert!(nearest("bert", known.into_iter(), 3).is_empty());
    }

    #[test]
    fn a_glob_means_all_parts_of_a_tensor() {
        let w = model();
        let found = |g: &str| parameters(&w, g).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found("*bias"), [0, 1, 2]);
        assert_eq!(found("h.0.c_attn.bias"), [0, 1]);
        assert_eq!(found("*.experts.*"), [3]);
        assert_eq!(found("*"), [0, 1, 2, 3]);
        // Names of ours are none.
        assert_eq!(found("*.bias.q"), []);
        assert_eq!(found("*.experts.up.weight"), []);
        assert!(suggestion(&w, "*c_attn.bias.q").contains("`h.0.c_attn.bias`"));
        assert!(suggestion(&w, "*.experts.up.weight").contains("`h.0.experts.0.up.weight`"));
        assert!(suggestion(&w, "nothing like it").contains("h.0.c_attn.bias, "));
        assert!(!suggestion(&w, "nothing like it").contains("wildcards"));
        assert!(suggestion(&w, "h.0.c_attn.bias[qk]").ends_with("`*` and `?` are wildcards"));
    }

    #[test]
    fn a_part_of_a_stack_is_refused() {
        for (glob, n) in [("*.experts.0.*", 1), ("h.0.experts.?.up.weight", 10), ("*.1*", 2)] {
            let d = parameters(&model(), glob).expect_err("a part of a stack");
            assert_eq!(d.code, "part-of-stack");
            assert!(d.message.contains(&format!("matches {n} of 11 tensors")), "{d}");
            assert!(d.help[0].contains("'h.0.experts.*.up.weight'"), "{d}");
        }
    }
}
