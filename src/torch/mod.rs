//! The ranks of a plan in PyTorch: its program ([`shardc_export`]), started by torchrun, and a connection to each rank.
//! Rows, first values, learning rates and checkpoints stay with this process, so that all of them are as with its
//! own ranks.

mod door;
mod link;

pub use door::{Door, SECRET};

use door::{ADDRESS, PAUSE};
use rustix::process::{Pid, Signal, kill_process_group};
use shardc_export::torch::program;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Undo, Unfinished, make};
use shardc_ir::plan::Plan;
use shardc_plans::stored::Stored;
use shardc_runtime::{LoadFn, Session};
use shardc_train::cluster::launcher::Launched;
use shardc_train::cluster::secret;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The interpreter: this variable, or `python3`.
const PYTHON: &str = "SHARDC_PYTHON";
/// The module that a rank runs.
const MODULE: &str = "shardc.torch.serve";
/// How long ranks have to end by themselves.
const LEAVE: Duration = Duration::from_secs(20);
/// Most of what the processes say that is shown, in bytes and lines.
const SAID: (u64, usize) = (1 << 16, 12);

/// Processes that run a plan, until this is dropped.
pub struct Processes {
    running: Running,
    // Before the folder goes.
    _undo: Undo,
    folder: Unfinished,
}

/// The launcher, with the group of what it has started; nothing once it has ended.
type Running = Arc<Mutex<Option<Child>>>;

fn held(running: &Running) -> std::sync::MutexGuard<'_, Option<Child>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The interpreter that the user has named, or the first one.
fn interpreter() -> String {
    std::env::var(PYTHON).ok().filter(|p| !p.is_empty()).unwrap_or_else(|| "python3".into())
}

fn failed(what: String) -> Diag {
    Diag::new("torch", what)
        .rule("with --engine torch, torchrun starts the ranks: python3 -m torch.distributed.run")
        .help(format!(
            "install torch and the Python package of shardc for the interpreter `{}`, or name another one with {PYTHON}",
            interpreter()
        ))
}

/// The hosts of a job, which a launcher has started one process on each of.
#[derive(Clone, Debug)]
pub struct Hosts {
    pub count: usize,
    /// The number of this one; 0 leads.
    pub own: usize,
    /// Where the first one is, and a port of it for PyTorch; the next one is for this program.
    address: String,
    port: u16,
    secret: String,
}

impl Hosts {
    /// Those that a launcher has set variables for; none of a process that was started alone.
    ///
    /// # Errors
    /// `launcher` if a variable is missing or wrong, `no-secret`.
    pub fn detect() -> Result<Option<Hosts>> {
        let var = |name: &str| std::env::var(name).ok();
        let Some(l) = Launched::detect(var)?.filter(|l| l.world > 1) else { return Ok(None) };
        let launcher = |what: String| {
            Diag::new("launcher", what)
                .rule("on several hosts, --engine torch has a process on each, which knows the first by MASTER_ADDR and MASTER_PORT")
                .help("write a script with shardc launch-script PLAN --for slurm --engine torch")
        };
        let address =
            var("MASTER_ADDR").ok_or_else(|| launcher("MASTER_ADDR is not set".into()))?;
        let port = var("MASTER_PORT").unwrap_or_default();
        let port = port.parse().ok().filter(|&p: &u16| p > 0 && p < u16::MAX);
        let port = port.ok_or_else(|| launcher("MASTER_PORT is no port".into()))?;
        let secret = secret::derived(|name| std::env::var_os(name))?;
        let secret = secret.ok_or_else(|| {
            Diag::new(
                "no-secret",
                "ranks of several hosts know this job by a secret, and there is none",
            )
            .help(format!(
                "export {}=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')",
                secret::SECRET
            ))
        })?;
        Ok(Some(Hosts { count: l.world, own: l.rank, address, port, secret }))
    }

    /// Ranks of each host.
    fn share(&self, ranks: usize) -> Result<usize> {
        if ranks.is_multiple_of(self.count) {
            return Ok(ranks / self.count);
        }
        let what = format!("{ranks} ranks do not fill {} hosts", self.count);
        Err(Diag::new("launcher", what).rule("torchrun starts as many ranks on each host").help(
            "start one process of shardc on each of a number of hosts that divides the ranks",
        ))
    }
}

/// Starts the ranks of a plan in PyTorch, each with so many threads, and fills what they keep.
///
/// # Errors
/// `torch` if they do not start, `export` if PyTorch has no word for something of the plan, those of
/// [`Session::remote`].
pub fn start(
    stored: &Stored,
    hosts: Option<&Hosts>,
    threads: usize,
    timeout: Duration,
    load: &LoadFn,
) -> Result<(Session, Processes)> {
    let (secret, port) = match hosts {
        None => (format!("{:016x}{:016x}", make::fresh(), make::fresh()), 0),
        Some(h) => (h.secret.clone(), h.port + 1),
    };
    let door = Door::open(secret.clone(), stored.hash(), hosts.is_some(), port)?;
    let address = match hosts {
        None => door.address()?.to_string(),
        Some(h) => format!("{}:{port}", h.address),
    };
    let processes = launch(stored, hosts, (&address, &secret), threads, timeout)?;
    let wrong = || {
        let status = processes.ended()?;
        Some(failed(format!("the ranks did not start: torchrun ended with {status}")))
    };
    let session = session(&stored.plan, &door, timeout, (load, &wrong));
    Ok((session.map_err(|d| processes.explained(d))?, processes))
}

/// Starts the ranks of a host that does not lead, and waits for their end.
///
/// # Errors
/// `torch` if they do not start or fail, and `export`.
pub fn follow(stored: &Stored, hosts: &Hosts, threads: usize, timeout: Duration) -> Result<()> {
    let address = format!("{}:{}", hosts.address, hosts.port + 1);
    let way = (&*address, &*hosts.secret);
    let processes = launch(stored, Some(hosts), way, threads, timeout)?;
    loop {
        match processes.ended() {
            None => std::thread::sleep(PAUSE),
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let what =
                    format!("the ranks of host {} failed: torchrun ended with {status}", hosts.own);
                return Err(processes.explained(Diag::new("rank-failed", what)));
            }
        }
    }
}

/// Writes the program of a plan, and lets torchrun start its ranks of this host, which find the one who leads at an
/// address and show it a secret.
fn launch(
    stored: &Stored,
    hosts: Option<&Hosts>,
    (address, secret): (&str, &str),
    threads: usize,
    timeout: Duration,
) -> Result<Processes> {
    let made = program(&stored.plan, stored.called(), &stored.hash());
    if let Some(first) = made.refused.first() {
        let d = Diag::new("export", format!("PyTorch cannot run this plan: it has no {first}"))
            .rule("a plan runs there whole or not at all");
        let rest = made.refused.iter().skip(1).map(|r| format!("nor {r}"));
        return Err(rest.fold(d, Diag::why).help("leave --engine torch out"));
    }
    let io = |e: std::io::Error| failed(format!("a folder for the program cannot be made: {e}"));
    let folder = Unfinished::beside(&std::env::temp_dir().join("shardc-torch")).map_err(io)?;
    for f in &made.files {
        let mut file = make::file(&folder.path().join(&f.name)).map_err(io)?;
        file.write_all(&f.bytes).map_err(io)?;
    }
    let said = make::file(&folder.path().join("said")).map_err(io)?;
    let ranks = stored.plan.module.mesh.ranks();
    let python = interpreter();
    let mut c = Command::new(&python);
    c.args(["-B", "-m", "torch.distributed.run", "--max-restarts", "0", "--nproc-per-node"]);
    match hosts {
        None => c.arg(ranks.to_string()).arg("--standalone"),
        Some(h) => c
            .arg(h.share(ranks)?.to_string())
            .args(["--nnodes", &h.count.to_string(), "--node-rank", &h.own.to_string()])
            .args(["--master-addr", &h.address, "--master-port", &h.port.to_string()]),
    };
    c.args(["-m", MODULE]).arg(folder.path());
    c.args(["--timeout", &timeout.as_secs().max(1).to_string()]);
    c.env(ADDRESS, address).env(SECRET, secret).env("OMP_NUM_THREADS", threads.to_string());
    // Modules are those that are installed, and not what lies where this runs.
    c.env("PYTHONSAFEPATH", "1");
    c.stdin(Stdio::null()).stdout(said.try_clone().map_err(io)?).stderr(said);
    // A group of its own: a signal of the terminal is for this process, which may want to save first.
    let child = c.process_group(0).spawn();
    let child = child.map_err(|e| failed(format!("`{python}` does not start: {e}")))?;
    let running: Running = Arc::new(Mutex::new(Some(child)));
    let own = running.clone();
    let undo = Undo::new(move || end(&own));
    Ok(Processes { running, _undo: undo, folder })
}

/// The session of the ranks of a plan that come to a door, as long as nothing is wrong.
///
/// # Errors
/// `torch`, and those of [`Session::remote`].
pub fn session(
    plan: &Plan,
    door: &Door,
    timeout: Duration,
    (load, wrong): (&LoadFn, &dyn Fn() -> Option<Diag>),
) -> Result<Session> {
    let links = door.meet(plan.module.mesh.ranks(), timeout, wrong)?;
    let remote = links.into_iter().map(|l| Box::new(l) as _).collect();
    Session::remote(plan, remote, timeout, load)
}

impl Processes {
    fn ended(&self) -> Option<ExitStatus> {
        held(&self.running).as_mut()?.try_wait().ok().flatten()
    }

    /// Adds the last lines that the processes have said.
    pub fn explained(&self, d: Diag) -> Diag {
        let said = last_lines(&self.folder.path().join("said"));
        said.into_iter().fold(d, Diag::why)
    }
}

/// The last lines of a file, but for empty ones and those of frames.
fn last_lines(file: &Path) -> Vec<String> {
    let text = files::read(file, SAID.0).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().map(str::trim_end).filter(|l| !l.is_empty()).collect();
    let first = all.len().saturating_sub(SAID.1);
    all[first..].iter().map(|l| (*l).to_string()).collect()
}

impl Drop for Processes {
    fn drop(&mut self) {
        // Their connections are closed: they end by themselves.
        let since = Instant::now();
        while held(&self.running).is_some() && self.ended().is_none() && since.elapsed() < LEAVE {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Ends the launcher and what it has started, if it runs.
fn end(running: &Running) {
    if let Some(mut child) = held(running).take() {
        if matches!(child.try_wait(), Ok(None)) {
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        }
        let _ = child.wait();
    }
}
