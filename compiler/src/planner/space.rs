//! The layouts that are looked at: every combination of these numbers that violates no rule of `check`.

use shardc_cost::layout::{Anew, Context, Layout, Modules, Recompute as Again, Schedule};
use shardc_cost::model::Sizes;
use shardc_frontends::Facts;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::PIPELINE;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options, Order, Transport};
use shardc_passes::schedule::{Named, runs};
use shardc_plans::rules;

/// Most ranks of cp, and sequences of a microbatch that are looked at.
const MOST: (usize, usize) = (16, 8);

/// Ways to split experts: ranks, and ranks of each.
type Experts = (usize, usize);

/// How attention sees other ranks of cp, and whether they have equal parts of it.
type Seen = (Context, bool);

/// What the time of a layer depends on: tp, cp, ep, etp, sequences, sp, what is computed again, what cp does.
pub type Inside = (usize, usize, usize, usize, usize, bool, Again, Seen);

/// tp, cp and dp.
type Sizes3 = (usize, usize, usize);

/// A layout, as prices see it and as the compiler takes it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    pub layout: Layout,
    pub named: Named,
}

/// Schedules, with the stages per rank that are tried although layers are no multiple of all stages; the interleaved one
/// is also tried with every number of stages that leaves equal ones.
const SCHEDULES: [(Named, Schedule, &[usize]); 4] = [
    (Named::OneFOneB, Schedule::OneFOneB, &[1]),
    (Named::ZbH1, Schedule::ZbH1, &[1]),
    (Named::Interleaved, Schedule::Interleaved, &[2, 4, 8]),
    (Named::ZbV, Schedule::ZbV, &[2]),
];

impl Candidate {
    /// The options with this layout.
    pub fn options(&self, base: &Options) -> Options {
        let l = &self.layout;
        let axes = [
            (PIPELINE, l.pp),
            ("dp_replicate", l.dp / l.shards),
            ("dp_shard", l.shards),
            ("cp", l.cp),
            ("tp", l.tp),
        ];
        let axes = axes.into_iter().filter(|a| a.1 > 1);
        Options {
            mesh: axes.map(|(n, s)| (n.to_string(), s)).collect(),
            microbatch: l.microbatch,
            zero: l.zero,
            sp: l.sp,
            recompute: match l.recompute {
                Again::None => Recompute::default(),
                Again::Selective | Again::Ops => Recompute::Selective,
                Again::Modules(m) => Recompute::Ops(
                    ["elementwise"].into_iter().chain(modules(m)).map(String::from).collect(),
                ),
                Again::Layers(n, _) => Recompute::Mix(
                    vec![(usize::from(n), Recompute::Full)],
                    Box::new(Recompute::Elementwise),
                ),
                Again::Full => Recompute::Full,
            },
            schedule: Order::Named(self.named.name().into()),
            chunks: (l.pp > 1).then_some(l.chunks),
            ep: l.ep,
            etp: (l.ep > 1 || l.etp != l.tp).then_some(l.etp),
            transport: Transport::Nccl,
            cp_mode: match l.context {
                Context::Gathered => CpMode::AllGather,
                Context::Ring => CpMode::Ring,
                Context::Heads => CpMode::Ulysses,
            },
            cp_split: (l.cp > 1).then_some(if l.even {
                CpSplit::Zigzag
            } else {
                CpSplit::Contiguous
            }),
            ..base.clone()
        }
    }

    /// Most layers of its stages.
    pub fn layers_of_stage(&self, layers: usize) -> usize {
        layers.div_ceil(self.layout.pp * self.layout.chunks)
    }

    /// True if there is no pipeline.
    fn flat(&self) -> bool {
        self.layout.pp == 1
    }

    /// True if ZeRO shards over some of the ranks of dp only.
    fn is_hybrid(&self) -> bool {
        self.layout.shards < self.layout.dp
    }

    /// What the time of one of its layers depends on.
    pub fn inside(&self) -> Inside {
        let l = &self.layout;
        let again = l.recompute.reduced();
        (l.tp, l.cp, l.ep, l.etp, l.microbatch, l.sp, again, (l.context, l.even))
    }

    /// Communicators that its plan has at least: of each axis, and of each direction to other stages.
    pub fn communicators(&self) -> usize {
        let l = &self.layout;
        let split = [l.tp, l.cp, l.dp / l.shards, l.shards].into_iter().filter(|n| *n > 1).count();
        split + if l.pp > 1 { 2 } else { 0 }
    }

    /// The layout in words: axes, and what is not as by default.
    pub fn words(&self) -> String {
        let l = &self.layout;
        let axes =
            [("pp", l.pp), ("v", l.chunks), ("dp", l.dp), ("cp", l.cp), ("tp", l.tp), ("ep", l.ep)];
        let mut words: Vec<String> =
            axes.into_iter().filter(|a| a.1 > 1).map(|(n, s)| format!("{n}{s}")).collect();
        words.extend((l.ep > 1).then(|| format!("etp{}", l.etp)));
        words.extend(
            (l.cp > 1)
                .then_some(match (l.context, l.even) {
                    (Context::Heads, _) => "ulysses",
                    (Context::Ring, true) => "ring",
                    (Context::Ring, false) => "ring contiguous",
                    (Context::Gathered, true) => "",
                    (Context::Gathered, false) => "contiguous",
                })
                .filter(|w| !w.is_empty())
                .map(String::from),
        );
        words.extend(l.sp.then(|| "sp".to_string()));
        words.extend((l.zero > 0).then(|| match l.shards == l.dp {
            true => format!("zero{}", l.zero),
            false => format!("zero{} over {}", l.zero, l.shards),
        }));
        words.extend((l.pp > 1).then(|| self.named.name().to_string()));
        words.push(format!("mb{}", l.microbatch));
        match l.recompute {
            Again::None => {}
            Again::Selective | Again::Ops => words.push("selective".into()),
            Again::Modules(m) => words.extend(modules(m).map(String::from)),
            Again::Layers(n, of) => words.push(format!("full in {n} of {of}")),
            Again::Full => words.push("full".into()),
        }
        words.join(" ")
    }

    /// The number of a name that `--fix` has.
    pub fn number(&self, name: &str) -> Option<usize> {
        let l = &self.layout;
        Some(match name {
            "tp" => l.tp,
            "cp" => l.cp,
            "pp" => l.pp,
            "dp" => l.dp,
            "ep" => l.ep,
            "etp" => l.etp,
            "v" => l.chunks,
            "mb" => l.microbatch,
            "zero" => usize::from(l.zero),
            "sp" => usize::from(l.sp),
            _another => return None,
        })
    }
}

/// Modules as `--recompute ops:` names them.
fn modules(m: Modules) -> impl Iterator<Item = &'static str> {
    let experts = match m.experts {
        Anew::Nothing => None,
        Anew::Products => Some("experts"),
        Anew::All => Some("moe"),
    };
    m.latents.then_some("mla_up_proj").into_iter().chain(experts)
}

/// Modules of a model that may be computed again, beside nothing and whole layers.
fn parts(s: &Sizes) -> Vec<Again> {
    let experts: &[Anew] = match s.experts {
        Some(_) => &[Anew::Nothing, Anew::Products, Anew::All],
        None => &[Anew::Nothing],
    };
    let latents = s.latent.is_some();
    let all = experts.iter().map(|&experts| Modules { latents, experts });
    all.filter(|m| modules(*m).next().is_some()).map(Again::Modules).collect()
}

/// Names that [`Candidate::number`] knows.
pub const NUMBERS: [&str; 10] = ["tp", "cp", "pp", "dp", "ep", "etp", "v", "mb", "zero", "sp"];

/// Layouts as people name them: FSDP over all ranks and over those of a domain, tensor and context parallelism with
/// ZeRO, and pipelines without and with tensor parallelism. Formulas err by family.
pub const FAMILIES: [fn(&Candidate) -> bool; 8] = [
    |c| c.flat() && c.layout.tp * c.layout.cp == 1 && c.layout.zero == 3 && !c.is_hybrid(),
    |c| c.flat() && c.layout.tp * c.layout.cp == 1 && c.layout.zero == 3 && c.is_hybrid(),
    |c| c.flat() && c.layout.tp > 1 && c.layout.zero > 0,
    |c| c.flat() && c.layout.cp > 1 && c.layout.zero > 0 && c.layout.context == Context::Gathered,
    |c| c.flat() && c.layout.cp > 1 && c.layout.zero > 0 && c.layout.context == Context::Ring,
    |c| c.flat() && c.layout.cp > 1 && c.layout.zero > 0 && c.layout.context == Context::Heads,
    |c| !c.flat() && c.layout.tp == 1,
    |c| !c.flat() && c.layout.tp > 1,
];

fn divisors(n: usize, most: usize) -> impl Iterator<Item = usize> + Clone {
    (1..=most.min(n)).filter(move |d| n % d == 0)
}

/// What does not depend on the pipeline and its schedule.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Inner {
    tp: usize,
    cp: usize,
    seen: Seen,
    shards: usize,
    replicas: usize,
    sp: bool,
    microbatch: usize,
    experts: Experts,
}

impl Inner {
    /// The least of those that rules say the same of: no rule asks for sequences of a microbatch, nor for ranks of dp
    /// where there are no experts.
    fn asked(self, f: &Facts) -> Inner {
        let shards = if f.experts.is_some() { self.shards } else { 1 };
        Inner { shards, replicas: 1, microbatch: 1, ..self }
    }
}

/// All legal layouts of a model on so many ranks, in a fixed order; `domain` ranks are near each other.
pub fn candidates(
    f: &Facts,
    sizes: &Sizes,
    base: &Options,
    (gpus, domain): (usize, usize),
) -> Vec<Candidate> {
    let mut known: HashMap<Inner, bool> = HashMap::default();
    let mut legal = |inner: Inner| {
        *known.entry(inner.asked(f)).or_insert_with_key(|asked| is_legal(f, base, *asked))
    };
    all(f, (base, &parts(sizes)), (gpus, domain), &mut legal)
}

/// All layouts around what is legal inside.
fn all(
    f: &Facts,
    (base, parts): (&Options, &[Again]),
    (gpus, domain): (usize, usize),
    legal: &mut dyn FnMut(Inner) -> bool,
) -> Vec<Candidate> {
    let mut out = vec![];
    for pp in divisors(gpus, f.layers) {
        for tp in divisors(gpus / pp, f.heads) {
            for cp in divisors(gpus / pp / tp, MOST.0).filter(|c| c.is_power_of_two()) {
                let dp = gpus / pp / tp / cp;
                if base.global_batch % dp != 0 {
                    continue;
                }
                for inner in inner(f, base, (tp, cp, dp), domain) {
                    if legal(inner) {
                        outer(f, (base, parts), pp, inner, &mut out);
                    }
                }
            }
        }
    }
    out
}

/// Ways to have attention over so many ranks of cp: those that are asked for, or all; dealt in zigzag where that is asked
/// for, or else wherever models and lengths allow it and ranks do not have all tokens anyway.
fn seen(base: &Options, cp: usize) -> Vec<Seen> {
    let given = |flag: &str| base.given.iter().any(|g| g == flag);
    let zigzag = base.cp_split == Some(CpSplit::Zigzag);
    let even = |c: Context| match given("cp-split") {
        true => zigzag,
        false => zigzag && c != Context::Heads && base.seq.is_multiple_of(2 * cp),
    };
    let all = [
        (CpMode::AllGather, Context::Gathered),
        (CpMode::Ring, Context::Ring),
        (CpMode::Ulysses, Context::Heads),
    ];
    let asked = all.into_iter().filter(|m| !given("cp-mode") || m.0 == base.cp_mode);
    match cp {
        1 => vec![(Context::Gathered, false)],
        _ => asked.map(|(_, c)| (c, even(c))).collect(),
    }
}

/// Ways to run what is inside of stages.
fn inner(f: &Facts, base: &Options, sizes: Sizes3, domain: usize) -> Vec<Inner> {
    let (tp, cp, dp) = sizes;
    let mut out = vec![];
    // Shards over all ranks, or over those near each other.
    let near = (domain / (tp * cp)).clamp(1, dp);
    let near = (1..=near).rev().find(|n| dp % n == 0).unwrap_or(1);
    let mut shards = vec![dp];
    // Of experts there are so many layouts that the better half is enough.
    let dense = f.experts.is_none();
    shards.extend((dense && near > 1 && near < dp).then_some(near));
    let experts: Vec<Experts> = match f.experts {
        None => vec![(1, tp)],
        Some(x) => {
            let ways =
                |etp: usize| divisors(dp * cp * tp / etp, x.experts).map(move |ep| (ep, etp));
            let etps: Vec<usize> = if tp > 1 { vec![1, tp] } else { vec![1] };
            etps.into_iter().flat_map(ways).filter(|e| e.0.is_power_of_two()).collect()
        }
    };
    for &shards in &shards {
        for sp in [true, false].into_iter().filter(|&sp| if tp > 1 { sp || dense } else { !sp }) {
            for &experts in &experts {
                let rows = base.global_batch / dp;
                for microbatch in divisors(rows, MOST.1).filter(|n| n.is_power_of_two()) {
                    let replicas = dp / shards;
                    let all = seen(base, cp).into_iter();
                    out.extend(all.map(|seen| Inner {
                        tp,
                        cp,
                        seen,
                        shards,
                        replicas,
                        sp,
                        microbatch,
                        experts,
                    }));
                }
            }
        }
    }
    out
}

/// True if no rule of `check` is violated, those of schedules left out.
fn is_legal(f: &Facts, base: &Options, i: Inner) -> bool {
    let layout = Layout {
        tp: i.tp,
        cp: i.cp,
        context: i.seen.0,
        even: i.seen.1,
        dp: i.shards * i.replicas,
        pp: 1,
        chunks: 1,
        ep: i.experts.0,
        etp: i.experts.1,
        shards: i.shards,
        zero: 0,
        sp: i.sp,
        recompute: Again::None,
        schedule: Schedule::OneFOneB,
        microbatch: i.microbatch,
        microbatches: 1,
    };
    let o = Candidate { layout, named: Named::OneFOneB }.options(base);
    // One microbatch is enough to ask.
    let o = Options { global_batch: o.microbatch_rows(), ..o };
    rules::violations(f, &o).is_empty()
}

/// Stages, schedules, ZeRO and recomputation around what is inside: what is element-wise, `parts` of layers beside it, some
/// layers or all. Of a layer `selective` keeps 8 bytes a token less than `elementwise` (docs/memory.md), which is not a
/// separate choice.
fn outer(
    f: &Facts,
    (base, parts): (&Options, &[Again]),
    pp: usize,
    i: Inner,
    out: &mut Vec<Candidate>,
) {
    let dp = i.shards * i.replicas;
    let microbatches = base.global_batch / dp / i.microbatch;
    let of_schedules = SCHEDULES.into_iter().filter(|s| pp > 1 || s.0 == Named::OneFOneB);
    for (named, schedule, chunks) in of_schedules {
        let equal = |v: &usize| named == Named::Interleaved && f.layers.is_multiple_of(pp * v);
        let some = (1..=f.layers / pp).filter(|v| chunks.contains(v) || *v > 1 && equal(v));
        for chunks in some {
            if !runs(named, pp, chunks, microbatches) {
                continue;
            }
            // ZeRO shards over dp and cp; replicas of shards are for what is sharded.
            let zeros = [0, 1, 2, 3].into_iter().filter(|&z| match i.shards * i.cp {
                1 => z == 0,
                _ => z > 0 || i.replicas == 1,
            });
            let mut again = vec![Again::None];
            again.extend(parts);
            again.push(Again::Full);
            for zero in zeros {
                for &recompute in &again {
                    let layout = Layout {
                        tp: i.tp,
                        cp: i.cp,
                        context: i.seen.0,
                        even: i.seen.1,
                        dp,
                        pp,
                        chunks,
                        ep: i.experts.0,
                        etp: i.experts.1,
                        shards: i.shards,
                        zero,
                        sp: i.sp,
                        recompute,
                        schedule,
                        microbatch: i.microbatch,
                        microbatches,
                    };
                    out.push(Candidate { layout, named });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::types::DType;
    use std::path::Path;

    /// What rules say of one layout is what they say of all that are asked of it: the same layouts in the same order
    /// as with each asked by itself, and none of them violates a rule with all its numbers.
    #[test]
    fn layouts_are_those_that_violate_no_rule_asked_one_by_one() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        for (model, gpus, seq, batch) in [
            ("benches/configs/llama-3.1-8b.json", 16, 96, 32),
            ("tests/fixtures/gpt2/config.json", 6, 12, 12),
            ("tests/fixtures/qwen3_moe/config.json", 8, 16, 16),
            ("tests/fixtures/deepseek_v3/config.json", 8, 24, 8),
        ] {
            let f =
                shardc_plans::input::facts(&root.join(model)).expect("a config").expect("a family");
            let base =
                Options { dtype: DType::BF16, seq, global_batch: batch, ..Options::default() };
            let mut asked = 0;
            let mut alone = |inner| {
                asked += 1;
                is_legal(&f, &base, inner)
            };
            let text = std::fs::read_to_string(root.join(model)).expect("a config");
            let sizes =
                shardc_plans::machine::sizes(&f, &serde_json::from_str(&text).expect("JSON"));
            let found = candidates(&f, &sizes, &base, (gpus, 4));
            let own = (&base, &parts(&sizes)[..]);
            assert_eq!(found, all(&f, own, (gpus, 4), &mut alone), "{model}");
            assert!(!found.is_empty() && asked > 20, "{model}: {asked}");
            for c in &found {
                let broken = rules::violations(&f, &c.options(&base));
                assert!(broken.is_empty(), "{model}: {}: {broken:?}", c.words());
            }
        }
    }

    /// Layouts of a model in `benches/configs` on so many ranks, with so many sequences of 4,096 tokens.
    fn layouts(model: &str, gpus: usize, global_batch: usize) -> Vec<Candidate> {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/configs"));
        let path = root.join(format!("{model}.json"));
        let f = shardc_plans::input::facts(&path).expect("a config").expect("a family");
        let text = std::fs::read_to_string(&path).expect("a config");
        let config = serde_json::from_str(&text).expect("JSON");
        let base = Options { dtype: DType::BF16, seq: 4096, global_batch, ..Options::default() };
        candidates(&f, &shardc_plans::machine::sizes(&f, &config), &base, (gpus, 8))
    }

    /// Chunks that leave equal stages are tried, whatever number they are: those that published recipes have, too.
    #[test]
    fn any_number_of_chunks_that_divides_the_layers_is_tried() {
        // 80 layers over 4 ranks, and 48 over 2.
        for (model, gpus, pp, all) in [
            ("llama-3.1-70b", 32, 4, &[2, 4, 5, 10, 20][..]),
            ("qwen3-30b-a3b", 16, 2, &[2, 3, 4, 6, 8, 12, 24]),
        ] {
            let found = layouts(model, gpus, 256);
            let interleaved = found.iter().filter(|c| c.named == Named::Interleaved);
            let own: Vec<&Candidate> = interleaved.filter(|c| c.layout.pp == pp).collect();
            let mut chunks: Vec<usize> = own.iter().map(|c| c.layout.chunks).collect();
            chunks.sort_unstable();
            chunks.dedup();
            // Beside these, 2, 4 and 8 with stages that are not equal.
            let equal: Vec<usize> = chunks
                .iter()
                .copied()
                .filter(|v| all.contains(v) || ![2, 4, 8].contains(v))
                .collect();
            assert_eq!(equal, all, "{model}");
            for c in own {
                let o = c.options(&Options::default());
                assert_eq!(o.chunks, Some(c.layout.chunks));
                assert!(c.words().contains(&format!("v{} ", c.layout.chunks)), "{}", c.words());
            }
        }
    }

    /// What backward may compute again: nothing but what is element-wise, whole layers, and the modules that a model has.
    #[test]
    fn modules_that_a_model_has_may_be_computed_again() {
        let layers = Again::some(50, 80).expect("few");
        for (model, gpus, all) in [
            ("llama-3.1-8b", 16, &["elementwise", "full"][..]),
            ("qwen3-30b-a3b", 16, &["elementwise", "experts", "full", "moe"]),
            (
                "deepseek-v3",
                64,
                &["elementwise", "full", "mla_up_proj", "mla_up_proj+experts", "mla_up_proj+moe"],
            ),
        ] {
            let found = layouts(model, gpus, 256);
            let mut words: Vec<String> = found
                .iter()
                .map(|c| match c.options(&Options::default()).recompute {
                    Recompute::Ops(names) => names[1..].join("+"),
                    other => other.to_string(),
                })
                .collect();
            words.sort_unstable();
            words.dedup();
            assert_eq!(words, all, "{model}");
            // Of layers some, which the search tries of what it has compiled.
            let layout = Layout { recompute: layers, ..found[0].layout };
            let some = Candidate { layout, ..found[0] };
            assert!(some.words().ends_with(" full in 50 of 80"), "{}", some.words());
            let said = some.options(&Options::default()).recompute.to_string();
            assert_eq!(said, "mix:50*full+elementwise");
        }
    }
}
