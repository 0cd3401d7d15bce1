//! Messages between threads that behave like those of a network at its worst: a message leaves only
//! when it is received. As in MPI, messages and receives of a route meet in the order of their calls,
//! whichever is looked at first.

use shardc_ir::diag::{Diag, Result};
use shardc_runtime::messages::{Peer, Post};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What is under way: where it lies, and whether it was received.
pub struct Letter {
    bytes: usize,
    len: usize,
    taken: Arc<AtomicBool>,
}

/// Members of the channel, sender, receiver, tag.
type Route = (Vec<usize>, usize, usize, u32);

/// What was sent on a route and not taken, by number, and how many were sent and asked for.
#[derive(Default)]
pub struct Line {
    letters: BTreeMap<usize, Letter>,
    sent: usize,
    asked: usize,
}

/// What all ranks share.
pub type Office = Arc<Mutex<BTreeMap<Route, Line>>>;

/// One rank's end.
pub struct Mail {
    rank: usize,
    all: Office,
    channels: Vec<Vec<usize>>,
}

pub enum Ticket {
    Given(Arc<AtomicBool>),
    Taking { route: Route, number: usize, bytes: usize, len: usize, done: bool },
}

impl Mail {
    pub fn new(rank: usize, all: &Office) -> Mail {
        Mail { rank, all: all.clone(), channels: vec![] }
    }
    fn route(&self, channel: usize, from: usize, to: usize, tag: u32) -> Route {
        let members = self.channels[channel].clone();
        let (from, to) = (members[from], members[to]);
        (members, from, to, tag)
    }
    fn me(&self, channel: usize) -> usize {
        self.channels[channel].iter().position(|&r| r == self.rank).expect("a member")
    }
}

impl Post for Mail {
    type Ticket = Ticket;
    fn open(&mut self, members: &[usize]) -> Result<usize> {
        self.channels.push(members.to_vec());
        Ok(self.channels.len() - 1)
    }
    unsafe fn send(&mut self, to: Peer, bytes: *const u8, len: usize) -> Result<Ticket> {
        let taken = Arc::new(AtomicBool::new(false));
        let route = self.route(to.channel, self.me(to.channel), to.member, to.tag);
        let letter = Letter { bytes: bytes.addr(), len, taken: taken.clone() };
        bytes.expose_provenance();
        let mut all = self.all.lock().unwrap();
        let line = all.entry(route).or_default();
        line.letters.insert(line.sent, letter);
        line.sent += 1;
        Ok(Ticket::Given(taken))
    }
    unsafe fn recv(&mut self, from: Peer, bytes: *mut u8, len: usize) -> Result<Ticket> {
        let route = self.route(from.channel, from.member, self.me(from.channel), from.tag);
        let number = {
            let mut all = self.all.lock().unwrap();
            let line = all.entry(route.clone()).or_default();
            line.asked += 1;
            line.asked - 1
        };
        Ok(Ticket::Taking { route, number, bytes: bytes.expose_provenance(), len, done: false })
    }
    fn done(&mut self, t: &mut Ticket) -> Result<bool> {
        match t {
            Ticket::Given(taken) => Ok(taken.load(Ordering::Acquire)),
            Ticket::Taking { done: true, .. } => Ok(true),
            Ticket::Taking { route, number, bytes, len, done } => {
                let mut all = self.all.lock().unwrap();
                let line = all.get_mut(route);
                let Some(letter) = line.and_then(|line| line.letters.remove(number)) else {
                    return Ok(false);
                };
                if letter.len != *len {
                    let message = format!("{len} B were expected, {} B came", letter.len);
                    return Err(Diag::new("rank-failed", message));
                }
                // SAFETY: the sender keeps its bytes until they are taken, the receiver's are its own.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        std::ptr::with_exposed_provenance::<u8>(letter.bytes),
                        std::ptr::with_exposed_provenance_mut::<u8>(*bytes),
                        *len,
                    );
                }
                letter.taken.store(true, Ordering::Release);
                *done = true;
                Ok(true)
            }
        }
    }
}
