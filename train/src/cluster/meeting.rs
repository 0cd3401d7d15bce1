//! How the processes of a job find process 0: by MPI, by torchrun's store, or at an address that all
//! were given.

use super::launcher::Launched;
use super::store::Store;
use super::{Patience, secret};
#[cfg(feature = "mpi")]
use shardc_ir::diag::count;
use shardc_ir::diag::{Diag, Result};
use shardc_process::terminal;
use shardc_runtime::control::{Door, Secret, late};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};

/// Where every process finds process 0.
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
/// Ports behind it that are tried if others have it.
const SPARE: u16 = 16;
/// Set by torchrun if its own store is there.
const STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Which start of the processes this is: torchrun's store outlives them.
const ATTEMPT: &str = "TORCHELASTIC_RESTART_COUNT";

/// Where processes were told to find process 0, for a message.
pub fn told(var: impl Fn(&str) -> Option<String>) -> String {
    let place = var(ADDRESS).zip(var(PORT)).map(|(host, port)| format!("{host}:{port}"));
    place.map_or(String::new(), |at| format!(": process 0 is looked for at {at} ({ADDRESS})"))
}

/// The door of process 0, in that; where all find it; and what they know each other by.
pub struct Meeting {
    pub door: Option<Door>,
    pub leader: String,
    pub secret: Secret,
    /// How many ports behind that it may be at instead.
    pub spare: u16,
    #[cfg(feature = "mpi")]
    pub world: Option<shardc_runtime::mpi::World>,
}

impl Meeting {
    fn of(door: Option<Door>, leader: String, secret: Secret) -> Meeting {
        Meeting {
            door,
            leader,
            secret,
            spare: 0,
            #[cfg(feature = "mpi")]
            world: None,
        }
    }
}

/// Meets the other processes that a launcher has started, without MPI if it can.
///
/// # Errors
/// `launcher` if nothing says where process 0 is, `no-secret`, `cluster` and `start-timeout`.
pub fn meet(
    l: &Launched,
    var: impl Fn(&str) -> Option<String>,
    patience: Patience,
) -> Result<Meeting> {
    if l.world == 1 {
        let door = Door::open(0, &[LOOPBACK])?;
        let leader = door.addresses.clone();
        return Ok(Meeting::of(Some(door), leader, Secret::none()));
    }
    let Some((host, port)) = var(ADDRESS).zip(var(PORT)) else { return by_launcher(l, patience) };
    let number: u16 = port.parse().ok().filter(|p| *p > 0).ok_or_else(|| {
        Diag::new("launcher", format!("{PORT} is `{port}`, which is not a port"))
            .help(format!("set {PORT} to a free port of {host}, such as 29500"))
    })?;
    let secret = secret::of(|name| std::env::var_os(name))?;
    let ipv6 = host.contains(':') && !host.starts_with('[');
    let place = if ipv6 { format!("[{host}]:{number}") } else { format!("{host}:{number}") };
    if var(STORE).as_deref() != Some("True") {
        // Process 0 is at the port itself, or, as the secret tells others that it is, at one of the next.
        let spare = if secret.is_secret() { SPARE.min(u16::MAX - number) } else { 0 };
        let open = || Door::open_first(number..=number + spare, &places(l, &host));
        let door = (l.rank == 0).then(open).transpose()?;
        let moved = door.as_ref().map(|d| &d.addresses);
        let ends = format!(":{number}");
        if let Some(at) = moved.filter(|all| !all.split(' ').any(|a| a.ends_with(&ends))) {
            let message = format!("port {number} is taken: process 0 listens at {at}");
            terminal::warn(&[Diag::new("cluster", message)]);
        }
        return Ok(Meeting { spare, ..Meeting::of(door, place, secret) });
    }
    let door = (l.rank == 0).then(|| Door::open(0, &addresses(l))).transpose()?;
    let key = format!("/shardc/{}/leader", var(ATTEMPT).unwrap_or_default());
    let until = patience.began + patience.limit;
    let said = Store::connect(&place, until).and_then(|mut store| match &door {
        Some(door) => store.set(&key, &door.addresses).map(|()| door.addresses.clone()),
        None => store.get(&key, until),
    });
    let leader = said.map_err(|e| {
        if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) {
            let whom =
                if e.get_ref().is_some() { e.to_string() } else { "it does not answer".into() };
            let what = format!("in the rendezvous, at the store of torchrun at {place}: {whom}");
            return late(l.rank, patience.limit, &what);
        }
        Diag::new("cluster", format!("the store of torchrun at {place} does not answer: {e}"))
            .rule(format!("with {STORE}=True, process 0 announces its address in torchrun's store"))
            .help("check that no firewall blocks the hosts, or unset the variable")
    })?;
    Ok(Meeting::of(door, leader, secret))
}

#[cfg(not(feature = "mpi"))]
fn by_launcher(l: &Launched, _: Patience) -> Result<Meeting> {
    Err(nowhere(l))
}

/// By MPI, if that is who has started the processes.
#[cfg(feature = "mpi")]
fn by_launcher(l: &Launched, patience: Patience) -> Result<Meeting> {
    if l.launcher == "torchrun" {
        return Err(nowhere(l));
    }
    by_mpi(l, patience)
}

fn nowhere(l: &Launched) -> Diag {
    Diag::new("launcher", format!("{ADDRESS} and {PORT} are not set"))
        .why(format!("{} has started {} processes, this one is {}", l.launcher, l.world, l.rank))
        .rule("processes find process 0 at the host and the port of these variables")
        .help(format!("export {ADDRESS}=HOST {PORT}=29500, with the host of process 0"))
}

/// By MPI, which has started them. It waits for all, and nothing can interrupt it: this process ends, with one line,
/// if that takes too long.
///
/// # Errors
/// `mpi`, also if it knows other processes than the launcher.
#[cfg(feature = "mpi")]
pub fn by_mpi(l: &Launched, patience: Patience) -> Result<Meeting> {
    let what = "in MPI's start: a process has not come, or is stopped";
    let watch = super::watch(l, patience.left(), what.into())?;
    let world = shardc_runtime::mpi::World::start()?.expect("MPI starts once");
    let (process, processes) = world.place();
    if (process, processes) != (l.rank, l.world) {
        let (name, all) = (l.launcher, count(l.world, "process", "processes"));
        let message = format!("{name} has started {all}, this MPI knows {processes}");
        return Err(Diag::new("mpi", message)
            .rule("shardc is built with the MPI whose launcher starts it")
            .help(format!("build it again where mpicc is that of {name}, for {all}")));
    }
    use shardc_runtime::control;
    let door = (l.rank == 0).then(|| Door::open(0, &addresses(l))).transpose()?;
    let own = match &door {
        Some(door) => format!("{}\n{}", door.addresses, control::draw()?),
        None => String::new(),
    };
    let said = world.share(&own);
    drop(watch);
    let (leader, secret) = said.split_once('\n').unwrap_or((&said, ""));
    let (leader, secret) = (leader.to_string(), Secret::of(secret.as_bytes()));
    Ok(Meeting { world: Some(world), ..Meeting::of(door, leader, secret) })
}

/// The address of processes of one host alone.
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The addresses by which the other processes find this one: where all run on this host, the loopback
/// interface alone. Elsewhere 127.0.0.1 would find another process; it is used where there is no other.
fn addresses(l: &Launched) -> Vec<IpAddr> {
    if l.locals == Some(l.world) {
        return vec![LOOPBACK];
    }
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    // Of a link-local address others would have to know the link.
    let (own, far): (Vec<_>, Vec<_>) =
        all.iter().filter(|i| !i.is_link_local()).map(|i| i.ip()).partition(|a| a.is_loopback());
    if far.is_empty() { own } else { far }
}

/// Where process 0 listens, which others call `host`: at that address, if it is one of this host. A name
/// may mean 127.0.1.1 here and something else there, and an address may be that of a router.
fn places(l: &Launched, host: &str) -> Vec<IpAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let named: Vec<IpAddr> =
        (bare, 0).to_socket_addrs().into_iter().flatten().map(|a| a.ip()).collect();
    let own: Vec<IpAddr> =
        if_addrs::get_if_addrs().unwrap_or_default().iter().map(|i| i.ip()).collect();
    let mut here: Vec<IpAddr> =
        named.iter().copied().filter(|a| a.is_loopback() || own.contains(a)).collect();
    let is_number = bare.parse::<IpAddr>().is_ok();
    let is_near = is_number || bare == "localhost" || l.locals == Some(l.world);
    if here.is_empty() || (here.iter().all(IpAddr::is_loopback) && !is_near) {
        here.extend(addresses(l));
    }
    here.sort();
    here.dedup();
    here
}
