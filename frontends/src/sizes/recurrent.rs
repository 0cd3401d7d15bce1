//! Sizes of layers that walk a state along the tokens.

use super::limits::check_recurrent;
use super::*;
use crate::family::{Mamba2, Mixer, StepSizes};

/// The heads of layers that walk a state of which each rank of tp has as many: those of keys, or where all share one in
/// tensors of its own, which every rank then has, those of values.
pub(super) fn split_heads(f: &Family, c: &Config) -> Result<Option<usize>> {
    let Some(r) = f.recurrent else { return Ok(None) };
    if kinds(f, c)?.is_some_and(|all| !all.contains(&Kind::Walks)) {
        return Ok(None);
    }
    let or = |(key, absent): (&str, usize)| Ok(c.count_if(key)?.unwrap_or(absent));
    match (or(r.keys.key_heads)?, r.mixer) {
        (1, Mixer::Mamba2(_)) => or(r.keys.value_heads).map(Some),
        (n, _) => Ok(Some(n)),
    }
}

/// The least and the most step size of Mamba-2, if they limit any.
pub(super) fn steps(f: &Family, c: &Config) -> Result<Option<[f64; 2]>> {
    let Some(Mixer::Mamba2(Mamba2 { steps, .. })) = f.recurrent.map(|r| r.mixer) else {
        return Ok(None);
    };
    let key = match steps {
        StepSizes::Within(key) => key,
        StepSizes::AtLeast(key, absent) => {
            let least = c.number_if(key)?.unwrap_or(absent);
            return Ok((least > 0.0).then_some([least, f64::INFINITY]));
        }
    };
    let Some(v) = c.get(key) else { return Ok(None) };
    // transformers writes what JSON has no number for as an object, and older versions as a bare word.
    let number = |v: &serde_json::Value| match v.get("__float__").unwrap_or(v).as_str() {
        Some("Infinity") => Some(f64::INFINITY),
        _ => v.as_f64().filter(|x| (*x as f32).is_finite()),
    };
    let both: Option<Vec<f64>> = v.as_array().and_then(|l| l.iter().map(number).collect());
    match both.as_deref() {
        Some(&[least, most]) if least <= most => {
            // A softplus is above 0.
            Ok(Some([least, most]).filter(|_| least > 0.0 || most < f64::INFINITY))
        }
        _other => {
            let what = format!("`{key}` is not the least and the most of step sizes");
            Err(c.error(key, what, "write [0.0, 1.0], or null"))
        }
    }
}

/// Sizes of layers that walk a state, if the family has some.
pub(super) fn recurrent(
    f: &Family,
    c: &Config,
    hidden: usize,
    shape: &Shape,
) -> Result<Option<RecurrentSizes>> {
    let Some(r) = f.recurrent else { return Ok(None) };
    let or = |(key, absent): (&str, usize)| Ok(c.count_if(key)?.unwrap_or(absent));
    let (key_heads, values) = (or(r.keys.key_heads)?, or(r.keys.value_heads)?);
    if values % key_heads != 0 {
        let what = format!("{values} heads of values cannot share {key_heads} of keys evenly");
        let fit = values.div_ceil(key_heads).saturating_mul(key_heads);
        return Err(c.error(r.keys.value_heads.0, what, format!("use {fit}")));
    }
    let (key, absent) = r.keys.value_width;
    let left = c.get(key).is_none_or(|v| v.as_str() == Some("auto")) && absent == 0;
    let value_width = match r.mixer {
        Mixer::DeltaNet => or(r.keys.value_width)?,
        Mixer::Mamba2(m) => {
            let all = m.expand.map(|e| Ok(or(e)?.saturating_mul(hidden))).transpose()?;
            let width = match all {
                Some(all) if left => all / values,
                _given => or(r.keys.value_width)?,
            };
            if let Some(all) = all.filter(|&all| width.checked_mul(values) != Some(all)) {
                let what = format!("{values} heads of values of {width} elements are not {all}");
                let fit = format!("use {} heads", all / width.max(1));
                let rule = "heads * head_dim == expand * hidden";
                return Err(c.error(r.keys.value_heads.0, what, fit).rule(rule));
            }
            width
        }
    };
    let sizes = RecurrentSizes {
        taps: or(r.keys.taps)?,
        key_heads,
        key_width: or(r.keys.key_width)?,
        values_each: values / key_heads,
        value_width,
    };
    check_recurrent(c, &r.keys, &sizes, hidden, shape)?;
    Ok(Some(sizes))
}
