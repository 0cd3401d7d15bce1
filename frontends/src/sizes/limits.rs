//! Batches and sequences that a model takes, and sizes whose products are numbers.

use super::*;
use crate::family::RecurrentKeys;

pub(super) fn check_shape(
    f: &Family,
    c: &Config,
    facts: &Facts,
    shape: &Shape,
    warnings: &mut Vec<Diag>,
) -> Result<()> {
    for (what, n) in [("batch", shape.batch), ("sequence length", shape.seq)] {
        if n == 0 || n as u64 > MAX_COUNT {
            return Err(Diag::new("shape", format!("the {what} is {n}"))
                .help(format!("use 1 to {MAX_COUNT}, such as {}", 8)));
        }
    }
    if shape.seq > facts.max_positions {
        let most = facts.max_positions;
        let what = format!("sequences of {} tokens are longer than the model's {most}", shape.seq);
        let at = c.place(f.keys.max_positions.unwrap_or_default());
        let d = Diag::new("sequence-length", what).at(at);
        match f.positions {
            Positions::Learned(_) => {
                let why = "learned positions beyond the last do not exist";
                return Err(d.why(why).help(format!("use --seq {most} or less")));
            }
            Positions::Rotary(_) | Positions::None => {
                warnings.push(d.help(format!("it was made for --seq {most}")))
            }
        }
    }
    Ok(())
}

/// Refuses tensors whose sizes would overflow, and copies of tokens that have no number in i32.
pub(super) fn check_products(
    c: &Config,
    f: &Facts,
    l: Option<LatentSizes>,
    shape: &Shape,
) -> Result<()> {
    let tokens = shape.batch.checked_mul(shape.seq);
    let joined = f.heads.checked_mul(f.head_dim);
    let product = |a: Option<usize>, b: usize| a.and_then(|a| a.checked_mul(b));
    // No product of attention has more elements than the largest sides have.
    let latent = l.map_or(Some(0), |l| {
        let ranks = l.q_rank.unwrap_or(0).checked_add(l.kv_rank)?.checked_add(l.turning)?;
        let heads = f.heads.checked_mul(f.head_dim.checked_add(l.value)?)?;
        ranks.checked_add(f.hidden)?.checked_mul(heads.checked_add(f.hidden)?)
    });
    let (experts, top_k, width) = f.experts.map_or((1, 1, 1), |e| (e.experts, e.top_k, e.ffn));
    let width = width.max(f.experts.map_or(1, |e| e.shared));
    let weights = product(experts.checked_mul(width), f.hidden);
    let rows = product(tokens.and_then(|t| t.checked_mul(top_k)), f.hidden.max(width));
    if let Some(e) = f.experts
        && product(tokens, e.top_k).is_none_or(|n| i32::try_from(n).is_err())
    {
        let (rows, seq, k) = (shape.batch, shape.seq, e.top_k);
        let what = format!("{rows} rows of {seq} tokens with {k} experts each are too many copies");
        return Err(Diag::new("shape", what)
            .rule(format!("rows * seq * experts per token <= {} with experts", i32::MAX))
            .help(
                "use a smaller --microbatch, which counts for each rank of dp, or a smaller --seq",
            ));
    }
    let tensors = [
        ("logits", product(tokens, f.vocab)),
        ("the residual stream", product(tokens, f.hidden)),
        ("all heads", joined.and_then(|j| product(tokens, j))),
        ("the MLP", product(tokens, f.ffn)),
        ("the embedding", f.vocab.checked_mul(f.hidden)),
        ("the positions", f.max_positions.checked_mul(f.hidden)),
        ("an attention weight", product(joined, f.hidden).and_then(|n| n.checked_mul(3))),
        ("an MLP weight", f.ffn.checked_mul(f.hidden)),
        ("a latent weight", latent),
        ("the experts' weights", weights),
        ("the experts' rows", rows),
    ];
    match tensors.iter().find(|t| t.1.is_none_or(|n| n > MAX_ELEMENTS)) {
        None => Ok(()),
        Some((name, _)) => {
            let what = format!("{name} would have more than 2^48 elements");
            let of_batch =
                ["logits", "the residual stream", "all heads", "the MLP", "the experts' rows"];
            let help = match of_batch.contains(name) {
                true => {
                    "use a smaller --global-batch, --microbatch or --seq: 2^48 elements are 1 PiB in f32"
                }
                false => "check the sizes: 2^48 elements are 1 PiB in f32",
            };
            Err(c.error("", what, help))
        }
    }
}

/// Most tokens that a convolution sees: each is a shift of its own.
const MAX_TAPS: usize = 32;

/// Refuses recurrences whose products would overflow, or whose convolution is long.
pub(super) fn check_recurrent(
    c: &Config,
    keys: &RecurrentKeys,
    s: &RecurrentSizes,
    hidden: usize,
    shape: &Shape,
) -> Result<()> {
    if s.taps > MAX_TAPS {
        let what = format!("a convolution of {} tokens is longer than {MAX_TAPS}", s.taps);
        return Err(c.error(keys.taps.0, what, "use 4"));
    }
    let of = |heads: usize, width: usize| heads.checked_mul(width)?.checked_mul(2);
    let values = s.key_heads.checked_mul(s.values_each);
    let made = of(s.key_heads, s.key_width)
        .zip(values.and_then(|n| of(n, s.value_width)))
        .and_then(|(k, v)| k.checked_add(v));
    let times = |a: Option<usize>, b: usize| a.and_then(|a| a.checked_mul(b));
    let states = times(times(times(values, s.key_width), s.value_width), shape.batch);
    let all = [
        times(made, hidden),
        times(times(made, shape.batch), shape.seq),
        times(times(times(values, s.key_width), shape.batch), shape.seq),
        states,
    ];
    match all.into_iter().all(|n| n.is_some_and(|n| n <= MAX_ELEMENTS)) {
        true => Ok(()),
        false => {
            let what = "heads of a recurrence would have more than 2^48 elements";
            Err(c.error(keys.key_width.0, what, "use heads of 128"))
        }
    }
}
