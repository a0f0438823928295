package durable

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// File is a file that is written in place.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync returns nil when everything written before is on the disk. After an error the content
	// of the disk is undefined: the caller must not write or acknowledge anything more.
	Sync() error
	// Size returns the size in bytes.
	Size() (int64, error)
}

// FS opens files. Tests replace it with a file system that loses unsynced data or fails
// (durabletest).
type FS interface {
	// Open opens a file as os.OpenFile does, with mode 0600.
	Open(name string, flag int) (File, error)
}

// OS is the file system of the host.
type OS struct {
	NoSync bool // Sync does nothing; for tests
}

// Open implements FS.
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

// Sync omits metadata that is not needed to read the content, such as times.
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

// zeroChunk is how many bytes Fill writes at once.
const zeroChunk = 1 << 20

// Fill writes zeros from offset start up to offset end, and syncs the file. Later writes to that
// range allocate no blocks, so their syncs write only content.
func Fill(f File, start, end int64) error {
	zeros := make([]byte, min(zeroChunk, max(0, end-start)))
	for start < end {
		n := min(int64(len(zeros)), end-start)
		if _, err := f.WriteAt(zeros[:n], start); err != nil {
			return err
		}
		start += n
	}
	return f.Sync()
}
