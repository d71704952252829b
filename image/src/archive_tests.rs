//! Tests of `payload` against an archive that changes: a small Debian archive on this
//! host, made by the test itself and served to the host's own apt.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
};

use tempfile::TempDir;

use crate::{
    Error, Lock, Package, Silent,
    apt::Trust,
    digest::hash,
    error::Result,
    lock::Origin,
    manifest::Variant,
    packages::{Category, Part, Selection},
    payload::{Payload, Source},
    program::{self, LIBRARIES},
};

/// A payload of two packages, one with a program.
const SELECTION: Selection = Selection(&[Part {
    variant: Variant::Base,
    packages: &[(Category::Node, "tool"), (Category::Library, "libone1")],
    programs: &["usr/bin/tool"],
    tools: &[],
}]);

/// The same payload with the firmware of a device.
const WITH_FIRMWARE: Selection = Selection(&[Part {
    variant: Variant::Base,
    packages: &[
        (Category::Node, "tool"),
        (Category::Library, "libone1"),
        (Category::Device, "firmware-one"),
    ],
    programs: &["usr/bin/tool"],
    tools: &[],
}]);

/// The tools that the tests run on this host.
const TOOLS: &[&str] = &["/usr/bin/apt-get", "/usr/bin/dpkg-deb", "/usr/lib/apt/apt-helper"];

/// The smallest ELF file that is a program with these needed libraries.
fn elf(needs: &[&str]) -> Vec<u8> {
    const HEADER: u64 = 64;
    let mut strings = vec![0];
    let mut dynamic = Vec::new();
    for need in needs {
        // DT_NEEDED, and where its name is.
        dynamic.extend(1_u64.to_le_bytes());
        dynamic.extend((strings.len() as u64).to_le_bytes());
        strings.extend(need.bytes().chain([0]));
    }
    dynamic.extend([0; 16]);
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend(3_u16.to_le_bytes());
    file.extend(62_u16.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    file.extend([0; 16]);
    let strings_at = HEADER + dynamic.len() as u64;
    file.extend((strings_at + strings.len() as u64).to_le_bytes());
    file.extend([0; 4]);
    // Sizes of the headers; zero segments, and three sections, the last with names.
    for half in [64_u16, 56, 0, 64, 3, 2] {
        file.extend(half.to_le_bytes());
    }
    let section = |kind: u32, at: u64, size: usize, link: u32, entry: u64| {
        let mut header = Vec::new();
        header.extend(0_u32.to_le_bytes());
        header.extend(kind.to_le_bytes());
        header.extend([0; 16]);
        header.extend(at.to_le_bytes());
        header.extend((size as u64).to_le_bytes());
        header.extend(link.to_le_bytes());
        header.extend([0; 12]);
        header.extend(entry.to_le_bytes());
        header
    };
    let sections = [
        section(0, 0, 0, 0, 0),
        section(6, HEADER, dynamic.len(), 2, 16),
        section(3, strings_at, strings.len(), 0, 0),
    ];
    [file, dynamic, strings, sections.concat()].concat()
}

/// A file of a package, or a link.
enum Content {
    Bytes(Vec<u8>),
    Link(&'static str),
}

#[derive(Clone)]
struct Deb {
    name: &'static str,
    version: &'static str,
    depends: &'static str,
    bytes: Vec<u8>,
}

impl Deb {
    fn build(
        name: &'static str,
        version: &'static str,
        depends: &'static str,
        files: &[(&str, Content)],
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("DEBIAN")).unwrap();
        let depends_field = if depends.is_empty() { "" } else { "Depends: " };
        let control = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\n\
             Maintainer: Test <test@example.org>\nDescription: of a test\n\
             {depends_field}{depends}\n"
        );
        fs::write(root.join("DEBIAN/control"), format!("{}\n", control.trim_end())).unwrap();
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content {
                Content::Bytes(bytes) => fs::write(path, bytes).unwrap(),
                Content::Link(target) => std::os::unix::fs::symlink(target, path).unwrap(),
            }
        }
        let deb = folder.path().join("deb");
        let mut dpkg = program::host("dpkg-deb");
        dpkg.args(["--root-owner-group", "-Znone", "--build"]).arg(&root).arg(&deb);
        program::run(&mut dpkg).unwrap();
        Self { name, version, depends, bytes: fs::read(deb).unwrap() }
    }

    /// A version of `tool` that needs these libraries.
    fn tool(version: &'static str, depends: &'static str, needs: &[&str]) -> Self {
        let files = [
            ("usr/bin/tool", Content::Bytes(elf(needs))),
            ("usr/share/doc/tool/copyright", Content::Bytes(version.into())),
        ];
        Self::build("tool", version, depends, &files)
    }

    fn library(version: &'static str) -> Self {
        let path = format!("{LIBRARIES}/libone.so.1");
        Self::build("libone1", version, "", &[(&path, Content::Bytes(elf(&[])))])
    }

    fn path(&self) -> String {
        format!("pool/main/{}_{}_amd64.deb", self.name, self.version)
    }

    fn index(&self) -> String {
        let Self { name, version, depends, bytes } = self;
        let depends =
            if depends.is_empty() { String::new() } else { format!("Depends: {depends}\n") };
        format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\n{depends}\
             Maintainer: Test <test@example.org>\nFilename: {}\nSize: {}\nSHA256: {}\n\
             Description: of a test\n\n",
            self.path(),
            bytes.len(),
            hash(bytes)
        )
    }

    fn locked(&self, category: Category) -> Package {
        Package {
            category,
            name: self.name.to_owned(),
            version: self.version.to_owned(),
            origin: Origin::Archive,
            size: self.bytes.len() as u64,
            sha256: hash(&self.bytes),
            path: self.path(),
        }
    }
}

/// Archives in the folders of one server, and a builder that asks it.
struct World {
    folder: TempDir,
    server: String,
    source: Source,
}

impl World {
    /// A lock of `tool` and `libone1`, and a mirror without any package.
    fn new(tool: &Deb, library: &Deb) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lock =
            Lock { packages: vec![tool.locked(Category::Node), library.locked(Category::Library)] };
        let path = folder.path().join("payload.lock");
        fs::write(&path, lock.print()).unwrap();
        let server = serve(folder.path().join("served"));
        let mut source = Source::new(path, folder.path().join("cache"));
        source.selection = SELECTION;
        source.trust = Trust::Test;
        source.mirror = Some(format!("{server}/debian"));
        let world = Self { folder, server, source };
        world.publish(&[]);
        world
    }

    /// The mirror now has only these packages.
    fn publish(&self, debs: &[Deb]) {
        let served = self.folder.path().join("served");
        for old in [served.join("debian"), served.join("debian-security")] {
            if old.exists() {
                fs::remove_dir_all(old).unwrap();
            }
        }
        suite(&served.join("debian"), "trixie", debs);
        suite(&served.join("debian"), "trixie-updates", &[]);
        suite(&served.join("debian-security"), "trixie-security", &[]);
    }

    /// An archive of old versions that has these packages, and lacks an index.
    fn snapshot(&mut self, debs: &[Deb]) {
        pool(&self.folder.path().join("served/old/debian"), debs);
        self.source.snapshot = Some(format!("{}/old/debian", self.server));
    }

    fn lock(&self) -> Lock {
        self.source.read().unwrap()
    }

    fn prepare(&self) -> Result<Payload> {
        self.source.prepare(&self.lock(), &Silent)
    }

    fn trees(&self) -> usize {
        fs::read_dir(self.source.cache.join("trees")).map_or(0, Iterator::count)
    }
}

fn pool(root: &Path, debs: &[Deb]) {
    for deb in debs {
        let path = root.join(deb.path());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &deb.bytes).unwrap();
    }
}

fn suite(root: &Path, name: &str, debs: &[Deb]) {
    pool(root, debs);
    let folder = root.join("dists").join(name);
    let index: String = debs.iter().map(Deb::index).collect();
    let mut release = format!(
        "Origin: Debian\nSuite: {name}\nCodename: {name}\nArchitectures: amd64\n\
         Components: main non-free-firmware\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n"
    );
    for (component, index) in [("main", index.as_str()), ("non-free-firmware", "")] {
        let place = format!("{component}/binary-amd64/Packages");
        fs::create_dir_all(folder.join(&place).parent().unwrap()).unwrap();
        fs::write(folder.join(&place), index).unwrap();
        release += &format!(" {} {} {place}\n", hash(index.as_bytes()), index.len());
    }
    fs::write(folder.join("Release"), release).unwrap();
}

/// Serves the files of a folder until the tests end, and returns the URL.
fn serve(folder: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let folder = folder.clone();
            // A client that went away does not need an answer.
            thread::spawn(move || answer(&stream, &folder).unwrap_or_default());
        }
    });
    format!("http://{address}")
}

fn answer(stream: &TcpStream, folder: &Path) -> io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let mut stream = stream;
    while let Some(request) = lines.next().transpose()? {
        while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
        let path = request.split(' ').nth(1).unwrap_or_default().trim_start_matches('/');
        let (status, bytes) = match fs::read(folder.join(path)) {
            Ok(bytes) => ("200 OK", bytes),
            Err(_) => ("404 Not Found", Vec::new()),
        };
        let length = bytes.len();
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n")?;
        stream.write_all(&bytes)?;
    }
    Ok(())
}

/// Whether this host can run these tests; prints a line if it cannot.
fn runs_here() -> bool {
    let missing = TOOLS.iter().find(|tool| !Path::new(tool).exists());
    if let Some(missing) = missing {
        let thread = thread::current();
        let test = thread.name().unwrap_or_default();
        // Past the capture of a test that passes.
        writeln!(io::stderr(), "{test}: skipped, this host has no {missing}").unwrap();
    }
    missing.is_none()
}

fn shown(payload: &Payload) -> Vec<String> {
    payload.moved.iter().map(ToString::to_string).collect()
}

#[test]
fn a_mirror_that_has_every_locked_package_gives_the_payload_of_the_lock() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let world = World::new(&tool, &library);
    world.publish(&[tool, library]);
    let payload = world.prepare().unwrap();
    assert_eq!(payload.root, world.source.tree(&world.lock()));
    assert_eq!(payload.lock, world.lock());
    assert!(payload.moved.is_empty());
    assert!(payload.root.join(LIBRARIES).join("libone.so.1").exists());
}

#[test]
fn a_build_goes_on_with_what_the_archive_has_today_and_says_what_moved() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), library]);
    let payload = world.prepare().unwrap();
    assert_eq!(shown(&payload), ["tool 1 -> 2"]);
    let terms = fs::read_to_string(payload.root.join("usr/share/doc/tool/copyright")).unwrap();
    assert_eq!(terms, "2");
    assert!(payload.listing().contains(" locked=1\n"));
    assert!(!world.source.tree(&world.lock()).exists());
    assert_eq!(world.source.root().unwrap(), payload.root);

    // The next build uses the same, independent of the mirror's content.
    world.publish(&[]);
    let again = world.source.ready(&world.lock()).unwrap();
    assert_eq!((&again.root, &again.moved), (&payload.root, &payload.moved));
    // But not where the lock must be kept.
    world.source.locked = true;
    assert!(world.source.ready(&world.lock()).is_none());
}

#[test]
fn a_build_that_must_keep_the_lock_names_every_package_that_moved() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), Deb::library("3")]);
    world.source.locked = true;
    let error = world.prepare().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the mirror no longer has these packages of the lock:\n  tool 1 -> 2\n  libone1 1 -> 3"
    );
    let help = error.help().unwrap();
    assert!(help.contains("--snapshot") && help.contains("--update-payload"), "{help}");
    assert_eq!(world.trees(), 0);

    // Also where the archive has no version of a package at all.
    world.publish(&[Deb::tool("2", "", &["libone.so.1"])]);
    let error = world.prepare().unwrap_err().to_string();
    assert!(error.contains("\n  tool 1 -> ") && error.contains("\n  libone1 1 -> "), "{error}");
}

#[test]
fn a_snapshot_archive_keeps_a_build_at_the_lock() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), library]);
    world.snapshot(&[tool]);
    world.source.locked = true;
    let payload = world.prepare().unwrap();
    assert_eq!(payload.lock, world.lock());
    assert!(payload.moved.is_empty());
}

#[test]
fn a_snapshot_archive_without_the_version_leaves_what_the_mirror_has_today() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), library]);
    world.snapshot(&[]);
    assert_eq!(shown(&world.prepare().unwrap()), ["tool 1 -> 2"]);
}

#[test]
fn other_bytes_under_a_locked_name_are_refused() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let forged = Deb::tool("1", "", &[]);
    assert_ne!(forged.bytes, tool.bytes);
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), library.clone()]);
    world.snapshot(std::slice::from_ref(&forged));
    let error = world.prepare().unwrap_err();
    assert!(matches!(&error, Error::Fetch { package, .. } if package == "tool"), "{error}");
    assert!(error.to_string().contains("Hash Sum mismatch"), "{error}");
    assert_eq!(world.trees(), 0);

    // The mirror itself is trusted no more than a snapshot is.
    world.source.snapshot = None;
    world.publish(&[forged, library]);
    let error = world.prepare().unwrap_err();
    assert!(matches!(&error, Error::Fetch { package, .. } if package == "tool"), "{error}");
    assert_eq!(world.trees(), 0);
}

#[test]
fn a_mirror_without_the_firmware_of_devices_is_named_with_the_component() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let files = [("usr/lib/firmware/one.fw", Content::Bytes(b"one".to_vec()))];
    let firmware = Deb::build("firmware-one", "1", "", &files);
    let mut world = World::new(&tool, &library);
    let mut lock = world.lock();
    lock.packages.push(firmware.locked(Category::Device));
    fs::write(&world.source.lock, lock.print()).unwrap();
    world.source.selection = WITH_FIRMWARE;
    world.publish(&[tool, library]);
    let error = world.prepare().unwrap_err();
    let expected = format!(
        "the mirror {}/debian has no package firmware-one in its component non-free-firmware",
        world.server
    );
    assert_eq!(error.to_string(), expected);
    let help = error.help().unwrap();
    assert!(help.contains("non-free-firmware: --mirror URL"), "{help}");
    assert_eq!(world.trees(), 0);
}

#[test]
fn a_package_that_the_archive_has_in_no_version_is_named() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let world = World::new(&tool, &library);
    world.publish(&[tool]);
    let error = world.prepare().unwrap_err();
    assert_eq!(error.to_string(), "the archive has no package libone1");
    assert!(error.help().unwrap().contains("--snapshot"));
    assert_eq!(world.trees(), 0);
}

#[test]
fn a_new_version_brings_the_packages_that_it_has_come_to_need() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let world = World::new(&tool, &library);
    let tool = Deb::tool("2", "libone1, libtwo2t64, other", &["libone.so.1", "libtwo.so.2"]);
    let terms = ("usr/share/doc/two-common/copyright", Content::Bytes(b"free".to_vec()));
    let file = format!("{LIBRARIES}/libtwo.so.2.0");
    let link = format!("{LIBRARIES}/libtwo.so.2");
    let two = Deb::build(
        "libtwo2t64",
        "2.0",
        "two-common",
        &[
            (&file, Content::Bytes(elf(&["libone.so.1"]))),
            (&link, Content::Link("libtwo.so.2.0")),
            ("usr/share/doc/libtwo2t64", Content::Link("two-common")),
        ],
    );
    let common = Deb::build("two-common", "2.0", "", &[terms]);
    // Apt would install it; the image does not need it.
    let other = Deb::build("other", "1", "", &[]);
    world.publish(&[tool, library, two, common, other]);
    let payload = world.prepare().unwrap();
    assert_eq!(
        shown(&payload),
        [
            "tool 1 -> 2",
            "libtwo2t64 (not in the lock) -> 2.0",
            "two-common (not in the lock) -> 2.0"
        ]
    );
    assert!(payload.root.join(&link).exists());
    assert!(payload.root.join("usr/share/doc/libtwo2t64/copyright").exists());
    let again = world.source.ready(&world.lock()).unwrap();
    assert_eq!(again.moved, payload.moved);
}

#[test]
fn a_library_that_no_dependency_brings_stops_the_build() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let world = World::new(&tool, &library);
    // The package exists, but nothing depends on it.
    let file = format!("{LIBRARIES}/libtwo.so.2");
    let two = Deb::build("libtwo2", "2", "", &[(&file, Content::Bytes(elf(&[])))]);
    world.publish(&[Deb::tool("2", "", &["libtwo.so.2"]), library, two]);
    let error = world.prepare().unwrap_err();
    assert!(matches!(error, Error::Library { library, .. } if library == "libtwo.so.2"));
    assert!(!world.source.cache.join("settled").exists());
}

#[test]
fn the_same_bytes_at_another_place_of_the_archive_are_of_the_lock() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[tool, library]);
    let lock = world.lock().print().replace("pool/main/tool", "pool/updates/main/tool");
    fs::write(&world.source.lock, lock).unwrap();
    world.source.locked = true;
    let payload = world.prepare().unwrap();
    assert_eq!(payload.lock, world.lock());
    assert!(payload.moved.is_empty());
}

#[test]
fn an_archive_that_no_key_of_debian_has_signed_replaces_nothing() {
    if !runs_here() {
        return;
    }
    let (tool, library) = (Deb::tool("1", "", &["libone.so.1"]), Deb::library("1"));
    let mut world = World::new(&tool, &library);
    world.publish(&[Deb::tool("2", "", &["libone.so.1"]), library]);
    world.source.trust = Trust::Debian;
    let error = world.prepare().unwrap_err();
    assert!(matches!(error, Error::Indices { .. }), "{error}");
    assert!(error.to_string().contains("is not signed"), "{error}");
    assert!(error.help().unwrap().contains("--mirror URL"), "{error}");
    assert_eq!(world.trees(), 0);
}
