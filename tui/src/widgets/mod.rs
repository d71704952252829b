//! Draws the pieces that pages are made of. A page is a list of lines; these make lines.

pub(crate) mod block;
pub(crate) mod chart;
pub(crate) mod dialog;
pub(crate) mod headline;
pub(crate) mod life;
pub(crate) mod row;
pub(crate) mod timeline;
pub(crate) mod window;

pub(crate) use self::row::Row;
