// Package backupfile writes the file of a backup that kctl downloads, so that the file is complete
// whenever it exists. A File must not be used concurrently.
package backupfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/durable"
)

// File is a backup that is being written to FILE.partial, where FILE is the path of the requested
// backup. Commit renames FILE.partial to FILE, so that FILE is always a complete backup.
type File struct {
	*os.File
	path string
}

// CreateFile opens path.partial for a new backup, locked and empty. An existing file at path stays
// until Commit replaces it. CreateFile fails if the existing file is not a backup. If byAge is
// true, the new backup is encrypted with age, and an existing file that is encrypted with age
// counts as a backup.
func CreateFile(path string, byAge bool) (*File, error) {
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		path = resolved // a symbolic link is kept, and its target is replaced
	}
	if err := checkReplaceable(path, byAge); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+".partial", os.O_CREATE|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	b := &File{File: f, path: path}
	if err := b.lockAndTruncate(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return b, nil
}

// ageMagic is the text at the start of every file that is encrypted with age.
const ageMagic = "age-encryption.org/v1"

// checkReplaceable returns an error if a file exists at path and a backup must not replace it. A
// backup may replace an empty file or another backup. If byAge is true, any file that is encrypted
// with age counts as a backup.
func checkReplaceable(path string, byAge bool) error {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	head := make([]byte, len(ageMagic))
	switch n, err := io.ReadFull(in, head); {
	case err == io.EOF: // an empty file, such as one that mktemp creates
		return nil
	case strings.HasPrefix(string(head[:n]), api.BackupMagic):
		return nil
	case byAge && string(head) == ageMagic:
		return nil
	case err == nil || err == io.ErrUnexpectedEOF:
		return fmt.Errorf("%s exists and is not a backup: choose another name, or remove it", path)
	default:
		return err
	}
}

// lockAndTruncate locks the partial file against other processes and empties it, because a killed
// process may have left data in it. It fails if another process holds the lock or has renamed the
// file.
func (b *File) lockAndTruncate() error {
	// If the file system does not support locks, the lock is omitted and other processes are not
	// excluded.
	if err := syscall.Flock(int(b.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("another backup to %s is in progress", b.path)
	}
	mine, err := b.Stat()
	if err != nil {
		return err
	}
	named, err := os.Lstat(b.Name())
	if err != nil || !os.SameFile(mine, named) {
		// the other process may have renamed this file
		return fmt.Errorf("another backup to %s has just finished: try again", b.path)
	}
	if !mine.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", b.Name())
	}
	return errors.Join(b.Chmod(0o600), b.Truncate(0)) // the backup contains the Secrets of the cluster
}

// Commit syncs the complete backup to disk, renames FILE.partial to FILE (see File), and closes it.
func (b *File) Commit() error {
	if err := b.Sync(); err != nil {
		return err
	}
	if err := durable.Rename(b.Name(), b.path); err != nil {
		return err
	}
	return b.Close()
}

// Discard removes FILE.partial (see File), an incomplete backup, and closes it.
func (b *File) Discard() error {
	err := os.Remove(b.Name())
	if errors.Is(err, os.ErrNotExist) {
		err = nil // commit has renamed it already
	}
	if closed := b.Close(); !errors.Is(closed, os.ErrClosed) {
		err = errors.Join(err, closed)
	}
	return err
}
