//! What a job knows and others do not, from where a launcher hands it on.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::trust;
use shardc_runtime::control::{LEAST, Secret};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

/// The secret itself.
pub const SECRET: &str = "SHARDC_SECRET";
/// A file that has it, of mode 0600.
pub const FILE: &str = "SHARDC_SECRET_FILE";
/// Most bytes of such a file.
const MOST: u64 = 4096;

/// What a secret makes: of a job whose variables have none, nothing.
///
/// # Errors
/// Those of [`of`].
pub fn derived(var: impl Fn(&str) -> Option<OsString>) -> Result<Option<String>> {
    Ok(text(var)?.map(|text| blake3::hash(&text).to_hex().to_string()))
}

/// The secret of a job that is not started by MPI; none if no variable has one. Both are bytes, which need not
/// be UTF-8: what is there is never taken for nothing.
///
/// # Errors
/// `no-secret` if it is short, `trust` if other users can change its file.
pub fn of(var: impl Fn(&str) -> Option<OsString>) -> Result<Secret> {
    Ok(text(var)?.map_or_else(Secret::none, |text| Secret::of(&text)))
}

fn text(var: impl Fn(&str) -> Option<OsString>) -> Result<Option<Vec<u8>>> {
    let (name, text) = match (var(SECRET), var(FILE)) {
        (Some(text), _) => (SECRET, text.into_vec()),
        (None, Some(file)) => (FILE, trust::read_secret(Path::new(&file), MOST)?),
        (None, None) => return Ok(None),
    };
    let text = text.trim_ascii();
    if text.len() < LEAST {
        let n = text.len();
        return Err(Diag::new("no-secret", format!("the secret of {name} has {n} bytes"))
            .rule(format!("a secret has {LEAST} random bytes or more"))
            .help(format!(
                "export {SECRET}=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
            )));
    }
    Ok(Some(text.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_or_refused() {
        let of = |vars: &[(&str, &str)]| {
            of(|name| vars.iter().find(|v| v.0 == name).map(|v| v.1.into()))
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

    #[test]
    fn a_secret_that_is_no_utf8_is_not_taken_for_none() {
        let of = |name: &'static str, bytes: &[u8]| {
            of(|n| (n == name).then(|| OsString::from_vec(bytes.to_vec())))
        };
        assert!(of(SECRET, &[0xff; LEAST]).expect("16 bytes").is_secret());
        assert!(of(SECRET, &[0xff; LEAST - 1]).is_err());
        assert!(of(FILE, b"/nowhere/\xff").is_err(), "a name of a file that is not there");
    }
}
