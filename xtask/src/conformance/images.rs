//! The images that the tests with pods start, in place of those of Kubernetes' project,
//! which only a registry has.
//!
//! ```text
//! e2e --list-images  -----------> references
//! target/go/bin/agnhost ----+
//! busybox, curl, dig of the +---> one file tree --> a layout of images, one for each
//! host, with their libraries                        reference that has a stand-in
//! ```
//!
//! `agnhost` is the program of upstream, built from the module of the suite. The rest
//! is what its image has beside it, as far as the tests use it, from Debian. All images
//! have the same files and differ in what they run: a worker pulls one layer for all.
//!
//! What this module does not do: stand in for images with data of their own, such as the
//! one with an aggregated API server.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use polis_image::Tree;
use polis_image::oci::{self, Contents};

use crate::host::Need;
use crate::image;

/// Programs of the host that the images have.
pub(super) const NEEDS: &[Need] = &[
    Need { what: BUSYBOX, package: "busybox-static" },
    Need { what: CURL, package: "curl" },
    Need { what: DIG, package: "bind9-dnsutils" },
    Need { what: NETCAT, package: "netcat-openbsd" },
    Need { what: IP, package: "iproute2" },
    Need { what: BASH, package: "bash" },
];
const BUSYBOX: &str = "/usr/bin/busybox";
const CURL: &str = "/usr/bin/curl";
const DIG: &str = "/usr/bin/dig";
const NETCAT: &str = "/usr/bin/nc.openbsd";
const IP: &str = "/usr/bin/ip";
/// The shell of the images. That of Debian's `busybox` does not hand on variables whose
/// names have a dash, which the shells of the images do and tests look for.
const BASH: &str = "/usr/bin/bash";
/// Those that are copied with their libraries: path on the host, path in an image.
const COPIES: &[(&str, &str)] = &[
    (CURL, "usr/bin/curl"),
    (DIG, "usr/bin/dig"),
    (NETCAT, "usr/bin/nc"),
    (IP, "usr/sbin/ip"),
    (BASH, "bin/sh"),
];
/// The folder that the stand-in of a web server serves.
const PAGES: &str = "usr/share/nginx/html";

/// The program of an image.
#[derive(Debug, Default, PartialEq, Eq)]
struct Process {
    user: &'static str,
    entrypoint: &'static [&'static str],
    command: &'static [&'static str],
}

/// The program of the stand-in for the image with this name, if it has one.
fn process(name: &str) -> Option<Process> {
    let agnhost: &[_] = &["/agnhost"];
    let of = |command| Process { command, ..Process::default() };
    Some(match name {
        "agnhost" => Process { entrypoint: agnhost, command: &["pause"], ..Process::default() },
        "busybox" | "glibc-dns-testing" => of(&["sh"]),
        "nonroot" => Process { user: "1234", ..of(&["sh"]) },
        "nonewprivs" => of(&["/agnhost", "nonewprivs"]),
        "pause" => Process { entrypoint: &["/agnhost", "pause"], ..Process::default() },
        "nginx" => of(&["httpd", "-f", "-p", "80", "-h", "/usr/share/nginx/html"]),
        "kitten" | "nautilus" => of(&["/agnhost", "test-webserver"]),
        _ => return None,
    })
}

/// Writes the images that the suite names, as far as they have stand-ins, as a layout in
/// `folder`, which is made anew.
pub(super) fn write(suite: &Path, folder: &Path) -> Result<()> {
    let references = references(suite)?;
    let root = root()?;
    let images: Vec<_> =
        references.iter().filter_map(|reference| contents(reference, &root)).collect();
    ensure!(!images.is_empty(), "no stand-in for any of {}", references.join(", "));
    if folder.exists() {
        std::fs::remove_dir_all(folder)
            .with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    oci::layout_of(images)?.lay_out(folder)?;
    Ok(())
}

/// The images that the suite may start.
fn references(suite: &Path) -> Result<Vec<String>> {
    let output = Command::new(suite).arg("--list-images").output().context("cannot start e2e")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "e2e --list-images ended with {}: {said}", output.status);
    let text = String::from_utf8(output.stdout).context("the names of images")?;
    Ok(text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

fn contents(reference: &str, root: &Tree) -> Option<Contents> {
    let (_, last) = reference.rsplit_once('/')?;
    let (name, _tag) = last.split_once(':')?;
    let Process { user, entrypoint, command } = process(name)?;
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let mut root = root.clone();
    if ["kitten", "nautilus"].contains(&name) {
        // The tests tell the two by this file.
        root.text("data.json", format!("{{\"image\": \"{name}.jpg\"}}\n"));
    }
    Some(Contents {
        reference: reference.to_owned(),
        root,
        user: user.to_owned(),
        port: None,
        entrypoint: words(entrypoint),
        command: words(command),
    })
}

/// The files of every image.
fn root() -> Result<Tree> {
    let mut root = Tree::default();
    root.folder("tmp", 0o1777);
    root.folder("uploads", 0o755);
    root.folder("root", 0o700);
    root.text(
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nuser-defined-in-image:x:1000:1000::/:/bin/sh\n\
         nobody:x:65534:65534:nobody:/:/bin/false\n",
    );
    root.text(
        "etc/group",
        "root:x:0:\nuser-defined-in-image:x:1000:\n\
         group-defined-in-image:x:50000:user-defined-in-image\nnogroup:x:65534:\n",
    );
    root.text(&format!("{PAGES}/index.html"), "A stand-in of a web server.\n");
    root.program("agnhost", image::go_program("agnhost"));
    root.link("agnhost-2", "agnhost");
    root.program("bin/busybox", BUSYBOX);
    let copies = COPIES.iter().map(|(_, path)| path.rsplit_once('/').map_or(*path, |(_, n)| n));
    let copies: Vec<_> = copies.collect();
    for name in said(Command::new(BUSYBOX).arg("--list"))?.lines() {
        if name != "busybox" && !copies.contains(&name) {
            root.link(&format!("bin/{name}"), "busybox");
        }
    }
    for (source, path) in COPIES {
        root.program(path, source);
        for library in libraries(&said(Command::new("ldd").arg(source))?) {
            root.program(library.trim_start_matches('/'), PathBuf::from(library));
        }
    }
    Ok(root)
}

fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?} ended with {}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{command:?}"))
}

/// The files in what ldd(1) prints: `NAME => PATH (ADDRESS)`, and the loader as
/// `PATH (ADDRESS)`.
fn libraries(text: &str) -> Vec<&str> {
    let file = |line: &'_ str| -> Option<usize> { line.find('/') };
    text.lines()
        .filter_map(|line| file(line).map(|at| line[at..].split(' ').next().unwrap_or_default()))
        .filter(|path| !path.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_what_ldd_prints() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\
                    \tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(libraries(text), expected);
        assert_eq!(libraries("\tstatically linked\n"), [""; 0]);
    }

    #[test]
    fn an_image_without_a_stand_in_is_left_out() {
        let root = Tree::default();
        let of = |reference| contents(reference, &root);
        assert!(of("registry.k8s.io/e2e-test-images/sample-apiserver:1.29.2").is_none());
        let agnhost = of("registry.k8s.io/e2e-test-images/agnhost:2.66.1").unwrap();
        assert_eq!(agnhost.reference, "registry.k8s.io/e2e-test-images/agnhost:2.66.1");
        assert_eq!(
            (&*agnhost.entrypoint, &*agnhost.command),
            (&["/agnhost".to_owned()][..], &["pause".to_owned()][..])
        );
    }
}
