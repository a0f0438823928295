package volume

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/internal/safepath"
)

// Names inside a projected volume. They are those of the kubelet, and applications that watch such
// volumes depend on them.
const (
	dataLink = "..data"
	tempLink = "..data_tmp"
)

// writeAtomically makes dir show exactly the payload. A reader sees all of the old or all of the
// new content, never a mixture:
//
//	dir/..1234/key     the files, in a separate folder for each version
//	dir/..data         → ..1234, replaced by a rename
//	dir/key            → ..data/key
//
// If the content is already correct, nothing is written. The next write removes a version that a
// crash left behind.
func writeAtomically(dir string, p payload, group *int64) error {
	for path := range p {
		if !filepath.IsLocal(path) || path == "." || strings.HasPrefix(path, "..") {
			return fmt.Errorf("path %q of a projected file leads outside its volume", path)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := setOwnership(dir, 0o755|os.ModeDir, nil, group); err != nil {
		return err
	}
	old, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if old != "" && matchesPayload(filepath.Join(dir, old), p, group) {
		return updateLinks(dir, p)
	}
	version, err := os.MkdirTemp(dir, "..")
	if err != nil {
		return err
	}
	if err := writeVersion(version, p, group); err != nil {
		return errors.Join(err, os.RemoveAll(version))
	}
	temp := filepath.Join(dir, tempLink)
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Base(version), temp); err != nil {
		return err
	}
	if err := os.Rename(temp, filepath.Join(dir, dataLink)); err != nil {
		return err
	}
	if err := updateLinks(dir, p); err != nil {
		return err
	}
	return removeOldVersions(dir, filepath.Base(version))
}

// writeVersion writes the files of the payload into the new folder version. group, if not nil,
// becomes their group.
func writeVersion(version string, p payload, group *int64) error {
	if err := setOwnership(version, 0o755|os.ModeDir, nil, group); err != nil {
		return err
	}
	for path, f := range p {
		full := filepath.Join(version, path)
		for d := filepath.Dir(path); d != "."; d = filepath.Dir(d) {
			if err := os.MkdirAll(filepath.Join(version, d), 0o755); err != nil {
				return err
			}
			if err := setOwnership(filepath.Join(version, d), 0o755|os.ModeDir, nil, group); err != nil {
				return err
			}
		}
		if err := os.WriteFile(full, f.data, 0o600); err != nil {
			return err
		}
		if err := setOwnership(full, os.FileMode(f.mode), f.uid, group); err != nil {
			return err
		}
	}
	return nil
}

// setOwnership sets the mode and the owning user and group of a file. nil leaves the user or group
// unchanged. If group is set, it also gets read access.
func setOwnership(path string, mode os.FileMode, uid, group *int64) error {
	u, g := -1, -1
	if uid != nil {
		u = int(*uid)
	}
	if group != nil {
		g = int(*group)
		mode |= 0o440
		if mode.IsDir() {
			mode |= 0o110 | os.ModeSetgid
		}
	}
	if u >= 0 || g >= 0 {
		if err := os.Chown(path, u, g); err != nil {
			return err
		}
	}
	return os.Chmod(path, mode)
}

// matchesPayload reports whether the files in the folder version, with their modes and group,
// already match the payload.
func matchesPayload(version string, p payload, group *int64) bool {
	count := 0
	err := filepath.WalkDir(version, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return nil
		}
		rel, err := filepath.Rel(version, path)
		if err != nil {
			return err
		}
		f, ok := p[rel]
		if !ok {
			return fs.ErrNotExist
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		want := os.FileMode(f.mode).Perm()
		if group != nil {
			want |= 0o440
		}
		b, err := safepath.ReadFile(path, int64(len(f.data)))
		if err != nil {
			return err
		}
		if st.Mode().Perm() != want || !bytes.Equal(b, f.data) {
			return fs.ErrInvalid
		}
		count++
		return nil
	})
	return err == nil && count == len(p)
}

// updateLinks creates the link dir/NAME → ..data/NAME for the first path component of each file
// in the payload, and removes all other entries of dir.
func updateLinks(dir string, p payload) error {
	want := map[string]bool{}
	for path := range p {
		first, _, _ := strings.Cut(path, "/")
		want[first] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), ".."):
		case want[e.Name()]:
			delete(want, e.Name())
		default:
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	for name := range want {
		if err := os.Symlink(filepath.Join(dataLink, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeOldVersions removes all version folders in dir except keep.
func removeOldVersions(dir, keep string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), "..") && e.Name() != keep {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
