package replica

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// What the last process wrote can be read without being on the disk: it was
// killed before it had synced, or a sync had failed, after which Linux counts
// the pages as clean and writes them never. A replica that built on it would
// acknowledge what the next power cut takes away.

// settle sees to it that what is read of a file from now on is on the disk:
// what can still be written is, and what the kernel has in memory it forgets.
func settle(f *os.File) error {
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// settleData does the same for what is in the folders of a data directory, and
// for raft.db, which is mapped later; other files are settled when they are opened.
func settleData(dir string) error {
	for _, folder := range []string{dir, filepath.Join(dir, snapshotsName), filepath.Join(dir, walName)} {
		if err := syncFolder(folder); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	f, err := os.Open(filepath.Join(dir, boltName))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := errors.Join(settle(f), f.Close()); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}
