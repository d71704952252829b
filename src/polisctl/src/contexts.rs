//! The store of contexts: each is a cluster and a user in it.
//!
//! ```text
//! $XDG_CONFIG_HOME/polis/         mode 0700
//!   owner.key  owner.pub          unless another file was named
//!   current                       the name of the context in use
//!   contexts/<name>/
//!     context.json                endpoints, the user, where the key is
//!     ca.pem                      the only authority that is trusted
//!     certificate.pem             what the cluster gave for the key
//!     crl.pem                     the certificates that the cluster has revoked
//! ```
//!
//! Invariants:
//! - A context gets its CA only from a person or from a file.
//! - Files are written atomically.
//! - No private key is copied: a context stores its path.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::{Error, Explain as _};
use polis_wire::pki;

/// Far above the size of a context or a certificate.
const FILE_MAX: u64 = 256 * 1024;
/// The same for a CRL: a message of the cluster has no more, and PEM makes three bytes four.
const CRL_MAX: u64 = 6 * 1024 * 1024;

/// The longest domain of a cluster, which names its context.
const NAME_MAX: usize = 80;

/// The folder of `polisctl`, with all contexts in it.
#[derive(Clone, Debug)]
pub(super) struct Contexts {
    folder: PathBuf,
}

/// The content of a context besides the certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Settings {
    /// The addresses of curators, `HOST:PORT`.
    pub(super) endpoints: Vec<String>,
    /// The name of the user in the cluster.
    pub(super) user: String,
    /// The private key.
    pub(super) key: PathBuf,
    /// Detours for addresses that cannot be reached directly, for example through a
    /// forwarded port: `HOST:PORT` to `HOST:PORT`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) via: BTreeMap<String, String>,
    /// Addresses of nodes, learnt from the cluster: by node ID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) nodes: BTreeMap<String, Vec<String>>,
}

/// A cluster, and a user in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// Its name.
    pub(super) name: String,
    /// Its content.
    pub(super) settings: Settings,
    /// DER of the cluster's CA, once it is trusted.
    pub(super) ca: Option<Vec<u8>>,
    /// DER of the user's certificate, once there is one.
    pub(super) certificate: Option<Vec<u8>>,
    /// The CRL of the CA, once the cluster has sent it.
    pub(super) crl: Option<pki::Crl>,
}

impl Context {
    /// An empty context.
    pub(super) fn new(name: &str) -> Self {
        let (name, settings) = (name.to_owned(), Settings::default());
        Self { name, settings, ca: None, certificate: None, crl: None }
    }

    /// The digest of its CRL; empty: it has none.
    pub(super) fn crl_digest(&self) -> Vec<u8> {
        self.crl.as_ref().map(pki::Crl::digest).unwrap_or_default()
    }
}

/// Checks the name of a context, which becomes a folder.
pub(super) fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > NAME_MAX || text.starts_with('.') || !text.chars().all(plain)
    {
        return Err(format!("allowed are 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`"));
    }
    Ok(text.to_owned())
}

impl Contexts {
    /// The given folder, or the one of the environment.
    pub(super) fn find(
        named: Option<PathBuf>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        if let Some(folder) = named {
            return Ok(Self { folder });
        }
        let folder =
            |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = folder("XDG_CONFIG_HOME").or_else(|| Some(folder("HOME")?.join(".config")));
        let base = base.ok_or_else(|| {
            Error::new("neither XDG_CONFIG_HOME nor HOME names a folder")
                .or_help("name the folder for contexts with --config")
        })?;
        Ok(Self { folder: base.join("polis") })
    }

    /// The folder itself.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The default path of the owner's key.
    pub(super) fn owner_key(&self) -> PathBuf {
        self.folder.join("owner.key")
    }

    /// The names of all contexts.
    pub(super) fn names(&self) -> Result<BTreeSet<String>, Error> {
        let folder = self.folder.join("contexts");
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            entries => entries.doing(|| format!("cannot read {}", folder.display()))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter(|found| name(found).is_ok()).collect())
    }

    /// The name of the current context.
    pub(super) fn current(&self) -> Result<Option<String>, Error> {
        let Some(bytes) = read(&self.folder.join("current"))? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        Ok(name(&text).ok())
    }

    /// Sets the current context.
    pub(super) fn set_current(&self, name: &str) -> Result<(), Error> {
        private_folder(&self.folder)?;
        write(&self.folder.join("current"), format!("{name}\n").as_bytes())
    }

    /// The context `named`, else the current one, if any.
    pub(super) fn context(&self, named: Option<&str>) -> Result<Option<Context>, Error> {
        let name = match named {
            Some(name) => name.to_owned(),
            None => match self.current()? {
                Some(name) => name,
                None => return Ok(None),
            },
        };
        self.load(&name).map(Some)
    }

    /// Reads a context.
    pub(super) fn load(&self, name: &str) -> Result<Context, Error> {
        self.find_context(name)?.ok_or_else(|| {
            let names = self.names().unwrap_or_default();
            let known = names.into_iter().collect::<Vec<_>>().join(", ");
            Error::new(format!("there is no context {name:?}")).or_help(if known.is_empty() {
                "`polisctl --endpoint HOST cluster take-ownership` makes one".to_owned()
            } else {
                format!("there are: {known}")
            })
        })
    }

    /// Reads a context, if it is there.
    pub(super) fn find_context(&self, name: &str) -> Result<Option<Context>, Error> {
        let folder = self.folder_of(name);
        let file = folder.join("context.json");
        let Some(bytes) = read(&file)? else { return Ok(None) };
        let settings = serde_json::from_slice(&bytes)
            .doing(|| format!("cannot understand {}", file.display()))
            .help(|| format!("correct it, or remove it: `polisctl context remove {name}`"))?;
        let certificate = |leaf: &str| -> Result<Option<Vec<u8>>, Error> {
            let file = folder.join(leaf);
            read(&file)?.map(|bytes| certificate(&file, &bytes)).transpose()
        };
        let crl = folder.join("crl.pem");
        let crl = read_up_to(CRL_MAX, &crl)?.map(|bytes| revoked(&crl, &bytes)).transpose()?;
        Ok(Some(Context {
            name: name.to_owned(),
            settings,
            ca: certificate("ca.pem")?,
            certificate: certificate("certificate.pem")?,
            crl,
        }))
    }

    /// The name for the context of the cluster with this CA, which calls itself `wanted`:
    /// that name, or with a number where another cluster has it. Clusters that have no
    /// name are all called the same.
    pub(super) fn free_name(&self, wanted: &str, ca: &[u8]) -> Result<String, Error> {
        for number in 1_u32.. {
            let suffix = if number == 1 { String::new() } else { format!("-{number}") };
            let kept = wanted.len().min(NAME_MAX - suffix.len());
            let name = format!("{}{suffix}", wanted.get(..kept).unwrap_or(wanted));
            let known = self.find_context(&name)?;
            if known.and_then(|known| known.ca).is_none_or(|known| known == ca) {
                return Ok(name);
            }
        }
        Err(Error::new(format!("every name like {wanted} is taken")))
    }

    /// Writes a context.
    pub(super) fn save(&self, context: &Context) -> Result<(), Error> {
        let folder = self.folder_of(&context.name);
        private_folder(&folder)?;
        let json = serde_json::to_vec_pretty(&context.settings)?;
        for (leaf, der) in [("ca.pem", &context.ca), ("certificate.pem", &context.certificate)] {
            if let Some(der) = der {
                write(&folder.join(leaf), pki::certificate_pem(der).as_bytes())?;
            }
        }
        if let Some(crl) = &context.crl {
            write(&folder.join("crl.pem"), crl.pem().as_bytes())?;
        }
        // Written last: the context exists from then on.
        write(&folder.join("context.json"), &json)
    }

    /// Fails where there is no such context; one that cannot be read is one, too.
    pub(super) fn must_exist(&self, name: &str) -> Result<(), Error> {
        match self.names()?.contains(name) {
            true => Ok(()),
            false => self.load(name).map(drop),
        }
    }

    /// Removes a context. Its key stays.
    pub(super) fn remove(&self, name: &str) -> Result<(), Error> {
        let folder = self.folder_of(name);
        fs::remove_dir_all(&folder).doing(|| format!("cannot remove {}", folder.display()))?;
        if self.current()?.as_deref() == Some(name) {
            let file = self.folder.join("current");
            fs::remove_file(&file).doing(|| format!("cannot remove {}", file.display()))?;
        }
        Ok(())
    }

    fn folder_of(&self, name: &str) -> PathBuf {
        self.folder.join("contexts").join(name)
    }
}

/// Reads the DER of one certificate, from PEM or DER.
pub(super) fn read_certificate(file: &Path) -> Result<Vec<u8>, Error> {
    certificate(file, &read_file(file)?)
}

/// The bytes of a certificate in PEM; all bytes of anything else, which may be DER.
fn der(bytes: &[u8]) -> Vec<u8> {
    match x509_parser::pem::parse_x509_pem(bytes) {
        Ok((_rest, pem)) if pem.label == "CERTIFICATE" => pem.contents,
        _ => bytes.to_vec(),
    }
}

/// Reads the DER of the certificate of any authority, from PEM or DER.
pub(super) fn read_authority(file: &Path) -> Result<Vec<u8>, Error> {
    let der = der(&read_file(file)?);
    if x509_parser::parse_x509_certificate(&der).is_err() {
        return Err(Error::new(format!(
            "{} holds no certificate, neither in PEM nor in DER",
            file.display()
        ))
        .or_help("name the certificate of the authority, not its key"));
    }
    Ok(der)
}

/// Reads a file that must exist and be small.
pub(super) fn read_file(file: &Path) -> Result<Vec<u8>, Error> {
    read(file)?.ok_or_else(|| {
        Error::new(format!("{} does not exist", file.display())).or_help("check the path")
    })
}

/// The DER of the certificate in `file`, which is PEM or DER.
pub(super) fn certificate(file: &Path, bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let der = der(bytes);
    if pki::Facts::read(&der).is_none() {
        return Err(Error::new(format!(
            "{} holds no certificate of a Polis cluster, neither in PEM nor in DER",
            file.display()
        ))
        .or_help("name the CA of the cluster, in PEM or DER"));
    }
    Ok(der)
}

/// The CRL in `file`, in PEM.
fn revoked(file: &Path, bytes: &[u8]) -> Result<pki::Crl, Error> {
    let read = match x509_parser::pem::parse_x509_pem(bytes) {
        Ok((_rest, pem)) if pem.label == "X509 CRL" => pki::Crl::read(&pem.contents),
        _ => None,
    };
    read.ok_or_else(|| {
        Error::new(format!("{} holds no CRL of a Polis cluster", file.display())).or_help(
            "remove the file: the next command that reaches the leader writes it again, and a \
             removed curator is not recognised until then",
        )
    })
}

/// Creates a folder with mode 0700 unless it exists.
pub(super) fn private_folder(folder: &Path) -> Result<(), Error> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.doing(|| format!("cannot make {}", folder.display()))
}

/// The bytes of a file, if it exists.
fn read(file: &Path) -> Result<Option<Vec<u8>>, Error> {
    read_up_to(FILE_MAX, file)
}

/// The same for a file of at most `max` bytes.
pub(super) fn read_up_to(max: u64, file: &Path) -> Result<Option<Vec<u8>>, Error> {
    let opened = match fs::File::open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.doing(|| format!("cannot open {}", file.display()))?,
    };
    read_open(max, opened, file).map(Some)
}

/// The bytes of an open file of at most `max` bytes; `file` is its name in errors.
pub(super) fn read_open(max: u64, opened: impl io::Read, file: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = opened.take(max + 1).read_to_end(&mut bytes);
    read.doing(|| format!("cannot read {}", file.display()))?;
    if bytes.len() as u64 > max {
        return Err(Error::new(format!("{} has more than {max} bytes", file.display()))
            .or_help("name the file with the one certificate or document that is asked for"));
    }
    Ok(bytes)
}

/// Writes a file with mode 0600 atomically. A link stays, and so does a device or a pipe, which
/// gets the bytes.
pub(super) fn write(file: &Path, bytes: &[u8]) -> Result<(), Error> {
    // A link whose file is not there yet stays, too.
    let target = |_absent| fs::read_link(file).map(|target| file.with_file_name(target));
    let place = file.canonicalize().or_else(target).unwrap_or_else(|_new| file.to_owned());
    let written = match fs::metadata(&place) {
        Ok(there) if !there.is_file() && !there.is_dir() => {
            let opened = fs::OpenOptions::new().write(true).open(&place);
            opened.and_then(|mut opened| opened.write_all(bytes))
        }
        _ => replace(&place, bytes),
    };
    written.doing(|| format!("cannot write {}", file.display()))
}

/// Writes a file through a temporary one beside it.
fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    // Random: in two containers with one folder, two processes may have the same ID.
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:08x}", rand::random::<u32>()));
    replace_through(&file.with_file_name(name), file, bytes)
}

/// The same through `sibling`, which must not exist: a link of another user to a file of theirs is
/// not followed.
fn replace_through(sibling: &Path, file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut opened =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(sibling)?;
    let written = opened
        .write_all(bytes)
        .and_then(|()| opened.sync_all())
        .and_then(|()| fs::rename(sibling, file));
    if written.is_err() {
        let _removed = fs::remove_file(sibling);
    }
    written
}

/// The help without a current context.
pub(super) fn no_context() -> Error {
    Error::new("no context is in use").or_help(
        "take ownership of a cluster: `polisctl --endpoint HOST cluster take-ownership`; or pick \
         a context: `polisctl context use NAME`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts() -> (tempfile::TempDir, Contexts) {
        let folder = tempfile::tempdir().unwrap();
        let contexts = Contexts { folder: folder.path().join("polis") };
        (folder, contexts)
    }

    fn context(name: &str) -> Context {
        let settings = Settings {
            endpoints: vec!["192.0.2.1:7835".to_owned()],
            user: "owner".to_owned(),
            key: "/keys/owner.key".into(),
            ..Settings::default()
        };
        Context { settings, ..Context::new(name) }
    }

    #[test]
    fn the_folder_is_where_the_environment_says() {
        let found = |pairs: &[(&str, &str)]| {
            let find = |name: &str| {
                pairs.iter().find(|pair| pair.0 == name).map(|pair| OsString::from(pair.1))
            };
            Contexts::find(None, find).map(|contexts| contexts.folder)
        };
        assert_eq!(found(&[("HOME", "/h")]).unwrap(), Path::new("/h/.config/polis"));
        let both = [("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")];
        assert_eq!(found(&both).unwrap(), Path::new("/x/polis"));
        // By the standard, a relative path is ignored.
        let relative = [("HOME", "/h"), ("XDG_CONFIG_HOME", "x")];
        assert_eq!(found(&relative).unwrap(), Path::new("/h/.config/polis"));
        assert!(found(&[]).unwrap_err().render().contains("help: "));
    }

    #[test]
    fn a_context_reads_back_and_can_be_put_in_use() {
        let (_folder, contexts) = contexts();
        assert_eq!(contexts.context(None).unwrap(), None);
        let first = context("first");
        contexts.save(&first).unwrap();
        contexts.save(&context("second")).unwrap();
        contexts.set_current("first").unwrap();
        assert_eq!(contexts.context(None).unwrap(), Some(first.clone()));
        assert_eq!(contexts.context(Some("second")).unwrap().unwrap().name, "second");
        assert_eq!(contexts.names().unwrap().len(), 2);
        contexts.remove("first").unwrap();
        assert_eq!(contexts.context(None).unwrap(), None);
    }

    #[test]
    fn a_context_that_is_not_there_names_those_that_are() {
        let (_folder, contexts) = contexts();
        contexts.save(&context("home")).unwrap();
        let error = contexts.load("hone").unwrap_err().render();
        assert_eq!(error, "error: there is no context \"hone\"\nhelp: there are: home\n");
    }

    #[test]
    fn a_link_stays_and_a_pipe_gets_the_bytes() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        use std::os::unix::fs::FileTypeExt as _;
        let folder = tempfile::tempdir().unwrap();
        let [file, link, pipe] = ["file", "link", "pipe"].map(|name| folder.path().join(name));
        write(&file, b"one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"two").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"two");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // Opened for reading and writing, a pipe needs no other end yet (fifo(7)).
        let mut reader = fs::File::options().read(true).write(true).open(&pipe).unwrap();
        write(&pipe, b"three").unwrap();
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        let mut read = [0; 5];
        reader.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
        let error = write(folder.path(), b"four").unwrap_err().helpful().render();
        assert!(error.contains("help: name a file"), "{error}");
    }

    #[test]
    fn a_file_is_private_and_no_link_of_another_user_is_followed() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let folder = tempfile::tempdir().unwrap();
        let [file, theirs, link] = ["file", "theirs", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "open").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(&theirs, "theirs").unwrap();
        // Where the new content is put first.
        let sibling = folder.path().join("file.part");
        symlink(&theirs, &sibling).unwrap();
        let refused = replace_through(&sibling, &file, b"secret").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
        assert_eq!(fs::read(&file).unwrap(), b"open");
        fs::remove_file(&sibling).unwrap();
        write(&file, b"secret").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"secret");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // A link whose file is not there yet.
        symlink("new", &link).unwrap();
        write(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(folder.path().join("new")).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn two_that_write_a_file_at_once_both_succeed_and_leave_it_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = &folder.path().join("current");
        // Of one process: as in two containers, both have the same ID.
        std::thread::scope(|scope| {
            for content in ["one", "another"] {
                scope.spawn(move || {
                    for _turn in 0..20 {
                        write(file, content.as_bytes()).unwrap();
                    }
                });
            }
        });
        let left = fs::read_to_string(file).unwrap();
        assert!(["one", "another"].contains(&left.as_str()), "{left}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_are_no_certificate(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400),
            text in "[ -~\n]{0,200}",
        ) {
            let file = Path::new("noise");
            assert!(certificate(file, &bytes).is_err());
            let armoured = format!(
                "-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"
            );
            assert!(certificate(file, armoured.as_bytes()).is_err());
            assert!(revoked(file, &bytes).is_err());
            let armoured = format!("-----BEGIN X509 CRL-----\n{text}\n-----END X509 CRL-----\n");
            assert!(revoked(file, armoured.as_bytes()).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_no_context(bytes in proptest::collection::vec(0x20_u8..0x7f, 0..200)) {
            let (_folder, contexts) = contexts();
            contexts.save(&context("home")).unwrap();
            fs::write(contexts.folder_of("home").join("context.json"), &bytes).unwrap();
            // Every file that parses contains only the fields of a context.
            if let Ok(read) = contexts.load("home") {
                let plain = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(&bytes);
                assert!(plain.is_ok(), "{read:?}");
            }
        }
    }

    #[test]
    fn a_name_cannot_leave_its_folder() {
        assert!(name("home-1_a.b").is_ok());
        for bad in ["", ".", "..", "a/b", "a b", &"x".repeat(NAME_MAX + 1)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let (_folder, contexts) = contexts();
        contexts.save(&context("home")).unwrap();
        let file = contexts.folder_of("home").join("context.json");
        fs::write(&file, r#"{"endpoint": []}"#).unwrap();
        let error = contexts.load("home").unwrap_err().render();
        assert!(error.contains("unknown field `endpoint`"), "{error}");
    }
}
