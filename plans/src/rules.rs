//! The divisibility rules of a model on a mesh: every one that is violated, with nearest legal values.

use serde::Serialize;
use shardc_frontends::Facts;
use shardc_ir::axes;
use shardc_ir::diag::Diag;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::TokenOrder;
use shardc_ir::schedule::MAX_STAGES;
use shardc_passes::options::{CpMode, Options, Order, TpMode};
use shardc_passes::schedule::chosen;
use shardc_passes::shard::experts::fold;

/// One violated rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Violation {
    /// What is said of it, if not the rule and the numbers.
    #[serde(skip)]
    pub said: Option<Diag>,
    pub code: &'static str,
    pub rule: String,
    /// The numbers, by name.
    #[serde(serialize_with = "as_map")]
    pub values: Vec<(&'static str, usize)>,
    /// What would be legal instead.
    pub nearest: Vec<String>,
    /// Where other rules are violated, too: values that are legal by this one.
    #[serde(skip)]
    pub alone: Vec<String>,
    /// What violates no rule and was not compiled: that would take too long for a refusal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub untried: Vec<String>,
    /// Numbers are beyond all limits: nothing near them is looked at.
    #[serde(skip)]
    pub beyond: bool,
}

fn as_map<S: serde::Serializer>(
    values: &[(&'static str, usize)],
    to: S,
) -> Result<S::Ok, S::Error> {
    to.collect_map(values.iter().copied())
}

impl Violation {
    /// The violation as a message.
    pub fn diag(&self) -> Diag {
        let mut d = self.said.clone().unwrap_or_else(|| {
            let values: Vec<String> = self.values.iter().map(|(n, v)| format!("{n}={v}")).collect();
            let what = format!("{} does not hold for {}", self.rule, values.join(", "));
            Diag::new(self.code, what).rule(self.rule.clone())
        });
        d.help.clear();
        if !self.alone.is_empty() && !self.beyond {
            d = d.help(format!("legal by this rule alone: {}", self.alone.join(", ")));
        }
        match (self.nearest.is_empty(), self.untried.is_empty()) {
            _ if self.beyond => d.help("stay within the limit that the rule says"),
            (false, _) => d.help(format!("nearest legal: {}", self.nearest.join(", "))),
            (true, false) => d.help(format!(
                "legal by the rules, not compiled (a step of so many parts takes long): {}",
                self.untried.join(", ")
            )),
            (true, true) => {
                d.help("no single change of a number makes this legal: try other meshes")
            }
        }
    }
}

/// Most parts of a model before and after its layers that a stage can be made of.
pub const AROUND: usize = 16;

/// Values of a kind that are looked at; those that are offered were compiled.
pub const LOOKED_AT: usize = 12;

/// Divisors of `n` nearest to `near`, nearest first.
fn divisors_near(n: usize, near: usize, ok: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=n.min(1 << 16)).filter(|d| n % d == 0 && ok(*d)).collect();
    all.sort_by_key(|d| (d.abs_diff(near), *d));
    all.truncate(LOOKED_AT);
    all
}

/// Legal global batches, ranks of dp and microbatches near those asked for.
fn batches(o: &Options, dp: usize) -> Vec<String> {
    let (global, rows) = (o.global_batch, (dp * o.microbatch).max(1));
    let mut out = vec![format!("--global-batch {}", global.div_ceil(rows).max(1) * rows)];
    if global > 0 && global % dp == 0 {
        let fits = divisors_near(global / dp, o.microbatch, |_| true);
        out.extend(fits.iter().map(|m| format!("--microbatch {m}")));
    }
    let of_dp = ["dp_replicate", "dp_shard"].map(|a| (a, o.axis(a)));
    if let [(_, 1), (axis, n @ 2..)] | [(axis, n @ 2..), (_, 1)] = of_dp {
        let fits = divisors_near(global, n, |d| d != n);
        out.extend(powers_first(fits).iter().map(|d| format!("{axis}={d}")));
    }
    out
}

/// Numbers of ranks as people have them first: powers of two, which machines have.
fn powers_first(all: Vec<usize>) -> Vec<usize> {
    let (powers, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|n| n.is_power_of_two());
    [powers, others].concat()
}

/// True if a model's sizes can be cut by a grid of side `q`.
fn on_side(f: &Facts, mode: TpMode, q: usize) -> bool {
    let hidden = if mode == TpMode::ThreeD { q * q } else { q };
    let heads = f.heads % q == 0 && (f.kv_heads % q == 0 || q % f.kv_heads == 0);
    heads && f.hidden % hidden == 0 && f.ffn % q == 0
}

/// All violated rules.
pub fn violations(f: &Facts, o: &Options) -> Vec<Violation> {
    let mut rules = Rules { f, o, out: vec![] };
    // What is chosen by price is split where it can be.
    if !o.auto {
        rules.heads();
        rules.grid();
    }
    rules.batch();
    rules.sequence();
    rules.sequence_parallel();
    rules.experts();
    rules.factors();
    rules.stages();
    rules.schedule();
    rules.out
}

/// The rules, one after the other, of a model and options.
struct Rules<'a> {
    f: &'a Facts,
    o: &'a Options,
    out: Vec<Violation>,
}

impl Rules<'_> {
    /// A rule, its numbers, and what would be legal instead.
    fn add(
        &mut self,
        holds: bool,
        code: &'static str,
        rule: &str,
        values: &[(&'static str, usize)],
        nearest: Vec<String>,
    ) {
        if !holds {
            let (rule, values) = (rule.into(), values.to_vec());
            self.out.push(Violation { code, rule, values, nearest, ..Violation::default() });
        }
    }

    fn on_grid(&self) -> bool {
        self.o.tp_mode != TpMode::OneD
    }

    /// How many ways heads are cut, and what that number is called: all of tp, or a side of its grid.
    fn ways(&self) -> (usize, &'static str) {
        let tp = self.o.axis("tp");
        if self.on_grid() { (self.o.tp_mode.side(tp).unwrap_or(1), "q") } else { (tp, "tp") }
    }

    /// What follows rules that hold on a grid.
    fn of_grid(&self) -> String {
        if self.on_grid() { format!(" with --tp-mode {}", self.o.tp_mode) } else { String::new() }
    }

    fn kv_fits(&self, ways: usize) -> bool {
        self.f.kv_heads % ways == 0 || ways % self.f.kv_heads == 0
    }

    fn legal_tp(&self) -> Vec<String> {
        let (f, o, tp) = (self.f, self.o, self.o.axis("tp"));
        let legal = match self.on_grid() {
            true => o.tp_mode.nearest(tp, LOOKED_AT, |q| on_side(f, o.tp_mode, q)),
            false => powers_first(divisors_near(f.heads, tp, |t| self.kv_fits(t))),
        };
        legal.iter().map(|t| format!("tp={t}")).collect()
    }

    fn depth(&self) -> Option<(&'static str, usize)> {
        match self.o.tp_mode {
            TpMode::TwoAndHalfD { depth } => Some(("depth", depth)),
            TpMode::OneD | TpMode::TwoD | TpMode::ThreeD => None,
        }
    }

    fn heads(&mut self) {
        let (f, o, tp) = (self.f, self.o, self.o.axis("tp"));
        let ((ways, name), of_grid, legal) = (self.ways(), self.of_grid(), self.legal_tp());
        let numbers: Vec<_> = [("tp", tp)].into_iter().chain(self.depth()).collect();
        let square = o.tp_mode.side(tp).is_some();
        self.add(square, "tp-grid", &o.tp_mode.rule(), &numbers, legal.clone());
        self.add(
            f.heads % ways == 0,
            "heads-not-divisible",
            &format!("heads % {name} == 0{of_grid}"),
            &[("heads", f.heads), (name, ways)],
            legal.clone(),
        );
        self.add(
            self.kv_fits(ways),
            "kv-heads-against-tp",
            &format!("kv_heads % {name} == 0 or {name} % kv_heads == 0{of_grid}"),
            &[("kv_heads", f.kv_heads), (name, ways)],
            legal.clone(),
        );
        let keys = [("key_heads", f.recurrent.unwrap_or(ways)), (name, ways)];
        self.add(keys[0].1 % ways == 0, "heads-not-divisible", "key_heads % tp == 0", &keys, legal);
    }

    /// What a grid cuts beside heads.
    fn grid(&mut self) {
        let (f, o, tp) = (self.f, self.o, self.o.axis("tp"));
        let Some(q) = o.tp_mode.side(tp).filter(|_| self.on_grid() && tp > 1) else { return };
        let (of_grid, dp) = (self.of_grid(), o.data_parallel());
        let squared = if o.tp_mode == TpMode::ThreeD { q * q } else { q };
        for (name, size, by) in [("hidden", f.hidden, squared), ("ffn", f.ffn, q)] {
            let by_name = if by == q { "q" } else { "(q * q)" };
            self.add(
                size % by == 0,
                "grid-not-divisible",
                &format!("{name} % {by_name} == 0{of_grid}"),
                &[(name, size), ("q", q)],
                self.legal_tp(),
            );
        }
        let rows = o.tp_mode.rows(q);
        let rows_rule = match o.tp_mode {
            TpMode::TwoAndHalfD { .. } => "(depth * q)",
            TpMode::ThreeD => "(q * q)",
            TpMode::OneD | TpMode::TwoD => "q",
        };
        let more = o.microbatch.div_ceil(rows).max(1) * rows;
        let numbers = [("microbatch", o.microbatch)].into_iter().chain(self.depth());
        let numbers: Vec<_> = numbers.chain([("q", q)]).collect();
        let global = o.global_batch.div_ceil(dp * more).max(1) * dp * more;
        self.add(
            o.microbatch % rows == 0,
            "grid-not-divisible",
            &format!("microbatch % {rows_rule} == 0{of_grid}"),
            &numbers,
            vec![format!("--microbatch {more} --global-batch {global}")],
        );
    }

    fn batch(&mut self) {
        let (o, dp) = (self.o, self.o.data_parallel());
        let rows = (dp * o.microbatch).max(1);
        self.add(
            o.global_batch > 0 && o.microbatch > 0 && o.global_batch % rows == 0,
            "batch-not-divisible",
            "global_batch % (dp * microbatch) == 0",
            &[("global_batch", o.global_batch), ("dp", dp), ("microbatch", o.microbatch)],
            batches(o, dp),
        );
    }

    /// Lengths of sequences near the one asked for, multiples of a number.
    fn lengths(&self, of: usize) -> Vec<String> {
        let below = self.o.seq / of * of;
        let fits = |n: &usize| *n > 0 && *n <= self.f.max_positions;
        [below, below + of].iter().filter(|n| fits(n)).map(|n| format!("--seq {n}")).collect()
    }

    fn sequence(&mut self) {
        let (f, o, cp) = (self.f, self.o, self.o.axis("cp"));
        self.add(
            o.seq > 0 && o.seq <= f.max_positions,
            "sequence-too-long",
            "1 <= seq <= max_position_embeddings",
            &[("seq", o.seq), ("max_position_embeddings", f.max_positions)],
            vec![format!("--seq {}", f.max_positions)],
        );
        let code = "sequence-not-divisible";
        let (numbers, reversed) = ([("seq", o.seq), ("cp", cp)], [("cp", cp), ("seq", o.seq)]);
        self.add(cp <= o.seq, code, "cp <= seq", &reversed, vec![format!("cp={}", o.seq.max(1))]);
        let cps = |all: Vec<usize>| all.into_iter().map(|c| format!("cp={c}"));
        if let TokenOrder::Zigzag { ranks } = o.tokens() {
            let mut nearest = self.lengths(2 * ranks);
            nearest.extend(cps(divisors_near(o.seq / 2, cp, |_| o.seq % 2 == 0)));
            let rule = "seq % (2 * cp) == 0 with --cp-split zigzag";
            self.add(o.tokens().fits(o.seq), code, rule, &numbers, nearest);
        } else if o.cp_mode == CpMode::Ring {
            let mut nearest = self.lengths(cp);
            nearest.extend(cps(divisors_near(o.seq, cp, |_| true)));
            let rule = "seq % cp == 0 with --cp-mode ring";
            self.add(o.seq % cp == 0, code, rule, &numbers, nearest);
        }
        if o.cp_mode == CpMode::Ulysses {
            let (ways, name) = self.ways();
            self.add(
                f.heads % (ways * cp) == 0,
                "heads-not-divisible",
                &format!("heads % ({name} * cp) == 0 with --cp-mode ulysses"),
                &[("heads", f.heads), (name, ways), ("cp", cp)],
                cps(divisors_near(f.heads / ways.max(1), cp, |_| true)).collect(),
            );
        }
    }

    fn sequence_parallel(&mut self) {
        let (o, tp, cp) = (self.o, self.o.axis("tp"), self.o.axis("cp"));
        if !o.sp {
            return;
        }
        let or_none = |first: &str| vec![first.into(), "no --sp".into()];
        if self.on_grid() {
            let rule = "tp-mode is 1d with --sp";
            self.add(false, "sp-needs-1d", rule, &[("tp", tp)], or_none("--tp-mode 1d"));
            return;
        }
        self.add(tp > 1, "sp-needs-tp", "tp > 1 with --sp", &[("tp", tp)], or_none("tp=2"));
        let lengths = self.lengths(cp * tp);
        self.add(
            o.seq % (cp * tp) == 0,
            "sequence-not-divisible",
            "seq % (cp * tp) == 0 with --sp",
            &[("seq", o.seq), ("cp", cp), ("tp", tp)],
            lengths.into_iter().chain(["no --sp".into()]).collect(),
        );
    }

    fn experts(&mut self) {
        let (o, tp) = (self.o, self.o.axis("tp"));
        let Some(x) = self.f.experts else {
            self.add(
                o.ep == 1 && o.etp.is_none_or(|n| n == 1 || n == tp),
                "no-experts",
                "ep == 1 and no etp without experts",
                &[("ep", o.ep), ("etp", o.etp())][..1 + usize::from(o.etp.is_some())],
                vec![if o.etp.is_some() { "ep=1 and no etp".into() } else { "ep=1".into() }],
            );
            return;
        };
        let ranks: usize = axes::names(|r| r.shares).map(|a| o.axis(a)).product();
        let list = |name: &str, n: usize, near: usize| -> Vec<String> {
            let fits = divisors_near(n, near, |d| ranks % d == 0);
            fits.iter().map(|d| format!("{name}={d}")).collect()
        };
        self.add(
            x.experts % o.ep == 0,
            "experts-not-divisible",
            "experts % ep == 0",
            &[("experts", x.experts), ("ep", o.ep)],
            list("ep", x.experts, o.ep),
        );
        self.add(
            x.ffn % o.etp() == 0,
            "expert-width-not-divisible",
            "expert_ffn % etp == 0",
            &[("expert_ffn", x.ffn), ("etp", o.etp())],
            list("etp", x.ffn, o.etp()),
        );
        self.add(
            !self.on_grid(),
            "experts-need-1d",
            "--tp-mode 1d with experts",
            &[("tp", tp)],
            vec!["--tp-mode 1d".into()],
        );
        let pieces = fold(o).unwrap_or_default();
        let by_row = pieces.iter().filter(|p| p.cuts_tokens() && !p.of_rows());
        let ways: usize = by_row.map(|p| p.size).product();
        self.add(
            o.seq % ways == 0,
            "sequence-not-divisible",
            "seq % (ranks that cut the tokens of a row) == 0 with experts",
            &[("seq", o.seq), ("ranks", ways)],
            vec![format!("--seq {}", o.seq.div_ceil(ways) * ways)],
        );
    }

    /// What another part of the compiler refuses, in its words.
    fn refused(&mut self, d: Diag, values: Vec<(&'static str, usize)>, nearest: Vec<String>) {
        let (code, rule) = (d.code, d.rule.clone().unwrap_or_default());
        let said = Some(d);
        self.out.push(Violation { code, said, rule, values, nearest, ..Violation::default() });
    }

    /// How ranks are factorised again for experts.
    fn factors(&mut self) {
        let (f, o) = (self.f, self.o);
        let Some(d) = f.experts.and_then(|_| fold(o).err()) else { return };
        let axes = axes::names(|r| r.shares).map(|a| (a, o.axis(a)));
        let values = [("ep", o.ep), ("etp", o.etp())].into_iter().chain(axes).collect();
        self.refused(d, values, foldings(f, o));
    }

    /// Stages are made of layers and what is around them: how much that is, compiling says.
    fn stages(&mut self) {
        let (f, o, pp) = (self.f, self.o, self.o.axis(PIPELINE));
        let chunks = o.chunks.unwrap_or(1).max(1);
        // As many stages as layers are always possible; what is beyond all limits is refused by those.
        let stages = pp.saturating_mul(chunks);
        let most = (f.layers / chunks).max(1);
        let fewer = divisors_near(f.layers, most, |n| n < most);
        self.add(
            pp == 1 || stages > MAX_STAGES || stages <= f.layers + AROUND,
            "too-many-stages",
            "pp * chunks <= layers + the parts before and after them",
            &[("pp", pp), ("chunks", chunks), ("layers", f.layers)],
            [most].into_iter().chain(fewer).map(|n| format!("pp={n}")).collect(),
        );
    }

    fn schedule(&mut self) {
        let (f, o) = (self.f, self.o);
        if self.out.iter().any(|v| v.code == "too-many-stages") {
            return;
        }
        let batch = self.out.iter().all(|v| v.code != "batch-not-divisible");
        let searched = o.schedule == Order::Named("search".into());
        let Some(d) = chosen(o).err().filter(|_| batch && !searched) else { return };
        let mut values = vec![("pp", o.axis("pp")), ("microbatches", o.microbatches())];
        values.extend(o.chunks.map(|v| ("chunks", v)));
        self.refused(d, values, schedules(f, o));
    }
}

/// Numbers of ep and etp near those asked for, and dp_shard for them.
fn foldings(f: &Facts, o: &Options) -> Vec<String> {
    let experts = f.experts.map_or(1, |x| x.experts);
    let mut out: Vec<String> =
        divisors_near(experts, o.ep, |_| true).iter().map(|n| format!("ep={n}")).collect();
    let less = divisors_near(o.etp().max(o.axis("tp")), o.etp(), |n| n != o.etp());
    out.extend(less.iter().map(|n| format!("etp={n}")));
    // What tp and cp have of these ranks, dp_shard need not have.
    let (ranks, others) = (o.ep * o.etp(), o.axis("tp") * o.axis("cp"));
    let rest = (ranks % others == 0).then_some(ranks / others);
    let shards = rest.into_iter().chain([ranks, ranks * o.axis("dp_shard")]);
    out.extend(shards.map(|n| format!("dp_shard={n}")));
    out
}

/// Numbers near those asked for with which a schedule may run: batches, chunks, ranks; and schedules.
fn schedules(f: &Facts, o: &Options) -> Vec<String> {
    let (m, rows, pp) = (o.microbatches().max(1), o.microbatch_rows(), o.axis("pp"));
    let of_rank = o.global_batch / o.data_parallel().max(1);
    let smaller = divisors_near(of_rank, o.microbatch, |_| true);
    let mut out: Vec<String> = smaller.iter().map(|n| format!("--microbatch {n}")).collect();
    let more = (m + 1..=m + 2 * pp).chain([1]);
    out.extend(more.map(|m| format!("--global-batch {}", m * rows)));
    out.extend([1, 2].map(|v| format!("--chunks {v}")));
    out.extend(["1f1b", "interleaved", "looped-bfs"].map(|n| format!("--schedule {n}")));
    out.extend(divisors_near(f.layers, pp, |n| n > 1).iter().map(|n| format!("pp={n}")));
    out
}
