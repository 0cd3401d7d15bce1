//! What a job knows and others do not, from where a launcher hands it on.

use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::files::trust;
use shardc_runtime::control::{LEAST, Secret};
use std::path::Path;

/// The secret itself.
pub const SECRET: &str = "SHARDC_SECRET";
/// A file that has it, of mode 0600.
pub const FILE: &str = "SHARDC_SECRET_FILE";
/// Most bytes of such a file.
const MOST: u64 = 4096;

/// The secret of a job that is not started by MPI; none if no variable has one.
///
/// # Errors
/// `no-secret` if it is short, `file` if its file is not this user's alone.
pub fn of(var: impl Fn(&str) -> Option<String>) -> Result<Secret> {
    let (name, text) = match (var(SECRET), var(FILE)) {
        (Some(text), _) => (SECRET, text.into_bytes()),
        (None, Some(file)) => (FILE, trust::read_secret(Path::new(&file), MOST)?),
        (None, None) => return Ok(Secret::none()),
    };
    let text = text.trim_ascii();
    if text.len() < LEAST {
        let n = text.len();
        return Err(Diag::new("no-secret", format!("the secret of {name} has {n} bytes"))
            .rule(format!("a secret has {LEAST} random bytes or more"))
            .help(format!(
                "export {SECRET}=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
            ))
            .exit(Exit::Environment));
    }
    Ok(Secret::of(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_or_refused() {
        let of = |vars: &[(&str, &str)]| {
            of(|name| vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string()))
        };
        assert!(!of(&[]).expect("none").is_secret());
        assert!(of(&[(SECRET, "0123456789abcdef\n")]).expect("one").is_secret());
        for short in ["", "0123456789abcde", "               \n      "] {
            let d = of(&[(SECRET, short)]).err().expect("refused").render();
            assert!(d.contains("error[no-secret]") && d.contains(SECRET), "{d}");
        }
        let d = of(&[(FILE, "/nowhere/at/all")]).err().expect("refused").render();
        assert!(d.contains("/nowhere/at/all"), "{d}");
    }
}
