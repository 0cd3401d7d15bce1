//! Tied parameters of archives without numbers. With numbers, names of the same bytes are one parameter.
//! Without, the program says it: `torch.export` calls a tensor by one of its names wherever it is used, and
//! the others are names of nothing that is used.

use super::archive::Archive;
use super::lower::Lower;
use super::names;

/// Joins the names of a tensor.
pub(super) fn tie(l: &mut Lower, archive: &Archive) {
    let has_numbers =
        |name: &str| archive.weights.get(name).is_some_and(|t| t.stored.bytes.is_some());
    for i in 0..l.params.len() {
        if has_numbers(&l.params[i].names[0]) {
            continue;
        }
        for scope in l.params[i].scopes.clone() {
            let sizes = |k: usize| l.draft.ty(l.params[k].value).sizes();
            // A name for what this module has, of which nothing is made.
            let other = (0..l.params.len()).find(|&k| {
                let q = &l.params[k];
                let is_of = q.names.iter().any(|n| names::module(n).0 == &*scope);
                k != i
                    && is_of
                    && q.scopes.is_empty()
                    && !has_numbers(&q.names[0])
                    && sizes(k) == sizes(i)
            });
            let Some(other) = other else { continue };
            let (more, frozen) = (l.params[other].names.clone(), l.params[other].frozen);
            l.params[i].frozen &= frozen;
            let own = &mut l.params[i].names;
            // Folders have a tensor under the first of its names.
            match other < i {
                true => *own = [more, std::mem::take(own)].concat(),
                false => own.extend(more),
            }
        }
    }
}
