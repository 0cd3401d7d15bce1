//! The thread of a rank.

use crate::rank::{Command, Failed, Rank, Reply};
use crate::spawn;
use shardc_ir::diag::{Diag, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// What a rank answers a command.
pub(super) type Answer = std::result::Result<Reply, Failed>;

/// A rank of this process: its thread, what it is told, and what it replies.
pub(super) struct Worker {
    pub rank: usize,
    pub commands: Option<Sender<Command>>,
    pub replies: Receiver<Answer>,
    pub thread: Option<JoinHandle<()>>,
}

/// The name of the thread of a rank.
pub(super) fn rank_thread(rank: usize) -> String {
    format!("rank {rank}")
}

/// What is said of a rank, one of so many here, whose thread does not start.
pub(super) fn unstarted(rank: usize, ranks: usize, e: &std::io::Error) -> Diag {
    spawn::refused(&format!("the thread of rank {rank}"), ranks, e)
}

/// What answers commands until the session is gone.
pub(super) trait Serve: Send + 'static {
    fn serve(self, commands: &Receiver<Command>, replies: &Sender<Answer>);
}

impl Serve for Rank {
    fn serve(self, commands: &Receiver<Command>, replies: &Sender<Answer>) {
        Rank::serve(self, commands, replies);
    }
}

/// Starts the thread of a rank, one of so many here.
pub(super) fn start((rank, r): (usize, impl Serve), ranks: usize) -> Result<Worker> {
    let (commands, inbox) = channel();
    let (outbox, replies) = channel();
    let thread = std::thread::Builder::new().name(rank_thread(rank));
    let thread = thread.spawn(move || r.serve(&inbox, &outbox));
    let thread = thread.map_err(|e| unstarted(rank, ranks, &e))?;
    Ok(Worker { rank, commands: Some(commands), replies, thread: Some(thread) })
}
