//! Messages between processes: a kind, a length, bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

/// Most bytes of one message.
const MOST: u64 = 1 << 34;
/// Most bytes of what a process says of itself.
pub(super) const CARD: u64 = 1 << 16;
/// First bytes of a connection.
pub(super) const MAGIC: &[u8; 8] = b"shardc01";

/// Kinds of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// Of a process, at first: its number, its address and its card.
    Hello,
    Gather,
    Share,
    /// A sign of life, with where its ranks are.
    Beat,
    /// A cause to end, with an exit status before it.
    Fail,
    /// Say where you are, and end with this status when the connection does.
    Stop,
    Where,
    Bye,
    /// A signal has come, its number: the run is to save and end.
    Wish,
}

const KINDS: [FrameKind; 9] = [
    FrameKind::Hello,
    FrameKind::Gather,
    FrameKind::Share,
    FrameKind::Beat,
    FrameKind::Fail,
    FrameKind::Stop,
    FrameKind::Where,
    FrameKind::Bye,
    FrameKind::Wish,
];

pub(super) fn write(stream: &mut TcpStream, kind: FrameKind, data: &[u8]) -> std::io::Result<()> {
    let mut head = [0; 9];
    head[0] = kind as u8;
    head[1..].copy_from_slice(&(data.len() as u64).to_le_bytes());
    stream.write_all(&head)?;
    stream.write_all(data)
}

pub(super) fn read(stream: &mut TcpStream) -> std::io::Result<(FrameKind, Vec<u8>)> {
    read_most(stream, MOST)
}

pub(super) fn read_most(
    stream: &mut TcpStream,
    most: u64,
) -> std::io::Result<(FrameKind, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let kind = KINDS.get(usize::from(head[0])).copied();
    let len = u64::from_le_bytes(head[1..].try_into().expect("8 bytes"));
    let Some(kind) = kind.filter(|_| len <= most) else {
        return Err(ErrorKind::InvalidData.into());
    };
    let mut data = vec![];
    // Memory grows with what comes, whatever the head has promised.
    stream.take(len).read_to_end(&mut data)?;
    if (data.len() as u64) < len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, data))
}

/// The lines of a text.
pub(super) fn lines(data: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(data).split('\n').map(str::to_string).collect()
}
