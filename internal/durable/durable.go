// Package durable writes files so that they survive crashes. All other packages use it instead of
// a temporary file, fsync and rename of their own.
//
// Faults:
//
//   - The process is killed at any moment: files keep what the kernel has in memory.
//   - The power fails, or the kernel panics: what was not synced is lost, in whole or in part. That
//     covers the content of files and, separately, the entries of directories: a rename is lost
//     until its directory is synced.
//
// [Level] names what a written file survives.
//
// Files have these properties:
//
//   - Mode: [Options].Mode, by default 0600, minus the umask.
//   - Owner: user and group of the process. Owner, mode, links and extended attributes of a
//     replaced file are not kept. A symbolic link is replaced, not followed.
//   - Temporary name: the file's name followed by [TempSuffix], in the same directory, unless
//     [Options] say otherwise.
//   - Cleanup: if a function returns an error, the temporary file is removed. A killed process
//     leaves it; the next write with the same temporary name overwrites it.
//   - Concurrency: concurrent writers of one file need different temporary names
//     ([Options].TempPattern), or a lock.
//
// [FS] and [File] serve files that are written in place, such as a log. [Rename], [Sync] and
// [MakeDir] serve files and directories that get their content in another way.
package durable

import "os"

// Level is the durability of a file. All levels are atomic: at any moment, and after any fault that
// the level covers, a reader finds the whole old or the whole new content.
type Level int

const (
	// Atomic covers the end of the process. After a power failure the content is undefined: the
	// file may be empty, truncated, or have the old content. Nothing is synced.
	Atomic Level = iota + 1
	// Intact also covers a power failure, after which the file has the whole old or the whole new
	// content. Which of the two is undefined, even if the write had returned. The file is synced
	// before it gets its name.
	Intact
	// Persistent is Intact, and a power failure after the write has returned cannot bring back the
	// old content. The directory is synced, too.
	Persistent
)

// TempSuffix is the default suffix of temporary files. Readers of a directory ignore such files, or
// remove them when no writer is active.
const TempSuffix = ".new"

// Options describe how a file is written.
type Options struct {
	Level Level       // required
	Mode  os.FileMode // permission bits before the umask; 0 means 0600
	// TempSuffix replaces the default suffix of the temporary file.
	TempSuffix string
	// TempPattern is a pattern of os.CreateTemp for the temporary file: each writer has a file of
	// its own. Its mode is 0600, whatever Mode is. TempSuffix is not used.
	TempPattern string
	// TempDir is the directory of a temporary file with a TempPattern; "" means the directory of
	// the file. It must be on the same file system.
	TempDir string
	// Exclusive creates the file under its own name, and fails with os.ErrExist if the name
	// exists. It is not atomic: until Commit, readers find an incomplete file, and a crash leaves
	// it. Temporary names are not used.
	Exclusive bool
}
