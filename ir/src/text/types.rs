//! Types, annotations, numbers and strings as text.

use crate::func::Annotation;
use crate::mesh::{AtomSet, Mesh};
use crate::types::Type;

/// A type as text, for example `f32[4,16@tp]+dp`.
///
/// ```
/// # use shardc_ir::{mesh::Mesh, text, types::Type};
/// let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]).unwrap();
/// let mut t = Type::f32(&[4, 16]);
/// t.sum = mesh.all();
/// assert_eq!(text::type_text(&mesh, &t), "f32[4,16]+dp*tp");
/// ```
pub fn type_text(mesh: &Mesh, ty: &Type) -> String {
    let mut out = String::new();
    write_type(mesh, ty, &mut out);
    out
}

/// Appends a type: element type, dims with the atoms that split them, then the sets that are not
/// empty, in the order `~` replicated, `!` varying, `+` sum, `max:`, `min:`.
pub fn write_type(mesh: &Mesh, ty: &Type, out: &mut String) {
    out.push_str(ty.dtype.name());
    out.push('[');
    for (i, d) in ty.dims.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        push_number(d.size, out);
        if !d.atoms.is_empty() {
            out.push_str(if d.atoms.is_turned() { "@-" } else { "@" });
            mesh.write_atoms(d.atoms.iter(), "*", out);
        }
    }
    out.push(']');
    let mut mark = |sign: &str, s: AtomSet| {
        if !s.is_empty() {
            out.push_str(sign);
            mesh.write_atoms(s.iter(), "*", out);
        }
    };
    mark("~", ty.replicated);
    mark("!", ty.varying);
    mark("+", ty.sum);
    mark(" max:", ty.max);
    mark(" min:", ty.min);
}

/// What is asked of a sharding as text, for example `(dp,?,-,tp?)p1`.
pub fn annotation_text(mesh: &Mesh, a: &Annotation) -> String {
    let mut out = String::new();
    write_annotation(mesh, a, &mut out);
    out.trim_start_matches([' ', '@']).into()
}

/// Appends ` @(dp,?,-,tp?)p1`: per dim its atoms, `?` if it may be split further, `-` if it is
/// whole; priority 0 is not written.
pub(super) fn write_annotation(mesh: &Mesh, a: &Annotation, out: &mut String) {
    out.push_str(" @(");
    for (i, d) in a.dims.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        mesh.write_atoms(d.atoms.iter(), "*", out);
        if d.open {
            out.push('?');
        } else if d.atoms.is_empty() {
            out.push('-');
        }
    }
    out.push(')');
    if a.priority > 0 {
        out.push('p');
        push_number(a.priority as usize, out);
    }
}

/// Appends a number; faster than the formatting machinery, which is what most of printing is.
pub(crate) fn push_number(n: usize, out: &mut String) {
    if n > 9 {
        push_number(n / 10, out);
    }
    out.push(char::from(b'0' + (n % 10) as u8));
}

/// A name as the text has it, in quotes.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::new();
    write_quoted(text, &mut out);
    out
}

/// Appends a string in quotes; `\`, `"` and control characters are escaped.
pub(super) fn write_quoted(text: &str, out: &mut String) {
    out.push('"');
    // All bytes are looked at, several at once.
    let plain = |b: u8| (b' '..0x7f).contains(&b) & (b != b'"') & (b != b'\\');
    if text.bytes().fold(true, |all, b| all & plain(b)) {
        out.push_str(text);
    } else {
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                c if c.is_control() => out.extend(c.escape_unicode()),
                c => out.push(c),
            }
        }
    }
    out.push('"');
}
