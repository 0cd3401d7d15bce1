//! What a rank computes, remembers and sends with.

use crate::diag::{Diag, Result};
use crate::mesh::{Atom, AtomSet, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Speeds of one rank. Those of the device `generic` are a few round numbers of the right size: enough to
/// compare programs by, and never shown as a time.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hardware {
    /// Of the link to the next rank of a ring, bytes per second.
    pub link: f64,
    /// Of links over an axis of the mesh that are others, by its name.
    pub links: BTreeMap<String, f64>,
    /// Of one collective, in seconds.
    pub latency: f64,
    /// Of memory, bytes per second.
    pub memory: f64,
    /// Floating-point operations per second.
    pub flops: f64,
    /// To start one op, in seconds.
    pub start: f64,
    /// Of a line that moves nothing, such as a view, in seconds.
    pub line: f64,
}

/// The device `generic`.
impl Default for Hardware {
    fn default() -> Hardware {
        Hardware {
            link: 50e9,
            links: BTreeMap::new(),
            latency: 10e-6,
            memory: 1e12,
            flops: 50e12,
            start: 1e-6,
            line: 50e-9,
        }
    }
}

impl Hardware {
    /// Bytes per second over an axis.
    pub fn link_of(&self, axis: &str) -> f64 {
        self.links.get(axis).copied().unwrap_or(self.link)
    }

    /// Bytes per second of the slowest link that a group over these atoms crosses.
    pub fn link(&self, mesh: &Mesh, atoms: AtomSet) -> f64 {
        if self.links.is_empty() {
            return self.link;
        }
        let of = |a: Atom| {
            let axis = &mesh.axes[mesh.atoms[a].axis as usize].name;
            self.link_of(axis)
        };
        atoms.iter().map(of).fold(f64::INFINITY, f64::min).min(f64::MAX)
    }

    /// Checks that all speeds are positive, and times not negative.
    ///
    /// # Errors
    /// `hardware` names the number.
    pub fn checked(self) -> Result<Hardware> {
        let speeds = [("link", self.link), ("memory", self.memory), ("flops", self.flops)];
        let links = self.links.iter().map(|(name, &x)| (name.as_str(), x));
        let slow = speeds.into_iter().chain(links).find(|x| !(x.1.is_finite() && x.1 > 0.0));
        let times = [("latency", self.latency), ("start", self.start), ("line", self.line)];
        let early = times.into_iter().find(|x| !(x.1.is_finite() && x.1 >= 0.0));
        match slow.or(early) {
            None => Ok(self),
            Some((name, x)) => Err(Diag::new("hardware", format!("`{name}` is {x}"))
                .rule("speeds are positive numbers, per second; times are seconds, 0 or more")
                .help(format!("give {name} a speed or time that there is"))),
        }
    }
}
