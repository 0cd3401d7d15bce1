//! Work that several threads share where there are some; none of it needs them.

use shardc_ir::steps;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Stack of a helper, as large as that of the main thread.
const STACK: usize = 8 << 20;

/// Does the same to all items, on `most` threads at most, this one among them; results in the order of
/// the items. Where the system starts fewer, those do all of it.
pub fn all<T: Sync, R: Send>(items: &[T], most: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = cores.min(most).min(items.len());
    let done: Mutex<Vec<Option<R>>> = Mutex::new(items.iter().map(|_| None).collect());
    let next = AtomicUsize::new(0);
    let steps = Mutex::new(vec![]);
    let run = || {
        while let Some((i, item)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            items.get(i).map(|item| (i, item))
        } {
            let r = work(item);
            done.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(r);
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads {
            let helper = std::thread::Builder::new().stack_size(STACK);
            let counted = || {
                let taken = steps::of(run).1;
                steps.lock().unwrap_or_else(PoisonError::into_inner).push(taken);
            };
            if helper.spawn_scoped(s, counted).is_err() {
                break;
            }
        }
        run();
    });
    let steps = steps.into_inner().unwrap_or_else(PoisonError::into_inner);
    steps.into_iter().for_each(steps::join);
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.into_iter().map(|r| r.expect("every item was worked on")).collect()
}
