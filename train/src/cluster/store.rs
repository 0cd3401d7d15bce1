//! A client of torchrun's store of keys, by the protocol of PyTorch's `TCPStore`
//! (`TCPStoreBackend.hpp`, version 2): by it process 0 says where it is. All integers are little-endian.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// First bytes of a connection: `VALIDATE` and its number.
const MAGIC: u32 = 0x3c85_f7ce;
const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const CHECK: u8 = 5;
/// What `CHECK` answers if all keys are there.
const READY: u8 = 0;

/// Most bytes of a value.
const MOST: u64 = 1 << 16;
/// Time between two questions.
const AGAIN: Duration = Duration::from_millis(50);

/// A connection to the store.
pub struct Store {
    stream: TcpStream,
}

impl Store {
    /// Connects to `host:port`.
    pub fn connect(address: &str, until: Instant) -> Result<Store> {
        let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
        for a in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&a, left(until)?) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_write_timeout(Some(left(until)?))?;
                    let mut s = Store { stream };
                    let hello = [&[VALIDATE][..], &MAGIC.to_le_bytes()].concat();
                    s.stream.write_all(&hello)?;
                    return Ok(s);
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        self.stream.write_all(&[&[SET][..], &text(key), &text(value)].concat())
    }

    /// A value, as soon as somebody has set it.
    pub fn get(&mut self, key: &str, until: Instant) -> Result<String> {
        while !self.has(key, until)? {
            if left(until).is_err() {
                let what = "process 0 has not said there where it is";
                return Err(Error::new(ErrorKind::TimedOut, what));
            }
            std::thread::sleep(AGAIN);
        }
        self.stream.set_read_timeout(Some(left(until)?))?;
        self.stream.write_all(&[&[GET][..], &text(key)].concat())?;
        let mut len = [0; 8];
        self.stream.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > MOST {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut value = vec![0; len as usize];
        self.stream.read_exact(&mut value)?;
        String::from_utf8(value).map_err(|_| ErrorKind::InvalidData.into())
    }

    fn has(&mut self, key: &str, until: Instant) -> Result<bool> {
        // Once it is asked, however late.
        self.stream.set_read_timeout(Some(left(until).unwrap_or(AGAIN)))?;
        let keys = 1u64.to_le_bytes();
        self.stream.write_all(&[&[CHECK][..], &keys, &text(key)].concat())?;
        let mut answer = [0];
        self.stream.read_exact(&mut answer)?;
        Ok(answer[0] == READY)
    }
}

/// The time until then; an error if it is over.
fn left(until: Instant) -> Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A text after its length.
fn text(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    type Known = Arc<Mutex<BTreeMap<String, String>>>;

    /// As much of the store as is asked for here.
    fn answer(mut s: TcpStream, known: &Known) -> Result<()> {
        let mut hello = [0; 5];
        s.read_exact(&mut hello)?;
        assert_eq!(hello, [0, 0xce, 0xf7, 0x85, 0x3c]);
        fn word(s: &mut TcpStream) -> Result<u64> {
            let mut n = [0; 8];
            s.read_exact(&mut n)?;
            Ok(u64::from_le_bytes(n))
        }
        fn string(s: &mut TcpStream) -> Result<String> {
            let mut t = vec![0; word(s)? as usize];
            s.read_exact(&mut t)?;
            Ok(String::from_utf8(t).expect("a text"))
        }
        loop {
            let mut question = [0];
            s.read_exact(&mut question)?;
            match question[0] {
                1 => {
                    let (key, value) = (string(&mut s)?, string(&mut s)?);
                    known.lock().expect("a lock").insert(key, value);
                }
                3 => {
                    let value = known.lock().expect("a lock")[&string(&mut s)?].clone();
                    s.write_all(&text(&value))?;
                }
                5 => {
                    assert_eq!(word(&mut s)?, 1);
                    let has = known.lock().expect("a lock").contains_key(&string(&mut s)?);
                    s.write_all(&[u8::from(!has)])?;
                }
                other => panic!("question {other}"),
            }
        }
    }

    #[test]
    fn what_one_sets_another_gets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let known = Known::default();
        std::thread::spawn(move || {
            for s in listener.incoming().flatten() {
                let known = known.clone();
                std::thread::spawn(move || answer(s, &known));
            }
        });
        let time = Instant::now() + Duration::from_secs(20);
        let mut waits = Store::connect(&address, time).unwrap();
        let late = waits.get("/a", Instant::now()).unwrap_err();
        assert!(late.kind() == ErrorKind::TimedOut && late.to_string().contains("process 0"));
        let waiting = std::thread::spawn(move || waits.get("/a", time).unwrap());
        std::thread::sleep(AGAIN * 2);
        Store::connect(&address, time).unwrap().set("/a", "1.2.3.4:5 host:6").unwrap();
        assert_eq!(waiting.join().unwrap(), "1.2.3.4:5 host:6");
        assert!(Store::connect("127.0.0.1:1", time).is_err());
    }

    /// A store that is stopped takes connections, and nothing else.
    #[test]
    fn a_silent_store_is_not_waited_for_longer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let since = Instant::now();
        let until = since + Duration::from_millis(200);
        let e = Store::connect(&address, until).and_then(|mut s| s.get("/a", until)).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{e}");
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    }
}
