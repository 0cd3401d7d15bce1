//! What the standard library has no call for: long backlogs, and an end that nothing can hold.

use std::ffi::c_int;
use std::net::TcpListener;
use std::os::fd::AsRawFd;

/// Connections that may wait to be accepted; the system may allow fewer (`net.core.somaxconn`).
const BACKLOG: c_int = 4096;

unsafe extern "C" {
    fn listen(socket: c_int, backlog: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Lets more connections wait than a listener of the standard library does (128), behind which those of the
/// job are dropped and come again after a second. Where the system refuses, it stays as it is.
pub(super) fn lengthen(listener: &TcpListener) {
    // SAFETY: the socket is open and bound; to listen again changes the backlog alone.
    let _ = unsafe { listen(listener.as_raw_fd(), BACKLOG) };
}

/// Ends this process at once, and takes back what it has not finished. Nothing runs that libraries have registered for its end: it may need memory that
/// there is not, and another thread may be in the middle of MPI's or NCCL's start or end, which it would wait for. All that is printed is flushed
/// where it is printed.
pub(crate) fn end(status: i32) -> ! {
    shardc_ir::files::abandon();
    // SAFETY: no conditions.
    unsafe { _exit(status) }
}
