// Package durable writes files that are there whole or not at all, whenever the machine ends or, where that is enough, the
// process.
package durable

import (
	"encoding/json"
	"errors"
	"fmt"
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

// Replace puts a file in the place of one of its name, which only the owner can read, so that readers see the old or the new
// content, also when the process is killed. It is not synced: a power cut may leave anything of it.
func Replace(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// ReadJSON reads a file into v. Its error is that of the file, or says which is no such JSON.
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
