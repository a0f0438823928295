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

// backupFile is a backup on its way to the disk. It is FILE.partial until keep
// gives it its name: a file of that name is a whole backup, of today or of before.
type backupFile struct {
	*os.File
	path string
}

// createBackup opens the partial file of a backup that is to have a path. What is
// there already stays until then; what is no backup is not replaced. byAge says that it will be sealed by age, as a former
// one may be.
func createBackup(path string, byAge bool) (*backupFile, error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // the link stays one
	}
	if err := replaceable(path, byAge); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+".partial", os.O_CREATE|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	b := &backupFile{File: f, path: path}
	if err := b.claim(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return b, nil
}

// ageMagic is what every file begins with that age has sealed.
const ageMagic = "age-encryption.org/v1"

// replaceable refuses a path at which there is something that no backup may take
// the place of.
func replaceable(path string, byAge bool) error {
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
	case err == io.EOF: // empty, as mktemp makes it
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

// claim keeps other processes off the partial file, and empties it of what a
// process that was killed has left in it.
func (b *backupFile) claim() error {
	// A file system that has no locks keeps nobody off, and is no reason to fail.
	if err := syscall.Flock(int(b.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("another backup to %s is in progress", b.path)
	}
	mine, err := b.Stat()
	if err != nil {
		return err
	}
	named, err := os.Lstat(b.Name())
	if err != nil || !os.SameFile(mine, named) {
		return fmt.Errorf("another backup to %s has just finished: try again", b.path) // this file may be that one
	}
	if !mine.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", b.Name())
	}
	return errors.Join(b.Chmod(0o600), b.Truncate(0)) // as secret as the cluster
}

// keep gives a whole backup its name, on the disk.
func (b *backupFile) keep() error {
	if err := b.Sync(); err != nil {
		return err
	}
	if err := os.Rename(b.Name(), b.path); err != nil {
		return err
	}
	return errors.Join(syncFolder(filepath.Dir(b.path)), b.Close())
}

// drop removes what is no backup.
func (b *backupFile) drop() error {
	err := os.Remove(b.Name())
	if errors.Is(err, os.ErrNotExist) {
		err = nil // it had its name already
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
