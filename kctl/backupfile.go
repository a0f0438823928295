package kctl

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"keelson.dev/keelson/controlplane/api"
)

// backupFile is a backup that is being written to FILE.partial. commit renames it to FILE, so that
// FILE is always a complete backup.
type backupFile struct {
	*os.File
	path string
}

// createBackup opens path.partial for a new backup, locked and empty. An existing file at path
// stays until commit replaces it. If that file is not a backup, createBackup fails. byAge means
// that the new backup is encrypted with age. Then an existing file that is encrypted with age
// counts as a backup.
func createBackup(path string, byAge bool) (*backupFile, error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // a symbolic link is kept, and its target is replaced
	}
	if err := checkReplaceable(path, byAge); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+".partial", os.O_CREATE|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	b := &backupFile{File: f, path: path}
	if err := b.lockAndTruncate(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return b, nil
}

// ageMagic is the text at the start of every file that is encrypted with age.
const ageMagic = "age-encryption.org/v1"

// checkReplaceable returns an error if the file at path exists and a backup must not replace it. A
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
// process may have left data. It fails if another process holds the lock or has renamed the file.
func (b *backupFile) lockAndTruncate() error {
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
		return fmt.Errorf("another backup to %s has just finished: try again", b.path) // the other process may have renamed this file
	}
	if !mine.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", b.Name())
	}
	return errors.Join(b.Chmod(0o600), b.Truncate(0)) // the backup contains the Secrets of the cluster
}

// commit syncs the complete backup to disk, renames it from FILE.partial to FILE, and closes it.
func (b *backupFile) commit() error {
	if err := b.Sync(); err != nil {
		return err
	}
	if err := os.Rename(b.Name(), b.path); err != nil {
		return err
	}
	return errors.Join(syncFolder(filepath.Dir(b.path)), b.Close())
}

// discard removes FILE.partial of an incomplete backup, and closes it.
func (b *backupFile) discard() error {
	err := os.Remove(b.Name())
	if errors.Is(err, os.ErrNotExist) {
		err = nil // commit has renamed it already
	}
	if closed := b.Close(); !errors.Is(closed, os.ErrClosed) {
		err = errors.Join(err, closed)
	}
	return err
}

func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
