//! Where process 0 of a job listens.

use super::system;
use shardc_ir::diag::{Diag, Result};
use std::net::{IpAddr, TcpListener};
use std::ops::RangeInclusive;

pub(super) fn unreachable(message: String) -> Diag {
    Diag::new("cluster", message)
        .rule("every process of a job can open a connection to process 0")
        .help(
            "check that 1 job runs per address and port, and that no firewall is between the hosts",
        )
}

/// Where process 0 will be found: listeners, and how others find them.
pub struct Door {
    pub(super) listeners: Vec<TcpListener>,
    /// Where it listens, as text.
    pub addresses: String,
}

impl Door {
    /// Opens the first port of some that nobody else has.
    ///
    /// # Errors
    /// As for [`Door::open`], of the first.
    pub fn open_first(ports: RangeInclusive<u16>, hosts: &[IpAddr]) -> Result<Door> {
        let first = Door::open(*ports.start(), hosts);
        first.or_else(|d| ports.skip(1).find_map(|p| Door::open(p, hosts).ok()).ok_or(d))
    }

    /// Opens a port, any free one if it is 0, at each of these addresses of this host that there is.
    ///
    /// # Errors
    /// `cluster` if it opens at none.
    pub fn open(port: u16, hosts: &[IpAddr]) -> Result<Door> {
        let (mut listeners, mut last) = (vec![], None);
        for host in hosts {
            match TcpListener::bind((*host, port)) {
                Ok(l) => {
                    system::lengthen(&l);
                    listeners.push(l);
                }
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

    #[cfg(test)]
    pub(super) fn listeners_for_test(self) -> Vec<TcpListener> {
        self.listeners
    }

    /// Whether others than processes of this host can reach it.
    pub fn is_far(&self) -> bool {
        let near = |l: &TcpListener| l.local_addr().is_ok_and(|a| a.ip().is_loopback());
        !self.listeners.iter().all(near)
    }
}
