//! Ranks as processes with a device each, which exchange by NCCL, or by a stand-in for it whose
//! messages are files. What ranks call is what the plan says, in its order.

use super::machine::{HERE, Machine, compare};
use shardc::plan_dir;
use shardc_ir::kernel::{Block, Exchange, Kernel};
use shardc_ir::plan::{Instr, Plan};
use shardc_testing::port;
use std::collections::BTreeSet;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The machine, if its library is the stand-in, with a folder of that name: an empty one, if it is `fresh`.
pub fn machine(name: &str, fresh: bool) -> Option<Machine> {
    let m = if fresh { Machine::new(name)? } else { Machine::again(name)? };
    if m.libraries.is_none() {
        println!("skipped: these tests need as many devices as ranks, and record what is called");
        return None;
    }
    Some(m)
}

/// Code in the plan: else every process would compile it.
pub const CODE: [&str; 4] = ["--device", "cuda", "--arch", "sm_90a"];

/// Ranks to be started as torchrun does.
pub fn ranks_of(m: &Machine, ranks: usize, args: &[&str], also: &[(&str, &str)]) -> Vec<Command> {
    let (world, port, dir) = (ranks.to_string(), port().to_string(), m.dir.display().to_string());
    let one = |rank: usize| {
        let rank = rank.to_string();
        let vars = [
            ("RANK", &*rank),
            ("WORLD_SIZE", &*world),
            ("LOCAL_RANK", &*rank),
            ("LOCAL_WORLD_SIZE", &*world),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &*port),
            ("STANDIN_DEVICES", &*world),
            ("STANDIN_DIR", &*dir),
        ];
        let mut c = m.command(args, &vars);
        c.envs(also.iter().copied()).stdin(Stdio::null());
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    };
    (0..ranks).map(one).collect()
}

/// Starts them all; what each has said.
fn torchrun(m: &Machine, ranks: usize, args: &[&str], also: &[(&str, &str)]) -> Vec<Output> {
    let mut all = ranks_of(m, ranks, args, also);
    let all: Vec<_> = all.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
    all.into_iter().map(|c| c.wait_with_output().expect("it ends")).collect()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(all: &[Output]) {
    for o in all {
        assert!(o.status.success(), "{}", text(&o.stderr));
    }
}

/// What a rank calls in one step, in its order: a line per call, with the members of the group, the
/// bytes, and the other rank or the root if there is one; for rows whose number is known only later the
/// bytes of one.
pub fn calls(plan: &Plan, rank: usize) -> Vec<Result<String, usize>> {
    let program = shardc_codegen::program(plan, rank).expect("a program");
    let class = &plan.classes[plan.class_of(rank)];
    let bytes = |b: &Block| b.len() * b.elem.bytes();
    let mut all = vec![];
    let mut posted = 0;
    for i in &class.step {
        let call = match i {
            Instr::Call(call) => call,
            Instr::Sent { .. } => continue,
            // It was called where it was posted.
            Instr::Recv(_) if posted > 0 => {
                posted -= 1;
                continue;
            }
            Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
                posted += usize::from(matches!(i, Instr::PostRecv(_)));
                let other = plan.peer(rank, t.with);
                let sends = matches!(i, Instr::Send(_));
                let (kind, from, to) =
                    if sends { ("send", rank, other) } else { ("recv", other, rank) };
                all.push(Ok(format!("{kind} {from},{to} {} {other}", t.bytes)));
                continue;
            }
        };
        for k in &program[call.func] {
            let Kernel::Collective(k) = k else { continue };
            let members = plan.module.mesh.group(k.axes, rank);
            let me = members.iter().position(|&r| r == rank).expect("a member");
            let ways = members.len();
            let group = members.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            let mut add = |kind: &str, bytes: usize, other: Option<usize>| {
                let other = other.map_or(String::new(), |p| format!(" {}", members[p]));
                all.push(Ok(format!("{kind} {group} {bytes}{other}")));
            };
            match &k.exchange {
                Exchange::AllReduce { tensors } => {
                    tensors.iter().for_each(|t| add("all_reduce", bytes(&t.from), None));
                }
                Exchange::AllGather { tensors } => tensors.iter().for_each(|t| {
                    if t.to.iter().all(|b| bytes(b) == bytes(&t.from)) {
                        return add("all_gather", bytes(&t.from), None);
                    }
                    // NCCL gathers equal pieces only.
                    let parts = t.to.iter().enumerate().filter(|x| bytes(x.1) > 0);
                    parts.for_each(|(p, b)| add("broadcast", bytes(b), Some(p)));
                }),
                Exchange::ReduceScatter { tensors } => tensors.iter().for_each(|t| {
                    if t.from.iter().all(|b| bytes(b) == bytes(&t.to)) {
                        return add("reduce_scatter", bytes(&t.to), None);
                    }
                    let parts = t.from.iter().enumerate().filter(|x| bytes(x.1) > 0);
                    parts.for_each(|(p, b)| add("reduce", bytes(b), Some(p)));
                }),
                Exchange::Reduce { from, .. } => {
                    let parts = from.iter().enumerate().filter(|x| bytes(x.1) > 0);
                    parts.for_each(|(p, b)| add("reduce", bytes(b), Some(p)));
                }
                Exchange::AllToAll { from, to, .. } => {
                    for p in 0..ways {
                        add("send", bytes(&from[p]), Some(p));
                        add("recv", bytes(&to[p]), Some(p));
                    }
                }
                Exchange::AllToAllV { from, .. } => {
                    let rows = &from[0].rows;
                    all.push(Err(rows.extents[3] * rows.elem.bytes()));
                }
                Exchange::Permute { shift, from, to } => {
                    add("send", bytes(from), Some((me + shift) % ways));
                    add("recv", bytes(to), Some((me + ways - shift) % ways));
                }
                Exchange::Broadcast { root, to, .. } => {
                    add("broadcast", bytes(to), Some(root % ways));
                }
            }
        }
    }
    all
}

/// Compares what ranks have called in some steps with the plan.
fn called(m: &Machine, plan: &Plan, steps: usize) {
    let ranks = plan.module.mesh.ranks();
    let edges: Vec<String> = {
        let all = (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b)));
        let sends = |x: &(usize, usize)| {
            let classes = (plan.class_of(x.0), plan.class_of(x.1));
            plan.edges().contains(&classes) && plan.peer(x.0, classes.1) == x.1
        };
        all.filter(sends).map(|(a, b)| format!("{a},{b}")).collect()
    };
    for rank in 0..ranks {
        let log = std::fs::read_to_string(m.dir.join(format!("log/rank-{rank}")));
        let log = log.unwrap_or_default();
        let mut found = log.lines();
        let mut want: Vec<String> = vec![];
        // A byte each way, so that NCCL connects them.
        let class = plan.class_of(rank);
        for (from, to) in plan.edges() {
            let (out, into) = (class == from, class == to);
            if !out && !into {
                continue;
            }
            let other = plan.peer(rank, if out { to } else { from });
            let (kind, pair) = if out { ("send", (rank, other)) } else { ("recv", (other, rank)) };
            want.push(format!("{kind} {},{} 1 {other}", pair.0, pair.1));
        }
        let mut first: Vec<String> = found.by_ref().take(want.len()).map(str::to_string).collect();
        first.sort();
        want.sort();
        assert_eq!(first, want, "rank {rank}");
        // Then an element of every kind of exchange in every group, each once.
        let kind_of = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let (mut first, mut once) = (BTreeSet::new(), BTreeSet::new());
        let mut rest = found.clone();
        while let Some(line) = rest.next().filter(|l| l.split(' ').nth(2) == Some("4"))
            && once.insert(line)
        {
            first.insert(kind_of(line));
            found.next();
        }
        let mut want = vec![];
        (0..steps).for_each(|_| want.extend(calls(plan, rank)));
        assert_eq!(want.is_empty(), ranks == 1, "rank {rank} calls nothing");
        for (i, line) in want.iter().enumerate() {
            match line {
                Ok(line) => {
                    assert_eq!(found.next(), Some(&**line), "rank {rank}, call {i}");
                    let group = line.split(' ').nth(1).unwrap_or_default();
                    let edge = edges.iter().any(|e| e == group);
                    assert!(edge || first.contains(&kind_of(line)), "{line} is not in {first:?}");
                }
                // Rows of experts: as many sends and receives as there are others with rows.
                Err(row) => {
                    let mut rest = found.clone();
                    let swaps = |l: &&str| {
                        let mut words = l.split(' ');
                        let [kind, group, bytes] =
                            [(); 3].map(|()| words.next().unwrap_or_default());
                        ["send", "recv"].contains(&kind)
                            && bytes.parse::<usize>().is_ok_and(|n| n % row == 0)
                            && !edges.iter().any(|e| e == group)
                    };
                    while rest.next().as_ref().is_some_and(swaps) {
                        found.next();
                    }
                }
            }
        }
        assert_eq!(found.next(), None, "rank {rank}");
    }
}

/// Losses and norms of gradients, as printed.
pub fn numbers(out: &str) -> Vec<[f64; 2]> {
    let line = |l: &str| serde_json::from_str::<serde_json::Value>(l).expect("JSON");
    let number = |x: &serde_json::Value| x.as_f64().expect("a number");
    out.lines().map(line).map(|l| [number(&l["loss"]), number(&l["grad_norm"])]).collect()
}

/// Trains a fixture 2 steps by ranks that are processes with a device each: losses and norms of
/// gradients are those of ranks that are threads on the CPU, and the calls those of the plan.
fn same(model: &str, ranks: usize, flags: &[&str], products: &str, tolerance: f64) -> Option<()> {
    let name = format!("nccl-{model}{}", flags.concat().replace(['-', '=', ','], "_"));
    let m = machine(&name, true)?;
    let model = format!("{HERE}/tests/fixtures/{model}");
    let compile = ["compile", &model, "--global-batch", "4", "--seq", "8", "-o", "plan"];
    m.ok(&[&compile[..], &["--transport", "nccl"], &CODE, flags].concat(), &[]);
    let run = ["run", "plan", "--weights", &model, "--steps", "2", "--format", "json"];
    std::fs::create_dir_all(m.dir.join("log")).expect("a folder");
    let log = m.dir.join("log").display().to_string();
    let cuda =
        [&run[..], &["--device", "cuda", "--timeout", "120", "--products", products]].concat();
    let all = torchrun(&m, ranks, &cuda, &[("STANDIN_LOG", &log)]);
    succeeded(&all);
    let said = text(&all[0].stderr);
    for rank in 0..ranks {
        assert!(said.contains(&format!(", device {rank}")), "{said}");
    }
    let driver = std::fs::read_to_string(m.dir.join("log/driver")).expect("a log");
    assert!(driver.contains("\ngraph "), "{driver}");
    called(&m, &plan_dir::read(&m.dir.join("plan")).expect("a plan").plan, 2);
    let want = numbers(&m.ok(&[&run[..], &["--transport", "threads"]].concat(), &[]));
    let found = numbers(&text(&all[0].stdout));
    assert_eq!((want.len(), found.len()), (2, 2));
    for (w, f) in want.iter().flatten().zip(found.iter().flatten()) {
        assert!((w - f).abs() <= tolerance * w.abs(), "{found:?} is not {want:?}");
    }
    Some(())
}

#[test]
fn tensor_and_data_parallel() {
    let flags = ["--mesh", "dp=2,tp=2", "--sp", "--microbatch", "1", "--clip", "0.5"];
    same("llama_gqa", 4, &flags, "own", 1e-4);
}

#[test]
fn a_pipeline_both_ways() {
    let flags = ["--mesh", "pp=2,tp=2", "--microbatch", "1", "--schedule", "zb-v"];
    same("llama_deep", 4, &flags, "own", 1e-4);
}

/// All that processes hold comes to process 0.
#[test]
fn sharded_weights() {
    let Some(m) = machine("nccl-weights", true) else { return };
    let model = format!("{HERE}/tests/fixtures/qwen3");
    let compile = ["compile", &model, "--global-batch", "8", "--seq", "16", "-o", "plan"];
    m.ok(&[&compile[..], &CODE, &["--mesh", "dp_shard=2", "--zero", "3"]].concat(), &[]);
    let batch = format!("{model}/batch.safetensors");
    let run = ["run", "plan", "--weights", &model, "--batch", &batch, "--steps", "3"];
    m.ok(&[&run[..], &["--dump", "cpu"]].concat(), &[]);
    let cuda = ["--dump", "cuda", "--transport", "nccl", "--device", "cuda"];
    succeeded(&torchrun(&m, 2, &[&run[..], &cuda].concat(), &[]));
    compare(&m.tensors("cpu"), &m.tensors("cuda"), 1e-4);
}

/// bf16 has 8 bits; a norm of gradients is that of many of them.
#[test]
fn sharded_weights_of_16_bits() {
    let flags = ["--mesh=dp_shard=2", "--zero=3", "--dtype=bf16", "--fuse=rows"];
    same("qwen3", 2, &flags, "cublaslt", 0.01);
}

#[test]
fn a_ring_and_experts() {
    same("llama_gqa", 2, &["--mesh", "cp=2", "--cp-mode", "ring"], "cublaslt", 1e-4);
    same("mixtral", 2, &["--mesh", "dp=2,ep=2"], "cublaslt", 1e-4);
}

/// Of 8 tokens ranks have 3, 3 and 2: keys and values are gathered from unequal pieces.
#[test]
fn pieces_of_unequal_sizes() {
    same("llama_gqa", 3, &["--mesh", "cp=3"], "own", 1e-4);
}

/// One process, which nobody has started, is a job too. And what does not fit is named.
#[test]
fn one_rank_and_misfits() {
    let Some(()) = same("llama_mha", 1, &[], "cublaslt", 1e-4) else { return };
    let Some(m) = machine("nccl-misfits", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "2", "--seq", "8", "--mesh", "tp=2", "--transport", "nccl"];
    m.ok(&[&["compile", &model, "-o", "plan"][..], &CODE, &flags].concat(), &[]);
    let refused = |o: &Output, status: i32, words: &[&str]| {
        let said = text(&o.stderr);
        assert_eq!(o.status.code(), Some(status), "{said}");
        words.iter().for_each(|w| assert!(said.contains(w), "no `{w}` in {said}"));
    };
    let cuda = ["run", "plan", "--device", "cuda"];
    refused(&m.shardc(&["run", "plan"], &[]), 2, &["error[flag]", "NCCL connects devices"]);
    let o = m.shardc(&[&cuda[..], &["--transport", "mpi"]].concat(), &[]);
    refused(&o, 2, &["error[flag]", "MPI connects processors"]);
    refused(&m.shardc(&cuda, &[]), 5, &["error[launcher]", "is 1, the plan has 2 ranks"]);
    let two = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
    refused(&m.shardc(&cuda, &two), 5, &["error[launcher]", "MASTER_ADDR and MASTER_PORT are not"]);
    let word = [&two[..], &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "x")]].concat();
    refused(&m.shardc(&cuda, &word), 5, &["error[launcher]", "MASTER_PORT is `x`"]);
    // Two on one device: one message, and both end.
    let all = torchrun(&m, 2, &cuda, &[("STANDIN_DEVICES", "1")]);
    refused(&all[0], 5, &["error[launcher]", "processes 0 (", " share a device"]);
    assert_eq!(all[1].status.code(), Some(5));
    assert!(text(&all[1].stderr).is_empty(), "{}", text(&all[1].stderr));
    // Without the library on one of them: all end, and the cause is told once.
    let without = m.dir.join("half");
    std::fs::create_dir_all(&without).expect("a folder");
    let libraries = m.libraries.as_deref().expect("stand-ins");
    std::fs::copy(libraries.join("libcuda.so.1"), without.join("libcuda.so.1")).expect("a copy");
    let mut both = ranks_of(&m, 2, &cuda, &[]);
    both[1].env("LD_LIBRARY_PATH", &without);
    let both: Vec<Child> = both.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
    let said: Vec<Output> =
        both.into_iter().map(|c| c.wait_with_output().expect("it ends")).collect();
    let all = said.iter().map(|o| text(&o.stderr)).collect::<String>();
    assert!(said.iter().all(|o| o.status.code() == Some(5)), "{all}");
    assert_eq!(all.matches("error[missing-library]: libnccl.so.2").count(), 1, "{all}");
    // Without it alone.
    let without = m.dir.join("without");
    std::fs::create_dir_all(&without).expect("a folder");
    let libraries = m.libraries.as_deref().expect("stand-ins");
    std::fs::copy(libraries.join("libcuda.so.1"), without.join("libcuda.so.1")).expect("a copy");
    let o = m.shardc(&cuda, &[("LD_LIBRARY_PATH", &without.display().to_string())]);
    refused(&o, 5, &["error[missing-library]: libnccl.so.2 is not here"]);
}

/// Ranks are found by the variables of every launcher.
#[test]
fn each_launcher_starts_a_job() {
    let Some(m) = machine("nccl-launchers", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "2", "--seq", "8", "--mesh", "tp=2", "--mode", "infer"];
    m.ok(&[&["compile", &model, "-o", "plan"][..], &CODE, &flags].concat(), &[]);
    let run = ["run", "plan", "--device", "cuda", "--transport", "nccl"];
    let torchrun = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let srun = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"];
    let mpich = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    let open_mpi = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ];
    let started = |names: [&str; 4], world: &str| -> Vec<Output> {
        let mut all = ranks_of(&m, 2, &run, &[("SLURM_STEP_ID", "0")]);
        for (rank, c) in all.iter_mut().enumerate() {
            for v in torchrun {
                c.env_remove(v);
            }
            let rank = rank.to_string();
            c.envs(names.iter().zip([&*rank, world, &*rank, "2"]));
        }
        let all: Vec<Child> = all.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
        all.into_iter().map(|c| c.wait_with_output().expect("it ends")).collect()
    };
    for (names, name) in [(srun, "srun"), (mpich, "MPICH"), (open_mpi, "Open MPI")] {
        let all = started(names, "2");
        succeeded(&all);
        let said = text(&all[0].stderr);
        assert!(said.contains(&format!("2 processes, started by {name}")), "{said}");
    }
    // One per node, as some sites set it.
    let all = started(srun, "1");
    assert_eq!(all[0].status.code(), Some(5));
    let said = text(&all[0].stderr);
    assert!(said.contains("SLURM_NTASKS is 1, the plan has 2 ranks"), "{said}");
    assert!(said.contains("seems to count nodes"), "{said}");
    assert!(text(&all[1].stderr).contains("SLURM_PROCID is 1 and SLURM_NTASKS is 1"));
}

/// A process that is killed ends the job, and those that are left say in which collective they are,
/// though their devices do the waiting.
#[test]
fn a_killed_process_is_named() {
    let Some(m) = machine("nccl-killed", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "2", "--seq", "8", "--mesh", "tp=2"];
    m.ok(&[&["compile", &model, "-o", "plan"][..], &CODE, &flags].concat(), &[]);
    let run = ["run", "plan", "--device", "cuda", "--transport", "nccl", "--steps", "100000"];
    let start = |(rank, mut c): (usize, Command)| {
        let file = |name: &str| std::fs::File::create(m.dir.join(name)).expect("a file");
        c.stdout(file(&format!("out{rank}"))).stderr(file(&format!("err{rank}")));
        c.spawn().expect("shardc starts")
    };
    let both = ranks_of(&m, 2, &run, &[]).into_iter().enumerate();
    let mut both: Vec<Child> = both.map(start).collect();
    let read = |name: &str| std::fs::read_to_string(m.dir.join(name)).unwrap_or_default();
    let since = Instant::now();
    while !read("out0").contains("step     2") {
        assert!(since.elapsed() < Duration::from_secs(300), "{}", read("err0"));
        std::thread::sleep(Duration::from_millis(20));
    }
    both[1].kill().expect("it runs");
    both[1].wait().expect("it ends");
    let status = both[0].wait().expect("it ends");
    let said = read("err0");
    assert_eq!(status.code(), Some(6), "{said}");
    // The other may have been anywhere.
    for w in ["error[rank-failed]: process 1 (", "was killed", "rank 0 "] {
        assert!(said.contains(w), "no `{w}` in {said}");
    }
}

/// A device that never ends is found out by the rank that waits for it, and the job ends.
#[test]
fn a_device_that_hangs_ends_the_job() {
    let Some(m) = machine("nccl-hangs", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_mha");
    let flags = ["--global-batch", "2", "--seq", "8", "--mesh", "tp=2"];
    m.ok(&[&["compile", &model, "-o", "plan"][..], &CODE, &flags].concat(), &[]);
    let run = ["run", "plan", "--device", "cuda", "--transport", "nccl", "--timeout", "3"];
    let run = [&run[..], &["--start-timeout", "60"]].concat();
    let mut both = ranks_of(&m, 2, &run, &[]);
    both[1].env("STANDIN_HANG", "9");
    let both: Vec<Child> = both.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
    let both: Vec<Output> =
        both.into_iter().map(|c| c.wait_with_output().expect("it ends")).collect();
    let said = both.iter().map(|o| text(&o.stderr)).collect::<String>();
    assert!(both.iter().all(|o| o.status.code() == Some(6)), "{said}");
    assert_eq!(said.matches("error[").count(), 1, "{said}");
    assert!(
        said.contains("waited 3 s for its device") && said.contains(" over tp [0, 1]"),
        "{said}"
    );
}

/// Of all collectives, or sends, of 2 steps on the device of rank 0 of 2 on two hosts: beside each, how many kernels
/// begin.
fn beside(m: &Machine, [begins, ends]: [char; 2], far: &str) -> Vec<usize> {
    let log = m.dir.join("order");
    std::fs::create_dir_all(&log).expect("a folder");
    let dir = log.display().to_string();
    let also = [("STANDIN_LOG", &*dir), ("STANDIN_HOST", "1"), ("STANDIN_FAR", far)];
    succeeded(&torchrun(m, 2, &["run", "plan", "--device", "cuda", "--steps", "2"], &also));
    let order = std::fs::read_to_string(log.join("order-0")).expect("a log");
    let (mut open, mut kernels, mut all) = (0, 0, vec![]);
    for line in order.lines() {
        kernels += usize::from(line == "k" && open > 0);
        open += usize::from(line.starts_with(begins));
        if line.starts_with(ends) {
            open -= 1;
            all.push(std::mem::take(&mut kernels));
        }
    }
    all
}

/// What is gathered once per step is on its way while the first microbatch begins to work: what `@step_prologue` has
/// begun is waited for where it is used, and nothing works in `@step_prologue`.
#[test]
fn collectives_go_on_across_calls() {
    let Some(m) = machine("across", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_deep");
    let compile = ["compile", &model, "--global-batch", "4", "--seq", "8", "--mode", "infer"];
    let mesh = ["--mesh", "dp=2", "--zero", "1", "--transport", "nccl", "-o", "plan"];
    m.ok(&[&compile[..], &mesh, &CODE].concat(), &[]);
    let all = beside(&m, ['+', '-'], "10000");
    let some = all.iter().filter(|&&kernels| kernels > 0).count();
    println!("kernels begin beside {some} of {} collectives", all.len());
    assert!(all.len() > 100 && some > 1, "{all:?}");
}

/// What a stage has sent is on its way while its next microbatch works, although links are slow.
#[test]
fn work_goes_on_beside_sends() {
    let Some(m) = machine("sends", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_deep");
    let compile = ["compile", &model, "--global-batch", "16", "--seq", "8", "-o", "plan"];
    let mesh = ["--mesh", "pp=2", "--schedule", "gpipe", "--microbatch", "2"];
    m.ok(&[&compile[..], &mesh, &["--transport", "nccl"], &CODE].concat(), &[]);
    let all = beside(&m, ['>', '<'], "200000");
    println!("kernels begin beside sends: {all:?}");
    // A byte at the start, and then as many in each step; later ones are of microbatches whose memory is taken.
    let (first, second) = all[1..].split_at(all.len() / 2);
    assert!(first.len() == 9 && second.len() == 9 && first[0] > 0 && second[0] > 0, "{all:?}");
}

/// On two hosts of two ranks each, what leaves a host is not in the way of what does not: collectives of tp begin and
/// end while one of ZeRO is on its way. Where NCCL does not start kernels in the order of calls there is one stream.
#[test]
fn what_leaves_a_host_is_in_nobodys_way() {
    let Some(m) = machine("lanes", true) else { return };
    let model = format!("{HERE}/tests/fixtures/llama_gqa");
    let compile = ["compile", &model, "--global-batch", "4", "--seq", "8", "-o", "plan"];
    let mesh = ["--mesh", "dp=2,tp=2", "--zero", "3", "--transport", "nccl"];
    m.ok(&[&compile[..], &mesh, &CODE].concat(), &[]);
    let run = ["run", "plan", "--device", "cuda", "--steps", "2", "--format", "json"];
    let beside = |in_order: &str| {
        let log = m.dir.join(format!("order-{in_order}"));
        std::fs::create_dir_all(&log).expect("a folder");
        let dir = log.display().to_string();
        let also = [
            ("STANDIN_LOG", &*dir),
            ("STANDIN_HOST", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
            ("NCCL_LAUNCH_ORDER_IMPLICIT", in_order),
        ];
        let mut all = ranks_of(&m, 4, &run, &also);
        for (rank, c) in all.iter_mut().enumerate() {
            c.env("LOCAL_RANK", (rank % 2).to_string());
        }
        let all: Vec<_> = all.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
        let all: Vec<_> = all.into_iter().map(|c| c.wait_with_output().expect("it ends")).collect();
        succeeded(&all);
        let order = std::fs::read_to_string(log.join("order-0")).expect("a log");
        // Of groups within the host of rank 0, those that ended while one that leaves it was open.
        let (mut open, mut count) = (0, [0; 2]);
        for line in order.lines().filter(|l| l.starts_with(['+', '-'])) {
            let near = line.ends_with(" 0 1");
            match (near, line.starts_with('+')) {
                (false, true) => open += 1,
                (false, false) => open -= 1,
                (true, begins) => count[usize::from(!begins && open > 0)] += usize::from(!begins),
            }
        }
        (numbers(&text(&all[0].stdout)), count)
    };
    let ((apart, [_, some]), (one, [all, none])) = (beside("1"), beside("0"));
    println!("{some} collectives of tp ended beside one of ZeRO, of {all}");
    assert!(some > 0 && none == 0 && all > some, "{some}, {none} of {all}");
    assert_eq!(apart, one);
}
