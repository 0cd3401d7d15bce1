//! Code on the device: compiled texts, loaded once per device, and launches of their entry points.

use super::device::{Called, Device, Stream};
use cudarc::driver::{result, sys};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::launch::{Launch, Source, Word};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

/// Compiled texts, for one architecture: ELF files of the device all of whose parts lie inside them.
pub type Code = BTreeMap<Arc<Source>, Vec<u8>>;

/// Addresses of what a rank has beside its arena.
#[derive(Clone, Copy, Default)]
pub(super) struct Own {
    pub status: u64,
    pub scratch: u64,
}

/// A loaded text.
struct Module {
    module: sys::CUmodule,
    /// Entry points, with the bytes of shared memory that their launches may ask for.
    functions: BTreeMap<String, (sys::CUfunction, u32)>,
}

/// All texts of a program on a device, shared by its ranks there; each is loaded when it is first
/// launched.
pub struct Modules {
    device: Arc<Device>,
    code: Code,
    loaded: Mutex<BTreeMap<Arc<Source>, Module>>,
}

// SAFETY: handles of modules and functions may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Modules {}

impl Modules {
    pub fn new(device: &Arc<Device>, code: Code) -> Arc<Modules> {
        Arc::new(Modules { device: device.clone(), code, loaded: Mutex::default() })
    }

    /// The entry point of a launch.
    fn function(&self, l: &Launch) -> Result<sys::CUfunction> {
        let (source, entry) = (&l.source, &*l.entry);
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.contains_key(source) {
            let code = self.code.get(source).ok_or_else(|| {
                Diag::new("plan", format!("no code of {} for this device", source.file))
            })?;
            // SAFETY: an ELF file, which says itself where it ends: whoever has made this table has
            // checked that all it names lies inside it.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
            let module = module.called(&format!("cuModuleLoadData of {}", source.file))?;
            loaded.insert(source.clone(), Module { module, functions: BTreeMap::new() });
        }
        let m = loaded.get_mut(source).expect("loaded above");
        let (f, given) = match m.functions.get(entry) {
            Some(&known) => known,
            None => {
                let name = CString::new(entry).expect("names of entry points have no zero bytes");
                // SAFETY: the module is loaded.
                let f = unsafe { result::module::get_function(m.module, name) };
                (f.called(&format!("cuModuleGetFunction {entry} of {}", source.file))?, 0)
            }
        };
        if l.shared > given {
            use sys::CUfunction_attribute_enum as Is;
            let most = Is::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(f, most, l.shared as i32) }
                .called("cuFuncSetAttribute")?;
        }
        m.functions.insert(entry.to_string(), (f, given.max(l.shared)));
        Ok(f)
    }

    /// Queues a launch on the memory of operands.
    ///
    /// # Safety
    /// `memory` and a rank's `own` are valid for what the entry point does with them until it is done.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        l: &Launch,
        memory: &[u64],
        own: &Own,
    ) -> Result<()> {
        self.device.bind()?;
        let f = self.function(l)?;
        let words = l.words.iter().map(|w| match *w {
            Word::Address { operand, byte } => memory[operand] + byte as u64,
            Word::Status => own.status,
            Word::Scratch => own.scratch,
            Word::Int(x) => x as u64,
            Word::Float(x) => x.to_bits(),
        });
        let mut words: Vec<u64> = words.collect();
        let mut bytes = words.len() * 8;
        // A list of names and values: all parameters in one buffer, its size, the end.
        let mut buffer: [*mut std::ffi::c_void; 5] = [
            sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut _,
            words.as_mut_ptr().cast(),
            sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut _,
            (&raw mut bytes).cast(),
            std::ptr::null_mut(),
        ];
        let [x, y, z] = l.grid;
        // SAFETY: the function is loaded; the driver copies parameters before it returns; the rest
        // is by the caller.
        unsafe {
            let (none, extra) = (std::ptr::null_mut(), buffer.as_mut_ptr());
            sys::cuLaunchKernel(f, x, y, z, l.threads, 1, 1, l.shared, stream.stream, none, extra)
                .result()
                .called(&format!("cuLaunchKernel {} of {}", l.entry, l.source.file))
        }
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for m in loaded.values() {
            // SAFETY: loaded by `function`; ranks hold this table while their work runs.
            let _ = unsafe { result::module::unload(m.module) };
        }
    }
}
