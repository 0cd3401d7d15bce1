//! A job of several processes: who they are, how they find each other, that all run the same.

pub mod launcher;

use comfy_table::{Table, presets};
use launcher::Launched;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::plan::Plan;
use shardc_runtime::Process;
use shardc_runtime::control::Control;
use shardc_runtime::messages::Alarm;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How ranks exchange data.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    /// Ranks are threads of this process.
    #[default]
    Threads,
    /// Ranks are processes that MPI has started.
    Mpi,
}

/// How long all processes may take to come.
#[cfg(feature = "mpi")]
const START: Duration = Duration::from_secs(120);
/// Ranks that the table of a job lists.
const LISTED: usize = 64;

/// This process of a job.
pub struct Job {
    pub launched: Launched,
    pub control: Control,
    alarm: Arc<Alarm>,
    #[cfg(feature = "mpi")]
    world: shardc_runtime::mpi::World,
}

/// Connects the processes of the job that a launcher has started; `None` if ranks are threads of
/// this one.
///
/// # Errors
/// `launcher`, `mpi` and `cluster`.
pub fn join(transport: Transport) -> Result<Option<Job>> {
    let launched = Launched::detect(|name| std::env::var(name).ok());
    match (transport, launched) {
        (Transport::Threads, Ok(Some(l))) if l.world > 1 => {
            let message = format!("{} has started {} processes", l.launcher, l.world);
            Err(Diag::new("launcher", message)
                .rule("ranks that are threads are in 1 process")
                .help("run with --transport mpi, or start 1 process")
                .exit(Exit::Environment))
        }
        (Transport::Threads, _) => Ok(None),
        (Transport::Mpi, launched) => mpi(launched?).map(Some),
    }
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Option<Launched>) -> Result<Job> {
    Err(Diag::new("mpi", "this shardc was built without MPI")
        .rule("an MPI is linked when shardc is built, and is that of the launcher")
        .help("cargo build --release --features mpi, with 1 MPI and libclang installed")
        .exit(Exit::Environment))
}

#[cfg(feature = "mpi")]
fn mpi(launched: Option<Launched>) -> Result<Job> {
    use shardc_runtime::control::{Door, Me};
    let launched = launched.ok_or_else(|| {
        Diag::new("launcher", "no launcher has started this process")
            .rule("--transport mpi: one process per rank, started by mpirun or srun")
            .help("mpirun -n 4 shardc run PLAN --transport mpi")
            .exit(Exit::Environment)
    })?;
    let world = shardc_runtime::mpi::World::start()?.expect("MPI starts once");
    let (process, processes) = world.place();
    if (process, processes) != (launched.rank, launched.world) {
        let (name, n) = (launched.launcher, launched.world);
        let message = format!("{name} has started {n} processes, this MPI knows {processes}");
        return Err(Diag::new("mpi", message)
            .rule("shardc is built with the MPI whose launcher starts it")
            .help(format!("build it again where mpicc is that of {name}, for {n} processes"))
            .exit(Exit::Environment));
    }
    let card = format!("{}, pid {}", host(), std::process::id());
    let door = Door::open(0, &addresses())?;
    let leader = world.share(&door.addresses);
    let alarm = Arc::<Alarm>::default();
    let print = |message: &str| eprintln!("{message}");
    let me = Me { process, processes, card };
    let control = Control::join(&me, door, &leader, START, alarm.clone(), Box::new(print))?;
    let interrupted = control.clone();
    ctrlc::set_handler(move || interrupted.interrupt()).map_err(|e| {
        Diag::new("cluster", format!("signals cannot be handled: {e}"))
            .help("start shardc as 1 process of its own")
            .exit(Exit::Environment)
    })?;
    Ok(Job { launched, control, alarm, world })
}

/// The addresses by which other hosts find this one. One that every host has, such as 127.0.0.1, would
/// find another process there; it is used where there is no other.
#[cfg(feature = "mpi")]
fn addresses() -> Vec<std::net::IpAddr> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    // Of a link-local address others would have to know the link.
    let (own, far): (Vec<_>, Vec<_>) =
        all.iter().filter(|i| !i.is_link_local()).map(|i| i.ip()).partition(|a| a.is_loopback());
    if far.is_empty() { own } else { far }
}

/// The name of this host.
#[cfg(feature = "mpi")]
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => std::env::var("HOSTNAME").unwrap_or_else(|_| "unknown host".into()),
        name => name.to_string(),
    }
}

impl Job {
    /// Checks that as many processes run as the plan has ranks, that all have the same plan and the
    /// same shardc, and shows who they are.
    ///
    /// # Errors
    /// `launcher` and `plans-differ`.
    pub fn check(&self, plan: &Plan, hash: &str) -> Result<()> {
        self.launched.check(plan.module.mesh.ranks())?;
        let own = format!("shardc {}\nplan {hash}", env!("CARGO_PKG_VERSION"));
        let all = self.control.gather(own.clone().into_bytes());
        if let Some(p) = all.iter().position(|other| *other != own.as_bytes()) {
            let theirs = String::from_utf8_lossy(&all[p]).replace('\n', ", ");
            let ours = own.replace('\n', ", ");
            let card = &self.control.cards()[p];
            return Err(Diag::new("plans-differ", format!("process {p} ({card}) runs {theirs}"))
                .why(format!("process 0 runs {ours}"))
                .rule("all ranks run the same plan with the same shardc")
                .help("copy 1 plan and 1 shardc to all hosts, or to a file system that they share")
                .exit(Exit::Environment));
        }
        self.control.barrier();
        if self.control.leads() {
            eprintln!("{}", self.table(plan));
        }
        Ok(())
    }

    /// Checks that all processes say the same of something, such as what they go on from.
    ///
    /// # Errors
    /// `plans-differ`, of process 0.
    pub fn same(&self, what: &str, own: &str) -> Result<()> {
        let all = self.control.gather(own.as_bytes().to_vec());
        if let Some(p) = all.iter().position(|other| other != own.as_bytes()) {
            let (card, theirs) = (&self.control.cards()[p], String::from_utf8_lossy(&all[p]));
            let message = format!("process {p} ({card}) has {what} {theirs}");
            return Err(Diag::new("plans-differ", message)
                .why(format!("process 0 has {own}"))
                .rule("all processes of a job read the same files")
                .help("keep 1 copy on a file system that all hosts share")
                .exit(Exit::Environment));
        }
        self.control.barrier();
        Ok(())
    }

    /// Rank, host and coordinates of every process.
    fn table(&self, plan: &Plan) -> String {
        let mesh = &plan.module.mesh;
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let axes: Vec<String> = mesh.axes.iter().map(|a| a.name.to_string()).collect();
        let head = ["rank".to_string(), "process".to_string()];
        table.set_header(head.into_iter().chain(axes));
        let cards = self.control.cards();
        for (rank, card) in cards.iter().enumerate().take(LISTED) {
            let at = mesh.coords(rank).into_iter().map(|i| i.to_string());
            table.add_row([rank.to_string(), card.clone()].into_iter().chain(at));
        }
        let more = cards.len().saturating_sub(LISTED);
        let rest = if more > 0 { format!("\nand {more} more") } else { String::new() };
        let n = cards.len();
        format!("{n} processes, started by {}\n{table}{rest}", self.launched.launcher)
    }

    /// The ranks of this process.
    pub fn process(&self, plan: &Plan, timeout: Duration, records: PathBuf) -> Process {
        let (alarm, control) = (self.alarm.clone(), Some(self.control.clone()));
        Process { ends: self.ends(plan, timeout), alarm, control, records }
    }

    #[cfg(feature = "mpi")]
    fn ends(
        &self,
        plan: &Plan,
        timeout: Duration,
    ) -> Vec<Box<dyn shardc_runtime::transport::Transport>> {
        use shardc_runtime::messages::Messages;
        let (mesh, post) = (&plan.module.mesh, self.world.post());
        let rank = self.launched.rank;
        vec![Box::new(Messages::new(mesh, rank, post, timeout, self.alarm.clone()))]
    }

    #[cfg(not(feature = "mpi"))]
    fn ends(&self, _: &Plan, _: Duration) -> Vec<Box<dyn shardc_runtime::transport::Transport>> {
        // Without MPI no job has started.
        vec![]
    }
}
