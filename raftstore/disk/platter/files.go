// Package platter has files, and folders, that are on the disk when it says so,
// whatever power cut comes; and, beside the file system of the machine, two that
// are not for use but for tests: one in memory and one that can lose what was
// not synced.
package platter

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// File is what a journal, the segments of a log and snapshots need of a file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync returns when the content is on the disk.
	Sync() error
	Size() (int64, error)
}

// Layer opens files.
type Layer interface {
	// Open opens a file as os.OpenFile does, for its owner only.
	Open(name string, flag int) (File, error)
}

// OS is the file system of the machine.
type OS struct {
	NoSync bool // Sync does nothing: for tests
}

// Open implements Layer.
func (o OS) Open(name string, flag int) (File, error) {
	f, err := os.OpenFile(name, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return &osFile{File: f, noSync: o.NoSync}, nil
}

type osFile struct {
	*os.File
	noSync bool
}

// Sync leaves out what is not needed to read the content back, as times.
func (f *osFile) Sync() error {
	if f.noSync {
		return nil
	}
	for {
		if err := syscall.Fdatasync(int(f.Fd())); err != syscall.EINTR {
			return err
		}
	}
}

func (f *osFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// ReadAll reads a whole file.
func ReadAll(f File) ([]byte, error) {
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); err != nil && !(errors.Is(err, io.EOF) && int64(n) == size) {
		return nil, err
	}
	return b, nil
}

// zeroChunk is how much is written at once when a file is filled.
const zeroChunk = 1 << 20

// Fill writes zeros, so that what is written there later allocates nothing and
// a sync has only content to bring to the disk.
func Fill(f File, from, to int64) error {
	zeros := make([]byte, min(zeroChunk, max(0, to-from)))
	for from < to {
		n := min(int64(len(zeros)), to-from)
		if _, err := f.WriteAt(zeros[:n], from); err != nil {
			return err
		}
		from += n
	}
	return f.Sync()
}

// SyncFolder makes it durable which files are in a folder.
func SyncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// ReplaceFile writes a file so that after a crash it is the old or the new one.
func ReplaceFile(path string, content []byte) error {
	tmp := path + NewSuffix
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return MoveFile(tmp, path)
}

// NewSuffix marks what is being made. A crash may leave it; it never counts.
const NewSuffix = ".new"

// MoveFile renames durably.
func MoveFile(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncFolder(filepath.Dir(to))
}

// Exists says whether something is at path.
func Exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
