//! Reads the mesh of a text, and where its axes are cut into atoms.

use super::cursor::{Cursor, Fail, Res};
use super::parse::Parser;
use crate::attr::read_sub_axis;
use crate::mesh::{MAX_ATOMS, Mesh};

impl Parser<'_> {
    pub fn mesh(&mut self) -> Res<()> {
        self.c.spaces();
        let at = self.c.at;
        self.c.must("[")?;
        let mut axes = vec![];
        self.list("]", |p| {
            let name = p.c.word();
            p.c.spaces();
            p.c.must("=")?;
            p.c.spaces();
            let start = p.c.at;
            axes.push((name, p.number(usize::MAX)?));
            if axes.len() > 2 * MAX_ATOMS {
                let m = format!("more than {} axes", 2 * MAX_ATOMS);
                let help = format!("use at most {MAX_ATOMS} axes");
                return Err(Fail::new("mesh", start, 1, m).help(help));
            }
            Ok(())
        })?;
        self.mesh = Mesh::new(&axes).map_err(|d| Fail::of(d, at, self.c.at - at))?;
        Ok(())
    }

    /// Cuts axes into the atoms that the whole text names, before any type is read.
    pub fn cuts(&mut self) -> Res<()> {
        if self.mesh.axes.is_empty() {
            return Ok(());
        }
        let mut cuts: Vec<(usize, usize, usize)> = vec![];
        let b = self.c.text.as_bytes();
        let mut at = self.c.at;
        let special = |c: &u8| matches!(c, b'(' | b'"' | b'/');
        while let Some(n) = b[at..].iter().position(special) {
            at += n;
            let mut c = Cursor { text: self.c.text, at };
            match b[at] {
                b'"' => at = c.quoted().map_or(at + 1, |_| c.at),
                b'/' if b.get(at + 1) == Some(&b'/') => at += c.line().len(),
                b'(' if at > 0 && b[at - 1] == b':' => {
                    let word = |c: &&u8| c.is_ascii_alphanumeric() || **c == b'_';
                    let start = at - 1 - b[..at - 1].iter().rev().take_while(word).count();
                    let name = &b[start..at - 1];
                    let axis = self.mesh.axes.iter().position(|a| a.name.as_bytes() == name);
                    c.at += 1;
                    c.digits();
                    c.eat(")");
                    c.digits();
                    // What is not a part of an axis is an error where it stands.
                    let sub = read_sub_axis(&self.c.text[at..c.at]).ok();
                    if let (Some(axis), Some((pre, size))) = (axis, sub) {
                        cuts.push((axis, pre, start));
                        cuts.extend(pre.checked_mul(size).map(|end| (axis, end, start)));
                    }
                    at = c.at;
                }
                _ => at += 1,
            }
        }
        cuts.sort_unstable();
        cuts.dedup_by_key(|c| (c.0, c.1));
        for (axis, pre, at) in cuts {
            self.mesh.cut(axis, pre).map_err(|d| Fail::of(d, at, 1))?;
        }
        Ok(())
    }
}
