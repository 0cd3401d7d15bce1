//! Models by their names: snapshots of Hugging Face's cache.

use crate::lab::*;
use serde_json::json;
use std::process::{Command, Output};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn shardc(lab: &Lab, vars: &[(&str, &str)], args: &[&str]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    for name in ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"] {
        c.env_remove(name);
    }
    c.env("HOME", lab.path("home")).envs(vars.iter().copied());
    c.current_dir(&lab.0).args(args).output().expect("shardc starts")
}

#[test]
fn a_name_is_a_snapshot_of_the_cache() {
    let lab = Lab::new("hub");
    let made = lab.config("llama_mha", json!({}));
    let dir = format!("models--acme--tiny-1.5/snapshots/{COMMIT}");
    for root in ["cache", "hf/hub", "home/.cache/huggingface/hub"] {
        let config = std::fs::read(lab.path(&made)).expect("a config");
        lab.write(&format!("{root}/{dir}/config.json"), config);
        lab.write(&format!("{root}/models--acme--tiny-1.5/refs/main"), COMMIT);
        lab.write(&format!("{root}/models--acme--evil/refs/main"), "../../models--acme--tiny-1.5");
    }
    let flags = ["--seq", "16", "--mesh", "tp=2"];
    let check = |vars: &[(&str, &str)], name: &str| {
        let out = shardc(&lab, vars, &[&["check", name][..], &flags].concat());
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    for vars in [&[("HF_HUB_CACHE", "cache")][..], &[("HF_HOME", "hf")], &[]] {
        assert_eq!(check(vars, "acme/tiny-1.5").0, Some(0), "{vars:?}");
        assert_eq!(check(vars, &format!("acme/tiny-1.5@{COMMIT}")).0, Some(0), "{vars:?}");
    }
    lab.write("job.toml", "model = \"acme/tiny-1.5\"\nseq = 16\n");
    assert_eq!(check(&[], "job.toml").0, Some(0));
    for (name, line) in [
        ("acme/other", "hf download acme/other"),
        ("acme/tiny-1.5@v2", "hf download acme/tiny-1.5 --revision v2"),
        ("acme/evil", "hf download acme/evil"),
    ] {
        let (status, said) = check(&[("HF_HUB_CACHE", "cache")], name);
        assert!(said.contains("error[not-cached]") && said.contains(line), "{said}");
        assert_eq!(status, Some(2), "{said}");
    }
    // A folder of this name comes first, and what is not a name stays a path.
    lab.write("acme/tiny-1.5/config.json", "{}");
    assert_ne!(check(&[("HF_HUB_CACHE", "cache")], "acme/tiny-1.5").0, Some(0));
    for path in ["acme/none/deeper", "acme/none.ir", "./acme"] {
        assert!(!check(&[], path).1.contains("not-cached"), "{path}");
    }
}
