//! Each flag of `compile --help`, alone and with each search: the plan that it makes is one that `verify` makes again.

use crate::lab::Lab;
use serde_json::json;
use shardc::flags::Flags;
use shardc::flags::page::page;
use shardc::flags::spec::{Kind, all};
use shardc_testing::taken;
use std::collections::BTreeSet;

/// A mesh, and a flag's words with what they need; a blank separates words.
type Row = (&'static str, &'static str);

/// At least one row of each flag. With several microbatches, so that accumulation is seen.
const ROWS: [Row; 87] = [
    ("dp=2,tp=2", "--mesh"),
    ("dp=auto", "--gpus 2"),
    ("dp=2,tp=2", "--order dp-tp"),
    ("dp=2", "--node 1"),
    ("dp=2", "--mode infer"),
    ("dp=2", "--global-batch 16"),
    ("dp=2", "--microbatch 2"),
    ("dp=2", "--seq 8"),
    ("dp=2", "--dtype bf16"),
    ("dp=2", "--dtype f16"),
    ("dp=2", "--grad-dtype bf16 --dtype bf16"),
    ("dp=2", "--seed 3"),
    ("dp=2", "--zero 1"),
    ("dp=2", "--zero 2"),
    ("dp=2", "--zero 3"),
    ("dp=2", "--zero-accumulate gradients --zero 2"),
    ("dp=2", "--zero-accumulate gradients --zero 3"),
    ("dp=2", "--zero-accumulate weights --zero 3"),
    ("dp=2", "--zero-accumulate both --zero 3"),
    ("tp=2", "--sp"),
    ("dp=2,ep=2", "--moe-bound 1.5"),
    ("dp=2", "--moe-capacity 1.0"),
    ("dp=2", "--moe-aux 0.01"),
    ("dp=2", "--moe-z-loss 0.01"),
    ("dp=2", "--moe-bias-rate 0.01"),
    ("dp=2", "--mtp 0.3"),
    ("cp=2", "--cp-mode ring"),
    ("cp=2", "--cp-mode ulysses"),
    ("cp=2", "--cp-split zigzag"),
    ("tp=4", "--tp-mode 2d --microbatch 2"),
    ("tp=8", "--tp-depth 2 --tp-mode 2.5d --microbatch 4"),
    ("tp=4", "--tp-steps summa --tp-mode 2d --microbatch 2"),
    ("pp=2", "--schedule gpipe"),
    ("pp=2", "--schedule zb-h1"),
    ("pp=2", "--chunks 1"),
    ("pp=2", "--layers equal"),
    ("pp=2", "--speeds 1,2"),
    ("dp=2", "--reshard-after-forward no --zero 3"),
    ("dp=2", "--fuse rows"),
    ("dp=2", "--fuse no"),
    ("dp=2", "--dropout 0.1"),
    ("dp=2", "--documents rows"),
    ("dp=2", "--documents eod=2"),
    ("dp=2", "--documents eod=2,pad=0"),
    ("dp=2", "--recompute none"),
    ("dp=2", "--recompute selective"),
    ("dp=2", "--recompute full"),
    ("dp=2", "--recompute layers:1"),
    ("dp=2", "--recompute sqrt"),
    ("dp=2", "--loss-chunks 2"),
    ("dp=2", "--memory 1GiB"),
    ("dp=2", "--hardware h100-sxm --shard auto"),
    ("dp=2", "--optimizer sgd"),
    ("dp=2", "--optimizer lion --betas 0.9,0.99"),
    ("dp=2", "--optimizer adafactor"),
    ("tp=2", "--optimizer muon --muon-dtype f32"),
    ("dp=2", "--optim *.weight=lion,lr=1e-4 --optim hidden=muon,scale=none"),
    ("dp=2", "--lr 0.01"),
    ("dp=2", "--lr-schedule warmup-cosine"),
    ("dp=2", "--warmup 5 --lr-schedule warmup-cosine"),
    ("dp=2", "--total-steps 50 --lr-schedule warmup-cosine"),
    ("dp=2", "--min-lr 1e-5 --lr-schedule warmup-cosine"),
    ("dp=2", "--decay-steps 20 --lr-schedule warmup-linear"),
    ("dp=2", "--betas 0.9,0.95"),
    ("dp=2", "--eps 1e-6"),
    ("dp=2", "--weight-decay 0.1"),
    ("dp=2", "--decay all"),
    ("dp=2", "--clip 1"),
    ("dp=2", "--loss-scale 1024 --dtype f16"),
    ("dp=2", "--initial-loss-scale 1024 --dtype f16"),
    ("dp=2", "--min-loss-scale 2 --dtype f16"),
    ("dp=2", "--loss-scale-window 10 --dtype f16"),
    ("dp=2", "--hysteresis 1 --dtype f16"),
    ("dp=2", "--freeze *.q_proj.weight"),
    ("dp=2", "--freeze model.embed_tokens.weight --zero 3"),
    ("tp=2", "--lora r=2,dropout=0.1,rslora"),
    ("dp=2", "--train *norm.weight --lora r=2,alpha=3,targets=q_proj --zero 3"),
    ("tp=2", "--shard *.q_proj.weight=-,tp"),
    ("tp=2", "--shard *.o_proj.weight=replicated"),
    ("dp=2", "--transport mpi"),
    ("dp=2", "--transport nccl --zero 2"),
    ("dp=2", "--prove no"),
    ("dp=2", "--verify-each"),
    ("dp=2", "--device cpu"),
    ("dp=2", "--verbose"),
    ("dp=2", "--quiet"),
    ("dp=2", "--format json"),
];

/// Flags that say where something is written or read, and which plan-making flags have nothing to do with.
const OTHER: [&str; 9] = [
    "--output",
    "--dump-after",
    "--dump-all",
    "--from",
    "--arch",
    "--optim-file",
    "--lora-from",
    "--help",
    "--version",
];

/// What is searched for: nothing, and each of the searches; with the flags by which a row has it already.
const SEARCHES: [(&str, &[&str]); 5] = [
    ("", &[]),
    ("--recompute fit --memory 64MiB", &["--recompute", "--memory"]),
    ("--loss-chunks auto", &["--loss-chunks"]),
    ("--schedule search", &["--schedule"]),
    ("--shard auto", &["--shard"]),
];

/// The flags that `compile --help` names.
fn named(lab: &Lab) -> BTreeSet<String> {
    let help = String::from_utf8(lab.ok(&["compile", "--help"]).stdout).expect("text");
    // What a flag is for stands further to the right.
    let heads = help.lines().filter(|l| l.len() - l.trim_start().len() < 8).map(str::trim_start);
    let heads = heads.filter(|l| l.starts_with('-'));
    let long = |l: &str| l.split([' ', ',', '=']).find(|w| w.starts_with("--")).map(String::from);
    heads.filter_map(long).collect()
}

/// The words of a case; none where the row has what is to be searched for.
fn words(row: Row, search: (&'static str, &'static [&'static str])) -> Option<Vec<String>> {
    let own: Vec<&str> = row.1.split(' ').filter(|w| *w != "--mesh").collect();
    if search.1.iter().any(|flag| own.contains(flag)) {
        return None;
    }
    let piped = search.0.contains("--schedule") && !row.0.contains("pp");
    let mesh = if piped { format!("pp=2,{}", row.0) } else { row.0.to_string() };
    // A search of schedules has twice the ranks.
    let mesh = if piped && row.0 == "dp=auto" { "pp=1,dp=auto".into() } else { mesh };
    let base = [("--mesh", &*mesh), ("--seq", "16"), ("--microbatch", "1"), ("--prove", "no")];
    let absent = base.iter().filter(|(flag, _)| !own.contains(flag));
    let all = absent.flat_map(|(flag, value)| [*flag, value]).chain(own.iter().copied());
    let search = search.0.split(' ').filter(|w| !w.is_empty());
    Some(all.chain(search).map(String::from).collect())
}

#[test]
fn every_flag_makes_a_plan_that_verifies() {
    let lab = Lab::new("every-flag");
    let rows = ROWS.iter().flat_map(|r| r.1.split(' ')).filter(|w| w.starts_with("--"));
    let known: BTreeSet<String> = rows.chain(OTHER).map(String::from).collect();
    assert_eq!(named(&lab).difference(&known).collect::<Vec<_>>(), Vec::<&String>::new());
    let padded = lab.model("llama_padded");
    let experts = json!({ "pad_token_id": 0, "mlp_only_layers": [] });
    let experts = lab.config("qwen3_moe", experts);
    let (mut i, mut made) = (0, 0);
    for row in ROWS {
        for (s, search) in SEARCHES.into_iter().enumerate() {
            for model in [&padded, &experts] {
                i += 1;
                // What once failed is in every run.
                let known = s == 0 && row.1 == "--zero-accumulate gradients --zero 2";
                let Some(words) = words(row, search).filter(|_| known || taken(i, 61)) else {
                    continue;
                };
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let plan = format!("{i}.plan");
                let args = [&["compile", model, "-o", &plan][..], &words].concat();
                let out = lab.shardc(&args);
                let said = String::from_utf8_lossy(&out.stderr).into_owned();
                if !out.status.success() {
                    // Not all go together, and that is said.
                    assert!(matches!(out.status.code(), Some(2..=4)), "{args:?}: {said}");
                    assert!(said.contains("error"), "{args:?}: {said}");
                    if s == 0 {
                        // Alone, each goes with one of the two.
                        let other = if model == &padded { &experts } else { &padded };
                        lab.ok(&[&["compile", other, "-o", "other.plan"][..], &words].concat());
                        std::fs::remove_dir_all(lab.path("other.plan")).expect("the plan");
                    }
                    continue;
                }
                made += 1;
                let out = lab.shardc(&["verify", &plan]);
                let table = String::from_utf8_lossy(&out.stdout).into_owned();
                assert!(out.status.success(), "{args:?}: {table}");
                std::fs::remove_dir_all(lab.path(&plan)).expect("the plan");
            }
        }
    }
    assert!(made > 4, "{made} plans");
}

/// `docs/options.md` is what is declared, and each word of a flag means something. `SHARDC_BLESS=1` writes it again.
#[test]
fn options_are_as_declared() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/options.md");
    let made = page();
    if std::env::var_os("SHARDC_BLESS").is_some() {
        std::fs::write(path, &made).expect("the page");
    }
    let kept = std::fs::read_to_string(path).expect("the page");
    assert!(kept == made, "SHARDC_BLESS=1 cargo test -p shardc --test it options_are");
    for option in all() {
        let Kind::Words(words) = option.kind else { continue };
        // Each word is another option: none falls to what another one, or none, means.
        let made = words.iter().map(|word| {
            // Some go with others only.
            let flags = match option.flag {
                "grad-dtype" => Flags::default().with("dtype", word),
                "muon-dtype" => Flags::default().with("optimizer", "muon"),
                _alone => Flags::default(),
            };
            let o = flags.with(option.flag, word).options();
            let o = o.unwrap_or_else(|e| panic!("--{} {word}: {e}", option.flag));
            assert!(o.given.iter().any(|g| g == option.flag), "{word}");
            format!("{o:?}")
        });
        let made: BTreeSet<String> = made.collect();
        // What decides no option, such as --device, is read elsewhere.
        let want = if option.keys.is_empty() { 1 } else { words.len() };
        assert_eq!(made.len(), want, "--{}", option.flag);
    }
}
