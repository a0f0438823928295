package platter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Settle makes a folder and sees to it that what is read there
// from now on is on the disk.
//
// What the last process wrote can be read without being there: it was killed
// before it had synced, or a sync had failed, after which Linux counts the pages
// as clean and never writes them. A replica that built on that would acknowledge
// what the next power cut takes away. So everything that can still be written
// is, and the kernel forgets what it has in memory. Files that skip names are
// left out: those that have their names only after they were synced.
func Settle(dir string, skip func(path string) bool) error {
	if err := MakeFolder(dir); err != nil {
		return err
	}
	return filepath.WalkDir(dir+"/", func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // it went meanwhile
		case err != nil:
			return err
		case e.IsDir():
			return SyncFolder(path)
		case !e.Type().IsRegular() || skip(path):
			return nil
		}
		return settle(path)
	})
}

func settle(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = f.Sync()
	if err == nil {
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("settling %s: %w", path, err)
	}
	return nil
}

// MakeFolder makes a folder, and those above it that are missing, so that a
// power cut does not take it away with all that was synced inside it. One that
// is there may be of a process that was killed before it could see to that.
func MakeFolder(path string) error {
	there, err := Exists(path)
	if err != nil {
		return err
	}
	if !there {
		if above := filepath.Dir(path); above != path {
			if err := MakeFolder(above); err != nil {
				return err
			}
		}
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	err = SyncFolder(filepath.Dir(path))
	if there && errors.Is(err, os.ErrPermission) {
		return nil // whoever made it for us has to care
	}
	return err
}
