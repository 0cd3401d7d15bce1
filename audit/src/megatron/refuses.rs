//! What Megatron-LM's own validation refuses of numbers. What it refuses of flags is in its table of rules.

use super::{Args, JobSizes, MOST, product};

/// Rules that are violated, with what checks them.
pub(super) fn all(a: &Args, l: &JobSizes, world: usize) -> Vec<String> {
    let all = of_ranks(a, l, world).into_iter().chain(of_model(a, l)).chain(of_stages(a, l));
    all.filter(|x| x.0).map(|x| x.1).collect()
}

/// Whether a rule is violated, and the rule, with what checks it.
type Checked = (bool, String);

fn of_ranks(a: &Args, l: &JobSizes, world: usize) -> Vec<Checked> {
    let JobSizes { tp, pp, cp, dp, ep, etp, sp, micro, global, seq, .. } = *l;
    let (model, experts) = (product([tp, pp, cp]), product([etp, ep, pp]));
    let instances = a.size("num-distributed-optimizer-instances", 1).max(1);
    let data = [("dp * cp", dp * cp), ("edp", (world / experts).max(1))];
    let shared = data.into_iter().map(|(name, n)| {
        let of = format!("{name} ({n}) is divisible by --num-distributed-optimizer-instances");
        (n % instances != 0, format!("parallel_state: {of} ({instances})"))
    });
    let own = vec![
        (
            world % model != 0,
            format!("validate_args: world size ({world}) is divisible by tp * pp * cp ({model})"),
        ),
        (
            world % experts != 0,
            format!(
                "parallel_state: world size ({world}) is divisible by etp * ep * pp ({experts})"
            ),
        ),
        (
            global > MOST as usize,
            format!("the global batch ({global}) is larger than {MOST}, which no job has"),
        ),
        (
            global % (micro * dp) != 0,
            format!(
                "num_microbatches_calculator: the global batch ({global}) is divisible by \
                 the micro batch * dp ({})",
                micro * dp
            ),
        ),
        (
            cp > 1 && seq % (2 * cp) != 0,
            format!("validate_args: seq_length ({seq}) % (context_parallel_size * 2) == 0"),
        ),
        (
            sp && seq % (tp * cp) != 0,
            format!("sequence parallelism: seq_length ({seq}) is divisible by tp * cp"),
        ),
    ];
    own.into_iter().chain(shared).collect()
}

fn of_model(a: &Args, l: &JobSizes) -> Vec<Checked> {
    let JobSizes { tp, cp, ep, etp, sp, seq, .. } = *l;
    let heads = a.size("num-attention-heads", 1);
    let groups = a.size("num-query-groups", 1).max(1);
    let grouped = a.has("group-query-attention");
    let experts = a.number::<usize>("num-experts");
    let hidden = a.size("hidden-size", heads);
    let widths = [("ffn-hidden-size", tp), ("moe-ffn-hidden-size", etp)];
    let widths = widths.into_iter().filter_map(|(flag, ways)| {
        let n: usize = a.number(flag)?;
        Some((
            n % ways != 0,
            format!(
                "tensor_parallel.utils.divide: --{flag} ({n}) is divisible by its ranks ({ways})"
            ),
        ))
    });
    let mut out: Vec<Checked> = widths.collect();
    let exchanged = a.text("cp-comm-type") == Some("a2a") && cp > 1;
    let own = [heads, if grouped { groups } else { heads }].map(|n| n / tp);
    out.extend([
        (
            exchanged && own.iter().any(|n| n % cp != 0),
            format!("AttnFuncWithCPAndQKVOA2A: heads and groups of a rank ({own:?}) are divisible by cp ({cp})"),
        ),
        (
            a.size("max-position-embeddings", seq) < seq,
            "validate_args: max_position_embeddings >= seq_length".into(),
        ),
        (
            heads % tp != 0,
            format!("TransformerConfig: num_attention_heads ({heads}) is a multiple of tp ({tp})"),
        ),
        (
            grouped && groups % tp != 0 && tp % groups != 0,
            format!(
                "TransformerConfig: num_query_groups ({groups}) is a multiple or a divisor of \
                 tp ({tp})"
            ),
        ),
        (
            experts.is_some_and(|n| n % ep != 0),
            format!("TransformerConfig: num_experts is divisible by ep ({ep})"),
        ),
        (experts.is_none() && ep > 1, format!("TransformerConfig: ep ({ep}) needs --num-experts")),
        (
            experts.is_some() && tp > 1 && !sp,
            "MoELayer.forward: with experts and tp > 1, training needs --sequence-parallel".into(),
        ),
        (
            !a.has("kv-channels") && hidden % heads.max(1) != 0,
            format!("validate_args: hidden_size ({hidden}) is divisible by heads ({heads})"),
        ),
        (
            grouped && heads % groups != 0,
            format!(
                "divide: num_attention_heads ({heads}) is divisible by num_query_groups ({groups})"
            ),
        ),
    ]);
    out
}

/// Stages of a rank of the pipeline.
pub(super) fn virtual_stages(a: &Args, l: &JobSizes) -> usize {
    let layout = a.text("pipeline-model-parallel-layout").and_then(stages);
    let each: Option<usize> = a.number("num-layers-per-virtual-pipeline-stage");
    let all = match (layout, each) {
        (Some(text), _) => text.split('|').count() / l.pp,
        (_, Some(n)) => counted(a) / l.pp / n.max(1),
        _neither => a.size("num-virtual-stages-per-pipeline-rank", 1),
    };
    all.max(1)
}

/// Layers, and what counts as one.
fn counted(a: &Args) -> usize {
    let more = ["account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"];
    a.size("num-layers", 1) + more.into_iter().filter(|f| a.has(f)).count()
}

/// Longest layout that is read, in layers and stages.
const LONGEST: usize = 1 << 16;

/// A layout of stages without its factors: `Et*2|(t|)*2tL` is `Ett|t|t|tL`. None if it is too long.
fn stages(text: &str) -> Option<String> {
    let text: Vec<char> = text.chars().filter(|c| *c != ',' && *c != '"').collect();
    let mut out = String::new();
    let mut open: Option<usize> = None;
    let mut last = 0..0;
    let mut i = 0;
    while i < text.len() {
        match text[i] {
            '(' => open = Some(out.len()),
            ')' => last = open.take()?..out.len(),
            '*' => {
                let digits: String =
                    text[i + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
                let n: usize = digits.parse().ok()?;
                let part = out.get(last.clone())?.to_string();
                if part.len().saturating_mul(n) > LONGEST || out.len() > LONGEST {
                    return None;
                }
                out.truncate(last.start);
                out += &part.repeat(n);
                i += digits.len();
            }
            c => {
                last = out.len()..out.len() + c.len_utf8();
                out.push(c);
            }
        }
        i += 1;
    }
    Some(out)
}

fn of_stages(a: &Args, l: &JobSizes) -> Vec<Checked> {
    let pp = l.pp;
    let layers = a.size("num-layers", 1);
    if let Some(text) = a.text("pipeline-model-parallel-layout") {
        return of_layout(a, text, pp, layers);
    }
    let ends = ["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"]
        .map(|flag| a.number::<usize>(flag));
    let own: usize = ends.iter().flatten().sum();
    let middle = pp.saturating_sub(ends.iter().flatten().count());
    if own > 0 {
        let rest = layers.saturating_sub(own);
        let fits = own <= layers && (rest == 0) == (middle == 0);
        return vec![(
            !fits || middle > 0 && rest % middle != 0,
            format!(
                "TransformerConfig: {rest} layers between the first and the last stage are divisible by their stages ({middle})"
            ),
        )];
    }
    let all = counted(a);
    let each = virtual_stages(a, l);
    vec![
        (all % pp != 0, format!("validate_args: num_layers ({all}) is divisible by pp ({pp})")),
        (
            pp > 1 && all % pp == 0 && (all / pp) % each != 0,
            format!(
                "TransformerConfig: layers of a rank ({}) are divisible by its virtual stages ({each})",
                all / pp
            ),
        ),
    ]
}

fn of_layout(a: &Args, text: &str, pp: usize, layers: usize) -> Vec<Checked> {
    let shown: String = text.chars().take(40).collect();
    let Some(all) = stages(text) else {
        return vec![(
            true,
            format!("PipelineParallelLayerLayout: `{shown}` is a layout of stages"),
        )];
    };
    let of = |c: char| all.chars().filter(|x| *x == c).count();
    let (n, own) = (all.split('|').count(), of('t'));
    let other = all.chars().find(|c| !"EtmL|".contains(*c));
    let further = a.size("mtp-num-layers", 0);
    vec![
        (
            other.is_some(),
            format!("PipelineParallelLayerLayout: `{shown}`: layers are E, t, m and L"),
        ),
        (
            n % pp != 0,
            format!("validate_args: stages of the layout ({n}) are divisible by pp ({pp})"),
        ),
        (
            other.is_none() && own != layers,
            format!(
                "PipelineParallelLayerLayout: decoder layers of the layout ({own}) are num_layers ({layers})"
            ),
        ),
        (
            other.is_none() && (of('E') != 1 || of('L') != 1 || of('m') != further),
            format!("PipelineParallelLayerLayout: `{shown}` has one E, one L and {further} m"),
        ),
    ]
}
