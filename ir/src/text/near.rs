//! The known name that somebody probably meant.

use crate::names::within;

/// The names nearest to `word`, nearest first, at most three, none farther than a third of it.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    within(word, known.into_iter(), (word.len() / 3).clamp(1, 4), 3)
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
    }
}
