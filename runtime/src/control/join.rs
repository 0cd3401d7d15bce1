//! How the processes of a job find each other.

use super::lobby::{Known, Lobby};
use super::secret::{NONCE, Pair, Secret, random};
use super::wire::{FrameKind, Incoming, MAGIC, Outgoing, calls, lines};
use super::{Me, Terms};
use shardc_ir::diag::{Diag, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long the other side may take to show that it knows the secret.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two looks at who has come, or two calls.
const AGAIN: Duration = Duration::from_millis(5);
/// Time between two looks at whether those that have come are there yet.
const THERE: Duration = Duration::from_millis(100);
/// Most bytes of the table of all processes.
const TABLE: usize = 1 << 26;

/// A connection to another process.
pub(super) type Link = (Outgoing, Incoming);

/// What a process has of the others: by process a connection, if it has one, and the lines that it
/// says of itself, its addresses and its card; and where it listens itself.
pub(super) struct Met {
    pub links: Vec<Option<Link>>,
    pub hellos: Vec<Vec<String>>,
    pub listeners: Vec<TcpListener>,
}

fn unreachable(message: String) -> Diag {
    Diag::new("cluster", message)
        .rule("every process of a job can open a connection to process 0")
        .help(
            "check that 1 job runs per address and port, and that no firewall is between the hosts",
        )
}

/// Where process 0 will be found: listeners, and how others find them.
pub struct Door {
    listeners: Vec<TcpListener>,
    /// Where it listens, as text.
    pub addresses: String,
}

impl Door {
    /// Opens a port, any free one if it is 0, at each of these addresses of this host that there is.
    ///
    /// # Errors
    /// `cluster` if it opens at none.
    pub fn open(port: u16, hosts: &[IpAddr]) -> Result<Door> {
        let (mut listeners, mut last) = (vec![], None);
        for host in hosts {
            match TcpListener::bind((*host, port)) {
                Ok(l) => listeners.push(l),
                Err(e) => last = Some((host, e)),
            }
        }
        let all = listeners.iter().filter_map(|l| l.local_addr().ok());
        let addresses = all.map(|a| a.to_string()).collect::<Vec<_>>().join(" ");
        match (listeners.is_empty(), last) {
            (false, _) => Ok(Door { listeners, addresses }),
            (true, Some((host, e))) => {
                Err(unreachable(format!("port {port} of {host} cannot be opened: {e}")))
            }
            (true, None) => Err(unreachable("this host has no address".into())),
        }
    }

    /// Whether others than processes of this host can reach it.
    pub fn is_far(&self) -> bool {
        let near = |l: &TcpListener| l.local_addr().is_ok_and(|a| a.ip().is_loopback());
        !self.listeners.iter().all(near)
    }
}

/// Addresses in a text, names resolved.
pub(super) fn resolve(text: &str) -> Vec<SocketAddr> {
    text.split_whitespace().flat_map(|t| t.to_socket_addrs().into_iter().flatten()).collect()
}

/// Calls a process: a connection to the first address where one answers that knows the secret. Nothing
/// is said before it has shown that.
pub(super) fn call(to: &[SocketAddr], secret: &Secret, each: Duration) -> std::io::Result<Link> {
    let mut last = std::io::Error::from(ErrorKind::NotFound);
    for address in to {
        match call_one(address, secret, each) {
            Ok(link) => return Ok(link),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn call_one(to: &SocketAddr, secret: &Secret, each: Duration) -> std::io::Result<Link> {
    let mut stream = TcpStream::connect_timeout(to, each)?;
    let until = Instant::now() + PATIENCE;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let caller = random().map_err(|d| std::io::Error::other(d.message))?;
    stream.write_all(&[&MAGIC[..], &caller].concat())?;
    let (mut called, mut proof) = ([0; NONCE], [0; NONCE]);
    read_until(&mut stream, &mut called, until)?;
    read_until(&mut stream, &mut proof, until)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let pair = Pair { secret, caller, called };
    if !pair.is_proof(proof) {
        return Err(std::io::Error::new(
            ErrorKind::PermissionDenied,
            "what answers does not know the secret of this job",
        ));
    }
    calls(stream, &pair)
}

/// Fills `to` until then, however slowly the bytes come.
fn read_until(stream: &mut TcpStream, to: &mut [u8], until: Instant) -> std::io::Result<()> {
    let mut have = 0;
    while have < to.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut to[have..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// What one that has come says of itself, read.
struct Hello {
    number: usize,
    said: Vec<String>,
}

impl Hello {
    /// Reads it; why it cannot join, if so.
    fn read(known: &Known, leader: &str, n: usize) -> std::result::Result<Hello, String> {
        let mut said = lines(&known.data);
        if known.kind != FrameKind::Hello || said.len() < 4 {
            return Err("this is not a hello of a process".into());
        }
        if said[0] != leader {
            return Err(format!("this is process 0 of another job, at {leader}"));
        }
        let words: Vec<usize> = said[1].split(' ').filter_map(|w| w.parse().ok()).collect();
        match words[..] {
            [number, of] if of == n && (1..n).contains(&number) => {
                Ok(Hello { number, said: said.split_off(2) })
            }
            [_, of] if of != n => {
                Err(format!("process 0 leads {n} processes, this one is of {of}"))
            }
            _ => Err(format!("process 0 leads {n} processes, this one is `{}`", said[1])),
        }
    }
}

/// Process 0: waits for all others. One whose connection ends meanwhile is waited for again.
pub(super) fn welcome(
    n: usize,
    door: &Door,
    leader: &str,
    own: &str,
    terms: &Terms,
) -> Result<Met> {
    let (start, mut looked) = (Instant::now(), Instant::now());
    let mut links: Vec<Option<Link>> = (0..n).map(|_| None).collect();
    let mut hellos = vec![vec![]; n];
    hellos[0] = lines(own.as_bytes());
    let mut lobby = Lobby::new(&door.listeners, &terms.secret);
    loop {
        for mut known in lobby.look()? {
            let hello = Hello::read(&known, leader, n).and_then(|h| match &links[h.number] {
                Some((out, _)) if !out.is_over() => {
                    Err(format!("two processes are number {} of {n}", h.number))
                }
                _ => Ok(h),
            });
            match hello {
                Ok(Hello { number, said }) => {
                    hellos[number] = said;
                    links[number] = Some((known.out, known.incoming));
                }
                Err(why) => {
                    let _ = known.out.write(FrameKind::Refuse, why.as_bytes());
                }
            }
        }
        let all_came = links[1..].iter().all(Option::is_some);
        if all_came || looked.elapsed() > THERE {
            looked = Instant::now();
            for link in &mut links {
                link.take_if(|l| l.0.is_over());
            }
        }
        let missing: Vec<usize> = (1..n).filter(|&i| links[i].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        if start.elapsed() > terms.timeout {
            return Err(late(&missing, &hellos, lobby.strangers, terms.timeout));
        }
        std::thread::sleep(AGAIN);
    }
    let table: Vec<String> = hellos.iter().map(|h| h[..2.min(h.len())].join("\n")).collect();
    for (out, _) in links.iter_mut().flatten() {
        out.patience(terms.silence);
        // One that has gone by now is found when it is listened to.
        let _ = out.write(FrameKind::Hello, table.join("\n").as_bytes());
    }
    Ok(Met { links, hellos, listeners: vec![] })
}

/// Not all have come.
fn late(missing: &[usize], hellos: &[Vec<String>], strangers: usize, after: Duration) -> Diag {
    let s = after.as_secs();
    let mut d = unreachable(format!("processes {missing:?} did not come within {s} s"));
    for &p in missing.iter().filter(|&&p| !hellos[p].is_empty()).take(8) {
        let card = hellos[p].get(1).map_or("", |c| c);
        d = d.why(format!("process {p} ({card}) had come, and its connection has ended"));
    }
    if strangers > 0 {
        d = d.why(format!("{strangers} connections did not show the secret of this job"));
    }
    d
}

/// The others: find process 0, and listen where it is reached from.
pub(super) fn knock(me: &Me, leader: &str, card: &str, terms: &Terms) -> Result<Met> {
    let start = Instant::now();
    let limit = terms.timeout.as_secs();
    let mut why = None;
    loop {
        let left = terms.timeout.saturating_sub(start.elapsed());
        let last = match attempt(me, leader, card, terms, left) {
            Ok(met) => return met,
            Err(e) => e,
        };
        // That something else listens there says more than that nobody does.
        if why.as_ref().is_none_or(|w: &std::io::Error| w.kind() != ErrorKind::PermissionDenied) {
            why = Some(last);
        }
        if start.elapsed() > terms.timeout {
            let d = unreachable(format!("process 0 is not at {leader} after {limit} s"));
            return Err(d.why(why.map_or(String::new(), |w| w.to_string())));
        }
        std::thread::sleep(AGAIN * 4);
    }
}

/// One call of process 0; an error if there may be more luck later.
fn attempt(
    me: &Me,
    leader: &str,
    card: &str,
    terms: &Terms,
    left: Duration,
) -> std::io::Result<Result<Met>> {
    let to = resolve(leader);
    let far = to.iter().find(|a| !a.ip().is_loopback());
    if let Some(far) = far.filter(|_| !terms.trusts()) {
        return Ok(Err(no_secret(&far.to_string())));
    }
    let (mut out, mut incoming) = call(&to, &terms.secret, PATIENCE)?;
    // Others reach this process where process 0 does.
    let door = match Door::open(0, &[incoming.own_address()?]) {
        Ok(door) => door,
        Err(d) => return Ok(Err(d)),
    };
    let numbers = format!("{} {}", me.process, me.processes);
    let hello = format!("{leader}\n{numbers}\n{}\n{card}", door.addresses);
    out.write(FrameKind::Hello, hello.as_bytes())?;
    incoming.patience(left.max(PATIENCE) + PATIENCE);
    let (kind, data) = incoming.read(TABLE)?;
    if kind == FrameKind::Refuse {
        return Ok(Err(unreachable(String::from_utf8_lossy(&data).into_owned())));
    }
    let all = lines(&data);
    let hellos: Vec<Vec<String>> = all.chunks(2).map(<[String]>::to_vec).collect();
    if kind != FrameKind::Hello || hellos.len() != me.processes {
        return Ok(Err(unreachable(format!("process 0 at {leader} shows no table of all"))));
    }
    Ok(Ok(Met { links: vec![Some((out, incoming))], hellos, listeners: door.listeners }))
}

/// A job without a secret that others than processes of this host could join.
pub fn no_secret(place: &str) -> Diag {
    Diag::new("no-secret", format!("{place} can be reached from elsewhere, and the job has no secret"))
        .rule("without a secret, processes connect only over the loopback interface of 1 host")
        .help("export SHARDC_SECRET_FILE=FILE on all hosts, a file of mode 0600 with 16 random bytes or more; shardc launch-script writes one")
        .help("on 1 host, export MASTER_ADDR=127.0.0.1")
        .help("--insecure-control, where nobody else can reach these hosts")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It says a byte each time before a read is late: 64 bytes would take a minute and a half.
    #[test]
    fn a_listener_that_is_slow_holds_no_call() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let at = listener.local_addr().expect("bound");
        let slow = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().expect("a call");
            let mut said = 0;
            while said < 2 * NONCE && s.write_all(&[5]).is_ok() {
                said += 1;
                std::thread::sleep(PATIENCE * 3 / 4);
            }
            said
        });
        let start = Instant::now();
        let called = call(&[at], &Secret::of(b"a secret of sixteen bytes"), PATIENCE);
        assert!(called.is_err(), "64 bytes of 5 are not a proof");
        assert!(start.elapsed() < PATIENCE * 2, "{:?}", start.elapsed());
        assert!(slow.join().expect("a thread") < 2 * NONCE);
    }
}
