//! Phase and layouts of parameters: what the text says of a module between two passes.
//!
//! ```text
//! phase ranked
//! layout "model.norm.weight" %norm in "model.norm" : f32[32@dp_shard] once 1 back 1 {
//!   all_gather[dp_shard; dim=0] : f32[32]
//! }
//! ```

use super::cursor::{Fail, Res};
use super::parse::Parser;
use super::print::Printer;
use super::types::{write_quoted, write_type};
use crate::func::{Func, FuncKind, LayoutStep, Name, ParamLayout, Role, RoleKind};
use crate::phase::Phase;
use std::fmt::Write as _;

impl Printer<'_> {
    /// The phase; that of a model or of a plan's programs only if it is `always` said.
    pub fn phase(&mut self, phase: Phase, always: bool) {
        if always || !matches!(phase, Phase::Source | Phase::Step) {
            self.line_of_no_layer();
            let _ = writeln!(self.out, "phase {phase}");
        }
    }

    pub fn layout(&mut self, p: &ParamLayout) {
        self.line_of_no_layer();
        self.out.push_str("layout ");
        write_quoted(&p.param.name, &mut self.out);
        self.out.push(' ');
        p.name.write(&mut self.out);
        self.out.push_str(" in ");
        write_quoted(&p.scope, &mut self.out);
        self.out.push_str(" : ");
        write_type(self.mesh, &p.stored, &mut self.out);
        let _ = write!(self.out, " once {} back {}", p.prepared, p.mirrored);
        self.out.push_str(if p.trainable { " {\n" } else { " frozen {\n" });
        for s in &p.steps {
            self.line_of_no_layer();
            self.out.push_str("  ");
            s.op.write(self.mesh, &mut self.out);
            self.out.push_str(" : ");
            write_type(self.mesh, &s.ty, &mut self.out);
            self.out.push('\n');
        }
        self.line_of_no_layer();
        self.out.push_str("}\n");
    }
}

/// True if a text says of which phase it is.
pub fn says_phase(text: &str) -> bool {
    let head = text.lines().map(str::trim_start).take_while(|l| !l.starts_with("func"));
    head.into_iter().any(|l| l.starts_with("phase "))
}

/// The phase of a text that does not say: programs of a plan have an `@step_prologue`.
pub(super) fn unsaid(funcs: &[Func]) -> Phase {
    if funcs.iter().any(|f| f.kind == FuncKind::StepPrologue) { Phase::Step } else { Phase::Source }
}

impl Parser<'_> {
    /// The phase that the text says, if it does.
    pub fn phase(&mut self) -> Res<Option<Phase>> {
        self.c.blank();
        if !self.c.eat("phase ") {
            return Ok(None);
        }
        self.c.spaces();
        let at = self.c.at;
        let word = self.c.word();
        let known = Phase::ALL.into_iter().find(|p| p.name() == word);
        known.map(Some).ok_or_else(|| {
            let all: Vec<&str> = Phase::ALL.iter().map(|p| p.name()).collect();
            Fail::new("syntax", at, word.len(), format!("no phase is called `{word}`"))
                .help(format!("the phases are {}", all.join(", ")))
        })
    }

    /// Layouts of parameters, as many as there are.
    pub fn layouts(&mut self) -> Res<Vec<ParamLayout>> {
        let mut all = vec![];
        loop {
            self.c.blank();
            if !self.c.eat("layout ") {
                return Ok(all);
            }
            self.c.spaces();
            let param = self.c.quoted()?;
            self.c.spaces();
            let (_, name) = self.value_name()?;
            self.c.spaces();
            self.c.must("in")?;
            self.c.spaces();
            let scope = self.c.quoted()?;
            self.c.spaces();
            self.c.must(":")?;
            self.c.spaces();
            let stored = self.ty()?;
            let counts = ["once", "back"].map(|word| -> Res<usize> {
                self.c.spaces();
                self.c.must(word)?;
                self.c.spaces();
                self.number(MAX_STEPS)
            });
            let [prepared, mirrored] = counts;
            let (prepared, mirrored) = (prepared?, mirrored?);
            self.c.spaces();
            let trainable = !self.c.eat("frozen");
            self.c.spaces();
            self.c.must("{")?;
            let at = self.c.at;
            let steps = self.steps(stored.rank())?;
            if prepared.max(mirrored) > steps.len() {
                let what = format!("{} steps are given", steps.len());
                return Err(Fail::new("arity", at, 1, what).help("count no more than there are"));
            }
            all.push(ParamLayout {
                param: Role::new(RoleKind::Param, param),
                stored,
                steps,
                prepared,
                mirrored,
                trainable,
                name: Name::parse(name),
                scope,
            });
        }
    }

    fn steps(&mut self, rank: usize) -> Res<Vec<LayoutStep>> {
        let mut steps = vec![];
        loop {
            self.c.blank();
            if self.c.eat("}") {
                return Ok(steps);
            }
            let at = self.c.at;
            let text = self.op_text()?;
            let op = self.op(&text, &[rank], false)?;
            self.c.spaces();
            self.c.must(":")?;
            self.c.spaces();
            steps.push(LayoutStep { op, ty: self.ty()? });
            if steps.len() > MAX_STEPS {
                let what = format!("more than {MAX_STEPS} steps");
                return Err(Fail::new("too-large", at, 1, what).help("a layout has few"));
            }
        }
    }
}

/// Most steps of a parameter.
const MAX_STEPS: usize = 64;
