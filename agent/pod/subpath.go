package pod

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

// SubPaths resolves a volume's subPath safely for a mount. A process in a pod may replace
// directories in the volume by links out of it at any time. Therefore the path is opened once below
// the volume's root, and the opened file is bind-mounted to a path that the pod cannot reach.
type SubPaths interface {
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

// BindSubPaths implements SubPaths with bind mounts. It needs root.
type BindSubPaths struct {
	find func(volume, sub string) (found, error) // nil: findSubPath

	mu     sync.Mutex
	asked  map[string]time.Time // by volume and subPath: since when an open has been pending
	hanged int                  // number of goroutines blocked in the kernel for longer than subPathWait
}

// found is an opened subPath.
type found struct {
	held *os.File
	dir  bool
}

// mostHang bounds the threads that are blocked in the kernel by unresponsive file systems.
const mostHang = 64

// Bind implements SubPaths.
func (b *BindSubPaths) Bind(ctx context.Context, target, volume, sub string) (string, error) {
	if !filepath.IsLocal(sub) {
		return "", fmt.Errorf("subPath %q leads out of the volume", sub)
	}
	f, err := b.ask(ctx, volume, sub)
	if err != nil {
		return "", err
	}
	defer f.held.Close()
	if err := b.Release(target); err != nil {
		return "", err
	}
	if err := mountPoint(target, f.dir); err != nil {
		return "", err
	}
	if err := unix.Mount(safepath.ProcPath(f.held), target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return "", fmt.Errorf("binding subPath %q: %w", sub, err)
	}
	return target, nil
}

// ask opens a subPath and waits at most subPathWait for it. If the open blocks in the kernel, ask
// returns an error. Later calls for the same subPath return an error until the open has ended.
func (b *BindSubPaths) ask(ctx context.Context, volume, sub string) (found, error) {
	key := volume + "\x00" + sub
	b.mu.Lock()
	since, waits := b.asked[key]
	switch {
	case waits:
		b.mu.Unlock()
		return found{}, fmt.Errorf("subPath %q: the file system of the volume has not answered for %s: is its server there?",
			sub, time.Since(since).Round(time.Second))
	case b.hanged >= mostHang:
		b.mu.Unlock()
		return found{}, fmt.Errorf("subPath %q: %d file systems of volumes on this node do not answer, no other one is asked meanwhile", sub, mostHang)
	}
	if b.asked == nil {
		b.asked = map[string]time.Time{}
	}
	b.asked[key] = time.Now()
	b.mu.Unlock()

	type answer struct {
		found
		err error
	}
	answers, find := make(chan answer), b.find
	if find == nil {
		find = findSubPath
	}
	gaveUp := make(chan struct{})
	go func() {
		f, err := find(volume, sub)
		b.mu.Lock()
		delete(b.asked, key)
		b.mu.Unlock()
		select {
		case answers <- answer{f, err}:
		case <-gaveUp:
			if f.held != nil {
				f.held.Close()
			}
			b.mu.Lock()
			b.hanged--
			b.mu.Unlock()
		}
	}()
	late := time.NewTimer(subPathWait)
	defer late.Stop()
	var why error
	select {
	case a := <-answers:
		return a.found, a.err
	case <-late.C:
		why = fmt.Errorf("subPath %q: the file system of the volume has not answered for %s: is its server there?", sub, subPathWait)
	case <-ctx.Done():
		why = fmt.Errorf("subPath %q: %w", sub, ctx.Err())
	}
	b.mu.Lock()
	b.hanged++
	b.mu.Unlock()
	close(gaveUp)
	return found{}, why
}

// findSubPath opens a subPath. It creates a directory if the subPath does not exist.
func findSubPath(volume, sub string) (found, error) {
	held, err := safepath.OpenBeneath(volume, sub)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeSubPath(volume, sub); err != nil {
			return found{}, fmt.Errorf("making subPath %q: %w", sub, err)
		}
		held, err = safepath.OpenBeneath(volume, sub)
	}
	if err != nil {
		return found{}, fmt.Errorf("subPath %q: %w", sub, err)
	}
	st, err := held.Stat()
	if err != nil {
		held.Close()
		return found{}, err
	}
	return found{held, st.IsDir()}, nil
}

// makeSubPath creates the missing directories of a subPath with the mode and the owner of the
// volume's root. Users that may write there may therefore write here.
func makeSubPath(volume, sub string) error {
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
		return fmt.Errorf("the owner of %s cannot be known", volume)
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

func mountPoint(target string, dir bool) error {
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

// Release implements SubPaths.
func (*BindSubPaths) Release(dir string) error {
	points, err := mountPoints(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range points {
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// mountPoints returns the mount points at or below dir, the deepest and newest first.
func mountPoints(dir string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	real, err := filepath.EvalSymlinks(dir)
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
		p := unescape(f[4])
		if p == real || strings.HasPrefix(p, real+"/") {
			out = append(out, p)
		}
	}
	slices.Reverse(out)
	return out, nil
}

// unescape decodes the octal escapes of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
