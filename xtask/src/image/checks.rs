//! The checks of `cargo xtask image`: of its options before a build, and of parameters before
//! they are in an image.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, anyhow};
use polis_image::Kind;

use super::options::Build;
use super::programs::{POLISCTL, programs, workspace};
use crate::host;

/// Checks what would end a build, which takes minutes or half an hour, before it begins.
pub(super) fn can_be_made(arguments: &Build) -> Result<()> {
    polis_image::layout::plan("", 0, arguments.size).map_err(polis_image::Error::from)?;
    can_be_as_large(&workspace().join("target"), arguments.size)?;
    are_different(arguments)?;
    for file in [&arguments.out, &arguments.bundle].into_iter().flatten() {
        can_be_written(file)?;
    }
    match &arguments.out {
        Some(out) => can_be_as_large(folder_of(out), arguments.size),
        None => Ok(()),
    }
}

/// Reads a file, and no device or pipe: one may have no end, and `polisctl` reads it again.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let cannot = || format!("cannot read {}", path.display());
    let metadata = fs::metadata(path).with_context(cannot)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(anyhow!("it is not a file"))
            .with_context(cannot)
            .context(host::Help("name a file".to_owned()));
    }
    fs::read(path).with_context(cannot)
}

/// Checks that no two options name one file, which one of them would replace.
fn are_different(arguments: &Build) -> Result<()> {
    let mut options = BTreeMap::new();
    for (option, file) in [
        ("--parameters", &arguments.parameters),
        ("--out", &arguments.out),
        ("--bundle", &arguments.bundle),
    ] {
        let Some(file) = file else { continue };
        let place = std::path::absolute(file).context("cannot read the current folder")?;
        if let Some(other) = options.insert(place, option) {
            let text = format!("{other} and {option} both name {}", file.display());
            return Err(host::Usage(text).into());
        }
    }
    Ok(())
}

/// Checks that a file can be written at `path`: not a device, whose place the file would take.
fn can_be_written(path: &Path) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let is_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if is_folder || path.exists() && !path.is_file() {
        return Err(anyhow!("it is not a file")).with_context(cannot).context(host::Help(
            "name a file; an image is copied from there to a device: dd if=FILE of=DEVICE bs=4M"
                .to_owned(),
        ));
    }
    tempfile::tempfile_in(folder_of(path)).map(drop).with_context(cannot)
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Checks that a file of `size` bytes, which stores no zeros, can be in `folder`.
fn can_be_as_large(folder: &Path, size: u64) -> Result<()> {
    let cannot = || format!("cannot make a disk of {size} bytes in {}", folder.display());
    let made = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    made.with_context(cannot)?
        .set_len(size)
        .with_context(cannot)
        .context(host::Help("use a smaller size; every disk may be enlarged later".to_owned()))
}

/// Checks a parameters file as a node does, so that an error is reported here and not by the
/// first boot of a machine.
pub(super) fn check_parameters(path: &Path) -> Result<()> {
    // The node's parser, without a dependency on the node's crate.
    let checked = Command::new(programs(Kind::Product).join(POLISCTL))
        .args(["--output", "json", "parameters", "check"])
        .arg(path)
        .output()
        .context("cannot start polisctl")?;
    if !checked.status.success() {
        return Err(of_polisctl(&String::from_utf8_lossy(&checked.stderr)));
    }
    fits_the_esp(path, &checked.stdout)
}

/// Refuses parameters in the format of a whole disk, by the document that `polisctl` has printed
/// about them: from a file of the ESP a node reads the message or its text.
fn fits_the_esp(path: &Path, document: &[u8]) -> Result<()> {
    let document: serde_json::Value =
        serde_json::from_slice(document).context("cannot understand the answer of polisctl")?;
    if document["format"] != "disk" {
        return Ok(());
    }
    let path = path.display();
    Err(anyhow!("{path} is a disk image with node parameters; allowed are the message or its text"))
        .context(host::Help("write the file with `--format message`".to_owned()))
}

/// The error that `polisctl` has printed, with its next step as that of this command.
fn of_polisctl(printed: &str) -> anyhow::Error {
    let text = printed.trim().trim_start_matches("error: ");
    match text.split_once("\nhelp: ") {
        None => anyhow!(text.to_owned()),
        Some((text, help)) => anyhow!(text.to_owned()).context(host::Help(help.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{build_and_report, tests::parsed};
    use super::*;

    #[test]
    fn the_next_step_of_polisctl_is_that_of_this_command() {
        let printed = "error: p: invalid parameters\ncause: it is short\nhelp: write it again\n";
        let error = of_polisctl(printed);
        assert_eq!(error.downcast_ref::<host::Help>().unwrap().0, "write it again");
        assert_eq!(error.root_cause().to_string(), "p: invalid parameters\ncause: it is short");
        assert_eq!(of_polisctl("error: x\n").to_string(), "x");
    }

    #[test]
    fn parameters_that_a_node_does_not_read_from_the_esp_are_refused() {
        let check = |format: &str| {
            let document = format!(r#"{{"file": "p", "format": "{format}", "valid": true}}"#);
            fits_the_esp(Path::new("p"), document.as_bytes())
        };
        check("message").unwrap();
        check("text").unwrap();
        let error = check("disk").unwrap_err();
        assert_eq!(
            error.root_cause().to_string(),
            "p is a disk image with node parameters; allowed are the message or its text"
        );
        assert!(error.is::<host::Help>(), "{error:?}");
    }

    #[test]
    fn what_would_end_a_build_is_found_before_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let [file, absent] = ["image", "no/image"].map(|name| folder.path().join(name));
        can_be_written(&file).unwrap();
        fs::write(&file, "").unwrap();
        can_be_written(&file).unwrap();
        let refused = |path: &Path| format!("{:#}", can_be_written(path).unwrap_err());
        assert!(refused(&absent).contains("cannot write"), "{}", refused(&absent));
        let new = folder.path().join("new/");
        for other in [folder.path(), &*new, Path::new("/dev/null")] {
            assert!(refused(other).contains("it is not a file"), "{}", refused(other));
        }
        let absent = absent.display().to_string();
        for (options, said) in [
            (["--size", "1"], "not a multiple of 512"),
            (["--size", "18446744073709551104"], "cannot make a disk of 18446744073709551104"),
            (["--keys", &absent], "cannot read"),
            (["--parameters", "/dev/zero"], "it is not a file"),
            (["--out", &absent], "cannot write"),
            (["--bundle", &absent], "cannot write"),
            (["--parameters", &absent], "cannot read"),
        ] {
            let error = build_and_report(&parsed(&options).unwrap()).unwrap_err();
            assert!(format!("{error:#}").contains(said), "{options:?}: {error:#}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_options_that_name_one_file_are_wrong_usage() {
        let here = std::path::absolute("file").unwrap().display().to_string();
        for options in [
            &["--out", "file", "--bundle", &here][..],
            &["--out", "./file", "--parameters", "file"],
            &["--bundle", "file", "--parameters", "file", "--out", "other"],
        ] {
            let error = build_and_report(&parsed(options).unwrap()).unwrap_err();
            assert!(error.is::<host::Usage>(), "{options:?}: {error}");
            assert!(error.to_string().contains(" both name "), "{options:?}: {error}");
        }
        are_different(&parsed(&["--out", "file", "--bundle", "file.bundle"]).unwrap()).unwrap();
    }
}
