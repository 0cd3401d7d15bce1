//! Threads without which nothing runs: those of ranks, those that move their data, and those that
//! listen to other processes.

use shardc_ir::diag::Diag;

/// That a thread did not start: `what` it is, and how many of its kind this process starts.
pub fn refused(what: &str, count: usize, e: &std::io::Error) -> Diag {
    Diag::new("threads", format!("{what} did not start: {e}"))
        .rule(format!("one thread each: {count} in this process"))
        .help(format!(
            "raise the limit by {count}: `ulimit -u` counts the threads of all processes of the \
             user, pids.max those of a container"
        ))
        .help("or compile for fewer ranks, or give each host fewer of them")
}
