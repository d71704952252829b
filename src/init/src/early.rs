//! The early module loader, a thread beside stage 1: it loads modules that the boot needs soon.
//!
//! The way to the system takes one module after another. On a machine with a
//! second processor a thread uses the time for the largest module of a boot, the
//! data partition's file system, and for what the ESP and the parameters need.
//!
//! ```text
//! stage 1:  drivers --> disk --> verity's modules --> ESP --> root --+--> stage 2
//! thread:   [ESP's file system] [fw_cfg] [xfs: checked | linked] ----+
//!                                                  the modules' memory is given back
//! ```
//!
//! The kernel checks signatures of several modules at once and links one at a
//! time. XFS, whose thousands of functions take longest to link, comes last: while
//! its signature is checked, stage 1 gets what it needs.
//!
//! A boot always has to wait for XFS, while everything else can run at another time: with it, the
//! thread gets the highest priority, or it would share its processor with the start of every
//! service. Not before: on the only processor that runs yet, it would keep the kernel from
//! starting the others.
//!
//! Invariants:
//! - The boot never depends on the thread: a step that needs a module loads it too,
//!   waits for it if it is already loading, and reports the error if loading fails.
//!
//! What this module does not do: drivers of devices (`drivers`, `coldplug`).

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use super::modules::Modules;
use polis_base::sys;

/// The highest priority below the real-time ones.
const FIRST: i32 = -20;

/// An order to the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Load this module.
    Load(&'static str),
    /// From here on, the thread has priority over every other one.
    Hurry,
    /// The thread is the last user of the initramfs's modules.
    GiveBack,
}

/// The handle of the thread. Dropping it leaves the modules in place: a failed stage
/// may still need the driver of a keyboard.
#[derive(Debug)]
pub struct Early {
    orders: Sender<Order>,
}

impl Early {
    /// Starts the thread, which loads modules from `directory`.
    ///
    /// # Errors
    ///
    /// When the directory does not exist, or the thread can't be started.
    pub fn start(directory: &Path) -> io::Result<Self> {
        let directory = File::open(directory)?;
        let (orders, ordered) = mpsc::channel();
        thread::Builder::new()
            .name("early-modules".to_owned())
            .spawn(move || run(&directory, &ordered))?;
        Ok(Self { orders })
    }

    /// Loads `module` after all earlier orders.
    pub fn load(&self, module: &'static str) {
        self.order(Order::Load(module));
    }

    /// Gives the thread priority over every other one, for all later orders.
    pub fn hurry(&self) {
        self.order(Order::Hurry);
    }

    /// Gives the initramfs's memory back when everything is loaded.
    pub fn give_back(self) {
        self.order(Order::GiveBack);
    }

    fn order(&self, order: Order) {
        // The thread ends only by a panic, and then stage 1 loads the modules itself.
        self.orders.send(order).ok();
    }
}

fn run(directory: &File, ordered: &Receiver<Order>) {
    // The root changes meanwhile, and the initramfs is then unreachable by path.
    let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let mut modules = Modules::open(&path);
    while let Ok(order) = ordered.recv() {
        match (order, &mut modules) {
            // A missing or rejected module is reported by the step that needs it.
            (Order::Load(name), Ok(modules)) => drop(modules.load(name)),
            (Order::Load(_), Err(_none)) => {}
            (Order::Hurry, _) => sys::thread::set_priority(FIRST),
            (Order::GiveBack, _) => return remove(&path),
        }
    }
}

/// Frees the memory of the files: they exist only in memory.
fn remove(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        fs::remove_file(entry.path()).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the modules are still there after these orders.
    fn are_kept(orders: &[Order]) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("modules.dep");
        fs::write(&file, "").unwrap();
        let opened = File::open(directory.path()).unwrap();
        let (sender, ordered) = mpsc::channel();
        orders.iter().for_each(|order| sender.send(*order).unwrap());
        drop(sender);
        run(&opened, &ordered);
        file.exists()
    }

    #[test]
    fn the_modules_go_when_stage_1_is_over_and_stay_when_it_failed() {
        assert!(!are_kept(&[Order::Load("none_such"), Order::GiveBack]));
        assert!(!are_kept(&[Order::Hurry, Order::Load("none_such"), Order::GiveBack]));
        assert!(are_kept(&[Order::Load("none_such")]));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(Early::start(Path::new("/nowhere")).is_err());
    }
}
