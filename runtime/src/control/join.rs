//! How the processes of a job find each other.

use super::Me;
use super::wire::{CARD, FrameKind, MAGIC, lines, read, read_most, write};
use shardc_ir::diag::{Diag, Exit, Result};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long one that knocks may take for each piece of what it says.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a process has of the others: by process a connection, if it has one, and the lines that it
/// says of itself, its addresses and its card.
pub(super) type Met = (Vec<Option<TcpStream>>, Vec<Vec<String>>);

fn unreachable(message: String) -> Diag {
    Diag::new("cluster", message)
        .rule("every process of a job can open a connection to process 0")
        .help(
            "check that 1 job runs per address and port, and that no firewall is between the hosts",
        )
        .exit(Exit::Environment)
}

/// Where process 0 will be found: a listener, and how others find it.
pub struct Door {
    pub(super) listener: TcpListener,
    /// Addresses of this host with the listener's port, as text.
    pub addresses: String,
}

impl Door {
    /// Opens a port; any free one if it is 0.
    ///
    /// # Errors
    /// `cluster` if the port is taken.
    pub fn open(port: u16, hosts: &[IpAddr]) -> Result<Door> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            .map_err(|e| unreachable(format!("port {port} cannot be opened: {e}")))?;
        let port = listener.local_addr().map_or(port, |a| a.port());
        let all: Vec<String> =
            hosts.iter().map(|h| SocketAddr::new(*h, port).to_string()).collect();
        Ok(Door { listener, addresses: all.join(" ") })
    }
}

/// Addresses in a text, names resolved.
pub(super) fn resolve(text: &str) -> Vec<SocketAddr> {
    text.split_whitespace().flat_map(|t| t.to_socket_addrs().into_iter().flatten()).collect()
}

/// A connection to the first address that answers.
pub(super) fn connect(to: &[SocketAddr], each: Duration) -> Option<TcpStream> {
    to.iter().find_map(|a| TcpStream::connect_timeout(a, each).ok())
}

/// Process 0: waits for all others.
pub(super) fn welcome(
    n: usize,
    listener: &TcpListener,
    leader: &str,
    own: &str,
    timeout: Duration,
) -> Result<Met> {
    let start = Instant::now();
    let mut links: Vec<Option<TcpStream>> = (0..n).map(|_| None).collect();
    let mut hellos = vec![vec![]; n];
    hellos[0] = lines(own.as_bytes());
    let _ = listener.set_nonblocking(true);
    while links[1..].iter().any(Option::is_none) {
        let missing: Vec<usize> = (1..n).filter(|&i| links[i].is_none()).collect();
        if start.elapsed() > timeout {
            let s = timeout.as_secs();
            return Err(unreachable(format!("processes {missing:?} did not come within {s} s")));
        }
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let mut magic = [0; 8];
        // A stranger at the door is not one of us.
        if stream.read_exact(&mut magic).is_err() || magic != *MAGIC {
            continue;
        }
        let Ok((FrameKind::Hello, data)) = read_most(&mut stream, CARD) else { continue };
        let mut said = lines(&data);
        // Of another job, which knows another leader.
        if said.is_empty() || said.remove(0) != leader {
            continue;
        }
        let Some(number) = said.first().and_then(|s| s.parse::<usize>().ok()) else { continue };
        let Some(link) = links.get_mut(number).filter(|l| l.is_none() && number > 0) else {
            return Err(unreachable(format!("two processes are number {number} of {n}")));
        };
        said.remove(0);
        hellos[number] = said;
        *link = Some(stream);
    }
    let table: Vec<String> = hellos.iter().map(|h| h[..2.min(h.len())].join("\n")).collect();
    for link in links.iter_mut().flatten() {
        write(link, FrameKind::Hello, table.join("\n").as_bytes())
            .map_err(|e| unreachable(format!("a process has gone while all came: {e}")))?;
    }
    let _ = listener.set_nonblocking(false);
    Ok((links, hellos))
}

/// The others: find process 0.
pub(super) fn knock(me: &Me, leader: &str, own: &str, timeout: Duration) -> Result<Met> {
    let start = Instant::now();
    let mut stream = loop {
        if let Some(s) = connect(&resolve(leader), Duration::from_secs(2)) {
            break s;
        }
        if start.elapsed() > timeout {
            let s = timeout.as_secs();
            return Err(unreachable(format!("process 0 is not at {leader} after {s} s")));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let _ = stream.set_nodelay(true);
    let gone = |e| unreachable(format!("process 0 at {leader} ended the connection: {e}"));
    let hello = format!("{leader}\n{}\n{own}", me.process);
    stream
        .write_all(MAGIC)
        .and_then(|()| write(&mut stream, FrameKind::Hello, hello.as_bytes()))
        .map_err(gone)?;
    let _ = stream.set_read_timeout(Some(timeout.saturating_sub(start.elapsed()) + PATIENCE));
    let (_, data) = read(&mut stream).map_err(gone)?;
    let all = lines(&data);
    let hellos: Vec<Vec<String>> = all.chunks(2).map(<[String]>::to_vec).collect();
    if hellos.len() != me.processes {
        let (n, m) = (hellos.len(), me.processes);
        return Err(unreachable(format!("process 0 leads {n} processes, this one is of {m}")));
    }
    Ok((vec![Some(stream)], hellos))
}
