//! The loss in chunks of tokens: neither logits nor their gradient are ever whole (fused linear
//! cross-entropy, Hsu et al., 2024, *Liger Kernel*; no product is made twice).
//!
//! Before:  `%logits = dot[bsh,vh->bsv] %x, %w`, …, `%loss = dot[bs,bs->] %nll, %valid`, and in backward
//!          …, `%d_x = dot[bsv,vh->bsh] %d_logits, %w`, `%d_w = dot[bsv,bsh->vh] %d_logits, %x`
//! After:   for each chunk `%x_chunk = narrow[p=4; start=0; dim=1] %x` and all of these nodes on it; then
//!          `%d_x = concat[d=8; dim=1] …`; `%loss` and `%d_w` are sums over the chunks. All of it is forward's
//! Assumes: phase Differentiated.  Leaves: phase Differentiated.
//!
//! The gradient is made where the loss is, since all it needs beside is the loss's cotangent, an argument.
//! Which dim of which value is one of tokens follows from the letters of the ops: a chunk is a range of the
//! loop of that letter. An op that has the letter in no result sums over it, so sums of chunks take its place.
//! A dim that is split over ranks is cut on each of them, through a view of it as ranks times tokens.
//! What element-wise ops make in f32 of 16-bit logits is made again for the gradient, as elsewhere: less is alive.

mod write;

use super::differentiate::only_weights;
use super::recompute::widened;
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result as Checked};
use shardc_ir::func::{Func, Node, RoleKind, Scope, Uses, Value};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Facts, FusionClass, Kind, Op};
use shardc_ir::rule::{Letter, Rule, has_letter};
use shardc_ir::types::Reduction;
use std::borrow::Cow;
use std::collections::BTreeSet;
use write::Writer;

/// Most chunks: a concat has so many operands.
pub const MOST_CHUNKS: usize = 24;

/// In how many chunks of tokens the loss is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossChunks {
    /// As many as memory asks for. The number is chosen before the passes run.
    Auto,
    /// So many.
    #[serde(untagged)]
    Of(usize),
}

impl Default for LossChunks {
    fn default() -> LossChunks {
        LossChunks::Of(1)
    }
}

/// As the flag has it.
impl std::fmt::Display for LossChunks {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            LossChunks::Of(n) => write!(f, "{n}"),
            LossChunks::Auto => f.write_str("auto"),
        }
    }
}

impl LossChunks {
    /// The number.
    ///
    /// # Errors
    /// `flag` if it is not chosen yet.
    pub fn number(self) -> Checked<usize> {
        match self {
            LossChunks::Of(n) => Ok(n),
            LossChunks::Auto => Err(Diag::new("flag", "what `auto` stands for is not chosen yet")
                .at("--loss-chunks auto")
                .help("use --loss-chunks 1, or another number")),
        }
    }
}

/// The name of the sum whose stage is cut.
const LOSS: &str = "loss";

/// Why a loss is not made in chunks, and the rule that it breaks.
#[derive(Debug)]
pub struct Refusal {
    /// What there is in place of what is needed.
    pub why: String,
    /// What is needed.
    pub rule: &'static str,
    /// What to do.
    pub help: &'static str,
}

/// Of a loss that is something else than work on tokens.
impl From<String> for Refusal {
    fn from(why: String) -> Refusal {
        let rule = "from one product with a weight on, each token is worked on for itself";
        Refusal { why, rule, help: "compile without --loss-chunks" }
    }
}

impl From<&str> for Refusal {
    fn from(why: &str) -> Refusal {
        why.to_string().into()
    }
}

impl Refusal {
    /// Of a loss that is in another stage than the logits.
    fn apart(logits: usize, loss: usize) -> Refusal {
        Refusal {
            why: format!("stage {logits} computes the logits, and stage {loss} the loss"),
            rule: "one stage computes the logits and the loss",
            help: "use fewer stages, put both into one with --layers, or compile without --loss-chunks",
        }
    }

    /// Of tokens that cannot be cut.
    fn few(why: String) -> Refusal {
        let rule = "every rank has as many tokens, and two or more";
        Refusal { why, rule, help: "give ranks more tokens, or compile without --loss-chunks" }
    }
}

/// Takes the loss of a joint program apart in so many chunks of tokens, or in as many as a rank has tokens of
/// a row.
///
/// # Errors
/// Says why the loss cannot be made of chunks: it is not made by one product with a weight, or by work on
/// each token for itself, or there are too few of these.
pub fn chunk_loss(mesh: &Mesh, f: &mut Func, count: usize) -> Result<(), Refusal> {
    let stage = Stage::of(f)?;
    let tokens = stage.tokens(mesh, f, count)?;
    let parts = stage.parts(f, &tokens)?;
    let wide = widened(f, stage.from);
    let again = parts.chunked.iter().filter(|&&i| i < stage.from && wide[i]);
    let again = again.flat_map(|&i| f.nodes[i].outs.iter().map(move |&o| (o, i))).collect();
    let (known, tokens) = (HashMap::default(), &tokens);
    Writer { mesh, f, tokens, again, known, new: vec![], scope: Scope(0) }
        .write(&stage, &parts, count);
    Ok(())
}

/// The nodes from the logits to the loss, and back to the gradients of what the logits are a product of.
struct Stage {
    uses: Uses,
    /// The first node of backward.
    from: usize,
    /// The operand of the product that depends on data.
    x: Value,
    /// In their order: those of forward, those of backward.
    nodes: Vec<usize>,
    /// What these read of backward, and is not one of them.
    before: BTreeSet<usize>,
}

/// Tokens along one letter: which dim that is of every value that has it, and how it is split.
struct Tokens {
    dims: HashMap<Value, usize>,
    /// The dim in the type of the whole program.
    whole: shardc_ir::types::Dim,
    /// Ranks that it is split over, and the tokens of each of them.
    ways: usize,
    own: usize,
}

/// What becomes of the nodes of a stage.
#[derive(Default)]
struct StageParts {
    /// By themselves, before the chunks.
    once: Vec<usize>,
    /// Once per chunk.
    chunked: Vec<usize>,
    /// Behind the chunks.
    after: Vec<usize>,
}

impl Stage {
    fn of(f: &Func) -> Result<Stage, Refusal> {
        let (from, uses) = (f.forward_nodes(), f.uses());
        let is_loss = |kind: RoleKind, name: &str| kind == RoleKind::Sum && name == LOSS;
        let loss = f
            .results
            .iter()
            .find(|r| r.role.as_ref().is_some_and(|role| is_loss(role.kind, &role.name)));
        let loss = loss.ok_or("the program has no sum `loss`")?.value;
        let head = head(f, &uses, loss)?;
        let weights = only_weights(f);
        let data: Vec<Value> = f.nodes[head].ins.iter().copied().filter(|v| !weights[v]).collect();
        let [x] = data[..] else { return Err("the logits are not a product with a weight".into()) };
        let mut made = f.per_value(false);
        let mut nodes = vec![];
        for (i, n) in f.nodes[..from].iter().enumerate().skip(head) {
            if i == head || n.ins.iter().any(|v| made[v]) {
                nodes.push(i);
                n.outs.iter().for_each(|o| made[o] = true);
            }
        }
        for a in &f.args {
            let seed =
                a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Scale && *r.name == *LOSS);
            made[a.value] |= seed;
        }
        // Back to the first products, and to the casts of these.
        for (i, n) in f.nodes.iter().enumerate().skip(from) {
            if n.ins.iter().any(|v| made[v]) {
                nodes.push(i);
                let ends = n.op.is_heavy();
                n.outs.iter().for_each(|o| made[o] = !ends);
                let cast = Some(n.outs[0]).filter(|_| ends).and_then(|v| uses.only_user(v));
                let is_own = |r: &Node| {
                    r.op.facts().kind == Kind::Conversion && f.stage_of(r) == f.stage_of(n)
                };
                nodes.extend(cast.filter(|&r| is_own(&f.nodes[r])));
            }
        }
        nodes.sort_unstable();
        nodes.dedup();
        let stages: BTreeSet<usize> = nodes.iter().map(|&i| f.stage_of(&f.nodes[i])).collect();
        if let (Some(first), Some(last)) = (stages.first(), stages.last())
            && first < last
        {
            return Err(Refusal::apart(*first, *last));
        }
        let known: HashSet<usize> = nodes.iter().copied().collect();
        let mut before = BTreeSet::new();
        let mut open = nodes.clone();
        while let Some(i) = open.pop() {
            let made_by = f.nodes[i].ins.iter().filter_map(|&v| uses.maker(v));
            for m in made_by.filter(|m| *m >= from && !known.contains(m)) {
                if before.insert(m) {
                    open.push(m);
                }
            }
        }
        Ok(Stage { uses, from, x, nodes, before })
    }

    /// The letter of tokens that can be cut in so many chunks: one that no ranks share, if there is one; else
    /// the one of most tokens.
    fn tokens(&self, mesh: &Mesh, f: &Func, count: usize) -> Result<Tokens, Refusal> {
        let mut why = None;
        let mut found: Vec<Tokens> = vec![];
        for dim in 0..f.ty(self.x).rank() {
            match self.along(mesh, f, dim) {
                Ok(t) => found.push(t),
                Err(e) => drop(why.get_or_insert(e)),
            }
        }
        let best = found.into_iter().max_by_key(|t| (t.own.min(count), t.ways == 1, t.own));
        match best {
            Some(t) if t.own > 1 => Ok(t),
            Some(_) => Err(Refusal::few("a rank has one token".into())),
            None => Err(why.unwrap_or("the logits have no dim of tokens".into())),
        }
    }

    fn along(&self, mesh: &Mesh, f: &Func, dim: usize) -> Result<Tokens, Refusal> {
        let whole = f.ty(self.x).dims[dim];
        let ways = mesh.ways(whole.atoms.set());
        if whole.size % ways != 0 {
            let why = format!("{} tokens are not split {ways} ways evenly", whole.size);
            return Err(Refusal::few(why));
        }
        let dims = self.dims(f, dim)?;
        let mut values =
            self.nodes.iter().flat_map(|&i| f.nodes[i].ins.iter().chain(&f.nodes[i].outs));
        let cut = |v: &&Value| dims.get(v).is_some_and(|&d| f.ty(**v).dims[d] != whole);
        if let Some(v) = values.find(cut) {
            return Err(format!("tokens are split otherwise in {}", f.name(*v)).into());
        }
        let tokens = Tokens { dims, whole, ways, own: whole.size / ways };
        self.parts(f, &tokens)?;
        Ok(tokens)
    }

    /// The dim of tokens of every value of the stage that has one, if this is that of the logits' operand.
    fn dims(&self, f: &Func, dim: usize) -> Result<HashMap<Value, usize>, String> {
        let mut dims: HashMap<Value, usize> = [(self.x, dim)].into_iter().collect();
        loop {
            let known = dims.len();
            for &i in &self.nodes {
                let (n, rule) = (&f.nodes[i], rule_of(f, &f.nodes[i]));
                let Some(letter) = letter(n, &rule, &dims) else { continue };
                for (v, of) in ends(n, &rule) {
                    let at = of.iter().position(|g| g.letters().contains(&letter));
                    let Some(at) = at else { continue };
                    if of[at].single().is_none() || *dims.entry(v).or_insert(at) != at {
                        return Err(format!("{} mixes tokens with other dims", f.name(v)));
                    }
                }
            }
            if dims.len() == known {
                return Ok(dims);
            }
        }
    }

    /// Sorts the nodes; says which one is not work on each token for itself, or a sum over them.
    fn parts(&self, f: &Func, tokens: &Tokens) -> Result<StageParts, String> {
        let mut parts =
            StageParts { once: self.before.iter().copied().collect(), ..StageParts::default() };
        // What is there behind the chunks only.
        let mut late: HashSet<Value> = HashSet::default();
        for &i in &self.nodes {
            let (n, rule) = (&f.nodes[i], rule_of(f, &f.nodes[i]));
            let waits = n.ins.iter().any(|v| late.contains(v));
            let Some(letter) = letter(n, &rule, &tokens.dims) else {
                // The cast of a sum is summed: of 16 bits, sums of chunks would be rounded.
                let is_cast = i >= self.from && n.op.facts().kind == Kind::Conversion;
                let of_product = |c: &usize| f.nodes[*c].outs.contains(&n.ins[0]);
                let alone = || self.uses.only_user(n.ins[0]) == Some(i);
                if is_cast && parts.chunked.iter().any(of_product) && alone() {
                    parts.chunked.push(i);
                    late.extend(&n.outs);
                    continue;
                }
                if waits && i >= self.from {
                    return Err(format!("{} needs all tokens", f.name(n.outs[0])));
                }
                if waits { &mut parts.after } else { &mut parts.once }.push(i);
                late.extend(n.outs.iter().filter(|_| waits));
                continue;
            };
            if waits || !is_by_token(&n.op, &rule, letter) {
                return Err(format!("{} is not computed token by token", f.name(n.outs[0])));
            }
            parts.chunked.push(i);
            late.extend(n.outs.iter().filter(|o| !tokens.dims.contains_key(o)));
        }
        parts.once.sort_unstable();
        let early: HashSet<Value> =
            parts.chunked.iter().flat_map(|&i| f.nodes[i].outs.iter().copied()).collect();
        let needs = |i: &&usize| f.nodes[**i].ins.iter().any(|v| early.contains(v));
        match parts.once.iter().find(needs) {
            Some(&i) => Err(format!("{} needs all tokens", f.name(f.nodes[i].outs[0]))),
            None => Ok(parts),
        }
    }

    /// What of backward only passes on a value that the chunks make: it is forward's too, so that less is saved.
    /// What another stage of the pipeline reads is sent by backward.
    fn passed_on(&self, f: &Func, parts: &StageParts) -> Vec<usize> {
        let own: HashSet<usize> = parts.chunked.iter().chain(&parts.once).copied().collect();
        let mut out = vec![];
        for &i in parts.chunked.iter().filter(|&&i| i >= self.from) {
            let mut v = f.nodes[i].outs[0];
            while let Some(r) = self.uses.only_user(v).filter(|r| !own.contains(r)) {
                let n = &f.nodes[r];
                let passes = n.op.collective().is_some() || n.op.facts().kind == Kind::Conversion;
                let own = f.stage_of(n) == f.stage_of(&f.nodes[i]);
                if !passes
                    || !own
                    || n.ins.len() != 1
                    || n.outs.len() != 1
                    || self.crosses(f, n, n.outs[0])
                {
                    break;
                }
                out.push(r);
                v = n.outs[0];
            }
        }
        out
    }

    /// Whether another stage of the pipeline than a node's reads a value.
    fn crosses(&self, f: &Func, maker: &Node, v: Value) -> bool {
        self.uses.users(v).any(|n| f.stage_of(&f.nodes[n]) != f.stage_of(maker))
    }
}

/// The one product that the loss is made of by other ops.
fn head(f: &Func, uses: &Uses, loss: Value) -> Result<usize, String> {
    let (mut seen, mut found, mut open) = (HashSet::default(), BTreeSet::new(), vec![loss]);
    while let Some(v) = open.pop() {
        let Some(m) = uses.maker(v) else { continue };
        if !seen.insert(m) {
            continue;
        }
        match f.nodes[m].op.is_heavy() {
            true => drop(found.insert(m)),
            false => open.extend(&f.nodes[m].ins),
        }
    }
    match found.iter().copied().collect::<Vec<_>>()[..] {
        [one] if f.nodes[one].op.is_matrix_product() => Ok(one),
        [] | [_] => Err("the loss is not computed from a product".into()),
        _ => Err("the loss is computed from several products".into()),
    }
}

fn rule_of<'a>(f: &Func, n: &'a Node) -> Cow<'a, Rule> {
    let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    n.op.def().rule(&ranks)
}

/// Operands and results with their letters.
fn ends<'a>(
    n: &'a Node,
    rule: &'a Rule,
) -> impl Iterator<Item = (Value, &'a shardc_ir::rule::Dims)> {
    let ins = n.ins.iter().copied().zip(&rule.ins);
    ins.chain(n.outs.iter().copied().zip(&rule.outs))
}

/// The letter of tokens in a node's rule.
fn letter(n: &Node, rule: &Rule, dims: &HashMap<Value, usize>) -> Option<Letter> {
    ends(n, rule).find_map(|(v, of)| of.get(*dims.get(&v)?)?.single())
}

/// True if a range of this letter of an op's results needs that range of its operands alone, and if what has
/// the letter no more is a sum over it.
fn is_by_token(op: &Op, rule: &Rule, letter: Letter) -> bool {
    let (Facts { kind, fusion, .. }, def) = (op.facts(), op.def());
    let read = rule.ins.iter().any(|d| has_letter(d, letter));
    let kept = rule.outs.iter().all(|d| has_letter(d, letter));
    let lost = rule.outs.iter().all(|d| !has_letter(d, letter));
    let sums = matches!(kind, Kind::Product | Kind::Reduction) && def.reduction() == Reduction::Sum;
    let sized = def.sizes().iter().any(|s| s.0 == letter);
    // What is the same for all tokens is so for those of a chunk.
    if sized && kind == Kind::Movement && fusion == Some(FusionClass::Each) {
        return true;
    }
    let drawn = kind == Kind::Constant;
    read && !rule.is_whole(letter) && !sized && !drawn && (kept || lost && sums)
}
