package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Sync syncs the file or directory at path: the content and size of a file, or the entries of a
// directory.
func Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Rename renames a file or directory and syncs the directory of its new name. The content is not
// synced: the caller has synced it. If the sync fails, the file has its new name, and a power
// failure may bring the old name back.
func Rename(oldPath, newPath string) error {
	if err := os.Rename(oldPath, newPath); err != nil {
		return err
	}
	return Sync(filepath.Dir(newPath))
}

// MakeDir creates a directory with mode 0700, and its missing parents. A power failure cannot
// remove it afterwards. The entry of an existing directory is synced as well, because the process
// that created it may have been killed before it had synced. If the parent of an existing directory
// cannot be read, the directory is accepted as it is.
func MakeDir(path string) error {
	exists, err := Exists(path)
	if err != nil {
		return err
	}
	if !exists {
		if parent := filepath.Dir(path); parent != path {
			if err := MakeDir(parent); err != nil {
				return err
			}
		}
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	err = Sync(filepath.Dir(path))
	if exists && errors.Is(err, os.ErrPermission) {
		return nil // the creator of the directory is responsible
	}
	return err
}

// Exists reports whether path is the name of a file, a directory, or a symbolic link, even of one
// without a target.
func Exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
