// Package subpath mounts subPaths of volumes safely.
package subpath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/safepath"
)

// Mounter bind-mounts subPaths of volumes safely. A process in a pod may replace directories in the
// volume by links out of it at any time. Therefore the path is opened once below the volume's root,
// and the opened file is bind-mounted to a path that the pod cannot reach.
type Mounter interface {
	// Bind bind-mounts volume/sub to target and returns the path to mount. It creates sub as a
	// directory if it does not exist. Idempotent. It returns an error if the server of a volume
	// does not respond.
	Bind(ctx context.Context, target, volume, sub string) (string, error)
	// Release unmounts everything at or below dir; it is safe if nothing is mounted.
	Release(dir string) error
}

// subPathWait is how long a volume's file system may take to open a subPath. An unreachable server
// would block forever.
const subPathWait = 10 * time.Second

// BindMounter implements Mounter with bind mounts. It needs root.
type BindMounter struct {
	open func(volume, sub string) (openedSubPath, error) // nil: openOrCreateSubPath

	mu           sync.Mutex
	pendingOpens map[string]time.Time // by volume and subPath: since when an open has been pending
	hungOpens    int                  // number of goroutines blocked in the kernel for longer than subPathWait
}

// openedSubPath is the open file or directory to which a subPath leads.
type openedSubPath struct {
	file  *os.File
	isDir bool
}

// maxHungOpens bounds the threads that are blocked in the kernel by unresponsive file systems.
const maxHungOpens = 64

// Bind implements Mounter.
func (b *BindMounter) Bind(ctx context.Context, target, volume, sub string) (string, error) {
	if !filepath.IsLocal(sub) {
		return "", fmt.Errorf("subPath %q is outside of the volume", sub)
	}
	f, err := b.openWithTimeout(ctx, volume, sub)
	if err != nil {
		return "", err
	}
	defer f.file.Close()
	if err := b.Release(target); err != nil {
		return "", err
	}
	if err := createMountPoint(target, f.isDir); err != nil {
		return "", err
	}
	if err := unix.Mount(safepath.ProcPath(f.file), target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return "", fmt.Errorf("binding subPath %q: %w", sub, err)
	}
	return target, nil
}

// openWithTimeout opens a subPath. It returns an error if the open blocks in the kernel for longer
// than subPathWait. Later calls for the same subPath return an error until the blocked open has
// ended.
func (b *BindMounter) openWithTimeout(ctx context.Context, volume, sub string) (openedSubPath, error) {
	key := volume + "\x00" + sub
	b.mu.Lock()
	since, waiting := b.pendingOpens[key]
	switch {
	case waiting:
		b.mu.Unlock()
		return openedSubPath{}, fmt.Errorf(
			"subPath %q: the file system of the volume has not responded for %s: check its server",
			sub, time.Since(since).Round(time.Second))
	case b.hungOpens >= maxHungOpens:
		b.mu.Unlock()
		return openedSubPath{}, fmt.Errorf(
			"subPath %q: %d file systems of volumes on this node do not respond: no other subPath is opened until one "+
				"of them responds",
			sub, maxHungOpens)
	}
	if b.pendingOpens == nil {
		b.pendingOpens = map[string]time.Time{}
	}
	b.pendingOpens[key] = time.Now()
	b.mu.Unlock()

	type answer struct {
		openedSubPath
		err error
	}
	answers, find := make(chan answer), b.open
	if find == nil {
		find = openOrCreateSubPath
	}
	gaveUp := make(chan struct{})
	go func() {
		f, err := find(volume, sub)
		b.mu.Lock()
		delete(b.pendingOpens, key)
		b.mu.Unlock()
		select {
		case answers <- answer{f, err}:
		case <-gaveUp:
			if f.file != nil {
				f.file.Close()
			}
			b.mu.Lock()
			b.hungOpens--
			b.mu.Unlock()
		}
	}()
	late := time.NewTimer(subPathWait)
	defer late.Stop()
	var cause error
	select {
	case a := <-answers:
		return a.openedSubPath, a.err
	case <-late.C:
		cause = fmt.Errorf("subPath %q: the file system of the volume has not responded for %s: check its server",
			sub, subPathWait)
	case <-ctx.Done():
		cause = fmt.Errorf("subPath %q: %w", sub, ctx.Err())
	}
	b.mu.Lock()
	b.hungOpens++
	b.mu.Unlock()
	close(gaveUp)
	return openedSubPath{}, cause
}

// openOrCreateSubPath opens an existing file or directory of a volume. If the subPath does not
// exist, it creates a directory.
func openOrCreateSubPath(volume, sub string) (openedSubPath, error) {
	held, err := safepath.OpenBeneath(volume, sub)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createSubPath(volume, sub); err != nil {
			return openedSubPath{}, fmt.Errorf("create subPath %q: %w", sub, err)
		}
		held, err = safepath.OpenBeneath(volume, sub)
	}
	if err != nil {
		return openedSubPath{}, fmt.Errorf("subPath %q: %w", sub, err)
	}
	st, err := held.Stat()
	if err != nil {
		held.Close()
		return openedSubPath{}, err
	}
	return openedSubPath{held, st.IsDir()}, nil
}

// createSubPath creates the missing directories of a subPath with the mode and the owner of the
// volume's root. Users that may write to the root may therefore write to the new directories.
func createSubPath(volume, sub string) error {
	root, err := os.OpenRoot(volume)
	if err != nil {
		return err
	}
	defer root.Close()
	st, err := root.Stat(".")
	if err != nil {
		return err
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("cannot determine the owner of %s", volume)
	}
	path := ""
	for _, part := range strings.Split(filepath.Clean(sub), "/") {
		path = filepath.Join(path, part)
		err := root.Mkdir(path, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = root.Lchown(path, int(owner.Uid), int(owner.Gid))
		}
		if err == nil {
			err = root.Chmod(path, st.Mode()&(fs.ModePerm|fs.ModeSetgid|fs.ModeSticky))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func createMountPoint(target string, dir bool) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	if dir {
		if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
		return os.MkdirAll(target, 0o750)
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(target, nil, 0o640)
}

// Release implements Mounter.
func (*BindMounter) Release(dir string) error {
	points, err := MountPointsBelow(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range points {
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// MountPointsBelow returns the mount points at or below dir, the deepest and newest first.
func MountPointsBelow(dir string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	resolved, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		p := unescapeMountinfo(f[4])
		if p == resolved || strings.HasPrefix(p, resolved+"/") {
			out = append(out, p)
		}
	}
	slices.Reverse(out)
	return out, nil
}

// unescapeMountinfo decodes the octal escapes of mountinfo.
func unescapeMountinfo(text string) string {
	if !strings.Contains(text, `\`) {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+3 < len(text) {
			if n, err := strconv.ParseUint(text[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(text[i])
	}
	return b.String()
}
