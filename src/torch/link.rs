//! A rank of a program of PyTorch, and what is said to it: messages of a head, which is JSON, and numbers behind it.
//!
//! ```text
//! rank  {"rank": 0, "secret": …}          it is there
//! rank  {"want": ["param", "wte"]}        until it has all that it keeps; its piece is the answer
//! here  {"step": 1, "columns": …}         {"shown": [[kind, name, microbatch, elements], …]}, and their elements
//! here  {"piece": ["param", "wte"]}       {"found": true}, and its elements
//! rank  {"failed": {…}}                   in place of an answer
//! ```
//! The head is `u32`, its length, the numbers are `u64`, theirs in bytes; all are little-endian, elements f32 and i32.

use serde::Deserialize;
use serde_json::{Value as Json, json};
use shardc_ir::diag::Diag;
use shardc_ir::func::Role;
use shardc_runtime::Numbers;
use shardc_runtime::session::{Given, Remote, RemoteFailed, Shown, StepData};
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Largest head, in bytes, and that of a first message.
const HEAD: u32 = 1 << 26;
const WORD: u32 = 1 << 12;

/// A message that was read.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub head: Json,
    data: Vec<u8>,
}

impl Message {
    /// The elements behind the head.
    fn elements(&self) -> Vec<f32> {
        self.data.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
    }
}

/// The connection of a rank.
pub(super) struct Link {
    pub rank: usize,
    stream: BufReader<TcpStream>,
}

/// What a rank says of a failure.
#[derive(Deserialize)]
struct Failure {
    own: bool,
    message: String,
    #[serde(default)]
    help: Vec<String>,
}

impl Link {
    /// Over a connection whose other end has not said which rank it is.
    pub fn new(stream: TcpStream) -> Link {
        let _ = stream.set_nodelay(true);
        Link { rank: 0, stream: BufReader::with_capacity(1 << 16, stream) }
    }

    /// Limits how long a message is waited for.
    pub fn limit(&self, time: Option<Duration>) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(time)
    }

    /// The first message of someone who may be anybody: short, and without numbers.
    pub fn introduced(&mut self) -> io::Result<Json> {
        Ok(self.received(WORD, 0)?.head)
    }

    pub fn receive(&mut self) -> io::Result<Message> {
        self.received(HEAD, u64::MAX)
    }

    fn received(&mut self, longest: u32, most: u64) -> io::Result<Message> {
        let mut sizes = [0; 12];
        self.stream.read_exact(&mut sizes)?;
        let (head, data) = sizes.split_at(4);
        let head = u32::from_le_bytes(head.try_into().expect("4 bytes"));
        let data = u64::from_le_bytes(data.try_into().expect("8 bytes"));
        if head > longest || data > most {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
        }
        let head = serde_json::from_slice(&self.bytes(u64::from(head))?)?;
        let data = self.bytes(data)?;
        Ok(Message { head, data })
    }

    /// So many bytes, for which memory is taken as they come.
    fn bytes(&mut self, n: u64) -> io::Result<Vec<u8>> {
        let mut out = vec![];
        (&mut self.stream).take(n).read_to_end(&mut out)?;
        match out.len() as u64 == n {
            true => Ok(out),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn send(&mut self, head: &Json, data: &[u8]) -> io::Result<()> {
        let head = head.to_string();
        let size = u32::try_from(head.len()).map_err(io::Error::other)?;
        let mut out = size.to_le_bytes().to_vec();
        out.extend((data.len() as u64).to_le_bytes());
        out.extend(head.as_bytes());
        let stream = self.stream.get_mut();
        stream.write_all(&out)?;
        stream.write_all(data)
    }

    /// The rank cannot be spoken with: its program has ended.
    fn lost(&self, e: &io::Error) -> RemoteFailed {
        let what = match e.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => "has ended".to_string(),
            _other => format!("cannot be spoken with: {e}"),
        };
        let cause = Diag::new("rank-failed", format!("the process of rank {} {what}", self.rank));
        // Another's failure may have ended it.
        RemoteFailed { own: false, cause }
    }

    fn answer(&mut self) -> std::result::Result<Message, RemoteFailed> {
        let got = self.receive().map_err(|e| self.lost(&e))?;
        let Some(failed) = got.head.get("failed") else { return Ok(got) };
        let said = Failure::deserialize(failed).unwrap_or_else(|_| Failure {
            own: true,
            message: "it does not say why".into(),
            help: vec![],
        });
        let what = format!("rank {} failed in PyTorch: {}", self.rank, said.message);
        let cause = said.help.into_iter().fold(Diag::new("rank-failed", what), Diag::help);
        Err(RemoteFailed { own: said.own, cause })
    }

    fn ask(&mut self, head: &Json, data: &[u8]) -> std::result::Result<Message, RemoteFailed> {
        self.send(head, data).map_err(|e| self.lost(&e))?;
        self.answer()
    }
}

fn bytes(all: &[f32]) -> Vec<u8> {
    all.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Two words of a message.
fn pair(x: &Json) -> Option<(&str, &str)> {
    Some((x.get(0)?.as_str()?, x.get(1)?.as_str()?))
}

impl Remote for Link {
    fn rank(&self) -> usize {
        self.rank
    }

    fn fill(&mut self, given: &mut Given) -> std::result::Result<(), RemoteFailed> {
        loop {
            let got = self.answer()?;
            let Some((kind, name)) = got.head.get("want").and_then(pair) else { return Ok(()) };
            let piece = given(kind, name).map_err(|cause| RemoteFailed { own: true, cause })?;
            self.send(&json!({}), &bytes(&piece)).map_err(|e| self.lost(&e))?;
        }
    }

    fn step(&mut self, d: &StepData) -> std::result::Result<Vec<Shown>, RemoteFailed> {
        let mut data = vec![];
        let mut columns = vec![];
        for (name, x) in &d.columns {
            let kind = match x {
                Numbers::I32(x) => {
                    data.extend(x.iter().flat_map(|x| x.to_le_bytes()));
                    "i32"
                }
                Numbers::F32(x) => {
                    data.extend(bytes(x));
                    "f32"
                }
            };
            columns.push(json!([name, kind, x.len()]));
        }
        let head = json!({
            "step": d.step, "lr": d.lr, "update": d.update, "loss_scale": d.loss_scale,
            "observe": d.observe, "evaluate": d.evaluate, "columns": columns,
        });
        let got = self.ask(&head, &data)?;
        let all = got.elements();
        let mut rest = &all[..];
        let mut out = vec![];
        for x in got.head["shown"].as_array().into_iter().flatten() {
            let number = |i: usize| x.get(i).and_then(Json::as_u64).map(|n| n as usize);
            let one = pair(x).zip(number(2)).zip(number(3));
            let Some((((kind, name), microbatch), n)) = one.filter(|x| x.1 <= rest.len()) else {
                return Err(self.unread());
            };
            let (own, left) = rest.split_at(n);
            rest = left;
            let (kind, name) = (kind.to_string(), name.to_string());
            out.push(Shown { kind, name, microbatch, data: own.to_vec() });
        }
        Ok(out)
    }

    fn piece(&mut self, role: &Role) -> std::result::Result<Option<Vec<f32>>, RemoteFailed> {
        let got = self.ask(&json!({ "piece": [role.kind.to_string(), &*role.name] }), &[])?;
        Ok((got.head["found"] == true).then(|| got.elements()))
    }
}

impl Link {
    fn unread(&self) -> RemoteFailed {
        let what = format!("what rank {} has sent cannot be read", self.rank);
        let cause =
            Diag::new("rank-failed", what).help("use the Python package of this version of shardc");
        RemoteFailed { own: true, cause }
    }
}
