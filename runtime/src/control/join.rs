//! How the processes of a job find each other.

use super::acceptor::{AGAIN, Acceptor, KnownPeer};
use super::door::{Door, unreachable};
use super::secret::{NONCE, Pair, Secret, random};
use super::watch::late;
use super::wire::{FrameKind, Incoming, MAGIC, Outgoing, calls, lines};
use super::{AT_ONCE, BEAT, Me, Terms, is_late};
use shardc_ir::diag::{Diag, Result, one_line};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long the other side may take to show that it knows the secret.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the first call of process 0 may take to be answered by the system; each after that twice as long.
/// What waits behind others is dropped there, and would come again after a second only.
const FIRST: Duration = Duration::from_millis(250);
/// How long what listens in the place of process 0 may show another secret: a job before this one may be
/// about to end. Where process 0 may be at another port, it may have to come yet.
const ANOTHER: [Duration; 2] = [Duration::from_millis(1500), Duration::from_secs(5)];
/// After so long process 0 says for whom it waits.
const QUIET: Duration = Duration::from_secs(10);
/// Missing processes that are listed.
const LISTED: usize = 16;
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

/// Addresses in a text, names resolved.
///
/// # Errors
/// That of the last name, if none has an address: `NotFound`, with the name.
pub(super) fn resolve(text: &str) -> std::io::Result<Vec<SocketAddr>> {
    let (mut all, mut last) = (vec![], "it is empty".to_string());
    for name in text.split_whitespace() {
        match name.to_socket_addrs() {
            Ok(found) => all.extend(found),
            Err(e) => last = format!("{name} has no address: {e}"),
        }
    }
    if all.is_empty() { Err(std::io::Error::new(ErrorKind::NotFound, last)) } else { Ok(all) }
}

/// Calls a process: a connection to the first address where one answers that knows the secret. Nothing
/// is said before it has shown that.
pub(super) fn call(to: &[SocketAddr], secret: &Secret, each: Duration) -> std::io::Result<Link> {
    call_within(to, secret, (each, PATIENCE))
}

/// The same: how long each may take to be connected to, and to show that.
fn call_within(
    to: &[SocketAddr],
    secret: &Secret,
    each: (Duration, Duration),
) -> std::io::Result<Link> {
    let mut last = std::io::Error::from(ErrorKind::NotFound);
    for address in to {
        match call_one(address, secret, each) {
            Ok(link) => return Ok(link),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn call_one(
    to: &SocketAddr,
    secret: &Secret,
    (connect, answer): (Duration, Duration),
) -> std::io::Result<Link> {
    let mut stream = TcpStream::connect_timeout(to, connect)?;
    let until = Instant::now() + answer;
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
    fn read(
        known: &KnownPeer,
        leader: &str,
        me: &Me,
    ) -> std::result::Result<Hello, (&'static str, String)> {
        let (n, wrong) = (me.processes, |why: String| Err(("cluster", why)));
        let mut said = lines(&known.data);
        if known.kind != FrameKind::Hello || said.len() < 5 {
            return wrong("this is not a hello of a process of this version of shardc".into());
        }
        if said[0] != leader {
            return Err((OTHER, format!("this is process 0 of another job, at {leader}")));
        }
        if said[2] != me.job {
            let of = |job: &str| match job {
                "" => "without a name".to_string(),
                job => format!("`{}`", one_line(job)),
            };
            let (own, theirs) = (of(&me.job), of(&said[2]));
            return Err((
                OTHER,
                format!(
                    "this is process 0 of the job {own}, at {leader}, and not of that {theirs}; \
                     SHARDC_JOB, which names a job before its launcher does, is set for all of \
                     its processes or for none"
                ),
            ));
        }
        let words: Vec<usize> = said[1].split(' ').filter_map(|w| w.parse().ok()).collect();
        match words[..] {
            [number, of] if of == n && (1..n).contains(&number) => {
                Ok(Hello { number, said: said.split_off(3) })
            }
            [_, of] if of != n => {
                wrong(format!("process 0 leads {n} processes, this one is of {of}"))
            }
            _ => wrong(format!("process 0 leads {n} processes, this one is `{}`", said[1])),
        }
    }
}

/// Why a process of another job is refused that has the same secret; it may look elsewhere.
const OTHER: &str = "another-job";

/// The processes that have not come, as text.
fn listed(missing: &[usize]) -> String {
    match missing {
        [one] => format!("process {one}"),
        few if few.len() <= LISTED => format!("processes {few:?}"),
        many => format!("processes {:?} and {} more", &many[..LISTED], many.len() - LISTED),
    }
}

/// What process 0 knows while it waits for the others.
struct Waiting {
    links: Vec<Option<Link>>,
    hellos: Vec<Vec<String>>,
    /// Why the last that was refused was that.
    refused: Option<String>,
    /// That one was refused, that one has another secret, and for whom it waits is said once each.
    said: [bool; 3],
}

impl Waiting {
    /// One that knows the secret joins, or is told why it does not.
    fn enter(&mut self, mut known: KnownPeer, leader: &str, me: &Me) {
        let n = me.processes;
        let hello = Hello::read(&known, leader, me).and_then(|h| match &self.links[h.number] {
            Some((out, _)) if !out.is_over() => {
                Err(("cluster", format!("two processes are number {} of {n}", h.number)))
            }
            _ => Ok(h),
        });
        match hello {
            Ok(Hello { number, said }) => {
                known.out.patience(AT_ONCE);
                self.hellos[number] = said;
                self.links[number] = Some((known.out, known.incoming));
            }
            Err((code, why)) => {
                let _ = known.out.write(FrameKind::Refuse, format!("{code}\n{why}").as_bytes());
                self.refused = Some(why);
            }
        }
    }

    /// Says what the user should know before the time is over, once each.
    fn warn(&mut self, acceptor: &Acceptor, missing: &[usize], terms: &Terms) {
        let refused = self.refused.as_ref().map(|why| format!("a process was refused: {why}"));
        let misled = acceptor.misled.map(|from| {
            format!("a process of {from} calls process 0, and does not know the secret of this job")
        });
        let quiet = (terms.began.elapsed() > QUIET).then(|| {
            let (of, s) = (listed(missing), QUIET.as_secs());
            format!("{of} did not come within {s} s: process 0 waits")
        });
        for (said, message) in self.said.iter_mut().zip([refused, misled, quiet]) {
            let Some(message) = message.filter(|_| !*said) else { continue };
            *said = true;
            (terms.warn)(unreachable(message));
        }
    }

    /// Tells those that have joined for whom all wait: which is a sign of life too.
    fn tell(&mut self, kind: FrameKind, text: &str) {
        for (out, _) in self.links.iter_mut().flatten() {
            // One that has gone by now is found at the next look.
            let _ = out.write(kind, text.as_bytes());
        }
    }
}

/// Process 0: waits for all others. One whose connection ends meanwhile is waited for again.
pub(super) fn welcome(me: &Me, door: Door, leader: &str, own: &str, terms: &Terms) -> Result<Met> {
    let n = me.processes;
    let (mut looked, mut told) = (Instant::now(), Instant::now());
    let (links, hellos) = ((0..n).map(|_| None).collect(), vec![vec![]; n]);
    let mut w = Waiting { links, hellos, refused: None, said: [false; 3] };
    w.hellos[0] = lines(own.as_bytes());
    let mut acceptor = Acceptor::new(door.listeners, terms.secret.clone());
    loop {
        let (came, more) = acceptor.look()?;
        came.into_iter().for_each(|known| w.enter(known, leader, me));
        let all_came = w.links[1..].iter().all(Option::is_some);
        if all_came || looked.elapsed() > THERE {
            looked = Instant::now();
            for link in &mut w.links {
                link.take_if(|l| l.0.is_over());
            }
        }
        let missing: Vec<usize> = (1..n).filter(|&i| w.links[i].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        if terms.left().is_zero() {
            w.tell(FrameKind::Refuse, &format!("start-timeout\n{}", listed(&missing)));
            return Err(not_all(&missing, &w, acceptor.strangers, terms));
        }
        w.warn(&acceptor, &missing, terms);
        if told.elapsed() > BEAT / 2 {
            told = Instant::now();
            w.tell(FrameKind::Beat, &listed(&missing));
        }
        if !more {
            std::thread::sleep(AGAIN);
        }
    }
    let table: Vec<String> = w.hellos.iter().map(|h| h[..2.min(h.len())].join("\n")).collect();
    w.links.iter().flatten().for_each(|l| l.0.patience(terms.silence));
    // One that has gone by now is found when it is listened to.
    w.tell(FrameKind::Hello, &table.join("\n"));
    Ok(Met { links: w.links, hellos: w.hellos, listeners: vec![] })
}

/// Not all have come, in one line.
fn not_all(missing: &[usize], w: &Waiting, strangers: usize, terms: &Terms) -> Diag {
    let mut said = format!("while processes join: {} did not come", listed(missing));
    for &p in missing.iter().filter(|&&p| !w.hellos[p].is_empty()).take(8) {
        let card = w.hellos[p].get(1).map_or("", |c| c);
        said += &format!("; process {p} ({card}) had come, and its connection has ended");
    }
    if let Some(why) = &w.refused {
        said += &format!("; one was refused: {why}");
    }
    if strangers > 0 {
        said += &format!("; {strangers} connections did not show the secret of this job");
    }
    late(0, terms.timeout, &said)
}

/// The others: find process 0, and listen where it is reached from.
pub(super) fn knock(me: &Me, leader: &str, card: &str, terms: &Terms) -> Result<Met> {
    let (mut each, mut why, mut another, mut told) = (FIRST, None, None, false);
    loop {
        let last = match attempt(me, leader, card, terms, each) {
            Ok(met) => return met,
            Err(e) => e,
        };
        if is_late(&last) {
            each = PATIENCE.min(each * 2);
        }
        match last.kind() {
            ErrorKind::PermissionDenied => {
                let since = *another.get_or_insert_with(Instant::now);
                if since.elapsed() > ANOTHER[usize::from(terms.spare > 0)] {
                    return Err(unreachable(format!("process 0 is not at {leader}: {last}"))
                        .help("give all processes the same secret: SHARDC_SECRET_FILE"));
                }
            }
            // Names of a cluster that starts may come later.
            ErrorKind::NotFound if !std::mem::replace(&mut told, true) => {
                let left = terms.left().as_secs();
                let said = format!("process 0 is looked for {left} s more (MASTER_ADDR): {last}");
                (terms.warn)(Diag::new("cluster", said));
            }
            _ => another = None,
        }
        // That something else listens there says more than that nobody does.
        if why.as_ref().is_none_or(|w: &std::io::Error| w.kind() != ErrorKind::PermissionDenied) {
            why = Some(last);
        }
        if terms.left().is_zero() {
            let why = why.map_or(String::new(), |w| format!(": {w}"));
            let said = format!("while processes join: process 0 is not at {leader}{why}");
            return Err(late(me.process, terms.timeout, &said));
        }
        std::thread::sleep((AGAIN * 4).min(terms.left()));
    }
}

/// One call of process 0; an error if there may be more luck later.
fn attempt(
    me: &Me,
    leader: &str,
    card: &str,
    terms: &Terms,
    each: Duration,
) -> std::io::Result<Result<Met>> {
    let to = resolve(leader)?;
    let far = to.iter().find(|a| !a.ip().is_loopback());
    if let Some(far) = far.filter(|_| !terms.trusts()) {
        return Ok(Err(no_secret(&far.to_string())));
    }
    let mut why = None;
    for next in 0..=terms.spare {
        let moved = |a: &SocketAddr| Some(SocketAddr::new(a.ip(), a.port().checked_add(next)?));
        let to: Vec<SocketAddr> = to.iter().filter_map(moved).collect();
        match enter(me, (leader, &to), card, terms, each) {
            Ok(met) => return Ok(met),
            Err(e) => why = why.or(Some(e)),
        }
        // A host that cannot be reached is so at no port; what listens and says nothing is somebody else.
        if why.as_ref().is_some_and(|e| e.kind() == ErrorKind::TimedOut) {
            break;
        }
    }
    Err(why.expect("a port was called"))
}

/// The same at one port.
fn enter(
    me: &Me,
    (leader, to): (&str, &[SocketAddr]),
    card: &str,
    terms: &Terms,
    each: Duration,
) -> std::io::Result<Result<Met>> {
    let answer = PATIENCE.min(terms.left());
    let (mut out, mut incoming) = call_within(to, &terms.secret, (each, answer))?;
    // Others reach this process where process 0 does.
    let door = match Door::open(0, &[incoming.own_address()?]) {
        Ok(door) => door,
        Err(d) => return Ok(Err(d)),
    };
    let numbers = format!("{} {}", me.process, me.processes);
    let hello = format!("{leader}\n{numbers}\n{}\n{}\n{card}", me.job, door.addresses);
    out.write(FrameKind::Hello, hello.as_bytes())?;
    let table = match table(me, leader, &mut incoming, terms)? {
        Ok(table) => table,
        Err(d) => return Ok(Err(d)),
    };
    let hellos: Vec<Vec<String>> = table.chunks(2).map(<[String]>::to_vec).collect();
    if hellos.len() != me.processes {
        return Ok(Err(unreachable(format!("process 0 at {leader} shows no table of all"))));
    }
    Ok(Ok(Met { links: vec![Some((out, incoming))], hellos, listeners: door.listeners }))
}

/// The table of all, once they have come; until then process 0 says who has not.
fn table(
    me: &Me,
    leader: &str,
    incoming: &mut Incoming,
    terms: &Terms,
) -> std::io::Result<Result<Vec<String>>> {
    let late = |why: &str| {
        let waited = terms.began.elapsed().min(terms.timeout);
        Ok(Err(late(me.process, waited, &format!("while processes join: {why}"))))
    };
    let mut missing: Option<(Instant, String)> = None;
    loop {
        // A moment more: process 0 may be about to say so, if it began at the same time.
        incoming.patience(terms.left() + AT_ONCE);
        match incoming.read(TABLE) {
            Ok((FrameKind::Hello, data)) => return Ok(Ok(lines(&data))),
            Ok((FrameKind::Beat, data)) => {
                missing = Some((Instant::now(), String::from_utf8_lossy(&data).into_owned()));
            }
            Ok((FrameKind::Refuse, data)) => {
                let text = String::from_utf8_lossy(&data).into_owned();
                return match text.split_once('\n').unwrap_or(("", &text)) {
                    ("start-timeout", whom) => late(&format!("{whom} did not come")),
                    (OTHER, why) if terms.spare > 0 => {
                        Err(std::io::Error::new(ErrorKind::ConnectionRefused, why))
                    }
                    (_, why) => Ok(Err(unreachable(why.to_string()))),
                };
            }
            Ok(_) => return Err(ErrorKind::InvalidData.into()),
            Err(e) if !is_late(&e) => return Err(e),
            Err(_) => {}
        }
        if terms.left().is_zero() {
            return match missing.filter(|m| m.0.elapsed() < BEAT * 2) {
                Some((_, whom)) => late(&format!("{whom} did not come")),
                None => late(&format!("process 0 at {leader} says nothing any more")),
            };
        }
    }
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
