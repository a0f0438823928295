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
	"keelson.dev/keelson/raftstore/disk"
)

const (
	suffix  = ".backup"
	partial = ".partial"
	stamp   = "20060102T150405Z" // UTC
)

// folder is where the backups of one replica are. What has other names there is nobody's business: backups of other
// replicas and of other clusters, and files that a person put there.
type folder struct {
	path   string
	prefix string // of the names of this replica's backups
	// before is what the names began with that the release before gave. It has the cluster's name and not its ID, so that
	// another cluster's backups may have it, too: such a file is this replica's when its head names id.
	before string
	id     string // of the cluster
	// disk is the folder's, and maybe the store's: a store that finds its disk full ends its replica, and backups that go by one
	// schedule would fill those of all replicas in the same minute.
	disk diskheadroom.Target
}

func newFolder(c Config) folder {
	return folder{path: c.Folder, prefix: c.ID + "_" + c.Replica + "_", before: c.Cluster + "_" + c.Replica + "_", id: c.ID,
		disk: diskheadroom.Target{Dir: c.Folder, ProtectedPath: c.Store}}
}

// one is a backup in a folder.
type one struct {
	path string
	of   time.Time // the time for which it was made
}

func (f folder) String() string { return f.path }

func (f folder) name(at time.Time) string {
	return filepath.Join(f.path, f.prefix+at.UTC().Format(stamp)+suffix)
}

// list returns this replica's backups, the oldest first. Those of times to come, made before the clock was set back, count as
// older than all others: nobody knows when they were made. What was never whole is removed: only this replica makes such
// files, one after the other.
func (f folder) list(_ context.Context, now time.Time) (out []one, err error) {
	entries, err := os.ReadDir(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		whole, left := strings.CutSuffix(e.Name(), partial)
		at, named := f.made(whole, f.prefix)
		atBefore, namedBefore := f.made(whole, f.before)
		path := filepath.Join(f.path, e.Name())
		switch {
		case !e.Type().IsRegular():
			continue
		case named:
		case namedBefore && f.ours(path):
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
		out = append(out, one{path: path, of: at})
	}
	inOrder(out, now)
	return out, nil
}

// made is the time that a name with a prefix says.
func (f folder) made(name, prefix string) (at time.Time, named bool) {
	rest, named := strings.CutSuffix(name, suffix)
	rest, ours := strings.CutPrefix(rest, prefix)
	at, err := time.Parse(stamp, rest)
	return at, named && ours && err == nil
}

// ours says whether the head of a file, which is in clear, says that it is a backup of this cluster. Of one that age has
// sealed nobody can say whose it is: a person removes it.
func (f folder) ours(path string) bool {
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer in.Close()
	id, err := disk.BackupCluster(in)
	return err == nil && id == f.id
}

// inOrder sorts backups, the oldest first, those of times to come before all others.
func inOrder(out []one, now time.Time) {
	age := func(b one) int { // 0 or 1
		if b.of.After(now) {
			return 0
		}
		return 1
	}
	slices.SortFunc(out, func(a, b one) int { return cmp.Or(age(a)-age(b), a.of.Compare(b.of)) })
}

// write makes the backup of a time. It has its name once it was read back from the file system and says what was written;
// until then it has another one, and goes when anything fails.
func (f folder) write(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (size int64, err error) {
	if err := os.MkdirAll(f.path, 0o700); err != nil {
		return 0, err
	}
	if err := f.disk.CheckFree(f.likely(ctx, at)); err != nil {
		return 0, fmt.Errorf("--backup-folder: %w", err)
	}
	path := f.name(at)
	out, err := os.OpenFile(path+partial, os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_NOFOLLOW, 0o600) // as secret as the cluster
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
		return 0, fmt.Errorf("%s does not hold what was written to it", out.Name())
	}
	if err := ctx.Err(); err != nil { // who asked for it was told that none exists
		return 0, err
	}
	if err := os.Rename(path+partial, path); err != nil {
		return 0, err
	}
	return size, f.sync()
}

// likely is how long the next backup will be: as long as the one before it, as far as that tells.
func (f folder) likely(ctx context.Context, now time.Time) int64 {
	all, err := f.list(ctx, now)
	if err != nil || len(all) == 0 {
		return 0
	}
	info, err := os.Stat(all[len(all)-1].path)
	if err != nil {
		return 0
	}
	return info.Size()
}

func (f folder) sync() error {
	d, err := os.Open(f.path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// prune removes the oldest backups until there are as many as are to be kept.
func (f folder) prune(ctx context.Context, now time.Time, keep int) (removed []string, err error) {
	all, err := f.list(ctx, now)
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
