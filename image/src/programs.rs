//! The programs of this workspace as they go into an image.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{At as _, Result},
    manifest::{Kind, Variant},
    oci, program,
    step::{Inputs, Steps},
};

/// Our programs as they go into the image.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) init: PathBuf,
    pub(crate) node: PathBuf,
    /// The folder of those in [`oci::IMAGES`].
    pub(crate) system_images: PathBuf,
}

/// Strips debug information from the programs of a development image: it is four fifths
/// of their size, and size costs boot time under emulation.
pub(crate) fn strip(
    built: Programs,
    kind: Kind,
    variant: Variant,
    out: &Path,
    steps: &Steps<'_>,
) -> Result<Programs> {
    if kind != Kind::Development {
        return Ok(built);
    }
    let Programs { init, node, system_images } = built;
    let folder = out.join("programs");
    let mut pairs = vec![(init, folder.join("init")), (node, folder.join("node"))];
    if variant == Variant::Full {
        let of_images = oci::IMAGES.iter().map(|image| image.program);
        pairs.extend(of_images.map(|name| (system_images.join(name), folder.join(name))));
    }
    let outputs: Vec<PathBuf> = pairs.iter().map(|(_, to)| to.clone()).collect();
    let add = |inputs: Inputs, (from, to): &(PathBuf, PathBuf)| {
        inputs.file(&to.file_name().unwrap_or_default().to_string_lossy(), from, &steps.digests)
    };
    let inputs = pairs.iter().try_fold(Inputs::recipe(&[]), add)?;
    steps.run("strip", inputs, &outputs, || {
        fs::create_dir_all(&folder).at("make", &folder)?;
        for (from, to) in &pairs {
            program::run(program::host("strip").arg("-o").arg(to).arg(from))?;
        }
        Ok(())
    })?;
    Ok(Programs { init: folder.join("init"), node: folder.join("node"), system_images: folder })
}
