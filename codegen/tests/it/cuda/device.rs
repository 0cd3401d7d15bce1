//! Runs launches on a CUDA device, where there is one, beside the emulator.

use super::emulator::AS_SM_90A;
use cudarc::driver::{result, sys};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::nvrtc;
use shardc_ir::launch::{DeviceLaunch, KernelSource, SCRATCH, Word};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Bytes behind every operand that no kernel may touch.
const BEHIND: usize = 256;
const UNTOUCHED: u8 = 0xa5;

/// The first device.
pub struct Device {
    context: sys::CUcontext,
    /// The architecture of its own instructions, and of those that it shares with its generation.
    archs: [String; 2],
    /// Loaded texts; never unloaded.
    modules: Mutex<HashMap<Arc<KernelSource>, usize>>,
}

// SAFETY: a context may be current in several threads.
unsafe impl Send for Device {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Device {}

/// The first device, if there is one.
pub fn here() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || {
        use sys::CUdevice_attribute_enum as Is;
        // SAFETY: looks for the library by name; the device that is asked exists.
        unsafe {
            if !sys::is_culib_present() || result::init().is_err() {
                return None;
            }
            let device = result::device::get(0).ok()?;
            let context = result::primary_ctx::retain(device).expect("a context");
            let number = |a| result::device::get_attribute(device, a).expect("a number");
            let major = number(Is::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
            let minor = number(Is::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
            let shared = format!("sm_{major}{minor}");
            let own = if major >= 9 { format!("{shared}a") } else { shared.clone() };
            Some(Device { context, archs: [own, shared], modules: Mutex::default() })
        }
    };
    DEVICE.get_or_init(open).as_ref()
}

/// Memory of the device; freed when dropped.
struct Memory {
    at: u64,
    bytes: usize,
}

impl Memory {
    /// Memory with this content, and what may not be touched behind it.
    fn of(content: &[u8]) -> Memory {
        let all = [content, &[UNTOUCHED; BEHIND]].concat();
        // SAFETY: as many bytes are written as there are.
        unsafe {
            let at = result::malloc_sync(all.len()).expect("memory of the device");
            result::memcpy_htod_sync(at, &all).expect("a copy to the device");
            Memory { at, bytes: content.len() }
        }
    }

    fn read(&self, content: &mut [u8], what: &str) {
        let mut all = vec![0; self.bytes + BEHIND];
        // SAFETY: as many bytes are read as there are.
        unsafe { result::memcpy_dtoh_sync(&mut all, self.at) }.expect("a copy from the device");
        let (own, behind) = all.split_at(self.bytes);
        assert!(behind.iter().all(|&b| b == UNTOUCHED), "{what} writes behind an operand");
        content.copy_from_slice(own);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `of`; nothing runs any more.
        let _ = unsafe { result::free_sync(self.at) };
    }
}

impl Device {
    /// Whether it can run these launches: it has their shared memory, and groups of warps if they are to multiply.
    pub fn can(&self, launches: &[DeviceLaunch]) -> bool {
        let limits = Limits::of(&self.archs[0]);
        let groups = |l: &DeviceLaunch| l.source.text.starts_with(AS_SM_90A);
        launches.iter().all(|l| limits.check(l).is_ok() && (limits.groups || !groups(l)))
    }

    fn module(&self, source: &Arc<KernelSource>) -> sys::CUmodule {
        let mut known = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let made = *known.entry(source.clone()).or_insert_with(|| {
            // Texts that are to be those of groups of warps say so; all others show what older ones do.
            let groups = source.text.starts_with(AS_SM_90A);
            let made = nvrtc::compile(source, &self.archs[usize::from(!groups)]);
            let code = made.unwrap_or_else(|d| panic!("{}", d.render())).cubin;
            // SAFETY: an ELF file, as the compiler makes them.
            unsafe { result::module::load_data(code.as_ptr().cast()) }.expect("code that loads")
                as usize
        });
        made as sys::CUmodule
    }

    /// Runs launches on memory of operands; returns the status that kernels set.
    pub fn run(&self, launches: &[DeviceLaunch], memory: &mut [Vec<u8>]) -> u64 {
        // SAFETY: the context lives as long as the process.
        unsafe { result::ctx::set_current(self.context) }.expect("a context");
        let own: Vec<Memory> = memory.iter().map(|m| Memory::of(m)).collect();
        let (status, scratch) = (Memory::of(&0u64.to_le_bytes()), Memory::of(&vec![0xff; SCRATCH]));
        for l in launches {
            let word = |w: &Word| match *w {
                Word::Address { operand, byte } => own[operand].at + byte as u64,
                Word::Status => status.at,
                Word::Scratch => scratch.at,
                Word::Int(x) => x as u64,
                Word::Float(x) => x.to_bits(),
            };
            self.launch(l, &mut l.words.iter().map(word).collect::<Vec<u64>>());
        }
        let entries: Vec<&str> = launches.iter().map(|l| &*l.entry).collect();
        let what = entries.join(", ");
        own.iter().zip(memory).for_each(|(m, to)| m.read(to, &what));
        let mut told = [0; 8];
        status.read(&mut told, &what);
        scratch.read(&mut vec![0; SCRATCH], &what);
        u64::from_le_bytes(told)
    }

    fn launch(&self, l: &DeviceLaunch, words: &mut [u64]) {
        use sys::CUfunction_attribute_enum as Is;
        let mut bytes = words.len() * 8;
        let mut buffer: [*mut c_void; 5] = [
            sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut _,
            words.as_mut_ptr().cast(),
            sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut _,
            (&raw mut bytes).cast(),
            std::ptr::null_mut(),
        ];
        let name = CString::new(&*l.entry).expect("no zero bytes in a name");
        let ([x, y, z], module) = (l.grid, self.module(&l.source));
        // SAFETY: the module is loaded, and parameters are as its entry point takes them.
        unsafe {
            let f = result::module::get_function(module, name).expect("an entry point");
            let most = Is::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(f, most, l.shared as i32)
                .expect("shared memory");
            let (none, extra) = (std::ptr::null_mut(), buffer.as_mut_ptr());
            sys::cuLaunchKernel(
                f,
                x,
                y,
                z,
                l.threads,
                1,
                1,
                l.shared,
                std::ptr::null_mut(),
                none,
                extra,
            )
            .result()
            .unwrap_or_else(|e| panic!("{} is not launched: {e}", l.entry));
            result::ctx::synchronize().unwrap_or_else(|e| panic!("{} fails: {e}", l.entry));
        }
    }
}
