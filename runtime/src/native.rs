//! Compiled kernels over rows: functions of shared objects, by name.

use libloading::Library;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Kernel, Program};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Memory of the operands, parameters, first task, one past the last.
pub(crate) type Entry = unsafe extern "C" fn(*const *mut f32, *const f32, i64, i64);

/// The kernels of shared objects.
pub struct Native {
    entries: HashMap<Arc<str>, Entry>,
    /// The entries are their code.
    _libraries: Vec<Library>,
}

impl std::fmt::Debug for Native {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} compiled kernels", self.entries.len())
    }
}

impl Native {
    /// Loads the kernels that programs name.
    ///
    /// # Errors
    /// `c-compiler` if an object cannot be loaded, or none has one of them.
    pub fn load<'a>(
        objects: &[PathBuf],
        programs: impl Iterator<Item = &'a Program>,
    ) -> Result<Native> {
        let bad = |path: &Path, why: &dyn std::fmt::Display| {
            let what = format!("the compiled kernels {} do not load: {why}", path.display());
            Diag::new("c-compiler", what)
                .rule("an object is kept for the processor and the compiler that made it")
                .help("remove that 1 file and run again: it is compiled anew")
        };
        let open = |path: &PathBuf| {
            // SAFETY: the object was made of our text, and nobody but this user or root can have written it
            // since (`shardc_codegen::c::compile` opens and checks it); it runs nothing when it is loaded.
            let library = unsafe { Library::new(path) };
            library.map_err(|e| match std::error::Error::source(&e) {
                Some(cause) => bad(path, cause),
                None => bad(path, &e),
            })
        };
        let libraries: Vec<Library> = objects.iter().map(open).collect::<Result<_>>()?;
        let mut entries = HashMap::new();
        for k in programs.flatten().flatten().flat_map(Kernel::rows) {
            if !entries.contains_key(&k.symbol) {
                let symbol = k.symbol.as_bytes();
                // SAFETY: a name is the hash of a kernel's text, whose function has this type.
                let get = |l: &Library| unsafe { l.get::<Entry>(symbol) }.ok().map(|e| *e);
                let last = objects.last().map_or(Path::new(""), PathBuf::as_path);
                let none = || bad(last, &format_args!("no {}", k.symbol));
                entries.insert(k.symbol.clone(), libraries.iter().find_map(get).ok_or_else(none)?);
            }
        }
        Ok(Native { entries, _libraries: libraries })
    }

    /// The function of a kernel.
    pub(crate) fn get(&self, symbol: &str) -> Option<Entry> {
        self.entries.get(symbol).copied()
    }
}
