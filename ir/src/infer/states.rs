//! What operands say of axes that split no letter of an op: which states go together, and what they give.

use super::*;

/// True if a mask of operands has operand `i`. All bits set is all operands, however many.
fn has(mask: u32, i: usize) -> bool {
    mask == !0 || i < 32 && mask >> i & 1 == 1
}

#[derive(Clone, Copy, Default)]
pub(super) struct States {
    pub replicated: AtomSet,
    pub varying: AtomSet,
    pub sum: AtomSet,
    pub max: AtomSet,
    pub min: AtomSet,
}

impl States {
    fn of(t: &Type) -> States {
        States { replicated: t.replicated, varying: t.varying, sum: t.sum, max: t.max, min: t.min }
    }

    /// By each state, the atoms of both.
    fn union(self, o: States) -> States {
        States {
            replicated: self.replicated.union(o.replicated),
            varying: self.varying.union(o.varying),
            sum: self.sum.union(o.sum),
            max: self.max.union(o.max),
            min: self.min.union(o.min),
        }
    }

    fn minus(self, s: AtomSet) -> States {
        States {
            replicated: self.replicated.minus(s),
            varying: self.varying.minus(s),
            sum: self.sum.minus(s),
            max: self.max.minus(s),
            min: self.min.minus(s),
        }
    }

    /// What is still to be reduced.
    fn pending(self) -> AtomSet {
        self.sum.union(self.max).union(self.min)
    }

    fn all(self) -> AtomSet {
        self.replicated.union(self.varying).union(self.pending())
    }
}

/// States of the result over the atoms that split no letter.
pub(super) fn unsharded(q: &Query, sharded: AtomSet) -> Result<States, TypeError> {
    let names = |s: AtomSet| q.mesh.names(s, "*");
    if q.ins.is_empty() {
        let made = q.declared.first().copied().flatten();
        return Ok(made.map_or(States::default(), States::of));
    }
    let of = q.ins.iter().map(|t| States::of(t).minus(sharded));
    let mut st = of.reduce(States::union).expect("there are operands");
    let said = st.all();
    if said.is_empty() {
        return Ok(st);
    }
    // R with R, V or P; never with I.
    for (i, t) in q.ins.iter().enumerate() {
        let bad = said.minus(t.marked());
        if !bad.is_empty() {
            return err(
                "mixed",
                format!("operand {i} is invariant over {}, another operand is not", names(bad)),
                format!("fan_out[{}] it first", names(bad)),
            );
        }
    }
    for r in REDUCTIONS {
        if q.ins.iter().all(|t| t.pending(r).minus(sharded).is_empty()) {
            continue;
        }
        // What all operands agree on, of thousands as of two: pending where they are summed, else replicated.
        let of = |(i, t): (usize, &&Type)| if joint(q, i) { t.pending(r) } else { t.replicated };
        let agreed = q.ins.iter().enumerate().map(of).fold(q.mesh.all(), AtomSet::and);
        for (i, t) in q.ins.iter().enumerate() {
            let p = t.pending(r).minus(sharded);
            if !p.is_empty() {
                linear(q, r, i, p)?;
                if !(joint(q, i) && p.within(agreed)) {
                    others_agree(q, r, i, p)?;
                }
            }
        }
    }
    let twice = st.varying.and(st.pending());
    if !twice.is_empty() {
        return err(
            "mixed",
            format!("one operand varies over {}, another is a sum over it", names(twice)),
            format!("all_reduce[{}] it first", names(twice)),
        );
    }
    st.replicated = st.replicated.minus(st.varying).minus(st.pending());
    Ok(st)
}

const REDUCTIONS: [Reduction; 3] = [Reduction::Sum, Reduction::Max, Reduction::Min];

/// Whether the op is linear in this operand and others together: all are parts, or none.
fn joint(q: &Query, i: usize) -> bool {
    matches!(q.linear, Linear::Together(mask) if has(mask, i))
}

/// Whether operand `i` may be parts of this reduction over `p`.
fn linear(q: &Query, r: Reduction, i: usize, p: AtomSet) -> Result<(), TypeError> {
    let may = match q.linear {
        Linear::No => false,
        Linear::Together(mask) => {
            q.reduction == r && has(mask, i) && (r == Reduction::Sum || q.ins.len() == 1)
        }
        Linear::Each(mask) => r == Reduction::Sum && has(mask, i),
    };
    if may {
        return Ok(());
    }
    let (word, axes) = (word(r), q.mesh.names(p, "*"));
    err(
        "partial",
        format!(
            "operand {i} is a {word} over {axes} still to be taken, and the op is not linear in it"
        ),
        format!("all_reduce[{axes}] it first"),
    )
}

/// Whether the others are what they must be over `p`, where operand `i` is parts of this reduction.
fn others_agree(q: &Query, r: Reduction, i: usize, p: AtomSet) -> Result<(), TypeError> {
    for (j, u) in q.ins.iter().enumerate().filter(|&(j, _)| j != i) {
        let (there, want) = match joint(q, j) {
            true => (u.pending(r), "also be a sum over"),
            false => (u.replicated, "be replicated over"),
        };
        if !p.within(there) {
            let (word, axes) = (word(r), q.mesh.names(p, "*"));
            return err(
                "partial",
                format!(
                    "operand {i} is a {word} over {axes} still to be taken; operand {j} must {want} it"
                ),
                format!("all_reduce[{axes}] operand {i} first"),
            );
        }
    }
    Ok(())
}

/// As messages have it.
fn word(r: Reduction) -> &'static str {
    match r {
        Reduction::Sum => "sum",
        Reduction::Max => "maximum",
        Reduction::Min => "minimum",
    }
}
