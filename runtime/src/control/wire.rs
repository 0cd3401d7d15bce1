//! Messages between processes, in frames: a kind, a length, a tag by which nobody else can have made the
//! frame, bytes.

use super::secret::{Pair, Seal, TAG};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// Most bytes of one frame; a longer message is several.
const FRAME: usize = 1 << 20;
/// Most bytes of what a process says of itself, and of any message that is not for [`FrameKind::Gather`]
/// or [`FrameKind::Share`].
pub(super) const CARD: usize = 1 << 16;
/// First bytes of a connection.
pub(super) const MAGIC: &[u8; 8] = b"shardc02";
/// Bytes before the data of a frame.
pub(super) const HEAD: usize = 5 + TAG;
/// In the byte of the kind: the message goes on in the next frame.
const MORE: u8 = 0x80;

/// Kinds of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// Of a process, at first: its number, its address and its card.
    Hello,
    Gather,
    Share,
    /// A sign of life, with where its ranks are; process 0 answers it.
    Beat,
    /// A cause to end, with an exit status before it.
    Fail,
    /// Say where you are, and end with this status when the connection does.
    Stop,
    Where,
    Bye,
    /// A signal has come, its number: the run is to save and end.
    Wish,
    /// Why a process that has come does not join.
    Refuse,
}

const KINDS: [FrameKind; 10] = [
    FrameKind::Hello,
    FrameKind::Gather,
    FrameKind::Share,
    FrameKind::Beat,
    FrameKind::Fail,
    FrameKind::Stop,
    FrameKind::Where,
    FrameKind::Bye,
    FrameKind::Wish,
    FrameKind::Refuse,
];

impl FrameKind {
    /// Most bytes of a message of this kind, where those of data may have `data`.
    fn most(self, data: usize) -> usize {
        match self {
            FrameKind::Gather | FrameKind::Share => data,
            // The table of all processes, to one that has proved who it is.
            FrameKind::Hello => data.max(CARD),
            _ => CARD,
        }
    }
}

/// What stands before the data of a frame.
pub(super) struct Head {
    kind: FrameKind,
    more: bool,
    pub len: usize,
    tag: [u8; TAG],
    /// What the tag is of, beside the data.
    said: [u8; 5],
}

impl Head {
    /// Reads a head; `None` if there is no such frame.
    pub fn read(bytes: &[u8; HEAD]) -> Option<Head> {
        let kind = *KINDS.get(usize::from(bytes[0] & !MORE))?;
        let len = u32::from_le_bytes(bytes[1..5].try_into().expect("4 bytes")) as usize;
        let (said, tag) = (bytes[..5].try_into().expect("5"), bytes[5..].try_into().expect("tag"));
        (len <= FRAME).then_some(Head { kind, more: bytes[0] & MORE != 0, len, tag, said })
    }
    /// The kind of a whole message of one frame, if the tag is that of the next frame.
    pub fn whole(&self, seal: &mut Seal, data: &[u8]) -> Option<FrameKind> {
        (seal.is_next(&self.said, data, self.tag) && !self.more).then_some(self.kind)
    }
}

/// The writing side of a connection.
pub(super) struct Outgoing {
    stream: TcpStream,
    seal: Seal,
}

/// The reading side of a connection.
pub(super) struct Incoming {
    stream: TcpStream,
    seal: Seal,
}

/// Both sides of a connection of the one that was called.
pub(super) fn called(stream: TcpStream, pair: &Pair) -> std::io::Result<(Outgoing, Incoming)> {
    let out = Outgoing { stream: stream.try_clone()?, seal: pair.to_caller() };
    Ok((out, Incoming { stream, seal: pair.to_called() }))
}

/// Both sides of a connection of the one that has called.
pub(super) fn calls(stream: TcpStream, pair: &Pair) -> std::io::Result<(Outgoing, Incoming)> {
    let out = Outgoing { stream: stream.try_clone()?, seal: pair.to_called() };
    Ok((out, Incoming { stream, seal: pair.to_caller() }))
}

impl Outgoing {
    /// Sends a message. After an error the connection has ended: nobody could read what follows.
    pub fn write(&mut self, kind: FrameKind, data: &[u8]) -> std::io::Result<()> {
        let mut parts = data.chunks(FRAME).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let more = if parts.peek().is_some() { MORE } else { 0 };
            let mut head = [0; HEAD];
            head[0] = kind as u8 | more;
            head[1..5].copy_from_slice(&(part.len() as u32).to_le_bytes());
            let tag = self.seal.next(&head[..5], part);
            head[5..].copy_from_slice(&tag);
            let sent = self.stream.write_all(&head).and_then(|()| self.stream.write_all(part));
            if sent.is_err() {
                self.end(Shutdown::Both);
                return sent;
            }
            if more == 0 {
                return Ok(());
            }
        }
    }
    pub fn end(&self, how: Shutdown) {
        let _ = self.stream.shutdown(how);
    }
    /// Puts bytes into the connection that no tag is made for.
    #[cfg(test)]
    pub fn raw(&self, bytes: &[u8]) {
        (&self.stream).write_all(bytes).expect("room");
    }
    /// Whether the other side has ended the connection, or says what it should not yet.
    pub fn is_over(&self) -> bool {
        let _ = self.stream.set_nonblocking(true);
        let found = self.stream.peek(&mut [0]);
        let _ = self.stream.set_nonblocking(false);
        !found.is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
    }
    /// How long a write may take without a byte that goes.
    pub fn patience(&self, most: Duration) {
        let _ = self.stream.set_write_timeout(Some(most));
    }
}

impl Incoming {
    /// The first message was read before there was this.
    pub fn skip(&mut self) {
        self.seal.next(&[], &[]);
    }
    #[cfg(test)]
    pub fn end(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
    /// The address of this host at which the other side is reached.
    pub fn own_address(&self) -> std::io::Result<std::net::IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// How long a read may wait for the next byte.
    pub fn patience(&self, most: Duration) {
        let _ = self.stream.set_read_timeout(Some(most));
    }

    /// A message, of at most `data` bytes where it carries data. Memory grows with what comes, whatever
    /// a head promises.
    ///
    /// # Errors
    /// `InvalidData` for what is not a message of the other side, and those of reading.
    pub fn read(&mut self, data: usize) -> std::io::Result<(FrameKind, Vec<u8>)> {
        let wrong = || std::io::Error::from(ErrorKind::InvalidData);
        let (mut all, mut kind) = (vec![], None);
        loop {
            let mut head = [0; HEAD];
            self.stream.read_exact(&mut head)?;
            let h = Head::read(&head).ok_or_else(wrong)?;
            let start = all.len();
            let same = *kind.get_or_insert(h.kind) == h.kind;
            if !same || start + h.len > h.kind.most(data) {
                return Err(wrong());
            }
            (&mut self.stream).take(h.len as u64).read_to_end(&mut all)?;
            if all.len() - start < h.len {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if !self.seal.is_next(&h.said, &all[start..], h.tag) {
                return Err(wrong());
            }
            if !h.more {
                return Ok((h.kind, all));
            }
        }
    }
}

/// The lines of a text.
pub(super) fn lines(data: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(data).split('\n').map(str::to_string).collect()
}
