package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/durable"
)

// settleTree creates a directory if it is missing, and makes everything in it durable before it is
// read.
//
// Data of the previous process can be readable without being on the disk: the process was killed
// before it had synced, or a sync had failed. After a failed sync, Linux marks the pages as clean
// and never writes them. A replica that relies on such data would acknowledge data that the next
// power failure removes. settleTree therefore syncs all files and directories, and removes the
// files from the page cache. It omits the files for which skip returns true, namely files that were
// synced before they got their names.
func settleTree(dir string, skip func(path string) bool) error {
	if err := durable.MakeDir(dir); err != nil {
		return err
	}
	return filepath.WalkDir(dir+"/", func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed concurrently
		case err != nil:
			return err
		case e.IsDir():
			return durable.Sync(path)
		case !e.Type().IsRegular() || skip(path):
			return nil
		}
		return settleFile(path)
	})
}

// settleFile syncs a file and removes it from the page cache.
func settleFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = f.Sync()
	if err == nil {
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("settling %s: %w", path, err)
	}
	return nil
}
