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
	// mib is one MiB in bytes. Sizes of volumes are multiples of it.
	mib = 1 << 20
	// minVolumeBytes is the minimum size of a volume, so that its ext4 file system can have a
	// journal.
	minVolumeBytes = 16 * mib
	// blockSize is the block size of the file systems of all volumes. For small volumes, mkfs would
	// choose a smaller block size, which limits their growth.
	blockSize = 4096
	// loopMajor is the major device number of loop devices.
	loopMajor = 7
	// toolTimeout is the maximum duration of mkfs.ext4, e2fsck, and resize2fs.
	toolTimeout = time.Minute
	// ioctlResize is the request EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64), which grows a mounted
	// file system. Its argument is the new number of blocks.
	ioctlResize = 0x40086610
)

// createImage creates the backing file of a volume with an empty ext4 file system. All blocks are
// allocated.
func createImage(ctx context.Context, path string, size int64) error {
	return createAllocatedFile(path, size, func(f *os.File) error {
		if err := runTool(ctx, "mkfs.ext4", "-q", "-F", "-b", strconv.Itoa(blockSize), "-m", "0", "-E",
			"nodiscard,root_owner=0:0", path); err != nil {
			return err
		}
		// On some disks, mkfs zeroes parts of the file by releasing their blocks.
		if err := allocateBlocks(f, size); err != nil {
			return fmt.Errorf("allocating %d bytes on the disk: %w", size, err)
		}
		return nil
	})
}

// errToolMissing is returned if a program of e2fsprogs is not installed on the node.
var errToolMissing = errors.New("is not installed on the node: install e2fsprogs")

func runTool(ctx context.Context, name string, args ...string) error {
	path, err := exec.LookPath(name)
	if err != nil {
		return fmt.Errorf("%s %w", name, errToolMissing)
	}
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	c := exec.CommandContext(ctx, path, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // no writes after the driver exits
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out[:min(len(out), 1000)]))
	}
	return nil
}

// loopDevice is an open loop device that is attached to the backing file of a volume.
type loopDevice struct {
	*os.File
	number uint64
}

// findLoopDevice returns the loop device that is attached to the backing file image, or nil.
// Callers must not attach a second loop device, because the caches of the two would be
// inconsistent.
func findLoopDevice(image string) (*loopDevice, error) {
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
			continue // the device was removed meanwhile
		}
		if i, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil && i.Inode == st.Ino && i.Device == st.Dev {
			return &loopDevice{f, n}, nil
		}
		f.Close()
	}
	return nil, nil
}

// ensureLoopDevice returns the loop device of the backing file image. If no loop device exists, it
// attaches one and fresh is true. If fresh is false, the device may be mounted. The kernel detaches
// the device when it is neither open nor mounted.
func ensureLoopDevice(image string) (l *loopDevice, fresh bool, err error) {
	if l, err := findLoopDevice(image); l != nil || err != nil {
		return l, false, err
	}
	l, err = createLoopDevice(image)
	return l, true, err
}

func createLoopDevice(image string) (*loopDevice, error) {
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
	for range 64 { // another process may take the free device between the two calls
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("looking for a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("opening a free loop device: %w", err)
		}
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg); err == nil {
			return &loopDevice{dev, uint64(n)}, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attaching %s to /dev/loop%d: %w", image, n, err)
		}
	}
	return nil, errors.New("no loop device stays free long enough")
}

// isImageMount reports whether the file system in the backing file image is mounted at path.
func isImageMount(image, path string) (bool, error) {
	if ok, err := mountinfo.Mounted(path); err != nil || !ok {
		return false, err
	}
	var at unix.Stat_t
	if err := unix.Stat(path, &at); err != nil {
		return false, err
	}
	l, err := findLoopDevice(image)
	if l == nil || err != nil {
		return false, err
	}
	defer l.Close()
	return at.Dev == unix.Mkdev(loopMajor, uint32(l.number)), nil
}

// mountImage mounts the file system in the backing file image at path, and grows it to the size of
// the file. If the kernel cannot mount the file system, e2fsck repairs it, provided that no data
// are lost (e2fsck -p).
func mountImage(ctx context.Context, image, path string, flags []string) error {
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	mounted, err := mountinfo.Mounted(path)
	if err != nil {
		return err
	}
	if mounted {
		ok, err := isImageMount(image, path)
		if err == nil && !ok {
			err = fmt.Errorf("something else is mounted at %s", path)
		}
		return err
	}
	l, fresh, err := ensureLoopDevice(image)
	if err != nil {
		return err
	}
	defer l.Close()
	if fresh {
		if err := growUnmounted(ctx, l); err != nil {
			return fmt.Errorf("growing the file system in %s: %w", image, err)
		}
	}
	bits, rest := mountoption.SplitFlags(flags)
	try := func() error { return unix.Mount(l.Name(), path, "ext4", bits, strings.Join(rest, ",")) }
	if err = try(); err != nil && !errors.Is(err, unix.EINVAL) {
		if mend := runTool(ctx, "e2fsck", "-p", l.Name()); mend != nil && !isRepaired(mend) {
			return fmt.Errorf("mounting %s: %w; its file system needs a repair that may lose data, which is yours to "+
				"run: e2fsck -f %s: %w", image, err, image, mend)
		}
		err = try()
	}
	if err != nil {
		return fmt.Errorf("mounting %s at %s with options %q: %w", image, path, flags, err)
	}
	return nil
}

// isRepaired reports whether err is the exit status of e2fsck for "all errors were corrected".
func isRepaired(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == 1
}

// needsGrowth reports whether the file system on the loop device l is smaller than the device.
// blocks is the number of blocks of the device.
func needsGrowth(l *loopDevice) (blocks uint64, smaller bool, err error) {
	size, err := l.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, false, err
	}
	var super [0x154]byte // the start of the superblock
	if _, err := l.ReadAt(super[:], 1024); err != nil {
		return 0, false, fmt.Errorf("reading the superblock of %s: %w", l.Name(), err)
	}
	has := uint64(binary.LittleEndian.Uint32(super[0x150:]))<<32 | uint64(binary.LittleEndian.Uint32(super[4:]))
	blocks = uint64(size) / blockSize
	return blocks, has < blocks, nil
}

// errOfflineOnly means that a mounted file system is smaller than its volume, and can grow only
// while it is not mounted.
var errOfflineOnly = errors.New("while it is mounted")

// growMounted grows the file system on the loop device l, which is mounted at path, to the size of
// the device.
func growMounted(l *loopDevice, path string) error {
	blocks, is, err := needsGrowth(l)
	if err != nil || !is {
		return err
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = ioctlPointer(dir, ioctlResize, &blocks)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("growing the file system at %s %w: %w: the agent needs the capability CAP_SYS_RESOURCE; "+
			"without it the volume grows when all pods that use it have ended", path, errOfflineOnly, err)
	}
	if err != nil {
		return fmt.Errorf("growing the file system at %s to %d blocks: %w", path, blocks, err)
	}
	return nil
}

// growUnmounted grows the file system on the loop device l, which is not mounted, to the size of
// the device.
func growUnmounted(ctx context.Context, l *loopDevice) error {
	_, is, err := needsGrowth(l)
	if err != nil || !is {
		return err
	}
	if err := runTool(ctx, "e2fsck", "-f", "-p", l.Name()); err != nil && !isRepaired(err) {
		return err
	}
	return runTool(ctx, "resize2fs", l.Name())
}

// growImage grows the backing file image to size bytes. The file system in it grows as well: at
// once if it is mounted, otherwise at the next mount. The call is idempotent.
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
	if err := allocateBlocks(f, size); err != nil {
		// A part of the space may be allocated; it is released again.
		return errors.Join(fmt.Errorf("allocating %d bytes on the disk: %w", size, err), f.Truncate(st.Size()))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	l, err := findLoopDevice(image)
	if l == nil || err != nil {
		return err
	}
	defer l.Close()
	if err := unix.IoctlSetInt(int(l.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("updating the size of %s: %w", l.Name(), err)
	}
	at, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Major != loopMajor || m.Minor != int(l.number) || m.Root != "/" ||
			strings.Contains(","+m.Options+",", ",ro,"), false
	})
	if err != nil || len(at) == 0 {
		return err
	}
	return growMounted(l, at[0].Mountpoint)
}
