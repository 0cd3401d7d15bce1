//! The known names nearest to one that is not known, for messages.

/// Longest name that is compared, in bytes: names come from strangers.
const MAX_LEN: usize = 200;

/// Up to `n` of `known`, nearest first; only names that are near at all.
pub(crate) fn nearest<'a>(
    name: &str,
    known: impl Iterator<Item = &'a str>,
    n: usize,
) -> Vec<&'a str> {
    let limit = (name.len() / 3).clamp(2, 12);
    let mut found: Vec<(usize, &str)> = known
        .filter(|k| name.len().max(k.len()) <= MAX_LEN && name.len().abs_diff(k.len()) <= limit)
        .map(|k| (distance(name.as_bytes(), k.as_bytes()), k))
        .filter(|x| x.0 <= limit)
        .collect();
    found.sort();
    found.into_iter().take(n).map(|x| x.1).collect()
}

/// Fewest insertions, removals and replacements of a byte that turn `a` into `b` (Levenshtein,
/// 1966).
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        assert_eq!(distance(b"kitten", b"sitting"), 3);
        assert_eq!(distance(b"", b"ab"), 2);
    }

    #[test]
    fn near_names_come_first_and_far_ones_not_at_all() {
        let known = ["llama", "mistral", "qwen2", "qwen3", "gpt2"];
        assert_eq!(nearest("qwen", known.into_iter(), 3), ["qwen2", "qwen3"]);
        assert!(nearest("bert", known.into_iter(), 3).is_empty());
    }
}
