//! The end of a process that gets no more memory: one line says so, and nothing unfinished is left.
//!
//! Allocations are those of the system. Where one is refused, nothing that runs can go on, and no
//! destructor would run when the standard library ends the process. Arenas of ranks are not
//! allocated here: that one is refused is a diagnostic.

use crate::control::end;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// The allocator of the command.
pub struct Memory;

/// What is kept back, so that there is room for the work of the end.
const RESERVE: Layout = Layout::new::<[u8; 1 << 20]>();
static KEPT: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// Some thread ends the process.
static ENDS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// It is this thread.
    static ENDING: Cell<bool> = const { Cell::new(false) };
    /// Bytes that this thread may take, if somebody says how many.
    static LEFT: Cell<Option<isize>> = const { Cell::new(None) };
}

/// Exit status where a stranger's program takes too much: that of a mistake of use.
const TOO_MUCH: i32 = 2;

/// Exit status of an error of the environment, as of `no-memory`.
const STATUS: i32 = 5;

impl Memory {
    /// Keeps some back; where there is not even that, the first need of it says so.
    pub fn reserve() {
        // SAFETY: the layout is not empty.
        let kept = unsafe { System.alloc(RESERVE) };
        let before = KEPT.swap(kept, Ordering::AcqRel);
        if !before.is_null() {
            // SAFETY: it came from there with this layout, and the swap gave it to nobody else.
            unsafe { System.dealloc(before, RESERVE) };
        }
    }
}

impl Memory {
    /// Does work of this thread that may take so many bytes, such as a stranger's program. If it takes more, one line
    /// says so, and the process ends: nothing can be undone within an allocation. It counts where this is the
    /// allocator of the process.
    pub fn within<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
        /// Takes the bound away however the work ends.
        struct Bound;
        impl Drop for Bound {
            fn drop(&mut self) {
                LEFT.set(None);
            }
        }
        LEFT.set(Some(bytes as isize));
        let _bound = Bound;
        work()
    }
}

/// Counts bytes that are taken, or, if there are fewer than none, given back.
fn count(bytes: isize) {
    let Some(left) = LEFT.get() else { return };
    let left = left.saturating_sub(bytes);
    LEFT.set(Some(left));
    if left < 0 {
        LEFT.set(None);
        let line = "error[data]: the chat template takes more than 1 GiB of memory for one chat\n   \
                    = help: give another one: --chat-template FILE\n";
        let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
        end(TOO_MUCH);
    }
}

/// What was allocated, or the end of the process.
fn given(p: *mut u8, bytes: usize) -> *mut u8 {
    if p.is_null() { refused(bytes) } else { p }
}

#[cold]
fn refused(bytes: usize) -> ! {
    if ENDING.get() {
        end(STATUS);
    }
    if ENDS.swap(true, Ordering::AcqRel) {
        // Another thread is at it.
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    }
    ENDING.set(true);
    let kept = KEPT.swap(null_mut(), Ordering::AcqRel);
    if !kept.is_null() {
        // SAFETY: it came from there with this layout, and the swap gave it to nobody else.
        unsafe { System.dealloc(kept, RESERVE) };
    }
    let mut line = [0; 256];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "error[no-memory]: this process gets no more memory: {bytes} B were refused \
         (by `ulimit -v`, a container or the machine); nothing unfinished is left"
    );
    let left = rest.len();
    let len = line.len() - left;
    // Not by way of a lock, which a thread may have that waits for memory.
    let _ = rustix::io::write(std::io::stderr(), &line[..len]);
    end(STATUS)
}

// SAFETY: each function does what that of `System` does, or does not return.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: what the caller promises is what `System` asks for.
        given(unsafe { System.alloc(layout) }, layout.size())
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as above.
        given(unsafe { System.realloc(p, layout, size) }, size)
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}
