//! Fuzz target of the text of a recovery key.

use polis_fuzz::{Accepted, Target};

use super::{read, write};

#[test]
fn recovery_keys() {
    let text = write(&[0x5a; 32]);
    let spoken = text.to_lowercase().replace('-', " ").replace('0', "o");
    Target::new("base.recovery").samples([text.as_str(), &spoken]).length_max(512).run(|input| {
        let Ok(key) = read(&String::from_utf8_lossy(input)) else { return Accepted::No };
        assert_eq!(read(&write(&key)), Ok(key));
        Accepted::Yes
    });
}
