//! Runs the binary in a folder of its own, with what is wrong written into it.

use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

pub const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// A folder of one test, empty at first.
pub struct Lab(pub PathBuf);

impl Lab {
    /// Makes the folder; a name belongs to one test, because tests run at the same time.
    pub fn new(name: &str) -> Lab {
        static TAKEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(taken.insert(name.into()), "two tests use the folder {name}");
        drop(taken);
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("lab").join(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a folder for the test");
        Lab(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("in the lab")).expect("a folder");
        std::fs::write(&path, bytes).expect("a file");
        path
    }

    pub fn shardc(&self, args: &[&str]) -> Output {
        let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
        c.current_dir(&self.0).args(args).output().expect("shardc starts")
    }

    pub fn ok(&self, args: &[&str]) -> Output {
        let out = self.shardc(args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        out
    }

    /// Runs a command that must fail so; the folder is as before. Returns what it said.
    pub fn refuses(&self, args: &[&str], status: i32, code: &str) -> String {
        let before = self.names();
        let out = self.shardc(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(&format!("error[{code}]: ")), "{args:?}: no error[{code}]: {said}");
        assert!(said.contains("= help: "), "{args:?}: no help: {said}");
        assert_eq!(self.names(), before, "{args:?} left something behind");
        said
    }

    /// Runs a command with a value that a flag does not take; the folder is as before. Returns what it said.
    pub fn misuses(&self, args: &[&str], flag: &str) -> String {
        let before = self.names();
        let out = self.shardc(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        let named = said.contains("error: invalid value '") && said.contains(&format!("'{flag} <"));
        assert!(named, "{args:?}: {said}");
        assert_eq!(self.names(), before, "{args:?} left something behind");
        said
    }

    pub fn names(&self) -> Vec<PathBuf> {
        let mut out = vec![];
        let mut open = vec![self.0.clone()];
        while let Some(d) = open.pop() {
            for e in std::fs::read_dir(d).expect("a folder").map(|e| e.expect("an entry")) {
                out.push(e.path());
                if e.path().is_dir() {
                    open.push(e.path());
                }
            }
        }
        out.sort();
        out
    }

    /// A copy of a fixture; its path.
    pub fn model(&self, fixture: &str) -> String {
        for e in std::fs::read_dir(Path::new(FIXTURES).join(fixture)).expect("the fixture") {
            let from = e.expect("an entry").path();
            let name = from.file_name().expect("a name").to_string_lossy().into_owned();
            self.write(&format!("{fixture}/{name}"), std::fs::read(&from).expect("a file"));
        }
        fixture.to_string()
    }

    /// A config without weights, with some keys changed; its path.
    pub fn config(&self, fixture: &str, change: Json) -> String {
        let text = std::fs::read(Path::new(FIXTURES).join(fixture).join("config.json"));
        let mut c: Json = serde_json::from_slice(&text.expect("the fixture")).expect("JSON");
        for (k, v) in change.as_object().expect("an object") {
            c[k] = v.clone();
        }
        self.write("config.json", c.to_string());
        "config.json".into()
    }
}

/// `compile MODEL --seq 16 -o out` and more.
pub fn compile<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let seq: &[&str] = if more.contains(&"--seq") { &[] } else { &["--seq", "16"] };
    [&["compile", model, "-o", "out"][..], more, seq].concat()
}
