// Package durable writes files so that a reader sees the whole old or the whole new content, even
// after a crash. Each function documents whether that holds for a power failure or only for the end
// of the process.
package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Write atomically replaces the file at path and syncs its content. After a crash or power failure,
// readers see the whole old or the whole new content. Only the owner can read the file. A missing
// directory is created. A file that already has the content is left unchanged.
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

// Replace atomically replaces the file at path, which only the owner can read. Readers see the
// whole old or the whole new content, also if the process is killed. The file is not synced: after
// a power failure its content is undefined.
func Replace(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
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
