//! A job of several processes: who they are, how they find each other, that all run the same.

pub mod launcher;
mod meeting;
pub mod secret;
mod store;

pub use launcher::host;
use launcher::{Launched, cores};
use meeting::Meeting;
use shardc_ir::diag::{Diag, Result, count, one_line};
use shardc_ir::plan::Plan;
pub use shardc_passes::options::Transport;
use shardc_process::signals;
use shardc_process::terminal::{self, notes, say_error, warn};
use shardc_runtime::Process;
use shardc_runtime::alarm::Alarm;
use shardc_runtime::control::{Control, Me, Terms, Watch, no_secret};
use shardc_runtime::cuda::{Device, Devices, Id};
use shardc_runtime::transport;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long processes wait for each other that a launcher has started for another plan than this.
const MISFITS: Duration = Duration::from_secs(2);
/// No process of a job that does not fit its plan waits for more than so many others.
const MANY: usize = 1 << 16;
/// Most seconds that processes wait for each other: a generation, which no sum of times exceeds.
const LONGEST: u64 = 1 << 30;
/// What a system may take longer for than it was given, before that is told.
const GRACE: Duration = Duration::from_secs(1);
/// Signals so near to each other are one, which the terminal and the launcher have sent.
const SAME: Duration = Duration::from_millis(500);
/// Seconds of silence after which a process is lost, unless `--silence` says so.
const SILENCE: u64 = 30;
/// Ranks that the table of a job lists.
const LISTED: usize = 64;
/// NCCL refuses two ranks on a device unless this is 1.
const SHARED: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// What all processes of a job have alike, and what to do where they do not.
const FILES: [&str; 2] = [
    "all processes of a job read the same files, with the same flags",
    "give all processes the same flags; of files keep 1 copy, on a file system that all hosts share",
];
const LIBRARIES: [&str; 2] = [
    "all processes of a job have the same NCCL: others may not understand it",
    "install 1 version on all hosts; LD_LIBRARY_PATH says which is found",
];

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
    /// Seconds that processes may wait for each other until all have come and are connected, and at the end until
    /// all have gone; at most a day [default: that of --timeout]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub start_timeout: Option<u64>,
    /// Connect processes on several hosts without a secret: anyone who can reach process 0's port can end the
    /// job, or take part in it
    #[arg(long)]
    pub insecure_control: bool,
}

impl Connections {
    /// A warning for every flag that was given, though nothing is connected.
    fn without_effect(&self) -> Vec<Diag> {
        let given = [
            ("--silence", self.silence.is_some()),
            ("--start-timeout", self.start_timeout.is_some()),
            ("--insecure-control", self.insecure_control),
        ];
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

/// How long this process waits for the others, and since when.
#[derive(Clone, Copy)]
struct Patience {
    began: Instant,
    limit: Duration,
}

impl Patience {
    fn left(self) -> Duration {
        self.limit.saturating_sub(self.began.elapsed())
    }
}

/// Connects the processes of the job that a launcher has started for a plan of so many ranks; `None` if ranks are
/// threads of this one. Without [`Connections::start_timeout`], `timeout` is the limit.
///
/// # Errors
/// `launcher`, `mpi`, `missing-library`, `cuda-driver`, `no-secret`, `cluster` and `start-timeout`.
pub fn join(
    transport: Transport,
    how: &Connections,
    timeout: u64,
    ranks: Ranks,
) -> Result<Option<Job>> {
    let var = |name: &str| std::env::var(name).ok();
    let launched = Launched::detect(var);
    let limit = Duration::from_secs(how.start_timeout.unwrap_or(timeout).clamp(1, LONGEST));
    let patience = Patience { began: Instant::now(), limit };
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
        (Transport::Mpi, launched) => mpi(launched?, how, patience, ranks).map(Some),
        (Transport::Nccl, launched) => {
            nccl(launched?.unwrap_or(Launched::alone()), how, patience, ranks).map(Some)
        }
    }
}

fn nccl(l: Launched, how: &Connections, patience: Patience, ranks: Ranks) -> Result<Job> {
    // The variables of the launcher say how many come, which nobody has shown yet. Those of a job that does not fit
    // say so once, together; if they do not meet soon, each for itself.
    let misfit = ranks().and_then(|ranks| l.check(ranks)).err();
    if let Some(d) = misfit.clone().filter(|_| l.world > MANY) {
        return Err(d);
    }
    let limit = misfit.as_ref().map_or(patience.limit, |_| patience.limit.min(MISFITS));
    let patience = Patience { limit, ..patience };
    let watched = watch(&l, patience.left() + GRACE, "for the driver of its device".into())?;
    let device = device_of(&l);
    drop(watched);
    let card = device.as_ref().map_or(String::new(), |d| format!(", device {}", d.0));
    let met = || {
        let var = |name: &str| std::env::var(name).ok();
        let what = format!("while processes look for each other{}", meeting::told(var));
        let watch = watch(&l, patience.left() + GRACE, what)?;
        let meeting = meeting::meet(&l, var, patience)?;
        let started = start(&l, meeting, &card, how, patience);
        drop(watch);
        started
    };
    let (control, alarm) = match (met(), misfit) {
        (Ok(met), _) => met,
        (Err(_), Some(d)) | (Err(d), None) => return Err(d),
    };
    match device {
        Ok((device, name)) => {
            Ok(Job { launched: l, control, alarm, links: Links::Nccl(device, name) })
        }
        // What is missing here ends the job of all.
        Err(d) => control.fail(&d),
    }
}

/// Ends this process if what begins now takes longer than that; no process can be asked.
fn watch(l: &Launched, limit: Duration, what: String) -> Result<Watch> {
    Watch::alone(l.rank, limit, what, |line| say_error(line))
}

/// The device of a process, and what only this device is called.
fn device_of(l: &Launched) -> Result<(usize, String)> {
    shardc_runtime::cuda::version()?;
    if l.world > 1 {
        shardc_runtime::cuda::queues()?;
    }
    let device = l.local.unwrap_or(l.rank) % Device::count()?;
    Ok((device, Device::name_of(device)?))
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Option<Launched>, _: &Connections, _: Patience, _: Ranks) -> Result<Job> {
    Err(Diag::new("mpi", "this shardc was built without MPI")
        .rule("an MPI is linked when shardc is built, and is that of the launcher")
        .help("cargo build --release --features mpi, with 1 MPI and libclang installed"))
}

#[cfg(feature = "mpi")]
fn mpi(
    launched: Option<Launched>,
    how: &Connections,
    patience: Patience,
    ranks: Ranks,
) -> Result<Job> {
    let Some(launched) = launched else {
        let ranks = ranks()?;
        return Err(Diag::new("launcher", "no launcher has started this process")
            .rule("--transport mpi: one process per rank, started by mpirun or srun")
            .help(format!("mpirun -n {ranks} shardc run PLAN --transport mpi")));
    };
    let mut meeting = meeting::by_mpi(&launched, patience)?;
    let world = meeting.world.take().expect("it was just started");
    let late = watch(&launched, patience.left() + GRACE, "while processes join".into())?;
    let started = start(&launched, meeting, "", how, patience);
    drop(late);
    match started {
        Ok((control, alarm)) => Ok(Job { launched, control, alarm, links: Links::Mpi(world) }),
        Err(d) => {
            // MPI's end would wait for those that are missing.
            std::mem::forget(world);
            Err(d)
        }
    }
}

/// Connects to the others; `card` is what they see of this process beside host and pid.
fn start(
    l: &Launched,
    meeting: Meeting,
    card: &str,
    how: &Connections,
    patience: Patience,
) -> Result<(Control, Arc<Alarm>)> {
    let card = format!("{}, pid {}{card}", host(), std::process::id());
    let alarm = Arc::<Alarm>::default();
    let print = |message: &str| say_error(message);
    let me = Me { process: l.rank, processes: l.world, job: l.job.clone(), card };
    let Meeting { door, leader, secret, spare, .. } = meeting;
    let insecure = how.insecure_control && !secret.is_secret();
    if let Some(far) = door.as_ref().filter(|d| insecure && d.is_far()) {
        warn(&[no_secret(&far.addresses)
            .why("--insecure-control: whoever reaches it can end this job")]);
    }
    let silence = Duration::from_secs(how.silence.unwrap_or(SILENCE));
    let Patience { began, limit: timeout } = patience;
    let terms = Terms { secret, insecure, spare, began, timeout, silence, warn: |d| warn(&[d]) };
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

impl Job {
    /// Ends what the processes share, which all have finished, and leaves them.
    pub fn end(self) {
        let Job { control, links, .. } = self;
        // MPI waits for all.
        drop(links);
        control.leave();
    }

    /// Checks that as many processes run as the plan has ranks, that all have the same plan and the
    /// same shardc, and shows who they are.
    ///
    /// # Errors
    /// `launcher` and `plans-differ`.
    pub fn check(&self, plan: &Plan, hash: &str) -> Result<()> {
        self.launched.check(plan.module.mesh.ranks())?;
        let own = format!("shardc {}\nplan {hash}", env!("CARGO_PKG_VERSION"));
        if let Some((p, card, theirs)) = self.other(&own) {
            let (theirs, ours) = (theirs.replace('\n', ", "), own.replace('\n', ", "));
            return Err(Diag::new("plans-differ", format!("process {p} ({card}) runs {theirs}"))
                .why(format!("process 0 runs {ours}"))
                .rule("all ranks run the same plan with the same shardc")
                .help(
                    "copy 1 plan and 1 shardc to all hosts, or to a file system that they share",
                ));
        }
        self.control.barrier();
        if self.control.leads() {
            notes(self.table(plan));
        }
        Ok(())
    }

    /// The first process that says something else than process 0, with its card and what it says; of process 0.
    fn other(&self, own: &str) -> Option<(usize, &str, String)> {
        let all = self.control.gather(own.as_bytes().to_vec());
        let p = all.iter().position(|other| other != own.as_bytes())?;
        Some((p, &self.control.cards()[p], String::from_utf8_lossy(&all[p]).into_owned()))
    }

    /// Checks that all processes say the same of something, such as what they go on from.
    ///
    /// # Errors
    /// `plans-differ`, of process 0.
    pub fn same(&self, what: &str, own: &str) -> Result<()> {
        self.agree(what, own, FILES)
    }

    /// The same, by that rule, and with that way out.
    fn agree(&self, what: &str, own: &str, [rule, help]: [&str; 2]) -> Result<()> {
        if let Some((p, card, theirs)) = self.other(own) {
            let message = format!("process {p} ({card}) has {what} {theirs}");
            let d = Diag::new("plans-differ", message).why(format!("process 0 has {own}"));
            return Err(d.rule(rule).help(help));
        }
        self.control.barrier();
        Ok(())
    }

    /// Rank, host and coordinates of every process.
    fn table(&self, plan: &Plan) -> Vec<String> {
        let mesh = &plan.module.mesh;
        let mut table = terminal::table();
        let axes: Vec<String> = mesh.axes.iter().map(|a| a.name.to_string()).collect();
        let head = ["rank".to_string(), "process".to_string()];
        table.set_header(head.into_iter().chain(axes));
        let cards = self.control.cards();
        for (rank, card) in cards.iter().enumerate().take(LISTED) {
            let at = mesh.coords(rank).into_iter().map(|i| i.to_string());
            let card = one_line(card).into_owned();
            table.add_row([rank.to_string(), card].into_iter().chain(at));
        }
        let more = cards.len().saturating_sub(LISTED);
        let rest = (more > 0).then(|| format!("and {more} more"));
        let n = count(cards.len(), "process", "processes");
        let head = format!("{n}, started by {}", self.launched.launcher);
        std::iter::once(head).chain(table.lines()).chain(rest).collect()
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
    /// Those of NCCL and of MPI; they end the job if they are not there in time.
    pub fn process(
        &self,
        plan: &Plan,
        timeout: Duration,
        records: PathBuf,
        devices: Option<&Devices>,
    ) -> Result<Process> {
        let (alarm, control) = (self.alarm.clone(), Some(self.control.clone()));
        let phase = match &self.links {
            #[cfg(feature = "mpi")]
            Links::Mpi(_) => "in the start of MPI's groups",
            Links::Nccl(..) => "in NCCL's start",
        };
        // None waits for one that still reads or compiles.
        self.control.barrier();
        let limit = self.control.limit(phase)?;
        let ends = self.ends(plan, timeout, devices)?;
        drop(limit);
        self.control.enter("behind the start of its transport");
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
                self.agree("NCCL", &shardc_runtime::cuda::version()?.to_string(), LIBRARIES)?;
                let own = match self.control.leads() {
                    true => shardc_runtime::cuda::id()?.0.to_vec(),
                    false => vec![],
                };
                let mut id = Id([0; 128]);
                let given = self.control.share(own);
                id.0.iter_mut().zip(&given).for_each(|(to, from)| *to = *from);
                let devices = devices.expect("a job over NCCL runs on devices");
                let near = self.launched.locals.unwrap_or(1).max(1);
                let limits = (self.control.timeout(), timeout);
                devices.join(plan, &id, limits, (&self.alarm, near))
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
