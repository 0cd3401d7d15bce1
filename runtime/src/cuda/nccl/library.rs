//! NCCL's functions, loaded when they are first asked for, with the types of nccl.h 2.30; those of 2.18 are enough.

use super::order;
use cudarc::nccl::sys;
use libloading::Library as Object;
use shardc_ir::diag::{Diag, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use sys::ncclResult_t as Is;

pub(super) use sys::{
    cudaStream_t as Queue, ncclComm_t as Handle, ncclConfig_t, ncclDataType_t as DataType,
    ncclRedOp_t as Fold,
};

/// Names of the library: with the version of its interface, and as a developer's link.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// By which processes know that they are of one job; process 0 makes it.
#[derive(Clone, Copy)]
pub struct Id(pub [u8; 128]);

/// A code of `ncclResult_t`: later versions may have more of them.
pub(super) type NcclCode = c_int;
pub(super) const SUCCESS: NcclCode = Is::ncclSuccess as NcclCode;
pub(super) const IN_PROGRESS: NcclCode = Is::ncclInProgress as NcclCode;
const CUDA: NcclCode = Is::ncclUnhandledCudaError as NcclCode;
const SYSTEM: NcclCode = Is::ncclSystemError as NcclCode;
const INVALID_ARGUMENT: NcclCode = Is::ncclInvalidArgument as NcclCode;
const INVALID_USAGE: NcclCode = Is::ncclInvalidUsage as NcclCode;
const REMOTE: NcclCode = Is::ncclRemoteError as NcclCode;

/// Declares the table of functions, and loads it.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*)),* $(,)?) => {
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> NcclCode,)*
        }

        impl Functions {
            /// # Errors
            /// The name of a function that is not there.
            fn load(object: &Object) -> std::result::Result<Functions, &'static str> {
                $(
                    // SAFETY: the types are those of nccl.h.
                    let $name = *unsafe { object.get($symbol.as_bytes()) }.map_err(|_| $symbol)?;
                )*
                Ok(Functions { $($name),* })
            }
        }
    };
}

functions! {
    version: "ncclGetVersion" (*mut c_int),
    unique_id: "ncclGetUniqueId" (*mut sys::ncclUniqueId),
    init: "ncclCommInitRankConfig"
        (*mut Handle, c_int, sys::ncclUniqueId, c_int, *mut ncclConfig_t),
    split: "ncclCommSplit" (Handle, c_int, c_int, *mut Handle, *mut ncclConfig_t),
    finalize: "ncclCommFinalize" (Handle),
    destroy: "ncclCommDestroy" (Handle),
    abort: "ncclCommAbort" (Handle),
    async_error: "ncclCommGetAsyncError" (Handle, *mut NcclCode),
    group_start: "ncclGroupStart" (),
    group_end: "ncclGroupEnd" (),
    send: "ncclSend" (*const c_void, usize, DataType, c_int, Handle, Queue),
    recv: "ncclRecv" (*mut c_void, usize, DataType, c_int, Handle, Queue),
    broadcast: "ncclBroadcast" (*const c_void, *mut c_void, usize, DataType, c_int, Handle, Queue),
    all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, DataType, Handle, Queue),
    all_reduce: "ncclAllReduce" (*const c_void, *mut c_void, usize, DataType, Fold, Handle, Queue),
    reduce: "ncclReduce" (*const c_void, *mut c_void, usize, DataType, Fold, c_int, Handle, Queue),
    reduce_scatter: "ncclReduceScatter"
        (*const c_void, *mut c_void, usize, DataType, Fold, Handle, Queue),
}

/// The library.
pub(super) struct Library {
    pub functions: Functions,
    /// Kernels of several communicators start in the order of their calls, on all ranks.
    pub launches_in_order: bool,
    text: unsafe extern "C" fn(NcclCode) -> *const c_char,
    /// What was said last; versions that do not have it say nothing.
    last: Option<unsafe extern "C" fn(Handle) -> *const c_char>,
    _object: Object,
}

/// What does not hold where NCCL gives a code.
fn rule(code: NcclCode) -> &'static str {
    match code {
        CUDA => "NCCL's own calls of the driver succeed: the device has room for its buffers",
        SYSTEM => "NCCL reaches every host of the job, and has memory of this one for its buffers",
        REMOTE => "all processes of a group live, and the network between them works",
        INVALID_ARGUMENT | INVALID_USAGE => {
            "all ranks of a group run the same collectives, in the same order"
        }
        _internal => "NCCL itself works: no more is known of this error",
    }
}

fn missing(what: String) -> Diag {
    Diag::new("missing-library", what)
        .rule("--transport nccl needs NVIDIA's NCCL, 2.18 or later")
        .help("install it (pip install nvidia-nccl-cu13) where LD_LIBRARY_PATH says")
}

/// A version as NCCL writes it, of a number as 22605.
fn written(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl Library {
    /// The library, loaded once.
    ///
    /// # Errors
    /// `missing-library`.
    pub fn get() -> Result<&'static Library> {
        static LOADED: OnceLock<std::result::Result<Library, Diag>> = OnceLock::new();
        LOADED.get_or_init(Library::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Library> {
        // SAFETY: NVIDIA's library, whose start has no conditions.
        let open = |name: &&str| unsafe { Object::new(*name) }.ok();
        let object = NAMES.iter().find_map(open);
        let object = object.ok_or_else(|| missing(format!("{} is not here", NAMES[0])))?;
        type Version = unsafe extern "C" fn(*mut c_int) -> NcclCode;
        // SAFETY: the type is that of nccl.h, and it writes one number.
        let version = unsafe { object.get::<Version>(b"ncclGetVersion") }.ok().map(|version| {
            let mut number = 0;
            // SAFETY: as above.
            unsafe { version(&mut number) };
            number
        });
        let without = |name: &str| {
            let of = version.map_or(String::new(), |v| format!(" {}", written(v)));
            missing(format!("{}{of} has no {name}", NAMES[0]))
        };
        let functions = Functions::load(&object).map_err(without)?;
        let symbol = "ncclGetErrorString";
        // SAFETY: the type is that of nccl.h.
        let text = *unsafe { object.get(symbol.as_bytes()) }.map_err(|_| without(symbol))?;
        // SAFETY: as above.
        let last = unsafe { object.get(b"ncclGetLastError") }.ok().map(|f| *f);
        let launches_in_order = order::ask(version.unwrap_or(0));
        Ok(Library { functions, launches_in_order, text, last, _object: object })
    }

    /// `call` names the function and who it was called for, in an error.
    pub fn check(&self, code: NcclCode, call: impl FnOnce() -> String) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let said = |text: *const c_char| {
            // SAFETY: texts that end with 0.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().trim().to_string()
        };
        // SAFETY: it has a text for any code, and for the last error of any communicator.
        let (text, last) =
            unsafe { (said((self.text)(code)), self.last.map(|f| said(f(std::ptr::null_mut())))) };
        let d = Diag::new("rank-failed", format!("{}: {text} (code {code})", call()));
        let d =
            d.rule(rule(code)).help("run again with NCCL_DEBUG=WARN to see what NCCL says of it");
        let last = last.filter(|said| !said.is_empty());
        Err(match last {
            Some(said) => d.why(format!("NCCL says: {said}")),
            None => d,
        })
    }

    /// As 22605 for 2.26.5.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.functions.version)(&mut version) };
        self.check(code, || "ncclGetVersion".into())?;
        Ok(version)
    }

    pub fn unique_id(&self) -> Result<Id> {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes one id.
        let code = unsafe { (self.functions.unique_id)(&mut id) };
        self.check(code, || "ncclGetUniqueId".into())?;
        Ok(Id(id.internal.map(|byte| byte as u8)))
    }
}

impl Id {
    pub(super) fn nccl(&self) -> sys::ncclUniqueId {
        sys::ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}
