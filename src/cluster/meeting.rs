//! How the processes of a job find process 0: by MPI, by torchrun's store, or at an address that all
//! were given.

use super::launcher::Launched;
use super::store::Store;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_runtime::control::Door;
use std::net::IpAddr;
use std::time::Duration;

/// Where every process finds process 0.
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
/// Set by torchrun if its own store is there.
const STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Which start of the processes this is: torchrun's store outlives them.
const ATTEMPT: &str = "TORCHELASTIC_RESTART_COUNT";

/// This process's door, and the addresses of that of process 0.
pub struct Meeting {
    pub door: Door,
    pub leader: String,
    #[cfg(feature = "mpi")]
    pub world: Option<shardc_runtime::mpi::World>,
}

impl Meeting {
    fn of(door: Door, leader: String) -> Meeting {
        Meeting {
            door,
            leader,
            #[cfg(feature = "mpi")]
            world: None,
        }
    }
}

/// Meets the other processes that a launcher has started, without MPI if it can.
///
/// # Errors
/// `launcher` if nothing says where process 0 is, and `cluster`.
pub fn meet(
    l: &Launched,
    var: impl Fn(&str) -> Option<String>,
    timeout: Duration,
) -> Result<Meeting> {
    if l.world == 1 {
        let door = Door::open(0, &addresses())?;
        let leader = door.addresses.clone();
        return Ok(Meeting::of(door, leader));
    }
    let Some((host, port)) = var(ADDRESS).zip(var(PORT)) else { return by_launcher(l) };
    let number: u16 = port.parse().ok().filter(|p| *p > 0).ok_or_else(|| {
        Diag::new("launcher", format!("{PORT} is `{port}`, which is no port"))
            .help(format!("set {PORT} to a free port of {host}, such as 29500"))
            .exit(Exit::Environment)
    })?;
    let ipv6 = host.contains(':') && !host.starts_with('[');
    let place = if ipv6 { format!("[{host}]:{number}") } else { format!("{host}:{number}") };
    if var(STORE).as_deref() != Some("True") {
        // Process 0 is at the port itself.
        let door = Door::open(if l.rank == 0 { number } else { 0 }, &addresses())?;
        return Ok(Meeting::of(door, place));
    }
    let door = Door::open(0, &addresses())?;
    let key = format!("/shardc/{}/leader", var(ATTEMPT).unwrap_or_default());
    let said = Store::connect(&place, timeout).and_then(|mut store| match l.rank {
        0 => store.set(&key, &door.addresses).map(|()| door.addresses.clone()),
        _ => store.get(&key, timeout),
    });
    let leader = said.map_err(|e| {
        Diag::new("cluster", format!("the store of torchrun at {place} does not answer: {e}"))
            .rule(format!("with {STORE}=True, process 0 says in torchrun's store where it is"))
            .help("check that no firewall is between the hosts, or unset the variable")
            .exit(Exit::Environment)
    })?;
    Ok(Meeting::of(door, leader))
}

#[cfg(not(feature = "mpi"))]
fn by_launcher(l: &Launched) -> Result<Meeting> {
    Err(nowhere(l))
}

/// By MPI, if that is who has started the processes.
#[cfg(feature = "mpi")]
fn by_launcher(l: &Launched) -> Result<Meeting> {
    if l.launcher == "torchrun" {
        return Err(nowhere(l));
    }
    by_mpi(l)
}

fn nowhere(l: &Launched) -> Diag {
    Diag::new("launcher", format!("{ADDRESS} and {PORT} are not set"))
        .why(format!("{} has started {} processes, this one is {}", l.launcher, l.world, l.rank))
        .rule("processes find process 0 at the host and the port of these variables")
        .help(format!("export {ADDRESS}=HOST {PORT}=29500, with the host of process 0"))
        .exit(Exit::Environment)
}

/// By MPI, which has started them.
///
/// # Errors
/// `mpi`, also if it knows other processes than the launcher.
#[cfg(feature = "mpi")]
pub fn by_mpi(l: &Launched) -> Result<Meeting> {
    let world = shardc_runtime::mpi::World::start()?.expect("MPI starts once");
    let (process, processes) = world.place();
    if (process, processes) != (l.rank, l.world) {
        let (name, n) = (l.launcher, l.world);
        let message = format!("{name} has started {n} processes, this MPI knows {processes}");
        return Err(Diag::new("mpi", message)
            .rule("shardc is built with the MPI whose launcher starts it")
            .help(format!("build it again where mpicc is that of {name}, for {n} processes"))
            .exit(Exit::Environment));
    }
    let door = Door::open(0, &addresses())?;
    let leader = world.share(&door.addresses);
    Ok(Meeting { door, leader, world: Some(world) })
}

/// The addresses by which other hosts find this one. One that every host has, such as 127.0.0.1, would
/// find another process there; it is used where there is no other.
fn addresses() -> Vec<IpAddr> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    // Of a link-local address others would have to know the link.
    let (own, far): (Vec<_>, Vec<_>) =
        all.iter().filter(|i| !i.is_link_local()).map(|i| i.ip()).partition(|a| a.is_loopback());
    if far.is_empty() { own } else { far }
}
