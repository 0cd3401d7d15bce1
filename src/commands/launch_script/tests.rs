//! Limits of time, words of a shell, and the secret of a job.

use super::{SECRET, before_end, seconds, time_limit};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[test]
fn limits_of_time_are_read_as_slurm_reads_them() {
    let all = [("90", 5400), ("1:30", 90), ("2:00:05", 7205), ("1-2", 93_600), ("1-0:1", 86_460)];
    for (text, want) in all {
        assert_eq!(seconds(&time_limit(text).expect("a limit")), want, "{text}");
    }
    assert!(time_limit("soon").is_err());
    for (limit, want) in [("1", 1), ("0:30", 1), ("2", 30), ("5", 120), ("90", 120), ("0", 120)] {
        assert_eq!(before_end(Some(limit)), want, "{limit}");
    }
    assert_eq!(before_end(None), 120);
}

#[test]
fn words_of_a_next_command_are_paths() {
    for (path, want) in [
        ("tiny.plan", "tiny.plan"),
        ("--force", "./--force"),
        ("my plan", "'my plan'"),
        ("-o; rm", "'./-o; rm'"),
    ] {
        assert_eq!(shardc_process::shell::word(Path::new(path)), want);
    }
}

/// What a shell reads is the name, and each is on one line, whatever ends lines there.
#[test]
fn names_are_read_as_they_are() {
    for name in ["plain", "it's", "a\nb: c", "tab\t'\\n\u{2028}z", "\u{7f}\u{85}x \"$y\""] {
        let quoted = shardc_process::shell::quoted(name);
        assert!(!quoted.contains(['\n', '\u{85}', '\u{2028}']), "{quoted}");
        let said = Command::new("bash").args(["-c", &format!("printf %s {quoted}")]).output();
        assert_eq!(String::from_utf8(said.expect("bash").stdout).expect("words"), name);
    }
}

/// A folder of a test's own, with a folder `bin` that has what stands for `ln`, if that is another.
fn folder(name: &str, ln: Option<&str>) -> PathBuf {
    let name = format!("shardc-secret-{name}-{}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("bin")).expect("a folder");
    if let Some(text) = ln {
        let file = dir.join("bin/ln");
        std::fs::write(&file, format!("#!/bin/bash\n{text}\n")).expect("a file");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).expect("its mode");
    }
    dir
}

/// What runs the lines about the secret, as a script does, and prints what ranks would read.
fn lines(dir: &Path) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut c = Command::new("bash");
    c.args(["-c", &format!("set -euo pipefail\n{SECRET}cat \"$SHARDC_SECRET_FILE\"")]);
    c.current_dir(dir).env_remove("SHARDC_SECRET_FILE");
    c.env("PATH", format!("{}:{path}", dir.join("bin").display()));
    c
}

fn text(o: &Output) -> String {
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    String::from_utf8_lossy(&o.stdout).into_owned()
}

/// One secret for all that start at once, where links may be made, where they may not (`mv -n` has the
/// file then), and where another host is between the two; nothing else is left.
#[test]
fn all_hosts_have_one_secret() {
    let another = "t=$(mktemp -p bin); printf %064d 7 > $t; mv -n $t .shardc-secret; exit 1";
    for (name, ln) in [("links", None), ("none", Some("exit 1")), ("late", Some(another))] {
        let dir = folder(name, ln);
        let all: Vec<_> =
            (0..8).map(|_| lines(&dir).stdout(std::process::Stdio::piped()).spawn()).collect();
        let ended = all.into_iter().map(|c| c.and_then(|c| c.wait_with_output()));
        let seen: Vec<String> = ended.map(|o| text(&o.expect("bash"))).collect();
        let own = std::fs::read_to_string(dir.join(".shardc-secret")).expect("a secret");
        let hex = own.len() == 64 && own.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(hex && seen.iter().all(|s| *s == own), "{name}: {own} {seen:?}");
        assert_eq!(own.ends_with("00007"), name == "late", "{name}: {own}");
        let meta = std::fs::metadata(dir.join(".shardc-secret")).expect("a secret");
        assert_eq!(meta.permissions().mode() & 0o777, 0o600, "{name}");
        let names = std::fs::read_dir(&dir).expect("a folder").flatten();
        assert_eq!(names.count(), 2, "{name}: something is left in {dir:?}");
        // Whoever comes later has the same.
        assert_eq!(text(&lines(&dir).output().expect("bash")), own, "{name}");
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}

/// Where none can be made, the script ends before anything is started.
#[test]
fn no_secret_no_job() {
    let dir = folder("nowhere", None);
    let mut c = lines(&dir);
    let o = c.env("SHARDC_SECRET_FILE", dir.join("none/secret")).output().expect("bash");
    assert!(!o.status.success() && o.stdout.is_empty(), "{o:?}");
    std::fs::remove_dir_all(&dir).expect("removed");
}
