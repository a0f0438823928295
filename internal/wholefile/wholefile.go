// Package wholefile writes files that are there whole or not at all, whenever the machine ends.
package wholefile

import (
	"errors"
	"os"
	"path/filepath"
)

// Write puts a file in the place of one of its name, which only the owner can read. Its folder is made when it is missing.
// What says the same already is left.
func Write(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err == nil && string(old) == string(content) {
		return nil
	}
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
