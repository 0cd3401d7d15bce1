//! Experts: where copies of tokens stand in buffers, how rows go there and come back, and products
//! of rows with the weights of their experts. Buffers `[g,z,c,h]` are of groups, shards of tokens,
//! and rows.

use super::*;

/// Slots of copies and counts of rows.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Route {
    /// Groups, and experts of a group.
    pub groups: [usize; 2],
    pub rows: usize,
    pub capacity: Option<usize>,
}

impl Function for Route {
    fn name(&self) -> String {
        let Route { groups: [groups, experts], rows, capacity } = self;
        format!("route[g={groups},e={experts}; rows={rows}; capacity={capacity:?}]")
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let (index, Route { groups: [groups, experts], rows, capacity }) = (x[0], self);
        let mut slot = Tensor::full(&index.shape, -1i64 as u64);
        let mut counts = Tensor::full(&[*groups, *experts, index.shape[0]], 0);
        for z in 0..index.shape[0] {
            for g in 0..*groups {
                let mut row = 0;
                for e in 0..*experts {
                    let mut kept = 0;
                    each(&index.shape[1..], |i| {
                        let at = [z, i[0], i[1]];
                        let here = index.integer(&at) == (g * experts + e) as i64;
                        if here && capacity.is_none_or(|c| kept < c) {
                            if row < *rows {
                                let place = slot.place(&at);
                                slot.data[place] = (g * rows + row) as u64;
                            }
                            (row, kept) = (row + 1, kept + 1);
                        }
                    });
                    let place = counts.place(&[g, e, z]);
                    counts.data[place] = kept as u64;
                }
            }
        }
        Ok(vec![slot, counts])
    }
}

impl Law for ops::Route {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        known("z!t!k->ztk,!g!ez", &[3], ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { kinds: ["i", "ii"], ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        // A token's experts are different ones.
        let [t, copies] = [1, 2].map(|d| small.letter(0, Some(d)));
        let e = small.letter(2, Some(1));
        small.set(e, small.is(copies).max(2));
        self.rows = small.is(t) * small.is(copies);
        self.capacity = self.capacity.map(|_| 1);
    }
    fn multiples(&self, _: &[&Type]) -> Result<Vec<Multiple>, String> {
        Err(parts::UNTIED.into())
    }
    fn operands(&self, x: &mut Operands) {
        let [groups, experts] = self.groups();
        let (n, first) = ((groups * experts).max(1) as u64, x.noise(0));
        x.all[0] =
            Tensor::from_fn(&first.shape, |i| (first.at(&[i[0], i[1], 0]) + i[2] as u64) % n);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Route { sizes: _, rows, capacity } = self;
        Ok(Some(Route { groups: self.groups(), rows: *rows, capacity: *capacity }.into()))
    }
    fn is_constant(&self) -> bool {
        true
    }
}

/// Rows that the counts name; others are 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Defined;

impl Function for Defined {
    fn name(&self) -> String {
        "defined".into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![defined(x[0], x[1])])
    }
}

/// Rows that the counts name; others are 0.
pub(super) fn defined(rows: &Tensor, counts: &Tensor) -> Tensor {
    let mut out = Tensor::full(&rows.shape, 0);
    named_rows(counts, rows.shape[2], |g, z, c, _| {
        for h in 0..rows.shape[3] {
            let place = rows.place(&[g, z, c, h]);
            out.data[place] = rows.data[place];
        }
    });
    out
}

/// Calls `f(group, shard, row, expert)` for every row that the counts name.
fn named_rows(counts: &Tensor, rows: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
    let [groups, experts, shards] = [0, 1, 2].map(|d| counts.shape[d]);
    for (g, z) in (0..groups).flat_map(|g| (0..shards).map(move |z| (g, z))) {
        let mut row = 0;
        for e in 0..experts {
            let n = usize::try_from(counts.integer(&[g, e, z])).unwrap_or(0);
            (row..(row + n).min(rows)).for_each(|c| f(g, z, c, g * experts + e));
            row += n;
        }
    }
}

/// Calls `f(token, row, copy)` for what slots name, an element of each, in a buffer of this shape.
fn copies(slots: &Tensor, buffer: &[usize], mut f: impl FnMut([usize; 3], [usize; 4], &[usize])) {
    let (groups, rows, width) = (buffer[0], buffer[2], buffer[3]);
    each(&slots.shape, |i| {
        let slot = usize::try_from(slots.integer(i)).ok().filter(|s| *s < groups * rows);
        let Some(s) = slot else { return };
        (0..width).for_each(|h| f([i[0], i[1], h], [s / rows, i[0], s % rows, h], i));
    });
}

/// A slot for each copy of a token, no two alike in a shard, and some of none.
fn slots(x: &mut Operands, buffer: &[usize]) {
    let rows = buffer[0] * buffer[2];
    let mut out = Tensor::full(&x.all[1].shape, 0);
    let mut next = vec![0; out.shape[0]];
    each(&x.all[1].shape, |i| {
        let n = &mut next[i[0]];
        *n += 1;
        let place = out.place(i);
        let kept = *n % 4 != 0 && *n <= rows;
        out.data[place] = if kept { (*n + i[0]) as u64 % rows as u64 } else { -1i64 as u64 };
    });
    x.all[1] = out;
}

/// Rows for one who reads only those that the counts name.
fn rows(s: &mut Store, t: Term, counts: Term) -> Term {
    let shape = s.shape(t).to_vec();
    let own = |s: &Store, t: Term| match s.node(t) {
        Node::Apply(Fun::Defined(_), args, _) if args[1] == counts => args[0],
        _all => t,
    };
    let sum: Vec<(Coef, Term)> = s.monomials(t).into_iter().map(|(c, u)| (c, own(s, u))).collect();
    s.lemma("only rows that counts name are read");
    s.sum(&sum, &shape)
}

/// Rows for one who reads only those that the slots name, if a `route` made them.
fn slotted(s: &mut Store, t: Term, slots: Term) -> Term {
    let Node::Apply(Fun::Route(f), args, 0) = s.node(slots).clone() else { return t };
    let shape = [f.groups[0], f.groups[1], s.shape(slots)[0]];
    let counts = s.apply(f, &args, 1, &shape);
    rows(s, t, counts)
}

/// Declares an op of a buffer, integers, and something else: its letters, whether letters that are
/// lost are summed, its function over the field, and operand and result that are buffers; what is
/// read of its operands; and the functions that give cotangents of the first and of the third
/// operand, with their operands from x, w and the cotangent d.
macro_rules! buffers {
    ($($(#[doc = $doc:literal])*
       $op:ident = $name:literal $letters:literal of $ranks:expr, $lost:expr,
       |$x:ident, $out:ident| $results:expr;
       shrink |$small:ident| $shrink:expr; draws |$drawn:ident| $draws:expr;
       $(back |$bx:ident, $w:ident, $d:ident| $fx:ident $of_x:expr, $fw:ident $of_w:expr;)?
       reads |$t:ident| $reads:expr;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $op;

        impl Function for $op {
            fn name(&self) -> String {
                $name.into()
            }
            fn results(
                &self,
                $x: &[&Tensor],
                shape: &[usize],
                _: &Begins,
            ) -> Result<Vec<Tensor>, String> {
                let mut $out = Tensor::full(shape, 0);
                $results;
                Ok(vec![$out])
            }
        }

        impl Law for ops::$op {
            fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                known($letters, &$ranks, ranks)
            }
            fn typing(&self) -> Option<Typing> {
                let linear = Linear::Each(&[0, 2]);
                Some(Typing { linear, lost: $lost, kinds: ["nin", "n"], ..NONLINEAR })
            }
            fn shrink(&mut self, $small: &mut Small) {
                $shrink
            }
            fn multiples(&self, _: &[&Type]) -> Result<Vec<Multiple>, String> {
                Err(parts::UNTIED.into())
            }
            fn operands(&self, $drawn: &mut Operands) {
                $draws
            }
            fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
                Ok(Some($op.into()))
            }
            fn terms(&self, $t: &mut Terms) -> Result<Vec<Term>, String> {
                let args = $reads;
                Ok($t.call(&$op.into(), &args))
            }
            $(fn back(&self, at: &mut At) -> Result<Back, String> {
                let ($bx, n, $w, $d) = (at.x[0], at.x[1], at.x[2], at.d()?);
                let [of_x, of_w] = [at.shape(0), at.shape(2)];
                let [(x0, x2), (w0, w2)] = [$of_x, $of_w];
                let d_x = at.s.apply($fx, &[x0, n, x2], 0, &of_x);
                let d_w = at.s.apply($fw, &[w0, n, w2], 0, &of_w);
                Ok(vec![Some(d_x), None, Some(d_w)])
            })?
        }
    )*};
}

buffers! {
    /// Rows go to experts, times gates.
    Dispatch = "dispatch" "z!th,zt!k,ztk->!gz!ch" of [3, 3, 3], None,
    |x, out| {
        let shape = out.shape.clone();
        copies(x[1], &shape, |t, r, i| out.add_at(&r, times(x[0].at(&t), x[2].at(i))))
    };
    shrink |_small| (); draws |x| {
        let buffer = x.o.outs[0].ty.sizes().to_vec();
        slots(x, &buffer)
    };
    back |x, w, d| Unpermute (d, w), CombineGatesGrad (d, x);
    reads |t| t.ins.to_vec();

    /// Rows come back to tokens, times gates.
    Unpermute = "unpermute" "!gz!ch,z!t!k,ztk->zth" of [4, 3, 3], None,
    |x, out| copies(x[1], &x[0].shape, |t, r, i| out.add_at(&t, times(x[0].at(&r), x[2].at(i))));
    shrink |_small| (); draws |x| {
        let buffer = x.all[0].shape.clone();
        slots(x, &buffer)
    };
    back |x, w, d| Dispatch (d, w), CombineGatesGrad (x, d);
    reads |t| [slotted(t.s, t.ins[0], t.ins[1]), t.ins[1], t.ins[2]];

    /// Products of rows with tokens.
    CombineGatesGrad = "combine_gates_grad" "!gz!ch,z!t!k,zth->ztk" of [4, 3, 3], SUM,
    |x, out| copies(x[1], &x[0].shape, |t, r, i| out.add_at(i, times(x[0].at(&r), x[2].at(&t))));
    shrink |_small| (); draws |x| {
        let buffer = x.all[0].shape.clone();
        slots(x, &buffer)
    };
    reads |t| [slotted(t.s, t.ins[0], t.ins[1]), t.ins[1], t.ins[2]];

    /// Rows times the weights of their experts.
    GroupedDot = "grouped_dot" "gz!ci,g!ez,(ge)oi->gzco" of [4, 3, 3], SUM,
    |x, out| named_rows(x[1], x[0].shape[2], |g, z, c, e| each(&x[2].shape[1..], |i| {
        let product = times(x[0].at(&[g, z, c, i[1]]), x[2].at(&[e, i[0], i[1]]));
        out.add_at(&[g, z, c, i[0]], product);
    }));
    shrink |small| a_row_each(small); draws |x| counts(x);
    back |x, w, d| GroupedDotT (d, w), GroupedOuter (d, x);
    reads |t| [rows(t.s, t.ins[0], t.ins[1]), t.ins[1], t.ins[2]];

    /// Rows times the transposed weights of their experts.
    GroupedDotT = "grouped_dot_t" "gz!co,g!ez,(ge)oi->gzci" of [4, 3, 3], SUM,
    |x, out| named_rows(x[1], x[0].shape[2], |g, z, c, e| each(&x[2].shape[1..], |i| {
        let product = times(x[0].at(&[g, z, c, i[0]]), x[2].at(&[e, i[0], i[1]]));
        out.add_at(&[g, z, c, i[1]], product);
    }));
    shrink |small| a_row_each(small); draws |x| counts(x);
    back |x, w, d| GroupedDot (d, w), GroupedOuter (x, d);
    reads |t| [rows(t.s, t.ins[0], t.ins[1]), t.ins[1], t.ins[2]];

    /// Outer products of rows, summed for each expert.
    GroupedOuter = "grouped_outer" "gz!co,g!ez,gzci->(ge)oi" of [4, 3, 4], SUM,
    |x, out| {
        let weight = out.shape[1..].to_vec();
        named_rows(x[1], x[0].shape[2], |g, z, c, e| each(&weight, |i| {
            let product = times(x[0].at(&[g, z, c, i[0]]), x[2].at(&[g, z, c, i[1]]));
            out.add_at(&[e, i[0], i[1]], product);
        }))
    };
    shrink |small| a_row_each(small); draws |x| counts(x);
    reads |t| [rows(t.s, t.ins[0], t.ins[1]), t.ins[1], rows(t.s, t.ins[2], t.ins[1])];
}

/// There is a row for every expert.
pub(super) fn a_row_each(small: &mut Small) {
    let [c, e] = [small.letter(0, Some(2)), small.letter(1, Some(1))];
    small.set(c, 2 * small.is(e));
}

/// Counts of rows that a buffer has.
pub(super) fn counts(x: &mut Operands) {
    let most = x.all[0].shape[2] / x.all[1].shape[1].max(1) + 1;
    x.all[1] = x.all[1].map(|v| v % most as u64);
}
