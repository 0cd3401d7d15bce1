//! Compiled kernels over rows: functions of shared objects, by name.

use libloading::Library;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Kernel, Program};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Memory of the operands, parameters, first task, one past the last.
pub(crate) type NativeEntry = unsafe extern "C" fn(*const *mut f32, *const f32, i64, i64);

/// The kernels of shared objects.
pub struct Native {
    entries: HashMap<Arc<str>, NativeEntry>,
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
        let bad = |why: &dyn std::fmt::Display| {
            Diag::new("c-compiler", format!("the compiled kernels do not load: {why}"))
                .rule("kernels are kept for the processor and the compiler that made them")
                .help("remove the folder of compiled kernels (SHARDC_CACHE, else ~/.cache/shardc): they are compiled anew")
        };
        let open = |path: &PathBuf| {
            // SAFETY: the object was made of our text, and nobody but this user or root can have written it
            // since (`shardc_codegen::c::compile` opens and checks it); it runs nothing when it is loaded.
            let library = unsafe { Library::new(path) };
            library.map_err(|e| match std::error::Error::source(&e) {
                Some(cause) => bad(cause),
                None => bad(&e),
            })
        };
        let libraries: Vec<Library> = objects.iter().map(open).collect::<Result<_>>()?;
        let mut entries = HashMap::new();
        for k in programs.flatten().flatten().flat_map(Kernel::rows) {
            if !entries.contains_key(&k.symbol) {
                let symbol = k.symbol.as_bytes();
                // SAFETY: a name is the hash of a kernel's text, whose function has this type.
                let get = |l: &Library| unsafe { l.get::<NativeEntry>(symbol) }.ok().map(|e| *e);
                let none = || bad(&format_args!("no object has {}", k.symbol));
                entries.insert(k.symbol.clone(), libraries.iter().find_map(get).ok_or_else(none)?);
            }
        }
        Ok(Native { entries, _libraries: libraries })
    }

    /// The function of a kernel.
    pub(crate) fn get(&self, symbol: &str) -> Option<NativeEntry> {
        self.entries.get(symbol).copied()
    }
}
