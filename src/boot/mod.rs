//! What `init` is made of.

pub mod alias;
pub mod attempts;
pub mod command_line;
pub mod disk;
pub mod evidence;
pub mod gpt;
pub mod life;
pub mod modprobe;
pub mod modules;
pub mod relay;
