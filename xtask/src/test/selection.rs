//! The arguments of `cargo xtask test`: parts, then at most one filter.

use clap::ValueEnum as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Part {
    /// Formatting, lints, licences.
    Lint,
    /// Tests without an image: seconds.
    Unit,
    /// Tests with an emulated TPM, on the host.
    Tpm,
    /// The image, built twice: the same inputs must give the same bytes.
    Image,
    /// Tests with a real etcd, on the host.
    Etcd,
    /// Stories of whole machines in QEMU: minutes.
    E2e,
    /// Tests with a real control plane of Kubernetes, on the host.
    Kube,
}

impl Part {
    pub(super) const ALL: [Self; 7] =
        [Self::Lint, Self::Unit, Self::Tpm, Self::Image, Self::Etcd, Self::E2e, Self::Kube];

    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Bytes that must be free before it begins, however much was built before.
    pub(super) fn space(self) -> u64 {
        match self {
            // The disks and saved machines of the stories that run side by side.
            Self::E2e => 3 << 30,
            Self::Lint | Self::Unit | Self::Tpm | Self::Image | Self::Etcd | Self::Kube => 1 << 30,
        }
    }

    /// Whether its tests can be filtered by name.
    fn has_tests(self) -> bool {
        match self {
            Self::Lint | Self::Image => false,
            Self::Unit | Self::Tpm | Self::Etcd | Self::Kube | Self::E2e => true,
        }
    }
}

/// The selection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) parts: Vec<Part>,
    pub(super) filter: Option<String>,
}

impl Wanted {
    /// Parses the arguments: parts, then at most one filter.
    pub(super) fn read(arguments: &[String]) -> Result<Self, String> {
        let all = Part::ALL.map(Part::name).join(", ");
        let parts: Vec<Part> = arguments
            .iter()
            .map_while(|word| Part::ALL.into_iter().find(|part| part.name() == *word))
            .collect();
        let filter = match &arguments[parts.len()..] {
            [] => None,
            // A filter alone is one of every part that has tests.
            [filter] => Some(filter.clone()),
            [filter, more, ..] => {
                return Err(format!(
                    "`{more}` comes after the filter `{filter}`: the parts come first ({all}), \
                     then one filter"
                ));
            }
        };
        if let (Some(filter), Some(part)) = (&filter, parts.iter().find(|part| !part.has_tests())) {
            let part = part.name();
            return Err(format!("`{filter}` is a filter, and `{part}` has no tests to filter"));
        }
        let parts = match (&filter, &parts[..]) {
            (Some(_), []) => Part::ALL.into_iter().filter(|part| part.has_tests()).collect(),
            (None, []) => Part::ALL.to_vec(),
            (_, [_, ..]) => parts,
        };
        Ok(Self { parts, filter })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &str) -> Result<Wanted, String> {
        Wanted::read(&arguments.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn every_part_that_is_named_is_run_and_nothing_else() {
        assert_eq!(read("").unwrap().parts, Part::ALL);
        let wanted = read("lint unit").unwrap();
        assert_eq!(wanted, Wanted { parts: vec![Part::Lint, Part::Unit], filter: None });
        let wanted = read("unit e2e guru").unwrap();
        assert_eq!(wanted.parts, [Part::Unit, Part::E2e]);
        assert_eq!(wanted.filter.as_deref(), Some("guru"));
        let wanted = read("guru").unwrap();
        assert_eq!(wanted.parts, [Part::Unit, Part::Tpm, Part::Etcd, Part::E2e, Part::Kube]);
        assert_eq!(wanted.filter.as_deref(), Some("guru"));
    }

    #[test]
    fn invalid_arguments_are_refused_with_what_is_allowed() {
        for (arguments, expected) in [
            ("unit guru e2e", "the parts come first"),
            ("lint guru", "`lint` has no tests to filter"),
        ] {
            let error = read(arguments).unwrap_err();
            assert!(error.contains(expected), "{arguments}: {error}");
        }
    }
}
