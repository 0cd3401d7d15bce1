//! Memory of a rank on the device, and pinned memory of the host through which it is filled and read.

use super::device::{Called, Stream};
use cudarc::driver::{result, sys};
use shardc_ir::diag::{Diag, Result};
use std::sync::Arc;

/// Bytes that pass through pinned memory at once.
const STAGING: usize = 4 << 20;

/// Pinned memory of the host: the device reads and writes it by itself.
pub(super) struct Pinned {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Memory of this thread's device, before work is queued that waits for another rank: to allocate it may wait for
    /// all of the device's.
    pub fn new(bytes: usize) -> Result<Pinned> {
        // SAFETY: it is freed by `drop` only.
        let at = unsafe { result::malloc_host(bytes, 0) }.called("cuMemHostAlloc")?;
        // SAFETY: so many bytes were just allocated: they have some value.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { at: at.cast(), bytes })
    }

    /// What is there, when no copy is under way.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated by `new`, and borrowed as this is.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and no copy uses it any more.
        let _ = unsafe { result::free_host(self.at.cast()) };
    }
}

/// Pinned memory that copies of a stream fill. It stays until the process ends where the device was given up, whose copies
/// may still be under way.
pub(super) struct Filled {
    stream: Arc<Stream>,
    pinned: Option<Pinned>,
}

impl Filled {
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<Filled> {
        Ok(Filled { stream: stream.clone(), pinned: Some(Pinned::new(bytes)?) })
    }

    /// What is there, when no copy is under way.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.pinned.as_mut().map_or(&mut [], Pinned::bytes)
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if self.stream.wait().is_err() {
            std::mem::forget(self.pinned.take());
        }
    }
}

/// One allocation on the device.
pub struct DeviceArena {
    stream: Arc<Stream>,
    first: sys::CUdeviceptr,
    bytes: usize,
    /// None until it is asked for.
    staging: Option<Pinned>,
}

impl DeviceArena {
    /// Memory for so many bytes, full of NaN if `poison`, else of zeros.
    pub fn new(stream: &Arc<Stream>, bytes: usize, poison: bool) -> Result<DeviceArena> {
        let first = stream.device.allocate(bytes.max(1))?;
        let arena = DeviceArena { stream: stream.clone(), first, bytes, staging: None };
        let byte = if poison { 0xff } else { 0 };
        // SAFETY: the memory was just allocated.
        unsafe { result::memset_d8_async(first, byte, bytes, stream.stream) }
            .called("cuMemsetD8Async")?;
        Ok(arena)
    }

    /// The device's address of a byte.
    pub fn address(&self, byte: usize) -> u64 {
        self.first + byte as u64
    }

    pub(super) fn check(&self, byte: usize, len: usize) -> Result<()> {
        if byte.checked_add(len).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(Diag::new("plan", format!("{len} B at {byte} are not in an arena of {}", self.bytes)))
    }

    /// With pinned memory, before there is work that waits for another rank: see `Pinned::new`.
    pub fn staged(mut self) -> Result<DeviceArena> {
        self.stage()?;
        Ok(self)
    }

    /// The pinned memory.
    fn stage(&mut self) -> Result<&mut [u8]> {
        if self.staging.is_none() {
            self.staging = Some(Pinned::new(STAGING.min(self.bytes.max(1)))?);
        }
        Ok(self.staging.as_mut().expect("it was just made").bytes())
    }

    /// Writes bytes; they are there for what is queued afterwards.
    pub fn write(&mut self, byte: usize, data: &[u8]) -> Result<()> {
        self.check(byte, data.len())?;
        self.stream.device.bind()?;
        for (i, part) in data.chunks(STAGING).enumerate() {
            // The last part has left the pinned memory.
            self.stream.wait()?;
            let (to, stream) = (self.address(byte + i * STAGING), self.stream.stream);
            let staged = &mut self.stage()?[..part.len()];
            staged.copy_from_slice(part);
            // SAFETY: the range was checked; the next part, and `drop`, wait before they use the pinned memory.
            unsafe { result::memcpy_htod_async(to, staged, stream) }.called("cuMemcpyHtoDAsync")?;
        }
        Ok(())
    }

    /// Fills the first bytes with copies of a block.
    pub fn fill(&mut self, bytes: usize, block: &[u8]) -> Result<()> {
        self.check(0, bytes)?;
        let mut filled = block.len().min(bytes);
        self.write(0, &block[..filled])?;
        while (1..bytes).contains(&filled) {
            let more = filled.min(bytes - filled);
            // SAFETY: both ranges were checked, and do not overlap.
            unsafe {
                let to = self.address(filled);
                result::memcpy_dtod_async(to, self.first, more, self.stream.stream)
                    .called("cuMemcpyDtoDAsync")?;
            }
            filled += more;
        }
        Ok(())
    }

    /// Makes bytes zero, for what is queued afterwards.
    pub fn clear(&mut self, byte: usize, len: usize) -> Result<()> {
        self.check(byte, len)?;
        self.stream.device.bind()?;
        // SAFETY: the range was checked.
        unsafe { result::memset_d8_async(self.address(byte), 0, len, self.stream.stream) }
            .called("cuMemsetD8Async")
    }

    /// Reads bytes, after all that is queued is done.
    pub fn read(&mut self, byte: usize, out: &mut [u8]) -> Result<()> {
        self.check(byte, out.len())?;
        self.stream.device.bind()?;
        // What is queued may take any time, and copies may not.
        let stream = self.stream.clone();
        stream.wait()?;
        let mut one = |(i, part): (usize, &mut [u8])| {
            let from = self.address(byte + i * STAGING);
            let staged = &mut self.stage()?[..part.len()];
            // SAFETY: the range was checked, and the copy is waited for.
            unsafe { result::memcpy_dtoh_async(staged, from, stream.stream) }
                .called("cuMemcpyDtoHAsync")?;
            stream.wait()?;
            part.copy_from_slice(staged);
            Ok(())
        };
        out.chunks_mut(STAGING).enumerate().try_for_each(|part| stream.copying(|| one(part)))
    }
}

impl Drop for DeviceArena {
    fn drop(&mut self) {
        // What is queued on a device that was given up may use it until the process ends.
        if self.stream.wait().is_err() {
            return std::mem::forget(self.staging.take());
        }
        // SAFETY: allocated by `new`, and no queued work uses it any more.
        let _ = unsafe { result::free_sync(self.first) };
    }
}
