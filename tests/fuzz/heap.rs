//! The allocator of the tests: the system's, which counts the bytes of each thread.
//!
//! A parser that believes a length of its input asks for memory that the input does not
//! fill. The kernel gives such memory without effort, so only a counter shows it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static USED: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Counts what a thread allocates. A thread may free what another one allocated, so the
/// number of one thread may be negative.
struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

/// The result of `work`, and the most bytes that this thread had at a time while it ran,
/// beyond what it had before.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = USED.get();
    PEAK.set(before);
    let result = work();
    (result, usize::try_from(PEAK.get() - before).unwrap_or_default())
}

/// Adds to the count of this thread, unless the thread is ending.
fn count(bytes: isize) {
    let _ending = USED.try_with(|used| {
        used.set(used.get().wrapping_add(bytes));
        let _ending = PEAK.try_with(|peak| peak.set(peak.get().max(used.get())));
    });
}

fn signed(bytes: usize) -> isize {
    // No layout is larger than `isize::MAX`.
    bytes.cast_signed()
}

#[expect(unsafe_code, reason = "an allocator is unsafe by its trait; this one only counts")]
// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing,
// because the cells are constants without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise is the system's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise is the system's condition.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: `place` came from the system's allocator, with this layout.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(signed(size) - signed(layout.size()));
        // SAFETY: `place` came from the system's allocator, with this layout.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_never_written_counts() {
        let (_, peak) = measured(|| drop(Vec::<u8>::with_capacity(1 << 30)));
        assert!((1 << 30..1 << 31).contains(&peak), "{peak}");
        let (_, peak) = measured(|| ());
        assert_eq!(peak, 0);
    }
}
