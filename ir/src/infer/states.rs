//! What operands say of axes that split no letter of an op: which states go together, and what they give.

use super::*;

/// True if a mask of operands has operand `i`. All bits set is all operands, however many.
fn has(mask: u32, i: usize) -> bool {
    mask == !0 || i < 32 && mask >> i & 1 == 1
}

pub(super) struct States {
    pub replicated: AtomSet,
    pub varying: AtomSet,
    pub sum: AtomSet,
    pub max: AtomSet,
    pub min: AtomSet,
}

/// States of the result over the atoms that split no letter.
pub(super) fn unsharded(q: &Query, sharded: AtomSet) -> Result<States, TypeError> {
    let names = |s: AtomSet| q.mesh.names(s, "*");
    let any = |f: fn(&Type) -> AtomSet| {
        q.ins.iter().fold(AtomSet::EMPTY, |s, t| s.union(f(t))).minus(sharded)
    };
    let mut st = States {
        replicated: any(|t| t.replicated),
        varying: any(|t| t.varying),
        sum: any(|t| t.sum),
        max: any(|t| t.max),
        min: any(|t| t.min),
    };
    if q.ins.is_empty() {
        if let Some(Some(t)) = q.declared.first() {
            st = States {
                replicated: t.replicated,
                varying: t.varying,
                sum: t.sum,
                max: t.max,
                min: t.min,
            };
        }
        return Ok(st);
    }
    if st.replicated.is_empty()
        && st.varying.is_empty()
        && st.sum.is_empty()
        && st.max.is_empty()
        && st.min.is_empty()
    {
        return Ok(st);
    }
    // R with R, V or P; never with I.
    for (i, t) in q.ins.iter().enumerate() {
        let others = st.replicated.union(st.varying).union(st.sum).union(st.max).union(st.min);
        let bad = others.minus(t.marked());
        if !bad.is_empty() {
            return err(
                "mixed",
                format!("operand {i} is invariant over {}, another operand is not", names(bad)),
                format!("fan_out[{}] it first", names(bad)),
            );
        }
    }
    let joint = |i: usize| matches!(q.linear, Linear::Together(mask) if has(mask, i));
    // What all operands agree on, of thousands as of two: pending where they are summed, else replicated.
    let agreed = |r: Reduction| {
        let of = |(i, t): (usize, &&Type)| if joint(i) { t.pending(r) } else { t.replicated };
        q.ins.iter().enumerate().map(of).fold(q.mesh.all(), AtomSet::and)
    };
    let agreed = [Reduction::Sum, Reduction::Max, Reduction::Min].map(agreed);
    for (i, t) in q.ins.iter().enumerate() {
        for ((r, pending), agreed) in
            [(Reduction::Sum, t.sum), (Reduction::Max, t.max), (Reduction::Min, t.min)]
                .into_iter()
                .zip(agreed)
        {
            let p = pending.minus(sharded);
            if p.is_empty() {
                continue;
            }
            let linear = match q.linear {
                Linear::No => false,
                Linear::Together(mask) => {
                    q.reduction == r && has(mask, i) && (r == Reduction::Sum || q.ins.len() == 1)
                }
                Linear::Each(mask) => r == Reduction::Sum && has(mask, i),
            };
            if !linear {
                return err(
                    "partial",
                    format!(
                        "operand {i} is a {} over {} still to be taken, and the op is not linear in it",
                        word(r),
                        names(p)
                    ),
                    format!("all_reduce[{}] it first", names(p)),
                );
            }
            if joint(i) && p.within(agreed) {
                continue;
            }
            for (j, u) in q.ins.iter().enumerate().filter(|&(j, _)| j != i) {
                let ok = if joint(j) { p.within(u.pending(r)) } else { p.within(u.replicated) };
                if !ok {
                    let want = if joint(j) { "also be a sum over" } else { "be replicated over" };
                    return err(
                        "partial",
                        format!(
                            "operand {i} is a {} over {} still to be taken; operand {j} must {want} it",
                            word(r),
                            names(p)
                        ),
                        format!("all_reduce[{}] operand {i} first", names(p)),
                    );
                }
            }
        }
    }
    st.replicated = st.replicated.minus(st.varying).minus(st.sum).minus(st.max).minus(st.min);
    let twice = st.varying.and(st.sum.union(st.max).union(st.min));
    if !twice.is_empty() {
        return err(
            "mixed",
            format!("one operand varies over {}, another is a sum over it", names(twice)),
            format!("all_reduce[{}] it first", names(twice)),
        );
    }
    Ok(st)
}

/// As messages have it.
fn word(r: Reduction) -> &'static str {
    match r {
        Reduction::Sum => "sum",
        Reduction::Max => "maximum",
        Reduction::Min => "minimum",
    }
}
