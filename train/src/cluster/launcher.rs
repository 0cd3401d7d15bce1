//! Which process of a job this is, from the variables that launchers set, and on which host.

use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files;
use std::path::Path;

/// A launcher, and its variables for: this process, how many there are, the process among those of
/// its host, how many these are.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local: &'static str,
    locals: &'static str,
    /// By which all processes of a job know it from others, and others have other values.
    job: &'static [&'static str],
}

/// By which a user tells jobs apart, where the launcher does not.
pub const JOB: &str = "SHARDC_JOB";
/// Most bytes of that.
const MOST: usize = 256;

/// The first whose variables are set is believed: an MPI inside a Slurm job, for example, comes
/// before Slurm.
const LAUNCHERS: [Names; 4] = [
    Names {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        locals: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE"],
    },
    Names {
        launcher: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local: "LOCAL_RANK",
        locals: "LOCAL_WORLD_SIZE",
        job: &["TORCHELASTIC_RUN_ID"],
    },
    Names {
        launcher: "MPICH",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        locals: "MPI_LOCALNRANKS",
        job: &[],
    },
    Names {
        launcher: "srun",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local: "SLURM_LOCALID",
        locals: "SLURM_NTASKS_PER_NODE",
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

/// A process among those that a launcher has started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launched {
    pub launcher: &'static str,
    pub rank: usize,
    pub world: usize,
    /// Among the processes of its host, as far as the launcher tells.
    pub local: Option<usize>,
    pub locals: Option<usize>,
    /// What the job is called, one line; empty if nobody says.
    pub job: String,
    /// The variable that gives the world, for messages.
    world_name: &'static str,
}

impl Launched {
    /// A process that nobody else was started with.
    pub fn alone() -> Launched {
        let (launcher, world_name) = ("nobody", "the number of processes");
        let (local, locals, job) = (Some(0), Some(1), String::new());
        Launched { launcher, rank: 0, world: 1, local, locals, job, world_name }
    }

    /// The launcher of this process; `None` if nobody has set its variables.
    ///
    /// # Errors
    /// `launcher` if a variable is missing, is not a number, or contradicts another.
    pub fn detect(var: impl Fn(&str) -> Option<String>) -> Result<Option<Launched>> {
        // A shell in a Slurm allocation has the variables of a task, and is none.
        let starts = |n: &Names| match n.launcher {
            "srun" => var("SLURM_STEP_ID").is_some() && var(n.rank).is_some(),
            "torchrun" => var(n.rank).is_some() || var(n.local).is_some(),
            _ => var(n.rank).is_some(),
        };
        let Some(n) = LAUNCHERS.iter().find(|n| starts(n)) else { return Ok(None) };
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = var(name) else { return Ok(None) };
            text.parse().map(Some).map_err(|_| {
                refuse(format!("{name} is `{text}`, which is not a number"))
                    .help(format!("set {name} to a number from 0, as {} does", n.launcher))
            })
        };
        let needed = |name: &str| -> Result<usize> {
            number(name)?.ok_or_else(|| {
                refuse(format!("{} is set and {name} is not", found(n, &var))).help(format!(
                    "start all processes with {}, which sets 4 variables",
                    n.launcher
                ))
            })
        };
        let (rank, world) = (needed(n.rank)?, needed(n.world)?);
        let (local, locals) = (number(n.local)?, number(n.locals)?);
        if rank >= world {
            return Err(refuse(format!("{} is {rank} and {} is {world}", n.rank, n.world))
                .help(format!("processes are numbered 0 to {}", world.saturating_sub(1))));
        }
        if let (Some(a), Some(b)) = (local, locals)
            && a >= b
        {
            return Err(refuse(format!("{} is {a} and {} is {b}", n.local, n.locals))
                .help(format!("processes of a host are numbered 0 to {}", b.saturating_sub(1))));
        }
        let (launcher, job) = (n.launcher, job(n, &var));
        Ok(Some(Launched { launcher, rank, world, local, locals, job, world_name: n.world }))
    }

    /// Checks that as many processes were started as the plan has ranks.
    ///
    /// # Errors
    /// `launcher`, with both numbers, and what the variable seems to count.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if self.world == ranks {
            return Ok(());
        }
        let (name, world) = (self.world_name, self.world);
        let fills = |l: &usize| *l > 1 && l.checked_mul(world) == Some(ranks);
        let per = self.locals.filter(fills).or_else(|| {
            let even = world > 0 && ranks % world == 0 && ranks / world > 1;
            (even && self.local == Some(0) && self.locals.is_none()).then_some(ranks / world)
        });
        let mut d =
            refuse(format!("{name} is {world}, the plan has {}", count(ranks, "rank", "ranks")));
        if let Some(per) = per {
            d = d.why(format!(
                "{name} seems to count nodes: {world} nodes of {per} ranks are {ranks}"
            ));
        }
        Err(d.help(format!(
            "start {} with {}, or compile for a mesh of {}",
            count(ranks, "process", "processes"),
            self.launcher,
            count(world, "rank", "ranks")
        )))
    }
}

/// What a job is called: by its user, or by its launcher. A rendezvous of torchrun that nobody has named is `none`, and
/// parts of a heterogeneous job of Slurm have numbers of their own.
fn job(n: &Names, var: impl Fn(&str) -> Option<String>) -> String {
    let parts = var("SLURM_HET_SIZE").is_some() && n.launcher == "srun";
    let of = |name: &&str| var(name).filter(|v| !v.is_empty() && v != "none");
    let own = || match n.job {
        [first, rest @ ..] if !parts => {
            let rest = rest.iter().filter_map(of);
            of(first).map(|f| std::iter::once(f).chain(rest).collect::<Vec<_>>().join("."))
        }
        _ => None,
    };
    let name = of(&JOB).or_else(own).unwrap_or_default();
    name.chars().filter(|c| !c.is_control()).take(MOST).collect()
}

fn found(n: &Names, var: impl Fn(&str) -> Option<String>) -> &'static str {
    if var(n.rank).is_some() { n.rank } else { n.local }
}

fn refuse(message: String) -> Diag {
    Diag::new("launcher", message).rule("a launcher starts one process per rank of the plan")
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
pub(super) fn cores() -> String {
    let status = files::read_text(Path::new("/proc/self/status"), 1 << 16).unwrap_or_default();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Result<Option<Launched>> {
        Launched::detect(|name| vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string()))
    }

    #[test]
    fn each_launcher_is_known_by_its_variables() {
        assert_eq!(of(&[("PATH", "/bin")]).unwrap(), None);
        // In an allocation, but no task of srun.
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).unwrap(), None);
        for n in &LAUNCHERS {
            let all = [
                (n.rank, "5"),
                (n.world, "8"),
                (n.local, "1"),
                (n.locals, "4"),
                ("SLURM_STEP_ID", "0"),
            ];
            let l = of(&all).unwrap().unwrap();
            assert_eq!((l.launcher, l.rank, l.world), (n.launcher, 5, 8));
            assert_eq!((l.local, l.locals), (Some(1), Some(4)));
            assert!(l.check(8).is_ok());
        }
        // MPI inside a Slurm job.
        let both = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
        ];
        assert_eq!(of(&both).unwrap().unwrap().launcher, "Open MPI");
    }

    #[test]
    fn jobs_are_called_as_their_launcher_does() {
        let of = |vars: &[(&str, &str)]| of(vars).unwrap().unwrap().job;
        let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2")];
        assert_eq!(of(&torchrun), "");
        let with = |vars: &[(&'static str, &'static str)]| of(&[&torchrun[..], vars].concat());
        assert_eq!(with(&[("TORCHELASTIC_RUN_ID", "none")]), "");
        // Its hosts count restarts each for itself.
        assert_eq!(with(&[("TORCHELASTIC_RUN_ID", "a"), ("TORCHELASTIC_RESTART_COUNT", "1")]), "a");
        assert_eq!(with(&[("TORCHELASTIC_RUN_ID", "a"), ("SHARDC_JOB", "b\nc")]), "bc");
        let srun = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
        let job = [&srun[..], &[("SLURM_JOB_ID", "17")]].concat();
        assert_eq!((of(&srun), of(&job)), (String::new(), "17.0".into()));
        assert_eq!(of(&[&job[..], &[("SLURM_HET_SIZE", "2")]].concat()), "");
        let open = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(of(&[&open[..], &[("PMIX_NAMESPACE", "123")]].concat()), "123");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let says = |vars: &[(&str, &str)], word: &str| {
            let text = of(vars).unwrap_err().render();
            assert!(text.contains(word), "{text}");
        };
        says(&[("RANK", "1")], "WORLD_SIZE is not");
        says(&[("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")], "LOCAL_RANK is set and RANK is not");
        says(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")], "PMI_RANK is `x`");
        says(&[("PMI_RANK", "2"), ("PMI_SIZE", "2")], "PMI_RANK is 2 and PMI_SIZE is 2");
        let world = |vars: &[(&str, &str)], ranks: usize| {
            of(vars).unwrap().unwrap().check(ranks).unwrap_err().render()
        };
        let nodes = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
        assert!(world(&nodes, 16).contains("seems to count nodes: 2 nodes of 8 ranks"));
        assert!(!world(&nodes, 3).contains("nodes"));
        let text =
            world(&[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "6")], 4);
        assert!(text.contains("SLURM_NTASKS is 6, the plan has 4 ranks"), "{text}");
        let most = usize::MAX.to_string();
        let vars = [("RANK", "0"), ("WORLD_SIZE", &*most), ("LOCAL_RANK", "0")];
        let text = world(&[&vars[..], &[("LOCAL_WORLD_SIZE", "4")]].concat(), 4);
        assert!(text.contains(&format!("WORLD_SIZE is {most}, the plan has 4")), "{text}");
    }
}
