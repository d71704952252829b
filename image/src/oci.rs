//! Container images of the system, in the layout of the Open Container Initiative (OCI).
//!
//! Pods need an image before there is a registry: the pause container of each pod, and the
//! demo. The builder makes both from our own programs, and `node` imports them at the start
//! of containerd.
//!
//! ```text
//! oci-layout                 its version
//! index.json                 the images by name ---+
//! blobs/sha256/<manifest>    <---------------------+---> config, layer
//! blobs/sha256/<config>      what to run, as whom
//! blobs/sha256/<layer>       a tar archive, uncompressed: the root is compressed already
//! ```
//!
//! In the system the layout is a folder, which `node` reads file by file; [`archive`] makes
//! one file of it for other tools.
//!
//! Invariants:
//! - The same programs give the same bytes: no time, no owner, fields in a fixed order.
//! - A blob's name is the hash of its bytes.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use crate::{
    digest::hash,
    error::{At as _, Result},
    tar,
    tree::Tree,
};

/// Where the layout is in the root of the full variant.
pub const FOLDER: &str = "usr/share/polis/images";

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The annotation with the full reference, as containerd's own tools read it.
const NAME: &str = "io.containerd.image.name";
/// Images have a date; these have none that would mean anything.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// A container image with one static program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// The full reference.
    pub reference: &'static str,
    /// The name of the program; it is the only file, at the root.
    pub program: &'static str,
    /// The user and the group that run it.
    pub user: u32,
    /// The TCP port that it listens on, for people.
    pub port: Option<u16>,
}

/// The images of the system, in the order of their names.
pub const IMAGES: [Image; 2] = [
    Image { reference: "polis.internal/demo:1", program: "demo", user: 65534, port: Some(8080) },
    // A user of its own: it owns no file, and may signal no other process.
    Image { reference: "polis.internal/pause:1", program: "pause", user: 65535, port: None },
];

impl Image {
    /// Its content, with the program from this folder.
    fn contents(&self, programs: &Path) -> Contents {
        let mut root = Tree::default();
        root.program(self.program, programs.join(self.program));
        Contents {
            reference: self.reference.to_owned(),
            root,
            user: format!("{0}:{0}", self.user),
            port: self.port,
            entrypoint: vec![format!("/{}", self.program)],
            command: Vec::new(),
        }
    }
}

/// Any container image of one layer.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The full reference.
    pub reference: String,
    /// The files. Everything is root's.
    pub root: Tree,
    /// The user that runs it, as `USER` or `USER:GROUP`; root if empty.
    pub user: String,
    /// The TCP port that it listens on, for people.
    pub port: Option<u16>,
    /// The program, with arguments that a pod cannot replace alone.
    pub entrypoint: Vec<String>,
    /// Further arguments, which a pod may replace; or the program, without an entrypoint.
    pub command: Vec<String>,
}

#[derive(Serialize)]
struct Layout {
    #[serde(rename = "imageLayoutVersion")]
    version: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    media_type: &'static str,
    manifests: Vec<Descriptor>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    media_type: &'static str,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: &'static str,
    digest: String,
    size: usize,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct Config {
    created: &'static str,
    architecture: &'static str,
    os: &'static str,
    config: Process,
    rootfs: Rootfs,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Process {
    #[serde(skip_serializing_if = "String::is_empty")]
    user: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    exposed_ports: BTreeMap<String, Empty>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cmd: Vec<String>,
    working_dir: &'static str,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct Rootfs {
    #[serde(rename = "type")]
    kind: &'static str,
    diff_ids: Vec<String>,
}

/// The layout of `images`, whose programs are files of `programs`, as a tree of its own.
///
/// # Errors
///
/// A program cannot be read.
pub fn layout(images: &[Image], programs: &Path) -> Result<Tree> {
    layout_of(images.iter().map(|image| image.contents(programs)))
}

/// The layout of any images. Images with the same files share a layer.
///
/// # Errors
///
/// A file cannot be read, or has a path that a layer cannot hold.
pub fn layout_of(images: impl IntoIterator<Item = Contents>) -> Result<Tree> {
    let mut blobs = Blobs(Tree::default());
    let mut manifests = Vec::new();
    for image in images {
        manifests.push(blobs.image(image)?);
    }
    let Blobs(mut tree) = blobs;
    tree.text("oci-layout", json(&Layout { version: "1.0.0" })?);
    let index = Index { schema_version: 2, media_type: INDEX, manifests };
    tree.text("index.json", json(&index)?);
    Ok(tree)
}

/// A layout as one file, as other tools import it.
///
/// # Errors
///
/// None with a tree of [`layout`].
pub fn archive(layout: &Tree) -> Result<Vec<u8>> {
    tar::write(layout)
}

struct Blobs(Tree);

impl Blobs {
    /// Adds the blobs of `image`, and returns the descriptor of its manifest.
    fn image(&mut self, image: Contents) -> Result<Descriptor> {
        let Contents { reference, root, user, port, entrypoint, command } = image;
        let layer = self.add(LAYER, tar::write(&root)?);
        let port = port.map(|port| (format!("{port}/tcp"), Empty {}));
        let config = Config {
            created: CREATED,
            architecture: "amd64",
            os: "linux",
            config: Process {
                user,
                exposed_ports: port.into_iter().collect(),
                entrypoint,
                cmd: command,
                working_dir: "/",
            },
            // The layer is uncompressed, so its content has the hash of the blob.
            rootfs: Rootfs { kind: "layers", diff_ids: vec![layer.digest.clone()] },
        };
        let config = self.add(CONFIG, json(&config)?);
        let manifest =
            Manifest { schema_version: 2, media_type: MANIFEST, config, layers: vec![layer] };
        let mut descriptor = self.add(MANIFEST, json(&manifest)?);
        descriptor.annotations.insert(NAME, reference);
        Ok(descriptor)
    }

    fn add(&mut self, media_type: &'static str, bytes: Vec<u8>) -> Descriptor {
        let (hash, size) = (hash(&bytes), bytes.len());
        self.0.text(&format!("blobs/sha256/{hash}"), bytes);
        let digest = format!("sha256:{hash}");
        Descriptor { media_type, digest, size, annotations: BTreeMap::new() }
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    let bytes = serde_json::to_vec(value).map_err(std::io::Error::from);
    bytes.at("describe", Path::new("a container image"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        program::{host, run},
        tree::{Content, Entry},
    };

    fn programs() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("demo"), "a demo").unwrap();
        fs::write(folder.path().join("pause"), "a pause").unwrap();
        folder
    }

    fn text(tree: &Tree, path: &str) -> String {
        let found = tree.iter().find(|(at, _)| *at == path).unwrap();
        let Entry::File { content: Content::Bytes(bytes), .. } = found.1 else {
            panic!("{path} is not a file")
        };
        String::from_utf8(bytes.clone()).unwrap()
    }

    #[test]
    fn a_layout_names_what_it_has_by_its_hash() {
        let programs = programs();
        let layout = layout(&IMAGES, programs.path()).unwrap();
        for (path, entry) in layout.iter() {
            let Some(name) = path.strip_prefix("blobs/sha256/") else { continue };
            let Entry::File { content, .. } = entry else { panic!("{path} is not a file") };
            assert_eq!(hash(&content.read().unwrap()), name);
        }
        // Three of each image, four names of files and folders beside them.
        assert_eq!(layout.iter().count(), 2 * 3 + 4);
    }

    #[test]
    fn an_image_says_what_to_run_and_as_whom() {
        let programs = programs();
        let layout = layout(&IMAGES[..1], programs.path()).unwrap();
        let index: serde_json::Value = serde_json::from_str(&text(&layout, "index.json")).unwrap();
        let manifest = &index["manifests"][0];
        assert_eq!(manifest["annotations"][NAME], "polis.internal/demo:1");
        let blob = |descriptor: &serde_json::Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            text(&layout, &format!("blobs/{}", digest.replace(':', "/")))
        };
        let manifest_text = blob(manifest);
        assert_eq!(manifest["size"], manifest_text.len());
        let manifest: serde_json::Value = serde_json::from_str(&manifest_text).unwrap();
        let config = blob(&manifest["config"]);
        let diff_id = manifest["layers"][0]["digest"].as_str().unwrap();
        insta::assert_snapshot!(config.replace(diff_id, "LAYER"), @r#"{"created":"1970-01-01T00:00:00Z","architecture":"amd64","os":"linux","config":{"User":"65534:65534","ExposedPorts":{"8080/tcp":{}},"Entrypoint":["/demo"],"WorkingDir":"/"},"rootfs":{"type":"layers","diff_ids":["LAYER"]}}"#);
    }

    #[test]
    fn a_layer_has_the_program_and_nothing_else() {
        let programs = programs();
        let layout = layout(&IMAGES[1..], programs.path()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.tar");
        fs::write(&path, archive(&layout).unwrap()).unwrap();
        run(host("tar").arg("-C").arg(folder.path()).arg("-xf").arg(&path)).unwrap();
        let blobs = fs::read_dir(folder.path().join("blobs/sha256")).unwrap();
        let listings = blobs.filter_map(|blob| {
            let mut list = host("tar");
            list.args(["--numeric-owner", "-tf"]).arg(blob.unwrap().path());
            run(&mut list).ok()
        });
        let listings: Vec<_> = listings.collect();
        assert_eq!(listings, [b"pause\n"]);
    }

    #[test]
    fn the_same_programs_give_the_same_bytes_and_others_do_not() {
        let (one, two) = (programs(), programs());
        let bytes = |folder: &Path| archive(&layout(&IMAGES, folder).unwrap()).unwrap();
        assert_eq!(bytes(one.path()), bytes(two.path()));
        fs::write(two.path().join("pause"), "another pause").unwrap();
        assert_ne!(bytes(one.path()), bytes(two.path()));
    }
}
