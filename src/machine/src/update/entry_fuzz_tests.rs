//! Fuzz target of the names of kernel images on the ESP.

use polis_fuzz::{Accepted, Target};

use super::Entry;

#[test]
fn names_of_kernel_images() {
    let good = Entry::good(&"1.2.0".parse().unwrap());
    let untried = Entry::untried(&"1.2.0-rc.1".parse().unwrap());
    let tried = untried.replace("+1", "+0-1");
    Target::new("machine.kernel_images").samples([good, untried, tried]).length_max(256).run(
        |input| {
            let name = String::from_utf8_lossy(input);
            let Some(entry) = Entry::parse(&name) else { return Accepted::No };
            assert_eq!(entry.file, name);
            for file in [Entry::good(&entry.version), Entry::untried(&entry.version)] {
                // A version with a `+` is one with a counter to the loader.
                if entry.version.build.is_empty() {
                    assert_eq!(
                        Entry::parse(&file).map(|entry| entry.version).as_ref(),
                        Some(&entry.version)
                    );
                }
            }
            Accepted::Yes
        },
    );
}
