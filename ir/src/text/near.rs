//! The known name that somebody probably meant.

/// Most names that are compared: a message is not worth more.
const MAX_NAMES: usize = 20_000;
const MAX_LEN: usize = 64;

/// The names nearest to `word`, nearest first, at most three, none farther than a third of it.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let most = (word.len() / 3).clamp(1, 4);
    let mut found: Vec<(usize, &str)> = known
        .into_iter()
        .take(MAX_NAMES)
        .filter(|k| k.len().abs_diff(word.len()) <= most && k.len() <= MAX_LEN)
        .map(|k| (distance(word.as_bytes(), k.as_bytes()), k))
        .filter(|&(d, _)| d <= most)
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(3).map(|(_, k)| k).collect()
}

/// Number of characters to change, add or drop (Levenshtein, 1966).
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_first_and_nothing_far() {
        let known = ["all_gather", "all_reduce", "add", "sub"];
        assert_eq!(nearest("all_reduc", known), ["all_reduce"]);
        assert_eq!(nearest("ad", known), ["add"]);
        assert!(nearest("softmax", known).is_empty());
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }
}
