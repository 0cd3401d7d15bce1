//! What errors offer is what then works, and what is said of flags is so.

use crate::lab::{FIXTURES, Lab};
use shardc_passes::pipeline::names;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny-llama");

/// The program of `--dump-all` that a pass takes.
fn before(dir: &str, pass: &str) -> String {
    let names: Vec<&str> = names().collect();
    let n = names.iter().position(|n| *n == pass).expect("a pass");
    format!("{dir}/{n:02}-{}.ir", names[n - 1])
}

fn behind(pass: &str) -> &'static str {
    names().skip_while(|n| *n != pass).nth(1).expect("a pass")
}

/// A program goes on with the options that it was made with, where the passes that act on them do not run.
#[test]
fn programs_go_on_with_their_own_flags() {
    let lab = Lab::new("from-flags");
    let model = format!("{FIXTURES}/llama_gqa");
    let base = ["compile", &model, "--seq", "16", "--mesh", "pp=2,dp_shard=2,tp=2"];
    let base = [&base[..], &["--microbatch", "1", "--prove", "no"]].concat();
    lab.ok(&[&base[..], &["--dump-all", "dump", "-o", "p"]].concat());
    let rows: [(&str, &[&str]); 10] = [
        ("stages", &["--speeds", "0.5,1"]),
        ("annotate", &["--sp"]),
        ("partition", &["--zero", "3"]),
        ("split", &["--recompute", "full"]),
        ("split", &["--reshard-after-forward", "no"]),
        ("step", &["--clip", "1"]),
        ("step", &["--optimizer", "sgd"]),
        ("partition", &["--freeze", "lm_head.weight"]),
        ("early-sums", &["--transport", "mpi"]),
        ("early-sums", &["--fuse", "no"]),
    ];
    for (acts, flag) in rows {
        let from = |pass, flag: &[&str]| {
            let (program, at) = (before("dump", pass), ["--from", pass]);
            [&base[..], &at, &[&program, "-o", "q"], flag]
                .concat()
                .iter()
                .map(|s| s.to_string())
                .collect::<Vec<_>>()
        };
        let after = if acts == "stages" || acts == "annotate" { "propagate" } else { behind(acts) };
        for pass in [after, "schedule"] {
            let args = from(pass, flag);
            let args: Vec<&str> = args.iter().map(|s| &**s).collect();
            let said = lab.refuses(&args, 2, "flag");
            let what = format!("--from {pass} starts behind `{acts}`: {} has no effect", flag[0]);
            assert!(said.contains(&what), "{said}");
        }
        if after != "propagate" {
            let args = from(acts, flag);
            lab.ok(&args.iter().map(|s| &**s).collect::<Vec<_>>());
        }
    }
    // Somewhere else nobody knows.
    std::fs::copy(lab.path(&before("dump", "group")), lab.path("one.ir")).expect("a copy");
    let args = [&base[..], &["--from", "group", "one.ir", "-o", "q", "--zero", "3"]].concat();
    let said = String::from_utf8(lab.ok(&args).stderr).expect("words");
    assert!(said.contains("nothing says with which flags the program of --from group"), "{said}");
    // Nor is it said then of what comes of it; what a program shows is seen all the same.
    lab.ok(&[&args[..], &["--dump-all", "new"]].concat());
    assert!(lab.path("new/20-overlap.ir").exists() && !lab.path("new/options.toml").exists());
    let half = [&base[..], &["--from", "group", "one.ir", "-o", "q", "--dtype", "bf16"]].concat();
    assert!(lab.refuses(&half, 2, "flag").contains("starts behind `precision`: --dtype"));
    // A file of somebody else is no answer, and stays; a broken one of ours is said.
    let own = std::fs::read_to_string(lab.path("dump/options.toml")).expect("options");
    let head = own.lines().next().expect("its first line");
    lab.write("options.toml", "zero = \"many\"");
    lab.ok(&args);
    lab.write("new/options.toml", "mine = 1");
    lab.refuses(&[&base[..], &["--dump-all", "new"]].concat(), 2, "output");
    assert!(lab.path("new/20-overlap.ir").exists() && lab.path("new/options.toml").exists());
    lab.write("options.toml", format!("{head}\nzero = \"many\"\n"));
    assert!(lab.refuses(&args, 2, "file").contains("options.toml"));
    // What is refused leaves the programs.
    let args = ["--from", "schedule", "dump/20-overlap.ir", "--zero", "3", "--dump-all", "dump"];
    lab.refuses(&[&base[..], &args].concat(), 2, "flag");
    assert!(lab.path("dump/20-overlap.ir").exists() && lab.path("dump/options.toml").exists());
}

/// The flags of lines such as `use --sp --microbatch 2: a rank then needs 9.07 MiB`.
fn offered(said: &str) -> Vec<Vec<String>> {
    let of = |l: &str| {
        Some(l.trim().strip_prefix("= help: use ")?.split_once(": a rank then")?.0.to_string())
    };
    let words = |flags: String| flags.split(' ').map(String::from).collect();
    said.lines().filter_map(of).map(words).collect()
}

/// Also where another schedule has another default for the microbatch.
#[test]
fn advice_for_memory_fits() {
    let lab = Lab::new("advice-fits");
    for limit in ["10MiB", "13MiB"] {
        let base = ["compile", TINY, "--mesh", "pp=2", "--seq", "128", "--memory", limit];
        let said =
            lab.refuses(&[&base[..], &["--schedule", "dualpipe-v"]].concat(), 3, "out-of-memory");
        let all = offered(&said);
        assert!(all.iter().any(|o| o.contains(&"--schedule".to_string())), "{said}");
        for flags in all {
            let own = if flags.iter().any(|w| w == "--schedule") {
                vec![]
            } else {
                vec!["--schedule", "dualpipe-v"]
            };
            let flags: Vec<&str> = flags.iter().map(|s| &**s).collect();
            lab.ok(&[&base[..], &own, &flags].concat());
        }
    }
    // Nor is a flag offered that another one is in the way of.
    let base = ["compile", TINY, "--mesh", "dp=2,cp=2", "--seq", "128", "--memory", "10MiB"];
    let said = lab.refuses(&base, 3, "out-of-memory");
    assert!(said.contains("--shard auto"), "{said}");
    let said = lab.refuses(&[&base[..], &["--cp-mode", "all-gather"]].concat(), 3, "out-of-memory");
    assert!(!said.contains("--shard auto"), "{said}");
}

/// The nearest legal numbers are among those that are named, and compile with all else as it is.
#[test]
fn nearest_meshes_compile() {
    let lab = Lab::new("nearest");
    let experts = format!("{FIXTURES}/deepseek_v3");
    let said = lab.refuses(&["compile", &experts, "--mesh", "tp=2,ep=2"], 2, "experts-mesh");
    assert!(said.contains("--mesh tp=2,ep=2,etp=1"), "{said}");
    lab.ok(&["compile", &experts, "--mesh", "tp=2,ep=2,etp=1"]);
    let deep = format!("{FIXTURES}/llama_deep");
    let speeds = ["--speeds", "0.5,1,0.5,1"];
    let check = [&["check", &deep, "--mesh", "pp=4,tp=3"][..], &speeds].concat();
    let said = lab.shardc(&check);
    let said = String::from_utf8([said.stdout, said.stderr].concat()).expect("words");
    let (mut meshes, mut words) = (vec![], said.split_whitespace());
    while let Some(w) = words.next() {
        meshes.extend((w == "--mesh").then(|| words.next()).flatten());
    }
    for mesh in meshes {
        assert!(mesh.contains("pp=4"), "{said}");
    }
    let one = ["compile", &deep, "--mesh", "tp=2", "--speeds", "0.5,1"];
    assert!(lab.refuses(&one, 2, "flag").contains("is not 1 positive number\n"));
}

/// Numbers of experts that are offered are those of the ranks that there are: a width of 122 is no reason to have 488.
#[test]
fn experts_are_offered_for_the_ranks_of_the_mesh() {
    let lab = Lab::new("experts-offered");
    let file = format!("{FIXTURES}/deepseek_v3/config.json");
    let config = std::fs::read_to_string(file).expect("a config");
    let model = |name: &str, changes: &[[&str; 2]]| {
        std::fs::create_dir(lab.path(name)).expect("a folder");
        let new = changes.iter().fold(config.clone(), |c, [from, to]| {
            assert!(c.contains(from), "{from}");
            c.replace(from, to)
        });
        std::fs::write(lab.path(&format!("{name}/config.json")), new).expect("a config");
    };
    let size = ["\"moe_intermediate_size\": 16", "\"moe_intermediate_size\": 122"];
    model("wide", &[size]);
    let one = ["\"n_group\": 4", "\"n_group\": 1"];
    let top = ["\"topk_group\": 2", "\"topk_group\": 1"];
    model("many", &[["\"n_routed_experts\": 8", "\"n_routed_experts\": 122"], one, top]);
    for (name, mesh, code, wanted) in [
        ("wide", "dp_shard=8,etp=8", "expert-width-not-divisible", "dp_shard=8,etp=2"),
        ("wide", "dp=8,etp=8", "expert-width-not-divisible", "dp_replicate=8,etp=1"),
        ("wide", "dp_shard=2,tp=4", "expert-width-not-divisible", "dp_shard=2,tp=4,etp=2"),
        ("many", "dp_shard=8,ep=8", "experts-not-divisible", "dp_shard=8,ep=2"),
    ] {
        let said = lab.refuses(&["compile", name, "--mesh", mesh], 2, code);
        assert!(said.contains(&format!("--mesh {wanted}")), "{said}");
        assert!(!said.contains("61"), "{said}");
    }
}

/// Rows that are left open are those of dp, as with one microbatch; what else is asked for is refused with what works.
#[test]
fn open_rows_are_those_of_dp() {
    let lab = Lab::new("open-rows");
    let base = ["compile", TINY, "--mesh", "dp=2", "--microbatch", "2", "-o"];
    let program = |dir: &str| std::fs::read_to_string(lab.path(&format!("{dir}/programs/all.ir")));
    lab.ok(&[&base[..], &["plain"]].concat());
    lab.ok(&[&base[..], &["open", "--shard", "input_ids=?,?"]].concat());
    assert_eq!(program("open").expect("a program"), program("plain").expect("a program"));
    let said = lab.refuses(&[&base[..], &["no", "--shard", "input_ids=-,-"]].concat(), 2, "shard");
    assert!(said.contains("--shard 'input_ids=dp_replicate,…', or use --microbatch 4"), "{said}");
    lab.ok(&[&base[..], &["own", "--shard", "input_ids=dp_replicate,-"]].concat());
    lab.refuses(&[&base[..], &["no", "--shard", "input_ids=?,dp_replicate"]].concat(), 2, "shard");
    let whole =
        ["compile", TINY, "--mesh", "dp=2", "--microbatch", "4", "--shard", "input_ids=-,-"];
    lab.ok(&whole);
}

/// Numbers of a machine are positive, and a flag in help is one.
#[test]
fn numbers_of_machines_are_positive() {
    let lab = Lab::new("what-ifs");
    let base = ["plan", TINY, "--gpus", "2", "--machine", "h100-sxm", "--what-if"];
    let said = lab.refuses(&[&base[..], &["memory=1"]].concat(), 2, "flag");
    assert!(said.contains("use --what-if memory=1GiB, or 1B"), "{said}");
    for bad in ["nic=-1", "nic=0", "hbm=inf", "link=NaN"] {
        let said = lab.refuses(&[&base[..], &[bad]].concat(), 2, "device");
        let name = bad.split_once('=').expect("a name").0;
        assert!(said.contains(&format!("give {name} a positive number")), "{said}");
    }
}
