//! What a rank computes, remembers and sends with.

/// Speeds of one rank. Those of the device `generic` are a few round numbers of the right size: enough to
/// compare programs by, and never shown as a time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hardware {
    /// Of the link to the next rank of a ring, bytes per second.
    pub link: f64,
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
            latency: 10e-6,
            memory: 1e12,
            flops: 50e12,
            start: 1e-6,
            line: 50e-9,
        }
    }
}
