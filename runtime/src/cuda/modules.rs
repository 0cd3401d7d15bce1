//! Code on the device: compiled texts, loaded once per device, and launches of their entry points.

use super::device::{Called, Device, Stream};
use cudarc::driver::{result, sys};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::launch::{DeviceLaunch, KernelSource, Word};
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

/// Compiled texts, for one architecture: ELF files of the device all of whose parts lie inside them.
pub type Code = BTreeMap<Arc<KernelSource>, Vec<u8>>;

/// Addresses of what a rank has beside its arena.
#[derive(Clone, Copy, Default)]
pub(super) struct Own {
    pub status: u64,
    pub scratch: u64,
}

/// An entry point that is loaded.
#[derive(Clone, Copy)]
pub(super) struct Entry(sys::CUfunction);

// SAFETY: handles of functions may be used from any thread.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// A launch whose entry point is loaded.
pub struct Ready {
    launch: DeviceLaunch,
    entry: Entry,
}

/// All texts of a program on a device, loaded; ranks there share them. Nothing is loaded later: that
/// may wait for all that the device does, and what it does may wait for another rank.
pub struct Modules {
    device: Arc<Device>,
    loaded: BTreeMap<Arc<KernelSource>, sys::CUmodule>,
    /// Bytes of shared memory that launches of an entry point may ask for, by its handle.
    shared: Mutex<HashMap<usize, u32>>,
}

// SAFETY: handles of modules and functions may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads all texts.
    ///
    /// # Errors
    /// `cuda-driver`.
    pub fn new(device: &Arc<Device>, code: &Code) -> Result<Arc<Modules>> {
        device.bind()?;
        let mut all =
            Modules { device: device.clone(), loaded: BTreeMap::new(), shared: Mutex::default() };
        for (source, code) in code {
            // SAFETY: an ELF file, which says itself where it ends: whoever has made this table has
            // checked that all it names lies inside it.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
            let module = module.called(&format!("cuModuleLoadData of {}", source.file))?;
            all.loaded.insert(source.clone(), module);
        }
        Ok(Arc::new(all))
    }

    /// Finds the entry points of launches.
    ///
    /// # Errors
    /// `plan` if a text is not among those that were loaded, and `cuda-driver`.
    pub fn ready(&self, launches: &[DeviceLaunch]) -> Result<Vec<Ready>> {
        let one = |l: &DeviceLaunch| {
            Ok(Ready { launch: l.clone(), entry: self.entry(&l.source, &l.entry, l.shared)? })
        };
        launches.iter().map(one).collect()
    }

    /// An entry point of a text, whose launches ask for so many bytes of shared memory.
    pub(super) fn entry(&self, source: &KernelSource, entry: &str, shared: u32) -> Result<Entry> {
        self.device.bind()?;
        let module = *self.loaded.get(source).ok_or_else(|| {
            Diag::new("plan", format!("no code of {} for this device", source.file))
        })?;
        let name = CString::new(entry).expect("names of entry points have no zero bytes");
        // SAFETY: the module is loaded.
        let f = unsafe { result::module::get_function(module, name) };
        let f = f.called(&format!("cuModuleGetFunction {entry} of {}", source.file))?;
        let mut all = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let given = all.entry(f as usize).or_default();
        if shared > *given {
            use sys::CUfunction_attribute_enum as Is;
            let most = Is::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(f, most, shared as i32) }
                .called("cuFuncSetAttribute")?;
            *given = shared;
        }
        Ok(Entry(f))
    }
}

impl Ready {
    /// Queues it on the memory of operands.
    ///
    /// # Safety
    /// As for [`Entry::launch`].
    pub(super) unsafe fn launch(&self, stream: &Stream, memory: &[u64], own: &Own) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.entry.launch(stream, &self.launch, memory, own) }
    }
}

impl Entry {
    /// Queues a launch of this entry point on the memory of operands.
    ///
    /// # Safety
    /// `memory` and a rank's `own` are valid for what the entry point does with them until it is done.
    pub(super) unsafe fn launch(
        self,
        stream: &Stream,
        l: &DeviceLaunch,
        memory: &[u64],
        own: &Own,
    ) -> Result<()> {
        stream.device.bind()?;
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
            sys::cuLaunchKernel(
                self.0,
                x,
                y,
                z,
                l.threads,
                1,
                1,
                l.shared,
                stream.stream,
                none,
                extra,
            )
            .result()
            .called(&format!("cuLaunchKernel {} of {}", l.entry, l.source.file))
        }
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let _ = self.device.bind();
        for &module in self.loaded.values() {
            // SAFETY: loaded by `new`; ranks hold this table while their work runs.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}
