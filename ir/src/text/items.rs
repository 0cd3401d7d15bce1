//! Reads what stands beside a value: its type, its role, what was asked of its sharding.

use super::cursor::{Cursor, Fail, Res};
use super::expand::Expanded;
use super::near::nearest;
use super::parse::Parser;
use crate::attr::{MAX_SIZE, TWICE, read_atoms};
use crate::diag::Diag;
use crate::func::{AnnotatedDim, Annotation, Fill, Input, Reads, Role, RoleKind};
use crate::mesh::Mesh;
use crate::types::{AtomList, Dim, MAX_ELEMENTS, Type};
use smallvec::SmallVec;

/// Most dims of a value: rules stand for so many with `..`.
pub(crate) const MAX_DIMS: usize = 8;

/// Reads one type, such as `f32[4,16@tp]`. Sub-axes must be atoms of the mesh already.
///
/// # Errors
/// `syntax`, `size` or `unknown-axis`.
pub fn parse_type(mesh: &Mesh, text: &str) -> Result<Type, Diag> {
    let c = Cursor { text: text.trim(), at: 0 };
    let mut p = Parser { c, mesh: mesh.clone(), func: None, source: None };
    let read = p.ty().and_then(|t| match p.c.peek() {
        None => Ok(t),
        Some(_) => Err(p.c.needs("the end of the type").help("for example `f32[4,16@tp]+dp`")),
    });
    read.map_err(|f| f.diag(&Expanded::plain(text.trim()), None))
}

impl Parser<'_> {
    pub fn number(&mut self, most: usize) -> Res<usize> {
        let at = self.c.at;
        let text = self.c.digits();
        if text.is_empty() {
            return Err(self.c.needs("a number").help("for example `16`"));
        }
        text.parse().ok().filter(|&n| n <= most).ok_or_else(|| {
            let shown = &text[..text.len().min(30)];
            Fail::new("size", at, text.len(), format!("{shown} is larger than {most}"))
                .help(format!("use at most {most}"))
        })
    }

    pub fn ty(&mut self) -> Res<Type> {
        let at = self.c.at;
        let mut t = Type::new(self.dtype()?, &[]);
        let mut elements = 1usize;
        self.c.must("[")?;
        self.c.spaces();
        while !self.c.eat("]") {
            if !t.dims.is_empty() {
                self.c.must(",")?;
                self.c.spaces();
            }
            let size = self.number(MAX_SIZE)?;
            self.c.spaces();
            let atoms = match (self.c.eat("@-"), self.c.eat("@")) {
                (true, _) => self.atoms()?.turned(),
                (false, true) => self.atoms()?,
                (false, false) => AtomList::EMPTY,
            };
            self.c.spaces();
            t.dims.push(Dim { size, atoms });
            elements = elements.saturating_mul(size.max(1));
            if elements > MAX_ELEMENTS || t.dims.len() > MAX_DIMS {
                let n = t.dims.len();
                let m = format!("a value of {n} dims and at least {elements} elements");
                return Err(Fail::new("size", at, self.c.at - at, m)
                    .rule(format!("dims <= {MAX_DIMS}, elements <= {MAX_ELEMENTS}"))
                    .help(format!("use at most {MAX_DIMS} dims and {MAX_ELEMENTS} elements")));
            }
        }
        self.marks(&mut t)?;
        Ok(t)
    }

    fn marks(&mut self, t: &mut Type) -> Res<()> {
        let mut seen = [false; 5];
        loop {
            let before = self.c.at;
            self.c.spaces();
            let here = self.c.at;
            let all = ["~", "!", "+", "max:", "min:"];
            let Some(k) = all.iter().position(|m| self.c.eat(m)) else {
                self.c.at = before;
                return Ok(());
            };
            if std::mem::replace(&mut seen[k], true) {
                let m = format!("`{}` occurs twice in one type", all[k]);
                let help = format!("join the axes, as in `{}dp*tp`", all[k]);
                return Err(Fail::new("syntax", here, all[k].len(), m).help(help));
            }
            let s = self.atoms()?.set();
            *[&mut t.replicated, &mut t.varying, &mut t.sum, &mut t.max, &mut t.min][k] = s;
        }
    }

    pub fn atoms(&mut self) -> Res<AtomList> {
        self.c.spaces();
        let at = self.c.at;
        let text = self.c.atoms();
        self.atoms_of(text, at)
    }

    /// The atoms that words name which stand at a place, perhaps under other names.
    fn atoms_of(&self, text: &str, at: usize) -> Res<AtomList> {
        read_atoms(text, &self.mesh).map_err(|m| {
            atoms_error(&m, text, &self.mesh, at).unwrap_or_else(|| {
                let near = "for example `dp*tp`, or a part of an axis as `tp:(2)4`";
                Fail::new("sub-axis", at, text.len(), m).help(near)
            })
        })
    }

    /// The same of what is asked: `dp` is the data-parallel axes, as for `--shard`.
    fn asked_atoms(&mut self) -> Res<AtomList> {
        let at = self.c.at;
        let text = self.c.atoms();
        self.atoms_of(&self.mesh.spelled(text), at)
    }

    /// A role, if one stands here.
    pub fn role(&mut self) -> Res<Option<Role>> {
        self.c.blank();
        let at = self.c.at;
        let word = self.c.word();
        if word.is_empty() {
            return Ok(None);
        }
        let known = RoleKind::ALL.map(RoleKind::name);
        let Some(kind) = RoleKind::ALL.into_iter().find(|k| k.name() == word) else {
            let f = Fail::new("syntax", at, word.len(), format!("`{word}` is not a role"));
            let near = meant(&nearest(word, known.iter().copied()));
            return Err(f.help(format!("the roles are {}{near}", known.join(", "))));
        };
        let kind = match kind {
            RoleKind::GradFrom(_) => {
                self.c.must("[")?;
                let rank = self.number(u32::MAX as usize)? as u32;
                self.c.must("]")?;
                RoleKind::GradFrom(rank)
            }
            RoleKind::State(_) => {
                self.c.must("[")?;
                let state = self.state_name()?;
                self.c.must("]")?;
                RoleKind::State(state)
            }
            RoleKind::Input(_) => {
                let own = if self.c.eat("[") { Some(self.input()?) } else { None };
                self.c.spaces();
                let role = Role::input(self.c.quoted()?);
                return Ok(Some(match own {
                    Some(own) => Role { kind: RoleKind::Input(own), ..role },
                    None => role,
                }));
            }
            plain => plain,
        };
        self.c.spaces();
        Ok(Some(Role::new(kind, self.c.quoted()?)))
    }

    /// What an input is, behind `[`: `labels, batch, seq=1]`.
    fn input(&mut self) -> Res<Input> {
        let at = self.c.at;
        let word = self.c.word();
        let Some(fill) = Fill::ALL.into_iter().find(|f| f.name() == word) else {
            let known = Fill::ALL.map(Fill::name).join(", ");
            let m = format!("`{word}` is not a source of an input");
            return Err(Fail::new("syntax", at, word.len().max(1), m)
                .help(format!("write one of {known}, as in `input[labels, batch] \"y\"`")));
        };
        let mut own = Input { fill, batch: false, seq: None, reads: Reads::Usual };
        while !self.c.eat("]") {
            if own.reads != Reads::Usual {
                return Err(self.c.needs("`]`"));
            }
            self.c.must(",")?;
            self.c.spaces();
            let at = self.c.at;
            match self.c.word() {
                "batch" if !own.batch && own.seq.is_none() => own.batch = true,
                "seq" if own.seq.is_none() => {
                    self.c.must("=")?;
                    own.seq = Some(self.number(MAX_DIMS - 1)? as u8);
                }
                word => {
                    let known =
                        Reads::ALL.into_iter().find(|r| !word.is_empty() && r.name() == word);
                    let Some(reads) = known.filter(|r| own.may_read(*r)) else {
                        let m =
                            format!("`{word}` is not an attribute of an input of {}", fill.name());
                        return Err(Fail::new("syntax", at, word.len().max(1), m).help(
                            "say `batch` if dim 0 is rows, then `seq=D` if dim D is tokens; of \
                             tokens [rows, tokens] then `own`, of their labels `own`, `causal` or `next`",
                        ));
                    };
                    own.reads = reads;
                }
            }
        }
        Ok(own)
    }

    /// What somebody asked of a sharding, if it stands here: `@(dp,?,-,tp?)p1`.
    pub fn asked(&mut self, rank: usize) -> Res<Option<Annotation>> {
        let before = self.c.at;
        self.c.spaces();
        let at = self.c.at;
        if !self.c.eat("@(") {
            self.c.at = before;
            return Ok(None);
        }
        let mut dims: SmallVec<[AnnotatedDim; 4]> = SmallVec::new();
        self.c.spaces();
        while !self.c.eat(")") {
            if !dims.is_empty() {
                self.c.must(",")?;
                self.c.spaces();
            }
            let whole = self.c.eat("-");
            let named = self.c.peek().is_some_and(|c| c.is_ascii_alphabetic());
            let atoms = if named { self.asked_atoms()? } else { AtomList::EMPTY };
            let open = self.c.eat("?");
            if whole == (named || open) {
                let f = self.c.needs("`?`, `-` or the names of axes");
                return Err(f.help("for example `@(dp,?,-,tp?)p1`"));
            }
            dims.push(AnnotatedDim { atoms, open });
            self.c.spaces();
        }
        let priority = if self.c.eat("p") { self.number(u8::MAX as usize)? as u8 } else { 0 };
        if dims.len() != rank {
            let m = format!("{} dims are asked for, the value has {rank}", dims.len());
            return Err(Fail::new("arity", at, self.c.at - at, m)
                .help(format!("name {rank} dims; `?` leaves one open")));
        }
        Ok(Some(Annotation { dims, priority }))
    }
}

/// The error of reading the atoms named in `text`, if it is about the names of axes.
pub(super) fn atoms_error(message: &str, text: &str, mesh: &Mesh, at: usize) -> Option<Box<Fail>> {
    match () {
        () if message.ends_with(TWICE) => {
            Some(Fail::new("mixed", at, text.len(), message).help("use each axis once"))
        }
        () if message.starts_with("no axis") => Some(axis_error(message, text, mesh, at)),
        () => None,
    }
}

fn axis_error(message: &str, text: &str, mesh: &Mesh, at: usize) -> Box<Fail> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut unknown = words.filter(|w| w.starts_with(|c: char| c.is_ascii_alphabetic()));
    let unknown = unknown.find(|w| mesh.axis(w).is_none()).unwrap_or("");
    let near = meant(&nearest(unknown, mesh.axes.iter().map(|a| a.name.as_str())));
    let axes: Vec<_> = mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    let axes = axes.join(", ");
    Fail::new("unknown-axis", at, text.len(), message)
        .rule("axes of size 1 split nothing and are left out of the mesh")
        .help(match axes.is_empty() {
            true => "say the mesh in the text's first line, as `mesh [tp=2]`".into(),
            false => format!("the mesh is [{axes}]{near}"),
        })
}

/// What was probably meant, for the end of a message.
pub(super) fn meant(near: &[&str]) -> String {
    match near {
        [] => String::new(),
        _ => format!("; did you mean `{}`?", near.join("` or `")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::types::type_text;
    use super::*;
    use crate::mesh::AtomSet;

    #[test]
    fn types_read_back() {
        let mesh = Mesh::new(&[("dp", 2), ("cp", 3), ("tp", 4)]).unwrap();
        let texts = [
            "f32[]",
            "bf16[4,16@dp*tp,0]",
            "i32[3@tp]~dp+cp",
            "f32[4]!dp*cp max:tp",
            "f16[7] min:dp*tp",
        ];
        for t in texts {
            assert_eq!(type_text(&mesh, &parse_type(&mesh, t).unwrap()), t);
        }
        let sum = parse_type(&mesh, "f32[2]+cp").unwrap();
        assert_eq!((sum.sum, sum.marked()), (mesh.axis("cp").unwrap(), mesh.axis("cp").unwrap()));
        assert_eq!(parse_type(&mesh, "f32[2]").unwrap().marked(), AtomSet::EMPTY);
        assert!(parse_type(&mesh, "f32[2]+cp+tp").is_err());
    }
}
