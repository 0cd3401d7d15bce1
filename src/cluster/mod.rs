//! A job of several processes: who they are, how they find each other, that all run the same.

pub mod launcher;
mod meeting;
mod secret;
mod store;

use crate::signals;
use crate::terminal::{self, note, say_error, warn};
use launcher::Launched;
use meeting::Meeting;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files;
use shardc_ir::plan::Plan;
pub use shardc_passes::options::Transport;
use shardc_runtime::Process;
use shardc_runtime::alarm::Alarm;
use shardc_runtime::control::{Control, Me, Terms, no_secret};
use shardc_runtime::cuda::{Device, Devices, Id};
use shardc_runtime::transport;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long all processes may take to come.
const START: Duration = Duration::from_secs(120);
/// Signals so near to each other are one, which the terminal and the launcher have sent.
const SAME: Duration = Duration::from_millis(500);
/// Seconds of silence after which a process is lost, unless `--silence` says so.
const SILENCE: u64 = 30;
/// Ranks that the table of a job lists.
const LISTED: usize = 64;
/// NCCL refuses two ranks on a device unless this is 1.
const SHARED: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// How ranks of several processes exchange data.
enum Links {
    #[cfg(feature = "mpi")]
    Mpi(shardc_runtime::mpi::World),
    /// With the device of this process: its number on the host, and its name in the world.
    Nccl(usize, String),
}

/// How the processes of a job connect, as the user wants it.
#[derive(clap::Args, Clone, Default, Debug)]
#[group(skip)]
pub struct Connections {
    /// Seconds without a sign of life after which a process counts as lost and the job ends; at most a day
    /// [default: 30]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub silence: Option<u64>,
    /// Connect processes on several hosts without a secret: anyone who can reach process 0's port can end the
    /// job, or take part in it
    #[arg(long)]
    pub insecure_control: bool,
}

impl Connections {
    /// A warning for every flag that was given, though nothing is connected.
    fn without_effect(&self) -> Vec<Diag> {
        let given =
            [("--silence", self.silence.is_some()), ("--insecure-control", self.insecure_control)];
        let warning = |flag: &str| {
            let message = format!("{flag} has no effect: ranks are threads of one process");
            Diag::new("no-effect", message)
                .help("leave it out, or run with --transport mpi or nccl")
        };
        given.iter().filter(|g| g.1).map(|g| warning(g.0)).collect()
    }
}

/// This process of a job.
pub struct Job {
    pub launched: Launched,
    pub control: Control,
    alarm: Arc<Alarm>,
    links: Links,
}

/// Says how many ranks the plan has.
type Ranks<'a> = &'a dyn Fn() -> Result<usize>;

/// Connects the processes of the job that a launcher has started for a plan of so many ranks; `None` if ranks are
/// threads of this one.
///
/// # Errors
/// `launcher`, `mpi`, `missing-library`, `cuda-driver`, `no-secret` and `cluster`.
pub fn join(transport: Transport, how: &Connections, ranks: Ranks) -> Result<Option<Job>> {
    let var = |name: &str| std::env::var(name).ok();
    let launched = Launched::detect(var);
    match (transport, launched) {
        (Transport::Threads, Ok(Some(l))) if l.world > 1 => {
            let processes = count(l.world, "process", "processes");
            let message = format!("{} has started {processes}", l.launcher);
            Err(Diag::new("launcher", message)
                .rule("ranks that are threads are in 1 process")
                .help("run with --transport mpi or nccl, or start 1 process"))
        }
        (Transport::Threads, _) => {
            warn(&how.without_effect());
            Ok(None)
        }
        (Transport::Mpi, launched) => mpi(launched?, how, ranks).map(Some),
        (Transport::Nccl, launched) => {
            let launched = launched?.unwrap_or(Launched::alone());
            let device = device_of(&launched);
            let meeting = meeting::meet(&launched, var, START)?;
            let card = device.as_ref().map_or(String::new(), |d| format!(", device {}", d.0));
            let (control, alarm) = start(&launched, meeting, &card, how)?;
            match device {
                Ok((device, name)) => {
                    let links = Links::Nccl(device, name);
                    Ok(Some(Job { launched, control, alarm, links }))
                }
                // What is missing here ends the job of all.
                Err(d) => control.fail(&d),
            }
        }
    }
}

/// The device of a process, and what only this device is called.
fn device_of(l: &Launched) -> Result<(usize, String)> {
    shardc_runtime::cuda::version()?;
    let device = l.local.unwrap_or(l.rank) % Device::count()?;
    Ok((device, Device::open(device)?.name()?))
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Option<Launched>, _: &Connections, _: Ranks) -> Result<Job> {
    Err(Diag::new("mpi", "this shardc was built without MPI")
        .rule("an MPI is linked when shardc is built, and is that of the launcher")
        .help("cargo build --release --features mpi, with 1 MPI and libclang installed"))
}

#[cfg(feature = "mpi")]
fn mpi(launched: Option<Launched>, how: &Connections, ranks: Ranks) -> Result<Job> {
    let Some(launched) = launched else {
        let ranks = ranks()?;
        return Err(Diag::new("launcher", "no launcher has started this process")
            .rule("--transport mpi: one process per rank, started by mpirun or srun")
            .help(format!("mpirun -n {ranks} shardc run PLAN --transport mpi")));
    };
    let mut meeting = meeting::by_mpi(&launched)?;
    let world = meeting.world.take().expect("it was just started");
    let (control, alarm) = start(&launched, meeting, "", how)?;
    Ok(Job { launched, control, alarm, links: Links::Mpi(world) })
}

/// Connects to the others; `card` is what they see of this process beside host and pid.
fn start(
    l: &Launched,
    meeting: Meeting,
    card: &str,
    how: &Connections,
) -> Result<(Control, Arc<Alarm>)> {
    let card = format!("{}, pid {}{card}", host(), std::process::id());
    let alarm = Arc::<Alarm>::default();
    let print = |message: &str| say_error(message);
    let me = Me { process: l.rank, processes: l.world, card };
    let Meeting { door, leader, secret, .. } = meeting;
    let insecure = how.insecure_control && !secret.is_secret();
    if let Some(far) = door.as_ref().filter(|d| insecure && d.is_far()) {
        warn(&[no_secret(&far.addresses)
            .why("--insecure-control: whoever reaches it can end this job")]);
    }
    let silence = Duration::from_secs(how.silence.unwrap_or(SILENCE));
    let terms = Terms { secret, insecure, timeout: START, silence };
    let control = Control::join(&me, door, &leader, terms, alarm.clone(), Box::new(print))?;
    let (wish, end) = (control.clone(), control.clone());
    signals::handle(
        SAME,
        move |signal| wish.wish(signal),
        move |signal| {
            signals::say_lost(signal);
            end.interrupt()
        },
    )?;
    Ok((control, alarm))
}

/// The name of this host.
pub fn host() -> String {
    let name = files::read_text(Path::new("/proc/sys/kernel/hostname"), 1 << 10);
    let name = name.unwrap_or_default();
    match name.trim() {
        "" => std::env::var("HOSTNAME").unwrap_or_else(|_| "unknown host".into()),
        name => name.to_string(),
    }
}

/// The list of the cores that this process may run on, as the system writes it; empty if it does not tell.
fn cores() -> String {
    let status = files::read_text(Path::new("/proc/self/status"), 1 << 16).unwrap_or_default();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_string()
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
                .help(
                    "copy 1 plan and 1 shardc to all hosts, or to a file system that they share",
                ));
        }
        self.control.barrier();
        if self.control.leads() {
            note(self.table(plan));
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
                .rule("all processes of a job read the same files, with the same flags")
                .help("give all processes the same flags; of files keep 1 copy, on a file system that all hosts share"));
        }
        self.control.barrier();
        Ok(())
    }

    /// Rank, host and coordinates of every process.
    fn table(&self, plan: &Plan) -> String {
        let mesh = &plan.module.mesh;
        let mut table = terminal::table();
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
        let n = count(cards.len(), "process", "processes");
        format!("{n}, started by {}\n{table}{rest}", self.launched.launcher)
    }

    /// How many processes have the cores that this one may run on, itself among them: those of its host, but
    /// for ones that were bound to other cores. All processes ask.
    pub fn sharing(&self) -> usize {
        let all = self.control.gather(format!("{} {}", host(), cores()).into_bytes());
        let mut counts: BTreeMap<&[u8], usize> = BTreeMap::new();
        all.iter().for_each(|one| *counts.entry(&one[..]).or_default() += 1);
        let said: Vec<String> = all.iter().map(|one| counts[&one[..]].to_string()).collect();
        let said = self.control.share(said.join(" ").into_bytes());
        let own = String::from_utf8_lossy(&said);
        let own = own.split(' ').nth(self.launched.rank).and_then(|n| n.parse::<usize>().ok());
        let own = own.unwrap_or(1);
        self.launched.locals.map_or(own, |locals| own.min(locals)).max(1)
    }

    /// The device of this process, if it has one.
    pub fn device(&self) -> Option<usize> {
        match &self.links {
            #[cfg(feature = "mpi")]
            Links::Mpi(_) => None,
            Links::Nccl(device, _) => Some(*device),
        }
    }

    /// The ranks of this process, which are on these devices.
    ///
    /// # Errors
    /// Those of NCCL.
    pub fn process(
        &self,
        plan: &Plan,
        timeout: Duration,
        records: PathBuf,
        devices: Option<&Devices>,
    ) -> Result<Process> {
        let (alarm, control) = (self.alarm.clone(), Some(self.control.clone()));
        let ends = self.ends(plan, timeout, devices)?;
        Ok(Process { ends, alarm, control, records })
    }

    fn ends(
        &self,
        plan: &Plan,
        timeout: Duration,
        devices: Option<&Devices>,
    ) -> Result<Vec<Box<dyn transport::Transport>>> {
        match &self.links {
            #[cfg(feature = "mpi")]
            Links::Mpi(world) => {
                use shardc_runtime::messages::Messages;
                use shardc_runtime::progress::Progress;
                let (mesh, post) = (&plan.module.mesh, world.post());
                let (rank, alarm) = (self.launched.rank, self.alarm.clone());
                let mut end = Messages::new(mesh, rank, post, timeout, alarm.clone());
                end.open(&plan.groups())?;
                Ok(vec![Box::new(Progress::new(Box::new(end), alarm)?)])
            }
            Links::Nccl(_, name) => {
                self.one_each(name)?;
                let own = match self.control.leads() {
                    true => shardc_runtime::cuda::id()?.0.to_vec(),
                    false => vec![],
                };
                let mut id = Id([0; 128]);
                let given = self.control.share(own);
                id.0.iter_mut().zip(&given).for_each(|(to, from)| *to = *from);
                let devices = devices.expect("a job over NCCL runs on devices");
                devices.join(plan, &id, timeout, &self.alarm)
            }
        }
    }

    /// Checks that no two processes have the same device.
    fn one_each(&self, device: &str) -> Result<()> {
        let own = format!("{} {device}", host());
        let all = self.control.gather(own.into_bytes());
        let same = (0..all.len()).find_map(|b| Some(((0..b).find(|&a| all[a] == all[b])?, b)));
        if let Some((a, b)) = same.filter(|_| std::env::var(SHARED).as_deref() != Ok("1")) {
            let cards = self.control.cards();
            let message =
                format!("processes {a} ({}) and {b} ({}) share a device", cards[a], cards[b]);
            return Err(Diag::new("launcher", message)
                .rule("NCCL needs a device for each rank")
                .why(format!("newer versions of NCCL allow shared devices: {SHARED}=1"))
                .help("start as many processes per host as it has devices; or 1 process without --transport nccl, whose ranks are threads that share devices"));
        }
        self.control.barrier();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        all: Connections,
    }

    #[test]
    fn silence_is_a_second_to_a_day() {
        let read = |s: &str| Flags::try_parse_from(["run", "--silence", s]).map(|f| f.all.silence);
        assert_eq!((read("1").ok(), read("86400").ok()), (Some(Some(1)), Some(Some(86400))));
        for bad in ["0", "86401", "18446744073709551615"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn threads_need_no_connections() {
        let said = |flags: &[&str]| -> Vec<String> {
            let all = [&["run"], flags].concat();
            let how = Flags::try_parse_from(all).unwrap_or_else(|e| panic!("{e}")).all;
            how.without_effect().into_iter().map(|d| format!("{} {}", d.code, d.message)).collect()
        };
        let why = "has no effect: ranks are threads of one process";
        assert_eq!(said(&[]), [""; 0]);
        assert_eq!(said(&["--silence", "30"]), [format!("no-effect --silence {why}")]);
        assert_eq!(said(&["--silence", "9", "--insecure-control"]).len(), 2);
    }
}
