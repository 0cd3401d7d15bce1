//! Where a list does for later microbatches what it did before: the steady state of a pipeline.
//!
//! Places that are found for a list without most of its repetitions hold for the whole list, if frames that are
//! in use lie alike before two of those that are left: what happens between them may then happen any number of
//! times. So the search for places takes no longer for a hundred thousand microbatches than for some dozens. The
//! replay of a plan takes it for a hint where to look for a state that it has seen.

use shardc_ir::maps::HashMap;
use shardc_ir::plan::Instr;
use std::hash::Hash;
use std::ops::Range;

/// `count` stretches of `length` instructions, from `first` on: each is the one before it, for microbatches that
/// are `later` by so many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Repeats {
    pub first: usize,
    pub length: usize,
    pub later: usize,
    pub count: usize,
}

/// Distances at which a list is compared with itself, at most.
const TRIES: usize = 64;

impl Repeats {
    /// The stretches that take up at least half of a list, if there are such.
    pub fn of(list: &[Instr]) -> Option<Repeats> {
        let middle = (list.len() / 2..list.len()).find(|&i| list[i].microbatch().is_some())?;
        let later = |i: &usize| {
            let later = list[*i].microbatch()?.checked_sub(list[middle].microbatch()?)?;
            (later > 0 && like(&list[middle], &list[*i], later)).then_some(later)
        };
        (middle + 1..list.len())
            .filter_map(|i| Some((i - middle, later(&i)?)))
            .take(TRIES)
            .find_map(|(length, later)| {
                let repeats = |&i: &usize| like(&list[i], &list[i + length], later);
                let after = (middle..list.len() - length).take_while(repeats).count();
                let before = (0..middle).rev().take_while(repeats).count();
                let count = (before + after + length) / length;
                let found = Repeats { first: middle - before, length, later, count };
                (count * length >= list.len() / 2).then_some(found)
            })
    }

    /// The instructions of stretches.
    fn stretches(&self, of: Range<usize>) -> Range<usize> {
        self.first + of.start * self.length..self.first + of.end * self.length
    }

    /// A list without all but `kept` of its stretches; none if a microbatch is named before and after those that
    /// would be left out.
    pub fn without(&self, list: &[Instr], kept: usize) -> Option<Vec<Instr>> {
        let left_out = self.count.checked_sub(kept)?;
        let out = self.stretches(kept / 2..kept / 2 + left_out);
        let before = list[..out.start].iter().filter_map(Instr::microbatch).max()?;
        let after = list[out.end..].iter().filter_map(Instr::microbatch).min()?;
        if before >= after || after < left_out * self.later {
            return None;
        }
        let mut short = list[..out.start].to_vec();
        short.extend(list[out.end..].iter().map(|instr| {
            let mut instr = instr.clone();
            match &mut instr {
                Instr::Call(c) => c.microbatch = c.microbatch.map(|j| j - left_out * self.later),
                Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
                    t.microbatch = t.microbatch.map(|j| j - left_out * self.later);
                }
                Instr::Sent { .. } => {}
            }
            instr
        }));
        Some(short)
    }

    /// Of a list with `kept` stretches: two stretches before which `state` is the same, and so many apart that
    /// the rest of all stretches is a number of times what lies between them. If there are none, `Err` is how
    /// many more stretches should be kept for the last two before which it is the same, if there are such.
    pub fn alike<T: Eq + Hash>(
        &self,
        kept: usize,
        state: impl Fn(usize) -> T,
    ) -> Result<Range<usize>, Option<usize>> {
        let left_out = self.count - kept;
        let mut seen: HashMap<T, usize> = HashMap::default();
        let mut apart = None;
        for k in 1..kept {
            let Some(before) = seen.insert(state(k), k) else { continue };
            if left_out % (k - before) == 0 {
                return Ok(before..k);
            }
            apart = Some(left_out % (k - before));
        }
        Err(apart)
    }

    /// For each instruction of a list, which one stands for it in the list with `kept` stretches, if those between
    /// two that are [`alike`](Repeats::alike) stand for what was left out.
    pub fn stands_for(&self, kept: usize, between: Range<usize>, i: usize) -> usize {
        let left_out = (self.count - kept) * self.length;
        let between = self.stretches(between);
        match i.checked_sub(between.end) {
            None => i,
            Some(behind) if behind < left_out => between.start + behind % between.len(),
            Some(_) => i - left_out,
        }
    }
}

/// True if an instruction is another for a microbatch that is later by so many.
fn like(a: &Instr, b: &Instr, later: usize) -> bool {
    let same = match (a, b) {
        (Instr::Call(a), Instr::Call(b)) => a.func == b.func,
        (Instr::Send(a), Instr::Send(b))
        | (Instr::PostRecv(a), Instr::PostRecv(b))
        | (Instr::Recv(a), Instr::Recv(b)) => {
            (a.func, a.value, a.with) == (b.func, b.value, b.with)
        }
        (Instr::Sent { to: a }, Instr::Sent { to: b }) => a == b,
        _of_two_kinds => false,
    };
    same && a.microbatch().map(|j| j + later) == b.microbatch()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::plan::Call;

    fn call(func: usize, microbatch: Option<usize>) -> Instr {
        Instr::Call(Call { func, microbatch, frames: Default::default() })
    }

    /// Function 0 at first and 3 at last, and of microbatches 1 and 2, `ahead` apart.
    fn pipeline(microbatches: usize, ahead: usize) -> Vec<Instr> {
        let mut all = vec![call(0, None)];
        for j in 0..microbatches + ahead {
            all.extend((j < microbatches).then(|| call(1, Some(j))));
            all.extend(j.checked_sub(ahead).map(|j| call(2, Some(j))));
        }
        all.push(call(3, None));
        all
    }

    #[test]
    fn what_repeats_is_found_and_stands_for_the_whole() {
        let list = pipeline(100, 3);
        let r = Repeats::of(&list).expect("it repeats");
        assert_eq!(r, Repeats { first: 4, length: 2, later: 1, count: 97 });
        let short = r.without(&list, 10).expect("nothing spans what is left out");
        assert_eq!(short, pipeline(13, 3));
        // In use before a stretch are three microbatches; every other time they lie alike.
        let between = r.alike(10, |k| k % 2).err();
        assert_eq!(between, Some(Some(1)), "87 stretches are no number of two");
        let between = r.alike(11, |k| k % 2).expect("86 are");
        let short = r.without(&list, 11).expect("as above");
        for (i, instr) in list.iter().enumerate() {
            let stands = r.stands_for(11, between.clone(), i);
            let func = |i: &Instr| matches!(i, Instr::Call(c) if c.func == 1);
            assert_eq!(func(instr), func(&short[stands]), "{i}: {stands}");
            if i < r.first || i >= r.first + r.count * r.length {
                let out = if i < r.first { 0 } else { 86 };
                let later = short[stands].microbatch().map(|j| j + out);
                assert_eq!(later, instr.microbatch());
            }
        }
        assert_eq!(r.alike(10, |k| k).err(), Some(None));
    }

    #[test]
    fn all_forward_before_all_backward_has_no_steady_state() {
        let all = [1, 2].map(|f| (0..100).map(move |j| call(f, Some(j))));
        let list: Vec<Instr> = all.into_iter().flatten().collect();
        let r = Repeats::of(&list).expect("each half repeats");
        assert_eq!(r.without(&list, 10), None);
        assert_eq!(Repeats::of(&[]), None);
        assert_eq!(Repeats::of(&[call(0, None), call(1, Some(0)), call(3, None)]), None);
        // One function of microbatches in no order.
        let list: Vec<Instr> = (0..100).map(|j| call(1, Some(j * j % 101))).collect();
        assert_eq!(Repeats::of(&list), None);
    }
}
