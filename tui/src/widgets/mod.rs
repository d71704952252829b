//! The widgets: the pieces of pages. A page is a list of lines; these make lines.

pub(crate) mod block;
pub(crate) mod chart;
pub(crate) mod dialog;
pub(crate) mod gauge;
pub(crate) mod headline;
pub(crate) mod row;
pub(crate) mod timeline;
pub(crate) mod window;

pub(crate) use self::row::Row;
