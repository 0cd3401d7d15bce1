//! What may be believed because nobody else can have written it, or read it, as ssh judges its own files
//! (`StrictModes`): the owner is this user or root, and neither group nor others may write; but for a group
//! that has nobody but this user, as systems make one for each user and let it write (umask 002).

use super::{io_error, plain};
use crate::diag::{Diag, Result};
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Permissions that make something no longer our own: others may write it.
pub const WRITABLE: u32 = 0o022;
/// Permissions that make something no longer a secret.
pub const READABLE: u32 = 0o077;

/// Refuses what is not this user's or root's, or gives group or others one of the permissions `not`.
/// `what` it is, for the message.
///
/// # Errors
/// `trust`, with owner and mode.
pub fn check(what: &str, path: &Path, meta: &Metadata, not: u32) -> Result<()> {
    let (own, mode) = (rustix::process::geteuid().as_raw(), meta.mode() & 0o7777);
    let refuse = |why: String, help: String| {
        Err(Diag::new("trust", format!("{what} can be changed by other users: {why}"))
            .at(path.display().to_string())
            .rule("it is trusted only if nobody else can have changed it")
            .help(help))
    };
    if ![own, 0].contains(&meta.uid()) {
        let us = if own == 0 { "root".to_string() } else { format!("user {own} or root") };
        let why = format!("its owner is user {}, not {us}", meta.uid());
        return refuse(why, format!("use one created by user {own}"));
    }
    let groups = || super::read_text(Path::new("/etc/group"), 1 << 20).unwrap_or_default();
    let alone = not == WRITABLE && mode & 0o020 != 0 && is_private(meta.gid(), own, &groups());
    let not = if alone { not & !0o020 } else { not };
    match mode & not {
        0 => Ok(()),
        _ => {
            let way = if not == READABLE { "go-rwx" } else { "go-w" };
            refuse(format!("its mode is {mode:04o}"), format!("chmod {way} {}", path.display()))
        }
    }
}

/// Whether a group is the user's own and has no other member, by the lines `name:x:gid:members` of the
/// system: its number is the user's, and nobody is listed but who it is named after. Root's is not.
fn is_private(gid: u32, user: u32, groups: &str) -> bool {
    let rows = groups.lines().map(|l| l.split(':').collect::<Vec<_>>());
    let own: Vec<_> = rows.filter(|r| r.get(2).is_some_and(|g| *g == gid.to_string())).collect();
    let [row] = &own[..] else { return false };
    let members = row.get(3).copied().unwrap_or_default();
    user != 0 && gid == user && (members.is_empty() || members == row[0])
}

/// All of a small file that holds a secret: a plain file of this user's that nobody else may read; no link.
///
/// # Errors
/// `file`.
pub fn read_secret(path: &Path, most: u64) -> Result<Vec<u8>> {
    let unreadable = |e: std::io::Error| io_error("cannot read the file", path, &e);
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(unreadable)?;
    read_checked(file, "the file of a secret", path, READABLE, most)
}

/// Reads a file that is open, once its descriptor was found to be a plain file of at most `most` bytes,
/// which is ours ([`check`]).
///
/// # Errors
/// `file`.
pub fn read_checked(file: File, what: &str, path: &Path, not: u32, most: u64) -> Result<Vec<u8>> {
    let unreadable = |e: std::io::Error| io_error("cannot read the file", path, &e);
    let meta = file.metadata().map_err(unreadable)?;
    plain(path, &meta)?;
    check(what, path, &meta, not)?;
    let mut out = vec![];
    file.take(most.saturating_add(1)).read_to_end(&mut out).map_err(unreadable)?;
    if out.len() as u64 > most {
        return Err(Diag::new("file", format!("{what} has more than {most} bytes"))
            .at(path.display().to_string())
            .help("check that this is the file you mean"));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_group_of_one_user_is_private() {
        let groups = "root:x:0:\nann:x:1000:\nbob:x:1001:bob\ncat:x:1002:cat,bob\nall:x:100:\n";
        for (gid, user, private) in [
            (1000, 1000, true),
            (1001, 1001, true),
            (1002, 1002, false),
            (100, 1000, false),
            (1001, 1000, false),
            (1003, 1003, false),
            (0, 0, false),
        ] {
            assert_eq!(is_private(gid, user, groups), private, "{gid} of {user}");
        }
        assert!(!is_private(1000, 1000, "ann:x:1000:\nbob:x:1000:\n"), "two names of one number");
    }

    #[test]
    fn a_secret_is_read_from_a_file_that_nobody_else_reads() {
        let dir = std::env::temp_dir().join(format!("shardc-trust-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        let (file, link) = (dir.join("secret"), dir.join("link"));
        fs::write(&file, "sixteen bytes ..").expect("a file");
        let mode = |m: u32| fs::set_permissions(&file, Permissions::from_mode(m)).expect("a mode");
        for (m, read) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            mode(m);
            let got = read_secret(&file, 100);
            assert_eq!(got.is_ok(), read, "{m:o}: {got:?}");
            if let Err(d) = got {
                let said = d.render();
                assert!(
                    said.contains(&format!("{m:04o}")) && said.contains("chmod go-rwx"),
                    "{said}"
                );
            }
        }
        mode(0o600);
        assert!(read_secret(&file, 15).is_err(), "longer than it may be");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        assert!(read_secret(&link, 100).is_err(), "a link");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
