// Package disk mounts file systems on block devices of the node. It formats blank devices. It never
// writes to a device with content, except to repair a file system without loss of data.
//
// The content of a device is determined by blkid (util-linux). File systems are created and
// repaired by the tools of each type (mkfs.TYPE, fsck.TYPE).
package disk

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/mountoption"
)

const (
	// DefaultType is the file system of a blank device if no type is requested.
	DefaultType = "ext4"
	// toolTimeout bounds the creation or repair of a file system, which is slow on large devices.
	toolTimeout = 15 * time.Minute
	// probeTimeout bounds the probe of a device.
	probeTimeout = 30 * time.Second
	// maxToolOutput bounds the output of a tool in an error.
	maxToolOutput = 1000
)

// Mount describes how to mount a block device.
type Mount struct {
	Device string
	Dir    string   // an existing folder
	Type   string   // file system type; "" = the existing type, or DefaultType on a blank device
	Flags  []string // mount options
}

// Content is the content of a device. The zero value is a blank device.
type Content struct {
	Type  string // file system, or volume of another program: "crypto_LUKS", "LVM2_member"
	Table string // partition table: "gpt", "dos"
}

// typePattern matches valid file system types. The type becomes part of a tool's name (mkfs.TYPE),
// so other characters are refused.
var typePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,31}$`)

// Do mounts the block device at m.Dir. It formats a blank device. It repairs a file system that was
// not cleanly unmounted, if the repair loses no data. Only one Do per device may run at a time.
func (m Mount) Do(ctx context.Context) error {
	if m.Type != "" && !typePattern.MatchString(m.Type) {
		return fmt.Errorf("fsType %q is not a valid file system type", m.Type)
	}
	free, protected, err := deviceState(m.Device)
	if err != nil {
		return err
	}
	has, err := Probe(ctx, m.Device)
	if err != nil {
		return err
	}
	bits, rest := mountoption.SplitFlags(m.Flags)
	kind, err := m.fileSystemType(has)
	if err != nil {
		return err
	}
	readOnly := bits&unix.MS_RDONLY != 0
	switch {
	case protected && !readOnly:
		return fmt.Errorf("block device %s is write-protected: mount it with the option ro", m.Device)
	case has == Content{} && !free:
		return fmt.Errorf("block device %s is in use by another program and has no file system", m.Device)
	case has == Content{} && readOnly:
		return fmt.Errorf("block device %s is blank and cannot be mounted read-only: create its file system first, or "+
			"mount it once with write access", m.Device)
	case has == Content{}:
		err = makeFileSystem(ctx, m.Device, kind)
	case free && !readOnly:
		err = repairFileSystem(ctx, m.Device, kind)
	}
	if err != nil {
		return err
	}
	return explainMountError(unix.Mount(m.Device, m.Dir, kind, bits, strings.Join(rest, ",")), m, kind)
}

// fileSystemType returns the file system type to mount or create, given the content of the device.
// It returns an error if the content is not the requested file system.
func (m Mount) fileSystemType(has Content) (string, error) {
	switch {
	case has == Content{} && m.Type == "":
		return DefaultType, nil
	case has == Content{}:
		return m.Type, nil
	case has.Table != "" && has.Type == "":
		return "",
			fmt.Errorf("block device %s has a partition table (%s) and is not changed: use one of its partitions",
				m.Device, has.Table)
	case m.Type != "" && !isSameDriver(m.Type, has.Type):
		return "",
			fmt.Errorf("block device %s contains %s and is not changed, but fsType is %s: use %s to keep "+
				"that file system, "+
				"or empty the device with 'wipefs -a %s'", m.Device, has.Type, m.Type, has.Type, m.Device)
	case m.Type != "":
		return m.Type, nil
	}
	return has.Type, nil
}

// isSameDriver reports whether the kernel can mount a file system of type has as type asked: one
// driver serves all ext types.
func isSameDriver(asked, has string) bool {
	ext := func(t string) bool { return t == "ext2" || t == "ext3" || t == "ext4" }
	return asked == has || ext(asked) && ext(has)
}

// explainMountError adds the likely cause to an error of mount(2). kind is the file system type.
func explainMountError(err error, m Mount, kind string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV):
		err = fmt.Errorf("the node's kernel does not support file system %s: %w", kind, err)
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		err = fmt.Errorf("%w: %w", needsRepair(m.Device, kind), err)
	case errors.Is(err, unix.EINVAL):
		err = fmt.Errorf("file system %[2]s does not support one of the options %[1]q, or it is damaged (see the "+
			"node's kernel log): %[3]w", m.Flags, kind, err)
	}
	return fmt.Errorf("mounting %s at %s as %s: %w", m.Device, m.Dir, kind, err)
}

// ErrNeedsRepair is returned for a file system that needs a repair that may lose data.
var ErrNeedsRepair = errors.New("needs a repair that may lose data and must be run manually")

func needsRepair(device, kind string) error {
	repair := "fsck." + kind + " " + device
	switch {
	case isSameDriver(kind, "ext4"):
		repair = "e2fsck -f " + device
	case kind == "xfs":
		repair = "xfs_repair " + device
	}
	return fmt.Errorf("the file system on %s %w: %s", device, ErrNeedsRepair, repair)
}

// deviceState returns whether a device is free, that is, neither mounted nor otherwise in use, and
// whether it is write-protected.
func deviceState(device string) (free, protected bool, err error) {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK, 0)
	if free = err == nil; errors.Is(err, unix.EBUSY) {
		f, err = os.OpenFile(device, os.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return false, false, fmt.Errorf("block device %s: %w", device, err)
	}
	defer f.Close()
	ro, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	if err != nil {
		return false, false, fmt.Errorf("block device %s: whether it is write-protected: %w", device, err)
	}
	return free, ro != 0, nil
}

// Probe returns the content of a device. A device is blank only if its start and its end are
// readable and blkid recognizes nothing. Traces of several file systems are an error.
func Probe(ctx context.Context, device string) (Content, error) {
	if err := checkReadable(device); err != nil {
		return Content{}, fmt.Errorf("block device %s cannot be read: %w", device, err)
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	out, err := runTool(ctx, "util-linux", "blkid", "-p", "-o", "export", "-s", "TYPE", "-s", "PTTYPE", device)
	switch code := exitCode(err); {
	case err == nil:
	case code == 2: // blkid found nothing, or nothing of these kinds
		return Content{}, nil
	case code == 8:
		return Content{},
			fmt.Errorf("block device %s has signatures of several file systems and is not changed: see 'wipefs %s'",
				device, device)
	default:
		return Content{}, err
	}
	var c Content
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		switch name, value, _ := strings.Cut(lines.Text(), "="); name {
		case "TYPE":
			c.Type = value
		case "PTTYPE":
			c.Table = value
		}
	}
	if c == (Content{}) {
		return c, fmt.Errorf("block device %s has unknown content and is not changed: %s", device, bytes.TrimSpace(out))
	}
	return c, nil
}

// checkReadable returns an error if a part of the device that may contain a file system signature
// cannot be read. blkid reports an unreadable device as blank.
func checkReadable(device string) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if size == 0 {
		return errors.New("its size is 0")
	}
	b := make([]byte, min(size, 1<<20))
	for _, at := range []int64{0, size - int64(len(b))} {
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
	}
	return nil
}

// makeFileSystem creates a file system of type kind on a blank device.
func makeFileSystem(ctx context.Context, device, kind string) error {
	args := []string{device}
	if isSameDriver(kind, "ext4") {
		args = []string{"-q", "-F", "-m", "0", device}
	}
	if _, err := runTool(ctx, packageOf(kind), "mkfs."+kind, args...); err != nil {
		return fmt.Errorf("creating the file system of the blank device %s: %w", device, err)
	}
	return nil
}

// repairFileSystem repairs a file system of type kind that was not cleanly unmounted, if the repair
// loses no data. Otherwise it returns ErrNeedsRepair. Types that recover when they are mounted have
// no repair tool, or one without effect.
func repairFileSystem(ctx context.Context, device, kind string) error {
	args := []string{"-a", device}
	if isSameDriver(kind, "ext4") {
		args = []string{"-p", device}
	}
	_, err := runTool(ctx, packageOf(kind), "fsck."+kind, args...)
	switch code := exitCode(err); {
	case err == nil, errors.Is(err, exec.ErrNotFound):
		return nil
	case code < 0: // the tool was killed, or could not be run
		return fmt.Errorf("checking the file system on %s: %w", device, err)
	case code&4 != 0:
		return fmt.Errorf("%w: %w", needsRepair(device, kind), err)
	case code&^3 != 0:
		return fmt.Errorf("checking the file system on %s: %w", device, err)
	}
	return nil // all errors were corrected
}

// packageOf returns the name of the distribution package with mkfs and fsck for a file system type.
// Most distributions use this name.
func packageOf(kind string) string {
	switch {
	case isSameDriver(kind, "ext4"):
		return "e2fsprogs"
	case kind == "btrfs":
		return "btrfs-progs"
	case kind == "vfat":
		return "dosfstools"
	}
	return kind + "progs"
}

// exitCode returns the exit code of a failed program. It is 0 if err is nil, and -1 for an error
// without an exit code.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// runTool runs a program of the node and returns its output. The package name from is for the error
// if the program is missing. The program is killed when this process exits.
func runTool(ctx context.Context, from, name string, args ...string) ([]byte, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("%s is not installed on the node: install %s: %w", name, from, exec.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	c := exec.CommandContext(ctx, path, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // no unsupervised process may write to a device
	out, err := c.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out[:min(len(out), maxToolOutput)]))
	}
	return out, nil
}
