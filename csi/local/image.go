package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/mountoption"
)

const (
	// mib is the grain of sizes.
	mib = 1 << 20
	// smallest is the least that a file system with a journal fits into.
	smallest = 16 * mib
	// blockSize is that of the file systems in images, whatever their size: so that they grow far.
	blockSize = 4096
	// loopMajor is the device number of loop devices.
	loopMajor = 7
	// toolPatience bounds the making and the repair of a file system.
	toolPatience = time.Minute
	// growFS is EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64): it takes the new number of blocks.
	growFS = 0x40086610
)

// makeImage makes the file that holds a volume, with an empty file system in it.
func makeImage(ctx context.Context, path string, size int64) error {
	return makeFile(path, size, func(f *os.File) error {
		if err := tool(ctx, "mkfs.ext4", "-q", "-F", "-b", strconv.Itoa(blockSize), "-m", "0", "-E", "nodiscard,root_owner=0:0", path); err != nil {
			return err
		}
		// What mkfs wants to be zero it may have given back to the disk, on file systems that cannot do better.
		if err := allocate(f, size); err != nil {
			return fmt.Errorf("taking %d bytes of the disk: %w", size, err)
		}
		return nil
	})
}

// errTool says that a program is missing that the driver needs.
var errTool = errors.New("is not installed on the node: install e2fsprogs")

func tool(ctx context.Context, name string, args ...string) error {
	path, err := exec.LookPath(name)
	if err != nil {
		return fmt.Errorf("%s %w", name, errTool)
	}
	ctx, cancel := context.WithTimeout(ctx, toolPatience)
	defer cancel()
	c := exec.CommandContext(ctx, path, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing writes to an image whose driver is gone
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out[:min(len(out), 1000)]))
	}
	return nil
}

// loop is a block device that shows an image.
type loop struct {
	*os.File
	number uint64
}

// attached returns the loop device that shows an image already; nil when there is none. An image is never shown by two:
// each would write without knowing of the other.
func attached(image string) (*loop, error) {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil {
		return nil, fmt.Errorf("%s: %w", image, err)
	}
	busy, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, b := range busy {
		name := filepath.Base(filepath.Dir(filepath.Dir(b)))
		n, err := strconv.ParseUint(strings.TrimPrefix(name, "loop"), 10, 32)
		if err != nil {
			continue
		}
		f, err := os.OpenFile("/dev/"+name, os.O_RDWR, 0)
		if err != nil {
			continue // it went meanwhile
		}
		if i, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil && i.Inode == st.Ino && i.Device == st.Dev {
			return &loop{f, n}, nil
		}
		f.Close()
	}
	return nil, nil
}

// attach has a loop device show an image. The device is free again by itself when nobody has it open or mounted. fresh is
// false for one that showed the image already: it may be mounted.
func attach(image string) (l *loop, fresh bool, err error) {
	if l, err := attached(image); l != nil || err != nil {
		return l, false, err
	}
	l, err = show(image)
	return l, true, err
}

func show(image string) (*loop, error) {
	f, err := os.OpenFile(image, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the node has no loop devices: %w", err)
	}
	defer control.Close()
	cfg := unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], image)
	for range 64 { // others take devices as well, between the two calls
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("looking for a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("opening a free loop device: %w", err)
		}
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg); err == nil {
			return &loop{dev, uint64(n)}, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("showing %s as /dev/loop%d: %w", image, n, err)
		}
	}
	return nil, errors.New("no loop device stays free long enough")
}

// shown says whether a path is a mount of the file system in an image.
func shown(image, path string) (bool, error) {
	if ok, err := mountinfo.Mounted(path); err != nil || !ok {
		return false, err
	}
	var at unix.Stat_t
	if err := unix.Stat(path, &at); err != nil {
		return false, err
	}
	l, err := attached(image)
	if l == nil || err != nil {
		return false, err
	}
	defer l.Close()
	return at.Dev == unix.Mkdev(loopMajor, uint32(l.number)), nil
}

// mountImage mounts what is in an image at a path, and has it fill the image. A file system that was not left cleanly
// beyond what its journal mends is repaired as far as that loses nothing.
func mountImage(ctx context.Context, image, path string, flags []string) error {
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	mounted, err := mountinfo.Mounted(path)
	if err != nil {
		return err
	}
	if mounted {
		ok, err := shown(image, path)
		if err == nil && !ok {
			err = fmt.Errorf("something else is mounted at %s", path)
		}
		return err
	}
	l, fresh, err := attach(image)
	if err != nil {
		return err
	}
	defer l.Close()
	if fresh {
		if err := fillUnmounted(ctx, l); err != nil {
			return fmt.Errorf("growing the file system in %s: %w", image, err)
		}
	}
	bits, rest := mountoption.SplitFlags(flags)
	try := func() error { return unix.Mount(l.Name(), path, "ext4", bits, strings.Join(rest, ",")) }
	if err = try(); err != nil && !errors.Is(err, unix.EINVAL) {
		if mend := tool(ctx, "e2fsck", "-p", l.Name()); mend != nil && !mended(mend) {
			return fmt.Errorf("mounting %s: %w; its file system needs a repair that may lose data, which is yours to run: e2fsck -f %s: %w", image, err, image, mend)
		}
		err = try()
	}
	if err != nil {
		return fmt.Errorf("mounting %s at %s with options %q: %w", image, path, flags, err)
	}
	return nil
}

// mended says of an error of e2fsck that all it found is corrected.
func mended(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == 1
}

// short says whether a file system does not take all of its device, and how many blocks that has.
func short(l *loop) (blocks uint64, is bool, err error) {
	size, err := l.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, false, err
	}
	var super [0x154]byte // of its superblock
	if _, err := l.ReadAt(super[:], 1024); err != nil {
		return 0, false, fmt.Errorf("reading the superblock of %s: %w", l.Name(), err)
	}
	has := uint64(binary.LittleEndian.Uint32(super[0x150:]))<<32 | uint64(binary.LittleEndian.Uint32(super[4:]))
	blocks = uint64(size) / blockSize
	return blocks, has < blocks, nil
}

// errOffline says that a volume is larger than its file system, which cannot grow before it is unmounted.
var errOffline = errors.New("while it is mounted")

// fill has a mounted file system take all of its device, unless it does.
func fill(l *loop, path string) error {
	blocks, is, err := short(l)
	if err != nil || !is {
		return err
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = ioctl(dir, growFS, &blocks)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("growing the file system at %s %w: %w: the agent needs the capability CAP_SYS_RESOURCE; "+
			"without it the volume grows when all pods that use it have ended", path, errOffline, err)
	}
	if err != nil {
		return fmt.Errorf("growing the file system at %s to %d blocks: %w", path, blocks, err)
	}
	return nil
}

// fillUnmounted does so with a file system that is not mounted.
func fillUnmounted(ctx context.Context, l *loop) error {
	_, is, err := short(l)
	if err != nil || !is {
		return err
	}
	if err := tool(ctx, "e2fsck", "-f", "-p", l.Name()); err != nil && !mended(err) {
		return err
	}
	return tool(ctx, "resize2fs", l.Name())
}

// growImage makes an image larger, and the file system in it where that is mounted; otherwise it grows when it is.
// What was done already is left.
func growImage(image string, size int64) error {
	f, err := os.OpenFile(image, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if err := allocate(f, size); err != nil {
		// Part of it may have been taken. Of a larger size nobody has been told.
		return errors.Join(fmt.Errorf("taking %d bytes of the disk: %w", size, err), f.Truncate(st.Size()))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	l, err := attached(image)
	if l == nil || err != nil {
		return err
	}
	defer l.Close()
	if err := unix.IoctlSetInt(int(l.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("telling %s of its size: %w", l.Name(), err)
	}
	at, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Major != loopMajor || m.Minor != int(l.number) || m.Root != "/" || strings.Contains(","+m.Options+",", ",ro,"), false
	})
	if err != nil || len(at) == 0 {
		return err
	}
	return fill(l, at[0].Mountpoint)
}
