//! Ranks as processes that MPI has started: messages through its non-blocking calls.
//!
//! Every group of the plan has a communicator of its own. MPI is told to be quiet about errors, so
//! that they become diagnostics.

use crate::messages::{Peer, Post};
use mpi::environment::{Threading, Universe, initialize_with_threading};
use mpi::ffi;
use mpi::traits::Communicator;
use shardc_ir::diag::{Diag, Result};
use std::ffi::c_int;

/// Most bytes of one message of MPI, whose counts are `int`s.
const MOST: usize = i32::MAX as usize;

/// What the MPI that is linked says of itself: vendor and version. It is not started.
pub fn library() -> String {
    let text = mpi::environment::library_version().unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // Open MPI goes on with who packed it.
    let words = line.split(", package").next().unwrap_or_default().split_whitespace();
    words.collect::<Vec<_>>().join(" ").trim_end_matches('\0').to_string()
}

/// MPI, from its start to its end.
pub struct World {
    universe: Universe,
}

impl World {
    /// Starts MPI; `None` if it runs already.
    ///
    /// # Errors
    /// `mpi` if this MPI does not let another thread than the first one call it.
    pub fn start() -> Result<Option<World>> {
        let Some((universe, level)) = initialize_with_threading(Threading::Serialized) else {
            return Ok(None);
        };
        if level < Threading::Serialized {
            return Err(Diag::new("mpi", "this MPI serves the first thread of a process only")
                .rule("the thread of a rank calls MPI: MPI_THREAD_SERIALIZED")
                .help("use an MPI built with --enable-mpi-threads, as 9 of 10 are"));
        }
        Ok(Some(World { universe }))
    }

    /// This process, and how many there are.
    pub fn place(&self) -> (usize, usize) {
        let w = self.universe.world();
        (w.rank() as usize, w.size() as usize)
    }

    /// What process 0 gives, in all.
    pub fn share(&self, text: &str) -> String {
        use mpi::traits::Root;
        let w = self.universe.world();
        let root = w.process_at_rank(0);
        let mut len = text.len() as u64;
        root.broadcast_into(&mut len);
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(len as usize, 0);
        root.broadcast_into(&mut bytes[..]);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// MPI's communicator of all processes.
    pub fn everybody(&self) -> mpi::topology::SimpleCommunicator {
        self.universe.world()
    }

    /// This rank's end.
    pub fn post(&self) -> Mpi {
        Mpi { channels: vec![] }
    }
}

/// Messages of MPI.
pub struct Mpi {
    channels: Vec<ffi::MPI_Comm>,
}

// SAFETY: MPI was asked to serve calls from any thread, one at a time; one rank makes them.
unsafe impl Send for Mpi {}

/// A call that MPI has begun.
pub struct Ticket {
    request: ffi::MPI_Request,
    /// Bytes to come; `None` if they leave.
    expects: Option<usize>,
}

// SAFETY: as for `Mpi`: a request may be tested by any thread, and who has the ticket is the only one
// that tests it.
unsafe impl Send for Ticket {}

/// An error of MPI, in its words.
fn called(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: MPI writes at most the length it has documented.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]);
    Err(Diag::new("rank-failed", format!("{call}: {text}"))
        .rule("all ranks of a group run the same collectives, in the same order")
        .help("run again with 1 rank to see whether the program itself fails"))
}

fn count(len: usize) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| {
        Diag::new("rank-failed", format!("a message of {len} B is longer than {MOST} B"))
            .help("this is a bug of shardc: data move in segments of 4 MiB")
    })
}

impl Post for Mpi {
    type Ticket = Ticket;

    fn open(&mut self, members: &[usize]) -> Result<usize> {
        let ranks: Vec<c_int> = members.iter().map(|&r| r as c_int).collect();
        // SAFETY: MPI runs; handles live until it ends, and every member makes the same calls.
        unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            let (mut all, mut group) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
            called("MPI_Comm_group", ffi::MPI_Comm_group(world, &mut all))?;
            let n = ranks.len() as c_int;
            let made = ffi::MPI_Group_incl(all, n, ranks.as_ptr(), &mut group);
            called("MPI_Group_incl", made)?;
            let mut comm = ffi::RSMPI_COMM_NULL;
            // Members of several groups open them in the order of their calls, each with its own tag.
            let tag = ranks.iter().fold(0, |h: c_int, &r| (h.wrapping_mul(31) + r) & 0x7fff);
            let made = ffi::MPI_Comm_create_group(world, group, tag, &mut comm);
            called("MPI_Comm_create_group", made)?;
            let quiet = ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN);
            called("MPI_Comm_set_errhandler", quiet)?;
            ffi::MPI_Group_free(&mut group);
            ffi::MPI_Group_free(&mut all);
            self.channels.push(comm);
        }
        Ok(self.channels.len() - 1)
    }

    unsafe fn send(&mut self, to: Peer, bytes: *const u8, len: usize) -> Result<Ticket> {
        let (n, member, tag) = (count(len)?, to.member as c_int, to.tag as c_int);
        // SAFETY: by the caller.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (kind, comm) = (ffi::RSMPI_UINT8_T, self.channels[to.channel]);
            let done = ffi::MPI_Isend(bytes.cast(), n, kind, member, tag, comm, &mut request);
            called("MPI_Isend", done)?;
            Ok(Ticket { request, expects: None })
        }
    }

    unsafe fn recv(&mut self, from: Peer, bytes: *mut u8, len: usize) -> Result<Ticket> {
        let (n, member, tag) = (count(len)?, from.member as c_int, from.tag as c_int);
        // SAFETY: by the caller.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (kind, comm) = (ffi::RSMPI_UINT8_T, self.channels[from.channel]);
            let done = ffi::MPI_Irecv(bytes.cast(), n, kind, member, tag, comm, &mut request);
            called("MPI_Irecv", done)?;
            Ok(Ticket { request, expects: Some(len) })
        }
    }

    fn done(&mut self, t: &mut Ticket) -> Result<bool> {
        let (mut flag, mut found) = (0, 0);
        // SAFETY: the request is one of ours; MPI fills the status.
        unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            called("MPI_Test", ffi::MPI_Test(&mut t.request, &mut flag, &mut status))?;
            if flag == 0 {
                return Ok(false);
            }
            if let Some(len) = t.expects {
                ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut found);
                if found != count(len)? {
                    let message = format!("{len} B were expected, {found} B came");
                    return Err(Diag::new("rank-failed", message)
                        .rule("members of a group give tensors of the same sizes")
                        .help("recompile the plan with 1 version of shardc for all ranks"));
                }
            }
        }
        Ok(true)
    }
}
