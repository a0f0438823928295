package durable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Write replaces or creates the file at path, with mode 0600. Its directory must exist.
func Write(path string, content []byte, level Level) error {
	return WriteWith(path, content, Options{Level: level})
}

// WriteWith is Write with options.
func WriteWith(path string, content []byte, o Options) error {
	return writeOn(hostDisk{}, path, content, o)
}

func writeOn(d disk, path string, content []byte, o Options) error {
	r, err := createOn(d, path, o)
	if err != nil {
		return err
	}
	if _, err := r.Write(content); err != nil {
		return errors.Join(err, r.Discard())
	}
	return r.Commit()
}

// WriteIfChanged does the same as Write, but does not write a file that already has the content. A
// missing directory is created with mode 0750; it is not synced. The suffix of the temporary file
// is ".tmp".
func WriteIfChanged(path string, content []byte, level Level) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		if level < Persistent {
			return nil
		}
		// The previous writer may have been killed between the rename and the sync.
		return Sync(filepath.Dir(path))
	}
	return WriteWith(path, content, Options{Level: level, TempSuffix: ".tmp"})
}

// Replacement is the new content of a file, under a temporary name until Commit. It is not safe for
// concurrent use.
type Replacement struct {
	file      tempFile
	disk      disk
	path      string
	level     Level
	exclusive bool
	over      bool // committed or discarded
}

// Create starts the replacement of the file at path. The caller calls Commit or Discard; the file
// at path does not change before Commit.
func Create(path string, o Options) (*Replacement, error) { return createOn(hostDisk{}, path, o) }

func createOn(d disk, path string, o Options) (*Replacement, error) {
	if o.Level < Atomic || o.Level > Persistent {
		return nil, fmt.Errorf("writing %s: unknown level of durability %d", path, o.Level)
	}
	mode := o.Mode
	if mode == 0 {
		mode = 0o600
	}
	r := &Replacement{disk: d, path: path, level: o.Level, exclusive: o.Exclusive}
	var err error
	switch {
	case o.Exclusive:
		r.file, err = d.openFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	case o.TempPattern != "":
		dir := o.TempDir
		if dir == "" {
			dir = filepath.Dir(path)
		}
		r.file, err = d.createTemp(dir, o.TempPattern)
	default:
		suffix := o.TempSuffix
		if suffix == "" {
			suffix = TempSuffix
		}
		r.file, err = d.openFile(path+suffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Write implements io.Writer. After an error the caller calls Discard.
func (r *Replacement) Write(p []byte) (int, error) { return r.file.Write(p) }

// Chmod sets the mode of the new file, regardless of the umask.
func (r *Replacement) Chmod(mode os.FileMode) error { return r.file.Chmod(mode) }

// Commit gives the new content its name, as durably as its level requires. If the content could not
// be written or renamed, the old file stays and the new one is removed. If only the sync of the
// directory fails, the file has the new content, and a power failure may bring the old one back.
func (r *Replacement) Commit() error {
	if r.level >= Intact {
		if err := r.file.Sync(); err != nil {
			return errors.Join(err, r.Discard())
		}
	}
	r.over = true
	err := r.file.Close()
	if err == nil && !r.exclusive {
		err = r.disk.rename(r.file.Name(), r.path)
	}
	if err != nil {
		return errors.Join(err, r.disk.remove(r.file.Name()))
	}
	if r.level >= Persistent {
		return r.disk.syncDir(filepath.Dir(r.path))
	}
	return nil
}

// Discard removes the new content. A call after Commit or Discard does nothing.
func (r *Replacement) Discard() error {
	if r.over {
		return nil
	}
	r.over = true
	return errors.Join(r.file.Close(), r.disk.remove(r.file.Name()))
}

// ReadJSON reads the file at path and decodes it into v. An error about invalid JSON contains the
// path.
func ReadJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// disk contains the operations of a file system that replace files. Tests inject faults into it.
type disk interface {
	openFile(path string, flag int, mode os.FileMode) (tempFile, error)
	createTemp(dir, pattern string) (tempFile, error)
	rename(from, to string) error
	remove(path string) error
	syncDir(path string) error
}

// tempFile is a file that is being written. *os.File implements it.
type tempFile interface {
	Name() string
	Write(p []byte) (int, error)
	Chmod(mode os.FileMode) error
	Sync() error
	Close() error
}

// hostDisk implements disk with system calls.
type hostDisk struct{}

func (hostDisk) openFile(path string, flag int, mode os.FileMode) (tempFile, error) {
	f, err := os.OpenFile(path, flag, mode)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (hostDisk) createTemp(dir, pattern string) (tempFile, error) {
	f, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (hostDisk) rename(from, to string) error { return os.Rename(from, to) }
func (hostDisk) remove(path string) error     { return os.Remove(path) }
func (hostDisk) syncDir(path string) error    { return Sync(path) }
