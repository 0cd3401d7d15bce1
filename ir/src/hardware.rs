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
    /// Of products by our own kernels, if they are unlike those of a library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnProducts>,
}

/// Products of a device by our own kernels, which go on with work on their results.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnProducts {
    /// Floating-point operations per second.
    pub flops: f64,
    /// What that work moves beside the result, bytes per second.
    pub memory: f64,
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
            own: None,
        }
    }
}

impl Hardware {
    /// Whether a product of so many operations, with a result of so many bytes and work on it that moves these
    /// beside, is faster as one kernel of ours than by a library, with that work as a kernel behind it, which reads
    /// the result again.
    pub fn joins(&self, flops: f64, result: f64, beside: f64) -> bool {
        self.own.is_none_or(|own| {
            let library = flops / self.flops + (2.0 * result + beside) / self.memory + self.start;
            flops / own.flops + beside / own.memory <= library
        })
    }

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
        let own = self.own.into_iter();
        let own = own.flat_map(|o| [("own.flops", o.flops), ("own.memory", o.memory)]);
        let slow =
            speeds.into_iter().chain(links).chain(own).find(|x| !(x.1.is_finite() && x.1 > 0.0));
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
