//! The encryption of the data partition: makes, opens and closes it, with `cryptsetup`.
//!
//! `storage::machine` calls it. Keys go through a pipe, never on a command line.
//!
//! ```text
//! /dev/vda4 --LUKS2--> polis-data                       encrypted
//! /dev/vda4 --LUKS2--> polis-data_dif --> polis-data    authenticated
//! ```
//!
//! What this module does not do: decide what may be formatted (`plan`), or know the
//! source of keys (`cluster`).

use std::io;
use std::path::{Path, PathBuf};

use tracing::debug;
use uuid::Uuid;
use zeroize::Zeroizing;

use super::Kind;
use super::header::{CIPHER, CIPHER_AUTHENTICATED, SECTOR_SIZE, SUBSYSTEM};
use super::key::{self, Key, Keys, Passphrase};
use polis_base::sys::dm::DeviceMapper;
use polis_runtime::logtree::Sink;
use polis_runtime::sys::process::{Command, Error};

/// Where the image keeps the programs.
const CRYPTSETUP: &str = "/usr/sbin/cryptsetup";
const MODPROBE: &str = "/usr/sbin/modprobe";

/// The name of the open data partition in the device mapper.
pub const NAME: &str = "polis-data";
/// How the name of the integrity device below it ends, given by `cryptsetup`.
const INTEGRITY: &str = "_dif";

/// Turns of the function that makes a key slot's key: the fewest that there can
/// be. They make guessing a weak passphrase dear, and ours has 256 random bits.
const TURNS: &str = "1000";

/// A key as `cryptsetup` reads it: hexadecimal.
const KEY_SIZE: usize = 2 * key::SIZE;

/// The exit status of `cryptsetup` when no slot opens.
const NOT_THE_KEY: i32 = 2;

/// Why the partition does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The key is not one of this partition's.
    #[error("the key does not open slot {slot}")]
    Unfit {
        /// Where it was tried.
        slot: u8,
    },
    /// Something else.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// Where the open partition with this name is found.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    Path::new("/dev/mapper").join(name)
}

/// Where the integrity device below it is found, for the kind that has one.
#[must_use]
pub fn integrity_path(name: &str) -> PathBuf {
    path(&format!("{name}{INTEGRITY}"))
}

fn cryptsetup(action: &str, log: &Sink) -> Command {
    Command::new(CRYPTSETUP)
        // The machine has no udev that would make the device's node and report it.
        .env("DM_DISABLE_UDEV", "1")
        .args([action, "--batch-mode"])
        .log(log.clone())
}

/// How a slot is made, and which key comes first through the pipe.
const SLOT: [&str; 7] =
    ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", TURNS, "--hash", "sha256", "--key-file=-"];

/// Loads the ciphers of `kind`, the fast ones where the processor has their
/// instructions. The kernel finds the plain ones by itself, and reports missing ones.
pub async fn load_ciphers(kind: Kind, log: &Sink) {
    let processor = tokio::fs::read_to_string("/proc/cpuinfo").await.unwrap_or_default();
    let modules = modules(kind, &processor);
    let loaded = Command::new(MODPROBE).args(&modules).log(log.clone()).run().await;
    if let Err(error) = loaded {
        debug!(error = &error as &dyn std::error::Error, ?modules, "not all ciphers are modules");
    }
}

fn modules(kind: Kind, processor: &str) -> Vec<&'static str> {
    let line = processor.lines().find(|line| line.starts_with("flags"));
    let has =
        |wanted: &str| line.is_some_and(|line| line.split_whitespace().any(|flag| flag == wanted));
    let mut modules = match kind {
        Kind::Insecure => return vec![],
        Kind::Encrypted => vec!["dm_crypt", "xts"],
        Kind::Authenticated => vec!["dm_crypt", "dm_integrity", "aegis128"],
    };
    if has("aes") {
        modules.push("aesni_intel");
    }
    // The module refuses a processor without one of these, as emulators have, with an error.
    if kind == Kind::Authenticated && ["aes", "sse4_1", "xsave"].into_iter().all(has) {
        modules.push("aegis128_aesni");
    }
    modules
}

/// Puts a new header on `device`, with these keys; the content is lost.
///
/// # Errors
///
/// The output of `cryptsetup`.
pub async fn format(
    device: &Path,
    label: &str,
    id: Uuid,
    kind: Kind,
    keys: &Keys,
    log: &Sink,
) -> Result<(), Error> {
    let format = cryptsetup("luksFormat", log)
        .args(["--type", "luks2", "--label", label, "--subsystem", SUBSYSTEM])
        .arg(format!("--uuid={id}"))
        .arg(format!("--sector-size={SECTOR_SIZE}"))
        .args(SLOT);
    let format = match kind {
        // The wipe that this leaves out is `storage::wipe`'s.
        Kind::Authenticated => format
            .args(["--cipher", CIPHER_AUTHENTICATED, "--key-size", "128"])
            .args(["--integrity", "aead", "--integrity-no-wipe"]),
        Kind::Encrypted | Kind::Insecure => format.args(["--cipher", CIPHER, "--key-size", "512"]),
    };
    format.arg(device).input(keys.passphrase.text().to_vec()).run().await?;
    let Some(recovery) = &keys.recovery else { return Ok(()) };
    add(device, &keys.passphrase.text(), &recovery.text(), 1, log).await
}

/// Adds the key `new` in `slot`; `known` opens another one.
async fn add(
    device: &Path,
    known: &Zeroizing<Vec<u8>>,
    new: &Zeroizing<Vec<u8>>,
    slot: u8,
    log: &Sink,
) -> Result<(), Error> {
    // One after the other through the same pipe; each is read by its length.
    let both = [known.as_slice(), new.as_slice()].concat();
    cryptsetup("luksAddKey", log)
        .args(SLOT)
        .arg(format!("--keyfile-size={KEY_SIZE}"))
        .arg(format!("--new-keyfile-size={KEY_SIZE}"))
        .arg(format!("--new-key-slot={slot}"))
        .arg(device)
        .arg("-")
        .input(both)
        .run()
        .await
        .map(drop)
}

/// Opens `device` with this name.
///
/// # Errors
///
/// [`OpenError::Unfit`] when the key is wrong; then nothing has changed.
pub async fn open(device: &Path, name: &str, key: &Key, log: &Sink) -> Result<(), OpenError> {
    let slot = key.slot();
    let opened = cryptsetup("open", log)
        .args(["--type", "luks2", "--key-file=-"])
        // A thread less between a flush and the disk.
        .args(["--perf-no_read_workqueue", "--perf-no_write_workqueue"])
        .arg(format!("--key-slot={slot}"))
        .arg(device)
        .arg(name)
        .input(key.text().to_vec())
        .run()
        .await;
    match opened {
        Ok(_said) => Ok(()),
        Err(Error::Failed { exit, .. }) if exit.code() == Some(NOT_THE_KEY) => {
            Err(OpenError::Unfit { slot })
        }
        Err(error) => Err(error.into()),
    }
}

/// Gives slot 0 another passphrase; `known` has opened the other slot. A power cut
/// in between leaves slot 0 empty, and the recovery key opens still.
///
/// # Errors
///
/// The output of `cryptsetup`.
pub async fn rekey(
    device: &Path,
    known: &Key,
    passphrase: &Passphrase,
    log: &Sink,
) -> Result<(), Error> {
    let kill = cryptsetup("luksKillSlot", log).arg("--key-file=-").arg(device).arg("0");
    // It may be empty already.
    let _empty = kill.input(known.text().to_vec()).run().await;
    add(device, &known.text(), &passphrase.text(), 0, log).await
}

/// Confirms that the kernel protects the open partition with this name as `kind`: the header
/// was read before `cryptsetup` read it again. Blocks.
///
/// # Errors
///
/// An error of the kernel, or the cipher that it uses instead.
pub fn confirm(name: &str, kind: Kind) -> io::Result<()> {
    if kind == Kind::Insecure {
        return Ok(());
    }
    let table = DeviceMapper::open()?.table(name)?;
    if protects(&table, kind) {
        return Ok(());
    }
    // No more of it: a kernel without a keyring shows the key behind these.
    let start: Vec<&str> = table.split(' ').take(2).collect();
    Err(io::Error::other(format!("the kernel has opened it as \"{}\"", start.join(" "))))
}

/// Whether this table of the device mapper is one of `kind`.
fn protects(table: &str, kind: Kind) -> bool {
    let tags = |word: &str| word.starts_with("integrity:") && word.ends_with(":aead");
    let has_tags = table.split(' ').any(tags);
    let mut words = table.split(' ');
    let (target, cipher) = (words.next(), words.next().unwrap_or_default());
    // `cryptsetup` names a cipher with tags as the kernel's list of ciphers does.
    let cipher = cipher.strip_prefix("capi:").unwrap_or(cipher);
    target == Some("crypt")
        && match kind {
            Kind::Insecure => false,
            Kind::Encrypted => cipher == CIPHER && !has_tags,
            Kind::Authenticated => cipher == CIPHER_AUTHENTICATED && has_tags,
        }
}

/// Closes the partition with this name; nothing may use it any more. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn close(name: &str) -> io::Result<()> {
    let mapper = DeviceMapper::open()?;
    for name in [name, &format!("{name}{INTEGRITY}")] {
        match mapper.remove(name) {
            Ok(()) => {}
            // `encrypted` has no integrity device.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {}
            Err(error) => return Err(error),
        }
        // The node is `cryptsetup`'s, and the next one creates it again.
        let _absent = std::fs::remove_file(Path::new("/dev/mapper").join(name));
    }
    Ok(())
}

/// Whether the partition with this name is open.
#[must_use]
pub fn is_open(name: &str) -> bool {
    let devices = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    devices.map(|device| device.path().join("dm/name")).any(|file| {
        std::fs::read_to_string(file).is_ok_and(|found| found.trim_end() == name)
            && path(name).exists()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_ciphers_are_loaded_where_the_processor_has_their_instructions() {
        let with = "processor\t: 0\nflags\t\t: fpu aes sse4_1 xsave\n";
        let without = "processor\t: 0\nflags\t\t: fpu sse4_1 xsave\nbugs: aes\n";
        assert!(modules(Kind::Authenticated, with).contains(&"aegis128_aesni"));
        assert!(!modules(Kind::Authenticated, without).contains(&"aegis128_aesni"));
        assert!(modules(Kind::Insecure, with).is_empty());
        // The processor of a translated machine: the kernel refuses the second module.
        let translated = "processor\t: 0\nflags\t\t: fpu aes sse4_1\n";
        let loaded = modules(Kind::Authenticated, translated);
        assert!(loaded.contains(&"aesni_intel") && !loaded.contains(&"aegis128_aesni"));
        assert!(modules(Kind::Encrypted, with).ends_with(&["aesni_intel"]));
    }

    #[test]
    fn a_partition_that_the_kernel_does_not_protect_as_its_kind_is_not_confirmed() {
        let encrypted = "crypt aes-xts-plain64 :64:logon:cryptsetup:07-d0 0 254:4 32768 3 \
                         sector_size:4096 no_read_workqueue no_write_workqueue";
        let authenticated = "crypt capi:aegis128-random :16:logon:cryptsetup:07-d0 0 253:0 0 4 \
                             integrity:32:aead sector_size:4096 no_read_workqueue \
                             no_write_workqueue";
        assert!(protects(encrypted, Kind::Encrypted));
        assert!(protects(authenticated, Kind::Authenticated));
        assert!(!protects(encrypted, Kind::Authenticated));
        assert!(!protects(authenticated, Kind::Encrypted));
        for table in [
            "crypt cipher_null-ecb - 0 254:4 32768",
            "crypt capi:aegis128-random :16:logon:x 0 254:4 32768 1 sector_size:4096",
            "linear 254:4 32768",
            "",
        ] {
            for kind in Kind::ALL {
                assert!(!protects(table, kind), "{table} as {kind}");
            }
        }
    }
}
