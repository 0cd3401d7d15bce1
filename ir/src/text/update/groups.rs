//! Groups of parameters in the text of a model: lines `group "hidden=muon,lr=2e-4"`, before the rules that they name.

use crate::diag::Diag;

/// The groups that lines name, in their order.
///
/// # Errors
/// `syntax` for a line that begins with `group` and is none.
pub fn groups_of(updates: &str) -> Result<Vec<&str>, Diag> {
    let read = |line| {
        group(line).ok_or_else(|| {
            Diag::new("syntax", "a group of parameters is not understood")
                .at(format!("`{line}`"))
                .rule("group \"GLOB[+GLOB…]=RULE[,ATTRIBUTE=VALUE…]\"")
                .help("for example group \"hidden=muon,lr=2e-4\", as --optim has it")
        })
    };
    updates.lines().filter(|l| is_group(l)).map(read).collect()
}

/// The rules alone, on the lines on which they were.
pub fn without_groups(updates: &str) -> String {
    updates.lines().map(|l| if is_group(l) { "\n".into() } else { format!("{l}\n") }).collect()
}

fn is_group(line: &str) -> bool {
    line.starts_with("group ")
}

/// What stands in the quotes of such a line.
fn group(line: &str) -> Option<&str> {
    let (text, behind) = line.strip_prefix("group \"")?.split_once('"')?;
    let behind = behind.trim();
    (behind.is_empty() || behind.starts_with("//")).then_some(text)
}
