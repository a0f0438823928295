//go:build linux

package safepath

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrTooLarge is returned by ReadFile for a file with more than limit bytes.
var ErrTooLarge = errors.New("file too large")

// ReadFile returns the content of the regular file at path. It does not follow a symbolic link in
// the last element of path, never blocks, and never reads more than limit bytes. For a larger file
// the error is ErrTooLarge. Use it for every file that a container, an image or a volume can write.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > limit {
		return nil, fmt.Errorf("%s: %w: %d bytes, the limit is %d", path, ErrTooLarge, st.Size(), limit)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s: %w: the limit is %d bytes", path, ErrTooLarge, limit)
	}
	return b, nil
}

// Overwrite replaces the content of the regular file at path in place, so that containers that have
// it mounted see the new content. A missing file is created with the given mode. Overwrite does not
// follow a symbolic link in the last element of path, and writes only to regular files. It never
// blocks: if another process has a lease on the file, the error is unix.EAGAIN.
func Overwrite(path string, content []byte, mode fs.FileMode) error {
	f, err := openForWriting(path, mode)
	if err != nil {
		return err
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.Write(content)
	}
	return errors.Join(err, f.Close())
}

// openForWriting opens the regular file at path for writing, or creates it with the mode.
func openForWriting(path string, mode fs.FileMode) (*os.File, error) {
	const flags = unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK
	held, err := openRegularPath(path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, mode)
	}
	if err != nil {
		return nil, err
	}
	defer held.Close()
	return os.OpenFile(ProcPath(held), unix.O_WRONLY|unix.O_NONBLOCK, 0)
}
