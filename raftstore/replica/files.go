package replica

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// diskFile is what the journal, the segments of the log and the snapshots need
// of a file. Tests put in one that fails, or forgets what was not synced.
type diskFile interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync returns when the content is on the disk.
	Sync() error
	Size() (int64, error)
}

// fileLayer opens files.
type fileLayer interface {
	open(name string, flag int) (diskFile, error)
}

// osFiles is the file system of the machine.
type osFiles struct {
	noSync bool
}

func (o osFiles) open(name string, flag int) (diskFile, error) {
	f, err := os.OpenFile(name, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return &osFile{File: f, noSync: o.noSync}, nil
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

// readAll reads a whole file.
func readAll(f diskFile) ([]byte, error) {
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

// fill writes zeros, so that what is written there later allocates nothing and
// a sync has only content to bring to the disk.
func fill(f diskFile, from, to int64) error {
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

// syncFolder makes it durable which files are in a folder.
func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// replaceFile writes a file so that after a crash it is the old or the new one.
func replaceFile(path string, content []byte) error {
	tmp := path + newSuffix
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return moveFile(tmp, path)
}

// newSuffix marks what is being made. A crash may leave it; it never counts.
const newSuffix = ".new"

// moveFile renames durably.
func moveFile(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(to))
}

// exists says whether something is at path.
func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
