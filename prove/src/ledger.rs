//! What is to be shown, what was, and what was found instead.

use crate::term::{Mentions, Origin, Store, Term};
use shardc_ir::func::Module;
use shardc_ir::text::node_text;
use std::collections::BTreeMap;

/// How deep terms are written out, and most of those below that are named.
const DEPTH: usize = 3;
const NAMED: usize = 6;

/// Something that is not as it must be.
#[derive(Clone, Debug, PartialEq)]
pub struct Refuted {
    /// What was to be shown.
    pub what: String,
    /// The difference: of the plan, and of the textbook; or what is wrong, and what must be.
    pub plan: String,
    pub textbook: String,
    /// Where the differing terms are made.
    pub plan_place: Option<String>,
    pub textbook_place: Option<String>,
}

/// Something that is not understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Gap {
    pub op: String,
    pub place: String,
    /// What is missing to understand it.
    pub lemma: String,
}

/// An equation whose sides have other forms, of the plan and of the textbook: its kind, what is said of it,
/// and both.
pub type Unequal = (&'static str, Refuted, [Term; 2]);

/// All obligations so far.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// How many were shown, by kind.
    pub shown: BTreeMap<&'static str, usize>,
    pub refuted: Vec<Refuted>,
    pub unequal: Vec<Unequal>,
    pub gaps: Vec<Gap>,
    /// Where the model makes the first value that nothing of the plan makes in its form.
    pub first: Option<String>,
}

/// The texts that places are named in.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    pub programs: &'a Module,
    pub model: &'a Module,
}

impl Texts<'_> {
    /// A node with its function and scope.
    pub fn place(&self, o: Origin) -> Option<String> {
        let (m, f) = match o.func {
            Some(f) => (self.programs, self.programs.funcs.get(f as usize)?),
            None => (self.model, self.model.funcs.first()?),
        };
        let n = f.nodes.get(o.node as usize)?;
        let path = &f.scope_info(n.scope).path;
        let path = if path.is_empty() { String::new() } else { format!(", {path}") };
        Some(format!("@{}{path}: {}", f.name, node_text(&m.mesh, f, n).text))
    }
}

impl Ledger {
    /// What must hold and is not an equation.
    pub fn must(&mut self, kind: &'static str, holds: bool, what: impl FnOnce() -> [String; 3]) {
        if holds {
            *self.shown.entry(kind).or_default() += 1;
            return;
        }
        let [what, plan, textbook] = what();
        let none = None;
        self.refuted.push(Refuted {
            what,
            plan,
            textbook,
            plan_place: none.clone(),
            textbook_place: none,
        });
    }

    /// What the plan makes must be what the textbook says; `None`: nothing makes it.
    pub fn equal(
        &mut self,
        s: &Store,
        texts: Texts,
        kind: &'static str,
        what: String,
        got: Option<Term>,
        want: Term,
    ) {
        let Some(got) = got else {
            let [plan, textbook] = ["nothing makes it".into(), s.show(want, 2)];
            return self.must(kind, false, || [what, plan, textbook]);
        };
        if got == want {
            return self.must(kind, true, || unreachable!("it holds"));
        }
        let (a, b) = s.differ(got, want);
        let at = |t: Term| s.origin(t).and_then(|o| texts.place(o));
        let mentions = s.mentions(a);
        let open = [
            (Mentions::BLOCK, "join", "these blocks make no full turn of a ring that is known"),
            (Mentions::PIECE, "reduce", "these pieces make no whole that is known"),
        ];
        if let Some((_, op, lemma)) = open.iter().find(|x| mentions.has(x.0)) {
            let place = format!("{what}: {}", at(a).unwrap_or_default());
            let gap = Gap { op: op.to_string(), place, lemma: lemma.to_string() };
            return self.gaps.push(gap);
        }
        // What the text has numbers of: where each is made, or its outermost form.
        let show = |t: Term| {
            let mut numbered = vec![];
            s.numbered(t, DEPTH, &mut numbered);
            let more = numbered.len().saturating_sub(NAMED);
            let one = |t: &Term| {
                let made = at(*t).unwrap_or_else(|| s.show(*t, 1));
                format!("; #{} is {made}", t.0)
            };
            let named: String = numbered.iter().take(NAMED).map(one).collect();
            let rest =
                if more > 0 { format!("; {more} more are not shown") } else { String::new() };
            s.show(t, DEPTH) + &named + &rest
        };
        let found = Refuted {
            what,
            plan: show(a),
            textbook: show(b),
            plan_place: at(a),
            textbook_place: at(b),
        };
        self.unequal.push((kind, found, [got, want]));
    }
}
