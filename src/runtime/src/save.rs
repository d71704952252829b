//! Writing a file of the tree from a service, without blocking the runtime.

use polis_base::files::{Error, File};

/// Adds the write that a service may await to [`File`].
pub trait Save {
    /// [`File::write`] on a thread that may block. The write goes on when the caller is
    /// dropped; it is never torn.
    fn save(
        &self,
        content: impl AsRef<[u8]> + Send + 'static,
    ) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Save for File {
    async fn save(&self, content: impl AsRef<[u8]> + Send + 'static) -> Result<(), Error> {
        let file = self.clone();
        match tokio::task::spawn_blocking(move || file.write(content.as_ref())).await {
            Ok(written) => written,
            Err(_lost) => Err(Error::Lost { path: self.path().to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;

    use super::*;

    #[tokio::test]
    async fn a_save_is_a_write() {
        let directory = tempfile::tempdir().unwrap();
        let file = Root::at(directory.path()).esp.parameters;
        std::fs::create_dir_all(file.path().parent().unwrap()).unwrap();
        file.save(b"content".to_vec()).await.unwrap();
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"content"[..]));
    }
}
