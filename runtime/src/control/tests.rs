//! Attacks on the connections of a job, over the loopback interface: what strangers do, and what one that
//! has joined may do to the others.

use super::join::call;
use super::secret::{NONCE, Pair, random};
use super::wire::{FrameKind, HEAD, MAGIC, called};
use super::*;
use shardc_testing::{port, samples};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpStream};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

pub(super) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(super) const SECRET: &str = "a secret of sixteen bytes and more";
/// No start of three processes takes a tenth of it; each silent connection once cost a second.
pub(super) const PROMPT: Duration = Duration::from_secs(10);

pub(super) fn terms(secret: &str, timeout: u64, silence: u64) -> Terms {
    let (timeout, silence) = (Duration::from_secs(timeout), Duration::from_secs(silence));
    let (secret, began) = (Secret::of(secret.as_bytes()), Instant::now());
    Terms {
        secret,
        insecure: false,
        spare: 0,
        began,
        timeout,
        silence,
        warn: |d| eprintln!("warned: {d}"),
    }
}

pub(super) fn join(
    me: (usize, usize),
    door: Option<Door>,
    leader: &str,
    terms: Terms,
) -> Result<Control> {
    let (process, processes) = me;
    let (job, card) = (String::new(), format!("card of {process}"));
    let me = Me { process, processes, job, card };
    let print = Box::new(|text: &str| eprintln!("{text}"));
    Control::join(&me, door, leader, terms, Arc::default(), print)
}

/// A process ends, as all do.
pub(super) fn gone(c: Control) {
    c.finish().unwrap_or_else(|e| panic!("{e}"));
    c.leave();
}

/// Starts three processes, as threads, while an attack goes on; how long that took. All see each other, and
/// exchange something.
fn start_during<T>(attack: impl FnOnce(SocketAddr) -> T) -> (Duration, T) {
    let door = Door::open(0, &[HERE]).expect("a port");
    let leader = door.addresses.clone();
    let at = leader.parse().expect("an address");
    let mut doors = [Some(door), None, None];
    std::thread::scope(|s| {
        let (mut attack, mut attacked, mut began) = (Some(attack), None, Instant::now());
        let all: Vec<_> = (0..3)
            .map(|p| {
                let (door, leader) = (doors[p].take(), leader.clone());
                // Process 0 listens, and then come the attack and the others.
                if let Some(attack) = attack.take_if(|_| p == 1) {
                    attacked = Some(attack(at));
                    began = Instant::now();
                }
                s.spawn(move || {
                    let c = join((p, 3), door, &leader, terms(SECRET, 100, 30))
                        .unwrap_or_else(|e| panic!("{e}"));
                    let took = if p == 0 { Duration::ZERO } else { began.elapsed() };
                    assert_eq!(c.cards(), ["card of 0", "card of 1", "card of 2"]);
                    let all = c.gather(vec![p as u8; 3 << 20]);
                    let lens: Vec<_> = all.iter().map(|x| (x.len(), x[0])).collect();
                    let want: &[_] =
                        if p == 0 { &[(3 << 20, 0), (3 << 20, 1), (3 << 20, 2)] } else { &[] };
                    assert_eq!(lens, want);
                    assert_eq!(c.share(if p == 0 { vec![7] } else { vec![] }), [7]);
                    gone(c);
                    took
                })
            })
            .collect();
        let took = all.into_iter().map(|t| t.join().expect("a process")).max().expect("three");
        (took, attacked.expect("an attack"))
    })
}

/// The table of all, before which process 0 says who is missing.
fn table(from: &mut Incoming) -> Vec<u8> {
    loop {
        match from.read(1 << 20).expect("the table") {
            (FrameKind::Hello, table) => return table,
            (kind, _) => assert!(kind == FrameKind::Beat, "{kind:?}"),
        }
    }
}

pub(super) fn knock(at: SocketAddr, said: &[u8]) -> TcpStream {
    let mut s = TcpStream::connect(at).expect("the door is open");
    s.write_all(said).expect("room");
    s
}

#[test]
fn silent_and_slow_connections_delay_no_start() {
    for count in [30, 200, 300] {
        let (took, _held) =
            start_during(|at| (0..count).map(|_| knock(at, b"")).collect::<Vec<_>>());
        assert!(took < PROMPT, "{count} silent ones: {took:?}");
    }
    let (took, _held) = start_during(|at| {
        let mut s = knock(at, &MAGIC[..3]);
        std::thread::spawn(move || {
            let mut rest = MAGIC[3..].iter().cycle();
            while s.write_all(&[*rest.next().expect("a byte")]).is_ok() {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        // Others stop in the middle of what they say, or say too much.
        let opening = [&MAGIC[..], &[1; NONCE]].concat();
        [knock(at, &opening), knock(at, &vec![b'x'; 1 << 17]), knock(at, b"GET / HTTP/1.1\r\n\r\n")]
    });
    assert!(took < PROMPT, "slow ones: {took:?}");
}

/// A hello as the first version had it, one with a tag that was made up, and one that announces 16 GiB.
#[test]
fn a_forged_hello_joins_nothing_and_ends_nothing() {
    let (took, mut all) = start_during(|at| {
        let text = format!("{at}\n1 3\n{at}\nforged");
        let old = [b"shardc01\x00".as_slice(), &(text.len() as u64).to_le_bytes(), text.as_bytes()];
        let opening = [&MAGIC[..], &[1; NONCE]].concat();
        let forged = |len: u32, data: &[u8]| {
            let head = [&[0][..], &len.to_le_bytes(), &[9; HEAD - 5]].concat();
            [&opening[..], &head, data].concat()
        };
        let len = text.len() as u32;
        [
            knock(at, &old.concat()),
            knock(at, &forged(len, text.as_bytes())),
            knock(at, &forged(u32::MAX, text.as_bytes())),
        ]
    });
    assert!(took < PROMPT, "{took:?}");
    for (s, most) in all.iter_mut().zip([0, 2 * NONCE, 2 * NONCE]) {
        let mut got = vec![];
        // The table is shown to no stranger: a number and a proof are all that there is to be read.
        let _ = s.set_read_timeout(Some(PROMPT));
        let _ = s.read_to_end(&mut got);
        assert!(got.len() <= most, "{} bytes were shown", got.len());
        assert!(!String::from_utf8_lossy(&got).contains("card"));
    }
}

#[test]
fn without_the_secret_no_rank_is_stolen() {
    // The door stays open meanwhile: the others come when both thieves have given up.
    let (_, thieves) = start_during(|at| {
        let all = [Secret::of(b"some other secret of a job"), Secret::none()].map(|secret| {
            let terms = Terms { secret, ..terms(SECRET, 1, 30) };
            std::thread::spawn(move || join((1, 3), None, &at.to_string(), terms).err())
        });
        all.map(|thief| thief.join().expect("a thread"))
    });
    for d in thieves {
        let said = d.expect("it does not join").render();
        assert!(said.contains("does not know the secret"), "{said}");
    }
}

/// Who listens in the place of process 0, and does not know the secret, is told nothing.
#[test]
fn a_false_process_0_hears_no_card() {
    let listener = TcpListener::bind((HERE, 0)).expect("a port");
    let at = listener.local_addr().expect("bound").to_string();
    let listens = std::thread::spawn(move || {
        let (mut s, _) = listener.accept().expect("a call");
        s.write_all(&[5; 2 * NONCE]).expect("room");
        let mut heard = vec![];
        let _ = s.read_to_end(&mut heard);
        // Nobody else gets the port meanwhile.
        (heard, listener)
    });
    let d = join((1, 2), None, &at, terms(SECRET, 1, 30)).err().expect("no process 0");
    assert!(d.render().contains("does not know the secret"), "{d}");
    assert_eq!(listens.join().expect("a thread").0.len(), MAGIC.len() + NONCE);
}

/// The second of a number is refused, while the first waits for the others; one that has gone makes room.
#[test]
fn a_process_number_twice_ends_nothing_that_has_joined() {
    let door = Door::open(0, &[HERE]).expect("a port");
    let leader = door.addresses.clone();
    let at: SocketAddr = leader.parse().expect("an address");
    let come = |number: usize| {
        let secret = Secret::of(SECRET.as_bytes());
        let (mut out, from) = call(&[at], &secret, PROMPT).expect("a call");
        let hello = format!("{at}\n{number} 3\n\n{at}\nanother");
        out.write(FrameKind::Hello, hello.as_bytes()).expect("room");
        from.patience(PROMPT);
        (out, from)
    };
    std::thread::scope(|s| {
        let leads = s.spawn(|| join((0, 3), Some(door), &leader, terms(SECRET, 100, 30)));
        // One of 2, which goes, and one of 1; then another of 1, and one that is in no job of 3.
        drop(come(2));
        let one = come(1);
        for (number, why) in [(1, "two processes are number 1 of 3"), (5, "this one is `5 3`")] {
            let (kind, said) = come(number).1.read(0).expect("an answer");
            let said = String::from_utf8_lossy(&said).into_owned();
            assert!(kind == FrameKind::Refuse && said.contains(why), "{said}");
        }
        let two = s.spawn(|| join((2, 3), None, &leader, terms(SECRET, 100, 30)));
        let (mut out, mut from) = one;
        assert!(String::from_utf8_lossy(&table(&mut from)).contains("card of 2"));
        let leave = &|c: Result<Control>| gone(c.unwrap_or_else(|e| panic!("{e}")));
        let both = [
            s.spawn(move || leave(leads.join().expect("a thread"))),
            s.spawn(move || leave(two.join().expect("a thread"))),
        ];
        out.write(FrameKind::Gather, &[]).expect("sent");
        let (kind, _) = from.read(0).expect("all are done");
        assert!(kind == FrameKind::Share);
        out.write(FrameKind::Bye, &[]).expect("sent");
        both.into_iter().for_each(|b| b.join().expect("a thread"));
    });
}

/// The two ends of a connection whose sides know the secret.
fn connected() -> ((Outgoing, Incoming), (Outgoing, Incoming)) {
    let secret = Secret::of(SECRET.as_bytes());
    let listener = TcpListener::bind((HERE, 0)).expect("a port");
    let at = listener.local_addr().expect("bound");
    std::thread::scope(|s| {
        let caller = s.spawn(|| call(&[at], &secret, PROMPT).expect("a call"));
        let (mut stream, _) = listener.accept().expect("a call");
        let mut opening = [0; 8 + NONCE];
        stream.read_exact(&mut opening).expect("an opening");
        let caller_drew = opening[8..].try_into().expect("32 bytes");
        let own = random().expect("a number");
        let pair = Pair { secret: &secret, caller: caller_drew, called: own };
        stream.write_all(&[own, pair.proof()].concat()).expect("room");
        (caller.join().expect("a thread"), called(stream, &pair).expect("a connection"))
    })
}

#[test]
fn frames_are_bounded_and_sealed() {
    let ((mut out, _a), (_b, mut from)) = connected();
    let data: Vec<u8> = (0..5 << 20).map(|i| (i % 251) as u8).collect();
    std::thread::scope(|s| {
        s.spawn(|| out.write(FrameKind::Gather, &data).expect("sent"));
        let (kind, got) = from.read(data.len()).expect("read");
        assert!(kind == FrameKind::Gather && got == data);
    });
    let wrong = |r: std::io::Result<_>| {
        assert_eq!(
            r.map(|_: (FrameKind, Vec<u8>)| ()).unwrap_err().kind(),
            std::io::ErrorKind::InvalidData
        );
    };
    // More than was expected is not read to its end.
    std::thread::scope(|s| {
        s.spawn(|| out.write(FrameKind::Gather, &data));
        wrong(from.read(2 << 20));
        from.end();
    });
    let ((mut out, _a), (_b, mut from)) = connected();
    out.write(FrameKind::Beat, &vec![0; CARD_AND_MORE]).expect("sent");
    wrong(from.read(1 << 30));
    // A frame of 16 GiB cannot be announced, one of 4 GiB is refused before a byte of it is read.
    let ((out, _a), (_b, mut from)) = connected();
    out.raw(&[&[1][..], &u32::MAX.to_le_bytes(), &[0; HEAD - 5]].concat());
    wrong(from.read(1 << 34));
    // What others put into the connection, though kind and length are right.
    let ((out, _a), (_b, mut from)) = connected();
    out.raw(&[&[1][..], &2u32.to_le_bytes(), &[0; HEAD - 5], b"ab"].concat());
    wrong(from.read(1 << 34));
}
const CARD_AND_MORE: usize = super::wire::CARD + 1;

/// Frames that are changed on their way, as `tests/it/fuzz.rs` changes files: none is taken for one of ours,
/// nor is one that is left out, comes twice or has changed its place.
#[test]
fn no_changed_frame_is_believed() {
    let secret = Secret::of(SECRET.as_bytes());
    let pair = || Pair { secret: &secret, caller: [1; NONCE], called: [2; NONCE] };
    let listener = TcpListener::bind((HERE, 0)).expect("a port");
    let at = listener.local_addr().expect("bound");
    let both = || {
        let caller = TcpStream::connect(at).expect("a call");
        (caller, listener.accept().expect("a call").0)
    };
    let frames: Vec<Vec<u8>> = {
        let (caller, mut stream) = both();
        let (mut out, _from) = super::wire::calls(caller, &pair()).expect("a connection");
        let said = [
            (FrameKind::Beat, &b"rank 1 waits"[..]),
            (FrameKind::Gather, b""),
            (FrameKind::Where, b"x"),
        ];
        let mut one = |(kind, data): (FrameKind, &[u8])| {
            out.write(kind, data).expect("sent");
            let mut bytes = vec![0; HEAD + data.len()];
            stream.read_exact(&mut bytes).expect("a frame");
            bytes
        };
        said.into_iter().map(&mut one).collect()
    };
    // How many messages are read of some bytes.
    let read = |bytes: &[u8]| {
        let (mut caller, stream) = both();
        caller.write_all(bytes).expect("room");
        drop(caller);
        let (_out, mut from) = called(stream, &pair()).expect("a connection");
        std::iter::from_fn(|| from.read(1 << 10).ok()).count()
    };
    let whole = frames.concat();
    assert_eq!(read(&whole), 3);
    let order = |of: &[usize]| of.iter().flat_map(|&i| frames[i].clone()).collect::<Vec<u8>>();
    for (of, good) in [(&[1, 0, 2][..], 0), (&[0, 2], 1), (&[0, 0, 1], 1), (&[0, 1, 2, 2], 3)] {
        assert_eq!(read(&order(of)), good, "{of:?}");
    }
    let ends: Vec<usize> = (1..=3).map(|n| frames[..n].iter().map(Vec::len).sum()).collect();
    let draw = |i: u64, n: usize| {
        (u64::from(shardc_ir::rng::philox([i as u32, 0, 0, 0], [7, 7])[0]) % n as u64) as usize
    };
    for i in 0..samples(1000, 20_000) {
        let (at, change) = (draw(2 * i, whole.len()), 1 + draw(2 * i + 1, 255) as u8);
        let mut bad = whole.clone();
        bad[at] ^= change;
        let before = ends.iter().filter(|&&end| end <= at).count();
        assert_eq!(read(&bad), before, "byte {at} with {change}");
    }
}

/// Which process of how many this program is to be, where process 0 is, and how long silence may be.
const ROLE: &str = "SHARDC_TEST_PROCESS";

/// No test by itself: a process of a job that exchanges something 20 times a second until process 0's
/// standard input ends.
#[test]
fn a_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().expect("a number");
    let (me, n, port, silence) = (number(0) as usize, number(1) as usize, number(2), number(3));
    let door = (me == 0).then(|| Door::open(port as u16, &[HERE]).expect("a port"));
    let leader = format!("127.0.0.1:{port}");
    let c = join((me, n), door, &leader, terms(SECRET, 100, silence)).expect("joined");
    let ended = Arc::new(AtomicBool::new(false));
    let over = ended.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut vec![]);
        over.store(true, Ordering::Release);
    });
    for step in 0.. {
        c.gather(vec![me as u8]);
        let last = ended.load(Ordering::Acquire) && me == 0;
        if c.share(vec![u8::from(last)]) == [1] {
            break;
        }
        println!("step {step}");
        std::thread::sleep(Duration::from_millis(50));
    }
    gone(c);
}

/// Processes of a job.
pub(super) struct Job {
    all: Vec<Child>,
    out: BufReader<ChildStdout>,
    err: ChildStderr,
}

impl Job {
    /// Starts processes with these numbers, of `n`.
    fn start(numbers: &[usize], n: usize, port: u16, silence: u64) -> Job {
        let own = std::env::current_exe().expect("this program");
        let one = |p: &usize| {
            let mut c = Command::new(&own);
            c.args(["control::tests::a_process", "--exact", "--nocapture"]);
            c.env(ROLE, format!("{p} {n} {port} {silence}"));
            c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            c.spawn().expect("a process")
        };
        let mut all: Vec<Child> = numbers.iter().map(one).collect();
        let out = BufReader::new(all[0].stdout.take().expect("a pipe"));
        let err = all[0].stderr.take().expect("a pipe");
        Job { all, out, err }
    }
    /// Waits for another `count` steps of process 0.
    fn steps(&mut self, count: usize) {
        let lines = self.out.by_ref().lines().map_while(std::io::Result::ok);
        let seen = lines.filter(|l| l.contains("step ")).take(count).count();
        assert_eq!(seen, count, "{}", self.said());
    }
    fn said(&mut self) -> String {
        let mut text = String::new();
        let _ = self.err.read_to_string(&mut text);
        text
    }
    /// What another one than the first has said, once it has ended.
    fn said_by(&mut self, process: usize) -> String {
        let mut text = String::new();
        let err = self.all[process].stderr.take();
        let _ = err.expect("a pipe").read_to_string(&mut text);
        text
    }
    fn signal(&self, process: usize, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.all[process]);
        rustix::process::kill_process(pid, signal).expect("a signal");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for c in &mut self.all {
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

#[test]
fn a_process_that_is_paused_for_5_s_ends_nothing() {
    // Each of them waits for most of its time.
    std::thread::scope(|s| {
        for (who, silence, ends) in [(1, 30, false), (0, 30, false), (1, 2, true), (0, 2, true)] {
            s.spawn(move || paused(who, silence, ends));
        }
    });
}

/// Pauses a process of three for 5 s.
fn paused(paused: usize, silence: u64, ends: bool) {
    use rustix::process::Signal;
    let mut job = Job::start(&[0, 1, 2], 3, port(), silence);
    job.steps(3);
    job.signal(paused, Signal::STOP);
    std::thread::sleep(Duration::from_secs(5));
    job.signal(paused, Signal::CONT);
    if ends {
        // Process 0 says so, or if that was stopped, the next one; and it says nothing more when it goes on.
        if paused == 0 {
            assert_eq!(job.all[0].wait().expect("a child").code(), Some(6));
        }
        let said = job.said() + &job.said_by(1);
        assert_eq!(said.matches("error[").count(), 1, "{said}");
        let who = format!("process {paused} (card of {paused}) was silent for 2 s");
        assert!(said.contains(&who), "{said}");
        return;
    }
    // What was on its way, and then more.
    job.steps(30);
    job.all[0].stdin = None;
    for c in &mut job.all {
        assert!(c.wait().expect("a child").success());
    }
}

/// One that has joined and then says what no process says, or ends, is found at once.
#[test]
fn one_that_has_joined_and_lies_ends_the_job_with_one_message() {
    type Act = fn(&Outgoing);
    let acts: [(&str, Act); 3] = [
        ("sent what no process", |out| out.raw(&[&[1][..], &[255; HEAD - 1]].concat())),
        ("sent what no process", |out| out.raw(&[0; 1 << 12])),
        ("ended without a word", |out| out.end(Shutdown::Both)),
    ];
    for (words, act) in acts {
        let port = port();
        let mut job = Job::start(&[0, 1], 3, port, 30);
        let (at, secret) = (SocketAddr::new(HERE, port), Secret::of(SECRET.as_bytes()));
        let (mut out, mut from) = loop {
            if let Ok(link) = call(&[at], &secret, PROMPT) {
                break link;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        out.write(FrameKind::Hello, format!("{at}\n2 3\n\n{at}\ncard of 2").as_bytes())
            .expect("sent");
        from.patience(PROMPT * 10);
        table(&mut from);
        let start = Instant::now();
        act(&out);
        let said = job.said();
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
        assert_eq!(said.matches("error[").count(), 1, "{said}");
        assert!(said.contains(&format!("process 2 (card of 2) {words}")), "{said}");
        assert_eq!(job.all[0].wait().expect("a child").code(), Some(6));
    }
}
