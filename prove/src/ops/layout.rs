//! Ops between ranks, and what only changes how a value is seen. They change what each rank holds
//! of a tensor and not the tensor: what each does to types, and on all ranks over the field.

use super::*;
use crate::field::ranks::{NodeStep, Pieces, before};
use crate::local::collectives::{self, Change};
use crate::local::counts;
use crate::local::evaluate::World;
use crate::ring::Around;
use shardc_ir::mesh::AtomSet;

/// What programs count of the ranks of an op's axes, so that these keep their sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Counts {
    Nothing,
    /// Pieces by their numbers.
    Pieces,
    /// Blocks of a ring, as shifts are modulo its ranks.
    Ring,
}

/// What is believed of an op between ranks.
pub(crate) trait Between {
    fn axes(&self) -> AtomSet;

    /// What is counted of the ranks of the axes.
    fn counts(&self) -> Counts {
        Counts::Nothing
    }

    /// A dim of which the operand, or else the result, has as many elements as all ranks of the
    /// axes together.
    fn whole(&self) -> Option<(usize, bool)> {
        None
    }

    /// Axes whose ranks have tensors of their own, of which the types do not tell.
    fn worlds(&self) -> AtomSet {
        AtomSet::EMPTY
    }

    /// What operands must be together.
    fn fits(&self, _mesh: &Mesh, _held: &[&Held]) -> Result<(), Fault> {
        Ok(())
    }

    /// Changes the type of an operand to that of its result.
    ///
    /// # Errors
    /// Says what the operand must be.
    fn follow(&self, c: &mut Change) -> Result<(), Fault>;

    /// What all ranks make of their pieces.
    ///
    /// # Errors
    /// Says which piece nobody has.
    fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String>;

    /// What it makes of whole tensors.
    ///
    /// # Errors
    /// Says what has no meaning.
    fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
        Ok(w.own().to_vec())
    }
}

/// The lemma of collectives but for shifts.
const CHANGES_NOTHING: &str = "types: a collective changes no tensor";

/// Operands that keep their dims, each for itself.
fn own_dims(ranks: &[usize]) -> Cow<'static, Rule> {
    let own: Vec<Dims> =
        ranks.iter().map(|&n| Rule::elementwise(1, 1, n).ins.swap_remove(0)).collect();
    let own: Vec<&Dims> = own.iter().collect();
    Cow::Owned(Rule::of(&own, &own))
}

/// One that does.
fn own_dim(ranks: &[usize]) -> Option<Cow<'static, Rule>> {
    (ranks.len() == 1).then(|| own_dims(ranks))
}

fn unchanged(t: &mut Terms) -> Result<Vec<Term>, String> {
    t.s.lemma(CHANGES_NOTHING);
    Ok(t.ins.to_vec())
}

fn around(t: &Terms, axes: AtomSet, dim: usize) -> Around {
    Around { axes: axes.0, of: t.mesh.ways(axes), dim }
}

/// Declares what is believed of an op between ranks: its letters, its results as terms, and
/// functions of [`Between`]; all of them have an attribute `axes`.
macro_rules! between {
    ($($op:ident |$k:ident, $ranks:ident| $letters:expr; |$t:ident| $terms:expr;
       $(shrink |$small:ident| $shrink:expr;)? $(draws |$x:ident| $draws:expr;)?
       { $($also:item)* })*) => {$(
        impl Law for ops::$op {
            fn letters(&self, $ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                let $k = self;
                let _ = $k;
                $letters
            }
            fn typing(&self) -> Option<Typing> {
                None
            }
            fn held(
                &self,
                mesh: &Mesh,
                held: &[&Held],
                outs: &[&Type],
            ) -> Result<Vec<Vec<Block>>, Fault> {
                collectives::check(mesh, self, held, outs)
            }
            fn between(&self) -> Option<&dyn Between> {
                Some(self)
            }
            $(fn shrink(&mut self, $small: &mut Small) {
                let $k = self;
                let _ = &$k;
                $shrink
            })?
            $(fn operands(&self, $x: &mut Operands) {
                $draws
            })?
            fn terms(&self, $t: &mut Terms) -> Result<Vec<Term>, String> {
                let $k = self;
                let _ = $k;
                $terms
            }
        }
        impl Between for ops::$op {
            fn axes(&self) -> AtomSet {
                self.axes
            }
            $($also)*
        }
    )*};
}

between! {
    FanOut |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.invariant()?;
            c.t.replicated = c.t.replicated.union(self.axes);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.same()
        }
    }
    AllReduce |k, ranks| (!ranks.is_empty()).then(|| own_dims(ranks)); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.reduced(false)?;
            c.same_everywhere();
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            let one = |i: usize| s.all(|rank| s.reduced(self.axes, i, rank));
            Ok((0..s.x.len()).map(one).collect())
        }
    }
    AllGather |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.leaves(self.dim)?;
            c.same_everywhere();
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| s.gathered(self.axes, self.dim, rank))
        }
    }
    ReduceScatter |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.reduced(true)?;
            c.comes(self.dim)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                s.own(&s.reduced(self.axes, 0, rank), self.dim, rank, s.begin(self.dim, rank))
            })
        }
    }
    Slice |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            if !self.axes.within(c.t.replicated) {
                c.invariant()?;
            }
            c.t.replicated = c.t.replicated.minus(self.axes);
            c.comes(self.dim)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| s.own(&s.x[0][rank], self.dim, rank, s.begin(self.dim, rank)))
        }
    }
    PadToPartial |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.leaves(self.dim)?;
            c.t.sum = c.t.sum.union(self.axes);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                let from = s.begin(self.dim, rank) - s.r.begin(s.to[0], self.dim, rank);
                s.x[0][rank].among_zeros(&s.r.shape(s.to[0], rank), self.dim, from)
            })
        }
    }
    AllToAll |k, ranks| own_dim(ranks); |t| unchanged(t); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.moves(self.from, self.to)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| s.moved(self.axes, self.from, self.to, rank))
        }
    }
    Exchange |k, ranks| match (k.start.0, ranks) {
        (None, _) => own_dim(ranks),
        // The dim that is shifted may change its size.
        (Some(_), &[rank]) => Some(Cow::Owned(Rule::along(rank, k.dim.of(rank)?, &[WHOLE], PART))),
        (Some(_), _) => None,
    };
    |t| {
        let Some(start) = k.start.0 else { return unchanged(t) };
        t.s.lemma(
            "types: an exchange with a start takes a range of a dim, and places it among zeros",
        );
        let f = Shifted { dim: parts::along(t.types, k.dim.0)?, start };
        Ok(vec![t.s.apply(f, &t.ins[..1], 0, t.shape())])
    };
    // What crosses may be more than a piece, and less.
    shrink |_small| k.start.0 = k.start.0.map(|s| s.clamp(-3, 3)); {
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.exchanged(self)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            let all = (0..s.r.count()).map(|rank| s.exchanged(self, rank));
            Ok(vec![all.collect::<Option<_>>().ok_or("a box that no rank of the group has")?])
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            let own = &w.own()[0];
            Ok(vec![Tensor::from_fn(&w.to[0].sizes(), |i| {
                before(self, i.to_vec(), &own.shape).map_or(0, |at| own.at(&at))
            })])
        }
    }
    AllToAllV |k, ranks| known("gzch,gez,gez->gzch", &[4, 3, 3], ranks);
    |t| {
        // Rows that the counts do not name are not defined in the result.
        let (rows, sent) = (t.ins[0], t.ins[1]);
        if sent != t.ins[2] {
            return Err("rows are sent and received by different counts".into());
        }
        t.s.lemma(CHANGES_NOTHING);
        let mut sum: Vec<(Coef, Term)> = t.s.monomials(rows);
        for (_, row) in &mut sum {
            *row = t.s.apply(Defined, &[*row, sent], 0, t.shape());
        }
        Ok(vec![t.s.sum(&sum, t.shape())])
    };
    shrink |small| experts::a_row_each(small);
    draws |x| {
        experts::counts(x);
        x.all[2] = x.all[1].clone();
    }; {
        fn fits(&self, mesh: &Mesh, held: &[&Held]) -> Result<(), Fault> {
            counts::check(mesh, [self.from, self.to], held, self.axes)
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.moves(self.from, self.to)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            // Rows that the sender's counts do not name stay behind.
            let sent = s.all(|rank| experts::defined(&s.x[0][rank], &s.x[1][rank]));
            let x: Vec<&Pieces> = std::iter::once(&sent).chain(s.x[1..].iter().copied()).collect();
            let step = NodeStep { x: &x, ..*s };
            s.one(|rank| {
                let moved = step.moved(self.axes, self.from, self.to, rank);
                experts::defined(&moved, &s.x[2][rank])
            })
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            Ok(vec![experts::defined(&w.own()[0], &w.own()[1])])
        }
    }
    ToPartial |k, ranks| own_dim(ranks); |t| Ok(t.ins.to_vec()); {
        // Each rank of the pipeline has its own, of which the others know nothing.
        fn worlds(&self) -> AtomSet {
            self.axes
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.invariant()?;
            c.t.sum = c.t.sum.union(self.axes);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.same()
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            let sum = Tensor::full(&w.own()[0].shape, 0);
            Ok(vec![w.group(self.axes).iter().fold(sum, |s, r| s.plus(w.first_of(*r)))])
        }
    }
    Broadcast |k, ranks| own_dim(ranks);
    |t| Ok(vec![t.s.piece(t.ins[0], cut(t, k.axes, k.dim, k.from))?]);
    shrink |small| k.from %= small.mesh.ways(k.axes); {
        fn counts(&self) -> Counts {
            Counts::Pieces
        }
        fn whole(&self) -> Option<(usize, bool)> {
            Some((self.dim, true))
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.alone(self.dim, false)?;
            c.number(self.from)?;
            c.shrinks(self.dim)?;
            c.t.replicated = c.t.replicated.union(self.axes);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                let (mut group, _) = s.group(self.axes, rank);
                group.sort_by_key(|&r| s.r.begin(s.of[0], self.dim, r));
                s.x[0][group[self.from]].clone()
            })
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            let own = &w.own()[0];
            let n = own.shape[self.dim] / w.ways(self.axes);
            Ok(vec![own.slice(self.dim, self.from * n, n)])
        }
    }
    Reduce |k, ranks| own_dim(ranks);
    |t| Ok(vec![t.s.place(t.ins[0], cut(t, k.axes, k.dim, k.to))?]);
    shrink |small| k.to %= small.mesh.ways(k.axes); {
        fn counts(&self) -> Counts {
            Counts::Pieces
        }
        fn whole(&self) -> Option<(usize, bool)> {
            Some((self.dim, false))
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.reduced(true)?;
            c.number(self.to)?;
            c.grows(self.dim)?;
            c.comes(self.dim)?;
            c.alone_in(c.t.dims[self.dim].atoms, false)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                let (mut group, _) = s.group(self.axes, rank);
                group.sort_by_key(|&r| s.r.begin(s.to[0], self.dim, r));
                match group[self.to] == rank {
                    true => s.reduced(self.axes, 0, rank),
                    false => Tensor::full(&s.r.shape(s.to[0], rank), 0),
                }
            })
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            let own = &w.own()[0];
            let from = self.to * own.shape[self.dim];
            Ok(vec![own.among_zeros(&w.to[0].sizes(), self.dim, from)])
        }
    }
    ToVarying |k, ranks| own_dim(ranks);
    |t| Ok(vec![t.s.block(t.ins[0], around(t, k.axes, k.dim), 0)?]); {
        fn counts(&self) -> Counts {
            Counts::Ring
        }
        fn whole(&self) -> Option<(usize, bool)> {
            Some((self.dim, true))
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.alone(self.dim, true)?;
            c.shrinks(self.dim)?;
            c.varies(self.dim, 0);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.same()
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            Ok(vec![w.result_of(&w.own()[0])])
        }
    }
    RingShard |k, ranks| own_dim(ranks);
    |t| Ok(vec![t.s.block(t.ins[0], around(t, k.axes, k.dim), k.shift)?]); {
        fn counts(&self) -> Counts {
            Counts::Ring
        }
        fn whole(&self) -> Option<(usize, bool)> {
            Some((self.dim, true))
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            if !self.axes.within(c.t.replicated) || !c.dim(self.dim)?.atoms.is_empty() {
                return wrong("it takes what all ranks have all of".into());
            }
            c.t.replicated = c.t.replicated.minus(self.axes);
            c.shrinks(self.dim)?;
            c.varies(self.dim, self.shift);
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                let (group, place) = s.group(self.axes, rank);
                let (n, len) = (group.len(), s.to[0].dims[self.dim].size);
                s.x[0][rank].slice(self.dim, (place + n - self.shift % n) % n * len, len)
            })
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            Ok(vec![w.result_of(&w.own()[0])])
        }
    }
    Permute |k, ranks| own_dim(ranks); |t| Ok(vec![t.s.turn(t.ins[0], k.axes.0, k.shift)?]); {
        fn counts(&self) -> Counts {
            Counts::Ring
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.varying()?;
            let ways = c.mesh.ways(self.axes);
            for b in c.blocks.iter_mut().filter(|b| b.axes.meets(self.axes)) {
                if b.axes != self.axes {
                    return wrong("blocks of other axes are passed on".into());
                }
                b.shift = (b.shift + self.shift % ways) % ways;
            }
            Ok(())
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.one(|rank| {
                let (group, place) = s.group(self.axes, rank);
                let n = group.len();
                s.x[0][group[(place + n - self.shift % n) % n]].clone()
            })
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            let (all, place) = (w.group(self.axes), w.place(self.axes));
            let from = all[(place + all.len() - self.shift % all.len()) % all.len()];
            // Blocks that are known must be those of one tensor again.
            Ok(vec![match w.source() {
                Some(source) if !w.out().blocks.is_empty() => w.result_of(&source),
                _unknown => w.first_of(from).clone(),
            }])
        }
    }
    FromVarying |k, ranks| own_dim(ranks);
    |t| Ok(vec![t.s.join(t.ins[0], around(t, k.axes, k.dim), t.shape())]); {
        fn counts(&self) -> Counts {
            Counts::Ring
        }
        fn whole(&self) -> Option<(usize, bool)> {
            Some((self.dim, false))
        }
        fn follow(&self, c: &mut Change) -> Result<(), Fault> {
            c.varying()?;
            c.joined(self.dim)?;
            c.t.varying = c.t.varying.minus(self.axes);
            c.grows(self.dim)?;
            c.comes(self.dim)?;
            c.alone_in(c.t.dims[self.dim].atoms, true)
        }
        fn deal(&self, s: &NodeStep) -> Result<Vec<Pieces>, String> {
            s.same()
        }
        fn want(&self, w: &World) -> Result<Vec<Tensor>, Fault> {
            match w.source() {
                Some(source) => Ok(vec![w.without(self.axes, &source)]),
                None => wrong("values that are not blocks are put together".into()),
            }
        }
    }
}

/// Letters of the operand and of the result of a shift.
const WHOLE: Name = Name(b'd' - b'a');
const PART: Name = Name(b'p' - b'a');

/// A piece of a dim, by its number.
fn cut(t: &Terms, axes: AtomSet, dim: usize, piece: usize) -> Cut {
    Cut { dim, of: t.mesh.ways(axes), piece }
}
