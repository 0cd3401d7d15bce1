//! Who comes to a listener, until it has shown that it is of the job.
//!
//! All are looked at in turn and none is waited for, so silent and slow ones delay nobody. Each has
//! two seconds; of more than 256 the one has to go that has come least far, of those the oldest, and one of
//! ours that had to comes again.

use super::secret::{NONCE, Pair, Secret, random};
use super::wire::{CARD, FrameKind, HEAD, Head, Incoming, MAGIC, Outgoing, called};
use shardc_ir::diag::Result;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one that comes may take to show what it is.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most that are looked at at once.
const MOST: usize = 256;
/// Time between two looks at those that have come, and after nothing could be accepted.
pub(super) const AGAIN: Duration = Duration::from_millis(5);
/// Bytes with which a connection begins: [`MAGIC`] and what the caller has drawn.
const OPENING: usize = MAGIC.len() + NONCE;

/// One that has come.
struct Pending {
    stream: TcpStream,
    from: IpAddr,
    since: Instant,
    said: Vec<u8>,
    /// Both numbers, once the caller's has come and was answered.
    drawn: Option<([u8; NONCE], [u8; NONCE])>,
}

/// One that has shown that it knows the secret, and the first message it has sent.
pub(super) struct KnownPeer {
    pub kind: FrameKind,
    pub data: Vec<u8>,
    pub out: Outgoing,
    pub incoming: Incoming,
}

/// What is to be done with a connection.
enum Next {
    Wait,
    Gone,
    Joins(FrameKind, Vec<u8>),
}

/// Listeners, and who has come to them.
pub(super) struct Acceptor {
    listeners: Vec<TcpListener>,
    secret: Secret,
    pending: VecDeque<Pending>,
    /// How many came and did not show what they should.
    pub strangers: usize,
    /// Where one comes from that speaks as those of a job do and has gone when it saw this one's proof.
    pub misled: Option<IpAddr>,
}

impl Acceptor {
    pub fn new(listeners: Vec<TcpListener>, secret: Secret) -> Acceptor {
        listeners.iter().for_each(|l| drop(l.set_nonblocking(true)));
        Acceptor { listeners, secret, pending: VecDeque::new(), strangers: 0, misled: None }
    }

    /// Waits a moment, of nobody is here until somebody comes.
    pub fn wait(&mut self) {
        let [only] = &self.listeners[..] else { return std::thread::sleep(AGAIN) };
        if !self.pending.is_empty() || only.set_nonblocking(false).is_err() {
            return std::thread::sleep(AGAIN);
        }
        let came = only.accept();
        let _ = only.set_nonblocking(true);
        match came {
            Ok((stream, from)) => self.enter(stream, from.ip()),
            // There may be too many files open.
            Err(_) => std::thread::sleep(AGAIN * 10),
        }
    }

    fn enter(&mut self, stream: TcpStream, from: IpAddr) {
        let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
        if ready.is_ok() {
            let since = Instant::now();
            self.pending.push_back(Pending { stream, from, since, said: vec![], drawn: None });
        }
    }

    /// Looks at all once; those that have shown what they are, and whether more may have come meanwhile.
    /// Waits for nothing.
    ///
    /// # Errors
    /// Those of drawing a number.
    pub fn look(&mut self) -> Result<(Vec<KnownPeer>, bool)> {
        let (mut known, mut more) = (vec![], false);
        for _ in 0..self.pending.len() {
            if let Some(conn) = self.pending.pop_front() {
                self.turn(conn, &mut known)?;
            }
        }
        for l in 0..self.listeners.len() {
            // A guard: others are looked at too, however many come.
            for _ in 0..MOST {
                let Ok((stream, from)) = self.listeners[l].accept() else { break };
                more = true;
                self.enter(stream, from.ip());
                // What one of ours says is mostly here at once.
                if let Some(conn) = self.pending.pop_back() {
                    self.turn(conn, &mut known)?;
                }
                if self.pending.len() > MOST {
                    let least = (0..self.pending.len()).min_by_key(|&i| self.pending[i].stage());
                    least.and_then(|i| self.pending.remove(i));
                    self.strangers += 1;
                }
            }
        }
        Ok((known, more))
    }

    /// Looks at one, which goes, joins, or stands behind the others.
    fn turn(&mut self, mut conn: Pending, known: &mut Vec<KnownPeer>) -> Result<()> {
        match conn.look(&self.secret)? {
            Next::Wait if conn.since.elapsed() < PATIENCE => self.pending.push_back(conn),
            Next::Joins(kind, data) => {
                let Some((caller, own)) = conn.drawn else { return Ok(()) };
                let pair = Pair { secret: &self.secret, caller, called: own };
                let both = conn.stream.set_nonblocking(false);
                if let Ok((out, mut incoming)) = both.and_then(|()| called(conn.stream, &pair)) {
                    incoming.skip();
                    known.push(KnownPeer { kind, data, out, incoming });
                }
            }
            Next::Gone if conn.drawn.is_some() => {
                self.strangers += 1;
                self.misled = Some(conn.from);
            }
            Next::Wait | Next::Gone => self.strangers += 1,
        }
        Ok(())
    }
}

impl Pending {
    /// How far it has come: it is silent, has begun as one of ours does, was answered.
    fn stage(&self) -> usize {
        usize::from(!self.said.is_empty()) + usize::from(self.drawn.is_some())
    }

    /// Reads what has come, and answers it.
    fn look(&mut self, secret: &Secret) -> Result<Next> {
        let mut part = [0; 4096];
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => return Ok(Next::Gone),
                Ok(n) => self.said.extend_from_slice(&part[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(Next::Gone),
            }
            // One that says more than it may, or begins as none of ours does, is not read to its end.
            let begins = self.said.iter().zip(MAGIC).all(|(a, b)| a == b);
            if !begins || self.said.len() > OPENING + HEAD + CARD {
                return Ok(Next::Gone);
            }
        }
        if self.said.len() < OPENING {
            return Ok(Next::Wait);
        }
        let (caller, own) = match self.drawn {
            Some(both) => both,
            None => {
                let caller = self.said[MAGIC.len()..OPENING].try_into().expect("32 bytes");
                let own = random()?;
                let pair = Pair { secret, caller, called: own };
                let answer = [own, pair.proof()].concat();
                // The buffer of a new connection has room for it.
                if self.stream.write(&answer).ok() != Some(answer.len()) {
                    return Ok(Next::Gone);
                }
                *self.drawn.insert((caller, own))
            }
        };
        let Some((head, data)) = self.said[OPENING..].split_first_chunk::<HEAD>() else {
            return Ok(Next::Wait);
        };
        let Some(head) = Head::read(head).filter(|h| h.len <= CARD) else { return Ok(Next::Gone) };
        if data.len() < head.len {
            return Ok(Next::Wait);
        }
        let mut seal = Pair { secret, caller, called: own }.to_called();
        Ok(match head.whole(&mut seal, data).filter(|_| data.len() == head.len) {
            Some(kind) => Next::Joins(kind, data.to_vec()),
            None => Next::Gone,
        })
    }
}
