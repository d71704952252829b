//! The options of `cargo xtask run`, as clap reads them.

use crate::image;

/// Arguments of `cargo xtask run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of nodes.
    #[arg(long, default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) nodes: u8,
    /// How many of them vote in etcd; the others run no etcd member [default: all, but at
    /// most three].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=7))]
    pub(crate) voters: Option<u8>,
    /// Memory of a node in MiB [default: 1024, of several 512; with Kubernetes 3072 for the
    /// first node, 1536 for each other].
    #[arg(long, value_name = "MiB",
          value_parser = clap::value_parser!(u32).range(256..=1_048_576))]
    pub(super) memory: Option<u32>,
    /// Processors of a node [default: 2; of several, with Secure Boot or with a TPM 1]. A boot
    /// is faster with two: drivers load in parallel to the steps that wait for them; not so
    /// behind firmware whose processors wait for each other.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) cpus: Option<u32>,
    /// Start through UEFI firmware, as hardware does (the default).
    #[arg(long, conflicts_with = "direct")]
    pub(super) uefi: bool,
    /// Let QEMU load the kernel: some seconds faster, without firmware.
    #[arg(long)]
    pub(super) direct: bool,
    /// Make keys for this run, sign the image, enrol the keys in the firmware and turn Secure
    /// Boot on. The first boot restarts once, behind the enrolment. `--keep` keeps all of it.
    #[arg(long, conflicts_with = "direct")]
    pub(super) secure_boot: bool,
    /// The accelerator.
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    pub(super) accel: Accel,
    /// Keep the disk of the last run with this name, and boot it again. `--kubernetes`,
    /// `--secure-boot` and `--tpm` have to be as in that run.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Give the machine an emulated TPM 2.0; `--keep` keeps it, too. With several processors
    /// (`--cpus`, `--kubernetes`) and without KVM, words for them are on the kernel command line:
    /// register 12 is then not zero, and `polisctl node attest` reports an addition.
    #[arg(long)]
    pub(super) tpm: bool,
    /// Use the image with Kubernetes, give the nodes its roles, deploy the demo workload and
    /// print its answer. The first build of that image takes some 27 minutes of processor
    /// time; under emulation the rest takes some two minutes.
    #[arg(long)]
    pub(crate) kubernetes: bool,
    /// Print the serial line, also in a terminal.
    #[arg(long)]
    pub(crate) headless: bool,
    /// Print the serial line and end when the node is ready: with status 0, with 1 if it fails, or
    /// with 3 if the time of --timeout is over. With `--kubernetes`, the end is the answer of the
    /// demo. The machine ends with the command: its power is cut, or with `--keep` it is stopped
    /// in order.
    #[arg(long)]
    pub(crate) until_ready: bool,
    /// How long `--until-ready` waits for the nodes.
    #[arg(long, default_value_t = 600, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) timeout: u64,
    /// Name of the machine, and of its folder in target/run.
    #[arg(long, default_value = "polis", value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(super) packages: image::Packages,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Accel {
    /// KVM where it works, else TCG.
    Auto,
    /// By the processor.
    Kvm,
    /// By translation; works everywhere.
    Tcg,
}

/// A name becomes a folder: letters, digits, `-` and `_`.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if text.is_empty() || text.len() > 32 || !text.chars().all(plain) {
        return Err("1 to 32 letters, digits, `-` and `_` are allowed".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::tests::Line;
    use super::*;

    #[test]
    fn a_time_that_no_clock_reaches_is_wrong_usage() {
        for wrong in ["0", "-1", "18446744073709551615"] {
            let option = format!("--timeout={wrong}");
            let error = Line::try_parse_from(["run", &option]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("--timeout"), "{error}");
        }
        Line::try_parse_from(["run", "--timeout", "1000000"]).unwrap();
    }

    #[test]
    fn a_name_is_one_plain_word() {
        assert!(name("polis-2_b").is_ok());
        for bad in ["", "..", "a/b", "a b", &"x".repeat(33)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
