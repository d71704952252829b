//! The options of `cluster configure` about the attestation policy: which systems a machine may
//! have started, and which makers of TPMs are trusted, when it enters the cluster.

use std::path::{Path, PathBuf};

use polis_base::hex;
use polis_proto::v1;
use polis_wire::parameters::{self, AttestationPolicy};
use serde::Serialize;

use crate::error::{Error, Explain as _};
use crate::text::clean;
use crate::{contexts, kernel};

const OPTION: &str = "--attestation-image";

/// The register of the kernel image.
const KERNEL_IMAGE: u32 = 11;

/// Digits of a value that people compare; a program gets all.
const DIGITS: usize = 16;

/// The options of the attestation policy.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Policy {
    /// A system that a machine may have started to enter the cluster, as its TPM proves: an
    /// update bundle, a raw disk image, or a kernel image. Repeatable. These systems and the
    /// makers of --attestation-maker replace the whole policy; nodes that are in stay.
    #[arg(long = "attestation-image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// The certificate of a maker of TPMs, in PEM or DER, which has signed that of the TPM of a
    /// machine that enters. Repeatable. Without it, an emulated TPM passes as well as a real one.
    #[arg(long = "attestation-maker", value_name = "FILE")]
    makers: Vec<PathBuf>,
    /// Take the attestation policy away: machines enter whatever their TPM has proved.
    #[arg(long, conflicts_with_all = ["images", "makers"])]
    no_attestation: bool,
}

impl Policy {
    pub(super) fn is_empty(&self) -> bool {
        self.images.is_empty() && self.makers.is_empty() && !self.no_attestation
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let images = self.images.iter().map(|file| format!("{OPTION} {}", file.display()));
        let makers = self.makers.iter();
        let makers = makers.map(|file| format!("--attestation-maker {}", file.display()));
        let none = self.no_attestation.then(|| "--no-attestation".to_owned());
        images.chain(makers).chain(none).collect()
    }

    /// The policy, if it is named; checked as the leader does.
    pub(super) fn named(&self) -> Result<Option<v1::AttestationPolicy>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let systems = self.images.iter().map(|file| system(file)).collect::<Result<_, _>>()?;
        let makers = self.makers.iter().map(|file| contexts::read_authority(file));
        let makers = makers.collect::<Result<_, _>>()?;
        let policy = v1::AttestationPolicy { systems, makers };
        parameters::attestation_policy(&policy, "the policy")
            .doing(|| "this attestation policy cannot be set".to_owned())?;
        Ok(Some(policy))
    }
}

/// The system in a file, by the name of the file.
fn system(file: &Path) -> Result<v1::attestation_policy::System, Error> {
    let registers = kernel::registers(file)?;
    let value = registers.get(&KERNEL_IMAGE).map(|value| value.to_vec());
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let name = name.chars().map(|c| if matches!(c, ' '..='~') { c } else { '_' });
    Ok(v1::attestation_policy::System {
        name: name.collect(),
        kernel_image: value.unwrap_or_default(),
    })
}

/// The policy of a cluster, as programs read it.
#[derive(Debug, Serialize)]
pub(super) struct View {
    images: Vec<Image>,
    /// The subjects of the certificates.
    makers: Vec<String>,
    /// Why the leader cannot use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    invalid: Option<String>,
}

#[derive(Debug, Serialize)]
struct Image {
    name: String,
    register_11: String,
}

impl View {
    /// The policy in a configuration; `None`: there is none.
    pub(super) fn of(configuration: &v1::ClusterConfiguration) -> Option<Self> {
        let policy = configuration.attestation.as_ref()?;
        let read = match parameters::attestation_policy(policy, "attestation") {
            Ok(read) => read?,
            Err(invalid) => {
                let invalid =
                    Some(format!("{invalid}; no machine enters until another one is set"));
                return Some(Self { images: Vec::new(), makers: Vec::new(), invalid });
            }
        };
        let AttestationPolicy { systems, makers } = read;
        let image = |system: parameters::System| Image {
            name: system.name,
            register_11: hex::encode(&system.kernel_image),
        };
        Some(Self {
            images: systems.into_iter().map(image).collect(),
            makers: makers.iter().map(|maker| clean(&maker.subject)).collect(),
            invalid: None,
        })
    }

    /// The same, for people.
    pub(super) fn text(&self) -> String {
        let image = |Image { name, register_11 }: &Image| {
            format!("image {}… ({name})", register_11.get(..DIGITS).unwrap_or(register_11))
        };
        let images = self.images.iter().map(image);
        let makers = self.makers.iter().map(|maker| format!("maker {maker}"));
        let invalid = self.invalid.iter().map(|invalid| format!("invalid: {invalid}"));
        images.chain(makers).chain(invalid).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::kernel as image;
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn an_attestation_policy_is_checked_before_the_cluster_is_asked() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        std::fs::write(world.path("a.efi"), image(b"a kernel")).unwrap();
        std::fs::write(world.path("same.efi"), image(b"a kernel")).unwrap();
        std::fs::write(world.path("noise"), "noise").unwrap();
        std::fs::write(world.path("maker.der"), cluster.authority()).unwrap();
        let configure = ["cluster", "configure"];
        for (options, said) in [
            (&["--attestation-image", "@noise"][..], "name an update bundle"),
            (&["--attestation-image", "@none"], "none"),
            (
                &["--attestation-image", "@a.efi", "--attestation-image", "@same.efi"],
                "each value once",
            ),
            (&["--attestation-maker", "@noise"], "no certificate"),
            (
                &["--attestation-maker", "@maker.der", "--attestation-maker", "@maker.der"],
                "each certificate once",
            ),
        ] {
            let printed = world.refuses(&[&configure[..], options].concat());
            assert!(printed.contains(said), "{options:?}: {printed}");
        }
        let both = ["--no-attestation", "--attestation-image", "@a.efi"];
        assert_eq!(world.run(&[&configure[..], &both].concat()).status, 2);
        assert_eq!(cluster.asked(), [""; 0]);
        let set = ["--attestation-image", "@a.efi", "--attestation-maker", "@maker.der"];
        let dry = world.runs(&[&configure[..], &set, &["--dry-run"]].concat());
        assert!(dry.contains("--attestation-maker @maker.der"), "{dry}");
        world.runs(&[&configure[..], &set].concat());
        world.runs(&["cluster", "configure", "--no-attestation"]);
        assert_eq!(cluster.asked(), ["ConfigureCluster"; 2]);
    }

    #[test]
    fn a_policy_is_shown_with_its_images_and_makers() {
        let world = World::new();
        std::fs::write(world.path("a.efi"), image(b"a kernel")).unwrap();
        std::fs::write(world.path("maker.der"), Cluster::new(&world).authority()).unwrap();
        let policy = Policy {
            images: vec![world.path("a.efi")],
            makers: vec![world.path("maker.der")],
            no_attestation: false,
        };
        let attestation = policy.named().unwrap();
        let value = attestation.as_ref().unwrap().systems[0].kernel_image.clone();
        let configuration = v1::ClusterConfiguration { attestation, ..Default::default() };
        let view = View::of(&configuration).unwrap();
        assert_eq!(view.images[0].register_11, hex::encode(&value));
        let shown = view.text();
        let digits = &hex::encode(&value)[..16];
        assert!(shown.starts_with(&format!("image {digits}… (a.efi)\nmaker CN=")), "{shown}");
        assert!(View::of(&v1::ClusterConfiguration::default()).is_none());
        let attestation = v1::AttestationPolicy { makers: vec![vec![7]], ..Default::default() };
        let attestation = Some(attestation);
        let damaged = v1::ClusterConfiguration { attestation, ..Default::default() };
        let shown = View::of(&damaged).unwrap().text();
        assert!(shown.starts_with("invalid: ") && shown.ends_with("is set"), "{shown}");
    }
}
