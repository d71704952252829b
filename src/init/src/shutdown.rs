//! The orderly end of the machine: processes, disks, the closing line, the power.

use std::time::Duration;

use polis_base::serial::Severity;
use polis_base::sys::poll;
use polis_base::sys::reboot::{self, Reason};
use polis_base::sys::vt;

use super::deadline;
use super::machine::Machine;
use super::mounts;

/// Ends the machine. Returns only if the kernel refuses even that.
pub fn end(machine: &mut Machine, reason: Reason) -> ! {
    machine.end_processes();
    let times = [deadline::SETTLE, deadline::SETTLE_MAX];
    match deadline::while_disks_work(machine, times, mounts::settle) {
        Ok(failed) => {
            for (target, error) in failed {
                let text = format!("cannot unmount {}: {error}", target.display());
                machine.port.log(Severity::Warning, &text);
            }
        }
        Err(error) => {
            let text = format!("the file systems stay mounted: {error}");
            machine.port.log(Severity::Error, &text);
        }
    }
    machine.leave_watchdog(reason);
    // The kernel would write once more behind the closing line.
    vt::mute_kernel().ok();
    machine.off(reason);
    let error = reboot::end(reason);
    machine.port.log(Severity::Fatal, &format!("the kernel does not stop the machine: {error}"));
    machine.port.drain();
    // All data is on the disks that answer; a person may pull the plug.
    loop {
        poll::sleep(Duration::MAX);
    }
}
