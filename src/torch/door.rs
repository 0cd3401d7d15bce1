//! Where ranks of PyTorch find this process.

use super::failed;
use super::link::Link;
use shardc_ir::diag::{Diag, Result};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// Where ranks find this process, and what they show it.
pub const ADDRESS: &str = "SHARDC_ENGINE";
pub const SECRET: &str = "SHARDC_ENGINE_SECRET";
/// How long someone who knocks may take to say who it is.
const WORD: Duration = Duration::from_secs(3);
/// How often is looked whether something has happened.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// A port that ranks connect to.
pub struct Door {
    listener: TcpListener,
    secret: String,
    /// The hash of the plan.
    plan: String,
}

impl Door {
    /// For ranks of a plan of this machine, or of others, too; at a port that is free, or a certain one.
    ///
    /// # Errors
    /// `torch`.
    pub fn open(secret: String, plan: String, everywhere: bool, port: u16) -> Result<Door> {
        let none = |e: std::io::Error| failed(format!("ranks cannot be listened to: {e}"));
        let from = if everywhere { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        let listener = TcpListener::bind((from, port)).map_err(none)?;
        listener.set_nonblocking(true).map_err(none)?;
        Ok(Door { listener, secret, plan })
    }

    /// # Errors
    /// `torch`.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| failed(format!("a port has no address: {e}")))
    }

    /// Waits until so many ranks are connected, as long as nothing is wrong.
    ///
    /// # Errors
    /// `torch` with how many there are after `timeout`, and what is wrong.
    pub(super) fn meet(
        &self,
        ranks: usize,
        timeout: Duration,
        wrong: &dyn Fn() -> Option<Diag>,
    ) -> Result<Vec<Link>> {
        let since = Instant::now();
        let mut found: Vec<Link> = vec![];
        while found.len() < ranks {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let named = stream.set_nonblocking(false).and_then(|()| self.named(stream));
                    let new = |l: &Link| l.rank < ranks && found.iter().all(|k| k.rank != l.rank);
                    // Others may knock.
                    if let Some((link, plan)) = named.ok().flatten().filter(|x| new(&x.0)) {
                        if plan != self.plan {
                            return Err(other_plan(link.rank));
                        }
                        found.push(link);
                    }
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(failed(format!("a rank cannot be accepted: {e}"))),
            }
            if let Some(d) = wrong() {
                return Err(d);
            }
            if since.elapsed() > timeout {
                let n = found.len();
                return Err(failed(format!(
                    "{n} of {ranks} ranks have started after {timeout:?} (--timeout)"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(found)
    }

    /// A rank that says its number and the secret, with the hash of its plan.
    fn named(&self, stream: std::net::TcpStream) -> std::io::Result<Option<(Link, String)>> {
        let mut link = Link::new(stream);
        link.limit(Some(WORD))?;
        let said = link.introduced()?;
        link.limit(None)?;
        link.rank = said["rank"].as_u64().map_or(usize::MAX, |r| r as usize);
        let plan = said["plan"].as_str().unwrap_or_default().to_string();
        Ok((said["secret"] == self.secret).then_some((link, plan)))
    }
}

fn other_plan(rank: usize) -> Diag {
    Diag::new("plans-differ", format!("rank {rank} has another plan"))
        .rule("all processes of a job run one plan")
        .help("give all hosts the same folder, or copies of it")
}
