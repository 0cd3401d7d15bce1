//! Compiled kernels over rows: functions of a shared object, by name.

use libloading::Library;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Kernel, Program};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Memory of the operands, parameters, first task, one past the last.
pub(crate) type Entry = unsafe extern "C" fn(*const *mut f32, *const f32, i64, i64);

/// The kernels of a shared object.
pub struct Native {
    entries: HashMap<Arc<str>, Entry>,
    /// The entries are its code.
    _library: Library,
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
    /// `c-compiler` if the object cannot be loaded or lacks one of them.
    pub fn load<'a>(path: &Path, programs: impl Iterator<Item = &'a Program>) -> Result<Native> {
        let bad = |e: libloading::Error| {
            Diag::new(
                "c-compiler",
                format!(
                    "the compiled kernels {} do not load: {}",
                    path.display(),
                    std::error::Error::source(&e).map_or(e.to_string(), |cause| cause.to_string())
                ),
            )
            .rule("an object is kept for the processor and the compiler that made it")
            .help("remove that 1 file and run again: it is compiled anew")
        };
        // SAFETY: the object was made of our text, and nobody but this user or root can have written it
        // since (`shardc_codegen::c::compile` opens and checks it); it runs nothing when it is loaded.
        let library = unsafe { Library::new(path) }.map_err(bad)?;
        let mut entries = HashMap::new();
        for k in programs.flatten().flatten().flat_map(Kernel::rows) {
            if !entries.contains_key(&k.symbol) {
                // SAFETY: a name is the hash of a kernel's text, whose function has this type.
                let entry = unsafe { library.get::<Entry>(k.symbol.as_bytes()) }.map_err(bad)?;
                entries.insert(k.symbol.clone(), *entry);
            }
        }
        Ok(Native { entries, _library: library })
    }

    /// The function of a kernel.
    pub(crate) fn get(&self, symbol: &str) -> Option<Entry> {
        self.entries.get(symbol).copied()
    }
}
