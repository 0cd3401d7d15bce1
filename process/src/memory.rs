//! What this process takes of the machine.

use shardc_ir::files;
use std::path::Path;

/// The most memory that this process has had, in bytes; none where the system does not say it.
pub fn most_memory() -> Option<usize> {
    let text = files::read_text(Path::new("/proc/self/status"), 1 << 16).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    Some(1024 * line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?)
}
