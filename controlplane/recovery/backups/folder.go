package backups

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk"
)

const (
	suffix     = ".backup"
	partial    = ".partial"
	timeFormat = "20060102T150405Z" // UTC
)

// folder is a directory with the backups of one replica. It may also contain backups of other
// replicas and clusters, and unrelated files, which are ignored.
type folder struct {
	path   string
	prefix string // common prefix of the names of this replica's backups
	// previousPrefix is the prefix of names that previous releases used. It contains the cluster's
	// name instead of its ID, so that it also matches backups of other clusters with the same name.
	// A file with this prefix belongs to this replica only if the cluster ID in its header is id.
	previousPrefix string
	id             string // ID of the cluster
	// disk checks the free space on the disk of the directory. If the store is on the same disk,
	// some space stays reserved for it. Otherwise scheduled backups could fill the disks of all
	// replicas at the same time, and a store stops its replica when the disk is full.
	disk diskheadroom.Target
}

func newFolder(c Config) folder {
	return folder{path: c.Folder, prefix: c.ID + "_" + c.Replica + "_",
		previousPrefix: c.Cluster + "_" + c.Replica + "_", id: c.ID,
		disk: diskheadroom.Target{Dir: c.Folder, ProtectedPath: c.Store}}
}

// storedBackup is a backup in a directory or bucket.
type storedBackup struct {
	path   string
	madeAt time.Time // the time in the name of the backup
}

func (f folder) String() string { return f.path }

func (f folder) backupName(at time.Time) string {
	return filepath.Join(f.path, f.prefix+at.UTC().Format(timeFormat)+suffix)
}

// listBackups returns this replica's backups, oldest first. It removes incomplete files: only this
// replica creates them, one at a time. A backup with a time in the future was made before the clock
// was set back. It is sorted before all others, because its age is unknown.
func (f folder) listBackups(_ context.Context, now time.Time) (out []storedBackup, err error) {
	entries, err := os.ReadDir(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		whole, left := strings.CutSuffix(e.Name(), partial)
		at, named := f.parseName(whole, f.prefix)
		atBefore, namedBefore := f.parseName(whole, f.previousPrefix)
		path := filepath.Join(f.path, e.Name())
		switch {
		case !e.Type().IsRegular():
			continue
		case named:
		case namedBefore && f.belongsToCluster(path):
			at = atBefore
		default:
			continue
		}
		if left {
			if err := os.Remove(path); err != nil {
				return nil, err
			}
			continue
		}
		out = append(out, storedBackup{path: path, madeAt: at})
	}
	sortBackups(out, now)
	return out, nil
}

// parseName returns the time in name, if name consists of prefix, a time and the suffix of backups.
// Otherwise ok is false.
func (f folder) parseName(name, prefix string) (at time.Time, ok bool) {
	rest, hasSuffix := strings.CutSuffix(name, suffix)
	rest, hasPrefix := strings.CutPrefix(rest, prefix)
	at, err := time.Parse(timeFormat, rest)
	return at, hasSuffix && hasPrefix && err == nil
}

// belongsToCluster reports whether the header of the backup file path contains the ID of this
// cluster. It returns false for a file that is encrypted with age, because its header is not
// readable. Such a file must be removed manually.
func (f folder) belongsToCluster(path string) bool {
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer in.Close()
	id, err := disk.ReadBackupCluster(in)
	return err == nil && id == f.id
}

// sortBackups sorts backups by time, oldest first. Backups with a time after now are sorted before
// all others.
func sortBackups(out []storedBackup, now time.Time) {
	age := func(b storedBackup) int { // 0 for a time in the future, otherwise 1
		if b.madeAt.After(now) {
			return 0
		}
		return 1
	}
	slices.SortFunc(out, func(a, b storedBackup) int { return cmp.Or(age(a)-age(b), a.madeAt.Compare(b.madeAt)) })
}

// writeBackup writes a backup to a file with a temporary name and reads it back. If the content
// equals the written data, it gives the file its final name. After an error, the file is removed.
func (f folder) writeBackup(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (
	size int64, err error,
) {
	if err := os.MkdirAll(f.path, 0o700); err != nil {
		return 0, err
	}
	if err := f.disk.CheckFree(f.expectedSize(ctx, at)); err != nil {
		return 0, fmt.Errorf("--backup-folder: %w", err)
	}
	path := f.backupName(at)
	// the backup contains all secrets of the cluster
	out, err := os.OpenFile(path+partial, os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, out.Close())
		if err != nil {
			err = errors.Join(err, os.Remove(path+partial))
		}
	}()
	sum := sha256.New()
	if err := content(ctx, io.MultiWriter(f.disk.Writer(out), sum)); err != nil {
		return 0, err
	}
	if err := out.Sync(); err != nil {
		return 0, err
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	again := sha256.New()
	if size, err = io.Copy(again, out); err != nil {
		return 0, err
	}
	if !bytes.Equal(sum.Sum(nil), again.Sum(nil)) {
		return 0, fmt.Errorf("%s differs from the data that was written", out.Name())
	}
	if err := ctx.Err(); err != nil { // the caller has abandoned the operation
		return 0, err
	}
	return size, durable.Rename(path+partial, path)
}

// expectedSize returns the size of the last backup in bytes, as an estimate for the next backup. It
// returns 0 if the folder contains no backup.
func (f folder) expectedSize(ctx context.Context, now time.Time) int64 {
	all, err := f.listBackups(ctx, now)
	if err != nil || len(all) == 0 {
		return 0
	}
	info, err := os.Stat(all[len(all)-1].path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// pruneBackups removes the oldest backups until keep backups are left.
func (f folder) pruneBackups(ctx context.Context, now time.Time, keep int) (removed []string, err error) {
	all, err := f.listBackups(ctx, now)
	if err != nil {
		return nil, err
	}
	for ; len(all) > keep; all = all[1:] {
		if err := os.Remove(all[0].path); err != nil {
			return removed, err
		}
		removed = append(removed, filepath.Base(all[0].path))
	}
	return removed, nil
}
